//! Memory that comes before it is asked for: working sets that are replayed beside faults, and
//! pages that clones share. Every byte is checked.

#[path = "support/guest.rs"]
mod guest;
mod support;

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use slat_pager::shared_memory::SharedMemory;
use slat_pager::source::Source;
use slat_pager::userfaultfd::Userfaultfd;
use slat_pager::vm::state::State;
use slat_pager::vm::{Observer, Options, Regions, Vm};
use slat_pager::working_set::Recorder;
use slat_pager::working_set::replay::{Progress, replay, steps};

use guest::Guest;
use support::{Pattern, may_use_userfaultfd};

/// 3 MiB and a page.
const NR_BYTES: u64 = (3 << 20) + 4096;
const SEED: u64 = 77;

fn attach(guest: &Guest, source: &Arc<dyn Source>, options: Options) -> Vm {
    let regions = Regions::new(&[guest.region()], source.size_bytes()).unwrap();
    let state = State::anonymous(options.nr_threads.get(), regions.nr_words()).unwrap();
    let userfaultfd = Userfaultfd::from_fd(guest.uffd()).unwrap();
    Vm::attach(userfaultfd, regions, Arc::clone(source), state, options).unwrap()
}

fn options() -> Options {
    Options { nr_threads: NonZeroUsize::new(2).unwrap(), ..Options::default() }
}

#[test]
fn a_working_set_is_recorded_and_replayed_beside_faults() {
    if !may_use_userfaultfd() {
        return;
    }
    let source: Arc<dyn Source> = Arc::new(Pattern::new(SEED, NR_BYTES));
    let around_bytes = source.granule_bytes().max(Options::default().granule_bytes);
    let recorder = Arc::new(Recorder::new(source.identity(), NR_BYTES, around_bytes, 1 << 30).unwrap());
    let observer = Arc::clone(&recorder) as Arc<dyn Observer>;
    let guest = Guest::anonymous(NR_BYTES);
    let vm = attach(&guest, &source, Options { observer: Some(observer), ..options() });
    // The places that are touched first, in this order.
    for offset in [1 << 20, 0, 2 << 20] {
        assert_eq!(guest.read(offset), support::byte(SEED, offset));
    }
    let set = recorder.working_set();
    assert_eq!(set.pages, [256, 0, 512]);
    drop(vm);

    let guest = Guest::anonymous(NR_BYTES);
    let vm = attach(&guest, &source, options());
    let populator = vm.populator();
    replay(&steps(&set), &populator, 1, &Progress::default()).unwrap();
    assert_eq!(vm.present_bytes(), 3 * around_bytes);
    // Now all of it, in advance by four threads and by the faults of many, whoever comes first.
    let all: Vec<_> = (0..NR_BYTES).step_by(8192).map(|start| start..NR_BYTES.min(start + 8192)).collect();
    thread::scope(|scope| {
        let replaying = scope.spawn(|| replay(&all, &populator, 4, &Progress::default()));
        assert_eq!(guest.nr_wrong(SEED, 64), 0);
        replaying.join().unwrap().unwrap();
    });
    support::until_present(NR_BYTES, &vm);
}

#[test]
fn a_replay_from_a_source_that_fails_leaves_the_pages_to_faults() {
    if !may_use_userfaultfd() {
        return;
    }
    let pattern = Pattern { nr_failures: AtomicU32::new(1), ..Pattern::new(SEED, NR_BYTES) };
    let source: Arc<dyn Source> = Arc::new(pattern);
    let guest = Guest::anonymous(NR_BYTES);
    let vm = attach(&guest, &source, options());
    let progress = Progress::default();
    let step = 0..64 << 10;
    replay(std::slice::from_ref(&step), &vm.populator(), 1, &progress).unwrap_err();
    assert_eq!((progress.done(), vm.present_bytes()), (0, 0));
    assert_eq!(guest.nr_wrong(SEED, 8), 0);
}

