//! `slat-pager pack`: makes chunks of a snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;

use super::{CommandError, TlsArgs, bytes_text, open, print_line, progress_bar};
use crate::chunks::Location;
use crate::chunks::pack::{PackOptions, pack};
use crate::snapshot::SnapshotName;
use crate::source::SourceError;

/// Pack a snapshot: cut it into chunks, and store each different one once, compressed.
#[derive(Args, Clone, Debug)]
pub struct PackArgs {
    /// The snapshot: a memory file, layers:BASE,DIFF..., or another name of one
    snapshot: SnapshotName,
    /// Where to: PATH/NAME.index or URL/NAME.index. Chunks are shared with others there
    to: String,
    /// Bytes of a chunk in KiB: 64, 128, ... 2048
    #[arg(long, value_name = "KIB", default_value_t = PackOptions::default().chunk_bytes >> 10)]
    chunk: u64,
    /// The level of Zstandard: -7 (quickest) to 19
    #[arg(long, default_value_t = PackOptions::default().level, value_parser = clap::value_parser!(i32).range(-7..=19), allow_negative_numbers = true)]
    level: i32,
    /// How many chunks are worked on at once; this bounds memory
    #[arg(long, value_name = "N", default_value_t = PackOptions::default().nr_parallel, value_parser = parse_parallel)]
    parallel: usize,
    #[command(flatten)]
    tls: TlsArgs,
}

fn parse_parallel(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=1024) => Ok(number),
        _ => Err("a number from 1 to 1024 is needed".to_string()),
    }
}

/// Packs, and prints what that took.
///
/// # Errors
/// The snapshot cannot be read, or the store cannot be written; it was stopped (Ctrl-C); nothing can
/// be printed.
pub async fn run(args: &PackArgs) -> Result<(), CommandError> {
    let source = open(&args.snapshot, &args.tls).await?;
    // `chunks:` is accepted, too: that is how the snapshot is called afterwards.
    let to =
        Location::create(args.to.strip_prefix("chunks:").unwrap_or(&args.to), &[]).map_err(|error| match error {
            SourceError::Malformed { snapshot, why } => {
                CommandError::Usage(format!("nothing is packed to {snapshot}: {why}"))
            }
            error => error.into(),
        })?;
    let stop = Arc::new(AtomicBool::new(false));
    let options = PackOptions {
        chunk_bytes: args.chunk.saturating_mul(1024),
        level: args.level,
        nr_parallel: args.parallel,
        stop: Arc::clone(&stop),
    };
    let bar = progress_bar(source.size_bytes(), "packing");
    let stopping = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            // Relaxed: a flag that orders nothing.
            stop.store(true, Ordering::Relaxed);
        }
    });
    let packed = pack(&source, &to, &options, |nr_bytes| bar.inc(nr_bytes)).await;
    stopping.abort();
    bar.finish_and_clear();
    let packed = packed?;
    print_line(format_args!(
        "{} of {}: {} chunks, {} of zeros, {} stored now in {}",
        bytes_text(packed.size_bytes),
        args.snapshot,
        packed.nr_chunks,
        packed.nr_zero_chunks,
        packed.nr_new_chunks,
        bytes_text(packed.new_bytes),
    ))?;
    print_line(format_args!("identity {}", packed.identity))?;
    Ok(())
}
