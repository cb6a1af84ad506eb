//! Keeps blocks of sources that cost much to read, in memory and on a disk.
//!
//! # Guarantees
//! - Blocks are kept by their identity ([`Source::block_identity`]): those of two snapshots are
//!   never mixed, and one cache serves all snapshots of a process.
//! - A block that comes from the disk is what was written there, or it is fetched again.
//! - Memory and disk are bounded: blocks in memory, blocks that are being fetched, and files each
//!   by a number of bytes (files by that and those few that are being written).
//! - A disk that is full, fails or is taken away costs time, and no read fails for it.
//! - Fetches of one source take half of the memory for fetches at most: a server that does not answer
//!   leaves the rest to others.
//! - Reads of one block at the same time cause one fetch.
//! - Blocks behind those that faults ask for are read ahead, as far as that was of use before
//!   ([`read_ahead`]). They take a quarter of the memory of blocks that are being fetched at most,
//!   and begin only where a fault's own read has room beside them.

mod disk;
pub mod read_ahead;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Identity, Mapped, PAGE_BYTES, Source, SourceError, check_range};
use disk::DiskCache;
use read_ahead::{Became, LONGEST_READ, ReadAhead};

/// The blocks that most sources have, for the first sizes of tables.
const USUAL_BLOCK_BYTES: u64 = 512 << 10;

/// How large a cache is.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Bytes of blocks in memory.
    pub memory_bytes: u64,
    /// Bytes of blocks that are being fetched.
    pub fetched_bytes: u64,
    /// Where blocks are kept on a disk, and how many bytes of them.
    pub disk: Option<(PathBuf, u64)>,
}

impl Default for CacheOptions {
    fn default() -> CacheOptions {
        CacheOptions { memory_bytes: 256 << 20, fetched_bytes: 128 << 20, disk: None }
    }
}

/// What a cache did.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) nr_memory_hits: AtomicU64,
    pub(super) nr_disk_hits: AtomicU64,
    pub(super) nr_fetched: AtomicU64,
    pub(super) nr_read_ahead: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) nr_corrupt: AtomicU64,
    pub(super) nr_not_written: AtomicU64,
}

/// What a cache did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheFigures {
    /// Reads of blocks that were in memory, or were being fetched for another reader.
    pub nr_memory_hits: u64,
    /// Reads of blocks that were on the disk.
    pub nr_disk_hits: u64,
    /// Blocks that were fetched.
    pub nr_fetched: u64,
    /// Of them those that were read ahead.
    pub nr_read_ahead: u64,
    /// Bytes of all.
    pub fetched_bytes: u64,
    /// Files that were not what was written.
    pub nr_corrupt: u64,
    /// Blocks that could not be written to the disk, or not as fast as they came.
    pub nr_not_written: u64,
    /// Bytes in memory.
    pub memory_bytes: u64,
    /// Bytes of files.
    pub disk_bytes: u64,
}

/// A cache of blocks.
#[derive(Debug)]
pub struct BlockCache {
    memory: Cache<Identity, Bytes, ByLength>,
    memory_bytes: u64,
    disk: Option<Arc<DiskCache>>,
    /// For each page that is being fetched.
    fetches: Semaphore,
    fetched_pages: u32,
    /// What blocks that are read ahead may have of it.
    aheads: Arc<Semaphore>,
    counters: Arc<Counters>,
}

/// Where a block was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// In memory, or on its way there for another reader.
    Memory,
    /// Elsewhere: it took its time.
    Elsewhere,
}

impl BlockCache {
    /// An empty one, or what the folder has.
    ///
    /// # Errors
    /// The folder cannot be used, or another process uses it.
    pub fn new(options: &CacheOptions) -> Result<Arc<BlockCache>, SourceError> {
        let counters = Arc::new(Counters::default());
        let disk = match &options.disk {
            Some((folder, most_bytes)) => Some(Arc::new(DiskCache::open(folder, *most_bytes, Arc::clone(&counters))?)),
            None => None,
        };
        let fetched_pages = u32::try_from(options.fetched_bytes / PAGE_BYTES).unwrap_or(u32::MAX).clamp(1, 1 << 28);
        Ok(Arc::new(BlockCache {
            memory: table(options.memory_bytes, ByLength, DefaultLifecycle::default()),
            memory_bytes: options.memory_bytes,
            disk,
            fetches: Semaphore::new(fetched_pages as usize),
            fetched_pages,
            aheads: Arc::new(Semaphore::new(fetched_pages as usize / 4)),
            counters,
        }))
    }

