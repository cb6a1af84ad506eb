//! membarrier(2): barriers that one thread makes on every CPU which runs a thread of this process.
//! It interrupts running threads and waits for none that has no CPU, since a switch of threads is a
//! barrier already.
//!
//! Interface: `include/uapi/linux/membarrier.h`.

use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, membarrier};

/// Whether [`on_all_cpus`] works: registers the process for it, once.
pub(crate) fn is_available() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// Makes a full memory barrier on every CPU that runs a thread of this process.
pub(crate) fn on_all_cpus() {
    repeat(MembarrierCommand::PrivateExpedited);
}

/// Repeats `command`, for which the process is registered, until the kernel has executed it.
pub(crate) fn repeat(command: MembarrierCommand) {
    while let Err(error) = membarrier(command) {
        // The kernel could not allocate a processor mask: a later attempt may succeed.
        if error != Errno::NOMEM {
            // A registered process is never refused. Without the barrier memory could be freed or
            // written while it is in use, and the caller may not unwind.
            eprintln!("membarrier failed: {error}");
            std::process::abort();
        }
        std::thread::yield_now();
    }
}
