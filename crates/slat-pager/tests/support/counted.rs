//! A source that counts what is read at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::BoxFuture;
use slat_pager::source::{Identity, Source, SourceError};

use crate::support::Pattern;

/// Counts what is under way.
#[derive(Debug)]
pub struct Counted {
    pattern: Pattern,
    under_way: AtomicU64,
    /// The most bytes that were under way at a time.
    pub most: AtomicU64,
}

impl Counted {
    pub fn new(pattern: Pattern) -> Counted {
        Counted { pattern, under_way: AtomicU64::new(0), most: AtomicU64::new(0) }
    }
}

impl Source for Counted {
    fn size_bytes(&self) -> u64 {
        self.pattern.size_bytes()
    }

    fn identity(&self) -> Identity {
        self.pattern.identity()
    }

    fn granule_bytes(&self) -> u64 {
        self.pattern.granule_bytes()
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        Box::pin(async move {
            let nr_bytes = into.len() as u64;
            let now = self.under_way.fetch_add(nr_bytes, Ordering::Relaxed) + nr_bytes;
            self.most.fetch_max(now, Ordering::Relaxed);
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            let read = self.pattern.read(offset, into).await;
            self.under_way.fetch_sub(nr_bytes, Ordering::Relaxed);
            read
        })
    }
}
