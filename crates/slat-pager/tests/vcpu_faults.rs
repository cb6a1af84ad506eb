//! vCPUs that ask for pages by the library's call ([`Vm::vcpu_faults`]), beside removals, replays that
//! fail, and a monitor whose pages are not mapped.

#![expect(unsafe_code, reason = "memory of a guest that is unmapped, and the bitmap's words")]

#[path = "support/registered.rs"]
mod registered;
mod support;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use memmap2::{MmapOptions, MmapRaw};
use registered::{Guest, PAGE, copy_of, userfaultfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use slat_pager::source::{Identity, Source, SourceError};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd};
use slat_pager::vm::state::State;
use slat_pager::vm::userfault_bitmap::UserfaultBitmap;
use slat_pager::vm::{Options, Regions, Vm};
use support::Pattern;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

const SEED: u64 = 19;
const NR_PAGES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);

/// A source whose reads wait until they are let through.
#[derive(Debug)]
struct Gated {
    pattern: Pattern,
    nr_begun: AtomicU64,
    gate: Semaphore,
}

impl Source for Gated {
    fn size_bytes(&self) -> u64 {
        self.pattern.size_bytes()
    }

    fn identity(&self) -> Identity {
        self.pattern.identity()
    }

    fn granule_bytes(&self) -> u64 {
        PAGE as u64
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            self.nr_begun.fetch_add(1, Ordering::Relaxed);
            self.gate.acquire().await.unwrap().forget();
            self.pattern.read(offset, into).await
        }
        .boxed()
    }
}

/// A machine with a file that vCPUs use, of which no page is there.
struct Machine {
    guest: Guest,
    bits: MmapRaw,
    source: Arc<Gated>,
    vm: Vm,
}

impl Machine {
    fn new() -> Option<Machine> {
        Machine::with_broken(None)
    }

    /// One whose source never has that byte.
    fn with_broken(broken: Option<u64>) -> Option<Machine> {
        let userfaultfd = userfaultfd(0)?;
        let nr_bytes = NR_PAGES * PAGE;
        let memfd = |nr_bytes: usize| {
            let memfd = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&memfd, nr_bytes as u64).unwrap();
            fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
            memfd
        };
        let guest = Guest::of_file(memfd(nr_bytes), nr_bytes, 0);
        guest.register(&userfaultfd, RegisterMode::MISSING.and(RegisterMode::MINOR));
        let bitmap = memfd(8);
        let bits = MmapOptions::new().map_raw(&bitmap).unwrap();
        let pattern = Pattern { broken, ..Pattern::new(SEED, nr_bytes as u64) };
        let source = Arc::new(Gated { pattern, nr_begun: AtomicU64::new(0), gate: Semaphore::new(0) });
        let regions = Regions::new(&[guest.region()], nr_bytes as u64).unwrap();
        let userfault_bitmap = Some(Arc::new(UserfaultBitmap::new(bitmap, &regions).unwrap()));
        let options = Options { granule_bytes: PAGE as u64, userfault_bitmap, ..Options::default() };
        let state = State::anonymous(options.nr_threads.get(), regions.nr_words()).unwrap();
        let ours = Userfaultfd::from_fd(copy_of(&userfaultfd)).unwrap();
        let vm = Vm::attach(ours, regions, Arc::clone(&source) as Arc<dyn Source>, state, options).unwrap();
        let machine = Machine { guest, bits, source, vm };
        machine.word().store(u64::MAX, Ordering::Relaxed);
        Some(machine)
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: it is in the mapping, whose file is sealed; all access it as an atomic.
        unsafe { AtomicU64::from_ptr(self.bits.as_mut_ptr().cast()) }
    }

    fn faults(&self, page: usize) -> bool {
        self.word().load(Ordering::Acquire) & 1 << page != 0
    }

    /// A vCPU asks for `page`.
    fn ask(&self, page: usize) -> tokio::task::JoinHandle<()> {
        let faults = self.vm.vcpu_faults().unwrap();
        tokio::spawn(async move { faults.bring((page * PAGE) as u64).await.unwrap() })
    }

    async fn until_begun(&self, nr_reads: u64) {
        while self.source.nr_begun.load(Ordering::Relaxed) < nr_reads {
            sleep(Duration::from_millis(1)).await;
        }
    }

    async fn until_had(&self, page: usize) {
        let had = async {
            while self.faults(page) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, had).await.expect("the page's bit is cleared");
    }

    /// Threads of this process touch `pages`, which is no work for a thread that runs tasks.
    async fn look<T: Send + 'static>(self: &Arc<Machine>, look: impl FnOnce(&Guest) -> T + Send + 'static) -> T {
        let machine = Arc::clone(self);
        timeout(PATIENCE, tokio::task::spawn_blocking(move || look(&machine.guest))).await.unwrap().unwrap()
    }
}

