//! Where the guests' pages come from, by name: a source of `slat-pager`, which is opened once for a
//! run. Each thread has its own requests of it
//! ([`PageRequests`](slat_pager::source::requests::PageRequests)).

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use slat_pager::source::memory_file::MemoryFile;
use slat_pager::source::pattern::Pattern;
use slat_pager::source::peer::{LocalAddress, Peer, PeerServer};
use slat_pager::source::requests::OpenSource;
use slat_pager::source::{Source, SourceError};
use thiserror::Error;
use tokio::runtime::{Builder, Runtime};

/// What a peer calls its only snapshot.
const PEERS_SNAPSHOT: &str = "pages";

/// Names a source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SourceSpec {
    /// Pages that are made from their numbers.
    Pattern(Pattern),
    /// The pages of a file.
    File(PathBuf),
    /// The pages of a [`PagesServer`] or of `slat-pager share`.
    Peer(LocalAddress),
}

/// A text that is no source.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("'{0}' is no source: there are pattern[:SEED], constant:BYTE, file:PATH, unix:PATH and tcp:ADDRESS:PORT")]
pub struct ParseSourceError(String);

impl SourceSpec {
    /// Pages that differ, by this seed.
    pub fn pattern(seed: u64) -> SourceSpec {
        SourceSpec::Pattern(Pattern::Mixed { seed })
    }

    /// The contents of its pages, where they are known.
    pub fn contents(&self) -> Option<Pattern> {
        match self {
            SourceSpec::Pattern(pattern) => Some(*pattern),
            SourceSpec::File(_) | SourceSpec::Peer(_) => None,
        }
    }

    /// Opens the source.
    ///
    /// # Errors
    /// There is none, or none that can be used.
    pub fn open(&self) -> Result<OpenSource, SourceError> {
        // What waits for a disk or a peer is mostly asleep.
        let runtime = Arc::new(runtime(1)?);
        let source: Arc<dyn Source> = match self {
            SourceSpec::Pattern(pattern) => Arc::new(*pattern),
            SourceSpec::File(path) => Arc::new(MemoryFile::open(path)?),
            SourceSpec::Peer(address) => Arc::new(runtime.block_on(Peer::open_local(address, PEERS_SNAPSHOT))?),
        };
        Ok(OpenSource::new(source, runtime))
    }
}

fn runtime(nr_threads: usize) -> Result<Runtime, SourceError> {
    let built = Builder::new_multi_thread().worker_threads(nr_threads).thread_name("pages").enable_all().build();
    built.map_err(|error| SourceError::Io { what: "start threads".to_owned(), error })
}

impl fmt::Display for SourceSpec {
    /// In the form that is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceSpec::Pattern(Pattern::Mixed { seed }) => write!(f, "pattern:{seed}"),
            SourceSpec::Pattern(Pattern::Constant(byte)) => write!(f, "constant:{byte:#04x}"),
            SourceSpec::File(path) => write!(f, "file:{}", path.display()),
            SourceSpec::Peer(address) => write!(f, "{address}"),
        }
    }
}

impl FromStr for SourceSpec {
    type Err = ParseSourceError;

    fn from_str(text: &str) -> Result<SourceSpec, ParseSourceError> {
        let (name, argument) = match text.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (text, None),
        };
        let spec = match (name, argument) {
            ("pattern", None) => Some(SourceSpec::pattern(0)),
            ("pattern", Some(seed)) => parse_number(seed).map(SourceSpec::pattern),
            ("constant", Some(byte)) => {
                let byte = parse_number(byte).and_then(|number| u8::try_from(number).ok());
                byte.map(|byte| SourceSpec::Pattern(Pattern::Constant(byte)))
            }
            ("file", Some(path)) if !path.is_empty() => Some(SourceSpec::File(path.into())),
            ("unix" | "tcp", Some(_)) => text.parse().ok().map(SourceSpec::Peer),
            _ => None,
        };
        spec.ok_or_else(|| ParseSourceError(text.to_owned()))
    }
}

/// Decimal, or hexadecimal with `0x`.
fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        // The library's parser would accept a sign.
        Some(digits) if digits.bytes().all(|digit| digit.is_ascii_hexdigit()) => u64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None if text.bytes().all(|digit| digit.is_ascii_digit()) => text.parse().ok(),
        None => None,
    }
}

/// Serves pages to other processes of this host on threads of this one, until it is dropped.
#[derive(Debug)]
pub struct PagesServer {
    address: LocalAddress,
    /// Its threads. They and the socket's file end with it.
    _runtime: Runtime,
}

impl PagesServer {
    /// Listens at `address` (port 0 is a free one) and serves the source there. The name of a Unix
    /// socket must be free: remove a name that a killed server has left.
    ///
    /// # Errors
    /// The address or the source cannot be used.
    pub fn start(address: &LocalAddress, source: &SourceSpec) -> Result<PagesServer, SourceError> {
        PagesServer::start_with(address, Arc::clone(source.open()?.source()))
    }

    pub(crate) fn start_with(address: &LocalAddress, source: Arc<dyn Source>) -> Result<PagesServer, SourceError> {
        let runtime = runtime(2)?;
        let snapshots = HashMap::from([(PEERS_SNAPSHOT.to_owned(), source)]);
        let server = runtime.block_on(PeerServer::bind_local(address, snapshots))?;
        let failed = |error: io::Error| SourceError::Io { what: format!("listen at {address}"), error };
        let address = match address {
            LocalAddress::Unix(_) => address.clone(),
            LocalAddress::Tcp(_) => LocalAddress::Tcp(server.address().map_err(failed)?),
        };
        runtime.spawn(server.serve());
        Ok(PagesServer { address, _runtime: runtime })
    }

    /// Where it listens.
    pub fn address(&self) -> &LocalAddress {
        &self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_specs_are_parsed_and_printed() {
        for text in ["pattern:7", "constant:0xab", "file:/some/where:else", "unix:/some/where", "tcp:127.0.0.1:80"] {
            assert_eq!(text.parse::<SourceSpec>().expect("a source").to_string(), text);
        }
        assert_eq!("pattern".parse(), Ok(SourceSpec::pattern(0)));
        assert_eq!("pattern:0x10".parse(), Ok(SourceSpec::pattern(16)));
        assert_eq!("constant:171".parse(), Ok(SourceSpec::Pattern(Pattern::Constant(0xab))));
        assert_eq!(SourceSpec::pattern(7).contents(), Some(Pattern::Mixed { seed: 7 }));
        assert_eq!(SourceSpec::File("x".into()).contents(), None);
        let wrong = ["", "patterns", "pattern:", "pattern:-1", "pattern:+1", "constant", "constant:256", "constant:0x"];
        let more = ["file", "file:", "unix:", "tcp:", "tcp:localhost", "tcp:1.2.3.4", "constant:0x+1", "pattern:0x"];
        for text in wrong.into_iter().chain(more) {
            let error = text.parse::<SourceSpec>().expect_err("no source");
            assert!(error.to_string().contains(&format!("'{text}'")), "{error}");
        }
    }
}
