//! The engine against the plain model of the model test (`crates/slat/tests/model`), with operations that a fuzzer makes:
//! it finds by coverage what random sequences meet by chance only.
//!
//! The first bytes choose format and configuration; the rest are operations until the bytes end.
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
use common::log::{
    ACCESS_TRACKINGS, DIRTY_TRACKINGS, FAULT_AROUNDS, HUGE_PAGE_LOGGINGS, LAZY_HUGE_PAGE_LOGGINGS, LOCKINGS,
    MANUAL_PROTECTS,
};
use libfuzzer_sys::fuzz_target;
use pair::Reports;
use ops::{
    Aging, Alignment, At, BITMAP_WORDS, Bits, By, LogRange, MASKS, NR_PAGES, NR_PLACES, NR_SLOTS, NewBitmap, Op,
    RANGE_PAGES, SIZES, WRITES,
};
use slat::{Access, Config, Vm};
use slat::format::Format;
use slat::slots::MemoryAttributes;

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
        return Ok(At::Place(index(bytes, NR_PLACES)?));
    }
    Ok(At::Slot { slot: slot(bytes)?, page: page(bytes)? })
}

fn log_range(bytes: &mut Unstructured<'_>) -> Result<LogRange> {
    if bytes.ratio(1, 8)? {
        return Ok(LogRange::Pages { first: page(bytes)?, nr_pages: page(bytes)? });
    }
    Ok(LogRange::Words { first: bytes.int_in_range(0..=5000)?, nr_words: bytes.int_in_range(0..=5000)? })
}

fn bitmap(bytes: &mut Unstructured<'_>) -> Result<NewBitmap> {
    Ok(NewBitmap { granularity: bytes.int_in_range(0..=1)?, words: index(bytes, BITMAP_WORDS.len())? })
}

fn one_of<T: Copy>(bytes: &mut Unstructured<'_>, all: &[T]) -> Result<T> {
    bytes.choose(all).copied()
}

fn config(bytes: &mut Unstructured<'_>) -> Result<Config> {
    let huge_page_loggings = one_of(bytes, &[HUGE_PAGE_LOGGINGS, LAZY_HUGE_PAGE_LOGGINGS])?;
    Ok(Config::default()
        .with_locking(one_of(bytes, &LOCKINGS)?)
        .with_access_tracking(one_of(bytes, &ACCESS_TRACKINGS)?)
        .with_dirty_tracking(one_of(bytes, &DIRTY_TRACKINGS)?)
        .with_manual_protect(one_of(bytes, &MANUAL_PROTECTS)?)
        .with_huge_page_logging(one_of(bytes, &huge_page_loggings)?)
        .with_fault_around(one_of(bytes, &FAULT_AROUNDS)?))
}

fn check<F: Format>(config: Config, reports: Reports, ops: &[Op]) {
    // Only configurations that the format supports.
    if Vm::<_, F>::new(common::TestHost::default(), config).is_ok() {
        pair::check::<F>(config, reports, ops);
    }
}

fn op(bytes: &mut Unstructured<'_>) -> Result<Op> {
    Ok(match bytes.int_in_range(0..=26)? {
        0 | 1 => Op::Create {
            slot: slot(bytes)?,
            place: index(bytes, NR_PLACES)?,
            pages: index(bytes, NR_PAGES.len())?,
            flags: bytes.int_in_range(0..=15)?,
            size: index(bytes, SIZES.len())?,
            alignment: *bytes.choose(&[Alignment::Like1G, Alignment::Like2M, Alignment::Odd])?,
            writes: index(bytes, WRITES.len())?,
            bitmap: Some(bitmap(bytes)?),
        },
        2 => Op::Delete { slot: slot(bytes)? },
        3 => Op::Move { slot: slot(bytes)?, place: index(bytes, NR_PLACES)? },
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
        12 => Op::GetRange { slot: slot(bytes)?, range: log_range(bytes)? },
        13 => Op::Clear { slot: slot(bytes)?, range: log_range(bytes)?, mask: index(bytes, MASKS.len())? },
        14 => Op::MarkDirty { slot: slot(bytes)?, page: page(bytes)?, pages: index(bytes, RANGE_PAGES.len())? },
        15 => {
            Op::Split { at: at(bytes)?, pages: index(bytes, RANGE_PAGES.len())?, largest: index(bytes, SIZES.len())? }
        }
        16 => Op::Recover { at: at(bytes)?, pages: index(bytes, RANGE_PAGES.len())? },
        17 => Op::Userfault {
            slot: slot(bytes)?,
            on: bytes.arbitrary()?,
            bitmap: if bytes.arbitrary()? { Some(bitmap(bytes)?) } else { None },
        },
        18 | 19 => Op::SetBits {
            slot: slot(bytes)?,
            page: bytes.int_in_range(0..=1099)?,
            pages: index(bytes, RANGE_PAGES.len())?,
            bits: *bytes.choose(&[Bits::Set, Bits::Clear])?,
        },
        20 => Op::Rescan {
            slot: slot(bytes)?,
            page: bytes.int_in_range(0..=599)?,
            pages: index(bytes, RANGE_PAGES.len())?,
        },
        21 => Op::Attributes {
            at: at(bytes)?,
            pages: index(bytes, RANGE_PAGES.len())?,
            attributes: *bytes.choose(&[MemoryAttributes::PRIVATE, MemoryAttributes::empty()])?,
        },
        22 => Op::CheckAccess { at: at(bytes)?, pages: index(bytes, RANGE_PAGES.len())? },
        _ => Op::Touch { at: at(bytes)?, access: access(bytes)?, by: *bytes.choose(&[By::Fault, By::Hardware])? },
    })
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Unstructured::new(data);
    let mut checks: Vec<fn(Config, Reports, &[Op])> = Vec::new();
    slat::for_each_format!(F => {
        checks.push(check::<F>);
    });
    let (Ok(check_format), Ok(config)) = (one_of(&mut bytes, &checks), config(&mut bytes)) else { return };
    // Not by a byte: the seeds keep what they say.
    let reports = if data.len() % 2 == 0 { Reports::Each } else { Reports::Some };
    let mut ops = Vec::new();
    while !bytes.is_empty() && ops.len() < MAX_OPS {
        let Ok(op) = op(&mut bytes) else { break };
        ops.push(op);
    }
    check_format(config, reports, &ops);
});
