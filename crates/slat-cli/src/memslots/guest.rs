//! The guest of the tests: one vCPU on its own thread, which does one job at a time.
//!
//! # The protocol of a window
//! While a memslot is moved away and back, the guest writes pages that have memory only part of the
//! time. Whether a write should have found memory is known afterwards. The host counts its steps
//! ([`Steps`]), before it begins to move the memslot and when it is done. If the guest reads the
//! same step before and after a write, the whole write was within that step. With the memslot in
//! its place, the write must succeed. With the memslot away, it must exit, since the move had
//! returned. During a move either is right.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slat::shadow::Gva;
use slat::{Access, Exit, Gfn, Gpa};
use slat_machine::hardware::cpu::CpuError;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::vm::machine::MachineError;
use thiserror::Error;

use super::area::{self, AreaCpu};
use crate::failure::{Failure, check_failed};

/// The values that guest and host write, in turn, as in KVM's test.
pub(super) const VALUES: [u64; 2] = [0x1122_3344_5566_7788, 0x99AA_BBCC_DDEE_FF00];

/// A job of the guest. Pages are counted from the area's start; the word is that at `offset_bytes`
/// of each page.
#[derive(Clone, Debug)]
pub(super) enum GuestJob {
    /// Writes the first word of each page.
    Fill { pages: Range<u64>, value: u64 },
    /// Reads the word of each page, which must be `expected`, and clears it.
    Take { pages: Range<u64>, offset_bytes: u64, expected: u64 },
    /// Writes the first word of each page, again and again, until the host stops it. The pages of
    /// `moving` are in a memslot that moves away and back; in the others the guest reads back each
    /// write.
    Window { pages: Range<u64>, moving: Range<u64> },
}

/// The result of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Done {
    /// Words read back, or whose write had the outcome of the host's step.
    pub(super) nr_verified: u64,
    /// Writes that exited to user space for lack of memory.
    pub(super) nr_mmio_exits: u64,
    /// For a window: the guest's last write to each page, 0 if none.
    pub(super) written: Vec<u64>,
}

/// A wrong result of an access.
#[derive(Clone, Copy, Debug, Error)]
enum Wrong {
    #[error("access to {gpa}: {error}")]
    Access { gpa: Gpa, error: CpuError },
    #[error("{gpa} holds {found:#x} where the guest expects {expected:#x}")]
    Value { gpa: Gpa, found: u64, expected: u64 },
    #[error("a write to {gpa} succeeded, though the slot had been moved away")]
    WroteWithoutSlot { gpa: Gpa },
    #[error("a write to {gpa} exited to user space, though the slot was in its place")]
    ExitDespiteSlot { gpa: Gpa },
}

/// The position of the moving memslot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Home,
    Away,
    /// During a move.
    Moving,
}

/// The host's steps: in its place, moving, away, moving, and so on.
#[derive(Debug, Default)]
pub(super) struct Steps(AtomicU64);

impl Steps {
    /// The host begins the next step. Release: a guest that reads the step observes what was done
    /// before it.
    pub(super) fn next(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Acquire: a guest that has observed a move, through page tables or memslots, reads its step
    /// or a later one.
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
    /// Passes over the window that the guest has completed; [`Signals::NO_MORE`] when it has ended
    /// the job.
    passes: AtomicU64,
}

impl Signals {
    const NO_MORE: u64 = u64::MAX;
}

/// The host's handle of the guest.
pub(super) struct AreaGuest {
    jobs: Option<Sender<GuestJob>>,
    answers: Receiver<Result<Done, Wrong>>,
    signals: Arc<Signals>,
    timeout: Duration,
    /// `None` after a timeout of the guest.
    thread: Option<JoinHandle<()>>,
}

impl AreaGuest {
    pub(super) fn start<F: HardwareFormat>(mut cpu: AreaCpu<F>, timeout: Duration) -> Result<AreaGuest, Failure> {
        let (jobs, for_guest) = channel::<GuestJob>();
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
        Ok(AreaGuest { jobs: Some(jobs), answers, signals, timeout, thread: Some(thread) })
    }

    /// Posts a job, which the guest begins at once.
    pub(super) fn post(&self, job: GuestJob) {
        // If the thread has ended, `wait` returns the error.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    pub(super) fn wait(&mut self) -> Result<Done, Failure> {
        match self.answers.recv_timeout(self.timeout) {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(wrong)) => Err(check_failed(wrong)),
            Err(RecvTimeoutError::Disconnected) => Err(check_failed("the guest's thread panicked")),
            Err(RecvTimeoutError::Timeout) => {
                // It may never return: do not wait for it again.
                self.thread = None;
                Err(check_failed(format_args!("the guest did not finish within {} s", self.timeout.as_secs())))
            }
        }
    }

    /// The host's steps, for a window.
    pub(super) fn steps(&self) -> &Steps {
        &self.signals.steps
    }

    /// Waits until the guest has written the whole window once more within the host's step. Returns
    /// also if the guest has failed or takes too long: [`stop`](AreaGuest::stop) has the error
    /// then.
    pub(super) fn wait_for_pass(&self) {
        let begin = Instant::now();
        // Relaxed, also where it is counted: it only delays the host.
        let passes = || self.signals.passes.load(Ordering::Relaxed);
        // The current pass may have begun before the step.
        let wanted = passes().saturating_add(2);
        while passes() < wanted && begin.elapsed() < self.timeout {
            std::thread::yield_now();
        }
    }

    /// Stops a window and waits for its end.
    pub(super) fn stop(&mut self) -> Result<Done, Failure> {
        // Relaxed: it does not matter when exactly the flag is observed.
        self.signals.stop.store(true, Ordering::Relaxed);
        self.wait()
    }
}

impl Drop for AreaGuest {
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

fn work<F: HardwareFormat>(cpu: &mut AreaCpu<F>, job: &GuestJob, signals: &Signals) -> Result<Done, Wrong> {
    match job {
        GuestJob::Fill { pages, value } => fill(cpu, pages.clone(), *value),
        GuestJob::Take { pages, offset_bytes, expected } => take(cpu, pages.clone(), *offset_bytes, *expected),
        GuestJob::Window { pages, moving } => {
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
            let has_written = write_if_mapped(cpu, page, value)?;
            // Without one step around the whole write, the position is unknown.
            let place = if signals.steps.now() == step { Steps::place(step) } else { Place::Moving };
            match (has_written, place) {
                (true, Place::Away) => return Err(Wrong::WroteWithoutSlot { gpa: area::gpa(page) }),
                (false, Place::Home) => return Err(Wrong::ExitDespiteSlot { gpa: area::gpa(page) }),
                (_, Place::Moving) => {}
                (true, Place::Home) | (false, Place::Away) => done.nr_verified += 1,
            }
            if has_written {
                *written = value;
            } else {
                done.nr_mmio_exits += 1;
            }
        }
        signals.passes.fetch_add(1, Ordering::Relaxed);
    }
    Ok(done)
}

/// Writes the first word of the page; `false` if there is no memory. An exit to user space must be
/// for this very write.
fn write_if_mapped<F: HardwareFormat>(cpu: &mut AreaCpu<F>, page: u64, value: u64) -> Result<bool, Wrong> {
    let at = gva(page);
    match cpu.write(at, value) {
        Ok(()) => Ok(true),
        Err(CpuError::Exit(Exit::Mmio { gpa, access: Access::Write })) if gpa.0 == at.0 => Ok(false),
        Err(error) => Err(failed(at)(error)),
    }
}

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
