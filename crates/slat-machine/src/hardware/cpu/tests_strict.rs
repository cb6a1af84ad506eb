//! What the caches of Arm's and RISC-V's CPUs ask of a host: the engine on a host that flushes as
//! the manuals say, and on ones that leave a rule out, which must show each time.
//!
//! A CPU notices that a rule was left out in one of two ways: it faults on one access for ever, or
//! an access to a page completes while the page is being invalidated.

use core::alloc::Layout;
use std::sync::Arc;

use parking_lot::Mutex;
use slat::dirty::DirtyTracking;
use slat::error::FaultError;
use slat::format::{Format, Npt, Stage2, Sv39x4, Sv48x4, Sv57x4};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Config, MemoryRegion, MemoryRegionFlags, NodeId, PAGE_SIZE, Pfn, Vm};

use super::*;
use crate::hardware::commit::FlushDomain;
use crate::hardware::walk::Marks;
use crate::memory::{Backing, BackingKind};
use crate::vm::host::{BackingSlice, MachineHost, machine_tables};

/// Pages of a page-table page of the lowest level.
pub(super) const BLOCK: u64 = 512;
/// Blocks of the memslot.
pub(super) const NR_BLOCKS: u64 = 8;
/// Its pages.
pub(super) const NR_PAGES: u64 = NR_BLOCKS * BLOCK;
/// Faults on one access, of a host that leaves nothing out: one for each of the guest's page tables
/// and the page, and as many again where a fault comes back.
const MAX_FAULTS: u64 = 16;

/// How a host flushes all CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Flush {
    /// As the manual says.
    AsTheManual,
    /// Not at all.
    Never,
    /// By these instructions, in this order.
    By(&'static [Scope]),
}

/// How a host flushes the CPU of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Local {
    AsTheManual,
    By(&'static [Scope]),
}

/// What runs on another thread, once, after the first instruction of a flush.
type Between = Box<dyn FnOnce() + Send>;

/// Whether a host is notified of zapped leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ZappedLeaves {
    Needed,
    /// Page-table pages go with the leaves in them.
    Unseen,
}

/// The machine's host, which leaves out what the test wants.
pub(super) struct Careless {
    inner: MachineHost,
    /// The size of the leaves that it allows: its memory is contiguous.
    pub(super) max_size: Mutex<PageSize>,
    /// Which pages are in the second half of the memory, where the host has moved them.
    pub(super) is_moved: Mutex<Vec<bool>>,
    flush: Mutex<Flush>,
    local: Mutex<Local>,
    between: Mutex<Option<Between>>,
    zapped_leaves: ZappedLeaves,
}

impl Careless {
    fn run_between(&self) {
        // Without the lock: it may flush.
        let between = self.between.lock().take();
        if let Some(between) = between {
            // Another CPU: its requests for local flushes are its thread's.
            std::thread::spawn(between).join().unwrap();
        }
    }
}

// SAFETY: as `MachineHost`, but for the flush. Page-table pages and guest memory stay mapped as
// long as the CPUs live, so that a stale access is of memory that is there.
unsafe impl Host for Careless {
    machine_tables!(inner);

    fn resolve(&self, backing: &BackingSlice, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let is_moved = self.is_moved.lock();
        let block = &is_moved[(page - page % BLOCK) as usize..][..BLOCK as usize];
        let is_whole = block.iter().all(|&other| other == block[0]);
        let max_size = if is_whole { *self.max_size.lock() } else { PageSize::Size4K };
        let place = page + if is_moved[page as usize] { NR_PAGES } else { 0 };
        self.inner.resolve(backing, gfn, place, access).map(|resolved| Resolved { max_size, ..resolved })
    }
    fn flush(&self, ranges: &[GfnRange]) {
        let flush = *self.flush.lock();
        match flush {
            Flush::AsTheManual => {
                self.inner.flush(ranges);
                self.run_between();
            }
            Flush::Never => self.run_between(),
            Flush::By(scopes) => {
                for &scope in scopes {
                    self.inner.flush_domain().invalidate(scope, ranges);
                    self.run_between();
                }
            }
        }
    }
    fn flush_local(&self, gpa: Gpa) {
        let local = *self.local.lock();
        match local {
            Local::AsTheManual => self.inner.flush_local(gpa),
            Local::By(scopes) => scopes.iter().for_each(|&scope| invalidate_local(scope, gpa)),
        }
    }
    fn needs_zapped_leaves(&self) -> bool {
        self.zapped_leaves == ZappedLeaves::Needed
    }
}

