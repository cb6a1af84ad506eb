//! The engine against the plain model of the model test (`crates/slat/tests/model`), with operations that a fuzzer makes:
//! it finds by coverage what random sequences meet by chance only.
//!
//! The first bytes choose format, locking and how accesses are found out; the rest are operations until the bytes end.
#![no_main]

#[path = "../../crates/slat/tests/common/mod.rs"]
mod common;
#[path = "../../crates/slat/tests/model/ops.rs"]
mod ops;
#[path = "../../crates/slat/tests/model/pair.rs"]
mod pair;
#[path = "../../crates/slat/tests/model/plain.rs"]
mod plain;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ops::{Aging, Alignment, At, By, NR_PAGES, NR_SLOTS, Op, PLACES, RANGE_PAGES, SIZES, WRITES};
use slat::{Access, AccessTracking, Ept, Locking, Npt};

/// As many as a case of the model test has at most: longer ones only take longer.
const MAX_OPS: usize = 80;

fn index(bytes: &mut Unstructured<'_>, len: usize) -> Result<usize> {
    bytes.choose_index(len)
}

fn slot(bytes: &mut Unstructured<'_>) -> Result<u32> {
    bytes.int_in_range(0..=NR_SLOTS - 1)
}

fn access(bytes: &mut Unstructured<'_>) -> Result<Access> {
    bytes.choose(&[Access::Write, Access::Read, Access::Execute]).copied()
}

fn page(bytes: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match bytes.int_in_range(0..=3)? {
        0 => bytes.int_in_range(0..=7)?,
        1 => bytes.int_in_range(508..=515)?,
        2 => u64::MAX,
        _ => bytes.int_in_range(0..=(1 << 18) - 1)?,
    })
}

fn at(bytes: &mut Unstructured<'_>) -> Result<At> {
    if bytes.ratio(1, 8)? {
        return Ok(At::Place(index(bytes, PLACES.len())?));
    }
    Ok(At::Slot { slot: slot(bytes)?, page: page(bytes)? })
}

fn op(bytes: &mut Unstructured<'_>) -> Result<Op> {
    Ok(match bytes.int_in_range(0..=15)? {
        0 | 1 => Op::Create {
            slot: slot(bytes)?,
            place: index(bytes, PLACES.len())?,
            pages: index(bytes, NR_PAGES.len())?,
            flags: bytes.int_in_range(0..=3)?,
            size: index(bytes, SIZES.len())?,
            alignment: *bytes.choose(&[Alignment::Like1G, Alignment::Like2M, Alignment::Odd])?,
            writes: index(bytes, WRITES.len())?,
        },
        2 => Op::Delete { slot: slot(bytes)? },
        3 => Op::Move { slot: slot(bytes)?, place: index(bytes, PLACES.len())? },
        4 => Op::SetFlags { slot: slot(bytes)?, flags: bytes.int_in_range(0..=3)? },
        5 => Op::Resize { slot: slot(bytes)? },
        6 => Op::Harvest { slot: slot(bytes)? },
        7 => Op::Begin { at: at(bytes)?, pages: index(bytes, RANGE_PAGES.len())? },
        8 => Op::End { index: usize::from(bytes.arbitrary::<u8>()?) },
        9 => Op::Replace { slot: slot(bytes)?, page: page(bytes)?, writes: index(bytes, WRITES.len())? },
        10 => Op::Age {
            at: at(bytes)?,
            pages: index(bytes, RANGE_PAGES.len())?,
            aging: *bytes.choose(&[Aging::Age, Aging::Test])?,
        },
        11 => Op::Yield { always: bytes.int_in_range(0..=1)? },
        _ => Op::Touch { at: at(bytes)?, access: access(bytes)?, by: *bytes.choose(&[By::Fault, By::Hardware])? },
    })
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Unstructured::new(data);
    let Ok(choice) = bytes.arbitrary::<u8>() else { return };
    let mut ops = Vec::new();
    while !bytes.is_empty() && ops.len() < MAX_OPS {
        let Ok(op) = op(&mut bytes) else { break };
        ops.push(op);
    }
    let tracking = [AccessTracking::AccessedBit, AccessTracking::Faults][usize::from(choice & 1)];
    let locking = [Locking::None, Locking::None, Locking::Shared, Locking::Exclusive][usize::from(choice >> 1 & 3)];
    if choice & 8 == 0 {
        pair::check::<Npt>(locking, tracking, &ops);
    } else {
        pair::check::<Ept>(locking, tracking, &ops);
    }
});
