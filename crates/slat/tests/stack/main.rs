//! How much stack the engine's calls take: a hypervisor has 8 or 16 KiB.
//!
//! Each public call runs on a painted stack, in many configurations, with a host that takes almost
//! none itself. No call may go deeper than [`MOST_BYTES`], and no fault deeper than
//! [`MOST_FAULT_BYTES`]. No public method of a measured type may be left out: the test searches the
//! sources for their names.
//!
//! In optimized builds alone (`ci/stack.sh`): of others a depth says nothing.
#![cfg(all(target_os = "linux", any(not(debug_assertions), clippy), not(any(loom, shuttle))))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "stacks made by hand, an allocator, and the host's contract")]

mod host;
mod paint;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use host::{Backing, StackHost, real_memory};
use slat::baselines::*;
use slat::dirty::*;
use slat::error::{FaultError, SlotError};
use slat::format::*;
use slat::shadow::*;
use slat::slots::*;
use slat::tables::*;
use slat::*;

const MOST_BYTES: usize = 2048;
const MOST_FAULT_BYTES: usize = 1024;
const FAULT: &str = "Vcpu::handle_fault";

const SMALL: u64 = 1 << 32;
const SMALL_BYTES: u64 = 64 << 20;
const HUGE: u64 = 2 << 30;
const HUGE_BYTES: u64 = 2 << 30;
const READ_ONLY: u64 = 5 << 30;
const SECRET: u64 = 6 << 30;
const TABLES: u64 = 7 << 30;
const TABLES_BYTES: u64 = 1 << 30;
const NOWHERE: u64 = 9 << 30;

/// The depth of each call, by its name and the scene.
static DEEPEST: Mutex<BTreeMap<(String, String), usize>> = Mutex::new(BTreeMap::new());

/// One VM and its host.
struct Scene<F: Format> {
    name: String,
    vm: Arc<Vm<StackHost, F>>,
}

/// Runs `call`, which calls `name` and nothing else that is deep, and records its depth.
fn measure<T>(scene: &str, name: &str, call: impl FnOnce() -> T) -> T {
    let mut call = Some(call);
    let mut answer = None;
    let bytes = paint::stack_bytes(|| answer = call.take().map(|call| call()));
    let mut deepest = DEEPEST.lock().unwrap();
    let most = deepest.entry((name.to_owned(), scene.to_owned())).or_default();
    *most = bytes.max(*most);
    answer.expect("it was called once")
}

impl<F: Format> Scene<F> {
    fn measure<T>(&self, name: &str, call: impl FnOnce() -> T) -> T {
        measure(&self.name, name, call)
    }

    fn set_region(&self, slot: u32, at: u64, size: u64, flags: MemoryRegionFlags, backing: Option<Backing>) {
        self.set_region_with(slot, at, size, flags, backing, None).unwrap();
    }

    fn set_region_with(
        &self,
        slot: u32,
        at: u64,
        size: u64,
        flags: MemoryRegionFlags,
        backing: Option<Backing>,
        userfault_bitmap: Option<UserfaultBitmap>,
    ) -> Result<(), SlotError> {
        self.measure("Vm::set_user_memory_region", || {
            self.vm.set_user_memory_region(MemoryRegion {
                slot,
                flags,
                guest_phys_addr: Gpa(at),
                memory_size: size,
                backing,
                userfault_bitmap,
            })
        })
    }

    /// Faults at `addresses`, one after the other. Returns the last outcome.
    fn faults(
        &self,
        vcpu: &mut Vcpu<StackHost, F>,
        addresses: impl IntoIterator<Item = u64>,
        access: Access,
    ) -> Result<Outcome, FaultError> {
        let mut last = Ok(Outcome::Resume);
        for gpa in addresses {
            self.measure(FAULT, || last = vcpu.handle_fault(Gpa(gpa), access));
        }
        last
    }
}

fn scene<F: Format>(name: &str, host: StackHost, config: Config) -> Scene<F> {
    let name = format!("{}, {name}", F::NAME);
    let vm = measure(&name, "Vm::new", || Vm::<StackHost, F>::new(host, config)).unwrap();
    Scene { name, vm: Arc::new(vm) }
}

fn pages(at: u64, nr: u64) -> impl Iterator<Item = u64> {
    (0..nr).map(move |page| at + page * PAGE_SIZE)
}

