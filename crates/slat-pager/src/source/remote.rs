//! A memory file in an object store.
//!
//! # Guarantees
//! All bytes are those of one version of the object: each request asks for the entity tag that the
//! object had when it was opened (`If-Match`), and each answer is checked for tag and size. An
//! object without a strong tag is refused, for two versions of it could not be told apart.
//!
//! # Implementation
//! A read is split into parts, which are requested at once. A server that takes its time for each
//! request then costs that time once. How many requests are under way is bounded for all readers
//! together.

use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange};
use tokio::sync::Semaphore;

use super::objects::{Objects, RETRY_TIME};
use super::{Identity, PAGE_BYTES, Source, SourceError, check_range};

/// What one request asks for at most, and a read should have. Measured by `slat-pager bench
/// sources`.
pub const PART_BYTES: u64 = 1 << 20;
/// How many requests are under way at once.
pub const MOST_REQUESTS: usize = 64;
/// How often a part is asked for if what comes is not the whole of it, and for how long: no try
/// begins later.
const MOST_TRIES: usize = 4;
const TRIES_TIME: Duration = RETRY_TIME;

/// A memory file in an object store.
#[derive(Debug)]
pub struct RemoteFile {
    objects: Objects,
    path: Path,
    size_bytes: u64,
    tag: String,
    identity: Identity,
    requests: Semaphore,
}

/// What came of a part.
enum Part {
    Whole,
    /// Other bytes than those that were asked for, or not all of them.
    Broken(SourceError),
}

impl RemoteFile {
    /// The object at `path`.
    ///
    /// # Errors
    /// The store does not answer, or refuses; there is no such object, or none of whole pages; it
    /// has no strong entity tag.
    pub async fn open(objects: Objects, path: Path) -> Result<RemoteFile, SourceError> {
        let name = format!("{}/{path}", objects.name());
        let malformed = |why: String| SourceError::Malformed { snapshot: name.clone(), why };
        let meta = objects.head(&path).await?.ok_or_else(|| SourceError::NotThere { what: name.clone() })?;
        if meta.size == 0 || !meta.size.is_multiple_of(PAGE_BYTES) {
            return Err(malformed(format!("{} bytes are not whole pages of {PAGE_BYTES}", meta.size)));
        }
        let tag = match meta.e_tag {
            Some(tag) if !tag.is_empty() && !tag.starts_with("W/") => tag,
            tag => {
                let tag = tag.unwrap_or_else(|| "none".to_string());
                return Err(malformed(format!("its server gives no strong entity tag, but {tag}")));
            }
        };
        let size = meta.size.to_le_bytes();
        let version = meta.version.unwrap_or_default();
        let identity = Identity::new("object", [name.as_bytes(), tag.as_bytes(), version.as_bytes(), &size[..]]);
        Ok(RemoteFile { objects, path, size_bytes: meta.size, tag, identity, requests: Semaphore::new(MOST_REQUESTS) })
    }

    /// Reads one part, and tries again if what comes is not the whole of it. The store itself tries
    /// again if its server does not answer.
    async fn read_part(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let _permit = self.requests.acquire().await.expect("it is never closed");
        let (mut tries, start) = (1, Instant::now());
        loop {
            let broken = match self.try_part(offset..offset + into.len() as u64, into).await? {
                Part::Whole => return Ok(()),
                Part::Broken(error) => error,
            };
            if !broken.may_pass() || tries == MOST_TRIES || start.elapsed() >= TRIES_TIME {
                return Err(broken);
            }
            tracing::debug!(%broken, tries, "a part is asked for again");
            tries += 1;
        }
    }

    async fn try_part(&self, range: Range<u64>, into: &mut [u8]) -> Result<Part, SourceError> {
        let broken = |why: String| {
            let server = self.objects.name().to_string();
            Ok(Part::Broken(SourceError::Unavailable { server, why }))
        };
        let options = GetOptions {
            if_match: Some(self.tag.clone()),
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let result = match self.objects.store().get_opts(&self.path, options).await {
            Ok(result) => result,
            // It was there.
            Err(object_store::Error::NotFound { .. }) => {
                let what = format!("{}/{} is gone", self.objects.name(), self.path);
                return Err(SourceError::Changed { what });
            }
            Err(error) => return Err(self.objects.failed(&self.path, error)),
        };
        if result.meta.e_tag.as_ref() != Some(&self.tag) || result.meta.size != self.size_bytes {
            let what = format!(
                "{}/{} had {} bytes and the tag {}, and has {} bytes and the tag {}",
                self.objects.name(),
                self.path,
                self.size_bytes,
                self.tag,
                result.meta.size,
                result.meta.e_tag.as_deref().unwrap_or("none"),
            );
            return Err(SourceError::Changed { what });
        }
        if result.range != range {
            return broken(format!("bytes {range:?} were asked for, and {:?} came", result.range));
        }
        let mut rest = &mut *into;
        let mut body = result.into_stream();
        while let Some(bytes) = body.next().await {
            let bytes = match bytes {
                Ok(bytes) => bytes,
                Err(error) => return Ok(Part::Broken(self.objects.failed(&self.path, error))),
            };
            let Some((part, behind)) = std::mem::take(&mut rest).split_at_mut_checked(bytes.len()) else {
                return broken("more bytes came than were asked for".to_string());
            };
            part.copy_from_slice(&bytes);
            rest = behind;
        }
        if !rest.is_empty() {
            return broken(format!("an answer ended {} bytes early", rest.len()));
        }
        Ok(Part::Whole)
    }
}

impl Source for RemoteFile {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn granule_bytes(&self) -> u64 {
        PART_BYTES
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.size_bytes)?;
            let parts = into.chunks_mut(PART_BYTES as usize);
            let reads = parts.zip(0u64..).map(|(part, number)| self.read_part(offset + number * PART_BYTES, part));
            futures_util::future::try_join_all(reads).await.map(|_| ())
        }
        .boxed()
    }
}
