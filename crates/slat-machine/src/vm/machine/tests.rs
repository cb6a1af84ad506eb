//! The machine with the engine: guests that verify what they read, and the dirty log compared with
//! their writes.

use std::time::Instant;

use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::error::{ConfigError, FaultError, SlotError};
use slat::format::{CpuFeatures, Ept, Format, Hardware, Npt, Stage2, Sv39x4, Sv48x4};
use slat::{Config, Error, Host, PAGE_SIZE};

use super::*;
use crate::hardware::cpu::Paging;
use crate::hardware::walk::Marks;
use crate::memory::BackingKind;
use crate::vm::guest::{Order, Sharing, value};

const KIB: u64 = 1 << 10;

/// The longest that a test waits for a write: no machine is so slow.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

pub(super) fn small() -> MachineConfig {
    MachineConfig { nr_vcpus: 4, bytes_per_vcpu: 256 * KIB, nr_slots: 2, ..MachineConfig::default() }
}

pub(super) fn dirty_pages<F: HardwareFormat>(machine: &Machine<F>) -> Vec<u64> {
    let mut dirty = Vec::new();
    for slot in machine.slots() {
        let mut bitmap = vec![0; slot.nr_pages.div_ceil(64) as usize];
        machine.vm().get_dirty_log(slot.id, &mut bitmap).unwrap();
        let is_dirty = |page: &u64| bitmap[(page / 64) as usize] >> (page % 64) & 1 != 0;
        dirty.extend((0..slot.nr_pages).filter(is_dirty).map(|page| page + slot.first_page));
    }
    dirty
}

pub(super) fn populate_then_log<F: HardwareFormat + Format>(config: &MachineConfig) {
    let machine = Machine::<F>::new(config).unwrap();
    let nr_pages = machine.nr_pages();
    let report = machine.run(Program::default()).unwrap();
    assert_eq!(report.vcpus.len(), config.nr_vcpus);
    assert_eq!(report.total().nr_accesses, nr_pages);
    assert!((0..nr_pages).all(|page| machine.peek(page) == Some(value(1, page))));
    assert_eq!(machine.peek(nr_pages), None);

    machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES).unwrap();
    dirty_pages(&machine);
    // Some write, all are verified; the log has exactly the changed pages.
    for round in 2..6 {
        let program = Program {
            order: if round % 2 == 0 { Order::Sequential } else { Order::Random },
            sharing: if round < 4 { Sharing::Partitioned } else { Sharing::Overlapping },
            write_percent: 30,
            seed: 5,
            round,
            oldest_round: 1,
        };
        machine.run(program).unwrap();
        let written: Vec<u64> = (0..nr_pages).filter(|page| machine.peek(*page) == Some(value(round, *page))).collect();
        assert!(!written.is_empty() && (written.len() as u64) < nr_pages);
        assert_eq!(dirty_pages(&machine), written, "round {round}");
    }
    assert!(dirty_pages(&machine).is_empty());
}

#[test]
fn guests_run_and_the_dirty_log_has_their_writes() {
    for locking in [Locking::None, Locking::Shared, Locking::Exclusive] {
        for paging in [Paging::Off, Paging::TwoDimensional] {
            let config = MachineConfig { engine: Config::default().with_locking(locking), paging, ..small() };
            slat::for_each_format!(F => {
                populate_then_log::<F>(&config);
            });
        }
    }
}

/// Arm without FEAT_HAFDBS, RISC-V without Svadu. Other formats ignore it.
#[test]
fn guests_run_on_cpus_that_set_no_marks() {
    for paging in [Paging::Off, Paging::TwoDimensional] {
        let config = MachineConfig { marks: Marks::ByFaults, paging, ..small() };
        populate_then_log::<Stage2>(&config);
        populate_then_log::<Sv39x4>(&config);
        populate_then_log::<Sv48x4>(&config);
        // Log by D, which a fault sets.
        let engine = Config::default().with_dirty_tracking(DirtyTracking::DirtyBit);
        populate_then_log::<Sv48x4>(&MachineConfig { engine, ..config });
    }
}