fn range(at: u64, size: u64) -> GfnRange {
    GfnRange::new(Gpa(at).gfn(), size / PAGE_SIZE)
}

/// The second stage, through all of its operations.
fn second_stage<F: Format>(name: &str, host: StackHost, config: Config, ring_entries: Option<u32>) {
    let scene = scene::<F>(name, host, config);
    let vm = &scene.vm;
    scene.measure("Vm::host, root, root_level, gpa_bits", || (vm.host(), vm.root(), vm.root_level(), vm.gpa_bits()));
    if let Some(nr_entries) = ring_entries {
        scene.measure("Vm::enable_dirty_ring", || vm.enable_dirty_ring(nr_entries)).unwrap();
    }
    let frames = |first, max_size| Some(Backing { first: Pfn(first), max_size, writable: true });
    let (small, huge) = (frames(1 << 20, PageSize::Size4K), frames(2 << 18, PageSize::Size1G));
    scene.set_region(0, HUGE, HUGE_BYTES, MemoryRegionFlags::empty(), huge);
    scene.set_region(1, SMALL, SMALL_BYTES, MemoryRegionFlags::empty(), small);
    scene.set_region(2, READ_ONLY, 2 << 20, MemoryRegionFlags::READONLY, frames(3 << 20, PageSize::Size2M));
    scene.set_region(3, SECRET, 4 << 20, MemoryRegionFlags::GUEST_MEMFD, frames(4 << 20, PageSize::Size2M));
    let mut vcpu = scene.measure("Vm::create_vcpu", || vm.create_vcpu()).unwrap();
    scene.measure("Vcpu::vm, dirty_ring", || (vcpu.vm(), vcpu.dirty_ring()));

    // Without memory, then with it; enough for some to be timed.
    vm.host().refuses_tables.store(true, Ordering::Relaxed);
    assert_eq!(scene.faults(&mut vcpu, [SMALL], Access::Read), Err(FaultError::OutOfMemory));
    vm.host().refuses_tables.store(false, Ordering::Relaxed);
    let resumes = Ok(Outcome::Resume);
    assert_eq!(scene.faults(&mut vcpu, pages(SMALL, 300), Access::Read), resumes);
    assert_eq!(scene.faults(&mut vcpu, pages(SMALL, 40), Access::Write), resumes);
    assert_eq!(scene.faults(&mut vcpu, pages(HUGE, 2), Access::Write), resumes);
    assert_eq!(scene.faults(&mut vcpu, [HUGE + (1 << 30)], Access::Read), resumes);
    assert_eq!(scene.faults(&mut vcpu, [READ_ONLY], Access::Read), resumes);
    assert!(matches!(scene.faults(&mut vcpu, [READ_ONLY], Access::Write), Ok(Outcome::Exit(Exit::Mmio { .. }))));
    assert!(matches!(scene.faults(&mut vcpu, [NOWHERE], Access::Read), Ok(Outcome::Exit(Exit::Mmio { .. }))));
    assert!(scene.faults(&mut vcpu, [1 << 63], Access::Read).is_err());
    let mut pre_fault = |at, size, access| {
        scene.measure("Vcpu::pre_fault_memory", || vcpu.pre_fault_memory(Gpa(at), size, access)).unwrap();
    };
    pre_fault(SMALL, 4 << 20, Access::Read);
    pre_fault(SMALL + (3 << 20), 2 << 20, Access::Read);
    pre_fault(HUGE, HUGE_BYTES, Access::Read);
    pre_fault(SECRET, 2 << 20, Access::Read);
    let scattered: Vec<Gpa> = (0..600).map(|nth| Gpa(SMALL + (8 << 20) + nth * 3 * PAGE_SIZE)).collect();
    let pre_fault_pages = scene.measure("Vcpu::pre_fault_pages", || vcpu.pre_fault_pages(&scattered, Access::Read));
    assert_eq!(pre_fault_pages, Ok(600));
    harvest_rings(&scene);

    query(&scene);
    scene.measure("Vm::age_range", || vm.age_range(range(SMALL, SMALL_BYTES))).unwrap();
    scene.measure("Vm::test_age_range", || vm.test_age_range(range(HUGE, HUGE_BYTES))).unwrap();
    assert_eq!(scene.faults(&mut vcpu, pages(SMALL, 40), Access::Read), resumes);

    log(&scene, &mut vcpu);
    split_and_recover(&scene, &mut vcpu);
    userfault(&scene, &mut vcpu);
    attributes(&scene, &mut vcpu);
    invalidate(&scene, &mut vcpu);

    // The remaining operations: a memslot moves, others are deleted.
    scene.set_region(1, NOWHERE, SMALL_BYTES, MemoryRegionFlags::LOG_DIRTY_PAGES, None);
    assert!(scene.set_region_with(1, HUGE, SMALL_BYTES, MemoryRegionFlags::empty(), None, None).is_err());
    scene.set_region(4, TABLES, TABLES_BYTES, MemoryRegionFlags::empty(), small);
    assert_eq!(scene.faults(&mut vcpu, [TABLES, TABLES + (2 << 20), TABLES + (900 << 20)], Access::Write), resumes);
    for slot in 0..5 {
        scene.set_region(slot, 0, 0, MemoryRegionFlags::empty(), None);
    }
    scene.measure("Vm::reclaim", || vm.reclaim());
    assert!(scene.measure("Vm::stats", || vm.stats().faults) > 300);
    scene.measure("drop of a Vcpu", || drop(vcpu));
    let Scene { name, vm, .. } = scene;
    measure(&name, "drop of a Vm", || drop(vm));
}

