//! How to put slat under a hypervisor: what to implement and in which order, what each call may wait for, which locks are
//! held when the [`Host`] is called, and what `flush` and `park` owe to memory order. [`porting`] has it as a list to be
//! checked off; the examples `smallest_host`, `toy_vmm` and `vm_memory` have it as programs.
//!
//! # What to implement, in which order
//! Each step works without those behind it.
//!
//! 1. **Memory for tables**: [`Host::allocate_table`], [`Host::free_table`], [`Host::table_ptr`]. Then [`Vm::new`] works, and
//!    when the VM is dropped every table has come back. What is no table (slots, logs, a vCPU's record) comes from the global
//!    allocator; where either has nothing, the call fails with [`Error::OutOfMemory`].
//! 2. **Frames for the guest**: [`Host::Backing`] and [`Host::resolve`]. Then slots can be made
//!    ([`Vm::set_user_memory_region`]), and pages mapped before there is any CPU ([`Vcpu::pre_fault_memory`]); what the tables
//!    say then is told by [`Vm::read_tables`].
//! 3. **The root and the faults**: [`Vm::root`] goes into the hardware, and what it faults on to [`Vcpu::handle_fault`]. A
//!    guest runs now, as long as nothing is taken away from it.
//! 4. **[`Host::flush`]**, and on Arm and RISC-V [`Host::flush_local`]. Now slots may be deleted and moved, and the dirty log be read. [`Vm::stats`] has times if
//!    [`Host::timestamp_ns`] is a clock; a constant will do.
//! 5. **The host's own memory management**: [`Vm::invalidate_range`] around each change of a frame, of whatever reason (swap,
//!    copy on write, compaction, a page that is freed). [`Host::leaf_zapped`] tells what the guest did with it.
//! 6. **The dirty log**: [`Vm::get_dirty_log`], or rings; [`Vm::mark_dirty`] for what the VMM writes itself.
//! 7. **What makes it fit**, as wanted: [`Host::barrier_on_all_cpus`] (faults without fences), [`Host::should_yield`] and
//!    [`Host::yield_now`] (long calls give the CPU away), [`Host::node_of`] (tables on the right node),
//!    [`Host::resolve_resident`] (fault-around), [`Host::resolve_private`] (guest_memfds),
//!    [`Host::drain_modification_logs`] (page-modification logging), [`Host::guest_memory_ptr`] (shadow paging), and [`Park`]
//!    for a VM with a lock, which is there to be compared with.
//!
//! # When the host is called, and what is held then
//! That nothing is held where the host may block is tested (`tests/host_calls.rs`, `tests/engine/overtaken*.rs`).
//! *Section*: a read section of the epochs is open. Nobody waits for its end, but nothing that was unlinked meanwhile is freed.
//! *Lock*: that of a VM whose [`Locking`] is not `None`; without one, read "section" alone. Every method may be called by
//! several threads at once.
//!
//! | method | called by | what is held | may it block? |
//! |---|---|---|---|
//! | [`allocate_table`](Host::allocate_table), wait allowed | faults, prefaults, splits, shadow tables, `Vm::new` | nothing | yes |
//! | `allocate_table`, [`AllocationWait::Never`] | splits ahead of time; invalidations, slots that go and rescans, where they cut a huge page | section, lock | no |
//! | [`free_table`](Host::free_table) | whoever reclaims: any change of slots, invalidation, `reclaim`; the end of vCPU and VM | perhaps section, lock | no |
//! | [`table_ptr`](Host::table_ptr) | each step of each walk | section, perhaps lock | no |
//! | [`node_of`](Host::node_of) | whoever allocates or links a table | perhaps section, lock | no |
//! | [`resolve`](Host::resolve), [`resolve_private`](Host::resolve_private) | faults, prefaults; recoveries, and so whoever turns logging or userfault off | nothing | yes |
//! | [`resolve_resident`](Host::resolve_resident) | faults, with fault-around | nothing | no |
//! | [`flush`](Host::flush) | whoever takes rights away; with break before make, faults too | nothing, but ranges may be published | yes, though for no CPU that does not run |
//! | [`flush_local`](Host::flush_local) | faults on Arm and RISC-V, at their end | nothing | no |
//! | [`drain_modification_logs`](Host::drain_modification_logs) | harvests, with page-modification logging | nothing | yes, as `flush` |
//! | [`leaf_zapped`](Host::leaf_zapped) | invalidations, slots that go, rescans, recoveries that are cancelled; faults that replace a leaf; the end of the VM | section, lock | no |
//! | [`guest_memory_ptr`](Host::guest_memory_ptr) | shadow paging | the lock of the guest frame | no |
//! | [`barrier_on_all_cpus`](Host::barrier_on_all_cpus) | whoever reclaims, protects or harvests | nothing | as `flush` |
//! | [`should_yield`](Host::should_yield) | long calls | section, lock | no |
//! | [`yield_now`](Host::yield_now) | long calls; a fault in a range that is being taken away | nothing; with shadow paging perhaps the lock of a shadow table | only to let others run |
//! | [`timestamp_ns`](Host::timestamp_ns), [`run_delay_ns`](Host::run_delay_ns) | a sample of the faults, waits for the lock | nothing, or the lock | no |
//! | [`Park`] | whoever finds the lock held, or leaves it while others sleep | nothing | `park` alone |
//! | [`UserfaultWords::words`] | faults in slots with a userfault bitmap, rescans | section | no |
//! | the drop of a `Backing` | changes of slots, `reclaim`, the end of the VM | nothing | yes |
//!
//! # What may be called from where
//! - The methods of [`Vm`] by any thread, any number at a time. Those of [`Vcpu`] take `&mut self`: one thread at a time, not
//!   always the same one.
//! - From [`resolve`](Host::resolve) any method of [`Vm`], [`Vm::invalidate_range`] above all: that is how a host copies a page
//!   on its first write. From the other methods of the host: none. Most run inside a section and perhaps the lock, which is not
//!   taken twice; and a call from `flush` would flush.
//! - A lock of the host's may be held while the engine is called only if the methods of the host that this call leads to do not
//!   take it. For `flush` that is mostly so; a lock that `resolve` takes must not be held around [`Vcpu::handle_fault`], the
//!   prefaults, [`Vm::recover_range`], or [`Vm::set_user_memory_region`] where it turns `LOG_DIRTY_PAGES` or `USERFAULT` off.
//! - While an [`Invalidation`] lives, do not wait for a vCPU that may have to do with its range: its faults there come back until
//!   the drop.
//!
//! # What each call may wait for
//! "Flush" and "allocation" mean the host's methods. With a lock, each call in the table but those marked with a dash waits for it, too.
//!
//! | call | blocks on |
//! |---|---|
//! | [`Vcpu::handle_fault`], [`Vcpu::pre_fault_memory`], [`Vcpu::pre_fault_pages`] | resolve, allocation; flush only with break before make (Arm) |
//! | [`Vm::set_user_memory_region`]: a new slot; flags that neither begin nor end anything | - |
//! | the same: deleted, moved, `USERFAULT` on | flush |
//! | the same: `LOG_DIRTY_PAGES` on | flush, and allocation where huge pages are split |
//! | the same: `LOG_DIRTY_PAGES` or `USERFAULT` off | resolve, flush |
//! | [`Vm::invalidate_range`], [`Vm::set_memory_attributes`] | flush |
//! | dropping the [`Invalidation`] | - |
//! | [`Vm::rescan_userfault`] | flush |
//! | [`Vm::get_dirty_log`], [`Vm::clear_dirty_log`], [`Vm::reset_dirty_rings`] | flush; with modification logs their drain; a clear with initially-all-set also allocation |
//! | [`Vm::split_range`] | allocation; flush with break before make |
//! | [`Vm::recover_range`] | resolve, flush |
//! | [`Vm::age_range`], [`Vm::test_age_range`], [`Vm::read_tables`], [`Vm::mark_dirty`], [`Vm::is_marked_dirty`], [`Vm::check_access`], [`Vm::stats`], [`Vm::reclaim`] | - (to age shadow paging: flush) |
//! | [`Vcpu::handle_page_fault`], [`Vcpu::write_guest_table`], and CR3, INVLPG, INVPCID | as a fault, flush, and whoever works on the same shadow table or guest frame |
//!
//! # The promise, and where it ends
//! No call takes a lock on the VM, and none waits for a thread of the engine that was preempted, a vCPU's or another's: a
//! section that stays open only puts frees off. These are all the exceptions:
//! - **What the host does.** A call that blocks on a method of the host (the table above) waits as long as that takes. An
//!   [`Invalidation`] that the host holds keeps faults in its range out until it is dropped, also if the thread that holds it
//!   is preempted: each fault returns at once, and the guest comes back. Faults beside the range, and other invalidations of
//!   it, go on.
//! - **A VM that asks for a lock** ([`Locking::Shared`], [`Locking::Exclusive`]): its calls wait for the holder.
//! - **Shadow paging.** Each guest frame and each shadow table has a lock: a thread that needs the same one waits for a holder that
//!   was preempted. Most are held for a few dozen instructions; longer while a table is compared or taken away. A fault that meets
//!   an emulated write to the same guest table does not wait: it returns, and the guest comes back.
//!
//! # How much stack each call takes
//! An optimized build for x86-64 takes at most 2 KiB of stack for any call, and 1 KiB for [`Vcpu::handle_fault`].
//! What the methods of the host take comes on top. The only recursions go down the levels of the tables. `ci/stack.sh`
//! measures each call on a painted stack and prints a table; to see what another target takes, run it there.
//!
//! Of the heap a vCPU takes at most 6 KiB. What a harvest or a reset of the rings needs for its time (up to 6 KiB) comes from
//! the heap as well.
//!
//! # What flush, park and the rest owe to memory order
//! - **`flush`** separates three things. What the engine has written into the tables before the call must be seen by every walk
//!   that begins after it: the engine's last step was an atomic operation with release, and what hardware needs beyond that
//!   for its walkers (Arm: a DSB before the TLBI; RISC-V: a fence before the remote HFENCE) is the host's. Every access that a CPU makes
//!   through an older translation must be over, and seen by the caller, when it returns: frames are freed then, and pages
//!   copied. And a CPU that is not in the guest is not waited for; it forgets before it enters. The usual shape is a store-load pair:
//!   the CPU says "in the guest" and then looks whether it was asked to flush; the flush asks and then looks who is in the
//!   guest; with a full fence between the two on both sides (`toy_vmm`, step 5).
//! - **It may do more than it was asked.** Forgetting everything for each call is right, and slow. On Arm the combined
//!   translations of both stages go too, not those of stage 2 alone.
//! - **After [`Outcome::Resume`] nothing is owed**, but on Arm and RISC-V what [`Host::flush_local`] does, which is called just
//!   before. A CPU that does not see the new leaf yet faults once more: the fault is spurious. On x86 a fault drops what caused
//!   it. On Arm the CPU may keep the translation that lacked the right, and on RISC-V the entry that was not valid, until that
//!   CPU flushes the page. The flush is of the CPU that the thread runs on. If the hypervisor moves the vCPU before it enters
//!   the guest, the guest may fault once more there, and is flushed there; so it always gets on.
//! - **`resolve`** hands over the frame's contents: the leaf is published with release, behind it.
//! - **`park`** orders nothing. But its comparison and the falling asleep are one step with respect to the unparks.
//! - **A userfault bit** is cleared with release, behind the page's contents.
//! - **`barrier_on_all_cpus`** is a full fence on every CPU that runs a thread which may be inside a call of the engine; if it
//!   is not, leave [`Host::has_barrier_on_all_cpus`] as it is.
//! - **Table memory** is ordinary write-back memory, coherent for CPUs and walkers.
//!
//! # When something fails
//! An [`Error`] names what was wrong and where, and has changed nothing, unless it says otherwise: the same call may be tried again.
//! [`Outcome::Exit`] is no error: user space has work to do first. No input makes the engine panic, but a host that breaks its
//! contract (`unsafe trait`) breaks everything.
//!
//! Behind a section that stays open (a thread that was preempted inside a call, a [`TableReader`]
//! that is kept) nothing waits, but what is unlinked there is not freed. What it may hold is
//! bounded: 1024 tables; and of slots that change, sets, logs and bitmaps of 256 MiB (64 changes in
//! any case). Then [`Vm::set_user_memory_region`] answers [`Error::TooMuchRetired`], until the
//! section is over. Backings of deleted slots are not counted. A slot that has logged keeps its
//! log, 1/32768 of its size.
//!
//! # The examples on these pages
//! They are run as tests. Their host, and the functions that make a VM with it (`vm`, `vm_with_memory` with slot 0 of 1 MiB at
//! address 0, `region` and `change` to describe slot 0), are in `tests/support/doc_host.rs`.
//!
//! # The end of a VM
//! Take every CPU out of the guest, flush, and let no thread keep a [`Vcpu`]; then drop the last `Arc` of the [`Vm`]. What is
//! mapped by then is told to [`Host::leaf_zapped`] (dirty pages of a file, say), all tables go back to the host, then the host is dropped, and then the backings of the slots that are left: a backing keeps what it needs.

#[cfg(doc)]
use crate::*;

#[doc = include_str!("../PORTING.md")]
pub mod porting {}
