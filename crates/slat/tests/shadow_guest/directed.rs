//! Fixed programs: bugs of other implementations, and cases that a random program rarely reaches.

use slat::Access;
use slat::shadow::{PagingRegister, PagingRegisters, Privilege, ShadowStrategy};

use super::architecture::{
    ACCESSED, CR0_PE, CR0_PG, CR0_WP, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_PSE, DIRTY, EFER_LMA, EFER_LME, EFER_NXE, LARGE,
    NO_EXECUTE, PRESENT, PagingMode, USER, WRITABLE,
};
use super::engine::{Engine, Hypervisor};
use super::entries::Layout;
use super::ops::ops;
use super::program::{Program, Setup};
use super::random::Random;
use super::stale::Caching;
use super::subject::{HostEvent, Observed, Subject};
use super::world::SLOTS;

/// Every right, and used before.
const ALL: u64 = PRESENT | WRITABLE | USER | ACCESSED | DIRTY;
pub const STRATEGIES: [ShadowStrategy; 4] =
    [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::RootsByPcid, ShadowStrategy::PcidTagged];

/// Where the page tables are: in the last memslot.
const ROOT: u64 = 1024;
const L3: u64 = 1025;
const L2: u64 = 1026;
const L1: u64 = 1027;
/// A page of the first memslot, and one of the second.
const A: u64 = 0;
const B: u64 = 512;

const fn to(gfn: u64, bits: u64) -> u64 {
    (gfn << 12) | bits
}

/// A guest with a fixed program.
struct Scene {
    program: Program<Engine>,
}

impl Scene {
    fn new(strategy: ShadowStrategy, seed: u64, nr_cpus: usize) -> Scene {
        let engine = Engine::new(nr_cpus, Hypervisor::of(seed, strategy));
        Scene {
            program: Program::with_slots(engine, nr_cpus, Caching::WhileCurrent, Layout::new(&mut Random::new(seed))),
        }
    }

    /// Stores `value` at `index` of the page table in frame `table`.
    fn set(&mut self, table: u64, index: u64, value: u64) {
        self.program.emulated_write(0, (table << 12) + 8 * index, &value.to_le_bytes());
    }

    fn registers(&mut self, cpu: usize, mode: PagingMode, root: u64) {
        let (cr4, efer) = match mode {
            PagingMode::Bits32 => (CR4_PSE, 0),
            PagingMode::Pae => (CR4_PAE, EFER_NXE),
            _ => (CR4_PAE | CR4_PCIDE | CR4_PGE, EFER_LME | EFER_LMA | EFER_NXE),
        };
        let registers = PagingRegisters { cr0: CR0_PE | CR0_PG | CR0_WP, cr3: root << 12, cr4, efer };
        self.program.set_registers(cpu, registers);
    }

    /// The guest's CPU writes PTE `index` of a page table through the page that is mapped at
    /// `window`.
    fn set_by(&mut self, cpu: usize, window: u64, index: u64, value: u64) {
        let observed = self.write(cpu, window + 8 * index, value);
        assert!(matches!(observed, Observed::Reached { .. }), "{observed:?}");
    }

    fn read(&mut self, cpu: usize, la: u64) -> Observed {
        self.program.access(cpu, la, Access::Read, Privilege::User, &[])
    }

    fn write(&mut self, cpu: usize, la: u64, value: u64) -> Observed {
        self.program.access(cpu, la, Access::Write, Privilege::User, &value.to_le_bytes())
    }
}

impl Scene {
    /// Four levels, whose lowest PTEs are empty at first. Page tables of level 2 and 1 can be
    /// written through windows.
    fn four_levels(strategy: ShadowStrategy, seed: u64) -> Scene {
        let mut scene = Scene::new(strategy, seed, 2);
        scene.set(ROOT, 0, to(L3, ALL));
        scene.set(L3, 0, to(L2, ALL));
        // The page table of level 2 as one of level 1: its PTEs map pages there, and one maps the
        // page table itself.
        scene.set(L2, 5, to(L2, ALL));
        scene.set(L2, 6, to(L1, ALL));
        (0..2).for_each(|cpu| scene.registers(cpu, PagingMode::FourLevel, ROOT));
        scene
    }

