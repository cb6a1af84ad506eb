//! The smallest host that works. Host memory is one vector, and the only CPU is a function that
//! walks the page tables as AMD's hardware does. The host itself uses `core` alone; std is there
//! for `main`, `Vec` and `println!`.
//!
//!     cargo run -p slat --example smallest_host
#![expect(unsafe_code, reason = "a host promises memory, and a CPU follows addresses")]

use core::alloc::Layout;
use core::sync::atomic::{AtomicU64, Ordering};
use slat::format::*;
use slat::host::*;
use slat::*;
use std::sync::Arc;

/// Host memory has so many frames for page-table pages, and then as many for the guest.
const FIRST_GUEST_FRAME: u64 = 64;

#[repr(C, align(4096))]
struct Frame([AtomicU64; 512]);

/// Host-physical address 0 is the first byte of `memory`. Bit n of `free` is set while table frame
/// n is free.
struct Arena {
    memory: Vec<Frame>,
    free: AtomicU64,
}

impl Arena {
    fn word(&self, hpa: u64) -> &AtomicU64 {
        &self.memory[(hpa / PAGE_SIZE) as usize].0[(hpa % PAGE_SIZE / 8) as usize]
    }
}

// Only a `Locking` other than the default, `None`, puts threads to sleep.
// SAFETY: a table frame has one owner at a time, the thread that cleared its bit. The vector never
// grows, so its frames stay where they are. The frames of a memslot never change. The CPU below
// caches nothing, so there is nothing to flush.
unsafe impl Host for Arena {
    /// The frame of a memslot's first page; the others follow it.
    type Backing = Pfn;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        assert_eq!(layout.size() as u64, PAGE_SIZE, "every table of the format `Npt` is one frame");
        let take_lowest = |free: u64| free.checked_sub(1).map(|less| free & less);
        // Acquire: observes that the last owner is done with the frame.
        let free = self.free.fetch_update(Ordering::Acquire, Ordering::Relaxed, take_lowest).ok()?;
        Some(Hpa(u64::from(free.trailing_zeros()) * PAGE_SIZE))
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        self.free.fetch_or(1 << (table.0 / PAGE_SIZE), Ordering::Release);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.memory.as_ptr().cast::<u8>().cast_mut().wrapping_add(table.0 as usize)
    }

    fn resolve(&self, first: &Pfn, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        Ok(Resolved::memory(Pfn(first.0 + page), PageSize::Size4K))
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn timestamp_ns(&self) -> u64 {
        0 // There is no clock, and so the statistics have no times.
    }
}

/// A CPU's walk with nested paging: four levels, nine bits each (AMD APM vol. 2, 5.3 and 15.25.5).
/// `None`: a fault.
fn walk(host: &Arena, root: Hpa, gpa: Gpa, access: Access) -> Option<u64> {
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    // Bit 0: present. Bit 1: writable.
    let needed = if access == Access::Write { 0b11 } else { 0b01 };
    let mut address = root.0;
    for level in (0..4).rev() {
        let index = gpa.0 >> (12 + 9 * level) & 511;
        let entry = host.word(address + index * 8).load(Ordering::Acquire);
        address = (entry & needed == needed).then_some(entry & ADDRESS)?;
    }
    Some(address + gpa.0 % PAGE_SIZE)
}

/// The target of the guest's access: the walk, with a fault wherever the page tables do not allow
/// it.
fn translate(vcpu: &mut Vcpu<Arena, Npt>, gpa: Gpa, access: Access) -> Result<u64, Exit> {
    loop {
        if let Some(hpa) = walk(vcpu.vm().host(), vcpu.vm().root(), gpa, access) {
            return Ok(hpa);
        }
        println!("  fault: {access:?} at {gpa}");
        match vcpu.handle_fault(gpa, access).expect("there is memory, and the address is valid") {
            Outcome::Resume => {}
            Outcome::Exit(exit) => return Err(exit),
        }
    }
}

fn main() -> Result<(), Error> {
    let memory = (0..2 * FIRST_GUEST_FRAME).map(|_| Frame([const { AtomicU64::new(0) }; 512])).collect();
    let arena = Arena { memory, free: AtomicU64::new(u64::MAX) };
    let vm = Arc::new(Vm::<Arena, Npt>::new(arena, Config::default())?);
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
        guest_phys_addr: Gpa(0x10_0000),
        memory_size: 64 * PAGE_SIZE,
        backing: Some(Pfn(FIRST_GUEST_FRAME)),
        userfault_bitmap: None,
    })?;
    let mut vcpu = vm.create_vcpu()?;

    println!("the guest writes 42 into its page 3");
    let hpa = translate(&mut vcpu, Gpa(0x10_3008), Access::Write).expect("the memslot exists");
    vm.host().word(hpa).store(42, Ordering::Relaxed);
    println!("  guest-physical 0x103008 is host-physical {hpa:#x}");
    assert_eq!(hpa, (FIRST_GUEST_FRAME + 3) * PAGE_SIZE + 8);

    println!("it reads that again, without a fault, and then where there is no memory");
    assert_eq!(translate(&mut vcpu, Gpa(0x10_3008), Access::Read), Ok(hpa));
    let exit = translate(&mut vcpu, Gpa(0xfee0_0000), Access::Read).expect_err("no slot is there");
    println!("  exit: {exit:?}");
    assert_eq!(exit, Exit::Mmio { gpa: Gpa(0xfee0_0000), access: Access::Read });

    let mut bitmap = [0];
    assert_eq!(vm.get_dirty_log(0, &mut bitmap)?, 1);
    println!("dirty log: one page, bitmap {:#b}", bitmap[0]);
    assert_eq!(bitmap, [1 << 3]);
    // The harvest write-protected the page, so that the next write faults.
    assert_eq!(walk(vm.host(), vm.root(), Gpa(0x10_3008), Access::Write), None);

    println!("the host invalidates pages 0 to 7, and ends the invalidation");
    let invalidation = vm.invalidate_range(GfnRange::new(Gfn(0x100), 8))?;
    assert_eq!(walk(vm.host(), vm.root(), Gpa(0x10_3008), Access::Read), None);
    drop(invalidation);
    assert_eq!(translate(&mut vcpu, Gpa(0x10_3008), Access::Read), Ok(hpa));

    let stats = vm.stats();
    println!(
        "{} faults, {} exit, {} page-table pages, {} flushes",
        stats.faults,
        stats.exits,
        stats.live_tables(),
        stats.flushes
    );
    assert_eq!((stats.faults, stats.exits), (3, 1));
    Ok(())
}
