//! The configuration of a machine, and its check.

use slat::shadow::ShadowPaging;
use slat::{Config, Gfn, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};
use thiserror::Error;

use crate::hardware::commit::FlushMethod;
use crate::hardware::cpu::Paging;
use crate::hardware::tlb::Geometry;
use crate::hardware::walk::Marks;
use crate::memory::BackingKind;
use crate::memory::numa::{Nodes, Pinning};

/// The test region is at most this big, in bytes: it and the guest's page tables must fit in the
/// guest's address space.
const MAX_REGION_BYTES: u64 = 16 << 40;

/// Virtual CPUs at most: as in KVM on x86 (`KVM_MAX_VCPUS`). Each is a thread with a stack and a
/// signal stack, and Linux allows a process 65530 mappings by default.
pub const MAX_VCPUS: usize = 4096;

/// Processors that threads are pinned to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pins {
    /// One for each virtual CPU.
    pub vcpus: Vec<u32>,
    /// One for the thread that makes the machine.
    pub main: Option<u32>,
}

/// Whether the host may change the test region's memory while guests run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum HostEvents {
    /// No: each page has its frame for ever.
    #[default]
    None,
    /// Yes ([`Machine::discard`](super::Machine::discard) and the methods after it). The backing is
    /// [`BackingKind::Anonymous`].
    Allowed {
        /// Frames beyond one for each page: one for each concurrent event, and as many again for
        /// snapshots.
        nr_spare_frames: u64,
    },
}

/// The configuration of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MachineConfig {
    /// Number of virtual CPUs, each with a thread of its own.
    pub nr_vcpus: usize,
    /// Part of the test region that belongs to each virtual CPU, in bytes; a multiple of 4 KiB.
    pub bytes_per_vcpu: u64,
    /// Number of memslots that the test region is split into.
    pub nr_slots: u32,
    /// The kind of the test region's memory.
    pub backing: BackingKind,
    /// Whether the host may change that memory while guests run.
    pub host_events: HostEvents,
    /// Flags with which the test region's memslots are created.
    pub region_flags: MemoryRegionFlags,
    /// The configuration of the engine. With page-modification logging the CPUs have a log each.
    pub engine: Config,
    /// Shadow paging: the CPUs have no second stage
    /// ([`ShadowCpu`](crate::hardware::shadow_cpu::ShadowCpu)).
    /// [`shadow_paging`](super::shadow_paging) computes the shadow pages that a guest needs. Only
    /// with the format [`Npt`](slat::format::Npt).
    pub shadow: Option<ShadowPaging>,
    /// Entries of each CPU's dirty ring; `None`: memslots log in bitmaps. A CPU whose ring is full
    /// waits until another thread has harvested and reset it
    /// ([`Vm::reset_dirty_rings`](slat::Vm::reset_dirty_rings)), or stops it.
    pub dirty_ring_entries: Option<u32>,
    /// Whether a guest with a second stage has its own paging on. With shadow paging it always has.
    pub paging: Paging,
    /// Size of the pages in the guest's own page tables.
    pub guest_page_size: PageSize,
    /// Processors to pin threads to; `None`: the scheduler decides, except for `pinning` on the
    /// host's nodes.
    pub pins: Option<Pins>,
    /// The nodes of memory, page-table pages and virtual CPUs. Virtual CPU i of n has its home on
    /// node i * nodes / n, counting those with CPUs (or, with `pins` on the host's nodes, on that
    /// of its processor), and its part of the region is there. Memory that the host may change
    /// while guests run is on the same nodes in the same shares, but a page has any frame.
    pub nodes: Nodes,
    /// Whether virtual CPUs stay on their home nodes.
    pub pinning: Pinning,
    /// The flush method; `None`: the best that works here.
    pub flush_method: Option<FlushMethod>,
    /// The TLB of each CPU.
    pub tlb: Geometry,
    /// What sets A and D, in the formats in which processors differ
    /// ([`Stage2`](slat::format::Stage2) and those of RISC-V).
    pub marks: Marks,
    /// Page-table pages of the second stage that may be allocated at a time; `None`: more than are
    /// needed.
    pub max_tables: Option<u64>,
}

