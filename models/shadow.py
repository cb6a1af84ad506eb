"""Explicit-state check of shadow paging: no circle of locks, no waiting for another thread's write or
synchronization, and what the proofs leave out (roots that are not current, INVLPG beside changes
whose flush is to come, the end of a synchronization of a page that is used again). The proofs have
the rest (`proofs/shadow_*.py`). Four programs; the first kind names the program.

A guest thread is a vCPU's number and its operations, one after the other: e, E edits entry 0, 1 of
a table; f, F faults on it; i: INVLPG of entry 0; p: a page fault of the guest there; c: loads CR3
without bit 63; m, w: a write that is emulated. After an INVLPG, a page fault or a load of CR3 a
vCPU must not use what the guest's entry had only before (`floor`). CPUs cache at once whatever they
may cache, until it is flushed; of the versions of an entry they keep the oldest. A thread that
waits for a lock lets its holder run, and a circle is reported as "waits". A critical section is one
step if no thread touches its data without the lock.

sync: a guest table T of level 1, its entries g, the shadow entries s. x: a shadow leaf of T has W;
  w: as a CPU has cached it. `state`: U(nsync), Y (syncing), S(ynced). `bit`: T's page is on the
  bitmap of unsync ones. protect: write-protects for the host.
  Fault:   guest entry -> page lock, no writer, the entry as in the look -> shadow entry.
  INVLPG:  page lock, guest entry -> an entry that differs is zapped -> this CPU is flushed, in any
           case.
  Page fault (of the guest): page lock free? -> shadow entry, bitmap: as INVLPG, if an entry is
           there and T is on the bitmap -> this CPU, by the fault itself. Lock held: as INVLPG.
  Write:   lacks W: frame lock: on the bitmap -> U, seq moves on, W.
  CR3:     bitmap -> frame lock: Y, seq, W is cleared -> all CPUs are flushed, in any case -> page
           lock: entries are compared, those that differ are zapped -> frame lock: S, if still Y and
           the seq is the same -> this CPU.
  m:       (both: T is an upper table as well, and never has W) a writer more -> page lock: the
           entry is zapped -> store, one writer less.
link: R -> M -> P. P is T's shadow page, and is in use elsewhere: vCPU 1 faults there. R is vCPU 0's
  root, the other root has M.
  linkR, linkM: parent's lock; the parent is registered with the child -> unsync pages below, found
           by climbing, are compared -> link. Or it gives up once it is registered, and begins anew.
           unlinkR: the link is cleared, then the parent unregistered. zapR: dead -> as unlinkR.
  CR3 climbs from P; INVLPG walks down, lock by lock. Then, if the root is dead: the other one,
           which is synchronized, and the CPU is flushed. stale: with an old entry.
track: an upper table T, its pages (state, entry). small, huge: leaves of T, of the 2 MiB round it,
  have W. pending: a thread that removes a right counts itself before, until its flush is over. One
  guest leaf of 2 MiB is two translations: INVLPG drops one.
  track:   number of tables in the 2 MiB -> its lock: W is cleared -> frame lock: on the list, W is
           cleared -> flush, if W was set; if others are pending, another -> ready -> page lock, no
           writer: guest entry -> shadow entry. A thread that finds a page that is not ready goes on
           from there.
  zap:     frame lock: off the list, unlinked -> number -> page lock: the entry is zapped -> flush.
           protect, invlpg: remove W, flush.
  w:       on the list: a writer more -> pages -> page locks: entries are zapped -> flush -> store,
           one writer less.
  INVLPG:  flushes all, if pending.
zap: a page's record with a generation; faults reach it by `target` without a lock, hardware by
  `link`.
  fault:   target -> what is below -> the generation still? -> page lock, and still? -> entry. link:
           parent's lock, registered -> registered still? -> link. sync: generation -> .. -> still?
           -> synced. vcpu: alive, generation: pin -> runs.
  zap:     frame lock: off the list, dead, a pin of its own -> unlinked -> page lock: entries are
           zapped -> unpin -> flush. The last thread that unpins a dead page moves its generation
           on, flushes, and then frees the table. reuse: for another guest table.
Also wrong: a table that is synced or ready may be written without a record of it, or an entry of it
is stale; a table that is gone is used; a fault or a sync goes on in another table; a root is
another.

Run: python3 shadow.py [RULE]. Each of these breaks it.
sync: wait-for-writer (a fault waits for an emulated write), wait-for-syncing (a load of CR3 waits for
  another thread that synchronizes the page).
link: part-lock (not held all the time), walk-no-lock, keep-dead-root, root-not-synced.
track: insert-first, invlpg-local (one that zapped something), drop-no-lock, page-while-pending.
zap: end-sync-blindly.
Safe too, so no rule: to pin a dead root, since it is checked again before it is loaded; to flush
after the store of an emulated write, since INVLPG respects what is pending.
"""
from collections import namedtuple
from explore import BUG, main, put

