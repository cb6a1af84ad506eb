//! The peers: get-dirty-log as KVM had it before and after the year 2012, written anew over the tables of the software CPU.
//!
//! What they share: a lock of the VM for slots, held for the whole call, and one for the MMU, held by each fault and
//! while pages are protected; a *reverse map*, which has for each page of the slot the leaf that maps it; one bit for each
//! page. A fault gives the leaf its W bit back and sets the page's bit, under the lock of the MMU. The flush is that of
//! the engine's host, under the lock as it was then.
//!
//! - *srcu-copy*, the old way. The log has two halves. A call clears the one that is not in use, copies the set of slots
//!   with it in the place of the other, publishes the copy, and waits for a grace period: then no fault marks the old
//!   half any more, and it can be read in peace. Few dirty pages are protected by the reverse map; if they are many, it
//!   goes through all leaves.
//! - *xchg*: each word of the log in use is exchanged with zero, if it is not zero; nothing is copied or published, and
//!   nobody is waited for. The bits of the word are visited in one of three ways.
//! - *xchg16*: the same, two words at a time by the 16-byte compare-and-exchange (x86 has no other exchange of 16 bytes).
//!
//! They are as good as that design allows: the log is taken straight into the caller's buffer; the right to write is
//! taken by a plain store where hardware has no bit left to set in the leaf; and the grace period is a cheap one.

mod exchange16;
mod grace;
mod slots;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use slat::{Access, Gfn, GfnRange, Gpa, Hpa, Level, Outcome};
use slat_machine::commit::{FlushDomain, Port};
use slat_machine::cpu::{Cpu, FaultHandler, flush_local};
use slat_machine::memory::Backing;
use slat_machine::phys;
use slat_machine::tlb::Geometry;
use slat_machine::walk::HardwareFormat;

use super::Method;
use super::subject::{Subject, gpa, page, write_pages};
use crate::failure::Failure;
pub(super) use exchange16::is_available as has_exchange16;
use slots::{Log, Slots};

const TABLE_ENTRIES: usize = 512;

/// srcu-copy goes through all leaves if one page in so many is dirty. (KVM did it as soon as there were more dirty pages
/// than tables, one in 512: far too early.)
const MANY_DIRTY: u64 = 8;

/// A page of tables.
#[repr(C, align(4096))]
struct Table([AtomicU64; TABLE_ENTRIES]);

impl Table {
    fn hpa(&self) -> Hpa {
        phys::hpa_of(self)
    }

    /// Links `below` under the entry of `gpa` in this table of level `level`.
    fn link<F: HardwareFormat>(&self, level: Level, gpa: Gpa, below: &Table) {
        let shift = Gfn::SHIFT + 9 * (u32::from(level.0) - 1);
        let index = (gpa.0 >> shift) as usize % TABLE_ENTRIES;
        self.0[index].store(F::table(below.hpa()).0, Ordering::Relaxed);
    }
}

/// New tables, empty. They live as long as the command: each page's reverse map is then a plain reference to its leaf,
/// as it is a plain pointer in a kernel.
fn tables(count: usize) -> &'static [Table] {
    let table = |_| Table([const { AtomicU64::new(0) }; TABLE_ENTRIES]);
    Vec::leak((0..count).map(table).collect())
}

/// A VM in the manner of its time: one slot that logs, mapped for good.
struct PeerVm<F> {
    slots_lock: Mutex<()>,
    mmu_lock: Mutex<()>,
    slots: Slots,
    /// The tables of leaves, in the order of the slot's pages.
    leaf_tables: &'static [Table],
    /// The leaf of each page.
    rmap: Box<[&'static AtomicU64]>,
    flush_domain: Arc<FlushDomain>,
    range: GfnRange,
    _format: PhantomData<fn() -> F>,
}

impl<F: HardwareFormat> PeerVm<F> {
    /// A VM on `memory`, with all pages mapped and protected; and the root of its tables.
    fn new(memory: &Backing, flush_domain: Arc<FlushDomain>) -> (PeerVm<F>, Hpa) {
        let nr_pages = (memory.size_bytes() >> Gfn::SHIFT) as u32;
        let leaf_tables = tables(nr_pages.div_ceil(TABLE_ENTRIES as u32) as usize);
        let leaves = leaf_tables.iter().flat_map(|table| &table.0);
        let rmap: Box<[&AtomicU64]> = leaves.take(nr_pages as usize).collect();
        for (number, leaf) in rmap.iter().enumerate() {
            let frame = phys::hpa_of(memory.as_ptr().wrapping_add(number << Gfn::SHIFT));
            leaf.store(F::leaf(frame.pfn(), Level::L4K).0, Ordering::Relaxed);
        }
        // The slot begins at a multiple of 1 GiB, and ends below the 512 GiB of one table of level 3.
        let upper = tables(2 + leaf_tables.len().div_ceil(TABLE_ENTRIES));
        let [root, level_3, level_2 @ ..] = upper else { unreachable!("two tables and more were made") };
        root.link::<F>(Level(4), gpa(0), level_3);
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
            rmap,
            flush_domain,
            range: GfnRange::new(Gfn(gpa(0).0 >> Gfn::SHIFT), nr_pages.into()),
            _format: PhantomData,
        };
        // A root with three levels below is all that the slot needs; of one with 2048 entries only the first 512.
        (vm, if F::ROOT_LEVEL == Level(3) { level_3.hpa() } else { root.hpa() })
    }

