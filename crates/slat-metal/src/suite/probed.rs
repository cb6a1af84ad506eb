//! Memory that comes and goes: a memslot that is created in several ways, changed, moved out of the
//! way and deleted, while the guest probes where it may be. A probe finds the page's tag, or
//! nothing.
//!
//! Frames that the guest must not reach have poison, which a probe would report.

#![expect(unsafe_code, reason = "gives the guest frames")]

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use slat::error::SlotError;
use slat::format::{Format, LeafAttributes};
use slat::slots::MemoryAttributes;
use slat::tables::{Mapping, Protection};
use slat::{GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize, Pfn};
use spin::Mutex;

use super::guest;
use crate::arch::guest::publish_code;
use crate::host::Backing;
use crate::operations::MetalVm;
use crate::ram::{Frames, POISON};
use crate::{error, fail};

const SLOT: u32 = 3;
const START: Gpa = Gpa(0x14_0000_0000);
/// Where the memslot goes when it moves: the guest does not look there.
const ELSEWHERE: Gpa = Gpa(0x15_0000_0000);
const NR_PAGES: u64 = 128;

/// How the memslot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// Mapped by faults.
    Plain,
    /// The same, where the guest does not look.
    Elsewhere,
    /// Mapped in advance; none of its pages, or all.
    Pinned,
    /// Some of its pages are private.
    Private,
}

/// Where the guest probes: the first address, and pages.
pub(super) const fn window() -> (Gpa, u64) {
    (START, NR_PAGES)
}

/// Where the memslot can be: the first address, and pages.
pub(super) fn places() -> [(Gpa, u64); 2] {
    [START, ELSEWHERE].map(|start| (start, NR_PAGES))
}

/// Whether the guest probes at `gpa`.
pub(super) fn is_probed(gpa: Gpa) -> bool {
    (START.0..START.0 + NR_PAGES * PAGE_SIZE).contains(&gpa.0)
}

/// The memslot.
pub(super) struct Probed<F: Format> {
    // Before the frames: the VM goes first.
    vm: Arc<MetalVm<F>>,
    seed: u64,
    state: Mutex<State>,
    shared: Frames,
    private: Frames,
    nr_operations: AtomicU64,
}

impl<F: Format> Probed<F> {
    /// Nothing is there yet.
    pub fn new(vm: &Arc<MetalVm<F>>, seed: u64) -> Probed<F> {
        let frames = || Frames::allocate(NR_PAGES).unwrap_or_else(|| error!("no memory to probe"));
        let probed = Probed {
            vm: vm.clone(),
            seed,
            state: Mutex::new(State::Absent),
            shared: frames(),
            private: frames(),
            nr_operations: AtomicU64::new(0),
        };
        (0..NR_PAGES).for_each(|page| {
            poison(&probed.shared, page);
            poison(&probed.private, page);
        });
        probed
    }

    /// Operations, in all.
    pub fn nr_operations(&self) -> u64 {
        self.nr_operations.load(Ordering::Relaxed)
    }

    /// Does an operation at random, unless another CPU is at it.
    pub fn one(&self, rng: &mut Rng) {
        let Some(mut state) = self.state.try_lock() else { return };
        self.nr_operations.fetch_add(1, Ordering::Relaxed);
        let first = rng.u64(0..NR_PAGES);
        let nr_pages = rng.u64(1..=NR_PAGES - first);
        *state = match (*state, rng.u8(0..4)) {
            (State::Absent, 0) => self.create(MemoryRegionFlags::PINNED, State::Pinned),
            (State::Absent, 1) => self.create(MemoryRegionFlags::GUEST_MEMFD, State::Private),
            (State::Absent, _) => self.create(MemoryRegionFlags::empty(), State::Plain),
            (_, 0) => self.delete(),
            (State::Plain, _) => self.move_to(ELSEWHERE, State::Elsewhere),
            (State::Elsewhere, _) => self.move_to(START, State::Plain),
            (State::Pinned, choice) => {
                self.map_or_unmap(first, nr_pages, choice);
                State::Pinned
            }
            (State::Private, choice) => {
                self.convert(first, nr_pages, choice);
                State::Private
            }
        };
    }

