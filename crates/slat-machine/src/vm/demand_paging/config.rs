//! The configuration of a run of demand paging, and its check.

use std::fmt;
use std::str::FromStr;

use slat::{Gfn, PAGE_SIZE, PageSize};
use slat_pager::source::requests::MAX_IN_FLIGHT;
use thiserror::Error;

use crate::hardware::commit::FlushMethod;
use crate::hardware::tlb::Geometry;
use crate::linux::topology;
use crate::memory::{BackingKind, MemoryError};
use crate::paging::{Copier, Pattern};
use crate::vm::guest::Sharing;
use crate::vm::machine::{MAX_VCPUS, Pins};

/// What detects a missing page, and what delivers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PagingMode {
    /// Nothing: the memory is there, and a fault maps a page of it.
    #[default]
    None,
    /// The kernel: a userfaultfd, whose readers copy the page in.
    Missing,
    /// The kernel: a userfaultfd, whose readers write the page through another mapping of the file,
    /// and have it mapped.
    Minor,
    /// The engine: the vCPU exits, and its thread fetches the page and puts it in place.
    Userfault,
    /// The engine; the userfaultfd's copy puts the page in place, and wakes no thread. The
    /// descriptor's readers serve other accesses to the memory.
    MissingUserfault,
    /// As above, with a page that is written through another mapping.
    MinorUserfault,
    /// The engine; the vCPU requests the page by a ring in shared memory, and a resolver elsewhere
    /// delivers it.
    UserfaultRing,
}

impl PagingMode {
    /// Whether there is a userfaultfd.
    pub const fn uses_userfaultfd(self) -> bool {
        matches!(
            self,
            PagingMode::Missing | PagingMode::Minor | PagingMode::MissingUserfault | PagingMode::MinorUserfault
        )
    }

    /// Whether vCPUs exit, by the engine's bitmap.
    pub const fn uses_bitmap(self) -> bool {
        matches!(
            self,
            PagingMode::Userfault
                | PagingMode::MissingUserfault
                | PagingMode::MinorUserfault
                | PagingMode::UserfaultRing
        )
    }

    /// Whether a vCPU's thread sleeps in the kernel until its page is there.
    const fn blocks_threads(self) -> bool {
        matches!(self, PagingMode::Missing | PagingMode::Minor)
    }

    /// Whether pages are written through another mapping of the same file.
    pub(super) const fn is_minor(self) -> bool {
        matches!(self, PagingMode::Minor | PagingMode::MinorUserfault)
    }

    /// Whether threads of this process fetch pages for their vCPUs.
    pub(super) const fn vcpus_fetch(self) -> bool {
        matches!(self, PagingMode::Userfault | PagingMode::MissingUserfault | PagingMode::MinorUserfault)
    }
}

impl fmt::Display for PagingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PagingMode::None => "none",
            PagingMode::Missing => "missing",
            PagingMode::Minor => "minor",
            PagingMode::Userfault => "uf",
            PagingMode::MissingUserfault => "missing+uf",
            PagingMode::MinorUserfault => "minor+uf",
            PagingMode::UserfaultRing => "uf-ring",
        })
    }
}

/// How many userfaultfds there are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Descriptors {
    /// One for all memory.
    One,
    /// One for each vCPU's part of the memory; one for all if vCPUs have no parts of their own
    /// ([`Sharing::Overlapping`]).
    #[default]
    OnePerVcpu,
}

/// The threads that run the vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum VcpuThreads {
    /// One for each vCPU, as with KVM. A thread whose vCPU waits for a page sleeps.
    OnePerVcpu,
    /// So many, each of which runs its vCPUs in turn. A vCPU that waits for a page delays no other:
    /// a page costs no switch of threads. Not where a thread sleeps in the kernel until the page is
    /// there (`missing`, `minor`).
    Few(usize),
}

