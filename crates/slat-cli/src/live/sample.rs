//! One look at a VM.
//!
//! None of it waits for a vCPU, or makes one wait: [`Vm::stats`] adds up counters that their writers only store to,
//! [`Vm::nr_marked_dirty`] loads words in a read section (what is retired meanwhile is freed a moment later), and the rest are
//! single counters.

use slat::stats::Stats;
use slat::{NodeId, Vm};
use slat_machine::host::MachineHost;
use slat_machine::walk::HardwareFormat;

/// What was found.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) stats: Stats,
    /// Pages that are marked in the dirty log, or in rings; `None`: there was no memory to look.
    pub(super) nr_dirty: Option<u64>,
    /// Tables that the engine has, by node.
    pub(super) tables: Vec<(NodeId, u64)>,
    /// `None`: there never were any.
    pub(super) nr_shadow_tables: Option<u64>,
}

impl Sample {
    pub(super) fn of<F: HardwareFormat>(vm: &Vm<MachineHost, F>) -> Sample {
        Sample {
            stats: vm.stats(),
            nr_dirty: vm.nr_marked_dirty().ok(),
            tables: vm.host().live_tables_by_node(),
            nr_shadow_tables: (vm.shadow_pages_peak() > 0).then(|| vm.nr_shadow_pages()),
        }
    }
}
