//! The machine: CPUs with clocks of their own, and the tasks that run on them.
//!
//! # Guarantees
//! - What a task does to a shared line happens at the virtual time at which the line is granted. No
//!   CPU does anything at an earlier time after that.
//! - A run depends on the topology, the parameters and its program, and on nothing else: [`Report`]
//!   has a hash of all accesses.
//!
//! # Use
//! `run` runs a task on CPU 0. Tasks `spawn` others, and wait for them. Their accesses
//! to the engine's atomics cost time by themselves. Other work is said: `work`,
//! `acquire`, `use_server`.
//!
//! # Implementation
//! Each task is a coroutine, and all of them run on one thread of the system. The CPU whose clock
//! is the lowest runs, until its clock is beyond that of the next one (`State::may_go_on`). A task
//! is suspended inside the accesses of the engine, anywhere in a call of it.

mod locks;
mod profile;
mod state;
mod task;

use std::cell::RefCell;
use std::panic::Location;

use slat_costed::baselines::Side;
use slat_costed::costed::{LockWait, Machine, Step, attach};

use crate::arena::{self, Arena, InArena};
use crate::error::ModelError;
use crate::lines::Lines;
use crate::parameters::{Parameters, Ps, ns};
use crate::topology::Topology;
pub use profile::{Hot, Report};
use state::{NewTask, State, Waits};
use task::{Ran, Task, suspend};

pub use locks::LockKind;
pub(crate) use locks::LockWord;

/// The number of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TaskId(pub(crate) usize);

thread_local! {
    static STATE: RefCell<Option<Box<State>>> = const { RefCell::new(None) };
}

/// Calls `f` with the machine. It must not suspend.
#[inline]
fn with<R>(f: impl FnOnce(&mut State) -> R) -> R {
    STATE.with_borrow_mut(|state| f(state.as_mut().expect("a machine runs on this thread")))
}

/// The machine as the engine sees it.
struct Model;

impl Machine for Model {
    #[inline]
    fn access(&self, address: usize, step: Step, place: &'static Location<'static>) {
        access(address, step, place);
    }

    fn prefetch(&self, address: usize) {
        if let Some(line) = arena::line_of(address) {
            with(|state| state.prefetch(line));
        }
    }

    fn stack_address(&self) -> usize {
        // Linux's kernel stacks are 16 KiB with a guard page, and so 32 KiB apart.
        (current_task().0 + 1) << 15
    }

    fn fence(&self) {
        with(State::fence);
        settle();
    }

    fn pause(&self) {
        with(|state| state.elapse(state.cost.pause));
        settle();
    }

    fn acquire(&self, address: usize, side: Side, wait: LockWait) -> bool {
        locks::acquire(address, side, wait, with(|state| state.lock_kind))
    }

    fn release(&self, address: usize, side: Side) {
        locks::release(address, side, with(|state| state.lock_kind));
    }

    fn is_contended(&self, address: usize) -> bool {
        locks::is_contended(address)
    }
}

/// The running task accesses the word at `address`.
#[inline]
pub(crate) fn access(address: usize, step: Step, place: &'static Location<'static>) {
    // Stacks and statics are no lines of the machine.
    let Some(line) = arena::line_of(address) else { return };
    let begun = with(|state| {
        state.begin_access();
        state.may_go_on() && state.request(line, step, place)
    });
    if begun {
        return;
    }
    if !with(|state| state.is_granted()) {
        suspend(Waits::ForItsTurn);
        if with(|state| state.request(line, step, place)) {
            return;
        }
    }
    suspend(Waits::ForItsTurn);
}

/// Waits until no other CPU has an earlier clock.
pub(crate) fn settle() {
    if !with(|state| state.may_go_on()) {
        suspend(Waits::ForItsTurn);
    }
}

/// Plain work of the running task, in picoseconds.
pub(crate) fn work(duration: Ps) {
    with(|state| state.work(duration));
}

/// The running task does nothing for so long, and its core is free for the other thread.
pub(crate) fn elapse(duration: Ps) {
    with(|state| state.elapse(duration));
}

/// The running task's CPU fetches a line of the guest's data from the memory of `home`, one of
/// `nr_together` that it waits for at the same time.
pub(crate) fn fetch_data(home: usize, nr_together: u64) {
    with(|state| state.fetch_data(home, nr_together));
}

/// The virtual time of the running task's CPU.
pub(crate) fn now() -> Ps {
    with(|state| state.now())
}

/// The CPU that runs the running task.
pub(crate) fn current_cpu() -> usize {
    with(|state| state.current_cpu())
}

/// The virtual time of `f`, which is what all CPUs do until it returns.
pub(crate) fn timed<R>(f: impl FnOnce() -> R) -> (R, Ps) {
    settle();
    let begin = now();
    let result = f();
    settle();
    (result, now() - begin)
}

/// For how long the running task was ready and had no CPU, since it was started.
pub(crate) fn without_cpu() -> Ps {
    with(|state| state.without_cpu())
}

