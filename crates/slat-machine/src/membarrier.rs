//! membarrier(2): barriers that one thread makes on every CPU which runs a thread of this process.
//! It interrupts running threads and waits for none that has no CPU, since a switch of threads is a
//! barrier already.
//!
//! Interface: `include/uapi/linux/membarrier.h`.

#![expect(unsafe_code, reason = "a raw system call")]

use std::sync::OnceLock;

const CMD_PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const CMD_REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// Whether [`on_all_cpus`] works: registers the process for it, once.
pub(crate) fn is_available() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED
        .get_or_init(|| membarrier(CMD_REGISTER_PRIVATE_EXPEDITED).is_ok() && membarrier(CMD_PRIVATE_EXPEDITED).is_ok())
}

/// Makes a full memory barrier on every CPU that runs a thread of this process.
pub(crate) fn on_all_cpus() {
    repeat(CMD_PRIVATE_EXPEDITED);
}

/// Repeats `command`, for which the process is registered, until the kernel has executed it.
pub(crate) fn repeat(command: libc::c_int) {
    while let Err(errno) = membarrier(command) {
        // The kernel could not allocate a processor mask: a later attempt may succeed.
        if errno != libc::ENOMEM {
            // A registered process is never refused. Without the barrier memory could be freed or
            // written while it is in use, and the caller may not unwind.
            eprintln!("membarrier failed: {}", std::io::Error::from_raw_os_error(errno));
            std::process::abort();
        }
        std::thread::yield_now();
    }
}

/// membarrier(2) without flags; the error is the error number.
pub(crate) fn membarrier(command: libc::c_int) -> Result<(), i32> {
    // SAFETY: membarrier takes plain numbers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if result < 0 { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { Ok(()) }
}
