"""Explicit-state check of recovery on two levels. A table of huge leaves becomes a larger huge
leaf, while one of its leaves is split, and the table below that is recovered, zapped or filled.
Which thread reports the guest's writes there? Which thread retires the table below is proved in
`proofs/given_up.py`; here it is checked with the order of the threads that report.

Two blocks of one page each under a three-level tree. P: ('E', seq), ('L', frames, D), ('T', k) or
('B', k) broken. U[k][block]: ('E', seq), ('L', frame, D), ('T', i), ('B', i), ('F', old contents)
frozen: a leaf, a table, or None; or 'X', overwritten by a link of the list of retired tables. S[i]
is a table of one entry: as U's, but not 'T' or 'B'.
CPU: caches the tables that can be reached (`psc`); sets D of page 0 in what it has cached.
Top: look: all entries are leaves, and the counter -> once more, inside the guard -> P -> broken ->
    counter as before -> each entry is frozen if it is a leaf, or was one -> huge leaf. Else cancel.
    Then U is retired, and with it each table that a frozen entry of U names.
Low: the same for U[k][0] and S[i]. Its last exchange is of the very entry that it broke, wherever
    that is by now. far: one that has left its guard, and walks from the root: it cancels a broken
    P, and starts over.
Cancel: (of P or an entry of U) each entry is frozen by compare-and-exchange, then reported. A table
    is frozen as such, and its contents likewise. A broken entry is frozen, as nothing, only after
    the contents of its table. Then -> seq -> broken -> empty.
Split0: of the leaf of page 0. Fault0: installs page 0 in an empty entry, as a small leaf if there
    is a table.
Invalidator: publish -> seq -> leaves are reported, then zapped -> tables are unlinked, from below
    -> flush -> the host frees -> withdraw. inval0: page 0, with the table below; a huge P is split.
    inval: all, with all tables.
Start: table, hole: a table below entry 0, with a leaf or empty.
Wrong: a leaf of a frame that is gone; one that is gone and D was not reported; a frozen entry in a
linked table; a table that is retired twice, or while a walk could still reach it, or at the end not
at all; an entry left broken.
Run: python3 recover_levels.py [RULE]. Each of these breaks it: walk-again (low looks for its entry
from the root, and retires the table if it does not reach it), not-down (cancel), table-as-nothing
(frozen), broken-first (a broken entry is frozen before the contents of its table), broken-as-table
(frozen), no-freeze-below, keep (low retires nothing if its exchange fails).
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P U S counter published frames gone pending psc retired')
PAGES = {'inval': (0, 1), 'inval0': (0,)}
START = 'table', 'hole'


def make(kinds):
    leaf = ('L', 0, 0)
    below = 'table' in kinds or 'hole' in kinds
    S = (('E', 0) if 'hole' in kinds else leaf,) if below else ()
    s = Shared(('T', 0), ((('T', 0) if below else leaf, leaf),), S, 0, frozenset(), (0, 0), frozenset(), frozenset(),
               frozenset(), ())
    first = {'cpu': 2, 'inval': 'publish', 'inval0': 'publish'}
    return cached(s), tuple((k, first.get(k, 'look'), ()) for k in kinds if k not in START)


def below(e):
    """The table that an entry of U names, or None."""
    if e[0] in 'TB': return e[1]
    return e[1][1] if e[0] == 'F' and e[1] and e[1][0] == 'T' else None


def cached(s):
    if s.P[0] != 'T': return s
    return s._replace(psc=s.psc | {('U', s.P[1])} | {('S', e[1]) for e in s.U[s.P[1]] if e[0] == 'T'})


def wrong(state):
    s, threads = state
    if s.pending & s.gone: return 'dirty frame is gone and was not reported'
    if len(set(s.retired)) < len(s.retired): return 'table retired twice'
    reached = set()
    if s.P[0] == 'L' and set(enumerate(s.P[1])) & s.gone: return 'leaf of a frame that is gone'
    if s.P[0] in 'TB':
        reached.add(('U', s.P[1]))
        for p, e in enumerate(s.U[s.P[1]]):
            if below(e) is not None: reached.add(('S', below(e)))
            if s.P[0] == 'B': continue
            leaf = s.S[e[1]] if e[0] == 'T' else e
            if leaf[0] in 'FX': return 'frozen entry in a linked table'
            if leaf[0] == 'L' and (p, leaf[1]) in s.gone: return 'leaf of a frame that is gone'
    if reached & set(s.retired): return 'table retired that can be reached'
    if all(pc == 'end' for _, pc, _ in threads):
        tables = {('U', k) for k in range(len(s.U))} | {('S', i) for i in range(len(s.S))}
        if tables - reached - set(s.retired): return 'table leaked'
        if s.P[0] == 'B' or s.P[0] == 'T' and any(e[0] == 'B' for e in s.U[s.P[1]]): return 'entry left broken'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return cached(s._replace(**changes)), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, U, S = s.P, s.U, s.S

    def entry(k, p, v): return put(U, k, put(U[k], p, v))

    def reported(*leaves): return s.pending - {(p, f) for p, f, dirty in leaves if dirty}

    def retire(*tables):
        """The tables after that: overwritten."""
        u, t = U, S
        for which, n in tables:
            if which == 'U': u = put(u, n, ('X', 'X'))
            else: t = put(t, n, 'X')
        return {'U': u, 'S': t, 'retired': tuple(sorted(s.retired + tables))}

    if kind == 'cpu':
        yield go('end')
        to = 'end' if pc == 1 else pc - 1
        if P[0] == 'L' and not P[2]: yield go(to, P=put(P, 2, 1), pending=s.pending | {(0, P[1][0])})
        for which, n in s.psc:
            e = U[n][0] if which == 'U' else S[n]
            if e[0] == 'L' and not e[2]:
                new = put(e, 2, 1)
                changes = {'U': entry(n, 0, new)} if which == 'U' else {'S': put(S, n, new)}
                yield go(to, pending=s.pending | {(0, e[1])}, **changes)

    # Cancel of P. loc: k, block, what to do then.
    elif pc == 'cancel':
        k, p, then = loc
        if p == 2: yield go('cancelled', (k, s.counter + 1, then), counter=s.counter + 1)
        else:
            e = U[k][p]
            on = ('cancel', (k, p + 1, then))
            if e == 'X' or e[0] == 'F' and e[1] is None: yield go(*on)
            elif e[0] == 'F' and e[1][0] == 'L': yield go(*on, pending=reported((p,) + e[1][1:]))
            elif e[0] == 'F': yield go('report', (p, e[1][1], on))
            elif e[0] == 'B' and BUG != 'broken-first':
                yield go('report', (p, e[1], ('cancel-freeze', (k, p, then, e))))
            else: yield go('cancel-freeze', loc + (e,))
    elif pc == 'cancel-freeze':
        k, p, then, e = loc
        was = e if e[0] in 'LT' else None
        if e[0] == 'T' and BUG == 'table-as-nothing': was = None
        if e[0] == 'B' and BUG == 'broken-as-table': was = ('T', e[1])
        on = ('cancel', (k, p + (e[0] in 'BE'), then))
        if e[0] == 'B' and BUG == 'broken-first': on = 'report', (p, e[1], on)
        if e[0] == 'T' and BUG == 'not-down': on = ('cancel', (k, p + 1, then))
        if U[k][p] == e: yield go(*on, U=entry(k, p, ('F', was)))
        else: yield go('cancel', loc[:3])
    elif pc == 'cancelled': yield go(*loc[2], P=('E', loc[1]) if P == ('B', loc[0]) else P)

    # Freezes and reports a table below. loc: page, table, what to do then.
    elif pc == 'report':
        p, t, then = loc
        e = S[t]
        if e == 'X': yield go(*then)
        elif e[0] == 'F': yield go(*then, pending=reported((p,) + e[1][1:]) if e[1] else s.pending)
        elif BUG == 'no-freeze-below': yield go(*then, pending=reported((p,) + e[1:]) if e[0] == 'L' else s.pending)
        else: yield go('report-freeze', loc + (e,))
    elif pc == 'report-freeze':
        p, t, then, e = loc
        yield go('report', loc[:3], S=put(S, t, ('F', e if e[0] == 'L' else None)) if S[t] == e else S)
    # Cancel of an entry of U. loc: k, block, table, what to do then.
    elif pc == 'cancel-low':
        k, p, t, then = loc
        yield go('report', (p, t, ('seq-low', loc)))
    elif pc == 'seq-low': yield go('cancelled-low', loc + (s.counter + 1,), counter=s.counter + 1)
    elif pc == 'cancelled-low':
        k, p, t, then, seq = loc
        yield go(*then, U=entry(k, p, ('E', seq)) if U[k][p] == ('B', t) else U)

    elif kind == 'top':
        if pc == 'look':
            may = P[0] == 'T' and all(e[0] == 'L' for e in U[P[1]])
            yield go('enter', (s.counter,)) if may else go('end')
        elif pc == 'enter':
            may = P[0] == 'T' and s.counter == loc[0] and all(e[0] not in 'TB' for e in U[P[1]])
            yield go('break', loc + (P,)) if may else go('end')
        elif pc == 'break': yield go('overtaken', loc, P=('B', P[1])) if P == loc[1] else go('end')
        elif pc == 'overtaken':
            k = loc[1][1]
            yield go('freeze', (k, ())) if s.counter == loc[0] else go('cancel', (k, 0, ('retire', (k,))))
        elif pc == 'freeze':
            k, was = loc
            if len(was) == 2: yield go('finish', loc)
            else:
                e = U[k][len(was)]
                leaf = e[1] if e[0] == 'F' else e
                if not leaf or leaf[0] != 'L' or was and was[0][1] != leaf[1]:
                    yield go('cancel', (k, 0, ('retire', (k,))))
                elif e[0] == 'F': yield go('freeze', (k, was + (leaf,)))
                else: yield go('freeze-one', loc + (e,))
        elif pc == 'freeze-one':
            k, was, e = loc
            p = len(was)
            if U[k][p] == e: yield go('freeze', (k, was + (e,)), U=entry(k, p, ('F', e)))
            else: yield go('freeze', loc[:2])
        elif pc == 'finish':
            k, was = loc
            leaf = ('L', (was[0][1], was[1][1]), was[0][2] | was[1][2])
            yield go('retire', (k,), P=leaf if P == ('B', k) else P)
        else:
            named = tuple(('S', below(e)) for e in U[loc[0]] if below(e) is not None)
            yield go('end', **retire(*named, ('U', loc[0])))

    elif kind in ('low', 'far'):
        if pc == 'look':
            may = P[0] == 'T' and U[P[1]][0][0] == 'T' and S[U[P[1]][0][1]][0] == 'L'
            yield go('enter', (s.counter,)) if may else go('end')
        elif pc == 'enter':
            may = P[0] == 'T' and s.counter == loc[0] and U[P[1]][0][0] == 'T'
            yield go('break', loc + (P[1], U[P[1]][0][1])) if may else go('end')
        elif pc == 'break':
            seen, k, t = loc
            yield go('overtaken', loc, U=entry(k, 0, ('B', t))) if U[k][0] == ('T', t) else go('end')
        elif pc == 'overtaken':
            seen, k, t = loc
            yield go('freeze', (k, t)) if s.counter == seen else go('misfit', (k, t))
        elif pc == 'freeze':
            k, t = loc
            e = S[t]
            leaf = e[1] if e[0] == 'F' else e
            if not leaf or leaf[0] != 'L': yield go('misfit', loc)
            elif e[0] == 'F': yield go('finish', loc + (leaf,))
            else: yield go('freeze-one', loc + (e,))
        elif pc == 'freeze-one':
            k, t, e = loc
            yield go('finish', loc, S=put(S, t, ('F', e))) if S[t] == e else go('freeze', (k, t))
        elif pc == 'misfit':
            k, t = loc
            if BUG == 'walk-again' and P != ('T', k): yield go('retire', loc)
            elif kind == 'far' and P[0] == 'B': yield go('cancel', (P[1], 0, (pc, loc)))
            elif kind == 'far' and P != ('T', k): yield go('retire', loc)
            else: yield go('cancel-low', (k, 0, t, ('retire', loc)))
        elif pc == 'finish':
            k, t, leaf = loc
            if BUG == 'walk-again' and P != ('T', k): yield go('retire', loc[:2])
            elif kind == 'far' and P[0] == 'B': yield go('cancel', (P[1], 0, (pc, loc)))
            elif kind == 'far' and P != ('T', k): yield go('retire', loc[:2])
            elif U[k][0] == ('B', t): yield go('retire', loc[:2], U=entry(k, 0, leaf))
            else: yield go('end' if BUG == 'keep' else 'retire', loc[:2])
        else: yield go('end', **retire(('S', loc[1])))

    elif kind == 'split0':
        if pc == 'look': yield go('split', (P[1], U[P[1]][0])) if P[0] == 'T' and U[P[1]][0][0] == 'L' else go('end')
        elif U[loc[0]][0] != loc[1]: yield go('end')
        else: yield go('end', U=entry(loc[0], 0, ('T', len(S))), S=S + (loc[1],))

    elif kind == 'fault0':
        if pc == 'look':
            if P[0] == 'B': yield go('cancel', (P[1], 0, ('look', ())))
            elif P[0] == 'T': yield go('look-below', (P[1],))
            else: yield go('end')                       # No fault makes a table here: there are enough.
        elif pc == 'look-below':
            k, = loc
            e = U[k][0]
            if e == 'X' or e[0] == 'F': yield go('look')
            elif e[0] == 'B': yield go('cancel-low', (k, 0, e[1], ('look', ())))
            elif e[0] == 'T': yield go('look-small', (k, e[1]))
            else: yield go('ranges', (k, None, e)) if e[0] == 'E' else go('end')
        elif pc == 'look-small':
            e = S[loc[1]]
            if e == 'X' or e[0] == 'F': yield go('look')
            else: yield go('ranges', loc + (e,)) if e[0] == 'E' else go('end')
        elif pc == 'ranges': yield go('end') if s.published else go('install', loc + (s.frames[0],))
        else:
            k, t, e, f = loc
            leaf = ('L', f, 0)
            if t is None: yield go('end', U=entry(k, 0, leaf) if U[k][0] == e else U)
            else: yield go('end', S=put(S, t, leaf) if S[t] == e else S)

    # Invalidators. loc: seq, pass, next block.
    elif pc == 'publish': yield go('seq', published=s.published | {i})
    elif pc == 'seq': yield go('walk', (s.counter + 1, 0, 0), counter=s.counter + 1)
    elif pc == 'walk':
        seq, n, p = loc
        if P[0] == 'B': yield go('cancel', (P[1], 0, ('walk', loc)))
        elif n == 2:
            if P[0] == 'T': yield go('unlink-above', loc + (P, s.counter + 1), counter=s.counter + 1)
            else: yield go('flush')
        elif P[0] == 'T': yield go('below', loc + (P[1],))
        elif P[0] == 'E' and P[1] >= seq: yield go(*after_block(kind, loc))
        elif P[0] == 'E' and kind == 'inval0': yield go('refine', loc + (P,))
        else: yield go('zap', loc + (P,), pending=reported(*((q, f, P[2]) for q, f in enumerate(P[1])))
                       if P[0] == 'L' and kind == 'inval' else s.pending)
    elif pc in ('zap', 'refine'):
        seq, n, p, old = loc
        if P != old: yield go('walk', loc[:3])
        elif kind == 'inval': yield go(*after_block(kind, loc[:3]), P=('E', seq))
        else:
            parts = (old, old) if old[0] == 'E' else tuple(('L', f, old[2]) for f in old[1])
            yield go('walk', loc[:3], P=('T', len(U)), U=U + (parts,))
    elif pc == 'unlink-above':
        seq, n, p, old, new = loc
        if P != old: yield go('walk', loc[:3])
        else: yield go('take-over', (old[1],), P=('E', new))
    elif pc == 'take-over':
        k, = loc
        tables = tuple(('S', e[1]) for e in U[k] if e[0] == 'T')
        yield go('flush', **retire(*tables, ('U', k)))
    elif pc == 'below':
        seq, n, p, k = loc
        e = U[k][p]
        if e == 'X' or e[0] == 'F': yield go('walk', loc[:3])
        elif e[0] == 'B': yield go('cancel-low', (k, p, e[1], ('below', loc)))
        elif e[0] == 'E' and e[1] >= seq: yield go(*after_block(kind, loc[:3]))
        elif e[0] == 'T' and n == 1: yield go('put', loc + (e, s.counter + 1), counter=s.counter + 1)
        elif e[0] == 'T': yield go('small', loc + (e[1],))
        elif e[0] == 'L': yield go('put', loc + (e, seq), pending=reported((p,) + e[1:]))
        else: yield go('put', loc + (e, seq))
    elif pc == 'put':
        seq, n, p, k, old, new = loc
        if U[k][p] != old: yield go('below', loc[:4])
        elif old[0] == 'T': yield go('retire', (after_block(kind, loc[:3]), old[1]), U=entry(k, p, ('E', new)))
        else: yield go(*after_block(kind, loc[:3]), U=entry(k, p, ('E', new)))
    elif pc == 'retire': yield go(*loc[0], **retire(('S', loc[1])))
    elif pc == 'small':
        seq, n, p, k, t = loc
        e = S[t]
        if e == 'X' or e[0] == 'F': yield go('walk', loc[:3])
        elif e[0] == 'E' and e[1] >= seq: yield go(*after_block(kind, loc[:3]))
        else: yield go('put-small', loc + (e,), pending=reported((p,) + e[1:]) if e[0] == 'L' else s.pending)
    elif pc == 'put-small':
        seq, n, p, k, t, old = loc
        if S[t] != old: yield go('small', loc[:5])
        else: yield go(*after_block(kind, loc[:3]), S=put(S, t, ('E', seq)))
    elif pc == 'flush': yield go('host', psc=frozenset())
    elif pc == 'host': yield go('withdraw', gone=s.gone | {(p, s.frames[p]) for p in PAGES[kind]},
                                frames=tuple(f + (p in PAGES[kind]) for p, f in enumerate(s.frames)))
    elif pc == 'withdraw': yield go('end', published=s.published - {i})
    else: raise AssertionError((kind, pc))


def after_block(kind, loc):
    """Where an invalidator goes on after an entry: the next, or the next pass."""
    seq, n, p = loc
    if p + 1 < len(PAGES[kind]): return 'walk', (seq, n, p + 1)
    return ('walk', (seq, n + 1, 0)) if n == 0 or kind == 'inval' else ('flush', ())


CONFIGURATIONS = '''
top+cpu top+split0+cpu top+split0+inval0 top+split0+inval top+inval0+cpu top+inval+cpu table+low+inval0+cpu
top+split0+cpu+inval top+split0+low hole+low+fault0+inval table+low+inval+cpu table+low+low+inval
top+split0+low+fault0 top+split0+low+cpu+inval top+split0+far table+far+inval0+cpu'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
