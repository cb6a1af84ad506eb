//! The names of values: the same in options, in what is printed, and in results.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::tables::AccessTracking;

/// The name of a value of an option.
pub(crate) trait ValueName {
    fn name(self) -> String;
}

impl<T: ValueEnum> ValueName for T {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// A value of a library that has names here.
pub(crate) trait Named: Copy + PartialEq + Send + Sync + 'static {
    /// The values with their names, in the order of columns.
    const NAMES: &'static [(Self, &'static str)];
    /// What each is, for the help of an option.
    const HELP: &'static [&'static str] = &[];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(value, _)| *value == self).expect("each value has a name").1
    }
}

impl Named for Locking {
    const NAMES: &'static [(Locking, &'static str)] =
        &[(Locking::Exclusive, "exclusive"), (Locking::Shared, "shared"), (Locking::None, "none")];
}

impl Named for AccessTracking {
    const NAMES: &'static [(AccessTracking, &'static str)] =
        &[(AccessTracking::AccessedBit, "accessed-bit"), (AccessTracking::Faults, "faults")];
    const HELP: &'static [&'static str] = &["By the accessed bits of the leaves", "By faults", "Both"];
}

impl Named for DirtyTracking {
    const NAMES: &'static [(DirtyTracking, &'static str)] = &[
        (DirtyTracking::WriteProtect, "write-protect"),
        (DirtyTracking::WriteProtectLeaves, "write-protect"),
        (DirtyTracking::DirtyBit, "dirty-bit"),
        (DirtyTracking::PageModificationLog, "pml"),
    ];
}

impl Named for ManualProtect {
    const NAMES: &'static [(ManualProtect, &'static str)] = &[
        (ManualProtect::Disabled, "disabled"),
        (ManualProtect::Enabled, "enabled"),
        (ManualProtect::InitiallySet, "initially-set"),
    ];
}

/// The value of an option that names one of the values of `T`, or all of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct OneOrAll<T> {
    /// As the option has it.
    pub(crate) name: String,
    /// In the order of columns.
    pub(crate) values: Vec<T>,
}

/// Parses a name of a value of `T`.
pub(crate) fn named<T: Named>() -> impl TypedValueParser<Value = T> + use<T> {
    one_or_all(None).map(|one: OneOrAll<T>| one.values[0])
}

/// Parses a name of a value of `T`, or the name of all of them, if there is one.
pub(crate) fn one_or_all<T: Named>(all: Option<&'static str>) -> impl TypedValueParser<Value = OneOrAll<T>> + use<T> {
    let names = T::NAMES.iter().map(|(_, name)| *name).chain(all);
    let helps = T::HELP.iter().copied().map(Some).chain(std::iter::repeat(None));
    let values = names.zip(helps).map(|(name, help)| match help {
        Some(help) => PossibleValue::new(name).help(help),
        None => PossibleValue::new(name),
    });
    PossibleValuesParser::new(values).map(|name| {
        let is_one = T::NAMES.iter().any(|(_, of_one)| *of_one == name);
        let values = T::NAMES.iter().filter(|(_, of_one)| !is_one || *of_one == name);
        OneOrAll { values: values.map(|(value, _)| *value).collect(), name }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_has_its_name() {
        // A new value is an error here, and wants a name above.
        let locking = |locking: Locking| match locking {
            Locking::Exclusive => "exclusive",
            Locking::Shared => "shared",
            Locking::None => "none",
        };
        let access = |tracking: AccessTracking| match tracking {
            AccessTracking::AccessedBit => "accessed-bit",
            AccessTracking::Faults => "faults",
        };
        let dirty = |tracking: DirtyTracking| match tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => "write-protect",
            DirtyTracking::DirtyBit => "dirty-bit",
            DirtyTracking::PageModificationLog => "pml",
        };
        let protect = |protect: ManualProtect| match protect {
            ManualProtect::Disabled => "disabled",
            ManualProtect::Enabled => "enabled",
            ManualProtect::InitiallySet => "initially-set",
        };
        Locking::NAMES.iter().for_each(|(value, _)| assert_eq!(value.name(), locking(*value)));
        AccessTracking::NAMES.iter().for_each(|(value, _)| assert_eq!(value.name(), access(*value)));
        DirtyTracking::NAMES.iter().for_each(|(value, _)| assert_eq!(value.name(), dirty(*value)));
        ManualProtect::NAMES.iter().for_each(|(value, _)| assert_eq!(value.name(), protect(*value)));
    }
}
