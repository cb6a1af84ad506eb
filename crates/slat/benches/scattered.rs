//! The engine's cost of a harvest of few scattered pages, beside that of an exchange of each word
//! of the bitmap (2012; `slat dirty-log` has it with its locks, flushes and CPUs).
//!
//! The memslot has 1 GiB, and all its pages are mapped. In each round faults dirty N pages drawn at
//! random, and the log is got; before that a part of the rounds streams through memory, so that the
//! caches are cold. The exchange works on as many pages in the same round, over page tables and a
//! reverse map of its own. No vCPU runs and nothing is flushed. `runs` is `Vm::for_each_dirty`, which
//! has no bitmap to zero, after a third time of the same faults.
//!
//! - `cargo bench -p slat --bench scattered -- table` prints the times, `-- table 301` with 301
//!   rounds.
//! - `-- dirty-bit`: a memslot of 16 GiB with dirty bits of the CPUs as the log, 3% of its pages
//!   dirty, spread and in one piece.
//! - `-- count slat 128`, `-- count exchange 128`, `-- count runs 128`: the calls alone, for callgrind with
//!   `--toggle-collect='*::get_log*'`.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod scattered {
    use std::hint::black_box;
    use std::ops::ControlFlow;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    use slat::dirty::DirtyTracking;
    use slat::format::{Format, Npt, Pte};
    use slat::host::Resolved;
    use slat::{
        Access, Config, Gfn, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vcpu, Vm,
    };

    use super::arena::Memory;
    use super::bench_host::{Answer, BenchHost};

    /// Pages of the memslot: 1 GiB.
    const NR_PAGES: u64 = 1 << 18;
    /// Pages of the memslot whose log is the dirty bits: 16 GiB.
    const NR_PAGES_BY_DIRTY_BIT: u64 = 4 << 20;
    const COUNTS: [usize; 7] = [1, 128, 512, 1024, 2048, 4096, 16384];
    /// More than the caches of one CPU.
    const STREAM_WORDS: usize = 8 << 20;
    const CALLS_COUNTED: usize = 50;

    struct Frames;

    impl Answer for Frames {
        fn resolved(&self, gfn: Gfn, _page: u64) -> Resolved {
            Resolved::memory(Pfn((1 << 24) + gfn.0), PageSize::Size4K)
        }
    }

    type BenchVm = Vm<BenchHost<Frames>, Npt>;

    /// What has a log.
    trait Subject {
        /// The guest writes these pages.
        fn write(&mut self, pages: &[u64]);
        /// Gets the log, and returns how many pages are in it.
        fn get(&self, bitmap: &mut [u64]) -> u64;
    }

    struct Slat {
        vm: Arc<BenchVm>,
        vcpu: Vcpu<BenchHost<Frames>, Npt>,
        nr_pages: u64,
        call: Call,
    }

    /// How the log is got.
    #[derive(Clone, Copy)]
    enum Call {
        Bitmap,
        Runs,
    }

    impl Slat {
        /// All pages are mapped and were written.
        fn new(memory: Memory, tracking: DirtyTracking, nr_pages: u64) -> Slat {
            let config = Config::default().with_dirty_tracking(tracking);
            let vm: Arc<BenchVm> = Arc::new(Vm::new(BenchHost::new(memory), config).unwrap());
            vm.set_user_memory_region(MemoryRegion {
                slot: 0,
                flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
                guest_phys_addr: Gpa(0),
                memory_size: nr_pages * PAGE_SIZE,
                backing: Some(Frames),
                userfault_bitmap: None,
            })
            .unwrap();
            let mut slat = Slat { vcpu: vm.create_vcpu().unwrap(), vm, nr_pages, call: Call::Bitmap };
            slat.write(&(0..nr_pages).collect::<Vec<_>>());
            assert_eq!(slat.vm.get_dirty_log(0, &mut vec![0; nr_pages as usize / 64]), Ok(nr_pages));
            slat
        }

        /// Sets D of the leaves, as a CPU does that sets it by itself.
        fn set_dirty_bits(&self, pages: &[u64]) {
            for &page in pages {
                let gpa = Gfn(page).gpa();
                let mut table = self.vm.root();
                for level in (1..=self.vm.root_level().0).rev().map(Level) {
                    let index = (gpa.0 / level.size_bytes()) as usize % Npt::TABLE_ENTRIES;
                    let entry = self.vm.host().entry(table, index);
                    let set = if level == Level(1) { Npt::ACCESSED | Npt::DIRTY } else { Npt::ACCESSED };
                    let value = entry.load(Ordering::Relaxed);
                    if value & set != set {
                        entry.fetch_or(set, Ordering::Relaxed);
                    }
                    table = Npt::address(Pte(value), level);
                }
            }
        }
    }

    impl Subject for Slat {
        fn write(&mut self, pages: &[u64]) {
            for &page in pages {
                assert_eq!(self.vcpu.handle_fault(Gfn(page).gpa(), Access::Write), Ok(Outcome::Resume));
            }
        }

        fn get(&self, bitmap: &mut [u64]) -> u64 {
            match self.call {
                Call::Bitmap => self.vm.get_dirty_log(0, bitmap),
                Call::Runs => self.vm.for_each_dirty(0, 0, self.nr_pages, |pages| {
                    black_box(pages);
                    ControlFlow::Continue(())
                }),
            }
            .unwrap()
        }
    }

    #[repr(align(4096))]
    struct Table([AtomicU64; 512]);

    /// The exchange of each word: one bit for each page, a reverse map, and two locks.
    struct Exchange {
        locks: (Mutex<()>, Mutex<()>),
        words: Box<[AtomicU64]>,
        rmap: Box<[&'static AtomicU64]>,
    }

    impl Exchange {
        const MARKS: u64 = Npt::ACCESSED | Npt::DIRTY;

        fn new() -> Exchange {
            let tables = (0..NR_PAGES / 512).map(|_| Table([const { AtomicU64::new(0) }; 512]));
            let tables: &'static [Table] = Vec::leak(tables.collect());
            let rmap: Box<[&AtomicU64]> = tables.iter().flat_map(|table| &table.0).collect();
            for (pfn, leaf) in (1 << 24..).zip(&rmap) {
                leaf.store(Npt::leaf(Pfn(pfn), Level(1)).0 | Self::MARKS, Ordering::Relaxed);
            }
            Exchange { locks: Default::default(), words: (0..NR_PAGES / 64).map(|_| AtomicU64::new(0)).collect(), rmap }
        }
    }

    impl Subject for Exchange {
        fn write(&mut self, pages: &[u64]) {
            for &page in pages {
                self.rmap[page as usize].fetch_or(Npt::WRITABLE, Ordering::SeqCst);
                self.words[page as usize / 64].fetch_or(1 << (page % 64), Ordering::SeqCst);
            }
        }

        fn get(&self, bitmap: &mut [u64]) -> u64 {
            let _slots = self.locks.0.lock().unwrap();
            let _mmu = self.locks.1.lock().unwrap();
            let mut nr_pages = 0;
            for ((word, out), first) in self.words.iter().zip(bitmap).zip((0..).step_by(64)) {
                *out = 0;
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                *out = word.swap(0, Ordering::SeqCst);
                nr_pages += u64::from(out.count_ones());
                let mut left = *out;
                while left != 0 {
                    let leaf = self.rmap[first + left.trailing_zeros() as usize];
                    left &= left - 1;
                    // Hardware has no bit left to set, and all software holds the lock.
                    let value = leaf.load(Ordering::Relaxed);
                    if value & Npt::WRITABLE == 0 {
                    } else if value & Self::MARKS == Self::MARKS {
                        leaf.store(value & !Npt::WRITABLE, Ordering::Release);
                    } else {
                        leaf.fetch_and(!Npt::WRITABLE, Ordering::SeqCst);
                    }
                }
            }
            nr_pages
        }
    }

    /// `count` pages below `nr_pages`, drawn at random, each once, in the order of the draws.
    fn draw(count: usize, nr_pages: u64, state: &mut u64) -> Vec<u64> {
        let mut is_drawn = vec![false; nr_pages as usize];
        let mut pages = Vec::with_capacity(count);
        while pages.len() < count {
            // xorshift64
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            let page = *state % nr_pages;
            if !std::mem::replace(&mut is_drawn[page as usize], true) {
                pages.push(page);
            }
        }
        pages
    }

    #[inline(never)]
    fn get_log(subject: &dyn Subject, bitmap: &mut [u64]) -> u64 {
        subject.get(bitmap)
    }

    fn timed_ns(subject: &dyn Subject, bitmap: &mut [u64], expected: usize) -> f64 {
        let begin = Instant::now();
        let nr_pages = get_log(subject, bitmap);
        let ns = begin.elapsed().as_nanos() as f64;
        assert_eq!(nr_pages, expected as u64);
        ns
    }

    fn median(values: &mut [f64]) -> f64 {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn table(nr_rounds: usize) {
        let memory = Memory::new((NR_PAGES / 512 + 256) as usize);
        let mut slat = Slat::new(memory, DirtyTracking::WriteProtect, NR_PAGES);
        let mut exchange = Exchange::new();
        let mut bitmap = vec![0; NR_PAGES as usize / 64];
        let stream = vec![1_u64; STREAM_WORDS];
        let mut state = 0x9e37_79b9_7f4a_7c15;
        println!("get_dirty_log of 1 GiB: ns, medians of {nr_rounds} rounds; ratio: exchange over slat, in the round.");
        println!(
            "{:>6} {:>7} {:>9} {:>9} {:>9} {:>7} {:>12} {:>12}",
            "pages", "caches", "exchange", "slat", "runs", "ratio", "ns a write", "of exchange"
        );
        for count in COUNTS {
            for is_cold in [false, true] {
                let mut times = [const { Vec::new() }; 6];
                for round in 0..nr_rounds {
                    let pages = draw(count, NR_PAGES, &mut state);
                    let mut ns = [0.0; 2];
                    for turn in [round % 2, (round + 1) % 2] {
                        let subject: &mut dyn Subject = if turn == 0 { &mut slat } else { &mut exchange };
                        let begin = Instant::now();
                        subject.write(&pages);
                        times[4 + turn].push(begin.elapsed().as_nanos() as f64 / count as f64);
                        if is_cold {
                            black_box(stream.iter().sum::<u64>());
                        }
                        ns[turn] = timed_ns(subject, &mut bitmap, count);
                        times[turn].push(ns[turn]);
                    }
                    times[2].push(ns[1] / ns[0]);
                    slat.write(&pages);
                    if is_cold {
                        black_box(stream.iter().sum::<u64>());
                    }
                    slat.call = Call::Runs;
                    times[3].push(timed_ns(&slat, &mut bitmap, count));
                    slat.call = Call::Bitmap;
                }
                let [slat, exchange, ratio, runs, write, write_exchange] = times.each_mut().map(|times| median(times));
                let caches = if is_cold { "cold" } else { "warm" };
                println!(
                    "{count:>6} {caches:>7} {exchange:>9.0} {slat:>9.0} {runs:>9.0} {ratio:>7.2} {write:>12.1} {write_exchange:>12.1}"
                );
            }
        }
        drop(slat);
        memory.reset();
    }

    /// A log of dirty bits of the CPUs.
    fn dirty_bit(nr_rounds: usize) {
        let memory = Memory::new((NR_PAGES_BY_DIRTY_BIT / 512 + 256) as usize);
        let slat = Slat::new(memory, DirtyTracking::DirtyBit, NR_PAGES_BY_DIRTY_BIT);
        let mut bitmap = vec![0; NR_PAGES_BY_DIRTY_BIT as usize / 64];
        let share = (NR_PAGES_BY_DIRTY_BIT / 32) as usize;
        let mut state = 1;
        for (placement, count) in [("none", 0), ("one piece", share), ("random", share)] {
            let mut times = Vec::new();
            for _ in 0..nr_rounds {
                let pages = match placement {
                    "random" => draw(count, NR_PAGES_BY_DIRTY_BIT, &mut state),
                    _ => (0..count as u64).collect(),
                };
                slat.set_dirty_bits(&pages);
                times.push(timed_ns(&slat, &mut bitmap, count));
            }
            let ns = median(&mut times);
            println!(
                "dirty bits, 16 GiB, {placement:>10}: {:>8.3} ms, {:>6.1} ns a dirty page",
                ns / 1e6,
                ns / count as f64
            );
        }
    }

    /// Calls for a tool that counts instructions.
    fn count(kind: &str, nr_pages: usize, nr_calls: usize) {
        let mut subject: Box<dyn Subject> = match kind {
            "exchange" => Box::new(Exchange::new()),
            kind => {
                let memory = Memory::new((NR_PAGES / 512 + 256) as usize);
                let slat = Slat::new(memory, DirtyTracking::WriteProtect, NR_PAGES);
                Box::new(Slat { call: if kind == "runs" { Call::Runs } else { Call::Bitmap }, ..slat })
            }
        };
        let mut bitmap = vec![0; NR_PAGES as usize / 64];
        let mut state = 7;
        for _ in 0..nr_calls {
            subject.write(&draw(nr_pages, NR_PAGES, &mut state));
            assert_eq!(get_log(&*subject, &mut bitmap), nr_pages as u64);
        }
        println!("{nr_calls} calls");
    }

    pub(super) fn main() {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
        let number = |nth: usize, default| arguments.get(nth).map_or(default, |text| text.parse().expect("a number"));
        match arguments.first().map(String::as_str) {
            Some("count") => {
                count(arguments.get(1).map_or("slat", String::as_str), number(2, 128), number(3, CALLS_COUNTED))
            }
            Some("dirty-bit") => dirty_bit(number(1, 9)),
            Some("table") => table(number(1, 101)),
            // Without an argument it only has to run (`ci/benches.sh`).
            _ => table(1),
        }
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    scattered::main();
}
