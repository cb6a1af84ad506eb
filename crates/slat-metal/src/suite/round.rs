//! A round of the suite: one VM, one way to run the engine.

#![expect(unsafe_code, reason = "finds the mailbox in a vCPU's private memory")]

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use slat::format::{Format, LeafAttributes};
use slat::tables::{AccessTracking, TablePlacement};
use slat::{Config, Gpa, MemoryRegion, MemoryRegionFlags, NodeId, PAGE_SIZE, PageSize, Pfn, Vm};

use super::guest::{self, Command, MAX_PAGES, Mailbox, Planned};
use super::probed::{self, Probed};
use super::stretch::Stretches;
use super::tables;
use crate::barrier::Barrier;
use crate::boot;
use crate::cpus::Cpus;
use crate::host::{Backing, Control, MetalHost};
use crate::memory::MEMORY;
use crate::operations::{MetalVm, Operations};
use crate::options::{Options, Walker};
use crate::private::{PRIVATE_BYTES, Private};
use crate::ram::Ram;
use crate::virtual_cpu::{SecondStage, VirtualCpu};
use crate::{error, fail, say};

/// Pages under attack: 12 MiB, so that blocks of both kinds are there, and one that is not whole.
const NR_PAGES: u64 = 3072 - 16;

/// Where they are, in guest-physical memory: above where any machine has the image, whose text the
/// guest has at its own address.
const START: Gpa = Gpa(0x10_0000_0000);

/// Private memory of vCPU n, one after the other from here on.
const PRIVATE_START: Gpa = Gpa(0x18_0000_0000);

/// Stretches between two checkpoints.
const STRETCHES: u64 = 400;

/// Steps of the guest in a stretch: mostly a few, so that there are many operations, and now and
/// then so many that a CPU stays in the guest while others do their operations. Most of the time of
/// a run goes into the exits of these steps: an emulator takes 30 us for one.
const STEPS: u64 = 24;
const MANY_STEPS: u64 = 1000;
/// In how many stretches one has many steps.
const MANY_ONCE_IN: u8 = 64;

/// Memslots.
const IMAGE_SLOT: u32 = 0;
const PRIVATE_SLOT: u32 = 1;
pub(super) const ATTACKED_SLOT: u32 = 2;

const _: () = assert!(NR_PAGES as usize <= MAX_PAGES);

/// Where the private memory has the mailbox, behind the page tables.
const MAILBOX: u64 = Private::FREE;

/// The mailbox in a vCPU's private memory.
fn mailbox(private: &Private) -> &Mailbox {
    const { assert!(MAILBOX + size_of::<Mailbox>() as u64 <= PRIVATE_BYTES) };
    // SAFETY: words of the block, which are integers and live as long as it does.
    unsafe { &*((private.address() + MAILBOX) as *const Mailbox) }
}

/// A round.
pub(super) struct Round<V: VirtualCpu> {
    pub vm: Arc<MetalVm<V::Format>>,
    pub operations: Operations<V::Format>,
    pub probed: Probed<V::Format>,
    pub second_stage: SecondStage,
    pub cpus: Arc<Cpus>,
    // Last but for plain values: the VM, which the fields above have, goes before the memory.
    privates: Vec<Private>,
    options: Options,
    config: Config,
}

/// The seed is a constant of the image's run, as the fill of a page is a plain function.
static SEED: AtomicU64 = AtomicU64::new(0);

fn fill(page: u64, words: &[AtomicU64]) {
    guest::fill(page, SEED.load(Ordering::Relaxed), words);
}

