//! A source that says that it reads single pages as well as many: a fault brings one page then, as
//! the plain loop's.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::source::{Identity, Mapped, PAGE_BYTES, Source, SourceError};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct SinglePages(pub(super) Arc<dyn Source>);

impl Source for SinglePages {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn identity(&self) -> Identity {
        self.0.identity()
    }

    fn granule_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn mapped(&self, range: Range<u64>) -> Option<Mapped<'_>> {
        self.0.mapped(range)
    }

    fn is_mapped(&self) -> bool {
        self.0.is_mapped()
    }

    fn is_zero(&self, range: Range<u64>) -> bool {
        self.0.is_zero(range)
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        self.0.read(offset, into)
    }
}
