//! Whether the VMM has taken the connection for page faults.
//!
//! A VMM that was not told `memory_mode=postcopy` maps the empty memory that the pager has sent,
//! and would let its guest read zeros. It closes the connection for page faults before it answers
//! `State`, or never accepts it.

#![expect(unsafe_code, reason = "an ioctl that the libraries lack")]

use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::{RecvFlags, recv};

/// `SIOCOUTQ`: what was sent on a Unix socket and not received yet, in bytes of memory (unix(7),
/// `SIOCINQ` is its counterpart).
const UNRECEIVED: Opcode = libc::TIOCOUTQ as Opcode;

/// Whether the other side has received all that was sent on `socket`, and has not closed it.
pub(super) fn is_taken(socket: &UnixStream) -> rustix::io::Result<bool> {
    // SAFETY: of a Unix socket, which `socket` is, the call writes one integer.
    let nr_unreceived = unsafe { ioctl(socket, Getter::<UNRECEIVED, libc::c_int>::new()) }?;
    let is_open = match recv(socket, &mut [0_u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((nr_bytes, _)) => nr_bytes > 0,
        Err(Errno::AGAIN) => true,
        Err(Errno::CONNRESET) => false,
        Err(error) => return Err(error),
    };
    Ok(nr_unreceived == 0 && is_open)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_connection_is_taken_once_its_first_bytes_are() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[2, 0]).unwrap();
        assert_eq!(is_taken(&ours), Ok(false));
        theirs.read_exact(&mut [0; 2]).unwrap();
        assert_eq!(is_taken(&ours), Ok(true));
        theirs.write_all(&[9]).unwrap();
        assert_eq!(is_taken(&ours), Ok(true));
        ours.read_exact(&mut [0; 1]).unwrap();
        drop(theirs);
        assert_eq!(is_taken(&ours), Ok(false));
    }
}
