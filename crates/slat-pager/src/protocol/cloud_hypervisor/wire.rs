//! The frames: bytes in and out, nothing else.

use std::ops::Range;

use thiserror::Error;

/// Bytes of a request, and of a response.
pub const FRAME_BYTES: usize = 16;
/// Bytes of what follows a `PageFault`.
pub const RANGE_BYTES: usize = 16;
/// The version that both sides speak.
pub const VERSION: u16 = 0;
/// The first bytes of a connection for page faults: role 2.
pub const ROLE_FAULT: [u8; 2] = 2_u16.to_le_bytes();

/// What a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Command {
    /// The version of the sender.
    Start = 1,
    /// The configuration of the VM, as JSON.
    Config = 2,
    /// The state of its devices.
    State = 3,
    /// Memory as bytes: not where memory is passed as descriptors.
    Memory = 4,
    /// The VM runs on at the receiver.
    Complete = 5,
    /// The sender gives up.
    Abandon = 6,
    /// The memory of a slot, as a descriptor.
    MemoryFd = 7,
    /// The VM is paused at the receiver.
    CompletePaused = 8,
    /// A page is missing.
    PageFault = 9,
}

impl Command {
    const ALL: [Command; 9] = [
        Command::Start,
        Command::Config,
        Command::State,
        Command::Memory,
        Command::Complete,
        Command::Abandon,
        Command::MemoryFd,
        Command::CompletePaused,
        Command::PageFault,
    ];
}

/// A frame that none is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum WireError {
    /// A number of no command.
    #[error("{0} is no command of the migration protocol")]
    Command(u16),
    /// A number of no status, or an answer that is followed by bytes.
    #[error("a response has status {status} and announces {length} bytes")]
    Response {
        /// Its status.
        status: u16,
        /// Its length.
        length: u64,
    },
    /// A version that the pager does not speak.
    #[error("the VMM speaks version {0} of the migration protocol, the pager {VERSION}")]
    Version(u16),
    /// A page fault of no pages.
    #[error("a page fault at {gpa:#x} has {length} bytes: not whole pages, or behind the last address")]
    Range {
        /// Its address.
        gpa: u64,
        /// Its length.
        length: u64,
    },
}

/// The head of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// What it is.
    pub command: Command,
    /// Six bytes of the command's own.
    pub headers: [u8; 6],
    /// How many bytes follow.
    pub length: u64,
}

impl Request {
    /// A request that `length` bytes follow.
    pub fn new(command: Command, length: u64) -> Request {
        Request { command, headers: [0; 6], length }
    }

    /// As it is sent.
    pub fn to_bytes(self) -> [u8; FRAME_BYTES] {
        frame(self.command as u16, self.headers, self.length)
    }

    /// What was sent.
    ///
    /// # Errors
    /// No command.
    pub fn from_bytes(bytes: [u8; FRAME_BYTES]) -> Result<Request, WireError> {
        let (number, headers, length) = parts(bytes);
        let command = Command::ALL.into_iter().find(|command| *command as u16 == number);
        Ok(Request { command: command.ok_or(WireError::Command(number))?, headers, length })
    }

    /// Checks the version of a `Start`.
    ///
    /// # Errors
    /// Another version than [`VERSION`].
    pub fn check_version(self) -> Result<(), WireError> {
        match u16::from_le_bytes([self.headers[0], self.headers[1]]) {
            VERSION => Ok(()),
            version => Err(WireError::Version(version)),
        }
    }
}

/// An answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Response {
    /// Done.
    Ok = 1,
    /// Not done.
    Error = 2,
}

impl Response {
    /// As it is sent.
    pub fn to_bytes(self) -> [u8; FRAME_BYTES] {
        frame(self as u16, [0; 6], 0)
    }

    /// What was sent.
    ///
    /// # Errors
    /// Another status; bytes that follow (they do only where memory is not shared).
    pub fn from_bytes(bytes: [u8; FRAME_BYTES]) -> Result<Response, WireError> {
        match parts(bytes) {
            (1, _, 0) => Ok(Response::Ok),
            (2, _, 0) => Ok(Response::Error),
            (status, _, length) => Err(WireError::Response { status, length }),
        }
    }
}

/// The addresses of a `PageFault`, from the bytes behind it.
///
/// # Errors
/// No whole pages; an end behind the last address.
pub fn page_fault(bytes: [u8; RANGE_BYTES]) -> Result<Range<u64>, WireError> {
    let [gpa, length] = halves(bytes);
    let in_pages = [gpa, length].iter().all(|number| number % crate::source::PAGE_BYTES == 0) && length > 0;
    let end = gpa.checked_add(length).filter(|_| in_pages);
    Ok(gpa..end.ok_or(WireError::Range { gpa, length })?)
}

fn frame(number: u16, headers: [u8; 6], length: u64) -> [u8; FRAME_BYTES] {
    let mut bytes = [0; FRAME_BYTES];
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes[2..8].copy_from_slice(&headers);
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn parts(bytes: [u8; FRAME_BYTES]) -> (u16, [u8; 6], u64) {
    let [a, b, headers @ .., _, _, _, _, _, _, _, _] = bytes;
    let [_, length] = halves(bytes);
    (u16::from_le_bytes([a, b]), headers, length)
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let number = u128::from_le_bytes(bytes);
    [number as u64, (number >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_are_as_the_vmm_lays_them_out() {
        assert_eq!(Request::new(Command::Start, 0).to_bytes(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let memory = Request::new(Command::MemoryFd, 4).to_bytes();
        assert_eq!(memory, [7, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Response::Ok.to_bytes(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ROLE_FAULT, [2, 0]);
    }

    #[test]
    fn another_version_is_refused() {
        let mut start = Request::new(Command::Start, 0);
        // The version is two bytes; the other four may be anything.
        start.headers = [0, 0, 0xAA, 0xBB, 0xCC, 0xDD];
        assert_eq!(start.check_version(), Ok(()));
        start.headers = [1, 0, 0, 0, 0, 0];
        assert_eq!(start.check_version(), Err(WireError::Version(1)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_that_is_written_the_same_or_none(bytes: [u8; FRAME_BYTES]) {
            match Request::from_bytes(bytes) {
                Ok(request) => prop_assert_eq!(request.to_bytes(), bytes),
                Err(error) => {
                    let number = u16::from_le_bytes([bytes[0], bytes[1]]);
                    prop_assert!(error == WireError::Command(number) && !(1..=9).contains(&number));
                }
            }
            if let Ok(range) = page_fault(bytes) {
                prop_assert!(range.start < range.end && range.start % 4096 == 0 && range.end % 4096 == 0);
            }
            if let Ok(response) = Response::from_bytes(bytes) {
                prop_assert_eq!(response.to_bytes()[..2].to_vec(), bytes[..2].to_vec());
            }
        }
    }
}
