"""Explicit-state check of the generations of lazy write protection: there are few, and none is
reused while a thread may hold its old value.

Two pages under one directory entry T = (open, generation), as in lazy.py; here generations wrap.
Page 1 has no leaf at first, and then one that a fault installs below the protected T: W, mark. Bits
are taken at each turn. `announced` has the epoch of each thread's guard, 0 if it has none open;
`limit` moves on by a window. What is written, cached and flushed: lazy.py.
Push: guard: T -> W of leaf 1 is cleared -> own W -> T is unprotected, if it is the very value read
    -> mark; over.
Install: leaf 1 is installed -> mark.
Turns: (turns3: so many, one after the other) if the window is used up: no other thread renews it ->
    all guards are over that were open at the last renewal -> the limit and the epoch move on. Then
    a guard: admitted while admissions are below the limit -> bits are taken, T is protected and its
    generation moves on, or, if not admitted, W of the leaves is cleared; over.
Wrong: a page may be written and its bit is clear, unless a thread has unprotected it and not marked
yet.
How many protections can happen during one guard? It begins after renewal k and before k+1, say. It
keeps k+2 from happening. A turn that was admitted before renewal k-1 had its guard open then, and
so has kept k from happening: it is over. So they are those admitted from k-1 on up to the limit of
k+1: three windows, and the rest of one when it was renewed. That many generations and one more are
enough, whatever the number of threads.
Run: python3 generation.py [RULE]. Each of these breaks it: no-window, three-generations (there are
four; a window is one), admit-outside (a turn is admitted, and then opens its guard), renew-always
(whatever guards are open), renew-blindly (two at a time, each from its own look at the limit),
turn-again (a turn protects T twice), two-guards (a push keeps the value of T from one guard to
the next).
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'T L B admitted limit renewing renewed epoch announced')
GENERATIONS = 3 if BUG == 'three-generations' else 4
WINDOW = 1
CONFIGURATIONS = 'push+install+turns6 push+install+turns3+turns2 push+install+turns2+turns1+turns1'


def make(kinds):
    first = {'push': 'look', 'install': 'install'}
    return Shared((0, 0), (0, None), (0, 0), 0, WINDOW, 0, 0, 1, (0,) * len(kinds)), tuple(
        (k.rstrip('0123456789'), first.get(k, 'begin'), (int(k[5:]),) if k[0] == 't' else ()) for k in kinds)


def wrong(state):
    s, threads = state
    for p in 0, 1:
        if s.T[0] and s.L[p] and not s.B[p] and not any(
                (kind, pc) in ((('push', 'mark'), ('install', 'mark'))[p], ('turns', 'protect')) for kind, pc, _ in threads):
            return f'page {p} may be written and is not marked'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    T, L, B = s.T, s.L, s.B

    def announce(epoch): return put(s.announced, i, epoch)

    if kind == 'install':
        if pc == 'install': yield go('mark', L=put(L, 1, 1))
        else: yield go('end', B=put(B, 1, 1))

    elif kind == 'push':
        if pc == 'look' and not loc: yield go('look', (s.epoch,))                  # announced later
        elif pc == 'look': yield go('look-at-T', announced=announce(loc[0]))
        elif pc == 'look-at-T': yield go('end', announced=announce(0)) if T[0] else go('clear', (T,))
        elif pc == 'clear': yield go('between' if BUG == 'two-guards' else 'set', loc, L=put(L, 1, 0) if L[1] else L)
        elif pc == 'between': yield go('again', loc, announced=announce(0))
        elif pc == 'again': yield go('set', loc, announced=announce(s.epoch))
        elif pc == 'set': yield go('open', loc, L=put(L, 0, 1))
        elif pc == 'open': yield go('mark', (T == loc[0],), T=(1, T[1]) if T == loc[0] else T)
        elif pc == 'mark': yield go('end' if loc[0] else 'look', B=put(B, 0, 1), announced=announce(0))

    # Turns. loc: turns to go; then the limit seen, or whether admitted.
    elif pc == 'begin':
        is_low = s.admitted >= s.limit and BUG != 'no-window'
        if is_low and BUG == 'renew-blindly': yield go('oldest', loc)
        elif is_low and not s.renewing: yield go('oldest', loc, renewing=1)
        else: yield go('enter', loc)
    elif pc == 'oldest':
        open_epochs = [epoch for epoch in s.announced if epoch]
        is_low = s.admitted >= s.limit or BUG == 'renew-blindly'
        if is_low and (BUG == 'renew-always' or not open_epochs or s.renewed < min(open_epochs)): yield go('renew', loc)
        else: yield go('enter', loc, renewing=0)
    elif pc == 'renew': yield go('enter', loc, renewing=0, limit=s.limit + WINDOW, epoch=s.epoch + 1, renewed=s.epoch)
    elif pc == 'enter':
        if BUG == 'admit-outside' and len(loc) == 1:
            yes = s.admitted < s.limit
            yield go('enter', loc + (yes,), admitted=s.admitted + yes)
        else: yield go('protect' if len(loc) > 1 else 'admit', loc, announced=announce(s.epoch))
    elif pc == 'admit':
        yes = BUG == 'no-window' or s.admitted < s.limit
        yield go('protect', loc + (yes,), admitted=s.admitted + (yes and BUG != 'no-window'))
    elif pc == 'protect':
        if not loc[1]: T, L = T, tuple(0 if w and taken else w for w, taken in zip(L, B))
        else: T = 0, (T[1] + 1) % GENERATIONS
        if BUG == 'turn-again' and loc[1:] == (True,): yield go('protect', loc + ('again',), T=T, B=(0, 0))
        else:
            to = ('begin', (loc[0] - 1,)) if loc[0] > 1 else ('end', ())
            yield go(*to, T=T, L=L, B=(0, 0), announced=announce(0))


if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
