//! What the device tree says (Devicetree Specification, release 0.4): memory, CPUs, the command
//! line and the files that the emulator has loaded. It is believed no more than that: a tree that
//! contradicts itself, or the image, is refused before anything is allocated.

#![expect(unsafe_code, reason = "reads memory at the addresses that the loader gives")]

use core::slice;

use arrayvec::{ArrayVec, CapacityError};
use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::standard::{NodeStandard, Status};
use dtoolkit::{Node, Property, ToCellInt};
use thiserror::Error;

use crate::boot::{BootInfo, MAX_CPUS, MAX_REGIONS, Module, Region, RegionKind, Span, image};
use crate::bootargs::{BadPlace, Bootargs};

/// The first word of a tree, which is big-endian like all of them.
const MAGIC: u32 = 0xd00d_feed;
/// A tree that is larger is none: the boot protocol of Linux for Arm has this limit, too.
const MAX_BYTES: u32 = 2 << 20;

/// Ranges of memory, and holes in them, that are kept: [`BootInfo`] has room for both.
const MAX_SPANS: usize = MAX_REGIONS / 2;

/// A tree that cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum TreeError {
    /// No tree.
    #[error("there is no device tree at {0:#x}")]
    NotThere(u64),
    /// A tree with errors.
    #[error("the device tree is broken: {0}")]
    Broken(&'static str),
    /// No memory.
    #[error("the device tree has no memory")]
    NoMemory,
    /// Memory that ends before it begins.
    #[error("the device tree has memory from {0:#x} that goes beyond the last address")]
    Wraps(u64),
    /// Two ranges of memory are the same.
    #[error("the device tree has memory twice: from {0:#x}, and from {1:#x}")]
    Overlap(u64, u64),
    /// More ranges than are kept.
    #[error("the device tree has more than {MAX_SPANS} ranges of memory, or of reserved memory")]
    TooMany,
    /// The image is elsewhere.
    #[error("the device tree has no memory where the image is, from {0:#x}")]
    ImageOutside(u64),
    /// No CPUs.
    #[error("the device tree has no CPUs")]
    NoCpus,
    /// The boot CPU.
    #[error("the device tree does not have the boot CPU, {0:#x}")]
    NoBootCpu(u64),
    /// Two CPUs with one number.
    #[error("the device tree has two CPUs with the number {0:#x}")]
    SameCpu(u64),
    /// Files outside of memory, or in each other.
    #[error("a file of the guest is not in free memory, from {0:#x}")]
    FileOutside(u64),
    /// A word of the command line.
    #[error(transparent)]
    BadPlace(#[from] BadPlace<'static>),
}

impl From<CapacityError<Span>> for TreeError {
    fn from(_: CapacityError<Span>) -> TreeError {
        TreeError::TooMany
    }
}

/// The tree at `address`.
///
/// # Errors
/// [`TreeError::NotThere`], [`TreeError::Broken`].
///
/// # Safety
/// What is at `address` may be read, up to the size that a tree says there, and stays.
pub unsafe fn read(address: u64) -> Result<Fdt<'static>, TreeError> {
    let not_there = TreeError::NotThere(address);
    if address == 0 || !address.is_multiple_of(8) {
        return Err(not_there);
    }
    let header = address as *const u32;
    // SAFETY: as the caller promises; the address is aligned.
    let [magic, size_bytes] = unsafe { [u32::from_be(header.read()), u32::from_be(header.add(1).read())] };
    if magic != MAGIC || size_bytes > MAX_BYTES {
        return Err(not_there);
    }
    // SAFETY: a tree of this size is there, as the caller promises.
    let bytes = unsafe { slice::from_raw_parts(address as *const u8, size_bytes as usize) };
    Fdt::new(bytes).map_err(|_| TreeError::Broken("its structure"))
}

/// The spans of the property `reg` of `node`.
fn spans<'t>(node: FdtNode<'t>) -> Result<impl Iterator<Item = Result<Span, TreeError>> + 't, TreeError> {
    let regs = node.reg().map_err(|_| TreeError::Broken("the property reg of a node"))?;
    Ok(regs.into_iter().flatten().map(|reg| {
        let broken = |_| TreeError::Broken("an address with more than 64 bits");
        let (start, size_bytes) = (reg.address::<u64>().map_err(broken)?, reg.size::<u64>().map_err(broken)?);
        let end = start.checked_add(size_bytes).ok_or(TreeError::Wraps(start))?;
        Ok(Span { start, end })
    }))
}

/// The span number `index` of the property `reg` of `node`.
pub fn span(node: FdtNode<'_>, index: usize) -> Option<Span> {
    spans(node).ok()?.nth(index)?.ok().filter(|span| span.size_bytes() != 0)
}

