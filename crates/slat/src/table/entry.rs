//! States of an entry, and who may change what into what. This is the protocol that all else relies on.
//!
//! | state | present for hardware | means |
//! |---|---|---|
//! | *empty(stamp)* | no | nothing is mapped; the stamp says when a fault may have looked to still install here |
//! | *leaf* | yes | maps memory |
//! | *tracked* | no | a leaf whose next access is to be seen: it maps memory, but hardware faults on it |
//! | *table* | yes | points to the table below |
//! | *broken* | no | for now: somebody is between a table and a huge leaf, and the table that was or is to be here is named |
//! | *frozen* | no | the table that this entry is in was unlinked or is broken; final |
//!
//! | from -> to | who | how |
//! |---|---|---|
//! | empty -> leaf, table | fault, prefault | compare-and-exchange on the very value read, if its stamp is the one that was seen; the entries of a new table inherit the stamp of the entry that it hangs on |
//! | empty -> empty, greater stamp | zap | compare-and-exchange; an unflushed entry that is covered in part has been flushed since it was read |
//! | leaf -> leaf, same frame | fault (gives W back; sets A and D for a CPU that does not), protect, age | compare-and-exchange; a single AND at the lowest level, to clear only; never an OR |
//! | leaf -> tracked, same frame | age, where there is no A bit | compare-and-exchange; W is dropped, D is kept |
//! | tracked -> leaf, same frame | fault | compare-and-exchange |
//! | leaf, tracked -> table | split | compare-and-exchange; permissions, A and D are copied exactly, so no flush is owed. By way of broken, with a flush, where the format says so |
//! | table -> broken -> leaf | recover | compare-and-exchange; between the two all entries below are frozen, and A and D gathered |
//! | broken -> empty, with a stamp of its own | who meets it, but not who only protects, splits, ages or asks | compare-and-exchange, once all that was there has been reported: the owner's then fails, and nobody waits |
//! | leaf, tracked -> empty | zap; a fault that replaces a read-only leaf | compare-and-exchange from the value read, which the zap has reported to the host |
//! | table -> table, closed | protect (lazily) | compare-and-exchange; W is cleared, and the generation moves on even if it was clear |
//! | table, closed -> table | fault that pushes down | compare-and-exchange from the value that it began with; W is set |
//! | table -> empty | zap | compare-and-exchange from the value read, with a stamp of its own, once all entries below are empty; then those on which a table could still be hung are frozen |
//! | empty, table -> frozen | who unlinked the table | exchange |
//! | anything -> frozen, which says what it was | who recovers the table, or cancels that | compare-and-exchange |
//! | leaf A -> leaf B, another frame | nobody | the range is taken away first |
//!
//! Whoever meets a frozen entry starts over at the root. Hardware may set A and D of a linked leaf at any time; that is
//! why nothing but a compare-and-exchange (or the one AND) ever changes a linked entry. A leaf that is writable for the
//! guest has both `F::WRITABLE` and `F::HOST_WRITABLE`; a leaf with `HOST_WRITABLE` alone is write-protected for
//! logging, and whoever finds the page's slot may give W back without asking the host; a leaf with neither needs the
//! host's word, and with that it is taken away and installed anew (an exchange of the one leaf for the other could not
//! tell that the slot was replaced meanwhile by one over the same frames that may not be written).
//!
//! A table entry above leaves of 4 KiB may be *closed*: without W it protects all 512 leaves at once, and what their own W
//! says does not count. The next writer *pushes down* (`second_stage/push_down.rs`). Each closing moves the entry's
//! generation on, so that a push-down that began before it fails; `generation` keeps generations from coming back. In formats
//! without generations (table entries that have no rights, or no room) none is ever closed.
//!
//! Non-present entries have the lowest three bits clear, which no format reads as present. Bit 3 says frozen, bit 4
//! tracked, bit 10 broken. The rest from bit 12 on is a stamp (empty), a link of the list of retired tables (frozen, see
//! `retire`), the frame or table that it had (frozen, with bits 9, 11 and 52 to 56 for what it was), the frame (tracked, with bits 5
//! and 6 for what the leaf was), or the table (broken, with bit 11 if that is to be linked and not to be taken away). CPUs may
//! still have a tracked leaf cached, as it was before: that only hides accesses until the translation is replaced, and
//! whoever takes the leaf away flushes.
//!
//! # L1 terminal fault
//! A CPU may load from the address in an entry that is not present, ahead of the fault, if the L1 data cache has that address; and
//! the guest may find out what was there (Intel, "Deep Dive: Intel Analysis of L1 Terminal Fault", CVE-2018-3646). So no entry that
//! is not present has an address in bits 12 to 51 at which there is memory: what stands there (an address, a number) is inverted.
//! An address below half of what the CPU's cache tells apart (2^43 on the CPUs concerned, if not more) is then above it. Numbers
//! have their lowest 12 bits in bits 52 to 63, so that the rest stays small: stamps below 2^43 are out of reach, which last 14
//! years at 10000 changes a second. A host with memory beyond that half keeps guests apart from it by other means (flushes
//! of the L1 data cache at entry), as such a host has to anyway.

