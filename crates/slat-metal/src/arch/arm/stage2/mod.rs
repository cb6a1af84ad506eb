//! Guests at EL1 and EL0, on tables of stage 2.

#![expect(unsafe_code, reason = "sets the registers that a guest runs with")]

mod run;
pub mod syndrome;

use slat::format::{CpuFeatures, Hardware};
use slat::tables::AccessTracking;
use thiserror::Error;

use super::machine::AFFINITY;
use super::sysreg::{execute, read, write};
use crate::virtual_cpu::SecondStage;

pub use run::{ArmCpu, Registers};

/// An exit that Arm alone has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// SMC: the firmware's calls are not the guest's. The guest is at the instruction.
    Smc,
    /// A system instruction, or an access to a system register, with its syndrome. The guest is at
    /// the instruction.
    System {
        /// ISS of ESR_EL2.
        syndrome: u64,
    },
}

/// HCR_EL2 (Arm ARM, D17.2.48): stage 2; set/way operations clean, too; fast interrupts come to
/// EL2; SMC does; DC ZVA does, so that CPUs say to have none; EL1 is AArch64.
const HCR: u64 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 19 | 1 << 28 | 1 << 31;
/// The keys and instructions of pointer authentication are the guest's.
const HCR_API_APK: u64 = 3 << 40;
/// MemAttr forces memory types.
const HCR_FWB: u64 = 1 << 46;

/// HCRX_EL2: memory copy instructions do not trap.
const HCRX_MSCEN: u64 = 1 << 11;

/// VTCR_EL2: the bit that is always set; inner shareable, write-back walks.
const VTCR: u64 = 1 << 31 | 3 << 12 | 1 << 10 | 1 << 8;
/// Hardware sets the access flag.
const VTCR_HA: u64 = 1 << 21;

/// The VMID of the image's VMs, in VTTBR_EL2: they run one after the other, and each CPU drops all
/// of one before it enters the next.
const VMID: u64 = 1 << 48;

/// CNTHCTL_EL2: the guest has the physical counter and timer.
const CNTHCTL: u64 = 3;

/// CPUs without something that the guests need.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Missing {
    /// Stage 2 tables of 4 KiB.
    #[error("the CPU has no page tables of 4 KiB for guests")]
    Granule,
    /// Physical addresses.
    #[error("the CPU has {0} bits of physical address; the tables of a guest need 40")]
    Addresses(u32),
}

unsafe extern "C" {
    static empty_table: u8;
}

fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0xf
}

/// ID_AA64MMFR0_EL1.PARange as VTCR_EL2.PS has it: at most 48 bits.
fn physical_range() -> u64 {
    field(read!("id_aa64mmfr0_el1"), 0).min(5)
}

/// The bits that it stands for.
fn physical_bits() -> u32 {
    [32, 36, 40, 42, 44, 48][physical_range() as usize]
}

/// Whether the CPU can set the access flag.
fn has_access_flag() -> bool {
    field(read!("id_aa64mmfr1_el1"), 0) != 0
}

/// What the CPU has, as far as tables depend on it.
pub(super) fn hardware() -> Hardware {
    let mut features = CpuFeatures::empty();
    features.set(CpuFeatures::FWB, field(read!("id_aa64mmfr2_el1"), 40) != 0);
    features.set(CpuFeatures::XNX, field(read!("id_aa64mmfr1_el1"), 28) != 0);
    let gpa_bits = Some(physical_bits() as u8).filter(|&bits| bits < 48);
    Hardware { features, gpa_bits, ..Hardware::default() }
}

/// Turns virtualization on, on the calling CPU, with tables that map nothing.
///
/// # Errors
/// [`Missing`].
pub(super) fn set_up() -> Result<(), Missing> {
    // TGran4_2: 1, not there; 0, as TGran4 says, whose 15 is "not there".
    let sizes = read!("id_aa64mmfr0_el1");
    match (field(sizes, 40), field(sizes, 28)) {
        (1, _) | (0, 0xf) => return Err(Missing::Granule),
        _ => {}
    }
    if physical_bits() < 40 {
        return Err(Missing::Addresses(physical_bits()));
    }
    let mut control = HCR;
    if hardware().features.contains(CpuFeatures::FWB) {
        control |= HCR_FWB;
    }
    let isar1 = read!("id_aa64isar1_el1");
    // APA, API; and APA3 of another register.
    if [field(isar1, 4), field(isar1, 8), field(read!("s3_0_c0_c6_2"), 12)].iter().any(|&has| has != 0) {
        control |= HCR_API_APK;
    }
    // SAFETY: what the guest gets: its CPU's own numbers, timers without offset, no traps of the
    // performance monitors. Stage 2 is on, and maps nothing.
    unsafe {
        if field(read!("id_aa64mmfr1_el1"), 40) != 0 {
            write!("s3_4_c1_c2_2", HCRX_MSCEN);
        }
        write!("vpidr_el2", read!("midr_el1"));
        write!("vmpidr_el2", read!("mpidr_el1") & (AFFINITY | 1 << 31));
        write!("cnthctl_el2", CNTHCTL);
        write!("cntvoff_el2", 0_u64);
        write!("mdcr_el2", read!("mdcr_el2") & 0x1f);
        write!("hstr_el2", 0_u64);
        load_no_tables();
        write!("hcr_el2", control);
        execute!("isb");
    }
    Ok(())
}

/// Walks the tables `second_stage` from now on.
///
/// # Safety
/// They are the tables of a VM, until [`load_no_tables`].
unsafe fn load_tables(second_stage: &SecondStage) {
    let tracks = second_stage.access_tracking == AccessTracking::AccessedBit && has_access_flag();
    // SL0: 2 for four levels, 1 for three.
    let start = second_stage.nr_levels - 2;
    let size = 64 - u64::from(second_stage.gpa_bits);
    let control = VTCR | if tracks { VTCR_HA } else { 0 } | physical_range() << 16 | start << 6 | size;
    // SAFETY: as the caller promises. What the CPU has of an earlier VM goes.
    unsafe {
        write!("vtcr_el2", control);
        write!("vttbr_el2", VMID | second_stage.root.0);
        execute!("isb", "dsb nshst", "tlbi vmalls12e1", "dsb nsh", "isb");
    }
}

/// Walks tables that map nothing from now on.
fn load_no_tables() {
    let table = (&raw const empty_table).addr() as u64;
    // Four levels of 48 bits, or of what the CPU has: the root is one page in any case.
    let control = VTCR | physical_range() << 16 | 2 << 6 | u64::from(64 - physical_bits());
    // SAFETY: the table is the image's, and empty.
    unsafe {
        write!("vtcr_el2", control);
        write!("vttbr_el2", VMID | table);
        execute!("isb", "dsb nshst", "tlbi vmalls12e1", "dsb nsh", "isb");
    }
}
