//! The shipped units under a systemd that is the first process of namespaces of its own: started by a
//! VMM that connects, restarted after a kill with the VM taken over, stopped and started in order. By
//! hand, as root: `docs/vmms.md` says how.

#[path = "support/pager.rs"]
mod pager;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use pager::{SEED, SIZE, metric};
use registered::{Guest, Kind, handshake, send, userfaultfd};
use slat_pager::userfaultfd::RegisterMode;
use support::{CLIENT, bytes, client_argument, until};

/// What the namespaces have: units of this folder alone, programs and the snapshot in /run, and nothing
/// of the host that a unit writes to. $1 is a folder with all that.
const SCRIPT: &str = r#"
set -e
mount --make-rprivate /
mount -t proc proc /proc
if mountpoint -q /sys/fs/cgroup; then umount -R /sys/fs/cgroup; fi
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run
cp -r "$1" /run/slat
mount -t tmpfs tmpfs /var
mkdir /var/tmp /var/cache /var/lib
mount -t tmpfs tmpfs /tmp
export container=slat SYSTEMD_UNIT_PATH=/run/slat/units SYSTEMD_GENERATOR_PATH=/run/slat/none
exec /lib/systemd/systemd --system --unit=basic.target --log-target=null
"#;
/// A cgroup of its own, which systemd takes to be the whole.
const OUTER: &str = r#"
set -e
echo $$ > "$2/cgroup.procs"
exec unshare --pid --mount --uts --ipc --cgroup --fork --kill-child sh -c "$0" sh "$1"
"#;
const QUARTER: usize = SIZE / 4096 / 4;

/// A restored guest; for each line of input a quarter of its memory is verified.
#[test]
#[ignore = "a client that the test starts"]
fn client_verifies_quarters() {
    let Some(socket) = client_argument() else { return };
    let userfaultfd = userfaultfd(0).unwrap();
    let guest = Guest::new(Kind::Anonymous, SIZE, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let stream = UnixStream::connect(socket).unwrap();
    send(&stream, handshake(&[guest.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
    for (quarter, line) in std::io::stdin().lines().take(4).enumerate() {
        line.unwrap();
        (quarter * QUARTER..(quarter + 1) * QUARTER).for_each(|page| guest.verify(page, SEED));
        println!("verified {quarter}");
    }
}

/// systemd with its namespaces, until this is dropped.
struct Systemd {
    outer: Child,
    /// Its first process, as this one knows it.
    first: u32,
    cgroup: PathBuf,
}

impl Systemd {
    /// `None`: it cannot be had here, which is said.
    fn start(folder: &Path) -> Option<Systemd> {
        if !rustix::process::geteuid().is_root() || !Path::new("/lib/systemd/systemd").exists() {
            println!("skipped: it needs root and /lib/systemd/systemd");
            return None;
        }
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let hierarchy = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let Some(hierarchy) = hierarchy.into_iter().find(|words| words[2] == "cgroup2") else {
            println!("skipped: no cgroup2 is mounted");
            return None;
        };
        let cgroup = Path::new(hierarchy[1]).join(format!("slat-pager-{}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let mut outer = Command::new("sh");
        outer.arg("-c").arg(OUTER).arg(SCRIPT).arg(folder).arg(&cgroup).stdin(Stdio::null());
        let mut systemd = Systemd { outer: outer.spawn().unwrap(), first: 0, cgroup };
        let children = format!("/proc/{0}/task/{0}/children", systemd.outer.id());
        until("systemd answers", || {
            assert!(systemd.outer.try_wait().unwrap().is_none(), "it has ended");
            let first = fs::read_to_string(&children).unwrap_or_default();
            systemd.first = first.trim().parse().unwrap_or(0);
            let name = fs::read_to_string(format!("/proc/{}/comm", systemd.first)).unwrap_or_default();
            name.trim() == "systemd" && systemd.ask(&["is-active", "basic.target"]).trim() == "active"
        });
        Some(systemd)
    }

    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.first.to_string(), "--mount", "--pid", "--uts", "--ipc", "--", program]);
        command
    }

    /// What systemctl says.
    fn ask(&self, arguments: &[&str]) -> String {
        let output = self.inside("systemctl").args(arguments).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn tell(&self, arguments: &[&str]) {
        let output = self.inside("systemctl").args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}{}", String::from_utf8_lossy(&output.stderr), self.log());
    }

    /// A property of the service.
    fn property(&self, name: &str) -> String {
        self.ask(&["show", "--value", "--property", name, "slat-pager.service"]).trim().to_string()
    }

    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.first))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("/run/slat/log")).unwrap_or_default()
    }

    fn client(&self) -> Client {
        // A page that never comes ends the test.
        let mut client = self.inside("timeout");
        client.args(["60", "/run/slat/client"]);
        client.args(["--exact", "client_verifies_quarters", "--ignored", "--nocapture", "--test-threads=1"]);
        client.env(CLIENT, "/run/slat-pager/pager.sock").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = client.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Client { child, input, lines: BufReader::new(output).lines() }
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = self.outer.kill();
        let _ = self.outer.wait();
        // Its processes end with the first of them, and their cgroups can be removed then.
        until("its cgroups are gone", || remove(&self.cgroup).is_ok());
    }
}