impl<V: VirtualCpu> Round<V> {
    /// Round `number`, with its VM.
    pub fn new(options: &Options, config: Config, number: u64) -> Round<V> {
        let seed = options.seed.wrapping_add(number << 16);
        SEED.store(seed, Ordering::Relaxed);
        let cpus = Cpus::new(options.control, V::KICK);
        let vm = Vm::new(MetalHost { cpus: cpus.clone() }, config).unwrap_or_else(|error| error!("no VM: {error}"));
        let vm = Arc::new(vm);
        let ram = Arc::new(Ram::new(NR_PAGES, fill));
        // On the node of the CPU that runs the vCPU.
        let node = |cpu| MEMORY.nodes().of_cpu(cpu as usize);
        let privates: Vec<_> = (0..options.nr_cpus as u64)
            .map(|cpu| Private::new(Gpa(PRIVATE_START.0 + cpu * PRIVATE_BYTES), node(cpu)))
            .collect();
        for (cpu, private) in privates.iter().enumerate() {
            let mailbox = mailbox(private);
            let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
            set(&mailbox.cpu, cpu as u64);
            set(&mailbox.nr_cpus, options.nr_cpus as u64);
            set(&mailbox.random, guest::mix(seed ^ (cpu as u64) << 50));
            set(&mailbox.seed, seed);
            set(&mailbox.hypercall, V::HYPERCALL);
            set(&mailbox.start, START.0);
            set(&mailbox.nr_pages, NR_PAGES);
            let (start, nr_pages) = probed::window();
            set(&mailbox.probed_start, start.0);
            set(&mailbox.nr_probed_pages, nr_pages);
        }
        let text = boot::image_text();
        let image = (Gpa(text.start), text.size_bytes(), Pfn(text.start / PAGE_SIZE), MemoryRegionFlags::READONLY);
        let private = privates
            .iter()
            .map(|private| (private.gpa, PRIVATE_BYTES, private.first_frame(), MemoryRegionFlags::empty()));
        // Private memory is one memslot for each vCPU; the numbers from 16 on are theirs.
        for (index, (guest_phys_addr, memory_size, first, flags)) in [image].into_iter().chain(private).enumerate() {
            let slot = if index == 0 { IMAGE_SLOT } else { PRIVATE_SLOT + 15 + index as u32 };
            // SAFETY: the image's text, which the guest may only read, and private memory, which
            // goes after the VM.
            let backing = Some(unsafe { Backing::fixed(first, first, LeafAttributes::default()) });
            let region = MemoryRegion { slot, flags, guest_phys_addr, memory_size, backing, userfault_bitmap: None };
            vm.set_user_memory_region(region).unwrap_or_else(|error| error!("no memslot {slot}: {error}"));
        }
        let hot = guest::NR_HOT_PAGES;
        let operations = Operations::new(&vm, ATTACKED_SLOT, START, &ram, hot, config.manual_protect, options.control)
            .unwrap_or_else(|error| error!("no memslot {ATTACKED_SLOT}: {error}"));
        // Else the log begins to be on by chance, or with the first checkpoint.
        if options.control == Control::CopyBeforeLog {
            operations.turn_log_on();
        }
        let probed = Probed::new(&vm, seed);
        let second_stage = SecondStage::of(&vm, &config);
        // Each round does other operations.
        let options = Options { seed, ..*options };
        Round { vm, operations, probed, second_stage, cpus, privates, options, config }
    }

