//! Snapshots that are given back, and VMMs that do not take them.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use slat_pager::protocol::cloud_hypervisor::Error;
use slat_pager::protocol::cloud_hypervisor::restore::{Memory, Record, Snapshot, Then, Timeouts, restore, whole};
use slat_pager::source::cache::{BlockCache, CacheOptions, Cached};
use slat_pager::working_set::WorkingSet;
use slat_pager::working_set::replay::{Progress, replay, steps};
use tokio::runtime::Runtime;

use crate::support::{Pattern, may_use_userfaultfd};
use crate::vmm::{self, Between, SLOTS, request};
use crate::{PATIENCE, TIMEOUTS, on_demand, patterns, restore_in_client, snapshot};

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
fn the_vmms_own_sweep_is_served_beside_the_faults_of_its_guest() {
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
fn blocks_behind_those_of_faults_are_read_ahead() {
    if !may_use_userfaultfd() {
        return;
    }
    let cache = BlockCache::new(&CacheOptions::default()).unwrap();
    let mut cached = patterns();
    for source in cached.memory.values_mut() {
        *source = Arc::new(Cached::new(Arc::clone(source), Arc::clone(&cache)));
    }
    restore_in_client(&cached, on_demand(Record::Nothing), Between::Wait, |_| {});
    let figures = cache.figures();
    assert!(figures.nr_read_ahead > 0 && figures.nr_memory_hits > 0, "{figures:?}");
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
    answer_each(listener.accept().unwrap().0, status, received);
}

fn answer_each(mut socket: UnixStream, status: u16, received: &mut Vec<u16>) {
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

#[test]
fn memory_is_filled_once_the_vmm_is_connected() {
    let runtime = Runtime::new().unwrap();
    // A read of this source would be the error.
    let broken = snapshot(|slot| Pattern { broken: Some(0), ..Pattern::new(0, slot.nr_bytes) });
    let nowhere = Path::new("/nonexistent/vmm.sock");
    let restored = restore(nowhere, &broken, Memory::Before, Then::Run, TIMEOUTS, runtime.handle());
    assert!(matches!(restored.map(drop), Err(Error::File { .. })));
}

#[test]
fn a_vmm_that_listens_no_more_is_not_waited_for_again() {
    let runtime = Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmm.sock");
    let timeouts = Timeouts { listen: PATIENCE, ..TIMEOUTS };
    let listener = UnixListener::bind(&socket).unwrap();
    let vmm = thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        drop(listener);
        answer_each(socket, 1, &mut Vec::new());
    });
    let memory = on_demand(Record::Nothing);
    let restored = restore(&socket, &patterns(), memory, Then::Run, timeouts, runtime.handle());
    assert!(matches!(restored.map(drop), Err(Error::Io { .. })));
    vmm.join().unwrap();
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
