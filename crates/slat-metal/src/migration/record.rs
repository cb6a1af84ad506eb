//! What the two machines say to each other: records with a number and up to a page of words.

use thiserror::Error;

/// Words of a record's payload, at most: those of a page.
pub const MAX_WORDS: usize = 512;

/// Words before the payload.
pub const HEADER_WORDS: usize = 4;

/// What a record is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Kind {
    /// From the source: the guest's frames of memory (the number), and what the target's machine
    /// must have in common with the source's.
    Hello = 1,
    /// From the target: it is such a machine.
    Welcome = 2,
    /// The frame with this number, as it is.
    Page = 3,
    /// The frame with this number is zero.
    ZeroPage = 4,
    /// Hashes of the memory's pages, from the page with this number on.
    Hashes = 5,
    /// A bitmap of the pages that come later, from the word with this number on.
    Left = 6,
    /// The CPU with this number.
    Cpu = 7,
    /// The devices, and with them the guest. The number is that of the rounds that it has done.
    Devices = 8,
    /// From the target: it needs the frame with this number.
    Request = 9,
    /// From the target: it has all.
    Complete = 10,
}

impl Kind {
    const ALL: [Kind; 10] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Page,
        Kind::ZeroPage,
        Kind::Hashes,
        Kind::Left,
        Kind::Cpu,
        Kind::Devices,
        Kind::Request,
        Kind::Complete,
    ];
}

/// The head of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// Its number.
    pub number: u64,
    /// Words of its payload.
    pub nr_words: usize,
}

/// What is no record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum BadRecord {
    /// A kind that there is not.
    #[error("a record of the other machine has the kind {0}, which there is not")]
    Kind(u64),
    /// A payload that is too long.
    #[error("a record of the other machine has {0} words, more than a page")]
    Length(u64),
    /// It was changed on its way.
    #[error("a record of the other machine has the check sum {found:#x}, and {expected:#x} is right")]
    CheckSum {
        /// Of what has come.
        expected: u64,
        /// What the record has.
        found: u64,
    },
    /// The ring has more records than room.
    #[error("the other machine has {waiting} records in a ring for {room}")]
    Overrun {
        /// Records, as the other machine says.
        waiting: u64,
        /// Records for which there is room.
        room: u64,
    },
}

/// A hash of words, in their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hash(u64);

impl Hash {
    /// That of no words.
    pub const fn new() -> Hash {
        Hash(0x9e37_79b9_7f4a_7c15)
    }

    /// That with one more word: a multiplication by an odd number keeps all differences.
    #[must_use]
    pub const fn with(self, word: u64) -> Hash {
        Hash((self.0.rotate_left(23) ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// As a number.
    pub const fn value(self) -> u64 {
        self.0
    }
}

impl Default for Hash {
    fn default() -> Hash {
        Hash::new()
    }
}

impl Head {
    /// The words before a payload with this hash.
    pub fn encode(self, payload: Hash) -> [u64; HEADER_WORDS] {
        let words = [self.kind as u64, self.number, self.nr_words as u64];
        [words[0], words[1], words[2], check_sum(words, payload)]
    }

    /// Reads the words before a payload.
    ///
    /// # Errors
    /// [`BadRecord`]. The check sum is for [`check`](Head::check).
    pub fn decode(words: [u64; HEADER_WORDS]) -> Result<Head, BadRecord> {
        let [kind, number, nr_words, _] = words;
        let kind = Kind::ALL.into_iter().find(|known| *known as u64 == kind).ok_or(BadRecord::Kind(kind))?;
        if nr_words > MAX_WORDS as u64 {
            return Err(BadRecord::Length(nr_words));
        }
        Ok(Head { kind, number, nr_words: nr_words as usize })
    }

    /// Whether head and payload are those that were sent.
    ///
    /// # Errors
    /// [`BadRecord::CheckSum`].
    pub fn check(self, found: u64, payload: Hash) -> Result<(), BadRecord> {
        let [.., expected] = self.encode(payload);
        if expected == found { Ok(()) } else { Err(BadRecord::CheckSum { expected, found }) }
    }
}

fn check_sum(words: [u64; 3], payload: Hash) -> u64 {
    words.into_iter().fold(payload, Hash::with).value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_as_they_were_written() {
        for kind in Kind::ALL {
            let head = Head { kind, number: u64::MAX, nr_words: MAX_WORDS };
            let payload = Hash::new().with(7);
            let words = head.encode(payload);
            assert_eq!(Head::decode(words), Ok(head));
            assert_eq!(head.check(words[3], payload), Ok(()));
            assert!(head.check(words[3], Hash::new().with(8)).is_err());
            let other = Head { number: 1, ..head };
            assert!(other.check(words[3], payload).is_err());
        }
    }

    #[test]
    fn what_is_no_head_is_refused() {
        assert_eq!(Head::decode([0; 4]), Err(BadRecord::Kind(0)));
        assert_eq!(Head::decode([11, 0, 0, 0]), Err(BadRecord::Kind(11)));
        assert_eq!(Head::decode([3, 0, 513, 0]), Err(BadRecord::Length(513)));
        assert_eq!(Head::decode([3, 0, u64::MAX, 0]), Err(BadRecord::Length(u64::MAX)));
    }
}
