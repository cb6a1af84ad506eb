//! What slat claims: that several threads fault and map pages faster than a crate behind a mutex.

use slat_machine::linux::topology;
use slat_results::claims;
use slat_results::quantity::Unit;
use slat_results::results::compared::{Compared, Evaluation, Role, Side, System};
use slat_results::results::{Better, Results};

use super::figures::{MEASURED_ON, threads_name};
use super::measure::Measured;
use super::operation::Operation;
use super::subject::Subject;

/// slat claims to be better, by any margin.
const ABOVE: f64 = 1.0;

/// Whether slat claims to be faster than `subject`. The other two map a page in so short a time
/// that two threads with a mutex are as fast as slat where a cache line moves quickly between the
/// CPUs, and several times slower where it does not: a tie.
fn is_claimed(subject: Subject) -> bool {
    !matches!(subject.name(), "page_table_multiarch" | "x86_64")
}

/// The claims, on as many threads as have a CPU each. `None`: nothing was measured that is claimed.
pub(crate) fn compared(measured: &Measured, results: &Results) -> Option<Compared> {
    let nr_cpus = topology::usable_cpus().len() as u64;
    let mut comparisons = Vec::new();
    for slat in measured.cells.iter().filter(|cell| cell.subject == Subject::Slat) {
        let job = slat.job;
        let what = match job.operation {
            Operation::Fault => "Page fault on a fresh page",
            Operation::Map4k => "Map a page of 4 KiB",
            _ => continue,
        };
        let side = |subject: Subject, samples: &_| Side {
            name: subject.name().to_owned(),
            role: if subject == Subject::Slat { Role::Slat } else { Role::Peer },
            measured_on: MEASURED_ON.to_owned(),
            samples: Clone::clone(samples),
            ratio: None,
            claim: None,
            unclaimed: None,
            predicted: None,
        };
        let mut of_job = Evaluation {
            name: format!("{}_{}_threads", job.operation.name(), job.nr_threads),
            title: format!("{what}, {}, a page", threads_name(job.nr_threads)),
            unit: Unit::Seconds,
            better: Better::Less,
            published: None,
            sides: vec![side(Subject::Slat, &slat.times)],
        };
        // Threads that share a CPU do not contend for the mutex.
        let is_parallel = (2..=nr_cpus).contains(&job.nr_threads);
        for peer in measured.cells.iter().filter(|cell| cell.subject.is_peer()) {
            if (peer.job.operation, peer.job.nr_threads) != (job.operation, job.nr_threads) {
                continue;
            }
            let ratio = of_job.times_as_good(&slat.times, &peer.times);
            let claim = (is_parallel && ratio.is_some() && is_claimed(peer.subject))
                .then(|| of_job.claim(ABOVE, &slat.times, &peer.times));
            of_job.sides.push(Side { ratio, claim, ..side(peer.subject, &peer.times) });
        }
        comparisons.push(of_job);
    }
    if comparisons.is_empty() {
        return None;
    }
    let system = System {
        system: "peers".to_owned(),
        title: "slat and published crates that keep page tables".to_owned(),
        published_note: "the crates, in the versions above.".to_owned(),
        comparisons,
        not_run: results.not_run.clone(),
        experiments: vec![results.clone()],
    };
    let claims = claims::claims([&system]);
    Some(Compared { systems: vec![system], claims })
}

/// The comparisons and the claims, for people.
pub(crate) fn text(compared: &Compared) -> String {
    let systems: String = compared.systems.iter().map(claims::system).collect();
    format!("\n{systems}{}", claims::closing(&compared.claims, &[]))
}
