//! Packed snapshots: every byte, shared chunks, corruption, full disks, packing that is stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use slat_pager::chunks::Location;
use slat_pager::chunks::pack::{PackOptions, Packed, pack};
use slat_pager::chunks::verify::{compare, measure, verify};
use slat_pager::source::chunked::{Chunked, MOST_CHUNKS};
use slat_pager::source::{PAGE_BYTES, Source, SourceError};

use crate::bytes::{Counted, PAGE, check_all, read, snapshot, snapshot_with};

fn location(folder: &Path, name: &str) -> Location {
    Location::open(folder.join(name).to_str().unwrap(), &[]).unwrap()
}

fn options(chunk_bytes: u64) -> PackOptions {
    PackOptions { chunk_bytes, ..PackOptions::default() }
}

async fn pack_bytes(bytes: &[u8], to: &Location, options: &PackOptions) -> Result<Packed, SourceError> {
    let source: Arc<dyn Source> = Counted::new(bytes.to_vec(), 4096, "to be packed");
    pack(&source, to, options, |_| {}).await
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[tokio::test]
async fn each_byte_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    for chunk_bytes in [64 << 10, 128 << 10, 2 << 20] {
        // The last chunk is a shorter one.
        let bytes = snapshot_with(1, 1003, |page| (100..400).contains(&page));
        let to = location(folder.path(), "vm.index");
        let packed = pack_bytes(&bytes, &to, &options(chunk_bytes)).await.unwrap();
        assert_eq!(
            (packed.size_bytes, packed.nr_chunks),
            (bytes.len() as u64, (bytes.len() as u64).div_ceil(chunk_bytes))
        );
        let source = Chunked::open(location(folder.path(), "vm.index")).await.unwrap();
        assert_eq!((source.identity(), source.granule_bytes()), (packed.identity, chunk_bytes));
        check_all(&source, &bytes, chunk_bytes).await;
        check_all(&source, &bytes, 5 * chunk_bytes - 4096).await;
        assert_eq!(read(&source, 5000..5001).await.unwrap(), bytes[5000..5001]);
        if chunk_bytes < 2 << 20 {
            assert!(packed.nr_zero_chunks > 0 && source.is_zero(200 * PAGE_BYTES..300 * PAGE_BYTES));
        }
        assert!(matches!(
            read(&source, 1003 * PAGE_BYTES..1004 * PAGE_BYTES).await,
            Err(SourceError::OutOfRange { .. })
        ));
    }
}

#[tokio::test]
async fn equal_chunks_are_stored_once_for_all_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = snapshot(1, 256);
    let first = pack_bytes(&bytes, &location(folder.path(), "one.index"), &options(64 << 10)).await.unwrap();
    assert_eq!((first.nr_chunks, first.nr_zero_chunks, first.nr_new_chunks), (16, 0, 16));
    // One page differs: one chunk does. And a part occurs twice.
    bytes[0..8].fill(9);
    bytes.extend_from_within(64 << 10..128 << 10);
    let second = pack_bytes(&bytes, &location(folder.path(), "two.index"), &options(64 << 10)).await.unwrap();
    assert_eq!((second.nr_chunks, second.nr_new_chunks), (17, 1));
    assert_eq!(files(&folder.path().join("chunks")).len(), 17);
    let at = location(folder.path(), "two.index");
    let index = at.read_index().await.unwrap();
    let stored = measure(&at, &index).await.unwrap();
    assert_eq!((stored.nr_different_chunks, stored.nr_repeated_chunks, stored.nr_missing_chunks), (16, 1, 0));
    let of_files: u64 = files(&folder.path().join("chunks")).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(stored.stored_bytes < of_files && stored.stored_bytes < stored.different_bytes);
    // Packed again, nothing is new, and the identity is the same.
    let again = pack_bytes(&bytes, &location(folder.path(), "three.index"), &options(64 << 10)).await.unwrap();
    assert_eq!((again.nr_new_chunks, again.identity), (0, second.identity));
    let (one, two) =
        (Chunked::open(location(folder.path(), "one.index")).await.unwrap(), Chunked::open(at).await.unwrap());
    assert_ne!(one.identity(), two.identity());
    assert_ne!(one.block_identity(0), two.block_identity(0));
    assert_eq!(one.block_identity(1), two.block_identity(1));
    check_all(&two, &bytes, 64 << 10).await;
}

