//! The page-modification log of a CPU (Intel SDM vol. 3C, "VMX Support for Address Translation",
//! "Page-Modification Logging").

#![expect(unsafe_code, reason = "reads what the CPU has written")]

use alloc::boxed::Box;

use slat::{Gpa, PAGE_SIZE};

use super::vmcs::{Field, Vmcs};
use crate::arch::x86::page::Page;

/// Entries of a log, which the CPU fills from the last one to the first.
const NR_ENTRIES: u16 = (PAGE_SIZE / 8) as u16;

/// A log.
#[derive(Debug)]
pub(super) struct ModificationLog(Box<Page>);

impl ModificationLog {
    /// An empty log of the CPU of `vmcs`.
    ///
    /// # Safety
    /// It is dropped after `vmcs`.
    pub unsafe fn new(vmcs: &mut Vmcs) -> ModificationLog {
        let log = ModificationLog(Page::new());
        // SAFETY: the page is the log's, which is there as long as the structure, as the caller
        // promises.
        unsafe {
            vmcs.write_all(&[(Field::LogAddress, log.0.address()), (Field::LogIndex, u64::from(NR_ENTRIES - 1))]);
        }
        log
    }

    /// The addresses in it. It is empty then.
    pub fn take<'l>(&'l mut self, vmcs: &mut Vmcs) -> impl Iterator<Item = Gpa> + use<'l> {
        // The index is that of the next entry. It is below 0 when the log is full.
        let first = (vmcs.read(Field::LogIndex) as u16).wrapping_add(1);
        if first != NR_ENTRIES {
            // SAFETY: an index in the log.
            unsafe { vmcs.write(Field::LogIndex, u64::from(NR_ENTRIES - 1)) };
        }
        let entries = self.0.address() as *const u64;
        // SAFETY: entries of the page, which the CPU has left alone since its exit. Volatile: it is
        // the CPU that wrote them.
        (first..NR_ENTRIES).map(move |index| Gpa(unsafe { entries.add(usize::from(index)).read_volatile() }))
    }
}
