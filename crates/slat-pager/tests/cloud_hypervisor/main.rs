//! Cloud Hypervisor's migration protocol, by clients of our own: a VMM in a process of its own with
//! a real userfaultfd and threads that touch all its memory, and peers that do everything wrong.

mod faults;
mod huge_pages;
mod restore;
mod store;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/cloud_hypervisor.rs"]
mod vmm;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use slat_pager::protocol::cloud_hypervisor::OnFailure;
use slat_pager::protocol::cloud_hypervisor::restore::{
    Memory, Record, Restored, Snapshot, Then, Timeouts, restore as give_back,
};
use slat_pager::source::Source;
use tokio::runtime::Runtime;

use support::{Pattern, client_argument, start_client};
use vmm::{Between, HUGE_SLOTS, SLOTS};

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(600);
/// Of a VMM that listens when it is started.
const TIMEOUTS: Timeouts = Timeouts { listen: Duration::ZERO, frame: PATIENCE };

fn snapshot(pattern: impl Fn(&vmm::Slot) -> Pattern) -> Snapshot {
    snapshot_of(&SLOTS, pattern)
}

fn snapshot_of(slots: &[vmm::Slot], pattern: impl Fn(&vmm::Slot) -> Pattern) -> Snapshot {
    let memory = slots.iter().map(|slot| (slot.number, Arc::new(pattern(slot)) as Arc<dyn Source>));
    Snapshot { config: vmm::config(slots).into_bytes(), state: b"the devices".to_vec(), memory: memory.collect() }
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
fn client_sends_huge_pages() {
    let Some(socket) = client_argument() else { return };
    vmm::send_snapshot(&UnixStream::connect(socket).unwrap(), &HUGE_SLOTS, b"the devices");
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
    // It may have made the socket, and not listen yet.
    let timeouts = Timeouts { listen: PATIENCE, frame: PATIENCE };
    let restored = give_back(&socket, snapshot, memory, Then::Run, timeouts, runtime.handle()).unwrap();
    while_it_runs(&restored);
    assert!(client.wait().unwrap().success());
    restored.wait().unwrap();
}
