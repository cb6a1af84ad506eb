//! Errors that several kinds of operations have in common. Functions that serve several return one
//! of these, and it becomes a variant of the operation's own error.

use super::{ConfigError, FaultError, LogError, MapError, RangeError, SlotError};
use crate::addr::{Gfn, Gpa};

/// There is no memory for page-table pages or for bookkeeping. All kinds of operations may find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OutOfMemory;

/// An address is beyond the last that the format translates.
pub(crate) struct AddressTooHigh {
    pub(crate) gpa: Gpa,
    pub(crate) gpa_bits: u32,
}

/// A range of a memslot's pages is empty, or reaches beyond its end.
pub(crate) enum BadPages {
    Empty { start: Gfn },
    PastEnd { slot: u32, first_page: u64, nr_pages: u64, slot_pages: u64 },
}

macro_rules! from_out_of_memory {
    ($($error:ident),*) => {
        $(impl From<OutOfMemory> for $error {
            #[inline]
            fn from(OutOfMemory: OutOfMemory) -> $error {
                $error::OutOfMemory
            }
        })*
    };
}

macro_rules! from_address_too_high {
    ($($error:ident),*) => {
        $(impl From<AddressTooHigh> for $error {
            #[inline]
            fn from(AddressTooHigh { gpa, gpa_bits }: AddressTooHigh) -> $error {
                $error::AddressTooHigh { gpa, gpa_bits }
            }
        })*
    };
}

macro_rules! from_bad_pages {
    ($($error:ident),*) => {
        $(impl From<BadPages> for $error {
            fn from(pages: BadPages) -> $error {
                match pages {
                    BadPages::Empty { start } => $error::EmptyRange { start, end: start },
                    BadPages::PastEnd { slot, first_page, nr_pages, slot_pages } => {
                        $error::RangePastEnd { slot, first_page, nr_pages, slot_pages }
                    }
                }
            }
        })*
    };
}

from_out_of_memory!(ConfigError, SlotError, LogError, FaultError, RangeError, MapError);
from_address_too_high!(SlotError, FaultError, RangeError, MapError);
from_bad_pages!(SlotError, LogError);
