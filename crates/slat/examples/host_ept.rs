//! A host for Intel CPUs with EPT: interrupts and INVEPT, device pages, EPT violations.
//!
//!     cargo run -p slat --example host_ept
#![expect(unsafe_code, reason = "a host promises memory, and flushes by privileged instructions")]

mod bare_metal;
use bare_metal::{Backing, DEVICE, RAM, Record};
use slat::format::Ept;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Config, Error, Exit, Gfn, GfnRange, Gpa, Host, Hpa, Outcome, PageSize, Pfn};
use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering};

/// The host of one VM. `flushes` counts from 1. For each CPU, `entered` has 0 outside of the guest
/// (the first step after an exit stores it), else `flushes` as of its last INVEPT.
struct IntelHost {
    flushes: AtomicU64,
    entered: [AtomicU64; 2],
    record: Record,
}

impl IntelHost {
    /// Interrupts the CPU with this x2APIC ID. It leaves the guest, as "external-interrupt exiting"
    /// is on (SDM vol. 3C, "Pin-Based VM-Execution Controls").
    fn interrupt(&self, id: u64) {
        if self.record.replaces("IPI", id) {
            return self.entered[id as usize].store(0, Ordering::SeqCst); // As the CPU does then.
        }
        // SAFETY: a hypervisor has privilege level 0. No memory is written. WRMSR to the ICR does not
        // wait for earlier stores: hence the fences (SDM vol. 3A, "MSR Access in x2APIC Mode").
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::asm!("mfence", "lfence", "wrmsr", in("ecx") 0x830, in("eax") 0xf0, in("edx") id as u32);
        }
    }

    /// Drops all that this CPU has cached of `eptp` (SDM vol. 3C, "INVEPT", type 1).
    fn invept(&self, eptp: u64) {
        if !self.record.replaces("INVEPT", eptp) {
            // SAFETY: a hypervisor is in VMX root operation. No memory is written.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                std::arch::asm!("invept {}, [{}]", in(reg) 1_u64, in(reg) &[eptp, 0]);
            }
        }
    }

    /// The last step before VMRESUME, with interrupts off. `seen` is what the last call on this CPU
    /// returned; at first, or after another EPTP may have had this address, it is 0.
    fn before_entry(&self, cpu: usize, eptp: u64, seen: u64) -> u64 {
        // SeqCst, here and in `flush`: either the load observes the flush, or the flush observes
        // this CPU in the guest. Then the entry ends at once, by the interrupt that is pending.
        self.entered[cpu].store(seen.max(1), Ordering::SeqCst);
        let flushes = self.flushes.load(Ordering::SeqCst);
        if flushes != seen {
            self.invept(eptp);
            self.entered[cpu].store(flushes, Ordering::SeqCst);
        }
        flushes
    }
}

// SAFETY: page-table pages are the heap's. A frame of a memslot never changes. After `flush` no CPU
// uses an older translation: it has left, and before it enters again it executes INVEPT.
unsafe impl Host for IntelHost {
    type Backing = Backing;
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
    fn resolve(&self, backing: &Backing, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let &(first, attributes) = backing;
        Ok(Resolved { attributes, ..Resolved::memory(Pfn(first.0 + page), PageSize::Size2M) })
    }
    /// Makes each CPU leave that entered before the call. It waits for no CPU outside of the guest.
    fn flush(&self, _ranges: &[GfnRange]) {
        let flushes = self.flushes.fetch_add(1, Ordering::SeqCst) + 1;
        let is_old = |entered: &AtomicU64| (1..flushes).contains(&entered.load(Ordering::SeqCst));
        (0..).zip(&self.entered).filter(|(_, entered)| is_old(entered)).for_each(|(id, _)| self.interrupt(id));
        while self.entered.iter().any(is_old) {}
    }
    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// The access of an EPT violation: bit 1, a write; bit 2, a fetch (SDM vol. 3C, "Exit Qualification
/// for EPT Violations"). Where EPT has A and D, reading a guest page table is reported as a write.
fn access(qualification: u64) -> Access {
    match qualification & 0b110 {
        0b000 => Access::Read,
        0b100 => Access::Execute,
        _ => Access::Write,
    }
}

fn main() -> Result<(), Error> {
    let host = IntelHost { flushes: AtomicU64::new(1), entered: Default::default(), record: Record::default() };
    let vm = bare_metal::new_vm::<IntelHost, Ept>(host, Config::default())?;
    // Bits 2:0 write-back, 5:3 the levels less 1, 6 A and D (SDM vol. 3C, "EPTP").
    let eptp = vm.root().0 | u64::from(vm.root_level().0 - 1) << 3 | 1 << 6 | 6;
    let (mut vcpu, seen) = (vm.create_vcpu()?, vm.host().before_entry(0, eptp, 0));
    // The guest-physical address is VMCS field 0x2400, the qualification is field 0x6400.
    for (gpa, qualification) in [(RAM.0.0 + 0x1234, 0b010), (RAM.0.0 + 0x20_0000, 0b100), (DEVICE.0.0 + 4, 0b001)] {
        assert_eq!(vcpu.handle_fault(Gpa(gpa), access(qualification))?, Outcome::Resume);
    }
    assert!(matches!(vcpu.handle_fault(DEVICE.0, Access::Execute)?, Outcome::Exit(Exit::Mmio { .. })));
    let device = vm.read_tables()?.cursor().query(DEVICE.0).map(|found| (found.pfn, found.attributes));
    assert_eq!(device, Some(DEVICE.1));
    drop(vm.invalidate_range(GfnRange::new(RAM.0.gfn(), 1))?);
    vm.host().before_entry(0, eptp, seen);
    assert_eq!(vm.host().record.take(), [("INVEPT", eptp), ("IPI", 0), ("INVEPT", eptp)]);
    Ok(())
}
