//! Users with fewer permissions: a thread drops its permissions and tries then.

use std::ptr;

use slat::Access;
use slat_userfaultfd::Userfaultfd as Kernel;

use super::tests::{assert_page, contents_of, memory, next_fault, register, touch, word_of, write_from};
use super::*;

const DEVICE: &str = "/dev/userfaultfd";

/// `struct __user_cap_header_struct` and the two `struct __user_cap_data_struct` of version 3.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// Drops what permits userfaultfd in the kernel: all capabilities, and root's permissions on files.
/// Of this thread only, since these are the bare system calls.
fn drop_permissions() {
    let header = [CAPABILITY_VERSION_3, 0];
    let none = [0u32; 6];
    const UNPRIVILEGED: libc::uid_t = 65534;
    // SAFETY: takes plain numbers, and structures of the sizes that this version has.
    unsafe {
        libc::syscall(libc::SYS_setfsuid, UNPRIVILEGED);
        libc::syscall(libc::SYS_setfsgid, UNPRIVILEGED);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()), 0);
    }
}

/// Has userfaultfd(2) fail with `errno` in this thread.
fn forbid_the_call(errno: u32) {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let filter = [
        // The number of the call is the first word that a filter reads.
        step(LOAD_WORD, 0, 0),
        step(JUMP_IF_EQUAL, 1, libc::SYS_userfaultfd as u32),
        step(RETURN, 0, libc::SECCOMP_RET_ERRNO | errno),
        step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program outlives the call, which copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let result = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, ptr::from_ref(&program));
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}

/// The result of `open` in a thread after `restrict`.
fn restricted<T: Send + 'static>(
    restrict: impl FnOnce() + Send + 'static,
    open: impl FnOnce() -> T + Send + 'static,
) -> T {
    let open = || {
        restrict();
        open()
    };
    thread::spawn(open).join().unwrap()
}

/// Whether a user without permissions has faults of user mode only.
fn is_for_the_permitted() -> bool {
    let allowed = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let is_open = restricted(drop_permissions, || std::fs::File::options().read(true).write(true).open(DEVICE)).is_ok();
    let is_so = Kernel::available().is_ok() && !is_open && allowed.is_ok_and(|setting| setting.trim() == "0");
    if !is_so {
        eprintln!("SKIPPED: userfaultfd is allowed for all users here, or for none");
    }
    is_so
}

#[test]
fn without_permissions_faults_of_user_mode_are_handled() {
    if !is_for_the_permitted() {
        return;
    }
    let memory = memory(BackingKind::Anonymous, 2);
    let of_its = memory.clone();
    let userfaultfds = restricted(drop_permissions, move || register(&of_its, RegisterMode::Missing, 1)).unwrap();
    let refused = write_from(&memory).join().unwrap().expect_err("the kernel does not wait");
    assert_eq!(refused.raw_os_error(), Some(libc::EFAULT));
    let toucher = touch(&memory, 1, Access::Write);
    assert_eq!(next_fault(userfaultfds.of(1)), 1);
    userfaultfds.of(1).copy(1, &contents_of(1), Wake::Waiters).unwrap();
    toucher.join().unwrap().expect("it is there");
    assert_page(&memory, 1, word_of(1));
}

#[test]
fn a_refusal_names_the_settings() {
    let forbid = || {
        drop_permissions();
        forbid_the_call(libc::EPERM as u32);
    };
    match restricted(forbid, Kernel::available) {
        Ok(_) => eprintln!("SKIPPED: /dev/userfaultfd is open to all users here"),
        Err(error) => {
            assert!(matches!(error, OpenError::NotPermitted { .. }), "{error:?}");
            for setting in ["/proc/sys/vm/unprivileged_userfaultfd", DEVICE, "CAP_SYS_PTRACE"] {
                assert!(error.to_string().contains(setting), "{error}");
            }
        }
    }
}

#[test]
fn a_kernel_without_userfaultfd_is_another_error() {
    let error = restricted(|| forbid_the_call(libc::ENOSYS as u32), Kernel::available).expect_err("no such call");
    assert!(matches!(error, OpenError::NotSupported { .. }), "{error:?}");
    assert!(error.to_string().contains("CONFIG_USERFAULTFD"));
}

#[test]
fn the_device_is_as_good_as_the_call() {
    if std::fs::File::options().read(true).write(true).open(DEVICE).is_err() {
        eprintln!("SKIPPED: /dev/userfaultfd is not open to this user");
        return;
    }
    assert!(restricted(|| forbid_the_call(libc::EPERM as u32), Kernel::available).unwrap().kernel_faults);
}
