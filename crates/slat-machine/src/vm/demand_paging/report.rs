//! The result of a run of demand paging.

use std::time::Duration;

use super::lane::VcpuPaging;
use super::scheduler::Ended;
use super::{DemandPaging, DemandPagingError, VcpuError};
use crate::hardware::walk::HardwareFormat;
use crate::memory::guest_memfd::Origin;

/// The result of a run of demand paging.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DemandPagingReport {
    /// From the start of the run until the last vCPU had touched its last page.
    pub wall: Duration,
    /// Pages that each vCPU has to touch.
    pub pages_per_vcpu: u64,
    /// One for each vCPU.
    pub vcpus: Vec<VcpuPaging>,
    /// The median of the time that a touch takes, from the first attempt until it is done, waits
    /// included. Of a sample of the touches; in ns.
    pub fault_p50_ns: u64,
    /// 99 of 100 take no longer; in ns.
    pub fault_p99_ns: u64,
    /// Blocks that a vCPU, or a reader of a userfaultfd, requested, or that the resolver's process
    /// filled for any reason. Since the VM was made.
    pub nr_filled_for_faults: u64,
    /// Blocks that the background copier of this process fetched. Since the VM was made.
    pub nr_filled_by_copier: u64,
    /// The engine's counts since the VM was made; the times of faults and of resolving pages within
    /// them are separate.
    pub engine: slat::stats::Stats,
    /// Whether guest_memfd memory is KVM's.
    pub guest_memfd: Option<GuestMemfdOrigin>,
    /// Threads that ran the vCPUs.
    pub nr_threads: usize,
}

/// The kind of the memory, in a run with guest_memfd.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GuestMemfdOrigin {
    /// A guest_memfd of KVM.
    Kvm,
    /// A memory file in its place.
    Memfd {
        /// The reason.
        why: String,
    },
}

impl DemandPagingReport {
    /// Exits of all vCPUs.
    pub fn nr_exits(&self) -> u64 {
        self.vcpus.iter().map(|vcpu| vcpu.nr_exits).sum()
    }
}

/// Sorted by vCPU; or the vCPUs that did not finish.
pub(super) fn ended(endings: Vec<Result<Vec<Ended>, String>>) -> Result<Vec<Ended>, DemandPagingError> {
    let mut all = Vec::new();
    let mut errors = Vec::new();
    for (thread, ending) in endings.into_iter().enumerate() {
        match ending {
            Ok(ended) => all.extend(ended),
            Err(message) => errors.push((thread, VcpuError::Panicked { message })),
        }
    }
    all.sort_by_key(|ended| ended.vcpu);
    errors.extend(all.iter().filter_map(|ended| Some((ended.vcpu, ended.error.clone()?))));
    if errors.is_empty() { Ok(all) } else { Err(DemandPagingError::Vcpus { errors }) }
}

pub(super) fn report<F: HardwareFormat>(
    paging: &DemandPaging<F>,
    wall: Duration,
    ended: Vec<Ended>,
) -> DemandPagingReport {
    let mut samples: Vec<u32> = ended.iter().flat_map(|ended| ended.samples.iter().copied()).collect();
    samples.sort_unstable();
    let at = |per_cent: usize| {
        let last = samples.len().saturating_sub(1);
        samples.get((samples.len() * per_cent / 100).min(last)).map_or(0, |&took_ns| u64::from(took_ns))
    };
    let pages_per_vcpu = match paging.config.sharing {
        crate::vm::guest::Sharing::Partitioned => paging.layout.pages_per_vcpu,
        crate::vm::guest::Sharing::Overlapping => paging.layout.nr_pages,
    };
    let nr_filled = if paging.config.mode == super::PagingMode::None { 0 } else { paging.arrivals.nr_there() };
    DemandPagingReport {
        wall,
        pages_per_vcpu,
        fault_p50_ns: at(50),
        fault_p99_ns: at(99),
        vcpus: ended.into_iter().map(|ended| ended.report).collect(),
        nr_filled_for_faults: nr_filled - paging.nr_copied,
        nr_filled_by_copier: paging.nr_copied,
        engine: paging.vm.stats(),
        guest_memfd: paging.guest_memfd().map(|memory| match memory.origin() {
            Origin::Kvm => GuestMemfdOrigin::Kvm,
            Origin::Memfd { why } => GuestMemfdOrigin::Memfd { why: why.to_string() },
        }),
        nr_threads: paging.nr_threads(),
    }
}