impl Default for MachineConfig {
    fn default() -> MachineConfig {
        MachineConfig {
            nr_vcpus: 1,
            bytes_per_vcpu: 64 << 20,
            nr_slots: 1,
            backing: BackingKind::Anonymous,
            host_events: HostEvents::None,
            region_flags: MemoryRegionFlags::empty(),
            engine: Config::default(),
            shadow: None,
            dirty_ring_entries: None,
            paging: Paging::Off,
            guest_page_size: PageSize::Size4K,
            pins: None,
            nodes: Nodes::One,
            pinning: Pinning::On,
            flush_method: None,
            tlb: Geometry::default(),
            marks: Marks::ByHardware,
            max_tables: None,
        }
    }
}

/// Why a configuration is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum MachineConfigError {
    /// No virtual CPU.
    #[error("a machine needs at least one vCPU")]
    NoVcpus,
    /// More virtual CPUs than a process can have threads for.
    #[error("{nr_vcpus} vCPUs are more than {MAX_VCPUS}")]
    TooManyVcpus { nr_vcpus: usize },
    /// More memslots than the engine has.
    #[error("{nr_slots} slots are more than {max_slots}")]
    TooManySlots {
        nr_slots: u32,
        /// The engine's limit, less memslot 0 and the memslot of the guest's page tables.
        max_slots: u32,
    },
    /// A virtual CPU's part is empty or not made of whole pages.
    #[error("{bytes_per_vcpu} bytes for each vCPU are not a positive multiple of 4096")]
    BytesPerVcpu { bytes_per_vcpu: u64 },
    /// The test region is too big.
    #[error("{bytes_per_vcpu} bytes for each of {nr_vcpus} vCPUs are more than {MAX_REGION_BYTES}")]
    TooBig { bytes_per_vcpu: u64, nr_vcpus: usize },
    /// The test region cannot be split evenly.
    #[error("{nr_pages} pages cannot be split evenly into {nr_slots} slots")]
    Slots { nr_pages: u64, nr_slots: u32 },
    /// Host events need memory in small pages.
    #[error("the host can change memory of kind anonymous while guests run, but not {backing}")]
    HostEvents { backing: BackingKind },
    /// The engine has no shadow paging with this format.
    #[error("shadow paging needs the format npt, not {format}")]
    NoShadowPaging { format: &'static str },
    /// With shadow paging the reads of walks are not counted.
    #[error("the walks of shadow tables are not counted: there can only be one node")]
    ShadowNodes,
    /// There is not one processor for each virtual CPU.
    #[error("{nr_pins} processors to pin {nr_vcpus} vCPUs to")]
    Pins { nr_pins: usize, nr_vcpus: usize },
}

/// Sizes in pages of 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RegionLayout {
    pub(super) nr_pages: u64,
    pub(super) pages_per_vcpu: u64,
}

impl MachineConfig {
    /// Whether the CPUs have no second stage.
    pub(super) fn is_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    /// Whether the guest has page tables of its own.
    pub(super) fn has_guest_tables(&self) -> bool {
        self.is_shadow() || self.paging == Paging::TwoDimensional
    }

