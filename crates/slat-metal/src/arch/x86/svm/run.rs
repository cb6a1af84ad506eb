//! A virtual CPU: entries into the guest, and why it left.
//!
//! # An entry
//! The global interrupt flag is off from before the CPU looks for a flush until after the guest has
//! left ([`Presence`]). An NMI that arrives meanwhile is kept, and makes the guest leave at once
//! (AMD APM vol. 2, 15.17 "Global Interrupt Flag"). Without that, a kick between the look and VMRUN
//! would be lost.
//!
//! VMRUN leaves FS, GS, TR, LDTR and the system-call registers as they are (15.5.2): VMLOAD and
//! VMSAVE exchange them. The floating-point state is exchanged by FXSAVE, since compiled code of
//! the image uses SSE registers.

#![expect(unsafe_code, reason = "enters a guest")]

use alloc::boxed::Box;
use core::marker::PhantomData;

use slat::format::Npt;
use slat::{Access, Gpa, Hpa};
use spin::Once;

use super::vmcb::{Intercepts, MoreIntercepts, MsrMap, PortMap, Save, Segment, TlbControl, Vmcb};
use crate::arch::x86::apic::Kick;
use crate::arch::x86::registers::{
    Direction, EVENT_VALID as VALID, Event, Hypercall, Registers, START_CR0, START_CR4, Trap, as_code_expects,
    move_common, registers_asm,
};
use crate::cpus::{Flush, Presence};
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};

/// What to deliver again after an exit during a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Again {
    Nothing,
    /// An interrupt.
    Interrupt {
        vector: u64,
    },
    /// Another event, as it is injected.
    Event(u64),
}

/// What to deliver again after an exit during the delivery of `event` (15.7.2). A software
/// interrupt is not: its instruction is executed once more.
fn to_deliver_again(event: u64) -> Again {
    let (vector, kind) = (event & 0xff, event >> 8 & 7);
    match kind {
        _ if event & VALID == 0 => Again::Nothing,
        4 => Again::Nothing,
        // #BP and #OF: their instructions are executed once more.
        3 if vector == 3 || vector == 4 => Again::Nothing,
        // QEMU gives interrupts that it delivers by itself the type of an exception.
        3 if vector >= 32 => Again::Interrupt { vector },
        0 => Again::Interrupt { vector },
        _ => Again::Event(event),
    }
}

/// A virtual interrupt with `vector` that waits: V_IRQ, of the highest priority, whatever the TPR
/// is (15.21.4): the controller has decided already.
///
/// Not by an injection: QEMU 10 delivers an interrupt that is injected once more, as an exception,
/// if it leaves its loop before the next exit (it keeps the number in `exception_index`).
fn waiting_interrupt(vector: u64) -> u64 {
    vector << 32 | 1 << 20 | 0xf << 16 | V_IRQ
}

/// An interrupt waits.
const V_IRQ: u64 = 1 << 8;

/// What the next entry delivers `again`, if `waiting` are the virtual interrupts that the exit has
/// left: the event to inject, and the virtual interrupts.
///
/// One interrupt can wait. If another one waits already, it does so on, and this one is injected:
/// the controller has both in service, so none may be lost.
fn deliver(again: Again, waiting: u64) -> (u64, u64) {
    match again {
        Again::Nothing => (0, waiting),
        Again::Interrupt { vector } if waiting & V_IRQ != 0 && waiting >> 32 & 0xff != vector => {
            (VALID | vector, waiting)
        }
        Again::Interrupt { vector } => (0, waiting_interrupt(vector)),
        Again::Event(event) => (event, waiting),
    }
}

/// What a guest may do without an exit.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// The ports.
    pub ports: &'static PortMap,
    /// The model-specific registers.
    pub msrs: &'static MsrMap,
}

impl Allowed {
    /// Nothing.
    fn nothing() -> Allowed {
        static NOTHING: Once<Allowed> = Once::new();
        *NOTHING.call_once(|| {
            let mut ports = PortMap::new();
            (0..=u16::MAX).for_each(|port| ports.intercept(port));
            Allowed { ports: Box::leak(ports), msrs: Box::leak(MsrMap::new()) }
        })
    }
}

