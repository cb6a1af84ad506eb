//! A host for RISC-V: SBI remote fences, the flush of the vCPU's own hart, device pages, faults.
//!
//!     cargo run -p slat --example host_riscv
#![expect(unsafe_code, reason = "a host promises memory, and flushes by privileged instructions")]

mod bare_metal;
use bare_metal::{Backing, DEVICE, RAM, Record};
use slat::format::{CpuFeatures, Hardware, Sv39x4};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Config, Error, Gfn, GfnRange, Gpa, Host, Hpa, Outcome, PAGE_SIZE, PageSize, Pfn};
use std::alloc::Layout;
use std::cell::Cell;

/// The host of one VM.
struct RiscvHost {
    vmid: u64,
    record: Record,
}

thread_local! {
    /// The page that this hart flushed last. (On the bare machine: a variable of each hart.)
    static LAST_LOCAL: Cell<Option<Gfn>> = const { Cell::new(None) };
}

impl RiscvHost {
    /// HFENCE.GVMA with this VMID on all harts (SBI, "RFENCE Extension", function 3). The firmware
    /// interrupts them, and returns when all have executed it. A size of all ones is everything.
    #[cfg_attr(not(target_arch = "riscv64"), expect(unused_variables))]
    fn remote_hfence_gvma_vmid(&self, start: Gpa, size_bytes: u64) {
        if !self.record.replaces("remote_hfence_gvma_vmid", start.0) {
            // SAFETY: a hypervisor is in HS mode. No memory is written. The fence makes the PTEs
            // visible before the harts are interrupted.
            #[cfg(target_arch = "riscv64")]
            unsafe {
                let error: u64;
                std::arch::asm!("fence rw, rw", "ecall", in("a7") 0x5246_4e43_u64, in("a6") 3_u64,
                    inlateout("a0") 0_u64 => error, inlateout("a1") u64::MAX => _,
                    in("a2") start.0, in("a3") size_bytes, in("a4") self.vmid);
                if error != 0 {
                    std::process::abort(); // A hart may use old translations. `flush` must not unwind.
                }
            }
        }
    }

    /// HFENCE.GVMA on this hart: rs1 is the address >> 2, rs2 the VMID (Privileged Architecture,
    /// "Hypervisor Memory-Management Fence Instructions"). It orders earlier stores of this hart.
    fn hfence_gvma(&self, gpa: Gpa) {
        if !self.record.replaces("hfence.gvma", gpa.0) {
            // SAFETY: a hypervisor is in HS mode. No memory is written.
            #[cfg(target_arch = "riscv64")]
            unsafe {
                std::arch::asm!(".insn r 0x73, 0, 0x31, x0, {}, {}", in(reg) gpa.0 >> 2, in(reg) self.vmid);
            }
        }
    }

    /// The same with rs1 = x0: of all addresses, and of directory entries, too.
    fn hfence_gvma_all(&self) {
        if !self.record.replaces("hfence.gvma x0", self.vmid) {
            // SAFETY: as above.
            #[cfg(target_arch = "riscv64")]
            unsafe {
                std::arch::asm!(".insn r 0x73, 0, 0x31, x0, x0, {}", in(reg) self.vmid);
            }
        }
    }
}