fn query<F: Format>(scene: &Scene<F>) {
    let vm = &scene.vm;
    let reader = scene.measure("Vm::read_tables", || vm.read_tables()).unwrap();
    assert_ne!(scene.measure("TableReader::nr_tables_on", || reader.nr_tables_on(NodeId(0))), 0);
    let mut cursor = scene.measure("TableReader::cursor", || reader.cursor());
    scene.measure("TableCursor::query", || {
        for gpa in pages(SMALL, 600).chain([HUGE, NOWHERE]) {
            assert_eq!(cursor.query(Gpa(gpa)).is_some(), gpa != NOWHERE, "{gpa:#x}");
        }
    });
    scene.measure("drop of a TableReader", || drop(reader));
}

fn harvest_rings<F: Format>(scene: &Scene<F>) {
    scene.measure("Vm::dirty_rings", || scene.vm.dirty_rings().count());
    for ring in scene.vm.dirty_rings() {
        let mut sum = 0;
        scene.measure("DirtyRing::entry, mark_harvested", || (ring.entry(0), ring.mark_harvested(0)));
        scene.measure("DirtyRing::nr_entries, first_index, is_soft_full", || {
            (ring.nr_entries(), ring.first_index(), ring.is_soft_full())
        });
        scene.measure("DirtyRing::harvest", || ring.harvest(|dirty| sum += dirty.page));
        scene.measure("Vm::reset_dirty_rings", || scene.vm.reset_dirty_rings()).unwrap();
    }
}

/// The dirty logs, turned on and off.
fn log<F: Format>(scene: &Scene<F>, vcpu: &mut Vcpu<StackHost, F>) {
    let vm = &scene.vm;
    let logs = MemoryRegionFlags::LOG_DIRTY_PAGES;
    scene.set_region(1, SMALL, SMALL_BYTES, logs, None);
    scene.set_region(0, HUGE, HUGE_BYTES, logs, None);
    let mut bitmap = vec![0; (HUGE_BYTES / PAGE_SIZE / 64) as usize];
    let uses_rings = vm.dirty_rings().next().is_some();
    for _ in 0..3 {
        let writes = [pages(SMALL, 64), pages(HUGE + (5 << 20), 64), pages(HUGE + (1 << 30), 3)];
        for gpa in writes.into_iter().flatten() {
            assert!(scene.faults(vcpu, [gpa], Access::Write).is_ok());
            if vcpu.dirty_ring().is_some_and(DirtyRing::is_soft_full) {
                let full = scene.faults(vcpu, [gpa], Access::Write);
                assert_eq!(full, Ok(Outcome::Exit(Exit::DirtyRingFull)));
                harvest_rings(scene);
            }
        }
        scene.measure("Vcpu::log_modifications", || vcpu.log_modifications(&[Gpa(SMALL), Gpa(HUGE), Gpa(NOWHERE)]));
        harvest_rings(scene);
        if uses_rings {
            assert!(scene.measure("Vm::nr_marked_dirty", || vm.nr_marked_dirty()).is_ok());
            continue;
        }
        scene.measure("Vm::mark_dirty", || vm.mark_dirty(1, 7, 2)).unwrap();
        scene.measure("Vm::is_marked_dirty", || vm.is_marked_dirty(1, 7)).unwrap();
        assert_ne!(scene.measure("Vm::nr_marked_dirty", || vm.nr_marked_dirty()), Ok(0));
        for slot in [1, 0] {
            scene.measure("Vm::get_dirty_log_range", || vm.get_dirty_log_range(slot, 0, 64, &mut bitmap)).unwrap();
            assert!(scene.measure("Vm::get_dirty_log", || vm.get_dirty_log(slot, &mut bitmap)).is_ok());
            let nr_pages = if slot == 1 { SMALL_BYTES } else { HUGE_BYTES } / PAGE_SIZE;
            let each = || vm.for_each_dirty(slot, 0, nr_pages, |_| core::ops::ControlFlow::Continue(()));
            scene.measure("Vm::for_each_dirty", each).unwrap();
            scene.measure("Vm::clear_dirty_log", || vm.clear_dirty_log(slot, 0, nr_pages, &bitmap)).unwrap();
        }
    }
    if vcpu.dirty_ring().is_some() {
        harvest_rings(scene);
    }
    scene.set_region(1, SMALL, SMALL_BYTES, MemoryRegionFlags::empty(), None);
    scene.set_region(0, HUGE, HUGE_BYTES, MemoryRegionFlags::empty(), None);
}

