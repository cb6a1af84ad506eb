//! The values of options that several experiments have, and their names in results.

use clap::ValueEnum;
use slat::dirty::{DirtyTracking, HugePageLogging};
use slat::format::Format;

use crate::failure::{Failure, LEAVE_KVM_OUT};
use crate::results::NotRun;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DirtyTrackingArg {
    /// Pages are write-protected, and the first write of each faults.
    WriteProtect,
    /// By the dirty bits of the leaves.
    DirtyBit,
    /// By page-modification logging: CPUs log what they make dirty.
    Pml,
    /// As write-protect, and each vCPU writes its dirty pages to a ring instead of the bitmaps.
    Ring,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ProtectionArg {
    /// Dense blocks of 2 MiB as a whole; the next write to a block protects its pages.
    Lazy,
    /// Each page by itself.
    LeafByLeaf,
}

/// The tracking that the options name.
pub(crate) fn dirty_tracking(tracking: DirtyTrackingArg, protection: ProtectionArg) -> DirtyTracking {
    match (tracking, protection) {
        (DirtyTrackingArg::WriteProtect | DirtyTrackingArg::Ring, ProtectionArg::Lazy) => DirtyTracking::WriteProtect,
        (DirtyTrackingArg::WriteProtect | DirtyTrackingArg::Ring, ProtectionArg::LeafByLeaf) => {
            DirtyTracking::WriteProtectLeaves
        }
        (DirtyTrackingArg::DirtyBit, _) => DirtyTracking::DirtyBit,
        (DirtyTrackingArg::Pml, _) => DirtyTracking::PageModificationLog,
    }
}

/// The name of a write protection in options and results, if pages are tracked by one.
pub(crate) fn protection_name(tracking: DirtyTracking) -> Option<&'static str> {
    match tracking {
        DirtyTracking::WriteProtect => Some("lazy"),
        DirtyTracking::WriteProtectLeaves => Some("leaf-by-leaf"),
        DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => None,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum HugePagesArg {
    /// The write splits it, so that pages of 4 KiB are logged.
    Split,
    /// The write marks all pages of its 2 MiB as dirty, and leaves it huge.
    MarkWhole,
}

impl HugePagesArg {
    pub(crate) fn logging(self, split: SplitWhen) -> HugePageLogging {
        match (self, split) {
            (HugePagesArg::Split, SplitWhen::Eager) => HugePageLogging::Split,
            (HugePagesArg::Split, SplitWhen::Lazy) => HugePageLogging::SplitLazily,
            (HugePagesArg::MarkWhole, SplitWhen::Eager) => HugePageLogging::MarkWhole,
            (HugePagesArg::MarkWhole, SplitWhen::Lazy) => HugePageLogging::MarkWholeLazily,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum SplitWhen {
    Eager,
    Lazy,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum FormatArg {
    /// AMD nested page tables.
    Npt,
    /// Intel extended page tables.
    Ept,
    /// Arm stage 2 tables: 4 KiB granule, 48 bits.
    Stage2,
    /// RISC-V G-stage tables, Sv48x4.
    Gstage,
    /// RISC-V G-stage tables, Sv39x4.
    GstageSv39x4,
    /// RISC-V G-stage tables, Sv57x4.
    GstageSv57x4,
    /// Intel VT-d second-stage tables, which an IOMMU walks: here, the CPUs do.
    Vtd,
}

/// Evaluates an expression in which a name is the format type that a [`FormatArg`] means. All code
/// that is generic over the format is compiled for each format, here.
macro_rules! with_format {
    ($format:expr, $name:ident => $expression:expr) => {
        $crate::options::with_format!(
            $format, $name => $expression;
            Npt = Npt, Ept = Ept, Stage2 = Stage2, Gstage = Sv48x4, GstageSv39x4 = Sv39x4, GstageSv57x4 = Sv57x4, Vtd = Vtd
        )
    };
    ($format:expr, $name:ident => $expression:expr; $($arg:ident = $type:ident),+) => {
        match $format {
            $($crate::options::FormatArg::$arg => {
                type $name = slat::format::$type;
                $expression
            })+
        }
    };
}
pub(crate) use with_format;

impl FormatArg {
    /// The name of a format in options and results.
    pub(crate) fn name(self) -> &'static str {
        with_format!(self, F => F::NAME)
    }

    /// Whether CPUs set dirty bits in such tables.
    pub(crate) fn has_dirty_bit(self) -> bool {
        with_format!(self, F => F::HAS_DIRTY_BIT)
    }

    /// Whether CPUs log modifications of such tables.
    pub(crate) fn has_modification_log(self) -> bool {
        with_format!(self, F => F::HAS_MODIFICATION_LOG)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PagingArg {
    /// Guest addresses are guest-physical.
    #[value(alias = "second-stage")]
    Flat,
    /// The guest has 4-level page tables too.
    #[value(name = "2d")]
    TwoDimensional,
    /// As 2d, with one address space for all vCPUs, and CPUs without a second stage: they walk
    /// shadow tables.
    Shadow,
}

/// Whether KVM is measured, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PeerArg {
    /// If it is there, and can do what is asked for.
    Auto,
    /// Always.
    Kvm,
    /// Never.
    None,
}

impl PeerArg {
    /// What `new` makes of the KVM of this machine, after a test run; or why it is not measured.
    pub(crate) fn kvm<T>(
        self,
        new: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<(Option<T>, Option<NotRun>), Failure> {
        if self == PeerArg::None {
            return Ok((None, None));
        }
        match new() {
            Ok(kvm) => Ok((Some(kvm), None)),
            Err(failure @ Failure::Check(_)) => Err(failure),
            Err(why) if self == PeerArg::Kvm => {
                Err(Failure::CannotServe(format!("there is no KVM to measure: {}{LEAVE_KVM_OUT}", reason(&why))))
            }
            Err(why) => Ok((None, Some(NotRun { what: "KVM of this machine".to_owned(), why: reason(&why) }))),
        }
    }
}

/// The reason alone, without its prefix and suffix.
fn reason(failure: &Failure) -> String {
    match failure {
        Failure::CannotServe(why) | Failure::Usage(why) => {
            why.trim_start_matches("KVM: ").trim_end_matches(LEAVE_KVM_OUT).to_owned()
        }
        other => other.to_string(),
    }
}

/// Whether shadow paging supports tables of `format`.
pub(crate) fn check_shadow_format(format: FormatArg) -> Result<(), Failure> {
    match format {
        FormatArg::Npt => Ok(()),
        format => Err(Failure::Usage(format!(
            "--paging shadow needs --format npt: there are no shadow tables with {} tables",
            format.name()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_values_of_the_option_are_the_formats_of_the_engine() {
        let values = FormatArg::value_variants().iter().map(|format| {
            let value = format.to_possible_value().unwrap();
            assert_eq!(value.get_name(), format.name());
            format.name()
        });
        let mut formats = Vec::new();
        slat::for_each_format!(F => {
            formats.push(F::NAME);
        });
        assert_eq!(values.collect::<BTreeSet<_>>(), BTreeSet::from_iter(formats));
    }
}
