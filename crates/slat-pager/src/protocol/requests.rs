//! Requests of vCPUs, in what survives the pager ([`State`]): those that are not answered.
//!
//! # Guarantees
//! A request that is noted is found by the successor of a pager that is killed at any moment, until it
//! is noted as answered.
//!
//! # Implementation
//! A request has four words. The first says whether there is one, and is written last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::guest_memfd::FaultRequest;
use crate::vm::state::{REQUEST_WORDS, State};

/// There is a request; the vCPU's number is in the low half.
const IS_NOTED: u64 = 1 << 63;
const HAS_GPA: u64 = 1 << 62;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Requests {
    state: Arc<State>,
    free: Vec<usize>,
}

/// The place of a request that is noted.
#[derive(Debug)]
pub(super) struct Place(usize);

impl Requests {
    /// Those of a machine, and what a dead pager has left. It has no other.
    pub(super) fn new(state: Arc<State>) -> (Requests, Vec<(Place, FaultRequest)>) {
        let (mut free, mut left) = (Vec::new(), Vec::new());
        for (nr, words) in state.requests().iter().enumerate().rev() {
            match load(words) {
                Some(request) => left.push((Place(nr), request)),
                None => free.push(nr),
            }
        }
        (Requests { state, free }, left)
    }

    /// Notes a request; `None` if there is no room.
    pub(super) fn note(&mut self, request: &FaultRequest) -> Option<Place> {
        let nr = self.free.pop()?;
        let [head, offset, flags, gpa] = &self.state.requests()[nr];
        let FaultRequest { vcpu, .. } = *request;
        let has_gpa = if request.gpa.is_some() { HAS_GPA } else { 0 };
        // Relaxed, but the last: a successor reads after this process is dead, so that it has all
        // stores up to some moment in their order.
        offset.store(request.offset, Ordering::Relaxed);
        flags.store(request.flags, Ordering::Relaxed);
        gpa.store(request.gpa.unwrap_or(0), Ordering::Relaxed);
        head.store(IS_NOTED | has_gpa | u64::from(vcpu), Ordering::Release);
        Some(Place(nr))
    }

    /// The request was answered.
    pub(super) fn answered(&mut self, Place(nr): Place) {
        self.state.requests()[nr][0].store(0, Ordering::Release);
        self.free.push(nr);
    }
}

fn load([head, offset, flags, gpa]: &[AtomicU64; REQUEST_WORDS]) -> Option<FaultRequest> {
    // Acquire: pairs with `note`.
    let head = head.load(Ordering::Acquire);
    let [offset, flags, gpa] = [offset, flags, gpa].map(|word| word.load(Ordering::Relaxed));
    let request = FaultRequest { vcpu: head as u32, offset, flags, gpa: (head & HAS_GPA != 0).then_some(gpa) };
    (head & IS_NOTED != 0).then_some(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_answered_is_found_by_a_successor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let state = Arc::new(State::create(&path, b"who", 1, 1, 3).unwrap());
        let request = |vcpu, gpa| FaultRequest { vcpu, offset: 5, flags: u64::MAX, gpa };
        let (mut requests, left) = Requests::new(Arc::clone(&state));
        assert!(left.is_empty());
        let asked = [request(0, None), request(u32::MAX, Some(0)), request(7, Some(u64::MAX))];
        let [first, second, _third] = asked.each_ref().map(|request| requests.note(request).unwrap());
        assert!(requests.note(&asked[0]).is_none(), "there is no room");
        requests.answered(second);
        let again = requests.note(&asked[0]).unwrap();
        requests.answered(first);
        drop((requests, again, state));
        // SAFETY: the first one was dropped.
        #[expect(unsafe_code, reason = "the file of another state")]
        let (state, _) = unsafe { State::open(&path) }.unwrap();
        let (mut requests, left) = Requests::new(Arc::new(state));
        let mut found: Vec<_> = left.iter().map(|(_, request)| request.vcpu).collect();
        found.sort_unstable();
        assert_eq!(found, [0, 7]);
        assert!(left.iter().all(|(_, request)| asked.contains(request)));
        assert!(requests.note(&asked[1]).is_some() && requests.note(&asked[1]).is_none());
    }
}
