//! Snapshots as chunks: equal ones are stored once, and compressed.
//!
//! # Guarantees
//! - A snapshot is there with all its chunks, or not at all: its index is stored last.
//! - A chunk is checked against its name when it is read, and an index against its own checksum.
//!   What does not fit is an error, and no byte of it is used.
//! - Chunks are never changed. Many snapshots share a store; packing one takes nothing from
//!   another.
//!
//! # Use
//! A store is a folder, or a prefix in an object store. It has
//! - `NAME.index`: a snapshot (any number of them);
//! - `chunks/XX/HASH`: the chunks of all its snapshots, where HASH is the BLAKE3 hash of the
//!   chunk's bytes in hexadecimal digits, and XX its first two.
//!
//! # The format, version 1
//! Numbers are little-endian. An index is, in this order:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `slat-idx` |
//! | 4 | version: 1 |
//! | 4 | bytes of a chunk: a power of two from 64 KiB to 2 MiB |
//! | 8 | bytes of the snapshot: whole pages of 4 KiB |
//! | 32 | BLAKE3 hash of the 24 bytes before it and of the table after it |
//! | 32 each | the table: the hash of each chunk in order; zeros for a chunk of zeros |
//!
//! A chunk of zeros is not stored. The last chunk is shorter if the snapshot ends in it. A stored
//! chunk is:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | `slck` |
//! | 1 | encoding: 0 as it is, 1 Zstandard (one frame) |
//! | 3 | zero |
//! | rest | the chunk |

pub mod body;
pub mod index;
pub mod pack;
pub mod verify;

use std::path::Path as FilePath;

use object_store::path::Path;
use url::Url;

use crate::source::objects::{Objects, without_secrets};
use crate::source::{SourceError, blocking};
use index::{Hash, Index};

/// What the name of an index ends in.
pub const INDEX_SUFFIX: &str = ".index";

/// Where a snapshot of chunks is: a store, and its index there.
#[derive(Clone, Debug)]
pub struct Location {
    objects: Objects,
    index: Path,
    chunks: Path,
    /// The folder, if the store is one.
    folder: Option<std::path::PathBuf>,
}

impl Location {
    /// As [`Location::open`]; a folder is made if it is not there.
    ///
    /// # Errors
    /// As there; the folder cannot be made.
    pub fn create(name: &str, options: &[(String, String)]) -> Result<Location, SourceError> {
        let folder = FilePath::new(name).parent().filter(|_| !name.contains("://") && name.ends_with(INDEX_SUFFIX));
        if let Some(folder) = folder {
            let failed = |error| SourceError::Io { what: format!("make the folder {}", folder.display()), error };
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        Location::open(name, options)
    }

    /// The index `NAME.index` at a path of files or a URL; the chunks are beside it. `options` are
    /// those of [`Objects::open`].
    ///
    /// # Errors
    /// The name does not end in `.index`; the store cannot be used.
    pub fn open(name: &str, options: &[(String, String)]) -> Result<Location, SourceError> {
        let malformed = |why: String| SourceError::Malformed { snapshot: without_secrets(name), why };
        if !name.ends_with(INDEX_SUFFIX) {
            return Err(malformed(format!("the name of an index ends in {INDEX_SUFFIX}")));
        }
        let (objects, index, folder) = match name.contains("://") {
            true => {
                let url = Url::parse(name).map_err(|error| malformed(error.to_string()))?;
                let (objects, path) = Objects::open(&url, options)?;
                (objects, path, None)
            }
            false => {
                let path = FilePath::new(name);
                let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
                let folder = match path.parent() {
                    Some(folder) if !folder.as_os_str().is_empty() => folder,
                    _ => FilePath::new("."),
                };
                let index = Path::parse(file).map_err(|error| malformed(error.to_string()))?;
                (Objects::folder(folder)?, index, Some(folder.to_path_buf()))
            }
        };
        Ok(Location { folder, ..Location::new(objects, index) })
    }

    /// The index at `index`, the chunks beside it.
    pub fn new(objects: Objects, index: Path) -> Location {
        let mut parts: Vec<_> = index.parts().collect();
        parts.pop();
        parts.push("chunks".into());
        let chunks = parts.into_iter().collect();
        Location { objects, index, chunks, folder: None }
    }

    /// What errors call it.
    pub fn name(&self) -> String {
        format!("{}/{}", self.objects.name(), self.index)
    }

    /// Reads the index.
    ///
    /// # Errors
    /// There is none, or it is none; the store does not answer.
    pub async fn read_index(&self) -> Result<Index, SourceError> {
        let bytes = self.objects.get(&self.index, index::MOST_BYTES).await?;
        Index::decode(&bytes).map_err(|why| SourceError::Malformed { snapshot: self.name(), why: why.to_string() })
    }

    /// Reads a chunk that has `nr_bytes` bytes and the hash.
    ///
    /// # Errors
    /// It is not there, or is another one; the store does not answer.
    pub async fn read_chunk(&self, hash: Hash, nr_bytes: usize) -> Result<Vec<u8>, SourceError> {
        let path = self.chunk_path(&hash);
        let stored = self.objects.get(&path, body::most_stored_bytes(nr_bytes)).await?;
        let decoded = blocking("decode a chunk", move || body::decode(&stored, &hash, nr_bytes)).await?;
        decoded.map_err(|why| SourceError::Malformed {
            snapshot: format!("the chunk {}/{path}", self.objects.name()),
            why: why.to_string(),
        })
    }

    fn chunk_path(&self, hash: &Hash) -> Path {
        let name = hash.to_string();
        self.chunks.clone().join(&name[..2]).join(name.as_str())
    }
}
