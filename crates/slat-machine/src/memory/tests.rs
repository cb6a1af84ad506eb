//! Guest memory of each kind: its frames, its end, and the errors on a machine with too little
//! memory.

use parking_lot::Mutex;
use slat::host::Unresolved;
use slat::{Access, PAGE_SIZE, PageSize};

use super::*;

/// Tests that request nearly all memory would see each other's mappings.
static MUCH_MEMORY: Mutex<()> = Mutex::new(());

fn resolve(backing: &Backing, offset_bytes: u64, access: Access) -> Result<Resolved, Unresolved> {
    backing.resolve(offset_bytes, access, &|_| panic!("its frames are fixed"))
}

#[test]
fn names_are_those_of_the_selftests() {
    for kind in BackingKind::ALL {
        assert_eq!(kind.to_string().parse::<BackingKind>().expect("its own name"), kind);
    }
    assert_eq!("anonymous_hugetlb".parse::<BackingKind>().expect("the default size"), BackingKind::AnonymousHugetlb2M);
    let error = "anonymos".parse::<BackingKind>().expect_err("no such kind");
    assert!(error.is_bad_usage());
    let text = error.to_string();
    for kind in BackingKind::ALL {
        assert!(text.contains(&kind.to_string()), "{text}");
    }
}

#[test]
fn bad_sizes_are_bad_usage() {
    for kind in BackingKind::ALL {
        let error = Backing::new(kind, 0).expect_err("no memory");
        assert!(matches!(error, MemoryError::ZeroSize) && error.is_bad_usage());
        let error = Backing::new(kind, SIZE_1G + 1).expect_err("not whole pages");
        assert!(matches!(error, MemoryError::UnalignedSize { .. }) && error.is_bad_usage(), "{error}");
    }
    assert!(Backing::new(BackingKind::AnonymousHugetlb2M, PAGE_SIZE).expect_err("not whole pages").is_bad_usage());
}

#[test]
fn too_much_memory_is_refused() {
    let _alone = MUCH_MEMORY.lock();
    for kind in [BackingKind::Anonymous, BackingKind::AnonymousThp, BackingKind::Shmem] {
        for size_bytes in [1 << 46, 1 << 62, !(PAGE_SIZE - 1)] {
            let error = Backing::new(kind, size_bytes).expect_err("no machine has that much");
            assert!(matches!(error, MemoryError::NotEnoughMemory { .. }), "{error}");
            assert!(!error.is_bad_usage());
        }
    }
}

#[test]
fn the_same_memory_is_not_reserved_twice() {
    let _alone = MUCH_MEMORY.lock();
    let Some(available_bytes) = topology::available_memory_bytes() else { return };
    let most = (available_bytes / 10 * 6) & !(PAGE_SIZE - 1);
    // Address space may be limited where memory is not.
    let Ok(first) = Backing::new(BackingKind::Anonymous, most) else { return };
    let error = Backing::new(BackingKind::Anonymous, most).expect_err("reserved already");
    assert!(matches!(error, MemoryError::NotEnoughMemory { .. }), "{error}");
    drop(first);
    Backing::new(BackingKind::Anonymous, most).expect("released");
}

#[test]
fn missing_huge_pages_are_an_error_at_once() {
    for (kind, size_bytes) in [(BackingKind::AnonymousHugetlb2M, 1 << 45), (BackingKind::AnonymousHugetlb1G, 1 << 45)] {
        let error = Backing::new(kind, size_bytes).expect_err("no pool is that large");
        let MemoryError::NotEnoughHugePages { needed, free, ref pool, .. } = error else { panic!("{error}") };
        assert_eq!(needed, size_bytes / kind.page_size().size_bytes());
        assert!(free < needed);
        assert!(error.to_string().contains(pool) && error.to_string().contains("nr_hugepages"));
        assert!(!error.is_bad_usage());
    }
}

#[test]
fn huge_pages_are_resolved_whole_where_there_are_any() {
    // Only on machines with a pool.
    let Ok(backing) = Backing::new(BackingKind::AnonymousHugetlb2M, SIZE_2M) else { return };
    assert!((backing.as_ptr().addr() as u64).is_multiple_of(SIZE_2M));
    assert_eq!(resolve(&backing, SIZE_2M - 1, Access::Write).expect("inside").max_size, PageSize::Size2M);
}

#[test]
fn mappings_are_aligned_for_the_largest_leaf() {
    for kind in [BackingKind::Anonymous, BackingKind::AnonymousThp, BackingKind::Shmem] {
        let small = Backing::new(kind, 3 * PAGE_SIZE).expect("memory");
        assert!((small.as_ptr().addr() as u64).is_multiple_of(SIZE_2M));
        assert_eq!((small.size_bytes(), small.kind()), (3 * PAGE_SIZE, kind));
        let large = Backing::new(kind, SIZE_1G + PAGE_SIZE).expect("memory, which is not touched");
        assert!((large.as_ptr().addr() as u64).is_multiple_of(SIZE_1G));
    }
}

