//! The demonstration: the main use, in about 20 seconds, on any Linux machine. It ends on one
//! screen.

use clap::Args;

use crate::failure::Failure;
use crate::options::{self, VERBOSE};
use crate::parallel_faults;
use crate::quantity::quantity;
use crate::results::{Figure, Outcome, Results};
use crate::session::Session;
use crate::table;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat demo --verbose")]
pub(crate) struct DemoArgs {
    /// Print more
    ///
    /// The experiments' own tables, with the spread of their runs.
    #[arg(long, help = VERBOSE)]
    verbose: bool,
}

/// The commands, as the reader can type them: one is timed, one compares the log with memory.
const TIMED: &str = "slat parallel-faults -v 4 -b 256M --iterations 5 --runs 5";
const CHECKED: &str = "slat parallel-faults -v 4 -b 96M --iterations 5 --runs 5 -o --check";

/// The rows of the table: the names of figures, and their titles.
const ROWS: [(&str, &str); 5] = [
    ("populate_memory", "Fill memory"),
    ("dirty_memory_total", "Write it 5 times"),
    ("get_dirty_log", "Get the dirty log, once"),
    ("guest_stall_p99", "Stall in a fault, 99%"),
    ("lock_wait_time", "Waits for a lock, sum"),
];

/// The columns: the values of the label `lock`, and their titles.
const COLUMNS: [(&str, &str); 3] = [("exclusive", "one lock"), ("shared", "reader/writer lock"), ("none", "no lock")];

pub(crate) fn run(args: &DemoArgs, session: &Session) -> Result<Outcome, Failure> {
    let run = |command: &str| -> Result<Results, Failure> {
        let outcome = parallel_faults::run(&options::parse(command)?, session)?;
        if args.verbose {
            session.say(&format!("$ {command}\n{}\n", outcome.text))?;
        }
        outcome.results.ok_or_else(|| Failure::Check("the demonstration has no figures".to_owned()))
    };
    let timed = run(TIMED)?;
    let checked = run(CHECKED)?;
    Ok(Outcome { text: screen(&timed, &checked), results: None, shortfall: None })
}

fn median(results: &Results, name: &str, lock: &str) -> Option<String> {
    let is_it = |figure: &&Figure| figure.name == name && figure.labels.get("lock").is_some_and(|value| value == lock);
    let figure = results.results.iter().find(is_it)?;
    Some(quantity(figure.samples.median(), figure.unit))
}

/// What the user sees at the end.
fn screen(timed: &Results, checked: &Results) -> String {
    let mut figures = table::figures(
        std::iter::once("median of 5 runs".to_owned()).chain(COLUMNS.map(|(_, title)| title.to_owned())),
    );
    for (name, title) in ROWS {
        let cells = COLUMNS.map(|(lock, _)| median(timed, name, lock).unwrap_or_else(|| "none".to_owned()));
        figures.add_row(std::iter::once(title.to_owned()).chain(cells));
    }
    let verified: f64 = [timed, checked]
        .iter()
        .flat_map(|results| &results.results)
        .filter(|figure| figure.name == "verified")
        .flat_map(|figure| figure.samples.iter())
        .sum();
    let few_cpus = match timed.host.cpus {
        cpus @ ..16 => format!("On {cpus} CPUs whole phases take about as long with a lock; on 16 they do not.\n"),
        _ => String::new(),
    };
    format!(
        "slat keeps the second-stage page tables of a virtual machine. Here four vCPUs\n\
         filled 256 MiB each, and wrote it 5 times while dirty logging was on: with one\n\
         lock around the page tables, with a reader/writer lock, and with none.\n\n\
         {figures}\n\n\
         Threads, memory and page tables are real; the CPU's address translation is a\n\
         program. {verified:.0} reads found what was written. In a second run every harvest\n\
         of the dirty log was compared with memory: no page was lost.\n\
         Without a lock no vCPU waits for another, not even for one that was preempted.\n\
         {few_cpus}\n\
         Next:\n  \
         slat demo --verbose      all figures of these runs\n  \
         slat compare --quick     five published systems, in a minute\n  \
         slat -h                  all commands\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Unit;
    use crate::results::{Host, labels};

    #[test]
    fn the_demonstration_ends_on_one_screen() {
        let names = ROWS.iter().map(|(name, _)| *name).chain(["verified"]);
        let figure = |name: &'static str| {
            COLUMNS.map(|(lock, _)| {
                let unit = if name == "verified" { Unit::Count } else { Unit::Seconds };
                Figure::new(name, unit, &labels([("lock", lock.into())]), [1.23e-3, 4e6, 4e6])
            })
        };
        let figures: Vec<Figure> = names.flat_map(figure).collect();
        let host = Host { cpus: 2, ..Host::default() };
        let results = Results::new("x", serde_json::Value::Null, host, figures);
        let text = screen(&results, &results);
        // Two lines are for a warning that the machine was busy.
        assert!(text.lines().count() <= 22, "{}:\n{text}", text.lines().count());
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("4\u{202f}000\u{202f}000 s").count(), 15, "{text}");
    }
}
