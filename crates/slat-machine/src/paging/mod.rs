//! Memory that is still elsewhere, and arrives page by page: a pager.
//!
//! What detects a missing page, and what brings it:
//! - `userfaultfd/`: the kernel. It stops a thread of this process that touches the page, and a
//!   reader fills it.
//! - `source.rs`: where pages are, by name: made from their numbers, in a file, or in another
//!   process. The sources themselves are `slat-pager`'s.
//! - `delivery/`: requests of vCPUs to a resolver in another thread or process, by rings in shared
//!   memory.
//!
//! Built on these:
//! - `arrivals.rs`: which pages are there, which thread may fill one, and that each is filled once.
//! - `pages.rs`: what a thread that runs vCPUs asks for. `fetch.rs` (a source of its own) and
//!   `rings.rs` (a resolver elsewhere) answer; `rings.rs` has such a resolver, too.
//! - `readers.rs`: the readers of a userfaultfd. `filler.rs`: puts pages in place. `copier.rs`:
//!   fetches pages that were not requested.
//!
//! The rest of the machine uses what this file names, and no module below it. Paging knows nothing
//! of VMs: it needs guest memory ([`Backing`](crate::memory::Backing)) and the engine's userfault
//! bitmap, and a thread that runs vCPUs calls it ([`VcpuError`] has what ends such a thread).

mod arrivals;
mod copier;
mod delivery;
mod error;
mod fetch;
mod filler;
mod pages;
mod readers;
mod rings;
mod source;
mod userfaultfd;

pub(crate) use arrivals::Arrivals;
pub use copier::Copier;
pub(crate) use copier::copy_rest;
pub use delivery::{
    AttachError, BadIndex, Delivery, DeliveryConfig, DeliveryConfigError, DeliveryError, DeliveryPort, GuestPage,
    MAX_ANSWERS, PageClaim, Parked, PortStats, Request, Requested, Resolver, ResolverError, ResolverStats, Shard,
    ShardWake, SharedBitmap, SharedMemoryFile, Waiter,
};
pub use error::VcpuError;
pub(crate) use fetch::{Fetch, FetchFrom};
pub(crate) use filler::{Filler, Userfaultfds};
pub(crate) use pages::{Asked, PageSupply};
pub(crate) use readers::{AllReaders, VcpusExit, register};
pub(crate) use rings::RingPages;
pub use rings::{ServeConfig, ServeError, serve_rings};
pub use slat_pager::source::SourceError;
pub use slat_pager::source::pattern::Pattern;
pub use slat_pager::source::peer::LocalAddress;
pub use slat_pager::source::requests::RequestError;
pub use source::{OpenSource, PagesServer, ParseSourceError, SourceSpec};
pub use userfaultfd::{
    Cause, Filled, OpenError, ReaderError, Readers, RegisterMode, ReportedFault, Userfaultfd, UserfaultfdError,
    UserfaultfdEvent, Wake,
};
