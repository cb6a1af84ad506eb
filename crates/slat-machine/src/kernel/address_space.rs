//! What the kernel knows of a process apart from its tables: the model that every access is held against.
//!
//! A page holds a *stamp*, which names the address space that wrote it, the page and the version: no two writes leave the
//! same, so what is read through a wrong translation is told from what should be there.

use std::collections::{BTreeMap, VecDeque};

use slat::shadow::{Gva, Privilege};
use slat::{Access, Gfn};

use super::cpu::{ERROR_FETCH, ERROR_PRESENT, ERROR_USER, ERROR_WRITE};
use super::frames::Frame;
use super::layout::{NO_EXECUTE, PRESENT, USER, WRITABLE};

/// Bits of a stamp that are the version.
const VERSION_BITS: u32 = 16;
/// Bits that are the page's number; the address space's is above.
pub(crate) const PAGE_BITS: u32 = 35;

/// Pages that were unmapped are remembered, this many.
const NR_UNMAPPED: usize = 16;

/// What a process may do with pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Rights {
    Read,
    ReadWrite,
    ReadExecute,
}

impl Rights {
    pub(crate) fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self == Rights::ReadWrite,
            Access::Execute => self == Rights::ReadExecute,
        }
    }
}

/// Pages that were mapped together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) nr_pages: u64,
    pub(crate) rights: Rights,
}

/// A page that is there, as its entry should have it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page {
    pub(crate) frame: Frame,
    /// Of the entry. A region may be writable where its entries are not: the next write copies.
    pub(crate) rights: Rights,
    pub(crate) stamp: u64,
    /// It was used since the entry was made.
    pub(crate) is_accessed: bool,
    /// It was written since it is there.
    pub(crate) is_dirty: bool,
    /// The entry allows more than it did at the last flush, so that a CPU may still fault.
    pub(crate) may_fault: bool,
}

impl Page {
    /// The entry without accessed and dirty bit.
    pub(crate) fn entry(&self) -> u64 {
        let rights = match self.rights {
            Rights::Read => NO_EXECUTE,
            Rights::ReadWrite => NO_EXECUTE | WRITABLE,
            Rights::ReadExecute => 0,
        };
        self.frame.gpa() | rights | USER | PRESENT
    }
}

/// A table below the root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    pub(crate) frame: Frame,
    pub(crate) nr_entries: u32,
}

/// What the model says of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Expected {
    /// It completes.
    Completes,
    /// It faults with this error code.
    Fault(u32),
}

/// A process, which has one thread, and its address space.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    /// Unique, from 1 on.
    pub(crate) id: u64,
    /// The kernel's root; the user root is in the next frame.
    pub(crate) root: Frame,
    /// Flushes so far; see [`asid`](super::asid).
    pub(crate) generation: u64,
    /// By first page.
    pub(crate) regions: BTreeMap<u64, Region>,
    pub(crate) pages: BTreeMap<u64, Page>,
    /// By level and the bits of page numbers that they have in common.
    pub(crate) tables: BTreeMap<(u8, u64), Table>,
    /// Pages that were unmapped last.
    pub(crate) unmapped: VecDeque<u64>,
    version: u64,
}

/// Where `page` is.
pub(crate) const fn gva_of(page: u64) -> Gva {
    Gva(page << Gfn::SHIFT)
}

/// Error code of a fault, by what is known without tables.
pub(crate) fn error_code(access: Access, privilege: Privilege, presence: u32) -> u32 {
    let access = match access {
        Access::Read => 0,
        Access::Write => ERROR_WRITE,
        Access::Execute => ERROR_FETCH,
    };
    let privilege = if privilege == Privilege::User { ERROR_USER } else { 0 };
    access | privilege | presence
}

impl AddressSpace {
    pub(crate) fn new(id: u64, root: Frame) -> AddressSpace {
        AddressSpace {
            id,
            root,
            generation: 1,
            regions: BTreeMap::new(),
            pages: BTreeMap::new(),
            tables: BTreeMap::new(),
            unmapped: VecDeque::with_capacity(NR_UNMAPPED),
            version: 0,
        }
    }

    /// What `page` holds after its next write.
    pub(crate) fn next_stamp(&mut self, page: u64) -> u64 {
        self.version += 1;
        let version = self.version & ((1 << VERSION_BITS) - 1);
        self.id << (VERSION_BITS + PAGE_BITS) | page << VERSION_BITS | version
    }

    /// What the process may do with `page`, if it is mapped.
    pub(crate) fn rights(&self, page: u64) -> Option<Rights> {
        let (first, region) = self.regions.range(..=page).next_back()?;
        (page - first < region.nr_pages).then_some(region.rights)
    }

