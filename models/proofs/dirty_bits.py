"""The dirty log by dirty bits: leaves keep W, and D of a leaf says that it was written.

Any number of vCPUs, CPUs, harvests and pages of 4 KiB. Engine: `dirty/log.rs`, `harvest/log.rs`,
`second_stage/protect.rs` (clean_leaf), `vcpu/on_leaf.rs`, `vcpu/act.rs`.

A CPU sets D of a leaf, and caches it: from then on it writes without another look at the leaf. A harvest that
gets the log first visits the leaves: it reads them, and then marks those that had D. Then it takes bits, clears
D of the pages taken, and flushes. It skips words whose summary is clear. A clear takes the bits that it names,
without a visit. A fault that makes a leaf dirty marks its page. When D is
cleared for the log a software bit (`was_dirty`) keeps it for the host.

`ByDirtyBits` has what tracking by D alone and by page-modification logs share (`modification_logs.py`).

Any call may set the summary of a word at any time here: that a call which marks does so is in `dirty_log.py`.
Until then, and while a clear has cleared the summary, a harvest may miss the mark.

Left out: zaps (`harvest_beside_zap.py`); huge leaves, which are write-protected in every mode; formats whose
CPUs set no D.
"""
import prover
from log_steps import ARMED, FLAGGED, OFF, ON, Logging, inv_of_enabling
from prover import And, If, Implies, Not, Or, put, put_where

OUT, GAVE, MARKS = range(3)                             # of a fault
UNBEGUN, VISITS, TAKES, FLUSHES, RETURNED = range(5)    # of a harvest


