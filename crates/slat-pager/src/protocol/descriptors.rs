//! Bytes with descriptors from a Unix socket.
//!
//! # Guarantees
//! Descriptors are close-on-exec, and closed when they are not taken. More of them than are wanted
//! are an error, also where the kernel dropped the rest.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Descriptors that one call can get.
pub(super) const MOST: usize = 8;

/// Reads some bytes from `stream`, and adds the descriptors that come with them to `descriptors`.
/// 0: the other side has closed.
///
/// # Errors
/// Of recvmsg(2). `InvalidData`: there are more than `most_descriptors`.
pub async fn receive(
    stream: &UnixStream,
    into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    most_descriptors: usize,
) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        let received =
            stream.try_io(Interest::READABLE, || receive_now(std::os::fd::AsFd::as_fd(stream), into, descriptors));
        match received {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(_) if descriptors.len() > most_descriptors => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "there are too many descriptors"));
            }
            received => return received,
        }
    }
}

/// As [`receive`], by one call, whatever the number of descriptors. `InvalidData`: the kernel
/// dropped some.
pub(super) fn receive_now(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "there are too many descriptors"));
    }
    Ok(received.bytes)
}
