//! What the machine knows of its CPUs and tasks, and how one step changes it. Nothing here
//! suspends.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::panic::Location;

use slat_costed::costed::Step;

use super::TaskId;
use super::locks::{LockKind, LockState};
use super::profile::{Profile, Report};
use super::task::Body;
use crate::lines::Lines;
use crate::parameters::{Parameters, Ps};
use crate::topology::Topology;

/// Why a task is suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waits {
    /// Other CPUs have an earlier clock, or another task is next on this one.
    ForItsTurn,
    /// It sleeps until another task wakes it.
    ForAWake,
    /// It sleeps until another task has ended, or hands it a lock.
    ForAnEnd,
    /// It spins: no other task runs on its CPU.
    Spinning,
}

/// Before which clock, and of CPUs with the same clock before which number, a CPU goes on.
type Horizon = (Ps, u32);

const FOREVER: Horizon = (Ps::MAX, u32::MAX);

pub(super) struct NewTask {
    pub(super) task: usize,
    pub(super) body: Body,
}

struct Cpu {
    clock: Ps,
    core: u16,
    task: Option<usize>,
    /// Tasks that could run here.
    queue: VecDeque<usize>,
    /// When the running task's turn is over.
    slice_end: Ps,
    /// For how long it was interrupted since it ran.
    stolen: Ps,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TaskState {
    Runs,
    /// Another task may wake it.
    Blocked,
    /// No task may wake it: it sleeps for something else.
    Sleeps,
    Spins,
    Ended,
}

struct Task {
    cpu: usize,
    state: TaskState,
    /// Not before this time.
    ready_at: Ps,
    /// It was woken before it slept.
    is_woken: bool,
    /// Holds so many spinlocks, with which it keeps its CPU.
    nr_spinlocks: u32,
    /// When its last store is visible.
    stored_at: Ps,
    per_access: Ps,
    in_lock: Ps,
    /// Since when it waits in the queue of its CPU.
    queued_at: Ps,
    /// For how long it was ready and had no CPU.
    without_cpu: Ps,
    /// Tasks that wait for its end.
    waiters: Vec<usize>,
}

/// Parameters in picoseconds.
pub(super) struct Cost {
    pub(super) pause: Ps,
    fence: Ps,
    hit: Ps,
    smt_share: f64,
    thread_switch: Ps,
    quantum: Ps,
    wake: Ps,
    ipi_send: Ps,
    ipi_each: Ps,
    ipi_answer: Ps,
}

pub(super) struct State {
    pub(super) cost: Cost,
    pub(super) lines: Lines,
    cpus: Vec<Cpu>,
    tasks: Vec<Task>,
    new: Vec<NewTask>,
    /// CPUs that could go on, by their clocks.
    ready: BinaryHeap<Reverse<(Ps, u32)>>,
    horizon: Horizon,
    cpu: usize,
    task: usize,
    /// For each core, how many of its CPUs have a task.
    nr_busy: Vec<u8>,
    /// When each server is free.
    servers: HashMap<usize, Ps>,
    pub(super) locks: HashMap<usize, LockState>,
    /// Of the lock of the VM.
    pub(super) lock_kind: LockKind,
    /// The access that was asked for last is granted, and only its time has not come.
    is_granted: bool,
    profile: Profile,
}

impl State {
    pub(super) fn new(topology: &Topology, parameters: &Parameters, lines: Lines) -> State {
        let Parameters { coherence, host, work, .. } = parameters;
        let cost = Cost {
            pause: coherence.pause.ps().max(1),
            fence: coherence.fence.ps(),
            hit: coherence.hit.ps(),
            smt_share: work.smt_share.get().min(1.0),
            thread_switch: host.thread_switch.ps(),
            quantum: host.quantum.ps(),
            wake: host.wake.ps(),
            ipi_send: host.ipi_send.ps(),
            ipi_each: host.ipi_each.ps(),
            ipi_answer: host.ipi_answer.ps(),
        };
        let cpus = (0..topology.nr_cpus())
            .map(|cpu| Cpu {
                clock: 0,
                core: topology.place(cpu).core,
                task: None,
                queue: VecDeque::new(),
                slice_end: 0,
                stolen: 0,
            })
            .collect();
        State {
            cost,
            lines,
            cpus,
            tasks: Vec::new(),
            new: Vec::new(),
            ready: BinaryHeap::new(),
            horizon: FOREVER,
            cpu: 0,
            task: 0,
            nr_busy: vec![0; topology.nr_cores()],
            servers: HashMap::new(),
            locks: HashMap::new(),
            lock_kind: LockKind::Spinning,
            is_granted: false,
            profile: Profile::default(),
        }
    }

