//! Calls for pinned memory that other calls overtake, at each point.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::pinned::{SHIFT, assert_mapped, mapping, pages, pinned_vm, region};
use crate::common::broken::{self, Breaking};
use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::{Call, TestHost, each, lazily_splitting, translate};
use slat::baselines::Locking;
use slat::error::MapError;
use slat::format::{Format, Npt, Stage2};
use slat::host::AllocationWait;
use slat::tables::Mapping;
use slat::{Access, Config, Gfn, GfnRange, Level, MemoryRegion, MemoryRegionFlags, Outcome, PageSize, Pfn, Vm};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Overtaking {
    UnmapPage,
    UnmapBlock,
    UnmapAll,
    Delete,
    /// Unmaps the block, and maps its other pages.
    MapNeighbours,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    /// Nothing is mapped, and there is no page-table page.
    Nothing,
    /// A neighbour in the same page-table page.
    Neighbour,
}

/// Maps `nr_pages` pages of a block, from page 5 on, overtaken at the `nth` look. Returns whether it
/// was overtaken.
fn map_overtaken(nr_pages: u64, before: Before, overtaking: Overtaking, nth: u32) -> bool {
    let vm = pinned_vm::<Hooked>(Config::default(), 1 << 20);
    if before == Before::Neighbour {
        vm.map_range(&mapping(512, 1, PageSize::Size4K)).unwrap();
    }
    let mapped = (512 + 5, nr_pages);
    let meanwhile = {
        let vm = Arc::clone(&vm);
        move || {
            let overtakes = move || match overtaking {
                Overtaking::UnmapPage => drop(vm.unmap_range(pages(mapped.0, 1)).unwrap()),
                Overtaking::UnmapBlock => drop(vm.unmap_range(pages(512, 512)).unwrap()),
                Overtaking::UnmapAll => drop(vm.unmap_range(pages(0, 1 << 20)).unwrap()),
                Overtaking::Delete => {
                    let gone = MemoryRegion { memory_size: 0, ..region(0, 0, 0, MemoryRegionFlags::empty()) };
                    vm.set_user_memory_region(gone).unwrap();
                }
                Overtaking::MapNeighbours => {
                    vm.unmap_range(pages(512, 512)).unwrap();
                    vm.map_range(&mapping(512, 5, PageSize::Size4K)).unwrap();
                    vm.map_range(&mapping(520, 504, PageSize::Size4K)).unwrap();
                }
            };
            std::thread::spawn(overtakes).join().unwrap();
        }
    };
    at_look(Level(4), nth, meanwhile);
    let result = vm.map_range(&mapping(mapped.0, mapped.1, PageSize::Size4K));
    let was_overtaken = was_called();
    let case = format!("{nr_pages} pages, {before:?} {overtaking:?} {nth}: {result:?}");
    let released: Vec<_> = vm.host().take_released();
    for page in mapped.0..mapped.0 + mapped.1 {
        let is_mapped = translate(&vm, Gfn(page).gpa()).map(|found| found.pfn) == Some(Pfn(page + SHIFT));
        let nr_released = released.iter().filter(|(gfn, _)| *gfn == Gfn(page)).count();
        match result {
            // Mapped and there, or unmapped again and released.
            Ok(()) => assert_eq!(usize::from(is_mapped) + nr_released, 1, "{case}, page {page:#x}"),
            // Not there; released only if the other call has found it.
            Err(_) => assert!(!is_mapped && nr_released <= 1, "{case}, page {page:#x}"),
        }
    }
    if overtaking == Overtaking::Delete && was_overtaken {
        assert!(matches!(result, Ok(()) | Err(MapError::NotPinned { .. })), "{case}");
    } else {
        assert_eq!(result, Ok(()), "{case}");
    }
    was_overtaken
}

#[test]
fn a_mapping_that_is_overtaken_at_any_look_is_there_or_released() {
    let mut nr_overtaken = 0;
    for before in [Before::Nothing, Before::Neighbour] {
        for overtaking in [
            Overtaking::UnmapPage,
            Overtaking::UnmapBlock,
            Overtaking::UnmapAll,
            Overtaking::Delete,
            Overtaking::MapNeighbours,
        ] {
            // A single page walks again only if something was retired.
            for nr_pages in [1, 3] {
                nr_overtaken += (1..).take_while(|nth| map_overtaken(nr_pages, before, overtaking, *nth)).count();
            }
        }
    }
    assert!(nr_overtaken > 50, "{nr_overtaken}");
}