Sync = namedtuple('Sync', 'g s x state seq bit writers tlb w floor locks')
Link = namedtuple('Link', 'g s state links parents dead root cache tlb floor locks')
Track = namedtuple('Track', 'g writers pages count small huge pending tables tlb w floor locks')
Zap = namedtuple('Zap', 'dead pins gen free key table listed target link s psc freed bad locks')
CPUS = 0, 1
NOTHING = (None, None), (None, None)
EMPTY = frozenset()


def oldest(*versions):
    return min((v for v in versions if v is not None), default=None)


def is_guest(kind):
    return kind[0] in '01'


class sync:
    """Leaf install, INVLPG and synchronization of one table."""
    start = {'protect': 'clear'}

    def make(kinds):
        synced = 'synced' in kinds
        x, state = int(not synced and 'both' not in kinds), 'S' if synced else 'U'
        return Sync((0, 0), (0, 0), x, state, 0, int(not synced), 0, NOTHING, (0, 0), ((0, 0),) * 2, EMPTY)

    def guest(s):
        return s._replace(tlb=tuple(tuple(map(oldest, t, s.s)) for t in s.tlb), w=tuple(w | s.x for w in s.w))

    def wrong(s, threads):
        for v, e in (0, 0), (0, 1), (1, 0), (1, 1):
            if oldest(s.tlb[v][e], s.floor[v][e]) < s.floor[v][e]: return f'CPU {v} uses an old entry after its flush'
        if s.state == 'S' and (s.x or any(s.w)): return 'a synchronized table may be written'
        if s.state == 'S' and any(a not in (None, b) for a, b in zip(s.s, s.g)): return 'a synchronized table is stale'

    def step(s, i, kind, pc, loc, go, after):
        v, e, op = kind[0] == '1', int(pc[0] in 'EF'), kind[1 + loc[0]] if loc else None
        flushed = {'w': (0, 0), 'tlb': NOTHING}
        if kind == 'protect':
            if pc == 'clear': yield go('flush', take='F', release='F', x=0)
            elif pc == 'flush': yield go('end', **flushed)
        elif pc in 'eE':
            if s.w[v]: yield after(g=put(s.g, e, s.g[e] + 1))
            if not s.x: yield go('unsync', loc)
        elif pc == 'unsync':
            yield go('set-W', loc, take='F', bit=1)
        elif pc == 'set-W': yield go(op, loc, release='F', state='U', seq=s.seq + (s.state != 'U'), x=1)
        elif pc in 'fF': yield go(pc + '-lock', loc + (s.g[e],))
        elif pc[1:] == '-lock':
            if s.writers and BUG == 'wait-for-writer': yield go(pc, loc, take='P', release='P')
            elif s.writers: yield after(take='P', release='P')     # the guest retries
            elif s.g[e] == loc[1]: yield go(pc[0] + '-set', loc, take='P')
            else: yield go(pc[0], loc[:1], take='P', release='P')
        elif pc[1:] == '-set': yield after(release='P', s=put(s.s, e, loc[1]))

        elif pc == 'm':
            yield go('m-drop', loc, writers=s.writers + 1)
        elif pc == 'm-drop': yield go('m-store', loc, take='P', release='P', s=put(s.s, 0, None))
        elif pc == 'm-store': yield after(g=put(s.g, 0, s.g[0] + 1), writers=s.writers - 1)

        elif pc == 'i': yield go('i-read', loc + (s.g[0],))
        elif pc == 'p':                                                 # a page fault; loc: op, what must be seen
            held = any(name == 'P' for name, _ in s.locks)
            yield go('i-read' if held else 'p-entry', loc + (s.g[0],))
        elif pc == 'p-entry':
            if s.s[0] is None: yield go('i-flush', loc)
            else: yield go('i-read' if s.bit else 'i-flush', loc)
        elif pc == 'i-read': yield go('i-drop', loc + (s.g[0],), take='P')
        elif pc == 'i-drop':                                            # loc: op, what must be seen, guest entry
            same = s.s[0] == loc[2]
            yield go('i-flush', loc, release='P', s=s.s if same else put(s.s, 0, None))
        elif pc == 'i-flush':
            yield after(floor=put(s.floor, v, put(s.floor[v], 0, loc[1])),
                        tlb=put(s.tlb, v, put(s.tlb[v], 0, None)))

        elif pc == 'c':
            yield go('clear' if s.bit else 'local', loc + (s.g,))
        elif pc == 'clear':                                             # loc: op, must be seen, seq
            if s.state == 'S': yield go('local', loc, take='F', release='F')
            elif s.state == 'Y' and BUG == 'wait-for-syncing': yield go(pc, loc)
            else: yield go('flush', loc + (s.seq,), take='F', release='F', state='Y', x=0)
        elif pc == 'flush': yield go('compare0', loc, **flushed)
        elif pc in ('compare0', 'compare1', 'drop0', 'drop1'):
            n = int(pc[-1])
            to = ('compare1', 'synced')[n]
            if pc[0] == 'd': yield go(to, loc, s=put(s.s, n, None))
            elif s.s[n] in (None, s.g[n]): yield go(to, loc, take=None if n else 'P')
            else: yield go(f'drop{n}', loc, take=None if n else 'P')
        elif pc == 'synced':
            done = s.state == 'Y' and s.seq == loc[2]
            yield go('local', loc, take='F', release='F P', **{'state': 'S', 'bit': 0} if done else {})
        elif pc == 'local':
            yield after(floor=put(s.floor, v, tuple(map(max, s.floor[v], loc[1]))),
                        tlb=put(s.tlb, v, (None, None)), w=put(s.w, v, 0))


