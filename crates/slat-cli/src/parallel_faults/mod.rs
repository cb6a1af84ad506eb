//! `slat parallel-faults`: the phases of a dirty-logging migration (`phases`), for each locking,
//! and by the KVM of this machine.

mod kvm;
mod published;

use clap::Args;
use serde_json::json;
use slat::baselines::Locking;

use crate::failure::Failure;
use crate::options::{Named, OutputArgs, PEER, PagingArg, PeerArg, ValueName};
use crate::phases::PhasesArgs;
use crate::phases::figures::{Base, OTHERS, Report, SHADOW_OTHERS};
use crate::phases::{self, Column, Kind, Roles};
use crate::results::Outcome;
use crate::session::Session;
use kvm::Peer;
pub(crate) use published::PHASES;

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat parallel-faults -v 8 -b 64M -o --lock none --check",
    mut_arg("lock", |arg| arg.default_value("all"))
)]
pub(crate) struct ParallelFaultsArgs {
    #[command(flatten)]
    phases: PhasesArgs,
    #[arg(long, value_name = "PEER", value_enum, default_value_t = PeerArg::None, help = PEER)]
    peer: PeerArg,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(
    ParallelFaultsArgs { phases: args, peer: wanted, .. }: &ParallelFaultsArgs,
    session: &Session,
) -> Result<Outcome, Failure> {
    let config = phases::machine_config(args)?;
    let peer = Peer::new(args, *wanted)?;
    let lockings = &args.tables.lock.values;
    let kind = |&locking: &Locking| {
        let mut config = config.clone();
        config.engine.locking = locking;
        let mut kind = Kind::new("lock", locking.name(), format!("lock {}", locking.name()), Some(config));
        kind.labels.insert("paging".to_owned(), args.paging.name().into());
        kind
    };
    let kinds = lockings.iter().map(kind).chain(peer.kind()).collect();
    let run = |kind: &Kind, _| match &kind.machine {
        Some(config) => phases::run_once(args, config, Roles::default(), session),
        None => peer.run(),
    };
    let is_shadow = args.paging == PagingArg::Shadow;
    let base = lockings.iter().position(|&locking| locking == Locking::Exclusive);
    let outcome = |columns: &[Column]| {
        let report = Report {
            args,
            columns,
            base: base.map(|column| Base { column, name: "exclusive" }),
            others: OTHERS.iter().chain(SHADOW_OTHERS.iter().filter(|_| is_shadow)).collect(),
        };
        let mut results = report.results("parallel-faults", json!({ "cpus": args.cpus, "peer": wanted.name() }));
        peer.complete(&mut results);
        Outcome::new(results, |out| {
            report.print_head(out);
            report.print_tables(out);
            report.print_notes(out);
            peer.notes(columns.get(lockings.len())).iter().for_each(|line| add_line!(out, "{line}"));
            published::print(out, args.guest.overlap, is_shadow)
        })
    };
    phases::measure(session, kinds, args.runs, run, outcome)
}
