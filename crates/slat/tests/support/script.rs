//! Threads that take turns by a script, and the script tried with every point at which some of them
//! can be stopped: for what needs many threads, each at one point, which random schedules do not
//! find.

use std::sync::{Arc, Mutex};

use shuttle::scheduler::{DataSource, RandomDataSource, Schedule, Scheduler, Task, TaskId};

/// Where a turn may end before its thread does.
#[derive(Clone, Copy, Debug)]
pub enum Stops {
    Nowhere,
    /// At each of its steps.
    Everywhere,
    /// At each of so many steps before its end.
    NearTheEnd(usize),
}

/// A thread runs until it is stopped, waits, or is over.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    thread: usize,
    stops: Stops,
}

/// The turn of thread number `thread`; number 0 is the test's own, the others are those that it
/// spawns, in that order.
pub const fn turn_of(thread: usize) -> Turn {
    Turn { thread, stops: Stops::Nowhere }
}

impl Turn {
    pub const fn stopped(self, stops: Stops) -> Turn {
        Turn { stops, ..self }
    }
}

/// Runs `scenario` with every combination of stops; says how many there were.
pub fn explore(script: &[Turn], scenario: impl Fn() + Send + Sync + 'static) -> usize {
    let nr_tried = Arc::new(Mutex::new(0));
    let scheduler = Scripted {
        // Its own thread makes the others, and then waits for them.
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
    /// How many steps each turn may take in this execution. An odometer: its last place moves
    /// fastest.
    limits: Vec<usize>,
    /// The turn that it is.
    at: usize,
    /// Steps of this turn so far.
    nr_steps: usize,
    /// Of each turn of this execution, after how many steps its thread could not go on; `None` if
    /// it was stopped before.
    ends: Vec<Option<usize>>,
    nr_tried: Arc<Mutex<usize>>,
    data: RandomDataSource,
}

impl Scripted {
    /// The stops of the next execution, after those of the last one; false if there are no more.
    fn advance(&mut self) -> bool {
        if self.limits.is_empty() {
            // The first one finds out where each thread ends.
            self.limits = vec![usize::MAX; self.script.len()];
            return true;
        }
        for turn in (0..self.script.len()).rev() {
            if matches!(self.script[turn].stops, Stops::Nowhere) {
                continue;
            }
            let is_first = self.limits[turn] == usize::MAX;
            match (self.ends.get(turn).copied().flatten(), self.script[turn].stops) {
                // It ran to its end, and was to: now from its first stop on.
                (Some(end), stops) if is_first => {
                    self.limits[turn] = match stops {
                        Stops::NearTheEnd(nr_steps) => end.saturating_sub(nr_steps),
                        _ => 0,
                    };
                    return true;
                }
                // There are no more stops: the one before moves on, and this one begins anew.
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
        // The script is over: the test's own thread, and then those that it has let go on.
        runnable.first().map(|task| task.id())
    }

    fn next_u64(&mut self) -> u64 {
        self.data.next_u64()
    }
}
