//! Packs a snapshot: cuts it into chunks, stores those that the store does not have, then the
//! index.
//!
//! # Guarantees
//! - The index is stored after all its chunks are durable, and replaces an older one of its name at
//!   once.
//! - A chunk of a folder takes its name after its bytes are on the disk: what a crash tears is no
//!   chunk, and no later call relies on it.
//! - If packing fails or is stopped before the index is stored, the chunks that it stored in a
//!   folder are deleted again. If storing the index fails they stay, as it may be there. (In an
//!   object store they stay always: another computer may have found them there, and refer to them.)
//! - Its memory is bounded by [`PackOptions::nr_parallel`], beside 64 bytes for each chunk.
//!
//! # Implementation
//! Only one process packs into a folder at a time: it holds a lock of the folder (flock(2)). So no
//! other index refers to the chunks that a failed one deletes.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use futures_util::StreamExt;

use super::Location;
use super::body;
use super::index::{Hash, Index, nr_chunks};
use crate::folder_lock::lock_folder;
use crate::source::{Identity, Source, SourceError, blocking};

/// How a snapshot is packed. The defaults are those that `slat-pager bench sources` found best.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Bytes of a chunk: a power of two from 64 KiB to 2 MiB.
    pub chunk_bytes: u64,
    /// The level of Zstandard.
    pub level: i32,
    /// How many chunks are worked on at once.
    pub nr_parallel: usize,
    /// Packing ends with an error when this is set.
    pub stop: Arc<AtomicBool>,
}

impl Default for PackOptions {
    fn default() -> PackOptions {
        PackOptions { chunk_bytes: 512 << 10, level: 1, nr_parallel: 16, stop: Arc::default() }
    }
}

/// What was packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The identity of the snapshot.
    pub identity: Identity,
    /// Bytes of the snapshot.
    pub size_bytes: u64,
    /// Its chunks.
    pub nr_chunks: u64,
    /// Those of zeros, which are not stored.
    pub nr_zero_chunks: u64,
    /// Those that were stored.
    pub nr_new_chunks: u64,
    /// The bytes of these, as they are stored.
    pub new_bytes: u64,
}

/// Packs `source`; `progress` is told how many bytes more are done.
///
/// # Errors
/// No index has these sizes; the source cannot be read; the store cannot be written, or another
/// process packs into it; packing was stopped.
pub async fn pack(
    source: &Arc<dyn Source>,
    to: &Location,
    options: &PackOptions,
    progress: impl Fn(u64) + Sync,
) -> Result<Packed, SourceError> {
    // Before anything is stored: nothing could read an index that is too long.
    nr_chunks(source.size_bytes(), options.chunk_bytes)
        .map_err(|why| SourceError::Malformed { snapshot: to.name(), why: why.to_string() })?;
    let lock = to.folder.as_deref().map(lock_folder).transpose()?;
    let packing = Packing { source, to, options, seen: Mutex::default(), stored: Mutex::default() };
    let packed = packing.run(&progress).await;
    if packed.is_err() && lock.is_some() {
        packing.delete_stored().await;
    }
    packed
}

/// One call of [`pack`].
struct Packing<'p> {
    source: &'p Arc<dyn Source>,
    to: &'p Location,
    options: &'p PackOptions,
    /// The chunks that were stored, are being stored, or were there.
    seen: Mutex<HashSet<Hash>>,
    /// Those of them that this call stored, or tried to, and their bytes as they are stored.
    stored: Mutex<Vec<(Hash, u64)>>,
}