fn split_and_recover<F: Format>(scene: &Scene<F>, vcpu: &mut Vcpu<StackHost, F>) {
    let vm = &scene.vm;
    let all = range(HUGE, HUGE_BYTES);
    vcpu.pre_fault_memory(Gpa(HUGE), HUGE_BYTES, Access::Read).unwrap();
    let split = |largest| scene.measure("Vm::split_range", || vm.split_range(all, largest)).unwrap();
    let recover = || scene.measure("Vm::recover_range", || vm.recover_range(all)).unwrap();
    split(PageSize::Size2M);
    split(PageSize::Size4K);
    recover();
    split(PageSize::Size4K);
    // A fault that finds a PTE during a recovery; and an invalidation.
    let name = scene.name.clone();
    let (other, mut other_vcpu) = (Arc::clone(vm), vm.create_vcpu().unwrap());
    *vm.host().in_resolve.lock().unwrap() = Some(Box::new(move || {
        let fault = measure(&name, FAULT, || other_vcpu.handle_fault(Gpa(HUGE), Access::Write));
        assert!(fault.is_ok());
    }));
    vm.recover_range(all).unwrap();
    let name = scene.name.clone();
    *vm.host().in_resolve.lock().unwrap() = Some(Box::new(move || {
        let part = range(HUGE + PAGE_SIZE, PAGE_SIZE);
        drop(measure(&name, "Vm::invalidate_range", || other.invalidate_range(part)).unwrap());
    }));
    vm.split_range(all, PageSize::Size4K).unwrap();
    vm.recover_range(all).unwrap();
    *vm.host().in_resolve.lock().unwrap() = None;
    recover();
}

fn userfault<F: Format>(scene: &Scene<F>, vcpu: &mut Vcpu<StackHost, F>) {
    let vm = &scene.vm;
    let nr_words = (SMALL_BYTES / PAGE_SIZE / 64) as usize;
    let words: Arc<Vec<slat::baselines::AtomicU64>> = Arc::new((0..nr_words).map(|_| AtomicU64::new(1)).collect());
    let bitmap = UserfaultBitmap::new(words.clone(), PageSize::Size4K);
    scene.measure("UserfaultBitmap", || (bitmap.words().len(), bitmap.granularity()));
    let turned_on = scene.set_region_with(1, SMALL, SMALL_BYTES, MemoryRegionFlags::USERFAULT, None, Some(bitmap));
    assert_eq!(turned_on, Ok(()));
    let exits = scene.faults(vcpu, [SMALL], Access::Read);
    assert!(matches!(exits, Ok(Outcome::Exit(Exit::MemoryFault { .. }))), "{exits:?}");
    assert_eq!(scene.faults(vcpu, pages(SMALL + PAGE_SIZE, 63), Access::Write), Ok(Outcome::Resume));
    let checked = scene.measure("Vm::check_access", || vm.check_access(Gpa(SMALL + PAGE_SIZE), 8 * PAGE_SIZE));
    assert_eq!(checked, Ok(Outcome::Resume));
    words[0].store(3, Ordering::Release);
    scene.measure("Vm::rescan_userfault", || vm.rescan_userfault(1, 0, SMALL_BYTES / PAGE_SIZE)).unwrap();
    scene.set_region(1, SMALL, SMALL_BYTES, MemoryRegionFlags::empty(), None);
}

