//! `slat-pager serve --experimental guest-memfd` and a monitor that speaks the protocol of Firecracker's
//! branch to the letter: threads of its own fault by a userfaultfd, vCPUs by its socket, and each byte
//! is verified by both. Only the kernels of that branch have a guest_memfd as it is used there;
//! elsewhere a memfd stands in, which is said.

#![expect(unsafe_code, reason = "KVM's calls, and the bitmap's words")]

#[path = "support/pager.rs"]
mod pager;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use pager::{Pager, SEED, SIZE, folder, metric, noted, socket};
use registered::{Guest, PAGE, send_with, userfaultfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use slat_pager::protocol::guest_memfd::{FaultReply, FaultRequest};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd};
use support::until;

const GUEST_MEMFD: &[&str] = &["--experimental", "guest-memfd"];
const NR_VCPUS: u32 = 8;
/// A reply that takes longer never comes.
const PATIENCE: Duration = Duration::from_secs(120);
/// The low region has a quarter; the other is above 4 GiB in the guest.
const LOW: usize = SIZE / 4;
const HIGH_GPA: u64 = 1 << 32;

/// A guest_memfd as the branch's kernels have it, or why there is none.
fn guest_memfd(nr_bytes: u64) -> Result<OwnedFd, String> {
    let call = |fd: i32, request: libc::c_ulong, argument: *mut u64| {
        // SAFETY: KVM_CREATE_VM takes no pointer; KVM_CREATE_GUEST_MEMFD takes 64 bytes, which are there.
        match unsafe { libc::ioctl(fd, request as _, argument) } {
            // SAFETY: the kernel has made the descriptor.
            made if made >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(made) }),
            _ => Err(std::io::Error::last_os_error().to_string()),
        }
    };
    let kvm = File::options().read(true).write(true).open("/dev/kvm").map_err(|error| format!("no KVM: {error}"))?;
    let vm = call(kvm.as_raw_fd(), 0xae01, std::ptr::null_mut())?;
    // It can be mapped, is shared with the host from the start, has no direct map, and can be written.
    let mut argument = [nr_bytes, 15, 0, 0, 0, 0, 0, 0];
    call(vm.as_raw_fd(), 0xc040_aed4, argument.as_mut_ptr())
        .map_err(|error| format!("no guest_memfd without a direct map: {error}"))
}

fn memfd(nr_bytes: u64, seals: SealFlags) -> OwnedFd {
    let memfd = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memfd, nr_bytes).unwrap();
    fcntl_add_seals(&memfd, seals).unwrap();
    memfd
}

/// Memory as a monitor has it before it connects.
struct Memory {
    userfaultfd: Userfaultfd,
    file: OwnedFd,
    bitmap: OwnedFd,
    /// What the monitor's own threads use.
    low: Guest,
    high: Guest,
    /// What vCPUs use: no fault of theirs comes to the userfaultfd.
    vcpus: Guest,
}

