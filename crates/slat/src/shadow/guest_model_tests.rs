//! Random registers, PTEs and walks against an interpreter that is built differently. It reads the
//! manual's tables of formats bit for bit, which are here as strings, and its lists of rules, one
//! after the other.

use alloc::string::String;
use alloc::vec::Vec;
use alloc::{format, vec};

use proptest::prelude::*;

use super::*;

/// The interpreter's input: the registers' bits one by one.
#[derive(Clone, Copy, Debug)]
struct Guest {
    registers: PagingRegisters,
    maxphyaddr: u32,
}

impl Guest {
    fn cr0(&self, bit: u32) -> bool {
        self.registers.cr0 >> bit & 1 == 1
    }

    fn cr4(&self, bit: u32) -> bool {
        self.registers.cr4 >> bit & 1 == 1
    }

    fn efer(&self, bit: u32) -> bool {
        self.registers.efer >> bit & 1 == 1
    }

    /// Table 4-1, "Properties of Different Paging Modes": the mode by CR0.PG, CR4.PAE, EFER.LME,
    /// CR4.LA57 (x: either).
    fn paging(&self) -> Option<PagingMode> {
        let bits = [self.cr0(31), self.cr4(5), self.efer(8), self.cr4(12)];
        [
            ("0xxx", PagingMode::Off),
            ("100x", PagingMode::TwoLevel),
            ("110x", PagingMode::Pae),
            ("1110", PagingMode::FourLevel),
            ("1111", PagingMode::FiveLevel),
        ]
        .into_iter()
        .find(|(row, _)| row.chars().zip(bits).all(|(wanted, bit)| wanted == 'x' || (wanted == '1') == bit))
        .map(|(_, paging)| paging)
    }

    /// Whether a vCPU can have these registers.
    fn is_possible(&self) -> bool {
        let Some(paging) = self.paging() else { return false };
        let is_long = matches!(paging, PagingMode::FourLevel | PagingMode::FiveLevel);
        let protected_mode = self.cr0(0) || !self.cr0(31);
        let pcids = !self.cr4(17) || is_long;
        let cr3_bits = format!("{:064b}", self.registers.cr3);
        let reserved = if is_long { 64 - self.maxphyaddr as usize } else { 1 };
        let supported = ![22, 23, 24, 28].into_iter().any(|bit| self.cr4(bit));
        protected_mode && pcids && supported && !cr3_bits[..reserved].contains('1')
    }
}

/// The formats of PTEs: for each mode and level the kinds of a PTE, with its fields from the
/// highest bit to the lowest. `0` and `1` select the format, `r` must be 0, `-` is ignored, `a` is
/// the address at its own place, `h` is address bits 39:32; M is MAXPHYADDR, m is M or 40,
/// whichever is less.
const PAGE_FIELDS: &str = "6=D 5=A 4:3=- 2=U 1=W 0=1";
const TABLE_FIELDS: &str = "6=- 5=A 4:3=- 2=U 1=W 0=1";