/// Whether the guest's writes are logged while pages arrive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DirtyLogging {
    /// No.
    #[default]
    Off,
    /// Yes, from the beginning
    /// ([`DemandPaging::check_dirty_log`](super::DemandPaging::check_dirty_log)).
    On,
}

/// What the memory is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PagedBacking {
    /// Memory that the VMM has mapped.
    Memory(BackingKind),
    /// Memory without a mapping in the VMM; all pages are private.
    GuestMemfd,
}

impl Default for PagedBacking {
    fn default() -> PagedBacking {
        PagedBacking::Memory(BackingKind::Anonymous)
    }
}

impl fmt::Display for PagedBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PagedBacking::Memory(kind) => kind.fmt(f),
            PagedBacking::GuestMemfd => f.pad("guest_memfd"),
        }
    }
}

impl FromStr for PagedBacking {
    type Err = PagingConfigError;

    fn from_str(name: &str) -> Result<PagedBacking, PagingConfigError> {
        if name == "guest_memfd" {
            return Ok(PagedBacking::GuestMemfd);
        }
        let kind =
            name.parse().map_err(|error: MemoryError| PagingConfigError::UnknownBacking { why: error.to_string() });
        kind.map(PagedBacking::Memory)
    }
}

/// Threads that may read one userfaultfd.
const MAX_READERS: usize = MAX_VCPUS;

/// The configuration of a run of demand paging.
#[derive(Clone, PartialEq, Debug)]
pub struct DemandPagingConfig {
    /// Number of vCPUs.
    pub nr_vcpus: usize,
    /// Each one's part of the memory, in bytes; a multiple of the bitmap's granularity and of the
    /// backing's page size.
    pub bytes_per_vcpu: u64,
    /// Whether each vCPU touches its own part, or all memory.
    pub sharing: Sharing,
    /// What detects a missing page, and what delivers it.
    pub mode: PagingMode,
    /// What the memory is made of. The pages of a file exist from the beginning; others are made
    /// when they are touched.
    pub backing: PagedBacking,
    /// The size of the block that a bit of the userfault bitmap stands for. A block arrives as a
    /// whole.
    pub granularity: PageSize,
    /// The contents of the pages that arrive. All of them are compared with it.
    pub contents: Pattern,
    /// How many userfaultfds there are.
    pub descriptors: Descriptors,
    /// Threads that read each of them.
    pub nr_readers: usize,
    /// The threads that run the vCPUs. `None` means as many as processors if the source has a
    /// latency, or pages come by rings, and the mode allows it: a thread that sleeps and wakes for
    /// each page costs several microseconds a page. Otherwise one for each vCPU, as with KVM.
    pub vcpu_threads: Option<VcpuThreads>,
    /// Processors to pin threads to: thread t to that of its first vCPU, which is vCPU t.
    pub pins: Option<Pins>,
    /// The background copier.
    pub copier: Option<Copier>,
    /// Whether the guest's writes are logged meanwhile.
    pub dirty_logging: DirtyLogging,
    /// How the VM's memory is managed.
    pub engine: slat::Config,
    /// The TLB of each CPU.
    pub tlb: Geometry,
    /// The flush method; `None`: the best that works here.
    pub flush_method: Option<FlushMethod>,
    /// The most page-table pages of the second stage that may be allocated at a time; `None`: more
    /// than are needed.
    pub max_tables: Option<u64>,
}

impl Default for DemandPagingConfig {
    fn default() -> DemandPagingConfig {
        DemandPagingConfig {
            nr_vcpus: 1,
            bytes_per_vcpu: 64 << 20,
            sharing: Sharing::Partitioned,
            mode: PagingMode::None,
            backing: PagedBacking::default(),
            granularity: PageSize::Size4K,
            contents: Pattern::Mixed { seed: 0 },
            descriptors: Descriptors::default(),
            nr_readers: 1,
            vcpu_threads: None,
            pins: None,
            copier: None,
            dirty_logging: DirtyLogging::Off,
            engine: slat::Config::default(),
            tlb: Geometry::default(),
            flush_method: None,
            max_tables: None,
        }
    }
}

