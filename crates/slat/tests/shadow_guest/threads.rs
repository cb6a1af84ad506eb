//! The same program on several threads at once, with a host that moves frames, harvests and ages
//! beside them.
//!
//! The observations of one thread depend on no other: each has page tables and pages of its own,
//! which only it writes, so its oracle knows all their values. The threads share the engine, and a
//! few frames that all of them map and in which all of them write only zeroes. Each also uses page
//! tables that all of them change. No oracle can predict where those lead. But it must be memory of
//! the guest, and the page-table pages of the engine must be sound.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use slat::Access;
use slat::shadow::{Privilege, ShadowStrategy};

use super::engine::{Engine, Hypervisor};
use super::entries::Layout;
use super::ops::{Kind, ops};
use super::program::{Figures, Program};
use super::random::Random;
use super::subject::{By, HostEvent, Observed, Subject};
use super::world::{SLOTS, World};

const NR_THREADS: u64 = 3;

/// Pages that only this thread uses.
fn pages_of(thread: u64) -> Range<u64> {
    let first = 8 + 64 * thread;
    first..first + 40
}

/// Pages that all threads map.
const SHARED: Range<u64> = 480..484;
/// Page tables that all threads write, one of each of four levels, and their targets.
const CONTESTED: Range<u64> = 520..528;

/// The actions of the hypervisor and of the CPUs of other guests meanwhile.
fn host(engine: &mut Engine, seed: u64, nr_running: &AtomicUsize) -> BTreeSet<u64> {
    let mut random = Random::new(seed);
    let mut reported = BTreeSet::new();
    while nr_running.load(Ordering::SeqCst) > 0 {
        match random.below(16) {
            0 => reported.append(&mut engine.harvest(0, SLOTS[0].0)),
            1 => engine.host_event(HostEvent::Age { first_gfn: SLOTS[0].0, nr_pages: 256 }),
            2 => engine.host_event(HostEvent::Reclaim),
            3 => engine.host_event(HostEvent::MoveFrame { gfn: random.pick(&[SHARED.start, CONTESTED.start]) }),
            4..=8 => {
                let gfn = pages_of(random.below(NR_THREADS as usize) as u64).start + random.below(40) as u64;
                engine.host_event(HostEvent::MoveFrame { gfn });
            }
            _ => {}
        }
        std::thread::yield_now();
    }
    reported.append(&mut engine.harvest(0, SLOTS[0].0));
    reported
}

/// Uses page tables that other threads change, and changes them.
fn contest(engine: &mut Engine, random: &mut Random) {
    let [table, target] = [(); 2].map(|()| CONTESTED.start + random.below(8) as u64);
    let index = random.below(3) as u64;
    match random.below(8) {
        0 | 1 => {
            let value = (target << 12) | 0x67 | random.pick(&[0, 0, 2, 4]);
            engine.write_table(0, (table << 12) + 8 * index, &value.to_le_bytes()).unwrap();
        }
        2 => engine.invlpg(0, (index << 12) | (index << 21)).unwrap(),
        3 => {
            engine.load_cr3(0, CONTESTED.start << 12).unwrap();
        }
        _ => {
            let la =
                random.below(3) as u64 * ((1 << 12) + (1 << 30)) + random.below(3) as u64 * ((1 << 21) + (1 << 39));
            let access = random.pick(&[Access::Read, Access::Write, Access::Execute]);
            let value = (target << 12) | 0x67;
            let mut effect = |world: &World, gpa: u64| {
                assert!(CONTESTED.contains(&(gpa >> 12)), "{la:#x} leads to {gpa:#x}");
                if access == Access::Write {
                    world.word(gpa).unwrap().store(value, Ordering::SeqCst);
                }
            };
            let la = la + 8 * random.below(3) as u64;
            let observed = engine.access(0, la, access, Privilege::User, &mut effect).unwrap();
            if let Observed::Reached { gpa, by: By::Emulation } = observed {
                assert!(CONTESTED.contains(&(gpa >> 12)), "{la:#x} leads to {gpa:#x}");
                engine.write_table(0, gpa, &value.to_le_bytes()).unwrap();
            }
        }
    }
}

