//! The subjects: the engine with each locking, with each format, and behind std's locks.

use std::sync::{Arc, Mutex, RwLock};

use slat::Vm;
use slat::baselines::{Lock, Locking, Side};
use slat::format::{Ept, Format, Npt};
use slat::stats::Stats;

use super::arena::Memory;
use super::futex_park::FutexPark;
use super::host::{self, FaultHost};
use super::run::{self, Shape, Subject, Times};

/// What serves the faults, and which faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// The engine with AMD's tables.
    Slat(Locking),
    /// The engine without a lock, with Intel's tables.
    SlatEpt,
    /// The engine without a lock, inside a `std::sync::Mutex`.
    StdMutex,
    /// The engine without a lock, inside the read side of a `std::sync::RwLock`.
    StdRwLock,
    /// The engine without a lock, inside the engine's own lock of this kind (its read side, if it
    /// has one).
    OwnLock(Locking),
    /// Leaves that are write-protected because the memslot logs.
    DirtyLog,
}

/// The times of a run, and the engine's counts.
pub(crate) struct Measured {
    pub(crate) times: Times,
    pub(crate) stats: Stats,
}

impl<F: Format> Subject for Arc<Vm<FaultHost, F>> {
    fn cpu(&self) -> impl FnMut(u64) {
        let mut vcpu = self.create_vcpu().unwrap();
        move |page| host::write_fault(&mut vcpu, page)
    }
}

struct InMutex(Arc<Vm<FaultHost, Npt>>, Mutex<()>);

impl Subject for InMutex {
    fn cpu(&self) -> impl FnMut(u64) {
        let mut vcpu = self.0.create_vcpu().unwrap();
        move |page| {
            let _guard = self.1.lock();
            host::write_fault(&mut vcpu, page);
        }
    }
}

struct InRwLock(Arc<Vm<FaultHost, Npt>>, RwLock<()>);

impl Subject for InRwLock {
    fn cpu(&self) -> impl FnMut(u64) {
        let mut vcpu = self.0.create_vcpu().unwrap();
        move |page| {
            let _guard = self.1.read();
            host::write_fault(&mut vcpu, page);
        }
    }
}

struct InOwnLock(Arc<Vm<FaultHost, Npt>>, Lock);

impl Subject for InOwnLock {
    fn cpu(&self) -> impl FnMut(u64) {
        let mut vcpu = self.0.create_vcpu().unwrap();
        move |page| {
            let _guard = self.1.acquire(&FutexPark, Side::Read);
            host::write_fault(&mut vcpu, page);
        }
    }
}

/// Runs faults of `shape` on a new VM, and checks that they had their effect.
pub(crate) fn measure(memory: Memory, kind: Kind, shape: Shape) -> Measured {
    memory.reset();
    let measured = match kind {
        Kind::Slat(locking) => installs(&host::new_vm::<Npt>(memory, locking, shape.memory_pages()), shape),
        Kind::SlatEpt => installs(&host::new_vm::<Ept>(memory, Locking::None, shape.memory_pages()), shape),
        Kind::StdMutex => {
            let vm = host::new_vm::<Npt>(memory, Locking::None, shape.memory_pages());
            let times = run::run(&InMutex(Arc::clone(&vm), Mutex::new(())), shape);
            Measured { times, stats: vm.stats() }
        }
        Kind::StdRwLock => {
            let vm = host::new_vm::<Npt>(memory, Locking::None, shape.memory_pages());
            let times = run::run(&InRwLock(Arc::clone(&vm), RwLock::new(())), shape);
            Measured { times, stats: vm.stats() }
        }
        Kind::OwnLock(locking) => {
            let vm = host::new_vm::<Npt>(memory, Locking::None, shape.memory_pages());
            let times = run::run(&InOwnLock(Arc::clone(&vm), Lock::new(locking)), shape);
            Measured { times, stats: vm.stats() }
        }
        Kind::DirtyLog => {
            restores_write_access(&host::new_vm::<Npt>(memory, Locking::None, shape.memory_pages()), shape)
        }
    };
    if kind != Kind::DirtyLog {
        assert_eq!((measured.stats.faults, measured.stats.installed_4k), (shape.nr_faults(), shape.nr_pages()));
    }
    measured
}

fn installs<F: Format>(vm: &Arc<Vm<FaultHost, F>>, shape: Shape) -> Measured {
    let times = run::run(vm, shape);
    Measured { times, stats: vm.stats() }
}

fn restores_write_access(vm: &Arc<Vm<FaultHost, Npt>>, shape: Shape) -> Measured {
    let mut fault = vm.cpu();
    for index in 0..shape.nr_pages() {
        fault(shape.page(index));
    }
    host::log_dirty_pages(vm, shape.memory_pages());
    let times = run::run(vm, shape);
    let stats = vm.stats();
    // Two threads that push down in one page-table page may restore write access to a page twice.
    assert!(stats.writes_restored >= shape.nr_pages());
    Measured { times, stats }
}
