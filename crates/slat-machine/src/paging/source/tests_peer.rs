//! Sources in another process, here at the other end of a socket: pages come, and misbehaving peers
//! are found out.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, thread};

use super::delayed::DelayedSource;
use super::peer::PeerSource;
use super::protocol::{GREETING, HEADER_BYTES, Header, PageRequest, REQUEST_BYTES};
use super::tests::{PATTERN, TempPath, take_and_verify};
use super::*;
use crate::linux::clock::timestamp_ns;

const LOOPBACK: PeerAddress = PeerAddress::Tcp(SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0));

/// Much longer than anything here takes, and short enough to show that a wait has ended by itself.
const PATIENCE: Duration = Duration::from_secs(60);

fn unix(path: &TempPath) -> PeerAddress {
    PeerAddress::Unix(path.0.clone())
}

fn open(server: &PeerServer) -> Box<dyn PageSource> {
    SourceSpec::peer(server.address().clone()).time_out(PATIENCE).open().expect("a server")
}

/// Keeps `window` pages in flight until all have come, each once.
fn fetch_all(source: &mut dyn PageSource, nr_pages: u64, window: usize) {
    let mut seen = vec![false; nr_pages as usize];
    let (mut next, mut nr_arrived) = (0, 0);
    while nr_arrived < nr_pages {
        while next < nr_pages && source.nr_in_flight() < window {
            source.request(next).expect("room for it");
            next += 1;
        }
        let page = source.arrived(Wait::ForEver).expect("no error").expect("a page");
        take_and_verify(source, page);
        assert!(!seen[page as usize], "page {page} came twice");
        seen[page as usize] = true;
        nr_arrived += 1;
    }
    assert_eq!(source.nr_in_flight(), 0);
    assert_eq!(source.arrived(Wait::ForEver).expect("no wait"), None);
}

#[test]
fn pages_come_over_both_kinds_of_sockets() {
    let path = TempPath::new();
    for address in [unix(&path), LOOPBACK] {
        let server = PeerServer::start(address, SourceSpec::pattern(7)).expect("a server");
        for window in [1, 3, 64, MAX_IN_FLIGHT] {
            fetch_all(&mut *open(&server), 3000, window);
        }
        // Several users, each on its own connection.
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| fetch_all(&mut *open(&server), 1000, 16));
            }
        });
    }
    assert!(!fs::exists(&path.0).expect("a directory"), "the socket's name is gone with the server");
}

#[test]
fn latencies_on_both_sides_overlap() {
    const DELAY_NS: u64 = 10_000_000;
    let path = TempPath::new();
    for (here_ns, there_ns) in [(DELAY_NS, 0), (0, DELAY_NS), (DELAY_NS / 2, DELAY_NS)] {
        let there = SourceSpec::pattern(7).delayed_by(there_ns);
        let server = PeerServer::start(unix(&path), there).expect("a server");
        let spec = SourceSpec::peer(server.address().clone()).delayed_by(here_ns);
        let mut source = spec.open().expect("a server");
        let start_ns = timestamp_ns();
        fetch_all(&mut *source, 64, 64);
        let took_ns = timestamp_ns() - start_ns;
        assert!(took_ns >= here_ns.max(there_ns), "{took_ns} ns");
        assert!(took_ns < 32 * DELAY_NS, "{took_ns} ns: one after the other");
    }
}

#[test]
fn a_loop_can_wait_for_the_descriptor_of_next_arrival() {
    let path = TempPath::new();
    let server = PeerServer::start(unix(&path), SourceSpec::pattern(7).delayed_by(2_000_000)).expect("a server");
    let mut source = open(&server);
    source.request(4).expect("room for it");
    assert!(matches!(source.next_arrival(), NextArrival::At(0)), "it is not sent yet");
    loop {
        if let Some(page) = source.arrived(Wait::No).expect("no error") {
            assert_eq!(page, 4);
            break;
        }
        match source.next_arrival() {
            NextArrival::Readable { descriptor, until_ns } => {
                assert!(wait_until(&[descriptor], until_ns).expect("a wait"), "silence");
            }
            NextArrival::At(_) => {}
            NextArrival::Nothing => panic!("page 4 is in flight"),
        }
    }
    take_and_verify(&mut *source, 4);
    assert!(matches!(source.next_arrival(), NextArrival::Nothing));
}

