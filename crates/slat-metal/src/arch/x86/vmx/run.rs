//! A virtual CPU: entries into the guest, and why it left.
//!
//! # An entry
//! A kick is an NMI, which makes the guest leave at once. One that arrives after the CPU has looked
//! for a flush ([`Presence`]), and before the guest is entered, comes to the host's handler, which
//! sets the guest's preemption timer to 0: then the guest leaves before its first instruction
//! (Intel SDM vol. 3C, "VMX-Preemption Timer"). So the timer is set to its most before the look.
//!
//! An exit by an NMI blocks further ones, until IRET (SDM vol. 3C, "Updating Non-Register State"),
//! which is executed then.
//!
//! A flush is INVEPT of this EPTP, before the entry (SDM vol. 3C, "VMX Support for Address
//! Translation", "Invalidating Cached Translation Information"). Entries and exits flush nothing by
//! themselves, as the guest has a VPID.
//!
//! Maskable interrupts are the guest's, and come to it without an exit.

#![expect(unsafe_code, reason = "enters a guest")]

use alloc::boxed::Box;
use core::mem::offset_of;

use slat::dirty::DirtyTracking;
use slat::format::Ept;
use slat::tables::AccessTracking;
use slat::{Access, Gpa};
use x86_64::instructions::segmentation::{CS, DS, ES, SS, Segment as _};
use x86_64::instructions::tables::{sgdt, sidt};
use x86_64::registers::control::{Cr0, Cr2, Cr3, Cr4};
use x86_64::registers::model_specific::{Efer, Msr};

use super::controls::{self, Controls, Held, OnEntry, Secondary};
use super::log::ModificationLog;
use super::vmcs::{Field, Vmcs};
use crate::arch::x86::apic::Kick;
use crate::arch::x86::cpu;
use crate::arch::x86::registers::{
    Direction, EFER_LMA, EVENT_HAS_ERROR_CODE, EVENT_VALID, Hypercall, Registers, START_CR0, START_CR4, State, Trap,
    as_code_expects, move_common, registers_asm,
};
use crate::arch::x86::svm::vmcb::Segment;
use crate::cpus::{Flush, Presence};
use crate::error;
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};

/// Bits 2:0 of the EPTP: page tables in write-back memory. Bits 5:3: their levels less 1. Bit 6:
/// the CPU sets A and D (SDM vol. 3C, "Extended-Page-Table Pointer (EPTP)").
const WRITE_BACK: u64 = 6;
const LEVELS_SHIFT: u32 = 3;
const ACCESSED_AND_DIRTY: u64 = 1 << 6;

/// CR4.VMXE, which VMX requires of the guest, too.
const CR4_VMXE: u64 = 1 << 13;

/// The preemption timer's most. An exit that comes of it is one more.
const NEVER: u64 = 0xffff_ffff;

/// Bits 10:8 of interruption information, and their value of an NMI (SDM vol. 3C, table "Format of
/// the VM-Exit Interruption-Information Field").
const EVENT_TYPE: u64 = 7 << 8;
const NMI: u64 = 2 << 8;
/// Blocking by NMI, in the guest's interruptibility state.
const BLOCKED_BY_NMI: u64 = 1 << 3;

/// Attributes of segments: present, with limits in pages; code of 64 bits, data, a busy task.
const CODE: u16 = 0xa9b;
const DATA: u16 = 0xc93;
const TASK: u16 = 0x8b;

/// IA32_PAT.
const PAT: u32 = 0x277;
/// Its value after power-on (SDM vol. 3A, table "Memory Type Setting of PAT Entries Following a
/// Power-up or Reset").
const POWER_ON_PAT: u64 = 0x0007_0406_0007_0406;

/// Bit 31 of the exit reason: the entry failed.
const ENTRY_FAILED: u64 = 1 << 31;

/// Whether the guest was entered before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Launch {
    /// The next entry is VMLAUNCH.
    First = 0,
    /// It is VMRESUME.
    Again = 1,
}

