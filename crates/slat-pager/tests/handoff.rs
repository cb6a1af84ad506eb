//! `slat-pager serve --experimental handoff` and a VMM that hands its memory over as is proposed for
//! Cloud Hypervisor: served, taken over, and what is no handoff.

#[path = "support/pager.rs"]
mod pager;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use pager::{Pager, SEED, SIZE, folder, metric, socket};
use registered::{Guest, Kind, send, userfaultfd};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd};
use support::{bytes, until};

const HANDOFF: &[&str] = &["--experimental", "handoff"];

/// A frame that hands `guest` over.
fn frame(guest: &Guest, kind: &str) -> Vec<u8> {
    let region = guest.region();
    let text = format!(
        r#"{{"type":"{kind}","version":1,"vmm_pid":{},"mode":"MISSING","regions":[{{"guest_phys_addr":0,
        "host_virt_addr":{},"size":{},"backing_file_offset":{}}}]}}"#,
        std::process::id(),
        region.address,
        region.size_bytes,
        region.offset
    );
    let mut frame = (text.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(text.as_bytes());
    frame
}

/// A VMM's connection, and the first byte of its answer; none if the pager has closed the socket.
fn connect(folder: &Path, frame: &[u8], userfaultfd: Option<&Userfaultfd>) -> (UnixStream, Vec<u8>) {
    let mut stream = UnixStream::connect(socket(folder)).unwrap();
    send(&stream, frame, userfaultfd).unwrap();
    let mut answer = vec![0; 1];
    // A socket that is closed before all was read is reset.
    let nr_bytes = stream.read(&mut answer).unwrap_or_else(|error| {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        0
    });
    answer.truncate(nr_bytes);
    (stream, answer)
}

#[test]
fn a_guest_is_handed_over_served_and_taken_over() {
    let (Some(folder), Some(userfaultfd)) = (folder(), userfaultfd(0)) else { return };
    let folder = folder.path();
    // The second half of the snapshot: offsets are those in the file.
    let guest = Guest::new(Kind::Anonymous, SIZE / 2, SIZE as u64 / 2).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let first = Pager::start(folder, HANDOFF);
    let (stream, answer) = connect(folder, &frame(&guest, "handoff"), Some(&userfaultfd));
    assert_eq!(answer, [1]);
    let verify = |pages: std::ops::Range<usize>| {
        thread::scope(|scope| {
            for nr in 0..8 {
                let (guest, pages) = (&guest, pages.clone());
                scope.spawn(move || pages.skip(nr).step_by(8).for_each(|page| guest.verify(page, SEED)));
            }
        });
    };
    verify(0..guest.nr_pages() / 2);
    drop((first, stream));
    // The next pager has the machine from its process; the VMM does not know that, and connects anew.
    let second = Pager::start(folder, HANDOFF);
    assert_eq!(metric(folder, "taken_over_total"), 1.0);
    let (stream, answer) = connect(folder, &frame(&guest, "handoff"), Some(&userfaultfd));
    assert_eq!((answer.as_slice(), metric(folder, "refused_total")), (&[1][..], 0.0));
    verify(0..guest.nr_pages());
    drop((stream, second));
}

#[test]
fn a_machine_that_was_not_taken_over_is_not_acknowledged() {
    let (Some(folder), Some(userfaultfd)) = (folder(), userfaultfd(0)) else { return };
    let folder = folder.path();
    let guest = Guest::new(Kind::Anonymous, SIZE, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let first = Pager::start(folder, HANDOFF);
    let (stream, answer) = connect(folder, &frame(&guest, "handoff"), Some(&userfaultfd));
    assert_eq!(answer, [1]);
    drop((first, stream));
    // Another snapshot: the next pager leaves the machine alone, which is noted all the same.
    std::fs::write(folder.join("memory"), bytes(SEED + 1, 0..SIZE as u64)).unwrap();
    let _second = Pager::start(folder, HANDOFF);
    let mut stream = UnixStream::connect(socket(folder)).unwrap();
    send(&stream, &frame(&guest, "handoff"), Some(&userfaultfd)).unwrap();
    until("it is refused", || metric(folder, "refused_total") == 1.0);
    stream.set_nonblocking(true).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn what_is_no_handoff_gets_no_answer() {
    let (Some(folder), Some(userfaultfd)) = (folder(), userfaultfd(0)) else { return };
    let folder = folder.path();
    let guest = Guest::new(Kind::Anonymous, SIZE, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let _pager = Pager::start(folder, HANDOFF);
    let good = frame(&guest, "handoff");
    for (wrong, userfaultfd) in [
        (frame(&guest, "add_region"), Some(&userfaultfd)),
        (frame(&guest, "other"), Some(&userfaultfd)),
        (good.clone(), None),
        (b"[]".repeat(100), Some(&userfaultfd)),
        (registered::handshake(&[guest.region()]).into_bytes(), Some(&userfaultfd)),
    ] {
        assert!(connect(folder, &wrong, userfaultfd).1.is_empty(), "{wrong:?}");
    }
    // Half a handoff, and one of memory that the snapshot does not have.
    let mut stream = UnixStream::connect(socket(folder)).unwrap();
    send(&stream, &good[..good.len() / 2], Some(&userfaultfd)).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0);
    drop(stream);
    assert_eq!(metric(folder, "refused_total"), 6.0);
    // All that was refused was not noted: the same descriptor is served.
    let (mut stream, answer) = connect(folder, &good, Some(&userfaultfd));
    assert_eq!(answer, [1]);
    // More memory is not served, and not acknowledged; the machine is served on.
    stream.write_all(&frame(&guest, "add_region")).unwrap();
    (0..guest.nr_pages()).for_each(|page| guest.verify(page, SEED));
    assert_eq!(metric(folder, "vms"), 1.0);
}
