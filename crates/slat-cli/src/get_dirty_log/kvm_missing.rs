//! Where there is no KVM of the kind that `kvm` drives, which is for Linux on x86-64: a peer that cannot be made.

use serde_json::Value;
use slat_machine::memory::Backing;

use super::subject::Subject;
use crate::failure::Failure;

pub(super) enum KvmPeer {}

pub(super) enum Facts {}

impl KvmPeer {
    pub(super) fn new(_memory: &Backing) -> Result<(KvmPeer, Facts), &'static str> {
        Err("it is implemented for Linux on x86-64 only")
    }
}

impl Facts {
    pub(super) fn lines(&self) -> Vec<String> {
        match *self {}
    }

    pub(super) fn json(&self) -> Value {
        match *self {}
    }
}

impl Subject for KvmPeer {
    fn write(&mut self, _pages: &[u32], _value: u64) -> Result<(), Failure> {
        match *self {}
    }

    fn get_dirty_log(&mut self, _log: &mut [u64]) -> Result<(), Failure> {
        match *self {}
    }
}
