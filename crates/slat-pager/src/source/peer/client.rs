//! A snapshot that another pager serves.
//!
//! # Implementation
//! There are some connections, so that a fault does not queue behind all that is replayed. A read
//! takes the one with the fewest requests under way. A connection that is lost is made again when
//! the next read needs it; the reads that waited for it try again, a few times.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter, split};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

#[cfg(feature = "full")]
use super::tls::{TlsClient, TlsFiles};
use super::wire::{self, About, Greeting, MOST_REQUEST_BYTES, Reply, Request, Status};
use super::{LocalAddress, Stream};
use crate::source::{Identity, Source, SourceError, check_range};

const NR_CONNECTIONS: usize = 3;
/// How many requests are under way on a connection.
const MOST_REQUESTS: usize = 64;
/// Replies that are read by one call, in bytes.
const READ_AT_ONCE: usize = 64 << 10;
/// For a connection with both greetings.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A server from which no byte comes for so long while a request waits is given up.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// A peer that leaves so many requests of a connection without a reply, while it answers others, is
/// given up.
const MOST_UNANSWERED: usize = 16 * MOST_REQUESTS;
/// How often a request is sent, and what is waited before the second time; twice that before the
/// third.
const MOST_TRIES: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// A snapshot of a peer.
#[derive(Debug)]
pub struct Peer {
    server: Server,
    about: About,
    granule_bytes: u64,
    connections: Vec<Slot>,
}

/// Where the snapshot is.
#[derive(Debug)]
struct Server {
    address: String,
    snapshot: String,
    route: Route,
}

/// How it is reached.
#[derive(Debug)]
enum Route {
    Local(LocalAddress),
    #[cfg(feature = "full")]
    Tls(TlsClient),
}

/// A place for a connection.
#[derive(Debug)]
struct Slot {
    connection: tokio::sync::Mutex<Option<Arc<Connection>>>,
    requests: Semaphore,
}

impl Peer {
    /// The snapshot `name` of the pager at `address` (`host:port`), by TLS.
    ///
    /// # Errors
    /// The files of certificates cannot be used; the server does not answer, is another one, or
    /// does not have the snapshot.
    #[cfg(feature = "full")]
    pub async fn open(address: &str, name: &str, tls: &TlsFiles) -> Result<Peer, SourceError> {
        Peer::of(Server::new(address.to_string(), name, Route::Tls(tls.client_of(address)?))?).await
    }

    /// The snapshot `name` of a process of this host.
    ///
    /// # Errors
    /// The server does not answer, or does not have the snapshot.
    pub async fn open_local(address: &LocalAddress, name: &str) -> Result<Peer, SourceError> {
        Peer::of(Server::new(address.to_string(), name, Route::Local(address.clone()))?).await
    }

    async fn of(server: Server) -> Result<Peer, SourceError> {
        let (connection, about) = Connection::open(&server).await?;
        let connections: Vec<Slot> = std::iter::once(Some(Arc::new(connection)))
            .chain(std::iter::repeat_with(|| None))
            .take(NR_CONNECTIONS)
            .map(|connection| Slot {
                connection: tokio::sync::Mutex::new(connection),
                requests: Semaphore::new(MOST_REQUESTS),
            })
            .collect();
        let granule_bytes = about.granule_bytes.clamp(64 << 10, u64::from(MOST_REQUEST_BYTES));
        Ok(Peer { server, about, granule_bytes, connections })
    }

