//! Which chunks a change of a memslot replaces.

use super::{Change, MIN_SLOTS, Place, SlotEntry, SlotSet};

/// Chunks that become others.
pub(super) struct Edit<'c, B> {
    /// The first of them, and the first behind them.
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) removed: Option<u32>,
    pub(super) added: Option<&'c SlotEntry<B>>,
}

impl<B> Edit<'_, B> {
    /// How many of `nr_entries` the first of two chunks gets: half, but memslots that are created
    /// in the order of their addresses, or in the reverse, leave full chunks.
    pub(super) fn len_of_first(&self, old: &SlotSet<B>, nr_entries: usize) -> usize {
        let split = old.chunk(self.first).entries();
        let start = self.added.filter(|_| self.end - self.first == 1).map(|added| added.range.start);
        match (split, start) {
            ([.., last], Some(start)) if last.range.start < start => nr_entries - MIN_SLOTS,
            ([first, ..], Some(start)) if start < first.range.start => MIN_SLOTS,
            _ => nr_entries.div_ceil(2),
        }
    }
}

/// The edits that `change` of `old` consists of, in the order of their chunks. The memslot is at
/// `before`, if it is not new.
pub(super) fn edits<'c, B>(
    old: &SlotSet<B>,
    before: Option<Place>,
    change: &Change<'c, B>,
) -> [Option<Edit<'c, B>>; 2] {
    let removed = Some(change.id);
    let to = change.after.map(|after| (old.chunk_of(after.range.start), after));
    let insertion = to.map(|(to, after)| Edit { first: to, end: to + 1, removed: None, added: Some(after) });
    let Some(Place { chunk: from, .. }) = before else { return [None, insertion] };
    if let Some((to, after)) = to.filter(|&(to, _)| from.abs_diff(to) <= 1) {
        let (first, end) = (from.min(to), from.max(to) + 1);
        return [Some(Edit { first, end, removed, added: Some(after) }), None];
    }
    // Where too few stay, with a neighbour. That has not the new place: see above.
    let (mut first, mut end) = (from, from + 1);
    if old.chunk(from).len <= MIN_SLOTS && old.chunks.len() > 1 {
        if first > 0 { first -= 1 } else { end += 1 }
    }
    let removal = Some(Edit { first, end, removed, added: None });
    if to.is_some_and(|(to, _)| to < first) { [insertion, removal] } else { [removal, insertion] }
}