/// A virtual CPU.
#[derive(Debug)]
pub struct VmxCpu {
    pub(in crate::arch::x86) vmcs: Vmcs,
    eptp: u64,
    pub(in crate::arch::x86) registers: Box<Registers>,
    launch: Launch,
    log: Option<ModificationLog>,
}

impl VmxCpu {
    /// One that may do `held`, on `second_stage`.
    ///
    /// # Safety
    /// As for [`VirtualCpu::new`].
    pub(in crate::arch::x86) unsafe fn with_held(second_stage: SecondStage, held: Held) -> VmxCpu {
        let SecondStage { root, nr_levels, access_tracking, dirty_tracking, .. } = second_stage;
        let bits = if access_tracking == AccessTracking::AccessedBit { ACCESSED_AND_DIRTY } else { 0 };
        let eptp = root.0 | (nr_levels - 1) << LEVELS_SHIFT | bits | WRITE_BACK;
        // SAFETY: as the caller promises.
        let vmcs = unsafe { Vmcs::make_current() };
        let registers = Box::new(Registers::new());
        let mut cpu = VmxCpu { vmcs, eptp, registers, launch: Launch::First, log: None };
        cpu.set_controls(held);
        if dirty_tracking == DirtyTracking::PageModificationLog {
            let secondary = cpu.vmcs.read(Field::SecondaryControls);
            let logs = u64::from(Secondary::PAGE_MODIFICATION_LOG.bits());
            // SAFETY: the log is there before the first entry; the structure is the first field,
            // and so dropped before it.
            unsafe {
                cpu.vmcs.write(Field::SecondaryControls, secondary | logs);
                cpu.log = Some(ModificationLog::new(&mut cpu.vmcs));
            }
        }
        cpu.set_host();
        cpu
    }

    /// The host's state: what an exit loads (SDM vol. 3C, "Host-State Area").
    fn set_host(&mut self) {
        let (gdt, idt) = (sgdt().base.as_u64(), sidt().base.as_u64());
        let (task, task_base) = cpu::task();
        // The privilege level of a selector, bits 1:0, must be 0.
        let selector = |register: u16| u64::from(register & !7);
        // SAFETY: the state that this CPU has now, but for RSP and RIP, which `enter` sets.
        unsafe {
            self.vmcs.write_all(&[
                (Field::HostEsSelector, selector(ES::get_reg().0)),
                (Field::HostCsSelector, selector(CS::get_reg().0)),
                (Field::HostSsSelector, selector(SS::get_reg().0)),
                (Field::HostDsSelector, selector(DS::get_reg().0)),
                (Field::HostFsSelector, 0),
                (Field::HostGsSelector, 0),
                (Field::HostTrSelector, selector(task)),
                (Field::HostFsBase, 0),
                (Field::HostGsBase, 0),
                (Field::HostTrBase, task_base),
                (Field::HostGdtrBase, gdt),
                (Field::HostIdtrBase, idt),
                (Field::HostCr0, Cr0::read_raw()),
                (Field::HostCr3, Cr3::read_raw().0.start_address().as_u64()),
                (Field::HostCr4, Cr4::read_raw()),
                (Field::HostSysenterCs, 0),
                (Field::HostSysenterEsp, 0),
                (Field::HostSysenterEip, 0),
                (Field::HostEfer, Efer::read_raw()),
                (Field::HostPat, Msr::new(PAT).read()),
            ]);
        }
    }

