//! The guest of the real KVM: a program at CPL 3 that writes one word to each page of a list.
//!
//! Guest-physical memory is two slots: the *system*, with the guest's page tables, its descriptor tables, its program and
//! the list, and the slot that logs. The page tables map both where they are, by pages of 2 MiB with A and D set
//! already, so that a walk has nothing to write. (KVM logs pages of 4 KiB whatever the guest's are.)
//!
//! The program ends by a write to where nothing is mapped. The handler of that page fault, at CPL 0, writes to an I/O
//! port, which brings the thread back here; CR2, the pushed RIP and the counter say whether all was done. (A software
//! interrupt would do, but there are KVMs whose guests cannot have one.) Each run sets all registers anew.
//!
//! Sources: AMD APM vol. 2, 4.7 and 4.8 (descriptors), 5.3 and 5.4 (page tables), 8.2.15 (page faults), 8.9 (long-mode
//! interrupt stack), 12.2.5 (TSS); the kernel's documentation of the KVM API.

use std::time::Duration;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{VcpuExit, VcpuFd};
use slat::PAGE_SIZE;
use slat_machine::memory::Backing;

use super::watchdog::Watchdog;
use super::{Trouble, tried};

/// Where the system is.
pub(super) const SYSTEM_GPA: u64 = SIZE_2M;
/// Where the slot is: at a multiple of 1 GiB, as everybody's.
pub(super) const SLOT_GPA: u64 = 4 << 30;
/// Where nothing is mapped.
const EXIT_GVA: u64 = 1 << 30;

const SIZE_2M: u64 = 2 << 20;
const PAGES_2M: u64 = SIZE_2M / PAGE_SIZE;

// The system's pages, from its start on.
const LEVEL_4: u64 = 0;
const LEVEL_3: u64 = PAGE_SIZE;
const SYSTEM_LEVEL_2: u64 = 2 * PAGE_SIZE;
const GDT: u64 = 3 * PAGE_SIZE;
const TSS: u64 = GDT + 0x100;
const IDT: u64 = GDT + 0x200;
const HANDLERS: u64 = 4 * PAGE_SIZE;
const KERNEL_STACK_END: u64 = 6 * PAGE_SIZE;
const PROGRAM: u64 = 6 * PAGE_SIZE;
/// One table of level 2 for each GiB of the slot.
const SLOT_LEVEL_2: u64 = 16 * PAGE_SIZE;
/// The addresses of the pages to write.
const LIST: u64 = SIZE_2M;

/// What the tables of level 2 in front of the list have room for.
const MAX_SLOT_BYTES: u64 = 64 << 30;

// Selectors.
const KERNEL_CODE: u16 = 0x08;
const USER_DATA: u16 = 0x18 | 3;
const USER_CODE: u16 = 0x20 | 3;
const TASK: u16 = 0x28;

const NR_VECTORS: u64 = 32;
const PAGE_FAULT: u16 = 14;
const HANDLER_BYTES: u64 = 8;

/// List in RSI, its length in RCX, value in RAX, [`EXIT_GVA`] in RDX.
const WRITE: [u8; 18] = [
    0x48, 0x8b, 0x1e, // next: mov rbx, [rsi]
    0x48, 0x89, 0x03, // mov [rbx], rax
    0x48, 0x83, 0xc6, 0x08, // add rsi, 8
    0x48, 0xff, 0xc9, // dec rcx
    0x75, 0xf1, // jnz next
    0xc6, 0x02, 0x00, // mov byte [rdx], 0
];
/// Of them in front of the last instruction.
const LAST: u64 = 15;

/// P, R/W, U/S, A, D, PS (AMD APM vol. 2, 5.4).
const TABLE: u64 = 0b10_0111;
const LARGE_PAGE: u64 = 0b1110_0111;

const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// PE, MP, ET, NE, WP, PG.
const CR0: u64 = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
/// The bit that is always one.
const RFLAGS: u64 = 1 << 1;

// The parts are apart, and the system ends in front of what is not mapped.
const _: () = {
    assert!(IDT + 16 * NR_VECTORS <= HANDLERS);
    assert!(HANDLERS + NR_VECTORS * HANDLER_BYTES <= KERNEL_STACK_END - PAGE_SIZE);
    assert!(PROGRAM + WRITE.len() as u64 <= SLOT_LEVEL_2);
    assert!(SLOT_LEVEL_2 + (MAX_SLOT_BYTES >> 30) * PAGE_SIZE <= LIST);
    assert!(SYSTEM_GPA + system_bytes(MAX_SLOT_BYTES / PAGE_SIZE) <= EXIT_GVA);
};

/// How long a run may take: a write fault costs 25 us where KVM has shadow page tables and a CPU for itself.
fn patience(nr_pages: usize) -> Duration {
    Duration::from_secs(20) + Duration::from_millis(1) * u32::try_from(nr_pages).unwrap_or(u32::MAX)
}

/// Size of the system for a slot of `nr_pages` pages.
pub(super) const fn system_bytes(nr_pages: u64) -> u64 {
    (LIST + nr_pages * 8).next_multiple_of(SIZE_2M)
}

/// A vCPU with its program.
pub(super) struct Guest {
    vcpu: VcpuFd,
    system: Backing,
    /// The system registers at CPL 3.
    sregs: kvm_sregs,
    watchdog: Watchdog,
}

