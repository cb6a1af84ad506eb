//! The target: the guest comes here, and goes on.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use slat::{Gfn, Gpa, MemoryRegionFlags, PAGE_SIZE};
use spin::Once;

use super::channel::Channel;
use super::record::{Hash, Head, Kind, MAX_WORDS};
use super::ring::Payload;
use super::{hash_of, hash_of_zeros, set_bits};
use crate::arch::linux::{Devices, State, TRAITS, from_words};
use crate::arch::{self, Kick, clock};
use crate::console::{self, Verdict};
use crate::host::Control;
use crate::linux::{GuestFormat, Linux, LinuxCpu, Stage};
use crate::memslot::{Memslot, bit, zeros};
use crate::options::Options;
use crate::{error, fail, say};

/// Pages that are asked for in the background before the first of them has come: a page that the
/// guest waits for comes behind these.
const MAX_ASKED: u64 = 4;

/// How long the background waits for the guest's first fault.
const MAX_FIRST_MS: u64 = 1000;
/// How long the guest may take to turn itself off.
const MAX_OFF_MS: u64 = 60_000;

/// What the source says before the guest comes.
struct Arrival {
    /// For each page, the hash of what the guest had when it stopped.
    hashes: Vec<u64>,
    /// The pages that come later.
    left: Vec<u64>,
    nr_rounds: u64,
    states: Vec<State>,
    devices: Box<Devices>,
}

/// The memory to which the guest comes, and the channel.
pub struct Target {
    memslot: Memslot<GuestFormat>,
    channel: Channel,
    control: Control,
    nr_cpus: usize,
    /// Set when the guest may run: its CPUs, and what its time-stamp counter is ahead of the
    /// machine's.
    states: Once<(Vec<State>, u64)>,
    /// The pages that were asked for.
    asked: Box<[AtomicU64]>,
    /// Pages that the guest's CPU has asked for, since the guest could not go on without them.
    nr_by_fault: AtomicU64,
    /// CPUs of the guest that run it.
    nr_begun: AtomicUsize,
    is_off: AtomicBool,
}

impl Target {
    /// A target that receives the memory of `memslot`.
    pub fn new(memslot: Memslot<GuestFormat>, channel: Channel, options: &Options) -> Target {
        let asked = zeros(memslot.new_bitmap().len());
        Target {
            memslot,
            channel,
            control: options.control,
            nr_cpus: options.nr_cpus,
            states: Once::new(),
            asked,
            nr_by_fault: AtomicU64::new(0),
            nr_begun: AtomicUsize::new(0),
            is_off: AtomicBool::new(false),
        }
    }

    /// Waits until the guest may run, on the CPU that will run its CPU `number`. Returns what that
    /// is, and what the guest's time-stamp counter is ahead of the machine's.
    pub fn wait_for_state(&self, number: usize) -> (&State, u64) {
        let (states, tsc_offset) = loop {
            match self.states.get() {
                Some(states) => break states,
                // Until a kick. An emulator leaves its own CPU to the other machine meanwhile.
                None => arch::wait_for_kick(),
            }
        };
        self.nr_begun.fetch_add(1, Ordering::Release);
        (&states[number], *tsc_offset)
    }

    /// Lets the guest run.
    fn begin(&self, states: Vec<State>, devices: &Devices) {
        self.states.call_once(|| (states, devices.write()));
        while self.nr_begun.load(Ordering::Acquire) != self.nr_cpus {
            // Again and again: a CPU may have looked just before.
            (0..self.nr_cpus as u32).for_each(|cpu| arch::kick(cpu, Kick::Nmi));
            clock::wait_us(100);
        }
    }

    /// The guest has turned itself off.
    pub fn turn_off(&self) {
        self.is_off.store(true, Ordering::Release);
    }

