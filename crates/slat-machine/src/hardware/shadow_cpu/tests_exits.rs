//! Exits and entries: the calls of the hypervisor and their order, the effects of its answers, and
//! the counts.

use super::tests::*;
use super::*;
use slat::error::FaultError;
use slat::shadow::PagingRegister::{self, Cr0, Cr3, Cr4, Efer};

/// The calls of the hypervisor since the last time.
fn calls(world: &World) -> Vec<Call> {
    std::mem::take(&mut world.script().calls)
}

fn answer(world: &World, answer: Answer) {
    world.script().answers.push_back(answer);
}

const REGISTERS: [PagingRegister; 4] = [Cr0, Cr3, Cr4, Efer];
const READ: GuestAccess = GuestAccess { access: Access::Read, privilege: Privilege::Supervisor };
const WRITE: GuestAccess = GuestAccess { access: Access::Write, privilege: Privilege::Supervisor };

#[test]
fn each_exit_is_followed_by_one_entry() {
    let world = World::new();
    let mut cpu = world.cpu();
    let registers = long_mode(0);
    let expected = |exit| vec![Call::Entry, Call::Exit(exit)];
    for (register, value) in
        [(Cr4, registers.cr4), (Efer, registers.efer), (Cr0, registers.cr0), (Cr3, 1 << 63 | 0x5003)]
    {
        assert_eq!(cpu.write_register(register, value), Ok(()));
        assert_eq!(calls(&world), expected(ShadowExit::WriteRegister(register, value)));
    }
    assert_eq!(cpu.registers(), PagingRegisters { cr3: 0x5003, ..registers });
    assert_eq!(cpu.invlpg(at(1)), Ok(()));
    assert_eq!(calls(&world), expected(ShadowExit::Invlpg(at(1))));
    assert_eq!(cpu.invpcid(1, [3, 4]), Ok(()));
    assert_eq!(calls(&world), expected(ShadowExit::Invpcid(1, [3, 4])));
    assert_eq!(cpu.read(at(0)), Ok(0));
    assert_eq!(calls(&world), [Call::Entry]);
    assert_eq!(cpu.read(at(1)), Ok(1));
    assert_eq!(calls(&world), [], "a walk is no exit");
    // A fault, and the retry; after the hypervisor had access to the CPU, and after a sleep.
    let leaf = world.get(0, 1, 2);
    world.set(0, 1, 2, 0);
    answer(&world, Answer::Map(2, leaf));
    assert_eq!(cpu.read(at(2)), Ok(2));
    assert_eq!(calls(&world), [Call::Exit(ShadowExit::PageFault(at(2), READ)), Call::Entry]);
    cpu.handler();
    assert_eq!((cpu.read(at(2)), calls(&world)), (Ok(2), vec![Call::Entry]));
    cpu.exit_guest_mode();
    assert_eq!((cpu.read(at(2)), calls(&world)), (Ok(2), vec![Call::Entry]));
    let counters = cpu.counters();
    let expected = ShadowCpuCounters {
        nr_page_fault_exits: 1,
        nr_register_exits: 3,
        nr_cr3_exits: 1,
        nr_invlpg_exits: 1,
        nr_invpcid_exits: 1,
        nr_entries: 10,
        nr_accesses: 5,
        nr_reads: 5,
        nr_walks: 4,
        nr_tlb_misses: 4,
        ..ShadowCpuCounters::default()
    };
    assert_eq!(counters, expected);
    assert_eq!(counters.nr_exits(), 7);
    // The hypervisor sets them without an exit.
    assert_eq!(cpu.set_registers(PagingRegisters::default()), Ok(()));
    assert_eq!(calls(&world), [Call::Exit(ShadowExit::SetRegisters(PagingRegisters::default()))]);
    assert_eq!((cpu.registers(), cpu.counters().nr_exits()), (PagingRegisters::default(), 7));
}

#[test]
fn local_flushes_are_counted_by_kind() {
    let world = World::new();
    let mut cpu = world.cpu();
    for flush in [LocalFlush::Page(at(0)), LocalFlush::Context, LocalFlush::Context, LocalFlush::All, LocalFlush::None]
    {
        world.script().entry.flush = flush;
        assert_eq!(cpu.invlpg(at(0)), Ok(()));
    }
    let counters = cpu.counters();
    assert_eq!((counters.nr_page_flushes, counters.nr_context_flushes, counters.nr_all_flushes), (1, 2, 1));
    assert_eq!(counters.nr_entries, 5);
}

