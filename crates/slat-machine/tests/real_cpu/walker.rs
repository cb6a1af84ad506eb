//! The software machine's walker on the page tables in the arena, which are as they were after it.

#![expect(unsafe_code, reason = "promises that the arena has page tables")]

use std::sync::Arc;

use slat::format::Npt;
use slat::{Access, Gpa, Hpa};
use slat_machine::hardware::commit::{FlushDomain, Port};
use slat_machine::hardware::walk::{self, HardwareFormat, Purpose, Stop, WalkMemory};

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

// SAFETY: words of the arena, which the reference keeps, and which is accessed by atomics alone.
unsafe impl WalkMemory for &Arena {
    fn pointer_to(self, hpa: Hpa) -> Option<*mut u64> {
        Some(self.word(hpa).as_ptr())
    }

    /// The walker does not access what a leaf leads to.
    fn has(self, _hpa: Hpa) -> bool {
        true
    }
}

/// The software machine's walker.
pub struct Walker(Port);

impl Walker {
    pub fn new() -> Walker {
        Walker(Port::new(&Arc::new(FlushDomain::new())))
    }

    /// Walks to `gpa` for `access`. The page tables do not change.
    pub fn walk(&self, arena: &Arena, root: Hpa, gpa: Gpa, access: Access) -> Walked {
        let before = path(arena, root, gpa);
        let (generation, processor) = (self.0.generation(), walk::Processor::of::<Npt>());
        // SAFETY: page tables of 4 levels, the engine's or those of a test, are in the arena, which
        // refuses other addresses; they are made of atomic words.
        let walker = unsafe { walk::Walker::new(&self.0, generation, root, processor, arena) };
        let result = loop {
            match Npt::walk(walker, gpa, access, Purpose::Data) {
                Ok(mapping) => break Ok(mapping.hpa),
                Err(Stop::Fault(fault)) => break Err(fault.code & PAGE_FAULT_CODE),
                Err(Stop::Misconfigured(misconfiguration)) => break Err(misconfiguration.code & PAGE_FAULT_CODE),
                // Nothing is flushed here: this thread lost its CPU for a moment.
                Err(Stop::Restart) => {}
                Err(stop) => panic!("{access:?} of {gpa}: no other thread uses these tables, yet: {stop}"),
            }
        };
        let path = path(arena, root, gpa);
        before.iter().for_each(|step| arena.set(step.at, step.entry));
        Walked { result, path }
    }
}
