//! The names of snapshots, as options and config files have them.
//!
//! | name | what it is |
//! |---|---|
//! | `PATH` or `file:PATH` | a memory file |
//! | `layers:BASE,DIFF,...` | a memory file and what later snapshots changed |
//! | `chunks:PATH.index` or `chunks:URL.index` | a snapshot that `slat-pager pack` made |
//! | `s3://...`, `gs://...`, `az://...`, `https://...` | a memory file in an object store |
//! | `peer:HOST:PORT/NAME` | what another pager shares, by TLS |
//! | `peer:unix:PATH/NAME` | what a process of this host shares |
//!
//! What a name means is never told by the bytes that are found there: guests write those.

use std::fmt::{self, Debug, Display, Formatter};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;
use url::Url;

use crate::chunks::{INDEX_SUFFIX, Location};
use crate::source::cache::{BlockCache, Cached};
use crate::source::chunked::Chunked;
use crate::source::layers::{Layer, Layers};
use crate::source::memory_file::MemoryFile;
use crate::source::objects::{Objects, without_secrets};
use crate::source::peer::{LocalAddress, Peer, TlsFiles};
use crate::source::remote::RemoteFile;
use crate::source::{Source, SourceError, blocking};

/// The name of a snapshot.
#[derive(Clone, PartialEq, Eq)]
pub enum SnapshotName {
    /// A memory file.
    File(PathBuf),
    /// A memory file, and layers above it.
    Layers(PathBuf, Vec<PathBuf>),
    /// A packed snapshot: the path or URL of its index.
    Chunks(String),
    /// A memory file in an object store.
    Object(Url),
    /// A snapshot of another pager.
    Peer {
        /// Host and port, or a [`LocalAddress`].
        address: String,
        /// What it is called there.
        name: String,
    },
}

/// Why a text is no name of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{name}` names no snapshot: {why}")]
pub struct NameError {
    name: String,
    why: String,
}

/// The schemes of object stores.
const STORES: [&str; 10] = ["s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https"];

impl FromStr for SnapshotName {
    type Err = NameError;

    fn from_str(name: &str) -> Result<SnapshotName, NameError> {
        let wrong = |why: &str| NameError { name: without_secrets(name), why: why.to_string() };
        if name.is_empty() {
            return Err(wrong("it is empty"));
        }
        if let Some((scheme, _)) = name.split_once("://") {
            if scheme.starts_with("chunks:") {
                return chunks(name).ok_or_else(|| wrong("the name of an index ends in .index"));
            }
            if !STORES.contains(&scheme) {
                return Err(wrong("no object store has this scheme"));
            }
            return Url::parse(name).map(SnapshotName::Object).map_err(|error| wrong(&error.to_string()));
        }
        match name.split_once(':') {
            Some(("file", "")) => Err(wrong("the path is missing")),
            Some(("file", path)) => Ok(SnapshotName::File(path.into())),
            Some(("layers", paths)) => {
                let mut paths = paths.split(',').map(PathBuf::from);
                let base = paths.next().unwrap_or_default();
                let layers: Vec<PathBuf> = paths.collect();
                if layers.is_empty() || layers.iter().chain([&base]).any(|path| path.as_os_str().is_empty()) {
                    return Err(wrong("a base and at least one layer are needed"));
                }
                Ok(SnapshotName::Layers(base, layers))
            }
            Some(("chunks", _)) => chunks(name).ok_or_else(|| wrong("the name of an index ends in .index")),
            Some(("peer", rest)) => match split_peer(rest) {
                Some((address, snapshot)) if address.contains(':') && !snapshot.is_empty() => {
                    Ok(SnapshotName::Peer { address: address.to_string(), name: snapshot.to_string() })
                }
                _ => Err(wrong("it should be peer:HOST:PORT/NAME or peer:unix:PATH/NAME")),
            },
            _ => Ok(SnapshotName::File(name.into())),
        }
    }
}

/// Address and name: of a host the name may have slashes, of a socket its path.
fn split_peer(text: &str) -> Option<(&str, &str)> {
    if text.starts_with("unix:") { text.rsplit_once('/') } else { text.split_once('/') }
}

fn chunks(name: &str) -> Option<SnapshotName> {
    let index = name.strip_prefix("chunks:")?;
    (index.len() > INDEX_SUFFIX.len() && index.ends_with(INDEX_SUFFIX)).then(|| SnapshotName::Chunks(index.to_string()))
}

/// For messages: without passwords and queries of URLs.
impl Display for SnapshotName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            SnapshotName::File(path) => write!(f, "file:{}", path.display()),
            SnapshotName::Layers(base, layers) => {
                write!(f, "layers:{}", base.display())?;
                layers.iter().try_for_each(|layer| write!(f, ",{}", layer.display()))
            }
            SnapshotName::Chunks(index) => write!(f, "chunks:{}", without_secrets(index)),
            SnapshotName::Object(url) => f.write_str(&without_secrets(url.as_str())),
            SnapshotName::Peer { address, name } => write!(f, "peer:{address}/{name}"),
        }
    }
}

/// As [`Display`]: what is logged has no secrets.
impl Debug for SnapshotName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// What opening a snapshot may need.
#[derive(Clone, Default)]
pub struct OpenWith {
    /// For what is not in a file: a cache. Without one, chunks are decoded and objects are fetched
    /// for each read.
    pub cache: Option<Arc<BlockCache>>,
    /// For object stores: see [`Objects::open`].
    pub store_options: Vec<(String, String)>,
    /// For peers.
    pub tls: Option<TlsFiles>,
}

