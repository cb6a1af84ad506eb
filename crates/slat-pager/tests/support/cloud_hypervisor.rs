//! Cloud Hypervisor's side of its migration protocol, written from its documentation: a VMM that
//! sends a snapshot, and one that restores it with a userfaultfd of its own.

#![expect(unsafe_code, reason = "mappings of a client of its own")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::support::{self, userfaultfd};

pub const START: u16 = 1;
pub const CONFIG: u16 = 2;
pub const STATE: u16 = 3;
pub const MEMORY: u16 = 4;
pub const COMPLETE: u16 = 5;
pub const ABANDON: u16 = 6;
pub const MEMORY_FD: u16 = 7;
pub const COMPLETE_PAUSED: u16 = 8;
pub const PAGE_FAULT: u16 = 9;

const PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;

/// A slot of guest memory: its number, address, bytes, and place in the file.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub number: u32,
    pub gpa: u64,
    pub nr_bytes: u64,
    pub file_offset: u64,
    /// Of the pages of its memory.
    pub page_bytes: u64,
}

/// The slots of the tests' VMs: a hole between two, and one whose file begins elsewhere.
pub const SLOTS: [Slot; 3] = [
    Slot { number: 0, gpa: 0, nr_bytes: 3 << 20, file_offset: 0, page_bytes: PAGE },
    Slot { number: 5, gpa: 1 << 32, nr_bytes: 2 << 20, file_offset: 0, page_bytes: PAGE },
    Slot { number: 2, gpa: (1 << 32) + (2 << 20), nr_bytes: (1 << 20) + 4096, file_offset: 2 << 20, page_bytes: PAGE },
];

/// Those of a VM with huge pages.
pub const HUGE_SLOTS: [Slot; 3] = [
    Slot { number: 0, gpa: 0, nr_bytes: 2 * HUGE_PAGE, file_offset: 0, page_bytes: HUGE_PAGE },
    Slot { number: 5, gpa: 1 << 32, nr_bytes: HUGE_PAGE, file_offset: 0, page_bytes: HUGE_PAGE },
    Slot {
        number: 2,
        gpa: (1 << 32) + HUGE_PAGE,
        nr_bytes: 3 * HUGE_PAGE,
        file_offset: HUGE_PAGE,
        page_bytes: HUGE_PAGE,
    },
];

/// The bytes of a slot are those of this snapshot.
pub fn seed(slot: u32) -> u64 {
    1000 + u64::from(slot)
}

/// The configuration that a VMM with `slots` sends.
pub fn config(slots: &[Slot]) -> String {
    let mappings: Vec<String> = slots
        .iter()
        .map(|slot| {
            format!(
                r#"{{"slot":{},"gpa":{},"size":{},"zone_id":"mem0","virtio_mem":false,"file_offset":{}}}"#,
                slot.number, slot.gpa, slot.nr_bytes, slot.file_offset
            )
        })
        .collect();
    let hugepages = slots.iter().any(|slot| slot.page_bytes == HUGE_PAGE);
    format!(
        r#"{{"vm_config":{{"memory":{{"size":0,"shared":true,"hugepages":{hugepages}}}}},"common_cpuid":[],"memory_manager_data":{{"guest_ram_mappings":[{}]}}}}"#,
        mappings.join(",")
    )
}

/// The head of a request.
pub fn request(command: u16, length: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&command.to_le_bytes());
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// A page fault.
pub fn page_fault(gpa: u64, nr_bytes: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&request(PAGE_FAULT, 16));
    bytes[16..24].copy_from_slice(&gpa.to_le_bytes());
    bytes[24..].copy_from_slice(&nr_bytes.to_le_bytes());
    bytes
}

/// The status of the next response, which must have no payload.
///
/// # Errors
/// The connection's.
pub fn response(mut socket: impl Read) -> io::Result<u16> {
    let mut bytes = [0; 16];
    socket.read_exact(&mut bytes)?;
    assert!(bytes[2..].iter().all(|byte| *byte == 0), "{bytes:?}");
    Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// Sends bytes with descriptors.
pub fn send_with(socket: &UnixStream, bytes: &[u8], descriptors: &[&OwnedFd]) {
    let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); 256];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let nr_sent = rustix::net::sendmsg(socket, &[io::IoSlice::new(bytes)], &mut ancillary, SendFlags::empty()).unwrap();
    assert_eq!(nr_sent, bytes.len());
}

