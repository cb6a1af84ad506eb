//! The *system* of the guests: their page tables, descriptor tables, programs, stacks and lists of
//! pages, in a separate memslot. All vCPUs share the page tables and the programs. After these each
//! vCPU has a block with its descriptors, its stack and its list.
//!
//! The page tables map system and region where they are, by pages of 2 MiB with A and D set
//! already, so that a walk has nothing to write. (KVM logs pages of 4 KiB whatever the guest's page
//! size is.)
//!
//! Sources: AMD APM vol. 2, 4.7 and 4.8 (descriptors), 5.3 and 5.4 (page tables), 8.9 (long-mode
//! interrupt stack), 12.2.5 (TSS).

use kvm_bindings::{kvm_segment, kvm_sregs};
use slat::{Gfn, PAGE_SIZE};
use slat_machine::memory::Backing;

use super::vm::system_memory;
use super::{KvmError, MAX_REGION_BYTES, VmShape};

/// Where the system is.
pub(super) const SYSTEM_GPA: u64 = SIZE_2M;
/// Where the region is: at a multiple of 1 GiB, as in all peers.
pub(super) const REGION_GPA: u64 = 4 << 30;
/// Where nothing is mapped.
pub(super) const EXIT_GVA: u64 = 1 << 30;

const SIZE_2M: u64 = 2 << 20;
const PAGES_2M: u64 = SIZE_2M / PAGE_SIZE;

// The pages of all vCPUs, from the system's start on.
const LEVEL_4: u64 = 0;
const LEVEL_3: u64 = PAGE_SIZE;
const SYSTEM_LEVEL_2: u64 = 2 * PAGE_SIZE;
const IDT: u64 = 3 * PAGE_SIZE;
const HANDLERS: u64 = 4 * PAGE_SIZE;
const PROGRAMS: u64 = 5 * PAGE_SIZE;
/// One table of level 2 for each GiB of the region.
const REGION_LEVEL_2: u64 = 16 * PAGE_SIZE;
/// The blocks of the vCPUs.
const BLOCKS: u64 = REGION_LEVEL_2 + (MAX_REGION_BYTES >> 30) * PAGE_SIZE;

// The block of a vCPU, from its start on.
const GDT: u64 = 0;
const TSS: u64 = 0x100;
const STACK_END: u64 = 2 * PAGE_SIZE;
const LIST: u64 = STACK_END;

// Selectors.
const KERNEL_CODE: u16 = 0x08;
const USER_DATA: u16 = 0x18 | 3;
const USER_CODE: u16 = 0x20 | 3;
const TASK: u16 = 0x28;

const NR_VECTORS: u64 = 32;
const HANDLER_BYTES: u64 = 8;

/// P, R/W, U/S, A, D, PS (AMD APM vol. 2, 5.4).
const TABLE: u64 = 0b10_0111;
const LARGE_PAGE: u64 = 0b1110_0111;

const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// PE, MP, ET, NE, WP, PG.
const CR0: u64 = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;

/// A program of CPL 3. It ends by a write to [`EXIT_GVA`], in RDX.
pub(super) struct GuestProgram {
    code: &'static [u8],
    /// Its offset in the system.
    at: u64,
}

impl GuestProgram {
    pub(super) const fn start(&self) -> u64 {
        SYSTEM_GPA + self.at
    }

    /// The address of its last instruction, which is 3 bytes long.
    pub(super) const fn last(&self) -> u64 {
        self.start() + self.code.len() as u64 - 3
    }
}

/// Writes RAX to each page of a list: the list in RSI, its length in RCX.
pub(super) const WRITE_LISTED: GuestProgram = GuestProgram {
    code: &[
        0x48, 0x8b, 0x1e, // next: mov rbx, [rsi]
        0x48, 0x89, 0x03, // mov [rbx], rax
        0x48, 0x83, 0xc6, 0x08, // add rsi, 8
        0x48, 0xff, 0xc9, // dec rcx
        0x75, 0xf1, // jnz next
        0xc6, 0x02, 0x00, // mov byte [rdx], 0
    ],
    at: PROGRAMS,
};

/// Writes RAX, RAX + 1 and so on to pages that follow each other: the first in RSI, their number in
/// RCX.
pub(super) const WRITE_PAGES: GuestProgram = GuestProgram {
    code: &[
        0x48, 0x89, 0x06, // next: mov [rsi], rax
        0x48, 0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, // add rsi, 4096
        0x48, 0xff, 0xc0, // inc rax
        0x48, 0xff, 0xc9, // dec rcx
        0x75, 0xee, // jnz next
        0xc6, 0x02, 0x00, // mov byte [rdx], 0
    ],
    at: PROGRAMS + 0x40,
};