/// The engine, which fails after a bounded number of faults.
pub(super) struct Engine<F: Format> {
    vcpu: Vcpu<Careless, F>,
    faults_left: u64,
}

impl<F: Format> FaultHandler for Engine<F> {
    fn handle_fault(&mut self, Fault { gpa, access, .. }: Fault) -> Result<Outcome, FaultError> {
        self.faults_left = self.faults_left.checked_sub(1).ok_or(FaultError::Busy { gpa })?;
        self.vcpu.handle_fault(gpa, access)
    }
}

type SharedCpu<F> = Arc<Mutex<Cpu<Engine<F>, F>>>;

/// Two CPUs, whose guest has paging on or off. It maps its addresses from 0 on, 1 GiB, to the
/// memslot: with paging on by huge pages, in page tables behind the blocks of the tests.
pub(super) struct Machine<F: HardwareFormat> {
    pub(super) vm: Arc<Vm<Careless, F>>,
    cpus: [SharedCpu<F>; 2],
    /// Where the memslot's memory begins, and behind it the second half.
    pub(super) first: Hpa,
}

/// The guest's page tables: in the last block of the memslot, where the cache of PTEs does not have
/// them in the place of a page of the tests.
const TABLES: u64 = ((NR_BLOCKS - 1) * BLOCK + 64) * PAGE_SIZE;

impl<F: HardwareFormat> Machine<F> {
    pub(super) fn new(paging: Paging, marks: Marks) -> Machine<F> {
        Machine::with(paging, marks, Config::default(), ZappedLeaves::Needed)
    }

    fn with(paging: Paging, marks: Marks, config: Config, zapped_leaves: ZappedLeaves) -> Machine<F> {
        let domain = Arc::new(FlushDomain::new());
        let inner = MachineHost::new(Arc::clone(&domain), 1 << 10).unwrap().with_instructions_of::<F>();
        let host = Careless {
            inner,
            max_size: Mutex::new(PageSize::Size4K),
            is_moved: Mutex::new(vec![false; NR_PAGES as usize]),
            flush: Mutex::new(Flush::AsTheManual),
            local: Mutex::new(Local::AsTheManual),
            between: Mutex::new(None),
            zapped_leaves,
        };
        let vm = Arc::new(Vm::<_, F>::new(host, config).unwrap());
        let block_bytes = PageSize::Size2M.size_bytes();
        let backing = Backing::new(BackingKind::Anonymous, (2 * NR_BLOCKS + 1) * block_bytes).unwrap();
        let first = phys::hpa_of(backing.as_ptr()).0;
        let offset_bytes = first.next_multiple_of(block_bytes) - first;
        let processor = Processor { marks, ..Processor::of::<F>() };
        let machine = Machine {
            cpus: std::array::from_fn(|_| {
                let engine = Engine { vcpu: vm.create_vcpu().unwrap(), faults_left: MAX_FAULTS };
                let cpu = Cpu::new(engine, Port::new(&domain), 1, vm.root(), Geometry::default());
                Arc::new(Mutex::new(cpu.with_processor(processor)))
            }),
            vm,
            first: Hpa(first + offset_bytes),
        };
        machine.set_region(MemoryRegionFlags::empty(), Some(BackingSlice { backing, offset_bytes }));
        if paging == Paging::TwoDimensional {
            // Levels 4, 3, and 2 with pages of 2 MiB; present, writable.
            machine.write(0, TABLES, (TABLES + PAGE_SIZE) | 3).unwrap();
            machine.write(0, TABLES + PAGE_SIZE, (TABLES + 2 * PAGE_SIZE) | 3).unwrap();
            for block in 0..NR_BLOCKS {
                let entry = (block * BLOCK * PAGE_SIZE) | 0x83;
                machine.write(0, TABLES + 2 * PAGE_SIZE + 8 * block, entry).unwrap();
            }
            for cpu in &machine.cpus {
                let mut cpu = cpu.lock();
                cpu.load_cr3(TABLES).unwrap();
                cpu.set_paging(paging);
            }
        }
        machine
    }

