//! Adds second-stage paging to a toy VMM, in seven steps: the loop with exits, memslots, the root,
//! faults, flush and park, an MMU notifier, the dirty log of a migration. Everything is in one
//! process, and uses only std. A vCPU is a thread that interprets a small program; its CPU has a
//! TLB and walks the page tables that slat keeps; host memory is one vector.
//!
//! While four vCPUs run, one thread moves their pages to other frames, and another migrates them to
//! a "destination". In the end every word that the guest has counted must be right, at the source
//! and at the destination.
//!
//!     cargo run -p slat --example toy_vmm
#![expect(unsafe_code, reason = "a host promises memory, and a CPU follows addresses")]

use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use slat::error::{LogError, RangeError, SlotError};
use slat::format::Npt;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::tables::AccessTracking;
use slat::{
    Access, Config, Error, Exit, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE,
    PageSize, Pfn, Vm,
};

const NR_VCPUS: u64 = 4;
/// Pages that each vCPU counts in; one more, page 0, is for all of them.
const PAGES_PER_VCPU: u64 = 24;
const RAM_PAGES: u64 = 1 + NR_VCPUS * PAGES_PER_VCPU;
const RAM_START: Gpa = Gpa(0x4000_0000);
const NR_ROUNDS: u64 = 2000;
/// The device: a byte that is written here is sent.
const UART: Gpa = Gpa(0x1000_0000);
const RAM_SLOT: u32 = 0;
/// How long it takes to send the pages of a round.
const TRANSFER_TIME: Duration = Duration::from_micros(200);

// --------------------------------------------------------------------------------------------------
// Step 1: the guest, and the loop with exits.
//
// A VMM has two things before it has paging. A CPU runs the guest until it cannot continue (for KVM
// and on bare metal, the instruction that enters the guest). A loop handles the exit. Second-stage
// paging adds one more exit: a fault.

#[derive(Clone, Copy)]
enum Instruction {
    /// The word there must have this value.
    Check(Gpa, u64),
    /// Adds one, atomically.
    Increment(Gpa),
    Store(Gpa, u64),
}

/// The program of vCPU `number`: it counts in its own pages and in the common one, and reports that
/// it is done.
fn program(number: u64) -> Vec<Instruction> {
    let page = |page: u64| Gpa(RAM_START.0 + page * PAGE_SIZE + 8 * number);
    let own = 1 + number * PAGES_PER_VCPU..1 + (number + 1) * PAGES_PER_VCPU;
    let count = |round, at| [Instruction::Check(at, round), Instruction::Increment(at)];
    let round =
        |round| own.clone().flat_map(move |own| count(round, page(own))).chain([Instruction::Increment(RAM_START)]);
    (0..NR_ROUNDS).flat_map(round).chain([Instruction::Store(UART, number)]).collect()
}

enum CpuExit {
    Halt,
    Fault(Gpa, Access),
}

/// A CPU in guest mode: it executes to the end, or until the page tables do not allow an access.
struct Cpu {
    number: usize,
    program: Vec<Instruction>,
    next: usize,
    /// Frame of the guest to frame of the host, and whether it is writable.
    tlb: HashMap<Gfn, (Pfn, bool)>,
    /// The number of the last flush that the TLB has executed.
    flushed: u64,
}

impl Cpu {
    fn run(&mut self, host: &VmHost, root: Hpa) -> CpuExit {
        while let Some(&instruction) = self.program.get(self.next) {
            if let Err(fault) = self.execute(host, root, instruction) {
                return fault;
            }
            self.next += 1;
        }
        CpuExit::Halt
    }

    fn execute(&mut self, host: &VmHost, root: Hpa, instruction: Instruction) -> Result<(), CpuExit> {
        let (gpa, access) = match instruction {
            Instruction::Check(gpa, _) => (gpa, Access::Read),
            Instruction::Increment(gpa) | Instruction::Store(gpa, _) => (gpa, Access::Write),
        };
        // See step 5: from here to the end of `_guest_mode` a flush waits for this CPU.
        let (_guest_mode, flushes) = host.enter_guest(self.number);
        if self.flushed != flushes {
            self.tlb.clear();
            self.flushed = flushes;
        }
        let hpa = self.translate(&host.machine, root, gpa, access).ok_or(CpuExit::Fault(gpa, access))?;
        let word = host.machine.word(hpa);
        match instruction {
            Instruction::Check(_, expected) => assert_eq!(word.load(Ordering::Relaxed), expected, "at {gpa}"),
            Instruction::Increment(_) => drop(word.fetch_add(1, Ordering::Relaxed)),
            Instruction::Store(_, value) => word.store(value, Ordering::Relaxed),
        }
        Ok(())
    }
}

