//! The states of a PTE and the changes between them. Every other protocol relies on this one.
//!
//! # Guarantees
//! - One atomic operation makes each change of a linked PTE. No A or D that hardware sets is lost.
//! - A leaf PTE never becomes a leaf PTE of another frame. The range is invalidated in between.
//! - A CPU that loads speculatively through a PTE that is not present reaches no memory.
//!
//! # Use
//! Read a PTE through [`PteRef`], decode it with [`state`], and change it by an operation of
//! [`PteRef`]. A thread that reads a frozen PTE starts over at the root.
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
//! | leaf, tracked -> empty | zap, once it is reported; fault that replaces a read-only leaf |
//! | table -> table, protected | lazy protection; clears W, moves the generation on in any case |
//! | table, protected -> table | push-down, from the value that it began with; sets W |
//! | table -> empty, fresh number | zap, once all PTEs below are empty |
//! | empty, table -> frozen | the unlinking thread, where a table could be linked; plain exchange |
//! | any -> frozen, keeps what it was | recovery of the page-table page, or its abort |
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
//! A directory entry above leaves of 4 KiB may be *protected*: without W it write-protects all 512
//! leaves, whatever their own W is. The next writer *pushes down* (`second_stage/push_down.rs`). If
//! the entry was protected again meanwhile, that fails, because the generation has moved on
//! (`generation`). In formats without generations (directory entries without rights, or without
//! room) none is protected.
//!
//! A PTE that is not present has the lowest three bits clear, which no format reads as present. Bit
//! 3 says frozen, bit 4 tracked, bit 10 broken. From bit 12 on an empty PTE has the sequence
//! number, and a tracked one its frame, with bits 5 and 6 for what the leaf was. A frozen one has a
//! link of the list of retired page-table pages (`retire`), or its former frame or page-table page,
//! with bits 9, 11 and 52 to 56 for what it was. A broken one has the page-table page, with bit 11
//! if that is to be linked.
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

use crate::addr::{Access, Hpa, Level, Pfn};
use crate::format::{Format, Pte};
#[cfg(shuttle)]
use crate::sync::events::PteKind;
use crate::sync::{AtomicU64, Ordering, record};

const FROZEN_BIT: u64 = 1 << 3;
const TRACKED_BIT: u64 = 1 << 4;
const TRACKED_HOST_WRITABLE: u64 = 1 << 5;
const TRACKED_DIRTY: u64 = 1 << 6;
const BROKEN_BIT: u64 = 1 << 10;
const BROKEN_FOR_SPLIT: u64 = 1 << 11;
// What a frozen PTE was. A link of retired page-table pages has neither of these two bits. None of
// the others is where an AND could hit it that was meant for the leaf.
const FROZEN_LEAF: u64 = 1 << 9;
const FROZEN_TABLE: u64 = 1 << 11;
// In the order of the x86 formats, where the first two are at home, and the other two adjacent.
const FROZEN_HOST_WRITABLE: u64 = 1 << 52;
const FROZEN_WAS_DIRTY: u64 = 1 << 53;
const FROZEN_ACCESSED: u64 = 1 << 54;
const FROZEN_DIRTY: u64 = 1 << 55;
const FROZEN_TRACKED: u64 = 1 << 56;
const PAYLOAD_SHIFT: u32 = 12;
/// Bits 12 to 51: no format may have wider host-physical addresses ([`Format::HPA_BITS`]).
const ADDRESS: u64 = (1 << 52) - (1 << PAYLOAD_SHIFT);
const FROZEN_NOTHING: u64 = FROZEN_BIT | ADDRESS;

/// The bits by which a PTE that is not present keeps `address`; see L1 terminal fault above.
#[inline]
const fn hidden_address(address: Hpa) -> u64 {
    debug_assert!(address.0 & !ADDRESS == 0);
    address.0 ^ ADDRESS
}

#[inline]
const fn address_in(pte: Pte) -> Hpa {
    Hpa(!pte.0 & ADDRESS)
}

/// The bits by which such a PTE keeps `number`, which has 52 bits at most.
#[inline]
const fn hidden_number(number: u64) -> u64 {
    debug_assert!(number < 1 << (u64::BITS - PAYLOAD_SHIFT));
    (number & ADDRESS | number << (u64::BITS - PAYLOAD_SHIFT)) ^ ADDRESS
}

#[inline]
const fn number_in(bits: u64) -> u64 {
    !bits & ADDRESS | bits >> (u64::BITS - PAYLOAD_SHIFT)
}

