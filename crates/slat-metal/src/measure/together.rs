//! Events while several CPUs run the guest, each a CPU of the machine.
//!
//! The counter has the instructions of all CPUs. So a count is what all of them have executed, for
//! one event.
//!
//! # What is in a count
//! - A fault: each block of 2 MiB is written by all CPUs at the same time, a page by each in turns,
//!   so they fault on the same page-table pages. Counted is from when all have come until all are
//!   done (`measured.s`), less the looks of those that wait for the others, and less the same of
//!   writes without a fault. The mean over all pages.
//! - An invalidation of a page, while all other CPUs are in the guest: with the exits, the flushes
//!   and the entries of these, and without what they look meanwhile. The median over the pages.
//!
//! # The turns of the CPUs
//! The emulator runs the CPUs in turns, and goes to the next one where a CPU pauses: in the guest
//! behind each write, and in the hypervisor in the middle of a fault (`MetalHost::resolve`). So all
//! CPUs are in a fault at the same time.

use alloc::sync::Arc;
use core::array;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::Config;
use slat::dirty::ManualProtect;
use slat::format::Format;
use spin::Mutex;

use super::guest::{BLOCK_PAGES, GATE_WORDS, LOOK, NR_BLOCKS, NR_PAGES, Writes};
use super::samples::{Clock, Samples};
use super::subject::{SLOT, Shared, Subject};
use super::{LOG, TRACKINGS, config, figure_each_of, figure_of};
use crate::arch;
use crate::arch::measured::TURN;
use crate::barrier::Barrier;
use crate::operations::MetalVcpu;
use crate::ram::Blocks;
use crate::virtual_cpu::VirtualCpu;
use crate::{fail, say};

/// The CPUs, each of which calls everything here as often as the others.
pub(super) struct Together<F: Format> {
    nr_cpus: u64,
    barrier: Barrier,
    shared: Mutex<Option<Arc<Shared<F>>>>,
    /// Of each block.
    windows: [Window; NR_BLOCKS as usize],
}

/// What the CPUs counted while they wrote a block.
#[derive(Debug, Default)]
struct Window {
    /// The most that one of them had: of the one that read the counter first.
    instructions: AtomicU64,
    /// Looks of all of them.
    looks: AtomicU64,
}

impl<F: Format> Together<F> {
    pub fn new(nr_cpus: usize) -> Together<F> {
        let windows = array::from_fn(|_| Window::default());
        Together { nr_cpus: nr_cpus as u64, barrier: Barrier::new(nr_cpus), shared: Mutex::new(None), windows }
    }

    /// Measures everything, on the calling CPU.
    pub fn measure<V: VirtualCpu<Format = F>>(&self, clock: Clock) {
        let pages_each = BLOCK_PAGES / self.nr_cpus;
        let nr_pages = NR_BLOCKS * self.nr_cpus * pages_each;
        for (way, tracking) in TRACKINGS {
            let mut subject = self.subject::<V>(config(tracking, ManualProtect::Disabled));
            let faults = self.write(&mut subject, pages_each);
            let access = self.write(&mut subject, pages_each);
            self.check_clock(&mut subject, access);
            self.alone(|| subject.set_flags(LOG));
            let protected = self.write(&mut subject, pages_each);
            self.alone(|| {
                check_log(&subject, nr_pages);
                figure_each_of("demand_fault_mean", way, faults - access, nr_pages);
                figure_each_of("write_protect_fault_mean", way, protected - access, nr_pages);
            });
            if self.nr_cpus > 1 {
                self.invalidate(&mut subject, clock, way);
            }
        }
    }

    /// Each CPU's part of one VM.
    fn subject<V: VirtualCpu<Format = F>>(&self, config: Config) -> Subject<V> {
        self.alone(|| *self.shared.lock() = Some(Shared::new::<V>(config, Blocks::Small)));
        let shared = self.shared.lock().clone();
        Subject::of(shared.unwrap_or_else(|| fail!("there is no VM")))
    }

    /// The boot CPU does `work`, when all CPUs have come here. The others wait for it.
    fn alone(&self, work: impl FnOnce()) {
        self.barrier.wait();
        if arch::cpu_number() == 0 {
            work();
        }
        self.barrier.wait();
    }

