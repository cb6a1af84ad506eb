//! Atomics, fences and the optional lock: all of the crate's come from here.
//! - In a normal build the types are those of `core`.
//! - With `--cfg shuttle` they have a scheduling point before each operation, so that
//!   [shuttle](https://docs.rs/shuttle) can try schedules on the whole engine.
//! - With `--cfg loom` they are those of [loom](https://docs.rs/loom), for small models of single
//!   structures.
//! - With the feature `costed`, which only the package `slat-costed` has, they cost the virtual time
//!   of a modelled machine.
//!
//! But under loom the types are transparent over the core atomics, so that a raw page-table page
//! can be read as an array of them.
//!
//! # Store-load pairs
//! "Set a thing, then look whether the other side did" needs a full fence on both sides. All such
//! places in the engine use [`full_fence`] after a plain store, or [`fence_after_rmw`] after an
//! atomic read-modify-write, and name their partner in a comment. `models/litmus/` has a test for
//! each, as for every other order, and `ci/litmus.sh` compares the two.

#![cfg_attr(
    all(target_arch = "x86_64", not(any(loom, shuttle, feature = "costed"))),
    expect(unsafe_code, reason = "a prefetch is an intrinsic")
)]

#[cfg(not(any(loom, shuttle, feature = "costed")))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicPtr};
#[cfg(not(any(loom, shuttle, feature = "costed")))]
pub use core::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(shuttle)]
pub mod events;

/// Records a protocol step for the proofs (`events`), directly behind its atomic operation. Nothing
/// in a normal build.
macro_rules! record {
    ($($event:tt)*) => {
        #[cfg(shuttle)]
        $crate::sync::events::record($crate::sync::events::Event::$($event)*);
    };
}
pub(crate) use record;

#[cfg(feature = "costed")]
pub mod costed;

#[cfg(any(shuttle, feature = "costed"))]
mod stepped;
#[cfg(any(shuttle, feature = "costed"))]
pub(crate) use stepped::{AtomicBool, AtomicPtr};
#[cfg(any(shuttle, feature = "costed"))]
pub use stepped::{AtomicU32, AtomicU64};

pub use core::sync::atomic::Ordering;

#[cfg(feature = "baselines")]
mod locking;
#[cfg(feature = "baselines")]
pub use locking::{Locking, Park};

#[cfg(feature = "costed")]
pub use costed::{Lock, LockGuard};
#[cfg(all(feature = "baselines", not(feature = "costed")))]
mod lock;
#[cfg(all(feature = "baselines", not(feature = "costed")))]
pub use lock::{Lock, LockGuard};

/// The side of the optional lock that an operation takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Beside other readers.
    Read,
    /// Alone.
    Write,
}

/// One turn of a spin loop.
#[inline]
pub fn spin_loop() {
    #[cfg(not(any(loom, shuttle, feature = "costed")))]
    core::hint::spin_loop();
    #[cfg(feature = "costed")]
    costed::pause();
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
}

/// An address on the stack of the calling thread. On a modelled machine it is the same in each run.
#[inline]
pub(crate) fn stack_address() -> usize {
    let on_stack = 0_u8;
    let address = core::ptr::from_ref(&on_stack).addr();
    #[cfg(feature = "costed")]
    let address = costed::stack_address().unwrap_or(address);
    address
}

/// Has the cache line of `word` fetched. On x86 nothing waits for it; where stable Rust has no such
/// instruction, a load does it.
#[inline]
pub(crate) fn prefetch(word: &AtomicU64) {
    #[cfg(feature = "costed")]
    costed::prefetch(core::ptr::from_ref(word).addr());
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, feature = "costed"))))]
    // SAFETY: a prefetch accesses no memory, and any address may be given to it.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(core::ptr::from_ref(word).cast());
    }
    #[cfg(not(any(target_arch = "x86_64", loom, shuttle, feature = "costed")))]
    core::hint::black_box(word.load(Ordering::Relaxed));
    #[cfg(any(loom, shuttle))]
    let _ = word;
}

/// Orders every earlier store of this thread before every later load (the store-load primitive).
#[inline]
pub fn full_fence() {
    #[cfg(not(any(loom, shuttle, feature = "costed")))]
    core::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(feature = "costed")]
    costed::fence();
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
    // shuttle runs one thread at a time: there every operation is sequentially consistent.
}

/// The near side of a fence that another thread makes on all CPUs
/// ([`Host::barrier_on_all_cpus`](crate::Host::barrier_on_all_cpus)): holds back only the compiler.
#[inline]
pub(crate) fn fence_against_remote_barrier() {
    #[cfg(not(any(loom, shuttle)))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    // The model checkers have no such barrier.
    #[cfg(any(loom, shuttle))]
    full_fence();
}

/// [`full_fence`] for a place directly behind an atomic read-modify-write of this thread.
///
/// On x86 a locked instruction is a full fence itself (Intel SDM vol. 3A, 10.2.2; AMD APM vol. 2,
/// 7.4.2), so there it holds back only the compiler.
#[inline]
pub fn fence_after_rmw() {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle))))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle)))))]
    full_fence();
}

/// The bound of preemptions of a loom model of three threads or more: `usual`, because such a model
/// takes long. `LOOM_MORE_OF_THREE` adds to it, by hand and at night.
#[cfg(all(test, loom))]
pub(crate) fn preemptions_of_three(usual: usize) -> usize {
    extern crate std;
    usual + std::env::var("LOOM_MORE_OF_THREE").map_or(0, |more| more.parse().expect("a number of preemptions"))
}
