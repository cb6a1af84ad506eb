//! Peers of one host, without TLS.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;
use tokio::net::{TcpStream, UnixStream};

use super::Stream;

/// The address of a peer on this host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LocalAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP, on a loopback address only.
    Tcp(SocketAddr),
}

/// A text that is no address of a peer on this host.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "'{0}' is no peer on this machine: there are unix:PATH and tcp:ADDRESS:PORT with a loopback address, such as tcp:127.0.0.1:7070"
)]
pub struct AddressError(String);

impl LocalAddress {
    /// Fails for addresses that other hosts reach.
    pub(super) fn check(&self) -> io::Result<()> {
        match self {
            LocalAddress::Tcp(address) if !address.ip().is_loopback() => {
                let why = "without TLS only Unix sockets and loopback addresses are allowed";
                Err(io::Error::new(io::ErrorKind::InvalidInput, why))
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        self.check()?;
        Ok(match self {
            LocalAddress::Unix(path) => Box::new(UnixStream::connect(path).await?),
            LocalAddress::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                super::keep_alive(&stream)?;
                Box::new(stream)
            }
        })
    }
}

impl Display for LocalAddress {
    /// In the form that is parsed.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            LocalAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            LocalAddress::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for LocalAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<LocalAddress, AddressError> {
        let address = match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Some(LocalAddress::Unix(path.into())),
            Some(("tcp", address)) => address.parse().ok().map(LocalAddress::Tcp),
            _ => None,
        };
        address.filter(|address| address.check().is_ok()).ok_or_else(|| AddressError(text.to_owned()))
    }
}

/// Removes a socket's file when its server ends, however it ends.
#[derive(Debug)]
pub(super) struct SocketFile(pub(super) PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone already; there is nowhere to report that.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for text in ["unix:/run/a:b", "tcp:127.0.0.1:7000", "tcp:[::1]:7000"] {
            assert_eq!(text.parse::<LocalAddress>().unwrap().to_string(), text);
        }
        for text in ["", "unix:", "tcp:", "tcp:localhost:1", "tcp:127.0.0.1", "tcp:10.0.0.1:1", "host:1"] {
            let error = text.parse::<LocalAddress>().unwrap_err();
            assert!(error.to_string().contains(&format!("'{text}'")), "{error}");
        }
    }
}