/// An invalidation sequence number: the value of the counter, which is even, when a range was
/// invalidated. Kept as the complement of the empty PTE that has it, so that a fault, which only
/// compares, decodes next to nothing. (As the PTE itself it would cost more: the compiler then
/// identifies the two, and carries along what it knows of PTEs.)
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidationSeq(u64);

impl PartialOrd for InvalidationSeq {
    fn partial_cmp(&self, other: &InvalidationSeq) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InvalidationSeq {
    fn cmp(&self, other: &InvalidationSeq) -> core::cmp::Ordering {
        self.number().cmp(&other.number())
    }
}

impl core::fmt::Debug for InvalidationSeq {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Stamp({})", self.number())
    }
}

impl InvalidationSeq {
    /// The number of page tables in which nothing was ever invalidated.
    pub(crate) const FIRST: InvalidationSeq = InvalidationSeq(!hidden_number(0));

    /// From the counter: 52 bits, so at one number a microsecond they last 71 years.
    #[inline]
    pub(crate) fn from_number(number: u64) -> InvalidationSeq {
        InvalidationSeq(!hidden_number(number))
    }

    /// The value of the counter, perhaps marked as [`unflushed`](Self::unflushed).
    #[inline]
    pub(crate) fn number(self) -> u64 {
        number_in(!self.0)
    }

    /// Whether no thread has taken a number between `earlier` and this one.
    pub(crate) fn follows(self, earlier: InvalidationSeq) -> bool {
        self.number() == earlier.number() + InvalidationSeq::STEP
    }

    pub(crate) const STEP: u64 = 2;

    /// This number, marked: CPUs may have a translation of another size cached than the next that
    /// is made at the PTE, in a format that does not allow that ([`Format::BREAK_BEFORE_MAKE`]).
    pub(crate) fn unflushed(self) -> InvalidationSeq {
        InvalidationSeq(self.0 & !InvalidationSeq::UNFLUSHED)
    }

    /// This number, once that flush is over.
    #[inline]
    pub(crate) fn flushed(self) -> InvalidationSeq {
        InvalidationSeq(self.0 | InvalidationSeq::UNFLUSHED)
    }

    /// Whether a flush must precede all that is made of a PTE with this number.
    #[inline]
    pub(crate) fn is_unflushed(self) -> bool {
        self.0 & InvalidationSeq::UNFLUSHED == 0
    }

