//! The messages of peers, as bytes.

use crate::little_endian::{u32_at, u64_at};
use crate::source::{Identity, PAGE_BYTES, SourceError};

const MAGIC: [u8; 8] = *b"slatpeer";
const VERSION: u32 = 1;

/// The longest name of a snapshot.
pub(super) const MOST_NAME_BYTES: usize = 255;
/// What one request asks for at most.
pub(super) const MOST_REQUEST_BYTES: u32 = 1 << 20;
/// The longest text of a reply.
pub(super) const MOST_TEXT_BYTES: u32 = 1024;

pub(super) const CLIENT_GREETING_BYTES: usize = 16;
pub(super) const SERVER_GREETING_BYTES: usize = 64;
pub(super) const REQUEST_BYTES: usize = 24;
pub(super) const REPLY_BYTES: usize = 16;

/// What a greeting says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Served(About),
    NoSuchSnapshot,
    OtherVersion,
}

/// The snapshot that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct About {
    pub(super) size_bytes: u64,
    pub(super) granule_bytes: u64,
    pub(super) identity: Identity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) number: u64,
    pub(super) offset: u64,
    pub(super) nr_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Bytes = 0,
    Zeros = 1,
    NotForNow = 2,
    NotAtAll = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) number: u64,
    pub(super) status: Status,
    /// How many bytes follow.
    pub(super) nr_bytes: u32,
}

/// The client's greeting; the name follows.
pub(super) fn client_greeting(name: &str) -> [u8; CLIENT_GREETING_BYTES] {
    let mut bytes = [0; CLIENT_GREETING_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&(name.len() as u32).to_le_bytes());
    bytes
}

/// The length of the name that follows; `None`: another version. An error: no greeting.
pub(super) fn read_client_greeting(bytes: &[u8; CLIENT_GREETING_BYTES]) -> Result<Option<usize>, &'static str> {
    if bytes[..8] != MAGIC {
        return Err("it does not speak this protocol");
    }
    if u32_at(bytes, 8) != VERSION {
        return Ok(None);
    }
    match u32_at(bytes, 12) as usize {
        nr_bytes @ 1..=MOST_NAME_BYTES => Ok(Some(nr_bytes)),
        _ => Err("a name of that length is not possible"),
    }
}

impl Greeting {
    pub(super) fn encode(self) -> [u8; SERVER_GREETING_BYTES] {
        let mut bytes = [0; SERVER_GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let status: u32 = match self {
            Greeting::Served(about) => {
                bytes[16..24].copy_from_slice(&about.size_bytes.to_le_bytes());
                bytes[24..32].copy_from_slice(&about.granule_bytes.to_le_bytes());
                bytes[32..].copy_from_slice(about.identity.as_bytes());
                0
            }
            Greeting::NoSuchSnapshot => 1,
            Greeting::OtherVersion => 2,
        };
        bytes[12..16].copy_from_slice(&status.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; SERVER_GREETING_BYTES]) -> Result<Greeting, &'static str> {
        if bytes[..8] != MAGIC {
            return Err("it does not speak this protocol");
        }
        match (u32_at(bytes, 8), u32_at(bytes, 12)) {
            (VERSION, 0) => {}
            (VERSION, 1) => return Ok(Greeting::NoSuchSnapshot),
            (VERSION, 2..) => return Err("its greeting is none"),
            _ => return Ok(Greeting::OtherVersion),
        }
        let (size_bytes, granule_bytes) = (u64_at(bytes, 16), u64_at(bytes, 24));
        if size_bytes == 0 || !size_bytes.is_multiple_of(PAGE_BYTES) {
            return Err("its snapshot is not whole pages");
        }
        if !granule_bytes.is_power_of_two() || granule_bytes < PAGE_BYTES {
            return Err("its granule is none");
        }
        let mut identity = [0; 32];
        identity.copy_from_slice(&bytes[32..]);
        Ok(Greeting::Served(About { size_bytes, granule_bytes, identity: Identity::from_bytes(identity) }))
    }
}

impl Request {
    pub(super) fn encode(self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.nr_bytes.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REQUEST_BYTES], size_bytes: u64) -> Result<Request, &'static str> {
        let request = Request { number: u64_at(bytes, 0), offset: u64_at(bytes, 8), nr_bytes: u32_at(bytes, 16) };
        if u32_at(bytes, 20) != 0 || request.nr_bytes == 0 || request.nr_bytes > MOST_REQUEST_BYTES {
            return Err("a request is none");
        }
        match request.offset.checked_add(u64::from(request.nr_bytes)) {
            Some(end) if end <= size_bytes => Ok(request),
            _ => Err("a request is for bytes behind the end"),
        }
    }
}

impl Reply {
    pub(super) fn encode(self) -> [u8; REPLY_BYTES] {
        let mut bytes = [0; REPLY_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.status as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&self.nr_bytes.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REPLY_BYTES]) -> Result<Reply, &'static str> {
        let (status, most_bytes) = match u32_at(bytes, 8) {
            0 => (Status::Bytes, MOST_REQUEST_BYTES),
            1 => (Status::Zeros, 0),
            2 => (Status::NotForNow, MOST_TEXT_BYTES),
            3 => (Status::NotAtAll, MOST_TEXT_BYTES),
            _ => return Err("a reply has no such status"),
        };
        let nr_bytes = u32_at(bytes, 12);
        if nr_bytes > most_bytes {
            return Err("a reply is too long");
        }
        Ok(Reply { number: u64_at(bytes, 0), status, nr_bytes })
    }
}

/// The status and text of an error.
pub(super) fn of_error(error: &SourceError) -> (Status, String) {
    let mut text = error.to_string();
    while text.len() > MOST_TEXT_BYTES as usize {
        text.pop();
    }
    (if error.may_pass() { Status::NotForNow } else { Status::NotAtAll }, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(number: u64, offset in 0u64..1 << 40, nr_bytes in 1..=MOST_REQUEST_BYTES, pages in 1u64.., shift in 12u32..63, identity: [u8; 32], status in 0u32..4) {
            let request = Request { number, offset, nr_bytes };
            prop_assert_eq!(Request::decode(&request.encode(), 1 << 41), Ok(request));
            prop_assert!(Request::decode(&request.encode(), offset).is_err());
            let about = About { size_bytes: (pages << 12).max(4096), granule_bytes: 1 << shift, identity: Identity::from_bytes(identity) };
            for greeting in [Greeting::Served(about), Greeting::NoSuchSnapshot] {
                prop_assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
            }
            let status = [Status::Bytes, Status::Zeros, Status::NotForNow, Status::NotAtAll][status as usize];
            let nr_bytes = match status { Status::Bytes => nr_bytes, Status::Zeros => 0, _ => nr_bytes % 1025 };
            let reply = Reply { number, status, nr_bytes };
            prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
        }

        #[test]
        fn bytes_of_anything_are_bounded(request: [u8; REQUEST_BYTES], reply: [u8; REPLY_BYTES], greeting: [u8; CLIENT_GREETING_BYTES]) {
            if let Ok(request) = Request::decode(&request, 1 << 30) {
                prop_assert!(request.nr_bytes <= MOST_REQUEST_BYTES && request.offset + u64::from(request.nr_bytes) <= 1 << 30);
            }
            if let Ok(reply) = Reply::decode(&reply) {
                prop_assert!(reply.nr_bytes <= MOST_REQUEST_BYTES);
            }
            prop_assert!(read_client_greeting(&greeting).is_err());
        }
    }
}
