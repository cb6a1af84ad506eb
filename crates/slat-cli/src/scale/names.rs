//! Names of the model's values in titles and labels, and the form of an error.

use slat_model::experiment::Hypervisor;
use slat_model::experiment::beside::Operation;
use slat_model::experiment::numa_split::{Placement, Splitters};
use slat_model::experiment::phases::{Around, Lock, Sharing};
use slat_model::machine::LockKind;

use crate::options::Named;
use crate::quantity;

impl Named for Hypervisor {
    const NAMES: &'static [(Hypervisor, &'static str)] = &[(Hypervisor::Kvm, "kvm"), (Hypervisor::Slat, "slat")];
}

impl Named for Lock {
    const NAMES: &'static [(Lock, &'static str)] =
        &[(Lock::None, "none"), (Lock::Shared, "shared"), (Lock::Exclusive, "exclusive")];
}

impl Named for LockKind {
    const NAMES: &'static [(LockKind, &'static str)] =
        &[(LockKind::Spinning, "spinning"), (LockKind::Sleeping, "sleeping")];
}

impl Named for Operation {
    const NAMES: &'static [(Operation, &'static str)] = &[
        (Operation::Nothing, "nothing"),
        (Operation::Harvest, "harvest"),
        (Operation::InvalidatePage, "invalidate-page"),
        (Operation::InvalidateUnused, "invalidate-unused"),
    ];
}

impl Named for Sharing {
    const NAMES: &'static [(Sharing, &'static str)] =
        &[(Sharing::Partitioned, "partitioned"), (Sharing::Overlapping, "overlapping")];
}

impl Named for Around {
    const NAMES: &'static [(Around, &'static str)] = &[(Around::Host, "host"), (Around::Nothing, "engine")];
}

impl Named for Placement {
    const NAMES: &'static [(Placement, &'static str)] =
        &[(Placement::Caller, "caller-node"), (Placement::HugePage, "huge-page-node")];
}

impl Named for Splitters {
    const NAMES: &'static [(Splitters, &'static str)] = &[(Splitters::One, "one"), (Splitters::PerNode, "per-node")];
}

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
