//! What the engine needs from this hypervisor: the one file that an embedder reads first.
//!
//! # Memory
//! All of it comes from the image's allocator, which has a heap for each NUMA node
//! ([`crate::memory`]), and memory is mapped to itself: a host-physical address is a
//! pointer. Page-table pages are on the node that the engine asks for, and the frames of a guest on
//! that of the CPU that first uses them.
//!
//! # The flush
//! It is the machine's ([`arch::flush()`]); [`cpus`](crate::cpus) has the one by
//! numbers and interrupts.

#![expect(unsafe_code, reason = "promises memory and flushes to the engine")]

use alloc::alloc::dealloc;
use alloc::sync::Arc;
use core::alloc::Layout;

use slat::format::LeafAttributes;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, NodeId, PageSize, Pfn};

use crate::arch::{self, clock};
use crate::cpus::Cpus;
use crate::memory;
use crate::ram::Ram;

/// What is left out on purpose, to see that the checks notice it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Control {
    /// Nothing.
    #[default]
    None,
    /// The flush does nothing.
    NoFlush,
    /// The flush counts, but kicks no CPU.
    NoKick,
    /// An entry does not flush.
    NoEntryFlush,
    /// Pages of the dirty log are copied before the log is taken.
    CopyBeforeLog,
    /// A CPU that faulted goes on without a flush of the page.
    NoLocalFlush,
    /// Entries are replaced without a flush between break and make.
    NoBreakFlush,
    /// The flush comes before the break, instead of between break and make.
    FlushBeforeBreak,
    /// A migration does not say of one page that it is left for post-copy.
    LosePage,
    /// The target of a migration lets the guest access pages that have not come.
    NoWithhold,
    /// The source of a migration says nothing more in the middle of post-copy.
    SilentSource,
}

impl Control {
    /// Whether it is of a migration alone.
    pub fn is_of_migration(self) -> bool {
        matches!(self, Control::LosePage | Control::NoWithhold | Control::SilentSource)
    }
}

/// What a memslot's memory comes from.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Memory whose frames come at first use, and may move.
    Ram(Arc<Ram>),
    /// Memory that stays where it is.
    Fixed(Fixed),
}

/// Frames one after the other: memory that stays, or the registers of a device.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// The frame of page 0, and that while it is private.
    first: Pfn,
    private: Pfn,
    attributes: LeafAttributes,
}

impl Backing {
    /// Memory from the frame `first` on, which the guest may use as `attributes` say. Private pages
    /// are in the frames from `private` on.
    ///
    /// # Safety
    /// As many frames as the memslot has pages may be the guest's for as long as the memslot
    /// exists.
    pub unsafe fn fixed(first: Pfn, private: Pfn, attributes: LeafAttributes) -> Backing {
        Backing::Fixed(Fixed { first, private, attributes })
    }
}

/// Lets an emulator that runs the CPUs in turns go to the next one. Hardware needs no such thing.
fn let_others_run() {
    core::hint::spin_loop();
}

/// The host of one VM.
#[derive(Debug)]
pub struct MetalHost {
    /// The CPUs that run it.
    pub cpus: Arc<Cpus>,
}

// SAFETY: tables are the allocator's. Frames of `Ram` change between an invalidation and its drop
// alone (`Ram::move_page`), others never. When `flush` returns, no CPU accesses memory through an
// old translation of the ranges. On x86 each CPU that was in the guest has left it. On RISC-V each
// such CPU has executed the firmware's fence, outside of the guest. On both, each entry flushes
// that comes later. On Arm the instructions reach all CPUs, and the barrier behind them waits for
// the accesses through what they drop. Nothing unwinds: the image aborts.
unsafe impl Host for MetalHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        let node = match node {
            TableNode::Node(node) => node,
            // A CPU has no other policy.
            TableNode::Caller | TableNode::CallerPolicy => memory::own_node(),
        };
        // It never blocks.
        // SAFETY: a page-table page has a size.
        let table = unsafe { memory::allocate(layout, node) };
        (!table.is_null()).then(|| Hpa(table.expose_provenance() as u64))
    }

    fn node_of(&self, frame: Pfn) -> NodeId {
        memory::node_of(frame)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: `allocate_table` returned it, with this layout, as the caller promises.
        unsafe { dealloc(table.0 as *mut u8, layout) };
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        table.0 as *mut u8
    }

    fn resolve(&self, backing: &Backing, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let answer = match backing {
            Backing::Ram(ram) => ram.resolve(page),
            &Backing::Fixed(Fixed { first, attributes, .. }) => {
                Ok(Resolved { attributes, ..Resolved::memory(Pfn(first.0 + page), PageSize::Size4K) })
            }
        };
        arch::guest::publish_code(&self.cpus);
        // Between the answer and what the engine does with it.
        let_others_run();
        answer
    }

    fn resolve_private(
        &self,
        backing: &Backing,
        _gfn: Gfn,
        page: u64,
        _access: Access,
    ) -> Result<Resolved, Unresolved> {
        arch::guest::publish_code(&self.cpus);
        match backing {
            Backing::Ram(_) => Err(Unresolved::Gone),
            Backing::Fixed(Fixed { private, .. }) => Ok(Resolved::memory(Pfn(private.0 + page), PageSize::Size4K)),
        }
    }

    fn resolve_resident(&self, backing: &Backing, _gfn: Gfn, page: u64, _access: Access) -> Option<Resolved> {
        let answer = match backing {
            Backing::Ram(ram) if ram.is_allocated(page) => ram.resolve(page).ok(),
            Backing::Ram(_) | Backing::Fixed(_) => None,
        };
        // The frame may be so new that the fault that got it has not come to this yet.
        arch::guest::publish_code(&self.cpus);
        answer
    }

    fn flush(&self, ranges: &[GfnRange]) {
        let_others_run();
        let is_left_out = match self.cpus.control() {
            Control::NoFlush => true,
            Control::NoBreakFlush | Control::FlushBeforeBreak => self.cpus.is_breaking(),
            _ => false,
        };
        if !is_left_out {
            arch::flush(&self.cpus, ranges);
            self.cpus.note_flush(ranges);
        }
    }

    fn flush_local(&self, gpa: Gpa) {
        if self.cpus.control() != Control::NoLocalFlush {
            arch::flush_local(gpa);
            self.cpus.note_local_flush(gpa);
        }
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.cpus.drain(log);
    }

    fn needs_zapped_leaves(&self) -> bool {
        // No leaf is reported. But on RISC-V a fence by address orders leaf PTEs alone: a hart that
        // keeps a directory entry walks on through a page-table page that was unlinked, to the
        // leaves that are still in it. With `true` they are cleared before.
        cfg!(target_arch = "riscv64")
    }

    fn yield_now(&self) {
        core::hint::spin_loop();
    }

    fn timestamp_ns(&self) -> u64 {
        clock::now_ns()
    }
}
