//! A virtual CPU: entries into the guest, and why it left.
//!
//! The hypervisor runs with all interrupts masked. A kick, which comes meanwhile, makes the guest
//! leave at once. The registers of EL1, and those of floating point, are the guest's alone, and
//! stay in the CPU.

#![expect(unsafe_code, reason = "enters a guest")]

use alloc::boxed::Box;
use core::marker::PhantomData;

use slat::Gpa;
use slat::format::{Hardware, Stage2};

use super::syndrome::{self, AbortAddress, Level, Transfer};
use super::{Trap, load_no_tables, load_tables, physical_range};
use crate::arch::arm::gic::{self, Kick};
use crate::arch::arm::sysreg::{execute, read, write};
use crate::cpus::Presence;
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};

/// The guest's general registers, as `boot.s` exchanges them.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Registers {
    /// x0 to x30.
    pub x: [u64; 31],
    /// The address of the next instruction.
    pub pc: u64,
    /// PSTATE, of EL1 or EL0: an exception return to EL2 would run the guest there.
    pstate: u64,
}

unsafe extern "C" {
    /// Runs the guest until it leaves. Returns the kind of the exception: `boot.s`.
    fn enter_guest(registers: *mut Registers) -> u64;
}

/// The kinds of exceptions of `boot.s`.
const SYNCHRONOUS: u64 = 0;
const FAST_INTERRUPT: u64 = 2;

/// PSTATE: EL1 with its own stack pointer, all interrupts masked.
const PSTATE_EL1: u64 = 0x3c5;
/// PSTATE.M\[3:2\], the level.
const PSTATE_LEVEL: u64 = 3 << 2;

/// SCTLR_EL1 at the start: the bits that are always set; MMU and caches off.
const SCTLR_OFF: u64 = 0x30d0_0800;
/// MMU, data cache, instruction cache.
const SCTLR_ON: u64 = 1 << 0 | 1 << 2 | 1 << 12;
/// TCR_EL1: 39 bits for TTBR0, none for TTBR1; 4 KiB; inner shareable, write-back walks.
const TCR: u64 = 1 << 23 | 3 << 12 | 1 << 10 | 1 << 8 | 25;
/// MAIR_EL1: 0 is normal memory, write-back.
const MAIR: u64 = 0xff;

/// A virtual CPU.
#[derive(Debug)]
pub struct ArmCpu {
    /// The general registers.
    pub registers: Box<Registers>,
    /// ESR_EL2 of the last exit.
    syndrome: u64,
    /// The registers of EL1 are in one CPU.
    _stays_on_its_cpu: PhantomData<*mut ()>,
}

impl ArmCpu {
    /// The load or store that led to the last exit.
    pub fn transfer(&self) -> Option<Transfer> {
        syndrome::transfer(self.syndrome)
    }

    /// Sets all registers so that the guest begins at `pc`, with `x0` and the MMU off, as after a
    /// reset (Arm ARM, D1.5 "Reset"; Linux, Documentation/arch/arm64/booting.rst).
    pub fn start_at(&mut self, pc: u64, x0: u64) {
        *self.registers = Registers { pc, pstate: PSTATE_EL1, ..Registers::default() };
        self.registers.x[0] = x0;
        // SAFETY: registers of the guest, which does not run.
        unsafe {
            write!("sctlr_el1", SCTLR_OFF);
            write!("tcr_el1", 0_u64);
            write!("ttbr0_el1", 0_u64);
            write!("ttbr1_el1", 0_u64);
            write!("mair_el1", 0_u64);
            write!("vbar_el1", 0_u64);
            write!("cpacr_el1", 0_u64);
            write!("mdscr_el1", 0_u64);
            write!("cntkctl_el1", 0_u64);
            write!("cntv_ctl_el0", 0_u64);
            write!("cntp_ctl_el0", 0_u64);
            execute!("isb");
        }
    }

    /// The level that the guest was left from.
    fn level(&self) -> Level {
        if self.registers.pstate & PSTATE_LEVEL == 0 { Level::User } else { Level::Kernel }
    }