fn formats(paging: PagingMode, pse: bool, level: u8) -> Vec<(Option<u64>, String)> {
    let page = |nr_pages, high: &str| (Some(nr_pages), format!("{high} {PAGE_FIELDS}"));
    let table = |high: &str| (None, format!("{high} {TABLE_FIELDS}"));
    match (paging, level) {
        (PagingMode::Off, _) => vec![],
        (PagingMode::TwoLevel, 2) if pse => vec![
            page(1024, "63:32=- 31:22=a 21:m-19=r m-20:13=h 12=- 11:9=- 8=G 7=1"),
            table("63:32=- 31:12=a 11:8=- 7=0"),
        ],
        (PagingMode::TwoLevel, 2) => vec![table("63:32=- 31:12=a 11:7=-")],
        (PagingMode::TwoLevel, _) => vec![page(1, "63:32=- 31:12=a 11:9=- 8=G 7=-")],
        (PagingMode::Pae, 3) => vec![(None, "63:M=r M-1:12=a 11:9=- 8:5=r 4:3=- 2:1=r 0=1".into())],
        (PagingMode::Pae, 2) => vec![
            page(512, "63=X 62:M=r M-1:21=a 20:13=r 12=- 11:9=- 8=G 7=1"),
            table("63=X 62:M=r M-1:12=a 11:8=- 7=0"),
        ],
        (PagingMode::Pae, _) => vec![page(1, "63=X 62:M=r M-1:12=a 11:9=- 8=G 7=-")],
        (_, 3) => vec![
            page(1 << 18, "63=X 62:52=- 51:M=r M-1:30=a 29:13=r 12=- 11:9=- 8=G 7=1"),
            table("63=X 62:52=- 51:M=r M-1:12=a 11:8=- 7=0"),
        ],
        (_, 2) => vec![
            page(512, "63=X 62:52=- 51:M=r M-1:21=a 20:13=r 12=- 11:9=- 8=G 7=1"),
            table("63=X 62:52=- 51:M=r M-1:12=a 11:8=- 7=0"),
        ],
        (_, 1) => vec![page(1, "63=X 62:52=- 51:M=r M-1:12=a 11:9=- 8=G 7=-")],
        _ => vec![table("63=X 62:52=- 51:M=r M-1:12=a 11:8=- 7=r")],
    }
}

/// The field of each bit, bit 63 first.
fn spread(format: &str, maxphyaddr: u32) -> String {
    let number = |text: &str| {
        let (name, less) = text.split_once('-').unwrap_or((text, "0"));
        let base = match name {
            "M" => maxphyaddr,
            "m" => maxphyaddr.min(40),
            number => number.parse().unwrap(),
        };
        base - less.parse::<u32>().unwrap()
    };
    let mut fields = String::new();
    for field in format.split(' ') {
        let (range, name) = field.split_once('=').unwrap();
        let (high, low) = range.split_once(':').unwrap_or((range, range));
        // Empty if there are no such bits for this MAXPHYADDR.
        for _ in number(low)..number(high) + 1 {
            fields.push_str(name);
        }
    }
    assert_eq!(fields.len(), 64, "{format}");
    fields
}

fn interpret(guest: Guest, pte: u64, level: u8) -> Decoded {
    let bits = format!("{pte:064b}");
    if bits.ends_with('0') {
        return Decoded::NotPresent;
    }
    let paging = guest.paging().unwrap();
    let selected = formats(paging, guest.cr4(4), level).into_iter().find_map(|(nr_pages, format)| {
        let fields = spread(&format, guest.maxphyaddr);
        let fits = fields.chars().zip(bits.chars()).all(|(field, bit)| !matches!(field, '0' | '1') || field == bit);
        fits.then_some((nr_pages, fields))
    });
    // Without paging there is no format.
    let Some((nr_pages, fields)) = selected else { return Decoded::NotPresent };
    // The bits of a field, as a number whose lowest bit is that of bit 0.
    let masked = |name: char| {
        let digits: String =
            fields.chars().zip(bits.chars()).map(|(field, bit)| if field == name { bit } else { '0' }).collect();
        u64::from_str_radix(&digits, 2).unwrap()
    };
    let has = |name: char| masked(name) != 0;
    if has('r') || has('X') && !guest.efer(11) {
        return Decoded::Reserved;
    }
    let address = masked('a') + (masked('h') >> 13) * (1 << 32);
    let absent_or_set = |name: char| !fields.contains(name) || has(name);
    let rights = Rights(u8::from(absent_or_set('W')) + 2 * u8::from(absent_or_set('U')) + 4 * u8::from(!has('X')));
    match nr_pages {
        None => Decoded::Table { table: Gpa(address), rights, is_accessed: absent_or_set('A') },
        Some(nr_pages) => Decoded::Leaf(GuestLeaf {
            gfn: Gfn(address / 4096),
            nr_pages,
            rights,
            is_global: has('G') && guest.cr4(7),
            is_accessed: has('A'),
            is_dirty: has('D'),
        }),
    }
}

