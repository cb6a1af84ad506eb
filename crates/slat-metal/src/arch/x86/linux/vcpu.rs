//! A CPU of the Linux guest: its start, and its exits.

#![expect(unsafe_code, reason = "runs a guest, and passes its interrupts on")]

use super::cpu::PcCpu;
use super::identity::{self, EFER};
use crate::arch::x86::apic;
use crate::arch::x86::registers::{Direction, Event, Hypercall, State, Trap};
use crate::arch::x86::svm::vmcb::Segment;
use crate::fail;
use crate::linux::{Linux, LinuxCpu, Stage, Start, Vcpu};
use crate::virtual_cpu::{Exit, SecondStage};

/// ACPI's sleep on QEMU's machines: the control register, and its bit that does it (ACPI
/// Specification 6.5, 4.8.3.2.1 "PM1 Control Registers").
const SLEEP_PORT: u16 = 0x604;
const SLEEP_ENABLE: u64 = 1 << 13;

/// An interrupt command that the guest's controller does not have.
struct BadCommand;

/// A vCPU and its CPU.
pub struct GuestCpu<C: PcCpu> {
    vcpu: Vcpu<C>,
    pub(super) cpu: C,
}

impl<C: PcCpu> LinuxCpu for C {
    fn run_linux(linux: &Linux<C>, number: usize) -> ! {
        GuestCpu::new(linux, number).run(linux)
    }
}

impl<C: PcCpu> GuestCpu<C> {
    /// vCPU `number`, on the calling CPU.
    pub fn new(linux: &Linux<C>, number: usize) -> GuestCpu<C> {
        // SAFETY: virtualization is on (`start`). The VM is the image's for ever, and has these
        // CPUs.
        let cpu = unsafe { C::with_machine(SecondStage::of(&linux.vm, &linux.config)) };
        // SAFETY: each CPU makes its own vCPU, once.
        let vcpu = unsafe { Vcpu::new(linux, number) };
        GuestCpu { vcpu, cpu }
    }

    /// Runs the vCPU for ever.
    pub fn run(&mut self, linux: &Linux<C>) -> ! {
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
                    let rax = self.cpu.rax();
                    if (port, direction) == (SLEEP_PORT, Direction::Out) && rax & SLEEP_ENABLE != 0 {
                        if !matches!(linux.stage(), Stage::Done { .. }) {
                            self.fail(format_args!(
                                "it has turned itself off before its work was done: its kernel panicked, or its \
                                 program failed"
                            ));
                        }
                        linux.arrival().inspect(|target| target.turn_off());
                    }
                    self.cpu.set_result(match (direction, size_bytes) {
                        (Direction::Out, _) => rax,
                        (Direction::In, 1) => rax | 0xff,
                        (Direction::In, 2) => rax | 0xffff,
                        (Direction::In, _) => 0xffff_ffff,
                    });
                    self.cpu.skip(next_rip.wrapping_sub(self.cpu.pc()));
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
        let (rip, rsp) = (self.cpu.pc(), self.cpu.rsp());
        fail!("vCPU {} of the guest was stopped at {rip:#x}, rsp {rsp:#x}: {what}", self.vcpu.number)
    }

    /// The state in which the boot protocol enters a kernel: 64-bit mode, interrupts off, memory
    /// mapped to itself.
    fn boot(&mut self, linux: &Linux<C>) {
        let Some(image) = linux.guest.image else { fail!("the guest has no kernel") };
        let segment = |selector, attributes, limit| Segment { selector, attributes, limit, base: 0 };
        let empty = segment(0, 0, 0);
        self.cpu.set_state(&State {
            cs: segment(0x10, 0xa9b, u32::MAX),
            data: segment(0x18, 0xc93, u32::MAX),
            tr: segment(0, 0x8b, 0xffff),
            ldtr: segment(0, 0x82, 0xffff),
            gdtr: Segment { base: image.gdt.start, limit: image.gdt.size_bytes() as u32 - 1, ..empty },
            idtr: empty,
            // Paging, NE, ET, protection. PAE. LMA, LME.
            cr0: 0x8000_0031,
            cr3: image.cr3,
            cr4: 0x20,
            efer: 0x500,
            rip: image.entry,
            rsp: image.boot_params,
        });
        self.cpu.registers().rsi = image.boot_params;
    }

    /// Real mode at `vector` << 12, as after INIT and a startup IPI (AMD APM vol. 2, 14.1.3,
    /// 16.9.4).
    fn start_at(&mut self, vector: u64) {
        let segment = |attributes| Segment { selector: 0, attributes, limit: 0xffff, base: 0 };
        self.cpu.set_state(&State {
            cs: Segment { selector: (vector << 8) as u16, base: vector << 12, ..segment(0x9b) },
            data: segment(0x93),
            tr: segment(0x8b),
            ldtr: segment(0x82),
            gdtr: segment(0),
            idtr: segment(0),
            // Caches off, ET. NE is clear after INIT; VMX has it set, and Linux sets it.
            cr0: 0x6000_0030,
            cr3: 0,
            cr4: 0,
            efer: 0,
            rip: 0,
            rsp: 0,
        });
        self.cpu.registers().rdx = u64::from(core::arch::x86_64::__cpuid(1).eax);
    }

    fn hypercall(&mut self, linux: &Linux<C>) {
        let registers = self.cpu.registers();
        let arguments = [registers.rbx, registers.rcx];
        // Linux asks KVM nothing: it was offered no feature.
        let result = linux.hypercall(self.cpu.rax(), arguments);
        self.cpu.set_result(result);
        self.cpu.skip(Hypercall::BYTES);
    }

    fn cpuid(&mut self) {
        let (leaf, subleaf) = (self.cpu.rax() as u32, self.cpu.registers().rcx as u32);
        let [eax, ebx, ecx, edx] = identity::cpuid(leaf, subleaf);
        self.cpu.set_result(u64::from(eax));
        let registers = self.cpu.registers();
        (registers.rbx, registers.rcx, registers.rdx) = (u64::from(ebx), u64::from(ecx), u64::from(edx));
        self.cpu.skip(2);
    }

    fn read_msr(&mut self) {
        let msr = self.cpu.registers().rcx as u32;
        let value = match msr {
            EFER => Some(self.cpu.efer()),
            msr => identity::read_msr(msr),
        };
        let Some(value) = value else { return self.cpu.inject(Event::GeneralProtection) };
        self.cpu.set_result(value & 0xffff_ffff);
        self.cpu.registers().rdx = value >> 32;
        self.cpu.skip(2);
    }

    fn write_msr(&mut self, linux: &Linux<C>) {
        let registers = self.cpu.registers();
        let (msr, high) = (registers.rcx as u32, registers.rdx << 32);
        let value = high | self.cpu.rax() & 0xffff_ffff;
        match msr {
            EFER => self.cpu.set_efer(value),
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
    fn send_interrupt(&self, linux: &Linux<C>, command: u64) -> Result<(), BadCommand> {
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
