//! Page tables derived from this tree, which hardware walks instead of it: shadow paging.
//!
//! A flush of the second stage concerns them first, and the CPUs then ([`TlbBatch::flush`]). That
//! is all that the protocols of the second stage need of them, so `table` knows this trait and not
//! its implementation. Nor does the linker: a program that makes no VM with derived tables has
//! none of their code.

#![expect(unsafe_code, reason = "the trait is a promise on which casts rely")]

use alloc::boxed::Box;
use core::any::Any;

use super::Tree;
use super::retire::Participant;
use super::tlb::TlbBatch;
use crate::addr::{Gfn, GfnRange};
use crate::error::OutOfMemory;
use crate::format::Format;
use crate::host::Host;
use crate::stats::Stats;

/// What derived tables keep for one vCPU. Only they know its type.
pub(crate) type VcpuState = Box<dyn Any + Send + Sync>;

/// Page tables that are derived from the leaf PTEs of a tree.
///
/// # Safety
/// For each format one type alone implements this, and [`new_vcpu`](Self::new_vcpu) returns a state
/// of one type alone: their users go back to these types without a check (`shadow::of_vcpu`).
pub(crate) unsafe trait DerivedTables<H: Host, F: Format>: Send + Sync {
    /// Zaps what the second stage does not back any more in `range`, and takes W from what may not
    /// be written. The caller has changed the second stage, and flushes `batch`, which has the
    /// range.
    fn zap_unbacked<'t>(&'t self, range: GfnRange, batch: &mut TlbBatch<'t, H, F>);

    /// Takes W from all leaf PTEs that map the pages of `words`, so that writes are logged anew.
    /// A word is the page of its first bit and a bit for each page; words come in rising order. The
    /// caller has taken W in the second stage by an atomic operation. It flushes `batch`, which has
    /// the pages.
    fn write_protect<'t>(&'t self, words: &mut dyn Iterator<Item = (Gfn, u64)>, batch: &mut TlbBatch<'t, H, F>);

    /// Begins the use by a new vCPU of `tree`, which these tables are derived from.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    fn new_vcpu(&self, tree: &Tree<H, F>) -> Result<VcpuState, OutOfMemory>;

    /// Ends the use by a vCPU of `tree`, which these tables are derived from.
    fn end_vcpu(&self, tree: &Tree<H, F>, participant: &Participant, state: VcpuState);

    /// Frees memory that is kept for pages to come, as far as no guard can still read it. `tree` is
    /// that which these tables are derived from.
    fn reclaim(&self, tree: &Tree<H, F>);

    /// Adds their numbers of pages to `stats`.
    fn add_stats(&self, stats: &mut Stats);
}
