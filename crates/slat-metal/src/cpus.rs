//! The CPUs that run a guest: which of them are in it, how they are made to leave, and how a flush
//! by interrupts makes sure that none keeps a stale translation.
//!
//! # A flush by interrupts
//! Each CPU has a [`Presence`]: 0 while it is outside of the guest, else the number of the last
//! flush that it had executed when it entered. A flush
//! 1. takes the next number,
//! 2. kicks the CPUs in the guest that entered with a smaller one, by an interrupt,
//! 3. waits until these have left.
//!
//! A CPU that enters stores its number and then reads the number of flushes. If they differ, the
//! entry flushes: by VMRUN itself, by INVEPT, or by HFENCE.GVMA. A flush waits for no CPU outside
//! of the guest. A CPU inside leaves at the interrupt, whatever the guest does. An interrupt that
//! comes after the number is stored is kept until the CPU is in the guest
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
//! did not. Each CPU keeps the number of the last flush that its entry has asked the hardware for.
//! A stay in the guest with a smaller number than that of the flushes at entry is counted, and ends
//! the run ([`Cpus::check`]).
//!
//! Where flushes are by instructions that reach all CPUs, an emulator's CPUs show a flush that is
//! missing. They do not show that a CPU has left out the flush of the page that it faulted on, nor
//! that an entry was made before the flush of the one that it replaces: [`Presence::resume`] finds
//! these (`held`).

#![expect(unsafe_code, reason = "a presence is a promise about a CPU")]

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use slat::format::Format;
use slat::{GfnRange, Gpa};
use spin::Mutex;

use crate::arch::{self, Kick};
use crate::boot::MAX_CPUS;
use crate::fail;
use crate::held::{Flushes, Held};
use crate::host::Control;
use crate::operations::MetalVm;

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
    target: AtomicU32,
    /// How often it has passed on what it logged.
    nr_logs: AtomicU64,
    /// The frame number, plus one, of the page that the CPU flushed last by itself. The CPU's own.
    flushed_page: AtomicU64,
    /// Whether the CPU replaces huge leaves or page-table pages, for a [`Control`]. Its own.
    is_breaking: AtomicBool,
    /// What it may hold. The CPU's own.
    held: Mutex<Held>,
    /// What the CPU has logged, until it is drained.
    modifications: Mutex<Vec<Gpa>>,
}

/// The CPUs that may run one VM.
#[derive(Debug)]
pub struct Cpus {
    /// Flushes so far, from 2: what no CPU has seen when it begins.
    flushes: AtomicU64,
    entered: [Entered; MAX_CPUS],
    /// Held for the whole of a drain: a call that returns has passed on, or has waited for another
    /// call to pass on, all that was logged before.
    drain: Mutex<()>,
    nr_stale_entries: AtomicU64,
    /// Faults after which a CPU went on without a flush of the page.
    nr_stale_pages: AtomicU64,
    /// Leaves that a CPU may have had beside those that they replace.
    nr_conflicts: AtomicU64,
    /// Flushes that were carried out.
    carried_out: Flushes,
    control: Control,
    kick: Kick,
}

impl Cpus {
    /// CPUs that are all outside of the guest, and that `kick` makes leave it.
    pub fn new(control: Control, kick: Kick) -> Arc<Cpus> {
        Arc::new(Cpus {
            flushes: AtomicU64::new(2),
            entered: Default::default(),
            drain: Mutex::new(()),
            nr_stale_entries: AtomicU64::new(0),
            nr_stale_pages: AtomicU64::new(0),
            nr_conflicts: AtomicU64::new(0),
            carried_out: Flushes::new(),
            control,
            kick,
        })
    }

    /// Ends the run if a CPU has left out a flush, or may have had two leaves for one page.
    pub fn check(&self) {
        let number = |of: &AtomicU64| Some(of.load(Ordering::Relaxed)).filter(|&number| number != 0);
        if let Some(nr_entries) = number(&self.nr_stale_entries) {
            fail!(EntryFlush; "{nr_entries} entries into the guest left out a flush");
        }
        if let Some(nr_faults) = number(&self.nr_stale_pages) {
            fail!(LocalFlush; "after {nr_faults} faults a CPU went on without a flush of the page");
        }
        if let Some(nr_leaves) = number(&self.nr_conflicts) {
            fail!(
                BreakFlush;
                "{nr_leaves} times a CPU may have had a leaf beside one of another size: no flush was between both"
            );
        }
    }

