//! A guest of the real KVM: a vCPU that runs a program at CPL 3, which writes one word to each of
//! some pages of the region, or reads from some. Its page tables, descriptors and programs are in
//! the *system* (`system`).
//!
//! A program ends by a write to where nothing is mapped. The handler of that page fault, at CPL 0,
//! writes to an I/O port, which returns to the thread here. CR2, the pushed RIP and the counter
//! show whether all was done. (A software interrupt would do, but there are KVMs whose guests
//! cannot have one.) Each run sets all registers anew.
//!
//! Sources: AMD APM vol. 2, 8.2.15 (page faults); the kernel's documentation of the KVM API.

use std::ops::Range;
use std::time::Duration;

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::{VcpuExit, VcpuFd};
use slat::Gfn;
use slat_machine::memory::Backing;

use super::system::{EXIT_GVA, GuestProgram, READ_PAGES, System, WRITE_LISTED, WRITE_PAGES, page_gpa};
use super::vm::tried;
use super::watchdog::Watchdog;
use super::{KvmError, VmShape};

const PAGE_FAULT: u16 = 14;
/// The bit that is always one.
const RFLAGS: u64 = 1 << 1;

/// The longest time of a run in which `nr_vcpus` vCPUs write `nr_pages` pages each. A write fault
/// takes 25 to 90 µs where KVM has shadow page tables and a CPU for itself, and all may wait for
/// one lock.
fn time_limit(nr_pages: u64, nr_vcpus: u64) -> Duration {
    Duration::from_secs(20) + Duration::from_millis(nr_pages.saturating_mul(nr_vcpus))
}

/// A vCPU with its programs. One thread drives it.
pub(crate) struct KvmGuest {
    // Declared before the memory, so that it is dropped first: a vCPU keeps its VM alive.
    vcpu: VcpuFd,
    system: System,
    _region: Backing,
    index: u64,
    nr_vcpus: u64,
    /// The system registers at CPL 3.
    sregs: kvm_sregs,
}

impl KvmGuest {
    /// The guest with number `index` of a VM of `shape`.
    pub(super) fn new(
        vcpu: VcpuFd,
        index: u64,
        shape: &VmShape,
        system: &System,
        region: &Backing,
    ) -> Result<KvmGuest, KvmError> {
        let sregs = system.user_sregs(index, tried("get the system registers", vcpu.get_sregs())?);
        Ok(KvmGuest {
            vcpu,
            system: system.clone(),
            _region: region.clone(),
            index,
            nr_vcpus: shape.nr_vcpus as u64,
            sregs,
        })
    }

    /// Writes `value` to each of `pages`, in this order. There is at least one page, and no more
    /// than the list has room for.
    pub(crate) fn write_listed(&mut self, pages: &[u32], value: u64) -> Result<(), KvmError> {
        let list = self.system.set_list(self.index, pages)?;
        let regs = kvm_regs { rsi: list, rcx: pages.len() as u64, rax: value, ..kvm_regs::default() };
        self.execute(&WRITE_LISTED, regs, pages.len() as u64)
    }

    /// Writes `first` to the first of `pages`, which is not empty, `first + 1` to the second, and
    /// so on.
    pub(crate) fn write_pages(&mut self, pages: Range<u64>, first: u64) -> Result<(), KvmError> {
        let nr_pages = pages.end - pages.start;
        let regs = kvm_regs { rsi: page_gpa(pages.start), rcx: nr_pages, rax: first, ..kvm_regs::default() };
        self.execute(&WRITE_PAGES, regs, nr_pages)
    }

    /// Reads `nr_reads` times, from each of the first `nr_pages` pages in turn. `nr_pages` is a
    /// power of two, of 512 at most.
    pub(crate) fn read_pages(&mut self, nr_pages: u64, nr_reads: u64) -> Result<(), KvmError> {
        debug_assert!(nr_pages.is_power_of_two() && nr_pages <= 512, "{nr_pages}");
        // The region's address is a multiple of more than that.
        let regs = kvm_regs { rsi: page_gpa(0), rcx: nr_reads, r8: !(nr_pages << Gfn::SHIFT), ..kvm_regs::default() };
        self.execute(&READ_PAGES, regs, nr_pages)
    }

    /// Runs `program` from its start to its end, with these registers. It accesses `nr_pages`
    /// pages.
    fn execute(&mut self, program: &GuestProgram, regs: kvm_regs, nr_pages: u64) -> Result<(), KvmError> {
        let regs = kvm_regs { rip: program.start(), rdx: EXIT_GVA, rflags: RFLAGS, ..regs };
        tried("set the system registers", self.vcpu.set_sregs(&self.sregs))?;
        tried("set the registers", self.vcpu.set_regs(&regs))?;
        let port = self.run(nr_pages)?;

        let regs = tried("get the registers", self.vcpu.get_regs())?;
        let cr2 = tried("get the system registers", self.vcpu.get_sregs())?.cr2;
        let ended = (port, cr2, self.system.pushed_rip(self.index), regs.rcx);
        if ended != (PAGE_FAULT, EXIT_GVA, program.last(), 0) {
            return Err(KvmError(format!("the guest ended with exception, CR2, RIP, RCX {ended:#x?}")));
        }
        Ok(())
    }

    /// Runs until the guest writes to a port, and returns the port.
    fn run(&mut self, nr_pages: u64) -> Result<u16, KvmError> {
        let limit = time_limit(nr_pages, self.nr_vcpus);
        let watchdog = Watchdog::new(limit).map_err(|error| KvmError(format!("set a timer: {error}")))?;
        let why = loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, _)) => return Ok(port),
                Ok(other) => break format!("{other:?}"),
                Err(error) if error.errno() == libc::EINTR && !watchdog.has_expired() => (),
                Err(error) if error.errno() == libc::EINTR => break "it does not end".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        let rip = self.vcpu.get_regs().map_or(0, |regs| regs.rip);
        Err(KvmError(format!("run the guest: {why}, at {rip:#x}")))
    }
}
