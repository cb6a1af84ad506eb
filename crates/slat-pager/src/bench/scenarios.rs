//! What is measured: faults a second, the time of a restore, clones, and many threads that fault.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::guest::{Guest, GuestMemory, Seen, Spec};
use super::report::{Report, Unit};
use super::server::{Desk, Server, cpu_s};
use super::single_pages::SinglePages;
use super::{Bench, snapshot, sources};
use crate::chunks::Location;
use crate::chunks::pack::{PackOptions, pack};
use crate::shared_memory::SharedMemory;
use crate::source::cache::{BlockCache, CacheOptions, Cached};
use crate::source::chunked::Chunked;
use crate::source::memory_file::MemoryFile;
use crate::source::{PAGE_BYTES, Source};
use crate::working_set::Recorder;

/// What the serial reader of an object store reads at a time.
const SERIAL_BYTES: u64 = 256 << 10;
/// The pages of the first work.
const NR_FIRST: usize = 64;

/// What one run of one system gave.
struct Run {
    seen: Seen,
    /// Of the server.
    cpu_s: f64,
}

impl Bench {
    fn spec(&self, desk: &Desk, pages: Vec<u32>, nr_threads: usize) -> Spec {
        let nr_first = NR_FIRST.min(pages.len());
        Spec {
            socket: desk.path().to_owned(),
            size_bytes: self.size_bytes,
            memory: GuestMemory::Anonymous,
            pages,
            nr_threads,
            nr_first,
            write_each: 0,
        }
    }

    fn run_once(&self, desk: &Desk, server: &Server, source: &Arc<dyn Source>, spec: &Spec) -> io::Result<Run> {
        let mut guest = Guest::start(spec)?;
        let before_s = cpu_s();
        let served = desk.serve(&guest, server, source)?;
        let seen = guest.seen()?;
        let cpu_s = cpu_s() - before_s;
        drop(guest);
        served.stop()?;
        Ok(Run { seen, cpu_s })
    }

    fn file(&self) -> io::Result<Arc<dyn Source>> {
        Ok(Arc::new(MemoryFile::open(&self.memory_path()).map_err(io::Error::other)?))
    }

    /// A file of which the page cache has nothing. No other mapping of it is there.
    fn cold_file(&self) -> io::Result<Arc<dyn Source>> {
        snapshot::forget(&self.memory_path())?;
        self.file()
    }

    /// Faults a second: a guest touches each page once, in no order, by several threads.
    pub(super) fn faults(&self, desk: &Desk, nr_guest_threads: usize, report: &mut Report) -> io::Result<()> {
        let scenario = if nr_guest_threads > 100 { "threads" } else { "faults" };
        let systems = [
            ("poll loop, 4 KiB", Server::Loop(PAGE_BYTES)),
            ("slat, 1 thread, 4 KiB", Server::slat(1, PAGE_BYTES)),
            ("slat, 2 threads, 4 KiB", Server::slat(2, PAGE_BYTES)),
            ("slat, 1 thread, 64 KiB", Server::slat(1, 64 << 10)),
        ];
        let file = self.file()?;
        let single: Arc<dyn Source> = Arc::new(SinglePages(Arc::clone(&file)));
        let nr_pages = self.nr_pages();
        for round in 0..self.rounds {
            for (name, server) in &systems {
                self.progress(&format!("{scenario}: {name}, round {}", round + 1));
                let spec = self.spec(desk, snapshot::shuffled(nr_pages), nr_guest_threads);
                let source = if name.ends_with(" 4 KiB") { &single } else { &file };
                let run = self.run_once(desk, server, source, &spec)?;
                let nr_pages = f64::from(nr_pages);
                report.add(scenario, name, "pages a second", Unit::PerSecond, nr_pages / run.seen.whole_s);
                report.add(scenario, name, "pages a CPU second of the server", Unit::PerSecond, nr_pages / run.cpu_s);
                report.add(scenario, name, "longest wait", Unit::Seconds, run.seen.longest_s);
            }
        }
        for (name, _) in &systems[1..] {
            for figure in ["pages a second", "pages a CPU second of the server"] {
                report.compare(scenario, figure, name, systems[0].0);
            }
        }
        Ok(())
    }

    /// A restore: one thread of a guest touches a working set. Until its first work, and all.
    pub(super) fn restores(&self, desk: &Desk, report: &mut Report) -> io::Result<()> {
        let pages = snapshot::working_set(self.nr_pages(), 8);
        let serial = |bytes| Server::Loop(bytes);
        self.restore(desk, "file, cold", || self.cold_file(), &pages, serial(PAGE_BYTES), report)?;
        let chunks = self.runtime.block_on(self.chunks())?;
        let granule_bytes = chunks.granule_bytes();
        self.restore(desk, "chunks", || Ok(Arc::clone(&chunks)), &pages, serial(granule_bytes), report)?;
        let remote = self.runtime.block_on(sources::remote(&self.memory_path())).map_err(io::Error::other)?;
        self.restore(desk, "object store, 20 ms", || Ok(Arc::clone(&remote)), &pages, serial(SERIAL_BYTES), report)
    }

