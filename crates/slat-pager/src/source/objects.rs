//! Object stores (S3, Google Cloud Storage, Azure, HTTP) and folders, as one thing: objects with
//! paths.

use std::fmt::{self, Debug, Formatter};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt,
    ObjectStoreScheme, PutPayload, RetryConfig,
};
use url::Url;

use super::SourceError;

/// For how long a request is tried again before the caller hears of it.
pub(super) const RETRY_TIME: Duration = Duration::from_secs(20);
/// The pager decides for how long a guest waits, and tries again itself.
const RETRY: RetryConfig = RetryConfig {
    backoff: BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: Duration::from_secs(2), base: 2.0 },
    max_retries: 5,
    retry_timeout: RETRY_TIME,
};
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// For one request with its body, of some MiB at most.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A store of objects.
#[derive(Clone)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    /// What errors call it, and identities: two stores have two names.
    name: String,
}

/// By its name alone: a store has the URL and the credentials that it was made with.
impl Debug for Objects {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Objects").field(&self.name).finish()
    }
}

impl Objects {
    /// The store of a URL, and the path there. Credentials and endpoints are taken from the
    /// environment, as the crate `object_store` names them (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`,
    /// `AWS_ALLOW_HTTP`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`...), then
    /// from `options` with these names in lower case.
    ///
    /// # Errors
    /// The URL is of no store that is known, or lacks something; an option is none.
    pub fn open(url: &Url, options: &[(String, String)]) -> Result<(Objects, Path), SourceError> {
        let malformed = |why: String| SourceError::Malformed { snapshot: without_secrets(url.as_str()), why };
        let (scheme, path) = ObjectStoreScheme::parse(url).map_err(|error| malformed(error.to_string()))?;
        let path = Path::parse(path).map_err(|error| malformed(error.to_string()))?;
        // TLS has one provider of ciphers in a process; an error says that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = ClientOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout(REQUEST_TIMEOUT)
            .with_allow_http(url.scheme() == "http");
        let mut public = url.clone();
        // It can have none, if this fails.
        let _ = public.set_password(None);
        let mut name = public[..url::Position::BeforePath].to_string();
        // Each builder is a type of its own. What is set last counts: ours, the environment, the options.
        macro_rules! store {
            ($builder:expr, $key:ty, $prefix:expr, $of_name:expr) => {{
                let mut builder = $builder.with_client_options(client).with_retry(RETRY);
                for (key, value) in environment($prefix) {
                    if let Ok(key) = key.parse::<$key>() {
                        builder = builder.with_config(key, value);
                    }
                }
                for (key, value) in options {
                    let key = key.parse::<$key>().map_err(|error| malformed(error.to_string()))?;
                    builder = builder.with_config(key, value);
                }
                // Two servers may have buckets of one name, and not each URL has the bucket there.
                for key in $of_name {
                    let value: Option<String> = builder.get_config_value(&key);
                    name.extend(value.map(|value| format!("@{value}")));
                }
                builder.build().map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
            }};
        }
        let store = match scheme {
            ObjectStoreScheme::AmazonS3 => store!(
                AmazonS3Builder::from_env().with_url(url.as_str()),
                AmazonS3ConfigKey,
                "AWS_",
                [AmazonS3ConfigKey::Endpoint, AmazonS3ConfigKey::Bucket]
            ),
            ObjectStoreScheme::GoogleCloudStorage => store!(
                GoogleCloudStorageBuilder::from_env().with_url(url.as_str()),
                GoogleConfigKey,
                "GOOGLE_",
                [GoogleConfigKey::Bucket]
            ),
            ObjectStoreScheme::MicrosoftAzure => store!(
                MicrosoftAzureBuilder::from_env().with_url(url.as_str()),
                AzureConfigKey,
                "AZURE_",
                [AzureConfigKey::AccountName, AzureConfigKey::Endpoint, AzureConfigKey::ContainerName]
            ),
            ObjectStoreScheme::Http => {
                let builder = HttpBuilder::new().with_url(&url[..url::Position::BeforePath]).with_retry(RETRY);
                let mut builder = builder.with_client_options(client);
                for (key, value) in options {
                    let key = key.parse::<ClientConfigKey>().map_err(|error| malformed(error.to_string()))?;
                    builder = builder.with_config(key, value);
                }
                builder.build().map(|store| Arc::new(store) as _)
            }
            scheme => return Err(malformed(format!("{scheme:?} is no object store"))),
        };
        let store = store.map_err(|error| malformed(error.to_string()))?;
        Ok((Objects { store, name }, path))
    }

