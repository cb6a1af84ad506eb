//! Puts a kernel into the guest's memory (Linux, Documentation/arch/arm64/booting.rst).

use alloc::vec::Vec;

use slat::PAGE_SIZE;
use thiserror::Error;

use crate::boot::{Module, Span};
use crate::ram::Ram;

/// "ARM\x64", at byte 56 of the header.
const MAGIC: &[u8] = b"ARM\x64";
const MAGIC_OFFSET: usize = 56;
/// Where the header has the offset of the image in memory, the size that it needs there, and flags.
const TEXT_OFFSET: usize = 8;
const IMAGE_SIZE: usize = 16;
const FLAGS: usize = 24;
/// The kernel is big-endian.
const BIG_ENDIAN: u64 = 1 << 0;

/// The alignment of the memory that the kernel is in, and of a device tree.
const ALIGNMENT: u64 = 2 << 20;
/// The most that a device tree may have.
const MAX_TREE_BYTES: u64 = 2 << 20;

/// A kernel that cannot be booted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(super) enum ImageError {
    /// No header.
    #[error("the first file is no kernel of Linux for Arm: {0} bytes, without the header of an Image")]
    NotLinux(usize),
    /// The byte order.
    #[error("the kernel is big-endian")]
    BigEndian,
    /// A kernel from before Linux 3.17.
    #[error("the kernel does not say how much memory it needs")]
    NoSize,
    /// It does not fit.
    #[error("the kernel needs memory up to {needed:#x}, and the device tree begins at {end:#x}: too little memory")]
    TooLittleMemory {
        /// The end of the kernel's memory.
        needed: u64,
        /// The start of the device tree, behind which the initramfs is.
        end: u64,
    },
    /// The device tree is too large.
    #[error("the guest's device tree has {0} bytes, more than 2 MiB")]
    LargeTree(usize),
}

/// A kernel in the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Image {
    /// Where it is entered, at EL1, with the MMU off.
    pub entry: u64,
    /// Its device tree.
    pub tree: u64,
}

fn word(bytes: &[u8], offset: usize) -> u64 {
    bytes[offset..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
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
        let bytes = kernel.bytes;
        if bytes.get(MAGIC_OFFSET..MAGIC_OFFSET + MAGIC.len()) != Some(MAGIC) {
            return Err(ImageError::NotLinux(bytes.len()));
        }
        if word(bytes, FLAGS) & BIG_ENDIAN != 0 {
            return Err(ImageError::BigEndian);
        }
        let (offset, size_bytes) = (word(bytes, TEXT_OFFSET), word(bytes, IMAGE_SIZE));
        if size_bytes == 0 {
            return Err(ImageError::NoSize);
        }
        let entry = span.start.saturating_add(offset);
        let needed = entry.saturating_add(size_bytes.max(bytes.len() as u64));
        // At the end of the memory, the device tree before it.
        let initramfs_start = span.end.saturating_sub(initramfs.bytes.len() as u64) & !(PAGE_SIZE - 1);
        let tree = initramfs_start.saturating_sub(MAX_TREE_BYTES) & !(ALIGNMENT - 1);
        if needed > tree {
            return Err(ImageError::TooLittleMemory { needed, end: tree });
        }
        let initramfs_end = initramfs_start + initramfs.bytes.len() as u64;
        let tree_bytes = make_tree(Span { start: initramfs_start, end: initramfs_end });
        if tree_bytes.len() as u64 > MAX_TREE_BYTES {
            return Err(ImageError::LargeTree(tree_bytes.len()));
        }
        for (address, bytes) in [(entry, bytes), (initramfs_start, initramfs.bytes), (tree, &tree_bytes)] {
            ram.write(address - span.start, bytes);
        }
        Ok(Image { entry, tree })
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use core::sync::atomic::Ordering;

    use super::*;
    use crate::ram::Blocks;

    const SPAN: Span = Span { start: 0x4000_0000, end: 0x4080_0000 };

    fn kernel(offset: u64, size_bytes: u64, flags: u64) -> &'static [u8] {
        let mut bytes = vec![0; 64];
        for (at, value) in [(TEXT_OFFSET, offset), (IMAGE_SIZE, size_bytes), (FLAGS, flags)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes[MAGIC_OFFSET..MAGIC_OFFSET + 4].copy_from_slice(MAGIC);
        bytes.leak()
    }

    fn load(kernel: &'static [u8], tree: &[u8]) -> (Ram, Result<Image, ImageError>) {
        let ram = Ram::of(Blocks::Small, (SPAN.end - SPAN.start) / PAGE_SIZE, |_, _| {});
        let modules = [kernel, b"files"].map(|bytes| Module { bytes, text: "" });
        let loaded = Image::load(modules, SPAN, &ram, |initramfs| {
            assert_eq!(initramfs, Span { start: 0x407f_f000, end: 0x407f_f005 });
            tree.into()
        });
        (ram, loaded)
    }

    #[test]
    fn files_are_where_the_kernel_finds_them() {
        let (ram, loaded) = load(kernel(0x8_0000, 0x20_0000, 0), b"treetree");
        // The tree is 2 MiB before the files, at a multiple of 2 MiB.
        assert_eq!(loaded, Ok(Image { entry: 0x4008_0000, tree: 0x4040_0000 }));
        let word =
            |address: u64| ram.lock((address - SPAN.start) / PAGE_SIZE).unwrap().words()[0].load(Ordering::Relaxed);
        assert_eq!(word(0x4040_0000), u64::from_le_bytes(*b"treetree"));
        assert_eq!(word(0x407f_f000).to_le_bytes()[..5], *b"files");
    }

    #[test]
    fn a_kernel_that_cannot_be_booted_is_refused() {
        for (kernel, error) in [
            (&b"no kernel"[..], ImageError::NotLinux(9)),
            (kernel(0, 1, BIG_ENDIAN), ImageError::BigEndian),
            (kernel(0, 0, 0), ImageError::NoSize),
            (kernel(8, 0x40_0000, 0), ImageError::TooLittleMemory { needed: 0x4040_0008, end: 0x4040_0000 }),
            (kernel(u64::MAX, 1, 0), ImageError::TooLittleMemory { needed: u64::MAX, end: 0x4040_0000 }),
        ] {
            assert_eq!(load(kernel, b"").1, Err(error));
        }
        let tree = vec![0; MAX_TREE_BYTES as usize + 1];
        assert_eq!(load(kernel(0, 1, 0), &tree).1, Err(ImageError::LargeTree(tree.len())));
    }
}