/// Counts the vCPUs that are not done.
struct Running<'a>(&'a AtomicU64);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// The loop of one vCPU's thread.
fn run_vcpu(
    vm: &Arc<Vm<VmHost, Npt>>,
    number: u64,
    uart: &Mutex<Vec<u64>>,
    _running: Running<'_>,
) -> Result<(), Error> {
    let mut vcpu = vm.create_vcpu()?;
    let program = program(number);
    let mut cpu = Cpu { number: number as usize, program, next: 0, tlb: HashMap::new(), flushed: 0 };
    loop {
        match cpu.run(vm.host(), vm.root()) {
            CpuExit::Halt => return Ok(()),
            // Step 4: a fault. slat repairs the page tables, or returns an exit for the VMM.
            CpuExit::Fault(gpa, access) => match vcpu.handle_fault(gpa, access)? {
                Outcome::Resume => {}
                // No memory: a device. The VMM emulates the instruction, and continues after it.
                Outcome::Exit(Exit::Mmio { gpa: UART, .. }) => {
                    let Instruction::Store(_, byte) = cpu.program[cpu.next] else { panic!("the UART is never read") };
                    uart.lock().unwrap().push(byte);
                    cpu.next += 1;
                }
                Outcome::Exit(exit) => panic!("the program causes no {exit:?}"),
            },
        }
    }
}

// --------------------------------------------------------------------------------------------------
// Step 2: memslots.
//
// The guest's memory and its backing. slat keeps the `Backing` with the memslot, and passes it to
// `resolve`.

/// The guest's memory: the frame of each page, once it has one. The VMM and the memslot share it.
struct Ram(Mutex<Vec<Option<Pfn>>>);

fn set_slot(vm: &Vm<VmHost, Npt>, flags: MemoryRegionFlags, backing: Option<Arc<Ram>>) -> Result<(), SlotError> {
    vm.set_user_memory_region(MemoryRegion {
        slot: RAM_SLOT,
        flags,
        guest_phys_addr: RAM_START,
        memory_size: RAM_PAGES * PAGE_SIZE,
        // `Some` when the memslot is made: a change of flags keeps it.
        backing,
        userfault_bitmap: None,
    })
}

// --------------------------------------------------------------------------------------------------
// Step 3: the root.
//
// `Vm::root` is the value for the register from which the hardware starts (nCR3, EPTP, VTTBR,
// hgatp), here an argument of `Cpu::run`. Host memory must be reachable by its address.

/// Host memory: frames, and which of them are free.
struct Machine {
    memory: Vec<Frame>,
    free: Vec<AtomicU64>,
}

#[repr(C, align(4096))]
struct Frame([AtomicU64; 512]);

impl Machine {
    fn new(nr_frames: u64) -> Machine {
        let memory = (0..nr_frames).map(|_| Frame([const { AtomicU64::new(0) }; 512])).collect();
        Machine { memory, free: (0..nr_frames / 64).map(|_| AtomicU64::new(u64::MAX)).collect() }
    }

    /// Takes a free frame. Never waits.
    fn allocate(&self) -> Option<Pfn> {
        let take_lowest = |free: u64| free.checked_sub(1).map(|less| free & less);
        (0..).zip(&self.free).find_map(|(index, free)| {
            // Acquire: observes that the last owner is done with the frame.
            let free = free.fetch_update(Ordering::Acquire, Ordering::Relaxed, take_lowest).ok()?;
            Some(Pfn(index * 64 + u64::from(free.trailing_zeros())))
        })
    }

    fn free(&self, pfn: Pfn) {
        self.free[pfn.0 as usize / 64].fetch_or(1 << (pfn.0 % 64), Ordering::Release);
    }

