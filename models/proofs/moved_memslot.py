"""A memslot that logs is moved, ceases to log and logs again, beside faults and harvests.

Any number of moves, places, bitmaps, pages, faults, harvests (each is one turn of a call) and CPUs, and one
memslot. Engine: `dirty/log.rs` (mark_if_logging), `harvest/log.rs` (find, rearm), `vm/region.rs`
(change_slot, attachments_for).

A memslot that moves while it logs gets a new bitmap, in which all pages are marked. A memslot that ceases
to log keeps its bitmap, and may be moved before it logs again, or with the same call: then the bitmap is
the same and the place is another. So a turn of a harvest looks up where the memslot is after it has taken
bits. A fault marks the bitmap of the memslot that has its page after it has restored W.

Left out: leaves of many pages, the summary, the VMM's marks (`dirty_log.py`); a memslot that is replaced by
another over the same frames (`memslots.py`): for the log it has moved; one that is resized.
"""
import prover
from log_steps import ARMED, FLAGGED, OFF, ON, Logging, inv_of_enabling
from prover import And, If, Implies, Not, Or, put, put_where

OUT, GAVE, MARKS, FOUND_LOG = range(4)                  # of a fault; FOUND_LOG is for a rule left out
UNBEGUN, TAKES, PROTECTS, FLUSHES, RETURNED = range(5)  # of a harvest