fn remove(cgroup: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

struct Client {
    child: Child,
    input: ChildStdin,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Client {
    fn ask_for(&mut self) {
        self.input.write_all(b"\n").unwrap();
    }

    fn has_verified(&mut self, quarter: usize) {
        let word = format!("verified {quarter}");
        assert!(self.lines.by_ref().map_while(Result::ok).any(|line| line.contains(&word)), "{word}");
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}

/// The snapshot, the programs, the shipped units with other paths, and the targets that they name.
fn prepare(folder: &Path) {
    let units = folder.join("units");
    fs::create_dir_all(&units).unwrap();
    fs::create_dir(folder.join("none")).unwrap();
    fs::write(folder.join("memory"), bytes(SEED, 0..SIZE as u64)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_slat-pager"), folder.join("slat-pager")).unwrap();
    fs::copy(std::env::current_exe().unwrap(), folder.join("client")).unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd");
    fs::copy(shipped.join("slat-pager.socket"), units.join("slat-pager.socket")).unwrap();
    let service = fs::read_to_string(shipped.join("slat-pager.service")).unwrap();
    let program = "ExecStart=/usr/bin/slat-pager serve --config /etc/slat-pager.toml";
    assert!(service.contains(program));
    let here = "ExecStart=/run/slat/slat-pager serve --config /run/slat/pager.toml\nStandardError=append:/run/slat/log";
    fs::write(units.join("slat-pager.service"), service.replace(program, here)).unwrap();
    for target in ["basic", "sysinit", "sockets", "multi-user", "network-online", "shutdown"] {
        fs::write(units.join(format!("{target}.target")), "[Unit]\nDefaultDependencies=no\n").unwrap();
    }
    let config = "metrics = 'unix:/run/slat-pager/state/metrics'\nsandbox = 'required'\n[[socket]]\n\
                  path = '/run/slat-pager/pager.sock'\nmemory = '/run/slat/memory'\n";
    fs::write(folder.join("pager.toml"), config).unwrap();
}

#[test]
#[ignore = "by hand, as root: it starts a systemd"]
fn the_units_start_restart_and_stop_the_pager_and_no_machine_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let Some(systemd) = Systemd::start(folder.path()) else { return };
    let state = systemd.path("/run/slat-pager/state");
    systemd.tell(&["start", "slat-pager.socket"]);
    assert_eq!(systemd.property("ActiveState"), "inactive");

    let mut first = systemd.client();
    first.ask_for();
    first.has_verified(0);
    until("it is started", || systemd.property("ActiveState") == "active");
    let pid = systemd.property("MainPID");
    println!("started by a machine that connected, pid {pid}");

    systemd.tell(&["kill", "--signal=KILL", "--kill-whom=main", "slat-pager.service"]);
    first.ask_for();
    first.has_verified(1);
    until("it is restarted", || systemd.property("ActiveState") == "active");
    assert_ne!(systemd.property("MainPID"), pid);
    assert_eq!(systemd.property("NRestarts"), "1");
    assert_eq!(metric(&state, "taken_over_total"), 1.0, "{}", systemd.log());
    println!("killed and restarted, pid {}: the machine was taken over", systemd.property("MainPID"));

    systemd.tell(&["stop", "slat-pager.service"]);
    assert_eq!((systemd.property("ActiveState"), systemd.property("Result")), ("inactive".into(), "success".into()));
    // It waits; one that connects starts the pager, which has both.
    first.ask_for();
    let mut second = systemd.client();
    for quarter in 0..4 {
        second.ask_for();
        second.has_verified(quarter);
    }
    first.has_verified(2);
    assert_eq!((metric(&state, "taken_over_total"), metric(&state, "vms_served_total")), (1.0, 2.0));
    println!("stopped, and started by another machine: the first was taken over");
    second.end();
    first.ask_for();
    first.has_verified(3);
    first.end();
    until("both have ended", || metric(&state, "vms") == 0.0);
    let left = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path());
    assert!(!left.into_iter().any(|path| path.extension().is_some_and(|extension| extension == "vm")));
    systemd.tell(&["stop", "slat-pager.socket", "slat-pager.service"]);
    assert_eq!(systemd.property("Result"), "success");
    UnixStream::connect(state.join("metrics")).expect_err("no pager runs");
}
