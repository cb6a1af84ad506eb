//! The configuration that the VMM sends: the pager reads where its memory slots are, and keeps the
//! rest as it is.

use serde::Deserialize;

use super::Error;
use crate::source::PAGE_BYTES;

/// How many slots a VM has at most: more than KVM allows it memory slots of RAM in practice.
pub(super) const NR_SLOTS: usize = 4096;

/// A part of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct Slot {
    /// Its number, by which its descriptor comes.
    #[serde(rename = "slot")]
    pub number: u32,
    /// The guest's address of its first byte.
    #[serde(rename = "gpa")]
    pub start_gpa: u64,
    /// How many bytes it has.
    #[serde(rename = "size")]
    pub nr_bytes: u64,
    /// Where its first byte is in the file of its descriptor.
    pub file_offset: u64,
}

impl Slot {
    /// The guest's address behind its last byte.
    pub fn end_gpa(&self) -> u64 {
        // Does not wrap: checked when it was read.
        self.start_gpa + self.nr_bytes
    }

    fn is_sound(&self) -> bool {
        [self.start_gpa, self.nr_bytes, self.file_offset].iter().all(|number| number % PAGE_BYTES == 0)
            && self.nr_bytes > 0
            && self.start_gpa.checked_add(self.nr_bytes).is_some()
            && self.file_offset.checked_add(self.nr_bytes).is_some_and(|end| end <= i64::MAX as u64)
    }
}

/// The slots of a configuration, in the order of the guest's addresses.
///
/// # Errors
/// No JSON of a configuration; slots that are none, overlap, or have one number.
pub fn slots(config: &[u8]) -> Result<Vec<Slot>, Error> {
    #[derive(Deserialize)]
    struct Config {
        memory_manager_data: Memory,
    }
    #[derive(Deserialize)]
    struct Memory {
        guest_ram_mappings: Vec<Slot>,
    }
    let config: Config = serde_json::from_slice(config).map_err(|error| Error::Config(error.to_string()))?;
    let mut slots = config.memory_manager_data.guest_ram_mappings;
    if slots.is_empty() || slots.len() > NR_SLOTS {
        return Err(Error::Config(format!("{} memory slots", slots.len())));
    }
    if let Some(slot) = slots.iter().find(|slot| !slot.is_sound()) {
        return Err(Error::Config(format!("a memory slot that is none: {slot:?}")));
    }
    slots.sort_by_key(|slot| slot.number);
    if let Some(pair) = slots.windows(2).find(|pair| pair[0].number == pair[1].number) {
        return Err(Error::Config(format!("two memory slots {}", pair[0].number)));
    }
    slots.sort_by_key(|slot| slot.start_gpa);
    if let Some(pair) = slots.windows(2).find(|pair| pair[0].end_gpa() > pair[1].start_gpa) {
        return Err(Error::Config(format!("memory slots {} and {} overlap", pair[0].number, pair[1].number)));
    }
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(mappings: &str) -> String {
        format!(r#"{{"vm_config": {{}}, "memory_manager_data": {{"guest_ram_mappings": {mappings}}}}}"#)
    }

    fn mapping(slot: u32, gpa: u64, size: u64, file_offset: u64) -> String {
        format!(
            r#"{{"slot": {slot}, "gpa": {gpa}, "size": {size}, "zone_id": "mem0", "virtio_mem": false,
            "file_offset": {file_offset}}}"#
        )
    }

    #[test]
    fn slots_come_in_the_order_of_addresses() {
        let text = config(&format!("[{}, {}]", mapping(1, 1 << 32, 8192, 4096), mapping(0, 0, 4096, 0)));
        let found: Vec<_> = slots(text.as_bytes()).unwrap().iter().map(|slot| (slot.number, slot.start_gpa)).collect();
        assert_eq!(found, [(0, 0), (1, 1 << 32)]);
    }

    #[test]
    fn slots_that_are_none_are_refused() {
        let cases = [
            ("[]".to_owned(), "0 memory slots"),
            (format!("[{}]", mapping(0, 0, 0, 0)), "that is none"),
            (format!("[{}]", mapping(0, 1, 4096, 0)), "that is none"),
            (format!("[{}]", mapping(0, 0, 4095, 0)), "that is none"),
            (format!("[{}]", mapping(0, u64::MAX - 4095, 8192, 0)), "that is none"),
            (format!("[{}]", mapping(0, 0, 4096, u64::MAX - 4095)), "that is none"),
            (format!("[{}, {}]", mapping(0, 0, 4096, 0), mapping(0, 4096, 4096, 0)), "two memory slots 0"),
            (format!("[{}, {}]", mapping(0, 0, 8192, 0), mapping(1, 4096, 4096, 0)), "0 and 1 overlap"),
            (format!("[{}]", mapping(0, 0, 4096, 0).replace("gpa", "gpb")), "missing field"),
        ];
        for (mappings, why) in cases {
            let error = slots(config(&mappings).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{mappings}: {error}");
        }
        assert!(slots(b"{").is_err());
    }
}
