//! Puts a kernel into the guest's memory (Linux, Documentation/arch/riscv/boot-image-header.rst and
//! boot.rst).

use alloc::vec::Vec;

use slat::PAGE_SIZE;
use thiserror::Error;

use crate::boot::{Module, Span};
use crate::ram::Ram;

/// "RSC", 5: the second magic number, and where it is.
const MAGIC: [u8; 4] = *b"RSC\x05";
const MAGIC_OFFSET: usize = 56;
/// Where the header has the distance of the kernel from the memory's start, and its size.
const TEXT_OFFSET: usize = 8;
const IMAGE_SIZE: usize = 16;

/// A kernel that cannot be booted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(super) enum ImageError {
    /// No header.
    #[error("the first module is no kernel of Linux for RISC-V: {0} bytes, without the header of an Image")]
    NotLinux(usize),
    /// It does not fit.
    #[error("the kernel needs memory up to {needed:#x}, and the device tree begins at {end:#x}: too little memory")]
    TooLittleMemory {
        /// The end of the kernel's memory.
        needed: u64,
        /// The start of the device tree, behind which the initramfs is.
        end: u64,
    },
}

/// A kernel in the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Image {
    /// Where it is entered.
    pub entry: u64,
    /// Its device tree.
    pub tree: u64,
}

impl Image {
    /// Loads `kernel` and `initramfs` into `ram`, which the guest has at `span`, with the device
    /// tree that `make_tree` makes for an initramfs at that place.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn load(
        [kernel, initramfs]: [Module; 2],
        span: Span,
        ram: &Ram,
        make_tree: impl FnOnce(Span) -> Vec<u8>,
    ) -> Result<Image, ImageError> {
        let (text_offset, size_bytes) = header(kernel.bytes).ok_or(ImageError::NotLinux(kernel.bytes.len()))?;
        let entry = span.start.saturating_add(text_offset);
        let needed = entry.saturating_add(size_bytes.max(kernel.bytes.len() as u64));
        // The initramfs ends where the memory does; the device tree is before it.
        let initramfs_start = span.end.saturating_sub(initramfs.bytes.len() as u64) & !(PAGE_SIZE - 1);
        let initramfs_span = Span { start: initramfs_start, end: initramfs_start + initramfs.bytes.len() as u64 };
        let bytes = make_tree(initramfs_span);
        let tree = initramfs_start.saturating_sub(bytes.len() as u64) & !(PAGE_SIZE - 1);
        if needed > tree {
            return Err(ImageError::TooLittleMemory { needed, end: tree });
        }
        for (address, bytes) in [(entry, kernel.bytes), (initramfs_start, initramfs.bytes), (tree, &bytes)] {
            ram.write(address - span.start, bytes);
        }
        Ok(Image { entry, tree })
    }
}

/// The kernel's distance from the memory's start and its size, if the file has a header.
fn header(kernel: &[u8]) -> Option<(u64, u64)> {
    let number = |offset| Some(u64::from_le_bytes(*kernel.get(offset..)?.first_chunk()?));
    let has_magic = kernel.get(MAGIC_OFFSET..)?.starts_with(&MAGIC);
    has_magic.then_some((number(TEXT_OFFSET)?, number(IMAGE_SIZE)?))
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use core::sync::atomic::Ordering;

    use super::*;
    use crate::ram::Blocks;

    const SPAN: Span = Span { start: 0x8000_0000, end: 0x8080_0000 };

    fn kernel(offset: u64, size_bytes: u64) -> &'static [u8] {
        let mut bytes = vec![0; 64];
        for (at, value) in [(TEXT_OFFSET, offset), (IMAGE_SIZE, size_bytes)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes[MAGIC_OFFSET..MAGIC_OFFSET + 4].copy_from_slice(&MAGIC);
        bytes.leak()
    }

    fn load(kernel: &'static [u8]) -> (Ram, Result<Image, ImageError>) {
        let ram = Ram::of(Blocks::Small, (SPAN.end - SPAN.start) / PAGE_SIZE, |_, _| {});
        let modules = [kernel, b"files"].map(|bytes| Module { bytes, text: "" });
        let loaded = Image::load(modules, SPAN, &ram, |initramfs| {
            assert_eq!(initramfs, Span { start: 0x807f_f000, end: 0x807f_f005 });
            b"treetree".into()
        });
        (ram, loaded)
    }

    #[test]
    fn files_are_where_the_kernel_finds_them() {
        let (ram, loaded) = load(kernel(0x20_0000, 0x40_0000));
        assert_eq!(loaded, Ok(Image { entry: 0x8020_0000, tree: 0x807f_e000 }));
        let word =
            |address: u64| ram.lock((address - SPAN.start) / PAGE_SIZE).unwrap().words()[0].load(Ordering::Relaxed);
        assert_eq!(word(0x807f_e000), u64::from_le_bytes(*b"treetree"));
        assert_eq!(word(0x807f_f000).to_le_bytes()[..5], *b"files");
    }

    #[test]
    fn a_kernel_that_cannot_be_booted_is_refused() {
        for (kernel, error) in [
            (&b"no kernel"[..], ImageError::NotLinux(9)),
            (kernel(0, 0x7f_e001), ImageError::TooLittleMemory { needed: 0x807f_e001, end: 0x807f_e000 }),
            (kernel(u64::MAX, 0), ImageError::TooLittleMemory { needed: u64::MAX, end: 0x807f_e000 }),
        ] {
            assert_eq!(load(kernel).1, Err(error));
        }
    }
}
