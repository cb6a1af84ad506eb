//! Firecracker: `slat-pager serve` is its memory backend.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;

use serde_json::{Value, json};

use crate::machine::{self, BALLOON_LEAST_KIB, BALLOON_MIB, HALF_BALLOON_PAGES, PAGE_BYTES, verified};
use crate::memory::GivenUp;
use crate::pager::Pager;
use crate::process::{PATIENCE, Program, Round, file, listening};
use crate::{Outcome, guest, http};

/// Faults after which the pager is killed: a small part of the guest's area.
const NR_FAULTS: u64 = 200;
/// Restores without a pager: those of [`run`].
const NR_RESTORES_WITHOUT: u32 = 4;
/// Sizes of pages, as the API names them.
const SMALL: &str = "None";
const HUGE: &str = "2M";
/// Where Linux is told how many of the huge ones to keep.
const NR_HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// The files of the snapshot.
struct Snapshot {
    folder: PathBuf,
}

impl Snapshot {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn serve(&self, more: &[&str]) -> Outcome<Pager> {
        Pager::serve(&self.path("pager.sock"), &self.path("memory"), more)
    }

    /// A VMM that has loaded it from `backend`, into pages of the size `pages`. Its guest waits.
    fn load(&self, name: &str, pages: &str, backend: &Value) -> Outcome<Vmm> {
        let vmm = Vmm::start(&self.folder, name, "Warn")?;
        let state = self.path("state");
        let body = json!({"snapshot_path": state, "mem_backend": backend, "resume_vm": false, "huge_pages": pages});
        vmm.call("PUT", "/snapshot/load", &body)?;
        Ok(vmm)
    }

    /// A pager with the words `more`, and a VMM that runs the snapshot from it.
    fn restore(&self, name: &str, pages: &str, more: &[&str]) -> Outcome<(Pager, Vmm)> {
        let pager = self.serve(more)?;
        let backend = json!({"backend_type": "Uffd", "backend_path": self.path("pager.sock")});
        let vmm = self.load(name, pages, &backend)?;
        vmm.resume()?;
        Ok((pager, vmm))
    }

    /// The same in small pages, with the working set.
    fn restore_with_working_set(&self, name: &str) -> Outcome<(Pager, Vmm)> {
        self.restore(name, SMALL, &["--working-set", &self.path("working-set").display().to_string()])
    }
}

/// A process of Firecracker.
struct Vmm {
    program: Program,
    api: PathBuf,
}

