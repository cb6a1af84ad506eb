//! The connection for page faults, where the test is the VMM.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use slat_pager::protocol::cloud_hypervisor::OnFailure;
use slat_pager::protocol::cloud_hypervisor::faults::IN_FLIGHT;
use slat_pager::protocol::cloud_hypervisor::restore::{Memory, Record, Restored, Snapshot, Then, restore};
use slat_pager::source::{Identity, Source, SourceError};
use slat_pager::working_set::replay::Populate;
use tokio::runtime::Runtime;

use crate::support::Pattern;
use crate::vmm::{self, SLOTS, Slot, page_fault, request, response};
use crate::{TIMEOUTS, on_demand, patterns, snapshot};

/// A restore whose VMM is this test: both ends of the connection for page faults.
fn faults(snapshot: &Snapshot, on_failure: OnFailure, test: impl FnOnce(UnixStream, &Restored)) {
    faults_of(snapshot, Memory::OnDemand { record: Record::Nothing, on_failure }, test);
}

fn faults_of(snapshot: &Snapshot, memory: Memory, test: impl FnOnce(UnixStream, &Restored)) {
    let runtime = Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmm.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let vmm = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut second = None;
        let mut head = [0; 16];
        loop {
            socket.read_exact(&mut head).unwrap();
            let command = u16::from_le_bytes([head[0], head[1]]);
            if command == vmm::STATE {
                let (mut faults, _) = listener.accept().unwrap();
                let mut role = [0; 2];
                faults.read_exact(&mut role).unwrap();
                assert_eq!(role, [2, 0]);
                second = Some(faults);
            }
            socket.read_exact(&mut vec![0; head[8] as usize | (head[9] as usize) << 8]).unwrap();
            socket.write_all(&request(1, 0)).unwrap();
            if command == vmm::COMPLETE {
                return second.unwrap();
            }
        }
    });
    let restored = restore(&socket, snapshot, memory, Then::Run, TIMEOUTS, runtime.handle()).unwrap();
    test(vmm.join().unwrap(), &restored);
}

#[test]
fn a_thousand_faults_in_flight_are_answered_in_order() {
    faults(&patterns(), OnFailure::Refuse, |socket, restored| {
        let nr_pages = SLOTS[0].nr_bytes / 4096;
        let (mut sender, nr_faults) = (socket.try_clone().unwrap(), 1000);
        let sending = thread::spawn(move || {
            for fault in 0..nr_faults {
                // Each tenth is in no slot.
                let gpa = if fault % 10 == 9 { 1 << 40 } else { fault * 37 % nr_pages * 4096 };
                sender.write_all(&page_fault(gpa, 4096)).unwrap();
            }
        });
        for fault in 0..nr_faults {
            assert_eq!(response(&socket).unwrap(), if fault % 10 == 9 { 2 } else { 1 }, "{fault}");
        }
        sending.join().unwrap();
        assert_eq!(restored.counters().nr_faults.load(Ordering::Relaxed), nr_faults);
    });
}

#[test]
fn faults_of_any_whole_pages_in_a_slot_are_served_and_others_refused() {
    faults(&patterns(), OnFailure::Refuse, |mut socket, _| {
        let end = SLOTS[2].gpa + SLOTS[2].nr_bytes;
        let cases = [
            (0, 2 << 20, 1),
            (0, SLOTS[0].nr_bytes, 1),
            (end - 4096, 4096, 1),
            (end, 4096, 2),
            (end - 4096, 8192, 2),
            // The two slots lie one behind the other; a page of a VM is in one of them.
            (SLOTS[2].gpa - 4096, 8192, 2),
            (u64::MAX - 8191, 4096, 2),
        ];
        for (gpa, nr_bytes, status) in cases {
            socket.write_all(&page_fault(gpa, nr_bytes)).unwrap();
            assert_eq!(response(&socket).unwrap(), status, "{gpa:#x} {nr_bytes:#x}");
        }
        // In two parts.
        let fault = page_fault(4096, 4096);
        socket.write_all(&fault[..21]).unwrap();
        socket.write_all(&fault[21..]).unwrap();
        assert_eq!(response(&socket).unwrap(), 1);
        socket.write_all(&request(vmm::ABANDON, 0)).unwrap();
        assert_eq!(response(&socket).unwrap(), 1);
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    });
}

