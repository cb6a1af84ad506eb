//! Cache coherence: what an access to a line costs, by the cores that have it.
//!
//! # Guarantees
//! The accesses to a line are granted in the order in which they are asked for, each no earlier
//! than the one before lets the line go.
//!
//! # Implementation
//! A line is in memory alone, in one core's caches, which may write it, or in those of some cores,
//! which may read it. A core forgets the lines that it has owned for longest: its capacity is
//! counted in lines that it has fetched since.
//!
//! A core that has got a line to write it keeps it until it goes on to the next one: what it does
//! to the line meanwhile comes before that one, whichever has asked first.
//!
//! A line takes 32 bytes: up to four cores that share it, or the number of a set of cores.

#![expect(unsafe_code, reason = "the lines are a slice in reserved address space")]

use std::{ptr, slice};

use slat_costed::costed::Step;

use crate::arena::{self, NR_LINES};
use crate::error::ModelError;
use crate::parameters::{Parameters, Ps};
use crate::topology::{MAX_CPUS, MAX_NODES, Topology};

/// Where a line is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum At {
    /// In no cache. Zeroes are such a line.
    Memory = 0,
    /// In the caches of `owner` alone, or on its way there. If it came from another core, that is
    /// the first of `sharers`, and has it until `left_at`.
    Owned = 1,
    /// In those of the first `nr_sharers` of `sharers`.
    Few = 2,
    /// In those of a set, whose number is in the first two of `sharers`.
    Many = 3,
}

const NR_FEW: usize = 4;

#[repr(C)]
struct Line {
    /// When the next request is served.
    free_at: Ps,
    left_at: Ps,
    /// How many lines `owner` had fetched when it got this one.
    fetched: u32,
    sharers: [u16; NR_FEW],
    owner: u16,
    nr_sharers: u8,
    at: u8,
}

const _: () = assert!(size_of::<Line>() == 32);

/// A set of cores.
type Cores = [u64; MAX_CPUS / 64];

fn is_in(set: &Cores, core: u16) -> bool {
    set[usize::from(core / 64)] >> (core % 64) & 1 == 1
}

/// All lines of the machine.
pub(crate) struct Lines {
    lines: &'static mut [Line],
    sets: Vec<Cores>,
    free_sets: Vec<u32>,
    /// For each core its complex and its node.
    cores: Vec<(u16, u8)>,
    /// For each core, how many lines it has fetched.
    fetched: Vec<u32>,
    /// When the links of each node are free.
    link_free_at: [Ps; MAX_NODES],
    cost: Cost,
}

/// The parameters in picoseconds.
struct Cost {
    hit: Ps,
    complex: Ps,
    node: Ps,
    across: Ps,
    memory_local: Ps,
    memory_remote: Ps,
    link_held: Ps,
    rmw: Ps,
    held_after_read: Ps,
    held_after_write: Ps,
    core_lines: u32,
}

/// When an access takes effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Grant {
    pub(crate) at: Ps,
    /// Whether the line came from elsewhere.
    pub(crate) is_fetched: bool,
}

impl Line {
    fn at(&self) -> At {
        match self.at {
            0 => At::Memory,
            1 => At::Owned,
            2 => At::Few,
            _ => At::Many,
        }
    }

    fn set(&self) -> usize {
        usize::from(self.sharers[0]) | usize::from(self.sharers[1]) << 16
    }
}

