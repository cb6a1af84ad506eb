//! Semihosting, by which a guest of an emulator prints and ends the emulator (Semihosting for
//! AArch32 and AArch64, 6 "Semihosting operations"; RISC-V Semihosting, 1.1). The operations and
//! their arguments are the same on Arm and RISC-V. The call is the architecture's
//! ([`arch::console`](crate::arch::console)).

use crate::console::Verdict;

/// The operation that prints a text, which ends with a zero byte: [`ended`].
pub const SYS_WRITE0: u64 = 0x04;
/// The operation that ends the emulator, for a reason and with a status: [`exit_block`].
pub const SYS_EXIT_EXTENDED: u64 = 0x20;

/// The reason of such an end: the program itself.
const APPLICATION_EXIT: u64 = 0x2_0026;

/// The statuses of the end, which are those of QEMU's `isa-debug-exit` on a PC.
const PASSED: u64 = 0x21;
/// That of a failure.
pub const FAILED: u64 = 0x23;

/// Bytes of a text in one call.
const PART_BYTES: usize = 127;

/// The parts of `text`, as long as one call prints.
pub fn parts(text: &str) -> impl Iterator<Item = &[u8]> {
    text.as_bytes().chunks(PART_BYTES)
}

/// One of the [`parts`], with a zero byte behind it.
pub fn ended(part: &[u8]) -> [u8; PART_BYTES + 1] {
    let mut bytes = [0; PART_BYTES + 1];
    bytes[..part.len()].copy_from_slice(part);
    bytes
}

/// The argument of [`SYS_EXIT_EXTENDED`].
pub fn exit_block(verdict: Verdict) -> [u64; 2] {
    [APPLICATION_EXIT, if verdict == Verdict::Pass { PASSED } else { FAILED }]
}
