//! Blocks in files of a folder.
//!
//! # Implementation
//! `XX/IDENTITY` is a block, where XX are the first two digits. A file begins with a header:
//! `slatblk1`, the block's identity (32 bytes), the number of its bytes (8, little-endian), their
//! BLAKE3 hash (32). It is written under a name that ends in `.new` and renamed. No file is
//! synchronised: what a crash tears does not have its hash.
//!
//! Which files there are is kept in a table, which chooses what is evicted. A file may be gone
//! while the table has it (an eviction that raced with a write); then its block is fetched again.
//!
//! The folder is locked (flock(2)) while a process uses it. The lock ends with the process.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use quick_cache::sync::Cache;
use quick_cache::{DefaultHashBuilder, Lifecycle, Weighter};
use tokio::sync::Semaphore;

use super::{Counters, table};
use crate::folder_lock::lock_folder;
use crate::source::{Identity, SourceError};

const MAGIC: [u8; 8] = *b"slatblk1";
const HEADER_BYTES: usize = 80;
/// How many files are written at once. Blocks that come faster than the disk takes them are not
/// kept on it.
const MOST_WRITES: u32 = 8;
const NEW_SUFFIX: &str = ".new";

/// The files of a cache.
#[derive(Debug)]
pub(super) struct DiskCache {
    folder: PathBuf,
    /// Holds the lock.
    _lock: File,
    files: Cache<Identity, FileBytes, ByBytes, DefaultHashBuilder, Evictions>,
    writes: Arc<Semaphore>,
    counters: Arc<Counters>,
}

/// How many bytes a file has.
#[derive(Clone, Copy, Debug)]
struct FileBytes(u64);

#[derive(Clone, Debug)]
struct ByBytes;

impl Weighter<Identity, FileBytes> for ByBytes {
    fn weight(&self, _block: &Identity, bytes: &FileBytes) -> u64 {
        bytes.0
    }
}

/// Collects what an insertion evicts, so that its files are deleted afterwards and not under a
/// lock.
#[derive(Clone, Debug)]
struct Evictions;

impl Lifecycle<Identity, FileBytes> for Evictions {
    type RequestState = Vec<Identity>;

    fn on_evict(&self, evicted: &mut Vec<Identity>, block: Identity, _bytes: FileBytes) {
        evicted.push(block);
    }
}

impl DiskCache {
    /// The files of a folder, which is made if it is not there. The oldest are evicted if they are
    /// more than `most_bytes`.
    pub(super) fn open(folder: &Path, most_bytes: u64, counters: Arc<Counters>) -> Result<DiskCache, SourceError> {
        let failed = |error: io::Error| SourceError::Io { what: format!("use the cache {}", folder.display()), error };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let lock = lock_folder(folder)?;
        let cache = DiskCache {
            folder: folder.to_path_buf(),
            _lock: lock,
            files: table(most_bytes, ByBytes, Evictions),
            writes: Arc::new(Semaphore::new(MOST_WRITES as usize)),
            counters,
        };
        let mut found = Vec::new();
        for prefix in fs::read_dir(folder).map_err(failed)? {
            let prefix = prefix.map_err(failed)?.path();
            if prefix.is_dir() {
                cache.scan(&prefix, &mut found).map_err(failed)?;
            }
        }
        // The last ones stay.
        found.sort_by_key(|(_, _, written)| *written);
        for (block, nr_bytes, _) in found {
            cache.note(block, nr_bytes);
        }
        Ok(cache)
    }

