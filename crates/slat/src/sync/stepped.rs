//! Atomics with a scheduling point before each operation, over the core types.
//! - Under [shuttle](https://docs.rs/shuttle) another thread of the test may run there.
//! - With the feature `costed` another CPU of a modelled machine may run there, and the access costs
//!   virtual time (`super::costed`).
//!
//! Both run all threads one at a time on one thread of the system, and decide at each scheduling
//! point which one goes on. A page-table page is an array of PTEs in raw memory, and shuttle's own
//! atomics are larger than the values that they hold. So these types are transparent over the core
//! atomics.
//!
//! Shuttle's scheduling point is `shuttle::thread::sleep`: a model without time makes of it a
//! context switch that may or may not happen, and nothing else. `yield_now` would not do, because
//! for the scheduler it means that the thread cannot go on. Every operation is one step and observes
//! all earlier ones. So memory orders are not tried here; loom does that for small models.

#![allow(dead_code, reason = "all operations of an engine, whichever it uses at the moment")]
#![expect(unreachable_pub, reason = "one macro makes all types, of which some are only for the crate")]

use core::fmt;
use core::sync::atomic::{self, Ordering};
#[cfg(shuttle)]
use core::time::Duration;

#[cfg(not(shuttle))]
use super::costed;

/// What an operation does to its word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Reads it.
    Load,
    /// Writes it.
    Store,
    /// Reads and writes it.
    Rmw,
}

/// Here another thread may run, before this one accesses `word`.
#[inline]
#[cfg_attr(not(shuttle), track_caller)]
fn step<T>(word: &T, step: Step) {
    #[cfg(shuttle)]
    {
        let _ = (word, step);
        shuttle::thread::sleep(Duration::ZERO);
    }
    #[cfg(not(shuttle))]
    costed::access(core::ptr::from_ref(word).addr(), step);
}

/// The operations that all atomics have.
macro_rules! common {
    ($value:ty) => {
        /// An atomic with this value.
        pub const fn new(value: $value) -> Self {
            Self(Core::new(value))
        }

        /// See the core type.
        #[cfg_attr(not(shuttle), track_caller)]
        pub fn load(&self, order: Ordering) -> $value {
            step(self, Step::Load);
            self.0.load(order)
        }

        /// See the core type.
        #[cfg_attr(not(shuttle), track_caller)]
        pub fn store(&self, value: $value, order: Ordering) {
            step(self, Step::Store);
            self.0.store(value, order);
        }

        /// See the core type.
        #[cfg_attr(not(shuttle), track_caller)]
        pub fn swap(&self, value: $value, order: Ordering) -> $value {
            step(self, Step::Rmw);
            self.0.swap(value, order)
        }

        /// See the core type.
        #[cfg_attr(not(shuttle), track_caller)]
        pub fn compare_exchange(
            &self,
            current: $value,
            new: $value,
            success: Ordering,
            failure: Ordering,
        ) -> Result<$value, $value> {
            step(self, Step::Rmw);
            self.0.compare_exchange(current, new, success, failure)
        }

        /// See the core type. Never fails for no reason, so that a schedule can be repeated.
        #[cfg_attr(not(shuttle), track_caller)]
        pub fn compare_exchange_weak(
            &self,
            current: $value,
            new: $value,
            success: Ordering,
            failure: Ordering,
        ) -> Result<$value, $value> {
            self.compare_exchange(current, new, success, failure)
        }

        /// See the core type. Other threads may run between its load and its exchange.
        #[cfg_attr(not(shuttle), track_caller)]
        pub fn fetch_update(
            &self,
            success: Ordering,
            failure: Ordering,
            mut update: impl FnMut($value) -> Option<$value>,
        ) -> Result<$value, $value> {
            let mut current = self.load(failure);
            while let Some(new) = update(current) {
                match self.compare_exchange(current, new, success, failure) {
                    Ok(old) => return Ok(old),
                    Err(seen) => current = seen,
                }
            }
            Err(current)
        }

        /// See the core type. No scheduling point: no other thread has a reference.
        pub fn get_mut(&mut self) -> &mut $value {
            self.0.get_mut()
        }

        /// See the core type. No scheduling point: no other thread has a reference.
        pub fn into_inner(self) -> $value {
            self.0.into_inner()
        }
    };
}

