//! CPUs that walk shadow page tables. They cache what a CPU may cache until a flush names it:
//! translations, and the addresses of lowest page-table pages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat::baselines::{AtomicU64, full_fence};
use slat::shadow::{GuestAccess, GuestEntry, Gva, LocalFlush, PagingRegister, PagingRegisters, Privilege};
use slat::{Access, Exit, Hpa, Outcome, Vcpu};

use super::{ADDRESS, LABEL, MAX_CPUS, NX, P, POISON, PS, ShadowHost, TestVm, U, W, label_of, pause};

/// A page of data, or a page-table page.
#[derive(Clone, Copy)]
pub struct Page<'h> {
    host: &'h ShadowHost,
    hpa: Hpa,
}

impl<'h> Page<'h> {
    pub fn word(self, index: u64) -> &'h AtomicU64 {
        self.host.word(Hpa(self.hpa.0 + index * 8))
    }

    /// Which page it is.
    pub fn gfn(self) -> u64 {
        let label = self.word(LABEL).load(Ordering::SeqCst);
        let gfn = label >> 12 & 0xfff;
        assert_eq!(label, label_of(gfn), "a CPU has reached a page that is not of the guest");
        gfn
    }
}

/// What a walk has reached, and the rights on the way to it.
#[derive(Clone, Copy)]
pub struct Cached {
    pub page: Hpa,
    writable: bool,
    user: bool,
    executable: bool,
}

impl Cached {
    fn through(self, entry: u64) -> Cached {
        Cached {
            page: Hpa(entry & ADDRESS),
            writable: self.writable && entry & W != 0,
            user: self.user && entry & U != 0,
            executable: self.executable && entry & NX == 0,
        }
    }

    pub fn allows(self, access: Access, privilege: Privilege) -> bool {
        (privilege != Privilege::User || self.user)
            && match access {
                Access::Read => true,
                Access::Write => self.writable,
                Access::Execute | Access::ExecuteUser => self.executable,
            }
    }
}

/// Walks from `root` for `va`. `entry_in` reads the PTE, from what the walk has reached and the
/// level of the PTE.
pub fn walk(root: Hpa, levels: u8, va: u64, mut entry_in: impl FnMut(Cached, u32) -> u64) -> Option<Cached> {
    let mut cached = Cached { page: root, writable: true, user: true, executable: true };
    for level in (1..=u32::from(levels)).rev() {
        let entry = entry_in(cached, level);
        if entry & P == 0 {
            return None;
        }
        cached = cached.through(entry);
        if level > 1 && entry & PS != 0 {
            cached.page.0 += va & ((1 << (12 + 9 * (level - 1))) - 1) & !0xfff;
            break;
        }
    }
    Some(cached)
}

/// Long mode with PCIDs, global pages and write protection.
pub fn registers_with_pcids(cr3: u64) -> PagingRegisters {
    PagingRegisters { cr0: 1 << 31 | 1 << 16 | 1, cr3, cr4: 1 << 5 | 1 << 17 | 1 << 7, efer: 1 << 8 | 1 << 11 }
}

/// A CPU of the guest.
pub struct Cpu {
    pub vm: Arc<TestVm>,
    vcpu: Vcpu<ShadowHost, slat::format::Npt>,
    /// It must be entered again before it runs.
    has_exited: bool,
    index: usize,
    privilege: Privilege,
    loaded: GuestEntry,
    translations: HashMap<(u16, u64), Cached>,
    /// Lowest page-table pages, and the rights on the way to them, by PCID and 2 MiB of address.
    tables: HashMap<(u16, u64), Cached>,
    /// The host's flushes that it has executed.
    seen_flushes: u64,
}

