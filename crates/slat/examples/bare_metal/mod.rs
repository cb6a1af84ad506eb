//! What the examples of a bare-metal host share, and what a hypervisor has already: memory for
//! page-table pages, and its guests' RAM and devices. Instead of privileged instructions, a program
//! on an operating system records what it would execute.

use slat::format::{Execute, Format, LeafAttributes, MemoryType};
use slat::{Config, Error, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Pfn, Vm};
use std::alloc::{Layout, alloc, dealloc};
use std::sync::{Arc, Mutex};

/// The instructions that the host has executed, with an operand of each.
#[derive(Default)]
pub struct Record(Mutex<Vec<(&'static str, u64)>>);

impl Record {
    /// Records an instruction. Returns whether the caller must not execute it.
    pub fn replaces(&self, instruction: &'static str, operand: u64) -> bool {
        self.0.lock().unwrap().push((instruction, operand));
        cfg!(not(target_os = "none"))
    }

    /// What was recorded since the last call.
    pub fn take(&self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// The heap's addresses stand for host-physical ones.
pub fn allocate_table(layout: Layout) -> Option<Hpa> {
    // SAFETY: the layout of a page-table page is never empty.
    let table = unsafe { alloc(layout) };
    (!table.is_null()).then_some(Hpa(table as u64))
}

/// # Safety
/// `table` is from [`allocate_table`], with this layout, and was not freed since.
pub unsafe fn free_table(table: Hpa, layout: Layout) {
    // SAFETY: as the caller promises.
    unsafe { dealloc(table.0 as *mut u8, layout) }
}

/// The backing of a memslot: its first frame, and how the guest may use its frames.
pub type Backing = (Pfn, LeafAttributes);

/// 4 MiB of RAM.
pub const RAM: (Gpa, Backing) = (Gpa(0), (Pfn(0x4_0000), ORDINARY));
/// The registers of a device that the guest has for itself.
pub const DEVICE: (Gpa, Backing) = (Gpa(0x1000_0000), (Pfn(0x1_0000), LeafAttributes::DEVICE));

const ORDINARY: LeafAttributes = LeafAttributes { memory: MemoryType::WriteBack, execute: Execute::All };

/// A VM with [`RAM`] and a [`DEVICE`].
pub fn new_vm<H: Host<Backing = Backing>, F: Format>(host: H, config: Config) -> Result<Arc<Vm<H, F>>, Error> {
    let vm = Vm::new(host, config)?;
    for (slot, (guest_phys_addr, backing)) in (0..).zip([RAM, DEVICE]) {
        vm.set_user_memory_region(MemoryRegion {
            slot,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr,
            memory_size: 4 << 20,
            backing: Some(backing),
            userfault_bitmap: None,
        })?;
    }
    Ok(Arc::new(vm))
}
