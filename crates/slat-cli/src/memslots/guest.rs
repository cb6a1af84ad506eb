//! The guest of the tests: one vCPU on a thread of its own, which does one job at a time.
//!
//! # The protocol of a window
//! While a slot is moved away and back, the guest writes to pages that have memory only now and then. Whether it should
//! have had any is known in hindsight: the host counts its steps ([`Steps`]), before it begins to move the slot and when it
//! is done. If the guest finds the same step before and after a write, the whole write fell into it: in its place, the
//! slot must take the write; away, it must not, for the move had returned. During a move either is right.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slat::shadow::Gva;
use slat::{Access, Exit, Gfn, Gpa};
use slat_machine::cpu::CpuError;
use slat_machine::machine::MachineError;
use slat_machine::walk::HardwareFormat;
use thiserror::Error;

use super::area::{self, AreaCpu};
use crate::failure::{Failure, check_failed};

/// What guest and host write, by turns. KVM's test has the same values.
pub(super) const VALUES: [u64; 2] = [0x1122_3344_5566_7788, 0x99AA_BBCC_DDEE_FF00];

/// What the guest is to do. Pages are counted from the area's start; the word is that at `offset_bytes` of each page.
#[derive(Clone, Debug)]
pub(super) enum Job {
    /// Writes the first word of each page.
    Fill { pages: Range<u64>, value: u64 },
    /// Reads the word of each page, which must be `expected`, and clears it.
    Take { pages: Range<u64>, offset_bytes: u64, expected: u64 },
    /// Writes the first word of each page, again and again, until it is told to stop. Those of `moving` are in a slot that
    /// comes and goes; the others read back what was written.
    Window { pages: Range<u64>, moving: Range<u64> },
}

/// What a job did.
#[derive(Clone, Debug, Default)]
pub(super) struct Done {
    /// Words read back, or known to be there or not by the host's step.
    pub(super) nr_verified: u64,
    /// Writes that left to user space, since there was no memory.
    pub(super) nr_mmio_exits: u64,
    /// For a window: what the guest wrote to each page at last, 0 if nothing.
    pub(super) written: Vec<u64>,
}

/// What the guest should not have seen.
#[derive(Clone, Copy, Debug, Error)]
enum Wrong {
    #[error("access to {gpa}: {error}")]
    Access { gpa: Gpa, error: CpuError },
    #[error("{gpa} holds {found:#x} where the guest expects {expected:#x}")]
    Value { gpa: Gpa, found: u64, expected: u64 },
    #[error("a write to {gpa} went through, though the slot had been moved away")]
    WroteWithoutSlot { gpa: Gpa },
    #[error("a write to {gpa} left to user space, though the slot was in its place")]
    ExitDespiteSlot { gpa: Gpa },
}

/// Where the moving slot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Home,
    Away,
    /// On the way from one to the other.
    Moving,
}

/// The host's steps: in its place, moving, away, moving, and so on.
#[derive(Debug, Default)]
pub(super) struct Steps(AtomicU64);

