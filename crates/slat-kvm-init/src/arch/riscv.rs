//! RISC-V, in VS-mode with the G-stage.

#![expect(unsafe_code, reason = "reads the counter, runs a loop of known length, and calls the emulator")]

use std::arch::asm;
use std::fs;
use std::io;
use std::mem::offset_of;

use kvm_bindings::{
    KVM_EXIT_RISCV_SBI, KVM_REG_RISCV, KVM_REG_RISCV_CORE, KVM_REG_SIZE_U64, kvm_riscv_core, user_regs_struct,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

pub(crate) use super::semihosting::Port;
use crate::memory::Memory;
use crate::modules::Paging;
use crate::vm::{Counter, Left, Start};
use crate::wrong::{Wrong, tried};

core::arch::global_asm!(
    ".macro read_counter register",
    "rdtime \\register",
    ".endm",
    ".text",
    include_str!("../../../slat-metal/src/arch/riscv/measured.s")
);

/// Instructions of a turn of the guest's loop, as `measured.s` has them.
pub(crate) const TURN: u64 = 9;

/// KVM's modules.
pub(crate) const MODULES: &[&str] = &["irqbypass", "kvm"];

/// There is one way.
pub(crate) const PAGINGS: &[Paging] = &[Paging { name: "gstage", module: None }];

/// The counter of cycles, which on this machine counts instructions, of whatever the CPU does.
pub(crate) fn ticks() -> u64 {
    let count;
    // SAFETY: it changes nothing.
    unsafe { asm!("rdcycle {}", out(reg) count, options(nomem, nostack)) };
    count
}

/// The file that says which processes may read the counters, and its value for all of them (Linux,
/// Documentation/admin-guide/sysctl/kernel.rst, "perf_user_access").
const USER_ACCESS: &str = "/proc/sys/kernel/perf_user_access";
const ALL_PROCESSES: &str = "2";

/// Has Linux start the counter of cycles, and leave it to this process: by an event of the CPU, of
/// all that it does, which lives as long as the process.
pub(crate) fn start_counter() -> Result<(), Wrong> {
    /// `struct perf_event_attr` as it was first (linux/perf_event.h): its size; an event of hardware,
    /// and which (`PERF_TYPE_HARDWARE` and `PERF_COUNT_HW_CPU_CYCLES` are 0); the flag `pinned`.
    static ATTRIBUTES: [u64; 8] = [64 << 32, 0, 0, 0, 0, 1 << 2, 0, 0];
    const ALL_TASKS: libc::pid_t = -1;
    const CPU: libc::c_int = 0;
    const NO_GROUP: libc::c_int = -1;
    fs::write(USER_ACCESS, ALL_PROCESSES).map_err(|error| Wrong::system("get the counter of cycles", error))?;
    // SAFETY: the attributes have the size that they say, and the kernel reads them alone.
    let event = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const ATTRIBUTES, ALL_TASKS, CPU, NO_GROUP, 0) };
    // The file stays open.
    if event < 0 { Err(Wrong::system("start the counter of cycles", io::Error::last_os_error())) } else { Ok(()) }
}

/// KVM emulates the counter of cycles for the guest, and gives 0. The guest reads the time instead,
/// which ticks once in 100 instructions.
pub(crate) const COUNTER: Counter = Counter::OfProcess;

/// A loop of two instructions.
pub(crate) fn run_loop(turns: u64) {
    // SAFETY: it changes a register.
    unsafe {
        asm!("2: addi {turns}, {turns}, -1", "bnez {turns}, 2b", turns = inout(reg) turns => _, options(nomem, nostack));
    }
}

/// Asks the emulator for `operation`, with `argument`.
///
/// # Safety
/// The operation reads `argument`, as far as it is there, and writes no memory: others do.
pub(super) unsafe fn semihosting_call(operation: u64, argument: &[u8]) {
    // SAFETY: the emulator reads the argument alone, as the caller promises. The three instructions are the call; they are
    // not compressed, and aligned so that they are in one page.
    unsafe {
        asm!(
            ".option push",
            ".option norvc",
            ".balign 16",
            "slli x0, x0, 0x1f",
            "ebreak",
            "srai x0, x0, 7",
            ".option pop",
            inout("a0") operation => _,
            in("a1") argument.as_ptr(),
            options(nostack),
        );
    }
}

/// The vCPU `number` as KVM has it.
pub(crate) fn new_vcpu(_kvm: &Kvm, vm: &VmFd, number: u64, _start: Start) -> Result<VcpuFd, Wrong> {
    tried("create a vCPU", vm.create_vcpu(number))
}

/// Nothing: the guest has no page tables of its own.
pub(crate) fn write_page_tables(_memory: &Memory, _start: u64) {}

/// The number of a register (Documentation/virt/kvm/api.rst, 4.68): its place in words.
const fn core(offset: usize) -> u64 {
    KVM_REG_RISCV as u64 | KVM_REG_SIZE_U64 | KVM_REG_RISCV_CORE as u64 | (offset / size_of::<u64>()) as u64
}

const REGS: usize = offset_of!(kvm_riscv_core, regs);
const PC: u64 = core(REGS + offset_of!(user_regs_struct, pc));
const A0: u64 = core(REGS + offset_of!(user_regs_struct, a0));
const A7: u64 = core(REGS + offset_of!(user_regs_struct, a7));

/// An extension of SBI whose calls come to this process: the first one of the experimental ones.
const EXTENSION: u64 = 0x0800_0000;

/// VS-mode without address translation of its own, as `slat-metal` starts its guest.
pub(crate) fn start(vcpu: &VcpuFd, start: Start) -> Result<(), Wrong> {
    for (register, value) in [(PC, start.pc), (A0, start.block), (A7, EXTENSION)] {
        tried("set a register", vcpu.set_one_reg(register, &u64::to_le_bytes(value)))?;
    }
    Ok(())
}

/// Runs the guest until it leaves. The call's result goes to `a0`, which keeps its value.
pub(crate) fn run(vcpu: &mut VcpuFd) -> Result<Left, kvm_ioctls::Error> {
    match vcpu.run()? {
        VcpuExit::Unsupported(KVM_EXIT_RISCV_SBI) => {}
        other => return Ok(Left::Other(format!("{other:?}"))),
    }
    // SAFETY: the exit says that this part is the one in use; all its bits are numbers.
    let call = unsafe { &mut vcpu.get_kvm_run().__bindgen_anon_1.riscv_sbi };
    call.ret[0] = call.args[0];
    Ok(Left::Done)
}
