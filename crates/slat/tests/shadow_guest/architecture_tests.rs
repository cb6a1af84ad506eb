//! The interpreter against cases from the manual (SDM vol. 3A: figures of the PTEs of each mode,
//! "Access Rights", "Page-Fault Exceptions"). All other tests rely on it.

use std::collections::HashMap;

use slat::Access;
use slat::shadow::{PagingRegisters, Privilege};

use super::architecture::{
    ACCESSED, CR0_PE, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PSE, CR4_SMAP, CR4_SMEP, DIRTY, EFER_LME, EFER_NXE, End,
    LARGE, NO_EXECUTE, PRESENT, PagingMode, USER, WRITABLE, walk,
};

const ALL: u64 = PRESENT | WRITABLE | USER | ACCESSED | DIRTY;
const ROOT: u64 = 0x1000;

fn registers(cr4: u64, efer: u64) -> PagingRegisters {
    PagingRegisters { cr0: CR0_PE | CR0_PG | CR0_WP, cr3: ROOT, cr4, efer }
}

/// The end of a walk in memory that holds these words and zeroes.
fn end(registers: PagingRegisters, memory: &[(u64, u64)], la: u64, access: Access, privilege: Privilege) -> End {
    let memory: HashMap<u64, u64> = memory.iter().copied().collect();
    walk(&registers, la, access, privilege, |gpa| Some(memory.get(&(gpa & !7)).copied().unwrap_or(0))).end
}

/// The path of address 0 down to a PTE of `level`, which is `lowest`: page tables follow the root.
fn path(mode: PagingMode, level: u8, lowest: u64) -> Vec<(u64, u64)> {
    let above = (level + 1..=mode.levels()).rev().zip(1..).map(|(upper, number)| {
        let bits = if mode == PagingMode::Pae && upper == 3 { PRESENT } else { ALL };
        (number * 0x1000, ((number + 1) * 0x1000) | bits)
    });
    let last = u64::from(mode.levels() - level + 1) * 0x1000;
    above.chain([(last, lowest)]).collect()
}

const MODES: [(PagingMode, u64, u64); 4] = [
    (PagingMode::Bits32, CR4_PSE, EFER_NXE),
    (PagingMode::Pae, CR4_PAE, EFER_NXE),
    (PagingMode::FourLevel, CR4_PAE, EFER_LME | EFER_NXE),
    (PagingMode::FiveLevel, CR4_PAE | CR4_LA57, EFER_LME | EFER_NXE),
];

#[test]
fn registers_select_the_mode() {
    for (mode, cr4, efer) in MODES {
        assert_eq!(PagingMode::of(&registers(cr4, efer)), mode);
        assert_eq!(PagingMode::of(&PagingRegisters { cr0: CR0_PE, ..registers(cr4, efer) }), PagingMode::Off);
    }
}

#[test]
fn pages_of_each_size_are_reached() {
    for (mode, cr4, efer) in MODES {
        let read = |memory: &[(u64, u64)], la| end(registers(cr4, efer), memory, la, Access::Read, Privilege::User);
        assert_eq!(read(&path(mode, 1, 0x7000 | ALL), 0x123), End::Reached { gpa: 0x7123 });
        let (base, inside) = if mode == PagingMode::Bits32 { (0x40_0000, 0x3f_f123) } else { (0x40_0000, 0x1f_f123) };
        assert_eq!(read(&path(mode, 2, base | ALL | LARGE), inside), End::Reached { gpa: base + inside });
        if mode.is_long() {
            let inside = 0x3fff_f123;
            assert_eq!(
                read(&path(mode, 3, 0x4000_0000 | ALL | LARGE), inside),
                End::Reached { gpa: 0x4000_0000 + inside }
            );
        }
    }
}

#[test]
fn pse_36_puts_address_bits_into_the_middle_of_an_entry() {
    let memory = path(PagingMode::Bits32, 2, 0x80_0000 | (0b101 << 13) | ALL | LARGE);
    let reach = |cr4| end(registers(cr4, 0), &memory, 0x1000, Access::Read, Privilege::User);
    assert_eq!(reach(CR4_PSE), End::Reached { gpa: (0b101 << 32) | 0x80_1000 });
    // Without PSE it is a page table.
    assert_eq!(reach(0), End::Fault { error_code: 4 });
}