    /// A folder as a store.
    ///
    /// # Errors
    /// It is not there.
    pub fn folder(path: &FilePath) -> Result<Objects, SourceError> {
        let failed = |error| SourceError::Io { what: format!("use the folder {}", path.display()), error };
        if !path.is_dir() {
            return Err(SourceError::NotThere { what: format!("folder {}", path.display()) });
        }
        let store = LocalFileSystem::new_with_prefix(path).map_err(|error| failed(std::io::Error::other(error)))?;
        // A file takes its name after its bytes are on the disk, and the name is there when `put` returns.
        let store = Arc::new(store.with_automatic_cleanup(true).with_fsync(true));
        Ok(Objects { store, name: path.display().to_string() })
    }

    /// Any other store. Two stores have two names.
    pub fn new(store: Arc<dyn ObjectStore>, name: &str) -> Objects {
        Objects { store, name: name.to_string() }
    }

    /// The store itself.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// What errors call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the store says of an object; `None` if there is none.
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    pub async fn head(&self, path: &Path) -> Result<Option<ObjectMeta>, SourceError> {
        match self.store.head(path).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    /// A whole object of `most_bytes` at most.
    ///
    /// # Errors
    /// The store does not answer, or refuses; there is none, or a larger one.
    pub async fn get(&self, path: &Path, most_bytes: u64) -> Result<Bytes, SourceError> {
        let result =
            self.store.get_opts(path, GetOptions::default()).await.map_err(|error| self.failed(path, error))?;
        if result.meta.size > most_bytes {
            return Err(SourceError::Malformed {
                snapshot: format!("{}/{path}", self.name),
                why: format!("it has {} bytes; {most_bytes} are possible", result.meta.size),
            });
        }
        result.bytes().await.map_err(|error| self.failed(path, error))
    }

    /// Stores an object: whole, or not at all.
    ///
    /// # Errors
    /// The store does not answer, or refuses; a folder's disk is full.
    pub async fn put(&self, path: &Path, bytes: Bytes) -> Result<(), SourceError> {
        self.store.put(path, PutPayload::from_bytes(bytes)).await.map_err(|error| self.failed(path, error))?;
        Ok(())
    }

    /// Deletes an object, if it is there.
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    pub async fn delete(&self, path: &Path) -> Result<(), SourceError> {
        match self.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    /// What an error of the store at `path` means.
    pub(crate) fn failed(&self, path: &Path, error: object_store::Error) -> SourceError {
        use object_store::Error as E;
        let server = self.name.clone();
        match error {
            E::NotFound { .. } => SourceError::NotThere { what: format!("{server}/{path}") },
            E::Precondition { .. } | E::NotModified { .. } => {
                SourceError::Changed { what: format!("{server}/{path} is another object now") }
            }
            E::PermissionDenied { .. }
            | E::Unauthenticated { .. }
            | E::NotSupported { .. }
            | E::NotImplemented { .. } => {
                SourceError::Refused { server, why: urls_without_secrets(&error.to_string()) }
            }
            E::InvalidPath { .. } => SourceError::Malformed { snapshot: path.to_string(), why: error.to_string() },
            _ => match io_cause(&error) {
                // A folder: what the disk says, as errors of files do.
                Some(cause) => SourceError::Io { what: format!("use {server}/{path}"), error: cause },
                None => {
                    let why = format!("{path}: {}", urls_without_secrets(&with_causes(&error)));
                    SourceError::Unavailable { server, why }
                }
            },
        }
    }
}

/// The error of the operating system below an error of a folder.
fn io_cause(error: &object_store::Error) -> Option<std::io::Error> {
    if !matches!(error, object_store::Error::Generic { store: "LocalFileSystem", .. }) {
        return None;
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(code) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) {
            return Some(std::io::Error::from_raw_os_error(code));
        }
        cause = error.source();
    }
    None
}

/// The error with what caused it, which the upper ones of a chain often leave out.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

/// The text without the passwords and queries of its URLs: errors of stores have the URL of the
/// request.
fn urls_without_secrets(text: &str) -> String {
    text.split(' ').map(without_secrets).collect::<Vec<_>>().join(" ")
}

/// The variables of the environment that begin with `prefix`, in lower case.
fn environment(prefix: &'static str) -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(move |(name, value)| {
        let name = name.to_str().filter(|name| name.starts_with(prefix))?.to_ascii_lowercase();
        Some((name, value.into_string().ok()?))
    })
}

