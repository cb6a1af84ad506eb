//! The firmware's tables (ACPI 6.5, 5.2 "ACPI System Description Tables"), as far as the hypervisor
//! reads them: to find one by its signature.
//!
//! They are believed no more than the memory map: a table outside of what that has, or whose bytes
//! do not add up, is refused.

#![expect(unsafe_code, reason = "reads memory at the addresses that the firmware gives")]

use core::slice;

use thiserror::Error;

use super::srat::{self, SratError};
use crate::boot::{BootInfo, RegionKind, Span};
use crate::nodes::Nodes;

/// Where the firmware has the root pointer, at a multiple of 16 (5.2.5.1): in its own ROM, or in
/// the first KiB of a segment whose number is here.
const ROM: Span = Span { start: 0xe_0000, end: 0x10_0000 };
const SEGMENT_AT: usize = 0x40e;
const SEGMENT_BYTES: u64 = 1024;

/// The root pointer: its signature, its length with revision 0, and from 2 on (5.2.5.3).
const ROOT_POINTER: &[u8; 8] = b"RSD PTR ";
const OLD_BYTES: usize = 20;
const NEW_BYTES: usize = 36;
const REVISION: usize = 15;

/// A table's header (5.2.6).
const HEADER_BYTES: usize = 36;

/// The longest table that is read.
const MAX_BYTES: u64 = 1 << 20;

/// Tables that cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AcpiError {
    /// A table that is not in the firmware's memory, or too long.
    #[error("the memory map does not have the ACPI table at {address:#x} with {size_bytes} bytes")]
    Outside {
        /// Where it should be.
        address: u64,
        /// Its length.
        size_bytes: u64,
    },
    /// A table whose bytes do not add up to 0, or that has another name than it should.
    #[error("the ACPI table at {0:#x} is broken")]
    Broken(u64),
    /// The table of nodes.
    #[error(transparent)]
    Srat(#[from] SratError),
}

/// How memory is read: `None` where it must not be.
type Read<'m> = dyn Fn(Span) -> Option<&'m [u8]> + 'm;

fn adds_up(bytes: &[u8]) -> bool {
    bytes.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte)) == 0
}

fn number(bytes: &[u8], at: usize, size_bytes: usize) -> u64 {
    let bytes = bytes.get(at..at + size_bytes).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// The root pointer in `area`: where the table of tables is, and bytes of an address in it.
fn root_in(area: &[u8]) -> Option<(u64, usize)> {
    (0..area.len()).step_by(16).find_map(|at| {
        let pointer = &area[at..];
        if !pointer.starts_with(ROOT_POINTER) || !adds_up(pointer.get(..OLD_BYTES)?) {
            return None;
        }
        let is_new = pointer[REVISION] >= 2 && pointer.get(..NEW_BYTES).is_some_and(adds_up);
        Some(if is_new { (number(pointer, 24, 8), 8) } else { (number(pointer, 16, 4), 4) })
    })
}

/// The table at `address`, of the firmware that `read` reads.
fn table<'m>(read: &Read<'m>, address: u64) -> Result<&'m [u8], AcpiError> {
    let outside = |size_bytes| AcpiError::Outside { address, size_bytes };
    let bytes = |size_bytes: u64| {
        let end = address.checked_add(size_bytes).filter(|_| size_bytes <= MAX_BYTES).ok_or(outside(size_bytes))?;
        read(Span { start: address, end }).ok_or(outside(size_bytes))
    };
    let size_bytes = number(bytes(HEADER_BYTES as u64)?, 4, 4);
    let table = bytes(size_bytes)?;
    if table.len() < HEADER_BYTES || !adds_up(table) { Err(AcpiError::Broken(address)) } else { Ok(table) }
}

/// The first table with this `signature`, by the root pointer in one of the `areas`. `None`: there
/// is none, or no root pointer.
fn find<'m>(read: &Read<'m>, areas: &[Span], signature: &[u8; 4]) -> Result<Option<&'m [u8]>, AcpiError> {
    let Some((root, size_bytes)) = areas.iter().find_map(|&area| root_in(read(area)?)) else { return Ok(None) };
    let all = table(read, root)?;
    let expected: &[u8] = if size_bytes == 8 { b"XSDT" } else { b"RSDT" };
    if !all.starts_with(expected) {
        return Err(AcpiError::Broken(root));
    }
    for entry in all[HEADER_BYTES..].chunks_exact(size_bytes) {
        let address = number(entry, 0, size_bytes);
        // Others may be anywhere.
        let header = Span { start: address, end: address.saturating_add(HEADER_BYTES as u64) };
        if read(header).is_some_and(|header| header.starts_with(signature)) {
            return table(read, address).map(Some);
        }
    }
    Ok(None)
}

