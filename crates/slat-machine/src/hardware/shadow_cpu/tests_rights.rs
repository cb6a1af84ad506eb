//! All combinations of the bits that decide an access, compared with the manual's rules, written
//! once more.

use slat::shadow::PagingRegister::Cr0;

use super::tests::*;
use super::*;

const PRIVILEGES: [Privilege; 3] = [Privilege::User, Privilege::Supervisor, Privilege::SupervisorWithAc];
const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];
const SMEP: u64 = 1 << 20;
const SMAP: u64 = 1 << 21;

/// A page with the combined bits of the walk's PTEs.
#[derive(Clone, Copy, Debug)]
struct Page {
    is_users: bool,
    is_writable: bool,
    is_executable: bool,
}

/// Intel SDM vol. 3A, "Determination of access rights", with CR0.WP and EFER.NXE set.
fn is_permitted(page: Page, cr4: u64, privilege: Privilege, access: Access) -> bool {
    let (smep, smap) = (cr4 & SMEP != 0, cr4 & SMAP != 0);
    match privilege {
        Privilege::User => {
            page.is_users
                && match access {
                    Access::Read => true,
                    Access::Write => page.is_writable,
                    Access::Execute | Access::ExecuteUser => page.is_executable,
                }
        }
        Privilege::Supervisor | Privilege::SupervisorWithAc => {
            let reaches = !page.is_users || !smap || privilege == Privilege::SupervisorWithAc;
            match access {
                Access::Read => reaches,
                Access::Write => reaches && page.is_writable,
                Access::Execute | Access::ExecuteUser => page.is_executable && !(page.is_users && smep),
            }
        }
    }
}

fn perform(cpu: &mut ShadowCpu<Hypervisor>, gva: Gva, access: Access) -> Result<(), CpuError> {
    match access {
        Access::Read => cpu.read(gva).map(|_| ()),
        Access::Write => cpu.write(gva, 5),
        Access::Execute | Access::ExecuteUser => cpu.fetch(gva).map(|_| ()),
    }
}

/// Clears W or U, or sets NX, at `level` of page 0's walk only.
fn deny(world: &World, level: usize, page: Page) {
    let mut entry = world.get(0, level, 0);
    if !page.is_users {
        entry &= !US;
    }
    if !page.is_writable {
        entry &= !RW;
    }
    if !page.is_executable {
        entry |= NX;
    }
    world.set(0, level, 0, entry);
}

fn pages() -> impl Iterator<Item = Page> {
    (0..8).map(|bits| Page { is_users: bits & 1 != 0, is_writable: bits & 2 != 0, is_executable: bits & 4 != 0 })
}

/// Denies at `level` of page tables of `levels` levels, where page 0 is at `gva`.
fn check_level(levels: u8, level: usize, gva: Gva) {
    for page in pages() {
        let world = World::new();
        deny(&world, level, page);
        let root = world.root(0, levels.into());
        let entry = GuestEntry { root, levels, ..world.script().entry };
        world.script().entry = entry;
        for cr4 in [0, SMEP, SMAP, SMEP | SMAP] {
            for (privilege, access) in
                PRIVILEGES.into_iter().flat_map(|privilege| ACCESSES.map(|access| (privilege, access)))
            {
                let mut cpu = world.cpu();
                assert_eq!(cpu.set_registers(long_mode(cr4)), Ok(()));
                cpu.set_privilege(privilege);
                let expected = if is_permitted(page, cr4, privilege, access) { Ok(()) } else { injected(gva) };
                let got = perform(&mut cpu, gva, access);
                assert_eq!(got, expected, "{levels}, {level}: {page:?}, {cr4:#x}, {privilege:?}, {access:?}");
                // The hypervisor gets exactly the denied access.
                let denied = Call::Exit(ShadowExit::PageFault(gva, GuestAccess { access, privilege }));
                assert_eq!(world.script().calls.contains(&denied), expected.is_err());
                world.script().calls.clear();
            }
        }
    }
}

#[test]
fn each_level_can_deny() {
    (1..=4).for_each(|level| check_level(4, level, at(0)));
    (1..=5).for_each(|level| check_level(5, level, at_in_five_levels(0)));
}

/// The TLB permits nothing that the page tables deny. There is no walk for what it permits,
/// whichever access filled it, until a page fault.
#[test]
fn cached_rights_hold_for_all_privileges() {
    for page in pages() {
        let world = World::new();
        deny(&world, 1, page);
        // The dirty bit must not cause a walk.
        world.set(0, 1, 0, world.get(0, 1, 0) | D);
        let mut cpu = world.cpu();
        for cr4 in [0, SMEP, SMAP, SMEP | SMAP] {
            assert_eq!(cpu.set_registers(long_mode(cr4)), Ok(()));
            for first in PRIVILEGES {
                // An access of these that succeeds fills the TLB.
                cpu.set_privilege(first);
                let mut is_cached = ACCESSES.map(|access| perform(&mut cpu, at(0), access).is_ok())[2];
                for privilege in PRIVILEGES {
                    cpu.set_privilege(privilege);
                    for access in ACCESSES {
                        let walks = cpu.counters().nr_walks;
                        let expected = is_permitted(page, cr4, privilege, access);
                        let got = perform(&mut cpu, at(0), access);
                        assert_eq!(got.is_ok(), expected, "{page:?}, {cr4:#x}, {first:?}, {privilege:?}, {access:?}");
                        let nr_walks = cpu.counters().nr_walks - walks;
                        assert_eq!(nr_walks, u64::from(!(expected && is_cached)), "{page:?} {privilege:?} {access:?}");
                        is_cached = expected;
                    }
                }
                world.domain.flush(&[]);
            }
        }
    }
}

#[test]
fn restrictions_act_only_while_the_guest_has_paging_on() {
    let world = World::new();
    let mut cpu = world.cpu();
    let registers = long_mode(SMEP | SMAP);
    assert_eq!(cpu.set_registers(registers), Ok(()));
    assert_eq!((cpu.read(at(0)), cpu.fetch(at(0))), (injected(at(0)), injected(at(0))));
    assert_eq!(cpu.write_register(Cr0, 1), Ok(()));
    assert_eq!((cpu.read(at(0)), cpu.fetch(at(0))), (Ok(0), Ok(0)));
    assert_eq!(cpu.write_register(Cr0, registers.cr0), Ok(()));
    assert_eq!((cpu.read(at(0)), cpu.fetch(at(0))), (injected(at(0)), injected(at(0))), "though it is cached");
    // STAC, and CLAC.
    cpu.set_privilege(Privilege::SupervisorWithAc);
    assert_eq!((cpu.read(at(0)), cpu.fetch(at(0))), (Ok(0), injected(at(0))));
    cpu.set_privilege(Privilege::Supervisor);
    assert_eq!(cpu.read(at(0)), injected(at(0)));
}