    fn nr_free(&self) -> u32 {
        self.free.iter().map(|free| free.load(Ordering::Relaxed).count_ones()).sum()
    }

    fn frame(&self, pfn: Pfn) -> &[AtomicU64; 512] {
        &self.memory[pfn.0 as usize].0
    }

    fn word(&self, hpa: Hpa) -> &AtomicU64 {
        &self.frame(hpa.pfn())[(hpa.0 % PAGE_SIZE / 8) as usize]
    }
}

impl Cpu {
    /// Looks into the TLB, and walks the page tables (AMD APM vol. 2, 5.3 and 15.25.5). As a CPU
    /// without accessed and dirty bits: the VM is configured for it.
    fn translate(&mut self, machine: &Machine, root: Hpa, gpa: Gpa, access: Access) -> Option<Hpa> {
        const PRESENT: u64 = 1 << 0;
        const WRITABLE: u64 = 1 << 1;
        const HUGE: u64 = 1 << 7;
        const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
        let writes = access == Access::Write;
        let cached = self.tlb.get(&gpa.gfn()).copied();
        let (pfn, _) = cached.filter(|&(_, writable)| writable || !writes).or_else(|| {
            let mut table = root.0;
            let mut writable = true;
            for level in (0..4).rev() {
                let index = gpa.0 >> (12 + 9 * level) & 511;
                // Acquire: a walk that reads a directory entry observes the page-table page behind
                // it.
                let entry = machine.word(Hpa(table + index * 8)).load(Ordering::Acquire);
                if entry & PRESENT == 0 {
                    return None;
                }
                assert!(level == 0 || entry & HUGE == 0, "`resolve` returns single pages");
                writable &= entry & WRITABLE != 0;
                table = entry & ADDRESS;
            }
            self.tlb.insert(gpa.gfn(), (Hpa(table).pfn(), writable));
            (writable || !writes).then_some((Hpa(table).pfn(), writable))
        })?;
        Some(Hpa(pfn.hpa().0 + gpa.0 % PAGE_SIZE))
    }
}

// --------------------------------------------------------------------------------------------------
// Step 4: faults.
//
// `handle_fault` (in the loop above) asks the host for two things: memory for page tables, and the
// frame of the page.

/// The host of one VM.
struct VmHost {
    machine: Arc<Machine>,
    start: Instant,
    /// Step 5: the number of flushes; whether each vCPU's CPU is in guest mode; the sleepers by
    /// their words.
    flushes: AtomicU64,
    in_guest: [AtomicBool; NR_VCPUS as usize],
}

// SAFETY: a page-table page has a frame of its own, whose owner is the thread that cleared its bit.
// The vector never grows, so frames stay where they are. `flush` has its argument there. The frame
// of a page changes only during an invalidation of the page (`move_page`).
unsafe impl Host for VmHost {
    type Backing = Arc<Ram>;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        assert_eq!(layout.size() as u64, PAGE_SIZE, "every table of the format `Npt` is one frame");
        self.machine.allocate().map(Pfn::hpa)
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        self.machine.free(table.pfn());
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.machine.memory.as_ptr().cast::<u8>().cast_mut().wrapping_add(table.0 as usize)
    }

    /// On demand: a page gets a frame at its first access. The frame is zeroed, so that the guest
    /// does not read its old contents.
    fn resolve(&self, ram: &Arc<Ram>, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let frame = &mut ram.0.lock().unwrap()[page as usize];
        if frame.is_none() {
            let pfn = self.machine.allocate().ok_or(Unresolved::Gone)?;
            self.machine.frame(pfn).iter().for_each(|word| word.store(0, Ordering::Relaxed));
            *frame = Some(pfn);
        }
        let pfn = frame.ok_or(Unresolved::Gone)?;
        Ok(Resolved::memory(pfn, PageSize::Size4K))
    }

    /// Step 5.
    fn flush(&self, _ranges: &[GfnRange]) {
        // SeqCst: the other half of the pair in `enter_guest`. As a release it publishes the
        // changed page tables, too.
        self.flushes.fetch_add(1, Ordering::SeqCst);
        for in_guest in &self.in_guest {
            // A CPU that enters from now on flushes its TLB first. This one may be using it, for
            // one instruction. (On hardware, an interrupt makes it leave. A thread that is
            // preempted right here delays the flush. A real host takes the CPU out of the guest
            // when it preempts it, and a software CPU needs the protocol of `slat-machine`'s module
            // `commit`.)
            while in_guest.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
    }

    fn yield_now(&self) {
        thread::yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

// --------------------------------------------------------------------------------------------------
// Step 5: flush and park.
//
// CPUs cache translations. When `Host::flush` returns, none of them may use an older one any more:
// each has dropped it, or is not in the guest and drops it before it enters. Parking is for a VM
// with a lock only, which slat does not need.

struct GuestMode<'h>(&'h AtomicBool);

impl VmHost {
    /// Enters guest mode, until the guard is dropped. Returns the number of the flush that the TLB
    /// must have executed.
    fn enter_guest(&self, number: usize) -> (GuestMode<'_>, u64) {
        let in_guest = &self.in_guest[number];
        // SeqCst, as in `flush`: the CPU stores that it is in the guest, then loads the number of
        // flushes. The flush counts itself, then loads which CPUs are in the guest. At least one of
        // the two observes the other.
        in_guest.store(true, Ordering::SeqCst);
        (GuestMode(in_guest), self.flushes.load(Ordering::SeqCst))
    }
}

impl Drop for GuestMode<'_> {
    fn drop(&mut self) {
        // Release: a flush that observes this observes that the access is done.
        self.0.store(false, Ordering::Release);
    }
}

