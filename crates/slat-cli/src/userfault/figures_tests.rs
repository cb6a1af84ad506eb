//! The output for made-up runs.

use std::time::Duration;

use slat::stats::Stats;
use slat_machine::hardware::commit::FlushMethod;

use super::*;
use crate::options;

fn parse(line: &str) -> UserfaultArgs {
    options::parse(&format!("slat userfault {line}")).unwrap()
}

fn run(paging_rate: f64) -> Run {
    Run {
        paging_rate,
        nr_vcpus: 2,
        nr_threads: 2,
        guest_memfd: None,
        total_time: Duration::from_secs_f64(16384.0 / paging_rate),
        pages_per_vcpu: 16384,
        fault_p50_ns: Some(1000),
        fault_p99_ns: Some(90_000),
        nr_exits: 7,
        nr_filled_for_faults: Some(32768),
        nr_filled_by_copier: None,
        nr_verified: 32768,
        nr_logged: None,
        nr_killed: None,
        engine: Stats::default(),
        flush_method: FlushMethod::Waiting,
    }
}

/// Each case with runs of these rates.
fn measured(args: &UserfaultArgs, rates: impl Fn(&Case) -> Vec<f64>) -> Vec<Measured> {
    let cases = args.nr_vcpus().iter().flat_map(|&nr_vcpus| args.cases(nr_vcpus, 64 << 20));
    cases.map(|case| Measured { runs: rates(&case).into_iter().map(run).collect(), of: case }).collect()
}

fn printed(args: &UserfaultArgs, measured: &[Measured]) -> String {
    let (measured, mut out) = (measured.iter().collect::<Vec<_>>(), String::new());
    Report { args, measured: &measured, remarks: &["A remark.".to_owned()] }.print(&mut out);
    out
}

/// The cells of the row `name` of the table with the title `title`, which may be in several parts.
fn cells<'a>(text: &'a str, title: &str, name: &str) -> Vec<&'a str> {
    let cells = |line: &'a str| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>();
    let mut found = Vec::new();
    for line in text.lines().skip_while(|line| !line.trim_matches(['|', ' ']).starts_with(title)).skip(1) {
        let cells = cells(line);
        // The names of rows have no spaces; a title begins another table.
        if !found.is_empty() && cells[0].contains(' ') {
            break;
        }
        if cells[0] == name {
            found.extend(cells.into_iter().skip(usize::from(!found.is_empty())));
        }
    }
    assert!(!found.is_empty(), "no {name} under {title} in:\n{text}");
    found
}

#[test]
fn the_matrix_is_printed_with_the_published_figures() {
    let args = parse("--matrix --vcpus 8,64,400 --runs 3");
    // The machine gets slower and slower: within each run, uf is half of none, and missing a tenth.
    let measured = measured(&args, |case| {
        let share = match case.mode {
            Mode::None => 1.0,
            Mode::Exits => 0.5,
            Mode::Missing => 0.1,
            _ => 0.05,
        };
        [1e5, 5e4, 1e4].map(|rate| rate * share).to_vec()
    });
    let text = printed(&args, &measured);
    assert!(
        text.contains("anonymous memory, one descriptor\n")
            && text.contains("shmem memory, one descriptor for each vCPU\n")
    );
    let rate = "50\u{202f}000 /s [16\u{202f}667–91\u{202f}667]";
    assert_eq!(
        cells(&text, "pages a second for each vCPU", "none"),
        ["none", rate, "220\u{202f}402 /s", rate, "47\u{202f}720 /s", rate],
        "{text}"
    );
    assert_eq!(cells(&text, "times the rate of none", "uf"), ["uf", "0.50", "0.58", "0.50", "0.84", "0.50"], "{text}");
    let lead = cells(&text, "times the best rate of userfaultfd alone", "uf");
    assert_eq!(lead, ["uf", "5.00", "3.38", "5.00", "13.2", "5.00"], "{text}");
    let rate = "2500 /s [833–4583]";
    assert_eq!(
        cells(&text, "pages a second for each vCPU", "uf-ring"),
        ["uf-ring", rate, "–", rate, "–", rate],
        "{text}"
    );
    assert!(text.contains("x86, 96 CPUs") && text.contains("A remark.") && text.contains("software CPUs"), "{text}");
    let verified = 3 * 3 * 16 * 32768;
    assert!(text.contains(&format!("Verified: {verified} pages")), "{text}");
}

#[test]
fn other_architectures_have_other_published_figures_or_none() {
    let args = parse("--matrix --vcpus 64 --runs 1 --format ept");
    let x86 = printed(&args, &measured(&args, |_| vec![1.0]));
    assert_eq!(cells(&x86, "pages a second for each vCPU", "uf"), ["uf", "1.00 /s", "39\u{202f}913 /s"]);
    // Without the row of none there is nothing to compare with.
    let args = parse("--matrix --vcpus 64 --runs 1 --modes uf,minor");
    let few = printed(&args, &measured(&args, |_| vec![1.0]));
    assert!(!few.contains("rate of none") && few.contains("userfaultfd alone"), "{few}");
}

#[test]
fn results_have_the_medians_and_the_labels() {
    let args = parse("--matrix --vcpus 8 --runs 3 --modes none,minor-1r,uf");
    let measured = measured(&args, |case| match case.mode {
        Mode::None => vec![100.0, 200.0, 400.0],
        Mode::Exits => vec![80.0, 150.0, 320.0],
        _ => vec![10.0, 30.0, 40.0],
    });
    let results = Report { args: &args, measured: &measured.iter().collect::<Vec<_>>(), remarks: &[] }.results();
    let find = |name: &str, mode: &str, uffds: &str| {
        let mut found = results.results.iter().filter(|figure| {
            let labels = &figure.labels;
            figure.name == name && labels["mode"] == mode && labels["uffds"] == uffds && labels["backing"] == "shmem"
        });
        let first = found.next().map(|figure| (figure.samples.median(), figure.unit));
        assert!(found.next().is_none(), "{name} {mode} {uffds} twice");
        first
    };
    assert_eq!(results.experiment, "userfault");
    assert_eq!(find("paging_rate", "uf", "one"), Some((150.0, Unit::PerSecond)));
    assert_eq!(find("rate_vs_none", "uf", "one"), Some((0.8, Unit::Ratio)));
    assert_eq!(find("rate_vs_best_userfaultfd", "uf", "one"), Some((8.0, Unit::Ratio)));
    // The other group has no row of one reader.
    assert_eq!(find("rate_vs_best_userfaultfd", "uf", "per-vcpu"), None);
    let of_one_reader = results.published.iter().find(|figure| {
        figure.labels["mode"] == "minor-1r" && figure.labels["uffds"] == "one" && figure.labels["backing"] == "shmem"
    });
    assert_eq!(of_one_reader.map(|figure| (&figure.name[..], figure.range)), Some(("paging_rate", [31_704.0; 2])));
    assert_eq!(find("published_rate", "minor-1r", "one"), None);
    let (time, unit) = find("total_time", "uf", "per-vcpu").unwrap();
    assert!((time - 16384.0 / 150.0).abs() < 1e-6 && unit == Unit::Seconds, "{time}");
    assert_eq!(find("fault_p99", "none", "one").unwrap().1, Unit::Seconds);
    assert!(results.results.iter().all(|figure| figure.labels["vcpus"] == 8));
}
