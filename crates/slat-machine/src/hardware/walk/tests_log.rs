//! The entries of walks in a page-modification log: the page of each leaf that they make dirty, and
//! no other.

use slat::format::{Ept, Npt};
use slat::shadow::Gva;
use slat::{Access, Gpa};

use super::guest::{self, GuestStop};
use super::tests::{Way, leaf};
use super::tests_guest::{GVA, Guest};
use super::tests_manuals::{EPT, NPT};
use super::{HardwareFormat, Mapping, Purpose, Stop, Used, Walker};
use crate::hardware::commit::Stale;
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::modification_log::{LogFull, ModificationLog, ModificationLogs, NR_ENTRIES};

const A: u64 = EPT.accessed;
const D: u64 = EPT.dirty;

fn new_log() -> ModificationLog {
    ModificationLogs::default().add()
}

fn logged(log: &ModificationLog) -> Vec<Gpa> {
    let mut pages = Vec::new();
    log.empty(&mut |part| pages.extend_from_slice(part));
    // A walk that was preempted before it set the dirty bit has left its entry.
    pages.dedup();
    pages
}

/// A way to a page of 4 KiB.
fn new_way() -> Way {
    Way::new(&EPT, 1, leaf(&EPT, 1))
}

fn walk(way: &Way, log: &ModificationLog, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
    way.walk_with(|walker| Walker { log: Some(log), ..walker }, access, purpose)
}

#[test]
fn a_page_is_logged_when_its_leaf_becomes_dirty() {
    for level in 1..=3 {
        let log = new_log();
        let way = Way::new(&EPT, level, leaf(&EPT, level));
        // Also in large pages: the page of the access, not the large page.
        let page = Gpa(way.gpa.0 & !0xfff);
        let walk = |access| walk(&way, &log, access, Purpose::Data).map(|_| ());
        assert_eq!(walk(Access::Read), Ok(()));
        assert_eq!(walk(Access::Execute), Ok(()));
        assert_eq!(logged(&log), []);
        assert_eq!(walk(Access::Write), Ok(()));
        assert_eq!(way.get(level) & (A | D), A | D);
        assert_eq!(logged(&log), [page], "level {level}");
        assert_eq!(walk(Access::Write), Ok(()));
        assert_eq!(logged(&log), [], "it is dirty already");
        way.clear(level, A);
        assert_eq!(walk(Access::Write), Ok(()));
        assert_eq!(logged(&log), [], "also if it was not accessed");
        way.clear(level, D);
        assert_eq!(walk(Access::Write), Ok(()));
        assert_eq!(logged(&log), [page]);
    }
}

#[test]
fn accesses_to_guest_tables_are_logged_as_writes() {
    let log = new_log();
    let way = new_way();
    assert!(walk(&way, &log, Access::Read, Purpose::GuestTable).is_ok());
    assert_eq!(logged(&log), [Gpa(way.gpa.0 & !0xfff)]);

    let guest = Guest::new(&EPT);
    let walk = |access| {
        let walker = Walker { log: Some(&log), ..guest.walker() };
        let interrupted = GuestStop::SecondStage(Stop::Restart);
        uninterrupted(interrupted, || guest::walk::<Ept, _>(walker, Gpa(0), Gva(GVA), access).map(|_| ()))
    };
    assert_eq!(walk(Access::Read), Ok(()));
    assert_eq!(logged(&log), [0, 1, 2, 3].map(|page| Gpa(page << 12)));
    assert_eq!(walk(Access::Write), Ok(()));
    assert_eq!(logged(&log), [Gpa(4 << 12)]);
}