impl Memory {
    fn new() -> Option<Memory> {
        let userfaultfd = userfaultfd(0)?;
        let file = guest_memfd(SIZE as u64).unwrap_or_else(|why| {
            println!("a memfd stands in for the guest_memfd: {why}");
            memfd(SIZE as u64, SealFlags::SHRINK)
        });
        let low = Guest::of_file(&file, LOW, 0);
        let high = Guest::of_file(&file, SIZE - LOW, LOW as u64);
        low.register(&userfaultfd, RegisterMode::MISSING.and(RegisterMode::MINOR));
        high.register(&userfaultfd, RegisterMode::MISSING.and(RegisterMode::MINOR));
        let bitmap = memfd((SIZE / PAGE / 8) as u64, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
        let vcpus = Guest::of_file(&file, SIZE, 0);
        Some(Memory { userfaultfd, file, bitmap, low, high, vcpus })
    }

    fn handshake(&self) -> serde_json::Value {
        let entry = |guest: &Guest, gpa_start: u64| {
            let region = guest.region();
            serde_json::json!({
                "base_host_virt_addr": region.address,
                "size": region.size_bytes,
                "offset": region.offset,
                "gpa_start": gpa_start,
                "page_size": PAGE,
                "is_guest_memfd": true,
                "page_size_kib": PAGE,
            })
        };
        serde_json::json!([entry(&self.low, 0), entry(&self.high, HIGH_GPA)])
    }

    /// As `PUT /snapshot/load` does it: the bitmap has its ones after the handshake.
    fn load(self, folder: &Path) -> Monitor {
        let stream = UnixStream::connect(socket(folder)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let fds = [self.userfaultfd.as_fd(), self.file.as_fd(), self.bitmap.as_fd()];
        send_with(&stream, self.handshake().to_string().as_bytes(), &fds).unwrap();
        let bits = MmapOptions::new().map_raw(&self.bitmap).unwrap();
        let requests = Mutex::new(stream.try_clone().unwrap());
        let monitor = Monitor { memory: self, nr_again: AtomicU64::new(0), bits, stream: requests, replies: stream };
        (0..SIZE / PAGE).for_each(|page| {
            monitor.word(page).fetch_or(1 << (page % 64), Ordering::Relaxed);
        });
        monitor.stream.lock().unwrap().write_all(b"no_exitless_apf").unwrap();
        monitor
    }
}

struct Monitor {
    memory: Memory,
    /// Replies that no vCPU waited for.
    nr_again: AtomicU64,
    bits: MmapRaw,
    stream: Mutex<UnixStream>,
    replies: UnixStream,
}

impl Monitor {
    fn word(&self, page: usize) -> &AtomicU64 {
        assert!(page < SIZE / PAGE);
        // SAFETY: it is in the mapping, whose file is sealed; all access it as an atomic.
        unsafe { AtomicU64::from_ptr(self.bits.as_mut_ptr().cast::<u64>().add(page / 64)) }
    }

    fn faults(&self, page: usize) -> bool {
        self.word(page).load(Ordering::Acquire) & 1 << (page % 64) != 0
    }

    fn request(&self, request: &FaultRequest) {
        let body = bitcode::encode(request);
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(&body);
        self.stream.lock().unwrap().write_all(&frame).unwrap();
    }

    /// One reply; `None`: the pager has closed the socket.
    fn reply(&self) -> Option<FaultReply> {
        let mut length = [0; 4];
        (&self.replies).read_exact(&mut length).ok()?;
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        (&self.replies).read_exact(&mut body).ok()?;
        Some(bitcode::decode(&body).unwrap())
    }

    /// The vCPU may use `page` afterwards. Every other page is asked for by its offset.
    fn fault(&self, vcpu: u32, page: usize, replies: &Receiver<FaultReply>) {
        let offset = (page * PAGE) as u64;
        let gpa = if page < LOW / PAGE { offset } else { HIGH_GPA + offset - LOW as u64 };
        let by_gpa = page.is_multiple_of(2);
        let request = FaultRequest {
            vcpu,
            offset: if by_gpa { 0 } else { offset + 17 },
            flags: 16 + u64::from(vcpu),
            gpa: by_gpa.then_some(gpa),
        };
        self.request(&request);
        let FaultRequest { flags, gpa, .. } = request;
        let expected = FaultReply { vcpu: Some(vcpu), offset, len: PAGE as u64, flags, gpa, zero: false };
        // One that a dead pager had answered may be answered by its successor, too.
        while replies.recv_timeout(PATIENCE).expect("a reply") != expected {
            self.nr_again.fetch_add(1, Ordering::Relaxed);
        }
        assert!(!self.faults(page), "page {page} still faults");
    }

    /// A vCPU for each of `pages` asks for it, and no one waits for a reply.
    fn fault_at_once(&self, pages: Range<usize>) {
        for page in pages {
            let offset = (page * PAGE) as u64;
            self.request(&FaultRequest { vcpu: page as u32, offset, flags: 0, gpa: None });
        }
    }

    /// Each page that `guest` has is as it must be after [`PUNCHED`] was taken out.
    fn is_as_punched(&self, guest: &Guest) {
        let first = (guest.region().offset as usize) / PAGE;
        for page in 0..guest.nr_pages() {
            match (first + page).checked_sub(LOW / PAGE).is_some_and(|page| PUNCHED.contains(&page)) {
                true => assert!(guest.is_zero(page), "page {page}"),
                false => guest.verify(page, SEED),
            }
        }
    }

    /// vCPUs and threads of the monitor verify `pages` by `verify`, at the same time.
    fn verify(&self, pages: Range<usize>, verify: impl Fn(&Guest, usize) + Sync) {
        let (senders, receivers): (HashMap<u32, Sender<_>>, Vec<_>) = (0..NR_VCPUS)
            .map(|vcpu| {
                let (sender, receiver) = channel();
                ((vcpu, sender), (vcpu, receiver))
            })
            .unzip();
        let verify = &verify;
        // Each has an order of its own.
        let nth = |nr: usize, who: usize| pages.start + (nr * (2 * who + 37) + who * 101) % pages.len();
        assert!(pages.len().is_power_of_two());
        thread::scope(|scope| {
            let _shut = ShutIfPanicking(&self.replies);
            let replies = scope.spawn(move || {
                loop {
                    let reply = self.reply().expect("a reply");
                    match senders.get(&reply.vcpu.unwrap()) {
                        // The vCPU may be through, and this its second reply.
                        Some(sender) => drop(sender.send(reply)),
                        None => return,
                    }
                }
            });
            thread::scope(|scope| {
                for (vcpu, replies) in receivers {
                    let pages = 0..pages.len();
                    scope.spawn(move || {
                        for page in pages.map(|nr| nth(nr, vcpu as usize)) {
                            if self.faults(page) {
                                self.fault(vcpu, page, &replies);
                            }
                            verify(&self.memory.vcpus, page);
                        }
                    });
                }
                for thread in 0..8 {
                    let pages = 0..pages.len();
                    scope.spawn(move || {
                        for page in pages.map(|nr| nth(nr, thread + 100)) {
                            match page.checked_sub(LOW / PAGE) {
                                None => verify(&self.memory.low, page),
                                Some(page) => verify(&self.memory.high, page),
                            }
                        }
                    });
                }
            });
            // All are through: the reply to a vCPU that there is not ends the replies.
            self.request(&FaultRequest { vcpu: NR_VCPUS, offset: (pages.start * PAGE) as u64, flags: 0, gpa: None });
            replies.join().unwrap();
        });
    }
}

/// Ends the wait for replies when something was found to be wrong.
struct ShutIfPanicking<'s>(&'s UnixStream);

impl Drop for ShutIfPanicking<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.shutdown(std::net::Shutdown::Both);
        }
    }
}

