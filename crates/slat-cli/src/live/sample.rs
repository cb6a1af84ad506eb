//! One sample of a VM.
//!
//! Taking it waits for no vCPU, and no vCPU waits for it. [`Vm::stats`] adds up counters that their
//! writers only store to. [`Vm::nr_marked_dirty`] loads words under a guard (which delays the
//! freeing of retired things by a moment). The rest are single counters.

use slat::stats::Stats;
use slat::{NodeId, Vm};
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::vm::host::MachineHost;

/// The figures of one sample.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) stats: Stats,
    /// Pages that are marked in the dirty log, or in rings; `None`: there was no memory for a
    /// guard.
    pub(super) nr_dirty: Option<u64>,
    /// The engine's page-table pages, by node.
    pub(super) tables: Vec<(NodeId, u64)>,
    /// `None`: the VM never had any.
    pub(super) nr_shadow_tables: Option<u64>,
}

impl Sample {
    pub(super) fn of<F: HardwareFormat>(vm: &Vm<MachineHost, F>) -> Sample {
        let stats = vm.stats();
        Sample {
            nr_dirty: vm.nr_marked_dirty().ok(),
            tables: vm.host().live_tables_by_node(),
            nr_shadow_tables: (stats.shadow_pages_peak > 0).then_some(stats.shadow_pages),
            stats,
        }
    }
}
