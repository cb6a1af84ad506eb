//! What a daemon serves: from its command line, or from a file.
//!
//! # Guarantees
//! The command line and the file make the same [`Config`]; a field that is not known is an error.

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer};
use thiserror::Error;

use crate::snapshot::SnapshotName;
use crate::source::cache::CacheOptions;
use crate::source::peer::TlsFiles;
use crate::vm::fetch::Limits;
use crate::vm::{GRANULE_BYTES, OnFailure};

/// What a daemon serves.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The sockets, each with its snapshot.
    #[serde(rename = "socket")]
    pub sockets: Vec<SocketConfig>,
    /// Where the state of VMs is kept for a successor. A tmpfs, so that it survives a pager
    /// and nothing else.
    #[serde(default)]
    pub runtime_folder: Option<PathBuf>,
    /// Where metrics are served: `127.0.0.1:PORT`, or `unix:PATH`.
    #[serde(default)]
    pub metrics: Option<MetricsAddress>,
    /// VMs at once.
    #[serde(default = "defaults::max_vms")]
    pub max_vms: usize,
    /// Memory for reads that are under way, of all VMs.
    #[serde(default = "defaults::read_memory", deserialize_with = "size")]
    pub read_memory: u64,
    /// Whether rights are given up after the start.
    #[serde(default)]
    pub sandbox: SandboxMode,
    /// What was fetched is kept here: object stores, chunks, peers.
    #[serde(default)]
    pub cache: CacheConfig,
    /// Options of object stores, as their crate names them (`aws_region`); it reads the
    /// environment, too.
    #[serde(default)]
    pub store: StoreOptions,
    /// Certificates, for peers.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
}

/// Options of object stores, by their names. Some of the values are secrets: messages have the names
/// alone.
#[derive(Clone, Default, Deserialize)]
#[serde(transparent)]
pub struct StoreOptions(pub BTreeMap<String, String>);

impl Debug for StoreOptions {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// A cache of what was fetched.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CacheConfig {
    /// In memory, in bytes.
    #[serde(default = "defaults::cache_memory", deserialize_with = "size")]
    pub memory: u64,
    /// Where it is on a disk, if it is.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// On the disk, in bytes.
    #[serde(default = "defaults::cache_size", deserialize_with = "size")]
    pub size: u64,
}

impl Default for CacheConfig {
    fn default() -> CacheConfig {
        CacheConfig { memory: defaults::cache_memory(), folder: None, size: defaults::cache_size() }
    }
}

impl CacheConfig {
    /// For the cache.
    pub fn options(&self) -> CacheOptions {
        CacheOptions {
            memory_bytes: self.memory,
            disk: self.folder.clone().map(|folder| (folder, self.size)),
            ..CacheOptions::default()
        }
    }
}

/// A socket, and the snapshot of the VMs that come to it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SocketConfig {
    /// Where it is. With socket activation the service manager has made it.
    pub path: PathBuf,
    /// The snapshot.
    #[serde(deserialize_with = "snapshot")]
    pub memory: SnapshotName,
    /// Threads for each VM that read faults.
    #[serde(default = "defaults::threads")]
    pub threads: NonZeroUsize,
    /// What is filled around a fault.
    #[serde(default = "defaults::granule", deserialize_with = "size")]
    pub granule: u64,
    /// What becomes of a thread whose page cannot be had.
    #[serde(default)]
    pub on_failure: OnFailure,
    /// How long errors of the source that may pass are put up with.
    #[serde(default = "defaults::patience", deserialize_with = "duration")]
    pub patience: Duration,
    /// A read of the source that takes longer has failed.
    #[serde(default = "defaults::read_timeout", deserialize_with = "duration")]
    pub read_timeout: Duration,
    /// Reads of one VM that are under way have so many bytes.
    #[serde(default = "defaults::vm_read_memory", deserialize_with = "size")]
    pub vm_read_memory: u64,
    /// How long a handshake may take.
    #[serde(default = "defaults::handshake_timeout", deserialize_with = "duration")]
    pub handshake_timeout: Duration,
    /// The file of the working set: recorded if there is none, replayed if there is.
    #[serde(default)]
    pub working_set: Option<PathBuf>,
    /// A protocol in place of Firecracker's.
    #[serde(default)]
    pub experimental: Option<Experimental>,
}

/// A protocol that may change, and what is here with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Experimental {
    /// The [handoff](crate::protocol::handoff) that is proposed for Cloud Hypervisor.
    #[value(help = "The handoff that is proposed for Cloud Hypervisor")]
    Handoff,
    /// Memory of a [guest_memfd](crate::protocol::guest_memfd), as a branch of Firecracker has it.
    #[value(help = "Memory of a guest_memfd, as a branch of Firecracker has it")]
    GuestMemfd,
}

