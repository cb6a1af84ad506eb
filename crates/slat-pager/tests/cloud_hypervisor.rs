//! Cloud Hypervisor's migration protocol, by clients of our own: a VMM in a process of its own with a
//! real userfaultfd and threads that touch all its memory, and peers that do everything wrong.

mod support;
#[path = "support/cloud_hypervisor.rs"]
mod vmm;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use slat_pager::commands::cloud_hypervisor::{self as commands, MemoryComes};
use slat_pager::protocol::cloud_hypervisor::folder::{CONFIG, STATE, memory_name};
use slat_pager::protocol::cloud_hypervisor::restore::{
    Memory, Record, Restored, Snapshot, Then, Timeouts, restore, whole,
};
use slat_pager::protocol::cloud_hypervisor::store::store;
use slat_pager::protocol::cloud_hypervisor::wire::WireError;
use slat_pager::protocol::cloud_hypervisor::{Error, OnFailure};
use slat_pager::source::Source;
use slat_pager::working_set::WorkingSet;
use slat_pager::working_set::replay::{Populate, Progress, replay, steps};
use tokio::runtime::Runtime;

use support::{Pattern, client_argument, may_use_userfaultfd, start_client};
use vmm::{Between, SLOTS, Sent, config_frame, frame, page_fault, request, response, send_with, slot_frame};

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(600);
/// Of a VMM that listens when it is started.
const TIMEOUTS: Timeouts = Timeouts { listen: Duration::ZERO, frame: PATIENCE };

fn snapshot(pattern: impl Fn(&vmm::Slot) -> Pattern) -> Snapshot {
    let memory = SLOTS.iter().map(|slot| (slot.number, Arc::new(pattern(slot)) as Arc<dyn Source>));
    Snapshot { config: vmm::config(&SLOTS).into_bytes(), state: b"the devices".to_vec(), memory: memory.collect() }
}

fn patterns() -> Snapshot {
    snapshot(|slot| Pattern::new(vmm::seed(slot.number), slot.nr_bytes))
}

fn on_demand(record: Record) -> Memory {
    Memory::OnDemand { record, on_failure: OnFailure::Refuse }
}

// The clients: not tests, but what tests start this program again for.

#[test]
#[ignore = "a client that the tests start"]
fn client_sends_a_snapshot() {
    let Some(socket) = client_argument() else { return };
    vmm::send_snapshot(&UnixStream::connect(socket).unwrap(), &SLOTS, b"the devices");
}

#[test]
#[ignore = "a client that the tests start"]
fn client_is_restored() {
    let Some(argument) = client_argument() else { return };
    let (socket, between) = match argument.strip_prefix("sweep:") {
        Some(socket) => (socket, Between::Sweep),
        None => (&argument[..], Between::Wait),
    };
    let vm = vmm::restore(Path::new(socket), between);
    assert_eq!(vm.state, b"the devices");
    assert_eq!(vm.last_command, vmm::COMPLETE);
    vmm::touch_all(&vm, 64);
    if between == Between::Sweep {
        vm.join();
    }
}

/// Restores `snapshot` in a client, does `while_it_runs`, and waits until the client is content.
fn restore_in_client(snapshot: &Snapshot, memory: Memory, between: Between, while_it_runs: impl FnOnce(&Restored)) {
    let runtime = Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmm.sock");
    let argument = match between {
        Between::Sweep => format!("sweep:{}", socket.display()),
        Between::Wait => socket.display().to_string(),
    };
    let mut client = start_client("client_is_restored", &argument);
    while !socket.exists() {
        assert!(client.try_wait().unwrap().is_none(), "the client has ended");
        thread::yield_now();
    }
    let restored = loop {
        match restore(&socket, snapshot, memory.clone(), Then::Run, TIMEOUTS, runtime.handle()) {
            // It has made the socket, and does not listen yet.
            Err(Error::File { .. }) => thread::yield_now(),
            restored => break restored.unwrap(),
        }
    };
    while_it_runs(&restored);
    assert!(client.wait().unwrap().success());
    restored.wait().unwrap();
}