// --------------------------------------------------------------------------------------------------
// Step 6: the MMU notifier.
//
// The host swaps, compacts, merges pages. To change the frame of a page, it first invalidates the
// page, and makes the change while the `Invalidation` exists: no CPU uses the page, and no fault
// maps it.

/// Moves page `page` to another frame. Returns whether it had one.
fn move_page(vm: &Vm<VmHost, Npt>, ram: &Ram, page: u64) -> Result<bool, RangeError> {
    let machine = &vm.host().machine;
    let invalidation = vm.invalidate_range(GfnRange::new(Gfn(RAM_START.gfn().0 + page), 1))?;
    let mut frames = ram.0.lock().unwrap();
    let Some(old) = frames[page as usize] else { return Ok(false) };
    let Some(new) = machine.allocate() else { return Ok(false) };
    for (from, to) in machine.frame(old).iter().zip(machine.frame(new)) {
        // Garbage stays behind, so that a CPU that still used the old frame would be detected.
        to.store(from.swap(0xdead_dead_dead_dead, Ordering::Relaxed), Ordering::Relaxed);
    }
    frames[page as usize] = Some(new);
    machine.free(old);
    // Only now may faults resolve the page again: they get the new frame.
    drop(invalidation);
    Ok(true)
}

// --------------------------------------------------------------------------------------------------
// Step 7: the dirty log.
//
// A migration copies everything, then, round by round, what was written since; at last, with the
// vCPUs stopped, the rest.

/// Copies to `destination` what was written since the last round. Returns how many pages that was.
fn dirty_log_round(vm: &Vm<VmHost, Npt>, ram: &Ram, destination: &mut [[u64; 512]]) -> Result<u64, LogError> {
    let mut bitmap = [0; RAM_PAGES.div_ceil(64) as usize];
    // First the log, then the pages: what is written in between is in the next round.
    let nr_pages = vm.get_dirty_log(RAM_SLOT, &mut bitmap)?;
    let is_dirty = |page: &usize| bitmap[page / 64] >> (page % 64) & 1 != 0;
    (0..RAM_PAGES as usize).filter(is_dirty).for_each(|page| copy_page(vm, ram, page, &mut destination[page]));
    Ok(nr_pages)
}

fn copy_page(vm: &Vm<VmHost, Npt>, ram: &Ram, page: usize, destination: &mut [u64; 512]) {
    // The mutex keeps the frame from being moved meanwhile.
    let frames = ram.0.lock().unwrap();
    let Some(frame) = frames[page] else { return };
    for (word, copy) in vm.host().machine.frame(frame).iter().zip(destination) {
        *copy = word.load(Ordering::Relaxed);
    }
}

