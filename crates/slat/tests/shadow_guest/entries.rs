//! The material of a program's guest. A few pages are page tables, a few are data, and each may
//! become the other. Addresses, PTEs and roots repeatedly meet there.

use slat::shadow::PagingRegisters;

use super::architecture::{
    ACCESSED, CR0_PE, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_PSE, CR4_SMAP, CR4_SMEP, DIRTY,
    EFER_LMA, EFER_LME, EFER_NXE, GLOBAL, LARGE, NO_EXECUTE, PRESENT, PagingMode, USER, WRITABLE,
};
use super::random::Random;
use super::world::SLOTS;

/// Words of a page that PTEs are made in.
const WORDS: [u64; 6] = [0, 1, 2, 3, 510, 511];

/// How an orderly guest, and one that is not, makes its page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Any page table may be one of any level.
    Any,
    /// Each page table has its level, and mostly the guest's CPUs change lowest PTEs. So the lowest
    /// page tables are seldom in sync, and the others always.
    ByLevel,
}

/// Tables of PAE's PDPTEs, and nothing else. Where other PTEs have their accessed flag these have a
/// reserved bit, and the oracle does not follow what a CPU with cached PDPTEs may set there.
const PDPTS: [u64; 2] = [SLOTS[0].0 + 300, SLOTS[1].0 + 30];

pub struct Layout {
    /// The mode of most CPUs.
    pub mode: PagingMode,
    pub order: Order,
    tables: Vec<u64>,
    /// The page tables of each level, from the lowest up.
    levels: [Vec<u64>; 5],
    data: Vec<u64>,
    roots: Vec<u64>,
    /// Tables of PAE's PDPTEs.
    pdpts: Vec<u64>,
    pcids: Vec<u64>,
    /// Data that other threads write too, so that only zeroes are written there.
    shared: Vec<u64>,
    /// The percentage of PTEs in which each flag is set.
    percent_present: usize,
    percent_accessed: usize,
    percent_large: usize,
}

impl Layout {
    pub fn new(random: &mut Random) -> Layout {
        let modes = [
            PagingMode::FourLevel,
            PagingMode::FourLevel,
            PagingMode::FourLevel,
            PagingMode::FiveLevel,
            PagingMode::Pae,
            PagingMode::Bits32,
        ];
        let mut page = |_| {
            let (first_gfn, nr_pages) = random.pick(&[SLOTS[0], SLOTS[0], SLOTS[1], SLOTS[2]]);
            let gfn = first_gfn + random.below(nr_pages as usize) as u64;
            if PDPTS.contains(&gfn) { gfn + 1 } else { gfn }
        };
        let tables: Vec<u64> = (0..24).map(&mut page).collect();
        let data: Vec<u64> = (0..16).map(&mut page).collect();
        let (mode, order) = (random.pick(&modes), random.pick(&[Order::Any, Order::ByLevel]));
        let nr_tables = random.pick(&[4, 8, 16, 24]);
        let (tables, levels) = match order {
            Order::Any => (tables[..nr_tables].to_vec(), std::array::from_fn(|_| tables[..nr_tables].to_vec())),
            Order::ByLevel => {
                let ends = [0, 5, 9, 12, 14, 16];
                (tables[..16].to_vec(), std::array::from_fn(|level| tables[ends[level]..ends[level + 1]].to_vec()))
            }
        };
        let top = &levels[usize::from(mode.levels()) - 1];
        Layout {
            mode,
            order,
            roots: top[..random.pick(&[2, 4]).min(top.len())].to_vec(),
            pdpts: PDPTS.to_vec(),
            tables,
            levels,
            data,
            shared: Vec::new(),
            pcids: vec![0, 1, 2, 0xfff],
            percent_present: random.pick(&[80, 90, 97]),
            percent_accessed: random.pick(&[20, 50, 90]),
            percent_large: random.pick(&[0, 5, 20]),
        }
    }

