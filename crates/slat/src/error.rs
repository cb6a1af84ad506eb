//! Errors: one type for each kind of operation, and [`Error`](enum@Error), their sum.
//!
//! They are small typed values with the offending value and address. An operation that returns one
//! has changed nothing, unless the operation or the variant says otherwise. A fault at which user
//! space must act is no error: it is an [`Exit`](crate::Exit).

mod map;
mod parts;

use core::fmt;

use thiserror::Error;

pub use map::MapError;
pub(crate) use parts::{AddressTooHigh, BadPages, OutOfMemory};

use crate::addr::{Gfn, Gpa, Hpa};
use crate::format::{CpuFeatures, LeafAttributes};
use crate::registers::PagingRegister;

/// Why an operation was not done: any of the errors, for a caller that uses `?` into one type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Of what a VM is configured with.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Of memslots, their pages' attributes and their userfault bitmaps.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// Of the dirty log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// Of faults, prefaults and the other calls of a vCPU.
    #[error(transparent)]
    Fault(#[from] FaultError),
    /// Of ranges of guest frames.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Of memory that is mapped in advance.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// Why a VM, a vCPU or dirty rings were not made as configured: [`Vm::new`](crate::Vm::new),
/// [`Vm::with_shadow_paging`](crate::Vm::with_shadow_paging),
/// [`Vm::create_vcpu`](crate::Vm::create_vcpu),
/// [`Vm::enable_dirty_ring`](crate::Vm::enable_dirty_ring).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Dirty tracking by the CPUs' dirty bits was configured with access tracking by faults. The
    /// latter is for CPUs that set neither bit.
    #[error(
        "dirty tracking by dirty bits needs CPUs that set them, and access tracking by faults is for those that do not"
    )]
    NoDirtyBit,
    /// Dirty tracking by the CPUs' dirty bits was configured, but CPUs set none in this format.
    #[error("there are no dirty bits in {format} tables that CPUs set")]
    NoDirtyBitInFormat {
        /// The format's name.
        format: &'static str,
    },
    /// Page-modification logging was configured, but CPUs do not support it in this format.
    #[error("there is no page-modification logging with {format} tables")]
    NoModificationLog {
        /// The format's name.
        format: &'static str,
    },
    /// The format has no page tables of so many levels for so many guest-physical address bits.
    #[error("{format} tables have no geometry for {gpa_bits} guest-physical bits{}", LevelsOf(*levels))]
    BadGeometry {
        /// The address bits that were configured, or follow from the format.
        gpa_bits: u8,
        /// The levels that were configured.
        levels: Option<u8>,
        /// The format's name.
        format: &'static str,
    },
    /// CPUs of this format do not have these features.
    #[error("{features:?} are no features of CPUs that walk {format} tables")]
    ForeignFeatures {
        /// Those features.
        features: CpuFeatures,
        /// The format's name.
        format: &'static str,
    },
    /// Bits that are to be set in every address are none of an address in this format.
    #[error("{bits} has bits that no address in {format} tables can have besides its own")]
    BadAddressBits {
        /// The bits that were configured.
        bits: Hpa,
        /// The format's name.
        format: &'static str,
    },
    /// The host's PAT has no entry for write-back memory.
    #[error("the PAT {pat:#x} has no entry for write-back memory")]
    NoWriteBack {
        /// The value that was configured.
        pat: u64,
    },
    /// The window of fault-around is not a power of two from 2 to
    /// [`MAX_PAGES`](crate::tables::FaultAround::MAX_PAGES) pages.
    #[error("a window of {nr_pages} pages around a fault: not a power of two from 2 to 64")]
    BadFaultAround {
        /// The number of pages that was configured.
        nr_pages: u8,
    },
    /// More previous roots were configured than a vCPU can remember.
    #[error("{previous_roots} previous roots: at most 31")]
    TooManyRoots {
        /// The number that was configured.
        previous_roots: u8,
    },
    /// The configured number of shadow pages is too small or too large.
    #[error("{max_pages} shadow pages: not from 64 to 1048576")]
    BadShadowPages {
        /// The number that was configured.
        max_pages: u32,
    },
    /// The size of dirty rings is not a power of two, or not from
    /// [`MIN_ENTRIES`](crate::dirty::DirtyRing::MIN_ENTRIES) to
    /// [`MAX_ENTRIES`](crate::dirty::DirtyRing::MAX_ENTRIES).
    #[error("dirty rings of {nr_entries} entries: not a power of two from 256 to 65536")]
    BadRingSize {
        /// The number of entries that was requested.
        nr_entries: u32,
    },
    /// Dirty rings need faults on single pages, so they need
    /// [`DirtyTracking::WriteProtect`](crate::dirty::DirtyTracking::WriteProtect) and
    /// [`HugePageLogging::Split`](crate::dirty::HugePageLogging::Split).
    #[error("dirty rings need tracking by write protection, and huge pages that are split")]
    RingNeedsPageFaults,
    /// Dirty rings are enabled already.
    #[error("dirty rings are enabled already")]
    DirtyRingEnabled,
    /// Dirty rings can be enabled only while the VM has no vCPU and no huge pages are being
    /// recovered. With break before make, none may be split either.
    #[error("dirty rings cannot be enabled: the VM has vCPUs")]
    VcpusExist,
    /// There is no memory for page-table pages or for bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
}

