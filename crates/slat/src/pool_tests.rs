use core::array;

use alloc::vec::Vec;

use super::*;

struct Thing {
    link: PoolLink<Thing>,
    number: u32,
}

// SAFETY: it is one field of the thing.
unsafe impl Pooled for Thing {
    fn link(&self) -> &PoolLink<Thing> {
        &self.link
    }
}

fn add(pool: &Pool<Thing>, number: u32) -> &Thing {
    pool.add(Box::new(Thing { link: PoolLink::new(), number }))
}

fn release(thing: &Thing) {
    // SAFETY: the tests release what they have claimed or added, once.
    unsafe { thing.link.release() }
}

#[test]
fn a_thing_has_one_user() {
    let pool = Pool::new();
    assert!(pool.claim().is_none(), "there is nothing");
    let first = add(&pool, 1);
    assert!(pool.claim().is_none(), "the thread that has added it is its user");
    release(first);
    assert_eq!(pool.claim().map(|thing| thing.number), Some(1));
    assert!(pool.claim().is_none(), "it is in use");
    assert_eq!(pool.iter().count(), 1);
}

#[test]
fn what_the_hint_names_may_be_in_use() {
    let pool = Pool::new();
    let things = [1, 2, 3].map(|number| add(&pool, number));
    // The hint is the third. The others are found by a search, which moves the hint.
    release(things[0]);
    assert_eq!(pool.claim().map(|thing| thing.number), Some(1));
    release(things[0]);
    release(things[1]);
    release(things[2]);
    assert_eq!(pool.claim().map(|thing| thing.number), Some(1), "as last time");
    let mut rest = [pool.claim(), pool.claim()].map(|thing| thing.map(|thing| thing.number));
    rest.sort_unstable();
    assert_eq!(rest, [Some(2), Some(3)]);
    assert!(pool.claim().is_none());
}

#[test]
fn threads_that_claim_at_once_have_different_things() {
    const NR_THREADS: u32 = 4;
    extern crate std;
    use std::thread;

    let pool = Pool::new();
    let users: [AtomicBool; NR_THREADS as usize] = array::from_fn(|_| AtomicBool::new(false));
    for number in 0..NR_THREADS {
        release(add(&pool, number));
    }
    thread::scope(|scope| {
        for _ in 0..NR_THREADS {
            scope.spawn(|| {
                for _ in 0..1000 {
                    let thing = pool.claim().expect("there are as many things as threads");
                    let has_user = &users[thing.number as usize];
                    assert!(!has_user.swap(true, Ordering::Relaxed), "two users");
                    has_user.store(false, Ordering::Relaxed);
                    release(thing);
                }
            });
        }
    });
}

#[test]
fn sixteen_threads_have_a_hint_each() {
    // Stacks of std with their guard page, of pthreads, of kernels.
    for distance in [(2 << 20) + 4096, (8 << 20) + 4096, 64 << 10, 32 << 10, 16 << 10] {
        let mut hints: Vec<usize> = (0..16).map(|nth| nth_hint(0x7f12_3456_7890 + nth * distance)).collect();
        hints.sort_unstable();
        hints.dedup();
        assert_eq!(hints.len(), 16, "stacks {distance} bytes apart");
    }
}
