//! What the firmware hands over: the device tree (Devicetree Specification 0.4), with the harts, the
//! memory, the command line and the modules.
//!
//! A module is a child of `/chosen` that is compatible to `multiboot,module`, as loaders have them for
//! other hypervisors, too: `reg` says where it is, `bootargs` is its text.

#![expect(unsafe_code, reason = "reads what the firmware wrote")]

use core::slice;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::{Node, Property};
use thiserror::Error;

use super::clock;
use super::features::Features;
use crate::boot::{BootInfo, MAX_CPUS, Module, Region, RegionKind, STACK_BYTES, Span, image};

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

/// The first bytes of a device tree.
const MAGIC: u32 = 0xd00d_feed;
/// A larger one is none.
const MAX_TREE_BYTES: usize = 4 << 20;
/// Ranges of memory, and of reserved memory, that can be kept.
const MAX_SPANS: usize = 16;

/// A device tree by which the machine cannot be run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum TreeError {
    /// No device tree.
    #[error("the firmware left no device tree at {0:#x}")]
    None(u64),
    /// It cannot be read.
    #[error("the device tree at {0:#x} cannot be read")]
    Broken(u64),
    /// No memory.
    #[error("the device tree has no memory")]
    NoMemory,
    /// More than can be kept.
    #[error("the device tree has more than {MAX_SPANS} ranges of {0}")]
    TooMany(&'static str),
    /// A range that is in another one.
    #[error("the device tree has memory from {first:#x} on that overlaps that from {second:#x} on")]
    Overlap {
        /// Where the first one begins.
        first: u64,
        /// Where the other one begins.
        second: u64,
    },
    /// The end is not an address.
    #[error("the device tree has memory from {0:#x} on that ends behind the last address")]
    Endless(u64),
    /// The image is elsewhere.
    #[error("the image is outside of the memory of the device tree")]
    ImageOutside,
    /// No harts.
    #[error("the device tree has no CPU")]
    NoCpu,
    /// The boot hart is missing.
    #[error("the device tree has no hart {0}, which booted")]
    NoBootHart(u64),
    /// A number that no mask has.
    #[error("the device tree has hart {0}; numbers below 64 are possible")]
    LargeHart(u64),
    /// The same number twice.
    #[error("the device tree has hart {0} twice")]
    SameHart(u64),
    /// No clock.
    #[error("the device tree has no frequency of the time counter (timebase-frequency)")]
    NoFrequency,
    /// A module that is not memory.
    #[error("the device tree has a module from {0:#x} on that is not in its memory")]
    ModuleOutside(u64),
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
    (start != 0).then_some((Span { start, end: start + 0x100 }, hz))
}

/// Spans, as many as there is place for.
#[derive(Clone, Copy)]
struct Spans {
    spans: [Span; MAX_SPANS],
    nr_spans: usize,
    name: &'static str,
}

impl Spans {
    fn new(name: &'static str) -> Spans {
        Spans { spans: [Span { start: 0, end: 0 }; MAX_SPANS], nr_spans: 0, name }
    }

    fn add(&mut self, start: u64, size_bytes: u64) -> Result<(), TreeError> {
        if size_bytes == 0 {
            return Ok(());
        }
        let end = start.checked_add(size_bytes).ok_or(TreeError::Endless(start))?;
        *self.spans.get_mut(self.nr_spans).ok_or(TreeError::TooMany(self.name))? = Span { start, end };
        self.nr_spans += 1;
        Ok(())
    }

    /// The ranges of the property `reg`.
    fn add_reg(&mut self, node: FdtNode<'static>) -> Result<(), TreeError> {
        let Ok(Some(ranges)) = node.reg() else { return Ok(()) };
        for range in ranges {
            if let (Ok(start), Ok(size_bytes)) = (range.address::<u64>(), range.size::<u64>()) {
                self.add(start, size_bytes)?;
            }
        }
        Ok(())
    }

    fn iter(&self) -> impl Iterator<Item = Span> + '_ {
        self.spans[..self.nr_spans].iter().copied()
    }

    fn contain(&self, span: Span) -> bool {
        self.iter().any(|memory| memory.start <= span.start && span.end <= memory.end)
    }
}

/// Reads the device tree at `tree`, of the machine whose hart `boot_hart` calls.
///
/// # Errors
/// [`TreeError`].
///
/// # Safety
/// To be called once, before other CPUs start. The firmware has left a device tree at `tree`, or another
/// value there; nothing writes it.
pub unsafe fn read(boot_hart: u64, tree: *const u8) -> Result<BootInfo, TreeError> {
    let address = tree.addr() as u64;
    if tree.is_null() || !tree.addr().is_multiple_of(8) {
        return Err(TreeError::None(address));
    }
    // SAFETY: two aligned words, as the caller promises.
    let [magic, nr_bytes] = unsafe { tree.cast::<[u32; 2]>().read() }.map(u32::from_be);
    if magic != MAGIC || nr_bytes as usize > MAX_TREE_BYTES {
        return Err(TreeError::None(address));
    }
    // SAFETY: as many bytes as the tree has, for good.
    let bytes: &'static [u8] = unsafe { slice::from_raw_parts(tree, nr_bytes as usize) };
    let fdt = Fdt::new(bytes).map_err(|_| TreeError::Broken(address))?;
    read_harts(fdt, boot_hart)?;
    read_uart(fdt);

    let mut memory = Spans::new("memory");
    for node in fdt.root().children().filter(|node| node.name_without_address() == "memory") {
        memory.add_reg(node)?;
    }
    check_memory(&memory)?;
    let mut reserved = Spans::new("reserved memory");
    reserved.add(address & !0xfff, (nr_bytes as u64 + 0x1fff) & !0xfff)?;
    for reservation in fdt.memory_reservations() {
        reserved.add(reservation.address(), reservation.size())?;
    }
    for node in fdt.find_node("/reserved-memory").into_iter().flat_map(|node| node.children()) {
        reserved.add_reg(node)?;
    }

    let chosen = fdt.find_node("/chosen");
    let mut modules = [None; 2];
    let nodes = chosen.into_iter().flat_map(|node| node.children());
    for (place, node) in modules.iter_mut().zip(nodes.filter(is_module)) {
        *place = read_module(node, &memory)?;
    }
    let region = |kind| move |span| Region { span, kind };
    let regions = memory.iter().map(region(RegionKind::Ram));
    let regions = regions.chain(reserved.iter().map(region(RegionKind::Firmware)));
    let command_line = chosen.and_then(|node| text(node, "bootargs")).unwrap_or_default();
    Ok(BootInfo::new(command_line, regions, modules.into_iter().flatten()))
}

