"""The split of a pinned leaf with break before make, which any thread finishes. Any number of threads, page-table pages
and CPUs, and one PTE.

Protocol: docs/protocols/pinned.md. Engine: second_stage/{split,broken}.rs.

No fault would bring a pinned leaf back, so its split is never cancelled: a thread that finds the PTE broken flushes,
too, and links the page-table page. Meanwhile another thread may have linked it. Then it may be unlinked and freed, the
leaf may be mapped again, and the same page-table page may be used for the next split of the same leaf, which that flush
does not serve. So each split takes a number when it has its page-table page, before it breaks the leaf, and a thread
links only if no number was taken since. The thread that has broken the leaf does the same.

A page-table page is freed only when no guard is open that has found it (`epochs.py`).

Left out: what the parts map; page-table pages above, with which the PTE may be unlinked (it is empty then). An
unlinking takes a number, too; the proof does not need it.
"""
import prover
from prover import And, Implies, Not, Or, Protocol, put
from starts import at, run

LEAF, BROKEN, TABLE, EMPTY = range(4)                   # the PTE
OUT, HAS, NUMBERED, READ, SAW, DONE = range(6)          # a thread. READ: its guard is open, before the counter is read
FREE, HELD, NAMED, UNLINKED = range(4)                  # a page-table page. NAMED: the PTE names it


