//! Counts that only grow, defined once for their sum and their difference.

/// Defines a struct of counts. Its fields are public, and `u64` or such a struct.
macro_rules! counters {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $Counters:ident {
            $($(#[$doc:meta])* $name:ident: $type:ty,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        $visibility struct $Counters {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl $Counters {
            /// The counts since `earlier`, an older value of the same counts.
            #[must_use]
            pub fn since(self, earlier: $Counters) -> $Counters {
                self - earlier
            }
        }

        impl std::ops::Add for $Counters {
            type Output = $Counters;

            fn add(self, other: $Counters) -> $Counters {
                $Counters { $($name: self.$name + other.$name,)* }
            }
        }

        impl std::ops::Sub for $Counters {
            type Output = $Counters;

            fn sub(self, earlier: $Counters) -> $Counters {
                $Counters { $($name: self.$name - earlier.$name,)* }
            }
        }
    };
}
