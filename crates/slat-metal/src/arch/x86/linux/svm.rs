//! A CPU with SVM, as Linux needs it.

#![expect(unsafe_code, reason = "runs a guest")]

use alloc::boxed::Box;

use spin::Once;

use super::cpu::PcCpu;
use super::identity::{self, MsrUse};
use super::state::State as Moved;
use crate::arch::x86::registers::{EFER_LMA, Event, Registers, State};
use crate::arch::x86::svm::vmcb::MsrMap;
use crate::arch::x86::svm::{Allowed, SvmCpu};
use crate::virtual_cpu::SecondStage;

/// EFER.SVME, which VMRUN requires and the guest does not see.
const SVME: u64 = 1 << 12;

/// What the guest does without an exit.
fn allowed() -> Allowed {
    static MSRS: Once<Box<MsrMap>> = Once::new();
    let msrs = MSRS.call_once(|| {
        let mut map = MsrMap::new();
        for (msr, allowed) in identity::msrs() {
            match allowed {
                MsrUse::Read => map.allow_reads(msr),
                MsrUse::ReadAndWrite => map.allow(msr),
            }
        }
        map
    });
    Allowed { ports: identity::ports(), msrs }
}

impl PcCpu for SvmCpu {
    unsafe fn with_machine(second_stage: SecondStage) -> SvmCpu {
        // SAFETY: as the caller promises.
        unsafe { SvmCpu::with_allowed(second_stage.root, allowed()) }
    }

    fn set_state(&mut self, state: &State) {
        let save = self.save();
        [save.cs, save.ss, save.ds, save.es, save.fs, save.gs, save.tr, save.ldtr] = state.segments();
        (save.gdtr, save.idtr) = (state.gdtr, state.idtr);
        (save.cr0, save.cr3, save.cr4) = (state.cr0, state.cr3, state.cr4);
        save.efer = state.efer | SVME;
        (save.rip, save.rsp, save.rflags) = (state.rip, state.rsp, 2);
        (save.dr6, save.dr7) = (0xffff_0ff0, 0x400);
    }

    fn registers(&mut self) -> &mut Registers {
        &mut self.registers
    }

    fn rax(&self) -> u64 {
        self.saved().rax
    }

    fn rsp(&self) -> u64 {
        self.saved().rsp
    }

    fn efer(&self) -> u64 {
        self.saved().efer & !SVME
    }

    fn set_efer(&mut self, value: u64) {
        let save = self.save();
        save.efer = value & !EFER_LMA | save.efer & EFER_LMA | SVME;
    }

    fn inject(&mut self, event: Event) {
        SvmCpu::inject(self, event);
    }

    fn moved(&mut self) -> Option<Box<Moved>> {
        Moved::of(self)
    }

    fn become_moved(&mut self, state: &Moved, tsc_offset: u64) {
        state.give_to(self, tsc_offset);
    }
}