    /// What it did so far.
    pub fn figures(&self) -> CacheFigures {
        // Relaxed: each is a count of its own.
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheFigures {
            nr_memory_hits: count(&self.counters.nr_memory_hits),
            nr_disk_hits: count(&self.counters.nr_disk_hits),
            nr_fetched: count(&self.counters.nr_fetched),
            nr_read_ahead: count(&self.counters.nr_read_ahead),
            fetched_bytes: count(&self.counters.fetched_bytes),
            nr_corrupt: count(&self.counters.nr_corrupt),
            nr_not_written: count(&self.counters.nr_not_written),
            memory_bytes: self.memory.weight(),
            disk_bytes: self.disk.as_ref().map_or(0, |disk| disk.nr_bytes()),
        }
    }

    /// Waits until blocks that are being written to the disk are there.
    pub async fn finish_writes(&self) {
        if let Some(disk) = &self.disk {
            disk.finish_writes().await;
        }
    }

    /// What the fetches of one source may have.
    fn pages_of_source(&self) -> u32 {
        (self.fetched_pages / 2).max(1)
    }

    /// The block, from memory, from the disk, or by `fetch`, which is one of those of `of_source`.
    async fn get(
        &self,
        block: Identity,
        nr_bytes: usize,
        of_source: &Semaphore,
        fetch: impl Future<Output = Result<Bytes, SourceError>>,
    ) -> Result<(Bytes, Found), SourceError> {
        let mut found = Found::Memory;
        let bytes = self
            .memory
            .get_or_insert_async(&block, async {
                found = Found::Elsewhere;
                let pages = nr_pages(nr_bytes).min(self.pages_of_source());
                // First its own: what waits for that takes nothing from others.
                let own = of_source.acquire_many(pages).await;
                let _own = own.expect("it is never closed");
                let _permit = self.fetches.acquire_many(pages).await.expect("it is never closed");
                if let Some(disk) = &self.disk
                    && let Some(bytes) = disk.read(block, nr_bytes).await
                {
                    self.counters.nr_disk_hits.fetch_add(1, Ordering::Relaxed);
                    return Ok(bytes);
                }
                let bytes = fetch.await?;
                self.counters.nr_fetched.fetch_add(1, Ordering::Relaxed);
                self.counters.fetched_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                if let Some(disk) = &self.disk {
                    disk.write_later(block, bytes.clone());
                }
                Ok(bytes)
            })
            .await?;
        Ok((bytes, found))
    }

    /// What a block of `nr_bytes` needs that is read ahead, if it may be read now.
    fn permit_ahead(&self, nr_bytes: usize, of_source: &Semaphore) -> Option<OwnedSemaphorePermit> {
        let pages = nr_pages(nr_bytes);
        // Reads that wait for their turn have none left.
        let has_room = [&self.fetches, of_source].iter().all(|left| left.available_permits() > pages as usize);
        has_room.then(|| Arc::clone(&self.aheads).try_acquire_many_owned(pages).ok())?
    }
}

