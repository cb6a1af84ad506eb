"""The undo of a mapping that fails half way: no CPU uses its frames afterwards. Any number of threads, mappings, pages
and CPUs; page tables of any depth.

Protocol: docs/protocols/pinned.md. Engine: second_stage/map.rs. All of `invalidation.py` holds here, too: a step of a
mapping is a fault whose host has answered already. This adds what follows if a later step fails.

`owns(m, answer)`: the frames are those of the mapping. The caller lends them to it alone. An undo walks over the pages
of the mapping, not in flight: other calls may install leaves of their own there, split its leaves, zap them, or unlink
their page-table pages. It empties the leaves with its frames, each with a fresh number. Then it flushes all pages that
the mapping had mapped (`came`), also those where it has found nothing: who has emptied a leaf there may not have
flushed yet. When it returns, the caller uses the frames for something else.

Left out: formats with break before make, where an emptied PTE is unflushed until then (`break_before_make.py`), and
where a leaf that is broken for a split is no leaf; a mapping that succeeds, and what protects it.
"""
import prover
from invalidation import Invalidation
from invalidation_runs import IDLE, RESOLVED, flat
from page_tables import BROKEN, EMPTY, HELD, LEAF, STORED, TABLE
from prover import And, Implies, Not, Or, put, put_where

MAPS, WALKS, FLUSHES, RETURNED = range(4)               # a mapping


def of_one_page():
    """One page and one PTE, and an invalidation, both of the mapping."""
    start = {**flat()['start'], 'step_of': lambda f, m: True,
             'owns': lambda m, a: a == 'answer0', 'told': lambda p: True}
    return {'sizes': {**flat()['sizes'], 'Mapping': 1}, 'start': start}


