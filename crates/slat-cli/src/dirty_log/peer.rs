//! The peers: dirty-log as KVM had it before and after the year 2012, written anew over the
//! page tables of the software CPU.
//!
//! All of them have
//! - a slots lock of the VM, which a call holds from its begin to its end;
//! - an MMU lock, which each fault holds, and each call while it write-protects pages;
//! - a *reverse map*: for each page of the memslot the leaf PTE that maps it;
//! - one bit for each page.
//!
//! A fault restores W in the leaf PTE and sets the page's bit, under the MMU lock. The flush is
//! that of the engine's host, under the lock as it was then.
//!
//! - *srcu-copy*, the old way. The log has two halves. A call clears the half that is not in use,
//!   and publishes a copy of the memslot set with that half. Then it waits for a grace period,
//!   after which no fault marks the old half. It finds the leaf PTEs of few dirty pages by the
//!   reverse map; if dirty pages are many, it visits all leaf PTEs.
//!   - The *threshold* is the number of page-table pages, as it was: with fewer dirty pages than
//!     page-table pages the call uses the reverse map. A slot of 1 GiB has 515 of them, and the
//!     published time rises eightfold from 512 dirty pages to 1024.
//!   - The *grace period* waits for the vCPUs that run (`grace`).
//!   - Not known: whether the MMU lock was released between pages. Here a call takes it once.
//! - *xchg*: a call exchanges each word of the log in use with zero, unless it is zero. It copies
//!   and publishes nothing, and waits for no reader.
//! - *xchg16*: the same, two words at a time by the 16-byte compare-and-exchange (x86 has no other
//!   exchange of 16 bytes).
//!
//! They are as fast as that design allows: a call writes the log directly into the caller's buffer,
//! and it write-protects by a plain store where hardware has no bit left to set in the leaf PTE.

mod exchange16;
mod grace;
mod slots;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use slat::format::{Hardware, LeafAttributes};
use slat::{Gfn, GfnRange, Gpa, Hpa, Level, Outcome};
use slat_machine::hardware::commit::{FlushDomain, Port};
use slat_machine::hardware::cpu::{Cpu, FaultHandler, flush_local};
use slat_machine::hardware::tlb::Geometry;
use slat_machine::hardware::walk::{Fault, HardwareFormat};
use slat_machine::memory::Backing;
use slat_machine::memory::phys;

use super::Method;
use super::subject::{DirtyLog, Guest, READS_PER_SLICE, SoftwareGuest, Subject, gpa, page};
use crate::failure::Failure;
use crate::live::lock;
pub(super) use exchange16::is_available as has_exchange16;
use grace::InGuest;
use slots::{Log, Slots};

const TABLE_ENTRIES: usize = 512;

/// A page-table page.
#[repr(C, align(4096))]
struct Table([AtomicU64; TABLE_ENTRIES]);

impl Table {
    fn hpa(&self) -> Hpa {
        phys::hpa_of(self)
    }

    /// Links `below` in the PTE of `gpa` in this page-table page of level `level`.
    fn link<F: HardwareFormat>(&self, level: Level, gpa: Gpa, below: &Table) {
        let shift = Gfn::SHIFT + 9 * (u32::from(level.0) - 1);
        let index = (gpa.0 >> shift) as usize % TABLE_ENTRIES;
        self.0[index].store(F::table(below.hpa()).0, Ordering::Relaxed);
    }
}

/// New, empty page-table pages. They live as long as the command, so a reverse-map entry is a plain
/// reference to its leaf PTE, as it is a plain pointer in a kernel.
fn tables(count: usize) -> &'static [Table] {
    let table = |_| Table([const { AtomicU64::new(0) }; TABLE_ENTRIES]);
    Vec::leak((0..count).map(table).collect())
}

