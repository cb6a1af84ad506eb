//! Servers that are programs of their own: nginx (HTTP), Azurite (Azure), fake-gcs-server (Google
//! Cloud Storage). Each stores snapshots, serves a guest's pages from them, and is asked again after
//! an object has changed. A server that is not in PATH is skipped, which is said.
//!
//! Two of them are not what they stand for in one point. nginx makes tags of the size and the time
//! in seconds: a test gives a new file another time. fake-gcs-server stores nothing by the protocol
//! that the crate `object_store` speaks, and ignores `If-Match`: objects come there by its other
//! protocol, and the reader notices by their tags that they have changed.

#[path = "support/registered.rs"]
mod registered;
mod support;

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use registered::{Guest, Kind, copy_of, userfaultfd};
use slat_pager::chunks::Location;
use slat_pager::chunks::pack::{PackOptions, pack};
use slat_pager::chunks::verify::verify;
use slat_pager::snapshot::{OpenWith, SnapshotName};
use slat_pager::source::cache::{BlockCache, CacheOptions};
use slat_pager::source::objects::Objects;
use slat_pager::source::{Identity, Source, SourceError};
use slat_pager::userfaultfd::RegisterMode;
use support::bytes;

const SEED: u64 = 57;
/// The container, or bucket, where a server has such.
const CONTAINER: &str = "snapshots";
/// Not whole blocks: the last one is shorter.
const SIZE: usize = (3 << 20) + (64 << 10);

/// The path of a program; `None` if there is none, which is said.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian's nginx is in the last one, which only root has in its PATH.
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    if found.is_none() {
        println!("skipped: no {name} in PATH");
    }
    found
}

/// A server that runs, until this is dropped.
struct Running {
    child: Child,
    folder: tempfile::TempDir,
    port: u16,
}