    fn set_controls(&mut self, held: Held) {
        let controls = Controls::of_cpu(held).unwrap_or_else(|missing| error!("{missing}"));
        // The bits that are the hypervisor's. A guest that may do more finds VMXE alone to be clear.
        // NE of CR0 has to be set, and it is set from the beginning: clearing it is a #GP.
        let (cr0_mask, cr4_mask) = match held {
            Held::Nothing => (u64::MAX, u64::MAX),
            Held::Machine => (0, CR4_VMXE),
        };
        // SAFETY: the page tables are those of the promise of `new`; no MSR area has an entry.
        unsafe {
            self.vmcs.write_all(&[
                (Field::PinBasedControls, u64::from(controls.pin_based)),
                (Field::PrimaryControls, u64::from(controls.primary)),
                (Field::SecondaryControls, u64::from(controls.secondary)),
                (Field::ExitControls, u64::from(controls.on_exit)),
                (Field::EntryControls, u64::from(controls.on_entry)),
                (Field::Vpid, 1),
                (Field::EptPointer, self.eptp),
                (Field::LinkPointer, u64::MAX),
                (Field::ExceptionBitmap, 0),
                (Field::PageFaultMask, 0),
                (Field::PageFaultMatch, 0),
                (Field::NrCr3Targets, 0),
                (Field::NrMsrsToStoreOnExit, 0),
                (Field::NrMsrsToLoadOnExit, 0),
                (Field::NrMsrsToLoadOnEntry, 0),
                (Field::EntryInterruption, 0),
                (Field::Cr0Mask, cr0_mask),
                (Field::Cr4Mask, cr4_mask),
            ]);
        }
    }

    /// Sets all registers but for the general ones, which are 0, and those for events.
    pub(in crate::arch::x86) fn set_state(&mut self, state: &State) {
        for (fields, segment) in SEGMENTS.into_iter().zip(state.segments()) {
            let [selector, base, limit, rights] = fields;
            // SAFETY: fields of the guest.
            unsafe {
                self.vmcs.write_all(&[
                    (selector, u64::from(segment.selector)),
                    (base, segment.base),
                    (limit, u64::from(segment.limit)),
                    (rights, access_rights(segment.attributes)),
                ]);
            }
        }
        // The entry has to agree with EFER.LMA.
        let is_ia_32e = u64::from(OnEntry::IA_32E_GUEST.bits());
        let on_entry = self.vmcs.read(Field::EntryControls) & !is_ia_32e;
        let on_entry = if state.efer & EFER_LMA != 0 { on_entry | is_ia_32e } else { on_entry };
        // SAFETY: fields of the guest.
        unsafe {
            self.vmcs.write_all(&[
                (Field::EntryControls, on_entry),
                (Field::GuestGdtrBase, state.gdtr.base),
                (Field::GuestGdtrLimit, u64::from(state.gdtr.limit)),
                (Field::GuestIdtrBase, state.idtr.base),
                (Field::GuestIdtrLimit, u64::from(state.idtr.limit)),
                (Field::GuestCr0, state.cr0),
                (Field::Cr0Shadow, state.cr0),
                (Field::GuestCr3, state.cr3),
                (Field::GuestCr4, state.cr4 | CR4_VMXE),
                (Field::Cr4Shadow, state.cr4),
                (Field::GuestEfer, state.efer),
                (Field::GuestPat, POWER_ON_PAT),
                (Field::GuestDr7, 0x400),
                (Field::GuestDebugctl, 0),
                (Field::GuestPendingDebug, 0),
                (Field::GuestInterruptibility, 0),
                (Field::GuestActivity, 0),
                (Field::GuestSysenterCs, 0),
                (Field::GuestSysenterEsp, 0),
                (Field::GuestSysenterEip, 0),
                (Field::GuestRflags, 2),
                (Field::GuestRip, state.rip),
                (Field::GuestRsp, state.rsp),
            ]);
        }
    }

    /// Delivers `event` at the next entry, with `error_code` if it has one. An exit has put an end
    /// to the last one.
    pub(in crate::arch::x86) fn inject(&mut self, event: u64, error_code: u64) {
        // SAFETY: what the guest gets.
        unsafe {
            if event & EVENT_HAS_ERROR_CODE != 0 {
                self.vmcs.write(Field::EntryErrorCode, error_code);
            }
            self.vmcs.write(Field::EntryInterruption, event);
        }
    }