#[test]
fn vcpus_and_the_monitor_find_each_byte_on_demand_and_replayed() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    fs::create_dir(folder.join("sets")).unwrap();
    let set = folder.join("sets/set");
    let pager = Pager::start(folder, &[GUEST_MEMFD, &["--working-set", set.to_str().unwrap()]].concat());
    for nr in 0..2 {
        let Some(memory) = Memory::new() else { return };
        let monitor = memory.load(folder);
        monitor.verify(0..SIZE / PAGE, |guest, page| guest.verify(page, SEED));
        assert!((0..SIZE / PAGE).all(|page| !monitor.faults(page)));
        assert_eq!((metric(folder, "vms"), noted(folder)), (1.0, 1));
        drop(monitor);
        until("it has ended", || metric(folder, "vms") == 0.0 && noted(folder) == 0);
        until("the set is there", || set.exists());
        until("it was replayed", || nr == 0 || metric(folder, "replayed_bytes_total") > 0.0);
    }
    assert_eq!(metric(folder, "violations_total"), 0.0);
    drop(pager);
}

#[test]
fn pages_that_were_taken_out_of_the_file_are_zeros_also_if_they_never_came() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let _pager = Pager::start(folder, GUEST_MEMFD);
    let Some(memory) = Memory::new() else { return };
    let monitor = memory.load(folder);
    let first = LOW / PAGE;
    monitor.verify(first..first + 512, |guest, page| guest.verify(page, SEED));
    // Of the first half all pages have come; of the second, none.
    monitor.memory.high.punch(256..768);
    // The first that touch them are threads of the monitor alone.
    assert!([256, 511, 512, 700].iter().all(|page| monitor.memory.high.is_zero(*page)));
    let is_right = |guest: &Guest, page: usize| match page * PAGE + guest.region().offset as usize {
        at if (LOW + 256 * PAGE..LOW + 768 * PAGE).contains(&at) => assert!(guest.is_zero(page), "page {page}"),
        _ => guest.verify(page, SEED),
    };
    monitor.verify(first..first + 1024, is_right);
    assert_eq!(metric(folder, "removed_bytes_total"), (512 * PAGE) as f64);
}

/// Pages of the high region that are taken out of the file: some that have come, and some that have not.
const PUNCHED: Range<usize> = 256..320;

