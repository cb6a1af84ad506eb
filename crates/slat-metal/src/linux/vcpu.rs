//! A CPU of the Linux guest: its start, and its exits.

#![expect(unsafe_code, reason = "runs a guest, and passes its interrupts on")]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use slat::format::Npt;
use slat::{Exit as FaultExit, Outcome};

use super::identity::{self, EFER};
use super::{Linux, Stage};
use crate::host::Presence;
use crate::operations::MetalVcpu;
use crate::svm::vmcb::Segment;
use crate::svm::{Event, SvmCpu};
use crate::virtual_cpu::{Direction, Exit, Hypercall, VirtualCpu};
use crate::x86::{apic, clock, console};
use crate::{error, fail, say};

/// Hypercalls of the guest's program: `rax` has the magic and the code, `rbx` and `rcx` arguments.
const MAGIC: u64 = 0x736c_6174_0000_0000;
const UP: u64 = MAGIC;
const ROUND: u64 = MAGIC | 1;
const DONE: u64 = MAGIC | 2;
const FAILED: u64 = MAGIC | 3;

/// EFER.SVME, which VMRUN requires and the guest does not see; EFER.LMA, which the CPU sets.
const SVME: u64 = 1 << 12;
const LMA: u64 = 1 << 10;

/// An interrupt command that the guest's controller does not have.
struct BadCommand;

/// How late a page comes that the guest waits for, at most.
const MAX_LATE_US: u64 = 300;

/// What other vCPUs ask of each.
#[derive(Debug)]
pub(super) struct Startups {
    /// For each vCPU: 0 before INIT and after it, else the vector of the startup IPI and
    /// [`STARTED`].
    vectors: Vec<AtomicU64>,
    nr_waiting: AtomicU64,
}

const STARTED: u64 = 1 << 32;

impl Startups {
    /// All but vCPU 0 wait.
    pub fn new(nr_cpus: usize) -> Startups {
        Startups { vectors: (0..nr_cpus).map(|_| AtomicU64::new(0)).collect(), nr_waiting: AtomicU64::new(0) }
    }

    /// vCPUs that wait for their start.
    pub fn nr_waiting(&self) -> u64 {
        self.nr_waiting.load(Ordering::SeqCst)
    }
}

/// A vCPU and its CPU.
pub(super) struct GuestCpu {
    vcpu: MetalVcpu<Npt>,
    cpu: SvmCpu,
    presence: Presence,
    number: usize,
    rng: Rng,
}

impl GuestCpu {
    /// vCPU `number`, on the calling CPU.
    pub fn new(linux: &Linux, number: usize) -> GuestCpu {
        let vcpu = linux.vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        // SAFETY: SVM is on (`start`). The VM is the image's for ever, and has these CPUs.
        let cpu = unsafe { SvmCpu::with_allowed(linux.vm.root(), identity::allowed()) };
        let presence = Presence::new(&linux.cpus, number);
        GuestCpu { vcpu, cpu, presence, number, rng: Rng::with_seed(linux.options.seed ^ number as u64) }
    }

    /// Runs the vCPU for ever.
    pub fn run(&mut self, linux: &Linux) -> ! {
        if self.number == 0 {
            self.boot(linux);
        } else {
            let vector = self.wait_for_startup(linux);
            self.start_at(vector);
        }
        loop {
            linux.pause_point();
            match self.cpu.run(&self.presence) {
                Exit::Kick | Exit::LogFull => {}
                Exit::PageFault { gpa, access } => match self.vcpu.handle_fault(gpa, access) {
                    Ok(Outcome::Resume) => {}
                    Ok(Outcome::Exit(FaultExit::MemoryFault { gpa, .. })) => {
                        clock::wait_us(self.rng.u64(0..MAX_LATE_US));
                        linux.operations.bring(gpa);
                    }
                    Ok(Outcome::Exit(exit)) => self.fail(format_args!("{exit}")),
                    Err(error) => self.fail(format_args!("{error}")),
                },
                Exit::Hypercall => self.hypercall(linux),
                Exit::Cpuid => self.cpuid(),
                Exit::ReadMsr => self.read_msr(),
                Exit::WriteMsr => self.write_msr(linux),
                Exit::Undefined => self.cpu.inject(Event::UndefinedOpcode),
                Exit::Port { direction, size_bytes, next_rip, .. } => {
                    // Nothing is there: all ones. 32 bits clear the upper half of the register.
                    let save = self.cpu.save();
                    save.rax = match (direction, size_bytes) {
                        (Direction::Out, _) => save.rax,
                        (Direction::In, 1) => save.rax | 0xff,
                        (Direction::In, 2) => save.rax | 0xffff,
                        (Direction::In, _) => 0xffff_ffff,
                    };
                    save.rip = next_rip;
                }
                exit @ (Exit::Shutdown | Exit::Misconfigured { .. } | Exit::Invalid { .. } | Exit::Other { .. }) => {
                    self.fail(format_args!("{exit:?}"))
                }
            }
        }
    }

