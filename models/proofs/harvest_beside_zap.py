"""A leaf is zapped beside a harvest, where D is the record of a write: the log and the host lose nothing.

Any number of zaps, beside what `dirty_bits.py` has. Engine: `second_stage/zap.rs` (visit, mark_dirty),
`table/node.rs` (report_zapped), `second_stage/invalidate.rs`.

A zap reads the leaf. If D is set and the memslot logs, it marks the page. It notifies the host, and
exchanges the leaf for an empty PTE, if it is what was read. If D was set it marks the page once more.
Then it flushes. While it is under way its range is in flight, and no fault installs a leaf.

A leaf may come back to the value that was read: D is cleared for the log, and a CPU sets it again. Then
the second mark is for the log, and the host knows of the write by the software bit.

Aging changes nothing here: where leaves have an accessed bit it clears that alone. Where they have none
there is no D, and aging takes W as `drop_write` of `dirty_log.py` does.

Left out: huge leaves, and page-table pages that are unlinked. A rescan of userfault bits zaps with no
range in flight: it is in the model if `no-rescan` is left out, and then the host may miss a write.
"""
import prover
from prover import And, If, Implies, Not, Or, put, put_where
from dirty_bits import RETURNED, DirtyBits

OUT, READ, WILL_MARK, MARKED, REPORTED, EXCHANGED, MARKS_AGAIN, FLUSHES = range(8)      # of a zap