impl Running {
    /// Runs what `command` makes of a folder and a port, and waits until it listens.
    fn start(command: impl FnOnce(&std::path::Path, u16) -> Command) -> Running {
        let folder = tempfile::tempdir().unwrap();
        // Free a moment ago.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = command(folder.path(), port).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut running = Running { child, folder, port };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(running.child.try_wait().unwrap().is_none(), "the server has ended");
            assert!(start.elapsed() < Duration::from_secs(60), "the server does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A store at a server: URLs of its objects begin with `url`.
struct Store {
    url: String,
    options: Vec<(String, String)>,
    /// Where objects are stored by Google's JSON API; `None`: by the pager's own means.
    json_api: Option<String>,
}

impl Store {
    fn new(url: &str, options: &[(&str, &str)]) -> Store {
        let options = options.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Store { url: url.to_string(), options, json_api: None }
    }

    async fn put(&self, key: &str, bytes: Vec<u8>) {
        if let Some(endpoint) = &self.json_api {
            let key = key.replace('/', "%2F");
            let url = format!("{endpoint}/upload/storage/v1/b/{CONTAINER}/o?uploadType=media&name={key}");
            let request = client().post(url).body(bytes);
            return make(request).await;
        }
        let url = format!("{}/{key}", self.url).parse().unwrap();
        let (objects, path) = Objects::open(&url, &self.options).unwrap();
        objects.put(&path, Bytes::from(bytes)).await.unwrap();
    }

    /// Packs a snapshot to `packed/vm.index`, and returns what tells it from others.
    async fn pack(&self, source: &Arc<dyn Source>) -> Identity {
        let options = PackOptions { chunk_bytes: 128 << 10, ..PackOptions::default() };
        let folder = tempfile::tempdir().unwrap();
        let to = match &self.json_api {
            None => Location::open(&format!("{}/packed/vm.index", self.url), &self.options),
            Some(_) => Location::open(folder.path().join("vm.index").to_str().unwrap(), &[]),
        };
        let packed = pack(source, &to.unwrap(), &options, |_| {}).await.unwrap();
        let mut folders = vec![folder.path().to_path_buf()];
        while let Some(next) = folders.pop() {
            for path in fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let key = path.strip_prefix(folder.path()).unwrap().to_str().unwrap();
                self.put(&format!("packed/{key}"), fs::read(&path).unwrap()).await;
            }
        }
        packed.identity
    }

    /// Opens a snapshot by its name; `{}` there is the store.
    async fn open(&self, name: &str, cache: Option<Arc<BlockCache>>) -> Result<Arc<dyn Source>, SourceError> {
        let name: SnapshotName = name.replace("{}", &self.url).parse().unwrap();
        name.open(&OpenWith { cache, store_options: self.options.clone(), tls: None }).await
    }

    /// All that a store is for. `is_replaced` is called after an object was replaced.
    async fn is_used(&self, is_replaced: impl Fn()) {
        let content = bytes(SEED, 0..SIZE as u64);
        assert!(matches!(self.open("{}/none", None).await, Err(SourceError::NotThere { .. })));
        self.put("vm/mem", content.clone()).await;
        let source = self.open("{}/vm/mem", None).await.unwrap();
        check_all(&*source, &content).await;

        let packed = self.pack(&source).await;
        let to = Location::open(&format!("{}/packed/vm.index", self.url), &self.options).unwrap();
        assert!(verify(&to, &to.read_index().await.unwrap(), |_| {}).await.unwrap().is_empty());
        let chunked = self.open("chunks:{}/packed/vm.index", None).await.unwrap();
        assert_eq!(chunked.identity(), packed);
        check_all(&*chunked, &content).await;

        for name in ["{}/vm/mem", "chunks:{}/packed/vm.index"] {
            let cache = BlockCache::new(&CacheOptions::default()).unwrap();
            let source = self.open(name, Some(cache)).await.unwrap();
            tokio::task::spawn_blocking(|| serve_a_guest(source)).await.unwrap();
        }

        // Another version of the same size.
        self.put("vm/mem", bytes(SEED + 1, 0..SIZE as u64)).await;
        is_replaced();
        let mut page = [0; 4096];
        let error = source.read(0, &mut page).await.unwrap_err();
        assert!(matches!(error, SourceError::Changed { .. }) && !error.may_pass(), "{error}");
        let other = self.open("{}/vm/mem", None).await.unwrap();
        assert_ne!(other.identity(), source.identity());
        check_all(&*other, &bytes(SEED + 1, 0..SIZE as u64)).await;
    }
}

async fn check_all(source: &dyn Source, content: &[u8]) {
    assert_eq!(source.size_bytes(), content.len() as u64);
    for (number, part) in (0..).zip(content.chunks(300 << 10)) {
        let mut found = vec![0; part.len()];
        source.read(number * (300 << 10), &mut found).await.unwrap();
        assert!(found == part, "part {number} differs");
    }
}

/// Four threads touch all pages of a guest, and verify each byte.
fn serve_a_guest(source: Arc<dyn Source>) {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, SIZE, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let vm = slat_pager::attach(copy_of(&userfaultfd), &[guest.region()], source).unwrap();
    thread::scope(|scope| {
        for nr in 0..4 {
            let guest = &guest;
            scope.spawn(move || (nr..guest.nr_pages()).step_by(4).for_each(|page| guest.verify(page, SEED)));
        }
    });
    support::until_present(SIZE as u64, &vm);
}

#[tokio::test(flavor = "multi_thread")]
async fn nginx() {
    let Some(program) = program("nginx") else { return };
    let server = Running::start(|folder, port| {
        let at = folder.display();
        fs::create_dir(folder.join("files")).unwrap();
        let configuration = format!(
            "daemon off; master_process off; pid {at}/pid; error_log {at}/errors;
            events {{}}
            http {{
                access_log off; client_max_body_size 64m;
                client_body_temp_path {at}/bodies; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/fastcgi;
                uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;
                server {{
                    listen 127.0.0.1:{port}; root {at}/files;
                    dav_methods PUT DELETE; create_full_put_path on;
                }}
            }}"
        );
        fs::write(folder.join("nginx.conf"), configuration).unwrap();
        let mut command = Command::new(program);
        command.arg("-p").arg(folder).arg("-c").arg(folder.join("nginx.conf")).arg("-e").arg(folder.join("errors"));
        command
    });
    let store = Store::new(&format!("http://127.0.0.1:{}", server.port), &[]);
    let file = server.folder.path().join("files/vm/mem");
    // Its tags are made of the size and the time in seconds.
    store.is_used(|| touch(&file)).await;
}

/// Gives a file a time of its own.
fn touch(file: &std::path::Path) {
    File::options().write(true).open(file).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
}

fn client() -> reqwest::Client {
    // A client is not made without a provider of ciphers, also where it needs none.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// Has a server make a place for objects.
async fn make(request: reqwest::RequestBuilder) {
    let answer = request.send().await.unwrap();
    assert!(answer.status().is_success(), "{answer:?}");
}

/// The account that Azurite has, with its key.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

#[tokio::test(flavor = "multi_thread")]
async fn azurite() {
    let Some(program) = program("azurite-blob") else { return };
    let server = Running::start(|folder, port| {
        let mut command = Command::new(program);
        command.args(["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--blobHost", "127.0.0.1"]);
        command.args(["--blobPort", &port.to_string()]).arg("--location").arg(folder);
        command
    });
    let endpoint = format!("http://127.0.0.1:{}/{ACCOUNT}", server.port);
    // The crate has no call that makes a container.
    let url = format!("{endpoint}/{CONTAINER}?restype=container");
    let mut request = hyper::http::Request::put(&url).body(object_store::client::HttpRequestBody::empty()).unwrap();
    let credential = AzureCredential::AccessKey(AzureAccessKey::try_new(KEY).unwrap());
    AzureAuthorizer::new(&credential, ACCOUNT).try_authorize(&mut request).unwrap();
    make(client().put(&url).headers(request.headers().clone())).await;
    let options = [
        ("azure_storage_account_name", ACCOUNT),
        ("azure_storage_account_key", KEY),
        ("azure_storage_endpoint", &endpoint),
        ("allow_http", "true"),
    ];
    Store::new(&format!("az://{CONTAINER}"), &options).is_used(|| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fake_gcs_server() {
    let Some(program) = program("fake-gcs-server") else { return };
    let server = Running::start(|_, port| {
        let mut command = Command::new(program);
        command.args(["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-log-level", "error"]);
        command.args(["-port", &port.to_string(), "-public-host", &format!("127.0.0.1:{port}")]);
        command
    });
    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let url = format!("{endpoint}/storage/v1/b?project=tests");
    make(client().post(url).body(format!(r#"{{"name": "{CONTAINER}"}}"#))).await;
    let options = [("google_base_url", &endpoint[..]), ("google_skip_signature", "true"), ("allow_http", "true")];
    let mut store = Store::new(&format!("gs://{CONTAINER}"), &options);
    store.json_api = Some(endpoint);
    store.is_used(|| {}).await;
}
