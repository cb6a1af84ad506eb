//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::BenchOptions;
use crate::commands::CacheArgs;
use crate::commands::cloud_hypervisor::{Restore, Store};
use crate::commands::inspect::InspectArgs;
use crate::commands::pack::PackArgs;
use crate::commands::share::ShareArgs;
use crate::commands::verify::VerifyArgs;
use crate::config::{
    Config, ConfigError, Experimental, MetricsAddress, SandboxMode, SocketConfig, StoreOptions, defaults, parse_size,
};
use crate::snapshot::SnapshotName;
use crate::vm::OnFailure;

/// Serves the memory of virtual machines from their snapshots, page by page.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`, also for modules
    /// (`info,slat_pager::vm=debug`).
    #[arg(long, global = true, default_value = "info", value_name = "FILTER")]
    pub log: tracing_subscriber::filter::Targets,
    /// How it is logged.
    #[arg(long, global = true, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// How lines of the log are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "each is said where its arguments are")]
pub enum Command {
    Serve(Serve),
    Store(Store),
    Restore(Restore),
    Pack(PackArgs),
    Inspect(InspectArgs),
    Verify(VerifyArgs),
    Share(ShareArgs),
    Bench(BenchOptions),
}

/// Serve VMMs that connect to a socket (Firecracker).
///
/// A VM outlives its pager: one that is started again takes over the VMs of one that died.
#[derive(Debug, Args)]
pub struct Serve {
    /// Where VMMs connect (`backend_path`).
    #[arg(long, requires = "memory")]
    pub socket: Option<PathBuf>,
    /// The snapshot: a file of memory, or file:..., layers:..., chunks:..., s3://..., peer:...
    #[arg(long, requires = "socket")]
    pub memory: Option<SnapshotName>,
    /// A file that says it all, for several sockets.
    #[arg(long, conflicts_with_all = ["socket", "memory", "cache_folder", "cache_size", "cache_memory"])]
    pub config: Option<PathBuf>,
    /// Wait for the end of the pager that serves now, and take over.
    #[arg(long)]
    pub standby: bool,
    /// Where VMs are noted for a successor; best a tmpfs. [default: $RUNTIME_DIRECTORY, or
    /// SOCKET.state]
    #[arg(long, value_name = "FOLDER", conflicts_with = "config")]
    pub runtime_folder: Option<PathBuf>,
    /// Serve metrics at 127.0.0.1:PORT or unix:PATH.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "config")]
    pub metrics: Option<MetricsAddress>,
    /// Threads for each VM that read faults.
    #[arg(long, default_value = "1", conflicts_with = "config")]
    pub threads: NonZeroUsize,
    /// What is filled around a fault.
    #[arg(long, default_value = "64KiB", value_parser = parse_size, conflicts_with = "config")]
    pub granule: u64,
    /// What becomes of a thread whose page cannot be had.
    #[arg(long, value_enum, default_value = "poison", conflicts_with = "config")]
    pub on_failure: Policy,
    /// How long errors that may pass are put up with.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration, conflicts_with = "config")]
    pub patience: Duration,
    /// VMs at once.
    #[arg(long, default_value = "4096", conflicts_with = "config")]
    pub max_vms: usize,
    /// Memory for reads that are under way, of all VMs.
    #[arg(long, default_value = "256MiB", value_parser = parse_size, conflicts_with = "config")]
    pub read_memory: u64,
    /// The working set: recorded to FILE if there is none, replayed if there is.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub working_set: Option<PathBuf>,
    /// VMMs speak a protocol that may change, in place of Firecracker's.
    #[arg(long, value_enum, value_name = "PROTOCOL", conflicts_with = "config")]
    pub experimental: Option<Experimental>,
    /// What was fetched is kept.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Whether rights are given up after the start (landlock, seccomp, capabilities).
    #[arg(long, value_enum, default_value = "best-effort", conflicts_with = "config")]
    pub sandbox: SandboxMode,
}

/// [`OnFailure`], for the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Policy {
    /// Its access fails like one to broken memory.
    Poison,
    /// It waits.
    Pause,
}

impl Serve {
    /// What is served.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn config(&self) -> Result<Config, ConfigError> {
        let (Some(socket), Some(memory)) = (&self.socket, &self.memory) else {
            let Some(file) = &self.config else {
                return Err(ConfigError::Wrong("`serve` needs --socket and --memory, or --config".to_string()));
            };
            return Config::read(file);
        };
        let socket = SocketConfig {
            path: socket.clone(),
            memory: memory.clone(),
            threads: self.threads,
            granule: self.granule,
            on_failure: match self.on_failure {
                Policy::Poison => OnFailure::Poison,
                Policy::Pause => OnFailure::Pause,
            },
            patience: self.patience,
            read_timeout: defaults::read_timeout(),
            vm_read_memory: defaults::vm_read_memory(),
            handshake_timeout: defaults::handshake_timeout(),
            working_set: self.working_set.clone(),
            experimental: self.experimental,
        };
        let config = Config {
            sockets: vec![socket],
            runtime_folder: self.runtime_folder.clone(),
            metrics: self.metrics.clone(),
            max_vms: self.max_vms,
            read_memory: self.read_memory,
            sandbox: self.sandbox,
            cache: self.cache.config(),
            store: StoreOptions::default(),
            tls: None,
        };
        config.check()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_and_the_file_have_the_same_defaults() {
        let line = ["slat-pager", "serve", "--socket", "/a", "--memory", "x"];
        let Command::Serve(serve) = Arguments::try_parse_from(line).unwrap().command else { panic!("no `serve`") };
        let file: Config = toml::from_str("[[socket]]\npath = '/a'\nmemory = 'x'\n").unwrap();
        assert_eq!(format!("{:?}", serve.config().unwrap()), format!("{file:?}"));
    }
}
