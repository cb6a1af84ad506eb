//! What the tests share: bytes of a snapshot that are known by their place, a source that fails as
//! it is told to, and clients in processes of their own.
#![allow(dead_code, unreachable_pub, reason = "each test takes what it needs")]

pub mod userfaultfd;

use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use slat_pager::source::{Identity, PAGE_BYTES, Source, SourceError, check_range};
use slat_pager::vm::Vm;

/// The byte of the snapshot `seed` at `offset`. Each seventh page is zeros.
pub fn byte(seed: u64, offset: u64) -> u8 {
    word(seed, offset / 8).to_le_bytes()[(offset % 8) as usize]
}

/// The bytes `range` of the snapshot `seed`.
pub fn bytes(seed: u64, range: Range<u64>) -> Vec<u8> {
    let first = range.start / 8;
    let mut bytes = vec![0; (range.end.div_ceil(8).saturating_sub(first) * 8) as usize];
    for (nth, bytes) in bytes.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(seed, first + nth as u64).to_le_bytes());
    }
    bytes.truncate(range.end.saturating_sub(8 * first) as usize);
    bytes.drain(..(range.start % 8) as usize);
    bytes
}

/// Mixes as SplitMix64 does.
fn word(seed: u64, index: u64) -> u64 {
    if index / (PAGE_BYTES / 8) % 7 == 3 {
        return 0;
    }
    let mixed = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// Waits for what another thread or process does; fails when that never happens.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if is_so() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("never: {what}");
}

/// Waits until a VM has `nr_bytes`: a page counts a moment after its threads were woken.
pub fn until_present(nr_bytes: u64, vm: &Vm) {
    until("all pages count", || vm.present_bytes() == nr_bytes);
}

/// The first byte of `found` that is not as in the snapshot `seed` from `offset` on.
pub fn wrong(seed: u64, offset: u64, found: &[u8]) -> Option<u64> {
    let expected = bytes(seed, offset..offset + found.len() as u64);
    // All at once first: nearly always there is none, and tests are built without optimization.
    if expected == found {
        return None;
    }
    (offset..)
        .zip(expected.iter().zip(found))
        .find(|(_, (expected, found))| expected != found)
        .map(|(offset, _)| offset)
}

/// A source of the snapshot `seed` that is read, not mapped.
#[derive(Debug)]
pub struct Pattern {
    pub seed: u64,
    pub size_bytes: u64,
    pub granule_bytes: u64,
    /// So many reads fail first, by an error that may pass.
    pub nr_failures: AtomicU32,
    /// Reads of this byte fail for ever.
    pub broken: Option<u64>,
    pub nr_reads: AtomicU64,
}

impl Pattern {
    pub fn new(seed: u64, size_bytes: u64) -> Pattern {
        Pattern {
            seed,
            size_bytes,
            granule_bytes: 64 << 10,
            nr_failures: AtomicU32::new(0),
            broken: None,
            nr_reads: AtomicU64::new(0),
        }
    }
}

impl Source for Pattern {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn identity(&self) -> Identity {
        Identity::new("pattern", [&self.seed.to_le_bytes()[..], &self.size_bytes.to_le_bytes()])
    }

    fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.size_bytes)?;
            self.nr_reads.fetch_add(1, Ordering::Relaxed);
            // Other tasks run in between.
            tokio::task::yield_now().await;
            let range = offset..offset + into.len() as u64;
            if self.broken.is_some_and(|broken| range.contains(&broken)) {
                return Err(SourceError::Corrupt { range });
            }
            let one_less = |nr: u32| nr.checked_sub(1);
            if self.nr_failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
                return Err(SourceError::Unavailable { server: "the test".to_owned(), why: "told to".to_owned() });
            }
            into.copy_from_slice(&bytes(self.seed, range));
            Ok(())
        }
        .boxed()
    }
}

/// Whether this process may use a userfaultfd; says so if not.
pub fn may_use_userfaultfd() -> bool {
    let opened = userfaultfd::open(userfaultfd::FEATURE_MINOR_SHMEM | userfaultfd::FEATURE_MISSING_SHMEM);
    if let Err(error) = &opened {
        eprintln!("skipped: no userfaultfd for shared memory: {error}");
    }
    opened.is_ok()
}

/// The variable that tells a process that it is a client.
pub const CLIENT: &str = "SLAT_PAGER_TEST_CLIENT";

/// Starts this test program again, as the client that its ignored test `name` is, with `argument`.
pub fn start_client(name: &str, argument: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
        .env(CLIENT, argument)
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// The argument of this process, if it is a client.
pub fn client_argument() -> Option<String> {
    std::env::var(CLIENT).ok()
}