#[test]
fn a_page_that_the_server_has_not_got_is_refused_alone() {
    let (file, path) = (TempPath::new(), TempPath::new());
    PATTERN.write_to(&mut fs::File::create(&file.0).expect("a file"), 2).expect("room for it");
    let server = PeerServer::start(unix(&path), SourceSpec::file(&file.0)).expect("a server");
    let mut source = open(&server);
    for page in [0, 2, 1] {
        source.request(page).expect("room for it");
    }
    for _ in 0..3 {
        let page = source.arrived(Wait::ForEver).expect("no error").expect("an answer");
        match page {
            2 => assert!(matches!(source.take(), Err(SourceError::Refused { page: 2, .. }))),
            _ => take_and_verify(&mut *source, page),
        }
    }
    assert_eq!(source.nr_in_flight(), 0);
}

#[test]
fn a_server_that_ends_closes_its_connections() {
    let path = TempPath::new();
    let never_ns = 1 << 60;
    let server = PeerServer::start(unix(&path), SourceSpec::pattern(7).delayed_by(never_ns)).expect("a server");
    let mut source = open(&server);
    for page in [3, 4] {
        source.request(page).expect("room for it");
    }
    let until_ns = timestamp_ns() + 5_000_000;
    assert_eq!(source.arrived(Wait::UntilNs(until_ns)).expect("no error"), None);
    drop(server);
    let error = source.arrived(Wait::ForEver).expect_err("a closed connection");
    assert!(matches!(error, SourceError::Closed { page: 3, nr_pages: 2, .. }), "{error}");
    assert!(matches!(source.arrived(Wait::ForEver), Err(SourceError::Ended { .. })));
    assert!(matches!(source.request(5), Err(SourceError::Ended { .. })));
    assert!(matches!(source.take(), Err(SourceError::NothingArrived)));
    assert_eq!(source.nr_in_flight(), 0);
    let error = SourceSpec::peer(unix(&path)).open().expect_err("no listener");
    assert!(matches!(error, SourceError::Connect { .. }), "{error}");
}

#[test]
fn a_user_that_does_not_read_delays_no_other() {
    let path = TempPath::new();
    let server = PeerServer::start(unix(&path), SourceSpec::pattern(7)).expect("a server");
    let mut silent = UnixStream::connect(&path.0).expect("a server");
    for sequence in 0..1000 {
        silent.write_all(&PageRequest { sequence, page: sequence }.to_bytes()).expect("room for it");
    }
    // Half a request, and then nothing.
    let mut half = UnixStream::connect(&path.0).expect("a server");
    half.write_all(&[0; REQUEST_BYTES / 2]).expect("room for it");
    fetch_all(&mut *open(&server), 100, 10);
    drop(server);
}

#[test]
fn addresses_that_cannot_be_served_or_reached_are_errors() {
    let far: PeerAddress = "tcp:192.0.2.1:80".parse().expect("an address");
    let server = PeerServer::start(far.clone(), SourceSpec::pattern(7));
    assert!(matches!(server, Err(SourceError::NotLoopback { .. })));
    assert!(matches!(SourceSpec::peer(far).open(), Err(SourceError::NotLoopback { .. })));
    let path = TempPath::new();
    let _first = PeerServer::start(unix(&path), SourceSpec::pattern(7)).expect("a server");
    let error = PeerServer::start(unix(&path), SourceSpec::pattern(7)).expect_err("the name is taken");
    assert!(matches!(error, SourceError::Serve { .. }), "{error}");
    assert!(fs::exists(&path.0).expect("a directory"), "it is the first server's name");
    let nowhere = SourceSpec::file("/nowhere/at/all");
    assert!(matches!(PeerServer::start(LOOPBACK, nowhere), Err(SourceError::OpenFile { .. })));
    let long = PeerAddress::Unix("x".repeat(200).into());
    assert!(matches!(SourceSpec::peer(long).open(), Err(SourceError::Connect { .. })));
}

/// A server that does what a test wants, with one connection.
struct Rogue {
    path: TempPath,
    thread: JoinHandle<()>,
}

