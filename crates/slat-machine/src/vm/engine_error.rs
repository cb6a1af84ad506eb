//! The engine's errors as a cause of this crate's.

/// Lets `?` turn each error of the engine into the variant `Engine` of `$error`, which has their
/// sum.
macro_rules! from_engine_errors {
    ($error:ident: $($kind:ident),*) => {
        $(impl From<slat::error::$kind> for $error {
            fn from(error: slat::error::$kind) -> $error {
                $error::Engine(error.into())
            }
        })*
    };
}

pub(crate) use from_engine_errors;
