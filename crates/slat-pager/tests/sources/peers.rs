//! Peers: every byte, lost connections, strangers, and peers that misbehave.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use slat_pager::source::peer::{LocalAddress, Peer, PeerServer, TlsFiles};
use slat_pager::source::{PAGE_BYTES, Source, SourceError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::bytes::{Counted, check_all, read, snapshot};

/// An authority, and the files of a side that it knows.
pub fn certificates(folder: &Path, authority: &str) -> TlsFiles {
    let folder = folder.join(authority);
    std::fs::create_dir_all(&folder).unwrap();
    let mut of_authority = CertificateParams::new(Vec::new()).unwrap();
    of_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(of_authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["localhost".to_string(), "127.0.0.1".to_string()])
        .unwrap()
        .signed_by(&key, &issuer)
        .unwrap();
    let files = TlsFiles {
        certificates: folder.join("certificate.pem"),
        key: folder.join("key.pem"),
        authorities: folder.join("authority.pem"),
    };
    std::fs::write(&files.certificates, certificate.pem()).unwrap();
    std::fs::write(&files.key, key.serialize_pem()).unwrap();
    std::fs::write(&files.authorities, issuer.pem()).unwrap();
    files
}

async fn serve(
    tls: &TlsFiles,
    address: SocketAddr,
    name: &str,
    source: Arc<dyn Source>,
) -> (SocketAddr, JoinHandle<()>) {
    let snapshots = HashMap::from([(name.to_string(), source)]);
    let server = PeerServer::bind(address, tls, snapshots).await.unwrap();
    (server.address().unwrap(), tokio::spawn(server.serve()))
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A relay whose connections can be cut.
struct Relay {
    address: SocketAddr,
    cut: tokio::sync::watch::Sender<u64>,
    /// Where connections go.
    behind: tokio::sync::watch::Sender<SocketAddr>,
}

impl Relay {
    async fn start(behind: SocketAddr) -> Relay {
        let listener = TcpListener::bind(any_port()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, cuts) = tokio::sync::watch::channel(0);
        let (behind, to) = tokio::sync::watch::channel(behind);
        tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let (mut cuts, to) = (cuts.clone(), *to.borrow());
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(to).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        Relay { address, cut, behind }
    }

    fn cut_all(&self) {
        self.cut.send_modify(|number| *number += 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_byte_for_many_readers() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificates(folder.path(), "one");
    let bytes = Arc::new(snapshot(1, 1003));
    let source = Counted::new(bytes.to_vec(), 64 << 10, "shared");
    let (address, _task) = serve(&tls, any_port(), "vm/7", source.clone()).await;
    let peer = Arc::new(Peer::open(&format!("localhost:{}", address.port()), "vm/7", &tls).await.unwrap());
    assert_eq!((peer.identity(), peer.granule_bytes()), (source.identity(), 64 << 10));
    assert_ne!(peer.block_identity(0), source.block_identity(0), "what a peer says is no other source's");
    assert_ne!(peer.block_identity(0), peer.block_identity(1));
    let readers: Vec<_> = (1..20u64)
        .map(|number| {
            let (peer, bytes) = (peer.clone(), bytes.clone());
            tokio::spawn(async move { check_all(&*peer, &bytes, number * 60_000).await })
        })
        .collect();
    for reader in readers {
        reader.await.unwrap();
    }
    check_all(&*peer, &bytes, 4 << 20).await;
    assert!(matches!(read(&*peer, 1003 * PAGE_BYTES..1004 * PAGE_BYTES).await, Err(SourceError::OutOfRange { .. })));
    // What passes with the server: its errors that may, and those that do not.
    source.nr_failures.store(2, Ordering::Relaxed);
    assert!(read(&*peer, 0..4096).await.unwrap() == bytes[..4096]);
    source.nr_failures.store(1000, Ordering::Relaxed);
    assert!(matches!(read(&*peer, 0..4096).await, Err(SourceError::Unavailable { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_of_one_host_need_no_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = snapshot(1, 1003);
    let path = folder.path().join("socket");
    for address in [LocalAddress::Unix(path.clone()), LocalAddress::Tcp(any_port())] {
        let source = Counted::new(bytes.clone(), 64 << 10, "shared");
        let snapshots = HashMap::from([("vm".to_string(), source.clone() as Arc<dyn Source>)]);
        let server = PeerServer::bind_local(&address, snapshots).await.unwrap();
        let address = server.address().map(LocalAddress::Tcp).unwrap_or(address);
        let task = tokio::spawn(server.serve());
        let peer = Peer::open_local(&address, "vm").await.unwrap();
        assert_eq!(peer.identity(), source.identity());
        check_all(&peer, &bytes, 100_000).await;
        let error = Peer::open_local(&address, "none").await.unwrap_err();
        assert!(matches!(error, SourceError::NotThere { .. }), "{error}");
        // The name of a socket goes with its server, and its connections do.
        task.abort();
        let _ = task.await;
        let error = read(&peer, 0..4096).await.unwrap_err();
        assert!(matches!(error, SourceError::Unavailable { .. }), "{error}");
    }
    assert!(!path.exists());
    // What a killed server has left is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    drop(PeerServer::bind_local(&LocalAddress::Unix(path.clone()), HashMap::new()).await.unwrap());
    assert!(!path.exists());
    std::fs::write(&path, "a file of another").unwrap();
    let taken = PeerServer::bind_local(&LocalAddress::Unix(path.clone()), HashMap::new()).await;
    assert!(matches!(taken, Err(SourceError::Io { .. })) && path.exists());
    // What other hosts reach takes TLS.
    let outside = LocalAddress::Tcp("0.0.0.0:0".parse().unwrap());
    assert!(matches!(PeerServer::bind_local(&outside, HashMap::new()).await, Err(SourceError::Io { .. })));
    assert!(matches!(Peer::open_local(&outside, "vm").await, Err(SourceError::Refused { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_cut_cost_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificates(folder.path(), "one");
    let bytes = Arc::new(snapshot(1, 2000));
    let (behind, server) = serve(&tls, any_port(), "vm", Counted::new(bytes.to_vec(), 64 << 10, "shared")).await;
    let relay = Relay::start(behind).await;
    let peer = Arc::new(Peer::open(&relay.address.to_string(), "vm", &tls).await.unwrap());
    let nr_read = Arc::new(AtomicUsize::new(0));
    let reader = {
        let (peer, bytes, nr_read) = (peer.clone(), bytes.clone(), nr_read.clone());
        tokio::spawn(async move {
            for part_bytes in [100_000, 4096, 1 << 20, 30_000] {
                for (part, start) in bytes.chunks(part_bytes).zip((0..).step_by(part_bytes)) {
                    assert!(read(&*peer, start..start + part.len() as u64).await.unwrap() == part);
                    nr_read.fetch_add(1, Ordering::Relaxed);
                }
            }
        })
    };
    while !reader.is_finished() {
        let before = nr_read.load(Ordering::Relaxed);
        relay.cut_all();
        tokio::time::sleep(Duration::from_millis(60)).await;
        // A slow machine would cut one read again and again, until the peer gives up.
        while nr_read.load(Ordering::Relaxed) == before && !reader.is_finished() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    reader.await.unwrap();
    // Another snapshot of the same name behind the same address: not a byte of it.
    let other = Counted::new(snapshot(2, 2000), 64 << 10, "another");
    let (behind, _server) = serve(&tls, any_port(), "vm", other).await;
    relay.behind.send_replace(behind);
    server.abort();
    relay.cut_all();
    let error = read(&*peer, 0..4096).await.unwrap_err();
    assert!(matches!(error, SourceError::Changed { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (certificates(folder.path(), "one"), certificates(folder.path(), "two"));
    let (address, _task) = serve(&one, any_port(), "vm", Counted::new(snapshot(1, 16), 4096, "shared")).await;
    let open = |tls: TlsFiles, name: &'static str| async move { Peer::open(&address.to_string(), name, &tls).await };
    assert!(open(one.clone(), "vm").await.is_ok());
    assert!(matches!(open(one.clone(), "none").await, Err(SourceError::NotThere { .. })));
    let error = open(two.clone(), "vm").await.unwrap_err();
    assert!(matches!(error, SourceError::Refused { .. }), "another authority on both sides: {error}");
    // A client that trusts the server, and that it does not know.
    let stranger = TlsFiles { authorities: one.authorities.clone(), ..two.clone() };
    let error = open(stranger, "vm").await.unwrap_err();
    assert!(matches!(error, SourceError::Refused { .. } | SourceError::Unavailable { .. }), "{error}");
    let key_of_another = TlsFiles { key: two.key.clone(), ..one.clone() };
    assert!(matches!(open(key_of_another, "vm").await, Err(SourceError::Io { .. })));
    let no_file = TlsFiles { key: folder.path().join("none"), ..one.clone() };
    assert!(matches!(open(no_file, "vm").await, Err(SourceError::Io { .. })));
    // No TLS at all.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"slatpeer and so on, for some bytes that are no TLS at all").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.len() < 64, "an alert of TLS at most");
    // The server goes on.
    assert!(open(one, "vm").await.is_ok());
    let silent = TcpListener::bind(any_port()).await.unwrap().local_addr().unwrap();
    assert!(matches!(Peer::open(&silent.to_string(), "vm", &two).await, Err(SourceError::Unavailable { .. })));
    for address in ["nowhere", "host name:1", ""] {
        assert!(Peer::open(address, "vm", &two).await.is_err(), "{address}");
    }
}

/// A TLS connection of a client that has a certificate, and does not keep to the protocol.
async fn speak(address: SocketAddr, tls: &TlsFiles) -> tokio_rustls::client::TlsStream<TcpStream> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    let mut authorities = rustls::RootCertStore::empty();
    authorities.add(CertificateDer::from_pem_file(&tls.authorities).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(authorities)
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_file(&tls.certificates).unwrap()],
            PrivateKeyDer::from_pem_file(&tls.key).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"slat-peer/1".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap()
}

fn greeting(version: u32, nr_bytes: u32, name: &[u8]) -> Vec<u8> {
    [b"slatpeer", &version.to_le_bytes()[..], &nr_bytes.to_le_bytes(), name].concat()
}

fn request(number: u64, offset: u64, nr_bytes: u32, zero: u32) -> Vec<u8> {
    [&number.to_le_bytes()[..], &offset.to_le_bytes(), &nr_bytes.to_le_bytes(), &zero.to_le_bytes()].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_ends_what_is_none_of_the_protocol() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificates(folder.path(), "one");
    let bytes = snapshot(1, 16);
    let (address, _task) = serve(&tls, any_port(), "vm", Counted::new(bytes.clone(), 4096, "shared")).await;
    for (what, greeting, nr_answered) in [
        ("no greeting", b"GET / HTTP/1.1\r\n\r\n".to_vec(), 0),
        ("a long name", greeting(1, u32::MAX, b"vm"), 0),
        ("no name", greeting(1, 0, b""), 0),
        ("another version", greeting(2, 2, b"vm"), 64),
        ("a name that is none", greeting(1, 2, &[0xff, 0xfe]), 64),
    ] {
        println!("{what}");
        let mut stream = speak(address, &tls).await;
        stream.write_all(&greeting).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert_eq!(answer.len(), nr_answered, "{what}");
    }
    for (what, request) in [
        ("behind the end", request(1, 16 * PAGE_BYTES, 4096, 0)),
        ("wraps", request(1, u64::MAX, 4096, 0)),
        ("nothing", request(1, 0, 0, 0)),
        ("too much", request(1, 0, u32::MAX, 0)),
        ("not zero", request(1, 0, 4096, 1)),
    ] {
        println!("{what}");
        let mut stream = speak(address, &tls).await;
        stream.write_all(&greeting(1, 2, b"vm")).await.unwrap();
        stream.write_all(&request).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert_eq!(answer.len(), 64, "{what}");
    }
    // Many requests at once, in any order, by a client that reads late.
    let mut stream = speak(address, &tls).await;
    stream.write_all(&greeting(1, 2, b"vm")).await.unwrap();
    for number in 0..200u64 {
        stream.write_all(&request(number, number % 16 * PAGE_BYTES, 4096, 0)).await.unwrap();
    }
    // TLS keeps what could not be sent at once.
    stream.flush().await.unwrap();
    stream.read_exact(&mut [0; 64]).await.unwrap();
    let mut seen = [false; 200];
    for _ in 0..200 {
        let mut reply = [0; 16 + 4096];
        stream.read_exact(&mut reply).await.unwrap();
        let number = u64::from_le_bytes(reply[..8].try_into().unwrap());
        assert!(reply[16..] == bytes[(number % 16) as usize * 4096..][..4096]);
        assert!(!std::mem::replace(&mut seen[number as usize], true));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_take_no_replies_hold_up_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificates(folder.path(), "one");
    let bytes = snapshot(1, 256);
    let source = Counted::new(bytes.clone(), 4096, "shared");
    let reads = Arc::clone(&source);
    let (address, _task) = serve(&tls, any_port(), "vm", source).await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        let mut stream = speak(address, &tls).await;
        stream.write_all(&greeting(1, 2, b"vm")).await.unwrap();
        for number in 0..64 {
            stream.write_all(&request(number, 0, 1 << 20, 0)).await.unwrap();
        }
        stream.flush().await.unwrap();
        slow.push(stream);
    }
    // Each has the replies that the server keeps for it.
    while reads.nr_reads.load(Ordering::Relaxed) < 4 * 4 {
        tokio::task::yield_now().await;
    }
    let peer = Peer::open(&address.to_string(), "vm", &tls).await.unwrap();
    assert!(read(&peer, 0..bytes.len() as u64).await.unwrap() == bytes);
}

/// A server with a certificate, that answers as `wrong` says after a right greeting.
async fn serve_wrong(tls: &TlsFiles, wrong: impl Fn(u64) -> Vec<u8> + Send + Sync + 'static) -> SocketAddr {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_file(&tls.certificates).unwrap()],
            PrivateKeyDer::from_pem_file(&tls.key).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"slat-peer/1".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let wrong = Arc::new(wrong);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, wrong) = (acceptor.clone(), wrong.clone());
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await.ok()?;
                stream.read_exact(&mut [0; 18]).await.ok()?;
                let greeting = [
                    b"slatpeer",
                    &1u32.to_le_bytes()[..],
                    &0u32.to_le_bytes(),
                    &65536u64.to_le_bytes(),
                    &4096u64.to_le_bytes(),
                    &[7; 32],
                ]
                .concat();
                stream.write_all(&greeting).await.ok()?;
                stream.flush().await.ok()?;
                loop {
                    let mut request = [0; 24];
                    stream.read_exact(&mut request).await.ok()?;
                    let number = u64::from_le_bytes(request[..8].try_into().unwrap());
                    stream.write_all(&wrong(number)).await.ok()?;
                    stream.flush().await.ok()?;
                }
                #[expect(unreachable_code, reason = "the type of the block")]
                Some(())
            });
        }
    });
    address
}

fn reply(number: u64, status: u32, nr_bytes: u32, content: &[u8]) -> Vec<u8> {
    [&number.to_le_bytes()[..], &status.to_le_bytes(), &nr_bytes.to_le_bytes(), content].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_takes_no_wrong_reply() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificates(folder.path(), "one");
    type Wrong = fn(u64) -> Vec<u8>;
    let replies: [(&str, Wrong); 6] = [
        ("another length", |number| reply(number, 0, 2048, &[1; 2048])),
        ("a reply to no request", |number| reply(number + 1, 0, 4096, &[1; 4096])),
        ("a status that is none", |number| reply(number, 9, 4096, &[1; 4096])),
        ("too long", |number| reply(number, 0, u32::MAX, &[1; 4096])),
        ("zeros with bytes", |number| reply(number, 1, 4096, &[1; 4096])),
        ("a long text", |number| reply(number, 2, 1 << 20, &[b'a'; 4096])),
    ];
    for (what, wrong) in replies {
        let address = serve_wrong(&tls, wrong).await;
        let peer = Peer::open(&address.to_string(), "vm", &tls).await.unwrap();
        let error = read(&peer, 0..4096).await.unwrap_err();
        assert!(matches!(error, SourceError::Unavailable { .. }), "{what}: {error}");
    }
    let address = serve_wrong(&tls, |number| reply(number, 3, 9, b"no\x1b[2J!!!")).await;
    let peer = Peer::open(&address.to_string(), "vm", &tls).await.unwrap();
    let error = read(&peer, 0..4096).await.unwrap_err();
    assert!(matches!(&error, SourceError::Refused { why, .. } if why == "no[2J!!!"), "{error}");
    let address = serve_wrong(&tls, |number| reply(number, 1, 0, b"")).await;
    let peer = Peer::open(&address.to_string(), "vm", &tls).await.unwrap();
    assert_eq!(read(&peer, 0..4096).await.unwrap(), vec![0; 4096]);
}
