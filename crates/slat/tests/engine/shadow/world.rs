//! The guest's memory, its page tables, and one CPU.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use slat::format::Npt;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::shadow::{GuestAccess, Gva, LocalFlush, PagingRegisters, Privilege, ShadowPaging, ShadowStrategy};
use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegionFlags, Outcome, PageSize, Pfn, Vcpu, Vm};

use crate::shadow_cpu::guest_memory::Memory;
use crate::shadow_cpu::{ADDRESS, Cached, P, U, W, index, preempt_count, region, registers_with_pcids, walk};

/// The difference between a host-physical address and a pointer.
const BIAS: u64 = 1 << 47;

/// Frames of the guest's memory.
pub const NR_FRAMES: u64 = 1 << 10;
/// Frames of the host for that memory.
const NR_HOST_FRAMES: u64 = 2 << 10;

type Hook = Box<dyn FnOnce() + Send>;

pub struct OneCpuHost {
    memory: Memory,
    /// The frame of each page of the guest.
    frames: Mutex<Vec<u64>>,
    live_tables: AtomicI64,
    flushes: AtomicU64,
    /// A hook that runs in the next flush.
    in_flush: Mutex<Option<Hook>>,
    /// A hook that runs while the engine holds the lock of a guest frame, and after how many more
    /// of them.
    under_lock: Mutex<Option<(u32, Hook)>>,
    yields: AtomicU64,
}

// SAFETY: the global allocator hands out each page-table page once. The one CPU drops what `flush`
// names.
unsafe impl Host for OneCpuHost {
    type Backing = ();

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        preempt_count::assert_enabled();
        self.live_tables.fetch_add(1, Ordering::Relaxed);
        // SAFETY: a page-table page has a size.
        Some(Hpa(unsafe { alloc_zeroed(layout) }.expose_provenance() as u64 + BIAS))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        self.live_tables.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: it came from `allocate_table`.
        unsafe { dealloc(self.table_ptr(table), layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut((table.0 - BIAS) as usize)
    }

    fn resolve(&self, _: &(), _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
        preempt_count::assert_enabled();
        let frames = self.frames.lock().unwrap();
        let frame = *frames.get(page as usize).ok_or(Unresolved::Gone)?;
        let block = page & !511;
        let is_large = (0..512).all(|nth| frames[(block + nth) as usize] == frames[block as usize] + nth);
        let max_size = if is_large { PageSize::Size2M } else { PageSize::Size4K };
        Ok(Resolved::memory(self.pfn(frame), max_size))
    }

    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        preempt_count::assert_disabled();
        let hook = {
            let mut under_lock = self.under_lock.lock().unwrap();
            if let Some((nr_more @ 1.., _)) = under_lock.as_mut() {
                *nr_more -= 1;
                None
            } else {
                under_lock.take()
            }
        };
        if let Some((_, hook)) = hook {
            preempt_count::as_another_thread(hook);
        }
        Some(self.table_ptr(frame.hpa()))
    }

    fn flush(&self, _: &[GfnRange]) {
        preempt_count::assert_enabled();
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let hook = self.in_flush.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
    }

    fn yield_now(&self) {
        let nr_yields = self.yields.fetch_add(1, Ordering::Relaxed);
        assert!(nr_yields < 1 << 20, "a thread waits for ever");
    }

    fn preempt_disable(&self) {
        preempt_count::disable();
    }