/// A virtual CPU.
#[derive(Debug)]
pub struct SvmCpu {
    vmcb: Box<Vmcb>,
    host: Box<Vmcb>,
    /// `host` has the state of one CPU.
    _stays_on_its_cpu: PhantomData<*mut ()>,
    /// The registers that are not in [`save`](SvmCpu::save).
    pub registers: Box<Registers>,
}

impl SvmCpu {
    /// One on the nested page tables at `nested_cr3`, in the state of after INIT but for what the
    /// caller sets.
    ///
    /// # Safety
    /// As for [`VirtualCpu::new`].
    pub unsafe fn with_allowed(nested_cr3: Hpa, allowed: Allowed) -> SvmCpu {
        let mut vmcb = Vmcb::new();
        let control = &mut vmcb.control;
        control.intercepts = Intercepts::all().bits();
        control.more_intercepts = MoreIntercepts::all().bits();
        control.iopm_base = allowed.ports.address();
        control.msrpm_base = allowed.msrs.address();
        control.asid = 1;
        control.nested_paging = 1;
        control.nested_cr3 = nested_cr3.0;
        // The power-on value of PAT (APM vol. 2, 7.8.2).
        vmcb.save.g_pat = 0x0007_0406_0007_0406;
        let host = Vmcb::new();
        // SAFETY: the block is the host's, and SVM is on, as the caller promises.
        unsafe { core::arch::asm!("vmsave rax", in("rax") host.address(), options(nostack, preserves_flags)) };
        SvmCpu { vmcb, host, _stays_on_its_cpu: PhantomData, registers: Box::new(Registers::new()) }
    }

    /// The registers in the control block.
    pub fn save(&mut self) -> &mut Save {
        &mut self.vmcb.save
    }

    /// What is to be delivered at the next entry: the event, the virtual interrupts, the interrupt
    /// shadow.
    pub(crate) fn events(&self) -> [u64; 3] {
        let control = &self.vmcb.control;
        [control.event_injection, control.virtual_interrupts, control.interrupt_shadow]
    }

    /// Sets [`events`](SvmCpu::events).
    pub(crate) fn set_events(&mut self, events: [u64; 3]) {
        let control = &mut self.vmcb.control;
        [control.event_injection, control.virtual_interrupts, control.interrupt_shadow] = events;
    }

    /// Sets what the guest's time-stamp counter is ahead of the machine's.
    pub(crate) fn set_tsc_offset(&mut self, tsc_offset: u64) {
        self.vmcb.control.tsc_offset = tsc_offset;
    }

    /// The same, to be read.
    pub fn saved(&self) -> &Save {
        &self.vmcb.save
    }

    /// Delivers `event` at the next entry.
    pub fn inject(&mut self, event: Event) {
        self.vmcb.control.event_injection = event.bits();
    }

    /// The exit code, in words (appendix C).
    #[inline]
    fn reason(&self) -> Exit {
        let control = &self.vmcb.control;
        match control.exit_code {
            0x400 => Exit::PageFault { gpa: Gpa(control.exit_info_2), access: access(control.exit_info_1) },
            code => self.rare_reason(code),
        }
    }

    /// The same of a `code` that is no nested page fault.
    fn rare_reason(&self, code: u64) -> Exit {
        let control = &self.vmcb.control;
        match code {
            0x61 => Exit::Kick,
            0x72 => Exit::Trapped(Trap::Cpuid),
            0x7b => Exit::Trapped(Trap::Port {
                port: (control.exit_info_1 >> 16) as u16,
                direction: if control.exit_info_1 & 1 != 0 { Direction::In } else { Direction::Out },
                // Bits 6:4, one for each size (15.10.2).
                size_bytes: (control.exit_info_1 >> 4 & 7) as u8,
                next_rip: control.exit_info_2,
            }),
            0x7c if control.exit_info_1 == 0 => Exit::Trapped(Trap::ReadMsr),
            0x7c => Exit::Trapped(Trap::WriteMsr),
            0x7f => Exit::Shutdown,
            0x81 => Exit::Hypercall,
            0x76 | 0x7a | 0x80 | 0x82..=0x86 | 0x8a..=0x8d => Exit::Trapped(Trap::Undefined),
            // VMEXIT_INVALID is -1; QEMU has 32 bits of it.
            code if code as u32 == u32::MAX => Exit::Invalid { code },
            code => Exit::Other { code },
        }
    }
}