    fn region(&self, flags: MemoryRegionFlags, guest_phys_addr: Gpa, nr_pages: u64) -> MemoryRegion<Backing> {
        let memory_size = nr_pages * PAGE_SIZE;
        MemoryRegion { slot: SLOT, flags, guest_phys_addr, memory_size, backing: None, userfault_bitmap: None }
    }

    fn set(&self, region: MemoryRegion<Backing>) {
        // A pinned memslot waits for no invalidation: it is tried again.
        loop {
            match self.vm.set_user_memory_region(region.clone()) {
                Ok(()) => return,
                Err(SlotError::SlotBusy { .. }) => core::hint::spin_loop(),
                Err(error) => fail!("memslot {SLOT} could not be set: {error}"),
            }
        }
    }

    fn create(&self, flags: MemoryRegionFlags, state: State) -> State {
        // The guest reaches the frames of a pinned memslot when they are mapped.
        if state != State::Pinned {
            (0..NR_PAGES).for_each(|page| guest::mark(page, self.seed, self.shared.words(page)));
        }
        // SAFETY: frames that this value has for the guest. It lives as long as the VM.
        let backing = unsafe { Backing::fixed(self.shared.first(), self.private.first(), LeafAttributes::default()) };
        self.set(MemoryRegion { backing: Some(backing), ..self.region(flags, START, NR_PAGES) });
        state
    }

    fn delete(&self) -> State {
        self.set(self.region(MemoryRegionFlags::empty(), START, 0));
        for page in 0..NR_PAGES {
            poison(&self.shared, page);
            poison(&self.private, page);
        }
        State::Absent
    }

    fn move_to(&self, gpa: Gpa, state: State) -> State {
        self.set(self.region(MemoryRegionFlags::empty(), gpa, NR_PAGES));
        state
    }

    fn map_or_unmap(&self, first: u64, nr_pages: u64, choice: u8) {
        let range = GfnRange::new(slat::Gfn(START.gfn().0 + first), nr_pages);
        let protection = Protection { writable: choice == 1, attributes: LeafAttributes::DATA };
        let result = match choice {
            1 => {
                let unmapped = self.vm.unmap_range(range);
                (first..first + nr_pages).for_each(|page| guest::mark(page, self.seed, self.shared.words(page)));
                publish_code(&self.vm.host().cpus);
                let pfn = Pfn(self.shared.first().0 + first);
                unmapped.and_then(|_| self.vm.map_range(&Mapping { range, pfn, protection, largest: PageSize::Size4K }))
            }
            2 => {
                let unmapped = self.vm.unmap_range(range).map(drop);
                (first..first + nr_pages).for_each(|page| poison(&self.shared, page));
                unmapped
            }
            _ => self.vm.protect_range(range, &protection).map(drop),
        };
        if let Err(error) = result {
            fail!("pages {first} to {} of memslot {SLOT} could not be mapped or unmapped: {error}", first + nr_pages);
        }
    }

    fn convert(&self, first: u64, nr_pages: u64, choice: u8) {
        let (attributes, new, old) = match choice {
            1 => (MemoryAttributes::empty(), &self.shared, &self.private),
            _ => (MemoryAttributes::PRIVATE, &self.private, &self.shared),
        };
        (first..first + nr_pages).for_each(|page| guest::mark(page, self.seed, new.words(page)));
        let gpa = Gpa(START.0 + first * PAGE_SIZE);
        if let Err(error) = self.vm.set_memory_attributes(gpa, nr_pages * PAGE_SIZE, attributes) {
            fail!("the attributes of {nr_pages} pages at {gpa} could not be set: {error}");
        }
        (first..first + nr_pages).for_each(|page| poison(old, page));
    }
}

fn poison(frames: &Frames, page: u64) {
    frames.words(page).iter().for_each(|word| word.store(POISON, Ordering::Relaxed));
}
