"""No walk spins: while other threads stand still, a walk from the root meets no frozen PTE. Page tables of any depth.

Protocol: docs/protocols/pte.md, invalidation.md. Engine: table/cursor.rs, second_stage/{zap,recover,broken}.rs.

A walk that meets a frozen PTE starts over at the root. It goes down by PTEs that point to page-table pages, and not
behind a broken one, which it cancels. So it does not meet a frozen PTE again: each that is linked is behind a broken
one. Else a walk visits a PTE once more only where an exchange fails, which is due to a step of another thread.

Left out: what is installed and given up (`invalidation.py`, `given_up.py`); that other threads take steps for ever.
"""
import prover
from page_tables import BROKEN, EMPTY, HELD, LEAF, TABLE, PageTables
from prover import And, Implies, Not, put, put_where


class Walks(PageTables):
    state = {**PageTables.state, 'behind': (['Table'], 'bool')}     # ghost: it is, or was, behind a broken PTE
    rules = {
        'freeze-late': 'a zap freezes PTEs before it unlinks their page-table page',
        'freeze-behind': 'a recovery freezes PTEs before it breaks the PTE above',
    }
    few = {'Page': 1, 'Pte': 3, 'Table': 3, 'Answer': 1, 'Fresh': 1}

    def init(self, s):
        return {**super().init(s), 'behind': s.all(lambda t: Not(s.behind(t)))}

    def hang(self, s, e, t):
        return {**super().hang(s, e, t), 'behind': put(s.behind, t, s.behind(s.table(e)))}

    def step_break(self, s, e: 'Pte'):
        guard, changes = super().step_break(s, e)
        return guard, {**changes, 'behind': put_where(s.behind, lambda t: s.below(t, e), True)}

    def step_freeze(self, s, e: 'Pte', x: 'Pte'):
        guard, changes = super().step_freeze(s, e, x)
        if self.without('freeze-behind'):
            guard = And(s.kind(e) == TABLE, s.below(s.table(x), e))
        return guard, changes

    def step_freeze_unlinked(self, s, x: 'Pte'):
        guard, changes = super().step_freeze_unlinked(s, x)
        if self.without('freeze-late'):
            guard = s.used(s.table(x))
        return guard, changes

    step_break.__doc__ = PageTables.step_break.__doc__
    step_freeze.__doc__ = PageTables.step_freeze.__doc__
    step_freeze_unlinked.__doc__ = PageTables.step_freeze_unlinked.__doc__

    def step_install(self, s, e: 'Pte', a: 'Answer'):
        """vcpu/act.rs: install_at."""
        return And(s.used(s.table(e)), s.kind(e) == EMPTY, Not(s.frozen(e))), {
            'kind': put(s.kind, e, LEAF), 'ans': put(s.ans, e, a)}

    def step_unlink(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/zap.rs: visit."""
        return And(s.used(s.table(e)), s.kind(e) == TABLE, Not(s.frozen(e)), s.state_of(n) == HELD), {
            **self.store(s, e, n), **self.cut(s, e)}

    def safe(self, s):
        return {
            'a frozen PTE that is linked is behind a broken one': s.all(lambda x: Implies(
                And(s.frozen(x), s.linked(s.table(x))), s.behind(s.table(x)))),
            'no walk from the root comes behind a broken PTE': And(Not(s.behind(s.root())), s.all(
                lambda e: Implies(And(s.linked(s.table(e)), s.kind(e) == TABLE, s.behind(s.down(e))),
                                  s.behind(s.table(e))))),
        }

    def inv(self, s):
        return {**self.inv_links(s), 'what is below a broken PTE is behind it': s.all(lambda t, e: Implies(
            And(s.kind(e) == BROKEN, s.below(t, e)), s.behind(t)))}


if __name__ == '__main__':
    prover.main(Walks)
