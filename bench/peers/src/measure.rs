//! Runs one operation on the tables of one crate, and takes the time; and all operations that were
//! asked for, again and again.
//!
//! Each measurement has fresh tables and its own threads, which start at the same time and stay on
//! a CPU each where there are enough. The time is that from the first call to the end of the last.
//! Then the tables are read back and counted. slat serves calls concurrently. The peers take `&mut
//! self`: a single thread has them alone; several threads take a `std::sync::Mutex` for each call.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use slat::Error;
use slat_machine::linux::topology;

use super::aarch64::Aarch64;
use super::adapter::Adapter;
use super::axaddrspace::FaultSpace;
use super::engine::{Engine, Memslots};
use super::failure::Failure;
use super::generic::Generic;
use super::memory::Memory;
#[cfg(target_arch = "x86_64")]
use super::multiarch::Multiarch;
use super::operation::{Operation, PeerJob, Table};
use super::subject::Subject;
use super::x86::X86;
use slat_results::statistics::Samples;
use slat_results::turns;

/// Spins of a thread that waits for the others, before it yields its CPU.
const SPIN_TURNS: u32 = 2000;

/// Tables of one kind, shared by the threads of a measurement.
pub(crate) trait Shared: Sync {
    type Handle: Table;

    /// A thread's access to the tables: `step` is called with the number of each call.
    ///
    /// # Errors
    /// The engine's.
    fn each(&self, step: impl Fn(&mut Self::Handle, u64) -> u64) -> Result<impl FnMut(u64) -> u64, Error>;
}

/// A peer whose mutex each thread takes for each call.
struct Locked<T>(Mutex<T>);

/// A peer that one thread has alone: it takes the mutex once.
struct Alone<T>(Mutex<T>);

impl<T: Table + Send> Shared for Locked<T> {
    type Handle = T;

    #[inline]
    fn each(&self, step: impl Fn(&mut T, u64) -> u64) -> Result<impl FnMut(u64) -> u64, Error> {
        Ok(move |call| step(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), call))
    }
}

impl<T: Table + Send> Shared for Alone<T> {
    type Handle = T;

    #[inline]
    fn each(&self, step: impl Fn(&mut T, u64) -> u64) -> Result<impl FnMut(u64) -> u64, Error> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(move |call| step(&mut table, call))
    }
}

/// Waits until all `nr_threads` threads are here.
fn wait_for_all(arrived: &AtomicUsize, nr_threads: usize) {
    arrived.fetch_add(1, Ordering::AcqRel);
    let mut turns = 0;
    while arrived.load(Ordering::Acquire) < nr_threads {
        turns += 1;
        if turns < SPIN_TURNS { std::hint::spin_loop() } else { thread::yield_now() }
    }
}

/// The times and the result of a thread.
struct Ran {
    begin: Instant,
    end: Instant,
    /// The sum of the results of its calls.
    sum: u64,
}

/// One thread's part. It always arrives at the barrier, since the others wait for it.
fn run_thread(job: PeerJob, tables: &impl Shared, thread: u64, arrived: &AtomicUsize) -> Result<Ran, Error> {
    let call = tables.each(|table, call| job.call(table, thread, call));
    wait_for_all(arrived, job.nr_threads as usize);
    let mut call = call?;
    let begin = Instant::now();
    let sum = (0..job.calls()).fold(0, |sum: u64, number| sum.wrapping_add(call(number)));
    Ok(Ran { begin, end: Instant::now(), sum })
}

/// Runs the calls of all threads. Returns the time from the first to the last, and the sum of their
/// results.
fn run(job: PeerJob, tables: &impl Shared) -> Result<(Duration, u64), Failure> {
    let (cpus, arrived) = (topology::usable_cpus(), AtomicUsize::new(0));
    let outcomes: Vec<thread::Result<Result<Ran, Error>>> = thread::scope(|scope| {
        let spawn = |thread: u64| {
            let (cpus, arrived) = (&cpus, &arrived);
            scope.spawn(move || {
                if job.nr_threads as usize <= cpus.len() {
                    // If the kernel refuses, the thread is not pinned.
                    let _ = topology::pin_current_thread(cpus[thread as usize]);
                }
                run_thread(job, tables, thread, arrived)
            })
        };
        let threads: Vec<_> = (0..job.nr_threads).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut ran = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(thread) => ran.push(thread?),
            // Its message was printed.
            Err(_) => return Err(Failure::Check("a thread panicked".to_owned())),
        }
    }
    let begin = ran.iter().map(|ran| ran.begin).min();
    let end = ran.iter().map(|ran| ran.end).max();
    let wall = end.zip(begin).map_or(Duration::ZERO, |(end, begin)| end - begin);
    Ok((wall, ran.iter().fold(0, |sum, ran| sum.wrapping_add(ran.sum))))
}

