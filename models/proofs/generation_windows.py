"""Windows of admissions: a generation of a directory entry does not come back while a guard is open.

Any number of guards; any sizes of window and room with 3 * WINDOW + ROOM < GENERATIONS (in the engine
3 * 512 + 64 = 1600 < 2048). Engine: `table/generation.rs`, `table/retire.rs` (epochs),
`second_stage/protect.rs` (turns).

A guard reads the epoch, and announces it later. A turn is a guard that was admitted; it protects a directory
entry at most once. The model has one directory entry. A push-down reads its generation and exchanges it in
one guard. So the exchange of `lazy_protection.py`, which compares integers, may compare a few bits.

The proof counts without sets. For an open guard g, `left(g)` is how many turns may still protect the entry
beside it. `place(g, t)` numbers them from 0 on. A turn that protects leaves its place to the last.

Left out: the two announcements of a participant; the lock of the renewal, which has one owner at a time. A
guard with two admissions (a reset of rings) is two guards here that begin and end together.
"""
import prover
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

NEW, READ, OPEN, CLOSED = range(4)                      # of a guard; READ: it has read the epoch
IDLE, SCANS, ADVANCED = range(3)                        # of the renewal


class GenerationWindows(Protocol):
    sorts = ['Guard']
    letters = {'g': 'Guard', 't': 'Guard', 'u': 'Guard'}
    fixed = {}
    state = {
        'window': ([], 'int'), 'room': ([], 'int'), 'generations': ([], 'int'),     # never change
        'generation': ([], 'int'), 'admitted': ([], 'int'), 'limit': ([], 'int'),
        'epoch': ([], 'int'), 'renewed': ([], 'int'),
        'gpc': (['Guard'], 'int'), 'gepoch': (['Guard'], 'int'),
        'is_turn': (['Guard'], 'bool'), 'index': (['Guard'], 'int'), 'has_protected': (['Guard'], 'bool'),
        'has_value': (['Guard'], 'bool'), 'value': (['Guard'], 'int'),
        'rpc': ([], 'int'), 'rseen': ([], 'int'), 'scanned': (['Guard'], 'bool'),
        # Ghosts: the admissions at the last renewal and at the one before; of a guard: the generation when
        # it began, a bound of the turns beside it, and those that may still protect.
        'last': ([], 'int'), 'before_last': ([], 'int'),
        'base': (['Guard'], 'int'), 'low': (['Guard'], 'int'), 'left': (['Guard'], 'int'),
        'place': (['Guard', 'Guard'], 'int'),
    }
    rules = {
        'limit-the-turns': 'Turns are admitted whatever the limit is.',
        'admit-inside': 'A turn is admitted before it opens its guard.',
        'wait-for-guards': 'A renewal does not wait for the guards that were open at the one before.',
        'check-again': 'A renewing thread does not check again that the window is nearly used up.',
        'once-a-turn': 'A turn protects a directory entry more than once.',
        'one-guard': 'A push-down keeps the value of the entry from one guard to the next.',
        'enough-generations': 'There are no more generations than two windows admit.',
    }

    def axioms(self, s):
        windows = 2 if self.without('enough-generations') else 3
        return {
            'sizes': And(s.window() >= 1, s.room() >= 0, windows * s.window() + s.room() < s.generations()),
        }

    def init(self, s):
        return {
            'no admission': And(s.admitted() == 0, s.limit() == s.window(), s.last() == 0,
                                s.before_last() == 0),
            'no renewal': And(s.rpc() == IDLE, s.renewed() < s.epoch()),
            'no guard': s.all(lambda g: And(s.gpc(g) == NEW, Not(s.is_turn(g)), Not(s.has_protected(g)),
                                            Not(s.has_value(g)))),
        }

    # A guard, of a turn or of a push-down.

    def step_read_epoch(self, s, g: 'Guard'):
        """table/retire.rs: pin"""
        return s.gpc(g) == NEW, {'gpc': put(s.gpc, g, READ), 'gepoch': put(s.gepoch, g, s.epoch())}

    def step_announce(self, s, g: 'Guard'):
        """table/retire.rs: pin (announce)"""
        return s.gpc(g) == READ, {
            'gpc': put(s.gpc, g, OPEN), 'base': put(s.base, g, s.generation()),
            'low': put(s.low, g, s.before_last()), 'left': put(s.left, g, s.admitted() - s.before_last()),
            'place': put_where(s.place, lambda u, t: u == g, lambda u, t: s.index(t) - s.before_last())}

    def step_close(self, s, g: 'Guard'):
        """table/retire.rs: Guard::drop"""
        return s.gpc(g) == OPEN, {'gpc': put(s.gpc, g, CLOSED)}

    def step_admit(self, s, t: 'Guard'):
        """table/generation.rs: admit"""
        at = And(s.gpc(t) >= NEW, s.gpc(t) <= OPEN) if self.without('admit-inside') else s.gpc(t) == OPEN
        allowed = Or(self.without('limit-the-turns'), s.admitted() < s.limit())
        return And(at, Not(s.is_turn(t)), allowed), {
            'is_turn': put(s.is_turn, t, True), 'index': put(s.index, t, s.admitted()),
            'admitted': lambda: s.admitted() + 1, 'left': lambda g: s.left(g) + 1,
            'place': put_where(s.place, lambda g, u: u == t, lambda g, u: s.left(g))}

    def step_protect(self, s, t: 'Guard'):
        """second_stage/protect.rs: close"""
        again = self.without('once-a-turn')
        return And(s.gpc(t) == OPEN, s.is_turn(t), Not(s.has_protected(t))), {
            'generation': lambda: s.generation() + 1, 'has_protected': put(s.has_protected, t, not again),
            'left': lambda g: s.left(g) - 1,
            'place': put_where(s.place, lambda g, u: s.place(g, u) == s.left(g) - 1, lambda g,
                               u: s.place(g, t))}

    def step_read_entry(self, s, g: 'Guard'):
        """second_stage/push_down.rs: push_down"""
        at = s.gpc(g) <= OPEN if self.without('one-guard') else s.gpc(g) == OPEN
        return And(at, Not(s.has_value(g))), {
            'has_value': put(s.has_value, g, True), 'value': put(s.value, g, s.generation())}

    # The renewal.

    def step_begin_renewal(self, s):
        """table/generation.rs: renew"""
        is_low = Or(self.without('check-again'), s.limit() - s.admitted() <= s.room())
        return And(s.rpc() == IDLE, is_low), {
            'rpc': lambda: SCANS, 'rseen': lambda: s.admitted(), 'scanned': lambda g: False}

    def step_scan(self, s, g: 'Guard'):
        """table/retire.rs: oldest_open"""
        may = Or(s.gpc(g) != OPEN, s.gepoch(g) > s.renewed(), self.without('wait-for-guards'))
        return And(s.rpc() == SCANS, may), {'scanned': put(s.scanned, g, True)}

    def step_give_up(self, s):
        """table/generation.rs: renew (a guard is open)"""
        return s.rpc() == SCANS, {'rpc': lambda: IDLE}

    def step_advance(self, s):
        """table/generation.rs: renew (advance_epoch)"""
        return And(s.rpc() == SCANS, s.all(lambda g: s.scanned(g))), {
            'rpc': lambda: ADVANCED, 'renewed': lambda: s.epoch(), 'epoch': lambda: s.epoch() + 1,
            'before_last': lambda: s.last(), 'last': lambda: s.rseen()}

    def step_end_renewal(self, s):
        """table/generation.rs: renew (limit)"""
        return s.rpc() == ADVANCED, {'rpc': lambda: IDLE, 'limit': lambda: s.limit() + s.window()}

    # What is promised.

    def safe(self, s):
        return {
            'while a guard is open, the generation that it read does not come back': s.all(lambda g: Implies(
                And(s.gpc(g) == OPEN, s.has_value(g)),
                And(s.value(g) <= s.generation(), s.generation() - s.value(g) < s.generations()))),
        }

    def may_protect(self, s, t):
        return And(s.gpc(t) == OPEN, s.is_turn(t), Not(s.has_protected(t)))

    def inv(self, s):
        return {**self.inv_of_turns(s), **self.inv_of_limits(s), **self.inv_of_places(s)}

    def inv_of_turns(self, s):
        open_turn = lambda t: And(s.gpc(t) == OPEN, s.is_turn(t))
        return {
            'a guard is NEW to CLOSED, the renewal IDLE to ADVANCED': And(
                s.rpc() >= IDLE, s.rpc() <= ADVANCED,
                s.all(lambda g: And(s.gpc(g) >= NEW, s.gpc(g) <= CLOSED))),
            'the last renewal ended an earlier epoch': s.renewed() < s.epoch(),
            'a guard has read an epoch that was': s.all(lambda g: Implies(
                Or(s.gpc(g) == READ, s.gpc(g) == OPEN), s.gepoch(g) <= s.epoch())),
            'a guard becomes a turn when it is open, with a number of its own': s.all(lambda t: Implies(
                s.is_turn(t), And(s.gpc(t) >= OPEN, s.index(t) >= 0, s.index(t) < s.admitted()))),
            'no two turns have one number': s.all(lambda t, u: Implies(
                And(s.is_turn(t), s.is_turn(u), t != u), s.index(t) != s.index(u))),
            'admissions only grow': And(
                0 <= s.before_last(), s.before_last() <= s.last(), s.last() <= s.admitted(),
                Implies(s.rpc() == SCANS, And(s.last() <= s.rseen(), s.rseen() <= s.admitted()))),
            'an open turn was admitted after the renewal before the last': s.all(lambda t: Implies(
                open_turn(t), s.index(t) >= s.before_last())),
            'an open turn of a later epoch was admitted after the last renewal': s.all(lambda t: Implies(
                And(open_turn(t), s.gepoch(t) > s.renewed()), s.index(t) >= s.last())),
            'an open turn that was scanned was admitted after the last renewal': s.all(lambda t: Implies(
                And(open_turn(t), s.rpc() == SCANS, s.scanned(t)), s.index(t) >= s.last())),
        }

    def limit_soon(self, s):
        return If(s.rpc() == ADVANCED, s.limit() + s.window(), s.limit())

    def inv_of_limits(self, s):
        bound = lambda low, windows: self.limit_soon(s) <= low + windows * s.window() + s.room()
        is_passed = lambda g: Or(s.gepoch(g) > s.renewed(), And(s.rpc() == SCANS, s.scanned(g)))
        return {
            'turns are admitted up to the limit': s.admitted() <= s.limit(),
            'a renewal begins when the window is nearly used up': Implies(
                s.rpc() == SCANS, s.limit() - s.rseen() <= s.room()),
            'the limit is one window beyond the last renewal': bound(s.last(), 1),
            'the limit is two windows beyond the renewal before the last': bound(s.before_last(), 2),
            'a guard that lets a renewal pass has seen at most two windows': s.all(lambda g: Implies(
                And(s.gpc(g) == OPEN, is_passed(g)), bound(s.low(g), 2))),
            'an open guard sees at most three windows': s.all(lambda g: Implies(
                s.gpc(g) == OPEN, bound(s.low(g), 3))),
        }

    def inv_of_places(self, s):
        beside = lambda g, t: And(s.gpc(g) == OPEN, self.may_protect(s, t))
        return {
            'each protecting uses up a turn': s.all(lambda g: Implies(
                s.gpc(g) == OPEN, s.generation() - s.base(g) + s.left(g) == s.admitted() - s.low(g))),
            'the turns that are left have places': s.all(lambda g, t: Implies(
                beside(g, t), And(s.place(g, t) >= 0, s.place(g, t) < s.left(g)))),
            'no two turns have one place': s.all(lambda g, t, u: Implies(
                And(beside(g, t), beside(g, u), t != u), s.place(g, t) != s.place(g, u))),
            'no fewer than no turns are left': s.all(lambda g: Implies(s.gpc(g) == OPEN, s.left(g) >= 0)),
            'a guard began at an earlier generation': s.all(lambda g: Implies(
                s.gpc(g) >= OPEN, s.base(g) <= s.generation())),
            'a value is read in an open guard': s.all(lambda g: Implies(
                s.has_value(g), And(s.gpc(g) >= OPEN, s.base(g) <= s.value(g),
                                    s.value(g) <= s.generation()))),
        }

    sizes = {'Guard': 4}
    start = {'window': lambda: 1, 'room': lambda: 0, 'generations': lambda: 4, 'limit': lambda: 1,
             'epoch': lambda: 1}
    traces = {'once-a-turn': {'sizes': {'Guard': 1}, 'start': start}}


if __name__ == '__main__':
    prover.main(GenerationWindows)
