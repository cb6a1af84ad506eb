//! The guest's writes to the interrupt controller, without what is the hypervisor's there.

use crate::arch::arm::gic_registers::*;

/// The distributor's groups, a bit for each interrupt.
const GICD_IGROUPR: u64 = 0x80;
const GICD_IGROUPR_END: u64 = 0x100;
/// Bits of a CPU's own interrupts: set and clear of enabled, pending, active.
const GICR_FIRST_BITS: u64 = SGI_FRAME + 0x100;
const BITS_END: u64 = SGI_FRAME + 0x384;
/// Whether they are edges.
const GICR_ICFGR0: u64 = SGI_FRAME + 0xc00;
const GICR_ICFGR1: u64 = SGI_FRAME + 0xc04;

/// The priorities that have that of the kick.
const KICK_PRIORITIES: u64 = GICR_IPRIORITYR + (KICK & !3) as u64;
const PRIORITIES_END: u64 = GICR_IPRIORITYR + 32;

/// An access that no register has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BadAccess;

/// What is written to the distributor.
pub(crate) fn to_distributor(offset: u64, value: u64) -> u64 {
    match offset {
        GICD_CTLR => value | u64::from(CTLR_GROUP_0 | CTLR_AFFINITY),
        GICD_IGROUPR..GICD_IGROUPR_END => u64::MAX,
        _ => value,
    }
}

/// What is written to a redistributor. `None`: nothing.
pub(crate) fn to_redistributor(offset: u64, nr_bytes: u32, value: u64) -> Result<Option<u64>, BadAccess> {
    let kick = 1_u64 << KICK;
    let value = match offset {
        // Registers of 32 bits with a bit for the kick, which is another one in a part of them.
        GICR_IGROUPR0..BITS_END if nr_bytes != 4 => return Err(BadAccess),
        GICR_WAKER | GICR_ICFGR0 | GICR_ICFGR1 => Some(value),
        GICR_IGROUPR0 => Some(!kick),
        GICR_FIRST_BITS..BITS_END => Some(value & !kick),
        KICK_PRIORITIES.. if offset < KICK_PRIORITIES + 4 => {
            (nr_bytes == 4).then(|| u64::from(with_kick_priority(value as u32)))
        }
        GICR_IPRIORITYR..PRIORITIES_END if nr_bytes <= 4 => Some(value),
        _ => None,
    };
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kick_stays_as_it_is() {
        let all = u64::from(u32::MAX);
        for offset in [GICR_IGROUPR0, GICR_FIRST_BITS, SGI_FRAME + 0x180, SGI_FRAME + 0x280, SGI_FRAME + 0x380] {
            assert_eq!(to_redistributor(offset, 4, all).map(|value| value.unwrap() as u32), Ok(0xffff_7fff));
            assert_eq!(to_redistributor(offset, 8, all), Err(BadAccess));
            // The kick is bit 7 of this byte.
            assert_eq!(to_redistributor(offset + 1, 1, 0x80), Err(BadAccess));
        }
        assert_eq!(to_redistributor(KICK_PRIORITIES, 4, all), Ok(Some(0xff_ffff)));
        for (offset, nr_bytes) in [(KICK_PRIORITIES - 4, 8), (KICK_PRIORITIES + 3, 1)] {
            assert_eq!(to_redistributor(offset, nr_bytes, all), Ok(None));
        }
        assert_eq!(to_redistributor(GICR_IPRIORITYR + 16, 1, 0xa0), Ok(Some(0xa0)));
    }
}
