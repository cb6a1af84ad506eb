//! `slat userfault`: how fast vCPUs get memory that arrives page by page, after KVM's
//! demand_paging_test. Without userfault the host has all pages. Else userfaultfd brings them,
//! userfault exits, both, or a resolver behind rings. Without a case, the rows of the first
//! published table run, with `--matrix` those of all, and the published figures are printed too.
//!
//! Each run has a new machine (`run`). Rows take turns, so that a drift of the machine's speed
//! affects all of them. Every page is verified. The resolver of the rings is a child process, the
//! same program with a hidden command (`resolver`). It ends when the socket to its parent does, so
//! no resolver outlives its parent, however that ends.

mod case;
mod figures;
mod options;
mod published;
pub(crate) mod resolver;
mod run;
mod source;

use clap::ValueEnum;
use slat::PAGE_SIZE;
use slat_machine::linux::topology;

use crate::columns::in_turns;
use crate::failure::{Failure, ensure};
use crate::results::Outcome;
use crate::session::Session;
use case::Case;
pub(crate) use case::{Mode, Uffds};
use figures::Report;
pub(crate) use options::UserfaultArgs;
pub(crate) use published::{Group, VCPUS, X86};
use run::Measured;
use source::Source;
pub(crate) use source::{ServeArgs, serve};

pub(crate) fn run(args: &UserfaultArgs, session: &Session) -> Result<Outcome, Failure> {
    args.check()?;
    let available_bytes = topology::available_memory_bytes();
    let bytes_per_vcpu =
        |nr_vcpus| args.bytes.unwrap_or_else(|| fitting_bytes(args.default_bytes(), nr_vcpus, available_bytes));
    let cases = |nr_vcpus| args.cases(nr_vcpus, bytes_per_vcpu(nr_vcpus));
    let all: Vec<Case> = args.nr_vcpus().iter().flat_map(|&nr_vcpus| cases(nr_vcpus)).collect();
    all.iter().try_for_each(|case| run::check(args, case))?;
    let most = args.nr_vcpus().iter().map(|&nr_vcpus| bytes_per_vcpu(nr_vcpus).saturating_mul(nr_vcpus as u64)).max();
    let source = Source::open(args, most.unwrap_or(0), session)?;
    let mut remarks: Vec<String> = source.remark().into_iter().collect();
    for &nr_vcpus in args.nr_vcpus() {
        let bytes_per_vcpu = bytes_per_vcpu(nr_vcpus);
        if bytes_per_vcpu < args.bytes.unwrap_or(args.default_bytes()) {
            remarks.push(format!(
                "{nr_vcpus} vCPUs have {} KiB each: {} MiB for each do not fit into the memory of this machine.",
                bytes_per_vcpu >> 10,
                args.default_bytes() >> 20,
            ));
        }
    }
    let outcome = |all: &[Measured]| {
        let measured: Vec<&Measured> = all.iter().filter(|measured| !measured.runs.is_empty()).collect();
        let remarks: Vec<String> = remarks.iter().cloned().chain(run::remarks(args, &measured)).collect();
        let report = Report { args, measured: &measured, remarks: &remarks };
        Outcome::new(report.results(), |out| report.print(out))
    };
    let nr_cases = all.len() / args.nr_vcpus().len();
    ensure!(nr_cases > 0, Usage, "--modes: the tables of this format have none of these rows; choose others");
    let run = |case: &Case, _| run::once(args, case, &source, session);
    in_turns(session, all, nr_cases, args.nr_runs(), Case::title, run, outcome)
}

/// The published pages per second for each of `nr_vcpus` vCPUs, of the row `mode` with anonymous
/// memory on x86.
pub(crate) fn published_rate(mode: &str, nr_vcpus: usize) -> Option<f64> {
    let [anonymous, ..] = &published::X86;
    anonymous.rate(Mode::from_str(mode, false).ok()?, nr_vcpus)
}

/// So much memory for each vCPU, halved until the sum fits into this machine.
fn fitting_bytes(wanted_bytes: u64, nr_vcpus: usize, available_bytes: Option<u64>) -> u64 {
    // The rest is for page tables, stacks, the source, and other processes.
    let usable = available_bytes.map_or(u64::MAX, |bytes| bytes / 4 * 3);
    let mut bytes = wanted_bytes;
    while bytes > PAGE_SIZE && bytes.saturating_mul(nr_vcpus as u64) > usable {
        bytes /= 2;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_rates_are_found_by_name() {
        assert_eq!(published_rate("missing-1r", 8), Some(26_059.0));
        assert_eq!((published_rate("uf", 3), published_rate("minor", 8), published_rate("", 8)), (None, None, None));
    }

    #[test]
    fn memory_is_halved_until_it_fits() {
        assert_eq!(fitting_bytes(64 << 20, 64, None), 64 << 20);
        assert_eq!(fitting_bytes(64 << 20, 64, Some(8 << 30)), 64 << 20);
        // 400 x 64 MiB are 25 GiB.
        assert_eq!(fitting_bytes(64 << 20, 400, Some(22 << 30)), 32 << 20);
        assert_eq!(fitting_bytes(64 << 20, 4096, Some(16 << 30)), 2 << 20);
        assert_eq!(fitting_bytes(64 << 20, 4096, Some(0)), PAGE_SIZE);
    }
}
