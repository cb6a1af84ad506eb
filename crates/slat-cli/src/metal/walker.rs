//! The page tables of the hypervisor's guest, walked outside of the machine: by the walkers of
//! slat-machine, which were written from the manuals and share no constant with the engine.
//!
//! The emulator has the machine's memory in a file of this process. At checkpoints the hypervisor
//! says where the page tables are and what the engine's queries find in them (`suite/tables.rs` in
//! slat-metal has the protocol), and waits. A walk of every address, entry by entry, must find the
//! same: what is mapped, to which frame, by which size, W, X, the memory type, A and D. And frames
//! and page-table pages are on the NUMA nodes that they were asked from.
//!
//! # What is not compared
//! - Which pages are kept from the CPUs, so that their next access is observed: these are present
//!   for the engine alone. Where there may be such pages, one that has neither A nor W for the
//!   engine may be absent for the walker.
//! - D of a page that cannot be written: no walk tells it. Stage 2 has no D here.
//! - Where the dirty log takes D of the PTEs, that the engine has a D which the PTE has not.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::{pread, pwrite};
use slat::format::{CpuFeatures, Format, Stage2, Sv39x4, Sv48x4, Sv57x4};
use slat::{Hpa, PAGE_SIZE, PageSize, Pfn};
use slat_machine::hardware::walk::foreign::{Entry, ForeignMemory, Leaf, memory_file};
use slat_machine::hardware::walk::{HardwareFormat, Marks, Memory, Processor};

use super::nodes::NodeMemory;

/// Where page tables are, and what the engine says of them: a line of the hypervisor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Tables {
    format: String,
    root: u64,
    levels: u8,
    gpa_bits: u8,
    features: u32,
    pat: u64,
    /// Pages may be kept from the CPUs.
    keeps_pages: bool,
    /// The engine may have D where the PTE has not.
    keeps_dirty: bool,
    /// The address of the mappings, and how many there are.
    mappings: (u64, u64),
    /// The node of all page-table pages, if they have one.
    node: Option<u32>,
    answer: u64,
}

/// The most mappings that a guest of the suite can have.
const MAX_MAPPINGS: u64 = 1 << 20;
/// Bytes of a mapping.
const MAPPING_BYTES: usize = 32;

/// The parts of an answer, and its verdicts.
const VERDICT: u64 = 0;
const NR_BYTES: u64 = 8;
const TEXT: u64 = 16;
const MAX_TEXT: usize = 512;
const RIGHT: u64 = 1;
const WRONG: u64 = 2;

/// A number, hexadecimal behind 0x.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

impl Tables {
    /// Reads the words of a line.
    pub(super) fn parse(text: &str) -> Option<Tables> {
        let words: BTreeMap<_, _> = text.split(' ').map(|word| word.split_once('=')).collect::<Option<_>>()?;
        let value = |name| words.get(name).copied();
        let (address, nr) = value("mappings")?.split_once(',')?;
        let is = |name, yes, no| match value(name)? {
            value if value == yes => Some(true),
            value if value == no => Some(false),
            _ => None,
        };
        Some(Tables {
            format: value("format")?.to_owned(),
            root: number(value("root")?)?,
            levels: value("levels")?.parse().ok().filter(|levels| (3..=5).contains(levels))?,
            gpa_bits: value("gpa_bits")?.parse().ok().filter(|bits| (32..=59).contains(bits))?,
            features: number(value("features")?)?.try_into().ok()?,
            pat: number(value("pat")?)?,
            keeps_pages: is("access", "faults", "bits")?,
            keeps_dirty: is("dirty", "kept", "exact")?,
            mappings: (number(address)?, number(nr).filter(|&nr| nr <= MAX_MAPPINGS)?),
            node: match value("tables")? {
                "any" => None,
                node => Some(node.parse().ok()?),
            },
            answer: number(value("answer")?)?,
        })
    }
}

/// Pages that the engine has one after the other in frames one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mapping {
    gpa: u64,
    nr_pages: u64,
    pfn: u64,
    size: PageSize,
    writable: bool,
    accessed: bool,
    dirty: bool,
    /// The engine's numbers of memory type and execution.
    memory: u8,
    execute: u8,
    /// The node that the memory was asked from, if that is known.
    node: Option<u32>,
}