fn attributes<F: Format>(scene: &Scene<F>, vcpu: &mut Vcpu<StackHost, F>) {
    let vm = &scene.vm;
    vcpu.pre_fault_memory(Gpa(SECRET), 4 << 20, Access::Read).unwrap();
    let set = |at, size, attributes| {
        scene.measure("Vm::set_memory_attributes", || vm.set_memory_attributes(Gpa(at), size, attributes)).unwrap();
    };
    set(SECRET + PAGE_SIZE, 3 * PAGE_SIZE, MemoryAttributes::PRIVATE);
    assert_eq!(
        scene.measure("Vm::memory_attributes", || vm.memory_attributes(Gpa(SECRET + PAGE_SIZE))),
        Ok(MemoryAttributes::PRIVATE)
    );
    assert_eq!(scene.faults(vcpu, pages(SECRET, 5), Access::Read), Ok(Outcome::Resume));
    assert_eq!(scene.faults(vcpu, pages(SECRET, 5), Access::Write), Ok(Outcome::Resume));
    set(SECRET, 4 << 20, MemoryAttributes::PRIVATE);
    assert_eq!(scene.faults(vcpu, pages(SECRET, 5), Access::Write), Ok(Outcome::Resume));
}

fn invalidate<F: Format>(scene: &Scene<F>, vcpu: &mut Vcpu<StackHost, F>) {
    let vm = &scene.vm;
    let parts = [
        range(HUGE + 7 * PAGE_SIZE, PAGE_SIZE),
        range(HUGE + (1 << 30) + (9 << 20), 3 << 20),
        range(SMALL, SMALL_BYTES),
        range(SMALL + 3 * PAGE_SIZE, 2 * PAGE_SIZE),
        range(NOWHERE, PAGE_SIZE),
        range(HUGE, HUGE_BYTES),
        range(0, 1 << 38),
    ];
    for yields in [false, true] {
        vm.host().always_yields.store(yields, Ordering::Relaxed);
        for part in parts {
            vcpu.pre_fault_memory(Gpa(HUGE), HUGE_BYTES, Access::Read).unwrap();
            vcpu.pre_fault_memory(Gpa(SMALL), 1 << 20, Access::Read).unwrap();
            let invalidation = scene.measure("Vm::invalidate_range", || vm.invalidate_range(part)).unwrap();
            scene.measure("Invalidation::range", || invalidation.range());
            let meanwhile = [HUGE, SMALL, HUGE + (1 << 30)];
            assert_eq!(scene.faults(vcpu, meanwhile, Access::Write), Ok(Outcome::Resume));
            scene.measure("drop of an Invalidation", || drop(invalidation));
            assert_eq!(scene.faults(vcpu, meanwhile, Access::Read), Ok(Outcome::Resume));
        }
    }
    // More at once than there are places for.
    let many: Vec<_> = (0..40)
        .map(|nth| {
            let part = range(SMALL + nth * 16 * PAGE_SIZE, PAGE_SIZE);
            scene.measure("Vm::invalidate_range", || vm.invalidate_range(part)).unwrap()
        })
        .collect();
    assert_eq!(scene.faults(vcpu, pages(SMALL, 64), Access::Read), Ok(Outcome::Resume));
    for invalidation in many {
        scene.measure("drop of an Invalidation", || drop(invalidation));
    }
}

