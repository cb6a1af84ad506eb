//! One vCPU and the progress of its touches.
//!
//! A touch is what KVM's demand paging test does to a page, a write to its first word, and a little
//! more. The same instruction returns the word that was there. So the guest itself checks that it
//! has the right page, without a second access. Whole pages are compared afterwards.

use std::time::Duration;

use slat::shadow::Gva;
use slat::slots::MemoryFaultFlags;
use slat::{Exit, Gfn, Vcpu};

use crate::hardware::cpu::{Cpu, CpuCounters, CpuError};
use crate::hardware::walk::HardwareFormat;
use crate::linux::clock;
use crate::paging::{Pattern, VcpuError};
use crate::vm::guest;
use crate::vm::host::MachineHost;
use crate::vm::machine::REGION_GPA;

/// One of so many touches is timed: reading the clock for each would be a twentieth of the measured
/// time. Odd, so that the timed touches are not always those that begin a cache line of PTEs.
const SAMPLE_PERIOD: u64 = 13;

/// With fewer pages than this, each touch is timed.
const MIN_SAMPLES: u64 = 512;

/// How a vCPU's turn ended.
pub(super) enum Turn {
    /// It has done as many touches as a turn has.
    Goes,
    /// It has touched all of its pages.
    Finished,
    /// It needs this page.
    Exited(u64, MemoryFaultFlags),
}

/// What a vCPU did in a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VcpuPaging {
    /// From the beginning of the run until its last touch.
    pub elapsed: Duration,
    /// Pages that it touched in this run.
    pub nr_pages: u64,
    /// Exits for pages that were not there.
    pub nr_exits: u64,
    /// What its CPU did.
    pub counters: CpuCounters,
}

pub(super) struct Lane<F: HardwareFormat> {
    pub(super) vcpu: usize,
    cpu: Cpu<Vcpu<MachineHost, F>, F>,
    first_page: u64,
    nr_pages: u64,
    /// Pages that it has touched in this round.
    nr_touched: u64,
    round: u64,
    /// The contents of pages when they come; `None`: zeros.
    contents: Option<Pattern>,
    /// In ns.
    samples: Vec<u32>,
    /// When the present touch began, if it is timed.
    began_ns: Option<u64>,
    report: VcpuPaging,
    counters_before: CpuCounters,
    run_began_ns: u64,
}

impl<F: HardwareFormat> Lane<F> {
    pub(super) fn new(
        vcpu: usize,
        cpu: Cpu<Vcpu<MachineHost, F>, F>,
        first_page: u64,
        nr_pages: u64,
        contents: Option<Pattern>,
    ) -> Lane<F> {
        let nr_samples = (nr_pages / SAMPLE_PERIOD).max(nr_pages.min(MIN_SAMPLES)) + 1;
        Lane {
            vcpu,
            cpu,
            first_page,
            nr_pages,
            nr_touched: 0,
            round: 1,
            contents,
            samples: Vec::with_capacity(nr_samples as usize),
            began_ns: None,
            report: VcpuPaging::default(),
            counters_before: CpuCounters::default(),
            run_began_ns: 0,
        }
    }

    /// Begins a run, which goes on with the pages that were not touched yet.
    pub(super) fn begin(&mut self, now_ns: u64) {
        self.samples.clear();
        self.began_ns = None;
        self.report = VcpuPaging::default();
        self.counters_before = self.cpu.counters();
        self.run_began_ns = now_ns;
    }

    /// Touches all pages once more, and writes `round` into them.
    pub(super) fn begin_round(&mut self, round: u64) {
        (self.nr_touched, self.round) = (0, round);
    }

    pub(super) fn is_finished(&self) -> bool {
        self.nr_touched == self.nr_pages
    }

    /// Returns what it did since the run began, and how long touches took, in ns.
    pub(super) fn report(&mut self) -> (VcpuPaging, Vec<u32>) {
        let counters = self.cpu.counters().since(self.counters_before);
        (VcpuPaging { counters, ..std::mem::take(&mut self.report) }, std::mem::take(&mut self.samples))
    }

    /// Until it is run again, flushes ignore it. Its thread calls this before it sleeps, and not
    /// each time that it goes on with another vCPU: between two accesses a CPU delays no flush, it
    /// only adds interrupts to it.
    pub(super) fn exit_guest_mode(&self) {
        self.cpu.exit_guest_mode();
    }

    /// Makes up to `nr_touches`, until a page is missing.
    #[inline]
    pub(super) fn run(&mut self, nr_touches: u64) -> Result<Turn, VcpuError> {
        let end = self.nr_pages.min(self.nr_touched + nr_touches);
        while self.nr_touched < end {
            let page = self.first_page + self.nr_touched;
            let is_sampled = self.nr_touched.is_multiple_of(SAMPLE_PERIOD) || self.nr_pages <= MIN_SAMPLES;
            if is_sampled && self.began_ns.is_none() {
                self.began_ns = Some(clock::timestamp_ns());
            }
            match self.cpu.exchange(Gva(REGION_GPA.0 + (page << Gfn::SHIFT)), guest::value(self.round, page)) {
                Ok(found) => {
                    self.check(page, found)?;
                    self.nr_touched += 1;
                    self.report.nr_pages += 1;
                    if let Some(began_ns) = self.began_ns.take() {
                        let took_ns = clock::timestamp_ns().saturating_sub(began_ns);
                        // Never more than there is room for, so that nothing is allocated here.
                        if self.samples.len() < self.samples.capacity() {
                            self.samples.push(u32::try_from(took_ns).unwrap_or(u32::MAX));
                        }
                    }
                }
                Err(CpuError::Exit(Exit::MemoryFault { flags, .. })) => {
                    self.report.nr_exits += 1;
                    return Ok(Turn::Exited(page, flags));
                }
                Err(error) => return Err(VcpuError::Cpu(error)),
            }
        }
        if !self.is_finished() {
            return Ok(Turn::Goes);
        }
        self.report.elapsed = Duration::from_nanos(clock::timestamp_ns().saturating_sub(self.run_began_ns));
        Ok(Turn::Finished)
    }

    /// The first word of a page is what came with it. From the second round on it is what the round
    /// before wrote, or another vCPU in this round.
    #[inline]
    fn check(&self, page: u64, found: u64) -> Result<(), VcpuError> {
        let expected = match self.round {
            1 => self.contents.map_or(0, |contents| contents.word(page, 0)),
            round => guest::value(round - 1, page),
        };
        if found == expected || found == guest::value(self.round, page) {
            return Ok(());
        }
        Err(VcpuError::WrongWord { page, found, expected })
    }
}