fn text(node: FdtNode<'static>, name: &str) -> Option<&'static str> {
    node.property(name)?.value_as::<&'static str>().ok()
}

fn number(node: FdtNode<'static>, name: &str) -> Option<u64> {
    let property = node.property(name)?;
    property.value_as::<u32>().map(u64::from).or_else(|_| property.value_as::<u64>()).ok()
}

fn is_compatible(node: &FdtNode<'static>, name: &str) -> bool {
    node.compatible().is_some_and(|mut names| names.any(|other| other == name))
}

fn is_module(node: &FdtNode<'static>) -> bool {
    is_compatible(node, "multiboot,module")
}

fn check_memory(memory: &Spans) -> Result<(), TreeError> {
    if memory.nr_spans == 0 {
        return Err(TreeError::NoMemory);
    }
    for (index, second) in memory.iter().enumerate() {
        let overlaps = |first: &Span| first.start < second.end && second.start < first.end;
        if let Some(first) = memory.iter().take(index).find(overlaps) {
            return Err(TreeError::Overlap { first: first.start, second: second.start });
        }
    }
    if memory.contain(image()) { Ok(()) } else { Err(TreeError::ImageOutside) }
}

fn read_module(node: FdtNode<'static>, memory: &Spans) -> Result<Option<Module>, TreeError> {
    // Loaders write two numbers of 64 bits, whatever `/chosen` says of cells.
    let Some(Ok([start, size_bytes])) = node.property("reg").map(|reg| reg.value_as::<[u8; 16]>().map(halves)) else {
        return Ok(None);
    };
    let end = start.checked_add(size_bytes).filter(|&end| memory.contain(Span { start, end }));
    end.ok_or(TreeError::ModuleOutside(start))?;
    // SAFETY: the loader has put the module there, into memory, and the allocator leaves it out.
    let bytes = unsafe { slice::from_raw_parts(start as *const u8, size_bytes as usize) };
    Ok(Some(Module { bytes, text: text(node, "bootargs").unwrap_or_default() }))
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let number = u128::from_be_bytes(bytes);
    [(number >> 64) as u64, number as u64]
}

/// Notes the harts that can be started.
fn read_harts(fdt: Fdt<'static>, boot_hart: u64) -> Result<(), TreeError> {
    let cpus = fdt.find_node("/cpus").ok_or(TreeError::NoCpu)?;
    clock::set_frequency(number(cpus, "timebase-frequency").filter(|&hz| hz > 0).ok_or(TreeError::NoFrequency)?);
    let (mut nr_harts, mut has_boot_hart, mut features) = (1, false, Features::all());
    let is_usable = |node: &FdtNode<'static>| text(*node, "status").is_none_or(|status| status == "okay");
    let nodes = cpus.children().filter(|node| node.name_without_address() == "cpu");
    let mut is_empty = true;
    HARTS[0].store(boot_hart, Ordering::Relaxed);
    for node in nodes.filter(is_usable) {
        let Some(hart) = number(node, "reg") else { continue };
        is_empty = false;
        if hart >= 64 {
            return Err(TreeError::LargeHart(hart));
        }
        let is_known = (1..nr_harts).any(|cpu| HARTS[cpu].load(Ordering::Relaxed) == hart);
        if is_known || hart == boot_hart && has_boot_hart {
            return Err(TreeError::SameHart(hart));
        }
        if hart == boot_hart {
            has_boot_hart = true;
        } else if nr_harts < MAX_CPUS {
            HARTS[nr_harts].store(hart, Ordering::Relaxed);
            nr_harts += 1;
        } else {
            continue;
        }
        let names = node.property("riscv,isa-extensions").and_then(|names| names.value_as().ok());
        let names = names.map(|names: dtoolkit::FdtStringListIterator<'static>| Features::of_names(names));
        let isa = text(node, "riscv,isa").map(Features::of_isa);
        features &= names.or(isa).unwrap_or(Features::empty());
    }
    if is_empty {
        return Err(TreeError::NoCpu);
    }
    if !has_boot_hart {
        return Err(TreeError::NoBootHart(boot_hart));
    }
    NR_HARTS.store(nr_harts, Ordering::Relaxed);
    FEATURES.store(features.bits(), Ordering::Relaxed);
    Ok(())
}

/// Notes the first UART of the kind that PCs have.
fn read_uart(fdt: Fdt<'static>) {
    let mut nodes = fdt.find_node("/soc").into_iter().flat_map(|node| node.children());
    let Some(node) = nodes.find(|node| is_compatible(node, "ns16550a")) else { return };
    let Ok(Some(mut ranges)) = node.reg() else { return };
    if let Some(Ok(start)) = ranges.next().map(|range| range.address::<u64>()) {
        UART[0].store(start, Ordering::Relaxed);
        UART[1].store(number(node, "clock-frequency").unwrap_or_default(), Ordering::Relaxed);
    }
}
