//! What may be stale. A CPU may translate by values that PTEs of the guest once had, until a flush
//! (Intel SDM vol. 3A, "Caching Translation Information"):
//!
//! - A PTE is cached only with a value that was present, without a reserved bit, and with its
//!   accessed flag set. A page is written only through one with its dirty flag set.
//! - PTEs on one path may be of different ages; an upper one is not younger than what was found
//!   through it: the paging-structure caches. Each has a value from some time since the last flush
//!   that covers it, on that CPU.
//! - Flushes cover what the manual lists for each instruction, and pages of any size whole.
//!   Translations of a global page survive a flush of a PCID, and serve all PCIDs.
//! - A page fault is a flush of its address in the current PCID ("Operations that Invalidate TLBs
//!   and Paging-Structure Caches"), also of global translations that were made in this PCID.
//!
//! - A CPU caches PTEs for the current PCID, so each has a value from a time when the PCID was
//!   current. ([`Caching`] has how far a strategy may deviate.)
//!
//! So this module keeps every value of each word of memory, with its times, and every flush of each
//! CPU. Whether an access may have reached a page is a search for a path through them.

use std::collections::HashMap;

use slat::Access;
use slat::shadow::{PagingRegisters, Privilege};

use super::architecture::{
    ACCESSED, CR4_PCIDE, CR4_PGE, Meaning, PagingMode, Rights, entry_in, has_accessed_flag, meaning,
};
use super::world::{NR_GFNS, WORDS};

/// Steps of a clock that advances at each event.
pub type Time = u64;

/// The value of a word from a time on. `None`: there was no memory.
#[derive(Clone, Copy, Debug)]
struct Version {
    since: Time,
    value: Option<u64>,
}

/// The guest's memory, and its past values.
pub struct History {
    now: Time,
    words: Vec<u64>,
    has_memory: Vec<bool>,
    /// By word, for those that were changed.
    versions: HashMap<u32, Vec<Version>>,
}

impl History {
    pub fn new() -> History {
        let words = vec![0; NR_GFNS * WORDS];
        History { now: 1, words, has_memory: vec![false; NR_GFNS], versions: HashMap::new() }
    }

    pub fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    pub fn has_memory(&self, gpa: u64) -> bool {
        self.has_memory.get((gpa >> 12) as usize).is_some_and(|&has_memory| has_memory)
    }

    /// The 8 bytes that hold `gpa`.
    pub fn read(&self, gpa: u64) -> Option<u64> {
        self.has_memory(gpa).then(|| self.words[(gpa >> 3) as usize])
    }

    pub fn page(&self, gfn: u64) -> &[u64] {
        &self.words[gfn as usize * WORDS..][..WORDS]
    }

    /// Stores `value` in the word that holds `gpa`.
    pub fn write(&mut self, gpa: u64, value: u64) {
        assert!(self.has_memory(gpa));
        let word = (gpa >> 3) as usize;
        let old = std::mem::replace(&mut self.words[word], value);
        if old != value {
            let now = self.tick();
            self.changed(word, Some(old), Version { since: now, value: Some(value) });
        }
    }

    fn changed(&mut self, word: usize, old: Option<u64>, new: Version) {
        let versions = self.versions.entry(word as u32).or_insert_with(|| vec![Version { since: 0, value: old }]);
        versions.push(new);
    }

    /// The page gets memory that holds `contents`, or loses it.
    pub fn set_memory(&mut self, gfn: u64, contents: Option<&[u64]>) {
        let now = self.tick();
        let had_memory = std::mem::replace(&mut self.has_memory[gfn as usize], contents.is_some());
        for inside in 0..WORDS {
            let word = gfn as usize * WORDS + inside;
            let old = had_memory.then_some(self.words[word]);
            let new = contents.map(|contents| contents[inside]);
            self.words[word] = new.unwrap_or(0);
            // Without memory, or zero: both mean that no PTE is found, so most of them need no
            // version.
            if old.unwrap_or(0) != new.unwrap_or(0) {
                self.changed(word, old, Version { since: now, value: new });
            }
        }
    }

    /// Calls `seen` with each value that the word at `gpa` had since `from`, and its start and end.
    fn each_since(&self, gpa: u64, from: Time, mut seen: impl FnMut(u64, Time, Time)) {
        let word = (gpa >> 3) as u32;
        match self.versions.get(&word) {
            None => {
                if let Some(value) = self.read(gpa) {
                    seen(value, 0, Time::MAX);
                }
            }
            Some(versions) => {
                let mut until = Time::MAX;
                for version in versions.iter().rev() {
                    if let Some(value) = version.value {
                        seen(value, version.since, until);
                    }
                    until = version.since;
                    if until <= from {
                        break;
                    }
                }
            }
        }
    }
}

