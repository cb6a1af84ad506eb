//! Sources of this process: the contents of pages, pages in flight, latencies, and errors.

use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::delayed::DelayedSource;
use super::*;
use crate::linux::clock::timestamp_ns;

/// A path for one test, which removes the file at the end.
pub(super) struct TempPath(pub(super) PathBuf);

impl TempPath {
    pub(super) fn new() -> TempPath {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        TempPath(std::env::temp_dir().join(format!("slat-source-{}-{number}", std::process::id())))
    }

    /// A file of pages.
    fn with_pages(pattern: Pattern, nr_pages: u64) -> TempPath {
        let path = TempPath::new();
        pattern.write_to(&mut fs::File::create(&path.0).expect("a new file"), nr_pages).expect("room for it");
        path
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

pub(super) const PATTERN: Pattern = Pattern::Mixed { seed: 7 };

fn page_of(pattern: Pattern, page: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    pattern.fill(page, &mut bytes);
    bytes
}

/// Takes the page that is here, in one of both ways, and compares it.
pub(super) fn take_and_verify(source: &mut dyn PageSource, page: u64) {
    if page.is_multiple_of(2) {
        assert!(*source.take().expect("it is here") == page_of(PATTERN, page), "page {page}");
    } else {
        let mut bytes = [0; PAGE_SIZE];
        source.take_into(&mut bytes).expect("it is here");
        assert!(bytes == page_of(PATTERN, page), "page {page}");
    }
}

#[test]
fn words_are_those_of_their_page_and_pages_differ() {
    for pattern in [PATTERN, Pattern::Constant(0xab)] {
        for page in [0, 1, 511, 1 << 40] {
            let bytes = page_of(pattern, page);
            for (index, word) in bytes.as_chunks().0.iter().enumerate() {
                assert_eq!(pattern.word(page, index).to_le_bytes(), *word);
            }
        }
    }
    let mut bytes = page_of(PATTERN, 5);
    assert!(bytes != page_of(PATTERN, 6) && bytes != page_of(Pattern::Mixed { seed: 8 }, 5));
    // Bytes that are shifted by a word are another page too.
    bytes.rotate_left(8);
    assert!(bytes != page_of(PATTERN, 5));
    assert!(page_of(Pattern::Constant(0xab), 3).iter().all(|&byte| byte == 0xab));
}

/// Checks a source without a latency, which has pages of the pattern.
fn all_in_flight_come_once(source: &mut dyn PageSource) {
    assert!(matches!(source.next_arrival(), NextArrival::Nothing));
    assert_eq!(source.arrived(Wait::ForEver).expect("no wait without a request"), None);
    assert!(matches!(source.take(), Err(SourceError::NothingArrived)));
    for page in 0..64 {
        source.request(page * 3 % 64).expect("room for it");
    }
    assert_eq!(source.nr_in_flight(), 64);
    assert!(matches!(source.request(9), Err(SourceError::AlreadyRequested { page: 9 })));
    let mut seen = 0_u64;
    while let Some(page) = source.arrived(Wait::ForEver).expect("a page") {
        assert_eq!(source.arrived(Wait::No).expect("the same"), Some(page));
        assert!(matches!(source.next_arrival(), NextArrival::At(_)));
        take_and_verify(source, page);
        assert_eq!(seen & 1 << page, 0, "page {page} came twice");
        seen |= 1 << page;
    }
    assert_eq!((seen, source.nr_in_flight()), (u64::MAX, 0));
    // And again, one alone.
    let mut bytes = [0; PAGE_SIZE];
    source.fetch_into(9, &mut bytes).expect("a page");
    assert!(bytes == page_of(PATTERN, 9));
    source.request(1).expect("room for it");
    let error = source.fetch_into(2, &mut bytes).expect_err("not alone");
    assert!(matches!(error, SourceError::OthersInFlight { page: 2, nr_pages: 1 }));
    assert_eq!(source.arrived(Wait::ForEver).expect("a page"), Some(1));
    take_and_verify(source, 1);
}

#[test]
fn patterns_and_files_have_their_pages() {
    let file = TempPath::with_pages(PATTERN, 64);
    for spec in [SourceSpec::pattern(7), SourceSpec::file(&file.0)] {
        for delay_ns in [0, 50_000] {
            let mut source = spec.clone().delayed_by(delay_ns).open().expect("a source");
            all_in_flight_come_once(&mut *source);
        }
    }
}

#[test]
fn no_more_than_the_limit_is_in_flight() {
    let file = TempPath::with_pages(PATTERN, 2);
    for spec in [SourceSpec::pattern(7), SourceSpec::file(&file.0), SourceSpec::pattern(7).delayed_by(1)] {
        let mut source = spec.open().expect("a source");
        let end = u64::MAX / PAGE_SIZE as u64;
        assert!(matches!(source.request(end), Err(SourceError::PageOutOfRange { page }) if page == end));
        for page in 0..MAX_IN_FLIGHT as u64 {
            source.request(page).expect("room for it");
        }
        let error = source.request(5000).expect_err("one too many");
        assert!(matches!(error, SourceError::TooManyInFlight { page: 5000 }));
        assert_eq!(source.nr_in_flight(), MAX_IN_FLIGHT);
        assert_eq!(source.arrived(Wait::ForEver).expect("a page"), Some(0));
        take_and_verify(&mut *source, 0);
        source.request(5000).expect("room again");
    }
}

#[test]
fn a_file_that_is_short_or_becomes_short_is_an_error_of_that_page() {
    let file = TempPath::with_pages(PATTERN, 4);
    let handle = fs::OpenOptions::new().write(true).open(&file.0).expect("the file");
    handle.set_len(3 * 4096 + 100).expect("shorter");
    let mut source = SourceSpec::file(&file.0).open().expect("a source");
    for page in [3, 2, 7] {
        source.request(page).expect("room for it");
    }
    let mut taken = Vec::new();
    while let Some(page) = source.arrived(Wait::ForEver).expect("a page") {
        let mut bytes = [0; PAGE_SIZE];
        match source.take_into(&mut bytes) {
            Ok(()) => assert!(bytes == page_of(PATTERN, page)),
            Err(error) => {
                let SourceError::FileTooShort { offset_bytes, size_bytes, ref path, .. } = error else {
                    panic!("{error}");
                };
                assert_eq!((offset_bytes, size_bytes, path), (page * 4096, 3 * 4096 + 100, &file.0));
            }
        }
        taken.push(page);
    }
    assert_eq!((taken, source.nr_in_flight()), (vec![3, 2, 7], 0));
    // A page that was in the file when the source was opened.
    source.request(0).expect("room for it");
    handle.set_len(0).expect("shorter");
    assert_eq!(source.arrived(Wait::No).expect("a page"), Some(0));
    assert!(matches!(source.take(), Err(SourceError::FileTooShort { page: 0, size_bytes: 0, .. })));
}

#[test]
fn a_file_that_is_gone_or_no_file_is_refused_and_nothing_waits() {
    let nowhere = TempPath::new();
    let error = SourceSpec::file(&nowhere.0).open().expect_err("no file");
    let SourceError::OpenFile { path, cause } = &error else { panic!("{error}") };
    assert_eq!((path, cause.kind()), (&nowhere.0, std::io::ErrorKind::NotFound));
    assert!(error.to_string().contains(&nowhere.0.display().to_string()));
    // A directory; and a file without an end.
    for path in [std::env::temp_dir(), PathBuf::from("/dev/zero")] {
        assert!(matches!(SourceSpec::file(path).open(), Err(SourceError::OpenFile { .. })));
    }
}

#[test]
fn no_page_is_early_and_latencies_overlap() {
    const DELAY_NS: u64 = 20_000_000;
    let mut source = SourceSpec::pattern(7).delayed_by(DELAY_NS).open().expect("a source");
    let start_ns = timestamp_ns();
    for page in 0..64 {
        source.request(page).expect("room for it");
    }
    let asked_ns = timestamp_ns();
    assert!(matches!(source.next_arrival(), NextArrival::At(0)), "they may not be sent yet");
    // It does not wait in `request`, and no page is early, however often this thread was stopped.
    let early = source.arrived(Wait::No).expect("no error");
    assert!(early.is_none() || timestamp_ns() >= start_ns + DELAY_NS);
    if let NextArrival::At(at_ns @ 1..) = source.next_arrival() {
        assert!(at_ns >= start_ns + DELAY_NS && at_ns <= asked_ns + DELAY_NS);
    }
    // A wait that ends earlier.
    let until_ns = timestamp_ns() + DELAY_NS / 10;
    if source.arrived(Wait::UntilNs(until_ns)).expect("no error").is_none() {
        assert!(timestamp_ns() >= until_ns);
    }
    for page in 0..64 {
        assert_eq!(source.arrived(Wait::ForEver).expect("a page"), Some(page));
        assert!(timestamp_ns() >= start_ns + DELAY_NS, "page {page} is early");
        take_and_verify(&mut *source, page);
    }
    // One after the other would take 64 times as long. The test needs no more of the clock.
    assert!(timestamp_ns() - start_ns < 32 * DELAY_NS);
}

/// A source whose pages are here at once, the last one first.
#[derive(Debug, Default)]
struct Scripted {
    here: Vec<u64>,
    page: PageBoxed,
    /// The page that was returned last, and not taken.
    named: Option<u64>,
    /// Requests that are not sent. As allowed, they stay until no page is here, or a page is
    /// returned again.
    nr_unsent: Arc<AtomicU32>,
}

#[derive(Debug)]
struct PageBoxed(Box<PageBytes>);

impl Default for PageBoxed {
    fn default() -> PageBoxed {
        PageBoxed(Box::new([0; PAGE_SIZE]))
    }
}

impl PageSource for Scripted {
    fn request(&mut self, page: u64) -> Result<(), SourceError> {
        self.here.push(page);
        self.nr_unsent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn arrived(&mut self, _wait: Wait) -> Result<Option<u64>, SourceError> {
        let last = self.named.or(self.here.last().copied());
        if last == self.named {
            self.nr_unsent.store(0, Ordering::Relaxed);
        }
        self.named = last;
        Ok(last)
    }

    fn take(&mut self) -> Result<&PageBytes, SourceError> {
        let page = self.named.take().ok_or(SourceError::NothingArrived)?;
        self.here.retain(|&other| other != page);
        PATTERN.fill(page, &mut self.page.0);
        Ok(&self.page.0)
    }

    fn take_into(&mut self, into: &mut PageBytes) -> Result<(), SourceError> {
        into.copy_from_slice(self.take()?);
        Ok(())
    }

    fn nr_in_flight(&self) -> usize {
        self.here.len()
    }

    fn next_arrival(&self) -> NextArrival<'_> {
        NextArrival::At(0)
    }
}

#[test]
fn a_latency_before_a_source_that_changes_the_order() {
    const DELAY_NS: u64 = 1_000_000;
    let mut source = DelayedSource::new(Box::new(Scripted::default()), DELAY_NS);
    let mut asked_ns = Vec::new();
    for page in 0..8 {
        asked_ns.push(timestamp_ns());
        source.request(page).expect("room for it");
    }
    assert!(matches!(source.take(), Err(SourceError::NothingArrived)), "nothing was named");
    for page in (0..8).rev() {
        assert_eq!(source.arrived(Wait::ForEver).expect("a page"), Some(page));
        assert!(timestamp_ns() >= asked_ns[page as usize] + DELAY_NS, "page {page} is early");
        take_and_verify(&mut source, page);
    }
    assert_eq!(source.nr_in_flight(), 0);
    assert_eq!(source.arrived(Wait::ForEver).expect("no wait"), None);
}

#[test]
fn a_page_that_is_held_back_is_not_asked_for_before_it_is_due() {
    const DELAY_NS: u64 = 20_000_000;
    let mut source = DelayedSource::new(Box::new(Scripted::default()), DELAY_NS);
    source.request(0).expect("room for it");
    assert!(!wait_until(&[], timestamp_ns() + DELAY_NS).expect("a wait"));
    let asked_ns = timestamp_ns();
    source.request(1).expect("room for it");
    // Page 0 is due, and does not come before page 1.
    while source.arrived(Wait::No).expect("no error").is_none() {
        let NextArrival::At(at_ns) = source.next_arrival() else { panic!("two are in flight") };
        assert!(at_ns >= asked_ns + DELAY_NS, "the same moment as before");
        assert!(!wait_until(&[], at_ns).expect("a wait"));
    }
    take_and_verify(&mut source, 1);
}

#[test]
fn requests_are_sent_while_a_page_is_held_back() {
    let scripted = Scripted::default();
    let nr_unsent = Arc::clone(&scripted.nr_unsent);
    let mut source = DelayedSource::new(Box::new(scripted), 1 << 60);
    for page in 0..3 {
        source.request(page).expect("room for it");
        assert_eq!(source.arrived(Wait::No).expect("no error"), None);
        assert_eq!(nr_unsent.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn waiting_ends_at_the_moment_or_with_a_descriptor() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let until_ns = timestamp_ns() + 300_000;
    assert!(!wait_until(&[reader.as_fd()], until_ns).expect("a wait"));
    assert!(timestamp_ns() >= until_ns);
    assert!(!wait_until(&[], 0).expect("a look"));
    assert!(!wait_until(&[], timestamp_ns() + 100_000).expect("a wait"));
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        drop(writer);
    });
    assert!(wait_until(&[reader.as_fd()], u64::MAX).expect("the other end is closed"));
    thread.join().expect("no panic");
}

#[test]
fn source_specs_are_parsed_and_printed() {
    for text in ["pattern:7", "constant:0xab", "file:/some/where:else", "unix:/some/where", "tcp:127.0.0.1:80"] {
        assert_eq!(text.parse::<SourceSpec>().expect("a source").to_string(), text);
    }
    assert_eq!("pattern".parse(), Ok(SourceSpec::pattern(0)));
    assert_eq!("pattern:0x10".parse(), Ok(SourceSpec::pattern(16)));
    assert_eq!("constant:171".parse(), Ok(SourceSpec::constant(0xab)));
    assert_eq!(SourceSpec::pattern(7).contents(), Some(PATTERN));
    assert_eq!(SourceSpec::file("x").contents(), None);
    let wrong = ["", "patterns", "pattern:", "pattern:-1", "pattern:+1", "constant", "constant:256", "constant:0x"];
    let more = ["file", "file:", "unix:", "tcp:", "tcp:localhost", "tcp:1.2.3.4", "constant:0x+1", "pattern:0x"];
    for text in wrong.into_iter().chain(more) {
        let error = text.parse::<SourceSpec>().expect_err("no source");
        assert!(error.to_string().contains(&format!("'{text}'")), "{error}");
    }
}