/// A snapshot none of whose pages can be had: its faults stay in flight.
fn broken_everywhere() -> Snapshot {
    snapshot(|slot| Pattern { granule_bytes: 2 << 20, broken: Some(0), ..Pattern::new(0, slot.nr_bytes) })
}

#[test]
fn the_end_is_noticed_behind_the_most_faults_in_flight() {
    faults(&broken_everywhere(), OnFailure::Wait, |mut socket, restored| {
        for _ in 0..IN_FLIGHT + 10 {
            socket.write_all(&page_fault(0, 4096)).unwrap();
        }
        while restored.counters().nr_faults.load(Ordering::Relaxed) < IN_FLIGHT as u64 {
            thread::yield_now();
        }
        let memory = Arc::clone(restored.memory());
        assert!(memory.faults_wait());
        drop(socket);
        while memory.faults_wait() {
            thread::yield_now();
        }
        assert_eq!(restored.counters().nr_faults.load(Ordering::Relaxed), IN_FLIGHT as u64);
    });
}

#[test]
fn abandon_is_answered_after_the_faults_before_it() {
    let fails_twice = snapshot(|slot| Pattern {
        nr_failures: AtomicU32::new(2),
        granule_bytes: 2 << 20,
        ..Pattern::new(vmm::seed(slot.number), slot.nr_bytes)
    });
    faults(&fails_twice, OnFailure::Refuse, |mut socket, restored| {
        // One that waits, one that is refused at once, the end.
        let bytes = [&page_fault(0, 4096)[..], &page_fault(1 << 40, 4096), &request(vmm::ABANDON, 0)].concat();
        socket.write_all(&bytes).unwrap();
        assert_eq!([(); 3].map(|()| response(&socket).unwrap()), [1, 2, 1]);
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
        assert_eq!(restored.counters().nr_faults.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn a_connection_of_faults_that_sends_something_else_is_closed() {
    let cases: [&[u8]; 9] = [
        &request(vmm::START, 0),
        &request(vmm::PAGE_FAULT, 15),
        &request(vmm::PAGE_FAULT, u64::MAX),
        &request(vmm::ABANDON, 1),
        &request(77, 0),
        &page_fault(1, 4096),
        &page_fault(4096, 0),
        &page_fault(0, 4095),
        &page_fault(u64::MAX - 4095, 8192),
    ];
    for bytes in cases {
        faults(&patterns(), OnFailure::Refuse, |mut socket, _| {
            socket.write_all(bytes).unwrap();
            assert_eq!(socket.read(&mut [0]).unwrap(), 0, "{bytes:?}");
        });
    }
}

#[test]
fn half_a_fault_and_the_end_is_an_error() {
    faults(&patterns(), OnFailure::Refuse, |mut socket, restored| {
        socket.write_all(&page_fault(0, 4096)[..20]).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
        assert_eq!(restored.counters().nr_faults.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn a_page_that_can_never_be_had_is_refused_and_others_are_served() {
    let broken =
        || snapshot(|slot| Pattern { broken: Some(5000), ..Pattern::new(vmm::seed(slot.number), slot.nr_bytes) });
    faults(&broken(), OnFailure::Refuse, |mut socket, _| {
        for (gpa, status) in [(4096, 2), (1 << 20, 1), (0, 2)] {
            socket.write_all(&page_fault(gpa, 4096)).unwrap();
            assert_eq!(response(&socket).unwrap(), status, "{gpa:#x}");
        }
    });
    faults(&broken(), OnFailure::Wait, |mut socket, restored| {
        socket.write_all(&page_fault(1 << 20, 4096)).unwrap();
        assert_eq!(response(&socket).unwrap(), 1);
        socket.write_all(&page_fault(4096, 4096)).unwrap();
        // Tried again and again, and not answered.
        while restored.counters().nr_failures.load(Ordering::Relaxed) < 3 {
            thread::yield_now();
        }
        socket.set_nonblocking(true).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    });
}

#[test]
fn populate_fills_across_slots_and_stops_at_the_end() {
    faults(&patterns(), OnFailure::Refuse, |_socket, restored| {
        let memory = restored.memory();
        memory.populate((3 << 20) - 4096..(3 << 20) + 4096).unwrap();
        assert_eq!(memory.present_bytes(), 2 * (64 << 10));
        memory.populate(memory.size_bytes() - 4096..memory.size_bytes()).unwrap();
        assert!(memory.present_bytes() <= 3 * (64 << 10));
    });
}

const HUGE_PAGE: u64 = 2 << 20;
/// Of a VM that asks for pages of 2 MiB; the memory itself is of small ones, which are always to be had.
const LARGE_SLOTS: [Slot; 2] = [
    Slot { number: 0, gpa: 0, nr_bytes: 24 * HUGE_PAGE, file_offset: 0, page_bytes: 4096 },
    Slot { number: 1, gpa: 1 << 32, nr_bytes: 24 * HUGE_PAGE, file_offset: 0, page_bytes: 4096 },
];

/// Zeros alone.
#[derive(Debug)]
struct Zeros(u64);

impl Source for Zeros {
    fn size_bytes(&self) -> u64 {
        self.0
    }

    fn identity(&self) -> Identity {
        Identity::new("zeros", [&self.0.to_le_bytes()[..]])
    }

    fn granule_bytes(&self) -> u64 {
        HUGE_PAGE
    }

    fn is_zero(&self, _: std::ops::Range<u64>) -> bool {
        true
    }

    fn read<'a>(&'a self, _: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        into.fill(0);
        async { Ok(()) }.boxed()
    }
}

/// What is recorded, as numbers of huge pages, of a VM that asks for these.
fn recorded(asked: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let memory = LARGE_SLOTS.iter().map(|slot| (slot.number, Arc::new(Zeros(slot.nr_bytes)) as Arc<dyn Source>));
    let config = vmm::config(&LARGE_SLOTS).into_bytes();
    let snapshot = Snapshot { config, state: b"the devices".to_vec(), memory: memory.collect() };
    let mut pages = Vec::new();
    faults_of(&snapshot, on_demand(Record::UpTo(1 << 30)), |mut socket, restored| {
        for page in asked {
            let slot = &LARGE_SLOTS[(page / 24) as usize];
            socket.write_all(&page_fault(slot.gpa + page % 24 * HUGE_PAGE, HUGE_PAGE)).unwrap();
            assert_eq!(response(&socket).unwrap(), 1);
        }
        let set = restored.recorder().unwrap().working_set();
        pages = set.pages.iter().map(|page| u64::from(*page) * 4096 / HUGE_PAGE).collect();
    });
    pages
}

#[test]
fn a_guest_of_huge_pages_has_a_working_set_though_it_begins_with_the_first() {
    let touched = [0, 1, 2, 8, 3, 47, 4, 24];
    assert_eq!(recorded(touched), touched);
}

#[test]
fn a_sweep_over_huge_pages_is_not_recorded_and_what_the_guest_touches_meanwhile_is() {
    // After each third page of the sweep.
    let touched = [40, 47, 30, 31, 32, 36, 25];
    let mut faults = touched.into_iter();
    let mut asked = Vec::new();
    for page in 0..48 {
        if page % 3 == 0 {
            asked.extend(faults.next());
        }
        if !asked.contains(&page) {
            asked.push(page);
        }
    }
    assert_eq!(recorded(asked), touched);
    assert!(recorded(0..48).is_empty());
}