#[test]
fn clones_share_pages_until_they_write_to_them() {
    if !may_use_userfaultfd() {
        return;
    }
    let pattern = Arc::new(Pattern { nr_failures: AtomicU32::new(3), ..Pattern::new(SEED, NR_BYTES) });
    let source = Arc::clone(&pattern) as Arc<dyn Source>;
    let memory = Arc::new(SharedMemory::new("clones", 0, Arc::clone(&source)).unwrap());
    let clones: Vec<_> = (0..4)
        .map(|_| {
            let guest = Guest::private(NR_BYTES, memory.as_fd());
            let vm = attach(&guest, &source, Options { shared_memory: Some(Arc::clone(&memory)), ..options() });
            (guest, vm)
        })
        .collect();
    // All at once, beside a replay of one of them.
    let all: Vec<_> = (0..NR_BYTES).step_by(1 << 16).map(|start| start..NR_BYTES.min(start + (1 << 16))).collect();
    thread::scope(|scope| {
        for (guest, _) in &clones {
            scope.spawn(move || assert_eq!(guest.nr_wrong(SEED, 8), 0));
        }
        let populator = clones[0].1.populator();
        // It may meet the source's failures.
        let _ = replay(&all, &populator, 2, &Progress::default());
    });
    // Each unit was read once, whatever the clones did; the failed reads come on top.
    let nr_units = NR_BYTES.div_ceil(memory.unit_bytes());
    assert_eq!(pattern.nr_reads.load(Ordering::Relaxed), nr_units + 3);
    assert_eq!(memory.present_bytes(), NR_BYTES);
    // What one writes no other sees.
    let (first, others) = clones.split_first().unwrap();
    for page in 0..NR_BYTES / 4096 {
        first.0.write(page * 4096 + 5, 0xEE);
    }
    for (guest, _) in others {
        assert_eq!(guest.nr_wrong(SEED, 2), 0);
    }
    assert!((0..NR_BYTES / 4096).all(|page| first.0.read(page * 4096 + 5) == 0xEE));
}

#[test]
fn pages_of_a_clone_that_were_reclaimed_are_mapped_again() {
    if !may_use_userfaultfd() {
        return;
    }
    let source: Arc<dyn Source> = Arc::new(Pattern::new(SEED, NR_BYTES));
    let memory = Arc::new(SharedMemory::new("clones", 0, Arc::clone(&source)).unwrap());
    let guest = Guest::private(NR_BYTES, memory.as_fd());
    let _vm = attach(&guest, &source, Options { shared_memory: Some(memory), ..options() });
    for _ in 0..3 {
        assert_eq!(guest.nr_wrong(SEED, 4), 0);
        // The kernel reports no removal to a monitor that has not asked for it, and none of its
        // own.
        guest.forget_pages();
    }
    assert_eq!(guest.nr_wrong(SEED, 4), 0);
}

#[test]
fn shared_memory_of_another_snapshot_is_refused() {
    if !may_use_userfaultfd() {
        return;
    }
    let source: Arc<dyn Source> = Arc::new(Pattern::new(SEED, NR_BYTES));
    let other: Arc<dyn Source> = Arc::new(Pattern::new(SEED + 1, NR_BYTES));
    let memory = Arc::new(SharedMemory::new("clones", 0, other).unwrap());
    let guest = Guest::private(NR_BYTES, memory.as_fd());
    let regions = Regions::new(&[guest.region()], source.size_bytes()).unwrap();
    let state = State::anonymous(1, regions.nr_words()).unwrap();
    let userfaultfd = Userfaultfd::from_fd(guest.uffd()).unwrap();
    let options = Options { shared_memory: Some(memory), ..Options::default() };
    let error = Vm::attach(userfaultfd, regions, source, state, options).unwrap_err();
    assert!(error.to_string().contains("another snapshot"), "{error}");
}
