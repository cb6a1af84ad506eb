//! What a thread that runs vCPUs asks of paging.

use std::collections::VecDeque;

use slat::slots::MemoryFaultFlags;

use super::error::VcpuError;

/// Whether a page that was asked for is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    /// It is: run the vCPU again.
    IsThere,
    /// Not yet.
    Waits,
}

/// The source of pages of a thread's vCPUs. A vCPU is named by its index in the thread.
pub(crate) trait PageSupply {
    /// Whether `lane`, which has exited in an earlier run, still waits for its page, and will get
    /// it.
    fn still_waits(&mut self, lane: usize) -> Result<bool, VcpuError>;

    /// Requests `page`, for which `lane` has exited.
    fn ask(&mut self, lane: usize, page: u64, flags: MemoryFaultFlags) -> Result<Asked, VcpuError>;

    /// Adds the vCPUs whose pages have come to the end of `ready`. Does not wait.
    fn collect(&mut self, ready: &mut VecDeque<usize>) -> Result<(), VcpuError>;

    /// Sleeps until a vCPU may have its page, at most a short time.
    fn sleep(&mut self, ready: &mut VecDeque<usize>) -> Result<(), VcpuError>;

    /// Why `lane` in particular cannot get its page, if that is known.
    fn failure_of(&mut self, lane: usize) -> Option<VcpuError>;
}
