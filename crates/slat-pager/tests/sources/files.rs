//! Memory files: right, sparse, short, changed meanwhile.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;

use slat_pager::source::memory_file::MemoryFile;
use slat_pager::source::{PAGE_BYTES, Source, SourceError};

use crate::bytes::{PAGE, check_all, read, snapshot, snapshot_with, write_sparse};

/// What the kernel finds at an address of this process: as an ioctl of a userfaultfd would.
fn bytes_of(source: &dyn Source, range: std::ops::Range<u64>) -> Option<std::io::Result<Vec<u8>>> {
    let mapped = source.mapped(range)?;
    let mut bytes = vec![0; mapped.nr_bytes()];
    let memory = File::open("/proc/self/mem").unwrap();
    Some(memory.read_exact_at(&mut bytes, mapped.address()).map(|()| bytes))
}

#[tokio::test]
async fn each_byte_by_reads_and_by_the_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    // No whole number of blocks.
    let expected = snapshot_with(1, 1003, |page| page % 7 == 3 || (500..600).contains(&page));
    write_sparse(&path, &expected);
    let source = MemoryFile::open(&path).unwrap();
    check_all(&source, &expected, 4096).await;
    check_all(&source, &expected, 64 << 10).await;
    check_all(&source, &expected, 3 << 20).await;
    // All was read, so it is in the page cache, and mapped.
    for (start, end) in
        [(0, 4096), (4096, 65536 + 4096), (0, expected.len() as u64), (1002 * PAGE_BYTES, 1003 * PAGE_BYTES)]
    {
        let bytes = bytes_of(&source, start..end).expect("it is mapped").unwrap();
        assert!(bytes == expected[start as usize..end as usize], "{start}..{end}");
    }
    for page in 0..1003 {
        let range = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
        assert_eq!(source.is_zero(range), page % 7 == 3 || (500..600).contains(&page), "page {page}");
    }
    assert!(source.is_zero(500 * PAGE_BYTES..600 * PAGE_BYTES));
    assert!(!source.is_zero(499 * PAGE_BYTES..600 * PAGE_BYTES));
}

#[tokio::test]
async fn what_is_behind_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    std::fs::write(&path, snapshot(1, 20)).unwrap();
    let source = MemoryFile::open(&path).unwrap();
    for range in [19 * PAGE_BYTES..21 * PAGE_BYTES, 20 * PAGE_BYTES..21 * PAGE_BYTES, u64::MAX - 4095..u64::MAX] {
        assert!(matches!(read(&source, range.clone()).await, Err(SourceError::OutOfRange { .. })), "{range:?}");
        assert!(source.mapped(range.clone()).is_none(), "{range:?}");
        assert!(!source.is_zero(range.clone()), "{range:?}");
    }
}

#[test]
fn files_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    assert!(matches!(MemoryFile::open(&path), Err(SourceError::Io { .. })), "not there");
    assert!(matches!(MemoryFile::open(folder.path()), Err(SourceError::Malformed { .. })), "a folder");
    for nr_bytes in [0, 1, PAGE - 1, PAGE + 1] {
        std::fs::write(&path, vec![1; nr_bytes]).unwrap();
        assert!(matches!(MemoryFile::open(&path), Err(SourceError::Malformed { .. })), "{nr_bytes} bytes");
    }
}

