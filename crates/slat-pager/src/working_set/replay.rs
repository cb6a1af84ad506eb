//! Fills the pages of a working set while the VM runs.
//!
//! # Guarantees
//! - Faults go first: before each step a thread of the replay looks whether faults wait, and while
//!   they do, it waits. Its threads have a lower priority.
//! - Pages come in the order of first touch, as far as several threads have an order, and in ranges
//!   as long as the pages nearby allow.
//! - A replay that fails is no failure of the VM: the pages come by faults then.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::WorkingSet;
use super::pace::Pace;
use super::prefetch::prefetch;
use crate::metrics::Metrics;
use crate::source::{PAGE_BYTES, Source, SourceError};
use crate::vm::Populator;

/// Pages that come to so many bytes, with what is filled around them, are looked at together for
/// ranges.
const WINDOW_BYTES: u64 = 4 << 20;
/// The longest range of a step: a fault that comes waits for one at most.
const STEP_BYTES: u64 = 1 << 20;
/// How long a thread waits before it looks again whether faults wait.
const YIELD: Duration = Duration::from_micros(50);
/// The priority of the threads.
const NICE: i32 = 10;
/// After so many looks it goes on all the same: a fault may wait for a source that is down.
const MAX_LOOKS: u32 = 2000;

/// What is filled: the memory of one VM.
pub trait Populate: Sync {
    /// Fills the bytes `range` of the snapshot, where they are not there yet. Returns once they
    /// are.
    ///
    /// # Errors
    /// [`SourceError`].
    fn populate(&self, range: Range<u64>) -> Result<(), SourceError>;

    /// Whether faults wait right now.
    fn faults_wait(&self) -> bool;

    /// Whether nothing is filled any more: the machine has ended, or its monitor was wrong about its
    /// memory.
    fn is_over(&self) -> bool {
        false
    }
}

impl Populate for Populator {
    fn populate(&self, range: Range<u64>) -> Result<(), SourceError> {
        // The kernel may have evicted pages that were cached once. They come back before they are claimed: faults
        // wait for claimed pages, and removals for the copy.
        if let Some(bytes) = self.source().mapped(range.clone()) {
            prefetch(bytes);
        }
        Populator::populate(self, range).map(drop)
    }

    fn faults_wait(&self) -> bool {
        Populator::faults_wait(self)
    }

    fn is_over(&self) -> bool {
        Populator::is_over(self)
    }
}

/// How far a replay is.
#[derive(Debug, Default)]
pub struct Progress {
    total_bytes: AtomicU64,
    done_bytes: AtomicU64,
    stopped: AtomicU32,
    /// Where its bytes are counted, too.
    metrics: Option<Arc<Metrics>>,
}

impl Progress {
    /// Of a replay that `metrics` count, too.
    pub fn counted(metrics: Arc<Metrics>) -> Progress {
        Progress { metrics: Some(metrics), ..Progress::default() }
    }

    /// Makes the replay end after its present steps: its VM is gone.
    pub fn stop(&self) {
        self.stopped.store(1, Ordering::Relaxed);
    }