    /// Reads one part, again if the connection is lost.
    async fn read_part(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let mut pause = FIRST_PAUSE;
        for _ in 1..MOST_TRIES {
            match self.try_part(offset, into).await {
                Err(error) if error.may_pass() => {
                    tracing::debug!(%error, "a part of a peer's snapshot is asked for again");
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                result => return result,
            }
        }
        self.try_part(offset, into).await
    }

    async fn try_part(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let slot =
            self.connections.iter().max_by_key(|slot| slot.requests.available_permits()).expect("there are some");
        let _permit = slot.requests.acquire().await.expect("it is never closed");
        let connection = slot.get(self).await?;
        match connection.request(offset, into.len() as u32).await {
            Some((Status::Bytes, bytes)) if bytes.len() == into.len() => into.copy_from_slice(&bytes),
            Some((Status::Zeros, _)) => into.fill(0),
            Some((Status::NotAtAll, text)) => return Err(self.server.refused(text_of(&text))),
            Some((Status::NotForNow, text)) => return Err(self.server.unavailable(text_of(&text))),
            Some((Status::Bytes, _)) | None => {
                return Err(self.server.unavailable("the connection was lost".to_string()));
            }
        }
        Ok(())
    }
}

impl Slot {
    /// The connection, or a new one to the same snapshot.
    async fn get(&self, peer: &Peer) -> Result<Arc<Connection>, SourceError> {
        let mut slot = self.connection.lock().await;
        match &*slot {
            Some(connection) if connection.is_open() => Ok(Arc::clone(connection)),
            _ => {
                let (connection, about) = Connection::open(&peer.server).await?;
                if (about.identity, about.size_bytes) != (peer.about.identity, peer.about.size_bytes) {
                    let what = format!("{} now serves another {}", peer.server.address, peer.server.snapshot);
                    return Err(SourceError::Changed { what });
                }
                Ok(Arc::clone(slot.insert(Arc::new(connection))))
            }
        }
    }
}

impl Server {
    fn new(address: String, name: &str, route: Route) -> Result<Server, SourceError> {
        if name.is_empty() || name.len() > wire::MOST_NAME_BYTES {
            let why = "its name is empty or too long".to_string();
            return Err(SourceError::Malformed { snapshot: format!("{address}/{name}"), why });
        }
        Ok(Server { address, snapshot: name.to_string(), route })
    }

    fn unavailable(&self, why: String) -> SourceError {
        SourceError::Unavailable { server: self.address.clone(), why }
    }

    fn refused(&self, why: String) -> SourceError {
        SourceError::Refused { server: self.address.clone(), why }
    }

    async fn connect(&self) -> Result<(Box<dyn Stream>, About), SourceError> {
        let failed = |error: io::Error| {
            let is_for_good = super::is_of_tls(&error) || error.kind() == io::ErrorKind::InvalidInput;
            if is_for_good { self.refused(error.to_string()) } else { self.unavailable(error.to_string()) }
        };
        let stream = match &self.route {
            Route::Local(address) => address.connect().await,
            #[cfg(feature = "full")]
            Route::Tls(tls) => tls.connect().await,
        };
        let mut stream = stream.map_err(failed)?;
        let mut greeting = wire::client_greeting(&self.snapshot).to_vec();
        greeting.extend_from_slice(self.snapshot.as_bytes());
        let mut answer = [0; wire::SERVER_GREETING_BYTES];
        let greeted = async {
            stream.write_all(&greeting).await?;
            stream.flush().await?;
            stream.read_exact(&mut answer).await
        };
        // A server that does not accept the certificate of this side says so only now.
        greeted.await.map_err(failed)?;
        match Greeting::decode(&answer) {
            Ok(Greeting::Served(about)) => Ok((stream, about)),
            Ok(Greeting::NoSuchSnapshot) => {
                Err(SourceError::NotThere { what: format!("snapshot {} at {}", self.snapshot, self.address) })
            }
            Ok(Greeting::OtherVersion) => Err(self.refused("it speaks another version".to_string())),
            Err(why) => Err(self.refused(why.to_string())),
        }
    }
}

/// A request that waits for its reply.
#[derive(Debug)]
struct Waiting {
    nr_bytes: u32,
    reply: oneshot::Sender<(Status, Vec<u8>)>,
}

/// The requests that wait; `None` once the connection has ended.
type Table = Arc<Mutex<Option<HashMap<u64, Waiting>>>>;

/// A connection, with a task that reads its replies and one that writes its requests.
#[derive(Debug)]
struct Connection {
    waiting: Table,
    requests: mpsc::Sender<[u8; wire::REQUEST_BYTES]>,
    next_number: AtomicU64,
    /// Counts what comes, of whichever reply.
    progress: Arc<AtomicU64>,
    task: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    async fn open(server: &Server) -> Result<(Connection, About), SourceError> {
        let connected = timeout(CONNECT_TIMEOUT, server.connect()).await;
        let (stream, about) = connected.map_err(|_| server.unavailable("it does not answer".to_string()))??;
        let (reader, writer) = split(stream);
        let waiting: Table = Arc::new(Mutex::new(Some(HashMap::new())));
        let (requests, to_write) = mpsc::channel(MOST_REQUESTS);
        let (table, address) = (Arc::clone(&waiting), server.address.clone());
        let progress = Arc::new(AtomicU64::new(0));
        let of_task = Arc::clone(&progress);
        let task = tokio::spawn(async move {
            let why = tokio::select! {
                result = read_replies(BufReader::with_capacity(READ_AT_ONCE, reader), &table, &of_task) => result,
                result = write_requests(writer, to_write) => result.map_err(|error| error.to_string()),
            };
            tracing::info!(address, why = why.err(), "the connection to a peer ended");
            // Dropping the requests ends their waiting.
            drop(table.lock().unwrap_or_else(PoisonError::into_inner).take());
        });
        let (next_number, task) = (AtomicU64::new(0), task.abort_handle());
        Ok((Connection { waiting, requests, next_number, progress, task }, about))
    }

