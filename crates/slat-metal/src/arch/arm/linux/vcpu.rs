//! A CPU of the Linux guest: its start, and its exits.

#![expect(unsafe_code, reason = "runs a guest, and passes its interrupts on")]

use super::psci::*;
use slat::{Exit as FaultExit, Gpa};

use crate::arch::arm::stage2::syndrome::{self, Direction, System};
use crate::arch::arm::stage2::{ArmCpu, Trap};
use crate::arch::arm::sysreg::{execute, write};
use crate::fail;
use crate::linux::{Linux, LinuxCpu, Start, Unhandled, Vcpu};
use crate::virtual_cpu::{Exit, SecondStage, VirtualCpu};

/// Bytes of an instruction.
const INSTRUCTION_BYTES: u64 = 4;

/// ICC_SGI1R_EL1, which the CPU passes on to EL2 since fast interrupts are there; ICC_ASGI1R_EL1
/// and ICC_SGI0R_EL1, which the guest does not need.
const SGI1R: [u8; 5] = [3, 0, 12, 11, 5];
const ASGI1R: [u8; 5] = [3, 0, 12, 11, 6];
const SGI0R: [u8; 5] = [3, 0, 12, 11, 7];
/// DC ZVA, by which the guest's program calls the hypervisor: no CPU of the guest says to have it.
const DC_ZVA: [u8; 5] = [1, 3, 7, 4, 1];

/// A vCPU and its CPU.
pub struct GuestCpu {
    // Before the vCPU, which keeps the VM.
    cpu: ArmCpu,
    vcpu: Vcpu,
}

impl LinuxCpu for ArmCpu {
    fn run_linux(linux: &Linux, number: usize) -> ! {
        GuestCpu::new(linux, number).run(linux)
    }
}

impl GuestCpu {
    /// vCPU `number`, on the calling CPU.
    pub fn new(linux: &Linux, number: usize) -> GuestCpu {
        // SAFETY: virtualization is on (`start`). The VM is the image's for ever, and has these
        // CPUs.
        let cpu = unsafe { ArmCpu::new(SecondStage::of(&linux.vm, &linux.config)) };
        // SAFETY: each CPU makes its own vCPU, once.
        let vcpu = unsafe { Vcpu::new(linux, number) };
        GuestCpu { vcpu, cpu }
    }

    /// Runs the vCPU for ever.
    pub fn run(&mut self, linux: &Linux) -> ! {
        let start = if self.vcpu.number == 0 {
            let start = Start { entry: linux.guest.image.entry, argument: linux.guest.image.tree };
            // So that no other one starts it.
            let _ = linux.startups.start(0, start);
            start
        } else {
            linux.wait_for_start(self.vcpu.number)
        };
        self.cpu.start_at(start.entry, start.argument);
        loop {
            linux.pause_point();
            match self.cpu.run(&self.vcpu.presence) {
                Exit::Kick | Exit::LogFull => {}
                Exit::PageFault { gpa, access } => match self.vcpu.handle_fault(linux, gpa, access) {
                    Ok(()) => {}
                    Err(Unhandled::Exit(FaultExit::Mmio { .. })) => self.access_device(linux, gpa),
                    Err(unhandled) => self.fail(format_args!("{unhandled}")),
                },
                Exit::Hypercall => self.firmware_call(linux),
                Exit::Trapped(Trap::Smc) => {
                    self.cpu.registers.x[0] = NOT_SUPPORTED;
                    self.cpu.skip(INSTRUCTION_BYTES);
                }
                Exit::Trapped(Trap::System { syndrome }) => self.system(linux, syndrome::system(syndrome)),
                exit @ (Exit::Shutdown | Exit::Misconfigured { .. } | Exit::Invalid { .. } | Exit::Other { .. }) => {
                    self.fail(format_args!("{exit:x?}"))
                }
            }
        }
    }

    fn fail(&mut self, what: core::fmt::Arguments<'_>) -> ! {
        let (pc, address) = (self.cpu.pc(), self.cpu.fault_address());
        fail!("vCPU {} of the guest was stopped at {pc:#x} (FAR_EL1 {address:#x}): {what}", self.vcpu.number)
    }

    /// Register number `register`, of which 31 is zero.
    fn register(&self, register: usize) -> u64 {
        self.cpu.registers.x.get(register).copied().unwrap_or(0)
    }

    /// A load or store where no memory is: one of the interrupt controller's registers.
    fn access_device(&mut self, linux: &Linux, gpa: Gpa) {
        let Some(transfer) = self.cpu.transfer() else {
            self.fail(format_args!("an access at {gpa}, where no memory is"));
        };
        let nr_bytes = transfer.nr_bytes;
        let devices = &linux.guest.devices;
        let done = match transfer.direction {
            Direction::Store => {
                let mask = if nr_bytes == 8 { u64::MAX } else { (1 << (8 * nr_bytes)) - 1 };
                devices.store(gpa, nr_bytes, self.register(transfer.register) & mask)
            }
            Direction::Load => devices.load(gpa, nr_bytes).map(|value| {
                if let Some(register) = self.cpu.registers.x.get_mut(transfer.register) {
                    *register = value;
                }
            }),
        };
        if done.is_err() {
            self.fail(format_args!("an access of {nr_bytes} bytes at {gpa}, where no memory is"));
        }
        self.cpu.skip(INSTRUCTION_BYTES);
    }

    fn system(&mut self, linux: &Linux, instruction: System) {
        match (instruction.name, instruction.direction) {
            (SGI1R, Direction::Store) => {
                let command = self.register(instruction.register);
                // SAFETY: an interrupt of group 1, which is the guest's, and waits for its CPU to
                // be in the guest. What the guest wrote before comes before it.
                unsafe {
                    execute!("dsb ishst");
                    write!("icc_sgi1r_el1", command);
                    execute!("isb");
                }
            }
            (ASGI1R | SGI0R, Direction::Store) => {}
            (DC_ZVA, Direction::Store) => {
                let [code, first, second] = [0, 1, 2].map(|register| self.register(register));
                self.cpu.registers.x[0] = linux.hypercall(code, [first, second]);
            }
            _ => self.fail(format_args!("an instruction that it does not have: {instruction:?}")),
        }
        self.cpu.skip(INSTRUCTION_BYTES);
    }

    /// PSCI, by HVC (Arm SMC Calling Convention, DEN0028): the function in `w0`, the result in
    /// `x0`.
    fn firmware_call(&mut self, linux: &Linux) {
        let [function, first, second, third] = [0, 1, 2, 3].map(|register| self.register(register));
        let result = match Function::of(function as u32) {
            Some(Function::Version) => PSCI_VERSION,
            Some(Function::Features) if Function::of(first as u32).is_some() => 0,
            Some(Function::CpuOn) => {
                let index = linux.guest.cpu_index(first);
                let start = Start { entry: second, argument: third };
                match index.and_then(|index| linux.startups.start(index, start)) {
                    Some(Ok(())) => 0,
                    Some(Err(_)) => ALREADY_ON,
                    None => INVALID_PARAMETERS,
                }
            }
            Some(Function::AffinityInfo) => {
                let index = linux.guest.cpu_index(first);
                match index.and_then(|index| linux.startups.is_started(index)) {
                    Some(true) => ON,
                    Some(false) => OFF,
                    None => INVALID_PARAMETERS,
                }
            }
            Some(Function::MigrateInfoType) => NO_MIGRATION,
            Some(Function::Off) => linux.turned_off(),
            Some(Function::Features) | None => NOT_SUPPORTED,
        };
        self.cpu.registers.x[0] = result;
    }
}
