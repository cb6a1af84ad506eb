//! The kernel's memory policies: of a mapping and of a thread (mbind(2), set_mempolicy(2),
//! get_mempolicy(2)).

#![expect(unsafe_code, reason = "the memory policy system calls")]

use std::io;
use std::ptr;

use slat::NodeId;

use super::{MemoryPolicy, NODE_ID_END};

// From include/uapi/linux/mempolicy.h, as far as the C library's bindings lack them.
pub(super) const MPOL_PREFERRED_MANY: libc::c_int = 5;
pub(super) const MPOL_WEIGHTED_INTERLEAVE: libc::c_int = 6;
/// Existing pages must be in the right place, or be moved there.
const MPOL_MF_STRICT: libc::c_uint = 1 << 0;
const MPOL_MF_MOVE: libc::c_uint = 1 << 1;

/// Words of a mask of nodes.
const MASK_WORDS: usize = NODE_ID_END as usize / 64;
/// Bits of it, as the kernel counts them: one more than there are.
const MASK_BITS: libc::c_ulong = NODE_ID_END as libc::c_ulong + 1;

type Mask = [u64; MASK_WORDS];

fn mask(nodes: &[NodeId]) -> Mask {
    let mut mask = [0; MASK_WORDS];
    for node in nodes {
        // Numbers of nodes are below the end of the mask.
        mask[node.0 as usize / 64] |= 1 << (node.0 % 64);
    }
    mask
}

fn checked(result: libc::c_long) -> Result<(), io::Error> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether memory of another node is allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Strictness {
    /// No.
    Bind,
    /// Yes, if there is no other.
    Prefer,
}

/// Places the `size_bytes` from `start` on, a whole number of pages of a mapping, on `node`;
/// existing pages are moved.
pub(super) fn bind(start: *mut u8, size_bytes: u64, node: NodeId, strictness: Strictness) -> Result<(), io::Error> {
    let mask = mask(&[node]);
    let (mode, flags) = match strictness {
        Strictness::Bind => (libc::MPOL_BIND, MPOL_MF_MOVE | MPOL_MF_STRICT),
        Strictness::Prefer => (libc::MPOL_PREFERRED, MPOL_MF_MOVE),
    };
    // SAFETY: the kernel reads a mask of so many bits; a policy changes no contents, whatever
    // `start` is.
    checked(unsafe { libc::syscall(libc::SYS_mbind, start, size_bytes, mode, mask.as_ptr(), MASK_BITS, flags) })
}

/// Sets the policy of the calling thread. `with_memory` are the nodes to interleave.
pub(super) fn set(policy: MemoryPolicy, with_memory: &[NodeId]) -> Result<(), io::Error> {
    let (mode, mask) = match policy {
        MemoryPolicy::Local => (libc::MPOL_DEFAULT, mask(&[])),
        MemoryPolicy::Preferred(node) => (libc::MPOL_PREFERRED, mask(&[node])),
        MemoryPolicy::Interleave => (libc::MPOL_INTERLEAVE, mask(with_memory)),
    };
    // SAFETY: the kernel reads a mask of so many bits.
    checked(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), MASK_BITS) })
}

/// The policy of a thread, as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfThread {
    pub(super) mode: libc::c_int,
    mask: Mask,
}

impl OfThread {
    /// Whether `node` is among those that it names.
    pub(super) fn has(&self, node: NodeId) -> bool {
        self.mask.get(node.0 as usize / 64).is_some_and(|word| word >> (node.0 % 64) & 1 != 0)
    }
}

/// The policy of the calling thread; `None` if the kernel does not report it. A short system call
/// that does not wait.
pub(super) fn of_thread() -> Option<OfThread> {
    const FLAGS: libc::c_int = libc::MPOL_F_NUMA_BALANCING | libc::MPOL_F_RELATIVE_NODES | libc::MPOL_F_STATIC_NODES;
    let mut mode: libc::c_int = 0;
    let mut mask: Mask = [0; MASK_WORDS];
    let nowhere = ptr::null::<u8>();
    // SAFETY: the kernel writes a number and a mask of so many bits, both of which outlive the
    // call.
    let result = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), MASK_BITS, nowhere, 0 as libc::c_ulong)
    };
    checked(result).ok().map(|()| OfThread { mode: mode & !FLAGS, mask })
}

/// The node on which the page at `address` lies, which must have been touched; for tests.
#[cfg(test)]
pub(crate) fn node_of_page(address: *const u8) -> Result<NodeId, io::Error> {
    const MPOL_F_NODE: libc::c_ulong = 1 << 0;
    const MPOL_F_ADDR: libc::c_ulong = 1 << 1;
    let mut node: libc::c_int = 0;
    let nothing = ptr::null_mut::<u64>();
    let flags = MPOL_F_NODE | MPOL_F_ADDR;
    let none: libc::c_ulong = 0;
    // SAFETY: the kernel writes a number, which outlives the call, and looks at a mapping.
    checked(unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut node, nothing, none, address, flags) })?;
    u32::try_from(node).map(NodeId).map_err(io::Error::other)
}