impl Lines {
    pub(crate) fn new(topology: &Topology, parameters: &Parameters) -> Result<Lines, ModelError> {
        let memory = arena::reserve(NR_LINES * size_of::<Line>())?;
        // SAFETY: just reserved, for as long as the process lives or `drop` gives it back, and
        // zeroes are lines.
        let lines = unsafe { slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(memory), NR_LINES) };
        let mut cores = vec![(0, 0); topology.nr_cores()];
        for cpu in 0..topology.nr_cpus() {
            let place = topology.place(cpu);
            cores[usize::from(place.core)] = (place.complex, place.node);
        }
        let of = &parameters.coherence;
        let cost = Cost {
            hit: of.hit.ps(),
            complex: of.transfer_in_complex.ps(),
            node: of.transfer_in_node.ps(),
            across: of.transfer_across_nodes.ps(),
            memory_local: of.memory_local.ps(),
            memory_remote: of.memory_remote.ps(),
            link_held: of.link_held.ps(),
            rmw: of.rmw.ps(),
            held_after_read: of.held_after_read.ps(),
            held_after_write: of.held_after_write.ps(),
            core_lines: u32::try_from(of.core_lines.whole()).unwrap_or(u32::MAX),
        };
        let fetched = vec![0; cores.len()];
        Ok(Lines { lines, sets: Vec::new(), free_sets: Vec::new(), cores, fetched, link_free_at: [0; MAX_NODES], cost })
    }

    /// The time from one core's caches to another's.
    pub(crate) fn transfer(&self, from: u16, to: u16) -> Ps {
        let [(from_complex, from_node), (to_complex, to_node)] = [from, to].map(|core| self.cores[usize::from(core)]);
        match () {
            _ if from == to => self.cost.hit,
            _ if from_complex == to_complex => self.cost.complex,
            _ if from_node == to_node => self.cost.node,
            _ => self.cost.across,
        }
    }

    /// The time from memory: of page-table pages the node is known; the heap's is where its user
    /// is.
    fn memory(&mut self, line: u32, core: u16, start: Ps) -> Ps {
        match arena::table_node_of_line(line) {
            Some(home) if home != self.cores[usize::from(core)].1 => self.remote_memory(usize::from(home), start),
            _ => self.cost.memory_local,
        }
    }

    /// The time of a line from the memory of another node, whose links are busy with those before.
    fn remote_memory(&mut self, home: usize, start: Ps) -> Ps {
        let free_at = &mut self.link_free_at[home];
        let waits = free_at.saturating_sub(start);
        *free_at = start + waits + self.cost.link_held;
        waits + self.cost.memory_remote
    }

    /// `core` fetches a line of the guest's own data, whose place in its caches is another line's
    /// then. Returns the time from the memory of `home`.
    pub(crate) fn fetch_data(&mut self, core: u16, home: usize, now: Ps) -> Ps {
        let fetched = &mut self.fetched[usize::from(core)];
        *fetched = fetched.wrapping_add(1);
        if usize::from(self.cores[usize::from(core)].1) == home {
            self.cost.memory_local
        } else {
            self.remote_memory(home, now)
        }
    }

    fn is_forgotten(&self, line: &Line) -> bool {
        self.fetched[usize::from(line.owner)].wrapping_sub(line.fetched) > self.cost.core_lines
    }

    fn shares(&self, line: &Line, core: u16) -> bool {
        match line.at() {
            At::Memory => false,
            At::Owned => line.owner == core,
            At::Few => line.sharers[..usize::from(line.nr_sharers)].contains(&core),
            At::Many => is_in(&self.sets[line.set()], core),
        }
    }

    /// The times of the shortest and the longest way from `core` to another core that has the line.
    fn ways(&self, line: &Line, core: u16) -> Option<(Ps, Ps)> {
        let mut ways = None;
        let mut add = |sharer: u16| {
            if sharer != core {
                let way = self.transfer(sharer, core);
                let (shortest, longest): &mut (Ps, Ps) = ways.get_or_insert((way, way));
                *shortest = way.min(*shortest);
                *longest = way.max(*longest);
            }
        };
        match line.at() {
            At::Memory => {}
            At::Owned => add(line.owner),
            At::Few => line.sharers[..usize::from(line.nr_sharers)].iter().for_each(|&sharer| add(sharer)),
            At::Many => {
                let set = &self.sets[line.set()];
                (0..self.cores.len() as u16).filter(|&core| is_in(set, core)).for_each(add);
            }
        }
        ways
    }

    /// `core` asks at `now` for the access `step` to `line`.
    #[inline]
    pub(crate) fn request(&mut self, core: u16, now: Ps, line: u32, step: Step) -> Grant {
        let extra = if step == Step::Rmw { self.cost.rmw } else { 0 };
        let found = &self.lines[line as usize];
        let hits = match found.at() {
            At::Owned if found.owner == core => !self.is_forgotten(found),
            At::Owned => now < found.left_at && found.sharers[0] == core,
            At::Few | At::Many => step == Step::Load && self.shares(found, core),
            At::Memory => false,
        };
        if hits {
            return Grant { at: now + self.cost.hit + extra, is_fetched: false };
        }
        self.fetch(core, now, line, step, extra)
    }

    #[inline(never)]
    fn fetch(&mut self, core: u16, now: Ps, line: u32, step: Step, extra: Ps) -> Grant {
        let writes = step != Step::Load;
        let found = &self.lines[line as usize];
        let start = now.max(found.free_at);
        let is_owned = found.at() == At::Owned;
        let in_memory = found.at() == At::Memory || (is_owned && self.is_forgotten(found));
        // A read comes from the nearest, a write waits for the farthest.
        let ways = if in_memory { None } else { self.ways(found, core) };
        let way = ways.map(|(shortest, longest)| if writes { longest } else { shortest });
        // A core that has the line beside no other one only announces its write.
        let is_alone = !in_memory && way.is_none();
        let latency = match way {
            Some(way) => way,
            None if is_alone => self.cost.complex,
            None => self.memory(line, core, start),
        };
        let at = start + latency + extra;
        let fetched = &mut self.fetched[usize::from(core)];
        *fetched = fetched.wrapping_add(1);
        let fetched = *fetched;
        let becomes_owned = writes || in_memory;
        if becomes_owned {
            self.free_set(line);
        } else {
            self.add_sharer(line, core);
        }
        let held = if writes { at + self.cost.held_after_write } else { start + self.cost.held_after_read };
        let found = &mut self.lines[line as usize];
        found.free_at = held;
        if becomes_owned {
            found.left_at = if is_owned { start } else { 0 };
            found.sharers[0] = found.owner;
            found.owner = core;
            found.fetched = fetched;
            found.at = At::Owned as u8;
        }
        Grant { at, is_fetched: true }
    }

    fn free_set(&mut self, line: u32) {
        let found = &self.lines[line as usize];
        if found.at() == At::Many {
            self.free_sets.push(found.set() as u32);
        }
    }

    fn add_sharer(&mut self, line: u32, core: u16) {
        let found = &mut self.lines[line as usize];
        let add = |set: &mut Cores, core: u16| set[usize::from(core / 64)] |= 1 << (core % 64);
        match found.at() {
            At::Memory => {}
            At::Owned => {
                let owner = found.owner;
                found.sharers[..2].copy_from_slice(&[owner, core]);
                found.nr_sharers = 2;
                found.at = At::Few as u8;
            }
            At::Few if usize::from(found.nr_sharers) < NR_FEW => {
                found.sharers[usize::from(found.nr_sharers)] = core;
                found.nr_sharers += 1;
            }
            At::Few => {
                let mut set = [0; MAX_CPUS / 64];
                found.sharers.iter().for_each(|&sharer| add(&mut set, sharer));
                add(&mut set, core);
                let index = self.free_sets.pop().unwrap_or_else(|| {
                    self.sets.push([0; MAX_CPUS / 64]);
                    self.sets.len() as u32 - 1
                });
                self.sets[index as usize] = set;
                found.sharers[0] = index as u16;
                found.sharers[1] = (index >> 16) as u16;
                found.at = At::Many as u8;
            }
            At::Many => add(&mut self.sets[found.set()], core),
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let size_bytes = size_of_val::<[Line]>(self.lines);
        // SAFETY: from `reserve`, with this size; nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.lines.as_mut_ptr().cast(), size_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of two cores.
    fn lines() -> Lines {
        let text = "name = 't'\n[[node]]\ncpus = '0-1'\n[[node]]\ncpus = '2-3'";
        Lines::new(&Topology::parse("t", text).unwrap(), &Parameters::built_in().unwrap()).unwrap()
    }

    const NS: Ps = 1000;

    #[test]
    fn an_access_costs_what_its_way_costs() {
        let mut lines = lines();
        let ns = |grant: Grant, now: Ps| (grant.at - now) as f64 / NS as f64;
        // From memory, then from its own cache, then from the other core's, then from the other
        // node.
        assert_eq!(ns(lines.request(0, 0, 7, Step::Load), 0), 85.0);
        assert_eq!(ns(lines.request(0, 1000 * NS, 7, Step::Rmw), 1000 * NS), 7.5);
        assert_eq!(ns(lines.request(1, 2000 * NS, 7, Step::Rmw), 2000 * NS), 57.0);
        assert_eq!(ns(lines.request(2, 3000 * NS, 7, Step::Load), 3000 * NS), 130.0);
        // Shared, both hit, and a write takes it from the farthest.
        assert_eq!(ns(lines.request(1, 4000 * NS, 7, Step::Load), 4000 * NS), 0.5);
        assert_eq!(ns(lines.request(2, 4000 * NS, 7, Step::Load), 4000 * NS), 0.5);
        assert_eq!(ns(lines.request(1, 5000 * NS, 7, Step::Store), 5000 * NS), 130.0);
        assert!(lines.request(2, 6000 * NS, 7, Step::Load).is_fetched);
    }

    #[test]
    fn requests_for_one_line_are_served_one_after_another() {
        let mut lines = lines();
        let at: Vec<_> = (0..4).map(|core| lines.request(core, 0, 7, Step::Rmw).at / NS).collect();
        // Memory, 20 held, then 50, held, 130, held, 50.
        assert_eq!(at, [92, 92 + 77, 92 + 77 + 157, 92 + 77 + 157 + 77]);
        // Reads follow each other sooner.
        let at: Vec<_> = (0..3).map(|core| lines.request(core, 1000 * NS, 7, Step::Load).at / NS).collect();
        assert_eq!(at, [1130, 1010 + 50, 1020 + 50]);
    }

    #[test]
    fn many_cores_share_a_line_and_a_write_takes_it_from_all() {
        let cpus = "name = 't'\n[[node]]\ncpus = '0-99'";
        let topology = Topology::parse("t", cpus).unwrap();
        let mut lines = Lines::new(&topology, &Parameters::built_in().unwrap()).unwrap();
        for round in 0..3 {
            let now = round * 1_000_000 * NS;
            for core in 0..100 {
                assert!(lines.request(core, now, 9, Step::Load).is_fetched, "core {core} had the line");
            }
            for core in 0..100 {
                assert!(
                    !lines.request(core, now + 500_000 * NS, 9, Step::Load).is_fetched,
                    "core {core} lost the line"
                );
            }
            assert!(lines.request(50, now + 600_000 * NS, 9, Step::Rmw).is_fetched);
            assert!(lines.request(99, now + 700_000 * NS, 9, Step::Rmw).is_fetched);
            assert!(lines.request(3, now + 800_000 * NS, 9, Step::Store).is_fetched);
            // Of the next round core 3 must not have it.
            assert!(lines.request(100 - 1, now + 900_000 * NS, 9, Step::Store).is_fetched);
            lines.lines[9].at = At::Memory as u8;
        }
        assert_eq!(lines.sets.len(), 1, "a set is used again");
    }

    #[test]
    fn a_core_forgets_what_it_has_owned_for_longest() {
        let mut lines = lines();
        let nr_lines = lines.cost.core_lines;
        for line in 0..=nr_lines + 1 {
            lines.request(0, 0, line, Step::Load);
        }
        assert!(lines.request(0, 1_000 * NS, 0, Step::Load).is_fetched);
        assert!(!lines.request(0, 1_000 * NS, nr_lines, Step::Load).is_fetched);
    }
}
