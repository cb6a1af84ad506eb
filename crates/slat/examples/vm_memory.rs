//! A VMM whose devices use the traits of the crate vm-memory, as rust-vmm's do. Their writes are in
//! the same dirty log as those of the vCPUs ([`SlotBitmap`]), and an access for which a vCPU would
//! exit is refused to them ([`CheckedMemory`]).
//!
//! The guest is restored from a snapshot whose pages are fetched when they are needed; then writes
//! are logged.
//!
//!     cargo run -p slat --example vm_memory
#![expect(unsafe_code, reason = "a host promises memory, and a CPU follows addresses")]

use std::alloc::{Layout, alloc, dealloc};
use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::Npt;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::slots::{MemoryFaultFlags, UserfaultBitmap};
use slat::{
    Access, CheckedMemory, Config, Exit, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Outcome,
    PAGE_SIZE, PageSize, Pfn, SlotBitmap, Vcpu, Vm,
};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, GuestRegionMmap};

const PROT_READ_WRITE: i32 = 0x3;
const NR_PAGES: u64 = 256;

/// A VMM in user space: "host-physical" addresses are its own.
struct Vmm;

/// The address of a memslot's memory.
struct Mapped(u64);

type Memory = GuestMemoryMmap<SlotBitmap<Vmm, Npt>>;

// SAFETY: page-table pages come from the heap; the memory of a memslot stays mapped at its place;
// the "CPU" below caches nothing.
unsafe impl Host for Vmm {
    type Backing = Mapped;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        // SAFETY: a page-table page has a size.
        let table = unsafe { alloc(layout) };
        (!table.is_null()).then(|| Hpa(table.expose_provenance() as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: slat frees what it has allocated.
        unsafe { dealloc(self.table_ptr(table), layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(table.0 as usize)
    }

    fn resolve(&self, mapped: &Mapped, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        Ok(Resolved::memory(Pfn(mapped.0 / PAGE_SIZE + page), PageSize::Size4K))
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// The snapshot: page n is full of n + 1. A bit of `missing` is set until its page has been
/// fetched.
struct Snapshot {
    missing: Arc<Vec<AtomicU64>>,
}

impl Snapshot {
    fn new() -> Snapshot {
        Snapshot { missing: Arc::new((0..NR_PAGES / 64).map(|_| AtomicU64::new(u64::MAX)).collect()) }
    }

    fn bitmap(&self) -> UserfaultBitmap {
        UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&self.missing), PageSize::Size4K)
    }

    /// Fetches the page of a memory fault.
    fn fetch(&self, memory: &Memory, gpa: Gpa) -> Result<(), GuestMemoryError> {
        let page = gpa.0 / PAGE_SIZE;
        memory.write_slice(&[page as u8 + 1; PAGE_SIZE as usize], GuestAddress(page * PAGE_SIZE))?;
        // Release: a fault that reads the bit as clear observes the full page.
        self.missing[page as usize / 64].fetch_and(!(1 << (page % 64)), Ordering::Release);
        Ok(())
    }

    fn nr_missing(&self) -> u32 {
        self.missing.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum()
    }
}

/// A disk. It does not know slat: any guest memory of vm-memory will do.
fn read_sectors(memory: &impl GuestMemory, to: GuestAddress, sectors: &[u8]) -> Result<(), GuestMemoryError> {
    memory.write_slice(sectors, to)
}

/// The page that must be fetched before the access can be made, if the access was refused for that.
fn missing_page(error: &GuestMemoryError) -> Option<Gpa> {
    let GuestMemoryError::IOError(error) = error else { return None };
    match error.get_ref()?.downcast_ref()? {
        Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa, .. } => Some(*gpa),
        _ => None,
    }
}

/// The guest stores `value` at `gpa`, through the page tables, as a CPU does, with an exit for each
/// page that must be fetched first.
fn store(
    vcpu: &mut Vcpu<Vmm, Npt>,
    memory: &Memory,
    snapshot: &Snapshot,
    gpa: Gpa,
    value: u64,
) -> Result<u32, Box<dyn StdError>> {
    let mut nr_fetched = 0;
    loop {
        let tables = vcpu.vm().read_tables()?;
        if let Some(found) = tables.cursor().query(gpa).filter(|found| found.writable) {
            let hpa = found.pfn.hpa().0 + gpa.0 % PAGE_SIZE;
            let word: *mut u64 = std::ptr::with_exposed_provenance_mut(hpa as usize);
            // SAFETY: the page tables lead to the memslot's memory, which is mapped, and the
            // address is that of a word in it.
            unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Relaxed);
            return Ok(nr_fetched);
        }
        drop(tables);
        match vcpu.handle_fault(gpa, Access::Write)? {
            Outcome::Resume => {}
            Outcome::Exit(Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa, .. }) => {
                snapshot.fetch(memory, gpa)?;
                nr_fetched += 1;
            }
            Outcome::Exit(exit) => return Err(format!("an unexpected exit: {exit:?}").into()),
        }
    }
}

