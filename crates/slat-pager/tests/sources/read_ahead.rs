//! Blocks that are read ahead of faults: how many, which, and when none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat_pager::source::Source;
use slat_pager::source::cache::read_ahead::{FIRST_BLOCKS, MISSES};
use slat_pager::source::cache::{BlockCache, CacheFigures, CacheOptions, Cached};
use tokio::runtime::Handle;

use crate::bytes::{Counted, snapshot};

const GRANULE: u64 = 4096;

struct Reader {
    bytes: Vec<u8>,
    source: Arc<Counted>,
    cache: Arc<BlockCache>,
    cached: Cached,
}

impl Reader {
    fn new(nr_blocks: usize, memory_bytes: u64) -> Reader {
        let bytes = snapshot(1, nr_blocks);
        let source = Counted::new(bytes.clone(), GRANULE, "one");
        let cache = BlockCache::new(&CacheOptions { memory_bytes, ..CacheOptions::default() }).unwrap();
        let cached = Cached::new(source.clone(), cache.clone());
        Reader { bytes, source, cache, cached }
    }

    /// What a fault does. Whether its block was at hand.
    async fn fault(&self, block: u64) -> bool {
        let range = block * GRANULE..(block + 1) * GRANULE;
        let cached = self.cached.cached(range.clone());
        let was_at_hand = cached.is_some();
        let bytes = match cached {
            Some(bytes) => bytes,
            None => self.cached.read_shared(range.clone()).await.unwrap(),
        };
        assert!(bytes == self.bytes[range.start as usize..range.end as usize], "block {block}");
        self.cached.read_ahead(range.end, &Handle::current());
        self.settle().await;
        was_at_hand
    }

    /// Waits until nothing is on its way: on one thread, each task that was begun runs meanwhile.
    async fn settle(&self) {
        for _ in 0..40 {
            tokio::task::yield_now().await;
        }
    }

    fn nr_reads(&self) -> u64 {
        self.source.nr_reads.load(Ordering::Relaxed)
    }

    fn figures(&self) -> CacheFigures {
        self.cache.figures()
    }
}

const ROOM: u64 = 64 << 20;

#[tokio::test]
async fn one_block_after_the_other() {
    let reader = Reader::new(300, ROOM);
    let mut nr_missed = 0;
    for block in 0..300 {
        nr_missed += u64::from(!reader.fault(block).await);
    }
    assert_eq!((nr_missed, reader.nr_reads()), (1, 300), "{:?}", reader.figures());
    assert_eq!(reader.figures().nr_read_ahead, 299);
}

#[tokio::test]
async fn all_blocks_in_any_order() {
    let reader = Reader::new(256, ROOM);
    let mut blocks: Vec<u64> = (0..256).collect();
    blocks.sort_by_key(|block| *blake3::hash(&block.to_le_bytes()).as_bytes());
    let mut nr_missed = 0;
    for block in blocks {
        nr_missed += u64::from(!reader.fault(block).await);
    }
    assert_eq!(reader.nr_reads(), 256, "each once");
    assert!(nr_missed < 192, "{nr_missed}");
}

#[tokio::test]
async fn blocks_that_are_far_apart_cost_little_more() {
    const NR_FAULTS: u64 = 400;
    let reader = Reader::new(NR_FAULTS as usize * 32, ROOM);
    for nr in 0..NR_FAULTS {
        reader.fault(nr * 211 % NR_FAULTS * 32).await;
    }
    let figures = reader.figures();
    assert!(figures.nr_read_ahead <= FIRST_BLOCKS + NR_FAULTS / MISSES, "{figures:?}");
    assert_eq!(reader.nr_reads(), NR_FAULTS + figures.nr_read_ahead);
}

#[tokio::test]
async fn reads_that_are_no_faults_have_nothing_read_ahead() {
    let reader = Reader::new(100, ROOM);
    crate::bytes::check_all(&reader.cached, &reader.bytes, GRANULE).await;
    reader.settle().await;
    assert_eq!((reader.nr_reads(), reader.figures().nr_read_ahead), (100, 0));
}

#[tokio::test]
async fn a_source_that_fails_is_left_alone() {
    let reader = Reader::new(100, ROOM);
    reader.fault(0).await;
    let nr_before = reader.nr_reads();
    assert!(nr_before > 1, "some were read ahead");
    // The next that is read ahead fails, and no fault hears of it.
    reader.source.nr_failures.store(1000, Ordering::Relaxed);
    reader.cached.read_ahead(50 * GRANULE, &Handle::current());
    reader.settle().await;
    let nr_failed = reader.nr_reads() - nr_before;
    assert!(nr_failed > 0);
    reader.cached.read_ahead(60 * GRANULE, &Handle::current());
    reader.settle().await;
    assert_eq!(reader.nr_reads(), nr_before + nr_failed, "no other");
    // Reads that succeed earn it again.
    reader.source.nr_failures.store(0, Ordering::Relaxed);
    let nr_before = reader.figures().nr_read_ahead;
    for block in (60..96).step_by(4) {
        reader.fault(block).await;
    }
    assert!(reader.figures().nr_read_ahead > nr_before);
}

#[tokio::test]
async fn a_cache_that_has_no_room_gets_nothing_ahead() {
    for memory_bytes in [1, 3 * GRANULE] {
        let reader = Reader::new(100, memory_bytes);
        for block in 0..100 {
            reader.fault(block).await;
        }
        assert_eq!(reader.figures().nr_read_ahead, 0);
    }
}

#[tokio::test]
async fn what_is_being_fetched_leaves_no_room_for_more() {
    let bytes = snapshot(1, 64);
    let source = Counted::new(bytes, GRANULE, "one");
    // For four blocks at once: one of them may be read ahead.
    let options = CacheOptions { fetched_bytes: 4 * GRANULE, ..CacheOptions::default() };
    let cache = BlockCache::new(&options).unwrap();
    let cached = Cached::new(source, cache.clone());
    cached.read_ahead(0, &Handle::current());
    for _ in 0..40 {
        tokio::task::yield_now().await;
    }
    assert_eq!(cache.figures().nr_read_ahead, 1);
}
