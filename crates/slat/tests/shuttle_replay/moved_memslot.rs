//! A memslot that moves, ceases to log and logs again, and is deleted in the end, beside writers and
//! harvests. None of its places overlaps another.

use std::sync::atomic::AtomicU64 as Number;

use super::*;

/// Schedules of each kind.
const SCHEDULES: usize = 200;
const DELETE: u64 = 2;
const CHANGE: u64 = 3;
const PAGES_OF_MEMSLOT: u64 = 2;
const PLACES: [u64; 4] = [0, PAGES_OF_MEMSLOT, BLOCK, BLOCK + PAGES_OF_MEMSLOT];

struct Scene<F: Format> {
    vm: TestVm<F>,
    /// Where the memslot is, or is about to be.
    place: Number,
}

impl<F: Format> Scene<F> {
    /// Writes to pages of the memslot, mostly where it is.
    fn write(&self, index: usize) {
        let mut vcpu = self.vm.create_vcpu().unwrap();
        for _ in 0..8 {
            let place = if random(4) == 0 { pick(&PLACES) } else { self.place.load(Ordering::SeqCst) };
            let gfn = place + random(PAGES_OF_MEMSLOT);
            if !cpu_writes(&self.vm, index, gfn) {
                let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), Access::Write).unwrap();
                assert!(matches!(outcome, Outcome::Resume | Outcome::Exit(_)), "{outcome:?}");
            }
        }
    }

    /// Harvests all marks, or clears some of them unread.
    fn harvest(&self) {
        for _ in 0..10 {
            let mut bitmap = [pick(&[0b1, 0b10, 0b11])];
            if random(3) != 0 {
                events::record(Event::HarvestBegins { masks: None });
                let _: Result<u64, _> = self.vm.get_dirty_log(0, &mut bitmap);
            } else {
                events::record(Event::HarvestBegins { masks: Some([bitmap[0], 0]) });
                let _: Result<u64, _> = self.vm.clear_dirty_log(0, 0, PAGES_OF_MEMSLOT, &bitmap);
            }
            events::record(Event::HarvestEnds);
        }
    }

    fn call(&self, kind: u64, flags: MemoryRegionFlags, start: u64) {
        let nr_pages = if kind == DELETE { 0 } else { PAGES_OF_MEMSLOT };
        events::record(Event::MemslotBegins { kind, id: 0, start, end: start + nr_pages, backing: 0 });
        self.vm.set_user_memory_region(region(0, flags, start, nr_pages, None)).unwrap();
        events::record(Event::CallEnds { is_ok: true });
    }

    fn change(&self) {
        let mut flags = pick(&[MemoryRegionFlags::LOG_DIRTY_PAGES, MemoryRegionFlags::empty()]);
        self.call(CHANGE, flags, self.place.load(Ordering::SeqCst));
        for _ in 0..8 {
            // Its flags, its place, or both at once.
            let what = random(8);
            if what < 3 {
                flags ^= MemoryRegionFlags::LOG_DIRTY_PAGES;
            }
            if what >= 2 {
                self.place.store(pick(&PLACES), Ordering::SeqCst);
            }
            self.call(CHANGE, flags, self.place.load(Ordering::SeqCst));
        }
        if random(2) == 0 {
            self.call(DELETE, flags, 0);
        }
    }
}

fn scenario<F: Format>() {
    events::start();
    let config = log_config(DirtyTracking::WriteProtectLeaves);
    let vm = new_vm::<F>(MovingHost::new(PageSize::Size4K), config, MemoryRegionFlags::empty(), PAGES_OF_MEMSLOT);
    is_record_of("moved_memslot", &vm);
    let scene = Arc::new(Scene { vm, place: Number::new(0) });
    let bodies: [fn(&Arc<Scene<F>>); 5] = [
        |scene| scene.write(0),
        |scene| scene.write(1),
        |scene| scene.harvest(),
        |scene| scene.harvest(),
        |scene| scene.change(),
    ];
    on_threads(&scene, bodies);
    save();
}

#[test]
fn memslots_that_move_while_they_log() {
    check_less(SCHEDULES, scenario::<Tiny<2>>);
}