/// Shadow paging, through all of its operations.
fn shadow(strategy: ShadowStrategy, max_pages: u32, fault_around: FaultAround) {
    const MEMORY_BYTES: u64 = 32 << 20;
    const NR_SPACES: u64 = 24;
    let shadow = ShadowPaging { strategy, max_pages, ..ShadowPaging::default() };
    let config = Config::default().with_fault_around(fault_around);
    let name = format!("{}, {strategy:?}, {max_pages} shadow tables", Npt::NAME);
    let new = || Vm::with_shadow_paging(StackHost::default(), config, shadow);
    let vm = Arc::new(measure(&name, "Vm::with_shadow_paging", new).unwrap());
    let scene = Scene { name, vm };
    let vm = &scene.vm;
    let first = real_memory(MEMORY_BYTES as usize);
    let backing = Backing { first, max_size: PageSize::Size2M, writable: true };
    scene.set_region(0, 0, MEMORY_BYTES, MemoryRegionFlags::empty(), Some(backing));
    let mut vcpu = scene.measure("Vm::create_vcpu", || vm.create_vcpu()).unwrap();
    let resumes = Ok(Outcome::Resume);
    let write = |vcpu: &mut Vcpu<StackHost, Npt>, at: u64, entry: u64| {
        let bytes = entry.to_le_bytes();
        let written = scene.measure("Vcpu::write_guest_table", || vcpu.write_guest_table(Gpa(at), &bytes));
        assert_eq!(written, resumes);
    };
    // Address spaces: page tables of four levels, whose lowest maps 64 pages, and a large page.
    let root = |space: u64| 0x10_0000 + space * 0x1_0000;
    for space in 0..NR_SPACES {
        for level in 0..3 {
            write(&mut vcpu, root(space) + level * 0x1000, (root(space) + (level + 1) * 0x1000) | 0b111);
        }
        write(&mut vcpu, root(space) + 0x2008, 0x20_0000 | 0b1000_0111);
        for page in 0..64 {
            write(&mut vcpu, root(space) + 0x3000 + page * 8, (0x80_0000 + page * 0x1000) | 0b111);
        }
    }
    let registers = PagingRegisters { cr0: 1 << 31 | 1, cr3: root(0), cr4: 1 << 5 | 1 << 17, efer: 1 << 8 };
    let set = scene.measure("Vcpu::set_paging_registers", || vcpu.set_paging_registers(registers));
    assert_eq!(set, Ok(()));
    let write_register = || vcpu.write_paging_register(PagingRegister::Cr4, registers.cr4 | 1 << 7);
    assert_eq!(scene.measure("Vcpu::write_paging_register", write_register), resumes);
    scene.measure("Vcpu::paging_registers", || vcpu.paging_registers()).unwrap();
    let fault = |vcpu: &mut Vcpu<StackHost, Npt>, gva: u64, access| {
        let access = GuestAccess { access, privilege: Privilege::User };
        scene.measure("Vcpu::handle_page_fault", || vcpu.handle_page_fault(Gva(gva), access)).unwrap()
    };
    for turn in 0..3 {
        for space in 0..NR_SPACES {
            let has_pcids = matches!(strategy, ShadowStrategy::PcidTagged | ShadowStrategy::RootsByPcid);
            let pcid = if has_pcids { space } else { 0 };
            let loaded = scene.measure("Vcpu::load_cr3", || vcpu.load_cr3(root(space) | pcid));
            assert_eq!(loaded, resumes);
            scene.measure("Vcpu::entry", || vcpu.entry()).unwrap();
            for page in 0..64 {
                let _ = fault(&mut vcpu, page * PAGE_SIZE, if page % 2 == 0 { Access::Read } else { Access::Write });
            }
            let _ = fault(&mut vcpu, 0x20_1000, Access::Write);
            let _ = fault(&mut vcpu, 1 << 40, Access::Read);
            // The guest changes its lowest page table: by emulation, or directly where that is
            // allowed.
            write(&mut vcpu, root(space) + 0x3000, (0x80_0000 + turn * 0x1000) | 0b111);
            let faulted = scene.faults(&mut vcpu, [root(space) + 0x3000, root(space)], Access::Write);
            assert!(faulted.is_ok());
            assert_eq!(scene.measure("Vcpu::invlpg", || vcpu.invlpg(Gva(0))), resumes);
            for kind in 0..4 {
                let _ = scene.measure("Vcpu::invpcid", || vcpu.invpcid(kind, [pcid, 0])).unwrap();
            }
            scene.measure("Vcpu::entry", || vcpu.entry()).unwrap();
        }
        // The host's operations meanwhile.
        let part = range(0x80_0000 + turn * PAGE_SIZE, 40 * PAGE_SIZE);
        let invalidation = scene.measure("Vm::invalidate_range", || vm.invalidate_range(part)).unwrap();
        scene.measure("drop of an Invalidation", || drop(invalidation));
        scene.measure("Vm::age_range", || vm.age_range(range(0, MEMORY_BYTES))).unwrap();
        for flags in [MemoryRegionFlags::LOG_DIRTY_PAGES, MemoryRegionFlags::empty()] {
            scene.set_region(0, 0, MEMORY_BYTES, flags, None);
            for page in 0..64 {
                let _ = fault(&mut vcpu, page * PAGE_SIZE, Access::Write);
            }
            let mut bitmap = vec![0; (MEMORY_BYTES / PAGE_SIZE / 64) as usize];
            let _ = scene.measure("Vm::get_dirty_log", || vm.get_dirty_log(0, &mut bitmap));
        }
        // A write across two PTEs of the uppermost page table.
        let bytes = [0; 16];
        let written = scene.measure("Vcpu::write_guest_table", || vcpu.write_guest_table(Gpa(root(0) + 8), &bytes));
        assert_eq!(written, resumes);
    }
    assert_ne!(scene.measure("Vm::stats", || vm.stats().shadow_pages), 0);
    scene.set_region(0, 0, 0, MemoryRegionFlags::empty(), None);
    scene.measure("drop of a Vcpu", || drop(vcpu));
    let Scene { name, vm, .. } = scene;
    measure(&name, "drop of a Vm", || drop(vm));
}