/// Operations that return the old value.
macro_rules! fetch {
    ($value:ty: $($operation:ident)*) => {
        $(
            /// See the core type.
            #[cfg_attr(not(shuttle), track_caller)]
            pub fn $operation(&self, value: $value, order: Ordering) -> $value {
                step(self, Step::Rmw);
                self.0.$operation(value, order)
            }
        )*
    };
}

macro_rules! stepped {
    ($module:ident, $name:ident, $value:ty, $($operation:ident)*) => {
        mod $module {
            use super::*;
            type Core = atomic::$name;

            #[doc = concat!("[`core::sync::atomic::", stringify!($name), "`] with scheduling points.")]
            #[derive(Default)]
            #[repr(transparent)]
            pub struct $name(Core);

            impl $name {
                common!($value);
                fetch!($value: $($operation)*);
            }

            impl From<$value> for $name {
                fn from(value: $value) -> Self {
                    Self::new(value)
                }
            }

            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    // No scheduling point: what is printed when a test fails must not move it on.
                    fmt::Debug::fmt(&self.0, f)
                }
            }
        }
        pub use $module::$name;
    };
}

stepped!(of_u32, AtomicU32, u32, fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_max fetch_min);
stepped!(of_u64, AtomicU64, u64, fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_max fetch_min);
stepped!(of_bool, AtomicBool, bool, fetch_and fetch_or fetch_xor);

/// [`core::sync::atomic::AtomicPtr`] with scheduling points.
#[repr(transparent)]
pub struct AtomicPtr<T>(atomic::AtomicPtr<T>);

/// Names the core constructor inside `common!`.
type Core<T> = atomic::AtomicPtr<T>;

impl<T> AtomicPtr<T> {
    common!(*mut T);
}

impl<T> Default for AtomicPtr<T> {
    fn default() -> Self {
        Self::new(core::ptr::null_mut())
    }
}

impl<T> fmt::Debug for AtomicPtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(all(test, shuttle))]
mod tests {
    extern crate std;

    use std::panic;
    use std::sync::Arc;

    use super::*;

    const SCHEDULES: usize = 1_000;

    /// Two threads count to two by `count`; fails in the schedules that lose a count.
    fn two_count(count: fn(&AtomicU64)) {
        let counter = Arc::new(AtomicU64::new(0));
        let threads = [(); 2].map(|()| {
            let counter = Arc::clone(&counter);
            shuttle::thread::spawn(move || count(&counter))
        });
        for thread in threads {
            thread.join().expect("counting does not fail");
        }
        assert_eq!(counter.load(Ordering::Relaxed), 2, "a count is lost");
    }

    #[test]
    fn a_lost_update_is_found() {
        let racy = |counter: &AtomicU64| {
            let value = counter.load(Ordering::Relaxed);
            counter.store(value + 1, Ordering::Relaxed);
        };
        let found = panic::catch_unwind(|| shuttle::check_random(move || two_count(racy), SCHEDULES));
        assert!(found.is_err(), "no schedule stopped a thread between its load and its store");
    }

    #[test]
    fn an_atomic_update_is_not_lost() {
        let by_addition = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        shuttle::check_random(move || two_count(by_addition), SCHEDULES);
        let by_exchange = |counter: &AtomicU64| {
            let update = |value| Some(value + 1);
            counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).expect("the update never declines");
        };
        shuttle::check_random(move || two_count(by_exchange), SCHEDULES);
    }

    #[test]
    fn layout_is_that_of_the_core_atomics() {
        assert_eq!(size_of::<AtomicU32>(), 4);
        assert_eq!(size_of::<AtomicU64>(), 8);
        assert_eq!(size_of::<AtomicBool>(), 1);
        assert_eq!(size_of::<AtomicPtr<u8>>(), size_of::<*mut u8>());
    }
}
