//! Parsers of values: counts and sizes.

/// A whole number above zero.
pub(crate) fn positive<N: std::str::FromStr + Default + PartialEq>(text: &str) -> Result<N, String>
where
    N::Err: std::fmt::Display,
{
    match text.parse::<N>() {
        Ok(number) if number == N::default() => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// A number of bytes with an optional binary suffix, a multiple of the page size.
pub(crate) fn size_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.chars().last() {
        Some('k' | 'K') => (&text[..text.len() - 1], 10),
        Some('m' | 'M') => (&text[..text.len() - 1], 20),
        Some('g' | 'G') => (&text[..text.len() - 1], 30),
        Some('t' | 'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().map_err(|error| format!("{error} (a number, optionally with K, M, G or T)"))?;
    let bytes = number.checked_mul(1 << shift).ok_or("too large")?;
    if bytes == 0 {
        return Err("must not be zero".to_owned());
    }
    if !bytes.is_multiple_of(slat::PAGE_SIZE) {
        return Err(format!("must be a multiple of the page size, {}", slat::PAGE_SIZE));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_and_are_page_multiples() {
        assert_eq!(size_bytes("4096"), Ok(4096));
        assert_eq!(size_bytes("4K"), Ok(4096));
        assert_eq!(size_bytes("3m"), Ok(3 << 20));
        assert_eq!(size_bytes("2G"), Ok(2 << 30));
        assert_eq!(size_bytes("1T"), Ok(1 << 40));
        for bad in ["", "0", "0G", "K", "4095", "1", "-4K", "4 K", "4KiB", "99999999999999999999", "99999999999T", "é"]
        {
            assert!(size_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn counts_are_positive() {
        assert_eq!(positive::<usize>("3"), Ok(3));
        assert!(positive::<usize>("0").is_err() && positive::<u32>("-1").is_err() && positive::<u32>("").is_err());
    }
}
