//! The CPU over shadow page tables built by hand: what it caches, and for how long. The hypervisor
//! is a script.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use slat::error::FaultError;
use slat::shadow::PagingRegister::Cr3;
use slat::{Gfn, GfnRange};

use super::*;
use crate::hardware::commit::FlushDomain;
use crate::hardware::walk::tests::Page;

pub(super) const PRESENT: u64 = 1;
pub(super) const RW: u64 = 2;
pub(super) const US: u64 = 4;
pub(super) const A: u64 = 1 << 5;
pub(super) const D: u64 = 1 << 6;
pub(super) const PS: u64 = 1 << 7;
pub(super) const NX: u64 = 1 << 63;
const LINK: u64 = PRESENT | RW | US;

/// Indexes 1 (of level 5), 2, 3, 4, and 5 plus the page's number.
const INDEXES: [u64; 5] = [5, 4, 3, 2, 1];
pub(super) const NR_PAGES: usize = 4;

/// The address of page `n` with page tables of four levels.
pub(super) fn at(n: u64) -> Gva {
    Gva(2 << 39 | 3 << 30 | 4 << 21 | (5 + n) << 12)
}

/// The same with five levels.
pub(super) fn at_in_five_levels(n: u64) -> Gva {
    Gva(1 << 48 | at(n).0)
}

/// A call of the hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    Entry,
    Exit(ShadowExit),
}

/// Its answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    Exit(Exit),
    Fail(FaultError),
    /// Sets the PTE of a page in the lowest page-table page of the first address space, and
    /// resumes.
    Map(u64, u64),
}

pub(super) struct Script {
    pub(super) entry: GuestEntry,
    pub(super) calls: Vec<Call>,
    /// The answers to the next calls, entries excepted. After these, a page fault is the guest's,
    /// and any other call is done.
    pub(super) answers: VecDeque<Answer>,
}

/// Two address spaces, with page tables of five levels each, and the pages that they map.
pub(super) struct World {
    spaces: [[Page; 5]; 2],
    data: [Page; NR_PAGES],
    pub(super) domain: Arc<FlushDomain>,
    script: Mutex<Script>,
}

impl World {
    /// All pages are mapped, writable, for the user, in both spaces: in the second in reverse
    /// order.
    pub(super) fn new() -> Arc<World> {
        let entry = GuestEntry { root: Hpa(0), levels: 4, pcid: 1, flush: LocalFlush::None };
        let world = Arc::new(World {
            spaces: std::array::from_fn(|_| std::array::from_fn(|_| Page::new())),
            data: std::array::from_fn(|_| Page::new()),
            domain: Arc::new(FlushDomain::waiting()),
            script: Mutex::new(Script { entry, calls: vec![], answers: VecDeque::new() }),
        });
        for (n, page) in world.data.iter().enumerate() {
            page.0[0].store(n as u64, Ordering::Relaxed);
        }
        for space in 0..2 {
            for level in 2..=5 {
                world.set(space, level, 0, world.spaces[space][level - 2].hpa().0 | LINK);
            }
            for n in 0..NR_PAGES {
                let data = if space == 0 { n } else { NR_PAGES - 1 - n };
                world.set(space, 1, n as u64, world.frame(data) | LINK);
            }
        }
        world.script().entry.root = world.root(0, 4);
        world
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }

    pub(super) fn root(&self, space: usize, levels: usize) -> Hpa {
        self.spaces[space][levels - 1].hpa()
    }

    pub(super) fn frame(&self, data: usize) -> u64 {
        self.data[data].hpa().0
    }

    pub(super) fn word(&self, data: usize) -> u64 {
        self.data[data].0[0].load(Ordering::Relaxed)
    }

    fn entry(&self, space: usize, level: usize, page: u64) -> &AtomicU64 {
        let index = INDEXES[level - 1] + if level == 1 { page } else { 0 };
        &self.spaces[space][level - 1].0[index as usize]
    }

    pub(super) fn get(&self, space: usize, level: usize, page: u64) -> u64 {
        self.entry(space, level, page).load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, space: usize, level: usize, page: u64, entry: u64) {
        self.entry(space, level, page).store(entry, Ordering::Release);
    }

    pub(super) fn cpu(self: &Arc<World>) -> ShadowCpu<Hypervisor> {
        ShadowCpu::new(Hypervisor(Arc::clone(self)), Port::new(&self.domain), 7, Geometry::default())
    }

    /// Has the CPU exit and enter again, with this entry.
    fn reenter(&self, cpu: &mut ShadowCpu<Hypervisor>, change: impl Fn(&mut GuestEntry)) {
        change(&mut self.script().entry);
        cpu.exit_guest_mode();
    }
}

pub(super) struct Hypervisor(Arc<World>);

