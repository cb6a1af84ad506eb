//! A write is pushed once, also the first one after a reset below a directory entry that the reset
//! has protected, whether its page is mapped or not.

use std::collections::BTreeMap;

use super::*;

/// How often each page is in the rings.
fn counts<F: Format>(vm: &Vm<TestHost, F>) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for page in harvest(vm) {
        *counts.entry(page.page).or_default() += 1;
    }
    counts
}

each!(the_first_write_after_a_reset_is_pushed_once, first_write);
fn first_write<F: Format>(locking: Locking) {
    for protection in [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves] {
        let config = Config::default().with_locking(locking).with_dirty_tracking(protection);
        let (vm, mut vcpu) = logging::<F>(config, 8192, 8 * MIB);
        let written = |pages: &mut dyn Iterator<Item = u64>| pages.map(|page| (page, 1)).collect::<BTreeMap<_, u64>>();
        // Every other page; so many that their reset protects the directory entry above, where it
        // can.
        (0..1024).step_by(2).for_each(|page| write(&mut vcpu, page));
        assert_eq!(counts(&vm), written(&mut (0..1024).step_by(2)));
        vm.reset_dirty_rings().unwrap();
        // Pages that are not mapped, one that is invalidated, and pages that are mapped.
        drop(vm.invalidate_range(GfnRange::new(Gfn(4), 1)).unwrap());
        for page in [1, 4, 2, 3, 513, 512, 515] {
            write(&mut vcpu, page);
            assert!(is_writable(&vm, page));
        }
        assert_eq!(counts(&vm), written(&mut [1, 2, 3, 4, 512, 513, 515].into_iter()), "{protection:?}");
        vm.reset_dirty_rings().unwrap();
        assert!((0..2048).all(|page| !is_writable(&vm, page)));
        // By a prefault, too.
        assert_eq!(vcpu.pre_fault_memory(Gpa(0), 4 * MIB, Access::Write), Ok(4 * MIB));
        assert_eq!(counts(&vm), written(&mut (0..1024)), "{protection:?}");
        vm.reset_dirty_rings().unwrap();
        drop(vcpu);
        end(&vm, &[0]);
    }
}

/// A guest that writes at random, near its last writes, between resets.
#[test]
fn no_random_write_is_pushed_twice() {
    for fault_around in [FaultAround::Off, FaultAround::Pages(16)] {
        let (vm, mut vcpu) = logging::<Npt>(Config::default().with_fault_around(fault_around), 65536, 64 * MIB);
        let mut random = 1_u64;
        for round in 0..20 {
            let mut written = BTreeMap::new();
            for step in 0..5000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // So near that the reset protects directory entries.
                let page = (random >> 33) % 1024 + step / 400 * 1024;
                if !is_writable(&vm, page) {
                    write(&mut vcpu, page);
                    written.insert(page, 1);
                }
            }
            assert_eq!(counts(&vm), written, "round {round}, {fault_around:?}");
            vm.reset_dirty_rings().unwrap();
        }
        drop(vcpu);
        end(&vm, &[0]);
    }
}
