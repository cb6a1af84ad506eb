//! Traps of the hypervisor itself: each is a defect, and ends the machine.

#![expect(unsafe_code, reason = "is entered by a trap")]

/// Reports a trap: its cause, where, the address that goes with it, and the stack pointer.
#[unsafe(no_mangle)]
extern "C" fn trap_main(scause: u64, sepc: u64, stval: u64, sp: u64) -> ! {
    match scause {
        // Access faults of fetches, loads and stores: no mapping is in the way.
        1 | 5 | 7 => crate::error!(
            "the machine has nothing at {stval:#x}, which its device tree has (exception {scause} of the hypervisor at \
             {sepc:#x})"
        ),
        _ => crate::error!("exception {scause} of the hypervisor at {sepc:#x}, address {stval:#x}, sp {sp:#x}"),
    }
}
