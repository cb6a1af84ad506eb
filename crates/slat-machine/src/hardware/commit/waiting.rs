//! The waiting fallback: a word per CPU is set while the CPU is inside a checked operation, and the
//! flush waits for it.
//!
//! It rests on a store-load pair. The CPU sets its word and then reads the generation; the flush
//! moves the generation on and then reads the words. A full fence stands between the two steps on
//! both sides. So either the CPU reads the new generation and does nothing, or the flush finds the
//! CPU inside and waits.
//!
//! An operation must not block for ever inside: memory that a userfault handler fills only after a
//! flush would be a deadlock here. The fault's resolve touches guest memory before it is mapped, so
//! the CPUs do not block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use parking_lot::RwLock;

use super::Stale;

/// Turns of the loop that waits for a CPU before it yields its own time slice. An operation takes
/// some nanoseconds: a CPU that is still inside after that is probably preempted.
const SPINS: u32 = 100;

/// A CPU's word: odd while the CPU is inside an operation, and a new number for each.
#[derive(Debug, Default)]
pub(super) struct Gate(CachePadded<AtomicU64>);

impl Gate {
    /// Does `operation` if `generation` still is `expected`. A flush that has moved the generation
    /// on since waits for the end.
    #[inline]
    pub(super) fn inside<T>(
        &self,
        generation: &AtomicU64,
        expected: u64,
        operation: impl FnOnce() -> T,
    ) -> Result<T, Stale> {
        // Relaxed: only this CPU writes its word.
        let outside = self.0.load(Ordering::Relaxed);
        // Relaxed, with the fence behind it: the CPU's half of the store-load pair.
        self.0.store(outside.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders it behind the store; what the generation protects was read
        // before.
        let result = if generation.load(Ordering::Relaxed) == expected { Ok(operation()) } else { Err(Stale) };
        // Release: the flush that finds the CPU outside observes the operation's effect too.
        self.0.store(outside.wrapping_add(2), Ordering::Release);
        result
    }
}

/// The words of all CPUs of a domain.
#[derive(Debug, Default)]
pub(super) struct Gates(RwLock<Vec<Arc<Gate>>>);

impl Gates {
    pub(super) fn add(&self) -> Arc<Gate> {
        let gate = Arc::new(Gate::default());
        // A CPU that is added during a flush takes this lock after the flush did, hence after the
        // generation moved on: it starts with the new one.
        self.0.write().push(Arc::clone(&gate));
        gate
    }

    pub(super) fn remove(&self, gate: &Arc<Gate>) {
        self.0.write().retain(|other| !Arc::ptr_eq(other, gate));
    }

    /// Waits until every CPU that is inside an operation now has left it. Called after the
    /// generation moved on.
    pub(super) fn wait_until_left(&self) {
        // The flush's half of the store-load pair.
        fence(Ordering::SeqCst);
        for gate in self.0.read().iter() {
            // Acquire: pairs with the release on leaving.
            let seen = gate.0.load(Ordering::Acquire);
            if seen.is_multiple_of(2) {
                continue;
            }
            // It is enough that the number changes: a CPU that enters again reads the new
            // generation.
            let mut turns = 0;
            while gate.0.load(Ordering::Acquire) == seen {
                if turns < SPINS {
                    turns += 1;
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
        }
    }
}