    pub(super) fn set_region(&self, flags: MemoryRegionFlags, backing: Option<BackingSlice>) {
        let region = MemoryRegion {
            slot: 0,
            flags,
            guest_phys_addr: Gpa(0),
            memory_size: NR_PAGES * PAGE_SIZE,
            backing,
            userfault_bitmap: None,
        };
        self.vm.set_user_memory_region(region).unwrap();
    }

    /// The CPU with a new allowance of faults.
    fn cpu(&self, index: usize) -> parking_lot::MutexGuard<'_, Cpu<Engine<F>, F>> {
        let mut cpu = self.cpus[index].lock();
        cpu.handler.faults_left = MAX_FAULTS;
        cpu
    }

    pub(super) fn read(&self, cpu: usize, at: u64) -> Result<u64, CpuError> {
        self.cpu(cpu).read(Gva(at))
    }

    pub(super) fn write(&self, cpu: usize, at: u64, value: u64) -> Result<(), CpuError> {
        self.cpu(cpu).write(Gva(at), value)
    }

    pub(super) fn leave_out(&self, flush: Flush, local: Local) {
        *self.vm.host().flush.lock() = flush;
        *self.vm.host().local.lock() = local;
    }

    /// Has CPU 1 read `at` after the first instruction of the next flush. Returns where the result
    /// will be.
    fn read_between(&self, at: u64) -> Arc<Mutex<Option<Result<u64, CpuError>>>> {
        let (cpu, result) = (Arc::clone(&self.cpus[1]), Arc::new(Mutex::new(None)));
        let seen = Arc::clone(&result);
        *self.vm.host().between.lock() = Some(Box::new(move || {
            let mut cpu = cpu.lock();
            cpu.handler.faults_left = MAX_FAULTS;
            *seen.lock() = Some(cpu.read(Gva(at)));
        }));
        result
    }

    /// Has another thread invalidate the page at `at` in the middle of the next flush, and flush by
    /// `flush`. CPU 1 reads the page while it is invalid. Returns where the result will be.
    fn invalidate_between(&self, at: u64, flush: Flush) -> Arc<Mutex<Option<Result<u64, CpuError>>>> {
        let (vm, cpu, result) = (Arc::clone(&self.vm), Arc::clone(&self.cpus[1]), Arc::new(Mutex::new(None)));
        let seen = Arc::clone(&result);
        *self.vm.host().between.lock() = Some(Box::new(move || {
            *vm.host().flush.lock() = flush;
            let _invalid = vm.invalidate_range(GfnRange::new(Gpa(at).gfn(), 1)).unwrap();
            let mut cpu = cpu.lock();
            cpu.handler.faults_left = MAX_FAULTS;
            *seen.lock() = Some(cpu.read(Gva(at)));
        }));
        result
    }

    /// Maps all of block 0 by small leaves; CPU 1 has read page 0.
    fn fill_block(&self) {
        let bytes = PageSize::Size2M.size_bytes();
        assert_eq!(self.vm.create_vcpu().unwrap().pre_fault_memory(Gpa(0), bytes, Access::Write), Ok(bytes));
        self.read(1, 0).unwrap();
        *self.vm.host().max_size.lock() = PageSize::Size2M;
    }
}

fn is_for_ever<T>(result: &Result<T, CpuError>) -> bool {
    matches!(result, Err(CpuError::Engine(FaultError::Busy { .. })))
}

const PAGINGS: [Paging; 2] = [Paging::Off, Paging::TwoDimensional];

/// The halves of Arm's flush, and of RISC-V's.
pub(super) const SECOND_STAGE: &[Scope] = &[Scope::SecondStage];
pub(super) const COMBINED: &[Scope] = &[Scope::Combined];
pub(super) const LEAVES: &[Scope] = &[Scope::Leaves];
/// RISC-V's with rs1 = x0.
const EVERYTHING: &[Scope] = &[Scope::All];

