//! The command line that a device tree has (`/chosen/bootargs`): the words of the image, the places
//! of the files that the emulator has loaded, and behind ` -- ` the command line of a Linux guest.
//!
//! ```text
//! guest=linux cpus=2 kernel=0x48000000,35651584 initramfs=0x4a200000,1048576 -- console=ttyAMA0
//! ```
//! An address is hexadecimal, a length decimal, in bytes.

use thiserror::Error;

use crate::boot::Span;

/// Between the words of the image and those of the guest's kernel.
const SEPARATOR: &str = " -- ";

/// The words that name a file, in the order in which the guest's loader wants the files. `options`
/// leaves them out.
pub const FILES: [&str; 2] = ["kernel", "initramfs"];

/// What is in a command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bootargs<'t> {
    /// The words of the image, with those that name a file.
    pub words: &'t str,
    /// The command line of the guest's kernel.
    pub guest: &'t str,
    /// Where the [`FILES`] are.
    pub files: [Option<Span>; FILES.len()],
}

/// A file whose place makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the command line has no place of a file, 0xADDRESS,BYTES: {0}")]
pub struct BadPlace<'t>(&'t str);

impl<'t> Bootargs<'t> {
    /// Reads them.
    ///
    /// # Errors
    /// [`BadPlace`] names the word.
    pub fn parse(text: &'t str) -> Result<Bootargs<'t>, BadPlace<'t>> {
        let (words, guest) = text.split_once(SEPARATOR).unwrap_or((text, ""));
        let mut files = [None; FILES.len()];
        for word in words.split_whitespace() {
            let Some((name, value)) = word.split_once('=') else { continue };
            if let Some(index) = FILES.iter().position(|&file| file == name) {
                files[index] = Some(place(value).ok_or(BadPlace(word))?);
            }
        }
        Ok(Bootargs { words, guest: guest.trim(), files })
    }
}

fn place(value: &str) -> Option<Span> {
    let (address, nr_bytes) = value.split_once(',')?;
    let start = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
    let end = start.checked_add(nr_bytes.parse().ok()?)?;
    (start < end).then_some(Span { start, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_their_places_and_the_guest_its_words() {
        let text = "guest=linux kernel=0x48000000,4096 initramfs=0x4a000000,10 cpus=2 -- console=ttyAMA0 kernel=x";
        let found = Bootargs::parse(text).unwrap();
        let kernel = Span { start: 0x4800_0000, end: 0x4800_1000 };
        assert_eq!(found.files, [Some(kernel), Some(Span { start: 0x4a00_0000, end: 0x4a00_000a })]);
        assert_eq!(found.guest, "console=ttyAMA0 kernel=x");
        assert!(found.words.ends_with("cpus=2"));
        assert_eq!(Bootargs::parse(""), Ok(Bootargs { words: "", guest: "", files: [None, None] }));
    }

    #[test]
    fn a_place_is_an_address_and_a_length() {
        for bad in [
            "kernel=",
            "kernel=0x1000",
            "kernel=1000,1",
            "kernel=0x1000,0",
            "kernel=0x1000,0x1",
            "initramfs=0xffffffffffffffff,2",
            "kernel=0x,1",
            "kernel=0x1000,-1",
        ] {
            assert_eq!(Bootargs::parse(bad), Err(BadPlace(bad)), "{bad}");
        }
    }
}
