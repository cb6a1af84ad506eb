//! The measured crates: their versions and their operations.

use super::operation::Operation;

/// The lock file of the workspace.
const LOCK: &str = include_str!("../../../Cargo.lock");

/// A crate with page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subject {
    Slat,
    /// slat with pinned memslots: mapped ahead, and not by faults.
    Pinned,
    /// slat with the interface of `axaddrspace`.
    Adapter,
    Axaddrspace,
    PageTableGeneric,
    #[cfg(target_arch = "x86_64")]
    PageTableMultiarch,
    X86_64,
    Aarch64Paging,
}

impl Subject {
    /// In the order of the tables' columns. `page_table_multiarch` has only the tables of the CPU
    /// that it is built for.
    pub(crate) const ALL: &[Subject] = &[
        Subject::Slat,
        Subject::Pinned,
        Subject::Adapter,
        Subject::Axaddrspace,
        Subject::PageTableGeneric,
        #[cfg(target_arch = "x86_64")]
        Subject::PageTableMultiarch,
        Subject::X86_64,
        Subject::Aarch64Paging,
    ];

    /// Whether it is none of slat's own.
    pub(crate) fn is_peer(self) -> bool {
        !matches!(self, Subject::Slat | Subject::Pinned | Subject::Adapter)
    }

    /// The crate's name, and how it is used if that is not all.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Subject::Slat => "slat",
            Subject::Pinned => "slat-pinned",
            Subject::Adapter => "slat-axaddrspace",
            Subject::Axaddrspace => "axaddrspace",
            Subject::PageTableGeneric => "page-table-generic",
            #[cfg(target_arch = "x86_64")]
            Subject::PageTableMultiarch => "page_table_multiarch",
            Subject::X86_64 => "x86_64",
            Subject::Aarch64Paging => "aarch64-paging",
        }
    }

    /// The crate's name.
    fn package(self) -> &'static str {
        if self == Subject::Pinned { Subject::Slat.name() } else { self.name() }
    }

    /// The crate's version, from the lock file.
    pub(crate) fn version(self) -> String {
        let package = format!("name = \"{}\"\nversion = \"", self.package());
        let version = LOCK.split_once(&package).and_then(|(_, rest)| rest.split('"').next());
        version.unwrap_or("unknown").to_owned()
    }

    /// Whether it has this operation. `axaddrspace`, alone of the peers, has the path of a fault; of
    /// the rest it has what a hypervisor calls for an area. Two of the others cannot split.
    pub(crate) fn can(self, operation: Operation) -> bool {
        match self {
            Subject::Slat => true,
            // Frames are known ahead, and only its own calls split a pinned page.
            Subject::Pinned => !matches!(operation, Operation::Fault | Operation::MapRangeEach | Operation::Split2m),
            Subject::Adapter | Subject::Axaddrspace => matches!(
                operation,
                Operation::Fault
                    | Operation::MapRange
                    | Operation::MapRange2m
                    | Operation::Query
                    | Operation::QueryScattered
                    | Operation::Unmap4k
                    | Operation::UnmapRange
            ),
            Subject::PageTableGeneric | Subject::Aarch64Paging => operation != Operation::Fault,
            #[cfg(target_arch = "x86_64")]
            Subject::PageTableMultiarch => !matches!(operation, Operation::Fault | Operation::Split2m),
            Subject::X86_64 => !matches!(operation, Operation::Fault | Operation::Split2m),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_has_one_version() {
        for subject in Subject::ALL {
            let package = format!("name = \"{}\"\n", subject.package());
            assert_eq!(LOCK.matches(&package).count(), 1, "{package}");
            assert!(subject.version().starts_with(|digit: char| digit.is_ascii_digit()), "{package}");
        }
    }
}
