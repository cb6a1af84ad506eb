//! What else used the CPUs while an experiment ran.
//!
//! The load average counts the threads of the experiment itself. So this compares the time that all
//! processes used with the time that this process used (`/proc/stat`, `/proc/self/stat`).

use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// A shorter experiment is shorter than many ticks of these counters.
const MIN_TIME: Duration = Duration::from_secs(1);

/// A machine with less other use is idle enough to measure on.
const IDLE: f64 = 0.05;

/// Shares of the time of all CPUs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Busy {
    /// Of other processes.
    pub others: f64,
    /// Of other virtual machines: time in which this machine's hypervisor did not run its CPUs.
    pub steal: f64,
}

impl Busy {
    /// Whether figures are disturbed.
    pub fn is_disturbing(&self) -> bool {
        self.others > IDLE || self.steal > IDLE
    }
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "The machine was busy: other processes used {:.0}% of its CPUs, other machines {:.0}%.\n\
             Measure again on an idle machine.",
            self.others * 100.0,
            self.steal * 100.0
        )
    }
}

/// Counts of ticks since the machine started.
#[derive(Clone, Copy, Default, Debug)]
struct Ticks {
    all: u64,
    used: u64,
    steal: u64,
    own: u64,
}

/// The counts when an experiment begins.
#[derive(Debug)]
pub struct Watch {
    begin: Instant,
    ticks: Option<Ticks>,
}

impl Watch {
    pub fn begin() -> Watch {
        Watch { begin: Instant::now(), ticks: read() }
    }

    /// The use since then; `None`: it is not known, or the time was too short.
    pub fn end(&self) -> Option<Busy> {
        if self.begin.elapsed() < MIN_TIME {
            return None;
        }
        between(self.ticks?, read()?)
    }
}

fn between(from: Ticks, to: Ticks) -> Option<Busy> {
    let all = to.all.checked_sub(from.all).filter(|&all| all > 0)? as f64;
    let since = |of: fn(&Ticks) -> u64| of(&to).saturating_sub(of(&from)) as f64;
    let others = (since(|ticks| ticks.used) - since(|ticks| ticks.own)).max(0.0);
    Some(Busy { others: others / all, steal: since(|ticks| ticks.steal) / all })
}

fn read() -> Option<Ticks> {
    parse(&fs::read_to_string("/proc/stat").ok()?, &fs::read_to_string("/proc/self/stat").ok()?)
}

/// Parses both files (proc_stat(5), proc_pid_stat(5)).
fn parse(all: &str, own: &str) -> Option<Ticks> {
    let numbers = |text: &str| text.split_whitespace().map_while(|word| word.parse::<u64>().ok()).collect::<Vec<_>>();
    let line = numbers(all.lines().find_map(|line| line.strip_prefix("cpu "))?);
    // `user` and `nice` include the time of guests.
    let &[user, nice, system, idle, iowait, irq, softirq, steal, ..] = &line[..] else { return None };
    let used = user + nice + system + irq + softirq;
    // Behind the name: utime, stime, and those of children that have ended.
    let behind_name: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
    let own = behind_name.get(11..15)?.iter().filter_map(|word| word.parse::<u64>().ok()).sum();
    Some(Ticks { all: used + idle + iowait + steal, used, steal, own })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_time_between() {
        let own = "7 (a ) b) R 1 1 1 0 -1 0 0 0 0 0 30 10 5 5 20 0 1 0 0";
        let from = parse("cpu  100 0 50 800 10 0 0 40 0 0\ncpu0 1 2\n", own).unwrap();
        assert_eq!((from.all, from.used, from.steal, from.own), (1000, 150, 40, 50));
        let to = Ticks { all: 2000, used: 650, steal: 140, own: 350 };
        let busy = between(from, to).unwrap();
        assert_eq!(busy, Busy { others: 0.2, steal: 0.1 });
        assert!(busy.is_disturbing() && busy.to_string().contains("20%") && busy.to_string().contains("10%"));
        assert!(!Busy { others: 0.01, steal: 0.0 }.is_disturbing());
        assert!(between(from, from).is_none() && parse("intr 1", own).is_none());
    }

    #[test]
    fn this_machine_tells() {
        assert!(read().is_some_and(|ticks| ticks.all >= ticks.used));
    }
}
