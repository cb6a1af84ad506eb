//! Handshakes with any other side, and files with wrong properties.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;

use super::super::handshake::{self as messages, Deadline, Hello, MAGIC, VERSION, Welcome};
use super::super::ring::RingLayout;
use super::*;
use crate::linux::descriptors::{memory_file, sealed_file};

/// For a silent side: nothing has to happen within it.
const SHORT: Duration = Duration::from_millis(200);

/// What the VMM returns for a resolver that does this.
fn attach_to(resolver: impl FnOnce(UnixStream) + Send) -> AttachError {
    attach_within(LIMIT, resolver)
}

fn attach_within(timeout: Duration, resolver: impl FnOnce(UnixStream) + Send) -> AttachError {
    let world = World::with(2, 64, |config| config.timeout = timeout);
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || resolver(theirs));
        let error = world.delivery.attach(ours).unwrap_err();
        assert!(!world.delivery.is_attached());
        error
    })
}

#[test]
fn a_client_that_is_no_resolver_is_refused() {
    let error = attach_to(|mut stream| stream.write_all(b"GET / HTTP/1.1\r\nHost: none\r\n\r\n").unwrap());
    assert!(matches!(error, AttachError::BadMagic { .. }), "{error}");
    let error = attach_to(drop);
    assert!(matches!(error, AttachError::SocketClosed), "{error}");
    let error = attach_within(SHORT, |mut stream| {
        // The VMM may have gone already.
        let _ = stream.write_all(&MAGIC.to_ne_bytes());
        // Silent until the other side hangs up.
        let _ = stream.read(&mut [0]);
    });
    assert!(matches!(error, AttachError::TimedOut { .. }), "{error}");
}

#[test]
fn a_resolver_of_another_version_or_with_too_many_threads_is_refused() {
    let deadline = Deadline::new(LIMIT);
    let error = attach_to(|stream| {
        messages::send_hello(&stream, Hello { version: VERSION + 1, nr_threads: 1 }, deadline).unwrap();
        let welcome = messages::receive_welcome(&stream, deadline).unwrap();
        assert_eq!((welcome.version, welcome.status), (VERSION, messages::REFUSED_VERSION));
    });
    let theirs = VERSION + 1;
    assert!(matches!(error, AttachError::Version { ours: VERSION, theirs: t } if t == theirs), "{error}");
    for nr_threads in [0, 3] {
        let error = attach_to(|stream| {
            let refused = Resolver::attach(stream, nr_threads, LIMIT).unwrap_err();
            assert!(matches!(refused, AttachError::BadThreads { nr_vcpus: 2, .. }), "{refused}");
        });
        assert!(matches!(error, AttachError::BadThreads { nr_vcpus: 2, .. }), "{error}");
    }
}

#[test]
fn a_resolver_that_refuses_or_is_ready_for_another_epoch_is_not_attached() {
    let deadline = Deadline::new(LIMIT);
    let answer = |epoch: u64, code: u32| {
        attach_to(move |stream| {
            messages::send_hello(&stream, Hello { version: VERSION, nr_threads: 1 }, deadline).unwrap();
            let welcome = messages::receive_welcome(&stream, deadline).unwrap();
            messages::receive_descriptors(&stream, welcome.nr_descriptors, deadline).unwrap();
            messages::send_ready(&stream, epoch, code, deadline).unwrap();
            let _ = (&stream).read(&mut [0]);
        })
    };
    let error = answer(1, 9);
    assert!(matches!(error, AttachError::Refused { code: 9 }), "{error}");
    let error = answer(2, 0);
    assert!(matches!(error, AttachError::BadNumbers { .. }), "{error}");
}

#[test]
fn one_resolver_at_a_time() {
    let world = World::new(2, 64);
    let (_, shards) = world.attach(2);
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert!(matches!(world.delivery.attach(ours), Err(AttachError::AlreadyAttached { epoch: 1 })));
    // One of its threads ends: the whole resolver is over.
    drop(shards.into_iter().next());
    while world.delivery.is_attached() {
        thread::yield_now();
    }
    assert_eq!(world.attach(1).0.epoch(), 2);
}