impl Guest {
    /// A guest with a slot of `nr_pages` pages, of [`MAX_SLOT_BYTES`] at most.
    pub(super) fn new(vcpu: VcpuFd, system: Backing, nr_pages: u64) -> Result<Guest, Trouble> {
        if nr_pages * PAGE_SIZE > MAX_SLOT_BYTES {
            return Err(Trouble(format!("a slot of {nr_pages} pages is too large for this guest's tables")));
        }
        let sregs = user_sregs(tried("get the system registers", vcpu.get_sregs())?);
        let guest = Guest { vcpu, system, sregs, watchdog: Watchdog::new() };
        guest.write_tables(nr_pages);
        guest.write_descriptors();
        guest.set_bytes(PROGRAM, &WRITE);
        Ok(guest)
    }

    /// Writes `value` to each of `pages`, at least one, in this order.
    pub(super) fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Trouble> {
        for (at, &page) in (LIST..).step_by(8).zip(pages) {
            self.set(at, SLOT_GPA + u64::from(page) * PAGE_SIZE);
        }
        let regs = kvm_regs {
            rip: SYSTEM_GPA + PROGRAM,
            rsi: SYSTEM_GPA + LIST,
            rcx: pages.len() as u64,
            rax: value,
            rdx: EXIT_GVA,
            rflags: RFLAGS,
            ..kvm_regs::default()
        };
        tried("set the system registers", self.vcpu.set_sregs(&self.sregs))?;
        tried("set the registers", self.vcpu.set_regs(&regs))?;
        let port = self.run(pages.len())?;

        let regs = tried("get the registers", self.vcpu.get_regs())?;
        let cr2 = tried("get the system registers", self.vcpu.get_sregs())?.cr2;
        // What a page fault pushes, from its low end: error code, RIP, CS, RFLAGS, RSP, SS.
        let pushed_rip = self.system.load(KERNEL_STACK_END - 5 * 8).unwrap_or_default();
        let ended = (port, cr2, pushed_rip, regs.rcx);
        if ended != (PAGE_FAULT, EXIT_GVA, SYSTEM_GPA + PROGRAM + LAST, 0) {
            return Err(Trouble(format!("the guest ended with exception, CR2, RIP, RCX {ended:#x?}")));
        }
        Ok(())
    }

    /// Runs until the guest writes to a port, and says which.
    fn run(&mut self, nr_pages: usize) -> Result<u16, Trouble> {
        let Guest { vcpu, watchdog, .. } = self;
        let why = watchdog.watch(patience(nr_pages), || {
            loop {
                match vcpu.run() {
                    Ok(VcpuExit::IoOut(port, _)) => return Ok(port),
                    Ok(other) => return Err(format!("{other:?}")),
                    Err(error) if error.errno() == libc::EINTR && !watchdog.has_expired() => (),
                    Err(error) if error.errno() == libc::EINTR => return Err("it does not end".to_owned()),
                    Err(error) => return Err(error.to_string()),
                }
            }
        });
        why.map_err(|why| {
            let rip = self.vcpu.get_regs().map_or(0, |regs| regs.rip);
            Trouble(format!("run the guest: {why}, at {rip:#x}"))
        })
    }

    /// Writes a word of the system. The guest does not run.
    fn set(&self, at: u64, value: u64) {
        let done = self.system.store(at, value);
        debug_assert_eq!(done, Some(()), "{at:#x} is in the system");
    }

    fn set_bytes(&self, at: u64, bytes: &[u8]) {
        for (at, chunk) in (at..).step_by(8).zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.set(at, u64::from_le_bytes(word));
        }
    }

    /// Maps system and slot where they are.
    fn write_tables(&self, nr_pages: u64) {
        const ENTRIES: u64 = 512;
        let link = |table: u64, index: u64, below: u64| self.set(table + 8 * index, (SYSTEM_GPA + below) | TABLE);
        link(LEVEL_4, 0, LEVEL_3);
        link(LEVEL_3, 0, SYSTEM_LEVEL_2);
        for block in 0..system_bytes(nr_pages) / SIZE_2M {
            self.set(SYSTEM_LEVEL_2 + 8 * (SYSTEM_GPA / SIZE_2M + block), (SYSTEM_GPA + block * SIZE_2M) | LARGE_PAGE);
        }
        for block in 0..nr_pages.div_ceil(PAGES_2M) {
            let table = SLOT_LEVEL_2 + block / ENTRIES * PAGE_SIZE;
            link(LEVEL_3, (SLOT_GPA >> 30) + block / ENTRIES, table);
            self.set(table + 8 * (block % ENTRIES), (SLOT_GPA + block * SIZE_2M) | LARGE_PAGE);
        }
    }

    /// Writes segments, the task, and a handler for each exception.
    fn write_descriptors(&self) {
        // Accessed bits are set, so that no load of a segment has to.
        let tss = SYSTEM_GPA + TSS;
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
        (GDT..).step_by(8).zip(segments).for_each(|(at, segment)| self.set(at, segment));
        // RSP0 is at byte 4; no I/O permission map (its offset, in the last two bytes, is the limit).
        let rsp0 = SYSTEM_GPA + KERNEL_STACK_END;
        self.set(TSS, rsp0 << 32);
        self.set(TSS + 8, rsp0 >> 32);
        self.set(TSS + 0x60, 0x68 << 48);
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

/// Long mode at CPL 3.
fn user_sregs(initial: kvm_sregs) -> kvm_sregs {
    let data = data_segment(USER_DATA);
    let mut sregs = kvm_sregs {
        cs: code_segment(USER_CODE),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        // A busy TSS of 64 bits.
        tr: kvm_segment {
            base: SYSTEM_GPA + TSS,
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
    (sregs.gdt.base, sregs.gdt.limit) = (SYSTEM_GPA + GDT, 7 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (SYSTEM_GPA + IDT, (NR_VECTORS * 16 - 1) as u16);
    sregs
}
