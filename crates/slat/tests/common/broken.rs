//! Formats whose entries must be broken before they change between a table and a huge leaf, and an observer that sees on
//! this thread whether that is kept.
//!
//! The observer looks at all entries above the lowest level whenever the engine looks at one of them: in builds that have
//! `debug_assertions` right before each exchange too. So it sees what every exchange has left. Between a table and a leaf at
//! the same entry it must have seen a flush of the entry's block, called while the entry was not present.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::{Format, Npt, Pte};
use slat::{Gfn, GfnRange, Hpa, Level, Vm};

use super::{BIAS, TestHost, hooked};

/// What an entry was when it was last present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Leaf,
    Table,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    kind: Kind,
    is_present: bool,
    /// Whether its block was flushed since it is not present.
    is_flushed: bool,
    /// The round in which it was last seen present.
    round: u64,
}

struct Observer {
    root: Hpa,
    root_level: Level,
    /// What the entries' format says of them, without that being observed: whether one is present, and then what it is, and
    /// the table that it points to.
    is_present: fn(Pte) -> bool,
    is_leaf: fn(Pte, Level) -> bool,
    address: fn(Pte, Level) -> Hpa,
    entries: HashMap<(Level, Gfn), Seen>,
    /// Looks at all entries so far.
    round: u64,
    /// How often a table took the place of a leaf, and a leaf that of a table.
    nr_split: u64,
    nr_recovered: u64,
}

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Watches the tables of `vm` from now on, as far as this thread changes them.
pub fn observe<F: Format>(vm: &Vm<TestHost, Breaking<F>>) {
    let observer = Observer {
        root: vm.root(),
        root_level: F::ROOT_LEVEL,
        is_present: F::is_present,
        is_leaf: F::is_leaf,
        address: F::address,
        entries: HashMap::new(),
        round: 0,
        nr_split: 0,
        nr_recovered: 0,
    };
    OBSERVER.set(Some(observer));
    observe_now();
}

/// Ends that; says how many leaves became tables, and tables leaves.
pub fn observed() -> (u64, u64) {
    observe_now();
    OBSERVER.take().map_or((0, 0), |observer| (observer.nr_split, observer.nr_recovered))
}

fn observe_now() {
    OBSERVER.with_borrow_mut(|observer| {
        if let Some(observer) = observer {
            observer.look();
        }
    });
}

/// A flush of `ranges` is made.
pub fn flushed(ranges: &[GfnRange]) {
    observe_now();
    OBSERVER.with_borrow_mut(|observer| {
        let Some(observer) = observer else { return };
        for (&(level, gfn), seen) in &mut observer.entries {
            seen.is_flushed |= !seen.is_present && ranges.iter().any(|range| range.covers(gfn.block(level)));
        }
    });
}

impl Observer {
    fn look(&mut self) {
        self.round += 1;
        self.visit(self.root, self.root_level, Gfn(0));
        // The rest is not present, or what it hung on is not, or has become a leaf.
        for seen in self.entries.values_mut().filter(|seen| seen.round != self.round && seen.is_present) {
            (seen.is_present, seen.is_flushed) = (false, false);
        }
    }

    fn visit(&mut self, table: Hpa, level: Level, start: Gfn) {
        for index in 0..512 {
            let gfn = Gfn(start.0 + index as u64 * level.nr_pages());
            // SAFETY: inside a table that is linked; this thread, which alone frees tables, is here.
            let entry = unsafe { AtomicU64::from_ptr(((table.0 - BIAS) as *mut u64).add(index)) };
            let entry = Pte(entry.load(Ordering::SeqCst));
            if !(self.is_present)(entry) {
                continue;
            }
            let kind = if (self.is_leaf)(entry, level) { Kind::Leaf } else { Kind::Table };
            let now = Seen { kind, is_present: true, is_flushed: false, round: self.round };
            let before = self.entries.insert((level, gfn), now);
            if let Some(before) = before
                && before.kind != kind
            {
                assert!(
                    !before.is_present && before.is_flushed,
                    "the entry of level {} for {gfn} became a {kind:?} without a break and a flush: {before:?}",
                    level.0
                );
                match kind {
                    Kind::Leaf => self.nr_recovered += 1,
                    Kind::Table => self.nr_split += 1,
                }
            }
            if kind == Kind::Table && level > Level::L2M {
                self.visit((self.address)(entry, level), level.down(), gfn);
            }
        }
    }
}

/// `F`, which has 512 entries in each table, if its CPUs must not cache a table and a huge leaf at once.
#[derive(Debug)]
pub struct Breaking<F>(PhantomData<F>);

/// With all that lazy protection and dirty bits can do.
pub type Broken = Breaking<Npt>;

// SAFETY: entries are F's.
unsafe impl<F: Format> Format for Breaking<F> {
    super::bits_of!(F);

    const NAME: &'static str = "broken";
    const ROOT_LEVEL: Level = F::ROOT_LEVEL;
    const GPA_BITS: u32 = F::GPA_BITS;
    const ROOT_ENTRIES: usize = F::ROOT_ENTRIES;
    const TABLE_ENTRIES: usize = F::TABLE_ENTRIES;
    const BREAK_BEFORE_MAKE: bool = true;

    fn is_leaf(entry: Pte, level: Level) -> bool {
        hooked::look(level);
        if level > Level::L4K {
            observe_now();
        }
        F::is_leaf(entry, level)
    }

    fn address(entry: Pte, level: Level) -> Hpa {
        F::address(entry, level)
    }
}
