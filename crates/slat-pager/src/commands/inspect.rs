//! `slat-pager inspect`: what a snapshot is.

use clap::Args;

use super::{CommandError, TlsArgs, bytes_text, open, print_line};
use crate::chunks::Location;
use crate::chunks::verify::measure;
use crate::snapshot::SnapshotName;
use crate::source::PAGE_BYTES;
use crate::source::layers::Layer;
use crate::source::memory_file::MemoryFile;

/// Print what a snapshot is, and what it takes.
#[derive(Args, Clone, Debug)]
pub struct InspectArgs {
    /// The snapshot
    snapshot: SnapshotName,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Prints it.
///
/// # Errors
/// It cannot be opened, or nothing can be printed.
pub async fn run(args: &InspectArgs) -> Result<(), CommandError> {
    let source = open(&args.snapshot, &args.tls).await?;
    print_line(format_args!("snapshot  {}", args.snapshot))?;
    print_line(format_args!("identity  {}", source.identity()))?;
    print_line(format_args!(
        "size      {} ({} pages)",
        bytes_text(source.size_bytes()),
        source.size_bytes() / PAGE_BYTES
    ))?;
    print_line(format_args!("granule   {}", bytes_text(source.granule_bytes())))?;
    match &args.snapshot {
        SnapshotName::File(path) => print_data("data", MemoryFile::open(path)?.data().len())?,
        SnapshotName::Layers(base, layers) => {
            print_data("base", MemoryFile::open(base)?.data().len())?;
            for (number, path) in layers.iter().enumerate() {
                print_data(&format!("layer {}", number + 1), Layer::open(path)?.pages().len())?;
            }
        }
        SnapshotName::Chunks(index) => {
            let at = Location::open(index, &[])?;
            let index = at.read_index().await?;
            let stored = measure(&at, &index).await?;
            print_line(format_args!("chunks    {} of {}", index.chunks().len(), bytes_text(index.chunk_bytes())))?;
            print_line(format_args!("  zeros       {}", stored.nr_zero_chunks))?;
            print_line(format_args!(
                "  different   {} ({})",
                stored.nr_different_chunks,
                bytes_text(stored.different_bytes)
            ))?;
            print_line(format_args!("  repeated    {}", stored.nr_repeated_chunks))?;
            let hundredths = stored.stored_bytes * 100 / index.size_bytes();
            print_line(format_args!("stored    {} ({hundredths}% of the size)", bytes_text(stored.stored_bytes)))?;
            if stored.nr_missing_chunks > 0 {
                print_line(format_args!("MISSING   {} chunks", stored.nr_missing_chunks))?;
            }
        }
        SnapshotName::Object(_) | SnapshotName::Peer { .. } => {}
    }
    Ok(())
}

fn print_data(what: &str, nr_pages: u64) -> Result<(), CommandError> {
    print_line(format_args!("{what:<9} {} ({nr_pages} pages)", bytes_text(nr_pages * PAGE_BYTES)))
}
