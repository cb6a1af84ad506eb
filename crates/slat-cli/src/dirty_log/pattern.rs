//! Which pages the guest writes before a call, and whether the call reported them.

use clap::ValueEnum;
use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::index;

use super::Method;
use crate::failure::{Failure, check_failed};
use crate::options::ValueName;

/// How the pages that are written are placed in the memslot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DirtyPattern {
    /// Consecutive, from a random page on.
    Run,
    /// Evenly spread over the slot, from a random page on.
    Stride,
    /// Each at random.
    Random,
}

impl DirtyPattern {
    /// Chooses `nr_dirty` different pages of `nr_pages`, in the order in which they are written.
    /// Both are not 0, and the first not more than the second.
    pub(super) fn choose(self, nr_dirty: u32, nr_pages: u32, rng: &mut SmallRng) -> Vec<u32> {
        match self {
            DirtyPattern::Run => {
                let first = rng.random_range(0..=nr_pages - nr_dirty);
                (first..first + nr_dirty).collect()
            }
            DirtyPattern::Stride => {
                let stride = nr_pages / nr_dirty;
                let first = rng.random_range(0..stride);
                (0..nr_dirty).map(|n| first + n * stride).collect()
            }
            DirtyPattern::Random => {
                index::sample(rng, nr_pages as usize, nr_dirty as usize).into_iter().map(|page| page as u32).collect()
            }
        }
    }
}

/// Words of a bitmap of `nr_pages` pages.
pub(super) fn nr_words(nr_pages: u32) -> usize {
    nr_pages.div_ceil(u64::BITS) as usize
}

pub(super) fn set_bits(bitmap: &mut [u64], pages: &[u32]) {
    bitmap.fill(0);
    for &page in pages {
        bitmap[(page / u64::BITS) as usize] |= 1 << (page % u64::BITS);
    }
}

/// Compares the log that a call returned with the pages written since the call before.
pub(super) fn check_log(method: Method, log: &[u64], written: &[u64]) -> Result<(), Failure> {
    if log == written {
        return Ok(());
    }
    let is_written = |page: u64| written[(page / 64) as usize] >> (page % 64) & 1 == 1;
    compare_log(&[log], log.len() as u64 * 64, is_written)
        .map_err(|wrong| check_failed(format_args!("dirty log of {}: {wrong}", method.name())))
}

/// Whether `bitmaps`, one for each `pages_per_slot` pages, have exactly the pages that were
/// written; if not, what is wrong.
pub(crate) fn compare_log(
    bitmaps: &[impl AsRef<[u64]>],
    pages_per_slot: u64,
    is_written: impl Fn(u64) -> bool,
) -> Result<(), String> {
    let (mut lost, mut false_alarms, mut example) = (0_u64, 0_u64, None);
    for (slot, bitmap) in (0..).zip(bitmaps.iter().map(AsRef::as_ref)) {
        // Bits after the last page belong to no page.
        for bit in 0..bitmap.len() as u64 * u64::from(u64::BITS) {
            let page = slot * pages_per_slot + bit;
            let reported = bitmap[(bit / 64) as usize] >> (bit % 64) & 1 == 1;
            match (reported, bit < pages_per_slot && is_written(page)) {
                (false, true) => lost += 1,
                (true, false) => false_alarms += 1,
                _ => continue,
            }
            example.get_or_insert(page);
        }
    }
    match example {
        None => Ok(()),
        Some(page) => Err(format!(
            "{lost} pages written and not reported, {false_alarms} reported and not written, for example page {page}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn as_many_different_pages_as_were_asked_for() {
        let mut rng = SmallRng::seed_from_u64(3);
        for pattern in DirtyPattern::value_variants() {
            for (nr_dirty, nr_pages) in [(1, 1), (1, 1000), (7, 1000), (512, 1000), (999, 1000), (1000, 1000)] {
                let mut pages = pattern.choose(nr_dirty, nr_pages, &mut rng);
                assert!(pages.iter().all(|&page| page < nr_pages), "{pattern:?} {nr_dirty}");
                pages.sort_unstable();
                pages.dedup();
                assert_eq!(pages.len(), nr_dirty as usize, "{pattern:?} {nr_dirty}");
            }
        }
    }

    #[test]
    fn a_lost_page_and_a_false_alarm_are_both_noticed() {
        let mut written = vec![0; nr_words(200)];
        assert_eq!(written.len(), 4);
        set_bits(&mut written, &[0, 63, 64, 199]);
        assert_eq!(written, [1 | 1 << 63, 1, 0, 1 << 7]);
        assert!(check_log(Method::Slat, &written.clone(), &written).is_ok());
        for (page, what) in [(64, "1 pages written and not"), (65, "1 reported and not written")] {
            let mut log = written.clone();
            log[page / 64] ^= 1 << (page % 64);
            let message = check_log(Method::Slat, &log, &written).unwrap_err().to_string();
            assert!(message.contains(what) && message.ends_with(&format!("page {page}")), "{message}");
        }
    }

    #[test]
    fn a_log_is_right_only_if_it_is_exact() {
        // Two slots of 65 pages: page 65 is the first of the second.
        let bitmaps = [vec![1 << 3, 1], vec![1, 0]];
        let check = |pages: &[u64]| compare_log(&bitmaps, 65, |page| pages.contains(&page));
        assert_eq!(check(&[3, 64, 65]), Ok(()));
        assert!(check(&[3, 64, 65, 129]).is_err_and(|wrong| wrong.starts_with("1 pages written and not reported, 0 ")));
        assert!(check(&[64, 65]).is_err_and(|wrong| wrong.ends_with("1 reported and not written, for example page 3")));
        let behind = [vec![0, 1 << 1]];
        assert!(compare_log(&behind, 65, |_| false).is_err(), "a bit that is no page's");
    }
}
