//! Workers: one process for each CPU, with memory of its own.
//!
//! The first process asks for a round by its number on a pipe, and the worker answers with the
//! number of pages that it verified. A worker that finds a page wrong reports it and ends, which
//! ends its pipe of answers. (The pipe of questions does not end by itself: later workers inherit
//! it.)

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::hypercall::Hypercalls;
use crate::phases::{self, Kept};
use crate::process::{self, Child};
use crate::wrong::Wrong;

/// The question after the last round.
const END: u64 = u64::MAX;

/// What all workers do.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// Pages that each keeps.
    pub(crate) pages: u64,
    /// The folder of its files.
    pub(crate) files: PathBuf,
    pub(crate) hypercalls: Hypercalls,
}

/// Reports what went wrong, in the process that met it, and returns its exit code.
pub(crate) fn fail(wrong: &Wrong, hypercalls: Hypercalls) -> ExitCode {
    println!("guest: {wrong}");
    wrong.report(hypercalls);
    ExitCode::FAILURE
}

struct Worker {
    cpu: usize,
    child: Child,
    ask: PipeWriter,
    answers: PipeReader,
}

/// All workers, between two rounds.
pub(crate) struct Workers(Vec<Worker>);

impl Workers {
    /// Starts one on each of `cpus`.
    pub(crate) fn start(plan: &Plan, cpus: &[usize]) -> Result<Workers, Wrong> {
        let mut workers = Vec::new();
        for (number, &cpu) in cpus.iter().enumerate() {
            let new_pipe = || pipe().map_err(|error| Wrong::system("make a pipe", error));
            let ((asked, ask), (answers, answer)) = (new_pipe()?, new_pipe()?);
            let child = process::fork(|| match work(plan, number as u64, cpu, asked, answer) {
                Ok(()) => ExitCode::SUCCESS,
                Err(wrong) => fail(&wrong, plan.hypercalls),
            })?;
            workers.push(Worker { cpu, child, ask, answers });
        }
        Ok(Workers(workers))
    }

    /// Runs round `round` on all at the same time; returns the number of pages that they verified.
    pub(crate) fn round(&mut self, round: u64) -> Result<u64, Wrong> {
        let mut verified = 0;
        let mut ended = None;
        for (number, worker) in self.0.iter_mut().enumerate() {
            if worker.ask.write_all(&round.to_ne_bytes()).is_err() {
                ended = Some(number);
            }
        }
        for (number, worker) in self.0.iter_mut().enumerate() {
            let mut answer = [0; 8];
            match worker.answers.read_exact(&mut answer) {
                Ok(()) => verified += u64::from_ne_bytes(answer),
                Err(_) => ended = Some(number),
            }
        }
        match ended {
            Some(number) => Err(self.0.swap_remove(number).ended()),
            None => Ok(verified),
        }
    }

    /// Ends all.
    pub(crate) fn end(self) -> Result<(), Wrong> {
        for Worker { cpu, child, mut ask, .. } in self.0 {
            ask.write_all(&END.to_ne_bytes()).map_err(|error| Wrong::system("end a worker", error))?;
            let ended = child.wait()?;
            if ended != process::Ended::Code(0) {
                let (how, reported) = ended.describe();
                return Err(Wrong::Worker { cpu, how, reported });
            }
        }
        Ok(())
    }
}

impl Worker {
    /// Why the worker ended before it was told to.
    fn ended(self) -> Wrong {
        let cpu = self.cpu;
        match self.child.wait() {
            Ok(ended) => {
                let (how, reported) = ended.describe();
                Wrong::Worker { cpu, how, reported }
            }
            Err(wrong) => wrong,
        }
    }
}

/// The worker itself: does what it is asked for, until it is asked to end.
fn work(plan: &Plan, number: u64, cpu: usize, mut asked: PipeReader, mut answer: PipeWriter) -> Result<(), Wrong> {
    process::run_on(cpu)?;
    let mut kept = Kept::map(number * plan.pages, plan.pages)?;
    let mut question = [0; 8];
    while asked.read_exact(&mut question).is_ok() {
        let round = u64::from_ne_bytes(question);
        if round == END {
            break;
        }
        let mut verified = kept.touch(plan.seed, round)?;
        verified += phases::fork(plan, &mut kept, round)?;
        verified += phases::map(plan, number, round)?;
        verified += phases::files(plan, number, round)?;
        if answer.write_all(&verified.to_ne_bytes()).is_err() {
            break;
        }
    }
    Ok(())
}
