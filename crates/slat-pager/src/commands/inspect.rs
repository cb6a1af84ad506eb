//! `slat-pager inspect`: what a snapshot is.

use clap::Args;

use super::{TlsArgs, bytes_text, open};
use crate::chunks::Location;
use crate::chunks::verify::measure;
use crate::snapshot::SnapshotName;
use crate::source::layers::Layer;
use crate::source::memory_file::MemoryFile;
use crate::source::{PAGE_BYTES, SourceError};

/// Prints what a snapshot is, and what it takes.
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
/// It cannot be opened.
pub async fn run(args: &InspectArgs) -> Result<(), SourceError> {
    let source = open(&args.snapshot, &args.tls).await?;
    println!("snapshot  {}", args.snapshot);
    println!("identity  {}", source.identity());
    println!("size      {} ({} pages)", bytes_text(source.size_bytes()), source.size_bytes() / PAGE_BYTES);
    println!("granule   {}", bytes_text(source.granule_bytes()));
    match &args.snapshot {
        SnapshotName::File(path) => print_data("data", MemoryFile::open(path)?.data().len()),
        SnapshotName::Layers(base, layers) => {
            print_data("base", MemoryFile::open(base)?.data().len());
            for (number, path) in layers.iter().enumerate() {
                print_data(&format!("layer {}", number + 1), Layer::open(path)?.pages().len());
            }
        }
        SnapshotName::Chunks(index) => {
            let at = Location::open(index, &[])?;
            let index = at.read_index().await?;
            let stored = measure(&at, &index).await?;
            println!("chunks    {} of {}", index.chunks().len(), bytes_text(index.chunk_bytes()));
            println!("  zeros       {}", stored.nr_zero_chunks);
            println!("  different   {} ({})", stored.nr_different_chunks, bytes_text(stored.different_bytes));
            println!("  repeated    {}", stored.nr_repeated_chunks);
            let hundredths = stored.stored_bytes * 100 / index.size_bytes();
            println!("stored    {} ({hundredths}% of the size)", bytes_text(stored.stored_bytes));
            if stored.nr_missing_chunks > 0 {
                println!("MISSING   {} chunks", stored.nr_missing_chunks);
            }
        }
        SnapshotName::Object(_) | SnapshotName::Peer { .. } => {}
    }
    Ok(())
}

fn print_data(what: &str, nr_pages: u64) {
    println!("{what:<9} {} ({nr_pages} pages)", bytes_text(nr_pages * PAGE_BYTES));
}