/// Pinned memory: mapped, refused, unmapped and protected in parts, with and without memory.
fn pinned<F: Format>(name: &str, config: Config) {
    let scene = scene::<F>(&format!("pinned, {name}"), StackHost::default(), config);
    let vm = &scene.vm;
    let backing = Backing { first: Pfn(1 << 20), max_size: PageSize::Size4K, writable: true };
    scene.set_region(0, HUGE, HUGE_BYTES, MemoryRegionFlags::PINNED, Some(backing));
    let mut vcpu = scene.measure("Vm::create_vcpu", || vm.create_vcpu()).unwrap();
    let all = range(HUGE, HUGE_BYTES);
    let protection = Protection { writable: true, attributes: LeafAttributes::DATA };
    for largest in [PageSize::Size1G, PageSize::Size2M] {
        let mapping = Mapping { range: all, pfn: Pfn(2 << 18), protection, largest };
        vm.host().refuses_tables.store(true, Ordering::Relaxed);
        let _ = scene.measure("Vm::map_range", || vm.map_range(&mapping));
        let _ = scene.measure("Vm::unmap_range", || vm.unmap_range(range(HUGE + PAGE_SIZE, PAGE_SIZE)));
        vm.host().refuses_tables.store(false, Ordering::Relaxed);
        let _ = scene.measure("Vm::map_range", || vm.map_range(&mapping));
        scene.measure("Vm::translate", || vm.translate(Gpa(HUGE))).unwrap().unwrap();
        let _ = scene.faults(&mut vcpu, [HUGE, HUGE + 5 * PAGE_SIZE], Access::Execute);
        for part in [range(HUGE + PAGE_SIZE, PAGE_SIZE), range(HUGE + (1 << 30) - PAGE_SIZE, 1 << 22)] {
            let read_only = Protection { writable: false, ..protection };
            scene.measure("Vm::protect_range", || vm.protect_range(part, &read_only)).unwrap();
            scene.measure("Vm::unmap_range", || vm.unmap_range(part)).unwrap();
            let again = Mapping { range: part, pfn: Pfn(9 << 18), largest: PageSize::Size4K, ..mapping };
            scene.measure("Vm::map_range", || vm.map_range(&again)).unwrap();
            let one = Mapping { range: GfnRange::new(part.start, 1), ..again };
            scene.measure("Vm::map_range", || vm.map_range(&one)).unwrap_err();
        }
        scene.measure("Vm::unmap_range", || vm.unmap_range(all)).unwrap();
    }
}

