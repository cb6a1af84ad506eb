//! What the boot loader hands over: command line, modules, memory map (Multiboot Specification
//! 0.6.96), and the start of the other CPUs.

#![expect(unsafe_code, reason = "reads what the boot loader wrote, and starts CPUs at an address")]

use core::slice;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use multiboot::information::{MemoryManagement, MemoryType, Multiboot, PAddr};
use thiserror::Error;

use super::apic::{self, Delivery};
use super::clock;

/// CPUs that the image has stacks for.
pub const MAX_CPUS: usize = 8;

/// The stack of a CPU. There is no guard page: an overflow would reach the page tables.
const STACK_BYTES: usize = 1 << 16;

/// Where the startup IPI sends a CPU: a page below 1 MiB that the memory map has as free.
const TRAMPOLINE: usize = 0x8000;

/// Milliseconds until a CPU that was started has to be there.
const START_MS: u64 = 2000;

core::arch::global_asm!(
    ".set MAX_CPUS, {max_cpus}",
    ".set STACK_BYTES, {stack_bytes}",
    include_str!("boot.s"),
    max_cpus = const MAX_CPUS,
    stack_bytes = const STACK_BYTES,
);

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_end: u8;
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

/// Memory is mapped to itself, below 4 GiB.
struct Identity;

impl MemoryManagement for Identity {
    unsafe fn paddr_to_slice(&self, address: PAddr, length: usize) -> Option<&'static [u8]> {
        // SAFETY: the boot loader's addresses, which are mapped, and which the image does not
        // write.
        (address != 0 && address < 1 << 32).then(|| unsafe { slice::from_raw_parts(address as *const u8, length) })
    }
    unsafe fn allocate(&mut self, _length: usize) -> Option<(PAddr, &mut [u8])> {
        None
    }
    unsafe fn deallocate(&mut self, _address: PAddr) {}
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
const MAX_REGIONS: usize = 32;
const MAX_MODULES: usize = 4;

/// What the boot loader hands over.
#[derive(Debug)]
pub struct BootInfo {
    /// The command line, without the image's name.
    pub command_line: &'static str,
    regions: [Option<Region>; MAX_REGIONS],
    modules: [Option<Module>; MAX_MODULES],
}

/// The text after the first word: loaders put the name of the file first.
fn after_name(text: &'static str) -> &'static str {
    text.split_once(' ').map_or("", |(_, rest)| rest.trim())
}

impl BootInfo {
    /// Reads what a multiboot loader left at `info`. `None` if there is nothing that makes sense.
    ///
    /// # Safety
    /// A multiboot loader has entered the image with this address in `ebx`, and what it left has
    /// not been overwritten.
    pub unsafe fn read(info: u32) -> Option<BootInfo> {
        let mut memory = Identity;
        // SAFETY: as the caller promises.
        let multiboot = unsafe { Multiboot::from_ptr(PAddr::from(info), &mut memory) }?;
        let mut regions = [None; MAX_REGIONS];
        for (place, entry) in regions.iter_mut().zip(multiboot.memory_regions()?) {
            let start = entry.base_address();
            let span = Span { start, end: start.saturating_add(entry.length()) };
            let kind =
                if entry.memory_type() == MemoryType::Available { RegionKind::Ram } else { RegionKind::Firmware };
            *place = Some(Region { span, kind });
        }
        let mut modules = [None; MAX_MODULES];
        for (place, module) in modules.iter_mut().zip(multiboot.modules().into_iter().flatten()) {
            let length = module.end.saturating_sub(module.start) as usize;
            // SAFETY: the boot loader has put the module there.
            let bytes = unsafe { Identity.paddr_to_slice(module.start, length) }?;
            // SAFETY: the boot loader has put it there.
            let text = unsafe { loader_text(module.string) };
            *place = Some(Module { bytes, text });
        }
        // SAFETY: as above.
        let command_line = unsafe { loader_text(multiboot.command_line()) };
        Some(BootInfo { command_line, regions, modules })
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

/// The text after the name, for good.
///
/// # Safety
/// The text is the boot loader's, whose memory is never written: `Memory::add` leaves it out.
unsafe fn loader_text(text: Option<&str>) -> &'static str {
    // SAFETY: as the caller promises.
    text.map_or("", |text| after_name(unsafe { &*core::ptr::from_ref(text) }))
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

/// Starts the other CPUs, by INIT and two startup IPIs to all of them (Intel SDM vol. 3A, 9.4.4
/// "MP Initialization Example"; AMD APM vol. 2, 16.9.4), and waits until `wanted` CPUs are there.
///
/// # Errors
/// [`MissingCpus`].
///
/// # Safety
/// To be called once, by the boot CPU.
pub unsafe fn start_other_cpus(wanted: u32) -> Result<(), MissingCpus> {
    let code = &raw const trampoline;
    let length = (&raw const trampoline_end).addr() - code.addr();
    // SAFETY: the page is free in each PC's memory map, and the allocator does not have it.
    unsafe { core::ptr::copy_nonoverlapping(code, TRAMPOLINE as *mut u8, length) };
    // SAFETY: the other CPUs have not started.
    unsafe { apic::send_to_others(Delivery::Init) };
    clock::wait_us(10_000);
    for _ in 0..2 {
        // SAFETY: the trampoline is there.
        unsafe { apic::send_to_others(Delivery::Startup { vector: (TRAMPOLINE >> 12) as u8 }) };
        clock::wait_us(200);
    }
    for _ in 0..START_MS {
        if PRESENT.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        clock::wait_us(1000);
    }
    Err(MissingCpus { present: PRESENT.load(Ordering::Acquire), wanted })
}