/// Reads from pages that follow each other, and begins again after the last: the first in RSI, the
/// number of reads in RCX. The number of pages is a power of two, and their first a multiple of
/// their size; R8 has the bits of an address that are not that size.
pub(super) const READ_PAGES: GuestProgram = GuestProgram {
    code: &[
        0x48, 0x8b, 0x1e, // next: mov rbx, [rsi]
        0x48, 0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, // add rsi, 4096
        0x4c, 0x21, 0xc6, // and rsi, r8
        0x48, 0xff, 0xc9, // dec rcx
        0x75, 0xee, // jnz next
        0xc6, 0x02, 0x00, // mov byte [rdx], 0
    ],
    at: PROGRAMS + 0x80,
};

// The parts do not overlap.
const _: () = {
    assert!(16 * NR_VECTORS <= PAGE_SIZE && NR_VECTORS * HANDLER_BYTES <= PAGE_SIZE);
    assert!(WRITE_LISTED.at + WRITE_LISTED.code.len() as u64 <= WRITE_PAGES.at);
    assert!(WRITE_PAGES.at + WRITE_PAGES.code.len() as u64 <= READ_PAGES.at);
    assert!(READ_PAGES.at + READ_PAGES.code.len() as u64 <= REGION_LEVEL_2);
    assert!(TSS + 0x68 <= STACK_END - PAGE_SIZE);
};

/// The system of a VM. Clones are the same.
#[derive(Clone)]
pub(super) struct System {
    pub(super) memory: Backing,
    nr_listed: u64,
}

impl System {
    /// The system of as many vCPUs as `shape` says, for a region of `nr_pages` pages, of
    /// [`MAX_REGION_BYTES`] at most.
    pub(super) fn new(nr_pages: u64, shape: &VmShape) -> Result<System, KvmError> {
        let nr_vcpus = shape.nr_vcpus as u64;
        let size_bytes = (BLOCKS + nr_vcpus * block_bytes(shape.nr_listed)).next_multiple_of(SIZE_2M);
        if SYSTEM_GPA + size_bytes > EXIT_GVA {
            return Err(KvmError(format!("{nr_vcpus} vCPUs are too many for its guests' tables")));
        }
        let system = System { memory: system_memory(size_bytes)?, nr_listed: shape.nr_listed };
        system.write_tables(nr_pages);
        system.write_handlers();
        for program in [WRITE_LISTED, WRITE_PAGES, READ_PAGES] {
            system.set_bytes(program.at, program.code);
        }
        (0..nr_vcpus).for_each(|vcpu| system.write_descriptors(system.block(vcpu)));
        Ok(system)
    }

    fn block(&self, vcpu: u64) -> u64 {
        BLOCKS + vcpu * block_bytes(self.nr_listed)
    }

    /// Writes the list of vCPU number `vcpu`, which does not run; returns its address.
    pub(super) fn set_list(&self, vcpu: u64, pages: &[u32]) -> Result<u64, KvmError> {
        if pages.len() as u64 > self.nr_listed {
            return Err(KvmError(format!("{} pages to write, in a list for {}", pages.len(), self.nr_listed)));
        }
        let list = self.block(vcpu) + LIST;
        for (at, &page) in (list..).step_by(8).zip(pages) {
            self.set(at, page_gpa(page.into()));
        }
        Ok(SYSTEM_GPA + list)
    }

    /// What a page fault pushed as RIP. It pushes, from its low end: error code, RIP, CS, RFLAGS,
    /// RSP, SS.
    pub(super) fn pushed_rip(&self, vcpu: u64) -> u64 {
        self.memory.load(self.block(vcpu) + STACK_END - 5 * 8).unwrap_or_default()
    }

    /// The system registers of vCPU number `vcpu` in long mode at CPL 3.
    pub(super) fn user_sregs(&self, vcpu: u64, initial: kvm_sregs) -> kvm_sregs {
        let (data, block) = (data_segment(USER_DATA), SYSTEM_GPA + self.block(vcpu));
        let mut sregs = kvm_sregs {
            cs: code_segment(USER_CODE),
            ds: data,
            es: data,
            fs: data,
            gs: data,
            ss: data,
            // A busy TSS of 64 bits.
            tr: kvm_segment {
                base: block + TSS,
                limit: 0x67,
                selector: TASK,
                type_: 0xb,
                present: 1,
                ..kvm_segment::default()
            },
            cr0: CR0,
            cr3: SYSTEM_GPA + LEVEL_4,
            cr4: CR4_PAE,
            efer: EFER_LME | EFER_LMA,
            ..initial
        };
        (sregs.gdt.base, sregs.gdt.limit) = (block + GDT, 7 * 8 - 1);
        (sregs.idt.base, sregs.idt.limit) = (SYSTEM_GPA + IDT, (NR_VECTORS * 16 - 1) as u16);
        sregs
    }