    /// Why the guest has left. `None`: there is nothing to be done.
    fn reason(&self, kind: u64) -> Option<Exit> {
        match kind {
            FAST_INTERRUPT => {
                gic::take();
                return Some(Exit::Kick);
            }
            SYNCHRONOUS => {}
            kind => return Some(Exit::Invalid { code: kind }),
        }
        let syndrome = self.syndrome;
        if let Some(abort) = syndrome::abort(syndrome, self.level()) {
            let gpa = match abort.address {
                // FIPA, bits 43 to 4: bits 51 to 12 of the address. A walk's own address is not
                // there.
                AbortAddress::Hpfar => (read!("hpfar_el2") & 0xfff_ffff_fff0) << 8 | read!("far_el2") & 0xfff,
                // Where the guest has changed its tables, it will come again.
                AbortAddress::Far => translate(read!("far_el2"))?,
            };
            return Some(Exit::PageFault { gpa: Gpa(gpa), access: abort.access });
        }
        Some(match syndrome::class(syndrome) {
            syndrome::CLASS_HVC => Exit::Hypercall,
            syndrome::CLASS_SMC => Exit::Trapped(Trap::Smc),
            syndrome::CLASS_SYSTEM => Exit::Trapped(Trap::System { syndrome: syndrome::details(syndrome) }),
            _ => Exit::Other { code: syndrome },
        })
    }
}

/// The guest-physical address of the guest's `address`, by its own tables, as EL1 reads it. `None`:
/// there is none now. What EL0 may access, EL1 may read.
fn translate(address: u64) -> Option<u64> {
    let old = read!("par_el1");
    // SAFETY: an instruction that sets PAR_EL1, which is the guest's again afterwards.
    let found = unsafe {
        core::arch::asm!("at s1e1r, {}", "isb", in(reg) address, options(nostack, preserves_flags));
        let found = read!("par_el1");
        write!("par_el1", old);
        found
    };
    // F: the translation failed. PA, bits 47 to 12.
    (found & 1 == 0).then_some(found & 0xffff_ffff_f000 | address & 0xfff)
}

impl VirtualCpu for ArmCpu {
    type Format = Stage2;

    const KICK: Kick = Kick::Fast;

    /// There is one: HVC.
    const HYPERCALL: u64 = 0;

    fn hardware() -> Hardware {
        super::hardware()
    }

    fn has_modification_log() -> bool {
        false
    }

    unsafe fn new(second_stage: SecondStage) -> ArmCpu {
        // SAFETY: the caller's promise. They are unloaded when the value is dropped.
        unsafe { load_tables(&second_stage) };
        ArmCpu { registers: Box::default(), syndrome: 0, _stays_on_its_cpu: PhantomData }
    }

    fn start(&mut self, start: Start) {
        self.start_at(start.pc, start.argument);
        // SAFETY: registers of the guest, which does not run. Its tables are of its own memory.
        unsafe {
            write!("sp_el1", start.stack);
            write!("mair_el1", MAIR);
            write!("tcr_el1", TCR | physical_range() << 32);
            write!("ttbr0_el1", start.tables);
            write!("sctlr_el1", SCTLR_OFF | SCTLR_ON);
            execute!("isb");
        }
    }

    fn run(&mut self, presence: &Presence) -> Exit {
        loop {
            let flush = presence.enter();
            // SAFETY: the guest reaches memory by its tables alone, of which `new` has the promise,
            // and leaves by an exception, which puts the registers of this CPU back.
            let kind = unsafe { enter_guest(&raw mut *self.registers) };
            self.syndrome = read!("esr_el2");
            presence.leave(flush);
            if let Some(exit) = self.reason(kind) {
                return exit;
            }
        }
    }

    fn skip(&mut self, length: u64) {
        self.registers.pc += length;
    }

    fn set_result(&mut self, value: u64) {
        self.registers.x[0] = value;
    }

    fn pc(&self) -> u64 {
        self.registers.pc
    }

    fn fault_address(&self) -> u64 {
        read!("far_el1")
    }
}

impl Drop for ArmCpu {
    fn drop(&mut self) {
        // The VM's tables may go after this: no walk uses them any more.
        load_no_tables();
    }
}
