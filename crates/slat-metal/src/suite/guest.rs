//! The guest of the suite: code that runs in the guest, on the image's own
//! instructions, which it may read and execute but not write.
//!
//! It has nothing but its mailbox, its stack, and the memory that it attacks. So this code uses no
//! static variable, allocates nothing and never panics.
//!
//! # What each access checks
//! - A read finds the page's tag, which is a function of the page and the seed.
//! - A write adds one to the word of this vCPU in the page, and to a count in the mailbox. Before
//!   that both are the same: otherwise an earlier write was lost, or went to another frame.
//! - A call executes the instructions in the page, which return the low half of the tag.

#![expect(unsafe_code, reason = "accesses guest-physical memory")]

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::guest::{call, code, hypercall, probe, returned, sync_memory};

/// Pages that a mailbox has counts for.
pub const MAX_PAGES: usize = 8192;

/// Offsets in a page: the tag, the words of the vCPUs, and the instructions.
const COUNTS_OFFSET: usize = 64;
const CODE_OFFSET: usize = 256;

/// Pages, from the first on, that the guest and the operations prefer.
pub const NR_HOT_PAGES: u64 = 16;

/// How often the guest accesses a page with which it stays for a while, and in how many steps it
/// does so once. Emulators forget translations at each exit. Meanwhile there is no exit unless the
/// page changes, so that a flush which another CPU leaves out is found.
const STAY: u64 = 1024;
const STAY_ONCE_IN: u64 = 64;

/// Accesses of a stay after which an emulator that runs the CPUs in turns goes to the next one: its
/// operation comes while this CPU has the page's translation.
const STAY_TURN: u64 = 128;

/// What the hypervisor asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Command {
    /// Accesses at random.
    Random = 0,
    /// The accesses of a checkpoint: those of [`planned`], to the pages of this vCPU.
    Planned = 1,
}

/// The guest's report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Report {
    /// It has done what was asked for.
    Done = 0,
    /// A read did not find the page's tag.
    WrongTag = 1,
    /// A page did not have this vCPU's last write.
    LostWrite = 2,
    /// A page executed something else.
    WrongCode = 3,
    /// A page that may be absent was another one.
    WrongProbe = 4,
}

impl Report {
    /// The report with this number.
    pub fn from_number(number: u64) -> Option<Report> {
        [Report::Done, Report::WrongTag, Report::LostWrite, Report::WrongCode, Report::WrongProbe]
            .into_iter()
            .find(|&report| report as u64 == number)
    }
}

/// What a vCPU and the hypervisor exchange. Each side writes while the other one waits.
#[derive(Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "documented as a whole")]
pub struct Mailbox {
    pub cpu: AtomicU64,
    pub nr_cpus: AtomicU64,
    pub command: AtomicU64,
    pub nr_steps: AtomicU64,
    /// The state of the random numbers; in a checkpoint, its number.
    pub random: AtomicU64,
    pub seed: AtomicU64,
    /// Which instruction of [`hypercall`] this CPU has.
    pub hypercall: AtomicU64,
    /// The memory under attack.
    pub start: AtomicU64,
    pub nr_pages: AtomicU64,
    /// Memory that may be absent.
    pub probed_start: AtomicU64,
    pub nr_probed_pages: AtomicU64,
    /// A [`Report`], and what belongs to it.
    pub report: AtomicU64,
    pub page: AtomicU64,
    pub expected: AtomicU64,
    pub found: AtomicU64,
    /// Accesses, in all.
    pub nr_accesses: AtomicU64,
    /// Probes that found a page, and that found none.
    pub nr_found: AtomicU64,
    pub nr_absent: AtomicU64,
    pub counts: [AtomicU64; MAX_PAGES],
}

/// A number in which each bit depends on all bits of `value` (the finalizer of SplitMix64).
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// The tag of a page.
pub const fn tag(page: u64, seed: u64) -> u64 {
    mix(page.wrapping_add(seed << 32).wrapping_add(0x9e37_79b9_7f4a_7c15))
}

/// What a checkpoint accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planned {
    /// Nothing.
    None,
    /// It reads the page.
    Read,
    /// It writes the page.
    Write,
    /// It executes the page.
    Execute,
}

/// What checkpoint `number` does to `page`.
pub const fn planned(page: u64, number: u64) -> Planned {
    match mix(page ^ number << 40) % 8 {
        0 | 1 => Planned::Read,
        2 | 3 => Planned::Write,
        4 => Planned::Execute,
        _ => Planned::None,
    }
}

/// Fills a frame for `page`: the tag, and instructions that return it.
pub fn fill(page: u64, seed: u64, words: &[AtomicU64]) {
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    mark(page, seed, words);
}

/// Writes what the guest looks for in `page`, and nothing else: the guest may read it meanwhile.
pub fn mark(page: u64, seed: u64, words: &[AtomicU64]) {
    let tag = tag(page, seed);
    let [first, second] = code(tag);
    for (offset, value) in [(0, tag), (CODE_OFFSET, first), (CODE_OFFSET + 8, second)] {
        if let Some(word) = words.get(offset / 8) {
            word.store(value, Ordering::Relaxed);
        }
    }
    sync_memory(words);
}

/// Leaves the guest, and comes back when the hypervisor has prepared the next command.
fn report(mailbox: &Mailbox, report: Report) {
    // Relaxed: the same CPU reads it after the exit.
    mailbox.report.store(report as u64, Ordering::Relaxed);
    // The hypervisor changes the mailbox alone.
    hypercall(mailbox.hypercall.load(Ordering::Relaxed));
}

/// The memory of the mailbox, in the guest.
struct Attack<'m> {
    mailbox: &'m Mailbox,
    start: u64,
    nr_pages: u64,
    seed: u64,
    cpu: u64,
}

