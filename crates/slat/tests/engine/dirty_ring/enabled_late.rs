//! Rings that are enabled after the last vCPU was dropped: pages that vCPUs left writable are
//! protected.

use slat::error::ConfigError;
use slat::format::Stage2;

use super::*;
use crate::common::Call;

#[test]
fn rings_are_refused_only_while_a_vcpu_exists() {
    let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::default(), Config::default()).unwrap());
    let vcpus = [(); 3].map(|()| vm.create_vcpu().unwrap());
    for vcpu in vcpus {
        assert_eq!(vm.enable_dirty_ring(256), Err(ConfigError::VcpusExist));
        assert_eq!(vm.enable_dirty_ring(1), Err(ConfigError::BadRingSize { nr_entries: 1 }));
        assert!(vcpu.dirty_ring().is_none());
    }
    assert_eq!(vm.enable_dirty_ring(256), Ok(()));
    assert_eq!(vm.enable_dirty_ring(256), Err(ConfigError::DirtyRingEnabled));
    let vcpu = vm.create_vcpu().unwrap();
    assert!(vcpu.dirty_ring().is_some());
    drop(vcpu);
    // For the life of the VM.
    assert_eq!(vm.enable_dirty_ring(512), Err(ConfigError::DirtyRingEnabled));
    assert!(vm.create_vcpu().unwrap().dirty_ring().is_some());
    assert_eq!(vm.dirty_rings().count(), 1);
}

each!(pages_left_writable_by_earlier_vcpus_are_pushed_when_written, left_writable);
fn left_writable<F: Format>(locking: Locking) {
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
        for size in [PageSize::Size4K, PageSize::Size2M] {
            let config = Config::default().with_locking(locking).with_manual_protect(manual_protect);
            let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
            vm.set_user_memory_region(region(0, 0, 4 * MIB, 512, size)).unwrap();
            vm.set_user_memory_region(region(1, GIB, 4 * MIB, 1 << 20, size)).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            (0..40).for_each(|page| write(&mut vcpu, page));
            vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
            (20..60).for_each(|page| write(&mut vcpu, page));
            write(&mut vcpu, GIB / PAGE_SIZE);
            drop(vcpu);
            let nr_flushes = vm.host().nr_flushes();
            vm.enable_dirty_ring(1024).unwrap();
            assert!(vm.host().nr_flushes() > nr_flushes, "CPUs may have it cached");
            assert!((0..1024).all(|page| !is_writable(&vm, page)), "{manual_protect:?}, {size:?}");
            assert!(is_writable(&vm, GIB / PAGE_SIZE), "of a slot that does not log");
            let mut vcpu = vm.create_vcpu().unwrap();
            [3, 30, 50, 700].into_iter().for_each(|page| write(&mut vcpu, page));
            assert_eq!(harvest(&vm), pages_of(0, [3, 30, 50, 700]), "{manual_protect:?}, {size:?}");
            assert_eq!(vm.reset_dirty_rings(), Ok(4));
            // The other one begins to log only now.
            vm.set_user_memory_region(change(1, LOG, GIB, 4 * MIB)).unwrap();
            write(&mut vcpu, GIB / PAGE_SIZE);
            assert_eq!(harvest(&vm), pages_of(1, [0]));
            assert_eq!(vm.reset_dirty_rings(), Ok(1));
            // It stops logging: no writable page is missed when it begins again.
            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 4 * MIB)).unwrap();
            vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
            assert!((0..1024).all(|page| !is_writable(&vm, page)));
            drop(vcpu);
            end(&vm, &[0, 1]);
        }
    }
}

/// A call that links the writable parts of a broken leaf marks them in no ring.
#[test]
fn rings_are_refused_while_a_leaf_is_broken_whose_parts_can_be_written() {
    let vm = Arc::new(Vm::<TestHost, Stage2>::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 512, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 3);
    drop(vcpu);
    let other = Arc::clone(&vm);
    vm.host().overtake(Call::Flush, 1, move || assert_eq!(other.enable_dirty_ring(1024), Err(ConfigError::VcpusExist)));
    assert_eq!(vm.split_range(GfnRange::new(Gfn(0), 512), PageSize::Size4K), Ok(1));
    assert!(vm.host().was_overtaken() && is_writable(&vm, 7));
    // Once they are linked, protection finds them.
    vm.enable_dirty_ring(1024).unwrap();
    vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 7);
    assert_eq!(harvest(&vm), pages_of(0, [7]));
    assert_eq!(vm.reset_dirty_rings(), Ok(1));
    drop(vcpu);
    end(&vm, &[0]);
}
