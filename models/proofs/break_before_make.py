"""Break before make: no CPU has two sizes cached for one page. Page tables of any depth, any number of all
else.

Protocol: docs/protocols/huge-pages.md. Engine: second_stage/{recover,split,broken,zap}.rs, vcpu/act.rs,
vcpu.rs: flush_before_make. All of `invalidation.py` holds here, too: this adds what CPUs cache on their
walks, the split by way of a broken PTE, and *unflushed* numbers.

`has(c, p, e)`: CPU `c` has the leaf cached that it read in `e`. `ptr(c, p, t)`: it has the way to the page-
table page `t` cached. A CPU reads a PTE only in the root, or where it has the way cached. A flush of a block
or a range drops both for its pages, on one CPU after the other. Left out: a rescan for userfault, whose
numbers are unflushed as well (`Faults::MayComeBack`); the dirty log (`recovery_beside_log.py`); that a flag is
cleared early enough for a fault to succeed (progress).
"""
import prover
from invalidation import ACTS, CLEAR, GONE, RESOLVED, Invalidation
from invalidation_runs import resolved
from page_tables import BROKEN, EMPTY, HELD, LEAF, STORED, TABLE
from prover import And, If, Implies, Not, Or, put, put_where

SPLITS = 4                              # a PTE broken by a split: its leaf is to become a page-table page


def mapped(is_huge):
    """One page and two levels. The page is mapped, by a huge leaf or a small one."""
    two = resolved(not is_huge, 1)
    low = 'pte0' if is_huge else 'pte1'
    start = {**two['start'], 'fpc': lambda f: 0, 'passed': lambda f, i: False, 'wants': lambda f, p: True,
             'kind': lambda e: LEAF if e == low else EMPTY if is_huge else TABLE, 'low': lambda p: low}
    return {'sizes': {**two['sizes'], 'Answer': 1}, 'start': start}


