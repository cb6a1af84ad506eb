//! A chunk as it is stored.

use thiserror::Error;
use zstd::bulk::{Compressor, Decompressor};

use super::index::Hash;

const MAGIC: [u8; 4] = *b"slck";
const HEADER_BYTES: usize = 8;

/// How a chunk is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Encoding {
    /// As it is.
    Plain = 0,
    /// One frame of Zstandard.
    Zstd = 1,
}

/// Why stored bytes are not the chunk.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BodyError {
    /// They do not begin as a chunk does.
    #[error("it does not begin as a chunk does")]
    NoChunk,
    /// An encoding that this program does not know.
    #[error("its encoding is {0}, which this program does not know")]
    Encoding(u8),
    /// It cannot be decompressed, or has another size.
    #[error("it is not {expected} bytes: {why}")]
    Size {
        /// How many there should be.
        expected: usize,
        /// What was found.
        why: String,
    },
    /// Its bytes are others.
    #[error("its hash is {found}")]
    Hash {
        /// The hash of what is there.
        found: Hash,
    },
}

/// What a chunk of `nr_bytes` takes at most: one that does not shrink is stored as it is.
pub fn most_stored_bytes(nr_bytes: usize) -> u64 {
    (HEADER_BYTES + nr_bytes) as u64
}

/// A chunk as it is stored, compressed with `level` if that saves a sixteenth at least.
pub fn encode(bytes: &[u8], level: i32) -> Vec<u8> {
    let compressed = Compressor::new(level).and_then(|mut compressor| compressor.compress(bytes));
    let (encoding, content) = match &compressed {
        Ok(compressed) if compressed.len() <= bytes.len() - bytes.len() / 16 => (Encoding::Zstd, &compressed[..]),
        _ => (Encoding::Plain, bytes),
    };
    let mut stored = Vec::with_capacity(HEADER_BYTES + content.len());
    stored.extend_from_slice(&MAGIC);
    stored.extend_from_slice(&[encoding as u8, 0, 0, 0]);
    stored.extend_from_slice(content);
    stored
}

/// The chunk that is stored: `nr_bytes` bytes with the hash.
///
/// # Errors
/// It is another one, or none.
pub fn decode(stored: &[u8], hash: &Hash, nr_bytes: usize) -> Result<Vec<u8>, BodyError> {
    let (header, content) = stored.split_first_chunk::<HEADER_BYTES>().ok_or(BodyError::NoChunk)?;
    if header[..4] != MAGIC || header[5..] != [0; 3] {
        return Err(BodyError::NoChunk);
    }
    let size = |why: String| BodyError::Size { expected: nr_bytes, why };
    let bytes = match header[4] {
        encoding if encoding == Encoding::Plain as u8 => content.to_vec(),
        encoding if encoding == Encoding::Zstd as u8 => Decompressor::new()
            // It gives no more than this, whatever the frame says.
            .and_then(|mut decompressor| decompressor.decompress(content, nr_bytes))
            .map_err(|error| size(error.to_string()))?,
        encoding => return Err(BodyError::Encoding(encoding)),
    };
    if bytes.len() != nr_bytes {
        return Err(size(format!("it has {}", bytes.len())));
    }
    let found = Hash::of(&bytes);
    if found == *hash { Ok(bytes) } else { Err(BodyError::Hash { found }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(pattern in prop::collection::vec(any::<u8>(), 1..300), repeat in 1usize..100) {
            let bytes = pattern.repeat(repeat);
            let stored = encode(&bytes, 1);
            prop_assert!(stored.len() as u64 <= most_stored_bytes(bytes.len()));
            prop_assert_eq!(decode(&stored, &Hash::of(&bytes), bytes.len()), Ok(bytes));
        }

        #[test]
        fn other_bytes_are_noticed(pattern in prop::collection::vec(any::<u8>(), 16..300), repeat in 1usize..20, at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>()) {
            let bytes = pattern.repeat(repeat);
            let stored = encode(&bytes, 1);
            let hash = Hash::of(&bytes);
            let mut changed = stored.clone();
            changed[at.index(stored.len())] ^= 1 << bit;
            // A flag of a frame may change nothing of what it says.
            if let Ok(decoded) = decode(&changed, &hash, bytes.len()) {
                prop_assert_eq!(&decoded, &bytes);
            }
            prop_assert!(decode(&stored[..cut.index(stored.len())], &hash, bytes.len()).is_err());
            prop_assert!(decode(&stored, &Hash([1; 32]), bytes.len()).is_err());
            prop_assert!(decode(&stored, &hash, bytes.len() + 1).is_err());
            prop_assert!(decode(&stored, &hash, bytes.len() - 1).is_err());
        }
    }
}