    fn fail(&mut self, what: core::fmt::Arguments<'_>) -> ! {
        let (rip, rsp) = (self.cpu.save().rip, self.cpu.save().rsp);
        fail!("vCPU {} of the guest was stopped at {rip:#x}, rsp {rsp:#x}: {what}", self.number)
    }

    /// The state in which the boot protocol enters a kernel: 64-bit mode, interrupts off, memory
    /// mapped to itself.
    fn boot(&mut self, linux: &Linux) {
        let image = linux.image;
        self.cpu.registers.rsi = image.boot_params;
        let segment = |selector, attributes| Segment { selector, attributes, limit: u32::MAX, base: 0 };
        let save = self.cpu.save();
        save.cs = segment(0x10, 0xa9b);
        let data = segment(0x18, 0xc93);
        (save.ss, save.ds, save.es, save.fs, save.gs) = (data, data, data, data, data);
        save.tr = segment(0, 0x8b);
        save.ldtr = segment(0, 0x82);
        save.gdtr.base = image.gdt.start;
        save.gdtr.limit = image.gdt.size_bytes() as u32 - 1;
        // CR0: paging, NE, ET, protection. CR4: PAE. EFER: SVME, LMA, LME.
        save.cr0 = 0x8000_0031;
        save.cr4 = 0x20;
        save.cr3 = image.cr3;
        save.efer = 0x1500;
        save.rip = image.entry;
        save.rsp = image.boot_params;
        self.after_reset();
    }

    fn after_reset(&mut self) {
        let save = self.cpu.save();
        save.rflags = 2;
        save.dr6 = 0xffff_0ff0;
        save.dr7 = 0x400;
    }

    fn wait_for_startup(&self, linux: &Linux) -> u64 {
        let Startups { vectors, nr_waiting } = &linux.startups;
        // The order matters: a paused guest waits for as many CPUs as there are.
        nr_waiting.fetch_add(1, Ordering::SeqCst);
        linux.nr_outside.fetch_add(1, Ordering::SeqCst);
        let vector = loop {
            // Acquire: what the guest wrote for its CPU before the startup IPI.
            match vectors[self.number].load(Ordering::Acquire) {
                0 => core::hint::spin_loop(),
                started => break started & !STARTED,
            }
        };
        nr_waiting.fetch_sub(1, Ordering::SeqCst);
        linux.nr_outside.fetch_sub(1, Ordering::SeqCst);
        vector
    }

    /// Real mode at `vector` << 12, as after INIT and a startup IPI (AMD APM vol. 2, 14.1.3,
    /// 16.9.4).
    fn start_at(&mut self, vector: u64) {
        let segment = |attributes| Segment { selector: 0, attributes, limit: 0xffff, base: 0 };
        self.cpu.registers.rdx = u64::from(core::arch::x86_64::__cpuid(1).eax);
        let save = self.cpu.save();
        save.cs = Segment { selector: (vector << 8) as u16, base: vector << 12, ..segment(0x9b) };
        (save.ss, save.ds, save.es, save.fs, save.gs) =
            (segment(0x93), segment(0x93), segment(0x93), segment(0x93), segment(0x93));
        save.tr = segment(0x8b);
        save.ldtr = segment(0x82);
        (save.gdtr, save.idtr) = (segment(0), segment(0));
        save.cr0 = 0x6000_0010;
        save.efer = SVME;
        self.after_reset();
    }

