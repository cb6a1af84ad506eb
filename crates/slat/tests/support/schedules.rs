//! How many schedules of each kind a test tries, and random choices within a schedule.

use shuttle::Runner;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use slat::baselines::Locking;

/// Schedules of each kind for each test. The environment variable `SHUTTLE_SCHEDULES` sets another
/// number. `SHUTTLE_SEED` runs the one random schedule of a failure; `SHUTTLE_FIRST_SEED` tries the
/// same schedules in each run, others for each number.
const SCHEDULES: usize = 4_000;
/// Switches of thread in a priority schedule.
const PCT_DEPTH: usize = 4;

/// Runs `scenario` in many schedules.
#[allow(dead_code, reason = "some tests have long scenarios")]
pub fn check(scenario: fn()) {
    check_less(SCHEDULES, scenario);
}

/// Runs `scenario` in `most` schedules of each kind, or in as many as the environment sets.
pub fn check_less(most: usize, scenario: fn()) {
    let schedules = std::env::var("SHUTTLE_SCHEDULES").map_or(most, |number| number.parse().unwrap());
    let mut config = shuttle::Config::new();
    // The statistics of a participant are built on the stack.
    config.stack_size = 1 << 18;
    config.max_steps = shuttle::MaxSteps::FailAfter(2_000_000);
    if let Ok(seed) = std::env::var("SHUTTLE_SEED") {
        // Repeats a schedule that failed.
        Runner::new(RandomScheduler::new_from_seed(seed.parse().unwrap(), 1), config).run(scenario);
        return;
    }
    let (by_chance, by_priority) = match std::env::var("SHUTTLE_FIRST_SEED") {
        Ok(seed) => {
            let seed = seed.parse().unwrap();
            let by_priority = PctScheduler::new_from_seed(seed, PCT_DEPTH, schedules);
            (RandomScheduler::new_from_seed(seed, schedules), by_priority)
        }
        Err(_) => (RandomScheduler::new(schedules), PctScheduler::new(PCT_DEPTH, schedules)),
    };
    Runner::new(by_chance, config.clone()).run(scenario);
    Runner::new(by_priority, config).run(scenario);
}

pub fn random(below: u64) -> u64 {
    thread_rng().gen_range(0..below)
}

#[allow(dead_code, reason = "some tests choose by number")]
pub fn pick<T: Copy>(from: &[T]) -> T {
    from[random(from.len() as u64) as usize]
}

#[allow(dead_code, reason = "some tests have no lock")]
pub fn random_locking() -> Locking {
    // Mostly without a lock, which is the case under test.
    pick(&[Locking::None, Locking::None, Locking::None, Locking::Shared, Locking::Exclusive])
}
