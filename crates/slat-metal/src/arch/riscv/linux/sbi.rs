//! The firmware that the guest has: SBI (RISC-V Supervisor Binary Interface Specification 2.0), as
//! far as Linux needs it. The guest's hart n is vCPU n.

use core::sync::atomic::Ordering;

use sbi_rt::HartMask;
use sbi_spec::binary::SbiRet;
use sbi_spec::{base, hsm, rfnc, spi, srst, time};

use super::answers::{answer_base, targets};
use super::vcpu::GuestCpu;
use crate::arch::riscv::{boot, csr};
use crate::arch::{self, Kick};
use crate::linux::{AlreadyStarted, Linux, Start};

/// A call: the extension, its function, and the arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Call {
    pub extension: usize,
    pub function: usize,
    pub arguments: [usize; 6],
}

impl GuestCpu {
    /// What the firmware answers to `call`.
    pub(super) fn sbi(&mut self, linux: &Linux, call: Call) -> SbiRet {
        let [first, second, third, ..] = call.arguments;
        match (call.extension, call.function) {
            (base::EID_BASE, function) => answer_base(function, first),
            (time::EID_TIME, time::SET_TIMER) => {
                // SAFETY: the guest's own timer. A time that is reached is an interrupt that the
                // hart gives it.
                unsafe { csr::write!("vstimecmp", first as u64) };
                SbiRet::success(0)
            }
            (spi::EID_SPI, spi::SEND_IPI) => match targets(linux.options.nr_cpus, first, second) {
                Some(cpus) => self.send_interrupts(linux, cpus),
                None => SbiRet::invalid_param(),
            },
            (rfnc::EID_RFNC, function) => match targets(linux.options.nr_cpus, first, second) {
                Some(cpus) => fence(function, boot::harts(cpus), call.arguments),
                None => SbiRet::invalid_param(),
            },
            (hsm::EID_HSM, hsm::HART_START) => {
                let start = Start { entry: second as u64, argument: third as u64 };
                match linux.startups.start(first, start) {
                    Some(Ok(())) => SbiRet::success(0),
                    Some(Err(AlreadyStarted)) => SbiRet::already_available(),
                    None => SbiRet::invalid_param(),
                }
            }
            (hsm::EID_HSM, hsm::HART_GET_STATUS) => match linux.startups.is_started(first) {
                Some(true) => SbiRet::success(hsm::hart_state::STARTED),
                Some(false) => SbiRet::success(hsm::hart_state::STOPPED),
                None => SbiRet::invalid_param(),
            },
            // Off, or a restart after a panic.
            (srst::EID_SRST, srst::SYSTEM_RESET) => linux.turned_off(),
            // A hart that stops, or suspends itself: nothing in this guest needs it.
            _ => SbiRet::not_supported(),
        }
    }

    fn send_interrupts(&mut self, linux: &Linux, cpus: u64) -> SbiRet {
        for cpu in (0..linux.options.nr_cpus).filter(|cpu| cpus & 1 << cpu != 0) {
            // SeqCst: the CPU looks at this after it has left its guest, at the latest for the
            // kick.
            linux.guest.interrupts[cpu].store(true, Ordering::SeqCst);
            if cpu != arch::cpu_number() {
                arch::kick(cpu as u32, Kick::Software);
            }
        }
        SbiRet::success(0)
    }

    /// Gives the guest the interrupts that other vCPUs have sent it.
    pub(super) fn take_interrupts(&mut self, linux: &Linux, number: usize) {
        if linux.guest.interrupts[number].swap(false, Ordering::SeqCst) {
            // SAFETY: the guest's own software interrupt.
            unsafe { csr::set!("hvip", csr::GUEST_SOFTWARE) };
        }
    }
}

/// A fence of the guest's on `harts`: of its instructions, or of its own page tables, with the VMID
/// that the calling hart has in `hgatp`.
fn fence(function: usize, harts: u64, [_, _, start, size_bytes, number, _]: [usize; 6]) -> SbiRet {
    let harts = HartMask::from_mask_base(harts as usize, 0);
    match function {
        rfnc::REMOTE_FENCE_I => sbi_rt::remote_fence_i(harts),
        rfnc::REMOTE_SFENCE_VMA => sbi_rt::remote_hfence_vvma(harts, start, size_bytes),
        rfnc::REMOTE_SFENCE_VMA_ASID => sbi_rt::remote_hfence_vvma_asid(harts, start, size_bytes, number),
        _ => SbiRet::not_supported(),
    }
}
