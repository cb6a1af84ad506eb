//! The virtual machine control block (AMD APM vol. 2, appendix B, tables B-1 and B-2), and the maps
//! of ports and of model-specific registers (15.10.1, 15.11).

#![expect(unsafe_code, reason = "says which types are valid as zeros")]

use alloc::boxed::Box;
use core::mem::offset_of;

use crate::arch::x86::page::Zeroed;

bitflags::bitflags! {
    /// Instructions and events that leave the guest: offset 00Ch.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Intercepts: u32 {
        /// A non-maskable interrupt.
        const NMI = 1 << 1;
        /// INIT.
        const INIT = 1 << 3;
        /// CPUID.
        const CPUID = 1 << 18;
        /// INVD.
        const INVD = 1 << 22;
        /// INVLPGA.
        const INVLPGA = 1 << 26;
        /// Ports that the map names.
        const IOIO_PROT = 1 << 27;
        /// Model-specific registers that the map names.
        const MSR_PROT = 1 << 28;
        /// A triple fault.
        const SHUTDOWN = 1 << 31;
    }

    /// More of them: offset 010h.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct MoreIntercepts: u32 {
        /// VMRUN, whose intercept is required.
        const VMRUN = 1 << 0;
        /// VMMCALL.
        const VMMCALL = 1 << 1;
        /// VMLOAD.
        const VMLOAD = 1 << 2;
        /// VMSAVE.
        const VMSAVE = 1 << 3;
        /// STGI.
        const STGI = 1 << 4;
        /// CLGI.
        const CLGI = 1 << 5;
        /// SKINIT.
        const SKINIT = 1 << 6;
        /// MONITOR.
        const MONITOR = 1 << 10;
        /// MWAIT.
        const MWAIT = 1 << 11;
        /// XSETBV.
        const XSETBV = 1 << 13;
    }
}

/// TLB_CONTROL, offset 05Ch (15.16.2): what VMRUN flushes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum TlbControl {
    /// Nothing.
    None = 0,
    /// All of this CPU's translations, of all ASIDs.
    FlushAll = 1,
}

/// The control area.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    cr_and_dr_intercepts: [u32; 2],
    exception_intercepts: u32,
    /// What leaves the guest.
    pub intercepts: u32,
    /// What else leaves it.
    pub more_intercepts: u32,
    _reserved_014: [u32; 11],
    /// The physical address of the [`PortMap`].
    pub iopm_base: u64,
    /// The physical address of the [`MsrMap`].
    pub msrpm_base: u64,
    /// What the guest's time-stamp counter is ahead of the machine's.
    pub tsc_offset: u64,
    /// The number that tags the guest's translations; not 0.
    pub asid: u32,
    /// A [`TlbControl`].
    pub tlb_control: u32,
    /// Whether an interrupt waits for the guest, and which (15.21.4 "Injecting Virtual (INTR)
    /// Interrupts").
    pub virtual_interrupts: u64,
    /// Bit 0: no interrupt before the next instruction (15.21.5 "Interrupt Shadows").
    pub interrupt_shadow: u64,
    /// Why the guest was left (appendix C).
    pub exit_code: u64,
    /// What depends on the exit code.
    pub exit_info_1: u64,
    /// What depends on the exit code.
    pub exit_info_2: u64,
    /// The event that was being delivered (15.7.2).
    pub exit_int_info: u64,
    /// Bit 0: nested paging.
    pub nested_paging: u64,
    _reserved_098: [u64; 2],
    /// The event to deliver at entry (15.20).
    pub event_injection: u64,
    /// The root of the nested page tables.
    pub nested_cr3: u64,
    _reserved_0b8: [u64; 104],
    _reserved_3f8: u64,
}

/// A segment register.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    /// Its selector.
    pub selector: u16,
    /// Bits 55:52 and 47:40 of the descriptor, without gap (APM vol. 2, 15.5.1 "Segment State in
    /// the VMCB").
    pub attributes: u16,
    /// Its limit in bytes, less 1.
    pub limit: u32,
    /// Its base.
    pub base: u64,
}

/// The state save area, from offset 400h of the block.
#[derive(Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "registers, by their names in table B-2")]
pub struct Save {
    pub es: Segment,
    pub cs: Segment,
    pub ss: Segment,
    pub ds: Segment,
    pub fs: Segment,
    pub gs: Segment,
    pub gdtr: Segment,
    pub ldtr: Segment,
    pub idtr: Segment,
    pub tr: Segment,
    _reserved_0a0: [u8; 0x2b],
    pub cpl: u8,
    _reserved_0cc: u32,
    pub efer: u64,
    _reserved_0d8: [u64; 14],
    pub cr4: u64,
    pub cr3: u64,
    pub cr0: u64,
    pub dr7: u64,
    pub dr6: u64,
    pub rflags: u64,
    pub rip: u64,
    _reserved_180: [u64; 11],
    pub rsp: u64,
    _reserved_1e0: [u64; 3],
    pub rax: u64,
    pub star: u64,
    pub lstar: u64,
    pub cstar: u64,
    pub sfmask: u64,
    pub kernel_gs_base: u64,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub cr2: u64,
    _reserved_248: [u64; 4],
    pub g_pat: u64,
    _reserved_270: [u64; 306],
}

