//! Puts a kernel into the guest's memory (Linux, Documentation/arch/riscv/boot-image-header.rst and
//! boot.rst).

use slat::PAGE_SIZE;
use thiserror::Error;

use super::{ram_span, tree};
use crate::boot::{Module, Span};
use crate::options::Options;
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
    /// Loads `kernel` and `initramfs`, as `options` say.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn load(options: &Options, [kernel, initramfs]: [Module; 2], ram: &Ram) -> Result<Image, ImageError> {
        let (text_offset, size_bytes) = header(kernel.bytes).ok_or(ImageError::NotLinux(kernel.bytes.len()))?;
        let span = ram_span(options.memory_mib << 20);
        let entry = span.start.saturating_add(text_offset);
        let needed = entry.saturating_add(size_bytes.max(kernel.bytes.len() as u64));
        // The initramfs ends where the memory does; the device tree is before it.
        let initramfs_start = span.end.saturating_sub(initramfs.bytes.len() as u64) & !(PAGE_SIZE - 1);
        let initramfs_span = Span { start: initramfs_start, end: initramfs_start + initramfs.bytes.len() as u64 };
        let bytes = tree::build(options, kernel.text, span, initramfs_span);
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