#[test]
fn a_snapshot_is_stored_and_restored_byte_by_byte() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, stored) = (folder.path().join("daemon.sock"), folder.path().join("snapshot"));
    let listener = UnixListener::bind(&socket).unwrap();
    let mut client = start_client("client_sends_a_snapshot", socket.to_str().unwrap());
    let size = store(listener.accept().unwrap().0, &stored, PATIENCE).unwrap();
    assert!(client.wait().unwrap().success());

    assert_eq!(fs::read_to_string(stored.join(CONFIG)).unwrap(), vmm::config(&SLOTS));
    assert_eq!(fs::read(stored.join(STATE)).unwrap(), b"the devices");
    for slot in &SLOTS {
        let memory = fs::read(stored.join(memory_name(slot.number))).unwrap();
        assert_eq!(memory.len() as u64, slot.nr_bytes);
        assert_eq!(support::wrong(vmm::seed(slot.number), 0, &memory), None);
    }
    assert_eq!(size.memory_bytes, SLOTS.iter().map(|slot| slot.nr_bytes).sum::<u64>());
    assert!(size.data_bytes < size.memory_bytes * 7 / 8, "{size:?}");
    assert_eq!(fs::read_dir(&stored).unwrap().count(), 2 + SLOTS.len());
    // Only the folder and the socket.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn the_commands_store_a_snapshot_and_restore_it() {
    if !may_use_userfaultfd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (socket, snapshot) = (folder.path().join("pager.sock"), folder.path().join("snapshot"));
    // A socket that a daemon left behind.
    drop(UnixListener::bind(&socket).unwrap());
    let options = commands::Store { socket: socket.clone(), to: snapshot.clone(), timeout: PATIENCE };
    thread::scope(|scope| {
        let storing = scope.spawn(|| commands::store(&options).map_err(|error| error.to_string()));
        let mut client = loop {
            // The new socket refuses nobody; a try that is one connection too many would be the snapshot's.
            if listens(&socket) {
                break start_client("client_sends_a_snapshot", socket.to_str().unwrap());
            }
            thread::yield_now();
        };
        storing.join().unwrap().unwrap();
        assert!(client.wait().unwrap().success());
    });

    let working_set = snapshot.join("working-set");
    for memory_comes in [MemoryComes::OnDemand, MemoryComes::OnDemandAndAll] {
        let socket = folder.path().join(format!("vmm-{memory_comes:?}.sock"));
        let mut client = start_client("client_is_restored", &format!("sweep:{}", socket.display()));
        let options = commands::Restore {
            socket,
            from: snapshot.clone(),
            memory: None,
            then: commands::AfterRestore::Run,
            memory_comes,
            working_set: None,
            on_failure: commands::Policy::Exit,
            timeout: PATIENCE,
        };
        commands::restore(&options).unwrap();
        assert!(client.wait().unwrap().success());
        assert!(working_set.exists());
    }
}

/// Whether a process listens at `path`, without a connection to it: the kernel's list of sockets says it.
fn listens(path: &Path) -> bool {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    // A socket that listens has the flag __SO_ACCEPTCON.
    sockets.lines().any(|line| line.contains(" 00010000 ") && line.ends_with(path.to_str().unwrap()))
}

#[test]
fn a_vm_is_restored_on_demand_and_its_working_set_replayed() {
    if !may_use_userfaultfd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("snapshot.working-set");
    let mut identity = None;
    restore_in_client(&patterns(), on_demand(Record::UpTo(1 << 30)), Between::Wait, |restored| {
        identity = Some(restored.memory().identity());
        // Recorded while it runs; what is not there yet comes by faults at the next restore.
        while restored.counters().nr_faults.load(Ordering::Relaxed) < 10 {
            thread::yield_now();
        }
        let set = restored.recorder().unwrap().working_set();
        assert!(!set.pages.is_empty());
        set.save(&file).unwrap();
    });
    let set = WorkingSet::load(&file, identity.unwrap()).unwrap().unwrap();
    restore_in_client(&patterns(), on_demand(Record::Nothing), Between::Wait, |restored| {
        // The working set, then all the rest, beside the faults of 64 threads.
        let memory = &**restored.memory();
        replay(&steps(&set), memory, 4, &Progress::default()).unwrap();
        replay(&whole(memory), memory, 4, &Progress::default()).unwrap();
        assert_eq!(memory.present_bytes(), memory.size_bytes());
    });
}

