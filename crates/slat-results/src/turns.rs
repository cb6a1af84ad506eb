//! The order of runs that are compared: they take turns, and the order changes.

/// The places of `nr_columns` columns in the order of run number `run`. Another column begins each
/// run, and in every other run each column has another predecessor: so no column has the advantage
/// of its place.
pub fn order(run: usize, nr_columns: usize) -> impl Iterator<Item = usize> {
    let first = run % nr_columns.max(1);
    (0..nr_columns).map(move |turn| {
        let step = if run.is_multiple_of(2) { turn } else { nr_columns - turn };
        (first + step) % nr_columns
    })
}

/// What the progress shows in the run that is not counted.
pub const WARM_UP: &str = "warm-up";

/// How many runs there are, with the one that is not counted.
pub fn nr_runs(nr_runs: u32, nr_columns: usize) -> u64 {
    u64::from(nr_runs) * nr_columns as u64 + u64::from(warms_up(nr_runs))
}

/// Whether a run before the first is made and not counted: a process that has just started finds
/// its memory, its code and the CPUs' clocks cold. A single run is no comparison, so it needs none.
pub fn warms_up(nr_runs: u32) -> bool {
    nr_runs > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_column_has_each_place() {
        for nr_columns in 1..6 {
            let mut firsts = vec![0; nr_columns];
            for run in 0..2 * nr_columns {
                let order: Vec<usize> = order(run, nr_columns).collect();
                firsts[order[0]] += 1;
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..nr_columns).collect::<Vec<_>>(), "{order:?}");
            }
            assert!(firsts.iter().all(|&nr| nr == 2), "{firsts:?}");
        }
        assert_eq!([0, 1].map(|run| order(run, 3).collect::<Vec<_>>()), [[0, 1, 2], [1, 0, 2]]);
        assert_eq!(order(3, 0).count(), 0);
    }
}
