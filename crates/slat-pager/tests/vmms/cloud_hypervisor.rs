//! Cloud Hypervisor: `slat-pager store` and `slat-pager restore` are its peers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::machine::{self, BALLOON_LEAST_KIB, BALLOON_MIB, HALF_BALLOON_PAGES, PAGE_BYTES, verified};
use crate::pager;
use crate::process::{Program, Round, file, listening};
use crate::{Outcome, guest, http};

/// A process of Cloud Hypervisor.
struct Vmm {
    program: Program,
    api: PathBuf,
}

impl Vmm {
    fn start(folder: &Path, name: &str, words: &[&str]) -> Outcome<Vmm> {
        let api = folder.join(name).with_extension("api");
        let mut command = Command::new(machine::CLOUD_HYPERVISOR);
        // Its filters lack calls that a newer C library makes than the one it is released with.
        command.args(["--seccomp", "false", "--api-socket"]).arg(&api).args(words);
        let program = Program::start("cloud-hypervisor", &mut command)?;
        listening(&api)?;
        Ok(Vmm { program, api })
    }
}

fn call(api: &Path, what: &str, body: &Value) -> Outcome<()> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    http::call(api, "PUT", &format!("/api/v1/vm.{what}"), &body).map(drop)
}

/// All steps; files are in `folder`.
pub fn run(folder: &Path) -> Outcome<()> {
    let snapshot = folder.join("snapshot");
    boot(folder, &snapshot).map_err(|why| format!("boot and store: {why}"))?;
    let (mut vmm, mut pager) = restore(folder, &snapshot, "on-demand").map_err(|why| format!("on demand: {why}"))?;
    let round = vmm.program.whole_round()?;
    vmm.program.kill()?;
    let nr_recorded = pager.number_after("the working set was recorded", "nr_pages=")?;
    ended(pager)?;
    verified(&format!("cloud-hypervisor: on demand: {} pages verified, {nr_recorded} recorded", round.nr_pages));

    let (mut vmm, mut pager) = restore(folder, &snapshot, "replayed").map_err(|why| format!("replay: {why}"))?;
    let nr_replayed = pager.number_after("the working set was replayed", "bytes=")? / PAGE_BYTES;
    if nr_replayed < guest::NR_PAGES as u64 / 2 {
        return Err(format!("replay: {nr_replayed} pages of {nr_recorded}"));
    }
    let round = vmm.program.whole_round()?;
    verified(&format!("cloud-hypervisor: replay: {} pages verified, {nr_replayed} replayed", round.nr_pages));
    balloon(&mut vmm, round).map_err(|why| format!("balloon: {why}"))?;
    vmm.program.kill()?;
    ended(pager)
}

/// Boots the guest, lets it fill its memory, and stores it.
fn boot(folder: &Path, snapshot: &Path) -> Outcome<()> {
    let (cpus, memory) = (format!("boot={}", machine::NR_CPUS), format!("size={}M,shared=on", machine::MEMORY_MIB));
    let words = ["--kernel", machine::KERNEL, "--initramfs", machine::INITRAMFS, "--cmdline", machine::WORDS];
    let devices = ["--cpus", &cpus, "--memory", &memory, "--serial", "tty", "--console", "off"];
    let balloon = ["--balloon", "size=0"];
    let mut vmm = Vmm::start(folder, "booted", &[words.as_slice(), &devices, &balloon].concat())?;
    vmm.program.filled()?;
    vmm.program.part()?;
    let socket = folder.join("store.sock");
    let mut command = pager::command("store");
    let pager = Program::start("pager", command.arg("--socket").arg(&socket).arg("--to").arg(snapshot))?;
    file(&socket)?;
    call(&vmm.api, "pause", &Value::Null)?;
    let to = format!("unix:{}", socket.display());
    call(&vmm.api, "send-migration", &json!({"destination_url": to, "local": true}))?;
    ended(pager)?;
    let nr_bytes: u64 = fs::read_dir(snapshot)
        .and_then(|entries| entries.map(|entry| Ok(entry?.metadata()?.len())).sum())
        .map_err(|error| error.to_string())?;
    verified(&format!(
        "cloud-hypervisor: a guest of {} MiB booted, and was stored: {nr_bytes} bytes",
        machine::MEMORY_MIB
    ));
    Ok(())
}

/// A VMM that is restored page by page, and its pager.
fn restore(folder: &Path, snapshot: &Path, name: &str) -> Outcome<(Vmm, Program)> {
    let vmm = Vmm::start(folder, name, &[])?;
    let socket = folder.join(name).with_extension("sock");
    let mut command = pager::command("restore");
    let pager = Program::start("pager", command.arg("--socket").arg(&socket).arg("--from").arg(snapshot))?;
    // Answered once the VM is there.
    let from = json!({"receiver_url": format!("unix:{}", socket.display()), "memory_mode": "Postcopy"});
    call(&vmm.api, "receive-migration", &from)?;
    Ok((vmm, pager))
}

/// The balloon takes memory of a guest whose last round was `before`, and gives it back.
fn balloon(vmm: &mut Vmm, before: Round) -> Outcome<()> {
    let resize = |vmm: &Vmm, mib: u64| call(&vmm.api, "resize", &json!({"desired_balloon": mib << 20}));
    resize(vmm, BALLOON_MIB)?;
    let most_kib = before.memory_kib - BALLOON_LEAST_KIB;
    let less = vmm.program.round("a round with less memory", |round| round.memory_kib <= most_kib)?;
    resize(vmm, 0)?;
    let all = vmm.program.round("a round with all memory", |round| round.nr_scratch >= HALF_BALLOON_PAGES)?;
    verified(&format!(
        "cloud-hypervisor: balloon: {} pages verified with {} KiB less, then {} and {} that were free",
        less.nr_pages,
        before.memory_kib - less.memory_kib,
        all.nr_pages,
        all.nr_scratch
    ));
    Ok(())
}

/// Waits for the end of a pager that did what it was told.
fn ended(pager: Program) -> Outcome<()> {
    let status = pager.wait()?;
    if status.success() { Ok(()) } else { Err(format!("the pager ended with {status}")) }
}
