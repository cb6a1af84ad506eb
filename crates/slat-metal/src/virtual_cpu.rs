//! A virtual CPU: what a guest's CPU has in common on all machines.

#![expect(unsafe_code, reason = "its contract is a promise about hardware and memory")]

use slat::dirty::DirtyTracking;
use slat::format::{Format, Hardware};
use slat::tables::AccessTracking;
use slat::{Access, Config, Gpa, Hpa, Vm};

use crate::arch::{Kick, Trap};
use crate::cpus::Presence;
use crate::host::MetalHost;

/// A CPU that runs a guest. It belongs to the CPU of the machine that made it.
pub trait VirtualCpu: Sized + 'static {
    /// The format of its second-stage page tables.
    type Format: Format;

    /// The interrupt that makes it leave the guest, whatever the guest does.
    const KICK: Kick;

    /// The number of the instruction that the suite's guest leaves by
    /// ([`hypercall`](crate::arch::guest::hypercall)): x86 has two. Elsewhere it says nothing.
    const HYPERCALL: u64;

    /// What the calling CPU has, as far as page tables depend on it.
    fn hardware() -> Hardware {
        Hardware::default()
    }

    /// Whether the calling CPU can log what it modifies
    /// ([`DirtyTracking::PageModificationLog`]).
    fn has_modification_log() -> bool;

    /// One on `second_stage`. On x86 it may use no port and no model-specific register.
    ///
    /// # Safety
    /// Virtualization is on, on the calling CPU, to which the value belongs, and which has no other
    /// one. `second_stage` is that of a VM that outlives it, and whose host flushes the
    /// [`Cpus`](crate::cpus::Cpus) of each [`Presence`] that it runs with.
    unsafe fn new(second_stage: SecondStage) -> Self;

    /// Sets all registers so that the guest begins as `start` says.
    fn start(&mut self, start: Start);

    /// Runs the guest until it leaves.
    fn run(&mut self, presence: &Presence) -> Exit;

    /// Continues behind an instruction of `length` bytes.
    fn skip(&mut self, length: u64);

    /// Sets the register that has the result of a function.
    fn set_result(&mut self, value: u64);

    /// The address of the next instruction.
    fn pc(&self) -> u64;

    /// The address of the guest's last page fault of its own.
    fn fault_address(&self) -> u64;
}

/// The page tables that the hardware walks for a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SecondStage {
    /// Their root.
    pub root: Hpa,
    /// Their levels.
    pub nr_levels: u64,
    /// Bits of the addresses that they translate.
    pub gpa_bits: u32,
    /// Whether the CPU sets accessed and dirty bits, where it can be told.
    pub access_tracking: AccessTracking,
    /// Whether the CPU logs what it modifies.
    pub dirty_tracking: DirtyTracking,
}

impl SecondStage {
    /// Those of `vm`, which was created with `config`.
    pub fn of<F: Format>(vm: &Vm<MetalHost, F>, config: &Config) -> SecondStage {
        let nr_levels = u64::from(vm.root_level().0);
        let Config { access_tracking, dirty_tracking, .. } = *config;
        SecondStage { root: vm.root(), nr_levels, gpa_bits: vm.gpa_bits(), access_tracking, dirty_tracking }
    }
}

/// How a guest begins: at its highest privilege level, with interrupts off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Start {
    /// The first instruction.
    pub pc: u64,
    /// The end of the stack.
    pub stack: u64,
    /// The root of the guest's page tables, where it has some.
    pub tables: u64,
    /// The argument of the function at `pc`.
    pub argument: u64,
}

/// Why the guest was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// The second-stage page tables do not allow the access.
    PageFault {
        /// The guest-physical address.
        gpa: Gpa,
        /// What the guest did, or the walk of its page tables.
        access: Access,
    },
    /// A page table of the second stage has a reserved value. By VMX alone: elsewhere it is a page
    /// fault, or among the [others](Exit::Other).
    Misconfigured {
        /// The guest-physical address.
        gpa: Gpa,
    },
    /// Another CPU's kick.
    Kick,
    /// The log of modifications was full. It has been passed on.
    LogFull,
    /// The guest asks its hypervisor for something.
    Hypercall,
    /// What this architecture alone has.
    Trapped(Trap),
    /// A triple fault, of x86.
    Shutdown,
    /// The entry was refused. On Arm, which refuses none: an exception other than the guest's own
    /// and the kick.
    Invalid {
        /// The exit code of SVM. With VMX the VM-instruction error, or the exit reason. On Arm the
        /// kind of the exception, as `boot.s` numbers them.
        code: u64,
    },
    /// Any other code.
    Other {
        /// The exit code of SVM (APM vol. 2, appendix C), the basic exit reason of VMX (SDM vol.
        /// 3D, appendix C "VMX Basic Exit Reasons"), ESR_EL2 of Arm, or scause of RISC-V.
        code: u64,
    },
}
