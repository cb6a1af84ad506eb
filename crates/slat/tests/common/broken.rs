//! Formats with break before make between a page-table page and a huge leaf, and an observer that
//! checks the rule on this thread.
//!
//! The observer reads all PTEs above the lowest level whenever the engine looks at one of them; in
//! builds with `debug_assertions` also right before each exchange. So it observes the result of
//! every exchange. Between a page-table page and a leaf in the same PTE it must have observed a
//! flush of the PTE's block, called while the PTE was not present.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::{Format, Geometry, Npt, Pte};
use slat::{Gfn, GfnRange, Hpa, Level, Vm};

use super::{BIAS, TestHost, hooked};

/// What a PTE was when it was last present.
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
    /// The round in which it was last present.
    round: u64,
}

struct Observer {
    root: Hpa,
    root_level: Level,
    /// How the PTE's format decodes it, without a call of the observer: whether it is present,
    /// whether it is a leaf, and the page-table page that it points to.
    is_present: fn(Pte) -> bool,
    is_leaf: fn(Pte, Level) -> bool,
    address: fn(Pte, Level) -> Hpa,
    entries: HashMap<(Level, Gfn), Seen>,
    /// Rounds over all PTEs so far.
    round: u64,
    /// How often a page-table page replaced a leaf, and a leaf a page-table page.
    nr_split: u64,
    nr_recovered: u64,
}

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// From now on observes the page tables of `vm`, as far as this thread changes them.
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

/// Stops observing. Returns how many leaves became page-table pages, and the reverse.
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

/// Records a flush of `ranges`.
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
        // The other PTEs are not present, or lie in a page-table page that was unlinked or replaced
        // by a leaf.
        for seen in self.entries.values_mut().filter(|seen| seen.round != self.round && seen.is_present) {
            (seen.is_present, seen.is_flushed) = (false, false);
        }
    }

    fn visit(&mut self, table: Hpa, level: Level, start: Gfn) {
        for index in 0..512 {
            let gfn = Gfn(start.0 + index as u64 * level.nr_pages());
            // SAFETY: inside a linked page-table page; only this thread frees page-table pages.
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

/// `F`, which has 512 PTEs in each page-table page, with break before make.
#[derive(Debug)]
pub struct Breaking<F>(PhantomData<F>);

/// A format with break before make that supports all of lazy protection and dirty bits.
pub type Broken = Breaking<Npt>;

// SAFETY: PTEs are those of F.
unsafe impl<F: Format> Format for Breaking<F> {
    super::bits_of!(F);

    const NAME: &'static str = "broken";
    const ROOT_LEVEL: Level = F::ROOT_LEVEL;
    const GPA_BITS: u32 = F::GPA_BITS;
    const GEOMETRIES: &'static [Geometry] = F::GEOMETRIES;
    const MAX_ROOT_ENTRIES: usize = F::MAX_ROOT_ENTRIES;
    const BREAK_BEFORE_MAKE: bool = true;

    fn is_leaf(entry: Pte, level: Level) -> bool {
        hooked::look(level);
        if level > Level::L4K {
            observe_now();
        }
        F::is_leaf(entry, level)
    }
}
