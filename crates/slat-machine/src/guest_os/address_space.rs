//! The model of a process, apart from its page tables, with which every access is compared.
//!
//! A page holds a *mark*, which names the address space that wrote it, the page and the version. No
//! two writes store the same mark, so a read through a wrong translation returns another mark than
//! the expected one.

use std::collections::{BTreeMap, VecDeque};

use slat::shadow::{Gva, Privilege};
use slat::{Access, Gfn};

use super::cpu::{ERROR_FETCH, ERROR_PRESENT, ERROR_USER, ERROR_WRITE};
use super::frames::GuestFrame;
use super::layout::{NO_EXECUTE, PRESENT, USER, WRITABLE};

/// Bits of a mark that are the version.
const VERSION_BITS: u32 = 16;
/// Bits that are the page's number; the address space's is above.
pub(crate) const PAGE_BITS: u32 = 35;

/// How many unmapped pages are remembered.
const NR_UNMAPPED: usize = 16;

/// The accesses that a process may make to pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum RegionRights {
    Read,
    ReadWrite,
    ReadExecute,
}

impl RegionRights {
    pub(crate) fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self == RegionRights::ReadWrite,
            Access::Execute | Access::ExecuteUser => self == RegionRights::ReadExecute,
        }
    }
}

/// Pages that were mapped by one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) nr_pages: u64,
    pub(crate) rights: RegionRights,
}

/// A page that is present, with the state that its PTE should have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserPage {
    pub(crate) frame: GuestFrame,
    /// Of the PTE. A region may be writable where its PTEs are not: the next write copies.
    pub(crate) rights: RegionRights,
    pub(crate) mark: u64,
    /// It was used since the PTE was made.
    pub(crate) is_accessed: bool,
    /// It was written since it is present.
    pub(crate) is_dirty: bool,
    /// The PTE allows more than at the last flush, so a CPU may still fault.
    pub(crate) may_fault: bool,
}

impl UserPage {
    /// The PTE without accessed and dirty bit.
    pub(crate) fn entry(&self) -> u64 {
        let rights = match self.rights {
            RegionRights::Read => NO_EXECUTE,
            RegionRights::ReadWrite => NO_EXECUTE | WRITABLE,
            RegionRights::ReadExecute => 0,
        };
        self.frame.gpa() | rights | USER | PRESENT
    }
}

/// A page-table page below the root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    pub(crate) frame: GuestFrame,
    pub(crate) nr_entries: u32,
}

/// The result of an access by the model.
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
    pub(crate) root: GuestFrame,
    /// Flushes so far; see [`asid`](super::asid).
    pub(crate) generation: u64,
    /// By first page.
    pub(crate) regions: BTreeMap<u64, Region>,
    pub(crate) pages: BTreeMap<u64, UserPage>,
    /// By level and the common bits of their page numbers.
    pub(crate) tables: BTreeMap<(u8, u64), Table>,
    /// Pages that were unmapped last.
    pub(crate) unmapped: VecDeque<u64>,
    version: u64,
}

/// The address of `page`.
pub(crate) const fn gva_of(page: u64) -> Gva {
    Gva(page << Gfn::SHIFT)
}

/// The error code of a fault, as far as it does not depend on the page tables.
pub(crate) fn error_code(access: Access, privilege: Privilege, presence: u32) -> u32 {
    let access = match access {
        Access::Read => 0,
        Access::Write => ERROR_WRITE,
        Access::Execute | Access::ExecuteUser => ERROR_FETCH,
    };
    let privilege = if privilege == Privilege::User { ERROR_USER } else { 0 };
    access | privilege | presence
}

impl AddressSpace {
    pub(crate) fn new(id: u64, root: GuestFrame) -> AddressSpace {
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

    /// The mark of the next write to `page`.
    pub(crate) fn next_mark(&mut self, page: u64) -> u64 {
        self.version += 1;
        let version = self.version & ((1 << VERSION_BITS) - 1);
        self.id << (VERSION_BITS + PAGE_BITS) | page << VERSION_BITS | version
    }

    /// The rights of the process to `page`, if it is mapped.
    pub(crate) fn rights(&self, page: u64) -> Option<RegionRights> {
        let (first, region) = self.regions.range(..=page).next_back()?;
        (page - first < region.nr_pages).then_some(region.rights)
    }

    /// The result of an access to `page`, by the model.
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

    /// Maps pages that are not mapped.
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

    /// Removes the regions of `nr_pages` from `first` on; the caller unmaps their pages.
    pub(crate) fn remove_regions(&mut self, first: u64, nr_pages: u64) {
        self.cut(first);
        self.cut(first + nr_pages);
        self.regions.retain(|start, _| !(first..first + nr_pages).contains(start));
    }

    /// Changes the rights of the mapped pages among `nr_pages` from `first` on; the caller changes
    /// their PTEs.
    pub(crate) fn protect_regions(&mut self, first: u64, nr_pages: u64, rights: RegionRights) {
        self.cut(first);
        self.cut(first + nr_pages);
        for (_, region) in self.regions.range_mut(first..first + nr_pages) {
            region.rights = rights;
        }
    }

    /// Remembers a page that was unmapped.
    pub(crate) fn note_unmapped(&mut self, page: u64) {
        if self.unmapped.len() == NR_UNMAPPED {
            self.unmapped.pop_front();
        }
        self.unmapped.push_back(page);
    }

    /// The pages that are present among `nr_pages` from `first` on.
    pub(crate) fn present_pages(&self, first: u64, nr_pages: u64) -> Vec<u64> {
        self.pages.range(first..first + nr_pages).map(|(page, _)| *page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_split_at_the_ends_of_a_range() {
        let mut space = AddressSpace::new(1, GuestFrame(0));
        space.add_region(10, Region { nr_pages: 10, rights: RegionRights::Read });
        space.add_region(30, Region { nr_pages: 5, rights: RegionRights::ReadExecute });
        space.protect_regions(12, 3, RegionRights::ReadWrite);
        let rights =
            |space: &AddressSpace, pages: &[u64]| -> Vec<_> { pages.iter().map(|page| space.rights(*page)).collect() };
        let (read, write, fetch) =
            (Some(RegionRights::Read), Some(RegionRights::ReadWrite), Some(RegionRights::ReadExecute));
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
    fn marks_differ() {
        let (mut one, mut other) = (AddressSpace::new(1, GuestFrame(0)), AddressSpace::new(2, GuestFrame(2)));
        let last_page = (1 << PAGE_BITS) - 1;
        let marks = [one.next_mark(7), one.next_mark(7), one.next_mark(last_page), other.next_mark(7)];
        assert!((0..4).all(|index| !marks[..index].contains(&marks[index]) && marks[index] != 0));
    }

    #[test]
    fn expected_faults_are_those_of_the_manual() {
        let mut space = AddressSpace::new(1, GuestFrame(0));
        let page = UserPage {
            frame: GuestFrame(5),
            rights: RegionRights::ReadExecute,
            mark: 0,
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
