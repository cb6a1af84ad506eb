//! The address spaces of which a CPU's PCIDs hold translations, and how old these may be.
//!
//! # Implementation
//! A CPU has a few *ASIDs*, each of which belongs to the address space that used it last. With
//! PCIDs on, an ASID has one PCID for the kernel's root and, under page-table isolation, another
//! for the user root. An address space increments its *generation* before each flush, on whatever
//! CPU it runs; an ASID remembers the generation up to which it is flushed.
//! - A switch to an address space whose ASID has its generation keeps what is cached (bit 63 of
//!   CR3).
//! - A switch to one whose ASID is behind, or that has none, flushes. So a flush of an address
//!   space notifies no CPU that does not run it.
//! - A flush of the user PCID is noted as *pending*; the next load of the user root does it.
//!
//! Numbers of address spaces are never used again: an ASID of one that has ended matches none.
//!
//! The scheme is Linux's (x86 TLB context switching since 4.14).

use super::cpu::CR3_NO_FLUSH;
use super::frames::GuestFrame;
use super::{Isolation, Pcids};

/// How many address spaces a CPU holds translations of.
pub(crate) const NR_ASIDS: usize = 6;

/// PCID bit of user roots.
const USER_PCID: u64 = 1 << 11;

/// No address space.
const NO_SPACE: u64 = 0;

#[derive(Clone, Copy, Debug)]
struct Context {
    space: u64,
    generation: u64,
}

/// The ASIDs of one CPU.
#[derive(Debug)]
pub(crate) struct Asids {
    isolation: Isolation,
    pcids: Pcids,
    contexts: [Context; NR_ASIDS],
    loaded: usize,
    next: usize,
    /// A bit for each ASID whose user PCID must be flushed before it is used.
    user_flush_pending: u8,
    root: GuestFrame,
}

/// The CR3 value for an address space that is to be loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Switch {
    /// None: it is loaded, and up to date.
    Nothing,
    /// This value.
    Load(u64),
}

impl Asids {
    /// `root` is loaded, with 0 in the low bits of CR3, and belongs to no address space.
    pub(crate) fn new(isolation: Isolation, pcids: Pcids, root: GuestFrame) -> Asids {
        let contexts = [Context { space: NO_SPACE, generation: 0 }; NR_ASIDS];
        Asids { isolation, pcids, contexts, loaded: 0, next: 0, user_flush_pending: 0, root }
    }

    /// The address space that is loaded.
    pub(crate) fn loaded(&self) -> u64 {
        self.contexts[self.loaded].space
    }

    /// Switches to address space `space`, with the kernel's root `root`, which must be flushed up
    /// to `generation`.
    pub(crate) fn switch(&mut self, space: u64, generation: u64, root: GuestFrame) -> Switch {
        let wanted = Context { space, generation };
        let known = match self.pcids {
            Pcids::On => self.contexts.iter().position(|context| context.space == space),
            Pcids::Off => None,
        };
        let is_current = known.is_some_and(|asid| self.contexts[asid].generation == generation);
        if self.loaded() == space && self.contexts[self.loaded].generation == generation {
            return Switch::Nothing;
        }
        let asid = known.unwrap_or_else(|| match self.pcids {
            Pcids::On => {
                self.next = (self.next + 1) % NR_ASIDS;
                self.next
            }
            Pcids::Off => 0,
        });
        self.loaded = asid;
        self.root = root;
        if is_current {
            return Switch::Load(self.kernel_cr3() | CR3_NO_FLUSH);
        }
        self.contexts[asid] = wanted;
        self.flush_user_later();
        Switch::Load(self.kernel_cr3())
    }

    /// The idle root was loaded in place of the loaded address space.
    pub(crate) fn unload(&mut self) {
        self.contexts[self.loaded].space = NO_SPACE;
    }

    /// The loaded address space is about to be flushed up to `generation`.
    pub(crate) fn flushed_to(&mut self, generation: u64) {
        self.contexts[self.loaded].generation = generation;
    }

    /// Notes that the whole user PCID must be flushed.
    pub(crate) fn flush_user_later(&mut self) {
        if self.user_pcid().is_some() {
            self.user_flush_pending |= 1 << self.loaded;
        }
    }

