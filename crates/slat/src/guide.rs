//! How to put slat under a hypervisor.
//!
//! - To begin: [what to implement](self#what-to-implement-in-which-order),
//!   [CPUs that are programs](self#cpus-that-are-programs), [a migration](self#a-migration).
//! - To look up: [what a flush guarantees](self#what-flush-and-the-rest-guarantee), [what is
//!   held](self#when-the-host-is-called-and-what-is-held-then) when the [`Host`] is called, [what
//!   each call may wait for](self#what-each-call-may-wait-for).
//! - To finish: [`porting`], a checklist with a test for each item; [`obligations`], by
//!   architecture.
//!
//! The examples `smallest_host`, `toy_vmm` and `vm_memory` of the crate show it as programs, and
//! `host_ept`, `host_arm` and `host_riscv` what is the architecture's. The examples on these pages
//! run as tests, with [a host of their own](self#the-examples-on-these-pages).
//!
//! # Terms
//! - A *PTE* is an entry of a page-table page, at any level. A *leaf* (leaf PTE) maps memory: 4
//!   KiB, or a *huge page* of 2 MiB or 1 GiB. A *directory entry* points to a page-table page.
//! - To *zap* is to empty PTEs. A *flush* makes CPUs drop what they have cached of them.
//! - To *invalidate* a range is to zap and flush it, and to keep faults out until the host has
//!   changed what is there. Meanwhile the range is *in flight*.
//! - To *harvest* is to get the dirty log, and to begin a new one for its pages.
//! - A *pinned* page is mapped in advance, and stays so until it is unmapped.
//! - To *split* is to replace a huge leaf by a page-table page. To *recover* is the way back.
//! - A *backing* is what the memory of a memslot comes from ([`Host::Backing`]).
//!
//! # What to implement, in which order
//! Each step works without those after it.
//!
//! 1. **Memory for page-table pages**: [`Host::allocate_table`], [`Host::free_table`],
//!    [`Host::table_ptr`]. Now [`Vm::new`] works, and dropping the VM frees every page-table page.
//!    All other memory (memslots, logs, vCPUs) comes from the global allocator. If either allocator
//!    has none, the call fails with `OutOfMemory`.
//! 2. **Frames for the guest**: [`Host::Backing`] and [`Host::resolve`]. Now memslots can be
//!    created ([`Vm::set_user_memory_region`]), and pages can be mapped before there is any CPU
//!    ([`Vcpu::pre_fault_memory`]). [`Vm::read_tables`] shows the result.
//! 3. **The root and the faults**: each virtual CPU gets a [`Vcpu`] ([`Vm::create_vcpu`]).
//!    [`Vm::root`] goes into the hardware, and its faults go to [`Vcpu::handle_fault`]. After
//!    [`Outcome::Resume`] the CPU repeats the access; [`Exit`] says what to do in all other cases.
//!    A guest runs now, as long as nothing is unmapped.
//! 4. **[`Host::flush`]**, and on Arm and RISC-V [`Host::flush_local`]. Now memslots can be deleted
//!    and moved, and the dirty log can be read. On an operating system implement
//!    [`Host::yield_now`] now, too: faults on a page that is being invalidated call it.
//!    [`Vm::stats`] has times if [`Host::timestamp_ns`] is a clock; a constant is allowed.
//! 5. **The host's own memory management**: [`Vm::invalidate_range`] around each change of a frame,
//!    for whatever reason (swap, copy on write, compaction, freeing a page). [`Host::leaf_zapped`]
//!    notifies the host of what the guest did with the page. A host that needs no such report says
//!    so ([`Host::needs_zapped_leaves`]): its memslots go in a fraction of the time. After a large
//!    one, a thread that has time calls [`Vm::reclaim`].
//! 6. **The dirty log**: [`Vm::get_dirty_log`], or rings ([`dirty`]). [`Vm::mark_dirty`] is for the
//!    VMM's own writes.
//! 7. **Demand paging**: a memslot with a [`UserfaultBitmap`], which has the steps.
//! 8. **Devices, and memory that is mapped in advance**: a memslot that is
//!    [`PINNED`](MemoryRegionFlags::PINNED), and [`Vm::map_range`]. [`Host::release_mapped`] hands
//!    the frames back. A device behind an IOMMU has page tables of its own: another [`Vm`], all of
//!    whose memslots are pinned.
//! 9. **Huge pages**: [`Resolved::max_size`] says how large a leaf may be. Choose frames so that
//!    guest-physical and host-physical address are equal modulo that size. Logging splits huge
//!    pages ([`HugePageLogging`]), and its end recovers them.
//! 10. **Options**:
//!     - [`Host::barrier_on_all_cpus`] for faults without fences.
//!     - [`Host::should_yield`] for long calls that yield the CPU.
//!     - [`Host::node_of`] for page-table pages on the right node.
//!     - [`Host::resolve_resident`] for fault-around.
//!     - [`Host::resolve_private`] for guest_memfds.
//!     - [`Host::drain_modification_logs`] for page-modification logging.
//!     - [`Host::guest_memory_ptr`] for [`shadow`](mod@crate::shadow) paging; in a kernel also
//!       [`Host::preempt_disable`] and [`Host::preempt_enable`].
//!     - [`Host::clean_ptes`] for IOMMUs that read page tables past the CPUs' caches.
//!
//! # CPUs that are programs
//! An emulator, a simulator or a test walks the page tables itself. [`Format`] has the bits. These
//! rules, which hardware keeps by itself, are then the program's:
//! - A PTE is read by one atomic load of 64 bits, with acquire.
//! - The leaf PTE must have [`WRITABLE`](Format::WRITABLE) for a write. In a format with a
//!   [`GENERATION`](Format::GENERATION), so must each directory entry above it.
//! - The walk sets A in the leaf PTE, and D for a write if the format has a
//!   [dirty bit](Format::HAS_DIRTY_BIT). It does so by a compare-and-exchange with the PTE that it
//!   read, because the engine may change the PTE meanwhile. It leaves directory entries as they
//!   are. With [`AccessTracking::Faults`] it sets neither A nor D.
//! - A cached translation may be used for a write only if it was writable when it was cached, and
//!   D was set, where the CPU sets D.
//! - A fault drops what is cached of its page.
//! - For a flush, an access is one step: from the look-up of the translation, or the walk, to the
//!   end of the access to memory. The simplest way is a lock of the CPU, held during the step. The
//!   flush takes the lock of each CPU, and empties its cache. The CPU releases it before it calls
//!   the engine.
//!
//! ```
//! # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
//! # use host::*;
//! use slat::*;
//! use slat::format::*;
//! use std::sync::atomic::{AtomicU64, Ordering};
//!
//! /// Where `gpa` is in the host's memory. `None`: a fault.
//! fn walk<H: Host, F: Format>(vm: &Vm<H, F>, gpa: Gpa, access: Access) -> Option<Hpa> {
//!     let is_write = access == Access::Write;
//!     'walk: loop {
//!         let (mut table, mut level, mut is_writable) = (vm.root(), F::ROOT_LEVEL, true);
//!         loop {
//!             let nr_entries = if level == F::ROOT_LEVEL { F::MAX_ROOT_ENTRIES } else { F::TABLE_ENTRIES };
//!             let index = (gpa.0 / level.size_bytes()) as usize % nr_entries;
//!             // SAFETY: page-table pages are freed after a flush, which waits for this access.
//!             let entry = unsafe { AtomicU64::from_ptr(vm.host().table_ptr(table).cast::<u64>().add(index)) };
//!             let pte = entry.load(Ordering::Acquire);
//!             if !F::is_present(Pte(pte)) {
//!                 return None;
//!             }
//!             let is_leaf = F::is_leaf(Pte(pte), level);
//!             if is_leaf || F::GENERATION != 0 {
//!                 is_writable &= pte & F::WRITABLE != 0;
//!             }
//!             if is_leaf {
//!                 if is_write && !is_writable {
//!                     return None;
//!                 }
//!                 let dirty = if is_write && F::HAS_DIRTY_BIT { F::DIRTY } else { 0 };
//!                 let marked = pte | F::ACCESSED | dirty;
//!                 if marked != pte
//!                     && entry.compare_exchange(pte, marked, Ordering::AcqRel, Ordering::Relaxed).is_err()
//!                 {
//!                     continue 'walk;
//!                 }
//!                 return Some(Hpa(F::address(Pte(pte), level).0 + gpa.0 % level.size_bytes()));
//!             }
//!             table = F::address(Pte(pte), level);
//!             level = level.down();
//!         }
//!     }
//! }
//!
//! # fn main() -> Result<(), Error> {
//! let vm = vm_with_memory(Config::default(), MemoryRegionFlags::LOG_DIRTY_PAGES);
//! let mut vcpu = vm.create_vcpu()?;
//! let gpa = Gpa(0x3008);
//! // The first write finds no translation. After the log was taken, a write faults once more.
//! for _ in 0..2 {
//!     assert_eq!(walk(&vm, gpa, Access::Write), None);
//!     assert_eq!(vcpu.handle_fault(gpa, Access::Write)?, Outcome::Resume);
//!     assert!(walk(&vm, gpa, Access::Write).is_some());
//!     assert_eq!(vm.get_dirty_log(0, &mut [0; 4])?, 1);
//! }
//! assert!(walk(&vm, gpa, Access::Read).is_some());
//! # Ok(())
//! # }
//! ```
//!
//! The flush of such CPUs drops what overlaps. A cached huge page overlaps each range that has one
//! of its pages.
//!
//! ```
//! use slat::*;
//! use std::sync::Mutex;
//!
//! /// What a CPU has cached: guest frames, and the first frame of the host. The CPU holds the lock
//! /// for each access, from the look-up to the end of the access.
//! struct Tlb(Mutex<Vec<(GfnRange, Pfn)>>);
//!
//! /// [`Host::flush`].
//! fn flush(cpus: &[Tlb], ranges: &[GfnRange]) {
//!     for cpu in cpus {
//!         let mut cached = cpu.0.lock().unwrap(); // Waits for the access under way.
//!         cached.retain(|(pages, _)| !ranges.iter().any(|range| range.overlaps(*pages)));
//!     }
//! }
//!
//! let tlb = Tlb(Mutex::new(vec![(GfnRange::new(Gfn(512), 512), Pfn(1024)), (GfnRange::new(Gfn(7), 1), Pfn(9))]));
//! let cpus = [tlb];
//! flush(&cpus, &[GfnRange::new(Gfn(600), 1)]);
//! assert_eq!(*cpus[0].0.lock().unwrap(), [(GfnRange::new(Gfn(7), 1), Pfn(9))]);
//! ```
//!
//! `flush` then waits for a thread that the scheduler has preempted within an access. That delays
//! the flush. It cannot block for ever, since no CPU holds its lock during a call of the engine.
//!
//! # A migration
//! 1. Turn [`LOG_DIRTY_PAGES`](MemoryRegionFlags::LOG_DIRTY_PAGES) on for each memslot.
//! 2. Copy all pages.
//! 3. Get the log of each memslot ([`Vm::get_dirty_log`]). When the call has returned, copy the
//!    pages that the log names. Repeat this until few pages are left ([`Vm::nr_marked_dirty`]).
//!    Or have the pages passed to a callback that copies them ([`Vm::for_each_dirty`]), which needs
//!    no bitmap.
//! 4. Stop all vCPUs and devices. Get the log once more, and copy its pages.
//! 5. If the guest goes on here, turn the flag off. Huge pages are recovered then.
//!
//! The order in step 3 matters: what the guest writes *after* the call is in a later log. A page
//! that is copied before the call may be old, and in no log.
//!
//! - With [`ManualProtect`], step 3 gets the log, and then for each part of the memslot clears it
//!   ([`Vm::clear_dirty_log`]) and copies its pages. With [`ManualProtect::InitiallySet`] the first
//!   log has all pages, and step 2 is left out.
//! - With rings, step 3 harvests each ring ([`DirtyRing::harvest`]), resets them
//!   ([`Vm::reset_dirty_rings`]), and then copies. A vCPU whose ring is full exits with
//!   [`Exit::DirtyRingFull`], and its thread may harvest and reset itself. It hands the pages to
//!   the thread that copies only after the reset.
//! - Devices, the VMM, and user space that fills a page of a [`UserfaultBitmap`] call
//!   [`Vm::mark_dirty`] after each write of theirs. Beside rings they keep a log of their own.
//!
//! # When the host is called, and what is held then
//! Every method may be called by several threads at once. Nothing is held where the host may block;
//! this is tested (`tests/host_calls.rs`, `tests/engine/overtaken*.rs`). Two things may be held
//! elsewhere:
//! - The *guard*: a guard of the epochs is open. No thread waits for its end, but what was unlinked
//!   since it began is not freed.
//! - The *lock*: that of a VM with `Config::locking`, for comparison (feature `baselines`). Other
//!   VMs have none. Threads that wait for it call `Host::parking`, with nothing held, and so do
//!   threads that release it while others sleep.
//!
//! ## Methods that may block
//! Nothing is held, except where it says otherwise. (With `ShadowStrategy::Baseline`, which is for
//! comparison too, the lock may be held in `allocate_table`, `flush`, `barrier_on_all_cpus` and
//! `yield_now`.)
//! - [`allocate_table`](Host::allocate_table) with [`AllocationWait::Allowed`]: faults, prefaults,
//!   splits, shadow paging, [`Vm::new`]; [`Vm::map_range`], and calls that unmap or protect a part
//!   of a pinned huge page, an invalidation too.
//! - [`resolve`](Host::resolve), [`resolve_private`](Host::resolve_private): faults, prefaults, and
//!   recoveries, so also a call that turns logging or userfault off.
//! - [`flush`](Host::flush): calls that remove rights; with break before make, faults too. Ranges
//!   may be in flight. It must not wait for a CPU that is not running.
//! - [`release_mapped`](Host::release_mapped): calls that unmap pinned pages, after the flush. The
//!   range may be in flight.
//! - [`drain_modification_logs`](Host::drain_modification_logs): harvests, with page-modification
//!   logging. It may wait as `flush` may.
//! - [`barrier_on_all_cpus`](Host::barrier_on_all_cpus): calls that reclaim, write-protect or
//!   harvest. It may wait as `flush` may.
//! - [`yield_now`](Host::yield_now): long calls; a fault in a range in flight; waits of shadow
//!   paging. It may block only to let other threads run. With shadow paging, the lock of a shadow
//!   page may be held.
//! - The drop of a `Backing`: changes of memslots, [`Vm::reclaim`], the end of the VM.
//!
//! ## Methods that must not block
//! - [`allocate_table`](Host::allocate_table) with [`AllocationWait::Never`]: splits ahead of time;
//!   invalidations, deletions and moves of memslots, and rescans, where they split a huge leaf.
//!   Guard and lock are held.
//! - [`free_table`](Host::free_table): calls that reclaim (any change of memslots, invalidation,
//!   [`Vm::reclaim`]), and the end of a vCPU and of the VM. Guard and lock may be held.
//! - [`table_ptr`](Host::table_ptr): each step of each walk. The guard is held, perhaps the lock.
//! - [`has_incoherent_walkers`](Host::has_incoherent_walkers), [`clean_ptes`](Host::clean_ptes):
//!   each change of a PTE in the format [`Vtd`]. The guard is held, perhaps the
//!   lock.
//! - [`node_of`](Host::node_of): calls that allocate or link a page-table page. Guard and lock may
//!   be held.
//! - [`resolve_resident`](Host::resolve_resident): faults, with fault-around. Nothing is held.
//! - [`flush_local`](Host::flush_local): faults on Arm and RISC-V, at their end. Nothing is held.
//! - [`leaf_zapped`](Host::leaf_zapped): invalidations, deletions and moves of memslots, rescans,
//!   recoveries that are aborted, faults that replace a leaf, the end of the VM. Guard and lock are
//!   held.
//! - [`guest_memory_ptr`](Host::guest_memory_ptr): shadow paging. The lock of the guest frame is
//!   held.
//! - [`preempt_disable`](Host::preempt_disable), [`preempt_enable`](Host::preempt_enable): shadow
//!   paging, around each lock of a guest frame or of a shadow page. A guard may be held.
//! - [`should_yield`](Host::should_yield): long calls. Guard and lock are held.
//! - [`needs_zapped_leaves`](Host::needs_zapped_leaves),
//!   [`has_barrier_on_all_cpus`](Host::has_barrier_on_all_cpus): [`Vm::new`]. Nothing is held.
//! - [`timestamp_ns`](Host::timestamp_ns), [`run_delay_ns`](Host::run_delay_ns): a sample of the
//!   faults, waits for the lock. Nothing is held, or the lock.
//! - [`UserfaultWords::words`]: faults in memslots with a userfault bitmap, rescans. The guard is
//!   held.
//!
//! # What may be called from where
//! - Any thread may call the methods of [`Vm`], any number at a time. Those of [`Vcpu`] take `&mut
//!   self`: one thread at a time, not always the same one.
//! - [`resolve`](Host::resolve) may call any method of [`Vm`], above all [`Vm::invalidate_range`]:
//!   so a host copies a page on its first write. The host keeps a `Weak` of the VM for it, which it
//!   gets after [`Vm::new`]; an `Arc` would keep the VM alive. The other methods of the host must
//!   call none. Most run inside a guard and perhaps under the lock, which is not recursive; and a
//!   call from `flush` would flush.
//! - The host may hold its own lock while it calls the engine, unless that call leads to a method
//!   of the host that takes the lock. A lock that `flush` takes must not be held around any call
//!   of which the next section says "flush". A lock that `resolve` takes must not be held around
//!   [`Vcpu::handle_fault`], the prefaults, [`Vm::recover_range`], or a
//!   [`Vm::set_user_memory_region`] that turns `LOG_DIRTY_PAGES` or `USERFAULT` off.
//! - While an [`Invalidation`] lives, do not wait for a vCPU that may access its range: its faults
//!   there come back until the drop.
//!
//! # What each call may wait for
//! "Resolve", "flush" and "allocation" mean the host's methods. With a lock, each call waits for
//! the lock too, except those that wait for nothing.
//!
//! **Faults**
//! - [`Vcpu::handle_fault`], [`Vcpu::pre_fault_memory`], [`Vcpu::pre_fault_pages`]: resolve,
//!   allocation; flush only with break before make (Arm).
//! - [`Vcpu::handle_page_fault`]: as a fault; flush.
//! - [`Vcpu::write_guest_table`], and CR3, INVLPG, INVPCID: as a fault; flush; a thread that works
//!   on the same shadow page or guest frame. So does a page fault that builds the root, evicts
//!   shadow pages, or is the guest's own while the vCPU remembers several roots of its PCID.
//!
//! **Memslots**, by [`Vm::set_user_memory_region`]
//! - A new memslot, or flags that neither begin nor end anything: nothing.
//! - Deleted, moved, smaller, `USERFAULT` on: flush. Larger: nothing.
//! - `LOG_DIRTY_PAGES` on: flush, and allocation where huge pages are split.
//! - `LOG_DIRTY_PAGES` or `USERFAULT` off: resolve, flush.
//!
//! **Pinned memory**
//! - [`Vm::map_range`][]: allocation; flush if it fails half way, or with break before make.
//! - [`Vm::unmap_range`], [`Vm::protect_range`]: flush; allocation for a part of a huge page.
//! - [`Vm::translate`], [`Vcpu::translate`]: nothing.
//!
//! **Invalidation and demand paging**
//! - [`Vm::invalidate_range`], [`Vm::set_memory_attributes`], [`Vm::rescan_userfault`]: flush.
//! - Dropping the [`Invalidation`]: nothing.
//!
//! **The dirty log**
//! - [`Vm::get_dirty_log`], [`Vm::get_dirty_log_range`], [`Vm::for_each_dirty`],
//!   [`Vm::clear_dirty_log`], [`Vm::reset_dirty_rings`]: flush; with modification logs their drain.
//!   A clear with [`ManualProtect::InitiallySet`] also allocation. `for_each_dirty` waits for its
//!   callback, too, and holds nothing then.
//! - [`Vm::enable_dirty_ring`][]: flush.
//! - [`Vm::mark_dirty`], [`Vm::is_marked_dirty`], [`Vm::nr_marked_dirty`], [`DirtyRing::harvest`],
//!   [`Vcpu::log_modifications`]: nothing.
//!
//! **Huge pages**
//! - [`Vm::split_range`]: allocation; flush with break before make.
//! - [`Vm::recover_range`]: resolve, flush.
//!
//! **Other calls**
//! - [`Vm::age_range`], [`Vm::test_age_range`]: nothing; `age_range` with shadow paging: flush.
//! - [`Vm::new`][]: allocation.
//! - [`Vm::create_vcpu`], [`Vm::memory_attributes`], [`Vm::read_tables`], [`Vm::check_access`],
//!   [`Vm::stats`], [`Vm::reclaim`], the drop of a [`Vcpu`] or of the [`Vm`]: nothing.
//!
//! # The promise, and where it ends
//! No call takes a lock on the VM. None waits for a preempted thread of the engine, a vCPU's or
//! another one: a guard that stays open only defers freeing. These are all the exceptions:
//! - **The host's methods.** A call that blocks on a method of the host (see above) waits as long
//!   as that takes. An [`Invalidation`] that the host holds keeps faults out of its range until it
//!   is dropped, also if its thread is preempted. Each such fault returns at once, and the guest
//!   comes back. Faults outside of the range, and other invalidations of it, go on.
//! - **A VM with a lock** (`Config::locking`): its calls wait for the holder.
//! - **Shadow paging.** Each guest frame and each shadow page has a lock, held for a part of a page
//!   fault; longer while PTEs are compared or zapped, or many leaf PTEs map one frame. A page fault
//!   that finds one held, or an emulated write to the same guest page table, does not wait: it
//!   returns, and the guest comes back. But the guest's flushes and emulated writes, harvests,
//!   invalidations, and page faults as named above wait for the holder; also for one that was
//!   preempted, if the host cannot see to it that none is ([`Host::preempt_disable`]).
//!
//! # How much stack each call takes
//! An optimized build for x86-64 uses at most 2 KiB of stack for any call, and 1 KiB for
//! [`Vcpu::handle_fault`]. The methods of the host need theirs in addition. The only recursions go
//! down the levels of the page tables. `ci/stack.sh` measures each call on a painted stack and
//! prints a table. Run it there for another target. That is what one thread can reach: a call that
//! meets another thread's split or recovery half done may go half a KiB deeper.
//!
//! A vCPU uses at most 6 KiB of heap. So does a harvest, whatever the size of the memslot: the VM
//! keeps that for the next harvest, as many times as harvests have run at once. A reset of the rings
//! allocates up to 6 KiB for its duration.
//!
//! # What flush and the rest guarantee
//! - **`flush`** orders three things.
//!   1. Every walk that begins after the call observes what the engine wrote into the page tables
//!      before it. The engine's last step was an atomic operation with release. The host adds what
//!      its hardware walkers need beyond that (Arm: a DSB before the TLBI; RISC-V: a fence before
//!      the remote HFENCE).
//!   2. When the call returns, every walk that began before it is over. So is every access that a
//!      CPU makes through an older translation, and it is visible to the caller. Then the engine
//!      frees page-table pages, and the host frees frames or copies pages.
//!   3. The call does not wait for a CPU that is not in the guest. That CPU flushes before it
//!      enters.
//!
//!   The usual shape is a store-load pair. The CPU stores "in the guest" and then reads whether a
//!   flush was requested. The flush requests it and then reads which CPUs are in the guest. A full
//!   fence stands between the two steps on both sides (`toy_vmm`, step 5).
//! - **A flush may do more than requested.** Flushing everything at each call is right, and slow.
//!   On Arm it must include the combined translations of both stages, after those of stage 2.
//! - **A flush includes directory entries**, since page-table pages are freed after it. There is
//!   one exception, on Arm and RISC-V: each range has fewer than 512 pages, and
//!   [`Host::needs_zapped_leaves`] is `true`. Then only leaf PTEs were changed or replaced, and
//!   RISC-V's fence by address, which is of leaf PTEs, is enough. With `false`, another thread may
//!   have unlinked a page-table page with valid leaves, and not have flushed yet. A CPU that keeps
//!   the directory entry still comes to these leaves. So such a host fences everything, always.
//! - **After [`Outcome::Resume`] no further flush is needed**, because on Arm and RISC-V
//!   [`Host::flush_local`] is called just before. A CPU that does not observe the new leaf yet
//!   faults once more: the fault is spurious.
//!   - On x86 a fault drops the translation that caused it.
//!   - Until it flushes the page, a CPU may keep what it faulted on: on Arm the translation that
//!     lacked the right, on RISC-V the PTE that was not valid.
//!   - That PTE may be above the lowest level; or a directory entry is kept that leads to a
//!     page-table page which a recovery is about to give up. A fence by address need not drop
//!     these. A host that fences so flushes everything when the same page comes a second time in
//!     turn. Without that, the guest waits for the end of the recovery, or for ever.
//!   - The flush is of the CPU that the thread runs on. If the hypervisor moves the vCPU before it
//!     enters the guest, the guest may fault once more there, and that CPU is flushed. So the guest
//!     makes progress.
//! - **`resolve`** publishes the frame's contents: the leaf is installed with release after it.
//! - **A userfault bit** is cleared with release, after the page's contents are written.
//! - **`barrier_on_all_cpus`** is a full fence on every CPU that runs a thread which may be inside
//!   a call of the engine. If it is not, leave [`Host::has_barrier_on_all_cpus`] as it is.
//! - **Memory of page-table pages** is ordinary write-back memory, coherent for CPUs and walkers.
//!   Only an IOMMU may read it past the caches ([`Host::clean_ptes`]).
//!
//! # What an architecture asks of its host besides
//! [`obligations`] has all of it by architecture, with the tests that notice what is left out.
//!
//! - **RISC-V without Svvptc** may cache that a PTE was not valid, and **Arm** a translation that
//!   lacked a right: [`Host::flush_local`] is required.
//! - **Arm**: memory that the guest may read past the data cache is cleaned (DC CVAC) before
//!   [`Host::resolve`] answers with it, unless HCR_EL2.FWB is set. Without FWB a guest with its MMU
//!   off reads past the cache, so that is all memory. Memory that becomes executable has its
//!   instruction cache invalidated (IC IVAU), unless CTR_EL0 has DIC. So has memory whose code
//!   changed or moved.
//! - **RISC-V**: all harts execute FENCE.I (SBI `remote_fence_i`) before memory becomes executable,
//!   and after its code changed or moved.
//! - **Arm and RISC-V**: `resolve` observes a fetch as [`Access::Execute`] or
//!   [`Access::ExecuteUser`]. An answer to a read or a write may permit execution as well, and is
//!   then all that `resolve` observes of the page. A host that maintains the instruction caches for
//!   fetches alone answers these with [`Execute::None`](crate::format::Execute).
//! - **Intel VT-d**: the obligations of [`Vtd`]. DMA that finds no translation
//!   is aborted, and no fault is resolved. So a device has a tree of its own, a [`Vm`] beside that
//!   of the CPUs, with memslots that are [`PINNED`](MemoryRegionFlags::PINNED) and filled by
//!   [`Vm::map_range`]: no operation on the CPUs' tree concerns it. What a device writes is in no
//!   dirty log but by [`Vm::mark_dirty`]. Memory that devices use does not move: before it may, it
//!   is unmapped here, which aborts DMA to it.
//!
//! # When something fails
//! Each kind of operation has its own error type ([`error`]), which names what was wrong and where.
//! [`Error`] is their sum, for a caller that uses `?` into one type. The call has changed nothing,
//! unless the variant says otherwise, and may be tried again. [`Outcome::Exit`] is no error: user
//! space has to act first. No input makes the engine panic. But a host that breaks its contract
//! (`unsafe trait`) breaks everything.
//!
//! Nothing waits for a guard that stays open (a thread that was preempted inside a call, or a
//! [`TableReader`] that is kept). But what is unlinked since is not freed. What may wait is
//! bounded: 1024 page-table pages, or 65536 where they go with their leaves
//! ([`Host::needs_zapped_leaves`]); and 256 MiB of memslot sets, logs and bitmaps (64 changes in
//! any case). Then [`Vm::set_user_memory_region`] returns [`SlotError::TooMuchRetired`], until the
//! guard is dropped. Backings of deleted memslots are not counted. A memslot that has logged keeps
//! its log, 1/32768 of its size.
//!
//! # The examples on these pages
//! They run as tests. Their host is in `tests/support/doc_host.rs`. There, `vm` and
//! `vm_with_memory` create a VM with it; the latter has memslot 0 of 1 MiB at address 0. `region`
//! and `change` describe memslot 0.
//!
//! # The end of a VM
//! 1. Take every CPU out of the guest, and flush.
//! 2. Drop all [`Vcpu`]s.
//! 3. Drop the last `Arc` of the [`Vm`].
//!
//! The drop notifies [`Host::leaf_zapped`], if the host needs it, of all that is mapped (dirty
//! pages of a file, for example) and frees all page-table pages. Then it drops the host, and after
//! it the backings of the remaining memslots. So a backing itself keeps what it needs.

#[cfg(doc)]
use crate::*;

#[doc = include_str!("../PORTING.md")]
pub mod porting {}

#[doc = include_str!("../OBLIGATIONS.md")]
pub mod obligations {}