/// A memfd with the bytes of `slot`; pages of zeros are holes.
pub fn memory(slot: &Slot) -> OwnedFd {
    if slot.page_bytes == HUGE_PAGE {
        return huge_memory(slot);
    }
    let memfd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memfd, slot.file_offset + slot.nr_bytes).unwrap();
    for start in (0..slot.nr_bytes).step_by(PAGE as usize) {
        let page = support::bytes(seed(slot.number), start..start + PAGE);
        if page.iter().any(|byte| *byte != 0) {
            assert_eq!(rustix::io::pwrite(&memfd, &page, slot.file_offset + start), Ok(page.len()));
        }
    }
    memfd
}

/// As [`memory`], of huge pages, which no call writes.
fn huge_memory(slot: &Slot) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let memfd = memfd_create("guest", flags).unwrap();
    ftruncate(&memfd, slot.file_offset + slot.nr_bytes).unwrap();
    let mapped = Mapped::new(*slot, &memfd);
    for (at, byte) in (0..).zip(support::bytes(seed(slot.number), 0..slot.nr_bytes)) {
        mapped.write(at, byte);
    }
    memfd
}

/// Sends a snapshot of `slots`; panics if the daemon does not take it.
pub fn send_snapshot(socket: &UnixStream, slots: &[Slot], state: &[u8]) {
    let send = |bytes: &[u8]| (&*socket).write_all(bytes).unwrap();
    let ok = || assert_eq!(response(socket).unwrap(), 1);
    send(&request(START, 0));
    ok();
    for slot in slots {
        send(&request(MEMORY_FD, 4));
        send_with(socket, &slot.number.to_le_bytes(), &[&memory(slot)]);
        ok();
    }
    let config = config(slots);
    send(&request(CONFIG, config.len() as u64));
    send(config.as_bytes());
    ok();
    send(&request(STATE, state.len() as u64));
    send(state);
    ok();
    send(&request(COMPLETE_PAUSED, 0));
    ok();
}

/// A slot that a restoring VMM has mapped.
#[derive(Debug)]
pub struct Mapped {
    pub slot: Slot,
    start: *mut u8,
}

// SAFETY: the mapping is shared between threads as raw memory, by volatile accesses alone.
unsafe impl Send for Mapped {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(slot: Slot, memfd: &OwnedFd) -> Mapped {
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let offset = i64::try_from(slot.file_offset).unwrap();
        // SAFETY: a new mapping, where the kernel likes.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                slot.nr_bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                memfd.as_raw_fd(),
                offset,
            )
        };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Mapped { slot, start: start.cast() }
    }

    pub fn address(&self) -> u64 {
        self.start as u64
    }

    pub fn read(&self, offset: u64, into: &mut [u8]) {
        assert!(offset + into.len() as u64 <= self.slot.nr_bytes);
        let is_aligned = offset.is_multiple_of(8);
        for (nth, found) in into.chunks_mut(8).enumerate() {
            // SAFETY: in the mapping, which is never unmapped.
            let from = unsafe { self.start.add(offset as usize + 8 * nth) };
            if is_aligned && found.len() == 8 {
                // SAFETY: as above, and aligned, since mappings begin with a page.
                found.copy_from_slice(&unsafe { from.cast::<u64>().read_volatile() }.to_ne_bytes());
            } else {
                for (at, byte) in found.iter_mut().enumerate() {
                    // SAFETY: as above.
                    *byte = unsafe { from.add(at).read_volatile() };
                }
            }
        }
    }

    pub fn write(&self, offset: u64, byte: u8) {
        assert!(offset < self.slot.nr_bytes);
        // SAFETY: as for `read`.
        unsafe { self.start.add(offset as usize).write_volatile(byte) };
    }
}

/// A VMM that is restored.
#[derive(Debug)]
pub struct Vm {
    pub slots: Vec<Mapped>,
    pub state: Vec<u8>,
    pub last_command: u16,
    handler: thread::JoinHandle<io::Result<u64>>,
}

/// What the VMM does between two faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Between {
    /// It asks for each page in turn, as the real one does.
    Sweep,
    /// Nothing.
    Wait,
}

