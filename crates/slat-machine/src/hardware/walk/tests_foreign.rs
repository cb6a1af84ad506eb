//! Page tables in a file that is the memory of another machine, built by hand.

use slat::format::{Npt, Stage2, Sv39x4};
use slat::{Gpa, Hpa, PageSize, Pfn};

use super::foreign::{Entry, ForeignMemory, Leaf, memory_file};
use super::tests_manuals::{Manual, NPT, STAGE2, SV39X4};
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

/// A leaf of 4 KiB with all rights, A and D.
fn full(manual: &Manual) -> u64 {
    manual.entry(FRAME, manual.page | manual.accessed | manual.dirty)
}

/// The place of the leaf of [`machine_with`].
fn place(manual: &Manual) -> u64 {
    TABLES[usize::from(manual.levels()) - 2] + 8 * 5
}

/// Page 5 of the guest, with `leaf`.
fn machine_with(manual: &Manual, leaf: u64) -> ForeignMemory {
    let below = &TABLES[..usize::from(manual.levels()) - 1];
    let above = std::iter::once(&ROOT).chain(below);
    let link = |table: u64| manual.entry(table, manual.link | manual.link_accessed);
    let links = above.zip(below).map(|(&table, &below)| (table, link(below)));
    machine(&links.chain([(place(manual), leaf)]).collect::<Vec<_>>())
}

/// The bits of a leaf that change nothing.
fn ignored<F: HardwareFormat>(manual: &Manual) -> Vec<u32> {
    let found = |leaf| leaves::<F>(&machine_with(manual, leaf));
    let expected = found(full(manual)).unwrap();
    assert_eq!((expected.0[0].gpa, expected.0[0].pte), (Gpa(0x5000), Hpa(place(manual))));
    (0..64).filter(|bit| found(full(manual) ^ 1 << bit).as_ref() == Ok(&expected)).collect()
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
    assert_eq!(found(leaves::<Npt>(&machine_with(&NPT, full(&NPT)))), (one(leaf), 3 * 511 + 512));
    assert_eq!(found(leaves::<Stage2>(&machine_with(&STAGE2, full(&STAGE2)))), (one(leaf), 3 * 511 + 512));
    assert_eq!(found(leaves::<Sv39x4>(&machine_with(&SV39X4, full(&SV39X4)))), (one(by_address), 2047 + 511 + 512));
    // Without W, X, A and D.
    let bare = Leaf { writable: false, executable: [false, false], accessed: false, dirty: true, ..leaf };
    let (entries, _) = found(leaves::<Npt>(&machine_with(&NPT, FRAME | 1 << 63 | 0x5)));
    // What cannot be written says nothing of D.
    assert_eq!(entries, one(Leaf { dirty: entries[0].leaf.unwrap().dirty, ..bare }));
    let clean = Leaf { accessed: false, dirty: false, ..by_address };
    assert_eq!(found(leaves::<Sv39x4>(&machine_with(&SV39X4, FRAME >> 2 | 0x1f))).0, one(clean));
    assert_eq!(
        found(leaves::<Stage2>(&machine_with(&STAGE2, full(&STAGE2) & !(1 << 10)))).0,
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
    assert_eq!(ignored::<Npt>(&NPT), [7, 8, 9, 10, 11, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62]);
    // Stage 2, Arm ARM, D8.3.2: inner or outer shareable; 55 to 58, of software; those above.
    assert_eq!(ignored::<Stage2>(&STAGE2), [8, 55, 56, 57, 58, 59, 60, 61, 62, 63]);
    // G-stage, Privileged Architecture, "Sv39": G, and RSW.
    assert_eq!(ignored::<Sv39x4>(&SV39X4), [5, 8, 9]);
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
