"""Explicit-state check of invalidations of two pages under one table: partial cover, huge leaves, CPUs, dirty reports.

P is the parent entry: ('E', stamp), ('L', (frame of page 0, of page 1), D) a huge leaf, or ('T', i). T[i][page] is an
entry of table i: ('E', stamp), ('L', frame, D), ('K', frame, D) tracked, or 'F' frozen. A frame is a version of the
page; an invalidation moves the page to the next one, and the old frame is gone.
Fault (fault0, fault1: of that page; huge0: the host would have a huge leaf):
             look: entry -> published ranges: the page is in one, or the leaf is no larger than what they leave ->
             resolve -> walk again, exchange if the entry is empty with the very stamp seen, and not lower than the leaf.
             A tracked leaf is given back.
Age (age0):  leaf -> tracked.
Invalidator (zap0, zap1: of that page; zap: of both; oom0, oom1: of that page, with no memory for tables; keep0, keep: the
             host takes no frame away): publish -> stamp -> what it covers in part is refined (empty entry -> table with
             that stamp; huge leaf -> table of leaves) -> each entry: a leaf is reported to the host, then exchanged for
             empty from the value reported; an empty one is stamped -> the table, if all of it is covered: take a stamp,
             unlink, freeze -> flush, retire the table -> the host frees the frames -> withdraw.
CPU:         at any moment fills its cache of tables from P, or a translation from a cached table or from P; a write sets D
             in the entry. A flush of a page drops what it has cached of the page, and of the tables above it.
Wrong: a leaf, or a CPU's translation, of a frame that is gone; a CPU in a table that was freed; a frame that is gone
whose D was set and not reported; a frozen entry in a linked table; a leaf in a table that is being frozen.
Reports: an invalidator that finds the page empty returns, and its host frees the frame. So whoever took the leaf away must
have reported it before, and no leaf may go out of sight with its table. A report may be made twice, and the second one may
come when the frame is gone: nobody waits, so that cannot be helped, and a host must bear it.
Run: python3 zap.py [BUG]. Each of these breaks it: no-stamp, stamp-before-publish, check-before-read, no-inherit,
refine-no-inherit, huge-ignores-published (only where an entry that is covered in part is stamped as a whole), no-flush,
flush-if-changed (not by one that found nothing mapped), free-before-flush, table-before-flush, split-no-dirty, tracked-clean
(tracking forgets D), blind-exchange (a leaf is taken away whatever its D is by now), report-late (after the exchange),
unlink-full (a table goes as it is, its leaves are reported when it is frozen). no-freeze is right too: an unlinked table has
nothing to lose here. Freezing is for tables that hang in it, and for who stands in it.
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'P T counter published frames gone tables psc tlb pending found')
NR_FILLS = 3
LAST = {'free-before-flush': ('host', 'flush', 'retire', 'withdrawn'),
        'table-before-flush': ('retire', 'flush', 'host', 'withdrawn')}.get(BUG, ('flush', 'retire', 'host', 'withdrawn'))
CONFIGURATIONS = '''
fault0+fault1+zap0 fault0+fault1+zap fault0+zap0+zap huge0+zap1 huge0+fault1+zap1 fault0+huge0+zap1+cpu
huge0+oom0+cpu huge0+oom1+cpu huge0+zap1+zap
from-leaf+zap0+zap+cpu from-leaf+zap0+zap1+cpu from-leaf+oom0+zap+cpu from-table+zap0+zap+cpu from-table+zap+zap+cpu
from-table+age0+zap0+cpu from-table+age0+fault0+zap+cpu fault0+fault1+zap0+zap from-table+fault0+zap0+zap+cpu
from-leaf+fault0+zap0+zap+cpu from-table+fault0+keep0+zap0+cpu from-table+fault0+keep+keep0+cpu
from-leaf+fault0+oom0+keep+cpu from-leaf+huge0+oom1+keep0+cpu'''
PAGES = {'zap': (0, 1), 'zap0': (0,), 'zap1': (1,), 'oom0': (0,), 'oom1': (1,),
         'keep': (0, 1), 'keep0': (0,), 'fault0': (0,), 'fault1': (1,), 'huge0': (0,), 'age0': (0,)}


def make(kinds):
    P, T = ('E', 0), ()
    if 'from-leaf' in kinds: P = ('L', (0, 0), 0)
    if 'from-table' in kinds: P, T = ('T', 0), ((('L', 0, 0), ('E', 0)),)
    first = {'fault': 'look', 'huge': 'look', 'age': 'look', 'cpu': NR_FILLS}
    threads = tuple((k, first.get(k.rstrip('01'), 'publish'), ()) for k in kinds if not k.startswith('from'))
    return Shared(P, T, 0, frozenset(), (0, 0), frozenset(), frozenset(), None, (None, None), frozenset(), False), threads


def leaf_of(s, p):
    """The frame that page p is mapped to."""
    e = s.T[s.P[1]][p] if s.P[0] == 'T' else s.P
    if e[0] in 'LK': return e[1] if s.P[0] == 'T' else e[1][p]


def wrong(state):
    s = state[0]
    for p in 0, 1:
        if (p, leaf_of(s, p)) in s.gone: return 'leaf of a frame that is gone'
        if (p, s.tlb[p]) in s.gone: return 'CPU uses a frame that is gone'
    if s.psc in s.tables: return 'CPU walks a freed table'
    if s.pending & s.gone: return 'dirty frame is gone and was not reported'
    if s.found: return 'leaf in a table that is being frozen'
    if s.P[0] == 'T' and 'F' in s.T[s.P[1]]: return 'frozen entry in a linked table'


def put(t, i, v):
    return t[:i] + (v,) + t[i + 1:]


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T

    def entry(i, p, v): return put(T, i, put(T[i], p, v))

    def report(e, pages):
        """What changes when the host is told of the leaf e."""
        if not e[2]: return {}
        told = {(p, e[1][p] if isinstance(e[1], tuple) else e[1]) for p in pages}
        return {'pending': s.pending - told}

    if kind == 'cpu':
        yield go('end')
        if P[0] == 'T' and s.psc != P[1]: yield next_fill(go, pc, psc=P[1])
        for p in 0, 1:
            if P[0] == 'L':
                yield next_fill(go, pc, tlb=put(s.tlb, p, P[1][p]))
                if not P[2]: yield next_fill(go, pc, tlb=put(s.tlb, p, P[1][p]), P=('L', P[1], 1),
                                             pending=s.pending | {(p, P[1][p])})
            if s.psc is not None and T[s.psc][p][0] == 'L':
                e = T[s.psc][p]
                yield next_fill(go, pc, tlb=put(s.tlb, p, e[1]))
                if not e[2]: yield next_fill(go, pc, tlb=put(s.tlb, p, e[1]), T=entry(s.psc, p, ('L', e[1], 1)),
                                             pending=s.pending | {(p, e[1])})
        return

    pages = PAGES[kind]
    p = pages[0]
    if kind == 'age0':
        if pc == 'look': yield go('look-below', (P[1],)) if P[0] == 'T' else go('end')
        elif pc == 'look-below':
            e = T[loc[0]][p]
            if e == 'F': yield go('look')
            else: yield go('age', loc + (e,)) if e[0] == 'L' else go('end')
        elif pc == 'age':
            same, e = T[loc[0]][p] == loc[1], loc[1]
            tracked = ('K', e[1], 0 if BUG == 'tracked-clean' else e[2])
            yield go('end', T=entry(loc[0], p, tracked)) if same else go('look-below', loc[:1])
        return

    published = {p for _, pages in s.published for p in pages}
    if pc == 'look' and BUG == 'check-before-read' and not loc:
        yield go('end') if p in published else go('look', (0 if published else 1,))
    elif pc == 'look':
        if P[0] == 'E': yield go('ranges', loc + (P[1], kind == 'huge0'))
        elif P[0] == 'L': yield go('end')
        else: yield go('look-below', loc + (P[1],))
    elif pc == 'look-below':
        e = T[loc[-1]][p]
        if e == 'F': yield go('look', loc[:-1])
        elif e[0] == 'L': yield go('end')
        elif e[0] == 'K': yield go('give-back', (loc[-1], e))
        else: yield go('ranges', loc[:-1] + (e[1], 0))
    elif pc == 'give-back':
        yield go('end', T=entry(loc[0], p, ('L',) + loc[1][1:]) if T[loc[0]][p] == loc[1] and p not in published else T)
    elif pc == 'ranges':
        if BUG == 'check-before-read': yield go('resolve', (loc[1], loc[0] and loc[2]))
        elif p in published: yield go('end')
        else: yield go('resolve', (loc[0], loc[1] and (not published or BUG == 'huge-ignores-published')))
    elif pc == 'resolve': yield go('act', loc + (s.frames,))
    elif pc == 'act':
        seen, huge, frames = loc
        if P[0] == 'L': yield go('end')
        elif P[0] == 'T': yield go('end') if huge else go('act-below', loc + (P[1],))
        elif P[1] == seen: yield go('link', (P, huge, frames))
        else: yield go('end')
    elif pc == 'link':
        (_, stamp), huge, frames = loc
        beside = ('E', 0 if BUG == 'no-inherit' else stamp)
        if P != loc[0]: yield go('end')
        elif huge: yield go('end', P=('L', frames, 0))
        else: yield go('end', P=('T', len(T)), T=T + (put((beside, beside), p, ('L', frames[p], 0)),))
    elif pc == 'act-below':
        seen, _, frames, table = loc
        e = T[table][p]
        if e == 'F': yield go('act', loc[:3])
        elif e[0] != 'E' or e[1] != seen: yield go('end')
        else: yield go('install', (table, e, frames[p]))
    elif pc == 'install':
        yield go('end', T=entry(loc[0], p, ('L', loc[2], 0)) if T[loc[0]][p] == loc[1] else T)

    # Invalidators. loc: (stamp, changed, tables to retire, next page, ...)
    elif pc == 'publish':
        if BUG == 'stamp-before-publish' and not loc: yield go('publish', (s.counter + 1,), counter=s.counter + 1)
        else: yield go('walk' if loc else 'stamp', loc and loc + (False, (), 0), published=s.published | {(i, pages)})
    elif pc == 'stamp': yield go('walk', (s.counter + 1, False, (), 0), counter=s.counter + 1)
    elif pc == 'walk':
        stamp, changed, tables, n = loc[:4]
        whole = kind in ('zap', 'keep', 'oom0', 'oom1')
        if P[0] == 'E' and P[1] >= stamp: yield go(LAST[0], loc[:4])
        elif P[0] == 'T': yield go('unlink?' if kind in ('zap', 'keep') and (n == 2 or BUG == 'unlink-full') else 'below', loc[:4] + (P[1],))
        elif P[0] == 'L' and whole and BUG != 'report-late': yield go('tell-above', loc[:4] + (P,))
        else: yield go('zap-above' if whole else 'refine', loc[:4] + (P,))
    elif pc == 'tell-above': yield go('zap-above', loc, **report(loc[4], (0, 1)))
    elif pc == 'refine':
        old = loc[4]
        if P != old: yield go('walk', loc[:4])
        elif old[0] == 'E':
            e = ('E', 0 if BUG == 'refine-no-inherit' else old[1])
            yield go('below', loc[:4] + (len(T),), P=('T', len(T)), T=T + ((e, e),))
        else:
            part = [('L', f, 0 if BUG == 'split-no-dirty' else old[2]) for f in old[1]]
            yield go('below', loc[:4] + (len(T),), P=('T', len(T)), T=T + (tuple(part),))
    elif pc == 'zap-above':
        old = loc[4]
        if P[:2] != old[:2] or P != old and BUG != 'blind-exchange': yield go('walk', loc[:4])
        elif old[0] == 'L' and BUG == 'report-late':
            yield go('report', (loc[0], True, loc[2], 2, P), P=('E', loc[0]))
        else: yield go(LAST[0], (loc[0], loc[1] or old[0] == 'L', loc[2], 2), P=('E', loc[0]))
    elif pc == 'below':
        stamp, changed, tables, n, table = loc
        e = T[table][pages[n]]
        if e == 'F': yield go('walk', loc[:4])
        elif e[0] == 'E' and (e[1] >= stamp or BUG == 'no-stamp'): yield after_entry(go, kind, loc[:4])
        else: yield go('zap-below' if e[0] == 'E' or BUG == 'report-late' else 'tell-below', loc + (e,))
    elif pc == 'tell-below': yield go('zap-below', loc, **report(loc[5], (pages[loc[3]],)))
    elif pc == 'zap-below':
        stamp, changed, tables, n, table, old = loc
        e, q = T[table][pages[n]], pages[n]
        if e[:2] != old[:2] or e != old and BUG != 'blind-exchange': yield go('below', loc[:5])
        elif e[0] != 'E' and BUG == 'report-late':
            yield go('report', (stamp, True, tables, n, e), T=entry(table, q, ('E', stamp)))
        else: yield after_entry(go, kind, (stamp, changed or e[0] != 'E', tables, n), T=entry(table, q, ('E', stamp)))
    elif pc == 'report':
        told = report(loc[4], (0, 1) if isinstance(loc[4][1], tuple) else (pages[loc[3]],))
        yield go(LAST[0], loc[:4], **told) if loc[3] == 2 else after_entry(go, kind, loc[:4], **told)
    elif pc == 'unlink?': yield go('unlink', loc + (s.counter + 1,), counter=s.counter + 1)
    elif pc == 'unlink':
        stamp, changed, tables, n, table, fresh = loc
        if P != ('T', table): yield go('walk', loc[:4])
        else: yield go(LAST[0] if BUG == 'no-freeze' else 'freeze', (stamp, True, tables + (table,), 0, table), P=('E', fresh))
    elif pc == 'freeze':
        stamp, changed, tables, n, table = loc
        e = T[table][n]
        told = {} if e[0] not in 'LK' else report(e, (n,)) if BUG == 'unlink-full' else {'found': True}
        yield go('freeze' if n == 0 else LAST[0], (stamp, changed, tables, n + 1) + ((table,) if n == 0 else ()),
                 T=entry(table, n, 'F'), **told)

    elif pc in LAST[:3]:                                     # loc[2]: the tables that were unlinked
        to = LAST[LAST.index(pc) + 1]
        if pc == 'retire': yield go(to, loc, tables=s.tables | set(loc[2]))
        elif pc == 'host' and kind in ('keep', 'keep0'): yield go(to, loc)
        elif pc == 'host': yield go(to, loc, gone=s.gone | {(p, s.frames[p]) for p in pages},
                                    frames=tuple(f + (p in pages) for p, f in enumerate(s.frames)))
        elif BUG == 'no-flush' or BUG == 'flush-if-changed' and not loc[1]: yield go(to, loc)
        else: yield go(to, loc, psc=None, tlb=tuple(None if p in pages else t for p, t in enumerate(s.tlb)))
    elif pc == 'withdrawn': yield go('end', published=frozenset(x for x in s.published if x[0] != i))


def next_fill(go, n, **changes):
    return go(n - 1 if n > 1 else 'end', **changes)


def after_entry(go, kind, loc, **changes):
    """Where an invalidator goes on after an entry of a table."""
    if kind in ('zap', 'keep'): return go('walk', loc[:3] + (loc[3] + 1,), **changes)
    return go(LAST[0], loc, **changes)


if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
