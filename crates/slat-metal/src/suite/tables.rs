//! The page tables, for a walker outside of the machine: while all CPUs are out of the guest, the
//! hypervisor says where the tables are and what the engine's queries find in them, and waits until
//! that walker has read them.
//!
//! # Protocol
//! A line on the console, whose words are `name=value`:
//! - `format`, `root`, `levels`, `gpa_bits`, `features`, `pat`: what a walk depends on;
//! - `access`: whether the CPUs set A (`bits`), or a page may be kept from them (`faults`);
//! - `dirty`: whether D of the engine is that of the PTE (`exact`), or may be one that the dirty log
//!   has taken from it (`kept`);
//! - `tables`: the node that all page-table pages must be on, or `any`;
//! - `mappings`: the address of the mappings, and how many there are. Each is of four words: the
//!   guest-physical address, pages of 4 KiB, the first frame, and [`flags`] with the node that the
//!   memory must be on;
//! - `answer`: the address of an [`Answer`].
//!
//! The reader writes the text of the answer, its length, and then the verdict.

use alloc::boxed::Box;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use slat::dirty::DirtyTracking;
use slat::format::Format;
use slat::tables::{AccessTracking, TablePlacement, Translation};
use slat::{Config, Gpa, NodeId, PAGE_SIZE, PageSize};
use thiserror::Error;

use crate::arch::clock;
use crate::console;
use crate::memory::MEMORY;
use crate::operations::MetalVm;
use crate::{error, fail};

/// How long an answer may take. The machine may run much slower than the reader.
const ANSWER_NS: u64 = 60_000_000_000;

/// Bytes of the text of an answer.
const TEXT_BYTES: usize = 512;

/// What the reader found.
#[derive(Debug)]
#[repr(C)]
struct Answer {
    /// [`RIGHT`] or [`WRONG`], when there is an answer.
    verdict: AtomicU64,
    nr_bytes: AtomicU64,
    text: [AtomicU8; TEXT_BYTES],
}

/// What the walker finds is what the engine says.
const RIGHT: u64 = 1;
/// It is not. The text says what differs.
const WRONG: u64 = 2;

/// The walker has not read the page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the walker of the page tables has not answered within {} s", ANSWER_NS / 1_000_000_000)]
struct NoAnswer;

impl Answer {
    fn new() -> Box<Answer> {
        Box::new(Answer {
            verdict: AtomicU64::new(0),
            nr_bytes: AtomicU64::new(0),
            text: [const { AtomicU8::new(0) }; TEXT_BYTES],
        })
    }

    fn wait(&self) -> Result<u64, NoAnswer> {
        let end = clock::now_ns().saturating_add(ANSWER_NS);
        while clock::now_ns() < end {
            // Acquire: the text was written before.
            match self.verdict.load(Ordering::Acquire) {
                0 => core::hint::spin_loop(),
                verdict => return Ok(verdict),
            }
        }
        Err(NoAnswer)
    }

