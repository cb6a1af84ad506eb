//! A script of turns for threads, tried with every point at which some of them can be stopped. It
//! is for cases that need many threads, each at one point, which random schedules do not find.

use std::sync::{Arc, Mutex};

use shuttle::scheduler::{DataSource, RandomDataSource, Schedule, Scheduler, Task, TaskId};

/// Where a turn may end before its thread ends.
#[derive(Clone, Copy, Debug)]
pub enum Stops {
    Nowhere,
    /// After each of its steps.
    Everywhere,
    /// After each of this many steps before its end.
    NearTheEnd(usize),
}

/// A thread runs until it is stopped, waits, or ends.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    thread: usize,
    stops: Stops,
}

/// The turn of thread number `thread`. Number 0 is the test's own thread; the others are those that
/// it spawns, in that order.
pub const fn turn_of(thread: usize) -> Turn {
    Turn { thread, stops: Stops::Nowhere }
}

impl Turn {
    pub const fn stopped(self, stops: Stops) -> Turn {
        Turn { stops, ..self }
    }
}

/// Runs `scenario` with every combination of stops. Returns how many there were.
pub fn explore(script: &[Turn], scenario: impl Fn() + Send + Sync + 'static) -> usize {
    let nr_tried = Arc::new(Mutex::new(0));
    let scheduler = Scripted {
        // The test's own thread spawns the others, then waits for them.
        script: std::iter::once(turn_of(0)).chain(script.iter().copied()).collect(),
        limits: Vec::new(),
        at: 0,
        nr_steps: 0,
        ends: Vec::new(),
        nr_tried: Arc::clone(&nr_tried),
        data: RandomDataSource::initialize(0),
    };
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 18;
    shuttle::Runner::new(scheduler, config).run(scenario);
    let nr_tried = *nr_tried.lock().unwrap();
    assert!(nr_tried > 1, "no thread was stopped anywhere");
    nr_tried
}

struct Scripted {
    script: Vec<Turn>,
    /// How many steps each turn may take in this execution. They count up like digits: the last one
    /// changes first.
    limits: Vec<usize>,
    /// Index of the current turn.
    at: usize,
    /// Steps of this turn so far.
    nr_steps: usize,
    /// For each turn of this execution, the step after which its thread could not go on. `None` if
    /// the turn was stopped before.
    ends: Vec<Option<usize>>,
    nr_tried: Arc<Mutex<usize>>,
    data: RandomDataSource,
}

impl Scripted {
    /// Moves on to the stops of the next execution. Returns false if there are no more.
    fn advance(&mut self) -> bool {
        if self.limits.is_empty() {
            // The first execution finds out where each thread ends.
            self.limits = vec![usize::MAX; self.script.len()];
            return true;
        }
        for turn in (0..self.script.len()).rev() {
            if matches!(self.script[turn].stops, Stops::Nowhere) {
                continue;
            }
            let is_first = self.limits[turn] == usize::MAX;
            match (self.ends.get(turn).copied().flatten(), self.script[turn].stops) {
                // It ran to its end, as intended. Next, its first stop.
                (Some(end), stops) if is_first => {
                    self.limits[turn] = match stops {
                        Stops::NearTheEnd(nr_steps) => end.saturating_sub(nr_steps),
                        _ => 0,
                    };
                    return true;
                }
                // No stops are left: the turn before moves on, and this one starts over.
                (Some(_), _) => self.limits[turn] = usize::MAX,
                (None, _) => {
                    self.limits[turn] += 1;
                    return true;
                }
            }
        }
        false
    }
}

impl Scheduler for Scripted {
    fn new_execution(&mut self) -> Option<Schedule> {
        if !self.advance() {
            return None;
        }
        *self.nr_tried.lock().unwrap() += 1;
        (self.at, self.nr_steps) = (0, 0);
        self.ends = vec![None; self.script.len()];
        Some(Schedule::new(self.data.reinitialize()))
    }

    fn next_task(&mut self, runnable: &[&Task], _: Option<TaskId>, _: bool) -> Option<TaskId> {
        while let Some(turn) = self.script.get(self.at) {
            let task = runnable.iter().map(|task| task.id()).find(|&id| usize::from(id) == turn.thread);
            if task.is_none() {
                self.ends[self.at] = Some(self.nr_steps);
            } else if self.nr_steps < self.limits[self.at] {
                self.nr_steps += 1;
                return task;
            }
            (self.at, self.nr_steps) = (self.at + 1, 0);
        }
        // The script is over. The test's own thread runs, then those that it has released.
        runnable.first().map(|task| task.id())
    }

    fn next_u64(&mut self) -> u64 {
        self.data.next_u64()
    }
}
