//! The snapshot of a measurement: pages that are told apart by their first word, about half of
//! whose bytes compress.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::source::PAGE_BYTES;

/// The first word of a page.
pub(super) fn first_word(page: u64) -> u64 {
    mixed(page)
}

/// Writes a snapshot of `nr_pages` pages, durably.
pub(super) fn write(path: &Path, nr_pages: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut bytes = [0; PAGE_BYTES as usize];
    for page in 0..nr_pages {
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (index, word) in words.iter_mut().enumerate() {
            let index = index as u64;
            let value = if index < 256 { mixed(page + index * 0x1_0000_0001) } else { page };
            *word = value.to_le_bytes();
        }
        file.write_all(&bytes)?;
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Takes a file, which no process has touched through a mapping that is still there, out of the
/// page cache.
pub(super) fn forget(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

/// Pages in an order of their own: each of `0..nr_pages` once.
pub(super) fn shuffled(nr_pages: u32) -> Vec<u32> {
    let mut pages: Vec<u32> = (0..nr_pages).collect();
    for index in (1..pages.len()).rev() {
        pages.swap(index, (mixed(index as u64) % (index as u64 + 1)) as usize);
    }
    pages
}

/// A working set: about one page of `one_of`, in clusters of up to 16 pages at places all over.
pub(super) fn working_set(nr_pages: u32, one_of: u32) -> Vec<u32> {
    const CLUSTER: u32 = 16;
    let clusters = shuffled(nr_pages / CLUSTER);
    let chosen = clusters.into_iter().take((nr_pages / CLUSTER * 2 / one_of) as usize);
    // Of each cluster about half.
    chosen
        .flat_map(|cluster| {
            let start = cluster * CLUSTER;
            let nr = 1 + (mixed(u64::from(cluster) + 99) % u64::from(CLUSTER)) as u32;
            start..start + nr
        })
        .collect()
}

/// Mixes as SplitMix64 does.
fn mixed(index: u64) -> u64 {
    let mixed = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_have_each_page_once() {
        for pages in [shuffled(1000), working_set(1 << 14, 8)] {
            let mut sorted = pages.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), pages.len());
        }
        let set = working_set(1 << 14, 8).len();
        assert!((1 << 10..1 << 12).contains(&set), "{set}");
    }

    #[test]
    fn a_page_begins_with_its_word() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        write(&path, 3).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(bytes.len(), 3 * 4096);
        assert_eq!(bytes[8192..8200], first_word(2).to_le_bytes());
    }
}