/// One program on all threads.
fn run(strategy: ShadowStrategy, seed: u64, nr_ops: usize) -> Figures {
    let caching = super::caching(strategy);
    let mut hypervisor = Hypervisor::of(seed, strategy);
    hypervisor.has_huge_pages = false;
    let mut engine = Engine::new(0, hypervisor);
    (0..SLOTS.len()).for_each(|slot| engine.create_slot(slot, None));
    let begin = |thread| {
        let mut random = Random::new(seed ^ (thread << 40));
        let layout = Layout::of_thread(&mut random, pages_of(thread), SHARED);
        let mut program = Program::beside(engine.beside(), 1, caching, layout);
        program.begin(&mut random);
        program
    };
    let programs: Vec<Program<Engine>> = (0..NR_THREADS).map(begin).collect();
    let contestants: Vec<Engine> = (0..2).map(|_| engine.beside()).collect();
    let nr_running = AtomicUsize::new(programs.len() + contestants.len());
    let (figures, written, reported) = std::thread::scope(|scope| {
        let nr_running = &nr_running;
        let run = |(thread, mut program): (usize, Program<Engine>)| {
            scope.spawn(move || {
                let _running = Running(nr_running);
                let mut random = Random::new(seed ^ thread as u64);
                // The host thread makes the host's actions. A long write would make PTEs that lead
                // to pages of other threads.
                let is_ours = |kind| {
                    !matches!(kind, Kind::MoveFrame | Kind::Harvest | Kind::ChangeSlot | Kind::Age | Kind::LongWrite)
                };
                for op in ops(seed ^ ((thread as u64) << 40), nr_ops).into_iter().filter(|op| is_ours(op.kind)) {
                    program.step(op);
                    if random.chance(2) {
                        std::thread::yield_now();
                    }
                }
                program.figures.stale = program.oracle.nr_stale;
                (program.figures, std::mem::take(&mut program.oracle.dirty))
            })
        };
        let threads: Vec<_> = programs.into_iter().enumerate().map(run).collect();
        for (number, mut contestant) in contestants.into_iter().enumerate() {
            scope.spawn(move || {
                let _running = Running(nr_running);
                let mut random = Random::new(seed ^ 0xc0 ^ number as u64);
                super::directed::four_level_registers(&mut contestant, CONTESTED.start);
                (0..nr_ops).for_each(|_| contest(&mut contestant, &mut random));
            });
        }
        let reported = host(&mut engine, seed, nr_running);
        let (mut figures, mut written) = (Figures::default(), BTreeSet::new());
        for thread in threads {
            let (of_thread, mut dirty) = thread.join().unwrap();
            figures += of_thread;
            written.append(&mut dirty);
        }
        (figures, written, reported)
    });
    let missing: Vec<_> = written.difference(&reported).filter(|&&gfn| gfn < SLOTS[0].1).collect();
    assert!(missing.is_empty(), "pages that were written, and not reported: {missing:x?}");
    engine.check_end(SLOTS.map(|(first_gfn, _)| Some(first_gfn)));
    figures
}

/// Counts a thread as ended, also when it fails: the host waits for all.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn threads_do_not_disturb_each_other() {
    let first = super::setting("SHADOW_SEED", 0);
    let share = super::setting("SHADOW_STEPS", 1_050_000) / 12;
    let mut figures = Figures::default();
    let mut seed = first;
    while figures.steps < share || seed < first + 4 {
        let strategy = super::directed::STRATEGIES[seed as usize % 4];
        println!("seed {seed:#x}, {strategy:?}");
        figures += run(strategy, seed, 1500);
        seed += 1;
    }
    println!("{} programs on {NR_THREADS} threads: {figures:?}", seed - first);
}