impl Vmm {
    /// Starts it with the name `name`, and a log of `level`.
    fn start(folder: &Path, name: &str, level: &str) -> Outcome<Vmm> {
        let api = folder.join(name).with_extension("api");
        let mut command = Command::new(machine::FIRECRACKER);
        command.args(["--id", name, "--show-level", "--level", level, "--api-sock"]).arg(&api);
        let program = Program::start("firecracker", &mut command)?;
        listening(&api)?;
        Ok(Vmm { program, api })
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Outcome<String> {
        http::call(&self.api, method, path, &body.to_string())
    }

    fn pause(&self) -> Outcome<()> {
        self.call("PATCH", "/vm", &json!({"state": "Paused"})).map(drop)
    }

    fn resume(&self) -> Outcome<()> {
        self.call("PATCH", "/vm", &json!({"state": "Resumed"})).map(drop)
    }

    fn balloon(&self, mib: u64) -> Outcome<()> {
        self.call("PATCH", "/balloon", &json!({"amount_mib": mib})).map(drop)
    }
}

/// All steps; files are in `folder`.
pub fn run(folder: &Path) -> Outcome<()> {
    let snapshot = Snapshot { folder: folder.to_owned() };
    boot(&snapshot).map_err(|why| format!("boot and snapshot: {why}"))?;
    on_demand(&snapshot).map_err(|why| format!("on demand: {why}"))?;
    replayed(&snapshot).map_err(|why| format!("replay: {why}"))?;
    taken_over(&snapshot).map_err(|why| format!("takeover: {why}"))?;
    huge_pages(&snapshot).map_err(|why| format!("pages of 2 MiB: {why}"))
}

/// The same guest, restored from Firecracker's own mapping of the file as often as with the pager,
/// and with its balloon. What fails here has another cause than the pager.
pub fn run_without_pager(folder: &Path) -> Outcome<()> {
    let snapshot = Snapshot { folder: folder.to_owned() };
    boot(&snapshot).map_err(|why| format!("boot and snapshot: {why}"))?;
    let backend = json!({"backend_type": "File", "backend_path": snapshot.path("memory")});
    for nr in 0..NR_RESTORES_WITHOUT {
        let mut vmm = snapshot.load(&format!("mapped-{nr}"), SMALL, &backend)?;
        vmm.resume()?;
        let round = vmm.program.whole_round()?;
        vmm.balloon(BALLOON_MIB)?;
        let less = vmm.program.round("a round with less memory", with_less(round))?;
        deflate(&mut vmm)?;
        verified(&format!("firecracker: without a pager: {} and {} pages verified", round.nr_pages, less.nr_pages));
        vmm.program.kill()?;
    }
    Ok(())
}

/// Boots the guest, lets it fill its memory, and takes the snapshot.
fn boot(snapshot: &Snapshot) -> Outcome<()> {
    // A log would report each port that the guest probes.
    let mut vmm = Vmm::start(&snapshot.folder, "booted", "Off")?;
    let source = json!({"kernel_image_path": machine::KERNEL, "initrd_path": machine::INITRAMFS,
        "boot_args": machine::WORDS});
    let size = json!({"vcpu_count": machine::NR_CPUS, "mem_size_mib": machine::MEMORY_MIB});
    vmm.call("PUT", "/boot-source", &source)?;
    vmm.call("PUT", "/machine-config", &size)?;
    vmm.call("PUT", "/balloon", &json!({"amount_mib": 0, "deflate_on_oom": false}))?;
    vmm.call("PUT", "/actions", &json!({"action_type": "InstanceStart"}))?;
    vmm.program.filled()?;
    vmm.program.part()?;
    vmm.pause()?;
    let files = json!({"snapshot_path": snapshot.path("state"), "mem_file_path": snapshot.path("memory")});
    vmm.call("PUT", "/snapshot/create", &files)?;
    vmm.program.kill()?;
    verified(&format!("firecracker: a guest of {} MiB booted, and its snapshot was taken", machine::MEMORY_MIB));
    Ok(())
}

/// Restores on demand, and records the working set.
fn on_demand(snapshot: &Snapshot) -> Outcome<()> {
    let (pager, mut vmm) = snapshot.restore_with_working_set("on-demand")?;
    let round = vmm.program.whole_round()?;
    let nr_faults = pager.metric("faults_total")?;
    verified(&format!("firecracker: on demand: {} pages verified, {nr_faults} faults", round.nr_pages));
    vmm.program.kill()?;
    // Recorded once the machine is gone.
    file(&snapshot.path("working-set"))?;
    pager.kill()
}

/// Restores by the working set, with a balloon after it.
fn replayed(snapshot: &Snapshot) -> Outcome<()> {
    let (pager, mut vmm) = snapshot.restore_with_working_set("replayed")?;
    let round = vmm.program.whole_round()?;
    let nr_bytes = pager.at_least("replayed_bytes_total", guest::NR_PAGES as u64 / 2 * PAGE_BYTES)?;
    let nr_faults = pager.metric("faults_total")?;
    verified(&format!(
        "firecracker: replay: {} pages verified, {} pages replayed, {nr_faults} faults",
        round.nr_pages,
        nr_bytes / PAGE_BYTES
    ));
    inflate(&pager, &mut vmm, round)?;
    zeros(snapshot, &vmm)?;
    deflate(&mut vmm)?;
    vmm.program.kill()?;
    pager.kill()
}

/// The pager is killed while the guest verifies, and again with a balloon.
fn taken_over(snapshot: &Snapshot) -> Outcome<()> {
    // Page by page: otherwise all may be there before it is killed.
    let more = ["--granule", "4KiB"];
    let (first, mut vmm) = snapshot.restore("taken-over", SMALL, &more)?;
    let nr_faults = first.at_least("faults_total", NR_FAULTS)?;
    first.kill()?;
    let second = snapshot.serve(&more)?;
    second.at_least("taken_over_total", 1)?;
    let round = vmm.program.whole_round()?;
    let nr_filled = second.at_least("filled_bytes_total", guest::NR_PAGES as u64 / 2 * PAGE_BYTES)? / PAGE_BYTES;
    verified(&format!(
        "firecracker: takeover: {} pages verified, killed after {nr_faults} faults, {nr_filled} pages by the successor",
        round.nr_pages
    ));
    inflate(&second, &mut vmm, round)?;
    second.kill()?;
    let third = snapshot.serve(&more)?;
    third.at_least("taken_over_total", 1)?;
    zeros(snapshot, &vmm)?;
    deflate(&mut vmm)?;
    vmm.program.kill()?;
    third.kill()
}

/// Restores on demand into pages of 2 MiB.
fn huge_pages(snapshot: &Snapshot) -> Outcome<()> {
    let keep = |nr_pages: u64| fs::write(NR_HUGE_PAGES, nr_pages.to_string()).map_err(|error| error.to_string());
    keep(machine::MEMORY_MIB / 2)?;
    let (pager, mut vmm) = snapshot.restore("huge-pages", HUGE, &[])?;
    let round = vmm.program.whole_round()?;
    let nr_faults = pager.metric("faults_total")?;
    verified(&format!("firecracker: pages of 2 MiB: {} pages verified, {nr_faults} faults", round.nr_pages));
    vmm.program.kill()?;
    pager.kill()?;
    keep(0)
}

/// Lets the balloon take memory from a guest whose last round was `before`.
fn inflate(pager: &Pager, vmm: &mut Vmm, before: Round) -> Outcome<()> {
    vmm.balloon(BALLOON_MIB)?;
    let nr_bytes = pager.at_least("removed_bytes_total", BALLOON_MIB << 20)?;
    let round = vmm.program.round("a round with less memory", with_less(before))?;
    verified(&format!(
        "firecracker: balloon: {} pages removed, {} pages verified beside it",
        nr_bytes / PAGE_BYTES,
        round.nr_pages
    ));
    Ok(())
}

/// Whether a round had less memory than `before`, by nearly all of the balloon.
fn with_less(before: Round) -> impl Fn(&Round) -> bool {
    let most_kib = before.memory_kib - BALLOON_LEAST_KIB;
    move |round| round.memory_kib <= most_kib
}

/// At least half as many pages as the balloon has are zeros for the VMM, although the snapshot has
/// bytes for them.
fn zeros(snapshot: &Snapshot, vmm: &Vmm) -> Outcome<()> {
    let file = File::open(snapshot.path("memory")).map_err(|error| error.to_string())?;
    // The guest would use the CPUs, and some of these pages.
    vmm.pause()?;
    let pid = vmm.program.pid();
    let (sender, found) = mpsc::channel();
    // A page that never comes stops the thread for good.
    thread::spawn(move || sender.send(GivenUp::find(pid, &file)));
    let found = found.recv_timeout(PATIENCE).map_err(|_| "the balloon's pages did not come in time")??;
    vmm.resume()?;
    // The balloon may take some pages that were never filled.
    if found.nr_zeros < HALF_BALLOON_PAGES {
        return Err(format!("of the balloon's pages less than {HALF_BALLOON_PAGES} are zeros: {found:?}"));
    }
    verified(&format!(
        "firecracker: balloon: of {} pages that the guest had filled and freed {} are zeros now",
        found.nr_pages, found.nr_zeros
    ));
    Ok(())
}

/// Gives all memory back to the guest, which uses it.
fn deflate(vmm: &mut Vmm) -> Outcome<()> {
    vmm.balloon(0)?;
    let round = vmm.program.round("a round with all memory", |round| round.nr_scratch >= HALF_BALLOON_PAGES)?;
    verified(&format!(
        "firecracker: balloon: given back: {} pages verified, {} that were free",
        round.nr_pages, round.nr_scratch
    ));
    Ok(())
}
