//! The supported configurations, each of which must have an exact log. A configuration is a way to
//! find writes, to get the log, to log huge pages and to find accesses, for every format and
//! locking.

use crate::common::TestHost;
use crate::common::log::{
    ACCESS_TRACKINGS, DIRTY_TRACKINGS, HUGE_PAGE_LOGGINGS, LOCKINGS, LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World,
};
use crate::shadow_cpu;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::ConfigError;
use slat::format::{Ept, Format, Npt, Stage2};
use slat::shadow::ShadowPaging;
use slat::tables::AccessTracking;
use slat::{Access, Config, GfnRange, PageSize, Vm};

/// The documented result: a configuration that needs hardware the format lacks is refused with the
/// reason.
fn expected<F: Format>(config: Config) -> Result<(), ConfigError> {
    match (config.dirty_tracking, config.access_tracking) {
        (DirtyTracking::PageModificationLog, _) if !F::HAS_MODIFICATION_LOG => {
            Err(ConfigError::NoModificationLog { format: F::NAME })
        }
        (DirtyTracking::DirtyBit, _) if !F::HAS_DIRTY_BIT => Err(ConfigError::NoDirtyBitInFormat { format: F::NAME }),
        (DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog, AccessTracking::Faults) => {
            Err(ConfigError::NoDirtyBit)
        }
        _ => Ok(()),
    }
}

/// Small pages, then a block of 2 MiB, then small ones again.
const SLOT: Slot = Slot::huge(1, 512 - 40, 40 + 512 + 30, PageSize::Size2M);
const BLOCK: std::ops::Range<u64> = 40..552;

/// Writes, gets and clears, writes again, invalidates. Each time the log has exactly what was
/// written, by the page, or by the block for a huge page that is marked whole.
fn is_exact<F: Format>(config: Config) {
    let mut world = World::<F>::new(config);
    world.create(SLOT, NO_FLAGS);
    world.write_all(SLOT, [1, 2, 39, 100, 552]);
    world.set_flags(SLOT, LOG);
    let all: Vec<u64> = (0..SLOT.nr_pages).collect();
    // What CPUs logged before logging began is drained, and marks nothing; here it is discarded.
    world.vm.host().modification_log.lock().unwrap().clear();
    let initially = if config.manual_protect == ManualProtect::InitiallySet { all.clone() } else { vec![] };
    assert_eq!(world.harvest(SLOT), initially, "{config:?}: at first");
    assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}: nothing was written");
    let marks_whole = config.huge_page_logging == HugePageLogging::MarkWhole;
    let logged = |written: &[u64]| -> Vec<u64> {
        let in_block = written.iter().any(|page| BLOCK.contains(page));
        all.iter()
            .copied()
            .filter(|page| written.contains(page) || (marks_whole && in_block && BLOCK.contains(page)))
            .collect()
    };
    for written in [&[0, 2, 38, 100, 551, 552, 581][..], &[2, 3, 100, 101], &[2], &all] {
        world.write_all(SLOT, written.iter().copied());
        // Reads beside them are no writes.
        for page in [5, 200, 570] {
            world.read(SLOT, page);
        }
        assert_eq!(world.harvest(SLOT), logged(written), "{config:?}");
        assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}");
    }
    // By range and mask: the first word is harvested, the rest stays.
    world.write_all(SLOT, [3, 4, 70, 580]);
    let written = logged(&[3, 4, 70, 580]);
    let (head, tail): (Vec<u64>, Vec<u64>) = written.iter().partition(|page| **page < 64);
    assert_eq!(world.get_range(SLOT, 0, 64), head, "{config:?}");
    if config.manual_protect != ManualProtect::Disabled {
        assert_eq!(world.vm.clear_dirty_log(SLOT.id, 0, 64, &[u64::MAX]), Ok(head.len() as u64), "{config:?}");
    }
    assert_eq!(world.get(SLOT), tail, "{config:?}");
    if config.manual_protect != ManualProtect::Disabled {
        assert_eq!(world.clear(SLOT, &[tail[0]]), Ok(1), "{config:?}");
        assert_eq!(world.harvest(SLOT), tail[1..], "{config:?}");
    }
    // What is invalidated stays in the log. The host is notified of every page that was ever
    // written.
    world.write_all(SLOT, [7, 300]);
    world.vm.host().modification_log.lock().unwrap().clear();
    world.vm.host().record_zapped();
    drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(0), SLOT.nr_pages)).unwrap());
    let reported: u64 =
        world.vm.host().take_zapped().iter().filter(|leaf| leaf.dirty).map(|leaf| leaf.range.nr_pages()).sum();
    assert_eq!(reported, SLOT.nr_pages, "{config:?}");
    assert_eq!(world.harvest(SLOT), logged(&[7, 300]), "{config:?}");
    assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}");
    world.finish(&[SLOT]);
}

