//! Bytes of snapshots that tell where they are from, and sources that do what a test says.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use slat_pager::source::{Identity, PAGE_BYTES, Source, SourceError};

pub const PAGE: usize = PAGE_BYTES as usize;

/// Bytes of a version of a snapshot: each word has the version and where it is. Pages for which
/// `is_zero` says so are zeros.
pub fn snapshot_with(version: u64, nr_pages: usize, is_zero: impl Fn(usize) -> bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(nr_pages * PAGE);
    for page in 0..nr_pages {
        for word in 0..PAGE / 8 {
            let value = (version << 48) + (page * PAGE + word * 8) as u64 + 1;
            bytes.extend_from_slice(&if is_zero(page) { [0; 8] } else { value.to_le_bytes() });
        }
    }
    bytes
}

pub fn snapshot(version: u64, nr_pages: usize) -> Vec<u8> {
    snapshot_with(version, nr_pages, |_| false)
}

/// Writes pages that are not zeros, and leaves holes for those that are.
pub fn write_sparse(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (page, content) in bytes.chunks(PAGE).enumerate() {
        if content.iter().any(|byte| *byte != 0) {
            file.write_all_at(content, (page * PAGE) as u64).unwrap();
        }
    }
}

/// Reads a part of a source.
pub async fn read(source: &dyn Source, range: Range<u64>) -> Result<Vec<u8>, SourceError> {
    let mut bytes = vec![0xA5; (range.end - range.start) as usize];
    source.read(range.start, &mut bytes).await.map(|()| bytes)
}

/// Reads all of a source in parts of `part_bytes`, and compares it.
pub async fn check_all(source: &dyn Source, expected: &[u8], part_bytes: u64) {
    assert_eq!(source.size_bytes(), expected.len() as u64);
    let mut start = 0;
    while start < source.size_bytes() {
        let end = (start + part_bytes).min(source.size_bytes());
        let bytes = read(source, start..end).await.unwrap();
        assert!(bytes == expected[start as usize..end as usize], "bytes {start}..{end} differ");
        start = end;
    }
}

/// A snapshot in memory that counts its reads, and fails as many as a test says.
#[derive(Debug)]
pub struct Counted {
    pub bytes: Vec<u8>,
    pub granule_bytes: u64,
    pub identity: Identity,
    pub nr_reads: AtomicU64,
    pub nr_failures: AtomicU64,
}

impl Counted {
    pub fn new(bytes: Vec<u8>, granule_bytes: u64, name: &str) -> Arc<Counted> {
        Arc::new(Counted {
            bytes,
            granule_bytes,
            identity: Identity::new("test", [name.as_bytes()]),
            nr_reads: AtomicU64::new(0),
            nr_failures: AtomicU64::new(0),
        })
    }
}

impl Source for Counted {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            self.nr_reads.fetch_add(1, Ordering::Relaxed);
            // Others run, and ask for the same.
            tokio::task::yield_now().await;
            let fails = |nr_left: u64| nr_left.checked_sub(1);
            if self.nr_failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails).is_ok() {
                return Err(SourceError::Unavailable { server: "a test".to_string(), why: "it says so".to_string() });
            }
            into.copy_from_slice(&self.bytes[offset as usize..][..into.len()]);
            Ok(())
        }
        .boxed()
    }
}
