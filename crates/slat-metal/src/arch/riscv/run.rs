//! A virtual CPU: entries into the guest, and why it left.
//!
//! # An entry
//! Interrupts are off in HS-mode, and on as soon as the hart is in the guest, whatever the guest
//! does: a kick that comes before the entry makes the guest leave at once (RISC-V Privileged
//! Architecture, "Supervisor Interrupt (sip and sie) Registers").
//!
//! The registers of VS-mode are the hart's own, and stay in it: a CPU runs one guest.

#![expect(unsafe_code, reason = "enters a guest")]

use alloc::boxed::Box;
use core::marker::PhantomData;
use core::mem::offset_of;

use slat::format::{Format, Sv39x4, Sv48x4, Sv57x4};

use super::fault::{GUEST_FETCH_FAULT, GUEST_LOAD_FAULT, GUEST_STORE_FAULT, page_fault};
use super::features::Features;
use super::{Kick, boot, csr, flush, guest};
use crate::cpus::{Flush, Presence};
use crate::error;
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};

/// A format of G-stage page tables.
pub trait GStage: Format {
    /// Its number in `hgatp`.
    const MODE: u64;
}

/// Whether the calling hart has page tables of format `F`.
pub fn has_format<F: GStage>() -> bool {
    // A mode that is not there leaves the register as it is.
    // SAFETY: an entry into a guest writes the register anew.
    unsafe { csr::write!("hgatp", F::MODE << csr::HGATP_MODE_SHIFT) };
    let is_there = csr::read!("hgatp") >> csr::HGATP_MODE_SHIFT == F::MODE;
    // SAFETY: as above.
    unsafe { csr::write!("hgatp", 0_u64) };
    is_there
}

impl GStage for Sv39x4 {
    const MODE: u64 = 8;
}

impl GStage for Sv48x4 {
    const MODE: u64 = 9;
}

impl GStage for Sv57x4 {
    const MODE: u64 = 10;
}

/// Exits that other machines do not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// An instruction that a hypervisor could execute for the guest: one of the hypervisor
    /// extension among others, also in the guest's user mode.
    VirtualInstruction,
}

/// The registers of a guest, and why it has left.
#[derive(Debug)]
#[repr(C)]
pub struct Registers {
    /// x0 to x31. The first is always 0.
    pub x: [u64; 32],
    /// The next instruction.
    pub pc: u64,
    /// The guest's privilege, S or U, which SRET returns to.
    sstatus: u64,
    /// That SRET returns to a guest: always so.
    hstatus: u64,
    scause: u64,
    /// What goes with the cause: an address, or an instruction.
    pub stval: u64,
    htval: u64,
    htinst: u64,
    /// The stack of the hypervisor, during a stay.
    host_sp: u64,
}

impl Registers {
    /// Those of a guest in supervisor mode, with its floating-point and vector units on.
    fn new() -> Registers {
        Registers {
            x: [0; 32],
            pc: 0,
            sstatus: csr::STATUS_SPP | csr::STATUS_FS | csr::STATUS_VS | csr::STATUS_UXL_64,
            hstatus: csr::HSTATUS_SPV | csr::HSTATUS_SPVP | csr::HSTATUS_VSXL_64,
            scause: 0,
            stval: 0,
            htval: 0,
            htinst: 0,
            host_sp: 0,
        }
    }
}

/// The number of a0. The arguments of a call begin there.
pub const A0: usize = 10;

core::arch::global_asm!(
    ".set PC, {pc}",
    ".set SSTATUS, {sstatus}",
    ".set HSTATUS, {hstatus}",
    ".set SCAUSE, {scause}",
    ".set STVAL, {stval}",
    ".set HTVAL, {htval}",
    ".set HTINST, {htinst}",
    ".set HOST_SP, {host_sp}",
    include_str!("enter.s"),
    pc = const offset_of!(Registers, pc),
    sstatus = const offset_of!(Registers, sstatus),
    hstatus = const offset_of!(Registers, hstatus),
    scause = const offset_of!(Registers, scause),
    stval = const offset_of!(Registers, stval),
    htval = const offset_of!(Registers, htval),
    htinst = const offset_of!(Registers, htinst),
    host_sp = const offset_of!(Registers, host_sp),
);