class link:
    """A page is linked while another vCPU flushes."""
    start = {'linkR': 'lock', 'linkM': 'lock', 'unlinkR': 'lock', 'zapR': 'die'}

    def make(kinds):
        links = int('haveR' in kinds), int('haveM' in kinds), 1
        state = 'S' if 'synced' in kinds else 'Y' if 'syncing' in kinds else 'U'
        stale = int('stale' in kinds)           # an edit that vCPU 0 has flushed already
        return Link(stale, 0, state, links, links, 0, 0, (0, 0), None, stale, EMPTY)

    def guest(s):
        first = s.cache[0] | (s.links[0], 0, s.links[2])[s.root]
        second = s.cache[1] | first & s.links[1]
        return s._replace(cache=(first, second), tlb=oldest(s.tlb, s.s if second else None))

    def wrong(s, threads):
        if s.tlb is not None and s.tlb < s.floor: return 'CPU 0 uses an old entry after its flush'

    def step(s, i, kind, pc, loc, go, after):
        unsync = s.state != 'S'
        if kind[-1] in 'RM' and kind[:-1] == 'link':
            n = int(kind == 'linkM')            # which link, and of which child's parents
            order = ['register', 'bits', 'link']
            if pc == 'lock': yield go(order[0], take=kind[-1])
            elif pc in ('register', 'link', 'synced'):
                at = order.index('bits' if pc == 'synced' else pc) + 1
                changes = {'links': put(s.links, n, 1)} if pc == 'link' else {}
                if pc == 'register': changes = {'parents': put(s.parents, n, 1)}
                release = kind[-1] if at == len(order) or BUG == 'part-lock' and pc == 'register' else None
                take = kind[-1] if BUG == 'part-lock' and pc == 'link' else None
                if at == len(order): yield go('end', release=release, take=take, **changes)
                else: yield go(order[at], release=release, **changes)
            elif pc == 'bits':
                yield go(('climb', 'compare')[n] if unsync else 'synced')
                # A lock is held: the fault gives up, stays registered, and the guest comes back.
                if BUG != 'part-lock': yield go('again', release=kind[-1])
            elif pc == 'again': yield go('bits-again', take=kind[-1], parents=put(s.parents, n, 1))
            elif pc == 'bits-again': yield go(('climb', 'compare')[n] if unsync else 'synced')
            elif pc == 'climb': yield go('compare' if s.parents[1] else 'synced')
            elif pc == 'compare': yield go('fix', (s.g,), take='P')
            elif pc == 'fix': yield go('synced', release='P', s=s.s if s.s == loc[0] else None)
        elif kind == 'unlinkR':
            if pc == 'lock': yield go('unlink', take='R')
            elif pc == 'unlink': yield go('unregister', links=put(s.links, 0, 0))
            elif pc == 'unregister': yield go('flush', release='R', parents=put(s.parents, 0, 0))
            elif pc == 'flush': yield go('end', cache=(0, 0), tlb=None)
        elif pc == 'die': yield go('unlink', dead=1)
        elif pc == 'unlink': yield go('flush', links=put(s.links, 0, 0), parents=put(s.parents, 0, 0))
        elif pc == 'flush': yield go('end', cache=(0, 0), tlb=None)
        elif pc == 'e': yield after(g=s.g + 1) if s.state != 'S' else go('unsync', loc)
        elif pc == 'unsync': yield go('e', loc, state='U')
        elif pc == 'f': yield go('f-lock', loc + (s.g,))
        elif pc == 'f-lock':
            if s.g == loc[1]: yield go('f-set', loc, take='P')
            else: yield go('f', loc[:1], take='P', release='P')
        elif pc == 'f-set': yield after(release='P', s=loc[1])
        # vCPU 0 flushes. loc: op, what must be seen, guest entry
        elif pc == 'c': yield go('bits', loc + (s.g,))
        elif pc == 'bits': yield go('climb' if s.state != 'S' else 'local', loc)
        elif pc == 'climb': yield go('climb-on' if s.parents[1] else 'local', loc)
        elif pc == 'climb-on':
            below = s.parents[2] if s.root else s.parents[0] and not s.dead
            yield go('compare' if below else 'local', loc)
        elif pc == 'i': yield go('walk-R', loc + (s.g,))
        elif pc in ('walk-R', 'walk-M'):
            lock = {} if BUG == 'walk-no-lock' else {'take': pc[-1], 'release': pc[-1]}
            here = s.links[1] if pc == 'walk-M' else s.links[2] if s.root else s.links[0] and not s.dead
            yield go(('walk-M' if pc == 'walk-R' else 'compare') if here else 'local', loc, **lock)
        elif pc == 'compare': yield go('fix', loc + (s.g,), take='P')
        elif pc == 'fix': yield go('local', loc[:2], release='P', s=s.s if s.s == loc[2] else None)
        elif pc == 'local':                                     # before it goes on: is its root alive?
            if not s.dead or s.root or BUG == 'keep-dead-root': yield go('enter', loc, cache=(0, 0), tlb=None)
            else: yield go('enter' if BUG == 'root-not-synced' else 'bits', loc, root=1, cache=(0, 0), tlb=None)
        elif pc == 'enter': yield after(root=2 * (s.root > 0), floor=max(s.floor, loc[1]))


