//! [`Park`](super::Park) for threads of a Linux process, for tests and benches of the locks. The
//! engine's library assumes no operating system, so they bring their own. The file that includes
//! this one has `Park` in scope.
#![expect(unsafe_code, reason = "the futex system call")]

use core::ptr;
use core::sync::atomic::AtomicU32;

use super::Park;

/// Sleeps and wakes by `futex(2)`.
#[derive(Debug)]
pub(crate) struct FutexPark;

fn wake(word: *const AtomicU32, nr_threads: i32) -> i64 {
    // SAFETY: FUTEX_WAKE uses the word as an address only.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, nr_threads) }
}

impl Park for FutexPark {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let no_timeout = ptr::null::<libc::timespec>();
        let word = ptr::from_ref(word);
        // SAFETY: `word` was a reference, so it is aligned and mapped for the whole call; the
        // timeout may be null.
        unsafe {
            libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, expected, no_timeout)
        };
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        wake(word, 1) > 0
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        wake(word, i32::MAX);
    }
}
