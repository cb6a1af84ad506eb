//! The system calls of a daemon that has started: those of the runtime, of files that are read, of
//! connections, and of userfaultfds.

/// All.
#[rustfmt::skip]
pub const ALLOWED: &[i64] = &[
    // Memory.
    libc::SYS_brk, libc::SYS_madvise, libc::SYS_mincore, libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_mmap,
    libc::SYS_mprotect, libc::SYS_mremap, libc::SYS_msync, libc::SYS_munlock, libc::SYS_munmap, libc::SYS_membarrier,
    // Files.
    libc::SYS_close, libc::SYS_close_range, libc::SYS_copy_file_range, libc::SYS_dup, libc::SYS_dup3,
    libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_fadvise64, libc::SYS_fallocate, libc::SYS_fchmod, libc::SYS_fcntl,
    libc::SYS_fdatasync, libc::SYS_flock, libc::SYS_fstat, libc::SYS_fstatfs, libc::SYS_fsync, libc::SYS_ftruncate,
    libc::SYS_getcwd, libc::SYS_getdents64, libc::SYS_ioctl, libc::SYS_lseek, libc::SYS_memfd_create, libc::SYS_mkdirat,
    libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_pread64, libc::SYS_preadv, libc::SYS_preadv2, libc::SYS_pwrite64,
    libc::SYS_pwritev, libc::SYS_pwritev2, libc::SYS_read, libc::SYS_readahead, libc::SYS_readlinkat, libc::SYS_readv,
    libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_statfs, libc::SYS_statx, libc::SYS_unlinkat, libc::SYS_write,
    libc::SYS_writev, libc::SYS_linkat, libc::SYS_utimensat,
    libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_io_uring_setup,
    // Waiting.
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_eventfd2,
    libc::SYS_pipe2, libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_timerfd_create, libc::SYS_timerfd_settime,
    // Connections. `socketpair` is of signal handling.
    libc::SYS_accept4, libc::SYS_bind, libc::SYS_connect, libc::SYS_getpeername, libc::SYS_getsockname,
    libc::SYS_getsockopt, libc::SYS_listen, libc::SYS_recvfrom, libc::SYS_recvmmsg, libc::SYS_recvmsg,
    libc::SYS_sendmmsg, libc::SYS_sendmsg, libc::SYS_sendto, libc::SYS_setsockopt, libc::SYS_shutdown, libc::SYS_socket,
    libc::SYS_socketpair,
    // Threads and the process. `clone` makes threads on kernels and libraries without `clone3`;
    // landlock and the missing `execve` bind what it makes.
    libc::SYS_clone, libc::SYS_clone3, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_futex, libc::SYS_get_robust_list,
    libc::SYS_getegid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getpid, libc::SYS_getppid, libc::SYS_getrlimit,
    libc::SYS_gettid, libc::SYS_getuid, libc::SYS_pidfd_open, libc::SYS_prctl, libc::SYS_prlimit64, libc::SYS_rseq,
    libc::SYS_sched_getaffinity, libc::SYS_sched_yield, libc::SYS_set_robust_list, libc::SYS_set_tid_address,
    // Signals to itself: an abort.
    libc::SYS_tgkill, libc::SYS_restart_syscall, libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Time and the machine.
    libc::SYS_clock_getres, libc::SYS_clock_gettime, libc::SYS_clock_nanosleep, libc::SYS_getcpu, libc::SYS_getrandom,
    libc::SYS_gettimeofday, libc::SYS_nanosleep, libc::SYS_getpriority, libc::SYS_setpriority,
    libc::SYS_sysinfo, libc::SYS_uname, libc::SYS_getrusage,
    // Names that only this architecture has.
    #[cfg(target_arch = "x86_64")] libc::SYS_access,
    #[cfg(target_arch = "x86_64")] libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")] libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_open,
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
    #[cfg(target_arch = "x86_64")] libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_rename,
    #[cfg(target_arch = "x86_64")] libc::SYS_stat,
    #[cfg(target_arch = "x86_64")] libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_link,
];
