//! A base and what later snapshots changed of it, as dirty logs make them.
//!
//! # Guarantees
//! Each page is that of the last layer that has it, or of the base.
//!
//! # Use
//! Which pages a layer has is told by
//! - a file beside it, `FILE.dirty`, if there is one: a dirty log as KVM returns it, one bit a
//!   page;
//! - otherwise by its holes: Firecracker's diff snapshots are sparse files of full size.
//!
//! Holes say it exactly only where a file system keeps account of them page by page. Larger blocks
//! (huge pages of tmpfs, records of ZFS, network file systems) would make zeros of pages that
//! the layer does not have; such a file is refused without a dirty log.
//! A copy of a layer that filled its holes cannot be told from a layer that has all pages: copy
//! with `cp --sparse=always`, `tar --sparse` or `rsync --sparse`.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::memory_file::MemoryFile;
use super::pages::PageSet;
use super::{Identity, Mapped, PAGE_BYTES, Source, SourceError, check_range};

/// More than a chain of snapshots needs; the time to find a page grows with it.
pub const MOST_LAYERS: usize = 64;

/// A layer: the pages that a snapshot changed.
#[derive(Clone, Debug)]
pub struct Layer {
    source: Arc<dyn Source>,
    pages: PageSet,
}

impl Layer {
    /// A layer that has `pages` of `source`.
    pub fn new(source: Arc<dyn Source>, pages: PageSet) -> Layer {
        Layer { source, pages }
    }

    /// Opens a file of full size; see the module for how it says which pages it has.
    ///
    /// # Errors
    /// It cannot be opened, or does not say which pages it has.
    pub fn open(path: &Path) -> Result<Layer, SourceError> {
        let file = MemoryFile::open(path)?;
        let log = dirty_log(path);
        let malformed = |why: String| SourceError::Malformed { snapshot: path.display().to_string(), why };
        let pages = match std::fs::read(&log) {
            Ok(bytes) => PageSet::from_dirty_log(&bytes, file.size_bytes() / PAGE_BYTES)
                .ok_or_else(|| malformed(format!("{} is no dirty log of its pages", log.display())))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let block_bytes = file.block_bytes()?;
                if block_bytes > PAGE_BYTES {
                    return Err(malformed(format!(
                        "its file system has blocks of {block_bytes} bytes, so holes do not tell which pages it has; \
                         {} would",
                        log.display()
                    )));
                }
                file.data().clone()
            }
            Err(error) => return Err(SourceError::Io { what: format!("read {}", log.display()), error }),
        };
        Ok(Layer { source: Arc::new(file), pages })
    }

    /// The pages that it has.
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }
}

/// The name of the dirty log of a layer.
fn dirty_log(layer: &Path) -> PathBuf {
    let mut name = layer.as_os_str().to_owned();
    name.push(".dirty");
    name.into()
}

/// A base and layers.
#[derive(Debug)]
pub struct Layers {
    base: Arc<dyn Source>,
    /// The first is next to the base.
    layers: Vec<Layer>,
    identity: Identity,
    granule_bytes: u64,
}

impl Layers {
    /// `base` below `layers`, of which the last one counts.
    ///
    /// # Errors
    /// Their sizes differ, or there are more than [`MOST_LAYERS`].
    pub fn new(base: Arc<dyn Source>, layers: Vec<Layer>) -> Result<Layers, SourceError> {
        let malformed = |why: String| SourceError::Malformed { snapshot: "a chain of layers".to_string(), why };
        if layers.len() > MOST_LAYERS {
            return Err(malformed(format!("it has {} layers; {MOST_LAYERS} are possible", layers.len())));
        }
        let size_bytes = base.size_bytes();
        for (number, layer) in layers.iter().enumerate() {
            let (size, nr_pages) = (layer.source.size_bytes(), layer.pages.nr_pages());
            if size != size_bytes || nr_pages != size_bytes / PAGE_BYTES {
                return Err(malformed(format!(
                    "layer {} has {size} bytes and a log of {nr_pages} pages, its base {size_bytes} bytes",
                    number + 1
                )));
            }
        }
        // Of what and of which pages: one file may be a layer by its holes, or by a log.
        let identities: Vec<[u8; 32]> = std::iter::once(*base.identity().as_bytes())
            .chain(layers.iter().flat_map(|layer| [*layer.source.identity().as_bytes(), layer.pages.hash()]))
            .collect();
        let identity = Identity::new("layers", identities.iter().map(|bytes| &bytes[..]));
        let granules = layers.iter().map(|layer| layer.source.granule_bytes());
        let granule_bytes = granules.fold(base.granule_bytes(), u64::max);
        Ok(Layers { base, layers, identity, granule_bytes })
    }

    /// The layer that has the page; `None`: the base has it.
    fn layer_of(&self, page: u64) -> Option<usize> {
        self.layers.iter().rposition(|layer| layer.pages.contains(page))
    }

    fn source(&self, layer: Option<usize>) -> &Arc<dyn Source> {
        layer.map_or(&self.base, |number| &self.layers[number].source)
    }

    /// The first part of `range` that one source has, and that source. `range` is not empty.
    fn first_run(&self, range: Range<u64>) -> (&Arc<dyn Source>, Range<u64>) {
        let layer = self.layer_of(range.start / PAGE_BYTES);
        let mut end = (range.start / PAGE_BYTES + 1) * PAGE_BYTES;
        while end < range.end && self.layer_of(end / PAGE_BYTES) == layer {
            end += PAGE_BYTES;
        }
        (self.source(layer), range.start..end.min(range.end))
    }

    /// The parts of `range` that one source each has.
    fn runs(&self, range: Range<u64>) -> impl Iterator<Item = (&Arc<dyn Source>, Range<u64>)> {
        let mut rest = range;
        std::iter::from_fn(move || {
            let run = (rest.start < rest.end).then(|| self.first_run(rest.clone()))?;
            rest.start = run.1.end;
            Some(run)
        })
    }
}

impl Source for Layers {
    fn size_bytes(&self) -> u64 {
        self.base.size_bytes()
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    fn mapped(&self, range: Range<u64>) -> Option<Mapped<'_>> {
        if range.start >= range.end || range.end > self.size_bytes() {
            return None;
        }
        let (source, run) = self.first_run(range.clone());
        (run == range).then(|| source.mapped(range))?
    }

    fn is_mapped(&self) -> bool {
        self.base.is_mapped() && self.layers.iter().all(|layer| layer.source.is_mapped())
    }

    fn is_zero(&self, range: Range<u64>) -> bool {
        range.end <= self.size_bytes() && self.runs(range).all(|(source, run)| source.is_zero(run))
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.size_bytes())?;
            let mut rest = into;
            // At once: runs that are short would wait for each other.
            let mut reads = Vec::new();
            for (source, run) in self.runs(offset..offset + rest.len() as u64) {
                let (part, behind) = std::mem::take(&mut rest).split_at_mut((run.end - run.start) as usize);
                rest = behind;
                reads.push(source.read(run.start, part));
            }
            futures_util::future::try_join_all(reads).await.map(|_| ())
        }
        .boxed()
    }
}