/// Why a call on memslots, the attributes of their pages or their userfault bitmaps was not done:
/// [`Vm::set_user_memory_region`](crate::Vm::set_user_memory_region),
/// [`Vm::set_memory_attributes`](crate::Vm::set_memory_attributes),
/// [`Vm::memory_attributes`](crate::Vm::memory_attributes),
/// [`Vm::rescan_userfault`](crate::Vm::rescan_userfault).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The guest-physical address of a region is not a multiple of 4 KiB.
    #[error("guest-physical address {gpa} is not page-aligned")]
    UnalignedAddress {
        /// The address.
        gpa: Gpa,
    },
    /// The size of a memslot is not a multiple of 4 KiB.
    #[error("memory size {memory_size:#x} of slot {slot} is not a multiple of the page size")]
    UnalignedSize {
        /// The memslot.
        slot: u32,
        /// Its size in bytes.
        memory_size: u64,
    },
    /// The size of a range whose attributes were to be changed is zero, or not a multiple of 4 KiB.
    #[error("size {size_bytes:#x} is not a positive multiple of the page size")]
    BadSize {
        /// The size in bytes.
        size_bytes: u64,
    },
    /// A range of a memslot's pages is empty.
    #[error("range of guest frames from {start} to {end} is empty")]
    EmptyRange {
        /// Its first frame.
        start: Gfn,
        /// The frame after its last.
        end: Gfn,
    },
    /// A range of a memslot's pages reaches beyond its end.
    #[error("slot {slot} has {slot_pages} pages, and not {nr_pages} from page {first_page} on")]
    RangePastEnd {
        /// The memslot.
        slot: u32,
        /// The first page.
        first_page: u64,
        /// The number of pages.
        nr_pages: u64,
        /// Pages of the memslot.
        slot_pages: u64,
    },
    /// A region or an address is beyond the last address that the format translates.
    #[error("address {gpa} is beyond the {gpa_bits} guest-physical bits of the format")]
    AddressTooHigh {
        /// The first byte of the region, or the address.
        gpa: Gpa,
        /// Address bits that the format translates.
        gpa_bits: u32,
    },
    /// The memslot number is not below [`MAX_SLOTS`](crate::MemoryRegion::MAX_SLOTS).
    #[error("slot {slot} is not below the limit of 32764 slots")]
    SlotTooHigh {
        /// The memslot.
        slot: u32,
    },
    /// The region overlaps another memslot's.
    #[error("region of slot {slot} at {gpa} overlaps slot {other}")]
    Overlap {
        /// The memslot to be set.
        slot: u32,
        /// The address where it was to start.
        gpa: Gpa,
        /// The memslot that is there.
        other: u32,
    },
    /// Unknown flag bits.
    #[error("unknown flags {flags:#x} for slot {slot}")]
    UnknownFlags {
        /// The memslot.
        slot: u32,
        /// All flag bits that were given.
        flags: u32,
    },
    /// The memslot does not exist.
    #[error("slot {slot} does not exist")]
    NoSuchSlot {
        /// The memslot.
        slot: u32,
    },
    /// Another thread is changing the memslot now. Try again.
    #[error("slot {slot} is being deleted or moved by another call")]
    SlotBusy {
        /// The memslot.
        slot: u32,
    },
    /// Too much memory of earlier changes of memslots cannot be freed yet. A thread that was
    /// preempted inside a call, or a [`TableReader`](crate::tables::TableReader), may still use it.
    /// Try again later.
    #[error("{size_bytes} bytes that earlier changes of slots left wait to be freed")]
    TooMuchRetired {
        /// Size of the memslot sets, logs and bitmaps that wait.
        size_bytes: u64,
    },
    /// A new memslot was given no backing.
    #[error("new slot {slot} has no backing")]
    NoBacking {
        /// The memslot.
        slot: u32,
    },
    /// A backing was given for an existing memslot, which keeps its own.
    #[error("the backing of slot {slot} cannot be changed")]
    BackingFixed {
        /// The memslot.
        slot: u32,
    },
    /// The size of an existing memslot cannot be changed: it has a guest_memfd, is pinned, or is to
    /// be moved by the same call.
    #[error("slot {slot} cannot be resized to {memory_size:#x} bytes")]
    SizeFixed {
        /// The memslot.
        slot: u32,
        /// The size in bytes that was asked for.
        memory_size: u64,
    },
    /// Whether a memslot is read-only cannot be changed.
    #[error("whether slot {slot} is read-only cannot be changed")]
    ReadOnlyFixed {
        /// The memslot.
        slot: u32,
    },
    /// A memslot was given other flags beside `PINNED`.
    #[error("slot {slot} is pinned, and no other flag goes with that: {flags:#x}")]
    PinnedAlone {
        /// The memslot.
        slot: u32,
        /// All flag bits that were given.
        flags: u32,
    },
    /// Whether a memslot is pinned cannot be changed.
    #[error("whether slot {slot} is pinned cannot be changed")]
    PinnedFixed {
        /// The memslot.
        slot: u32,
    },
    /// A memslot with a guest_memfd cannot be read-only.
    #[error("slot {slot} has a guest_memfd, and cannot be read-only")]
    ReadOnlyGuestMemfd {
        /// The memslot.
        slot: u32,
    },
    /// A memslot with a guest_memfd cannot be moved. Whether a memslot has one cannot be changed.
    #[error("slot {slot} cannot be moved if it has a guest_memfd, and whether it has one cannot be changed")]
    GuestMemfdFixed {
        /// The memslot.
        slot: u32,
    },
    /// A range whose attributes were to be changed has a page that is in no memslot with a
    /// guest_memfd.
    #[error("no slot with a guest_memfd has memory at {gpa}")]
    NoGuestMemfd {
        /// The address of the first such page.
        gpa: Gpa,
    },
    /// No memslot has the page.
    #[error("no slot has memory for {gpa}")]
    NoMemslot {
        /// The address of the page.
        gpa: Gpa,
    },
    /// Unknown attribute bits.
    #[error("unknown memory attributes {attributes:#x}")]
    UnknownAttributes {
        /// All bits that were given.
        attributes: u64,
    },
    /// The memslot has the flag `USERFAULT`, but no userfault bitmap was given.
    #[error("slot {slot} has the flag USERFAULT, and no bitmap")]
    NoUserfaultBitmap {
        /// The memslot.
        slot: u32,
    },
    /// A memslot does not begin at a multiple of the size that a bit of its userfault bitmap stands
    /// for.
    #[error("slot {slot} at {gpa} does not begin at a multiple of {size_bytes:#x}, a block of its userfault bitmap")]
    UnalignedUserfaultSlot {
        /// The memslot.
        slot: u32,
        /// The address where it begins.
        gpa: Gpa,
        /// The size of a block in bytes.
        size_bytes: u64,
    },
    /// The userfault bitmap has fewer bits than the memslot needs.
    #[error("bitmap of {words} words is too short for slot {slot}, which needs {needed}")]
    BitmapTooShort {
        /// The memslot.
        slot: u32,
        /// 64-bit words that were given.
        words: usize,
        /// 64-bit words that are needed.
        needed: usize,
    },
    /// The memslot has no userfault bitmap.
    #[error("slot {slot} does not have the flag USERFAULT")]
    NotUserfault {
        /// The memslot.
        slot: u32,
    },
    /// A userfault bitmap has fewer words than when it was given.
    #[error("the userfault bitmap of slot {slot} has no bit for {gpa} any more")]
    UserfaultBitmapGone {
        /// The memslot.
        slot: u32,
        /// The address of the page.
        gpa: Gpa,
    },
    /// There is no memory for bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
}

