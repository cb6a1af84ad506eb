//! Memory that is still elsewhere, and arrives page by page: a pager.
//!
//! What detects a missing page, and what brings it:
//! - `userfaultfd/`: the kernel. It stops a thread of this process that touches the page, and a
//!   reader fills it.
//! - `source.rs`: where pages are, by name: made from their numbers, in a file, or in another
//!   process. The sources themselves are `slat-pager`'s.
//! - [`slat_pager::delivery`]: requests of vCPUs to a resolver in another thread or process, by rings
//!   in shared memory.
//!
//! Built on these:
//! - `arrivals.rs`: which pages are there, which thread may fill one, and that each is filled once.
//! - `pages.rs`: what a thread that runs vCPUs asks for. `fetch.rs` (from the source) and `rings.rs`
//!   (a resolver elsewhere) answer.
//! - `readers.rs`: what the readers of userfaultfds do. `filler.rs`: puts pages in place.
//!   `copier.rs`: fetches pages that were not requested.
//!
//! The rest of the machine uses what this file names, and no module below it. Paging knows nothing
//! of VMs: it needs guest memory ([`Backing`](crate::memory::Backing)) and the engine's userfault
//! bitmap, and a thread that runs vCPUs calls it ([`VcpuError`] has what ends such a thread).

mod arrivals;
mod copier;
mod error;
mod fetch;
mod filler;
mod pages;
mod readers;
mod rings;
mod source;
mod userfaultfd;

pub(crate) use arrivals::Arrivals;
pub(crate) use copier::copy_rest;
pub use error::VcpuError;
pub(crate) use fetch::{Fetch, FetchFrom};
pub(crate) use filler::Filler;
pub(crate) use pages::{Asked, PageSupply};
pub(crate) use readers::{VcpusExit, start_readers};
pub(crate) use rings::{EngineBitmap, RingPages};
pub use slat_pager::delivery::{Copier, Delivery, DeliveryError, ServeConfig, ServeError, SharedBitmap, serve_rings};
pub(crate) use slat_pager::delivery::{DeliveryConfig, SharedMemoryFile};
pub use slat_pager::source::SourceError;
pub use slat_pager::source::pattern::Pattern;
pub use slat_pager::source::peer::LocalAddress;
pub use slat_pager::source::requests::{OpenSource, RequestError};
pub use source::{PagesServer, ParseSourceError, SourceSpec};
pub use userfaultfd::UserfaultfdError;
pub(crate) use userfaultfd::{Readers, RegisterMode, Userfaultfds};