/// Whether rights are given up after the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxMode {
    /// As far as the kernel can; what it cannot is logged.
    #[default]
    BestEffort,
    /// All, or the daemon does not start. Landlock's part needs Linux 6.12.
    Required,
    /// None.
    Off,
}

/// Where metrics are served: on this host only.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum MetricsAddress {
    /// A loopback address.
    Tcp(std::net::SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl std::str::FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<MetricsAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(MetricsAddress::Unix(path.into()));
        }
        let address: std::net::SocketAddr =
            text.parse().map_err(|_| format!("`{text}` is neither ADDRESS:PORT nor unix:PATH"))?;
        if !address.ip().is_loopback() {
            return Err(format!(
                "metrics are served to this host only, and {} is not a loopback address",
                address.ip()
            ));
        }
        Ok(MetricsAddress::Tcp(address))
    }
}

impl TryFrom<String> for MetricsAddress {
    type Error = String;

    fn try_from(text: String) -> Result<MetricsAddress, String> {
        text.parse()
    }
}

/// What is meant where nothing is said.
pub mod defaults {
    use super::{CacheOptions, Duration, GRANULE_BYTES, Limits, NonZeroUsize};

    /// Of [`Config::max_vms`](super::Config::max_vms).
    pub fn max_vms() -> usize {
        4096
    }

    /// Of [`CacheConfig::memory`](super::CacheConfig::memory).
    pub fn cache_memory() -> u64 {
        CacheOptions::default().memory_bytes
    }

    /// Of [`CacheConfig::size`](super::CacheConfig::size).
    pub fn cache_size() -> u64 {
        16 << 30
    }

    /// Of [`Config::read_memory`](super::Config::read_memory).
    pub fn read_memory() -> u64 {
        Limits::BUDGET_BYTES
    }

    /// Of [`SocketConfig::threads`](super::SocketConfig::threads).
    pub fn threads() -> NonZeroUsize {
        NonZeroUsize::MIN
    }

    /// Of [`SocketConfig::granule`](super::SocketConfig::granule).
    pub fn granule() -> u64 {
        GRANULE_BYTES
    }

    /// Of [`SocketConfig::patience`](super::SocketConfig::patience).
    pub fn patience() -> Duration {
        Limits::PATIENCE
    }

    /// Of [`SocketConfig::read_timeout`](super::SocketConfig::read_timeout).
    pub fn read_timeout() -> Duration {
        Limits::READ_TIMEOUT
    }

    /// Of [`SocketConfig::vm_read_memory`](super::SocketConfig::vm_read_memory).
    pub fn vm_read_memory() -> u64 {
        Limits::VM_BYTES
    }

    /// Of [`SocketConfig::handshake_timeout`](super::SocketConfig::handshake_timeout).
    pub fn handshake_timeout() -> Duration {
        Duration::from_secs(10)
    }
}

/// Why there is no configuration.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ConfigError {
    #[error("cannot read {}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    #[error("{}:{line}: {why}", path.display())]
    Syntax { path: PathBuf, line: usize, why: String },
    #[error("{0}")]
    Wrong(String),
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Read { path: path.to_path_buf(), error })?;
        let config: Config = toml::from_str(&text).map_err(|error| {
            // The error itself shows the line, which may have a secret.
            let before = error.span().map_or(0, |span| span.start).min(text.len());
            let line = 1 + text.as_bytes()[..before].iter().filter(|byte| **byte == b'\n').count();
            ConfigError::Syntax { path: path.to_path_buf(), line, why: error.message().to_string() }
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what types do not.
    ///
    /// # Errors
    /// [`ConfigError::Wrong`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let wrong = |text: String| Err(ConfigError::Wrong(text));
        if self.sockets.is_empty() {
            return wrong("there is no socket".to_string());
        }
        if self.max_vms == 0 {
            return wrong("max-vms is 0".to_string());
        }
        if self.read_memory == 0 {
            return wrong("read-memory is 0".to_string());
        }
        for (nr, socket) in self.sockets.iter().enumerate() {
            if self.sockets[..nr].iter().any(|other| other.path == socket.path) {
                return wrong(format!("the socket {} is there twice", socket.path.display()));
            }
            if !socket.granule.is_power_of_two() || !(4096..=2 << 20).contains(&socket.granule) {
                return wrong(format!("a granule is a power of two from 4KiB to 2MiB, and not {}", socket.granule));
            }
            if socket.vm_read_memory == 0 {
                return wrong("vm-read-memory is 0".to_string());
            }
            let folder = socket.working_set.as_ref().and_then(|file| file.parent());
            if let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
                return wrong(format!("the folder of the working set, {}, is not there", folder.display()));
            }
            if socket.threads.get() > crate::vm::state::MAX_BUFFERS {
                return wrong(format!("a VM has at most {} threads", crate::vm::state::MAX_BUFFERS));
            }
        }
        Ok(())
    }

    /// The folder for the state of machines.
    pub fn runtime_folder(&self) -> PathBuf {
        if let Some(folder) = &self.runtime_folder {
            return folder.clone();
        }
        // Of systemd (RuntimeDirectory=), which may name several.
        if let Some(folders) = std::env::var_os("RUNTIME_DIRECTORY")
            && let Some(first) = folders.to_str().and_then(|folders| folders.split(':').next())
        {
            return first.into();
        }
        let mut folder = self.sockets[0].path.clone().into_os_string();
        folder.push(".state");
        folder.into()
    }
}

