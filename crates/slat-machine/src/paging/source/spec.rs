//! Which source of pages to open.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::delayed::DelayedSource;
use super::file::FileSource;
use super::pattern::PatternSource;
use super::peer::PeerSource;
use super::{PageSource, ParseSourceError, Pattern, PeerAddress, SourceError};

/// Names a source, so that each thread can open its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceSpec {
    kind: Kind,
    delay_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Kind {
    Pattern(Pattern),
    File(Arc<PathBuf>),
    Peer { address: Arc<PeerAddress>, time_out: Duration },
}

impl SourceSpec {
    /// How long a peer may take for a page, unless [`time_out`](SourceSpec::time_out) is called.
    pub const TIME_OUT: Duration = Duration::from_secs(10);

    fn new(kind: Kind) -> SourceSpec {
        SourceSpec { kind, delay_ns: 0 }
    }

    /// Pages that are made from their numbers.
    pub fn pattern(seed: u64) -> SourceSpec {
        SourceSpec::new(Kind::Pattern(Pattern::Mixed { seed }))
    }

    /// Pages that are full of one byte.
    pub fn constant(byte: u8) -> SourceSpec {
        SourceSpec::new(Kind::Pattern(Pattern::Constant(byte)))
    }

    /// The pages of a file.
    pub fn file(path: impl Into<PathBuf>) -> SourceSpec {
        SourceSpec::new(Kind::File(Arc::new(path.into())))
    }

    /// The pages of a [`PeerServer`](super::PeerServer).
    pub fn peer(address: PeerAddress) -> SourceSpec {
        SourceSpec::new(Kind::Peer { address: Arc::new(address), time_out: SourceSpec::TIME_OUT })
    }

    /// The same, with a latency: no page is here earlier than so many nanoseconds after its
    /// request.
    #[must_use]
    pub fn delayed_by(self, delay_ns: u64) -> SourceSpec {
        SourceSpec { delay_ns, ..self }
    }

    /// The same, with the time that a peer may take for each page, from its request on, whatever
    /// else it sends. Other sources have no timeout: they are never silent.
    #[must_use]
    pub fn time_out(mut self, limit: Duration) -> SourceSpec {
        if let Kind::Peer { time_out, .. } = &mut self.kind {
            *time_out = limit;
        }
        self
    }

    /// The contents of its pages, where they are known.
    pub fn contents(&self) -> Option<Pattern> {
        match self.kind {
            Kind::Pattern(pattern) => Some(pattern),
            Kind::File(_) | Kind::Peer { .. } => None,
        }
    }

    /// Whether pages may come late: they are delayed, or come from a peer.
    pub fn has_latency(&self) -> bool {
        self.delay_ns > 0 || matches!(self.kind, Kind::Peer { .. })
    }

    /// Opens the source, for one thread.
    ///
    /// # Errors
    /// [`SourceError::OpenFile`]; [`SourceError::NotLoopback`], [`SourceError::Connect`],
    /// [`SourceError::NotASource`].
    pub fn open(&self) -> Result<Box<dyn PageSource>, SourceError> {
        let source: Box<dyn PageSource> = match &self.kind {
            Kind::Pattern(pattern) => Box::new(PatternSource::new(*pattern)),
            Kind::File(path) => Box::new(FileSource::open(path)?),
            Kind::Peer { address, time_out } => Box::new(PeerSource::connect(PeerAddress::clone(address), *time_out)?),
        };
        Ok(match self.delay_ns {
            0 => source,
            delay_ns => Box::new(DelayedSource::new(source, delay_ns)),
        })
    }
}

impl fmt::Display for SourceSpec {
    /// In the form that is parsed, without the latency.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Pattern(Pattern::Mixed { seed }) => write!(f, "pattern:{seed}"),
            Kind::Pattern(Pattern::Constant(byte)) => write!(f, "constant:{byte:#04x}"),
            Kind::File(path) => write!(f, "file:{}", path.display()),
            Kind::Peer { address, .. } => write!(f, "{address}"),
        }
    }
}

impl FromStr for SourceSpec {
    type Err = ParseSourceError;

    fn from_str(text: &str) -> Result<SourceSpec, ParseSourceError> {
        let error = || ParseSourceError {
            text: text.to_owned(),
            wanted: "source: there are pattern[:SEED], constant:BYTE, file:PATH, unix:PATH and tcp:ADDRESS:PORT",
        };
        let (name, argument) = match text.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (text, None),
        };
        match (name, argument) {
            ("pattern", None) => Ok(SourceSpec::pattern(0)),
            ("pattern", Some(seed)) => parse_number(seed).map(SourceSpec::pattern).ok_or_else(error),
            ("constant", Some(byte)) => {
                let byte = parse_number(byte).and_then(|number| u8::try_from(number).ok());
                byte.map(SourceSpec::constant).ok_or_else(error)
            }
            ("file", Some(path)) if !path.is_empty() => Ok(SourceSpec::file(path)),
            ("unix" | "tcp", Some(_)) => text.parse().map(SourceSpec::peer),
            _ => Err(error()),
        }
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