#[test]
fn without_pcids_each_change_of_root_or_pcid_flushes_all() {
    let world = World::new();
    let mut cpu = world.cpu().without_pcids();
    for pcid in [1, 1, 2, 2, 1] {
        world.script().entry.pcid = pcid;
        world.script().entry.flush = LocalFlush::None;
        assert_eq!(cpu.invlpg(at(0)), Ok(()));
    }
    assert_eq!((cpu.counters().nr_all_flushes, cpu.counters().nr_entries), (3, 5));
}

#[test]
fn an_emulated_write_completes_the_access() {
    let world = World::new();
    let mut cpu = world.cpu();
    world.set(0, 1, 1, world.frame(1) | PRESENT | US);
    let gpa = Gpa(0x7000);
    answer(&world, Answer::Exit(Exit::EmulateWrite { gpa }));
    assert_eq!(cpu.write(at(1), 0x0102_0304_0506_0708), Ok(()));
    let exits = [ShadowExit::PageFault(at(1), WRITE), ShadowExit::WriteTable(gpa, 0x0102_0304_0506_0708)];
    assert_eq!(calls(&world), [Call::Entry, Call::Exit(exits[0]), Call::Exit(exits[1])]);
    let expected = ShadowCpuCounters {
        nr_page_fault_exits: 1,
        nr_emulated_writes: 1,
        nr_walks: 1,
        nr_tlb_misses: 1,
        nr_entries: 1,
        ..ShadowCpuCounters::default()
    };
    assert_eq!(cpu.counters(), expected);
    assert_eq!(world.word(1), 1, "the CPU has written nothing itself");
    assert_eq!((cpu.read(at(1)), calls(&world)), (Ok(1), vec![Call::Entry]));

    // Emulation that fails.
    for (answers, expected) in [
        (Answer::Exit(Exit::DirtyRingFull), CpuError::Exit(Exit::DirtyRingFull)),
        (Answer::Fail(FaultError::NotShadow), CpuError::Engine(FaultError::NotShadow)),
    ] {
        answer(&world, Answer::Exit(Exit::EmulateWrite { gpa }));
        answer(&world, answers);
        assert_eq!(cpu.write(at(1), 5), Err(expected));
    }
    assert_eq!(cpu.counters().nr_emulated_writes, 1);
}

#[test]
fn only_writes_are_emulated() {
    let world = World::new();
    let mut cpu = world.cpu();
    let gpa = Gpa(0x7000);
    world.set(0, 1, 1, world.frame(1) | PRESENT | US | NX);
    answer(&world, Answer::Exit(Exit::EmulateWrite { gpa }));
    assert_eq!(cpu.fetch(at(1)), Err(CpuError::Exit(Exit::EmulateWrite { gpa })));
    world.set(0, 1, 1, 0);
    answer(&world, Answer::Exit(Exit::EmulateWrite { gpa }));
    assert_eq!(cpu.read(at(1)), Err(CpuError::Exit(Exit::EmulateWrite { gpa })));
    assert!(!calls(&world).iter().any(|call| matches!(call, Call::Exit(ShadowExit::WriteTable(..)))));
    assert_eq!(cpu.counters().nr_emulated_writes, 0);
}

#[test]
fn exceptions_go_to_the_guest_and_other_exits_to_user_space() {
    let world = World::new();
    let mut cpu = world.cpu();
    let injected = Exit::PageFault { gva: at(1), error_code: 7 };
    let mmio = Exit::Mmio { gpa: Gpa(0x9000), access: Access::Read };
    world.set(0, 1, 1, 0);
    for (exit, expected) in [
        (injected, CpuError::Guest(GuestFault::Page { gva: at(1), error_code: 7 })),
        (Exit::GeneralProtection, CpuError::Guest(GuestFault::GeneralProtection)),
        (mmio, CpuError::Exit(mmio)),
        (Exit::DirtyRingFull, CpuError::Exit(Exit::DirtyRingFull)),
    ] {
        let before = cpu.registers();
        answer(&world, Answer::Exit(exit));
        assert_eq!(cpu.read(at(1)), Err(expected));
        for register in REGISTERS {
            answer(&world, Answer::Exit(exit));
            assert_eq!(cpu.write_register(register, 0x1000), Err(expected));
        }
        assert_eq!(cpu.registers(), before, "nothing has changed");
        answer(&world, Answer::Exit(exit));
        assert_eq!(cpu.invlpg(at(1)), Err(expected));
        answer(&world, Answer::Exit(exit));
        assert_eq!(cpu.invpcid(4, [0; 2]), Err(expected));
    }
    answer(&world, Answer::Fail(FaultError::NotShadow));
    assert_eq!(cpu.read(at(1)), Err(CpuError::Engine(FaultError::NotShadow)));
    let (before, bad) = (cpu.registers(), FaultError::BadPagingRegister { register: Cr0, value: 1 << 31 });
    answer(&world, Answer::Fail(bad));
    assert_eq!(cpu.set_registers(long_mode(0)), Err(CpuError::Engine(bad)));
    assert_eq!(cpu.registers(), before, "nothing has changed");
    // After all of them the guest is entered again.
    calls(&world);
    assert_eq!((cpu.read(at(0)), calls(&world)), (Ok(0), vec![Call::Entry]));
}

