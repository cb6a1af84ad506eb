//! What sources cost: the figures by which their defaults were chosen.
//!
//! Reads are of random places, each once, some at once. A file is read from the page cache, and
//! from the disk; chunks of several sizes and levels; an object store that takes 20 ms for each
//! request.

use std::fmt::{self, Display, Formatter};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use serde::Serialize;

use super::server::cpu_s;
use super::snapshot::{forget, shuffled};
use crate::chunks::Location;
use crate::chunks::pack::{PackOptions, pack};
use crate::chunks::verify::measure;
use crate::source::chunked::Chunked;
use crate::source::memory_file::MemoryFile;
use crate::source::objects::Objects;
use crate::source::remote::RemoteFile;
use crate::source::{Source, SourceError};

/// The latency of the object store.
const LATENCY: Duration = Duration::from_millis(20);
/// Reads of one measurement at most.
const MOST_READS: usize = 2048;

/// Reads of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct SourceFigure {
    /// What is read, and how.
    pub what: String,
    /// Bytes of one read.
    pub read_bytes: u64,
    /// How many are under way.
    pub nr_at_once: usize,
    /// How many there were.
    pub nr_reads: usize,
    /// Seconds that all took.
    pub wall_s: f64,
    /// Seconds of CPU that all took.
    pub cpu_s: f64,
}

impl Display for SourceFigure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let nr_reads = self.nr_reads as f64;
        write!(
            f,
            "{:<44} {:>5} KiB x {:<3} {:>10.1} us each {:>9.1} us CPU {:>8.1} MiB/s",
            self.what,
            self.read_bytes >> 10,
            self.nr_at_once,
            self.wall_s * 1e6 / nr_reads,
            self.cpu_s * 1e6 / nr_reads,
            self.read_bytes as f64 * nr_reads / self.wall_s / f64::from(1 << 20),
        )
    }
}

/// Measures all, with the memory file at `memory` and files of its own in `folder`; each figure is
/// given to `found`.
///
/// # Errors
/// A file cannot be read or written.
pub async fn run(memory: &Path, folder: &Path, mut found: impl FnMut(SourceFigure)) -> Result<(), SourceError> {
    for read_bytes in [4 << 10, 64 << 10, 256 << 10] {
        for nr_at_once in [1, 8, 32] {
            let file: Arc<dyn Source> = Arc::new(MemoryFile::open(memory)?);
            forget(memory).map_err(|error| SourceError::Io { what: format!("forget {}", memory.display()), error })?;
            found(reads("file on disk", &file, read_bytes, nr_at_once).await?);
            // All that this reads was read just now, or is near to it.
            reads("", &file, 1 << 20, 4).await?;
            found(reads("file in the page cache", &file, read_bytes, nr_at_once).await?);
        }
    }
    let file: Arc<dyn Source> = Arc::new(MemoryFile::open(memory)?);
    for (chunk_bytes, level) in
        [(64 << 10, 1), (128 << 10, 1), (512 << 10, -1), (512 << 10, 1), (512 << 10, 3), (2 << 20, 1)]
    {
        let name = folder.join(format!("{chunk_bytes}.{level}/vm.index"));
        let to = Location::create(&name.to_string_lossy(), &[])?;
        let options = PackOptions { chunk_bytes, level, ..PackOptions::default() };
        let begun = Begun::now();
        pack(&file, &to, &options, |_| {}).await?;
        let nr_chunks = file.size_bytes().div_ceil(chunk_bytes) as usize;
        let index = to.read_index().await?;
        let hundredths = measure(&to, &index).await?.stored_bytes * 100 / file.size_bytes();
        let what = format!("pack, level {level}: {hundredths}% of the size");
        found(begun.figure(&what, chunk_bytes, options.nr_parallel, nr_chunks));
        let chunked: Arc<dyn Source> = Arc::new(Chunked::open(to).await?);
        let what = format!("chunks of {} KiB, level {level}", chunk_bytes >> 10);
        for nr_at_once in [1, 8] {
            found(reads(&what, &chunked, chunk_bytes, nr_at_once).await?);
        }
    }
    let remote = remote(memory).await?;
    for (read_bytes, nr_at_once) in
        [(256 << 10, 1), (256 << 10, 16), (1 << 20, 1), (1 << 20, 16), (1 << 20, 64), (4 << 20, 1), (4 << 20, 16)]
    {
        found(reads("object store, 20 ms a request", &remote, read_bytes, nr_at_once).await?);
    }
    Ok(())
}

/// Reads places of `read_bytes` in an order of their own.
async fn reads(
    what: &str,
    source: &Arc<dyn Source>,
    read_bytes: u64,
    nr_at_once: usize,
) -> Result<SourceFigure, SourceError> {
    let nr_places = u32::try_from(source.size_bytes() / read_bytes).unwrap_or(u32::MAX);
    let places: Vec<u32> = shuffled(nr_places).into_iter().take(MOST_READS).collect();
    let nr_reads = places.len();
    let begun = Begun::now();
    let mut reads = futures_util::stream::iter(places)
        .map(|place| {
            let source = Arc::clone(source);
            // Each is a task: so a pager reads.
            tokio::spawn(async move {
                let mut bytes = vec![0; read_bytes as usize];
                source.read(u64::from(place) * read_bytes, &mut bytes).await
            })
        })
        .buffer_unordered(nr_at_once);
    while let Some(read) = reads.next().await {
        read.map_err(|error| SourceError::Io { what: "read".to_string(), error: std::io::Error::other(error) })??;
    }
    drop(reads);
    Ok(begun.figure(what, read_bytes, nr_at_once, nr_reads))
}

/// When something began, by the clock and in CPU time of this process.
struct Begun {
    at: Instant,
    cpu_s: f64,
}

impl Begun {
    fn now() -> Begun {
        Begun { at: Instant::now(), cpu_s: cpu_s() }
    }

    fn figure(&self, what: &str, read_bytes: u64, nr_at_once: usize, nr_reads: usize) -> SourceFigure {
        let (wall_s, cpu_s) = (self.at.elapsed().as_secs_f64(), cpu_s() - self.cpu_s);
        SourceFigure { what: what.to_string(), read_bytes, nr_at_once, nr_reads, wall_s, cpu_s }
    }
}

/// The memory file at `memory` in an object store that takes [`LATENCY`] for each request.
pub(super) async fn remote(memory: &Path) -> Result<Arc<dyn Source>, SourceError> {
    let bytes =
        std::fs::read(memory).map_err(|error| SourceError::Io { what: format!("read {}", memory.display()), error })?;
    let config = ThrottleConfig { wait_get_per_call: LATENCY, ..ThrottleConfig::default() };
    let objects = Objects::new(Arc::new(ThrottledStore::new(InMemory::new(), config)), "memory with 20 ms");
    objects.put(&"mem".into(), Bytes::from(bytes)).await?;
    Ok(Arc::new(RemoteFile::open(objects, "mem".into()).await?))
}