/// A VM as of 2012: one memslot that logs, mapped for good.
struct PeerVm<F> {
    slots_lock: Mutex<()>,
    mmu_lock: Mutex<()>,
    slots: Slots,
    /// The page-table pages with the leaf PTEs, in the order of the memslot's pages.
    leaf_tables: &'static [Table],
    /// How many page-table pages there are in all.
    nr_tables: u64,
    /// The leaf PTE of each page.
    rmap: Box<[&'static AtomicU64]>,
    flush_domain: Arc<FlushDomain>,
    range: GfnRange,
    _format: PhantomData<fn() -> F>,
}

impl<F: HardwareFormat> PeerVm<F> {
    /// Returns a VM on `memory` with all pages mapped and write-protected, and the root of its page
    /// tables.
    fn new(memory: &Backing, flush_domain: Arc<FlushDomain>) -> (PeerVm<F>, Hpa) {
        let nr_pages = (memory.size_bytes() >> Gfn::SHIFT) as u32;
        let leaf_tables = tables(nr_pages.div_ceil(TABLE_ENTRIES as u32) as usize);
        let leaves = leaf_tables.iter().flat_map(|table| &table.0);
        let rmap: Box<[&AtomicU64]> = leaves.take(nr_pages as usize).collect();
        let attributes = F::attribute_bits(LeafAttributes::default(), &Hardware::default()).unwrap_or(0);
        for (number, leaf) in rmap.iter().enumerate() {
            let frame = phys::hpa_of(memory.as_ptr().wrapping_add(number << Gfn::SHIFT));
            leaf.store(F::leaf(frame.pfn(), Level::L4K).0 | attributes, Ordering::Relaxed);
        }
        // The memslot begins at a multiple of 1 GiB, and ends below the 512 GiB of one page-table
        // page of level 3.
        let nr_above = usize::from(F::ROOT_LEVEL.0) - 2;
        let upper = tables(nr_above + leaf_tables.len().div_ceil(TABLE_ENTRIES));
        // From level 3 up to the root.
        let (above, level_2) = upper.split_at(nr_above);
        let (level_3, root) = (&above[0], &above[nr_above - 1]);
        for (pair, level) in above.windows(2).zip(4..) {
            pair[1].link::<F>(Level(level), gpa(0), &pair[0]);
        }
        for (number, table) in leaf_tables.iter().enumerate() {
            let (above, at) = (&level_2[number / TABLE_ENTRIES], gpa((number * TABLE_ENTRIES) as u32));
            level_3.link::<F>(Level(3), at, above);
            above.link::<F>(Level(2), at, table);
        }
        let vm = PeerVm {
            slots_lock: Mutex::default(),
            mmu_lock: Mutex::default(),
            slots: Slots::new(nr_pages),
            leaf_tables,
            nr_tables: (leaf_tables.len() + upper.len()) as u64,
            rmap,
            flush_domain,
            range: GfnRange::new(Gfn(gpa(0).0 >> Gfn::SHIFT), nr_pages.into()),
            _format: PhantomData,
        };
        // Of a root with 2048 PTEs, the memslot needs the first 512 only.
        (vm, root.hpa())
    }

    /// Write-protects a leaf PTE. The caller holds the MMU lock.
    #[inline]
    fn protect(leaf: &AtomicU64) {
        // Without a dirty bit hardware sets only A.
        let set = F::ACCESSED | if F::HAS_DIRTY_BIT { F::DIRTY } else { 0 };
        let entry = leaf.load(Ordering::Relaxed);
        if entry & F::WRITABLE == 0 {
        } else if entry & set == set {
            // Hardware has no bit left to set, and all software takes the lock, so the store
            // overwrites nothing. Release costs nothing on x86, and orders nothing that the flush
            // does not order.
            leaf.store(entry & !F::WRITABLE, Ordering::Release);
        } else {
            leaf.fetch_and(!F::WRITABLE, Ordering::SeqCst);
        }
    }

    #[inline]
    fn protect_page(&self, page: usize) {
        Self::protect(self.rmap[page]);
    }

    /// Visits the bits of a word: finds the lowest, clears it, repeats.
    #[inline]
    fn protect_mask(&self, first_page: usize, mut mask: u64) {
        while mask != 0 {
            self.protect_page(first_page + mask.trailing_zeros() as usize);
            mask &= mask - 1;
        }
    }

    /// Flushes the memslot after pages were write-protected.
    fn flush(&self) {
        self.flush_domain.flush(&[self.range]);
    }

    /// Exchanges each word with zero.
    fn exchange(&self, out: &mut [u64]) {
        let _mmu = lock(&self.mmu_lock);
        let mut any = 0;
        let log = self.slots.log_in_use();
        for ((word, out), first_page) in log.words().iter().zip(out).zip((0..).step_by(64)) {
            *out = 0;
            if word.load(Ordering::Relaxed) != 0 {
                *out = word.swap(0, Ordering::SeqCst);
                self.protect_mask(first_page, *out);
                any |= *out;
            }
        }
        if any != 0 {
            self.flush();
        }
    }

    /// Exchanges two words at a time.
    fn exchange16(&self, out: &mut [u64]) {
        let _mmu = lock(&self.mmu_lock);
        let mut any = 0;
        let log = self.slots.log_in_use();
        for ((pair, out), first_page) in log.pairs.iter().zip(out.chunks_mut(2)).zip((0..).step_by(128)) {
            let taken = exchange16::take(pair);
            for ((taken, out), first_page) in taken.into_iter().zip(out).zip([first_page, first_page + 64]) {
                *out = taken;
                self.protect_mask(first_page, taken);
                any |= taken;
            }
        }
        if any != 0 {
            self.flush();
        }
    }