    /// Each run has a source of its own, from `open`. Ours has what the daemon has before a source
    /// that is not mapped: a cache, which is empty.
    fn restore(
        &self,
        desk: &Desk,
        what: &str,
        open: impl Fn() -> io::Result<Arc<dyn Source>>,
        pages: &[u32],
        serial: Server,
        report: &mut Report,
    ) -> io::Result<()> {
        const GRANULE: u64 = 64 << 10;
        let scenario = format!("restore from {what}");
        let spec = self.spec(desk, pages.to_vec(), 1);
        let source = behind_cache(open()?)?;
        let around = GRANULE.max(source.granule_bytes());
        let recorder = Recorder::new(source.identity(), source.size_bytes(), around, u64::MAX);
        let recorder = Arc::new(recorder.ok_or(io::ErrorKind::InvalidInput)?);
        let recording = Server::Slat {
            nr_threads: 1,
            granule_bytes: GRANULE,
            replay: None,
            record: Some(Arc::clone(&recorder)),
            shared: None,
        };
        self.run_once(desk, &recording, &source, &spec)?;
        drop(source);
        let replaying = Server::Slat {
            nr_threads: 1,
            granule_bytes: GRANULE,
            replay: Some(Arc::new(recorder.working_set())),
            record: None,
            shared: None,
        };
        let loop_name = format!(
            "poll loop, {} KiB",
            match serial {
                Server::Loop(bytes) => bytes >> 10,
                Server::Slat { .. } => 0,
            }
        );
        let systems =
            [(&loop_name[..], serial), ("slat", Server::slat(1, GRANULE)), ("slat, working set replayed", replaying)];
        for round in 0..self.rounds {
            for (name, server) in &systems {
                self.progress(&format!("{scenario}: {name}, round {}", round + 1));
                let source = match server {
                    Server::Loop(_) => open()?,
                    Server::Slat { .. } => behind_cache(open()?)?,
                };
                let run = self.run_once(desk, server, &source, &spec)?;
                report.add(&scenario, name, "time to first work", Unit::Seconds, run.seen.first_s);
                report.add(&scenario, name, "time to the whole working set", Unit::Seconds, run.seen.whole_s);
            }
        }
        for (name, _) in &systems[1..] {
            for figure in ["time to first work", "time to the whole working set"] {
                report.compare(&scenario, figure, systems[0].0, name);
            }
        }
        Ok(())
    }

    async fn chunks(&self) -> io::Result<Arc<dyn Source>> {
        let name = self.folder().join("chunks/memory.index");
        let at = Location::create(&name.to_string_lossy(), &[]).map_err(io::Error::other)?;
        let file = self.file()?;
        pack(&file, &at, &PackOptions::default(), |_| {}).await.map_err(io::Error::other)?;
        Ok(Arc::new(Chunked::open(at).await.map_err(io::Error::other)?))
    }

    /// Clones of one snapshot at once: the time until all have their working sets, and the memory
    /// of each.
    pub(super) fn clones(&self, desk: &Desk, nr_clones: usize, report: &mut Report) -> io::Result<()> {
        let scenario = format!("{nr_clones} clones");
        let file: Arc<dyn Source> = Arc::new(SinglePages(self.file()?));
        let pages = snapshot::working_set(self.nr_pages(), 16);
        let systems = ["poll loop, copies", "slat, copies", "slat, shared pages"];
        for round in 0..self.rounds {
            for name in systems {
                self.progress(&format!("{scenario}: {name}, round {}", round + 1));
                let mut spec = Spec { write_each: 10, ..self.spec(desk, pages.clone(), 1) };
                let mut shared_bytes = 0;
                let server = match name {
                    "poll loop, copies" => Server::Loop(PAGE_BYTES),
                    "slat, copies" => Server::slat(1, PAGE_BYTES),
                    _ => {
                        let memory = SharedMemory::new("clones", 0, Arc::clone(&file))?;
                        let path = format!("/proc/{}/fd/{}", std::process::id(), descriptor(&memory));
                        spec.memory = GuestMemory::Private(PathBuf::from(path));
                        let memory = Arc::new(memory);
                        Server::Slat {
                            nr_threads: 1,
                            granule_bytes: PAGE_BYTES,
                            replay: None,
                            record: None,
                            shared: Some(memory),
                        }
                    }
                };
                let mut clones = Vec::new();
                for _ in 0..nr_clones {
                    let guest = Guest::start(&spec)?;
                    let served = desk.serve(&guest, &server, &file)?;
                    clones.push((guest, served));
                }
                let mut own_bytes = 0;
                let mut longest_s = 0_f64;
                for (guest, _) in &mut clones {
                    let seen = guest.seen()?;
                    own_bytes += seen.own_bytes;
                    longest_s = longest_s.max(seen.whole_s);
                }
                if let Server::Slat { shared: Some(memory), .. } = &server {
                    shared_bytes = memory.present_bytes();
                }
                for (guest, served) in clones {
                    drop(guest);
                    served.stop()?;
                }
                let nr = nr_clones as f64;
                let each_bytes = (own_bytes + shared_bytes) as f64 / nr;
                report.add(&scenario, name, "memory of each", Unit::Bytes, each_bytes);
                report.add(&scenario, name, "longest time to its working set", Unit::Seconds, longest_s);
            }
        }
        report.compare(&scenario, "memory of each", systems[0], systems[2]);
        report.compare(&scenario, "longest time to its working set", systems[0], systems[2]);
        Ok(())
    }
}

fn behind_cache(source: Arc<dyn Source>) -> io::Result<Arc<dyn Source>> {
    if source.is_mapped() {
        return Ok(source);
    }
    let cache = BlockCache::new(&CacheOptions::default()).map_err(io::Error::other)?;
    Ok(Arc::new(Cached::new(source, cache)))
}

fn descriptor(memory: &SharedMemory) -> i32 {
    use std::os::fd::{AsFd, AsRawFd};
    memory.as_fd().as_raw_fd()
}
