//! Layers against a plain model.

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use slat_pager::source::layers::{Layer, Layers};
use slat_pager::source::memory_file::MemoryFile;
use slat_pager::source::pages::PageSet;
use slat_pager::source::{PAGE_BYTES, Source, SourceError};

use crate::bytes::{Counted, PAGE, check_all, read, snapshot, write_sparse};

/// A layer as Firecracker writes it: the pages that changed, holes elsewhere.
fn write_diff(path: &Path, version: u64, nr_pages: usize, changed: impl Fn(usize) -> bool) {
    use std::os::unix::fs::FileExt;
    let (bytes, file) = (snapshot(version, nr_pages), std::fs::File::create(path).unwrap());
    file.set_len(bytes.len() as u64).unwrap();
    for page in (0..nr_pages).filter(|page| changed(*page)) {
        file.write_all_at(&bytes[page * PAGE..][..PAGE], (page * PAGE) as u64).unwrap();
    }
}

#[tokio::test]
async fn the_last_layer_that_has_a_page_counts() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let nr_pages = 300;
    write_sparse(&path("base"), &crate::bytes::snapshot_with(1, nr_pages, |page| page % 10 == 9));
    write_diff(&path("one"), 2, nr_pages, |page| page % 3 == 0);
    write_diff(&path("two"), 3, nr_pages, |page| page % 5 == 0 || (200..250).contains(&page));
    let layers = vec![Layer::open(&path("one")).unwrap(), Layer::open(&path("two")).unwrap()];
    assert_eq!(layers[0].pages().len(), 100);
    let source = Layers::new(Arc::new(MemoryFile::open(&path("base")).unwrap()), layers).unwrap();
    let mut expected = Vec::new();
    for page in 0..nr_pages {
        let version = match page {
            page if page % 5 == 0 || (200..250).contains(&page) => 3,
            page if page % 3 == 0 => 2,
            page if page % 10 == 9 => 0,
            _ => 1,
        };
        let bytes = if version == 0 { vec![0; PAGE * nr_pages] } else { snapshot(version, nr_pages) };
        expected.extend_from_slice(&bytes[page * PAGE..][..PAGE]);
    }
    for part_bytes in [4096, 64 << 10, 1 << 20, 5000] {
        check_all(&source, &expected, part_bytes).await;
    }
    assert!(source.mapped(200 * PAGE_BYTES..250 * PAGE_BYTES).is_some(), "of one layer");
    assert!(source.mapped(200 * PAGE_BYTES..252 * PAGE_BYTES).is_none(), "of two");
    assert!(source.is_zero(19 * PAGE_BYTES..20 * PAGE_BYTES) && !source.is_zero(9 * PAGE_BYTES..10 * PAGE_BYTES));
}

#[tokio::test]
async fn a_dirty_log_beside_a_layer_counts_more_than_its_holes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("base"), snapshot(1, 64)).unwrap();
    // Page 3 was changed to zeros: a hole, and yet the layer's.
    write_diff(&path("diff"), 2, 64, |page| page == 5);
    std::fs::write(path("diff.dirty"), [0b0010_1000, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let source =
        Layers::new(Arc::new(MemoryFile::open(&path("base")).unwrap()), vec![Layer::open(&path("diff")).unwrap()])
            .unwrap();
    let page = |number: u64| number * PAGE_BYTES..(number + 1) * PAGE_BYTES;
    assert_eq!(read(&source, page(3)).await.unwrap(), vec![0; PAGE]);
    assert!(source.is_zero(page(3)));
    assert_eq!(read(&source, page(5)).await.unwrap(), snapshot(2, 64)[5 * PAGE..6 * PAGE]);
    assert_eq!(read(&source, page(4)).await.unwrap(), snapshot(1, 64)[4 * PAGE..5 * PAGE]);
    // A log that is none.
    for log in [&[0u8; 7][..], &[0; 9], &[]] {
        std::fs::write(path("diff.dirty"), log).unwrap();
        assert!(matches!(Layer::open(&path("diff")), Err(SourceError::Malformed { .. })));
    }
}

#[test]
fn chains_that_do_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("base"), snapshot(1, 64)).unwrap();
    write_diff(&path("diff"), 2, 65, |page| page == 5);
    let base: Arc<dyn Source> = Arc::new(MemoryFile::open(&path("base")).unwrap());
    let longer = Layer::open(&path("diff")).unwrap();
    assert!(matches!(Layers::new(base.clone(), vec![longer.clone()]), Err(SourceError::Malformed { .. })));
    write_diff(&path("diff"), 2, 64, |page| page == 5);
    let right = Layer::open(&path("diff")).unwrap();
    assert!(Layers::new(base.clone(), vec![right.clone(); 64]).is_ok());
    assert!(Layers::new(base.clone(), vec![right; 65]).is_err());
    let wrong_log = Layer::new(base.clone(), PageSet::new(63));
    assert!(Layers::new(base, vec![wrong_log]).is_err());
}

#[tokio::test]
async fn a_layer_that_changes_gives_no_more_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("base"), snapshot(1, 64)).unwrap();
    write_diff(&path("diff"), 2, 64, |page| page >= 32);
    let source =
        Layers::new(Arc::new(MemoryFile::open(&path("base")).unwrap()), vec![Layer::open(&path("diff")).unwrap()])
            .unwrap();
    assert!(read(&source, 0..64 * PAGE_BYTES).await.is_ok());
    write_diff(&path("diff"), 3, 64, |page| page >= 16);
    assert!(read(&source, 0..32 * PAGE_BYTES).await.is_ok(), "the base is as it was");
    assert!(matches!(read(&source, 0..33 * PAGE_BYTES).await, Err(SourceError::Changed { .. })));
    assert!(source.mapped(40 * PAGE_BYTES..41 * PAGE_BYTES).is_none());
}

proptest! {
    #[test]
    fn as_a_model_that_copies(
        nr_pages in 1usize..80,
        layers in prop::collection::vec(prop::collection::vec(any::<bool>(), 80), 0..6),
        reads in prop::collection::vec((0usize..80 * PAGE, 0usize..40 * PAGE), 1..10),
    ) {
        let mut model = snapshot(1, nr_pages);
        let base: Arc<dyn Source> = Counted::new(model.clone(), 4096, "base");
        let mut above = Vec::new();
        for (number, changed) in layers.iter().enumerate() {
            let (bytes, mut pages) = (snapshot(number as u64 + 2, nr_pages), PageSet::new(nr_pages as u64));
            for page in (0..nr_pages).filter(|page| changed[*page]) {
                pages.insert_bytes((page * PAGE) as u64..((page + 1) * PAGE) as u64);
                model[page * PAGE..][..PAGE].copy_from_slice(&bytes[page * PAGE..][..PAGE]);
            }
            above.push(Layer::new(Counted::new(bytes, 4096, &format!("layer {number}")), pages));
        }
        let source = Layers::new(base, above).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for (start, nr_bytes) in reads {
            let result = runtime.block_on(read(&source, start as u64..(start + nr_bytes) as u64));
            match model.get(start..start + nr_bytes) {
                Some(expected) => prop_assert!(result.unwrap() == expected),
                None => prop_assert!(matches!(result, Err(SourceError::OutOfRange { .. })), "behind the end"),
            }
        }
    }
}