class track:
    """Write tracking of an upper table, and the flushes that may be skipped."""
    taking = 'count', 'leaf', 'flush', 'settle', 'end'
    tracking = (('insert', 'number', 'huge') if BUG == 'insert-first' else ('number', 'huge', 'insert')) + ('cover',)
    start = {'track': tracking[0], 'protect': taking[0], 'invlpg': taking[0], 'zap': 'count', 'small': 'small',
             'big': 'big'}

    def make(kinds):
        old = ('ready', 0) if 'tracked' in kinds else (None, None)
        small, huge = int('small-W' in kinds), int('huge-W' in kinds)
        return Track(0, 0, (old, (None, None)), int('tracked' in kinds), small, huge, 0, (EMPTY,) * 2, NOTHING, (0, 0),
                     (0, 0), EMPTY)

    def guest(s):
        linked = {p for p in (0, 1) if s.pages[p][0] == 'ready'}
        tables = tuple(t | linked for t in s.tables)
        reached = [[s.pages[p][1] for p in t] for t in tables]
        tlb = tuple(tuple(oldest(t, *reached[v]) for t in s.tlb[v]) for v in CPUS)
        return s._replace(tables=tables, tlb=tlb, w=tuple(w | s.small | s.huge for w in s.w))

    def wrong(s, threads):
        for v in CPUS:
            if oldest(*s.tlb[v], s.floor[v]) < s.floor[v]: return f'CPU {v} uses an old entry after its flush'
        if s.count < 0: return 'fewer than no tables'
        for state, e in s.pages:
            if state == 'ready' and (s.small or s.huge or any(s.w)): return 'a tracked table may be written'
            if state == 'ready' and e not in (None, s.g): return 'a tracked table is stale'

    def step(s, i, kind, pc, loc, go, after):
        v = int(kind[0] == '1')
        listed = tuple(p for p in (0, 1) if s.pages[p][0] in ('new', 'ready'))
        flushed = {'tables': (EMPTY,) * 2, 'tlb': NOTHING, 'w': (0, 0)}

        def page(p, state, e): return put(s.pages, p, (state, e))

        if kind == 'small': yield go('end', take='F', release='F', small=int(s.small or not listed))
        elif kind == 'big' and pc == 'big': yield go('big-set', (s.count,), take='F2')
        elif kind == 'big': yield go('end', release='F2', huge=int(s.huge or not loc[0]))
        elif kind in ('protect', 'invlpg'):
            to = track.taking[track.taking.index(pc) + 1]
            if pc == 'count': yield go(to, pending=s.pending + 1)
            elif pc == 'leaf': yield go(to, take='F', release='F', small=0)
            elif pc == 'settle': yield go(to, pending=s.pending - 1)
            elif kind == 'invlpg' and BUG == 'invlpg-local': yield go(to, w=(0, s.w[1]))
            else: yield go(to, **flushed)

        elif kind == 'track':           # loc: whether a flush is due, page, whether to release the number
            must_flush, p, back = (loc + (0, None, 0))[:3]
            counted = {'pending': s.pending + 1}
            to = track.tracking[track.tracking.index(pc) + 1] if pc in track.tracking[:-1] else None
            if pc == 'number': yield go(to, (must_flush, p, back), count=s.count + 1)
            elif pc == 'huge':
                if not s.huge: yield go(to, (must_flush, p, back), take='F2', release='F2')
                elif not must_flush: yield go('huge-clear', (1, p, back), take='F2', **counted)
                else: yield go('huge-clear', loc, take='F2')
            elif pc == 'huge-clear': yield go(track.tracking[track.tracking.index('huge') + 1], loc, release='F2', huge=0)
            elif pc == 'insert':
                if listed and s.pages[listed[0]][0] == 'ready':
                    yield go('flush' if must_flush else 'release-number', (must_flush, listed[0], 1), take='F', release='F')
                elif s.small and not must_flush: yield go('insert-on', (1, p, back), take='F', **counted)
                else: yield go('insert-on', (must_flush, p, back), take='F')
            elif pc == 'insert-on':
                change = {'release': 'F', 'small': 0}
                free = [p for p in (0, 1) if s.pages[p][0] is None]
                to = track.tracking[track.tracking.index('insert') + 1]
                if listed: yield go(to, (must_flush, listed[0], 1), **change)
                elif not free: yield go('flush' if must_flush else 'release-number', (must_flush, None, 1), **change)
                else: yield go(to, (must_flush, free[0], back), pages=page(free[0], 'new', None), **change)
            elif pc == 'cover': yield go('flush' if must_flush else 'covered', loc)
            elif pc == 'flush': yield go('settle', loc, **flushed)
            elif pc == 'settle': yield go('covered', loc, pending=s.pending - 1)
            elif pc == 'covered':
                if p is None: yield go('release-number', loc)
                else: yield go('flush-too' if s.pending else 'ready', loc)
            elif pc == 'flush-too': yield go('ready', loc, **flushed)
            elif pc == 'ready':
                new = page(p, 'ready', s.pages[p][1]) if s.pages[p][0] == 'new' else s.pages
                to = 'release-number' if back else 'make'
                yield go(to, loc, pages=new)
            elif pc == 'release-number': yield go('end' if p is None else 'make', loc, count=s.count - 1)
            elif pc == 'make':
                alive = s.pages[p][0] == 'ready'
                if alive and not s.writers: yield go('set', (p, s.g), take=f'P{p}')
                else: yield go('end', take=f'P{p}', release=f'P{p}')
            elif pc == 'set': yield go('end', release=f'P{loc[0]}', pages=page(loc[0], s.pages[loc[0]][0], loc[1]))

        elif kind == 'zap':                                     # loc: page
            if pc == 'count': yield go('dead', pending=s.pending + 1)
            elif pc == 'dead':
                if not listed: yield go('settle')
                else:
                    yield go('last', listed, take='F', release='F', pages=page(listed[0], 'dead', s.pages[listed[0]][1]))
            elif pc == 'last': yield go('zap-drop', loc, count=s.count - 1)
            elif pc == 'zap-drop':
                yield go('flush', take=f'P{loc[0]}', release=f'P{loc[0]}', pages=page(loc[0], 'dead', None))
            elif pc == 'flush': yield go('settle', **flushed)
            elif pc == 'settle': yield go('end', pending=s.pending - 1)

        elif pc == 'w':
            if s.w[v]: yield after(g=s.g + 1)
            if listed: yield go('begin', loc)
            elif not s.w[v]: yield go('w', loc, take='F', release='F', small=1)
        elif pc == 'begin':                                     # loc: op, pages
            yield go('list', loc, take='F', release='F', writers=s.writers + 1)
        elif pc == 'list': yield go('count' if listed else 'store', loc + (listed,), take='F', release='F')
        elif pc == 'count': yield go('drop', loc, pending=s.pending + 1)
        elif pc == 'drop':
            rest = loc[1]
            if not rest: yield go('flush', loc)
            else:
                lock = {} if BUG == 'drop-no-lock' else {'take': f'P{rest[0]}', 'release': f'P{rest[0]}'}
                yield go('drop', (loc[0], rest[1:]), pages=page(rest[0], s.pages[rest[0]][0], None), **lock)
        elif pc == 'flush': yield go('settle', loc, **flushed)
        elif pc == 'settle': yield go('store', loc, pending=s.pending - 1)
        elif pc == 'store':
            yield after(take='F', release='F', g=s.g + 1, writers=s.writers - 1)
        elif pc == 'i': yield go('local', loc + (s.g,))
        elif pc == 'local': yield go('invlpg', loc + (s.pending if BUG != 'page-while-pending' else 0,))
        elif pc == 'invlpg':
            tlb = (None, None if loc[2] else s.tlb[v][1])
            floor = put(s.floor, v, max(s.floor[v], loc[1]))
            yield after(floor=floor, tlb=put(s.tlb, v, tlb), tables=put(s.tables, v, EMPTY))


