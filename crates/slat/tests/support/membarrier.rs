//! A barrier on all CPUs by membarrier(2), for hosts of tests and benches on Linux.
#![expect(unsafe_code, reason = "a raw system call")]

use std::sync::OnceLock;

const CMD_PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const CMD_REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: membarrier takes plain numbers and accesses no memory of this process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Whether [`on_all_cpus`] works here.
pub(crate) fn is_available() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| membarrier(CMD_REGISTER_PRIVATE_EXPEDITED))
}

/// Makes a full memory barrier on every CPU that runs a thread of this process.
pub(crate) fn on_all_cpus() {
    assert!(membarrier(CMD_PRIVATE_EXPEDITED), "{}", std::io::Error::last_os_error());
}
