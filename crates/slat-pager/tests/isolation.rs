//! What one machine, or the disk or server of its snapshot, can do to the pager and to other machines.

#[path = "support/pager.rs"]
mod pager;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use pager::{MIB, Pager, SEED, folder, socket};
use registered::{Guest, Kind, copy_of, handshake, send, userfaultfd};
use slat_pager::source::cache::{BlockCache, CacheOptions, Cached};
use slat_pager::source::{Identity, Source, SourceError};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd};
use slat_pager::vm::fetch::Budget;
use slat_pager::vm::state::State;
use slat_pager::vm::{Options, Region, Regions, Vm};
use support::Pattern;

/// More than anything here takes that is not waited for in vain.
const LONG: Duration = Duration::from_secs(20);

/// A snapshot whose server never answers.
#[derive(Debug)]
struct Silent(Pattern);

impl Source for Silent {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn identity(&self) -> Identity {
        Identity::new("silent", [])
    }

    fn granule_bytes(&self) -> u64 {
        self.0.granule_bytes()
    }

    fn read<'a>(&'a self, _: u64, _: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        std::future::pending().boxed()
    }
}

fn served(guest: &Guest, userfaultfd: &Userfaultfd, source: Arc<dyn Source>, options: Options) -> Vm {
    let regions = Regions::new(&[guest.region()], source.size_bytes()).unwrap();
    let state = State::anonymous(options.nr_threads.get(), regions.nr_words()).unwrap();
    Vm::attach(Userfaultfd::from_fd(copy_of(userfaultfd)).unwrap(), regions, source, state, options).unwrap()
}

/// How many descriptors of this process are of the file of `userfaultfd`.
fn nr_copies(userfaultfd: &Userfaultfd) -> usize {
    let of_file = rustix::fs::fstat(userfaultfd.as_fd()).unwrap();
    let descriptors =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| rustix::fs::stat(entry.ok()?.path()).ok());
    descriptors.filter(|stat| (stat.st_dev, stat.st_ino) == (of_file.st_dev, of_file.st_ino)).count()
}

#[test]
fn regions_at_addresses_that_no_process_has_leave_no_descriptor() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let region = Region { address: 1 << 63, size_bytes: MIB as u64, offset: 0, page_bytes: 4096 };
    let source: Arc<dyn Source> = Arc::new(Pattern::new(SEED, MIB as u64));
    slat_pager::attach(copy_of(&userfaultfd), &[region], source).expect_err("the kernel has no such address");
    assert_eq!(nr_copies(&userfaultfd), 1);
}

#[test]
fn pages_that_take_more_than_a_machine_may_read_are_refused() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let region = Region { address: 1 << 40, size_bytes: 1 << 30, offset: 0, page_bytes: 1 << 30 };
    let source: Arc<dyn Source> = Arc::new(Pattern::new(SEED, 1 << 30));
    let refused = slat_pager::attach(copy_of(&userfaultfd), &[region], source).expect_err("a page of 1 GiB");
    assert!(refused.to_string().contains("1073741824 bytes"), "{refused}");
    assert_eq!(nr_copies(&userfaultfd), 1);
}

/// The replays of a machine whose server does not answer have all the memory that replays may have.
/// Those of another machine wait for it; its faults do not.
#[test]
fn a_fault_does_not_wait_for_a_replay_that_waits_for_memory() {
    const GRANULE: u64 = 64 << 10;
    let budget = Budget::new(16 * GRANULE);
    let options = || {
        let mut options = Options::default();
        options.limits.budget = budget.clone();
        options
    };
    let (Some(of_silent), Some(of_other)) = (userfaultfd(0), userfaultfd(0)) else { return };
    let [silent, other] = [&of_silent, &of_other].map(|userfaultfd| {
        let guest = Arc::new(Guest::new(Kind::Anonymous, MIB, 0).unwrap());
        guest.register(userfaultfd, RegisterMode::MISSING);
        guest
    });
    let source: Arc<dyn Source> = Arc::new(Silent(Pattern::new(SEED, MIB as u64)));
    let silent = served(&silent, &of_silent, source, options());
    let replays: Vec<_> = (0..4)
        .map(|nr| {
            let populator = silent.populator();
            thread::spawn(move || populator.populate(nr * GRANULE..(nr + 1) * GRANULE).unwrap())
        })
        .collect();
    let start = Instant::now();
    while budget.free_bytes() != 12 * GRANULE {
        assert!(start.elapsed() < LONG, "{} bytes are free", budget.free_bytes());
        thread::yield_now();
    }
    let vm = served(&other, &of_other, Arc::new(Pattern::new(SEED, MIB as u64)), options());
    let populator = vm.populator();
    let waiting = thread::spawn(move || populator.populate(0..MIB as u64).unwrap());
    thread::sleep(Duration::from_millis(300));
    assert!(!waiting.is_finished(), "there is no memory for it");
    let (touched, has_touched) = mpsc::channel();
    thread::spawn({
        let other = Arc::clone(&other);
        move || touched.send(other.is_readable(0))
    });
    assert_eq!(has_touched.recv_timeout(LONG), Ok(true), "the fault waits for the replay");
    other.verify(0, SEED);
    // The replay goes on once there is memory.
    drop(silent);
    replays.into_iter().for_each(|replay| assert_eq!(replay.join().unwrap(), 0));
    assert_eq!(waiting.join().unwrap(), MIB as u64 - GRANULE);
    support::until_present(MIB as u64, &vm);
    drop(vm);
    assert_eq!(budget.free_bytes(), 16 * GRANULE);
}