    fn hypercall(&mut self, linux: &Linux) {
        let (rbx, rcx) = (self.cpu.registers.rbx, self.cpu.registers.rcx);
        let save = self.cpu.save();
        let code = core::mem::replace(&mut save.rax, 0);
        match code {
            UP => {
                let elapsed_ms = (clock::now_ns() - linux.started_ns) / 1_000_000;
                console::figure_ms("boot_time", elapsed_ms);
                say!("the guest is up with {rbx} CPUs after {elapsed_ms} ms");
                *linux.stage.lock() = Stage::Up;
            }
            ROUND => say!("the guest has done round {rbx}, and verified {rcx} pages"),
            DONE => *linux.stage.lock() = Stage::Done { rounds: rbx, pages: rcx },
            // Without a page: the process itself.
            FAILED if (rbx, rcx) == (0, 0) => fail!("the guest's first process failed; its last line says why"),
            FAILED => fail!("the guest found another content at its address {rbx:#x}, page {rcx}"),
            // Linux asks KVM nothing: it was offered no feature.
            _ => save.rax = u64::MAX,
        }
        self.cpu.skip(Hypercall::BYTES);
    }

    fn cpuid(&mut self) {
        let (leaf, subleaf) = (self.cpu.save().rax as u32, self.cpu.registers.rcx as u32);
        let [eax, ebx, ecx, edx] = identity::cpuid(leaf, subleaf);
        self.cpu.save().rax = u64::from(eax);
        let registers = &mut self.cpu.registers;
        (registers.rbx, registers.rcx, registers.rdx) = (u64::from(ebx), u64::from(ecx), u64::from(edx));
        self.cpu.skip(2);
    }

    fn read_msr(&mut self) {
        let msr = self.cpu.registers.rcx as u32;
        let value = match msr {
            EFER => Some(self.cpu.save().efer & !SVME),
            msr => identity::read_msr(msr),
        };
        let Some(value) = value else { return self.cpu.inject(Event::GeneralProtection) };
        self.cpu.save().rax = value & 0xffff_ffff;
        self.cpu.registers.rdx = value >> 32;
        self.cpu.skip(2);
    }

    fn write_msr(&mut self, linux: &Linux) {
        let msr = self.cpu.registers.rcx as u32;
        let value = self.cpu.registers.rdx << 32 | self.cpu.save().rax & 0xffff_ffff;
        match msr {
            EFER => {
                let save = self.cpu.save();
                save.efer = value & !LMA | save.efer & LMA | SVME;
            }
            apic::X2APIC_ICR => match self.send_interrupt(linux, value) {
                Ok(()) => {}
                Err(BadCommand) => return self.cpu.inject(Event::GeneralProtection),
            },
            msr if identity::ignores_write(msr) => {}
            _ => return self.cpu.inject(Event::GeneralProtection),
        }
        self.cpu.skip(2);
    }

    /// An interrupt command of the guest. Those that would reset or start a CPU are for the vCPU;
    /// others go to the controller, whose numbers are those of the guest's CPUs.
    /// A startup IPI to more than one CPU at once is ignored.
    fn send_interrupt(&self, linux: &Linux, command: u64) -> Result<(), BadCommand> {
        // The delivery mode, bits 10:8, and reserved bits (Intel SDM vol. 3A, 11.6.1 and 11.12.9).
        match command >> 8 & 7 {
            _ if command & 0xfff3_3000 != 0 => return Err(BadCommand),
            // SAFETY: a fixed or lowest-priority interrupt without reserved bits: it waits for its
            // CPU to be in the guest, and is the guest's.
            0 | 1 => unsafe { apic::write_icr(command) },
            // NMI, which a kick is, and which nothing in this guest needs; INIT.
            4 | 5 => {}
            6 => {
                let target = (command >> 32) as usize;
                if let Some(vector) = linux.startups.vectors.get(target) {
                    // Release: what this vCPU wrote before. The second startup IPI changes nothing.
                    vector.store(STARTED | command & 0xff, Ordering::Release);
                }
            }
            _ => return Err(BadCommand),
        }
        Ok(())
    }
}
