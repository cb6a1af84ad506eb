//! Times of a fault that is in the sample.

use super::Vcpu;
use crate::format::Format;
use crate::host::Host;
use crate::stats::{Counter, is_sampled};

/// Times of a fault that is in the sample, in nanoseconds.
#[derive(Default)]
pub(super) struct Timing {
    /// When the fault began, later by the time in resolve and in measuring that.
    pub(super) start_ns: u64,
    /// The run delay by then.
    pub(super) start_delay_ns: u64,
    /// Time in resolve, with waits for a CPU.
    pub(super) resolve_ns: u64,
    /// Waits for a CPU in resolve.
    pub(super) resolve_run_delay_ns: u64,
}

impl Timing {
    /// Begins to take the time of a fault.
    #[cold]
    pub(super) fn start<H: Host>(host: &H) -> Timing {
        // The clock is read innermost, here and below: reading the run delay may take longer than
        // the fault.
        let start_delay_ns = host.run_delay_ns();
        Timing { start_ns: host.timestamp_ns(), start_delay_ns, ..Timing::default() }
    }

    /// Takes the time of `resolve`.
    #[cold]
    pub(super) fn time_resolve<H: Host, T>(&mut self, host: &H, resolve: impl FnOnce() -> T) -> T {
        let outside_start_ns = host.timestamp_ns();
        let start_delay_ns = host.run_delay_ns();
        let start_ns = host.timestamp_ns();
        let resolved = resolve();
        self.resolve_ns += host.timestamp_ns().saturating_sub(start_ns);
        self.resolve_run_delay_ns += host.run_delay_ns().saturating_sub(start_delay_ns);
        self.start_ns += host.timestamp_ns().saturating_sub(outside_start_ns);
        resolved
    }
}

impl<H: Host, F: Format> Vcpu<H, F> {
    /// Records the times of the fault that ends.
    #[cold]
    pub(super) fn stop_timing(&mut self) {
        let Some(timing) = self.timing.take() else { return };
        let host = &self.vm.tree.host;
        let engine_ns = host.timestamp_ns().saturating_sub(timing.start_ns);
        let run_delay_ns = host.run_delay_ns().saturating_sub(timing.start_delay_ns);
        let engine_delay_ns = run_delay_ns.saturating_sub(timing.resolve_run_delay_ns);
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the participant came
        // from.
        let participant = unsafe { self.participant.get() };
        if !is_sampled(participant.stats.get(Counter::Faults).wrapping_sub(1)) {
            // Of an earlier fault, which a panic of the host has ended.
            return;
        }
        let Some(times) = participant.stats.fault_times() else { return };
        times.fault_ns.record(engine_ns + timing.resolve_ns);
        times.resolve_ns.record(timing.resolve_ns.saturating_sub(timing.resolve_run_delay_ns));
        times.guest_stall_ns.record(engine_ns.saturating_sub(engine_delay_ns));
    }
}
