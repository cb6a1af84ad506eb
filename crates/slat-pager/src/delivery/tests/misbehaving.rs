//! The other side breaks the protocol, or does nothing.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Instant;

use super::super::port::FAILED;
use super::super::ring::{Reader, RingEntry, Sleeper, Writer};
use super::*;

/// A resolver that writes into the rings of vCPU 0 what the test wants.
struct Raw {
    resolver: Arc<Resolver>,
    _shards: Vec<Shard>,
    requests: Reader,
    completions: Writer,
}

impl Raw {
    fn new(world: &World) -> Raw {
        let (resolver, shards) = world.attach(1);
        Raw { resolver, _shards: shards, requests: Reader::default(), completions: Writer::default() }
    }

    fn take(&mut self) -> Option<RingEntry> {
        self.requests.pop(self.resolver.rings.requests(0)).unwrap()
    }

    fn answer(&mut self, ticket: u64, page: u64) {
        let entry = RingEntry { ticket, page, word: 0 };
        self.completions.push(self.resolver.rings.completions(0), entry).unwrap();
    }
}

#[test]
fn double_late_and_unasked_completions_are_only_counted() {
    let world = World::new(1, 64);
    let (mut raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    port.request(3, 0).unwrap();
    port.request(4, 0).unwrap();
    let (first, second) = (raw.take().unwrap(), raw.take().unwrap());
    // For a page that was not requested, with a ticket that was not issued, and with the ticket of
    // another page.
    raw.answer(first.ticket + 1000, 3);
    raw.answer(first.ticket, 9);
    assert_eq!(port.poll().unwrap(), None);
    assert_eq!(port.stats().unasked, 2);
    // With the ticket of another epoch.
    raw.answer(first.ticket ^ 1 << 50, 3);
    assert_eq!(port.poll().unwrap(), None);
    assert_eq!(port.stats().late, 1);
    // Twice.
    world.bitmap.clear(3);
    raw.answer(first.ticket, 3);
    raw.answer(first.ticket, 3);
    assert_eq!(port.poll().unwrap(), Some(3));
    assert_eq!(port.poll().unwrap(), None);
    assert_eq!(port.stats().double, 1);
    // Without the bit: asked again, and then an answer to the first ask is late.
    raw.answer(second.ticket, 4);
    assert_eq!(port.poll().unwrap(), None);
    assert_eq!(port.stats().not_cleared, 1);
    let again = raw.take().unwrap();
    assert_eq!(again.page, 4);
    assert_ne!(again.ticket, second.ticket);
    world.bitmap.clear(4);
    raw.answer(second.ticket, 4);
    assert_eq!(port.poll().unwrap(), None);
    assert_eq!(port.stats().late, 2);
    raw.answer(again.ticket, 4);
    assert_eq!(port.poll().unwrap(), Some(4));
    assert_eq!((port.stats().pages, port.nr_in_flight()), (2, 0));
}

#[test]
fn a_bit_that_is_never_cleared_becomes_an_error() {
    let world = World::new(1, 64);
    let (mut raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    port.request(3, 0).unwrap();
    let error = loop {
        let request = raw.take().unwrap();
        raw.answer(request.ticket, request.page);
        match port.poll() {
            Ok(None) => {}
            Ok(Some(page)) => panic!("page {page} is not there"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, DeliveryError::NotCleared { vcpu: 0, page: 3, nr_answers: MAX_ANSWERS }), "{error}");
    assert_eq!(port.stats().asked, u64::from(MAX_ANSWERS));
    assert_eq!(port.nr_in_flight(), 0);
}

#[test]
fn an_impossible_index_is_an_error() {
    let world = World::with(1, 64, |config| config.ring_entries = 4);
    let (mut raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    port.request(3, 0).unwrap();
    for tail in [5, 1 << 40, u64::MAX] {
        raw.resolver.rings.completions(0).tail.store(tail, Ordering::Release);
        for result in [port.poll().map(|_| ()), port.wait(3)] {
            let Err(DeliveryError::RingCorrupt { vcpu: 0, bad: BadIndex { found, lowest: 0, highest: 4, .. } }) =
                result
            else {
                panic!("{result:?}");
            };
            assert_eq!(found, tail);
        }
    }
    raw.resolver.rings.completions(0).tail.store(0, Ordering::Release);
    for page in 4..7 {
        port.request(page, 0).unwrap();
    }
    // One entry is free by the port's own count, so that it reads the resolver's index.
    world.bitmap.clear(3);
    let first = raw.take().unwrap();
    raw.answer(first.ticket, 3);
    assert_eq!(port.poll().unwrap(), Some(3));
    raw.resolver.rings.requests(0).head.store(5, Ordering::Release);
    let result = port.request(7, 0);
    assert!(
        matches!(result, Err(DeliveryError::RingCorrupt { bad: BadIndex { found: 5, lowest: 0, highest: 4, .. }, .. })),
        "{result:?}"
    );
    assert_eq!(port.in_flight().collect::<Vec<_>>(), [4, 5, 6]);
    // A resolver that writes impossible indices can be detached, and another comes.
    world.delivery.detach();
    let mut shards = world.attach(1).1;
    port.resume(LIMIT).unwrap();
    let mut requests = Vec::new();
    assert_eq!(shards[0].sweep(&mut requests).unwrap(), 3);
}

#[test]
fn a_full_ring_is_an_error() {
    let world = World::with(1, 64, |config| config.ring_entries = 4);
    let mut raw = Raw::new(&world);
    let mut port = world.ports().remove(0);
    for page in 0..4 {
        port.request(page, 0).unwrap();
    }
    let full = port.request(4, 0);
    assert!(matches!(full, Err(DeliveryError::RingFull { vcpu: 0, page: 4, ring_entries: 4 })), "{full:?}");
    assert_eq!(port.request(3, 0).unwrap(), Requested::InFlight);
    let request = raw.take().unwrap();
    world.bitmap.clear(request.page);
    raw.answer(request.ticket, request.page);
    assert_eq!(port.poll().unwrap(), Some(0));
    assert_eq!(port.request(4, 0).unwrap(), Requested::InFlight);
}

#[test]
fn requests_beyond_the_end_and_waits_for_nothing_are_errors() {
    let world = World::new(1, 64);
    let _resolver = world.attach(1);
    let mut port = world.ports().remove(0);
    assert!(matches!(port.request(64, 0), Err(DeliveryError::NoSuchPage { page: 64, nr_pages: 64, .. })));
    assert!(matches!(port.request(u64::MAX, 0), Err(DeliveryError::NoSuchPage { .. })));
    assert!(matches!(port.wait(5), Err(DeliveryError::NotInFlight { page: 5, .. })));
}

/// The VMM may be the one that misbehaves.
#[test]
fn a_resolver_survives_a_vmm_that_writes_impossible_values() {
    let world = World::with(2, 64, |config| config.ring_entries = 4);
    let (_, mut shards) = world.attach(1);
    let session = world.delivery.shared.live_session().unwrap();
    let mut requests = Vec::new();
    // A page that does not exist: the vCPU gets an error.
    let entry = RingEntry { ticket: 1, page: 64, word: 0 };
    Writer::default().push(session.rings.requests(1), entry).unwrap();
    assert_eq!(shards[0].sweep(&mut requests).unwrap(), 0);
    let answer = Reader::default().pop(session.rings.completions(1)).unwrap().unwrap();
    assert_eq!((answer.page, answer.word & 0xffff), (64, 1));
    // Too many.
    session.rings.requests(0).tail.store(5, Ordering::Release);
    let result = shards[0].sweep(&mut requests);
    assert!(
        matches!(result, Err(ResolverError::RingCorrupt { vcpu: 0, bad: BadIndex { found: 5, .. } })),
        "{result:?}"
    );
    // More than it takes answers for.
    session.rings.requests(0).tail.store(0, Ordering::Release);
    world.bitmap.clear(9);
    let mut writer = Writer::default();
    let result = (0..10).find_map(|ticket| {
        writer.push(session.rings.requests(0), RingEntry { ticket, page: 9, word: 0 }).unwrap();
        shards[0].sweep(&mut requests).err()
    });
    assert!(matches!(result, Some(ResolverError::RingFull { vcpu: 0 })), "{result:?}");
}

#[test]
fn without_a_resolver_a_request_is_an_error_and_stays_known() {
    let world = World::new(1, 64);
    let mut port = world.ports().remove(0);
    assert!(matches!(port.request(3, 0), Err(DeliveryError::NoResolver { vcpu: 0 })));
    assert!(matches!(port.wait(3), Err(DeliveryError::NoResolver { vcpu: 0 })));
    let limit = Duration::from_millis(20);
    assert!(matches!(port.resume(limit), Err(DeliveryError::NoResolver { vcpu: 0 })));
    assert!(!port.try_resume().unwrap());
    assert!(!world.delivery.is_attached());
    // The request was kept.
    let mut shards = world.attach(1).1;
    port.resume(LIMIT).unwrap();
    assert_eq!(shards[0].sweep(&mut Vec::new()).unwrap(), 1);
}

#[test]
fn a_resolver_that_never_answers_is_a_time_out() {
    // Long enough for a handshake on a busy machine.
    let timeout = Duration::from_secs(2);
    let world = World::with(1, 64, |config| config.timeout = timeout);
    let _resolver = world.attach(1);
    let mut port = world.ports().remove(0);
    let began = Instant::now();
    let result = port.fetch(3, 0);
    assert!(matches!(result, Err(DeliveryError::TimedOut { vcpu: 0, page: 3, .. })), "{result:?}");
    assert!(began.elapsed() >= timeout);
    assert!(matches!(port.check(), Err(DeliveryError::TimedOut { page: 3, .. })));
    assert_eq!(port.nr_in_flight(), 1);
    // The bit alone is enough.
    world.bitmap.clear(3);
    port.wait(3).unwrap();
    assert_eq!(port.stats().unannounced, 1);
}

/// The resolver has the same eventfds.
#[test]
fn a_resolver_that_reads_signals_away_blocks_no_vcpu() {
    let world = World::new(1, 64);
    let (mut raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    let resolver = Arc::clone(&raw.resolver);
    thread::scope(|scope| {
        let vcpu = scope.spawn(move || port.fetch(3, 0));
        // Only after it has asked, or it would find no resolver.
        let asked = Instant::now();
        while raw.take().is_none() {
            assert!(asked.elapsed() < LIMIT, "the vCPU has not asked");
            thread::yield_now();
        }
        // All signals, also while the session ends and for a while after that.
        for turn in 0..200 {
            resolver.wakers[0].drain();
            if turn == 50 {
                world.delivery.detach();
            }
            thread::sleep(Duration::from_millis(1));
        }
        let result = vcpu.join().unwrap();
        assert!(matches!(result, Err(DeliveryError::ResolverGone { vcpu: 0, page: 3, epoch: 1 })), "{result:?}");
    });
}

#[test]
fn eventfds_that_block_and_are_full_keep_no_vcpu_blocked() {
    let world = World::new(1, 64);
    let (raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    raw.resolver.doorbells[0].spoil();
    raw.resolver.wakers[0].spoil();
    raw.resolver.rings.announce_sleep(Sleeper::Shard(0));
    // The vCPU is stuck in its doorbell until the watcher finds that out, and ends the session.
    let result = port.fetch(3, 0);
    assert!(matches!(result, Err(DeliveryError::ResolverGone { vcpu: 0, page: 3, epoch: 1 })), "{result:?}");
    assert_eq!(port.stats().doorbells, 1);
}

/// Its flag alone does not show a vCPU that is blocked in it since it began to block.
#[test]
fn a_doorbell_that_is_full_ends_the_session_whatever_its_flags() {
    let world = World::new(1, 64);
    let raw = Raw::new(&world);
    raw.resolver.doorbells[0].spoil();
    raw.resolver.doorbells[0].keep_nonblocking();
    let began = Instant::now();
    while world.delivery.is_attached() {
        assert!(began.elapsed() < LIMIT, "the session has not ended");
        thread::yield_now();
    }
}

/// The resolver has the wakers, and may make them block and fill them between any two calls of the
/// VMM.
#[test]
fn ends_do_not_wait_for_wakers() {
    let mut world = World::new(2, 64);
    let (mut raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    let resolver = Arc::clone(&raw.resolver);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let hostile = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                resolver.wakers.iter().for_each(EventFd::spoil);
            }
        });
        let vcpu = scope.spawn(move || port.fetch(3, 0));
        let asked = Instant::now();
        while raw.take().is_none() {
            assert!(asked.elapsed() < LIMIT);
        }
        world.delivery.detach();
        let result = vcpu.join().unwrap();
        assert!(matches!(result, Err(DeliveryError::ResolverGone { vcpu: 0, page: 3, epoch: 1 })), "{result:?}");
        is_over.store(true, Ordering::Relaxed);
        hostile.join().unwrap();
    });
    resolver.wakers.iter().for_each(EventFd::spoil);
    world.delivery = World::new(1, 64).delivery;
    // The VMM has written nothing there, and has left their flags alone: a write could have
    // blocked.
    for waker in &resolver.wakers {
        assert!(waker.is_full() && waker.keep_nonblocking());
    }
}

/// The end of a resolver wakes a thread that runs several vCPUs once only.
#[test]
fn a_waiter_is_woken_by_an_end_once() {
    let world = World::new(1, 64);
    let (_raw, mut waiter) = (Raw::new(&world), world.delivery.take_waiter(0).unwrap());
    waiter.announce();
    world.delivery.detach();
    assert_eq!(waiter.park(LIMIT).unwrap(), Parked::Woken);
    for _ in 0..2 {
        waiter.announce();
        assert_eq!(waiter.park(LIMIT).unwrap(), Parked::TimedOut);
    }
    let _other = Raw::new(&world);
    waiter.announce();
    world.delivery.shared.close();
    assert_eq!(waiter.park(LIMIT).unwrap(), Parked::Woken);
}

/// The resolver was detached, and lives.
#[test]
fn doorbells_that_are_filled_again_keep_no_vcpu_blocked() {
    let world = World::new(1, 64);
    let raw = Raw::new(&world);
    let session = world.delivery.shared.live_session().unwrap();
    world.delivery.detach();
    for _ in 0..3 {
        raw.resolver.doorbells[0].spoil();
        let (out, is_out) = mpsc::channel();
        let session = Arc::clone(&session);
        thread::spawn(move || {
            session.doorbells[0].signal();
            out.send(()).unwrap();
        });
        is_out.recv_timeout(LIMIT).expect("a doorbell write that returns");
    }
}

#[test]
fn a_drained_eventfd_is_empty_whatever_its_flags() {
    let eventfd = EventFd::new().unwrap();
    let is_readable = || shared::wait_readable([eventfd.as_fd()], Duration::ZERO).unwrap() == [true];
    eventfd.drain();
    assert!(!is_readable());
    eventfd.signal();
    eventfd.signal();
    assert!(is_readable());
    eventfd.drain();
    assert!(!is_readable());
    eventfd.spoil();
    assert!(is_readable());
    eventfd.drain();
    assert!(!is_readable());
    eventfd.drain();
    assert!(eventfd.keep_nonblocking());
    assert!(!eventfd.keep_nonblocking());
}

#[test]
fn closing_ends_all_waits() {
    let World { delivery, .. } = World::new(2, 64);
    let mut ports: Vec<_> = (0..2).map(|vcpu| delivery.take_port(vcpu).unwrap()).collect();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let resolver = thread::spawn(move || Resolver::attach(theirs, 1, LIMIT));
    delivery.attach(ours).unwrap();
    let (_, mut shards) = resolver.join().unwrap().unwrap();
    let (mut idle, mut waiting) = (ports.remove(0), ports.remove(0));
    let ((asked, is_asked), (closed, is_closed)) = (mpsc::channel(), mpsc::channel::<()>());
    thread::scope(|scope| {
        let waiting = scope.spawn(move || waiting.fetch(3, 0));
        let resolver = scope.spawn(move || {
            shards[0].serve(|_, _| {
                asked.send(()).unwrap();
                is_closed.recv().unwrap();
                Ok(())
            })
        });
        is_asked.recv().unwrap();
        drop(delivery);
        let result = waiting.join().unwrap();
        assert!(matches!(result, Err(DeliveryError::Closed { vcpu: 1 })), "{result:?}");
        // Nothing takes the completion any more; the resolver finds out after it.
        closed.send(()).unwrap();
        assert_eq!(resolver.join().unwrap().unwrap().filled, 1);
    });
    assert!(matches!(idle.request(4, 0), Err(DeliveryError::Closed { vcpu: 0 })));
    assert!(matches!(idle.resume(LIMIT), Err(DeliveryError::Closed { vcpu: 0 })));
}

/// A request that no resolver was asked for has no ticket, and no resolver can answer it.
#[test]
fn a_detached_resolver_answers_no_later_request() {
    let world = World::new(1, 64);
    let (mut raw, mut port) = (Raw::new(&world), world.ports().remove(0));
    port.request(3, 0).unwrap();
    world.delivery.detach();
    assert!(matches!(port.request(4, 0), Err(DeliveryError::ResolverGone { page: 4, .. })));
    let failed = RingEntry { ticket: 0, page: 4, word: FAILED };
    raw.completions.push(raw.resolver.rings.completions(0), failed).unwrap();
    let result = port.poll();
    assert!(matches!(result, Err(DeliveryError::ResolverGone { page: 3, .. })), "{result:?}");
    assert_eq!(port.in_flight().collect::<Vec<_>>(), [3, 4]);
}