#[test]
fn resolve_returns_the_frame_under_the_pointer() {
    for kind in [BackingKind::Anonymous, BackingKind::Shmem] {
        let backing = Backing::new(kind, 8 * PAGE_SIZE).expect("memory");
        for access in [Access::Read, Access::Execute, Access::Write] {
            for offset_bytes in [0, 1, PAGE_SIZE, 7 * PAGE_SIZE, 8 * PAGE_SIZE - 1] {
                let resolved = resolve(&backing, offset_bytes, access).expect("inside");
                let page = backing.as_ptr().wrapping_add((offset_bytes & !(PAGE_SIZE - 1)) as usize);
                assert_eq!(phys::ptr_of(resolved.pfn.hpa()), page);
                assert_eq!(resolved.max_size, PageSize::Size4K);
                assert!(resolved.writable);
            }
        }
        for offset_bytes in [8 * PAGE_SIZE, 9 * PAGE_SIZE, u64::MAX] {
            assert_eq!(resolve(&backing, offset_bytes, Access::Write), Err(Unresolved::Gone));
        }
    }
}

/// How many pages of the memory the kernel holds (mincore(2)).
fn resident_pages(backing: &Backing) -> usize {
    let nr_pages = (backing.size_bytes() / PAGE_SIZE) as usize;
    let mut resident = vec![0u8; nr_pages];
    // SAFETY: the range is the mapping, and the vector has a byte for each page of it.
    let result =
        unsafe { libc::mincore(backing.as_ptr().cast(), backing.size_bytes() as usize, resident.as_mut_ptr()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    resident.iter().filter(|&&page| page & 1 != 0).count()
}

#[test]
fn resolve_really_touches() {
    let backing = Backing::new(BackingKind::Anonymous, 8 * PAGE_SIZE).expect("memory");
    assert_eq!(resident_pages(&backing), 0);
    resolve(&backing, 0, Access::Write).expect("inside");
    resolve(&backing, 5 * PAGE_SIZE, Access::Write).expect("inside");
    assert_eq!(resident_pages(&backing), 2);
    // The write touch changes nothing.
    // SAFETY: in the mapping, and no other thread uses it.
    unsafe { backing.as_ptr().cast::<u64>().write(0x1234) };
    resolve(&backing, 0, Access::Write).expect("inside");
    // SAFETY: as above.
    assert_eq!(unsafe { backing.as_ptr().cast::<u64>().read() }, 0x1234);
}

#[test]
fn a_write_touch_allocates_a_page() {
    let backing = Backing::new(BackingKind::Anonymous, PAGE_SIZE).expect("memory");
    let minor_faults = || {
        // SAFETY: all zeros are a valid value, and the kernel fills it in.
        unsafe {
            let mut usage = std::mem::zeroed::<libc::rusage>();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
            usage.ru_minflt
        }
    };
    resolve(&backing, 0, Access::Write).expect("inside");
    let before = minor_faults();
    // SAFETY: in the mapping, and no other thread uses it.
    unsafe { backing.as_ptr().write_volatile(1) };
    assert_eq!(minor_faults(), before, "the write after a resolve for writing faulted again");
}

#[test]
fn transparent_huge_pages_are_reported_where_they_are() {
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if !enabled.is_ok_and(|text| !text.contains("[never]")) {
        return;
    }
    // Memory may be fragmented at one moment; of eight blocks one is huge.
    let backing = Backing::new(BackingKind::AnonymousThp, 8 * SIZE_2M + 5 * PAGE_SIZE).expect("memory");
    let size_at = |offset_bytes| resolve(&backing, offset_bytes, Access::Write).expect("inside").max_size;
    let huge: Vec<u64> = (0..8).filter(|block| size_at(block * SIZE_2M + 3 * PAGE_SIZE) == PageSize::Size2M).collect();
    assert!(!huge.is_empty(), "the kernel made no huge page, or did not report it");
    // A tail that is shorter, and one that was broken up.
    assert_eq!(size_at(8 * SIZE_2M + PAGE_SIZE), PageSize::Size4K);
    assert_eq!(resolve(&backing, 8 * SIZE_2M + 5 * PAGE_SIZE, Access::Write), Err(Unresolved::Gone));
    backing.discard(huge[0] * SIZE_2M + PAGE_SIZE, PAGE_SIZE).unwrap();
    assert_eq!(size_at(huge[0] * SIZE_2M), PageSize::Size4K);
}

#[test]
fn clones_are_the_same_memory() {
    let backing = Backing::new(BackingKind::Shmem, PAGE_SIZE).expect("memory");
    let clone = backing.clone();
    let address = backing.as_ptr();
    drop(backing);
    assert_eq!(clone.as_ptr(), address);
    resolve(&clone, 0, Access::Write).expect("still mapped");
}
