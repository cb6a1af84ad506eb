//! What the boot loader hands over, the same on all machines; the image's own memory; and which
//! CPUs are there.

#![expect(unsafe_code, reason = "names what the linker script places, and believes the loader")]

use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use thiserror::Error;

use crate::arch::clock;

/// CPUs that the image has stacks for.
pub const MAX_CPUS: usize = 8;

/// The stack of a CPU. There is no guard page: an overflow would reach the page tables.
pub(crate) const STACK_BYTES: usize = 1 << 16;

/// Milliseconds until a CPU that was started has to be there.
const START_MS: u64 = 2000;

unsafe extern "C" {
    static image_start: u8;
    static image_text_end: u8;
    static image_end: u8;
    static stacks: [[AtomicU8; STACK_BYTES]; MAX_CPUS];
}

/// How far the stack of any CPU was used, in bytes: a stack begins as zeros.
pub fn max_stack_bytes() -> usize {
    // SAFETY: the stacks are the image's, and bytes.
    let all = unsafe { &stacks };
    let used = |stack: &[AtomicU8]| stack.iter().skip_while(|byte| byte.load(Ordering::Relaxed) == 0).count();
    all.iter().map(|stack| used(stack)).max().unwrap_or(0)
}

/// Memory from `start` up to `end`, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The first byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
}

impl Span {
    /// Its length in bytes.
    pub const fn size_bytes(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// What it has in common with `other`.
    pub fn and(self, other: Span) -> Span {
        Span { start: self.start.max(other.start), end: self.end.min(other.end) }
    }

    /// Whether the two have bytes in common.
    pub fn overlaps(self, other: Span) -> bool {
        self.and(other).size_bytes() != 0
    }

    /// All pages that have a byte of it, but for one that ends behind the last address.
    pub fn pages(self) -> Span {
        Span { start: self.start & !0xfff, end: self.end.checked_next_multiple_of(0x1000).unwrap_or(!0xfff) }
    }

    /// What is left of it below `other`, and above `other`.
    pub fn without(self, other: Span) -> [Span; 2] {
        let below = Span { start: self.start, end: self.end.min(other.start) };
        let above = Span { start: self.start.max(other.end), end: self.end };
        [below, above]
    }
}

/// The image's code and constants. A guest of the suite may read and execute them.
pub fn image_text() -> Span {
    Span { start: (&raw const image_start).addr() as u64, end: (&raw const image_text_end).addr() as u64 }
}

/// The whole image, with its stacks.
pub fn image() -> Span {
    Span { start: (&raw const image_start).addr() as u64, end: (&raw const image_end).addr() as u64 }
}

/// A range of the memory map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Where it is.
    pub span: Span,
    /// What it is.
    pub kind: RegionKind,
}

/// What a range of the memory map is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionKind {
    /// Free for the image and its guests.
    Ram,
    /// The firmware's, ACPI tables among it.
    Firmware,
}

/// A file that the boot loader has put into memory.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Its bytes.
    pub bytes: &'static [u8],
    /// The text after its name.
    pub text: &'static str,
}

/// Entries of the memory map, and modules, that are kept.
pub(crate) const MAX_REGIONS: usize = 32;
const MAX_MODULES: usize = 4;

/// What the boot loader hands over.
#[derive(Debug)]
pub struct BootInfo {
    /// The command line, without the image's name.
    pub command_line: &'static str,
    regions: [Option<Region>; MAX_REGIONS],
    modules: [Option<Module>; MAX_MODULES],
}

impl BootInfo {
    /// What a loader left. Entries of the memory map and modules that are too many are left out.
    ///
    /// # Safety
    /// The memory map is true: the guest may get what is the firmware's there. It has at most
    /// `MAX_REGIONS` entries: one that is left out may be the firmware's.
    pub unsafe fn new(
        command_line: &'static str,
        regions: impl Iterator<Item = Region>,
        modules: impl Iterator<Item = Module>,
    ) -> BootInfo {
        let mut boot = BootInfo { command_line, regions: [None; MAX_REGIONS], modules: [None; MAX_MODULES] };
        boot.regions.iter_mut().zip(regions).for_each(|(place, region)| *place = Some(region));
        boot.modules.iter_mut().zip(modules).for_each(|(place, module)| *place = Some(module));
        boot
    }

    /// The memory map.
    pub fn regions(&self) -> impl Iterator<Item = Region> + Clone + '_ {
        self.regions.iter().flatten().copied()
    }

    /// The modules, in their order.
    pub fn modules(&self) -> impl Iterator<Item = Module> + Clone + '_ {
        self.modules.iter().flatten().copied()
    }
}

/// CPUs that have come to Rust, the boot CPU included.
static PRESENT: AtomicU32 = AtomicU32::new(1);

/// Notes that the calling CPU is there.
pub fn note_present() {
    PRESENT.fetch_add(1, Ordering::Release);
}

/// A CPU did not start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{present} of {wanted} CPUs came up within {} s", START_MS / 1000)]
pub struct MissingCpus {
    /// CPUs that are there.
    pub present: u32,
    /// CPUs that were asked for.
    pub wanted: u32,
}

/// Waits until `wanted` CPUs are there.
///
/// # Errors
/// [`MissingCpus`].
pub fn wait_for_cpus(wanted: u32) -> Result<(), MissingCpus> {
    for _ in 0..START_MS {
        if PRESENT.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        clock::wait_us(1000);
    }
    Err(MissingCpus { present: PRESENT.load(Ordering::Acquire), wanted })
}
