//! The states of a PTE and the changes between them. Every other protocol relies on this one.
//!
//! # Guarantees
//! - One atomic operation makes each change of a linked PTE. No A or D that hardware sets is lost.
//! - A leaf PTE never becomes a leaf PTE of another frame. The range is invalidated in between.
//! - A CPU that loads speculatively through a PTE that is not present reaches no memory.
//!
//! # Use
//! Read a PTE through [`PteRef`](super::pte_ref::PteRef), decode it with [`Pte::state`], and change
//! it by an operation of `PteRef`. A thread that reads a frozen PTE starts over at the root.
//!
//! # Implementation
//! | state | present for hardware | meaning |
//! |---|---|---|
//! | *empty* | no | nothing is mapped; holds an invalidation sequence number |
//! | *leaf* | yes | maps memory |
//! | *tracked* | no | maps memory; hardware faults, so that the next access is observed |
//! | *table* | yes | points to the page-table page below: a directory entry |
//! | *broken* | no | between a page-table page and a huge leaf; names the page-table page |
//! | *frozen* | no | the page-table page of this PTE was unlinked or is broken; final |
//!
//! These are all changes. Each is a compare-and-exchange from the very value that was read; at the
//! lowest level one AND may clear W or A of a leaf. No OR sets a bit.
//!
//! | from -> to | operation |
//! |---|---|
//! | empty -> leaf, table | fault, prefault, if the PTE holds the number that it saw |
//! | empty -> empty, greater number | zap; for an unflushed PTE in part, a flush after the read |
//! | leaf, tracked -> leaf, same frame | fault; restores W, sets A and D for a CPU that does not |
//! | leaf -> leaf, tracked, same frame | protect; age (tracked without A bits: W goes, D stays) |
//! | leaf, tracked -> table | split; it copies permissions, A and D exactly, so it needs no flush |
//! | leaf, tracked -> broken -> table | split with break before make; a flush in between |
//! | table -> broken -> leaf, tracked | recovery; it freezes the PTEs below, and gathers A and D |
//! | broken -> empty, fresh number | abort, once all that was there has been reported |
//! | leaf -> leaf, same frame, other rights | a call that protects pinned pages |
//! | leaf, tracked -> empty | zap, once it is reported; fault that replaces a read-only leaf |
//! | pinned leaf -> empty, fresh number | undo of a mapping that failed |
//! | table -> table, protected | lazy protection; clears W, moves the generation on in any case |
//! | table, protected -> table | push-down, from the value that it began with; sets W |
//! | table -> empty, fresh number | zap, once all PTEs below are empty, or go unseen |
//! | empty, table -> frozen | the unlinking thread, where a table could be linked; plain exchange |
//! | any -> frozen, keeps what it was | recovery of the page, its abort; zap, leaves unseen |
//!
//! The proofs (`models/proofs/`) have a step for each. Under shuttle their replay checks that the
//! engine makes no other.
//!
//! | from -> to | steps |
//! |---|---|
//! | empty -> leaf, table | invalidation: install, refine, refine_anew |
//! | empty -> empty, greater number | invalidation: zap_lowest, zap_higher |
//! | leaf, tracked -> leaf, same frame | dirty_log: restore_write |
//! | leaf -> leaf, tracked, same frame | dirty_log: protect, enabling_protects, drop_write |
//! | leaf, tracked -> table | invalidation: split |
//! | leaf, tracked -> broken -> table | break_before_make: break_leaf, split, cancel_split |
//! | table -> broken -> leaf, tracked | invalidation: break, make_huge |
//! | broken -> empty, fresh number | invalidation: cancel |
//! | leaf -> leaf, same frame, other rights | dirty_log: restore_write, drop_write |
//! | leaf, tracked -> empty | invalidation: zap_lowest, zap_higher, empty_leaf |
//! | pinned leaf -> empty, fresh number | undo: undo_leaf |
//! | table -> table, protected | lazy_protection: protect_entry, enabling_protects_entry |
//! | table, protected -> table | lazy_protection: unprotect |
//! | table -> empty, fresh number | invalidation: unlink, unlink_leaves |
//! | empty, table -> frozen | invalidation: freeze_unlinked |
//! | any -> frozen, keeps what it was | invalidation: freeze, freeze_unlinked |
//!
//! PTEs of a new page-table page inherit the number of the PTE above. An operation that needs a
//! broken PTE aborts its owner's work; one that only protects, splits, ages or queries does not.
//! The owner's exchange then fails, and no thread waits.
//!
//! A leaf that the guest may write has both `F::WRITABLE` and `F::HOST_WRITABLE`. A leaf with
//! `HOST_WRITABLE` alone is write-protected for logging: a fault that finds the page's memslot
//! restores W without asking the host. A leaf with neither needs the host's answer. With that
//! answer the fault empties the PTE and installs a new leaf.
//!
//! A *pinned* leaf is what a caller has mapped in advance (`second_stage/map.rs`): it has
//! `WAS_DIRTY` without `HOST_WRITABLE`, as no other leaf has, and W if it may be written. Faults,
//! logs, aging and recoveries leave it alone.
//!
//! A directory entry above leaves of 4 KiB may be *protected*: without W it write-protects all 512
//! leaves, whatever their own W is. The next writer *pushes down* (`second_stage/push_down.rs`). If
//! the entry was protected again meanwhile, that fails, because the generation has moved on
//! (`generation`). In formats without generations (directory entries without rights, or without
//! room) none is protected.
//!
//! A PTE that is not present has the lowest three bits clear, which no format reads as present, and
//! bit 10: with mode-based execute control, EPT reads that as present, too (Intel SDM vol. 3C, "EPT
//! Translation Mechanism"). Bit 3 says frozen, bit 4 tracked, bit 8 broken. From bit 12 on an empty
//! PTE has the sequence number, and a tracked one its frame, with bits 5 and 6 for what the leaf
//! was. A frozen one has a link of the list of retired page-table pages (`retire`), or its former
//! frame or page-table page, with bits 9, 11 and 52 to 56 for what it was. A broken one has the
//! page-table page, with bit 11 if that is to be linked. Bits 57 to 63 of a tracked leaf, and of a
//! frozen one, are its attributes ([`Format::pack_attributes`]). Addresses are those that hardware
//! sees; `encoding` knows which bits of them the host does not see.
//!
//! # Why it is correct
//! Hardware may set A and D of a linked leaf at any time. A compare-and-exchange from the value
//! that was read fails if hardware or another thread was faster; the one AND only clears bits.
//!
//! The exchange of a read-only leaf for a writable one could not show that the memslot was replaced
//! meanwhile by one over the same frames that must not be written. The number of the empty PTE
//! does.
//!
//! CPUs may still have a tracked leaf cached, as it was before. That only hides accesses until the
//! translation is replaced; an operation that zaps the leaf flushes.
//!
//! # L1 terminal fault
//! A CPU may load from the address in a PTE that is not present, ahead of the fault, if the L1 data
//! cache has that address; the guest may then find out what was there (Intel, "Deep Dive: Intel
//! Analysis of L1 Terminal Fault", CVE-2018-3646). So bits 12 to 51 of such a PTE hold no address
//! of memory: an address or a number is stored inverted. An address below half of what the cache
//! distinguishes (2^43 on the CPUs concerned, if not more) is then above it. Numbers have their
//! lowest 12 bits in bits 52 to 63, so that the rest stays small: sequence numbers below 2^43 are
//! out of reach, which last 14 years at 10000 changes a second. A host with memory beyond that half
//! protects it by other means (flushes of the L1 data cache at entry), as it has to anyway.

