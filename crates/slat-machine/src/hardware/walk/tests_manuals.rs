//! What the manuals say of each format's PTEs, written once more for the tests.

use slat::format::{Ept, Npt, Stage2, Sv39x4, Sv48x4, Sv57x4, Vtd};
use slat::shadow::Gva;
use slat::{Access, Gpa};

use super::shadow::{self, ShadowMapping, ShadowStop};
use super::{
    ALL_FETCHES, Fault, HardwareFormat, Mapping, Memory, Misconfiguration, Processor, Purpose, Stop, Walker,
    fetches_if, shift,
};
use crate::hardware::tlb::{Rights, Writes};

/// A PTE of `level` on the way to a leaf of level `leaf`: the leaf itself, or a directory entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) leaf: u8,
    pub(super) level: u8,
}

impl Place {
    fn is_leaf(self) -> bool {
        self.level == self.leaf
    }
}

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Granted,
    /// With this code.
    Fault(u64),
    Misconfigured,
    /// The PTE leads to a page-table page that the test does not have.
    LeadsOn,
}

/// A format by its manual.
#[derive(Clone, Copy)]
pub(super) struct Manual {
    pub(super) name: &'static str,
    pub(super) walk: fn(Walker<'_>, Gpa, Access, Purpose) -> Result<Mapping, Stop>,
    pub(super) processor: Processor,
    /// Bits of an index into the root; 9 below it.
    pub(super) root_bits: u32,
    /// The address is shifted right by so many bits in a PTE.
    pub(super) address_shift: u32,
    /// A directory entry, a leaf of level 1 and one above that, with all rights.
    pub(super) link: u64,
    pub(super) page: u64,
    pub(super) block: u64,
    /// Of a leaf, 0 where there is none: what allows writes, the accessed and the dirty bit.
    pub(super) writable: u64,
    pub(super) accessed: u64,
    pub(super) dirty: u64,
    /// The accessed bit of a directory entry.
    pub(super) link_accessed: u64,
    pub(super) memory: Memory,
    /// A PTE without any of these is not present.
    pub(super) present: u64,
    /// The bits of a PTE that [`outcome`](Manual::outcome) depends on.
    pub(super) rights: fn(Place) -> u64,
    /// Of an access by such a PTE. All others on the way grant everything.
    pub(super) outcome: fn(Place, u64, Access) -> Outcome,
    /// Bits that mean nothing.
    pub(super) ignored: fn(Place) -> u64,
    /// Bits that must be zero.
    pub(super) reserved: fn(Place) -> u64,
    /// The code of a PTE of this level with one of them.
    pub(super) reserved_code: fn(Access, u8) -> u64,
    /// The code of a read beyond the address bits, of a second stage.
    pub(super) beyond_code: Option<u64>,
    /// The code of an access to a table of the guest in memory that is not writable, of a second
    /// stage.
    pub(super) table_code: Option<u64>,
    /// The code of a fault for an accessed or dirty bit, where hardware may leave them to faults.
    pub(super) mark_code: Option<fn(Access, u8) -> u64>,
}

/// One of three for the kinds of access.
fn of<T>(access: Access, [read, write, execute]: [T; 3]) -> T {
    match access {
        Access::Read => read,
        Access::Write => write,
        Access::Execute | Access::ExecuteUser => execute,
    }
}

/// A mask.
fn bits(numbers: impl IntoIterator<Item = u32>) -> u64 {
    numbers.into_iter().fold(0, |mask, number| mask | 1 << number)
}

/// The address bits below the size of what a leaf of this level maps.
fn below(level: u8) -> u64 {
    bits(12..shift(level))
}

impl Manual {
    pub(super) const fn with_levels(self, levels: u8) -> Manual {
        Manual { processor: Processor { levels, ..self.processor }, ..self }
    }

    pub(super) fn levels(&self) -> u8 {
        self.processor.levels
    }

    /// The PTE with this address and these bits.
    pub(super) fn entry(&self, address: u64, bits: u64) -> u64 {
        address >> self.address_shift | bits
    }