    /// Takes the right to write from a leaf, under the lock of the MMU.
    #[inline]
    fn protect(leaf: &AtomicU64) {
        // Without a dirty bit there is only A.
        let set = F::ACCESSED | if F::HAS_DIRTY_BIT { F::DIRTY } else { 0 };
        let entry = leaf.load(Ordering::Relaxed);
        if entry & F::WRITABLE == 0 {
        } else if entry & set == set {
            // Hardware has nothing to set any more, and everybody else takes the lock: nothing can get lost. Release is
            // free on x86, and orders nothing that the flush does not.
            leaf.store(entry & !F::WRITABLE, Ordering::Release);
        } else {
            leaf.fetch_and(!F::WRITABLE, Ordering::SeqCst);
        }
    }

    #[inline]
    fn protect_page(&self, page: usize) {
        Self::protect(self.rmap[page]);
    }

    /// Visits the bits of a word by finding the lowest and clearing it.
    #[inline]
    fn protect_mask(&self, first_page: usize, mut mask: u64) {
        while mask != 0 {
            self.protect_page(first_page + mask.trailing_zeros() as usize);
            mask &= mask - 1;
        }
    }

    /// Visits them by the search for the next set bit that any bitmap has.
    #[inline]
    fn protect_find_next(&self, first_page: usize, mask: u64) {
        let mut bit = find_next_bit(mask, 0);
        while let Some(found) = bit {
            self.protect_page(first_page + found as usize);
            bit = find_next_bit(mask, found + 1);
        }
    }

    /// Looks at each bit from the first that is set to the last.
    #[inline]
    fn protect_first_to_last(&self, first_page: usize, mask: u64) {
        for bit in mask.trailing_zeros()..u64::BITS - mask.leading_zeros() {
            if mask >> bit & 1 != 0 {
                self.protect_page(first_page + bit as usize);
            }
        }
    }

    /// The flush owed for pages that were protected.
    fn flush(&self) {
        self.flush_domain.flush(&[self.range]);
    }

    /// Exchanges each word with zero.
    #[inline]
    fn exchange(&self, out: &mut [u64], protect: impl Fn(&Self, usize, u64)) {
        let _mmu = lock(&self.mmu_lock);
        let mut any = 0;
        let log = self.slots.log_in_use();
        for ((word, out), first_page) in log.words().iter().zip(out).zip((0..).step_by(64)) {
            *out = 0;
            if word.load(Ordering::Relaxed) != 0 {
                *out = word.swap(0, Ordering::SeqCst);
                protect(self, first_page, *out);
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
        for ((pair, out), first_page) in log.pairs().iter().zip(out.chunks_mut(2)).zip((0..).step_by(128)) {
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

    /// Publishes a copy of the slots with the other half of the log.
    fn copy_slots(&self, out: &mut [u64]) {
        let nr_dirty = self.slots.log_in_use().nr_dirty();
        if nr_dirty == 0 {
            out.fill(0);
            return;
        }
        let log: &Log = self.slots.swap_log();
        let _mmu = lock(&self.mmu_lock);
        if nr_dirty < self.range.nr_pages() / MANY_DIRTY {
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
            Method::XchgFindNext => self.exchange(out, Self::protect_find_next),
            Method::XchgFirstToLast => self.exchange(out, Self::protect_first_to_last),
            Method::Xchg16 => self.exchange16(out),
            Method::Xchg | Method::Slat | Method::SlatLeaf | Method::Kvm => self.exchange(out, Self::protect_mask),
        }
    }
}

/// The first set bit of `word` from bit `from` on.
// A call for each bit is what the generic search was.
#[inline(never)]
fn find_next_bit(word: u64, from: u32) -> Option<u32> {
    let rest = if from < u64::BITS { word & u64::MAX << from } else { 0 };
    (rest != 0).then(|| rest.trailing_zeros())
}

/// A lock of a thread that panicked guards nothing that could be half done: a panic ends the command.
fn lock(mutex: &Mutex<()>) -> std::sync::MutexGuard<'_, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The vCPU's side of a peer.
struct PeerVcpu<F>(Arc<PeerVm<F>>);

impl<F: HardwareFormat> FaultHandler for PeerVcpu<F> {
    fn handle_fault(&mut self, gpa: Gpa, _access: Access) -> Result<Outcome, slat::Error> {
        let vm = &*self.0;
        let page = page(gpa);
        let section = vm.slots.enter();
        let mmu = lock(&vm.mmu_lock);
        // All pages are mapped: only the right to write can be missing.
        vm.rmap[page as usize].fetch_or(F::WRITABLE, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        section.log().mark(page);
        drop(mmu);
        if F::NEEDS_LOCAL_FLUSH {
            flush_local(gpa);
        }
        Ok(Outcome::Resume)
    }

    // The CPU is given no modification log.
    fn log_modifications(&mut self, _written: &[Gpa]) {}
}

/// A peer, with a guest.
pub(super) struct Peer<F> {
    method: Method,
    vm: Arc<PeerVm<F>>,
    cpu: Cpu<PeerVcpu<F>, F>,
}

impl<F: HardwareFormat> Peer<F> {
    /// The peer that takes its log by `method`.
    pub(super) fn new(method: Method, memory: &Backing) -> Peer<F> {
        let flush_domain = Arc::new(FlushDomain::new());
        let port = Port::new(&flush_domain);
        let (vm, root) = PeerVm::new(memory, flush_domain);
        let vm = Arc::new(vm);
        let cpu = Cpu::new(PeerVcpu(Arc::clone(&vm)), port, 1, root, Geometry::default());
        Peer { method, vm, cpu }
    }
}

impl<F: HardwareFormat> Subject for Peer<F> {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        write_pages(&mut self.cpu, pages, value)
    }

    fn get_dirty_log(&mut self, log: &mut [u64]) -> Result<(), Failure> {
        self.vm.get_dirty_log(self.method, log);
        Ok(())
    }
}
