//! Page tables in the memory of another machine, such as an emulator's: what a processor would find
//! in them.
//!
//! # Use
//! [`memory_file`] makes a file that the emulator takes for its memory. While none of the machine's
//! processors changes its page tables, [`ForeignMemory::of_file`] looks at them, and
//! [`ForeignMemory::entries`] walks them.
//!
//! # Implementation
//! The file is mapped privately. A and D that a walk sets stay in this mapping, so the machine does
//! not notice the walks, and a second walk finds what the first one has set. That tells whether a
//! bit was set before: a PTE that a walk did not change had it.
//!
//! A walk reads no address that is outside of the machine's memory, whatever its page tables say.

#![expect(unsafe_code, reason = "walkers read and write tables through raw pointers")]

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat::{Access, Gpa, Hpa, PageSize, Pfn};

use super::{HardwareFormat, Mapping, Memory, Processor, Purpose, Stop, WalkMemory, Walker, shift};
use crate::hardware::commit::{FlushDomain, Port};
use crate::linux::descriptors::sealed_file;
use crate::linux::mapping::MappedMemory;

/// Makes a file of `size_bytes` zeros for the memory of another machine. Its size is fixed.
///
/// # Errors
/// Those of memfd_create(2).
pub fn memory_file(size_bytes: u64) -> io::Result<OwnedFd> {
    sealed_file(c"slat-machine-memory", size_bytes)
}

/// The memory of another machine.
#[derive(Debug)]
pub struct ForeignMemory {
    /// What is written here is not written to the machine.
    copy: MappedMemory,
    /// Where the machine has it.
    start: Hpa,
}

/// What a PTE that a walk ends at does with the addresses that lead to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The first address, and how many bytes there are.
    pub gpa: Gpa,
    /// See above.
    pub size_bytes: u64,
    /// The PTE's own place.
    pub pte: Hpa,
    /// What it maps. `None`: each access is a fault.
    pub leaf: Option<Leaf>,
}

/// What a leaf PTE, and those above it, allow. What it maps can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The first frame.
    pub frame: Pfn,
    /// What a TLB keeps of it.
    pub size: PageSize,
    /// Whether it can be written.
    pub writable: bool,
    /// Whether code of the guest's kernel can be fetched, and code of its programs.
    pub executable: [bool; 2],
    /// How the memory is accessed.
    pub memory: Memory,
    /// A was set.
    pub accessed: bool,
    /// D was set, or the processor has no D. Of a leaf that can be written.
    pub dirty: bool,
}

impl ForeignMemory {
    /// The memory of a machine that has `file`, of [`memory_file`], from `start` on, a page. While
    /// this exists, what the machine writes may or may not be seen.
    ///
    /// # Errors
    /// Those of mmap(2), and of a file whose size cannot be read.
    pub fn of_file(file: &OwnedFd, start: Hpa) -> io::Result<ForeignMemory> {
        let size_bytes = rustix::fs::fstat(file)?.st_size as u64;
        Ok(ForeignMemory { copy: MappedMemory::private_of_file(file.as_fd(), size_bytes)?, start })
    }

    /// The word at `hpa`, if the machine has memory there.
    pub fn word(&self, hpa: Hpa) -> Option<u64> {
        Some(self.copy.word(self.offset(hpa)?)?.load(Ordering::Relaxed))
    }

    /// Writes a word of this value alone: the machine keeps its own.
    pub fn set_word(&self, hpa: Hpa, value: u64) -> Option<()> {
        self.copy.word(self.offset(hpa)?)?.store(value, Ordering::Relaxed);
        Some(())
    }

    fn offset(&self, hpa: Hpa) -> Option<u64> {
        hpa.0.checked_sub(self.start.0)
    }

    /// What the page tables under `root` do with each address, from 0 on, as `processor` walks them.
    /// It sets A and D, whatever its [`Marks`](super::Marks) are: so they are known.
    pub fn entries<F: HardwareFormat>(&self, root: Hpa, processor: Processor) -> Entries<'_, F> {
        let port = Port::new(&Arc::new(FlushDomain::new()));
        let processor = Processor { marks: super::Marks::ByHardware, ..processor };
        Entries { memory: self, port, root, processor, next: 0, format: PhantomData }
    }
}

