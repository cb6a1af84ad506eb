//! The runs of the model: their trace hashes, and what cost most in them.

use serde_json::{Value, json};
use slat_model::machine::{Hot, Report};
use slat_model::topology::Topology;

use crate::quantity::{Unit, digits, quantity};
use crate::results::Labels;
use crate::table::{self, Table};

/// A run of the model.
#[derive(Clone, Debug)]
pub(super) struct Traced {
    /// For people.
    pub(super) title: String,
    /// What distinguishes it from the other runs of its system.
    pub(super) labels: Labels,
    /// The name of its topology.
    pub(super) topology: String,
    pub(super) report: Report,
}

/// The time of a wait in seconds, on average.
pub(super) fn wait_s(hot: &Hot) -> f64 {
    total_s(hot) / hot.nr_fetches as f64
}

fn total_s(hot: &Hot) -> f64 {
    hot.wait_ns as f64 / 1e9
}

/// A table of what cost most, the most first.
pub(super) fn hot_table(title: &str, hot: &[Hot]) -> Table {
    let mut figures = table::figures([title, "fetches", "wait for each", "wait in all"].map(str::to_owned));
    for hot in hot {
        let waits = [wait_s(hot), total_s(hot)].map(|seconds| quantity(seconds, Unit::Seconds));
        let fetches = quantity(hot.nr_fetches as f64, Unit::Count);
        figures.add_row([hot.place.clone(), fetches].into_iter().chain(waits));
    }
    figures
}

/// The title of a table of cache lines.
pub(super) const HOT_LINES: &str = "cache line, last waited for at";

impl Traced {
    pub(super) fn new(title: String, labels: Labels, topology: &Topology, report: &Report) -> Traced {
        Traced { title, labels, topology: topology.name().to_owned(), report: report.clone() }
    }

    pub(super) fn print(&self, out: &mut String) {
        let Report { trace_hash, nr_accesses, end_ns, hot_lines, hot_places } = &self.report;
        add_line!(
            out,
            "\n{}, on {}: trace hash {trace_hash:#018x}, {} accesses, {} of virtual time\n\n{}\n\n{}",
            self.title,
            self.topology,
            digits(*nr_accesses as f64, true),
            quantity(*end_ns as f64 / 1e9, Unit::Seconds),
            hot_table(HOT_LINES, hot_lines),
            hot_table("place in the source", hot_places)
        );
    }

    /// The run in the settings of the experiment, with what cost most if `is_full`.
    pub(super) fn json(&self, system: &str, is_full: bool) -> Value {
        let mut run = json!({
            "system": system,
            "topology": self.topology,
            "trace_hash": format!("{:#018x}", self.report.trace_hash),
            "accesses": self.report.nr_accesses,
        });
        if let Value::Object(run) = &mut run {
            run.extend(self.labels.clone());
            if is_full {
                run.insert("hot_lines".to_owned(), self.report.hot_lines.iter().map(hot_json).collect());
                run.insert("hot_places".to_owned(), self.report.hot_places.iter().map(hot_json).collect());
            }
        }
        run
    }
}

fn hot_json(hot: &Hot) -> Value {
    json!({ "place": hot.place, "fetches": hot.nr_fetches, "wait_s": total_s(hot) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::labels;

    #[test]
    fn a_trace_has_its_hash_and_what_cost_most() {
        let hot = Hot { place: "vm/mod.rs:7".to_owned(), nr_fetches: 4, wait_ns: 480 };
        let report = Report {
            trace_hash: 0xab,
            nr_accesses: 12_345,
            end_ns: 2_000_000,
            hot_places: vec![],
            hot_lines: vec![hot],
        };
        let run = Traced {
            title: "lock none".to_owned(),
            labels: labels([("cpus", 4.into())]),
            topology: "16 CPUs, 1 node".to_owned(),
            report,
        };
        let mut text = String::new();
        run.print(&mut text);
        for what in
            ["lock none, on 16 CPUs, 1 node", "0x00000000000000ab", "2.00 ms", "vm/mod.rs:7", "120 ns", "480 ns"]
        {
            assert!(text.contains(what), "{what}: {text}");
        }
        let short = run.json("parallel-faults", false);
        assert_eq!((&short["trace_hash"], &short["cpus"]), (&json!("0x00000000000000ab"), &json!(4)));
        assert!(short.get("hot_lines").is_none());
        assert_eq!(run.json("parallel-faults", true)["hot_lines"][0]["place"], "vm/mod.rs:7");
    }
}