/// A page table that CR3 named, and when.
#[derive(Clone, Copy, Debug)]
struct Root {
    pcid: u16,
    table: u64,
    from: Time,
    until: Time,
}

/// When a CPU may have read what it caches for a PCID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Caching {
    /// While the PCID was current, as in the manual.
    WhileCurrent,
    /// At any time since its last flush or, if it has not been current since that flush, since it
    /// is current again. This holds for page tables that all PCIDs and CPUs share, and where one of
    /// them caches for the others.
    AnyTime,
}

/// One CPU of the guest: its registers, and its flushes.
pub struct VirtualCpu {
    pub registers: PagingRegisters,
    caching: Caching,
    roots: Vec<Root>,
    all: Time,
    all_but_global: Time,
    contexts: HashMap<u16, Time>,
    /// By PCID, size (log2 of bytes) and number of that page.
    pages: HashMap<(u16, u32, u64), Time>,
    /// Global translations, by size and number.
    global_pages: HashMap<(u32, u64), Time>,
    /// Page faults, by PCID, size and number: they flush those made global in the PCID, too.
    faults: HashMap<(u16, u32, u64), Time>,
}

/// Sizes of pages in all modes.
const SHIFTS: [u32; 4] = [12, 21, 22, 30];

impl VirtualCpu {
    pub fn new(caching: Caching) -> VirtualCpu {
        VirtualCpu {
            registers: PagingRegisters::default(),
            caching,
            roots: Vec::new(),
            all: 0,
            all_but_global: 0,
            contexts: HashMap::new(),
            pages: HashMap::new(),
            global_pages: HashMap::new(),
            faults: HashMap::new(),
        }
    }

    pub fn mode(&self) -> PagingMode {
        PagingMode::of(&self.registers)
    }

    pub fn has_pcids(&self) -> bool {
        self.registers.cr4 & CR4_PCIDE != 0
    }

    pub fn pcid(&self) -> u16 {
        if self.has_pcids() { (self.registers.cr3 & 0xfff) as u16 } else { 0 }
    }

    pub fn flush_all(&mut self, now: Time) {
        self.all = now;
        self.roots.retain(|root| root.until > now);
        self.contexts.clear();
        self.pages.clear();
        self.global_pages.clear();
        self.faults.clear();
    }

    pub fn flush_all_but_global(&mut self, now: Time) {
        self.all_but_global = now;
        self.contexts.clear();
        self.pages.clear();
    }

    pub fn flush_context(&mut self, pcid: u16, now: Time) {
        self.contexts.insert(pcid, now);
        self.pages.retain(|&(of, _, _), _| of != pcid);
    }

    /// Flushes `la` in `pcid`, except global translations.
    pub fn flush_page(&mut self, pcid: u16, la: u64, now: Time) {
        for shift in SHIFTS {
            self.pages.insert((pcid, shift, la >> shift), now);
        }
    }

    pub fn flush_global_page(&mut self, la: u64, now: Time) {
        for shift in SHIFTS {
            self.global_pages.insert((shift, la >> shift), now);
        }
    }

    /// The guest gets a page fault at `la`.
    pub fn page_fault(&mut self, la: u64, now: Time) {
        let pcid = self.pcid();
        self.flush_page(pcid, la, now);
        for shift in SHIFTS {
            self.faults.insert((pcid, shift, la >> shift), now);
        }
    }

    /// The current value of CR3 holds from now on.
    pub fn root_loaded(&mut self, now: Time) {
        if let Some(last) = self.roots.last_mut().filter(|last| last.until == Time::MAX) {
            last.until = now;
        }
        let mode = self.mode();
        if mode != PagingMode::Off {
            let table = mode.root(self.registers.cr3);
            let root = Root { pcid: self.pcid(), table, from: now, until: Time::MAX };
            self.roots.retain(|root| root.until > self.all);
            let last_use = self.roots.iter().filter(|old| old.pcid == root.pcid).map(|old| old.until).max();
            self.flushed_before_use(root.pcid, last_use.unwrap_or(0), now);
            self.roots.push(root);
        }
    }

    /// A flush of `pcid` since it was last current leaves nothing in it until it is current again,
    /// which is now.
    fn flushed_before_use(&mut self, pcid: u16, last_use: Time, now: Time) {
        if self.all.max(self.all_but_global) >= last_use {
            self.contexts.insert(pcid, now);
        }
        let context = self.contexts.get_mut(&pcid).into_iter();
        let pages = self.pages.iter_mut().filter(|((of, _, _), _)| *of == pcid).map(|(_, time)| time);
        context.chain(pages).filter(|time| **time >= last_use).for_each(|time| *time = now);
    }