/// The vCPUs that wait when the pager dies are lost with the connection. No other waits.
#[test]
fn a_successor_fills_all_pages_at_which_vcpus_would_leave_the_guest() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let mut nr_filling = 0;
    for round in 0..20 {
        // Machines of rounds before: their process lives on.
        let _ = fs::remove_dir_all(folder.join("pager.sock.state"));
        let mut pager = Pager::start(folder, GUEST_MEMFD);
        let Some(memory) = Memory::new() else { return };
        let mut monitor = memory.load(folder);
        monitor.fault_at_once(0..8 * round);
        (0..4 * round).for_each(|_| assert!(monitor.reply().is_some()));
        (PUNCHED.start..PUNCHED.start + round).for_each(|page| monitor.memory.high.verify(page, SEED));
        monitor.memory.high.punch(PUNCHED);
        if round % 2 == 1 && may_open_mappings() {
            // As Firecracker has it: mapped alone.
            monitor.memory.bitmap = File::open("/dev/null").unwrap().into();
        }
        let nr_verified = AtomicU64::new(0);
        thread::scope(|scope| {
            for nr in 0..8 {
                let (memory, nr_verified) = (&monitor.memory, &nr_verified);
                scope.spawn(move || {
                    for page in (nr..memory.low.nr_pages()).step_by(8) {
                        memory.low.verify(page, SEED);
                        nr_verified.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for kill in 0..5 {
                until("some are verified", || nr_verified.load(Ordering::Relaxed) >= round as u64 * 5 + kill);
                nr_filling += u32::from(kill > 0 && (0..SIZE / PAGE).any(|page| monitor.faults(page)));
                pager.child.kill().unwrap();
                pager.child.wait().unwrap();
                pager = Pager::start(folder, GUEST_MEMFD);
                assert_eq!((metric(folder, "taken_over_total"), noted(folder)), (1.0, 1), "round {round}, kill {kill}");
            }
        });
        until("no vCPU leaves the guest", || (0..SIZE / PAGE).all(|page| !monitor.faults(page)));
        // The connection is that of the dead one.
        while monitor.reply().is_some() {}
        monitor.is_as_punched(&monitor.memory.vcpus);
        monitor.is_as_punched(&monitor.memory.high);
        assert_eq!(metric(folder, "violations_total"), 0.0);
    }
    println!("{nr_filling} pagers were killed while they filled");
}

/// A service manager: it keeps what a pager has it keep, and passes it to the next one.
struct Manager {
    socket: UnixDatagram,
    kept: Option<OwnedFd>,
}

impl Manager {
    fn new(folder: &Path) -> Manager {
        let _ = fs::remove_file(folder.join("notify"));
        let socket = UnixDatagram::bind(folder.join("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Manager { socket, kept: None }
    }

    fn start_pager(&mut self, folder: &Path) -> Pager {
        self.receive();
        let mut pager = Pager::command(folder);
        pager.args(GUEST_MEMFD);
        // As sd_listen_fds(3) has it: descriptor 3, and the number of the process.
        let script =
            "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; exec \"$0\" \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(pager.get_program()).args(pager.get_args());
        if let Some(kept) = &self.kept {
            command.stdin(kept.try_clone().unwrap());
        }
        let child = command.env("NOTIFY_SOCKET", folder.join("notify")).spawn().unwrap();
        let mut pager = Pager { child };
        pager.wait_until_it_listens(&socket(folder));
        pager
    }

    /// Whether there is something that it keeps.
    fn receive(&mut self) -> bool {
        let mut text = [0; 256];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        while let Ok(received) =
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        {
            let asks = text[..received.bytes].starts_with(b"FDSTORE=1");
            for message in ancillary.drain() {
                let RecvAncillaryMessage::ScmRights(mut descriptors) = message else { continue };
                assert!(asks && self.kept.is_none());
                self.kept = descriptors.next();
            }
        }
        self.kept.is_some()
    }
}

#[test]
fn no_request_is_lost_with_a_pager_whose_connections_are_kept() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let (mut nr_kills, mut nr_again) = (0, 0);
    while nr_kills < 100 {
        let _ = fs::remove_dir_all(folder.join("pager.sock.state"));
        let mut manager = Manager::new(folder);
        let mut pager = manager.start_pager(folder);
        let Some(memory) = Memory::new() else { return };
        let monitor = memory.load(folder);
        until("the connection is kept", || manager.receive());
        thread::scope(|scope| {
            let verifying = scope.spawn(|| monitor.verify(0..SIZE / PAGE, |guest, page| guest.verify(page, SEED)));
            while !verifying.is_finished() {
                thread::sleep(Duration::from_millis(nr_kills % 16));
                pager.child.kill().unwrap();
                pager.child.wait().unwrap();
                nr_kills += 1;
                pager = manager.start_pager(folder);
                assert_eq!((metric(folder, "taken_over_total"), noted(folder)), (1.0, 1), "kill {nr_kills}");
            }
            verifying.join().unwrap();
        });
        assert!((0..SIZE / PAGE).all(|page| !monitor.faults(page)));
        assert_eq!(metric(folder, "violations_total"), 0.0);
        nr_again += monitor.nr_again.into_inner();
        // Its end is seen by the connection that was kept.
        drop((monitor.replies, monitor.stream, manager));
        until("it has ended", || noted(folder) == 0);
    }
    println!("{nr_kills} pagers were killed; {nr_again} replies came once more");
}

/// Whether `/proc/PID/map_files` can be used; says so if not.
fn may_open_mappings() -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    // The first is of this program.
    let name = maps.split(' ').next().unwrap();
    let opened = File::open(format!("/proc/self/map_files/{name}"));
    if let Err(error) = &opened {
        println!("skipped: a bitmap that is mapped alone: {error}");
    }
    opened.is_ok()
}

#[test]
fn what_is_wrong_about_the_memory_is_refused_and_disturbs_no_one() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let _pager = Pager::start(folder, GUEST_MEMFD);
    let (Some(memory), Some(other)) = (Memory::new(), Memory::new()) else { return };
    let monitor = memory.load(folder);
    monitor.verify(0..128, |guest, page| guest.verify(page, SEED));
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let bitmap_bytes = (SIZE / PAGE / 8) as u64;
    let bitmap_short = memfd(bitmap_bytes - 1, sealed);
    let unsealed = memfd(bitmap_bytes, SealFlags::empty());
    let file = File::open(folder.join("memory")).unwrap();
    let good = other.handshake();
    let changed = |place: usize, name: &str, value: serde_json::Value| {
        let mut wrong = good.clone();
        wrong[place][name] = value;
        wrong
    };
    let low = other.low.region();
    let cases = [
        (good.clone(), other.file.as_fd(), bitmap_short.as_fd()),
        (good.clone(), other.file.as_fd(), unsealed.as_fd()),
        (good.clone(), other.file.as_fd(), file.as_fd()),
        (changed(1, "gpa_start", 4096.into()), other.file.as_fd(), other.bitmap.as_fd()),
        (changed(1, "offset", 4096.into()), other.file.as_fd(), other.bitmap.as_fd()),
        (changed(1, "base_host_virt_addr", low.address.into()), other.file.as_fd(), other.bitmap.as_fd()),
        (changed(0, "page_size", (2 << 20).into()), other.file.as_fd(), other.bitmap.as_fd()),
        (changed(0, "is_guest_memfd", false.into()), other.file.as_fd(), other.bitmap.as_fd()),
        (changed(0, "size", (SIZE * 2).into()), other.file.as_fd(), other.bitmap.as_fd()),
    ];
    let mut refused = Vec::new();
    for (handshake, file, bitmap) in &cases {
        let mut stream = UnixStream::connect(socket(folder)).unwrap();
        let fds = [other.userfaultfd.as_fd(), *file, *bitmap];
        send_with(&stream, handshake.to_string().as_bytes(), &fds).unwrap();
        // It may be closed by now.
        let _ = stream.write_all(b"no_exitless_apf");
        refused.push(stream);
        until("it is refused", || metric(folder, "refused_total") == refused.len() as f64);
    }
    drop(refused);
    // Addresses that the guest does not have, and frames that are none, end the trust in one machine.
    let mut memory = Some(other);
    for (nr, wrong) in [
        FaultRequest { vcpu: 0, offset: 0, flags: 0, gpa: Some(LOW as u64) },
        FaultRequest { vcpu: 0, offset: 0, flags: 0, gpa: Some(u64::MAX) },
        FaultRequest { vcpu: 0, offset: SIZE as u64, flags: 0, gpa: None },
        FaultRequest { vcpu: 0, offset: u64::MAX, flags: 0, gpa: None },
    ]
    .into_iter()
    .enumerate()
    {
        let Some(memory) = memory.take().or_else(Memory::new) else { return };
        let wrong_one = memory.load(folder);
        wrong_one.request(&wrong);
        until("it is noticed", || metric(folder, "violations_total") == (nr + 1) as f64);
        assert!(!wrong_one.memory.high.is_readable(0), "it gets no page");
        assert!(wrong_one.faults(0));
    }
    monitor.verify(0..SIZE / PAGE, |guest, page| guest.verify(page, SEED));
}
