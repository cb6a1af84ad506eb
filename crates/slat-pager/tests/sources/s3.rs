//! A server of S3 in this process, and a proxy before it that fails as a test says.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use slat_pager::source::objects::Objects;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub const BUCKET: &str = "snapshots";

/// What happens to a connection.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// Its first request is answered with this status, and it is closed.
    Status(u16),
    /// It is reset after so many bytes of answers.
    ResetAfter(usize),
    /// It is closed, as if all had been said, after so many bytes of answers.
    CloseAfter(usize),
    /// Each answer comes so much later.
    Latency(Duration),
}

/// The faults of connections in the order in which they are made; the last one is for all others.
pub type Faults = Arc<Mutex<Vec<Fault>>>;

/// A server with one bucket in a folder, behind a proxy.
pub struct Server {
    pub address: SocketAddr,
    pub faults: Faults,
    pub nr_connections: Arc<AtomicU64>,
}

impl Server {
    pub async fn start(folder: &Path) -> Server {
        std::fs::create_dir_all(folder.join(BUCKET)).unwrap();
        let service = {
            let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder).unwrap());
            builder.set_auth(SimpleAuth::from_single("an-id", "a-secret"));
            builder.build()
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let behind = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = service.clone();
                tokio::spawn(async move {
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = proxy.local_addr().unwrap();
        let faults: Faults = Arc::new(Mutex::new(vec![Fault::None]));
        let nr_connections = Arc::new(AtomicU64::new(0));
        let (faults_of_proxy, counter) = (faults.clone(), nr_connections.clone());
        tokio::spawn(async move {
            loop {
                let (client, _) = proxy.accept().await.unwrap();
                counter.fetch_add(1, Ordering::Relaxed);
                let fault = {
                    let mut faults = faults_of_proxy.lock().unwrap();
                    if faults.len() > 1 { faults.remove(0) } else { faults[0] }
                };
                tokio::spawn(pass(client, behind, fault));
            }
        });
        Server { address, faults, nr_connections }
    }

    /// What a client is configured with.
    pub fn options(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        [
            ("aws_endpoint", endpoint.as_str()),
            ("aws_access_key_id", "an-id"),
            ("aws_secret_access_key", "a-secret"),
            ("aws_region", "us-east-1"),
            ("allow_http", "true"),
        ]
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .to_vec()
    }

    pub fn open(&self, key: &str) -> (Objects, object_store::path::Path) {
        let url = format!("s3://{BUCKET}/{key}").parse().unwrap();
        Objects::open(&url, &self.options()).unwrap()
    }

    pub fn set_faults(&self, faults: &[Fault]) {
        *self.faults.lock().unwrap() = faults.to_vec();
    }
}

/// Passes a connection on, with a fault.
async fn pass(client: TcpStream, behind: SocketAddr, fault: Fault) {
    let server = TcpStream::connect(behind).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    if let Fault::Status(status) = fault {
        let mut request = vec![0; 16 << 10];
        let _ = from_client.read(&mut request).await;
        let answer = format!("HTTP/1.1 {status} No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        let _ = to_client.write_all(answer.as_bytes()).await;
        return;
    }
    tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
    });
    let mut nr_passed = 0;
    let mut bytes = vec![0; 64 << 10];
    loop {
        let Ok(nr_read @ 1..) = from_server.read(&mut bytes).await else { return };
        let nr_left = match fault {
            Fault::ResetAfter(most) | Fault::CloseAfter(most) => most.saturating_sub(nr_passed),
            Fault::Latency(latency) => {
                tokio::time::sleep(latency).await;
                nr_read
            }
            _ => nr_read,
        };
        if to_client.write_all(&bytes[..nr_read.min(nr_left)]).await.is_err() {
            return;
        }
        nr_passed += nr_read;
        if nr_left < nr_read {
            if matches!(fault, Fault::ResetAfter(_)) {
                // Closing with no time to linger sends a reset.
                let _ = rustix::net::sockopt::set_socket_linger(to_client.as_ref(), Some(Duration::ZERO));
            }
            return;
        }
    }
}
