//! Records: what the thread of a vCPU, or of a VM call, shows to those that free things; and the
//! sections that it opens by its record.
//!
//! # Guarantees
//! A record is one thread's at a time: [`Record`] is its owner's, the list of records gives out
//! [`SharedRecord`] alone. As long as a section is borrowed, what was found inside is not freed;
//! nor is a thing before its [`Protected`] is dropped.
//!
//! # Use
//! Sections of a record may nest ([`CountedSection`]). A fault opens its sections one after the
//! other, and by a [`FaultPin`], which only one of them borrows at a time. A [`HazardPointer`] has
//! room for one thing: to protect another, the caller drops the first.

#![expect(unsafe_code, reason = "a record is its owner's although all threads reach it")]

use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;

use super::retire::Epochs;
use crate::boxed::Zeroed;
use crate::stats::Recorder;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Most entries of tables, words of bitmaps, and pages that a section visits: what is retired
/// behind it waits no longer. A walk that has more to do leaves its section long before, and goes
/// on in another. Checked in builds with debug assertions.
pub(crate) const MAX_SECTION_STEPS: u64 = 1 << 15;

/// Announcement of a record whose owner is in no section.
pub(super) const IDLE: u64 = 0;

/// What one thread at a time (a vCPU, or a thread inside a VM call) shows to the others. On lines
/// of its own: the owner writes it at every fault.
#[repr(align(128))]
pub(crate) struct SharedRecord {
    /// Era in which the first of the open sections that are counted began, or [`IDLE`].
    pub(super) announced: AtomicU64,
    /// Era in which the open section of a fault began, or [`IDLE`].
    pub(super) announced_by_fault: AtomicU64,
    /// Open sections that are counted. The owner's alone.
    nr_open: Cell<u64>,
    /// Address of the slot whose backing the owner is resolving in, or null: it must not be freed.
    pub(super) resolving: AtomicPtr<()>,
    /// Where in the published set the owner found its last slot. A guess: what is there is
    /// compared.
    pub(crate) last_slot: AtomicU32,
    pub(super) listed: CachePadded<Listed>,
    pub(crate) stats: Recorder,
}

// SAFETY: atomics whose first value is zero, a null pointer, and what is zeroed itself.
unsafe impl Zeroed for SharedRecord {
    #[cfg(loom)]
    fn zeroed() -> SharedRecord {
        SharedRecord {
            announced: AtomicU64::new(IDLE),
            announced_by_fault: AtomicU64::new(IDLE),
            nr_open: Cell::new(0),
            resolving: AtomicPtr::new(ptr::null_mut()),
            last_slot: AtomicU32::new(0),
            listed: CachePadded::new(Listed { in_use: AtomicBool::new(false), next: ptr::null() }),
            stats: Zeroed::zeroed(),
        }
    }
}

/// What is read to find a record that is free. On lines of its own: a thread that passes by must
/// not take the line of the owner.
pub(super) struct Listed {
    pub(super) in_use: AtomicBool,
    /// The record that was pushed before this one; never changes once this one is pushed.
    pub(super) next: *const SharedRecord,
}

// SAFETY: all fields but two are atomics. `listed.next` is written before the record is published,
// and only read since. `nr_open` is used through a `Record` alone, which is one thread's.
unsafe impl Send for SharedRecord {}
// SAFETY: as above.
unsafe impl Sync for SharedRecord {}

impl SharedRecord {
    /// The record for the thread that has it.
    ///
    /// # Safety
    /// The caller has the record in use, and no other thread has it before the answer is gone.
    unsafe fn owned(&self) -> &Record {
        // SAFETY: a `Record` is a `SharedRecord` and nothing else.
        unsafe { &*ptr::from_ref(self).cast() }
    }
}

/// A record as its owner has it. Sections are opened by it alone, so no other thread can end one.
#[repr(transparent)]
pub(crate) struct Record {
    shared: SharedRecord,
    /// The owner is one thread: this is not `Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl Deref for Record {
    type Target = SharedRecord;

    #[inline]
    fn deref(&self) -> &SharedRecord {
        &self.shared
    }
}

impl Record {
    /// Whether no section that is counted is open.
    #[inline]
    pub(super) fn is_outside(&self) -> bool {
        self.nr_open.get() == 0
    }
}

/// What a vCPU's record has once, for its faults.
pub(crate) struct Exclusive<'r> {
    pub(crate) pin: FaultPin<'r>,
    pub(crate) hazard: HazardPointer<'r>,
}

