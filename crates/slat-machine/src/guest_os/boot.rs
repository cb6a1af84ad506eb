//! The boot of the kernel: the first CPU writes the image with paging off, then each turns paging
//! on.

use slat::shadow::{Gva, PagingRegister, Privilege};
use slat::{Access, PAGE_SIZE};

use super::KernelConfig;
use super::cpu::{
    CR0_PE, CR0_PG, CR0_WP, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_SMAP, CR4_SMEP, EFER_LME, EFER_NXE, KernelGuestCpu,
};
use super::error::KernelError;
use super::frames::GuestFrame;
use super::layout::{
    ENTRY_ROOT_INDEX, ENTRY_TEXT_GVA, ENTRY_TEXT_PAGE, ENTRY_TEXT_WORD, GLOBAL, IDLE_ROOT, IMAGE_BYTES, IMAGE_TABLES,
    NO_EXECUTE, PAGE, PRESENT, TEXT_GVA, TEXT_PAGE, TEXT_WORD, WRITABLE, direct, entry_data, index, kernel_map,
};
use super::{Isolation, Pcids};

/// The parts of the image that the running kernel uses.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    /// Page-table pages of level 1 of the temporary mappings, one for each virtual CPU.
    pub(crate) kernel_map_tables: Box<[GuestFrame]>,
}

/// CR4 while the kernel runs.
pub(crate) fn cr4(config: &KernelConfig) -> u64 {
    let pcids = match config.pcids {
        Pcids::On => CR4_PCIDE,
        Pcids::Off => 0,
    };
    CR4_PAE | CR4_PGE | CR4_SMEP | CR4_SMAP | pcids
}

/// The additional bit of the kernel's mappings. Those that user roots lack must not survive the
/// switch to such a root.
pub(crate) fn global(isolation: Isolation) -> u64 {
    match isolation {
        Isolation::On => 0,
        Isolation::Off => GLOBAL,
    }
}

struct Builder<'a, C> {
    cpu: &'a mut C,
    next: u64,
}

impl<C: KernelGuestCpu> Builder<'_, C> {
    fn write(&mut self, gpa: u64, value: u64) -> Result<(), KernelError> {
        let gva = Gva(gpa);
        self.cpu.write(gva, value).map_err(|error| KernelError::Access {
            gva,
            access: Access::Write,
            privilege: Privilege::Supervisor,
            error,
        })
    }

    fn page(&mut self) -> u64 {
        self.next += PAGE_SIZE;
        self.next - PAGE_SIZE
    }

    /// Sets the PTE of `gva` in the page-table page at `table` to `entry`.
    fn set(&mut self, table: u64, level: u8, gva: Gva, entry: u64) -> Result<(), KernelError> {
        self.write(table + 8 * index(gva.0, level), entry)
    }

    /// A page-table page of `level - 1` below the one at `table`, for `gva`.
    fn table(&mut self, table: u64, level: u8, gva: Gva) -> Result<u64, KernelError> {
        let below = self.page();
        self.set(table, level, gva, below | PRESENT | WRITABLE)?;
        Ok(below)
    }
}

/// Writes the image. The CPU has paging off; memory is zero.
pub(crate) fn build<C: KernelGuestCpu>(cpu: &mut C, config: &KernelConfig) -> Result<Image, KernelError> {
    let mut builder = Builder { cpu, next: IMAGE_TABLES };
    let global = global(config.isolation);
    builder.write(ENTRY_TEXT_PAGE, ENTRY_TEXT_WORD)?;
    builder.write(TEXT_PAGE, TEXT_WORD)?;

    let gigabytes = builder.table(IDLE_ROOT, 4, direct(0))?;
    let mut table = 0;
    for gpa in (0..config.memory_bytes()).step_by(IMAGE_BYTES as usize) {
        if gpa.is_multiple_of(1 << 30) {
            table = builder.table(gigabytes, 3, direct(gpa))?;
        }
        builder.set(table, 2, direct(gpa), gpa | PRESENT | WRITABLE | PAGE | NO_EXECUTE | global)?;
    }

    let table = builder.table(IDLE_ROOT, 4, TEXT_GVA)?;
    let table = builder.table(table, 3, TEXT_GVA)?;
    builder.set(table, 2, TEXT_GVA, PRESENT | PAGE | global)?;

    // All roots have the entry area, so it may be global whatever the isolation.
    let below_root = builder.table(IDLE_ROOT, 4, ENTRY_TEXT_GVA)?;
    builder.write(IDLE_ROOT + PAGE_SIZE + 8 * ENTRY_ROOT_INDEX, below_root | PRESENT | WRITABLE)?;
    let table = builder.table(below_root, 3, ENTRY_TEXT_GVA)?;
    let table = builder.table(table, 2, ENTRY_TEXT_GVA)?;
    builder.set(table, 1, ENTRY_TEXT_GVA, ENTRY_TEXT_PAGE | PRESENT | GLOBAL)?;
    for vcpu in 0..config.nr_vcpus {
        let data = builder.page();
        builder.set(table, 1, entry_data(vcpu), data | PRESENT | WRITABLE | NO_EXECUTE | GLOBAL)?;
    }

    let table = builder.table(IDLE_ROOT, 4, kernel_map(0, 0))?;
    let table = builder.table(table, 3, kernel_map(0, 0))?;
    let kernel_map_tables = (0..config.nr_vcpus)
        .map(|vcpu| builder.table(table, 2, kernel_map(vcpu, 0)).map(GuestFrame::of))
        .collect::<Result<_, _>>()?;
    debug_assert!(builder.next <= IMAGE_BYTES);
    Ok(Image { kernel_map_tables })
}

/// Turns on a CPU's paging, with the idle root: long mode first, then the features that need it.
pub(crate) fn turn_on<C: KernelGuestCpu>(cpu: &mut C, config: &KernelConfig) -> Result<(), KernelError> {
    write_register(cpu, PagingRegister::Cr4, CR4_PAE)?;
    write_register(cpu, PagingRegister::Cr3, IDLE_ROOT)?;
    write_register(cpu, PagingRegister::Efer, EFER_LME | EFER_NXE)?;
    write_register(cpu, PagingRegister::Cr0, CR0_PE | CR0_WP | CR0_PG)?;
    write_register(cpu, PagingRegister::Cr4, cr4(config))
}

/// A write of a register that must complete.
pub(crate) fn write_register<C: KernelGuestCpu>(
    cpu: &mut C,
    register: PagingRegister,
    value: u64,
) -> Result<(), KernelError> {
    cpu.write_register(register, value).map_err(|error| KernelError::Register { register, value, error })
}
