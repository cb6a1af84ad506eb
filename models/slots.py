"""Explicit-state check of slots that are deleted, moved or replaced, and of tables that are
unlinked, beside faults.

Two places, 0 and 1, each one guest page under a two-level tree. P[x] is the parent entry: ('E',
seq) or ('T', i); T[i] is the entry in the lowest table i: ('E', seq) or ('L', frame). A frame is
(slot, version of the backing's page). slots[x] is the slot at place x, or None; at first 'a' is at
place 0 ('a2': another slot of the same backing).
Invalidator: publish the range -> seq -> first pass: write the seq to each lowest entry, or zap it
    -> second pass: unlink the table that it finds, for an empty entry with a seq of its own ->
    flush -> the host moves the page -> withdraw.
Change: claim the slot -> the same, of its old place -> publish the set (without it, or with it at
    the other place) -> withdraw -> create. Nothing is frozen: an unlinked lowest table has nothing
    to lose.
Fault: read the lowest entry -> published ranges, one by one -> slot -> resolve -> walk again,
    exchange if the entry is empty with the very seq of the look.
Kinds (0, 1: of that place): 'inval' stays below the table, 'unlink' covers all of it; 'move' to the
other place; 'delete'; 'replace' (then a slot of another backing is made), 'recreate' (of the same);
'fail' (the set could not be published, the slot stays); 'small' replaces a slot that is smaller
than the table, and unlinks nothing; 'create1'; 'host' invalidates both places, since a host that
moves the page of a backing must name every place where the backing may be.
Wrong: a leaf of a slot that is not at its place, or of a frame that is gone; a leaf in an unlinked
table.
The entries of an unlinked table may hold a greater seq, of a later change, which is lost with the
table. A fault reads ranges and slot at several moments. It may miss the change that unlinks, since
that is over, and the later change, since that was not there yet. So the seq in the parent must be
one that no fault can have read before: then a fault that looked earlier fails, and a fault that
looked later came after the later change had published (which walked into the table before it was
unlinked).
Run: python3 slots.py [BUG]; BUG in {no-number, number-before-publish, old-number (unlinks with the seq
of its entries), withdraw-before-set, check-before-read (ranges before the entry),
slots-before-ranges (both reads miss a deletion that ends between them)}: each breaks it.
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P T counter published slots claimed versions freed')
ORDER = {'check-before-read': 'res', 'slots-before-ranges': 'esr'}.get(BUG, 'ers')
CHANGES = ('delete', 'replace', 'recreate', 'small', 'fail', 'move')
TOUCHES = {'inval': (0,), 'inval0': (0,), 'inval1': (1,), 'unlink': (0,), 'unlink1': (1,), 'host': (0, 1)}


def make(kinds):
    first = lambda kind: 'look' if kind.startswith('fault') else 'create' if kind == 'create1' else \
        'claim' if kind in CHANGES else 'publish'
    threads = tuple((kind, first(kind), (0, 0, None, None) if kind.startswith('fault') else
                     TOUCHES.get(kind, ())) for kind in kinds)
    return Shared((('T', 0), ('E', 0)), (('E', 0),), 0, frozenset(), ('a', None), False, (0, 0), frozenset()), threads


def backing(slot):
    return 1 if slot in ('b', 'c') else 0


def wrong(state):
    s = state[0]
    for x, p in enumerate(s.P):
        leaf = s.T[p[1]] if p[0] == 'T' else p
        if leaf[0] == 'L':
            if leaf[1][0] != s.slots[x]: return 'leaf of a slot that is not there'
            if (backing(leaf[1][0]), leaf[1][1]) in s.freed: return 'leaf of a frame that is gone'
    linked = {p[1] for p in s.P if p[0] == 'T'}
    for i, e in enumerate(s.T):
        if e[0] == 'L' and i not in linked: return 'leaf in an unlinked table'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T
    if kind.startswith('fault'): yield from fault(s, threads, i, go, 1 if kind == 'fault1' else 0)

    # Changes and invalidations. loc: their places, always; then the seq (a string, if it was taken too early).
    elif pc == 'claim':
        if s.claimed or 'a' not in s.slots: yield go('end')
        else: yield go('publish', (s.slots.index('a'),), claimed=True)
    elif pc == 'publish' and BUG == 'number-before-publish' and not isinstance(loc[-1], str):
        yield go('publish', loc + (str(s.counter + 1),), counter=s.counter + 1)
    elif pc == 'publish':
        early = isinstance(loc[-1], str)
        places = loc[:-1] if early else loc
        to = ('visit', (places, int(loc[-1]), 0, 1)) if early else ('seq', (places,))
        yield go(*to, published=s.published | {(i, places)})
    elif pc == 'seq': yield go('visit', loc + (s.counter + 1, 0, 1), counter=s.counter + 1)
    elif pc == 'visit':                                 # loc: places, seq, index of the place, pass
        places, seq, n, number = loc
        if n == len(places): yield go('flush', loc[:1]) if number == 2 or kind in ('inval', 'inval0', 'inval1', 'small') \
            else go('visit', (places, seq, 0, 2))
        else:
            p = P[places[n]]
            done = (places, seq, n + 1, number)
            if p[0] == 'E': yield go('visit', done) if p[1] >= seq else go('seq-above', loc + (p,))
            elif number == 1: yield go('below', loc + (p[1],))
            elif BUG == 'old-number': yield go('unlink', loc + (p, seq))
            else: yield go('unlink', loc + (p, s.counter + 1), counter=s.counter + 1)
    elif pc == 'seq-above':
        x = loc[0][loc[2]]
        yield go('visit', loc[:4], P=put(P, x, ('E', loc[1])) if P[x] == loc[4] else P)
    elif pc == 'unlink':
        x = loc[0][loc[2]]
        yield go('visit', loc[:4], P=put(P, x, ('E', loc[5])) if P[x] == loc[4] else P)
    elif pc == 'below':
        places, seq, n, number, table = loc
        e, done = T[table], (places, seq, n + 1, number)
        if e[0] == 'E' and (e[1] >= seq or BUG == 'no-number'): yield go('visit', done)
        else: yield go('zap', loc + (e,))
    elif pc == 'zap':
        places, seq, n, number, table, old = loc
        if T[table] == old: yield go('visit', (places, seq, n + 1, number), T=put(T, table, ('E', seq)))
        else: yield go('below', loc[:5])
    elif pc == 'flush':
        if kind in CHANGES: yield go('withdraw' if BUG == 'withdraw-before-set' else 'set', loc)
        elif s.slots[loc[0][0]] is None and len(loc[0]) == 1: yield go('withdraw', loc)
        else:
            b = 0 if len(loc[0]) == 2 else backing(s.slots[loc[0][0]])
            yield go('withdraw', loc, versions=put(s.versions, b, s.versions[b] + 1),
                     freed=s.freed | {(b, s.versions[b])})
    elif pc == 'set':
        to = 'set-done' if BUG == 'withdraw-before-set' else 'withdraw'
        x = loc[0][0]
        if kind == 'fail': yield go(to, loc)
        elif kind != 'move': yield go(to, loc, slots=put(s.slots, x, None))
        elif s.slots[1 - x] is not None: yield go(to, loc)                      # refused: overlap
        else: yield go(to, loc, slots=put(put(s.slots, x, None), 1 - x, 'a'))
    elif pc == 'withdraw':
        to = 'set' if BUG == 'withdraw-before-set' and kind in CHANGES else 'set-done'
        yield go(to, loc, published=s.published - {(i, loc[0])})
    elif pc == 'set-done':
        if kind in ('replace', 'recreate', 'small'): yield go('create', loc)
        elif kind in ('fail', 'move'): yield go('end', claimed=False)
        else: yield go('end')
    elif pc == 'create':
        x = 1 if kind == 'create1' else loc[0][0]
        new = {'create1': 'c', 'recreate': 'a2'}.get(kind, 'b')
        yield go('end', slots=put(s.slots, x, new) if s.slots[x] is None else s.slots)


def fault(s, threads, i, go, x):
    kind, pc, loc = threads[i]
    P, T = s.P, s.T
    if pc == 'look':
        n, number, seen, slot = loc
        what = ORDER[n:n + 1]
        if not what: yield go('resolve', (seen, slot))
        elif what == 'e' and P[x][0] == 'T': yield go('look-below', loc + (P[x][1],))
        elif what == 'e': yield go('look', (n + 1, 0, P[x][1], slot))
        elif what == 's': yield go('look', (n + 1, 0, seen, s.slots[x])) if s.slots[x] else go('end')
        else:
            while number < len(threads) and (threads[number][0].startswith('fault') or threads[number][0] == 'create1'):
                number += 1
            if number == len(threads): yield go('look', (n + 1, 0, seen, slot))
            elif any(owner == number and x in places for owner, places in s.published): yield go('end')
            else: yield go('look', (n, number + 1, seen, slot))
    elif pc == 'look-below':
        n, _, _, slot, table = loc
        yield go('end') if T[table][0] == 'L' else go('look', (n + 1, 0, T[table][1], slot))
    elif pc == 'resolve': yield go('act', (loc[0], (loc[1], s.versions[backing(loc[1])])))
    elif pc == 'act':
        if P[x][0] == 'T': yield go('act-below', loc + (P[x][1],))
        else: yield go('link', loc + (P[x],)) if P[x][1] == loc[0] else go('end')
    elif pc == 'link':
        if P[x] == loc[2]: yield go('end', P=put(P, x, ('T', len(T))), T=T + (('L', loc[1]),))
        else: yield go('end')
    elif pc == 'act-below':
        e = T[loc[2]]
        yield go('install', loc + (e,)) if e == ('E', loc[0]) else go('end')
    elif pc == 'install': yield go('end', T=put(T, loc[2], ('L', loc[1])) if T[loc[2]] == loc[3] else T)


CONFIGURATIONS = '''
fault+delete fault+fault+replace fault+fail+inval fault+recreate+inval fault+inval+unlink fault+unlink+unlink
fault+recreate+unlink fault+small+unlink fault+unlink+small
fault0+fault1+move fault0+fault1+move+move fault1+move+delete fault0+fault1+move+replace fault1+move+create1
fault0+move+host fault1+move+host fault0+move+unlink'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
