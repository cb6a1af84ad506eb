//! The end of memory that is served no more: the pages that it lacks fail, and never read as zeros.
//!
//! # Guarantees
//! - If the kernel cannot let a page fail, a descriptor stays open for good: the page's threads wait.
//! - A child of the monitor's process, which has a memory of its own, is closed beside the faults of
//!   the monitor, and its own children after it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Shared;
use super::install::Stuck;
use super::pages::{Claimed, masks};
use crate::userfaultfd::{Event, MESSAGE_BYTES, Userfaultfd};

/// The memories of the monitor's children.
#[derive(Debug, Default)]
pub(super) struct Children {
    /// Those that have not been closed.
    waiting: Vec<Userfaultfd>,
    /// A thread closes them, one after the other.
    is_closing: bool,
}

impl Shared {
    /// Pages that were not brought fail from now on; if the kernel cannot do that, their threads
    /// wait for ever. They never read zeros.
    pub(super) fn fail_closed(&self) {
        let pages = &self.installer.pages;
        self.close(&self.installer.userfaultfd, |word| {
            !pages.state().present()[word].load(Ordering::Acquire) & !pages.removed(word)
        });
    }

    /// A child of the monitor has the memory as it is at this moment. It is not served: all that it
    /// lacks fails, whatever the monitor itself has got since. A thread does that beside the faults:
    /// each page that the child has is a call.
    pub(super) fn close_child(self: &Arc<Shared>, child: Userfaultfd) {
        /// With more, the monitor's next fork waits for its thread of faults.
        const MOST_WAITING: usize = 16;
        tracing::warn!(vm = self.options.name, "the monitor has forked; its child gets no page");
        let mut children = self.children.lock();
        if children.waiting.len() >= MOST_WAITING {
            drop(children);
            return self.close_all_of(child);
        }
        children.waiting.push(child);
        if std::mem::replace(&mut children.is_closing, true) {
            return;
        }
        drop(children);
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("slat-children".to_string()).stack_size(256 << 10);
        if let Err(error) = thread.spawn(move || shared.close_children()) {
            tracing::error!(vm = self.options.name, %error, "no thread for a child; faults wait meanwhile");
            self.close_children();
        }
    }

    fn close_children(&self) {
        loop {
            let mut children = self.children.lock();
            let Some(child) = children.waiting.pop() else {
                children.is_closing = false;
                return;
            };
            drop(children);
            self.close_all_of(child);
        }
    }

    fn close_all_of(&self, child: Userfaultfd) {
        self.close(&Arc::new(child), |_| u64::MAX);
    }

    /// Lets pages fail that are missing for the memory of `userfaultfd`, of those that `wanted` has
    /// of each word; and for those of its children, all.
    fn close(&self, userfaultfd: &Arc<Userfaultfd>, wanted: impl Fn(usize) -> u64) {
        let mut children = Vec::new();
        self.close_one(userfaultfd, wanted, &mut children);
        while let Some(child) = children.pop() {
            self.close_one(&Arc::new(child), |_| u64::MAX, &mut children);
        }
    }

    fn close_one(
        &self,
        userfaultfd: &Arc<Userfaultfd>,
        wanted: impl Fn(usize) -> u64,
        children: &mut Vec<Userfaultfd>,
    ) {
        const MOST_TRIES: u32 = 1000;
        let mut messages = [[0; MESSAGE_BYTES]; 16];
        let mut nr_tries = 0;
        let regions = self.installer.regions.all().iter().enumerate();
        for (place, (word, mask)) in regions.flat_map(|(place, placed)| masks(placed.pages()).map(move |m| (place, m)))
        {
            let mut claimed = Claimed { place, word, mask: mask & wanted(word) };
            while let Err(stuck) = self.installer.poison_by(userfaultfd, claimed, |_, _| {}) {
                match stuck {
                    Stuck::Gone => return,
                    Stuck::Again(rest) if nr_tries < MOST_TRIES => {
                        nr_tries += 1;
                        claimed.mask = rest;
                        if let Ok(messages) = userfaultfd.read(&mut messages) {
                            children.extend(messages.filter_map(|event| match event {
                                Event::Fork(child) => Some(child),
                                _ => None,
                            }));
                        }
                        std::thread::yield_now();
                    }
                    stuck => {
                        tracing::error!(vm = self.options.name, ?stuck, "cannot poison; a descriptor stays open");
                        std::mem::forget(Arc::clone(userfaultfd));
                        return;
                    }
                }
            }
        }
    }
}