use crate::addr::{Access, Hpa, Level, Pfn};
use crate::format::{Entry, Format};
use crate::sync::{AtomicU64, Ordering};

const FROZEN_BIT: u64 = 1 << 3;
const TRACKED_BIT: u64 = 1 << 4;
const TRACKED_HOST_WRITABLE: u64 = 1 << 5;
const TRACKED_DIRTY: u64 = 1 << 6;
const BROKEN_BIT: u64 = 1 << 10;
const BROKEN_FOR_SPLIT: u64 = 1 << 11;
// What a frozen entry was. A link of retired tables has neither of these two bits; and none of the rest is where an AND could
// hit it that was meant for the leaf.
const FROZEN_LEAF: u64 = 1 << 9;
const FROZEN_TABLE: u64 = 1 << 11;
const FROZEN_HOST_WRITABLE: u64 = 1 << 52;
const FROZEN_DIRTY: u64 = 1 << 53;
const FROZEN_ACCESSED: u64 = 1 << 54;
const FROZEN_WAS_DIRTY: u64 = 1 << 55;
const FROZEN_TRACKED: u64 = 1 << 56;
const PAYLOAD_SHIFT: u32 = 12;
/// Bits 12 to 51: no format may have wider host-physical addresses ([`Format::HPA_BITS`]).
const ADDRESS: u64 = (1 << 52) - (1 << PAYLOAD_SHIFT);
/// Frozen, and it was nothing.
const FROZEN_NOTHING: u64 = FROZEN_BIT | ADDRESS;

/// The bits by which an entry that is not present keeps `address`; see the module on L1 terminal faults.
#[inline]
const fn hidden_address(address: Hpa) -> u64 {
    debug_assert!(address.0 & !ADDRESS == 0);
    address.0 ^ ADDRESS
}

/// The address that such an entry keeps.
#[inline]
const fn address_in(entry: Entry) -> Hpa {
    Hpa(!entry.0 & ADDRESS)
}

/// The bits by which it keeps `number`, which has 52 bits at most.
#[inline]
const fn hidden_number(number: u64) -> u64 {
    debug_assert!(number < 1 << (u64::BITS - PAYLOAD_SHIFT));
    (number & ADDRESS | number << (u64::BITS - PAYLOAD_SHIFT)) ^ ADDRESS
}

/// The number in such bits.
#[inline]
const fn number_in(bits: u64) -> u64 {
    !bits & ADDRESS | bits >> (u64::BITS - PAYLOAD_SHIFT)
}

/// A moment in the life of the VM's tables: the value of the stamp counter when a range was taken away. Those of the counter
/// are even. It is kept as the complement of the empty entry that has it, so that a fault, which only compares, has next to
/// nothing to decode. (As the entry itself it would cost more: the compiler then takes the two for one, and carries along
/// what it knows of entries.)
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp(u64);

impl PartialOrd for Stamp {
    fn partial_cmp(&self, other: &Stamp) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Stamp {
    fn cmp(&self, other: &Stamp) -> core::cmp::Ordering {
        self.number().cmp(&other.number())
    }
}

impl core::fmt::Debug for Stamp {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Stamp({})", self.number())
    }
}

impl Stamp {
    /// The stamp of tables that nothing was ever taken from.
    pub(crate) const FIRST: Stamp = Stamp(!hidden_number(0));

    /// The stamp that the counter says `number` for: 52 bits, so at one stamp a microsecond they last 71 years.
    #[inline]
    pub(crate) fn from_number(number: u64) -> Stamp {
        Stamp(!hidden_number(number))
    }

