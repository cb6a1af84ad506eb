//! Why a guest was left: the fields of ESR_EL2 (Arm ARM, D17.2.37 "ESR_EL2"), as plain functions.

use slat::Access;

/// The exception class.
const CLASS_SHIFT: u32 = 26;
/// HVC of AArch64.
pub const CLASS_HVC: u64 = 0x16;
/// SMC of AArch64.
pub const CLASS_SMC: u64 = 0x17;
/// A system register or instruction.
pub const CLASS_SYSTEM: u64 = 0x18;
/// An instruction abort of EL1 or EL0.
const CLASS_INSTRUCTION_ABORT: u64 = 0x20;
/// A data abort of EL1 or EL0.
const CLASS_DATA_ABORT: u64 = 0x24;

/// Of an abort: a write. Cache maintenance counts as one.
const WNR: u64 = 1 << 6;
/// An access of a walk of stage 1 tables.
const S1PTW: u64 = 1 << 7;
/// Cache maintenance.
const CM: u64 = 1 << 8;
/// The fields of a load or store are valid.
const ISV: u64 = 1 << 24;

/// The exception class of `syndrome`.
pub const fn class(syndrome: u64) -> u64 {
    syndrome >> CLASS_SHIFT & 0x3f
}

/// ISS, what the class says in detail.
pub const fn details(syndrome: u64) -> u64 {
    syndrome & 0x1ff_ffff
}

/// What a table of stage 2 did not allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// The access. That of a walk of the guest's tables is a read, and a write where it may have
    /// been the update of a flag.
    pub access: Access,
    /// Where the guest-physical address is.
    pub address: AbortAddress,
}

/// Where the guest-physical address of an abort is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AbortAddress {
    /// In HPFAR_EL2.
    Hpfar,
    /// Nowhere: FAR_EL2 has to be translated by the tables of stage 1. HPFAR_EL2 is unknown after a
    /// permission fault that is not of a walk (D17.2.63 "HPFAR_EL2").
    Far,
}

/// The level of privilege that the guest had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// EL0.
    User,
    /// EL1.
    Kernel,
}

/// The abort of `syndrome`, of a guest at `level`. `None`: it is none of stage 2 that tables can
/// mend, but another exception, or an abort by an external cause, or by two translations of one
/// address.
pub const fn abort(syndrome: u64, level: Level) -> Option<Abort> {
    let is_fetch = match class(syndrome) {
        CLASS_INSTRUCTION_ABORT => true,
        CLASS_DATA_ABORT => false,
        _ => return None,
    };
    // Bits 5 to 2 of the status: 1 translation, 2 access flag, 3 permission. Bits 1 and 0: the
    // level.
    let is_permission = match syndrome >> 2 & 0xf {
        1 | 2 => false,
        3 => true,
        _ => return None,
    };
    let is_walk = syndrome & S1PTW != 0;
    let access = if is_walk {
        // Only the update of a flag in the guest's tables lacks a permission: they may be read
        // always.
        if is_permission { Access::Write } else { Access::Read }
    } else if is_fetch {
        match level {
            Level::User => Access::ExecuteUser,
            Level::Kernel => Access::Execute,
        }
    } else if syndrome & CM != 0 {
        // Cache maintenance has WNR set, and writes nothing. It may need the right to write all the
        // same (DC IVAC).
        if is_permission { Access::Write } else { Access::Read }
    } else if syndrome & WNR != 0 {
        Access::Write
    } else {
        Access::Read
    };
    let address = if is_permission && !is_walk { AbortAddress::Far } else { AbortAddress::Hpfar };
    Some(Abort { access, address })
}

/// A load or store of one register, which the hypervisor can do itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The number of the register; 31 is none, and reads as zero.
    pub register: usize,
    /// Bytes: 1, 2, 4 or 8.
    pub nr_bytes: u32,
    /// Whether it is a store.
    pub direction: Direction,
}

/// Which way a transfer goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the device: the upper part of the register becomes zero.
    Load,
    /// To the device.
    Store,
}

/// The load or store of the data abort `syndrome`. `None`: an instruction that the CPU does not
/// describe, or a load that extends its sign.
pub const fn transfer(syndrome: u64) -> Option<Transfer> {
    const SIGN_EXTENDS: u64 = 1 << 21;
    if class(syndrome) != CLASS_DATA_ABORT || syndrome & ISV == 0 || syndrome & (SIGN_EXTENDS | CM | S1PTW) != 0 {
        return None;
    }
    Some(Transfer {
        register: (syndrome >> 16 & 31) as usize,
        nr_bytes: 1 << (syndrome >> 22 & 3),
        direction: if syndrome & WNR != 0 { Direction::Store } else { Direction::Load },
    })
}

