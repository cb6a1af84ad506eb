//! A guest that accesses a GiB of resident memory, page by page, with each window of fault-around.
//!
//! It faults where nothing is mapped: on the first page of each window, since all of the window is
//! resident. The count of leaves shows that nothing of it faults again.

use std::sync::Arc;
use std::time::Instant;

use slat::format::Npt;
use slat::tables::FaultAround;
use slat::{Access, Config, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, Vcpu, Vm};

use super::arena::Memory;
use super::bench_host::BenchHost;
use super::cells::{Frames, SMALL_PAGES};
use super::prefault::quartile;

const WINDOWS: [FaultAround; 5] =
    [FaultAround::Off, FaultAround::Pages(2), FaultAround::Pages(8), FaultAround::Pages(16), FaultAround::Pages(64)];

fn nr_pages(window: FaultAround) -> u64 {
    match window {
        FaultAround::Pages(nr_pages) => u64::from(nr_pages),
        _ => 1,
    }
}

/// The measured faults.
#[inline(never)]
fn go_through(vcpu: &mut Vcpu<BenchHost<Frames>, Npt>, step: u64, access: Access) {
    for page in (0..SMALL_PAGES).step_by(step as usize) {
        assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), access), Ok(Outcome::Resume));
    }
}

/// Nanoseconds a page.
fn measure(memory: Memory, window: FaultAround, access: Access, frames: Frames) -> f64 {
    let config = Config::default().with_fault_around(window);
    let vm: Arc<Vm<BenchHost<Frames>, Npt>> = Arc::new(Vm::new(BenchHost::new(memory), config).unwrap());
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::empty(),
        guest_phys_addr: Gpa(0),
        memory_size: SMALL_PAGES * PAGE_SIZE,
        backing: Some(frames),
        userfault_bitmap: None,
    })
    .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let begin = Instant::now();
    go_through(&mut vcpu, nr_pages(window), access);
    let elapsed = begin.elapsed();
    let stats = vm.stats();
    assert_eq!((stats.pages_4k(), stats.faults, stats.spurious), (SMALL_PAGES, SMALL_PAGES / nr_pages(window), 0));
    drop((vcpu, vm));
    memory.reset();
    elapsed.as_nanos() as f64 / SMALL_PAGES as f64
}

pub(crate) fn table(memory: Memory, nr_rounds: usize, part: &str) {
    let kinds = [(Access::Read, Frames::SmallContiguous), (Access::Read, Frames::SmallSingle)];
    let cells: Vec<(FaultAround, Access, Frames)> = kinds
        .into_iter()
        .flat_map(|(access, frames)| WINDOWS.map(|window| (window, access, frames)))
        .filter(|cell| name(cell).contains(part))
        .collect();
    if cells.is_empty() {
        return;
    }
    let mut times_ns = vec![Vec::new(); cells.len()];
    for _ in 0..nr_rounds {
        for (&(window, access, frames), times_ns) in cells.iter().zip(&mut times_ns) {
            times_ns.push(measure(memory, window, access, frames));
        }
    }
    println!("Faults of a guest that accesses 1 GiB of resident memory: ns per page, quartiles.");
    println!("{:<44} {:>9} {:>23}", "window", "faults", "one");
    for (cell, times_ns) in cells.iter().zip(&times_ns) {
        println!(
            "{:<44} {:>9} {:>7.2} {:>7.2} {:>7.2}",
            name(cell),
            SMALL_PAGES / nr_pages(cell.0),
            quartile(times_ns, 1),
            quartile(times_ns, 2),
            quartile(times_ns, 3),
        );
    }
}

fn name((window, access, frames): &(FaultAround, Access, Frames)) -> String {
    format!("around {window:?}, {} {access:?}", frames.name())
}
