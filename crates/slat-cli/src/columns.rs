//! Columns: what an experiment compares. Their runs take turns ([`turns`]), so that a drift of the
//! machine's speed affects all of them.

use crate::failure::Failure;
use crate::results::Outcome;
use crate::session::Session;
use crate::turns;

/// Runs that differ by chance alone, and what they are of.
pub(crate) struct Column<K, R> {
    pub(crate) of: K,
    pub(crate) runs: Vec<R>,
}

/// Does `nr_runs` runs of each of `columns`. Each `group` of them takes turns, after a run that is
/// not counted, and before the next group. `run` gets the number of the run, too; `outcome` makes the
/// experiment's outcome of all columns, of which some have no runs yet.
pub(crate) fn in_turns<K, R>(
    session: &Session,
    columns: Vec<K>,
    group: usize,
    nr_runs: u32,
    title: impl Fn(&K) -> String,
    mut run: impl FnMut(&K, u32) -> Result<R, Failure>,
    outcome: impl Fn(&[Column<K, R>]) -> Outcome,
) -> Result<Outcome, Failure> {
    let mut columns: Vec<Column<K, R>> = columns.into_iter().map(|of| Column { of, runs: Vec::new() }).collect();
    let progress = session.progress((columns.len() / group) as u64 * turns::nr_runs(nr_runs, group));
    for first in (0..columns.len()).step_by(group) {
        if turns::warms_up(nr_runs) {
            progress.begin(turns::WARM_UP.to_owned());
            run(&columns[first].of, 0)?;
            progress.step();
        }
        for number in 0..nr_runs {
            for which in turns::order(number as usize, group) {
                let column = &mut columns[first + which];
                progress.begin(title(&column.of));
                column.runs.push(run(&column.of, number)?);
                progress.step();
                session.so_far(outcome(&columns));
            }
        }
    }
    drop(progress);
    Ok(outcome(&columns))
}
