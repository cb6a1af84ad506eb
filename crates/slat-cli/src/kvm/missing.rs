//! The names of `kvm`, which is for Linux on x86-64, without an implementation, for all other
//! targets.

use std::fmt;

use serde_json::Value;
use slat::dirty::ManualProtect;
use slat_machine::memory::Backing;

use crate::failure::{Failure, LEAVE_KVM_OUT};

/// The largest region that `kvm` can have.
pub(crate) const MAX_REGION_BYTES: u64 = 64 << 30;

#[derive(Debug)]
pub(crate) struct KvmError;

impl fmt::Display for KvmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is implemented for Linux on x86-64 only")
    }
}

impl From<KvmError> for Failure {
    fn from(error: KvmError) -> Failure {
        Failure::CannotServe(format!("KVM: {error}{LEAVE_KVM_OUT}"))
    }
}

#[derive(Clone, Debug)]
pub(crate) enum KvmFacts {}

impl KvmFacts {
    pub(crate) fn name(&self) -> String {
        match *self {}
    }

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

pub(crate) fn facts() -> Result<KvmFacts, KvmError> {
    Err(KvmError)
}

pub(crate) fn nearest_manual_protect(_wanted: ManualProtect) -> Result<ManualProtect, KvmError> {
    Err(KvmError)
}

#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "no code reads them")]
pub(crate) struct VmShape {
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

pub(crate) enum KvmGuest {}

impl KvmGuest {
    pub(crate) fn write_listed(&mut self, _pages: &[u32], _value: u64) -> Result<(), KvmError> {
        match *self {}
    }

    pub(crate) fn read_pages(&mut self, _nr_pages: u64, _nr_reads: u64) -> Result<(), KvmError> {
        match *self {}
    }

    pub(crate) fn write_pages(&mut self, _pages: std::ops::Range<u64>, _first: u64) -> Result<(), KvmError> {
        match *self {}
    }
}

impl KvmVm {
    pub(crate) fn new(_memory: &Backing, _shape: &VmShape) -> Result<(KvmVm, Vec<KvmGuest>), KvmError> {
        Err(KvmError)
    }

    pub(crate) fn set_logging(&self, _logging: Logging) -> Result<(), KvmError> {
        match *self {}
    }

    pub(crate) fn empty_bitmaps(&self) -> Vec<Vec<u64>> {
        match *self {}
    }

    pub(crate) fn pages_per_slot(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn get_dirty_log(&self, _index: u32, _bitmap: &mut [u64]) -> Result<(), KvmError> {
        match *self {}
    }

    pub(crate) fn clear_dirty_log(&self, _index: u32, _bitmap: &[u64]) -> Result<(), KvmError> {
        match *self {}
    }
}
