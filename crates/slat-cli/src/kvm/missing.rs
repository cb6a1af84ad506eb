//! The names of `vm`, `guest` and `facts` for other targets than Linux on x86-64: there is no VM.

use std::ops::Range;

use serde_json::Value;
use slat::dirty::ManualProtect;
use slat_machine::memory::Backing;

use super::{KvmError, Logging, VmShape};

/// Methods that cannot be called, since there is no value.
macro_rules! missing {
    ($name:ident: $(fn $method:ident($self:ident: $this:ty $(, $argument:ty)*) -> $result:ty;)+) => {
        #[derive(Clone, Debug)]
        pub(crate) enum $name {}

        impl $name {
            $(pub(crate) fn $method($self: $this $(, _: $argument)*) -> $result {
                match *$self {}
            })+
        }
    };
}

missing! {
    KvmFacts:
    fn name(self: &Self) -> String;
    fn measured_on(self: &Self) -> String;
    fn lines(self: &Self) -> Vec<String>;
    fn json(self: &Self) -> Value;
}

missing! {
    KvmGuest:
    fn write_listed(self: &mut Self, &[u32], u64) -> Result<(), KvmError>;
    fn write_pages(self: &mut Self, Range<u64>, u64) -> Result<(), KvmError>;
    fn read_pages(self: &mut Self, u64, u64) -> Result<(), KvmError>;
}

missing! {
    KvmVm:
    fn set_logging(self: &Self, Logging) -> Result<(), KvmError>;
    fn empty_bitmaps(self: &Self) -> Vec<Vec<u64>>;
    fn pages_per_slot(self: &Self) -> u64;
    fn get_dirty_log(self: &Self, u32, &mut [u64]) -> Result<(), KvmError>;
    fn clear_dirty_log(self: &Self, u32, &[u64]) -> Result<(), KvmError>;
}

impl KvmVm {
    pub(crate) fn new(_memory: &Backing, shape: &VmShape) -> Result<(KvmVm, Vec<KvmGuest>), KvmError> {
        let _ = (shape.nr_vcpus, shape.nr_slots, shape.nr_listed, shape.manual_protect);
        Err(none())
    }
}

fn none() -> KvmError {
    KvmError("it is implemented for Linux on x86-64 only".to_owned())
}

pub(crate) fn facts() -> Result<KvmFacts, KvmError> {
    Err(none())
}

pub(crate) fn nearest_manual_protect(_wanted: ManualProtect) -> Result<ManualProtect, KvmError> {
    Err(none())
}
