//! Page tables in a file that is the memory of another machine, built by hand. The constants here
//! are the manuals', written once more.

use slat::format::{Npt, Stage2, Sv39x4};
use slat::{Gpa, Hpa, PageSize, Pfn};

use super::foreign::{Entry, ForeignMemory, Leaf, memory_file};
use super::{HardwareFormat, Memory, Misconfiguration, Processor, Stop};

/// Where the other machine has its memory.
const START: u64 = 0x8000_0000;
const SIZE: u64 = 0x10_0000;
/// Page-table pages, from the root down: the root has up to four pages.
const ROOT: u64 = START;
const TABLES: [u64; 3] = [START + 0x4000, START + 0x5000, START + 0x6000];
/// A device: the machine has no memory there.
const FRAME: u64 = 0xabc_d000;

/// A machine whose memory has `words`.
fn machine(words: &[(u64, u64)]) -> ForeignMemory {
    let file = memory_file(SIZE).unwrap();
    for (address, word) in words {
        rustix::io::pwrite(&file, &word.to_ne_bytes(), address - START).unwrap();
    }
    ForeignMemory::of_file(&file, Hpa(START)).unwrap()
}

/// The entries that map something, and how many there are in all.
fn leaves<F: HardwareFormat>(memory: &ForeignMemory) -> Result<(Vec<Entry>, usize), Stop> {
    let all: Vec<_> = memory.entries::<F>(Hpa(ROOT), Processor::of::<F>()).collect::<Result<_, _>>()?;
    // Each address is in one of them.
    let mut next = 0;
    for entry in &all {
        assert_eq!(entry.gpa.0, next);
        next += entry.size_bytes;
    }
    assert_eq!(next, 1 << Processor::of::<F>().gpa_bits);
    Ok((all.iter().filter(|entry| entry.leaf.is_some()).copied().collect(), all.len()))
}

/// A leaf of 4 KiB with the bits of `leaf`, and what is on the way to it.
struct Format {
    table: fn(u64) -> u64,
    nr_levels: usize,
    leaf: u64,
}

const NPT: Format = Format { table: |address| address | 0x27, nr_levels: 4, leaf: FRAME | 0x67 };
const STAGE2: Format = Format { table: |address| address | 3, nr_levels: 4, leaf: FRAME | 0x7ff };
const GSTAGE: Format = Format { table: |address| address >> 2 | 1, nr_levels: 3, leaf: FRAME >> 2 | 0xdf };

impl Format {
    /// Page 5 of the guest, with `leaf`.
    fn machine(&self, leaf: u64) -> ForeignMemory {
        let mut words = Vec::new();
        let mut table = ROOT;
        for &below in &TABLES[..self.nr_levels - 1] {
            words.push((table, (self.table)(below)));
            table = below;
        }
        words.push((table + 8 * 5, leaf));
        machine(&words)
    }

    /// The place of the leaf.
    fn place(&self) -> u64 {
        TABLES[self.nr_levels - 2] + 8 * 5
    }

    /// What is found with each of the 64 bits changed: the same, or something else. The first are
    /// returned.
    fn ignored<F: HardwareFormat>(&self) -> Vec<u32> {
        let found = |leaf| leaves::<F>(&self.machine(leaf));
        let expected = found(self.leaf).unwrap();
        assert_eq!((expected.0[0].gpa, expected.0[0].pte), (Gpa(0x5000), Hpa(self.place())));
        (0..64).filter(|bit| found(self.leaf ^ 1 << bit).as_ref() == Ok(&expected)).collect()
    }
}

#[test]
fn what_a_processor_finds_is_found() {
    let leaf = Leaf {
        frame: Pfn(FRAME >> 12),
        size: PageSize::Size4K,
        writable: true,
        executable: [true, true],
        memory: Memory::WriteBack,
        accessed: true,
        dirty: true,
    };
    let by_address = Leaf { memory: Memory::ByAddress, ..leaf };
    let one = |leaf| vec![Entry { gpa: Gpa(0x5000), size_bytes: 4096, pte: Hpa(0), leaf: Some(leaf) }];
    let found = |found: Result<(Vec<Entry>, usize), Stop>| {
        let (found, nr) = found.unwrap();
        (found.into_iter().map(|entry| Entry { pte: Hpa(0), ..entry }).collect::<Vec<_>>(), nr)
    };
    // Of four levels with 512 PTEs all but the one on the way end a walk.
    assert_eq!(found(leaves::<Npt>(&NPT.machine(NPT.leaf))), (one(leaf), 3 * 511 + 512));
    assert_eq!(found(leaves::<Stage2>(&STAGE2.machine(STAGE2.leaf))), (one(leaf), 3 * 511 + 512));
    assert_eq!(found(leaves::<Sv39x4>(&GSTAGE.machine(GSTAGE.leaf))), (one(by_address), 2047 + 511 + 512));
    // Without W, X, A and D.
    let bare = Leaf { writable: false, executable: [false, false], accessed: false, dirty: true, ..leaf };
    let (entries, _) = found(leaves::<Npt>(&NPT.machine(FRAME | 1 << 63 | 0x5)));
    // What cannot be written says nothing of D.
    assert_eq!(entries, one(Leaf { dirty: entries[0].leaf.unwrap().dirty, ..bare }));
    let clean = Leaf { accessed: false, dirty: false, ..by_address };
    assert_eq!(found(leaves::<Sv39x4>(&GSTAGE.machine(FRAME >> 2 | 0x1f))).0, one(clean));
    assert_eq!(
        found(leaves::<Stage2>(&STAGE2.machine(STAGE2.leaf & !(1 << 10)))).0,
        one(Leaf { accessed: false, ..leaf })
    );
}