/// 4.6.1, "Determination of Access Rights", rule by rule: whether an access to an address with
/// these rights is allowed.
fn is_allowed(guest: Guest, rights: Rights, access: GuestAccess) -> bool {
    let (writable, user_address, executable) = (rights.0 & 1 != 0, rights.0 & 2 != 0, rights.0 & 4 != 0);
    let (wp, smep, smap) = (guest.cr0(16), guest.cr4(20), guest.cr4(21));
    let ac = access.privilege == Privilege::SupervisorWithAc;
    match (access.privilege, user_address, access.access) {
        (Privilege::User, false, _) => false,
        (Privilege::User, true, Access::Read) => true,
        (Privilege::User, true, Access::Write) => writable,
        (Privilege::User, true, Access::Execute | Access::ExecuteUser) => executable,
        (_, false, Access::Read) => true,
        (_, false, Access::Write) => writable || !wp,
        (_, false, Access::Execute | Access::ExecuteUser) => executable,
        (_, true, Access::Read) => !smap || ac,
        (_, true, Access::Write) if !wp => !smap || ac,
        (_, true, Access::Write) => writable && (!smap || ac),
        (_, true, Access::Execute | Access::ExecuteUser) => !smep && executable,
    }
}

/// 4.7, "Page-Fault Exceptions": the error code, from its highest bit to its lowest.
fn error_code(guest: Guest, access: GuestAccess, reserved: bool, present: bool) -> u32 {
    let has_fetch_bit = guest.cr4(20) || guest.cr4(5) && guest.efer(11);
    let bits = [
        access.access.is_fetch() && has_fetch_bit,
        reserved,
        access.privilege == Privilege::User,
        access.access == Access::Write,
        present,
    ];
    bits.into_iter().fold(0, |code, bit| code * 2 + u32::from(bit))
}

/// A walk: the addresses that it reads, with what it must set in each PTE, and the page or the
/// fault.
type Walk = (Vec<(u64, u64)>, Result<(Gpa, Rights), u32>);

/// A walk by the figures: the bits of the linear address that select a PTE, level by level. The
/// n-th read finds `entries[n]`.
fn interpret_walk(guest: Guest, gva: u64, access: GuestAccess, entries: &[u64]) -> Walk {
    let bits = format!("{gva:064b}");
    let field = |high: usize, low: usize| u64::from_str_radix(&bits[63 - high..64 - low], 2).unwrap();
    let cr3 = guest.registers.cr3;
    let (mut table, entry_bytes, fields) = match guest.paging().unwrap() {
        PagingMode::Off => return (vec![], Ok((Gpa(field(31, 0)), Rights(7)))),
        PagingMode::TwoLevel => (cr3 % (1 << 32) / 4096 * 4096, 4, vec![(31, 22), (21, 12)]),
        PagingMode::Pae => (cr3 % (1 << 32) / 32 * 32, 8, vec![(31, 30), (29, 21), (20, 12)]),
        PagingMode::FourLevel => (cr3 / 4096 * 4096, 8, vec![(47, 39), (38, 30), (29, 21), (20, 12)]),
        PagingMode::FiveLevel => (cr3 / 4096 * 4096, 8, vec![(56, 48), (47, 39), (38, 30), (29, 21), (20, 12)]),
    };
    let mut rights = 7;
    let mut reads = vec![];
    for (n, &(high, low)) in fields.iter().enumerate() {
        let at = table + entry_bytes * field(high, low);
        match interpret(guest, entries[n], (fields.len() - n) as u8) {
            Decoded::NotPresent => return (reads, Err(error_code(guest, access, false, false))),
            Decoded::Reserved => return (reads, Err(error_code(guest, access, true, true))),
            Decoded::Table { table: next, rights: own, is_accessed } => {
                reads.push((at, if is_accessed { 0 } else { 0x20 }));
                rights &= own.0;
                table = next.0;
            }
            Decoded::Leaf(leaf) => {
                let accessed = if leaf.is_accessed { 0 } else { 0x20 };
                let dirty = if leaf.is_dirty || access.access != Access::Write { 0 } else { 0x40 };
                reads.push((at, accessed + dirty));
                rights &= leaf.rights.0;
                if !is_allowed(guest, Rights(rights), access) {
                    return (reads, Err(error_code(guest, access, false, true)));
                }
                return (reads, Ok((Gpa(leaf.gfn.0 * 4096 + field(low - 1, 0)), Rights(rights))));
            }
        }
    }
    unreachable!("level 1 has no tables")
}

