//! One machine of a daemon, from its handshake to its end.

#![expect(unsafe_code, reason = "a descriptor that tokio waits for")]

use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use super::listen::{self, Passed};
use super::takeover::{self, Description, FileIdentity, Orphan, Vcpus};
use super::{Daemon, Socket};
use crate::config::Experimental;
use crate::protocol::guest_memfd::GuestAddresses;
use crate::protocol::handoff::Handoff;
use crate::protocol::{firecracker, guest_memfd, handoff};
use crate::userfaultfd::Userfaultfd;
use crate::vm::state::State;
use crate::vm::userfault_bitmap::UserfaultBitmap;
use crate::vm::vcpu_faults::VcpuFaults;
use crate::vm::{AttachError, Observer, Options, Region, Regions, Vm, WhenDropped};
use crate::working_set::Plan;
use crate::working_set::replay::{Progress, nr_threads};

/// How the end of a monitor is seen.
#[derive(Debug)]
enum Life {
    /// It closes its socket.
    Socket(UnixStream),
    /// The same; its vCPUs ask for pages by the socket.
    VcpuFaults(UnixStream, GuestAddresses, VcpuFaults),
    /// Its process ends.
    Process(OwnedFd),
}

/// Serves a monitor that has connected.
pub(super) fn serve(daemon: &Arc<Daemon>, socket: &Arc<Socket>, stream: UnixStream) {
    let Ok(slot) = Arc::clone(&daemon.slots).try_acquire_owned() else {
        socket.metrics.refused.inc();
        tracing::error!("there are too many machines; a monitor is refused");
        return;
    };
    let (daemon, socket) = (Arc::clone(daemon), Arc::clone(socket));
    let tasks = daemon.tasks.clone();
    tasks.spawn(async move {
        let mut stream = stream;
        let received = tokio::time::timeout(socket.config.handshake_timeout, receive(&socket, &stream)).await;
        let HandedOver { regions, userfaultfd, vcpus } = match received {
            Ok(Ok(handed_over)) => handed_over,
            Ok(Err(error)) => return refuse(&socket, &error),
            Err(_) => return refuse(&socket, &"the handshake takes too long"),
        };
        let is_handoff = socket.config.experimental == Some(Experimental::Handoff);
        if is_handoff && is_served(&daemon, &stream, &userfaultfd) {
            // It was taken over, and its monitor connects anew.
            let _ = handoff::acknowledge(&mut stream).await;
            return hold(&daemon, stream).await;
        }
        let userfaultfd = Arc::new(userfaultfd);
        let guest = vcpus.as_ref().map(|(_, guest)| guest.clone());
        let turn = Arc::clone(&socket.attaching).acquire_owned().await.expect("it is never closed");
        let attaching = tokio::task::spawn_blocking({
            let (daemon, socket, userfaultfd) = (Arc::clone(&daemon), Arc::clone(&socket), Arc::clone(&userfaultfd));
            move || {
                let attached = attach(&daemon, &socket, &stream, regions, userfaultfd, vcpus);
                drop(turn);
                (attached, stream)
            }
        });
        let (attached, mut stream) = match attaching.await {
            Ok(attached) => attached,
            Err(error) => return refuse(&socket, &error),
        };
        match attached {
            Ok((vm, plan, served)) => {
                drop(userfaultfd);
                if is_handoff {
                    // A monitor that has closed its socket is noticed below.
                    let _ = handoff::acknowledge(&mut stream).await;
                }
                follow(plan, &daemon, &socket, &vm);
                let life = match guest.zip(vm.vcpu_faults()) {
                    Some((guest, faults)) => {
                        if let Err(error) = listen::keep(stream.as_fd()) {
                            tracing::warn!(%error, "the service manager keeps no connection of vCPUs");
                        }
                        Life::VcpuFaults(stream, guest, faults)
                    }
                    None => Life::Socket(stream),
                };
                watch(served, vm, life, Some(slot)).await;
            }
            Err(error) => {
                refuse(&socket, &error);
                // The monitor's threads wait, or fail, and read no zeros.
                hold(&daemon, stream).await;
                drop(userfaultfd);
            }
        }
    });
}

/// Keeps a socket that nothing more is read from, until the monitor closes it or the daemon leaves.
async fn hold(daemon: &Daemon, stream: UnixStream) {
    let mut leave = daemon.leave.clone();
    tokio::select! {
        () = ended(Life::Socket(stream)) => {}
        _ = leave.wait_for(|leave| *leave) => {}
    }
}

/// What a monitor hands over.
struct HandedOver {
    regions: Vec<Region>,
    userfaultfd: Userfaultfd,
    /// The bitmap of vCPUs that use a file, and where the guest has that.
    vcpus: Option<(OwnedFd, GuestAddresses)>,
}