class Undo(Invalidation):
    sorts = [*Invalidation.sorts, 'Mapping']
    letters = {**Invalidation.letters, 'm': 'Mapping', 'k': 'Mapping'}
    fixed = {
        **Invalidation.fixed,
        'step_of': (['Fault', 'Mapping'], 'bool'), 'owns': (['Mapping', 'Answer'], 'bool'),
    }
    state = {
        **Invalidation.state,
        'mpc': (['Mapping'], 'int'), 'came': (['Mapping', 'Page'], 'bool'), 'undo_stands': (['Mapping', 'Table'], 'bool'),
        'undone': (['Mapping', 'Page'], 'bool'), 'undo_flushed': (['Mapping', 'Cpu'], 'bool'),
        'emptied': (['Mapping', 'Page'], 'bool'),       # by the undo itself
        'robs': (['Mapping'], 'bool'),                  # ghost: its undo has emptied a leaf of another call
    }
    rules = {
        'undo-flush': 'an undo does not flush',
        'undo-flush-all': 'an undo flushes only the pages that it has emptied itself',
        'undo-waits': 'an undo does not wait for all CPUs',
        'undo-fresh': 'an undo leaves a number that was stored before',
        'undo-broken': 'an undo passes a broken PTE',
        'undo-own': 'an undo empties the leaves of other calls, too',
        'undo-last': 'an undo begins while a step of its mapping is under way',
        'own-frames': 'another call maps the frames of the mapping, too',
    }
    traces = dict.fromkeys(['undo-flush', 'undo-flush-all', 'undo-waits'], of_one_page())
    few = {**Invalidation.few, 'Mapping': 1}
    # A mapping of the second page, a third fault for it.
    sizes = {**Invalidation.sizes, 'Fault': 3, 'Mapping': 1}
    start = {**Invalidation.start, 'page': lambda f: 'page0' if f == 'fault0' else 'page1',
             'wants': lambda f, p: (f == 'fault0') == (p == 'page0'), 'step_of': lambda f, m: f == 'fault2',
             'owns': lambda m, a: a == 'answer1'}
    story = '''
        allow page1 answer1; refine pte0 table1; refine pte1 table2; fault fault2; down fault2; down
        fault2; look fault2; read_ranges fault2; clear fault2; resolve fault2 answer1; act fault2; down
        fault2; down fault2; install fault2; fill cpu0 pte3 page1; undo mapping0; undo_start mapping0;
        undo_enter mapping0 pte0; undo_enter mapping0 pte1; take_fresh fresh5; undo_leaf mapping0 pte3
        page1 fresh5; undo_pass mapping0 pte3 page1; undo_walked mapping0; undo_flush mapping0 cpu0;
        undo_returns mapping0; reuse mapping0 page1 answer1;''' + Invalidation.story.replace(
            'refine pte0 table1; refine pte1 table2;', '', 1)

    def axioms(self, s):
        return {**super().axioms(s), 'a frame is of one mapping': s.all(
            lambda m, k, a: Implies(And(s.owns(m, a), s.owns(k, a)), m == k))}

    def init(self, s):
        return {
            **super().init(s),
            'mappings': s.all(lambda m: And(s.mpc(m) == MAPS, Not(s.robs(m)))),
            'undone': s.all(lambda m, p: And(Not(s.came(m, p)), Not(s.undone(m, p)), Not(s.emptied(m, p)))),
            'undo stands': s.all(lambda m, t: Not(s.undo_stands(m, t))),
            'undo flushed': s.all(lambda m, c: Not(s.undo_flushed(m, c))),
        }

    # Steps of a mapping: faults.

    def step_fault(self, s, f: 'Fault'):
        guard, changes = super().step_fault(s, f)
        return And(guard, s.all(lambda m: Implies(s.step_of(f, m), s.mpc(m) == MAPS))), changes

    def step_resolve(self, s, f: 'Fault', a: 'Answer'):
        """vcpu/plan.rs: resolve, leaf; second_stage/map.rs: install_run, fill, map_page."""
        guard, changes = super().step_resolve(s, f, a)
        is_lent = s.all(lambda m: Implies(s.owns(m, a), s.step_of(f, m)))
        return And(guard, Or(is_lent, self.without('own-frames'))), changes

    step_fault.__doc__ = Invalidation.step_fault.__doc__

    def step_install(self, s, f: 'Fault'):
        """vcpu/act.rs: install_at; second_stage/install.rs: link; second_stage/map.rs: install_run, map_page."""
        guard, changes = super().step_install(s, f)
        return guard, {**changes, 'came': put_where(
            s.came, lambda m, p: And(s.step_of(f, m), s.wants(f, p)), True)}

    # The undo.

    def step_undo(self, s, m: 'Mapping'):
        """second_stage/map.rs: map_range. A step has failed, and is over."""
        is_last = s.all(lambda f: Implies(s.step_of(f, m), s.fpc(f) == IDLE))
        return And(s.mpc(m) == MAPS, Or(is_last, self.without('undo-last'))), {'mpc': put(s.mpc, m, WALKS)}

    def step_undo_start(self, s, m: 'Mapping'):
        """second_stage/walk.rs: run. Each turn begins at the root."""
        return s.mpc(m) == WALKS, {'undo_stands': put(s.undo_stands, (m, s.root()), True)}

    def step_undo_enter(self, s, m: 'Mapping', e: 'Pte'):
        """second_stage/map.rs: Undo::turn; table/cursor.rs: step_down."""
        return And(s.mpc(m) == WALKS, s.undo_stands(m, s.table(e)), s.kind(e) == TABLE, Not(s.frozen(e))), {
            'undo_stands': put(s.undo_stands, (m, s.down(e)), True)}

    def undo_visits(self, s, m, e, p):
        return And(s.mpc(m) == WALKS, s.undo_stands(m, s.table(e)), self.maps(s, e, p), s.came(m, p),
                   Not(s.frozen(e)))

    def of_it(self, s, m, e):
        """The pages of the mapping at `e`."""
        return lambda k, p: And(k == m, self.maps(s, e, p), s.came(m, p))

    def step_undo_pass(self, s, m: 'Mapping', e: 'Pte', p: 'Page'):
        """second_stage/map.rs: Undo::turn. There is no leaf of the mapping."""
        other = Or(s.kind(e) == EMPTY, And(s.kind(e) == LEAF, Not(s.owns(m, s.ans(e)))),
                   And(s.kind(e) == BROKEN, self.without('undo-broken')))
        return And(self.undo_visits(s, m, e, p), other), {'undone': put_where(s.undone, self.of_it(s, m, e), True)}

    def step_undo_leaf(self, s, m: 'Mapping', e: 'Pte', p: 'Page', n: 'Fresh'):
        """second_stage/map.rs: Undo::turn."""
        is_fresh = s.state_of(n) == (STORED if self.without('undo-fresh') else HELD)
        is_own = s.owns(m, s.ans(e))
        return And(self.undo_visits(s, m, e, p), s.kind(e) == LEAF, Or(is_own, self.without('undo-own')), is_fresh), {
            **self.store(s, e, n), 'undone': put_where(s.undone, self.of_it(s, m, e), True),
            'emptied': put_where(s.emptied, self.of_it(s, m, e), True),
            'robs': put(s.robs, m, Or(s.robs(m), Not(is_own)))}

    def step_undo_walked(self, s, m: 'Mapping'):
        """second_stage/map.rs: undo. The walk is over."""
        is_over = s.all(lambda p: Implies(s.came(m, p), s.undone(m, p)))
        return And(s.mpc(m) == WALKS, is_over), {'mpc': put(s.mpc, m, FLUSHES)}

    def step_undo_flush(self, s, m: 'Mapping', c: 'Cpu'):
        """second_stage/map.rs: undo; table/tlb.rs: flush. One CPU of `Host::flush`."""
        flushes = lambda p: And(s.came(m, p), not self.without('undo-flush'),
                                Or(s.emptied(m, p), not self.without('undo-flush-all')))
        return s.mpc(m) == FLUSHES, {
            'undo_flushed': put(s.undo_flushed, (m, c), True),
            'tlb': put_where(s.tlb, lambda d, p, a: And(d == c, flushes(p)), False),
            'reach': put_where(s.reach, lambda d, t, p: And(d == c, flushes(p)),
                               lambda d, t, p: And(s.linked(t), s.spans(t, p)))}

    def step_undo_returns(self, s, m: 'Mapping'):
        """second_stage/map.rs: undo."""
        is_flushed = Or(s.all(lambda c: s.undo_flushed(m, c)), self.without('undo-waits'))
        return And(s.mpc(m) == FLUSHES, is_flushed), {'mpc': put(s.mpc, m, RETURNED)}

    def step_reuse(self, s, m: 'Mapping', p: 'Page', a: 'Answer'):
        """The caller of `Vm::map_range` uses the frames for something else."""
        return And(s.mpc(m) == RETURNED, s.owns(m, a)), {'ok': put(s.ok, (p, a), False)}

    def safe(self, s):
        return {**super().safe(s), 'an undo empties leaves of its mapping alone': s.all(lambda m: Not(s.robs(m)))}

    # Words of the invariant.

    def undo_had(self, s, m, p):
        """The undo was at the page, or stands in a page-table page of it that was unlinked."""
        astray = lambda t: And(s.undo_stands(m, t), s.used(t), s.spans(t, p), Not(s.linked(t)),
                               Not(s.frozen(s.entry(t, p))))
        return And(s.came(m, p), Or(s.undone(m, p), s.some(astray)))

    def inv(self, s):
        is_leaf = lambda e: And(s.used(s.table(e)), s.kind(e) == LEAF)
        return {
            **super().inv(s),
            'phases of mappings': s.all(lambda m: And(MAPS <= s.mpc(m), s.mpc(m) <= RETURNED)),
            'a leaf with own frames is where the mapping came': s.all(lambda m, e, p: Implies(
                And(is_leaf(e), self.maps(s, e, p), s.owns(m, s.ans(e))), s.came(m, p))),
            'own frames are cached where the mapping came': s.all(lambda m, c, p, a: Implies(
                And(s.tlb(c, p, a), s.owns(m, a)), s.came(m, p))),
            'own frames are for steps of the mapping': s.all(lambda f, m: Implies(
                And(s.fpc(f) >= RESOLVED, s.owns(m, s.got(f))), s.step_of(f, m))),
            'no step is under way behind its mapping': s.all(lambda f, m: Implies(
                And(s.step_of(f, m), s.mpc(m) != MAPS), s.fpc(f) == IDLE)),
            'an undo is at pages of its mapping': s.all(lambda m, p: Implies(
                s.undone(m, p), And(s.mpc(m) >= WALKS, s.came(m, p)))),
            'an undo stands in page-table pages in use': s.all(lambda m, t: Implies(
                s.undo_stands(m, t), And(s.mpc(m) >= WALKS, s.used(t)))),
            'after the walk of an undo all is undone': s.all(lambda m, p: Implies(
                And(s.mpc(m) >= FLUSHES, s.came(m, p)), s.undone(m, p))),
            'CPUs are flushed after the walk of an undo': s.all(lambda m, c: Implies(
                s.undo_flushed(m, c), s.mpc(m) >= FLUSHES)),
            'all CPUs are flushed before an undo returns': s.all(lambda m, c: Implies(
                s.mpc(m) >= RETURNED, s.undo_flushed(m, c))),
            'where an undo was is no leaf of its mapping': s.all(lambda m, e, p: Implies(
                And(self.undo_had(s, m, p), self.is_lowest(s, e, p), s.owns(m, s.ans(e))), s.kind(e) != LEAF)),
            'a flushed CPU comes to no leaf that was undone': s.all(lambda m, c, e, p: Implies(
                And(s.undo_flushed(m, c), s.came(m, p), self.comes(s, c, e, p), is_leaf(e)),
                Not(s.owns(m, s.ans(e))))),
            'a flushed CPU has no leaf cached that was undone': s.all(lambda m, c, p, a: Implies(
                And(s.undo_flushed(m, c), s.came(m, p), s.owns(m, a)), Not(s.tlb(c, p, a)))),
        }


if __name__ == '__main__':
    prover.main(Undo)
