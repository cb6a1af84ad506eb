//! The build whose work the guest does: the counted system calls, faults and processes of a
//! parallel kernel build, and the mix of them that the mini guest kernel runs.
//!
//! # How it was counted
//! Linux 6.1.192 (Debian's package linux-source-6.1, 6.1.192-2), with gcc 12.2.0 and GNU make 4.3,
//! on Linux 6.18 in a virtual machine with 2 CPUs (x86-64):
//!
//! ```text
//! make tinyconfig
//! perf stat -e raw_syscalls:sys_enter,syscalls:sys_enter_mmap,... make -s -j2 ARCH=x86 vmlinux
//! ```
//!
//! - Counts are of tracepoints, of make and all its children: `raw_syscalls:sys_enter`,
//!   `syscalls:sys_enter_*`, `exceptions:page_fault_user` (by error code) and `page_fault_kernel`,
//!   `sched:sched_process_fork`, `_exec` and `_exit`, `tlb:tlb_flush` (by reason), and
//!   `context-switches`. Compared with `strace -f -c`, on a build of Lua 5.4.4: 97 623 system calls
//!   by perf, 97 383 by strace.
//! - Times are of a second build without perf, by GNU time.
//! - Migrations were counted (`perf stat -e migrations`) in the build of `lib/` alone, 426 by 2593
//!   execs, and scaled by execs.
//! - Pages between two visits to the kernel: valgrind's lackey (`--trace-mem=yes
//!   --trace-syscalls=yes`) on gcc's `cc1 -O2` of a file of four lines, and on a `sh` of a short
//!   script. A visit is a system call or the first touch of a page. Distinct pages of 4 KiB, text
//!   included: cc1 mean 41, median 20; sh mean 10, median 7.
//!
//! Interrupts, some hundred a second, are not included.

use slat_machine::guest_os::WorkloadMix;

/// What was built, in one line.
pub(super) const NAME: &str = "Linux 6.1.192, tinyconfig, make -j2 vmlinux";

/// System calls, all.
const SYSTEM_CALLS: u32 = 4_775_979;
const MMAPS: u32 = 245_397;
/// All calls of brk: most make the heap larger, some only ask for its end.
const BRKS: u32 = 62_337;
const MUNMAPS: u32 = 20_399;
const MPROTECTS: u32 = 52_962;
/// Processes made by clone: each begins with a copy of its parent's address space.
const CLONES: u32 = 1_451;
/// Processes made by vfork (4441), and by clone3 for posix_spawn (5259): each shares its parent's
/// address space until it execs.
const VFORKS: u32 = 9_700;
const EXECS: u32 = 10_542;
/// Page faults of user mode: reads, writes and fetches of pages that are not mapped, and writes of
/// pages that are mapped read-only.
const FAULTS_READ: u32 = 821_289;
const FAULTS_WRITE: u32 = 5_412_203;
const FAULTS_FETCH: u32 = 601_355;
const FAULTS_PROTECTION: u32 = 497_773;
/// Page faults of kernel mode, on user pages.
const FAULTS_KERNEL: u32 = 140_426;
/// Switches away from a task of the build.
const CONTEXT_SWITCHES: u32 = 45_550;
/// Scaled; see above.
const MIGRATIONS: u32 = 1_732;
/// CPU time of the build in user mode and in the kernel, in nanoseconds.
const USER_NS: u64 = 96_920_000_000;
const KERNEL_NS: u64 = 19_460_000_000;

/// Page faults, all.
const FAULTS: u32 = FAULTS_READ + FAULTS_WRITE + FAULTS_FETCH + FAULTS_PROTECTION + FAULTS_KERNEL;

/// Pages that the program touches between two visits to the kernel, by default: the shell's mean.
/// With the compiler's mean, which has most of the page faults, page tables that are built anew at
/// each visit would cost four times as much.
pub(super) const TOUCHES: u32 = 10;

/// Writes among the first touches of pages that user mode makes, in percent.
const WRITE_PERCENT: u8 = (100 * FAULTS_WRITE as u64 / (FAULTS_READ + FAULTS_WRITE + FAULTS_FETCH) as u64) as u8;

/// Of 100 page faults of the build, so many are first touches here. The others are a result of the
/// guest's work: faults of the kernel, and of writes to pages that were read first or that a fork
/// has shared.
const FIRST_TOUCH_PERCENT: u32 = 86;
const FIRST_TOUCHES: u32 = (FAULTS as u64 * FIRST_TOUCH_PERCENT as u64 / 100) as u32;

/// The operations of the mini guest kernel; weights are counts.
///
/// - A process that is made by vfork and execs has nothing of its parent's. So only the exec is an
///   operation, and its address space is freed at the next exec. Forks and their exits are those of
///   clone. The other work of vfork and of the exits after it is among the system calls.
/// - The workload maps memory by itself, too: when all pages of a process are mapped, the next
///   first touch maps more, 25 pages in the mean. These are as many calls as the build has of mmap
///   and brk, so the mix has none.
/// - User work is all CPU time of the build, its kernel's too: the cost of the hypervisor is added
///   to it.
pub(super) const MIX: WorkloadMix = WorkloadMix {
    system_calls: SYSTEM_CALLS - MMAPS - BRKS - MUNMAPS - MPROTECTS - EXECS - 2 * CLONES,
    page_faults: FIRST_TOUCHES,
    forks: CLONES,
    execs: EXECS,
    exits: CLONES,
    mmaps: 0,
    munmaps: MUNMAPS,
    mprotects: MPROTECTS,
    context_switches: CONTEXT_SWITCHES,
    migrations: MIGRATIONS,
    kernel_maps: 0,
    stray_accesses: 0,
    touches_per_step: TOUCHES,
    write_percent: WRITE_PERCENT,
    user_work_ns: (USER_NS + KERNEL_NS) / NR_STEPS,
};

/// Steps of [`MIX`] that make the whole build, one operation each.
pub(super) const NR_STEPS: u64 =
    (SYSTEM_CALLS - MMAPS - BRKS) as u64 + FIRST_TOUCHES as u64 + CONTEXT_SWITCHES as u64 + MIGRATIONS as u64;

/// Counts of the build that the report compares with the run: a name, and how many in the whole
/// build.
pub(super) const COUNTED: [(&str, u64); 8] = [
    ("system calls", SYSTEM_CALLS as u64),
    ("page faults", FAULTS as u64),
    ("processes made", (CLONES + VFORKS) as u64),
    ("execs", EXECS as u64),
    ("mmap and brk", (MMAPS + BRKS) as u64),
    ("munmap", MUNMAPS as u64),
    ("mprotect", MPROTECTS as u64),
    ("context switches", CONTEXT_SWITCHES as u64),
];
