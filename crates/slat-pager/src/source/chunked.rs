//! A snapshot of chunks ([`crate::chunks`]) as a source.
//!
//! A read decodes whole chunks: put a [`super::cache::Cached`] before it, or each page costs that.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::Semaphore;

use super::{Identity, PAGE_BYTES, Source, SourceError, check_range};
use crate::chunks::Location;
use crate::chunks::index::{Hash, Index};

/// How many chunks are read and decoded at once: this bounds memory, and threads that wait for a
/// folder.
pub const MOST_CHUNKS: usize = 64;

/// A snapshot of chunks.
#[derive(Debug)]
pub struct Chunked {
    at: Location,
    index: Index,
    identity: Identity,
    /// For each chunk that is being read.
    chunks: Arc<Semaphore>,
}

impl Chunked {
    /// Opens a snapshot.
    ///
    /// # Errors
    /// There is none; the store does not answer, or refuses.
    pub async fn open(at: Location) -> Result<Chunked, SourceError> {
        let index = at.read_index().await?;
        let identity = index.identity();
        Ok(Chunked { at, index, identity, chunks: Arc::new(Semaphore::new(MOST_CHUNKS)) })
    }

    /// Its index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The hash of the chunk that has the byte.
    fn chunk_at(&self, offset: u64) -> Option<Hash> {
        *self.index.chunks().get((offset / self.index.chunk_bytes()) as usize)?
    }

    /// The chunk at `range`, which is that of one chunk with this hash.
    async fn chunk(&self, hash: Hash, range: &Range<u64>) -> Result<Vec<u8>, SourceError> {
        let (at, nr_bytes) = (self.at.clone(), (range.end - range.start) as usize);
        let read = async move { at.read_chunk(hash, nr_bytes).await };
        super::in_place_of(&self.chunks, "read a chunk", read).await.map_err(|error| match error {
            // That is said of what the guest lacks.
            SourceError::Malformed { snapshot, why } => {
                tracing::error!(snapshot, why, "a chunk is corrupt");
                SourceError::Corrupt { range: range.clone() }
            }
            error => error,
        })
    }

    /// Fills `into` from a part of one chunk.
    async fn read_part(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let Some(hash) = self.chunk_at(offset) else {
            into.fill(0);
            return Ok(());
        };
        let range = self.index.range_of((offset / self.index.chunk_bytes()) as usize);
        let bytes = self.chunk(hash, &range).await?;
        into.copy_from_slice(&bytes[(offset - range.start) as usize..][..into.len()]);
        Ok(())
    }
}

impl Source for Chunked {
    fn size_bytes(&self) -> u64 {
        self.index.size_bytes()
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn granule_bytes(&self) -> u64 {
        self.index.chunk_bytes()
    }

    fn is_zero(&self, range: Range<u64>) -> bool {
        let chunk_bytes = self.index.chunk_bytes();
        range.end <= self.size_bytes()
            && (range.start / chunk_bytes..range.end.div_ceil(chunk_bytes))
                .all(|chunk| self.index.chunks()[chunk as usize].is_none())
    }

    fn block_identity(&self, block: u64) -> Identity {
        match self.chunk_at(block.saturating_mul(self.index.chunk_bytes())) {
            // By its content: one chunk of many snapshots is one block of a cache.
            Some(hash) => Identity::new("chunk", [&hash.0[..]]),
            None => super::numbered_block(self, block),
        }
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.size_bytes())?;
            let parts = super::parts(offset, into, self.index.chunk_bytes());
            let reads = parts.into_iter().map(|(at, part)| self.read_part(at, part));
            futures_util::future::try_join_all(reads).await.map(|_| ())
        }
        .boxed()
    }

    fn read_shared(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        async move {
            let of_chunk = self.index.range_of((range.start / self.index.chunk_bytes()) as usize);
            match self.chunk_at(range.start) {
                // As it was decoded, without a copy.
                Some(hash) if of_chunk == range => Ok(Bytes::from(self.chunk(hash, &range).await?)),
                _ => super::read_new(self, range).await,
            }
        }
        .boxed()
    }
}

const _: () = assert!(crate::chunks::index::LEAST_CHUNK_BYTES.is_multiple_of(PAGE_BYTES));
