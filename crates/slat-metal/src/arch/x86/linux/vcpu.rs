//! A CPU of the Linux guest: its start, and its exits.

#![expect(unsafe_code, reason = "runs a guest, and passes its interrupts on")]

use super::identity::{self, EFER};
use crate::arch::x86::apic;
use crate::arch::x86::registers::{Direction, Hypercall, Trap};
use crate::arch::x86::svm::vmcb::Segment;
use crate::arch::x86::svm::{Event, SvmCpu};
use crate::fail;
use crate::linux::{Linux, Start, Vcpu};
use crate::virtual_cpu::{Exit, VirtualCpu};

/// EFER.SVME, which VMRUN requires and the guest does not see; EFER.LMA, which the CPU sets.
const SVME: u64 = 1 << 12;
const LMA: u64 = 1 << 10;

/// ACPI's sleep on QEMU's machines: the control register, and its bit that does it (ACPI
/// Specification 6.5, 4.8.3.2.1 "PM1 Control Registers").
const SLEEP_PORT: u16 = 0x604;
const SLEEP_ENABLE: u64 = 1 << 13;

/// An interrupt command that the guest's controller does not have.
struct BadCommand;

/// A vCPU and its CPU.
pub struct GuestCpu {
    vcpu: Vcpu,
    pub(super) cpu: SvmCpu,
}

impl GuestCpu {
    /// vCPU `number`, on the calling CPU.
    pub fn new(linux: &Linux, number: usize) -> GuestCpu {
        // SAFETY: SVM is on (`start`). The VM is the image's for ever, and has these CPUs.
        let cpu = unsafe { SvmCpu::with_allowed(linux.vm.root(), identity::allowed()) };
        // SAFETY: each CPU makes its own vCPU, once.
        let vcpu = unsafe { Vcpu::new(linux, number) };
        GuestCpu { vcpu, cpu }
    }

    /// Runs the vCPU for ever.
    pub fn run(&mut self, linux: &Linux) -> ! {
        if let Some(target) = linux.arrival() {
            self.arrive(target);
        } else if self.vcpu.number == 0 {
            self.boot(linux);
        } else {
            let Start { entry, .. } = linux.wait_for_start(self.vcpu.number);
            self.start_at(entry);
        }
        loop {
            linux.pause_point();
            if let Some(departure) = linux.departure().filter(|departure| departure.is_ordered()) {
                self.stop(departure);
                continue;
            }
            match self.cpu.run(&self.vcpu.presence) {
                Exit::Kick | Exit::LogFull => {}
                Exit::PageFault { gpa, access } => match self.vcpu.handle_fault(linux, gpa, access) {
                    Ok(()) => {}
                    Err(unhandled) => self.fail(format_args!("{unhandled}")),
                },
                Exit::Hypercall => self.hypercall(linux),
                Exit::Trapped(Trap::Cpuid) => self.cpuid(),
                Exit::Trapped(Trap::ReadMsr) => self.read_msr(),
                Exit::Trapped(Trap::WriteMsr) => self.write_msr(linux),
                Exit::Trapped(Trap::Undefined) => self.cpu.inject(Event::UndefinedOpcode),
                Exit::Trapped(Trap::Port { port, direction, size_bytes, next_rip }) => {
                    // Nothing is there: all ones. 32 bits clear the upper half of the register.
                    let save = self.cpu.save();
                    if (port, direction) == (SLEEP_PORT, Direction::Out) && save.rax & SLEEP_ENABLE != 0 {
                        linux.arrival().inspect(|target| target.turn_off());
                    }
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

    /// The number of the vCPU.
    pub(super) fn number(&self) -> usize {
        self.vcpu.number
    }

    fn fail(&mut self, what: core::fmt::Arguments<'_>) -> ! {
        let (rip, rsp) = (self.cpu.save().rip, self.cpu.save().rsp);
        fail!("vCPU {} of the guest was stopped at {rip:#x}, rsp {rsp:#x}: {what}", self.vcpu.number)
    }

    /// The state in which the boot protocol enters a kernel: 64-bit mode, interrupts off, memory
    /// mapped to itself.
    fn boot(&mut self, linux: &Linux) {
        let Some(image) = linux.guest.image else { fail!("the guest has no kernel") };
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
        let code = save.rax;
        // Linux asks KVM nothing: it was offered no feature.
        save.rax = linux.hypercall(code, [rbx, rcx]);
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
                let start = Start { entry: command & 0xff, argument: 0 };
                // The second startup IPI changes nothing.
                let _ = linux.startups.start((command >> 32) as usize, start);
            }
            _ => return Err(BadCommand),
        }
        Ok(())
    }
}
