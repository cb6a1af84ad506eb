//! Host-physical addresses of the software machine: a host-physical address is a pointer plus
//! [`BIAS`].
//!
//! The bias makes a mistake show: no pointer is a valid host-physical address and no host-physical
//! address can be dereferenced, so an engine that confuses them fails at its first access. Both
//! ends fit: user space pointers are below 2^47, and the biased addresses are below 2^48, the
//! fewest address bits of any format (Arm's stage 2).

use slat::Hpa;

/// What is added to a pointer to make a host-physical address, in bytes.
pub const BIAS: u64 = 1 << 47;

/// Pointers are below this: user space's half of a 48-bit address space.
const POINTER_END: u64 = 1 << 47;

/// The host-physical address of the memory at `pointer`.
///
/// The result is meaningful for pointers of user space only, which is where the machine's memory
/// is.
#[inline]
pub fn hpa_of<T>(pointer: *const T) -> Hpa {
    debug_assert!((pointer.addr() as u64) < POINTER_END);
    Hpa((pointer.expose_provenance() as u64).wrapping_add(BIAS))
}

/// The pointer to the memory at `hpa`; `None` if no memory of this machine can have that address.
#[inline]
pub fn pointer_to<T>(hpa: Hpa) -> Option<*mut T> {
    let address = hpa.0.wrapping_sub(BIAS);
    if address < POINTER_END { Some(std::ptr::with_exposed_provenance_mut(address as usize)) } else { None }
}

/// The pointer to the memory at `hpa`, which came from [`hpa_of`]: for the host's own page tables,
/// where a check at each step of each walk would only cost. For any other address the pointer must
/// not be used.
#[inline]
pub fn ptr_of(hpa: Hpa) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(hpa.0.wrapping_sub(BIAS) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let word = 7_u64;
        let hpa = hpa_of(&word);
        assert!(hpa.0 >= BIAS && hpa.0 < 1 << 48);
        assert_eq!(pointer_to::<u64>(hpa), Some((&raw const word).cast_mut()));
    }

    #[test]
    fn a_pointer_is_no_physical_address() {
        let word = 7_u64;
        assert_eq!(pointer_to::<u64>(Hpa((&raw const word).addr() as u64)), None);
        assert_eq!(pointer_to::<u64>(Hpa(0)), None);
        assert_eq!(pointer_to::<u64>(Hpa(BIAS + (1 << 47))), None);
    }
}