/// The whole block: a page.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Vmcb {
    /// How the guest runs, and why it was left.
    pub control: Control,
    /// The guest's registers.
    pub save: Save,
}

const _: () = {
    assert!(size_of::<Vmcb>() == 4096);
    assert!(offset_of!(Control, iopm_base) == 0x40);
    assert!(offset_of!(Control, asid) == 0x58);
    assert!(offset_of!(Control, exit_code) == 0x70);
    assert!(offset_of!(Control, event_injection) == 0xa8);
    assert!(offset_of!(Control, nested_cr3) == 0xb0);
    assert!(offset_of!(Vmcb, save) == 0x400);
    assert!(offset_of!(Save, cpl) == 0xcb);
    assert!(offset_of!(Save, efer) == 0xd0);
    assert!(offset_of!(Save, cr4) == 0x148);
    assert!(offset_of!(Save, rip) == 0x178);
    assert!(offset_of!(Save, rsp) == 0x1d8);
    assert!(offset_of!(Save, rax) == 0x1f8);
    assert!(offset_of!(Save, cr2) == 0x240);
    assert!(offset_of!(Save, g_pat) == 0x268);
};

// SAFETY: integers.
unsafe impl Zeroed for Vmcb {}
// SAFETY: integers.
unsafe impl Zeroed for PortMap {}
// SAFETY: integers.
unsafe impl Zeroed for MsrMap {}

impl Vmcb {
    /// A block of zeros.
    pub fn new() -> Box<Vmcb> {
        Vmcb::zeroed()
    }

    /// Its physical address: memory is mapped to itself.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self).expose_provenance() as u64
    }
}

/// The ports whose use leaves the guest: a bit for each (15.10.1). Three pages are required.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct PortMap([u8; 3 * 4096]);

impl PortMap {
    /// A map that lets the guest use all ports.
    pub fn new() -> Box<PortMap> {
        PortMap::zeroed()
    }

    /// Keeps `port` from the guest.
    pub fn intercept(&mut self, port: u16) {
        self.0[usize::from(port / 8)] |= 1 << (port % 8);
    }

    /// Its physical address.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self).expose_provenance() as u64
    }
}

/// The registers whose use leaves the guest: two bits for each, the lower for reads (15.11).
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct MsrMap([u8; 2 * 4096]);

impl MsrMap {
    /// A map that keeps all registers from the guest.
    pub fn new() -> Box<MsrMap> {
        let mut map = MsrMap::zeroed();
        map.0.fill(0xff);
        map
    }

    /// The byte and the shift of the register's bits. `None`: it is in no range of the map, and
    /// each use leaves the guest.
    fn place(msr: u32) -> Option<(usize, u32)> {
        let (range, first) = match msr {
            0..=0x1fff => (0, 0),
            0xc000_0000..=0xc000_1fff => (0x800, 0xc000_0000),
            0xc001_0000..=0xc001_1fff => (0x1000, 0xc001_0000),
            _ => return None,
        };
        let index = msr - first;
        Some((range + (index / 4) as usize, index % 4 * 2))
    }

    /// Lets the guest read `msr`, without an exit.
    pub fn allow_reads(&mut self, msr: u32) {
        if let Some((byte, shift)) = MsrMap::place(msr) {
            self.0[byte] &= !(1 << shift);
        }
    }

    /// Lets the guest read and write `msr`, without an exit.
    pub fn allow(&mut self, msr: u32) {
        if let Some((byte, shift)) = MsrMap::place(msr) {
            self.0[byte] &= !(3 << shift);
        }
    }

    /// Its physical address.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self).expose_provenance() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_one_bit() {
        let mut map = PortMap::new();
        [0, 0xf4, u16::MAX].into_iter().for_each(|port| map.intercept(port));
        assert_eq!((map.0[0], map.0[0xf4 / 8], map.0[0x1fff]), (1, 1 << 4, 0x80));
        assert_eq!(map.0.iter().map(|byte| byte.count_ones()).sum::<u32>(), 3);
    }

    #[test]
    fn a_register_has_two_bits_in_its_range() {
        let mut map = MsrMap::new();
        // APM vol. 2, 15.11, table 15-4: the ranges begin at 0, 800h and 1000h.
        map.allow_reads(0x830);
        map.allow(0xc000_0080);
        map.allow(0xc001_0117);
        // In no range: each use leaves the guest.
        map.allow(0x4b56_4d00);
        assert_eq!(map.0[0x830 / 4], 0xfe);
        assert_eq!(map.0[0x800 + 0x80 / 4], 0xfc);
        assert_eq!(map.0[0x1000 + 0x117 / 4], 0x3f);
        assert_eq!(map.0.iter().map(|byte| byte.count_zeros()).sum::<u32>(), 5);
    }
}
