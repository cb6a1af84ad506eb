//! Each rule with registers, PTEs and addresses written out.

use super::*;
use crate::registers::EFER_LMA;

const GPA_BITS: u32 = 46;
const LONG: PagingRegisters =
    PagingRegisters { cr0: CR0_PG | CR0_PE, cr3: 0, cr4: CR4_PAE, efer: EFER_LME | EFER_LMA | EFER_NXE };
const PAE: PagingRegisters = PagingRegisters { efer: EFER_NXE, ..LONG };
const TWO_LEVEL: PagingRegisters = PagingRegisters { cr4: CR4_PSE, ..PAE };
const OFF: PagingRegisters = PagingRegisters { cr0: CR0_PE, ..TWO_LEVEL };
const FIVE_LEVEL: PagingRegisters = PagingRegisters { cr4: CR4_PAE | CR4_LA57, ..LONG };

fn mode(registers: PagingRegisters) -> GuestMode {
    GuestMode::new(registers, GPA_BITS).unwrap()
}

fn with_cr0(registers: PagingRegisters, bits: u64) -> PagingRegisters {
    PagingRegisters { cr0: registers.cr0 | bits, ..registers }
}

fn with_cr4(registers: PagingRegisters, bits: u64) -> PagingRegisters {
    PagingRegisters { cr4: registers.cr4 | bits, ..registers }
}

fn with_cr3(registers: PagingRegisters, cr3: u64) -> PagingRegisters {
    PagingRegisters { cr3, ..registers }
}

fn without_nxe(registers: PagingRegisters) -> PagingRegisters {
    PagingRegisters { efer: registers.efer & !EFER_NXE, ..registers }
}

fn table(table: u64, rights: Rights) -> Decoded {
    Decoded::Table { table: Gpa(table), rights, is_accessed: false }
}

fn leaf(gfn: u64, nr_pages: u64, rights: Rights) -> Decoded {
    Decoded::Leaf(GuestLeaf { gfn: Gfn(gfn), nr_pages, rights, is_global: false, is_accessed: false, is_dirty: false })
}

const X: Rights = Rights::EXECUTE;
const NONE: Rights = Rights(0);

#[test]
fn registers_select_the_mode() {
    for (registers, paging, level, shadow_levels, entry_bytes) in [
        (OFF, PagingMode::Off, 0, 4, 8),
        (PagingRegisters::default(), PagingMode::Off, 0, 4, 8),
        (TWO_LEVEL, PagingMode::TwoLevel, 2, 4, 4),
        (PAE, PagingMode::Pae, 3, 4, 8),
        (LONG, PagingMode::FourLevel, 4, 4, 8),
        (FIVE_LEVEL, PagingMode::FiveLevel, 5, 5, 8),
        // Without long mode LA57 selects nothing.
        (with_cr4(PAE, CR4_LA57), PagingMode::Pae, 3, 4, 8),
    ] {
        let mode = mode(registers);
        assert_eq!(mode.paging(), paging);
        assert_eq!(mode.root_level(), Level(level));
        assert_eq!(mode.shadow_levels(), shadow_levels);
        assert_eq!(mode.entry_bytes(), entry_bytes);
    }
}

#[test]
fn modifiers_count_where_they_take_effect() {
    let all = |registers| with_cr4(with_cr0(registers, CR0_WP), CR4_SMEP | CR4_SMAP | CR4_PGE | CR4_PSE);
    let flags = |mode: GuestMode| {
        [mode.write_protect(), mode.smep(), mode.smap(), mode.no_execute(), mode.global_pages(), mode.pcide()]
    };
    assert_eq!(flags(mode(all(OFF))), [false; 6]);
    assert_eq!(flags(mode(all(TWO_LEVEL))), [true, true, true, false, true, false]);
    assert_eq!(flags(mode(all(PAE))), [true, true, true, true, true, false]);
    assert_eq!(flags(mode(with_cr4(all(LONG), CR4_PCIDE))), [true; 6]);
    assert_eq!(flags(mode(without_nxe(LONG))), [false; 6]);
    // A bit without effect makes no different mode.
    assert_eq!(mode(all(OFF)), mode(OFF));
    assert_eq!(mode(with_cr4(LONG, CR4_PSE)), mode(LONG));
    assert_eq!(mode(without_nxe(TWO_LEVEL)), mode(TWO_LEVEL));
    assert_ne!(mode(without_nxe(PAE)), mode(PAE));
}