/// Ends an access, also if a check in it fails: other threads wait for its end.
struct Over<'a>(&'a AtomicU64);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Cpu {
    pub fn new(vm: &Arc<TestVm>) -> Cpu {
        let index = vm.host().nr_cpus.fetch_add(1, Ordering::SeqCst);
        assert!(index < MAX_CPUS);
        let mut vcpu = vm.create_vcpu().unwrap();
        let loaded = vcpu.entry().unwrap();
        Cpu {
            vm: Arc::clone(vm),
            vcpu,
            has_exited: false,
            index,
            privilege: Privilege::Supervisor,
            loaded,
            translations: HashMap::new(),
            tables: HashMap::new(),
            seen_flushes: 0,
        }
    }

    pub fn long_mode(&mut self, cr3: u64) {
        self.set_registers(registers_with_pcids(cr3));
    }

    pub fn set_registers(&mut self, registers: PagingRegisters) {
        self.vcpu.set_paging_registers(registers).unwrap();
        self.enter();
    }

    pub fn write_register(&mut self, register: PagingRegister, value: u64) {
        self.resumes(|vcpu| vcpu.write_paging_register(register, value).unwrap());
    }

    pub fn load_cr3(&mut self, value: u64) {
        self.resumes(|vcpu| vcpu.load_cr3(value).unwrap());
    }

    pub fn invlpg(&mut self, va: u64) {
        self.resumes(|vcpu| vcpu.invlpg(Gva(va)).unwrap());
    }

    pub fn invpcid(&mut self, kind: u64, pcid: u64, va: u64) {
        self.resumes(|vcpu| vcpu.invpcid(kind, [pcid, va]).unwrap());
    }

    /// For calls that have no method here.
    pub fn vcpu(&mut self) -> &mut Vcpu<ShadowHost, slat::format::Npt> {
        self.has_exited = true;
        &mut self.vcpu
    }

    fn resumes(&mut self, call: impl FnOnce(&mut Vcpu<ShadowHost, slat::format::Npt>) -> Outcome) {
        assert_eq!(call(&mut self.vcpu), Outcome::Resume);
        self.enter();
    }

    /// Loads what the engine returns before the guest runs.
    fn enter(&mut self) {
        self.loaded = self.vcpu.entry().unwrap();
        let pcid = self.loaded.pcid;
        match self.loaded.flush {
            LocalFlush::None => {}
            LocalFlush::Page(gva) => self.forget(gva.0, |_| true),
            LocalFlush::Context => {
                self.translations.retain(|key, _| key.0 != pcid);
                self.tables.retain(|key, _| key.0 != pcid);
            }
            LocalFlush::All => self.forget_all(),
        }
    }

    fn forget_all(&mut self) {
        self.translations.clear();
        self.tables.clear();
    }

    /// Forgets the translations of `va` in the PCIDs that `is_meant` selects.
    fn forget(&mut self, va: u64, is_meant: impl Fn(u16) -> bool) {
        self.translations.retain(|key, _| !is_meant(key.0) || key.1 != va >> 12);
        self.tables.retain(|key, _| !is_meant(key.0) || key.1 != va >> 21);
    }

    fn entry_in(&self, table: Hpa, va: u64, level: u32) -> u64 {
        let entry = self.vm.host().word(Hpa(table.0 + index(va, level) * 8)).load(Ordering::SeqCst);
        assert_ne!(entry, POISON, "a CPU walks a page-table page that was freed");
        entry
    }

    /// The translation that the CPU uses for `va`: cached, or walked now.
    fn translate(&mut self, va: u64, access: Access) -> Option<Cached> {
        let pcid = self.loaded.pcid;
        let key = (pcid, va >> 12);
        if let Some(&cached) = self.translations.get(&key) {
            if cached.allows(access, self.privilege) {
                return Some(cached);
            }
            // As a page fault does.
            self.forget(va, |of| of == pcid);
        }
        let cached = self.walk_from_cached_table(va).or_else(|| {
            // The page-table page may still be there while the directory entry no longer points to
            // it.
            self.tables.remove(&(pcid, va >> 21));
            self.walk(va)
        })?;
        if !cached.allows(access, self.privilege) {
            self.forget(va, |of| of == pcid);
            return None;
        }
        self.translations.insert(key, cached);
        Some(cached)
    }

