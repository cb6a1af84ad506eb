//! Sources and resolvers that fail: every vCPU gets the error, and another source goes on.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::format::Npt;

use super::tests::{can, small};
use super::*;
use crate::paging::DeliveryError;
use crate::paging::{PeerAddress, PeerServer, SourceSpec};

const SEED: u64 = 7;

/// A file that has only the first pages.
fn short_file(nr_pages: u64) -> (std::path::PathBuf, SourceSpec) {
    static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("slat-short-{}-{number}", std::process::id()));
    let contents = crate::paging::Pattern::Mixed { seed: SEED };
    contents.write_to(&mut std::fs::File::create(&path).unwrap(), nr_pages).unwrap();
    let spec = SourceSpec::file(&path);
    (path, spec)
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
    for mode in [PagingMode::Userfault, PagingMode::MissingUserfault, PagingMode::MinorUserfault] {
        for (threads, delay_ns) in
            [(VcpuThreads::Few(2), 0), (VcpuThreads::Few(1), 10_000), (VcpuThreads::OnePerVcpu, 0)]
        {
            if !can(mode) {
                continue;
            }
            let copier = (delay_ns > 0).then_some(Copier { window: 8 });
            let config = DemandPagingConfig { vcpu_threads: Some(threads), copier, ..small(mode) };
            let mut paging = DemandPaging::<Npt>::new(&config).unwrap();
            let (path, short) = short_file(100);
            let result = paging.run(PagesFrom::Source(short.delayed_by(delay_ns)));
            let nr_failed = all_failed(result, |error| matches!(error, VcpuError::Source(_)));
            assert!(nr_failed >= 2, "of four parts of 70 pages, two and more are not in the file");
            let nr_before = paging.nr_there();
            assert!(nr_before < paging.nr_pages());
            assert_eq!(paging.verify().unwrap(), nr_before);
            let report = paging.run(PagesFrom::Source(SourceSpec::pattern(SEED))).unwrap();
            assert_eq!(paging.verify().unwrap(), paging.nr_pages());
            assert_eq!(report.nr_filled_for_faults + report.nr_filled_by_copier, paging.nr_pages());
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn abandoned_memory_behind_a_userfaultfd_can_be_torn_down() {
    for mode in [PagingMode::Missing, PagingMode::Minor] {
        if !can(mode) {
            continue;
        }
        let mut paging = DemandPaging::<Npt>::new(&small(mode)).unwrap();
        let (path, short) = short_file(100);
        all_failed(paging.run(PagesFrom::Source(short)), |error| matches!(error, VcpuError::Source(_)));
        assert!(paging.memory().is_lost());
        let again = paging.run(PagesFrom::Source(SourceSpec::pattern(SEED)));
        all_failed(again, |error| matches!(error, VcpuError::Cpu(_)));
        std::fs::remove_file(path).unwrap();
    }
}

fn path_of(address: &PeerAddress) -> &Path {
    let PeerAddress::Unix(path) = address else { panic!("{address} is no path") };
    path
}

#[test]
fn a_peer_that_closes_in_the_middle_fails_the_run() {
    let directory = std::env::temp_dir().join(format!("slat-peer-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let start = |name: &str| {
        let address = PeerAddress::Unix(directory.join(name));
        PeerServer::start(address, SourceSpec::pattern(SEED).delayed_by(1_000_000)).unwrap()
    };
    let mut paging = DemandPaging::<Npt>::new(&small(PagingMode::Userfault)).unwrap();
    let first = start("first");
    // The process between the two passes ten pages on, and then closes: in the middle, whatever the
    // machine does.
    let between = directory.join("between");
    let listener = UnixListener::bind(&between).unwrap();
    let relay = thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = UnixStream::connect(path_of(first.address())).unwrap();
        let (mut requests, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let asking = thread::spawn(move || std::io::copy(&mut requests, &mut to_server));
        // It does not matter whether the last byte of it arrives.
        let _ = std::io::copy(&mut Read::take(&mut server, 10 * (PAGE_SIZE + 64)), &mut client);
        for stream in [&client, &server] {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let _ = asking.join().unwrap();
        drop(first);
    });
    let source = SourceSpec::peer(PeerAddress::Unix(between));
    let nr_failed = all_failed(paging.run(PagesFrom::Source(source)), |error| matches!(error, VcpuError::Source(_)));
    assert_eq!(nr_failed, 4);
    relay.join().unwrap();
    let second = start("second");
    paging.run(PagesFrom::Source(SourceSpec::peer(second.address().clone()))).unwrap();
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
                source: SourceSpec::pattern(SEED).delayed_by(50_000),
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
    paging.run(PagesFrom::Source(SourceSpec::pattern(SEED))).unwrap();
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
