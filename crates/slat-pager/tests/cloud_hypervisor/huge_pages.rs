//! VMs whose memory is of huge pages: filled whole, in a memfd of them, which a real userfaultfd maps.
//! Where there are no huge pages, and none can be had, each test says so and is skipped.

use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use slat_pager::protocol::cloud_hypervisor::folder::memory_name;
use slat_pager::protocol::cloud_hypervisor::restore::{Record, whole};
use slat_pager::protocol::cloud_hypervisor::store::store;
use slat_pager::snapshot::{OpenWith, SnapshotName};
use slat_pager::source::cache::{BlockCache, CacheOptions, Cached};
use slat_pager::working_set::replay::{Progress, replay};

use crate::support::{self, Pattern, may_use_userfaultfd, start_client};
use crate::vmm::{self, Between, HUGE_SLOTS};
use crate::{PATIENCE, on_demand, restore_in_client, snapshot_of};

const NUMBER: &str = "/proc/sys/vm/nr_hugepages";
/// The slots have six; the part of the file before the third slot has another.
const NR_NEEDED: u64 = 7;

/// One test at a time has the machine's huge pages.
static ONE: Mutex<()> = Mutex::new(());

/// Free huge pages, until this is dropped.
struct HugePages {
    before: u64,
    _one: MutexGuard<'static, ()>,
}

impl HugePages {
    /// `None`: they cannot be had, which is said.
    fn take() -> Option<HugePages> {
        let one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let number = || fs::read_to_string(NUMBER).ok()?.trim().parse::<u64>().ok();
        let size = fs::read_to_string("/proc/meminfo").ok()?;
        let is_2m = size.lines().any(|line| line.starts_with("Hugepagesize:") && line.ends_with(" 2048 kB"));
        let Some(before) = number().filter(|_| is_2m) else {
            println!("skipped: this kernel has no huge pages of 2 MiB");
            return None;
        };
        let taken = HugePages { before, _one: one };
        // Without the right to that, there may be enough.
        let _ = fs::write(NUMBER, (before + NR_NEEDED).to_string());
        let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").ok()?;
        let nr_free: u64 = free.trim().parse().ok()?;
        if nr_free < NR_NEEDED {
            println!("skipped: {nr_free} huge pages are free (vm.nr_hugepages), and the test needs {NR_NEEDED}");
            return None;
        }
        Some(taken)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(NUMBER, self.before.to_string());
    }
}

fn pattern(slot: &vmm::Slot) -> Pattern {
    Pattern::new(vmm::seed(slot.number), slot.nr_bytes)
}

#[test]
fn a_vm_of_huge_pages_is_restored_on_demand_and_replayed() {
    let Some(_huge_pages) = may_use_userfaultfd().then(HugePages::take).flatten() else { return };
    restore_in_client(
        &snapshot_of(&HUGE_SLOTS, pattern),
        on_demand(Record::UpTo(1 << 30)),
        Between::Wait,
        |restored| {
            // One for each page: all 512 parts come with it.
            while restored.memory().present_bytes() < restored.memory().size_bytes() {
                std::thread::yield_now();
            }
            assert_eq!(restored.counters().nr_faults.load(Ordering::Relaxed), 6);
            // In whatever order they came.
            let mut pages = restored.recorder().unwrap().working_set().pages;
            pages.sort_unstable();
            assert_eq!(pages, [0, 512, 1024, 1536, 2048, 2560]);
        },
    );
    restore_in_client(&snapshot_of(&HUGE_SLOTS, pattern), on_demand(Record::Nothing), Between::Sweep, |restored| {
        let memory = &**restored.memory();
        replay(&whole(memory), memory, 4, &Progress::default()).unwrap();
        assert_eq!(memory.present_bytes(), memory.size_bytes());
    });
}

#[test]
fn huge_pages_come_from_a_cache_and_from_files_that_store_has_made() {
    let Some(_huge_pages) = may_use_userfaultfd().then(HugePages::take).flatten() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (socket, stored) = (folder.path().join("daemon.sock"), folder.path().join("snapshot"));
    let listener = UnixListener::bind(&socket).unwrap();
    let mut client = start_client("client_sends_huge_pages", socket.to_str().unwrap());
    store(listener.accept().unwrap().0, &stored, PATIENCE).unwrap();
    assert!(client.wait().unwrap().success());
    let mut snapshot = snapshot_of(&HUGE_SLOTS, pattern);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for slot in &HUGE_SLOTS {
        let path = stored.join(memory_name(slot.number));
        assert_eq!(support::wrong(vmm::seed(slot.number), 0, &fs::read(&path).unwrap()), None);
        let name: SnapshotName = path.to_str().unwrap().parse().unwrap();
        let source = runtime.block_on(name.open(&OpenWith::default())).unwrap();
        snapshot.memory.insert(slot.number, source);
    }
    restore_in_client(&snapshot, on_demand(Record::Nothing), Between::Wait, |_| {});
    let cache = BlockCache::new(&CacheOptions::default()).unwrap();
    let mut cached = snapshot_of(&HUGE_SLOTS, pattern);
    for source in cached.memory.values_mut() {
        *source = Arc::new(Cached::new(Arc::clone(source), Arc::clone(&cache)));
    }
    restore_in_client(&cached, on_demand(Record::Nothing), Between::Wait, |_| {});
}
