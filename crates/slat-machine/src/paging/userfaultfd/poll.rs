//! How a reader waits for messages, or for its end.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::{Errno, Result};

use crate::linux::descriptors::EventFd;

/// The epoll instance of a reader.
pub(super) struct Poll(OwnedFd);

/// What [`Poll::wait`] waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Woken {
    Message,
    Stop,
}

impl Poll {
    /// For messages on `fd`, each of which wakes only some of the readers (`EPOLLEXCLUSIVE`), and
    /// for `stop`.
    pub(super) fn new(fd: BorrowedFd<'_>, stop: &EventFd) -> Result<Poll> {
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        let data = |woken: Woken| EventData::new_u64(woken as u64);
        epoll::add(&poll, fd, data(Woken::Message), EventFlags::IN | EventFlags::EXCLUSIVE)?;
        epoll::add(&poll, stop.as_fd(), data(Woken::Stop), EventFlags::IN)?;
        Ok(Poll(poll))
    }

    /// Waits without a limit. `stop` goes before a message.
    pub(super) fn wait(&self) -> Result<Woken> {
        let mut events = [MaybeUninit::<Event>::uninit(); 2];
        loop {
            match epoll::wait(&self.0, &mut events, None) {
                Err(Errno::INTR) | Ok(([], _)) => {}
                Err(error) => return Err(error),
                Ok((events, _)) if events.iter().any(|event| event.data.u64() == Woken::Stop as u64) => {
                    return Ok(Woken::Stop);
                }
                Ok(_) => return Ok(Woken::Message),
            }
        }
    }
}
