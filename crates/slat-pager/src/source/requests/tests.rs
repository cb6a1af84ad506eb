//! Pages in flight, delays, and errors, of sources that have pages at once and of others.

use std::fs;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime::Runtime;

use super::*;
use crate::source::Identity;
use crate::source::memory_file::MemoryFile;
use crate::source::pattern::Pattern;

const PATTERN: Pattern = Pattern::Mixed { seed: 7 };
const PAGE: usize = PAGE_BYTES as usize;

/// As a server: a read takes time, and later ones may be answered first. Page 13 is refused.
#[derive(Debug, Default)]
struct Slow {
    nr_reads: AtomicU64,
}

const REFUSED: u64 = 13;

impl Source for Slow {
    fn size_bytes(&self) -> u64 {
        PATTERN.size_bytes()
    }

    fn identity(&self) -> Identity {
        PATTERN.identity()
    }

    fn granule_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            let number = self.nr_reads.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(5 - number % 5)).await;
            if offset == REFUSED * PAGE_BYTES {
                return Err(SourceError::Refused { server: "a test".to_string(), why: "it says so".to_string() });
            }
            PATTERN.read(offset, into).await
        }
        .boxed()
    }
}

struct World {
    runtime: Runtime,
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        World { runtime: runtime.expect("threads"), folder: tempfile::tempdir().expect("a folder") }
    }

    /// A file of pages.
    fn file(&self, nr_pages: u64) -> Arc<dyn Source> {
        let path = self.folder.path().join("pages");
        PATTERN.write_to(&mut fs::File::create(&path).expect("a new file"), nr_pages).expect("room for it");
        Arc::new(MemoryFile::open(&path).expect("a file of pages"))
    }

    fn requests(&self, source: Arc<dyn Source>, delay: Duration) -> PageRequests {
        PageRequests::new(source, self.runtime.handle().clone(), delay).expect("a descriptor")
    }
}

fn page_of(page: u64) -> PageBytes {
    let mut bytes = [0; PAGE];
    PATTERN.fill(page, &mut bytes);
    bytes
}

/// Takes the page that is here, in one of both ways, and compares it.
fn take_and_verify(requests: &mut PageRequests, page: u64) {
    if page.is_multiple_of(2) {
        assert!(*requests.take().expect("it is here") == page_of(page), "page {page}");
    } else {
        let mut bytes = [0; PAGE];
        requests.take_into(&mut bytes).expect("it is here");
        assert!(bytes == page_of(page), "page {page}");
    }
}

/// Requests pages of `range`, and expects each once.
fn all_come_once(requests: &mut PageRequests, range: Range<u64>) {
    assert!(matches!(requests.next_arrival(), NextArrival::Nothing));
    assert_eq!(requests.arrived(Wait::ForEver).expect("no wait without a request"), None);
    assert!(matches!(requests.take(), Err(RequestError::NothingArrived)));
    let nr_pages = range.end - range.start;
    for number in 0..nr_pages {
        // Three times in another order than they are stored.
        requests.request(range.start + number * 3 % nr_pages).expect("room for it");
    }
    assert_eq!(requests.nr_in_flight() as u64, nr_pages);
    let again = requests.request(range.start + 1);
    assert!(matches!(again, Err(RequestError::AlreadyRequested { page }) if page == range.start + 1));
    let mut seen = 0_u64;
    while let Some(page) = requests.arrived(Wait::ForEver).expect("a page") {
        assert_eq!(requests.arrived(Wait::No).expect("the same"), Some(page));
        assert!(matches!(requests.next_arrival(), NextArrival::Now));
        take_and_verify(requests, page);
        let bit = 1 << (page - range.start);
        assert_eq!(seen & bit, 0, "page {page} came twice");
        seen |= bit;
    }
    assert_eq!((seen.count_ones() as u64, requests.nr_in_flight()), (nr_pages, 0));
    // And again, one alone.
    let mut bytes = [0; PAGE];
    requests.fetch_into(range.start, &mut bytes).expect("a page");
    assert!(bytes == page_of(range.start));
    requests.request(range.start + 1).expect("room for it");
    let error = requests.fetch_into(range.start + 2, &mut bytes).expect_err("not alone");
    assert!(matches!(error, RequestError::OthersInFlight { nr_pages: 1, .. }));
    assert_eq!(requests.arrived(Wait::ForEver).expect("a page"), Some(range.start + 1));
    take_and_verify(requests, range.start + 1);
}

#[test]
fn all_that_is_requested_comes_once() {
    let world = World::new();
    for source in [Arc::new(PATTERN), world.file(128), Arc::new(Slow::default()) as Arc<dyn Source>] {
        for delay in [Duration::ZERO, Duration::from_micros(50), Duration::from_millis(8)] {
            // 64 is not a multiple of 3.
            all_come_once(&mut world.requests(Arc::clone(&source), delay), 64..128);
        }
    }
}

