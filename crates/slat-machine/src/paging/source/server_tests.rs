//! Ends of the server that its users do not observe.

use std::io::Write;
use std::os::unix::net::UnixStream;

use super::*;

#[test]
fn a_disconnect_is_found_while_nothing_is_read_or_sent() {
    let (mut user, stream) = UnixStream::pair().expect("sockets");
    stream.set_nonblocking(true).expect("a flag");
    let never_ns = 1 << 60;
    let source = SourceSpec::pattern(7).delayed_by(never_ns).open().expect("a source");
    let ending = Ending { has_begun: AtomicBool::new(false), event: EventFd::new().expect("an event") };
    let mut connection = Connection::new(Stream::Unix(stream), source);
    let requests = (0..MAX_IN_FLIGHT as u64).flat_map(|page| PageRequest { sequence: page, page }.to_bytes());
    user.write_all(&requests.collect::<Vec<_>>()).expect("room for it");
    while connection.wants_requests() {
        assert_eq!(connection.step(&ending).expect("no error"), Step::Go);
    }
    drop(user);
    assert!((0..10).any(|_| connection.step(&ending).expect("no error") == Step::Closed), "it goes round and round");
}