class MovedMemslot(Logging):
    sorts = ['Fault', 'Harvest', 'Page', 'Place', 'Bitmap', 'Cpu']
    letters = {'f': 'Fault', 'h': 'Harvest', 'p': 'Page', 'at': 'Place', 'b': 'Bitmap', 'c': 'Cpu'}
    fixed = {'place_of': (['Fault'], 'Place'), 'page': (['Fault'], 'Page'), 'initially_set': ([], 'bool')}
    state = {
        'place': ([], 'Place'), 'bitmap': ([], 'Bitmap'), 'flag': ([], 'bool'), 'used': (['Bitmap'], 'bool'),
        'writable': (['Place', 'Page'], 'bool'), 'tlb': (['Cpu', 'Place', 'Page'], 'bool'),
        'bit': (['Bitmap', 'Page'], 'bool'),
        'fpc': (['Fault'], 'int'), 'fbitmap': (['Fault'], 'Bitmap'),
        'hpc': (['Harvest'], 'int'), 'hbitmap': (['Harvest'], 'Bitmap'), 'hplace': (['Harvest'], 'Place'),
        'holds': (['Harvest', 'Page'], 'bool'), 'rearmed': (['Harvest', 'Page'], 'bool'),
        'flushed': (['Harvest', 'Cpu'], 'bool'),
        'epc': ([], 'int'), 'armed': (['Page'], 'bool'), 'eflushed': (['Cpu'], 'bool'),
        'moving': ([], 'bool'), 'zapped': (['Page'], 'bool'), 'mflushed': (['Cpu'], 'bool'),
        # Ghosts: written and not reported; the fault that gave W last; the harvest that took the bit of the
        # memslot's bitmap last.
        'unreported': (['Page'], 'bool'), 'giver': (['Page'], 'Fault'), 'taker': (['Page'], 'Harvest'),
    }
    rules = {
        'look-up-after-take': 'A harvest protects pages where the memslot was before it took the bits.',
        'mark-the-memslot-of-now': 'A fault marks the bitmap that it found before it restored W.',
        'mark-all-in-a-move': 'A memslot that moves while it logs gets a bitmap without marks.',
        'new-bitmap-in-a-move': 'A memslot that moves while it logs keeps its bitmap.',
        'keep-faults-out': 'A fault maps a page at the old place while the memslot is moved away.',
        'flush-before-publish': 'A move publishes the new place before the old one is flushed.',
        'wipe-before-flag': 'Old marks are cleared after the flag is published.',
    }

    def init(self, s):
        return {
            'nothing is mapped': s.all(lambda at, p, c: And(Not(s.writable(at, p)), Not(s.tlb(c, at, p)))),
            'no memslot logs': And(Not(s.flag()), s.epc() == OFF, Not(s.moving()), s.used(s.bitmap())),
            'nothing is marked': s.all(lambda p, b: And(
                Not(s.bit(b, p)), Not(s.unreported(p)), Not(s.armed(p)), Not(s.zapped(p)))),
            'no fault': s.all(lambda f: s.fpc(f) == OUT),
            'no harvest': s.all(lambda h, p: And(s.hpc(h) == UNBEGUN, Not(s.holds(h, p)),
                                                 Not(s.rearmed(h, p)))),
            'nothing flushed': s.all(lambda h, c: And(
                Not(s.flushed(h, c)), Not(s.eflushed(c)), Not(s.mflushed(c)))),
        }

    # A fault.

    def step_restore_write(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to; vcpu/act.rs: install_at (not if the range is in flight)"""
        at, p = s.place_of(f), s.page(f)
        early = self.without('mark-the-memslot-of-now')
        may = Or(Not(s.zapped(p)), self.without('keep-faults-out'))
        return And(s.fpc(f) == (FOUND_LOG if early else OUT), at == s.place(), may, Not(s.writable(at, p))), {
            'writable': put(s.writable, (at, p), True), 'giver': put(s.giver, p, f),
            'fpc': put(s.fpc, f, MARKS if early else GAVE)}

    def step_find_bitmap(self, s, f: 'Fault'):
        """dirty/log.rs: mark_if_logging"""
        early = self.without('mark-the-memslot-of-now')
        logs = And(s.flag(), s.place_of(f) == s.place())
        return s.fpc(f) == (OUT if early else GAVE), {
            'fpc': put(s.fpc, f, If(logs, FOUND_LOG if early else MARKS, OUT)),
            'fbitmap': put(s.fbitmap, f, s.bitmap())}

    def step_find_marked(self, s, f: 'Fault'):
        """slot/bitmap.rs: mark_page"""
        return And(s.fpc(f) == MARKS, s.bit(s.fbitmap(f), s.page(f))), {'fpc': put(s.fpc, f, OUT)}

    def step_set_bit(self, s, f: 'Fault'):
        """slot/bitmap.rs: mark_page"""
        return s.fpc(f) == MARKS, {'fpc': put(s.fpc, f, OUT),
                                   'bit': put(s.bit, (s.fbitmap(f), s.page(f)), True)}

    # A turn of a harvest.

    def step_find(self, s, h: 'Harvest'):
        """harvest/log.rs: find"""
        return And(s.hpc(h) == UNBEGUN, s.flag()), {
            'hpc': put(s.hpc, h, TAKES), 'hbitmap': put(s.hbitmap, h, s.bitmap()),
            'hplace': put(s.hplace, h, s.place())}

    def step_take(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: take, take_masked"""
        b = s.hbitmap(h)
        return And(s.hpc(h) == TAKES, Not(s.holds(h, p)), s.bit(b, p)), {
            'bit': put(s.bit, (b, p), False), 'holds': put(s.holds, (h, p), True),
            'taker': put(s.taker, p, If(b == s.bitmap(), h, s.taker(p)))}

    def step_look_up(self, s, h: 'Harvest'):
        """harvest/log.rs: rearm (by_id)"""
        keeps = self.without('look-up-after-take')
        return s.hpc(h) == TAKES, {
            'hpc': put(s.hpc, h, PROTECTS), 'hplace': put(s.hplace, h, s.hplace(h) if keeps else s.place())}

    def step_protect(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: protect_leaf"""
        return And(s.hpc(h) == PROTECTS, s.holds(h, p)), {
            'rearmed': put(s.rearmed, (h, p), True), 'writable': put(s.writable, (s.hplace(h), p), False)}

    def step_turn_is_over(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest"""
        return And(s.hpc(h) == PROTECTS, s.all(lambda p: Implies(s.holds(h, p), s.rearmed(h, p)))), {
            'hpc': put(s.hpc, h, FLUSHES)}

    def step_flush(self, s, h: 'Harvest', c: 'Cpu'):
        """harvest/log.rs: harvest (flush_cpus)"""
        meant = lambda d, at, p: And(d == c, at == s.hplace(h), s.holds(h, p))
        return s.hpc(h) == FLUSHES, {
            'flushed': put(s.flushed, (h, c), True), 'tlb': put_where(s.tlb, meant, False)}

    def step_return(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest returns, and the caller copies the pages"""
        return And(s.hpc(h) == FLUSHES, s.all(lambda c: s.flushed(h, c))), self.returns(s, h, RETURNED)

    # The memslot is changed, by one call at a time.

    def may_wipe(self, s):
        return And(s.epc() >= FLAGGED,
                   s.epc() < ON) if self.without('wipe-before-flag') else s.epc() == OFF

    def step_wipe(self, s, p: 'Page'):
        """slot/bitmap.rs: clear_all"""
        return And(self.may_wipe(s), s.bit(s.bitmap(), p)), {'bit': put(s.bit, (s.bitmap(), p), False)}

    def step_publish_flag(self, s):
        """vm/region.rs: change_slot"""
        return And(s.epc() == OFF, Not(s.moving())), {'flag': lambda: True, 'epc': lambda: FLAGGED}

    def step_enabling_protects(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot"""
        return And(s.epc() == FLAGGED, Not(s.initially_set())), {
            'writable': put(s.writable, (s.place(), p), False), 'armed': put(s.armed, p, True)}

    def step_enabling_sets(self, s, p: 'Page'):
        """vm/region.rs: change_slot (mark)"""
        return And(s.epc() == FLAGGED, s.initially_set()), {
            'bit': put(s.bit, (s.bitmap(), p), True), 'armed': put(s.armed, p, True)}

    def step_enabling_flushes(self, s, c: 'Cpu'):
        """vm/region.rs: begin_to_log"""
        meant = lambda d, at, p: And(d == c, at == s.place())
        return And(s.epc() == ARMED, Not(s.initially_set())), {
            'eflushed': put(s.eflushed, c, True), 'tlb': put_where(s.tlb, meant, False)}

    def step_disable(self, s):
        """vm/region.rs: change_slot"""
        return And(s.epc() == ON, Not(s.moving())), self.ceases()

    def step_begin_move(self, s):
        """vm/region.rs: change_slot (Invalidation::new publishes the range)"""
        return And(Or(s.epc() == OFF, s.epc() == ON), Not(s.moving())), {'moving': lambda: True}

    def step_zap(self, s, p: 'Page'):
        """second_stage/zap.rs: visit"""
        return s.moving(), {'zapped': put(s.zapped, p, True),
                            'writable': put(s.writable, (s.place(), p), False)}

    def step_move_flushes(self, s, c: 'Cpu'):
        """second_stage/invalidate.rs: Invalidation::new"""
        meant = lambda d, at, p: And(d == c, at == s.place())
        return And(s.moving(), s.all(lambda p: s.zapped(p))), {
            'mflushed': put(s.mflushed, c, True), 'tlb': put_where(s.tlb, meant, False)}

    def may_arrive(self, s, at):
        over = And(s.all(lambda p: s.zapped(p)),
                   Or(s.all(lambda c: s.mflushed(c)), self.without('flush-before-publish')))
        return And(s.moving(), over, at != s.place())

    def arrives(self, at):
        return {'place': lambda: at, 'moving': lambda: False, 'zapped': lambda p: False,
                'mflushed': lambda c: False}

    def step_publish_place(self, s, at: 'Place', b: 'Bitmap'):
        """vm/region.rs: change_slot, attachments_for (a new bitmap, if the memslot logs)"""
        renews = And(s.flag(), not self.without('new-bitmap-in-a-move'))
        marked = not self.without('mark-all-in-a-move')
        is_new = lambda x, p: And(x == b, renews)
        return And(self.may_arrive(s, at), Not(s.used(b))), {
            **self.arrives(at),
            'bitmap': lambda: If(renews, b, s.bitmap()), 'used': put(s.used, b, renews),
            'bit': put_where(s.bit, is_new, marked)}

    def step_publish_place_and_flag(self, s, at: 'Place'):
        """vm/region.rs: change_slot (nothing is mapped there, so it neither protects nor flushes)"""
        protects = Not(s.initially_set())
        return And(self.may_arrive(s, at), s.epc() == OFF), {
            **self.arrives(at), 'flag': lambda: True, 'epc': lambda: If(protects, ON, FLAGGED),
            'armed': lambda p: protects, 'eflushed': lambda c: protects}

    def step_publish_place_and_disable(self, s, at: 'Place'):
        """vm/region.rs: change_slot (the bitmap stays)"""
        return And(self.may_arrive(s, at), s.epc() == ON), {**self.arrives(at), **self.ceases()}

    def ceases(self):
        return {'flag': lambda: False, 'epc': lambda: OFF, 'armed': lambda p: False, 'eflushed': lambda c: False,
                'unreported': lambda p: False}

    # The guest.

    def step_fill_tlb(self, s, c: 'Cpu', at: 'Place', p: 'Page'):
        """A CPU caches a leaf"""
        return s.writable(at, p), {'tlb': put(s.tlb, (c, at, p), True)}

    def step_guest_write(self, s, c: 'Cpu', at: 'Place', p: 'Page'):
        """A CPU writes through a cached leaf"""
        return s.tlb(c, at, p), {'unreported': put(s.unreported, p, Or(s.unreported(p), s.epc() == ON))}

    # What is promised.

    def will_mark(self, s, p):
        """The fault that gave W last is about to mark the page in the memslot's bitmap."""
        f = s.giver(p)
        return And(s.page(f) == p, s.place_of(f) == s.place(),
                   Or(s.fpc(f) == GAVE, And(s.fpc(f) == MARKS, s.fbitmap(f) == s.bitmap())))

    def safe(self, s):
        return {
            'a write is marked, held by a harvest, or about to be marked': s.all(lambda p: Implies(
                s.unreported(p), Or(s.bit(s.bitmap(), p), self.held(s, p), self.will_mark(s, p)))),
            'nothing is mapped where the memslot is not': s.all(lambda c, at, p: Implies(
                at != s.place(), And(Not(s.writable(at, p)), Not(s.tlb(c, at, p))))),
        }

    def inv(self, s):
        return {**inv_of_enabling(s), **self.inv_of_changes(s), **self.inv_of_harvests(s), **self.heart(s)}

    def inv_of_changes(self, s):
        return {
            'counters are in their ranges': And(
                s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= FOUND_LOG)),
                s.all(lambda h: And(s.hpc(h) >= UNBEGUN, s.hpc(h) <= RETURNED))),
            'no memslot moves while it begins to log': Implies(s.moving(), Or(s.epc() == OFF, s.epc() == ON)),
            'what is zapped is not mapped until the memslot has moved': s.all(lambda p: Implies(
                s.zapped(p), And(s.moving(), Not(s.writable(s.place(), p))))),
            'a move flushes after it has zapped': s.all(lambda c, p: Implies(
                s.mflushed(c), And(s.moving(), s.zapped(p), Not(s.tlb(c, s.place(), p))))),
            'bitmaps that were published are used': And(
                s.used(s.bitmap()), s.all(lambda f: Implies(s.fpc(f) == MARKS, s.used(s.fbitmap(f)))),
                s.all(lambda h: Implies(s.hpc(h) != UNBEGUN, s.used(s.hbitmap(h))))),
        }

    def inv_of_harvests(self, s):
        return {
            'a harvest holds pages between begin and return': s.all(lambda h, p: Implies(
                s.holds(h, p), And(s.hpc(h) >= TAKES, s.hpc(h) <= FLUSHES))),
            'a harvest flushes after its turn': s.all(lambda h, c: Implies(
                s.flushed(h, c), s.hpc(h) >= FLUSHES)),
            'a harvest that flushes has protected all it holds': s.all(lambda h, p: Implies(
                And(s.hpc(h) == FLUSHES, s.holds(h, p)), s.rearmed(h, p))),
            'a harvest protects after it has looked up the place': s.all(lambda h, p: Implies(
                s.rearmed(h, p), s.hpc(h) >= PROTECTS)),
        }

    def heart(self, s):
        """Some thread marks or reports what can be written, or is cached so, where the memslot is."""
        is_here = lambda h: Or(s.hpc(h) == TAKES, s.hplace(h) == s.place())
        holds = lambda p: And(self.held(s, p), is_here(s.taker(p)))
        marks = lambda p: Or(s.bit(s.bitmap(), p), self.will_mark(s, p))
        return {
            'what can be written is marked or about to be': s.all(lambda p: Implies(
                And(s.armed(p), s.writable(s.place(), p)),
                Or(marks(p), And(holds(p), Not(s.rearmed(s.taker(p), p)))))),
            'what is cached as writable is marked or about to be': s.all(lambda c, p: Implies(
                And(Or(s.eflushed(c), And(s.initially_set(), s.armed(p))), s.tlb(c, s.place(), p)),
                Or(marks(p), And(holds(p), Not(s.flushed(s.taker(p), c)))))),
        }

    sizes = {'Fault': 1, 'Harvest': 1, 'Page': 1, 'Place': 2, 'Bitmap': 3, 'Cpu': 1}
    start = {'used': lambda b: b == 'bitmap0'}
    logging = {**start, 'epc': lambda: ON, 'flag': lambda: True, 'armed': lambda p: True,
               'eflushed': lambda c: True, 'bit': lambda b, p: b == 'bitmap0'}
    # The fault, or the harvest, began before the memslot was moved.
    fault = {**logging, 'used': lambda b: b != 'bitmap2', 'bit': lambda b, p: False,
             'fpc': lambda f: FOUND_LOG, 'fbitmap': lambda f: 'bitmap1'}
    harvest = {**logging, 'writable': lambda at, p: at == 'place0', 'hpc': lambda h: TAKES,
               'hplace': lambda h: 'place1'}
    traces = {
        'look-up-after-take': {'sizes': sizes, 'start': harvest},
        'mark-the-memslot-of-now': {'sizes': sizes, 'start': fault},
        'mark-all-in-a-move': {'sizes': sizes, 'start': logging},
        'new-bitmap-in-a-move': {'sizes': sizes, 'start': logging},
        'keep-faults-out': {'sizes': sizes, 'start': start},
        'flush-before-publish': {'sizes': sizes, 'start': start},
        'wipe-before-flag': {'sizes': sizes, 'start': start},
    }


if __name__ == '__main__':
    prover.main(MovedMemslot)