/// A number of bytes: `64KiB`.
///
/// # Errors
/// It is none.
pub fn parse_size(text: &str) -> Result<u64, String> {
    parse_size::Config::new().with_binary().parse_size(text).map_err(|error| format!("`{text}`: {error}"))
}

/// A number, or text with a unit.
#[derive(Deserialize)]
#[serde(untagged)]
enum Size {
    Bytes(u64),
    Text(String),
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match Size::deserialize(deserializer)? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Text(text) => parse_size(&text).map_err(serde::de::Error::custom),
    }
}

fn snapshot<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SnapshotName, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| serde::de::Error::custom(format!("`{text}`: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pager.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn the_least_has_defaults() {
        let config = parsed("[[socket]]\npath = '/run/p.sock'\nmemory = 'file:/snap'\n").unwrap();
        assert_eq!(config.sockets[0].granule, 64 << 10);
        assert_eq!(config.sockets[0].on_failure, OnFailure::Poison);
        assert_eq!(config.sandbox, SandboxMode::BestEffort);
        assert_eq!(config.runtime_folder(), Path::new("/run/p.sock.state"));
    }

    #[test]
    fn all_can_be_said() {
        let text = "
            runtime-folder = '/run/slat-pager'
            metrics = '127.0.0.1:9000'
            max-vms = 7
            read-memory = '1GiB'
            sandbox = 'required'
            [[socket]]
            path = '/a'
            memory = 'x'
            threads = 2
            granule = '2MiB'
            on-failure = 'pause'
            patience = '5m'
            read-timeout = '1s'
            vm-read-memory = 1048576
            handshake-timeout = '3s'
            working-set = '/w'
            [[socket]]
            path = '/b'
            memory = 's3://bucket/y'
            [cache]
            folder = '/c'
            size = '1GiB'
            [store]
            aws_region = 'eu-central-1'";
        let config = parsed(text).unwrap();
        assert_eq!((config.max_vms, config.read_memory), (7, 1 << 30));
        assert_eq!(config.sockets[0].patience, Duration::from_secs(300));
        assert_eq!(config.sockets[0].on_failure, OnFailure::Pause);
    }

    #[test]
    fn the_example_is_right() {
        let config = parsed(include_str!("../systemd/pager.toml")).unwrap();
        let least = parsed("[[socket]]\npath = '/a'\nmemory = 'x'\n").unwrap();
        let (example, default) = (&config.sockets[0], &least.sockets[0]);
        assert_eq!(example.patience, default.patience);
        assert_eq!((config.max_vms, config.read_memory), (least.max_vms, least.read_memory));
        assert_eq!((config.cache.memory, config.cache.size), (least.cache.memory, least.cache.size));
    }

    #[test]
    fn what_is_logged_has_no_secrets() {
        let text =
            "[[socket]]\npath = '/a'\nmemory = 's3://user:word@bucket/x'\n[store]\naws_secret_access_key = 'word'\n";
        let config = parsed(text).unwrap();
        assert_eq!(config.store.0["aws_secret_access_key"], "word");
        for logged in [format!("{config:?}"), format!("{config:#?}")] {
            assert!(logged.contains("aws_secret_access_key") && !logged.contains("word"), "{logged}");
        }
        let error = parsed(&text.replace("'word'", "word")).unwrap_err();
        assert!(error.contains("pager.toml:5: ") && !error.contains("word"), "{error}");
    }

    #[test]
    fn mistakes_are_named() {
        let socket = "[[socket]]\npath = '/a'\nmemory = 'x'\n";
        let cases = [
            (String::new(), "socket"),
            (format!("colour = 1\n{socket}"), "colour"),
            ("[[socket]]\npath = '/a'\nmemory = 'ftp://x/y'".to_string(), "no object store"),
            (format!("{socket}granule = '3KiB'"), "granule"),
            (format!("{socket}granule = '4MiB'"), "granule"),
            (format!("{socket}threads = 0"), "pager.toml:4: invalid value: integer `0`"),
            (format!("{socket}threads = 65"), "threads"),
            (format!("{socket}patience = 'soon'"), "soon"),
            (format!("{socket}{socket}"), "twice"),
            (format!("metrics = '0.0.0.0:1'\n{socket}"), "loopback"),
            (format!("max-vms = 0\n{socket}"), "max-vms"),
        ];
        for (text, word) in cases {
            let error = parsed(&text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