    fn text(&self) -> Vec<u8> {
        let nr_bytes = self.nr_bytes.load(Ordering::Relaxed) as usize;
        self.text.iter().take(nr_bytes).map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}

/// What the engine says of a page, but for its frame: the size in bits 0 and 1, W, A, D in bits 2 to
/// 4, the memory type from bit 8 on, and from where it is executed from bit 16 on, both by the
/// engine's numbers.
fn flags(found: &Translation) -> u64 {
    let size = match found.size {
        PageSize::Size4K => 0,
        PageSize::Size2M => 1,
        PageSize::Size1G => 2,
    };
    let bit = |is_set: bool, shift: u32| u64::from(is_set) << shift;
    let attributes = found.attributes;
    let (memory, execute) = ((attributes.memory as u64) << 8, (attributes.execute as u64) << 16);
    size | bit(found.writable, 2) | bit(found.accessed, 3) | bit(found.dirty, 4) | memory | execute
}

/// From this bit on the flags have the number of a node plus 1, or 0 for any node.
const NODE_SHIFT: u32 = 24;

/// What the engine says of the pages of `ranges`: pages one after the other in frames one after the
/// other are one mapping. `asked` says which node their memory was asked from.
fn mappings<F: Format>(
    vm: &MetalVm<F>,
    ranges: impl Iterator<Item = (Gpa, u64)>,
    asked: impl Fn(Gpa) -> Option<NodeId>,
) -> Vec<[u64; 4]> {
    let tables = vm.read_tables().unwrap_or_else(|error| error!("the page tables cannot be read: {error}"));
    let mut cursor = tables.cursor();
    let mut all: Vec<[u64; 4]> = Vec::new();
    for gpa in ranges.flat_map(|(start, nr_pages)| (0..nr_pages).map(move |page| start.0 + page * PAGE_SIZE)) {
        let Some(found) = cursor.query(Gpa(gpa)) else { continue };
        let node = asked(Gpa(gpa)).map_or(0, |node| u64::from(node.0) + 1);
        let (pfn, new_flags) = (found.pfn.0, flags(&found) | node << NODE_SHIFT);
        match all.last_mut() {
            Some([start, nr_pages, first, flags])
                if *start + *nr_pages * PAGE_SIZE == gpa && *first + *nr_pages == pfn && *flags == new_flags =>
            {
                *nr_pages += 1;
            }
            _ => all.push([gpa, 1, pfn, new_flags]),
        }
    }
    all
}

/// Has the page tables of `vm`, which was created with `config`, walked outside of the machine. Its
/// memslots are in `ranges`: their first address, and pages. Their memory was asked from the nodes
/// that `asked` says. The run ends if the walker finds anything else than the engine. No CPU is in
/// the guest, or changes the tables.
pub(super) fn check<F: Format>(
    vm: &MetalVm<F>,
    config: &Config,
    ranges: impl Iterator<Item = (Gpa, u64)>,
    asked: impl Fn(Gpa) -> Option<NodeId>,
) {
    let (all, answer) = (mappings(vm, ranges, asked), Answer::new());
    let access = if config.access_tracking == AccessTracking::Faults { "faults" } else { "bits" };
    let dirty = match config.dirty_tracking {
        DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => "kept",
        _ => "exact",
    };
    let tables = match config.table_placement {
        TablePlacement::Node(node) if (node.0 as usize) < MEMORY.nodes().nr() => node.0.to_string(),
        _ => "any".to_string(),
    };
    console::line(
        "tables",
        format_args!(
            "format={} root={:#x} levels={} gpa_bits={} features={:#x} pat={:#x} access={access} dirty={dirty} \
             tables={tables} mappings={:#x},{} answer={:#x}",
            F::NAME,
            vm.root().0,
            vm.root_level().0,
            vm.gpa_bits(),
            config.hardware.features.bits(),
            config.hardware.pat,
            all.as_ptr().expose_provenance(),
            all.len(),
            core::ptr::from_ref(&*answer).expose_provenance(),
        ),
    );
    match answer.wait() {
        Ok(RIGHT) => {}
        Ok(WRONG) => fail!(Tables; "{}", alloc::string::String::from_utf8_lossy(&answer.text())),
        Ok(verdict) => error!("the answer for the page tables makes no sense: {verdict:#x}"),
        Err(no_answer) => error!("{no_answer}"),
    }
}

#[cfg(test)]
mod tests {
    use slat::Pfn;
    use slat::format::{Execute, LeafAttributes, MemoryType};

    use super::*;

    #[test]
    fn what_a_query_finds_is_in_the_flags() {
        let attributes = LeafAttributes { memory: MemoryType::Device, execute: Execute::User };
        let found = Translation {
            pfn: Pfn(7),
            size: PageSize::Size2M,
            writable: true,
            accessed: false,
            dirty: true,
            attributes,
        };
        assert_eq!(flags(&found), 2 << 16 | 4 << 8 | 0b1_0101);
        let other = Translation { accessed: true, writable: false, size: PageSize::Size4K, ..found };
        assert_eq!(flags(&other), 2 << 16 | 4 << 8 | 0b1_1000);
    }

    #[test]
    fn an_answer_has_its_text() {
        let answer = Answer::new();
        answer.text.iter().zip(b"a text").for_each(|(place, &byte)| place.store(byte, Ordering::Relaxed));
        answer.nr_bytes.store(6, Ordering::Relaxed);
        answer.verdict.store(WRONG, Ordering::Release);
        assert_eq!((answer.wait(), answer.text()), (Ok(WRONG), b"a text".into()));
        // A length that is too large.
        answer.nr_bytes.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(answer.text().len(), TEXT_BYTES);
    }
}