    /// The lowest bit of the number, where a PTE has it; inverted here.
    const UNFLUSHED: u64 = 1 << (u64::BITS - PAYLOAD_SHIFT);
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

#[inline]
pub(crate) fn state<F: Format>(pte: Pte, level: Level) -> State {
    if !F::is_present(pte) {
        // The most frequent state by one test.
        if pte.0 & (FROZEN_BIT | TRACKED_BIT | BROKEN_BIT) == 0 {
            State::Empty(InvalidationSeq(!pte.0))
        } else if pte.0 & FROZEN_BIT != 0 {
            State::Frozen
        } else if pte.0 & BROKEN_BIT != 0 {
            State::Broken
        } else {
            State::Tracked
        }
    } else if F::is_leaf(pte, level) {
        State::Leaf
    } else {
        State::Table
    }
}

/// What the bits `value` of a PTE of `level` say, for the proofs.
#[cfg(shuttle)]
pub fn kind<F: Format>(value: u64, level: u8) -> PteKind {
    let (pte, level) = (Pte(value), Level(level));
    match state::<F>(pte, level) {
        State::Empty(seq) if seq.is_unflushed() => PteKind::Unflushed(seq.flushed().number()),
        State::Empty(seq) => PteKind::Empty(seq.number()),
        State::Leaf | State::Tracked => {
            PteKind::Leaf(frame::<F>(pte, level).0, is_host_writable::<F>(pte), is_writable::<F>(pte))
        }
        State::Table => PteKind::Table(F::address(pte, level).0),
        State::Broken => PteKind::Broken(table_of_broken(pte).0.0),
        State::Frozen => PteKind::Frozen,
    }
}

#[inline]
pub(crate) fn empty(seq: InvalidationSeq) -> Pte {
    Pte(!seq.0)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Breaking {
    /// A page-table page was here, and a huge leaf is to come.
    Recovery,
    /// A huge leaf was here, and a page-table page is to come.
    Split,
}

/// A broken PTE where the page-table page at `table` was, or is to be.
pub(crate) fn broken(table: Hpa, breaking: Breaking) -> Pte {
    let kind = match breaking {
        Breaking::Recovery => 0,
        Breaking::Split => BROKEN_FOR_SPLIT,
    };
    Pte(hidden_address(table) | BROKEN_BIT | kind)
}

pub(crate) fn table_of_broken(pte: Pte) -> (Hpa, Breaking) {
    debug_assert!(pte.0 & BROKEN_BIT != 0);
    let breaking = if pte.0 & BROKEN_FOR_SPLIT == 0 { Breaking::Recovery } else { Breaking::Split };
    (address_in(pte), breaking)
}

/// What a frozen PTE was, if [`PteRef::freeze_as_was`] froze it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frozen {
    /// This leaf, tracked or not, without its right to write.
    Leaf(Pte),
    /// A PTE that pointed to this page-table page.
    Table(Hpa),
    Nothing,
}

/// What the frozen PTE `pte` of `level` was.
pub(crate) fn before_freezing<F: Format>(pte: Pte, level: Level) -> Frozen {
    debug_assert!(pte.0 & FROZEN_BIT != 0);
    let bit = |from: u64, to: u64| if pte.0 & from != 0 { to } else { 0 };
    if pte.0 & FROZEN_LEAF == 0 {
        return if pte.0 & FROZEN_TABLE != 0 { Frozen::Table(address_in(pte)) } else { Frozen::Nothing };
    }
    let attributes = bit(FROZEN_HOST_WRITABLE, F::HOST_WRITABLE)
        | bit(FROZEN_DIRTY, F::DIRTY)
        | bit(FROZEN_ACCESSED, F::ACCESSED)
        | bit(FROZEN_WAS_DIRTY, F::WAS_DIRTY);
    let leaf = Pte(F::leaf(address_in(pte).pfn(), level).0 | attributes);
    Frozen::Leaf(if pte.0 & FROZEN_TRACKED != 0 { tracked::<F>(leaf, level) } else { leaf })
}

/// The frame of the leaf, tracked or not, that the frozen PTE `pte` was; `None` if it was none.
#[inline]
pub(crate) fn frame_before_freezing(pte: Pte) -> Option<Pfn> {
    debug_assert!(pte.0 & FROZEN_BIT != 0);
    (pte.0 & FROZEN_LEAF != 0).then(|| address_in(pte).pfn())
}

/// The attributes of many leaves, tracked or not, before they were frozen.
#[derive(Clone, Copy)]
pub(crate) struct FrozenLeaves {
    any: u64,
    all: u64,
}

impl FrozenLeaves {
    pub(crate) fn new() -> FrozenLeaves {
        FrozenLeaves { any: 0, all: u64::MAX }
    }

    #[inline]
    pub(crate) fn add(&mut self, frozen: Pte) {
        self.any |= frozen.0;
        self.all &= frozen.0;
    }

    /// Whether the host allows writing; `None` if only for some.
    pub(crate) fn are_host_writable(self) -> Option<bool> {
        let (any, all) = (self.any & FROZEN_HOST_WRITABLE != 0, self.all & FROZEN_HOST_WRITABLE != 0);
        (any == all).then_some(all)
    }

    pub(crate) fn is_any_accessed(self) -> bool {
        self.any & FROZEN_ACCESSED != 0
    }

    pub(crate) fn is_any_dirty(self) -> bool {
        self.any & (FROZEN_DIRTY | FROZEN_WAS_DIRTY) != 0
    }

