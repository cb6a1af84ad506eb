"""Recovery of huge leaves: the host's answer for the whole block is true when the leaf is made.

Protocol: docs/protocols/huge-pages.md. Engine: second_stage/{recover,broken}.rs. All of `invalidation.py`
holds here, too. There a recovery makes a leaf of parts that say the same. Here it has asked the host for an
answer that allows the larger leaf. The parts do not show that it is still true; the counter of numbers does.

A recovery reads the counter, then the ranges in flight, and asks the host. It breaks the PTE, and reads the
counter again. Nothing after that looks at ranges: an invalidation that comes later finds the broken PTE.
Left out: the host's answer has the frames of the parts (`recover.rs: gather` compares them); logs, A and D.
"""
import prover
from invalidation import Invalidation
from invalidation_runs import HOST, PUBLISHED, resolved
from page_tables import BROKEN, LEAF, TABLE
from prover import And, Implies, Not, Or, put, put_where

IDLE, LOOKS, CLEAR, RESOLVED, BROKE, SURE = range(6)            # of a recovery


def outdated(phase):
    """Two levels with a leaf. The answer of a recovery is not true any more, and a number was taken since."""
    old = resolved(True, 1)
    start = {**old['start'], 'fpc': lambda f: 0, 'passed': lambda f, i: False, 'rpc': lambda r: phase,
             'kind': lambda e: TABLE if e == 'pte0' else LEAF, 'rgot': lambda r: 'answer1',
             'block': lambda r, p: True, 'rpassed': lambda r, i: True, 'counter': lambda: 1,
             'rat': lambda r: 'pte0'}
    return {'sizes': {**old['sizes'], 'Recovery': 1}, 'start': start}


