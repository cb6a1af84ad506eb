//! How hardware reads the page tables of a format: through the CPUs' caches, or past them.
//!
//! # Use
//! A format says it by its type [`Format::Walkers`](super::Format::Walkers). [`CoherentWalkers`]
//! is for CPUs. With [`IncoherentWalkers`], each PTE is passed to
//! [`Host::clean_ptes`](crate::Host::clean_ptes) after it is written, if the host wants that.
//!
//! # Implementation
//! What changes PTEs carries a [`Cleaner`](Walkers::Cleaner), the host for that purpose. With
//! coherent walkers it has no size and its call no code, which a constant of the format could not
//! achieve.

use crate::sync::AtomicU64;

/// Whether walkers observe what CPUs store. Implemented by [`CoherentWalkers`] and
/// [`IncoherentWalkers`] alone.
pub trait Walkers: Send + Sync + 'static {
    /// Whether they do.
    const ARE_COHERENT: bool;
    /// Cleans PTEs.
    type Cleaner<'s>: Copy;

    /// The cleaner of `host`.
    fn cleaner<'s, H: CleanPtes>(host: &'s H) -> Self::Cleaner<'s>;

    /// For PTEs that no walker reaches.
    #[cfg(test)]
    fn no_cleaner<'s>() -> Self::Cleaner<'s>;

    /// Cleans `ptes`, which the caller has written.
    fn clean(cleaner: Self::Cleaner<'_>, ptes: &[AtomicU64]);
}

/// They read page tables through the CPUs' caches.
#[derive(Debug)]
pub struct CoherentWalkers;

impl Walkers for CoherentWalkers {
    const ARE_COHERENT: bool = true;
    type Cleaner<'s> = ();

    #[inline(always)]
    fn cleaner<H: CleanPtes>(_host: &H) {}

    #[cfg(test)]
    #[inline(always)]
    fn no_cleaner<'s>() -> Self::Cleaner<'s> {}

    #[inline(always)]
    fn clean((): (), _ptes: &[AtomicU64]) {}
}

/// They may read page tables from memory, past the CPUs' caches.
#[derive(Debug)]
pub struct IncoherentWalkers;

impl Walkers for IncoherentWalkers {
    const ARE_COHERENT: bool = false;
    type Cleaner<'s> = Option<&'s (dyn CleanPtes + 's)>;

    #[inline]
    fn cleaner<'s, H: CleanPtes>(host: &'s H) -> Self::Cleaner<'s> {
        host.has_to_clean().then_some(host)
    }

    #[cfg(test)]
    fn no_cleaner<'s>() -> Self::Cleaner<'s> {
        None
    }

    #[inline]
    fn clean(cleaner: Self::Cleaner<'_>, ptes: &[AtomicU64]) {
        if let Some(host) = cleaner {
            host.clean(ptes);
        }
    }
}

/// What a host does for walkers that read past the CPUs' caches.
pub trait CleanPtes {
    /// Whether there are such walkers.
    fn has_to_clean(&self) -> bool;

    /// Cleans `ptes`.
    fn clean(&self, ptes: &[AtomicU64]);
}
