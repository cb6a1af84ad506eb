//! Names of the model's values in titles and labels, and the form of an error.

use slat_model::experiment::Hypervisor;
use slat_model::experiment::beside::Operation;
use slat_model::experiment::numa_split::{Placement, Splitters};
use slat_model::experiment::phases::{Around, Lock, Sharing};
use slat_model::machine::LockKind;

use crate::options::names;
use crate::quantity;

names!(Hypervisor: Kvm = "kvm", Slat = "slat");
names!(Lock: None = "none", Shared = "shared", Exclusive = "exclusive");
names!(LockKind: Spinning = "spinning", Sleeping = "sleeping");
names!(Operation: Nothing = "nothing", Harvest = "harvest", InvalidatePage = "invalidate-page",
       InvalidateUnused = "invalidate-unused");
names!(Sharing: Partitioned = "partitioned", Overlapping = "overlapping");
names!(Around: Host = "host", Nothing = "engine");
names!(Placement: Caller = "caller-node", HugePage = "huge-page-node");
names!(Splitters: One = "one", PerNode = "per-node");

/// By how much a prediction is above what was published, with its sign.
pub(super) fn error_of(predicted: f64, published: f64) -> String {
    quantity::error(predicted / published - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_positive_where_the_prediction_is_larger() {
        assert_eq!(error_of(12.0, 10.0), "+20.0%");
        assert_eq!(error_of(8.0, 10.0), "-20.0%");
    }
}
