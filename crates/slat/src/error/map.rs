//! The errors of memory that is mapped in advance.

use thiserror::Error;

use crate::addr::{Gfn, Gpa, Pfn};
use crate::format::{LeafAttributes, MemoryType};

/// Why memory was not mapped, unmapped or given other rights: [`Vm::map_range`](crate::Vm::map_range),
/// [`Vm::unmap_range`](crate::Vm::unmap_range), [`Vm::protect_range`](crate::Vm::protect_range).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum MapError {
    /// The range is empty, or ends before it starts.
    #[error("range of guest frames from {start} to {end} is empty")]
    EmptyRange {
        /// Its first frame.
        start: Gfn,
        /// The frame after its last.
        end: Gfn,
    },
    /// The range reaches beyond the last address that the page tables translate.
    #[error("address {gpa} is beyond the {gpa_bits} guest-physical bits of the format")]
    AddressTooHigh {
        /// The first address of the range that is not translated.
        gpa: Gpa,
        /// Address bits that the page tables translate.
        gpa_bits: u32,
    },
    /// The host frames reach beyond the last that a PTE can hold.
    #[error("host frames from {pfn} on reach beyond what a PTE can hold")]
    FrameTooHigh {
        /// The first host frame of the mapping.
        pfn: Pfn,
    },
    /// No pinned memslot has the page, or the range goes on where its memslot ends.
    #[error("no pinned slot has {gpa}")]
    NotPinned {
        /// The address of the page.
        gpa: Gpa,
    },
    /// Another mapping is there.
    #[error("{gpa} cannot be mapped to frame {pfn}: it is mapped to frame {mapped}")]
    AlreadyMapped {
        /// The address of the page.
        gpa: Gpa,
        /// The host frame that it was to have.
        pfn: Pfn,
        /// The host frame that it has.
        mapped: Pfn,
    },
    /// The format, or the CPUs that are configured, have no such memory type or right to execute.
    #[error("{gpa} cannot be mapped: the format or its CPUs cannot express {attributes:?}")]
    UnsupportedAttributes {
        /// The address of the first page.
        gpa: Gpa,
        /// The attributes that were asked for.
        attributes: LeafAttributes,
    },
    /// The memory type of a mapping stays until the page is unmapped.
    #[error("{gpa} is mapped as {mapped:?}, which stays until it is unmapped")]
    MemoryTypeFixed {
        /// The address of the page.
        gpa: Gpa,
        /// Its memory type.
        mapped: MemoryType,
    },
    /// Another call is unmapping or invalidating the page now. Try again after that.
    #[error("{gpa} is being unmapped by another call")]
    Busy {
        /// The address of the page.
        gpa: Gpa,
    },
    /// There is no memory for page-table pages or for bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
}