    /// Whether the calling CPU is the one that asks for the page.
    fn is_to_ask(&self, page: u64) -> bool {
        let (word, bit) = bit(page);
        self.asked[word].fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    fn ask(&self, page: u64) {
        self.channel.send_empty(Kind::Request, self.memslot.gpa(page).gfn().0);
    }

    /// The guest needs the page at `gpa`, which is withheld: returns when it has come. The other
    /// CPU receives it, and ends the machine if the source is gone.
    pub fn fetch(&self, gpa: Gpa) {
        let Some(page) = self.memslot.page_of(gpa) else {
            fail!("a memory fault at {gpa}, which is in no memslot with a bitmap")
        };
        if self.memslot.is_withheld(page) && self.is_to_ask(page) {
            // Before the page can come: it is counted when all have.
            self.nr_by_fault.fetch_add(1, Ordering::Relaxed);
            self.ask(page);
        }
        while self.memslot.is_withheld(page) {
            core::hint::spin_loop();
        }
    }

    /// Receives the guest, brings its pages, and ends the machine when it has turned itself off.
    pub fn run<C: LinuxCpu>(&self, linux: &Linux<C>) -> ! {
        self.channel.wait_for_other();
        let Arrival { hashes, left, nr_rounds, states, devices } = self.receive_guest(linux);
        let nr_left = set_bits(&left).count() as u64;
        let nr_equal = self.compare(&hashes, &left);
        say!("{nr_equal} pages are those of the guest; {nr_left} pages are left");
        if self.control != Control::NoWithhold {
            set_bits(&left).for_each(|page| self.memslot.withhold(page));
        }
        if !self.memslot.set_flags(|flags| flags | MemoryRegionFlags::USERFAULT) {
            fail!("the userfault bitmap could not be turned on");
        }
        linux.resume_in_round(nr_rounds);
        let began_ns = clock::now_ns();
        self.begin(states, &devices);
        self.bring_rest(&hashes, &left, nr_left, began_ns);
        let postcopy_ms = (clock::now_ns() - began_ns) / 1_000_000;
        self.channel.send_empty(Kind::Complete, 0);
        if !self.memslot.set_flags(|flags| flags - MemoryRegionFlags::USERFAULT) {
            fail!("the userfault bitmap could not be turned off");
        }
        let nr_by_fault = self.nr_by_fault.load(Ordering::Relaxed);
        let nr_background = nr_left - nr_by_fault;
        say!("post-copy: {nr_by_fault} pages by fault, {nr_background} in the background, in {postcopy_ms} ms");
        if nr_by_fault == 0 || nr_background == 0 {
            fail!("post-copy was not tried: {nr_by_fault} pages by fault, {nr_background} in the background");
        }
        console::figure("postcopy_pages_by_fault", nr_by_fault, "1");
        console::figure("postcopy_pages_in_background", nr_background, "1");
        console::figure_ms("postcopy_time", postcopy_ms);
        self.finish(linux, nr_rounds, nr_left)
    }

    /// Writes a frame that has come, which the guest cannot access. `words`: `None` are zeros.
    fn write<C: LinuxCpu>(&self, linux: &Linux<C>, gfn: u64, words: Option<&Payload>) {
        let gpa = Gpa(gfn.saturating_mul(PAGE_SIZE));
        let Some(page) = self.memslot.page_of(gpa) else {
            let Some(place) = linux.guest.fixed_page(Gfn(gfn)) else {
                fail!("the other machine sends frame {gfn:#x}, which the guest does not have")
            };
            let words = words.unwrap_or(&[0; MAX_WORDS]);
            for (place, &word) in place.iter().zip(words) {
                // The firmware's memory may be read-only where nothing differs.
                if place.load(Ordering::Relaxed) != word {
                    place.store(word, Ordering::Relaxed);
                }
            }
            return;
        };
        let ram = self.memslot.ram();
        // A page without a frame is zero.
        if words.is_none() && !ram.is_allocated(page) {
            return;
        }
        let Some(locked) = ram.frame(page).and_then(|_| ram.lock(page)) else {
            fail!("there is no memory for page {page} of the guest")
        };
        let words = words.unwrap_or(&[0; MAX_WORDS]);
        locked.words().iter().zip(words).for_each(|(place, &word)| place.store(word, Ordering::Relaxed));
    }

    /// Receives all that comes before the guest runs.
    fn receive_guest<C: LinuxCpu>(&self, linux: &Linux<C>) -> Arrival {
        const LOST: &str = "the guest has not come";
        let nr_pages = self.memslot.ram().nr_pages();
        let mut payload: Payload = [0; MAX_WORDS];
        let hello = self.channel.receive(&mut payload, LOST);
        let traits = linux.guest.traits();
        if (hello.kind, hello.nr_words) != (Kind::Hello, traits.len()) {
            fail!("the other machine sends {hello:?}, where it should say what it is");
        }
        if hello.number != nr_pages {
            error!("the guest has {} pages of memory, and this machine has {nr_pages} for it", hello.number);
        }
        let mut pairs = payload.iter().zip(traits).zip(TRAITS);
        if let Some((_, name)) = pairs.find(|((theirs, own), _)| theirs != own) {
            error!("this machine differs from the guest's in {name}");
        }
        self.channel.send_empty(Kind::Welcome, 0);
        let mut hashes = vec![0; nr_pages as usize];
        let mut left = self.memslot.new_bitmap();
        let (mut nr_hashes, mut nr_left_words) = (0, 0);
        let mut states = Vec::new();
        loop {
            let head = self.channel.receive(&mut payload, LOST);
            self.channel.beat();
            let words = &payload[..head.nr_words];
            match head.kind {
                Kind::Page if head.nr_words == MAX_WORDS => self.write(linux, head.number, Some(&payload)),
                Kind::ZeroPage => self.write(linux, head.number, None),
                Kind::Hashes => nr_hashes += fill(&mut hashes, head, words),
                Kind::Left => nr_left_words += fill(&mut left, head, words),
                Kind::Cpu if head.number == states.len() as u64 => match from_words(words) {
                    Some(state) => states.push(*state),
                    None => fail!("the state of the guest's CPU {} is none: {head:?}", head.number),
                },
                Kind::Devices => {
                    let Some(devices) = from_words(words) else {
                        fail!("the state of the guest's devices is none: {head:?}")
                    };
                    if states.len() != self.nr_cpus {
                        fail!("the guest has {} CPUs, and this machine {}", states.len(), self.nr_cpus);
                    }
                    if (nr_hashes, nr_left_words) != (hashes.len(), left.len()) {
                        fail!("{nr_hashes} hashes and {nr_left_words} words of the bitmap came before the guest");
                    }
                    if let Some(page) = set_bits(&left).find(|&page| page >= nr_pages) {
                        fail!("page {page} comes later, and the guest has {nr_pages}");
                    }
                    return Arrival { hashes, left, nr_rounds: head.number, states, devices };
                }
                _ => fail!("the other machine sends {head:?}, before the guest"),
            }
        }
    }

    /// Compares all pages but those in `left` with their hashes. Returns how many these are.
    fn compare(&self, hashes: &[u64], left: &[u64]) -> u64 {
        let ram = self.memslot.ram();
        let mut nr_equal = 0;
        for (page, &expected) in (0..).zip(hashes) {
            if left[bit(page).0] & bit(page).1 != 0 {
                continue;
            }
            let found = ram.lock(page).map_or_else(hash_of_zeros, |locked| hash_of(locked.words()));
            if found != expected {
                fail!(
                    Hash; "page {page} is not that of the guest, and is not left for post-copy: hash {found:#x}, and the \
                     guest had {expected:#x}"
                );
            }
            nr_equal += 1;
            if page % 1024 == 0 {
                self.channel.beat();
            }
        }
        nr_equal
    }

    /// Brings the pages in `left`: those that the guest needs first, and the others.
    fn bring_rest(&self, hashes: &[u64], left: &[u64], nr_left: u64, began_ns: u64) {
        let mut payload: Payload = [0; MAX_WORDS];
        let mut nr_brought = 0;
        let mut nr_asked = 0;
        let mut rest = set_bits(left);
        while nr_brought < nr_left {
            // The guest goes first, where it waits for pages.
            let is_begun = self.control == Control::NoWithhold
                || self.nr_by_fault.load(Ordering::Relaxed) != 0
                || clock::now_ns() - began_ns > MAX_FIRST_MS * 1_000_000;
            while is_begun && nr_asked < MAX_ASKED {
                let Some(page) = rest.find(|&page| self.is_to_ask(page)) else { break };
                self.ask(page);
                nr_asked += 1;
                debug_assert!(page < self.memslot.ram().nr_pages(), "checked when the bitmap came");
            }
            let Some(head) = self.channel.try_receive(&mut payload) else {
                self.channel.check_other("it has pages that the guest needs");
                core::hint::spin_loop();
                continue;
            };
            self.channel.beat();
            let page = self.memslot.page_of(Gpa(head.number.saturating_mul(PAGE_SIZE)));
            let is_left = |page: &u64| left[bit(*page).0] & bit(*page).1 != 0;
            let (Kind::Page, MAX_WORDS, Some(page)) = (head.kind, head.nr_words, page.filter(is_left)) else {
                fail!("the other machine sends {head:?}, where a page that is left should come")
            };
            self.bring(page, hashes[page as usize], &payload);
            nr_brought += 1;
            nr_asked = nr_asked.saturating_sub(1);
        }
    }

    /// Lets the guest have a page that has come.
    fn bring(&self, page: u64, expected: u64, words: &Payload) {
        let found = words.iter().fold(Hash::new(), |hash, &word| hash.with(word)).value();
        if found != expected {
            fail!(Hash; "page {page} came with the hash {found:#x}, and the guest had {expected:#x}");
        }
        let ram = self.memslot.ram();
        let Some(locked) = ram.frame(page).and_then(|_| ram.lock(page)) else {
            fail!("there is no memory for page {page} of the guest")
        };
        match self.memslot.vm().translate(self.memslot.gpa(page)) {
            Ok(None) => {}
            Ok(Some(_)) => fail!(Withheld; "the guest could access page {page} before it came"),
            Err(error) => fail!("the translation of page {page} could not be read: {error}"),
        }
        locked.words().iter().zip(words).for_each(|(place, &word)| place.store(word, Ordering::Relaxed));
        drop(locked);
        self.memslot.bring(page);
    }

    /// Waits until the guest has done all its rounds and has turned itself off, and ends the
    /// machine.
    fn finish<C: LinuxCpu>(&self, linux: &Linux<C>, rounds_before: u64, nr_left: u64) -> ! {
        let (rounds, pages) = loop {
            // Before the look at the stage: the guest is done before it turns itself off.
            let is_off = self.is_off.load(Ordering::Acquire);
            if let Stage::Done { rounds, pages } = linux.stage() {
                break (rounds, pages);
            }
            if is_off {
                fail!("the guest has turned itself off before its work was done");
            }
            clock::wait_us(1000);
        };
        let done_ns = clock::now_ns();
        while !self.is_off.load(Ordering::Acquire) {
            if clock::now_ns() - done_ns > MAX_OFF_MS * 1_000_000 {
                fail!("the guest has done all, and has not turned itself off in {} s", MAX_OFF_MS / 1000);
            }
            clock::wait_us(1000);
        }
        linux.cpus.check();
        if rounds <= rounds_before || pages == 0 {
            fail!("the guest has done no round here: {rounds_before} rounds before, and {rounds} in all");
        }
        console::figure("faults", linux.vm.stats().faults, "1");
        console::figure("verified_pages", pages, "1");
        console::figure("rounds", rounds, "1");
        console::figure("rounds_before", rounds_before, "1");
        console::end(
            Verdict::Pass,
            format_args!(
                "the guest began round {rounds_before} on the other machine, ended it here, did all {rounds} rounds, \
                 verified {pages} pages, and turned itself off; {nr_left} pages came by post-copy"
            ),
        )
    }
}

/// Copies what has come into its place. Returns the number of words.
fn fill(to: &mut [u64], head: Head, words: &[u64]) -> usize {
    let place = usize::try_from(head.number).ok().and_then(|first| to.get_mut(first..)?.get_mut(..words.len()));
    let Some(place) = place else { fail!("the other machine sends {head:?}, which is past the end") };
    place.copy_from_slice(words);
    words.len()
}
