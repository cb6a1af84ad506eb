//! The source: the guest begins here, and leaves.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use fastrand::Rng;
use slat::{MemoryRegionFlags, PAGE_SIZE};
use spin::Mutex;

use super::channel::Channel;
use super::record::{Kind, MAX_WORDS};
use super::ring::Payload;
use super::{add_bits, hash_of, hash_of_zeros, is_zero, set_bits};
use crate::arch::linux::{State, words};
use crate::arch::{self, clock};
use crate::console::{self, Verdict};
use crate::host::Control;
use crate::linux::{GuestFormat, Linux, LinuxCpu, Stage};
use crate::memslot::{Memslot, bit};
use crate::options::Options;
use crate::{fail, say};

/// Rounds of the guest before the migration begins, at least, and how many of them are at random.
const FIRST_ROUND: u64 = 1;
const RANDOM_ROUNDS: u64 = 2;
/// Milliseconds from the begin of a round of the guest to that of the migration, at most.
const MAX_LATE_MS: u64 = 400;
/// The guest is in the middle of a round so long after it began.
const MIDDLE_MS: u64 = 10;

/// Rounds of pre-copy after the first one, at most.
const MAX_ROUNDS: u64 = 4;
/// After a round of so few pages there is no other one.
const FEW_PAGES: u64 = 512;
/// The guest runs after the last round until it has written so many pages, which are left for
/// post-copy, or for so long.
const LEFT_PAGES: u64 = 1000;
const MAX_LEFT_MS: u64 = 5000;
/// How long the guest's CPUs may take to stop. One that the guest has not started never does.
const MAX_STOP_MS: u64 = 60_000;

/// What the guest's CPUs are to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Order {
    /// To run.
    Run,
    /// To stay outside of the guest.
    Stop,
    /// They are all outside: to say what they are.
    Answer,
    /// To leave for good.
    Leave,
}

/// The order to the guest's CPUs to stop, and their answers.
///
/// They stop all before any of them answers: a CPU that runs may interrupt another one, whose answer
/// would not have the interrupt. If an interrupt is in service on one of them, all run again.
#[derive(Debug)]
pub struct Departure {
    order: AtomicU8,
    /// CPUs that follow the order.
    nr_following: AtomicUsize,
    states: Box<[Mutex<Option<Box<State>>>]>,
}

impl Departure {
    fn new(nr_cpus: usize) -> Departure {
        let states = (0..nr_cpus).map(|_| Mutex::new(None)).collect();
        Departure { order: AtomicU8::new(Order::Run as u8), nr_following: AtomicUsize::new(0), states }
    }

    fn is(&self, order: Order) -> bool {
        // SeqCst, as all of these: a few times in a migration.
        self.order.load(Ordering::SeqCst) == order as u8
    }

    /// Whether the guest's CPUs are to stop.
    pub fn is_ordered(&self) -> bool {
        // Relaxed: looked at before each entry; what follows is SeqCst.
        self.order.load(Ordering::Relaxed) != Order::Run as u8
    }

    /// Guest CPU `number` is outside of the guest: stays there as ordered. `state` says what it is,
    /// unless an interrupt is in service. Returns when it is to run again.
    pub fn stop(&self, number: usize, state: impl FnOnce() -> Option<Box<State>>) {
        self.nr_following.fetch_add(1, Ordering::SeqCst);
        while self.is(Order::Stop) {
            core::hint::spin_loop();
        }
        *self.states[number].lock() = state();
        self.nr_following.fetch_add(1, Ordering::SeqCst);
        while self.is(Order::Answer) {
            core::hint::spin_loop();
        }
        if self.is(Order::Leave) {
            arch::halt();
        }
        self.nr_following.fetch_sub(2, Ordering::SeqCst);
    }

    /// Gives `order`, and waits until the CPUs have followed `nr` orders in all. Does `meanwhile`.
    fn order(&self, order: Order, nr: usize, mut meanwhile: impl FnMut()) {
        self.order.store(order as u8, Ordering::SeqCst);
        while self.nr_following.load(Ordering::SeqCst) != nr {
            meanwhile();
        }
    }

