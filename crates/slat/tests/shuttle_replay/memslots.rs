//! Memslots that are made, moved, changed and deleted, while the host moves pages. No page-table page is
//! unlinked, and all are there from the beginning.

use std::sync::atomic::AtomicU64 as Number;

use super::*;

/// Schedules of each kind.
const SCHEDULES: usize = 120;
const INVALIDATION: u64 = 0;
const MAKE: u64 = 1;
const DELETE: u64 = 2;
const CHANGE: u64 = 3;
/// The pages of the memslots. Another page of each block stays mapped, by a memslot of its own.
const PAGES: [u64; 6] = [0, 1, 2, BLOCK, BLOCK + 1, BLOCK + 2];
const OTHERS: [u64; 2] = [3, BLOCK + 3];
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

struct Scene<F: Format> {
    vm: TestVm<F>,
    nr_backings: Number,
}

impl<F: Format> Scene<F> {
    /// One of these changes of memslot number `id`, which has two pages or one. To change it is to move it or
    /// to change its flags.
    fn change(&self, kind: u64, id: u32, start: u64) {
        let nr_pages = if kind == DELETE { 0 } else { 2 - u64::from(id) };
        let flags = if kind == CHANGE { pick(&[NO_FLAGS, MemoryRegionFlags::LOG_DIRTY_PAGES]) } else { NO_FLAGS };
        let nr = self.nr_backings.fetch_add(1, Ordering::SeqCst);
        let memory = (kind == MAKE).then(|| backing(nr << 24, PageSize::Size4K));
        events::record(Event::MemslotBegins { kind, id: id.into(), start, end: start + nr_pages, backing: nr });
        let is_ok = self.vm.set_user_memory_region(region(id, flags, start, nr_pages, memory)).is_ok();
        events::record(Event::CallEnds { is_ok });
    }

    fn change_memslots(&self) {
        for _ in 0..3 {
            self.change(pick(&[MAKE, MAKE, DELETE, CHANGE, CHANGE]), random(2) as u32, pick(&[0, 1, BLOCK]));
        }
    }

    /// Moves pages of the host.
    fn move_pages(&self) {
        for _ in 0..2 {
            let range = pick(&[GfnRange::new(Gfn(0), 3), GfnRange::new(Gfn(pick(&PAGES)), 1)]);
            let (start, end) = (range.start.0, range.end.0);
            events::record(Event::MemslotBegins { kind: INVALIDATION, id: 0, start, end, backing: 0 });
            let invalidation = self.vm.invalidate_range(range).unwrap();
            for gfn in PAGES.into_iter().filter(|&gfn| range.contains(Gfn(gfn))) {
                let nr_moves = self.vm.host().moves(gfn).fetch_add(1, Ordering::SeqCst) + 1;
                events::record(Event::HostChanges { gfn, pfn: MovingHost::place(gfn, nr_moves).0 });
            }
            drop(invalidation);
            events::record(Event::CallEnds { is_ok: true });
        }
    }
}

fn scenario<F: Format>() {
    let mut host = MovingHost::new(PageSize::Size4K);
    host.is_always_writable = true;
    host.blocks = true;
    let vm: TestVm<F> = Arc::new(Vm::new(host, Config::default()).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    for (id, gfn) in (8..).zip(OTHERS) {
        let memory = backing(0, PageSize::Size4K);
        vm.set_user_memory_region(region(id, NO_FLAGS, gfn, 1, Some(memory))).unwrap();
        assert_eq!(vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    }
    drop(vcpu);
    events::start();
    is_record_of("memslots", &vm);
    for gfn in OTHERS {
        let cell = find(&vm, gfn).unwrap().address();
        events::record(Event::CpuTranslates { cpu: 0, gfn, cell });
    }
    let scene = Arc::new(Scene { vm, nr_backings: Number::new(1) });
    scene.change(MAKE, 0, 0);
    scene.change(MAKE, 1, BLOCK);
    let pages = [pick(&PAGES), pick(&[0, 1])];
    type Body<F> = Box<dyn FnOnce(&Arc<Scene<F>>) + Send>;
    let guests =
        (0..NR_GUESTS).map(|index| Box::new(move |scene: &Arc<Scene<F>>| guest(&scene.vm, index, pages)) as Body<F>);
    let changes: [Body<F>; 3] = [
        Box::new(|scene| scene.change_memslots()),
        Box::new(|scene| scene.change_memslots()),
        Box::new(|scene| scene.move_pages()),
    ];
    on_threads(&scene, guests.chain(changes));
    save();
}

#[test]
fn memslots_that_come_and_go() {
    check_less(SCHEDULES, scenario::<Tiny<2>>);
}
