//! What the firmware hands over: a hart, and the device tree.

#![expect(unsafe_code, reason = "reads what the firmware wrote")]

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::{Node, Property};
use thiserror::Error;

use super::features::Features;
use super::{USABLE, clock};
use crate::boot::{BootInfo, MAX_CPUS, STACK_BYTES, Span};
use crate::device_tree::{self, Cpu, TreeError};

core::arch::global_asm!(
    ".set MAX_CPUS, {max_cpus}",
    ".set STACK_BYTES, {stack_bytes}",
    ".set STACK_SHIFT, {stack_shift}",
    include_str!("boot.s"),
    max_cpus = const MAX_CPUS,
    stack_bytes = const STACK_BYTES,
    stack_shift = const STACK_BYTES.trailing_zeros(),
);

const _: () = assert!(STACK_BYTES.is_power_of_two(), "boot.s multiplies by it");

/// A machine that cannot be run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum BootError {
    /// The device tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A number that no mask has.
    #[error("the device tree has hart {0}; numbers below 64 are possible")]
    LargeHart(u64),
    /// The UART is no device that a guest can have.
    #[error("the device tree has a UART at {0:#x}, where memory is, or where no register can be")]
    BadUart(u64),
    /// No clock.
    #[error("the device tree has no frequency of the time counter (timebase-frequency)")]
    NoFrequency,
}

/// The number of the hart of each CPU, the boot hart first.
static HARTS: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];
static NR_HARTS: AtomicUsize = AtomicUsize::new(0);
/// What all of them have.
static FEATURES: AtomicU64 = AtomicU64::new(0);
/// The UART: its first register, 0 if there is none, and its frequency.
static UART: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// The number of the hart that is CPU `cpu`.
pub fn hart(cpu: usize) -> u64 {
    // Relaxed, here and below: written before the other CPUs start.
    HARTS[cpu].load(Ordering::Relaxed)
}

/// The harts that are these CPUs, both by bits.
pub fn harts(cpus: u64) -> u64 {
    (0..MAX_CPUS).filter(|cpu| cpus & 1 << cpu != 0).fold(0, |harts, cpu| harts | 1 << hart(cpu))
}

/// CPUs that can be started, the boot CPU included.
pub fn nr_harts() -> usize {
    NR_HARTS.load(Ordering::Relaxed)
}

/// What all harts have.
pub fn features() -> Features {
    Features::from_bits_truncate(FEATURES.load(Ordering::Relaxed))
}

/// The UART's registers and its frequency in hertz, if the machine has one.
pub fn uart() -> Option<(Span, u64)> {
    let [start, hz] = [0, 1].map(|index| UART[index].load(Ordering::Relaxed));
    (start != 0).then_some((uart_at(start), hz))
}

fn uart_at(start: u64) -> Span {
    Span { start, end: start.saturating_add(0x100) }
}

/// Reads the device tree at `tree`, of the machine whose hart `boot_hart` calls.
///
/// # Errors
/// [`BootError`].
///
/// # Safety
/// To be called once, before other CPUs start. The firmware has left the device tree there, with
/// the files where the command line says, and nothing writes them.
pub unsafe fn read(boot_hart: u64, tree: u64) -> Result<BootInfo, BootError> {
    // SAFETY: as the caller promises.
    let tree = unsafe { device_tree::read(tree) }?;
    // SAFETY: the tree of this machine, as the caller promises, before other CPUs start.
    unsafe { read_harts(tree, boot_hart) }?;
    // SAFETY: as the caller promises.
    let boot = unsafe { device_tree::boot_info(tree) }?;
    // SAFETY: both of this machine, as the caller promises.
    unsafe { read_uart(tree, &boot) }?;
    Ok(boot)
}

fn text(node: FdtNode<'static>, name: &str) -> Option<&'static str> {
    node.property(name)?.value_as::<&'static str>().ok()
}

fn number(node: FdtNode<'static>, name: &str) -> Option<u64> {
    let property = node.property(name)?;
    property.value_as::<u32>().map(u64::from).or_else(|_| property.value_as::<u64>()).ok()
}

/// Notes the harts that can be started.
///
/// # Safety
/// The tree is that of the machine: a flush reaches these harts. No other CPU has started.
unsafe fn read_harts(fdt: Fdt<'static>, boot_hart: u64) -> Result<(), BootError> {
    let cpus = fdt.find_node("/cpus").ok_or(TreeError::NoCpus)?;
    clock::set_frequency(number(cpus, "timebase-frequency").filter(|&hz| hz > 0).ok_or(BootError::NoFrequency)?);
    let harts = device_tree::cpus(fdt, boot_hart)?;
    let mut features = Features::all();
    for (place, Cpu { number: hart, node }) in HARTS.iter().zip(harts.iter()) {
        if hart >= 64 {
            return Err(BootError::LargeHart(hart));
        }
        place.store(hart, Ordering::Relaxed);
        let names = node.property("riscv,isa-extensions").and_then(|names| names.value_as().ok());
        let names = names.map(|names: dtoolkit::FdtStringListIterator<'static>| Features::of_names(names));
        let isa = text(node, "riscv,isa").map(Features::of_isa);
        features &= names.or(isa).unwrap_or(Features::empty());
    }
    NR_HARTS.store(harts.len(), Ordering::Relaxed);
    FEATURES.store(features.bits(), Ordering::Relaxed);
    Ok(())
}

/// Notes the first UART of the kind that PCs have. A guest gets the pages that it is in.
///
/// # Safety
/// The tree is that of the machine, and `boot` has its memory map.
unsafe fn read_uart(fdt: Fdt<'static>, boot: &BootInfo) -> Result<(), BootError> {
    let is_uart =
        |node: &FdtNode<'static>| node.compatible().is_some_and(|mut names| names.any(|name| name == "ns16550a"));
    let mut nodes = fdt.find_node("/soc").into_iter().flat_map(|node| node.children());
    let Some(node) = nodes.find(is_uart) else { return Ok(()) };
    let Some(Span { start, .. }) = device_tree::span(node, 0) else { return Ok(()) };
    let pages = uart_at(start).pages();
    // Also what is reserved: the firmware is there.
    if pages.and(USABLE) != pages || boot.regions().any(|region| region.span.overlaps(pages)) {
        return Err(BootError::BadUart(start));
    }
    UART[0].store(start, Ordering::Relaxed);
    UART[1].store(number(node, "clock-frequency").unwrap_or_default(), Ordering::Relaxed);
    Ok(())
}