/// Why a configuration is refused.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum PagingConfigError {
    /// No memory has this name.
    #[error("{why}, guest_memfd")]
    UnknownBacking {
        /// The message of the memory kinds, without guest_memfd.
        why: String,
    },
    /// The number of vCPUs is out of range.
    #[error("{nr_vcpus} vCPUs are not between 1 and {MAX_VCPUS}")]
    Vcpus { nr_vcpus: usize },
    /// A vCPU's part is empty or not made of whole blocks.
    #[error("{bytes_per_vcpu} bytes for each vCPU are not a positive multiple of {block_bytes}")]
    BytesPerVcpu {
        bytes_per_vcpu: u64,
        /// The larger of the bitmap's granularity and the memory's page size.
        block_bytes: u64,
    },
    /// The memory is too big.
    #[error("{bytes_per_vcpu} bytes for each of {nr_vcpus} vCPUs are too many")]
    TooBig { bytes_per_vcpu: u64, nr_vcpus: usize },
    /// Minor faults need a file.
    #[error("mode {mode} needs memory that is a file (shmem), not {backing}")]
    NeedsFile { mode: PagingMode, backing: PagedBacking },
    /// The mode works only with pages of 4 KiB.
    #[error(
        "mode {mode} brings pages of 4 KiB, which {backing} with a granularity of {granularity_bytes} bytes are not"
    )]
    NeedsSmallPages { mode: PagingMode, backing: PagedBacking, granularity_bytes: u64 },
    /// There is no mapping for a userfaultfd.
    #[error("mode {mode} needs memory that the VMM has a mapping of, not guest_memfd")]
    NeedsMapping { mode: PagingMode },
    /// The number of readers of a userfaultfd is out of range.
    #[error("{nr_readers} readers of a userfaultfd are not between 1 and {MAX_READERS}")]
    Readers { nr_readers: usize },
    /// There are no threads for the vCPUs.
    #[error("vCPUs need at least one thread")]
    NoThread,
    /// Each vCPU needs a thread of its own, because it sleeps in the kernel.
    #[error("in mode {mode} each vCPU needs a thread of its own")]
    NeedsThreadPerVcpu { mode: PagingMode },
    /// In this mode it is not known which pages have arrived.
    #[error("there is no background copier in mode {mode}")]
    NoCopier { mode: PagingMode },
    /// There is not one processor for each vCPU.
    #[error("{nr_pins} processors to pin {nr_vcpus} vCPUs to")]
    Pins { nr_pins: usize, nr_vcpus: usize },
    /// A copier with no page in flight, or more than a source allows.
    #[error("a window of {window} pages in flight is not between 1 and {MAX_IN_FLIGHT}")]
    Window { window: usize },
}

/// Sizes, and which thread runs which vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PagedLayout {
    pub(super) nr_pages: u64,
    pub(super) pages_per_vcpu: u64,
    /// Pages of a block, which arrives as a whole.
    pub(super) block_pages: u64,
    pub(super) nr_descriptors: usize,
}

/// The memory is at most this big, in bytes.
const MAX_BYTES: u64 = 16 << 40;

impl DemandPagingConfig {
    /// Checks the configuration, as [`DemandPaging::new`](super::DemandPaging::new) does.
    ///
    /// # Errors
    /// [`PagingConfigError`]: why it is refused.
    pub fn check(&self) -> Result<(), PagingConfigError> {
        self.layout().map(|_| ())
    }