impl Rogue {
    fn start(answer: impl FnOnce(&mut UnixStream) + Send + 'static) -> Rogue {
        let path = TempPath::new();
        let listener = UnixListener::bind(&path.0).expect("a new name");
        let thread = thread::spawn(move || answer(&mut listener.accept().expect("a user").0));
        Rogue { path, thread }
    }

    /// Greets, waits for `nr_requests`, and sends what `answer` makes of them; then waits for the
    /// end of the connection.
    fn answering(nr_requests: usize, answer: impl FnOnce(&[PageRequest]) -> Vec<u8> + Send + 'static) -> Rogue {
        Rogue::start(move |stream| {
            let requests = greet_and_read(stream, nr_requests);
            stream.write_all(&answer(&requests)).expect("room for it");
            let _ = stream.read_to_end(&mut Vec::new());
        })
    }

    fn spec(&self, time_out: Duration) -> SourceSpec {
        SourceSpec::peer(unix(&self.path)).time_out(time_out)
    }

    /// Connects with a long timeout, and has `time_out` only after that: the test is not about the
    /// greeting.
    fn connect(&self, time_out: Duration) -> PeerSource {
        let mut source = PeerSource::connect(unix(&self.path), PATIENCE).expect("a server");
        source.time_out_ns = time_out.as_nanos() as u64;
        source
    }

    /// Requests `pages`. Returns how many pages came before the first error, and that error.
    fn error(self, pages: &[u64], time_out: Duration) -> (usize, SourceError) {
        let mut source = self.connect(time_out);
        for &page in pages {
            source.request(page).expect("room for it");
        }
        let mut nr_arrived = 0;
        let error = loop {
            match source.arrived(Wait::ForEver) {
                Ok(page) => take_and_verify(&mut source, page.expect("in flight")),
                Err(error) => break error,
            }
            nr_arrived += 1;
        };
        assert!(matches!(source.arrived(Wait::ForEver), Err(SourceError::Ended { .. })));
        drop(source);
        self.thread.join().expect("no panic");
        (nr_arrived, error)
    }
}

fn greet_and_read(stream: &mut UnixStream, nr_requests: usize) -> Vec<PageRequest> {
    stream.write_all(&GREETING).expect("room for it");
    let mut bytes = vec![0; nr_requests * REQUEST_BYTES];
    stream.read_exact(&mut bytes).expect("requests");
    bytes.as_chunks().0.iter().map(PageRequest::from_bytes).collect()
}

fn reply(request: PageRequest) -> Vec<u8> {
    let mut bytes = [0; PAGE_SIZE];
    PATTERN.fill(request.page, &mut bytes);
    [Header::page(request).to_bytes().as_slice(), &bytes].concat()
}

