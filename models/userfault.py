"""Explicit-state check of userfaults and attributes beside recoveries, with break before make, with
stores that other CPUs observe late, and of faults on several pages: no guest reaches a page whose
bit is set, or memory of the wrong kind. The proofs have the rest (`proofs/userfault.py`).

Two pages under a two-level tree. P: ('E', seq), ('L', (frame, frame), W) a huge leaf, ('T', i), or
('B', i) broken. T[i][page]: ('E', seq), ('L', frame, W), or ('F', frame or None) frozen. A frame is
's0' (shared memory, not filled), 's1' (filled) or 'p1' (private). W: 2 may be written, 1
write-protected for the log, 0 the host has to allow it. The counter's seqs are even; an odd one
means that a flush must come first. `slot`: 0, or the number of the user's bitmap, and userfaults
are on. `bits`: of each bitmap, 1 = exit. `on`: 2 when turning on has returned. `attrs`: 1 =
private. `armed`: pages that must not be reached. `room`: stores to bits that other CPUs do not
observe yet, by thread.
Fault: (look0, look1: of that page; huge0: as large as may be; around0: of page 0, with page 1;
    write0: wants W; read0: is answered with W 0) the entry (of both pages, one by one) -> counter,
    if there is a leaf -> published ranges -> slot -> bit of each page: if its own is set it exits
    -> attribute of each page -> resolve -> exchange for each on the very entry of the look. W 1: W
    is restored to the leaf. W 0: take a seq -> the leaf is exchanged for it -> counter: no other
    seq since the look -> the new leaf. Broken: cancel, as in recover.py.
Taker: publish -> seq -> zap: leaves are zapped, empty entries get the seq, broken ones are
    cancelled -> if both pages are covered the table is unlinked for a seq of its own -> flush, in
    any case -> change -> withdraw.
    on: the change is the set with the flag; on2: with another bitmap, while on; again: turns off,
    and then on as that. private, private0, shared, ...: the change is the attributes, one by one.
    keep: an invalidation for the host.
Rescan: (rescan, rescan0, rescan1) bits are set -> fence -> as a taker, of the pages whose bit is
    still set, without a change.
Resolver: (fill0, fill1) fills the page -> clears its bit.
Recovery: counter -> ranges -> all entries are leaves -> flag -> attribute of each page -> the host
    has the first leaf's frame -> counter as before -> table -> broken -> counter as before -> flag
    -> freeze -> huge leaf. Else cancel.
Start: ison; arrived: all is filled, no bit is set; big: one bit, and a leaf, for both pages; huge:
    a huge leaf, empty: nothing is mapped, hole0, hole1: that page is not; ro, protected: W 0, W 1;
    isprivate; mixed: page 1 is private.
    bare: on and rescan publish no range and unlink nothing, and the flag comes before the seq. bbm:
    break before make; with bare, a zapped entry gets an odd seq, and a fault that installs there
    flushes.
Wrong: a leaf, or a CPU's translation, of a page whose bit was set before turning on or a rescan,
and not cleared before that returned or since; of a page that is not filled, while on; of shared
memory where a page is private, or the other way round, when no call is changing that; a huge leaf
of both kinds, or while on (not big); a leaf in an unlinked table; a frozen entry in a linked one;
an error that blames the host for another frame; bbm: two translations of a page at once.
The very entry decides, and a thread that sets bits changes the entry after that. So bits are read
once, after the entry, and not again, also not by a fault that replaces a leaf of W 0: the counter
shows a change.
Attributes must come after the seq, inside the published range. If one is stored first, a leaf of W
0 has the wrong frame, and no thread has taken a seq.
Run: python3 userfault.py [RULE]. Each of these breaks it: clear-first, run-bits (page 1 is treated as
page 0), run-attributes, no-fence, pass-broken, bare-plain (no odd seqs), drop-odd (an even seq
replaces an odd one), recover-no-counter, recover-no-flag, recover-no-ranges, recover-no-attributes,
recover-one-attribute, recover-attributes-first.
Safe too, so no rule: the flag between the range and the seq; no look at a bit where W is restored;
a rescan that does not check whether a bit is still set; a recovery that does not read the flag
again.
"""
from collections import namedtuple
from explore import BUG, main, put