/// A right that this CPU's fault or another one's restores, with each local flush.
fn right<F: HardwareFormat>(local: Local, is_enough: bool) {
    for paging in PAGINGS {
        // The CPU that faults first, and the one whose fault is spurious.
        for is_spurious in [false, true] {
            let machine = Machine::<F>::new(paging, Marks::ByHardware);
            machine.write(0, 0, 1).unwrap();
            machine.set_region(MemoryRegionFlags::LOG_DIRTY_PAGES, None);
            machine.read(1, 0).unwrap();
            if is_spurious {
                machine.write(0, 8, 2).unwrap();
            }
            machine.leave_out(Flush::AsTheManual, local);
            let result = machine.write(1, 16, 3);
            assert_eq!(is_for_ever(&result), !is_enough, "{} {paging:?} {local:?}: {result:?}", F::NAME);
        }
    }
}

#[test]
fn a_right_that_was_restored_needs_the_local_flush_where_its_lack_is_cached() {
    slat::for_each_format!(F => {
        right::<F>(Local::AsTheManual, true);
        right::<F>(Local::By(&[]), !F::NEEDS_LOCAL_FLUSH);
    });
}

/// The fault of a CPU that has kept a right's lack counts as spurious: the leaf has the right.
#[test]
fn a_fault_on_a_kept_pte_is_spurious() {
    slat::for_each_format!(F => {
        let machine = Machine::<F>::new(Paging::Off, Marks::ByHardware);
        machine.write(0, 0, 1).unwrap();
        machine.set_region(MemoryRegionFlags::LOG_DIRTY_PAGES, None);
        machine.read(1, 0).unwrap();
        machine.cpus[1].lock().handler.faults_left = 0;
        assert!(is_for_ever(&machine.cpus[1].lock().write(Gva(16), 3)), "the engine has not handled it yet");
        machine.write(0, 8, 2).unwrap();
        let nr_spurious = machine.vm.stats().spurious;
        machine.write(1, 16, 3).unwrap();
        let nr_spurious = machine.vm.stats().spurious - nr_spurious;
        assert_eq!(nr_spurious, u64::from(F::NEEDS_LOCAL_FLUSH), "{}", F::NAME);
    });
}

#[test]
fn a_right_that_was_restored_needs_each_part_of_the_local_flush() {
    right::<Stage2>(Local::By(SECOND_STAGE), false);
    right::<Stage2>(Local::By(COMBINED), false);
    right::<Sv39x4>(Local::By(LEAVES), true);
}

/// A new leaf: in a page-table page that is there, and in one that comes with it.
fn leaf<F: HardwareFormat>(local: Local, in_table: bool, with_table: bool) {
    for paging in PAGINGS {
        let machine = Machine::<F>::new(paging, Marks::ByHardware);
        machine.write(0, 0, 1).unwrap();
        machine.leave_out(Flush::AsTheManual, local);
        let result = machine.read(0, 8 * PAGE_SIZE);
        assert_eq!(is_for_ever(&result), !in_table, "{} {paging:?} {local:?}: {result:?}", F::NAME);
        let result = machine.read(0, 3 * BLOCK * PAGE_SIZE);
        assert_eq!(is_for_ever(&result), !with_table, "{} {paging:?} {local:?}: {result:?}", F::NAME);
    }
}

#[test]
fn a_pte_that_was_not_valid_needs_the_local_flush_where_it_is_cached() {
    slat::for_each_format!(F => {
        leaf::<F>(Local::AsTheManual, true, true);
    });
    leaf::<Npt>(Local::By(&[]), true, true);
    leaf::<Stage2>(Local::By(&[]), true, true);
    leaf::<Sv39x4>(Local::By(&[]), false, false);
    leaf::<Sv48x4>(Local::By(&[]), false, false);
    leaf::<Sv57x4>(Local::By(&[]), false, false);
    // One above the lowest level is no leaf PTE.
    leaf::<Sv39x4>(Local::By(LEAVES), true, false);
}

