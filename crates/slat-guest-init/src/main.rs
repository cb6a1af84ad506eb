//! The first process of the Linux guest of `slat metal`.
//!
//! It uses memory in every way that a program can, and verifies what it reads: it touches memory
//! and keeps it, forks, maps and unmaps, and makes files in a tmpfs. Meanwhile the hypervisor below
//! moves pages, splits and logs. The guest may notice nothing of that but time.
//!
//! # Use
//! The kernel starts it as `/init`. The words `slat.NAME=VALUE` of the kernel's command line are
//! its options ([`options::Options`]). It prints lines `guest: ...` on the console, and tells the
//! hypervisor by hypercalls what it does ([`hypercall::Hypercall`]). At its end it powers off.
//!
//! As an ordinary process it takes the same words as arguments. Without a hypervisor, add
//! `--no-hypercalls`.
//!
//! # Implementation
//! One worker process runs on each CPU ([`worker`]). The first process has one thread, and so have
//! all others, so that each may fork. Workers do a round when the first process asks for it by a
//! pipe, and answer by another.

#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))))]
compile_error!("it is the init program of a Linux guest on x86-64, Arm or RISC-V, each with 64 bits");

mod area;
mod content;
mod hypercall;
mod options;
mod phases;
mod process;
mod worker;
mod wrong;

use std::io;
use std::process::ExitCode;
use std::time::Instant;

use rustix::system::{RebootCommand, reboot};

use hypercall::{Hypercall, Hypercalls};
use options::Options;
use process::Ended;
use worker::{Plan, Workers};
use wrong::Wrong;

/// Memory that the plan leaves to the kernel whatever share is asked for.
const RESERVE_BYTES: u64 = 16 << 20;

fn main() -> ExitCode {
    let is_init = std::process::id() == 1;
    let result = if is_init { as_init() } else { as_process() };
    if is_init {
        power_off();
    }
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn as_init() -> Result<(), Wrong> {
    let line = process::mount_file_systems().and_then(|()| {
        std::fs::read_to_string("/proc/cmdline").map_err(|error| Wrong::system("read /proc/cmdline", error))
    });
    follow(line.and_then(|line| Ok(Options::of_kernel(&line)?)))
}

fn as_process() -> Result<(), Wrong> {
    follow(Options::of_arguments(std::env::args().skip(1)).map_err(Wrong::from))
}

/// Runs as the options say, and tells the hypervisor of a failure, also of wrong options: it would
/// wait for a guest that has turned itself off.
fn follow(options: Result<Options, Wrong>) -> Result<(), Wrong> {
    let hypercalls = options.as_ref().map_or(Hypercalls::On, |options| options.hypercalls);
    let result = options.and_then(|options| run(&options));
    if let Err(wrong) = &result {
        println!("guest: FAILED: {wrong}");
        if !matches!(wrong, Wrong::NoHypervisor) {
            // In a child, which ends by a signal where no hypervisor is.
            let child = process::fork(|| {
                wrong.report(hypercalls);
                ExitCode::SUCCESS
            });
            let _ = child.and_then(process::Child::wait);
        }
    }
    result
}

/// Turns the machine off. If that fails, it waits: the kernel panics when the first process ends.
fn power_off() -> ! {
    // Everything is in memory that goes away: there is nothing to write back.
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        println!("guest: cannot power off: {error}");
    }
    loop {
        std::thread::park();
    }
}

/// Does all rounds, and reports to the hypervisor.
fn run(options: &Options) -> Result<(), Wrong> {
    let cpus = process::cpus()?;
    let plan = plan(options, cpus.len() as u64)?;
    println!("guest: CPUs online: {}, memory: {} MiB", cpus.len(), process::memory()?.total >> 20);
    greet(options.hypercalls, cpus.len() as u64)?;
    println!("guest: seed {}, {} pages for each CPU, up to {} rounds", options.seed, plan.pages, options.rounds);
    rounds(options, &plan, &cpus)
}

/// Memory for each worker.
fn plan(options: &Options, nr_cpus: u64) -> Result<Plan, Wrong> {
    let free = process::memory()?.available.saturating_sub(RESERVE_BYTES);
    let share = free / 100 * options.fill / content::PAGE_BYTES as u64 / nr_cpus;
    let pages = share.min(options.most_pages);
    if pages == 0 {
        return Err(Wrong::NoMemory { fill: options.fill, available: free });
    }
    Ok(Plan { seed: options.seed, pages, files: options.files.clone(), hypercalls: options.hypercalls })
}

/// The first hypercall. Another process makes it, since it ends by a signal where no hypervisor is.
fn greet(hypercalls: Hypercalls, nr_cpus: u64) -> Result<(), Wrong> {
    if hypercalls == Hypercalls::Off {
        return Ok(());
    }
    let child = process::fork(|| match hypercalls.make(Hypercall::Up { cpus: nr_cpus }) {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })?;
    match child.wait()? {
        Ended::Code(0) => Ok(()),
        // Another hypervisor refuses it, or the instruction is an invalid one.
        Ended::Code(_) | Ended::Signal(_) => Err(Wrong::NoHypervisor),
    }
}

fn rounds(options: &Options, plan: &Plan, cpus: &[usize]) -> Result<(), Wrong> {
    let began = Instant::now();
    let mut workers = Workers::start(plan, cpus)?;
    let mut nr_rounds = 0;
    let mut verified = 0;
    while nr_rounds < options.rounds && options.longest.is_none_or(|longest| began.elapsed() < longest) {
        let round_began = Instant::now();
        let of_round = workers.round(nr_rounds)?;
        verified += of_round;
        println!("guest: round {nr_rounds}: {of_round} pages verified, {:.1} s", round_began.elapsed().as_secs_f64());
        options.hypercalls.make(Hypercall::Round { number: nr_rounds, pages: verified });
        nr_rounds += 1;
    }
    workers.end()?;
    println!("guest: {verified} pages, {nr_rounds} rounds, all checksums hold");
    // If the console is not read, the hypercall reports all the same.
    let _ = io::Write::flush(&mut io::stdout());
    options.hypercalls.make(Hypercall::Done { rounds: nr_rounds, pages: verified });
    Ok(())
}