    /// After an exit: delivers again what it has cut off, and lets NMIs come again.
    fn take_events(&mut self, exit: Exit) {
        if let Some(event) = to_deliver_again(self.vmcs.read(Field::DeliveredEvent)) {
            self.inject(event, self.vmcs.read(Field::DeliveredErrorCode));
        }
        if exit == Exit::Kick
            && self.vmcs.read(Field::ExitInterruption) & (EVENT_VALID | EVENT_TYPE) == EVENT_VALID | NMI
        {
            // SAFETY: the handler of NMIs, on a stack of its own, ends by IRET, and changes no
            // register. What it does to the timer, each entry undoes.
            unsafe { core::arch::asm!("int 2", options(nostack)) };
            // The guest has no NMIs. Bochs takes the one that made it leave for one of its own.
            let blocking = self.vmcs.read(Field::GuestInterruptibility) & !BLOCKED_BY_NMI;
            // SAFETY: a field of the guest.
            unsafe { self.vmcs.write(Field::GuestInterruptibility, blocking) };
        }
    }

    /// The exit reason, in words (SDM vol. 3D, appendix C "VMX Basic Exit Reasons").
    fn reason(&self) -> Exit {
        let reason = self.vmcs.read(Field::ExitReason);
        if reason & ENTRY_FAILED != 0 {
            return Exit::Invalid { code: reason };
        }
        match reason & 0xffff {
            62 => Exit::LogFull,
            // An NMI: no exception leaves the guest. The preemption timer.
            0 | 52 => Exit::Kick,
            2 => Exit::Shutdown,
            10 => Exit::Trapped(Trap::Cpuid),
            18 => Exit::Hypercall,
            // INVD, MWAIT, MONITOR, the instructions of VMX, XSETBV.
            13 | 19..=27 | 36 | 39 | 50 | 53 | 55 => Exit::Trapped(Trap::Undefined),
            30 => {
                let qualification = self.vmcs.read(Field::ExitQualification);
                Exit::Trapped(Trap::Port {
                    port: (qualification >> 16) as u16,
                    direction: if qualification & 1 << 3 != 0 { Direction::In } else { Direction::Out },
                    // Bits 2:0, less 1 (SDM vol. 3C, "Exit Qualification for I/O Instructions").
                    size_bytes: (qualification & 7) as u8 + 1,
                    next_rip: self.pc() + self.vmcs.read(Field::ExitInstructionLength),
                })
            }
            31 => Exit::Trapped(Trap::ReadMsr),
            32 => Exit::Trapped(Trap::WriteMsr),
            48 => Exit::PageFault {
                gpa: Gpa(self.vmcs.read(Field::GuestPhysicalAddress)),
                access: access(self.vmcs.read(Field::ExitQualification)),
            },
            49 => Exit::Misconfigured { gpa: Gpa(self.vmcs.read(Field::GuestPhysicalAddress)) },
            code => Exit::Other { code },
        }
    }
}

impl VirtualCpu for VmxCpu {
    type Format = Ept;

    const KICK: Kick = Kick::Nmi;

    const HYPERCALL: u64 = Hypercall::Vmcall as u64;

    fn has_modification_log() -> bool {
        controls::has_modification_log()
    }

    unsafe fn new(second_stage: SecondStage) -> VmxCpu {
        // SAFETY: as the caller promises.
        unsafe { VmxCpu::with_held(second_stage, Held::Nothing) }
    }

    fn start(&mut self, start: Start) {
        let segment = |attributes| Segment { selector: 8, attributes, limit: u32::MAX, base: 0 };
        let empty = Segment { selector: 0, attributes: 0, limit: 0, base: 0 };
        self.set_state(&State {
            cs: segment(CODE),
            data: segment(DATA),
            tr: Segment { limit: 0x67, ..segment(TASK) },
            ldtr: empty,
            gdtr: empty,
            idtr: empty,
            cr0: START_CR0,
            cr3: start.tables,
            cr4: START_CR4,
            // NXE, LMA, LME, as the host has them.
            efer: 0xd00,
            rip: start.pc,
            rsp: start.stack,
        });
        self.registers.rdi = start.argument;
    }