    /// Bytes that are filled.
    pub fn done(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that there are to fill.
    pub fn total(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    fn begin(&self, nr_bytes: u64) {
        self.total_bytes.fetch_add(nr_bytes, Ordering::Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.to_replay_bytes.inc_by(nr_bytes);
        }
    }

    fn advance(&self, nr_bytes: u64) {
        self.done_bytes.fetch_add(nr_bytes, Ordering::Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.replayed_bytes.inc_by(nr_bytes);
        }
    }

    /// Whether it has ended, or ends, before all was filled.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) != 0
    }
}

/// How many threads a replay from `source` has. One that is mapped costs CPU time: few. Another one
/// costs waiting: many.
pub fn nr_threads(source: &dyn Source) -> usize {
    match source.is_mapped() {
        true => thread::available_parallelism().map_or(1, usize::from).div_ceil(2).clamp(1, 4),
        false => 32,
    }
}

/// The ranges of a working set, each at most `STEP_BYTES` or a granule long, in the order of first
/// touch.
pub fn steps(set: &WorkingSet) -> Vec<Range<u64>> {
    let mut steps: Vec<Range<u64>> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let window_pages = (WINDOW_BYTES / set.around_bytes).max(16);
    for window in set.pages.chunks(window_pages as usize) {
        let granules = window.iter().map(|page| u64::from(*page) * PAGE_BYTES / set.around_bytes);
        let mut granules: Vec<u64> = granules.filter(|granule| seen.insert(*granule)).collect();
        // Those near in time that are near in place are read together; the window is where its first is.
        granules.sort_unstable();
        for same in granules.chunk_by(|one, next| one + 1 == *next) {
            let (Some(first), Some(last)) = (same.first(), same.last()) else { continue };
            let end = ((last + 1) * set.around_bytes).min(set.size_bytes);
            let step_bytes = STEP_BYTES.max(set.around_bytes);
            let mut start = first * set.around_bytes;
            while start < end {
                steps.push(start..end.min(start + step_bytes));
                start += step_bytes;
            }
        }
    }
    steps
}

/// Fills `steps` of `memory` by up to `nr_threads` threads: by as many as make it faster. Returns
/// after the last.
///
/// # Errors
/// The first failure, after which no thread begins another step.
pub fn replay(
    steps: &[Range<u64>],
    memory: &dyn Populate,
    nr_threads: usize,
    progress: &Progress,
) -> Result<(), SourceError> {
    progress.begin(steps.iter().map(|step| step.end - step.start).sum());
    let next = AtomicUsize::new(0);
    let pace = Pace::new(nr_threads);
    let run = &|thread: usize| {
        // However it ends, no thread waits for its turn for ever.
        let _ending = pace.ending();
        // Relaxed: each step is taken once, and nothing else depends on the index.
        while pace.wait_for_turn(thread, || next.load(Ordering::Relaxed) >= steps.len() || progress.is_stopped())
            && let Some(step) = steps.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let_faults_go_first(memory, progress);
            if progress.is_stopped() {
                break;
            }
            let start = Instant::now();
            if let Err(error) = memory.populate(step.clone()) {
                next.store(steps.len(), Ordering::Relaxed);
                return Err(error);
            }
            if memory.is_over() {
                progress.stop();
                break;
            }
            pace.took(start.elapsed());
            progress.advance(step.end - step.start);
        }
        Ok(())
    };
    thread::scope(|scope| {
        // None is the caller's: their priority is lowered for good.
        let mut threads = Vec::new();
        for nr in 0..nr_threads.clamp(1, steps.len().max(1)) {
            let thread = thread::Builder::new().name("slat-replay".to_string());
            let thread = thread.spawn_scoped(scope, move || {
                lower_priority();
                run(nr)
            });
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => {
                    return Err(SourceError::Io { what: "start a thread".to_string(), error });
                }
                // Those that there are do all.
                Err(_) => break,
            }
        }
        let mut result = Ok(());
        for thread in threads {
            match thread.join() {
                Ok(other) => result = result.and(other),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        result
    })
}

/// Gives this thread less of a busy CPU than the threads that serve faults, and those that wait for
/// them.
fn lower_priority() {
    // Where it is refused, the thread has the priority that it has.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
}

fn let_faults_go_first(memory: &dyn Populate, progress: &Progress) {
    for _ in 0..MAX_LOOKS {
        if !memory.faults_wait() || progress.is_stopped() {
            return;
        }
        thread::sleep(YIELD);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::source::Identity;

    #[derive(Default)]
    struct Memory {
        filled: Mutex<Vec<Range<u64>>>,
        faults_wait: bool,
        fails_at: Option<u64>,
        /// It fills so many steps, and nothing more.
        is_over_after: Option<usize>,
    }

    impl Populate for Memory {
        fn populate(&self, range: Range<u64>) -> Result<(), SourceError> {
            if self.fails_at.is_some_and(|offset| range.contains(&offset)) {
                return Err(SourceError::Corrupt { range });
            }
            self.filled.lock().unwrap().push(range);
            Ok(())
        }

        fn faults_wait(&self) -> bool {
            self.faults_wait
        }

        fn is_over(&self) -> bool {
            self.is_over_after.is_some_and(|nr_steps| self.filled.lock().unwrap().len() > nr_steps)
        }
    }

    fn set(around_bytes: u64, pages: Vec<u32>) -> WorkingSet {
        WorkingSet { identity: Identity::from_bytes([0; 32]), size_bytes: 100 * PAGE_BYTES, around_bytes, pages }
    }

    #[test]
    fn pages_nearby_are_one_step_and_each_granule_comes_once() {
        let page = |first: u64, end: u64| first * PAGE_BYTES..end * PAGE_BYTES;
        assert_eq!(steps(&set(PAGE_BYTES, vec![9, 3, 5, 4, 99, 3])), [page(3, 6), page(9, 10), page(99, 100)]);
        assert_eq!(steps(&set(4 * PAGE_BYTES, vec![9, 3, 5, 1])), [page(0, 12)]);
        // The last granule ends with the snapshot.
        assert_eq!(steps(&set(64 * PAGE_BYTES, vec![70])), [page(64, 100)]);
    }

    #[test]
    fn all_steps_are_filled_by_several_threads() {
        let steps = steps(&set(PAGE_BYTES, (0..100).step_by(2).collect()));
        let (memory, progress) = (Memory::default(), Progress::default());
        replay(&steps, &memory, 4, &progress).unwrap();
        let mut filled = memory.filled.into_inner().unwrap();
        filled.sort_by_key(|range| range.start);
        assert_eq!(filled, steps);
        assert_eq!(progress.done_bytes.load(Ordering::Relaxed), 50 * PAGE_BYTES);
        assert_eq!(progress.total_bytes.load(Ordering::Relaxed), 50 * PAGE_BYTES);
    }

    #[test]
    fn a_failure_ends_the_replay_and_is_returned() {
        let steps = steps(&set(PAGE_BYTES, vec![0, 10, 20, 30]));
        let memory = Memory { fails_at: Some(10 * PAGE_BYTES), ..Memory::default() };
        assert!(replay(&steps, &memory, 1, &Progress::default()).is_err());
        assert_eq!(memory.filled.into_inner().unwrap().len(), 1);
    }

    #[test]
    fn a_replay_of_a_machine_that_is_over_stops_and_counts_no_more() {
        let steps = steps(&set(PAGE_BYTES, vec![0, 10, 20, 30]));
        let (memory, progress) = (Memory { is_over_after: Some(2), ..Memory::default() }, Progress::default());
        replay(&steps, &memory, 1, &progress).unwrap();
        assert_eq!(memory.filled.into_inner().unwrap().len(), 3);
        assert_eq!((progress.done(), progress.total()), (2 * PAGE_BYTES, 4 * PAGE_BYTES));
        assert!(progress.is_stopped());
    }

    #[test]
    fn a_stopped_replay_fills_nothing_more() {
        // Faults that wait for ever do not hold it.
        let (memory, progress) = (Memory { faults_wait: true, ..Memory::default() }, Progress::default());
        progress.stop();
        replay(&steps(&set(PAGE_BYTES, vec![0, 10, 20])), &memory, 2, &progress).unwrap();
        assert!(memory.filled.into_inner().unwrap().is_empty());
    }
}
