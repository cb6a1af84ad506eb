//! The published figures of the series that adds userfault to KVM: pages per second for each vCPU,
//! of 64 MiB for each, on machines with 96 CPUs. (KVM Userfault, version 1, December 2024, cover
//! letter.) They are printed next to the measured figures, and the program never compares the two:
//! the published ones are of another machine with real CPUs.

use slat_machine::memory::BackingKind;
use slat_machine::vm::demand_paging::PagedBacking;

use super::case::{Mode, Uffds};

/// The numbers of vCPUs that the columns of figures are for.
pub(crate) const VCPUS: [usize; 3] = [2, 8, 64];

/// A part of the tables: its memory, its descriptors, and its rows from top to bottom.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) backing: PagedBacking,
    pub(crate) uffds: Uffds,
    pub(crate) rows: &'static [Row],
}

/// A row: pages per second for each vCPU, for each of [`VCPUS`]; `None` where nothing was
/// published.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) mode: Mode,
    pub(crate) rates: Option<[u32; VCPUS.len()]>,
}

const fn row(mode: Mode, rates: [u32; VCPUS.len()]) -> Row {
    Row { mode, rates: Some(rates) }
}

const ANONYMOUS: PagedBacking = PagedBacking::Memory(BackingKind::Anonymous);
const SHMEM: PagedBacking = PagedBacking::Memory(BackingKind::Shmem);

/// The row that slat adds.
const RING: Row = Row { mode: Mode::Ring, rates: None };

pub(crate) static X86: [Group; 3] = [
    Group {
        backing: ANONYMOUS,
        uffds: Uffds::One,
        rows: &[
            row(Mode::None, [306_845, 220_402, 47_720]),
            row(Mode::MissingOneReader, [90_724, 26_059, 3_029]),
            row(Mode::Missing, [86_840, 37_912, 1_664]),
            row(Mode::MissingAndExits, [143_021, 104_385, 34_910]),
            row(Mode::Exits, [160_326, 128_247, 39_913]),
        ],
    },
    Group {
        backing: SHMEM,
        uffds: Uffds::One,
        rows: &[
            row(Mode::None, [375_130, 214_635, 54_420]),
            row(Mode::MinorOneReader, [102_336, 31_704, 3_244]),
            row(Mode::Minor, [97_981, 36_982, 1_673]),
            row(Mode::MinorAndExits, [161_835, 113_716, 33_577]),
            row(Mode::Exits, [181_972, 131_204, 42_914]),
            RING,
        ],
    },
    Group {
        backing: SHMEM,
        uffds: Uffds::PerVcpu,
        rows: &[
            row(Mode::None, [374_060, 216_108, 54_433]),
            row(Mode::Minor, [102_661, 56_978, 11_300]),
            row(Mode::MinorAndExits, [167_080, 123_461, 48_382]),
            row(Mode::Exits, [180_439, 122_310, 42_539]),
            RING,
        ],
    },
];

pub(crate) const ARM64: [Group; 2] = [
    Group {
        backing: SHMEM,
        uffds: Uffds::One,
        rows: &[
            row(Mode::None, [419_069, 363_081, 34_348]),
            row(Mode::MinorOneReader, [87_421, 36_147, 3_764]),
            row(Mode::Minor, [84_953, 43_444, 1_323]),
            row(Mode::MinorAndExits, [164_509, 139_986, 12_373]),
            row(Mode::Exits, [185_706, 122_153, 12_153]),
            RING,
        ],
    },
    Group {
        backing: SHMEM,
        uffds: Uffds::PerVcpu,
        rows: &[
            row(Mode::None, [401_931, 334_142, 36_117]),
            row(Mode::Minor, [83_696, 75_617, 15_996]),
            row(Mode::MinorAndExits, [176_327, 115_784, 12_198]),
            row(Mode::Exits, [190_074, 126_966, 12_084]),
            RING,
        ],
    },
];

impl Row {
    /// The published figure for `nr_vcpus`, in pages per second for each vCPU.
    pub(crate) fn rate(&self, nr_vcpus: usize) -> Option<f64> {
        let column = VCPUS.iter().position(|&vcpus| vcpus == nr_vcpus)?;
        self.rates.map(|rates| f64::from(rates[column]))
    }
}

impl Group {
    /// The published figure of a row.
    pub(crate) fn rate(&self, mode: Mode, nr_vcpus: usize) -> Option<f64> {
        self.rows.iter().find(|row| row.mode == mode)?.rate(nr_vcpus)
    }

    /// The best published figure of userfaultfd alone.
    pub(crate) fn best_userfaultfd(&self, nr_vcpus: usize) -> Option<f64> {
        let rows = self.rows.iter().filter(|row| row.mode.is_userfaultfd_alone());
        rows.filter_map(|row| row.rate(nr_vcpus)).max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_of_the_published_figures_are_those_that_are_known() {
        let rounded = |ratio: f64| (ratio * 100.0).round() / 100.0;
        let [anonymous, shared, apart] = &X86;
        let of_none =
            |vcpus| rounded(anonymous.rate(Mode::Exits, vcpus).unwrap() / anonymous.rate(Mode::None, vcpus).unwrap());
        assert_eq!(VCPUS.map(of_none), [0.52, 0.58, 0.84]);
        // The row with many readers is the best one of 8 vCPUs, and the one with one reader of 64.
        assert_eq!([8, 64].map(|vcpus| anonymous.best_userfaultfd(vcpus)), [Some(37_912.0), Some(3_029.0)]);
        assert_eq!(shared.best_userfaultfd(64), Some(3_244.0));
        assert_eq!(apart.best_userfaultfd(64), Some(11_300.0));
        assert_eq!((anonymous.rate(Mode::Exits, 400), shared.rate(Mode::Ring, 64)), (None, None));
        assert_eq!(ARM64[0].rate(Mode::Minor, 64), Some(1_323.0));
    }

    #[test]
    fn each_group_has_each_mode_once_and_begins_with_none() {
        for group in X86.iter().chain(&ARM64) {
            assert_eq!(group.rows[0].mode, Mode::None);
            for (index, row) in group.rows.iter().enumerate() {
                assert!(group.rows[..index].iter().all(|other| other.mode != row.mode), "{:?}", row.mode);
            }
        }
    }
}
