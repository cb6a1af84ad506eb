//! Checked operations as Linux restartable sequences on x86-64.
//!
//! Interface: rseq(2) and `include/uapi/linux/rseq.h`. Each thread has a `struct rseq` that the C
//! library registers with the kernel (glibc 2.35 or later; `__rseq_offset` is its distance from the
//! thread pointer). Before a sequence, the thread stores the address of a `struct rseq_cs`
//! (version, flags, start, length, abort address) into the field at offset 8. When the kernel
//! returns to a thread that was preempted, migrated, signalled, or hit by the membarrier command
//! while its instruction pointer was in `[start, start + length)`, it goes on at the abort address,
//! in front of which the four bytes of the registered signature must stand. The last instruction of
//! a sequence is its only side effect: behind it the instruction pointer is out of the range, so an
//! aborted sequence has had no effect.
//!
//! The field is not cleared after a sequence. The kernel clears it when it next finds the thread
//! elsewhere, and the descriptors are part of the program's image.

use std::arch::asm;
use std::ffi::CStr;
use std::sync::atomic::AtomicU64;

use rustix::thread::{MembarrierCommand, membarrier};

use super::{NotRestartable, Stale};
use crate::hardware::membarrier::repeat;

/// Offset of `cpu_id` in `struct rseq`: negative as long as the thread is not registered.
const CPU_ID_OFFSET: isize = 4;

/// Proof that this process's threads can run restartable sequences, and the offset of their `struct
/// rseq`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Restartable {
    /// Distance of `struct rseq` from the thread pointer, in bytes.
    rseq_offset_bytes: isize,
}

/// Assembles one checked operation. `$effect` is the side effect: one instruction. `stale` is 0
/// before, and 1 after if the effect did not happen.
///
/// Labels: 2 descriptor, 3 start, 4 behind the end, 5 abort handler. `ud1` with the signature as
/// its displacement makes the signature an instruction that disassemblers can read and that never
/// runs.
macro_rules! checked {
    ($effect:literal, $($operands:tt)*) => {
        asm!(
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "2:",
            ".long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            ".popsection",
            ".pushsection __rseq_failure, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            "mov {stale:e}, 1",
            "jmp 4f",
            ".popsection",
            "lea {scratch}, [rip + 2b]",
            "mov qword ptr fs:[{rseq} + 8], {scratch}",
            "3:",
            "cmp qword ptr [{generation}], {expected}",
            "jne 5b",
            $effect,
            "4:",
            scratch = out(reg) _,
            $($operands)*
            options(nostack),
        )
    };
}

impl Restartable {
    /// Finds the C library's registration and registers the process for the membarrier command.
    pub(super) fn register() -> Result<Restartable, NotRestartable> {
        // SAFETY: dlsym with a valid name; glibc 2.35 exports the symbols as `const ptrdiff_t` and
        // `const unsigned int`, which are initialized before main and never change.
        let (offset, size) = unsafe {
            let offset = symbol(c"__rseq_offset").cast::<isize>();
            let size = symbol(c"__rseq_size").cast::<libc::c_uint>();
            if offset.is_null() || size.is_null() {
                return Err(NotRestartable::NotRegistered);
            }
            (*offset, *size)
        };
        let cpu_id: i32;
        if size == 0 {
            return Err(NotRestartable::NotRegistered);
        }
        // SAFETY: a size other than 0 means that every thread has a `struct rseq` at that offset.
        unsafe {
            asm!(
                "mov {cpu_id:e}, dword ptr fs:[{at}]",
                cpu_id = out(reg) cpu_id,
                at = in(reg) offset + CPU_ID_OFFSET,
                options(nostack, readonly, preserves_flags),
            );
        }
        if cpu_id < 0 {
            return Err(NotRestartable::NotRegistered);
        }
        membarrier(MembarrierCommand::RegisterPrivateExpeditedRseq)
            .map_err(|error| NotRestartable::NoMembarrier { errno: error.raw_os_error() })?;
        Ok(Restartable { rseq_offset_bytes: offset })
    }

    /// When this returns, every thread of the process that was inside a sequence at the call has
    /// left it or will be aborted, and observes what this thread wrote before.
    pub(super) fn restart_running_threads(self) {
        repeat(MembarrierCommand::PrivateExpeditedRseq);
    }

    /// # Safety
    /// `at` is aligned to 8 bytes and valid for atomic reads as long as `generation` is `expected`;
    /// the thread is registered by the C library.
    #[inline(always)]
    pub(super) unsafe fn load(self, generation: &AtomicU64, expected: u64, at: *const u64) -> Result<u64, Stale> {
        let mut stale = 0_u32;
        let value: u64;
        // SAFETY: the caller's promise. The sequence is entered with the thread's own descriptor
        // field set and touches nothing else; an x86-64 load has acquire ordering. When it did not
        // happen, `value` is undefined.
        unsafe {
            checked!(
                "mov {value}, qword ptr [{at}]",
                value = lateout(reg) value,
                stale = inout(reg) stale,
                rseq = in(reg) self.rseq_offset_bytes,
                generation = in(reg) generation.as_ptr(),
                expected = in(reg) expected,
                at = in(reg) at,
            );
        }
        if stale == 0 { Ok(value) } else { Err(Stale) }
    }

    /// # Safety
    /// As [`load`](Self::load), and valid for atomic writes.
    #[inline(always)]
    pub(super) unsafe fn store(
        self,
        generation: &AtomicU64,
        expected: u64,
        at: *mut u64,
        value: u64,
    ) -> Result<(), Stale> {
        let mut stale = 0_u32;
        // SAFETY: as in `load`; an x86-64 store has release ordering.
        unsafe {
            checked!(
                "mov qword ptr [{at}], {value}",
                value = in(reg) value,
                stale = inout(reg) stale,
                rseq = in(reg) self.rseq_offset_bytes,
                generation = in(reg) generation.as_ptr(),
                expected = in(reg) expected,
                at = in(reg) at,
            );
        }
        if stale == 0 { Ok(()) } else { Err(Stale) }
    }

    /// # Safety
    /// As [`store`](Self::store).
    #[inline(always)]
    pub(super) unsafe fn compare_exchange(
        self,
        generation: &AtomicU64,
        expected: u64,
        at: *mut u64,
        current: u64,
        new: u64,
    ) -> Result<Result<u64, u64>, Stale> {
        let mut stale = 0_u32;
        let mut previous = current;
        // SAFETY: as in `load`; a locked instruction is a full fence.
        unsafe {
            checked!(
                "lock cmpxchg qword ptr [{at}], {new}",
                new = in(reg) new,
                stale = inout(reg) stale,
                rseq = in(reg) self.rseq_offset_bytes,
                generation = in(reg) generation.as_ptr(),
                expected = in(reg) expected,
                at = in(reg) at,
                inout("rax") previous,
            );
        }
        if stale != 0 {
            Err(Stale)
        } else if previous == current {
            Ok(Ok(previous))
        } else {
            Ok(Err(previous))
        }
    }
}

/// The address of a symbol of the program or its libraries, null if there is none.
fn symbol(name: &CStr) -> *mut libc::c_void {
    // SAFETY: dlsym only reads the name.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}
