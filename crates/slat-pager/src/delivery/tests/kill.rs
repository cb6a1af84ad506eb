//! Resolvers in other processes, which are killed.

use std::env;
use std::hint;
use std::io;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use rustix::process::{Resource, Rlimit, setrlimit};

use super::*;

/// Marks the test binary that was started again as a resolver: its number of threads, and the
/// microseconds of each fill.
const RESOLVER: &str = "SLAT_TEST_RESOLVER";

/// A resolver in another process, which is killed when this is dropped.
struct Process(Child);

impl Process {
    /// Starts one and attaches it.
    fn attach(world: &World, nr_threads: u32, fill_us: &str) -> Process {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "delivery::tests::kill::resolver_process", "--ignored", "--nocapture"])
            .env(RESOLVER, format!("{nr_threads} {fill_us}"))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let process = Process(child);
        world.delivery.attach(ours).unwrap();
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL. A process that has ended already is only waited for.
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

#[test]
#[ignore = "the other process of the tests in this file; its standard input is a socket"]
fn resolver_process() {
    let Ok(numbers) = env::var(RESOLVER) else { return };
    let (nr_threads, fill_us) = numbers.split_once(' ').unwrap();
    let fill_time = Duration::from_micros(fill_us.parse().unwrap());
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let (_, shards) = Resolver::attach(socket, nr_threads.parse().unwrap(), LIMIT).unwrap();
    let threads: Vec<_> = shards
        .into_iter()
        .map(|mut shard| {
            thread::spawn(move || {
                shard.serve(|request, page| {
                    let page = page.unwrap();
                    let bytes = pattern_bytes(request.page());
                    // Stays in a page that is half filled, so that many are when it is killed.
                    page.copy_from(&bytes[..bytes.len() / 2]);
                    let began = Instant::now();
                    while began.elapsed() < fill_time {
                        hint::spin_loop();
                    }
                    page.copy_from(&bytes);
                    Ok(())
                })
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap().unwrap();
    }
}

#[test]
fn a_resolver_in_another_process_fills_pages() {
    let world = World::new(3, 300);
    let mut process = Process::attach(&world, 2, "0");
    thread::scope(|scope| {
        for mut port in world.ports() {
            let world = &world;
            scope.spawn(move || {
                for page in (u64::from(port.vcpu())..300).step_by(3) {
                    port.fetch(page, 0).unwrap();
                    world.check_filled(page);
                }
            });
        }
    });
    assert_eq!(world.bitmap.count(), 0);
    // It observes the end, and exits without an error.
    drop(world);
    assert!(process.0.wait().unwrap().success());
}

/// How many descriptors a resolver in another process may have open.
const OPEN_FILES: &str = "SLAT_TEST_OPEN_FILES";

/// The exit code of the process that did its work: one that runs no test exits with 0 too.
const DID_ITS_WORK: i32 = 77;

#[test]
#[ignore = "the other process of the test below; its standard input is a socket"]
fn resolver_process_with_few_descriptors() {
    let Ok(nr_files) = env::var(OPEN_FILES) else { return };
    let nr_files: u64 = nr_files.parse().unwrap();
    setrlimit(Resource::Nofile, Rlimit { current: Some(nr_files), maximum: Some(nr_files) }).unwrap();
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let error = Resolver::attach(socket, 1, LIMIT).unwrap_err();
    let AttachError::TooManyOpenFiles { expected: 204, found, limit } = error else { panic!("{error}") };
    // Standard input, output and error are open, and the socket.
    assert!(u64::from(found) <= nr_files - 4 && limit == nr_files, "{error}");
    assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
    std::process::exit(DID_ITS_WORK);
}

#[test]
fn a_resolver_that_may_not_open_all_descriptors_says_why() {
    // Few of the first message's 128, and few of the second's 76.
    for nr_files in ["40", "150"] {
        let world = World::new(200, 64);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut child = Process(
            Command::new(env::current_exe().unwrap())
                .args(["--exact", "delivery::tests::kill::resolver_process_with_few_descriptors", "--ignored"])
                .env(OPEN_FILES, nr_files)
                .stdin(Stdio::from(OwnedFd::from(theirs)))
                .stdout(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let error = world.delivery.attach(ours).unwrap_err();
        assert_eq!(child.0.wait().unwrap().code(), Some(DID_ITS_WORK));
        // It reports that it refuses, or has closed the socket before all was sent.
        let is_right = matches!(error, AttachError::Refused { .. } | AttachError::SocketClosed);
        assert!(is_right, "{error}");
    }
}

/// What a vCPU writes over a page that it was given.
fn mark(page: u64, word: usize) -> u64 {
    !pattern(page, word)
}

/// Waits for something that has to happen.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LIMIT, "{what}");
        thread::yield_now();
    }
}

/// Sets the flag when it is dropped, also in a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// vCPUs take pages in turn, check all of each, write over it, and some turns later check what they
/// wrote: a second fill would overwrite it. Then they discard the page, so that it is missing once
/// more.
#[test]
fn resolvers_killed_at_any_moment_lose_no_request_and_fill_no_page_twice() {
    const NR_VCPUS: u32 = 4;
    const NR_OWN: u64 = 64;
    const NR_KILLS: u32 = 20;
    let world = World::new(NR_VCPUS, u64::from(NR_VCPUS) * NR_OWN);
    let is_over = AtomicBool::new(false);
    let nr_errors: Vec<AtomicU64> = (0..NR_VCPUS).map(|_| AtomicU64::new(0)).collect();
    let nr_pages = AtomicU64::new(0);
    // Outside, so that the last one lives until all vCPUs have their pages.
    let mut process = Some(Process::attach(&world, 2, "5"));
    thread::scope(|scope| {
        for mut port in world.ports() {
            let (world, is_over, nr_errors, nr_pages) = (&world, &is_over, &nr_errors, &nr_pages);
            scope.spawn(move || {
                let first = u64::from(port.vcpu()) * NR_OWN;
                let mut turn = 0;
                while !is_over.load(Ordering::Relaxed) || turn < NR_OWN {
                    let page = first + turn % NR_OWN;
                    let mut result = port.fetch(page, 0);
                    while let Err(error) = result {
                        match error {
                            DeliveryError::ResolverGone { vcpu, page: named, .. } => {
                                assert_eq!((vcpu, named), (port.vcpu(), page));
                                nr_errors[vcpu as usize].fetch_add(1, Ordering::Relaxed);
                            }
                            // On a busy machine the first resolver may be killed before this vCPU
                            // begins.
                            DeliveryError::NoResolver { .. } if turn == 0 => {}
                            error => panic!("{error}"),
                        }
                        assert_eq!(port.in_flight().collect::<Vec<_>>(), [page], "the request was lost");
                        port.resume(LIMIT).unwrap();
                        result = port.wait(page);
                    }
                    world.check_filled(page);
                    for (word, value) in world.page(page).iter().enumerate() {
                        value.store(mark(page, word), Ordering::Relaxed);
                    }
                    nr_pages.fetch_add(1, Ordering::Relaxed);
                    turn += 1;
                    let old = first + (turn + NR_OWN / 2) % NR_OWN;
                    if turn >= NR_OWN / 2 {
                        for (word, value) in world.page(old).iter().enumerate() {
                            assert_eq!(
                                value.swap(0, Ordering::Relaxed),
                                mark(old, word),
                                "page {old} was filled twice"
                            );
                        }
                        assert!(world.bitmap.set(old));
                    }
                }
                let stats = port.stats();
                assert_eq!((stats.double, stats.late, stats.unasked, stats.not_cleared), (0, 0, 0, 0));
            });
        }
        let _set_on_drop = SetOnDrop(&is_over);
        let nr_errors_so_far = || nr_errors.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
        for kill in 0..NR_KILLS {
            let before = nr_pages.load(Ordering::Relaxed);
            wait_until("pages come", || nr_pages.load(Ordering::Relaxed) != before);
            // Spread over 5 ms; what the threads do then is random enough.
            thread::sleep(Duration::from_micros(u64::from(kill) * 2_654_435_761 % 5000));
            let errors_before = nr_errors_so_far();
            drop(process.take());
            wait_until("the session ends", || !world.delivery.is_attached());
            // A vCPU that asks without a resolver gets an error; the next one is attached only
            // after that.
            wait_until("a vCPU gets the error", || nr_errors_so_far() != errors_before);
            process = Some(Process::attach(&world, 1 + kill % 2, "5"));
        }
    });
    // Each vCPU that waited when it was killed got an error.
    let nr_errors: u64 = nr_errors.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    assert!(nr_errors >= u64::from(NR_KILLS), "{nr_errors} errors in {NR_KILLS} kills");
}