    /// The calling CPU writes `nr_pages` pages of each block, while the others do. Returns what all CPUs
    /// executed.
    fn write<V: VirtualCpu<Format = F>>(&self, subject: &mut Subject<V>, nr_pages: u64) -> u64 {
        self.alone(|| {
            for block in 0..NR_BLOCKS {
                self.set_gate(subject, block, [self.nr_cpus; GATE_WORDS]);
                let window = &self.windows[block as usize];
                // Relaxed, here and below: barriers are between the CPUs.
                window.instructions.store(0, Ordering::Relaxed);
                window.looks.store(0, Ordering::Relaxed);
            }
        });
        let cpu = arch::cpu_number();
        for block in 0..NR_BLOCKS {
            let first = block * BLOCK_PAGES + cpu as u64;
            let writes = Writes { first, nr_pages, distance: self.nr_cpus };
            subject.run(block, writes, MetalVcpu::<F>::handle_fault);
            let window = &self.windows[block as usize];
            window.instructions.fetch_max(subject.window(), Ordering::Relaxed);
            window.looks.fetch_add(subject.looks(cpu), Ordering::Relaxed);
        }
        self.barrier.wait();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.windows.iter().map(|window| load(&window.instructions) - LOOK * load(&window.looks)).sum()
    }

    fn set_gate<V: VirtualCpu<Format = F>>(&self, subject: &Subject<V>, gate: u64, words: [u64; GATE_WORDS]) {
        for (number, word) in (0..).zip(words) {
            subject.shared.gate(gate, number).store(word, Ordering::Relaxed);
        }
    }

    /// Checks that turns of the guest's loop count as what they are: by all CPUs at the same time, of
    /// which those of whole blocks took `access`, and by one while all others look whether it is done.
    fn check_clock<V: VirtualCpu<Format = F>>(&self, subject: &mut Subject<V>, access: u64) {
        let whole = BLOCK_PAGES / self.nr_cpus;
        let half = self.write(subject, whole / 2);
        let by_one = |nr_pages| if arch::cpu_number() == 0 { nr_pages } else { 0 };
        let [one_whole, one_half] = [whole, whole / 2].map(|nr_pages| self.write(subject, by_one(nr_pages)));
        // A CPU that sees later than another one that all are done has looked once more.
        let looks = NR_BLOCKS * self.nr_cpus * LOOK;
        self.alone(|| {
            for (nr_cpus, found) in [(self.nr_cpus, access - half), (1, one_whole - one_half)] {
                let expected = NR_BLOCKS * nr_cpus * (whole - whole / 2) * TURN;
                if found.abs_diff(expected) > looks {
                    fail!("{expected} instructions by {nr_cpus} of {} CPUs counted as {found}", self.nr_cpus);
                }
                say!("{expected} instructions by {nr_cpus} of {} CPUs counted as {found}", self.nr_cpus);
            }
        });
    }

    /// The boot CPU invalidates all pages, one by one, while the others run in the guest.
    fn invalidate<V: VirtualCpu<Format = F>>(&self, subject: &mut Subject<V>, clock: Clock, way: &str) {
        const GATE: u64 = 0;
        let nr_others = self.nr_cpus - 1;
        // The boot CPU does not come to the gate. It is done when it says so.
        self.alone(|| self.set_gate(subject, GATE, [nr_others, self.nr_cpus, nr_others]));
        if arch::cpu_number() == 0 {
            while subject.shared.gate(GATE, 1).load(Ordering::Relaxed) > 1 {
                core::hint::spin_loop();
            }
            let looks = || (1..self.nr_cpus as usize).map(|cpu| subject.looks(cpu)).sum::<u64>();
            let counts = (0..NR_PAGES).map(|page| {
                let range = subject.range(page, 1);
                let before = looks();
                let count = clock.time(|| subject.check(subject.vm.invalidate_range(range)));
                count.saturating_sub(LOOK * (looks() - before))
            });
            figure_of("invalidate_page_running", way, Samples::new(counts.collect()).median());
            subject.shared.gate(GATE, 1).store(0, Ordering::Relaxed);
        } else {
            let nothing = Writes { first: 0, nr_pages: 0, distance: 0 };
            subject.run(GATE, nothing, MetalVcpu::<F>::handle_fault);
        }
        self.barrier.wait();
    }
}

/// Checks that the log has as many pages as were written.
fn check_log<V: VirtualCpu>(subject: &Subject<V>, nr_pages: u64) {
    let mut bitmap = [0; NR_PAGES as usize / 64];
    subject.check(subject.vm.get_dirty_log(SLOT, &mut bitmap));
    let nr_dirty: u32 = bitmap.iter().map(|word: &u64| word.count_ones()).sum();
    if u64::from(nr_dirty) != nr_pages {
        fail!("the guest has written {nr_pages} pages, and the dirty log has {nr_dirty}");
    }
}
