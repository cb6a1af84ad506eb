//! What a virtual CPU of the kernel in miniature has done.

use std::ops::{Add, Sub};

/// Defines the counters once, for their sum and their difference.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What was done, by one virtual CPU or several.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Add for Counters {
            type Output = Counters;

            fn add(self, other: Counters) -> Counters {
                Counters { $($name: self.$name + other.$name,)* }
            }
        }

        impl Sub for Counters {
            type Output = Counters;

            /// What came after `earlier`, which the same virtual CPU had then.
            fn sub(self, earlier: Counters) -> Counters {
                Counters { $($name: self.$name - earlier.$name,)* }
            }
        }
    };
}

counters! {
    /// Steps of [`run`](super::KernelCpu::run).
    steps,
    /// What the program itself would have worked, in nanoseconds: a sum, nobody waited.
    user_work_ns,
    /// Entries into the kernel from user mode, whatever for.
    kernel_entries,
    /// System calls that are not counted below.
    system_calls,
    /// Page faults that the kernel resolved: of fresh pages, of writes, and spurious ones.
    page_faults,
    /// Those of them that copied a page.
    copies_on_write,
    /// Those of them for which nothing was to be done but to try again.
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
    /// Processes taken over from other virtual CPUs, or given and taken back.
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
    /// Guest tables taken, roots included.
    tables_allocated,
    /// Guest tables given back.
    tables_freed,
}