/// A mapping fails half way, and in between another call has put other memory in one of its pages.
#[test]
fn an_undo_leaves_what_another_call_has_mapped() {
    let vm = pinned_vm::<Npt>(Config::default(), 4096);
    vm.map_range(&mapping(4000, 1, PageSize::Size4K)).unwrap();
    let other = Arc::clone(&vm);
    // At the third page-table page the first two are mapped.
    vm.host().overtake(Call::Allocate(AllocationWait::Never), 3, move || {
        assert_eq!(other.unmap_range(pages(5, 1)), Ok(1));
        let elsewhere = Mapping { pfn: Pfn(5 + 2 * SHIFT), ..mapping(5, 1, PageSize::Size4K) };
        assert_eq!(other.map_range(&elsewhere), Ok(()));
    });
    let result = vm.map_range(&mapping(0, 4096, PageSize::Size4K));
    assert!(vm.host().was_overtaken());
    assert!(matches!(result, Err(MapError::AlreadyMapped { .. })), "{result:?}");
    let frames = |page: u64| translate(&vm, Gfn(page).gpa()).map(|found| found.pfn);
    for page in 0..4096 {
        let expected = match page {
            5 => Some(Pfn(5 + 2 * SHIFT)),
            4000 => Some(Pfn(4000 + SHIFT)),
            _ => None,
        };
        assert_eq!(frames(page), expected, "page {page}");
    }
    assert_eq!(vm.host().take_released(), [(Gfn(5), Pfn(5 + SHIFT))], "by the call that unmapped it");
}

/// The last block of a GiB.
const LAST_BLOCK: u64 = (1 << 18) - 512;
/// A page of it.
const OTHER_PAGE: u64 = LAST_BLOCK + 5;

/// Runs `unmap_range` of that page in another thread, and returns when that begins its first flush.
/// It goes on when the sender is used, and ends with how many pages were mapped.
fn unmap_until_flush<F: Format>(vm: &Arc<Vm<TestHost, F>>) -> (mpsc::Sender<()>, JoinHandle<u64>) {
    let (begins, wait_for_flush) = mpsc::channel();
    let (go_on, wait_to_go_on) = mpsc::channel();
    vm.host().overtake(Call::Flush, 1, move || {
        begins.send(()).unwrap();
        wait_to_go_on.recv().unwrap();
    });
    let vm = Arc::clone(vm);
    let thread = std::thread::spawn(move || vm.unmap_range(pages(OTHER_PAGE, 1)).unwrap());
    wait_for_flush.recv().unwrap();
    (go_on, thread)
}

/// A mapping of that block and the next GiB fails, for want of memory, when the block is mapped.
/// Meanwhile another call unmaps a page, and is about to flush. Returns what that call returns, and
/// what was flushed when the mapping had failed.
fn undo_beside_unmap<F: Format>(largest: PageSize) -> (Arc<Vm<TestHost, F>>, u64, Vec<GfnRange>) {
    let vm = pinned_vm::<F>(Config::default(), 1 << 19);
    // The page-table page of the GiB is there: what is allocated last is that of the next.
    vm.map_range(&mapping(LAST_BLOCK - 512, 1, PageSize::Size4K)).unwrap();
    let nth = if largest == PageSize::Size4K { 2 } else { 1 };
    let (send, receive) = mpsc::channel();
    let other = Arc::clone(&vm);
    vm.host().overtake(Call::Allocate(AllocationWait::Never), nth, move || {
        send.send(unmap_until_flush(&other)).unwrap();
        other.host().fail_after(0);
    });
    let result = vm.map_range(&mapping(LAST_BLOCK, 1024, largest));
    let flushed = vm.host().flushes.lock().unwrap().concat();
    let (go_on, thread) = receive.try_recv().expect("it was overtaken");
    go_on.send(()).unwrap();
    let nr_unmapped = thread.join().unwrap();
    assert_eq!(result, Err(MapError::OutOfMemory));
    assert_mapped(&vm, pages(LAST_BLOCK - 512, 1536), |page| page == LAST_BLOCK - 512);
    (vm, nr_unmapped, flushed)
}

/// The other call has emptied the leaf, so the undo does not find it.
#[test]
fn an_undo_flushes_also_what_another_call_has_emptied() {
    let (vm, nr_unmapped, flushed) = undo_beside_unmap::<Npt>(PageSize::Size4K);
    assert!(flushed.iter().any(|range| range.contains(Gfn(OTHER_PAGE))), "{flushed:?}");
    assert_eq!(nr_unmapped, 1);
    assert_eq!(vm.host().take_released(), [(Gfn(OTHER_PAGE), Pfn(OTHER_PAGE + SHIFT))], "by the call that unmapped it");
}