#[test]
fn reserved_bits_are_found_on_the_way() {
    // A bit in a PTE of a level that is otherwise valid, and whether it is reserved in each mode.
    let no_nx = |efer| efer & !EFER_NXE;
    let cases: [(u8, u64, [bool; 4]); 12] = [
        (1, 1 << 52, [false, true, false, false]),
        (1, 1 << 62, [false, true, false, false]),
        (1, 1 << 51, [false, true, true, true]),
        (1, LARGE, [false; 4]),
        (2, LARGE | 1 << 13, [false, true, true, true]),
        (2, LARGE | 1 << 20, [false, true, true, true]),
        (2, LARGE | 1 << 21, [true, false, false, false]),
        (2, LARGE | 1 << 12, [false; 4]),
        (3, LARGE | 1 << 29, [false, true, true, true]),
        (3, 1 << 1, [false, true, false, false]),
        (3, 1 << 5, [false, true, false, false]),
        (4, LARGE, [false, false, true, true]),
    ];
    for (level, bits, is_reserved) in cases {
        for ((mode, cr4, efer), is_reserved) in MODES.into_iter().zip(is_reserved) {
            if level > mode.levels() || (mode == PagingMode::Bits32 && bits >> 32 != 0) {
                continue;
            }
            let base = if mode == PagingMode::Pae && level == 3 { PRESENT } else { ALL };
            let found = end(registers(cr4, efer), &path(mode, level, base | bits), 0, Access::Read, Privilege::User);
            let is_found = matches!(found, End::Fault { error_code: 0b1101 });
            assert_eq!(is_found, is_reserved, "{bits:#x} of level {level} in {mode:?}: {found:?}");
        }
    }
    for (mode, cr4, efer) in &MODES[1..] {
        let memory = path(*mode, 1, 0x7000 | ALL | NO_EXECUTE);
        let found = end(registers(*cr4, no_nx(*efer)), &memory, 0, Access::Read, Privilege::Supervisor);
        assert_eq!(found, End::Fault { error_code: 0b1001 }, "NX without NXE in {mode:?}");
    }
}

#[test]
fn rights_and_error_codes_are_the_manual_s() {
    use Access::{Execute, Read, Write};
    use Privilege::{Supervisor, SupervisorWithAc, User};
    // Rights of the page; WP; CR4; access; the fault's code, or none.
    let (w, u) = (WRITABLE, USER);
    let cases = [
        (w | u, CR0_WP, 0, Read, User, None),
        (w | u, CR0_WP, 0, Write, User, None),
        (u, CR0_WP, 0, Write, User, Some(7)),
        (w, CR0_WP, 0, Read, User, Some(5)),
        (u, 0, 0, Write, User, Some(7)),
        (u, CR0_WP, 0, Write, Supervisor, Some(3)),
        (u, 0, 0, Write, Supervisor, None),
        (0, 0, 0, Write, Supervisor, None),
        (w | u, CR0_WP, CR4_SMAP, Read, Supervisor, Some(1)),
        (w | u, CR0_WP, CR4_SMAP, Read, SupervisorWithAc, None),
        (u, 0, CR4_SMAP, Write, Supervisor, Some(3)),
        (u, 0, CR4_SMAP, Write, SupervisorWithAc, None),
        (w, CR0_WP, CR4_SMAP, Write, Supervisor, None),
        (w | u, CR0_WP, CR4_SMEP, Execute, Supervisor, Some(0x11)),
        (w | u, CR0_WP, CR4_SMEP, Execute, SupervisorWithAc, Some(0x11)),
        (w | u, CR0_WP, CR4_SMEP, Execute, User, None),
        (w, CR0_WP, CR4_SMEP, Execute, Supervisor, None),
        (w | u | NO_EXECUTE, CR0_WP, 0, Execute, User, Some(0x15)),
        (w | NO_EXECUTE, CR0_WP, 0, Execute, Supervisor, Some(0x11)),
        (w | u | NO_EXECUTE, CR0_WP, 0, Read, User, None),
        (w | u, CR0_WP, CR4_SMAP, Execute, Supervisor, None),
    ];
    for (bits, wp, cr4, access, privilege, fault) in cases {
        let expected = fault.map_or(End::Reached { gpa: 0x7000 }, |error_code| End::Fault { error_code });
        // The right is missing in the lowest PTE, or in one above.
        for level in 1..=4 {
            let mut memory = path(PagingMode::FourLevel, 1, 0x7000 | ALL);
            let at = &mut memory[4 - level].1;
            *at = (*at & !(WRITABLE | USER)) | bits;
            let registers =
                PagingRegisters { cr0: CR0_PE | CR0_PG | wp, ..registers(CR4_PAE | cr4, EFER_LME | EFER_NXE) };
            let found = end(registers, &memory, 0, access, privilege);
            assert_eq!(found, expected, "{access:?} as {privilege:?} where {bits:#x} of level {level}");
        }
    }
}

#[test]
fn error_codes_have_the_fetch_bit_only_where_fetches_can_be_forbidden() {
    let fetch = |cr4, efer| end(registers(cr4, efer), &[], 0, Access::Execute, Privilege::User);
    assert_eq!(fetch(CR4_PAE, EFER_LME | EFER_NXE), End::Fault { error_code: 0x14 });
    assert_eq!(fetch(CR4_PAE, EFER_LME), End::Fault { error_code: 4 });
    assert_eq!(fetch(CR4_PAE | CR4_SMEP, EFER_LME), End::Fault { error_code: 0x14 });
    assert_eq!(fetch(0, EFER_NXE), End::Fault { error_code: 4 });
    assert_eq!(fetch(CR4_SMEP, 0), End::Fault { error_code: 0x14 });
}