mod frozen;

use core::fmt;
use core::marker::PhantomData;

use super::invalidation_seq::InvalidationSeq;
use crate::addr::{Access, Hpa, Level, Pfn};
use crate::format::{self, Format};
#[cfg(shuttle)]
use crate::sync::events::PteKind;
use frozen::{FROZEN_LEAF, FROZEN_TABLE};
pub(crate) use frozen::{Frozen, FrozenLeaves};
pub(super) use frozen::{frozen_link, frozen_number, link_of, number_of};

const FROZEN_BIT: u64 = 1 << 3;
const TRACKED_BIT: u64 = 1 << 4;
const TRACKED_HOST_WRITABLE: u64 = 1 << 5;
const TRACKED_DIRTY: u64 = 1 << 6;
const BROKEN_BIT: u64 = 1 << 8;
const BROKEN_FOR_SPLIT: u64 = 1 << 11;
/// From this bit on a tracked or frozen leaf keeps its attributes.
const ATTRIBUTES_SHIFT: u32 = 57;
/// The lowest bit of an address or a number in a PTE that is not present.
pub(super) const PAYLOAD_SHIFT: u32 = 12;
/// Bits 12 to 51: no format may have wider host-physical addresses ([`Format::HPA_BITS`]).
const ADDRESS: u64 = (1 << 52) - (1 << PAYLOAD_SHIFT);