    pub(crate) fn are_all_tracked(self) -> bool {
        self.all & FROZEN_TRACKED != 0
    }
}

/// The PTE `value` of `level` frozen, so that [`before_freezing`] returns what it was.
#[inline]
fn frozen_as_was<F: Format>(value: Pte, level: Level) -> Pte {
    Pte(match state::<F>(value, level) {
        found @ (State::Leaf | State::Tracked) => {
            let leaf = untracked::<F>(value, level);
            let bit = |from: u64, to: u64| if leaf.0 & from != 0 { to } else { 0 };
            hidden_address(frame::<F>(leaf, level).hpa())
                | FROZEN_BIT
                | FROZEN_LEAF
                | bit(F::HOST_WRITABLE, FROZEN_HOST_WRITABLE)
                | bit(F::DIRTY, FROZEN_DIRTY)
                | bit(F::ACCESSED, FROZEN_ACCESSED)
                | bit(F::WAS_DIRTY, FROZEN_WAS_DIRTY)
                | if found == State::Tracked { FROZEN_TRACKED } else { 0 }
        }
        State::Table => hidden_address(F::address(value, level)) | FROZEN_TABLE | FROZEN_BIT,
        State::Empty(_) | State::Broken | State::Frozen => FROZEN_NOTHING,
    })
}

/// A frozen PTE that carries `next`, a page-aligned address.
#[inline]
pub(crate) fn frozen_link(next: Hpa) -> Pte {
    debug_assert!(next.0 & ((1 << PAYLOAD_SHIFT) - 1) == 0);
    // With the bits that it may have above bit 51: the end of a list is no address.
    Pte(next.0 ^ ADDRESS | FROZEN_BIT)
}

/// A frozen PTE that carries the number `payload` (below 2^52).
#[inline]
pub(crate) fn frozen_number(payload: u64) -> Pte {
    Pte(hidden_number(payload) | FROZEN_BIT)
}

pub(crate) fn link_of(pte: Pte) -> Hpa {
    debug_assert!(pte.0 & FROZEN_BIT != 0);
    Hpa((pte.0 ^ ADDRESS) & !((1 << PAYLOAD_SHIFT) - 1))
}

pub(crate) fn number_of(pte: Pte) -> u64 {
    debug_assert!(pte.0 & FROZEN_BIT != 0);
    number_in(pte.0)
}

/// Whether directory entries of the format can be protected: it has W there, and generations.
#[inline]
pub(crate) const fn can_be_protected<F: Format>() -> bool {
    F::GENERATION != 0
}

/// Whether a directory entry write-protects all leaves below.
#[inline]
pub(crate) fn is_protected<F: Format>(table: Pte) -> bool {
    can_be_protected::<F>() && table.0 & F::WRITABLE == 0
}

/// The directory entry `table` protected, whether it was before or not: of the next generation.
#[inline]
pub(crate) fn protected<F: Format>(table: Pte) -> Pte {
    let one = F::GENERATION & F::GENERATION.wrapping_neg();
    let generation = table.0.wrapping_add(one) & F::GENERATION;
    Pte(table.0 & !(F::GENERATION | F::WRITABLE) | generation)
}

/// The protected directory entry `table` with W again.
#[inline]
pub(crate) fn unprotected<F: Format>(table: Pte) -> Pte {
    Pte(table.0 | F::WRITABLE)
}

/// Whether the guest may write through a leaf, unless the directory entry above is protected.
#[inline]
pub(crate) fn is_writable<F: Format>(leaf: Pte) -> bool {
    F::is_present(leaf) && leaf.0 & F::WRITABLE == F::WRITABLE
}

/// Whether the host allows writing the frame of a leaf, tracked or not.
#[inline]
pub(crate) fn is_host_writable<F: Format>(leaf: Pte) -> bool {
    let bit = if F::is_present(leaf) { F::HOST_WRITABLE } else { TRACKED_HOST_WRITABLE };
    leaf.0 & bit != 0
}

/// Whether the guest has used a leaf since it was installed or last aged. False for a tracked one.
pub(crate) fn is_accessed<F: Format>(leaf: Pte) -> bool {
    F::is_present(leaf) && leaf.0 & F::ACCESSED != 0
}

/// Whether the guest has written through a leaf, tracked or not, since it was installed.
pub(crate) fn is_dirty<F: Format>(leaf: Pte) -> bool {
    leaf.0 & if F::is_present(leaf) { F::DIRTY | F::WAS_DIRTY } else { TRACKED_DIRTY } != 0
}

/// Whether `leaf` has A, and for a write D: a CPU that sets neither then does not fault for it.
#[inline]
pub(crate) fn is_marked<F: Format>(leaf: Pte, access: Access) -> bool {
    marked::<F>(leaf, access) == leaf
}

/// `leaf` with A, and for a write D.
#[inline]
pub(crate) fn marked<F: Format>(leaf: Pte, access: Access) -> Pte {
    let dirty = if access == Access::Write { F::DIRTY } else { 0 };
    Pte(leaf.0 | F::ACCESSED | dirty)
}

/// Whether the guest has written through a leaf since hardware's dirty bit was last cleared for the
/// log. Not for tracked leaves: where there are any, that bit is not the log's.
#[inline]
pub(crate) fn is_dirty_for_log<F: Format>(leaf: Pte) -> bool {
    F::is_present(leaf) && leaf.0 & F::DIRTY != 0
}

/// `leaf` with hardware's dirty bit clear; [`is_dirty`] stays as it was.
#[inline]
pub(crate) fn cleaned_for_log<F: Format>(leaf: Pte) -> Pte {
    let was_dirty = if leaf.0 & F::DIRTY != 0 { F::WAS_DIRTY } else { 0 };
    Pte(leaf.0 & !F::DIRTY | was_dirty)
}

/// The frame of a leaf, tracked or not.
#[inline]
pub(crate) fn frame<F: Format>(leaf: Pte, level: Level) -> Pfn {
    if F::is_present(leaf) { F::address(leaf, level).pfn() } else { address_in(leaf).pfn() }
}

/// The bits of a leaf that belong to software and to hardware's use of it. A split copies them.
fn attributes<F: Format>(leaf: Pte) -> u64 {
    leaf.0 & (F::WRITABLE | F::HOST_WRITABLE | F::ACCESSED | F::DIRTY | F::WAS_DIRTY)
}

/// The tracked form of `leaf`: hardware cannot use it, and it counts as not accessed.
pub(crate) fn tracked<F: Format>(leaf: Pte, level: Level) -> Pte {
    let host_writable = if is_host_writable::<F>(leaf) { TRACKED_HOST_WRITABLE } else { 0 };
    let dirty = if is_dirty::<F>(leaf) { TRACKED_DIRTY } else { 0 };
    Pte(hidden_address(frame::<F>(leaf, level).hpa()) | TRACKED_BIT | host_writable | dirty)
}

/// The leaf that `leaf` is or, if it is tracked, was: then without W, and not accessed.
#[inline]
pub(crate) fn untracked<F: Format>(leaf: Pte, level: Level) -> Pte {
    if F::is_present(leaf) {
        return leaf;
    }
    let host_writable = if is_host_writable::<F>(leaf) { F::HOST_WRITABLE } else { 0 };
    let dirty = if is_dirty::<F>(leaf) { F::DIRTY } else { 0 };
    Pte(F::leaf(frame::<F>(leaf, level), level).0 | host_writable | dirty)
}

/// Part `index` of the huge leaf `huge` of `level`, one level lower, with the same attributes.
pub(crate) fn part_of_huge<F: Format>(huge: Pte, level: Level, index: usize) -> Pte {
    let pfn = Pfn(frame::<F>(huge, level).0 + index as u64 * level.down().nr_pages());
    let part = Pte(F::leaf(pfn, level.down()).0 | attributes::<F>(untracked::<F>(huge, level)));
    if F::is_present(huge) { part } else { tracked::<F>(part, level.down()) }
}

/// A PTE in a page-table page that is linked or was: the only way to change one.
#[derive(Clone, Copy)]
pub(crate) struct PteRef<'s> {
    cell: &'s AtomicU64,
    level: Level,
}