#[test]
fn errors_name_the_invalid_registers() {
    use PagingRegister::{Cr0, Cr3, Cr4};
    for (registers, register) in [
        (PagingRegisters { cr0: CR0_PG, ..PAE }, Cr0),
        (PagingRegisters { cr4: 0, ..LONG }, Cr4),
        (with_cr4(OFF, CR4_PCIDE), Cr4),
        (with_cr4(PAE, CR4_PCIDE), Cr4),
        (with_cr3(LONG, 1 << 46), Cr3),
        (with_cr3(LONG, 1 << 62), Cr3),
        (with_cr3(LONG, 1 << 63), Cr3),
        (with_cr3(TWO_LEVEL, 1 << 63), Cr3),
        (with_cr4(LONG, 1 << 22), Cr4),
        (with_cr4(LONG, 1 << 23), Cr4),
        (with_cr4(LONG, 1 << 24), Cr4),
        (with_cr4(LONG, 1 << 28), Cr4),
    ] {
        assert_eq!(GuestMode::new(registers, GPA_BITS), Err(register), "{registers:x?}");
    }
    mode(with_cr3(LONG, 0x3fff_ffff_ffff));
    GuestMode::new(with_cr3(LONG, 1 << 51), 52).unwrap();
    // The upper half is ignored outside long mode.
    mode(with_cr3(PAE, 1 << 46));
}

#[test]
fn instructions_change_registers_by_the_rules() {
    use PagingRegister::{Cr0, Cr4, Efer};
    let check = |old, register, value| {
        let new = GuestMode::check_write(old, register, value, GPA_BITS)?;
        assert_eq!(new.0, old.with(register, value));
        Ok(new.1.paging())
    };
    let pcids = with_cr4(LONG, CR4_PCIDE);
    // CR0.
    assert_eq!(check(OFF, Cr0, TWO_LEVEL.cr0), Ok(PagingMode::TwoLevel));
    assert_eq!(check(TWO_LEVEL, Cr0, OFF.cr0), Ok(PagingMode::Off));
    let no_paging = PagingRegisters { cr0: CR0_PE, ..LONG };
    // LMA follows PG: the CPU changes it.
    assert_eq!(
        check(PagingRegisters { efer: EFER_LME | EFER_NXE, ..no_paging }, Cr0, LONG.cr0),
        Ok(PagingMode::FourLevel)
    );
    assert_eq!(check(LONG, Cr0, CR0_PE), Ok(PagingMode::Off));
    assert_eq!(check(LONG, Efer, LONG.efer & !EFER_LMA), Ok(PagingMode::FourLevel));
    assert_eq!(check(pcids, Cr0, CR0_PE), Err(GeneralProtection));
    let no_pae = PagingRegisters { cr4: 0, ..no_paging };
    assert_eq!(check(no_pae, Cr0, LONG.cr0), Err(GeneralProtection));
    // CR4.
    assert_eq!(check(LONG, Cr4, FIVE_LEVEL.cr4), Err(GeneralProtection));
    assert_eq!(check(FIVE_LEVEL, Cr4, LONG.cr4), Err(GeneralProtection));
    assert_eq!(check(PAE, Cr4, PAE.cr4 | CR4_LA57), Ok(PagingMode::Pae));
    assert_eq!(check(LONG, Cr4, 0), Err(GeneralProtection));
    assert_eq!(check(PAE, Cr4, 0), Ok(PagingMode::TwoLevel));
    assert_eq!(check(PAE, Cr4, PAE.cr4 | CR4_PCIDE), Err(GeneralProtection));
    assert_eq!(check(OFF, Cr4, PAE.cr4 | CR4_PCIDE), Err(GeneralProtection));
    assert_eq!(check(with_cr3(LONG, 0x1000), Cr4, pcids.cr4), Ok(PagingMode::FourLevel));
    for bit in 0..12 {
        assert_eq!(check(with_cr3(LONG, 1 << bit), Cr4, pcids.cr4), Err(GeneralProtection));
    }
    // They may be set when PCIDs are on already, or be cleared.
    assert_eq!(check(with_cr3(pcids, 0x1005), Cr4, pcids.cr4 | CR4_SMEP), Ok(PagingMode::FourLevel));
    assert_eq!(check(with_cr3(pcids, 0x1005), Cr4, LONG.cr4), Ok(PagingMode::FourLevel));
    // EFER.
    assert_eq!(check(PAE, Efer, EFER_NXE | EFER_LME), Err(GeneralProtection));
    assert_eq!(check(LONG, Efer, EFER_NXE), Err(GeneralProtection));
    assert_eq!(check(no_paging, Efer, 0), Ok(PagingMode::Off));
    assert_eq!(check(LONG, Efer, without_nxe(LONG).efer), Ok(PagingMode::FourLevel));
}

