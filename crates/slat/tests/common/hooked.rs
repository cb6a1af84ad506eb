//! A format with a hook where entries are looked at: in a walk, in the check of a transition right before its exchange
//! (in builds that have `debug_assertions`), and when a leaf's frame is told. So a fault can be overtaken at each point where it matters.

use std::cell::RefCell;

use slat::{Entry, Format, Hpa, Level, Npt, Pfn};

type Hook = Box<dyn FnOnce()>;

thread_local! {
    static HOOK: RefCell<Option<(Level, u32, Hook)>> = const { RefCell::new(None) };
}

/// Calls `hook` at this thread's `nth` look (from 1 on) at a present entry of a level up to `highest`.
pub fn at_look(highest: Level, nth: u32, hook: impl FnOnce() + 'static) {
    HOOK.set(Some((highest, nth, Box::new(hook))));
}

/// Takes the hook off again; says whether it was called.
pub fn was_called() -> bool {
    HOOK.take().is_none()
}

/// Runs `walk`, which is not the engine's, without the hook.
pub fn without_looks<R>(walk: impl FnOnce() -> R) -> R {
    let hook = HOOK.take();
    let result = walk();
    HOOK.set(hook);
    result
}

/// A look at an entry of `level`.
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

// SAFETY: entries are Npt's.
unsafe impl Format for Hooked {
    const NAME: &'static str = "hooked";
    const ROOT_LEVEL: Level = Npt::ROOT_LEVEL;
    const GPA_BITS: u32 = Npt::GPA_BITS;
    const HPA_BITS: u32 = Npt::HPA_BITS;
    const ROOT_ENTRIES: usize = Npt::ROOT_ENTRIES;
    const TABLE_ENTRIES: usize = Npt::TABLE_ENTRIES;
    const WRITABLE: u64 = Npt::WRITABLE;
    const ACCESSED: u64 = Npt::ACCESSED;
    const DIRTY: u64 = Npt::DIRTY;
    const HOST_WRITABLE: u64 = Npt::HOST_WRITABLE;
    const WAS_DIRTY: u64 = Npt::WAS_DIRTY;
    const GENERATION: u64 = Npt::GENERATION;
    const BREAK_BEFORE_MAKE: bool = false;
    const HAS_MODIFICATION_LOG: bool = Npt::HAS_MODIFICATION_LOG;

    fn is_present(entry: Entry) -> bool {
        Npt::is_present(entry)
    }

    fn is_leaf(entry: Entry, level: Level) -> bool {
        look(level);
        Npt::is_leaf(entry, level)
    }

    fn leaf(pfn: Pfn, level: Level) -> Entry {
        Npt::leaf(pfn, level)
    }

    fn table(table: Hpa) -> Entry {
        Npt::table(table)
    }

    fn address(entry: Entry, level: Level) -> Hpa {
        look(level);
        Npt::address(entry, level)
    }
}