    #[inline]
    pub(super) fn now(&self) -> Ps {
        self.cpus[self.cpu].clock
    }

    pub(super) fn current_cpu(&self) -> usize {
        self.cpu
    }

    pub(super) fn current_task(&self) -> usize {
        self.task
    }

    pub(super) fn is_alone_on_cpu(&self) -> bool {
        self.cpus[self.cpu].queue.is_empty()
    }

    pub(super) fn core_of_task(&self, task: usize) -> u16 {
        self.cpus[self.tasks[task].cpu].core
    }

    /// Whether no other CPU has an earlier clock, and the task's turn is not over.
    #[inline]
    pub(super) fn may_go_on(&self) -> bool {
        let cpu = &self.cpus[self.cpu];
        (cpu.clock, self.cpu as u32) < self.horizon && !self.is_slice_over(cpu)
    }

    fn is_slice_over(&self, cpu: &Cpu) -> bool {
        cpu.clock >= cpu.slice_end && !cpu.queue.is_empty() && self.tasks[self.task].nr_spinlocks == 0
    }

    #[inline]
    pub(super) fn elapse(&mut self, duration: Ps) {
        self.cpus[self.cpu].clock += duration;
    }

    /// Plain work: slower where both threads of the core work.
    #[inline]
    pub(super) fn work(&mut self, duration: Ps) {
        let is_shared = self.nr_busy[usize::from(self.cpus[self.cpu].core)] > 1;
        let duration = if is_shared { (duration as f64 / self.cost.smt_share) as Ps } else { duration };
        self.elapse(duration);
    }

    pub(super) fn set_engine_work(&mut self, per_access: Ps, in_lock: Ps) -> (Ps, Ps) {
        let task = &mut self.tasks[self.task];
        let before = (task.per_access, task.in_lock);
        (task.per_access, task.in_lock) = (per_access, in_lock);
        before
    }

    /// The work of a fault inside the lock that the running task has just taken.
    pub(super) fn work_in_lock(&mut self) {
        self.work(self.tasks[self.task].in_lock);
    }

    #[inline]
    pub(super) fn begin_access(&mut self) {
        self.is_granted = false;
        self.work(self.tasks[self.task].per_access);
    }

    /// Whether the access of the running task is granted.
    pub(super) fn is_granted(&self) -> bool {
        self.is_granted
    }

    /// Asks for an access, and sets the clock to its time. Returns whether that has come.
    #[inline]
    pub(super) fn request(&mut self, line: u32, step: Step, place: &'static Location<'static>) -> bool {
        let (cpu, task) = (&mut self.cpus[self.cpu], &mut self.tasks[self.task]);
        if step == Step::Rmw {
            // A locked instruction waits for the stores before it.
            cpu.clock = cpu.clock.max(task.stored_at);
        }
        let now = cpu.clock;
        let grant = self.lines.request(cpu.core, now, line, step);
        if step == Step::Store {
            // It waits in the store buffer, and the CPU does not.
            task.stored_at = task.stored_at.max(grant.at);
            cpu.clock += self.cost.hit;
        } else {
            cpu.clock = grant.at;
        }
        self.profile.count(self.cpu, line, step, now, grant, place);
        self.is_granted = true;
        self.may_go_on()
    }

    pub(super) fn prefetch(&mut self, line: u32) {
        let cpu = &self.cpus[self.cpu];
        self.lines.request(cpu.core, cpu.clock, line, Step::Load);
    }

    pub(super) fn fence(&mut self) {
        let (cpu, task) = (&mut self.cpus[self.cpu], &self.tasks[self.task]);
        cpu.clock = cpu.clock.max(task.stored_at) + self.cost.fence;
    }

