//! A ring of records in memory that two machines share: one machine sends, the other one receives.
//!
//! The sender counts the records that it has written, and the receiver those that it has read. Each
//! count has one writer. A count is stored with release after the record was written, or read, and
//! loaded with acquire before.

use core::sync::atomic::{AtomicU64, Ordering};

use super::record::{BadRecord, HEADER_WORDS, Hash, Head, Kind, MAX_WORDS};

/// Words of a record's place.
const PLACE_WORDS: usize = HEADER_WORDS + MAX_WORDS;

/// One direction.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'m> {
    sent: &'m AtomicU64,
    received: &'m AtomicU64,
    places: &'m [AtomicU64],
}

/// The words of a payload that has come.
pub type Payload = [u64; MAX_WORDS];

impl<'m> Ring<'m> {
    /// Words between the counts, so that each has a cache line of its own.
    const COUNT_WORDS: usize = 8;
    /// Words before the first place.
    const COUNTS_WORDS: usize = 2 * Ring::COUNT_WORDS;

    /// The ring in `memory`, which is zero before its first use. `None`: it has no room for a
    /// record.
    pub fn new(memory: &'m [AtomicU64]) -> Option<Ring<'m>> {
        let (counts, places) = memory.split_at_checked(Ring::COUNTS_WORDS)?;
        let ring = Ring { sent: &counts[0], received: &counts[Ring::COUNT_WORDS], places };
        (ring.nr_places() != 0).then_some(ring)
    }

    fn nr_places(&self) -> u64 {
        (self.places.len() / PLACE_WORDS) as u64
    }

    /// The words of the place of record `number`.
    fn place(&self, number: u64) -> &'m [AtomicU64] {
        let first = (number % self.nr_places()) as usize * PLACE_WORDS;
        &self.places[first..][..PLACE_WORDS]
    }

    /// Sends a record with `words`, [`MAX_WORDS`] at most, if there is room. Returns the hash of the
    /// words that were sent.
    pub fn try_send(&self, kind: Kind, number: u64, words: impl ExactSizeIterator<Item = u64>) -> Option<Hash> {
        // Relaxed: this side's own.
        let sent = self.sent.load(Ordering::Relaxed);
        if sent.wrapping_sub(self.received.load(Ordering::Acquire)) >= self.nr_places() {
            return None;
        }
        let (header, payload) = self.place(sent).split_at(HEADER_WORDS);
        let head = Head { kind, number, nr_words: words.len().min(MAX_WORDS) };
        let mut hash = Hash::new();
        for (place, word) in payload.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
            hash = hash.with(word);
        }
        header.iter().zip(head.encode(hash)).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        self.sent.store(sent.wrapping_add(1), Ordering::Release);
        Some(hash)
    }

    /// Receives a record into `payload`, if one is there.
    ///
    /// # Errors
    /// [`BadRecord`]: what is there is no record.
    pub fn try_receive(&self, payload: &mut Payload) -> Result<Option<Head>, BadRecord> {
        // Relaxed: this side's own.
        let received = self.received.load(Ordering::Relaxed);
        let waiting = self.sent.load(Ordering::Acquire).wrapping_sub(received);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.nr_places() {
            return Err(BadRecord::Overrun { waiting, room: self.nr_places() });
        }
        let (header, words) = self.place(received).split_at(HEADER_WORDS);
        let header = core::array::from_fn(|index| header[index].load(Ordering::Relaxed));
        let head = Head::decode(header)?;
        let mut hash = Hash::new();
        for (to, from) in payload.iter_mut().zip(words).take(head.nr_words) {
            *to = from.load(Ordering::Relaxed);
            hash = hash.with(*to);
        }
        head.check(header[HEADER_WORDS - 1], hash)?;
        self.received.store(received.wrapping_add(1), Ordering::Release);
        Ok(Some(head))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn memory(nr_records: usize) -> Vec<AtomicU64> {
        (0..Ring::COUNTS_WORDS + nr_records * PLACE_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn none() -> impl ExactSizeIterator<Item = u64> {
        core::iter::empty()
    }

    #[test]
    fn records_come_in_their_order_and_wait_for_room() {
        let memory = memory(3);
        let ring = Ring::new(&memory).unwrap();
        let mut payload = [0; MAX_WORDS];
        assert_eq!(ring.try_receive(&mut payload), Ok(None));
        // Several times round.
        for first in (0..30).step_by(3) {
            for number in first..first + 3 {
                assert!(ring.try_send(Kind::Page, number, (0..512_u16).map(|word| u64::from(word) * number)).is_some());
            }
            assert_eq!(ring.try_send(Kind::Request, 0, none()), None);
            for number in first..first + 3 {
                let head = Head { kind: Kind::Page, number, nr_words: 512 };
                assert_eq!(ring.try_receive(&mut payload), Ok(Some(head)));
                assert_eq!((payload[0], payload[511]), (0, 511 * number));
            }
            assert_eq!(ring.try_receive(&mut payload), Ok(None));
        }
    }

    #[test]
    fn a_hash_of_what_was_sent_is_that_of_the_words() {
        let memory = memory(1);
        let ring = Ring::new(&memory).unwrap();
        let hash = ring.try_send(Kind::Cpu, 1, [3, 4].into_iter());
        assert_eq!(hash, Some(Hash::new().with(3).with(4)));
    }

    #[test]
    fn what_another_wrote_is_no_record() {
        let memory = memory(2);
        let ring = Ring::new(&memory).unwrap();
        let mut payload = [0; MAX_WORDS];
        ring.try_send(Kind::Page, 5, (0..512_u16).map(u64::from)).unwrap();
        memory[Ring::COUNTS_WORDS + HEADER_WORDS + 100].store(1, Ordering::Relaxed);
        assert!(matches!(ring.try_receive(&mut payload), Err(BadRecord::CheckSum { .. })));
        memory[Ring::COUNTS_WORDS].store(77, Ordering::Relaxed);
        assert_eq!(ring.try_receive(&mut payload), Err(BadRecord::Kind(77)));
        memory[0].store(9, Ordering::Relaxed);
        assert_eq!(ring.try_receive(&mut payload), Err(BadRecord::Overrun { waiting: 9, room: 2 }));
        assert!(Ring::new(&memory[..10]).is_none() && Ring::new(&memory[..100]).is_none());
    }
}
