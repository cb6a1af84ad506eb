//! Sources and resolvers that fail: every vCPU gets the error, and another source goes on.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::format::Npt;
use slat_pager::source::pattern::Pattern;
use slat_pager::source::{Identity, Source, SourceError};

use super::tests::{made, small, supported};
use super::*;
use crate::paging::DeliveryError;
use crate::paging::{LocalAddress, OpenSource, PagesServer, SourceSpec};

const SEED: u64 = 7;

/// A file that has only the first pages.
fn short_file(nr_pages: u64) -> (std::path::PathBuf, OpenSource) {
    static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("slat-short-{}-{number}", std::process::id()));
    let contents = crate::paging::Pattern::Mixed { seed: SEED };
    contents.write_to(&mut std::fs::File::create(&path).unwrap(), nr_pages).unwrap();
    let source = SourceSpec::File(path.clone()).open().unwrap();
    (path, source)
}

/// Checks that each vCPU that did not finish has an error for which `is_it` holds.
fn all_failed(result: Result<DemandPagingReport, DemandPagingError>, is_it: impl Fn(&VcpuError) -> bool) -> usize {
    match result {
        Err(DemandPagingError::Vcpus { errors }) => {
            for (vcpu, error) in &errors {
                assert!(is_it(error), "vCPU {vcpu}: {error}");
            }
            errors.len()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_vcpus_get_the_error_of_a_source_and_another_source_goes_on() {
    for mode in supported([PagingMode::Userfault, PagingMode::MissingUserfault, PagingMode::MinorUserfault]) {
        for (threads, delay_ns) in
            [(VcpuThreads::Few(2), 0), (VcpuThreads::Few(1), 10_000), (VcpuThreads::OnePerVcpu, 0)]
        {
            let copier = (delay_ns > 0).then_some(Copier { window: 8 });
            let config = DemandPagingConfig { vcpu_threads: Some(threads), copier, ..small(mode) };
            let mut paging = DemandPaging::<Npt>::new(&config).unwrap();
            let (path, short) = short_file(100);
            let result = paging.run(PagesFrom::Source(short.delayed_by(Duration::from_nanos(delay_ns))));
            let nr_failed = all_failed(result, |error| matches!(error, VcpuError::Source(_)));
            assert!(nr_failed >= 2, "of four parts of 70 pages, two and more are not in the file");
            let nr_before = paging.nr_there();
            assert!(nr_before < paging.nr_pages());
            assert_eq!(paging.verify().unwrap(), nr_before);
            let report = paging.run(made(SEED, 0)).unwrap();
            assert_eq!(paging.verify().unwrap(), paging.nr_pages());
            assert_eq!(report.nr_filled_for_faults + report.nr_filled_by_copier, paging.nr_pages());
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn abandoned_memory_behind_a_userfaultfd_can_be_torn_down() {
    for mode in supported([PagingMode::Missing, PagingMode::Minor]) {
        let mut paging = DemandPaging::<Npt>::new(&small(mode)).unwrap();
        let (path, short) = short_file(100);
        all_failed(paging.run(PagesFrom::Source(short)), |error| matches!(error, VcpuError::Source(_)));
        assert!(paging.memory().is_lost());
        let again = paging.run(made(SEED, 0));
        all_failed(again, |error| matches!(error, VcpuError::Cpu(_)));
        std::fs::remove_file(path).unwrap();
    }
}

/// Pages of a peer that ends when it has read some.
#[derive(Debug)]
struct Ending {
    nr_left: AtomicU64,
    over: mpsc::Sender<()>,
}

impl Source for Ending {
    fn size_bytes(&self) -> u64 {
        Pattern::Mixed { seed: SEED }.size_bytes()
    }

    fn identity(&self) -> Identity {
        Pattern::Mixed { seed: SEED }.identity()
    }

    fn granule_bytes(&self) -> u64 {
        PAGE_SIZE
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        let one_less = |left: u64| left.checked_sub(1);
        match self.nr_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
            Ok(left) => {
                if left == 1 {
                    self.over.send(()).unwrap();
                }
                Pattern::Mixed { seed: SEED }.read(offset, into)
            }
            Err(_) => Box::pin(std::future::pending()),
        }
    }
}

#[test]
fn a_peer_that_ends_in_the_middle_fails_the_run() {
    let directory = std::env::temp_dir().join(format!("slat-peer-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let address = LocalAddress::Unix(directory.join("pages"));
    let mut paging = DemandPaging::<Npt>::new(&small(PagingMode::Userfault)).unwrap();
    let (over, is_over) = mpsc::channel();
    let first = PagesServer::start_with(&address, Arc::new(Ending { nr_left: AtomicU64::new(10), over })).unwrap();
    let source = SourceSpec::Peer(address.clone()).open().unwrap();
    let ending = thread::spawn(move || {
        is_over.recv().unwrap();
        drop(first);
    });
    let nr_failed = all_failed(paging.run(PagesFrom::Source(source)), |error| matches!(error, VcpuError::Source(_)));
    assert_eq!(nr_failed, 4);
    assert!(paging.nr_there() <= 10, "{}", paging.nr_there());
    ending.join().unwrap();
    // Its socket's name is free again.
    let second = PagesServer::start(&address, &SourceSpec::pattern(SEED)).unwrap();
    paging.run(PagesFrom::Source(SourceSpec::Peer(address).open().unwrap())).unwrap();
    assert_eq!(paging.verify().unwrap(), paging.nr_pages());
    drop(second);
    std::fs::remove_dir_all(directory).unwrap();
}

/// The resolver ends at a random moment, again and again, and always another one comes. In the end
/// each page is there, was filled once, and is right.
#[test]
fn resolvers_that_die_one_after_the_other_fill_each_page_once() {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut nr_deaths = 0;
    let mut nr_rounds = 0;
    // On a busy machine they may all live until the end for some rounds.
    while nr_rounds < 10 || nr_deaths == 0 {
        nr_rounds += 1;
        let config = DemandPagingConfig { nr_vcpus: 16, ..small(PagingMode::UserfaultRing) };
        let mut paging = DemandPaging::<Npt>::new(&config).unwrap();
        loop {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let serve = ServeConfig {
                source: SourceSpec::pattern(SEED).open().unwrap().delayed_by(Duration::from_micros(50)),
                nr_threads: 2,
                copier: None,
                timeout: RING_TIMEOUT,
            };
            let resolver = thread::spawn(move || serve_rings(theirs, &serve));
            paging.delivery().unwrap().attach(ours.try_clone().unwrap()).unwrap();
            // A killed process leaves the end of the socket.
            let lifetime = Duration::from_micros(rng.random_range(0..3000));
            let killer = thread::spawn(move || {
                thread::sleep(lifetime);
                ours.shutdown(std::net::Shutdown::Both).unwrap();
            });
            let result = paging.run(PagesFrom::Elsewhere);
            killer.join().unwrap();
            let _ = resolver.join().unwrap();
            if result.is_ok() {
                break;
            }
            nr_deaths += 1;
            let is_it = |error: &VcpuError| matches!(error, VcpuError::Delivery(error) if matches!(**error, DeliveryError::ResolverGone { .. } | DeliveryError::NoResolver { .. }));
            all_failed(result, is_it);
            assert_eq!(paging.verify().unwrap(), paging.nr_there());
            while paging.delivery().unwrap().is_attached() {
                thread::yield_now();
            }
        }
        assert_eq!(paging.nr_there(), paging.nr_pages());
        assert_eq!(paging.verify().unwrap(), paging.nr_pages());
    }
    println!("{nr_deaths} resolvers died");
}

#[test]
fn a_resolver_reports_that_its_source_fails() {
    let mut paging = DemandPaging::<Npt>::new(&small(PagingMode::UserfaultRing)).unwrap();
    let (path, short) = short_file(100);
    let result = paging.run(PagesFrom::Source(short));
    all_failed(
        result,
        |error| matches!(error, VcpuError::Delivery(error) if matches!(**error, DeliveryError::PageFailed { .. })),
    );
    paging.run(made(SEED, 0)).unwrap();
    assert_eq!(paging.verify().unwrap(), paging.nr_pages());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_run_without_a_resolver_fails() {
    let mut paging = DemandPaging::<Npt>::new(&small(PagingMode::UserfaultRing)).unwrap();
    all_failed(
        paging.run(PagesFrom::Elsewhere),
        |error| matches!(error, VcpuError::Delivery(error) if matches!(**error, DeliveryError::NoResolver { .. })),
    );
}