/// Listens at `path`, takes a restore, and serves its own page faults by the second connection.
pub fn restore(path: &Path, between: Between) -> Vm {
    let listener = UnixListener::bind(path).unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    let mut memory = Vec::new();
    let mut vm = (Vec::new(), Vec::new(), None);
    loop {
        let (command, length) = receive_request(&mut socket);
        match command {
            START => {}
            MEMORY_FD => memory.push(receive_memory(&socket)),
            CONFIG => vm.0 = map(&receive_payload(&mut socket, length), &memory),
            STATE => {
                // The second connection is there before the state: the VM is touched while it is
                // read.
                let (mut faults, _) = listener.accept().unwrap();
                let mut role = [0; 2];
                faults.read_exact(&mut role).unwrap();
                assert_eq!(role, [2, 0]);
                vm.2 = Some(start_handler(&vm.0, faults, between));
                vm.1 = receive_payload(&mut socket, length);
            }
            COMPLETE | COMPLETE_PAUSED => {
                socket.write_all(&request(1, 0)).unwrap();
                let (slots, state, handler) = vm;
                return Vm { slots, state, last_command: command, handler: handler.unwrap() };
            }
            command => panic!("command {command}"),
        }
        // A response that is Ok has the layout of a request of command 1.
        socket.write_all(&request(1, 0)).unwrap();
    }
}

impl Vm {
    /// Waits until the VMM has all pages (only where it sweeps); returns how many faults it
    /// answered.
    pub fn join(self) -> u64 {
        self.handler.join().unwrap().unwrap()
    }
}

fn receive_request(socket: &mut UnixStream) -> (u16, u64) {
    let mut bytes = [0; 16];
    socket.read_exact(&mut bytes).unwrap();
    let (words, _) = bytes.as_chunks::<8>();
    (u16::from_le_bytes([bytes[0], bytes[1]]), u64::from_le_bytes(words[1]))
}

fn receive_payload(socket: &mut UnixStream, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

fn receive_memory(socket: &UnixStream) -> (u32, OwnedFd) {
    let mut number = [0; 4];
    let mut space = [std::mem::MaybeUninit::uninit(); 256];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(&mut number)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::empty()).unwrap();
    assert_eq!(received.bytes, 4);
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
            _ => panic!("no descriptor"),
        })
        .collect();
    let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors).unwrap();
    (u32::from_le_bytes(number), descriptor)
}

fn map(config: &[u8], memory: &[(u32, OwnedFd)]) -> Vec<Mapped> {
    let config: serde_json::Value = serde_json::from_slice(config).unwrap();
    let mappings = config["memory_manager_data"]["guest_ram_mappings"].as_array().unwrap();
    assert_eq!(mappings.len(), memory.len());
    mappings
        .iter()
        .map(|mapping| {
            let number = |name: &str| mapping[name].as_u64().unwrap();
            let slot = Slot {
                number: number("slot") as u32,
                gpa: number("gpa"),
                nr_bytes: number("size"),
                file_offset: number("file_offset"),
                page_bytes: if config["vm_config"]["memory"]["hugepages"] == true { HUGE_PAGE } else { PAGE },
            };
            let (_, memfd) = memory.iter().find(|(number, _)| *number == slot.number).unwrap();
            let size = File::from(memfd.try_clone().unwrap()).metadata().unwrap().len();
            assert_eq!(size, slot.file_offset + slot.nr_bytes);
            assert_eq!(rustix::fs::fstatfs(memfd).unwrap().f_bsize as u64, slot.page_bytes);
            Mapped::new(slot, memfd)
        })
        .collect()
}

/// Registers all slots and serves their faults: one request at a time, as the real one does.
fn start_handler(slots: &[Mapped], faults: UnixStream, between: Between) -> thread::JoinHandle<io::Result<u64>> {
    let features = match slots[0].slot.page_bytes {
        HUGE_PAGE => userfaultfd::FEATURE_MISSING_HUGETLBFS | userfaultfd::FEATURE_MINOR_HUGETLBFS,
        _ => userfaultfd::FEATURE_MISSING_SHMEM | userfaultfd::FEATURE_MINOR_SHMEM,
    };
    let uffd = userfaultfd::open(features).unwrap();
    let mut ranges: Vec<(u64, Slot)> = slots.iter().map(|mapped| (mapped.address(), mapped.slot)).collect();
    ranges.sort_by_key(|(_, slot)| slot.gpa);
    for (address, slot) in &ranges {
        let mode = userfaultfd::MODE_MISSING | userfaultfd::MODE_MINOR;
        // SAFETY: the slot's mapping is new, and what its pages have is checked.
        unsafe { userfaultfd::register(&uffd, *address, slot.nr_bytes, mode) }.unwrap();
    }
    thread::spawn(move || handle(&uffd, &ranges, &faults, between))
}

