//! Serves snapshots to peers.
//!
//! # Implementation
//! A connection has two tasks beside those of its requests: one reads requests, one writes replies.
//! The first goes on only while fewer than `MOST_REQUESTS` are unanswered, and while the replies of
//! this connection take at most `MOST_REPLY_BYTES`. A client that asks faster than it reads waits
//! in its own socket, and no other client waits for it. All connections together take at most 1
//! GiB, if there are `MOST_CLIENTS` and all are slow.

use std::collections::HashMap;
use std::fmt::{self, Debug, Display, Formatter};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter, split};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
#[cfg(feature = "full")]
use tokio_rustls::TlsAcceptor;

use super::local::SocketFile;
#[cfg(feature = "full")]
use super::tls::TlsFiles;
use super::wire::{self, About, Greeting, Reply, Request, Status};
use super::{LocalAddress, Stream};
use crate::linux::unix_socket;
use crate::source::{Source, SourceError};

/// How many clients are served at once.
const MOST_CLIENTS: usize = 256;
/// How many requests of a client are unanswered at once.
const MOST_REQUESTS: usize = 64;
/// The bytes of a client's replies that are being made or written.
const MOST_REPLY_BYTES: u32 = 4 << 20;
const _: () = assert!(wire::MOST_REQUEST_BYTES <= MOST_REPLY_BYTES, "each request can be answered");
/// Replies that are written by one call, in bytes.
const WRITTEN_AT_ONCE: usize = 64 << 10;
/// For the greeting, with that of TLS.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// For a client to take a reply.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// A server of snapshots.
#[derive(Debug)]
pub struct PeerServer {
    listener: Listener,
    security: Security,
    snapshots: Arc<Snapshots>,
}

/// What is served, by names.
type Snapshots = HashMap<String, Arc<dyn Source>>;

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    /// In this order: no client finds a name without a listener.
    Unix {
        _file: SocketFile,
        listener: UnixListener,
    },
}

impl Listener {
    /// The next client, and its name for messages.
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, String)> {
        Ok(match self {
            Listener::Tcp(listener) => {
                let (stream, client) = listener.accept().await?;
                super::keep_alive(&stream)?;
                (Box::new(stream), client.to_string())
            }
            Listener::Unix { listener, .. } => {
                (Box::new(listener.accept().await?.0), "a process of this host".to_string())
            }
        })
    }
}

/// What clients have to prove.
#[derive(Clone)]
enum Security {
    Local,
    #[cfg(feature = "full")]
    Tls(TlsAcceptor),
}

impl Debug for Security {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Security::Local => "Local",
            #[cfg(feature = "full")]
            Security::Tls(_) => "Tls",
        })
    }
}

impl PeerServer {
    /// Listens at `address`, for peers that ask for `snapshots` by their names, by TLS.
    ///
    /// # Errors
    /// The files of certificates cannot be used, or the address.
    #[cfg(feature = "full")]
    pub async fn bind(address: SocketAddr, tls: &TlsFiles, snapshots: Snapshots) -> Result<PeerServer, SourceError> {
        let security = Security::Tls(TlsAcceptor::from(tls.server()?));
        let listener = TcpListener::bind(address).await.map_err(|error| cannot_listen(&address, error))?;
        Ok(PeerServer { listener: Listener::Tcp(listener), security, snapshots: Arc::new(snapshots) })
    }

    /// Listens for peers of this host, without TLS. Port 0 is a free one. A Unix socket that a killed
    /// server has left is replaced.
    ///
    /// # Errors
    /// The address cannot be used, or is one that other hosts reach.
    pub async fn bind_local(address: &LocalAddress, snapshots: Snapshots) -> Result<PeerServer, SourceError> {
        let listen = async {
            address.check()?;
            Ok(match address {
                LocalAddress::Unix(path) => {
                    let listener = unix_socket::bind(path)?;
                    listener.set_nonblocking(true)?;
                    let listener = UnixListener::from_std(listener)?;
                    Listener::Unix { _file: SocketFile(path.clone()), listener }
                }
                LocalAddress::Tcp(address) => Listener::Tcp(TcpListener::bind(address).await?),
            })
        };
        let listener = listen.await.map_err(|error| cannot_listen(address, error))?;
        Ok(PeerServer { listener, security: Security::Local, snapshots: Arc::new(snapshots) })
    }

    /// Where it listens, with TLS or without.
    ///
    /// # Errors
    /// The kernel does not say; or it is a Unix socket.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr(),
            Listener::Unix { .. } => Err(io::ErrorKind::AddrNotAvailable.into()),
        }
    }

    /// Serves until it is dropped.
    pub async fn serve(self) {
        let clients = Arc::new(Semaphore::new(MOST_CLIENTS));
        let mut connections = JoinSet::new();
        loop {
            let permit = Arc::clone(&clients).acquire_owned().await.expect("it is never closed");
            let (stream, client) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // One connection that failed, or no descriptor is left: the others go on.
                    tracing::warn!(%error, "a peer could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (security, snapshots) = (self.security.clone(), Arc::clone(&self.snapshots));
            connections.spawn(async move {
                if let Err(why) = serve_client(stream, &security, &snapshots).await {
                    tracing::info!(client, why, "the connection of a peer ended");
                }
                drop(permit);
            });
            // What ended is forgotten.
            while connections.try_join_next().is_some() {}
        }
    }
}