unsafe extern "C" {
    /// Runs the guest of `registers`.
    ///
    /// # Safety
    /// The registers of the hypervisor extension have a guest of the calling CPU.
    fn enter_guest(registers: *mut Registers);
}

/// Causes of exceptions ("Machine Cause (mcause) Register").
const GUEST_CALL: u64 = 10;
const VIRTUAL_INSTRUCTION: u64 = 22;

/// Exceptions that the guest has itself: misaligned addresses, illegal instructions, breakpoints,
/// calls of its user mode, page faults of its own tables.
const DELEGATED: u64 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 15;

/// SBI's feature 4 of the firmware: harts set A and D ("Firmware Features Extension").
const PTE_AD_HW_UPDATING: u32 = 4;

/// What sets the accessed and dirty bits of the G-stage.
pub trait Bits: 'static {
    /// Tells the firmware of the calling hart. Returns whether it is so from now on.
    fn choose() -> bool;
}

/// The harts, if they can (Svadu). Otherwise it is as with [`BitsByFaults`].
#[derive(Debug)]
pub struct BitsByHarts;

/// A fault where they are clear: the engine sets them.
#[derive(Debug)]
pub struct BitsByFaults;

impl Bits for BitsByHarts {
    fn choose() -> bool {
        let features = boot::features();
        let is_told = sbi_rt::fwft_set(PTE_AD_HW_UPDATING, 1, 0).is_ok();
        // Harts that have no other way need not be told.
        features.contains(Features::SVADU) && (is_told || !features.contains(Features::SVADE))
    }
}

impl Bits for BitsByFaults {
    fn choose() -> bool {
        !boot::features().contains(Features::SVADU) || sbi_rt::fwft_set(PTE_AD_HW_UPDATING, 0, 0).is_ok()
    }
}

/// A virtual CPU on page tables of format `F`, whose accessed and dirty bits `B` sets.
#[derive(Debug)]
pub struct RiscvCpu<F, B> {
    registers: Box<Registers>,
    /// The mode, the VMID and the root of the page tables.
    hgatp: u64,
    kind: PhantomData<(F, B)>,
    /// The hart has its registers.
    _stays_on_its_cpu: PhantomData<*mut ()>,
}

impl<F, B> RiscvCpu<F, B> {
    /// The guest's registers.
    pub fn registers(&mut self) -> &mut Registers {
        &mut self.registers
    }

    /// Delivers the exception `cause` to the guest's supervisor mode, with `value` in `stval`.
    pub fn inject(&mut self, cause: u64, value: u64) {
        const SPP: u64 = csr::STATUS_SPP;
        const SIE: u64 = 1 << 1;
        const SPIE: u64 = 1 << 5;
        let status = csr::read!("vsstatus");
        let interrupts = if status & SIE != 0 { SPIE } else { 0 };
        // The guest's privilege before this trap becomes that before its own.
        let status = status & !(SPP | SIE | SPIE) | self.registers.sstatus & SPP | interrupts;
        // SAFETY: the guest's own registers.
        unsafe {
            csr::write!("vsepc", self.registers.pc);
            csr::write!("vscause", cause);
            csr::write!("vstval", value);
            csr::write!("vsstatus", status);
        }
        self.registers.sstatus |= SPP;
        self.registers.hstatus |= csr::HSTATUS_SPVP;
        self.registers.pc = csr::read!("vstvec") & !3;
    }

    /// The cause, in words.
    fn reason(&mut self) -> Exit {
        let Registers { scause, stval, htval, htinst, .. } = *self.registers;
        match scause {
            KICKED => {
                // SAFETY: no other interrupt than this.
                unsafe { csr::clear!("sip", csr::SUPERVISOR_SOFTWARE) };
                Exit::Kick
            }
            GUEST_FETCH_FAULT | GUEST_LOAD_FAULT | GUEST_STORE_FAULT => {
                let (gpa, access) = page_fault(scause, stval, htval, htinst);
                Exit::PageFault { gpa, access }
            }
            GUEST_CALL => Exit::Hypercall,
            VIRTUAL_INSTRUCTION => Exit::Trapped(Trap::VirtualInstruction),
            code => Exit::Other { code },
        }
    }
}