    /// For a thread that has its page tables, and some data, of its own, in `pages`. No PTE that it
    /// makes leads to those of other threads.
    pub fn of_thread(random: &mut Random, mut pages: std::ops::Range<u64>, shared: std::ops::Range<u64>) -> Layout {
        let mut layout = Layout::new(random);
        // Only such frames are made part of PTEs that may be large.
        let is_good = |gfn: &u64| gfn % 512 > 1;
        layout.tables = pages.by_ref().filter(is_good).take(8).collect();
        layout.data = pages.filter(is_good).take(8).chain(shared.clone()).collect();
        layout.pdpts = vec![layout.tables.pop().unwrap()];
        layout.roots = layout.tables[..3].to_vec();
        layout.levels = std::array::from_fn(|_| layout.tables.clone());
        layout.order = Order::Any;
        // Also page 0, where a PTE leads in which only a flag was set.
        layout.shared = shared.chain([0]).collect();
        layout.percent_large = 0;
        layout
    }

    /// Flags that no PTE may have: large pages would reach the pages of other threads.
    pub fn forbidden_flags(&self) -> u64 {
        if self.shared.is_empty() { 0 } else { LARGE }
    }

    /// What may be written of `bytes` at `gpa`: as many as are in its word; zeroes if other threads
    /// write there too.
    pub fn writable_part<'a>(&self, gpa: u64, bytes: &'a [u8]) -> &'a [u8] {
        let len = bytes.len().min(8 - (gpa & 7) as usize);
        if self.shared.contains(&(gpa >> 12)) { &[0; 8][..len] } else { &bytes[..len] }
    }

    /// The initial contents of memory, word by word.
    pub fn contents(&self, random: &mut Random) -> Vec<(u64, u64)> {
        let mut contents = Vec::new();
        for &gfn in &self.tables {
            let of_level = (1..).zip(&self.levels).find(|(_, tables)| tables.contains(&gfn)).map(|(level, _)| level);
            for word in WORDS {
                let level = match (self.order, of_level) {
                    (Order::ByLevel, Some(level)) => level,
                    _ => 1 + random.below(4) as u8,
                };
                let value = if self.mode == PagingMode::Bits32 {
                    self.entry(self.mode, level, random) | (self.entry(self.mode, level, random) << 32)
                } else {
                    self.entry(self.mode, level, random)
                };
                contents.push(((gfn << 12) + 8 * word, value));
            }
        }
        contents
    }

    pub fn any_page(&self, random: &mut Random) -> u64 {
        if random.chance(70) { random.pick(&self.tables) } else { random.pick(&self.data) }
    }

    /// A target for a PTE of `level`: for one of the lowest level it is a page in which the guest
    /// reaches a page table.
    fn table_below(&self, level: u8, random: &mut Random) -> u64 {
        random.pick(&self.levels[usize::from(level.max(2)) - 2])
    }

    /// A PTE that may stand in a page table of `level`.
    pub fn entry(&self, mode: PagingMode, level: u8, random: &mut Random) -> u64 {
        let mut entry = 0;
        let mut flag = |bit: u64, percent: usize| entry |= if random.chance(percent) { bit } else { 0 };
        flag(PRESENT, self.percent_present);
        flag(WRITABLE, 85);
        flag(USER, 85);
        flag(ACCESSED, self.percent_accessed);
        flag(DIRTY, self.percent_accessed);
        flag(GLOBAL, 20);
        let is_large = level > 1 && random.chance(self.percent_large);
        entry |= if is_large { LARGE } else { 0 };
        let gfn = match random.below(20) {
            0 => 0x900 + random.below(4) as u64,
            1 if level > 1 && self.order == Order::Any => random.pick(&self.data),
            1..=12 if level == 1 => random.pick(&self.data),
            _ => self.table_below(level, random),
        };
        if mode != PagingMode::Bits32 {
            entry |= if random.chance(10) { NO_EXECUTE } else { 0 };
        }
        let large_mask = match (is_large && !random.chance(5), mode) {
            (false, _) => 0,
            (true, PagingMode::Bits32) => 0x3ff,
            (true, _) if level > 2 => 0x3_ffff,
            _ => 0x1ff,
        };
        entry | ((gfn & !large_mask) << 12)
    }

    /// A valid PTE.
    pub fn good_entry(&self, mode: PagingMode, level: u8, random: &mut Random) -> u64 {
        if mode == PagingMode::Pae && level == 3 {
            return self.pdpte(random) | PRESENT;
        }
        let rights = self.entry(mode, level, random) & 0x1ff & !LARGE;
        let gfn =
            if level == 1 && random.chance(60) { random.pick(&self.data) } else { self.table_below(level, random) };
        rights | PRESENT | (gfn << 12)
    }

    /// A PDPTE of PAE.
    pub fn pdpte(&self, random: &mut Random) -> u64 {
        u64::from(random.chance(90)) | (self.table_below(3, random) << 12)
    }

    pub fn root(&self, mode: PagingMode, random: &mut Random) -> u64 {
        match mode {
            PagingMode::Pae => (random.pick(&self.pdpts) << 12) | random.pick(&[0, 0, 0x20, 0xfe0]),
            _ if random.chance(90) => random.pick(&self.roots) << 12,
            _ => random.pick(&self.tables) << 12,
        }
    }

    pub fn pcid(&self, random: &mut Random) -> u64 {
        if random.chance(5) { random.below(0x1000) as u64 } else { random.pick(&self.pcids) }
    }

    /// The start of a page.
    pub fn address(&self, mode: PagingMode, random: &mut Random) -> u64 {
        match mode {
            PagingMode::Off => self.any_page(random) << 12,
            PagingMode::Bits32 => mode.compose(&[random.pick(&[0, 1, 2, 1023]), random.pick(&[0, 1, 3, 1022])]),
            _ => {
                let top = random.pick(&[0, 1, 2, 3]);
                let indices: Vec<u64> = (1..mode.levels()).map(|_| random.pick(&[0, 0, 1, 2, 511])).collect();
                let top = if mode == PagingMode::Pae || random.chance(70) { top } else { 511 };
                let all: Vec<u64> = std::iter::once(top).chain(indices).collect();
                mode.compose(&all)
            }
        }
    }
}