    /// A page of each block of 2 MiB of the memory under attack.
    pub fn blocks(&self) -> impl Iterator<Item = Gpa> + '_ {
        (0..NR_PAGES).step_by(512).map(|page| self.operations.gpa(page))
    }

    /// The mailbox of vCPU `cpu`.
    pub fn mailbox(&self, cpu: usize) -> &Mailbox {
        mailbox(&self.privates[cpu])
    }

    /// Operations, in all.
    pub fn nr_operations(&self) -> u64 {
        self.operations.counts().map(|(_, count)| count).sum::<u64>() + self.probed.nr_operations()
    }

    /// Accesses of the guest, in all.
    pub fn nr_accesses(&self) -> u64 {
        self.privates.iter().map(|private| mailbox(private).nr_accesses.load(Ordering::Relaxed)).sum()
    }

    /// The part of CPU `cpu`, with `share` operations.
    pub fn run(&self, cpu: usize, share: u64, barrier: &Barrier) {
        let private = &self.privates[cpu];
        let mailbox = mailbox(private);
        let mut stretches = Box::new(Stretches::<V>::new(self, private, cpu));
        let mut rng = Rng::with_seed(guest::mix(self.options.seed ^ cpu as u64));
        for checkpoint in 1..=share.div_ceil(STRETCHES) {
            mailbox.command.store(Command::Random as u64, Ordering::Relaxed);
            for _ in 0..STRETCHES.min(share - (checkpoint - 1) * STRETCHES) {
                let nr_steps = if rng.u8(0..MANY_ONCE_IN) == 0 { MANY_STEPS } else { STEPS };
                mailbox.nr_steps.store(nr_steps, Ordering::Relaxed);
                stretches.run(self);
                if rng.u8(0..16) == 0 {
                    self.probed.one(&mut rng);
                } else {
                    self.operations.one(&mut rng, stretches.vcpu());
                }
            }
            let random = mailbox.random.load(Ordering::Relaxed);
            barrier.wait();
            if cpu == 0 {
                self.begin_checkpoint();
            }
            barrier.wait();
            mailbox.command.store(Command::Planned as u64, Ordering::Relaxed);
            mailbox.random.store(checkpoint, Ordering::Relaxed);
            stretches.run(self);
            mailbox.random.store(random, Ordering::Relaxed);
            barrier.wait();
            if cpu == 0 {
                self.end_checkpoint(checkpoint);
            }
            barrier.wait();
        }
    }

    /// All CPUs are outside of the guest: the log must have all, and then nothing is mapped.
    fn begin_checkpoint(&self) {
        // As the operations have left them.
        self.walk_outside();
        self.operations.check_copy();
        // For the planned accesses.
        self.operations.turn_log_on();
        self.operations.unmap_all();
        self.cpus.check();
        self.check_placement();
    }

    /// The guest has made the accesses of checkpoint `number`: A, D and the log must say so.
    fn end_checkpoint(&self, number: u64) {
        let nr_pages = self.operations.ram().nr_pages();
        (0..nr_pages).for_each(|page| self.check_leaf(page, number));
        // Before the log is taken: W and D are as the guest has left them.
        self.walk_outside();
        self.operations.check_exact(|page| guest::planned(page, number) == Planned::Write);
    }

    /// Compares the page tables with what a walker outside of the machine finds, if there is one.
    fn walk_outside(&self) {
        if self.options.walker == Walker::Outside {
            let text = boot::image_text();
            let privates = self.privates.iter().map(|private| (private.gpa, PRIVATE_BYTES / PAGE_SIZE));
            let others = [(Gpa(text.start), text.size_bytes() / PAGE_SIZE), (START, NR_PAGES)];
            let ranges = privates.chain(others).chain(probed::places());
            tables::check(&self.vm, &self.config, ranges, |gpa| self.asked_node(gpa));
        }
    }

    /// The node that the memory at `gpa` was asked from, if that is known.
    fn asked_node(&self, gpa: Gpa) -> Option<NodeId> {
        let of_private = |private: &Private| (private.gpa.0..private.gpa.0 + PRIVATE_BYTES).contains(&gpa.0);
        match self.privates.iter().position(of_private) {
            Some(cpu) => Some(MEMORY.nodes().of_cpu(cpu)),
            None => self.operations.ram().asked_node(self.operations.page_of(gpa)?),
        }
    }

    /// Each node has memory enough for what is asked from it. And page-table pages that follow the
    /// memory that they map are on its node.
    fn check_placement(&self) {
        let nr_elsewhere = MEMORY.nr_elsewhere();
        if nr_elsewhere != 0 {
            fail!("{nr_elsewhere} allocations came from another node than they asked for");
        }
        let stats = self.vm.stats();
        let (of_faults, of_splits) = (stats.remote_fault_tables, stats.remote_split_tables);
        let is_near = self.config.table_placement == TablePlacement::HugePageNode;
        if is_near && (of_faults, of_splits) != (0, 0) {
            fail!(
                "{of_faults} page-table pages of faults and {of_splits} of splits are on another \
                 node than the memory that they were linked for"
            );
        }
    }

    /// The page is mapped if it was accessed, to its frame; A and D of the leaf are right, where
    /// CPUs set them.
    fn check_leaf(&self, page: u64, number: u64) {
        let gpa = self.operations.gpa(page);
        let found = self.vm.translate(gpa).unwrap_or_else(|error| fail!("no translation of {gpa}: {error}"));
        let planned = guest::planned(page, number);
        let Some(found) = found else {
            // A fault that comes between break and make of a split leaves nothing of the larger
            // leaf: what was accessed through that has been reported.
            let is_cancelled = V::Format::BREAK_BEFORE_MAKE && self.operations.ram().is_whole(page);
            if planned != Planned::None && !is_cancelled {
                fail!("page {page} was accessed ({planned:?}), and is not mapped");
            }
            return;
        };
        let frame = self.operations.ram().frame(page);
        if frame != Some(found.pfn) {
            fail!("page {page} is mapped to frame {}, and is in frame {frame:?}", found.pfn);
        }
        if self.config.access_tracking != AccessTracking::AccessedBit {
            return;
        }
        // A and D are the leaf's.
        let block = page & !511..(page & !511) + 512;
        let pages = if found.size == PageSize::Size4K { page..page + 1 } else { block.clone() };
        let is_planned = |page| guest::planned(page, number) != Planned::None;
        // A leaf that a write has split out of a larger one has A of that one.
        let inherits = self.operations.ram().is_whole(page) && block.clone().any(is_planned);
        // A split that a fault has cancelled, as above: the page may be back as the neighbour of
        // another page that faulted, which sets no A.
        let is_back = V::Format::BREAK_BEFORE_MAKE && found.size == PageSize::Size4K && inherits && !found.accessed;
        let is_accessed = pages.clone().any(is_planned) && !is_back || inherits && found.accessed;
        let is_dirty = pages.clone().any(|page| guest::planned(page, number) == Planned::Write);
        if (found.accessed, found.dirty) != (is_accessed, is_dirty) {
            fail!(
                "page {page}, mapped by {:?} as writable: {}, has A {} and D {}; the guest accessed the leaf: \
                 {is_accessed}, wrote it: {is_dirty}",
                found.size,
                found.writable,
                found.accessed,
                found.dirty
            );
        }
    }

    /// Says how much was done.
    pub fn report(&self) {
        for (operation, count) in self.operations.counts() {
            if count == 0 && self.options.nr_operations >= 20_000 {
                fail!("{operation:?} was never done");
            }
        }
        let probes = |count: fn(&Mailbox) -> &AtomicU64| {
            self.privates.iter().map(|private| count(mailbox(private)).load(Ordering::Relaxed)).sum::<u64>()
        };
        let (nr_found, nr_absent) = (probes(|of| &of.nr_found), probes(|of| &of.nr_absent));
        if (nr_found == 0 || nr_absent == 0) && self.options.nr_operations >= 20_000 {
            fail!("of the probes {nr_found} found a page and {nr_absent} none: one of both never happened");
        }
        let [nr_split, nr_recovered] = self.operations.nr_replaced();
        if (nr_split == 0 || nr_recovered == 0) && self.options.nr_operations >= 20_000 {
            fail!("{nr_split} huge leaves were split, and {nr_recovered} recovered: one of both never happened");
        }
        let faults = self.vm.stats().faults;
        let (nr_moved, nr_checks) = (self.operations.nr_moved(), self.operations.nr_checks());
        say!(
            "  {} operations, {} accesses, {faults} faults, {nr_moved} pages moved, {nr_split} huge leaves split and \
             {nr_recovered} recovered, {nr_checks} copies compared, {nr_found} of {} probes found a page",
            self.nr_operations(),
            self.nr_accesses(),
            nr_found + nr_absent
        );
    }
}