fn on_peer<T: Table + Send>(job: PeerJob, mut table: T) -> Result<Duration, Failure> {
    job.prepare(&mut table);
    let table = Mutex::new(table);
    let (wall, found, table) = if job.nr_threads == 1 {
        let alone = Alone(table);
        let (wall, found) = run(job, &alone)?;
        (wall, found, alone.0)
    } else {
        let locked = Locked(table);
        let (wall, found) = run(job, &locked)?;
        (wall, found, locked.0)
    };
    let mut table = table.into_inner().unwrap_or_else(PoisonError::into_inner);
    job.check(&mut table, found).map_err(Failure::Check)?;
    Ok(wall)
}

fn on_slat(job: PeerJob, memory: Memory, memslots: Memslots) -> Result<Duration, Failure> {
    let engine = Engine::new(memory, job, memslots)?;
    let (wall, found) = run(job, &engine)?;
    job.check(&mut engine.handle()?, found).and_then(|()| engine.check()).map_err(Failure::Check)?;
    Ok(wall)
}

fn on_adapter(job: PeerJob, memory: Memory) -> Result<Duration, Failure> {
    let adapter = Adapter::new(memory, job)?;
    let (wall, found) = run(job, &adapter)?;
    job.check(&mut adapter.handle(), found).map_err(Failure::Check)?;
    Ok(wall)
}

/// Runs `job` on new tables of `subject`, and checks the work. Returns nanoseconds of wall time for
/// a unit, over all threads.
///
/// # Errors
/// A check failed, or there was no memory.
fn measure_once(memory: Memory, subject: Subject, job: PeerJob) -> Result<f64, Failure> {
    let no_memory = || Failure::CannotServe("there is no memory for tables; choose fewer pages or threads".to_owned());
    let wall = match subject {
        Subject::Slat => on_slat(job, memory, Memslots::Faulted),
        Subject::Pinned => on_slat(job, memory, Memslots::Pinned),
        Subject::Adapter => on_adapter(job, memory),
        Subject::Axaddrspace => on_peer(job, FaultSpace::new(memory, job).ok_or_else(no_memory)?),
        Subject::PageTableGeneric => on_peer(job, Generic::new(memory).ok_or_else(no_memory)?),
        #[cfg(target_arch = "x86_64")]
        Subject::PageTableMultiarch => on_peer(job, Multiarch::new().ok_or_else(no_memory)?),
        Subject::X86_64 => on_peer(job, X86::new(memory).ok_or_else(no_memory)?),
        Subject::Aarch64Paging => on_peer(job, Aarch64::new(memory)),
    };
    let what =
        |text: &str| format!("{}, {} on {} threads: {text}", subject.name(), job.operation.title(), job.nr_threads);
    let wall = wall.map_err(|failure| match failure {
        Failure::Check(text) => Failure::Check(what(&text)),
        failure => failure,
    })?;
    match memory.nr_in_use() {
        0 => Ok(wall.as_secs_f64() / (job.units() * job.nr_threads) as f64),
        left => Err(Failure::Check(what(&format!("{left} page-table pages were not freed")))),
    }
}

/// All repetitions of one job on the tables of one subject.
pub(crate) struct Cell {
    pub(crate) subject: Subject,
    pub(crate) job: PeerJob,
    /// Seconds of wall time for a unit, over all threads.
    pub(crate) times: Samples,
    last: f64,
}

/// The measurements so far.
pub(crate) struct Measured {
    pub(crate) cells: Vec<Cell>,
    /// Full repetitions.
    pub(crate) nr_runs: u32,
}

impl Measured {
    /// No measurement yet: a cell for each operation, number of threads and subject that has it,
    /// neighbours in this order.
    pub(crate) fn new(operations: &[Operation], threads: &[u64], subjects: &[Subject], pages: u64) -> Measured {
        let mut cells = Vec::new();
        for &operation in operations {
            for &nr_threads in threads {
                let job = PeerJob { operation, nr_threads, pages };
                let able = subjects.iter().filter(|subject| subject.can(operation));
                cells.extend(able.map(|&subject| Cell { subject, job, times: Samples::default(), last: 0.0 }));
            }
        }
        Measured { cells, nr_runs: 0 }
    }

