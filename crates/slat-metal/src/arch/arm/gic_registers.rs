//! The registers of a GICv3 (IHI0069, 12 "Programmers' Model"): their places, and what is in them.

/// The SGI of a kick.
pub const KICK: u32 = 15;

/// Offsets of registers: of the distributor,
pub const GICD_CTLR: u64 = 0;
/// of a redistributor,
pub const GICR_TYPER: u64 = 8;
pub const GICR_WAKER: u64 = 0x14;
/// and of its second frame, for the CPU's own interrupts.
pub const SGI_FRAME: u64 = 0x1_0000;
pub const GICR_IGROUPR0: u64 = SGI_FRAME + 0x80;
pub const GICR_ISENABLER0: u64 = SGI_FRAME + 0x100;
pub const GICR_IPRIORITYR: u64 = SGI_FRAME + 0x400;

/// GICD_CTLR: groups 0 and 1 are on; affinity routing; one security state; a write is under way.
pub const CTLR_GROUP_0: u32 = 1 << 0;
pub const CTLR_GROUP_1: u32 = 1 << 1;
pub const CTLR_AFFINITY: u32 = 1 << 4;
pub const CTLR_ONE_STATE: u32 = 1 << 6;
pub const CTLR_PENDING: u32 = 1 << 31;

/// GICR_TYPER: the last redistributor of the region; it has frames for virtual LPIs.
pub const TYPER_LAST: u64 = 1 << 4;
pub const TYPER_VLPIS: u64 = 1 << 1;

/// GICR_WAKER: the CPU sleeps, and the interface to it.
pub const WAKER_SLEEP: u32 = 1 << 1;
pub const WAKER_ASLEEP: u32 = 1 << 2;

/// The affinity of a CPU as GICR_TYPER and GICD_IROUTER have it: four bytes behind each other.
pub fn packed(mpidr: u64) -> u32 {
    ((mpidr >> 32 & 0xff) << 24 | mpidr & 0xff_ffff) as u32
}

/// The priorities of SGIs 12 to 15, in `word`, with that of the kick.
pub fn with_kick_priority(word: u32) -> u32 {
    word & 0x00ff_ffff
}

/// The command that sends the SGI `number` to the CPU `mpidr` ("ICC_SGI0R_EL1").
pub fn sgi(mpidr: u64, number: u32) -> u64 {
    let affinity = |level: u32| mpidr >> if level == 3 { 32 } else { 8 * level } & 0xff;
    affinity(3) << 48
        | affinity(2) << 32
        | u64::from(number) << 24
        | affinity(1) << 16
        | (affinity(0) >> 4) << 44
        | 1 << (affinity(0) & 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_named_by_its_affinity() {
        assert_eq!(packed(0x12_0034_5678), 0x1234_5678);
        // Aff3 in bits 55:48, Aff2 in 39:32, INTID in 27:24, Aff1 in 23:16, RS in 47:44, and a bit
        // of the target list.
        assert_eq!(sgi(0x12_0034_5602, 15), 0x0012_0034_0f56_0004);
        assert_eq!(sgi(0x1f, 1), 1 << 44 | 1 << 24 | 1 << 15);
    }

    #[test]
    fn the_kick_has_the_highest_priority() {
        // A byte for each SGI; that of the kick is the last one of the word.
        assert_eq!(KICK % 4, 3);
        assert_eq!(with_kick_priority(0xa0b0_c0d0), 0x00b0_c0d0);
    }
}