impl VirtualCpu for SvmCpu {
    type Format = Npt;

    /// An NMI is kept while the global interrupt flag is off.
    const KICK: Kick = Kick::Nmi;

    const HYPERCALL: u64 = Hypercall::Vmmcall as u64;

    fn has_modification_log() -> bool {
        false
    }

    unsafe fn new(second_stage: SecondStage) -> SvmCpu {
        // SAFETY: the caller's promise is that of this trait.
        unsafe { SvmCpu::with_allowed(second_stage.root, Allowed::nothing()) }
    }

    fn start(&mut self, start: Start) {
        // 64-bit mode (AMD APM vol. 2, 4.8 "Long-Mode Segment Descriptors"; 15.5.1).
        let segment = |attributes| Segment { selector: 8, attributes, limit: u32::MAX, base: 0 };
        let save = self.save();
        save.cs = segment(0xa9b);
        (save.ss, save.ds, save.es, save.fs, save.gs) =
            (segment(0xc93), segment(0xc93), segment(0xc93), segment(0xc93), segment(0xc93));
        save.tr = segment(0x8b);
        save.ldtr = segment(0x82);
        save.cr0 = START_CR0;
        save.cr4 = START_CR4;
        // SVME, as VMRUN requires, NXE, LMA, LME.
        save.efer = 0x1d00;
        save.rflags = 2;
        save.dr6 = 0xffff_0ff0;
        save.dr7 = 0x400;
        (save.rip, save.rsp, save.cr3) = (start.pc, start.stack, start.tables);
        self.registers.rdi = start.argument;
    }

    // Each of its few callers is a loop that does little else.
    #[inline(always)]
    fn run(&mut self, presence: &Presence) -> Exit {
        // SAFETY: SVM is on. No NMI is delivered until STGI: the guest leaves instead.
        unsafe { core::arch::asm!("clgi", options(nostack)) };
        self.vmcb.control.tlb_control = match presence.enter() {
            Flush::None => TlbControl::None,
            Flush::All => TlbControl::FlushAll,
        } as u32;
        // SAFETY: both blocks are this CPU's; the guest reaches memory by its page tables alone, of
        // which `new` has the promise.
        unsafe { enter(self.vmcb.address(), self.host.address(), &raw mut *self.registers) };
        // What the block has asked for, and not what it should have.
        let flushed =
            if self.vmcb.control.tlb_control == TlbControl::FlushAll as u32 { Flush::All } else { Flush::None };
        presence.leave(flushed);
        // SAFETY: as above. A kick that is kept is delivered here, to a handler that returns.
        unsafe { core::arch::asm!("stgi", options(nostack)) };
        let control = &mut self.vmcb.control;
        control.event_injection = 0;
        if control.exit_int_info & VALID != 0 {
            (control.event_injection, control.virtual_interrupts) =
                deliver(to_deliver_again(control.exit_int_info), control.virtual_interrupts);
        }
        self.reason()
    }

    fn skip(&mut self, length: u64) {
        self.vmcb.save.rip += length;
    }

    fn set_result(&mut self, value: u64) {
        self.vmcb.save.rax = value;
    }

    fn pc(&self) -> u64 {
        self.vmcb.save.rip
    }

    fn fault_address(&self) -> u64 {
        self.vmcb.save.cr2
    }
}

/// The access of a nested page fault: bit 1, a write; bit 4, a fetch (15.25.6 "Nested versus Guest
/// Page Faults"). A walk of the guest's tables is a write there.
fn access(exit_info_1: u64) -> Access {
    if exit_info_1 & 1 << 1 != 0 {
        Access::Write
    } else if exit_info_1 & 1 << 4 != 0 {
        Access::Execute
    } else {
        Access::Read
    }
}

