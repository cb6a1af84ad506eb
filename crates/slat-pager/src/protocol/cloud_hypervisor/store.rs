//! Takes a snapshot from the VMM.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{FileType, fstat};
use tracing::{debug, info};

use super::Error;
use super::config::{self, Slot};
use super::connection::Connection;
use super::folder::{CONFIG, NewFolder, STATE, memory_name};
use super::wire::{Command, Request, Response};
use crate::chunks::pack::is_all_zero;
use crate::source::{PAGE_BYTES, holes};

/// The longest configuration and state that are taken.
const CONFIG_BYTES: u64 = 16 << 20;
const STATE_BYTES: u64 = 1 << 30;
/// What a thread copies at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// How many threads copy.
const NR_THREADS: usize = 4;

/// What was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// Bytes of guest memory.
    pub memory_bytes: u64,
    /// Bytes of them that are not in pages of zeros, which are holes of the files.
    pub data_bytes: u64,
}

/// Takes the snapshot that the VMM at the other end of `socket` sends, into `folder`, which is not
/// there yet or empty. The VMM has `timeout` for each of its frames.
///
/// # Errors
/// [`enum@Error`]; the VMM is told so, if it still listens. `folder` is as it was, but for the two
/// last steps: if its name cannot be made durable or the last answer cannot be sent, it has the
/// snapshot.
pub fn store(socket: UnixStream, folder: &Path, timeout: Duration) -> Result<Stored, Error> {
    let connection = Connection::new(socket, timeout).map_err(Error::io("use a connection"))?;
    let stored = receive(&connection, folder);
    if let Err(error) = &stored {
        debug!(%error, "no snapshot was taken");
        // It may be gone, and that is why.
        let _ = connection.answer(if matches!(error, Error::Abandoned) { Response::Ok } else { Response::Error });
    }
    stored
}

fn receive(connection: &Connection, folder: &Path) -> Result<Stored, Error> {
    let folder = NewFolder::new(folder)?;
    let start = connection.receive_request()?;
    check(&start, &[Command::Start], "Start")?;
    start.check_version()?;
    expect_length(&start, 0)?;
    connection.answer(Response::Ok)?;

    let mut memory = BTreeMap::new();
    let config = loop {
        let request = connection.receive_request()?;
        check(&request, &[Command::MemoryFd, Command::Config], "MemoryFd or Config")?;
        if request.command == Command::Config {
            break request;
        }
        expect_length(&request, 4)?;
        let (slot, descriptor) = connection.receive_memory()?;
        if memory.len() == config::NR_SLOTS || memory.insert(slot, File::from(descriptor)).is_some() {
            return Err(Error::Slot { slot, what: "its memory came twice, or too many slots did" });
        }
        connection.answer(Response::Ok)?;
    };
    let config = connection.receive_payload(Command::Config, config.length, CONFIG_BYTES)?;
    let slots = config::slots(&config)?;
    check_memory(&slots, &memory)?;
    folder.write(CONFIG, &config)?;
    connection.answer(Response::Ok)?;

    let state = connection.receive_request()?;
    check(&state, &[Command::State], "State")?;
    let state = connection.receive_payload(Command::State, state.length, STATE_BYTES)?;
    folder.write(STATE, &state)?;
    connection.answer(Response::Ok)?;

    let complete = connection.receive_request()?;
    check(&complete, &[Command::Complete, Command::CompletePaused], "Complete or CompletePaused")?;
    expect_length(&complete, 0)?;
    let mut stored = Stored { memory_bytes: 0, data_bytes: 0 };
    for slot in &slots {
        let Some(memory) = memory.get(&slot.number) else { continue };
        let name = memory_name(slot.number);
        stored.memory_bytes += slot.nr_bytes;
        stored.data_bytes += copy(memory, slot, &folder.create(&name)?).map_err(Error::file(folder.path_of(&name)))?;
    }
    folder.finish()?;
    // The VMM may exit once it has this: the folder is durable.
    connection.answer(Response::Ok)?;
    info!(memory_bytes = stored.memory_bytes, data_bytes = stored.data_bytes, "took a snapshot");
    Ok(stored)
}

