//! Puts a kernel into the guest's memory (Linux, Documentation/arch/x86/boot.rst, "64-bit Boot
//! Protocol").

#![expect(unsafe_code, reason = "reads the kernel's header, and has boot parameters of zeros")]

use alloc::boxed::Box;
use alloc::format;
use core::mem::{offset_of, size_of};

use linux_raw_sys::bootparam::{XLF_KERNEL_64, boot_e820_entry, boot_params, setup_header};
use slat::PAGE_SIZE;
use thiserror::Error;

use super::{BIOS, RAM_START, firmware};
use crate::boot::{BootInfo, Module, Span};
use crate::options::Options;
use crate::ram::{Frames, Ram};

/// Where things are in the guest's low memory.
const BOOT_PARAMS: u64 = 0x7000;
const GDT: u64 = 0x8000;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
/// The last byte of low memory that is memory.
const LOW_END: u64 = 0x9_f000;

/// "HdrS".
const MAGIC: u32 = 0x5372_6448;
/// The 64-bit entry is so many bytes behind the start.
const ENTRY_OFFSET: u64 = 0x200;
/// A loader without a number of its own.
const UNKNOWN_LOADER: u8 = 0xff;

/// The types of memory in the E820 map.
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// A kernel that cannot be booted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(super) enum ImageError {
    /// No header.
    #[error("the first module is no kernel of Linux for x86: {0} bytes, without the header of a bzImage")]
    NotLinux(usize),
    /// No 64-bit entry.
    #[error("the kernel has no 64-bit entry (boot protocol {0:#x})")]
    No64(u16),
    /// It does not fit.
    #[error("the kernel needs memory up to {needed:#x}, and the initramfs begins at {end:#x}: too little memory")]
    TooLittleMemory {
        /// The end of the kernel's memory.
        needed: u64,
        /// The start of the initramfs.
        end: u64,
    },
    /// The command line is too long.
    #[error("the command line has {0} bytes, more than the kernel takes")]
    LongCommandLine(usize),
}

/// A kernel in the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Image {
    /// Where it is entered, in 64-bit mode.
    pub entry: u64,
    /// Its boot parameters.
    pub boot_params: u64,
    /// The root of its first page tables: 4 GiB to themselves.
    pub cr3: u64,
    /// Its first descriptor table: code and data at 10h and 18h.
    pub gdt: Span,
}

impl Image {
    /// Loads `kernel` and `initramfs` into `ram`, as `options` say, for the machine of `boot`. What
    /// the kernel needs beside them is in `low`, the memory below [`RAM_START`].
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn load(
        options: &Options,
        boot: &BootInfo,
        [kernel, initramfs]: [Module; 2],
        low: &Frames,
        ram: &Ram,
    ) -> Result<Image, ImageError> {
        let header = header(kernel.bytes).ok_or(ImageError::NotLinux(kernel.bytes.len()))?;
        if header.version < 0x20c || u32::from(header.xloadflags) & XLF_KERNEL_64 == 0 {
            return Err(ImageError::No64(header.version));
        }
        let nr_setup_sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
        let code = kernel.bytes.get((nr_setup_sectors as usize + 1) * 512..).unwrap_or_default();
        let start = header.pref_address;
        let end = options.memory_mib << 20;
        // At the end of the memory, as the protocol recommends.
        let initramfs_start = end.saturating_sub(initramfs.bytes.len() as u64) & !(PAGE_SIZE - 1);
        let needed = start.saturating_add(u64::from(header.init_size).max(code.len() as u64));
        if needed > initramfs_start || start < RAM_START.0 {
            return Err(ImageError::TooLittleMemory { needed, end: initramfs_start });
        }
        let command_line = format!("{} nr_cpus={}\0", kernel.text, options.nr_cpus);
        if command_line.len() > header.cmdline_size as usize {
            return Err(ImageError::LongCommandLine(command_line.len()));
        }
        ram.write(start - RAM_START.0, code);
        ram.write(initramfs_start - RAM_START.0, initramfs.bytes);
        low.write(COMMAND_LINE, command_line.as_bytes());
        write_tables(low);
        let mut header = header;
        header.type_of_loader = UNKNOWN_LOADER;
        header.cmd_line_ptr = COMMAND_LINE as u32;
        header.ramdisk_image = initramfs_start as u32;
        header.ramdisk_size = initramfs.bytes.len() as u32;
        header.code32_start = start as u32;
        low.write(BOOT_PARAMS, &boot_parameters(header, boot, end));
        let gdt = Span { start: GDT, end: GDT + 32 };
        Ok(Image { entry: start + ENTRY_OFFSET, boot_params: BOOT_PARAMS, cr3: PAGE_TABLES, gdt })
    }
}

/// The kernel's header, if the file has one.
fn header(kernel: &[u8]) -> Option<setup_header> {
    let bytes = kernel.get(offset_of!(boot_params, hdr)..)?.get(..size_of::<setup_header>())?;
    // SAFETY: as many bytes as the header, which is packed and of integers.
    let header = unsafe { bytes.as_ptr().cast::<setup_header>().read_unaligned() };
    (header.header == MAGIC).then_some(header)
}

/// The boot parameters: the header, and the map of the memory.
fn boot_parameters(header: setup_header, boot: &BootInfo, end: u64) -> Box<[u8]> {
    // SAFETY: integers, for all of which zero is a value.
    let mut parameters = unsafe { Box::<boot_params>::new_zeroed().assume_init() };
    parameters.hdr = header;
    let ram = [Span { start: 0, end: LOW_END }, Span { start: BIOS.end, end }];
    let ram = ram.into_iter().map(|span| (span, E820_RAM));
    let firmware = firmware(boot).filter(|span| span.start >= end).map(|span| (span, E820_RESERVED));
    let mut table = parameters.e820_table;
    let mut nr_entries = 0;
    for (place, (span, type_)) in table.iter_mut().zip(ram.chain(firmware)) {
        *place = boot_e820_entry { addr: span.start, size: span.size_bytes(), type_ };
        nr_entries += 1;
    }
    parameters.e820_table = table;
    parameters.e820_entries = nr_entries;
    // SAFETY: the bytes of the structure, which is packed and has no gaps.
    unsafe { core::slice::from_raw_parts((&raw const *parameters).cast::<u8>(), size_of::<boot_params>()) }.into()
}

/// The first page tables, by pages of 1 GiB, and the first descriptors.
fn write_tables(low: &Frames) {
    let write = |address: u64, value: u64| low.write(address, &value.to_le_bytes());
    write(PAGE_TABLES, (PAGE_TABLES + PAGE_SIZE) | 3);
    (0..4).for_each(|index| write(PAGE_TABLES + PAGE_SIZE + 8 * index, index << 30 | 0x83));
    write(GDT + 0x10, 0x00af_9a00_0000_ffff);
    write(GDT + 0x18, 0x00cf_9200_0000_ffff);
}
