"""The dirty log by page-modification logs: a CPU writes the page into a log of its own before it sets D.

Any number of CPUs, log entries, vCPUs, harvests and pages. Engine: `harvest/log.rs` (collect),
`harvest/mark.rs` (mark_written). The drain is the host's (`Host::drain_modification_logs`).

A harvest that gets the log drains: it notes which entries each CPU has, and makes it drop what it has begun of
them; it marks the pages of these entries, and only then removes them. An entry whose D was not set in the end
is harmless. D of a leaf is no record here: an entry is.

Shared with `dirty_bits.py`: faults, taking bits, clearing D, flushing, enabling.

Left out: logs of limited length; a CPU's own exit (`Vcpu::log_modifications` marks as a drain does).
"""
import prover
from prover import And, If, Implies, Not, Or, put, put_where
from dirty_bits import TAKES, VISITS, ByDirtyBits

UNUSED, LOGGED, REMOVED = range(3)                      # of an entry
UNREAD, LOGS, MARKED = range(3)                         # of a drain at an entry


class ModificationLogs(ByDirtyBits):
    sorts = [*ByDirtyBits.sorts, 'Entry']
    letters = {**ByDirtyBits.letters, 'e': 'Entry'}
    fixed = {**ByDirtyBits.fixed, 'cpu': (['Entry'], 'Cpu'), 'of_page': (['Entry'], 'Page')}
    state = {
        **ByDirtyBits.state,
        'log': (['Entry'], 'int'), 'begun': (['Entry'], 'bool'),        # logged, and D is about to be set
        'counted': (['Harvest', 'Cpu'], 'bool'), 'noted': (['Harvest', 'Entry'], 'bool'),
        'kicked': (['Harvest', 'Cpu'], 'bool'),
        'drain': (['Harvest', 'Entry'], 'int'),
        # Ghosts: whether a CPU set D of the leaf last, and its entry.
        'by_cpu': (['Page'], 'bool'), 'setter': (['Page'], 'Entry'),
    }
    rules = {
        **ByDirtyBits.shared_rules,
        'log-before-dirty': 'A CPU sets D, and writes its log later.',
        'drain-makes-cpus-start-over': 'A drain lets CPUs set D of entries that they have logged before.',
        'mark-what-was-noted': 'A drain removes entries that came after the CPU has started over.',
        'keep-until-marked': 'A drain removes an entry before it has marked the page.',
        'drain-before-take': 'A harvest takes bits before its drain is over.',
        'fault-marks': 'A fault that makes a leaf dirty does not mark its page.',
        'enabling-cleans': 'Enabling does not clear D.',
        'flag-before-clean': 'Enabling clears D before it publishes the flag.',
    }

    def init(self, s):
        return {
            **super().init(s),
            'no entry': s.all(lambda e: And(s.log(e) == UNUSED, Not(s.begun(e)))),
            'no drain': s.all(lambda h, e: And(Not(s.noted(h, e)), s.drain(h, e) == UNREAD)),
            'no CPU kicked': s.all(lambda h, c: And(Not(s.counted(h, c)), Not(s.kicked(h, c)))),
        }

    def record(self, s, p):
        e = s.setter(p)
        return And(s.present(p), s.dirty(p), s.by_cpu(p), s.log(e) == LOGGED, s.of_page(e) == p)

    def flushes(self, s, c, is_meant):
        return {**super().flushes(s, c, is_meant),
                'begun': put_where(s.begun, lambda e: s.cpu(e) == c, False)}

    def step_make_dirty(self, s, f: 'Fault'):
        """vcpu/act.rs: install_at for a write; vcpu/on_leaf.rs: restore_to, set_marks"""
        guard, updates = super().step_make_dirty(s, f)
        p = s.page(f)
        return guard, {**updates, 'by_cpu': put(s.by_cpu, p, And(s.by_cpu(p), s.present(p), s.dirty(p)))}

    # A CPU writes to a leaf without D.

    def may_set(self, s, e):
        p = s.of_page(e)
        return And(s.present(p), s.writable(p), Not(s.dirty(p)))

    def step_log(self, s, e: 'Entry'):
        """A CPU writes the page into its log, since it has read a leaf without D"""
        if self.without('log-before-dirty'):
            return And(s.log(e) == UNUSED, s.setter(s.of_page(e)) == e), {'log': put(s.log, e, LOGGED)}
        return s.log(e) == UNUSED, {
            'log': put(s.log, e, LOGGED), 'begun': put(s.begun, e, True)}

    def step_set_dirty(self, s, e: 'Entry'):
        """A CPU sets D of a leaf and caches it"""
        p = s.of_page(e)
        at = s.log(e) == UNUSED if self.without('log-before-dirty') else s.begun(e)
        return And(at, self.may_set(s, e)), {
            'begun': put(s.begun, e, False), 'dirty': put(s.dirty, p, True),
            'tlb': put(s.tlb, (s.cpu(e), p), True), 'by_cpu': put(s.by_cpu, p, True),
            'setter': put(s.setter, p, e)}

    # A drain.

    def step_note(self, s, h: 'Harvest', c: 'Cpu'):
        """host.rs: drain_modification_logs (how many entries there are)"""
        is_noted = lambda g, e: And(g == h, s.cpu(e) == c, s.log(e) == LOGGED)
        return And(s.hpc(h) == VISITS, Not(s.counted(h, c))), {
            'counted': put(s.counted, (h, c), True), 'noted': put_where(s.noted, is_noted, True)}

    def step_kick(self, s, h: 'Harvest', c: 'Cpu'):
        """host.rs: drain_modification_logs (each CPU starts over what it has begun)"""
        dropped = lambda e: And(s.cpu(e) == c, s.noted(h, e), not self.without('drain-makes-cpus-start-over'))
        return And(s.hpc(h) == VISITS, s.counted(h, c), Not(s.kicked(h, c))), {
            'kicked': put(s.kicked, (h, c), True), 'begun': put_where(s.begun, dropped, False)}

    def step_drain_entry(self, s, h: 'Harvest', e: 'Entry'):
        """harvest/mark.rs: mark_written (reads the flag)"""
        any_entry = And(self.without('mark-what-was-noted'), s.kicked(h, s.cpu(e)))
        removed = REMOVED if self.without('keep-until-marked') else LOGGED
        may = Or(And(s.noted(h, e), s.kicked(h, s.cpu(e))), And(any_entry, s.log(e) == LOGGED))
        return And(s.hpc(h) == VISITS, may, s.drain(h, e) == UNREAD), {
            'drain': put(s.drain, (h, e), If(s.flag(), LOGS, MARKED)),
            'log': put(s.log, e, If(s.log(e) == LOGGED, removed, s.log(e)))}

    def step_mark_entry(self, s, h: 'Harvest', e: 'Entry'):
        """harvest/mark.rs: mark_written (mark_page)"""
        p = s.of_page(e)
        return And(s.hpc(h) == VISITS, s.drain(h, e) == LOGS), {
            'drain': put(s.drain, (h, e), MARKED), **self.marks(s, p, h),
            'owes': put(s.owes, (h, s.word(p)), Or(s.owes(h, s.word(p)), Not(s.bit(p))))}

    def step_summarize_entry(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: summarize"""
        return s.owes(h, w), {'summary': put(s.summary, w, True), 'owes': put(s.owes, (h, w), False)}

    def step_remove_entry(self, s, h: 'Harvest', e: 'Entry'):
        """host.rs: drain_modification_logs (an entry that was marked)"""
        return And(s.hpc(h) == VISITS, s.drain(h, e) == MARKED,
                   s.log(e) == LOGGED), {'log': put(s.log, e, REMOVED)}

    def step_drained(self, s, h: 'Harvest'):
        """harvest/log.rs: collect returns"""
        over = And(s.all(lambda c: s.kicked(h, c)), s.all(lambda w: Not(s.owes(h, w))),
                   s.all(lambda e: Implies(s.noted(h, e), s.log(e) == REMOVED)))
        return And(s.hpc(h) == VISITS, Or(over, self.without('drain-before-take'))), {
            'hpc': put(s.hpc, h, TAKES)}

    # What is promised.

    def inv(self, s):
        return {**self.inv_of_counters(s), **self.heart(s), **self.inv_of_drains(s)}

    def inv_of_drains(self, s):
        recent = lambda e: And(s.setter(s.of_page(e)) == e, s.by_cpu(s.of_page(e)), s.dirty(s.of_page(e)),
                               s.present(s.of_page(e)))
        covered = lambda p: Or(s.bit(p), And(self.held(s, p), Not(s.cleaned(s.taker(p), p))))
        return {
            'an entry is UNUSED, LOGGED or REMOVED': s.all(
                lambda e: And(s.log(e) >= UNUSED, s.log(e) <= REMOVED)),
            'a drain reads an entry before it marks it': s.all(lambda h, e: And(
                s.drain(h, e) >= UNREAD, s.drain(h, e) <= MARKED,
                Implies(s.drain(h, e) != UNREAD, And(s.noted(h, e), s.kicked(h, s.cpu(e)))))),
            'a drain makes CPUs start over after it has noted their entries': s.all(lambda h, c: And(
                Implies(s.kicked(h, c), s.counted(h, c)), Implies(s.counted(h, c), s.hpc(h) >= VISITS))),
            'a drain notes entries that are in the log of a CPU': s.all(
                lambda h, e: Implies(s.noted(h, e), And(s.log(e) >= LOGGED, s.counted(h, s.cpu(e))))),
            'a CPU has started over what a drain marks': s.all(
                lambda h, e: Implies(And(s.noted(h, e), s.kicked(h, s.cpu(e))), Not(s.begun(e)))),
            'a CPU sets D only of what it has logged': s.all(lambda e: Implies(
                s.begun(e), s.log(e) == LOGGED)),
            'D that a CPU has set is of a page of its entry': s.all(lambda p: Implies(
                And(s.present(p), s.dirty(p), s.by_cpu(p)), And(
                    s.of_page(s.setter(p)) == p, s.log(s.setter(p)) >= LOGGED, Not(s.begun(s.setter(p)))))),
            'the page of an entry that a drain has marked is marked, or about to be cleaned': s.all(
                lambda h, e: Implies(
                And(s.drain(h, e) == MARKED, recent(e), s.armed(s.of_page(e))), covered(s.of_page(e)))),
            'what a harvest must report is marked, or its entry will be': s.all(lambda h, p: Implies(
                s.due(h, p), Or(s.bit(p), And(
                    self.record(s, p), s.hpc(h) == VISITS, s.drain(h, s.setter(p)) != MARKED, Or(
                        Not(s.counted(h, s.cpu(s.setter(p)))), s.noted(h, s.setter(p)))))))
        }

    sizes = {**ByDirtyBits.sizes, 'Entry': 2}
    one, two_harvests = {**sizes, 'Harvest': 1, 'Entry': 1}, {**sizes, 'Entry': 1}
    clean = {**ByDirtyBits.logging, 'bit': lambda p: False}
    traces = {
        'clean-what-was-taken': {'sizes': one, 'start': clean},
        'harvest-flushes': {'sizes': one, 'start': ByDirtyBits.logging},
        'flush-before-return': {'sizes': one, 'start': ByDirtyBits.logging},
        'enabling-flushes': {'sizes': one, 'start': {}},
        'log-before-dirty': {'sizes': one, 'start': clean},
        'drain-makes-cpus-start-over': {'sizes': one, 'start': clean},
        'mark-what-was-noted': {'sizes': one, 'start': clean},
        'keep-until-marked': {'sizes': two_harvests, 'start': clean},
        'drain-before-take': {'sizes': one, 'start': clean},
        'fault-marks': {'sizes': one, 'start': clean},
        'enabling-cleans': {'sizes': one, 'start': {}},
        'flag-before-clean': {'sizes': one, 'start': {}},
    }


if __name__ == '__main__':
    prover.main(ModificationLogs)
