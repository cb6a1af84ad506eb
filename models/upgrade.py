"""Explicit-state check of the replacement of a leaf that the host did not allow to be written, beside invalidations.

One page, one entry: ('E', stamp) empty, ('L', frame, writable). The host has the page in one frame and lets it be
written or not; a write that it resolves makes it writable, an invalidation moves it to the other frame or makes it
read-only. So the same leaf can come back (A-B-A), and an old answer can be wrong for it.
Fault:       look (entry; counter; published ranges) -> resolve -> on an empty entry: exchange it for the leaf if it
             still has the stamp of the look.
             On a read-only leaf v, for a write: take a stamp s -> exchange v for ('E', s) -> read the counter: only if
             it is one above that of the look, nobody else took a stamp since -> exchange ('E', s) for the new leaf.
Invalidator: publish -> stamp -> zap or stamp the entry -> flush -> the host changes the page -> withdraw.
Wrong: a leaf of a frame that the page is not in, or a writable one where the host allows no writing.
Run: python3 upgrade.py [BUG]; BUG in {no-counter, counter-before-exchange, counter-after-published, at-most}:
each breaks it. counter-before-exchange: only s is compared, and the counter is not read again behind the exchange.
at-most: a fault installs if the entry's stamp is not above its own. Here a stamp can fall, so it must be equal.
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'entry counter published frame writable')


def make(kinds):
    first = {'read': 'look', 'write': 'look'}
    return Shared(('L', 0, 0), 0, frozenset(), 0, 0), tuple((kind, first.get(kind, 'publish'), ()) for kind in kinds)


def wrong(state):
    s = state[0]
    if s.entry[0] == 'L' and s.entry[1] != s.frame: return 'leaf of a frame that was taken away'
    if s.entry[0] == 'L' and s.entry[2] > s.writable: return 'writable leaf of a page that the host has made read-only'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    e = s.entry
    if pc == 'look':
        if BUG == 'counter-after-published': yield go('published', (e, None))
        elif e[0] == 'E': yield go('published', (e, None))
        elif kind == 'read' or e[2]: yield go('end')
        else: yield go('counter', (e,))
    elif pc == 'counter': yield go('published', loc + (s.counter,))
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
        if found[0] == 'E':
            same = e == found or BUG == 'at-most' and e[0] == 'E' and e[1] <= found[1]
            if same: yield go('install', (e, leaf))
            else: yield go('end')
        elif e == found: yield go('replace', (found, seen, leaf, s.counter + 1), counter=s.counter + 1)
        else: yield go('end')
    elif pc == 'replace':
        found, seen, leaf, stamp = loc
        if e != found: yield go('end')
        elif BUG == 'no-counter' or BUG == 'counter-before-exchange' and stamp == seen + 1:
            yield go('install', (('E', stamp), leaf), entry=('E', stamp))
        elif BUG == 'counter-before-exchange': yield go('end', entry=('E', stamp))
        else: yield go('recount', loc, entry=('E', stamp))
    elif pc == 'recount':
        found, seen, leaf, stamp = loc
        if s.counter == seen + 1: yield go('install', (('E', stamp), leaf))
        else: yield go('end')
    elif pc == 'install': yield go('end', entry=loc[1]) if e == loc[0] else go('end')
    elif pc == 'publish': yield go('stamp', published=s.published | {i})
    elif pc == 'stamp': yield go('visit', (s.counter + 1,), counter=s.counter + 1)
    elif pc == 'visit':
        if e[0] == 'E' and e[1] >= loc[0]: yield go('host')
        else: yield go('zap', loc + (e,))
    elif pc == 'zap': yield go('host', entry=('E', loc[0])) if e == loc[1] else go('visit', loc[:1])
    elif pc == 'host':
        if kind == 'move': yield go('withdraw', frame=1 - s.frame, writable=0)
        else: yield go('withdraw', writable=0)
    elif pc == 'withdraw': yield go('end', published=s.published - {i})


if __name__ == "__main__":
    main((('write', 'read', 'protect'), ('write', 'write', 'read', 'protect'),
          ('write', 'read', 'read', 'protect', 'move'), ('write', 'read', 'read', 'move', 'move')), make, step, wrong)
