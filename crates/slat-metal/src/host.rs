//! What the engine needs from this hypervisor: the one file that an embedder reads first.
//!
//! # Memory
//! All of it comes from the image's allocator, and memory is mapped to itself: a host-physical
//! address is a pointer.
//!
//! # The flush
//! Each CPU has a [`Presence`]: 0 while it is outside of the guest, else the number of the last
//! flush that it had executed when it entered. A flush
//! 1. takes the next number,
//! 2. kicks the CPUs in the guest that entered with a smaller one, by an interrupt,
//! 3. waits until these have left.
//!
//! A CPU that enters stores its number and then reads the number of flushes. If they differ, the
//! entry flushes: by VMRUN itself, or by INVEPT. A flush waits for no CPU outside of the guest. A
//! CPU inside leaves at the interrupt, whatever the guest does. An interrupt that comes after the
//! number is stored is kept until the CPU is in the guest
//! ([`VirtualCpu::KICK`](crate::virtual_cpu::VirtualCpu::KICK)).
//!
//! A CPU runs one VM, from the creation of its [`Presence`] on. A hypervisor that switches VMs
//! gives each an ASID of its own, or forgets what the CPU has executed when it changes VMs.
//!
//! # The log of modifications
//! A CPU that logs what it modifies (Intel's page-modification log) passes its log on when it
//! leaves the guest, before its presence says so. So `Cpus::drain` makes the CPUs in the guest
//! leave once, and waits for no other.
//!
//! # What a CPU may still hold
//! QEMU and Bochs flush at each entry, so they do not show an entry that should have flushed and
//! did not. Each CPU keeps the number of the last flush that the control block has asked the
//! hardware for. A stay in the guest with a smaller number than that of the flushes at entry is
//! counted ([`Cpus::nr_stale_entries`]), and ends the run.

#![expect(unsafe_code, reason = "promises memory and flushes to the engine")]

use alloc::alloc::{alloc, dealloc};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use slat::format::LeafAttributes;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, PageSize, Pfn};
use spin::Mutex;

use crate::ram::Ram;
use crate::x86::apic::{self, Kick};
use crate::x86::boot::MAX_CPUS;
use crate::x86::clock;

/// What is left out on purpose, to see that the checks notice it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Control {
    /// Nothing.
    #[default]
    None,
    /// The flush does nothing.
    NoFlush,
    /// The flush counts, but kicks no CPU.
    NoKick,
    /// An entry does not flush.
    NoEntryFlush,
    /// Pages of the dirty log are copied before the log is taken.
    CopyBeforeLog,
}

/// What an entry has to flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// Nothing.
    None,
    /// All translations of this CPU.
    All,
}

/// One CPU, as the flush sees it. On a cache line of its own, since the CPU writes it at each
/// entry.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Entered {
    /// 0 outside of the guest, else the flushes that it had seen when it entered.
    flushes: AtomicU64,
    /// The flushes that its last entry saw. The CPU's own.
    seen: AtomicU64,
    /// The flushes as of the last one that the hardware was asked for. The CPU's own.
    executed: AtomicU64,
    apic_id: AtomicU32,
    nr_exits: AtomicU64,
    /// What the CPU has logged, until it is drained.
    modifications: Mutex<Vec<Gpa>>,
}

/// The CPUs that may run one VM.
#[derive(Debug)]
pub struct Cpus {
    /// Flushes so far, from 1.
    flushes: AtomicU64,
    entered: [Entered; MAX_CPUS],
    nr_stale_entries: AtomicU64,
    control: Control,
    kick: Kick,
}

impl Cpus {
    /// CPUs that are all outside of the guest, and that `kick` makes leave it.
    pub fn new(control: Control, kick: Kick) -> Arc<Cpus> {
        Arc::new(Cpus {
            flushes: AtomicU64::new(1),
            entered: Default::default(),
            nr_stale_entries: AtomicU64::new(0),
            control,
            kick,
        })
    }

