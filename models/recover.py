"""Explicit-state check of the recovery of a huge leaf (table -> *broken* -> huge leaf): no thread
waits, and no D is lost, also where a recovery is aborted. The proofs have the rest
(`proofs/invalidation.py`, `proofs/recovery.py`, `proofs/given_up.py`).

Two pages under a two-level tree. P is the parent entry: ('E', seq) empty, ('L', (frame, frame), D)
a huge leaf, ('T', i), or ('B', i) broken: a recovery turns table i, which was linked there, into a
huge leaf. T[i][page]: ('E', seq), ('L', frame, D), ('F', frame or None, D) frozen, with its old
contents, or ('X',), a link of the list of retired tables.
Recover: table -> broken -> freeze leaf by leaf -> exchange *this* broken entry for the huge leaf,
    with the D of all. If an entry was empty: cancel. In any case the table is then retired: its
    entries are overwritten.
Cancel: by each thread that finds a broken entry: freeze each entry as a recovery does -> report its
    old contents -> take a seq -> exchange the broken entry for an empty one with that seq.
Fault0: look: the entry (broken: cancel, and the guest retries) -> published ranges, one by one ->
    resolve -> walk again -> exchange if the entry is empty with the very seq of the look.
Invalidator: publish -> seq -> a broken entry is cancelled, a huge leaf that is covered in part is
    split; leaves are reported, then exchanged for empty; empty entries get the seq -> 'unlink':
    second pass, unlink the table for a fresh seq -> flush -> the host frees the frames -> withdraw.
    'inval', 'unlink': both pages; 'inval0': page 0.
CPU: caches the table that P points to; sets D in page 0's leaf, in P or in a cached table.
Wrong: a leaf of a frame that is gone; a frame that is gone whose D was set and not reported; a leaf
in an unlinked table; a thread that waits, or spins.
Run: python3 recover.py [BUG]; each of these breaks it: recover-no-freeze, freeze-no-dirty (frozen
entries, and so the huge leaf, lose D), cancel-unreported, report-first (an entry is reported, then
frozen, whatever its value is by then). wait-on-broken is safe, but a thread waits.
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P T counter published frames gone psc pending')
PAGES = {'inval': (0, 1), 'unlink': (0, 1), 'inval0': (0,), 'recover': (), 'fault0': (0,)}


def make(kinds):
    entries = (('E', 0), ('L', 0, 0)) if 'hole' in kinds else (('L', 0, 0), ('L', 0, 0))
    threads = tuple((k, 'look' if k in ('fault0', 'recover') else 2 if k == 'cpu' else 'publish', ())
                    for k in kinds if k != 'hole')
    return Shared(('T', 0), (entries,), 0, frozenset(), (0, 0), frozenset(), None, frozenset()), threads


def wrong(state):
    s = state[0]
    if s.P[0] == 'L' and any((p, f) in s.gone for p, f in enumerate(s.P[1])): return 'huge leaf of a frame that is gone'
    if s.pending & s.gone: return 'dirty frame is gone and was not reported'
    for i, table in enumerate(s.T):
        for p, e in enumerate(table):
            if e[0] == 'L' and s.P not in (('T', i), ('B', i)) and BUG != 'recover-no-freeze':
                return 'leaf in an unlinked table'
            if e[0] == 'L' and s.P == ('T', i) and (p, e[1]) in s.gone: return 'leaf of a frame that is gone'


def frozen(e):
    return ('F', e[1], 0 if BUG == 'freeze-no-dirty' else e[2]) if e[0] == 'L' else ('F', None, 0)


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T

    def entry(i, p, v): return put(T, i, put(T[i], p, v))

    def reported(*leaves): return s.pending - {(p, f) for p, f, dirty in leaves if dirty}

    pages = PAGES.get(kind)
    if kind == 'cpu':
        to = 'end' if pc == 1 else pc - 1
        yield go('end')
        if P[0] == 'T' and s.psc != P[1]: yield go(to, psc=P[1])
        if P[0] == 'L' and not P[2]: yield go(to, P=('L', P[1], 1), pending=s.pending | {(0, P[1][0])})
        if s.psc is not None and T[s.psc][0][0] == 'L' and not T[s.psc][0][2]:
            e = T[s.psc][0]
            yield go(to, T=entry(s.psc, 0, ('L', e[1], 1)), pending=s.pending | {(0, e[1])})

    # Cancel. loc: table, page, what to do then.
    elif pc == 'cancel':
        table, n, then = loc
        if BUG == 'wait-on-broken': yield go(*then) if P != ('B', table) else go(pc, loc)
        elif n == 2:
            yield go('cancelled', (table, s.counter + 1, then), counter=s.counter + 1)
        else:
            e = T[table][n]
            if e[0] == 'X': yield go('cancel', (table, n + 1, then))
            elif e[0] == 'F': yield go('report', loc + (e,))
            elif BUG == 'report-first' and e[0] == 'L':
                yield go('cancel-freeze', loc + (e,), pending=reported((n,) + e[1:]))
            else: yield go('cancel-freeze', loc + (e,))
    elif pc == 'cancel-freeze':
        table, n, then, e = loc
        if BUG == 'report-first': yield go('cancel', (table, n + 1, then), T=entry(table, n, frozen(e)))
        elif T[table][n] == e: yield go('report', (table, n, then, frozen(e)), T=entry(table, n, frozen(e)))
        else: yield go('cancel', loc[:3])
    elif pc == 'report':
        table, n, then, e = loc
        reports = BUG != 'cancel-unreported'
        yield go('cancel', (table, n + 1, then), pending=reported((n,) + e[1:]) if reports else s.pending)
    elif pc == 'cancelled': yield go(*loc[2], P=('E', loc[1]) if P == ('B', loc[0]) else P)

    elif kind == 'recover':
        if pc == 'look': yield go('freeze', (P[1], ()), P=('B', P[1])) if P[0] == 'T' else go('end')
        elif pc == 'freeze':
            table, was = loc
            n = len(was)
            if n == 2: yield go('finish', loc)
            else:
                e = T[table][n]
                if e[0] == 'E' or e[1] is None: yield go('cancel', (table, 0, ('retire', (table,))))
                elif e[0] == 'F': yield go('freeze', (table, was + (e,)))
                elif BUG == 'recover-no-freeze': yield go('freeze', (table, was + (frozen(e),)))
                else: yield go('freeze-one', (table, was, e))
        elif pc == 'freeze-one':
            table, was, e = loc
            if T[table][len(was)] == e:
                yield go('freeze', (table, was + (frozen(e),)), T=entry(table, len(was), frozen(e)))
            else: yield go('freeze', (table, was))
        elif pc == 'finish':
            table, was = loc
            leaf = ('L', (was[0][1], was[1][1]), was[0][2] | was[1][2])
            yield go('retire', (table,), P=leaf if P == ('B', table) else P)
        elif BUG == 'recover-no-freeze': yield go('end')
        else: yield go('end', T=put(T, loc[0], (('X',), ('X',))))

    elif kind == 'fault0':
        if pc == 'look':
            if P[0] == 'E': yield go('ranges', (P[1], 0))
            elif P[0] == 'L': yield go('end')
            elif P[0] == 'B': yield go('cancel', (P[1], 0, ('end', ())))
            else: yield go('look-below', (P[1],))
        elif pc == 'look-below':
            e = T[loc[0]][0]
            if e[0] in 'FX': yield go('look')
            else: yield go('end') if e[0] == 'L' else go('ranges', (e[1], 0))
        elif pc == 'ranges':
            seen, n = loc
            while n < len(threads) and threads[n][0] not in ('inval', 'inval0', 'unlink'): n += 1
            if n == len(threads): yield go('resolve', (seen,))
            else: yield go('end') if n in s.published else go('ranges', (seen, n + 1))
        elif pc == 'resolve': yield go('act', (loc[0], s.frames[0]))
        elif pc == 'act':
            if P[0] == 'T': yield go('act-below', loc + (P[1],))
            elif P == ('E', loc[0]): yield go('link', loc)
            else: yield go('end')
        elif pc == 'link':
            if P != ('E', loc[0]): yield go('end')
            else: yield go('end', P=('T', len(T)), T=T + ((('L', loc[1], 0), P),))
        elif pc == 'act-below': yield go('install', loc) if T[loc[2]][0] == ('E', loc[0]) else go('end')
        else: yield go('end', T=entry(loc[2], 0, ('L', loc[1], 0)) if T[loc[2]][0] == ('E', loc[0]) else T)

    # Invalidators. loc: seq, next page, ...; next page 2: the second pass.
    elif pc == 'publish': yield go('seq', published=s.published | {i})
    elif pc == 'seq': yield go('walk', (s.counter + 1, 0), counter=s.counter + 1)
    elif pc == 'walk':
        seq, n = loc
        whole = kind != 'inval0'
        if P[0] == 'B': yield go('cancel', (P[1], 0, ('walk', loc)))
        elif P[0] == 'E' and P[1] >= seq: yield go('flush', loc)
        elif P[0] == 'T' and n == 2: yield go('put-above', loc + (P, s.counter + 1), counter=s.counter + 1)
        elif P[0] == 'T': yield go('below', loc + (P[1],))
        elif P[0] == 'L' and whole:
            yield go('put-above', loc + (P, seq), pending=reported(*((p, f, P[2]) for p, f in enumerate(P[1]))))
        else: yield go('put-above', loc + (P, seq))
    elif pc == 'put-above':
        seq, n, old, new = loc
        back = ('walk', (seq, n))
        if P != old: yield go(*back)
        elif kind != 'inval0': yield go('flush', loc[:2], P=('E', new))
        else:                                           # refine, split
            parts = (old, old) if old[0] == 'E' else tuple(('L', f, old[2]) for f in old[1])
            yield go(*back, P=('T', len(T)), T=T + (parts,))
    elif pc == 'below':
        seq, n, table = loc
        e = T[table][pages[n]]
        if e[0] in 'FX': yield go('walk', loc[:2])
        elif e[0] == 'E' and e[1] >= seq: yield go(*after_entry(kind, loc))
        else: yield go('zap', loc + (e,), **{'pending': reported((pages[n], e[1], e[2]))} if e[0] == 'L' else {})
    elif pc == 'zap':
        seq, n, table, old = loc
        if T[table][pages[n]] != old: yield go('below', loc[:3])
        else: yield go(*after_entry(kind, loc[:3]), T=entry(table, pages[n], ('E', seq)))
    elif pc == 'flush': yield go('host', psc=None)
    elif pc == 'host': yield go('withdraw', gone=s.gone | {(p, s.frames[p]) for p in pages},
                                frames=tuple(f + (p in pages) for p, f in enumerate(s.frames)))
    elif pc == 'withdraw': yield go('end', published=s.published - {i})


def after_entry(kind, loc):
    """Where an invalidator goes on after an entry of a table."""
    seq, n, table = loc
    if n + 1 < len(PAGES[kind]): return 'below', (seq, n + 1, table)
    return ('walk', (seq, 2)) if kind == 'unlink' else ('flush', (seq, 2))


CONFIGURATIONS = '''
recover+inval+cpu recover+inval0+cpu recover+unlink+cpu recover+recover+inval+cpu hole+fault0+recover
fault0+recover+inval fault0+recover+unlink fault0+recover+inval0+cpu recover+inval0+inval+cpu'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
