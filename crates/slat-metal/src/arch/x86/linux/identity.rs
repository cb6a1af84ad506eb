//! What the guest sees of the CPU: CPUID and model-specific registers. Both show the real CPU less
//! what this hypervisor does not save and restore, or does not pass through.

#![expect(unsafe_code, reason = "reads model-specific registers")]

use alloc::boxed::Box;

use spin::Once;
use x86_64::registers::model_specific::Msr;

use crate::arch::x86::svm::vmcb::PortMap;

/// Model-specific registers (AMD APM vol. 2, appendix A; Intel SDM vol. 4).
pub(super) const EFER: u32 = 0xc000_0080;
const APIC_BASE: u32 = 0x1b;
const X2APIC_FIRST: u32 = 0x800;
const X2APIC_LAST: u32 = 0x83f;
const X2APIC_ICR: u32 = 0x830;

/// Those in the control block, or that only this guest uses: SYSENTER, PAT, the system-call
/// registers, FS, GS, TSC_AUX.
const PASSED: [u32; 12] = [
    0x174,
    0x175,
    0x176,
    0x277,
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    0xc000_0100,
    0xc000_0101,
    0xc000_0102,
    0xc000_0103,
];

/// The time-stamp counter: the hypervisor's clock, too, so it is not the guest's to set.
const TSC: u32 = 0x10;

/// MTRRcap, whose lowest byte is the number of variable MTRRs.
const MTRR_CAP: u32 = 0xfe;

/// Those that can be read, and whose writes are ignored: TSC, APIC_BASE, MTRRs.
fn is_read_only(msr: u32) -> bool {
    matches!(msr, TSC | APIC_BASE | MTRR_CAP | 0x250 | 0x258 | 0x259 | 0x268..=0x26f | 0x2ff) || is_variable_mtrr(msr)
}

/// Whether the CPU has this variable MTRR.
fn is_variable_mtrr(msr: u32) -> bool {
    // SAFETY: each x86-64 CPU has MTRRcap.
    (0x200..=0x2ff).contains(&msr) && u64::from(msr - 0x200) < 2 * (unsafe { Msr::new(MTRR_CAP).read() } & 0xff)
}

/// Those that are 0 whatever is written: microcode, platform, SYSCFG, HWCR, the decoder's
/// configuration.
fn is_zero(msr: u32) -> bool {
    matches!(msr, 0x17 | 0x8b | 0xc001_0010 | 0xc001_0015 | 0xc001_001f | 0xc001_1029)
}

/// MISC_ENABLE, Intel's, of which the guest sees that REP MOVS and STOS are fast (bit 0).
const MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1 << 0;

/// The register's value, if the guest has it.
pub(super) fn read_msr(msr: u32) -> Option<u64> {
    match msr {
        // SAFETY: each x86-64 CPU has them, variable MTRRs as far as they are counted.
        _ if is_read_only(msr) => Some(unsafe { Msr::new(msr).read() }),
        _ if is_zero(msr) => Some(0),
        MISC_ENABLE => Some(FAST_STRINGS),
        _ => None,
    }
}

/// Whether the guest may write the register, in vain.
pub(super) fn ignores_write(msr: u32) -> bool {
    is_read_only(msr) || is_zero(msr) || msr == MISC_ENABLE
}

/// Ports that the guest does not have: those of the hypervisor (E9h, F4h, 8900h), those by which
/// devices access memory (the DMA controllers, QEMU's configuration device at 510h, PCI at CF8h
/// with the reset register, the disk's DMA at C000h on Bochs), and those of ACPI's sleep (604h,
/// B004h).
fn is_own(port: u16) -> bool {
    matches!(
        port,
        0..=0xf | 0x81..=0x8f | 0xc0..=0xdf | 0xe9 | 0xf4..=0xf7 | 0x510..=0x51b | 0xcf8..=0xcff | 0x604..=0x605
            | 0x8900 | 0xb004..=0xb005 | 0xc000..=0xc00f
    )
}

/// The ports that the guest uses without an exit.
pub(super) fn ports() -> &'static PortMap {
    static PORTS: Once<Box<PortMap>> = Once::new();
    PORTS.call_once(|| {
        let mut ports = PortMap::new();
        (0..=u16::MAX).filter(|&port| is_own(port)).for_each(|port| ports.intercept(port));
        ports
    })
}

/// How the guest uses a model-specific register without an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MsrUse {
    Read,
    ReadAndWrite,
}

/// The model-specific registers that the guest uses without an exit.
pub(super) fn msrs() -> impl Iterator<Item = (u32, MsrUse)> {
    let of_controller = (X2APIC_FIRST..=X2APIC_LAST)
        .map(|msr| (msr, if msr == X2APIC_ICR { MsrUse::Read } else { MsrUse::ReadAndWrite }));
    PASSED.into_iter().map(|msr| (msr, MsrUse::ReadAndWrite)).chain([(TSC, MsrUse::Read)]).chain(of_controller)
}

/// `eax`, `ebx`, `ecx` and `edx` of CPUID, for the guest.
pub(super) fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let real = core::arch::x86_64::__cpuid_count(leaf, subleaf);
    let [eax, ebx, ecx, edx] = [real.eax, real.ebx, real.ecx, real.edx];
    let bits = |numbers: &[u32]| numbers.iter().fold(0, |all, number| all | 1_u32 << number);
    match leaf {
        // Without DTES64, MONITOR, DS-CPL, VMX, SMX, EIST, TM2, SDBG, FMA, xTPR, PDCM, DCA, TSC
        // deadline, XSAVE, OSXSAVE, AVX, F16C; with "under a hypervisor". Without DS, ACPI's clock,
        // TM, PBE.
        1 => [
            eax,
            ebx,
            ecx & !bits(&[2, 3, 4, 5, 6, 7, 8, 11, 12, 14, 15, 18, 24, 26, 27, 28, 29]) | 1 << 31,
            edx & !bits(&[21, 22, 29, 31]),
        ],
        // Of power, that the controller's timer never stops.
        6 => [eax & 1 << 2, 0, 0, 0],
        // Without TSC_ADJUST, SGX, HLE, AVX2, RTM, monitoring and allocation of caches, MPX,
        // AVX-512, traces of the processor, and all of ECX and EDX.
        7 => [0, ebx & !bits(&[1, 2, 4, 5, 11, 12, 14, 15, 16, 17, 21, 25, 26, 27, 28, 30, 31]), 0, 0],
        // Performance counters, XSAVE, caches, SGX, traces. The frequencies at 15h and 16h, which
        // Bochs has from a real CPU, and does not keep: Linux measures.
        5 | 0xa | 0xd | 0xf..=0x10 | 0x12 | 0x14..=0x16 => [0; 4],
        // Linux keeps x2APIC mode without interrupt remapping under hypervisors that it knows.
        0x4000_0000 => {
            [0x4000_0001, u32::from_le_bytes(*b"KVMK"), u32::from_le_bytes(*b"VMKV"), u32::from_le_bytes(*b"M\0\0\0")]
        }
        0x4000_0001..=0x4fff_ffff => [0; 4],
        // Without SVM, OSVW, IBS, XOP, SKINIT, WDT, LWP, FMA4, performance counters, MONITORX.
        0x8000_0001 => [eax, ebx, ecx & !bits(&[2, 9, 10, 11, 12, 13, 15, 16, 23, 24, 28, 29]), edx],
        0x8000_0008 => [eax, 0, ecx, edx],
        0x8000_000a..=0x8000_0018 | 0x8000_001b..=0x8000_001d | 0x8000_001f.. => [0; 4],
        _ => [eax, ebx, ecx, edx],
    }
}
