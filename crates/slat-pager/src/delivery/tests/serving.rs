//! Resolvers that keep the protocol.

use std::sync::atomic::AtomicU32;

use super::*;

#[test]
fn each_vcpu_gets_its_pages_filled() {
    let world = World::new(4, 1024);
    let shards = world.attach(1).1;
    thread::scope(|scope| {
        for mut shard in shards {
            scope.spawn(move || shard.serve(fill).unwrap());
        }
        let vcpus: Vec<_> = world
            .ports()
            .into_iter()
            .map(|mut port| {
                let world = &world;
                scope.spawn(move || {
                    for page in (u64::from(port.vcpu())..1024).step_by(4) {
                        port.fetch(page, 0).unwrap();
                        world.check_filled(page);
                        assert_eq!(port.request(page, 0).unwrap(), Requested::AlreadyThere);
                    }
                    assert_eq!((port.stats().pages, port.stats().asked), (256, 256));
                })
            })
            .collect();
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
        assert_eq!(world.bitmap.count(), 0);
        world.delivery.detach();
    });
}

/// All vCPUs ask for all pages, three threads fill and a copier beside them: each page is filled
/// once, and no request is lost.
#[test]
fn no_page_is_filled_twice_when_all_vcpus_ask_for_it() {
    const NR_PAGES: u64 = 600;
    let world = World::with(6, NR_PAGES, |config| config.nr_waiters = 3);
    let (resolver, shards) = world.attach(3);
    let nr_fills: Vec<AtomicU32> = (0..NR_PAGES).map(|_| AtomicU32::new(0)).collect();
    thread::scope(|scope| {
        let (world, nr_fills) = (&world, &nr_fills);
        for mut shard in shards {
            scope.spawn(move || {
                shard.serve(|request, page| {
                    nr_fills[request.page() as usize].fetch_add(1, Ordering::Relaxed);
                    // Others ask while the page is claimed.
                    thread::yield_now();
                    fill(request, page)
                })
            });
        }
        scope.spawn(move || {
            for page in (0..NR_PAGES).rev() {
                if let Some(claim) = resolver.claim(page) {
                    nr_fills[page as usize].fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                    resolver.claimed_page(&claim).unwrap().copy_from(&pattern_bytes(page));
                    resolver.filled(claim).unwrap();
                }
            }
        });
        let vcpus: Vec<_> = world
            .ports()
            .into_iter()
            .map(|mut port| {
                scope.spawn(move || {
                    for page in 0..NR_PAGES {
                        port.fetch(page, 0).unwrap();
                        world.check_filled(page);
                    }
                })
            })
            .collect();
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
        world.delivery.detach();
    });
    for (page, count) in nr_fills.iter().enumerate() {
        assert_eq!(count.load(Ordering::Relaxed), 1, "page {page}");
    }
}

/// One thread runs several vCPUs, each with several requests in flight, and sleeps in one place.
#[test]
fn an_event_loop_serves_many_vcpus_in_one_thread() {
    const NR_PAGES: u64 = 800;
    let world = World::with(8, NR_PAGES, |config| (config.nr_waiters, config.ring_entries) = (1, 4));
    let mut shards = world.attach(1).1;
    let mut waiter = world.delivery.take_waiter(0).unwrap();
    let mut ports = world.ports();
    thread::scope(|scope| {
        let mut shard = shards.remove(0);
        scope.spawn(move || shard.serve(fill).unwrap());
        let mut next: Vec<u64> = (0..8).map(|vcpu| vcpu * 100).collect();
        let mut nr_there = 0;
        while nr_there < NR_PAGES {
            for port in &mut ports {
                let (first, vcpu) = (u64::from(port.vcpu()) * 100, port.vcpu() as usize);
                while port.nr_in_flight() < 4 && next[vcpu] < first + 100 {
                    port.request(next[vcpu], 0).unwrap();
                    next[vcpu] += 1;
                }
            }
            let mut poll = || {
                let mut count = 0;
                for port in &mut ports {
                    while let Some(page) = port.poll().unwrap() {
                        world.check_filled(page);
                        count += 1;
                    }
                }
                count
            };
            let mut count = poll();
            if count == 0 {
                waiter.announce();
                count = poll();
                if count == 0 {
                    // Not `park`, whose nap may be over before a busy machine runs the resolver.
                    let waker = world.delivery.shared.wakers[0].as_fd();
                    assert_eq!(shared::wait_readable([waker], LIMIT).unwrap(), [true], "a wake-up was lost");
                    assert_eq!(waiter.park(Duration::ZERO).unwrap(), Parked::Woken);
                } else {
                    waiter.withdraw();
                }
            }
            nr_there += count;
        }
        world.delivery.detach();
    });
    assert_eq!(world.bitmap.count(), 0);
}