    /// Stops all CPUs for good. Does `meanwhile` again and again. Returns what they are.
    fn stop_all(&self, mut meanwhile: impl FnMut()) -> Vec<State> {
        let nr_cpus = self.states.len();
        loop {
            self.order(Order::Stop, nr_cpus, &mut meanwhile);
            self.order(Order::Answer, 2 * nr_cpus, &mut meanwhile);
            let states: Vec<_> =
                self.states.iter().filter_map(|state| state.lock().take()).map(|state| *state).collect();
            if states.len() == nr_cpus {
                self.order.store(Order::Leave as u8, Ordering::SeqCst);
                return states;
            }
            self.order(Order::Run, 0, &mut meanwhile);
        }
    }
}

/// The guest's memory that moves, its memory that stays, and the channel.
pub struct Source {
    memslot: Memslot<GuestFormat>,
    channel: Channel,
    /// What the guest's CPUs have to do.
    pub departure: Departure,
    control: Control,
    seed: u64,
}

fn say_round(round: u64, nr_pages: u64, began_ns: u64) {
    let ms = (clock::now_ns() - began_ns) / 1_000_000;
    say!("pre-copy round {round}: {nr_pages} pages in {ms} ms");
}

/// What was sent of each page.
struct Sent {
    /// The hash of the page, as it was sent last.
    hashes: Vec<u64>,
    nr_pages: u64,
}

impl Source {
    /// A source that sends the memory of `memslot`.
    pub fn new(memslot: Memslot<GuestFormat>, channel: Channel, options: &Options) -> Source {
        let departure = Departure::new(options.nr_cpus);
        Source { memslot, channel, departure, control: options.control, seed: options.seed }
    }

    /// Waits until the target is there. The CPU that sends the guest ends the machine if it does not
    /// come.
    pub fn wait_for_target(&self) {
        while !self.channel.is_other_there() {
            core::hint::spin_loop();
        }
    }

    /// Sends the guest to the target, and ends the machine.
    pub fn run<C: LinuxCpu>(&self, linux: &Linux<C>) -> ! {
        while linux.stage() == Stage::Boot {
            clock::wait_us(1000);
        }
        console::line("ready", format_args!("for the other machine"));
        self.channel.wait_for_other();
        self.wait_for_the_moment(linux);
        let mut payload = [0; MAX_WORDS];
        let traits = linux.guest.traits();
        self.channel.send(Kind::Hello, self.memslot.ram().nr_pages(), traits.iter().copied());
        match self.channel.receive(&mut payload, "it did not answer").kind {
            Kind::Welcome => {}
            other => fail!("the other machine answered with {other:?}"),
        }
        let sent = self.pre_copy(linux);
        let mut left = self.wait_for_writes();
        let states = self.stop(linux, &mut left);
        linux.cpus.check();
        let began_ns = clock::now_ns();
        let nr_rounds = match linux.stage() {
            Stage::Up { nr_rounds, .. } => nr_rounds,
            other => fail!("the guest has stopped at {other:?}"),
        };
        say!("the guest has stopped in round {nr_rounds}; {} pages are left", set_bits(&left).count());
        if self.control == Control::LosePage {
            self.lose_page(&mut left, &sent);
        }
        let nr_left = self.switch(linux, &states, &left, nr_rounds);
        self.serve(&left, nr_left, began_ns);
        console::figure("pages_left", nr_left, "1");
        console::figures();
        console::end(
            Verdict::Pass,
            format_args!("{} pages went by pre-copy, and {nr_left} by post-copy", sent.nr_pages),
        )
    }

    /// Waits until the guest is in the middle of a round that the seed has chosen.
    fn wait_for_the_moment<C: LinuxCpu>(&self, linux: &Linux<C>) {
        let mut rng = Rng::with_seed(self.seed);
        let first = FIRST_ROUND + rng.u64(0..RANDOM_ROUNDS);
        let late_ms = rng.u64(MIDDLE_MS..=MAX_LATE_MS);
        loop {
            match linux.stage() {
                Stage::Up { nr_rounds, since_ns } if nr_rounds >= first => {
                    if clock::now_ns() - since_ns >= late_ms * 1_000_000 {
                        say!("the migration begins in round {nr_rounds}");
                        return;
                    }
                }
                Stage::Done { .. } => fail!("the guest was done before the migration began: give it more rounds"),
                Stage::Boot | Stage::Up { .. } => {}
            }
            self.channel.check_other("the guest has not left");
            clock::wait_us(1000);
        }
    }

