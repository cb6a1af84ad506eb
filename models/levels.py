"""Explicit-state check that no walk spins where tables above the lowest are unlinked, while other
threads may link tables below them. The proofs have the rest (`proofs/invalidation.py`: no leaf of
a frame that is gone; `proofs/given_up.py`: each table is given up once).

Three levels, one entry each, for one page: R is the root's entry, ('E', seq) or ('T', i); U[i] the
entry in the upper table i: ('E', seq), ('T', i) or 'F' frozen; V[i] the page's entry in the lowest
table i: ('E', seq) or 'L', a leaf.
Invalidators: publish -> seq -> first pass: down to the page: refine an empty entry that is covered
    in part (link a table with the same seq), write the seq to one that is covered as a whole, zap a
    leaf -> further passes, a level each: unlink a table for an empty entry with a seq of its own;
    for an upper one, freeze its entry -> withdraw.
    'part' covers the page, 'mid' the lowest table, 'whole' the upper table, and 'stay' too, but it
    leaves tables linked. 'edge' covers the page, and other pages whose tables it unlinks: its
    second pass skips this page. 'beside' covers a part of the lowest table, but not the page:
    faults go on.
Fault: look (lowest entry; published ranges, one by one) -> walk again, link all missing tables by
    one exchange, if the entry is empty with the very seq of the look.
A walk that finds a frozen entry starts over at the root.
Wrong: a frozen entry in a linked table; a thread that waits, or spins.
Run: python3 levels.py [BUG]; this breaks it: freeze-early (before the unlinking: walks spin).
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'R U V counter published')
LAST_PASS = {'part': 1, 'beside': 1, 'stay': 1, 'edge': 2, 'mid': 2, 'whole': 3}


def make(kinds):
    R, U, V = ('E', 0), (), ()
    if 'full' in kinds: R, U, V = ('T', 0), (('T', 0),), ('L',)
    if 'tables' in kinds: R, U, V = ('T', 0), (('T', 0),), (('E', 0),)
    threads = tuple((k, 'R' if k == 'fault' else 'publish', ('look',) if k == 'fault' else ())
                    for k in kinds if k not in ('full', 'tables'))
    return Shared(R, U, V, 0, frozenset()), threads


def wrong(state):
    s, threads = state
    u = s.R[1] if s.R[0] == 'T' else None
    if u is not None and s.U[u] == 'F' and BUG != 'freeze-early': return 'frozen entry in a linked table'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    R, U, V = s.R, s.U, s.V
    if kind == 'fault':                                 # loc: 'look', or ('act', seq)
        if pc in 'RUV':
            e = R if pc == 'R' else U[loc[-1]] if pc == 'U' else V[loc[-1]]
            at = loc if pc == 'R' else loc[:-1]
            if e == 'F': yield go('R', at)
            elif e[0] == 'T': yield go('U' if pc == 'R' else 'V', at + (e[1],))
            elif e[0] == 'L': yield go('end')
            elif at[0] == 'look': yield go('ranges', (e[1], 0))
            elif e[1] != at[1]: yield go('end')
            else: yield go('link', (pc, None if pc == 'R' else loc[-1], e))
        elif pc == 'ranges':                            # one by one
            seen, n = loc
            while n < len(threads) and threads[n][0] in ('fault', 'beside'): n += 1
            if n == len(threads): yield go('R', ('act', seen))
            else: yield go('end') if n in s.published else go('ranges', (seen, n + 1))
        else:
            level, table, old = loc
            new = ('T', len(V))
            if level == 'R': yield go('end', **dict(R=('T', len(U)), U=U + (new,), V=V + ('L',)) if R == old else {})
            elif level == 'U': yield go('end', **dict(U=put(U, table, new), V=V + ('L',)) if U[table] == old else {})
            else: yield go('end', V=put(V, table, 'L') if V[table] == old else V)
        return

    # loc: seq, pass, ...
    if pc == 'publish': yield go('seq', published=s.published | {i})
    elif pc == 'seq': yield go('R', (s.counter + 1, 1), counter=s.counter + 1)
    elif pc in 'RUV':
        table = None if pc == 'R' else loc[-1]
        e = R if pc == 'R' else U[table] if pc == 'U' else V[table]
        seq, number = loc[:2]
        covers = kind in ('whole', 'stay') or pc == 'U' and kind == 'mid' or pc == 'V'
        if e == 'F': yield go('R', loc[:2])
        elif pc == 'V' and kind == 'beside': yield next_pass(go, kind, loc)
        elif e[0] == 'E' and e[1] >= seq: yield next_pass(go, kind, loc)
        elif e[0] == 'T' and number == {'U': 2, 'R': 3}[pc] and covers:
            yield go('unlink', (seq, number, pc, table, e, s.counter + 1),
                     counter=s.counter + 1)
        elif e[0] == 'T' and pc == 'U' and number == 2: yield next_pass(go, kind, loc)
        elif e[0] == 'T': yield go('U' if pc == 'R' else 'V', loc[:2] + (e[1],))
        else: yield go('put' if covers else 'refine', loc[:2] + (pc, table, e))
    elif pc == 'put':
        level, table, old = loc[2:]
        if value(s, level, table) == old: yield next_pass(go, kind, loc, **changed(s, level, table, ('E', loc[0])))
        else: yield go(level, loc[:2] + (() if table is None else (table,)))
    elif pc == 'refine':
        level, table, old = loc[2:]
        back = go(level, loc[:2] + (() if table is None else (table,)))
        if value(s, level, table) != old: yield back
        elif level == 'R': yield go('R', loc[:2], R=('T', len(U)), U=U + (old,))
        else: yield go('U', loc[:2] + (table,), U=put(U, table, ('T', len(V))), V=V + (old,))
    elif pc == 'unlink':
        seq, number, level, table, old, fresh = loc
        if BUG == 'freeze-early' and level == 'R' and R == old and U[old[1]] != 'F':
            yield go('unlink', loc, U=put(U, old[1], 'F'))
        elif value(s, level, table) != old: yield go(level, loc[:2] + (() if table is None else (table,)))
        elif level == 'U':
            yield next_pass(go, kind, loc, U=put(U, table, ('E', fresh)))
        else: yield go('take-over', (seq, number, old[1]), R=('E', fresh))
    elif pc == 'take-over':
        yield next_pass(go, kind, loc, U=put(U, loc[2], 'F'))
    elif pc == 'withdraw': yield go('end', published=s.published - {i})


def value(s, level, table):
    return s.R if level == 'R' else s.U[table] if level == 'U' else s.V[table]


def changed(s, level, table, new):
    """The change when `new` is stored in the entry of a level."""
    if level == 'R': return {'R': new}
    return {'U': put(s.U, table, new)} if level == 'U' else {'V': put(s.V, table, new)}


def next_pass(go, kind, loc, **changes):
    """Where an invalidator goes on after a pass."""
    seq, number = loc[:2]
    if number == LAST_PASS[kind]: return go('withdraw', **changes)
    return go('R', (seq, number + 1), **changes)


CONFIGURATIONS = '''
fault+part fault+whole fault+mid full+whole+part full+whole+mid full+whole+beside full+whole+whole
fault+part+whole fault+mid+part full+fault+part+whole full+fault+whole+beside full+fault+mid+whole full+fault+part+mid
full+fault+whole+stay tables+fault+part+whole tables+fault+part+mid tables+fault+mid+whole
fault+edge+mid tables+fault+edge+mid tables+fault+edge+whole full+whole+edge
full+whole+mid+part'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