/// Requests may be finished in any order, long after they were taken.
#[test]
fn a_resolver_may_hold_many_requests() {
    let world = World::new(1, 64);
    let (resolver, mut shards) = world.attach(1);
    let (mut port, shard) = (world.ports().remove(0), &mut shards[0]);
    for page in 0..8 {
        assert_eq!(port.request(page, page | 16).unwrap(), Requested::InFlight);
    }
    let mut requests = Vec::new();
    assert_eq!(shard.sweep(&mut requests).unwrap(), 8);
    assert_eq!(port.poll().unwrap(), None);
    for request in requests.into_iter().rev() {
        assert_eq!((request.vcpu(), request.flags()), (0, request.page() | 16));
        let page = request.page();
        fill(&request, resolver.page(&request)).unwrap();
        shard.complete(request).unwrap();
        assert_eq!(port.poll().unwrap(), Some(page));
        world.check_filled(page);
    }
    assert_eq!(port.stats().doorbells, 0, "no shard slept");
}

#[test]
fn a_page_that_cannot_be_filled_is_an_error() {
    let world = World::new(1, 64);
    let mut shards = world.attach(1).1;
    let mut port = world.ports().remove(0);
    thread::scope(|scope| {
        let mut shard = shards.remove(0);
        scope
            .spawn(move || shard.serve(|request, page| if request.page() == 7 { Err(5) } else { fill(request, page) }));
        let failed = port.fetch(7, 0);
        assert!(matches!(failed, Err(DeliveryError::PageFailed { vcpu: 0, page: 7, code: 5 })), "{failed:?}");
        assert!(world.bitmap.is_set(7));
        port.fetch(8, 0).unwrap();
        assert_eq!(port.nr_in_flight(), 0);
        world.delivery.detach();
    });
}

#[test]
fn pages_of_2_mib() {
    const BLOCK_PAGES: u64 = 512;
    let bitmap = Arc::new(SharedBitmap::new(2).unwrap());
    bitmap.set_all();
    // The last block is shorter.
    let (file, memory) = guest_memory(BLOCK_PAGES + 3);
    let mut config = DeliveryConfig::new(1, bitmap);
    config.page_bytes = 2 << 20;
    let size_bytes = (BLOCK_PAGES + 3) * PAGE_SIZE;
    config.memory = Some(SharedMemoryFile { file, offset_bytes: 0, size_bytes });
    let world = World { bitmap: Arc::clone(&config.bitmap), delivery: Delivery::new(config).unwrap(), memory };
    let mut shards = world.attach(1).1;
    let mut port = world.ports().remove(0);
    thread::scope(|scope| {
        let mut shard = shards.remove(0);
        scope.spawn(move || {
            shard.serve(|_, page| {
                let page = page.unwrap();
                page.copy_from(&vec![0x77; page.size_bytes() + 1]);
                Ok(())
            })
        });
        port.fetch(1, 0).unwrap();
        port.fetch(0, 0).unwrap();
        world.delivery.detach();
    });
    assert!(world.memory.words().iter().all(|word| word.load(Ordering::Relaxed) == 0x7777_7777_7777_7777));
}

/// A page that is found by its bit leaves a completion in the ring, and the resolver needs room for
/// that one too.
#[test]
fn completions_of_pages_found_by_their_bits_do_not_fill_the_ring() {
    let world = World::with(1, 64, |config| config.ring_entries = 4);
    let (resolver, mut shards) = world.attach(1);
    let (mut port, shard) = (world.ports().remove(0), &mut shards[0]);
    let mut serve = |nr_requests| {
        let mut requests = Vec::new();
        assert_eq!(shard.sweep(&mut requests).unwrap(), nr_requests);
        for request in requests {
            fill(&request, resolver.page(&request)).unwrap();
            shard.complete(request).unwrap();
        }
    };
    for round in 0..5 {
        for page in 4 * round..4 * round + 4 {
            assert_eq!(port.request(page, 0).unwrap(), Requested::InFlight);
        }
        serve(4);
        // As a thread that has slept in vain, and was overtaken.
        port.check().unwrap();
        assert_eq!(port.nr_in_flight(), 0);
    }
    for page in 0..20 {
        assert_eq!(port.poll().unwrap(), Some(page));
    }
    // While the resolver has to answer as many requests as its ring holds, there is no room for
    // another one.
    for page in 20..24 {
        port.request(page, 0).unwrap();
        world.bitmap.clear(page);
    }
    port.check().unwrap();
    let full = port.request(24, 0);
    assert!(matches!(full, Err(DeliveryError::RingFull { page: 24, .. })), "{full:?}");
    serve(0);
    port.request(24, 0).unwrap();
    serve(1);
    while port.poll().unwrap() != Some(24) {}
    assert_eq!((port.nr_in_flight(), port.stats().pages), (0, 25));
}