/// With page tables of other depths, and processors with all features that matter.
#[test]
fn guests_run_in_every_geometry() {
    fn all<F: HardwareFormat>() {
        for levels in F::GEOMETRIES {
            let hardware = Hardware {
                features: F::FEATURES - CpuFeatures::ITLB_MULTIHIT,
                levels: Some(levels.root_level.0),
                ..Hardware::default()
            };
            let engine = Config::default().with_hardware(hardware);
            populate_then_log::<F>(&MachineConfig { engine, ..small() });
        }
    }
    slat::for_each_format!(F => {
        all::<F>();
    });
}

#[test]
fn guests_run_with_the_waiting_method_and_tiny_tlbs() {
    let flush_method = Some(FlushMethod::Waiting);
    let tlb = crate::hardware::tlb::Geometry { size_4k: (2, 2), size_2m: (1, 1), size_1g: (1, 1) };
    let mut pagings = [Paging::Off, Paging::TwoDimensional].into_iter().cycle();
    slat::for_each_format!(F => {
        let paging = pagings.next().unwrap();
        populate_then_log::<F>(&MachineConfig { paging, flush_method, tlb, ..small() });
    });
}

#[test]
fn large_pages_are_mapped_and_split() {
    let config = MachineConfig {
        nr_vcpus: 2,
        bytes_per_vcpu: 8 << 20,
        nr_slots: 2,
        backing: BackingKind::AnonymousThp,
        ..MachineConfig::default()
    };
    let mut pagings = [Paging::Off, Paging::TwoDimensional].into_iter().cycle();
    slat::for_each_format!(F => {
        populate_then_log::<F>(&MachineConfig { paging: pagings.next().unwrap(), ..config.clone() });
    });
}

/// While CPUs write, logs are taken; no write is lost for longer than one harvest after they have
/// stopped.
#[test]
fn harvests_while_guests_write_lose_nothing() {
    for nr_vcpus in [3, 48] {
        let config = MachineConfig {
            nr_vcpus,
            bytes_per_vcpu: 64 * KIB,
            region_flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
            ..MachineConfig::default()
        };
        let machine = Machine::<Npt>::new(&config).unwrap();
        if nr_vcpus > 3 && machine.flush_method() == FlushMethod::Waiting {
            eprintln!("skipped: each flush would wait for all {nr_vcpus} threads' time slices");
            continue;
        }
        machine.run(Program::default()).unwrap();
        let mut seen = vec![0; machine.nr_pages() as usize];
        let program = Program {
            order: Order::Random,
            sharing: Sharing::Overlapping,
            write_percent: 50,
            oldest_round: 1,
            ..Program::default()
        };
        let running = machine.start(program).unwrap();
        let mut nr_seen = 0;
        let mut turn = 0;
        let begin = Instant::now();
        // And until a page was written: on a busy machine that may take longer.
        while turn < 200 || (nr_seen == 0 && begin.elapsed() < LONGEST_WAIT) {
            turn += 1;
            running.advance_round();
            // A harvest is so short that the virtual CPUs might never get a processor in between.
            if turn % 4 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            for page in dirty_pages(&machine) {
                seen[page as usize] = machine.peek(page).unwrap();
                nr_seen += 1;
            }
        }
        let report = running.stop().unwrap();
        assert!(nr_seen > 0, "no page was written in {LONGEST_WAIT:?}");
        assert!(report.total().nr_accesses > 0);
        // All that was written after the last harvest, and nothing else.
        for page in dirty_pages(&machine) {
            seen[page as usize] = machine.peek(page).unwrap();
        }
        for (page, seen) in seen.into_iter().enumerate() {
            assert_eq!(machine.peek(page as u64), Some(seen), "page {page}");
        }
    }
}

#[test]
fn many_more_cpus_than_processors_finish() {
    let config = MachineConfig { nr_vcpus: 64, bytes_per_vcpu: 128 * KIB, ..MachineConfig::default() };
    let machine = Machine::<Ept>::new(&config).unwrap();
    for round in 1..20 {
        let program = Program { sharing: Sharing::Overlapping, write_percent: 50, round, ..Program::default() };
        assert_eq!(machine.run(program).unwrap().total().nr_accesses, 64 * machine.nr_pages());
    }
}

#[test]
fn one_program_at_a_time() {
    let machine = Machine::<Npt>::new(&small()).unwrap();
    let running = machine.start(Program::default()).unwrap();
    assert!(matches!(machine.run(Program::default()), Err(MachineError::Busy)));
    assert!(matches!(machine.start(Program::default()), Err(MachineError::Busy)));
    drop(running);
    assert!(machine.run(Program::default()).is_ok());
    let bad = Program { write_percent: 101, ..Program::default() };
    assert!(matches!(machine.run(bad), Err(MachineError::Program(_))));
    std::mem::forget(machine.start(Program::default()));
    drop(machine);
}