/// What a monitor hands over, by the protocol of its socket.
async fn receive(socket: &Socket, stream: &UnixStream) -> Result<HandedOver, Box<dyn Error + Send>> {
    match socket.config.experimental {
        None => match firecracker::receive(stream).await {
            Ok(firecracker::Handshake { regions, userfaultfd }) => Ok(HandedOver { regions, userfaultfd, vcpus: None }),
            Err(error) => Err(Box::new(error)),
        },
        Some(Experimental::Handoff) => match handoff::receive(stream).await {
            Ok(Handoff { regions, userfaultfd, .. }) => Ok(HandedOver { regions, userfaultfd, vcpus: None }),
            Err(error) => Err(Box::new(error)),
        },
        Some(Experimental::GuestMemfd) => match guest_memfd::receive(stream).await {
            Ok(guest_memfd::Handshake { regions, userfaultfd, guest, bitmap }) => {
                Ok(HandedOver { regions, userfaultfd, vcpus: Some((bitmap, guest)) })
            }
            Err(error) => Err(Box::new(error)),
        },
    }
}

/// Serves a machine whose pager has died.
pub(super) fn take_over(daemon: &Arc<Daemon>, socket: &Arc<Socket>, orphan: Orphan, passed: &mut Passed) {
    let Orphan { description, state, userfaultfd, bitmap, monitor } = orphan;
    let name = name(&description);
    if description.snapshot != socket.source.identity().to_string() {
        tracing::error!(vm = name, "the snapshot is another one than that of this machine; it waits");
        return;
    }
    // Machines that run already are served, however many there are.
    let slot = Arc::clone(&daemon.slots).try_acquire_owned().ok();
    let attached = Regions::new(&description.regions, socket.source.size_bytes())
        .map_err(AttachError::Regions)
        .and_then(|regions| {
            let bitmap = bitmap.map(|bitmap| UserfaultBitmap::new(bitmap, &regions)).transpose()?;
            let options = options(socket, &description, None, bitmap.map(Arc::new));
            Vm::attach(userfaultfd, regions, Arc::clone(&socket.source), state, options)
        });
    match attached {
        Ok(vm) => {
            socket.metrics.taken_over.inc();
            tracing::info!(vm = name, pid = description.pid, present_bytes = vm.present_bytes(), "taken over");
            let served = Served::note(daemon, &description);
            let life = match vm.vcpu_faults().zip(description.vcpus) {
                Some((faults, vcpus)) => life_of_vcpus(daemon, socket, faults, vcpus, monitor, passed),
                None => Life::Process(monitor),
            };
            daemon.tasks.spawn(watch(served, vm, life, slot));
        }
        Err(error) => tracing::error!(vm = name, %error, "a machine cannot be taken over; it waits"),
    }
}

/// How vCPUs go on whose pager has died: by the connection that was kept, or without one.
fn life_of_vcpus(
    daemon: &Daemon,
    socket: &Socket,
    faults: VcpuFaults,
    vcpus: Vcpus,
    monitor: OwnedFd,
    passed: &mut Passed,
) -> Life {
    let kept = passed.take_kept(vcpus.connection).map(StdStream::from);
    let connection = kept.and_then(|kept| kept.set_nonblocking(true).and_then(|()| UnixStream::from_std(kept)).ok());
    match connection {
        Some(stream) => Life::VcpuFaults(stream, vcpus.guest, faults),
        None => {
            tracing::warn!("the connection of vCPUs is lost: those that wait stay so, the others get all pages");
            let nr_threads = nr_threads(&*socket.source);
            daemon.tasks.spawn_blocking(move || faults.fill_all(nr_threads));
            Life::Process(monitor)
        }
    }
}

/// A machine that is served, until this is dropped.
#[derive(Debug)]
struct Served {
    daemon: Arc<Daemon>,
    machine: (i32, u64),
}

impl Served {
    fn note(daemon: &Arc<Daemon>, description: &Description) -> Served {
        let machine = (description.pid, description.userfaultfd.inode);
        daemon.served.lock().insert(machine);
        Served { daemon: Arc::clone(daemon), machine }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.daemon.served.lock().remove(&self.machine);
    }
}

/// Whether the machine of the monitor at `stream` with this descriptor is served here.
fn is_served(daemon: &Daemon, stream: &UnixStream, userfaultfd: &Userfaultfd) -> bool {
    let pid = stream.peer_cred().ok().and_then(|monitor| monitor.pid());
    let file = FileIdentity::of(userfaultfd.as_fd()).ok();
    pid.zip(file).is_some_and(|(pid, file)| daemon.served.lock().contains(&(pid, file.inode)))
}