class zap:
    """A page is zapped, while other threads walk to it, link it, run on it."""
    start = {'fault': 'look', 'link': 'lock', 'zap': 'die', 'vcpu': 'pin', 'reuse': 'reuse', 'sync': 'sync'}

    def make(kinds):
        linked = 'link' not in kinds
        return Zap(0, 0, 0, 0, 'A', 0, 1, 0 if linked else None, 0 if linked else None, None, EMPTY, EMPTY, 0, EMPTY)

    def guest(s):
        return s if s.link is None else s._replace(psc=s.psc | {s.link})

    def wrong(s, threads):
        if s.psc & s.freed: return 'a CPU walks a freed table'
        if s.bad: return s.bad
        if s.free and s.s: return 'an entry is left in a page that is gone'
        for kind, pc, loc in threads:
            if kind == 'vcpu' and pc == 'leave' and loc[0] in s.freed: return 'a CPU runs on a freed table'

    def step(s, i, kind, pc, loc, go, after):
        def alive(gen): return s.gen == gen and not s.dead

        def bad(what, so=True): return s.bad or so and what

        if pc == 'look': yield go('end') if s.target is None else go('below', (s.target,))
        elif pc == 'below': yield go('check', loc + (s.key,))
        elif pc == 'check': yield go('page', loc) if alive(loc[0]) else go('end')
        elif pc == 'page':
            wrong = loc[1] != 'A' and 'a fault goes on in another table'
            if not alive(loc[0]): yield go('end', take='X', release='X', bad=s.bad or wrong)
            else: yield go('set', loc, take='X', bad=s.bad or wrong)
        elif pc == 'set':
            freed = s.table in s.freed and 'an entry is made in a freed table'
            yield go('end', release='X', s=1, bad=bad(freed or 'an entry is made elsewhere', freed or s.key != 'A'))
        elif pc == 'lock':                                              # the parent's; registered under F
            if alive(0) and s.listed: yield go('write', take='R', target=0)
            else: yield go('end')
        elif pc == 'write':
            if s.target is None: yield go('end', take='F', release='F R')
            else: yield go('end', take='F', release='F R', link=s.table)
        elif pc == 'sync': yield go('flush-all', (s.gen,)) if alive(s.gen) and s.key == 'A' else go('end')
        elif pc == 'flush-all': yield go('synced', loc)
        elif pc == 'synced':
            done = alive(loc[0]) or BUG == 'end-sync-blindly'
            yield go('end', bad=bad('another table is called synchronized', done and s.key != 'A'), take='F', release='F')
        elif pc == 'reuse':
            if not s.free: yield go('end')
            else: yield go('end', free=0, dead=0, key='B', table=s.table + 1, listed=1)

        elif pc == 'die':
            if not s.listed or s.key != 'A': yield go('end')
            else: yield go('unlink', (s.table,), take='F', dead=1, pins=s.pins + 1, listed=0)
        elif pc == 'unlink':
            yield go('drop', loc, release='F', target=None, link=None)
        elif pc == 'drop':
            yield go('unpin', loc, s=None, take='X', release='X',
                     bad=bad('entries are dropped from a freed table', loc[0] in s.freed))
        elif pc == 'pin':
            if s.dead or s.gen != 0: yield go('end')
            else: yield go('run', pins=s.pins + 1)
        elif pc == 'run':
            yield go('leave', (s.table,), psc=s.psc | {s.table}, bad=bad('a CPU runs on another root', s.key != 'A'))
        elif pc == 'leave': yield go('unpin', loc)
        elif pc == 'unpin':
            pins = s.pins - 1
            if s.dead and not pins and not s.free:
                yield go('flush', loc + (1,), pins=0, gen=s.gen + 1, free=1)
            else: yield go('flush' if kind == 'zap' else 'end', loc, pins=pins)
        elif pc == 'flush':
            running = {l[0] for k, p, l in go.threads if k == 'vcpu' and p == 'leave'}
            to = 'free' if len(loc) == 2 else 'end'
            yield go(to, loc, psc=frozenset(running))
        elif pc == 'free':
            yield go('end', loc, freed=s.freed | {loc[0]},
                     bad=bad('a table is freed twice', loc[0] in s.freed))


