//! A format with a hook at each look at a PTE: in a walk, in the check of a transition right before
//! its exchange (in builds with `debug_assertions`), and when a leaf's frame is decoded. So a fault
//! can be overtaken at each critical point.

use std::cell::RefCell;

use slat::Level;
use slat::format::{Format, Geometry, Npt, Pte};

type Hook = Box<dyn FnOnce()>;

thread_local! {
    static HOOK: RefCell<Option<(Level, u32, Hook)>> = const { RefCell::new(None) };
}

/// Calls `hook` at this thread's `nth` look (from 1 on) at a present PTE of a level up to
/// `highest`.
pub fn at_look(highest: Level, nth: u32, hook: impl FnOnce() + 'static) {
    HOOK.set(Some((highest, nth, Box::new(hook))));
}

/// Removes the hook. Returns whether it was called.
pub fn was_called() -> bool {
    HOOK.take().is_none()
}

/// Runs `walk`, which is no walk of the engine, without the hook.
pub fn without_looks<R>(walk: impl FnOnce() -> R) -> R {
    let hook = HOOK.take();
    let result = walk();
    HOOK.set(hook);
    result
}

/// A look at a PTE of `level`.
pub fn look(level: Level) {
    let due = HOOK.with_borrow_mut(|hook| match hook {
        Some((highest, _, _)) if level > *highest => None,
        Some((_, 1, _)) => hook.take(),
        Some((_, n, _)) => {
            *n -= 1;
            None
        }
        None => None,
    });
    if let Some((_, _, hook)) = due {
        hook();
    }
}

/// [`Npt`] with the hook.
#[derive(Debug)]
pub struct Hooked;

// SAFETY: PTEs are those of Npt.
unsafe impl Format for Hooked {
    super::bits_of!(Npt);

    const NAME: &'static str = "hooked";
    const ROOT_LEVEL: Level = Npt::ROOT_LEVEL;
    const GPA_BITS: u32 = Npt::GPA_BITS;
    const GEOMETRIES: &'static [Geometry] = Npt::GEOMETRIES;
    const MAX_ROOT_ENTRIES: usize = Npt::MAX_ROOT_ENTRIES;
    const BREAK_BEFORE_MAKE: bool = false;

    fn is_leaf(entry: Pte, level: Level) -> bool {
        look(level);
        Npt::is_leaf(entry, level)
    }
}
