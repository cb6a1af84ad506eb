//! What the guest's firmware answers without a look at the guest.

use sbi_spec::binary::SbiRet;
use sbi_spec::{base, hsm, rfnc, spi, srst, time};

/// What an implementation without a number of its own answers: no other one has this.
const IMPLEMENTATION: usize = 0x51a7;

/// The extensions that are there.
const EXTENSIONS: [usize; 6] =
    [base::EID_BASE, time::EID_TIME, spi::EID_SPI, rfnc::EID_RFNC, hsm::EID_HSM, srst::EID_SRST];

/// The answer of the base extension.
pub(super) fn answer_base(function: usize, argument: usize) -> SbiRet {
    match function {
        base::GET_SBI_SPEC_VERSION => SbiRet::success(2 << 24),
        base::GET_SBI_IMPL_ID => SbiRet::success(IMPLEMENTATION),
        base::PROBE_EXTENSION => SbiRet::success(usize::from(EXTENSIONS.contains(&argument))),
        // The version, and the machine's identity: unknown.
        base::GET_SBI_IMPL_VERSION | base::GET_MVENDORID | base::GET_MARCHID | base::GET_MIMPID => SbiRet::success(0),
        _ => SbiRet::not_supported(),
    }
}

/// Of `nr_cpus` vCPUs those of a mask, by bits. `None` if it names one that is not there.
pub(super) fn targets(nr_cpus: usize, mask: usize, first: usize) -> Option<u64> {
    let all = (1 << nr_cpus) - 1;
    if first == usize::MAX {
        return Some(all);
    }
    let mask = mask as u64;
    let cpus = if first < 64 { mask << first } else { 0 };
    (cpus & !all == 0 && cpus.count_ones() == mask.count_ones()).then_some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_names_the_vcpus_that_are_there() {
        for (mask, first, found) in [
            (0b101, 0, Some(0b101)),
            (0b11, 1, Some(0b110)),
            (0, 0, Some(0)),
            // All, whatever the mask is.
            (0, usize::MAX, Some(0b111)),
            // One that is not there; one that is shifted out of the mask, or beyond all masks.
            (0b1000, 0, None),
            (0b11, 63, None),
            (1, 64, None),
            (0, 64, Some(0)),
        ] {
            assert_eq!(targets(3, mask, first), found, "{mask:#b} from {first}");
        }
    }

    #[test]
    fn extensions_are_there_if_they_are_answered() {
        // SBI Specification: "Base Extension", "IPI Extension", "Debug Console Extension".
        assert_eq!(answer_base(3, 0x10), SbiRet::success(1));
        assert_eq!(answer_base(3, 0x73_5049), SbiRet::success(1));
        assert_eq!(answer_base(3, 0x4442_434e), SbiRet::success(0));
        // Version 2.0.
        assert_eq!(answer_base(0, 0), SbiRet::success(0x0200_0000));
        assert_eq!(answer_base(7, 0), SbiRet::not_supported());
    }
}
