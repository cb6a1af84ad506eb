//! A host whose answers a test chooses, page by page, and whose page-table pages may be encrypted.

use std::sync::{Arc, Mutex, RwLock};

use slat::format::{Format, Hardware};
use slat::host::{Resolved, Unresolved};
use slat::{Access, Config, Gfn, Gpa, Host, Hpa, Level, MemoryRegion, MemoryRegionFlags, PageSize, Pfn, Vcpu, Vm};

use super::{TestBacking, TestHost, change, region};

/// What the host says of a page.
type Answer = dyn Fn(Gfn, Access) -> Result<Resolved, Unresolved> + Send + Sync;

/// What a [`TestHost`] answers, if its backings have no say.
pub struct Answers {
    answer: RwLock<Arc<Answer>>,
    /// [`Hardware::address_bits`] of the VM.
    address_bits: Hpa,
    /// Frames that the engine has asked for the node of.
    pub nodes_of: Mutex<Vec<Pfn>>,
}

impl std::fmt::Debug for Answers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answers").finish_non_exhaustive()
    }
}

impl Answers {
    pub(super) fn resolve(&self, gfn: Gfn, access: Access) -> Result<Resolved, Unresolved> {
        let answer = self.answer.read().unwrap().clone();
        answer(gfn, access)
    }

    /// The address of the page-table page at `table` without [`Hardware::address_bits`].
    pub(super) fn without_bits(&self, table: Hpa) -> Hpa {
        assert_eq!(table.0 & self.address_bits.0, self.address_bits.0, "a page-table page has these bits");
        Hpa(table.0 & !self.address_bits.0)
    }

    pub(super) fn assert_without_bits(&self, table: Hpa) {
        assert_eq!(table.0 & self.address_bits.0, 0, "the engine tells addresses without these bits");
    }
}

impl TestHost {
    /// A host that has no page before it gets an answer.
    pub fn with_answers(hardware: Hardware) -> TestHost {
        let mut host = TestHost::default();
        host.answers = Some(Box::new(Answers {
            answer: RwLock::new(Arc::new(|_, _| Err(Unresolved::Gone))),
            address_bits: hardware.address_bits,
            nodes_of: Mutex::default(),
        }));
        host
    }

    /// Of a host that has them.
    pub fn answers(&self) -> &Answers {
        self.answers.as_deref().expect("a host with answers")
    }

    /// Answers with `answer` from now on.
    pub fn answer(&self, answer: impl Fn(Gfn, Access) -> Result<Resolved, Unresolved> + Send + Sync + 'static) {
        *self.answers().answer.write().unwrap() = Arc::new(answer);
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
) -> Arc<Vm<TestHost, F>> {
    let vm = Arc::new(Vm::new(TestHost::with_answers(hardware), config.with_hardware(hardware)).unwrap());
    vm.set_user_memory_region(slot(0, Gpa(0), size_bytes, flags)).unwrap();
    vm
}

/// A new memslot.
pub fn slot(
    slot: u32,
    guest_phys_addr: Gpa,
    memory_size: u64,
    flags: MemoryRegionFlags,
) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion { flags, ..region(slot, guest_phys_addr.0, memory_size, 0, PageSize::Size4K) }
}

/// Other flags of such a memslot.
pub fn new_flags<F: Format>(vcpu: &Vcpu<TestHost, F>, size_bytes: u64, flags: MemoryRegionFlags) {
    vcpu.vm().set_user_memory_region(change(0, flags, 0, size_bytes)).unwrap();
}

/// The levels of the page tables of a VM, as a walk from the root finds them: the lowest PTE for
/// `gpa`, and its level. The index in the root has as many bits as are left.
pub fn lowest_pte<F: Format>(vm: &Vm<TestHost, F>, gpa: Gpa) -> (slat::format::Pte, Level) {
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
