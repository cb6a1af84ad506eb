//! Hides the messages of expected failures.

use std::cell::Cell;
use std::panic::{set_hook, take_hook};
use std::sync::Once;

/// While it exists, panics of this thread print nothing.
pub struct Quiet;

impl Quiet {
    pub fn new() -> Quiet {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let hook = take_hook();
            set_hook(Box::new(move |info| {
                if !IS_QUIET.get() {
                    hook(info);
                }
            }));
        });
        IS_QUIET.set(true);
        Quiet
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        IS_QUIET.set(false);
    }
}

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}
