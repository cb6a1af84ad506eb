//! What the firmware hands over: a hart, and the device tree.

#![expect(unsafe_code, reason = "reads what the firmware wrote")]

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dtoolkit::fdt::Fdt;

use super::features::Features;
use super::machine::{BootError, Harts, Uart};
use super::{USABLE, clock};
use crate::boot::{BootInfo, MAX_CPUS, STACK_BYTES, Span};
use crate::device_tree;

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
    (start != 0).then_some((Uart { start, hz }.span(), hz))
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

/// Notes the harts that can be started.
///
/// # Safety
/// The tree is that of the machine: a flush reaches these harts. No other CPU has started.
unsafe fn read_harts(fdt: Fdt<'static>, boot_hart: u64) -> Result<(), BootError> {
    let found = Harts::read(fdt, boot_hart)?;
    clock::set_frequency(found.time_per_s);
    HARTS.iter().zip(&found.numbers).for_each(|(place, &number)| place.store(number, Ordering::Relaxed));
    NR_HARTS.store(found.numbers.len(), Ordering::Relaxed);
    FEATURES.store(found.features.bits(), Ordering::Relaxed);
    Ok(())
}

/// Notes the UART. A guest gets the pages that it is in.
///
/// # Safety
/// The tree is that of the machine, and `boot` has its memory map.
unsafe fn read_uart(fdt: Fdt<'static>, boot: &BootInfo) -> Result<(), BootError> {
    if let Some(Uart { start, hz }) = Uart::read(fdt, USABLE, boot.regions())? {
        UART[0].store(start, Ordering::Relaxed);
        UART[1].store(hz, Ordering::Relaxed);
    }
    Ok(())
}
