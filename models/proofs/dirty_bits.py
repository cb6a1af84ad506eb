"""The dirty log by dirty bits: leaves keep W, and D of a leaf says that it was written.

Any number of vCPUs, CPUs, harvests and pages of 4 KiB. Engine: `dirty/log.rs`, `harvest/log.rs`,
`second_stage/protect.rs` (clean_leaf), `vcpu/on_leaf.rs`, `vcpu/act.rs`.

A CPU sets D of a leaf, and caches it: from then on it writes without another look at the leaf. A harvest that
gets the log first visits the leaves and marks those with D; then it takes bits, clears D of the pages taken,
and flushes. A clear takes bits without a visit. A fault that makes a leaf dirty marks its page. When D is
cleared for the log a software bit (`was_dirty`) keeps it for the host.

`ByDirtyBits` has what tracking by D alone and by page-modification logs share (`modification_logs.py`).

Left out: zaps (`harvest_beside_zap.py`); huge leaves, which are write-protected in every mode; the summary of
the bitmap (`dirty_log.py`); formats whose CPUs set no D.
"""
import prover
from prover import And, If, Implies, Not, Or, put, put_where

OUT, GAVE, MARKS = range(3)                             # of a fault
UNBEGUN, VISITS, TAKES, FLUSHES, RETURNED = range(5)    # of a harvest
OFF, FLAGGED, ARMED, ON = range(4)                      # of the enabling