/// The right to open the section of a fault: one at a time, which ends before the next begins.
pub(crate) struct FaultPin<'r>(&'r Record);

impl FaultPin<'_> {
    pub(crate) fn reborrow(&mut self) -> FaultPin<'_> {
        FaultPin(self.0)
    }

    pub(super) fn record(&self) -> &Record {
        self.0
    }
}

/// A record's hazard pointer: it keeps one thing at a time from being freed, without a section.
pub(crate) struct HazardPointer<'r>(&'r Record);

impl<'r> HazardPointer<'r> {
    pub(crate) fn reborrow(&mut self) -> HazardPointer<'_> {
        HazardPointer(self.0)
    }

    /// Protects `thing` until the answer is dropped.
    ///
    /// # Safety
    /// `thing` was found in a section of this thread that is still open. A reclaim frees it only if
    /// [`Epochs::oldest_open`], and after that [`Epochs::is_resolving`], have allowed that.
    #[inline]
    pub(crate) unsafe fn protect<T>(self, thing: NonNull<T>) -> Protected<'r, T> {
        // Release is enough: the section's end (a release store) comes after, and a reclaimer that
        // sees the section over (acquire) sees this.
        self.0.resolving.store(thing.as_ptr().cast(), Ordering::Release);
        Protected { thing, record: self.0 }
    }
}

/// A thing that a hazard pointer keeps from being freed.
pub(crate) struct Protected<'r, T> {
    thing: NonNull<T>,
    record: &'r Record,
}

impl<'r, T> Protected<'r, T> {
    /// Ends the protection: the hazard pointer has room again.
    pub(crate) fn release(self) -> HazardPointer<'r> {
        HazardPointer(self.record)
    }

    #[inline]
    pub(crate) fn get(&self) -> &T {
        // SAFETY: it was found in a section, and protected inside of it. The hazard pointer has no
        // other thing before this is dropped.
        unsafe { self.thing.as_ref() }
    }
}

impl<T> Drop for Protected<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: the uses of the thing come before its free, by a thread that sees this.
        self.record.resolving.store(ptr::null_mut(), Ordering::Release);
    }
}

/// An open read section. What was reached inside lives as long as it is borrowed.
pub(crate) struct Section<'a> {
    record: &'a Record,
    #[cfg(debug_assertions)]
    steps: AtomicU64,
}

impl<'a> Section<'a> {
    /// # Safety
    /// An announcement of the record stands, and stays as long as the section.
    #[inline]
    unsafe fn new(record: &'a Record) -> Section<'a> {
        Section {
            record,
            #[cfg(debug_assertions)]
            steps: AtomicU64::new(0),
        }
    }

    pub(crate) fn record(&self) -> &'a Record {
        self.record
    }

    /// Notes that `nr_steps` entries, words or pages more are visited in this section.
    #[inline]
    pub(crate) fn visit(&self, nr_steps: u64) {
        #[cfg(debug_assertions)]
        {
            // Relaxed: a count.
            let steps = self.steps.fetch_add(nr_steps, Ordering::Relaxed) + nr_steps;
            assert!(steps <= MAX_SECTION_STEPS, "a section of {steps} steps");
        }
        #[cfg(not(debug_assertions))]
        let _ = (nr_steps, MAX_SECTION_STEPS);
    }
}

/// A section that is counted. Sections of a record may nest, and end in any order: the announcement
/// of the first stays until the last is over.
#[must_use]
pub(crate) struct CountedSection<'a>(Section<'a>);

impl<'a> CountedSection<'a> {
    /// # Safety
    /// The record's announcement for sections that are counted stands.
    #[inline]
    pub(super) unsafe fn new(record: &'a Record) -> CountedSection<'a> {
        record.nr_open.set(record.nr_open.get() + 1);
        // SAFETY: the announcement stays until the last section that is counted is dropped.
        CountedSection(unsafe { Section::new(record) })
    }
}

impl<'a> Deref for CountedSection<'a> {
    type Target = Section<'a>;

    #[inline]
    fn deref(&self) -> &Section<'a> {
        &self.0
    }
}

impl Drop for CountedSection<'_> {
    #[inline]
    fn drop(&mut self) {
        let record = self.0.record;
        record.nr_open.set(record.nr_open.get() - 1);
        if record.nr_open.get() == 0 {
            // Release: all accesses of the section come before a reclaim that sees it over.
            record.announced.store(IDLE, Ordering::Release);
        }
    }
}

