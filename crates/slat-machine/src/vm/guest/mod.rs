//! Guest programs: what the virtual CPUs do to the test region, like KVM's memory stress selftests
//! (they touch the first 8 bytes of each page), and the page tables that a guest with paging builds
//! for itself.
//!
//! Guests verify what they read. A written value carries the round and the page's number
//! ([`value`]). So a page that is mapped to another's frame, a lost write and a write of a later
//! round all show as a [`GuestError::WrongValue`]. Where the host changes memory while the guest
//! runs, each virtual CPU also keeps a [`Ledger`] of its pages, and a wrong value of one of its own
//! pages shows as [`GuestError::NotAsWritten`].

mod cpu;
mod ledger;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::shadow::Gva;
use slat::{Gfn, Gpa, PAGE_SIZE, PageSize};
use thiserror::Error;

use crate::hardware::cpu::CpuError;
use crate::hardware::walk::guest::{PAGE, PRESENT, WRITABLE};

pub use cpu::GuestCpu;
pub use ledger::{Ledger, touch as touch_changing};

/// Guest-virtual address of the test region in a guest with paging on.
pub const REGION_GVA: Gva = Gva(0xc000_0000);

/// Bits of a value that are the page's number; the round is above.
pub const PAGE_BITS: u32 = 40;

/// Rounds are below this.
pub const ROUND_END: u64 = 1 << (64 - PAGE_BITS);

/// The value that a guest writes to page number `page` of the region in `round`. Rounds count from
/// 1, so that 0 is the value of a page which was never written.
#[inline]
pub const fn value(round: u64, page: u64) -> u64 {
    round << PAGE_BITS | page
}

/// The order in which a guest touches its pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Order {
    /// From the first to the last.
    #[default]
    Sequential,
    /// As many touches as pages, each of a random page.
    Random,
}

/// Which pages a virtual CPU touches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Sharing {
    /// Its own part of the region.
    #[default]
    Partitioned,
    /// All of the region.
    Overlapping,
}

/// The task of all virtual CPUs in a run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Program {
    /// The order of the touches.
    pub order: Order,
    /// Which pages each virtual CPU touches.
    pub sharing: Sharing,
    /// How many of a hundred touches are writes; the others are reads. At most 100.
    pub write_percent: u8,
    /// Start of the random numbers: virtual CPU n draws from `seed + n`, and differently in each
    /// round.
    pub seed: u64,
    /// The round that writes carry, from 1 on and below [`ROUND_END`]. No page holds a later one.
    pub round: u64,
    /// The oldest round that a read may find; 0 if pages may never have been written.
    pub oldest_round: u64,
}

impl Default for Program {
    /// Round 1: writes every page of a fresh region.
    fn default() -> Program {
        Program {
            order: Order::Sequential,
            sharing: Sharing::Partitioned,
            write_percent: 100,
            seed: 0,
            round: 1,
            oldest_round: 0,
        }
    }
}

/// Why a program is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum ProgramError {
    /// More than 100 percent of writes.
    #[error("{write_percent} percent of writes are more than 100")]
    WritePercent { write_percent: u8 },
    /// The round is 0 or too great, or older than the oldest that reads may find.
    #[error("round {round} is not between {} and {}", (*oldest_round).max(1), ROUND_END - 1)]
    Round { round: u64, oldest_round: u64 },
}

impl Program {
    /// Checks the program.
    ///
    /// # Errors
    /// [`ProgramError`]: why it is refused.
    pub fn check(&self) -> Result<(), ProgramError> {
        if self.write_percent > 100 {
            return Err(ProgramError::WritePercent { write_percent: self.write_percent });
        }
        if self.round == 0 || self.round >= ROUND_END || self.round < self.oldest_round {
            return Err(ProgramError::Round { round: self.round, oldest_round: self.oldest_round });
        }
        Ok(())
    }

    /// Whether a read of page number `page` may find `found` when the newest round is
    /// `newest_round`.
    #[inline]
    pub fn accepts(&self, page: u64, found: u64, newest_round: u64) -> bool {
        if found == 0 {
            return self.oldest_round == 0;
        }
        let round = found >> PAGE_BITS;
        found & ((1 << PAGE_BITS) - 1) == page && round != 0 && round >= self.oldest_round && round <= newest_round
    }
}

