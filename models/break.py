"""Explicit-state check of break before make: no fault is delayed for ever, and a split or a recovery
that is aborted loses no D and no mark. That no CPU finds a table and a block for the same page is
proved (`proofs/break_before_make.py`), also for any number of threads.

Two pages under a two-level tree. P is the parent entry: ('E', seq, U) empty, U: *unflushed*, CPUs
may have cached its contents from before; ('L', frames, W, D) a huge leaf; ('T', i) table i; ('B',
i, kind) broken: 'r' a recovery makes a huge leaf of table i, 's' a split has filled table i from a
huge leaf. T[i][page]: ('E', seq, 0), ('L', frame, W, D), ('F', frame or None, 0, D) frozen, or 'X',
a link of the list of retired tables. The CPU caches at once all that is present: `huge` (0 no, 1, 2
writable), `psc` (tables), `small` (per page, as `huge`); a flush drops all. 'cpu' sets D, too.
Recover: table -> broken -> freeze leaf by leaf -> flush -> huge leaf, D of all, W if the slot did
    not log at first -> flags again: logs: mark both pages. If an entry was empty: cancel. T is
    retired: its entries are overwritten.
Split: does the slot log? -> table i is filled with the parts, with W only if not -> leaf -> broken
    -> flush -> table -> if the parts have W, flags again: logs: mark both pages. If it fails, table
    i is retired.
Cancel: ('r': each entry is frozen) each leaf is reported -> seq -> broken -> empty, unflushed.
Fault: (small, big: the size that the host allows; a write to page 0, small1, big1: 1) the entry
    (broken: cancel) -> published ranges -> unflushed: flush -> exchange on the very value -> flags
    -> mark. Empty with another seq, and not unflushed: published ranges (none has the page:
    otherwise its flush may still be to come) -> a table with that seq replaces it. A leaf without
    W: W is restored -> flags -> mark. beside1: small1, where no other thread maps anything: so the
    exchange that replaces an empty entry never fails as unflushed.
Instead: a huge leaf is replaced by itself: seq -> empty, unflushed -> counter as at the look -> the
    leaf.
Invalidator: publish -> seq -> walk -> flush -> the host frees the frames -> withdraw. inval: both
    pages, plain seqs; unlink: and the table; inval0: page 0, a huge leaf is split; oom0: without
    memory: the leaf is zapped as a whole, unflushed. An empty entry gets a seq as a whole. If
    unflushed, it keeps the flag if both pages are covered. Else it is flushed first, and the
    exchange is on the very value from before that flush.
Harvest: takes bits -> walk: clears W; broken: skip -> flush. `on`: the log is published -> the same
    walk -> flush.
Wrong: a CPU has cached a block and a table for the same page; a leaf of a frame that is gone, or a
frame that is gone, was written, and was not reported; a frozen entry in a linked table; a page may
be written in a slot that logs, and is not marked; a fault that concurrent invalidations delay by an
unflushed entry.
Run: python3 break.py [RULE]. Each of these breaks it: keep-flag (an invalidation of a part does not
flush, and keeps the flag: faults beside it are delayed), reuse (a split that failed retries with
the same table), split-freezes (a canceller freezes the parts), split-copies-W (of a slot that
logs), split-unreported, no-freeze.
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P T counter published frames gone pending huge psc small log B')
PAGES = {'inval': (0, 1), 'unlink': (0, 1), 'inval0': (0,), 'oom0': (0,)}
FAULTS = {'small': 0, 'small1': 1, 'big': 0, 'big1': 1, 'beside1': 1}
BIG = 'big', 'big1'
START = 'table', 'hole', 'off', 'empty', 'stale'


def make(kinds):
    leaf = ('L', 0, 1, 0)
    table = (('E', 0, 0), leaf) if 'hole' in kinds else (leaf, leaf)
    P = ('T', 0) if 'table' in kinds or 'hole' in kinds else ('L', (0, 0), 1, 0)
    P = ('E', 0, int('stale' in kinds)) if 'empty' in kinds or 'stale' in kinds else P
    log = int('off' not in kinds)
    T, none = (table,) if P[0] == 'T' else (), frozenset()
    huge = 2 if 'stale' in kinds else 0
    s = Shared(P, T, 0, none, (0, 0), none, none, huge, none, (0, 0), log, (log, log))
    first = {'harvest': 'take', 'on': 'on', 'cpu': 2}
    threads = tuple((k, first.get(k, 'publish' if k in PAGES else 'look'), ()) for k in kinds if k not in START)
    return guest(s), threads


def guest(s):
    """Caches whatever is present."""
    huge = max(s.huge, 1 + s.P[2]) if s.P[0] == 'L' else s.huge
    psc = s.psc | {s.P[1]} if s.P[0] == 'T' else s.psc
    small = tuple(max([s.small[p]] + [1 + s.T[i][p][2] for i in psc if s.T[i][p][0] == 'L']) for p in (0, 1))
    return s._replace(huge=huge, psc=psc, small=small)


def wrong(state):
    s, threads = state
    if s.huge and (s.psc or any(s.small)): return 'a block and a table for the same page'
    if any(pc == 'refused' for _, pc, _ in threads): return 'concurrent invalidations delay a fault'
    if s.pending & s.gone: return 'dirty frame is gone and was not reported'
    if s.P[0] == 'L' and any((p, f) in s.gone for p, f in enumerate(s.P[1])): return 'huge leaf of a frame that is gone'
    if s.P[0] == 'T':
        for p, e in enumerate(s.T[s.P[1]]):
            if e[0] in 'FX': return 'frozen entry in a linked table'
            if e[0] == 'L' and (p, e[1]) in s.gone: return 'leaf of a frame that is gone'
    if not s.log or any(k == 'on' and pc != 'end' for k, pc, _ in threads): return
    for p in (0, 1):
        if max(s.small[p], s.huge) == 2 and not s.B[p]:
            for kind, pc, loc in threads:
                if pc in ('mark', 'split-mark') and loc[0][p]: break
                if kind == 'harvest' and pc in ('walk', 'below', 'protect', 'flush-taken') and loc[0][p]: break
            else: return f'page {p} may be written and is not marked'


def frozen(e):
    return ('F', e[1], 0, e[3]) if e[0] == 'L' else ('F', None, 0, 0)


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return guest(s._replace(**changes)), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T

    def entry(t, p, v): return put(T, t, put(T[t], p, v))

    def reported(*leaves): return s.pending - {(p, f) for p, f, dirty in leaves if dirty}

    def parts(v): return tuple(('L', f, v[2], v[3]) for f in v[1])

    def fill(leaf, table):
        """The tables with one more, or with `table` used again."""
        return (len(T), T + (parts(leaf),)) if table is None else (table, put(T, table, parts(leaf)))

    dropped = {'huge': 0, 'psc': frozenset(), 'small': (0, 0)}
    if kind == 'cpu':
        yield go('end')
        to = 'end' if pc == 1 else pc - 1
        if P[0] == 'L' and P[2] and not P[3]:
            yield go(to, P=put(P, 3, 1), pending=s.pending | {(0, P[1][0])})
        for t in s.psc:
            e = T[t][0]
            if e[0] == 'L' and e[2] and not e[3]: yield go(to, T=entry(t, 0, put(e, 3, 1)), pending=s.pending | {(0, e[1])})

    # Cancel. loc: broken entry, page, what to do then.
    elif pc == 'cancel':
        broken, n, then = loc
        freezes = broken[2] == 'r' and BUG != 'no-freeze' or BUG == 'split-freezes'
        if n == 2: yield go('cancelled', (broken, s.counter + 1, then), counter=s.counter + 1)
        else:
            e = T[broken[1]][n]
            if e[0] in 'EL' and freezes: yield go('cancel-freeze', loc + (e,))
            elif e[0] in 'LF' and e[1] is not None and not (BUG == 'split-unreported' and broken[2] == 's'):
                yield go('cancel', (broken, n + 1, then), pending=reported((n, e[1], e[3])))
            else: yield go('cancel', (broken, n + 1, then))
    elif pc == 'cancel-freeze':
        broken, n, then, e = loc
        yield go('cancel', loc[:3], T=entry(broken[1], n, frozen(e)) if T[broken[1]][n] == e else T)
    elif pc == 'cancelled':
        yield go(*loc[2], P=('E', loc[1], 1) if P == loc[0] else P)

    elif kind == 'recover':
        if pc == 'look': yield go('break', (P, s.log)) if P[0] == 'T' else go('end')
        elif pc == 'break':
            if P != loc[0]: yield go('end')
            else: yield go('freeze', (P[1], loc[1], ()), P=('B', P[1], 'r'))
        elif pc == 'freeze':
            table, logs, was = loc
            n = len(was)
            if n == 2: yield go('out', loc)
            else:
                e = T[table][n]
                if e[0] == 'E' or e[1] is None: yield go('cancel', (('B', table, 'r'), 0, ('flush-retire', (table,))))
                elif e[0] == 'F': yield go('freeze', (table, logs, was + (e,)))
                else: yield go('freeze', loc, T=entry(table, n, frozen(e)))
        elif pc == 'out': yield go('finish', loc, **dropped)
        elif pc == 'finish':
            table, logs, was = loc
            if P != ('B', table, 'r'): yield go('flush-retire', (table,))
            else:
                leaf = ('L', (was[0][1], was[1][1]), int(not logs), was[0][3] | was[1][3])
                yield go('flush-retire' if logs else 'mark', (table,) if logs else ((1, 1), table), P=leaf)
        elif pc == 'mark': yield go('flush-retire', (loc[1],), B=(1, 1) if s.log else s.B)
        elif pc == 'flush-retire': yield go('retire', loc, **dropped)
        else: yield go('end', T=put(T, loc[0], ('X', 'X')))

    # Split, also by an invalidator. loc: (the next pc and loc of the caller), table to use again, ...
    elif pc == 'look' and kind == 'split': yield go('split', (('end', ()), None))
    elif pc == 'split':
        then, table = loc
        if P[0] != 'L': yield go(*then)
        else: yield go('split-break', (then, table, P))
    elif pc == 'split-break':
        then, table, leaf = loc
        if P != leaf: yield go('split', loc[:2])
        else: yield go('split-fill', loc + (s.log,))
    elif pc == 'split-fill':
        then, table, leaf, logs = loc
        if P != leaf: yield go('split', loc[:2])
        else:
            keeps_w = leaf[2] and (not logs or BUG == 'split-copies-W')
            t, tables = fill(put(leaf, 2, int(keeps_w)), table)
            marks = keeps_w and not logs
            yield go('split-flush', (then, t, marks), P=('B', t, 's'), T=tables)
    elif pc == 'split-flush': yield go('split-make', loc, **dropped)
    elif pc == 'split-make':
        then, table, marks = loc
        if P != ('B', table, 's'):
            yield go('split', loc[:2]) if BUG == 'reuse' else go(*then, T=put(T, table, ('X', 'X')))
        elif marks: yield go('split-mark', ((1, 1), then), P=('T', table))
        else: yield go(*then, P=('T', table))
    elif pc == 'split-mark': yield go(*loc[1], B=(1, 1) if s.log else s.B)

    elif kind in FAULTS:
        own = FAULTS[kind]
        block = put((0, 0), own, 1)
        if pc == 'look':
            if P[0] == 'E': yield go('ranges', (P,))
            elif P[0] == 'L': yield go('end') if P[2] else go('restore', (P, None))
            elif P[0] == 'B': yield go('cancel', (P, 0, ('look' if kind in BIG else 'end', ())))
            else: yield go('look-below', (P[1],))
        elif pc == 'look-below':
            e = T[loc[0]][own]
            if e[0] in 'FX': yield go('end')
            elif e[0] == 'L': yield go('end') if e[2] else go('restore', (e, loc[0]))
            else: yield go('ranges', (e,))
        elif pc == 'restore':
            old, table = loc
            if table is None and P == old: yield go('mark', ((1, 1),), P=put(P, 2, 1))
            elif table is not None and T[table][own] == old: yield go('mark', (block,), T=entry(table, own, put(old, 2, 1)))
            else: yield go('end')
        elif pc == 'ranges':
            seen = loc[0]
            loc = seen, kind in BIG and not s.published
            if any(own in PAGES[threads[n][0]] for n in s.published): yield go('end')
            elif seen[2]: yield go('flush-first', loc)
            else: yield go('resolve', loc)
        elif pc == 'flush-first': yield go('resolve', loc, **dropped)
        elif pc == 'resolve': yield go('act', loc + (s.frames,))
        elif pc == 'act':
            seen, may_be_huge, frames = loc
            if P[0] == 'T': yield go('install', (seen, frames, P[1]))
            elif P[0] == 'E' and P != seen and not P[2]: yield go('refine-ranges', (P,))
            elif P[0] == 'E' and P != seen: yield go('refused' if kind == 'beside1' else 'end')
            elif P != seen: yield go('end')
            elif may_be_huge and frames[0] == frames[1]:
                yield go('mark', ((1, 1),), P=('L', frames, 1, 0))
            else:
                beside = (put(seen, 2, 0),) * 2
                yield go('mark', (block,), P=('T', len(T)), T=T + (put(beside, own, ('L', frames[own], 1, 0)),))
        elif pc == 'refine-ranges': 
            held = any(own in PAGES[threads[n][0]] for n in s.published)
            yield go('end' if held else 'refine', loc)
        elif pc == 'refine':
            if P != loc[0]: yield go('end')
            else: yield go('end', P=('T', len(T)), T=T + ((put(P, 2, 0),) * 2,))
        elif pc == 'install':
            seen, frames, table = loc
            if T[table][own] != put(seen, 2, 0): yield go('end')
            else: yield go('mark', (block,), T=entry(table, own, ('L', frames[own], 1, 0)))
        else: yield go('end', B=tuple(a | b for a, b in zip(s.B, loc[0])) if s.log else s.B)

    elif kind == 'instead':
        if pc == 'look': yield go('instead-ranges', (P, s.counter)) if P[0] == 'L' else go('end')
        elif pc == 'instead-ranges': yield go('end') if s.published else go('instead-seq', loc)
        elif pc == 'instead-seq': yield go('instead', loc + (s.counter + 1,), counter=s.counter + 1)
        elif pc == 'instead':
            if P != loc[0]: yield go('end')
            else: yield go('instead-count', loc, P=('E', loc[2], 1), pending=reported(
                *((p, f, P[3]) for p, f in enumerate(P[1]))))
        elif pc == 'instead-count': yield go('instead-make', loc) if s.counter == loc[1] + 1 else go('end')
        elif pc == 'mark': yield go('end', B=tuple(a | b for a, b in zip(s.B, loc[0])) if s.log else s.B)
        elif P[:2] != ('E', loc[2]): yield go('end')
        else: yield go('mark', ((loc[0][2],) * 2,), P=put(loc[0], 3, 0))

    # Harvest, enabling. loc: pages, ...
    elif pc == 'on': yield go('walk', ((1, 1),), log=1, B=(0, 0))
    elif pc == 'take': yield go('walk', (s.B,), B=(0, 0)) if s.log and any(s.B) else go('end')
    elif kind in ('harvest', 'on'):
        taken = loc[0]
        if pc == 'walk':
            if P[0] == 'L' and P[2]: yield go('protect', (taken, P))
            elif P[0] == 'T': yield go('below', (taken, P[1], 0))
            else: yield go('flush-taken', loc)
        elif pc == 'protect': yield go('flush-taken', loc, P=put(P, 2, 0)) if P == loc[1] else go('walk', (taken,))
        elif pc == 'below':
            _, t, p = loc
            e = T[t][p]
            to = ('below', (taken, t, 1)) if p == 0 else ('flush-taken', (taken,))
            yield go(*to, T=entry(t, p, put(e, 2, 0)) if taken[p] and e[0] == 'L' else T)
        else: yield go('end', **dropped)

    # Invalidators. loc: seq, next page, ...; next page 2: the second pass.
    elif pc == 'publish': yield go('seq', published=s.published | {i})
    elif pc == 'seq': yield go('walk', (s.counter + 1, 0), counter=s.counter + 1)
    elif pc == 'walk':
        seq, n = loc
        if P[0] == 'B': yield go('cancel', (P, 0, ('walk', loc)))
        elif P[0] == 'E' and P[1] >= seq: yield go('flush', loc)
        elif P[0] == 'T' and n == 2: yield go('put-above', loc + (P, s.counter + 1), counter=s.counter + 1)
        elif P[0] == 'T': yield go('below', loc + (P[1],))
        elif P[0] == 'L' and kind == 'inval0': yield go('split', (('walk', loc), None))
        elif P[0] == 'L':
            yield go('put-above', loc + (P, seq), pending=reported(*((p, f, P[3]) for p, f in enumerate(P[1]))))
        elif P[2] and len(PAGES[kind]) == 1 and BUG != 'keep-flag': yield go('flush-above', loc + (P,))
        else: yield go('put-above', loc + (P, seq))
    elif pc == 'flush-above': yield go('put-flushed', loc, **dropped)
    elif pc == 'put-flushed':
        seq, n, old = loc
        if P != old: yield go('walk', (seq, n))
        else: yield go('flush', loc[:2], P=('E', seq, 0))
    elif pc == 'put-above':
        seq, n, old, new = loc
        flag = old[2] if old[0] == 'E' else int(kind == 'oom0')
        if P != old: yield go('walk', (seq, n))
        else: yield go('flush', loc[:2], P=('E', new, flag))
    elif pc == 'below':
        seq, n, table = loc
        p = PAGES[kind][n]
        e = T[table][p]
        if e[0] in 'FX': yield go('walk', loc[:2])
        elif e[0] == 'E' and e[1] >= seq: yield go(*after_entry(kind, loc))
        else: yield go('zap', loc + (e,), **{'pending': reported((p, e[1], e[3]))} if e[0] == 'L' else {})
    elif pc == 'zap':
        seq, n, table, old = loc
        p = PAGES[kind][n]
        if T[table][p] != old: yield go('below', loc[:3])
        else: yield go(*after_entry(kind, loc[:3]), T=entry(table, p, ('E', seq, 0)))
    elif pc == 'flush': yield go('host', **dropped)
    elif pc == 'host': yield go('withdraw', gone=s.gone | {(p, s.frames[p]) for p in PAGES[kind]},
                                frames=tuple(f + (p in PAGES[kind]) for p, f in enumerate(s.frames)))
    elif pc == 'withdraw': yield go('end', published=s.published - {i})
    else: raise AssertionError((kind, pc))


def after_entry(kind, loc):
    """Where an invalidator goes on after an entry of a table."""
    seq, n, table = loc
    if n + 1 < len(PAGES[kind]): return 'below', (seq, n + 1, table)
    return ('walk', (seq, 2)) if kind == 'unlink' else ('flush', (seq, 2))


CONFIGURATIONS = '''
table+recover+cpu split+small split+harvest table+recover+harvest off+table+recover+on off+split+on inval0+small
instead+small split+split+small split+small+inval0 table+recover+small+big table+recover+oom0+small
table+recover+inval+cpu table+recover+unlink+small split+inval+cpu+small split+small+big+inval+cpu
stale+inval0+beside1 stale+inval0+inval0+beside1 instead+small1+inval0 stale+inval0+big1+small1
empty+inval+inval0+small1'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