class ByDirtyBits(Logging):
    sorts = ['Fault', 'Harvest', 'Page', 'Word', 'Cpu']
    letters = {'f': 'Fault', 'h': 'Harvest', 'g': 'Harvest', 'p': 'Page', 'w': 'Word', 'c': 'Cpu'}
    fixed = {
        'page': (['Fault'], 'Page'), 'word': (['Page'], 'Word'), 'clears': (['Harvest'], 'bool'),
        'named': (['Harvest', 'Page'], 'bool'), 'initially_set': ([], 'bool'),
    }
    state = {
        'present': (['Page'], 'bool'), 'writable': (['Page'], 'bool'), 'dirty': (['Page'], 'bool'),
        'was_dirty': (['Page'], 'bool'), 'bit': (['Page'], 'bool'), 'summary': (['Word'], 'bool'),
        'flag': ([], 'bool'),
        'tlb': (['Cpu', 'Page'], 'bool'),               # cached, with D
        'fpc': (['Fault'], 'int'),
        'hpc': (['Harvest'], 'int'), 'visited': (['Harvest', 'Page'], 'bool'),
        'passed': (['Harvest', 'Page'], 'bool'),
        'owes': (['Harvest', 'Word'], 'bool'),          # it has marked, and not set the summary
        'emptied': (['Harvest', 'Word'], 'bool'),       # it has cleared the summary
        'holds': (['Harvest', 'Page'], 'bool'), 'cleaned': (['Harvest', 'Page'], 'bool'),
        'flushed': (['Harvest', 'Cpu'], 'bool'),
        'epc': ([], 'int'), 'armed': (['Page'], 'bool'), 'eflushed': (['Cpu'], 'bool'),
        # Ghosts: written and not reported; what a harvest must report; that the guest wrote the page; the
        # fault that made the leaf dirty last; the harvests that took the bit, and cleared D, last.
        'unreported': (['Page'], 'bool'), 'due': (['Harvest', 'Page'], 'bool'), 'written': (['Page'], 'bool'),
        'giver': (['Page'], 'Fault'), 'taker': (['Page'], 'Harvest'), 'cleaner': (['Page'], 'Harvest'),
    }
    shared_rules = {
        'clean-what-was-taken': 'A harvest clears D of pages that it has not taken.',
        'harvest-flushes': 'A harvest does not flush.',
        'flush-before-return': 'A harvest returns before its flush is over.',
        'enabling-flushes': 'Enabling does not flush.',
        'keep-for-host': 'A harvest that clears D does not set the software bit.',
    }

    def init(self, s):
        return {
            'nothing is marked': s.all(lambda p: And(
                Not(s.bit(p)), Not(s.unreported(p)), Not(s.armed(p)), Not(s.present(p)), Not(s.written(p)))),
            'nothing is cached': s.all(lambda c, p: Not(s.tlb(c, p))),
            'no memslot logs': And(Not(s.flag()), s.epc() == OFF),
            'no fault': s.all(lambda f: s.fpc(f) == OUT),
            'no harvest': s.all(lambda h: s.hpc(h) == UNBEGUN),
            'nothing taken': s.all(lambda h, p: And(
                Not(s.holds(h, p)), Not(s.cleaned(h, p)), Not(s.due(h, p)), Not(s.visited(h, p)),
                Not(s.passed(h, p)))),
            'no summary by a harvest': s.all(lambda h, w: And(Not(s.owes(h, w)), Not(s.emptied(h, w)))),
            'nothing flushed': And(s.all(lambda h, c: Not(s.flushed(h, c))),
                                   s.all(lambda c: Not(s.eflushed(c)))),
        }

    # What a write leaves behind besides the bit: D, or an entry in a CPU's log.
    def record(self, s, p):
        return And(s.present(p), s.dirty(p))

    def marks(self, s, p, by=None):
        """The bit set. Until the call has set the summary, another harvest may skip the word."""
        skips = lambda h, q: And(q == p, Not(s.bit(p)), Not(self.finds(s, h, p)), by is None or h != by)
        return {'bit': put(s.bit, p, True), 'due': put_where(s.due, skips, False)}

    # A flush makes a CPU drop what it has cached, and whatever it had begun.
    def flushes(self, s, c, is_meant):
        return {'tlb': put_where(s.tlb, lambda d, p: And(d == c, is_meant(p)), False)}

    def may_map(self, s, p):
        """A page that was zapped is in flight until the flush is over (`invalidation`)."""
        return Or(s.present(p), s.all(lambda c: Not(s.tlb(c, p))))

    # A fault.

    def step_make_dirty(self, s, f: 'Fault'):
        """vcpu/act.rs: install_at for a write; vcpu/on_leaf.rs: restore_to, set_marks (perhaps after a CPU)"""
        p = s.page(f)
        then = OUT if self.without('fault-marks') else GAVE
        return And(s.fpc(f) == OUT, self.may_map(s, p)), {
            'present': put(s.present, p, True), 'writable': put(s.writable, p, True),
            'dirty': put(s.dirty, p, True),
            'was_dirty': put(s.was_dirty, p, And(s.present(p), s.was_dirty(p))),
            'giver': put(s.giver, p, f), 'fpc': put(s.fpc, f, then)}

    def step_prefault(self, s, p: 'Page'):
        """vcpu/act.rs: install_at for a read, or a prefault"""
        return And(Not(s.present(p)), self.may_map(s, p)), {
            'present': put(s.present, p, True), 'writable': put(s.writable, p, True),
            'dirty': put(s.dirty, p, False),
            'was_dirty': put(s.was_dirty, p, False)}

    def step_read_flag(self, s, f: 'Fault'):
        """dirty/log.rs: mark_if_logging"""
        return s.fpc(f) == GAVE, {'fpc': put(s.fpc, f, If(s.flag(), MARKS, OUT))}

    def step_find_marked(self, s, f: 'Fault'):
        """slot/bitmap.rs: mark_page"""
        return And(s.fpc(f) == MARKS, s.bit(s.page(f))), {'fpc': put(s.fpc, f, OUT)}

    def step_set_bit(self, s, f: 'Fault'):
        """slot/bitmap.rs: mark_page"""
        return s.fpc(f) == MARKS, {'fpc': put(s.fpc, f, OUT), **self.marks(s, s.page(f))}

    def step_summarize(self, s, w: 'Word'):
        """slot/bitmap.rs: summarize"""
        return True, {'summary': put(s.summary, w, True)}

    # A harvest.

    def takes(self, s, h, p):
        return Or(Not(s.clears(h)), s.named(h, p))

    def step_begin(self, s, h: 'Harvest'):
        """harvest/log.rs: get, clear"""
        held = lambda p: s.holds(s.taker(p), p)
        shown = lambda p: Or(s.clears(h), s.summary(s.word(p)))
        found = lambda p: And(s.unreported(p), Not(held(p)), self.takes(s, h, p), Or(
            And(s.bit(p), shown(p)), And(Not(s.bit(p)), Not(s.clears(h)), self.record(s, p))))
        return s.hpc(h) == UNBEGUN, {'hpc': put(s.hpc, h, If(s.clears(h), TAKES, VISITS)),
                                     'due': put_where(s.due, lambda g, p: And(g == h, found(p)), True)}

    def step_skip(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: skip_clean, take"""
        may = And(s.hpc(h) == TAKES, Not(s.clears(h)), Not(s.summary(w)), Not(s.emptied(h, w)))
        return may, {'passed': put_where(s.passed, lambda g, p: And(g == h, s.word(p) == w), True)}

    def step_clear_summary(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: take, take_masked"""
        others = lambda g, p: And(g != h, s.word(p) == w, s.bit(p), Not(s.clears(g)), Not(s.owes(g, w)))
        return And(s.hpc(h) == TAKES, Or(s.clears(h), s.summary(w)), Not(s.emptied(h, w))), {
            'summary': put(s.summary, w, False), 'emptied': put(s.emptied, (h, w), True),
            'due': put_where(s.due, others, False)}

    def step_take(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: take, take_masked"""
        may = And(self.takes(s, h, p), Or(s.clears(h), s.emptied(h, s.word(p))))
        return And(s.hpc(h) == TAKES, Not(s.passed(h, p)), s.bit(p), may), {
            'bit': put(s.bit, p, False), 'holds': put(s.holds, (h, p), True),
            'passed': put(s.passed, (h, p), True),
            'taker': put(s.taker, p, h), 'due': put_where(s.due, lambda g, q: q == p, False)}

    def step_pass(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: take, take_masked (the bit is clear, or not named)"""
        return And(s.hpc(h) == TAKES, Not(s.passed(h, p)), Or(Not(s.bit(p)), Not(self.takes(s, h, p)))), {
            'passed': put(s.passed, (h, p), True)}

    def step_clean(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: clean_leaf"""
        mine = Or(self.without('clean-what-was-taken'), s.holds(h, p))
        keeps = not self.without('keep-for-host')
        return And(s.hpc(h) == TAKES, mine), {
            'cleaned': put(s.cleaned, (h, p), s.holds(h, p)), 'dirty': put(s.dirty, p, False),
            'cleaner': put(s.cleaner, p, If(s.dirty(p), h, s.cleaner(p))),
            'due': put_where(s.due, lambda g, q: q == p, False),
            'was_dirty': put(s.was_dirty, p, Or(s.was_dirty(p), And(keeps, s.dirty(p))))}

    def step_turns_are_over(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest"""
        return And(s.hpc(h) == TAKES, s.all(lambda p: And(
            s.passed(h, p), Implies(s.holds(h, p), s.cleaned(h, p))))), {'hpc': put(s.hpc, h, FLUSHES)}

    def step_flush(self, s, h: 'Harvest', c: 'Cpu'):
        """harvest/log.rs: harvest (flush_cpus)"""
        meant = lambda p: And(not self.without('harvest-flushes'), s.holds(h, p))
        return s.hpc(h) == FLUSHES, {'flushed': put(s.flushed, (h, c), True), **self.flushes(s, c, meant)}

    def step_return(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest returns, and the caller copies the pages (it flushes if there are any)"""
        over = Or(self.without('flush-before-return'), s.all(lambda c: s.flushed(h, c)),
                  Not(s.some(lambda p: s.holds(h, p))))
        return And(s.hpc(h) == FLUSHES, over), self.returns(s, h, RETURNED)

    # Logging begins and ends.

    def step_wipe_summary(self, s, w: 'Word'):
        """slot/bitmap.rs: clear_all"""
        return s.epc() == OFF, {'summary': put(s.summary, w, False)}

    def step_enabling_cleans(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot, clean_leaf"""
        at = OFF if self.without('flag-before-clean') else FLAGGED
        stays = self.without('enabling-cleans')
        return And(s.epc() == at, Not(s.initially_set())), {
            'armed': put(s.armed, p, True), 'dirty': put(s.dirty, p, And(stays, s.dirty(p))),
            'was_dirty': put(s.was_dirty, p, Or(s.was_dirty(p), s.dirty(p)))}

    def step_enabling_flushes(self, s, c: 'Cpu'):
        """vm/region.rs: begin_to_log"""
        return And(s.epc() == ARMED, Not(s.initially_set())), {
            'eflushed': put(s.eflushed, c, True),
            **self.flushes(s, c, lambda p: not self.without('enabling-flushes'))}

    def step_disable(self, s):
        """vm/region.rs: change_slot"""
        return s.epc() == ON, {'flag': lambda: False, 'epc': lambda: OFF, 'armed': lambda p: False,
                               'eflushed': lambda c: False, 'unreported': lambda p: False, 'due': lambda h,
                               p: False}

    # The guest.

    def step_fill_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU caches a dirty leaf"""
        return And(s.present(p), s.writable(p), s.dirty(p)), {'tlb': put(s.tlb, (c, p), True)}

    def step_evict_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU drops a leaf, or another operation flushes it"""
        return s.tlb(c, p), {'tlb': put(s.tlb, (c, p), False)}

    def step_guest_write(self, s, c: 'Cpu', p: 'Page'):
        """A CPU writes through a cached leaf"""
        return s.tlb(c, p), {'unreported': put(s.unreported, p, Or(s.unreported(p), s.epc() == ON)),
                             'written': put(s.written, p, True)}

    # What is promised.

    def will_mark(self, s, p):
        """The fault that made the leaf dirty last is about to mark the page."""
        return And(s.fpc(s.giver(p)) >= GAVE, s.page(s.giver(p)) == p)

    def covered(self, s, p):
        """A write to the page is recorded, held, or about to be marked."""
        return Or(s.bit(p), self.record(s, p), self.held(s, p), s.holds(s.cleaner(p), p),
                  self.will_mark(s, p))

    def safe(self, s):
        return {
            'a write is recorded, held by a harvest, or about to be marked': s.all(lambda p: Implies(
                s.unreported(p), self.covered(s, p))),
            'a harvest reports what was recorded when it began, unless another call took or marks it': s.all(
                lambda h, p: Implies(
                s.hpc(h) >= FLUSHES, Not(s.due(h, p)))),
        }

    def inv_of_counters(self, s):
        return {
            **inv_of_enabling(s),
            'a fault is OUT, GAVE or MARKS': s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= MARKS)),
            'a harvest is UNBEGUN to RETURNED': s.all(
                lambda h: And(s.hpc(h) >= UNBEGUN, s.hpc(h) <= RETURNED)),
            'a harvest visits leaves after it began': s.all(lambda h, p: Implies(
                s.visited(h, p), s.hpc(h) >= VISITS)),
            'a harvest passes pages while it takes': s.all(lambda h, p: Implies(
                s.passed(h, p), s.hpc(h) >= TAKES)),
            'a harvest holds what it has passed, until it returns': s.all(lambda h, p: Implies(
                s.holds(h, p), And(s.passed(h, p), Or(s.hpc(h) == TAKES, s.hpc(h) == FLUSHES)))),
            'a harvest sets the summary while it visits': s.all(lambda h, w: Implies(
                s.owes(h, w), s.hpc(h) == VISITS)),
            'a harvest clears the summary while it takes': s.all(lambda h, w: Implies(
                s.emptied(h, w), s.hpc(h) >= TAKES)),
            'a harvest flushes after its turns': s.all(lambda h, c: Implies(
                s.flushed(h, c), s.hpc(h) >= FLUSHES)),
            'a harvest that flushes has cleaned all it holds': s.all(lambda h, p: Implies(
                And(s.hpc(h) == FLUSHES, s.holds(h, p)), s.cleaned(h, p))),
            'a harvest cleans what it has taken': s.all(lambda h, p: Implies(
                And(s.cleaned(h, p), s.hpc(h) != RETURNED), s.holds(h, p))),
            'a harvest must report what was written while the memslot logs': s.all(lambda h, p: Implies(
                s.due(h, p), And(s.epc() == ON, Not(self.held(s, p)), Not(s.passed(h, p)),
                                 self.takes(s, h, p), s.hpc(h) >= VISITS))),
            'a harvest finds the marks that it must report': s.all(lambda h, p: Implies(
                And(s.due(h, p), s.bit(p)), self.finds(s, h, p))),
            'a leaf that was written says so to the host': s.all(lambda p: Implies(
                s.written(p), self.host_knows(s, p))),
            'what is cached with D says so to the host': s.all(lambda c, p: Implies(
                s.tlb(c, p), self.host_knows(s, p))),
        }

    def finds(self, s, h, p):
        """The harvest does not skip the page's word."""
        w = s.word(p)
        return Or(s.clears(h), s.summary(w), s.owes(h, w), s.emptied(h, w))

    def host_knows(self, s, p):
        """The leaf says for the host that it was written."""
        return And(s.present(p), Or(s.dirty(p), s.was_dirty(p)))

    def counts(self, s, c, p):
        """Writes of the CPU to the page are logged by now."""
        return Or(s.eflushed(c), And(s.initially_set(), s.armed(p)))

    def heart(self, s):
        """Some thread marks or reports what is dirty, or is cached so."""
        dirty = lambda p: And(s.present(p), s.dirty(p))
        return {
            'what is dirty is recorded, about to be cleaned, or about to be marked': s.all(lambda p: Implies(
                And(s.armed(p), dirty(p)),
                Or(s.bit(p), self.record(s, p), And(self.held(s, p), Not(s.cleaned(s.taker(p), p))),
                   self.will_mark(s, p)))),
            'what is cached with D is recorded, about to be flushed, or about to be marked': s.all(
                lambda c, p: Implies(
                    And(self.counts(s, c, p), s.tlb(c, p)),
                    Or(s.bit(p), self.record(s, p), self.will_mark(s, p),
                       And(self.held(s, p), Not(s.flushed(s.taker(p), c))),
                       And(s.holds(s.cleaner(p), p), Not(s.flushed(s.cleaner(p), c)))))),
        }

    sizes = {'Fault': 1, 'Harvest': 2, 'Page': 1, 'Word': 1, 'Cpu': 1}
    one = {**sizes, 'Harvest': 1}
    logging = {'epc': lambda: ON, 'flag': lambda: True, 'armed': lambda p: True, 'eflushed': lambda c: True,
               'bit': lambda p: True, 'present': lambda p: True, 'writable': lambda p: True}


class DirtyBits(ByDirtyBits):
    # A visit has read D of the leaf, and not marked the page yet.
    state = {**ByDirtyBits.state, 'found': (['Harvest', 'Page'], 'bool')}
    rules = {
        **ByDirtyBits.shared_rules,
        'visit-before-take': 'A harvest that gets the log takes bits before it has visited all leaves.',
        'mark-what-is-dirty': 'A visit does not mark a leaf that has D.',
        'summary-before-take': 'A harvest takes bits before it has set the summary of what it has marked.',
    }

    def init(self, s):
        return {**super().init(s), 'no visit': s.all(lambda h, p: Not(s.found(h, p)))}

    def step_set_dirty(self, s, c: 'Cpu', p: 'Page'):
        """A CPU sets D of a leaf and caches it"""
        return And(s.present(p), s.writable(p), Not(s.dirty(p))), {
            'dirty': put(s.dirty, p, True), 'tlb': put(s.tlb, (c, p), True)}

    def step_visit(self, s, h: 'Harvest', p: 'Page'):
        """harvest/log.rs: mark_dirty_in_table (is_dirty)"""
        is_dirty = And(not self.without('mark-what-is-dirty'), self.record(s, p))
        return s.hpc(h) == VISITS, {
            'visited': put(s.visited, (h, p), True), 'found': put(s.found, (h, p), Or(s.found(h, p), is_dirty))}

    def step_visit_finds_marked(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: mark (has)"""
        return And(s.found(h, p), s.bit(p)), {'found': put(s.found, (h, p), False)}

    def step_visit_marks(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: mark (set)"""
        return s.found(h, p), {
            **self.marks(s, p, h), 'found': put(s.found, (h, p), False),
            'owes': put(s.owes, (h, s.word(p)), True)}

    def step_visit_summarizes(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: summarize"""
        return s.owes(h, w), {'summary': put(s.summary, w, True), 'owes': put(s.owes, (h, w), False)}

    def step_all_visited(self, s, h: 'Harvest'):
        """harvest/log.rs: collect returns"""
        every = s.all(lambda p: And(s.visited(h, p), Not(s.found(h, p))))
        over = And(Or(self.without('visit-before-take'), every),
                   Or(self.without('summary-before-take'), s.all(lambda w: Not(s.owes(h, w)))))
        return And(s.hpc(h) == VISITS, over), {'hpc': put(s.hpc, h, TAKES)}

    def inv(self, s):
        return {
            **self.inv_of_counters(s), **self.heart(s),
            'a harvest marks what it has found dirty while it visits': s.all(lambda h, p: Implies(
                s.found(h, p), And(s.visited(h, p), s.hpc(h) == VISITS))),
            'what a harvest must report is marked, or it is about to visit the leaf or to mark the page': s.all(
                lambda h, p: Implies(s.due(h, p), Or(s.bit(p), s.found(h, p), And(
                    self.record(s, p), s.hpc(h) == VISITS, Not(s.visited(h, p)))))),
        }

    traces = {
        'clean-what-was-taken': {'sizes': ByDirtyBits.one,
                                 'start': {**ByDirtyBits.logging, 'bit': lambda p: False}},
        'harvest-flushes': {'sizes': ByDirtyBits.one, 'start': ByDirtyBits.logging},
        'flush-before-return': {'sizes': ByDirtyBits.one, 'start': ByDirtyBits.logging},
        'enabling-flushes': {'sizes': ByDirtyBits.one, 'start': {}},
        'visit-before-take': {'sizes': ByDirtyBits.one,
                              'start': {**ByDirtyBits.logging, 'bit': lambda p: False}},
        'mark-what-is-dirty': {'sizes': ByDirtyBits.one,
                               'start': {**ByDirtyBits.logging, 'bit': lambda p: False}},
        'summary-before-take': {'sizes': ByDirtyBits.one,
                                'start': {**ByDirtyBits.logging, 'bit': lambda p: False}},
    }


if __name__ == '__main__':
    prover.main(DirtyBits)