    /// What the counter said, perhaps with the mark of [`unflushed`](Stamp::unflushed).
    #[inline]
    pub(crate) fn number(self) -> u64 {
        number_in(!self.0)
    }

    /// Whether nobody has taken a stamp between `earlier` and this one.
    pub(crate) fn follows(self, earlier: Stamp) -> bool {
        self.number() == earlier.number() + Stamp::STEP
    }

    /// From one stamp of the counter to the next.
    pub(crate) const STEP: u64 = 2;

    /// This stamp, of an entry at which CPUs may have a translation cached of another size than the next that is made there,
    /// in a format that does not allow that ([`Format::BREAK_BEFORE_MAKE`]).
    pub(crate) fn unflushed(self) -> Stamp {
        Stamp(self.0 & !Stamp::UNFLUSHED)
    }

    /// This stamp, once that flush is over.
    #[inline]
    pub(crate) fn flushed(self) -> Stamp {
        Stamp(self.0 | Stamp::UNFLUSHED)
    }

    /// Whether a flush must come before anything is made of an entry with this stamp.
    #[inline]
    pub(crate) fn is_unflushed(self) -> bool {
        self.0 & Stamp::UNFLUSHED == 0
    }

    /// The lowest bit of the number, where an entry has it; inverted here.
    const UNFLUSHED: u64 = 1 << (u64::BITS - PAYLOAD_SHIFT);
}

/// What an entry is; see the module's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Empty(Stamp),
    Leaf,
    Tracked,
    Table,
    Broken,
    Frozen,
}

#[inline]
pub(crate) fn state<F: Format>(entry: Entry, level: Level) -> State {
    if !F::is_present(entry) {
        // The most frequent one by one test.
        if entry.0 & (FROZEN_BIT | TRACKED_BIT | BROKEN_BIT) == 0 {
            State::Empty(Stamp(!entry.0))
        } else if entry.0 & FROZEN_BIT != 0 {
            State::Frozen
        } else if entry.0 & BROKEN_BIT != 0 {
            State::Broken
        } else {
            State::Tracked
        }
    } else if F::is_leaf(entry, level) {
        State::Leaf
    } else {
        State::Table
    }
}

#[inline]
pub(crate) fn empty(stamp: Stamp) -> Entry {
    Entry(!stamp.0)
}

/// Why an entry is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Breaking {
    /// A table was here, and a huge leaf is to come.
    Recovery,
    /// A huge leaf was here, and a table is to come.
    Split,
}

/// A broken entry where the table at `table` was, or is to be.
pub(crate) fn broken(table: Hpa, breaking: Breaking) -> Entry {
    let kind = match breaking {
        Breaking::Recovery => 0,
        Breaking::Split => BROKEN_FOR_SPLIT,
    };
    Entry(hidden_address(table) | BROKEN_BIT | kind)
}

/// What [`broken`] was made with.
pub(crate) fn table_of_broken(entry: Entry) -> (Hpa, Breaking) {
    debug_assert!(entry.0 & BROKEN_BIT != 0);
    let breaking = if entry.0 & BROKEN_FOR_SPLIT == 0 { Breaking::Recovery } else { Breaking::Split };
    (address_in(entry), breaking)
}

/// What a frozen entry was, if it was frozen by [`EntryRef::freeze_as_was`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frozen {
    /// This leaf, tracked or not; but for its right to write.
    Leaf(Entry),
    /// An entry that pointed to this table.
    Table(Hpa),
    Nothing,
}

/// What the frozen entry `entry` of `level` was.
pub(crate) fn before_freezing<F: Format>(entry: Entry, level: Level) -> Frozen {
    debug_assert!(entry.0 & FROZEN_BIT != 0);
    let bit = |from: u64, to: u64| if entry.0 & from != 0 { to } else { 0 };
    if entry.0 & FROZEN_LEAF == 0 {
        return if entry.0 & FROZEN_TABLE != 0 { Frozen::Table(address_in(entry)) } else { Frozen::Nothing };
    }
    let attributes = bit(FROZEN_HOST_WRITABLE, F::HOST_WRITABLE)
        | bit(FROZEN_DIRTY, F::DIRTY)
        | bit(FROZEN_ACCESSED, F::ACCESSED)
        | bit(FROZEN_WAS_DIRTY, F::WAS_DIRTY);
    let leaf = Entry(F::leaf(address_in(entry).pfn(), level).0 | attributes);
    Frozen::Leaf(if entry.0 & FROZEN_TRACKED != 0 { tracked::<F>(leaf, level) } else { leaf })
}