class BreakBeforeMake(Invalidation):
    state = {
        **Invalidation.state,
        'has': (['Cpu', 'Page', 'Pte'], 'bool'), 'ptr': (['Cpu', 'Page', 'Table'], 'bool'),
        'unflushed': (['Pte'], 'bool'),
        'loose': (['Table'], 'bool'),                                   # ghost: unlinked with its leaves
        # by the owner of a broken PTE, since the break
        'broken_flushed': (['Pte', 'Cpu'], 'bool'),
        'looked_at': (['Fault'], 'Pte'), 'fault_flushed': (['Fault', 'Cpu'],
                                                           'bool'), 'replaced': (['Fault'], 'bool'),
        # An invalidation flushes an unflushed PTE of which its range has a part: the PTE, its number.
        'zat': (['Inv'], 'Pte'), 'znum': (['Inv'], 'int'), 'zflushed': (['Inv', 'Cpu'], 'bool'),
        'reads_unflushed': (['Inv'], 'bool'),
        'low': (['Page'], 'Pte'),                                       # ghost: the lowest PTE of a page
        # ghost: the last that removed something
        'zapper': (['Page'], 'Inv'),
    }
    rules = {
        'recover-flush': 'a recovery makes a huge leaf without a flush',
        'split-flush': 'a split links its page-table page without a flush',
        'install-flush': 'a fault installs on an unflushed number without a flush',
        'cancel-unflushed': 'the abort of a recovery leaves a plain number',
        'split-cancel-unflushed': 'the abort of a split leaves a plain number',
        'part-unflushed': 'a leaf that is zapped beyond the range leaves a plain number',
        'instead-unflushed': 'a fault that replaces a huge leaf leaves a plain number',
        'flush-part': 'an invalidation of a part of an unflushed PTE clears the flag without a flush',
        'flush-that': 'an invalidation clears the flag of another value than it read before its flush',
        'unlink-lowest': 'page-table pages of higher levels are unlinked with their leaves, too',
        'refine-unflushed': 'a fault links page-table pages at an unflushed PTE without a flush',
        'refine-in-flight': 'a fault links page-table pages without a look at the ranges in flight',
        'undo-unflushed': 'the undo of a mapping leaves a plain number',
    }
    traces = {
        'recover-flush': mapped(False), 'cancel-unflushed': mapped(False), 'install-flush': mapped(False),
        'split-flush': mapped(True), 'split-cancel-unflushed': mapped(True),
    }
    sizes = {**Invalidation.sizes, 'Inv': 3}
    start = {**Invalidation.start, 'covers': lambda i, p: i == 'inv0' or p == 'page1',
             'wants': lambda f, p: f == 'fault1' or p == 'page0'}
    story = '''
        allow page0 answer0; allow page1 answer0; fault fault0; look fault0; read_ranges fault0; clear
        fault0; resolve fault0 answer0; act fault0; refine fault0 pte0 table1; give_up fault0; cache_way
        cpu0 page0 pte0; fault fault1; down fault1; look fault1; read_ranges fault1; clear fault1; resolve
        fault1 answer0; act fault1; down fault1; install fault1; cache_leaf cpu0 page0 pte1; fill cpu0
        pte1 page0; break_leaf pte1; take_fresh fresh1; cancel_split pte1 fresh1; publish inv2;
        take_number inv2; start inv2; enter inv2 pte0; read_unflushed inv2 pte1 page1; flush_unflushed
        inv2 cpu0; take_fresh fresh4; zap_empty inv2 pte1 page1 fresh4; zapped inv2; unlinked inv2; flush
        inv2 cpu0; flushed inv2; withdraw inv2; fault fault1; down fault1; look fault1; read_ranges
        fault1; clear fault1; flush_before_make fault1 cpu0; resolve fault1 answer0; act fault1; down
        fault1; install fault1; break_leaf pte1; flush_broken pte1 cpu0; split pte1 table2; fault fault0;
        down fault0; down fault0; look_at_leaf fault0; read_counter fault0; read_ranges fault0; clear
        fault0; resolve fault0 answer0; act fault0; down fault0; down fault0; take_own fault0 fresh0;
        empty_leaf fault0; recount fault0; install fault0; break pte1; freeze pte1 pte2; freeze pte1 pte3;
        flush_broken pte1 cpu0; make_huge pte1 answer0; publish inv1; take_number inv1; start inv1; enter
        inv1 pte0; take_fresh fresh2; zap_higher inv1 pte1 page1 fresh2; pass inv1 pte1 page1; zapped
        inv1; unlinked inv1; flush inv1 cpu0; flushed inv1; host inv1 page1 answer1; withdraw inv1; fault
        fault0; down fault0; look fault0; read_ranges fault0; clear fault0; flush_before_make fault0 cpu0;
        resolve fault0 answer0; act fault0; down fault0; refine fault0 pte1 table3; down fault0; install
        fault0; publish inv0; take_number inv0; start inv0; enter inv0 pte0; enter inv0 pte1; zap_lowest
        inv0 pte4 page0; break pte1; freeze pte1 pte4; freeze pte1 pte5; take_fresh fresh3; cancel pte1
        fresh3; pass inv0 pte1 page1; zapped inv0; take_fresh fresh5; unlink inv0 pte0 fresh5;
        freeze_unlinked pte1'''

    def init(self, s):
        return {
            **super().init(s),
            'caches': s.all(lambda c, p, e: Not(s.has(c, p, e))),
            'ways': s.all(lambda c, p, t: Not(s.ptr(c, p, t))),
            'flags': s.all(lambda e: Not(s.unflushed(e))),
            'loose': s.all(lambda t: Not(s.loose(t))),
            'flushes of faults': s.all(lambda f, c: Not(s.fault_flushed(f, c))),
            'replaced': s.all(lambda f: Not(s.replaced(f))),
            'flushes of invalidations': s.all(
                lambda i, c: And(Not(s.zflushed(i, c)), Not(s.reads_unflushed(i)))),
            'lowest PTEs': s.all(lambda p: s.low(p) == s.entry(s.root(), p)),
        }

    # A CPU.

    def reads(self, s, c, p, e):
        t = s.table(e)
        return And(self.maps(s, e, p), Not(s.frozen(e)), Or(t == s.root(), s.ptr(c, p, t)))

    def step_cache_leaf(self, s, c: 'Cpu', p: 'Page', e: 'Pte'):
        """A CPU walks to a leaf."""
        return And(self.reads(s, c, p, e), s.kind(e) == LEAF), {'has': put(s.has, (c, p, e), True)}

    def step_cache_way(self, s, c: 'Cpu', p: 'Page', e: 'Pte'):
        """A CPU walks to a page-table page."""
        return And(self.reads(s, c, p, e), s.kind(e) == TABLE), {'ptr': put(s.ptr, (c, p, s.down(e)), True)}

    def dropped(self, s, c, where):
        return {'has': put_where(s.has, lambda d, p, e: And(d == c, where(p)), False),
                'ptr': put_where(s.ptr, lambda d, p, t: And(d == c, where(p)), False)}

    # What was a step of any thread.

    def may_hang(self, s, e, t):
        return And(super().may_hang(s, e, t), s.level(t) + 1 == self.level(s, e))

    def hang(self, s, e, t):
        inside = lambda x: s.table(x) == t
        return {**super().hang(s, e, t),
                'unflushed': lambda x: If(Or(x == e, inside(x)), False, s.unflushed(x)),
                'low': put_where(s.low, lambda p: s.low(p) == e, lambda p: s.entry(t, p))}

    def cut(self, s, e):
        ends = lambda p: And(s.linked(s.table(e)), self.maps(s, e, p))
        return {**super().cut(s, e), 'low': put_where(s.low, ends, e)}

    step_refine_anew = None             # here the entries inherit the number in any case

    def step_refine(self, s, f: 'Fault', e: 'Pte', t: 'Table'):
        """vcpu/act.rs: refine, install_on_empty. After a look at this PTE, or as it installs."""
        flushed = And(s.all(lambda c: s.fault_flushed(f, c)), s.all(lambda p: Implies(
            self.maps(s, e, p), self.maps(s, s.looked_at(f), p))))
        in_flight = True if self.without('refine-in-flight') else s.fpc(f) >= CLEAR
        guard, changes = super().step_refine(s, e, t)
        return And(guard, in_flight, self.saw(s, f), s.fpc(f) <= ACTS, Not(s.replaced(f)),
                   self.maps(s, e, s.page(f)),
                   s.num(e) == s.seen(f), Or(Not(s.unflushed(e)), flushed,
                                             self.without('refine-unflushed'))), changes

    def step_split(self, s, e: 'Pte', t: 'Table'):
        """second_stage/split.rs: link_parts."""
        guard, changes = super().step_split(s, e, t)
        flushed = s.all(lambda c: s.broken_flushed(e, c))
        may = And(s.kind(e) == SPLITS, self.may_hang(s, e, t))
        return And(may, Or(flushed, self.without('split-flush'))), changes

    def step_break_leaf(self, s, e: 'Pte'):
        """second_stage/split.rs: break_leaf."""
        return And(s.kind(e) == LEAF, Not(s.frozen(e)), s.used(s.table(e)), self.level(s, e) > 0), {
            'kind': put(
                s.kind, e, SPLITS), 'broken_flushed': put_where(s.broken_flushed, lambda x, c: x == e, False)}

    def step_break(self, s, e: 'Pte'):
        guard, changes = super().step_break(s, e)
        return guard, {**changes, 'broken_flushed': put_where(s.broken_flushed, lambda x, c: x == e, False)}

    step_break.__doc__ = Invalidation.step_break.__doc__

    def step_flush_broken(self, s, e: 'Pte', c: 'Cpu'):
        """second_stage/recover.rs: try_recover; second_stage/split.rs: split_by_breaking."""
        return And(Or(s.kind(e) == BROKEN, s.kind(e) == SPLITS), s.used(s.table(e))), {
            **self.dropped(
                s, c, lambda p: self.maps(s, e, p)), 'broken_flushed': put(s.broken_flushed, (e, c), True)}

    def step_make_huge(self, s, e: 'Pte', a: 'Answer'):
        """second_stage/recover.rs: make."""
        guard, changes = super().step_make_huge(s, e, a)
        return And(guard, Or(s.all(lambda c: s.broken_flushed(e, c)), self.without('recover-flush'))), changes

    def step_cancel(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/broken.rs: cancel. Of a recovery."""
        guard, changes = super().step_cancel(s, e, n)
        return guard, {**changes, 'unflushed': put(s.unflushed, e, not self.without('cancel-unflushed'))}

    def step_cancel_split(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/broken.rs: cancel. Of a split."""
        return And(s.kind(e) == SPLITS, Not(s.frozen(e)), s.used(s.table(e)), s.state_of(n) == HELD), {
            **self.store(s, e, n), 'unflushed': put(s.unflushed, e,
                                                    not self.without('split-cancel-unflushed'))}

    # A fault.

    def forget(self, s, f):
        return {**super().forget(s, f), 'replaced': put(s.replaced, f, False),
                'fault_flushed': put_where(s.fault_flushed, lambda g, c: g == f, False)}

    def step_look(self, s, f: 'Fault'):
        guard, changes = super().step_look(s, f)
        return guard, {**changes, 'looked_at': put(s.looked_at, f, s.fat(f))}

    step_look.__doc__ = Invalidation.step_look.__doc__

    def step_flush_before_make(self, s, f: 'Fault', c: 'Cpu'):
        """vcpu.rs: flush_before_make. Between the look and the next walk."""
        return And(s.fpc(f) >= CLEAR, s.fpc(f) <= RESOLVED, Not(s.on_leaf(f))), {
            **self.dropped(s, c, lambda p: self.maps(s, s.looked_at(f), p)),
            'fault_flushed': put(s.fault_flushed, (f, c), True)}

    def step_down(self, s, f: 'Fault'):
        guard, changes = super().step_down(s, f)
        return And(guard, Not(s.replaced(f))), changes

    step_down.__doc__ = Invalidation.step_down.__doc__

    def step_install(self, s, f: 'Fault'):
        """vcpu/act.rs: install_at."""
        guard, changes = super().step_install(s, f)
        flushed = s.all(lambda c: s.fault_flushed(f, c))
        return And(guard, Or(Not(s.unflushed(s.fat(f))), flushed, s.replaced(f),
                             self.without('install-flush'))), {
            **changes, 'unflushed': put(s.unflushed, s.fat(f), False)}

    def step_empty_leaf(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead."""
        guard, changes = super().step_empty_leaf(s, f)
        flag = And(self.level(s, s.fat(f)) > 0, not self.without('instead-unflushed'))
        return guard, {**changes, 'unflushed': put(s.unflushed, s.fat(f), flag)}

    def step_recount(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead."""
        guard, changes = super().step_recount(s, f)
        return guard, {**changes, 'replaced': put(s.replaced, f, True)}

    # An invalidation.

    def covers_whole(self, s, i, e):
        return s.all(lambda p: Implies(self.maps(s, e, p), s.covers(i, p)))

    def removes(self, s, i, e):
        return {'zapper': put_where(s.zapper, lambda p: And(s.linked(s.table(e)), self.maps(s, e, p)), i)}

    def step_zap_lowest(self, s, i: 'Inv', e: 'Pte', p: 'Page'):
        """second_stage/zap.rs: visit. At the lowest level."""
        guard, changes = super().step_zap_lowest(s, i, e, p)
        return guard, {**changes, **self.removes(s, i, e), 'unflushed': put(s.unflushed, e, False)}

    def step_zap_higher(self, s, i: 'Inv', e: 'Pte', p: 'Page', n: 'Fresh'):
        """second_stage/zap.rs: visit. A leaf above the lowest level."""
        guard, changes = super().step_zap_higher(s, i, e, p, n)
        whole = self.covers_whole(s, i, e)
        flag = And(Not(whole), not self.without('part-unflushed'))
        zapper = lambda p2: If(And(whole, s.linked(s.table(e)), self.maps(s, e, p2)), i, s.zapper(p2))
        return And(guard, s.kind(e) == LEAF), {**changes, 'unflushed': put(s.unflushed, e, flag),
                                               'zapper': zapper}

    def step_read_unflushed(self, s, i: 'Inv', e: 'Pte', p: 'Page'):
        """second_stage/zap.rs: visit. It leaves its guard to flush (`Work::Flush`)."""
        return And(self.walks(s, i), self.visits(s, i, e, p), s.kind(e) == EMPTY, self.level(s, e) > 0), {
            'reads_unflushed': put(s.reads_unflushed, i, True), 'zat': put(s.zat, i, e),
            'znum': put(s.znum, i, s.num(e)),
            'zflushed': put_where(s.zflushed, lambda j, c: j == i, False)}

    def step_flush_unflushed(self, s, i: 'Inv', c: 'Cpu'):
        """second_stage/zap.rs: work."""
        return And(self.walks(s, i), s.reads_unflushed(i)), {
            **self.dropped(
                s, c, lambda p: self.maps(s, s.zat(i), p)), 'zflushed': put(s.zflushed, (i, c), True)}

    def step_zap_empty(self, s, i: 'Inv', e: 'Pte', p: 'Page', n: 'Fresh'):
        """second_stage/zap.rs: visit. An empty PTE above the lowest level."""
        guard, changes = super().step_zap_higher(s, i, e, p, n)
        same = True if self.without('flush-that') else s.num(e) == s.znum(i)
        flushed = And(s.zat(i) == e, same, s.all(lambda c: s.zflushed(i, c)))
        may = Or(Not(s.unflushed(e)), flushed, self.covers_whole(s, i, e), self.without('flush-part'))
        flag = And(s.unflushed(e), Not(flushed))
        if self.without('flush-part'):
            flag = And(flag, self.covers_whole(s, i, e))
        return And(guard, s.kind(e) == EMPTY, may), {**changes, 'unflushed': put(s.unflushed, e, flag)}

    def step_unlink(self, s, i: 'Inv', e: 'Pte', n: 'Fresh'):
        """second_stage/zap.rs: visit, take_over."""
        guard, changes = super().step_unlink(s, i, e, n)
        return guard, {**changes, **self.removes(s, i, e), 'unflushed': put(s.unflushed, e, False)}

    def step_unlink_leaves(self, s, i: 'Inv', e: 'Pte', n: 'Fresh'):
        """second_stage/zap.rs: visit, take_over_with_leaves. Only a page-table page of the lowest level."""
        guard, changes = super().step_unlink_leaves(s, i, e, n)
        below = lambda t: And(s.below(t, e), s.linked(t))
        lowest = s.all(lambda t: Implies(s.below(t, e), s.level(t) == 0))
        return And(guard, Or(lowest, self.without('unlink-lowest'))), {
            **changes, **self.removes(s, i, e), 'unflushed': put(s.unflushed, e, False),
            'loose': put_where(s.loose, below, True)}

    def step_flush(self, s, i: 'Inv', c: 'Cpu'):
        """table/tlb.rs: flush."""
        guard, changes = super().step_flush(s, i, c)
        return guard, {**changes, **self.dropped(s, c, lambda p: s.covers(i, p))}

    # The undo of a mapping: see `undo.py`.

    def step_undo_leaf(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/map.rs: Undo::turn. Of a pinned leaf, at any moment: it flushes at the end."""
        return And(s.kind(e) == LEAF, Not(s.frozen(e)), s.used(s.table(e)), s.state_of(n) == HELD), {
            **self.store(s, e, n), 'unflushed': put(s.unflushed, e, not self.without('undo-unflushed'))}

    # Promises.

    def safe(self, s):
        return {
            **super().safe(s),
            'no CPU has leaves of two sizes cached': s.all(lambda c, p, e, x: Implies(
                And(s.has(c, p, e), s.has(c, p, x)), self.level(s, e) == self.level(s, x))),
            'no CPU has a leaf cached and the way to a smaller one': s.all(lambda c, p, e, t: Implies(
                And(s.has(c, p, e), s.ptr(c, p, t)), s.level(t) >= self.level(s, e))),
        }

    def will_flush(self, s, i, c, p):
        return And(self.took(s, i), s.covers(i, p), Not(s.flushed(i, c)))

    def is_dirty(self, s, c, p, e):
        """What `c` has cached does not go with a leaf at `e`, or with less below `e` if that is empty."""
        other = lambda x: And(s.has(c, p, x), Or(self.level(s, x) != self.level(s, e),
                                                 And(s.kind(e) == EMPTY, self.level(s, e) > 0)))
        return Or(s.some(other), s.some(lambda t: And(s.ptr(c, p, t), Not(s.linked(t)))))

    def inv(self, s):
        old = super().inv(s)
        old['kinds'] = s.all(lambda e: And(s.kind(e) >= EMPTY, s.kind(e) <= SPLITS))
        return {**old, **self.inv_splits(s), **self.inv_words(s), **self.inv_caches(s),
                **self.inv_unlinked(s),
                **self.inv_flushes(s)}

    def inv_splits(self, s):
        """A PTE that a split broke is as a leaf."""
        is_at = lambda e, p: And(s.used(s.table(e)), self.maps(s, e, p), s.kind(e) == SPLITS)
        return {
            'a visited page has no split': s.all(lambda i, e, p: Implies(
                And(self.had(s, i, p), self.is_lowest(s, e, p)), s.kind(e) != SPLITS)),
            'no split is of an old answer': s.all(lambda e, p: Implies(
                And(is_at(e, p), Or(s.linked(s.table(e)), Not(s.frozen(e)))), s.ok(p, s.ans(e)))),
            'no split is in an unlinked page-table page': s.all(lambda e, p: Implies(
                And(is_at(e, p), Not(s.frozen(e))), s.linked(s.table(e)))),
            'nothing unlinked leads to a split': s.all(lambda e, x, p: Implies(
                And(self.is_astray(s, e), s.below(s.table(x), e), self.maps(s, x, p)), s.kind(x) != SPLITS)),
            'a split is above the lowest level': s.all(lambda e: Implies(
                And(s.used(s.table(e)), s.kind(e) == SPLITS), self.level(s, e) > 0)),
        }

    def inv_words(self, s):
        return {
            'the lowest PTE of a page is linked': s.all(lambda p: self.is_lowest(s, s.low(p), p)),
            'the lowest PTE of a page does not lead down': s.all(lambda p: Not(self.leads_down(s, s.low(p)))),
            'the lowest PTE of a page is the lowest': s.all(lambda p, t: Implies(
                And(s.linked(t), s.spans(t, p)), s.level(t) >= self.level(s, s.low(p)))),
            'only empty PTEs are unflushed': s.all(lambda e: Implies(
                And(s.used(s.table(e)), s.unflushed(e)), s.kind(e) == EMPTY)),
            'a replaced leaf was replaced': s.all(lambda f: Implies(
                s.replaced(f), And(s.fpc(f) == ACTS, Not(s.on_leaf(f)), s.used(s.table(s.fat(f))),
                                   s.state_of(s.own(f)) == STORED, s.seen(f) == s.fresh(s.own(f))))),
            'a fault flushes after its look': s.all(lambda f, c: Implies(
                s.fault_flushed(f, c), And(s.fpc(f) >= CLEAR, Not(s.on_leaf(f)), Not(s.replaced(f))))),
            'a fault has looked at what it wants': s.all(lambda f, p: Implies(
                And(self.saw(s, f), Not(s.replaced(f)), s.wants(f, p)), self.maps(s, s.looked_at(f), p))),
            'an invalidation flushes an unflushed PTE that it read': s.all(lambda i, c: Implies(
                s.zflushed(i, c), s.reads_unflushed(i))),
            'it read it with its own number': s.all(lambda i: Implies(s.reads_unflushed(i), And(
                self.has_number(s, i), s.znum(i) <= s.counter(), self.level(s, s.zat(i)) > 0))),
            'it read no fresh number': s.all(lambda i, n: Implies(
                And(s.state_of(n) == HELD, s.reads_unflushed(i)), s.znum(i) != s.fresh(n))),
            'a CPU has the way to what is in use': s.all(lambda c, p, t: Implies(
                s.ptr(c, p, t), And(s.used(t), s.spans(t, p)))),
            'a CPU has leaves of what is in use': s.all(lambda c, p, e: Implies(
                s.has(c, p, e), And(s.used(s.table(e)), self.maps(s, e, p)))),
        }

    def inv_caches(self, s):
        has_leaf = lambda e: Or(s.kind(e) == LEAF, s.kind(e) == SPLITS)
        return {
            'what is cached goes with a leaf': s.all(lambda c, p: Implies(
                has_leaf(s.low(p)), Not(self.is_dirty(s, c, p, s.low(p))))),
            'what is cached goes with an empty PTE, or will be flushed': s.all(lambda c, p, q: Implies(
                And(s.kind(s.low(p)) == EMPTY, Not(s.unflushed(s.low(p))), self.maps(s, s.low(p), q),
                    self.is_dirty(s, c, p, s.low(p))),
                And(self.will_flush(s, s.zapper(p), c, p), s.visited(s.zapper(p), q)))),
            'no larger leaf is cached': s.all(lambda c, p, x: Implies(
                s.has(c, p, x), self.level(s, x) <= self.level(s, s.low(p)))),
        }

    def inv_unlinked(self, s):
        differs = lambda e, f: s.num(e) != s.seen(f)
        reads = lambda c, p, t: And(s.ptr(c, p, t), Not(s.linked(t)), Not(s.frozen(s.entry(t, p))))
        return {
            'what goes with its leaves is of the lowest level': s.all(lambda t: Implies(
                s.loose(t), And(s.used(t), Not(s.linked(t)), s.level(t) == 0))),
            'what goes with its leaves is below nothing': s.all(lambda t, e: Implies(
                s.loose(t), Not(s.below(t, e)))),
            'no other leaf is in an unlinked page-table page': s.all(lambda e, p: Implies(
                And(s.used(s.table(e)), self.maps(s, e, p), s.kind(e) == LEAF, Not(s.frozen(e)),
                    Not(s.loose(s.table(e)))), s.linked(s.table(e)))),
            'no PTE that was unlinked empty leads to a leaf': s.all(lambda e, x, p: Implies(
                And(self.is_astray(s, e), Not(s.loose(s.table(e))), s.below(s.table(x), e), self.maps(s, x, p)),
                s.kind(x) != LEAF)),
            'a fault in what was unlinked empty meets another number': s.all(lambda f, e, p: Implies(
                And(self.saw(s, f), s.fpc(f) == ACTS, self.is_astray(s, s.fat(f)), self.is_astray(s, e),
                    Not(s.loose(s.table(s.fat(f)))), Or(e == s.fat(f), s.below(s.table(e), s.fat(f))),
                    s.wants(f, p), self.maps(s, e, p), s.kind(e) == EMPTY), differs(e, f))),
            'an unlinked page-table page is cached until its flush': s.all(lambda c, p, t: Implies(
                reads(c, p, t), self.will_flush(s, s.cutter(t), c, p))),
            'no larger leaf is cached where an unlinked PTE leads down': s.all(lambda c, p, t, u, x: Implies(
                And(reads(c, p, t), s.below(u, s.entry(t, p)), s.spans(u, p), s.has(c, p, x)),
                self.level(s, x) <= s.level(u))),
            'a fault that passed the range of what it unlinked empty meets another number': s.all(
                lambda f, e, p: Implies(
                    And(self.saw(s, f), self.is_astray(s, e), Not(s.loose(s.table(e))), s.wants(f, p),
                        self.maps(s, e, p), s.kind(e) == EMPTY, self.took(s, s.cutter(s.table(e))),
                        s.passed(f, s.cutter(s.table(e)))),
                    differs(e, f))),
        }

    def inv_flushes(self, s):
        is_broken = lambda e: Or(s.kind(e) == BROKEN, s.kind(e) == SPLITS)
        its_own = lambda f, p: And(
            Or(s.replaced(f), s.fpc(f) == GONE), s.low(p) == s.fat(f), s.kind(s.fat(f)) == EMPTY,
            s.num(s.fat(f)) == s.fresh(s.own(f)))
        return {
            'after the flush of a broken PTE no leaf is cached': s.all(lambda c, e, p, x: Implies(
                And(self.is_lowest(s, e, p), is_broken(e), s.broken_flushed(e, c)), Not(s.has(c, p, x)))),
            'after the flush of a broken PTE no way below is cached': s.all(lambda c, e, p, t: Implies(
                And(self.is_lowest(s, e, p), is_broken(e), s.broken_flushed(e, c), s.ptr(c, p, t)),
                And(s.linked(t), Not(s.below(t, e))))),
            'after the flush of a fault nothing is cached': s.all(lambda c, f, p: Implies(
                And(self.saw(s, f), s.fault_flushed(f, c), self.maps(s, s.low(p), s.page(f)),
                    s.kind(s.low(p)) == EMPTY, s.num(s.low(p)) == s.seen(f), self.maps(s, s.looked_at(f), p)),
                Not(self.is_dirty(s, c, p, s.low(p))))),
            'after the flush of an invalidation nothing is cached': s.all(lambda c, i, p: Implies(
                And(s.zflushed(i, c), s.low(p) == s.zat(i), s.kind(s.low(p)) == EMPTY,
                    s.num(s.low(p)) == s.znum(i)), Not(self.is_dirty(s, c, p, s.low(p))))),
            'of a replaced leaf the same size is cached': s.all(lambda c, f, p, x: Implies(
                And(its_own(f, p), s.has(c, p, x)), self.level(s, x) == self.level(s, s.fat(f)))),
            'of a replaced leaf no other way is cached': s.all(lambda c, f, p, t: Implies(
                And(its_own(f, p), s.ptr(c, p, t)), s.linked(t))),
        }


if __name__ == '__main__':
    prover.main(BreakBeforeMake)
