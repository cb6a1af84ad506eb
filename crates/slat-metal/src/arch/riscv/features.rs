//! What the harts have, according to the device tree (RISC-V Unprivileged ISA, "ISA Extension
//! Naming Conventions").

use bitflags::bitflags;

bitflags! {
    /// Extensions that matter to the hypervisor.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Features: u64 {
        /// The hypervisor extension.
        const H = 1 << 0;
        /// A guest's timer of its own.
        const SSTC = 1 << 1;
        /// Accessed and dirty bits that harts set, if they are told to.
        const SVADU = 1 << 2;
        /// Faults where they are clear.
        const SVADE = 1 << 3;
        /// A PTE that becomes valid is observed without a fence.
        const SVVPTC = 1 << 4;
    }
}

impl Features {
    /// Those of the extension `name`: one letter, or more.
    fn of(name: &str) -> Features {
        match name {
            "h" => Features::H,
            "sstc" => Features::SSTC,
            "svadu" => Features::SVADU,
            "svade" => Features::SVADE,
            "svvptc" => Features::SVVPTC,
            _ => Features::empty(),
        }
    }

    /// Those of the property `riscv,isa`: single letters behind "rv64", then names of more letters,
    /// each behind an underscore.
    pub fn of_isa(isa: &str) -> Features {
        let mut parts = isa.split('_');
        let letters = parts.next().unwrap_or_default();
        let letters = letters.strip_prefix("rv64").unwrap_or_default();
        // The first name of more letters may follow without an underscore.
        let end = letters.find(['s', 'z', 'x']).unwrap_or(letters.len());
        let (letters, first) = letters.split_at(end);
        let single = (0..letters.len()).filter_map(|index| letters.get(index..=index)).map(Features::of);
        single.chain(parts.chain([first]).map(Features::of)).collect()
    }

    /// Those of the property `riscv,isa-extensions`: names.
    pub fn of_names<'n>(names: impl Iterator<Item = &'n str>) -> Features {
        names.map(Features::of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_are_found_in_both_forms() {
        let isa = "rv64imafdch_zicsr_sstc_svadu_svvptc";
        let expected = Features::H | Features::SSTC | Features::SVADU | Features::SVVPTC;
        assert_eq!(Features::of_isa(isa), expected);
        assert_eq!(Features::of_isa("rv64imafdcsvade_zihpm"), Features::SVADE);
        assert_eq!(Features::of_isa("rv32imah"), Features::empty());
        assert_eq!(Features::of_isa(""), Features::empty());
        assert_eq!(Features::of_names(["i", "h", "zihpm"].into_iter()), Features::H);
    }
}