    /// What the tables say of an access to `page`, by the model.
    pub(crate) fn expect(&self, page: u64, access: Access, privilege: Privilege) -> Expected {
        let Some(found) = self.pages.get(&page) else {
            return Expected::Fault(error_code(access, privilege, 0));
        };
        // SMAP and SMEP keep the kernel from user pages.
        let is_allowed = match privilege {
            Privilege::User => true,
            Privilege::Supervisor => false,
            Privilege::SupervisorWithAc => access != Access::Execute,
        };
        if is_allowed && found.rights.allow(access) {
            Expected::Completes
        } else {
            Expected::Fault(error_code(access, privilege, ERROR_PRESENT))
        }
    }

    /// Maps pages that are not.
    pub(crate) fn add_region(&mut self, first: u64, region: Region) {
        self.regions.insert(first, region);
    }

    /// Makes `page` the first of its region.
    fn cut(&mut self, page: u64) {
        let Some((&first, region)) = self.regions.range_mut(..page).next_back() else { return };
        let Some(rest) = (first + region.nr_pages).checked_sub(page).filter(|rest| *rest != 0) else { return };
        region.nr_pages -= rest;
        let rights = region.rights;
        self.regions.insert(page, Region { nr_pages: rest, rights });
    }

    /// Forgets the regions of `nr_pages` from `first` on; their pages are the caller's to unmap.
    pub(crate) fn remove_regions(&mut self, first: u64, nr_pages: u64) {
        self.cut(first);
        self.cut(first + nr_pages);
        self.regions.retain(|start, _| !(first..first + nr_pages).contains(start));
    }

    /// Changes the rights of what is mapped of `nr_pages` from `first` on; their entries are the caller's to change.
    pub(crate) fn protect_regions(&mut self, first: u64, nr_pages: u64, rights: Rights) {
        self.cut(first);
        self.cut(first + nr_pages);
        for (_, region) in self.regions.range_mut(first..first + nr_pages) {
            region.rights = rights;
        }
    }

    /// Remembers a page that is there no longer.
    pub(crate) fn note_unmapped(&mut self, page: u64) {
        if self.unmapped.len() == NR_UNMAPPED {
            self.unmapped.pop_front();
        }
        self.unmapped.push_back(page);
    }

    /// The pages that are there of `nr_pages` from `first` on.
    pub(crate) fn present_pages(&self, first: u64, nr_pages: u64) -> Vec<u64> {
        self.pages.range(first..first + nr_pages).map(|(page, _)| *page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_cut_where_they_must() {
        let mut space = AddressSpace::new(1, Frame(0));
        space.add_region(10, Region { nr_pages: 10, rights: Rights::Read });
        space.add_region(30, Region { nr_pages: 5, rights: Rights::ReadExecute });
        space.protect_regions(12, 3, Rights::ReadWrite);
        let rights =
            |space: &AddressSpace, pages: &[u64]| -> Vec<_> { pages.iter().map(|page| space.rights(*page)).collect() };
        let (read, write, fetch) = (Some(Rights::Read), Some(Rights::ReadWrite), Some(Rights::ReadExecute));
        assert_eq!(
            rights(&space, &[9, 10, 11, 12, 14, 15, 19, 20, 30, 34, 35]),
            [None, read, read, write, write, read, read, None, fetch, fetch, None]
        );
        space.remove_regions(14, 18);
        assert_eq!(rights(&space, &[13, 14, 15, 19, 30, 31, 32]), [write, None, None, None, None, None, fetch]);
        space.remove_regions(0, 100);
        assert!(space.regions.is_empty());
    }

    #[test]
    fn stamps_differ() {
        let (mut one, mut other) = (AddressSpace::new(1, Frame(0)), AddressSpace::new(2, Frame(2)));
        let last_page = (1 << PAGE_BITS) - 1;
        let stamps = [one.next_stamp(7), one.next_stamp(7), one.next_stamp(last_page), other.next_stamp(7)];
        assert!((0..4).all(|index| !stamps[..index].contains(&stamps[index]) && stamps[index] != 0));
    }

    #[test]
    fn faults_are_expected_as_the_manual_says() {
        let mut space = AddressSpace::new(1, Frame(0));
        let page = Page {
            frame: Frame(5),
            rights: Rights::ReadExecute,
            stamp: 0,
            is_accessed: false,
            is_dirty: false,
            may_fault: false,
        };
        space.pages.insert(3, page);
        let expect = |page, access, privilege| space.expect(page, access, privilege);
        use Privilege::{Supervisor, SupervisorWithAc, User};
        assert_eq!(expect(3, Access::Execute, User), Expected::Completes);
        assert_eq!(expect(3, Access::Write, User), Expected::Fault(7));
        assert_eq!(expect(4, Access::Execute, User), Expected::Fault(0x14));
        assert_eq!(expect(4, Access::Read, SupervisorWithAc), Expected::Fault(0));
        assert_eq!(expect(3, Access::Read, SupervisorWithAc), Expected::Completes);
        assert_eq!(expect(3, Access::Execute, SupervisorWithAc), Expected::Fault(0x11));
        assert_eq!(expect(3, Access::Read, Supervisor), Expected::Fault(1));
    }
}