    /// Whether this CPU may translate `la` to the byte at `target` for such an access, by the
    /// current page tables or by cached PTEs.
    pub fn may_reach(&self, history: &History, la: u64, access: Access, privilege: Privilege, target: u64) -> bool {
        let mode = self.mode();
        if mode == PagingMode::Off {
            return target == la;
        }
        let pcid = self.pcid();
        let search = Search { cpu: self, history, mode, la, access, privilege, target };
        let mut pcids: Vec<u16> = self.roots.iter().map(|root| root.pcid).collect();
        pcids.sort_unstable();
        pcids.dedup();
        (1..=mode.levels().min(if mode == PagingMode::Pae { 2 } else { 3 })).any(|level| {
            let (shift, page) = (mode.shift(level), la >> mode.shift(level));
            let flushed = |time: Option<&Time>| time.copied().unwrap_or(0);
            let private = [
                self.all,
                self.all_but_global,
                flushed(self.contexts.get(&pcid)),
                flushed(self.pages.get(&(pcid, shift, page))),
            ];
            let global = self.all.max(flushed(self.global_pages.get(&(shift, page))));
            search.finds(level, private.into_iter().max().unwrap(), Of::Pcid(pcid))
                || self.registers.cr4 & CR4_PGE != 0
                    && pcids.iter().any(|&pcid| {
                        let faulted = flushed(self.faults.get(&(pcid, shift, page)));
                        search.finds(level, global.max(faulted), Of::GlobalOf(pcid))
                    })
        })
    }

    /// The first time from `time` on at which this CPU used `of`.
    fn next_use(&self, of: Of, time: Time) -> Option<Time> {
        if self.caching == Caching::AnyTime {
            return Some(time);
        }
        let uses = self.roots.iter().filter(|root| of.includes(root) && root.until > time);
        uses.map(|root| root.from.max(time)).min()
    }
}

/// Selects translations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Pcid(u16),
    /// Global ones that were made in this PCID. They serve all.
    GlobalOf(u16),
}

impl Of {
    fn includes(self, root: &Root) -> bool {
        let (Of::Pcid(pcid) | Of::GlobalOf(pcid)) = self;
        root.pcid == pcid
    }
}

/// A page table that may have been reached on the way.
#[derive(Clone, Copy)]
struct Reached {
    table: u64,
    rights: Rights,
    /// The earliest time at which the PTE that led here can have been read.
    time: Time,
}

struct Search<'a> {
    cpu: &'a VirtualCpu,
    history: &'a History,
    mode: PagingMode,
    la: u64,
    access: Access,
    privilege: Privilege,
    target: u64,
}

impl Search<'_> {
    /// Whether a path of PTEs, each read since `flushed`, leads through a PTE of `leaf_level` to
    /// the target.
    fn finds(&self, leaf_level: u8, flushed: Time, of: Of) -> bool {
        let mut at = Vec::new();
        for root in self.cpu.roots.iter().filter(|root| of.includes(root) && root.until > flushed) {
            let from = if self.cpu.caching == Caching::AnyTime { 0 } else { root.from };
            let time = from.max(flushed);
            add(&mut at, Reached { table: root.table, rights: Rights::ALL, time });
        }
        let mut is_found = false;
        for level in (leaf_level..=self.mode.levels()).rev() {
            let mut below = Vec::new();
            for above in at {
                let gpa = above.table + self.mode.index(self.la, level) * self.mode.entry_bytes();
                self.history.each_since(gpa, above.time, |word, since, until| {
                    let entry = entry_in(word, gpa, self.mode);
                    // Read while the CPU translated by this PCID, and not before the PTE that led
                    // here.
                    let time = self.cpu.next_use(of, since.max(above.time)).filter(|&time| time < until);
                    let is_cached = entry & ACCESSED != 0 || !has_accessed_flag(self.mode, level);
                    let (Some(time), true) = (time, is_cached) else { return };
                    match meaning(&self.cpu.registers, self.mode, level, entry, above.rights) {
                        Meaning::Table { gpa, rights } if level > leaf_level => {
                            add(&mut below, Reached { table: gpa, rights, time });
                        }
                        Meaning::Page { gpa, rights, dirty, global } if level == leaf_level => {
                            let inside = self.la & ((1 << self.mode.shift(level)) - 1);
                            is_found |= gpa | inside == self.target
                                && (matches!(of, Of::Pcid(_)) || global)
                                && (self.access != Access::Write || dirty)
                                && rights.permits(&self.cpu.registers, self.access, self.privilege);
                        }
                        _ => {}
                    }
                });
            }
            at = below;
        }
        is_found
    }
}

/// Adds a page table to those that were reached. Each one with the same rights is kept once, with
/// its earliest time.
fn add(tables: &mut Vec<Reached>, new: Reached) {
    match tables.iter_mut().find(|old| old.table == new.table && old.rights == new.rights) {
        Some(old) => old.time = old.time.min(new.time),
        None => tables.push(new),
    }
}