PROGRAM = []


def make(kinds):
    program = globals()[kinds[0]]
    PROGRAM[:] = [program]
    threads = tuple((k, k[1] if is_guest(k) else program.start[k], (0,) if is_guest(k) else ())
                    for k in kinds[1:] if is_guest(k) or k in program.start)
    return program.guest(program.make(kinds)), threads


def wrong(state):
    return PROGRAM[0].wrong(*state)


def step(state, i, waiting=()):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, loc=(), take=None, release=None, **changes):
        """The state after a step; or the thread that holds the lock that it takes."""
        locks = s.locks
        for name, holder in locks:
            if name == take: return holder
        if take: locks = locks | {(take, i)}
        if release: locks = locks - {(name, i) for name in release.split()}
        new = PROGRAM[0].guest(s._replace(locks=locks, **changes))
        return new, threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    def after(**changes):
        """Goes to the next operation of a vCPU."""
        n = loc[0] + 1
        return go(kind[1 + n], (n,), **changes) if 1 + n < len(kind) else go('end', **changes)

    go.threads = threads
    for new in PROGRAM[0].step(s, i, kind, pc, loc, go, after):
        if not isinstance(new, int): yield new
        elif new != i and new not in waiting: yield from step(state, new, waiting + (i,))


CONFIGURATIONS = '''
track+small-W+protect+track+small track+small-W+invlpg+track track+huge-W+track+0wi track+track+big+0wi
track+tracked+track+0wi+1i track+tracked+zap+0wi track+tracked+zap+big+track track+track+big+small+0w
track+tracked+track+0w+1wi track+tracked+zap+0w+1wi zap+fault+zap+reuse zap+fault+fault+zap+reuse zap+link+zap
zap+link+fault+zap+reuse zap+vcpu+zap+reuse zap+sync+zap+reuse zap+vcpu+vcpu+zap+reuse zap+vcpu+fault+zap+reuse
zap+vcpu+zap+zap zap+link+fault+vcpu+zap+reuse sync+0ei+1f sync+0ei+1fi sync+0ec+1f sync+synced+0ec+1f sync+0ec+1c
sync+synced+0ec+1c+protect sync+0ec+1ec sync+0eEc+1fF sync+synced+0ec+1ec sync+0ecec+1c sync+0ecei+1c+protect
sync+0ec+1ei sync+0efc+1Ec sync+both+0mc+1f sync+both+0m+1ec sync+both+0mi+1fc sync+both+0mc+1ci
sync+synced+0ecei+1fcfi link+linkR+haveM+0ei link+linkR+haveM+0ec link+linkR+linkM+0ei+1f link+synced+linkR+haveM+0ec
link+synced+linkR+linkM+0ei+1f link+syncing+stale+linkR+haveM+0f link+haveR+haveM+unlinkR+linkR+0ec
link+haveR+haveM+unlinkR+linkR+0ei+1f link+haveR+linkM+0ec+1f link+haveR+haveM+zapR+0ec link+haveR+haveM+zapR+0eci+1f
link+linkR+linkM+0ec+1f track+tracked+zap+track+0wi track+small-W+track+track+0wi track+track+track+huge-W+0w
zap+vcpu+fault+sync+zap+zap+reuse track+small-W+protect+track+invlpg+0w sync+0ecfi+1fEci+protect
track+track+track+small+0wi link+linkR+linkM+unlinkR+0ec+1f link+linkR+linkM+zapR+0ec+1f sync+0ep+1f sync+0epe+1fc
sync+0eiep+1f'''

if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