class Recovery(Invalidation):
    sorts = [*Invalidation.sorts, 'Recovery']
    letters = {**Invalidation.letters, 'r': 'Recovery'}
    fixed = {**Invalidation.fixed, 'block': (['Recovery', 'Page'], 'bool')}
    state = {
        **Invalidation.state,
        'rpc': (['Recovery'], 'int'), 'rseen': (['Recovery'], 'int'), 'rgot': (['Recovery'], 'Answer'),
        'rat': (['Recovery'], 'Pte'), 'rpassed': (['Recovery', 'Inv'], 'bool'),
        'owner': (['Pte'], 'Recovery'),
    }
    rules = {
        'recover-recount': 'a recovery goes on whatever numbers were taken since its look',
        'recover-recount-late': 'a recovery reads the counter again before it breaks the PTE',
        'recover-ranges': 'a recovery asks the host inside a range in flight',
        'recover-counter-first': 'a recovery reads the counter after the ranges in flight',
        'recover-own': 'a recovery makes its leaf of a PTE that another one broke',
    }
    few = {**Invalidation.few, 'Recovery': 2, 'Answer': 2}
    sizes = {**Invalidation.sizes, 'Recovery': 1}
    start = {**Invalidation.start, 'block': lambda r, p: True}
    story = Invalidation.story.replace('break pte1;', '''
        allow page1 answer0; recover recovery0; recover_ranges recovery0; recover_clear recovery0;
        recover_resolve recovery0 answer0; break pte1 recovery0; recover_recount recovery0;''').replace(
        'make_huge pte1 answer0', 'make_huge pte1 recovery0 answer0').replace(
        'take_fresh fresh1', 'recover_fails recovery0; take_fresh fresh1')
    traces = {'recover-recount': outdated(RESOLVED), 'recover-recount-late': outdated(BROKE)}

    def init(self, s):
        return {**super().init(s), 'recoveries': s.all(lambda r: s.rpc(r) == IDLE),
                'recoveries have passed no range': s.all(lambda r, i: Not(s.rpassed(r, i)))}

    def step_recover(self, s, r: 'Recovery'):
        """second_stage/recover.rs: look. It reads the counter."""
        return s.rpc(r) == IDLE, {'rpc': put(s.rpc, r, LOOKS), 'rseen': put(s.rseen, r, s.counter()),
                                  'rpassed': put_where(s.rpassed, lambda q, i: q == r, False)}

    def step_recover_ranges(self, s, r: 'Recovery'):
        """second_stage/recover.rs: look; table/in_flight.rs: free_level. For the whole block."""
        shares = lambda i: s.some(lambda p: And(s.block(r, p), s.covers(i, p)))
        looks = not self.without('recover-ranges')
        found = lambda i: And(PUBLISHED <= s.ipc(i), s.ipc(i) <= HOST, shares(i), looks)
        passes = lambda q, i: And(q == r, Not(found(i)))
        late = {'rseen': put(s.rseen, r, s.counter())} if self.without('recover-counter-first') else {}
        return s.rpc(r) == LOOKS, {**late, 'rpassed': put_where(s.rpassed, passes, True)}

    def step_recover_clear(self, s, r: 'Recovery'):
        """second_stage/recover.rs: look."""
        return And(s.rpc(r) == LOOKS, s.all(lambda i: s.rpassed(r, i))), {'rpc': put(s.rpc, r, CLEAR)}

    def step_recover_resolve(self, s, r: 'Recovery', a: 'Answer'):
        """second_stage/recover.rs: try_recover."""
        return And(s.rpc(r) == CLEAR, s.all(lambda p: Implies(s.block(r, p), s.ok(p, a)))), {
            'rpc': put(s.rpc, r, RESOLVED), 'rgot': put(s.rgot, r, a)}

    def step_break(self, s, e: 'Pte', r: 'Recovery'):
        """second_stage/recover.rs: try_recover. From a walk of its own."""
        at, to = (BROKE, SURE) if self.without('recover-recount-late') else (RESOLVED, BROKE)
        guard, changes = super().step_break(s, e)
        return And(guard, s.rpc(r) == at, s.all(lambda p: s.block(r, p) == self.maps(s, e, p))), {
            **changes, 'rpc': put(s.rpc, r, to), 'rat': put(s.rat, r, e), 'owner': put(s.owner, e, r)}

    def step_recover_recount(self, s, r: 'Recovery'):
        """second_stage/recover.rs: try_recover. No number was taken since the look."""
        same = Or(self.without('recover-recount'), s.counter() == s.rseen(r))
        at, to = (RESOLVED, BROKE) if self.without('recover-recount-late') else (BROKE, SURE)
        return And(s.rpc(r) == at, same), {'rpc': put(s.rpc, r, to)}

    def step_make_huge(self, s, e: 'Pte', r: 'Recovery', a: 'Answer'):
        """second_stage/recover.rs: gather, make. The parts say the same `a`."""
        guard, changes = super().step_make_huge(s, e, a)
        own = True if self.without('recover-own') else s.owner(e) == r
        return And(guard, s.rpc(r) == SURE, s.rat(r) == e, own), {
            **changes, 'ans': put(s.ans, e, s.rgot(r)), 'rpc': put(s.rpc, r, IDLE)}

    def step_recover_fails(self, s, r: 'Recovery'):
        """second_stage/recover.rs: work. Another try, or none."""
        return s.rpc(r) != IDLE, {'rpc': put(s.rpc, r, IDLE)}

    def inv(self, s):
        is_about = lambda r: And(s.rpc(r) == SURE, s.kind(s.rat(r)) == BROKEN, s.owner(s.rat(r)) == r)
        is_sure = lambda r: And(is_about(r), s.linked(s.table(s.rat(r))))
        return {
            **super().inv(s),
            'phases of recoveries': s.all(lambda r: And(s.rpc(r) >= IDLE, s.rpc(r) <= SURE)),
            'what a recovery has seen is counted': s.all(lambda r: Implies(
                s.rpc(r) >= LOOKS, s.rseen(r) <= s.counter())),
            'a clear recovery has passed all ranges': s.all(lambda r, i: Implies(
                s.rpc(r) >= CLEAR, s.rpassed(r, i))),
            'a recovery that counted the number finds the range': s.all(lambda r, i, p: Implies(
                And(s.rpc(r) >= LOOKS, self.took(s, i), s.block(r, p), s.covers(i, p),
                    s.rseen(r) >= s.inum(i)),
                Not(s.rpassed(r, i)))),
            'an old answer of a recovery is counted': s.all(lambda r, p: Implies(
                And(s.rpc(r) >= RESOLVED, s.rpc(r) <= BROKE, s.block(r, p), Not(s.ok(p, s.rgot(r)))),
                s.counter() > s.rseen(r))),
            'a recovery breaks its block': s.all(lambda r, p: Implies(
                s.rpc(r) >= BROKE, s.block(r, p) == self.maps(s, s.rat(r), p))),
            'what a recovery broke is in use': s.all(lambda r: Implies(
                s.rpc(r) >= BROKE, s.used(s.table(s.rat(r))))),
            'no invalidation stands below a broken PTE that is older': s.all(lambda r, i, t: Implies(
                And(is_sure(r), self.has_number(s, i), s.inum(i) > s.rseen(r), s.stands(i, t)),
                Not(s.below(t, s.rat(r))))),
            'no invalidation visits behind a sure broken PTE': s.all(lambda r, i, c, p: Implies(
                And(is_about(r), s.block(r, p), self.is_lowest_for(s, i, c, s.rat(r), p)), Not(self.had(s, i, p)))),
            'the answer of a sure recovery is true': s.all(lambda r, c, p: Implies(
                And(is_about(r), s.block(r, p), self.comes(s, c, s.rat(r), p)), s.ok(p, s.rgot(r)))),
        }


if __name__ == '__main__':
    prover.main(Recovery)