/// Pages of a guest without a second stage: a huge block, and one of small pages.
const SHADOW_PAGES: u64 = 1024;

/// As [`is_exact`], with shadow page tables. The guest has paging off: it writes at guest-physical
/// addresses.
fn is_exact_with_shadow_tables(config: Config) {
    let vm = shadow_cpu::new_vm(config, ShadowPaging::default(), SHADOW_PAGES, 8, NO_FLAGS);
    let mut cpu = shadow_cpu::Cpu::new(&vm);
    shadow_cpu::move_page(&vm, 600);
    let write = |cpu: &mut shadow_cpu::Cpu, pages: &[u64]| {
        for &page in pages {
            let found = cpu.access(page << 12, Access::Write, |page| page.gfn());
            assert_eq!(found, Ok(page), "{config:?}");
        }
    };
    write(&mut cpu, &[1, 2, 700]);
    vm.set_user_memory_region(shadow_cpu::region(SHADOW_PAGES, LOG, None)).unwrap();
    let take = || -> Vec<u64> {
        let mut bitmap = [0; SHADOW_PAGES as usize / 64];
        vm.get_dirty_log(0, &mut bitmap).unwrap();
        if config.manual_protect != ManualProtect::Disabled {
            vm.clear_dirty_log(0, 0, SHADOW_PAGES, &bitmap).unwrap();
        }
        (0..SHADOW_PAGES).filter(|page| bitmap[*page as usize / 64] >> (page % 64) & 1 != 0).collect()
    };
    let all: Vec<u64> = (0..SHADOW_PAGES).collect();
    let initially = if config.manual_protect == ManualProtect::InitiallySet { all.clone() } else { vec![] };
    assert_eq!(take(), initially, "{config:?}: at first");
    let marks_whole = config.huge_page_logging.marks_whole();
    for written in [&[0, 2, 511, 600, 1000][..], &[2, 3, 600, 601], &[513], &all] {
        write(&mut cpu, written);
        for page in [5, 200, 570] {
            assert_eq!(cpu.page_at(page << 12), Ok(page));
        }
        let in_block = written.iter().any(|&page| page < 512);
        let logged: Vec<u64> = all
            .iter()
            .copied()
            .filter(|page| written.contains(page) || marks_whole && in_block && *page < 512)
            .collect();
        assert_eq!(take(), logged, "{config:?}");
        assert_eq!(take(), [0; 0], "{config:?}");
    }
    // What is invalidated, moved, or aged stays in the log.
    write(&mut cpu, &[700, 701]);
    shadow_cpu::move_page(&vm, 700);
    vm.age_range(GfnRange::new(slat::Gfn(0), SHADOW_PAGES)).unwrap();
    assert_eq!(take(), [700, 701], "{config:?}");
    write(&mut cpu, &[701]);
    assert_eq!(take(), [701], "{config:?}");
}

/// Runs `check` for each configuration.
fn each_configuration(mut check: impl FnMut(Config)) {
    for locking in LOCKINGS {
        for dirty_tracking in DIRTY_TRACKINGS {
            for manual_protect in MANUAL_PROTECTS {
                for huge in HUGE_PAGE_LOGGINGS {
                    for access_tracking in ACCESS_TRACKINGS {
                        check(
                            Config::default()
                                .with_locking(locking)
                                .with_dirty_tracking(dirty_tracking)
                                .with_manual_protect(manual_protect)
                                .with_huge_page_logging(huge)
                                .with_access_tracking(access_tracking),
                        );
                    }
                }
            }
        }
    }
}

/// Tries them all. Returns how many there are, and how many of them are supported.
fn tries_all<F: Format>() -> (u32, u32) {
    let (mut nr_tried, mut nr_had) = (0, 0);
    each_configuration(|config| {
        nr_tried += 1;
        match Vm::<_, F>::new(TestHost::default(), config) {
            Ok(vm) => {
                assert_eq!(expected::<F>(config), Ok(()), "{config:?}");
                drop(vm);
                nr_had += 1;
                is_exact::<F>(config);
            }
            Err(error) => assert_eq!(Err(error), expected::<F>(config), "{config:?}"),
        }
    });
    (nr_tried, nr_had)
}