Shared = namedtuple('Shared', 'P T counter published slot on bits content attrs tlb clears armed room bad')
Look = namedtuple('Look', 'n entries counter free slot bits attrs frames')
NOTHING = Look(0, (None, None), None, None, None, (None, None), (None, None), None)
BOTH = 0, 1
ORDER = 'ecrsbBaAf'
FAULTS = 'look0', 'look1', 'huge0', 'around0', 'write0', 'read0'
MODES = 'bare', 'big', 'bbm', 'ison', 'huge', 'hole0', 'hole1', 'ro', 'protected', 'arrived', 'empty', 'mixed', 'isprivate'
MODE = set()


def make(kinds):
    MODE.clear()
    MODE.update(k for k in kinds if k in MODES)
    on = 'ison' in MODE
    frame = 's1' if on or 'arrived' in MODE else 's0'
    w = 0 if 'ro' in MODE else 1 if 'protected' in MODE else 2
    leaves = [('L', 'p1' if 'isprivate' in MODE or p and 'mixed' in MODE else frame, w) for p in BOTH]
    for p in BOTH:
        if f'hole{p}' in MODE: leaves[p] = ('E', 0)
    P, T = ('T', 0), (tuple(leaves),)
    if 'huge' in MODE: P, T = ('L', tuple(e[1] for e in leaves), 2), ()
    if 'empty' in MODE: P, T = ('E', 0), ()
    missing = int(frame == 's0')
    first = {'resc': 'poison', 'fill': 'fill', 'cpu': 2, 'reco': 'seen', 'agai': 'off'}
    threads = tuple((k, 'look' if k in FAULTS else first.get(k[:4]) or take(k)[0], NOTHING if k in FAULTS else ())
                    for k in kinds if k not in MODES)
    attrs = (1, 1) if 'isprivate' in MODE else (0, 1) if 'mixed' in MODE else (0, 0)
    return Shared(P, T, 0, frozenset(), int(on), 2 * on, ((missing,) * 2, (1, 1)), ('1' if not missing else '0',) * 2, attrs,
                  (None, None), (0, 0), frozenset(), frozenset(), 0), threads


def take(kind):
    """The steps of a taker, in order."""
    bare = 'bare' in MODE and kind != 'keep'
    zap = ('seq', 'zap') if bare else ('seq', 'zap', 'unlink')
    zap += 'flush',
    if kind[:4] == 'resc':
        if not bare: zap = ('publish',) + zap + ('withdraw',)
        return ('poison', 'fence') + zap + ('end',)
    if bare and (kind[:2] == 'on' or kind == 'again'): return ('change',) + zap + ('end',)
    changes = () if kind == 'keep' else ('change',)
    return ('publish',) + zap + changes + ('withdraw', 'end')


def pages_of(kind):
    return (int(kind[-1]),) if kind[-1] in '01' and 'big' not in MODE else BOTH


def mapped(s, p):
    """The frame of page p, and the size of its leaf."""
    e = s.T[s.P[1]][p] if s.P[0] == 'T' else s.P
    if e[0] == 'L': return (e[1], 1) if s.P[0] == 'T' else (e[1][p], 2)


def bit_of(p):
    return 0 if 'big' in MODE else p