/// Offset in a page where a PTE may be.
pub fn interesting_offset(random: &mut Random) -> u64 {
    8 * random.pick(&WORDS) + random.pick(&[0, 0, 0, 4])
}

pub fn any_mode(random: &mut Random) -> PagingMode {
    random.pick(&[PagingMode::Off, PagingMode::Bits32, PagingMode::Pae, PagingMode::FourLevel, PagingMode::FiveLevel])
}

/// Registers that select `mode`, otherwise arbitrary.
pub fn registers(mode: PagingMode, root: u64, random: &mut Random) -> PagingRegisters {
    let mut any = |bit: u64, percent: usize| if random.chance(percent) { bit } else { 0 };
    let wp = any(CR0_WP, 80);
    let optional = any(CR4_PGE, 60) | any(CR4_SMEP, 40) | any(CR4_SMAP, 40);
    let nxe = any(EFER_NXE, 80);
    let (pg, cr4, efer) = match mode {
        PagingMode::Off => (0, 0, 0),
        PagingMode::Bits32 => (CR0_PG, any(CR4_PSE, 70), 0),
        PagingMode::Pae => (CR0_PG, CR4_PAE, nxe),
        PagingMode::FourLevel => (CR0_PG, CR4_PAE | any(CR4_PCIDE, 75), nxe | EFER_LME | EFER_LMA),
        PagingMode::FiveLevel => (CR0_PG, CR4_PAE | CR4_LA57 | any(CR4_PCIDE, 75), nxe | EFER_LME | EFER_LMA),
    };
    PagingRegisters { cr0: CR0_PE | pg | wp, cr3: root, cr4: cr4 | optional, efer }
}
