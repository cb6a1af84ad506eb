"""Explicit-state check of slots that are deleted or replaced, and of tables that are unlinked, beside faults.

One guest page under a two-level tree. P is the parent entry: ('E', stamp) or ('T', i); T[i] is the entry in table i:
('E', stamp), ('L', frame) or 'F' frozen. A frame is (backing, version): an invalidation moves the backing's page to the
next version. The set has one slot ('a'; 'a2' is another of the same backing, 'b' of another backing) or None.
Invalidator: publish the range -> stamp -> stamp or zap the entry -> flush -> the host moves the page -> withdraw.
Change:      mark the slot as withdrawn -> stamp -> stamp or zap -> flush -> publish the set without it -> create.
Unlinking:   (of both, where a whole table is covered) take a stamp for the unlinking alone -> exchange the table for an
             empty entry of that stamp -> freeze. A zap of several levels works so: entries first, tables above last.
Fault:       read the lowest entry -> published ranges, place by place -> slot -> is it the valid one -> resolve ->
             walk again, exchange if the entry is empty with the very stamp seen.
Kinds: 'delete', 'replace' (by a slot of another backing), 'recreate' (of the same) and 'fail' (the set could not be
published, the slot stays) are changes; 'small' replaces a slot that is smaller than the table, and unlinks nothing;
'inval' invalidates a part of the table, 'unlink' all of it.
The unlinked table takes a greater stamp of its entries, left by a later change, with it. A fault reads ranges and slot
at several moments: it may miss the change that unlinks, as it is over, and the later one, as it was not yet there.
So the stamp left must be one that nobody can have seen before: then whoever looked earlier fails, and whoever looked
later came after the later change had published (it walked into the table before it was unlinked).
Run: python3 slots.py [BUG]; BUG in {no-stamp, stamp-before-publish, no-place (whatever slot was found passes
for valid when none is withdrawn), old-stamp (unlinks with the stamp of its entries)} break it; slots-publish-ranges
(no mark: a change publishes the slot's range as an invalidator does) is right too.
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'P T counter published marked slots version freed gone')
MARK = BUG != 'slots-publish-ranges'
ORDER = 'rsv' if MARK else 'rs'                         # what a fault reads after the entry: ranges, slot, validity


def make(kinds):
    first = {'fault': 'look'}
    return Shared(('T', 0), (('E', 0),), 0, frozenset(), False, 'a', 0, frozenset(), False), tuple(
        (kind, first.get(kind, 'publish'), ()) for kind in kinds)


def wrong(state):
    s = state[0]
    leaf = s.T[s.P[1]] if s.P[0] == 'T' else s.P
    if leaf[0] == 'L':
        if leaf[1] in s.freed: return 'leaf of a frame that was taken away'
        if s.gone and leaf[1][0] == 'a': return 'leaf of a backing that is deleted'


def put(T, i, v):
    return T[:i] + (v,) + T[i + 1:]


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T
    if pc == 'look':
        if P[0] == 'E': yield go('read', (P[1], None, 0, 0))
        else: yield go('look-below', (P[1],))
    elif pc == 'look-below':
        c = T[loc[0]]
        if c == 'F': yield go('look')
        elif c[0] == 'L': yield go('end')
        else: yield go('read', (c[1], None, 0, 0))
    elif pc == 'read':                                  # ranges are read place by place, not at one moment
        seen, slot, n, place = loc
        what, refused = ORDER[n], False
        if what == 'r':
            refused = place in s.published
            place += 1
        elif what == 's': slot = s.slots; refused = slot is None
        else: refused = s.marked or BUG != 'no-place' and s.slots != slot
        if refused: yield go('end')
        elif what == 'r' and place < len(threads): yield go('read', (seen, slot, n, place))
        elif n + 1 < len(ORDER): yield go('read', (seen, slot, n + 1, 0))
        else: yield go('resolve', (seen, slot))
    elif pc == 'resolve':
        backing = 'b' if loc[1] == 'b' else 'a'
        yield go('act', (loc[0], (backing, s.version if backing == 'a' else 0)))
    elif pc == 'act':
        if P[0] == 'E': yield go('link', loc + (P,)) if P[1] == loc[0] else go('end')
        else: yield go('act-below', loc + (P[1],))
    elif pc == 'link':
        if P == loc[2]: yield go('end', P=('T', len(T)), T=T + (('L', loc[1]),))
        else: yield go('act', loc[:2])
    elif pc == 'act-below':
        c = T[loc[2]]
        if c == 'F': yield go('act', loc[:2])
        elif c[0] == 'L' or c[1] != loc[0]: yield go('end')
        else: yield go('install', loc + (c,))
    elif pc == 'install':
        if T[loc[2]] == loc[3]: yield go('end', T=put(T, loc[2], ('L', loc[1])))
        else: yield go('act-below', loc[:3])

    elif pc == 'publish' and BUG == 'stamp-before-publish' and not loc:
        yield go('publish', (s.counter + 1,), counter=s.counter + 1)
    elif pc == 'publish':
        to = 'walk' if loc else 'stamp'
        if kind not in ('inval', 'unlink') and MARK: yield go(to, loc, marked=True)
        else: yield go(to, loc, published=s.published | {i})
    elif pc == 'stamp': yield go('walk', (s.counter + 1,), counter=s.counter + 1)
    elif pc == 'walk':
        if P[0] == 'E': yield go('flush', loc) if P[1] >= loc[0] else go('stamp-above', loc + (P,))
        else: yield go('below', loc + (P[1],))
    elif pc == 'stamp-above': yield go('flush', loc[:1], P=('E', loc[0])) if P == loc[1] else go('walk', loc[:1])
    elif pc == 'below':
        c = T[loc[1]]
        if c == 'F': yield go('walk', loc[:1])
        elif c[0] == 'E' and (c[1] >= loc[0] or BUG == 'no-stamp'): yield go('walked', loc)
        else: yield go('zap', loc + (c,))
    elif pc == 'zap':
        if T[loc[1]] == loc[2]: yield go('walked', loc[:2], T=put(T, loc[1], ('E', loc[0])))
        else: yield go('below', loc[:2])
    elif pc == 'walked':
        if kind in ('inval', 'small'): yield go('flush', loc)
        elif BUG == 'old-stamp': yield go('unlink', loc[:1] + (loc[0], loc[1]))
        else: yield go('unlink', loc[:1] + (s.counter + 1, loc[1]), counter=s.counter + 1)
    elif pc == 'unlink': yield go('freeze', loc[::2], P=('E', loc[1])) if P == ('T', loc[2]) else go('walk', loc[:1])
    elif pc == 'freeze': yield go('flush', loc, T=put(T, loc[1], 'F'))
    elif pc == 'flush':
        if kind in ('inval', 'unlink'): yield go('withdraw', version=s.version + 1, freed=s.freed | {('a', s.version)})
        elif kind == 'fail': yield go('withdraw')
        else: yield go('withdraw', slots=None)
    elif pc == 'withdraw':
        if kind not in ('inval', 'unlink') and MARK: changes = {'marked': False}
        else: changes = {'published': s.published - {i}}
        if kind in ('inval', 'unlink', 'fail'): yield go('end', **changes)
        elif kind == 'delete': yield go('end', gone=True, **changes)
        else: yield go('create', gone=kind in ('replace', 'small'), **changes)
    elif pc == 'create': yield go('end', slots='a2' if kind == 'recreate' else 'b')


if __name__ == "__main__":
    main((('fault', 'delete'), ('fault', 'replace'), ('fault', 'fail', 'inval'), ('fault', 'recreate', 'inval'),
          ('fault', 'inval', 'unlink'), ('fault', 'unlink', 'inval'), ('fault', 'unlink', 'unlink'),
          ('fault', 'recreate', 'unlink'), ('fault', 'replace', 'unlink'), ('fault', 'small', 'unlink'),
          ('fault', 'unlink', 'small'), ('fault', 'fault', 'replace'), ('fault', 'fault', 'inval', 'unlink'),
          ('fault', 'fault', 'small', 'unlink')), make, step, wrong)