impl<'s> PteRef<'s> {
    #[inline]
    pub(crate) fn new(cell: &'s AtomicU64, level: Level) -> PteRef<'s> {
        PteRef { cell, level }
    }

    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// Its address, for [`record!`].
    #[cfg(shuttle)]
    fn address(&self) -> u64 {
        core::ptr::from_ref(self.cell).addr() as u64
    }

    /// Acquire: pairs with the release of the thread that linked the page-table page or the leaf,
    /// so that a page-table page is observed filled. It also orders this read before the reads of
    /// the state that the answer depends on (see `invalidation_seq`).
    #[inline]
    pub(crate) fn load(&self) -> Pte {
        let value = self.cell.load(Ordering::Acquire);
        record!(PteRead { cell: self.address(), level: self.level.0, value });
        Pte(value)
    }

    /// Replaces `old` by `new`, if `old` is still there; else returns what is there. SeqCst:
    /// release, so that a walk observes the PTEs of a new page-table page; acquire, as for `load`;
    /// and total order with the accesses of the memslot set and of the dirty bitmap that pair with
    /// it (see `fence_after_rmw` at the callers).
    #[inline]
    pub(crate) fn compare_exchange<F: Format>(&self, old: Pte, new: Pte) -> Result<(), Pte> {
        #[cfg(debug_assertions)]
        self.assert_transition::<F>(old, new);
        match self.cell.compare_exchange(old.0, new.0, Ordering::SeqCst, Ordering::Acquire) {
            Ok(_) => {
                record!(PteReplaced { cell: self.address(), level: self.level.0, old: old.0, new: new.0 });
                Ok(())
            }
            Err(found) => Err(Pte(found)),
        }
    }

    /// Clears `bits` of a PTE of the lowest level with one AND, and returns what it was before. The
    /// PTE may be no leaf by now: in all that it can be then, W and A are clear. (A is cleared so
    /// only where no leaf is ever tracked.)
    #[inline]
    pub(crate) fn clear<F: Format>(&self, bits: u64) -> Pte {
        const {
            // Bit 10 says broken, but not at the lowest level: Arm's A may be there.
            let never = TRACKED_BIT | FROZEN_BIT | FROZEN_LEAF | FROZEN_TABLE | u64::MAX << PAYLOAD_SHIFT;
            assert!((F::WRITABLE | F::ACCESSED) & never == 0);
            assert!(F::WRITABLE & (TRACKED_HOST_WRITABLE | TRACKED_DIRTY) == 0);
        }
        debug_assert!(self.level == Level::L4K, "an AND above the lowest level could hit a directory entry");
        debug_assert!(bits & !(F::WRITABLE | F::ACCESSED) == 0, "not for {bits:#x}");
        // SeqCst: stands in the store-load pairs of the dirty log.
        let old = self.cell.fetch_and(!bits, Ordering::SeqCst);
        record!(PteReplaced { cell: self.address(), level: self.level.0, old, new: old & !bits });
        Pte(old)
    }

    /// Freezes a PTE of a page-table page that the caller has unlinked; returns what it was before.
    #[inline]
    pub(crate) fn freeze(&self) -> Pte {
        // AcqRel: observes what the PTE pointed to as its writer left it.
        let old = self.cell.swap(FROZEN_NOTHING, Ordering::AcqRel);
        record!(PteReplaced { cell: self.address(), level: self.level.0, old, new: FROZEN_NOTHING });
        Pte(old)
    }

    /// Freezes `value`, which keeps what it was, and returns that; `Err` is what is there instead.
    #[inline]
    pub(crate) fn freeze_as_was<F: Format>(&self, value: Pte) -> Result<Pte, Pte> {
        // AcqRel, Acquire: as for `freeze`, also for a thread that finds it frozen.
        let frozen = frozen_as_was::<F>(value, self.level);
        match self.cell.compare_exchange(value.0, frozen.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                record!(PteReplaced { cell: self.address(), level: self.level.0, old: value.0, new: frozen.0 });
                Ok(frozen)
            }
            Err(found) => Err(Pte(found)),
        }
    }