fn handle(uffd: &OwnedFd, ranges: &[(u64, Slot)], faults: &UnixStream, between: Between) -> io::Result<u64> {
    let mut nr_faults = 0;
    let mut swept = ranges.iter().flat_map(|(address, slot)| {
        (0..slot.nr_bytes).step_by(slot.page_bytes as usize).map(move |offset| (*address, *slot, offset))
    });
    let resolve = |address: u64, slot: Slot, offset: u64| {
        (&*faults).write_all(&page_fault(slot.gpa + offset, slot.page_bytes))?;
        if response(faults)? != 1 {
            return Err(io::Error::other("the daemon answers by an error"));
        }
        match userfaultfd::map_cached(uffd, address + offset, slot.page_bytes) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                userfaultfd::wake(uffd, address + offset, slot.page_bytes)
            }
            mapped => mapped,
        }
    };
    loop {
        match userfaultfd::next_fault(uffd) {
            Ok(address) => {
                let inside = |(start, slot): &&(u64, Slot)| (*start..*start + slot.nr_bytes).contains(&address);
                let (start, slot) = ranges.iter().find(inside).unwrap();
                let offset = address - start;
                resolve(*start, *slot, offset - offset % slot.page_bytes)?;
                nr_faults += 1;
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) if between == Between::Sweep => match swept.next() {
                Some((address, slot, offset)) => resolve(address, slot, offset)?,
                None => return Ok(nr_faults),
            },
            Err(_) => {
                let mut descriptors = [
                    rustix::event::PollFd::new(uffd, rustix::event::PollFlags::IN),
                    // Nothing comes there unasked but its end.
                    rustix::event::PollFd::new(faults, rustix::event::PollFlags::IN),
                ];
                rustix::io::retry_on_intr(|| rustix::event::poll(&mut descriptors, None))?;
                if !descriptors[1].revents().is_empty() {
                    return Ok(nr_faults);
                }
            }
        }
    }
}

/// Touches all memory of `vm` by `nr_threads` threads, each in an order of its own, and checks each
/// byte. Writes to some pages, and checks at the end that they have what was written.
pub fn touch_all(vm: &Vm, nr_threads: u64) {
    let nr_wrong = AtomicU64::new(0);
    let marked = |page: u64| page % 5 == 1;
    thread::scope(|scope| {
        for thread in 0..nr_threads {
            let nr_wrong = &nr_wrong;
            let slots = &vm.slots;
            scope.spawn(move || {
                let mut found = vec![0; PAGE as usize];
                for mapped in slots {
                    let nr_pages = mapped.slot.nr_bytes / PAGE;
                    for index in 0..nr_pages {
                        // All pages, from different places on; a stride that is coprime to their
                        // number.
                        let page = (index * 263 + thread * 31) % nr_pages;
                        mapped.read(page * PAGE, &mut found);
                        let seed = seed(mapped.slot.number);
                        let wrong = support::wrong(seed, page * PAGE, &found);
                        // The first byte of some pages may be written already.
                        if wrong.is_some_and(|offset| offset != page * PAGE || !marked(page)) {
                            nr_wrong.fetch_add(1, Ordering::Relaxed);
                            eprintln!("slot {}: byte {wrong:?} is wrong", mapped.slot.number);
                        }
                        if marked(page) {
                            mapped.write(page * PAGE, 0xA5);
                        }
                    }
                }
            });
        }
    });
    for mapped in &vm.slots {
        for page in (0..mapped.slot.nr_bytes / PAGE).filter(|page| marked(*page)) {
            let mut found = [0];
            mapped.read(page * PAGE, &mut found);
            assert_eq!(found, [0xA5], "what the guest wrote is gone: page {page}");
        }
    }
    assert_eq!(nr_wrong.into_inner(), 0);
}

/// What a peer sends to `store`: bytes, or bytes with descriptors.
pub enum Sent {
    Bytes(Vec<u8>),
    With(Vec<u8>, usize),
}

pub fn frame(command: u16, length: u64) -> Sent {
    Sent::Bytes(request(command, length).to_vec())
}

pub fn slot_frame(number: u32) -> [Sent; 2] {
    [frame(MEMORY_FD, 4), Sent::With(number.to_le_bytes().to_vec(), 1)]
}

pub fn config_frame(config: &str) -> [Sent; 2] {
    [frame(CONFIG, config.len() as u64), Sent::Bytes(config.as_bytes().to_vec())]
}