/// The same walk with the code under test.
fn walk(mode: GuestMode, cr3: u64, gva: Gva, access: GuestAccess, entries: &[u64]) -> Walk {
    let mut reads = vec![];
    if mode.paging() == PagingMode::Off {
        return (reads, mode.check(Rights::ALL, access).map(|()| (Gpa(gva.0), Rights::ALL)));
    }
    let (mut table, mut level, mut rights) = (mode.root_table(cr3), mode.root_level(), Rights::ALL);
    for &pte in entries {
        let at = mode.entry_gpa(table, level, gva);
        let decoded = mode.decode(pte, level);
        match decoded {
            Decoded::NotPresent => return (reads, Err(mode.error_code(access, 0))),
            Decoded::Reserved => return (reads, Err(mode.error_code(access, FAULT_PRESENT | FAULT_RESERVED))),
            Decoded::Table { table: next, rights: own, .. } => {
                reads.push((at.0, decoded.missing_marks(access.access)));
                rights = rights.and(own);
                table = next;
                level = level.down();
            }
            Decoded::Leaf(leaf) => {
                reads.push((at.0, decoded.missing_marks(access.access)));
                rights = rights.and(leaf.rights);
                let page_bytes = leaf.nr_pages * PAGE_SIZE;
                let gpa = Gpa(leaf.gfn.gpa().0 + gva.0 % page_bytes);
                return (reads, mode.check(rights, access).map(|()| (gpa, rights)));
            }
        }
    }
    unreachable!("more levels than entries")
}

/// The register bits that matter, each with probability one half, or those of a mode with paging.
/// CR3's are rarely high ones.
fn registers() -> impl Strategy<Value = PagingRegisters> {
    let choose = |bits: &'static [u32]| {
        proptest::collection::vec(any::<bool>(), bits.len()).prop_map(move |chosen| {
            bits.iter().zip(chosen).filter(|(_, chosen)| *chosen).fold(0, |value, (bit, _)| value | 1u64 << bit)
        })
    };
    let cr4 = prop_oneof![
        20 => choose(&[4, 5, 7, 12, 17, 20, 21]),
        1 => choose(&[5, 22, 23, 24, 28]),
    ];
    let cr3 = prop_oneof![8 => 0u64..1 << 32, 1 => any::<u64>(), 1 => (0u32..64).prop_map(|bit| 1 << bit)];
    let paging = prop_oneof![Just(0), Just(1), Just(1 << 31 | 1), Just(1 << 31 | 1), Just(1 << 31)];
    (paging, choose(&[16]), cr3, cr4, choose(&[8, 10, 11])).prop_map(|(paging, wp, cr3, cr4, efer)| PagingRegisters {
        cr0: paging | wp,
        cr3,
        cr4,
        efer,
    })
}

fn guest() -> impl Strategy<Value = Guest> {
    (registers(), prop_oneof![32u32..=52, Just(46), Just(52)])
        .prop_map(|(registers, maxphyaddr)| Guest { registers, maxphyaddr })
}