    /// The bits of a leaf of `level`.
    pub(super) fn leaf_bits(&self, level: u8) -> u64 {
        if level == 1 { self.page } else { self.block }
    }
}

/// Qualification of a data access: linear address valid, final.
const EPT_DATA: u64 = 0x180;

/// Read, write, execute; in leaves memory type 6 (write back).
pub(super) const EPT: Manual = Manual {
    name: "EPT",
    walk: <Ept as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Ept>(),
    root_bits: 9,
    address_shift: 0,
    link: 0b111,
    page: 0b111 | 6 << 3,
    block: 0b111 | 6 << 3 | 1 << 7,
    writable: 1 << 1,
    accessed: 1 << 8,
    dirty: 1 << 9,
    link_accessed: 1 << 8,
    memory: Memory::WriteBack,
    present: 0b111,
    rights: |_| 0b111,
    outcome: |_, entry, access| {
        let (permissions, needed) = (entry & 0b111, of(access, [1, 2, 4]));
        match permissions {
            0b010 | 0b110 => Outcome::Misconfigured,
            _ if permissions & needed == 0 => Outcome::Fault(EPT_DATA | needed | permissions << 3),
            _ => Outcome::Granted,
        }
    },
    ignored: |place| bits((10..12).chain(52..64)) | if place.level == 1 { bits([6, 7]) } else { 0 },
    reserved: |place| match place.level {
        level if place.is_leaf() => below(level),
        2 | 3 => bits(3..7),
        _ => bits(3..8),
    },
    reserved_code: |_, _| 0,
    beyond_code: Some(EPT_DATA | 1),
    // Readable and executable, and the access is a read and a write.
    table_code: Some(0x80 | 0b11 | 0b101 << 3),
    mark_code: None,
};

/// Error code of a data access: user, final.
const NPT_DATA: u64 = 1 << 32 | 1 << 2;
const NPT_NX: u64 = 1 << 63;

fn npt_code(access: Access) -> u64 {
    NPT_DATA | of(access, [0, 1 << 1, 1 << 4])
}

/// Present, writable, user.
pub(super) const NPT: Manual = Manual {
    name: "NPT",
    walk: <Npt as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Npt>(),
    root_bits: 9,
    address_shift: 0,
    link: 0b111,
    page: 0b111,
    block: 0b111 | 1 << 7,
    writable: 1 << 1,
    accessed: 1 << 5,
    dirty: 1 << 6,
    link_accessed: 1 << 5,
    memory: Memory::WriteBack,
    present: 1,
    rights: |_| 0b111 | NPT_NX,
    outcome: |_, entry, access| {
        let permits = entry & 4 != 0 && of(access, [true, entry & 2 != 0, entry & NPT_NX == 0]);
        match entry & 1 {
            0 => Outcome::Fault(npt_code(access)),
            _ if permits => Outcome::Granted,
            _ => Outcome::Fault(npt_code(access) | 1),
        }
    },
    // PWT, PCD, 9 to 11, 52 to 62; the page-attribute-table bit, also of a large page; G of a page.
    ignored: |place| {
        let own = match place.level {
            1 => bits([7, 8]),
            level if place.is_leaf() => below(level) & 1 << 12,
            _ => 0,
        };
        own | bits((3..5).chain(9..12).chain(52..63))
    },
    reserved: |place| match place.level {
        level if place.is_leaf() => below(level) & !(1 << 12),
        2 | 3 => 0,
        _ => bits([7, 8]),
    },
    reserved_code: |access, _| npt_code(access) | 1 | 1 << 3,
    beyond_code: Some(NPT_DATA),
    table_code: Some(1 << 33 | 1 << 2 | 1 << 1 | 1),
    mark_code: None,
};

/// The walker of shadow page tables, as that of a second stage whose accesses are all the user's.
fn walk_shadow(walker: Walker<'_>, gpa: Gpa, access: Access, _: Purpose) -> Result<Mapping, Stop> {
    let needed = Rights::USER.and(of(access, [Rights::NONE, Rights::WRITE, Rights::EXECUTE]));
    let walked = shadow::walk(walker, walker.processor.levels, Gva(gpa.0), access, needed);
    let ShadowMapping { hpa, size, rights } = walked.map_err(|stop| match stop {
        ShadowStop::Restart => Stop::Restart,
        ShadowStop::PageFault => Stop::Fault(Fault { gpa, access, code: 0 }),
        ShadowStop::Misconfigured { level, entry } => {
            Stop::Misconfigured(Misconfiguration { gpa, level, entry, code: 0 })
        }
        ShadowStop::NoMemory { hpa } => Stop::NoMemory { gpa, hpa },
    })?;
    let writes = if rights.grant(Rights::WRITE) { Writes::Allowed } else { Writes::MustWalk };
    let fetches = fetches_if(rights.grant(Rights::EXECUTE), ALL_FETCHES);
    Ok(Mapping { gpa, hpa, size, writes, fetches, memory: Memory::WriteBack })
}

const SHADOW: Manual = Manual {
    name: "shadow tables",
    walk: walk_shadow,
    outcome: |place, entry, access| match (NPT.outcome)(place, entry, access) {
        Outcome::Fault(_) => Outcome::Fault(0),
        other => other,
    },
    reserved_code: |_, _| 0,
    beyond_code: None,
    table_code: None,
    ..NPT
};

/// MemAttr normal write-back, S2AP read and write, inner shareable.
const STAGE2_ATTRIBUTES: u64 = 0b1111 << 2 | 0b11 << 6 | 0b11 << 8;
const STAGE2_XN: u64 = 1 << 54;

/// EC, WnR and the fault status code; level 4 is the manual's level 0.
pub(super) fn stage2_code(access: Access, status: u64, level: u8) -> u64 {
    of(access, [0x24 << 26, 0x24 << 26 | 1 << 6, 0x20 << 26]) | status | u64::from(4 - level)
}

pub(super) const STAGE2_TRANSLATION: u64 = 0b00_0100;
pub(super) const STAGE2_ACCESS_FLAG: u64 = 0b00_1000;
pub(super) const STAGE2_PERMISSION: u64 = 0b00_1100;

/// Arm's. There is no dirty bit, and directory entries have no bit that hardware sets.
pub(super) const STAGE2: Manual = Manual {
    name: "stage 2",
    walk: <Stage2 as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Stage2>(),
    root_bits: 9,
    address_shift: 0,
    link: 0b11,
    page: 0b11 | STAGE2_ATTRIBUTES,
    block: 0b01 | STAGE2_ATTRIBUTES,
    writable: 1 << 7,
    accessed: 1 << 10,
    dirty: 0,
    link_accessed: 0,
    memory: Memory::WriteBack,
    present: 1,
    rights: |place| if place.is_leaf() { 1 | 0b11 << 6 | STAGE2_XN } else { 1 },
    outcome: |place, entry, access| {
        let permits = of(access, [entry & 1 << 6 != 0, entry & 1 << 7 != 0, entry & STAGE2_XN == 0]);
        match entry & 1 {
            0 => Outcome::Fault(stage2_code(access, STAGE2_TRANSLATION, place.level)),
            _ if permits || !place.is_leaf() => Outcome::Granted,
            _ => Outcome::Fault(stage2_code(access, STAGE2_PERMISSION, place.level)),
        }
    },
    ignored: |place| if place.is_leaf() { bits(55..64) } else { bits((2..12).chain(51..59)) },
    reserved: |place| {
        if place.is_leaf() {
            bits([11].into_iter().chain(48..54)) | below(place.level)
        } else {
            bits((48..51).chain(59..64))
        }
    },
    reserved_code: |access, level| stage2_code(access, STAGE2_TRANSLATION, level),
    beyond_code: Some(0x24 << 26 | STAGE2_TRANSLATION),
    // A data abort, S1PTW, WnR, of the lowest level.
    table_code: Some(0x24 << 26 | 1 << 7 | 1 << 6 | STAGE2_PERMISSION | 3),
    mark_code: Some(|access, level| stage2_code(access, STAGE2_ACCESS_FLAG, level)),
};

/// The cause of the trap.
fn gstage_code(access: Access) -> u64 {
    of(access, [21, 23, 20])
}

/// RISC-V's: V, R, W, X, U.
pub(super) const SV48X4: Manual = Manual {
    name: "Sv48x4",
    walk: <Sv48x4 as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Sv48x4>(),
    root_bits: 11,
    address_shift: 2,
    link: 1,
    page: 0b1_1111,
    block: 0b1_1111,
    writable: 1 << 2,
    accessed: 1 << 6,
    dirty: 1 << 7,
    link_accessed: 0,
    memory: Memory::ByAddress,
    present: 1,
    rights: |place| if place.is_leaf() { 0b1_1111 } else { 1 },
    outcome: |place, entry, access| match entry & 0b1_1111 {
        bits if bits & 1 == 0 => Outcome::Fault(gstage_code(access)),
        _ if !place.is_leaf() => Outcome::Granted,
        // A directory entry: not at the lowest level, and not with U.
        1 if place.level > 1 => Outcome::LeadsOn,
        bits if bits & 0b1110 == 0 || bits & 0b110 == 0b100 => Outcome::Misconfigured,
        bits if bits & of(access, [2, 4, 8]) == 0 || bits & 1 << 4 == 0 => Outcome::Fault(gstage_code(access)),
        _ => Outcome::Granted,
    },
    // G, and the two that are software's.
    ignored: |_| bits([5, 8, 9]),
    reserved: |place| bits(54..64) | if place.is_leaf() { below(place.level) >> 2 } else { bits([4, 6, 7]) },
    reserved_code: |access, _| gstage_code(access),
    beyond_code: Some(21),
    table_code: Some(0x3020 << 32 | 23),
    mark_code: Some(|access, _| gstage_code(access)),
};

pub(super) const SV39X4: Manual = Manual {
    name: "Sv39x4",
    walk: <Sv39x4 as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Sv39x4>(),
    ..SV48X4
};

pub(super) const SV57X4: Manual = Manual {
    name: "Sv57x4",
    walk: <Sv57x4 as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Sv57x4>(),
    ..SV48X4
};

/// Read, write. A device fetches nothing: a fetch is a read.
pub(super) const VTD: Manual = Manual {
    name: "VT-d",
    walk: <Vtd as HardwareFormat>::walk::<()>,
    processor: Processor::of::<Vtd>(),
    root_bits: 9,
    address_shift: 0,
    link: 0b11,
    page: 0b11,
    block: 0b11 | 1 << 7,
    writable: 1 << 1,
    accessed: 1 << 8,
    dirty: 1 << 9,
    link_accessed: 1 << 8,
    memory: Memory::ByAddress,
    present: 0b11,
    rights: |_| 0b11,
    outcome: |_, entry, access| match entry & of(access, [1, 2, 1]) {
        0 => Outcome::Fault(of(access, [0x86, 0x85, 0x86])),
        _ => Outcome::Granted,
    },
    // PS of an entry of the lowest level; bit 9 above leaves.
    ignored: |place| {
        let own = match place.level {
            1 => 1 << 7,
            _ if place.is_leaf() => 0,
            _ => 1 << 9,
        };
        own | bits([10, 63].into_iter().chain(52..61))
    },
    // X, EMT, IPAT; SNP without snoop control, and in a directory entry in any case; two that old
    // and new revisions reserve or define.
    reserved: |place| {
        bits([2, 3, 4, 5, 6, 11, 61, 62])
            | match place.level {
                level if place.is_leaf() => below(level),
                2 | 3 => 0,
                _ => 1 << 7,
            }
    },
    reserved_code: |_, _| 0x7a,
    beyond_code: Some(0x83),
    table_code: Some(0x85),
    mark_code: None,
};

pub(super) const ALL: [Manual; 13] = [
    EPT,
    EPT.with_levels(5),
    NPT,
    NPT.with_levels(5),
    SHADOW,
    SHADOW.with_levels(5),
    STAGE2,
    SV39X4,
    SV48X4,
    SV57X4,
    VTD.with_levels(3),
    VTD,
    VTD.with_levels(5),
];
