//! `vm_lock.rs` without the feature `baselines`: no VM has a lock.

use core::marker::PhantomData;

use crate::config::Config;
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::sync::Side;

use super::retire::Participant;

pub(crate) struct VmLock;

#[derive(Clone, Copy)]
pub(crate) struct LockTiming;

pub(crate) struct HeldLock<'a, H: Host>(PhantomData<&'a H>);

impl LockTiming {
    pub(super) const OFF: LockTiming = LockTiming;

    pub(super) fn prepare(self, _participant: &Participant) -> Result<(), OutOfMemory> {
        Ok(())
    }
}

impl VmLock {
    pub(super) fn new(_config: &Config) -> VmLock {
        VmLock
    }

    #[inline]
    pub(super) fn exists(&self) -> bool {
        false
    }

    pub(super) fn timing(&self) -> LockTiming {
        LockTiming
    }

    #[inline]
    pub(super) fn is_contended(&self) -> bool {
        false
    }

    #[inline(always)]
    pub(super) fn acquire<'a, H: Host>(
        &self,
        _host: &'a H,
        _participant: &Participant,
        _side: Side,
    ) -> HeldLock<'a, H> {
        HeldLock(PhantomData)
    }
}