    /// # Errors
    /// [`PagingConfigError`]: why the configuration is refused.
    pub(super) fn layout(&self) -> Result<PagedLayout, PagingConfigError> {
        let &DemandPagingConfig { nr_vcpus, bytes_per_vcpu, mode, backing, granularity, .. } = self;
        if nr_vcpus == 0 || nr_vcpus > MAX_VCPUS {
            return Err(PagingConfigError::Vcpus { nr_vcpus });
        }
        let page_bytes = match backing {
            PagedBacking::Memory(kind) => kind.page_size().size_bytes(),
            PagedBacking::GuestMemfd => PAGE_SIZE,
        };
        let granularity_bytes = granularity.size_bytes();
        let block_bytes = page_bytes.max(granularity_bytes);
        if bytes_per_vcpu == 0 || !bytes_per_vcpu.is_multiple_of(block_bytes) {
            return Err(PagingConfigError::BytesPerVcpu { bytes_per_vcpu, block_bytes });
        }
        let nr_bytes = bytes_per_vcpu
            .checked_mul(nr_vcpus as u64)
            .filter(|bytes| *bytes <= MAX_BYTES)
            .ok_or(PagingConfigError::TooBig { bytes_per_vcpu, nr_vcpus })?;
        let is_file = backing == PagedBacking::Memory(BackingKind::Shmem);
        if (mode.is_minor() || mode == PagingMode::UserfaultRing) && !is_file {
            return Err(PagingConfigError::NeedsFile { mode, backing });
        }
        if mode.uses_userfaultfd() && backing == PagedBacking::GuestMemfd {
            return Err(PagingConfigError::NeedsMapping { mode });
        }
        if mode.uses_userfaultfd() && block_bytes != PAGE_SIZE {
            return Err(PagingConfigError::NeedsSmallPages { mode, backing, granularity_bytes });
        }
        if mode.uses_userfaultfd() && !(1..=MAX_READERS).contains(&self.nr_readers) {
            return Err(PagingConfigError::Readers { nr_readers: self.nr_readers });
        }
        match self.vcpu_threads {
            Some(VcpuThreads::Few(0)) => return Err(PagingConfigError::NoThread),
            Some(VcpuThreads::Few(_)) if mode.blocks_threads() => {
                return Err(PagingConfigError::NeedsThreadPerVcpu { mode });
            }
            _ => {}
        }
        if let Some(Copier { window }) = self.copier {
            if !mode.uses_bitmap() {
                return Err(PagingConfigError::NoCopier { mode });
            }
            if window == 0 || window > MAX_IN_FLIGHT {
                return Err(PagingConfigError::Window { window });
            }
        }
        if let Some(nr_pins) = self.pins.as_ref().map(|pins| pins.vcpus.len())
            && nr_pins != nr_vcpus
        {
            return Err(PagingConfigError::Pins { nr_pins, nr_vcpus });
        }
        let nr_descriptors = match (mode.uses_userfaultfd(), self.descriptors, self.sharing) {
            (false, ..) => 0,
            (true, Descriptors::OnePerVcpu, Sharing::Partitioned) => nr_vcpus,
            (true, ..) => 1,
        };
        Ok(PagedLayout {
            nr_pages: nr_bytes >> Gfn::SHIFT,
            pages_per_vcpu: bytes_per_vcpu >> Gfn::SHIFT,
            block_pages: granularity_bytes >> Gfn::SHIFT,
            nr_descriptors,
        })
    }