#[test]
fn the_vmms_own_sweep_is_served_and_not_recorded() {
    if !may_use_userfaultfd() {
        return;
    }
    restore_in_client(&patterns(), on_demand(Record::UpTo(1 << 30)), Between::Sweep, |restored| {
        let counters = restored.counters();
        let nr_pages = restored.memory().size_bytes() / 4096;
        // It closes the connection once it has all.
        while counters.nr_faults.load(Ordering::Relaxed) < nr_pages {
            thread::yield_now();
        }
        assert!(counters.nr_swept.load(Ordering::Relaxed) > 0);
    });
}

#[test]
fn a_source_that_fails_for_a_while_makes_the_guest_wait() {
    if !may_use_userfaultfd() {
        return;
    }
    let fails = snapshot(|slot| Pattern {
        nr_failures: AtomicU32::new(2),
        granule_bytes: 2 << 20,
        ..Pattern::new(vmm::seed(slot.number), slot.nr_bytes)
    });
    restore_in_client(&fails, on_demand(Record::Nothing), Between::Wait, |restored| {
        while restored.counters().nr_failures.load(Ordering::Relaxed) < 6 {
            thread::yield_now();
        }
    });
}

#[test]
fn a_vm_is_restored_with_all_its_memory_before_it_runs() {
    let runtime = Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmm.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let vmm = thread::spawn(move || {
        let mut received = Vec::new();
        answer_all(&listener, 1, &mut received);
        received
    });
    let restored = restore(&socket, &patterns(), Memory::Before, Then::Pause, TIMEOUTS, runtime.handle()).unwrap();
    assert_eq!(restored.memory().present_bytes(), restored.memory().size_bytes());
    restored.wait().unwrap();
    let mut commands = vec![vmm::START];
    commands.extend([vmm::MEMORY_FD; SLOTS.len()]);
    commands.extend([vmm::CONFIG, vmm::STATE, vmm::COMPLETE_PAUSED]);
    assert_eq!(vmm.join().unwrap(), commands);
}

/// Takes a connection, and answers each request by `status` until it is closed.
fn answer_all(listener: &UnixListener, status: u16, received: &mut Vec<u16>) {
    let (mut socket, _) = listener.accept().unwrap();
    let mut head = [0; 16];
    while socket.read_exact(&mut head).is_ok() {
        received.push(u16::from_le_bytes([head[0], head[1]]));
        let mut payload = vec![0; head[8] as usize | (head[9] as usize) << 8];
        socket.read_exact(&mut payload).unwrap();
        if socket.write_all(&request(status, 0)).is_err() {
            break;
        }
    }
}

#[test]
fn a_vmm_that_refuses_ends_the_restore() {
    let runtime = Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmm.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let statuses = [(2, "refused Start"), (0, "status 0"), (3, "status 3")];
    let vmm = thread::spawn(move || {
        for (status, _) in statuses {
            answer_all(&listener, status, &mut Vec::new());
        }
        drop(listener.accept().unwrap());
    });
    let try_it = || {
        let restored = restore(&socket, &patterns(), on_demand(Record::Nothing), Then::Run, TIMEOUTS, runtime.handle());
        restored.map(drop).unwrap_err().to_string()
    };
    for (_, why) in statuses {
        let error = try_it();
        assert!(error.contains(why), "{error}");
    }
    let error = try_it();
    assert!(error.contains("closed the connection"), "{error}");
    vmm.join().unwrap();
}

#[test]
fn a_vmm_that_takes_no_page_faults_does_not_get_to_run() {
    let runtime = Runtime::new().unwrap();
    // It closes the second connection, or never accepts it.
    for accepts in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("vmm.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let vmm = thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            let mut head = [0; 16];
            while socket.read_exact(&mut head).is_ok() {
                received.push(u16::from_le_bytes([head[0], head[1]]));
                if accepts && received.ends_with(&[vmm::STATE]) {
                    let (mut second, _) = listener.accept().unwrap();
                    second.read_exact(&mut [0; 2]).unwrap();
                }
                socket.read_exact(&mut vec![0; head[8] as usize | (head[9] as usize) << 8]).unwrap();
                // It may be gone after it has given up.
                let _ = socket.write_all(&request(1, 0));
            }
            received
        });
        let memory = on_demand(Record::Nothing);
        let restored = restore(&socket, &patterns(), memory, Then::Run, TIMEOUTS, runtime.handle());
        assert!(matches!(restored.map(drop), Err(Error::NotOnDemand)));
        assert_eq!(vmm.join().unwrap().last(), Some(&vmm::ABANDON));
    }
}