def wrong(state):
    s, threads = state
    changing = any(k[:4] in ('shar', 'priv') and pc not in ('publish', 'end') for k, pc, _ in threads)
    for p in BOTH:
        now = mapped(s, p)
        for m in now, s.tlb[p]:
            if m is None: continue
            if p in s.armed: return f'page {p} is reached, and its bit is set'
            if s.on == 2 and m[0] == 's0': return f'page {p} is reached, and not filled'
            if not changing and (m[0][0] == 'p') != s.attrs[p]: return f'page {p} is of the wrong kind'
        if 'bbm' in MODE and now and s.tlb[p] and now != s.tlb[p]: return f'two translations of page {p}'
    if s.on == 2 and s.P[0] == 'L' and 'big' not in MODE: return 'huge leaf while on'
    if s.P[0] == 'L' and s.attrs[0] != s.attrs[1] and not changing: return 'huge leaf of two kinds'
    if s.bad: return 'an error blames the host'
    for i, table in enumerate(s.T):
        if s.P == ('T', i) and 'F' in (table[0][0], table[1][0]): return 'frozen entry in a linked table'
        if s.P not in (('T', i), ('B', i)) and 'L' in (table[0][0], table[1][0]): return 'leaf in an unlinked table'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    P, T = s.P, s.T

    def entry(i, p, v): return put(T, i, put(T[i], p, v))

    def flushed(pages):
        return tuple(None if p in pages or t and t[1] == 2 else t for p, t in enumerate(s.tlb))

    # The buffer of stores is emptied at any time.
    mine = [x for x in s.room if x[0] == i]
    for x in mine:
        bits = put(s.bits, s.slot - 1, put(s.bits[s.slot - 1], x[1], 1)) if s.slot else s.bits
        yield go(pc, loc, room=s.room - {x}, bits=bits)

    if kind == 'cpu':
        yield go('end')
        for p in BOTH:
            m = mapped(s, p)
            if m and s.tlb[p] != m: yield go('end' if pc == 1 else pc - 1, tlb=put(s.tlb, p, m))
    elif kind in ('fill0', 'fill1'):
        p = int(kind[-1])
        pages = BOTH if 'big' in MODE else (p,)
        is_fill = (pc == 'fill') != (BUG == 'clear-first')
        to = 'clear' if pc == 'fill' else 'end'
        if is_fill: yield go(to, content=tuple('1' if q in pages else c for q, c in enumerate(s.content)))
        else:
            n = max(s.slot, 1) - 1
            yield go(to, bits=put(s.bits, n, put(s.bits[n], bit_of(p), 0)), armed=s.armed - set(pages),
                     clears=tuple(c + (q in pages) for q, c in enumerate(s.clears)))

    # Cancel. loc: table, page, what to do then.
    elif pc == 'cancel':
        table, n, then = loc
        if n == 2: yield go('cancelled', (table, s.counter + 2, then), counter=s.counter + 2)
        else:
            e = T[table][n]
            yield go(pc, (table, n + 1, then), T=entry(table, n, frozen(e)) if e[0] != 'F' else T)
    elif pc == 'cancelled': yield go(*loc[2], P=('E', loc[1]) if P == ('B', loc[0]) else P)

    elif kind == 'recover':
        if pc == 'seen' and BUG == 'recover-attributes-first': yield go('count', s.attrs)
        elif pc == 'seen': yield go('free', (s.counter,))
        elif pc == 'count': yield go('free', (s.counter, loc))
        elif pc == 'free': yield go('end') if s.published and BUG != 'recover-no-ranges' else go('leaves', loc)
        elif pc == 'leaves':
            may = P[0] == 'T' and all(e[0] == 'L' for e in T[P[1]])
            yield go('flag', (loc[0], T[P[1]][0][1], *loc[1:])) if may else go('end')
        elif pc == 'flag':
            may = not s.slot or 'big' in MODE or BUG == 'recover-no-flag'
            to = 'ask' if BUG in ('recover-attributes-first', 'recover-no-attributes') else 'attribute'
            yield go(to, loc if to == 'attribute' else loc[:2] + (loc[2][0] if loc[2:] else s.attrs[0],)
                     if not loc[2:] or loc[2][0] == loc[2][1] else ('no',)) if may else go('end')
        elif pc == 'attribute': yield go('other', loc + (s.attrs[0],))
        elif pc == 'other': yield go('ask', loc) if s.attrs[1] == loc[2] or BUG == 'recover-one-attribute' else go('end')
        elif pc == 'ask':
            if loc == ('no',): yield go('end')
            else: yield go('enter', loc[:1]) if loc[1] == ('p1' if loc[2] else 's' + s.content[0]) else go('end')
        elif pc == 'enter': yield go('break', loc + (P,)) if s.counter == loc[0] and P[0] == 'T' else go('end')
        elif pc == 'break': yield go('overtaken', (loc[0], P[1]), P=('B', P[1])) if P == loc[1] else go('end')
        elif pc == 'overtaken':
            fine = s.counter == loc[0] or BUG == 'recover-no-counter'
            yield go('again', loc[1:]) if fine else go('cancel', (loc[1], 0, ('end', ())))
        elif pc == 'again':
            fine = not s.slot or 'big' in MODE or BUG in ('recover-no-flag', 'recover-no-counter')
            yield go('freeze', loc) if fine else go('cancel', (loc[0], 0, ('end', ())))
        elif pc == 'freeze':
            table, was = loc[0], loc[1:]
            if len(was) == 2: yield go('finish', loc)
            else:
                e = T[table][len(was)]
                if e[0] == 'E' or e[1] is None: yield go('cancel', (table, 0, ('end', ())))
                else: yield go('freeze', loc + (e[1],), T=entry(table, len(was), frozen(e)) if e[0] == 'L' else T)
        elif pc == 'finish': yield go('end', P=('L', loc[1:], 2) if P == ('B', loc[0]) else P)

    elif kind in FAULTS: yield from fault(s, i, kind, pc, loc, go, entry, flushed)

    # Takers. loc: how often the bits were cleared before; seq, page; ...
    elif pc == 'off': yield go(take(kind)[0], slot=0, on=0, armed=frozenset())
    elif pc == 'poison':
        pages = pages_of(kind)
        store = {(i, bit_of(p)) for p in pages}
        if not s.slot: yield go('end')
        else: yield go('fence', tuple(s.clears[p] if p in pages else None for p in BOTH), room=s.room | store)
    elif pc == 'fence':
        if not mine or BUG == 'no-fence': yield go(take(kind)[2], (loc,))
        else: return
    else: yield from taker(s, i, kind, pc, loc, go, entry, flushed)


