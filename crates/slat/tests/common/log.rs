//! Memslots that log, CPUs that set A and D and write their modification logs, and queries of a
//! dirty log in page numbers.

use std::sync::Arc;

use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::LogError;
use slat::format::Format;
use slat::tables::{AccessTracking, FaultAround};
use slat::{Access, Config, Gfn, GfnRange, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm};

use super::{InsideHost, TestHost, Translation, change, region, set_accessed_and_dirty, translate};

pub const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
pub const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

pub const LAZY: DirtyTracking = DirtyTracking::WriteProtect;
pub const LEAF_BY_LEAF: DirtyTracking = DirtyTracking::WriteProtectLeaves;
pub const DIRTY_TRACKINGS: [DirtyTracking; 4] =
    [LAZY, LEAF_BY_LEAF, DirtyTracking::DirtyBit, DirtyTracking::PageModificationLog];
pub const MANUAL_PROTECTS: [ManualProtect; 3] =
    [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet];
pub const HUGE_PAGE_LOGGINGS: [HugePageLogging; 2] = [HugePageLogging::Split, HugePageLogging::MarkWhole];
pub const LAZY_HUGE_PAGE_LOGGINGS: [HugePageLogging; 2] =
    [HugePageLogging::SplitLazily, HugePageLogging::MarkWholeLazily];
pub const ACCESS_TRACKINGS: [AccessTracking; 2] = [AccessTracking::AccessedBit, AccessTracking::Faults];
pub const FAULT_AROUNDS: [FaultAround; 4] =
    [FaultAround::Off, FaultAround::Pages(2), FaultAround::Pages(8), FaultAround::Pages(64)];
pub const LOCKINGS: [Locking; 3] = [Locking::None, Locking::Shared, Locking::Exclusive];

/// The ways to find writes that format `F` supports.
pub fn dirty_trackings<F: Format>() -> impl Iterator<Item = DirtyTracking> {
    DIRTY_TRACKINGS.into_iter().filter(|tracking| match tracking {
        DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => true,
        DirtyTracking::DirtyBit => F::HAS_DIRTY_BIT,
        DirtyTracking::PageModificationLog => F::HAS_MODIFICATION_LOG,
    })
}

/// A memslot's number, first guest frame and pages; its first host frame, and the size of its
/// largest blocks.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub id: u32,
    pub first: u64,
    pub nr_pages: u64,
    pub first_pfn: u64,
    pub max_size: PageSize,
}

/// 64 GiB.
const PFN_OFFSET: u64 = 1 << 24;

impl Slot {
    /// A memslot of small pages.
    pub const fn new(id: u32, first: u64, nr_pages: u64) -> Slot {
        Slot::huge(id, first, nr_pages, PageSize::Size4K)
    }

    /// A memslot whose frames are aligned like the guest's pages.
    pub const fn huge(id: u32, first: u64, nr_pages: u64, max_size: PageSize) -> Slot {
        Slot { id, first, nr_pages, first_pfn: PFN_OFFSET + first, max_size }
    }

    pub fn gfn(&self, page: u64) -> Gfn {
        Gfn(self.first + page)
    }

    pub fn range(&self) -> GfnRange {
        GfnRange::new(Gfn(self.first), self.nr_pages)
    }

    pub fn nr_words(&self) -> usize {
        self.nr_pages.div_ceil(64) as usize
    }
}

/// The numbers of the set bits; bit 0 of the first word is `first`.
pub fn pages_of(bitmap: &[u64], first: u64) -> Vec<u64> {
    let bits = |word: u64| (0..64).filter(move |bit| word >> bit & 1 == 1);
    (0u64..).zip(bitmap).flat_map(|(index, &word)| bits(word).map(move |bit| first + index * 64 + bit)).collect()
}

/// `nr_words` words with the bits `pages`.
pub fn mask_of(pages: &[u64], nr_words: usize) -> Vec<u64> {
    let mut mask = vec![0; nr_words];
    for page in pages {
        mask[(page / 64) as usize] |= 1 << (page % 64);
    }
    mask
}

/// A CPU's write through the leaf `found`: sets A and D, and logs the page if it has set D. Returns
/// whether the leaf was still there.
pub fn write_as_hardware<F: Format>(vm: &Vm<TestHost, F>, gfn: Gfn, found: Translation) -> bool {
    // The modification log is the host's memory.
    let _inside = InsideHost::enter();
    // Held meanwhile: for a drain, setting D and logging it are one step.
    let mut log = vm.host().modification_log.lock().unwrap();
    let done = set_accessed_and_dirty(vm, gfn.gpa(), found, Access::Write);
    if done && found.pte.0 & F::DIRTY == 0 {
        log.push(gfn.gpa());
    }
    done
}

/// A VM with one vCPU.
pub struct World<F: Format> {
    pub vm: Arc<Vm<TestHost, F>>,
    pub vcpu: Vcpu<TestHost, F>,
    pub config: Config,
}

impl<F: Format> World<F> {
    pub fn new(config: Config) -> World<F> {
        let vm = Arc::new(Vm::new(TestHost::default(), config).unwrap());
        World { vcpu: vm.create_vcpu().unwrap(), vm, config }
    }

