//! The rights that the walker of shadow page tables returns. The tests of the CPU cover what they
//! allow: see [`shadow_cpu`](crate::hardware::shadow_cpu).

use slat::Access;
use slat::shadow::Gva;

use super::shadow::{self, ShadowStop};
use super::tests::{Way, leaf};
use super::tests_manuals::NPT;
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::tlb::Rights;

const RW: u64 = 2;
const US: u64 = 4;
const NX: u64 = 1 << 63;
const ALL: Rights = Rights::WRITE.and(Rights::EXECUTE).and(Rights::USER);

#[test]
fn rights_are_those_of_all_levels() {
    for manual in [NPT, NPT.with_levels(5)] {
        let levels = manual.levels();
        for at in 1..=levels {
            let way = Way::new(&manual, 1, leaf(&manual, 1) | manual.dirty);
            let walk = |needed| {
                let walk = || shadow::walk(way.walker(), levels, Gva(way.gpa.0), Access::Read, needed);
                uninterrupted(ShadowStop::Restart, walk).map(|mapping| mapping.rights)
            };
            assert_eq!(walk(Rights::SUPERVISOR), Err(ShadowStop::PageFault), "{levels} levels");
            for (entry, rights) in [
                (way.get(at), ALL),
                (way.get(at) & !RW, ALL.without(Rights::WRITE)),
                (way.get(at) | NX, ALL.without(Rights::EXECUTE)),
                (way.get(at) & !US, ALL.without(Rights::USER).and(Rights::SUPERVISOR)),
                (way.get(at) & !(RW | US) | NX, Rights::SUPERVISOR),
            ] {
                way.set(at, entry);
                assert_eq!(walk(Rights::NONE), Ok(rights), "{levels} levels, {at}: {entry:#x}");
            }
        }
    }
}
