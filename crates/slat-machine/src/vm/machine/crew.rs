//! Threads that do the same job concurrently. All are started first. Then each job is posted to all
//! at once, and is over when the last has finished. So neither the start of threads nor their end
//! disturbs a measurement.
//!
//! # Implementation
//! Everything happens under one mutex with two condition variables: workers sleep until the number
//! of posted jobs has gone up, the poster sleeps until all have finished. No thread spins, so many
//! workers on few processors take no longer than their work. A worker that panics reports that, for
//! this job and all later ones; the others go on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The function of a worker.
pub(crate) type Work<J, R> = Box<dyn FnMut(&J) -> R + Send>;

/// How a worker ended a job: with its result or with the message of its panic.
pub(crate) type Ending<R> = Result<R, String>;

/// A job is under way already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Busy;

/// A job that all workers have ended.
#[derive(Debug)]
pub(crate) struct Finished<R> {
    /// From the post to the end of the last worker.
    pub(crate) wall: Duration,
    /// One for each worker, in their order.
    pub(crate) endings: Vec<Ending<R>>,
}

#[derive(Debug)]
struct Board<J, R> {
    /// Jobs posted so far: a worker that has done fewer has one to do.
    nr_posted: u64,
    job: Option<Arc<J>>,
    endings: Vec<Option<Ending<R>>>,
    nr_working: usize,
    /// From a post until its poster has collected the endings.
    is_taken: bool,
    is_over: bool,
    begin: Instant,
    end: Instant,
}

#[derive(Debug)]
struct Shared<J, R> {
    board: Mutex<Board<J, R>>,
    posted: Condvar,
    all_done: Condvar,
}

/// The threads. Its drop ends them, after their present job.
#[derive(Debug)]
pub(crate) struct Crew<J, R> {
    shared: Arc<Shared<J, R>>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + Sync + 'static, R: Send + 'static> Crew<J, R> {
    /// Starts a thread for each of `works`.
    ///
    /// # Errors
    /// The index of the thread that could not be started, and the error.
    pub(crate) fn start(works: Vec<Work<J, R>>) -> Result<Crew<J, R>, (usize, std::io::Error)> {
        let now = Instant::now();
        let board = Board {
            nr_posted: 0,
            job: None,
            endings: works.iter().map(|_| None).collect(),
            nr_working: 0,
            is_taken: false,
            is_over: false,
            begin: now,
            end: now,
        };
        let shared = Arc::new(Shared { board: Mutex::new(board), posted: Condvar::new(), all_done: Condvar::new() });
        let mut crew = Crew { shared: Arc::clone(&shared), threads: Vec::with_capacity(works.len()) };
        for (index, work) in works.into_iter().enumerate() {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new()
                .name(format!("vcpu {index}"))
                .spawn(move || serve(&shared, index, work))
                .map_err(|source| (index, source))?;
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// How many there are.
    pub(crate) fn nr_threads(&self) -> usize {
        self.threads.len()
    }

    /// Posts `job` to all workers. [`finish`](Self::finish) collects it.
    pub(crate) fn post(&self, job: J) -> Result<(), Busy> {
        self.post_after(|| (), job)
    }

    /// Like [`post`](Self::post); runs `prepare` first, if no other job is under way.
    pub(crate) fn post_after(&self, prepare: impl FnOnce(), job: J) -> Result<(), Busy> {
        let mut board = self.shared.board.lock();
        if board.is_taken {
            return Err(Busy);
        }
        prepare();
        board.is_taken = true;
        board.nr_posted += 1;
        board.nr_working = self.threads.len();
        board.job = Some(Arc::new(job));
        board.begin = Instant::now();
        board.end = board.begin;
        self.shared.posted.notify_all();
        Ok(())
    }

    /// Sleeps until all workers have ended the job that was posted.
    pub(crate) fn finish(&self) -> Finished<R> {
        let mut board = self.shared.board.lock();
        while board.nr_working > 0 {
            self.shared.all_done.wait(&mut board);
        }
        board.is_taken = false;
        board.job = None;
        let missing = || Err("no job was posted".to_owned());
        let endings = board.endings.iter_mut().map(|ending| ending.take().unwrap_or_else(missing)).collect();
        Finished { wall: board.end - board.begin, endings }
    }
}

impl<J, R> Drop for Crew<J, R> {
    fn drop(&mut self) {
        self.shared.board.lock().is_over = true;
        self.shared.posted.notify_all();
        for thread in self.threads.drain(..) {
            // It catches its panics.
            let _ = thread.join();
        }
    }
}

fn serve<J, R>(shared: &Shared<J, R>, index: usize, mut work: Work<J, R>) {
    let mut nr_done = 0;
    let mut panicked = None;
    loop {
        let mut board = shared.board.lock();
        while board.nr_posted == nr_done && !board.is_over {
            shared.posted.wait(&mut board);
        }
        let job = if board.nr_posted == nr_done { None } else { board.job.clone() };
        let Some(job) = job else {
            return;
        };
        nr_done = board.nr_posted;
        drop(board);

        let ending = match &panicked {
            Some(message) => Err(String::clone(message)),
            // State after a panic is not used again.
            None => catch_unwind(AssertUnwindSafe(|| work(&job))).map_err(|panic| {
                let message = message(panic.as_ref());
                panicked = Some(message.clone());
                message
            }),
        };

        let mut board = shared.board.lock();
        board.endings[index] = Some(ending);
        board.nr_working -= 1;
        if board.nr_working == 0 {
            board.end = Instant::now();
            shared.all_done.notify_all();
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adders(count: usize) -> Crew<u64, u64> {
        let works = (0..count as u64)
            .map(|index| {
                let mut sum = 0;
                Box::new(move |job: &u64| {
                    assert!(*job != 13 || index != 1, "worker {index} refuses 13");
                    sum += job;
                    sum * 100 + index
                }) as Work<u64, u64>
            })
            .collect();
        Crew::start(works).unwrap()
    }

    #[test]
    fn all_do_each_job_once_and_in_order() {
        let crew = adders(64);
        for round in 1..=200_u64 {
            crew.post(1).unwrap();
            let endings = crew.finish().endings;
            assert!(endings.into_iter().eq((0..64).map(|index| Ok(round * 100 + index))));
        }
    }

    #[test]
    fn a_panic_is_reported_and_the_others_go_on() {
        let crew = adders(3);
        let panic = Err("worker 1 refuses 13".to_owned());
        crew.post(13).unwrap();
        assert_eq!(crew.finish().endings, [Ok(1300), panic.clone(), Ok(1302)]);
        crew.post(1).unwrap();
        assert_eq!(crew.finish().endings, [Ok(1400), panic, Ok(1402)]);
    }

    #[test]
    fn one_job_at_a_time() {
        let crew = adders(2);
        crew.post(1).unwrap();
        assert_eq!(crew.post(1), Err(Busy));
        crew.finish();
        assert_eq!(crew.post(1), Ok(()));
        drop(crew);
    }
}
