//! What a worker does in a round. Each phase returns the number of pages that it verified.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;

use crate::area::{Area, HugePages};
use crate::content::{self, Content, Difference, PAGE_BYTES, PAGE_WORDS, Page};
use crate::process::{self, Ended};
use crate::worker::{Plan, fail};
use crate::wrong::Wrong;

/// One page in so many is written by a child. Each takes a new page of memory.
const CHILD_WRITES: usize = 16;

/// Areas that are mapped and unmapped in a round.
const AREAS: u64 = 16;
/// Pages of such an area at most: more than a huge page.
const AREA_PAGES: u64 = 1024;

/// Files of a round.
const FILES: u64 = 8;
/// Pages of such a file at most.
const FILE_PAGES: u64 = 128;

/// Streams of random numbers and of contents. Memory that is kept has page numbers below all of
/// them.
const CHILD: u64 = 1 << 60;
const MAPPED: u64 = 2 << 60;
const FILED: u64 = 3 << 60;

/// The memory that a worker keeps: half of it may be mapped by huge pages.
pub(crate) struct Kept {
    halves: [Area; 2],
    /// The number of the first page, of all pages of all workers.
    first_page: u64,
}

impl Kept {
    pub(crate) fn map(first_page: u64, nr_pages: u64) -> Result<Kept, Wrong> {
        let huge = nr_pages / 2;
        let halves = if huge == 0 { [1, nr_pages] } else { [huge, nr_pages - huge] };
        let [huge, small] = halves;
        let halves = [Area::map(huge, HugePages::Wanted)?, Area::map(small, HugePages::Forbidden)?];
        Ok(Kept { halves, first_page })
    }

    /// Verifies what the round before has left, and writes what this one writes.
    pub(crate) fn touch(&mut self, seed: u64, round: u64) -> Result<u64, Wrong> {
        let mut verified = 0;
        let mut number = self.first_page;
        for area in &mut self.halves {
            for page in 0..area.pages().len() {
                let at = Place { phase: "memory", address: area.address(page), page: number };
                if round == 0 {
                    at.check(content::verify_zero(&area.pages()[page]))?;
                } else {
                    at.check(content::after_round(seed, number, round - 1).verify(&area.pages()[page]))?;
                }
                if content::is_written(seed, number, round) {
                    content::after_round(seed, number, round).write(&mut area.pages_mut()[page]);
                }
                (verified, number) = (verified + 1, number + 1);
            }
        }
        Ok(verified)
    }

    /// Verifies all pages as they are after `round`.
    pub(crate) fn verify(&self, phase: &'static str, seed: u64, round: u64) -> Result<u64, Wrong> {
        let mut number = self.first_page;
        for area in &self.halves {
            for (page, words) in area.pages().iter().enumerate() {
                let at = Place { phase, address: area.address(page), page: number };
                at.check(content::after_round(seed, number, round).verify(words))?;
                number += 1;
            }
        }
        Ok(number - self.first_page)
    }