class HarvestBesideZap(DirtyBits):
    sorts = [*DirtyBits.sorts, 'Zap']
    letters = {**DirtyBits.letters, 'z': 'Zap', 'y': 'Zap'}
    fixed = {**DirtyBits.fixed, 'zaps': (['Zap'], 'Page'), 'rescans': (['Zap'], 'bool')}
    state = {
        **DirtyBits.state,
        'zpc': (['Zap'], 'int'), 'zdirty': (['Zap'], 'bool'), 'zwas_dirty': (['Zap'], 'bool'),
        'zlogs': (['Zap'], 'bool'),                     # for a rule left out
        'zflushed': (['Zap', 'Cpu'], 'bool'),
        # Ghosts: the host was notified that the page was written; D was cleared since the zap read it; the
        # last zap that emptied the leaf.
        'reported': (['Page'], 'bool'), 'overtaken': (['Zap'], 'bool'), 'zapper': (['Page'], 'Zap'),
    }
    rules = {
        'mark-before-exchange': 'A zap marks a dirty page only after its exchange.',
        'mark-after-exchange': 'A zap marks a dirty page only before its exchange.',
        'exchange-what-was-read': 'A zap empties the leaf whatever it is by then.',
        'flag-after-exchange': 'A zap marks for the second time if the memslot logged when it read the leaf.',
        'report-before-exchange': 'A zap notifies the host after its exchange.',
        'no-rescan': 'Rescans of userfault bits zap, too: faults install leaves while they are under way.',
        'zap-flushes': 'A zap does not flush.',
    }

    def axioms(self, s):
        allowed = self.without('no-rescan')
        return {**super().axioms(s), 'no zap is a rescan': s.all(lambda z: Or(allowed, Not(s.rescans(z))))}

    def init(self, s):
        return {**super().init(s), 'no zap': s.all(lambda z: And(s.zpc(z) == OUT, s.all(
            lambda c: Not(s.zflushed(z, c)))))}

    def may_map(self, s, p):
        return Or(s.present(p), s.all(lambda z: Or(s.zaps(z) != p, s.zpc(z) == OUT, s.rescans(z))))

    def overtakes(self, s, p, step):
        """D is cleared: zaps that have read the leaf are overtaken."""
        guard, updates = step
        return guard, {**updates, 'overtaken': put_where(s.overtaken, lambda z: s.zaps(z) == p, True)}

    def step_clean(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: clean_leaf"""
        return self.overtakes(s, p, super().step_clean(s, h, p))

    def step_enabling_cleans(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot, clean_leaf"""
        return self.overtakes(s, p, super().step_enabling_cleans(s, p))

    # A zap.

    def step_zap_read(self, s, z: 'Zap'):
        """second_stage/zap.rs: visit"""
        p = s.zaps(z)
        return And(s.zpc(z) == OUT, s.present(p)), {
            'zpc': put(s.zpc, z, READ), 'zlogs': put(s.zlogs, z, s.flag()),
            'zdirty': put(s.zdirty, z, s.dirty(p)),
            'zwas_dirty': put(s.zwas_dirty, z, s.was_dirty(p)), 'overtaken': put(s.overtaken, z, False)}

    def step_zap_finds_nothing(self, s, z: 'Zap'):
        """second_stage/zap.rs: visit (State::Empty)"""
        return And(s.zpc(z) == OUT, Not(s.present(s.zaps(z)))), {'zpc': put(s.zpc, z, FLUSHES)}

    def step_zap_read_flag(self, s, z: 'Zap'):
        """second_stage/zap.rs: mark_dirty"""
        marks = And(s.zdirty(z), s.flag(), not self.without('mark-before-exchange'))
        return s.zpc(z) == READ, {'zpc': put(s.zpc, z, If(marks, WILL_MARK, MARKED))}

    def step_zap_mark(self, s, z: 'Zap'):
        """second_stage/zap.rs: mark_dirty"""
        return s.zpc(z) == WILL_MARK, {'zpc': put(s.zpc, z, MARKED), **self.marks(s, s.zaps(z))}

    def says_dirty(self, s, z):
        p = s.zaps(z)
        return {'reported': put(s.reported, p, Or(s.reported(p), s.zdirty(z), s.zwas_dirty(z)))}

    def step_zap_report(self, s, z: 'Zap'):
        """table/node.rs: report_zapped"""
        if self.without('report-before-exchange'):
            return s.zpc(z) == MARKED, {'zpc': put(s.zpc, z, REPORTED)}
        return s.zpc(z) == MARKED, {'zpc': put(s.zpc, z, REPORTED), **self.says_dirty(s, z)}

    def is_same(self, s, z):
        p = s.zaps(z)
        return And(s.present(p), s.dirty(p) == s.zdirty(z), s.was_dirty(p) == s.zwas_dirty(z))

    def step_zap_exchange(self, s, z: 'Zap'):
        """second_stage/install.rs: zap_pte"""
        p = s.zaps(z)
        may = And(s.present(p), Or(self.without('exchange-what-was-read'), self.is_same(s, z)))
        again = And(s.zdirty(z), not self.without('mark-after-exchange'))
        return And(s.zpc(z) == REPORTED, may), {
            'present': put(s.present, p, False), 'zpc': put(s.zpc, z, If(again, EXCHANGED, FLUSHES)),
            'zapper': put(s.zapper, p, z),
            'due': put_where(s.due, lambda h, q: And(q == p, s.overtaken(z)), False)}

    def step_zap_fails(self, s, z: 'Zap'):
        """second_stage/zap.rs: visit (Changed)"""
        return And(s.zpc(z) == REPORTED, Not(self.is_same(s, z))), {'zpc': put(s.zpc, z, OUT)}

    def step_zap_read_flag_again(self, s, z: 'Zap'):
        """second_stage/zap.rs: mark_dirty"""
        logs = s.zlogs(z) if self.without('flag-after-exchange') else s.flag()
        return s.zpc(z) == EXCHANGED, {'zpc': put(s.zpc, z, If(logs, MARKS_AGAIN, FLUSHES))}

    def step_zap_mark_again(self, s, z: 'Zap'):
        """second_stage/zap.rs: mark_dirty"""
        return s.zpc(z) == MARKS_AGAIN, {'zpc': put(s.zpc, z, FLUSHES), **self.marks(s, s.zaps(z))}

    def step_zap_flush(self, s, z: 'Zap', c: 'Cpu'):
        """second_stage/invalidate.rs: Invalidation::new"""
        meant = lambda p: And(not self.without('zap-flushes'), p == s.zaps(z))
        return s.zpc(z) == FLUSHES, {'zflushed': put(s.zflushed, (z, c), True), **self.flushes(s, c, meant)}

    def step_zap_end(self, s, z: 'Zap'):
        """second_stage/invalidate.rs: Invalidation::drop, after the host has used what it knows"""
        p, stays = s.zaps(z), s.rescans(z)
        return And(s.zpc(z) == FLUSHES, s.all(lambda c: s.zflushed(z, c))), {
            'zpc': put(s.zpc, z, OUT), 'zflushed': put_where(s.zflushed, lambda y, c: y == z, False),
            'reported': put(s.reported, p, And(stays, s.reported(p))),
            'written': put(s.written, p, And(stays, s.written(p)))}

    # What is promised.

    def host_knows(self, s, p):
        """The host was notified that the page was written, or the leaf says so."""
        return Or(s.reported(p), super().host_knows(s, p))

    def will_mark(self, s, p):
        """The fault that made the leaf dirty last, or the zap that emptied it, is about to mark the page."""
        z = s.zapper(p)
        by_zap = And(s.zaps(z) == p, Or(s.zpc(z) == EXCHANGED, s.zpc(z) == MARKS_AGAIN))
        return Or(super().will_mark(s, p), by_zap)

    def safe(self, s):
        return {
            **super().safe(s),
            'the host knows of each write through a leaf that is gone': s.all(lambda p: Implies(
                And(Not(s.present(p)), s.written(p)), s.reported(p))),
            'after the flush of a zap no CPU writes to the page': s.all(lambda z, c: Implies(
                And(s.zflushed(z, c), Not(s.rescans(z))), Not(s.tlb(c, s.zaps(z))))),
        }

    def inv(self, s):
        at = lambda z, *pcs: Or(*(s.zpc(z) == pc for pc in pcs))
        covered = lambda p: Or(s.bit(p), And(self.held(s, p), Not(s.cleaned(s.taker(p), p))))
        return {
            **super().inv(s),
            'a zap is OUT to FLUSHES': s.all(lambda z: And(s.zpc(z) >= OUT, s.zpc(z) <= FLUSHES)),
            'a zap flushes at its end': s.all(lambda z, c: Implies(s.zflushed(z, c), s.zpc(z) == FLUSHES)),
            'no leaf comes back while a zap that emptied it is under way': s.all(lambda z: Implies(
                at(z, EXCHANGED, MARKS_AGAIN, FLUSHES), Not(s.present(s.zaps(z))))),
            'a zap marks what was dirty': s.all(lambda z: Implies(
                at(z, WILL_MARK, EXCHANGED, MARKS_AGAIN), s.zdirty(z))),
            'a zap that was not overtaken has marked the page': s.all(lambda z: Implies(
                And(at(z, MARKED, REPORTED), s.zdirty(z), Not(s.overtaken(z)), s.armed(s.zaps(z)),
                    s.present(s.zaps(z))), covered(s.zaps(z)))),
            'a zap has notified the host before it empties a leaf that was written': s.all(lambda z: Implies(
                And(s.zpc(z) == REPORTED, s.present(s.zaps(z)), Or(s.zdirty(z), s.zwas_dirty(z))),
                s.reported(s.zaps(z)))),
            'what is gone and cached with D is about to be flushed': s.all(lambda c, p: Implies(
                And(Not(s.present(p)), s.tlb(c, p)), And(
                    s.zaps(s.zapper(p)) == p, s.zpc(s.zapper(p)) >= EXCHANGED,
                    Not(s.zflushed(s.zapper(p), c))))),
        }

    sizes = {**DirtyBits.sizes, 'Harvest': 1, 'Zap': 1}
    clean = {**DirtyBits.logging, 'bit': lambda p: False}
    off = {'present': lambda p: True, 'writable': lambda p: True}
    was_dirty = {**off, 'was_dirty': lambda p: True, 'dirty': lambda p: True}
    # A rescan, zap 0, has notified the host and is about to exchange. No harvest takes part.
    rescan = {**off, 'dirty': lambda p: True, 'rescans': lambda z: z == 'zap0', 'reported': lambda p: True,
              'zpc': lambda z: REPORTED if z == 'zap0' else OUT, 'zdirty': lambda z: z == 'zap0',
              'hpc': lambda h: RETURNED}
    traces = {
        'mark-before-exchange': {'sizes': sizes, 'start': clean},
        'mark-after-exchange': {'sizes': sizes, 'start': was_dirty},
        'exchange-what-was-read': {'sizes': sizes, 'start': clean},
        'flag-after-exchange': {'sizes': sizes, 'start': was_dirty},
        'report-before-exchange': {'sizes': sizes, 'start': clean},
        'no-rescan': {'sizes': {**sizes, 'Zap': 2}, 'start': rescan},
        'zap-flushes': {'sizes': sizes, 'start': clean},
    }


if __name__ == '__main__':
    prover.main(HarvestBesideZap)