def frozen(e):
    return ('F', e[1] if e[0] == 'L' else None)


def fault(s, i, kind, pc, loc, go, entry, flushed):
    P, T = s.P, s.T
    own = int(kind[-1])
    other = 1 - own
    both = kind[:4] in ('huge', 'arou')
    writes = kind[:5] == 'write'
    if pc == 'look':
        what = ORDER[loc.n:loc.n + 1]
        on = loc._replace(n=loc.n + 1)
        if what == 'e':
            if P[0] == 'B': yield go('cancel', (P[1], 0, ('end', ())))
            elif P[0] == 'E': yield go('look', on._replace(entries=(P, P), n=on.n))
            elif P[0] == 'L': yield go('end')
            else: yield go('look-below', (loc, P[1]))
        elif what == 'c': yield go('look', on._replace(counter=s.counter) if loc.entries[own][0] == 'L' else on)
        elif what == 'r':
            taken = {p for _, pages in s.published for p in pages}
            yield go('end') if own in taken else go('look', on._replace(free=other not in taken))
        elif what == 's': yield go('look', on._replace(slot=s.slot))
        elif what in 'bB' and what:
            p = own if what == 'b' else other
            if not loc.slot or what == 'B' and not both: yield go('look', on._replace(bits=put(loc.bits, p, 0)))
            else:
                bit = s.bits[loc.slot - 1][bit_of(p)]
                if what == 'B' and BUG == 'run-bits': bit = loc.bits[own]
                yield go('end') if bit and what == 'b' else go('look', on._replace(bits=put(loc.bits, p, bit)))
        elif what in 'aA' and what:
            p = own if what == 'a' else other
            value = s.attrs[p]
            if what == 'A' and BUG == 'run-attributes' and kind == 'around0':
                value = loc.attrs[own]
            yield go('look', on._replace(attrs=put(loc.attrs, p, value)) if what == 'a' or both else on)
        elif what == 'f':
            yield go('look', on._replace(frames=tuple('p1' if loc.attrs[p] else 's' + s.content[p] for p in BOTH)))
        else: yield from plan(s, own, kind, loc, go)
    elif pc == 'look-below':
        loc, table = loc
        e = T[table][own]
        if e[0] == 'F': yield go('look', NOTHING)
        elif e[0] == 'L' and not (writes and e[2] < 2): yield go('end')
        elif e[0] == 'E' and kind == 'around0': yield go('look-around', (loc, table, e))
        else: yield go('look', loc._replace(n=loc.n + 1, entries=put((None, None), own, e)))
    elif pc == 'look-around':
        loc, table, e = loc
        o = T[table][other]
        yield go('look', loc._replace(n=loc.n + 1, entries=put((e, e), other, o if o[0] == 'E' else None)))
    elif pc == 'flush': yield go('act', loc, tlb=flushed(BOTH))
    elif pc == 'act':                                           # loc: page, entry seen, leaf, huge leaf or None, the pc after it
        p, seen, leaf, huge, then = loc
        if P[0] == 'T': yield go('install', loc + (P[1],))
        elif P[0] != 'E' or P != seen: yield go('end')
        else: yield go('link', loc)
    elif pc == 'link':
        p, seen, leaf, huge, then = loc
        below = ('E', seen[1] & ~1)
        if P != seen: yield go('end')
        elif huge: yield go('end', P=huge)
        else: yield go(*again(then, below), P=('T', len(T)), T=T + (put((below, below), p, leaf),))
    elif pc == 'install':
        p, seen, leaf, huge, then, table = loc
        if huge or T[table][p] != seen: yield go('end')
        else: yield go(*again(then, None), T=entry(table, p, leaf))
    elif pc == 'restore': yield go('end', T=entry(P[1], own, loc[0][:2] + (2,)) if P[0] == 'T' and T[P[1]][own] == loc[0] else T)
    elif pc == 'another':                                       # the host has another frame for a leaf that may still be there
        still = P[0] == 'T' and T[P[1]][own] == loc.entries[own]
        yield go('blame', loc) if still else go('end')
    elif pc == 'blame': yield go('end', bad=int(s.counter == loc.counter))
    elif pc == 'replace': yield go('swap', loc + (P[1], s.counter + 2), counter=s.counter + 2) if P[0] == 'T' else go('end')
    elif pc == 'swap':
        look, table, seq = loc
        if T[table][own] != look.entries[own]: yield go('end')
        else: yield go('recount', loc, T=entry(table, own, ('E', seq)))
    elif pc == 'recount':
        look, table, seq = loc
        if s.counter == look.counter + 2:
            yield go('install', (own, ('E', seq), ('L', look.frames[own], 2), None, None, table))
        else: yield go('end')


