"""The split of a pinned leaf with break before make, which any thread finishes. Any number of threads, page-table pages
and CPUs, and one PTE.

Protocol: docs/protocols/pinned.md. Engine: second_stage/{split,broken}.rs.

No fault would bring a pinned leaf back, so its split is never cancelled: each thread that finds the PTE broken, the one
that has broken it included, flushes and links the page-table page. Meanwhile another thread may have linked it. Then it
may be unlinked and freed, the leaf may be mapped again, and the same page-table page may be used for the next split of
the same leaf, which that flush does not serve. It is freed only after it was retired, which ends an epoch. So a thread
reads the epoch before it reads the PTE, and links only in the same epoch.

A page-table page is not freed while a guard is open that has found it (`epochs.py`).

Left out: what the parts map; page-table pages above, with which the PTE may be unlinked (it is empty then); other
retirements, which end epochs, too, so that less is linked.
"""
import prover
from prover import And, Implies, Not, Or, Protocol, put
from starts import at, run

LEAF, BROKEN, TABLE, EMPTY = range(4)                   # the PTE
OUT, HAS, READ, SAW, COMPARED, DONE = range(6)          # a thread. COMPARED: its guard is open
FREE, HELD, NAMED, UNLINKED, RETIRED = range(5)         # a page-table page. NAMED: the PTE names it