/// What a VMM sends; a test spoils some of it.
struct Sent {
    welcome: Welcome,
    files: Vec<OwnedFd>,
}

/// What a resolver returns for a VMM that sends this.
fn resolver_of(spoil: impl FnOnce(&mut Sent)) -> Result<(), AttachError> {
    let layout = RingLayout { nr_shards: 1, nr_waiters: 2, nr_vcpus: 2, nr_entries: 4 };
    let file = |size_bytes| sealed_file(c"slat-test", size_bytes).unwrap();
    let mut files = vec![file(layout.size_bytes()), file(PAGE_SIZE), file(64 * PAGE_SIZE)];
    files.extend((0..3).map(|_| EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap()));
    let welcome = Welcome {
        version: VERSION,
        status: 0,
        epoch: 1,
        layout,
        nr_pages: 64,
        page_bytes: PAGE_SIZE,
        memory_offset_bytes: 0,
        memory_bytes: 64 * PAGE_SIZE,
        nr_descriptors: files.len() as u64,
    };
    let mut sent = Sent { welcome, files };
    spoil(&mut sent);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let deadline = Deadline::new(LIMIT);
    let resolver = thread::spawn(move || Resolver::attach(theirs, 1, LIMIT).map(|_| ()));
    messages::receive_hello(&ours, deadline).unwrap();
    messages::send_welcome(&ours, sent.welcome, deadline).unwrap();
    let files: Vec<_> = sent.files.iter().map(AsFd::as_fd).collect();
    // A resolver that has refused the welcome has hung up.
    let _ = messages::send_descriptors(&ours, &files, deadline);
    let _ = ours.shutdown(Shutdown::Write);
    let result = resolver.join().unwrap();
    if let Ok(()) = messages::receive_ready(&ours, 1, deadline) {
        assert!(result.is_ok());
    }
    result
}

