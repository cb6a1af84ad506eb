//! `slat dirty-log`: the phases of a dirty-logging migration (`phases`), for each locking.

use serde_json::json;
use slat::Locking;

use crate::args::{DirtyLogArgs, PagingArg, locking_name};
use crate::failure::Failure;
use crate::phases::report::{Base, OTHERS, Report, SHADOW_OTHERS};
use crate::phases::{self, Column, Roles};
use crate::results::Outcome;
use crate::session::Session;

/// Runs the experiment.
pub(crate) fn run(args: &DirtyLogArgs, session: &Session) -> Result<Outcome, Failure> {
    let config = phases::machine_config(args)?;
    let lockings = args.lock.lockings();
    let column = |locking| {
        let mut column = Column::new("lock", locking_name(locking), format!("lock {}", locking_name(locking)));
        column.labels.insert("paging", args.paging.name().into());
        column
    };
    let columns: Vec<Column> = lockings.iter().copied().map(column).collect();
    let is_shadow = args.paging == PagingArg::Shadow;
    let base = lockings.iter().position(|&locking| locking == Locking::Exclusive);
    let outcome = |columns: &[Column]| {
        let report = Report {
            args,
            columns,
            base: base.map(|column| Base { column, name: "exclusive" }),
            others: OTHERS.iter().chain(SHADOW_OTHERS.iter().filter(|_| is_shadow)).collect(),
        };
        Outcome::new(&report.results("dirty-log", json!({ "pin": args.cpus })), |out| {
            report.print_head(out)?;
            report.print_tables(out)?;
            report.print_notes(out)
        })
    };
    phases::measure(session, columns, args.runs, outcome, |_, which| {
        let mut config = config.clone();
        config.engine.locking = lockings[which];
        phases::run_once(args, &config, Roles::default())
    })
}
