//! `slat demand-paging`: how fast vCPUs get memory that is brought page by page, after KVM's demand_paging_test: nobody brings
//! it (the host has it), userfaultfd does, userfault exits do, or a resolver behind rings; alone and together. `--matrix` runs
//! the rows of the published tables and prints these beside.
//!
//! Each run has a machine of its own (`run`); rows take turns, so that a drift of the machine's speed meets all of them. Every
//! page is verified. The resolver of the rings is a child process, the same program again (`resolver`): it ends when the
//! socket to its parent does, so none is left behind, however the parent ends.

mod case;
mod options;
mod published;
mod report;
pub(crate) mod resolver;
mod run;
mod source;

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use slat::PAGE_SIZE;
use slat_machine::topology;

use crate::failure::Failure;
use crate::results::{self, ResultsFile};
use case::Case;
use options::DEFAULT_BYTES_PER_VCPU;
pub(crate) use options::DemandPagingArgs;
use report::Report;
use run::Measured;
use source::Source;

/// How often the progress is drawn while a run lasts.
const TICK: Duration = Duration::from_millis(200);

/// Runs the experiment and prints it.
pub(crate) fn run(args: &DemandPagingArgs) -> Result<(), Failure> {
    args.check()?;
    if let Some(address) = &args.serve {
        return source::serve(args, address);
    }
    let file = args.json.as_deref().map(ResultsFile::open).transpose()?;
    let available_bytes = topology::available_memory_bytes();
    let bytes_per_vcpu = |nr_vcpus| args.bytes.unwrap_or_else(|| fitting_bytes(nr_vcpus, available_bytes));
    let cases = |nr_vcpus| args.cases(nr_vcpus, bytes_per_vcpu(nr_vcpus));
    args.nr_vcpus().iter().flat_map(|&nr_vcpus| cases(nr_vcpus)).try_for_each(|case| run::check(args, &case))?;
    let most = args.nr_vcpus().iter().map(|&nr_vcpus| bytes_per_vcpu(nr_vcpus).saturating_mul(nr_vcpus as u64)).max();
    let source = Source::open(args, most.unwrap_or(0))?;
    let mut remarks: Vec<String> = source.remark().into_iter().collect();
    let mut measured = Vec::new();
    for &nr_vcpus in args.nr_vcpus() {
        let bytes_per_vcpu = bytes_per_vcpu(nr_vcpus);
        if bytes_per_vcpu < args.bytes.unwrap_or(DEFAULT_BYTES_PER_VCPU) {
            remarks.push(format!(
                "{nr_vcpus} vCPUs have {} KiB each: {} MiB for each do not fit into the memory of this machine.",
                bytes_per_vcpu >> 10,
                DEFAULT_BYTES_PER_VCPU >> 20,
            ));
        }
        measured.extend(measure(args, &source, &cases(nr_vcpus))?);
    }
    if measured.is_empty() {
        return Err(Failure::Usage("--modes: the tables of this format have none of these rows".to_owned()));
    }
    remarks.extend(run::remarks(args, &measured));
    let report = Report { args, measured: &measured, remarks: &remarks };
    results::deliver(file, || report.results(), |out| report.print(out))
}

/// As much as the published tables have for each vCPU; halved until all of it fits beside everything else.
fn fitting_bytes(nr_vcpus: usize, available_bytes: Option<u64>) -> u64 {
    // The rest is for tables, stacks, the source, and for whoever else runs here.
    let usable = available_bytes.map_or(u64::MAX, |bytes| bytes / 4 * 3);
    let mut bytes = DEFAULT_BYTES_PER_VCPU;
    while bytes > PAGE_SIZE && bytes.saturating_mul(nr_vcpus as u64) > usable {
        bytes /= 2;
    }
    bytes
}

/// All runs of the cases, in turns.
fn measure(args: &DemandPagingArgs, source: &Source, cases: &[Case]) -> Result<Vec<Measured>, Failure> {
    let mut measured: Vec<Measured> = cases.iter().map(|&case| Measured { case, runs: Vec::new() }).collect();
    let progress = ProgressBar::new(u64::from(args.nr_runs()) * cases.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} run {pos}/{len}  {msg}  {elapsed}") {
        progress.set_style(style);
    }
    progress.enable_steady_tick(TICK);
    for number in 0..args.nr_runs() as usize {
        for turn in 0..cases.len() {
            // Each round begins with another case: whoever comes first or last has no advantage.
            let which = (number + turn) % cases.len();
            let case = &cases[which];
            progress.set_message(format!(
                "{} vCPUs, {}, {}, {}",
                case.nr_vcpus,
                case.backing,
                case.uffds.describe(),
                case.mode
            ));
            let run = run::once(args, case, source)?;
            measured[which].runs.push(run);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_halved_until_it_fits() {
        assert_eq!(fitting_bytes(64, None), 64 << 20);
        assert_eq!(fitting_bytes(64, Some(8 << 30)), 64 << 20);
        // 400 x 64 MiB are 25 GiB.
        assert_eq!(fitting_bytes(400, Some(22 << 30)), 32 << 20);
        assert_eq!(fitting_bytes(4096, Some(16 << 30)), 2 << 20);
        assert_eq!(fitting_bytes(4096, Some(0)), PAGE_SIZE);
    }
}