/// A flush of all CPUs also ends the faults on a page; a flush of another page does not.
#[test]
fn a_kept_fault_ends_with_a_flush_of_its_page() {
    for (page, is_flushed) in [(1, true), (0, false)] {
        let machine = Machine::<Sv39x4>::new(Paging::Off, Marks::ByHardware);
        // With it comes the page-table page.
        machine.write(0, 0, 1).unwrap();
        machine.leave_out(Flush::AsTheManual, Local::By(&[]));
        assert!(is_for_ever(&machine.read(0, PAGE_SIZE)));
        drop(machine.vm.invalidate_range(GfnRange::new(Gfn(page), 1)).unwrap());
        machine.leave_out(Flush::AsTheManual, Local::AsTheManual);
        machine.read(1, PAGE_SIZE).unwrap();
        machine.leave_out(Flush::AsTheManual, Local::By(&[]));
        assert_eq!(is_for_ever(&machine.read(0, PAGE_SIZE)), !is_flushed);
    }
}

/// Whether CPU 1 reads page 0 while that is being invalidated. It read it before, and reads again
/// after the first instruction of the flush.
fn reads_what_is_invalid<F: HardwareFormat>(paging: Paging, flush: Flush) -> bool {
    let machine = Machine::<F>::new(paging, Marks::ByHardware);
    machine.write(0, 0, 1).unwrap();
    machine.read(1, 0).unwrap();
    machine.leave_out(flush, Local::AsTheManual);
    // That may fail: the page is being invalidated.
    let _ = machine.read_between(0);
    let _invalid = machine.vm.invalidate_range(GfnRange::new(Gfn(0), 1)).unwrap();
    machine.read(1, 0).is_ok()
}

#[test]
fn a_flush_needs_both_halves_in_order() {
    for paging in PAGINGS {
        let is_seen = |flush| reads_what_is_invalid::<Stage2>(paging, flush);
        assert!(!is_seen(Flush::AsTheManual) && is_seen(Flush::Never));
        assert!(!is_seen(Flush::By(&[Scope::SecondStage, Scope::Combined])), "the manual's, with a read between");
        // Without a DSB between the two, the second may be complete before the first.
        assert!(is_seen(Flush::By(&[Scope::Combined, Scope::SecondStage])), "the order is wrong");
        assert!(is_seen(Flush::By(SECOND_STAGE)) && is_seen(Flush::By(COMBINED)));

        let is_seen = |flush| reads_what_is_invalid::<Sv39x4>(paging, flush);
        assert!(!is_seen(Flush::AsTheManual) && is_seen(Flush::Never) && !is_seen(Flush::By(LEAVES)));
        assert!(!reads_what_is_invalid::<Sv48x4>(paging, Flush::AsTheManual));
    }
}

/// Whether CPU 1 reads block 0 while that is being invalidated, after its page-table page has been
/// freed and was allocated for another block.
fn walks_through_a_freed_table<F: HardwareFormat>(flush: Flush) -> bool {
    let machine = Machine::<F>::new(Paging::Off, Marks::ByHardware);
    machine.write(0, 0, 1).unwrap();
    machine.read(1, 0).unwrap();
    machine.leave_out(flush, Local::AsTheManual);
    let _invalid = machine.vm.invalidate_range(GfnRange::new(Gfn(0), BLOCK)).unwrap();
    machine.vm.reclaim();
    for block in 1..NR_BLOCKS {
        machine.write(0, block * BLOCK * PAGE_SIZE, block).unwrap();
    }
    machine.read(1, 0).is_ok()
}

#[test]
fn a_flush_after_a_table_was_unlinked_is_of_directory_entries_too() {
    assert!(!walks_through_a_freed_table::<Stage2>(Flush::AsTheManual));
    // The last level alone: TLBI IPAS2LE1IS.
    assert!(walks_through_a_freed_table::<Stage2>(Flush::By(&[Scope::Leaves, Scope::Combined])));
    assert!(!walks_through_a_freed_table::<Sv39x4>(Flush::AsTheManual));
    assert!(!walks_through_a_freed_table::<Sv48x4>(Flush::AsTheManual));
    // HFENCE.GVMA of each page.
    assert!(walks_through_a_freed_table::<Sv39x4>(Flush::By(LEAVES)));
    assert!(walks_through_a_freed_table::<Sv48x4>(Flush::By(LEAVES)));
}

