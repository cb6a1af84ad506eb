//! The operations of a random program. Each draws all that it does from a seed of its own, so that
//! operations can be left out when a failure is shortened.

use super::random::Random;

/// What one step does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Access,
    /// Changes a PTE on the path of an address.
    Edit,
    /// Makes an access fault where another translation is cached, and accesses the address again,
    /// without a flush.
    FaultAndRetry,
    /// Overwrites some PTE, of a page that is or was a page table or data.
    WildEdit,
    /// Several bytes at once, across PTEs.
    LongWrite,
    LoadCr3,
    Invlpg,
    Invpcid,
    FlushEverywhere,
    /// WP, SMEP, SMAP, PGE, PCIDE, NXE.
    Flip,
    SetMode,
    MoveFrame,
    Harvest,
    ChangeSlot,
    Age,
    CheckMemory,
}

/// All kinds, and their weights.
pub const KINDS: [(Kind, usize); 16] = [
    (Kind::Access, 900),
    (Kind::Edit, 300),
    (Kind::FaultAndRetry, 80),
    (Kind::WildEdit, 60),
    (Kind::LongWrite, 10),
    (Kind::LoadCr3, 120),
    (Kind::Invlpg, 120),
    (Kind::Invpcid, 60),
    (Kind::FlushEverywhere, 10),
    (Kind::Flip, 20),
    (Kind::SetMode, 2),
    (Kind::MoveFrame, 15),
    (Kind::Harvest, 8),
    (Kind::ChangeSlot, 2),
    (Kind::Age, 4),
    (Kind::CheckMemory, 10),
];

#[derive(Clone, Copy, Debug)]
pub struct Op {
    pub kind: Kind,
    pub seed: u64,
}

/// The program of a seed: it draws kinds with other weights, and leaves some out.
pub fn ops(seed: u64, nr_ops: usize) -> Vec<Op> {
    let mut random = Random::new(seed ^ 0x0905);
    let weights = KINDS.map(|(kind, weight)| match kind {
        Kind::Access | Kind::Edit => weight,
        _ => weight * random.pick(&[0, 1, 1, 3]),
    });
    let sum: usize = weights.iter().sum();
    let draw = |_| {
        let mut at = random.below(sum);
        let index = weights.iter().position(|&weight| {
            let is_here = at < weight;
            at = at.wrapping_sub(weight);
            is_here
        });
        Op { kind: KINDS[index.unwrap()].0, seed: random.next() }
    };
    (0..nr_ops).map(draw).collect()
}
