"""Page-table pages that were linked are given up once, and none is lost. Page tables of any depth.

Protocol: docs/protocols/invalidation.md, huge-pages.md. Engine: second_stage/{zap,recover,broken}.rs.

A zap unlinks a page-table page, freezes its PTEs one by one, and takes what other threads have linked there
meanwhile. A recovery owns the page-table page that it broke. Threads that abort it freeze what is below, so
that frozen PTEs say what was linked there, and the owner gives all of that up. `todo(t)`: a thread is to give
`t` up.

A recovery gives a page-table page of a higher level up once its PTEs are frozen. That is a guard here; in the
engine it is what `make` leaves behind, and a `debug_assert!` in `give_up`.

Left out: when leaves may be installed, and that the lowest page-table pages are empty when they are given up
(`invalidation.py`); the numbers; how long the lists are.
"""
import prover
from page_tables import BROKEN, EMPTY, HELD, LEAF, TABLE, PageTables
from prover import And, Implies, Not, Or, put, put_where


def chain():
    """One page, a root of level 2, and a page-table page of each level below it."""
    return {
        'root': lambda: 'table0', 'level': lambda t: 2 - int(t[5:]), 'spans': lambda t, p: True,
        'entry': lambda t, p: 'pte' + t[5:], 'table': lambda e: 'table' + e[3:],
        'used': lambda t: t == 'table0', 'linked': lambda t: t == 'table0',
    }