#[test]
fn walks_leave_the_machine_as_it_was() {
    let file = memory_file(SIZE).unwrap();
    // 1 GiB, without A and D.
    let leaf: u64 = 0x4000_0000 >> 2 | 0x1f;
    rustix::io::pwrite(&file, &leaf.to_ne_bytes(), ROOT - START).unwrap();
    let first = ForeignMemory::of_file(&file, Hpa(START)).unwrap();
    assert_eq!(leaves::<Sv39x4>(&first).unwrap().0.len(), 1);
    // The walks have set both, and here alone.
    assert_eq!(first.word(Hpa(ROOT)), Some(leaf | 0xc0));
    first.set_word(Hpa(ROOT + 8), 7).unwrap();
    assert_eq!((first.word(Hpa(ROOT + 8)), first.word(Hpa(START + SIZE)), first.word(Hpa(0))), (Some(7), None, None));
    let second = ForeignMemory::of_file(&file, Hpa(START)).unwrap();
    assert_eq!((second.word(Hpa(ROOT)), second.word(Hpa(ROOT + 8))), (Some(leaf), Some(0)));
}

#[test]
fn a_misaligned_huge_page_is_no_page() {
    assert!(leaves::<Sv39x4>(&machine(&[(ROOT, FRAME >> 2 | 0x1f)])).is_err());
}

#[test]
fn a_huge_page_is_one_entry() {
    // 2 MiB, clean, under a directory that write-protects it.
    let leaf = 0xa0_0000 | 0xe7;
    let memory = machine(&[(ROOT, TABLES[0] | 0x27), (TABLES[0], TABLES[1] | 0x25), (TABLES[1] + 8, leaf & !0x60)]);
    let (found, _) = leaves::<Npt>(&memory).unwrap();
    let [Entry { gpa: Gpa(0x20_0000), size_bytes: 0x20_0000, leaf: Some(leaf), .. }] = found[..] else {
        panic!("{found:x?}")
    };
    assert_eq!((leaf.frame, leaf.size, leaf.writable), (Pfn(0xa00), PageSize::Size2M, false));
    assert!(!leaf.accessed);
}

#[test]
fn each_bit_of_a_leaf_matters_that_the_manual_does_not_ignore() {
    // NPT, AMD APM vol. 2, 5.4: entry 4 of the PAT, which is as entry 0 after a reset; G, and three
    // bits of software; 52 to 58, of software; protection keys.
    assert_eq!(NPT.ignored::<Npt>(), [7, 8, 9, 10, 11, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62]);
    // Stage 2, Arm ARM, D8.3.2: inner or outer shareable; 55 to 58, of software; those above.
    assert_eq!(STAGE2.ignored::<Stage2>(), [8, 55, 56, 57, 58, 59, 60, 61, 62, 63]);
    // G-stage, Privileged Architecture, "Sv39": G, and RSW.
    assert_eq!(GSTAGE.ignored::<Sv39x4>(), [5, 8, 9]);
}

#[test]
fn tables_outside_of_the_memory_are_not_read() {
    for table in [0, START - 0x1000, START + SIZE, 0xf_ffff_ffff_f000] {
        let memory = machine(&[(ROOT, table | 0x27)]);
        assert_eq!(leaves::<Npt>(&memory), Err(Stop::NoMemory { gpa: Gpa(0), hpa: Hpa(table) }), "{table:#x}");
    }
    let memory = machine(&[(ROOT + 8, TABLES[0] | 0x27), (TABLES[0], 1 << 13 | 0xe7)]);
    let error = leaves::<Npt>(&memory).unwrap_err();
    assert!(matches!(error, Stop::Misconfigured(Misconfiguration { gpa: Gpa(0x80_0000_0000), .. })), "{error}");
}
