//! The measured crates: their versions and their operations.

use super::operation::Operation;

/// A crate with page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subject {
    Slat,
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
        Subject::Axaddrspace,
        Subject::PageTableGeneric,
        #[cfg(target_arch = "x86_64")]
        Subject::PageTableMultiarch,
        Subject::X86_64,
        Subject::Aarch64Paging,
    ];

    /// The crate's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Subject::Slat => "slat",
            Subject::Axaddrspace => "axaddrspace",
            Subject::PageTableGeneric => "page-table-generic",
            #[cfg(target_arch = "x86_64")]
            Subject::PageTableMultiarch => "page_table_multiarch",
            Subject::X86_64 => "x86_64",
            Subject::Aarch64Paging => "aarch64-paging",
        }
    }

    /// The crate's version. A build does not know the versions of its dependencies; a test compares
    /// these with the lock file.
    pub(crate) fn version(self) -> &'static str {
        match self {
            Subject::Slat => env!("CARGO_PKG_VERSION"),
            Subject::Axaddrspace => "0.6.0",
            Subject::PageTableGeneric => "0.9.1",
            #[cfg(target_arch = "x86_64")]
            Subject::PageTableMultiarch => "0.6.2",
            Subject::X86_64 => "0.15.5",
            Subject::Aarch64Paging => "0.12.3",
        }
    }

    /// Whether it has this operation. Only `axaddrspace` has the path of a fault; it leaves the
    /// rest to its tables, which are those of `page-table-generic` here. Two of the others cannot
    /// split.
    pub(crate) fn can(self, operation: Operation) -> bool {
        match self {
            Subject::Slat => true,
            Subject::Axaddrspace => operation == Operation::Fault,
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

    /// Versions of the crate `name` in the lock file.
    fn locked(lock: &str, name: &str) -> Vec<String> {
        let package = format!("name = \"{name}\"\nversion = \"");
        let version =
            |(at, _): (usize, &str)| lock[at + package.len()..].split('"').next().unwrap_or_default().to_owned();
        lock.match_indices(&package).map(version).collect()
    }

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock")).unwrap();
        for subject in Subject::ALL {
            assert_eq!(locked(&lock, subject.name()), [subject.version()], "{}", subject.name());
        }
    }
}
