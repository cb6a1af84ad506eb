//! The protocol steps of the engine as they happen under shuttle, for the proofs to check
//! (`models/proofs/replay.py`).
//!
//! # Guarantees
//! The events of a schedule are in the order in which their atomic operations happened.
//!
//! # Use
//! A test calls [`start`], runs its threads, and calls [`finish`]. The engine calls [`record`]
//! directly behind the atomic operation, with no scheduling point in between.
//!
//! # Implementation
//! Shuttle runs all threads of a schedule on one thread of the system, so the events are in a
//! variable of that thread.

extern crate std;

use core::cell::RefCell;
use std::thread_local;
use std::vec::Vec;

/// A step of a protocol. Addresses and frame numbers are plain numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A fault on a frame begins its look.
    FaultLooks {
        /// The frame.
        gfn: u64,
    },
    /// The host answers for the page of a fault.
    HostAnswers {
        /// The frame of the guest.
        gfn: u64,
        /// The frame of the host.
        pfn: u64,
        /// Whether the guest may write to it.
        is_writable: u8,
    },
    /// Inside an invalidation: from now on the host has no other answer for the page.
    HostChanges {
        /// The frame of the guest.
        gfn: u64,
        /// The frame of the host.
        pfn: u64,
    },
    /// A CPU translates by a leaf.
    CpuTranslates {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
        /// The address of the leaf PTE.
        cell: u64,
    },
    /// A PTE was read.
    PteRead {
        /// Its address.
        cell: u64,
        /// Its level.
        level: u8,
        /// Its bits.
        value: u64,
    },
    /// A PTE was exchanged.
    PteReplaced {
        /// Its address.
        cell: u64,
        /// Its level.
        level: u8,
        /// Its bits before.
        old: u64,
        /// Its bits after.
        new: u64,
    },
    /// A PTE was not exchanged: it is not as it was read.
    PteKept {
        /// Its address.
        cell: u64,
        /// Its level.
        level: u8,
        /// Its bits.
        found: u64,
    },
    /// A frozen PTE was stored in a page-table page that was unlinked.
    PteFrozen {
        /// Its address.
        cell: u64,
    },
    /// A PTE was stored in a page-table page that is to be linked.
    PteMade {
        /// Its address.
        cell: u64,
        /// Its bits.
        value: u64,
    },
    /// A number was taken from the counter of invalidation sequence numbers.
    NumberTaken {
        /// The number.
        number: u64,
    },
    /// That counter was read.
    NumberRead {
        /// The greatest number so far.
        number: u64,
    },
    /// A range is in flight from now on.
    Published {
        /// The address of its place.
        place: u64,
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
    },
    /// A range is no longer in flight.
    Withdrawn {
        /// The address of its place.
        place: u64,
    },
    /// A fault reads which ranges are in flight.
    RangesRead {
        /// The frame of the fault.
        gfn: u64,
    },
    /// What it has found: the level of the largest block that is free, or 0.
    RangesFound {
        /// The frame of the fault.
        gfn: u64,
        /// The level.
        level: u8,
    },
    /// The published set of memslots was read.
    SlotsRead,
    /// Another set of memslots was published.
    SlotsPublished,
    /// What that set says of the memslot that was made or changed.
    EntryPublished {
        /// The first frame of the memslot.
        start: u64,
        /// Whether it logs.
        logs: bool,
        /// The address of the bitmap of its log, or 0.
        log: u64,
    },
    /// All marks of a mask were found set in a word of a dirty bitmap.
    MarksFound {
        /// Number of the word.
        word: u64,
        /// The mask.
        mask: u64,
        /// The address of the bitmap.
        log: u64,
    },
    /// Marks were set in a word.
    MarksSet {
        /// Number of the word.
        word: u64,
        /// The marks.
        mask: u64,
        /// The address of the bitmap.
        log: u64,
    },
    /// Words were set in the summary, or were found set there.
    Summarized {
        /// Number of the summary's word.
        group: u64,
        /// The words.
        words: u64,
    },
    /// A harvest found words unset in the summary and skips them.
    SummarySkipped {
        /// Number of the summary's word.
        group: u64,
        /// The words.
        words: u64,
    },
    /// Words were unset in the summary.
    SummaryCleared {
        /// Number of the summary's word.
        group: u64,
        /// The words.
        words: u64,
    },
    /// Marks were taken from a word, or none were there to take.
    MarksTaken {
        /// Number of the word.
        word: u64,
        /// The marks.
        marks: u64,
        /// The address of the bitmap.
        log: u64,
    },
    /// The test begins to harvest, with these masks if it clears by masks.
    HarvestBegins {
        /// The masks of the two words that are used.
        masks: Option<[u64; 2]>,
    },
    /// The test has the marks of its harvest.
    HarvestEnds,
    /// The test begins to write to a page itself and to mark it.
    VmmWrites {
        /// The frame of the guest.
        gfn: u64,
    },
    /// The test has turned logging on.
    LogsNow,
    /// A CPU writes to a page through the leaf that it translated by.
    CpuWrites {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// A CPU forgets the leaf that it translated by.
    CpuForgets {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// The host is asked to flush a range.
    FlushBegins {
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
    },
    /// All CPUs have flushed.
    FlushEnds,
    /// A CPU begins to walk. It has flushed for each flush that was under way.
    CpuWalks {
        /// Number of the CPU.
        cpu: u64,
    },
    /// On its walk, a CPU has read a PTE that is present.
    CpuReads {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
        /// The address of the PTE.
        cell: u64,
    },
    /// The test makes a userfault bitmap.
    BitmapMade {
        /// The address of its first word.
        bitmap: u64,
        /// Whether a bit stands for 2 MiB.
        is_big: bool,
    },
    /// User space has changed a word of a userfault bitmap.
    BitsChanged {
        /// The address of the word.
        word: u64,
        /// Its bits after.
        value: u64,
    },
    /// A word of a userfault bitmap was read.
    BitsRead {
        /// The address of the word.
        word: u64,
        /// Its bits.
        value: u64,
    },
    /// A word of the attributes was read.
    AttributesRead {
        /// Number of the word.
        word: u64,
        /// Which pages are private.
        value: u64,
    },
    /// Pages became private, or shared.
    AttributesStored {
        /// Number of the word.
        word: u64,
        /// The pages.
        mask: u64,
        /// Whether they are private.
        is_private: bool,
    },
    /// The test begins a call that concerns these frames.
    CallBegins {
        /// 0: an invalidation, or a change of attributes; 1: of a memslot; 2: a rescan.
        kind: u64,
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
        /// Of a change of a memslot: the userfault bitmap that it turns on, or 0.
        bitmap: u64,
    },
    /// The call has returned.
    CallEnds {
        /// Whether it succeeded.
        is_ok: bool,
    },
    /// The test begins to make, delete, move or change a memslot.
    MemslotBegins {
        /// 0: an invalidation of the frames; 1: it makes the memslot; 2: it deletes it; 3: it moves it
        /// or changes its flags.
        kind: u64,
        /// Number of the memslot.
        id: u64,
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
        /// Number of the backing of a new memslot.
        backing: u64,
    },
    /// The test begins to map pages in advance, from this frame of the host on.
    MappingBegins {
        /// The first frame of the guest.
        start: u64,
        /// The frame behind the last.
        end: u64,
        /// The first frame of the host.
        pfn: u64,
    },
    /// Such a mapping fails: what it has mapped so far is to be undone.
    UndoBegins {
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
    },
    /// A memslot is about to be published for the first time.
    SlotMade {
        /// Its address.
        slot: u64,
    },
    /// A memslot was claimed for a change.
    SlotClaimed {
        /// Its address.
        slot: u64,
    },
    /// A claim was dropped.
    SlotReleased {
        /// The address of the memslot.
        slot: u64,
    },
    /// The published set was read, to build the next from it.
    SetBuilt,
    /// A memslot was freed.
    SlotFreed {
        /// Its address.
        slot: u64,
    },
    /// A hazard pointer was set.
    HazardSet {
        /// The address of what it protects.
        thing: u64,
    },
    /// A hazard pointer was cleared.
    HazardCleared,
    /// The guard of a fault is over.
    FaultUnpinned,
    /// The announcements of all guards were read.
    AnnouncementsRead,
    /// A guard is about to announce this epoch: it has just read it.
    EpochRead {
        /// The address of the announcement.
        announcement: u64,
        /// The epoch.
        epoch: u64,
    },
    /// An epoch was announced.
    Announced {
        /// The address of the announcement.
        announcement: u64,
        /// The epoch.
        epoch: u64,
    },
    /// A guard was opened.
    GuardOpened {
        /// The address of the announcement.
        announcement: u64,
    },
    /// A guard is over.
    GuardClosed {
        /// The address of the announcement.
        announcement: u64,
        /// Whether nothing is announced any more.
        is_last: bool,
    },
    /// A fault keeps what it has found for its next guard.
    ThingKept {
        /// The address of the announcement.
        announcement: u64,
        /// The epoch that is announced.
        epoch: u64,
    },
    /// The next guard of a fault, which has announced the epoch of the first, has read the epoch.
    EpochReadAgain {
        /// The address of the announcement.
        announcement: u64,
        /// The epoch.
        epoch: u64,
    },
    /// A retirement has ended an epoch.
    EpochAdvanced {
        /// The epoch that is over.
        epoch: u64,
    },
    /// A page-table page is tagged with the epoch that was ended for it.
    TableRetired {
        /// Its address.
        table: u64,
        /// The epoch.
        tag: u64,
    },
    /// The page-table pages that the thread has retired, or keeps, are on the list.
    TablesListed,
    /// All page-table pages were taken from the list.
    TablesTaken,
    /// The host has made a barrier on all CPUs.
    BarrierMade,
    /// A reclaim has read an announcement.
    AnnouncementRead {
        /// The address of the announcement.
        announcement: u64,
        /// The epoch, or 0.
        epoch: u64,
    },
    /// A page-table page that was taken is to be listed again.
    TableKept {
        /// Its address.
        table: u64,
    },
    /// A page-table page was freed.
    TableFreed {
        /// Its address.
        table: u64,
    },
    /// A CPU caches the directory entry above a page, which allows writes.
    CpuCaches {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// In this schedule all marks are set when logging begins.
    InitiallySet,
    /// A CPU sets D of a leaf.
    CpuSetsDirty {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// A call, or a vCPU without a ring, keeps the VM without rings from now on.
    WithoutRingsBegins,
    /// It does so no more.
    WithoutRingsEnds,
    /// Rings are enabled.
    RingsEnabled,
    /// Whether there are rings was read.
    RingsRead {
        /// Whether there are.
        are_enabled: bool,
    },
    /// A vCPU has a dirty ring.
    VcpuHasRing {
        /// Number of the CPU.
        cpu: u64,
        /// The address of its ring.
        ring: u64,
        /// The entries of the ring.
        nr_entries: u64,
    },
    /// The index of the first entry of a ring that is not empty was read.
    RingFirstRead {
        /// The address of the ring.
        ring: u64,
        /// The index.
        first: u64,
    },
    /// A page was written into an entry that is to be pushed.
    RingEntryWritten {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
        /// The page.
        page: u64,
    },
    /// An entry was pushed.
    RingPushed {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
    },
    /// A harvest of a ring has read which entries were harvested.
    RingHarvestBegins {
        /// The address of the ring.
        ring: u64,
        /// The index behind the last.
        next: u64,
    },
    /// A harvest has found which entry is the next: it has just read which is the first.
    RingEntryChosen {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
    },
    /// The page of an entry was read.
    RingEntryRead {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
        /// The page.
        page: u64,
    },
    /// The mark of an entry was read.
    RingMarkRead {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
        /// The mark.
        mark: u64,
    },
    /// A harvest took an entry.
    RingHarvested {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
    },
    /// Another harvest was faster.
    RingHarvestFailed {
        /// The address of the ring.
        ring: u64,
        /// The index behind the last entry that was harvested.
        next: u64,
    },
    /// An entry was marked as harvested.
    RingMarked {
        /// The address of the ring.
        ring: u64,
        /// The index of the entry.
        index: u64,
    },
    /// A reset has read which entries of a ring were harvested.
    RingResetBegins {
        /// The address of the ring.
        ring: u64,
        /// The index behind the last.
        harvested: u64,
    },
    /// A reset made entries empty.
    RingReset {
        /// The address of the ring.
        ring: u64,
        /// The index behind the last.
        reached: u64,
    },
    /// The test begins to reset all rings.
    ResetBegins,
    /// The reset is over, and the test copies the pages that it has harvested.
    ResetEnds,
    /// A CPU writes a page into its modification log.
    CpuLogs {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// A drain has noted how many entries a CPU's modification log has.
    DrainNotes {
        /// Number of the CPU.
        cpu: u64,
        /// The number of the entry behind the last.
        end: u64,
    },
    /// Each CPU has started over what it had begun.
    DrainKicked,
    /// A drain has read the entries up to the last that it has noted, and is about to pass them on.
    DrainReads {
        /// Number of the CPU.
        cpu: u64,
        /// The number of the first entry.
        first: u64,
        /// How many there are.
        nr_entries: u64,
    },
    /// A drain removes entries.
    DrainRemoves {
        /// Number of the CPU.
        cpu: u64,
        /// The number of the first entry that stays.
        end: u64,
    },
    /// The host was notified that a leaf is about to go.
    LeafZapped {
        /// The frame of the guest.
        gfn: u64,
        /// Whether the guest has written through it.
        is_dirty: u8,
    },
}

/// What a PTE is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PteKind {
    /// It has this number.
    Empty(u64),
    /// It has this number; a flush is due.
    Unflushed(u64),
    /// It maps this frame of the host, tracked or not; its bits for rights, A and D.
    Leaf(u64, u64),
    /// It points to the page-table page at this address; the bits of its generation, and whether
    /// it is protected.
    Table(u64, u64, bool),
    /// It stands before or behind the page-table page at this address.
    Broken(u64),
    /// It is frozen.
    Frozen,
}

thread_local! {
    static EVENTS: RefCell<Option<Vec<(usize, Event)>>> = const { RefCell::new(None) };
}

/// The address of what an event names.
pub fn address<T>(thing: &T) -> u64 {
    core::ptr::from_ref(thing).addr() as u64
}

/// Records the events of this schedule from now on.
pub fn start() {
    EVENTS.with_borrow_mut(|events| *events = Some(Vec::new()));
}

/// Returns the events since [`start`], each with the number of its thread.
pub fn finish() -> Vec<(usize, Event)> {
    EVENTS.with_borrow_mut(Option::take).unwrap_or_default()
}

/// Records `event` of the running thread, if the test records.
pub fn record(event: Event) {
    EVENTS.with_borrow_mut(|events| {
        if let Some(events) = events {
            events.push((usize::from(shuttle::current::me()), event));
        }
    });
}
