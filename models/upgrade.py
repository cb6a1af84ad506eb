"""Explicit-state check of the replacement of a leaf that the host did not allow to be written,
beside invalidations.

One page under a two-level tree: P is ('E', seq) or ('T', i), T[i] the page's entry in table i:
('E', seq) empty, ('L', frame, writable). The host has the page in one frame and lets it be written
or not. A write that it resolves makes it writable; an invalidation moves it to the other frame or
makes it read-only. So the same leaf can come back (A-B-A), and an old answer can be wrong for it.
Fault: look (entry; counter; published ranges) -> resolve -> walk again; on an empty entry: exchange
    it for the leaf if it still has the seq of the look.
    On a read-only leaf v, for a write: take a seq s -> exchange v for ('E', s) -> read the counter:
    only if it is one above that of the look, no other thread took a seq since -> exchange ('E', s)
    for the new leaf.
Invalidator: publish -> seq -> zap the entry or write the seq to it -> flush -> the host changes the
    page -> withdraw. 'protect' makes it read-only, 'move' moves it; 'unlink' moves it and unlinks
    the table before the flush, with a seq of its own. The table is not frozen: a fault in it finds
    another entry than its own.
Wrong: a leaf of a frame that the page is not in, or a writable one where the host allows no
writing; a leaf in an unlinked table.
Run: python3 upgrade.py [BUG]; BUG in {no-counter, counter-before-exchange, counter-after-published,
at-most}: each breaks it. counter-before-exchange: only s is compared, and the counter is not read
again behind the exchange. at-most: a fault installs if the entry's seq is not above its own. Here a
seq can become lower, so it must be equal.
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'P T counter published frame writable')


def make(kinds):
    first = {'read': 'look', 'write': 'look'}
    return Shared(('T', 0), (('L', 0, 0),), 0, frozenset(), 0, 0), tuple(
        (kind, first.get(kind, 'publish'), ()) for kind in kinds)


def wrong(state):
    s = state[0]
    for i, e in enumerate(s.T):
        if e[0] == 'L':
            if s.P != ('T', i): return 'leaf in an unlinked table'
            if e[1] != s.frame: return 'leaf of a frame that is gone'
            if e[2] > s.writable: return 'writable leaf of a page that the host has made read-only'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    def at(table, value): return s.T[:table] + (value,) + s.T[table + 1:]

    P, T = s.P, s.T
    if pc == 'look': yield go('published', (P, None)) if P[0] == 'E' else go('look-below', (P[1],))
    elif pc == 'look-below':
        e = T[loc[0]]
        if e[0] == 'E': yield go('published', (e, None))
        elif kind == 'read' or e[2]: yield go('end')
        else: yield go('published' if BUG == 'counter-after-published' else 'counter', (e, None))
    elif pc == 'counter': yield go('published', (loc[0], s.counter))
    elif pc == 'published':
        if s.published: yield go('end')
        elif BUG == 'counter-after-published' and loc[0][0] == 'L': yield go('late-counter', loc)
        else: yield go('resolve', loc)
    elif pc == 'late-counter': yield go('resolve', (loc[0], s.counter))
    elif pc == 'resolve':
        writable = 1 if kind == 'write' else s.writable
        yield go('act', loc + (('L', s.frame, writable),), writable=writable)
    elif pc == 'act':
        found, seen, leaf = loc
        if P[0] == 'T': yield go('act-below', loc + (P[1],))
        elif is_same(P, found): yield go('link', (P, leaf))
        else: yield go('end')
    elif pc == 'link': yield go('end', P=('T', len(T)), T=T + (loc[1],)) if P == loc[0] else go('end')
    elif pc == 'act-below':
        found, seen, leaf, table = loc
        e = T[table]
        if found[0] == 'E' and is_same(e, found): yield go('install', (e, leaf, table))
        elif found[0] == 'L' and e == found:
            yield go('replace', (found, seen, leaf, table, s.counter + 1), counter=s.counter + 1)
        else: yield go('end')
    elif pc == 'replace':
        found, seen, leaf, table, seq = loc
        if T[table] != found: yield go('end')
        elif BUG == 'no-counter' or BUG == 'counter-before-exchange' and seq == seen + 1:
            yield go('install', (('E', seq), leaf, table), T=at(table, ('E', seq)))
        elif BUG == 'counter-before-exchange': yield go('end', T=at(table, ('E', seq)))
        else: yield go('recount', loc, T=at(table, ('E', seq)))
    elif pc == 'recount':
        found, seen, leaf, table, seq = loc
        if s.counter == seen + 1: yield go('install', (('E', seq), leaf, table))
        else: yield go('end')
    elif pc == 'install': yield go('end', T=at(loc[2], loc[1]) if T[loc[2]] == loc[0] else T)

    elif pc == 'publish': yield go('seq', published=s.published | {i})
    elif pc == 'seq': yield go('walk', (s.counter + 1, 1), counter=s.counter + 1)
    elif pc == 'walk':                                              # loc: seq, pass
        seq, number = loc
        if P[0] == 'E': yield go('walked', loc) if P[1] >= seq else go('zap-above', loc + (P, seq))
        elif number == 1: yield go('visit', loc + (P[1],))
        else: yield go('zap-above', loc + (P, s.counter + 1), counter=s.counter + 1)
    elif pc == 'zap-above':
        seq, number, old, new = loc
        yield go('walked', (seq, number), P=('E', new)) if P == old else go('walk', (seq, number))
    elif pc == 'visit':
        e = T[loc[2]]
        if e[0] == 'E' and e[1] >= loc[0]: yield go('walked', loc[:2])
        else: yield go('zap', loc + (e,))
    elif pc == 'zap':
        seq, number, table, old = loc
        yield go('walked', (seq, number), T=at(table, ('E', seq))) if T[table] == old else go('visit', loc[:3])
    elif pc == 'walked': yield go('walk', (loc[0], 2)) if kind == 'unlink' and loc[1] == 1 else go('host')
    elif pc == 'host':
        if kind == 'protect': yield go('withdraw', writable=0)
        else: yield go('withdraw', frame=1 - s.frame, writable=0)
    elif pc == 'withdraw': yield go('end', published=s.published - {i})


def is_same(entry, found):
    return entry == found or BUG == 'at-most' and entry[0] == found[0] == 'E' and entry[1] <= found[1]


if __name__ == "__main__":
    main((('write', 'read', 'protect'), ('write', 'unlink'), ('write', 'read', 'unlink'), ('write', 'write', 'protect'),
          ('write', 'read', 'move', 'move'), ('write', 'read', 'read', 'move', 'move'), ('write', 'read', 'move', 'unlink'),
          ('write', 'write', 'unlink'), ('write', 'protect', 'unlink')), make, step, wrong)