/// 4.4.1.
#[test]
fn pdptes_are_loaded_by_some_changes() {
    let loads = |old: PagingRegisters, register, value| {
        let (new, mode) = GuestMode::check_write(old, register, value, GPA_BITS).unwrap();
        mode.loads_pdptes(old, new)
    };
    for bit in [CR4_PGE, CR4_PSE, CR4_SMEP] {
        assert!(loads(PAE, PagingRegister::Cr4, PAE.cr4 ^ bit));
        assert!(!loads(LONG, PagingRegister::Cr4, LONG.cr4 ^ bit));
    }
    assert!(!loads(PAE, PagingRegister::Cr4, PAE.cr4 ^ CR4_SMAP));
    assert!(loads(PagingRegisters { cr4: 0, ..PAE }, PagingRegister::Cr4, PAE.cr4));
    for bit in [CR0_CD, CR0_NW] {
        assert!(loads(PAE, PagingRegister::Cr0, PAE.cr0 ^ bit));
    }
    assert!(!loads(PAE, PagingRegister::Cr0, PAE.cr0 ^ CR0_WP));
    assert!(loads(PagingRegisters { cr0: CR0_PE, ..PAE }, PagingRegister::Cr0, PAE.cr0));
    assert!(!loads(PAE, PagingRegister::Cr0, CR0_PE));
    assert!(!loads(PAE, PagingRegister::Efer, 0));
}

#[test]
fn bit_63_of_a_cr3_load_is_for_pcids() {
    let pcids = mode(with_cr4(LONG, CR4_PCIDE));
    assert_eq!(pcids.check_cr3(1 << 63 | 0x5003, GPA_BITS), Ok((0x5003, Keep::Keep)));
    assert_eq!(pcids.check_cr3(0x5003, GPA_BITS), Ok((0x5003, Keep::Flush)));
    assert_eq!(pcids.check_cr3(1 << 62, GPA_BITS), Err(GeneralProtection));
    assert_eq!(pcids.check_cr3(1 << 46, GPA_BITS), Err(GeneralProtection));
    assert_eq!(pcids.check_cr3(1 << 46, 47), Ok((1 << 46, Keep::Flush)));
    assert_eq!(pcids.pcid(0x5003), 3);
    for registers in [OFF, TWO_LEVEL, PAE, LONG, FIVE_LEVEL] {
        assert_eq!(mode(registers).check_cr3(1 << 63 | 0x5000, GPA_BITS), Err(GeneralProtection));
        assert_eq!(mode(registers).check_cr3(0x5018, GPA_BITS), Ok((0x5018, Keep::Flush)));
        assert_eq!(mode(registers).pcid(0x5003), 0);
    }
}

#[test]
fn cr3_points_to_the_root() {
    assert_eq!(mode(TWO_LEVEL).root_table(0xf_ffff_ffff), Gpa(0xffff_f000));
    assert_eq!(mode(PAE).root_table(0xf_1234_5678), Gpa(0x1234_5660));
    assert_eq!(mode(LONG).root_table(0x1234_5678_9fff), Gpa(0x1234_5678_9000));
    assert_eq!(mode(FIVE_LEVEL).root_table(0x1234_5678_9fff), Gpa(0x1234_5678_9000));
}

#[test]
fn indices_are_taken_from_the_address() {
    let at = |registers, level, gva| mode(registers).entry_gpa(Gpa(0x1000), Level(level), Gva(gva)).0 - 0x1000;
    assert_eq!(at(TWO_LEVEL, 2, 0xffc0_0000), 0x3ff * 4);
    assert_eq!(at(TWO_LEVEL, 2, 0x003f_ffff), 0);
    assert_eq!(at(TWO_LEVEL, 1, 0x003f_f000), 0x3ff * 4);
    assert_eq!(at(PAE, 3, 0xc000_0000), 3 * 8);
    assert_eq!(at(PAE, 3, 0x1_c000_0000), 3 * 8);
    assert_eq!(at(PAE, 2, 0xc020_0000), 8);
    assert_eq!(at(PAE, 1, 0xc01f_ffff), 0x1ff * 8);
    assert_eq!(at(LONG, 4, 0xffff_8000_0000_0000), 0x100 * 8);
    assert_eq!(at(LONG, 3, 0x7f_c000_0000), 0x1ff * 8);
    assert_eq!(at(FIVE_LEVEL, 5, 0xff00_0000_0000_0000), 0x100 * 8);
    // The table of PDPTEs may be anywhere in its page.
    assert_eq!(mode(PAE).entry_gpa(Gpa(0x1fe0), Level(3), Gva(0xffff_ffff)), Gpa(0x1ff8));
}

