//! What leaves the guest, and what entries and exits do (Intel SDM vol. 3C, "Virtual Machine
//! Control Structures", "VM-Execution Control Fields" and the sections after it). A CPU says which
//! of these it has (SDM vol. 3D, appendix A "VMX Capability Reporting Facility").

#![expect(unsafe_code, reason = "reads model-specific registers")]

use x86_64::registers::model_specific::Msr;

use super::Missing;

bitflags::bitflags! {
    /// Pin-based controls.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct PinBased: u32 {
        /// Non-maskable interrupts leave the guest.
        const NMI_EXITING = 1 << 3;
        /// The preemption timer does.
        const PREEMPTION_TIMER = 1 << 6;
    }

    /// Primary processor-based controls.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Primary: u32 {
        /// HLT leaves the guest.
        const HLT_EXITING = 1 << 7;
        /// MWAIT does.
        const MWAIT_EXITING = 1 << 10;
        /// RDPMC does.
        const RDPMC_EXITING = 1 << 11;
        /// MOV to CR8 does.
        const CR8_LOAD_EXITING = 1 << 19;
        /// MOV from CR8 does.
        const CR8_STORE_EXITING = 1 << 20;
        /// MOV to and from debug registers does.
        const MOV_DR_EXITING = 1 << 23;
        /// The use of any port does.
        const UNCONDITIONAL_IO_EXITING = 1 << 24;
        /// The use of ports does that the port map names.
        const PORT_MAP = 1 << 25;
        /// The use of model-specific registers does that the register map names. Without it, that
        /// of any does.
        const MSR_MAP = 1 << 28;
        /// MONITOR does.
        const MONITOR_EXITING = 1 << 29;
        /// There are [`Secondary`] controls.
        const SECONDARY = 1 << 31;
    }

    /// Secondary processor-based controls.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Secondary: u32 {
        /// Extended page tables.
        const EPT = 1 << 1;
        /// RDTSCP is not undefined.
        const RDTSCP = 1 << 3;
        /// The guest's translations have a tag, so that entries and exits do not flush them.
        const VPID = 1 << 5;
        /// WBINVD leaves the guest.
        const WBINVD_EXITING = 1 << 6;
        /// The guest may turn paging and protection off.
        const UNRESTRICTED_GUEST = 1 << 7;
        /// INVPCID is not undefined.
        const INVPCID = 1 << 12;
        /// The CPU logs the pages whose dirty bits it sets.
        const PAGE_MODIFICATION_LOG = 1 << 17;
    }

    /// Exit controls.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct OnExit: u32 {
        /// DR7 and DEBUGCTL of the guest are saved.
        const SAVE_DEBUG = 1 << 2;
        /// The host is in 64-bit mode.
        const HOST_64_BIT = 1 << 9;
        /// PAT of the guest is saved.
        const SAVE_PAT = 1 << 18;
        /// PAT of the host is loaded.
        const LOAD_PAT = 1 << 19;
        /// EFER of the guest is saved.
        const SAVE_EFER = 1 << 20;
        /// EFER of the host is loaded.
        const LOAD_EFER = 1 << 21;
    }

    /// Entry controls.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct OnEntry: u32 {
        /// DR7 and DEBUGCTL of the guest are loaded.
        const LOAD_DEBUG = 1 << 2;
        /// The guest is in IA-32e mode. An exit from an unrestricted guest updates it.
        const IA_32E_GUEST = 1 << 9;
        /// PAT of the guest is loaded.
        const LOAD_PAT = 1 << 14;
        /// EFER of the guest is loaded.
        const LOAD_EFER = 1 << 15;
    }

    /// What IA32_VMX_EPT_VPID_CAP says of EPT (A.10 "VPID and EPT Capabilities").
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct EptCapabilities: u64 {
        /// Page tables of four levels.
        const FOUR_LEVELS = 1 << 6;
        /// Page tables in write-back memory.
        const WRITE_BACK = 1 << 14;
        /// Leaves of 2 MiB.
        const LEAVES_2M = 1 << 16;
        /// INVEPT.
        const INVEPT = 1 << 20;
        /// Accessed and dirty bits.
        const ACCESSED_AND_DIRTY = 1 << 21;
        /// INVEPT of one EPTP.
        const INVEPT_SINGLE = 1 << 25;
    }
}