#[tokio::test]
async fn corrupt_missing_and_exchanged_chunks_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = snapshot(1, 128);
    let at = location(folder.path(), "vm.index");
    pack_bytes(&bytes, &at, &options(64 << 10)).await.unwrap();
    let chunks = files(&folder.path().join("chunks"));
    let changes: [(&str, &dyn Fn()); 4] = [
        ("a bit", &|| {
            let mut stored = fs::read(&chunks[0]).unwrap();
            let middle = stored.len() / 2;
            stored[middle] ^= 4;
            fs::write(&chunks[0], stored).unwrap();
        }),
        ("shorter", &|| {
            let stored = fs::read(&chunks[0]).unwrap();
            fs::write(&chunks[0], &stored[..stored.len() - 1]).unwrap();
        }),
        ("another chunk", &|| {
            fs::copy(&chunks[1], &chunks[0]).unwrap();
        }),
        ("gone", &|| fs::remove_file(&chunks[0]).unwrap()),
    ];
    let right = fs::read(&chunks[0]).unwrap();
    for (what, change) in changes {
        change();
        let source = Chunked::open(at.clone()).await.unwrap();
        let index = at.read_index().await.unwrap();
        let bad = verify(&at, &index, |_| {}).await.unwrap();
        assert_eq!(bad.len(), 1, "{what}");
        for chunk in 0..8u64 {
            let result = read(&source, chunk << 16..(chunk + 1) << 16).await;
            match bad.contains_key(&(chunk as usize)) {
                true => {
                    let error = result.expect_err(what);
                    assert!(
                        matches!(error, SourceError::Corrupt { .. } | SourceError::NotThere { .. }),
                        "{what}: {error}"
                    );
                    assert!(!error.may_pass());
                }
                false => assert!(result.unwrap() == bytes[(chunk << 16) as usize..][..1 << 16]),
            }
        }
        fs::write(&chunks[0], &right).unwrap();
        assert!(verify(&at, &index, |_| {}).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn an_index_that_is_none_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = location(folder.path(), "vm.index");
    assert!(matches!(at.read_index().await, Err(SourceError::NotThere { .. })));
    pack_bytes(&snapshot(1, 64), &at, &options(64 << 10)).await.unwrap();
    let path = folder.path().join("vm.index");
    let right = fs::read(&path).unwrap();
    let changed = |at: usize| {
        let mut bytes = right.clone();
        bytes[at] ^= 1;
        bytes
    };
    for wrong in [
        right[..right.len() - 1].to_vec(),
        Vec::new(),
        snapshot(1, 1),
        changed(0),
        changed(9),
        changed(17),
        changed(30),
        changed(60),
    ] {
        fs::write(&path, wrong).unwrap();
        assert!(matches!(Chunked::open(at.clone()).await, Err(SourceError::Malformed { .. })));
    }
    assert!(Location::open(folder.path().join("vm").to_str().unwrap(), &[]).is_err());
    let elsewhere = folder.path().join("none/vm.index");
    assert!(matches!(Location::open(elsewhere.to_str().unwrap(), &[]), Err(SourceError::NotThere { .. })));
    assert!(!folder.path().join("none").exists(), "to look makes no folder");
    assert!(pack_bytes(&snapshot(1, 64), &at, &options(100_000)).await.is_err(), "chunks of no possible size");
}

#[tokio::test]
async fn packing_that_fails_or_is_stopped_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    pack_bytes(&snapshot(1, 256), &location(folder.path(), "one.index"), &options(64 << 10)).await.unwrap();
    let before = files(folder.path());
    // Version 1 with other pages in its second half: its first half is shared, and must stay.
    let mut bytes = snapshot(1, 128);
    bytes.extend(snapshot(2, 2000));
    let source = Counted::new(bytes.clone(), 4096, "two");
    let to = location(folder.path(), "two.index");
    // The source fails once, somewhere.
    let nr_done = std::sync::atomic::AtomicU64::new(0);
    let failing: Arc<dyn Source> = source.clone();
    let result = pack(&failing, &to, &options(64 << 10), |_| {
        if nr_done.fetch_add(1, Ordering::Relaxed) == 60 {
            source.nr_failures.store(1, Ordering::Relaxed);
        }
    })
    .await;
    assert!(matches!(result, Err(SourceError::Unavailable { .. })), "{result:?}");
    assert_eq!(files(folder.path()), before);
    // It is stopped.
    let options = options(64 << 10);
    let nr_done = std::sync::atomic::AtomicU64::new(0);
    let result = pack(&failing, &to, &options, |_| {
        if nr_done.fetch_add(1, Ordering::Relaxed) == 60 {
            options.stop.store(true, Ordering::Relaxed);
        }
    })
    .await;
    assert!(
        matches!(&result, Err(SourceError::Io { error, .. }) if error.kind() == std::io::ErrorKind::Interrupted),
        "{result:?}"
    );
    assert_eq!(files(folder.path()), before);
    let one = Chunked::open(location(folder.path(), "one.index")).await.unwrap();
    check_all(&one, &snapshot(1, 256), 64 << 10).await;
}

#[tokio::test]
async fn an_index_that_cannot_be_stored_takes_no_chunk_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let to = location(folder.path(), "vm.index");
    fs::create_dir(folder.path().join("vm.index")).unwrap();
    assert!(pack_bytes(&snapshot(1, 64), &to, &options(64 << 10)).await.is_err());
    fs::remove_dir(folder.path().join("vm.index")).unwrap();
    let packed = pack_bytes(&snapshot(1, 64), &to, &options(64 << 10)).await.unwrap();
    assert_eq!(packed.nr_new_chunks, 0);
    check_all(&Chunked::open(to).await.unwrap(), &snapshot(1, 64), 64 << 10).await;
}