#[test]
fn a_wrong_value_is_found() {
    let machine = Machine::<Npt>::new(&small()).unwrap();
    machine.run(Program { round: 3, ..Program::default() }).unwrap();
    let reading = Program { write_percent: 0, round: 3, oldest_round: 3, ..Program::default() };
    machine.run(reading).unwrap();
    match machine.run(Program { round: 9, oldest_round: 4, ..reading }) {
        Err(MachineError::Guest { error: GuestError::WrongValue { page, found, .. }, .. }) => {
            assert_eq!(found, value(3, page));
        }
        other => panic!("{other:?}"),
    }
    // The machine can still be used.
    machine.run(reading).unwrap();
}

#[test]
fn an_exit_is_an_error() {
    let machine = Machine::<Npt>::new(&small()).unwrap();
    let slot = machine.slots()[1];
    machine
        .vm()
        .set_user_memory_region(MemoryRegion {
            slot: slot.id,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr: slot.gpa,
            memory_size: 0,
            backing: None,
            userfault_bitmap: None,
        })
        .unwrap();
    match machine.run(Program::default()) {
        Err(MachineError::Guest {
            vcpu,
            error: GuestError::Access { error: crate::hardware::cpu::CpuError::Exit(_), .. },
        }) => {
            assert!(vcpu >= 2);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn pins_are_applied_or_refused() {
    let Some(&cpu) = topology::usable_cpus().first() else { return };
    let pins = |cpu| Some(Pins { vcpus: vec![cpu; 4], main: None });
    assert!(
        Machine::<Npt>::new(&MachineConfig { pins: pins(cpu), ..small() }).unwrap().run(Program::default()).is_ok()
    );
    let refused = Machine::<Npt>::new(&MachineConfig { pins: pins(100_000), ..small() });
    assert!(matches!(refused, Err(MachineError::Pin(_))), "{refused:?}");
}

#[test]
fn too_few_tables_are_an_error_of_the_engine() {
    let machine = Machine::<Npt>::new(&MachineConfig { max_tables: Some(3), ..small() });
    let result = machine.and_then(|machine| machine.run(Program::default()));
    assert!(
        matches!(
            result,
            Err(MachineError::Engine(Error::Config(ConfigError::OutOfMemory) | Error::Slot(SlotError::OutOfMemory))
                | MachineError::Guest {
                    error: GuestError::Access {
                        error: crate::hardware::cpu::CpuError::Engine(FaultError::OutOfMemory),
                        ..
                    },
                    ..
                })
        ),
        "{result:?}"
    );
}

#[test]
fn the_logs_name_the_pages_that_guests_wrote() {
    for paging in [Paging::Off, Paging::TwoDimensional] {
        let engine = Config::default().with_dirty_tracking(DirtyTracking::PageModificationLog);
        let machine = Machine::<Ept>::new(&MachineConfig { engine, paging, ..small() }).unwrap();
        let drained = || {
            let mut pages = Vec::new();
            machine.vm().host().drain_modification_logs(&mut |part| pages.extend_from_slice(part));
            pages
        };
        // Of the guest's own page tables, too, unless the engine has made their leaves dirty
        // itself.
        let is_of_region = |gpa: &&Gpa| gpa.0 >= REGION_GPA.0;
        // Pages are mapped by reads first, so that the CPUs find leaves that are not dirty.
        machine.run(Program { write_percent: 0, ..Program::default() }).unwrap();
        assert_eq!(drained().iter().find(is_of_region), None);

        let report = machine.run(Program { write_percent: 30, order: Order::Random, ..Program::default() }).unwrap();
        let logged = drained();
        assert_eq!(report.total().nr_pages_logged, logged.len() as u64);
        let mut pages: Vec<u64> =
            logged.iter().filter(is_of_region).map(|gpa| (gpa.0 - REGION_GPA.0) >> Gfn::SHIFT).collect();
        pages.sort_unstable();
        let is_written = |page: &u64| machine.peek(*page) == Some(value(1, *page));
        assert!(pages.iter().copied().eq((0..machine.nr_pages()).filter(is_written)), "{pages:?}");
        assert!(!pages.is_empty());
        assert_eq!(machine.vm().host().modification_logs().nr_drains(), 2);
    }
}

pub(super) fn huge() -> MachineConfig {
    MachineConfig {
        nr_vcpus: 3,
        bytes_per_vcpu: 4 << 20,
        backing: BackingKind::AnonymousThp,
        ..MachineConfig::default()
    }
}

/// Huge pages are split and recovered beside guests, whose TLBs detect two sizes of one page at a
/// time.
pub(super) fn toggle_logging_beside_guests<F: HardwareFormat>(config: &MachineConfig) {
    let machine = Machine::<F>::new(config).unwrap();
    machine.run(Program::default()).unwrap();
    let program = Program {
        order: Order::Random,
        sharing: Sharing::Overlapping,
        write_percent: 20,
        oldest_round: 1,
        ..Program::default()
    };
    let running = machine.start(program).unwrap();
    for flags in [MemoryRegionFlags::LOG_DIRTY_PAGES, MemoryRegionFlags::empty()].into_iter().cycle().take(40) {
        let before = machine.progress().total();
        machine.set_region_flags(flags).unwrap();
        while machine.progress().total() < before + 500 && !machine.has_stopped() {
            std::thread::yield_now();
        }
    }
    running.stop().unwrap();
    let stats = machine.vm().stats();
    if stats.pages_2m() == 0 {
        eprintln!("not checked: this host has no transparent huge pages");
    } else {
        assert!(stats.splits > 0 && stats.recoveries > 0, "{stats:?}");
    }
}

#[test]
fn huge_pages_are_split_and_recovered_beside_guests_of_every_format() {
    let config = huge();
    slat::for_each_format!(F => {
        toggle_logging_beside_guests::<F>(&config);
    });
}

#[test]
fn a_region_beyond_the_guest_physical_addresses_is_refused() {
    // 2 TiB of address space, of which the region begins at 64 GiB; all of it, without memory
    // behind it.
    let config = MachineConfig { bytes_per_vcpu: 1 << 40, nr_vcpus: 2, ..MachineConfig::default() };
    let refused = Machine::<Sv39x4>::new(&config);
    assert!(
        matches!(
            refused,
            Err(MachineError::Memory(_) | MachineError::Engine(Error::Slot(SlotError::AddressTooHigh { .. })))
        ),
        "{refused:?}"
    );
    let machine = Machine::<Sv39x4>::new(&small()).unwrap();
    let whole = BackingSlice::region(9, Gpa(1 << 41), &machine.region);
    let beyond = MemoryRegion { memory_size: PAGE_SIZE, ..whole };
    let refused = machine.vm().set_user_memory_region(beyond.clone());
    assert!(matches!(refused, Err(SlotError::AddressTooHigh { gpa_bits: 41, .. })), "{refused:?}");
    let machine = Machine::<Sv48x4>::new(&small()).unwrap();
    // The end of four levels under a wide root.
    let last = MemoryRegion { guest_phys_addr: Gpa((1 << 50) - PAGE_SIZE), ..beyond };
    machine.vm().set_user_memory_region(last).unwrap();
}

#[test]
fn logging_that_a_format_lacks_is_refused() {
    let refused = |engine| match Machine::<Stage2>::new(&MachineConfig { engine, ..small() }) {
        Err(MachineError::Engine(error)) => error,
        other => panic!("{other:?}"),
    };
    let by = |tracking| Config::default().with_dirty_tracking(tracking);
    assert_eq!(refused(by(DirtyTracking::DirtyBit)), Error::from(ConfigError::NoDirtyBitInFormat { format: "stage2" }));
    let no_log = ConfigError::NoModificationLog { format: "stage2" };
    assert_eq!(refused(by(DirtyTracking::PageModificationLog)), Error::from(no_log));
    slat::for_each_format!(F => {
        let has = |engine| Machine::<F>::new(&MachineConfig { engine, ..small() }).is_ok();
        assert_eq!(has(by(DirtyTracking::DirtyBit)), F::HAS_DIRTY_BIT, "{}", F::NAME);
        assert_eq!(has(by(DirtyTracking::PageModificationLog)), F::HAS_MODIFICATION_LOG, "{}", F::NAME);
    });
}
