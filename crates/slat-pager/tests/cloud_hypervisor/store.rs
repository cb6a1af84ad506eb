//! Snapshots that are taken, and peers that send something else.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use slat_pager::commands::cloud_hypervisor::{self as commands, MemoryComes};
use slat_pager::commands::{CacheArgs, TlsArgs};
use slat_pager::protocol::cloud_hypervisor::folder::{CONFIG, STATE, memory_name};
use slat_pager::protocol::cloud_hypervisor::restore::Then;
use slat_pager::protocol::cloud_hypervisor::store::store;
use slat_pager::protocol::cloud_hypervisor::wire::WireError;
use slat_pager::protocol::cloud_hypervisor::{Error, OnFailure};

use crate::PATIENCE;
use crate::support::{self, may_use_userfaultfd, start_client};
use crate::vmm::{self, SLOTS, Sent, config_frame, frame, request, send_with, slot_frame};

#[test]
fn a_snapshot_is_stored_and_restored_byte_by_byte() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, stored) = (folder.path().join("daemon.sock"), folder.path().join("snapshot"));
    let listener = UnixListener::bind(&socket).unwrap();
    // What a process with this number left behind.
    fs::create_dir(folder.path().join(format!("snapshot.unfinished-{}", std::process::id()))).unwrap();
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
    // Only the folder, the socket, and what was there.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    // A guest's memory is its user's alone.
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&stored), 0o700);
    assert!(fs::read_dir(&stored).unwrap().all(|entry| mode(&entry.unwrap().path()) == 0o600));
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
            // The new socket refuses no connection; a try that is one connection too many would be the snapshot's.
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
            then: Then::Run,
            memory_comes,
            cache: CacheArgs::default(),
            tls: TlsArgs::default(),
            working_set: None,
            on_failure: OnFailure::Refuse,
            timeout: PATIENCE,
        };
        commands::restore(&options).unwrap();
        assert!(client.wait().unwrap().success());
        assert!(working_set.exists());
    }
}

/// Whether a process listens at `path`, without a connection to it: the kernel's list of sockets
/// says it.
fn listens(path: &Path) -> bool {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    // A socket that listens has the flag __SO_ACCEPTCON.
    sockets.lines().any(|line| line.contains(" 00010000 ") && line.ends_with(path.to_str().unwrap()))
}

/// What `store` says of a peer that sends `sent` and then nothing more; also that it leaves no
/// files.
fn stored(sent: impl IntoIterator<Item = Sent>) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let (peer, ours) = UnixStream::pair().unwrap();
    let memory: Vec<OwnedFd> = vec![vmm::memory(&SLOTS[0]), vmm::memory(&SLOTS[0]), vmm::memory(&SLOTS[0])];
    // Everything fits into the socket: nothing has to read meanwhile.
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
    // Lengths that are wrong.
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