#[tokio::test]
async fn only_one_packs_into_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let lock = fs::File::open(folder.path()).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let to = location(folder.path(), "vm.index");
    let result = pack_bytes(&snapshot(1, 64), &to, &options(64 << 10)).await;
    assert!(matches!(result, Err(SourceError::Unavailable { .. })), "{result:?}");
    drop(lock);
    pack_bytes(&snapshot(1, 64), &to, &options(64 << 10)).await.unwrap();
}

/// A file system of `nr_bytes` bytes at a folder, as long as it lives; `None` where this may not
/// be.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn mount(folder: &Path, nr_bytes: u64) -> Option<SmallDisk> {
        let options = format!("size={nr_bytes}");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder).output();
        match mount {
            Ok(output) if output.status.success() => Some(SmallDisk(folder.to_path_buf())),
            why => {
                println!("skipped: a small disk cannot be mounted here: {why:?}");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[tokio::test]
async fn a_full_disk_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_disk) = SmallDisk::mount(folder.path(), 4 << 20) else { return };
    // Bytes that do not shrink.
    let mut bytes = vec![0; 8 << 20];
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"noise").finalize_xof().fill(&mut bytes);
    let result = pack_bytes(&bytes, &location(folder.path(), "vm.index"), &options(64 << 10)).await;
    let is_full = |error: &std::io::Error| error.kind() == std::io::ErrorKind::StorageFull;
    assert!(matches!(&result, Err(SourceError::Io { error, .. }) if is_full(error)), "{result:?}");
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
    pack_bytes(&bytes[..2 << 20], &location(folder.path(), "vm.index"), &options(64 << 10)).await.unwrap();
}

#[tokio::test]
async fn two_snapshots_are_compared() {
    let bytes = snapshot(1, 700);
    let mut other = bytes.clone();
    other[600 * PAGE + 17] ^= 1;
    let source = |bytes: &[u8]| -> Arc<dyn Source> { Counted::new(bytes.to_vec(), 4096, "compared") };
    assert_eq!(compare(&source(&bytes), &source(&bytes), |_| {}).await.unwrap(), None);
    let differs = compare(&source(&bytes), &source(&other), |_| {}).await.unwrap();
    assert_eq!(differs, Some(600 * PAGE_BYTES + 17));
    let shorter = compare(&source(&bytes), &source(&bytes[..PAGE]), |_| {}).await.unwrap();
    assert_eq!(shorter, Some(PAGE_BYTES));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_pages_come_back(pages in prop::collection::vec(0u64..4, 1..100), shift in 16u32..19) {
        // Few kinds of pages: many chunks are equal, some are zeros.
        let mut bytes = Vec::new();
        for kind in &pages {
            bytes.extend(vec![*kind as u8; PAGE]);
        }
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let at = location(folder.path(), "vm.index");
            pack_bytes(&bytes, &at, &options(1 << shift)).await.unwrap();
            let source = Chunked::open(at).await.unwrap();
            check_all(&source, &bytes, 64 << 10).await;
        });
    }
}

/// Reads that a machine has given up go on in their threads, where a disk does not answer: those of
/// one snapshot take a part of the process's threads alone.
#[test]
fn a_folder_that_hangs_leaves_threads_to_others() {
    const NR_CHUNKS: usize = 2 * MOST_CHUNKS;
    let folder = tempfile::tempdir().unwrap();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.max_blocking_threads(MOST_CHUNKS + 8).enable_all().build().unwrap();
    let source = runtime.block_on(async {
        let bytes = snapshot(1, 16 * NR_CHUNKS);
        pack_bytes(&bytes, &location(folder.path(), "vm.index"), &options(64 << 10)).await.unwrap();
        Arc::new(Chunked::open(location(folder.path(), "vm.index")).await.unwrap())
    });
    // What opens a chunk waits for a writer.
    let chunks = files(&folder.path().join("chunks"));
    assert_eq!(chunks.len(), NR_CHUNKS);
    for chunk in &chunks {
        fs::remove_file(chunk).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, chunk, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    }
    let other = runtime.block_on(async {
        // Each is tried again.
        for _ in 0..3 {
            let reads = (0..NR_CHUNKS as u64).map(|chunk| {
                let source = Arc::clone(&source);
                tokio::spawn(async move { source.read_shared(chunk << 16..(chunk + 1) << 16).await })
            });
            let reads: Vec<_> = reads.collect();
            tokio::time::sleep(Duration::from_millis(200)).await;
            for read in reads {
                read.abort();
                assert!(read.await.unwrap_err().is_cancelled());
            }
        }
        tokio::time::timeout(Duration::from_secs(20), tokio::task::spawn_blocking(|| 7)).await
    });
    runtime.shutdown_background();
    let is_open = |chunk| fs::File::options().read(true).write(true).open(chunk).unwrap();
    drop(chunks.iter().map(is_open).collect::<Vec<_>>());
    assert_eq!(other.expect("no thread is left").unwrap(), 7);
}