#[test]
fn answers_may_come_in_any_order_and_in_any_pieces() {
    let rogue = Rogue::start(|stream| {
        let mut requests = greet_and_read(stream, 40);
        requests.reverse();
        requests.swap(3, 30);
        let bytes: Vec<u8> = requests.into_iter().flat_map(reply).collect();
        for piece in bytes.chunks(1237) {
            stream.write_all(piece).expect("room for it");
        }
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let mut source = rogue.spec(PATIENCE).delayed_by(100_000).open().expect("a server");
    fetch_all(&mut *source, 40, 40);
    drop(source);
    rogue.thread.join().expect("no panic");
}

#[test]
fn an_answer_without_a_request_and_a_second_answer_are_errors() {
    let other_page = Rogue::answering(2, |requests| {
        let wrong = PageRequest { page: 9, ..requests[1] };
        [reply(requests[0]), reply(wrong)].concat()
    });
    let (nr_arrived, error) = other_page.error(&[1, 2], PATIENCE);
    assert!(matches!(error, SourceError::NotRequested { page: 9, .. }), "{error}");
    assert_eq!(nr_arrived, 1);

    let later = Rogue::answering(1, |requests| reply(PageRequest { sequence: 77, ..requests[0] }));
    let (_, error) = later.error(&[1], PATIENCE);
    assert!(matches!(error, SourceError::NotRequested { page: 1, .. }), "{error}");

    let twice = Rogue::answering(2, |requests| [reply(requests[0]), reply(requests[0])].concat());
    let (nr_arrived, error) = twice.error(&[5, 6], PATIENCE);
    assert!(matches!(error, SourceError::Duplicate { page: 5, .. }), "{error}");
    assert_eq!(nr_arrived, 1);
}

#[test]
fn an_answer_of_another_size_is_an_error() {
    for (status, size_bytes) in [(0, 4095), (0, 4097), (0, 0), (0, u32::MAX), (1, 4096)] {
        let rogue = Rogue::answering(1, move |requests| {
            let header = Header { request: requests[0], status, size_bytes };
            [header.to_bytes().as_slice(), &[0; 5000]].concat()
        });
        let (_, error) = rogue.error(&[8], PATIENCE);
        let SourceError::WrongSize { page: 8, size_bytes: found, .. } = error else { panic!("{error}") };
        assert_eq!(found, size_bytes);
    }
}

#[test]
fn a_connection_that_closes_is_an_error() {
    // At once; in a header; in a page.
    for nr_bytes in [0, HEADER_BYTES - 1, HEADER_BYTES + 100] {
        let rogue = Rogue::start(move |stream| {
            let requests = greet_and_read(stream, 3);
            stream.write_all(&reply(requests[0])).expect("room for it");
            stream.write_all(&reply(requests[1])[..nr_bytes]).expect("room for it");
        });
        let (nr_arrived, error) = rogue.error(&[1, 2, 3], PATIENCE);
        assert!(matches!(error, SourceError::Closed { page: 2, nr_pages: 2, .. }), "{error}");
        assert_eq!(nr_arrived, 1);
    }
    // With unread requests: the connection is reset.
    let rogue = Rogue::start(|stream| {
        greet_and_read(stream, 1);
    });
    let (_, error) = rogue.error(&[1, 2, 3], PATIENCE);
    assert!(matches!(error, SourceError::Closed { page: 1, nr_pages: 3, .. }), "{error}");
}

#[test]
fn a_silent_peer_is_an_error_after_the_timeout() {
    const TIME_OUT: Duration = Duration::from_millis(50);
    let start = Instant::now();
    let rogue = Rogue::answering(2, |requests| reply(requests[0])[..HEADER_BYTES].to_vec());
    let (_, error) = rogue.error(&[1, 2], TIME_OUT);
    let SourceError::Silent { page: 1, nr_pages: 2, waited_ms, .. } = error else { panic!("{error}") };
    assert!(waited_ms >= 50 && start.elapsed() >= TIME_OUT);

    // Also for a caller that never waits.
    let rogue = Rogue::answering(1, |_| Vec::new());
    let mut source = rogue.connect(TIME_OUT);
    source.request(1).expect("room for it");
    let error = loop {
        match source.arrived(Wait::No) {
            Ok(page) => assert_eq!(page, None),
            Err(error) => break error,
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(error, SourceError::Silent { page: 1, .. }), "{error}");
    drop(source);
    rogue.thread.join().expect("no panic");

    // And behind a latency.
    let rogue = Rogue::answering(1, |_| Vec::new());
    let mut source = DelayedSource::new(Box::new(rogue.connect(TIME_OUT)), 1000);
    source.request(1).expect("room for it");
    let error = source.arrived(Wait::ForEver).expect_err("silence");
    assert!(matches!(error, SourceError::Silent { page: 1, .. }), "{error}");
    drop(source);
    rogue.thread.join().expect("no panic");
}

/// Answers page 1 last, and everything else at once.
fn holding_back_page_1() -> Rogue {
    Rogue::start(|stream| {
        stream.write_all(&GREETING).expect("room for it");
        let mut bytes = [0; REQUEST_BYTES];
        while stream.read_exact(&mut bytes).is_ok() {
            let request = PageRequest::from_bytes(&bytes);
            if request.page != 1 && stream.write_all(&reply(request)).is_err() {
                break;
            }
        }
    })
}

#[test]
fn a_peer_that_answers_only_other_requests_is_silent() {
    const TIME_OUT: Duration = Duration::from_millis(50);
    // A user with few requests in flight finds nothing to receive now and then; a user with many
    // may not.
    for window in [2, 100] {
        let rogue = holding_back_page_1();
        let mut source = rogue.connect(TIME_OUT);
        let start = Instant::now();
        let mut next = 1;
        let error = loop {
            while source.nr_in_flight() < window {
                source.request(next).expect("room for it");
                next += 1;
            }
            match source.arrived(Wait::ForEver) {
                Ok(page) => take_and_verify(&mut source, page.expect("in flight")),
                Err(error) => break error,
            }
            assert!(start.elapsed() < PATIENCE, "page 1 is held back for ever");
        };
        let SourceError::Silent { page: 1, waited_ms, .. } = error else { panic!("{error}") };
        assert!(waited_ms >= 50, "{waited_ms}");
        assert!(error.to_string().contains("page 0x1 "), "{error}");
        drop(source);
        rogue.thread.join().expect("no panic");
    }
}

/// A peer may never leave the socket empty. An answer to a request from after the timeout shows
/// that an older one was left out.
#[test]
fn an_answer_to_a_request_from_after_the_timeout_shows_a_silent_peer() {
    const TIME_OUT: Duration = Duration::from_millis(50);
    let rogue = Rogue::answering(3, |requests| [reply(requests[1]), reply(requests[2])].concat());
    let mut source = rogue.connect(PATIENCE);
    for page in [1, 2] {
        source.request(page).expect("room for it");
    }
    // Both are sent.
    assert_eq!(source.arrived(Wait::No).expect("no error"), None);
    thread::sleep(TIME_OUT);
    source.request(3).expect("room for it");
    assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(2));
    source.time_out_ns = TIME_OUT.as_nanos() as u64;
    take_and_verify(&mut source, 2);
    let error = source.arrived(Wait::ForEver).expect_err("page 1 is left out");
    assert!(matches!(error, SourceError::Silent { page: 1, nr_pages: 2, .. }), "{error}");
    drop(source);
    rogue.thread.join().expect("no panic");
}

/// More answers than a socket holds, to a user that does not read for longer than the timeout: none
/// of them is late.
#[test]
fn a_peer_that_could_not_send_is_not_silent() {
    const TIME_OUT: Duration = Duration::from_millis(500);
    let rogue = Rogue::answering(MAX_IN_FLIGHT, |requests| requests.iter().copied().flat_map(reply).collect());
    let mut source = rogue.connect(PATIENCE);
    for page in 0..MAX_IN_FLIGHT as u64 {
        source.request(page).expect("room for it");
    }
    assert_eq!(source.arrived(Wait::No).expect("no error"), None);
    thread::sleep(TIME_OUT);
    source.time_out_ns = PATIENCE.as_nanos() as u64;
    let sent_ns = source.overdue_at_ns();
    source.time_out_ns = TIME_OUT.as_nanos() as u64;
    // Whatever the machine does now: the first read begins all times anew.
    assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(0));
    source.time_out_ns = PATIENCE.as_nanos() as u64;
    assert!(source.overdue_at_ns() >= sent_ns + TIME_OUT.as_nanos() as u64);
    take_and_verify(&mut source, 0);
    for page in 1..MAX_IN_FLIGHT as u64 {
        assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(page));
        take_and_verify(&mut source, page);
    }
    drop(source);
    rogue.thread.join().expect("no panic");
}