/// The cause of a kick.
const KICKED: u64 = csr::INTERRUPT | 1;

impl<F: GStage, B: Bits> VirtualCpu for RiscvCpu<F, B> {
    type Format = F;

    /// Interrupts are off in HS-mode.
    const KICK: Kick = Kick::Software;

    const HYPERCALL: u64 = 0;

    fn has_modification_log() -> bool {
        false
    }

    unsafe fn new(second_stage: SecondStage) -> RiscvCpu<F, B> {
        B::choose();
        let root = second_stage.root.0 >> 12;
        let hgatp = F::MODE << csr::HGATP_MODE_SHIFT | flush::VMID << csr::HGATP_VMID_SHIFT | root;
        let has_timer = boot::features().contains(Features::SSTC);
        // SAFETY: registers of the guest and of its virtualization. `hgatp` has the page tables of
        // a VM that outlives this value.
        unsafe {
            csr::write!("hedeleg", DELEGATED);
            csr::write!("hideleg", csr::GUEST_SOFTWARE | csr::GUEST_TIMER | csr::GUEST_EXTERNAL);
            csr::write!("hie", 0_u64);
            csr::write!("hvip", 0_u64);
            csr::write!("htimedelta", 0_u64);
            // The counters of cycles, time and instructions.
            csr::write!("hcounteren", 7_u64);
            // Without ADUE: the guest sets A and D of its own page tables. QEMU's harts would do
            // that in pages that the G-stage protects.
            csr::write!("henvcfg", if has_timer { csr::ENVCFG_STCE } else { 0 });
            if has_timer {
                // Never, until the guest sets it.
                csr::write!("vstimecmp", u64::MAX);
            }
            csr::write!("hgatp", hgatp);
            csr::write!("vsatp", 0_u64);
            csr::write!("vsstatus", csr::STATUS_UXL_64);
            csr::write!("vsie", 0_u64);
            csr::write!("vstvec", 0_u64);
            csr::write!("vsscratch", 0_u64);
        }
        flush::own_fence();
        // As the register has it: a hart may have fewer VMIDs.
        let hgatp = csr::read!("hgatp");
        if hgatp >> csr::HGATP_MODE_SHIFT != F::MODE {
            error!("the CPU has no {} page tables", F::NAME);
        }
        RiscvCpu { registers: Box::new(Registers::new()), hgatp, kind: PhantomData, _stays_on_its_cpu: PhantomData }
    }

    fn start(&mut self, start: Start) {
        *self.registers = Registers::new();
        let registers = &mut *self.registers;
        registers.x[2] = start.stack;
        registers.x[A0] = start.argument;
        registers.pc = start.pc;
    }

    fn run(&mut self, presence: &Presence) -> Exit {
        // Another value of this CPU may have had the register.
        if csr::read!("hgatp") != self.hgatp {
            // SAFETY: the page tables of `new`.
            unsafe { csr::write!("hgatp", self.hgatp) };
            flush::own_fence();
        }
        let flushed = presence.enter();
        if flushed == Flush::All {
            flush::own_fence();
        }
        guest::fetch_again();
        // SAFETY: `new` has set the registers of the extension up for this guest, on this CPU.
        unsafe { enter_guest(&raw mut *self.registers) };
        presence.leave(flushed);
        self.reason()
    }

    fn skip(&mut self, length: u64) {
        self.registers.pc += length;
    }

    fn set_result(&mut self, value: u64) {
        self.registers.x[A0] = value;
    }

    fn pc(&self) -> u64 {
        self.registers.pc
    }

    fn fault_address(&self) -> u64 {
        csr::read!("vstval")
    }
}

impl<F, B> Drop for RiscvCpu<F, B> {
    fn drop(&mut self) {
        // SAFETY: no guest's page tables any more.
        unsafe { csr::write!("hgatp", 0_u64) };
        flush::own_fence();
    }
}