class GivenUp(PageTables):
    state = {
        **PageTables.state,
        'todo': (['Table'], 'bool'), 'zapped': (['Table'], 'bool'), 'given': (['Table'], 'bool'),
        'twice': (['Table'], 'bool'),                   # ghost: it was to be given up once more
        'hung': (['Table'], 'Pte'),                     # ghost: where it was linked
    }
    rules = {
        'freeze': 'a zap gives up page-table pages of higher levels whose PTEs are not frozen',
        'take-linked': 'a zap leaves what was linked below a page-table page that it unlinked',
        'leave-broken': 'a zap takes what a recovery below owns',
        'give-late': 'a recovery gives its page-table page up while the broken PTE is there',
        'give-below': 'a recovery leaves what was linked below its page-table page',
        'cancel-gives': 'the abort of a recovery gives the page-table page up, too',
    }
    few = {'Page': 1, 'Pte': 3, 'Table': 3, 'Answer': 1, 'Fresh': 1}
    traces = dict.fromkeys(rules, {'sizes': {**few, 'Fresh': 2}, 'start': chain()})

    def init(self, s):
        return {**super().init(s), 'none': s.all(lambda t: And(
            Not(s.todo(t)), Not(s.zapped(t)), Not(s.given(t)), Not(s.twice(t))))}

    def takes(self, s, where, zaps):
        """The page-table pages `where` are to be given up."""
        again = lambda t: And(where(t), Or(s.todo(t), s.given(t)))
        return {'todo': put_where(s.todo, where, True), 'twice': put_where(s.twice, again, True),
                'zapped': put_where(s.zapped, where, lambda t: Or(zaps, s.zapped(t)))}

    def hang(self, s, e, t):
        return {**super().hang(s, e, t), 'hung': put(s.hung, t, e)}

    def step_install(self, s, e: 'Pte', a: 'Answer'):
        """vcpu/act.rs: install_at."""
        return And(s.used(s.table(e)), s.kind(e) == EMPTY, Not(s.frozen(e))), {
            'kind': put(s.kind, e, LEAF), 'ans': put(s.ans, e, a)}

    def step_unlink(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/zap.rs: visit."""
        return And(s.used(s.table(e)), s.kind(e) == TABLE, Not(s.frozen(e)), s.state_of(n) == HELD), {
            **self.store(s, e, n), **self.cut(s, e), **self.takes(s, lambda t: t == s.down(e), True)}

    def step_swap(self, s, x: 'Pte'):
        """second_stage/zap.rs: take_over; table/pte.rs: freeze."""
        t = s.table(x)
        takes = Or(And(s.kind(x) == TABLE, not self.without('take-linked')),
                   And(s.kind(x) == BROKEN, self.without('leave-broken')))
        return And(s.todo(t), s.zapped(t), Not(s.frozen(x)), s.level(t) > 0), {
            **self.cut(s, x), **self.takes(s, lambda u: And(takes, u == s.down(x)), True),
            'frozen': put(s.frozen, x, True), 'kind': put(s.kind, x, EMPTY)}

    def step_break(self, s, e: 'Pte'):
        guard, changes = super().step_break(s, e)
        return guard, {**changes, **self.takes(s, lambda t: t == s.down(e), False)}

    step_break.__doc__ = PageTables.step_break.__doc__

    def step_cancel(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/broken.rs: cancel."""
        guard, changes = super().step_cancel(s, e, n)
        if self.without('cancel-gives'):
            changes = {**changes, **self.takes(s, lambda t: t == s.down(e), False)}
        return guard, changes

    def step_freeze_unlinked(self, s, x: 'Pte'):
        """second_stage/broken.rs: report_frozen. Behind a broken PTE that a zap froze."""
        guard, changes = super().step_freeze_unlinked(s, x)
        return And(guard, Not(s.zapped(s.table(x)))), changes

    def step_give(self, s, t: 'Table'):
        """second_stage/zap.rs: take_over; second_stage/broken.rs: give_up; table/tlb.rs: add_unlinked."""
        e = s.hung(t)
        is_frozen = s.all(lambda x: Implies(And(s.table(x) == t, s.level(t) > 0), s.frozen(x)))
        is_broken = And(s.kind(e) == BROKEN, s.down(e) == t)
        below = lambda u: And(s.used(u), u != s.root(), s.table(s.hung(u)) == t, s.kind(s.hung(u)) == TABLE,
                              s.down(s.hung(u)) == u)
        if self.without('give-below'):
            below = lambda u: False
        changes = self.takes(s, below, False)
        may = And(Or(is_frozen, self.without('freeze')), Or(Not(is_broken), self.without('give-late')))
        return And(s.todo(t), may), {
            **changes, 'given': put(s.given, t, True), 'todo': lambda u: And(u != t, Or(s.todo(u), below(u)))}

    def safe(self, s):
        return {
            'no page-table page is given up twice': s.all(lambda t: Not(s.twice(t))),
            'no page-table page is lost': s.all(lambda t: Implies(
                And(s.used(t), t != s.root(), Not(s.todo(t)), Not(s.given(t))),
                And(s.kind(s.hung(t)) == TABLE, s.down(s.hung(t)) == t, s.used(s.table(s.hung(t))),
                    Not(s.given(s.table(s.hung(t))))))),
            'what is given up is unlinked': s.all(lambda t: Implies(s.given(t), Not(s.linked(t)))),
            'what was given up is frozen': s.all(lambda x: Implies(
                And(s.given(s.table(x)), self.level(s, x) > 0), s.frozen(x))),
        }

    def inv(self, s):
        return {
            **self.inv_tables(s),
            'only what is in use is to be given up': s.all(lambda t: Implies(
                Or(s.todo(t), s.given(t), s.zapped(t)), And(s.used(t), t != s.root()))),
            'what is given up is to be given up no more': s.all(lambda t: Not(And(s.todo(t), s.given(t)))),
            'what is in use was linked at what is in use': s.all(lambda t: Implies(
                And(s.used(t), t != s.root()), s.used(s.table(s.hung(t))))),
            'a PTE points to what hangs there': s.all(lambda e: Implies(
                And(s.used(s.table(e)), self.leads_down(s, e)), s.hung(s.down(e)) == e)),
            'what hangs is not to be given up': s.all(lambda e: Implies(
                And(s.used(s.table(e)), s.kind(e) == TABLE, Not(s.given(s.table(e)))),
                And(Not(s.todo(s.down(e))), Not(s.given(s.down(e)))))),
            'what is to be given up is unlinked or broken': s.all(lambda t: Implies(
                s.todo(t), Or(Not(s.linked(t)), And(s.kind(s.hung(t)) == BROKEN, s.down(s.hung(t)) == t)))),
            'what is behind a broken PTE is to be given up': s.all(lambda e: Implies(
                And(s.used(s.table(e)), s.kind(e) == BROKEN, Not(s.given(s.table(e)))), s.todo(s.down(e)))),
            'what is zapped is unlinked': s.all(lambda t: Implies(s.zapped(t), Not(s.linked(t)))),
        }


if __name__ == '__main__':
    prover.main(GivenUp)
