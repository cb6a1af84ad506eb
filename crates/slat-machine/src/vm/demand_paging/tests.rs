//! All modes, small: each delivers the missing pages, and each page once.

use std::thread;

use slat::PageSize;
use slat::format::{Ept, Npt, Stage2};

use super::*;
use crate::paging::{LocalAddress, PagesServer, SourceSpec};

const SEED: u64 = 7;

pub(super) fn small(mode: PagingMode) -> DemandPagingConfig {
    let kind =
        if mode.is_minor() || mode == PagingMode::UserfaultRing { BackingKind::Shmem } else { BackingKind::Anonymous };
    DemandPagingConfig {
        nr_vcpus: 4,
        bytes_per_vcpu: 70 * PAGE_SIZE,
        mode,
        backing: PagedBacking::Memory(kind),
        contents: paging_pattern(),
        ..DemandPagingConfig::default()
    }
}

/// Pages that are made from their numbers, so much later than they could be.
pub(super) fn made(seed: u64, delay_ns: u64) -> PagesFrom {
    PagesFrom::Source(SourceSpec::pattern(seed).open().unwrap().delayed_by(Duration::from_nanos(delay_ns)))
}

pub(super) fn resolver_of(mode: PagingMode) -> PagesFrom {
    if mode == PagingMode::None { PagesFrom::None } else { made(SEED, 0) }
}

/// Those of `modes` that this machine supports.
pub(super) fn supported(modes: impl IntoIterator<Item = PagingMode>) -> impl Iterator<Item = PagingMode> {
    modes.into_iter().filter(|mode| can(*mode))
}

fn can(mode: PagingMode) -> bool {
    if !mode.uses_userfaultfd() {
        return true;
    }
    match slat_userfaultfd::Userfaultfd::available() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: {error}");
            false
        }
    }
}

fn run<F: HardwareFormat>(config: &DemandPagingConfig, resolver: PagesFrom) -> DemandPagingReport {
    let mut paging = DemandPaging::<F>::new(config).unwrap();
    let report = paging.run(resolver).unwrap_or_else(|error| panic!("{config:?}: {error}"));
    let nr_pages = paging.nr_pages();
    assert_eq!(paging.verify().unwrap(), nr_pages, "{config:?}");
    assert_eq!(paging.nr_there(), nr_pages);
    for vcpu in &report.vcpus {
        assert_eq!(vcpu.nr_pages, report.pages_per_vcpu);
    }
    if config.mode != PagingMode::None {
        let nr_blocks = nr_pages * PAGE_SIZE / config.granularity.size_bytes();
        assert_eq!(report.nr_filled_for_faults + report.nr_filled_by_copier, nr_blocks, "{config:?}");
    }
    // A copier may be faster than the vCPUs.
    assert!(report.nr_exits() > 0 || config.copier.is_some() || !config.mode.uses_bitmap(), "{config:?}");
    assert_eq!(report.engine.userfaults, report.nr_exits());
    report
}

const MODES: [PagingMode; 7] = [
    PagingMode::None,
    PagingMode::Missing,
    PagingMode::Minor,
    PagingMode::Userfault,
    PagingMode::MissingUserfault,
    PagingMode::MinorUserfault,
    PagingMode::UserfaultRing,
];

#[test]
fn each_mode_delivers_each_page_once() {
    for mode in supported(MODES) {
        for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
            for descriptors in [config::Descriptors::One, config::Descriptors::OnePerVcpu] {
                let config = DemandPagingConfig { sharing, descriptors, nr_readers: 2, ..small(mode) };
                run::<Npt>(&config, resolver_of(mode));
            }
        }
        slat::for_each_format!(F => {
            run::<F>(&small(mode), resolver_of(mode));
        });
    }
}

#[test]
fn a_file_is_empty_where_pages_are_to_be_missing() {
    for mode in supported([PagingMode::Missing, PagingMode::MissingUserfault]) {
        let backing = PagedBacking::Memory(BackingKind::Shmem);
        run::<Npt>(&DemandPagingConfig { backing, ..small(mode) }, resolver_of(mode));
    }
}

