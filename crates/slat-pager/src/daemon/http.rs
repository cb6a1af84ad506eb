//! Metrics for Prometheus, over HTTP, to this machine only.
//!
//! # Guarantees
//! At most `MOST_CONNECTIONS` connections at once, each for one request and a few seconds.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::{Encoder, Registry, TextEncoder};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

use crate::config::MetricsAddress;
use crate::linux::unix_socket;

const MOST_CONNECTIONS: usize = 16;
const LONGEST: Duration = Duration::from_secs(5);

/// A listener that has no runtime yet.
#[derive(Debug)]
pub enum Listener {
    /// On a loopback address.
    Tcp(std::net::TcpListener),
    /// On a Unix socket.
    Unix(std::os::unix::net::UnixListener),
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    /// Of the socket.
    pub fn bind(address: &MetricsAddress) -> io::Result<Listener> {
        match address {
            MetricsAddress::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
            MetricsAddress::Unix(path) => {
                let listener = unix_socket::bind(path)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Unix(listener))
            }
        }
    }

    /// Serves `registry`, until the task is dropped.
    ///
    /// # Errors
    /// The listener does not go into the runtime.
    pub async fn serve(self, registry: Registry) -> io::Result<()> {
        let free = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        match self {
            Listener::Tcp(listener) => {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                loop {
                    answer(&free, &registry, listener.accept().await.map(|(stream, _)| stream)).await;
                }
            }
            Listener::Unix(listener) => {
                let listener = tokio::net::UnixListener::from_std(listener)?;
                loop {
                    answer(&free, &registry, listener.accept().await.map(|(stream, _)| stream)).await;
                }
            }
        }
    }
}

async fn answer<S>(free: &Arc<Semaphore>, registry: &Registry, accepted: io::Result<S>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Ok(stream) = accepted else {
        // No descriptors, for now.
        tokio::time::sleep(Duration::from_millis(100)).await;
        return;
    };
    let permit = Arc::clone(free).acquire_owned().await;
    let registry = registry.clone();
    tokio::spawn(async move {
        let service = service_fn(|request: Request<Incoming>| {
            let response = respond(&request, &registry);
            async { Ok::<_, Infallible>(response) }
        });
        let mut server = http1::Builder::new();
        let server = server.timer(TokioTimer::new()).header_read_timeout(LONGEST).keep_alive(false);
        let _ = tokio::time::timeout(LONGEST, server.serve_connection(TokioIo::new(stream), service)).await;
        drop(permit);
    });
}

fn respond(request: &Request<Incoming>, registry: &Registry) -> Response<Full<Bytes>> {
    let with_status = |status| {
        let mut response = Response::new(Full::new(Bytes::new()));
        *response.status_mut() = status;
        response
    };
    if request.method() != Method::GET {
        return with_status(StatusCode::METHOD_NOT_ALLOWED);
    }
    if request.uri().path() != "/metrics" {
        return with_status(StatusCode::NOT_FOUND);
    }
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    if encoder.encode(&registry.gather(), &mut text).is_err() {
        return with_status(StatusCode::INTERNAL_SERVER_ERROR);
    }
    let mut response = Response::new(Full::new(Bytes::from(text)));
    if let Ok(kind) = encoder.format_type().parse() {
        response.headers_mut().insert(CONTENT_TYPE, kind);
    }
    response
}
