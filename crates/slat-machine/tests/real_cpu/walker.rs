//! The software machine's walker on page tables in the arena.
//!
//! The walker needs page tables at the software machine's physical addresses, which are pointers
//! plus a bias; the real CPU needs them in the arena. So the four PTEs on the way to an address are
//! copied into page-table pages of the software machine, with new links, and the walker walks the
//! copy. The leaf's address only gets the bias: the walker does not access its page.

#![expect(unsafe_code, reason = "promises that the walker's copies are page tables")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::Npt;
use slat::{Access, Gpa, Hpa};
use slat_machine::hardware::commit::{FlushDomain, Port};
use slat_machine::hardware::walk::{self, HardwareFormat, Purpose, Stop};
use slat_machine::memory::phys;

use crate::arena::Arena;

/// P, bit 0 of a PTE (AMD APM vol. 2, 5.4.1).
pub const PRESENT: u64 = 1 << 0;
/// R/W.
pub const WRITABLE: u64 = 1 << 1;
/// U/S.
pub const USER: u64 = 1 << 2;
/// A.
pub const ACCESSED: u64 = 1 << 5;
/// D, in leaves.
pub const DIRTY: u64 = 1 << 6;
/// PS, in PTEs of levels 2 and 3.
pub const PAGE: u64 = 1 << 7;
/// NX.
pub const NO_EXECUTE: u64 = 1 << 63;
/// Bits 12 to 51.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The error-code bits of #PF that both kinds of fault have: P, W, U, RSVD, I/D (AMD APM vol. 2,
/// 8.4.2 and 15.25.6).
const PAGE_FAULT_CODE: u64 = 0x1f;

/// A PTE on the way to an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    pub level: u8,
    pub at: Hpa,
    pub entry: u64,
}

/// The present PTEs on the way to `gpa` in the page tables under `root`: the root's first.
pub fn path(arena: &Arena, root: Hpa, gpa: Gpa) -> Vec<Step> {
    let mut steps = Vec::with_capacity(4);
    let mut table = root.0;
    for level in (1..=4).rev() {
        let at = Hpa(table + 8 * (gpa.0 >> (12 + 9 * (level - 1)) & 0x1ff));
        let entry = arena.get(at);
        steps.push(Step { level: level as u8, at, entry });
        if entry & PRESENT == 0 || is_leaf(level as u8, entry) {
            break;
        }
        table = entry & ADDRESS;
    }
    steps
}

/// Whether a present PTE ends the way. One of level 4 with bit 7 set does not: it is misconfigured.
fn is_leaf(level: u8, entry: u64) -> bool {
    level == 1 || level < 4 && entry & PAGE != 0
}

/// The result of the walker: the address and the PTEs afterwards, or the error code of the fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Walked {
    pub result: Result<Hpa, u64>,
    pub path: Vec<Step>,
}

/// A page-table page of the software machine.
#[repr(align(4096))]
struct Table([AtomicU64; 512]);

/// The software machine's walker, and the page-table pages of its copies.
pub struct Walker {
    port: Port,
    /// Of levels 4 to 1.
    tables: [Box<Table>; 4],
}

impl Walker {
    pub fn new() -> Walker {
        let tables = std::array::from_fn(|_| Box::new(Table([const { AtomicU64::new(0) }; 512])));
        Walker { port: Port::new(&Arc::new(FlushDomain::new())), tables }
    }

    /// Walks to `gpa` for `access`. The page tables in the arena do not change.
    pub fn walk(&self, arena: &Arena, root: Hpa, gpa: Gpa, access: Access) -> Walked {
        let mut path = path(arena, root, gpa);
        let mut copies = Vec::with_capacity(4);
        for (index, step) in path.iter().enumerate() {
            let copy = &self.tables[index].0[(step.at.0 >> 3 & 0x1ff) as usize];
            let entry = if step.entry & PRESENT == 0 {
                step.entry
            } else if is_leaf(step.level, step.entry) {
                step.entry + phys::BIAS
            } else {
                step.entry & !ADDRESS | self.hpa_of(index + 1).0
            };
            copy.store(entry, Ordering::Relaxed);
            copies.push((copy, entry));
        }

        let purpose = Purpose::Data;
        let (generation, processor) = (self.port.generation(), walk::Processor::of::<Npt>());
        // SAFETY: the page-table pages are this walker's, of 4 levels, and made of atomic words.
        // Each directory entry on the way leads to the next one, and those beside it are zero.
        let walker = unsafe { walk::Walker::new(&self.port, generation, self.hpa_of(0), processor) };
        let result = match Npt::walk(walker, gpa, access, purpose) {
            Ok(mapping) => Ok(Hpa(mapping.hpa.0 - phys::BIAS)),
            Err(Stop::Fault(fault)) => Err(fault.code & PAGE_FAULT_CODE),
            Err(Stop::Misconfigured(misconfiguration)) => Err(misconfiguration.code & PAGE_FAULT_CODE),
            Err(stop) => panic!("{access:?} of {gpa}: no other thread uses these tables, yet: {stop}"),
        };

        for (step, (copy, before)) in path.iter_mut().zip(copies) {
            // Only the bits that the walker has changed: the copy has another address.
            step.entry ^= copy.swap(0, Ordering::Relaxed) ^ before;
        }
        Walked { result, path }
    }

    fn hpa_of(&self, index: usize) -> Hpa {
        phys::hpa_of(self.tables[index].0.as_ptr())
    }
}