/// The name of a snapshot for a message: if it is a URL, without its password and query, which may
/// be secrets. It need not be one that can be parsed.
pub(crate) fn without_secrets(name: &str) -> String {
    let Some((scheme, rest)) = name.split_once("://") else { return name.to_string() };
    if let (Err(_), Some((secret, host))) = (url::Url::parse(&format!("url://{rest}")), rest.rsplit_once('@'))
        && let Some((user, _)) = secret.split_once(':')
    {
        // A password may have any character here: where the authority ends is not known.
        return format!("{scheme}://{user}@{}", host.split(['?', '#']).next().unwrap_or_default());
    }
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let authority = match authority.rsplit_once('@') {
        Some((user, host)) => format!("{}@{host}", user.split(':').next().unwrap_or_default()),
        None => authority.to_string(),
    };
    format!("{scheme}://{authority}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_lacks_for_now_may_pass() {
        let folder = tempfile::tempdir().unwrap();
        let objects = Objects::folder(folder.path()).unwrap();
        let failed = |code| {
            let source = Box::new(std::io::Error::from_raw_os_error(code));
            objects.failed(&Path::from("a"), object_store::Error::Generic { store: "LocalFileSystem", source })
        };
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN, libc::EINTR] {
            assert!(failed(code).may_pass(), "{}", failed(code));
        }
        for code in [libc::EIO, libc::EACCES, libc::ENOENT] {
            assert!(!failed(code).may_pass(), "{}", failed(code));
        }
    }

    #[test]
    fn messages_have_no_secrets() {
        for (name, message) in [
            ("https://user:p@ss:word@host:1/vm/mem?sig=1#x", "https://user@host:1/vm/mem"),
            ("chunks:s3://user:word@bucket/vm.index", "chunks:s3://user@bucket/vm.index"),
            ("https://user:word@host:99999", "https://user@host:99999"),
            ("https://user:pa/ss@host/vm", "https://user@host/vm"),
            ("https://user:p?w@host?sig=1", "https://user@host"),
            ("s3://bucket/vm@7:1", "s3://bucket/vm@7:1"),
            ("/vm/mem?a:b@c", "/vm/mem?a:b@c"),
        ] {
            assert_eq!(without_secrets(name), message);
        }
        let url = Url::parse("https://http:http@host/vm").unwrap();
        let (objects, _) = Objects::open(&url, &[]).unwrap();
        assert_eq!(objects.name(), "https://http@host");
        assert_eq!(format!("{objects:?}"), r#"Objects("https://http@host")"#);
    }

    #[test]
    fn errors_of_a_store_have_no_secrets() {
        let url = Url::parse("https://user:word@host/vm").unwrap();
        let (objects, path) = Objects::open(&url, &[]).unwrap();
        let what = "Error performing GET https://user:word@host/vm?sig=word in 1ms - no answer";
        let failed = object_store::Error::Generic { store: "HTTP", source: what.into() };
        let refused = object_store::Error::PermissionDenied { path: path.to_string(), source: what.into() };
        for error in [failed, refused] {
            let message = objects.failed(&path, error).to_string();
            assert!(message.contains("GET https://user@host/vm in 1ms") && !message.contains("word"), "{message}");
        }
    }
}
