//! The engine, with a hypervisor around it. The hypervisor's CPUs walk the shadow page tables and
//! enter the guest as the engine requires. It passes page faults to the engine, and emulates the
//! writes that the engine does not allow.

use std::collections::BTreeSet;
use std::sync::Arc;

use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::error::FaultError;
use slat::format::Npt;
use slat::shadow::{GuestAccess, Gva, PagingRegister, PagingRegisters, Privilege, ShadowPaging, ShadowStrategy};
use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, Vcpu, Vm};

use super::architecture::{CR0_PG, CR4_SMAP, CR4_SMEP};
use super::hardware::{Cpu, Disobeys, Keeps, Protections};
use super::random::Random;
use super::subject::{By, Executed, HostEvent, Observed, Subject, Written};
use super::world::{Backing, SLOTS, World, page_range};

/// The configuration of a program's hypervisor.
#[derive(Clone, Copy, Debug)]
pub struct Hypervisor {
    pub config: Config,
    pub shadow: ShadowPaging,
    pub keeps: Keeps,
    pub disobeys: Disobeys,
    pub has_huge_pages: bool,
    /// Whether each memslot logs.
    pub logs: [bool; 3],
}

impl Hypervisor {
    pub fn of(seed: u64, strategy: ShadowStrategy) -> Hypervisor {
        let mut random = Random::new(seed ^ 0xc0f1);
        let shadow = ShadowPaging {
            strategy,
            previous_roots: random.pick(&[0, 1, 3, 3, 31]),
            max_pages: random.pick(&[64, 64, 128, 4096]),
        };
        let locking = random.pick(&[Locking::None, Locking::None, Locking::Shared, Locking::Exclusive]);
        let protection = random.pick(&[DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves]);
        let config = Config::default().with_locking(locking).with_dirty_tracking(protection);
        let keeps = random.pick(&[Keeps::Nothing, Keeps::Translations, Keeps::Everything, Keeps::Everything]);
        let logs = [random.chance(50), random.chance(50), random.chance(50)];
        Hypervisor { config, shadow, keeps, disobeys: Disobeys::Nothing, has_huge_pages: random.chance(50), logs }
    }
}

struct EngineCpu {
    vcpu: Vcpu<World, Npt>,
    cpu: Cpu,
    /// The engine was called since the guest was last entered.
    must_enter: bool,
}

pub struct Engine {
    pub vm: Arc<Vm<World, Npt>>,
    hypervisor: Hypervisor,
    cpus: Vec<EngineCpu>,
    backings: [Option<Arc<Backing>>; 3],
    places: [u64; 3],
    /// Page-table pages of a VM without memslots.
    nr_tables: usize,
    /// How often an access may be tried before it must end.
    most_tries: u32,
    /// Calls that ran out of memory.
    pub nr_failed: u32,
}

impl Engine {
    pub fn new(nr_cpus: usize, hypervisor: Hypervisor) -> Engine {
        let vm = Arc::new(Vm::with_shadow_paging(World::new(), hypervisor.config, hypervisor.shadow).unwrap());
        let nr_tables = vm.host().nr_live_tables();
        let cpu = |_| EngineCpu {
            vcpu: vm.create_vcpu().unwrap(),
            cpu: Cpu::new(hypervisor.keeps, hypervisor.disobeys),
            must_enter: true,
        };
        let cpus = (0..nr_cpus).map(cpu).collect();
        Engine {
            cpus,
            vm,
            hypervisor,
            backings: [None, None, None],
            places: [0; 3],
            nr_tables,
            most_tries: 40,
            nr_failed: 0,
        }
    }

    /// Repeats a call that ran out of memory, when there is memory again. It must have changed
    /// nothing.
    fn retry<R>(&mut self, mut call: impl FnMut(&mut Engine) -> Result<R, FaultError>) -> Result<R, FaultError> {
        match call(self) {
            Err(FaultError::OutOfMemory) if self.vm.host().is_failing() => {
                self.nr_failed += 1;
                self.vm.host().fail_after(-1);
                call(self)
            }
            result => result,
        }
    }

    /// Another CPU of the same VM, for another thread.
    pub fn beside(&self) -> Engine {
        let cpu = EngineCpu {
            vcpu: self.vm.create_vcpu().unwrap(),
            cpu: Cpu::new(self.hypervisor.keeps, self.hypervisor.disobeys),
            must_enter: true,
        };
        let (vm, backings) = (Arc::clone(&self.vm), self.backings.clone());
        Engine { cpus: vec![cpu], vm, backings, most_tries: 100_000, nr_failed: 0, ..*self }
    }

