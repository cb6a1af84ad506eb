//! A safe exchange stores no PTE that names another page-table page than the PTE before.

use super::*;
use crate::addr::{Hpa, Pfn};
use crate::format::{Ept, Npt, Stage2, Sv39x4, Sv48x4};
use crate::table::invalidation_seq::InvalidationSeq;

fn names_no_other_page<F: Format>() {
    let level = Level::L2M;
    let cell = AtomicU64::new(0);
    // SAFETY: no walk reaches it.
    let pte = unsafe { PteRef::<F>::new(&cell, level) };
    let (here, elsewhere) = (Hpa(0x20_0000), Hpa(0x40_0000));
    let table = Pte::table(here);
    let leaf = Pte::leaf(here.pfn(), level).with(F::HOST_WRITABLE);
    let empty = Pte::empty(InvalidationSeq::FIRST);
    let frozen = Pte::table(here).frozen_as_was(level);
    let broken = |table| Pte::broken(table, Breaking::Recovery);
    let split = |table| Pte::broken(table, Breaking::Split);
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
    names_no_other_page::<Npt>();
    names_no_other_page::<Ept>();
    names_no_other_page::<Stage2>();
    names_no_other_page::<Sv39x4>();
    names_no_other_page::<Sv48x4>();
}
