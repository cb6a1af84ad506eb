//! What must survive a pager: which pages of a machine were filled and which were removed, the
//! messages that were read last, and what vCPUs have asked for.
//!
//! # Guarantees
//! A pager that is killed at any moment leaves a file from which its successor knows
//! - each page that was ever removed, also one whose message was just read;
//! - no page as filled that was not.
//!
//! # Implementation
//! The file is mapped; threads change its words, and the kernel writes messages right into it. What
//! is mapped outlives the process. A message is in the file when read(2) returns, and a thread that
//! is killed inside the call completes the copy, since the pages are locked in memory. The
//! successor takes the messages that it finds as if it had read them. That may be once more:
//! removed pages stay removed, so a second time changes nothing.
//!
//! The file, numbers in the machine's order of bytes:
//!
//! | at | what |
//! |---|---|
//! | 0 | `slatvm01` |
//! | 8 | u64: bytes of the description |
//! | 16 | u64: buffers of messages |
//! | 24 | u64: words of a bitmap |
//! | 32 | u64: requests of vCPUs |
//! | 4096 | the description (JSON); its end is rounded up to 4096 |
//! | then | the buffers, 4096 bytes each |
//! | then | bitmap of filled pages, bitmap of removed pages |
//! | then | the requests, 32 bytes each |
//!
//! # Why it is correct
//! Words are atomic. The kernel writes to a buffer only during read(2) into it, and
//! [`MessageBuffer`] is the one owner of its buffer.

#![expect(unsafe_code, reason = "atomic words and buffers in mapped memory")]

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::userfaultfd::MESSAGE_BYTES;

const MAGIC: &[u8; 8] = b"slatvm01";
const HEADER_BYTES: usize = 4096;
/// What of them is used.
const HEAD_BYTES: usize = 40;
const BUFFER_BYTES: usize = 4096;
/// Words that a request of a vCPU has.
pub const REQUEST_WORDS: usize = 4;
const REQUEST_BYTES: usize = REQUEST_WORDS * 8;
/// Messages in a buffer.
pub const BUFFER_MESSAGES: usize = BUFFER_BYTES / MESSAGE_BYTES;
/// One bit each says whether it is taken.
pub const MAX_BUFFERS: usize = 64;
/// Descriptions have at most so many bytes.
const MAX_DESCRIPTION_BYTES: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    description_bytes: usize,
    nr_buffers: usize,
    nr_words: usize,
    nr_requests: usize,
}

impl Layout {
    /// `None`: there is no such file. All sizes of one that there is fit in `isize`.
    fn new(description_bytes: usize, nr_buffers: usize, nr_words: usize, nr_requests: usize) -> Option<Layout> {
        if description_bytes > MAX_DESCRIPTION_BYTES || !(1..=MAX_BUFFERS).contains(&nr_buffers) {
            return None;
        }
        let layout = Layout { description_bytes, nr_buffers, nr_words, nr_requests };
        let requests_at = nr_words.checked_mul(16)?.checked_add(layout.bitmaps_at())?;
        let nr_bytes = nr_requests.checked_mul(REQUEST_BYTES)?.checked_add(requests_at)?;
        isize::try_from(nr_bytes).ok()?;
        Some(layout)
    }

    fn buffers_at(self) -> usize {
        HEADER_BYTES + self.description_bytes.next_multiple_of(4096)
    }

    fn bitmaps_at(self) -> usize {
        self.buffers_at() + self.nr_buffers * BUFFER_BYTES
    }

    fn requests_at(self) -> usize {
        self.bitmaps_at() + 2 * self.nr_words * 8
    }

    fn size_bytes(self) -> usize {
        self.requests_at() + self.nr_requests * REQUEST_BYTES
    }

    fn header(self) -> [u8; HEAD_BYTES] {
        let mut header = [0; HEAD_BYTES];
        header[..8].copy_from_slice(MAGIC);
        let numbers = [self.description_bytes, self.nr_buffers, self.nr_words, self.nr_requests];
        for (nr, number) in numbers.into_iter().enumerate() {
            header[8 + 8 * nr..16 + 8 * nr].copy_from_slice(&(number as u64).to_ne_bytes());
        }
        header
    }

    /// Of a file of `file_bytes` that begins with `header`.
    fn of(header: &[u8; HEAD_BYTES], file_bytes: u64) -> Option<Layout> {
        let number = |nr: usize| {
            let (words, _) = header.as_chunks::<8>();
            usize::try_from(u64::from_ne_bytes(words[nr])).ok()
        };
        let layout = Layout::new(number(1)?, number(2)?, number(3)?, number(4)?)?;
        (header.starts_with(MAGIC) && layout.size_bytes() as u64 == file_bytes).then_some(layout)
    }
}

/// The state of a machine's pages that survives.
#[derive(Debug)]
pub struct State {
    mapping: MmapRaw,
    layout: Layout,
    buffers_taken: AtomicU64,
    file: Option<PathBuf>,
}

