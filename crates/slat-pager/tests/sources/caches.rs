//! Caches: what they keep, what they evict, and what becomes of files that are not what was
//! written.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat_pager::source::cache::{BlockCache, CacheOptions, Cached};
use slat_pager::source::{Identity, SourceError};

use crate::bytes::{Counted, check_all, read, snapshot, snapshot_with};
use crate::chunks::SmallDisk;

const GRANULE: u64 = 64 << 10;

fn options(memory_bytes: u64, disk: Option<(&Path, u64)>) -> CacheOptions {
    let disk = disk.map(|(folder, nr_bytes)| (folder.to_path_buf(), nr_bytes));
    CacheOptions { memory_bytes, disk, ..CacheOptions::default() }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .flat_map(|prefix| fs::read_dir(prefix.unwrap().path()).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    found.sort();
    found
}

fn bytes_of(files: &[PathBuf]) -> u64 {
    files.iter().map(|path| path.metadata().unwrap().len()).sum()
}

#[tokio::test]
async fn a_block_is_fetched_once() {
    let bytes = snapshot(1, 100);
    let source = Counted::new(bytes.clone(), GRANULE, "one");
    let cache = BlockCache::new(&options(64 << 20, None)).unwrap();
    let cached = Arc::new(Cached::new(source.clone(), cache.clone()));
    // Many want the same at once, page by page.
    let readers: Vec<_> = (0..20)
        .map(|_| {
            let (cached, bytes) = (cached.clone(), bytes.clone());
            tokio::spawn(async move { check_all(&*cached, &bytes, 4096).await })
        })
        .collect();
    for reader in readers {
        reader.await.unwrap();
    }
    assert_eq!(source.nr_reads.load(Ordering::Relaxed), 7, "blocks of the snapshot");
    let figures = cache.figures();
    assert_eq!(
        (figures.nr_fetched, figures.fetched_bytes, figures.memory_bytes),
        (7, bytes.len() as u64, bytes.len() as u64)
    );
    assert_eq!(figures.nr_memory_hits, 20 * 100 - 7);
}

#[tokio::test]
async fn snapshots_are_never_mixed() {
    let folder = tempfile::tempdir().unwrap();
    let cache = BlockCache::new(&options(1 << 20, Some((folder.path(), 64 << 20)))).unwrap();
    let snapshots: Vec<Vec<u8>> = (0..8).map(|version| snapshot(version, 64)).collect();
    let cached: Vec<Cached> = snapshots
        .iter()
        .enumerate()
        .map(|(number, bytes)| {
            Cached::new(Counted::new(bytes.clone(), GRANULE, &format!("vm {number}")), cache.clone())
        })
        .collect();
    for _ in 0..3 {
        for (cached, bytes) in cached.iter().zip(&snapshots) {
            check_all(cached, bytes, 20_000).await;
            cache.finish_writes().await;
        }
    }
}

#[tokio::test]
async fn an_error_is_not_kept() {
    let bytes = snapshot(1, 16);
    let source = Counted::new(bytes.clone(), GRANULE, "one");
    source.nr_failures.store(2, Ordering::Relaxed);
    let cached = Cached::new(source, BlockCache::new(&options(1 << 20, None)).unwrap());
    for _ in 0..2 {
        assert!(matches!(read(&cached, 0..4096).await, Err(SourceError::Unavailable { .. })));
    }
    check_all(&cached, &bytes, 4096).await;
}

#[tokio::test]
async fn memory_and_disk_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = snapshot(1, 16 * 100);
    let source = Counted::new(bytes.clone(), GRANULE, "one");
    let (memory_bytes, disk_bytes) = (10 * GRANULE, 30 * GRANULE);
    let cache = BlockCache::new(&options(memory_bytes, Some((folder.path(), disk_bytes)))).unwrap();
    let cached = Cached::new(source, cache.clone());
    for _ in 0..3 {
        let mut start = 0;
        while start < bytes.len() as u64 {
            read(&cached, start..start + GRANULE).await.unwrap();
            start += GRANULE;
            cache.finish_writes().await;
            let figures = cache.figures();
            assert!(figures.memory_bytes <= memory_bytes && figures.disk_bytes <= disk_bytes, "{figures:?}");
        }
        let found = files(folder.path());
        assert_eq!(bytes_of(&found), cache.figures().disk_bytes);
        assert!(bytes_of(&found) <= disk_bytes && !found.is_empty());
    }
    check_all(&cached, &bytes, GRANULE).await;
}