    /// CR3 for the loaded address space's kernel root.
    pub(crate) fn kernel_cr3(&self) -> u64 {
        self.root.gpa() | self.kernel_pcid()
    }

    /// CR3 for its user root, with bit 63 unless a flush is pending, which it then no longer is.
    pub(crate) fn take_user_cr3(&mut self) -> u64 {
        let root = GuestFrame(self.root.0 + 1).gpa();
        let Some(pcid) = self.user_pcid() else { return root };
        let bit = 1 << self.loaded;
        let keep = if self.user_flush_pending & bit == 0 { CR3_NO_FLUSH } else { 0 };
        self.user_flush_pending &= !bit;
        root | pcid | keep
    }

    /// PCID of the loaded address space's kernel root; 0 without PCIDs. It is never 0 with them.
    pub(crate) fn kernel_pcid(&self) -> u64 {
        match self.pcids {
            Pcids::On => self.loaded as u64 + 1,
            Pcids::Off => 0,
        }
    }

    /// PCID of its user root, if that has one of its own.
    pub(crate) fn user_pcid(&self) -> Option<u64> {
        (self.isolation == Isolation::On && self.pcids == Pcids::On).then(|| self.kernel_pcid() | USER_PCID)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: GuestFrame = GuestFrame(0x1000);

    #[test]
    fn an_up_to_date_asid_keeps_its_translations() {
        let mut asids = Asids::new(Isolation::On, Pcids::On, GuestFrame(4));
        assert_eq!(asids.switch(1, 5, ROOT), Switch::Load(0x100_0002));
        assert_eq!(asids.take_user_cr3(), 0x100_1802, "a new ASID's user PCID is flushed, too");
        assert_eq!(asids.take_user_cr3(), 0x100_1802 | CR3_NO_FLUSH);
        assert_eq!(asids.switch(1, 5, ROOT), Switch::Nothing);
        assert_eq!(asids.switch(2, 1, GuestFrame(8)), Switch::Load(0x8003));
        assert_eq!(asids.switch(1, 5, ROOT), Switch::Load(0x100_0002 | CR3_NO_FLUSH));
        assert_eq!(asids.take_user_cr3(), 0x100_1802 | CR3_NO_FLUSH);
        // The second one's flush is still pending; the first was flushed elsewhere.
        assert_eq!(asids.switch(2, 1, GuestFrame(8)), Switch::Load(0x8003 | CR3_NO_FLUSH));
        assert_eq!(asids.take_user_cr3(), 0x9803);
        assert_eq!(asids.switch(1, 6, ROOT), Switch::Load(0x100_0002));
        assert_eq!(asids.take_user_cr3(), 0x100_1802);
    }

    #[test]
    fn the_oldest_asid_is_replaced() {
        let mut asids = Asids::new(Isolation::Off, Pcids::On, GuestFrame(4));
        for space in 1..=NR_ASIDS as u64 + 1 {
            assert!(matches!(asids.switch(space, 1, ROOT), Switch::Load(cr3) if cr3 & CR3_NO_FLUSH == 0));
        }
        assert!(matches!(asids.switch(2, 1, ROOT), Switch::Load(cr3) if cr3 & CR3_NO_FLUSH != 0));
        assert!(matches!(asids.switch(1, 1, ROOT), Switch::Load(cr3) if cr3 & CR3_NO_FLUSH == 0), "it was replaced");
        assert_eq!(asids.user_pcid(), None);
    }

    #[test]
    fn without_pcids_each_load_flushes() {
        let mut asids = Asids::new(Isolation::On, Pcids::Off, GuestFrame(4));
        assert_eq!(asids.switch(1, 1, ROOT), Switch::Load(0x100_0000));
        assert_eq!(asids.switch(2, 1, GuestFrame(8)), Switch::Load(0x8000));
        assert_eq!(asids.switch(1, 1, ROOT), Switch::Load(0x100_0000));
        assert_eq!(asids.take_user_cr3(), 0x100_1000);
        assert_eq!(asids.take_user_cr3(), 0x100_1000);
    }
}
