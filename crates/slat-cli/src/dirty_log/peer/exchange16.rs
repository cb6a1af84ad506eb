//! Takes two words of a log by one instruction. On x86 it is the compare-and-exchange of 16 bytes
//! (Intel SDM vol. 2A, and AMD APM vol. 3, `CMPXCHG16B`). With zero for the new value, and repeated
//! until it succeeds, it is an exchange.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "an instruction that not every CPU has"))]

use super::slots::Pair;

/// Whether this CPU has the instruction.
pub(crate) fn is_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("cmpxchg16b");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Takes both words, if they are not zero already. [`is_available`] was true.
#[inline]
#[cfg(target_arch = "x86_64")]
pub(super) fn take(pair: &Pair) -> [u64; 2] {
    use std::sync::atomic::Ordering;

    let [low, high] = pair.0.each_ref().map(|word| word.load(Ordering::Relaxed));
    if low | high == 0 {
        return [0, 0];
    }
    // SAFETY: the CPU has the instruction; the command asked before it made the peer.
    unsafe { take_words(pair, [low, high]) }
}

/// Inline assembly: the standard library's function becomes a call of a library that is not linked,
/// where the optimizer inlines it into code that is compiled for every CPU.
///
/// # Safety
/// The CPU has CMPXCHG16B.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn take_words(pair: &Pair, [mut low, mut high]: [u64; 2]) -> [u64; 2] {
    use std::arch::asm;
    use std::ptr;

    loop {
        let is_taken: u8;
        // SAFETY: the pair is 16 bytes of interior-mutable memory, aligned to 16. RBX, which the
        // compiler reserves, is restored. No thread marks meanwhile (faults and harvests hold the
        // MMU lock), so no access of 8 bytes races with this one of 16.
        unsafe {
            asm!(
                "xchg rsi, rbx",
                "lock cmpxchg16b [rdi]",
                "sete {is_taken}",
                "mov rbx, rsi",
                is_taken = out(reg_byte) is_taken,
                in("rdi") ptr::from_ref(pair),
                inout("rsi") 0_u64 => _,
                in("rcx") 0_u64,
                inout("rax") low,
                inout("rdx") high,
                options(nostack),
            );
        }
        if is_taken != 0 {
            return [low, high];
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn take(_pair: &Pair) -> [u64; 2] {
    unreachable!("this CPU has no exchange of 16 bytes")
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn both_words_are_taken() {
        if !is_available() {
            return;
        }
        for words in [[0, 0], [1, 0], [0, 1 << 63], [u64::MAX, 7]] {
            let pair = Pair(words.map(AtomicU64::new));
            assert_eq!(take(&pair), words);
            assert_eq!(pair.0.map(AtomicU64::into_inner), [0, 0]);
        }
        let pair = Pair([3, 4].map(AtomicU64::new));
        // SAFETY: the CPU has it, and no other thread has the pair. The expected value is wrong at
        // first.
        assert_eq!(unsafe { take_words(&pair, [1, 0]) }, [3, 4]);
        assert_eq!(pair.0[1].load(Ordering::Relaxed), 0);
    }
}