/// Exchanges the registers, runs the guest of the block at `vmcb`, and exchanges them again.
///
/// Inline, so that the caller saves only those of its registers that it needs once more.
///
/// # Safety
/// SVM is on, and the global interrupt flag off. `vmcb` and `host` are the physical addresses of
/// blocks of this CPU, in `host` what VMSAVE has stored.
#[inline(always)]
unsafe fn enter(vmcb: u64, host: u64, registers: *mut Registers) {
    // SAFETY: as the caller promises. Each register that the guest changes is an operand, or pushed
    // and popped: rbx and rbp, which may be no operands.
    unsafe {
        registers_asm!(
            asm:
            "push rbx", "push rbp", "push rdx", "push rsi",
            move_common!(load from "rdx"),
            "mov rdi, [rdx + {rdi}]",
            "mov rdx, [rdx + {rdx}]",
            "vmload rax",
            "vmrun rax",
            // VMRUN has put the host's rax and rsp back; the guest's are in the block.
            "vmsave rax",
            "mov rax, [rsp + 8]",
            "mov [rax + {rdx}], rdx",
            "mov [rax + {rdi}], rdi",
            move_common!(store to "rax"),
            "pop rax",
            "vmload rax",
            as_code_expects!(),
            "pop rbp", "pop rbx";
            inout("rax") vmcb => _, inout("rsi") host => _, inout("rdx") registers => _,
            out("rcx") _, out("rdi") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            clobber_abi("sysv64")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_of_an_exit_comes_again_unless_its_instruction_does() {
        const ERROR_CODE: u64 = 1 << 11;
        for (event, again) in [
            (0, Again::Nothing),
            // Not valid.
            (0x20, Again::Nothing),
            // An external interrupt, also with the type that QEMU gives it.
            (VALID | 0xec, Again::Interrupt { vector: 0xec }),
            (VALID | 3 << 8 | 0xec, Again::Interrupt { vector: 0xec }),
            // #PF, with its error code.
            (VALID | ERROR_CODE | 3 << 8 | 14 | 2 << 32, Again::Event(VALID | ERROR_CODE | 3 << 8 | 14 | 2 << 32)),
            // #BP and INT n: the guest is at the instruction.
            (VALID | 3 << 8 | 3, Again::Nothing),
            (VALID | 4 << 8 | 0x80, Again::Nothing),
        ] {
            assert_eq!(to_deliver_again(event), again, "{event:#x}");
        }
    }

    #[test]
    fn an_interrupt_that_waits_is_not_lost() {
        let (timer, call) = (waiting_interrupt(0xec), waiting_interrupt(0xfb));
        // V_IRQ of what was taken is clear.
        let taken = timer & !V_IRQ;
        for (again, waiting, expected) in [
            (Again::Nothing, 0, (0, 0)),
            (Again::Nothing, timer, (0, timer)),
            (Again::Interrupt { vector: 0xfb }, 0, (0, call)),
            (Again::Interrupt { vector: 0xfb }, taken, (0, call)),
            // QEMU leaves V_IRQ of the interrupt that it was delivering.
            (Again::Interrupt { vector: 0xec }, timer, (0, timer)),
            (Again::Interrupt { vector: 0xfb }, timer, (VALID | 0xfb, timer)),
            (Again::Event(VALID | 3 << 8 | 6), timer, (VALID | 3 << 8 | 6, timer)),
        ] {
            assert_eq!(deliver(again, waiting), expected, "{again:?}, {waiting:#x}");
        }
    }

    #[test]
    fn a_nested_page_fault_has_its_access() {
        // As QEMU reports them: read, write of a protected page, fetch, a walk of the guest's
        // tables.
        assert_eq!(access(0x1_0000_0004), Access::Read);
        assert_eq!(access(0x1_0000_0007), Access::Write);
        assert_eq!(access(0x1_0000_0015), Access::Execute);
        assert_eq!(access(0x2_0000_0006), Access::Write);
    }
}