    fn run(&mut self, presence: &Presence) -> Exit {
        // SAFETY: a field of the guest.
        unsafe { self.vmcs.write(Field::PreemptionTimer, NEVER) };
        // What the hardware has done, for the record.
        let mut flushed = Flush::None;
        if presence.enter() == Flush::All {
            let has_failed: u8;
            // SAFETY: VMX is on, and the CPU has this type of INVEPT. No memory is written.
            unsafe {
                core::arch::asm!("invept {}, [{}]", "setna {has_failed}", in(reg) 1_u64,
                    in(reg) &[self.eptp, 0], has_failed = out(reg_byte) has_failed, options(nostack));
            }
            if has_failed != 0 {
                error!("INVEPT failed");
            }
            flushed = Flush::All;
        }
        // SAFETY: the structure is current, and has all fields; the guest reaches memory by its
        // page tables alone, of which `new` has the promise.
        let has_failed = unsafe { enter(&raw mut *self.registers, self.launch) };
        if let Some(log) = &mut self.log {
            presence.log(log.take(&mut self.vmcs));
        }
        presence.leave(flushed);
        if has_failed {
            return Exit::Invalid { code: self.vmcs.read(Field::InstructionError) };
        }
        let exit = self.reason();
        if !matches!(exit, Exit::Invalid { .. }) {
            self.launch = Launch::Again;
            self.take_events(exit);
        }
        exit
    }

    fn skip(&mut self, length: u64) {
        let rip = self.pc() + length;
        // SAFETY: a field of the guest.
        unsafe { self.vmcs.write(Field::GuestRip, rip) };
    }

    fn set_result(&mut self, value: u64) {
        self.registers.rax = value;
    }

    fn pc(&self) -> u64 {
        self.vmcs.read(Field::GuestRip)
    }

    fn fault_address(&self) -> u64 {
        // Neither entries nor exits change it.
        Cr2::read_raw()
    }
}

/// Selector, base, limit and access rights of the segments, in the order of [`State::segments`].
const SEGMENTS: [[Field; 4]; 8] = [
    [Field::GuestCsSelector, Field::GuestCsBase, Field::GuestCsLimit, Field::GuestCsRights],
    [Field::GuestSsSelector, Field::GuestSsBase, Field::GuestSsLimit, Field::GuestSsRights],
    [Field::GuestDsSelector, Field::GuestDsBase, Field::GuestDsLimit, Field::GuestDsRights],
    [Field::GuestEsSelector, Field::GuestEsBase, Field::GuestEsLimit, Field::GuestEsRights],
    [Field::GuestFsSelector, Field::GuestFsBase, Field::GuestFsLimit, Field::GuestFsRights],
    [Field::GuestGsSelector, Field::GuestGsBase, Field::GuestGsLimit, Field::GuestGsRights],
    [Field::GuestTrSelector, Field::GuestTrBase, Field::GuestTrLimit, Field::GuestTrRights],
    [Field::GuestLdtrSelector, Field::GuestLdtrBase, Field::GuestLdtrLimit, Field::GuestLdtrRights],
];

/// The access rights of a segment with `attributes`, which are the same bits without a gap: bits
/// 7:0 and 15:12 (SDM vol. 3C, table "Format of Access Rights"). Bit 16: a segment that is not
/// present is not usable.
fn access_rights(attributes: u16) -> u64 {
    const PRESENT: u16 = 1 << 7;
    let rights = u64::from(attributes & 0xff) | u64::from(attributes & 0xf00) << 4;
    if attributes & PRESENT == 0 { 1 << 16 } else { rights }
}

