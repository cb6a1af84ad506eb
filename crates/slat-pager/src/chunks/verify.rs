//! Whether a snapshot is whole, and what it takes: `slat-pager verify` and `inspect`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures_util::StreamExt;

use super::Location;
use super::index::{Hash, Index};
use crate::source::{Source, SourceError};

const NR_PARALLEL: usize = 16;
/// How much of two snapshots is compared at once.
const COMPARED_BYTES: u64 = 1 << 20;

/// What the chunks of a snapshot take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Chunks of zeros, which are not stored.
    pub nr_zero_chunks: u64,
    /// Different ones that are stored.
    pub nr_different_chunks: u64,
    /// Those that are stored once and occur again.
    pub nr_repeated_chunks: u64,
    /// Bytes of the different ones.
    pub different_bytes: u64,
    /// Bytes of the different ones as they are stored.
    pub stored_bytes: u64,
    /// Those that are missing.
    pub nr_missing_chunks: u64,
}

/// What the chunks of a snapshot take in their store.
///
/// # Errors
/// The store does not answer.
pub async fn measure(at: &Location, index: &Index) -> Result<Stored, SourceError> {
    let different = different_chunks(index);
    let nr_zero_chunks = index.chunks().iter().filter(|chunk| chunk.is_none()).count() as u64;
    let mut stored = Stored {
        nr_zero_chunks,
        nr_different_chunks: different.len() as u64,
        nr_repeated_chunks: index.chunks().len() as u64 - nr_zero_chunks - different.len() as u64,
        different_bytes: different.values().map(|first| nr_bytes(index, *first) as u64).sum(),
        ..Stored::default()
    };
    let mut heads = futures_util::stream::iter(different.into_keys())
        .map(|hash| async move { at.objects.head(&at.chunk_path(&hash)).await })
        .buffer_unordered(NR_PARALLEL);
    while let Some(head) = heads.next().await {
        match head? {
            Some(meta) => stored.stored_bytes += meta.size,
            None => stored.nr_missing_chunks += 1,
        }
    }
    Ok(stored)
}

/// Reads all chunks of a snapshot. Returns those that are not what they should be, with the number
/// of the first chunk that each is; `progress` is told how many bytes of the snapshot are done.
///
/// # Errors
/// The store does not answer: nothing is known then.
pub async fn verify(
    at: &Location,
    index: &Index,
    progress: impl Fn(u64),
) -> Result<BTreeMap<usize, SourceError>, SourceError> {
    let mut bad = BTreeMap::new();
    let mut checked = futures_util::stream::iter(different_chunks(index))
        .map(|(hash, first)| async move { (first, at.read_chunk(hash, nr_bytes(index, first)).await) })
        .buffer_unordered(NR_PARALLEL);
    while let Some((first, result)) = checked.next().await {
        match result {
            Ok(_) => {}
            Err(error @ (SourceError::Unavailable { .. } | SourceError::Refused { .. })) => return Err(error),
            Err(error) => {
                bad.insert(first, error);
            }
        }
        progress(nr_bytes(index, first) as u64);
    }
    Ok(bad)
}

/// Compares all bytes of two snapshots. Returns the first that differs; `progress` is told how many
/// bytes are done.
///
/// # Errors
/// One of them cannot be read.
pub async fn compare(
    one: &Arc<dyn Source>,
    other: &Arc<dyn Source>,
    progress: impl Fn(u64),
) -> Result<Option<u64>, SourceError> {
    let size_bytes = one.size_bytes();
    if size_bytes != other.size_bytes() {
        return Ok(Some(size_bytes.min(other.size_bytes())));
    }
    let mut parts = futures_util::stream::iter((0..size_bytes).step_by(COMPARED_BYTES as usize))
        .map(|start| async move {
            let nr_bytes = COMPARED_BYTES.min(size_bytes - start) as usize;
            let (mut ones, mut others) = (vec![0; nr_bytes], vec![0; nr_bytes]);
            futures_util::try_join!(one.read(start, &mut ones), other.read(start, &mut others))?;
            // Whole first: that is many bytes at once.
            let differs = (ones != others).then(|| ones.iter().zip(&others).position(|(one, other)| one != other));
            Ok::<_, SourceError>((nr_bytes as u64, differs.flatten().map(|at| start + at as u64)))
        })
        .buffered(NR_PARALLEL);
    while let Some(part) = parts.next().await {
        let (nr_bytes, differs) = part?;
        if differs.is_some() {
            return Ok(differs);
        }
        progress(nr_bytes);
    }
    Ok(None)
}

/// Each chunk that is stored, with the number of the first one that it is. (A shorter last one
/// never has the hash of another.)
pub(crate) fn different_chunks(index: &Index) -> HashMap<Hash, usize> {
    let mut first = HashMap::new();
    for (number, hash) in index.chunks().iter().enumerate() {
        if let Some(hash) = hash {
            first.entry(*hash).or_insert(number);
        }
    }
    first
}

fn nr_bytes(index: &Index, chunk: usize) -> usize {
    let range = index.range_of(chunk);
    (range.end - range.start) as usize
}