impl ShadowHandler for Hypervisor {
    fn entry(&mut self) -> Result<GuestEntry, FaultError> {
        let mut script = self.0.script();
        script.calls.push(Call::Entry);
        let entry = script.entry;
        script.entry.flush = LocalFlush::None;
        Ok(entry)
    }

    fn handle_exit(&mut self, exit: ShadowExit) -> Result<Outcome, FaultError> {
        let mut script = self.0.script();
        script.calls.push(Call::Exit(exit));
        match (script.answers.pop_front(), exit) {
            (Some(Answer::Exit(exit)), _) => Ok(Outcome::Exit(exit)),
            (Some(Answer::Fail(error)), _) => Err(error),
            (Some(Answer::Map(page, entry)), _) => {
                self.0.set(0, 1, page, entry);
                Ok(Outcome::Resume)
            }
            (None, ShadowExit::PageFault(gva, _)) => Ok(Outcome::Exit(Exit::PageFault { gva, error_code: 1 << 7 })),
            (None, _) => Ok(Outcome::Resume),
        }
    }
}

/// A long-mode guest's registers with these bits in CR4.
pub(super) fn long_mode(cr4: u64) -> PagingRegisters {
    PagingRegisters { cr0: 1 << 31 | 1, cr3: 0, cr4: 1 << 5 | cr4, efer: 1 << 8 }
}

/// The guest's own page fault, which the hypervisor injects without another answer.
pub(super) fn injected<T>(gva: Gva) -> Result<T, CpuError> {
    Err(CpuError::Guest(GuestFault::Page { gva, error_code: 1 << 7 }))
}

#[test]
fn reads_writes_and_fetches_through_the_tlb() {
    let world = World::new();
    let mut cpu = world.cpu();
    assert_eq!(cpu.read(at(2)), Ok(2));
    assert_eq!(cpu.fetch(at(2)), Ok(2), "from the TLB");
    let expected = ShadowCpuCounters {
        nr_accesses: 2,
        nr_reads: 2,
        nr_tlb_misses: 1,
        nr_walks: 1,
        nr_entries: 1,
        ..ShadowCpuCounters::default()
    };
    assert_eq!(cpu.counters(), expected);
    assert_eq!(world.get(0, 1, 2) & (A | D), A);
    assert_eq!(cpu.write(at(2), 22), Ok(()));
    assert_eq!(world.get(0, 1, 2) & (A | D), A | D, "set by a walk");
    assert_eq!((cpu.read(at(2)), world.word(2)), (Ok(22), 22));
    let since = cpu.counters().since(expected);
    assert_eq!(
        since,
        ShadowCpuCounters {
            nr_accesses: 2,
            nr_reads: 1,
            nr_tlb_misses: 1,
            nr_walks: 1,
            ..ShadowCpuCounters::default()
        }
    );
    for level in 2..=4 {
        assert_eq!(world.get(0, level, 0) & (A | D), A, "level {level}");
    }
    assert_eq!(cpu.read(Gva(at(0).0 + 4)), Err(CpuError::Unaligned { gva: Gva(at(0).0 + 4) }));
}

#[test]
fn large_pages_are_cached_whole() {
    for (level, size) in [(2, 1_u64 << 21), (3, 1 << 30)] {
        let world = World::new();
        let mut cpu = world.cpu();
        // There is no memory of such a size: only the page around the data is touched.
        let base = world.frame(1) & !(size - 1);
        let offset = world.frame(1) - base;
        world.set(0, level, 0, base | LINK | PS);
        let gva = |offset: u64| Gva((at(0).0 & !(size - 1)) + offset);
        assert_eq!(cpu.read(gva(offset)), Ok(1));
        assert_eq!(cpu.write(gva(offset + 8), 5), Ok(()));
        assert_eq!(cpu.read(gva(offset + 8)), Ok(5));
        assert_eq!(cpu.counters().nr_walks, 2);
        assert_eq!(world.get(0, level, 0) & (A | D), A | D);
        // An address in the middle of the page drops all of it.
        world.reenter(&mut cpu, |entry| entry.flush = LocalFlush::Page(gva(size / 2)));
        assert_eq!(cpu.read(gva(offset)), Ok(1));
        assert_eq!(cpu.counters().nr_walks, 3);
    }
}