def again(then, below):
    """The next page of a fault that maps its neighbour along: it was read where the table is linked by now."""
    if then is None: return ('end', ())
    p, seen, leaf = then
    return ('act', (p, below or seen, leaf, None, None))


def plan(s, own, kind, loc, go):
    """The last steps of a fault."""
    other = 1 - own
    found = loc.entries[own]
    w = 0 if kind == 'read0' else 2
    if found[0] == 'L' and found[2] == 1: yield go('restore', (found,))
    elif found[0] == 'L': yield go('replace', (loc,)) if found[1] == loc.frames[own] else go('another', loc)
    else:
        huge, then = None, None
        small = loc.slot and 'big' not in MODE
        above = kind == 'huge0' and loc.entries[0] == loc.entries[1]
        if above and not small and loc.attrs[0] == loc.attrs[1] and loc.bits[other] == 0 and loc.free:
            huge = ('L', loc.frames, w)
        e = loc.entries[other]
        if kind == 'around0' and e and loc.free and not loc.bits[other] and loc.attrs[other] == loc.attrs[own]:
            then = (other, e, ('L', loc.frames[other], w))
        yield go('flush' if found[1] & 1 else 'act', (own, found, ('L', loc.frames[own], w), huge, then))


def taker(s, i, kind, pc, loc, go, entry, flushed):
    P, T = s.P, s.T
    pages, steps = pages_of(kind), take(kind)
    rescans = kind[:4] == 'resc'
    if pc in steps[:-1]: to = steps[steps.index(pc) + 1]
    odd = lambda seq: seq | ('bbm' in MODE and 'bare' in MODE and BUG != 'bare-plain')

    if pc == 'publish': yield go(to, loc, published=s.published | {(i, pages)})
    elif pc == 'seq':
        seq = s.counter + 2
        yield go(to, (loc[:1] or (None,)) + (seq, 0), counter=seq)
    elif pc == 'zap':
        n = loc[2]
        if n == len(pages): yield from finish(s, kind, loc, go, to, {})
        elif rescans and not (s.slot and s.bits[s.slot - 1][bit_of(pages[n])]) and not any(x[0] == i for x in s.room):
            yield go('zap', put(loc, 2, n + 1))
        else: yield go('walk', loc)
    elif pc == 'walk':
        _, seq, n = loc
        if P[0] == 'B': yield go('cancel', (P[1], 0, ('walk', loc))) if BUG != 'pass-broken' else go('zap', put(loc, 2, n + 1))
        elif P[0] == 'T': yield go('below', loc + (P[1],))
        elif P[0] == 'E' and P[1] >= seq: yield go('zap', put(loc, 2, n + 1))
        else: yield go('put-above', loc + (P,))
    elif pc == 'put-above':
        old, loc = loc[-1], loc[:-1]
        if P != old: yield go('walk', loc)
        elif old[0] == 'E': yield go('zap', put(loc, 2, loc[2] + 1), P=('E', raised(old[1], loc[1])))
        elif len(pages) == 2 or 'bbm' in MODE:                  # with bbm it would be split by way of broken: see break.py
            yield go('zap', put(loc, 2, loc[2] + 1), P=('E', odd(loc[1])))
        else: yield go('walk', loc, P=('T', len(T)), T=T + (tuple(('L', f, P[2]) for f in P[1]),))
    elif pc == 'below':
        p, e = pages[loc[2]], T[loc[3]][pages[loc[2]]]
        if e[0] == 'F': yield go('walk', loc[:3])
        elif e[0] == 'E' and e[1] >= loc[1]: yield go('zap', put(loc[:3], 2, loc[2] + 1))
        else: yield go('put-below', loc + (e,))
    elif pc == 'put-below':
        table, e, p = loc[3], loc[4], pages[loc[2]]
        if T[table][p] != e: yield go('walk', loc[:3])
        elif e[0] == 'E':
            yield go('zap', put(loc[:3], 2, loc[2] + 1), T=entry(table, p, ('E', raised(e[1], loc[1]))))
        else: yield go('zap', put(loc[:3], 2, loc[2] + 1), T=entry(table, p, ('E', odd(loc[1]))))
    elif pc == 'unlink':
        whole = len(pages) == 2 and P[0] == 'T'
        if rescans and s.slot: whole = whole and all(s.bits[s.slot - 1][bit_of(p)] for p in BOTH)
        yield go('unlinked', loc + (P, s.counter + 2), counter=s.counter + 2) if whole else go(to, loc)
    elif pc == 'unlinked':
        to, old, loc = steps[steps.index('unlink') + 1], loc[3:], loc[:3]
        # All entries are empty: else it goes on with the first pass (only where nothing is published can that be).
        yield go(to, loc, P=('E', old[1])) if P == old[0] else go(to, loc)
    elif pc == 'flush':
        yield from finish(s, kind, loc, go, to, {'tlb': flushed(pages)})
    elif pc == 'change':
        if kind[:2] == 'on' or kind == 'again':
            new = 2 if kind != 'on' else 1
            yield from finish(s, kind, loc, go, to, {'slot': new, 'on': 1})
        else:
            value = int(kind[:4] == 'priv')
            n = loc[3] if len(loc) > 3 else 0                       # one by one
            attrs = put(s.attrs, pages[n], value)
            if n + 1 < len(pages): yield go(pc, (loc + (None,) * 3)[:3] + (n + 1,), attrs=attrs)
            else: yield go(to, loc[:3], attrs=attrs)
    elif pc == 'withdraw':
        yield from finish(s, kind, loc, go, to, {'published': frozenset(x for x in s.published if x[0] != i)})