impl Mapping {
    fn new([gpa, nr_pages, pfn, flags]: [u64; 4]) -> Option<Mapping> {
        let size = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G].get((flags & 3) as usize).copied()?;
        let bit = |shift: u32| flags >> shift & 1 != 0;
        let (memory, execute) = ((flags >> 8) as u8, (flags >> 16) as u8);
        let node = u32::from((flags >> 24) as u8).checked_sub(1);
        gpa.checked_add(nr_pages.checked_mul(PAGE_SIZE)?)?;
        let (writable, accessed, dirty) = (bit(2), bit(3), bit(4));
        Some(Mapping { gpa, nr_pages, pfn, size, writable, accessed, dirty, memory, execute, node })
    }

    fn end(&self) -> u64 {
        self.gpa + self.nr_pages * PAGE_SIZE
    }

    /// Whether code of the guest's kernel, and of its programs, can be fetched.
    fn executable(&self) -> Option<[bool; 2]> {
        [[true, true], [false, false], [false, true], [true, false]].get(usize::from(self.execute)).copied()
    }
}

/// What was compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Compared {
    /// Sets of page tables.
    pub(super) nr_tables: u64,
    /// Leaf PTEs, and PTEs that map nothing.
    pub(super) nr_leaves: u64,
    pub(super) nr_holes: u64,
    /// Leaf PTEs whose memory is on the node that it was asked from.
    pub(super) nr_placed: u64,
}

impl Compared {
    /// Adds what was compared in other page tables.
    pub(super) fn add(&mut self, other: Compared) {
        self.nr_tables += other.nr_tables;
        self.nr_leaves += other.nr_leaves;
        self.nr_holes += other.nr_holes;
        self.nr_placed += other.nr_placed;
    }
}

/// The machine's memory, as long as it runs.
#[derive(Debug)]
pub(super) struct MachineMemory {
    file: OwnedFd,
    /// Where the machine has it.
    start: u64,
    nodes: NodeMemory,
}

/// A bit of a leaf PTE that is wrong on purpose: of the frame's number, in each format.
const WRONG_BIT: u64 = 1 << 12;

impl MachineMemory {
    /// Memory that a machine has from `start` on, on these nodes.
    pub(super) fn new(start: u64, nodes: NodeMemory) -> io::Result<MachineMemory> {
        Ok(MachineMemory { file: memory_file(nodes.mib() << 20)?, start, nodes })
    }

    /// The kind of memory for QEMU, of `mib` MiB from `first` on in the file.
    pub(super) fn of_qemu(&self, mib: u64, first: u64) -> String {
        // A name without a comma, which this user can open.
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd());
        format!("memory-backend-file,size={mib}M,offset={first}M,share=on,mem-path={path}")
    }

    /// Walks `tables`, and answers. A difference is in the answer, and so in the hypervisor's
    /// verdict. With `wrong_leaf` a bit of one leaf PTE, which follows from the number, is wrong on
    /// purpose.
    ///
    /// # Errors
    /// Nothing can be compared: the hypervisor has no such memory, or the format is not known here.
    pub(super) fn check(&self, tables: &Tables, wrong_leaf: Option<u64>) -> io::Result<Compared> {
        let compare = comparison(&tables.format).ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, format!("no walker for the format {}", tables.format))
        })?;
        let mappings = self.read_mappings(tables)?;
        let look = || ForeignMemory::of_file(&self.file, Hpa(self.start));
        let expected = Expected { tables, mappings, nodes: &self.nodes };
        let compared = compare(&expected, [&look()?, &look()?], wrong_leaf);
        let (verdict, text) = match &compared {
            Ok(_) => (RIGHT, ""),
            Err(difference) => (WRONG, difference.as_str()),
        };
        let text = &text.as_bytes()[..text.len().min(MAX_TEXT)];
        self.write(tables.answer + TEXT, text)?;
        self.write(tables.answer + NR_BYTES, &(text.len() as u64).to_le_bytes())?;
        self.write(tables.answer + VERDICT, &verdict.to_le_bytes())?;
        Ok(compared.unwrap_or_default())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = address.checked_sub(self.start).ok_or(io::ErrorKind::InvalidInput)?;
        if pwrite(&self.file, bytes, offset)? == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn read_mappings(&self, tables: &Tables) -> io::Result<BTreeMap<u64, Mapping>> {
        let (address, nr) = tables.mappings;
        let mut bytes = vec![0; nr as usize * MAPPING_BYTES];
        let outside =
            || io::Error::new(io::ErrorKind::InvalidData, format!("the hypervisor has no mappings at {address:#x}"));
        let offset = address.checked_sub(self.start).ok_or_else(outside)?;
        if pread(&self.file, &mut bytes, offset)? != bytes.len() {
            return Err(outside());
        }
        let mut mappings = BTreeMap::new();
        for words in bytes.as_chunks::<MAPPING_BYTES>().0 {
            let word = |index: usize| u64::from_le_bytes(*words[8 * index..].first_chunk().unwrap_or(&[0; 8]));
            let mapping = Mapping::new([0, 1, 2, 3].map(word)).ok_or_else(outside)?;
            mappings.insert(mapping.gpa, mapping);
        }
        Ok(mappings)
    }
}

