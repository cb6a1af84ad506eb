//! `--guest migration`: two machines beside each other, and the memory that they share.
//!
//! The source starts the guest. When the guest is up, the target starts, and the guest goes there.

use std::fs::File;
use std::path::Path;
use std::sync::mpsc;
use std::{io, thread};

use super::emulator::{Boot, Ended, Machine, Shown};
use super::plan::Plan;
use crate::failure::Failure;
use crate::session::Session;

/// The file of the shared memory, in the folder of the machines, and its size.
const CHANNEL: &str = "channel";
const CHANNEL_BYTES: u64 = 4 << 20;

/// How two machines ended.
#[derive(Debug)]
pub(super) struct BothEnded {
    pub(super) source: Ended,
    /// `None`: the source never got so far that it was needed.
    pub(super) target: Option<Ended>,
}

/// Words of QEMU for the shared memory.
pub(super) fn words() -> [String; 4] {
    let memory = format!("memory-backend-file,id=channel,mem-path={CHANNEL},size={CHANNEL_BYTES},share=on");
    ["-object".to_owned(), memory, "-device".to_owned(), "ivshmem-plain,memdev=channel".to_owned()]
}

/// Makes the shared memory, of zeros, in `folder`.
pub(super) fn make_channel(folder: &Path) -> io::Result<()> {
    File::create(folder.join(CHANNEL))?.set_len(CHANNEL_BYTES)
}

pub(super) fn run(plan: &Plan, machine: &Machine, session: &Session) -> Result<BothEnded, Failure> {
    let (ready, is_ready) = mpsc::channel();
    let (source, target) = thread::scope(|scope| {
        // Each emulator has a thread that outlives it.
        let target = scope.spawn(move || match is_ready.recv() {
            Ok(()) => machine.run(plan, Boot::Target, Shown::Lines, session, &|| {}).map(Some),
            Err(mpsc::RecvError) => Ok(None),
        });
        let on_ready = || {
            // It fails if the target has ended.
            let _ = ready.send(());
        };
        let source = machine.run(plan, Boot::Source, Shown::Lines, session, &on_ready);
        drop(ready);
        (source, target.join())
    });
    let target = target.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    Ok(BothEnded { source: source?, target: target? })
}