fn unsealed(size_bytes: u64) -> OwnedFd {
    let path = std::env::temp_dir().join(format!("slat-unsealed-{}-{:?}", std::process::id(), thread::current().id()));
    let file = std::fs::File::create_new(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(size_bytes).unwrap();
    file.into()
}

#[test]
fn a_resolver_accepts_a_valid_welcome() {
    resolver_of(|_| {}).unwrap();
}

#[test]
fn missing_descriptors_are_an_error() {
    for (announced, sent) in [(6, 5), (5, 6), (5, 5), (7, 7), (6, 0)] {
        let error = resolver_of(|message| {
            message.welcome.nr_descriptors = announced;
            let spare = EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
            message.files.push(spare);
            message.files.truncate(sent);
        })
        .unwrap_err();
        // Those that wait for more see the end of the socket.
        let is_right = matches!(error, AttachError::MissingDescriptors { .. } | AttachError::SocketClosed);
        assert!(is_right, "{announced} announced, {sent} sent: {error}");
    }
    let error = resolver_of(|message| message.welcome.nr_descriptors = 1 << 40).unwrap_err();
    assert!(matches!(error, AttachError::BadNumbers { .. }), "{error}");
}

#[test]
fn impossible_numbers_and_sizes_are_refused() {
    type Spoil = fn(&mut Sent);
    let numbers: [Spoil; 7] = [
        |sent| sent.welcome.layout.nr_vcpus = 0,
        |sent| sent.welcome.layout.nr_vcpus = u32::MAX,
        |sent| sent.welcome.layout.nr_entries = 3,
        |sent| sent.welcome.layout.nr_shards = 2,
        |sent| sent.welcome.page_bytes = 8192,
        |sent| (sent.welcome.memory_offset_bytes, sent.welcome.memory_bytes) = (1, PAGE_SIZE),
        |sent| sent.welcome.memory_bytes -= 8,
    ];
    for (index, spoil) in numbers.into_iter().enumerate() {
        let error = resolver_of(spoil).unwrap_err();
        assert!(matches!(error, AttachError::BadNumbers { .. }), "{index}: {error}");
    }
    let sizes: [Spoil; 4] = [
        |sent| sent.welcome.layout.nr_entries = 256,
        |sent| sent.welcome.memory_bytes += 1,
        |sent| sent.welcome.memory_offset_bytes = PAGE_SIZE,
        |sent| sent.welcome.memory_offset_bytes = u64::MAX,
    ];
    for (index, spoil) in sizes.into_iter().enumerate() {
        let error = resolver_of(spoil).unwrap_err();
        assert!(matches!(error, AttachError::WrongSize { .. }), "{index}: {error}");
    }
    let error = resolver_of(|sent| sent.welcome.nr_pages = 64 * PAGE_SIZE).unwrap_err();
    assert!(matches!(error, AttachError::WrongSize { what: "userfault bitmap", .. }), "{error}");
    let error = resolver_of(|sent| sent.welcome.version += 1).unwrap_err();
    assert!(matches!(error, AttachError::Version { .. }), "{error}");
}

#[test]
fn files_without_seals_are_refused() {
    for (index, what) in [(0, "file of rings"), (2, "file of guest memory")] {
        let error = resolver_of(|sent| sent.files[index] = unsealed(64 * PAGE_SIZE)).unwrap_err();
        assert!(matches!(error, AttachError::NotSealed { what: w } if w == what), "{error}");
    }
    let error = resolver_of(|sent| sent.files[1] = unsealed(PAGE_SIZE)).unwrap_err();
    assert!(matches!(error, AttachError::NotSealed { what: "userfault bitmap" }), "{error}");
}

#[test]
fn bitmaps_without_seals_or_too_short_are_refused() {
    assert!(matches!(SharedBitmap::new(0), Err(DeliveryConfigError::BadBitmap { nr_pages: 0 })));
    assert!(matches!(SharedBitmap::new(u64::MAX), Err(DeliveryConfigError::BadBitmap { .. })));
    assert!(matches!(SharedBitmap::from_fd(unsealed(PAGE_SIZE), 64), Err(AttachError::NotSealed { .. })));
    let short = sealed_file(c"slat-test", 8).unwrap();
    let refused = SharedBitmap::from_fd(short, 65);
    assert!(matches!(refused, Err(AttachError::WrongSize { expected_bytes: 16, found_bytes: 8, .. })), "{refused:?}");
    let bitmap = SharedBitmap::new(65).unwrap();
    let again = SharedBitmap::from_fd(bitmap.as_fd().try_clone_to_owned().unwrap(), 65).unwrap();
    bitmap.set_all();
    assert_eq!((again.count(), again.words().len()), (65, 2));
    assert!(again.clear(64) && !again.clear(64) && !bitmap.is_set(64));
    assert!(bitmap.set(64) && !bitmap.set(64) && again.is_set(64));
    assert!(!bitmap.set(65) && !bitmap.is_set(65) && !bitmap.clear(65));
    // The seal holds: the file cannot be cut.
    let file = std::fs::File::from(bitmap.as_fd().try_clone_to_owned().unwrap());
    assert!(file.set_len(0).is_err() && file.set_len(1 << 20).is_err());
}

#[test]
fn impossible_delivery_configurations_are_refused() {
    let bitmap = Arc::new(SharedBitmap::new(64).unwrap());
    let made = |change: &dyn Fn(&mut DeliveryConfig)| {
        let mut config = DeliveryConfig::new(2, Arc::clone(&bitmap));
        change(&mut config);
        Delivery::new(config).map(|_| ()).unwrap_err()
    };
    let counts: [fn(&mut DeliveryConfig); 5] = [
        |config| config.nr_vcpus = 0,
        |config| config.nr_vcpus = 5000,
        |config| config.nr_waiters = 0,
        |config| config.nr_waiters = 3,
        |config| config.ring_entries = 12,
    ];
    for change in counts {
        assert!(matches!(made(&change), DeliveryConfigError::BadCounts { .. }));
    }
    let memory = |file, offset_bytes, size_bytes| Some(SharedMemoryFile { file, offset_bytes, size_bytes });
    let error = made(&|config| config.memory = memory(unsealed(64 * PAGE_SIZE), 0, 64 * PAGE_SIZE));
    assert!(matches!(error, DeliveryConfigError::UnsealedMemory { .. }), "{error}");
    for (offset_bytes, size_bytes) in
        [(0, 65 * PAGE_SIZE), (1, PAGE_SIZE), (0, PAGE_SIZE + 8), (PAGE_SIZE, 66 * PAGE_SIZE), (0, 0), (u64::MAX, 1)]
    {
        let error = made(&|config| config.memory = memory(guest_memory(66).0, offset_bytes, size_bytes));
        assert!(matches!(error, DeliveryConfigError::BadMemory { .. }), "{error}");
    }
    let delivery = Delivery::new(DeliveryConfig::new(2, Arc::clone(&bitmap))).unwrap();
    let _port = delivery.take_port(1).unwrap();
    assert!(matches!(delivery.take_port(1), Err(DeliveryConfigError::Taken { what: "vCPU", number: 1 })));
    assert!(matches!(delivery.take_waiter(2), Err(DeliveryConfigError::Taken { what: "waiter", number: 2 })));
}

/// More descriptors than go into one message.
#[test]
fn four_hundred_vcpus_attach() {
    let world = World::new(400, 400);
    let mut shards = world.attach(1).1;
    assert!(world.delivery.shared.wakers.iter().all(|waker| waker.as_fd().as_raw_fd() >= 0));
    let mut ports = world.ports();
    thread::scope(|scope| {
        let mut shard = shards.remove(0);
        scope.spawn(move || shard.serve(fill).unwrap());
        for (page, port) in ports.iter_mut().enumerate() {
            port.request(page as u64, 0).unwrap();
        }
        for (page, port) in ports.iter_mut().enumerate() {
            port.wait(page as u64).unwrap();
            world.check_filled(page as u64);
        }
        world.delivery.detach();
    });
}

#[test]
fn a_nonblocking_stream_is_accepted() {
    let world = World::new(1, 64);
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let resolver = thread::spawn(move || Resolver::attach(theirs, 1, LIMIT));
    world.delivery.attach(ours).unwrap();
    resolver.join().unwrap().unwrap();
}

#[test]
fn an_endless_timeout_is_accepted() {
    let world = World::with(1, 64, |config| config.timeout = Duration::MAX);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let resolver = thread::spawn(move || Resolver::attach(theirs, 1, Duration::MAX));
    world.delivery.attach(ours).unwrap();
    let mut shard = resolver.join().unwrap().unwrap().1.remove(0);
    let mut port = world.ports().remove(0);
    thread::scope(|scope| {
        scope.spawn(move || shard.serve(fill).unwrap());
        port.resume(Duration::MAX).unwrap();
        port.fetch(3, 0).unwrap();
        world.delivery.detach();
    });
}

#[test]
fn refused_memory_is_left_unsealed() {
    let file = memory_file(c"memory", PAGE_SIZE).unwrap();
    let mut config = DeliveryConfig::new(1, Arc::new(SharedBitmap::new(1).unwrap()));
    let size_bytes = 2 * PAGE_SIZE;
    config.memory = Some(SharedMemoryFile { file: file.try_clone().unwrap(), offset_bytes: 0, size_bytes });
    assert!(matches!(Delivery::new(config), Err(DeliveryConfigError::BadMemory { .. })));
    assert!(!shared::is_sealed(file.as_fd()));
    for page_bytes in [0, 1, 8192, 1 << 31] {
        let config = DeliveryConfig { page_bytes, ..DeliveryConfig::new(1, Arc::new(SharedBitmap::new(1).unwrap())) };
        assert!(matches!(Delivery::new(config), Err(DeliveryConfigError::BadPage { .. })), "{page_bytes}");
    }
}