    /// One try of a guest's access, from the guest's entry to the result.
    fn try_access(
        &mut self,
        cpu: usize,
        la: u64,
        access: Access,
        privilege: Privilege,
        effect: &mut dyn FnMut(&World, u64),
    ) -> Result<Option<Observed>, FaultError> {
        let EngineCpu { vcpu, cpu, must_enter } = &mut self.cpus[cpu];
        if *must_enter {
            cpu.enter(vcpu.entry()?);
            *must_enter = false;
        }
        let PagingRegisters { cr0, cr4, .. } = vcpu.paging_registers()?;
        // Without paging there are no user pages.
        let is_paging = cr0 & CR0_PG != 0;
        let protections =
            Protections { smep: is_paging && cr4 & CR4_SMEP != 0, smap: is_paging && cr4 & CR4_SMAP != 0 };
        let world = self.vm.host();
        let gate = world.gate.read().unwrap();
        if let Some(hpa) = cpu.access(world, protections, la, access, privilege) {
            let gpa = world
                .gpa_of(hpa)
                .unwrap_or_else(|| panic!("{access:?} at {la:#x} reached {hpa}, a frame without an owner"));
            effect(world, gpa);
            return Ok(Some(Observed::Reached { gpa, by: By::Cpu }));
        }
        drop(gate);
        *must_enter = true;
        let outcome = vcpu.handle_page_fault(Gva(la), GuestAccess { access, privilege })?;
        Ok(match outcome {
            Outcome::Resume => None,
            Outcome::Exit(Exit::PageFault { gva, error_code }) => {
                assert_eq!(gva, Gva(la), "CR2");
                Some(Observed::Fault { error_code })
            }
            Outcome::Exit(Exit::Mmio { gpa, access }) => Some(Observed::Mmio { gpa: gpa.0, access }),
            Outcome::Exit(Exit::TableMmio { gva, gpa }) => {
                assert_eq!(gva, Gva(la));
                Some(Observed::TableMmio { gpa: gpa.0 })
            }
            Outcome::Exit(Exit::EmulateWrite { gpa }) => {
                assert_eq!(access, Access::Write, "an emulation at {gpa}");
                Some(Observed::Reached { gpa: gpa.0, by: By::Emulation })
            }
            Outcome::Exit(exit) => panic!("{access:?} at {la:#x}: {exit:?}"),
        })
    }

    fn executed(&mut self, cpu: usize, outcome: Outcome) -> Executed {
        self.cpus[cpu].must_enter = true;
        match outcome {
            Outcome::Resume => Executed::Done,
            Outcome::Exit(Exit::GeneralProtection) => Executed::GeneralProtection,
            Outcome::Exit(exit) => panic!("{exit:?}"),
        }
    }

    fn region(&self, slot: usize, first_gfn: u64, nr_pages: u64) -> MemoryRegion<Arc<Backing>> {
        MemoryRegion {
            slot: slot as u32,
            flags: self.flags(slot),
            guest_phys_addr: Gfn(first_gfn).gpa(),
            memory_size: nr_pages * PAGE_SIZE,
            backing: None,
            userfault_bitmap: None,
        }
    }

    fn flags(&self, slot: usize) -> MemoryRegionFlags {
        if self.hypervisor.logs[slot] { MemoryRegionFlags::LOG_DIRTY_PAGES } else { MemoryRegionFlags::empty() }
    }

    /// At the end nothing is left: no shadow page, no leaf in a reverse map, no page-table page of
    /// the second stage but its root. `places` is where the remaining memslots are.
    pub fn check_end(mut self, places: [Option<u64>; 3]) {
        self.cpus.clear();
        for (slot, place) in places.into_iter().enumerate() {
            if let Some(place) = place {
                self.delete_slot(slot, place);
            }
        }
        assert_eq!(self.vm.stats().shadow_leaves(), 0, "leaves in lists of frames");
        // Page-table pages that a memslot covered in part stay linked, so a memslot is made that
        // covers all. Its log would take 8 GiB.
        let nr_pages = (1 << 48) / PAGE_SIZE;
        let backing = Some(self.vm.host().empty_backing());
        let flags = MemoryRegionFlags::empty();
        self.vm.set_user_memory_region(MemoryRegion { backing, flags, ..self.region(0, 0, nr_pages) }).unwrap();
        self.vm.set_user_memory_region(self.region(0, 0, 0)).unwrap();
        self.vm.reclaim();
        assert_eq!(self.vm.stats().shadow_pages, 0, "shadow tables");
        assert_eq!(self.vm.host().nr_live_tables(), self.nr_tables, "tables");
    }
}

impl Subject for Engine {
    fn world(&self) -> &World {
        self.vm.host()
    }

    fn set_registers(&mut self, cpu: usize, registers: PagingRegisters) -> Result<(), FaultError> {
        self.cpus[cpu].must_enter = true;
        self.retry(|engine| engine.cpus[cpu].vcpu.set_paging_registers(registers))
    }

