//! The firmware's calls for power (Arm Power State Coordination Interface, DEN0022), by SMC.

#![expect(unsafe_code, reason = "starts CPUs at an address")]

use smccc::{Smc, psci};

/// Starts the CPU with the number `mpidr` at `entry`, with `argument` in `x0`.
///
/// # Errors
/// That of the firmware.
///
/// # Safety
/// A CPU that starts at `entry`, with its MMU off and with `argument`, does no harm.
pub(super) unsafe fn cpu_on(mpidr: u64, entry: u64, argument: u64) -> Result<(), psci::error::Error> {
    psci::cpu_on::<Smc>(mpidr, entry, argument)
}

/// Turns the machine off.
pub(super) fn system_off() -> ! {
    // It comes back where there is no such firmware.
    let _ = psci::system_off::<Smc>();
    super::halt()
}