/// Why a call on the dirty log was not done: [`Vm::get_dirty_log`](crate::Vm::get_dirty_log),
/// [`Vm::get_dirty_log_range`](crate::Vm::get_dirty_log_range),
/// [`Vm::for_each_dirty`](crate::Vm::for_each_dirty),
/// [`Vm::clear_dirty_log`](crate::Vm::clear_dirty_log), [`Vm::mark_dirty`](crate::Vm::mark_dirty),
/// [`Vm::is_marked_dirty`](crate::Vm::is_marked_dirty),
/// [`Vm::nr_marked_dirty`](crate::Vm::nr_marked_dirty),
/// [`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum LogError {
    /// The memslot does not exist.
    #[error("slot {slot} does not exist")]
    NoSuchSlot {
        /// The memslot.
        slot: u32,
    },
    /// The memslot does not log dirty pages.
    #[error("slot {slot} does not log dirty pages")]
    NotLogging {
        /// The memslot.
        slot: u32,
    },
    /// The caller's bitmap cannot hold the memslot's log.
    #[error("bitmap of {words} words is too short for slot {slot}, which needs {needed}")]
    BitmapTooShort {
        /// The memslot.
        slot: u32,
        /// 64-bit words that were given.
        words: usize,
        /// 64-bit words that are needed.
        needed: usize,
    },
    /// A range of a memslot's pages is empty.
    #[error("range of guest frames from {start} to {end} is empty")]
    EmptyRange {
        /// Its first frame.
        start: Gfn,
        /// The frame after its last.
        end: Gfn,
    },
    /// A range of a memslot's log does not begin at a multiple of 64 pages. Or its length is no
    /// multiple of 64 pages, and it does not end with the memslot.
    #[error("log range of slot {slot}, pages {first_page} and {nr_pages} on, is not a multiple of 64 pages")]
    UnalignedRange {
        /// The memslot.
        slot: u32,
        /// The first page.
        first_page: u64,
        /// The number of pages.
        nr_pages: u64,
    },
    /// A range of a memslot's pages reaches beyond its end.
    #[error("slot {slot} has {slot_pages} pages, and not {nr_pages} from page {first_page} on")]
    RangePastEnd {
        /// The memslot.
        slot: u32,
        /// The first page.
        first_page: u64,
        /// The number of pages.
        nr_pages: u64,
        /// Pages of the memslot.
        slot_pages: u64,
    },
    /// The VM logs by dirty rings, so its memslots have no bitmaps.
    #[error("slot {slot} has no bitmap: the VM logs by dirty rings")]
    DirtyRingInUse {
        /// The memslot.
        slot: u32,
    },
    /// The VM has no dirty rings.
    #[error("the VM has no dirty rings")]
    NoDirtyRing,
    /// There is no memory for bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
}