    pub(crate) fn cell(&self, operation: Operation, nr_threads: u64, subject: Subject) -> Option<&Cell> {
        self.cells.iter().find(|cell| {
            cell.subject == subject && cell.job.operation == operation && cell.job.nr_threads == nr_threads
        })
    }

    /// Measures every cell once, those of a job one after the other, and keeps the times.
    ///
    /// # Errors
    /// A check failed, or there was no memory.
    pub(crate) fn repeat(&mut self, memory: Memory) -> Result<(), Failure> {
        self.measure(memory)?;
        self.keep();
        Ok(())
    }

    /// Measures every cell once, for the caches and the CPUs' clocks, and keeps nothing.
    ///
    /// # Errors
    /// As [`repeat`](Measured::repeat).
    pub(crate) fn warm_up(&mut self, memory: Memory) -> Result<(), Failure> {
        self.measure(memory)
    }

    fn measure(&mut self, memory: Memory) -> Result<(), Failure> {
        let repetition = self.nr_runs as usize;
        for cells in self.cells.chunk_by_mut(|one, other| one.job == other.job) {
            for which in turns::order(repetition, cells.len()) {
                let cell = &mut cells[which];
                cell.last = measure_once(memory, cell.subject, cell.job)?;
            }
        }
        Ok(())
    }

    fn keep(&mut self) {
        for cell in &mut self.cells {
            cell.times.push(cell.last);
        }
        self.nr_runs += 1;
    }

    /// The ratio of a cell's time to that of `slat`, one of slat's subjects, in each repetition;
    /// `None`: it is a cell of `slat`, or that was not measured.
    pub(crate) fn ratio_to(&self, slat: Subject, cell: &Cell) -> Option<Samples> {
        let base = self.cell(cell.job.operation, cell.job.nr_threads, slat)?;
        (cell.subject != slat).then(|| cell.times.paired_ratios(&base.times))
    }

    /// The ratio of one thread's time to a cell's in each repetition; `None`: it has one thread, or
    /// one thread was not measured.
    pub(crate) fn scaling(&self, cell: &Cell) -> Option<Samples> {
        let alone = self.cell(cell.job.operation, 1, cell.subject)?;
        (cell.job.nr_threads > 1).then(|| alone.times.paired_ratios(&cell.times))
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// Tables that are only prepared pass the check of no operation.
    #[test]
    fn the_check_notices_what_was_not_done() {
        fn assert_noticed(job: PeerJob, table: &mut impl Table) {
            assert!(job.check(table, 0).is_err(), "{job:?}");
        }
        let memory = Memory::for_threads(2).unwrap();
        for &operation in Operation::value_variants() {
            let job = PeerJob { operation, nr_threads: 2, pages: 512 };
            for memslots in [Memslots::Faulted, Memslots::Pinned] {
                assert_noticed(job, &mut Engine::new(memory, job, memslots).unwrap().handle().unwrap());
            }
            let (mut generic, mut x86, mut aarch64) =
                (Generic::new(memory).unwrap(), X86::new(memory).unwrap(), Aarch64::new(memory));
            job.prepare(&mut generic);
            assert_noticed(job, &mut generic);
            job.prepare(&mut x86);
            assert_noticed(job, &mut x86);
            job.prepare(&mut aarch64);
            assert_noticed(job, &mut aarch64);
        }
        let faults = PeerJob { operation: Operation::Fault, nr_threads: 2, pages: 512 };
        assert_noticed(faults, &mut FaultSpace::new(memory, faults).unwrap());
        assert_noticed(faults, &mut Adapter::new(memory, faults).unwrap().handle());
    }

    /// Two pages with one frame, and a frame of no page.
    #[test]
    fn the_check_of_faults_notices_wrong_frames() {
        fn assert_checked(space: &mut impl Table) {
            space.fault(7);
            let frame = space.look(7).unwrap().frame;
            assert!(!space.is_right_frame(0, 1));
            assert!(space.is_right_frame(0, frame));
            assert!(!space.is_right_frame(0, frame));
        }
        let memory = Memory::for_threads(1).unwrap();
        let job = PeerJob { operation: Operation::Fault, nr_threads: 1, pages: 512 };
        assert_checked(&mut FaultSpace::new(memory, job).unwrap());
        assert_checked(&mut Adapter::new(memory, job).unwrap().handle());
    }
}