/// What page tables do with each address, in the order of the addresses. After an error there is
/// nothing more.
#[derive(Debug)]
pub struct Entries<'m, F> {
    memory: &'m ForeignMemory,
    port: Port,
    root: Hpa,
    processor: Processor,
    /// The next address.
    next: u64,
    format: PhantomData<F>,
}

/// The PTEs of one walk, as it comes to them.
#[derive(Debug)]
struct Path<'m> {
    memory: &'m ForeignMemory,
    /// The last one that was read: its level, and where it is.
    level: Cell<u8>,
    last: Cell<*mut u64>,
    place: Cell<Hpa>,
    /// The last one that was changed.
    changed: Cell<*mut u64>,
}

// SAFETY: the words of a mapping that the reference keeps. This module accesses them atomically.
unsafe impl WalkMemory for &Path<'_> {
    fn pointer_to(self, hpa: Hpa) -> Option<*mut u64> {
        let word = self.memory.copy.word(self.memory.offset(hpa)?)?;
        self.last.set(word.as_ptr());
        self.place.set(hpa);
        Some(word.as_ptr())
    }

    /// What a leaf PTE leads to is not read, and may be a device.
    fn has(self, _hpa: Hpa) -> bool {
        true
    }

    fn count(self, _table: Hpa, level: u8) {
        self.level.set(level);
    }

    fn changed(self, at: *mut u64) {
        self.changed.set(at);
    }
}

/// A walk that came to an end.
struct Walked {
    /// `None`: a fault.
    mapping: Option<Mapping>,
    level: u8,
    pte: Hpa,
    /// Whether the last PTE had the bits that the access sets.
    is_marked: bool,
}

impl<F: HardwareFormat> Entries<'_, F> {
    fn walk(&self, gpa: Gpa, access: Access) -> Result<Walked, Stop> {
        let path = Path {
            memory: self.memory,
            level: Cell::new(self.processor.levels),
            last: Cell::new(ptr::null_mut()),
            place: Cell::new(self.root),
            changed: Cell::new(ptr::null_mut()),
        };
        let (port, generation) = (&self.port, self.port.generation());
        let (root, processor) = (self.root, self.processor);
        let mapping = loop {
            path.level.set(processor.levels);
            let walker = Walker { port, generation, root, processor, cached: None, log: None, memory: &path };
            match F::walk(walker, gpa, access, Purpose::Data) {
                Ok(mapping) => break Some(mapping),
                Err(Stop::Fault(_)) => break None,
                // Nothing is flushed here: this thread lost its CPU for a moment. What was changed
                // before that is kept in `path`.
                Err(Stop::Restart) => {}
                Err(stop) => return Err(stop),
            }
        };
        let is_marked = path.changed.get() != path.last.get();
        Ok(Walked { mapping, level: path.level.get(), pte: path.place.get(), is_marked })
    }

    fn entry(&self, gpa: Gpa) -> Result<Entry, Stop> {
        let read = self.walk(gpa, Access::Read)?;
        let size_bytes = 1 << shift(read.level);
        let Some(mapping) = read.mapping else { return Ok(Entry { gpa, size_bytes, pte: read.pte, leaf: None }) };
        // After the read, which has set A.
        let written = self.walk(gpa, Access::Write)?;
        let can_fetch = |access| Ok::<_, Stop>(self.walk(gpa, access)?.mapping.is_some());
        let leaf = Leaf {
            frame: mapping.hpa.pfn(),
            size: mapping.size,
            writable: written.mapping.is_some(),
            executable: [can_fetch(Access::Execute)?, can_fetch(Access::ExecuteUser)?],
            memory: mapping.memory,
            accessed: read.is_marked,
            dirty: written.is_marked,
        };
        Ok(Entry { gpa, size_bytes, pte: read.pte, leaf: Some(leaf) })
    }
}

impl<F: HardwareFormat> Iterator for Entries<'_, F> {
    type Item = Result<Entry, Stop>;

    fn next(&mut self) -> Option<Result<Entry, Stop>> {
        let end = 1 << self.processor.gpa_bits;
        if self.next >= end {
            return None;
        }
        let entry = self.entry(Gpa(self.next));
        self.next = entry.as_ref().map_or(end, |entry| entry.gpa.0 + entry.size_bytes);
        Some(entry)
    }
}
