//! `slat-pager verify`: whether a snapshot is whole.

use std::process::ExitCode;

use clap::Args;

use super::{CommandError, TlsArgs, open, print_line, progress_bar};
use crate::chunks::Location;
use crate::chunks::verify::{compare, verify};
use crate::snapshot::SnapshotName;
use crate::source::PAGE_BYTES;

/// How many bad chunks are printed.
const MOST_LINES: usize = 20;

/// Read all of a snapshot and check it: chunks against their hashes, any snapshot against another.
#[derive(Args, Clone, Debug)]
pub struct VerifyArgs {
    /// The snapshot
    snapshot: SnapshotName,
    /// Another snapshot, which must have the same bytes
    #[arg(long, value_name = "SNAPSHOT")]
    against: Option<SnapshotName>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Checks it, and prints what is wrong. The exit code says whether something is.
///
/// # Errors
/// It cannot be opened or read, or nothing can be printed.
pub async fn run(args: &VerifyArgs) -> Result<ExitCode, CommandError> {
    if let Some(other) = &args.against {
        let (one, other_source) = (open(&args.snapshot, &args.tls).await?, open(other, &args.tls).await?);
        let bar = progress_bar(one.size_bytes(), "comparing");
        let differs = compare(&one, &other_source, |nr_bytes| bar.inc(nr_bytes)).await;
        bar.finish_and_clear();
        return Ok(match differs? {
            None => {
                print_line(format_args!("{} and {other} have the same bytes", args.snapshot))?;
                ExitCode::SUCCESS
            }
            Some(at) => {
                print_line(format_args!(
                    "{} and {other} differ at byte {at} (page {})",
                    args.snapshot,
                    at / PAGE_BYTES
                ))?;
                ExitCode::FAILURE
            }
        });
    }
    let SnapshotName::Chunks(index) = &args.snapshot else {
        return Err(CommandError::Usage(format!(
            "{} has no checksums, only chunks have: compare it with another snapshot (--against)",
            args.snapshot
        )));
    };
    let at = Location::open(index, &[])?;
    let index = at.read_index().await?;
    let bar = progress_bar(index.size_bytes(), "verifying");
    let bad = verify(&at, &index, |nr_bytes| bar.inc(nr_bytes)).await;
    bar.finish_and_clear();
    let bad = bad?;
    for (chunk, error) in bad.iter().take(MOST_LINES) {
        let range = index.range_of(*chunk);
        print_line(format_args!("bytes {}..{}: {error}", range.start, range.end))?;
    }
    if bad.is_empty() {
        print_line(format_args!("{}: all {} chunks are right", args.snapshot, index.chunks().len()))?;
        return Ok(ExitCode::SUCCESS);
    }
    print_line(format_args!("{}: {} different chunks are wrong or missing", args.snapshot, bad.len()))?;
    Ok(ExitCode::FAILURE)
}
