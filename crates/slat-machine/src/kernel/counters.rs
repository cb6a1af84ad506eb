//! The counts of a virtual CPU of the mini guest kernel.

use std::ops::{Add, Sub};

/// Defines the counters once, for their sum and their difference.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counts of one virtual CPU or several.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct KernelCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Add for KernelCounters {
            type Output = KernelCounters;

            fn add(self, other: KernelCounters) -> KernelCounters {
                KernelCounters { $($name: self.$name + other.$name,)* }
            }
        }

        impl Sub for KernelCounters {
            type Output = KernelCounters;

            /// The counts since `earlier`, an older value of the same virtual CPU.
            fn sub(self, earlier: KernelCounters) -> KernelCounters {
                KernelCounters { $($name: self.$name - earlier.$name,)* }
            }
        }
    };
}

counters! {
    /// Steps of [`run`](super::KernelCpu::run).
    steps,
    /// The time for which the program itself would have worked, in nanoseconds: only a sum.
    user_work_ns,
    /// Entries into the kernel from user mode, for any reason.
    kernel_entries,
    /// System calls that are not counted below.
    system_calls,
    /// Page faults that the kernel resolved: of fresh pages, of writes, and spurious ones.
    page_faults,
    /// Those of them that copied a page.
    copies_on_write,
    /// Those of them that only needed a retry.
    spurious_faults,
    /// Processes made by fork.
    forks,
    /// Processes that began another program.
    execs,
    /// Processes that ended.
    exits,
    /// Mappings made.
    mmaps,
    /// Ranges unmapped.
    munmaps,
    /// Ranges whose rights were changed.
    mprotects,
    /// Switches to another process.
    context_switches,
    /// Processes taken over from other virtual CPUs, or released and taken back.
    migrations,
    /// Temporary mappings of the kernel.
    kernel_maps,
    /// Accesses that had to fault and did.
    stray_accesses,
    /// Accesses of user mode, those that faulted included.
    user_accesses,
    /// Accesses of the kernel to its own memory and to user pages.
    kernel_accesses,
    /// Loads of CR3.
    cr3_loads,
    /// Those of them with bit 63: nothing is flushed.
    cr3_loads_no_flush,
    /// INVLPG.
    invlpgs,
    /// INVPCID.
    invpcids,
    /// MOV to CR4.
    cr4_writes,
    /// Page-table pages of the guest that were allocated, roots included.
    tables_allocated,
    /// Page-table pages of the guest that were freed.
    tables_freed,
}