    pub fn create(&self, slot: Slot, flags: MemoryRegionFlags) {
        let Slot { id, first, nr_pages, first_pfn, max_size } = slot;
        let memory = region(id, first * PAGE_SIZE, nr_pages * PAGE_SIZE, first_pfn, max_size);
        self.vm.set_user_memory_region(MemoryRegion { flags, ..memory }).unwrap();
    }

    pub fn set_flags(&self, slot: Slot, flags: MemoryRegionFlags) {
        let changed = change(slot.id, flags, slot.first * PAGE_SIZE, slot.nr_pages * PAGE_SIZE);
        self.vm.set_user_memory_region(changed).unwrap();
    }

    pub fn delete(&self, slot: Slot) {
        self.vm.set_user_memory_region(change(slot.id, NO_FLAGS, 0, 0)).unwrap();
    }

    pub fn at(&self, gfn: Gfn) -> Option<Translation> {
        translate(&self.vm, gfn.gpa())
    }

    pub fn is_writable(&self, slot: Slot, page: u64) -> bool {
        self.at(slot.gfn(page)).is_some_and(|found| found.writable)
    }

    /// Writes as the guest does: by the CPU where the page tables allow it, after as many faults as
    /// it takes. Returns their number.
    pub fn write(&mut self, slot: Slot, page: u64) -> u64 {
        self.access(slot, page, Access::Write)
    }

    /// The same for a read.
    pub fn read(&mut self, slot: Slot, page: u64) -> u64 {
        self.access(slot, page, Access::Read)
    }

    fn access(&mut self, slot: Slot, page: u64, access: Access) -> u64 {
        let gfn = slot.gfn(page);
        for nr_faults in 0..3 {
            let found = self.at(gfn).filter(|found| access != Access::Write || found.writable);
            if let Some(found) = found {
                assert_eq!(found.pfn.0, slot.first_pfn + page);
                if self.config.access_tracking == AccessTracking::AccessedBit {
                    assert!(match access {
                        Access::Write => write_as_hardware(&self.vm, gfn, found),
                        _ => set_accessed_and_dirty(&self.vm, gfn.gpa(), found, access),
                    });
                }
                return nr_faults;
            }
            assert_eq!(self.vcpu.handle_fault(gfn.gpa(), access), Ok(Outcome::Resume));
        }
        panic!("{access:?} of {gfn} still faults");
    }

    pub fn write_all(&mut self, slot: Slot, pages: impl IntoIterator<Item = u64>) -> u64 {
        pages.into_iter().map(|page| self.write(slot, page)).sum()
    }

    /// The pages that `get_dirty_log` reports.
    pub fn get(&self, slot: Slot) -> Vec<u64> {
        let mut bitmap = vec![0x55aa; slot.nr_words() + 1];
        let nr_pages = self.vm.get_dirty_log(slot.id, &mut bitmap).unwrap();
        assert_eq!(bitmap.pop(), Some(0x55aa), "a word behind the slot's was written");
        let pages = pages_of(&bitmap, 0);
        assert_eq!(pages.len() as u64, nr_pages);
        pages
    }

    /// The pages that `get_dirty_log_range` reports.
    pub fn get_range(&self, slot: Slot, first: u64, nr_pages: u64) -> Vec<u64> {
        let mut bitmap = vec![0x55aa; nr_pages.div_ceil(64) as usize + 1];
        let nr_set = self.vm.get_dirty_log_range(slot.id, first, nr_pages, &mut bitmap).unwrap();
        assert_eq!(bitmap.pop(), Some(0x55aa), "a word behind the range's was written");
        let pages = pages_of(&bitmap, first);
        assert_eq!(pages.len() as u64, nr_set);
        pages
    }

    /// Clears `pages` of the whole slot.
    pub fn clear(&self, slot: Slot, pages: &[u64]) -> Result<u64, LogError> {
        self.vm.clear_dirty_log(slot.id, 0, slot.nr_pages, &mask_of(pages, slot.nr_words()))
    }

    /// Harvests in any mode: the pages are cleared, and logged anew.
    pub fn harvest(&self, slot: Slot) -> Vec<u64> {
        let pages = self.get(slot);
        if self.config.manual_protect != ManualProtect::Disabled {
            assert_eq!(self.clear(slot, &pages), Ok(pages.len() as u64));
        }
        pages
    }

    /// The flushes since the last call.
    pub fn take_flushes(&self) -> Vec<Vec<GfnRange>> {
        std::mem::take(&mut *self.vm.host().flushes.lock().unwrap())
    }

    /// The leaf PTEs of the pages of `slot`.
    pub fn entries(&self, slot: Slot) -> Vec<Option<Translation>> {
        (0..slot.nr_pages).map(|page| self.at(slot.gfn(page))).collect()
    }

    /// Deletes `slots`; then no page-table page may be left.
    pub fn finish(self, slots: &[Slot]) {
        slots.iter().for_each(|slot| self.delete(*slot));
        drop(self.vcpu);
        super::assert_no_table_is_left(&self.vm);
    }
}

/// A test for each format and locking, of a configuration with that locking: `$test::<F>(config)`.
/// A condition leaves formats out, as with [`each`](crate::common::each).
#[allow(unused_macros, reason = "each test binary uses a part")]
macro_rules! each_config {
    ($name:ident, $test:ident $(, if $condition:expr)?) => {
        $crate::common::each!(
            $name,
            |F, locking| $test::<F>($crate::common::lazily_splitting(locking))
            $(, if $condition)?
        );
    };
}
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use each_config;
