//! The commands of `slat-pager` that work on snapshots; each is a function with its arguments.

pub mod cloud_hypervisor;
pub mod inspect;
pub mod pack;
pub mod share;
pub mod verify;

use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use thiserror::Error;

use crate::config::{CacheConfig, parse_size};
use crate::snapshot::{OpenWith, SnapshotName};
use crate::source::peer::TlsFiles;
use crate::source::{Source, SourceError};

/// Why a command was not carried out.
#[derive(Debug, Error)]
pub enum CommandError {
    /// What was asked for cannot be done, whatever the snapshot is.
    #[error("{0}")]
    Usage(String),
    /// The snapshot, or what is served or stored.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The standard output cannot be written.
    #[error("cannot write to the standard output: {0}")]
    Output(io::Error),
}

/// Prints a line. Nothing is wrong if nobody reads it any more (`| head -1`).
fn print_line(line: fmt::Arguments<'_>) -> Result<(), CommandError> {
    match writeln!(io::stdout(), "{line}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CommandError::Output(error)),
        _ => Ok(()),
    }
}

/// Certificates for peers, as PEM files.
#[derive(Args, Clone, Debug, Default)]
pub struct TlsArgs {
    /// The certificate that proves this side to peers
    #[arg(long, value_name = "FILE", requires_all = ["key", "authorities"])]
    certificates: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires = "certificates")]
    key: Option<PathBuf>,
    /// The authorities whose certificates peers must have
    #[arg(long, value_name = "FILE", requires = "certificates")]
    authorities: Option<PathBuf>,
}

impl TlsArgs {
    /// The files, if they are given.
    pub fn files(&self) -> Option<TlsFiles> {
        Some(TlsFiles {
            certificates: self.certificates.clone()?,
            key: self.key.clone()?,
            authorities: self.authorities.clone()?,
        })
    }
}

/// A cache of what is fetched from anywhere but a file.
#[derive(Args, Clone, Debug)]
pub struct CacheArgs {
    /// Keep what was fetched in FOLDER, too.
    #[arg(long, value_name = "FOLDER")]
    cache_folder: Option<PathBuf>,
    /// So many bytes there.
    #[arg(long, default_value = "16GiB", value_parser = parse_size)]
    cache_size: u64,
    /// Keep so many bytes of what was fetched in memory.
    #[arg(long, default_value = "256MiB", value_parser = parse_size)]
    cache_memory: u64,
}

impl Default for CacheArgs {
    fn default() -> CacheArgs {
        let CacheConfig { memory, folder, size } = CacheConfig::default();
        CacheArgs { cache_folder: folder, cache_size: size, cache_memory: memory }
    }
}

impl CacheArgs {
    /// As a file would say it.
    pub fn config(&self) -> CacheConfig {
        CacheConfig { memory: self.cache_memory, folder: self.cache_folder.clone(), size: self.cache_size }
    }
}

/// Opens a snapshot that is read once, from its beginning to its end: no cache helps that.
async fn open(name: &SnapshotName, tls: &TlsArgs) -> Result<Arc<dyn Source>, SourceError> {
    name.open(&OpenWith { tls: tls.files(), ..OpenWith::default() }).await
}

/// A bar for bytes, if a person watches.
fn progress_bar(size_bytes: u64, what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .expect("the template is a constant");
    ProgressBar::new(size_bytes).with_style(style).with_message(what)
}

/// Bytes for a person.
fn bytes_text(nr_bytes: u64) -> String {
    indicatif::BinaryBytes(nr_bytes).to_string()
}