    /// Writes a word of the system. The vCPU that reads it does not run.
    fn set(&self, at: u64, value: u64) {
        let done = self.memory.store(at, value);
        debug_assert_eq!(done, Some(()), "{at:#x} is in the system");
    }

    fn set_bytes(&self, at: u64, bytes: &[u8]) {
        for (at, chunk) in (at..).step_by(8).zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.set(at, u64::from_le_bytes(word));
        }
    }

    /// Maps system and region where they are.
    fn write_tables(&self, nr_pages: u64) {
        const ENTRIES: u64 = 512;
        let link = |table: u64, index: u64, below: u64| self.set(table + 8 * index, (SYSTEM_GPA + below) | TABLE);
        link(LEVEL_4, 0, LEVEL_3);
        link(LEVEL_3, 0, SYSTEM_LEVEL_2);
        for block in 0..self.memory.size_bytes() / SIZE_2M {
            self.set(SYSTEM_LEVEL_2 + 8 * (SYSTEM_GPA / SIZE_2M + block), (SYSTEM_GPA + block * SIZE_2M) | LARGE_PAGE);
        }
        for block in 0..nr_pages.div_ceil(PAGES_2M) {
            let table = REGION_LEVEL_2 + block / ENTRIES * PAGE_SIZE;
            link(LEVEL_3, (REGION_GPA >> 30) + block / ENTRIES, table);
            self.set(table + 8 * (block % ENTRIES), (REGION_GPA + block * SIZE_2M) | LARGE_PAGE);
        }
    }

    fn write_handlers(&self) {
        for vector in 0..NR_VECTORS {
            let handler = SYSTEM_GPA + HANDLERS + vector * HANDLER_BYTES;
            // Present, DPL 0, a 64-bit interrupt gate.
            let low = handler & 0xffff | u64::from(KERNEL_CODE) << 16 | 0x8e << 40 | (handler >> 16 & 0xffff) << 48;
            self.set(IDT + 16 * vector, low);
            self.set(IDT + 16 * vector + 8, handler >> 32);
            // out vector, al; hlt
            self.set_bytes(HANDLERS + vector * HANDLER_BYTES, &[0xe6, vector as u8, 0xf4]);
        }
    }

    /// Writes the segments and the task of a vCPU's block.
    fn write_descriptors(&self, block: u64) {
        // The accessed bits are set, so that no load of a segment sets them.
        let tss = SYSTEM_GPA + block + TSS;
        let tss_low = 0x67 | (tss & 0xff_ffff) << 16 | 0x8b << 40 | (tss >> 24 & 0xff) << 56;
        let segments = [
            0,
            0x00af_9b00_0000_ffff, // code, DPL 0, long
            0x00cf_9300_0000_ffff, // data, DPL 0
            0x00cf_f300_0000_ffff, // data, DPL 3
            0x00af_fb00_0000_ffff, // code, DPL 3, long
            tss_low,
            tss >> 32,
        ];
        (block + GDT..).step_by(8).zip(segments).for_each(|(at, segment)| self.set(at, segment));
        // RSP0 is at byte 4; no I/O permission map (its offset, in the last two bytes, is the
        // limit).
        let rsp0 = SYSTEM_GPA + block + STACK_END;
        self.set(block + TSS, rsp0 << 32);
        self.set(block + TSS + 8, rsp0 >> 32);
        self.set(block + TSS + 0x60, 0x68 << 48);
    }
}

/// The address of a page of the region.
pub(super) const fn page_gpa(page: u64) -> u64 {
    REGION_GPA + (page << Gfn::SHIFT)
}

/// The size of a vCPU's block, in whole pages.
fn block_bytes(nr_listed: u64) -> u64 {
    (LIST + nr_listed * 8).next_multiple_of(PAGE_SIZE)
}

/// A 64-bit code segment, accessed, of the selector's privilege level.
fn code_segment(selector: u16) -> kvm_segment {
    kvm_segment { type_: 0xb, l: 1, ..data_segment(selector) }
}

/// A writable data segment, likewise.
fn data_segment(selector: u16) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_: 0x3,
        present: 1,
        dpl: selector as u8 & 3,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    }
}
