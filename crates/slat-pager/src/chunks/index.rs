//! The index of a snapshot: the hash of each of its chunks.

use std::fmt::{self, Debug, Display, Formatter};
use std::ops::Range;

use thiserror::Error;

use crate::little_endian::{u32_at, u64_at};
use crate::source::{Identity, PAGE_BYTES};

const MAGIC: [u8; 8] = *b"slat-idx";
/// The version of the format that this program writes and reads.
pub const VERSION: u32 = 1;
const HEADER_BYTES: usize = 56;
const HASH_BYTES: usize = 32;

/// The smallest chunk.
pub const LEAST_CHUNK_BYTES: u64 = 64 << 10;
/// The largest chunk.
pub const MOST_CHUNK_BYTES: u64 = 2 << 20;
/// The largest snapshot: 16 TiB.
pub const MOST_SNAPSHOT_BYTES: u64 = 16 << 40;
/// The largest index: that of 16 TiB in chunks of 512 KiB, or 2 TiB in chunks of 64 KiB.
pub const MOST_BYTES: u64 = HEADER_BYTES as u64 + (1 << 30);

/// The BLAKE3 hash of a chunk's bytes. It is the chunk's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hash(pub [u8; HASH_BYTES]);

impl Hash {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Hash {
        Hash(*blake3::hash(bytes).as_bytes())
    }
}

impl Display for Hash {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Debug for Hash {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// Why bytes are no index.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum IndexError {
    /// They do not begin as an index does.
    #[error("it does not begin as an index does")]
    NoIndex,
    /// An index of a later version, or of none.
    #[error("its version is {0}; this program reads {VERSION}")]
    Version(u32),
    /// A size that is none.
    #[error("a snapshot of {size_bytes} bytes in chunks of {chunk_bytes} is not possible")]
    Sizes {
        /// Of the snapshot.
        size_bytes: u64,
        /// Of a chunk.
        chunk_bytes: u64,
    },
    /// There is too little or too much of it.
    #[error("it has {found} bytes and should have {expected}")]
    Length {
        /// How many there should be.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// It was changed.
    #[error("its checksum is wrong")]
    Checksum,
}

/// An index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    size_bytes: u64,
    chunk_bytes: u64,
    /// `None`: zeros.
    chunks: Vec<Option<Hash>>,
}

fn is_chunk_size(chunk_bytes: u64) -> bool {
    chunk_bytes.is_power_of_two() && (LEAST_CHUNK_BYTES..=MOST_CHUNK_BYTES).contains(&chunk_bytes)
}

impl Index {
    /// The index of a snapshot.
    ///
    /// # Errors
    /// The sizes are none that are possible, or `chunks` are not as many as there must be.
    pub fn new(size_bytes: u64, chunk_bytes: u64, chunks: Vec<Option<Hash>>) -> Result<Index, IndexError> {
        let expected = nr_chunks(size_bytes, chunk_bytes)?;
        if chunks.len() as u64 != expected {
            return Err(IndexError::Length { expected, found: chunks.len() as u64 });
        }
        Ok(Index { size_bytes, chunk_bytes, chunks })
    }

    /// Bytes of the snapshot.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of each chunk but the last.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The hash of each chunk; `None`: zeros.
    pub fn chunks(&self) -> &[Option<Hash>] {
        &self.chunks
    }

    /// The bytes of the snapshot that the chunk has.
    pub fn range_of(&self, chunk: usize) -> Range<u64> {
        let start = chunk as u64 * self.chunk_bytes;
        start..(start + self.chunk_bytes).min(self.size_bytes)
    }

    /// The identity of the snapshot: two of the same bytes in chunks of one size have the same.
    pub fn identity(&self) -> Identity {
        Identity::new("chunks", [&checksum(&self.head(), &self.table())[..]])
    }

    /// The index as it is stored.
    pub fn encode(&self) -> Vec<u8> {
        let (head, table) = (self.head(), self.table());
        let mut bytes = Vec::with_capacity(HEADER_BYTES + table.len());
        bytes.extend_from_slice(&head);
        bytes.extend_from_slice(&checksum(&head, &table));
        bytes.extend_from_slice(&table);
        bytes
    }

