//! What hardware does for an access: virtual CPUs that are threads, with TLBs and page-table
//! walkers written from the processor manuals.
//!
//! - [`commit`]: the flush rule. When a flush returns, no CPU completes an access through an older
//!   translation of its ranges, and no preempted CPU delays a flush.
//! - [`tlb`], [`walk`], [`cpu`]: a CPU with a second stage. The walkers share not even a constant
//!   with the engine: they are its oracle.
//! - [`shadow_cpu`]: a CPU without a second stage.
//! - [`iommu`]: DMA through an IOTLB and VT-d's tables.
//! - [`modification_log`]: the logs in which EPT CPUs write the pages that they make dirty, and how
//!   they are read beside the CPUs.

pub mod commit;
pub mod cpu;
pub mod iommu;
pub(crate) mod membarrier;
pub mod modification_log;
pub mod shadow_cpu;
pub mod tlb;
pub mod walk;