/// A guest with valid registers: CR3 and CR4 without invalid bits, which leaves all modes likely.
fn possible_guest() -> impl Strategy<Value = Guest> {
    guest().prop_map(|mut guest| {
        let PagingRegisters { cr0, cr3, cr4, .. } = &mut guest.registers;
        *cr0 |= *cr0 >> 31;
        *cr4 &= !(1 << 22 | 1 << 23 | 1 << 24 | 1 << 28);
        *cr3 &= (1 << 32) - 1;
        if guest.paging().is_none() {
            guest.registers.cr4 |= 1 << 5;
        }
        if !matches!(guest.paging(), Some(PagingMode::FourLevel | PagingMode::FiveLevel)) {
            guest.registers.cr4 &= !(1 << 17);
        }
        guest
    })
}

/// PTEs: any bits; flags with a low address, so that many are valid; and those with one more bit.
fn pte() -> impl Strategy<Value = u64> {
    let valid = || {
        (0u64..1 << 12, 0u64..1 << 20, any::<u64>()).prop_map(|(flags, frame, dice)| {
            let rights = if dice % 4 == 0 { 0 } else { 7 };
            let large = if dice / 4 % 2 == 0 { !(bits(13, 29)) } else { u64::MAX };
            let flags = if dice / 8 % 2 == 0 { flags & !0x1e0 } else { flags };
            (flags | rights | 1 | frame << 12) & large | if dice / 16 % 8 == 0 { 1 << 63 } else { 0 }
        })
    };
    prop_oneof![1 => any::<u64>(), 6 => valid(), 2 => (valid(), 0u32..64).prop_map(|(pte, bit)| pte ^ 1 << bit)]
}

fn access() -> impl Strategy<Value = GuestAccess> {
    let access = prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::Execute)];
    let privilege = prop_oneof![Just(Privilege::User), Just(Privilege::Supervisor), Just(Privilege::SupervisorWithAc)];
    (access, privilege).prop_map(|(access, privilege)| GuestAccess { access, privilege })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn registers_are_valid_as_in_the_manual(guest in guest()) {
        let mode = GuestMode::new(guest.registers, guest.maxphyaddr);
        prop_assert_eq!(mode.is_ok(), guest.is_possible());
        if let Ok(mode) = mode {
            prop_assert_eq!(Some(mode.paging()), guest.paging());
        }
    }

    #[test]
    fn entries_decode_as_in_the_manual(guest in possible_guest(), pte in pte()) {
        let mode = GuestMode::new(guest.registers, guest.maxphyaddr).unwrap();
        for level in 1..=mode.root_level().0 {
            prop_assert_eq!(mode.decode(pte, Level(level)), interpret(guest, pte, level), "level {}", level);
        }
    }

    #[test]
    fn rights_match_the_rules(guest in possible_guest(), rights in 0u8..8, access in access()) {
        let mode = GuestMode::new(guest.registers, guest.maxphyaddr).unwrap();
        if mode.paging() == PagingMode::Off {
            return Ok(());
        }
        let expected = match is_allowed(guest, Rights(rights), access) {
            true => Ok(()),
            false => Err(error_code(guest, access, false, true)),
        };
        prop_assert_eq!(mode.check(Rights(rights), access), expected);
    }

    #[test]
    fn walks_match_the_figures(
        guest in possible_guest(),
        gva in any::<u64>(),
        access in access(),
        entries in proptest::collection::vec(pte(), 5),
    ) {
        let mode = GuestMode::new(guest.registers, guest.maxphyaddr).unwrap();
        let gva = match mode.paging() {
            PagingMode::FourLevel => (gva as i64 >> 16) as u64,
            PagingMode::FiveLevel => (gva as i64 >> 7) as u64,
            PagingMode::Off | PagingMode::TwoLevel | PagingMode::Pae => gva >> 32,
        };
        prop_assert!(mode.is_canonical(Gva(gva)));
        let expected = interpret_walk(guest, gva, access, &entries);
        prop_assert_eq!(walk(mode, guest.registers.cr3, Gva(gva), access, &entries), expected);
    }
}