/// What to inject after an exit during the delivery of `event` (SDM vol. 3C, "Information for VM
/// Exits That Occur During Event Delivery"). A software interrupt or exception is not delivered
/// again: its instruction is executed once more.
fn to_deliver_again(event: u64) -> Option<u64> {
    let is_of_instruction = matches!(event >> 8 & 7, 4..=6);
    // Vector, type, and whether there is an error code.
    (event & EVENT_VALID != 0 && !is_of_instruction).then_some(event & (EVENT_VALID | 0xfff))
}

/// The access of an EPT violation: bit 1, a write; bit 2, a fetch (SDM vol. 3C, "Exit Qualification
/// for EPT Violations"). Where EPT has A and D, a walk of the guest's tables is a write.
fn access(qualification: u64) -> Access {
    match qualification & 0b110 {
        0b000 => Access::Read,
        0b100 => Access::Execute,
        _ => Access::Write,
    }
}

/// Exchanges the registers, enters the guest of the current control structure, and exchanges them
/// again. Returns whether the entry failed.
///
/// # Safety
/// VMX is on, and interrupts are off. The current control structure has all fields but the host's
/// RSP and RIP; `launch` says whether it was entered before.
#[unsafe(naked)]
unsafe extern "sysv64" fn enter(registers: *mut Registers, launch: Launch) -> bool {
    registers_asm!(
        naked_asm:
        "push rbx", "push rbp", "push r12", "push r13", "push r14", "push r15",
        "push rdi",
        "mov edx, {host_rsp}",
        "vmwrite rdx, rsp",
        "lea rax, [rip + 4f]",
        "mov edx, {host_rip}",
        "vmwrite rdx, rax",
        // MOV and FXRSTOR change no flags.
        "test sil, sil",
        move_common!(load from "rdi"),
        "mov rax, [rdi + {rax}]",
        "mov rdx, [rdi + {rdx}]",
        "mov rdi, [rdi + {rdi}]",
        "jnz 2f",
        "vmlaunch",
        "jmp 3f",
        "2:",
        "vmresume",
        "3:",
        // The entry failed: the next instruction follows, with the guest's registers as they were.
        "mov eax, 1",
        "jmp 5f",
        "4:",
        // An exit has put the host's rsp back.
        "push rdi",
        "mov rdi, [rsp + 8]",
        "mov [rdi + {rax}], rax",
        "pop rax",
        "mov [rdi + {rdi}], rax",
        "mov [rdi + {rdx}], rdx",
        move_common!(store to "rdi"),
        "xor eax, eax",
        "5:",
        as_code_expects!(),
        "pop r15", "pop r14", "pop r13", "pop r12", "pop rbp", "pop rbx",
        "ret";
        rax = const offset_of!(Registers, rax),
        host_rsp = const Field::HostRsp as u32,
        host_rip = const Field::HostRip as u32,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_comes_again_unless_its_instruction_does() {
        const TYPE_SHIFT: u32 = 8;
        for (event, again) in [
            (0, None),
            // Not valid.
            (0x20, None),
            // An external interrupt; #PF with an error code, and with bits that entries reserve.
            (EVENT_VALID | 0xec, Some(EVENT_VALID | 0xec)),
            (EVENT_VALID | 1 << 12 | 0xb0e, Some(EVENT_VALID | 0xb0e)),
            // INT n, INT1, INT3.
            (EVENT_VALID | 4 << TYPE_SHIFT | 0x80, None),
            (EVENT_VALID | 5 << TYPE_SHIFT | 1, None),
            (EVENT_VALID | 6 << TYPE_SHIFT | 3, None),
        ] {
            assert_eq!(to_deliver_again(event), again, "{event:#x}");
        }
    }

    #[test]
    fn access_rights_have_a_gap() {
        // Code of 64 bits, data with a limit in pages, a busy task; an empty selector.
        for (attributes, rights) in [(CODE, 0xa09b), (DATA, 0xc093), (TASK, 0x8b), (0, 1 << 16)] {
            assert_eq!(access_rights(attributes), rights, "{attributes:#x}");
        }
    }
}