    /// Sends the page, if it has a frame.
    fn send_page(&self, page: u64, sent: &mut Sent) {
        let gfn = self.memslot.gpa(page).gfn().0;
        let Some(locked) = self.memslot.ram().lock(page) else { return };
        // A page that the guest writes meanwhile is in the next log.
        let hash = if is_zero(locked.words()) {
            self.channel.send_empty(Kind::ZeroPage, gfn);
            hash_of_zeros()
        } else {
            let words = locked.words().iter().map(|word| word.load(Ordering::Relaxed));
            self.channel.send(Kind::Page, gfn, words).value()
        };
        sent.hashes[page as usize] = hash;
        sent.nr_pages += 1;
        self.channel.beat();
    }

    /// Sends all memory, and then what the log has, while the guest runs.
    fn pre_copy<C: LinuxCpu>(&self, linux: &Linux<C>) -> Sent {
        if !self.memslot.set_flags(|flags| flags | MemoryRegionFlags::LOG_DIRTY_PAGES) {
            fail!("the dirty log could not be turned on");
        }
        let nr_pages = self.memslot.ram().nr_pages();
        let mut sent = Sent { hashes: vec![hash_of_zeros(); nr_pages as usize], nr_pages: 0 };
        let began_ns = clock::now_ns();
        for page in 0..nr_pages {
            self.send_page(page, &mut sent);
        }
        if sent.nr_pages == 0 {
            fail!("the guest has no memory");
        }
        say_round(0, sent.nr_pages, began_ns);
        console::figure("precopy_pages", sent.nr_pages, "1");
        let mut bitmap = self.memslot.new_bitmap();
        let mut nr_again = 0;
        for round in 1..=MAX_ROUNDS {
            let began_ns = clock::now_ns();
            let nr_dirty = self.memslot.take_log(&mut bitmap);
            set_bits(&bitmap).for_each(|page| self.send_page(page, &mut sent));
            nr_again += nr_dirty;
            say_round(round, nr_dirty, began_ns);
            if nr_dirty <= FEW_PAGES {
                break;
            }
            if let Stage::Done { .. } = linux.stage() {
                fail!("the guest was done before it could leave: give it more rounds");
            }
        }
        if nr_again == 0 {
            fail!("the dirty log was empty in each round of pre-copy");
        }
        console::figure("precopy_pages_again", nr_again, "1");
        sent
    }

    /// The pages that the guest writes from now on, until there are enough of them.
    fn wait_for_writes(&self) -> Vec<u64> {
        let began_ns = clock::now_ns();
        let (mut left, mut log) = (self.memslot.new_bitmap(), self.memslot.new_bitmap());
        let mut nr_left = 0;
        while nr_left < LEFT_PAGES && clock::now_ns() - began_ns < MAX_LEFT_MS * 1_000_000 {
            self.channel.check_other("the guest has not left");
            clock::wait_us(5000);
            self.memslot.take_log(&mut log);
            nr_left = add_bits(&mut left, &log);
        }
        left
    }

    /// Stops the guest, in the middle of a round. Adds the pages that it has written to `left`.
    fn stop<C: LinuxCpu>(&self, linux: &Linux<C>, left: &mut [u64]) -> Vec<State> {
        loop {
            match linux.stage() {
                Stage::Up { since_ns, .. } if clock::now_ns() - since_ns >= MIDDLE_MS * 1_000_000 => break,
                Stage::Done { .. } => fail!("the guest was done before it could leave: give it more rounds"),
                Stage::Boot | Stage::Up { .. } => self.channel.check_other("the guest has not stopped yet"),
            }
        }
        let began_ns = clock::now_ns();
        let states = self.departure.stop_all(|| {
            if clock::now_ns() - began_ns > MAX_STOP_MS * 1_000_000 {
                let nr_cpus = self.departure.states.len();
                fail!("the guest's {nr_cpus} CPUs have not stopped together in {} s", MAX_STOP_MS / 1000);
            }
            self.channel.check_other("the guest has not stopped yet");
            linux.cpus.kick_all();
            clock::wait_us(100);
        });
        let mut log = self.memslot.new_bitmap();
        self.memslot.take_log(&mut log);
        add_bits(left, &log);
        states
    }

