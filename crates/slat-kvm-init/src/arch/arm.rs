//! Arm, at EL1 with stage 2.

#![expect(unsafe_code, reason = "reads the counter, runs a loop of known length, and calls the emulator and KVM")]

use std::arch::asm;
use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_ARM_VM_SMCCC_CTRL, KVM_ARM_VM_SMCCC_FILTER, KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG,
    KVM_REG_SIZE_U64, KVMIO, kvm_device_attr, kvm_regs, kvm_smccc_filter,
    kvm_smccc_filter_action_KVM_SMCCC_FILTER_FWD_TO_USER, kvm_vcpu_init, user_pt_regs,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

pub(crate) use super::semihosting::Port;
use crate::memory::Memory;
use crate::modules::Paging;
use crate::vm::{Counter, Left, Start};
use crate::wrong::{Wrong, tried};

core::arch::global_asm!(".text", include_str!("../../../slat-metal/src/arch/arm/measured.s"));

/// Instructions of a turn of the guest's loop, as `measured.s` has them.
pub(crate) const TURN: u64 = 8;

/// KVM is part of the kernel.
pub(crate) const MODULES: &[&str] = &[];

/// There is one way.
pub(crate) const PAGINGS: &[Paging] = &[Paging { name: "stage2", module: None }];

/// The virtual counter, which has no offset here, and which Linux leaves to its processes. On this
/// CPU it counts nanoseconds, as the physical one does, which the guest reads.
pub(crate) fn ticks() -> u64 {
    let count;
    // SAFETY: it changes nothing. Not earlier than the instructions before.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
    count
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
        asm!("2: subs {turns}, {turns}, #1", "b.ne 2b", turns = inout(reg) turns => _, options(nomem, nostack));
    }
}

/// Asks the emulator for `operation`, with `argument`.
///
/// # Safety
/// The operation reads `argument`, as far as it is there, and writes no memory: others do.
pub(super) unsafe fn semihosting_call(operation: u64, argument: &[u8]) {
    // SAFETY: the emulator reads the argument alone, as the caller promises.
    unsafe { asm!("hlt #0xf000", inout("x0") operation => _, in("x1") argument.as_ptr(), options(nostack)) };
}

/// `KVM_SET_DEVICE_ATTR`, that is `_IOW(KVMIO, 0xe1, struct kvm_device_attr)`
/// (Documentation/virt/kvm/api.rst, 4.80).
const SET_DEVICE_ATTR: u64 = 1 << 30 | (size_of::<kvm_device_attr>() as u64) << 16 | (KVMIO as u64) << 8 | 0xe1;

/// The vCPU `number`, whose hypercalls come to this process: the guest makes one at its end, and has
/// the address of its block where the number of a call is. (Documentation/virt/kvm/devices/vm.rst,
/// 6.2 "`KVM_ARM_VM_SMCCC_FILTER`". The filter cannot be set when the vCPU has run.)
pub(crate) fn new_vcpu(_kvm: &Kvm, vm: &VmFd, number: u64, start: Start) -> Result<VcpuFd, Wrong> {
    let filter = kvm_smccc_filter {
        base: start.block as u32,
        nr_functions: 1,
        action: kvm_smccc_filter_action_KVM_SMCCC_FILTER_FWD_TO_USER as u8,
        ..kvm_smccc_filter::default()
    };
    let attribute = kvm_device_attr {
        group: KVM_ARM_VM_SMCCC_CTRL,
        attr: KVM_ARM_VM_SMCCC_FILTER.into(),
        addr: (&raw const filter).expose_provenance() as u64,
        flags: 0,
    };
    // SAFETY: the argument has the kernel's layout, and both structures outlive the call.
    if unsafe { libc::ioctl(vm.as_raw_fd(), SET_DEVICE_ATTR as _, &raw const attribute) } != 0 {
        return Err(Wrong::system("have hypercalls come to this process", io::Error::last_os_error()));
    }
    let vcpu = tried("create a vCPU", vm.create_vcpu(number))?;
    let mut init = kvm_vcpu_init::default();
    tried("get the kind of the CPU", vm.get_preferred_target(&mut init))?;
    tried("make the vCPU one of the same kind", vcpu.vcpu_init(&init))?;
    Ok(vcpu)
}

/// Writes the guest's page table into the first page of `memory`: 512 GiB to themselves, by blocks
/// of 1 GiB of normal memory, inner shareable, used (Arm ARM, D8.3.2 "Block descriptor and Page
/// descriptor formats"). As `slat-metal` has it.
pub(crate) fn write_page_tables(memory: &Memory, _start: u64) {
    (0..512).for_each(|index| memory.set(8 * index, index << 30 | 1 << 10 | 3 << 8 | 1));
}

/// The number of a general register (Documentation/virt/kvm/api.rst, 4.68): its place in words of 32
/// bits.
const fn core(offset: usize) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / size_of::<u32>()) as u64
}

/// The number of a system register with op0 3 and op1 0 (the same).
const fn system(crn: u64, crm: u64, op2: u64) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG as u64 | 3 << 14 | crn << 7 | crm << 3 | op2
}

const REGS: usize = offset_of!(kvm_regs, regs);
const X0: u64 = core(REGS + offset_of!(user_pt_regs, regs));
const PC: u64 = core(REGS + offset_of!(user_pt_regs, pc));
const PSTATE: u64 = core(REGS + offset_of!(user_pt_regs, pstate));
const SCTLR_EL1: u64 = system(1, 0, 0);
const TTBR0_EL1: u64 = system(2, 0, 0);
const TCR_EL1: u64 = system(2, 0, 2);
const MAIR_EL1: u64 = system(10, 2, 0);

/// EL1 with MMU and caches, and with all interrupts masked, as `slat-metal` starts its guest: its
/// `arch/arm/stage2/run.rs` says what the bits are. Physical addresses have 40 bits, as those of
/// VMs have.
pub(crate) fn start(vcpu: &VcpuFd, start: Start) -> Result<(), Wrong> {
    for (register, value) in [
        (MAIR_EL1, 0xff),
        (TCR_EL1, 2 << 32 | 1 << 23 | 3 << 12 | 1 << 10 | 1 << 8 | 25),
        (TTBR0_EL1, start.tables),
        (SCTLR_EL1, 0x30d0_0800 | 1 << 12 | 1 << 2 | 1),
        (PSTATE, 0x3c5),
        (PC, start.pc),
        (X0, start.block),
    ] {
        tried("set a register", vcpu.set_one_reg(register, &u64::to_le_bytes(value)))?;
    }
    Ok(())
}

/// Runs the guest until it leaves. KVM changes none of its registers at a hypercall that comes here.
pub(crate) fn run(vcpu: &mut VcpuFd) -> Result<Left, kvm_ioctls::Error> {
    Ok(match vcpu.run()? {
        VcpuExit::Hypercall(_) => Left::Done,
        other => Left::Other(format!("{other:?}")),
    })
}