    /// Writes to some pages as a child, which has them copied, and verifies them.
    fn write_as_child(&mut self, seed: u64, round: u64) -> Result<(), Wrong> {
        let mut first = CHILD + self.first_page;
        for area in &mut self.halves {
            for step in [Step::Write, Step::Verify] {
                for page in (round as usize % CHILD_WRITES..area.pages().len()).step_by(CHILD_WRITES) {
                    let number = first + page as u64;
                    let content = Content::new(seed, number, round);
                    match step {
                        Step::Write => content.write(&mut area.pages_mut()[page]),
                        Step::Verify => Place { phase: "fork", address: area.address(page), page: number }
                            .check(content.verify(&area.pages()[page]))?,
                    }
                }
            }
            first += area.pages().len() as u64;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Write,
    Verify,
}

/// Where a page is, for what is said if it is wrong.
#[derive(Clone, Copy, Debug)]
struct Place {
    phase: &'static str,
    address: u64,
    page: u64,
}

impl Place {
    fn check(self, result: Result<(), Difference>) -> Result<(), Wrong> {
        let Place { phase, address, page } = self;
        result.map_err(|difference| Wrong::Memory { phase, address, page, difference })
    }
}

/// A child inherits the kept memory copy-on-write, verifies it, and writes to it. The parent
/// verifies meanwhile that nothing of that shows.
pub(crate) fn fork(plan: &Plan, kept: &mut Kept, round: u64) -> Result<u64, Wrong> {
    let child = process::fork(|| {
        let result = kept.verify("fork", plan.seed, round).and_then(|_| kept.write_as_child(plan.seed, round));
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(wrong) => fail(&wrong, plan.hypercalls),
        }
    })?;
    let result = kept.verify("beside a child", plan.seed, round);
    // The child is waited for in any case: it has its own report to make.
    let ended = child.wait()?;
    let verified = result?;
    if ended != Ended::Code(0) {
        let (how, reported) = ended.describe();
        return Err(Wrong::Child { how, reported });
    }
    // Once here, and once in the child.
    Ok(2 * verified)
}

/// Maps areas of many sizes, which must be zero, writes and verifies them, and unmaps them.
pub(crate) fn map(plan: &Plan, cpu: u64, round: u64) -> Result<u64, Wrong> {
    let mut verified = 0;
    for number in 0..AREAS {
        let random = content::random(plan.seed, [MAPPED | cpu, round * AREAS + number]);
        let nr_pages = 1 + random % AREA_PAGES.min(plan.pages);
        let huge_pages = if random >> 63 == 0 { HugePages::Wanted } else { HugePages::Forbidden };
        let mut area = Area::map(nr_pages, huge_pages)?;
        for page in 0..area.pages().len() {
            let at = Place { phase: "map", address: area.address(page), page: page as u64 };
            at.check(content::verify_zero(&area.pages()[page]))?;
            Content::new(random, MAPPED + page as u64, round).write(&mut area.pages_mut()[page]);
        }
        for (page, words) in area.pages().iter().enumerate() {
            let at = Place { phase: "map", address: area.address(page), page: page as u64 };
            at.check(Content::new(random, MAPPED + page as u64, round).verify(words))?;
        }
        verified += 2 * nr_pages;
    }
    Ok(verified)
}

/// Writes files, reads them back, and deletes them.
pub(crate) fn files(plan: &Plan, cpu: u64, round: u64) -> Result<u64, Wrong> {
    let mut verified = 0;
    let mut written = Vec::new();
    for number in 0..FILES {
        let random = content::random(plan.seed, [FILED | cpu, round * FILES + number]);
        let nr_pages = 1 + random % FILE_PAGES.min(plan.pages);
        let path = plan.files.join(format!("slat-{}-{cpu}-{number}", std::process::id()));
        write_file(&path, random, nr_pages).map_err(|error| Wrong::system("write a file", error))?;
        written.push((path, random, nr_pages));
    }
    for (path, random, nr_pages) in written {
        verify_file(&path, random, nr_pages)?;
        fs::remove_file(&path).map_err(|error| Wrong::system("delete a file", error))?;
        verified += nr_pages;
    }
    Ok(verified)
}

fn write_file(path: &Path, seed: u64, nr_pages: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let mut page: Page = [0; PAGE_WORDS];
    for number in 0..nr_pages {
        Content::new(seed, FILED + number, 0).write(&mut page);
        let bytes: Vec<u8> = page.iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all(&bytes)?;
    }
    Ok(())
}

fn verify_file(path: &Path, seed: u64, nr_pages: u64) -> Result<(), Wrong> {
    let failed = |error| Wrong::system("read a file", error);
    let mut file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?.len();
    let expected = nr_pages * PAGE_BYTES as u64;
    if found != expected {
        return Err(Wrong::FileSize { path: path.to_owned(), expected, found });
    }
    let mut bytes = [0; PAGE_BYTES];
    let mut page: Page = [0; PAGE_WORDS];
    for number in 0..nr_pages {
        file.read_exact(&mut bytes).map_err(failed)?;
        for (word, bytes) in page.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let verified = Content::new(seed, FILED + number, 0).verify(&page);
        verified.map_err(|difference| Wrong::File { path: path.to_owned(), page: number, difference })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_memory_is_verified_from_round_to_round() {
        for nr_pages in [1, 2, 9] {
            let mut kept = Kept::map(100, nr_pages).unwrap();
            for round in 0..5 {
                kept.touch(3, round).unwrap();
                kept.verify("test", 3, round).unwrap();
            }
        }
    }

    #[test]
    fn a_lost_write_and_a_strange_page_are_noticed() {
        let mut kept = Kept::map(0, 8).unwrap();
        kept.touch(3, 0).unwrap();
        let address = kept.halves[1].address(2);
        kept.halves[1].pages_mut()[2] = [0; PAGE_WORDS];
        let Wrong::Memory { address: found, page: 6, .. } = kept.touch(3, 1).unwrap_err() else { panic!("another") };
        assert_eq!(found, address);
        kept.halves[1].pages_mut()[2] = kept.halves[1].pages()[1];
        let wrong = kept.verify("test", 3, 0).unwrap_err().to_string();
        assert!(wrong.starts_with("test: page ") && wrong.contains(", found 0x"), "{wrong}");
    }

    #[test]
    fn a_file_that_changes_is_noticed() {
        let folder = std::env::temp_dir();
        let path = folder.join(format!("slat-guest-init-test-{}", std::process::id()));
        write_file(&path, 5, 3).unwrap();
        verify_file(&path, 5, 3).unwrap();
        let results = [verify_file(&path, 6, 3), verify_file(&path, 5, 4)];
        fs::remove_file(&path).unwrap();
        assert!(matches!(results, [Err(Wrong::File { page: 0, .. }), Err(Wrong::FileSize { .. })]));
    }
}