    /// Leaves out a page that differs from what was sent of it.
    fn lose_page(&self, left: &mut [u64], sent: &Sent) {
        let differs = |page: u64| {
            let locked = self.memslot.ram().lock(page);
            locked.is_some_and(|locked| hash_of(locked.words()) != sent.hashes[page as usize])
        };
        let Some(page) = set_bits(left).find(|&page| differs(page)) else {
            fail!("the guest has written no page since it was sent")
        };
        say!("page {page} is left out");
        let (word, bit) = bit(page);
        left[word] &= !bit;
    }

    /// Sends all but the pages in `left`, and with it the guest. Returns their number.
    fn switch<C: LinuxCpu>(&self, linux: &Linux<C>, states: &[State], left: &[u64], nr_rounds: u64) -> u64 {
        let devices = State::devices_of(states);
        for (gfn, words) in linux.guest.fixed_pages() {
            self.channel.send(Kind::Page, gfn.0, words.iter().map(|word| word.load(Ordering::Relaxed)));
            self.channel.beat();
        }
        let ram = self.memslot.ram();
        let hashes: Vec<u64> = (0..ram.nr_pages())
            .map(|page| {
                if page % 1024 == 0 {
                    self.channel.beat();
                }
                ram.lock(page).map_or_else(hash_of_zeros, |locked| hash_of(locked.words()))
            })
            .collect();
        for (first, part) in (0..).step_by(MAX_WORDS).zip(hashes.chunks(MAX_WORDS)) {
            self.channel.send(Kind::Hashes, first, part.iter().copied());
        }
        for (first, part) in (0..).step_by(MAX_WORDS).zip(left.chunks(MAX_WORDS)) {
            self.channel.send(Kind::Left, first, part.iter().copied());
        }
        for (number, state) in (0..).zip(states) {
            self.channel.send(Kind::Cpu, number, words(state).iter().copied());
        }
        self.channel.send(Kind::Devices, nr_rounds, words(&*devices).iter().copied());
        set_bits(left).count() as u64
    }

    /// Sends the pages that the target asks for, until it has all.
    fn serve(&self, left: &[u64], nr_left: u64, began_ns: u64) {
        const LOST: &str = "it has the guest, and asks for no page";
        let mut payload: Payload = [0; MAX_WORDS];
        let mut rest = left.to_vec();
        let mut nr_served = 0;
        loop {
            let head = self.channel.receive(&mut payload, LOST);
            match head.kind {
                Kind::Request => {
                    let page = self.memslot.page_of(slat::Gpa(head.number.saturating_mul(PAGE_SIZE)));
                    let Some(page) = page.filter(|&page| rest[bit(page).0] & bit(page).1 != 0) else {
                        fail!("the other machine asks for frame {:#x}, which is not left", head.number)
                    };
                    if nr_served == 0 {
                        // The guest has not run from its stop here to its first access there.
                        console::figure_ms("stopped_time", (clock::now_ns() - began_ns) / 1_000_000);
                    }
                    rest[bit(page).0] &= !bit(page).1;
                    if self.control == Control::SilentSource && nr_served == nr_left / 2 {
                        say!("this machine is silent from now on");
                        self.channel.wait_for_silence();
                        fail!(Silence; "the other machine has lost the guest, as it should");
                    }
                    let Some(locked) = self.memslot.ram().lock(page) else { fail!("page {page} has no frame") };
                    let words = locked.words().iter().map(|word| word.load(Ordering::Relaxed));
                    self.channel.send(Kind::Page, head.number, words);
                    nr_served += 1;
                }
                Kind::Complete if nr_served == nr_left => return,
                Kind::Complete => fail!("the other machine has {nr_served} of {nr_left} pages, and asks for no more"),
                other => fail!("the other machine sends {other:?}, where it asks for pages"),
            }
        }
    }
}