/// The configurations with different code paths.
fn every_configuration<F: Format>() {
    let host = StackHost::default;
    for locking in [Locking::None, Locking::Shared, Locking::Exclusive] {
        second_stage::<F>(&format!("locking {locking:?}"), host(), Config::default().with_locking(locking), None);
    }
    let none = Config::default;
    pinned::<F>("no lock", none());
    pinned::<F>("a lock", none().with_locking(Locking::Shared));
    second_stage::<F>("barrier", StackHost::with_barrier(), none(), None);
    let unseen = StackHost::that_ignores_zapped_leaves;
    second_stage::<F>("leaves unseen", unseen(), none(), None);
    second_stage::<F>("leaves unseen, a lock", unseen(), none().with_locking(Locking::Shared), None);
    second_stage::<F>("rings", host(), none(), Some(256));
    let around = none().with_fault_around(FaultAround::Pages(FaultAround::MAX_PAGES));
    second_stage::<F>("fault-around", host(), around, None);
    second_stage::<F>("access by faults", host(), none().with_access_tracking(AccessTracking::Faults), None);
    second_stage::<F>("splits lazily", host(), none().with_huge_page_logging(HugePageLogging::SplitLazily), None);
    second_stage::<F>("marks whole", host(), none().with_huge_page_logging(HugePageLogging::MarkWhole), None);
    for manual in [ManualProtect::Enabled, ManualProtect::InitiallySet] {
        second_stage::<F>(&format!("manual protect {manual:?}"), host(), none().with_manual_protect(manual), None);
    }
    let leaf_by_leaf = none().with_dirty_tracking(DirtyTracking::WriteProtectLeaves);
    second_stage::<F>("leaf by leaf", host(), leaf_by_leaf, None);
    if F::HAS_DIRTY_BIT {
        second_stage::<F>("dirty bits", host(), none().with_dirty_tracking(DirtyTracking::DirtyBit), None);
    }
    if F::HAS_MODIFICATION_LOG {
        let tracking = DirtyTracking::PageModificationLog;
        second_stage::<F>("modification log", host(), none().with_dirty_tracking(tracking), None);
    }
}

/// Sources of the types whose calls are measured.
const SOURCES: [&str; 11] = [
    include_str!("../../src/vm.rs"),
    include_str!("../../src/vm/mapping.rs"),
    include_str!("../../src/vm/region.rs"),
    include_str!("../../src/vm/page_state.rs"),
    include_str!("../../src/vm/shadow.rs"),
    include_str!("../../src/vcpu.rs"),
    include_str!("../../src/vcpu/prefault.rs"),
    include_str!("../../src/vcpu/shadow.rs"),
    include_str!("../../src/second_stage/invalidate.rs"),
    include_str!("../../src/second_stage/query.rs"),
    include_str!("../../src/dirty/ring.rs"),
];

/// The words of `text` that may be names.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !character.is_alphanumeric() && character != '_')
}

/// The public methods that `measured` does not name.
fn left_out<'n>(measured: impl Iterator<Item = &'n str>) -> Vec<&'static str> {
    let measured: BTreeSet<&str> = measured.flat_map(words).collect();
    let lines = SOURCES.iter().flat_map(|source| source.lines());
    let methods = lines.filter_map(|line| words(line.trim_start().strip_prefix("pub fn ")?).next());
    methods.filter(|method| !measured.contains(method)).collect()
}

#[test]
fn no_call_takes_more_stack_than_a_hypervisor_has() {
    slat::for_each_format!(F => {
        every_configuration::<F>();
    });
    let with_pcids = [ShadowStrategy::RootsByPcid, ShadowStrategy::PcidTagged];
    for strategy in [ShadowStrategy::Baseline, ShadowStrategy::RootCache].into_iter().chain(with_pcids) {
        shadow(strategy, 4096, FaultAround::Off);
        shadow(strategy, ShadowPaging::MIN_PAGES, FaultAround::Pages(FaultAround::MAX_PAGES));
    }

    let mut by_bytes: Vec<_> =
        DEEPEST.lock().unwrap().iter().map(|((name, scene), &bytes)| (bytes, name.clone(), scene.clone())).collect();
    by_bytes.sort_by(|a, b| b.cmp(a));
    let mut named = BTreeSet::new();
    for (bytes, name, scene) in &by_bytes {
        if named.insert(name) {
            println!("{bytes:6} B  {name} ({scene})");
        }
    }
    println!("Faults, by scene:");
    for (bytes, _, scene) in by_bytes.iter().filter(|(_, name, _)| name == FAULT) {
        println!("{bytes:6} B  {scene}");
    }
    assert_eq!(left_out(by_bytes.iter().map(|(_, name, _)| name.as_str())), [""; 0], "not measured");
    // Without optimization, each value has a place of its own.
    if cfg!(debug_assertions) {
        return;
    }
    let most_for = |name: &str| if name == FAULT { MOST_FAULT_BYTES } else { MOST_BYTES };
    let is_too_deep = |(bytes, name, _): &(usize, String, String)| *bytes > most_for(name);
    let too_deep: Vec<_> = by_bytes.into_iter().filter(is_too_deep).collect();
    assert!(too_deep.is_empty(), "too much stack: {too_deep:#?}");
}
