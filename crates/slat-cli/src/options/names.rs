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

/// A value of a library that has names here ([`names!`]).
pub(crate) trait Named: Copy + PartialEq + Send + Sync + 'static {
    /// The values, in the order of columns.
    const VALUES: &'static [Self];
    /// What each is, for the help of an option.
    const HELP: &'static [&'static str];

    fn name(self) -> &'static str;
}

/// Names the values of an enum, and perhaps says what each is. A value without a name is an error of
/// the compiler, unless `_` names those that no option has.
macro_rules! names {
    ($type:ident: $($value:ident = $name:literal),+ $(, _ = $others:literal)? $(; $($help:literal),+)?) => {
        impl $crate::options::Named for $type {
            const VALUES: &'static [$type] = &[$($type::$value),+];
            const HELP: &'static [&'static str] = &[$($($help),+)?];

            fn name(self) -> &'static str {
                match self { $($type::$value => $name,)+ $(_ => $others)? }
            }
        }
    };
}
pub(crate) use names;

names!(Locking: Exclusive = "exclusive", Shared = "shared", None = "none");
names!(AccessTracking: AccessedBit = "accessed-bit", Faults = "faults";
       "By the accessed bits of the leaves", "By faults", "Both");
names!(DirtyTracking: WriteProtect = "write-protect", WriteProtectLeaves = "write-protect",
       DirtyBit = "dirty-bit", PageModificationLog = "pml");
names!(ManualProtect: Disabled = "disabled", Enabled = "enabled", InitiallySet = "initially-set");

/// The value of an option that names one of the values of `T`, or all of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct OneOrAll<T> {
    /// As the option has it.
    pub(crate) name: String,
    /// In the order of columns.
    pub(crate) values: Vec<T>,
}

pub(crate) fn named<T: Named>() -> impl TypedValueParser<Value = T> + use<T> {
    one_or_all(None).map(|one: OneOrAll<T>| one.values[0])
}

/// Parses a name of a value of `T`, or the name of all of them, if there is one.
pub(crate) fn one_or_all<T: Named>(all: Option<&'static str>) -> impl TypedValueParser<Value = OneOrAll<T>> + use<T> {
    let names = T::VALUES.iter().map(|value| value.name()).chain(all);
    let helps = T::HELP.iter().copied().map(Some).chain(std::iter::repeat(None));
    let values = names.zip(helps).map(|(name, help)| match help {
        Some(help) => PossibleValue::new(name).help(help),
        None => PossibleValue::new(name),
    });
    PossibleValuesParser::new(values).map(|name| {
        let one = T::VALUES.iter().find(|value| value.name() == name);
        OneOrAll { values: one.map_or_else(|| T::VALUES.to_vec(), |one| vec![*one]), name }
    })
}