#[test]
fn few_threads_run_many_vcpus_whose_pages_have_a_latency() {
    for mode in supported(MODES.into_iter().filter(|mode| mode.uses_bitmap())) {
        for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
            for threads in [VcpuThreads::Few(1), VcpuThreads::Few(3), VcpuThreads::OnePerVcpu] {
                let config = DemandPagingConfig { nr_vcpus: 8, sharing, vcpu_threads: Some(threads), ..small(mode) };
                let source = made(SEED, 20_000);
                let report = run::<Npt>(&config, source);
                assert_eq!(report.nr_threads, config.nr_vcpu_threads(true));
            }
        }
    }
}

#[test]
fn the_copier_fetches_the_pages_without_a_request_and_none_twice() {
    let mut nr_copied = 0;
    for mode in supported(MODES.into_iter().filter(|mode| mode.uses_bitmap())) {
        for delay_ns in [0, 30_000] {
            let config = DemandPagingConfig { copier: Some(Copier { window: 16 }), ..small(mode) };
            let source = made(SEED, delay_ns);
            nr_copied += run::<Npt>(&config, source).nr_filled_by_copier;
        }
    }
    println!("{nr_copied} blocks by the copier");
}

#[test]
fn memory_without_a_mapping_arrives() {
    for mode in [PagingMode::None, PagingMode::Userfault] {
        let config = DemandPagingConfig { backing: PagedBacking::GuestMemfd, ..small(mode) };
        let report = run::<Npt>(&config, resolver_of(mode));
        assert!(report.guest_memfd.is_some());
        println!("{:?}", report.guest_memfd);
    }
}

#[test]
fn blocks_of_2m_arrive_whole_and_are_mapped_huge_in_huge_memory() {
    for mode in [PagingMode::Userfault, PagingMode::UserfaultRing] {
        for delay_ns in [0, 20_000] {
            let config = DemandPagingConfig {
                nr_vcpus: 2,
                bytes_per_vcpu: 4 << 20,
                granularity: PageSize::Size2M,
                copier: (delay_ns > 0).then_some(Copier { window: 2 }),
                ..small(mode)
            };
            let source = made(SEED, delay_ns);
            let report = run::<Npt>(&config, source);
            assert!(report.nr_exits() <= 4);
        }
    }
}