#[test]
fn canonical_addresses() {
    for registers in [OFF, TWO_LEVEL, PAE] {
        assert!(mode(registers).is_canonical(Gva(0xffff_ffff)));
        assert!(!mode(registers).is_canonical(Gva(1 << 32)));
        assert!(!mode(registers).is_canonical(Gva(u64::MAX)));
    }
    for (registers, bits) in [(LONG, 48), (FIVE_LEVEL, 57)] {
        let low_end = 1u64 << (bits - 1);
        assert!(mode(registers).is_canonical(Gva(low_end - 1)));
        assert!(!mode(registers).is_canonical(Gva(low_end)));
        assert!(!mode(registers).is_canonical(Gva(!low_end)));
        assert!(mode(registers).is_canonical(Gva(0u64.wrapping_sub(low_end))));
    }
}

#[test]
fn entries_of_32_bit_paging() {
    let pse = mode(TWO_LEVEL);
    let no_pse = mode(PagingRegisters { cr4: 0, ..TWO_LEVEL });
    assert_eq!(pse.decode(0x1234_5006, Level(2)), Decoded::NotPresent);
    assert_eq!(pse.decode(0x1234_5003, Level(2)), table(0x1234_5000, Rights(5)));
    // 4 MiB with PSE-36: bits 20:13 are address bits 39:32, and bit 12 is PAT.
    assert_eq!(pse.decode(0x1240_0085, Level(2)), leaf(0x1_2400, 1024, Rights(6)));
    assert_eq!(pse.decode(0x1240_3087, Level(2)), leaf(0x11_2400, 1024, Rights::ALL));
    assert_eq!(pse.decode(0x125f_e081, Level(2)), leaf(0xff1_2400, 1024, X));
    assert_eq!(pse.decode(0x1260_0081, Level(2)), Decoded::Reserved);
    // 36 address bits: bits 20:17 are reserved too.
    let small = GuestMode::new(TWO_LEVEL, 36).unwrap();
    assert_eq!(small.decode(0x1241_e081, Level(2)), leaf(0xf1_2400, 1024, X));
    assert_eq!(small.decode(0x1242_0081, Level(2)), Decoded::Reserved);
    // Without PSE there is no PS.
    assert_eq!(no_pse.decode(0x1260_0081, Level(2)), table(0x1260_0000, X));
    // Bit 7 of a PTE is PAT. There is no XD: the bits above belong to another PTE.
    assert_eq!(pse.decode(0x1234_5087, Level(1)), leaf(0x1_2345, 1, Rights::ALL));
    assert_eq!(pse.decode(0xffff_ffff_1234_5001, Level(1)), leaf(0x1_2345, 1, X));
}

#[test]
fn entries_of_pae_paging() {
    let pae = mode(PAE);
    assert_eq!(pae.decode(0x1234_5000, Level(3)), Decoded::NotPresent);
    // A PDPTE has neither rights to restrict nor an A to set; its bits 2:1, 8:5 and 63:46 are
    // reserved.
    let pdpte = Decoded::Table { table: Gpa(0x3fff_ffff_f000), rights: Rights::ALL, is_accessed: true };
    assert_eq!(pae.decode(0x3fff_ffff_fe19, Level(3)), pdpte);
    for bit in [1, 2, 5, 6, 7, 8, 46, 51, 52, 62, 63] {
        assert_eq!(pae.decode(0x1234_5001 | 1 << bit, Level(3)), Decoded::Reserved, "bit {bit}");
    }
    assert_eq!(pae.decode(0x8000_0000_1234_5003, Level(2)), table(0x1234_5000, Rights::WRITE));
    assert_eq!(pae.decode(0x1220_1087, Level(2)), leaf(0x1_2200, 512, Rights::ALL));
    assert_eq!(pae.decode(0x3fff_ffff_f085, Level(1)), leaf(0x3_ffff_ffff, 1, Rights(6)));
    for bit in 13..21 {
        assert_eq!(pae.decode(0x1220_0081 | 1 << bit, Level(2)), Decoded::Reserved, "bit {bit}");
    }
    // Bits 62:52, which long mode ignores, are reserved.
    for (bit, level) in [(46, 1), (51, 2), (52, 1), (62, 2)] {
        assert_eq!(pae.decode(0x1234_5001 | 1 << bit, Level(level)), Decoded::Reserved, "bit {bit}");
    }
    assert_eq!(mode(without_nxe(PAE)).decode(1 << 63 | 0x1001, Level(1)), Decoded::Reserved);
}