/// Bits that a PTE of the lowest level may have set while it is not present. (Bit 8 says broken,
/// but not at the lowest level: EPT's A may be there.)
pub(super) const SET_WHERE_NOT_PRESENT: u64 =
    TRACKED_BIT | FROZEN_BIT | FROZEN_LEAF | FROZEN_TABLE | u64::MAX << PAYLOAD_SHIFT;
/// Those that only a tracked one may have, which has lost W.
pub(super) const SET_WHERE_TRACKED: u64 = TRACKED_HOST_WRITABLE | TRACKED_DIRTY;

/// The bits by which a PTE that is not present keeps `address`; see L1 terminal fault above.
#[inline]
const fn hidden_address(address: Hpa) -> u64 {
    debug_assert!(address.0 & !ADDRESS == 0);
    address.0 ^ ADDRESS
}

#[inline]
const fn address_in(bits: u64) -> Hpa {
    Hpa(!bits & ADDRESS)
}

/// The bits by which such a PTE keeps `number`, which has 52 bits at most.
#[inline]
pub(super) const fn hidden_number(number: u64) -> u64 {
    debug_assert!(number < 1 << (u64::BITS - PAYLOAD_SHIFT));
    (number & ADDRESS | number << (u64::BITS - PAYLOAD_SHIFT)) ^ ADDRESS
}

#[inline]
pub(super) const fn number_in(bits: u64) -> u64 {
    !bits & ADDRESS | bits >> (u64::BITS - PAYLOAD_SHIFT)
}

/// A PTE of format `F`, as it was read or is to be stored. What it says depends on its level.
#[repr(transparent)]
pub(crate) struct Pte<F>(u64, PhantomData<F>);

impl<F> Clone for Pte<F> {
    #[inline]
    fn clone(&self) -> Pte<F> {
        *self
    }
}

impl<F> Copy for Pte<F> {}

impl<F> PartialEq for Pte<F> {
    #[inline]
    fn eq(&self, other: &Pte<F>) -> bool {
        self.0 == other.0
    }
}

impl<F> Eq for Pte<F> {}

