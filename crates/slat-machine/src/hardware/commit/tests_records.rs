//! Records of flushes: which ranges a CPU that catches up gets, and when it gets "everything".

use slat::Gfn;

use super::records::{MAX_RANGES, NR_RECORDS};
use super::*;

fn page(gfn: u64) -> GfnRange {
    GfnRange::new(Gfn(gfn), 1)
}

/// `None`: everything.
fn ranges(flushed: &Option<DroppedList>) -> Option<Vec<GfnRange>> {
    flushed.as_ref().map(|flushed| flushed.as_slice().iter().map(|dropped| dropped.range).collect())
}

fn domain() -> (Arc<FlushDomain>, Port) {
    let domain = Arc::new(FlushDomain::new());
    let port = Port::new(&domain);
    (domain, port)
}

#[test]
fn the_ranges_between_two_generations_are_returned() {
    let (domain, port) = domain();
    let first = port.generation();
    domain.flush(&[page(1), page(5)]);
    let second = port.generation();
    domain.flush(&[]);
    domain.flush(&[page(9), page(6)]);
    let third = port.generation();
    assert_eq!((second.nr_flushes_since(first), third.nr_flushes_since(first)), (1, 3));
    assert_eq!(ranges(&port.flushed_since(first, second)), Some(vec![page(1), page(5)]));
    assert_eq!(ranges(&port.flushed_since(second, third)), Some(vec![page(9), page(6)]));
    let all = [page(1), GfnRange::new(Gfn(5), 2), page(9)];
    assert_eq!(ranges(&port.flushed_since(first, third)), Some(all.to_vec()), "neighbours are merged");
    assert_eq!(ranges(&port.flushed_since(third, third)), Some(vec![]));
}

#[test]
fn a_cpu_that_lags_by_more_than_the_ring_drops_everything() {
    let (domain, port) = domain();
    let before = port.generation();
    domain.flush(&[page(7)]);
    let first = port.generation();
    for _ in 1..NR_RECORDS {
        domain.flush(&[page(7)]);
    }
    assert_eq!(ranges(&port.flushed_since(before, port.generation())), Some(vec![page(7)]));
    domain.flush(&[page(7)]);
    assert_eq!(ranges(&port.flushed_since(before, port.generation())), None);
    assert_eq!(ranges(&port.flushed_since(first, port.generation())), Some(vec![page(7)]));
}

#[test]
fn more_ranges_than_fit_are_everything() {
    let (domain, port) = domain();
    let ranges_of = |count: usize| (0..count as u64).map(|n| page(10 * n)).collect::<Vec<_>>();
    let before = port.generation();
    domain.flush(&ranges_of(MAX_RANGES));
    let first = port.generation();
    assert_eq!(ranges(&port.flushed_since(before, first)), Some(ranges_of(MAX_RANGES)));
    domain.flush(&ranges_of(MAX_RANGES + 1));
    assert_eq!(ranges(&port.flushed_since(first, port.generation())), None, "in one flush");

    let before = port.generation();
    for n in 0..MAX_LIST as u64 {
        domain.flush(&[page(2 * n)]);
    }
    assert_eq!(ranges(&port.flushed_since(before, port.generation())).map(|ranges| ranges.len()), Some(MAX_LIST));
    domain.flush(&[page(1000)]);
    assert_eq!(ranges(&port.flushed_since(before, port.generation())), None, "in several");
}

#[test]
fn a_record_that_is_not_there_yet_is_everything() {
    let (domain, port) = domain();
    let before = port.generation();
    let slow = domain.begin_flush();
    assert!(port.is_current(before), "no CPU has to observe it yet");
    domain.flush(&[page(1)]);
    let after = port.generation();
    assert_eq!(after.nr_flushes_since(before), 2);
    assert_eq!(ranges(&port.flushed_since(before, after)), None);
    // It comes late: CPUs that ask later get it, and the generation stays.
    domain.complete_flush(slow, Scope::All, &[page(3)]);
    assert!(port.is_current(after));
    assert_eq!(ranges(&port.flushed_since(before, after)), Some(vec![page(3), page(1)]));
}

/// A flusher that is preempted while it writes costs the flushes of its slot their records, no
/// more.
#[test]
fn a_slot_has_one_writer_and_its_sequence_only_rises() {
    let records = FlushRecords::new();
    let ring = NR_RECORDS as u64;
    records.write(ring + 3, Scope::All, &[page(1)]);
    records.write(3, Scope::All, &[page(2)]);
    assert_eq!(ranges(&records.between(2, 3)), None);
    assert_eq!(ranges(&records.between(ring + 2, ring + 3)), Some(vec![page(1)]));
    records.begin_write_and_stop(4);
    for number in [4, ring + 4] {
        records.write(number, Scope::All, &[page(2)]);
        assert_eq!(ranges(&records.between(number - 1, number)), None);
    }
    records.write(ring + 5, Scope::All, &[page(5)]);
    assert_eq!(ranges(&records.between(ring + 4, ring + 5)), Some(vec![page(5)]));
}

/// Writers of flushes that all use one slot, and readers of the newest: no record is ever mixed
/// from two. (A defect shows at once where the threads run in parallel, and by luck where they take
/// turns.)
#[test]
fn records_are_complete_or_missing() {
    const NR_FLUSHES: u64 = if cfg!(miri) { 300 } else { 2_000_000 };
    // All words of a record derive from its number, and no two ranges touch each other.
    let words_of = |number: u64| -> Vec<GfnRange> {
        let count = number % (MAX_RANGES as u64 + 1);
        (0..count).map(|n| GfnRange::new(Gfn(number * 1000 + 10 * n), 1 + number % 7)).collect()
    };
    let scope_of = |number: u64| Scope::EACH[(number / NR_RECORDS as u64 % 4) as usize];
    let records = FlushRecords::new();
    let nth = AtomicU64::new(1);
    let nr_reading = AtomicU64::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while nr_reading.load(Ordering::Relaxed) != 0 {
                    let number = nth.fetch_add(1, Ordering::Relaxed) * NR_RECORDS as u64;
                    records.write(number, scope_of(number), &words_of(number));
                }
            });
            scope.spawn(|| {
                // A reader that fails ends the writers, too.
                let _done = OnDrop(|| nr_reading.fetch_sub(1, Ordering::Relaxed));
                let mut is_found = false;
                let mut newest = 0;
                while newest < NR_FLUSHES || !is_found {
                    newest = nth.load(Ordering::Relaxed) - 1;
                    let number = newest * NR_RECORDS as u64;
                    if number != 0
                        && let Some(found) = records.between(number - 1, number)
                    {
                        let scope = scope_of(number);
                        let expected: Vec<_> =
                            words_of(number).into_iter().map(|range| Dropped { scope, range }).collect();
                        assert_eq!(found.as_slice(), expected, "record {number}");
                        is_found = true;
                    }
                }
            });
        }
    });
}

struct OnDrop<R, F: FnMut() -> R>(F);

impl<R, F: FnMut() -> R> Drop for OnDrop<R, F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
