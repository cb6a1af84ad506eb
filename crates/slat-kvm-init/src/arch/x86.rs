//! x86-64, with AMD's nested paging.

#![expect(unsafe_code, reason = "reads the counter, runs a loop of known length, and writes to ports")]

use std::arch::asm;
use std::io;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use crate::console::Verdict;
use crate::memory::{Memory, PAGE_SIZE};
use crate::modules::{Module, Paging};
use crate::vm::{Counter, Left, Start};
use crate::wrong::{Wrong, tried};

core::arch::global_asm!(".text", include_str!("../../../slat-metal/src/arch/x86/measured.s"));

/// Instructions of a turn of the guest's loop, as `measured.s` has them.
pub(crate) const TURN: u64 = 15;

/// KVM's modules that all ways of paging need.
pub(crate) const MODULES: &[&str] = &["irqbypass", "kvm"];

/// By nested paging, which is the TDP MMU; and by shadow page tables.
pub(crate) const PAGINGS: &[Paging] = &[
    Paging { name: "tdp", module: Some(Module { file: "kvm-amd", name: c"kvm_amd", parameters: c"npt=1" }) },
    Paging { name: "shadow", module: Some(Module { file: "kvm-amd", name: c"kvm_amd", parameters: c"npt=0" }) },
];

/// The time-stamp counter.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every x86-64 CPU has it, and reading it changes nothing.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Nothing: it counts always.
#[expect(clippy::unnecessary_wraps, reason = "on RISC-V Linux starts it")]
pub(crate) fn start_counter() -> Result<(), Wrong> {
    Ok(())
}

/// The guest has the counter, too.
pub(crate) const COUNTER: Counter = Counter::OfGuest;

/// A loop of two instructions.
pub(crate) fn run_loop(turns: u64) {
    // SAFETY: it changes a register.
    unsafe {
        asm!("2: dec {turns}", "jnz 2b", turns = inout(reg) turns => _, options(nomem, nostack));
    }
}

const DEBUG_CONSOLE: u16 = 0xe9;
/// QEMU's device `isa-debug-exit`: the machine ends with the status `value << 1 | 1`.
const DEBUG_EXIT: u16 = 0xf4;

/// The right to use the ports of the debug console and of the exit device.
pub(crate) struct Port(());

impl Port {
    /// Asks Linux for the ports.
    pub(crate) fn open() -> Result<Port, Wrong> {
        for port in [DEBUG_CONSOLE, DEBUG_EXIT] {
            // SAFETY: it changes what this process may do, and no memory.
            if unsafe { libc::ioperm(port.into(), 1, 1) } != 0 {
                return Err(Wrong::system("use the ports of the debug console", io::Error::last_os_error()));
            }
        }
        Ok(Port(()))
    }

    fn write(&mut self, port: u16, value: u8) {
        // SAFETY: `open` got the right to both ports. One prints, the other ends the machine.
        unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags)) };
    }

    /// Prints `text`.
    pub(crate) fn print(&mut self, text: &str) {
        text.bytes().for_each(|byte| self.write(DEBUG_CONSOLE, byte));
    }

    /// Ends the machine.
    pub(crate) fn end(&mut self, verdict: Verdict) {
        self.write(DEBUG_EXIT, verdict.status() >> 1);
    }
}

/// The vCPU `number` with all that KVM supports.
pub(crate) fn new_vcpu(kvm: &Kvm, vm: &VmFd, number: u64, _start: Start) -> Result<VcpuFd, Wrong> {
    let vcpu = tried("create a vCPU", vm.create_vcpu(number))?;
    let cpuid = tried("get the CPUID", kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
    tried("set the CPUID", vcpu.set_cpuid2(&cpuid))?;
    Ok(vcpu)
}

/// Writes the guest's page tables into the first two pages of `memory`, which the guest has at
/// `start`: 512 GiB to themselves.
pub(crate) fn write_page_tables(memory: &Memory, start: u64) {
    let pointers = PAGE_SIZE;
    // Present, writable, accessed; and dirty, 1 GiB (AMD APM vol. 2, 5.3.4 and 5.4).
    memory.set(0, (start + pointers) | 0x23);
    (0..512).for_each(|index| memory.set(pointers + 8 * index, index << 30 | 0xe3));
}

/// 64-bit mode at CPL 0, as `slat-metal` starts its guest.
pub(crate) fn start(vcpu: &VcpuFd, start: Start) -> Result<(), Wrong> {
    let mut sregs = tried("get the system registers", vcpu.get_sregs())?;
    let data =
        kvm_segment { limit: u32::MAX, selector: 8, type_: 3, present: 1, s: 1, db: 1, g: 1, ..kvm_segment::default() };
    sregs.cs = kvm_segment { type_: 0xb, l: 1, db: 0, ..data };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 = 0x8001_0033;
    sregs.cr3 = start.tables;
    sregs.cr4 = 0x620;
    sregs.efer = 0xd00;
    tried("set the system registers", vcpu.set_sregs(&sregs))?;
    let regs = kvm_regs { rip: start.pc, rdi: start.block, rflags: 2, ..kvm_regs::default() };
    tried("set the registers", vcpu.set_regs(&regs))
}

/// Runs the guest until it leaves.
pub(crate) fn run(vcpu: &mut VcpuFd) -> Result<Left, kvm_ioctls::Error> {
    Ok(match vcpu.run()? {
        VcpuExit::IoOut(..) => Left::Done,
        other => Left::Other(format!("{other:?}")),
    })
}
