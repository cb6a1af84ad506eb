//! The counts of a virtual CPU of the mini guest kernel.

counters! {
    /// The counts of one virtual CPU or several.
    #[non_exhaustive]
    pub struct KernelCounters {
        /// Steps of [`run`](super::KernelCpu::run).
        steps: u64,
        /// The time for which the program itself would have worked, in nanoseconds: only a sum.
        user_work_ns: u64,
        /// Entries into the kernel from user mode, for any reason.
        kernel_entries: u64,
        /// System calls that are not counted below.
        system_calls: u64,
        /// Page faults that the kernel resolved: of fresh pages, of writes, and spurious ones.
        page_faults: u64,
        /// Those of them that copied a page.
        copies_on_write: u64,
        /// Those of them that only needed a retry.
        spurious_faults: u64,
        /// Processes made by fork.
        forks: u64,
        /// Processes that began another program.
        execs: u64,
        /// Processes that ended.
        exits: u64,
        /// Mappings made.
        mmaps: u64,
        /// Ranges unmapped.
        munmaps: u64,
        /// Ranges whose rights were changed.
        mprotects: u64,
        /// Switches to another process.
        context_switches: u64,
        /// Processes taken over from other virtual CPUs, or released and taken back.
        migrations: u64,
        /// Temporary mappings of the kernel.
        kernel_maps: u64,
        /// Accesses that had to fault and did.
        stray_accesses: u64,
        /// Accesses of user mode, those that faulted included.
        user_accesses: u64,
        /// Accesses of the kernel to its own memory and to user pages.
        kernel_accesses: u64,
        /// Loads of CR3.
        cr3_loads: u64,
        /// Those of them with bit 63: nothing is flushed.
        cr3_loads_no_flush: u64,
        /// INVLPG.
        invlpgs: u64,
        /// INVPCID.
        invpcids: u64,
        /// MOV to CR4.
        cr4_writes: u64,
        /// Page-table pages of the guest that were allocated, roots included.
        tables_allocated: u64,
        /// Page-table pages of the guest that were freed.
        tables_freed: u64,
    }
}
