"""The program `second` of `shadow.py`. That module describes it with its rules, and runs it."""
from collections import namedtuple
from explore import BUG

Second = namedtuple('Second', 'ss seq open huge frame gone published dirty s big records tlb w late bad locks')
EMPTY = frozenset()


class second:
    """Second-stage leaf and shadow leaves of a page: harvest, invalidation, fill."""
    start = {'write': 'look', 'read': 'record', 'read2': 'lock2', 'mark': 'record', 'harvest': 'take', 'lazy': 'take',
             'zap': 'publish', 'split': 'split', 'push': 'push'}

    def make(kinds):
        ss = None if 'hole' in kinds else (0, int('ro' not in kinds))
        dirty = int('ro' not in kinds and 'hole' not in kinds)
        return Second(ss, 0, 1, int('huge' in kinds), 0, 0, 0, dirty, None, None,
                      int('record' in kinds), EMPTY, 0, 0, 0, EMPTY)

    def guest(s):
        leaves = [leaf for leaf in (s.s, s.big) if leaf]
        w = s.w | any(leaf[1] for leaf in leaves)
        return s._replace(tlb=s.tlb | {leaf[0] for leaf in leaves}, w=int(w), late=int(s.late or w))

    def wrong(s, threads):
        if any(f < s.gone for f in s.tlb): return 'a CPU uses a frame that is gone'
        if s.bad: return 'the engine uses a frame that is gone'
        if (s.w or s.late) and not s.dirty:
            for kind, pc, loc in threads:
                if kind == 'write' and pc in ('open', 'mark'): break
                if kind in ('harvest', 'lazy') and pc not in ('take', 'end'): break
            else: return 'a page may be written and is not marked'

    def step(s, i, kind, pc, loc, go, after):
        ss = s.ss
        if pc == 'look':
            if ss is None: yield go('published', (s.seq,))
            elif not s.open: yield go('restore', (ss, False))
            else: yield go('record', (ss,)) if ss[1] else go('restore', (ss, True))
        elif pc == 'published': yield go('end') if s.published else go('resolve', loc)
        elif pc == 'resolve': yield go('fill', loc + (s.frame,))
        elif pc == 'fill': yield go('mark', ss=(loc[1], 1)) if ss is None and s.seq == loc[0] else go('look')
        elif pc == 'restore':
            if ss != loc[0]: yield go('look')
            else: yield go('mark' if loc[1] else 'open', ss=(ss[0], 1))
        elif pc == 'open': yield go('mark', open=1)
        elif pc == 'mark' and kind == 'write': yield go('record', dirty=1)
        # The shadow leaf. loc: what is seen of the second stage.
        elif pc == 'record':
            blind = BUG == 'no-second-reread' and kind == 'write'
            if BUG == 'create-late': yield go('lock', ('late',))
            elif blind: yield go('lock', (ss,), records=1)
            else: yield go('lock', records=1)
        elif pc == 'lock':
            if kind == 'mark': yield go('store', take='F')
            elif BUG == 'no-second-reread' and kind == 'write': yield go('set', loc + (s.open,), take='F')
            elif BUG == 'create-late': yield go('create', (ss, s.open))
            elif BUG == 'leaf-first': yield go('table', (ss,), take='F')
            else: yield go('leaf', (s.open,), take='F')
        elif pc == 'create': yield go('set', loc, take='F', records=1)
        elif pc == 'table': yield go('set', loc + (s.open,))
        elif pc == 'leaf': yield go('set', (ss,) + loc)
        elif pc == 'set':
            leaf = loc[0] and (loc[0][0], loc[0][1] & loc[1])
            yield go('end', release='F', s=leaf or s.s)
        elif pc == 'store':                                     # one read of the leaf decides, the store is behind it
            if ss is None or not (ss[1] and s.open) and BUG != 'store-blind': yield go('end', release='F')
            else: yield go('stored', (ss[0],))
        elif pc == 'stored': yield go('end', release='F', late=1, bad=s.bad or int(loc[0] < s.gone))
        elif pc == 'lock2': yield go('set2', (ss if s.huge else None,), take='F2')
        elif pc == 'set2': yield go('end', release='F2', big=loc[0] or s.big)

        elif pc == 'split': yield go('end', huge=0)
        elif pc == 'push': yield go('end') if s.open else go('push-clear')
        elif pc == 'push-clear': yield go('push-open', ss=ss and (ss[0], 0))
        elif pc == 'push-open': yield go('end', open=1)

        elif pc == 'take': yield go(second.order(kind)[0], dirty=0) if s.dirty else go('end')
        elif pc == 'publish': yield go(second.order(kind)[0], published=s.published + 1)
        elif pc == 'protect':
            gone = BUG == 'visit-if-zapped' and kind == 'zap' and ss is None
            to = 'flush' if gone else second.order(kind)[second.order(kind).index('protect') + 1]
            if kind == 'zap': yield go(to, ss=None, seq=s.seq + 1)
            elif kind == 'lazy': yield go(to, open=0)
            else: yield go(to, ss=ss and (ss[0], 0))
        elif pc == 'visit':
            held = any(name == 'F' for name, _ in s.locks)
            if not s.records: yield second.next(go, kind, 'visit')
            elif BUG == 'leaves-before-lock': yield go('visit-held', (s.s is None,))
            else: yield go('visit-lock' if held and BUG != 'skip-empty' else 'visit-idle')
        elif pc == 'visit-held':
            held = any(name == 'F' for name, _ in s.locks)
            yield go('visit-lock') if held or not loc[0] else second.next(go, kind, 'visit')
        elif pc == 'visit-idle': yield go('visit-lock') if s.s else second.next(go, kind, 'visit')
        elif pc == 'visit-lock':
            if BUG == 'leaf-first': yield go('visit-table', (ss,), take='F')
            else: yield go('visit-leaf', (s.open,), take='F')
        elif pc == 'visit-table': yield go('visit-set', loc + (s.open,))
        elif pc == 'visit-leaf': yield go('visit-set', (ss,) + loc)
        elif pc == 'visit-set':
            keep = s.s and loc[0] and loc[0][0] == s.s[0]
            yield second.next(go, kind, 'visit', release='F', s=(s.s[0], s.s[1] & loc[0][1] & loc[1]) if keep else None)
        elif pc == 'visit2':
            if BUG == 'visit-one-size': yield second.next(go, kind, 'visit2')
            else: yield go('visit2-set', (ss if s.huge else None,), take='F2')
        elif pc == 'visit2-set':
            keep = s.big and loc[0] and loc[0][0] == s.big[0]
            yield second.next(go, kind, 'visit2', release='F2', big=(s.big[0], s.big[1] & loc[0][1]) if keep else None)
        elif pc == 'flush': yield second.next(go, kind, 'flush', tlb=EMPTY, w=0, late=0)
        elif pc == 'host': yield go('withdraw', gone=s.frame + 1, frame=s.frame + 1)
        elif pc == 'withdraw': yield go('end', published=s.published - 1)

    def order(kind):
        last = ('host',) if kind == 'zap' else ('end',)
        if BUG == 'visit-first': return ('visit', 'visit2', 'protect', 'flush') + last
        if BUG == 'flush-before-visit': return ('protect', 'flush', 'visit', 'visit2') + last
        if BUG == 'no-visit': return ('protect', 'flush') + last
        return ('protect', 'visit', 'visit2', 'flush') + last

    def next(go, kind, pc, **changes):
        order = second.order(kind)
        return go(order[order.index(pc) + 1], **changes)