    /// The index that `bytes` are.
    ///
    /// # Errors
    /// They are none: any change of one that [`Index::encode`] made is noticed.
    pub fn decode(bytes: &[u8]) -> Result<Index, IndexError> {
        let (head, rest) = bytes.split_first_chunk::<24>().ok_or(IndexError::NoIndex)?;
        if head[..8] != MAGIC {
            return Err(IndexError::NoIndex);
        }
        let version = u32_at(head, 8);
        if version != VERSION {
            return Err(IndexError::Version(version));
        }
        let (chunk_bytes, size_bytes) = (u64::from(u32_at(head, 12)), u64_at(head, 16));
        let nr_chunks = nr_chunks(size_bytes, chunk_bytes)?;
        let expected = HEADER_BYTES as u64 + nr_chunks * HASH_BYTES as u64;
        let found = bytes.len() as u64;
        if found != expected {
            return Err(IndexError::Length { expected, found });
        }
        let (stored, table) = rest.split_at(HASH_BYTES);
        if checksum(head, table) != stored {
            return Err(IndexError::Checksum);
        }
        let (hashes, _) = table.as_chunks::<HASH_BYTES>();
        let chunks = hashes.iter().map(|hash| (*hash != [0; HASH_BYTES]).then_some(Hash(*hash))).collect();
        Ok(Index { size_bytes, chunk_bytes, chunks })
    }

    fn head(&self) -> [u8; 24] {
        let mut head = [0; 24];
        head[..8].copy_from_slice(&MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..16].copy_from_slice(&(self.chunk_bytes as u32).to_le_bytes());
        head[16..].copy_from_slice(&self.size_bytes.to_le_bytes());
        head
    }

    fn table(&self) -> Vec<u8> {
        self.chunks.iter().flat_map(|hash| hash.map_or([0; HASH_BYTES], |hash| hash.0)).collect()
    }
}

/// How many chunks a snapshot has, if the sizes are possible.
///
/// # Errors
/// [`IndexError::Sizes`]; its index would be longer than [`MOST_BYTES`], too.
pub fn nr_chunks(size_bytes: u64, chunk_bytes: u64) -> Result<u64, IndexError> {
    let is_possible = is_chunk_size(chunk_bytes)
        && size_bytes.is_multiple_of(PAGE_BYTES)
        && (PAGE_BYTES..=MOST_SNAPSHOT_BYTES).contains(&size_bytes)
        && HEADER_BYTES as u64 + size_bytes.div_ceil(chunk_bytes) * HASH_BYTES as u64 <= MOST_BYTES;
    if is_possible { Ok(size_bytes.div_ceil(chunk_bytes)) } else { Err(IndexError::Sizes { size_bytes, chunk_bytes }) }
}

fn checksum(head: &[u8; 24], table: &[u8]) -> [u8; HASH_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(head);
    hasher.update(table);
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn indexes() -> impl Strategy<Value = Index> {
        let hash = prop_oneof![Just(None), any::<[u8; 32]>().prop_map(|bytes| Some(Hash(bytes)))];
        (16u32..=21, prop::collection::vec(hash, 1..40), 1u64..=512).prop_map(|(shift, chunks, rest_pages)| {
            let chunk_bytes = 1u64 << shift;
            let last_bytes = (rest_pages * PAGE_BYTES).min(chunk_bytes);
            let size_bytes = (chunks.len() as u64 - 1) * chunk_bytes + last_bytes;
            Index::new(size_bytes, chunk_bytes, chunks).expect("the sizes are possible")
        })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(index in indexes()) {
            let bytes = index.encode();
            prop_assert_eq!(Index::decode(&bytes), Ok(index));
        }

        #[test]
        fn any_change_is_noticed(index in indexes(), at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>()) {
            let bytes = index.encode();
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] ^= 1 << bit;
            prop_assert!(Index::decode(&changed).is_err());
            prop_assert!(Index::decode(&bytes[..cut.index(bytes.len())]).is_err());
            let mut longer = bytes;
            longer.push(0);
            prop_assert!(Index::decode(&longer).is_err());
        }

        #[test]
        fn bytes_of_anything(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend_from_slice(&bytes);
            prop_assert!(Index::decode(&bytes).is_err());
            prop_assert!(Index::decode(&with_magic).is_err());
        }
    }

    #[test]
    fn sizes_that_are_none() {
        for (size_bytes, chunk_bytes) in
            [(0, 1 << 16), (4095, 1 << 16), (4096, 1 << 15), (4096, 1 << 22), (4096, 3 << 16), (!4095, 1 << 16)]
                .into_iter()
                .chain([((2 << 40) + 4096, 1 << 16), ((16 << 40) + 4096, 1 << 19)])
        {
            assert_eq!(
                Index::new(size_bytes, chunk_bytes, vec![None]),
                Err(IndexError::Sizes { size_bytes, chunk_bytes })
            );
        }
        assert_eq!(nr_chunks(2 << 40, 1 << 16), Ok(1 << 25));
        assert_eq!(nr_chunks(MOST_SNAPSHOT_BYTES, 1 << 19), Ok(1 << 25));
        let mut later = Index::new(4096, 1 << 16, vec![None]).unwrap().encode();
        later[8] = 2;
        assert_eq!(Index::decode(&later), Err(IndexError::Version(2)));
    }
}
