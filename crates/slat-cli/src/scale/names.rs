//! Names of the model's values in titles and labels, and the form of an error.

use slat_model::experiment::Hypervisor;
use slat_model::experiment::phases::Lock;

use crate::quantity;

pub(super) fn hypervisor_name(hypervisor: Hypervisor) -> &'static str {
    match hypervisor {
        Hypervisor::Kvm => "kvm",
        Hypervisor::Slat => "slat",
    }
}

pub(super) fn lock_name(lock: Lock) -> &'static str {
    match lock {
        Lock::None => "none",
        Lock::Shared => "shared",
        Lock::Exclusive => "exclusive",
    }
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