    /// Entries that left out a flush.
    pub fn nr_stale_entries(&self) -> u64 {
        self.nr_stale_entries.load(Ordering::Relaxed)
    }

    /// Makes all CPUs leave the guest that are there now, without a flush.
    pub fn kick_all(&self) {
        for cpu in self.entered.iter().filter(|cpu| cpu.flushes.load(Ordering::SeqCst) != 0) {
            apic::kick(cpu.apic_id.load(Ordering::Relaxed), self.kick);
        }
    }

    fn flush(&self) {
        if self.control == Control::NoFlush {
            return;
        }
        // SeqCst, here and in `enter`: either the entry reads the new number and flushes, or this
        // reads that the CPU is in the guest, and kicks it.
        let flushes = self.flushes.fetch_add(1, Ordering::SeqCst) + 1;
        if self.control == Control::NoKick {
            return;
        }
        let is_old = |cpu: &&Entered| (1..flushes).contains(&cpu.flushes.load(Ordering::SeqCst));
        for cpu in self.entered.iter().filter(is_old) {
            // Relaxed: written before the CPU first entered.
            apic::kick(cpu.apic_id.load(Ordering::Relaxed), self.kick);
        }
        // Acquire is part of SeqCst: what the guest wrote before it left is visible now.
        while self.entered.iter().any(|cpu| is_old(&cpu)) {
            core::hint::spin_loop();
        }
    }
}

impl Cpus {
    /// Passes to `log` all that CPUs have modified, and logged, before this call.
    fn drain(&self, log: &mut dyn FnMut(&[Gpa])) {
        for cpu in &self.entered {
            let nr_exits = cpu.nr_exits.load(Ordering::SeqCst);
            let is_inside = || cpu.flushes.load(Ordering::SeqCst) != 0;
            if is_inside() {
                apic::kick(cpu.apic_id.load(Ordering::Relaxed), self.kick);
                while is_inside() && cpu.nr_exits.load(Ordering::SeqCst) == nr_exits {
                    core::hint::spin_loop();
                }
            }
            let logged = core::mem::take(&mut *cpu.modifications.lock());
            log(&logged);
        }
    }
}

/// Whether the calling CPU is in the guest.
#[derive(Debug)]
pub struct Presence {
    cpus: Arc<Cpus>,
    cpu: usize,
}

impl Presence {
    /// That of CPU `cpu`, which is the calling one, below [`MAX_CPUS`].
    pub fn new(cpus: &Arc<Cpus>, cpu: usize) -> Presence {
        cpus.entered[cpu].apic_id.store(apic::id(), Ordering::Relaxed);
        Presence { cpus: cpus.clone(), cpu }
    }

    /// The CPU enters the guest next. Returns what the entry must flush. From here on until the
    /// guest is entered a kick is kept.
    pub fn enter(&self) -> Flush {
        let Cpus { flushes, entered, control, .. } = &*self.cpus;
        let cpu = &entered[self.cpu];
        // Relaxed: this CPU's own.
        let seen = cpu.seen.load(Ordering::Relaxed);
        cpu.flushes.store(seen.max(1), Ordering::SeqCst);
        let current = flushes.load(Ordering::SeqCst);
        if current == seen {
            return Flush::None;
        }
        cpu.seen.store(current, Ordering::Relaxed);
        cpu.flushes.store(current, Ordering::SeqCst);
        if *control == Control::NoEntryFlush { Flush::None } else { Flush::All }
    }

    /// Keeps what the CPU has modified since its last exit, according to its log. To be called
    /// before [`leave`](Presence::leave).
    pub fn log(&self, modified: impl Iterator<Item = Gpa>) {
        self.cpus.entered[self.cpu].modifications.lock().extend(modified);
    }

