//! Mappings that fail half way: another call has mapped a page of theirs, or unmaps one at this
//! moment, or there is no memory. Other calls unmap what such a mapping has mapped so far.

use super::pinned::{PROTECTION, PinnedVm, guest, new_vm};
use super::*;
use slat::tables::Mapping;

/// Maps pages to frames that no other call has.
fn map<F: Format>(vm: &PinnedVm<F>, first: u64, nr_pages: u64) {
    let (range, pfn) = (GfnRange::new(Gfn(first), nr_pages), vm.host().fresh_frame() + first);
    events::record(Event::MappingBegins { start: first, end: range.end.0, pfn });
    let mapping = Mapping { range, pfn: Pfn(pfn), protection: PROTECTION, largest: PageSize::Size2M };
    let is_ok = vm.map_range(&mapping).is_ok();
    events::record(Event::CallEnds { is_ok });
    vm.host().step();
}

/// Maps a block, and pages of the next, once: a block with a page-table page has PTEs that stand
/// for several pages. There is perhaps no memory for a page-table page of the next.
fn map_block_and_more<F: Format>(vm: &PinnedVm<F>) {
    if random(2) == 0 {
        vm.host().refuse_this_thread();
    }
    map(vm, 0, BLOCK + 1 + random(2));
}

fn map_pages<F: Format>(vm: &PinnedVm<F>) {
    for _ in 0..3 {
        map(vm, BLOCK + random(2), 1 + random(2));
    }
}

fn unmap<F: Format>(vm: &PinnedVm<F>) {
    for _ in 0..3 {
        let page = |first: u64| GfnRange::new(Gfn(first + random(2)), 1);
        let block = GfnRange::new(Gfn(0), BLOCK);
        let range =
            pick(&[block, page(0), page(BLOCK), GfnRange::new(Gfn(0), BLOCK + 1), GfnRange::new(Gfn(0), NR_PAGES)]);
        if random(3) == 0 {
            drop(vm.invalidate_range(range).unwrap());
        } else {
            vm.unmap_range(range).unwrap();
        }
    }
}

fn undo<F: Format>() {
    events::start();
    let vm = new_vm::<F>();
    is_record_of("undo", &vm);
    let bodies: [fn(&PinnedVm<F>); 6] =
        [|vm| guest(vm, 0, [0, 1]), |vm| guest(vm, 1, [1, BLOCK]), map_block_and_more, map_pages, map_pages, unmap];
    on_threads(&vm, bodies);
    save();
}

#[test]
fn undone_mappings_with_two_levels() {
    check_less(SCHEDULES, undo::<Tiny<2>>);
}

#[test]
fn undone_mappings_with_three_levels() {
    check_less(SCHEDULES, undo::<Tiny<3>>);
}