/// How tasks wait for the lock of the VM from now on; those of the host spin.
pub(crate) fn set_lock_kind(kind: LockKind) {
    with(|state| state.lock_kind = kind);
}

/// Work of the engine for each of its accesses from now on in this task, and what a fault does
/// inside the lock of the VM.
pub(crate) fn set_engine_work(per_access: Ps, in_lock: Ps) -> (Ps, Ps) {
    with(|state| state.set_engine_work(per_access, in_lock))
}

/// Uses a server, which serves one request after another, each for `held`; waits until it has
/// served this one.
pub(crate) fn use_server(server: usize, held: Ps) {
    settle();
    with(|state| state.use_server(server, held));
    settle();
}

/// Interrupts the CPUs that run one of `tasks` now, and returns when all have answered. A task that
/// has no CPU is not waited for.
pub(crate) fn interrupt(tasks: &[TaskId]) {
    settle();
    with(|state| state.interrupt(tasks));
    settle();
}

/// Starts a task on `cpu`.
pub(crate) fn spawn(cpu: usize, body: impl FnOnce() + 'static) -> TaskId {
    settle();
    with(|state| state.spawn(cpu, Box::new(body)))
}

/// Waits for a task to end.
pub(crate) fn join(task: TaskId) {
    settle();
    if with(|state| state.wait_for_end(task.0)) {
        suspend(Waits::ForAnEnd);
    }
}

/// Waits until another task wakes this one.
pub(crate) fn block() {
    settle();
    if with(State::may_block) {
        suspend(Waits::ForAWake);
    }
}

/// Wakes `task`, which runs after the scheduler's time. If it does not wait, its next wait ends at
/// once.
pub(crate) fn wake(task: TaskId) {
    with(|state| state.wake_blocked(task.0));
}

/// Whether no other task waits for the CPU of the running one: it is idle when that one sleeps.
pub(crate) fn is_alone_on_cpu() -> bool {
    with(|state| state.is_alone_on_cpu())
}

/// The running task.
pub(crate) fn current_task() -> TaskId {
    TaskId(with(|state| state.current_task()))
}

/// Lets another task of this CPU run, if one waits for it.
pub(crate) fn yield_cpu() {
    with(State::end_slice);
    suspend(Waits::ForItsTurn);
}

/// What a run has shown.
#[derive(Debug)]
pub(crate) struct Outcome<R> {
    pub(crate) result: R,
    pub(crate) report: Report,
}

/// Runs `main` as a task on CPU 0 of a new machine, and returns its result when all tasks have
/// ended.
///
/// # Errors
/// [`ModelError::Deadlock`]; [`ModelError::NoAddressSpace`].
pub(crate) fn run<R: Clone + 'static>(
    topology: &Topology,
    parameters: &Parameters,
    main: impl FnOnce() -> R + 'static,
) -> Result<Outcome<R>, ModelError> {
    let _arena = Arena::claim()?;
    if !Arena::is_used() {
        return Err(ModelError::OtherAllocator);
    }
    let lines = Lines::new(topology, parameters)?;
    let mut state = Box::new(State::new(topology, parameters, lines));
    let result = std::rc::Rc::new(RefCell::new(None));
    let to = std::rc::Rc::clone(&result);
    state.spawn(0, Box::new(move || *to.borrow_mut() = Some(main())));
    STATE.set(Some(state));
    let _attached = attach(&Model);
    let ended = drive();
    let state = STATE.take();
    ended?;
    let report = state.expect("set above").report();
    // A copy outside of the arena, which is empty afterwards.
    let copied = result.borrow().clone();
    drop(result);
    debug_assert!(Arena::is_empty(), "something of the run is still in the arena");
    match copied {
        Some(result) => Ok(Outcome { result, report }),
        None => Err(ModelError::Deadlock { nr_tasks: 1, now_ns: 0 }),
    }
}

/// Runs tasks until all have ended.
fn drive() -> Result<(), ModelError> {
    let mut tasks: Vec<Option<Task>> = Vec::new();
    loop {
        for NewTask { task, body } in with(State::take_new) {
            debug_assert_eq!(task, tasks.len(), "tasks are numbered as they are made");
            tasks.push(Some(Task::new(body)));
        }
        let Some(task) = with(State::next) else { break };
        let in_arena = InArena::enter();
        let ran = tasks[task].as_mut().map_or(Ran::Ended, Task::resume);
        drop(in_arena);
        match ran {
            Ran::Suspended(waits) => with(|state| state.suspended(task, waits)),
            Ran::Ended => {
                tasks[task] = None;
                with(|state| state.ended(task));
            }
        }
    }
    let nr_tasks = tasks.iter().flatten().count();
    if nr_tasks == 0 { Ok(()) } else { Err(ModelError::Deadlock { nr_tasks, now_ns: ns(with(|state| state.now())) }) }
}

#[cfg(test)]
mod tests;
