//! `MappingFlags` of AxVM as the engine's protection, and back.

use axvm_types::MappingFlags;
use slat::Access;
use slat::format::{Execute, Format, Hardware, LeafAttributes, MemoryType};
use slat::tables::{Protection, Translation};

use crate::{AddrSpaceError, AddrSpaceResult};

/// What `flags` let the guest do. `USER` says nothing of a second stage.
pub(crate) fn protection_of(flags: MappingFlags) -> Protection {
    let memory = if flags.contains(MappingFlags::DEVICE) {
        MemoryType::Device
    } else if flags.contains(MappingFlags::UNCACHED) {
        MemoryType::NonCached
    } else {
        MemoryType::WriteBack
    };
    let execute = if flags.contains(MappingFlags::EXECUTE) { Execute::All } else { Execute::None };
    Protection { writable: flags.contains(MappingFlags::WRITE), attributes: LeafAttributes { memory, execute } }
}

/// Checks that page tables of format `F` can express `flags`: memory that the guest may read, and no
/// device that it may execute.
pub(crate) fn check<F: Format>(flags: MappingFlags, hardware: &Hardware) -> AddrSpaceResult {
    let LeafAttributes { memory, execute } = protection_of(flags).attributes;
    let is_possible = flags.contains(MappingFlags::READ)
        && !(memory.is_device() && execute != Execute::None)
        && F::attribute_bits(LeafAttributes { memory, execute }, hardware).is_some();
    if is_possible { Ok(()) } else { Err(AddrSpaceError::InvalidMapping) }
}

/// What a translation lets the guest do.
pub(crate) fn flags_of(found: &Translation) -> MappingFlags {
    let LeafAttributes { memory, execute } = found.attributes;
    let mut flags = MappingFlags::READ;
    flags.set(MappingFlags::WRITE, found.writable);
    flags.set(MappingFlags::EXECUTE, execute != Execute::None);
    flags.set(MappingFlags::DEVICE, memory.is_device());
    flags.set(MappingFlags::UNCACHED, memory == MemoryType::NonCached);
    flags
}

/// The accesses of a fault that needs `flags`, of which one is a read if there is no other.
pub(crate) fn accesses(flags: MappingFlags) -> impl Iterator<Item = Access> {
    let write = flags.contains(MappingFlags::WRITE).then_some(Access::Write);
    let execute = flags.contains(MappingFlags::EXECUTE).then_some(Access::Execute);
    let read = (write.is_none() && execute.is_none()).then_some(Access::Read);
    write.into_iter().chain(execute).chain(read)
}