/// Why a fault, a prefault, the check of an access or another call of a vCPU was not done: the
/// calls of a [`Vcpu`](crate::Vcpu), and [`Vm::check_access`](crate::Vm::check_access).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum FaultError {
    /// The address is beyond the last that the format translates.
    #[error("address {gpa} is beyond the {gpa_bits} guest-physical bits of the format")]
    AddressTooHigh {
        /// The address.
        gpa: Gpa,
        /// Address bits that the format translates.
        gpa_bits: u32,
    },
    /// The backing has no frame for the page.
    #[error("the backing has no memory for {gpa}")]
    BackingGone {
        /// The address of the fault.
        gpa: Gpa,
    },
    /// [`Host::resolve`](crate::Host::resolve) broke its contract. It returned a frame beyond the
    /// format's bits, or another frame or memory type than before without an invalidation.
    #[error("the host resolved {gpa} to a frame that cannot be used")]
    BadResolve {
        /// The address of the fault.
        gpa: Gpa,
    },
    /// The format, or the CPUs that are configured, have no such leaves. A device is never
    /// executed.
    #[error("no leaf can map {gpa} as {:?} with Execute::{:?}", attributes.memory, attributes.execute)]
    UnsupportedAttributes {
        /// The address of the fault.
        gpa: Gpa,
        /// What the host resolved it to.
        attributes: LeafAttributes,
    },
    /// A userfault bitmap has fewer words than when it was given.
    #[error("the userfault bitmap of slot {slot} has no bit for {gpa} any more")]
    UserfaultBitmapGone {
        /// The memslot.
        slot: u32,
        /// The address of the page.
        gpa: Gpa,
    },
    /// There is no memory for page-table pages or for bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
    /// The address of a range to be prefaulted is not a multiple of 4 KiB.
    #[error("guest-physical address {gpa} is not page-aligned")]
    UnalignedAddress {
        /// The address.
        gpa: Gpa,
    },
    /// The size is zero. Or it is not a multiple of 4 KiB, and the range is to be prefaulted.
    #[error("size {size_bytes:#x} is not a positive multiple of the page size")]
    BadSize {
        /// The size in bytes.
        size_bytes: u64,
    },
    /// No memslot has the page, or its memslot does not allow the write. A fault there exits with
    /// [`Exit::Mmio`](crate::Exit::Mmio).
    #[error("no slot has memory for {gpa} that allows the access")]
    NoMemslot {
        /// The address of the page.
        gpa: Gpa,
    },
    /// The page cannot be prefaulted before user space has fetched it. A fault there exits with
    /// [`Exit::MemoryFault`](crate::Exit::MemoryFault), which names all that is to be fetched.
    #[error("user space must fetch the page at {gpa} first")]
    UserfaultPending {
        /// The address of the page.
        gpa: Gpa,
    },
    /// The vCPU's dirty ring has no room for the page to be prefaulted: harvest and reset it.
    #[error("the dirty ring has no room for {gpa}")]
    DirtyRingFull {
        /// The address of the page.
        gpa: Gpa,
    },
    /// The page to be prefaulted is being invalidated: it is in a range in flight, or its memslot
    /// is being changed. Try again.
    #[error("{gpa} is being invalidated by another call")]
    Busy {
        /// The address of the page.
        gpa: Gpa,
    },
    /// The VM has no shadow paging: its hardware walks the second stage.
    #[error("the VM has no shadow paging")]
    NotShadow,
    /// The host has no pointer to memory of the guest that the engine must read
    /// ([`Host::guest_memory_ptr`](crate::Host::guest_memory_ptr)).
    #[error("the host returns no pointer to the guest's memory at {gpa}")]
    NoGuestMemory {
        /// The address.
        gpa: Gpa,
    },
    /// Registers to be restored do not fit together: this one cannot have that value beside the
    /// others.
    #[error("{register:?} cannot hold {value:#x} beside the other paging registers")]
    BadPagingRegister {
        /// The register.
        register: PagingRegister,
        /// The value that it was to hold.
        value: u64,
    },
    /// A write to be emulated has no bytes, too many, or crosses a page.
    #[error("a write of {len} bytes at {gpa} cannot be emulated at once")]
    BadWrite {
        /// The first byte's address.
        gpa: Gpa,
        /// How many bytes.
        len: usize,
    },
}