#[test]
fn a_file_and_a_peer_are_sources() {
    let config = DemandPagingConfig { vcpu_threads: Some(VcpuThreads::Few(2)), ..small(PagingMode::Userfault) };
    let nr_pages = 4 * 70;
    let directory = std::env::temp_dir().join(format!("slat-demand-paging-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("pages");
    config.contents.write_to(&mut std::fs::File::create(&path).unwrap(), nr_pages).unwrap();
    run::<Npt>(&config, PagesFrom::Source(SourceSpec::File(path.clone()).open().unwrap()));
    let address = LocalAddress::Unix(directory.join("socket"));
    let peer = PagesServer::start(&address, &SourceSpec::File(path.clone())).unwrap();
    run::<Npt>(&config, PagesFrom::Source(SourceSpec::Peer(peer.address().clone()).open().unwrap()));
    drop(peer);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn the_guest_finds_wrong_contents() {
    let mut paging = DemandPaging::<Npt>::new(&small(PagingMode::Userfault)).unwrap();
    match paging.run(made(SEED + 1, 0)) {
        Err(DemandPagingError::Vcpus { errors }) => {
            assert_eq!(errors.len(), 4, "all end");
            assert!(errors.iter().any(|(_, error)| matches!(error, VcpuError::WrongWord { .. })));
        }
        other => panic!("{other:?}"),
    }
    let mut paging = DemandPaging::<Npt>::new(&small(PagingMode::Userfault)).unwrap();
    paging.run(made(SEED, 0)).unwrap();
    paging.memory.store(5 * PAGE_SIZE + 4088, 1).unwrap();
    match paging.verify() {
        Err(DemandPagingError::WrongWord { page: 5, offset_bytes: 4088, found: 1, .. }) => {}
        other => panic!("{other:?}"),
    }
}

/// vCPUs exit, and the process itself waits in the kernel: both get the same page, which is filled
/// once.
#[test]
fn the_process_touches_the_memory_too() {
    for mode in supported([PagingMode::MissingUserfault, PagingMode::MinorUserfault]) {
        for delay_ns in [0, 20_000] {
            let mut paging = DemandPaging::<Npt>::new(&small(mode)).unwrap();
            let (memory, nr_pages) = (paging.memory().clone(), paging.nr_pages());
            thread::scope(|scope| {
                scope.spawn(|| {
                    for page in (0..nr_pages).rev() {
                        let expected = paging_pattern().word(page, 511);
                        assert_eq!(memory.load(page * PAGE_SIZE + 4088), Some(expected), "{mode}, page {page}");
                    }
                });
                let source = made(SEED, delay_ns);
                let report = paging.run(source).unwrap();
                assert_eq!(report.nr_filled_for_faults, nr_pages);
            });
            assert_eq!(paging.verify().unwrap(), nr_pages);
        }
    }
}

fn paging_pattern() -> crate::paging::Pattern {
    crate::paging::Pattern::Mixed { seed: SEED }
}

#[test]
fn a_mode_refuses_other_resolvers() {
    let wrong = |mode, resolver| {
        let mut paging = DemandPaging::<Npt>::new(&small(mode)).unwrap();
        let error = paging.run(resolver).unwrap_err();
        assert!(matches!(error, DemandPagingError::WrongResolver { .. }) && error.is_bad_usage(), "{error}");
    };
    wrong(PagingMode::None, made(SEED, 0));
    wrong(PagingMode::None, PagesFrom::Elsewhere);
    wrong(PagingMode::Userfault, PagesFrom::Elsewhere);
    wrong(PagingMode::Userfault, PagesFrom::None);
}

#[test]
fn the_dirty_log_is_exact_while_pages_arrive() {
    let kinds = [
        PagedBacking::Memory(BackingKind::Anonymous),
        PagedBacking::Memory(BackingKind::Shmem),
        PagedBacking::GuestMemfd,
    ];
    for backing in kinds {
        for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
            let config = DemandPagingConfig {
                backing,
                sharing,
                bytes_per_vcpu: 300 * PAGE_SIZE,
                dirty_logging: DirtyLogging::On,
                copier: Some(Copier { window: 4 }),
                ..small(PagingMode::Userfault)
            };
            let mut paging = DemandPaging::<Npt>::new(&config).unwrap();
            let source = made(SEED, 5_000);
            let rounds = paging.check_dirty_log(source, 4).unwrap();
            assert!(rounds.nr_harvests >= 8 && rounds.nr_reported >= 4 * paging.nr_pages(), "{rounds:?}");
            assert_eq!(paging.verify().unwrap(), paging.nr_pages());
        }
    }
    let config = DemandPagingConfig { dirty_logging: DirtyLogging::On, ..small(PagingMode::Userfault) };
    for dirty_tracking in [DirtyTracking::DirtyBit, DirtyTracking::PageModificationLog] {
        let engine = slat::Config::default().with_dirty_tracking(dirty_tracking);
        let mut paging = DemandPaging::<Ept>::new(&DemandPagingConfig { engine, ..config.clone() }).unwrap();
        paging.check_dirty_log(resolver_of(PagingMode::Userfault), 3).unwrap();
    }
    for mode in supported([PagingMode::MissingUserfault, PagingMode::MinorUserfault, PagingMode::UserfaultRing]) {
        let config = DemandPagingConfig { dirty_logging: DirtyLogging::On, ..small(mode) };
        let mut paging = DemandPaging::<Stage2>::new(&config).unwrap();
        paging.check_dirty_log(resolver_of(mode), 3).unwrap();
    }
}