    /// Finds blocks, and deletes what a process left that died while it wrote.
    fn scan(&self, prefix: &Path, found: &mut Vec<(Identity, u64, std::time::SystemTime)>) -> io::Result<()> {
        for entry in fs::read_dir(prefix)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if let Some(block) = identity_of(&name) {
                let about = entry.metadata()?;
                found.push((block, about.len(), about.modified()?));
            } else if name.strip_suffix(NEW_SUFFIX).and_then(identity_of).is_some() {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    pub(super) fn nr_bytes(&self) -> u64 {
        self.files.weight()
    }

    /// The block; `None` if it is not there, or not what was written.
    pub(super) async fn read(self: &Arc<Self>, block: Identity, nr_bytes: usize) -> Option<Bytes> {
        self.files.get(&block)?;
        let cache = Arc::clone(self);
        tokio::task::spawn_blocking(move || cache.read_file(block, nr_bytes)).await.ok()?
    }

    fn read_file(&self, block: Identity, nr_bytes: usize) -> Option<Bytes> {
        let path = self.path(&block);
        let error = match read_checked(&path, &block, nr_bytes) {
            Ok(bytes) => return Some(bytes),
            Err(error) => error,
        };
        self.files.remove(&block);
        if error.kind() != io::ErrorKind::NotFound {
            self.counters.nr_corrupt.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(file = %path.display(), %error, "a file of the cache is corrupt; its block is fetched again");
            let _ = fs::remove_file(&path);
        }
        None
    }

    /// Writes the block when there is time, if the disk is not behind already.
    pub(super) fn write_later(self: &Arc<Self>, block: Identity, bytes: Bytes) {
        let Ok(permit) = Arc::clone(&self.writes).try_acquire_owned() else {
            self.counters.nr_not_written.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let cache = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            match cache.write_file(&block, &bytes) {
                Ok(()) => cache.note(block, (HEADER_BYTES + bytes.len()) as u64),
                Err(error) => {
                    cache.counters.nr_not_written.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(folder = %cache.folder.display(), %error, "a block is not kept on the disk");
                }
            }
            // Once the writes have ended, another cache may open the folder.
            drop(cache);
            drop(permit);
        });
    }

    pub(super) async fn finish_writes(&self) {
        let _all = self.writes.acquire_many(MOST_WRITES).await.expect("it is never closed");
    }

    fn write_file(&self, block: &Identity, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(block);
        let new = new_name(&path);
        let write = |bytes: &[&[u8]]| -> io::Result<()> {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            bytes.iter().try_for_each(|part| file.write_all(part))
        };
        let prefix = path.parent().expect("it is in a folder");
        match fs::DirBuilder::new().mode(0o700).create(prefix) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let result = write(&[&header(block, bytes), bytes]).and_then(|()| fs::rename(&new, &path));
        if result.is_err() {
            let _ = fs::remove_file(&new);
        }
        result
    }

    /// Adds a file to the table, and deletes those that are evicted for it.
    fn note(&self, block: Identity, nr_bytes: u64) {
        let mut evicted = Vec::new();
        self.files.insert_with_lifecycle(block, FileBytes(nr_bytes), &mut evicted);
        for block in evicted {
            let _ = fs::remove_file(self.path(&block));
        }
    }

    fn path(&self, block: &Identity) -> PathBuf {
        let name = block.to_string();
        self.folder.join(&name[..2]).join(name)
    }
}

/// The name under which a file is written.
fn new_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(NEW_SUFFIX);
    name.into()
}

/// The identity that a file is named for.
fn identity_of(name: &str) -> Option<Identity> {
    let identity = Identity::from_bytes(blake3::Hash::from_hex(name).ok()?.into());
    // Upper case is no name of ours.
    Some(identity).filter(|identity| identity.to_string() == name)
}

fn header(block: &Identity, bytes: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..40].copy_from_slice(block.as_bytes());
    header[40..48].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    header[48..].copy_from_slice(blake3::hash(bytes).as_bytes());
    header
}

/// The block in a file, if it is that.
fn read_checked(path: &Path, block: &Identity, nr_bytes: usize) -> io::Result<Bytes> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
    let mut file = File::open(path)?;
    if file.metadata()?.len() != (HEADER_BYTES + nr_bytes) as u64 {
        return Err(wrong("its length is wrong"));
    }
    let mut bytes = vec![0; HEADER_BYTES + nr_bytes];
    file.read_exact(&mut bytes)?;
    let (found, content) = bytes.split_at(HEADER_BYTES);
    if found != header(block, content) {
        return Err(wrong("its header or its bytes are wrong"));
    }
    Ok(Bytes::from(bytes).slice(HEADER_BYTES..))
}