    pub(super) fn layout(&self) -> Result<RegionLayout, MachineConfigError> {
        let MachineConfig { nr_vcpus, bytes_per_vcpu, nr_slots, .. } = *self;
        if nr_vcpus == 0 {
            return Err(MachineConfigError::NoVcpus);
        }
        if nr_vcpus > MAX_VCPUS {
            return Err(MachineConfigError::TooManyVcpus { nr_vcpus });
        }
        if bytes_per_vcpu == 0 || !bytes_per_vcpu.is_multiple_of(PAGE_SIZE) {
            return Err(MachineConfigError::BytesPerVcpu { bytes_per_vcpu });
        }
        let nr_pages = bytes_per_vcpu
            .checked_mul(nr_vcpus as u64)
            .filter(|bytes| *bytes <= MAX_REGION_BYTES)
            .ok_or(MachineConfigError::TooBig { bytes_per_vcpu, nr_vcpus })?
            >> Gfn::SHIFT;
        if nr_slots == 0 || !nr_pages.is_multiple_of(nr_slots.into()) {
            return Err(MachineConfigError::Slots { nr_pages, nr_slots });
        }
        let max_slots = if self.has_guest_tables() { MemoryRegion::MAX_SLOTS - 2 } else { MemoryRegion::MAX_SLOTS - 1 };
        if nr_slots > max_slots {
            return Err(MachineConfigError::TooManySlots { nr_slots, max_slots });
        }
        if self.host_events != HostEvents::None && self.backing != BackingKind::Anonymous {
            return Err(MachineConfigError::HostEvents { backing: self.backing });
        }
        if self.is_shadow() && self.nodes != Nodes::One {
            return Err(MachineConfigError::ShadowNodes);
        }
        if let Some(pins) = &self.pins
            && pins.vcpus.len() != nr_vcpus
        {
            return Err(MachineConfigError::Pins { nr_pins: pins.vcpus.len(), nr_vcpus });
        }
        Ok(RegionLayout { nr_pages, pages_per_vcpu: bytes_per_vcpu >> Gfn::SHIFT })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_configurations_are_refused() {
        let good = MachineConfig { nr_vcpus: 3, bytes_per_vcpu: 8192, nr_slots: 2, ..MachineConfig::default() };
        assert_eq!(good.layout(), Ok(RegionLayout { nr_pages: 6, pages_per_vcpu: 2 }));
        let layout = |change: fn(&mut MachineConfig)| {
            let mut config = good.clone();
            change(&mut config);
            config.layout()
        };
        assert_eq!(layout(|config| config.nr_vcpus = 0), Err(MachineConfigError::NoVcpus));
        assert_eq!(layout(|config| config.nr_vcpus = 4097), Err(MachineConfigError::TooManyVcpus { nr_vcpus: 4097 }));
        let slots = |nr_slots, paging| {
            MachineConfig { nr_vcpus: 1, bytes_per_vcpu: u64::from(nr_slots) << 12, nr_slots, paging, ..good.clone() }
                .layout()
        };
        assert!(slots(32763, Paging::Off).is_ok() && slots(32762, Paging::TwoDimensional).is_ok());
        assert!(matches!(slots(32764, Paging::Off), Err(MachineConfigError::TooManySlots { max_slots: 32763, .. })));
        assert!(matches!(
            slots(32763, Paging::TwoDimensional),
            Err(MachineConfigError::TooManySlots { max_slots: 32762, .. })
        ));
        for bytes_per_vcpu in [0, 1, 4097] {
            let config = MachineConfig { bytes_per_vcpu, ..good.clone() };
            assert_eq!(config.layout(), Err(MachineConfigError::BytesPerVcpu { bytes_per_vcpu }));
        }
        assert!(matches!(layout(|config| config.bytes_per_vcpu = 1 << 63), Err(MachineConfigError::TooBig { .. })));
        assert_eq!(layout(|config| config.nr_slots = 4), Err(MachineConfigError::Slots { nr_pages: 6, nr_slots: 4 }));
        assert_eq!(layout(|config| config.nr_slots = 0), Err(MachineConfigError::Slots { nr_pages: 6, nr_slots: 0 }));
        let events = |config: &mut MachineConfig| {
            (config.host_events, config.backing) = (HostEvents::Allowed { nr_spare_frames: 1 }, BackingKind::Shmem);
        };
        assert_eq!(layout(events), Err(MachineConfigError::HostEvents { backing: BackingKind::Shmem }));
        let pins = |config: &mut MachineConfig| config.pins = Some(Pins { vcpus: vec![0, 1], main: None });
        assert_eq!(layout(pins), Err(MachineConfigError::Pins { nr_pins: 2, nr_vcpus: 3 }));
        let shadow = Some(ShadowPaging::default());
        assert!(MachineConfig { shadow, ..good.clone() }.layout().is_ok());
        let nodes = Nodes::virtual_nodes(2);
        assert_eq!(MachineConfig { shadow, nodes, ..good.clone() }.layout(), Err(MachineConfigError::ShadowNodes));
        let config = MachineConfig { nr_vcpus: 1, bytes_per_vcpu: 32763 << 12, nr_slots: 32763, ..good.clone() };
        assert!(matches!(
            MachineConfig { shadow, ..config }.layout(),
            Err(MachineConfigError::TooManySlots { max_slots: 32762, .. })
        ));
    }
}