    /// The running CPU fetches a line of the guest's data from the memory of `home`, one of
    /// `nr_together` that it waits for at the same time.
    pub(super) fn fetch_data(&mut self, home: usize, nr_together: u64) {
        let cpu = &mut self.cpus[self.cpu];
        cpu.clock += self.lines.fetch_data(cpu.core, home, cpu.clock) / nr_together;
    }

    pub(super) fn use_server(&mut self, server: usize, held: Ps) {
        let now = self.now();
        let free_at = self.servers.entry(server).or_default();
        *free_at = now.max(*free_at) + held;
        self.cpus[self.cpu].clock = *free_at;
    }

    pub(super) fn interrupt(&mut self, tasks: &[TaskId]) {
        let (mut sent_at, mut answered_at) = (self.now() + self.cost.ipi_send, 0);
        for &TaskId(task) in tasks {
            let index = self.tasks[task].cpu;
            let cpu = &mut self.cpus[index];
            if index == self.cpu || cpu.task != Some(task) {
                continue;
            }
            sent_at += self.cost.ipi_each;
            // It answers one interrupt after another, and not in the midst of an access.
            cpu.stolen += self.cost.ipi_answer;
            answered_at = answered_at.max(sent_at.max(cpu.clock) + cpu.stolen);
        }
        if answered_at != 0 {
            self.cpus[self.cpu].clock = answered_at;
        }
    }

    pub(super) fn spawn(&mut self, cpu: usize, body: Body) -> TaskId {
        let task = self.tasks.len();
        let ready_at = self.cpus.get(self.cpu).map_or(0, |cpu| cpu.clock);
        self.tasks.push(Task {
            cpu,
            state: TaskState::Sleeps,
            ready_at,
            is_woken: false,
            nr_spinlocks: 0,
            stored_at: 0,
            per_access: 0,
            in_lock: 0,
            queued_at: 0,
            without_cpu: 0,
            waiters: Vec::new(),
        });
        self.new.push(NewTask { task, body });
        self.make_ready(task, ready_at);
        TaskId(task)
    }

    pub(super) fn take_new(&mut self) -> Vec<NewTask> {
        std::mem::take(&mut self.new)
    }

    /// Makes a task that waits go on at `at`, or later.
    fn make_ready(&mut self, task: usize, at: Ps) {
        let found = &mut self.tasks[task];
        let was = std::mem::replace(&mut found.state, TaskState::Runs);
        found.ready_at = at;
        let index = found.cpu;
        let cpu = &mut self.cpus[index];
        match (was, cpu.task) {
            (TaskState::Spins, _) => cpu.clock = cpu.clock.max(at),
            (_, None) => {
                cpu.clock = cpu.clock.max(at);
                cpu.slice_end = cpu.clock + self.cost.quantum;
                self.set_task(index, Some(task));
            }
            (_, Some(_)) => {
                found.queued_at = at;
                cpu.queue.push_back(task);
                return;
            }
        }
        self.push_ready(index);
    }

    fn push_ready(&mut self, cpu: usize) {
        let key = (self.cpus[cpu].clock, cpu as u32);
        self.ready.push(Reverse(key));
        self.horizon = self.horizon.min(key);
    }

    fn set_task(&mut self, cpu: usize, task: Option<usize>) {
        let cpu = &mut self.cpus[cpu];
        let nr_busy = &mut self.nr_busy[usize::from(cpu.core)];
        *nr_busy = *nr_busy + u8::from(task.is_some()) - u8::from(cpu.task.is_some());
        cpu.task = task;
    }

    /// A task that waits for a lock has it at `at`.
    pub(super) fn hand_lock_to(&mut self, task: usize, at: Ps) {
        match self.tasks[task].state {
            TaskState::Spins => self.make_ready(task, at),
            TaskState::Sleeps => self.make_ready(task, at + self.cost.wake),
            state => debug_assert!(false, "task {task} waits for a lock and is {state:?}"),
        }
    }

    /// For how long the running task was ready and had no CPU.
    pub(super) fn without_cpu(&self) -> Ps {
        self.tasks[self.task].without_cpu
    }