fn run(machine: &Arc<Machine>) -> Result<(), Error> {
    let host = VmHost {
        machine: Arc::clone(machine),
        start: Instant::now(),
        flushes: AtomicU64::new(0),
        in_guest: [const { AtomicBool::new(false) }; NR_VCPUS as usize],
    };
    let config = Config::default().with_access_tracking(AccessTracking::Faults);
    let vm = Arc::new(Vm::<VmHost, Npt>::new(host, config)?);
    let ram = Arc::new(Ram(Mutex::new(vec![None; RAM_PAGES as usize])));
    let uart = Mutex::new(Vec::new());
    set_slot(&vm, MemoryRegionFlags::empty(), Some(Arc::clone(&ram)))?;

    let mut destination = vec![[0; 512]; RAM_PAGES as usize];
    let nr_running = AtomicU64::new(NR_VCPUS);
    let (mut nr_rounds, mut nr_copied) = (0, 0);
    let nr_moved = thread::scope(|threads| {
        let (vm, ram, uart, nr_running) = (&vm, &ram, &uart, &nr_running);
        let start = |number| threads.spawn(move || run_vcpu(vm, number, uart, Running(nr_running)));
        let mut vcpus: Vec<_> = (0..NR_VCPUS / 2).map(start).collect();
        let mover = threads.spawn(move || {
            let mut nr_moved = 0;
            loop {
                // Once more when they are done, so that each page was certainly moved.
                let is_last = nr_running.load(Ordering::Acquire) == 0;
                for page in 0..RAM_PAGES {
                    nr_moved += u64::from(move_page(vm, ram, page)?);
                }
                if is_last {
                    return Ok::<_, Error>(nr_moved);
                }
            }
        });
        // The migration: log, and copy everything. Some vCPUs run, others start only now.
        set_slot(vm, MemoryRegionFlags::LOG_DIRTY_PAGES, None)?;
        (0..RAM_PAGES as usize).for_each(|page| copy_page(vm, ram, page, &mut destination[page]));
        vcpus.extend((NR_VCPUS / 2..NR_VCPUS).map(start));
        while nr_running.load(Ordering::Acquire) != 0 {
            nr_copied += dirty_log_round(vm, ram, &mut destination)?;
            nr_rounds += 1;
            thread::sleep(TRANSFER_TIME);
        }
        vcpus.into_iter().try_for_each(|vcpu| vcpu.join().expect("a vCPU panicked"))?;
        mover.join().expect("the mover panicked")
    })?;
    nr_copied += dirty_log_round(&vm, &ram, &mut destination)?;

    // The guest has checked its reads. This checks its writes, in its memory and in the copy.
    for (page, copy) in destination.iter().enumerate() {
        let mut now = [0; 512];
        copy_page(&vm, &ram, page, &mut now);
        assert!(*copy == now, "page {page} of the destination is stale");
        let expected = if page == 0 { NR_ROUNDS * NR_VCPUS } else { NR_ROUNDS };
        let counted = if page == 0 { 0 } else { (page as u64 - 1) / PAGES_PER_VCPU };
        assert_eq!(now[counted as usize], expected, "page {page} has lost a count");
    }
    let mut sent = uart.into_inner().unwrap();
    sent.sort_unstable();
    assert!(sent.into_iter().eq(0..NR_VCPUS), "each vCPU has reported once that it is done");
    // The vCPUs that started late have written all of their pages while the memslot logged.
    assert!(nr_moved >= RAM_PAGES && nr_copied >= NR_VCPUS / 2 * PAGES_PER_VCPU);
    let stats = vm.stats();
    println!(
        "{} faults, {nr_moved} pages moved, {nr_copied} pages copied in {nr_rounds} rounds and the last",
        stats.faults
    );

    // No CPU walks the page tables any more. Dropping the VM frees all of them.
    drop(vm);
    ram.0.lock().unwrap().iter_mut().filter_map(Option::take).for_each(|pfn| machine.free(pfn));
    Ok(())
}

fn main() -> Result<(), Error> {
    let machine = Arc::new(Machine::new(1024));
    run(&machine)?;
    assert_eq!(machine.nr_free(), 1024, "a frame of a table, or of the guest, was not freed");
    Ok(())
}
