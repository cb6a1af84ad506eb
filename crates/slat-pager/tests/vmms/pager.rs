//! The pager, as the command that a user has.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{Program, until};
use crate::{Outcome, http, machine};

/// `slat-pager serve` for Firecracker.
pub struct Pager {
    program: Program,
    metrics: PathBuf,
}

impl Pager {
    /// Serves `memory` at `socket`, with the words `more`, and waits until it does.
    pub fn serve(socket: &Path, memory: &Path, more: &[&str]) -> Outcome<Pager> {
        let metrics = socket.with_extension("metrics");
        // What one that was killed has left.
        let _ = fs::remove_file(&metrics);
        let mut command = command("serve");
        command.arg("--socket").arg(socket).arg("--memory").arg(memory);
        command.arg("--metrics").arg(format!("unix:{}", metrics.display())).args(more);
        let program = Program::start("pager", &mut command)?;
        let pager = Pager { program, metrics };
        until("the metrics", || Ok(pager.metric("vms").ok()))?;
        Ok(pager)
    }

    /// A metric, without the beginning that all have.
    pub fn metric(&self, name: &str) -> Outcome<u64> {
        let text = http::call(&self.metrics, "GET", "/metrics", "")?;
        let name = format!("slat_pager_{name}");
        let line = text.lines().find(|line| line.strip_prefix(&name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.map(|value| value as u64).ok_or_else(|| format!("there is no metric {name}"))
    }

    /// Waits until a metric is at least `least`.
    pub fn at_least(&self, name: &str, least: u64) -> Outcome<u64> {
        until(&format!("{name} of {least}"), || Ok(Some(self.metric(name)?).filter(|value| *value >= least)))
    }

    /// Kills it, so that it can do nothing more.
    pub fn kill(self) -> Outcome<()> {
        self.program.kill()
    }
}

/// `slat-pager WHAT`.
pub fn command(what: &str) -> Command {
    let mut command = Command::new(machine::PAGER);
    command.arg(what).env("NO_COLOR", "1");
    command
}