def raised(found, seq):
    """The seq of an empty entry that had `found`."""
    return seq | (found & 1) if BUG != 'drop-odd' else seq


def finish(s, kind, loc, go, to, changes):
    """A step of a taker that may be its last."""
    if to != 'end': yield go(to, loc, **changes)
    elif kind[:4] == 'resc':
        armed = {p for p in BOTH if loc[0][p] is not None and loc[0][p] == s.clears[p]}
        yield go('end', armed=s.armed | armed, **changes)
    elif kind[:2] == 'on' or kind == 'again':
        slot = changes.get('slot', s.slot)
        armed = frozenset(p for p in BOTH if s.bits[slot - 1][bit_of(p)])
        yield go('end', **{**changes, 'on': 2, 'armed': armed})
    else: yield go('end', **changes)


CONFIGURATIONS = '''
mixed+around0+shared1 ison+recover+rescan0 huge+bbm+huge0+on+cpu huge+bbm+bare+huge0+on+cpu
arrived+bbm+look0+private0+cpu arrived+hole0+hole1+around0+private1 ro+write0+on ison+look0+on2+cpu
arrived+huge+bbm+bare+look0+on+cpu ison+look0+again+cpu mixed+recover+private0+look0 mixed+recover+shared1+cpu
bare+hole1+around0+fill1+on+cpu ison+hole0+hole1+around0+rescan1+cpu ison+protected+write0+rescan0+cpu
look0+fill0+on+cpu ison+bare+look0+rescan0+fill0+cpu bare+look0+fill0+on+cpu ison+look0+rescan0+fill0+cpu
arrived+hole0+recover+look0+on arrived+recover+private0+cpu arrived+bare+recover+on+cpu ison+rescan0+rescan+cpu
arrived+recover+on+cpu arrived+recover+private1+look1 isprivate+recover+shared1+huge0
ison+big+bare+recover+rescan+huge0 ison+bare+hole0+look0+rescan0+keep isprivate+huge+recover+shared0+private
ison+ro+bare+write0+rescan0+read0+fill0 arrived+huge+bbm+bare+look1+on+rescan0+cpu ison+big+recover+rescan+look0+cpu
arrived+recover+private+shared0 ison+empty+around0+rescan1+fill1 arrived+empty+huge0+private+shared1'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
