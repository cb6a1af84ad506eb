//! The switch alone: loads of CR3 and entries to the guest, in a tight loop.
//!
//! A vCPU has a few different roots, each with its own page tables that map some pages, which were
//! all touched. It loads the roots in turn. With two roots, as page-table isolation does; or with
//! as many as it caches, so that each load is of the least recently used root. With PCIDs each root
//! has its own, and bit 63 is set. Where roots are cached each load finds its root in sync, which
//! is checked. Without PCIDs a load flushes, and the time includes that.
//!
//! Timed are batches of loads, each with the following entry: one reading of the clock for many of
//! them.

use slat::format::Npt;
use slat::shadow::{GuestAccess, Gva, PagingRegisters, Privilege, ShadowStrategy};
use slat::{Access, Gfn, Outcome, PAGE_SIZE, Vcpu};
use slat_machine::guest_os::Pcids;
use slat_machine::linux::clock::timestamp_ns;
use slat_machine::memory::Backing;
use slat_machine::vm::host::MachineHost;

use super::ShadowArgs;
use super::run::ShadowMachine;
use crate::failure::{Failure, check_failed, ensure};
use crate::options::Named;
use crate::statistics::Samples;

/// Roots that page-table isolation switches between.
pub(super) const TWO: usize = 2;

/// Loads in a batch.
const BATCH: usize = 512;
/// Batches of each strategy and number of roots, interleaved.
const NR_BATCHES: usize = 200;

/// Pages that each root maps.
const NR_PAGES: u64 = 16;
/// The address of these pages.
const PAGES_GVA: u64 = 0x40_0000;
/// Guest-physical memory of each root: four tables, then the pages.
const ROOT_BYTES: u64 = (4 + NR_PAGES) * PAGE_SIZE;

/// Present, writable, user, accessed, dirty (Intel SDM vol. 3A, tables 4-15 to 4-20).
const ENTRY_BITS: u64 = 0x67;

/// CR0.PE, WP and PG.
const CR0: u64 = 1 << 0 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_PCIDE: u64 = 1 << 17;
/// IA32_EFER.LME and NXE.
const EFER: u64 = 1 << 8 | 1 << 11;
/// CR3, bit 63: keep cached translations.
const CR3_KEEP: u64 = 1 << 63;

pub(super) struct Switch {
    pub(super) strategy: ShadowStrategy,
    pub(super) nr_roots: usize,
    /// Seconds for a load and an entry, by batch.
    pub(super) times: Samples,
}

struct Bench {
    machine: ShadowMachine,
    vcpu: Vcpu<MachineHost, Npt>,
    /// CR3 for each root.
    values: Vec<u64>,
}

/// Measures all strategies, interleaved.
pub(super) fn measure(args: &ShadowArgs) -> Result<Vec<Switch>, Failure> {
    let remembered = usize::from(args.previous_roots) + 1;
    let mut nrs_of_roots = vec![TWO, remembered.max(TWO)];
    nrs_of_roots.dedup();
    let mut switches = Vec::new();
    let mut benches = Vec::new();
    for &strategy in &args.strategy.values {
        for &nr_roots in &nrs_of_roots {
            benches.push(Bench::new(args, strategy, nr_roots)?);
            switches.push(Switch { strategy, nr_roots, times: Samples::default() });
        }
    }
    let before: Vec<u64> = benches.iter().map(|bench| bench.machine.vm.stats().root_hits).collect();
    for _ in 0..NR_BATCHES {
        for (bench, switch) in benches.iter_mut().zip(&mut switches) {
            switch.times.push(bench.batch()?);
        }
    }
    for ((bench, switch), before) in benches.iter().zip(&switches).zip(before) {
        let nr_hits = bench.machine.vm.stats().root_hits - before;
        let must_hit =
            args.pcid == Pcids::On && switch.strategy != ShadowStrategy::Baseline && switch.nr_roots <= remembered;
        ensure!(
            !must_hit || nr_hits == (NR_BATCHES * BATCH) as u64,
            Check,
            "{}: {nr_hits} of {} loads among {} roots found a cached root",
            switch.strategy.name(),
            NR_BATCHES * BATCH,
            switch.nr_roots
        );
    }
    Ok(switches)
}

impl Bench {
    fn new(args: &ShadowArgs, strategy: ShadowStrategy, nr_roots: usize) -> Result<Bench, Failure> {
        let bytes = ROOT_BYTES * (nr_roots as u64 + 1);
        let machine = ShadowMachine::new(args, strategy, bytes.next_multiple_of(1 << 21))?;
        let mut vcpu = machine.vm.create_vcpu()?;
        let (pcide, keep) = match args.pcid {
            Pcids::On => (CR4_PCIDE, CR3_KEEP),
            Pcids::Off => (0, 0),
        };
        let mut values = Vec::new();
        for root in 0..nr_roots as u64 {
            let gpa = write_tables(&machine.memory, ROOT_BYTES * (root + 1));
            // Bits 11 to 0 are the PCID, or other bits, which must be clear.
            values.push(gpa | if pcide != 0 { root | keep } else { 0 });
        }
        let cr3 = values[0] & !CR3_KEEP;
        vcpu.set_paging_registers(PagingRegisters { cr0: CR0, cr3, cr4: CR4_PAE | pcide, efer: EFER })?;
        for &value in &values {
            resumed(vcpu.load_cr3(value)?)?;
            vcpu.entry()?;
            for page in 0..NR_PAGES {
                let access = GuestAccess { access: Access::Write, privilege: Privilege::User };
                resumed(vcpu.handle_page_fault(Gva(PAGES_GVA + (page << Gfn::SHIFT)), access)?)?;
                vcpu.entry()?;
            }
        }
        Ok(Bench { machine, vcpu, values })
    }

    /// Loads CR3 as often as [`BATCH`] says; returns the seconds for one load and one entry.
    fn batch(&mut self) -> Result<f64, Failure> {
        let begin = timestamp_ns();
        let mut nr_resumed = 0;
        for &value in self.values.iter().cycle().take(BATCH) {
            nr_resumed += usize::from(matches!(self.vcpu.load_cr3(value)?, Outcome::Resume));
            self.vcpu.entry()?;
        }
        let elapsed_ns = timestamp_ns() - begin;
        ensure!(nr_resumed == BATCH, Check, "{} of {BATCH} loads of CR3 faulted", BATCH - nr_resumed);
        Ok(elapsed_ns as f64 / BATCH as f64 / 1e9)
    }
}

/// Writes four page-table pages at `gpa`, which map the pages after them; returns the address of
/// the root.
fn write_tables(memory: &Backing, gpa: u64) -> u64 {
    for level in [4, 3, 2_u64] {
        let table = gpa + (4 - level) * PAGE_SIZE;
        let index = PAGES_GVA >> (Gfn::SHIFT as u64 + 9 * (level - 1)) & 0x1ff;
        memory.store(table + 8 * index, (table + PAGE_SIZE) | ENTRY_BITS);
    }
    for page in 0..NR_PAGES {
        let index = (PAGES_GVA >> Gfn::SHIFT & 0x1ff) + page;
        memory.store(gpa + 3 * PAGE_SIZE + 8 * index, (gpa + (4 + page) * PAGE_SIZE) | ENTRY_BITS);
    }
    gpa
}

fn resumed(outcome: Outcome) -> Result<(), Failure> {
    match outcome {
        Outcome::Resume => Ok(()),
        Outcome::Exit(exit) => Err(check_failed(format_args!("the guest of the switch stopped: {exit:?}"))),
    }
}
