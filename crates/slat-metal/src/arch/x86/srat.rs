//! The firmware's table of nodes, SRAT (ACPI 6.5, 5.2.16 "System Resource Affinity Table").
//!
//! The crate `acpi` 6.1 has this table, too, but reads the length of an entry as two bytes, where
//! the table has one.

use thiserror::Error;

use crate::boot::Span;
use crate::nodes::{Affinities, Nodes, NodesError};

/// Where the entries begin: behind the header and 12 reserved bytes.
const ENTRIES: usize = 48;
/// The header's byte with the revision. Before 2, the number of a node has 8 bits.
const REVISION: usize = 8;

/// An entry that is enabled.
const ENABLED: u32 = 1;

/// A table that cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SratError {
    /// It ends too soon.
    #[error("SRAT ends within the entry at byte {0}")]
    Cut(usize),
    /// An entry of another length than its kind has.
    #[error("SRAT has an entry of kind {kind} with {length} bytes at byte {at}")]
    BadLength {
        /// Where.
        at: usize,
        /// Its kind.
        kind: u8,
        /// Its length in bytes.
        length: u8,
    },
    /// What it says makes no sense.
    #[error("SRAT: {0}")]
    Nodes(#[from] NodesError),
}

/// A number of the entry.
fn u32_at(entry: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*entry.get(at..)?.first_chunk()?))
}

fn u64_at(entry: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*entry.get(at..)?.first_chunk()?))
}

/// The nodes that `table` says, of a machine with this `ram`.
///
/// # Errors
/// [`SratError`].
pub fn parse(table: &[u8], ram: impl Iterator<Item = Span>) -> Result<Nodes, SratError> {
    let mut affinities = Affinities::default();
    let is_old = table.get(REVISION).is_none_or(|&revision| revision < 2);
    let domain = |number: u32| if is_old { number & 0xff } else { number };
    let mut at = ENTRIES;
    while at < table.len() {
        let rest = &table[at..];
        let [kind, length, ..] = *rest else { return Err(SratError::Cut(at)) };
        let bad = SratError::BadLength { at, kind, length };
        if length < 2 {
            return Err(bad);
        }
        let entry = rest.get(..usize::from(length)).ok_or(SratError::Cut(at))?;
        add(&mut affinities, entry, domain).ok_or(bad)??;
        at += entry.len();
    }
    Ok(affinities.nodes(ram)?)
}