/// The other call has broken the huge leaf. It would link the parts.
fn undo_beside_split<F: Format>() {
    let (vm, nr_unmapped, _) = undo_beside_unmap::<Breaking<F>>(PageSize::Size2M);
    assert_eq!(nr_unmapped, 0);
    assert_eq!(vm.host().take_released(), []);
}

#[test]
fn an_undo_finishes_the_split_of_its_leaf() {
    undo_beside_split::<Npt>();
    undo_beside_split::<Stage2>();
}

/// With break before make, a split for a part breaks the huge leaf for a moment. A fault on the
/// rest, or another split, finishes it: nothing of the rest is lost.
fn split_overtaken<F: Format>(nth: u32, call: usize) -> bool {
    let vm = pinned_vm::<Breaking<F>>(Config::default(), 2048);
    vm.map_range(&mapping(0, 2048, PageSize::Size2M)).unwrap();
    broken::observe(&vm);
    let other = Arc::clone(&vm);
    vm.host().overtake(Call::Flush, nth, move || {
        let vm = other;
        match call {
            0 => {
                let mut vcpu = vm.create_vcpu().unwrap();
                assert_eq!(vcpu.handle_fault(Gfn(600).gpa(), Access::Write), Ok(Outcome::Resume));
                assert!(translate(&vm, Gfn(600).gpa()).is_some(), "the guest does not come back for ever");
            }
            1 => assert_eq!(vm.unmap_range(pages(600, 1)), Ok(1)),
            2 => assert!(matches!(vm.unmap_range(pages(512, 512)), Ok(509 | 512))),
            _ => {
                let protection = slat::tables::Protection { writable: false, ..super::pinned::MEMORY };
                assert_eq!(vm.protect_range(pages(550, 1), &protection), Ok(1));
            }
        }
    });
    let result = vm.unmap_range(pages(700, 3));
    let was_overtaken = vm.host().was_overtaken();
    let _: (u64, u64) = broken::observed();
    assert!(matches!(result, Ok(3 | 0)), "{result:?}");
    let gone: HashSet<u64> = match call {
        1 if was_overtaken => [600, 700, 701, 702].into(),
        2 if was_overtaken => (512..1024).collect(),
        _ => [700, 701, 702].into(),
    };
    assert_mapped(&vm, pages(0, 2048), |page| !gone.contains(&page));
    let released = vm.host().take_released();
    assert_eq!(released.len(), gone.len());
    assert!(released.iter().all(|(gfn, pfn)| gone.contains(&gfn.0) && pfn.0 == gfn.0 + SHIFT), "{released:?}");
    was_overtaken
}

#[test]
fn a_pinned_leaf_that_is_broken_for_a_split_is_finished() {
    for call in 0..4 {
        let nr_overtaken = (1..).take_while(|nth| split_overtaken::<Npt>(*nth, call)).count();
        assert!(nr_overtaken >= 2, "{nr_overtaken}");
        (1..).take_while(|nth| split_overtaken::<Stage2>(*nth, call)).count();
    }
}

/// A split whose page-table page is linked by another call, unlinked, freed, and used again for the
/// next split of the same leaf, all before its flush returns. That flush does not serve the next
/// split, which the observer notices: a page-table page in place of a leaf that was not flushed.
fn split_after_another<F: Format>() {
    let vm = pinned_vm::<Breaking<F>>(Config::default(), 2048);
    vm.map_range(&mapping(0, 2048, PageSize::Size2M)).unwrap();
    broken::observe(&vm);
    let (is_broken, wait_until_broken) = mpsc::channel();
    let (go_on, wait_to_go_on) = mpsc::channel();
    let next = {
        let vm = Arc::clone(&vm);
        move || {
            let host = vm.host();
            let wait = move || {
                is_broken.send(()).unwrap();
                wait_to_go_on.recv().unwrap();
            };
            host.overtake(Call::Flush, 1, wait);
            assert_eq!(vm.unmap_range(pages(600, 1)), Ok(1));
        }
    };
    let (other, (send_thread, thread)) = (Arc::clone(&vm), mpsc::channel());
    vm.host().overtake(Call::FlushEnd, 1, move || {
        assert_eq!(other.unmap_range(pages(512, 512)), Ok(512));
        other.reclaim();
        assert_eq!(other.map_range(&mapping(512, 512, PageSize::Size2M)), Ok(()));
        // The observer sees the leaf.
        assert_mapped(&other, pages(512, 512), |_| true);
        other.host().reuses_tables.store(true, Ordering::SeqCst);
        send_thread.send(std::thread::spawn(next)).unwrap();
        wait_until_broken.recv().unwrap();
        assert_eq!(other.host().nr_reused_tables.load(Ordering::SeqCst), 1);
    });
    assert_eq!(vm.unmap_range(pages(700, 3)), Ok(3));
    let _: (u64, u64) = broken::observed();
    go_on.send(()).unwrap();
    thread.recv().unwrap().join().unwrap();
    assert_mapped(&vm, pages(0, 2048), |page| ![600, 700, 701, 702].contains(&page));
}