fn refuse(socket: &Socket, error: &dyn std::fmt::Display) {
    socket.metrics.refused.inc();
    tracing::error!(socket = %socket.config.path.display(), %error, "a monitor is refused");
}

fn name(description: &Description) -> String {
    format!("{}-{}", description.pid, description.userfaultfd.inode)
}

fn options(
    socket: &Socket,
    description: &Description,
    observer: Option<Arc<dyn Observer>>,
    userfault_bitmap: Option<Arc<UserfaultBitmap>>,
) -> Options {
    Options {
        name: name(description),
        nr_threads: socket.config.threads,
        granule_bytes: socket.config.granule,
        on_failure: socket.config.on_failure,
        // Whatever ends this process, or its runtime, is no reason that the guest's memory fails.
        when_dropped: WhenDropped::Leave,
        limits: socket.limits.clone(),
        metrics: Arc::clone(&socket.metrics),
        observer,
        shared_memory: None,
        userfault_bitmap,
        runtime: None,
    }
}

/// Waits for files.
fn attach(
    daemon: &Arc<Daemon>,
    socket: &Socket,
    stream: &UnixStream,
    listed: Vec<Region>,
    userfaultfd: Arc<Userfaultfd>,
    vcpus: Option<(OwnedFd, GuestAddresses)>,
) -> Result<(Vm, Plan, Served), AttachError> {
    let system = |what| move |error| AttachError::System { what, error };
    let regions = Regions::new(&listed, socket.source.size_bytes())?;
    let identity = |fd: BorrowedFd<'_>| {
        FileIdentity::of(fd).map_err(|error| AttachError::System { what: "look at a descriptor", error: error.into() })
    };
    let (userfault_bitmap, vcpus) = match vcpus {
        Some((bitmap, guest)) => {
            let vcpus = Vcpus { bitmap: identity(bitmap.as_fd())?, connection: identity(stream.as_fd())?, guest };
            (Some(Arc::new(UserfaultBitmap::new(bitmap, &regions)?)), Some(vcpus))
        }
        None => (None, None),
    };
    let pid = stream.peer_cred().map_err(system("ask for the monitor's process"))?.pid().unwrap_or(0);
    let (_monitor, process) = takeover::monitor(pid)
        .map_err(|error| AttachError::System { what: "look at the monitor's process", error: error.into() })?;
    let description = Description {
        socket: socket.config.path.clone(),
        pid,
        process,
        userfaultfd: identity(userfaultfd.as_fd())?,
        snapshot: socket.source.identity().to_string(),
        regions: listed,
        boot: daemon.boot.clone(),
        vcpus,
    };
    let text =
        serde_json::to_vec(&description).map_err(|error| system("describe a machine")(io::Error::from(error)))?;
    let path = takeover::path_of(&daemon.runtime_folder, &description);
    let (nr_threads, nr_words) = (socket.config.threads.get(), regions.nr_words());
    let nr_requests = if description.vcpus.is_some() { guest_memfd::MOST_REQUESTS } else { 0 };
    let state = State::create(&path, &text, nr_threads, nr_words, nr_requests).map_err(system("note a machine"))?;
    let nr_regions = description.regions.len();
    let plan = socket
        .config
        .working_set
        .as_ref()
        .map_or(Plan::Nothing, |file| Plan::for_source(file, &*socket.source, socket.config.granule));
    let options = options(socket, &description, plan.observer(), userfault_bitmap);
    let vm = Vm::attach(userfaultfd, regions, Arc::clone(&socket.source), state, options).inspect_err(|_| {
        // No successor is to find it.
        let _ = std::fs::remove_file(&path);
    })?;
    tracing::info!(
        vm = name(&description),
        pid,
        nr_regions,
        size_bytes = vm.regions().size_bytes(),
        "serving a machine"
    );
    Ok((vm, plan, Served::note(daemon, &description)))
}

/// Replays or records the working set, beside the machine.
fn follow(plan: Plan, daemon: &Daemon, socket: &Socket, vm: &Vm) {
    let Some(file) = socket.config.working_set.clone() else { return };
    let mut ended = vm.ended();
    let ended = async move { drop(ended.wait_for(Option::is_some).await) };
    let (memory, nr_threads) = (Arc::new(vm.populator()), nr_threads(&*socket.source));
    let progress = Arc::new(Progress::counted(Arc::clone(&socket.metrics)));
    daemon.tasks.spawn(plan.run(file, memory, nr_threads, progress, ended));
}