class PinnedSplit(Protocol):
    sorts = ['Thread', 'Table', 'Cpu']
    letters = {'t': 'Thread', 'u': 'Thread', 'd': 'Table', 'c': 'Cpu'}
    # Whether the thread splits, or finishes the split of another.
    fixed = {'splits': (['Thread'], 'bool')}
    state = {
        'kind': ([], 'int'), 'down': ([], 'Table'), 'counter': ([], 'int'),
        'tpc': (['Thread'], 'int'), 'saw': (['Thread'], 'Table'), 'seen': (['Thread'], 'int'),
        'flushed': (['Thread', 'Cpu'], 'bool'),
        'dpc': (['Table'], 'int'), 'holder': (['Table'], 'Thread'),
        # What a CPU has cached: the leaf, or parts. Whether it has flushed since the PTE is empty.
        'huge': (['Cpu'], 'bool'), 'small': (['Cpu'], 'bool'), 'empty_flushed': (['Cpu'], 'bool'),
    }
    rules = {
        'flush-before-link': 'a thread links the page-table page before it has flushed',
        'number-of-split': 'a split takes no number',
        'number-before-break': 'a split takes its number after it has broken the leaf',
        'finisher-compares': 'a thread that finishes the split of another does not compare the counter',
        'breaker-compares': 'the thread that has broken the leaf does not compare the counter',
        'one-guard': 'a thread that finds the PTE broken reads the counter in its next guard',
        'flush-before-leaf': 'a leaf is mapped at an empty PTE that is not flushed',
    }
    sizes = {'Thread': 3, 'Table': 1, 'Cpu': 1}
    start = at(splits=[True, False, True])
    story = 'allocate thread0 table0; take_number thread0; break thread0; find thread1; read_counter thread1'

    def init(self, s):
        return {
            'a leaf': And(s.kind() == LEAF, s.counter() >= 0),
            'page-table pages': s.all(lambda d: s.dpc(d) == FREE),
            'threads': s.all(lambda t, c: And(s.tpc(t) == OUT, Not(s.flushed(t, c)))),
            'no thread runs': s.all(lambda t: s.tpc(t) == OUT),
            'nothing is cached': s.all(lambda c: And(Not(s.huge(c)), Not(s.small(c)), Not(s.empty_flushed(c)))),
        }

    # A split.

    def step_allocate(self, s, t: 'Thread', d: 'Table'):
        """second_stage/split.rs: visit (top_up)."""
        return And(s.splits(t), s.tpc(t) == OUT, s.dpc(d) == FREE), {
            'tpc': put(s.tpc, t, HAS), 'saw': put(s.saw, t, d), 'dpc': put(s.dpc, d, HELD),
            'holder': put(s.holder, d, t)}

    def step_take_number(self, s, t: 'Thread'):
        """second_stage/split.rs: break_leaf."""
        here, to = (READ, SAW) if self.without('number-before-break') else (HAS, NUMBERED)
        number = s.counter() + (0 if self.without('number-of-split') else 1)
        return And(s.splits(t), s.tpc(t) == here), {
            'tpc': put(s.tpc, t, to), 'counter': lambda: number, 'seen': put(s.seen, t, number)}

    def step_break(self, s, t: 'Thread'):
        """second_stage/split.rs: break_leaf."""
        here, to = (HAS, READ) if self.without('number-before-break') else (NUMBERED, SAW)
        return And(s.splits(t), s.tpc(t) == here, s.kind() == LEAF), {
            'tpc': put(s.tpc, t, to), 'kind': lambda: BROKEN, 'down': lambda: s.saw(t),
            'dpc': put(s.dpc, s.saw(t), NAMED)}

    # A thread that finds the PTE broken.

    def step_find(self, s, t: 'Thread'):
        """second_stage/broken.rs: cancel."""
        return And(Not(s.splits(t)), s.tpc(t) == OUT, s.kind() == BROKEN), {
            'tpc': put(s.tpc, t, READ), 'saw': put(s.saw, t, s.down())}

    def step_read_counter(self, s, t: 'Thread'):
        """second_stage/broken.rs: pinned_split."""
        return And(Not(s.splits(t)), s.tpc(t) == READ), {
            'tpc': put(s.tpc, t, SAW), 'seen': put(s.seen, t, s.counter())}

    # Both.

    def step_flush(self, s, t: 'Thread', c: 'Cpu'):
        """second_stage/broken.rs: finish."""
        return s.tpc(t) == SAW, {
            'flushed': put(s.flushed, (t, c), True), 'huge': put(s.huge, c, False), 'small': put(s.small, c, False)}

    def step_link(self, s, t: 'Thread'):
        """second_stage/broken.rs: finish."""
        is_flushed = Or(s.all(lambda c: s.flushed(t, c)), self.without('flush-before-link'))
        is_same = Or(s.seen(t) == s.counter(), And(s.splits(t), self.without('breaker-compares')),
                     And(Not(s.splits(t)), self.without('finisher-compares')))
        return And(s.tpc(t) == SAW, s.kind() == BROKEN, s.down() == s.saw(t), is_flushed, is_same), {
            'tpc': put(s.tpc, t, DONE), 'kind': lambda: TABLE}

    # Other threads.

    def step_other_number(self, s):
        """table/invalidation_seq.rs: next."""
        return True, {'counter': lambda: s.counter() + 1}

    def step_zap_leaf(self, s):
        """second_stage/zap.rs: visit."""
        return s.kind() == LEAF, {'kind': lambda: EMPTY, 'empty_flushed': lambda c: False}

    def step_unlink(self, s):
        """second_stage/zap.rs: visit."""
        return s.kind() == TABLE, {
            'kind': lambda: EMPTY, 'empty_flushed': lambda c: False, 'dpc': put(s.dpc, s.down(), UNLINKED)}

    def step_flush_empty(self, s, c: 'Cpu'):
        """second_stage/map.rs: work (Flush)."""
        return s.kind() == EMPTY, {
            'empty_flushed': put(s.empty_flushed, c, True), 'huge': put(s.huge, c, False),
            'small': put(s.small, c, False)}

    def step_map(self, s):
        """second_stage/map.rs: install_run."""
        is_flushed = Or(s.all(lambda c: s.empty_flushed(c)), self.without('flush-before-leaf'))
        return And(s.kind() == EMPTY, is_flushed), {'kind': lambda: LEAF}

    def step_free(self, s, d: 'Table'):
        """table/retire.rs: reclaim_tables. No guard is open that has found it."""
        is_open = lambda t: And(s.tpc(t) == READ, Not(s.splits(t)), not self.without('one-guard'))
        return And(s.dpc(d) == UNLINKED, s.all(lambda t: Implies(is_open(t), s.saw(t) != d))), {
            'dpc': put(s.dpc, d, FREE)}

    def step_cache_leaf(self, s, c: 'Cpu'):
        """A CPU walks."""
        return s.kind() == LEAF, {'huge': put(s.huge, c, True)}

    def step_cache_part(self, s, c: 'Cpu'):
        """A CPU walks."""
        return s.kind() == TABLE, {'small': put(s.small, c, True)}

    def safe(self, s):
        return {
            'no CPU has leaves of two sizes cached': s.all(lambda c: Not(And(s.huge(c), s.small(c)))),
            'what the PTE names is not freed': Implies(Or(s.kind() == BROKEN, s.kind() == TABLE),
                                                       s.dpc(s.down()) == NAMED),
        }

    def inv(self, s):
        holds = lambda t: Or(s.tpc(t) == HAS, s.tpc(t) == NUMBERED)
        is_valid = lambda t: And(s.tpc(t) == SAW, s.seen(t) == s.counter())
        return {
            'phases': s.all(lambda t: And(OUT <= s.tpc(t), s.tpc(t) <= DONE)),
            'phases of page-table pages': s.all(lambda d: And(FREE <= s.dpc(d), s.dpc(d) <= UNLINKED)),
            'kinds': And(LEAF <= s.kind(), s.kind() <= EMPTY),
            'below a page-table page no leaf is cached': Implies(s.kind() == TABLE, s.all(lambda c: Not(s.huge(c)))),
            'at a leaf no part is cached': Implies(
                Or(s.kind() == LEAF, s.kind() == BROKEN), s.all(lambda c: Not(s.small(c)))),
            'an empty PTE that is flushed is not cached': s.all(lambda c: Implies(
                And(s.kind() == EMPTY, s.empty_flushed(c)), And(Not(s.huge(c)), Not(s.small(c))))),
            'a number was taken': s.all(lambda t: Implies(
                Or(s.tpc(t) == NUMBERED, s.tpc(t) == SAW), s.seen(t) <= s.counter())),
            'a flush follows what a thread saw': s.all(lambda t, c: Implies(
                s.flushed(t, c), Or(s.tpc(t) == SAW, s.tpc(t) == DONE))),
            'only a split has what is not named yet': s.all(lambda t: Implies(holds(t), And(
                s.splits(t), s.dpc(s.saw(t)) == HELD, s.holder(s.saw(t)) == t))),
            'only a thread that finishes has a guard open there': s.all(
                lambda t: Implies(s.tpc(t) == READ, Not(s.splits(t)))),
            'what an open guard has found is not free': s.all(lambda t: Implies(
                s.tpc(t) == READ, Or(s.dpc(s.saw(t)) == NAMED, s.dpc(s.saw(t)) == UNLINKED))),
            'no other split is about to name what a thread saw': s.all(lambda t, u: Implies(
                And(is_valid(t), s.tpc(u) == NUMBERED), s.saw(t) != s.saw(u))),
            'a flush serves what a thread saw': s.all(lambda t, c: Implies(
                And(is_valid(t), s.kind() == BROKEN, s.down() == s.saw(t), s.flushed(t, c)), Not(s.huge(c)))),
        }


ONE = run(PinnedSplit, {}, at(splits=True))
# A split, a thread that finishes it, and the next split of the leaf.
THREE = run(PinnedSplit, {'Thread': 3}, at(splits=[True, False, True]))
PinnedSplit.traces = {
    'flush-before-link': ONE, 'number-of-split': THREE, 'number-before-break': THREE, 'finisher-compares': THREE,
    'breaker-compares': THREE, 'one-guard': THREE, 'flush-before-leaf': ONE,
}


if __name__ == '__main__':
    prover.main(PinnedSplit)
