"""Explicit-state check of recovery (table -> broken -> huge leaf) beside the dirty log by dirty bits,
where tables and huge leaves may be cached at once: no D is lost for the log or for the host. For
the log by write protection there is `proofs/recovery_beside_log.py`; here it is a neighbour.

Two pages under a two-level tree. P: ('E', seq), ('L', frames, W, D) a huge leaf, ('T', i, open,
generation), where `open` means unprotected, or ('B', i). T[i][page]: ('E', seq), ('L', frame, W, D,
H), ('F', frame or None, D, H) frozen, or ('X',): overwritten by a link of the list of retired
tables. H: D was set, and cleared for the log. Each page has a slot, `log` its flag, B its bit;
`big`: the host allows a huge leaf. A leaf with W and D (and an unprotected P) is written at any
time, and cached (`tlb`; `psc`: tables cached as unprotected). `late`: written since it was reported
last.
CPU: sets D where W is set, in P, or in a table that it has cached.
Recover: counter -> published ranges -> look: all entries are leaves, one slot covers both and may
    recover -> the host's answer -> counter as before: P is read -> table -> broken -> counter as
    before -> slot as before, and: may write if it does not log -> freeze by compare-and-exchange ->
    huge leaf, D of all -> if W: flags -> mark both. Else cancel. In any case, then: T is
    overwritten -> flush.
Cancel: each entry is frozen by compare-and-exchange -> its old contents are reported; dirty bits:
    and marked, if D and the slot logs -> seq -> broken -> empty.
Fault: (w0, w1: a write to that page; big: to page 0, and a huge leaf if that may be) as in
    break.py. If a huge leaf has no W and the slot logs: it is split, unless `whole`.
Harvest: (get: lazily; leaf: leaf by leaf) dirty bits: leaves with D are marked. Bits are taken -> W
    is cleared, P is protected, or D is cleared; broken: skip -> flush -> returned. on, on-leaf,
    on-set: the flag is published -> W is cleared or D, as by a harvest -> flush; on-set: all bits
    are set at first, and nothing is cleared.
Invalidator: as in recover.py. shrink0: the frame of page 0 stays, and a huge leaf is not allowed
    any more. halves: the slot is deleted, T stays linked, and two new slots replace it, which log.
Start: hole, closed (P is protected), dirty; logs; whole: huge leaves are recovered in slots that
    log, all pages are marked as one of them is written; dbit: dirty bits.
Wrong: a huge leaf over two slots, or that the host does not allow; a frame that is gone and mapped,
cached as writable, or whose D was not reported; a frozen entry in a linked table; or at the end: a
page of a slot that logs was written, and the next harvest will not report it.
Run: python3 recover_log.py [RULE]. Each of these breaks it: log-bits (dirty bits: recover slots that
log), no-D-mark (cancel), report-then-swap, swap-blindly (recover).
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P T counter published slots log B tlb psc late frames gone pending big')
PAGES = {'inval': (0, 1), 'unlink': (0, 1), 'inval0': (0,), 'shrink0': (0,), 'halves': (0, 1)}
FAULTS = {'w0': 0, 'w1': 1, 'big': 0}
START = 'hole', 'closed', 'dirty', 'logs', 'whole', 'dbit'
BOTH = 0, 1


def make(kinds):
    dbit, logs = 'dbit' in kinds, int('logs' in kinds or 'whole' in kinds)
    leaf = ('L', 0, 1, int('dirty' in kinds), 0)
    table = (('E', 0), leaf) if 'hole' in kinds else (leaf, leaf)
    bits = (1, 1) if logs and not dbit and 'closed' not in kinds else (0, 0)
    pending = frozenset((p, 0) for p in BOTH if table[p][0] == 'L' and leaf[3])
    P, none = ('T', 0, int('closed' not in kinds), 0), frozenset()
    s = Shared(P, (table,), 0, none, (0, 0), (logs, logs), bits, none, none, (0, 0), (0, 0), none, pending, 1)
    first = {'cpu': 2, 'recover': 'seen', 'get': 'take', 'leaf': 'take', 'on': 'on', 'on-leaf': 'on', 'on-set': 'on'}
    if dbit: first['get'] = 'collect'
    mode = int(dbit), int('whole' in kinds)
    threads = tuple((k, first.get(k, 'look' if k in FAULTS else 'publish'), mode, ()) for k in kinds if k not in START)
    return guest(s), threads


def guest(s):
    """Writes and caches whatever may be written."""
    psc = s.psc | {s.P[1]} if s.P[0] == 'T' and s.P[2] else s.psc
    tlb = s.tlb | {(p, s.T[i][p][1]) for i in psc for p in BOTH if s.T[i][p][0] == 'L' and s.T[i][p][2:4] == (1, 1)}
    if s.P[0] == 'L' and s.P[2:] == (1, 1): tlb |= set(enumerate(s.P[1]))
    late = tuple(int(s.late[p] or any(q == p for q, f in tlb)) for p in BOTH)
    return s._replace(psc=psc, tlb=tlb, late=late)


def wrong(state):
    s, threads = state
    if s.pending & s.gone: return 'dirty frame is gone and was not reported'
    if s.tlb & s.gone: return 'frame that is gone may be written'
    if s.P[0] == 'L':
        if s.slots[0] is None or s.slots[0] != s.slots[1]: return 'huge leaf over two slots'
        if not s.big: return 'huge leaf that the host does not allow'
        if set(enumerate(s.P[1])) & s.gone: return 'huge leaf of a frame that is gone'
    if s.P[0] == 'T':
        for p, e in enumerate(s.T[s.P[1]]):
            if e[0] in 'FX': return 'frozen entry in a linked table'
            if e[0] == 'L' and (p, e[1]) in s.gone: return 'leaf of a frame that is gone'
    if any(t[1] != 'end' for t in threads): return
    for p in BOTH:
        e = s.T[s.P[1]][p] if s.P[0] == 'T' else s.P
        collected = threads[0][2][0] and s.P[0] == 'T' and e[0] == 'L' and e[3]
        if s.log[p] and s.late[p] and not s.B[p] and not collected: return f'page {p} was written, and not recorded'


def step(state, i):
    s, threads = state
    kind, pc, mode, loc = threads[i]
    dbit, whole = mode
    P, T = s.P, s.T

    def go(pc, loc=(), **changes):
        return guest(s._replace(**changes)), threads[:i] + ((kind, pc, mode, loc),) + threads[i + 1:]

    def entry(t, p, v): return put(T, t, put(T[t], p, v))

    def frozen(e): return ('F', e[1], e[3], e[4]) if e[0] == 'L' else ('F', None, 0, 0)

    def reported(*leaves): return s.pending - {(p, f) for p, f, dirty in leaves if dirty}

    def dirtied(*frames): return s.pending | set(frames)

    def marked(pages): return tuple(int(s.B[p] or p in pages and s.log[p]) for p in BOTH)

    def is_published(p): return any(p in PAGES[threads[n][0]] for n in s.published)

    def may_recover():
        return s.slots[0] is not None and s.slots[0] == s.slots[1] and (
            not s.log[0] or (whole and not dbit) or (dbit and BUG == 'log-bits'))

    if kind == 'cpu':
        yield go('end')
        to = 'end' if pc == 1 else pc - 1
        if P[0] == 'L' and P[2:] == (1, 0): yield go(to, P=put(P, 3, 1), pending=dirtied(*enumerate(P[1])))
        for t in s.psc:
            for p, e in enumerate(T[t]):
                if e[0] == 'L' and e[2:4] == (1, 0):
                    yield go(to, T=entry(t, p, put(e, 3, 1)), pending=dirtied((p, e[1])))

    # Cancel. loc: table, page, what to do then, ...
    elif pc == 'cancel':
        table, n, then = loc
        if n == 2: yield go('cancelled', (table, s.counter + 1, then), counter=s.counter + 1)
        else:
            e = T[table][n]
            if e[0] == 'X': yield go('cancel', (table, n + 1, then))
            elif e[0] == 'F': yield go('report', loc + (e,))
            elif BUG == 'report-then-swap':
                yield go('cancel-freeze', loc + (e,), pending=reported((n, e[1], e[0] == 'L' and e[3])))
            else: yield go('cancel-freeze', loc + (e,))
    elif pc == 'cancel-freeze':
        table, n, then, e = loc
        if BUG == 'report-then-swap': yield go('report', (table, n, then, frozen(e)), T=entry(table, n, frozen(e)))
        elif T[table][n] == e: yield go('report', (table, n, then, frozen(e)), T=entry(table, n, frozen(e)))
        else: yield go('cancel', loc[:3])
    elif pc == 'report':
        table, n, then, e = loc
        marks = dbit and e[2] and BUG != 'no-D-mark'
        to = ('report-log', (table, n, then)) if marks else ('cancel', (table, n + 1, then))
        yield go(*to, pending=reported((n, e[1], e[2] or e[3])))
    elif pc == 'report-log': yield go('cancel', (loc[0], loc[1] + 1, loc[2]), B=marked((loc[1],)))
    elif pc == 'cancelled': yield go(*loc[2], P=('E', loc[1]) if P == ('B', loc[0]) else P)

    # Recovery. loc: seq counter; then table, may write, entries.
    elif pc == 'seen': yield go('recover-ranges', (s.counter,))
    elif pc == 'recover-ranges': yield go('end') if s.published else go('look', loc)
    elif kind == 'recover' and pc == 'look':
        may = P[0] == 'T' and all(e[0] == 'L' for e in T[P[1]]) and may_recover()
        yield go('ask', loc) if may else go('end')
    elif pc == 'ask': yield go('enter', loc) if s.big else go('end')
    elif pc == 'enter':
        yield go('break', loc + (P,)) if s.counter == loc[0] and P[0] == 'T' else go('end')
    elif pc == 'break':
        if P != loc[1]: yield go('end')
        else: yield go('overtaken', (loc[0], P[1]), P=('B', P[1]))
    elif pc == 'overtaken':
        yield go('slot', loc) if s.counter == loc[0] else go('cancel', (loc[1], 0, ('push', (loc[1],))))
    elif pc == 'slot':
        if may_recover(): yield go('freeze', (loc[1], int(not s.log[0]), ()))
        else: yield go('cancel', (loc[1], 0, ('push', (loc[1],))))
    elif pc == 'freeze':
        table, may_write, was = loc
        n = len(was)
        if n == 2: yield go('finish', loc)
        else:
            e = T[table][n]
            no = e[0] == 'E' or e[1] is None or was and was[0][1] != e[1]
            if no: yield go('cancel', (table, 0, ('push', (table,))))
            elif e[0] == 'F': yield go('freeze', (table, may_write, was + (('L', e[1], 0) + e[2:],)))
            else: yield go('freeze-one', loc + (e,))
    elif pc == 'freeze-one':
        table, may_write, was, e = loc
        n = len(was)
        if T[table][n] == e or BUG == 'swap-blindly':
            yield go('freeze', (table, may_write, was + (e,)), T=entry(table, n, frozen(e)))
        else: yield go('freeze', loc[:3])
    elif pc == 'finish':
        table, may_write, was = loc
        leaf = ('L', (was[0][1], was[1][1]), may_write, int(any(e[3] or e[4] for e in was)))
        if P != ('B', table): yield go('push', (table,))
        else: yield go('mark-all' if may_write else 'push', (table,), P=leaf)
    elif pc == 'mark-all': yield go('mark-second', loc, B=marked((0,))) if s.log[0] else go('push', loc)
    elif pc == 'mark-second':
        yield go('push', loc, B=marked((1,)) if s.slots[0] == s.slots[1] else s.B)
    elif pc == 'push':
        yield go('flush-retired', T=put(T, loc[0], (('X',),) * 2))
    elif pc == 'flush-retired': yield go('end', tlb=frozenset(), psc=frozenset())

    elif kind in FAULTS:
        own, other = FAULTS[kind], 1 - FAULTS[kind]
        if pc == 'look':
            if P[0] == 'E': yield go('ranges', (P,))
            elif P[0] == 'L': yield go('end') if P[2] else go('slot-above', (P,))
            elif P[0] == 'B': yield go('cancel', (P[1], 0, ('look', ())))
            else: yield go('look-below', (P,))
        elif pc == 'slot-above':                        # A huge leaf without W.
            if s.slots[own] is None: yield go('end')
            else: yield go('split' if s.log[own] and not whole else 'restore-above', loc)
        elif pc == 'split':
            yield go('look', P=('T', len(T), 1, 0), T=T + (parts(P, dbit),)) if P == loc[0] else go('look')
        elif pc == 'restore-above':
            if P != loc[0]: yield go('look')
            else: yield go('flags', (BOTH, 'end'), P=('L', P[1], 1, 1), pending=dirtied(*enumerate(P[1])))
        elif pc == 'look-below':                        # loc: P
            e, is_open = T[loc[0][1]][own], loc[0][2]
            if e[0] in 'FX': yield go('look')
            elif e[0] == 'E': yield go('ranges', (e,))
            elif is_open and e[2]: yield go('end')
            elif is_open: yield go('restore', loc + (e,))
            else: yield go('slot-below', loc + (e,))
        elif pc == 'slot-below':
            if s.slots[own] is None: yield go('end')
            else: yield go('clear' if s.log[own] else 'restore', loc)
        elif pc == 'clear':
            t, e = loc[0][1], T[loc[0][1]][other]
            yield go('restore', loc, T=entry(t, other, put(e, 2, 0)) if e[0] == 'L' else T)
        elif pc == 'restore':                              # loc: P, leaf
            t, e = loc[0][1], loc[1]
            if T[t][own] != e: yield go('look')
            else: yield go('flags' if loc[0][2] else 'open', ((own,), 'end') if loc[0][2] else loc[:1],
                           T=entry(t, own, e[:2] + (1, 1, e[4])), pending=dirtied((own, e[1])))
        elif pc == 'open':
            yield go('flags', ((own,), 'end'), P=put(P, 2, 1)) if P == loc[0] else go('flags', ((own,), 'look'))
        elif pc == 'flags': yield go('mark', loc) if s.log[own] else go(loc[1])
        elif pc == 'mark': yield go(loc[1], B=marked(loc[0]))
        elif pc == 'ranges': yield go('end') if is_published(own) else go('resolve', loc)
        elif pc == 'resolve':
            if s.slots[own] is None: yield go('end')
            else: yield go('act', loc + (s.frames, int(kind == 'big' and s.big and may_recover())))
        elif pc == 'act':
            seen, frames, is_big = loc
            f = frames[own]
            if P[0] == 'T': yield go('install', loc + (P,))
            elif P != seen: yield go('end')
            elif is_big and frames[0] == frames[1]:
                yield go('flags', (BOTH, 'end'), P=('L', frames, 1, 1), pending=dirtied(*enumerate(frames)))
            else:
                table = put((seen, seen), own, ('L', f, 1, 1, 0))
                yield go('flags', ((own,), 'end'), P=('T', len(T), 1, 0), T=T + (table,), pending=dirtied((own, f)))
        else:
            seen, frames, _, t = loc
            f = frames[own]
            if T[t[1]][own] != seen: yield go('end')
            else: yield go('flags', ((own,), 'end' if t[2] else 'look'), T=entry(t[1], own, ('L', f, 1, 1, 0)),
                           pending=dirtied((own, f)))

    # Harvest, enabling. loc: pages; then what to visit.
    elif pc == 'on':
        if kind == 'on-set': yield go('end', log=(1, 1), B=(1, 1))
        else: yield go('walk', ((1, 1),), log=(1, 1), B=(0, 0))
    elif pc == 'collect': yield go('collect-below', (P[1], 0)) if P[0] == 'T' else go('take')
    elif pc == 'collect-below':
        t, p = loc
        e = T[t][p]
        to = ('collect-below', (t, 1)) if p == 0 else ('take', ())
        yield go('collect-mark', (p, to)) if e[0] == 'L' and e[3] else go(*to)
    elif pc == 'collect-mark': yield go(*loc[1], B=marked((loc[0],)))
    elif pc == 'take': yield go('walk', (s.B,), B=(0, 0)) if s.log[0] and s.slots == (0, 0) and any(s.B) else go('end')
    elif kind in ('get', 'leaf', 'on', 'on-leaf'):
        taken = loc[0]
        if pc == 'walk':
            if P[0] == 'L' and P[2]: yield go('flush', (taken,), P=put(P, 2, 0))
            elif P[0] == 'T' and (dbit or kind in ('leaf', 'on-leaf')): yield go('below', (taken, P[1], 0))
            elif P[0] == 'T': yield go('flush', (taken,), P=('T', P[1], 0, P[3] + 1))
            else: yield go('flush', (taken,))
        elif pc == 'below':
            _, t, p = loc
            e = T[t][p]
            new = put(put(e, 3, 0), 4, e[3] | e[4]) if e[0] == 'L' and dbit else put(e, 2, 0) if e[0] == 'L' else e
            yield go('below' if p == 0 else 'flush', (taken, t, 1) if p == 0 else (taken,),
                     T=entry(t, p, new) if taken[p] else T)
        else: yield go('end', tlb=frozenset((p, f) for p, f in s.tlb if not taken[p]), psc=frozenset(),
                       late=tuple(int(s.late[p] and not taken[p]) for p in BOTH))

    # Invalidators. loc: seq, next page, ...; next page 2: the second pass.
    elif pc == 'publish': yield go('seq', published=s.published | {i})
    elif pc == 'seq': yield go('walk', (s.counter + 1, 0), counter=s.counter + 1)
    elif pc == 'walk':
        seq, n = loc
        whole_range = len(PAGES[kind]) == 2
        if P[0] == 'B': yield go('cancel', (P[1], 0, ('walk', loc)))
        elif P[0] == 'E' and P[1] >= seq: yield go('flush', loc)
        elif P[0] == 'T' and n == 2: yield go('put-above', loc + (P, s.counter + 1), counter=s.counter + 1)
        elif P[0] == 'T': yield go('below', loc + (P[1],))
        elif P[0] == 'L' and whole_range:
            yield go('put-above', loc + (P, seq), pending=reported(*((p, f, P[3]) for p, f in enumerate(P[1]))))
        else: yield go('put-above', loc + (P, seq))
    elif pc == 'put-above':
        seq, n, old, new = loc
        if P != old: yield go('walk', (seq, n))
        elif len(PAGES[kind]) == 2: yield go('flush', loc[:2], P=('E', new))
        else:                                           # refine, split
            table = (old, old) if old[0] == 'E' else parts(old, dbit)
            yield go('walk', (seq, n), P=('T', len(T), 1, 0), T=T + (table,))
    elif pc == 'below':
        seq, n, table = loc
        p = PAGES[kind][n]
        e = T[table][p]
        if e[0] in 'FX': yield go('walk', loc[:2])
        elif e[0] == 'E' and e[1] >= seq: yield go(*after_entry(kind, loc))
        elif e[0] == 'L':
            yield go('zap', loc + (e,), pending=reported((p, e[1], e[3] or e[4])), B=marked((p,)) if dbit and e[3] else s.B)
        else: yield go('zap', loc + (e,))
    elif pc == 'zap':
        seq, n, table, old = loc
        p = PAGES[kind][n]
        if T[table][p] != old: yield go('below', loc[:3])
        else: yield go('zapped', loc, T=entry(table, p, ('E', seq)))
    elif pc == 'zapped':
        _, n, _, old = loc
        yield go(*after_entry(kind, loc[:3]), B=marked((PAGES[kind][n],)) if dbit and old[0] == 'L' and old[3] else s.B)
    elif pc == 'flush': yield go('host', loc, tlb=frozenset(), psc=frozenset())
    elif pc == 'host':
        pages = () if kind == 'shrink0' else PAGES[kind]
        shrinks = kind in ('shrink0', 'inval', 'unlink')
        changes = {'gone': s.gone | {(p, s.frames[p]) for p in pages}, 'big': int(s.big and not shrinks),
                   'frames': tuple(f + (p in pages) for p, f in enumerate(s.frames))}
        if kind == 'halves': changes.update(slots=(None, None), log=(0, 0), B=(0, 0), late=(0, 0))
        yield go('withdraw', loc, **changes)
    elif pc == 'withdraw': yield go('create' if kind == 'halves' else 'end', loc, published=s.published - {i})
    elif pc == 'create': yield go('refill', loc, slots=(1, 2), log=(1, 1), B=(0, 0), late=(0, 0))
    elif pc == 'refill':                                # Two faults at once.
        is_empty = P[0] == 'T' and T[P[1]] == (('E', loc[0]),) * 2
        leaves = tuple(('L', f, 1, 1, 0) for f in s.frames)
        if not is_empty: yield go('end')
        else: yield go('end', T=put(T, P[1], leaves), B=(1, 1), pending=dirtied(*enumerate(s.frames)))
    else: raise AssertionError((kind, pc))


def parts(leaf, dbit):
    """The entries of a table that replaces the huge leaf `leaf`."""
    return tuple(('L', f, 1 if dbit else leaf[2], leaf[3], 0) for f in leaf[1])


def after_entry(kind, loc):
    """Where an invalidator goes on after an entry of a table."""
    seq, n, table = loc
    if n + 1 < len(PAGES[kind]): return 'below', (seq, n + 1, table)
    return ('walk', (seq, 2)) if kind == 'unlink' else ('flush', (seq, 2))


CONFIGURATIONS = '''
recover+cpu recover+cpu+on recover+cpu+on-leaf+w0 recover+w0+on+get dbit+recover+cpu+on dbit+recover+cpu+w0+on
dbit+recover+cpu+on-set+get dbit+recover+cpu+on+get dbit+logs+recover+cpu+get whole+recover+cpu+get
whole+closed+recover+w0+get whole+recover+cpu+leaf+w0 recover+halves+w0 recover+shrink0+w0 recover+inval+w0
recover+inval0+cpu dbit+recover+cpu+inval0 hole+recover+w0+on recover+cpu+unlink+cpu recover+big+inval0
recover+cpu+w1+on-set+get'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