#[test]
fn a_split_links_nothing_that_a_later_split_has_broken() {
    split_after_another::<Npt>();
    split_after_another::<Stage2>();
}

each!(threads_map_and_unmap_beside_each_other, threads);
fn threads<F: Format>(locking: Locking) {
    let nr_pages = 2048;
    let vm = pinned_vm::<F>(lazily_splitting(locking), nr_pages);
    vm.set_user_memory_region(region(1, nr_pages, nr_pages, MemoryRegionFlags::LOG_DIRTY_PAGES)).unwrap();
    // How many pages each thread has mapped and unmapped, in its own quarter; all share page-table
    // pages at the borders.
    let (nr_mapped, nr_unmapped) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let mut vcpu = vm.create_vcpu().unwrap();
            let mut page = 0;
            while !is_over.load(Ordering::SeqCst) {
                page = (page + 97) % nr_pages;
                assert_eq!(vcpu.handle_fault(Gfn(nr_pages + page).gpa(), Access::Write), Ok(Outcome::Resume));
                if page % 16 == 0 {
                    vm.get_dirty_log(1, &mut [0; 32]).unwrap();
                    vm.age_range(pages(0, 2 * nr_pages)).unwrap();
                    vm.recover_range(pages(0, 2 * nr_pages)).unwrap();
                }
            }
        });
        let workers: Vec<_> = (0..2u64)
            .map(|thread| {
                let (vm, nr_mapped, nr_unmapped) = (&vm, &nr_mapped, &nr_unmapped);
                scope.spawn(move || {
                    let first = 100 + thread * 900;
                    for round in 0..60u64 {
                        let (start, nr_pages) = (first + round * 7 % 300, 1 + round * 37 % 600);
                        let largest = if round % 2 == 0 { PageSize::Size2M } else { PageSize::Size4K };
                        assert_eq!(vm.map_range(&mapping(start, nr_pages, largest)), Ok(()));
                        nr_mapped.fetch_add(nr_pages, Ordering::SeqCst);
                        assert_mapped(vm, pages(start, nr_pages), |_| true);
                        let gone = pages(start + nr_pages / 3, 1 + nr_pages / 5);
                        let unmapped = vm.unmap_range(gone).unwrap();
                        assert_eq!(unmapped, gone.intersection(pages(start, nr_pages)).nr_pages());
                        let rest = vm.unmap_range(pages(start, nr_pages)).unwrap();
                        assert_eq!(unmapped + rest, nr_pages);
                        nr_unmapped.fetch_add(nr_pages, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let results: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        is_over.store(true, Ordering::SeqCst);
        beside.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    let released = vm.host().take_released();
    assert_eq!(released.len() as u64, nr_mapped.load(Ordering::SeqCst));
    assert!(released.iter().all(|(gfn, pfn)| pfn.0 == gfn.0 + SHIFT));
    assert_eq!(vm.unmap_range(pages(0, nr_pages)), Ok(0));
}

#[test]
fn threads_that_map_the_same_pages_do_not_both_succeed() {
    let vm = pinned_vm::<Npt>(Config::default(), 4096);
    for round in 0..50 {
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3u64)
                .map(|thread| {
                    let vm: &Vm<TestHost, Npt> = &vm;
                    scope.spawn(move || {
                        let pfn = Pfn(thread << 20 | 1);
                        vm.map_range(&Mapping { pfn, ..mapping(1, 1000 + round, PageSize::Size4K) })
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let nr_winners = results.iter().filter(|result| result.is_ok()).count();
        assert!(nr_winners <= 1, "{results:?}");
        let found: HashSet<_> =
            (1..1001 + round).map(|page| translate(&vm, Gfn(page).gpa()).map(|found| found.pfn.0 >> 20)).collect();
        assert_eq!(found.len(), 1, "one mapping as a whole, or none: {results:?}");
        assert_eq!(found.contains(&None), nr_winners == 0);
        vm.unmap_range(pages(0, 4096)).unwrap();
    }
}
