//! A task as a coroutine, and how it is suspended from deep inside a call.
//!
//! # Why it is correct
//! Only this module has the pointer by which a coroutine is suspended. It is that of the running
//! task exactly while [`Task::resume`] runs it: what is set there is taken back when the coroutine
//! is suspended, ends, or panics, and while one is dropped there is none.

#![expect(unsafe_code, reason = "a coroutine is suspended by a pointer")]

use std::cell::Cell;
use std::ptr::NonNull;
use std::rc::Rc;

use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::state::Waits;

pub(super) type Body = Box<dyn FnOnce()>;

type Suspender = Option<NonNull<Yielder<(), Waits>>>;

thread_local! {
    static RUNNING: Cell<Suspender> = const { Cell::new(None) };
}

/// Sets what suspends the running task, until it is dropped.
struct Running(Suspender);

impl Running {
    fn begin(suspender: Suspender) -> Running {
        Running(RUNNING.replace(suspender))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

pub(super) struct Task {
    /// `None` while it is dropped.
    coroutine: Option<Coroutine<(), Waits, ()>>,
    suspender: Rc<Cell<Suspender>>,
}

/// What became of a task that ran.
pub(super) enum Ran {
    Suspended(Waits),
    Ended,
}

impl Task {
    pub(super) fn new(body: Body) -> Task {
        let suspender = Rc::new(Cell::new(None));
        let of_task = Rc::clone(&suspender);
        let coroutine = Coroutine::new(move |yielder: &Yielder<(), Waits>, ()| {
            of_task.set(Some(NonNull::from(yielder)));
            RUNNING.set(of_task.get());
            body();
        });
        Task { coroutine: Some(coroutine), suspender }
    }

    /// Runs it until it is suspended or ends. It has not ended before.
    pub(super) fn resume(&mut self) -> Ran {
        let _running = Running::begin(self.suspender.get());
        match self.coroutine.as_mut().map(|coroutine| coroutine.resume(())) {
            Some(CoroutineResult::Yield(waits)) => Ran::Suspended(waits),
            Some(CoroutineResult::Return(())) | None => Ran::Ended,
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // The destructors of a task that has not ended run now, and take no time.
        let _none = Running::begin(None);
        self.coroutine = None;
    }
}

/// Suspends the running task. Without one it does nothing: a task that has not ended is dropped.
pub(super) fn suspend(waits: Waits) {
    if let Some(yielder) = RUNNING.get() {
        // SAFETY: it is set only while `resume` runs the coroutine that it suspends, and this is
        // called on that coroutine's stack.
        unsafe { yielder.as_ref() }.suspend(waits);
    }
}