/// What an instruction of class [`CLASS_SYSTEM`] names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct System {
    /// op0, op1, CRn, CRm, op2.
    pub name: [u8; 5],
    /// The number of the general register.
    pub register: usize,
    /// MRS is a load, MSR and instructions are stores.
    pub direction: Direction,
}

/// The instruction with the details `details`.
pub const fn system(details: u64) -> System {
    System {
        name: [
            field(details, 20, 2),
            field(details, 14, 3),
            field(details, 10, 4),
            field(details, 1, 4),
            field(details, 17, 3),
        ],
        register: (details >> 5 & 31) as usize,
        direction: if details & 1 != 0 { Direction::Load } else { Direction::Store },
    }
}

const fn field(value: u64, shift: u32, nr_bits: u32) -> u8 {
    (value >> shift & ((1 << nr_bits) - 1)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u64 = CLASS_DATA_ABORT << CLASS_SHIFT;
    const FETCH: u64 = CLASS_INSTRUCTION_ABORT << CLASS_SHIFT;
    /// The lowest level.
    const TRANSLATION: u64 = 0b00_0111;
    const ACCESS_FLAG: u64 = 0b00_1011;
    const PERMISSION: u64 = 0b00_1111;

    #[test]
    fn an_abort_has_its_access_and_its_address() {
        for (syndrome, access, address) in [
            (DATA | TRANSLATION, Access::Read, AbortAddress::Hpfar),
            (DATA | TRANSLATION | WNR, Access::Write, AbortAddress::Hpfar),
            (DATA | ACCESS_FLAG | WNR, Access::Write, AbortAddress::Hpfar),
            (DATA | PERMISSION | WNR, Access::Write, AbortAddress::Far),
            (FETCH | TRANSLATION, Access::Execute, AbortAddress::Hpfar),
            (FETCH | PERMISSION, Access::Execute, AbortAddress::Far),
            // Walks of the guest's tables: WNR is that of the access that needed the walk.
            (DATA | TRANSLATION | S1PTW | WNR, Access::Read, AbortAddress::Hpfar),
            (DATA | PERMISSION | S1PTW, Access::Write, AbortAddress::Hpfar),
            (FETCH | TRANSLATION | S1PTW, Access::Read, AbortAddress::Hpfar),
            (FETCH | PERMISSION | S1PTW, Access::Write, AbortAddress::Hpfar),
            // Cache maintenance.
            (DATA | TRANSLATION | CM | WNR, Access::Read, AbortAddress::Hpfar),
            (DATA | PERMISSION | CM | WNR, Access::Write, AbortAddress::Far),
        ] {
            assert_eq!(abort(syndrome, Level::Kernel), Some(Abort { access, address }), "{syndrome:#x}");
        }
        let user = abort(FETCH | TRANSLATION, Level::User).map(|abort| abort.access);
        assert_eq!(user, Some(Access::ExecuteUser));
    }

    #[test]
    fn other_exceptions_are_no_aborts_of_stage_2() {
        // An external abort, two translations of one address, HVC.
        for syndrome in [DATA | 0b01_0000, DATA | 0b11_0000, FETCH | 0b11_0000, CLASS_HVC << CLASS_SHIFT] {
            assert_eq!(abort(syndrome, Level::Kernel), None, "{syndrome:#x}");
        }
    }

    #[test]
    fn a_transfer_has_its_register_and_its_size() {
        let store = DATA | TRANSLATION | ISV | 2 << 22 | 7 << 16 | WNR;
        let transfer_of = |register, nr_bytes, direction| Some(Transfer { register, nr_bytes, direction });
        assert_eq!(transfer(store), transfer_of(7, 4, Direction::Store));
        assert_eq!(transfer(DATA | TRANSLATION | ISV | 3 << 22), transfer_of(0, 8, Direction::Load));
        for none in [store & !ISV, store | 1 << 21, store | CM, FETCH | TRANSLATION | ISV] {
            assert_eq!(transfer(none), None, "{none:#x}");
        }
    }

    #[test]
    fn a_system_instruction_has_its_name() {
        // MSR ICC_SGI1R_EL1, x3: op0 3, op1 0, CRn 12, CRm 11, op2 5.
        let details = 3 << 20 | 5 << 17 | 12 << 10 | 3 << 5 | 11 << 1;
        assert_eq!(system(details), System { name: [3, 0, 12, 11, 5], register: 3, direction: Direction::Store });
        assert_eq!(system(details | 1).direction, Direction::Load);
    }
}