    /// The number of threads for the vCPUs, where the source has a latency or not.
    pub fn nr_vcpu_threads(&self, has_latency: bool) -> usize {
        let few = |threads: usize| threads.clamp(1, self.nr_vcpus.max(1));
        match self.vcpu_threads {
            Some(VcpuThreads::OnePerVcpu) => self.nr_vcpus,
            Some(VcpuThreads::Few(threads)) => few(threads),
            None if has_latency && !self.mode.blocks_threads() => few(topology::usable_cpus().len()),
            None => self.nr_vcpus,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        let error = "memory".parse::<PagedBacking>().unwrap_err().to_string();
        assert!(error.contains("anonymous") && error.contains("guest_memfd"), "{error}");
        assert_eq!("guest_memfd".parse::<PagedBacking>().unwrap(), PagedBacking::GuestMemfd);
        assert_eq!("shmem".parse::<PagedBacking>().unwrap(), PagedBacking::Memory(BackingKind::Shmem));
    }

    #[test]
    fn impossible_configurations_are_refused() {
        let good = DemandPagingConfig { nr_vcpus: 3, bytes_per_vcpu: 8192, ..DemandPagingConfig::default() };
        assert_eq!(
            good.layout(),
            Ok(PagedLayout { nr_pages: 6, pages_per_vcpu: 2, block_pages: 1, nr_descriptors: 0 })
        );
        let of = |change: fn(&mut DemandPagingConfig)| {
            let mut config = good.clone();
            change(&mut config);
            config.layout()
        };
        use PagingConfigError as E;
        assert_eq!(of(|c| c.nr_vcpus = 0), Err(E::Vcpus { nr_vcpus: 0 }));
        assert_eq!(of(|c| c.nr_vcpus = 4097), Err(E::Vcpus { nr_vcpus: 4097 }));
        assert!(matches!(of(|c| c.bytes_per_vcpu = 0), Err(E::BytesPerVcpu { .. })));
        assert!(matches!(
            of(|c| c.granularity = PageSize::Size2M),
            Err(E::BytesPerVcpu { block_bytes: 0x20_0000, .. })
        ));
        let of_1g = of(|c| (c.bytes_per_vcpu, c.granularity) = (2 << 30, PageSize::Size1G));
        assert_eq!(of_1g.map(|layout| layout.block_pages), Ok(1 << 18));
        assert!(matches!(of(|c| c.bytes_per_vcpu = 1 << 63), Err(E::TooBig { .. })));
        assert!(matches!(of(|c| c.mode = PagingMode::Minor), Err(E::NeedsFile { .. })));
        assert!(matches!(of(|c| c.mode = PagingMode::UserfaultRing), Err(E::NeedsFile { .. })));
        let private = |mode| DemandPagingConfig { mode, backing: PagedBacking::GuestMemfd, ..good.clone() }.layout();
        assert_eq!(private(PagingMode::Missing), Err(E::NeedsMapping { mode: PagingMode::Missing }));
        assert!(private(PagingMode::Userfault).is_ok());
        assert_eq!(of(|c| (c.mode, c.nr_readers) = (PagingMode::Missing, 0)), Err(E::Readers { nr_readers: 0 }));
        let many = of(|c| (c.mode, c.nr_readers) = (PagingMode::Missing, usize::MAX));
        assert_eq!(many, Err(E::Readers { nr_readers: usize::MAX }));
        assert_eq!(of(|c| c.vcpu_threads = Some(VcpuThreads::Few(0))), Err(E::NoThread));
        assert!(matches!(
            of(|c| (c.mode, c.vcpu_threads) = (PagingMode::Missing, Some(VcpuThreads::Few(2)))),
            Err(E::NeedsThreadPerVcpu { .. })
        ));
        assert!(matches!(of(|c| c.copier = Some(Copier { window: 1 })), Err(E::NoCopier { .. })));
        assert!(matches!(
            of(|c| (c.mode, c.copier) = (PagingMode::Userfault, Some(Copier { window: 0 }))),
            Err(E::Window { window: 0 })
        ));
        let pins = |c: &mut DemandPagingConfig| c.pins = Some(Pins { vcpus: vec![0, 1], main: None });
        assert_eq!(of(pins), Err(E::Pins { nr_pins: 2, nr_vcpus: 3 }));
        assert_eq!(of(|c| c.mode = PagingMode::Missing).map(|layout| layout.nr_descriptors), Ok(3));
        let shared = of(|c| (c.mode, c.sharing) = (PagingMode::Missing, Sharing::Overlapping));
        assert_eq!(shared.map(|layout| layout.nr_descriptors), Ok(1));
    }
}
