//! A VM of an experiment, and its vCPUs at work together.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat_costed::slots::UserfaultBitmap;
use slat_costed::{Config, Error, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, PageSize};

use crate::arena::MAX_FRAMES;
use crate::error::ModelError;
use crate::guest::{Around, GuestWork, ModelVm, ModificationLog, VirtualCpu, leaf_table_node};
use crate::host::{Backing, ModelHost};
use crate::machine;
use crate::parameters::{PS_PER_NS, Parameters, Ps};
use crate::topology::Topology;

/// Of the VM, and of the machine that it is on.
#[derive(Clone)]
pub(super) struct VmShape {
    pub(super) topology: Topology,
    pub(super) parameters: Parameters,
    /// The CPU of each vCPU.
    pub(super) cpus: Vec<usize>,
    pub(super) nr_pages: u64,
    pub(super) backing: Backing,
    pub(super) page_size: PageSize,
    pub(super) config: Config,
    pub(super) work: GuestWork,
    pub(super) modification_log: ModificationLog,
    pub(super) around: Around,
    /// Pages move between two frames.
    pub(super) moves: bool,
    pub(super) seed: u64,
}

/// The first pages of two vCPUs' parts are so far apart. A line of the dirty log's summary is of
/// 128 MiB, and each vCPU of the published runs had more memory than that.
pub(super) fn pages_apart(nr_pages: u64) -> u64 {
    nr_pages.next_multiple_of(1 << 15)
}

/// A CPU for each vCPU.
pub(super) fn cpus_for(topology: &Topology, nr_vcpus: usize) -> Result<Vec<usize>, ModelError> {
    let nr_cpus = topology.nr_cpus();
    if nr_vcpus > nr_cpus || nr_vcpus == 0 {
        return Err(ModelError::TooManyVcpus { nr_vcpus, nr_cpus, topology: topology.name().to_owned() });
    }
    Ok(topology.spread(nr_vcpus))
}

/// Checks that a machine has the pages of `nr_parts` parts of `nr_pages` each.
pub(super) fn check_pages(nr_pages: u64, nr_parts: usize) -> Result<(), ModelError> {
    let all = nr_pages.checked_next_multiple_of(1 << 15).and_then(|part| part.checked_mul(nr_parts as u64));
    match all {
        Some(1..=MAX_FRAMES) if nr_pages != 0 => Ok(()),
        _ => Err(ModelError::Pages { nr_pages: nr_pages.saturating_mul(nr_parts as u64), most: MAX_FRAMES }),
    }
}

/// A VM with one memslot, from page 0 on.
pub(super) struct GuestVm {
    pub(super) vm: Arc<ModelVm>,
    shape: VmShape,
    vcpus: Vec<Rc<RefCell<VirtualCpu>>>,
    random: RefCell<SmallRng>,
}

impl GuestVm {
    pub(super) fn new(shape: VmShape) -> Result<GuestVm, Error> {
        let VmShape { topology, parameters, cpus, nr_pages, .. } = &shape;
        let host = ModelHost::new(topology, parameters, cpus.len(), *nr_pages, shape.page_size, shape.around);
        if shape.backing == Backing::Allocated {
            // By a program on the first node.
            (0..*nr_pages).for_each(|page| host.place(page, 0));
        }
        let host = if shape.moves { host.with_places() } else { host };
        let vm = Arc::new(ModelVm::new(host, shape.config)?);
        let guest = GuestVm { vm, vcpus: Vec::new(), random: RefCell::new(SmallRng::seed_from_u64(shape.seed)), shape };
        guest.set_region(MemoryRegionFlags::empty(), Some(()), None)?;
        let vcpus: Result<Vec<_>, Error> = (0..guest.shape.cpus.len())
            .map(|index| {
                let vcpu = guest.vm.create_vcpu()?;
                let VmShape { work, modification_log, .. } = guest.shape;
                Ok(Rc::new(RefCell::new(VirtualCpu::new(vcpu, index, work, modification_log))))
            })
            .collect();
        Ok(GuestVm { vcpus: vcpus?, ..guest })
    }

