//! The stack depth of a call: it runs on a thread whose stack was painted before. Whatever lost its
//! paint was used.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

/// More than any call takes, even without optimization.
const STACK_BYTES: usize = 256 << 10;
const STACK_WORDS: usize = STACK_BYTES / 8;

/// No address, no length and no zero.
const PAINT: u64 = 0xa5a5_5a5a_a5a5_5a5a;

/// A painted stack.
struct Stack(*mut u64);

impl Stack {
    fn new() -> Stack {
        // SAFETY: new memory, at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                STACK_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let stack = Stack(memory.cast());
        stack.paint(0);
        stack
    }

    /// Paints it from word `first` on.
    fn paint(&self, first: usize) {
        for word in first..STACK_WORDS {
            // SAFETY: inside the mapping, which no thread runs on.
            unsafe { self.0.add(word).write_volatile(PAINT) }
        }
    }

    /// The lowest word that has lost its paint.
    fn lowest(&self) -> usize {
        // SAFETY: inside the mapping. A thread that runs on it has written above.
        (0..STACK_WORDS).find(|&word| unsafe { self.0.add(word).read_volatile() } != PAINT).unwrap_or(STACK_WORDS)
    }
}

/// The call to make, and its result.
struct Task<'t> {
    call: &'t mut (dyn FnMut() + 't),
    stack: &'t Stack,
    used_bytes: usize,
}

/// Runs `call` on a painted stack of its own. Returns how many bytes below its caller's frame were
/// written: the frame of the call, and all below.
fn depth_of(call: &mut dyn FnMut()) -> usize {
    // Painted again after each call, for the next.
    thread_local!(static STACK: Stack = Stack::new());
    STACK.with(|stack| {
        let mut task = Task { call, stack, used_bytes: 0 };
        // SAFETY: the attributes exist from init to destroy; the stack and the task until the
        // thread is joined.
        unsafe {
            let mut attributes = std::mem::zeroed();
            assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
            assert_eq!(libc::pthread_attr_setstack(&mut attributes, stack.0.cast(), STACK_BYTES), 0);
            let mut thread = std::mem::zeroed();
            assert_eq!(libc::pthread_create(&mut thread, &attributes, run, (&raw mut task).cast()), 0);
            let mut failed = ptr::null_mut();
            assert_eq!(libc::pthread_join(thread, &mut failed), 0);
            libc::pthread_attr_destroy(&mut attributes);
            assert!(failed.is_null(), "the call panicked");
        }
        stack.paint(stack.lowest());
        task.used_bytes
    })
}

extern "C" fn run(task: *mut c_void) -> *mut c_void {
    // SAFETY: the task of `depth_of`, which waits for this thread.
    let task = unsafe { &mut *task.cast::<Task<'_>>() };
    let here = Cell::new(0_u64);
    // A panic must not leave through C, nor count: its message takes a stack of its own kind.
    let Ok(()) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (task.call)())) else {
        return ptr::dangling_mut();
    };
    // Before the thread continues, since its end takes some of the stack, too.
    let lowest = task.stack.0.wrapping_add(task.stack.lowest());
    task.used_bytes = here.as_ptr().addr() - lowest.addr();
    ptr::null_mut()
}

/// The depth of `call`, less the depth of a call that does nothing.
pub fn stack_bytes(mut call: impl FnMut()) -> usize {
    thread_local!(static NOTHING: usize = depth_of(&mut || ()));
    depth_of(&mut call).saturating_sub(NOTHING.with(|&bytes| bytes))
}