    /// `ranges` are flushed on all CPUs.
    pub(crate) fn note_flush(&self, ranges: &[GfnRange]) {
        if arch::BREAKS_BEFORE_MAKE {
            self.carried_out.note(ranges);
        }
    }

    /// The calling CPU has flushed the page at `gpa` for itself.
    pub(crate) fn note_local_flush(&self, gpa: Gpa) {
        // Relaxed: this CPU's own.
        self.entered[arch::cpu_number()].flushed_page.store(gpa.gfn().0 + 1, Ordering::Relaxed);
    }

    /// The calling CPU may hold the translation of `gpa` from now on, of its own accord: CPUs
    /// translate what they guess. Checks that it may hold no other one, in formats with break
    /// before make.
    pub(crate) fn hold<F: Format>(&self, vm: &MetalVm<F>, gpa: Gpa) {
        if !F::BREAK_BEFORE_MAKE {
            return;
        }
        let nr_flushes = self.carried_out.nr();
        let mut held = self.entered[arch::cpu_number()].held.lock();
        if let Ok(Some(found)) = vm.translate(gpa)
            && !held.take(&self.carried_out, gpa.gfn(), found.size, nr_flushes)
        {
            self.nr_conflicts.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the calling CPU is inside of [`while_breaking`](Cpus::while_breaking).
    pub(crate) fn is_breaking(&self) -> bool {
        self.entered[arch::cpu_number()].is_breaking.load(Ordering::Relaxed)
    }

    /// Does `work`, which replaces huge leaves by page-table pages or the other way.
    pub(crate) fn while_breaking<T>(&self, work: impl FnOnce() -> T) -> T {
        let is_breaking = &self.entered[arch::cpu_number()].is_breaking;
        is_breaking.store(true, Ordering::Relaxed);
        let result = work();
        is_breaking.store(false, Ordering::Relaxed);
        result
    }

    /// Makes all CPUs leave the guest that are there now, without a flush.
    pub fn kick_all(&self) {
        for cpu in self.entered.iter().filter(|cpu| cpu.flushes.load(Ordering::SeqCst) != 0) {
            arch::kick(cpu.target.load(Ordering::Relaxed), self.kick);
        }
    }

    /// What is left out on purpose.
    pub fn control(&self) -> Control {
        self.control
    }

    /// Begins a flush: each CPU that enters from now on flushes. Returns those that are in the
    /// guest.
    pub fn begin_flush(&self) -> u64 {
        // SeqCst, as in `flush_by_kicks`.
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.inside()
    }

    /// The CPUs that are in the guest, by bits. A CPU that is not among them, and enters, observes
    /// what the caller has stored before by SeqCst.
    pub fn inside(&self) -> u64 {
        let is_inside = |cpu: &Entered| u64::from(cpu.flushes.load(Ordering::SeqCst) != 0);
        self.entered.iter().rev().fold(0, |bits, cpu| bits << 1 | is_inside(cpu))
    }

    /// Returns when each CPU that was in the guest has left it. Each that enters from now on
    /// flushes.
    pub fn flush_by_kicks(&self) {
        // SeqCst, here and in `enter`: either the entry reads the new number and flushes, or this
        // reads that the CPU is in the guest, and kicks it.
        let flushes = self.flushes.fetch_add(1, Ordering::SeqCst) + 1;
        if self.control == Control::NoKick {
            return;
        }
        let is_old = |cpu: &&Entered| (1..flushes).contains(&cpu.flushes.load(Ordering::SeqCst));
        for cpu in self.entered.iter().filter(is_old) {
            // Relaxed: written before the CPU first entered.
            arch::kick(cpu.target.load(Ordering::Relaxed), self.kick);
        }
        // Acquire is part of SeqCst: what the guest wrote before it left is visible now.
        while self.entered.iter().any(|cpu| is_old(&cpu)) {
            core::hint::spin_loop();
        }
    }
}

impl Cpus {
    /// Passes to `log` all that CPUs have modified, and logged, before this call.
    pub(crate) fn drain(&self, log: &mut dyn FnMut(&[Gpa])) {
        let _one_at_a_time = self.drain.lock();
        for cpu in &self.entered {
            let nr_logs = cpu.nr_logs.load(Ordering::SeqCst);
            let is_inside = || cpu.flushes.load(Ordering::SeqCst) != 0;
            if is_inside() {
                arch::kick(cpu.target.load(Ordering::Relaxed), self.kick);
                while is_inside() && cpu.nr_logs.load(Ordering::SeqCst) == nr_logs {
                    core::hint::spin_loop();
                }
            }
            let logged = core::mem::take(&mut *cpu.modifications.lock());
            log(&logged);
        }
    }
}

/// Whether the calling CPU is in the guest. It stays on its CPU.
#[derive(Debug)]
pub struct Presence {
    cpus: Arc<Cpus>,
    cpu: usize,
    _stays_on_its_cpu: PhantomData<*mut ()>,
}

/// Addresses that a CPU keeps before it looks for those that it has twice.
const MAX_KEPT: usize = 4096;

impl Presence {
    /// That of CPU `cpu`, which is the calling one, below [`MAX_CPUS`].
    ///
    /// # Safety
    /// There is no other one of the same number of these CPUs: it would say that the CPU is outside
    /// of the guest while it is not, and a flush would pass it by.
    pub unsafe fn new(cpus: &Arc<Cpus>, cpu: usize) -> Presence {
        let entered = &cpus.entered[cpu];
        entered.target.store(arch::cpu_number() as u32, Ordering::Relaxed);
        // Relaxed: this CPU's own. Not 0, and less than any flush: the first entry flushes.
        entered.seen.store(1, Ordering::Relaxed);
        Presence { cpus: cpus.clone(), cpu, _stays_on_its_cpu: PhantomData }
    }

    /// The guest goes on after a fault at `gpa`, which `vm` has handled: checks that the CPU has
    /// flushed the page, and what it may hold of the block, in formats that have such rules.
    pub fn resume<F: Format>(&self, vm: &MetalVm<F>, gpa: Gpa) {
        let cpu = &self.cpus.entered[self.cpu];
        // Relaxed: this CPU's own.
        if F::NEEDS_LOCAL_FLUSH && cpu.flushed_page.swap(0, Ordering::Relaxed) != gpa.gfn().0 + 1 {
            self.cpus.nr_stale_pages.fetch_add(1, Ordering::Relaxed);
        }
        self.cpus.hold(vm, gpa);
    }

    /// The CPU forgets what it has flushed: its next entry flushes. For a CPU that gets other
    /// registers of virtualization, which may have been used before.
    #[cfg(target_arch = "x86_64")]
    pub fn forget(&self) {
        // Relaxed: this CPU's own. As at first: 0 would say that an entry is outside of the guest.
        self.cpus.entered[self.cpu].seen.store(1, Ordering::Relaxed);
    }

    /// The CPU enters the guest next. Returns what the entry must flush. From here on until the
    /// guest is entered a kick is kept.
    pub fn enter(&self) -> Flush {
        let Cpus { flushes, entered, control, .. } = &*self.cpus;
        let cpu = &entered[self.cpu];
        // Relaxed: this CPU's own.
        let seen = cpu.seen.load(Ordering::Relaxed);
        cpu.flushes.store(seen, Ordering::SeqCst);
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
        let cpu = &self.cpus.entered[self.cpu];
        let mut kept = cpu.modifications.lock();
        let old_len = kept.len();
        kept.extend(modified);
        // Where no memslot logs, nothing drains, and pages come again and again. There are not more
        // than the guest has. Looked for whenever another `MAX_KEPT` have come.
        if kept.len() / MAX_KEPT != old_len / MAX_KEPT {
            kept.sort_unstable();
            kept.dedup();
        }
        drop(kept);
        // SeqCst: after what is kept, for a drain. The CPU's own to write.
        cpu.nr_logs.store(cpu.nr_logs.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
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
        // Release, as part of SeqCst: what the guest did is before it, for a flush that waits.
        cpu.flushes.store(0, Ordering::SeqCst);
    }
}
