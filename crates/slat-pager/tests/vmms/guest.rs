//! The guest: it has an area of known values, and verifies it round after round.
//!
//! Each page is verified word by word, by two threads in an order that is no sequence. One page in
//! sixteen gets new values after that, so that a page which a pager overwrites later is noticed.
//! Before all that the guest has filled most other memory with values of their own ([`given_up`])
//! and has freed it: those bytes are in the snapshot, and a balloon takes those pages.

use std::fs;
use std::thread;

use crate::Outcome;
use crate::init::load_module;

/// Modules of the kernel: of Firecracker's devices. Those of Cloud Hypervisor are on PCI, which is
/// part of the kernel.
pub const MODULES: [&str; 2] = ["virtio_mmio", "virtio_balloon"];

/// Pages of the area.
pub const NR_PAGES: usize = 16 << 10;
/// Words of a page.
pub const NR_WORDS: usize = 512;

/// The guest has filled its memory, and begins to verify.
pub const FILLED: &str = "guest: filled ";
/// A part of a round has been verified.
pub const PART: &str = "guest: part ";
/// All pages have been verified: their number, that of scratch pages, the memory in KiB.
pub const ROUND: &str = "guest: round ";
/// Something is wrong.
pub const WRONG: &str = "guest: wrong ";

/// Scratch pages for each round, until memory has come back from a balloon.
const NR_SCRATCH: usize = 1 << 10;
/// Parts of a round that are told.
const NR_PARTS: usize = 4;

/// The words of a page.
type Page = [u64; NR_WORDS];

/// Pages, as they come from the kernel: nothing has written to them.
struct Pages {
    words: Vec<u64>,
    first: usize,
    nr_pages: usize,
}

impl Pages {
    fn new(nr_pages: usize) -> Pages {
        let words = vec![0; (nr_pages + 1) * NR_WORDS];
        let first = words.as_ptr().align_offset(size_of::<Page>());
        Pages { words, first, nr_pages }
    }

    fn all(&mut self) -> &mut [Page] {
        self.words[self.first..][..self.nr_pages * NR_WORDS].as_chunks_mut().0
    }
}

/// Mixes as SplitMix64 does.
fn mix(value: u64) -> u64 {
    let mixed = value.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// The word `word` of page `page` after `generation` changes.
fn value(page: usize, generation: u32, word: usize) -> u64 {
    mix((page as u64) << 32 | u64::from(generation) << 10 | word as u64)
}

/// The word `word` of each page that was filled and freed.
pub fn given_up(word: usize) -> u64 {
    mix(u64::MAX - word as u64)
}

fn fill(page: &mut Page, number: usize, generation: u32) {
    page.iter_mut().enumerate().for_each(|(word, place)| *place = value(number, generation, word));
}

fn verify(page: &Page, number: usize, generation: u32) -> Outcome<()> {
    match (0..NR_WORDS).find(|&word| page[word] != value(number, generation, word)) {
        None => Ok(()),
        Some(word) => {
            let (found, expected) = (page[word], value(number, generation, word));
            Err(format!("page {number} word {word} is {found:#x} and not {expected:#x} (change {generation})"))
        }
    }
}

/// A number of /proc/meminfo, in KiB.
fn meminfo(name: &str) -> Outcome<usize> {
    let text = fs::read_to_string("/proc/meminfo").map_err(|error| error.to_string())?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.and_then(|value| value.split_whitespace().next()?.parse().ok()).ok_or_else(|| format!("no {name}"))
}

/// Verifies until it is wrong, or the machine ends.
pub fn run() -> Outcome<()> {
    let failed = |why: String| {
        println!("{WRONG}{why}");
        why
    };
    for module in MODULES {
        load_module(module).map_err(failed)?;
    }
    let mut area = Pages::new(NR_PAGES);
    let area = area.all();
    area.iter_mut().enumerate().for_each(|(number, page)| fill(page, number, 0));
    let mut generations = vec![0; NR_PAGES];
    let nr_given_up = meminfo("MemFree")? / 4 * 7 / 8;
    let mut free = Pages::new(nr_given_up);
    for page in free.all() {
        page.iter_mut().enumerate().for_each(|(word, place)| *place = given_up(word));
    }
    drop(std::hint::black_box(free));
    println!("{FILLED}{NR_PAGES} pages; {nr_given_up} more and freed");
    let mut balloon = Balloon::new()?;
    for round in 1_u64.. {
        let half = NR_PAGES / 2;
        let (low, high) = area.split_at_mut(half);
        let (low_generations, high_generations) = generations.split_at_mut(half);
        thread::scope(|scope| {
            let other = scope.spawn(|| verify_half(round, half, high, high_generations));
            let here = verify_half(round, 0, low, low_generations);
            here.and(other.join().map_err(|_| "a thread panicked".to_owned())?)
        })
        .map_err(failed)?;
        let (nr_scratch, memory_kib) = balloon.look()?;
        use_scratch(nr_scratch).map_err(failed)?;
        println!("{ROUND}{round} verified {NR_PAGES} scratch {nr_scratch} memory {memory_kib}");
    }
    Ok(())
}

/// Verifies pages from number `first` on, and changes some.
fn verify_half(round: u64, first: usize, pages: &mut [Page], generations: &mut [u32]) -> Outcome<()> {
    let nr_pages = pages.len();
    for index in 0..nr_pages {
        let place = index * 263 % nr_pages;
        verify(&pages[place], first + place, generations[place])?;
        if index % 16 == 0 {
            generations[place] += 1;
            fill(&mut pages[place], first + place, generations[place]);
        }
        if first == 0 && (index + 1) % (nr_pages / NR_PARTS) == 0 {
            println!("{PART}{} of {NR_PARTS} of round {round}", (index + 1) / (nr_pages / NR_PARTS));
        }
    }
    Ok(())
}

/// Uses memory that was free: it is zeros, and then what is written to it.
fn use_scratch(nr_pages: usize) -> Outcome<()> {
    let mut scratch = Pages::new(nr_pages);
    let scratch = scratch.all();
    for (number, page) in scratch.iter_mut().enumerate() {
        if *page != [0; NR_WORDS] {
            return Err(format!("scratch page {number} is not zeros"));
        }
        fill(page, number, u32::MAX);
    }
    scratch.iter().enumerate().try_for_each(|(number, page)| verify(page, number, u32::MAX))
}

/// What a balloon did: what it takes is no memory of the guest's meanwhile.
struct Balloon {
    begin_kib: usize,
    least_kib: usize,
}

impl Balloon {
    fn new() -> Outcome<Balloon> {
        let begin_kib = meminfo("MemTotal")?;
        Ok(Balloon { begin_kib, least_kib: begin_kib })
    }

    /// How many pages may be used for scratch, and how much memory there is, in KiB.
    fn look(&mut self) -> Outcome<(usize, usize)> {
        let memory_kib = meminfo("MemTotal")?;
        self.least_kib = self.least_kib.min(memory_kib);
        let most_of = self.begin_kib / 10 * 9;
        let came_back = self.least_kib < most_of && memory_kib >= most_of;
        // Most of what is free was in the balloon.
        let nr_scratch = if came_back { meminfo("MemFree")? / 4 * 3 / 4 } else { NR_SCRATCH };
        Ok((nr_scratch, memory_kib))
    }
}