/// Without the values of options, of which some are secrets.
impl Debug for OpenWith {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.store_options.iter().map(|(name, _)| &name[..]).collect();
        let OpenWith { cache, store_options: _, tls } = self;
        f.debug_struct("OpenWith").field("cache", cache).field("store_options", &names).field("tls", tls).finish()
    }
}

impl SnapshotName {
    /// Whether it is anywhere else than in files that the kernel caches: a cache helps.
    pub fn is_fetched(&self) -> bool {
        !matches!(self, SnapshotName::File(_) | SnapshotName::Layers(..))
    }

    /// Opens the snapshot.
    ///
    /// # Errors
    /// There is none, or none that can be used; a server does not answer.
    pub async fn open(&self, with: &OpenWith) -> Result<Arc<dyn Source>, SourceError> {
        let source: Arc<dyn Source> = match self {
            // The kernel caches these.
            SnapshotName::File(path) => return open_file(path).await,
            SnapshotName::Layers(base, paths) => {
                let base = open_file(base).await?;
                let mut layers = Vec::new();
                for path in paths {
                    let path = path.clone();
                    layers.push(blocking("open a file", move || Layer::open(&path)).await??);
                }
                return Ok(Arc::new(Layers::new(base, layers)?));
            }
            SnapshotName::Chunks(index) => Arc::new(Chunked::open(Location::open(index, &with.store_options)?).await?),
            SnapshotName::Object(url) => {
                let (objects, path) = Objects::open(url, &with.store_options)?;
                Arc::new(RemoteFile::open(objects, path).await?)
            }
            SnapshotName::Peer { address, name } => {
                if let Ok(address) = address.parse::<LocalAddress>() {
                    Arc::new(Peer::open_local(&address, name).await?)
                } else {
                    let tls = with.tls.as_ref().ok_or_else(|| SourceError::Malformed {
                        snapshot: self.to_string(),
                        why: "a peer of another host needs certificates, and none are given".to_string(),
                    })?;
                    Arc::new(Peer::open(address, name, tls).await?)
                }
            }
        };
        Ok(match &with.cache {
            Some(cache) => Arc::new(Cached::new(source, Arc::clone(cache))),
            None => source,
        })
    }
}

async fn open_file(path: &Path) -> Result<Arc<dyn Source>, SourceError> {
    let path = path.to_path_buf();
    Ok(Arc::new(blocking("open a file", move || MemoryFile::open(&path)).await??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |text: &str| text.parse::<SnapshotName>();
        assert_eq!(name("/vm/mem"), Ok(SnapshotName::File("/vm/mem".into())));
        assert_eq!(name("file:/vm/mem:1"), Ok(SnapshotName::File("/vm/mem:1".into())));
        assert_eq!(name("mem:1"), Ok(SnapshotName::File("mem:1".into())));
        assert_eq!(name("layers:a,b,c"), Ok(SnapshotName::Layers("a".into(), vec!["b".into(), "c".into()])));
        assert_eq!(name("chunks:/s/vm.index"), Ok(SnapshotName::Chunks("/s/vm.index".to_string())));
        assert_eq!(name("chunks:s3://b/vm.index"), Ok(SnapshotName::Chunks("s3://b/vm.index".to_string())));
        assert!(matches!(name("s3://bucket/vm/mem"), Ok(SnapshotName::Object(_))));
        assert!(matches!(name("https://host/vm/mem"), Ok(SnapshotName::Object(_))));
        let peer = SnapshotName::Peer { address: "[::1]:7000".to_string(), name: "vm/7".to_string() };
        assert_eq!(name("peer:[::1]:7000/vm/7"), Ok(peer));
        let peer = SnapshotName::Peer { address: "unix:/run/a/b".to_string(), name: "vm".to_string() };
        assert_eq!(name("peer:unix:/run/a/b/vm"), Ok(peer));
        for text in [
            "",
            "peer:unix:/",
            "file:",
            "layers:a",
            "layers:,b",
            "layers:a,",
            "chunks:vm",
            "chunks:.index",
            "chunks:s3://b/vm",
            "ftp://a/b",
            "file:///a",
            "peer:host",
            "peer:host/vm",
            "peer:host:1/",
        ] {
            assert!(name(text).is_err(), "{text}");
        }
        for text in ["file:/vm/mem", "layers:a,b", "chunks:x.index", "s3://bucket/mem", "peer:h:1/vm"] {
            assert_eq!(name(text).map(|name| name.to_string()), Ok(text.to_string()));
        }
        assert_eq!(name("https://user:word@host/mem?sig=1").unwrap().to_string(), "https://user@host/mem");
        let error = name("ftp://user:word@host/mem").unwrap_err().to_string();
        assert!(!error.contains("word"), "{error}");
    }

    #[test]
    fn what_is_logged_has_no_secrets() {
        for text in [
            "https://user:word@host/mem?sig=word",
            "chunks:s3://user:word@bucket/vm.index",
            "chunks:https://user:word@host/vm.index",
        ] {
            let name: SnapshotName = text.parse().unwrap();
            for logged in [format!("{name}"), format!("{name:?}"), format!("{:?}", Some(&name))] {
                assert!(logged.contains("user@") && !logged.contains("word"), "{logged}");
            }
        }
        let options = vec![("aws_secret_access_key".to_string(), "word".to_string())];
        let logged = format!("{:?}", OpenWith { store_options: options, ..OpenWith::default() });
        assert!(logged.contains("aws_secret_access_key") && !logged.contains("word"), "{logged}");
    }
}