#[test]
fn a_snapshot_with_other_memory_than_its_configuration_is_not_restored() {
    let runtime = Runtime::new().unwrap();
    let try_it = |snapshot: &Snapshot| {
        let nowhere = Path::new("/nonexistent/vmm.sock");
        let memory = on_demand(Record::Nothing);
        restore(nowhere, snapshot, memory, Then::Run, TIMEOUTS, runtime.handle()).map(drop).unwrap_err()
    };
    let shorter = snapshot(|slot| Pattern::new(0, slot.nr_bytes - 4096));
    assert!(matches!(try_it(&shorter), Error::Slot { slot: 0, .. }));
    let mut missing = patterns();
    missing.memory.remove(&5);
    assert!(matches!(try_it(&missing), Error::Slot { slot: 5, .. }));
    assert!(matches!(try_it(&patterns()), Error::File { .. }));
}

/// A restore whose VMM is this test: both ends of the connection for page faults.
fn faults(snapshot: &Snapshot, on_failure: OnFailure, test: impl FnOnce(UnixStream, &Restored)) {
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
    let memory = Memory::OnDemand { record: Record::Nothing, on_failure };
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

/// What `store` says of a peer that sends `sent` and then nothing more; also that it leaves no files.
fn stored(sent: impl IntoIterator<Item = Sent>) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let (peer, ours) = UnixStream::pair().unwrap();
    let memory: Vec<OwnedFd> = vec![vmm::memory(&SLOTS[0]), vmm::memory(&SLOTS[0]), vmm::memory(&SLOTS[0])];
    // Everything fits into the socket: nobody has to read meanwhile.
    for part in sent {
        match part {
            Sent::Bytes(bytes) => (&peer).write_all(&bytes).unwrap(),
            Sent::With(bytes, nr) => send_with(&peer, &bytes, &memory.iter().take(nr).collect::<Vec<_>>()),
        }
    }
    peer.shutdown(Shutdown::Write).unwrap();
    let error = store(ours, &folder.path().join("snapshot"), PATIENCE).unwrap_err();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{error}");
    // It was told: the last answer is an error, or that it may go.
    let mut answers = Vec::new();
    let _ = (&peer).read_to_end(&mut answers);
    let last = answers.last_chunk::<16>().unwrap();
    assert_eq!(last[0], if matches!(error, Error::Abandoned) { 1 } else { 2 }, "{error}");
    error
}

