//! The configuration that the VMM sends: the pager reads where its memory slots are, and keeps the
//! rest as it is.

use serde::Deserialize;

use super::Error;
use crate::shared_memory::HUGE_PAGE_BYTES;
use crate::source::PAGE_BYTES;

/// How many slots a VM has at most: more than KVM allows it memory slots of RAM in practice.
pub(super) const NR_SLOTS: usize = 4096;

/// What memory is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Pages of 4 KiB.
    Pages,
    /// Huge pages of 2 MiB, which are filled whole.
    HugePages,
}

/// A part of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Its number, by which its descriptor comes.
    pub number: u32,
    /// The guest's address of its first byte.
    pub start_gpa: u64,
    /// How many bytes it has.
    pub nr_bytes: u64,
    /// Where its first byte is in the file of its descriptor.
    pub file_offset: u64,
    /// What it is made of.
    pub backing: Backing,
}

impl Slot {
    /// The guest's address behind its last byte.
    pub fn end_gpa(&self) -> u64 {
        // Does not wrap: checked when it was read.
        self.start_gpa + self.nr_bytes
    }

    fn is_sound(&self) -> bool {
        let page_bytes = match self.backing {
            Backing::Pages => PAGE_BYTES,
            Backing::HugePages => HUGE_PAGE_BYTES,
        };
        [self.start_gpa, self.nr_bytes, self.file_offset].iter().all(|number| number % page_bytes == 0)
            && self.nr_bytes > 0
            && self.start_gpa.checked_add(self.nr_bytes).is_some()
            && self.file_offset.checked_add(self.nr_bytes).is_some_and(|end| end <= i64::MAX as u64)
    }
}

#[derive(Deserialize)]
struct Config {
    memory_manager_data: MemoryManager,
    #[serde(default)]
    vm_config: VmConfig,
}

#[derive(Deserialize)]
struct MemoryManager {
    guest_ram_mappings: Vec<Mapping>,
}

#[derive(Deserialize)]
struct Mapping {
    slot: u32,
    gpa: u64,
    size: u64,
    file_offset: u64,
    #[serde(default)]
    zone_id: String,
}

#[derive(Default, Deserialize)]
struct VmConfig {
    #[serde(default)]
    memory: MemoryConfig,
}

/// Of all memory, or of zones.
#[derive(Default, Deserialize)]
struct MemoryConfig {
    #[serde(flatten)]
    pages: PagesConfig,
    zones: Option<Vec<Zone>>,
}

#[derive(Deserialize)]
struct Zone {
    id: String,
    #[serde(flatten)]
    pages: PagesConfig,
}

#[derive(Default, Deserialize)]
struct PagesConfig {
    #[serde(default)]
    hugepages: bool,
    /// None: the default of the host, which is taken to be 2 MiB.
    hugepage_size: Option<u64>,
}

impl PagesConfig {
    fn backing(&self) -> Result<Backing, Error> {
        match (self.hugepages, self.hugepage_size.unwrap_or(HUGE_PAGE_BYTES)) {
            (false, _) => Ok(Backing::Pages),
            (true, HUGE_PAGE_BYTES) => Ok(Backing::HugePages),
            (true, size) => Err(Error::Config(format!("huge pages of {size} bytes; those of 2 MiB are possible"))),
        }
    }
}

/// The slots of a configuration, in the order of the guest's addresses.
///
/// # Errors
/// No JSON of a configuration; slots that are none, overlap, or have one number.
pub fn slots(config: &[u8]) -> Result<Vec<Slot>, Error> {
    let config: Config = serde_json::from_slice(config).map_err(|error| Error::Config(error.to_string()))?;
    let memory = &config.vm_config.memory;
    let slot = |mapping: Mapping| {
        let zone = memory.zones.iter().flatten().find(|zone| zone.id == mapping.zone_id);
        let backing = zone.map_or(&memory.pages, |zone| &zone.pages).backing()?;
        let Mapping { slot: number, gpa: start_gpa, size: nr_bytes, file_offset, .. } = mapping;
        Ok(Slot { number, start_gpa, nr_bytes, file_offset, backing })
    };
    let mappings = config.memory_manager_data.guest_ram_mappings;
    let mut slots = mappings.into_iter().map(slot).collect::<Result<Vec<_>, Error>>()?;
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
    fn huge_pages_are_those_of_the_zone() {
        let mappings = |nr_bytes| format!("[{}]", mapping(0, 0, nr_bytes, 0));
        let backing = |memory: &str, nr_bytes| {
            let text = config(&mappings(nr_bytes))
                .replace("\"vm_config\": {}", &format!("\"vm_config\": {{\"memory\": {memory}}}"));
            slots(text.as_bytes()).map(|slots| slots[0].backing).map_err(|error| error.to_string())
        };
        let huge = 2 << 20;
        assert_eq!(backing(r#"{"size": 1}"#, huge), Ok(Backing::Pages));
        assert_eq!(backing(r#"{"hugepages": true, "zones": null}"#, huge), Ok(Backing::HugePages));
        assert_eq!(backing(r#"{"hugepages": true, "hugepage_size": 2097152}"#, huge), Ok(Backing::HugePages));
        let zones = r#"{"hugepages": false, "zones": [{"id": "x"}, {"id": "mem0", "hugepages": true}]}"#;
        assert_eq!(backing(zones, huge), Ok(Backing::HugePages));
        let zones = r#"{"hugepages": true, "zones": [{"id": "mem0", "hugepage_size": 1}]}"#;
        assert_eq!(backing(zones, huge), Ok(Backing::Pages));
        let error = backing(r#"{"hugepages": true, "hugepage_size": 1073741824}"#, 1 << 30).unwrap_err();
        assert!(error.contains("huge pages of 1073741824 bytes"), "{error}");
        assert!(backing(r#"{"hugepages": true}"#, 4096).unwrap_err().contains("that is none"));
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