async fn is_answered(vcpu: tokio::task::JoinHandle<()>) {
    timeout(PATIENCE, vcpu).await.expect("an answer").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_page_comes_once_and_its_bit_goes() {
    let Some(machine) = Machine::new().map(Arc::new) else { return };
    machine.source.gate.add_permits(NR_PAGES);
    let vcpus: Vec<_> = (0..2 * NR_PAGES).map(|nr| machine.ask(nr % NR_PAGES)).collect();
    for vcpu in vcpus {
        is_answered(vcpu).await;
    }
    assert_eq!(machine.word().load(Ordering::Acquire), 0);
    machine.look(|guest| (0..NR_PAGES).for_each(|page| guest.verify(page, SEED))).await;
    assert_eq!(machine.source.nr_begun.load(Ordering::Relaxed), NR_PAGES as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_is_removed_while_it_is_read_is_zeros_at_once() {
    let Some(machine) = Machine::new().map(Arc::new) else { return };
    let vcpu = machine.ask(5);
    machine.until_begun(1).await;
    machine.look(|guest| guest.punch(5..6)).await;
    is_answered(vcpu).await;
    // What is read comes too late.
    machine.source.gate.add_permits(1);
    sleep(Duration::from_millis(20)).await;
    assert!(machine.look(|guest| guest.is_zero(5)).await && !machine.faults(5) && machine.faults(6));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_was_removed_from_the_file_is_zeros_for_a_vcpu_that_asks_again() {
    let Some(machine) = Machine::new().map(Arc::new) else { return };
    machine.source.gate.add_permits(1);
    is_answered(machine.ask(9)).await;
    machine.look(|guest| guest.verify(9, SEED)).await;
    machine.word().fetch_or(1 << 9, Ordering::Relaxed);
    machine.look(|guest| guest.punch(9..10)).await;
    is_answered(machine.ask(9)).await;
    assert!(machine.look(|guest| guest.is_zero(9)).await && !machine.faults(9));
}

#[tokio::test(flavor = "multi_thread")]
async fn zeros_whose_bit_a_dead_pager_has_not_cleared_are_had_by_a_vcpu() {
    let Some(machine) = Machine::new().map(Arc::new) else { return };
    machine.look(|guest| guest.punch(9..10)).await;
    // It is mapped from here on. The bit goes after the page has come.
    assert!(machine.look(|guest| guest.is_zero(9)).await);
    machine.until_had(9).await;
    machine.word().fetch_or(1 << 9, Ordering::Relaxed);
    is_answered(machine.ask(9)).await;
    assert!(machine.look(|guest| guest.is_zero(9)).await && !machine.faults(9));
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_filled_for_vcpus_that_cannot_ask_but_what_cannot_be_had() {
    let Some(machine) = Machine::with_broken(Some(40 * PAGE as u64 + 5)).map(Arc::new) else { return };
    machine.source.gate.add_permits(Semaphore::MAX_PERMITS);
    machine.source.pattern.nr_failures.store(3, Ordering::Relaxed);
    machine.look(|guest| guest.punch(20..22)).await;
    let faults = machine.vm.vcpu_faults().unwrap();
    let filling = tokio::task::spawn_blocking(move || faults.fill_all(2));
    let filled = async {
        while machine.word().load(Ordering::Acquire) != 1 << 40 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, filled).await.expect("all others are filled");
    let look = |guest: &Guest| {
        (0..NR_PAGES).filter(|page| *page != 40).for_each(|page| match page {
            20 | 21 => assert!(guest.is_zero(page)),
            _ => guest.verify(page, SEED),
        });
    };
    machine.look(look).await;
    assert!(!filling.is_finished(), "it tries again");
    drop(machine);
    timeout(PATIENCE, filling).await.expect("it ends with the machine").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_a_replay_has_claimed_and_cannot_read_is_read_for_the_vcpu() {
    let Some(machine) = Machine::new().map(Arc::new) else { return };
    machine.source.pattern.nr_failures.store(1, Ordering::Relaxed);
    let populator = machine.vm.populator();
    let replay = tokio::task::spawn_blocking(move || populator.populate(0..PAGE as u64));
    machine.until_begun(1).await;
    let vcpu = machine.ask(0);
    sleep(Duration::from_millis(20)).await;
    machine.source.gate.add_permits(2);
    assert!(replay.await.unwrap().is_err());
    is_answered(vcpu).await;
    machine.look(|guest| guest.verify(0, SEED)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_is_not_mapped_keeps_no_thread_busy() {
    let Some(machine) = Machine::new().map(Arc::new) else { return };
    machine.source.gate.add_permits(Semaphore::MAX_PERMITS);
    // SAFETY: the others are accessed.
    unsafe { machine.guest.unmap(7..8) };
    let vcpu = machine.ask(7);
    let nr_begun = || machine.source.nr_begun.load(Ordering::Relaxed);
    let unchanged = async {
        loop {
            let before = nr_begun();
            sleep(Duration::from_millis(200)).await;
            if before > 0 && nr_begun() == before {
                break;
            }
        }
    };
    timeout(PATIENCE, unchanged).await.expect("it gives up");
    assert!((1..=64).contains(&nr_begun()) && !vcpu.is_finished() && machine.faults(7));
    machine.look(|guest| guest.verify(8, SEED)).await;
}

/// Where the bitmap is too short, or can be cut, there is no machine.
#[test]
fn bitmaps_that_cannot_be_trusted_are_refused() {
    use slat_pager::vm::userfault_bitmap::UserfaultBitmapError;
    let region = |page_bytes| slat_pager::vm::Region { address: 1 << 32, size_bytes: 1 << 30, offset: 0, page_bytes };
    let regions = |page_bytes| Regions::new(&[region(page_bytes)], 1 << 30).unwrap();
    let memfd = |nr_bytes: u64, seals: Option<SealFlags>| {
        let memfd = memfd_create("bitmap", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memfd, nr_bytes).unwrap();
        seals.into_iter().for_each(|seals| fcntl_add_seals(&memfd, seals).unwrap());
        memfd
    };
    let refused = |memfd, page_bytes| UserfaultBitmap::new(memfd, &regions(page_bytes)).unwrap_err();
    let shrink = Some(SealFlags::SHRINK);
    assert_eq!(refused(memfd(32768, shrink), 2 << 20), UserfaultBitmapError::PageSize { page_bytes: 2 << 20 });
    assert_eq!(refused(memfd(32768, None), 4096), UserfaultBitmapError::Unsealed);
    assert_eq!(refused(memfd(32768, Some(SealFlags::GROW)), 4096), UserfaultBitmapError::Unsealed);
    let short = UserfaultBitmapError::Short { size_bytes: 32767, nr_pages: 262_144 };
    assert_eq!(refused(memfd(32767, shrink), 4096), short);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(refused(reader, 4096), UserfaultBitmapError::Unsealed);
    let all: Range<u64> = 0..1 << 30;
    let bitmap = UserfaultBitmap::new(memfd(32768, shrink), &regions(4096)).unwrap();
    assert!(!bitmap.faults(all.start) && !bitmap.faults(all.end - 1) && !bitmap.faults(u64::MAX));
}
