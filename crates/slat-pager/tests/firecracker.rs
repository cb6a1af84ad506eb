//! `slat-pager serve` and monitors that speak Firecracker's protocol to the letter, in processes of
//! their own, with userfaultfds and threads that verify every byte: restored, ballooned, killed and
//! taken over, many at once, and all that can be said wrong.

#![expect(unsafe_code, reason = "memory of a guest that is unmapped")]

#[path = "support/pager.rs"]
mod pager;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use pager::{Client, MIB, Pager, SEED, SIZE, folder, metric, noted, socket};
use registered::{Guest, Kind, PAGE, handshake, send, userfaultfd};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd};
use support::{bytes, client_argument, until};

// What a monitor does.

/// A guest that is restored: two regions in the snapshot's file, as with memory above 4 GiB.
struct Restored {
    low: Guest,
    high: Guest,
    userfaultfd: Userfaultfd,
    socket: UnixStream,
}

/// As `PUT /snapshot/load` does it.
fn load(socket: &Path) -> Option<Restored> {
    let userfaultfd = userfaultfd(0)?;
    let low = Guest::new(Kind::Anonymous, SIZE / 4, 0)?;
    let high = Guest::new(Kind::Thp, SIZE - SIZE / 4, SIZE as u64 / 4)?;
    low.register(&userfaultfd, RegisterMode::MISSING);
    high.register(&userfaultfd, RegisterMode::MISSING);
    let socket = UnixStream::connect(socket).unwrap();
    send(&socket, handshake(&[low.region(), high.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
    Some(Restored { low, high, userfaultfd, socket })
}

fn verify(guest: &Guest, nr_threads: usize) {
    thread::scope(|scope| {
        for nr in 0..nr_threads {
            scope.spawn(move || (nr..guest.nr_pages()).step_by(nr_threads).for_each(|page| guest.verify(page, SEED)));
        }
    });
}

#[test]
#[ignore = "a client that the tests start"]
fn client_verifies_all() {
    let Some(argument) = client_argument() else { return };
    let Some(restored) = load(Path::new(&argument)) else { return };
    verify(&restored.low, 100);
    verify(&restored.high, 200);
    // A balloon takes pages and gives them back.
    restored.high.discard(10..50);
    assert!((10..50).all(|page| restored.high.is_zero(page)));
    println!("step all is right");
    drop(restored.socket);
    drop(restored.userfaultfd);
}

/// Threads read, write and give up pages that are their own, and know what each must be, until this
/// process's input ends.
#[test]
#[ignore = "a client that the tests start"]
fn client_knows_what_its_memory_has() {
    let Some(argument) = client_argument() else { return };
    let Some(restored) = load(Path::new(&argument)) else { return };
    static NR_STEPS: AtomicU64 = AtomicU64::new(0);
    let ends = std::sync::atomic::AtomicBool::new(false);
    let nr_threads = 24;
    thread::scope(|scope| {
        for nr in 0..nr_threads {
            let (guest, ends) = (&restored.high, &ends);
            scope.spawn(move || {
                let own: Vec<usize> = (nr..guest.nr_pages()).step_by(nr_threads).collect();
                let mut model: Vec<Option<u8>> = vec![None; own.len()];
                let check = |page: usize, known: Option<u8>| match known {
                    None => guest.verify(page, SEED),
                    Some(value) => {
                        assert!(guest.page(page).iter().all(|byte| *byte == value), "page {page}: not {value}");
                    }
                };
                let mut random = nr as u64 + 1;
                while !ends.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let index = (random >> 33) as usize % own.len();
                    let page = own[index];
                    match random >> 62 {
                        0 => {
                            guest.discard(page..page + 1);
                            model[index] = Some(0);
                        }
                        1 => {
                            (0..PAGE).for_each(|at| guest.store(page, at, random as u8));
                            model[index] = Some(random as u8);
                        }
                        _ => check(page, model[index]),
                    }
                    if NR_STEPS.fetch_add(1, Ordering::Relaxed) % 100 == 99 {
                        println!("step");
                    }
                }
                own.iter().zip(&model).for_each(|(page, known)| check(*page, *known));
            });
        }
        let _ = std::io::stdin().read(&mut [0]);
        ends.store(true, Ordering::Relaxed);
    });
    verify(&restored.low, 8);
    println!("end all is right");
}

/// Many machines after each other, then many at once.
#[test]
#[ignore = "a client that the tests start"]
fn client_has_many_machines() {
    let Some(argument) = client_argument() else { return };
    let socket = Path::new(&argument);
    let machine = |kind| {
        let userfaultfd = userfaultfd(0).unwrap();
        let guest = Guest::new(kind, MIB, 0).unwrap();
        guest.register(&userfaultfd, RegisterMode::MISSING);
        let socket = UnixStream::connect(socket).unwrap();
        send(&socket, handshake(&[guest.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
        (guest, userfaultfd, socket)
    };
    if userfaultfd(0).is_none() {
        return;
    }
    for nr in 0..1000 {
        let (guest, userfaultfd, socket) = machine(Kind::Anonymous);
        guest.verify(nr % guest.nr_pages(), SEED);
        drop((userfaultfd, socket));
        // SAFETY: the guest is dropped.
        unsafe { guest.unmap(0..guest.nr_pages()) };
    }
    println!("step 1000 one after the other");
    let machines: Vec<_> = (0..200).map(|_| machine(Kind::Anonymous)).collect();
    thread::scope(|scope| {
        for (guest, ..) in &machines {
            scope.spawn(|| (0..guest.nr_pages()).for_each(|page| guest.verify(page, SEED)));
        }
    });
    println!("step 200 at once");
    let _ = std::io::stdin().read(&mut [0]);
}

// What the tests do.

#[test]
fn a_guest_finds_what_its_snapshot_has() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let pager = Pager::start(folder, &[]);
    for _ in 0..3 {
        let mut client = Client::start("client_verifies_all", &socket(folder));
        assert!(client.wait_for("all is right"));
        client.end();
    }
    until("three machines have ended", || metric(folder, "vms") == 0.0);
    assert_eq!(metric(folder, "vms_served_total"), 3.0);
    // A fault brings 64 KiB at most.
    assert!(metric(folder, "faults_total") >= 3.0 * (SIZE >> 16) as f64);
    assert!(metric(folder, "fault_latency_seconds_count") > 0.0);
    assert_eq!(metric(folder, "removed_bytes_total"), 3.0 * 40.0 * PAGE as f64);
    until("their files are gone", || noted(folder) == 0);
    // What a mistake could reach.
    assert_eq!(pager.status("Seccomp:"), "2");
    assert_eq!(pager.status("NoNewPrivs:"), "1");
    assert_eq!(pager.status("CapEff:"), "0000000000000000");
    assert_eq!(pager.status("CapPrm:"), "0000000000000000");
}

#[test]
fn a_pager_that_is_killed_a_hundred_times_loses_nothing() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let mut pager = Pager::start(folder, &["--threads", "2"]);
    let mut client = Client::start("client_knows_what_its_memory_has", &socket(folder));
    until("the machine is noted", || noted(folder) == 1);
    for nr in 0..100 {
        // From time to time a little more happens in between.
        for _ in 0..=nr % 3 {
            assert!(client.wait_for("step"), "after {nr} kills");
        }
        pager.child.kill().unwrap();
        pager.child.wait().unwrap();
        pager = Pager::start(folder, &["--threads", "2"]);
        assert_eq!(metric(folder, "taken_over_total"), 1.0, "after {nr} kills");
    }
    assert!(client.wait_for("step"));
    drop(client.child.stdin.take());
    assert!(client.wait_for("end all is right"));
    client.end();
    until("the machine's file is gone", || noted(folder) == 0);
    drop(pager);
}

#[test]
fn a_pager_that_ends_in_order_leaves_its_machines_to_one_that_stands_by() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let mut first = Pager::start(folder, &[]);
    let mut client = Client::start("client_knows_what_its_memory_has", &socket(folder));
    assert!(client.wait_for("step"));
    // Only one at a time.
    let refused = Pager::command(folder).stderr(Stdio::piped()).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("another pager has the runtime folder"));
    let mut second = Pager { child: Pager::command(folder).arg("--standby").spawn().unwrap() };
    let pid = rustix::process::Pid::from_child(&first.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(first.child.wait().unwrap().success());
    second.wait_until_it_listens(&socket(folder));
    assert_eq!(metric(folder, "taken_over_total"), 1.0);
    assert!((0..50).all(|_| client.wait_for("step")));
    drop(client.child.stdin.take());
    assert!(client.wait_for("end all is right"));
    client.end();
}

#[test]
fn a_monitor_that_ends_without_a_pager_is_forgotten_and_another_snapshot_is_refused() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let pager = Pager::start(folder, &[]);
    let mut client = Client::start("client_knows_what_its_memory_has", &socket(folder));
    assert!(client.wait_for("step"));
    drop(pager);
    // Another snapshot is there, of the same size.
    fs::remove_file(folder.join("memory")).unwrap();
    fs::write(folder.join("memory"), bytes(SEED + 1, 0..SIZE as u64)).unwrap();
    let pager = Pager::start(folder, &[]);
    assert_eq!(metric(folder, "taken_over_total"), 0.0);
    assert_eq!(noted(folder), 1, "it waits");
    drop(pager);
    client.child.kill().unwrap();
    client.child.wait().unwrap();
    let _pager = Pager::start(folder, &[]);
    assert_eq!(noted(folder), 0);
}

#[test]
fn a_thousand_machines_leave_nothing_behind() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let pager = Pager::start(folder, &[]);
    // It has started once it answers, and has all descriptors of its own.
    assert_eq!(metric(folder, "vms"), 0.0);
    let before = pager.nr_descriptors();
    let mut client = Client::start("client_has_many_machines", &socket(folder));
    assert!(client.wait_for("1000 one after the other"));
    assert!(client.wait_for("200 at once"));
    until("1000 machines have ended", || metric(folder, "vms") == 200.0);
    let anonymous: usize = pager.status("RssAnon:").parse().unwrap();
    assert!(anonymous < 64 << 10, "{anonymous} KiB of memory");
    client.end();
    until("200 machines have ended", || metric(folder, "vms") == 0.0);
    until("all descriptors are closed", || pager.nr_descriptors() <= before);
    assert_eq!(metric(folder, "vms_served_total"), 1200.0);
    assert_eq!(noted(folder), 0);
}

