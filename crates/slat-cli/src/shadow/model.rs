//! The parts of the guest's time, fixed before any strategy was measured.
//!
//! A vCPU's time is the sum of
//! - the work of the program and its kernel, as counted in a build without a hypervisor (see
//!   [`build`](super::build));
//! - the time in the engine's calls, measured here;
//! - its exits, each at a given cost: from the guest into the hypervisor, to the engine's call, and
//!   back. A flush by another CPU while this one is in the guest is an exit, too, since hardware
//!   notifies it by an interrupt.
//!
//! With several vCPUs the guest is as fast as the slowest of them. TLB misses are not included;
//! they are most where flushes are most.
//!
//! # The cost of an exit
//! Published for KVM on hardware, round trips, in cycles:
//! - `vmcall` of kvm-unit-tests' `vmexit.flat` on a Skylake server: 1559, and 1529 with the patch
//!   (W. Li, "KVM: VMX: Micro-optimize vmexit time when not exposing PMU", KVM mailing list, March
//!   2020).
//! - A VMCALL that is answered at the top of the handler, on an i7-3960X: 1600 to 1700 (Y. Shalabi,
//!   "The Cost of Virtualization Exits", 2014).
//! - `cpuid` of `vmexit.flat`: 1018 to 1053 (KVM mailing list, December 2024).
//!
//! 1500 cycles are 600 ns at 2.5 GHz, the clock of servers of 2018. Half and twice of it are shown
//! too: newer hardware, and the added cost of the mitigations of 2018 and of injecting an
//! exception.

/// Cost of an exit by default, in nanoseconds.
pub(super) const EXIT_COST: &str = "600ns";

/// The published gains of the series for a kernel build of 2018, by number of vCPUs.
const PUBLISHED: [(u16, f64); 2] = [(1, 1.69), (4, 3.42)];

/// The published gain with so many vCPUs, if there is one.
pub(super) fn published(nr_vcpus: u16) -> Option<f64> {
    PUBLISHED.iter().find(|(vcpus, _)| *vcpus == nr_vcpus).map(|(_, gain)| *gain)
}

/// The parts of a vCPU's time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Parts {
    /// Work of program and kernel, in nanoseconds.
    pub(super) work_ns: f64,
    /// Time in the engine, in nanoseconds.
    pub(super) engine_ns: f64,
    pub(super) nr_exits: u64,
}

impl Parts {
    /// The vCPU's time in seconds, if an exit costs `exit_cost_ns`.
    pub(super) fn time_s(&self, exit_cost_ns: f64) -> f64 {
        (self.work_ns + self.engine_ns + self.nr_exits as f64 * exit_cost_ns) * 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_the_sum_of_its_parts() {
        let parts = Parts { work_ns: 1e9, engine_ns: 0.5e9, nr_exits: 1_000_000 };
        assert!((parts.time_s(600.0) - 2.1).abs() < 1e-9);
        assert!((parts.time_s(0.0) - 1.5).abs() < 1e-9);
        assert_eq!(Parts::default().time_s(600.0), 0.0);
    }
}