/// The frame of the leaf, tracked or not, that the frozen entry `entry` was; `None` if it was none.
#[inline]
pub(crate) fn frame_before_freezing(entry: Entry) -> Option<Pfn> {
    debug_assert!(entry.0 & FROZEN_BIT != 0);
    (entry.0 & FROZEN_LEAF != 0).then(|| address_in(entry).pfn())
}

/// What leaves, tracked or not, said together before they were frozen.
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
    pub(crate) fn add(&mut self, frozen: Entry) {
        self.any |= frozen.0;
        self.all &= frozen.0;
    }

    /// Whether the host allows writing; `None` if only of some.
    pub(crate) fn are_host_writable(self) -> Option<bool> {
        let (any, all) = (self.any & FROZEN_HOST_WRITABLE != 0, self.all & FROZEN_HOST_WRITABLE != 0);
        (any == all).then_some(all)
    }

    /// As [`is_accessed`], of any.
    pub(crate) fn is_any_accessed(self) -> bool {
        self.any & FROZEN_ACCESSED != 0
    }

    /// As [`is_dirty`], of any.
    pub(crate) fn is_any_dirty(self) -> bool {
        self.any & (FROZEN_DIRTY | FROZEN_WAS_DIRTY) != 0
    }

    pub(crate) fn are_all_tracked(self) -> bool {
        self.all & FROZEN_TRACKED != 0
    }
}