class ByDirtyBits:
    sorts = ['Fault', 'Harvest', 'Page', 'Cpu']
    letters = {'f': 'Fault', 'h': 'Harvest', 'g': 'Harvest', 'p': 'Page', 'c': 'Cpu'}
    fixed = {'page': (['Fault'], 'Page'), 'clears': (['Harvest'], 'bool'), 'initially_set': ([], 'bool')}
    state = {
        'present': (['Page'], 'bool'), 'writable': (['Page'], 'bool'), 'dirty': (['Page'], 'bool'),
        'was_dirty': (['Page'], 'bool'), 'bit': (['Page'], 'bool'), 'flag': ([], 'bool'),
        'tlb': (['Cpu', 'Page'], 'bool'),               # cached, with D
        'fpc': (['Fault'], 'int'),
        'hpc': (['Harvest'], 'int'), 'visited': (['Harvest', 'Page'], 'bool'),
        'passed': (['Harvest', 'Page'], 'bool'),
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

    def __init__(self, left_out=None):
        self.left_out = left_out

    def axioms(self, s):
        return {}

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
            'nothing flushed': And(s.all(lambda h, c: Not(s.flushed(h, c))),
                                   s.all(lambda c: Not(s.eflushed(c)))),
        }

    # What a write leaves behind besides the bit: D, or an entry in a CPU's log.
    def record(self, s, p):
        return And(s.present(p), s.dirty(p))

    # A flush makes a CPU drop what it has cached, and whatever it had begun.
    def flushes(self, s, c, is_meant):
        return {'tlb': put_where(s.tlb, lambda d, p: And(d == c, is_meant(p)), False)}

    def may_map(self, s, p):
        """A page that was zapped is in flight until the flush is over (`invalidation`)."""
        return Or(s.present(p), s.all(lambda c: Not(s.tlb(c, p))))

    # A fault.

    def step_make_dirty(self, s, f: 'Fault'):
        """vcpu/act.rs: install_at for a write; vcpu/on_leaf.rs: restore_to, set_marks"""
        p = s.page(f)
        then = OUT if self.left_out == 'fault-marks' else GAVE
        return And(s.fpc(f) == OUT, self.may_map(s, p), Not(And(s.present(p), s.writable(p), s.dirty(p)))), {
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
        return s.fpc(f) == MARKS, {'fpc': put(s.fpc, f, OUT), 'bit': put(s.bit, s.page(f), True)}

    # A harvest.

    def step_begin(self, s, h: 'Harvest'):
        """harvest/log.rs: get, clear"""
        held = lambda p: s.holds(s.taker(p), p)
        found = lambda p: And(s.unreported(p), Not(held(p)),
                              Or(s.bit(p), And(Not(s.clears(h)), self.record(s, p))))
        return s.hpc(h) == UNBEGUN, {'hpc': put(s.hpc, h, If(s.clears(h), TAKES, VISITS)),
                                     'due': put_where(s.due, lambda g, p: And(g == h, found(p)), True)}

    def step_take(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: take, take_masked"""
        return And(s.hpc(h) == TAKES, Not(s.passed(h, p)), s.bit(p)), {
            'bit': put(s.bit, p, False), 'holds': put(s.holds, (h, p), True),
            'passed': put(s.passed, (h, p), True),
            'taker': put(s.taker, p, h), 'due': put_where(s.due, lambda g, q: q == p, False)}

    def step_pass(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: take (the bit is clear)"""
        return And(s.hpc(h) == TAKES, Not(s.passed(h, p)),
                   Not(s.bit(p))), {'passed': put(s.passed, (h, p), True)}

    def step_clean(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: clean_leaf"""
        mine = Or(self.left_out == 'clean-what-was-taken', s.holds(h, p))
        keeps = self.left_out != 'keep-for-host'
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
        meant = lambda p: And(self.left_out != 'harvest-flushes', s.holds(h, p))
        return s.hpc(h) == FLUSHES, {'flushed': put(s.flushed, (h, c), True), **self.flushes(s, c, meant)}

    def step_return(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest returns, and the caller copies the pages"""
        over = True if self.left_out == 'flush-before-return' else s.all(lambda c: s.flushed(h, c))
        return And(s.hpc(h) == FLUSHES, over), {
            'hpc': put(s.hpc, h, RETURNED), 'holds': put_where(s.holds, lambda g, p: g == h, False),
            'unreported': put_where(s.unreported, lambda p: s.holds(h, p), False)}

    # Logging begins and ends.

    def step_publish_flag(self, s):
        """vm/region.rs: change_slot"""
        return s.epc() == OFF, {'flag': lambda: True, 'epc': lambda: FLAGGED}

    def step_enabling_cleans(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot, clean_leaf"""
        at = OFF if self.left_out == 'flag-before-clean' else FLAGGED
        stays = self.left_out == 'enabling-cleans'
        return And(s.epc() == at, Not(s.initially_set())), {
            'armed': put(s.armed, p, True), 'dirty': put(s.dirty, p, And(stays, s.dirty(p))),
            'was_dirty': put(s.was_dirty, p, Or(s.was_dirty(p), s.dirty(p)))}

    def step_enabling_sets(self, s, p: 'Page'):
        """slot/bitmap.rs: mark"""
        return And(s.epc() == FLAGGED, s.initially_set()), {
            'bit': put(s.bit, p, True), 'armed': put(s.armed, p, True)}

    def step_wipe(self, s, p: 'Page'):
        """slot/bitmap.rs: clear_all"""
        return And(s.epc() == OFF, s.bit(p)), {'bit': put(s.bit, p, False)}

    def step_all_armed(self, s):
        """vm/region.rs: begin_to_log"""
        return And(s.epc() == FLAGGED, s.all(lambda p: s.armed(p))), {'epc': lambda: ARMED}

    def step_enabling_flushes(self, s, c: 'Cpu'):
        """vm/region.rs: begin_to_log"""
        return And(s.epc() == ARMED, Not(s.initially_set())), {
            'eflushed': put(s.eflushed, c, True),
            **self.flushes(s, c, lambda p: self.left_out != 'enabling-flushes')}

    def step_enabled(self, s):
        """vm/region.rs: change_slot returns"""
        return And(s.epc() == ARMED, Or(s.initially_set(),
                                        s.all(lambda c: s.eflushed(c)))), {'epc': lambda: ON}

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

    def held(self, s, p):
        return s.holds(s.taker(p), p)

    def covered(self, s, p):
        """A write to the page is recorded, held, or about to be marked."""
        return Or(s.bit(p), self.record(s, p), self.held(s, p), s.holds(s.cleaner(p), p),
                  self.will_mark(s, p))

    def safe(self, s):
        return {
            'a write is recorded, held by a harvest, or about to be marked': s.all(lambda p: Implies(
                s.unreported(p), self.covered(s, p))),
            'a harvest reports what was recorded when it began, unless another took it': s.all(
                lambda h, p: Implies(
                s.hpc(h) >= FLUSHES, Not(s.due(h, p)))),
        }

    def inv_of_counters(self, s):
        return {
            'the flag is set from FLAGGED on': And(s.epc() >= OFF, s.epc() <= ON,
                s.flag() == (s.epc() >= FLAGGED)),
            'a fault is OUT, GAVE or MARKS': s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= MARKS)),
            'a harvest is UNBEGUN to RETURNED': s.all(
                lambda h: And(s.hpc(h) >= UNBEGUN, s.hpc(h) <= RETURNED)),
            'pages are armed after the flag': s.all(lambda p: Implies(s.armed(p), s.flag())),
            'all pages are armed from ARMED on': s.all(lambda p: Implies(s.epc() >= ARMED, s.armed(p))),
            'enabling flushes after all is armed': s.all(lambda c: Implies(s.eflushed(c), s.epc() >= ARMED)),
            'enabling has flushed all CPUs when it returns': s.all(lambda c: Implies(
                s.epc() == ON, Or(s.initially_set(), s.eflushed(c)))),
            'writes are counted after enabling': s.all(lambda p: Implies(s.unreported(p), s.epc() == ON)),
            'a harvest visits leaves after it began': s.all(lambda h, p: Implies(
                s.visited(h, p), s.hpc(h) >= VISITS)),
            'a harvest passes pages while it takes': s.all(lambda h, p: Implies(
                s.passed(h, p), s.hpc(h) >= TAKES)),
            'a harvest holds what it has passed, until it returns': s.all(lambda h, p: Implies(
                s.holds(h, p), And(s.passed(h, p), Or(s.hpc(h) == TAKES, s.hpc(h) == FLUSHES)))),
            'a harvest flushes after its turns': s.all(lambda h, c: Implies(
                s.flushed(h, c), s.hpc(h) >= FLUSHES)),
            'a harvest that flushes has cleaned all it holds': s.all(lambda h, p: Implies(
                And(s.hpc(h) == FLUSHES, s.holds(h, p)), s.cleaned(h, p))),
            'a harvest cleans what it has taken': s.all(lambda h, p: Implies(
                And(s.cleaned(h, p), s.hpc(h) != RETURNED), s.holds(h, p))),
            'a harvest must report what was written while the memslot logs': s.all(lambda h, p: Implies(
                s.due(h, p), And(s.epc() == ON, Not(self.held(s, p)), Not(s.passed(h, p)),
                                 s.hpc(h) >= VISITS))),
            'a leaf that was written says so to the host': s.all(lambda p: Implies(
                s.written(p), self.host_knows(s, p))),
            'what is cached with D says so to the host': s.all(lambda c, p: Implies(
                s.tlb(c, p), self.host_knows(s, p))),
        }

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

    sizes = {'Fault': 1, 'Harvest': 2, 'Page': 1, 'Cpu': 1}
    one = {**sizes, 'Harvest': 1}
    logging = {'epc': lambda: ON, 'flag': lambda: True, 'armed': lambda p: True, 'eflushed': lambda c: True,
               'bit': lambda p: True, 'present': lambda p: True, 'writable': lambda p: True}


class DirtyBits(ByDirtyBits):
    rules = {
        **ByDirtyBits.shared_rules,
        'visit-before-take': 'A harvest that gets the log takes bits before it has visited all leaves.',
        'mark-what-is-dirty': 'A visit does not mark a leaf that has D.',
    }

    def step_set_dirty(self, s, c: 'Cpu', p: 'Page'):
        """A CPU sets D of a leaf and caches it"""
        return And(s.present(p), s.writable(p), Not(s.dirty(p))), {
            'dirty': put(s.dirty, p, True), 'tlb': put(s.tlb, (c, p), True)}

    def step_visit(self, s, h: 'Harvest', p: 'Page'):
        """harvest/log.rs: mark_dirty_in_table"""
        marks = And(self.left_out != 'mark-what-is-dirty', self.record(s, p))
        return s.hpc(h) == VISITS, {
            'visited': put(s.visited, (h, p), True), 'bit': put(s.bit, p, Or(s.bit(p), marks))}

    def step_all_visited(self, s, h: 'Harvest'):
        """harvest/log.rs: collect returns"""
        over = True if self.left_out == 'visit-before-take' else s.all(lambda p: s.visited(h, p))
        return And(s.hpc(h) == VISITS, over), {'hpc': put(s.hpc, h, TAKES)}

    def inv(self, s):
        return {
            **self.inv_of_counters(s), **self.heart(s),
            'what a harvest must report is marked, or it is about to visit the leaf': s.all(
                lambda h, p: Implies(
                s.due(h, p), Or(s.bit(p), And(
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
    }


if __name__ == '__main__':
    prover.main(DirtyBits)
