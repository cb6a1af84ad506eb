//! Userfault bits that user space sets and clears, rescans, pages that become private and shared, and a flag
//! that is turned on with one bitmap or the other.

use slat::MemoryRegion;
use slat::slots::{MemoryAttributes, UserfaultBitmap};

use super::*;

/// Schedules of each kind.
const SCHEDULES: usize = 120;
const ALL: GfnRange = GfnRange { start: Gfn(0), end: Gfn(NR_PAGES) };
const INVALIDATION: u64 = 0;
const CHANGE: u64 = 1;
const RESCAN: u64 = 2;

/// A bit for each page, and a bit for each block.
struct Bitmap {
    words: Arc<Vec<AtomicU64>>,
    granularity: PageSize,
}

impl Bitmap {
    fn new(granularity: PageSize) -> Bitmap {
        let words = Arc::new((0..NR_PAGES / 64).map(|_| AtomicU64::new(0)).collect());
        let bitmap = Bitmap { words, granularity };
        events::record(Event::BitmapMade { bitmap: bitmap.address(0), is_big: granularity != PageSize::Size4K });
        bitmap
    }

    fn address(&self, word: usize) -> u64 {
        std::ptr::from_ref(&self.words[word]).addr() as u64
    }

    /// The word and the bit of a page.
    fn bit_of(&self, gfn: u64) -> (usize, u64) {
        let bit = if self.granularity == PageSize::Size4K { gfn } else { gfn / BLOCK };
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    fn set(&self, gfn: u64) {
        let (word, bit) = self.bit_of(gfn);
        let before = self.words[word].fetch_or(bit, Ordering::SeqCst);
        events::record(Event::BitsChanged { word: self.address(word), value: before | bit });
    }

    fn clear(&self, gfn: u64) {
        let (word, bit) = self.bit_of(gfn);
        let before = self.words[word].fetch_and(!bit, Ordering::SeqCst);
        events::record(Event::BitsChanged { word: self.address(word), value: before & !bit });
    }

    fn of_slot(&self) -> UserfaultBitmap {
        UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&self.words), self.granularity)
    }
}

struct Scene<F: Format> {
    vm: TestVm<F>,
    bitmaps: [Bitmap; 2],
    /// The pages that are used.
    pages: [u64; 2],
}

impl<F: Format> Scene<F> {
    fn call<E>(&self, kind: u64, range: GfnRange, bitmap: u64, call: impl FnOnce() -> Result<(), E>) {
        events::record(Event::CallBegins { kind, start: range.start.0, end: range.end.0, bitmap });
        let is_ok = call().is_ok();
        events::record(Event::CallEnds { is_ok });
    }

    /// Turns the flag on with a bitmap, or off.
    fn turn(&self, bitmap: Option<&Bitmap>) {
        let flag = bitmap.map_or(MemoryRegionFlags::empty(), |_| MemoryRegionFlags::USERFAULT);
        let change = region(0, MemoryRegionFlags::GUEST_MEMFD | flag, 0, NR_PAGES, None);
        let change = MemoryRegion { userfault_bitmap: bitmap.map(Bitmap::of_slot), ..change };
        let address = bitmap.map_or(0, |bitmap| bitmap.address(0));
        self.call(CHANGE, ALL, address, || self.vm.set_user_memory_region(change));
    }

    fn random_range(&self) -> GfnRange {
        let gfn = Gfn(pick(&self.pages));
        pick(&[GfnRange::new(gfn, 1), GfnRange::new(Gfn(gfn.0 / BLOCK * BLOCK), BLOCK), ALL])
    }

    /// Takes pages back, and lets them arrive again.
    fn take_back(&self) {
        for _ in 0..2 {
            let (bitmap, gfn) = (&self.bitmaps[random(2) as usize], pick(&self.pages));
            bitmap.set(gfn);
            let range = self.random_range();
            self.call(RESCAN, range, 0, || self.vm.rescan_userfault(0, range.start.0, range.nr_pages()).map(drop));
            bitmap.clear(gfn);
        }
    }

    /// Turns the flag on, perhaps to the other bitmap, and perhaps off.
    fn turn_flag(&self) {
        for _ in 0..2 {
            let (bitmap, gfn) = (&self.bitmaps[random(2) as usize], pick(&self.pages));
            bitmap.set(gfn);
            self.turn(Some(bitmap));
            bitmap.clear(gfn);
            if random(3) == 0 {
                self.turn(None);
            }
        }
    }

    /// Makes pages private or shared, or only invalidates them.
    fn change_attributes(&self) {
        for _ in 0..2 {
            let range = self.random_range();
            let attributes = pick(&[MemoryAttributes::PRIVATE, MemoryAttributes::PRIVATE, MemoryAttributes::empty()]);
            let (start, size) = (Gpa(range.start.0 * PAGE_SIZE), range.nr_pages() * PAGE_SIZE);
            if random(3) == 0 {
                self.call(INVALIDATION, range, 0, || self.vm.invalidate_range(range).map(drop));
            } else {
                self.call(INVALIDATION, range, 0, || self.vm.set_memory_attributes(start, size, attributes));
            }
        }
    }
}

fn scenario<F: Format>() {
    events::start();
    let mut host = MovingHost::new(PageSize::Size2M);
    // No recovery: it is in another proof.
    host.max_size_of_reads = PageSize::Size4K;
    let vm = new_vm::<F>(host, Config::default(), MemoryRegionFlags::GUEST_MEMFD, NR_PAGES);
    is_record_of("userfault", &vm);
    let first = pick(&[0, BLOCK]);
    let bitmaps = [PageSize::Size4K, PageSize::Size2M].map(Bitmap::new);
    let scene = Arc::new(Scene { vm, bitmaps, pages: [first, first + 1] });
    scene.turn(Some(&scene.bitmaps[random(2) as usize]));
    let bodies: [fn(&Arc<Scene<F>>); 5] = [
        |scene| guest(&scene.vm, 0, scene.pages),
        |scene| guest(&scene.vm, 1, scene.pages),
        |scene| scene.take_back(),
        |scene| scene.turn_flag(),
        |scene| scene.change_attributes(),
    ];
    on_threads(&scene, bodies);
    save();
}

#[test]
fn userfault_bits_and_attributes() {
    check_less(SCHEDULES, scenario::<Tiny<2>>);
}
