//! A vCPU of the suite, and its stretches in the guest.

#![expect(unsafe_code, reason = "runs a guest")]

use slat::{Exit as FaultExit, Gpa, Outcome};

use super::guest::{PROBE_BYTES, Report, guest_main};
use super::probed::Probed;
use super::round::{Private, Round};
use crate::host::Presence;
use crate::operations::MetalVcpu;
use crate::svm::vmcb::{MsrMap, PortMap, Segment};
use crate::svm::{Allowed, Exit, VirtualCpu};
use crate::{error, fail};

/// Exits of one stretch, at most: a guest that faults for ever makes no progress.
const MAX_EXITS: u64 = 1_000_000;

/// A vCPU and its CPU.
pub(super) struct Stretches {
    // Before the vCPU, which keeps the VM.
    cpu: VirtualCpu,
    vcpu: MetalVcpu,
    presence: Presence,
    number: usize,
}

/// The guest has no port and no model-specific register.
fn allowed() -> Allowed {
    static NOTHING: spin::Once<Allowed> = spin::Once::new();
    *NOTHING.call_once(|| {
        let mut ports = PortMap::new();
        (0..=u16::MAX).for_each(|port| ports.intercept(port));
        Allowed { ports: alloc::boxed::Box::leak(ports), msrs: alloc::boxed::Box::leak(MsrMap::new()) }
    })
}

impl Stretches {
    /// The vCPU of `private`, on the calling CPU, which is number `number`.
    pub fn new(round: &Round, private: &Private, number: usize) -> Stretches {
        let vcpu = round.vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        // SAFETY: SVM is on (`start`). The vCPU keeps the VM, which has these CPUs.
        let mut cpu = unsafe { VirtualCpu::new(round.vm.root().0, allowed()) };
        let (mailbox, stack_end) = private.guest_addresses();
        // 64-bit mode (AMD APM vol. 2, 4.8 "Long-Mode Segment Descriptors"; 15.5.1).
        let segment = |attributes| Segment { selector: 8, attributes, limit: u32::MAX, base: 0 };
        let save = cpu.save();
        save.cs = segment(0xa9b);
        (save.ss, save.ds, save.es, save.fs, save.gs) =
            (segment(0xc93), segment(0xc93), segment(0xc93), segment(0xc93), segment(0xc93));
        save.tr = segment(0x8b);
        save.ldtr = segment(0x82);
        // CR0: paging, write protection, NE, ET, MP, protection. CR4: PAE, OSFXSR, OSXMMEXCPT. EFER:
        // SVME, as VMRUN requires, NXE, LMA, LME.
        save.cr0 = 0x8001_0033;
        save.cr4 = 0x620;
        save.cr3 = private.gpa.0;
        save.efer = 0x1d00;
        save.rflags = 2;
        save.dr6 = 0xffff_0ff0;
        save.dr7 = 0x400;
        save.rip = guest_main as *const () as u64;
        // As after a call: a return address would be at the top.
        save.rsp = stack_end - 8;
        cpu.registers.rdi = mailbox;
        Stretches { vcpu, cpu, presence: Presence::new(&round.cpus, number), number }
    }

    /// The vCPU.
    pub fn vcpu(&mut self) -> &mut MetalVcpu {
        &mut self.vcpu
    }

    /// Runs the guest until it has done what its mailbox says.
    pub fn run(&mut self, round: &Round) {
        for _ in 0..MAX_EXITS {
            match self.cpu.run(&self.presence) {
                Exit::Kick => {}
                Exit::NestedPageFault { gpa, access } => match self.vcpu.handle_fault(gpa, access) {
                    Ok(Outcome::Resume) => {}
                    Ok(Outcome::Exit(FaultExit::MemoryFault { gpa, .. })) => round.operations.bring(gpa),
                    Ok(Outcome::Exit(FaultExit::Mmio { gpa, .. })) if Probed::has(gpa) => {
                        self.cpu.save().rax = u64::MAX;
                        self.cpu.skip(PROBE_BYTES);
                    }
                    Ok(Outcome::Exit(exit)) => self.fail(format_args!("{exit}")),
                    Err(error) => self.fail(format_args!("{error}")),
                },
                // VMMCALL has three bytes.
                Exit::Hypercall => {
                    self.cpu.skip(3);
                    return self.check_report(round);
                }
                exit => self.fail(format_args!("{exit:?}")),
            }
        }
        self.fail(format_args!("it made {MAX_EXITS} exits and no progress"))
    }

    fn check_report(&self, round: &Round) {
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
        fail!("{what}: vCPU {}, page {page}, expected {expected:#x}, found {found:#x}", self.number);
    }

    fn fail(&mut self, what: core::fmt::Arguments<'_>) -> ! {
        let (rip, gpa) = (self.cpu.save().rip, Gpa(self.cpu.save().cr2));
        fail!("vCPU {} was stopped at {rip:#x} (CR2 {gpa}): {what}", self.number)
    }
}