impl State {
    /// One that does not survive.
    ///
    /// # Errors
    /// No memory; `InvalidInput` unless there are 1 to [`MAX_BUFFERS`] buffers.
    pub fn anonymous(nr_buffers: usize, nr_words: usize) -> io::Result<State> {
        let layout = Layout::new(0, nr_buffers, nr_words, 0).ok_or_else(does_not_fit)?;
        let mapping = MmapMut::map_anon(layout.size_bytes())?.into();
        Ok(State { mapping, layout, buffers_taken: AtomicU64::new(0), file: None })
    }

    /// Makes the file `path`. It is there with all its contents, or not at all. A file that is
    /// there, or is being made, stays as it is: it may be mapped.
    ///
    /// # Errors
    /// Of the files; `AlreadyExists` if there is one; `InvalidInput` unless there are 1 to
    /// [`MAX_BUFFERS`] buffers, and the description is short.
    pub fn create(
        path: &Path,
        description: &[u8],
        nr_buffers: usize,
        nr_words: usize,
        nr_requests: usize,
    ) -> io::Result<State> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let layout = Layout::new(description.len(), nr_buffers, nr_words, nr_requests).ok_or_else(does_not_fit)?;
        let new = path.with_extension("new");
        let mut file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&new)?;
        let made = (|| {
            // Blocks are there: a write to the mapping never finds the disk full, which would kill.
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, layout.size_bytes() as u64)?;
            file.write_all(&layout.header())?;
            io::Seek::seek(&mut file, io::SeekFrom::Start(HEADER_BYTES as u64))?;
            file.write_all(description)?;
            let state = State::map(&file, layout, path)?;
            renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE)?;
            Ok(state)
        })();
        if made.is_err() {
            let _ = fs::remove_file(&new);
        }
        made
    }

    /// Opens a file that another process has made, and returns its description.
    ///
    /// # Safety
    /// No other `State` has the file, in this process or another that lives, until the returned one
    /// and its buffers are dropped; and nothing cuts the file.
    ///
    /// # Errors
    /// Of the file; `InvalidData` if it is none of ours.
    pub unsafe fn open(path: &Path) -> io::Result<(State, Vec<u8>)> {
        use std::os::unix::fs::FileExt;
        let file = fs::OpenOptions::new().read(true).write(true).open(path)?;
        let mut header = [0; HEAD_BYTES];
        file.read_exact_at(&mut header, 0)?;
        let layout = Layout::of(&header, file.metadata()?.len())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not the state of a machine"))?;
        let mut description = vec![0; layout.description_bytes];
        file.read_exact_at(&mut description, HEADER_BYTES as u64)?;
        Ok((State::map(&file, layout, path)?, description))
    }

    fn map(file: &File, layout: Layout, path: &Path) -> io::Result<State> {
        let mapping = MmapOptions::new().len(layout.size_bytes()).map_raw(file)?;
        let state = State { mapping, layout, buffers_taken: AtomicU64::new(0), file: Some(path.to_path_buf()) };
        if let Err(error) = state.lock_buffers() {
            tracing::debug!(%error, "the buffers of messages are not locked in memory");
        }
        Ok(state)
    }

    fn lock_buffers(&self) -> rustix::io::Result<()> {
        let nr_bytes = self.layout.nr_buffers * BUFFER_BYTES;
        // SAFETY: the buffers lie in the mapping, and locking changes no contents.
        unsafe { rustix::mm::mlock(self.mapping.as_mut_ptr().add(self.layout.buffers_at()).cast(), nr_bytes) }
    }

    /// Whether its sizes are these.
    pub fn fits(&self, nr_words: usize) -> bool {
        self.layout.nr_words == nr_words
    }

    /// A bit for each page that was filled, and not removed since.
    pub fn present(&self) -> &[AtomicU64] {
        self.words(0)
    }

    /// A bit for each page that was removed ever.
    pub fn removed(&self) -> &[AtomicU64] {
        self.words(1)
    }

    /// Words for requests of vCPUs that were not answered, zeros at first.
    pub fn requests(&self) -> &[[AtomicU64; REQUEST_WORDS]] {
        self.words_at(self.layout.requests_at(), self.layout.nr_requests * REQUEST_WORDS).as_chunks().0
    }

    fn words(&self, bitmap: usize) -> &[AtomicU64] {
        self.words_at(self.layout.bitmaps_at() + bitmap * self.layout.nr_words * 8, self.layout.nr_words)
    }

    /// Words that the layout has at `at`, of which 8 is a divisor.
    fn words_at(&self, at: usize, nr_words: usize) -> &[AtomicU64] {
        let end = nr_words.checked_mul(8).and_then(|nr_bytes| at.checked_add(nr_bytes));
        assert!(at.is_multiple_of(8) && end.is_some_and(|end| end <= self.layout.size_bytes()));
        // SAFETY: the words lie in the mapping, which lives as long as `self`; 8 divides `at`, as
        // it divides the mapping's start. They are accessed as atomics only, by this and by other
        // processes. The file is not cut: it is new, or the caller of `open` has promised that.
        unsafe { std::slice::from_raw_parts(self.mapping.as_mut_ptr().add(at).cast::<AtomicU64>(), nr_words) }
    }

    /// A buffer that no thread has; `None` if all are taken.
    pub fn take_buffer(self: &Arc<State>) -> Option<MessageBuffer> {
        // Of 1 to 64.
        let all = u64::MAX >> (MAX_BUFFERS - self.layout.nr_buffers);
        loop {
            let taken = self.buffers_taken.load(Ordering::Relaxed);
            let nr = (!taken & all).trailing_zeros();
            if nr == u64::BITS {
                return None;
            }
            // Acquire: what the last owner wrote is complete.
            if self.buffers_taken.fetch_or(1 << nr, Ordering::Acquire) & (1 << nr) == 0 {
                return Some(MessageBuffer { state: Arc::clone(self), nr: nr as usize });
            }
        }
    }

    /// Removes the file: the machine is gone.
    pub fn forget(&self) {
        if let Some(path) = &self.file
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove the state of a machine that is gone");
        }
    }
}

