//! The channel: memory that both machines share, and how each knows that the other one is there.
//!
//! Each side counts how often it has looked for records. A side whose count stands still for
//! `MAX_SILENCE_MS` is gone.

use core::sync::atomic::{AtomicU64, Ordering};

use spin::Mutex;

use super::record::{BadRecord, Hash, Head, Kind};
use super::ring::{Payload, Ring};
use crate::arch::clock;
use crate::{error, fail};

/// How long the other machine may take to come.
const MAX_START_MS: u64 = 60_000;
/// How long the other machine may be silent.
const MAX_SILENCE_MS: u64 = 30_000;

/// Words before the rings: the counts of both sides, a cache line each.
const COUNTS_WORDS: usize = 16;

/// Which side of the channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The guest is there first.
    Source,
    /// The guest goes there.
    Target,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Source => Side::Target,
            Side::Target => Side::Source,
        }
    }
}

/// What is known of the other side's count.
#[derive(Clone, Copy, Debug)]
struct Seen {
    count: u64,
    since_ms: u64,
}

/// One side of the channel.
#[derive(Debug)]
pub struct Channel {
    /// How often each side has looked.
    own_count: &'static AtomicU64,
    other_count: &'static AtomicU64,
    seen: Mutex<Seen>,
    incoming: Ring<'static>,
    /// One CPU at a time sends.
    outgoing: Mutex<Ring<'static>>,
}

fn now_ms() -> u64 {
    clock::now_ns() / 1_000_000
}

impl Channel {
    /// `side` of the channel in `memory`, which was zero when the first machine began.
    pub fn new(memory: &'static [AtomicU64], side: Side) -> Channel {
        let (counts, rings) = memory.split_at(COUNTS_WORDS.min(memory.len()));
        let (from_source, from_target) = rings.split_at(rings.len() / 2);
        let rings = (Ring::new(from_source), Ring::new(from_target));
        let ((Some(from_source), Some(from_target)), COUNTS_WORDS) = (rings, counts.len()) else {
            error!("the shared memory has {} bytes, too little for a channel", memory.len() * 8)
        };
        let count = |side: Side| &counts[side as usize * (COUNTS_WORDS / 2)];
        let (incoming, outgoing) = match side {
            Side::Source => (from_target, from_source),
            Side::Target => (from_source, from_target),
        };
        Channel {
            own_count: count(side),
            other_count: count(side.other()),
            seen: Mutex::new(Seen { count: 0, since_ms: now_ms() }),
            incoming,
            outgoing: Mutex::new(outgoing),
        }
    }

    /// Says that this side is there.
    pub fn beat(&self) {
        // Relaxed: it orders nothing. CPUs that send count, too.
        self.own_count.fetch_add(1, Ordering::Relaxed);
    }

    /// How long the other side has been silent. `None`: it has not come yet.
    fn silence_ms(&self) -> Option<u64> {
        let count = self.other_count.load(Ordering::Relaxed);
        let mut seen = self.seen.lock();
        if seen.count != count {
            *seen = Seen { count, since_ms: now_ms() };
        }
        (count != 0).then(|| now_ms().saturating_sub(seen.since_ms))
    }

    /// Whether the other side has come.
    pub fn is_other_there(&self) -> bool {
        self.other_count.load(Ordering::Relaxed) != 0
    }

    /// Waits until the other side is there. Ends the machine if it does not come.
    pub fn wait_for_other(&self) {
        let began_ms = now_ms();
        while !self.is_other_there() {
            if now_ms() - began_ms > MAX_START_MS {
                error!("no other machine has come to the channel in {} s", MAX_START_MS / 1000);
            }
            self.beat();
            clock::wait_us(1000);
        }
    }

    /// Says that this side is there, and ends the machine if the other one is gone, which `lost`
    /// says the meaning of.
    pub fn check_other(&self, lost: &str) {
        self.beat();
        if self.silence_ms().is_some_and(|silence_ms| silence_ms > MAX_SILENCE_MS) {
            fail!(Silence; "the other machine has been silent for {} s: {lost}", MAX_SILENCE_MS / 1000);
        }
    }

    /// Waits until the other side is gone, without a sign of this one.
    pub fn wait_for_silence(&self) {
        while self.silence_ms().is_none_or(|silence_ms| silence_ms <= MAX_SILENCE_MS) {
            clock::wait_us(1000);
        }
    }

    /// Sends a record as soon as there is room. Returns the hash of its words.
    pub fn send(&self, kind: Kind, number: u64, words: impl ExactSizeIterator<Item = u64> + Clone) -> Hash {
        let outgoing = self.outgoing.lock();
        loop {
            if let Some(hash) = outgoing.try_send(kind, number, words.clone()) {
                return hash;
            }
            self.check_other("it takes no records any more");
            core::hint::spin_loop();
        }
    }

    /// Sends a record without words.
    pub fn send_empty(&self, kind: Kind, number: u64) {
        self.send(kind, number, core::iter::empty());
    }

    /// Receives a record, if there is one.
    pub fn try_receive(&self, payload: &mut Payload) -> Option<Head> {
        self.incoming.try_receive(payload).unwrap_or_else(|error: BadRecord| fail!("{error}"))
    }

    /// Waits for a record. Ends the machine if the other side is gone.
    pub fn receive(&self, payload: &mut Payload, lost: &str) -> Head {
        loop {
            if let Some(head) = self.try_receive(payload) {
                return head;
            }
            self.check_other(lost);
            core::hint::spin_loop();
        }
    }
}
