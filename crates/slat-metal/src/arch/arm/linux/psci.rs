//! The firmware's calls that the guest has: PSCI (DEN0022), by their numbers.

use smccc::psci;

/// Version 1.1 of PSCI.
pub(super) const PSCI_VERSION: u64 = 1 << 16 | 1;
/// "Trusted OS is not there", of MIGRATE_INFO_TYPE.
pub(super) const NO_MIGRATION: u64 = 2;

/// Errors of PSCI (DEN0022, 5.2.2 "Return error codes").
pub(super) const NOT_SUPPORTED: u64 = -1_i64 as u64;
pub(super) const INVALID_PARAMETERS: u64 = -2_i64 as u64;
pub(super) const ALREADY_ON: u64 = -4_i64 as u64;

/// Whether a CPU is on, of AFFINITY_INFO.
pub(super) const ON: u64 = 0;
pub(super) const OFF: u64 = 1;

/// A function of PSCI that the guest has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Function {
    Version,
    Features,
    CpuOn,
    AffinityInfo,
    MigrateInfoType,
    Off,
}

impl Function {
    /// That with the number `function`.
    pub fn of(function: u32) -> Option<Function> {
        Some(match function {
            psci::PSCI_VERSION => Function::Version,
            psci::PSCI_FEATURES => Function::Features,
            psci::PSCI_CPU_ON_32 | psci::PSCI_CPU_ON_64 => Function::CpuOn,
            psci::PSCI_AFFINITY_INFO_32 | psci::PSCI_AFFINITY_INFO_64 => Function::AffinityInfo,
            psci::PSCI_MIGRATE_INFO_TYPE => Function::MigrateInfoType,
            psci::PSCI_SYSTEM_OFF | psci::PSCI_SYSTEM_RESET => Function::Off,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_the_numbers_of_the_manual() {
        // DEN0022, 5.1 "Function prototypes": with bit 30 an argument has 64 bits.
        for (number, function) in [
            (0x8400_0000, Some(Function::Version)),
            (0x8400_0003, Some(Function::CpuOn)),
            (0xc400_0003, Some(Function::CpuOn)),
            (0x8400_0004, Some(Function::AffinityInfo)),
            (0xc400_0004, Some(Function::AffinityInfo)),
            (0x8400_0006, Some(Function::MigrateInfoType)),
            (0x8400_0008, Some(Function::Off)),
            (0x8400_0009, Some(Function::Off)),
            (0x8400_000a, Some(Function::Features)),
            // CPU_SUSPEND, CPU_OFF, and a call of another service.
            (0x8400_0001, None),
            (0x8400_0002, None),
            (0x8000_0000, None),
        ] {
            assert_eq!(Function::of(number), function, "{number:#x}");
        }
    }
}