#[tokio::test]
async fn a_disk_cache_outlives_its_process_and_heals() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = snapshot_with(1, 16 * 20, |page| page < 16);
    let disk = options(64 << 20, Some((folder.path(), 64 << 20)));
    let source = Counted::new(bytes.clone(), GRANULE, "one");
    let open = || {
        let cache = BlockCache::new(&disk).unwrap();
        (Cached::new(source.clone(), cache.clone()), cache)
    };
    let (cached, cache) = open();
    // A write at a time: none is left out because the disk is behind.
    let mut start = 0;
    while start < bytes.len() as u64 {
        read(&cached, start..start + GRANULE).await.unwrap();
        cache.finish_writes().await;
        start += GRANULE;
    }
    assert!(matches!(BlockCache::new(&disk), Err(SourceError::Unavailable { .. })), "another process has it");
    drop((cached, cache));
    let found = files(folder.path());
    assert_eq!(found.len(), 20);
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 6] = [
        ("a bit of the block", |file| file[5000] ^= 1),
        ("a bit of the header", |file| file[20] ^= 1),
        ("its hash", |file| file[70] ^= 1),
        ("shorter", |file| file.truncate(3000)),
        ("empty", |file| file.clear()),
        ("longer", |file| file.push(0)),
    ];
    for ((what, change), path) in changes.iter().zip(&found) {
        let mut file = fs::read(path).unwrap();
        change(&mut file);
        fs::write(path, file).unwrap();
        println!("{what}: {}", path.display());
    }
    // Two whole blocks under each other's names, one that is gone, one that a dead process began.
    fs::copy(&found[7], &found[6]).unwrap();
    fs::remove_file(&found[8]).unwrap();
    let begun = found[9].with_file_name(format!("{}.new", found[9].file_name().unwrap().to_str().unwrap()));
    fs::write(&begun, b"slat").unwrap();
    let nr_before = source.nr_reads.load(Ordering::Relaxed);
    let (cached, cache) = open();
    assert!(!begun.exists());
    check_all(&cached, &bytes, GRANULE).await;
    let figures = cache.figures();
    assert_eq!(figures.nr_corrupt, 7);
    assert_eq!(figures.nr_disk_hits, 20 - 8);
    assert_eq!(source.nr_reads.load(Ordering::Relaxed) - nr_before, 8, "what was wrong or gone");
    cache.finish_writes().await;
    drop((cached, cache));
    // What was fetched again is there again, as far as the disk kept up.
    let (cached, cache) = open();
    check_all(&cached, &bytes, GRANULE).await;
    assert_eq!(cache.figures().nr_corrupt, 0);
}

#[tokio::test]
async fn a_smaller_cache_drops_what_is_too_much() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = snapshot(1, 16 * 20);
    let cache = BlockCache::new(&options(1, Some((folder.path(), 64 << 20)))).unwrap();
    let cached = Cached::new(Counted::new(bytes.clone(), GRANULE, "one"), cache.clone());
    check_all(&cached, &bytes, GRANULE).await;
    cache.finish_writes().await;
    drop((cached, cache));
    let cache = BlockCache::new(&options(1, Some((folder.path(), 5 * GRANULE)))).unwrap();
    assert!(bytes_of(&files(folder.path())) <= 5 * GRANULE);
    assert!(cache.figures().disk_bytes <= 5 * GRANULE);
}

#[tokio::test]
async fn a_full_disk_costs_no_read() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_disk) = SmallDisk::mount(folder.path(), 1 << 20) else { return };
    let bytes = snapshot(1, 16 * 40);
    let source = Counted::new(bytes.clone(), GRANULE, "one");
    let cache = BlockCache::new(&options(4 * GRANULE, Some((folder.path(), 1 << 30)))).unwrap();
    let cached = Cached::new(source, cache.clone());
    let mut start = 0;
    while start < bytes.len() as u64 {
        assert!(read(&cached, start..start + GRANULE).await.unwrap() == bytes[start as usize..][..GRANULE as usize]);
        cache.finish_writes().await;
        start += GRANULE;
    }
    assert!(cache.figures().nr_not_written > 0);
    assert!(files(folder.path()).iter().all(|path| path.extension().is_none()), "what is not whole is deleted");
    check_all(&cached, &bytes, GRANULE).await;
}

#[tokio::test]
async fn a_disk_that_is_taken_away_costs_no_read() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = snapshot(1, 16 * 10);
    let cache = BlockCache::new(&options(GRANULE, Some((&folder.path().join("cache"), 1 << 30)))).unwrap();
    let cached = Cached::new(Counted::new(bytes.clone(), GRANULE, "one"), cache.clone());
    check_all(&cached, &bytes, GRANULE).await;
    cache.finish_writes().await;
    fs::remove_dir_all(folder.path().join("cache")).unwrap();
    check_all(&cached, &bytes, GRANULE).await;
}

#[test]
fn parts_of_an_identity_are_not_run_together() {
    let identity = |parts: &[&str]| Identity::new("object", parts.iter().map(|part| part.as_bytes()));
    assert_ne!(identity(&["ab", "c"]), identity(&["a", "bc"]));
    assert_ne!(identity(&["a", ""]), identity(&["a"]));
}
