//! The file of a working set, beside the snapshot.
//!
//! # Layout
//! All numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `SLATWSET` |
//! | 4 | the version, 1 |
//! | 4 | zero |
//! | 32 | the identity of the snapshot |
//! | 8 | how many bytes the snapshot has |
//! | 8 | how many bytes a fault fills around its page |
//! | 8 | how many pages follow |
//! | 4 each | the numbers of pages, in the order of first touch |
//! | 32 | blake3 of all bytes before |
//!
//! A file that is not exactly so is refused; a file of another snapshot is not an error but no
//! working set of this one.

use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use thiserror::Error;

use crate::little_endian::{u32_at, u64_at};
use crate::source::{Identity, PAGE_BYTES};

const MAGIC: [u8; 8] = *b"SLATWSET";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 72;
const CHECKSUM_BYTES: usize = 32;
/// The longest file that is read: about 16 million pages.
const FILE_BYTES: u64 = 64 << 20;

/// Pages that a VM touches first after a restore.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkingSet {
    /// Of the snapshot.
    pub identity: Identity,
    /// How many bytes the snapshot has.
    pub size_bytes: u64,
    /// How many bytes a fault filled around its page, aligned to them: a power of two.
    pub around_bytes: u64,
    /// The numbers of pages, in the order of first touch.
    pub pages: Vec<u32>,
}

/// Why a file is no working set.
#[derive(Debug, Error)]
pub enum FormatError {
    /// It cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is something else, or damaged.
    #[error("not a working set: {0}")]
    Malformed(&'static str),
    /// A later version wrote it.
    #[error("a working set of version {0}, and this pager knows version {VERSION}")]
    Version(u32),
}

impl WorkingSet {
    /// The bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + 4 * self.pages.len() + CHECKSUM_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.identity.as_bytes());
        for number in [self.size_bytes, self.around_bytes, self.pages.len() as u64] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.pages.iter().flat_map(|page| page.to_le_bytes()));
        bytes.extend(blake3::hash(&bytes).as_bytes());
        bytes
    }

    /// What [`WorkingSet::to_bytes`] made.
    ///
    /// # Errors
    /// Bytes that are not exactly so.
    pub fn from_bytes(bytes: &[u8]) -> Result<WorkingSet, FormatError> {
        let malformed = FormatError::Malformed;
        let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(malformed("it is too short"))?;
        if head[..8] != MAGIC {
            return Err(malformed("it begins otherwise"));
        }
        match u32_at(head, 8) {
            VERSION => {}
            version => return Err(FormatError::Version(version)),
        }
        let (pages, checksum) = rest.split_last_chunk::<CHECKSUM_BYTES>().ok_or(malformed("it is too short"))?;
        if blake3::hash(&bytes[..bytes.len() - CHECKSUM_BYTES]) != *checksum {
            return Err(malformed("its checksum is another"));
        }
        let mut identity = [0; 32];
        identity.copy_from_slice(&head[16..48]);
        let [size_bytes, around_bytes, nr_pages] = [48, 56, 64].map(|at| u64_at(head, at));
        let (pages, []) = pages.as_chunks::<4>() else { return Err(malformed("it ends inside a page's number")) };
        if pages.len() as u64 != nr_pages || u32_at(head, 12) != 0 {
            return Err(malformed("its head disagrees with it"));
        }
        if !around_bytes.is_power_of_two() || around_bytes < PAGE_BYTES {
            return Err(malformed("it has no granule"));
        }
        let pages: Vec<u32> = pages.iter().map(|page| u32::from_le_bytes(*page)).collect();
        if pages.iter().any(|page| u64::from(*page) >= size_bytes.div_ceil(PAGE_BYTES)) {
            return Err(malformed("it has pages behind the end of the snapshot"));
        }
        Ok(WorkingSet { identity: Identity::from_bytes(identity), size_bytes, around_bytes, pages })
    }

    /// Writes it to `path`; what was there is replaced at once, or stays. Of several at once the
    /// last one stays.
    ///
    /// # Errors
    /// Of the file system.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // As other files are made: the umask decides. A name of its own: VMs of one snapshot end together.
        let mut file = tempfile::Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder)?;
        file.write_all(&self.to_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    }

    /// Reads the working set of the snapshot `identity` from `path`. `None`: no file, or that of
    /// another snapshot.
    ///
    /// # Errors
    /// A file that cannot be read, or is no working set.
    pub fn load(path: &Path, identity: Identity) -> Result<Option<WorkingSet>, FormatError> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(FILE_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > FILE_BYTES {
            return Err(FormatError::Malformed("it is too long"));
        }
        let set = WorkingSet::from_bytes(&bytes)?;
        Ok(Some(set).filter(|set| set.identity == identity))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set() -> WorkingSet {
        WorkingSet {
            identity: Identity::from_bytes([7; 32]),
            size_bytes: 1 << 20,
            around_bytes: 1 << 16,
            pages: vec![3, 1, 255],
        }
    }

    #[test]
    fn it_is_kept_by_the_identity_of_the_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory.working-set");
        assert!(WorkingSet::load(&path, set().identity).unwrap().is_none());
        set().save(&path).unwrap();
        assert_eq!(WorkingSet::load(&path, set().identity).unwrap(), Some(set()));
        assert_eq!(WorkingSet::load(&path, Identity::from_bytes([8; 32])).unwrap(), None);
        // Nothing is left beside it.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn sets_that_are_saved_at_once_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory.working-set");
        std::thread::scope(|scope| {
            for first in 0..8 {
                let path = &path;
                let set = WorkingSet { pages: (first..200 + first).collect(), ..set() };
                scope.spawn(move || (0..20).for_each(|_| set.save(path).unwrap()));
            }
        });
        assert_eq!(WorkingSet::load(&path, set().identity).unwrap().unwrap().pages.len(), 200);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn each_damaged_byte_and_each_truncation_is_noticed() {
        let bytes = set().to_bytes();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(WorkingSet::from_bytes(&damaged).is_err(), "byte {at}");
            assert!(WorkingSet::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
        }
        assert!(WorkingSet::from_bytes(&[bytes, vec![0]].concat()).is_err());
    }

    #[test]
    fn pages_behind_the_end_are_refused_though_the_checksum_is_right() {
        let behind = WorkingSet { pages: vec![256], ..set() };
        assert!(matches!(WorkingSet::from_bytes(&behind.to_bytes()), Err(FormatError::Malformed(_))));
        let odd = WorkingSet { around_bytes: 12288, ..set() };
        assert!(matches!(WorkingSet::from_bytes(&odd.to_bytes()), Err(FormatError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
            prop_assert!(WorkingSet::from_bytes(&bytes).is_err());
        }

        #[test]
        fn what_is_written_is_read(pages in prop::collection::vec(0..256_u32, 0..100)) {
            let set = WorkingSet { pages, ..set() };
            prop_assert_eq!(WorkingSet::from_bytes(&set.to_bytes()).unwrap(), set);
        }
    }
}