#[test]
fn the_user_cannot_use_the_supervisors_instructions() {
    let world = World::new();
    let mut cpu = world.cpu();
    cpu.set_privilege(Privilege::User);
    let refused = Err(CpuError::Guest(GuestFault::GeneralProtection));
    for register in REGISTERS {
        assert_eq!(cpu.write_register(register, 0), refused);
    }
    assert_eq!((cpu.invlpg(at(0)), cpu.invpcid(0, [0; 2])), (refused, refused));
    assert_eq!((calls(&world), cpu.counters()), (vec![], ShadowCpuCounters::default()), "no exit");
}

#[test]
fn non_canonical_addresses_are_exceptions() {
    let world = World::new();
    let mut cpu = world.cpu();
    let in_long_mode = |gva| Err(CpuError::Guest(GuestFault::NonCanonical { gva }));
    for (gva, is_canonical) in
        [(1 << 46, true), (1 << 47, false), (1 << 48, false), (0x1_ffff << 47, true), (0xffff << 48, false)]
    {
        let gva = Gva(gva);
        // Without long mode no address is non-canonical: the hypervisor gets the fault.
        for registers in [
            PagingRegisters::default(),
            PagingRegisters { efer: 0, ..long_mode(0) },
            PagingRegisters { cr0: 1, ..long_mode(0) },
        ] {
            assert_eq!(cpu.set_registers(registers), Ok(()));
            assert_eq!(cpu.read(gva), injected(gva));
        }
        assert_eq!(cpu.set_registers(long_mode(0)), Ok(()));
        calls(&world);
        let expected = if is_canonical { injected(gva) } else { in_long_mode(gva) };
        assert_eq!(cpu.read(gva), expected, "{gva}");
        assert_eq!(calls(&world).len(), if is_canonical { 2 } else { 1 }, "no exit");
    }
}

#[test]
fn misconfigured_tables_are_errors_of_the_machine() {
    let world = World::new();
    let mut cpu = world.cpu();
    for level in 1..=4 {
        let good = world.get(0, level, 0);
        // A pointer is no physical address.
        world.set(0, level, 0, PRESENT | RW | US | 0x5000);
        let nowhere = CpuError::ShadowNoMemory { gva: at(0), hpa: Hpa(0x5000) };
        assert_eq!(cpu.read(at(0)), Err(nowhere), "level {level}");
        world.set(0, level, 0, good);
    }
    let entry = world.get(0, 4, 0) | PS;
    world.set(0, 4, 0, entry);
    assert_eq!(cpu.read(at(0)), Err(CpuError::ShadowMisconfigured { gva: at(0), level: slat::Level(4), entry }));
    assert_eq!(cpu.counters().nr_page_fault_exits, 0);
}

#[test]
fn entries_that_cannot_be_loaded_are_errors() {
    let world = World::new();
    let good = world.script().entry;
    let bad = [
        GuestEntry { levels: 3, ..good },
        GuestEntry { levels: 6, ..good },
        GuestEntry { pcid: 1 << 12, ..good },
        GuestEntry { root: Hpa(good.root.0 + 8), ..good },
    ];
    let mut cpu = world.cpu();
    for entry in bad {
        world.script().entry = entry;
        assert_eq!(cpu.read(at(0)), Err(CpuError::BadEntry { entry }));
        assert_eq!(cpu.invlpg(at(0)), Err(CpuError::BadEntry { entry }));
    }
    assert_eq!(cpu.counters(), ShadowCpuCounters::default());
    world.script().entry = GuestEntry { pcid: (1 << 12) - 1, ..good };
    assert_eq!(cpu.read(at(0)), Ok(0));
}

/// Returns "resume" and does nothing.
struct Idle(GuestEntry);

impl ShadowHandler for Idle {
    fn entry(&mut self) -> Result<GuestEntry, FaultError> {
        Ok(self.0)
    }

    fn handle_exit(&mut self, _: ShadowExit) -> Result<Outcome, FaultError> {
        Ok(Outcome::Resume)
    }
}

#[test]
fn an_access_that_faults_for_ever_is_stuck() {
    let world = World::new();
    let entry = world.script().entry;
    let mut cpu = ShadowCpu::new(Idle(entry), Port::new(&world.domain), 1, Geometry::default());
    cpu.max_faults = 1000;
    assert_eq!(cpu.read(Gva(0)), Err(CpuError::Stuck { gva: Gva(0), nr_faults: 1001 }));
}