#[test]
fn entries_of_long_mode() {
    for registers in [LONG, FIVE_LEVEL] {
        let long = mode(registers);
        let top = long.root_level();
        assert_eq!(long.decode(u64::MAX - 1, top), Decoded::NotPresent);
        assert_eq!(long.decode(0x7ff0_1234_5678_9007, top), table(0x1234_5678_9000, Rights::ALL));
        assert_eq!(long.decode(0x8000_0000_0000_1001, top), table(0x1000, NONE));
        // PS: reserved above level 3, 1 GiB at 3, 2 MiB at 2, PAT at 1.
        assert_eq!(long.decode(0x1081, Level(4)), Decoded::Reserved);
        assert_eq!(long.decode(0x1081, top), Decoded::Reserved);
        assert_eq!(long.decode(0x2_4000_1087, Level(3)), leaf(0x24_0000, 1 << 18, Rights::ALL));
        assert_eq!(long.decode(0x2_4000_1007, Level(3)), table(0x2_4000_1000, Rights::ALL));
        assert_eq!(long.decode(0x2_4020_1083, Level(2)), leaf(0x24_0200, 512, Rights(5)));
        assert_eq!(long.decode(0x2_4020_1083, Level(1)), leaf(0x24_0201, 1, Rights(5)));
        for bit in 13..30 {
            assert_eq!(long.decode(0x2_4000_0081 | 1 << bit, Level(3)), Decoded::Reserved, "bit {bit}");
            let is_reserved = long.decode(0x2_4000_0081 | 1 << bit, Level(2)) == Decoded::Reserved;
            assert_eq!(is_reserved, bit < 21, "bit {bit}");
        }
        for (bit, level) in [(46, 1), (48, 2), (51, 3), (46, 4)] {
            assert_eq!(long.decode(0x1001 | 1 << bit, Level(level)), Decoded::Reserved, "bit {bit}");
        }
        for level in 1..=top.0 {
            let no_nxe = mode(without_nxe(registers));
            assert_eq!(no_nxe.decode(1 << 63 | 0x1001, Level(level)), Decoded::Reserved, "level {level}");
            // Intel ignores G in a PTE that points to a page table.
            assert_ne!(no_nxe.decode(0x1101, Level(level)), Decoded::Reserved, "level {level}");
        }
    }
}

#[test]
fn a_leaf_is_global_if_pge_is_set() {
    for registers in [TWO_LEVEL, PAE, LONG] {
        for (registers, expected) in [(registers, false), (with_cr4(registers, CR4_PGE), true)] {
            let Decoded::Leaf(leaf) = mode(registers).decode(0x1101, Level(1)) else { panic!("no leaf") };
            assert_eq!(leaf.is_global, expected);
            let Decoded::Leaf(leaf) = mode(registers).decode(0x1001, Level(1)) else { panic!("no leaf") };
            assert!(!leaf.is_global);
        }
    }
}

#[test]
fn accessed_and_dirty_are_set_as_the_cpu_does() {
    use Access::{Execute, Read, Write};
    for registers in [TWO_LEVEL, PAE, LONG, FIVE_LEVEL] {
        let missing = |pte, level, access| mode(registers).decode(pte, Level(level)).missing_marks(access);
        assert_eq!(missing(0x1001, 1, Read), 0x20);
        assert_eq!(missing(0x1001, 1, Execute), 0x20);
        assert_eq!(missing(0x1003, 1, Write), 0x60);
        assert_eq!(missing(0x1043, 1, Write), 0x20);
        assert_eq!(missing(0x1023, 1, Write), 0x40);
        assert_eq!(missing(0x1023, 1, Read), 0);
        assert_eq!(missing(0x1063, 1, Write), 0);
        // No D in a PTE that points to a page table, but in large leaves.
        assert_eq!(missing(0x1003, 2, Write), 0x20);
        assert_eq!(missing(0x1023, 2, Write), 0);
        assert_eq!(missing(0x83, 2, Write), 0x60);
        assert_eq!(missing(0x1002, 1, Write), 0);
    }
    assert_eq!(mode(PAE).decode(0x1001, Level(3)).missing_marks(Write), 0);
    assert_eq!(mode(LONG).decode(0x2083, Level(3)).missing_marks(Write), 0);
}