/// The ranges of memory, which are apart from each other.
fn memory(tree: Fdt<'static>) -> Result<ArrayVec<Span, MAX_SPANS>, TreeError> {
    let mut found = ArrayVec::<Span, MAX_SPANS>::new();
    for node in tree.root().children().filter(|node| node.name_without_address() == "memory") {
        for span in spans(node)? {
            let span = span?;
            if span.size_bytes() == 0 {
                continue;
            }
            if let Some(other) = found.iter().find(|&&other| span.overlaps(other)) {
                return Err(TreeError::Overlap(other.start, span.start));
            }
            found.try_push(span)?;
        }
    }
    if found.is_empty() { Err(TreeError::NoMemory) } else { Ok(found) }
}

/// Memory that is not free: the tree itself, and what it reserves.
fn holes(tree: Fdt<'static>) -> Result<ArrayVec<Span, MAX_SPANS>, TreeError> {
    let mut found = ArrayVec::new();
    let start = tree.data().as_ptr().addr() as u64;
    found.try_push(Span { start, end: start + tree.data().len() as u64 })?;
    for reservation in tree.memory_reservations() {
        let (start, size_bytes) = (reservation.address(), reservation.size());
        found.try_push(Span { start, end: start.checked_add(size_bytes).ok_or(TreeError::Wraps(start))? })?;
    }
    for node in tree.find_node("/reserved-memory").into_iter().flat_map(|node| node.children()) {
        for span in spans(node)? {
            found.try_push(span?)?;
        }
    }
    Ok(found)
}

/// The text of a property of `/chosen`.
fn chosen(tree: Fdt<'static>, name: &str) -> &'static str {
    // Through the bytes of the tree: those that a property lends live as long as its node.
    let Some(node) = tree.find_node("/chosen") else { return "" };
    let Some(property) = node.property(name) else { return "" };
    let value = property.value();
    let offset = value.as_ptr().addr() - tree.data().as_ptr().addr();
    let bytes = tree.data().get(offset..offset + value.len()).unwrap_or_default();
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    core::str::from_utf8(bytes).unwrap_or_default()
}

/// The memory map: what is memory, and what of it is not free.
#[derive(Clone, Debug)]
struct MemoryMap {
    memory: ArrayVec<Span, MAX_SPANS>,
    holes: ArrayVec<Span, MAX_SPANS>,
}

impl MemoryMap {
    /// That of `tree`, for an image at `image`.
    fn read(tree: Fdt<'static>, image: Span) -> Result<MemoryMap, TreeError> {
        let map = MemoryMap { memory: memory(tree)?, holes: holes(tree)? };
        if map.is_memory(image) { Ok(map) } else { Err(TreeError::ImageOutside(image.start)) }
    }

    fn is_memory(&self, span: Span) -> bool {
        self.memory.iter().any(|ram| ram.start <= span.start && span.end <= ram.end)
    }

    /// Checks that the `files` are in free memory.
    fn check_files(&self, image: Span, files: &[Option<Span>]) -> Result<(), TreeError> {
        for (index, file) in files.iter().enumerate().filter_map(|(index, &file)| Some((index, file?))) {
            let others = files[..index].iter().flatten().copied();
            let is_used = self.holes.iter().copied().chain([image]).chain(others).any(|used| file.overlaps(used));
            if is_used || !self.is_memory(file) {
                return Err(TreeError::FileOutside(file.start));
            }
        }
        Ok(())
    }

    fn regions(&self) -> impl Iterator<Item = Region> {
        let memory = self.memory.iter().map(|&span| Region { span, kind: RegionKind::Ram });
        memory.chain(self.holes.iter().map(|&span| Region { span, kind: RegionKind::Firmware }))
    }
}

/// What the tree says of memory and files.
///
/// # Errors
/// [`TreeError`].
///
/// # Safety
/// The tree is that of the machine: its memory map is true. The files are where the command line
/// says, and nothing writes them.
pub unsafe fn boot_info(tree: Fdt<'static>) -> Result<BootInfo, TreeError> {
    let map = MemoryMap::read(tree, image())?;
    let args = Bootargs::parse(chosen(tree, "bootargs"))?;
    map.check_files(image(), &args.files)?;
    let modules = args.files.into_iter().flatten().map(|file| {
        // SAFETY: memory that nothing else uses, with a file, as the caller promises.
        let bytes = unsafe { slice::from_raw_parts(file.start as *const u8, file.size_bytes() as usize) };
        Module { bytes, text: args.guest }
    });
    // SAFETY: the memory map of the machine's device tree, as the caller promises.
    Ok(unsafe { BootInfo::new(args.words, map.regions(), modules) })
}

/// A CPU that can be started.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    /// Its number, as the property `reg` has it.
    pub number: u64,
    /// Its node.
    pub node: FdtNode<'static>,
}

