//! The time of one change of a memslot's flags, while a vCPU works in another memslot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use slat::baselines::Locking;
use slat::{Access, Gfn, MemoryRegionFlags};

use super::arena::Memory;
use super::cpus::{cpus, pin};
use super::host;
use super::timing::{Clocks, Took, print_calls, print_head_of_calls};
use super::world::{self, GIB, VCPU_MEMORY};

/// Pages that the vCPU beside writes before it invalidates them.
const VCPU_PAGES: u64 = 1 << 13;
/// About so many pages are written for each requested pair: large memslots are flipped less often.
const PAGES_PER_PAIR: u64 = 1 << 21;
/// At most so many flips.
const FLIPS_PER_PAIR: u64 = 64;

/// The flips, in the order of their calls.
const NAMES: [&str; 6] = ["log on", "log off", "log on, nothing writable", "log off again", "to read-only", "and back"];

/// Times `nr_flips` of each kind on a slot of `nr_pages`, all of them mapped or none.
fn measure(memory: Memory, nr_pages: u64, nr_mapped: u64, nr_flips: u64) -> [Vec<Took>; 6] {
    memory.reset();
    let vm = world::new_vm(memory, Locking::None, nr_pages);
    let stop = AtomicBool::new(false);
    let cpus = cpus();
    let mut took = [const { Vec::new() }; 6];
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(cpus[0]);
            world::fault_until(&stop, &vm, VCPU_MEMORY, VCPU_PAGES)
        });
        let flipping = scope.spawn(|| {
            pin(cpus[cpus.len() - 1]);
            let clocks = Clocks::of_this_thread();
            let mut vcpu = vm.create_vcpu().unwrap();
            for _ in 0..nr_flips {
                (0..nr_mapped).for_each(|page| host::write_fault(&mut vcpu, page));
                let on_and_off: [&dyn Fn(); 2] =
                    [&|| host::log_dirty_pages(&vm, nr_pages), &|| world::stop_logging(&vm, nr_pages)];
                for (took, flip) in took.iter_mut().zip(on_and_off.iter().cycle().take(4)) {
                    took.push(clocks.time(flip));
                }
                (0..nr_mapped).for_each(|page| host::write_fault(&mut vcpu, page));
                took[4].push(clocks.time(|| world::recreate(&vm, nr_pages, MemoryRegionFlags::READONLY)));
                for page in 0..nr_mapped {
                    vcpu.handle_fault(Gfn(page).gpa(), Access::Read).map(drop).unwrap();
                }
                took[5].push(clocks.time(|| world::recreate(&vm, nr_pages, MemoryRegionFlags::empty())));
            }
            stop.store(true, Ordering::Relaxed);
        });
        flipping.join().unwrap();
    });
    took
}

pub(crate) fn table(memory: Memory, nr_pairs: usize, divisor: u64) {
    print_head_of_calls("Flips beside a vCPU (aim: below 50 µs)");
    for (size, nr_pages) in [("2 MiB", GIB / 512), ("16 MiB", GIB / 64), ("1 GiB", GIB)] {
        for (contents, nr_mapped) in [("written", nr_pages), ("empty", 0)] {
            let nr_flips = (PAGES_PER_PAIR / nr_pages).clamp(1, FLIPS_PER_PAIR) * nr_pairs as u64 / divisor.min(8);
            let took = measure(memory, nr_pages, nr_mapped, nr_flips.max(1));
            for (name, took) in NAMES.iter().zip(&took) {
                print_calls(&format!("{size}, {contents}: {name}"), took);
            }
        }
    }
}