#[test]
fn pages_are_translated_by_five_levels() {
    let world = World::new();
    let mut cpu = world.cpu();
    assert_eq!(cpu.set_registers(long_mode(1 << 12)), Ok(()));
    world.reenter(&mut cpu, |entry| (entry.root, entry.levels) = (world.root(0, 5), 5));
    assert_eq!(cpu.read(at_in_five_levels(3)), Ok(3));
    assert_eq!(world.get(0, 5, 0) & A, A);
    assert_eq!(cpu.read(at(3)), injected(at(3)), "index 0 of the root");
    for (gva, is_canonical) in [(1 << 55, true), (1 << 56, false), (0xff << 56, true), (0xfe << 56, false)] {
        let expected = if is_canonical {
            injected(Gva(gva))
        } else {
            Err(CpuError::Guest(GuestFault::NonCanonical { gva: Gva(gva) }))
        };
        assert_eq!(cpu.read(Gva(gva)), expected, "{gva:#x}");
    }
}

/// Intel SDM vol. 3A, "Operations that Invalidate TLBs and Paging-Structure Caches".
#[test]
fn a_page_fault_of_the_guest_drops_the_translation() {
    let world = World::new();
    let mut cpu = world.cpu();
    world.set(0, 1, 0, world.frame(0) | PRESENT | US);
    world.set(0, 1, 1, world.frame(1) | PRESENT | US);
    assert_eq!((cpu.read(at(0)), cpu.read(at(1))), (Ok(0), Ok(1)));
    world.set(0, 1, 0, 0);
    world.set(0, 1, 1, 0);
    assert_eq!(cpu.read(at(0)), Ok(0), "it was not flushed");
    let counters = cpu.counters();
    assert!(matches!(cpu.write(at(0), 1), Err(CpuError::Guest(GuestFault::Page { .. }))));
    assert_eq!(cpu.read(at(0)), injected(at(0)));
    assert_eq!(cpu.read(at(1)), Ok(1), "another page's is left");
    assert_eq!(cpu.counters().since(counters).nr_page_fault_exits, 2);
}

#[test]
fn translations_belong_to_the_pcid_and_not_to_the_root() {
    let world = World::new();
    let mut cpu = world.cpu();
    assert_eq!(cpu.read(at(0)), Ok(0));
    // Another PCID: the other space.
    world.reenter(&mut cpu, |entry| (entry.root, entry.pcid) = (world.root(1, 4), 2));
    assert_eq!(cpu.read(at(0)), Ok(3));
    let walks = cpu.counters().nr_walks;
    // Back: all is still cached.
    world.reenter(&mut cpu, |entry| (entry.root, entry.pcid) = (world.root(0, 4), 1));
    assert_eq!(cpu.read(at(0)), Ok(0));
    assert_eq!(cpu.counters().nr_walks, walks);
    // The other root under the same PCID, without a flush: cached translations are used, for others
    // there is a walk.
    world.reenter(&mut cpu, |entry| entry.root = world.root(1, 4));
    assert_eq!((cpu.read(at(0)), cpu.read(at(1))), (Ok(0), Ok(2)));
    // With a flush of the context.
    world.reenter(&mut cpu, |entry| entry.flush = LocalFlush::Context);
    assert_eq!((cpu.read(at(0)), cpu.read(at(1))), (Ok(3), Ok(2)));
}

/// Which of the pages 0 and 1 of PCIDs 1 and 2 still have their old translation after all of them
/// changed, and `drop_some` was called.
fn stale_after(drop_some: impl Fn(&World, &mut ShadowCpu<Hypervisor>)) -> [[bool; 2]; 2] {
    let world = World::new();
    let mut cpu = world.cpu();
    let select = |cpu: &mut ShadowCpu<Hypervisor>, space: usize| {
        world.reenter(cpu, |entry| (entry.root, entry.pcid) = (world.root(space, 4), 1 + space as u16));
    };
    for space in [1, 0] {
        select(&mut cpu, space);
        for n in 0..2 {
            assert!(cpu.read(at(n)).is_ok());
        }
    }
    for (space, n) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        world.set(space, 1, n, 0);
    }
    // The CPU is in PCID 1.
    drop_some(&world, &mut cpu);
    [0, 1].map(|space| {
        select(&mut cpu, space);
        [0, 1].map(|n| cpu.read(at(n)).is_ok())
    })
}

#[test]
fn a_flush_drops_its_translations_and_no_others() {
    let local = |flush: LocalFlush| {
        stale_after(move |world, cpu| {
            world.reenter(cpu, |entry| entry.flush = flush);
            // Some operation that exits, for the entry.
            assert_eq!(cpu.read(at(3)), Ok(3));
        })
    };
    let [all, none] = [[[true; 2]; 2], [[false; 2]; 2]];
    assert_eq!(local(LocalFlush::None), all);
    assert_eq!(local(LocalFlush::Page(Gva(at(0).0 + 0x123))), [[false, true]; 2], "in all PCIDs");
    assert_eq!(local(LocalFlush::Page(at(2))), all);
    assert_eq!(local(LocalFlush::Context), [[false; 2], [true; 2]]);
    assert_eq!(local(LocalFlush::All), none);
    // Not even the guest's own instructions: the hypervisor decides their effect.
    let instructions = stale_after(|_, cpu| {
        assert_eq!((cpu.invlpg(at(0)), cpu.write_register(Cr3, 0), cpu.invpcid(2, [0; 2])), (Ok(()), Ok(()), Ok(())));
    });
    assert_eq!(instructions, all);
    // Flushes of the domain, of any range.
    let flush = |ranges: &'static [GfnRange]| stale_after(|world, _| world.domain.flush(ranges));
    assert_eq!(flush(&[]), none);
    assert_eq!(flush(&[GfnRange { start: Gfn(1 << 30), end: Gfn(1 + (1 << 30)) }]), none);
}

