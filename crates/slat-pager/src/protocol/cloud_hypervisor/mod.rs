//! Cloud Hypervisor's migration protocol, as its *offload daemon* speaks it: the VMM gives a
//! snapshot to the pager, and takes it back page by page.
//!
//! # Use
//! - [`store`](store::store): the VMM connects (`send-migration
//!   destination_url=unix:SOCKET,local=on`). What it sends is a snapshot in a [`folder`], durable
//!   before the VMM is told that it may end.
//! - [`restore`](restore::restore): the pager connects to a VMM that waits (`receive-migration
//!   receiver_url=unix:SOCKET,memory_mode=postcopy`) and serves its page faults on a second
//!   connection.
//!
//! # Protocol
//! Version 0, of Cloud Hypervisor 53 (`vm-migration/src/protocol.rs`, `docs/snapshot_restore.md`
//! there).
//! - A request is 16 bytes, little-endian: the command (u16), six bytes for it, the length of what
//!   follows (u64). A response is 16 bytes: the status (u16), six zeros, a length.
//! - In order: `Start` (the version is in the first two of the six bytes), `MemoryFd` for each slot
//!   (a u32, sent with the descriptor of its memory), `Config`, `State`, then `Complete` or
//!   `CompletePaused`. Each is answered. `Abandon` ends it at any time.
//! - A restore on demand opens a second connection before `State`. Its first bytes are the role 2
//!   (u16). Then the VMM sends `PageFault` with an address of the guest and a length (two u64), and
//!   maps the page once that is answered.

pub mod config;
mod connection;
pub mod faults;
pub mod folder;
pub mod memory;
pub mod restore;
pub mod store;
mod sweep;
mod taken;
pub mod wire;

use std::io;
use std::path::PathBuf;

use clap::ValueEnum;
use thiserror::Error;

use self::wire::{Command, WireError};
use crate::source::SourceError;

/// What becomes of a guest whose page can never be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum OnFailure {
    /// The VMM is told, and exits.
    #[value(name = "exit")]
    Refuse,
    /// The guest waits, and the pager tries again.
    #[value(name = "pause")]
    Wait,
}

/// Why a snapshot was not taken, or not restored.
#[derive(Debug, Error)]
pub enum Error {
    /// A frame that none is.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer closed the connection.
    #[error("the VMM closed the connection while {0} was awaited")]
    Closed(&'static str),
    /// The peer did not send in time.
    #[error("the VMM sent no {0} in time")]
    TimedOut(&'static str),
    /// The peer gave up.
    #[error("the VMM abandoned the snapshot")]
    Abandoned,
    /// A command that does not come here.
    #[error("the VMM sent {found:?} where {expected} comes")]
    OutOfOrder {
        /// What came.
        found: Command,
        /// What may come.
        expected: &'static str,
    },
    /// A length that its command cannot have.
    #[error("the VMM announced {length} bytes for {command:?}")]
    Length {
        /// The command.
        command: Command,
        /// What it said.
        length: u64,
    },
    /// The descriptors that came are not what the frame has.
    #[error("{expected} descriptor was expected with {what}, and {found} came")]
    Descriptors {
        /// The frame.
        what: &'static str,
        /// `one` or `no`.
        expected: &'static str,
        /// How many came.
        found: &'static str,
    },
    /// The VMM answered a command by an error.
    #[error("the VMM refused {0}; its log says why")]
    Refused(&'static str),
    /// The VMM would let its guest run on memory that is not there.
    #[error("the VMM takes no page faults: receive-migration needs memory_mode=postcopy; the VM was not started")]
    NotOnDemand,
    /// The configuration is none.
    #[error("the configuration of the VM: {0}")]
    Config(String),
    /// Memory of a slot did not come, or came twice, or is of no slot.
    #[error("memory slot {slot}: {what}")]
    Slot {
        /// Its number.
        slot: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// Bytes of the snapshot cannot be had.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A file of the snapshot.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What the operating system says.
        error: io::Error,
    },
    /// Another call of the operating system.
    #[error("cannot {what}: {error}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The reason.
        error: io::Error,
    },
}

impl Error {
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |error| Error::Io { what, error }
    }

    fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |error| Error::File { path, error }
    }
}