/// Adds what an entry says. `None`: its kind needs more bytes.
fn add(to: &mut Affinities, entry: &[u8], domain: impl Fn(u32) -> u32) -> Option<Result<(), NodesError>> {
    let is_enabled = |at| Some(u32_at(entry, at)? & ENABLED != 0);
    Some(match entry[0] {
        // 5.2.16.1 "Processor Local APIC/SAPIC Affinity Structure": bits 31:8 of the node are the
        // upper three bytes of the word at 8.
        0 => {
            let [low, cpu] = *entry.get(2..4)?.first_chunk()?;
            let number = u32_at(entry, 8)? & !0xff | u32::from(low);
            if is_enabled(4)? { to.add_cpu(u32::from(cpu), domain(number)) } else { Ok(()) }
        }
        // 5.2.16.2 "Memory Affinity Structure".
        1 => {
            let (start, size_bytes) = (u64_at(entry, 8)?, u64_at(entry, 16)?);
            let number = u32_at(entry, 2)?;
            if is_enabled(28)? { to.add_memory(start, size_bytes, domain(number)) } else { Ok(()) }
        }
        // 5.2.16.3 "Processor Local x2APIC Affinity Structure".
        2 => {
            let (number, cpu) = (u32_at(entry, 4)?, u32_at(entry, 8)?);
            if is_enabled(12)? { to.add_cpu(cpu, number) } else { Ok(()) }
        }
        _ => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use slat::NodeId;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn table(revision: u8, entries: &[Vec<u8>]) -> Vec<u8> {
        let mut table = vec![0; ENTRIES];
        table[REVISION] = revision;
        entries.iter().for_each(|entry| table.extend(entry));
        table
    }

    fn cpu(number: u8, domain: u32, flags: u32) -> Vec<u8> {
        let [low, high @ ..] = domain.to_le_bytes();
        let mut entry = vec![0, 16, low, number];
        entry.extend(flags.to_le_bytes());
        entry.push(0);
        entry.extend(high);
        entry.extend([0; 4]);
        entry
    }

    fn x2apic(number: u32, domain: u32) -> Vec<u8> {
        let words = [domain, number, ENABLED, 0, 0];
        [2, 24, 0, 0].into_iter().chain(words.into_iter().flat_map(u32::to_le_bytes)).collect()
    }

    fn memory(start: u64, size_bytes: u64, domain: u32, flags: u32) -> Vec<u8> {
        let mut entry = vec![1, 40];
        entry.extend(domain.to_le_bytes());
        entry.extend([0; 2]);
        entry.extend(start.to_le_bytes());
        entry.extend(size_bytes.to_le_bytes());
        entry.extend([0; 4]);
        entry.extend(flags.to_le_bytes());
        entry.extend([0; 8]);
        entry
    }

    fn parsed(table: &[u8]) -> Result<Nodes, SratError> {
        parse(table, [Span { start: MIB, end: 3 * MIB }].into_iter())
    }

    #[test]
    fn entries_of_each_kind_are_read() {
        let two = [memory(0, 2 * MIB, 0x100, 1), memory(2 * MIB, 2 * MIB, 0x200, 1)];
        let unknown = vec![9, 2];
        let not_enabled = [memory(0, 1 << 40, 5, 0), cpu(3, 6, 0)];
        let cpus = [cpu(0, 0x100, 1), x2apic(1, 0x200), unknown];
        let nodes = parsed(&table(3, &[&two[..], &cpus, &not_enabled].concat())).unwrap();
        assert_eq!((nodes.nr(), nodes.of_memory(MIB), nodes.of_memory(2 * MIB)), (2, NodeId(0), NodeId(1)));
        assert_eq!((nodes.of_cpu(0), nodes.of_cpu(1)), (NodeId(0), NodeId(1)));
        assert_eq!(nodes.check_cpus(3), Err(NodesError::CpuOfNone(2)));
        // Before revision 2 the upper bytes are reserved.
        let nodes = parsed(&table(1, &[memory(0, 4 * MIB, 0xabcd_ef01, 1), cpu(0, 0x0203_0401, 1)])).unwrap();
        assert_eq!((nodes.nr(), nodes.check_cpus(1)), (1, Ok(())));
    }

    #[test]
    fn a_table_that_lies_is_refused() {
        let good = [memory(0, 4 * MIB, 0, 1), cpu(0, 0, 1)];
        let with = |entry: Vec<u8>| parsed(&table(3, &[&good[..], &[entry]].concat())).err();
        let at = table(3, &good).len();
        assert_eq!(with(vec![1]), Some(SratError::Cut(at)));
        assert_eq!(with(vec![1, 40, 0]), Some(SratError::Cut(at)));
        for (kind, length) in [(0, 0), (7, 0), (7, 1), (0, 8), (1, 31), (2, 15)] {
            let mut entry = vec![0; usize::from(length).max(2)];
            entry[..2].copy_from_slice(&[kind, length]);
            assert_eq!(with(entry), Some(SratError::BadLength { at, kind, length }), "{kind}, {length}");
        }
        let overlap = NodesError::Overlap { first: 0, first_domain: 0, second: 3 * MIB, domain: 1 };
        assert_eq!(with(memory(3 * MIB, MIB, 1, 1)), Some(overlap.into()));
        let wraps = NodesError::Wraps { domain: 1, start: 8 * MIB, size_bytes: u64::MAX };
        assert_eq!(with(memory(8 * MIB, u64::MAX, 1, 1)), Some(wraps.into()));
        assert_eq!(with(cpu(0, 1, 1)), Some(NodesError::CpuTwice { cpu: 0, first: 0, second: 1 }.into()));
        assert_eq!(parsed(&table(3, &[])).err(), Some(NodesError::MemoryOfNone(MIB).into()));
        assert_eq!(parsed(&[]).err(), Some(NodesError::MemoryOfNone(MIB).into()));
    }
}