/// What a walk must find.
struct Expected<'t> {
    tables: &'t Tables,
    mappings: BTreeMap<u64, Mapping>,
    nodes: &'t NodeMemory,
}

/// Walks all addresses of the tables, and compares them with the engine's mappings.
/// Of the two looks at the memory the first is for what is wrong on purpose: a walk sets A and D.
type Compare = fn(&Expected<'_>, [&ForeignMemory; 2], Option<u64>) -> Result<Compared, String>;

/// That of the format `name`.
fn comparison(name: &str) -> Option<Compare> {
    slat::for_each_format!(F => {
        if F::NAME == name {
            return Some(compare::<F>);
        }
    });
    None
}

fn compare<F: HardwareFormat>(
    expected: &Expected<'_>,
    [first, memory]: [&ForeignMemory; 2],
    wrong_leaf: Option<u64>,
) -> Result<Compared, String> {
    let tables = expected.tables;
    let processor = Processor {
        levels: tables.levels,
        gpa_bits: tables.gpa_bits,
        features: CpuFeatures::from_bits(tables.features).ok_or("unknown features of the CPU")?,
        pat: tables.pat,
        marks: Marks::ByHardware,
    };
    let root = Hpa(tables.root);
    if let Some(number) = wrong_leaf {
        let entries = first.entries::<F>(root, processor);
        let leaves: Vec<_> = entries.filter_map(|entry| entry.ok().filter(|entry| entry.leaf.is_some())).collect();
        let leaf = leaves.get(number as usize % leaves.len().max(1)).ok_or("there is no leaf PTE")?;
        let pte = memory.word(leaf.pte).ok_or("a PTE outside of the memory")?;
        memory.set_word(leaf.pte, pte ^ WRONG_BIT).ok_or("a PTE outside of the memory")?;
    }
    let mut compared = Compared { nr_tables: 1, ..Compared::default() };
    for entry in memory.entries::<F>(root, processor) {
        let entry = entry.map_err(|stop| format!("a walk of {} tables fails: {stop}", F::NAME))?;
        let mapping = compare_entry::<F>(expected, &entry)?;
        match mapping {
            Some(_) => compared.nr_leaves += 1,
            None => compared.nr_holes += 1,
        }
        compared.nr_placed += u64::from(compare_nodes(expected, &entry, mapping)?);
    }
    Ok(compared)
}

/// Compares the nodes of the page-table page that has the PTE and of the memory that it maps with
/// those that they were asked from. Returns whether the memory has such a node.
fn compare_nodes(expected: &Expected<'_>, entry: &Entry, mapping: Option<&Mapping>) -> Result<bool, String> {
    let nodes = expected.nodes;
    let table = nodes.of(entry.pte.0);
    let asked = expected.tables.node;
    if asked.is_some_and(|asked| table != Some(asked)) {
        return Err(format!(
            "the page-table page of the PTE at {:#x} is on node {table:?}, not {asked:?}",
            entry.pte.0
        ));
    }
    let Some((leaf, asked)) = entry.leaf.zip(mapping.and_then(|mapping| mapping.node)) else { return Ok(false) };
    let start = leaf.frame.0 * PAGE_SIZE;
    let found = [start, start + entry.size_bytes - 1].map(|address| nodes.of(address));
    if found != [Some(asked); 2] {
        let (gpa, frame) = (entry.gpa, leaf.frame);
        return Err(format!(
            "the memory at {gpa} was asked from node {asked}, and its frames from {frame} on are on {found:?}"
        ));
    }
    Ok(true)
}

/// Compares what the walker found with what the engine has for the same addresses, which it
/// returns.
fn compare_entry<'e, F: Format>(expected: &'e Expected<'_>, entry: &Entry) -> Result<Option<&'e Mapping>, String> {
    let Expected { tables, mappings, .. } = expected;
    let (start, end) = (entry.gpa.0, entry.gpa.0.saturating_add(entry.size_bytes));
    // Those that begin before the end of the entry, from the last one on, and end behind its start.
    let mut engine =
        mappings.range(..end).rev().map(|(_, mapping)| mapping).take_while(|mapping| mapping.end() > start);
    let differs = |what: &str| {
        let of_engine = mappings.range(..end).next_back().map(|(_, mapping)| mapping);
        Err(format!(
            "the walker and the engine differ at {}: {what}; the walker finds {:x?} in the {} PTE at {:#x}, the engine \
             {of_engine:x?}",
            entry.gpa,
            entry.leaf,
            F::NAME,
            entry.pte.0,
        ))
    };
    let Some(leaf) = entry.leaf else {
        let is_kept = |mapping: &Mapping| tables.keeps_pages && !mapping.accessed && !mapping.writable;
        return if engine.all(is_kept) { Ok(None) } else { differs("nothing is mapped for the walker") };
    };
    let Some(mapping) = engine.next().filter(|mapping| mapping.gpa <= start && end <= mapping.end()) else {
        return differs("nothing is mapped for the engine, or less");
    };
    match difference::<F>(tables, mapping, &leaf, (start - mapping.gpa) / PAGE_SIZE) {
        Some(what) => differs(what),
        None => Ok(Some(mapping)),
    }
}

/// What the leaf has otherwise than `mapping`, of which it maps the pages from `page` on.
fn difference<F: Format>(tables: &Tables, mapping: &Mapping, leaf: &Leaf, page: u64) -> Option<&'static str> {
    let has_dirty_bit = F::NAME != Stage2::NAME;
    let is_dirty_wrong = if tables.keeps_dirty { leaf.dirty && !mapping.dirty } else { leaf.dirty != mapping.dirty };
    [
        (leaf.frame != Pfn(mapping.pfn + page), "the frame"),
        (leaf.size != mapping.size, "the size"),
        (leaf.writable != mapping.writable, "W"),
        (Some(leaf.executable) != mapping.executable(), "X"),
        (Some(leaf.memory) != memory_of::<F>(tables, mapping.memory), "the memory type"),
        (leaf.accessed != mapping.accessed, "A"),
        (has_dirty_bit && leaf.writable && is_dirty_wrong, "D"),
    ]
    .into_iter()
    .find_map(|(is_wrong, what)| is_wrong.then_some(what))
}