/// IA32_VMX_BASIC: bits 30:0 are the number of the format of control structures; bit 55 says that
/// the registers of [`TRUE_CONTROLS`] are there.
pub(super) const VMX_BASIC: u32 = 0x480;
const HAS_TRUE_CONTROLS: u64 = 1 << 55;
/// What pin-based, primary, exit and entry controls may be. In the older registers more of them
/// must be 1.
const CONTROLS: [u32; 4] = [0x481, 0x482, 0x483, 0x484];
const TRUE_CONTROLS: [u32; 4] = [0x48d, 0x48e, 0x48f, 0x490];
const SECONDARY_CONTROLS: u32 = 0x48b;
const EPT_VPID_CAP: u32 = 0x48c;

/// The values of all control fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Controls {
    pub pin_based: u32,
    pub primary: u32,
    pub secondary: u32,
    pub on_exit: u32,
    pub on_entry: u32,
}

/// What a guest may do without an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::arch::x86) enum Held {
    /// Nothing: it is the suite's.
    Nothing,
    /// What the maps of ports and of model-specific registers name, and all that runs in real mode:
    /// it is Linux.
    Machine,
}

impl Controls {
    /// Those of a guest that may do `held`, on the calling CPU, which has VMX.
    ///
    /// # Errors
    /// [`Missing`].
    pub fn of_cpu(held: Held) -> Result<Controls, Missing> {
        let primary = Primary::MWAIT_EXITING | Primary::MONITOR_EXITING | Primary::SECONDARY;
        let secondary = Secondary::EPT | Secondary::VPID;
        let (primary, secondary, on_exit, on_entry) = match held {
            Held::Nothing => (
                primary
                    | Primary::HLT_EXITING
                    | Primary::RDPMC_EXITING
                    | Primary::CR8_LOAD_EXITING
                    | Primary::CR8_STORE_EXITING
                    | Primary::MOV_DR_EXITING
                    | Primary::UNCONDITIONAL_IO_EXITING,
                secondary | Secondary::WBINVD_EXITING,
                OnExit::HOST_64_BIT,
                OnEntry::IA_32E_GUEST,
            ),
            Held::Machine => (
                primary | Primary::PORT_MAP | Primary::MSR_MAP,
                secondary | Secondary::RDTSCP | Secondary::UNRESTRICTED_GUEST | Secondary::INVPCID,
                OnExit::all(),
                OnEntry::all(),
            ),
        };
        let registers = if read(VMX_BASIC) & HAS_TRUE_CONTROLS != 0 { TRUE_CONTROLS } else { CONTROLS };
        let controls = Controls {
            pin_based: value(registers[0], PinBased::all().bits())?,
            primary: value(registers[1], primary.bits())?,
            secondary: value(SECONDARY_CONTROLS, secondary.bits())?,
            on_exit: value(registers[2], on_exit.bits())?,
            on_entry: value(registers[3], on_entry.bits())?,
        };
        if !EptCapabilities::from_bits_truncate(read(EPT_VPID_CAP)).is_all() {
            return Err(Missing::EptCapabilities { found: read(EPT_VPID_CAP) });
        }
        Ok(controls)
    }
}

/// Whether the calling CPU, which has VMX, has the page-modification log.
pub(super) fn has_modification_log() -> bool {
    value(SECONDARY_CONTROLS, Secondary::PAGE_MODIFICATION_LOG.bits()).is_ok()
}

/// The value of a control field with the bits `wanted`: bits 31:0 of its register must be 1, bits
/// 63:32 may be.
fn value(register: u32, wanted: u32) -> Result<u32, Missing> {
    let allowed = read(register);
    let (must, may) = (allowed as u32, (allowed >> 32) as u32);
    if wanted & !may == 0 { Ok(wanted | must) } else { Err(Missing::Controls { register, bits: wanted & !may }) }
}

/// A register of the capabilities.
pub(super) fn read(register: u32) -> u64 {
    // SAFETY: a CPU with VMX has it; of the secondary and the true controls the callers ask before.
    unsafe { Msr::new(register).read() }
}