/// Reads of a snapshot whose server does not answer have all of the cache's bytes that they can get.
#[tokio::test]
async fn a_server_that_does_not_answer_leaves_memory_of_the_cache_to_others() {
    const GRANULE: u64 = 64 << 10;
    let options = CacheOptions { fetched_bytes: 8 * GRANULE, ..CacheOptions::default() };
    let cache = BlockCache::new(&options).unwrap();
    let silent = Arc::new(Cached::new(Arc::new(Silent(Pattern::new(SEED, MIB as u64))), Arc::clone(&cache)));
    for nr in 0..16 {
        let silent = Arc::clone(&silent);
        tokio::spawn(async move { silent.read_shared(nr * GRANULE..(nr + 1) * GRANULE).await });
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let other = Cached::new(Arc::new(Pattern::new(SEED, MIB as u64)), cache);
    for nr in 0..16 {
        let read = other.read_shared(nr * GRANULE..(nr + 1) * GRANULE);
        let bytes = tokio::time::timeout(LONG, read).await.expect("it waits for the other's server").unwrap();
        assert!(support::wrong(SEED, nr * GRANULE, &bytes).is_none());
    }
}

/// Whether the pager answers whoever asks for its metrics.
fn answers(folder: &Path) -> bool {
    let mut stream = UnixStream::connect(folder.join("metrics")).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: pager\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).is_ok_and(|_| text.contains("slat_pager_vms"))
}

#[test]
fn a_working_set_on_a_disk_that_hangs_holds_only_its_own_machines() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    // What opens it waits for a writer.
    let set = folder.join("set");
    rustix::fs::mknodat(rustix::fs::CWD, &set, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let _pager = Pager::start(folder, &["--working-set", set.to_str().unwrap()]);
    let nr_machines = 4 * thread::available_parallelism().unwrap().get();
    let machines: Vec<_> = (0..nr_machines)
        .map(|_| {
            let userfaultfd = userfaultfd(0).unwrap();
            let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
            guest.register(&userfaultfd, RegisterMode::MISSING);
            let socket = UnixStream::connect(socket(folder)).unwrap();
            send(&socket, handshake(&[guest.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
            (guest, userfaultfd, socket)
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    assert!(answers(folder), "all threads of the pager wait for the disk");
    // It answers at last: its machines are served.
    let all_are_verified = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !all_are_verified.load(Ordering::Relaxed) {
                let writer = File::options().read(true).write(true).open(&set).unwrap();
                thread::sleep(Duration::from_millis(5));
                drop(writer);
            }
        });
        machines.iter().for_each(|(guest, ..)| guest.verify(0, SEED));
        all_are_verified.store(true, Ordering::Relaxed);
    });
}

/// A snapshot that cannot be opened keeps the machines of others neither from a first pager nor from
/// a successor. It is served once it is there.
#[test]
fn a_snapshot_that_is_not_there_holds_only_its_own_machines() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let (late, late_socket) = (folder.join("late"), folder.join("late.sock"));
    let config = format!(
        "metrics = 'unix:{0}/metrics'\nruntime-folder = '{0}/pager.sock.state'\nsandbox = 'off'\n\
         [[socket]]\npath = '{0}/late.sock'\nmemory = '{0}/late'\n\
         [[socket]]\npath = '{0}/pager.sock'\nmemory = '{0}/memory'\n",
        folder.display()
    );
    std::fs::write(folder.join("pager.toml"), config).unwrap();
    let start = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slat-pager"));
        let child = command.args(["serve", "--log", "off", "--config"]).arg(folder.join("pager.toml")).spawn().unwrap();
        let mut pager = Pager { child };
        pager.wait_until_it_listens(&socket(folder));
        pager
    };
    let connect = |to: &Path| {
        let userfaultfd = userfaultfd(0).unwrap();
        let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
        guest.register(&userfaultfd, RegisterMode::MISSING);
        let stream = UnixStream::connect(to).unwrap();
        send(&stream, handshake(&[guest.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
        (guest, userfaultfd, stream)
    };
    let pager = start();
    let (guest, ..) = &connect(&socket(folder));
    guest.verify(0, SEED);
    drop(pager);
    let _successor = start();
    // Farther than what is filled around a fault.
    guest.verify(100, SEED);
    assert_eq!(pager::metric(folder, "taken_over_total"), 1.0);
    // It waits in the socket until the snapshot is there.
    let (waiting, ..) = &connect(&late_socket);
    std::fs::copy(folder.join("memory"), &late).unwrap();
    waiting.verify(0, SEED);
}