    fn preempt_enable(&self) {
        preempt_count::enable();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

impl OneCpuHost {
    pub fn during_next_flush(&self, hook: impl FnOnce() + Send + 'static) {
        *self.in_flush.lock().unwrap() = Some(Box::new(hook));
    }

    /// `hook` runs while the engine accesses guest memory, after `nr_more` accesses.
    pub fn under_lock_after(&self, nr_more: u32, hook: impl FnOnce() + Send + 'static) {
        *self.under_lock.lock().unwrap() = Some((nr_more, Box::new(hook)));
    }

    /// Whether the hook has run. If not, it will not.
    pub fn has_run_under_lock(&self) -> bool {
        self.under_lock.lock().unwrap().take().is_none()
    }

    pub fn nr_yields(&self) -> u64 {
        self.yields.load(Ordering::Relaxed)
    }

    fn pfn(&self, frame: u64) -> Pfn {
        Hpa(self.memory.start() + frame * 4096 + BIAS).pfn()
    }

    fn word(&self, hpa: Hpa) -> &AtomicU64 {
        // SAFETY: callers pass an aligned address of the guest's memory, or of a linked page-table
        // page.
        unsafe { &*self.table_ptr(hpa).cast::<AtomicU64>() }
    }
}

pub struct World {
    pub vm: Arc<Vm<OneCpuHost, Npt>>,
    pub vcpu: Vcpu<OneCpuHost, Npt>,
    pub privilege: Privilege,
    /// What the CPU has cached: the PTE, and the rights on the way to it, by PCID and page.
    tlb: HashMap<(u16, u64), Cached>,
    flushes: u64,
    /// The next frame for a page table of the guest.
    next_table: u64,
}

impl World {
    pub fn new(strategy: ShadowStrategy) -> World {
        World::with_pages(strategy, 4096)
    }

    pub fn with_pages(strategy: ShadowStrategy, max_pages: u32) -> World {
        let host = OneCpuHost {
            memory: Memory::new(NR_HOST_FRAMES, 2 << 20),
            frames: Mutex::new((0..NR_FRAMES).collect()),
            live_tables: AtomicI64::new(0),
            flushes: AtomicU64::new(0),
            in_flush: Mutex::new(None),
            under_lock: Mutex::new(None),
            yields: AtomicU64::new(0),
        };
        let shadow = ShadowPaging { strategy, max_pages, ..ShadowPaging::default() };
        let vm = Arc::new(Vm::with_shadow_paging(host, Config::default(), shadow).unwrap());
        vm.set_user_memory_region(region(NR_FRAMES, MemoryRegionFlags::empty(), Some(()))).unwrap();
        let vcpu = vm.create_vcpu().unwrap();
        World { vm, vcpu, privilege: Privilege::Supervisor, tlb: HashMap::new(), flushes: 0, next_table: 0 }
    }

    pub fn frame_word(&self, gfn: u64, index: u64) -> u64 {
        self.guest_word(gfn * 4096 + index * 8).load(Ordering::Relaxed)
    }

    pub fn write_frame(&self, gfn: u64, index: u64, value: u64) {
        self.guest_word(gfn * 4096 + index * 8).store(value, Ordering::Relaxed);
    }

    pub fn nr_flushes(&self) -> u64 {
        self.vm.host().flushes.load(Ordering::Relaxed)
    }

    pub fn backing_word(&self, frame: u64) -> u64 {
        self.vm.host().word(self.vm.host().pfn(frame).hpa()).load(Ordering::Relaxed)
    }

    fn guest_word(&self, gpa: u64) -> &AtomicU64 {
        let frame = self.vm.host().frames.lock().unwrap()[(gpa >> 12) as usize];
        self.vm.host().word(Hpa(self.vm.host().pfn(frame).hpa().0 + gpa % 4096))
    }

    /// Page tables from frame `root` on that map the page at `va` to frame `gfn`. Returns CR3.
    pub fn map(&mut self, root: u64, va: u64, gfn: u64, bits: u64) -> u64 {
        self.next_table = root + 1;
        self.map_more(root << 12, va, gfn, bits);
        root << 12
    }

    pub fn map_large(&mut self, root: u64, va: u64, gfn: u64, bits: u64) -> u64 {
        self.next_table = root + 1;
        self.map_at(root << 12, va, gfn, bits, 2);
        root << 12
    }

    /// Without the CPU, as a loader does before the guest runs.
    pub fn map_more(&mut self, cr3: u64, va: u64, gfn: u64, bits: u64) {
        self.map_at(cr3, va, gfn, bits, 1);
    }

    fn map_at(&mut self, cr3: u64, va: u64, gfn: u64, bits: u64, leaf_level: u32) {
        let mut table = cr3 & ADDRESS;
        for level in (leaf_level..=4).rev() {
            let place = table + index(va, level) * 8;
            let entry = self.guest_word(place).load(Ordering::Relaxed);
            if level == leaf_level {
                self.store(place, gfn << 12 | bits);
            } else if entry & P == 0 {
                table = self.next_table << 12;
                self.next_table += 1;
                self.store(place, table | P | W | U);
            } else {
                table = entry & ADDRESS;
            }
        }
    }

    /// As the hypervisor would emulate it.
    fn store(&mut self, place: u64, value: u64) {
        assert_eq!(self.vcpu.write_guest_table(Gpa(place), &value.to_le_bytes()), Ok(Outcome::Resume));
    }

    /// The address of the PTE of `level` for `va`.
    pub fn place_of(&self, cr3: u64, va: u64, level: u32) -> u64 {
        let mut table = cr3 & ADDRESS;
        let mut at = 4;
        loop {
            let place = table + index(va, at) * 8;
            if at == level {
                return place;
            }
            table = self.guest_word(place).load(Ordering::Relaxed) & ADDRESS;
            at -= 1;
        }
    }

    pub fn entry_of(&self, cr3: u64, va: u64) -> u64 {
        self.guest_word(self.place_of(cr3, va, 1)).load(Ordering::Relaxed)
    }

    pub fn set_entry(&mut self, cr3: u64, va: u64, value: u64) {
        let place = self.place_of(cr3, va, 1);
        self.store(place, value);
    }

    pub fn long_mode(&mut self, cr3: u64) {
        self.registers(PagingRegisters { cr0: 1 << 31 | 1 << 16 | 1, cr3, cr4: 1 << 5, efer: 1 << 8 | 1 << 11 });
    }

    pub fn long_mode_with_pcids(&mut self, cr3: u64) {
        self.registers(registers_with_pcids(cr3));
    }

    fn registers(&mut self, registers: PagingRegisters) {
        assert_eq!(self.vcpu.set_paging_registers(registers), Ok(()));
    }

    pub fn load_cr3(&mut self, value: u64) {
        assert_eq!(self.vcpu.load_cr3(value), Ok(Outcome::Resume));
    }

    pub fn invlpg(&mut self, va: u64) {
        assert_eq!(self.vcpu.invlpg(Gva(va)), Ok(Outcome::Resume));
    }

    pub fn invpcid(&mut self, kind: u64, pcid: u64, va: u64) -> Result<(), Exit> {
        match self.vcpu.invpcid(kind, [pcid, va]).unwrap() {
            Outcome::Resume => Ok(()),
            Outcome::Exit(exit) => Err(exit),
        }
    }

    pub fn read(&mut self, va: u64) -> Result<u64, Exit> {
        let hpa = self.translate(va, Access::Read)?.expect("a read is not emulated");
        Ok(self.vm.host().word(hpa).load(Ordering::Relaxed))
    }

    pub fn fetch(&mut self, va: u64) -> Result<u64, Exit> {
        let hpa = self.translate(va, Access::Execute)?.expect("a fetch is not emulated");
        Ok(self.vm.host().word(hpa).load(Ordering::Relaxed))
    }

    pub fn write(&mut self, va: u64, value: u64) -> Result<(), Exit> {
        match self.translate(va, Access::Write) {
            Ok(Some(hpa)) => self.vm.host().word(hpa).store(value, Ordering::Relaxed),
            Ok(None) => unreachable!(),
            Err(Exit::EmulateWrite { gpa }) => self.store(gpa.0, value),
            Err(exit) => return Err(exit),
        }
        Ok(())
    }

    fn translate(&mut self, va: u64, access: Access) -> Result<Option<Hpa>, Exit> {
        for _ in 0..100 {
            let entry = self.vcpu.entry().unwrap();
            let flushes = self.vm.host().flushes.load(Ordering::Relaxed);
            if flushes != self.flushes || entry.flush == LocalFlush::All {
                self.flushes = flushes;
                self.tlb.clear();
            }
            match entry.flush {
                LocalFlush::Page(gva) => self.tlb.retain(|key, _| key.1 != gva.0 >> 12),
                LocalFlush::Context => self.tlb.retain(|key, _| key.0 != entry.pcid),
                LocalFlush::None | LocalFlush::All => {}
            }
            let key = (entry.pcid, va >> 12);
            let cached = self.tlb.get(&key).copied().filter(|cached| cached.allows(access, self.privilege));
            if let Some(cached) = cached.or_else(|| self.walk(entry.root, entry.levels, va))
                && cached.allows(access, self.privilege)
            {
                self.tlb.insert(key, cached);
                return Ok(Some(Hpa(cached.page.0 + va % 4096)));
            }
            let access = GuestAccess { access, privilege: self.privilege };
            match self.vcpu.handle_page_fault(Gva(va), access).unwrap() {
                Outcome::Resume => {}
                Outcome::Exit(exit) => {
                    if matches!(exit, Exit::PageFault { .. }) {
                        self.tlb.remove(&key);
                    }
                    return Err(exit);
                }
            }
        }
        panic!("{va:#x} still faults");
    }

    fn walk(&self, root: Hpa, levels: u8, va: u64) -> Option<Cached> {
        let word = |place| self.vm.host().word(Hpa(place)).load(Ordering::Relaxed);
        walk(root, levels, va, |cached, level| word(cached.page.0 + index(va, level) * 8))
    }

    /// Moves page `gfn` to another frame, with its contents. Returns the frame.
    pub fn move_frame(&mut self, gfn: u64) -> u64 {
        let invalidation = self.vm.invalidate_range(GfnRange::new(Gfn(gfn), 1)).unwrap();
        let host = self.vm.host();
        let mut frames = host.frames.lock().unwrap();
        let new = frames.iter().copied().max().unwrap().max(NR_FRAMES) + 1;
        let old = std::mem::replace(&mut frames[gfn as usize], new);
        for word in 0..512 {
            let at = |frame| Hpa(host.pfn(frame).hpa().0 + word * 8);
            let value = host.word(at(old)).swap(0xdead, Ordering::Relaxed);
            host.word(at(new)).store(value, Ordering::Relaxed);
        }
        drop(invalidation);
        new
    }

    pub fn log(&self, on: bool) {
        let flags = if on { MemoryRegionFlags::LOG_DIRTY_PAGES } else { MemoryRegionFlags::empty() };
        self.vm.set_user_memory_region(region::<()>(NR_FRAMES, flags, None)).unwrap();
    }

    pub fn dirty(&self) -> Vec<u64> {
        let mut bitmap = [0; NR_FRAMES as usize / 64];
        self.vm.get_dirty_log(0, &mut bitmap).unwrap();
        (0..NR_FRAMES).filter(|&page| bitmap[page as usize / 64] >> (page % 64) & 1 != 0).collect()
    }

    /// Nothing is left when the guest is dropped.
    pub fn check_end(self) {
        preempt_count::assert_enabled();
        let World { vm, vcpu, .. } = self;
        drop(vcpu);
        let mut gone = region(NR_FRAMES, MemoryRegionFlags::empty(), None);
        gone.memory_size = 0;
        vm.set_user_memory_region(gone).unwrap();
        vm.reclaim();
        assert_eq!(vm.stats().shadow_leaves(), 0, "leaves are left");
        assert_eq!(vm.stats().shadow_pages, 0, "shadow tables are left");
        assert_eq!(vm.host().live_tables.load(Ordering::Relaxed), 1 + second_stage_tables(&vm), "tables are left");
    }
}

/// Page-table pages of the second stage below its root. (Some of a deleted memslot stay, where an
/// invalidation refined empty PTEs.)
fn second_stage_tables(vm: &Vm<OneCpuHost, Npt>) -> i64 {
    vm.read_tables().unwrap().nr_tables_on(slat::NodeId(0)) as i64 - 1
}
