"""Explicit-state check of the dirty log by hardware: the leaf keeps W, and its D bit, or a CPU's
modification log, records a write.

One page. `leaf` is 'E' (empty) or (W, D); B is its bit; `log` says whether the slot logs; `entries`
has the CPUs whose modification log holds the page. `gen` moves on at each flush, and at each drain:
a CPU completes nothing that it began before. A leaf with W and D may be written at any time, and
is, and is cached; what is cached (`tlb`) may be written, too. `late`: written since it was reported
last.
CPU: (cpu: by D alone; pml, pml-exit: with a modification log, which the latter empties when it
    leaves the guest) walk -> pml: the page is logged -> D is set by compare-and-exchange, if `gen`
    has not moved.
Look: bit: the leaf is read -> D set: marked. pml: the logs are emptied -> `gen` moves on -> marked,
    if the slot logs.
Get: look -> the bit is taken -> D is cleared, if it was -> flush, if it was -> returned.
Copy, clear (get and clear in manual mode): only the look; the rest without the look.
Zap: leaf -> D set: the slot logs: marked -> the leaf is zapped, if it is the very value read -> D
    set: the slot logs: marked once more -> flush. Once more, since the same value may have come
    back: D cleared for the log, and set again.
Fault: empty, or a leaf without W: a leaf with W and D (bare: a prefault, with W alone) -> flags ->
    marked.
On, on-set: the log is published, with its bit clear or set -> on: D is cleared -> flush.
Wrong: a page of a slot that logs may be written through a cached translation, or through D, or was
written; and neither a bit, nor D (bit), nor an entry (pml) records it. Exceptions: a look has the
record, a thread that took the bit has not flushed yet, a fault has not marked yet, a zap has not
marked for the second time yet and there was a flush since the first, or the log is being set up.
Run: python3 dirty_bit.py [RULE]. Each of these breaks it: no-restart (a drain does not make CPUs
start over: one sets D after the drain and the clearing of D, before the flush), restart-first
(before the logs are emptied), log-late (a CPU logs after it sets D), clear-first (D is cleared,
then the bit taken), no-flush, clear-all (D is cleared even if the bit was not taken), mark-late
(zap: only after the leaf is zapped), mark-once (only before), blind-zap, flags-first (zap: the
flags are read before the leaf), fault-no-mark, publish-late, keep-dirty (enabling leaves D set).
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'leaf B log entries gen tlb late')
CONFIGURATIONS = '''
cpu+copy+clear off+empty+cpu+fault+on cpu+cpu+get off+dirty+cpu+on-set+clear+copy pml+copy+clear cpu+get+get
off+dirty+cpu+on+get cpu+get+zap off+empty+cpu+bare+on+get off+dirty+cpu+on+zap cpu+copy+clear+get
off+dirty+pml+on-set+clear+copy dirty+cpu+get+zap empty+cpu+bare+get+zap off+pml+copy+on off+dirty+pml+on+get
cpu+copy+clear+zap off+dirty+pml+on+zap protected+fault+get+zap pml-exit+copy+clear off+empty+pml+bare+on+get
cpu+clear+get+zap off+empty+cpu+fault+on+get cpu+cpu+get+get cpu+get+zap+fault pml+get+zap dirty+cpu+cpu+get+zap
protected+pml+fault+get+get protected+stale+pml+fault+get+get pml+pml+get protected+cpu+fault+get+get
empty+pml+bare+get+zap cpu+get+get+zap off+empty+pml+fault+on+get pml+copy+clear+zap pml+get+get
off+dirty+cpu+on+zap+get pml-exit+get+zap dirty+cpu+cpu+copy+clear+zap pml+copy+clear+get pml-exit+get+get
pml+get+zap+fault dirty+cpu+cpu+get+zap+fault off+pml+copy+on+get cpu+cpu+get+get+zap dirty+cpu+cpu+get+zap+zap
pml+pml+get+zap pml+pml+get+get pml+copy+clear+get+zap'''
START = 'off', 'dirty', 'empty', 'protected', 'stale'


def make(kinds):
    leaf = 'E' if 'empty' in kinds else (int('protected' not in kinds), int('dirty' in kinds or 'stale' in kinds))
    first = {'cpu': 'walk', 'pml': 'walk', 'get': 'look', 'copy': 'look', 'clear': 'take', 'zap': 'zap', 'fault': 'fault',
             'bare': 'fault', 'on': 'on'}
    is_pml = any(k[:3] == 'pml' for k in kinds)
    threads = tuple((k, first[k.split('-')[0]], (is_pml,)) for k in kinds if k not in START)
    return guest(Shared(leaf, 0, int('off' not in kinds), frozenset(), 0, 0, 0)), threads


def guest(s):
    """Writes and caches whatever may be written."""
    tlb = int(s.tlb or s.leaf == (1, 1))
    return s._replace(tlb=tlb, late=int(s.late or tlb))


def wrong(state):
    s, threads = state
    if not s.log or s.B or not s.late: return
    for kind, pc, loc in threads:
        if pc in ('restart', 'mark', 'clear-dirty', 'flush') and loc[1]: return
        if kind[:2] == 'on' and pc in ('clean', 'flush-all'): return
        if pc == 'zap-again' and s.gen != loc[2]: return
        if kind == 'fault' and pc in ('flags', 'mark-fault'): return
    is_pml = threads[0][2][0]
    record = s.entries if is_pml else s.leaf != 'E' and s.leaf[1]
    if not record: return 'written, and not recorded'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]
    is_pml = loc[0]

    def go(pc, *loc, **changes):
        return guest(s._replace(**changes)), threads[:i] + ((kind, pc, (is_pml,) + loc),) + threads[i + 1:]

    leaf = s.leaf
    is_dirty = leaf != 'E' and leaf[1]

    if pc == 'walk':
        if leaf == (1, 0) and kind != 'cpu' and BUG != 'log-late': yield go('append', s.gen)
        elif leaf == (1, 0): yield go('set', s.gen)
        else: yield go('exit' if kind == 'pml-exit' else 'end')
    elif pc == 'append': yield go('set', loc[1], entries=s.entries | {i})
    elif pc == 'set':
        if s.gen != loc[1] or leaf != (1, 0): yield go('walk')
        elif BUG == 'log-late' and kind != 'cpu': yield go('append-late', s.gen, leaf=(1, 1))
        else: yield go('exit' if kind == 'pml-exit' else 'end', leaf=(1, 1))
    elif pc == 'append-late': yield go('end', entries=s.entries | {i}) if s.gen == loc[1] else go('walk')
    elif pc == 'exit': yield go('mark', i in s.entries, entries=s.entries - {i})

    elif pc == 'look':
        if not is_pml: yield go('mark', bool(is_dirty)) if BUG != 'clear-first' else go('mark-early', bool(is_dirty))
        else: yield go('drain', gen=s.gen + (BUG == 'restart-first'))
    elif pc == 'drain':
        yield go('mark' if BUG in ('no-restart', 'restart-first') else 'restart', bool(s.entries), entries=frozenset())
    elif pc == 'restart': yield go('mark', *loc[1:], gen=s.gen + 1)
    elif pc == 'mark':
        to = 'take' if kind == 'get' else 'end' if kind != 'pml-exit' else 'walk' if loc[1] else 'end'
        yield go(to, B=1) if loc[1] and s.log else go(to)
    elif pc == 'mark-early': yield go('mark', loc[1], leaf=(leaf[0], 0) if is_dirty and loc[1] else leaf)
    elif pc == 'take':
        if not s.log: yield go('end')
        elif s.B or BUG == 'clear-all': yield go('clear-dirty', s.B, B=0)
        else: yield go('end')
    elif pc == 'clear-dirty':
        yield go('flush' if loc[1] else 'end', loc[1], leaf=(leaf[0], 0) if is_dirty and BUG != 'clear-first' else leaf)
    elif pc == 'flush':
        if BUG == 'no-flush': yield go('end', late=0)
        else: yield go('end', gen=s.gen + 1, tlb=0, late=0)

    elif pc == 'zap' and BUG == 'flags-first' and len(loc) == 1: yield go('zap', s.log)
    elif pc == 'zap':                                       # loc: leaf, `gen` then, flags
        if leaf == 'E': yield go('flush-zap')
        elif is_dirty and BUG != 'mark-late': yield go('zap-flags', leaf, s.gen, *loc[1:])
        else: yield go('exchange', leaf, s.gen)
    elif pc == 'zap-flags':
        logs = loc[3] if len(loc) > 3 else s.log
        yield go('exchange', *loc[1:3], B=1) if logs else go('exchange', *loc[1:3])
    elif pc == 'exchange':
        if leaf == loc[1] or BUG == 'blind-zap':
            yield go('zap-again' if loc[1][1] and BUG != 'mark-once' else 'flush-zap', *loc[1:], leaf='E')
        else: yield go('zap')
    elif pc == 'zap-again': yield go('flush-zap', B=1) if s.log else go('flush-zap')
    elif pc == 'flush-zap': yield go('end', gen=s.gen + 1, tlb=0)

    elif pc == 'fault':
        if leaf == 'E': yield go('end', leaf=(1, 0)) if kind == 'bare' else go('flags', leaf=(1, 1))
        elif leaf[0] or kind == 'bare': yield go('end')
        else: yield go('flags', leaf=(1, 1))
    elif pc == 'flags': yield go('mark-fault') if s.log and BUG != 'fault-no-mark' else go('end')
    elif pc == 'mark-fault': yield go('end', B=1)

    elif pc == 'on':
        if kind == 'on-set': yield go('end', log=1, B=1)
        elif BUG == 'publish-late' and len(loc) == 1: yield go('on', 'cleaned', leaf=(leaf[0], 0) if is_dirty else leaf)
        elif BUG == 'publish-late': yield go('flush-all', log=1, B=0)
        else: yield go('clean', log=1, B=0)
    elif pc == 'clean':
        yield go('flush-all', leaf=(leaf[0], 0) if is_dirty and BUG != 'keep-dirty' else leaf)
    elif pc == 'flush-all': yield go('end', gen=s.gen + 1, tlb=0, late=0)


if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