    fn write_register(&mut self, cpu: usize, register: PagingRegister, value: u64) -> Result<Executed, FaultError> {
        let outcome = self.retry(|engine| engine.cpus[cpu].vcpu.write_paging_register(register, value))?;
        Ok(self.executed(cpu, outcome))
    }

    fn load_cr3(&mut self, cpu: usize, value: u64) -> Result<Executed, FaultError> {
        let outcome = self.retry(|engine| engine.cpus[cpu].vcpu.load_cr3(value))?;
        Ok(self.executed(cpu, outcome))
    }

    fn invlpg(&mut self, cpu: usize, la: u64) -> Result<(), FaultError> {
        let outcome = self.retry(|engine| engine.cpus[cpu].vcpu.invlpg(Gva(la)))?;
        assert_eq!(self.executed(cpu, outcome), Executed::Done);
        Ok(())
    }

    fn invpcid(&mut self, cpu: usize, kind: u64, descriptor: [u64; 2]) -> Result<Executed, FaultError> {
        let outcome = self.retry(|engine| engine.cpus[cpu].vcpu.invpcid(kind, descriptor))?;
        Ok(self.executed(cpu, outcome))
    }

    fn access(
        &mut self,
        cpu: usize,
        la: u64,
        access: Access,
        privilege: Privilege,
        effect: &mut dyn FnMut(&World, u64),
    ) -> Result<Observed, FaultError> {
        for _ in 0..self.most_tries {
            if let Some(observed) = self.retry(|engine| engine.try_access(cpu, la, access, privilege, effect))? {
                return Ok(observed);
            }
            std::thread::yield_now();
        }
        panic!("{access:?} as {privilege:?} at {la:#x} does not end");
    }

    fn write_table(&mut self, cpu: usize, gpa: u64, bytes: &[u8]) -> Result<Written, FaultError> {
        let outcome = self.retry(|engine| engine.cpus[cpu].vcpu.write_guest_table(Gpa(gpa), bytes))?;
        self.cpus[cpu].must_enter = true;
        Ok(match outcome {
            Outcome::Resume => Written::Memory,
            Outcome::Exit(Exit::Mmio { gpa, access: Access::Write }) => Written::Mmio { gpa: gpa.0 },
            Outcome::Exit(exit) => panic!("an emulated write at {gpa:#x}: {exit:?}"),
        })
    }

    fn host_event(&mut self, event: HostEvent) {
        match event {
            HostEvent::MoveFrame { gfn } => {
                let is_here = |&slot: &usize| (self.places[slot]..self.places[slot] + SLOTS[slot].1).contains(&gfn);
                let slot = (0..3).find(is_here).expect("memory");
                let invalidation = self.vm.invalidate_range(page_range(gfn)).unwrap();
                let backing = self.backings[slot].as_ref().expect("a slot");
                self.vm.host().move_frame(backing, (gfn - self.places[slot]) as usize, gfn);
                drop(invalidation);
            }
            HostEvent::Age { first_gfn, nr_pages } => {
                self.vm.age_range(GfnRange::new(Gfn(first_gfn), nr_pages)).unwrap();
            }
            HostEvent::Reclaim => self.vm.reclaim(),
        }
    }

    fn harvest(&mut self, slot: usize, first_gfn: u64) -> BTreeSet<u64> {
        let nr_pages = SLOTS[slot].1;
        if !self.hypervisor.logs[slot] {
            return (first_gfn..first_gfn + nr_pages).collect();
        }
        let mut bitmap = vec![0; nr_pages.div_ceil(64) as usize];
        self.vm.get_dirty_log(slot as u32, &mut bitmap).unwrap();
        (0..nr_pages)
            .filter(|page| bitmap[*page as usize / 64] >> (page % 64) & 1 == 1)
            .map(|page| first_gfn + page)
            .collect()
    }

    fn delete_slot(&mut self, slot: usize, first_gfn: u64) {
        self.vm.set_user_memory_region(self.region(slot, first_gfn, 0)).unwrap();
        self.backings[slot] = None;
        self.vm.host().free_frames_of(first_gfn, SLOTS[slot].1);
    }

    fn create_slot(&mut self, slot: usize, contents: Option<&[u64]>) {
        let region = self.vm.host().region(slot, self.flags(slot), self.hypervisor.has_huge_pages, contents);
        self.backings[slot].clone_from(&region.backing);
        self.places[slot] = SLOTS[slot].0;
        self.vm.set_user_memory_region(region).unwrap();
    }

    fn move_slot(&mut self, slot: usize, from: u64, to: u64) {
        self.vm.set_user_memory_region(self.region(slot, to, SLOTS[slot].1)).unwrap();
        self.places[slot] = to;
        self.vm.host().move_slot(from, to, SLOTS[slot].1);
    }
}
