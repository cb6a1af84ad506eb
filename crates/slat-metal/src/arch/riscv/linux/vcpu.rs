//! A CPU of the Linux guest: its start, and its exits.

#![expect(unsafe_code, reason = "runs a guest")]

use super::Cpu;
use super::sbi::Call;
use crate::arch::riscv::run::{A0, Trap};
use crate::fail;
use crate::linux::{Linux, LinuxCpu, MAGIC, Start, Vcpu};
use crate::virtual_cpu::{self, Exit, SecondStage, VirtualCpu};

/// The instruction by which the guest's program asks the hypervisor for something, in user mode:
/// HFENCE.GVMA x0, x0, which a guest never executes. a0 has the code, a1 and a2 arguments.
const HYPERCALL: u64 = 0x6200_0073;

/// Bytes of both instructions for calls.
const CALL_BYTES: u64 = 4;

/// The exception of an illegal instruction.
const ILLEGAL_INSTRUCTION: u64 = 2;

/// A vCPU and its CPU.
pub struct GuestCpu {
    vcpu: Vcpu,
    cpu: Cpu,
}

impl LinuxCpu for Cpu {
    fn run_linux(linux: &Linux, number: usize) -> ! {
        GuestCpu::new(linux, number).run(linux)
    }
}

impl GuestCpu {
    /// vCPU `number`, on the calling CPU.
    pub fn new(linux: &Linux, number: usize) -> GuestCpu {
        // SAFETY: the CPU has the extension (`set_up`). The VM is the image's for ever, and has
        // these CPUs.
        let cpu = unsafe { Cpu::new(SecondStage::of(&linux.vm, &linux.config)) };
        // SAFETY: each CPU makes its own vCPU, once.
        let vcpu = unsafe { Vcpu::new(linux, number) };
        GuestCpu { vcpu, cpu }
    }

    /// Runs the vCPU for ever.
    pub fn run(&mut self, linux: &Linux) -> ! {
        if self.vcpu.number == 0 {
            // CPU 0 is started as it boots: others may ask for its state.
            let image = linux.guest.image;
            let start = Start { entry: image.entry, argument: image.tree };
            let _ = linux.startups.start(0, start);
        }
        let start = linux.wait_for_start(self.vcpu.number);
        self.start(start);
        loop {
            linux.pause_point();
            self.take_interrupts(linux, self.vcpu.number);
            match self.cpu.run(&self.vcpu.presence) {
                Exit::Kick | Exit::LogFull => {}
                Exit::PageFault { gpa, access } => match self.vcpu.handle_fault(linux, gpa, access) {
                    Ok(()) => {}
                    Err(unhandled) => self.fail(format_args!("{unhandled}")),
                },
                Exit::Hypercall => self.call_firmware(linux),
                Exit::Trapped(Trap::VirtualInstruction) => self.virtual_instruction(linux),
                exit => self.fail(format_args!("{exit:?}")),
            }
        }
    }

    fn fail(&mut self, what: core::fmt::Arguments<'_>) -> ! {
        let (number, registers) = (self.vcpu.number, self.cpu.registers());
        let (pc, ra, stval) = (registers.pc, registers.x[1], registers.stval);
        fail!("vCPU {number} of the guest was stopped at {pc:#x}, ra {ra:#x}, stval {stval:#x}: {what}")
    }

    /// The state in which the firmware enters a hart: supervisor mode, interrupts and paging off,
    /// its number in a0, and the argument in a1.
    fn start(&mut self, start: Start) {
        let number = self.vcpu.number as u64;
        self.cpu.start(virtual_cpu::Start { pc: start.entry, stack: 0, tables: 0, argument: number });
        self.cpu.registers().x[A0 + 1] = start.argument;
    }

    fn call_firmware(&mut self, linux: &Linux) {
        let x = &self.cpu.registers().x;
        let mut arguments = [0; 6];
        arguments.iter_mut().zip(&x[A0..]).for_each(|(argument, value)| *argument = *value as usize);
        let call = Call { extension: x[A0 + 7] as usize, function: x[A0 + 6] as usize, arguments };
        let answer = self.sbi(linux, call);
        self.cpu.skip(CALL_BYTES);
        let x = &mut self.cpu.registers().x;
        (x[A0], x[A0 + 1]) = (answer.error as u64, answer.value as u64);
    }

    fn virtual_instruction(&mut self, linux: &Linux) {
        let registers = self.cpu.registers();
        let (instruction, [code, first, second]) = (registers.stval, [0, 1, 2].map(|index| registers.x[A0 + index]));
        // A hart may leave the instruction out.
        if (instruction == HYPERCALL || instruction == 0) && code >> 32 == MAGIC >> 32 {
            let answer = linux.hypercall(code, [first, second]);
            self.cpu.skip(CALL_BYTES);
            self.cpu.set_result(answer);
        } else {
            self.cpu.inject(ILLEGAL_INSTRUCTION, instruction);
        }
    }
}