#[test]
fn every_configuration_with_shadow_tables_is_refused_as_documented_or_exact() {
    let mut nr_had = 0;
    each_configuration(|config| {
        // Accesses are tracked by faults, whatever was asked for.
        let by_faults = config.with_access_tracking(AccessTracking::Faults);
        let found = Vm::with_shadow_paging(TestHost::default(), config, ShadowPaging::default()).map(drop);
        assert_eq!(found, expected::<Npt>(by_faults), "{config:?}");
        if found.is_ok() {
            nr_had += 1;
            is_exact_with_shadow_tables(config);
        }
    });
    assert_eq!(nr_had, 72);
}

#[test]
fn every_configuration_of_every_format_is_refused_as_documented_or_exact() {
    slat::for_each_format!(F => {
        // Of 8 pairs of dirty and access tracking: both write protections with both, and what else
        // the hardware has with the accessed bit.
        let nr_pairs = 4 + u32::from(F::HAS_DIRTY_BIT) + u32::from(F::HAS_MODIFICATION_LOG);
        assert_eq!(tries_all::<F>(), (144, 18 * nr_pairs), "{}", F::NAME);
    });
}

/// One row of the table, for a way to find writes: the result with each format and way to find
/// accesses. No other option makes a difference.
fn line(dirty_tracking: DirtyTracking) -> String {
    fn cell<F: Format>(dirty_tracking: DirtyTracking, access_tracking: AccessTracking) -> &'static str {
        let config = Config::default().with_dirty_tracking(dirty_tracking).with_access_tracking(access_tracking);
        match Vm::<_, F>::new(TestHost::default(), config) {
            Ok(_) => "yes",
            Err(ConfigError::NoDirtyBit) => "`NoDirtyBit`",
            Err(ConfigError::NoDirtyBitInFormat { .. }) => "`NoDirtyBitInFormat`",
            Err(ConfigError::NoModificationLog { .. }) => "`NoModificationLog`",
            Err(error) => panic!("{config:?}: {error}"),
        }
    }
    let name = match dirty_tracking {
        DirtyTracking::WriteProtect => "write protection, lazy",
        DirtyTracking::WriteProtectLeaves => "write protection, leaf by leaf",
        DirtyTracking::DirtyBit => "dirty bits",
        DirtyTracking::PageModificationLog => "page-modification logs",
    };
    let cells = |cell: fn(DirtyTracking, AccessTracking) -> &'static str| {
        ACCESS_TRACKINGS.map(|access_tracking| cell(dirty_tracking, access_tracking))
    };
    let columns = [cells(cell::<Npt>), cells(cell::<Ept>), cells(cell::<Stage2>)];
    // Each format is in the column of the formats with the same hardware.
    slat::for_each_format!(F => {
        let column = match (F::HAS_DIRTY_BIT, F::HAS_MODIFICATION_LOG) {
            (true, false) => columns[0],
            (true, true) => columns[1],
            (false, _) => columns[2],
        };
        assert_eq!(cells(cell::<F>), column, "{}", F::NAME);
    });
    let [[npt_bit, npt_faults], [ept_bit, ept_faults], [stage2, stage2_faults]] = columns;
    assert_eq!(stage2, stage2_faults);
    format!("| {name} | {npt_bit} | {npt_faults} | {ept_bit} | {ept_faults} | {stage2} |")
}

/// The table of docs/configurations.md. `cargo test --test engine
/// the_table_of_supported_configurations -- --nocapture` prints it.
#[test]
fn the_table_of_supported_configurations() {
    let head = "| writes found out by | NPT, G-stage and VT-d, accessed bit | the same, faults | EPT, accessed bit | EPT, faults | stage 2, either |\n|---|---|---|---|---|---|";
    let lines: Vec<String> = [head.to_string()].into_iter().chain(DIRTY_TRACKINGS.map(line)).collect();
    let table = lines.join("\n");
    println!("{table}");
    assert_eq!(
        lines[1..],
        [
            "| write protection, lazy | yes | yes | yes | yes | yes |",
            "| write protection, leaf by leaf | yes | yes | yes | yes | yes |",
            "| dirty bits | yes | `NoDirtyBit` | yes | `NoDirtyBit` | `NoDirtyBitInFormat` |",
            "| page-modification logs | `NoModificationLog` | `NoModificationLog` | yes | `NoDirtyBit` | `NoModificationLog` |",
        ]
    );
}