/// The CPUs that can be started, `boot_cpu` first. CPUs beyond those that the image has stacks for
/// are left out.
///
/// # Errors
/// [`TreeError::NoCpus`], [`TreeError::NoBootCpu`], [`TreeError::SameCpu`], [`TreeError::Broken`].
pub fn cpus(tree: Fdt<'static>, boot_cpu: u64) -> Result<ArrayVec<Cpu, MAX_CPUS>, TreeError> {
    let all = tree.cpus().map_err(|_| TreeError::NoCpus)?;
    let (mut first, mut others) = (None, ArrayVec::<Cpu, { MAX_CPUS - 1 }>::new());
    for node in all.cpus().filter(|node| matches!(node.status(), Ok(Status::Okay))) {
        for id in node.ids().map_err(|_| TreeError::Broken("the property reg of a CPU"))? {
            let number = id.to_int::<u64>().map_err(|_| TreeError::Broken("the number of a CPU"))?;
            let cpu = Cpu { number, node: *node };
            let is_known = if number == boot_cpu {
                first.replace(cpu).is_some()
            } else {
                others.iter().any(|other| other.number == number)
            };
            if is_known {
                return Err(TreeError::SameCpu(number));
            }
            if number != boot_cpu && !others.is_full() {
                others.push(cpu);
            }
        }
    }
    let Some(first) = first else {
        return Err(if others.is_empty() { TreeError::NoCpus } else { TreeError::NoBootCpu(boot_cpu) });
    };
    Ok(core::iter::once(first).chain(others).collect())
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use alloc::format;
    use alloc::string::String;
    use alloc::vec::Vec;

    use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

    use super::*;

    const IMAGE: Span = Span { start: 0x8020_0000, end: 0x8040_0000 };

    fn cells(numbers: &[u64]) -> Vec<u32> {
        numbers.iter().flat_map(|&number| [(number >> 32) as u32, number as u32]).collect()
    }

    /// A node with the numbers `reg`, of 64 bits each.
    fn node(name: impl Into<String>, reg: &[u64]) -> DeviceTreeNode {
        let mut node = DeviceTreeNode::new_unchecked(name);
        if !reg.is_empty() {
            node.add_property(DeviceTreeProperty::new_unchecked("reg", &cells(reg)[..]));
        }
        node
    }

    /// A node whose children have addresses of 64 bits, and sizes of `size_cells` words.
    fn parent(name: &str, size_cells: u32, children: impl IntoIterator<Item = DeviceTreeNode>) -> DeviceTreeNode {
        let mut node = node(name, &[]);
        node.add_property(DeviceTreeProperty::new_unchecked("#address-cells", 2_u32));
        node.add_property(DeviceTreeProperty::new_unchecked("#size-cells", size_cells));
        children.into_iter().for_each(|child| node.add_child(child));
        node
    }

    fn tree(children: impl IntoIterator<Item = DeviceTreeNode>) -> Fdt<'static> {
        let mut tree = DeviceTree::new();
        tree.root = parent("", 2, children);
        Fdt::new(Box::leak(tree.to_dtb().into_boxed_slice())).unwrap()
    }

    fn memory(reg: &[u64]) -> DeviceTreeNode {
        node("memory@80000000", reg)
    }

    fn reserved(spans: &[[u64; 2]]) -> DeviceTreeNode {
        parent("reserved-memory", 2, spans.iter().map(|span| node(format!("r@{:x}", span[0]), span)))
    }

    fn map(children: impl IntoIterator<Item = DeviceTreeNode>) -> Result<MemoryMap, TreeError> {
        MemoryMap::read(tree(children), IMAGE)
    }

    #[test]
    fn memory_that_makes_no_sense_is_refused() {
        let error = |children: &[DeviceTreeNode]| map(children.iter().cloned()).err();
        assert_eq!(error(&[]), Some(TreeError::NoMemory));
        assert_eq!(error(&[memory(&[0x8000_0000, 0])]), Some(TreeError::NoMemory));
        assert_eq!(error(&[memory(&[0xffff_ffff_ffff_f000, 0x2000])]), Some(TreeError::Wraps(0xffff_ffff_ffff_f000)));
        let twice = memory(&[0x8000_0000, 0x100_0000, 0x80ff_f000, 0x1000]);
        assert_eq!(error(&[twice]), Some(TreeError::Overlap(0x8000_0000, 0x80ff_f000)));
        assert_eq!(error(&[memory(&[0x9000_0000, 0x100_0000])]), Some(TreeError::ImageOutside(IMAGE.start)));
        let many: Vec<u64> = (0..=MAX_SPANS as u64).flat_map(|index| [index << 32, 0x1000]).collect();
        assert_eq!(error(&[memory(&many)]), Some(TreeError::TooMany));
        let ram = memory(&[0x8000_0000, 0x1000_0000]);
        let many: Vec<_> = (0..MAX_SPANS as u64).map(|index| [index << 32, 0x1000]).collect();
        assert_eq!(error(&[ram.clone(), reserved(&many)]), Some(TreeError::TooMany));
        assert_eq!(error(&[ram, reserved(&[[u64::MAX, 2]])]), Some(TreeError::Wraps(u64::MAX)));
        // `boot_info` leaves none out.
        assert_eq!(2 * MAX_SPANS, MAX_REGIONS);
    }

    #[test]
    fn memory_up_to_the_last_address_is_memory() {
        let all = map([memory(&[0x1000, u64::MAX - 0x1000]), reserved(&[[u64::MAX - 1, 1]])]).unwrap();
        let kinds: Vec<_> = all.regions().map(|region| (region.kind, region.span.start)).collect();
        // The first hole is the tree itself.
        assert_eq!(kinds[0], (RegionKind::Ram, 0x1000));
        assert_eq!((kinds.len(), kinds[2]), (3, (RegionKind::Firmware, u64::MAX - 1)));
        let hole = Span { start: u64::MAX - 1, end: u64::MAX };
        assert_eq!(hole.pages(), Span { start: !0xfff, end: !0xfff });
    }

    #[test]
    fn files_are_in_free_memory() {
        let map = map([memory(&[0x8000_0000, 0x1000_0000]), reserved(&[[0x8800_0000, 0x1000]])]).unwrap();
        let check = |files: &[[u64; 2]]| {
            let files: Vec<_> = files.iter().map(|&[start, end]| Some(Span { start, end })).collect();
            map.check_files(IMAGE, &files)
        };
        assert_eq!(check(&[[0x8100_0000, 0x8200_0000], [0x8200_0000, 0x8800_0000]]), Ok(()));
        for bad in [
            // Outside of memory, in the image, in reserved memory, in the first file.
            [0x8fff_f000, 0x9000_0001],
            [0x7000_0000, 0x7000_1000],
            [0x803f_f000, 0x8040_1000],
            [0x8800_0800, 0x8800_0900],
            [0x81ff_ffff, 0x8300_0000],
        ] {
            assert_eq!(check(&[[0x8100_0000, 0x8200_0000], bad]), Err(TreeError::FileOutside(bad[0])), "{bad:x?}");
        }
    }

    fn cpu(number: u64) -> DeviceTreeNode {
        node(format!("cpu@{number:x}"), &[number])
    }

    fn numbers(children: impl IntoIterator<Item = DeviceTreeNode>) -> Result<Vec<u64>, TreeError> {
        let found = cpus(tree([parent("cpus", 0, children)]), 2)?;
        Ok(found.iter().map(|cpu| cpu.number).collect())
    }

    #[test]
    fn the_boot_cpu_is_the_first_one() {
        assert_eq!(numbers([cpu(0), cpu(1), cpu(2), cpu(0x100)]), Ok([2, 0, 1, 0x100].into()));
        let mut disabled = cpu(0);
        disabled.add_property(DeviceTreeProperty::new_unchecked("status", "disabled"));
        assert_eq!(numbers([disabled, node("cpu-map", &[]), cpu(2)]), Ok([2].into()));
        // As many as there are stacks.
        let more = numbers((0..20).rev().map(cpu)).unwrap();
        assert_eq!((more.len(), more[0], more[1]), (MAX_CPUS, 2, 19));
    }

    #[test]
    fn cpus_that_make_no_sense_are_refused() {
        assert_eq!(cpus(tree([]), 2).err(), Some(TreeError::NoCpus));
        assert_eq!(numbers([]), Err(TreeError::NoCpus));
        assert_eq!(numbers([cpu(0)]), Err(TreeError::NoBootCpu(2)));
        assert_eq!(numbers([cpu(2), cpu(1), node("cpu@3", &[1])]), Err(TreeError::SameCpu(1)));
        assert_eq!(numbers([cpu(2), node("cpu@3", &[2])]), Err(TreeError::SameCpu(2)));
        assert!(matches!(numbers([node("cpu@2", &[])]), Err(TreeError::Broken(_))));
    }
}
