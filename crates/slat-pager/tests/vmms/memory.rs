//! The memory of a guest, as another process sees it: what a balloon took from it.

#![expect(unsafe_code, reason = "reads the memory of another process")]

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::Outcome;
use crate::guest::{NR_WORDS, given_up};
use crate::machine;

const PAGE_BYTES: usize = machine::PAGE_BYTES as usize;

/// The pages that the guest had filled and freed before the snapshot, as the VMM has them now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GivenUp {
    /// In the snapshot.
    pub nr_pages: u64,
    /// Zeros now.
    pub nr_zeros: u64,
    /// As they are in the snapshot.
    pub nr_same: u64,
}

impl GivenUp {
    /// Reads each of them in the process `pid`, whose snapshot is `file`. The pager fills those
    /// that are missing.
    pub fn find(pid: u32, file: &File) -> Outcome<GivenUp> {
        let pattern: Vec<u8> = (0..NR_WORDS).flat_map(|word| given_up(word).to_le_bytes()).collect();
        let mut found = GivenUp::default();
        let mut offset = 0;
        for region in regions(pid)? {
            for address in region.step_by(PAGE_BYTES) {
                let mut page = [0; PAGE_BYTES];
                file.read_exact_at(&mut page, offset).map_err(|error| format!("the snapshot: {error}"))?;
                offset += PAGE_BYTES as u64;
                if page[..] != pattern {
                    continue;
                }
                found.nr_pages += 1;
                read(pid, address, &mut page)?;
                found.nr_zeros += u64::from(page == [0; PAGE_BYTES]);
                found.nr_same += u64::from(page[..] == pattern);
            }
        }
        Ok(found)
    }
}

/// The memory of `pid` that a userfaultfd watches (`um`: proc_pid_smaps(5)), in its order.
fn regions(pid: u32) -> Outcome<Vec<Range<u64>>> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).map_err(|error| format!("smaps: {error}"))?;
    let mut regions = Vec::new();
    let mut last = 0..0;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_whitespace().any(|flag| flag == "um") {
                regions.push(last.clone());
            }
        } else if let Some((start, rest)) = line.split_once('-') {
            let number = |text: Option<&str>| u64::from_str_radix(text.unwrap_or_default(), 16);
            if let (Ok(start), Ok(end)) = (number(Some(start)), number(rest.split(' ').next())) {
                last = start..end;
            }
        }
    }
    Ok(regions)
}

/// Reads `into` from `address` of the process `pid`, as process_vm_readv(2) does: where a page is
/// missing it waits for the pager.
fn read(pid: u32, address: u64, into: &mut [u8]) -> Outcome<()> {
    let pid = i32::try_from(pid).map_err(|error| error.to_string())?;
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: it writes to `into` alone, for which `local` stands. `remote` is memory of the other
    // process.
    let nr_bytes = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    if usize::try_from(nr_bytes) == Ok(into.len()) {
        return Ok(());
    }
    Err(format!("the memory of the VMM at {address:#x}: {}", std::io::Error::last_os_error()))
}