fn main() -> Result<(), Box<dyn StdError>> {
    let vm = Arc::new(Vm::<Vmm, Npt>::new(Vmm, Config::default())?);
    let snapshot = Snapshot::new();

    // The region's bitmap is the dirty log of the memslot.
    let mapping =
        MmapRegionBuilder::new_with_bitmap((NR_PAGES * PAGE_SIZE) as usize, SlotBitmap::new(Arc::clone(&vm), 0))
            .with_mmap_prot(PROT_READ_WRITE)
            .build()?;
    let region = |flags, backing, userfault_bitmap| MemoryRegion {
        slot: 0,
        flags,
        guest_phys_addr: Gpa(0),
        memory_size: NR_PAGES * PAGE_SIZE,
        backing,
        userfault_bitmap,
    };
    let backing = Mapped(mapping.as_ptr().expose_provenance() as u64);
    vm.set_user_memory_region(region(MemoryRegionFlags::USERFAULT, Some(backing), Some(snapshot.bitmap())))?;
    let mapped = GuestRegionMmap::new(mapping, GuestAddress(0)).ok_or("the region is too high")?;
    // The devices' memory: it refuses pages that were not fetched.
    let memory = CheckedMemory::new(Memory::from_regions(vec![mapped])?, Arc::clone(&vm));

    // A vCPU accesses page 3, which is fetched.
    let mut vcpu = vm.create_vcpu()?;
    assert_eq!(store(&mut vcpu, memory.unchecked(), &snapshot, Gpa(0x3008), 42)?, 1);
    assert_eq!(memory.read_obj::<u64>(GuestAddress(0x3008))?, 42);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x3010))?, 4, "the rest of the page is as in the snapshot");
    println!("the vCPU's page was fetched: {} are missing", snapshot.nr_missing());

    // A disk writes two sectors across the border of pages 7 and 8, which were not fetched: nothing
    // is written until they are.
    let to = GuestAddress(0x8000 - 512);
    while let Err(error) = read_sectors(&memory, to, &[0xaa; 1024]) {
        let gpa = missing_page(&error).ok_or(error)?;
        println!("the disk's access to the page at {gpa} was refused");
        snapshot.fetch(memory.unchecked(), gpa)?;
    }
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x7000))?, 8);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x8000))?, 0xaa);
    assert_eq!(snapshot.nr_missing(), NR_PAGES as u32 - 3);

    // From now on writes are logged: those of the vCPU and those of the disk, in one log.
    let flags = MemoryRegionFlags::USERFAULT | MemoryRegionFlags::LOG_DIRTY_PAGES;
    vm.set_user_memory_region(region(flags, None, None))?;
    store(&mut vcpu, memory.unchecked(), &snapshot, Gpa(0x3008), 43)?;
    read_sectors(&memory, to, &[0xbb; 1024])?;
    let mut bitmap = [0; NR_PAGES as usize / 64];
    assert_eq!(vm.get_dirty_log(0, &mut bitmap)?, 3);
    assert_eq!(bitmap, [1 << 3 | 1 << 7 | 1 << 8, 0, 0, 0]);
    println!("dirty, by the vCPU and by the disk: pages 3, 7 and 8");
    Ok(())
}
