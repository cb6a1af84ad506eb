//! The frames of guest memory: their numbers of users, and the free ones in their order.
//!
//! Frames are reused last in, first out, so that the frame of a page-table page soon becomes a data
//! page and the other way round, on any virtual CPU. A stale translation then finds the data of
//! another owner at once. Roots take two neighbours, the lower one even, as page-table isolation
//! needs it.
//!
//! This is the simulator's state and not in guest memory: a wrong translation cannot disturb it.

use slat::{Gfn, PAGE_SIZE};

/// No index in the list of single frames.
const NO_INDEX: u32 = u32::MAX;

/// All frames above the image. Frame numbers are guest-physical addresses by 4 KiB.
#[derive(Debug)]
pub(crate) struct GuestFrames {
    first: u64,
    /// The number of users; 0 if it is free.
    users: Box<[u32]>,
    /// Its index in `singles`, or [`NO_INDEX`].
    position: Box<[u32]>,
    /// Free frames whose neighbour is not free.
    singles: Vec<u32>,
    /// Lower frames of pairs that are free.
    pairs: Vec<u32>,
    nr_used: u64,
}

/// A frame: guest-physical memory of 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct GuestFrame(pub(crate) u64);

impl GuestFrame {
    pub(crate) const fn gpa(self) -> u64 {
        self.0 << Gfn::SHIFT
    }

    /// The frame that a PTE or CR3 points to.
    pub(crate) const fn of(entry: u64) -> GuestFrame {
        GuestFrame((entry & super::layout::ADDRESS) >> Gfn::SHIFT)
    }
}

impl GuestFrames {
    /// The memory from `first_byte` to `end_byte`, both multiples of two pages.
    pub(crate) fn new(first_byte: u64, end_byte: u64) -> GuestFrames {
        let nr_frames = (end_byte - first_byte) / PAGE_SIZE;
        GuestFrames {
            first: first_byte / PAGE_SIZE,
            users: vec![0; nr_frames as usize].into(),
            position: vec![NO_INDEX; nr_frames as usize].into(),
            singles: Vec::new(),
            pairs: (0..nr_frames as u32).step_by(2).rev().collect(),
            nr_used: 0,
        }
    }

    fn number(&self, index: u32) -> GuestFrame {
        GuestFrame(self.first + u64::from(index))
    }

    fn index(&self, frame: GuestFrame) -> usize {
        (frame.0 - self.first) as usize
    }

    /// Allocates a frame; `None` if there is none.
    pub(crate) fn take(&mut self) -> Option<GuestFrame> {
        let index = match self.singles.pop() {
            Some(index) => {
                self.position[index as usize] = NO_INDEX;
                index
            }
            None => {
                let lower = self.pairs.pop()?;
                self.add_single(lower + 1);
                lower
            }
        };
        self.users[index as usize] = 1;
        self.nr_used += 1;
        Some(self.number(index))
    }

    /// Allocates two neighbours, of which the lower one is even; `None` if there are none.
    pub(crate) fn take_pair(&mut self) -> Option<GuestFrame> {
        let lower = self.pairs.pop()?;
        self.users[lower as usize] = 1;
        self.users[lower as usize + 1] = 1;
        self.nr_used += 2;
        Some(self.number(lower))
    }

    /// Adds a user.
    pub(crate) fn share(&mut self, frame: GuestFrame) {
        let index = self.index(frame);
        self.users[index] += 1;
    }

    /// The number of users.
    pub(crate) fn nr_users(&self, frame: GuestFrame) -> u32 {
        self.users[self.index(frame)]
    }

    /// Removes a user.
    pub(crate) fn release(&mut self, frame: GuestFrame) {
        let index = self.index(frame);
        self.users[index] -= 1;
        if self.users[index] != 0 {
            return;
        }
        self.nr_used -= 1;
        let neighbour = index ^ 1;
        let at = self.position[neighbour];
        if at == NO_INDEX {
            self.add_single(index as u32);
            return;
        }
        self.singles.swap_remove(at as usize);
        self.position[neighbour] = NO_INDEX;
        if let Some(moved) = self.singles.get(at as usize) {
            self.position[*moved as usize] = at;
        }
        self.pairs.push((index & !1) as u32);
    }

    fn add_single(&mut self, index: u32) {
        self.position[index as usize] = self.singles.len() as u32;
        self.singles.push(index);
    }

    /// Frames that have users.
    pub(crate) fn nr_used(&self) -> u64 {
        self.nr_used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_freed_comes_first() {
        let mut frames = GuestFrames::new(2 << 20, 4 << 20);
        let taken: Vec<GuestFrame> = (0..6).map(|_| frames.take().unwrap()).collect();
        assert_eq!(taken[0], GuestFrame(512));
        frames.release(taken[3]);
        frames.release(taken[0]);
        assert_eq!(frames.take(), Some(taken[0]));
        assert_eq!(frames.take(), Some(taken[3]));
        assert_eq!(frames.nr_used(), 6);
    }

    #[test]
    fn neighbours_become_a_pair_again() {
        let mut frames = GuestFrames::new(0, 8 * PAGE_SIZE);
        let taken: Vec<GuestFrame> = (0..8).map(|_| frames.take().unwrap()).collect();
        assert_eq!((frames.take(), frames.take_pair()), (None, None));
        for even in [0, 4, 2] {
            frames.release(taken[even]);
        }
        assert_eq!(frames.take_pair(), None);
        frames.release(taken[5]);
        assert_eq!(frames.take_pair(), Some(GuestFrame(4)));
        assert_eq!(frames.take_pair(), None);
        for frame in [4, 5, 1, 3, 6, 7] {
            frames.release(GuestFrame(frame));
        }
        assert_eq!(frames.nr_used(), 0);
        let mut lower: Vec<u64> = (0..4).map(|_| frames.take_pair().unwrap().0).collect();
        lower.sort_unstable();
        assert_eq!(lower, [0, 2, 4, 6]);
    }

    #[test]
    fn a_shared_frame_stays_until_the_last_releases_it() {
        let mut frames = GuestFrames::new(0, 2 * PAGE_SIZE);
        let frame = frames.take().unwrap();
        frames.share(frame);
        assert_eq!(frames.nr_users(frame), 2);
        frames.release(frame);
        assert_eq!((frames.nr_users(frame), frames.nr_used()), (1, 1));
        frames.release(frame);
        assert_eq!(frames.nr_used(), 0);
    }
}