    /// The CPU has left the guest. `flushed` is what the hardware was asked for at entry.
    pub fn leave(&self, flushed: Flush) {
        let cpu = &self.cpus.entered[self.cpu];
        // Relaxed: this CPU's own.
        let seen = cpu.seen.load(Ordering::Relaxed);
        match flushed {
            Flush::All => cpu.executed.store(seen, Ordering::Relaxed),
            Flush::None if cpu.executed.load(Ordering::Relaxed) < seen => {
                self.cpus.nr_stale_entries.fetch_add(1, Ordering::Relaxed);
            }
            Flush::None => {}
        }
        // SeqCst: before the presence says so. The CPU's own to write.
        cpu.nr_exits.store(cpu.nr_exits.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
        // Release, as part of SeqCst: what the guest did is before it, for a flush that waits.
        cpu.flushes.store(0, Ordering::SeqCst);
    }
}

/// What a memslot's memory comes from.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Memory whose frames come at first use, and may move.
    Ram(Arc<Ram>),
    /// Memory that stays where it is.
    Fixed(Fixed),
}

/// Frames one after the other: memory that stays, or the registers of a device.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// The frame of page 0, and that while it is private.
    first: Pfn,
    private: Pfn,
    attributes: LeafAttributes,
}

impl Backing {
    /// Memory from the frame `first` on, which the guest may use as `attributes` say. Private pages
    /// are in the frames from `private` on.
    ///
    /// # Safety
    /// As many frames as the memslot has pages may be the guest's for as long as the memslot
    /// exists.
    pub unsafe fn fixed(first: Pfn, private: Pfn, attributes: LeafAttributes) -> Backing {
        Backing::Fixed(Fixed { first, private, attributes })
    }
}

/// Lets an emulator that runs the CPUs in turns go to the next one. Hardware needs no such thing.
fn let_others_run() {
    core::hint::spin_loop();
}

/// The host of one VM.
#[derive(Debug)]
pub struct MetalHost {
    /// The CPUs that run it.
    pub cpus: Arc<Cpus>,
}

// SAFETY: tables are the allocator's. Frames of `Ram` change between an invalidation and its drop
// alone (`Ram::move_page`), others never. `flush` returns when each CPU that had entered before has
// left, and each entry after it flushes. Nothing unwinds: the image aborts.
unsafe impl Host for MetalHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        // The machine has one node, and the allocator never blocks.
        // SAFETY: a page-table page has a size.
        let table = unsafe { alloc(layout) };
        (!table.is_null()).then(|| Hpa(table.expose_provenance() as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: `allocate_table` returned it, with this layout, as the caller promises.
        unsafe { dealloc(table.0 as *mut u8, layout) };
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        table.0 as *mut u8
    }

    fn resolve(&self, backing: &Backing, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let answer = match backing {
            Backing::Ram(ram) => ram.resolve(page),
            &Backing::Fixed(Fixed { first, attributes, .. }) => {
                Ok(Resolved { attributes, ..Resolved::memory(Pfn(first.0 + page), PageSize::Size4K) })
            }
        };
        // Between the answer and what the engine does with it.
        let_others_run();
        answer
    }

    fn resolve_private(
        &self,
        backing: &Backing,
        _gfn: Gfn,
        page: u64,
        _access: Access,
    ) -> Result<Resolved, Unresolved> {
        match backing {
            Backing::Ram(_) => Err(Unresolved::Gone),
            Backing::Fixed(Fixed { private, .. }) => Ok(Resolved::memory(Pfn(private.0 + page), PageSize::Size4K)),
        }
    }

    fn resolve_resident(&self, backing: &Backing, _gfn: Gfn, page: u64, _access: Access) -> Option<Resolved> {
        match backing {
            Backing::Ram(ram) if ram.is_allocated(page) => ram.resolve(page).ok(),
            Backing::Ram(_) | Backing::Fixed(_) => None,
        }
    }

    fn flush(&self, _ranges: &[GfnRange]) {
        let_others_run();
        self.cpus.flush();
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.cpus.drain(log);
    }

    fn needs_zapped_leaves(&self) -> bool {
        false
    }

    fn yield_now(&self) {
        core::hint::spin_loop();
    }

    fn timestamp_ns(&self) -> u64 {
        clock::now_ns()
    }
}