fn does_not_fit() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "a machine has 1 to 64 threads, and a description of at most 1 MiB")
}

/// A buffer for messages, of one owner.
#[derive(Debug)]
pub struct MessageBuffer {
    state: Arc<State>,
    nr: usize,
}

impl MessageBuffer {
    /// The messages.
    pub fn messages(&mut self) -> &mut [[u8; MESSAGE_BYTES]] {
        let at = self.state.layout.buffers_at() + self.nr * BUFFER_BYTES;
        // SAFETY: the buffer lies in the mapping, which `self` keeps; only this owner has its
        // number, and `&mut self` makes the reference the only one. No other `State` has the file:
        // `create` makes a new one, and the caller of `open` has promised that.
        unsafe {
            let start = self.state.mapping.as_mut_ptr().add(at).cast::<[u8; MESSAGE_BYTES]>();
            std::slice::from_raw_parts_mut(start, BUFFER_MESSAGES)
        }
    }
}

impl Drop for MessageBuffer {
    fn drop(&mut self) {
        // Release: pairs with the next owner's acquire.
        self.state.buffers_taken.fetch_and(!(1 << self.nr), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let state = Arc::new(State::create(&path, b"who", 2, 5, 3).unwrap());
        state.present()[4].store(7, Ordering::Relaxed);
        state.removed()[0].store(9, Ordering::Relaxed);
        state.requests()[2][3].store(11, Ordering::Relaxed);
        let mut one = state.take_buffer().unwrap();
        let two = state.take_buffer().unwrap();
        assert!(state.take_buffer().is_none());
        one.messages()[1] = [3; MESSAGE_BYTES];
        drop(two);
        assert_eq!(state.take_buffer().unwrap().nr, 1);
        drop((one, state));
        // SAFETY: the first one was dropped.
        let (state, description) = unsafe { State::open(&path) }.unwrap();
        let state = Arc::new(state);
        assert_eq!(description, b"who");
        assert_eq!(state.present()[4].load(Ordering::Relaxed), 7);
        assert_eq!(state.removed()[0].load(Ordering::Relaxed), 9);
        assert_eq!((state.requests().len(), state.requests()[2][3].load(Ordering::Relaxed)), (3, 11));
        assert_eq!(state.take_buffer().unwrap().messages()[1], [3; MESSAGE_BYTES]);
        assert!(state.fits(5) && !state.fits(6));
        state.forget();
        assert!(!path.exists());
    }

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        State::create(&path, b"who", 1, 5, 1).unwrap();
        let good = fs::read(&path).unwrap();
        let mut numbers = good.clone();
        numbers[24..40].fill(0xff);
        let mut magic = good.clone();
        magic[0] = 0;
        for bad in [&good[..good.len() - 1], &good[..20], &numbers, &magic, &[]] {
            fs::write(&path, bad).unwrap();
            // SAFETY: no other has the file.
            unsafe { State::open(&path) }.unwrap_err();
        }
    }

    #[test]
    fn a_file_that_is_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let first = State::create(&path, b"first", 1, 5, 0).unwrap();
        first.present()[4].store(7, Ordering::Relaxed);
        let before = fs::read(&path).unwrap();
        let refused = State::create(&path, b"second", 2, 1, 0).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert!(!path.with_extension("new").exists());
        // Another thread makes it at this moment.
        let other = folder.path().join("other");
        fs::write(other.with_extension("new"), "a part").unwrap();
        let refused = State::create(&other, b"second", 1, 5, 0).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(other.with_extension("new")).unwrap(), b"a part");
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(first.present()[4].load(Ordering::Relaxed), 7);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (nr_buffers, nr_words) in [(0, 5), (65, 5), (1, usize::MAX), (1, usize::MAX / 16), (64, 1 << 59)] {
            let refused = State::anonymous(nr_buffers, nr_words).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{nr_buffers} {nr_words}");
        }
        let state = Arc::new(State::anonymous(64, 1).unwrap());
        let buffers: Vec<_> = std::iter::from_fn(|| state.take_buffer()).collect();
        assert_eq!(buffers.len(), 64);
    }
}