    /// Publishes a copy of the memslot set with the other half of the log.
    fn copy_slots(&self, out: &mut [u64]) {
        let nr_dirty = self.slots.log_in_use().nr_dirty();
        if nr_dirty == 0 {
            out.fill(0);
            return;
        }
        let log: &Log = self.slots.swap_log(|| self.flush_domain.flush(&[]));
        let _mmu = lock(&self.mmu_lock);
        if nr_dirty < self.nr_tables {
            for (word, first_page) in log.words().iter().zip((0..).step_by(64)) {
                self.protect_mask(first_page, word.load(Ordering::Relaxed));
            }
        } else {
            self.leaf_tables.iter().flat_map(|table| &table.0).for_each(Self::protect);
        }
        self.flush();
        log.copy_to(out);
    }

    fn get_dirty_log(&self, method: Method, out: &mut [u64]) {
        let _slots = lock(&self.slots_lock);
        match method {
            Method::SrcuCopy => self.copy_slots(out),
            Method::Xchg16 => self.exchange16(out),
            Method::Xchg | Method::Slat | Method::SlatLeaf | Method::Kvm => self.exchange(out),
        }
    }
}

struct PeerVcpu<F>(Arc<PeerVm<F>>);

impl<F: HardwareFormat> FaultHandler for PeerVcpu<F> {
    fn handle_fault(&mut self, Fault { gpa, .. }: Fault) -> Result<Outcome, slat::error::FaultError> {
        let vm = &*self.0;
        let page = page(gpa);
        let guard = vm.slots.enter();
        let mmu = lock(&vm.mmu_lock);
        // All pages are mapped: only W can be missing.
        vm.rmap[page as usize].fetch_or(F::WRITABLE, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        guard.log().mark(page);
        drop(mmu);
        if F::NEEDS_LOCAL_FLUSH {
            flush_local(gpa);
        }
        Ok(Outcome::Resume)
    }
}

struct PeerGuest<F: HardwareFormat> {
    vm: Arc<PeerVm<F>>,
    guest: SoftwareGuest<Cpu<PeerVcpu<F>, F>>,
    /// While it is in its guest.
    stay: Option<InGuest>,
}

impl<F: HardwareFormat> PeerGuest<F> {
    /// Is in the guest. If it was kicked there, it exits before.
    #[inline]
    fn enter(&mut self) {
        let grace = self.vm.slots.grace();
        if self.stay.as_ref().is_some_and(|stay| grace.is_kicked(stay)) {
            self.exit();
        }
        if self.stay.is_none() {
            self.stay = Some(self.vm.slots.grace().enter_guest());
        }
    }
}

impl<F: HardwareFormat> Guest for PeerGuest<F> {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        pages.iter().try_for_each(|&page| {
            self.enter();
            self.guest.write_page(page, value)
        })
    }

    fn run(&mut self) -> Result<(), Failure> {
        (0..READS_PER_SLICE).try_for_each(|_| {
            self.enter();
            self.guest.read_next()
        })
    }

    fn exit(&mut self) {
        self.guest.exit();
        if let Some(stay) = self.stay.take() {
            self.vm.slots.grace().exit_guest(stay);
        }
    }

    fn nr_faults(&self) -> Option<u64> {
        self.guest.nr_faults()
    }
}

/// The log of a peer, got by a method.
struct PeerLog<F> {
    method: Method,
    vm: Arc<PeerVm<F>>,
}

impl<F: HardwareFormat> DirtyLog for PeerLog<F> {
    fn get(&self, log: &mut [u64]) -> Result<Option<u64>, Failure> {
        self.vm.get_dirty_log(self.method, log);
        Ok(None)
    }

    fn grace_period(&self) -> Option<f64> {
        (self.method == Method::SrcuCopy).then(|| self.vm.slots.last_grace_s())
    }
}

/// A peer whose call works by `method`, with `nr_others` vCPUs beside the one that writes.
pub(super) fn peer<F: HardwareFormat>(method: Method, memory: &Backing, nr_others: u16) -> Result<Subject, Failure> {
    let flush_domain = Arc::new(FlushDomain::new());
    let (vm, root) = PeerVm::<F>::new(memory, Arc::clone(&flush_domain));
    let vm = Arc::new(vm);
    let guests = (0..=nr_others).map(|_| {
        let (vcpu, port) = (PeerVcpu(Arc::clone(&vm)), Port::new(&flush_domain));
        let guest = SoftwareGuest::new(Cpu::new(vcpu, port, 1, root, Geometry::default()), memory);
        Box::new(PeerGuest { vm: Arc::clone(&vm), guest, stay: None }) as Box<dyn Guest>
    });
    Subject::new(method, PeerLog { method, vm: Arc::clone(&vm) }, guests.collect::<Vec<_>>())
}
