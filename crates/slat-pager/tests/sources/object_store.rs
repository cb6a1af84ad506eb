//! Snapshots in an object store: a real server of S3, failing as servers do.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use slat_pager::chunks::Location;
use slat_pager::chunks::pack::{PackOptions, pack};
use slat_pager::chunks::verify::verify;
use slat_pager::snapshot::{OpenWith, SnapshotName};
use slat_pager::source::cache::{BlockCache, CacheOptions};
use slat_pager::source::chunked::Chunked;
use slat_pager::source::objects::Objects;
use slat_pager::source::remote::{PART_BYTES, RemoteFile};
use slat_pager::source::{PAGE_BYTES, Source, SourceError};

use crate::bytes::{Counted, check_all, read, snapshot, snapshot_with};
use crate::s3::{BUCKET, Fault, Server};

async fn put(server: &Server, key: &str, bytes: Vec<u8>) {
    let (objects, path) = server.open(key);
    objects.put(&path, Bytes::from(bytes)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_byte_of_a_memory_file() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let bytes = snapshot(1, 1500);
    put(&server, "vm/mem", bytes.clone()).await;
    let (objects, path) = server.open("vm/mem");
    let source = RemoteFile::open(objects, path).await.unwrap();
    check_all(&source, &bytes, 3 * PART_BYTES + 4096).await;
    check_all(&source, &bytes, 512 << 10).await;
    assert!(matches!(read(&source, 1499 * PAGE_BYTES..1501 * PAGE_BYTES).await, Err(SourceError::OutOfRange { .. })));
    // By its name, behind a cache.
    let cache = BlockCache::new(&CacheOptions::default()).unwrap();
    let with = OpenWith { cache: Some(cache.clone()), store_options: server.options(), tls: None };
    let name: SnapshotName = format!("s3://{BUCKET}/vm/mem").parse().unwrap();
    let cached = name.open(&with).await.unwrap();
    assert_eq!(cached.identity(), source.identity());
    check_all(&*cached, &bytes, 4096).await;
    assert_eq!(cache.figures().nr_fetched, (bytes.len() as u64).div_ceil(PART_BYTES));
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_fail_for_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let bytes = snapshot(1, 1024);
    put(&server, "mem", bytes.clone()).await;
    for faults in [
        vec![Fault::Status(500), Fault::Status(503), Fault::Status(429), Fault::None],
        vec![
            Fault::ResetAfter(0),
            Fault::ResetAfter(100),
            Fault::ResetAfter(100_000),
            Fault::ResetAfter(700_000),
            Fault::None,
        ],
        vec![
            Fault::CloseAfter(0),
            Fault::CloseAfter(300_000),
            Fault::Status(502),
            Fault::CloseAfter(1_000_000),
            Fault::None,
        ],
        vec![Fault::Latency(Duration::from_millis(1))],
    ] {
        // Connections that are kept would not meet the faults: a client of its own.
        server.set_faults(&[Fault::None]);
        let (objects, path) = server.open("mem");
        let source = RemoteFile::open(objects, path).await.unwrap();
        let (objects, path) = server.open("mem");
        server.set_faults(&faults);
        let failing = RemoteFile::open(objects, path).await.unwrap();
        assert_eq!(source.identity(), failing.identity());
        check_all(&failing, &bytes, 4 << 20).await;
        check_all(&source, &bytes, 1 << 20).await;
    }
    assert!(server.nr_connections.load(Ordering::Relaxed) > 15);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_version_is_never_mixed_in() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    put(&server, "mem", snapshot(1, 1024)).await;
    let (objects, path) = server.open("mem");
    let source = RemoteFile::open(objects, path).await.unwrap();
    assert!(read(&source, 0..1 << 20).await.is_ok());
    // Readers go on while it is replaced: each read is of the first version, or none.
    let expected = snapshot(1, 1024);
    let reads = async {
        let mut nr_changed = 0;
        while nr_changed < 5 {
            match read(&source, 0..4 << 20).await {
                Ok(bytes) => assert!(bytes == expected, "bytes of another version"),
                Err(SourceError::Changed { .. }) => nr_changed += 1,
                // A file that the server is just replacing is not there.
                Err(error) => println!("meanwhile: {error}"),
            }
        }
    };
    futures_util::join!(reads, put(&server, "mem", snapshot(2, 1024)));
    let (objects, path) = server.open("mem");
    let other = RemoteFile::open(objects, path).await.unwrap();
    assert_ne!(other.identity(), source.identity());
    check_all(&other, &snapshot(2, 1024), 1 << 20).await;
    // A shorter one, then none.
    put(&server, "mem", snapshot(2, 1000)).await;
    assert!(matches!(read(&other, 0..4096).await, Err(SourceError::Changed { .. })));
    let (objects, path) = server.open("mem");
    objects.delete(&path).await.unwrap();
    let error = read(&other, 0..4096).await.unwrap_err();
    assert!(matches!(error, SourceError::Changed { .. }) && !error.may_pass(), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    put(&server, "mem", snapshot(1, 4)).await;
    put(&server, "short", vec![1; 100]).await;
    let open = |key: &str| {
        let (objects, path) = server.open(key);
        RemoteFile::open(objects, path)
    };
    assert!(matches!(open("none").await, Err(SourceError::NotThere { .. })));
    assert!(matches!(open("short").await, Err(SourceError::Malformed { .. })));
    let mut options = server.options();
    options[2].1 = "another".to_string();
    let url = format!("s3://{BUCKET}/mem").parse().unwrap();
    let (objects, path) = Objects::open(&url, &options).unwrap();
    let error = RemoteFile::open(objects, path).await.unwrap_err();
    assert!(matches!(error, SourceError::Refused { .. }) && !error.may_pass(), "{error}");
    for (name, value) in [("aws_endpiont", "http://localhost"), ("", "")] {
        let options = [(name.to_string(), value.to_string())];
        assert!(matches!(Objects::open(&url, &options), Err(SourceError::Malformed { .. })), "{name}");
    }
    for name in ["gopher://host/mem", "memory:///mem"] {
        assert!(matches!(Objects::open(&name.parse().unwrap(), &[]), Err(SourceError::Malformed { .. })), "{name}");
    }
}

/// What a store says of an object is taken from it.
#[derive(Debug)]
struct WithTag(InMemory, Option<&'static str>);

impl std::fmt::Display for WithTag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait::async_trait]
impl ObjectStore for WithTag {
    async fn get_opts(
        &self,
        at: &object_store::path::Path,
        mut options: object_store::GetOptions,
    ) -> object_store::Result<object_store::GetResult> {
        options.if_match = None;
        let mut result = self.0.get_opts(at, options).await?;
        result.meta.e_tag = self.1.map(str::to_string);
        Ok(result)
    }

    async fn put_opts(
        &self,
        at: &object_store::path::Path,
        payload: object_store::PutPayload,
        options: object_store::PutOptions,
    ) -> object_store::Result<object_store::PutResult> {
        self.0.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &object_store::path::Path,
        options: object_store::PutMultipartOptions,
    ) -> object_store::Result<Box<dyn object_store::MultipartUpload>> {
        self.0.put_multipart_opts(at, options).await
    }

    fn delete_stream(
        &self,
        at: futures_util::stream::BoxStream<'static, object_store::Result<object_store::path::Path>>,
    ) -> futures_util::stream::BoxStream<'static, object_store::Result<object_store::path::Path>> {
        self.0.delete_stream(at)
    }

    fn list(
        &self,
        prefix: Option<&object_store::path::Path>,
    ) -> futures_util::stream::BoxStream<'static, object_store::Result<object_store::ObjectMeta>> {
        self.0.list(prefix)
    }

    async fn list_with_delimiter(
        &self,
        prefix: Option<&object_store::path::Path>,
    ) -> object_store::Result<object_store::ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &object_store::path::Path,
        to: &object_store::path::Path,
        options: object_store::CopyOptions,
    ) -> object_store::Result<()> {
        self.0.copy_opts(from, to, options).await
    }
}