fn nr_pages(nr_bytes: usize) -> u32 {
    u32::try_from((nr_bytes as u64).div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
}

/// A table that is bounded by the sum of its values' bytes.
fn table<V: Clone, W: Weighter<Identity, V> + Clone, L: quick_cache::Lifecycle<Identity, V> + Clone>(
    most_bytes: u64,
    weighter: W,
    lifecycle: L,
) -> Cache<Identity, V, W, DefaultHashBuilder, L> {
    let options = OptionsBuilder::new()
        .estimated_items_capacity((most_bytes / USUAL_BLOCK_BYTES).max(16) as usize)
        .weight_capacity(most_bytes)
        // Each part has its share of the bytes, which is to have room for some of the largest blocks.
        .shards((most_bytes / (32 << 20)).clamp(1, 8) as usize)
        .build()
        .expect("all numbers that it needs are there");
    Cache::with_options(options, weighter, DefaultHashBuilder::default(), lifecycle)
}

/// A block counts as many bytes as it has.
#[derive(Clone, Debug)]
struct ByLength;

impl Weighter<Identity, Bytes> for ByLength {
    fn weight(&self, _block: &Identity, bytes: &Bytes) -> u64 {
        bytes.len() as u64
    }
}

/// A source behind a cache.
#[derive(Debug)]
pub struct Cached {
    source: Arc<dyn Source>,
    cache: Arc<BlockCache>,
    ahead: Arc<ReadAhead>,
    /// For each page that is being fetched from `source`.
    fetches: Arc<Semaphore>,
}

impl Cached {
    /// `source` behind `cache`.
    pub fn new(source: Arc<dyn Source>, cache: Arc<BlockCache>) -> Cached {
        let ahead = ReadAhead::new(cache.memory_bytes / source.granule_bytes());
        let fetches = Arc::new(Semaphore::new(cache.pages_of_source() as usize));
        Cached { source, cache, ahead: Arc::new(ahead), fetches }
    }

    /// The bytes of a block.
    fn range_of(&self, block: u64) -> Range<u64> {
        let start = block * self.source.granule_bytes();
        start..(start + self.source.granule_bytes()).min(self.source.size_bytes())
    }

    /// The block, which a read has asked for.
    async fn block(&self, block: u64) -> Result<Bytes, SourceError> {
        let range = self.range_of(block);
        let nr_bytes = (range.end - range.start) as usize;
        let fetch = async { self.source.read_shared(range.clone()).await };
        let identity = self.source.block_identity(block);
        let (bytes, found) = self.cache.get(identity, nr_bytes, &self.fetches, fetch).await?;
        match found {
            Found::Memory => self.hit(block),
            Found::Elsewhere => self.ahead.missed(block),
        }
        if bytes.len() == nr_bytes { Ok(bytes) } else { Err(SourceError::Corrupt { range }) }
    }

    fn hit(&self, block: u64) {
        self.cache.counters.nr_memory_hits.fetch_add(1, Ordering::Relaxed);
        self.ahead.hit(block);
    }

    /// The block that has all of `range`, and where in it that is.
    fn one_block(&self, range: &Range<u64>) -> Option<(u64, Range<usize>)> {
        let block = range.start / self.source.granule_bytes();
        let of_block = self.range_of(block);
        let is_in = range.start < range.end && range.end <= of_block.end;
        is_in.then(|| (block, (range.start - of_block.start) as usize..(range.end - of_block.start) as usize))
    }

    /// Fills `into` from a part of one block.
    async fn read_part(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let block = offset / self.source.granule_bytes();
        let range = self.range_of(block);
        if self.source.is_zero(range.clone()) {
            into.fill(0);
            return Ok(());
        }
        into.copy_from_slice(&self.block(block).await?[(offset - range.start) as usize..][..into.len()]);
        Ok(())
    }
}

impl Source for Cached {
    fn size_bytes(&self) -> u64 {
        self.source.size_bytes()
    }

    fn identity(&self) -> Identity {
        self.source.identity()
    }

    fn granule_bytes(&self) -> u64 {
        self.source.granule_bytes()
    }

    fn block_identity(&self, block: u64) -> Identity {
        self.source.block_identity(block)
    }

    fn mapped(&self, range: Range<u64>) -> Option<Mapped<'_>> {
        self.source.mapped(range)
    }

    fn is_mapped(&self) -> bool {
        self.source.is_mapped()
    }

    fn is_zero(&self, range: Range<u64>) -> bool {
        self.source.is_zero(range)
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.size_bytes())?;
            let parts = super::parts(offset, into, self.granule_bytes());
            let reads = parts.into_iter().map(|(at, part)| self.read_part(at, part));
            futures_util::future::try_join_all(reads).await.map(|_| ())
        }
        .boxed()
    }

    fn read_shared(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        async move {
            match self.one_block(&range) {
                Some((block, part)) if !self.source.is_zero(self.range_of(block)) => {
                    let bytes = self.block(block).await?;
                    // A caller keeps a part and accounts for that. It must not keep the block.
                    Ok(if part.len() == bytes.len() { bytes } else { Bytes::copy_from_slice(&bytes[part]) })
                }
                _ => super::read_new(self, range).await,
            }
        }
        .boxed()
    }

    fn cached(&self, range: Range<u64>) -> Option<Bytes> {
        let (block, part) = self.one_block(&range)?;
        let bytes = self.cache.memory.get(&self.source.block_identity(block))?;
        let bytes = (part.end <= bytes.len()).then(|| bytes.slice(part))?;
        self.hit(block);
        Some(bytes)
    }

    fn read_ahead(&self, end: u64, runtime: &Handle) {
        let granule = self.source.granule_bytes();
        let first = end.div_ceil(granule);
        let nr_blocks = self.source.size_bytes().div_ceil(granule);
        for block in first..first.saturating_add(self.ahead.reach_blocks()).min(nr_blocks) {
            let range = self.range_of(block);
            let nr_bytes = (range.end - range.start) as usize;
            let identity = self.source.block_identity(block);
            if self.source.is_zero(range.clone()) || self.cache.memory.contains_key(&identity) {
                continue;
            }
            let Some(permit) = self.cache.permit_ahead(nr_bytes, &self.fetches) else { return };
            if !self.ahead.begin(block) {
                continue;
            }
            let (source, cache, ahead) = (Arc::clone(&self.source), Arc::clone(&self.cache), Arc::clone(&self.ahead));
            let fetches = Arc::clone(&self.fetches);
            runtime.spawn(async move {
                let read = cache.get(identity, nr_bytes, &fetches, source.read_shared(range));
                let became = match tokio::time::timeout(LONGEST_READ, read).await {
                    Ok(Ok((_, Found::Memory))) => Became::WasThere,
                    Ok(Ok((_, Found::Elsewhere))) => {
                        cache.counters.nr_read_ahead.fetch_add(1, Ordering::Relaxed);
                        Became::Fetched
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(block, %error, "a block that no read has asked for cannot be had");
                        Became::Failed
                    }
                    Err(_) => Became::Failed,
                };
                ahead.ended(block, became);
                drop(permit);
            });
        }
    }
}
