//! What a leaf PTE says besides its address and the right to write: memory type and execution; and
//! what page tables depend on in the CPUs that walk them.

use core::ops::RangeInclusive;

use crate::addr::{Access, Hpa, Level};

/// How a CPU accesses the memory of a leaf PTE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum MemoryType {
    /// Ordinary memory, write-back cacheable. The guest cannot weaken that where the format can
    /// say so: EPT (ignore PAT), and Arm with FEAT_S2FWB. Elsewhere as `AsGuest`.
    #[default]
    WriteBack = 0,
    /// Ordinary memory, cacheable as the guest's own page tables say.
    AsGuest = 1,
    /// Ordinary memory, write-through cacheable.
    WriteThrough = 2,
    /// Ordinary memory, not cached: x86's write combining, Arm's Normal Non-cacheable, RISC-V's NC.
    NonCached = 3,
    /// A device. Writes may be acknowledged early, and x86's guest may combine them: UC and UC-,
    /// Arm's Device-nGnRE, RISC-V's IO.
    Device = 4,
    /// A device whose accesses are neither combined nor acknowledged early: x86's UC, Arm's
    /// Device-nGnRnE, RISC-V's IO.
    DeviceStrict = 5,
}

impl MemoryType {
    pub(crate) const ALL: [MemoryType; 6] = [
        MemoryType::WriteBack,
        MemoryType::AsGuest,
        MemoryType::WriteThrough,
        MemoryType::NonCached,
        MemoryType::Device,
        MemoryType::DeviceStrict,
    ];

    /// Whether it is a device's.
    pub const fn is_device(self) -> bool {
        matches!(self, MemoryType::Device | MemoryType::DeviceStrict)
    }
}

/// From where the guest may execute the memory of a leaf PTE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum Execute {
    /// From user and from supervisor code.
    #[default]
    All = 0,
    /// Not at all.
    None = 1,
    /// From user code alone: EPT with [`CpuFeatures::MBEC`], Arm with [`CpuFeatures::XNX`].
    User = 2,
    /// From supervisor code alone, as `User`.
    Supervisor = 3,
}

impl Execute {
    pub(crate) const ALL: [Execute; 4] = [Execute::All, Execute::None, Execute::User, Execute::Supervisor];

    /// Whether it permits `access`. Reads and writes are no matter of it.
    pub const fn permits(self, access: Access) -> bool {
        match access {
            Access::Read | Access::Write => true,
            Access::Execute => matches!(self, Execute::All | Execute::Supervisor),
            Access::ExecuteUser => matches!(self, Execute::All | Execute::User),
        }
    }
}

/// The attributes of a leaf PTE. The default is ordinary memory: write-back, and executable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct LeafAttributes {
    /// How it is accessed.
    pub memory: MemoryType,
    /// From where it may be executed.
    pub execute: Execute,
}

impl LeafAttributes {
    /// A device's registers: [`MemoryType::Device`], never executed.
    pub const DEVICE: LeafAttributes = LeafAttributes { memory: MemoryType::Device, execute: Execute::None };

    /// Memory that is never executed, such as a buffer that the guest shares.
    pub const DATA: LeafAttributes = LeafAttributes { memory: MemoryType::WriteBack, execute: Execute::None };

    /// How many there are.
    pub(crate) const COUNT: usize = MemoryType::ALL.len() * Execute::ALL.len();

    /// A number below [`COUNT`](Self::COUNT), each for one.
    #[inline]
    pub(crate) const fn number(self) -> usize {
        self.memory as usize * Execute::ALL.len() + self.execute as usize
    }

    /// Those with this number.
    pub(crate) const fn from_number(number: usize) -> LeafAttributes {
        let (memory, execute) = (number / Execute::ALL.len(), number % Execute::ALL.len());
        LeafAttributes { memory: MemoryType::ALL[memory], execute: Execute::ALL[execute] }
    }
}

bitflags::bitflags! {
    /// What the CPUs or IOMMUs of the host have and have turned on, as far as page tables depend on
    /// it.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct CpuFeatures: u32 {
        /// Arm: FEAT_S2FWB, with HCR_EL2.FWB set. MemAttr then has another encoding, which forces
        /// memory types on the guest (Arm ARM, "Stage 2 memory type and Cacheability attributes
        /// when FEAT_S2FWB is enabled").
        const FWB = 1 << 0;
        /// Arm: FEAT_XNX. XN has two bits, which tell EL0 from EL1 (Arm ARM, "Stage 2 data accesses
        /// and instruction execution permissions").
        const XNX = 1 << 1;
        /// Intel: mode-based execute control for EPT, turned on in the VM-execution controls (SDM
        /// vol. 3C, "EPT Translation Mechanism").
        const MBEC = 1 << 2;
        /// RISC-V: Svpbmt, with menvcfg.PBMTE set (Privileged Architecture, "Svpbmt Extension").
        const SVPBMT = 1 << 3;
        /// Executable huge pages may stop the CPU (Intel's erratum iTLB multihit,
        /// CVE-2018-12207). Huge pages are mapped without the right to execute, and a fetch splits
        /// them; a page of 4 KiB gets that right.
        const ITLB_MULTIHIT = 1 << 4;
        /// VT-d: snoop control (ECAP.SC). A leaf can make DMA snoop the CPUs' caches (VT-d
        /// specification, 9.8, field SNP).
        const SNOOP_CONTROL = 1 << 5;
    }
}

/// The CPUs that walk a VM's page tables, as far as these depend on them. The default suits every
/// CPU of the format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hardware {
    /// What they have. Features of another architecture are refused.
    pub features: CpuFeatures,
    /// Bits of a guest-physical address. `None`: [`Format::GPA_BITS`](super::Format::GPA_BITS).
    pub gpa_bits: Option<u8>,
    /// Levels of page tables. `None`: as few as translate `gpa_bits`. AMD's nested page tables have
    /// as many as the host's (5 if its CR4.LA57 is set; APM vol. 2, 15.25.3).
    pub levels: Option<u8>,
    /// The host's PAT, for [`Npt`](super::Npt): the value of the MSR IA32_PAT. A memory type that
    /// it lacks cannot be mapped. Default: its value at reset.
    pub pat: u64,
    /// Bits that are set in every address in a PTE, of page-table pages and of memory: AMD's C-bit
    /// (APM vol. 2, 7.10), a key of Intel's multi-key encryption. The host sees addresses without
    /// them, except in [`Host::table_ptr`](crate::Host::table_ptr). Default: none.
    pub address_bits: Hpa,
}

impl Hardware {
    /// IA32_PAT after a reset (Intel SDM vol. 3A, "Page Attribute Table"; AMD APM vol. 2, 7.8.1).
    pub const PAT_AT_RESET: u64 = 0x0007_0406_0007_0406;

    /// Whether executable huge pages are avoided.
    #[inline]
    pub(crate) fn splits_on_fetch(&self) -> bool {
        self.features.contains(CpuFeatures::ITLB_MULTIHIT)
    }
}

impl Default for Hardware {
    fn default() -> Hardware {
        Hardware {
            features: CpuFeatures::empty(),
            gpa_bits: None,
            levels: None,
            pat: Hardware::PAT_AT_RESET,
            address_bits: Hpa(0),
        }
    }
}

/// A number of levels that a format can have, and the guest-physical address bits that these
/// translate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Level of the root's PTEs.
    pub root_level: Level,
    /// Address bits that a VM may have.
    pub gpa_bits: RangeInclusive<u8>,
}
