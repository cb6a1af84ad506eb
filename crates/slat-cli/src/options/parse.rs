//! Parsers of values: counts, sizes, and durations.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use slat::PageSize;

/// The longest duration of an option.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// A whole number above zero.
pub(crate) fn positive<N: FromStr<Err: Display> + Default + PartialEq>(text: &str) -> Result<N, String> {
    match text.parse::<N>() {
        Ok(number) if number == N::default() => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// A size as people write it (4096, 4K, 4KiB, "64 MiB"; all units are powers of 1024), a multiple
/// of the page size.
pub(crate) fn size_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_size::Config::new().with_binary().parse_size(text);
    match bytes.map_err(|error| format!("{error}; write it as 4096, 64M or 1GiB"))? {
        0 => Err("must not be zero".to_owned()),
        bytes if bytes.is_multiple_of(slat::PAGE_SIZE) => Ok(bytes),
        _ => Err(format!("must be a multiple of the page size, {}", slat::PAGE_SIZE)),
    }
}

pub(crate) fn page_size(text: &str) -> Result<PageSize, String> {
    let bytes = size_bytes(text)?;
    let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
    sizes.into_iter().find(|size| size.size_bytes() == bytes).ok_or_else(|| "must be 4K, 2M or 1G".to_owned())
}

/// A duration as people write it (50us, 10s, "1m 30s"), which may be zero.
pub(crate) fn delay(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration > LONGEST => Err("must be at most 1day".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("{error}; write it as 50us or 10s")),
    }
}

/// A duration above zero.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match delay(text)? {
        Duration::ZERO => Err("must not be zero".to_owned()),
        duration => Ok(duration),
    }
}

/// The values of an option, without one that the command has no use for.
pub(crate) fn except<T: ValueEnum + PartialEq + Send + Sync + 'static>(
    left_out: &T,
) -> impl TypedValueParser<Value = T> + use<T> {
    let values = T::value_variants().iter().filter(|value| *value != left_out);
    PossibleValuesParser::new(values.filter_map(ValueEnum::to_possible_value)).try_map(|name| T::from_str(&name, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_as_people_write_them_and_page_multiples() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("64 MiB", 64 << 20),
            ("3m", 3 << 20),
            ("2G", 2 << 30),
            ("1GB", 1 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(size_bytes(text), Ok(bytes), "{text}");
        }
        for bad in ["", "0", "0G", "K", "4095", "1", "-4K", "1T1", "99999999999999999999", "99999999999T", "é"] {
            assert!(size_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(page_size("2M"), Ok(PageSize::Size2M));
        assert_eq!((page_size("1GiB"), page_size("4k")), (Ok(PageSize::Size1G), Ok(PageSize::Size4K)));
        assert!(page_size("8K").is_err());
    }

    #[test]
    fn durations_are_as_people_write_them() {
        assert_eq!(duration("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert_eq!(delay("0s"), Ok(Duration::ZERO));
        for bad in ["", "10", "0s", "-1s", "2days", "s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn counts_are_positive() {
        assert_eq!(positive::<usize>("3"), Ok(3));
        assert!(positive::<usize>("0").is_err() && positive::<u32>("-1").is_err() && positive::<u32>("").is_err());
    }
}