/// Small unread writes fill a socket long before all requests are in it.
#[test]
fn requests_that_find_no_room_are_kept() {
    let (may_read, wait_for_it) = std::sync::mpsc::channel::<()>();
    let rogue = Rogue::start(move |stream| {
        stream.write_all(&GREETING).expect("room for it");
        wait_for_it.recv().expect("a user");
        let mut bytes = [0; REQUEST_BYTES];
        while stream.read_exact(&mut bytes).is_ok() {
            stream.write_all(&reply(PageRequest::from_bytes(&bytes))).expect("room for it");
        }
    });
    let mut source = rogue.connect(PATIENCE);
    for page in 0..MAX_IN_FLIGHT as u64 {
        source.request(page).expect("room for it");
        assert_eq!(source.arrived(Wait::No).expect("no error"), None);
    }
    assert!(matches!(source.next_arrival(), NextArrival::At(0)), "not all are sent");
    may_read.send(()).expect("a peer");
    for page in 0..MAX_IN_FLIGHT as u64 {
        assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(page));
        take_and_verify(&mut source, page);
    }
    drop(source);
    rogue.thread.join().expect("no panic");
}

#[test]
fn a_server_without_a_greeting_is_no_source() {
    const TIME_OUT: Duration = Duration::from_millis(20);
    let rogue = Rogue::start(|stream| stream.write_all(b"HTTP/1.1 200 OK").expect("room for it"));
    assert!(matches!(rogue.spec(PATIENCE).open(), Err(SourceError::NotASource { .. })));
    rogue.thread.join().expect("no panic");

    let rogue = Rogue::start(|stream| stream.write_all(&GREETING[..5]).expect("room for it"));
    let error = rogue.spec(PATIENCE).open().expect_err("half a greeting");
    let SourceError::Connect { cause, .. } = error else { panic!("{error}") };
    assert_eq!(cause.kind(), std::io::ErrorKind::UnexpectedEof);
    rogue.thread.join().expect("no panic");

    let rogue = Rogue::start(|stream| drop(stream.read_to_end(&mut Vec::new())));
    let error = rogue.spec(TIME_OUT).open().expect_err("silence");
    let SourceError::Connect { cause, .. } = error else { panic!("{error}") };
    assert_eq!(cause.kind(), std::io::ErrorKind::TimedOut);
    rogue.thread.join().expect("no panic");

    // No accept: the first connection waits in the queue, and the next finds no room there.
    let path = TempPath::new();
    let listener = UnixListener::bind(&path.0).expect("a new name");
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(&path.0).expect("room in the queue");
    let error = SourceSpec::peer(unix(&path)).time_out(TIME_OUT).open().expect_err("silence");
    let SourceError::Connect { cause, .. } = error else { panic!("{error}") };
    assert_eq!(cause.kind(), std::io::ErrorKind::TimedOut);
}