#[test]
fn what_is_said_wrong_is_refused_and_disturbs_no_one() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let config = folder.join("pager.toml");
    let text = format!(
        "metrics = 'unix:{0}/metrics'\n[[socket]]\npath = '{0}/pager.sock'\nmemory = '{0}/memory'\n\
         handshake-timeout = '300ms'\n",
        folder.display()
    );
    fs::write(&config, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat-pager"));
    let child = command.args(["serve", "--log", "off", "--config"]).arg(&config).spawn().unwrap();
    let mut pager = Pager { child };
    pager.wait_until_it_listens(&socket(folder));
    let mut client = Client::start("client_knows_what_its_memory_has", &socket(folder));
    assert!(client.wait_for("step"));
    let connect = || UnixStream::connect(socket(folder)).unwrap();
    let userfaultfd = userfaultfd(0).unwrap();
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let good = handshake(&[guest.region()]);
    let mut nr_refused = 0;
    // The other side closes at once, or after its patience.
    let mut is_closed = |mut socket: UnixStream| {
        assert!(matches!(socket.read(&mut [0]), Ok(0) | Err(_)));
        nr_refused += 1;
    };
    let half = connect();
    send(&half, &good.as_bytes()[..good.len() / 2], Some(&userfaultfd)).unwrap();
    is_closed(half);
    is_closed(connect());
    let no_descriptor = connect();
    send(&no_descriptor, good.as_bytes(), None).unwrap();
    is_closed(no_descriptor);
    let endless = connect();
    while send(&endless, &b"[".repeat(1000), None).is_ok() {}
    is_closed(endless);
    // Regions that are wrong: the descriptor is kept, and threads wait, until the monitor ends.
    let mut wrong = Vec::new();
    for change in 0..5 {
        let mut region = guest.region();
        match change {
            0 => region.page_bytes = 5000,
            1 => region.size_bytes = 0,
            2 => region.offset = SIZE as u64,
            3 => region.address = u64::MAX - 4095,
            _ => region.size_bytes = 1 << 62,
        }
        let socket = connect();
        send(&socket, handshake(&[region]).as_bytes(), Some(&userfaultfd)).unwrap();
        wrong.push(socket);
        nr_refused += 1;
    }
    let socket = connect();
    send(&socket, handshake(&[guest.region(), guest.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
    nr_refused += 1;
    until("all are refused", || metric(folder, "refused_total") == f64::from(nr_refused));
    drop((wrong, socket));
    // A machine that connects twice is served by its first connection alone.
    let first = connect();
    send(&first, good.as_bytes(), Some(&userfaultfd)).unwrap();
    guest.verify(0, SEED);
    let nr_noted = noted(folder);
    let second = connect();
    send(&second, good.as_bytes(), Some(&userfaultfd)).unwrap();
    until("the second is refused", || metric(folder, "refused_total") == f64::from(nr_refused + 1));
    guest.verify(100, SEED);
    drop(second);
    guest.verify(200, SEED);
    assert_eq!(noted(folder), nr_noted);
    drop(first);
    until("the first has ended", || noted(folder) == nr_noted - 1);
    // The good one goes on, and others come.
    assert!((0..20).all(|_| client.wait_for("step")));
    let mut other = Client::start("client_verifies_all", &self::socket(folder));
    assert!(other.wait_for("all is right"));
    other.end();
    drop(client.child.stdin.take());
    assert!(client.wait_for("end all is right"));
    client.end();
}

#[test]
fn a_service_manager_passes_the_socket() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let listener: OwnedFd = UnixListener::bind(socket(folder)).unwrap().into();
    // As sd_listen_fds(3) has it: descriptor 3, and the number of the process.
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; exec \"$0\" \"$@\"";
    let pager = Pager::command(folder);
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(pager.get_program()).args(pager.get_args());
    let mut first = Pager { child: command.stdin(listener.try_clone().unwrap()).spawn().unwrap() };
    first.wait_until_it_listens(&socket(folder));
    let mut client = Client::start("client_knows_what_its_memory_has", &socket(folder));
    assert!(client.wait_for("step"));
    drop(first);
    // While no pager runs, a monitor that connects waits.
    let waiting = Client::start("client_verifies_all", &socket(folder));
    let mut second = Pager { child: command.stdin(listener).spawn().unwrap() };
    second.wait_until_it_listens(&socket(folder));
    let mut waiting = waiting;
    assert!(waiting.wait_for("all is right"));
    waiting.end();
    drop(client.child.stdin.take());
    assert!(client.wait_for("end all is right"));
    client.end();
}

#[test]
fn a_working_set_is_recorded_and_replayed() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    fs::create_dir(folder.join("sets")).unwrap();
    let set = folder.join("sets/set");
    let pager = Pager::start(folder, &["--working-set", set.to_str().unwrap()]);
    for nr in 0..2 {
        let mut client = Client::start("client_verifies_all", &socket(folder));
        assert!(client.wait_for("all is right"));
        client.end();
        until("the set is there", || set.exists());
        until("it was replayed", || nr == 0 || metric(folder, "replayed_bytes_total") > 0.0);
    }
    drop(pager);
}