#[test]
fn rights_decide() {
    use Access::{Execute, Read, Write};
    use Privilege::{Supervisor, SupervisorWithAc, User};
    let (w, u) = (Rights::WRITE.0, Rights::USER.0);
    let plain = LONG;
    let wp = with_cr0(LONG, CR0_WP);
    let smap = with_cr4(LONG, CR4_SMAP);
    let smep = with_cr4(LONG, CR4_SMEP);
    for (registers, rights, access, privilege, expected) in [
        (plain, u, Read, User, Ok(())),
        (plain, w, Read, User, Err(0b00101)),
        (plain, u | w, Write, User, Ok(())),
        (plain, u, Write, User, Err(0b00111)),
        (plain, w, Write, User, Err(0b00111)),
        (plain, u | X.0, Execute, User, Ok(())),
        (plain, u, Execute, User, Err(0b10101)),
        (plain, X.0, Execute, User, Err(0b10101)),
        (plain, 0, Read, Supervisor, Ok(())),
        (plain, u, Read, Supervisor, Ok(())),
        (plain, 0, Write, Supervisor, Ok(())),
        (plain, u, Write, Supervisor, Ok(())),
        (wp, 0, Write, Supervisor, Err(0b00011)),
        (wp, w, Write, Supervisor, Ok(())),
        (wp, w | u, Write, Supervisor, Ok(())),
        (wp, u, Write, SupervisorWithAc, Err(0b00011)),
        (smap, u, Read, Supervisor, Err(0b00001)),
        (smap, 0, Read, Supervisor, Ok(())),
        (smap, u, Read, SupervisorWithAc, Ok(())),
        (smap, u | w, Write, Supervisor, Err(0b00011)),
        (smap, u, Write, SupervisorWithAc, Ok(())),
        (smap, u, Read, User, Ok(())),
        (smap, u | X.0, Execute, Supervisor, Ok(())),
        (smep, u | X.0, Execute, Supervisor, Err(0b10001)),
        (smep, u | X.0, Execute, SupervisorWithAc, Err(0b10001)),
        (smep, u | X.0, Execute, User, Ok(())),
        (smep, u, Read, Supervisor, Ok(())),
        (smep, X.0, Execute, Supervisor, Ok(())),
        (plain, 0, Execute, Supervisor, Err(0b10001)),
    ] {
        let access = GuestAccess { access, privilege };
        assert_eq!(mode(registers).check(Rights(rights), access), expected, "{registers:x?} {rights} {access:?}");
    }
    // Without paging nothing is forbidden.
    let off = mode(with_cr4(with_cr0(OFF, CR0_WP), CR4_SMEP | CR4_SMAP));
    for (access, privilege) in [(Read, Supervisor), (Write, User), (Execute, Supervisor)] {
        assert_eq!(off.check(Rights::ALL, GuestAccess { access, privilege }), Ok(()));
    }
}

#[test]
fn error_codes() {
    let fetch = GuestAccess { access: Access::Execute, privilege: Privilege::User };
    let write = GuestAccess { access: Access::Write, privilege: Privilege::Supervisor };
    // I/D needs SMEP, or NXE with PTEs of 8 bytes.
    for (registers, expected) in [
        (TWO_LEVEL, 0x04),
        (with_cr4(TWO_LEVEL, CR4_SMEP), 0x14),
        (PAE, 0x14),
        (LONG, 0x14),
        (without_nxe(LONG), 0x04),
        (with_cr4(without_nxe(LONG), CR4_SMEP), 0x14),
    ] {
        assert_eq!(mode(registers).error_code(fetch, 0), expected);
        assert_eq!(mode(registers).error_code(fetch, FAULT_PRESENT | FAULT_RESERVED), expected | 9);
        assert_eq!(mode(registers).error_code(write, 0), 2);
        assert_eq!(mode(registers).error_code(write, FAULT_PRESENT), 3);
    }
}