    /// Gives the memslot other flags.
    pub(super) fn set_flags(&self, flags: MemoryRegionFlags) -> Result<(), Error> {
        self.set_region(flags, None, None)
    }

    /// Makes faults on the pages that `bitmap` names exit.
    pub(super) fn set_userfault(&self, bitmap: UserfaultBitmap) -> Result<(), Error> {
        self.set_region(MemoryRegionFlags::USERFAULT, None, Some(bitmap))
    }

    fn set_region(
        &self,
        flags: MemoryRegionFlags,
        backing: Option<()>,
        userfault_bitmap: Option<UserfaultBitmap>,
    ) -> Result<(), Error> {
        self.vm.set_user_memory_region(MemoryRegion {
            slot: 0,
            flags,
            guest_phys_addr: Gpa(0),
            memory_size: self.shape.nr_pages << 12,
            backing,
            userfault_bitmap,
        })?;
        Ok(())
    }

    /// Runs `program` on all vCPUs, with their numbers. Returns the time from their start to the
    /// end of the last, and the first error.
    pub(super) fn run<E: 'static>(
        &self,
        program: impl Fn(&mut VirtualCpu, usize) -> Result<(), E> + 'static,
    ) -> Result<Ps, E> {
        let program = Rc::new(program);
        // Two vCPUs never begin at the same moment.
        let starts: Vec<Ps> =
            self.vcpus.iter().map(|_| self.random.borrow_mut().random_range(0..1000) * PS_PER_NS).collect();
        let ends = Rc::new(RefCell::new((0, Ok(()))));
        let begin = machine::now();
        let tasks: Vec<_> = self
            .vcpus
            .iter()
            .enumerate()
            .map(|(index, vcpu)| {
                let (program, ends, vcpu) = (Rc::clone(&program), Rc::clone(&ends), Rc::clone(vcpu));
                let start = starts[index];
                machine::spawn(self.shape.cpus[index], move || {
                    machine::elapse(start);
                    let mut vcpu = vcpu.borrow_mut();
                    vcpu.enter();
                    let result = program(&mut vcpu, index);
                    vcpu.leave();
                    let end = machine::timed(|| ()).1 + machine::now();
                    let mut ends = ends.borrow_mut();
                    ends.0 = end.max(ends.0);
                    if ends.1.is_ok() {
                        ends.1 = result;
                    }
                })
            })
            .collect();
        tasks.into_iter().for_each(machine::join);
        let (end, result) = std::mem::replace(&mut *ends.borrow_mut(), (0, Ok(())));
        result.map(|()| end - begin)
    }

    /// How many page-table pages of the lowest level are on the node of the memory that they map,
    /// and how many elsewhere.
    pub(super) fn tables_by_place(&self) -> (u64, u64) {
        let (mut nr_local, mut nr_remote) = (0, 0);
        for first in (0..self.shape.nr_pages).step_by(512) {
            let home = self.vm.host().node_of_page(first);
            match leaf_table_node(&self.vm, Gfn(first)) {
                Some(node) if Some(node) == home => nr_local += 1,
                Some(_) => nr_remote += 1,
                None => {}
            }
        }
        (nr_local, nr_remote)
    }

    /// The plain work of KVM for so many leaf PTEs, if this is KVM.
    pub(super) fn of_kvm(&self, nr_leaves: u64, per_leaf: Ps) {
        self.shape.work.of_kvm(nr_leaves, per_leaf);
    }

    /// The calls of this task are those of the hypervisor's own thread.
    pub(super) fn begin_call(&self) {
        self.shape.work.begin_call();
    }

    /// A call of the hypervisor's own thread, and its time.
    pub(super) fn timed<R>(&self, call: impl FnOnce() -> R) -> (R, Ps) {
        self.begin_call();
        machine::timed(call)
    }
}