class PinnedSplit(Protocol):
    sorts = ['Thread', 'Table', 'Cpu']
    letters = {'t': 'Thread', 'u': 'Thread', 'd': 'Table', 'c': 'Cpu'}
    fixed = {}
    state = {
        'kind': ([], 'int'), 'down': ([], 'Table'), 'epoch': ([], 'int'),
        'tpc': (['Thread'], 'int'), 'saw': (['Thread'], 'Table'), 'seen': (['Thread'], 'int'),
        'flushed': (['Thread', 'Cpu'], 'bool'),
        'dpc': (['Table'], 'int'), 'holder': (['Table'], 'Thread'),
        # What a CPU has cached: the leaf, or parts. Whether it has flushed since the PTE is empty.
        'huge': (['Cpu'], 'bool'), 'small': (['Cpu'], 'bool'), 'empty_flushed': (['Cpu'], 'bool'),
    }
    rules = {
        'flush-before-link': 'a thread links the page-table page before it has flushed',
        'retirement-ends-epoch': 'a retirement ends no epoch',
        'epoch-first': 'a thread reads the epoch after it has found the PTE broken',
        'compare-epochs': 'a thread links in another epoch, too',
        'one-guard': 'a thread links in another guard than it compares in',
        'flush-before-leaf': 'a leaf is mapped at an empty PTE that is not flushed',
    }
    sizes = {'Thread': 3, 'Table': 1, 'Cpu': 1}
    story = 'allocate thread0 table0; break thread0; read_epoch thread1; find thread1'

    def init(self, s):
        return {
            'a leaf': And(s.kind() == LEAF, s.epoch() >= 0),
            'page-table pages': s.all(lambda d: s.dpc(d) == FREE),
            'threads': s.all(lambda t, c: And(s.tpc(t) == OUT, Not(s.flushed(t, c)))),
            'no thread runs': s.all(lambda t: s.tpc(t) == OUT),
            'nothing is cached': s.all(lambda c: And(Not(s.huge(c)), Not(s.small(c)), Not(s.empty_flushed(c)))),
        }

    # A split: the thread goes on as one that finds the PTE broken.

    def step_allocate(self, s, t: 'Thread', d: 'Table'):
        """second_stage/split.rs: visit (top_up)."""
        return And(s.tpc(t) == OUT, s.dpc(d) == FREE), {
            'tpc': put(s.tpc, t, HAS), 'saw': put(s.saw, t, d), 'dpc': put(s.dpc, d, HELD),
            'holder': put(s.holder, d, t)}

    def step_break(self, s, t: 'Thread'):
        """second_stage/split.rs: break_leaf."""
        return And(s.tpc(t) == HAS, s.kind() == LEAF), {
            'tpc': put(s.tpc, t, OUT), 'kind': lambda: BROKEN, 'down': lambda: s.saw(t),
            'dpc': put(s.dpc, s.saw(t), NAMED)}

    # A thread that finds the PTE broken.

    def step_read_epoch(self, s, t: 'Thread'):
        """second_stage/broken.rs: load_broken."""
        here, to = (READ, SAW) if self.without('epoch-first') else (OUT, READ)
        return s.tpc(t) == here, {'tpc': put(s.tpc, t, to), 'seen': put(s.seen, t, s.epoch())}

    def step_find(self, s, t: 'Thread'):
        """second_stage/broken.rs: load_broken."""
        here, to = (OUT, READ) if self.without('epoch-first') else (READ, SAW)
        return And(s.tpc(t) == here, s.kind() == BROKEN), {
            'tpc': put(s.tpc, t, to), 'saw': put(s.saw, t, s.down())}

    def step_flush(self, s, t: 'Thread', c: 'Cpu'):
        """second_stage/broken.rs: finish."""
        return s.tpc(t) == SAW, {
            'flushed': put(s.flushed, (t, c), True), 'huge': put(s.huge, c, False), 'small': put(s.small, c, False)}

    def step_compare(self, s, t: 'Thread'):
        """second_stage/broken.rs: finish. The PTE first, and then the epoch."""
        is_flushed = Or(s.all(lambda c: s.flushed(t, c)), self.without('flush-before-link'))
        is_same = Or(s.seen(t) == s.epoch(), self.without('compare-epochs'))
        return And(s.tpc(t) == SAW, s.kind() == BROKEN, s.down() == s.saw(t), is_flushed, is_same), {
            'tpc': put(s.tpc, t, COMPARED)}

    def step_link(self, s, t: 'Thread'):
        """second_stage/broken.rs: finish."""
        return And(s.tpc(t) == COMPARED, s.kind() == BROKEN, s.down() == s.saw(t)), {
            'tpc': put(s.tpc, t, DONE), 'kind': lambda: TABLE}

    # Other threads.

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

    def step_retire(self, s, d: 'Table'):
        """table/retire.rs: retire_tables."""
        epoch = s.epoch() + (0 if self.without('retirement-ends-epoch') else 1)
        return s.dpc(d) == UNLINKED, {'dpc': put(s.dpc, d, RETIRED), 'epoch': lambda: epoch}

    def step_free(self, s, d: 'Table'):
        """table/retire.rs: reclaim_tables. No guard is open that has found it."""
        is_open = lambda t: And(s.tpc(t) == COMPARED, not self.without('one-guard'))
        return And(s.dpc(d) == RETIRED, s.all(lambda t: Implies(is_open(t), s.saw(t) != d))), {
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
        in_epoch = lambda t: And(s.tpc(t) == SAW, s.seen(t) == s.epoch())
        return {
            'phases': s.all(lambda t: And(OUT <= s.tpc(t), s.tpc(t) <= DONE)),
            'phases of page-table pages': s.all(lambda d: And(FREE <= s.dpc(d), s.dpc(d) <= RETIRED)),
            'kinds': And(LEAF <= s.kind(), s.kind() <= EMPTY),
            'below a page-table page no leaf is cached': Implies(s.kind() == TABLE, s.all(lambda c: Not(s.huge(c)))),
            'at a leaf no part is cached': Implies(
                Or(s.kind() == LEAF, s.kind() == BROKEN), s.all(lambda c: Not(s.small(c)))),
            'an empty PTE that is flushed is not cached': s.all(lambda c: Implies(
                And(s.kind() == EMPTY, s.empty_flushed(c)), And(Not(s.huge(c)), Not(s.small(c))))),
            'an epoch was read': s.all(lambda t: Implies(
                Or(s.tpc(t) == READ, s.tpc(t) == SAW), s.seen(t) <= s.epoch())),
            'a flush follows what a thread saw': s.all(lambda t, c: Implies(
                s.flushed(t, c), Or(s.tpc(t) == SAW, s.tpc(t) == COMPARED, s.tpc(t) == DONE))),
            'a thread compares after its flush': s.all(lambda t, c: Implies(s.tpc(t) == COMPARED, s.flushed(t, c))),
            'only a split has what is not named yet': s.all(lambda t: Implies(
                s.tpc(t) == HAS, And(s.dpc(s.saw(t)) == HELD, s.holder(s.saw(t)) == t))),
            'what a thread saw is not retired in its epoch': s.all(lambda t: Implies(
                in_epoch(t), Or(s.dpc(s.saw(t)) == NAMED, s.dpc(s.saw(t)) == UNLINKED))),
            'what an open guard has found is not free': s.all(lambda t: Implies(
                s.tpc(t) == COMPARED, Or(s.dpc(s.saw(t)) == NAMED, s.dpc(s.saw(t)) == UNLINKED,
                                         s.dpc(s.saw(t)) == RETIRED))),
            'a flush serves what a thread saw': s.all(lambda t, c: Implies(
                And(Or(in_epoch(t), s.tpc(t) == COMPARED), s.kind() == BROKEN, s.down() == s.saw(t), s.flushed(t, c)),
                Not(s.huge(c)))),
        }


ONE = run(PinnedSplit, {}, at())
# A split, a thread that finishes it, and the next split of the leaf.
THREE = run(PinnedSplit, {'Thread': 3}, at())
PinnedSplit.traces = {
    'flush-before-link': ONE, 'retirement-ends-epoch': THREE, 'epoch-first': THREE, 'compare-epochs': THREE,
    'one-guard': THREE, 'flush-before-leaf': ONE,
}


if __name__ == '__main__':
    prover.main(PinnedSplit)