/// The entry `value` of `level` frozen, so that [`before_freezing`] tells what it was.
#[inline]
fn frozen_as_was<F: Format>(value: Entry, level: Level) -> Entry {
    Entry(match state::<F>(value, level) {
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

/// A frozen entry that carries `next`, a page-aligned address.
#[inline]
pub(crate) fn frozen_link(next: Hpa) -> Entry {
    debug_assert!(next.0 & ((1 << PAYLOAD_SHIFT) - 1) == 0);
    // With what it may have above bit 51: the end of a list is no address.
    Entry(next.0 ^ ADDRESS | FROZEN_BIT)
}

/// A frozen entry that carries the number `payload` (below 2^52).
#[inline]
pub(crate) fn frozen_number(payload: u64) -> Entry {
    Entry(hidden_number(payload) | FROZEN_BIT)
}

/// The link in a [`frozen_link`].
pub(crate) fn link_of(entry: Entry) -> Hpa {
    debug_assert!(entry.0 & FROZEN_BIT != 0);
    Hpa((entry.0 ^ ADDRESS) & !((1 << PAYLOAD_SHIFT) - 1))
}

/// The number in a [`frozen_number`].
pub(crate) fn number_of(entry: Entry) -> u64 {
    debug_assert!(entry.0 & FROZEN_BIT != 0);
    number_in(entry.0)
}

/// Whether table entries of the format can be closed: they have a right to write, and generations.
#[inline]
pub(crate) const fn can_be_closed<F: Format>() -> bool {
    F::GENERATION != 0
}

/// Whether a table entry takes the right to write from all leaves below.
#[inline]
pub(crate) fn is_closed<F: Format>(table: Entry) -> bool {
    can_be_closed::<F>() && table.0 & F::WRITABLE == 0
}

/// The table entry `table` closed, whether it was before or not: of the next generation.
#[inline]
pub(crate) fn closed<F: Format>(table: Entry) -> Entry {
    let one = F::GENERATION & F::GENERATION.wrapping_neg();
    let generation = table.0.wrapping_add(one) & F::GENERATION;
    Entry(table.0 & !(F::GENERATION | F::WRITABLE) | generation)
}

/// The closed table entry `table` opened.
#[inline]
pub(crate) fn opened<F: Format>(table: Entry) -> Entry {
    Entry(table.0 | F::WRITABLE)
}

/// Whether the guest may write through a leaf, if the entry above is not closed. Never, through a tracked one.
#[inline]
pub(crate) fn is_writable<F: Format>(leaf: Entry) -> bool {
    F::is_present(leaf) && leaf.0 & F::WRITABLE == F::WRITABLE
}

/// Whether the host allows writing the frame of a leaf, tracked or not.
#[inline]
pub(crate) fn is_host_writable<F: Format>(leaf: Entry) -> bool {
    let bit = if F::is_present(leaf) { F::HOST_WRITABLE } else { TRACKED_HOST_WRITABLE };
    leaf.0 & bit != 0
}

/// Whether the guest has used a leaf since it was installed or last aged. (A tracked one: certainly not.)
pub(crate) fn is_accessed<F: Format>(leaf: Entry) -> bool {
    F::is_present(leaf) && leaf.0 & F::ACCESSED != 0
}

/// Whether the guest has written through a leaf, tracked or not, since it was installed.
pub(crate) fn is_dirty<F: Format>(leaf: Entry) -> bool {
    leaf.0 & if F::is_present(leaf) { F::DIRTY | F::WAS_DIRTY } else { TRACKED_DIRTY } != 0
}

/// Whether `leaf` has A, and for a write D: then a CPU that does not set them does not fault for them.
#[inline]
pub(crate) fn is_marked<F: Format>(leaf: Entry, access: Access) -> bool {
    marked::<F>(leaf, access) == leaf
}

/// `leaf` with A, and for a write D.
#[inline]
pub(crate) fn marked<F: Format>(leaf: Entry, access: Access) -> Entry {
    let dirty = if access == Access::Write { F::DIRTY } else { 0 };
    Entry(leaf.0 | F::ACCESSED | dirty)
}

/// Whether the guest has written through a leaf since hardware's dirty bit was last cleared for the log. Not asked of
/// tracked leaves: where there are any, that bit is not the log's.
#[inline]
pub(crate) fn is_dirty_for_log<F: Format>(leaf: Entry) -> bool {
    F::is_present(leaf) && leaf.0 & F::DIRTY != 0
}

/// `leaf` with hardware's dirty bit clear; it still says that it was written.
#[inline]
pub(crate) fn cleaned_for_log<F: Format>(leaf: Entry) -> Entry {
    let was_dirty = if leaf.0 & F::DIRTY != 0 { F::WAS_DIRTY } else { 0 };
    Entry(leaf.0 & !F::DIRTY | was_dirty)
}

/// The frame of a leaf, tracked or not.
#[inline]
pub(crate) fn frame<F: Format>(leaf: Entry, level: Level) -> Pfn {
    if F::is_present(leaf) { F::address(leaf, level).pfn() } else { address_in(leaf).pfn() }
}

/// The bits of a leaf that belong to software and to hardware's use of it, and are copied when it is split.
fn attributes<F: Format>(leaf: Entry) -> u64 {
    leaf.0 & (F::WRITABLE | F::HOST_WRITABLE | F::ACCESSED | F::DIRTY | F::WAS_DIRTY)
}

/// The tracked form of `leaf`: not to be used by hardware, and not accessed since.
pub(crate) fn tracked<F: Format>(leaf: Entry, level: Level) -> Entry {
    let host_writable = if is_host_writable::<F>(leaf) { TRACKED_HOST_WRITABLE } else { 0 };
    let dirty = if is_dirty::<F>(leaf) { TRACKED_DIRTY } else { 0 };
    Entry(hidden_address(frame::<F>(leaf, level).hpa()) | TRACKED_BIT | host_writable | dirty)
}

/// The leaf that `leaf` is or, if it is tracked, was: then without the right to write, and not accessed.
#[inline]
pub(crate) fn untracked<F: Format>(leaf: Entry, level: Level) -> Entry {
    if F::is_present(leaf) {
        return leaf;
    }
    let host_writable = if is_host_writable::<F>(leaf) { F::HOST_WRITABLE } else { 0 };
    let dirty = if is_dirty::<F>(leaf) { F::DIRTY } else { 0 };
    Entry(F::leaf(frame::<F>(leaf, level), level).0 | host_writable | dirty)
}

/// The leaf for part number `index` of the huge leaf `huge` of `level`, one level lower, with the same attributes; tracked
/// if that is.
pub(crate) fn part_of_huge<F: Format>(huge: Entry, level: Level, index: usize) -> Entry {
    let pfn = Pfn(frame::<F>(huge, level).0 + index as u64 * level.down().nr_pages());
    let part = Entry(F::leaf(pfn, level.down()).0 | attributes::<F>(untracked::<F>(huge, level)));
    if F::is_present(huge) { part } else { tracked::<F>(part, level.down()) }
}

/// A linked or once linked entry in its table: the only way to change one.
#[derive(Clone, Copy)]
pub(crate) struct EntryRef<'s> {
    cell: &'s AtomicU64,
    level: Level,
}

impl<'s> EntryRef<'s> {
    #[inline]
    pub(crate) fn new(cell: &'s AtomicU64, level: Level) -> EntryRef<'s> {
        EntryRef { cell, level }
    }

    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// Acquire: pairs with the release of whoever linked the table or the leaf, so that a table's entries are seen
    /// filled; and orders this read before the reads of the state that the answer depends on (see `stamp`).
    #[inline]
    pub(crate) fn load(&self) -> Entry {
        Entry(self.cell.load(Ordering::Acquire))
    }

    /// Replaces `old` by `new`, if `old` is still there; else says what is.
    ///
    /// SeqCst: release, so that a new table's entries are seen by who walks to it; acquire, as for `load`; and total
    /// order with the accesses of the slot set and of the dirty bitmap that pair with it (see `fence_after_rmw` at the
    /// callers).
    #[inline]
    pub(crate) fn compare_exchange<F: Format>(&self, old: Entry, new: Entry) -> Result<(), Entry> {
        #[cfg(debug_assertions)]
        self.assert_transition::<F>(old, new);
        match self.cell.compare_exchange(old.0, new.0, Ordering::SeqCst, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(found) => Err(Entry(found)),
        }
    }

    /// Clears `bits` of an entry of the lowest level with one AND, and says what it was before. The entry may be no leaf
    /// by now: W and A are clear in all that it can be then. (A is cleared so only where no leaf is ever tracked.)
    #[inline]
    pub(crate) fn clear<F: Format>(&self, bits: u64) -> Entry {
        const {
            // Bit 10 says broken, but not at the lowest level: Arm's A may be there.
            let never = TRACKED_BIT | FROZEN_BIT | FROZEN_LEAF | FROZEN_TABLE | u64::MAX << PAYLOAD_SHIFT;
            assert!((F::WRITABLE | F::ACCESSED) & never == 0);
            assert!(F::WRITABLE & (TRACKED_HOST_WRITABLE | TRACKED_DIRTY) == 0);
        }
        debug_assert!(self.level == Level::L4K, "an AND above the lowest level could hit a table entry");
        debug_assert!(bits & !(F::WRITABLE | F::ACCESSED) == 0, "not for {bits:#x}");
        // SeqCst: stands in the store-load pairs of the dirty log.
        Entry(self.cell.fetch_and(!bits, Ordering::SeqCst))
    }

    /// Freezes an entry of a table that the caller has unlinked, and says what it was before.
    #[inline]
    pub(crate) fn freeze(&self) -> Entry {
        // AcqRel: what the entry pointed to must be seen as its writer left it.
        Entry(self.cell.swap(FROZEN_NOTHING, Ordering::AcqRel))
    }

    /// Freezes `value`, if it is still there, in a way that says what it was, and returns that; else says what is there.
    #[inline]
    pub(crate) fn freeze_as_was<F: Format>(&self, value: Entry) -> Result<Entry, Entry> {
        // AcqRel, Acquire: as for `freeze`, and who finds it frozen sees as much.
        let frozen = frozen_as_was::<F>(value, self.level);
        match self.cell.compare_exchange(value.0, frozen.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(frozen),
            Err(found) => Err(Entry(found)),
        }
    }

    /// Checks a change against the module's table.
    #[cfg(debug_assertions)]
    fn assert_transition<F: Format>(&self, old: Entry, new: Entry) {
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
                    && can_be_closed::<F>()
                    && (new == closed::<F>(old) || (is_closed::<F>(old) && new == opened::<F>(old)))
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
        assert!(allowed, "forbidden change of an entry of level {}: {old:?} to {new:?}", level.0);
        let is_leaf = state::<F>(new, level) == State::Leaf;
        assert!(
            !is_leaf || !is_writable::<F>(new) || is_host_writable::<F>(new),
            "writable leaf that the host does not allow to write: {new:?}"
        );
    }
}

#[cfg(test)]
#[path = "entry_tests.rs"]
mod tests;