impl<F> fmt::Debug for Pte<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pte({:#x})", self.0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Empty(InvalidationSeq),
    Leaf,
    Tracked,
    Table,
    Broken,
    Frozen,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Breaking {
    /// A page-table page was here, and a huge leaf is to come.
    Recovery,
    /// A huge leaf was here, and a page-table page is to come.
    Split,
}

/// The states.
impl<F: Format> Pte<F> {
    /// As a PTE is in memory.
    #[inline]
    pub(super) const fn from_bits(bits: u64) -> Pte<F> {
        Pte(bits, PhantomData)
    }

    #[inline]
    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn empty(seq: InvalidationSeq) -> Pte<F> {
        Pte::from_bits(seq.bits_of_empty())
    }

    /// A leaf that may be read; not writable, not accessed, not dirty. For other modules there is
    /// [`Encoding::leaf`](super::encoding::Encoding::leaf).
    #[inline]
    pub(crate) fn leaf(pfn: Pfn, level: Level) -> Pte<F> {
        Pte::from_bits(F::leaf(pfn, level).0)
    }

    /// A directory entry that points to the page-table page at `table`. It is not protected.
    #[inline]
    pub(crate) fn table(table: Hpa) -> Pte<F> {
        Pte::from_bits(F::table(table).0)
    }

    /// A broken PTE where `table`, a directory entry, was or is to be.
    pub(crate) fn broken(table: Pte<F>, breaking: Breaking) -> Pte<F> {
        let kind = match breaking {
            Breaking::Recovery => 0,
            Breaking::Split => BROKEN_FOR_SPLIT,
        };
        Pte::from_bits(hidden_address(table.table_below()) | BROKEN_BIT | kind)
    }

    /// A frozen PTE that was nothing.
    pub(crate) const FROZEN: Pte<F> = Pte::from_bits(FROZEN_BIT | ADDRESS);

    /// Stands for the directory entry above the root: one that is not protected.
    pub(super) const ABOVE_ROOT: Pte<F> = Pte::from_bits(F::WRITABLE);

    #[inline(always)]
    pub(crate) fn state(self, level: Level) -> State {
        if !self.is_present() {
            // The most frequent state by one test.
            if self.0 & (FROZEN_BIT | TRACKED_BIT | BROKEN_BIT) == 0 {
                State::Empty(InvalidationSeq::of_empty(self.0))
            } else if self.0 & FROZEN_BIT != 0 {
                State::Frozen
            } else if self.0 & BROKEN_BIT != 0 {
                State::Broken
            } else {
                State::Tracked
            }
        } else if F::is_leaf(format::Pte(self.0), level) {
            State::Leaf
        } else {
            State::Table
        }
    }

    /// Whether it is empty or a leaf of `level`, tracked or not. (By fewer tests than the state.)
    #[inline]
    pub(super) fn names_no_table(self, level: Level) -> bool {
        if self.is_present() { F::is_leaf(format::Pte(self.0), level) } else { self.0 & (FROZEN_BIT | BROKEN_BIT) == 0 }
    }

    #[inline]
    pub(super) fn is_frozen(self) -> bool {
        !self.is_present() && self.0 & FROZEN_BIT != 0
    }

    /// Whether it is a leaf of `level`, tracked or not.
    #[inline]
    pub(crate) fn is_leaf(self, level: Level) -> bool {
        matches!(self.state(level), State::Leaf | State::Tracked)
    }

    /// Whether a PTE of the lowest level, not frozen, is a leaf, tracked or not. (By fewer tests than
    /// [`is_leaf`](Self::is_leaf).)
    #[inline]
    pub(super) fn maps_a_page(self) -> bool {
        debug_assert!(!self.is_frozen());
        self.is_present() || self.0 & TRACKED_BIT != 0
    }

    /// Whether hardware uses it.
    #[inline]
    pub(crate) fn is_present(self) -> bool {
        F::is_present(format::Pte(self.0))
    }
}

/// Broken PTEs.
impl<F: Format> Pte<F> {
    /// What a broken PTE is broken for.
    #[inline]
    pub(crate) fn breaking(self) -> Breaking {
        debug_assert!(self.0 & BROKEN_BIT != 0);
        if self.0 & BROKEN_FOR_SPLIT == 0 { Breaking::Recovery } else { Breaking::Split }
    }

    /// The page-table page that a broken PTE names.
    #[inline]
    pub(crate) fn table_of_broken(self) -> Hpa {
        debug_assert!(self.0 & BROKEN_BIT != 0);
        address_in(self.0)
    }
}

/// What the bits `value` of a PTE of `level` say, for the proofs.
#[cfg(shuttle)]
pub fn kind<F: Format>(value: u64, level: u8) -> PteKind {
    let (pte, level) = (Pte::<F>::from_bits(value), Level(level));
    match pte.state(level) {
        State::Empty(seq) if seq.is_unflushed() => PteKind::Unflushed(seq.flushed().number()),
        State::Empty(seq) => PteKind::Empty(seq.number()),
        State::Leaf | State::Tracked => PteKind::Leaf(pte.plain_frame(level).0, pte.untracked(level).marks()),
        State::Table => PteKind::Table(pte.table_below().0, value & F::GENERATION, pte.is_protected()),
        State::Broken => PteKind::Broken(pte.table_of_broken().0),
        State::Frozen => PteKind::Frozen,
    }
}

/// Directory entries.
impl<F: Format> Pte<F> {
    /// Whether directory entries of the format can be protected: it has W there, and generations.
    pub(crate) const CAN_BE_PROTECTED: bool = F::GENERATION != 0;

    /// The page-table page that a directory entry points to.
    #[inline]
    pub(crate) fn table_below(self) -> Hpa {
        debug_assert!(self.is_present());
        F::hpa(self.0 & F::ADDRESS)
    }

    /// Whether a directory entry write-protects all leaves below.
    #[inline]
    pub(crate) fn is_protected(self) -> bool {
        Self::CAN_BE_PROTECTED && self.0 & F::WRITABLE == 0
    }

    /// This directory entry protected, whether it was before or not: of the next generation.
    #[inline]
    pub(crate) fn protected(self) -> Pte<F> {
        let one = F::GENERATION & F::GENERATION.wrapping_neg();
        let generation = self.0.wrapping_add(one) & F::GENERATION;
        Pte::from_bits(self.0 & !(F::GENERATION | F::WRITABLE) | generation)
    }

    /// This protected directory entry with W again.
    #[inline]
    pub(crate) fn unprotected(self) -> Pte<F> {
        Pte::from_bits(self.0 | F::WRITABLE)
    }
}

/// Leaves.
impl<F: Format> Pte<F> {
    /// The bits of a leaf that change: of software, and of hardware's use of it.
    const MARKS: u64 = F::WRITABLE | F::HOST_WRITABLE | F::ACCESSED | F::DIRTY | F::WAS_DIRTY;

    /// The address bits of a leaf of `level`, tracked or not.
    #[inline]
    pub(super) fn leaf_address(self, level: Level) -> u64 {
        // In a huge leaf, those below its size say other things.
        let inside = F::address_bits(Hpa(level.size_bytes() - 1));
        if self.is_present() { self.0 & F::ADDRESS & !inside } else { F::address_bits(address_in(self.0)) }
    }

    /// The frame of a leaf, tracked or not, as hardware sees it.
    #[inline]
    pub(crate) fn plain_frame(self, level: Level) -> Pfn {
        F::hpa(self.leaf_address(level)).pfn()
    }

    /// Those of [`WRITABLE`](Format::WRITABLE), [`HOST_WRITABLE`](Format::HOST_WRITABLE),
    /// [`ACCESSED`](Format::ACCESSED), [`DIRTY`](Format::DIRTY) and
    /// [`WAS_DIRTY`](Format::WAS_DIRTY) that a leaf has. Not of a tracked one.
    #[inline]
    pub(crate) fn marks(self) -> u64 {
        self.0 & Self::MARKS
    }

    /// Whether a leaf that is not tracked has all of these [`marks`](Self::marks).
    #[inline]
    pub(crate) fn has(self, marks: u64) -> bool {
        debug_assert!(self.is_present() && marks & !Self::MARKS == 0);
        self.0 & marks == marks
    }

    /// This leaf, not tracked, with more [`marks`](Self::marks).
    #[inline]
    pub(crate) fn with(self, marks: u64) -> Pte<F> {
        debug_assert!(marks & !Self::MARKS == 0);
        Pte::from_bits(self.0 | marks)
    }

    /// This leaf, not tracked, without these [`marks`](Self::marks).
    #[inline]
    pub(crate) fn without(self, marks: u64) -> Pte<F> {
        debug_assert!(marks & !Self::MARKS == 0);
        Pte::from_bits(self.0 & !marks)
    }

    /// This leaf of `level`, which has no attributes yet, with those of `bits` of one of 4 KiB.
    #[inline]
    pub(super) fn with_attribute_bits(self, bits: u64, level: Level) -> Pte<F> {
        Pte::from_bits(self.0 | F::attribute_bits_at(bits, level))
    }

    /// The attribute bits of a leaf of `level`, tracked or not, as one of 4 KiB has them.
    #[inline]
    pub(crate) fn attribute_bits(self, level: Level) -> u64 {
        if level == Level::L4K && self.is_present() {
            return self.0 & F::ATTRIBUTES;
        }
        F::unpack_attributes(self.packed_attributes(level), Level::L4K)
    }

    /// The attributes of a leaf of `level`, tracked or not, in seven bits.
    #[inline]
    pub(crate) fn packed_attributes(self, level: Level) -> u64 {
        if self.is_present() { F::pack_attributes(format::Pte(self.0), level) } else { self.0 >> ATTRIBUTES_SHIFT }
    }

    /// Whether the guest may do `access`, a fetch, through a leaf that is not tracked.
    #[inline]
    pub(crate) fn may_execute(self, access: Access) -> bool {
        F::may_execute(format::Pte(self.0), access)
    }

    /// This leaf and the one behind it of the same `level`, and so on: their bits differ by this.
    #[inline]
    pub(crate) fn step(level: Level) -> u64 {
        F::address_bits(Hpa(level.size_bytes()))
    }

    /// A leaf of frame 0, not tracked, with the frame `pfn`, which is aligned to `level`.
    #[inline(always)]
    pub(crate) fn with_frame(self, pfn: Pfn, level: Level) -> Pte<F> {
        let pfn = Pfn(pfn.0 & !(level.nr_pages() - 1));
        Pte::from_bits(self.0 | F::address_bits(pfn.hpa()))
    }

    /// The leaf `nr_leaves` leaves of `level` behind this one, not tracked: the same, but for its
    /// frame.
    #[inline]
    pub(crate) fn behind(self, nr_leaves: u64, level: Level) -> Pte<F> {
        Pte::from_bits(self.0.wrapping_add(nr_leaves * Self::step(level)))
    }

    /// Whether the guest may write through a leaf, unless the directory entry above is protected.
    #[inline]
    pub(crate) fn is_writable(self) -> bool {
        self.is_present() && self.has(F::WRITABLE)
    }

    /// Whether the host allows writing the frame of a leaf, tracked or not.
    #[inline]
    pub(crate) fn is_host_writable(self) -> bool {
        let bit = if self.is_present() { F::HOST_WRITABLE } else { TRACKED_HOST_WRITABLE };
        self.0 & bit != 0
    }

    /// The marks of a pinned leaf: one that no operation changes but for rights that the caller
    /// asks for. No other leaf has `WAS_DIRTY` without `HOST_WRITABLE`: what was written could be
    /// written. A and D are set, so that no CPU has to.
    pub(crate) const PINNED: u64 = F::WAS_DIRTY | F::ACCESSED | F::DIRTY;

    /// Whether a leaf, tracked or not, is pinned. (A pinned one is never tracked.)
    #[inline]
    pub(crate) fn is_pinned(self) -> bool {
        self.is_present() && self.0 & (F::WAS_DIRTY | F::HOST_WRITABLE) == F::WAS_DIRTY
    }

    /// Whether the guest has used a leaf since it was installed or last aged. False for a tracked
    /// one.
    #[inline]
    pub(crate) fn is_accessed(self) -> bool {
        self.is_present() && self.0 & F::ACCESSED != 0
    }

    /// Whether the guest has written through a leaf, tracked or not, since it was installed.
    #[inline]
    pub(crate) fn is_dirty(self) -> bool {
        self.0 & if self.is_present() { F::DIRTY | F::WAS_DIRTY } else { TRACKED_DIRTY } != 0
    }

    /// Whether a leaf has A, and for a write D: a CPU that sets neither then does not fault for it.
    #[inline]
    pub(crate) fn is_marked(self, access: Access) -> bool {
        self.marked(access) == self
    }

    /// This leaf with A, and for a write D.
    #[inline]
    pub(crate) fn marked(self, access: Access) -> Pte<F> {
        let dirty = if access == Access::Write { F::DIRTY } else { 0 };
        self.with(F::ACCESSED | dirty)
    }

    /// Whether the guest has written through a leaf since hardware's dirty bit was last cleared for
    /// the log. Not for tracked leaves: where there are any, that bit is not the log's.
    #[inline]
    pub(crate) fn is_dirty_for_log(self) -> bool {
        self.is_present() && self.0 & F::DIRTY != 0
    }

    /// This leaf with hardware's dirty bit clear; [`is_dirty`](Self::is_dirty) stays as it was.
    #[inline]
    pub(crate) fn cleaned_for_log(self) -> Pte<F> {
        let was_dirty = if self.0 & F::DIRTY != 0 { F::WAS_DIRTY } else { 0 };
        self.without(F::DIRTY).with(was_dirty)
    }

    /// The tracked form of this leaf: hardware cannot use it, and it counts as not accessed.
    pub(crate) fn tracked(self, level: Level) -> Pte<F> {
        let host_writable = if self.is_host_writable() { TRACKED_HOST_WRITABLE } else { 0 };
        let dirty = if self.is_dirty() { TRACKED_DIRTY } else { 0 };
        let attributes = self.packed_attributes(level) << ATTRIBUTES_SHIFT;
        let address = hidden_address(F::hpa(self.leaf_address(level)));
        Pte::from_bits(address | TRACKED_BIT | host_writable | dirty | attributes)
    }

    /// The leaf that this leaf is or, if it is tracked, was: then without W, and not accessed.
    #[inline]
    pub(crate) fn untracked(self, level: Level) -> Pte<F> {
        if self.is_present() {
            return self;
        }
        let host_writable = if self.is_host_writable() { F::HOST_WRITABLE } else { 0 };
        let dirty = if self.is_dirty() { F::DIRTY } else { 0 };
        self.unpacked(level).with(host_writable | dirty)
    }

    /// The leaf of `level` with the address and the attributes that this PTE keeps, which is not
    /// present.
    #[inline]
    fn unpacked(self, level: Level) -> Pte<F> {
        let leaf = F::leaf(address_in(self.0).pfn(), level).0;
        Pte::from_bits(leaf | F::unpack_attributes(self.0 >> ATTRIBUTES_SHIFT, level))
    }

    /// The parts of this huge leaf of `level`, by their number: one level lower, with the same
    /// attributes.
    ///
    /// The bits of one and the next always differ by the same number. Formats keep the number of
    /// the frame in adjacent bits (of a tracked leaf: inverted), and a huge leaf is aligned, so no
    /// sum carries into other bits.
    pub(crate) fn parts(self, level: Level) -> impl Fn(usize) -> Pte<F> {
        let (lower, marks) = (level.down(), self.untracked(level).marks());
        let attributes = F::unpack_attributes(self.packed_attributes(level), lower);
        let made = move |index: usize| {
            let pfn = Pfn(self.plain_frame(level).0 + index as u64 * lower.nr_pages());
            let part = Pte::<F>::from_bits(F::leaf(pfn, lower).0 | marks | attributes);
            if self.is_present() { part } else { part.tracked(lower) }
        };
        let first = made(0).bits();
        let step = made(1).bits().wrapping_sub(first);
        move |index| {
            let part = Pte::from_bits(first.wrapping_add(step.wrapping_mul(index as u64)));
            debug_assert_eq!(part, made(index));
            part
        }
    }
}

#[cfg(test)]
#[path = "pte_tests.rs"]
mod tests;
