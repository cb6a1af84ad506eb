//! `slat dirty-log`: the phases of a dirty-logging migration (`phases`), for each locking.

use serde_json::json;
use slat::Locking;

use crate::args::{DirtyLogArgs, PagingArg, locking_name};
use crate::failure::Failure;
use crate::phases::report::{Base, OTHERS, Report, SHADOW_OTHERS};
use crate::phases::{self, Column, Roles};
use crate::results::{self, ResultsFile};

/// Runs the experiment and prints it.
pub(crate) fn run(args: &DirtyLogArgs) -> Result<(), Failure> {
    let config = phases::machine_config(args)?;
    let file = args.json.as_deref().map(ResultsFile::open).transpose()?;
    let lockings = args.lock.lockings();
    let column = |locking| {
        let mut column = Column::new("lock", locking_name(locking), format!("lock {}", locking_name(locking)));
        column.labels.insert("paging", args.paging.name().into());
        column
    };
    let mut columns: Vec<Column> = lockings.iter().copied().map(column).collect();
    phases::measure(&mut columns, args.runs, |_, which| {
        let mut config = config.clone();
        config.engine.locking = lockings[which];
        phases::run_once(args, &config, Roles::default())
    })?;
    let is_shadow = args.paging == PagingArg::Shadow;
    let base = lockings.iter().position(|&locking| locking == Locking::Exclusive);
    let report = Report {
        args,
        columns: &columns,
        base: base.map(|column| Base { column, name: "exclusive" }),
        others: OTHERS.iter().chain(SHADOW_OTHERS.iter().filter(|_| is_shadow)).collect(),
    };
    let config = json!({ "pin": args.cpus });
    results::deliver(
        file,
        || report.results("dirty-log", config),
        |out| {
            report.print_head(out)?;
            report.print_tables(out)?;
            report.print_notes(out)
        },
    )
}