// SAFETY: page-table pages are the heap's. A frame of a memslot never changes. All harts execute
// the fence before `flush` returns; the interrupt for it ends the guest's access under way.
unsafe impl Host for RiscvHost {
    type Backing = Backing;
    /// The root is 16 KiB, and aligned to that.
    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        bare_metal::allocate_table(layout)
    }
    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { bare_metal::free_table(table, layout) }
    }
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        table.0 as *mut u8
    }
    /// Before it answers a fetch of code that it has written, a host makes all harts execute
    /// FENCE.I (SBI, function 0 of the same extension).
    fn resolve(&self, backing: &Backing, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let &(first, attributes) = backing;
        Ok(Resolved { attributes, ..Resolved::memory(Pfn(first.0 + page), PageSize::Size2M) })
    }
    /// A fence by address is of leaf PTEs ("Supervisor Memory-Management Fence Instruction"). From
    /// 512 pages on a page-table page may be gone. Below that only leaf PTEs have changed, because
    /// `needs_zapped_leaves` is `true`, as by default. With `false` all fences would have to be of
    /// everything.
    fn flush(&self, ranges: &[GfnRange]) {
        if ranges.iter().any(|range| range.nr_pages() >= 512) {
            return self.remote_hfence_gvma_vmid(Gpa(0), u64::MAX);
        }
        for range in ranges {
            self.remote_hfence_gvma_vmid(range.start.gpa(), range.nr_pages() * PAGE_SIZE);
        }
    }
    /// If the same page comes again, what the hart keeps is a PTE above the lowest level.
    fn flush_local(&self, gpa: Gpa) {
        match LAST_LOCAL.replace(Some(gpa.gfn())) {
            Some(last) if last == gpa.gfn() => self.hfence_gvma_all(),
            _ => self.hfence_gvma(gpa),
        }
    }
    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// The fault of scause 20, 21 or 23 (Privileged Architecture, "Hypervisor Trap Value Register",
/// "Hypervisor Trap Instruction Register"). Where htval is 0, walk the guest's page tables.
fn guest_page_fault(scause: u64, stval: u64, htval: u64, htinst: u64) -> (Gpa, Access) {
    let gpa = Gpa(htval << 2 | stval & 0b11);
    match (htinst, scause) {
        // The hart reads a page table of the guest, or sets A or D in it.
        (0x3000, _) => (Gpa(htval << 2), Access::Read),
        (0x3020, _) => (Gpa(htval << 2), Access::Write),
        (_, 20) => (gpa, Access::Execute),
        (_, 23) => (gpa, Access::Write),
        _ => (gpa, Access::Read),
    }
}

fn main() -> Result<(), Error> {
    let host = RiscvHost { vmid: 7, record: Record::default() };
    let hardware = Hardware { features: CpuFeatures::SVPBMT, ..Hardware::default() };
    let vm = bare_metal::new_vm::<RiscvHost, Sv39x4>(host, Config::default().with_hardware(hardware))?;
    println!("hgatp: {:#x}", 8 << 60 | vm.host().vmid << 44 | vm.root().pfn().0); // Mode 8: Sv39x4.
    let mut vcpu = vm.create_vcpu()?;
    // A write to RAM, a read of the device, and a read of a page table of the guest.
    for (scause, at, htinst) in [(23, RAM.0, 0), (21, DEVICE.0, 0), (21, RAM.0, 0x3000)] {
        let (gpa, access) = guest_page_fault(scause, 0x8000_1012, at.0 >> 2, htinst);
        assert_eq!(vcpu.handle_fault(gpa, access)?, Outcome::Resume);
        assert_eq!(vm.host().record.take(), [("hfence.gvma", gpa.0)]);
    }
    // The last one faults once more.
    assert_eq!(vcpu.handle_fault(RAM.0, Access::Read)?, Outcome::Resume);
    assert_eq!(vm.host().record.take(), [("hfence.gvma x0", vm.host().vmid)]);
    let device = vm.read_tables()?.cursor().query(DEVICE.0).map(|found| (found.pfn, found.attributes));
    assert_eq!(device, Some(DEVICE.1));
    drop(vm.invalidate_range(GfnRange::new(RAM.0.gfn(), 1))?);
    assert_eq!(vm.host().record.take(), [("remote_hfence_gvma_vmid", RAM.0.0)]);
    drop(vm.invalidate_range(GfnRange::new(RAM.0.gfn(), 512))?);
    assert_eq!(vm.host().record.take(), [("remote_hfence_gvma_vmid", 0)]);
    Ok(())
}