    fn is_open(&self) -> bool {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The reply; `None`: the connection ended before it came.
    async fn request(&self, offset: u64, nr_bytes: u32) -> Option<(Status, Vec<u8>)> {
        // Relaxed: numbers that differ are all that it is for.
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let (reply, mut replied) = oneshot::channel();
        {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            let table = waiting.as_mut()?;
            if table.len() >= MOST_UNANSWERED {
                // Requests that their callers have given up, mostly.
                *waiting = None;
                self.task.abort();
                return None;
            }
            table.insert(number, Waiting { nr_bytes, reply });
        }
        self.requests.send(Request { number, offset, nr_bytes }.encode()).await.ok()?;
        // Relaxed, here and where it is counted: whether the number has changed is all that matters.
        let mut before = self.progress.load(Ordering::Relaxed);
        loop {
            match timeout(REPLY_TIMEOUT, &mut replied).await {
                Ok(reply) => return reply.ok(),
                Err(_) => {
                    let now = self.progress.load(Ordering::Relaxed);
                    if now == before {
                        break;
                    }
                    before = now;
                }
            }
        }
        self.task.abort();
        drop(self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take());
        None
    }
}

async fn read_replies(mut reader: impl AsyncRead + Unpin, table: &Table, progress: &AtomicU64) -> Result<(), String> {
    loop {
        let mut reply = [0; wire::REPLY_BYTES];
        reader.read_exact(&mut reply).await.map_err(|error| error.to_string())?;
        let reply = Reply::decode(&reply)?;
        let waiting = {
            let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
            table.as_mut().and_then(|table| table.remove(&reply.number)).ok_or("a reply to no request")?
        };
        if reply.status == Status::Bytes && reply.nr_bytes != waiting.nr_bytes {
            return Err("a reply has another length than its request".to_string());
        }
        let mut bytes = vec![0; reply.nr_bytes as usize];
        let mut rest = &mut bytes[..];
        progress.fetch_add(1, Ordering::Relaxed);
        while !rest.is_empty() {
            match reader.read(rest).await {
                Ok(0) => return Err("it ended in a reply".to_string()),
                Ok(nr_bytes) => rest = &mut rest[nr_bytes..],
                Err(error) => return Err(error.to_string()),
            }
            progress.fetch_add(1, Ordering::Relaxed);
        }
        // The reader may be gone.
        let _ = waiting.reply.send((reply.status, bytes));
    }
}

async fn write_requests(
    writer: impl AsyncWrite + Unpin,
    mut requests: mpsc::Receiver<[u8; wire::REQUEST_BYTES]>,
) -> io::Result<()> {
    let mut writer = BufWriter::new(writer);
    while let Some(request) = requests.recv().await {
        writer.write_all(&request).await?;
        if requests.is_empty() {
            writer.flush().await?;
        }
    }
    Ok(())
}

/// What a server says, for a message.
fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|character| !character.is_control()).collect()
}

impl Source for Peer {
    fn size_bytes(&self) -> u64 {
        self.about.size_bytes
    }

    fn identity(&self) -> Identity {
        self.about.identity
    }

    fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    fn block_identity(&self, block: u64) -> Identity {
        // By where they are from, too: a peer that misreports its snapshot's identity puts no bytes into
        // the cache of another source.
        let numbers = [self.granule_bytes.to_le_bytes(), block.to_le_bytes()];
        let server = [self.server.address.as_bytes(), self.server.snapshot.as_bytes()];
        let parts = [server[0], server[1], self.about.identity.as_bytes(), &numbers[0], &numbers[1]];
        Identity::new("peer's block", parts)
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.about.size_bytes)?;
            let parts = into.chunks_mut(MOST_REQUEST_BYTES as usize);
            let offsets = (offset..).step_by(MOST_REQUEST_BYTES as usize);
            let reads = parts.zip(offsets).map(|(part, at)| self.read_part(at, part));
            futures_util::future::try_join_all(reads).await.map(|_| ())
        }
        .boxed()
    }
}