/// Until the monitor ends, the machine fails, or the daemon leaves.
async fn watch(served: Served, vm: Vm, life: Life, slot: Option<OwnedSemaphorePermit>) {
    let mut vm_ended = vm.ended();
    let mut leave = served.daemon.leave.clone();
    enum Why {
        Ended,
        Failed(String),
        Left,
    }
    let why = tokio::select! {
        () = ended(life) => Why::Ended,
        end = vm_ended.wait_for(Option::is_some) => match end.as_deref() {
            Ok(Some(crate::vm::End::Failed(why))) => Why::Failed(why.clone()),
            _ => Why::Ended,
        },
        _ = leave.wait_for(|leave| *leave) => Why::Left,
    };
    // Its threads are joined: that may wait for the kernel.
    let ending = tokio::task::spawn_blocking(move || match why {
        Why::Left => vm.leave(),
        Why::Ended => vm.forget(),
        // It stays noted: a successor may have more luck.
        Why::Failed(why) => {
            tracing::error!(why, "a machine cannot be served any more; it waits");
            vm.leave();
        }
    });
    if ending.await.is_err() {
        tracing::error!("the end of a machine has panicked");
    }
    drop((slot, served));
}

/// Until the monitor ends.
async fn ended(life: Life) {
    match life {
        Life::Socket(stream) => {
            let mut buffer = [0; 512];
            loop {
                if stream.ready(Interest::READABLE).await.is_err() {
                    return;
                }
                match stream.try_read(&mut buffer) {
                    Ok(0) => return,
                    // What comes is dropped: the protocols have nothing more that is answered.
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        }
        Life::VcpuFaults(stream, guest, faults) => {
            match guest_memfd::serve(&stream, &guest, &faults).await {
                Ok(()) => return,
                Err(guest_memfd::GuestMemfdError::Io(_) | guest_memfd::GuestMemfdError::Ended) => return,
                Err(error) => faults.distrust(&error.to_string()),
            }
            Box::pin(ended(Life::Socket(stream))).await
        }
        Life::Process(monitor) => {
            // SAFETY: an `OwnedFd` is open until it is dropped, and always the same number.
            match unsafe { AsyncFd::register_with_interest(monitor, Interest::READABLE) } {
                Ok(process) => drop(process.readable().await),
                Err(error) => {
                    tracing::error!(error = %io::Error::from(error), "cannot watch a monitor");
                    std::future::pending().await
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parking_lot::Mutex;
    use rustix::mm::MapFlags;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::config::Config;
    use crate::linux::mapping::MappedMemory;
    use crate::source::PAGE_BYTES;
    use crate::source::pattern::Pattern;
    use crate::userfaultfd::{RegisterMode, Wake};

    #[test]
    fn a_runtime_that_ends_early_leaves_its_machines() {
        let Ok(userfaultfd) = Userfaultfd::open(0).inspect_err(|error| println!("skipped: {error}")) else { return };
        let memory = MappedMemory::anonymous(4 * PAGE_BYTES, MapFlags::empty()).unwrap();
        let address = memory.start().expose_provenance() as u64;
        let region = Region { address, size_bytes: 4 * PAGE_BYTES, offset: 0, page_bytes: PAGE_BYTES };
        // SAFETY: no thread accesses the memory.
        unsafe { userfaultfd.register(region.addresses(), RegisterMode::MISSING) }.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let config: Config = toml::from_str("[[socket]]\npath = '/a'\nmemory = 'x'\n").unwrap();
        let socket = Socket {
            config: config.sockets[0].clone(),
            source: Arc::new(Pattern::Constant(7)),
            metrics: Arc::default(),
            limits: Default::default(),
            attaching: Arc::new(Semaphore::new(1)),
        };
        let (_leave, left) = tokio::sync::watch::channel(false);
        let daemon = Arc::new(Daemon {
            runtime_folder: folder.path().to_path_buf(),
            boot: String::new(),
            slots: Arc::new(Semaphore::new(1)),
            tasks: Default::default(),
            leave: left,
            served: Mutex::default(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (ours, _monitor) = StdStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let copy = Arc::new(userfaultfd.try_clone().unwrap());
        runtime.block_on(async {
            let stream = UnixStream::from_std(ours).unwrap();
            let (vm, _, served) = attach(&daemon, &socket, &stream, vec![region], copy, None).unwrap();
            daemon.tasks.spawn(watch(served, vm, Life::Socket(stream), None));
        });
        runtime.shutdown_timeout(Duration::from_secs(20));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "a successor finds it");
        // Of a page that is poisoned it fails.
        userfaultfd.poison(address..address + PAGE_BYTES, Wake::None).expect("the page was poisoned");
    }
}
