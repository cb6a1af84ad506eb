//! A test for each format and locking. The list of formats is `slat::for_each_format`.

use slat::baselines::Locking;
use slat::format::Format;

use super::log::LOCKINGS;

/// Runs an expression for each format and locking: `for_each_locking!(F, locking => ..)`.
#[allow(unused_macros, reason = "each test binary uses a part")]
macro_rules! for_each_locking {
    ($format:ident, $locking:ident => $run:expr) => {
        let mut turns = $crate::common::log::LOCKINGS.into_iter().cycle();
        slat::for_each_format!($format => {
            for $locking in $crate::common::lockings::<$format>(&mut turns) {
                $run
            }
        });
    };
}
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use for_each_locking;

/// A test for each format and locking: `$test::<F>(locking)`, or an expression. A condition leaves
/// formats out: `if F::GENERATION != 0`.
#[allow(unused_macros, reason = "each test binary uses a part")]
macro_rules! each {
    ($name:ident, $test:ident $(, if $condition:expr)?) => {
        $crate::common::each!($name, |F, locking| $test::<F>(locking) $(, if $condition)?);
    };
    ($name:ident, |$format:ident, $locking:ident| $run:expr $(, if $condition:expr)?) => {
        #[test]
        fn $name() {
            $crate::common::for_each_locking!($format, $locking => if true $(&& $condition)? { $run });
        }
    };
}
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use each;

/// The lockings that tests run format `F` with. A format whose directory entries can be protected
/// runs with all. Each other format runs with the next of `turns`.
pub fn lockings<F: Format>(turns: &mut impl Iterator<Item = Locking>) -> Vec<Locking> {
    if F::GENERATION != 0 { LOCKINGS.to_vec() } else { turns.take(1).collect() }
}
