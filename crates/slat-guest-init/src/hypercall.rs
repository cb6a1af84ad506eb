//! Hypercalls: what the program tells the hypervisor below the guest's kernel.
//!
//! The instruction `vmmcall` exits to the hypervisor in user mode, too. `rax` has the code, `rbx`
//! and `rcx` the arguments; the answer is in `rax`, and 0 means that it was understood. Where there
//! is no hypervisor, the instruction is an invalid one, and the process ends by SIGILL.
#![expect(unsafe_code, reason = "an instruction that Rust has no name for")]

use std::arch::asm;

/// The upper half of `rax`: "slat".
const MAGIC: u64 = 0x736c_6174_0000_0000;

/// What is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hypercall {
    /// User space runs.
    Up { cpus: u64 },
    /// A round is done; pages that were verified until now.
    Round { number: u64, pages: u64 },
    /// All is done, and everything was as it should be.
    Done { rounds: u64, pages: u64 },
    /// A page had another content; its address, and its number.
    Failed { address: u64, page: u64 },
}

impl Hypercall {
    /// `rax`, `rbx` and `rcx`.
    fn registers(self) -> [u64; 3] {
        let [code, first, second] = match self {
            Hypercall::Up { cpus } => [0, cpus, 0],
            Hypercall::Round { number, pages } => [1, number, pages],
            Hypercall::Done { rounds, pages } => [2, rounds, pages],
            Hypercall::Failed { address, page } => [3, address, page],
        };
        [MAGIC | code, first, second]
    }
}

/// Whether hypercalls are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hypercalls {
    On,
    Off,
}

impl Hypercalls {
    /// Makes the hypercall and returns the answer, which is 0 without hypercalls.
    pub(crate) fn make(self, hypercall: Hypercall) -> u64 {
        match self {
            Hypercalls::On => vmmcall(hypercall.registers()),
            Hypercalls::Off => 0,
        }
    }
}

fn vmmcall([mut rax, rbx, rcx]: [u64; 3]) -> u64 {
    // SAFETY: the hypervisor changes no register but `rax`, and no memory of this process. `rbx` is
    // the compiler's own: it is put back behind the instruction.
    unsafe {
        asm!(
            "xchg {saved}, rbx",
            "vmmcall",
            "xchg {saved}, rbx",
            saved = inout(reg) rbx => _,
            inout("rax") rax,
            in("rcx") rcx,
            options(nostack),
        );
    }
    rax
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_those_of_the_protocol() {
        assert_eq!(Hypercall::Up { cpus: 4 }.registers(), [0x736c_6174_0000_0000, 4, 0]);
        assert_eq!(Hypercall::Round { number: 2, pages: 9 }.registers(), [0x736c_6174_0000_0001, 2, 9]);
        assert_eq!(Hypercall::Done { rounds: 3, pages: 9 }.registers(), [0x736c_6174_0000_0002, 3, 9]);
        assert_eq!(Hypercall::Failed { address: 0x1000, page: 7 }.registers(), [0x736c_6174_0000_0003, 0x1000, 7]);
    }

    #[test]
    fn without_hypercalls_none_is_made() {
        assert_eq!(Hypercalls::Off.make(Hypercall::Up { cpus: 1 }), 0);
    }
}