/// How the memory of the engine's type `number` is accessed.
fn memory_of<F: Format>(tables: &Tables, number: u8) -> Option<Memory> {
    let is_riscv = [Sv39x4::NAME, Sv48x4::NAME, Sv57x4::NAME].contains(&F::NAME);
    if is_riscv && tables.features & CpuFeatures::SVPBMT.bits() == 0 {
        return Some(Memory::ByAddress);
    }
    // Write-back; as the guest asks for, which is write-back here; write-through; not cached; two
    // kinds of devices.
    let kinds =
        [Memory::WriteBack, Memory::WriteBack, Memory::WriteThrough, Memory::NonCached, Memory::Device, Memory::Device];
    kinds.get(usize::from(number)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 0x8000_0000;
    const ROOT: u64 = START + 0x1000;
    const MAPPINGS: u64 = START + 0x8000;
    const ANSWER: u64 = START + 0x9000;
    /// Page 5 of the guest, and what nested page tables have for it: present, W, user, A, D.
    const LEAF: u64 = 0xabc_d067;
    const PTE: u64 = ROOT + 0x3000 + 8 * 5;

    /// The same for the engine: W, A and D.
    const MAPPING: [u64; 4] = [0x5000, 1, 0xabcd, 0b1_1100];

    fn line(access: &str, dirty: &str, nr_mappings: usize) -> String {
        format!(
            "format=npt root={ROOT:#x} levels=4 gpa_bits=48 features=0x0 pat=0x7040600070406 access={access} \
             dirty={dirty} tables=any mappings={MAPPINGS:#x},{nr_mappings} answer={ANSWER:#x}"
        )
    }

    /// The answer for tables with the leaf `pte`, where the engine has `mappings`: `None` if all is
    /// right.
    fn answer(pte: u64, mappings: &[[u64; 4]], line: &str, wrong_leaf: Option<u64>) -> Option<String> {
        // Two nodes; the memory that is mapped is on the first one.
        let memory = MachineMemory::new(START, NodeMemory::new(START, 2, 2)).unwrap();
        let write = |address, word: u64| memory.write(address, &word.to_le_bytes()).unwrap();
        (0..3).for_each(|level| write(ROOT + 0x1000 * level, (ROOT + 0x1000 * (level + 1)) | 0x27));
        write(PTE, pte);
        mappings.iter().flatten().zip(0..).for_each(|(&word, index)| write(MAPPINGS + 8 * index, word));
        let compared = memory.check(&Tables::parse(line).unwrap(), wrong_leaf).unwrap();
        let read = |address, nr_bytes| {
            let mut bytes = vec![0; nr_bytes];
            pread(&memory.file, &mut bytes, address - START).unwrap();
            bytes
        };
        let word = |address| u64::from_le_bytes(read(address, 8).try_into().unwrap());
        let text = String::from_utf8(read(ANSWER + TEXT, word(ANSWER + NR_BYTES) as usize)).unwrap();
        match word(ANSWER + VERDICT) {
            RIGHT => assert_eq!((compared.nr_tables, compared.nr_leaves + compared.nr_holes), (1, 3 * 511 + 512)),
            verdict => assert_eq!((verdict, compared), (WRONG, Compared::default())),
        }
        (word(ANSWER + VERDICT) == WRONG).then_some(text)
    }

    #[test]
    fn what_both_have_is_right_and_each_difference_is_told() {
        let exact = |pte, mappings: &[[u64; 4]]| answer(pte, mappings, &line("bits", "exact", mappings.len()), None);
        assert_eq!(exact(LEAF, &[MAPPING]), None);
        assert_eq!(exact(0, &[]), None);
        let [gpa, nr_pages, pfn, flags] = MAPPING;
        for (pte, mappings, what) in [
            (LEAF ^ 0x1000, &[MAPPING][..], "the frame"),
            (LEAF & !2, &[MAPPING], "W"),
            (LEAF | 1 << 63, &[MAPPING], "X"),
            (LEAF | 1 << 4, &[MAPPING], "the memory type"),
            (LEAF & !0x20, &[MAPPING], "A"),
            (LEAF & !0x40, &[MAPPING], "D"),
            (LEAF, &[[gpa, nr_pages, pfn, flags & !0b1_0000]], "D"),
            (LEAF, &[[gpa, nr_pages, pfn, flags | 1]], "the size"),
            (LEAF, &[[gpa - 0x1000, 1, pfn - 1, flags]], "nothing is mapped for the walker"),
            (LEAF, &[], "nothing is mapped for the engine, or less"),
            (LEAF, &[[gpa, 2, pfn, flags]], "nothing is mapped for the walker"),
            (0, &[MAPPING], "nothing is mapped for the walker"),
            (LEAF, &[MAPPING, [0xffff_ffff_f000, 1, 7, flags]], "nothing is mapped for the walker"),
            // A user page is needed.
            (LEAF & !4, &[MAPPING], "nothing is mapped for the walker"),
        ] {
            let text = exact(pte, mappings).unwrap_or_else(|| panic!("{what} was not noticed"));
            assert!(text.contains(&format!(": {what}; ")), "{what}: {text}");
        }
        // With a level more the leaf is a table, which is nowhere.
        let five = line("bits", "exact", 0).replace("levels=4", "levels=5").replace("gpa_bits=48", "gpa_bits=57");
        let text = answer(LEAF, &[], &five, None).unwrap();
        assert!(text.starts_with("a walk of npt tables fails: second-stage tables lead to"), "{text}");
    }

    #[test]
    fn memory_and_tables_on_another_node_are_told() {
        // In the machine's memory: the first node, and the second one.
        let frames = [START >> 12, (START >> 12) + 256];
        let mapping = |frame: u64, node: u64| [0x5000, 1, frame, 0b1_1100 | node << 24];
        let check = |frame: u64, node, tables| {
            let line = line("bits", "exact", 1).replace("tables=any", tables);
            answer(frame << 12 | LEAF & 0xfff, &[mapping(frame, node)], &line, None)
        };
        for (node, frame) in (1..).zip(frames) {
            assert_eq!(check(frame, node, "tables=any"), None);
            assert_eq!(check(frame, 0, "tables=0"), None);
            let text = check(frame, 3 - node, "tables=any").unwrap();
            assert!(text.starts_with(&format!("the memory at 0x5000 was asked from node {}", 2 - node)), "{text}");
            // Memory that the machine has not is on no node.
            assert!(check(frame + 512, node, "tables=any").is_some());
        }
        let text = check(frames[0], 1, "tables=1").unwrap();
        assert!(text.contains(" is on node Some(0), not Some(1)"), "{text}");
    }

    #[test]
    fn what_the_engine_alone_has_may_be_missing() {
        let [gpa, nr_pages, pfn, flags] = MAPPING;
        let check =
            |pte, flags, access, dirty| answer(pte, &[[gpa, nr_pages, pfn, flags]], &line(access, dirty, 1), None);
        // A page that is kept from the CPUs has neither A nor W.
        let kept = flags & !0b1100;
        assert_eq!(check(0, kept, "faults", "exact"), None);
        assert!(check(0, kept, "bits", "exact").is_some());
        assert!(
            check(0, kept | 0b100, "faults", "exact").is_some() && check(0, kept | 0b1000, "faults", "exact").is_some()
        );
        // D that the log has taken; never the other way.
        assert_eq!(check(LEAF & !0x40, flags, "bits", "kept"), None);
        assert!(check(LEAF, flags & !0b1_0000, "bits", "kept").is_some());
    }

    #[test]
    fn a_bit_that_is_wrong_on_purpose_is_noticed() {
        for number in [0, 7, u64::MAX] {
            // Neither A nor D is set.
            let [gpa, nr_pages, pfn, _] = MAPPING;
            let mapping = [gpa, nr_pages, pfn, 0b100];
            let text = answer(LEAF & !0x60, &[mapping], &line("bits", "exact", 1), Some(number)).unwrap();
            assert!(text.contains(": the frame; "), "{text}");
        }
    }

    #[test]
    fn lines_that_make_no_sense_are_refused() {
        let good = line("bits", "exact", 1);
        assert!(Tables::parse(&good).is_some());
        for (from, to) in [
            ("format=npt ", ""),
            ("levels=4", "levels=6"),
            ("gpa_bits=48", "gpa_bits=64"),
            ("access=bits", "access=b"),
            ("dirty=exact", "dirty="),
            ("tables=any", "tables=x"),
            (",1 ", ",1048577 "),
            ("root=0x", "root=x"),
            ("features=0x0", "features=0x100000000"),
            (" pat", " more pat"),
        ] {
            assert_eq!(Tables::parse(&good.replace(from, to)), None, "{to}");
        }
        let memory = MachineMemory::new(START, NodeMemory::new(START, 1, 1)).unwrap();
        // What cannot be compared is an error of the command, and no difference.
        for (from, to, error) in [
            ("answer=0x8", "answer=0x7", io::ErrorKind::InvalidInput),
            ("mappings=0x80", "mappings=0x90", io::ErrorKind::InvalidData),
            ("mappings=0x8", "mappings=0x7", io::ErrorKind::InvalidData),
            ("format=npt", "format=shadow", io::ErrorKind::Unsupported),
        ] {
            let tables = Tables::parse(&good.replace(from, to)).unwrap();
            assert_eq!(memory.check(&tables, Some(1)).map_err(|error| error.kind()), Err(error), "{to}");
        }
    }
}
