//! The delivery between real threads and real processes.

mod handshake;
mod kill;
mod misbehaving;
mod serving;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::shared;
use super::*;
use crate::linux::descriptors::sealed_file;
use crate::linux::mapping::MappedMemory;

/// Words of 8 bytes in a page.
const WORDS: usize = (PAGE_SIZE / 8) as usize;

/// Long enough for a busy machine, short enough for a test that hangs.
const LIMIT: Duration = Duration::from_secs(30);

/// What a resolver fills into a word of a page.
fn pattern(page: u64, word: usize) -> u64 {
    (page << 16 | word as u64) ^ 0x5151_5151_5151_5151
}

/// A whole page as a resolver fills it.
fn pattern_bytes(page: u64) -> Vec<u8> {
    (0..WORDS).flat_map(|word| pattern(page, word).to_ne_bytes()).collect()
}

/// A VMM with a guest's memory, all of which is missing.
struct World {
    delivery: Delivery,
    bitmap: Arc<SharedBitmap>,
    memory: MappedMemory,
}

impl World {
    fn new(nr_vcpus: u32, nr_pages: u64) -> World {
        World::with(nr_vcpus, nr_pages, |_| {})
    }

    fn with(nr_vcpus: u32, nr_pages: u64, change: impl FnOnce(&mut DeliveryConfig)) -> World {
        let bitmap = Arc::new(SharedBitmap::new(nr_pages).unwrap());
        bitmap.set_all();
        let (file, memory) = guest_memory(nr_pages);
        let memory_file = SharedMemoryFile { file, offset_bytes: 0, size_bytes: nr_pages * PAGE_SIZE };
        let mut config = DeliveryConfig::new(nr_vcpus, Arc::clone(&bitmap));
        (config.memory, config.timeout) = (Some(memory_file), LIMIT);
        change(&mut config);
        World { delivery: Delivery::new(config).unwrap(), bitmap, memory }
    }

    fn ports(&self) -> Vec<DeliveryPort> {
        (0..self.delivery.shared.nr_vcpus).map(|vcpu| self.delivery.take_port(vcpu).unwrap()).collect()
    }

    /// Attaches a resolver of this process.
    fn attach(&self, nr_threads: u32) -> (Arc<Resolver>, Vec<Shard>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let resolver = scope.spawn(move || Resolver::attach(theirs, nr_threads, LIMIT));
            self.delivery.attach(ours).unwrap();
            resolver.join().unwrap().unwrap()
        })
    }

    fn page(&self, page: u64) -> &[AtomicU64] {
        &self.memory.words()[page as usize * WORDS..][..WORDS]
    }

    /// Checks the page as the guest that was just given it.
    fn check_filled(&self, page: u64) {
        for (word, value) in self.page(page).iter().enumerate() {
            assert_eq!(value.load(Ordering::Relaxed), pattern(page, word), "word {word} of page {page}");
        }
    }
}

fn guest_memory(nr_pages: u64) -> (OwnedFd, MappedMemory) {
    let file = sealed_file(c"slat-test-memory", nr_pages * PAGE_SIZE).unwrap();
    let mapping = MappedMemory::of_file(file.as_fd(), 0, nr_pages * PAGE_SIZE).unwrap();
    (file, mapping)
}

/// Fills a page as a resolver should.
fn fill(request: &Request, page: Option<GuestPage<'_>>) -> Result<(), u32> {
    page.unwrap().copy_from(&pattern_bytes(request.page()));
    Ok(())
}
