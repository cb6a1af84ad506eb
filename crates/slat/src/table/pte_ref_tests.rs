//! A safe exchange stores no PTE that names another page-table page than the PTE before. In debug
//! builds, changes assert that the VM's lock is held.

#[cfg(debug_assertions)]
extern crate std;

#[cfg(debug_assertions)]
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::addr::{Hpa, Pfn};
#[cfg(debug_assertions)]
use crate::format::Npt;
use crate::table::invalidation_seq::InvalidationSeq;
#[cfg(debug_assertions)]
use crate::table::participant::Hold;
#[cfg(debug_assertions)]
use crate::table::retire::{Epochs, Fences};

fn names_no_other_page<F: Format>() {
    let level = Level::L2M;
    let cell = AtomicU64::new(0);
    // SAFETY: no walk reaches it.
    let pte = unsafe { PteRef::<F>::new(&cell, level, LockCheck::NONE, Cleaner::none()) };
    let (here, elsewhere) = (Hpa(0x20_0000), Hpa(0x40_0000));
    let table = Pte::table(here);
    let leaf = Pte::leaf(here.pfn(), level).with(F::HOST_WRITABLE);
    let empty = Pte::empty(InvalidationSeq::FIRST);
    let frozen = Pte::table(here).frozen_as_was(level);
    let broken = |table| Pte::broken(Pte::table(table), Breaking::Recovery);
    let split = |table| Pte::broken(Pte::table(table), Breaking::Split);
    let link = Pte::from_bits(pte::frozen_link(here));

    let plain = [empty, leaf, leaf.tracked(level)];
    for old in [empty, leaf, leaf.tracked(level), table, broken(here), split(here)] {
        for new in plain {
            assert!(pte.is_safe(old, new), "{}: {old:?} to {new:?}", F::NAME);
        }
    }
    assert!(pte.is_safe(table, broken(here)));
    if Pte::<F>::CAN_BE_PROTECTED {
        let protected = table.protected();
        assert!(pte.is_safe(table, protected) && pte.is_safe(protected, protected.protected()));
        assert!(pte.is_safe(protected, protected.unprotected()));
    }

    let olds = plain.into_iter().chain([table, broken(here), split(here), frozen, link]);
    for old in olds {
        let links = [Pte::table(elsewhere), broken(elsewhere), split(elsewhere), split(here), frozen, link];
        for new in links {
            assert!(!pte.is_safe(old, new), "{}: {old:?} to {new:?}", F::NAME);
        }
        if old != table {
            assert!(!pte.is_safe(old, table) && !pte.is_safe(old, broken(here)), "{}: {old:?}", F::NAME);
        }
    }
    for new in plain {
        assert!(!pte.is_safe(frozen, new) && !pte.is_safe(link, new), "{}: {new:?}", F::NAME);
    }
    // Where a leaf of 4 KiB would be read as a directory entry.
    let small = Pte::<F>::leaf(Pfn(5), Level::L4K);
    assert_eq!(pte.is_safe(empty, small), F::is_leaf(crate::format::Pte(small.bits()), level), "{}", F::NAME);
}

#[test]
fn safe_exchanges_name_no_other_page_table_page() {
    crate::for_each_format!(F => {
        names_no_other_page::<F>();
    });
}

/// Whether `change` of a PTE that holds `old` is let through, of `level` and under `hold`.
#[cfg(debug_assertions)]
fn is_allowed(hold: Hold, level: Level, old: Pte<Npt>, change: fn(PteRef<'_, Npt>, Pte<Npt>)) -> bool {
    let epochs = Epochs::new(Fences::Both);
    let participant = epochs.borrow_participant().unwrap();
    let guard = epochs.pin(&participant);
    let cell = AtomicU64::new(old.bits());
    participant.record_hold(hold);
    // SAFETY: no walk reaches it.
    let pte = unsafe { PteRef::new(&cell, level, guard.lock_check(), Cleaner::none()) };
    catch_unwind(AssertUnwindSafe(|| change(pte, old))).is_ok()
}

#[cfg(debug_assertions)]
#[test]
fn a_pte_that_changes_without_the_needed_side_of_the_lock_is_noticed() {
    let [small, huge] = [Level::L4K, Level::L2M];
    let leaf = Pte::<Npt>::leaf(Pfn(512), huge).with(Npt::HOST_WRITABLE | Npt::ACCESSED);
    let writable = leaf.with(Npt::WRITABLE);
    let table = Pte::<Npt>::table(Hpa(0x20_0000));
    let zap = |pte: PteRef<'_, Npt>, old: Pte<Npt>| {
        let _: Result<(), Changed> = pte.exchange(old, Pte::empty(InvalidationSeq::FIRST));
    };
    let [none, read, write] = [[true, true, true], [false, true, true], [false, false, true]];
    type Change = fn(PteRef<'_, Npt>, Pte<Npt>);
    let changes: [(Level, Pte<Npt>, Change, [bool; 3]); 8] = [
        (huge, leaf, |pte, old| pte.exchange(old, old.without(Npt::ACCESSED)).unwrap(), none),
        (huge, leaf, |pte, old| pte.exchange(old, old.tracked(pte.level())).unwrap(), none),
        (huge, leaf, |pte, old| pte.exchange(old, old.with(Npt::WRITABLE)).unwrap(), read),
        (huge, leaf, zap, read),
        (huge, leaf, |pte, old| assert!(pte.freeze_as_was(old).is_ok()), read),
        (huge, writable, |pte, old| pte.exchange(old, old.without(Npt::WRITABLE)).unwrap(), write),
        (huge, table, |pte, old| pte.exchange(old, old.protected()).unwrap(), write),
        (huge, table, zap, write),
    ];
    for (level, old, change, expected) in changes {
        let holds = [Hold::Outside, Hold::Read, Hold::Write];
        assert_eq!(holds.map(|hold| is_allowed(hold, level, old, change)), expected, "{old:?}");
        assert!(is_allowed(Hold::NoLock, level, old, change), "{old:?}");
    }
    let small_leaf = Pte::<Npt>::leaf(Pfn(5), small).with(Npt::HOST_WRITABLE | Npt::WRITABLE | Npt::ACCESSED);
    let clear_write: Change = |pte, old| assert_eq!(pte.clear(Npt::WRITABLE), old);
    let clear_accessed: Change = |pte, old| assert_eq!(pte.clear(Npt::ACCESSED), old);
    assert!(!is_allowed(Hold::Outside, small, small_leaf, clear_write));
    assert!(is_allowed(Hold::Read, small, small_leaf, clear_write));
    assert!(is_allowed(Hold::Outside, small, small_leaf, clear_accessed));
}