impl Packing<'_> {
    async fn run(&self, progress: &(impl Fn(u64) + Sync)) -> Result<Packed, SourceError> {
        let (size_bytes, chunk_bytes) = (self.source.size_bytes(), self.options.chunk_bytes);
        // After the first error none is begun, but all that were are waited for: a write that goes on
        // in a thread would store its chunk after the others were deleted.
        let failure = OnceLock::new();
        let starts = (0..size_bytes).step_by(chunk_bytes as usize);
        let chunks: Vec<Option<Hash>> = futures_util::stream::iter(starts)
            .map(|start| {
                let failure = &failure;
                async move {
                    if failure.get().is_some() {
                        return None;
                    }
                    let nr_bytes = chunk_bytes.min(size_bytes - start);
                    // Relaxed: a flag that orders nothing.
                    let result = match self.options.stop.load(Ordering::Relaxed) {
                        true => Err(stopped()),
                        false => self.pack_chunk(start, nr_bytes as usize).await,
                    };
                    progress(nr_bytes);
                    result.unwrap_or_else(|error| {
                        // The first one counts.
                        let _ = failure.set(error);
                        None
                    })
                }
            })
            .buffered(self.options.nr_parallel.max(1))
            .collect()
            .await;
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        let nr_zero_chunks = chunks.iter().filter(|chunk| chunk.is_none()).count() as u64;
        let nr_chunks = chunks.len() as u64;
        let index = Index::new(size_bytes, chunk_bytes, chunks)
            .map_err(|why| SourceError::Malformed { snapshot: self.to.name(), why: why.to_string() })?;
        self.make_durable()?;
        // From here on they are the index's: a call that stores it and then fails may have published it.
        let stored = self.take_stored();
        self.to.objects.put(&self.to.index, Bytes::from(index.encode())).await?;
        Ok(Packed {
            identity: index.identity(),
            size_bytes,
            nr_chunks,
            nr_zero_chunks,
            nr_new_chunks: stored.len() as u64,
            new_bytes: stored.iter().map(|(_, nr_bytes)| nr_bytes).sum(),
        })
    }

    /// Stores a chunk, if it is none of zeros and the store does not have it.
    async fn pack_chunk(&self, start: u64, nr_bytes: usize) -> Result<Option<Hash>, SourceError> {
        if self.source.is_zero(start..start + nr_bytes as u64) {
            return Ok(None);
        }
        let mut bytes = vec![0; nr_bytes];
        self.source.read(start, &mut bytes).await?;
        let (bytes, hash) = blocking("encode a chunk", move || {
            let hash = (!is_all_zero(&bytes)).then(|| Hash::of(&bytes));
            (bytes, hash)
        })
        .await?;
        let Some(hash) = hash else { return Ok(None) };
        let is_new = self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(hash);
        let path = self.to.chunk_path(&hash);
        if !is_new || self.to.objects.head(&path).await?.is_some() {
            return Ok(Some(hash));
        }
        let level = self.options.level;
        let body = blocking("encode a chunk", move || body::encode(&bytes, level)).await?;
        self.stored.lock().unwrap_or_else(PoisonError::into_inner).push((hash, body.len() as u64));
        self.to.objects.put(&path, Bytes::from(body)).await?;
        Ok(Some(hash))
    }

    fn take_stored(&self) -> Vec<(Hash, u64)> {
        std::mem::take(&mut *self.stored.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Deletes what was stored. What cannot be is only a chunk that no index names.
    async fn delete_stored(&self) {
        for (hash, _) in self.take_stored() {
            if let Err(error) = self.to.objects.delete(&self.to.chunk_path(&hash)).await {
                tracing::warn!(%error, "a chunk of a snapshot that was not packed stays");
            }
        }
    }

    /// Waits until the chunks of a folder are on its disk, with their names. Those that this call
    /// stored are. A call that was killed may have left one whose name is not there yet.
    fn make_durable(&self) -> Result<(), SourceError> {
        let Some(folder) = &self.to.folder else { return Ok(()) };
        let failed = |error: io::Error| SourceError::Io { what: format!("write {}", folder.display()), error };
        let open = File::open(folder).map_err(failed)?;
        rustix::fs::syncfs(&open).map_err(|error| failed(error.into()))
    }
}

fn stopped() -> SourceError {
    SourceError::Io { what: "pack on".to_string(), error: io::Error::new(io::ErrorKind::Interrupted, "it was stopped") }
}

/// Whether all bytes are zero.
pub(crate) fn is_all_zero(bytes: &[u8]) -> bool {
    // A part without an early end is compared many bytes at once.
    bytes.chunks(4096).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}
