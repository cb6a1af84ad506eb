//! A host whose answers a test chooses, page by page, and whose page-table pages may be encrypted.

use std::alloc::Layout;
use std::sync::{Arc, Mutex, PoisonError};

use slat::format::{Format, Hardware};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved, ZappedLeaf};
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, Level, MemoryRegion, MemoryRegionFlags, NodeId, Pfn, Vcpu, Vm,
};

use super::TestHost;

/// What the host says of a page.
type Answer = dyn Fn(Gfn, Access) -> Result<Resolved, Unresolved> + Send;

/// [`TestHost`] with these answers.
pub struct AnswerHost {
    pub host: TestHost,
    answer: Mutex<Box<Answer>>,
    /// [`Hardware::address_bits`] of the VM.
    address_bits: Hpa,
    /// Frames that the engine has asked for the node of.
    pub nodes_of: Mutex<Vec<Pfn>>,
}

impl std::fmt::Debug for AnswerHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerHost").finish_non_exhaustive()
    }
}

impl AnswerHost {
    /// Answers with `answer` from now on.
    pub fn answer(&self, answer: impl Fn(Gfn, Access) -> Result<Resolved, Unresolved> + Send + 'static) {
        *self.answer.lock().unwrap() = Box::new(answer);
    }
}

// SAFETY: all memory is that of a host that keeps the contract. The tests keep the rest of it.
unsafe impl Host for AnswerHost {
    type Backing = ();

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        self.host.allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        assert_eq!(table.0 & self.address_bits.0, 0, "the engine tells addresses without these bits");
        // SAFETY: as the caller promises.
        unsafe { self.host.free_table(table, layout) }
    }

    fn has_incoherent_walkers(&self) -> bool {
        self.host.has_incoherent_walkers()
    }

    fn clean_ptes(&self, first: *const u8, size_bytes: usize) {
        self.host.clean_ptes(first, size_bytes);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        assert_eq!(table.0 & self.address_bits.0, self.address_bits.0, "a page-table page has these bits");
        self.host.table_ptr(Hpa(table.0 & !self.address_bits.0))
    }

    fn node_of(&self, frame: Pfn) -> NodeId {
        self.nodes_of.lock().unwrap().push(frame);
        NodeId(0)
    }

    fn resolve(&self, (): &(), gfn: Gfn, _page: u64, access: Access) -> Result<Resolved, Unresolved> {
        // A test that fails while it answers shows that failure.
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)(gfn, access)
    }

    fn resolve_resident(&self, (): &(), gfn: Gfn, page: u64, access: Access) -> Option<Resolved> {
        self.resolve(&(), gfn, page, access).ok()
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.host.flush(ranges);
    }

    fn flush_local(&self, gpa: Gpa) {
        self.host.flush_local(gpa);
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        self.host.leaf_zapped(leaf);
    }

    fn timestamp_ns(&self) -> u64 {
        self.host.timestamp_ns()
    }
}

/// The frame that a page has if its test does not care.
pub fn frame_of(gfn: Gfn) -> Pfn {
    Pfn(gfn.0 + (1 << 20))
}

/// A VM on `hardware`, with a memslot of `size_bytes` bytes at address 0 with `flags`.
pub fn answer_vm<F: Format>(
    config: Config,
    hardware: Hardware,
    size_bytes: u64,
    flags: MemoryRegionFlags,
) -> Arc<Vm<AnswerHost, F>> {
    let host = AnswerHost {
        host: TestHost::default(),
        answer: Mutex::new(Box::new(|_, _| Err(Unresolved::Gone))),
        address_bits: hardware.address_bits,
        nodes_of: Mutex::default(),
    };
    let vm = Arc::new(Vm::new(host, config.with_hardware(hardware)).unwrap());
    vm.set_user_memory_region(slot(0, Gpa(0), size_bytes, flags)).unwrap();
    vm
}

/// A new memslot.
pub fn slot(slot: u32, guest_phys_addr: Gpa, memory_size: u64, flags: MemoryRegionFlags) -> MemoryRegion<()> {
    MemoryRegion { slot, flags, guest_phys_addr, memory_size, backing: Some(()), userfault_bitmap: None }
}

/// Other flags of such a memslot.
pub fn new_flags<F: Format>(vcpu: &Vcpu<AnswerHost, F>, size_bytes: u64, flags: MemoryRegionFlags) {
    let changed = MemoryRegion { backing: None, ..slot(0, Gpa(0), size_bytes, flags) };
    vcpu.vm().set_user_memory_region(changed).unwrap();
}

/// The levels of the page tables of a VM, as a walk from the root finds them: the lowest PTE for
/// `gpa`, and its level. The index in the root has as many bits as are left.
pub fn lowest_pte<F: Format>(vm: &Vm<AnswerHost, F>, gpa: Gpa) -> (slat::format::Pte, Level) {
    let (mut table, mut level) = (vm.root(), vm.root_level());
    loop {
        let index = gpa.gfn().0 / level.nr_pages();
        let index = if level == vm.root_level() { index } else { index % F::TABLE_ENTRIES as u64 };
        // SAFETY: inside a page-table page, which no thread frees meanwhile.
        let pte = slat::format::Pte(unsafe { vm.host().table_ptr(table).cast::<u64>().add(index as usize).read() });
        if !F::is_present(pte) || F::is_leaf(pte, level) {
            return (pte, level);
        }
        table = F::address(pte, level);
        level = level.down();
    }
}