/// What a touch does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// Reads and verifies.
    Read,
    /// Writes the round and the page's number.
    Write,
}

/// One touch of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Touch {
    /// Number of the page in the region.
    pub page: u64,
    /// What the touch does.
    pub action: Action,
}

/// The touches of one virtual CPU in one pass over its pages.
#[derive(Clone, Debug)]
pub struct Touches {
    first_page: u64,
    nr_pages: u64,
    nr_done: u64,
    order: Order,
    write_percent: u8,
    rng: SmallRng,
}

impl Touches {
    /// The touches of virtual CPU `vcpu` of `nr_vcpus`, with `pages_per_vcpu` pages for each.
    pub fn new(program: &Program, vcpu: u64, nr_vcpus: u64, pages_per_vcpu: u64) -> Touches {
        let (first_page, nr_pages) = match program.sharing {
            Sharing::Partitioned => (vcpu * pages_per_vcpu, pages_per_vcpu),
            Sharing::Overlapping => (0, nr_vcpus * pages_per_vcpu),
        };
        // The round is in the upper half, so that the seeds of virtual CPUs differ from those of
        // the next round.
        let seed = program.seed.wrapping_add(vcpu) ^ program.round.rotate_left(40);
        Touches {
            first_page,
            nr_pages,
            nr_done: 0,
            order: program.order,
            write_percent: program.write_percent,
            rng: SmallRng::seed_from_u64(seed),
        }
    }

    /// Starts another pass; random numbers go on.
    pub fn rewind(&mut self) {
        self.nr_done = 0;
    }
}

impl Iterator for Touches {
    type Item = Touch;

    #[inline]
    fn next(&mut self) -> Option<Touch> {
        if self.nr_done >= self.nr_pages {
            return None;
        }
        let offset = match self.order {
            Order::Sequential => self.nr_done,
            Order::Random => self.rng.random_range(0..self.nr_pages),
        };
        self.nr_done += 1;
        let action = match self.write_percent {
            0 => Action::Read,
            percent if percent >= 100 || self.rng.random_range(0..100) < percent => Action::Write,
            _ => Action::Read,
        };
        Some(Touch { page: self.first_page + offset, action })
    }
}

/// An error that a guest found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum GuestError {
    /// An access did not complete.
    #[error("{action:?} of {gva}: {error}")]
    Access { gva: Gva, action: Action, error: CpuError },
    /// A read found a wrong value.
    #[error("read {found:#x} at {gva}: expected page {page:#x} and a round from {oldest_round} to {newest_round}")]
    WrongValue { gva: Gva, page: u64, found: u64, oldest_round: u64, newest_round: u64 },
    /// A read of a page that no other virtual CPU writes found neither the written value nor, after
    /// a discard, zeros.
    #[error("read {found:#x} at {gva}: page {page:#x} holds {expected:#x}, or zeros if it was discarded since")]
    NotAsWritten {
        gva: Gva,
        page: u64,
        found: u64,
        /// The value that was written, or was found before; see [`value`].
        expected: u64,
    },
    /// The memory for the guest's page tables is too small.
    #[error("guest tables need {needed_bytes} bytes of memory, there are {size_bytes}")]
    TablesTooBig { needed_bytes: u64, size_bytes: u64 },
    /// The CR3 value was refused, or another step of the guest's start failed.
    #[error("guest start: {0}")]
    Start(CpuError),
}

/// The address of page number `page` of the region at `region`.
#[inline]
fn page_gva(region: Gva, page: u64) -> Gva {
    Gva(region.0 + (page << Gfn::SHIFT))
}