/// The section of a fault, which has an announcement of its own. It is not counted, because a count
/// costs a fault 50 instructions: what the compiler keeps in registers goes to the stack.
#[must_use]
pub(crate) struct FaultSection<'p>(Section<'p>);

impl<'p> FaultSection<'p> {
    /// # Safety
    /// The announcement of the pin's record for the sections of faults stands.
    #[inline]
    pub(super) unsafe fn new(pin: FaultPin<'p>) -> FaultSection<'p> {
        // SAFETY: no other section borrows the pin. So it stays until this is dropped.
        FaultSection(unsafe { Section::new(pin.0) })
    }
}

impl<'p> Deref for FaultSection<'p> {
    type Target = Section<'p>;

    #[inline]
    fn deref(&self) -> &Section<'p> {
        &self.0
    }
}

impl Drop for FaultSection<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: as for a section that is counted.
        self.0.record.announced_by_fault.store(IDLE, Ordering::Release);
    }
}

/// A section with a record of its own.
#[must_use]
pub(crate) struct LoneSection<'a> {
    // The order of the fields is that of leaving.
    section: CountedSection<'a>,
    _record: RecordGuard<'a>,
}

impl<'a> LoneSection<'a> {
    pub(super) fn new(epochs: &Epochs, record: RecordGuard<'a>) -> LoneSection<'a> {
        LoneSection { section: epochs.enter(record.0), _record: record }
    }

    /// The section. Its record is not reachable for longer than it.
    pub(crate) fn get<'s>(&'s self) -> &'s Section<'s> {
        &self.section
    }
}

/// Use of a record for one call of the VM.
pub(crate) struct RecordGuard<'a>(&'a Record);

impl<'a> RecordGuard<'a> {
    /// # Safety
    /// The caller has set `in_use`, and leaves its end to the guard.
    pub(super) unsafe fn new(record: &'a SharedRecord) -> RecordGuard<'a> {
        // SAFETY: as the caller promises.
        RecordGuard(unsafe { record.owned() })
    }

    /// The record, and its hazard pointer.
    pub(crate) fn with_hazard(&mut self) -> (&Record, HazardPointer<'_>) {
        (self.0, HazardPointer(self.0))
    }

    /// The record for a vCPU: it stays in use.
    pub(super) fn keep(self) -> OwnedRecord {
        OwnedRecord(NonNull::from(&ManuallyDrop::new(self).0.shared))
    }
}

impl Deref for RecordGuard<'_> {
    type Target = Record;

    fn deref(&self) -> &Record {
        self.0
    }
}

impl Drop for RecordGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the guard has it in use, until now.
        unsafe { release_record(self.0) }
    }
}

/// # Safety
/// The caller has the record in use, and this is the end of that.
unsafe fn release_record(record: &SharedRecord) {
    debug_assert!(record.announced.load(Ordering::Relaxed) == IDLE);
    debug_assert!(record.announced_by_fault.load(Ordering::Relaxed) == IDLE);
    // Release: the next user takes the statistics over with acquire.
    record.listed.in_use.store(false, Ordering::Release);
}

/// A record that a vCPU has for its life.
pub(crate) struct OwnedRecord(NonNull<SharedRecord>);

// SAFETY: a `SharedRecord` is `Sync`, and the thread that has this is the record's owner.
unsafe impl Send for OwnedRecord {}

impl OwnedRecord {
    /// # Safety
    /// The `Epochs` that it came from is alive for `'a`, and this is not released before.
    pub(crate) unsafe fn get<'a>(&self) -> &'a Record {
        // SAFETY: records live as long as their `Epochs`, and this one is in use as long as `self`.
        unsafe { self.0.as_ref().owned() }
    }

    /// What the record has once.
    ///
    /// # Safety
    /// As for [`get`](Self::get), and what this has answered before is gone.
    pub(crate) unsafe fn exclusive<'a>(&mut self) -> Exclusive<'a> {
        // SAFETY: as the caller promises.
        let record = unsafe { self.get() };
        Exclusive { pin: FaultPin(record), hazard: HazardPointer(record) }
    }

    /// Releases the record for others to use.
    ///
    /// # Safety
    /// The `Epochs` that it came from is alive. This is not used any more, nor are its answers.
    pub(crate) unsafe fn release(&mut self) {
        // SAFETY: as the caller promises.
        unsafe { release_record(self.get()) }
    }
}