fn check(request: &Request, allowed: &[Command], expected: &'static str) -> Result<(), Error> {
    match request.command {
        found if allowed.contains(&found) => Ok(()),
        Command::Abandon => Err(Error::Abandoned),
        found => Err(Error::OutOfOrder { found, expected }),
    }
}

fn expect_length(request: &Request, length: u64) -> Result<(), Error> {
    match request {
        request if request.length == length => Ok(()),
        Request { command, length, .. } => Err(Error::Length { command: *command, length: *length }),
    }
}

/// Each slot has its memory, each memory is of a slot, and is long enough.
fn check_memory(slots: &[Slot], memory: &BTreeMap<u32, File>) -> Result<(), Error> {
    if let Some(slot) = memory.keys().find(|number| slots.iter().all(|slot| slot.number != **number)) {
        return Err(Error::Slot { slot: *slot, what: "the configuration does not have it" });
    }
    for slot in slots {
        let error = |what| Error::Slot { slot: slot.number, what };
        let descriptor = memory.get(&slot.number).ok_or_else(|| error("no descriptor came"))?;
        let stat = fstat(descriptor).map_err(|_| error("its descriptor cannot be looked at"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(error("its descriptor is no file"));
        }
        if u64::try_from(stat.st_size).is_ok_and(|size| size < slot.file_offset + slot.nr_bytes) {
            return Err(error("its file ends before it"));
        }
    }
    Ok(())
}

/// Copies the memory of `slot`, durably, and leaves holes where it has zeros; returns how many
/// bytes are no zeros.
fn copy(memory: &File, slot: &Slot, to: &File) -> io::Result<u64> {
    to.set_len(slot.nr_bytes)?;
    let chunks: Vec<_> = holes::data(memory, slot.file_offset..slot.file_offset + slot.nr_bytes)?
        .into_iter()
        .flat_map(|extent| {
            extent.clone().step_by(CHUNK_BYTES as usize).map(move |start| start..extent.end.min(start + CHUNK_BYTES))
        })
        .collect();
    let next = AtomicU64::new(0);
    let copy_some = || {
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        let mut data_bytes = 0;
        // Relaxed: each index is taken once, and nothing else depends on it.
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let bytes = &mut buffer[..(chunk.end - chunk.start) as usize];
            memory.read_exact_at(bytes, chunk.start)?;
            data_bytes += write_sparse(to, bytes, chunk.start - slot.file_offset)?;
        }
        Ok(data_bytes)
    };
    let data_bytes: io::Result<u64> = thread::scope(|scope| {
        let nr_threads = thread::available_parallelism().map_or(1, usize::from).min(NR_THREADS);
        let threads: Vec<_> = (1..nr_threads).map(|_| scope.spawn(copy_some)).collect();
        let mine = copy_some();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())))
            .sum::<io::Result<u64>>()
            .and_then(|others| Ok(others + mine?))
    });
    to.sync_all()?;
    data_bytes
}

/// Writes the pages of `bytes` that are not zeros; returns how many bytes they have.
fn write_sparse(to: &File, bytes: &[u8], offset: u64) -> io::Result<u64> {
    let mut written = 0;
    let mut at = 0;
    let pages: Vec<(bool, usize)> =
        bytes.chunks(PAGE_BYTES as usize).map(|page| (is_all_zero(page), page.len())).collect();
    for same in pages.chunk_by(|one, next| one.0 == next.0) {
        let nr_bytes = same.iter().map(|(_, nr_bytes)| nr_bytes).sum::<usize>();
        if same.first().is_some_and(|(is_zero, _)| !is_zero) {
            to.write_all_at(&bytes[at..at + nr_bytes], offset + at as u64)?;
            written += nr_bytes as u64;
        }
        at += nr_bytes;
    }
    Ok(written)
}
