//! A host that stops a thread at a critical point, while other threads continue.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use slat::baselines::Locking;
use slat::format::Format;
use slat::{Config, Vm};

use super::TestHost;

/// A point in the host at which one thread stops, once the trap is set, until it is released.
#[derive(Debug, Default)]
pub struct Trap(Mutex<Option<(Sender<()>, Receiver<()>)>>);

/// The other side of a trap: it learns that a thread has stopped, and releases it.
pub struct Keeper {
    pub arrived: Receiver<()>,
    pub go: Sender<()>,
}

impl Trap {
    pub fn set(&self) -> Keeper {
        let ((here, arrived), (go, released)) = (channel(), channel());
        *self.0.lock().unwrap() = Some((here, released));
        Keeper { arrived, go }
    }

    pub(super) fn pass(&self) {
        let set = self.0.lock().unwrap().take();
        if let Some((here, released)) = set {
            here.send(()).unwrap();
            released.recv().unwrap();
        }
    }
}

/// Called at each look at a page-table page, except at its own looks.
type AtTable = Box<dyn FnMut() + Send>;

#[derive(Default)]
pub struct Probe(Mutex<Option<AtTable>>);

impl Probe {
    pub fn set(&self, at_table: impl FnMut() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(at_table));
    }

    pub fn remove(&self) {
        *self.0.lock().unwrap() = None;
    }

    fn pass(&self) {
        let set = self.0.lock().unwrap().take();
        if let Some(mut at_table) = set {
            at_table();
            *self.0.lock().unwrap() = Some(at_table);
        }
    }
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").finish_non_exhaustive()
    }
}

/// The traps of a [`TestHost`]: one in `resolve` and in `resolve_resident`, one in `table_ptr` (so
/// inside a guard) and one in `flush`; and the order of the engine's calls.
#[derive(Debug, Default)]
pub struct Traps {
    pub in_resolve: Trap,
    pub in_resident: Trap,
    pub in_guard: Trap,
    pub in_flush: Trap,
    pub at_table: Probe,
    /// Looks at page-table pages since the last `should_yield` or flush; and the most so far.
    step: AtomicU64,
    pub longest_step: AtomicU64,
    /// Frees that came before any flush.
    pub freed_unflushed: AtomicU32,
}

impl Traps {
    /// Counts steps from zero.
    pub fn forget_steps(&self) {
        self.end_step();
        self.longest_step.store(0, Ordering::SeqCst);
    }

    pub(super) fn end_step(&self) {
        self.step.store(0, Ordering::SeqCst);
    }

    /// At a look at a page-table page.
    pub(super) fn look(&self) {
        self.in_guard.pass();
        self.at_table.pass();
        let step = self.step.fetch_add(1, Ordering::SeqCst) + 1;
        self.longest_step.fetch_max(step, Ordering::SeqCst);
    }
}

impl TestHost {
    /// A host with traps.
    pub fn with_traps() -> TestHost {
        let mut host = TestHost::default();
        host.traps = Some(Box::default());
        host
    }

    /// The same, which needs no report of leaves.
    pub fn with_traps_without_reports() -> TestHost {
        let mut host = TestHost::without_reports();
        host.traps = Some(Box::default());
        host
    }

    /// Of a host that has them.
    pub fn traps(&self) -> &Traps {
        self.traps.as_deref().expect("a host with traps")
    }
}

/// An empty VM with such a host.
pub fn trap_vm<F: Format>(locking: Locking) -> Arc<Vm<TestHost, F>> {
    trap_vm_with(Config::default().with_locking(locking))
}

/// As [`trap_vm`], with `config`.
pub fn trap_vm_with<F: Format>(config: Config) -> Arc<Vm<TestHost, F>> {
    Arc::new(Vm::new(TestHost::with_traps(), config).unwrap())
}