#[test]
fn flushes_of_the_domain_are_counted_and_are_no_exits() {
    let world = World::new();
    let mut cpu = world.cpu();
    for n in 0..3 {
        assert_eq!(cpu.read(at(n)), Ok(n));
    }
    let before = cpu.counters();
    world.domain.flush(&[]);
    world.domain.flush(&[]);
    assert_eq!(cpu.read(at(0)), Ok(0));
    let expected = ShadowCpuCounters {
        nr_accesses: 1,
        nr_reads: 1,
        nr_tlb_misses: 1,
        nr_walks: 1,
        nr_flushes_seen: 2,
        nr_full_drops: 1,
        // Of a CPU that is in the guest, whatever the number of flushes.
        nr_interruptions: 1,
        nr_translations_dropped: 3,
        ..ShadowCpuCounters::default()
    };
    assert_eq!(cpu.counters().since(before), expected);
}

#[test]
fn a_walk_replaces_a_translation_with_too_few_rights() {
    let world = World::new();
    let mut cpu = world.cpu();
    // Page 0 is cached read-only, with frame 0; then it gets frame 1, writable, without a flush.
    world.set(0, 1, 0, world.frame(0) | PRESENT | US);
    assert_eq!(cpu.read(at(0)), Ok(0));
    world.set(0, 1, 0, world.frame(1) | PRESENT | US | RW);
    assert_eq!(cpu.read(at(0)), Ok(0), "the old one still serves reads");
    assert_eq!(cpu.write(at(0), 11), Ok(()), "and a write walks before it faults");
    assert_eq!((world.word(0), world.word(1)), (0, 11));
    assert_eq!(cpu.read(at(0)), Ok(11), "by the new one");
    assert_eq!((cpu.counters().nr_walks, cpu.counters().nr_page_fault_exits), (2, 0));
}

#[test]
fn a_write_sets_the_dirty_bit_though_a_read_has_cached_the_page() {
    let world = World::new();
    let mut cpu = world.cpu();
    for (page, preset) in [(0, 0), (1, A), (2, A | D)] {
        world.set(0, 1, page, world.get(0, 1, page) | preset);
        assert!(cpu.read(at(page)).is_ok());
        assert_eq!(world.get(0, 1, page) & (A | D), A | preset);
        let walks = cpu.counters().nr_walks;
        assert_eq!(cpu.write(at(page), 1), Ok(()));
        assert_eq!(world.get(0, 1, page) & (A | D), A | D);
        assert_eq!(cpu.counters().nr_walks - walks, u64::from(preset & D == 0), "{preset:#x}");
    }
}

/// What the owner of a page writes there after the flush; no CPU writes it.
const OWNED: u64 = u64::MAX;

#[test]
fn no_access_reaches_a_page_after_its_flush() {
    let world = World::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (found, nr_seen) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (world, stop, found, nr_seen) = (&world, &stop, &found, &nr_seen);
            scope.spawn(move || {
                let mut cpu = world.cpu();
                let mut n = seed;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    if n % 3 > 0 {
                        assert_eq!(cpu.write(at(0), n), Ok(()));
                    } else if cpu.read(at(0)) == Ok(OWNED) {
                        found.fetch_add(1, Ordering::Relaxed);
                    }
                    nr_seen.fetch_max(cpu.counters().nr_flushes_seen, Ordering::Relaxed);
                }
            });
        }
        let mut turn = 0;
        // However late the CPUs' threads get a processor.
        while turn < 20_000 || nr_seen.load(Ordering::Relaxed) < 100 {
            turn += 1;
            let [old, new] = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
            world.data[new].0[0].store(0, Ordering::SeqCst);
            world.set(0, 1, 0, world.frame(new) | LINK);
            world.domain.flush(&[]);
            world.data[old].0[0].store(OWNED, Ordering::SeqCst);
            std::hint::spin_loop();
            if world.word(old) != OWNED {
                found.fetch_add(1, Ordering::Relaxed);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(found.into_inner(), 0);
}
