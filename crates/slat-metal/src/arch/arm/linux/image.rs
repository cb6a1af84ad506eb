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
