//! What the device tree says (Devicetree Specification, release 0.4): memory, CPUs, the command line
//! and the files that the emulator has loaded. It is believed no more than that: a tree that
//! contradicts itself, or the image, is refused before anything is allocated.

#![expect(unsafe_code, reason = "reads memory at the addresses that the loader gives")]

use core::slice;

use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::{Node, Property, ToCellInt};
use thiserror::Error;

use crate::boot::{BootInfo, MAX_CPUS, Module, Region, RegionKind, Span, image};
use crate::bootargs::{BadPlace, Bootargs};

/// The first word of a tree, which is big-endian like all of them.
const MAGIC: u32 = 0xd00d_feed;
/// A tree that is larger is none: the boot protocol of Linux for Arm has this limit, too.
const MAX_BYTES: u32 = 2 << 20;

/// Ranges of memory, and holes in them, that are kept.
const MAX_SPANS: usize = 16;

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

/// A list without allocation.
#[derive(Clone, Copy, Debug)]
pub struct List<T: Copy, const N: usize> {
    items: [Option<T>; N],
    len: usize,
}

impl<T: Copy, const N: usize> List<T, N> {
    const fn new() -> List<T, N> {
        List { items: [None; N], len: 0 }
    }

    /// Adds `item`, unless the list is full.
    fn push(&mut self, item: T) -> Result<(), TreeError> {
        *self.items.get_mut(self.len).ok_or(TreeError::TooMany)? = Some(item);
        self.len += 1;
        Ok(())
    }

    /// What is in it.
    pub fn iter(&self) -> impl Iterator<Item = T> + Clone + '_ {
        self.items.iter().flatten().copied()
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

fn overlap(left: Span, right: Span) -> bool {
    left.start < right.end && right.start < left.end
}

/// The ranges of memory, which are apart from each other.
fn memory(tree: Fdt<'static>) -> Result<List<Span, MAX_SPANS>, TreeError> {
    let mut found = List::<Span, MAX_SPANS>::new();
    for node in tree.root().children().filter(|node| node.name_without_address() == "memory") {
        for span in spans(node)? {
            let span = span?;
            if span.size_bytes() == 0 {
                continue;
            }
            if let Some(other) = found.iter().find(|&other| overlap(span, other)) {
                return Err(TreeError::Overlap(other.start, span.start));
            }
            found.push(span)?;
        }
    }
    if found.len == 0 { Err(TreeError::NoMemory) } else { Ok(found) }
}

/// Memory that is not free: the tree itself, and what it reserves.
fn holes(tree: Fdt<'static>) -> Result<List<Span, MAX_SPANS>, TreeError> {
    let mut found = List::new();
    let start = tree.data().as_ptr().addr() as u64;
    found.push(Span { start, end: start + tree.data().len() as u64 })?;
    for reservation in tree.memory_reservations() {
        let (start, size_bytes) = (reservation.address(), reservation.size());
        found.push(Span { start, end: start.checked_add(size_bytes).ok_or(TreeError::Wraps(start))? })?;
    }
    for node in tree.find_node("/reserved-memory").into_iter().flat_map(|node| node.children()) {
        for span in spans(node)? {
            found.push(span?)?;
        }
    }
    Ok(found)
}

/// What is left of `span` without `holes`, as far as whole pages go.
fn without(span: Span, mut holes: impl Iterator<Item = Span> + Clone, kept: &mut impl FnMut(Span)) {
    match holes.next() {
        None => {
            let whole = Span { start: span.start.next_multiple_of(4096), end: span.end & !4095 };
            if whole.start < whole.end {
                kept(whole);
            }
        }
        Some(hole) if hole.size_bytes() == 0 => without(span, holes, kept),
        Some(hole) => {
            span.without(hole).into_iter().filter(|part| part.size_bytes() != 0).for_each(|part| {
                without(part, holes.clone(), kept);
            });
        }
    }
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

/// What the tree says of memory and files.
///
/// # Errors
/// [`TreeError`].
///
/// # Safety
/// The tree is that of the machine: its memory map is true. The files are where the command line
/// says, and nothing writes them.
pub unsafe fn boot_info(tree: Fdt<'static>) -> Result<BootInfo, TreeError> {
    let memory = memory(tree)?;
    let holes = holes(tree)?;
    let is_memory = |span: Span| memory.iter().any(|ram| ram.start <= span.start && span.end <= ram.end);
    if !is_memory(image()) {
        return Err(TreeError::ImageOutside(image().start));
    }
    let args = Bootargs::parse(chosen(tree, "bootargs"))?;
    let files = args.files;
    for (index, file) in files.iter().enumerate().filter_map(|(index, &file)| Some((index, file?))) {
        let others = files[..index].iter().flatten().copied();
        let is_used = holes.iter().chain([image()]).chain(others).any(|used| overlap(file, used));
        if is_used || !is_memory(file) {
            return Err(TreeError::FileOutside(file.start));
        }
    }
    let mut regions = List::<Region, { 2 * MAX_SPANS }>::new();
    let mut result = Ok(());
    for span in memory.iter() {
        without(span, holes.iter(), &mut |span| {
            let pushed = regions.push(Region { span, kind: RegionKind::Ram });
            result = result.and(pushed);
        });
    }
    result?;
    let modules = files.into_iter().flatten().map(|file| {
        // SAFETY: memory that nothing else uses, with a file, as the caller promises.
        let bytes = unsafe { slice::from_raw_parts(file.start as *const u8, file.size_bytes() as usize) };
        Module { bytes, text: args.guest }
    });
    // SAFETY: the memory map of the machine's device tree, as the caller promises.
    Ok(unsafe { BootInfo::new(args.words, regions.iter(), modules) })
}

/// The numbers of the CPUs, as the property `reg` of each has them. CPUs beyond those that the image
/// has stacks for are left out.
///
/// # Errors
/// [`TreeError::NoCpus`], [`TreeError::SameCpu`], [`TreeError::Broken`].
pub fn cpus(tree: Fdt<'static>) -> Result<List<u64, MAX_CPUS>, TreeError> {
    let mut found = List::<u64, MAX_CPUS>::new();
    let node = tree.cpus().map_err(|_| TreeError::NoCpus)?;
    for cpu in node.cpus() {
        let ids = cpu.ids().map_err(|_| TreeError::Broken("the property reg of a CPU"))?;
        for id in ids {
            let id = id.to_int::<u64>().map_err(|_| TreeError::Broken("the number of a CPU"))?;
            if found.iter().any(|other| other == id) {
                return Err(TreeError::SameCpu(id));
            }
            if found.len < MAX_CPUS {
                found.push(id)?;
            }
        }
    }
    if found.len == 0 { Err(TreeError::NoCpus) } else { Ok(found) }
}