#[test]
fn a_request_goes_back_to_the_shard_that_it_came_from() {
    let world = World::new(3, 64);
    let (_, mut shards) = world.attach(2);
    let mut port = world.ports().remove(2);
    for page in [5, 6] {
        port.request(page, 0).unwrap();
    }
    let mut requests = Vec::new();
    assert_eq!(shards[0].sweep(&mut requests).unwrap(), 2);
    let wrong = shards[1].complete(requests.remove(0));
    assert!(matches!(wrong, Err(ResolverError::OtherShard { vcpu: 2 })), "{wrong:?}");
    shards[0].complete(requests.remove(0)).unwrap();
    assert_eq!(port.poll().unwrap(), Some(6));
    port.check().unwrap();
    assert_eq!(port.poll().unwrap(), Some(5), "its bit is clear");
}

#[test]
fn a_request_of_another_resolver_is_refused() {
    // Both have the epoch 1, and the first has pages that the second does not have.
    let (large, small) = (World::new(1, 1024), World::new(1, 64));
    let ((of_large, mut large_shards), (of_small, mut small_shards)) = (large.attach(1), small.attach(1));
    assert_eq!(of_large.epoch(), of_small.epoch());
    let mut port = large.ports().remove(0);
    for page in [1000, 3] {
        port.request(page, 0).unwrap();
    }
    let mut requests = Vec::new();
    assert_eq!(large_shards[0].sweep(&mut requests).unwrap(), 2);
    assert!(of_small.page(&requests[0]).is_none() && of_large.page(&requests[0]).is_some());
    let refused = small_shards[0].complete(requests.remove(0));
    assert!(matches!(refused, Err(ResolverError::OtherResolver { page: 1000 })), "{refused:?}");
    let refused = small_shards[0].fail(requests.remove(0), 1);
    assert!(matches!(refused, Err(ResolverError::OtherResolver { page: 3 })), "{refused:?}");
    for page in [1001, 4] {
        let claim = of_large.claim(page).unwrap();
        assert!(of_small.claimed_page(&claim).is_none());
        let refused = of_small.filled(claim);
        assert!(matches!(refused, Err(ResolverError::OtherResolver { page: p }) if p == page), "{refused:?}");
    }
    let refused = of_small.give_up(of_large.claim(5).unwrap());
    assert!(matches!(refused, Err(ResolverError::OtherResolver { page: 5 })), "{refused:?}");
    // Nothing was changed there.
    assert_eq!((small.bitmap.count(), small_shards[0].stats()), (64, ResolverStats::default()));
    of_small.give_up(of_small.claim(4).unwrap()).unwrap();
}

/// Threads that share a request may fill its page at the same time.
#[test]
fn two_threads_that_fill_one_page_fill_it_with_words_of_either() {
    let world = World::new(1, 64);
    let (resolver, mut shards) = world.attach(1);
    let mut port = world.ports().remove(0);
    port.request(5, 0).unwrap();
    let mut requests = Vec::new();
    assert_eq!(shards[0].sweep(&mut requests).unwrap(), 1);
    let request = requests.remove(0);
    thread::scope(|scope| {
        for byte in [0x11, 0x22] {
            let (resolver, request) = (&resolver, &request);
            scope.spawn(move || (0..100).for_each(|_| resolver.page(request).unwrap().copy_from(&[byte; 4096])));
        }
    });
    let words = world.page(5).iter().map(|word| word.load(Ordering::Relaxed));
    assert!(words.into_iter().all(|word| [0x1111_1111_1111_1111, 0x2222_2222_2222_2222].contains(&word)));
    shards[0].complete(request).unwrap();
}

#[test]
fn a_part_of_a_page_is_filled_to_the_byte() {
    let world = World::new(1, 64);
    let (resolver, _shards) = world.attach(1);
    let claim = resolver.claim(63).unwrap();
    let page = resolver.claimed_page(&claim).unwrap();
    let bytes = |nr_words: usize| -> Vec<u8> {
        world.page(63)[..nr_words].iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    };
    page.copy_from(&[0xee; 5000]);
    assert!(bytes(WORDS).iter().all(|byte| *byte == 0xee));
    for count in [0, 1, 7, 8, 13, 4095] {
        page.copy_from(&[0xee; 4096]);
        page.copy_from(&vec![0x33; count]);
        let expected: Vec<u8> = (0..4096).map(|at| if at < count { 0x33 } else { 0xee }).collect();
        assert!(bytes(WORDS) == expected, "{count} bytes");
    }
    resolver.give_up(claim).unwrap();
}
