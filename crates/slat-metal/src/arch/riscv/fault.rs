//! Guest-page faults (RISC-V Privileged Architecture, "H Extension for Hypervisor Support").

use slat::{Access, Gpa};

/// Causes of exceptions ("Machine Cause (mcause) Register"): a guest-page fault of a fetch,
pub const GUEST_FETCH_FAULT: u64 = 20;
/// of a load,
pub const GUEST_LOAD_FAULT: u64 = 21;
/// and of a store.
pub const GUEST_STORE_FAULT: u64 = 23;

/// What HTINST has where a walk of the guest's page tables has faulted: it read a PTE, or set a bit
/// of one ("Hypervisor Trap Instruction Register", pseudoinstructions).
const WALK_READ: u64 = 0x3000;
const WALK_WRITE: u64 = 0x3020;

/// The address and the access of a guest-page fault. `htval` has the address >> 2, `stval` the rest
/// of it.
pub fn page_fault(scause: u64, stval: u64, htval: u64, htinst: u64) -> (Gpa, Access) {
    let gpa = Gpa(htval << 2 | stval & 3);
    match (htinst, scause) {
        (WALK_READ, _) => (Gpa(htval << 2), Access::Read),
        (WALK_WRITE, _) => (Gpa(htval << 2), Access::Write),
        (_, GUEST_FETCH_FAULT) => (gpa, Access::Execute),
        (_, GUEST_STORE_FAULT) => (gpa, Access::Write),
        _ => (gpa, Access::Read),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_page_fault_has_its_address_and_access() {
        let fault = |scause, htinst| page_fault(scause, 0x1003, 0x2000_0400, htinst);
        assert_eq!(fault(GUEST_FETCH_FAULT, 0), (Gpa(0x8000_1003), Access::Execute));
        assert_eq!(fault(GUEST_LOAD_FAULT, 0), (Gpa(0x8000_1003), Access::Read));
        assert_eq!(fault(GUEST_STORE_FAULT, 0), (Gpa(0x8000_1003), Access::Write));
        // Walks, whatever the guest did.
        assert_eq!(fault(GUEST_STORE_FAULT, WALK_READ), (Gpa(0x8000_1000), Access::Read));
        assert_eq!(fault(GUEST_LOAD_FAULT, WALK_WRITE), (Gpa(0x8000_1000), Access::Write));
    }
}