#[test]
fn a_user_that_was_away_finds_the_peer_not_silent() {
    let rogue = Rogue::start(|stream| {
        let requests = greet_and_read(stream, 2);
        stream.write_all(&[reply(requests[0]), reply(requests[1])].concat()).expect("room for it");
        let mut third = [0; REQUEST_BYTES];
        stream.read_exact(&mut third).expect("a request");
        stream.write_all(&reply(PageRequest::from_bytes(&third))).expect("room for it");
    });
    let mut source = rogue.connect(PATIENCE);
    for page in [1, 2] {
        source.request(page).expect("room for it");
    }
    assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(1));
    take_and_verify(&mut source, 1);
    // The second page was received with the first one: since then nothing came.
    let asked_ns = timestamp_ns();
    source.request(3).expect("room for it");
    assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(2));
    take_and_verify(&mut source, 2);
    assert!(source.overdue_at_ns() >= asked_ns + PATIENCE.as_nanos() as u64);
    assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(3));
    take_and_verify(&mut source, 3);
    drop(source);
    rogue.thread.join().expect("no panic");
}

#[test]
fn a_peer_that_was_not_asked_yet_is_not_silent() {
    let (may_answer, wait_for_it) = std::sync::mpsc::channel::<()>();
    let rogue = Rogue::answering(1, move |requests| {
        wait_for_it.recv().expect("a user");
        reply(requests[0])
    });
    let mut source = rogue.connect(PATIENCE);
    source.request(1).expect("room for it");
    // Busy with something else; only now the request is sent, and its time begins.
    thread::sleep(Duration::from_millis(1));
    let sent_ns = timestamp_ns();
    assert_eq!(source.arrived(Wait::No).expect("no error"), None);
    assert!(source.overdue_at_ns() >= sent_ns + PATIENCE.as_nanos() as u64);
    may_answer.send(()).expect("a peer");
    assert_eq!(source.arrived(Wait::ForEver).expect("no error"), Some(1));
    take_and_verify(&mut source, 1);
    drop(source);
    rogue.thread.join().expect("no panic");
}

#[test]
fn an_endless_timeout_is_accepted() {
    let path = TempPath::new();
    for address in [unix(&path), LOOPBACK] {
        let server = PeerServer::start(address, SourceSpec::pattern(7)).expect("a server");
        let spec = SourceSpec::peer(server.address().clone()).time_out(Duration::MAX);
        fetch_all(&mut *spec.open().expect("a server"), 10, 3);
    }
}
