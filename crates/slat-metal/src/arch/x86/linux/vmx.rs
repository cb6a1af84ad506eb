//! A CPU with VMX, as Linux needs it.

#![expect(unsafe_code, reason = "runs a guest")]

use alloc::boxed::Box;

use slat::PAGE_SIZE;
use spin::Once;

use super::cpu::PcCpu;
use super::identity::{self, MsrUse};
use super::state::State as Moved;
use crate::arch::x86::registers::{EFER_LMA, Event, Registers, State};
use crate::arch::x86::vmx::vmcs::Field;
use crate::arch::x86::vmx::{Held, MsrBitmap, VmxCpu};
use crate::fail;
use crate::virtual_cpu::SecondStage;

/// The model-specific registers that the guest uses without an exit.
fn msrs() -> &'static MsrBitmap {
    static MSRS: Once<Box<MsrBitmap>> = Once::new();
    MSRS.call_once(|| {
        let mut map = MsrBitmap::new();
        for (msr, allowed) in identity::msrs() {
            match allowed {
                MsrUse::Read => map.allow_reads(msr),
                MsrUse::ReadAndWrite => map.allow(msr),
            }
        }
        map
    })
}

impl PcCpu for VmxCpu {
    unsafe fn with_machine(second_stage: SecondStage) -> VmxCpu {
        // SAFETY: as the caller promises.
        let mut cpu = unsafe { VmxCpu::with_held(second_stage, Held::Machine) };
        // A bit for each port, as with SVM; here the map has two halves of a page each (Intel SDM
        // vol. 3C, "I/O-Bitmap Addresses").
        let ports = identity::ports().address();
        // SAFETY: the maps stay for ever. They let the guest use what it may have.
        unsafe {
            cpu.vmcs.write_all(&[
                (Field::PortMapA, ports),
                (Field::PortMapB, ports + PAGE_SIZE),
                (Field::MsrMap, msrs().address()),
            ]);
        }
        cpu
    }

    fn set_state(&mut self, state: &State) {
        VmxCpu::set_state(self, state);
    }

    fn registers(&mut self) -> &mut Registers {
        &mut self.registers
    }

    fn rax(&self) -> u64 {
        self.registers.rax
    }

    fn rsp(&self) -> u64 {
        self.vmcs.read(Field::GuestRsp)
    }

    fn efer(&self) -> u64 {
        self.vmcs.read(Field::GuestEfer)
    }

    fn set_efer(&mut self, value: u64) {
        let efer = value & !EFER_LMA | self.efer() & EFER_LMA;
        // SAFETY: a field of the guest.
        unsafe { self.vmcs.write(Field::GuestEfer, efer) };
    }

    fn inject(&mut self, event: Event) {
        VmxCpu::inject(self, event.bits(), 0);
    }

    fn moved(&mut self) -> Option<Box<Moved>> {
        fail!("a guest migrates with SVM alone")
    }

    fn become_moved(&mut self, _state: &Moved, _tsc_offset: u64) {
        fail!("a guest migrates with SVM alone")
    }
}