impl<'m> Attack<'m> {
    /// That of `mailbox`.
    ///
    /// # Safety
    /// The caller is in the guest of the mailbox, which has all of its pages.
    unsafe fn new(mailbox: &'m Mailbox) -> Attack<'m> {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (start, nr_pages) = (word(&mailbox.start), word(&mailbox.nr_pages).max(1));
        // The words of the vCPUs end where the instructions begin.
        let cpu = word(&mailbox.cpu) % ((CODE_OFFSET - COUNTS_OFFSET) / 8) as u64;
        Attack { mailbox, start, nr_pages, seed: word(&mailbox.seed), cpu }
    }

    /// The address of `offset` in `page`, one of the pages.
    fn address(&self, page: u64, offset: usize) -> u64 {
        self.start + page % self.nr_pages * 4096 + offset as u64
    }

    fn fail(&self, kind: Report, page: u64, expected: u64, found: u64) {
        self.mailbox.page.store(page, Ordering::Relaxed);
        self.mailbox.expected.store(expected, Ordering::Relaxed);
        self.mailbox.found.store(found, Ordering::Relaxed);
        report(self.mailbox, kind);
    }

    fn read(&self, page: u64) {
        let address = self.address(page, 0) as *const u64;
        // SAFETY: a page of the memory, as `new` was promised. Volatile: other CPUs change what is
        // there.
        let found = unsafe { address.read_volatile() };
        let expected = tag(page, self.seed);
        if found != expected {
            self.fail(Report::WrongTag, page, expected, found);
        }
    }

    fn write(&self, page: u64) {
        let address = (self.address(page, COUNTS_OFFSET) + 8 * self.cpu) as *mut u64;
        let Some(count) = self.mailbox.counts.get(page as usize) else { return };
        let expected = count.load(Ordering::Relaxed);
        // SAFETY: this vCPU's word of the page.
        let found = unsafe { address.read_volatile() };
        if found != expected {
            self.fail(Report::LostWrite, page, expected, found);
        }
        // SAFETY: as above.
        unsafe { address.write_volatile(expected + 1) };
        count.store(expected + 1, Ordering::Relaxed);
    }

    fn execute(&self, page: u64) {
        // SAFETY: the page has instructions of `code`.
        let found = unsafe { call(self.address(page, CODE_OFFSET)) };
        let expected = returned(tag(page, self.seed));
        if found != expected {
            self.fail(Report::WrongCode, page, expected, found);
        }
    }
}

/// Does `access` so often.
fn stay(nr_times: u64, access: impl Fn()) {
    for time in 1..=nr_times {
        access();
        if time.is_multiple_of(STAY_TURN) {
            core::hint::spin_loop();
        }
    }
}

/// Where a vCPU begins, with its mailbox as the argument.
///
/// # Safety
/// It is entered in the guest alone, which has the memory that the mailbox names.
pub unsafe extern "C" fn guest_main(mailbox: &Mailbox) -> ! {
    loop {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        // SAFETY: as the caller promises.
        let attack = unsafe { Attack::new(mailbox) };
        let Attack { nr_pages, seed, cpu, .. } = attack;
        let mut nr_accesses = word(&mailbox.nr_accesses);
        if word(&mailbox.command) == Command::Planned as u64 {
            let (number, nr_cpus) = (word(&mailbox.random), word(&mailbox.nr_cpus).max(1));
            let mut page = cpu;
            while page < nr_pages {
                match planned(page, number) {
                    Planned::None => {}
                    Planned::Read => attack.read(page),
                    Planned::Write => attack.write(page),
                    Planned::Execute => attack.execute(page),
                }
                nr_accesses += u64::from(planned(page, number) != Planned::None);
                page += nr_cpus;
            }
        } else {
            let mut random = word(&mailbox.random);
            let nr_probed_pages = word(&mailbox.nr_probed_pages);
            for _ in 0..word(&mailbox.nr_steps) {
                random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let number = mix(random);
                // An emulator that runs the CPUs in turns goes to the next one here.
                if number >> 60 == 0 {
                    core::hint::spin_loop();
                }
                // Half of the accesses go to a few pages, which the CPU has cached when they
                // change.
                let stays = (number >> 41).is_multiple_of(STAY_ONCE_IN);
                let is_hot = stays || number & 1 << 40 != 0;
                let page = (number >> 8) % if is_hot { NR_HOT_PAGES.min(nr_pages) } else { nr_pages };
                let nr_times = if stays { STAY } else { 1 };
                // A probe is one, and none without memory to probe.
                nr_accesses += if number % 16 < 14 { nr_times } else { u64::from(nr_probed_pages != 0) };
                match number % 16 {
                    0..=5 => stay(nr_times, || attack.read(page)),
                    6..=11 => stay(nr_times, || attack.write(page)),
                    12..=13 => stay(nr_times, || attack.execute(page)),
                    _ if nr_probed_pages == 0 => {}
                    _ => {
                        let page = (number >> 8) % nr_probed_pages;
                        // SAFETY: in the guest, where the mailbox says.
                        let found = unsafe { probe(word(&mailbox.probed_start) + page * 4096) };
                        let expected = tag(page, seed);
                        let count = if found == expected {
                            &mailbox.nr_found
                        } else if found == u64::MAX {
                            &mailbox.nr_absent
                        } else {
                            attack.fail(Report::WrongProbe, page, expected, found);
                            continue;
                        };
                        count.store(word(count) + 1, Ordering::Relaxed);
                    }
                }
            }
            mailbox.random.store(random, Ordering::Relaxed);
        }
        mailbox.nr_accesses.store(nr_accesses, Ordering::Relaxed);
        report(mailbox, Report::Done);
    }
}
