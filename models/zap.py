"""Explicit-state check of what invalidations of two pages under one table report to the host, and of
when tables are freed: partial cover, huge leaves, CPUs. The proofs have the rest
(`proofs/invalidation.py`, `proofs/harvest_beside_zap.py`); they leave out D of huge leaves, splits
and tracked leaves, and the flush before a table is freed.

Words of all models: a *table* is a page-table page, an *entry* a PTE. `seq` is an invalidation
sequence number: each empty entry holds one, and `counter` is the last one that was taken. The
*published ranges* are the ranges in flight.

P is the parent entry: ('E', seq) empty, ('L', (frame of page 0, of page 1), D) a huge leaf, or
('T', i) table i. T[i][page] is an entry of table i: ('E', seq), ('L', frame, D), ('K', frame, D)
tracked, or 'F' frozen. A frame is a version of the page. An invalidation moves the page to the next
version, and the old frame is gone.
Fault: (fault0, fault1: of that page; huge0: the host allows a huge leaf) look: the entry -> the
    published ranges, one by one: none has the page, and the leaf is no larger than what they leave
    free -> resolve -> walk again -> exchange, if the entry is empty with the very seq of the look,
    and not lower than the leaf. A fault restores access to a tracked leaf. If P is empty with
    another seq, the fault refines it: a table with that seq replaces it.
Age: (age0, age1) leaf -> tracked.
Invalidator: (zap0, zap1: of that page; zap: of both; oom0, oom1: of that page, without memory for
    tables; keep0, keep: the host frees no frame) publish -> seq -> a
    huge leaf that is covered in part is split -> first pass, each entry: a leaf is reported to the
    host, then exchanged for empty if it still has the reported value; an empty one gets the seq, P
    as a whole even if it is covered in part -> second pass, if the table is covered as a whole: the
    table that is linked now is unlinked -> it is put on the list of retired tables -> flush ->
    retire -> the host frees the frames -> withdraw. The first seq is for entries of a table; P gets
    a fresh one each time. The list uses the entry of page 0, which is then frozen. That of page 1
    stays as it is.
CPU: at any moment caches the table of P, or a translation from a cached table or from P; a write
    sets D in the entry. A flush of a page drops its cached translations, and the cached tables
    above it.
Wrong: a leaf, or a CPU's translation, of a frame that is gone; a CPU in a freed table; a frame that
is gone whose D was set and not reported; a frozen entry in a linked table; a leaf in an unlinked
table, at any time.
Why entries are not frozen: all entries of a table are empty when it is unlinked, and no fault
installs there any more, since the range is published. An age finds no leaf there. The seq that
another invalidator writes there has no effect; it relies on the fresh seq above.
Reports: an invalidator that finds the page empty returns, and its host frees the frame. So the zap
of the leaf must have been preceded by its report, and no leaf may be unlinked with its table. A
leaf may be reported twice, the second time after its frame is gone: no thread waits, so a host must
tolerate that.
Run: python3 zap.py [BUG]. Each of these breaks it: table-before-flush, split-no-dirty, tracked-clean
(tracking loses D), blind-exchange (a leaf is zapped whatever its D is by now), report-late (after
the exchange).
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P T counter published frames gone tables psc tlb pending')
NR_FILLS = 3
INVALIDATORS = ('zap', 'oom', 'keep')
WHOLE = ('zap', 'keep')
LAST = ('retire', 'flush', 'host', 'withdrawn') if BUG == 'table-before-flush' else ('flush', 'retire', 'host', 'withdrawn')
CONFIGURATIONS = '''
fault0+huge0+zap1+cpu huge0+oom0+cpu huge0+oom1+cpu from-leaf+zap0+zap+cpu from-leaf+zap0+zap1+cpu
from-leaf+oom0+zap+cpu from-table+zap0+zap+cpu from-table+zap+zap+cpu from-table+age0+zap0+cpu
from-table+age0+fault0+zap+cpu from-page1+age1+fault1+zap1+zap from-page1+fault1+zap1+zap+cpu
from-table+fault0+zap0+zap+cpu from-leaf+fault0+zap0+zap+cpu from-table+fault0+keep0+zap0+cpu
from-table+fault0+keep+keep0+cpu from-leaf+fault0+oom0+keep+cpu from-leaf+huge0+oom1+keep0+cpu'''
PAGES = {'zap': (0, 1), 'zap0': (0,), 'zap1': (1,), 'oom0': (0,), 'oom1': (1,),
         'keep': (0, 1), 'keep0': (0,), 'fault0': (0,), 'fault1': (1,), 'huge0': (0,), 'age0': (0,), 'age1': (1,)}


def make(kinds):
    P, T = ('E', 0), ()
    if 'from-leaf' in kinds: P = ('L', (0, 0), 0)
    if 'from-table' in kinds: P, T = ('T', 0), ((('L', 0, 0), ('E', 0)),)
    if 'from-page1' in kinds: P, T = ('T', 0), ((('E', 0), ('L', 0, 0)),)
    first = {'fault': 'look', 'huge': 'look', 'age': 'look', 'cpu': NR_FILLS}
    threads = tuple((k, first.get(k.rstrip('01'), 'publish'), ()) for k in kinds if not k.startswith('from'))
    return Shared(P, T, 0, frozenset(), (0, 0), frozenset(), frozenset(), None, (None, None), frozenset()), threads


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
    for i, table in enumerate(s.T):
        if s.P == ('T', i):
            if 'F' in table: return 'frozen entry in a linked table'
        elif table[0][0] in 'LK' or table[1][0] in 'LK': return 'leaf in an unlinked table'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T

    def entry(i, p, v): return put(T, i, put(T[i], p, v))

    def report(e, pages):
        """What changes when the host is reported of the leaf e."""
        if not e[2]: return {}
        reported = {(p, e[1][p] if isinstance(e[1], tuple) else e[1]) for p in pages}
        return {'pending': s.pending - reported}

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
    if kind in ('age0', 'age1'):
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
    if pc == 'look':
        if P[0] == 'E': yield go('ranges', (P[1], kind == 'huge0'))
        elif P[0] == 'L': yield go('end')
        else: yield go('look-below', (P[1],))
    elif pc == 'look-below':
        e = T[loc[0]][p]
        if e == 'F': yield go('look')
        elif e[0] == 'L': yield go('end')
        elif e[0] == 'K': yield go('restore-ranges', (loc[0], e))
        else: yield go('ranges', (e[1], 0))
    elif pc == 'restore-ranges': yield go('end') if p in published else go('restore', loc)
    elif pc == 'restore': yield go('end', T=entry(loc[0], p, ('L',) + loc[1][1:]) if T[loc[0]][p] == loc[1] else T)
    elif pc == 'ranges':                                        # one by one; loc: seq, whether huge, which is next
        seen, huge, n = loc + (0,) * (3 - len(loc))
        while n < len(threads) and not threads[n][0].startswith(INVALIDATORS): n += 1
        covered = [pages for owner, pages in s.published if owner == n]
        if n == len(threads): yield go('resolve', (seen, huge))
        elif covered and p in covered[0]: yield go('end')
        else: yield go('ranges', (seen, huge and not covered, n + 1))
    elif pc == 'resolve': yield go('act', loc + (s.frames,))
    elif pc == 'act':
        seen, huge, frames = loc
        if P[0] == 'L': yield go('end')
        elif P[0] == 'T': yield go('end') if huge else go('act-below', loc + (P[1],))
        elif P[1] == seen: yield go('link', (P, huge, frames))
        else: yield go('refine', (P,))
    elif pc == 'refine':
        if P != loc[0]: yield go('end')
        else: yield go('end', P=('T', len(T)), T=T + ((P, P),))
    elif pc == 'link':
        _, huge, frames = loc
        if P != loc[0]: yield go('end')
        elif huge: yield go('end', P=('L', frames, 0))
        else: yield go('end', P=('T', len(T)), T=T + (put((P, P), p, ('L', frames[p], 0)),))
    elif pc == 'act-below':
        seen, _, frames, table = loc
        e = T[table][p]
        if e == 'F': yield go('act', loc[:3])
        elif e[0] != 'E' or e[1] != seen: yield go('end')
        else: yield go('install', (table, e, frames[p]))
    elif pc == 'install':
        yield go('end', T=entry(loc[0], p, ('L', loc[2], 0)) if T[loc[0]][p] == loc[1] else T)

    # Invalidators. loc: (seq, changed, tables to retire, next page, ...); next page 2: the second pass.
    elif pc == 'publish': yield go('seq', published=s.published | {(i, pages)})
    elif pc == 'seq': yield go('walk', (s.counter + 1, False, (), 0), counter=s.counter + 1)
    elif pc == 'walk':
        seq, changed, tables, n = loc[:4]
        whole = kind in WHOLE + ('oom0', 'oom1')
        if P[0] == 'E' and P[1] >= seq: yield after_parent(go, kind, loc[:4])
        elif P[0] == 'T' and kind in WHOLE and n == 2:
            yield go('unlink', (seq, changed, tables, 2, P[1], s.counter + 1), counter=s.counter + 1)
        elif P[0] == 'T': yield go('below', loc[:4] + (P[1],))
        elif P[0] == 'L' and not whole: yield go('split', loc[:4] + (P,))
        elif P[0] == 'L' and BUG != 'report-late': yield go('report-above', loc[:4] + (P,))
        else: yield go('zap-above', loc[:4] + (P, s.counter + 1), counter=s.counter + 1)
    elif pc == 'report-above':
        yield go('zap-above', loc + (s.counter + 1,), counter=s.counter + 1, **report(loc[4], (0, 1)))
    elif pc == 'split':
        old = loc[4]
        if P != old: yield go('walk', loc[:4])
        else:
            part = [('L', f, 0 if BUG == 'split-no-dirty' else old[2]) for f in old[1]]
            yield go('below', loc[:4] + (len(T),), P=('T', len(T)), T=T + (tuple(part),))
    elif pc == 'zap-above':
        old, new = loc[4:]
        if P[:2] != old[:2] or P != old and BUG != 'blind-exchange': yield go('walk', loc[:4])
        elif old[0] == 'L' and BUG == 'report-late':
            yield go('report', (loc[0], True) + loc[2:4] + (None, P), P=('E', new))
        else: yield after_parent(go, kind, (loc[0], loc[1] or old[0] == 'L') + loc[2:4], P=('E', new))
    elif pc == 'below':
        seq, changed, tables, n, table = loc
        e = T[table][pages[n]]
        if e == 'F': yield go('walk', loc[:4])
        elif e[0] == 'E' and e[1] >= seq: yield after_entry(go, kind, loc[:5])
        else: yield go('zap-below' if e[0] == 'E' or BUG == 'report-late' else 'report-below', loc + (e,))
    elif pc == 'report-below': yield go('zap-below', loc, **report(loc[5], (pages[loc[3]],)))
    elif pc == 'zap-below':
        seq, changed, tables, n, table, old = loc
        e, q = T[table][pages[n]], pages[n]
        if e[:2] != old[:2] or e != old and BUG != 'blind-exchange': yield go('below', loc[:5])
        elif e[0] != 'E' and BUG == 'report-late':
            yield go('report', (seq, True, tables, n, table, e), T=entry(table, q, ('E', seq)))
        else: yield after_entry(go, kind, (seq, changed or e[0] != 'E', tables, n, table), T=entry(table, q, ('E', seq)))
    elif pc == 'report':
        reported = report(loc[5], (0, 1) if loc[4] is None else (pages[loc[3]],))
        yield after_parent(go, kind, loc[:4], **reported) if loc[4] is None else after_entry(go, kind, loc[:5], **reported)
    elif pc == 'unlink':
        seq, _, tables, n, table, fresh = loc
        if P != ('T', table): yield go('walk', loc[:4])
        else: yield go('push', (seq, True, tables + (table,), n), P=('E', fresh))
    elif pc == 'push': yield go('walk', loc, T=entry(loc[2][-1], 0, 'F'))

    elif pc in LAST[:3]:                                     # loc[2]: the tables that were unlinked
        to = LAST[LAST.index(pc) + 1]
        if pc == 'retire': yield go(to, loc, tables=s.tables | set(loc[2]))
        elif pc == 'host' and kind in ('keep', 'keep0'): yield go(to, loc)
        elif pc == 'host': yield go(to, loc, gone=s.gone | {(p, s.frames[p]) for p in pages},
                                    frames=tuple(f + (p in pages) for p, f in enumerate(s.frames)))
        else: yield go(to, loc, psc=None, tlb=tuple(None if p in pages else t for p, t in enumerate(s.tlb)))
    elif pc == 'withdrawn': yield go('end', published=frozenset(x for x in s.published if x[0] != i))


def next_fill(go, n, **changes):
    return go(n - 1 if n > 1 else 'end', **changes)


def after_entry(go, kind, loc, **changes):
    """Where an invalidator goes on after an entry of the table loc[4]."""
    if kind not in WHOLE: return go(LAST[0], loc[:4], **changes)
    n = loc[3] + 1
    if n == 2: return go('walk', loc[:3] + (n,), **changes)
    return go('below', loc[:3] + (n,) + loc[4:], **changes)


def after_parent(go, kind, loc, **changes):
    """Where an invalidator goes on after P."""
    again = kind in WHOLE and loc[3] < 2
    return go('walk' if again else LAST[0], loc[:3] + (2,), **changes)


if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