/// Does one touch of the region at `region` (guest-virtual or guest-physical, by the CPU's mode).
/// After a read it calls `newest_round`, the newest round that the value may have.
///
/// # Errors
/// [`GuestError`]: the access failed or found a wrong value.
#[inline]
pub fn touch<C: GuestCpu>(
    cpu: &mut C,
    program: &Program,
    region: Gva,
    touch: Touch,
    newest_round: impl Fn() -> u64,
) -> Result<(), GuestError> {
    let Touch { page, action } = touch;
    let gva = page_gva(region, page);
    match action {
        Action::Write => {
            cpu.write(gva, value(newest_round(), page)).map_err(|error| GuestError::Access { gva, action, error })
        }
        Action::Read => {
            let found = cpu.read(gva).map_err(|error| GuestError::Access { gva, action, error })?;
            let newest_round = newest_round();
            if program.accepts(page, found, newest_round) {
                Ok(())
            } else {
                Err(GuestError::WrongValue { gva, page, found, oldest_round: program.oldest_round, newest_round })
            }
        }
    }
}

/// The page tables of a guest: their memory, and what they map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestTables {
    /// Memory for the page-table pages, page-aligned and zero.
    pub memory: Gpa,
    /// Size of that memory.
    pub memory_bytes: u64,
    /// First guest-virtual address to be mapped, page-aligned, in the lower half.
    pub gva: Gva,
    /// The guest-physical address that it is mapped to, page-aligned.
    pub gpa: Gpa,
    /// Number of 4 KiB pages to be mapped.
    pub nr_pages: u64,
    /// Size of the pages that map them; both addresses are aligned to it. With large pages a little
    /// more may be mapped.
    pub page_size: PageSize,
}

impl GuestTables {
    /// Level of the page-table pages that map pages.
    fn lowest(&self) -> u32 {
        u32::from(self.page_size.level().0)
    }

    /// First and number of the page-table pages of `level` (1 to 4), counted as if they covered all
    /// addresses.
    fn tables(&self, level: u32) -> (u64, u64) {
        let shift = Gfn::SHIFT + 9 * level;
        let last = self.gva.0 + (self.nr_pages.max(1) << Gfn::SHIFT) - 1;
        let first = self.gva.0 >> shift;
        (first, (last >> shift) - first + 1)
    }

    /// Bytes of memory that the page tables take.
    pub fn needed_bytes(&self) -> u64 {
        (self.lowest()..=4).map(|level| self.tables(level).1).sum::<u64>() << Gfn::SHIFT
    }

    /// Address of the first page-table page of `level`: the root comes first, the lowest level
    /// last.
    fn base(&self, level: u32) -> u64 {
        self.memory.0 + ((level + 1..=4).map(|above| self.tables(above).1).sum::<u64>() << Gfn::SHIFT)
    }