    #[cfg(debug_assertions)]
    fn assert_transition<F: Format>(&self, old: Pte, new: Pte) {
        let level = self.level;
        let allowed = match (state::<F>(old, level), state::<F>(new, level)) {
            (State::Empty(_), State::Leaf | State::Table) => true,
            (State::Empty(before), State::Empty(after)) => before < after,
            (State::Leaf, State::Leaf | State::Tracked) | (State::Tracked, State::Leaf) => {
                frame::<F>(old, level) == frame::<F>(new, level)
                    && is_host_writable::<F>(old) == is_host_writable::<F>(new)
                    && (is_dirty::<F>(new) || !is_dirty::<F>(old))
            }
            (State::Leaf | State::Tracked, State::Table) => level > Level::L4K,
            (State::Table, State::Table) => {
                level == Level::L2M
                    && can_be_protected::<F>()
                    && (new == protected::<F>(old) || (is_protected::<F>(old) && new == unprotected::<F>(old)))
            }
            (State::Leaf | State::Tracked | State::Table | State::Broken, State::Empty(_)) => true,
            (State::Table, State::Broken) => table_of_broken(new) == (F::address(old, level), Breaking::Recovery),
            (State::Leaf | State::Tracked, State::Broken) => {
                F::BREAK_BEFORE_MAKE && level > Level::L4K && table_of_broken(new).1 == Breaking::Split
            }
            (State::Broken, State::Leaf | State::Tracked) => table_of_broken(old).1 == Breaking::Recovery,
            (State::Broken, State::Table) => table_of_broken(old) == (F::address(new, level), Breaking::Split),
            _ => false,
        };
        assert!(allowed, "forbidden change of a PTE of level {}: {old:?} to {new:?}", level.0);
        let is_leaf = state::<F>(new, level) == State::Leaf;
        assert!(
            !is_leaf || !is_writable::<F>(new) || is_host_writable::<F>(new),
            "writable leaf that the host does not allow to write: {new:?}"
        );
    }
}

#[cfg(test)]
#[path = "pte_tests.rs"]
mod tests;
