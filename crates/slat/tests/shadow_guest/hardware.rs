//! The hypervisor's CPU. It walks shadow page tables by the rules of long mode (Intel SDM vol. 3A,
//! "4-Level Paging and 5-Level Paging"; CR0.WP, EFER.NXE and CR4.PCIDE set), and caches what it
//! finds for as long as it may: until a flush. That is the worst CPU for an engine that omits a
//! flush. A CPU that caches nothing is the worst for an engine that relies on old translations. So
//! each program draws one of three.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use slat::shadow::{Gva, LocalFlush, Privilege};
use slat::{Access, Hpa};

use super::world::World;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// What a CPU caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keeps {
    Nothing,
    /// Translations of pages.
    Translations,
    /// Also the PTEs on the way: the paging-structure caches.
    Everything,
}

/// The flush that a CPU omits, to show that it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disobeys {
    Nothing,
    Context,
    All,
    Host,
}

/// The translation of an address. Its rights are those of all PTEs on the way.
#[derive(Clone, Copy, Debug)]
struct Cached {
    /// The address of the 4 KiB page, or of the page-table page.
    hpa: u64,
    writable: bool,
    user: bool,
    executable: bool,
    dirty: bool,
}

/// Bits of the guest's CR4 that are in force while it runs on shadow page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Protections {
    pub smep: bool,
    pub smap: bool,
}

#[derive(Debug)]
pub struct Cpu {
    keeps: Keeps,
    disobeys: Disobeys,
    /// By PCID and page number.
    translations: HashMap<(u16, u64), Cached>,
    /// By PCID, level of the page-table page, and the address bits above its range.
    tables: HashMap<(u16, u8, u64), Cached>,
    /// Flushes of the host that were executed.
    flushes: u64,
    root: Hpa,
    levels: u8,
    pcid: u16,
}

/// The address bits that select the page-table page of `level` for `gva`.
fn prefix(gva: u64, level: u8) -> u64 {
    gva >> (12 + 9 * level)
}

impl Cpu {
    pub fn new(keeps: Keeps, disobeys: Disobeys) -> Cpu {
        let (translations, tables) = (HashMap::new(), HashMap::new());
        Cpu { keeps, disobeys, translations, tables, flushes: 0, root: Hpa(0), levels: 0, pcid: 0 }
    }

    /// Enters the guest.
    pub fn enter(&mut self, entry: slat::shadow::GuestEntry) {
        assert!(matches!(entry.levels, 4 | 5) && entry.pcid < 1 << 12, "{entry:?}");
        match entry.flush {
            LocalFlush::None => {}
            LocalFlush::Context if self.disobeys == Disobeys::Context => {}
            LocalFlush::All if self.disobeys == Disobeys::All => {}
            LocalFlush::Page(Gva(gva)) => {
                self.translations.retain(|&(_, page), _| page != gva >> 12);
                self.tables.retain(|&(_, level, bits), _| bits != prefix(gva, level));
            }
            LocalFlush::Context => {
                self.translations.retain(|&(pcid, _), _| pcid != entry.pcid);
                self.tables.retain(|&(pcid, _, _), _| pcid != entry.pcid);
            }
            LocalFlush::All => self.forget_all(),
        }
        (self.root, self.levels, self.pcid) = (entry.root, entry.levels, entry.pcid);
    }

    fn forget_all(&mut self) {
        self.translations.clear();
        self.tables.clear();
    }

    /// One access of the guest: what it reaches, or `None` for a page fault. The caller holds the
    /// world's gate until the effect of the access is done.
    pub fn access(
        &mut self,
        world: &World,
        protections: Protections,
        gva: u64,
        access: Access,
        privilege: Privilege,
    ) -> Option<Hpa> {
        if self.flushes != world.nr_flushes() && self.disobeys != Disobeys::Host {
            self.flushes = world.nr_flushes();
            self.forget_all();
        }
        let key = (self.pcid, gva >> 12);
        let cached = self.translations.get(&key).copied();
        let found = match cached {
            // If D is clear, a new walk sets it.
            Some(cached) if access != Access::Write || cached.dirty => Some(cached),
            _ => self.walk(world, gva, access, privilege, protections),
        };
        match found {
            Some(found) if found.permits(access, privilege, protections) => {
                if self.keeps != Keeps::Nothing {
                    self.translations.insert(key, found);
                }
                Some(Hpa(found.hpa | (gva & 0xfff)))
            }
            // SDM, "Operations that Invalidate TLBs and Paging-Structure Caches": a page fault
            // drops the translation of the page, and the cached PTEs on the way.
            _ => {
                self.translations.remove(&key);
                self.tables.retain(|&(pcid, level, bits), _| pcid != self.pcid || bits != prefix(gva, level));
                None
            }
        }
    }

    fn walk(
        &mut self,
        world: &World,
        gva: u64,
        access: Access,
        privilege: Privilege,
        protections: Protections,
    ) -> Option<Cached> {
        let root = Cached { hpa: self.root.0, writable: true, user: true, executable: true, dirty: false };
        let (mut at, mut level) = (root, self.levels);
        for lower in 1..self.levels {
            if let Some(&table) = self.tables.get(&(self.pcid, lower, prefix(gva, lower))) {
                (at, level) = (table, lower);
                break;
            }
        }
        loop {
            let index = (gva >> (12 + 9 * (u32::from(level) - 1))) as usize % 512;
            let cell = world.table_entry(Hpa(at.hpa), index);
            let entry = cell.load(Ordering::SeqCst);
            if entry & PRESENT == 0 {
                return None;
            }
            assert_eq!(entry & GLOBAL, 0, "a shadow entry is global: {entry:#x} of level {level} for {gva:#x}");
            at = Cached {
                hpa: entry & FRAME,
                writable: at.writable && entry & WRITABLE != 0,
                user: at.user && entry & USER != 0,
                executable: at.executable && entry & NO_EXECUTE == 0,
                dirty: false,
            };
            let is_leaf = level == 1 || entry & LARGE != 0;
            if is_leaf && !at.permits(access, privilege, protections) {
                return None;
            }
            let bits = ACCESSED | if is_leaf && access == Access::Write { DIRTY } else { 0 };
            if entry & bits != bits
                && cell.compare_exchange(entry, entry | bits, Ordering::SeqCst, Ordering::SeqCst).is_err()
            {
                // Another thread has changed it. The guest tries the access again.
                return None;
            }
            if is_leaf {
                assert!(level <= 3, "a leaf of level {level}: {entry:#x}");
                let inside = (1 << (12 + 9 * (level - 1))) - 1;
                at.hpa = (at.hpa & !inside) | (gva & inside & !0xfff);
                at.dirty = (entry | bits) & DIRTY != 0;
                return Some(at);
            }
            level -= 1;
            if self.keeps == Keeps::Everything {
                self.tables.insert((self.pcid, level, prefix(gva, level)), at);
            }
        }
    }
}

impl Cached {
    /// SDM, "Determination of Access Rights", with CR0.WP set.
    fn permits(self, access: Access, privilege: Privilege, protections: Protections) -> bool {
        let Protections { smep, smap } = protections;
        match (privilege, access) {
            (Privilege::User, Access::Read) => self.user,
            (Privilege::User, Access::Write) => self.user && self.writable,
            (Privilege::User, Access::Execute | Access::ExecuteUser) => self.user && self.executable,
            (_, Access::Execute | Access::ExecuteUser) => self.executable && !(self.user && smep),
            (_, access) => {
                let is_prevented = self.user && smap && privilege != Privilege::SupervisorWithAc;
                !is_prevented && (access == Access::Read || self.writable)
            }
        }
    }
}
