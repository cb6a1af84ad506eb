//! When the view shows what, on a clock of the test.

use std::sync::atomic::AtomicU64;

use super::*;

/// Lines that were written.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Page {
    /// What was written since the last call.
    fn take(&self) -> Vec<String> {
        let bytes = std::mem::take(&mut *lock(&self.0));
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }
}

/// A VM that has had so many faults.
fn vm(faults: &Arc<AtomicU64>) -> impl Fn() -> Option<Sample> + Send + 'static {
    let faults = Arc::clone(faults);
    move || {
        let mut sample = Sample::default();
        sample.stats.faults = faults.load(Ordering::Relaxed);
        Some(sample)
    }
}

fn new() -> (Live, Page, Instant) {
    let (page, begin) = (Page::default(), Instant::now());
    (Live::new(Screen::Lines(Mutex::new(Box::new(page.clone()))), begin), page, begin)
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_look_shows_what_came_since_the_last() {
    let (live, page, begin) = new();
    let faults = Arc::new(AtomicU64::new(1000));
    live.0.look(begin);
    assert!(page.take().is_empty(), "there is nothing to look at");
    let watched = live.watch_source(begin, vm(&faults));
    faults.store(3000, Ordering::Relaxed);
    live.0.look(begin + 2 * SECOND);
    let lines = page.take();
    assert!(lines.len() == 1 && lines[0].starts_with("     2.0 s  faults 1.00 k/s, "), "{lines:?}");
    faults.store(3500, Ordering::Relaxed);
    live.0.look(begin + 4 * SECOND);
    let lines = page.take();
    assert!(lines.len() == 1 && lines[0].contains("faults 250/s, "), "{lines:?}");
    // The end follows a sample closely.
    live.0.leave(watched.number, begin + 4 * SECOND + SHORTEST / 2);
    assert!(page.take().is_empty());
    live.0.look(begin + 6 * SECOND);
    assert!(page.take().is_empty());
}

#[test]
fn a_run_shorter_than_a_tick_is_seen_at_its_end() {
    let (live, page, begin) = new();
    let faults = Arc::new(AtomicU64::new(0));
    let watched = live.watch_source(begin, vm(&faults));
    faults.store(50, Ordering::Relaxed);
    live.0.leave(watched.number, begin + SHORTEST / 2);
    let lines = page.take();
    assert!(lines.len() == 1 && lines[0].contains("faults 1.00 k/s, "), "{lines:?}");
    drop(watched);
    assert!(page.take().is_empty(), "it has left already");
}

#[test]
fn another_machine_begins_anew() {
    let (live, page, begin) = new();
    let (first, second) = (Arc::new(AtomicU64::new(5_000_000)), Arc::new(AtomicU64::new(10)));
    let old = live.watch_source(begin, vm(&first));
    let new = live.watch_source(begin + SECOND, vm(&second));
    second.store(30, Ordering::Relaxed);
    live.0.look(begin + 2 * SECOND);
    let lines = page.take();
    assert!(lines.len() == 1 && lines[0].contains("faults 20/s, "), "{lines:?}");
    // A watch that was replaced shows nothing, and its end stops no other.
    drop(old);
    assert!(page.take().is_empty());
    live.0.look(begin + 3 * SECOND);
    assert_eq!(page.take().len(), 1);
    drop(new);
}

#[test]
fn nothing_is_shown_behind_the_end() {
    let (live, page, begin) = new();
    live.begin(1, 9, "lock none");
    let lines = page.take();
    assert!(lines.len() == 1 && lines[0].ends_with(" s  run 1 of 9: lock none"), "{lines:?}");
    let watched = live.watch_source(begin, vm(&Arc::default()));
    live.end();
    live.begin(2, 9, "lock none");
    live.0.look(begin + SECOND);
    drop(watched);
    assert!(page.take().is_empty());
}

#[test]
fn rows_are_filled_and_blank_when_nothing_runs() {
    let bars = MultiProgress::with_draw_target(indicatif::ProgressDrawTarget::hidden());
    let begin = Instant::now();
    let live = Live::new(Screen::rows(&bars), begin);
    let messages = || match &live.0.screen {
        Screen::Rows { rows, .. } => rows.iter().map(ProgressBar::message).collect::<Vec<_>>(),
        Screen::Lines(_) => Vec::new(),
    };
    let faults = Arc::new(AtomicU64::new(0));
    let watched = live.watch_source(begin, vm(&faults));
    faults.store(7, Ordering::Relaxed);
    live.0.look(begin + SECOND);
    assert!(messages()[0].starts_with("faults      7/s  pages      0/s"), "{:?}", messages());
    assert_eq!(messages()[MAX_ROWS - 1], "", "there are no shadow tables");
    live.0.leave(watched.number, begin + SECOND);
    live.0.look(begin + SECOND + ROWS_PERIOD);
    assert!(!messages()[0].is_empty(), "the next run may come at once");
    live.0.look(begin + SECOND + 3 * ROWS_PERIOD);
    assert!(messages().iter().all(String::is_empty));
}

#[test]
fn a_machine_that_was_dropped_shows_nothing() {
    let (live, page, _) = new();
    let machine =
        slat_machine::vm::machine::Machine::<slat::format::Npt>::new(&slat_machine::vm::machine::MachineConfig {
            nr_vcpus: 1,
            bytes_per_vcpu: 16 << 12,
            ..Default::default()
        })
        .unwrap();
    let watched = live.watch(machine.vm());
    machine.run(slat_machine::vm::guest::Program::default()).unwrap();
    live.0.look(Instant::now());
    let lines = page.take();
    assert!(lines.len() == 1 && !lines[0].contains("faults 0/s") && !lines[0].contains("tables 0"), "{lines:?}");
    drop(machine);
    live.0.look(Instant::now());
    drop(watched);
    assert!(page.take().is_empty());
}