/// Why a call on a range of guest frames, or on the page tables, was not done:
/// [`Vm::invalidate_range`](crate::Vm::invalidate_range),
/// [`Vm::split_range`](crate::Vm::split_range), [`Vm::recover_range`](crate::Vm::recover_range),
/// [`Vm::age_range`](crate::Vm::age_range), [`Vm::test_age_range`](crate::Vm::test_age_range),
/// [`Vm::read_tables`](crate::Vm::read_tables).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The range is empty.
    #[error("range of guest frames from {start} to {end} is empty")]
    EmptyRange {
        /// Its first frame.
        start: Gfn,
        /// The frame after its last.
        end: Gfn,
    },
    /// The range reaches beyond the last address that the format translates.
    #[error("address {gpa} is beyond the {gpa_bits} guest-physical bits of the format")]
    AddressTooHigh {
        /// The first address of the range that is not translated.
        gpa: Gpa,
        /// Address bits that the format translates.
        gpa_bits: u32,
    },
    /// There is no memory for page-table pages or for bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
}

// A fault returns it by value.
const _: () = assert!(size_of::<FaultError>() <= 24);

/// Ends a message with the number of levels, if there is one.
struct LevelsOf(Option<u8>);

impl fmt::Display for LevelsOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |levels| write!(f, " with {levels} levels"))
    }
}