/// Whether CPU 1 reads a page that is invalid and flushed by `flush`. Before that, another thread
/// has begun to invalidate the block, and is preempted before its flush.
fn reads_beside_a_block_that_is_not_flushed<F: HardwareFormat>(leaves: ZappedLeaves, flush: Flush) -> bool {
    let machine = Machine::<F>::with(Paging::Off, Marks::ByHardware, Config::default(), leaves);
    let at = 5 * PAGE_SIZE;
    machine.write(0, at, 1).unwrap();
    machine.read(1, at).unwrap();
    machine.leave_out(Flush::Never, Local::AsTheManual);
    let result = machine.invalidate_between(at, flush);
    drop(machine.vm.invalidate_range(GfnRange::new(Gfn(0), BLOCK)).unwrap());
    let result = result.lock().take().unwrap();
    assert!(result.is_ok() || is_for_ever(&result), "{result:?}");
    result.is_ok()
}

/// The block's page-table page is unlinked, and its leaves are still valid if they go unseen.
#[test]
fn a_host_that_needs_no_leaves_flushes_directory_entries_always() {
    use ZappedLeaves::{Needed, Unseen};
    assert!(reads_beside_a_block_that_is_not_flushed::<Sv39x4>(Unseen, Flush::By(LEAVES)));
    assert!(reads_beside_a_block_that_is_not_flushed::<Sv48x4>(Unseen, Flush::By(LEAVES)));
    assert!(!reads_beside_a_block_that_is_not_flushed::<Sv39x4>(Unseen, Flush::By(EVERYTHING)));
    assert!(!reads_beside_a_block_that_is_not_flushed::<Sv48x4>(Unseen, Flush::By(EVERYTHING)));
    // Emptied before they are unlinked.
    assert!(!reads_beside_a_block_that_is_not_flushed::<Sv39x4>(Needed, Flush::By(LEAVES)));
    // TLBI IPAS2E1IS is of directory entries, too; TLBI IPAS2LE1IS is not.
    assert!(!reads_beside_a_block_that_is_not_flushed::<Stage2>(Unseen, Flush::AsTheManual));
    let last_level = Flush::By(&[Scope::Leaves, Scope::Combined]);
    assert!(reads_beside_a_block_that_is_not_flushed::<Stage2>(Unseen, last_level));
}

/// CPU 1 has walked through the page-table page of block 0. A recovery replaces that by a huge
/// leaf, and is preempted before its flush: the result of a read of CPU 1 there.
fn read_beside_a_recovery<F: HardwareFormat>(local: Local) -> Result<u64, CpuError> {
    let machine = Machine::<F>::new(Paging::Off, Marks::ByHardware);
    machine.fill_block();
    machine.leave_out(Flush::Never, local);
    let result = machine.read_between(PAGE_SIZE);
    machine.vm.recover_range(GfnRange::new(Gfn(0), BLOCK)).unwrap();
    assert_eq!(machine.vm.stats().pages_2m(), 1);
    result.lock().take().unwrap()
}

/// The page-table page has frozen PTEs, and the directory entry of it is cached.
#[test]
fn a_vcpu_does_not_wait_for_a_recovery_that_was_preempted_before_its_flush() {
    assert_eq!(read_beside_a_recovery::<Sv39x4>(Local::AsTheManual), Ok(0));
    assert_eq!(read_beside_a_recovery::<Sv48x4>(Local::AsTheManual), Ok(0));
    assert!(is_for_ever(&read_beside_a_recovery::<Sv39x4>(Local::By(LEAVES))));
}

/// CPU 1 has read a page by a small leaf, and reads another when a huge one has come.
fn read_after_a_recovery(flush: Flush) -> Result<u64, CpuError> {
    let machine = Machine::<Stage2>::new(Paging::Off, Marks::ByHardware);
    machine.fill_block();
    machine.leave_out(flush, Local::AsTheManual);
    machine.vm.recover_range(GfnRange::new(Gfn(0), BLOCK)).unwrap();
    assert_eq!(machine.vm.stats().pages_2m(), 1);
    machine.read(1, PAGE_SIZE)
}