#[tokio::test]
async fn a_file_that_changes_gives_no_more_bytes() {
    let write = |file: &File| file.write_all_at(&[7; 8], 5 * PAGE_BYTES).unwrap();
    let truncate = |file: &File| file.set_len(10 * PAGE_BYTES).unwrap();
    let extend = |file: &File| file.set_len(50 * PAGE_BYTES).unwrap();
    let punch = |file: &File| {
        use rustix::fs::{FallocateFlags, fallocate};
        fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4 * PAGE_BYTES).unwrap();
    };
    type Change<'c> = &'c dyn Fn(&File);
    let changes: [(&str, Change); 4] =
        [("written", &write), ("shorter", &truncate), ("longer", &extend), ("a hole", &punch)];
    for (what, change) in changes {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mem");
        write_sparse(&path, &snapshot_with(1, 40, |page| page == 30));
        // Just written: opening must wait until a change would show.
        let source = MemoryFile::open(&path).unwrap();
        check_all(&source, &snapshot_with(1, 40, |page| page == 30), 4096).await;
        assert!(source.mapped(0..4096).is_some() && source.is_zero(30 * PAGE_BYTES..31 * PAGE_BYTES));
        change(&OpenOptions::new().write(true).open(&path).unwrap());
        assert!(source.mapped(0..4096).is_none(), "{what}");
        assert!(!source.is_zero(30 * PAGE_BYTES..31 * PAGE_BYTES), "{what}");
        for page in [0, 5, 30, 39] {
            let result = read(&source, page * PAGE_BYTES..(page + 1) * PAGE_BYTES).await;
            let error = result.expect_err(what);
            assert!(matches!(error, SourceError::Changed { .. }), "{what}: {error}");
            assert!(!error.may_pass());
        }
    }
}

#[tokio::test]
async fn another_file_at_the_path_is_not_this_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    std::fs::write(&path, snapshot(1, 40)).unwrap();
    let source = MemoryFile::open(&path).unwrap();
    let new = folder.path().join("new");
    std::fs::write(&new, snapshot(2, 40)).unwrap();
    std::fs::rename(&new, &path).unwrap();
    // The one that was opened is still served, also when it has no name any more.
    check_all(&source, &snapshot(1, 40), 4096).await;
    let other = MemoryFile::open(&path).unwrap();
    check_all(&other, &snapshot(2, 40), 4096).await;
    assert_ne!(source.identity(), other.identity());
    assert_eq!(other.identity(), MemoryFile::open(&path).unwrap().identity());
}

#[tokio::test]
async fn a_file_that_the_kernel_has_not_cached_is_read_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    let expected = snapshot(1, 512);
    let mut file = File::create(&path).unwrap();
    file.write_all(&expected).unwrap();
    file.sync_all().unwrap();
    let source = MemoryFile::open(&path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    // Where the kernel keeps the pages nevertheless (tmpfs), they are mapped.
    let was_mapped = source.mapped(0..64 << 10).is_some();
    println!("after the cache was dropped, it is {}", if was_mapped { "mapped" } else { "to be read" });
    check_all(&source, &expected, 64 << 10).await;
    assert!(source.mapped(0..expected.len() as u64).is_some());
}

#[tokio::test]
async fn of_another_users_file_only_what_was_read_is_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    let expected = snapshot(1, 512);
    std::fs::write(&path, &expected).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    if let Err(error) = std::os::unix::fs::chown(&path, Some(54321), Some(54321)) {
        println!("skipped: a file cannot be given to another user: {error}");
        return;
    }
    // It was just written, so it is cached. What the kernel says of that counts for nothing.
    let source = MemoryFile::open(&path).unwrap();
    assert!(source.mapped(0..64 << 10).is_none());
    assert!(source.is_mapped());
    check_all(&source, &expected, 64 << 10).await;
    assert!(source.mapped(0..expected.len() as u64).is_some());
}

#[tokio::test]
async fn many_readers_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem");
    let expected = std::sync::Arc::new(snapshot(1, 600));
    std::fs::write(&path, &**expected).unwrap();
    let source = std::sync::Arc::new(MemoryFile::open(&path).unwrap());
    let readers: Vec<_> = (1..30u64)
        .map(|number| {
            let (source, expected) = (source.clone(), expected.clone());
            tokio::spawn(async move { check_all(&*source, &expected, number * PAGE_BYTES).await })
        })
        .collect();
    for reader in readers {
        reader.await.unwrap();
    }
}