#[test]
fn snapshots_that_are_sent_wrong_are_refused() {
    let start = || frame(vmm::START, 0);
    let after_start = |more: Vec<Sent>| stored([start()].into_iter().chain(more));
    let one_slot = [SLOTS[0]];
    let good_config = vmm::config(&one_slot);
    let up_to_config = |config: &str, more: Vec<Sent>| {
        after_start(slot_frame(0).into_iter().chain(config_frame(config)).chain(more).collect())
    };

    // Half a handshake.
    assert!(matches!(stored([]), Error::Closed(_)));
    assert!(matches!(stored([Sent::Bytes(vec![1; 7])]), Error::Closed(_)));
    assert!(matches!(after_start(vec![]), Error::Closed(_)));
    // Commands that are none, or come too early.
    assert!(matches!(stored([frame(99, 0)]), Error::Wire(WireError::Command(99))));
    assert!(matches!(stored([frame(vmm::STATE, 0)]), Error::OutOfOrder { .. }));
    assert!(matches!(after_start(vec![frame(vmm::STATE, 0)]), Error::OutOfOrder { .. }));
    assert!(matches!(after_start(vec![frame(vmm::MEMORY, 16)]), Error::OutOfOrder { .. }));
    assert!(matches!(after_start(vec![frame(vmm::COMPLETE, 0)]), Error::OutOfOrder { .. }));
    assert!(matches!(up_to_config(&good_config, vec![frame(vmm::COMPLETE, 0)]), Error::OutOfOrder { .. }));
    assert!(matches!(up_to_config(&good_config, slot_frame(0).into()), Error::OutOfOrder { .. }));
    // Another version.
    let mut later = request(vmm::START, 0);
    later[2] = 1;
    assert!(matches!(stored([Sent::Bytes(later.to_vec())]), Error::Wire(WireError::Version(1))));
    // It gives up.
    assert!(matches!(stored([frame(vmm::ABANDON, 0)]), Error::Abandoned));
    assert!(matches!(up_to_config(&good_config, vec![frame(vmm::ABANDON, 0)]), Error::Abandoned));
    // Lengths that lie.
    assert!(matches!(stored([frame(vmm::START, 1)]), Error::Length { .. }));
    assert!(matches!(after_start(vec![frame(vmm::MEMORY_FD, 5)]), Error::Length { .. }));
    assert!(matches!(after_start(vec![frame(vmm::CONFIG, u64::MAX)]), Error::Length { .. }));
    assert!(matches!(after_start(vec![frame(vmm::CONFIG, 1 << 20)]), Error::Closed(_)));
    assert!(matches!(up_to_config(&good_config, vec![frame(vmm::STATE, 1 << 40)]), Error::Length { .. }));
    // No descriptor, two, three, and one where none belongs.
    let memory = |nr| vec![frame(vmm::MEMORY_FD, 4), Sent::With(0_u32.to_le_bytes().to_vec(), nr)];
    for nr in [0, 2, 3] {
        assert!(matches!(after_start(memory(nr)), Error::Descriptors { .. }), "{nr}");
    }
    assert!(matches!(stored([Sent::With(request(vmm::START, 0).to_vec(), 1)]), Error::Descriptors { .. }));
    // Slots and configurations that do not go together.
    assert!(matches!(after_start(config_frame(&good_config).into()), Error::Slot { slot: 0, .. }));
    assert!(matches!(after_start(slot_frame(0).into_iter().chain(slot_frame(0)).collect()), Error::Slot { .. }));
    let other = vmm::config(&[vmm::Slot { number: 4, ..SLOTS[0] }]);
    assert!(matches!(up_to_config(&other, vec![]), Error::Slot { slot: 0, .. }));
    let longer = vmm::config(&[vmm::Slot { nr_bytes: 4 << 20, ..SLOTS[0] }]);
    assert!(matches!(up_to_config(&longer, vec![]), Error::Slot { slot: 0, .. }));
    for config in ["", "[]", "{}", r#"{"memory_manager_data": {"guest_ram_mappings": 7}}"#] {
        assert!(matches!(up_to_config(config, vec![]), Error::Config(_)), "{config}");
    }
}

#[test]
fn a_peer_that_sends_half_a_frame_and_waits_does_not_hold_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let (peer, ours) = UnixStream::pair().unwrap();
    (&peer).write_all(&request(vmm::START, 0)[..9]).unwrap();
    let error = store(ours, &folder.path().join("snapshot"), Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error}");
}

#[test]
fn a_folder_that_has_something_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("something"), "precious").unwrap();
    let (_peer, ours) = UnixStream::pair().unwrap();
    let error = store(ours, folder.path(), PATIENCE).unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error}");
    assert_eq!(fs::read_to_string(folder.path().join("something")).unwrap(), "precious");
}

#[test]
fn memory_of_one_vm_is_not_that_of_another() {
    let runtime = Runtime::new().unwrap();
    let identity = |snapshot: &Snapshot| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("vmm.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let vmm = thread::spawn(move || answer_all(&listener, 1, &mut Vec::new()));
        let restored = restore(&socket, snapshot, Memory::Before, Then::Run, TIMEOUTS, runtime.handle()).unwrap();
        vmm.join().unwrap();
        restored.memory().identity()
    };
    let one = identity(&patterns());
    assert_eq!(one, identity(&patterns()));
    assert_ne!(one, identity(&snapshot(|slot| Pattern::new(7, slot.nr_bytes))));
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
