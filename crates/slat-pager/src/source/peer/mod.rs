//! Another pager as a source, over TCP with TLS: what a migrated machine lacks comes from where it
//! was (post-copy migration), or a snapshot from the host that has it. On one host also without
//! TLS, over a Unix socket or loopback ([`LocalAddress`]).
//!
//! # Guarantees
//! - With TLS each side authenticates by a certificate of one authority; a process without one
//!   reads no byte. Without, no byte leaves the host: a Unix socket is for processes that may write
//!   its file, loopback for every process of the host.
//! - A client that connects again goes on only with the snapshot that it had
//!   ([`Identity`](crate::source::Identity)).
//! - Neither side takes more memory than its bounds for a peer that asks too much, reads too
//!   slowly, or misbehaves.
//!
//! # Protocol, version 1
//! Numbers are little-endian. The client sends its greeting, the server answers with its own, then
//! requests and replies follow, in any order. Either side ends the connection when the other does
//! what is not written here.
//!
//! | message | fields |
//! |---|---|
//! | client's greeting | `slatpeer`, version u32, bytes of the name u32, the snapshot's name |
//! | server's greeting | `slatpeer`, version u32, status u32, size u64, granule u64, identity 32 |
//! | request, 24 bytes | number u64, offset u64, bytes u32, zero u32 |
//! | reply, 16 bytes | number u64, status u32, bytes u32, then so many bytes |
//!
//! Status of a greeting: 0 it is served; 1 there is no such snapshot; 2 another version (the fields
//! after it are zero). Status of a reply: 0 the bytes; 1 all are zero, and none follow; 2 not for
//! now; 3 not at all. With the last two a text follows.

pub mod client;
pub mod local;
pub mod server;
#[cfg(feature = "full")]
pub mod tls;
mod wire;

pub use client::Peer;
pub use local::{AddressError, LocalAddress};
pub use server::PeerServer;
#[cfg(feature = "full")]
pub use tls::TlsFiles;

use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// A connection, with TLS or without.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Has the kernel notice a peer that is gone without a word, and sends each message at once.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(())
}

/// Whether TLS has refused the other side, or was refused by it: not for now only.
fn is_of_tls(error: &io::Error) -> bool {
    #[cfg(feature = "full")]
    return error.get_ref().is_some_and(|cause| cause.is::<rustls::Error>());
    #[cfg(not(feature = "full"))]
    {
        let _ = error;
        false
    }
}
