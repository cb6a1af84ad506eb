//! What the device tree has beside memory: CPUs, the interrupt controller, the serial line and the
//! timer.

#![expect(unsafe_code, reason = "a machine is a promise about registers")]

use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::{Node, Property};
use spin::Once;
use thiserror::Error;

use super::sysreg::read;
use crate::boot::{MAX_CPUS, Span};
use crate::device_tree::{self, TreeError};

/// The bits of MPIDR_EL1 that number a CPU.
pub(super) const AFFINITY: u64 = 0xff_00ff_ffff;

/// Devices are below this, by the page table of EL2.
const DEVICES_END: u64 = 1 << 30;

/// Bytes of the distributor's registers, and of those of a redistributor without LPIs of its own.
pub(super) const DISTRIBUTOR_BYTES: u64 = 0x1_0000;
pub(super) const REDISTRIBUTOR_BYTES: u64 = 0x2_0000;

/// Cells of an interrupt of the GIC.
pub(super) const INTERRUPT_CELLS: usize = 3;
/// Interrupts of the timer.
pub(super) const TIMER_INTERRUPTS: usize = 4;

/// The machine.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// The numbers of the CPUs, the boot CPU first.
    pub cpus: [u64; MAX_CPUS],
    pub nr_cpus: usize,
    /// The registers of the interrupt controller: the distributor's, and the redistributors'.
    pub distributor: Span,
    pub redistributors: Span,
    /// The serial line, and its interrupt.
    pub serial: Span,
    pub serial_interrupt: [u32; INTERRUPT_CELLS],
    /// The interrupts of the timer.
    pub timer_interrupts: [u32; TIMER_INTERRUPTS * INTERRUPT_CELLS],
}

/// A machine that the hypervisor cannot run on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MachineError {
    /// The device tree cannot be used.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A device that the hypervisor or its guest needs.
    #[error("the device tree has no {0}, where it can be used")]
    NoDevice(&'static str),
}

static MACHINE: Once<Machine> = Once::new();

/// The machine is this one.
///
/// # Safety
/// Its registers are where it says, and memory is nowhere there.
pub(super) unsafe fn set(machine: Machine) {
    MACHINE.call_once(|| machine);
}

/// The machine.
pub(super) fn get() -> &'static Machine {
    MACHINE.get().unwrap_or_else(|| crate::error!("the device tree was not read"))
}

fn is_compatible(node: FdtNode<'_>, name: &str) -> bool {
    node.compatible().is_some_and(|mut names| names.any(|found| found == name))
}

fn cells<const N: usize>(node: FdtNode<'_>, property: &str) -> Option<[u32; N]> {
    let property = node.property(property)?;
    let (words, _) = property.value().as_chunks::<4>();
    let mut found = [0; N];
    for (place, word) in found.iter_mut().zip(words.get(..N)?) {
        *place = u32::from_be_bytes(*word);
    }
    Some(found)
}

impl Machine {
    /// Reads it.
    pub fn read(tree: Fdt<'static>) -> Result<Machine, MachineError> {
        let device = |name: &'static str| {
            let found = tree.root().children().find(|&node| is_compatible(node, name));
            found.ok_or(MachineError::NoDevice(name))
        };
        let registers = |name, node, index, nr_bytes| {
            let span = device_tree::span(node, index);
            span.filter(|span| span.end <= DEVICES_END && span.size_bytes() >= nr_bytes && span.start % 4096 == 0)
                .ok_or(MachineError::NoDevice(name))
        };
        let found = device_tree::cpus(tree, read!("mpidr_el1") & AFFINITY)?;
        let mut cpus = [0; MAX_CPUS];
        cpus.iter_mut().zip(found.iter()).for_each(|(place, cpu)| *place = cpu.number);
        let gic = device("arm,gic-v3")?;
        let (serial, timer) = (device("arm,pl011")?, device("arm,armv8-timer")?);
        Ok(Machine {
            cpus,
            nr_cpus: found.len(),
            distributor: registers("arm,gic-v3", gic, 0, DISTRIBUTOR_BYTES)?,
            redistributors: registers("arm,gic-v3", gic, 1, REDISTRIBUTOR_BYTES)?,
            serial: registers("arm,pl011", serial, 0, 4096)?,
            serial_interrupt: cells(serial, "interrupts").ok_or(MachineError::NoDevice("arm,pl011"))?,
            timer_interrupts: cells(timer, "interrupts").ok_or(MachineError::NoDevice("arm,armv8-timer"))?,
        })
    }
}