async fn serve_client(stream: Box<dyn Stream>, security: &Security, snapshots: &Snapshots) -> Result<(), String> {
    let greeted = timeout(GREETING_TIMEOUT, async {
        let mut stream = match security {
            Security::Local => stream,
            #[cfg(feature = "full")]
            Security::Tls(acceptor) => Box::new(acceptor.accept(stream).await.map_err(|error| error.to_string())?),
        };
        let source = greet(&mut stream, snapshots).await?;
        Ok::<_, String>((stream, source))
    });
    let (stream, source) = greeted.await.map_err(|_| "no greeting came".to_string())??;
    let Some(source) = source else { return Ok(()) };
    let (reader, writer) = split(stream);
    let (replies, to_write) = mpsc::channel(MOST_REQUESTS);
    // Ends with an error if either does; dropping it ends the requests' tasks.
    let mut requests = JoinSet::new();
    tokio::select! {
        result = read_requests(BufReader::new(reader), source, replies, &mut requests) => result,
        result = write_replies(writer, to_write) => result,
    }
}

/// Answers the greeting. Returns what is asked for, if it is served.
async fn greet(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    snapshots: &Snapshots,
) -> Result<Option<Arc<dyn Source>>, String> {
    let mut greeting = [0; wire::CLIENT_GREETING_BYTES];
    stream.read_exact(&mut greeting).await.map_err(|error| error.to_string())?;
    let (answer, source) = match wire::read_client_greeting(&greeting)? {
        None => (Greeting::OtherVersion, None),
        Some(nr_bytes) => {
            let mut name = vec![0; nr_bytes];
            stream.read_exact(&mut name).await.map_err(|error| error.to_string())?;
            match std::str::from_utf8(&name).ok().and_then(|name| snapshots.get(name)) {
                None => (Greeting::NoSuchSnapshot, None),
                Some(source) => {
                    let about = About {
                        size_bytes: source.size_bytes(),
                        granule_bytes: source.granule_bytes(),
                        identity: source.identity(),
                    };
                    (Greeting::Served(about), Some(Arc::clone(source)))
                }
            }
        }
    };
    stream.write_all(&answer.encode()).await.map_err(|error| error.to_string())?;
    stream.flush().await.map_err(|error| error.to_string())?;
    Ok(source)
}

fn cannot_listen(address: &dyn Display, error: io::Error) -> SourceError {
    SourceError::Io { what: format!("listen at {address}"), error }
}

/// A reply, and what it holds of the bounds until it is written.
struct Answer {
    reply: Reply,
    bytes: Vec<u8>,
    _permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

async fn read_requests(
    mut reader: impl AsyncRead + Unpin,
    source: Arc<dyn Source>,
    replies: mpsc::Sender<Answer>,
    requests: &mut JoinSet<()>,
) -> Result<(), String> {
    let unanswered = Arc::new(Semaphore::new(MOST_REQUESTS));
    let reply_bytes = Arc::new(Semaphore::new(MOST_REPLY_BYTES as usize));
    loop {
        while requests.try_join_next().is_some() {}
        let one = Arc::clone(&unanswered).acquire_owned().await.expect("it is never closed");
        let mut request = [0; wire::REQUEST_BYTES];
        match reader.read_exact(&mut request).await {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
        let request = Request::decode(&request, source.size_bytes())?;
        let bytes = Arc::clone(&reply_bytes).acquire_many_owned(request.nr_bytes).await.expect("it is never closed");
        let answered = move |(status, content): (Status, Vec<u8>)| {
            let reply = Reply { number: request.number, status, nr_bytes: content.len() as u32 };
            Answer { reply, bytes: content, _permits: (one, bytes) }
        };
        if let Some(now) = answer_now(&*source, &request) {
            replies.send(answered(now)).await.map_err(|error| error.to_string())?;
            continue;
        }
        let (source, replies) = (Arc::clone(&source), replies.clone());
        requests.spawn(async move {
            let answer = answered(answer(&*source, &request).await);
            // The connection may have ended.
            let _ = replies.send(answer).await;
        });
    }
}

/// What needs no task of its own, since nothing is waited for.
fn answer_now(source: &dyn Source, request: &Request) -> Option<(Status, Vec<u8>)> {
    let range = request.offset..request.offset + u64::from(request.nr_bytes);
    if source.is_zero(range.clone()) {
        return Some((Status::Zeros, Vec::new()));
    }
    if !source.is_ready(range) {
        return None;
    }
    let mut bytes = vec![0; request.nr_bytes as usize];
    let read = source.read_ready(request.offset, &mut bytes)?;
    Some(status_of(read, bytes))
}

async fn answer(source: &dyn Source, request: &Request) -> (Status, Vec<u8>) {
    let mut bytes = vec![0; request.nr_bytes as usize];
    let read = source.read(request.offset, &mut bytes).await;
    status_of(read, bytes)
}

fn status_of(read: Result<(), SourceError>, bytes: Vec<u8>) -> (Status, Vec<u8>) {
    match read {
        Ok(()) => (Status::Bytes, bytes),
        Err(error) => {
            let (status, text) = wire::of_error(&error);
            (status, text.into_bytes())
        }
    }
}

async fn write_replies(writer: impl AsyncWrite + Unpin, mut answers: mpsc::Receiver<Answer>) -> Result<(), String> {
    let mut writer = BufWriter::with_capacity(WRITTEN_AT_ONCE, writer);
    while let Some(answer) = answers.recv().await {
        let write = async {
            writer.write_all(&answer.reply.encode()).await?;
            writer.write_all(&answer.bytes).await?;
            // What is written is kept until it is flushed.
            if answers.is_empty() { writer.flush().await } else { Ok(()) }
        };
        match timeout(WRITE_TIMEOUT, write).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => return Err("it does not take its replies".to_string()),
        }
    }
    Ok(())
}