    /// All CPUs access each page at `la`.
    fn use_pages(&mut self, la: u64, nr_pages: u64) {
        for page in 0..nr_pages {
            for cpu in 0..2 {
                self.read(cpu, la + (page << 12));
                self.write(cpu, la + (page << 12) + 64, page);
                self.program.access(cpu, la + (page << 12), Access::Write, Privilege::Supervisor, &[1]);
            }
        }
    }

    fn flush(&mut self, la: u64) {
        (0..2).for_each(|cpu| self.program.invlpg(cpu, la));
    }

    /// Moves the frames of some pages, then deletes all memory. No CPU reaches any of it, and no
    /// reverse map has a leaf of it.
    fn remove_memory(mut self, las: &[u64]) {
        for gfn in (A..A + 16).chain(B..B + 16).chain(ROOT..ROOT + 16) {
            self.program.subject.host_event(HostEvent::MoveFrame { gfn });
            las.iter().for_each(|&la| self.use_pages(la, 2));
        }
        for slot in [1, 0, 2] {
            let (first_gfn, nr_pages) = SLOTS[slot];
            self.program.subject.delete_slot(slot, first_gfn);
            (first_gfn..first_gfn + nr_pages).for_each(|gfn| self.program.oracle.set_memory(gfn, None));
            las.iter().for_each(|&la| self.use_pages(la, 16));
        }
        assert_eq!(self.program.subject.vm.stats().shadow_leaves(), 0, "leaves of deleted memory");
        self.program.subject.check_end([None; 3]);
    }
}

/// Switches the one CPU of an engine to page tables of four levels.
pub fn four_level_registers(engine: &mut Engine, root: u64) {
    let (cr4, efer) = (CR4_PAE, EFER_LME | EFER_LMA | EFER_NXE);
    let registers = PagingRegisters { cr0: CR0_PE | CR0_PG | CR0_WP, cr3: root << 12, cr4, efer };
    engine.set_registers(0, registers).unwrap();
}

/// The windows of a scene with four levels: on the page table of level 2 and on that of level 1.
const WINDOW_L2: u64 = (5 << 21) | (5 << 12);
const WINDOW_L1: u64 = (5 << 21) | (6 << 12);

fn each_scene(run: impl Fn(Scene, u64)) {
    for strategy in STRATEGIES {
        for seed in 0..8 {
            run(Scene::four_levels(strategy, seed), seed);
        }
    }
}

/// CVE-2026-46113: a PTE names another frame than the one that its linked child was made for.
#[test]
fn a_child_is_not_reused_for_another_frame() {
    each_scene(|mut scene, seed| {
        let values = [
            to(A, ALL | LARGE),
            to(B, ALL | LARGE),
            to(L1, ALL),
            to(L1 + 1, ALL),
            to(A, ALL | LARGE),
            to(L1, ALL),
            to(B, ALL | LARGE),
        ];
        for index in 0..8 {
            scene.set(L1, index, to(A + 8 + index, ALL));
            scene.set(L1 + 1, index, to(B + 8 + index, ALL));
        }
        for (step, value) in values.into_iter().enumerate() {
            // By a CPU of the guest, or by emulation.
            if (step as u64 + seed).is_multiple_of(2) {
                scene.set(L2, 0, value);
            } else {
                scene.set_by(step % 2, WINDOW_L2, 0, value);
            }
            scene.use_pages(0, 4);
            scene.flush(0);
            scene.use_pages(0, 8);
        }
        scene.remove_memory(&[0]);
    });
}

