//! `slat dirty-log`: the phases of a dirty-logging migration (`phases`), for each locking, and by
//! the KVM of this machine.

mod kvm;

use std::io::Write;

use serde_json::json;
use slat::baselines::Locking;

use crate::args::{DirtyLogArgs, PagingArg, locking_name};
use crate::failure::Failure;
use crate::phases::report::{Base, OTHERS, Report, SHADOW_OTHERS};
use crate::phases::{self, Column, Roles};
use crate::results::Outcome;
use crate::session::Session;
use kvm::Peer;

/// Runs the experiment.
pub(crate) fn run(args: &DirtyLogArgs, session: &Session) -> Result<Outcome, Failure> {
    let config = phases::machine_config(args)?;
    let peer = Peer::new(args)?;
    let lockings = args.lock.lockings();
    let column = |locking| {
        let mut column = Column::new("lock", locking_name(locking), format!("lock {}", locking_name(locking)));
        column.labels.insert("paging", args.paging.name().into());
        column
    };
    let columns: Vec<Column> = lockings.iter().copied().map(column).chain(peer.column()).collect();
    let is_shadow = args.paging == PagingArg::Shadow;
    let base = lockings.iter().position(|&locking| locking == Locking::Exclusive);
    let outcome = |columns: &[Column]| {
        let report = Report {
            args,
            columns,
            base: base.map(|column| Base { column, name: "exclusive" }),
            others: OTHERS.iter().chain(SHADOW_OTHERS.iter().filter(|_| is_shadow)).collect(),
        };
        let mut results = report.results("dirty-log", json!({ "pin": args.cpus, "peer": args.peer.name() }));
        peer.complete(&mut results);
        Outcome::new(&results, |out| {
            report.print_head(out)?;
            report.print_tables(out)?;
            report.print_notes(out)?;
            peer.notes(columns.get(lockings.len())).iter().try_for_each(|line| writeln!(out, "{line}"))
        })
    };
    phases::measure(session, columns, args.runs, outcome, |_, which| {
        let Some(&locking) = lockings.get(which) else {
            return peer.run();
        };
        let mut config = config.clone();
        config.engine.locking = locking;
        phases::run_once(args, &config, Roles::default(), session)
    })
}