impl Steps {
    /// The host's: the next step begins. Release: who sees the step sees what was done before it.
    pub(super) fn next(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Acquire: a guest that has seen something of a move, through the tables or slots, finds its step or a later one.
    fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn place(step: u64) -> Place {
        match step % 4 {
            0 => Place::Home,
            2 => Place::Away,
            _ => Place::Moving,
        }
    }
}

#[derive(Debug, Default)]
struct Signals {
    stop: AtomicBool,
    steps: Steps,
    /// Passes over the window that the guest has completed; [`Signals::NO_MORE`] when it is done with it.
    passes: AtomicU64,
}

impl Signals {
    const NO_MORE: u64 = u64::MAX;
}

/// The guest, as the host has it.
pub(super) struct Guest {
    jobs: Option<Sender<Job>>,
    answers: Receiver<Result<Done, Wrong>>,
    signals: Arc<Signals>,
    timeout: Duration,
    /// `None` once the guest was given up.
    thread: Option<JoinHandle<()>>,
}

impl Guest {
    /// Starts the vCPU's thread.
    pub(super) fn start<F: HardwareFormat>(mut cpu: AreaCpu<F>, timeout: Duration) -> Result<Guest, Failure> {
        let (jobs, for_guest) = channel::<Job>();
        let (from_guest, answers) = channel();
        let signals = Arc::new(Signals::default());
        let signals_of_guest = Arc::clone(&signals);
        let work = move || {
            for job in for_guest {
                if from_guest.send(work(&mut cpu, &job, &signals_of_guest)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("vcpu 0".to_owned())
            .spawn(work)
            .map_err(|source| MachineError::Thread { vcpu: 0, source })?;
        Ok(Guest { jobs: Some(jobs), answers, signals, timeout, thread: Some(thread) })
    }

    /// Gives the guest a job, which it begins at once.
    pub(super) fn post(&self, job: Job) {
        // If the thread is gone, `wait` says so.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    /// Waits for the end of the job.
    pub(super) fn wait(&mut self) -> Result<Done, Failure> {
        match self.answers.recv_timeout(self.timeout) {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(wrong)) => Err(check_failed(wrong)),
            Err(RecvTimeoutError::Disconnected) => Err(check_failed("the guest's thread panicked")),
            Err(RecvTimeoutError::Timeout) => {
                // It may never come back: do not wait for it again.
                self.thread = None;
                Err(check_failed(format_args!("the guest did not finish within {} s", self.timeout.as_secs())))
            }
        }
    }

    /// The host's steps, for a window.
    pub(super) fn steps(&self) -> &Steps {
        &self.signals.steps
    }

    /// Waits until the guest has written the whole window once more, so that the host's step has been looked at. Returns
    /// also if the guest has failed or takes too long: [`stop`](Guest::stop) has more to say about that.
    pub(super) fn wait_for_pass(&self) {
        let begin = Instant::now();
        // Relaxed, and so where it is counted: it only makes the host wait.
        let passes = || self.signals.passes.load(Ordering::Relaxed);
        // The pass that is under way may have begun before.
        let wanted = passes().saturating_add(2);
        while passes() < wanted && begin.elapsed() < self.timeout {
            std::thread::yield_now();
        }
    }

    /// Stops a window and waits for its end.
    pub(super) fn stop(&mut self) -> Result<Done, Failure> {
        // Relaxed: when exactly it is noticed does not matter.
        self.signals.stop.store(true, Ordering::Relaxed);
        self.wait()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.signals.stop.store(true, Ordering::Relaxed);
        // The end of the jobs is the end of the thread.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported by `wait`.
            let _ = thread.join();
        }
    }
}

fn work<F: HardwareFormat>(cpu: &mut AreaCpu<F>, job: &Job, signals: &Signals) -> Result<Done, Wrong> {
    match job {
        Job::Fill { pages, value } => fill(cpu, pages.clone(), *value),
        Job::Take { pages, offset_bytes, expected } => take(cpu, pages.clone(), *offset_bytes, *expected),
        Job::Window { pages, moving } => {
            let result = window(cpu, pages, moving, signals);
            signals.passes.store(Signals::NO_MORE, Ordering::Relaxed);
            result
        }
    }
}

/// The guest has paging off: its addresses are guest-physical.
fn gva(page: u64) -> Gva {
    Gva(area::gpa(page).0)
}

fn failed(gva: Gva) -> impl Fn(CpuError) -> Wrong {
    move |error| Wrong::Access { gpa: Gpa(gva.0), error }
}

fn expect<F: HardwareFormat>(cpu: &mut AreaCpu<F>, at: Gva, expected: u64) -> Result<(), Wrong> {
    match cpu.read(at).map_err(failed(at))? {
        found if found == expected => Ok(()),
        found => Err(Wrong::Value { gpa: Gpa(at.0), found, expected }),
    }
}

fn fill<F: HardwareFormat>(cpu: &mut AreaCpu<F>, pages: Range<u64>, value: u64) -> Result<Done, Wrong> {
    for page in pages {
        cpu.write(gva(page), value).map_err(failed(gva(page)))?;
    }
    Ok(Done::default())
}

fn take<F: HardwareFormat>(
    cpu: &mut AreaCpu<F>,
    pages: Range<u64>,
    offset_bytes: u64,
    expected: u64,
) -> Result<Done, Wrong> {
    let nr_verified = pages.end - pages.start;
    for page in pages {
        let at = Gva(gva(page).0 + offset_bytes);
        expect(cpu, at, expected)?;
        cpu.write(at, 0).map_err(failed(at))?;
    }
    Ok(Done { nr_verified, ..Done::default() })
}

fn window<F: HardwareFormat>(
    cpu: &mut AreaCpu<F>,
    pages: &Range<u64>,
    moving: &Range<u64>,
    signals: &Signals,
) -> Result<Done, Wrong> {
    let mut done = Done { written: vec![0; (pages.end - pages.start) as usize], ..Done::default() };
    for value in VALUES.into_iter().cycle() {
        for page in pages.clone() {
            // Relaxed: see `stop`.
            if signals.stop.load(Ordering::Relaxed) {
                return Ok(done);
            }
            let written = &mut done.written[(page - pages.start) as usize];
            if !moving.contains(&page) {
                cpu.write(gva(page), value).map_err(failed(gva(page)))?;
                *written = value;
                expect(cpu, gva(page), value)?;
                done.nr_verified += 1;
                continue;
            }
            let step = signals.steps.now();
            let went_through = write_if_there(cpu, page, value)?;
            // One step around the whole write, or no place that could be told.
            let place = if signals.steps.now() == step { Steps::place(step) } else { Place::Moving };
            match (went_through, place) {
                (true, Place::Away) => return Err(Wrong::WroteWithoutSlot { gpa: area::gpa(page) }),
                (false, Place::Home) => return Err(Wrong::ExitDespiteSlot { gpa: area::gpa(page) }),
                (_, Place::Moving) => {}
                (true, Place::Home) | (false, Place::Away) => done.nr_verified += 1,
            }
            if went_through {
                *written = value;
            } else {
                done.nr_mmio_exits += 1;
            }
        }
        signals.passes.fetch_add(1, Ordering::Relaxed);
    }
    Ok(done)
}

/// Writes the first word of the page; `false` if there is no memory. What left to user space must be that very write.
fn write_if_there<F: HardwareFormat>(cpu: &mut AreaCpu<F>, page: u64, value: u64) -> Result<bool, Wrong> {
    let at = gva(page);
    match cpu.write(at, value) {
        Ok(()) => Ok(true),
        Err(CpuError::Exit(Exit::Mmio { gpa, access: Access::Write })) if gpa.0 == at.0 => Ok(false),
        Err(error) => Err(failed(at)(error)),
    }
}

/// Pages that a size in bytes is.
pub(super) const fn pages(size_bytes: u64) -> u64 {
    size_bytes >> Gfn::SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_in_its_place_away_or_moving() {
        let steps = Steps::default();
        let places: Vec<Place> = (0..6)
            .map(|_| {
                let place = Steps::place(steps.now());
                steps.next();
                place
            })
            .collect();
        use Place::{Away, Home, Moving};
        assert_eq!(places, [Home, Moving, Away, Moving, Home, Moving]);
    }
}