    /// Writes the page tables through `cpu`, as a guest with paging off does. Returns the value for
    /// CR3 (PCID 0).
    ///
    /// # Errors
    /// [`GuestError::TablesTooBig`], or an access that failed.
    pub fn build<C: GuestCpu>(&self, cpu: &mut C) -> Result<u64, GuestError> {
        let needed_bytes = self.needed_bytes();
        if needed_bytes > self.memory_bytes {
            return Err(GuestError::TablesTooBig { needed_bytes, size_bytes: self.memory_bytes });
        }
        let mut set = |level: u32, gva: u64, entry: u64| {
            let (first, _) = self.tables(level);
            let table = (gva >> (Gfn::SHIFT + 9 * level)) - first;
            let index = gva >> (Gfn::SHIFT + 9 * (level - 1)) & 0x1ff;
            let at = Gva(self.base(level) + table * PAGE_SIZE + index * 8);
            cpu.write(at, entry | PRESENT | WRITABLE).map_err(|error| GuestError::Access {
                gva: at,
                action: Action::Write,
                error,
            })
        };
        for level in self.lowest() + 1..=4 {
            let (first, count) = self.tables(level - 1);
            for child in 0..count {
                let gva = (first + child) << (Gfn::SHIFT + 9 * (level - 1));
                set(level, gva, self.base(level - 1) + child * PAGE_SIZE)?;
            }
        }
        let large = if self.page_size == PageSize::Size4K { 0 } else { PAGE };
        for offset in (0..self.nr_pages << Gfn::SHIFT).step_by(self.page_size.size_bytes() as usize) {
            set(self.lowest(), self.gva.0 + offset, (self.gpa.0 + offset) | large)?;
        }
        Ok(self.base(4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_touches_cover_each_part_once() {
        let program = Program::default();
        let mut all: Vec<u64> =
            (0..4).flat_map(|vcpu| Touches::new(&program, vcpu, 4, 10)).map(|touch| touch.page).collect();
        assert!(all.is_sorted());
        all.dedup();
        assert_eq!(all.len(), 40);
        let program = Program { sharing: Sharing::Overlapping, ..program };
        assert!(Touches::new(&program, 3, 4, 10).map(|touch| touch.page).eq(0..40));
    }

    #[test]
    fn random_touches_stay_in_their_part_and_are_reproducible() {
        let program = Program { order: Order::Random, write_percent: 30, seed: 7, ..Program::default() };
        let touches: Vec<Touch> = Touches::new(&program, 2, 4, 10_000).collect();
        assert_eq!(touches.len(), 10_000);
        assert!(touches.iter().all(|touch| (20_000..30_000).contains(&touch.page)));
        assert!(touches.iter().copied().eq(Touches::new(&program, 2, 4, 10_000)));
        let writes = touches.iter().filter(|touch| touch.action == Action::Write).count();
        assert!((2_500..3_500).contains(&writes), "{writes}");
        let next_round = Program { round: 2, ..program };
        assert!(!touches.iter().copied().eq(Touches::new(&next_round, 2, 4, 10_000)));
        let mut again = Touches::new(&program, 2, 4, 10);
        let first: Vec<Touch> = again.by_ref().collect();
        again.rewind();
        assert!(!again.eq(first));
    }

    #[test]
    fn values_are_checked() {
        let program = Program { round: 9, oldest_round: 5, ..Program::default() };
        assert!(program.accepts(3, value(5, 3), 9));
        assert!(program.accepts(3, value(9, 3), 9));
        assert!(!program.accepts(3, value(4, 3), 9), "a lost write");
        assert!(!program.accepts(3, value(10, 3), 9), "a later round");
        assert!(!program.accepts(3, value(9, 4), 9), "another page");
        assert!(!program.accepts(3, 0, 9), "a fresh page");
        let fresh = Program { oldest_round: 0, ..program };
        assert!(fresh.accepts(3, 0, 9));
        assert!(!fresh.accepts(3, value(0, 3), 9));
    }

    #[test]
    fn impossible_programs_are_refused() {
        let good = Program::default();
        assert_eq!(good.check(), Ok(()));
        assert!(matches!(Program { write_percent: 101, ..good }.check(), Err(ProgramError::WritePercent { .. })));
        for (round, oldest_round) in [(0, 0), (ROUND_END, 0), (3, 4)] {
            let program = Program { round, oldest_round, ..good };
            assert_eq!(program.check(), Err(ProgramError::Round { round, oldest_round }));
        }
    }

    #[test]
    fn the_size_of_guest_tables_is_exact() {
        let page_size = PageSize::Size4K;
        let (gva, gpa) = (REGION_GVA, Gpa(0));
        let tables = GuestTables { memory: gpa, memory_bytes: 0, gva, gpa, nr_pages: 512, page_size };
        assert_eq!(tables.needed_bytes(), 4 * PAGE_SIZE);
        let tables = GuestTables { nr_pages: 513, ..tables };
        assert_eq!(tables.needed_bytes(), 5 * PAGE_SIZE);
        // 1 GiB and a page: another page-table page of levels 2 and 1.
        let tables = GuestTables { nr_pages: (1 << 18) + 1, ..tables };
        assert_eq!(tables.needed_bytes(), (1 + 1 + 2 + 513) * PAGE_SIZE);
        let large = GuestTables { page_size: PageSize::Size2M, ..tables };
        assert_eq!(large.needed_bytes(), (1 + 1 + 2) * PAGE_SIZE);
        let tables = GuestTables { nr_pages: 0, ..tables };
        assert_eq!(tables.needed_bytes(), 4 * PAGE_SIZE);
    }
}