    pub(super) fn wake_blocked(&mut self, task: usize) {
        match self.tasks[task].state {
            TaskState::Blocked => self.make_ready(task, self.now() + self.cost.wake),
            TaskState::Runs | TaskState::Sleeps | TaskState::Spins => self.tasks[task].is_woken = true,
            TaskState::Ended => {}
        }
    }

    /// Whether the running task is to sleep: no other one has woken it before.
    pub(super) fn may_block(&mut self) -> bool {
        !std::mem::take(&mut self.tasks[self.task].is_woken)
    }

    /// Whether `task` has not ended; the running one is woken when it does.
    pub(super) fn wait_for_end(&mut self, task: usize) -> bool {
        if self.tasks[task].state == TaskState::Ended {
            return false;
        }
        self.tasks[task].waiters.push(self.task);
        true
    }

    /// Ends the turn of the running task, if another one waits for its CPU.
    pub(super) fn end_slice(&mut self) {
        let cpu = &mut self.cpus[self.cpu];
        cpu.slice_end = cpu.clock;
    }

    /// A task with a spinlock is not preempted.
    pub(super) fn count_lock(&mut self, task: usize, kind: LockKind) {
        self.tasks[task].nr_spinlocks += u32::from(kind == LockKind::Spinning);
    }

    pub(super) fn uncount_lock(&mut self, kind: LockKind) {
        self.tasks[self.task].nr_spinlocks -= u32::from(kind == LockKind::Spinning);
    }

    /// The task to run now, on the CPU with the lowest clock; `None` if no CPU could go on.
    pub(super) fn next(&mut self) -> Option<usize> {
        loop {
            let Reverse((_, index)) = self.ready.pop()?;
            let index = index as usize;
            let cpu = &mut self.cpus[index];
            if cpu.stolen != 0 {
                cpu.clock += std::mem::take(&mut cpu.stolen);
                self.ready.push(Reverse((cpu.clock, index as u32)));
                continue;
            }
            let task = cpu.task.expect("a CPU that is ready has a task");
            self.horizon = self.ready.peek().map_or(FOREVER, |&Reverse(key)| key);
            (self.cpu, self.task) = (index, task);
            return Some(task);
        }
    }

    /// The running task was suspended.
    pub(super) fn suspended(&mut self, task: usize, waits: Waits) {
        let index = self.cpu;
        match waits {
            Waits::ForItsTurn => {
                if self.is_slice_over(&self.cpus[index]) {
                    self.tasks[task].queued_at = self.cpus[index].clock;
                    self.cpus[index].queue.push_back(task);
                    self.run_next_of(index);
                } else {
                    self.push_ready(index);
                }
            }
            Waits::ForAWake | Waits::ForAnEnd => {
                self.tasks[task].state = if waits == Waits::ForAWake { TaskState::Blocked } else { TaskState::Sleeps };
                self.run_next_of(index);
            }
            Waits::Spinning => self.tasks[task].state = TaskState::Spins,
        }
    }

    /// Runs the next task of a CPU, if there is one.
    fn run_next_of(&mut self, index: usize) {
        let cpu = &mut self.cpus[index];
        let next = cpu.queue.pop_front();
        if let Some(next) = next {
            let task = &mut self.tasks[next];
            cpu.clock = cpu.clock.max(task.ready_at) + self.cost.thread_switch;
            task.without_cpu += cpu.clock.saturating_sub(task.queued_at);
            cpu.slice_end = cpu.clock + self.cost.quantum;
        }
        self.set_task(index, next);
        if next.is_some() {
            self.push_ready(index);
        }
    }

    pub(super) fn ended(&mut self, task: usize) {
        self.tasks[task].state = TaskState::Ended;
        let at = self.now() + self.cost.wake;
        for waiter in std::mem::take(&mut self.tasks[task].waiters) {
            self.make_ready(waiter, at);
        }
        self.run_next_of(self.cpu);
    }

    pub(super) fn report(self) -> Report {
        let end = self.cpus.iter().map(|cpu| cpu.clock).max().unwrap_or(0);
        self.profile.report(end)
    }
}