/// CVE-2026-53359: the frame is the same, but the role of the child differs: other rights, another
/// level.
#[test]
fn a_child_is_not_reused_for_another_role() {
    each_scene(|mut scene, seed| {
        for index in 0..8 {
            scene.set(L1, index, to(A + index, ALL));
        }
        let rights = [ALL, ALL & !WRITABLE, ALL & !USER, ALL | NO_EXECUTE, ALL, ALL & !DIRTY];
        for (step, &bits) in rights.iter().cycle().take(12).enumerate() {
            // The same page table, by two PTEs with different rights; and the same large page.
            let other = rights[(step + 1) % rights.len()];
            for (index, value) in
                [(0, to(L1, bits)), (1, to(L1, other)), (2, to(A, bits | LARGE)), (3, to(A, other | LARGE))]
            {
                if (step as u64 + seed).is_multiple_of(2) {
                    scene.set(L2, index, value);
                } else {
                    scene.set_by(0, WINDOW_L2, index, value);
                }
            }
            // As a page table of level 2, too, and of level 3.
            scene.set(L3, 1, to(L1, bits));
            scene.set(ROOT, 1, to(L1, other));
            for la in [0, 1 << 21, 2 << 21, 3 << 21, 1 << 30, 1 << 39] {
                scene.use_pages(la, 2);
                scene.flush(la);
                scene.use_pages(la, 3);
            }
            // As for a supervisor that ignores read-only pages.
            let cr0 = scene.program.oracle.cpus[1].registers.cr0;
            scene.program.write_register(1, PagingRegister::Cr0, cr0 ^ CR0_WP);
            scene.use_pages(0, 3);
            // The leaves, through the guest's own window.
            scene.set_by(0, WINDOW_L1, step as u64 % 8, to(B + step as u64, bits));
            scene.flush((step as u64 % 8) << 12);
            scene.use_pages(0, 8);
        }
        scene.remove_memory(&[0, 1 << 21, 2 << 21, 3 << 21, 1 << 30, 1 << 39]);
    });
}

/// The same with PTEs of 4 bytes, where several shadow pages shadow parts of a guest's page table.
#[test]
fn a_child_is_not_reused_for_another_part_of_its_table() {
    for (strategy, seed) in STRATEGIES.into_iter().flat_map(|strategy| (0..8).map(move |seed| (strategy, seed))) {
        let mut scene = Scene::new(strategy, seed, 2);
        let pair = |low: u64, high: u64| low | (high << 32);
        for index in [0, 1, 256, 257] {
            scene.set(L1, index, pair(to(A + index % 64, ALL), to(B + index % 64, ALL)));
            scene.set(L1 + 1, index, pair(to(B + index % 64, ALL), to(A + index % 64, ALL)));
        }
        (0..2).for_each(|cpu| scene.registers(cpu, PagingMode::Bits32, ROOT));
        // Two halves of 2 MiB each, of a page table and of a large page; and quarters of the root.
        let las = [0, 1 << 21, 1 << 22, 3 << 21, 1 << 30, (1 << 30) | (1 << 21), 3 << 30];
        for step in 0..6 {
            let [first, second] = if step % 2 == 0 { [L1, L1 + 1] } else { [L1 + 1, L1] };
            let large = if step < 3 { to(A, ALL | LARGE) } else { to(second, ALL) };
            scene.set(ROOT, 0, pair(to(first, ALL), large));
            scene.set(ROOT, 128, pair(to(second, ALL), to(first, ALL & !WRITABLE)));
            scene.set(ROOT, 384, pair(to(first, ALL & !USER), to(first, ALL)));
            for la in las {
                scene.use_pages(la, 2);
                scene.flush(la);
                scene.use_pages(la, 3);
            }
        }
        scene.remove_memory(&las);
    }
}

/// Each allocation fails in turn: the call returns the error, has changed nothing, and succeeds
/// when there is memory again.
#[test]
fn an_allocation_that_fails_leaves_all_as_it_was() {
    let mut nr_failed = 0;
    for strategy in STRATEGIES {
        for seed in 0..2 {
            for nth in 0.. {
                let setup = Setup { seed, nr_cpus: 2, caching: Caching::AnyTime };
                let mut program = Program::new(Engine::new(2, Hypervisor::of(seed, strategy)), setup);
                program.subject.vm.host().fail_after(nth);
                program.run(&ops(seed, 40), &mut 0);
                let failed = program.subject.nr_failed;
                program.subject.vm.host().fail_after(-1);
                let last_slot = program.last_slot();
                program.subject.check_end([Some(SLOTS[0].0), Some(SLOTS[1].0), last_slot]);
                nr_failed += failed;
                if failed == 0 {
                    break;
                }
            }
        }
    }
    assert!(nr_failed > 100, "{nr_failed} calls failed");
}