    fn walk_from_cached_table(&self, va: u64) -> Option<Cached> {
        let table = *self.tables.get(&(self.loaded.pcid, va >> 21))?;
        let entry = self.entry_in(table.page, va, 1);
        (entry & P != 0).then(|| table.through(entry))
    }

    fn walk(&mut self, va: u64) -> Option<Cached> {
        let mut table = None;
        let found = walk(self.loaded.root, self.loaded.levels, va, |cached, level| {
            if level == 1 {
                table = Some(cached);
            }
            self.entry_in(cached.page, va, level)
        });
        if let Some(table) = table {
            self.tables.insert((self.loaded.pcid, va >> 21), table);
        }
        found
    }

    /// One access at `va`, with `effect` on the page that it reaches. A fault is served, and the
    /// access is tried again until it reaches a page or exits.
    pub fn access<R>(&mut self, va: u64, access: Access, effect: impl Fn(Page<'_>) -> R) -> Result<R, Exit> {
        if std::mem::take(&mut self.has_exited) {
            self.enter();
        }
        for _ in 0..100_000 {
            if let Some(result) = self.during_access(va, access, &effect) {
                return Ok(result);
            }
            let access = GuestAccess { access, privilege: self.privilege };
            let outcome = self.vcpu.handle_page_fault(Gva(va), access).unwrap();
            self.enter();
            match outcome {
                Outcome::Resume => pause(),
                Outcome::Exit(exit) => return Err(exit),
            }
        }
        panic!("{va:#x} still faults");
    }

    fn during_access<R>(&mut self, va: u64, access: Access, effect: impl Fn(Page<'_>) -> R) -> Option<R> {
        let vm = Arc::clone(&self.vm);
        let host = vm.host();
        let word = &host.accesses[self.index];
        word.fetch_add(1, Ordering::SeqCst);
        let _over = Over(word);
        full_fence();
        let nr_flushes = host.nr_flushes.load(Ordering::SeqCst);
        if nr_flushes != self.seen_flushes {
            self.seen_flushes = nr_flushes;
            self.forget_all();
        }
        self.translate(va, access).map(|cached| effect(Page { host, hpa: cached.page }))
    }

    /// Writes a word as the guest does. If the page holds a page table, the hypervisor emulates the
    /// write.
    pub fn store(&mut self, va: u64, value: u64) -> Result<(), Exit> {
        let index = va % 4096 / 8;
        match self.access(va, Access::Write, |page| page.word(index).store(value, Ordering::SeqCst)) {
            Err(Exit::EmulateWrite { gpa }) => {
                assert_eq!(gpa.0 % 4096, va % 4096);
                self.resumes(|vcpu| vcpu.write_guest_table(gpa, &value.to_le_bytes()).unwrap());
                Ok(())
            }
            result => result,
        }
    }

    /// A supervisor fetch from a user page, with SMEP: a page fault, which flushes the address.
    pub fn forbidden_fetch(&mut self, va: u64) {
        let fetch = GuestAccess { access: Access::Execute, privilege: Privilege::Supervisor };
        loop {
            let pcid = self.loaded.pcid;
            let outcome = self.vcpu.handle_page_fault(Gva(va), fetch).unwrap();
            if outcome != Outcome::Resume {
                assert!(matches!(outcome, Outcome::Exit(Exit::PageFault { .. })), "{outcome:?}");
                self.forget(va, |of| of == pcid);
                return self.enter();
            }
            pause();
        }
    }

    pub fn load(&mut self, va: u64) -> Result<u64, Exit> {
        self.access(va, Access::Read, |page| page.word(va % 4096 / 8).load(Ordering::SeqCst))
    }

    /// The number of the page at `va`.
    pub fn page_at(&mut self, va: u64) -> Result<u64, Exit> {
        self.access(va, Access::Read, |page| page.gfn())
    }
}

pub fn index(va: u64, level: u32) -> u64 {
    va >> (12 + 9 * (level - 1)) & 511
}
