//! Threads that sleep on a word, as on a futex.

use std::sync::atomic::{AtomicU32, Ordering};

use slat::baselines::Park;

use super::{InsideHost, TestHost};

impl TestHost {
    fn unpark(&self, word: *const AtomicU32, most: usize) -> bool {
        let mut parked = self.parked.lock().unwrap();
        let mut woken = 0;
        parked.0.retain(|(asleep_on, _)| {
            let wake = *asleep_on == word.addr() && woken < most;
            woken += usize::from(wake);
            !wake
        });
        if woken != 0 {
            self.wakeup.notify_all();
        }
        woken != 0
    }
}

impl Park for TestHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let _inside = InsideHost::enter();
        let mut parked = self.parked.lock().unwrap();
        if word.load(Ordering::SeqCst) != expected {
            return;
        }
        let ticket = parked.1;
        parked.1 += 1;
        parked.0.push((std::ptr::from_ref(word).addr(), ticket));
        while parked.0.iter().any(|(_, sleeper)| *sleeper == ticket) {
            parked = self.wakeup.wait(parked).unwrap();
        }
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        self.unpark(word, 1)
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        self.unpark(word, usize::MAX);
    }
}
