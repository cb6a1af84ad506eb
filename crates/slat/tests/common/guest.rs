//! Guests: threads that access memory as a CPU does. They walk the page tables themselves, and
//! fault where an access is not allowed.
//!
//! An access is a walk and then one effect (a check, a write that is counted). When a CPU has
//! executed a flush, none of its accesses is half done. Here an access sets a word of its own, odd
//! while it is under way, and the host's flush waits for each access that it found under way. So an
//! access that walked before a flush has had its effect before the flush returns, which is all that
//! the engine relies on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use slat::format::Format;
use slat::{Access, Exit, Gpa, Outcome, Vcpu, Vm};

use super::{TestHost, Translation, translate};

/// The most guests of one host.
const MAX_GUESTS: usize = 128;

/// The words of a guest, on a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Words {
    /// Odd during an access.
    access: AtomicU64,
    /// Odd during a fault.
    fault: AtomicU64,
}

/// The accesses of all guests of a host.
#[derive(Debug)]
pub struct Gate {
    pub(super) words: Box<[Words]>,
    nr_guests: AtomicUsize,
}

impl Default for Gate {
    fn default() -> Gate {
        let _inside = super::InsideHost::enter();
        Gate { words: (0..MAX_GUESTS).map(|_| Words::default()).collect(), nr_guests: AtomicUsize::new(0) }
    }
}

impl Gate {
    /// Waits for every access that is under way now.
    pub fn wait_for_accesses(&self) {
        self.wait_for(|words| &words.access);
    }

    /// Waits for every fault that is under way now.
    pub fn wait_for_faults(&self) {
        self.wait_for(|words| &words.fault);
    }

    /// Waits until each word that is odd now has changed.
    fn wait_for(&self, word: fn(&Words) -> &AtomicU64) {
        // Pairs with the fence in `announce`.
        fence(Ordering::SeqCst);
        for words in &self.words[..self.nr_guests.load(Ordering::SeqCst)] {
            let word = word(words);
            let seen = word.load(Ordering::SeqCst);
            while seen % 2 == 1 && word.load(Ordering::SeqCst) == seen {
                // It sleeps and does not yield: a thread that has slept runs again soon on a
                // crowded core.
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }
}

/// Ends an access or a fault, also if a check in it fails: other threads wait for its end.
struct Over<'a> {
    word: &'a AtomicU64,
    after: u64,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.word.store(self.after, Ordering::SeqCst);
    }
}

/// Makes `word` odd until the value is dropped, before the caller reads a PTE.
fn announce(word: &AtomicU64) -> Over<'_> {
    let seen = word.load(Ordering::Relaxed);
    word.store(seen + 1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    Over { word, after: seen + 2 }
}

/// One guest CPU, with the vCPU that serves its faults.
pub struct Guest<F: Format> {
    pub vm: Arc<Vm<TestHost, F>>,
    pub vcpu: Vcpu<TestHost, F>,
    index: usize,
}

impl<F: Format> Guest<F> {
    pub fn new(vm: &Arc<Vm<TestHost, F>>) -> Guest<F> {
        let index = vm.host().gate.nr_guests.fetch_add(1, Ordering::SeqCst);
        assert!(index < MAX_GUESTS);
        Guest { vm: Arc::clone(vm), vcpu: vm.create_vcpu().unwrap(), index }
    }

    /// Runs `effect` on the translation of `gpa`, as one access that a flush waits for. `effect`
    /// must not block.
    pub fn during_access<R>(&self, gpa: Gpa, effect: impl FnOnce(Option<Translation>) -> R) -> R {
        let _over = announce(&self.vm.host().gate.words[self.index].access);
        effect(translate(&self.vm, gpa))
    }

    /// Runs `fault`, or another call that marks pages, so that [`Gate::wait_for_faults`] waits for
    /// it.
    pub fn during_fault<R>(&mut self, fault: impl FnOnce(&mut Guest<F>) -> R) -> R {
        let vm = Arc::clone(&self.vm);
        let _over = announce(&vm.host().gate.words[self.index].fault);
        fault(self)
    }

    /// Tries one access. `Ok` has the result of `effect` on the translation. If the page tables do
    /// not allow the access, serves the fault: `Err` has its outcome. An error of the engine fails
    /// the test.
    pub fn try_access<R>(
        &mut self,
        gpa: Gpa,
        access: Access,
        effect: impl FnOnce(Translation) -> R,
    ) -> Result<R, Option<Exit>> {
        let done = self.during_access(gpa, |found| match found {
            Some(translation) if access != Access::Write || translation.writable => Some(effect(translation)),
            _ => None,
        });
        match done {
            Some(result) => Ok(result),
            None => {
                let outcome = self.during_fault(|guest| guest.vcpu.handle_fault(gpa, access));
                // More guests than cores: lets another run.
                std::thread::yield_now();
                match outcome {
                    Ok(Outcome::Resume) => Err(None),
                    Ok(Outcome::Exit(exit)) => Err(Some(exit)),
                    Err(error) => panic!("fault at {gpa} failed: {error}"),
                }
            }
        }
    }
}

/// Sets the flag that stops guests when it is dropped, also because a check has failed.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
