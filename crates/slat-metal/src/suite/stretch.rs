//! A vCPU of the suite, and its stretches in the guest.

#![expect(unsafe_code, reason = "runs a guest")]

use slat::{Exit as FaultExit, Gpa, Outcome};

use super::guest::{Report, guest_main};
use super::probed;
use super::round::Round;
use crate::arch::guest::{CALL_BYTES, HYPERCALL_BYTES, PROBE_BYTES};
use crate::cpus::Presence;
use crate::operations::MetalVcpu;
use crate::private::Private;
use crate::virtual_cpu::{Exit, Start, VirtualCpu};
use crate::{error, fail};

/// Exits of one stretch, at most: a guest that faults for ever makes no progress.
const MAX_EXITS: u64 = 1_000_000;

/// A vCPU and its CPU.
pub(super) struct Stretches<V: VirtualCpu> {
    // Before the vCPU, which keeps the VM.
    cpu: V,
    vcpu: MetalVcpu<V::Format>,
    presence: Presence,
    number: usize,
}

impl<V: VirtualCpu> Stretches<V> {
    /// The vCPU of `private`, on the calling CPU, which is number `number`.
    pub fn new(round: &Round<V>, private: &Private, number: usize) -> Stretches<V> {
        let vcpu = round.vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        // SAFETY: virtualization is on (`start`). The vCPU keeps the VM, which has these CPUs.
        let mut cpu = unsafe { V::new(round.second_stage) };
        cpu.start(Start {
            pc: guest_main as *const () as u64,
            // As after a call.
            stack: private.stack_end().0 - CALL_BYTES,
            tables: private.gpa.0,
            argument: private.free_gpa().0,
        });
        // SAFETY: one for each CPU of a round.
        let presence = unsafe { Presence::new(&round.cpus, number) };
        Stretches { vcpu, cpu, presence, number }
    }

    /// The vCPU.
    pub fn vcpu(&mut self) -> &mut MetalVcpu<V::Format> {
        &mut self.vcpu
    }

    /// Runs the guest until it has done what its mailbox says.
    pub fn run(&mut self, round: &Round<V>) {
        for _ in 0..MAX_EXITS {
            match self.cpu.run(&self.presence) {
                Exit::Kick | Exit::LogFull => {}
                Exit::PageFault { gpa, access } => match self.vcpu.handle_fault(gpa, access) {
                    Ok(Outcome::Resume) => self.presence.resume(&round.vm, gpa),
                    Ok(Outcome::Exit(FaultExit::MemoryFault { gpa, .. })) => round.operations.bring(gpa),
                    Ok(Outcome::Exit(FaultExit::Mmio { gpa, .. })) if probed::is_probed(gpa) => {
                        self.cpu.set_result(u64::MAX);
                        self.cpu.skip(PROBE_BYTES);
                    }
                    Ok(Outcome::Exit(exit)) => self.fail(format_args!("{exit}")),
                    Err(error) => self.fail(format_args!("{error}")),
                },
                Exit::Hypercall => {
                    self.cpu.skip(HYPERCALL_BYTES);
                    round.blocks().for_each(|gpa| round.cpus.hold(&round.vm, gpa));
                    return self.check_report(round);
                }
                // A defect of this hypervisor.
                Exit::Invalid { code } => error!("the CPU refused to enter the guest: {code:#x}"),
                exit => self.fail(format_args!("{exit:?}")),
            }
        }
        self.fail(format_args!("it made {MAX_EXITS} exits and no progress"))
    }

    fn check_report(&self, round: &Round<V>) {
        let mailbox = round.mailbox(self.number);
        let word = |word: &core::sync::atomic::AtomicU64| word.load(core::sync::atomic::Ordering::Relaxed);
        let (page, expected, found) = (word(&mailbox.page), word(&mailbox.expected), word(&mailbox.found));
        let what = match Report::from_number(word(&mailbox.report)) {
            Some(Report::Done) => return,
            Some(Report::WrongTag) => "a stale read",
            Some(Report::LostWrite) => "a lost write",
            Some(Report::WrongCode) => "stale instructions",
            Some(Report::WrongProbe) => "a page that should not be there",
            None => "nonsense from the guest",
        };
        fail!(Access; "{what}: vCPU {}, page {page}, expected {expected:#x}, found {found:#x}", self.number);
    }

    fn fail(&self, what: core::fmt::Arguments<'_>) -> ! {
        let (pc, gpa) = (self.cpu.pc(), Gpa(self.cpu.fault_address()));
        fail!("vCPU {} was stopped at {pc:#x} (its own last fault: {gpa}): {what}", self.number)
    }
}
