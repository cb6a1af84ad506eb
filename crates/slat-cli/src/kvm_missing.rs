//! Where there is no KVM of the kind that `kvm` drives, which is for Linux on x86-64: its names, and nothing behind them.

use std::fmt;

use serde_json::Value;
use slat::dirty::ManualProtect;
use slat_machine::memory::Backing;

use crate::failure::{Failure, LEAVE_KVM_OUT};

/// The largest region that `kvm` can have.
pub(crate) const MAX_REGION_BYTES: u64 = 64 << 30;

#[derive(Debug)]
pub(crate) struct Trouble;

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is implemented for Linux on x86-64 only")
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Failure {
        Failure::CannotServe(format!("KVM: {trouble}{LEAVE_KVM_OUT}"))
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Facts {}

impl Facts {
    pub(crate) fn measured_on(&self) -> String {
        match *self {}
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        match *self {}
    }

    pub(crate) fn json(&self) -> Value {
        match *self {}
    }
}

pub(crate) fn facts() -> Result<Facts, Trouble> {
    Err(Trouble)
}

pub(crate) fn nearest_manual_protect(_wanted: ManualProtect) -> Result<ManualProtect, Trouble> {
    Err(Trouble)
}

#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "nobody reads them")]
pub(crate) struct Shape {
    pub(crate) nr_vcpus: usize,
    pub(crate) nr_slots: u32,
    pub(crate) nr_listed: u64,
    pub(crate) manual_protect: ManualProtect,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Logging {
    Off,
    On,
}

pub(crate) enum KvmVm {}

pub(crate) enum Guest {}

impl Guest {
    pub(crate) fn write_listed(&mut self, _pages: &[u32], _value: u64) -> Result<(), Trouble> {
        match *self {}
    }

    pub(crate) fn write_pages(&mut self, _pages: std::ops::Range<u64>, _first: u64) -> Result<(), Trouble> {
        match *self {}
    }
}

impl KvmVm {
    pub(crate) fn new(_memory: &Backing, _shape: &Shape) -> Result<(KvmVm, Vec<Guest>), Trouble> {
        Err(Trouble)
    }

    pub(crate) fn set_logging(&self, _logging: Logging) -> Result<(), Trouble> {
        match *self {}
    }

    pub(crate) fn empty_bitmaps(&self) -> Vec<Vec<u64>> {
        match *self {}
    }

    pub(crate) fn pages_per_slot(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn get_dirty_log(&self, _index: u32, _bitmap: &mut [u64]) -> Result<(), Trouble> {
        match *self {}
    }

    pub(crate) fn clear_dirty_log(&self, _index: u32, _bitmap: &[u64]) -> Result<(), Trouble> {
        match *self {}
    }
}