#[test]
fn no_more_than_the_limit_is_in_flight() {
    let world = World::new();
    for source in [Arc::new(PATTERN), world.file(1)] {
        let mut requests = world.requests(source, Duration::ZERO);
        for page in 0..MAX_IN_FLIGHT as u64 {
            requests.request(page).expect("room for it");
        }
        assert!(matches!(requests.request(5000), Err(RequestError::TooManyInFlight { page: 5000 })));
        assert_eq!(requests.arrived(Wait::ForEver).expect("a page"), Some(0));
        take_and_verify(&mut requests, 0);
        requests.request(5000).expect("room again");
    }
}

#[test]
fn an_error_is_that_of_one_page() {
    let world = World::new();
    let nr_pages = 16;
    for source in [world.file(nr_pages), Arc::new(Slow::default())] {
        let is_file = source.is_mapped();
        let mut requests = world.requests(source, Duration::ZERO);
        let pages = [3, REFUSED, 20, u64::MAX / PAGE_BYTES, u64::MAX, 5];
        for page in pages {
            requests.request(page).expect("room for it");
        }
        let mut nr_failed = 0;
        for _ in pages {
            let page = requests.arrived(Wait::ForEver).expect("no error").expect("all come");
            let fails = page > 1 << 50 || if is_file { page >= nr_pages } else { page == REFUSED };
            if !fails {
                take_and_verify(&mut requests, page);
                continue;
            }
            nr_failed += 1;
            let RequestError::Source { page: failed, error } = requests.take().expect_err("there is none") else {
                panic!("another error");
            };
            assert_eq!(failed, page);
            let expected = page == REFUSED;
            assert!(matches!(error, SourceError::Refused { .. }) == expected, "{error}");
            assert!(matches!(error, SourceError::OutOfRange { .. }) != expected, "{error}");
        }
        assert_eq!((nr_failed, requests.nr_in_flight()), (3, 0));
    }
}

#[test]
fn a_file_that_changes_gives_no_page() {
    let world = World::new();
    let changes: [fn(&fs::File); 2] = [
        |file| file.set_len(0).expect("shorter"),
        |file| std::os::unix::fs::FileExt::write_all_at(file, b"another", 4096).expect("room for it"),
    ];
    for change in changes {
        let mut requests = world.requests(world.file(4), Duration::ZERO);
        for page in [0, 1] {
            requests.request(page).expect("room for it");
        }
        assert_eq!(requests.arrived(Wait::No).expect("a page"), Some(0));
        take_and_verify(&mut requests, 0);
        change(&fs::OpenOptions::new().write(true).open(world.folder.path().join("pages")).expect("the file"));
        assert_eq!(requests.arrived(Wait::ForEver).expect("a page"), Some(1));
        let error = requests.take().expect_err("it is another file");
        assert!(matches!(error, RequestError::Source { page: 1, error: SourceError::Changed { .. } }), "{error}");
    }
}

#[test]
fn no_page_is_early_and_latencies_overlap() {
    const DELAY: Duration = Duration::from_millis(20);
    /// Returns how long 64 pages took.
    fn take_all(mut requests: PageRequests) -> Duration {
        let start = Instant::now();
        for page in 100..164 {
            requests.request(page).expect("room for it");
        }
        // It does not wait in `request`, and no page is early, however often this thread was stopped.
        let early = requests.arrived(Wait::No).expect("no error");
        assert!(early.is_none() || start.elapsed() >= DELAY);
        if let NextArrival::At(at) = requests.next_arrival() {
            assert!(at >= start + DELAY && at <= Instant::now() + DELAY);
        }
        // A wait that ends earlier.
        let until = Instant::now() + DELAY / 10;
        if requests.arrived(Wait::Until(until)).expect("no error").is_none() {
            assert!(Instant::now() >= until);
        }
        for _ in 0..64 {
            let page = requests.arrived(Wait::ForEver).expect("no error").expect("a page");
            assert!(start.elapsed() >= DELAY, "page {page} is early");
            take_and_verify(&mut requests, page);
        }
        start.elapsed()
    }
    let world = World::new();
    for source in [Arc::new(PATTERN), Arc::new(Slow::default()) as Arc<dyn Source>] {
        // One after the other would take 64 times as long, also on an idle machine. A busy one may
        // stop this thread for that long, but not each time.
        let began = Instant::now();
        while take_all(world.requests(Arc::clone(&source), DELAY)) >= 32 * DELAY {
            assert!(began.elapsed() < Duration::from_secs(600), "latencies do not overlap");
        }
    }
}

#[test]
fn a_loop_can_wait_for_the_descriptor_of_next_arrival() {
    let world = World::new();
    let mut requests = world.requests(Arc::new(Slow::default()), Duration::from_millis(1));
    let mut nr_taken = 0;
    for page in 100..300 {
        requests.request(page).expect("room for it");
    }
    while nr_taken < 200 {
        while let Some(page) = requests.arrived(Wait::No).expect("no error") {
            take_and_verify(&mut requests, page);
            nr_taken += 1;
        }
        match requests.next_arrival() {
            NextArrival::Nothing => assert_eq!(nr_taken, 200),
            NextArrival::Now => {}
            NextArrival::At(at) => assert!(!wait_until(&[], Some(at)).expect("a wait")),
            NextArrival::Readable { descriptor, until } => {
                wait_until(&[descriptor], until).expect("a wait");
            }
        }
    }
}
