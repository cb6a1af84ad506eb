//! What the boot loader hands over, the same on all machines; the image's own memory; and which
//! CPUs are there.

#![expect(unsafe_code, reason = "names what the linker script places, and believes the loader")]

use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use thiserror::Error;

use crate::arch::clock;
use crate::nodes::Nodes;

/// CPUs that the image has stacks for.
pub const MAX_CPUS: usize = 8;

/// The stack of a CPU. There is no guard page: an overflow would reach the page tables.
pub(crate) const STACK_BYTES: usize = 1 << 16;

/// Nanoseconds until a CPU that was started has to be there: an emulator's host may be busy.
const START_NS: u64 = 10_000_000_000;

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
    /// Its NUMA nodes.
    pub nodes: Nodes,
    regions: [Option<Region>; MAX_REGIONS],
    modules: [Option<Module>; MAX_MODULES],
}

impl BootInfo {
    /// What a loader left, of a machine with one node. Entries of the memory map and modules that are too many are left out.
    ///
    /// # Safety
    /// The memory map is true: the guest may get what is the firmware's there. It has at most
    /// `MAX_REGIONS` entries: one that is left out may be the firmware's.
    pub unsafe fn new(
        command_line: &'static str,
        regions: impl Iterator<Item = Region>,
        modules: impl Iterator<Item = Module>,
    ) -> BootInfo {
        let (regions_kept, modules_kept) = ([None; MAX_REGIONS], [None; MAX_MODULES]);
        let nodes = Nodes::ONE;
        let mut boot = BootInfo { command_line, nodes, regions: regions_kept, modules: modules_kept };
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
#[error("{present} of {wanted} CPUs came up within {} s", START_NS / 1_000_000_000)]
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
    // Acquire: a CPU has set itself up before.
    wait(wanted, || PRESENT.load(Ordering::Acquire), clock::now_ns)
}

/// By the clock, and not by a number of looks: these take any time.
fn wait(wanted: u32, present: impl Fn() -> u32, now_ns: impl Fn() -> u64) -> Result<(), MissingCpus> {
    let end = now_ns().saturating_add(START_NS);
    loop {
        // Before the look, so that the last look is late enough.
        let now = now_ns();
        match present() {
            present if present >= wanted => return Ok(()),
            present if now >= end => return Err(MissingCpus { present, wanted }),
            _ => core::hint::spin_loop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use core::cell::Cell;

    use super::*;

    #[test]
    fn a_cpu_that_never_comes_is_waited_for_as_long_as_the_clock_says() {
        let (now, nr_looks) = (Cell::new(7), Cell::new(0));
        let clock = |step: u64| {
            let now = &now;
            move || now.replace(now.get() + step)
        };
        let present = |of: u32| {
            nr_looks.set(nr_looks.get() + 1);
            of
        };
        assert_eq!(wait(2, || present(1), clock(START_NS / 4)), Err(MissingCpus { present: 1, wanted: 2 }));
        assert_eq!(nr_looks.take(), 4);
        // A clock that goes on by more than that while the CPU looks once.
        assert_eq!(wait(2, || present(1), clock(2 * START_NS)), Err(MissingCpus { present: 1, wanted: 2 }));
        assert_eq!(nr_looks.take(), 1);
        // The CPU comes late, and the clock wraps never.
        now.set(u64::MAX - 3);
        assert_eq!(wait(2, || present(u32::from(nr_looks.get() > 1) + 1), clock(0)), Ok(()));
        assert_eq!(MissingCpus { present: 1, wanted: 2 }.to_string(), "1 of 2 CPUs came up within 10 s");
    }
}