#[tokio::test]
async fn versions_that_cannot_be_told_apart_are_refused() {
    for (tag, is_enough) in [(None, false), (Some(""), false), (Some("W/\"1\""), false), (Some("\"1\""), true)] {
        let store = WithTag(InMemory::new(), tag);
        store.put(&"mem".into(), Bytes::from(snapshot(1, 4)).into()).await.unwrap();
        let opened = RemoteFile::open(Objects::new(Arc::new(store), "a test"), "mem".into()).await;
        assert_eq!(opened.is_ok(), is_enough, "{tag:?}: {opened:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_in_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let bytes = snapshot_with(1, 1003, |page| (100..400).contains(&page));
    let at = Location::open(&format!("s3://{BUCKET}/packed/vm.index"), &server.options()).unwrap();
    let source: Arc<dyn Source> = Counted::new(bytes.clone(), 4096, "to be packed");
    // Packing through a server that fails now and then.
    server.set_faults(&[Fault::Status(500), Fault::ResetAfter(0), Fault::ResetAfter(10), Fault::None]);
    let packed =
        pack(&source, &at, &PackOptions { chunk_bytes: 128 << 10, ..PackOptions::default() }, |_| {}).await.unwrap();
    assert_eq!(packed.nr_chunks, 32);
    let index = at.read_index().await.unwrap();
    assert!(verify(&at, &index, |_| {}).await.unwrap().is_empty());
    let with = OpenWith { store_options: server.options(), ..OpenWith::default() };
    let name: SnapshotName = format!("chunks:s3://{BUCKET}/packed/vm.index").parse().unwrap();
    let chunked = name.open(&with).await.unwrap();
    assert_eq!(chunked.identity(), packed.identity);
    check_all(&*chunked, &bytes, 1 << 20).await;
    // The same store as a folder of the server: one format.
    let here = Location::open(folder.path().join(BUCKET).join("packed/vm.index").to_str().unwrap(), &[]).unwrap();
    check_all(&Chunked::open(here).await.unwrap(), &bytes, 1 << 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_is_given_up_harms_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let bytes = snapshot(1, 1024);
    put(&server, "mem", bytes.clone()).await;
    let cache = BlockCache::new(&CacheOptions::default()).unwrap();
    let with = OpenWith { cache: Some(cache), store_options: server.options(), tls: None };
    let name: SnapshotName = format!("s3://{BUCKET}/mem").parse().unwrap();
    let source = name.open(&with).await.unwrap();
    for _ in 0..20 {
        // Begun, and dropped at its first wait.
        assert!(read(&*source, 0..4 << 20).now_or_never().is_none_or(|result| result.is_ok()));
    }
    check_all(&*source, &bytes, 1 << 20).await;
}