/// CPU 1 has read a page by a huge leaf that may not be written, and writes it when CPU 0 has split
/// that.
fn write_after_a_split(flush: Flush) -> Result<(), CpuError> {
    let machine = Machine::<Stage2>::new(Paging::Off, Marks::ByHardware);
    machine.set_region(MemoryRegionFlags::LOG_DIRTY_PAGES, None);
    *machine.vm.host().max_size.lock() = PageSize::Size2M;
    machine.read(1, 0).unwrap();
    assert_eq!(machine.vm.stats().pages_2m(), 1);
    machine.leave_out(flush, Local::AsTheManual);
    machine.write(0, 5 * PAGE_SIZE, 1).unwrap();
    assert_eq!(machine.vm.stats().pages_2m(), 0);
    machine.write(1, 0, 2)
}

#[test]
fn a_break_without_its_flush_is_a_conflict() {
    assert_eq!(read_after_a_recovery(Flush::AsTheManual), Ok(0));
    let (gpa, small, huge) = (Gpa(PAGE_SIZE), PageSize::Size4K, PageSize::Size2M);
    let conflict = Err(CpuError::TlbConflict { gpa, cached: small, walked: huge });
    assert_eq!(read_after_a_recovery(Flush::Never), conflict);
    assert_eq!(read_after_a_recovery(Flush::By(COMBINED)), conflict, "a PTE of the second stage is cached");

    assert_eq!(write_after_a_split(Flush::AsTheManual), Ok(()));
    let conflict = Err(CpuError::TlbConflict { gpa: Gpa(0), cached: huge, walked: small });
    assert_eq!(write_after_a_split(Flush::Never), conflict);
    assert_eq!(write_after_a_split(Flush::By(SECOND_STAGE)), conflict, "a combined one is cached");
}

/// A CPU that sets neither A nor D: each access that needs one faults once, and aging shows which
/// pages were used.
fn marks_by_faults<F: HardwareFormat>() {
    for paging in PAGINGS {
        for tracking in [DirtyTracking::WriteProtect, DirtyTracking::DirtyBit] {
            if tracking == DirtyTracking::DirtyBit && !F::HAS_DIRTY_BIT {
                continue;
            }
            let config = Config::default().with_dirty_tracking(tracking);
            let machine = Machine::<F>::with(paging, Marks::ByFaults, config, ZappedLeaves::Needed);
            let range = GfnRange::new(Gfn(0), 2);
            for round in 0..3 {
                machine.write(0, 0, round).unwrap();
                assert_eq!(machine.read(1, 0), Ok(round));
                machine.read(1, PAGE_SIZE).unwrap();
                assert_eq!(machine.vm.age_range(range), Ok(2), "{} {paging:?} in round {round}", F::NAME);
                assert_eq!(machine.vm.age_range(range), Ok(0));
                // A TLB may keep A.
                drop(machine.vm.invalidate_range(GfnRange::new(Gfn(2), 1)).unwrap());
                machine.vm.host().inner.flush(&[range]);
            }
            let nr_faults = machine.cpu(1).counters().nr_faults;
            machine.read(1, 0).unwrap();
            assert_eq!(machine.cpu(1).counters().nr_faults, nr_faults + 1, "A is clear");
            machine.read(1, 8).unwrap();
            assert_eq!(machine.cpu(1).counters().nr_faults, nr_faults + 1);

            machine.set_region(MemoryRegionFlags::LOG_DIRTY_PAGES, None);
            let mut log = [0; (NR_BLOCKS * BLOCK / 64) as usize];
            machine.vm.get_dirty_log(0, &mut log).unwrap();
            for round in 0..2 {
                machine.write(1, 3 * PAGE_SIZE, round).unwrap();
                machine.write(0, 3 * PAGE_SIZE, round).unwrap();
                log.fill(0);
                machine.vm.get_dirty_log(0, &mut log).unwrap();
                assert_eq!(log[0], 1 << 3, "{} {paging:?} {tracking:?} in round {round}", F::NAME);
            }
        }
    }
}

#[test]
fn a_cpu_that_sets_no_marks_faults_for_each() {
    marks_by_faults::<Stage2>();
    marks_by_faults::<Sv39x4>();
    marks_by_faults::<Sv48x4>();
}
