"""Explicit-state check of the places that hold the published ranges, of how faults read them, and
of why torn reads are safe.

One page, number 1, with one entry: ('E', seq) or ('L', frame). A chunk is (claimed, active, start,
end): one place each.
Invalidators, by their range: '12' is [1, 2), the page; '02' and '13' contain it, '01' and '23' do
    not. Claim the first free place (behind the last chunk another is linked) -> store start ->
    store end -> set the active bit -> take a seq -> write the seq to the page's entry, or zap it,
    if it is in the range -> the host moves the page -> withdraw: clear both bits at once.
Fault: read the entry -> of each chunk: its word; if active: start; end; the page is inside: end ->
    next chunk -> resolve -> exchange if the entry is empty with the very seq of the look.
Wrong: a leaf of a frame that is gone. When all have ended: a place that is still claimed or active.
Torn reads (start of one range, end of another's) do occur: 'see-torn' reports it as wrong when one
hides the page from a fault while a range over it is published. The first range is over then, and
the seq of the second one fails the fault.
Run: python3 published.py [BUG]. Each of these breaks it: number-before-fill, blind-claim (two may
have the same place), check-before-read, withdraw-early (before the host has moved the page),
withdraw-claim-first (the two bits one after the other: the second may be the next owner's),
withdraw-keeps-claim, withdraw-keeps-active, first-chunk-only.
Safe too, so no rule: bit-before-fill (only the order before the seq matters), end-first (stored
so).
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'entry counter chunks frame torn')
FREE = (0, 0, 0, 0)
PAGE = 1


def make(kinds):
    return Shared(('E', 0), 0, (FREE,), 0, False), tuple(
        (kind, 'look' if kind == 'fault' else 'claim', () if kind == 'fault' else (0,)) for kind in kinds)


def wrong(state):
    s, threads = state
    if s.entry[0] == 'L' and s.entry[1] != s.frame: return 'leaf of a frame that is gone'
    if all(t[1] == 'end' for t in threads) and any(chunk[0] or chunk[1] for chunk in s.chunks):
        return 'place is not released'
    if s.torn and BUG == 'see-torn': return 'torn read hides the page'


STEPS = {'number-before-fill': ('seq', 'fill-start', 'fill-end', 'activate'),
         'bit-before-fill': ('activate', 'fill-start', 'fill-end', 'seq'),
         'end-first': ('fill-end', 'fill-start', 'activate', 'seq'),
         }.get(BUG, ('fill-start', 'fill-end', 'activate', 'seq'))


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    def chunk(n, **fields):
        new = [fields.get(name, old) for name, old in zip(('claimed', 'active', 'start', 'end'), s.chunks[n])]
        return s.chunks[:n] + (tuple(new),) + s.chunks[n + 1:]

    e = s.entry
    if kind == 'fault':                                     # loc: seq, chunk, start
        if pc == 'look' and BUG == 'check-before-read' and not loc: yield go('word', (None, 0))
        elif pc == 'look': yield go('end') if e[0] == 'L' else go('resolve' if loc else 'word', (e[1], 0))
        elif pc == 'word':
            if s.chunks[loc[1]][1]: yield go('read-start', loc)
            else: yield go('next', loc)
        elif pc == 'read-start': yield go('read-end', loc + (s.chunks[loc[1]][2],))
        elif pc == 'read-end':
            now = s.chunks[loc[1]]
            if loc[2] <= PAGE < now[3]: yield go('end')
            else: yield go('next', loc[:2], torn=s.torn or bool(now[1]) and now[2] <= PAGE < now[3])
        elif pc == 'next':
            last = loc[1] + 1 == len(s.chunks) or BUG == 'first-chunk-only'
            if not last: yield go('word', (loc[0], loc[1] + 1))
            elif BUG == 'check-before-read': yield go('look', ('looked',))
            else: yield go('resolve', loc)
        elif pc == 'resolve': yield go('act', (loc[0], s.frame))
        else: yield go('end', entry=('L', loc[1]) if e == ('E', loc[0]) else e)
        return

    start, end = int(kind[0]), int(kind[1])
    if pc == 'claim':                                       # loc: chunk
        n = loc[0]
        if n == len(s.chunks): yield go('claim', loc, chunks=s.chunks + (FREE,))
        elif s.chunks[n][0]: yield go('claim', (n + 1,))
        elif BUG == 'blind-claim': yield go('claim-blindly', loc)
        else: yield go(STEPS[0], loc, chunks=chunk(n, claimed=1))
    elif pc == 'claim-blindly': yield go(STEPS[0], loc, chunks=chunk(loc[0], claimed=1))
    elif pc in STEPS:
        to = (STEPS + ('visit',))[STEPS.index(pc) + 1]
        if pc == 'fill-start': yield go(to, loc, chunks=chunk(loc[0], start=start))
        elif pc == 'fill-end': yield go(to, loc, chunks=chunk(loc[0], end=end))
        elif pc == 'activate': yield go(to, loc, chunks=chunk(loc[0], active=1))
        elif not start <= PAGE < end: yield go(to, loc + (0,))          # its seq does not concern the page
        else: yield go(to, loc + (s.counter + 1,), counter=s.counter + 1)
    elif pc == 'visit':                                     # loc: chunk, seq
        if not start <= PAGE < end: yield go('withdraw', loc)
        elif e[0] == 'E' and e[1] >= loc[1]: yield go('host', loc)
        else: yield go('zap', loc + (e,))
    elif pc == 'zap': yield go('host', loc[:2], entry=('E', loc[1])) if e == loc[2] else go('visit', loc[:2])
    elif pc == 'host':
        if BUG == 'withdraw-early' and len(loc) == 2: yield go('withdraw', loc + (True,))
        else: yield go('end' if BUG == 'withdraw-early' else 'withdraw', loc, frame=s.frame + 1)
    elif pc == 'withdraw':
        kept = {'withdraw-keeps-claim': {'active': 0}, 'withdraw-keeps-active': {'claimed': 0},
                'withdraw-claim-first': {'claimed': 0}}.get(BUG, {'claimed': 0, 'active': 0})
        to = 'deactivate' if BUG == 'withdraw-claim-first' else 'host' if len(loc) == 3 else 'end'
        yield go(to, loc, chunks=chunk(loc[0], **kept))
    elif pc == 'deactivate': yield go('end', chunks=chunk(loc[0], active=0))


if __name__ == "__main__":
    main((('fault', '12'), ('fault', '12', '12'), ('fault', 'fault', '02', '23'), ('fault', 'fault', '12', '13'),
          ('fault', '01', '02', '23')), make, step, wrong)
