//! A host for Arm CPUs: broadcast TLBI, the flush of the vCPU's own CPU, device pages, aborts.
//!
//!     cargo run -p slat --example host_arm
#![expect(unsafe_code, reason = "a host promises memory, and flushes by privileged instructions")]

mod bare_metal;
use bare_metal::{Backing, DEVICE, RAM, Record};
use slat::format::{CpuFeatures, Hardware, Stage2};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Config, Error, Gfn, GfnRange, Gpa, Host, Hpa, Outcome, PageSize, Pfn};
use std::alloc::Layout;
use std::sync::OnceLock;

/// The host of one VM. `vttbr`: the VMID in bits 63:48, and the root (Arm ARM, "VTTBR_EL2").
struct ArmHost {
    vttbr: OnceLock<u64>,
    record: Record,
}

/// Executes instructions with an operand in x0, or records them.
macro_rules! run {
    ($host:ident, $operand:expr, $first:literal $(, $next:literal)*) => {
        let operand: u64 = $operand;
        if !$host.record.replaces(concat!($first $(, "; ", $next)*), operand) {
            // SAFETY: a hypervisor is in EL2, with HCR_EL2.E2H clear. No memory is written.
            #[cfg(target_arch = "aarch64")]
            unsafe {
                std::arch::asm!($first $(, $next)*, in("x0") operand);
            }
        }
    };
}

// SAFETY: page-table pages are the heap's. A frame of a memslot never changes. The DSB after the
// TLBI waits until all CPUs have dropped the translations, and accesses through them are done.
unsafe impl Host for ArmHost {
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
    /// The CPU has FEAT_S2FWB and CTR_EL0.IDC, so no data cache needs care; CTR_EL0.DIC is clear.
    fn resolve(&self, backing: &Backing, _gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let &(first, attributes) = backing;
        if access.is_fetch() {
            run!(self, 0, "ic ialluis", "dsb ish");
        }
        Ok(Resolved { attributes, ..Resolved::memory(Pfn(first.0 + page), PageSize::Size2M) })
    }
    /// TLBI takes the VMID from VTTBR_EL2. Preemption is off, and the next entry into a guest loads
    /// the register again.
    fn flush(&self, ranges: &[GfnRange]) {
        run!(self, *self.vttbr.wait(), "dsb ishst", "msr vttbr_el2, x0", "isb");
        let nr_pages = ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.nr_pages()));
        if nr_pages > 64 {
            run!(self, 0, "tlbi vmalls12e1is", "dsb ish", "isb");
            return;
        }
        for gfn in ranges.iter().flat_map(|range| range.start.0..range.end.0) {
            run!(self, gfn, "tlbi ipas2e1is, x0");
        }
        // After the first DSB no walk of stage 1 finds the old stage 2 any more.
        run!(self, 0, "dsb ish", "tlbi vmalle1is", "dsb ish", "isb");
    }
    fn flush_local(&self, gpa: Gpa) {
        run!(self, *self.vttbr.wait(), "dsb nshst", "msr vttbr_el2, x0", "isb");
        run!(self, gpa.gfn().0, "tlbi ipas2e1, x0", "dsb nsh", "tlbi vmalle1", "dsb nsh", "isb");
    }
    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// The abort of ESR_EL2, FAR_EL2 and HPFAR_EL2 (Arm ARM, these registers). `par`: PAR_EL1 after AT
/// S1E1R of the FAR, as HPFAR_EL2 is not valid for all permission faults.
fn abort(esr: u64, far: u64, hpfar: u64, par: impl FnOnce() -> u64) -> (Gpa, Access) {
    let (is_permission, is_walk) = (esr >> 2 & 0b1111 == 0b0011, esr >> 7 & 1 == 1);
    let page = if is_permission && !is_walk { par() >> 12 } else { hpfar >> 4 } & 0xff_ffff_ffff;
    let access = match esr >> 26 & 0x3f {
        // S1PTW: the CPU reads a page table of stage 1, or sets A or D in it.
        _ if is_walk => [Access::Read, Access::Write][usize::from(is_permission)],
        0x20 => Access::Execute,
        // WnR, which cache maintenance (CM) always has set. That is a write if a right is lacking.
        _ if esr & 1 << 6 != 0 && (esr & 1 << 8 == 0 || is_permission) => Access::Write,
        _ => Access::Read,
    };
    (Gpa(page << 12 | far & 0xfff), access)
}

fn main() -> Result<(), Error> {
    let hardware = Hardware { features: CpuFeatures::FWB, gpa_bits: Some(40), ..Hardware::default() };
    let host = ArmHost { vttbr: OnceLock::new(), record: Record::default() };
    let vm = bare_metal::new_vm::<ArmHost, Stage2>(host, Config::default().with_hardware(hardware))?;
    let vttbr = *vm.host().vttbr.get_or_init(|| 7 << 48 | vm.root().0);
    let mut vcpu = vm.create_vcpu()?;
    // A write to RAM and a read of the device: translation faults of level 3.
    for (esr, gpa) in [(0x24 << 26 | 1 << 6 | 0b000111, RAM.0), (0x24 << 26 | 0b000111, DEVICE.0)] {
        let (gpa, access) = abort(esr, 0xffff_8000_0000_1010, gpa.0 >> 8, || 0);
        assert_eq!(vcpu.handle_fault(gpa, access)?, Outcome::Resume);
        let take_vmid = ("dsb nshst; msr vttbr_el2, x0; isb", vttbr);
        let page = ("tlbi ipas2e1, x0; dsb nsh; tlbi vmalle1; dsb nsh; isb", gpa.gfn().0);
        assert_eq!(vm.host().record.take(), [take_vmid, page]);
    }
    // Cache maintenance of a page without a mapping, and of one without the right to write.
    let maintenance = 0x24 << 26 | 1 << 8 | 1 << 6;
    assert_eq!(abort(maintenance | 0b000111, 0, RAM.0.0 >> 8, || 0), (RAM.0, Access::Read));
    assert_eq!(abort(maintenance | 0b001111, 0, 0, || RAM.0.0), (RAM.0, Access::Write));
    let device = vm.read_tables()?.cursor().query(DEVICE.0).map(|found| (found.pfn, found.attributes));
    assert_eq!(device, Some(DEVICE.1));
    drop(vm.invalidate_range(GfnRange::new(RAM.0.gfn(), 1))?);
    let take_vmid = ("dsb ishst; msr vttbr_el2, x0; isb", vttbr);
    let page = [take_vmid, ("tlbi ipas2e1is, x0", 0), ("dsb ish; tlbi vmalle1is; dsb ish; isb", 0)];
    // The page was in a leaf of 2 MiB, so a break before make came first.
    assert_eq!(vm.host().record.take(), [&[take_vmid, ("tlbi vmalls12e1is; dsb ish; isb", 0)], &page[..]].concat());
    Ok(())
}
