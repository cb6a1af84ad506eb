//! Replaces restartable sequences on platforms without them: it cannot be made.

use std::convert::Infallible;
use std::sync::atomic::AtomicU64;

use super::{NotRestartable, Stale};

#[derive(Clone, Copy, Debug)]
pub(super) struct Restartable(Infallible);

impl Restartable {
    pub(super) fn register() -> Result<Restartable, NotRestartable> {
        Err(NotRestartable::Platform)
    }

    pub(super) fn restart_running_threads(self) {
        match self.0 {}
    }

    /// # Safety
    /// None: cannot be called.
    pub(super) unsafe fn load(self, _: &AtomicU64, _: u64, _: *const u64) -> Result<u64, Stale> {
        match self.0 {}
    }

    /// # Safety
    /// None: cannot be called.
    pub(super) unsafe fn store(self, _: &AtomicU64, _: u64, _: *mut u64, _: u64) -> Result<(), Stale> {
        match self.0 {}
    }

    /// # Safety
    /// None: cannot be called.
    pub(super) unsafe fn compare_exchange(
        self,
        _: &AtomicU64,
        _: u64,
        _: *mut u64,
        _: u64,
        _: u64,
    ) -> Result<Result<u64, u64>, Stale> {
        match self.0 {}
    }
}
