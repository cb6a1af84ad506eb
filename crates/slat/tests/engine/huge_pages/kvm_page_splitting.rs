//! KVM's dirty_log_page_splitting_test.

use super::*;

/// KVM's dirty_log_page_splitting_test: two vCPUs, each with its own memslot, and two passes.
fn kvm_page_splitting<F: Format>(config: Config, size: PageSize, slot_pages: u64) {
    // Some pages of each block; all would take longer and test no more.
    const STRIDE: usize = 37;
    let mut world = World::<F>::new(config);
    let slots = [0, 1].map(|id| Slot::huge(id, u64::from(id) * slot_pages, slot_pages, size));
    slots.iter().for_each(|slot| world.create(*slot, NO_FLAGS));
    let mut other = world.vm.create_vcpu().unwrap();
    let mut touch_all = |world: &mut World<F>| {
        for slot in slots {
            std::mem::swap(&mut world.vcpu, &mut other);
            world.write_all(slot, (0..slot.nr_pages).step_by(STRIDE));
        }
    };
    touch_all(&mut world);
    let nr_pages = 2 * slot_pages;
    let initial = match size {
        PageSize::Size1G => (0, 0, nr_pages / HUGE),
        _ => (0, nr_pages / BIG, 0),
    };
    assert_eq!(sizes(&world), initial, "populated");
    slots.iter().for_each(|slot| world.set_flags(*slot, LOG));
    let all_split = (nr_pages, 0, 0);
    let is_late = config.manual_protect == ManualProtect::InitiallySet;
    assert_eq!(sizes(&world), if is_late { initial } else { all_split }, "enabled");
    let expected: Vec<u64> = (0..slot_pages).step_by(STRIDE).collect();
    for pass in 0..2 {
        touch_all(&mut world);
        for slot in slots {
            let got = world.get(slot);
            if is_late && pass == 0 {
                assert_eq!(got.len() as u64, slot_pages);
            } else {
                assert_eq!(got, expected, "{config:?} in pass {pass}");
            }
            if config.manual_protect != ManualProtect::Disabled {
                assert_eq!(world.clear(slot, &(0..slot_pages).collect::<Vec<_>>()), Ok(got.len() as u64));
            }
        }
        assert_eq!(sizes(&world), all_split, "pass {pass}");
    }
    slots.iter().for_each(|slot| world.set_flags(*slot, NO_FLAGS));
    touch_all(&mut world);
    assert_eq!(sizes(&world), initial, "disabled");
    drop(other);
    world.finish(&slots);
}

#[test]
fn kvm_page_splitting_test() {
    for manual in MANUAL_PROTECTS {
        let config = Config::default().with_manual_protect(manual);
        slat::for_each_format!(F => {
            for tracking in dirty_trackings::<F>() {
                kvm_page_splitting::<F>(config.with_dirty_tracking(tracking), PageSize::Size2M, 8 * BIG);
            }
        });
        for tracking in dirty_trackings::<Broken>() {
            kvm_page_splitting::<Broken>(config.with_dirty_tracking(tracking), PageSize::Size2M, 8 * BIG);
        }
        for tracking in dirty_trackings::<Ept>() {
            kvm_page_splitting::<Ept>(config.with_dirty_tracking(tracking), PageSize::Size1G, HUGE);
        }
        kvm_page_splitting::<Broken>(config, PageSize::Size1G, HUGE);
    }
}