#[test]
fn a_walk_that_sets_no_dirty_bit_logs_nothing() {
    let log = new_log();
    // Denied.
    let way = new_way();
    way.clear(1, 0b010);
    assert!(matches!(walk(&way, &log, Access::Write, Purpose::Data), Err(Stop::Fault(_))));
    // Overtaken.
    let way = new_way();
    let walker = Walker { log: Some(&log), ..way.walker() };
    way.port.domain().flush(&[]);
    assert_eq!(Ept::walk(walker, way.gpa, Access::Write, Purpose::Data), Err(Stop::Restart));
    // Hardware without a log.
    let way = Way::new(&NPT, 1, leaf(&NPT, 1));
    assert!(walk(&way, &log, Access::Write, Purpose::Data).is_ok());
    const { assert!(!Npt::LOGS_MODIFICATIONS && Ept::LOGS_MODIFICATIONS) };
    assert_eq!(log.nr_logged(), 0);
}

#[test]
fn a_full_log_stops_walks_that_would_set_a_bit() {
    let log = new_log();
    for number in 0..NR_ENTRIES {
        assert_eq!(log.append(Gpa(number << 12)), Ok(()));
    }
    let full = Err(Stop::LogFull(LogFull));
    let way = new_way();
    for access in [Access::Read, Access::Write] {
        assert_eq!(walk(&way, &log, access, Purpose::Data), full);
        assert!((1..=4).all(|level| way.get(level) & (A | D) == 0), "{access:?}");
    }
    // Only the dirty bit is missing.
    assert!(way.walk(Access::Read).is_ok());
    assert!(walk(&way, &log, Access::Read, Purpose::Data).is_ok(), "a read needs no bit");
    assert_eq!(walk(&way, &log, Access::Write, Purpose::Data), full);
    assert_eq!(way.get(1) & (A | D), A);
    // No bit is missing.
    assert!(way.walk(Access::Write).is_ok());
    assert!(walk(&way, &log, Access::Write, Purpose::Data).is_ok());

    assert_eq!(logged(&log).len() as u64, NR_ENTRIES);
    way.clear(1, D);
    assert!(walk(&way, &log, Access::Write, Purpose::Data).is_ok());
    assert_eq!(logged(&log), [Gpa(way.gpa.0 & !0xfff)]);
}

/// The entry comes before the dirty bit, and after a drain in between the bit must not be set.
#[test]
fn a_drained_entry_sets_no_dirty_bit() {
    for is_drained in [false, true] {
        let logs = ModificationLogs::default();
        let log = logs.add();
        let way = new_way();
        let walker = Walker { log: Some(&log), ..way.walker() };
        let used = uninterrupted(Stale, || Used::read(walker, way.table(1), 1)).unwrap().unwrap();
        assert_eq!(used.entry, leaf(&EPT, 1));
        assert_eq!(log.append(way.gpa), Ok(()));
        let mut drained = Vec::new();
        if is_drained {
            logs.drain(way.port.domain(), &mut |part| drained.extend_from_slice(part));
            assert_eq!(drained, [Gpa(way.gpa.0 & !0xfff)]);
        }
        let set = uninterrupted(Stop::Restart, || used.set(walker, A | D));
        assert_eq!(set, if is_drained { Err(Stop::Restart) } else { Ok(leaf(&EPT, 1) | A | D) });
        assert_eq!(way.get(1) & D == 0, is_drained);
        assert_eq!(logged(&log).is_empty(), is_drained);
    }
}

/// The dirty bit is set only after the page is in the log: a thread that finds the leaf dirty finds
/// the entry.
#[test]
fn a_lost_exchange_leaves_the_entry() {
    let log = new_log();
    let way = new_way();
    let walker = Walker { log: Some(&log), ..way.walker() };
    let used = uninterrupted(Stale, || Used::read(walker, way.table(1), 1)).unwrap().unwrap();
    way.clear(1, 0b100);
    assert_eq!(super::ept::set(used, walker, way.gpa, A | D), Err(Stop::Restart));
    assert_eq!(way.get(1) & D, 0);
    assert_eq!(logged(&log), [Gpa(way.gpa.0 & !0xfff)]);
}
