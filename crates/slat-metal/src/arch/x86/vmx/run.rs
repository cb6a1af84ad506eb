//! A virtual CPU: entries into the guest, and why it left.
//!
//! # An entry
//! Interrupts are off in the whole image, and a kick is a maskable interrupt. So one that arrives
//! after the CPU has looked for a flush ([`Presence`]) waits in the interrupt controller. It makes
//! the guest leave at once: with external-interrupt exiting the flags of the guest do not matter
//! (Intel SDM vol. 3C, "VMX Non-Root Operation", "Other Causes of VM Exits"). An exit acknowledges
//! it.
//!
//! A flush is INVEPT of this EPTP, before the entry (SDM vol. 3C, "VMX Support for Address
//! Translation", "Invalidating Cached Translation Information"). Entries and exits flush nothing by
//! themselves, as the guest has a VPID.
//!
//! # What it does not do
//! The guest has no interrupts and no exceptions: an event that was being delivered at an exit is
//! not delivered again.

#![expect(unsafe_code, reason = "enters a guest")]

use alloc::boxed::Box;
use core::mem::offset_of;

use slat::dirty::DirtyTracking;
use slat::format::Ept;
use slat::tables::AccessTracking;
use slat::{Access, Gpa};
use x86_64::instructions::segmentation::{CS, DS, ES, SS, Segment};
use x86_64::instructions::tables::{sgdt, sidt};
use x86_64::registers::control::{Cr0, Cr2, Cr3, Cr4};

use super::controls::{self, Controls, Secondary};
use super::log::ModificationLog;
use super::vmcs::{Field, Vmcs};
use crate::arch::x86::apic::{self, Kick};
use crate::arch::x86::cpu;
use crate::arch::x86::registers::{
    Direction, Hypercall, Registers, START_CR0, START_CR4, Trap, as_code_expects, move_common, registers_asm,
};
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

/// Access rights of segments, as in their descriptors: present, with limits in pages; code of 64
/// bits, data, a busy task. Bit 16: not usable.
const CODE: u64 = 0xa09b;
const DATA: u64 = 0xc093;
const TASK: u64 = 0x8b;
const UNUSABLE: u64 = 1 << 16;

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
    vmcs: Vmcs,
    eptp: u64,
    registers: Box<Registers>,
    launch: Launch,
    log: Option<ModificationLog>,
}

impl VmxCpu {
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
            ]);
        }
    }

    fn set_controls(&mut self) {
        let controls = Controls::of_cpu().unwrap_or_else(|missing| error!("{missing}"));
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
                // All bits of CR0 and CR4 are the hypervisor's.
                (Field::Cr0Mask, u64::MAX),
                (Field::Cr4Mask, u64::MAX),
            ]);
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
            1 => {
                apic::end_interrupt();
                Exit::Kick
            }
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

    /// Interrupts are off, so it waits for the entry.
    const KICK: Kick = Kick::Interrupt;

    const HYPERCALL: u64 = Hypercall::Vmcall as u64;

    fn has_modification_log() -> bool {
        controls::has_modification_log()
    }

    unsafe fn new(second_stage: SecondStage) -> VmxCpu {
        let SecondStage { root, nr_levels, access_tracking, dirty_tracking, .. } = second_stage;
        let bits = if access_tracking == AccessTracking::AccessedBit { ACCESSED_AND_DIRTY } else { 0 };
        let eptp = root.0 | (nr_levels - 1) << LEVELS_SHIFT | bits | WRITE_BACK;
        // SAFETY: as the caller promises.
        let vmcs = unsafe { Vmcs::make_current() };
        let registers = Box::new(Registers::new());
        let mut cpu = VmxCpu { vmcs, eptp, registers, launch: Launch::First, log: None };
        cpu.set_controls();
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

    fn start(&mut self, start: Start) {
        let segments = [
            (Field::GuestEsSelector, Field::GuestEsBase, Field::GuestEsLimit, Field::GuestEsRights, DATA),
            (Field::GuestCsSelector, Field::GuestCsBase, Field::GuestCsLimit, Field::GuestCsRights, CODE),
            (Field::GuestSsSelector, Field::GuestSsBase, Field::GuestSsLimit, Field::GuestSsRights, DATA),
            (Field::GuestDsSelector, Field::GuestDsBase, Field::GuestDsLimit, Field::GuestDsRights, DATA),
            (Field::GuestFsSelector, Field::GuestFsBase, Field::GuestFsLimit, Field::GuestFsRights, DATA),
            (Field::GuestGsSelector, Field::GuestGsBase, Field::GuestGsLimit, Field::GuestGsRights, DATA),
        ];
        for (selector, base, limit, rights, value) in segments {
            let limit_bytes = u64::from(u32::MAX);
            // SAFETY: fields of the guest.
            unsafe { self.vmcs.write_all(&[(selector, 8), (base, 0), (limit, limit_bytes), (rights, value)]) };
        }
        // SAFETY: fields of the guest.
        unsafe {
            self.vmcs.write_all(&[
                (Field::GuestTrSelector, 8),
                (Field::GuestTrBase, 0),
                (Field::GuestTrLimit, 0x67),
                (Field::GuestTrRights, TASK),
                (Field::GuestLdtrSelector, 0),
                (Field::GuestLdtrBase, 0),
                (Field::GuestLdtrLimit, 0),
                (Field::GuestLdtrRights, UNUSABLE),
                (Field::GuestGdtrBase, 0),
                (Field::GuestGdtrLimit, 0),
                (Field::GuestIdtrBase, 0),
                (Field::GuestIdtrLimit, 0),
                (Field::GuestCr0, START_CR0),
                (Field::Cr0Shadow, START_CR0),
                (Field::GuestCr3, start.tables),
                (Field::GuestCr4, START_CR4 | CR4_VMXE),
                (Field::Cr4Shadow, START_CR4),
                (Field::GuestDr7, 0x400),
                (Field::GuestDebugctl, 0),
                (Field::GuestPendingDebug, 0),
                (Field::GuestInterruptibility, 0),
                (Field::GuestActivity, 0),
                (Field::GuestSysenterCs, 0),
                (Field::GuestSysenterEsp, 0),
                (Field::GuestSysenterEip, 0),
                (Field::GuestRflags, 2),
                (Field::GuestRip, start.pc),
                (Field::GuestRsp, start.stack),
            ]);
        }
        self.registers.rdi = start.argument;
    }

    fn run(&mut self, presence: &Presence) -> Exit {
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