/// The machine's nodes: one, where the firmware says nothing of them.
///
/// # Errors
/// [`AcpiError`].
///
/// # Safety
/// Memory is mapped to itself below 4 GiB. While this runs, what is the firmware's in the memory map
/// of `boot` is not written, and neither is its free memory.
pub unsafe fn nodes(boot: &BootInfo) -> Result<Nodes, AcpiError> {
    // SAFETY: each PC has the firmware's data there, as the caller promises.
    let segment = u64::from(unsafe { (SEGMENT_AT as *const u16).read_unaligned() }) << 4;
    let in_segment = Span { start: segment, end: segment + SEGMENT_BYTES };
    let read = |span: Span| {
        let has = |of: Span| of.start <= span.start && span.end <= of.end && span.end <= 1 << 32;
        let is_mapped = has(in_segment) || has(ROM) || boot.regions().any(|region| has(region.span));
        // SAFETY: in the memory map, or in the first MiB, which is memory and ROM in each PC; below
        // 4 GiB, and not written, as the caller promises.
        (span.start != 0 && is_mapped)
            .then(|| unsafe { slice::from_raw_parts(span.start as *const u8, span.size_bytes() as usize) })
    };
    match find(&read, &[in_segment, ROM], b"SRAT")? {
        Some(table) => {
            let ram = boot.regions().filter(|region| region.kind == RegionKind::Ram);
            Ok(srat::parse(table, ram.map(|region| region.span.and(super::USABLE)))?)
        }
        None => Ok(Nodes::ONE),
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    const AREA: Span = Span { start: 0, end: 0x100 };

    /// `bytes`, whose byte `at` makes them add up.
    fn summed(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
        bytes[at] = 0;
        bytes[at] = bytes.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte)).wrapping_neg();
        bytes
    }

    fn acpi_table(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        let length = (HEADER_BYTES + body.len()) as u32;
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..4].copy_from_slice(name);
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes.extend(body);
        summed(bytes, 9)
    }

    /// Memory with a root pointer of the old kind, and tables.
    fn memory(pointer: Option<u32>, tables: &[(usize, Vec<u8>)]) -> Vec<u8> {
        let mut memory = vec![0; 0x1000];
        if let Some(root) = pointer {
            let mut bytes = ROOT_POINTER.to_vec();
            bytes.resize(OLD_BYTES, 0);
            bytes[16..].copy_from_slice(&root.to_le_bytes());
            memory[0x20..0x20 + OLD_BYTES].copy_from_slice(&summed(bytes, 8));
        }
        for (at, table) in tables {
            memory[*at..at + table.len()].copy_from_slice(table);
        }
        memory
    }

    fn found(memory: &[u8]) -> Result<Option<Vec<u8>>, AcpiError> {
        let read = |span: Span| memory.get(span.start as usize..span.end as usize);
        find(&read, &[AREA], b"SRAT").map(|table| table.map(<[u8]>::to_vec))
    }

    #[test]
    fn a_table_is_found_by_its_signature() {
        let (other, srat) = (acpi_table(b"APIC", &[1; 9]), acpi_table(b"SRAT", &[7; 20]));
        let root = acpi_table(b"RSDT", &[0x400_u32, 0xffff_0000, 0x500].map(u32::to_le_bytes).concat());
        let tables = [(0x200, root), (0x400, other), (0x500, srat.clone())];
        assert_eq!(found(&memory(Some(0x200), &tables)), Ok(Some(srat)));
        assert_eq!(found(&memory(Some(0x200), &[(0x200, acpi_table(b"RSDT", &[]))])), Ok(None));
        assert_eq!(found(&memory(None, &tables)), Ok(None));
        // By addresses of 64 bits.
        let root = acpi_table(b"XSDT", &0x500_u64.to_le_bytes());
        let mut bytes = memory(Some(1), &[(0x200, root), tables[2].clone()]);
        bytes[0x20 + REVISION] = 2;
        bytes[0x20 + 24..][..8].copy_from_slice(&0x200_u64.to_le_bytes());
        let pointer = summed(bytes[0x20..0x20 + OLD_BYTES].to_vec(), 8);
        bytes[0x20..0x20 + OLD_BYTES].copy_from_slice(&pointer);
        let pointer = summed(bytes[0x20..0x20 + NEW_BYTES].to_vec(), 32);
        bytes[0x20..0x20 + NEW_BYTES].copy_from_slice(&pointer);
        assert!(matches!(found(&bytes), Ok(Some(_))));
    }

    #[test]
    fn tables_that_make_no_sense_are_refused() {
        let root = |address: u32| (0x200, acpi_table(b"RSDT", &address.to_le_bytes()));
        // The table of tables is nowhere, or is another one.
        let outside = AcpiError::Outside { address: 0x9000, size_bytes: HEADER_BYTES as u64 };
        assert_eq!(found(&memory(Some(0x9000), &[])), Err(outside));
        let other = (0x200, acpi_table(b"APIC", &[]));
        assert_eq!(found(&memory(Some(0x200), &[other])), Err(AcpiError::Broken(0x200)));
        // The table does not add up, is too short, and goes beyond the memory.
        let mut bytes = memory(Some(0x200), &[root(0x400), (0x400, acpi_table(b"SRAT", &[3; 8]))]);
        bytes[0x400 + HEADER_BYTES] ^= 1;
        assert_eq!(found(&bytes), Err(AcpiError::Broken(0x400)));
        for (length, error) in [
            (0, AcpiError::Broken(0x400)),
            (0x1000, AcpiError::Outside { address: 0x400, size_bytes: 0x1000 }),
            (u32::MAX, AcpiError::Outside { address: 0x400, size_bytes: u64::from(u32::MAX) }),
        ] {
            bytes[0x404..0x408].copy_from_slice(&length.to_le_bytes());
            assert_eq!(found(&bytes), Err(error));
        }
    }
}
