"""Dirty rings: a fault pushes the page that it makes writable into the ring of its vCPU.

Any number of vCPUs (each with one ring, of any size), entries, pages, harvests, marks and resets. Engine:
`dirty/ring.rs`, `harvest/rings.rs`, `vcpu/on_leaf.rs`.

Entry number i has the cell i modulo the size. The indices `first`, `harvested` and `pushed` only grow. The
mark of a cell says which entry was taken out of order. A push writes the cell, then moves `pushed` on. A
harvest reads `harvested`, then `first`, then the cell and its mark; it moves `harvested` on by an exchange. A
reset reads `first`, then `harvested`; it reads the page of each harvested entry from `first` on, protects these
pages in any order, flushes, and moves `first` behind the entries, unless another reset has moved it further.

The caller harvests, resets, and then copies the page. An entry that was marked out of order may be copied if
`first` is behind it after the reset.

Left out: memslots; lazy protection; a fault that opens several pages; enabling, which is that of
`dirty_log.py`. A full ring is one without room: the fault waits here, and exits in the engine.
"""
import prover
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

OUT, GAVE, WROTE, GIVES = range(4)                      # of a fault; GIVES is for a rule left out
IDLE, BEGUN, CHOSE, READ, LOOKED = range(5)             # of a harvest
NEW, SAW, KNOWS = range(3)                              # of a caller that reads one entry, and marks it
UNBEGUN, WALKS, FLUSHES, EMPTIES, RETURNED = range(5)   # of a reset


class DirtyRings(Protocol):
    sorts = ['Vcpu', 'Page', 'Entry', 'Cell', 'Harvest', 'Mark', 'Reset']
    letters = {'v': 'Vcpu', 'c': 'Vcpu', 'p': 'Page', 'e': 'Entry', 'd': 'Entry', 'h': 'Harvest', 'm': 'Mark',
               'r': 'Reset', 'x': 'Cell'}
    fixed = {'ring': (['Entry'], 'Vcpu'), 'index': (['Entry'], 'int'), 'cell': (['Entry'], 'Cell'),
             'size': ([], 'int'), 'of': (['Mark'], 'Entry'), 'hring': (['Harvest'], 'Vcpu')}
    state = {
        'writable': (['Page'], 'bool'), 'tlb': (['Vcpu', 'Page'], 'bool'),
        'first': (['Vcpu'], 'int'), 'harvested': (['Vcpu'], 'int'), 'pushed': (['Vcpu'], 'int'),
        'page': (['Cell'], 'Page'), 'mark': (['Cell'], 'int'),
        'fpc': (['Vcpu'], 'int'), 'fpage': (['Vcpu'], 'Page'),
        'hpc': (['Harvest'], 'int'), 'hnext': (['Harvest'], 'int'), 'hentry': (['Harvest'], 'Entry'),
        'hpage': (['Harvest'], 'Page'), 'hmarked': (['Harvest'], 'bool'),
        'mpc': (['Mark'], 'int'), 'mpage': (['Mark'], 'Page'),
        'rpc': (['Reset'], 'int'), 'rnext': (['Reset', 'Vcpu'], 'int'), 'rend': (['Reset', 'Vcpu'], 'int'),
        'takes': (['Reset', 'Entry'], 'bool'), 'rpage': (['Reset', 'Entry'], 'Page'),     # read, not protected
        'rfirst': (['Reset', 'Vcpu'], 'bool'), 'rharvested': (['Reset', 'Vcpu'], 'bool'),
        'rflushed': (['Reset', 'Vcpu'], 'bool'), 'remptied': (['Reset', 'Vcpu'], 'bool'),
        # Ghosts. Of an entry: its page; that it was protected and flushed after it was harvested; that the
        # caller has copied the page since. Of a page: it was written and not copied since; the vCPU that
        # made it writable last; its last entry. Of a reset: what was harvested before it, what it protected.
        'pushes': (['Entry'], 'Page'), 'protected': (['Entry'], 'bool'),
        'flushed': (['Entry', 'Vcpu'], 'bool'),
        'copied': (['Entry'], 'bool'), 'uncopied': (['Page'], 'bool'), 'giver': (['Page'], 'Vcpu'),
        'last': (['Page'], 'Entry'), 'due': (['Reset', 'Entry'], 'bool'), 'did': (['Reset', 'Entry'], 'bool'),
    }
    rules = {
        'push-after-write-access': 'A fault pushes its page before it restores W.',
        'room': 'A fault makes a page writable when its ring has no room.',
        'cell-before-index': 'A push moves `pushed` on, and then writes the cell.',
        'take-by-exchange': 'A harvest moves `harvested` on whatever it is by then.',
        'page-before-mark': 'A harvest reads the mark of a cell, and then the page.',
        'page-before-first': 'A caller that reads one entry does not look at `first` after it.',
        'mark-names-the-index': 'A mark holds for the next entry in the same cell, too.',
        'protect-each': 'A reset makes entries empty whose pages it has not protected.',
        'flush-before-empty': 'A reset makes entries empty before its flush is over.',
        'maximum': 'A reset moves `first` back if another reset was faster.',
    }

    def axioms(self, s):
        near = lambda e, d: And(s.index(e) - s.index(d) < s.size(), s.index(d) - s.index(e) < s.size())
        return {
            'indices': And(s.size() >= 1, s.all(lambda e: s.index(e) >= 0)),
            'entries have names': s.all(lambda e, d: Implies(
                And(s.ring(e) == s.ring(d), s.index(e) == s.index(d)), e == d)),
            'entries that share a cell are a round apart': s.all(lambda e, d: Implies(
                s.cell(e) == s.cell(d), And(s.ring(e) == s.ring(d), Implies(near(e, d), e == d)))),
        }

    def init(self, s):
        return {
            'empty rings': s.all(lambda v: And(s.first(v) == 0, s.harvested(v) == 0, s.pushed(v) == 0)),
            'no marks': s.all(lambda x: s.mark(x) == 0),
            'no fault': s.all(lambda v: s.fpc(v) == OUT),
            'no harvest': And(s.all(lambda h: s.hpc(h) == IDLE), s.all(lambda m: s.mpc(m) == NEW)),
            'no reset': s.all(lambda r, v: And(
                s.rpc(r) == UNBEGUN, Not(s.rfirst(r, v)), Not(s.rharvested(r, v)), Not(s.rflushed(r, v)),
                Not(s.remptied(r, v)))),
            'nothing done': s.all(lambda r, e: And(
                Not(s.protected(e)), Not(s.copied(e)), Not(s.due(r, e)), Not(s.did(r, e)), Not(s.takes(r, e)))),
            'nothing flushed': s.all(lambda e, c: Not(s.flushed(e, c))),
            'nothing written': s.all(lambda p: And(
                Not(s.writable(p)), Not(s.uncopied(p)), s.all(lambda c: Not(s.tlb(c, p))))),
        }

    # A fault of a vCPU.

    def step_restore_write(self, s, v: 'Vcpu', p: 'Page'):
        """vcpu/on_leaf.rs: restore_to"""
        late = self.without('push-after-write-access')
        has_room = Or(self.without('room'), s.pushed(v) - s.first(v) < s.size())
        may = And(s.fpc(v) == GIVES, s.fpage(v) == p) if late else And(s.fpc(v) == OUT, has_room)
        return And(may, Not(s.writable(p))), {
            'writable': put(s.writable, p, True), 'giver': put(s.giver, p, v), 'fpage': put(s.fpage, v, p),
            'fpc': put(s.fpc, v, OUT if late else GAVE)}

    def step_write_cell(self, s, v: 'Vcpu', e: 'Entry', p: 'Page'):
        """dirty/ring.rs: push"""
        late = self.without('push-after-write-access')
        may = And(s.fpc(v) == OUT, s.pushed(v) - s.first(v) < s.size()) if late \
            else And(s.fpc(v) == GAVE, s.fpage(v) == p)
        after = If(self.without('cell-before-index'), s.index(e) + 1, s.index(e))
        moved = {'fpc': put(s.fpc, v, WROTE)}
        if self.without('cell-before-index'):
            may, moved = And(s.fpc(v) == WROTE, s.fpage(v) == p), {'fpc': put(s.fpc, v, OUT)}
        return And(may, s.ring(e) == v, after == s.pushed(v)), {
            'page': put(s.page, s.cell(e), p), 'pushes': put(s.pushes, e, p), 'fpage': put(s.fpage, v, p),
            **moved}

    def step_push(self, s, v: 'Vcpu', e: 'Entry'):
        """dirty/ring.rs: push (pushed)"""
        early = self.without('cell-before-index')
        late = self.without('push-after-write-access')
        return And(s.fpc(v) == (GAVE if early else WROTE), s.ring(e) == v, s.index(e) == s.pushed(v)), {
            'pushed': put(s.pushed, v, s.pushed(v) + 1), 'last': put(s.last, s.fpage(v), e),
            'pushes': put(s.pushes, e, s.fpage(v)),
            'fpc': put(s.fpc, v, WROTE if early else GIVES if late else OUT)}

    # A harvest takes entries in order.

    def is_harvested(self, s, e):
        return Or(s.index(e) < s.harvested(s.ring(e)), s.mark(s.cell(e)) > s.index(e))

    def step_begin_harvest(self, s, h: 'Harvest'):
        """dirty/ring.rs: harvest (harvested)"""
        return s.hpc(h) <= BEGUN, {'hpc': put(s.hpc, h, BEGUN), 'hnext': put(s.hnext, h, s.harvested(s.hring(h)))}

    def step_choose(self, s, h: 'Harvest', e: 'Entry'):
        """dirty/ring.rs: harvest (first)"""
        v = s.hring(h)
        at = If(s.hnext(h) < s.first(v), s.first(v), s.hnext(h))
        return And(s.hpc(h) == BEGUN, s.ring(e) == v, s.index(e) == at, s.index(e) < s.pushed(v)), {
            'hpc': put(s.hpc, h, CHOSE), 'hentry': put(s.hentry, h, e)}

    def looks(self, s, h):
        return {'hmarked': put(s.hmarked, h, s.mark(s.cell(s.hentry(h))) > s.index(s.hentry(h)))}

    def reads(self, s, h):
        return {'hpage': put(s.hpage, h, s.page(s.cell(s.hentry(h))))}

    def step_read_cell(self, s, h: 'Harvest'):
        """dirty/ring.rs: harvest (page_word)"""
        what = self.looks(s, h) if self.without('page-before-mark') else self.reads(s, h)
        return s.hpc(h) == CHOSE, {'hpc': put(s.hpc, h, READ), **what}

    def step_look_at_mark(self, s, h: 'Harvest'):
        """dirty/ring.rs: harvest (is_marked)"""
        what = self.reads(s, h) if self.without('page-before-mark') else self.looks(s, h)
        return s.hpc(h) == READ, {'hpc': put(s.hpc, h, LOOKED), **what}

    def is_current(self, s, h):
        return s.harvested(s.hring(h)) == s.hnext(h)

    def step_take(self, s, h: 'Harvest'):
        """dirty/ring.rs: harvest (compare_exchange)"""
        new = s.index(s.hentry(h)) + 1
        return And(s.hpc(h) == LOOKED, Or(self.is_current(s, h), self.without('take-by-exchange'))), {
            'hpc': put(s.hpc, h, BEGUN), 'hnext': put(s.hnext, h, new),
            'harvested': put(s.harvested, s.hring(h), new)}

    def step_take_fails(self, s, h: 'Harvest'):
        """dirty/ring.rs: harvest (compare_exchange fails)"""
        return And(s.hpc(h) == LOOKED, Not(self.is_current(s, h))), {
            'hpc': put(s.hpc, h, BEGUN), 'hnext': put(s.hnext, h, s.harvested(s.hring(h)))}

    # A caller reads one entry, and marks it as harvested.

    def step_entry_read(self, s, m: 'Mark'):
        """dirty/ring.rs: entry (page_word)"""
        e = s.of(m)
        blind = self.without('page-before-first')
        return And(s.mpc(m) == NEW, s.index(e) < s.pushed(s.ring(e)),
                   Or(blind, Not(self.is_harvested(s, e)))), {
            'mpc': put(s.mpc, m, KNOWS if blind else SAW), 'mpage': put(s.mpage, m, s.page(s.cell(e)))}

    def step_entry_look(self, s, m: 'Mark'):
        """dirty/ring.rs: entry (first_index)"""
        e = s.of(m)
        return s.mpc(m) == SAW, {'mpc': put(s.mpc, m, If(s.index(e) < s.first(s.ring(e)), NEW, KNOWS))}

    def step_mark(self, s, m: 'Mark'):
        """dirty/ring.rs: mark_harvested"""
        x = s.cell(s.of(m))
        more = s.size() if self.without('mark-names-the-index') else 0
        new = s.index(s.of(m)) + 1 + more
        return s.mpc(m) == KNOWS, {
            'mpc': put(s.mpc, m, NEW), 'mark': put(s.mark, x, If(s.mark(x) < new, new, s.mark(x)))}

    # A reset of all rings.

    def step_begin_reset(self, s, r: 'Reset'):
        """harvest/rings.rs: reset"""
        was = lambda e: s.index(e) < s.harvested(s.ring(e))
        return s.rpc(r) == UNBEGUN, {'rpc': put(s.rpc, r, WALKS),
                                     'due': put_where(s.due, lambda q, e: And(q == r, was(e)), True)}

    def step_read_first(self, s, r: 'Reset', v: 'Vcpu'):
        """dirty/ring.rs: reset (first)"""
        return And(s.rpc(r) == WALKS, Not(s.rfirst(r, v))), {
            'rfirst': put(s.rfirst, (r, v), True), 'rnext': put(s.rnext, (r, v), s.first(v))}

    def step_read_harvested(self, s, r: 'Reset', v: 'Vcpu'):
        """dirty/ring.rs: reset (harvested; a reset passes no more entries than the ring holds)"""
        end = s.rnext(r, v) + s.size()
        return And(s.rpc(r) == WALKS, s.rfirst(r, v), Not(s.rharvested(r, v))), {
            'rharvested': put(s.rharvested, (r, v), True),
            'rend': put(s.rend, (r, v), If(s.harvested(v) < end, s.harvested(v), end))}

    def is_next(self, s, r, e):
        v = s.ring(e)
        known = Or(s.index(e) < s.rend(r, v), s.mark(s.cell(e)) > s.index(e))
        return And(s.rpc(r) == WALKS, s.rharvested(r, v), s.index(e) == s.rnext(r, v), known)

    def step_read_entry(self, s, r: 'Reset', e: 'Entry'):
        """dirty/ring.rs: Reset::next (if another reset was faster, the cell may have another page)"""
        return self.is_next(s, r, e), {
            'rnext': put(s.rnext, (r, s.ring(e)), s.index(e) + 1), 'takes': put(s.takes, (r, e), True),
            'rpage': put(s.rpage, (r, e), s.page(s.cell(e)))}

    def step_protect(self, s, r: 'Reset', p: 'Page'):
        """harvest/rings.rs: protect"""
        skips = self.without('protect-each')
        mine = lambda q, e: And(q == r, s.takes(r, e), s.rpage(r, e) == p)
        found = lambda e: And(mine(r, e), s.pushes(e) == p)
        return And(s.rpc(r) == WALKS, s.some(lambda e: mine(r, e))), {
            'writable': put(s.writable, p, And(skips, s.writable(p))),
            'takes': put_where(s.takes, mine, False), 'protected': put_where(s.protected, found, True),
            'did': put_where(s.did, lambda q, e: And(q == r, found(e)), True)}

    def step_walked(self, s, r: 'Reset'):
        """harvest/rings.rs: reset (flush)"""
        return And(s.rpc(r) == WALKS, s.all(lambda e: Not(s.takes(r, e))), s.all(
            lambda v: And(s.rharvested(r, v), s.rnext(r, v) >= s.rend(r, v)))), {
            'rpc': put(s.rpc, r, FLUSHES)}

    def step_flush(self, s, r: 'Reset', c: 'Vcpu'):
        """harvest/rings.rs: reset (flush)"""
        of_reset = lambda p: s.some(lambda e: And(s.did(r, e), s.pushes(e) == p))
        return s.rpc(r) == FLUSHES, {
            'rflushed': put(s.rflushed, (r, c), True),
            'tlb': put_where(s.tlb, lambda d, p: And(d == c, of_reset(p)), False),
            'flushed': put_where(s.flushed, lambda e, d: And(d == c, s.did(r, e)), True)}

    def step_flushed(self, s, r: 'Reset'):
        """harvest/rings.rs: reset (the flush is over)"""
        over = True if self.without('flush-before-empty') else s.all(lambda c: s.rflushed(r, c))
        return And(s.rpc(r) == FLUSHES, over), {'rpc': put(s.rpc, r, EMPTIES)}

    def step_empty(self, s, r: 'Reset', v: 'Vcpu'):
        """dirty/ring.rs: finish_reset"""
        moves = Or(self.without('maximum'), s.first(v) < s.rnext(r, v))
        return And(s.rpc(r) == EMPTIES, Not(s.remptied(r, v))), {
            'first': put(s.first, v, If(moves, s.rnext(r, v), s.first(v))),
            'remptied': put(s.remptied, (r, v), True)}

    def step_return(self, s, r: 'Reset'):
        """harvest/rings.rs: reset returns"""
        return And(s.rpc(r) == EMPTIES, s.all(lambda v: s.remptied(r, v))), {'rpc': put(s.rpc, r, RETURNED)}

    def step_copy(self, s, r: 'Reset', e: 'Entry'):
        """The caller copies the page of an entry that it harvested before the reset"""
        knows = Or(s.due(r, e), And(self.is_harvested(s, e), s.index(e) < s.first(s.ring(e))))
        return And(s.rpc(r) == RETURNED, knows, s.index(e) < s.pushed(s.ring(e))), {
            'copied': put(s.copied, e, True), 'uncopied': put(s.uncopied, s.pushes(e), False)}

    # The guest, and what else takes W away.

    def step_fill_tlb(self, s, c: 'Vcpu', p: 'Page'):
        """A CPU caches a leaf"""
        return s.writable(p), {'tlb': put(s.tlb, (c, p), True)}

    def step_evict_tlb(self, s, c: 'Vcpu', p: 'Page'):
        """A CPU drops a leaf, or another operation flushes it"""
        return s.tlb(c, p), {'tlb': put(s.tlb, (c, p), False)}

    def step_guest_write(self, s, c: 'Vcpu', p: 'Page'):
        """A CPU writes through a cached leaf"""
        return s.tlb(c, p), {'uncopied': put(s.uncopied, p, True)}

    def step_drop_write(self, s, p: 'Page'):
        """second_stage/zap.rs: visit"""
        return s.writable(p), {'writable': put(s.writable, p, False)}

    # What is promised.

    def will_push(self, s, p):
        return And(s.fpc(s.giver(p)) >= GAVE, s.fpage(s.giver(p)) == p)

    def is_pushed(self, s, p):
        e = s.last(p)
        return And(s.index(e) < s.pushed(s.ring(e)), s.pushes(e) == p)

    def is_done(self, s, e, c):
        return And(s.protected(e), s.flushed(e, c))

    def safe(self, s):
        return {
            'a write is in a ring, not copied yet, or about to be pushed': s.all(lambda p: Implies(
                s.uncopied(p), Or(self.will_push(s, p),
                                  And(self.is_pushed(s, p), Not(s.copied(s.last(p))))))),
            'when a reset returns, what was harvested before is protected and flushed': s.all(
                lambda r, e, c: Implies(
                And(s.rpc(r) == RETURNED, s.due(r, e)), self.is_done(s, e, c))),
            'a harvest hands out the page that was pushed': s.all(lambda h: Implies(
                And(s.hpc(h) == LOOKED, Not(s.hmarked(h)), self.is_current(s, h)),
                s.hpage(h) == s.pushes(s.hentry(h)))),
            'a caller that marks an entry knows the page that was pushed': s.all(lambda m: Implies(
                s.mpc(m) == KNOWS, s.mpage(m) == s.pushes(s.of(m)))),
        }

    def inv(self, s):
        return {**self.inv_of_indices(s), **self.inv_of_harvests(s), **self.inv_of_resets(s), **self.heart(s)}

    def inv_of_indices(self, s):
        in_ring = lambda e: And(s.first(s.ring(e)) <= s.index(e), s.index(e) < s.pushed(s.ring(e)))
        return {
            'counters are in their ranges': And(
                s.all(lambda v: And(s.fpc(v) >= OUT, s.fpc(v) <= GIVES)),
                s.all(lambda h: And(s.hpc(h) >= IDLE, s.hpc(h) <= LOOKED)),
                s.all(lambda m: And(s.mpc(m) >= NEW, s.mpc(m) <= KNOWS)),
                s.all(lambda r: And(s.rpc(r) >= UNBEGUN, s.rpc(r) <= RETURNED))),
            'indices are in order': s.all(lambda v: And(
                0 <= s.harvested(v), 0 <= s.first(v), s.harvested(v) <= s.pushed(v),
                s.first(v) <= s.pushed(v))),
            'a ring is not overfull': s.all(lambda v: And(
                s.pushed(v) - s.first(v) <= s.size(),
                Implies(s.fpc(v) >= GAVE, s.pushed(v) - s.first(v) < s.size()))),
            'an entry keeps its page until it is empty': s.all(lambda e: Implies(
                in_ring(e), s.page(s.cell(e)) == s.pushes(e))),
            'a fault has written its page into the next cell': s.all(lambda e: Implies(
                And(s.fpc(s.ring(e)) == WROTE, s.index(e) == s.pushed(s.ring(e))),
                And(s.page(s.cell(e)) == s.fpage(s.ring(e)), s.pushes(e) == s.fpage(s.ring(e))))),
            'only what was pushed is marked': s.all(lambda e: Implies(
                s.mark(s.cell(e)) > s.index(e), s.index(e) < s.pushed(s.ring(e)))),
            'only what was harvested is empty': s.all(lambda e: Implies(
                s.index(e) < s.first(s.ring(e)), self.is_harvested(s, e))),
        }

    def inv_of_harvests(self, s):
        e = s.hentry
        marked = lambda d: s.mark(s.cell(d)) > s.index(d)
        return {
            'a harvest has read `harvested`': s.all(lambda h: Implies(
                s.hpc(h) >= BEGUN, s.hnext(h) <= s.harvested(s.hring(h)))),
            'a harvest is at a pushed entry': s.all(lambda h: Implies(
                s.hpc(h) >= CHOSE, And(s.ring(e(h)) == s.hring(h), s.index(e(h)) < s.pushed(s.hring(h)),
                                       s.hnext(h) <= s.index(e(h))))),
            'what a harvest passes was harvested': s.all(lambda h, d: Implies(
                And(s.hpc(h) >= CHOSE, s.ring(d) == s.ring(e(h)), s.hnext(h) <= s.index(d),
                    s.index(d) < s.index(e(h))), self.is_harvested(s, d))),
            'a harvest has read the page, or the entry was harvested since': s.all(lambda h: Implies(
                s.hpc(h) == READ, Or(s.hpage(h) == s.pushes(e(h)), marked(e(h)),
                                     Not(self.is_current(s, h))))),
            'a caller has read the page, or the entry is empty': s.all(lambda m: Implies(
                s.mpc(m) >= SAW, And(
                    s.index(s.of(m)) < s.pushed(s.ring(s.of(m))),
                    Or(s.mpage(m) == s.pushes(s.of(m)), s.index(s.of(m)) < s.first(s.ring(s.of(m))))))),
        }

    def inv_of_resets(self, s):
        return {
            'what is empty was protected and flushed': s.all(lambda e, c: Implies(
                s.index(e) < s.first(s.ring(e)), self.is_done(s, e, c))),
            'a reset has protected what it has passed, or another has': s.all(lambda r, e, c: Implies(
                And(s.rpc(r) >= WALKS, s.rfirst(r, s.ring(e)), s.index(e) < s.rnext(r, s.ring(e))),
                Or(s.did(r, e), self.is_done(s, e, c), And(s.takes(r, e), s.rpage(r, e) == s.pushes(e))))),
            'a reset protects what it has read before it flushes': s.all(lambda r, e: Implies(
                s.takes(r, e), And(s.rpc(r) == WALKS, s.rfirst(r, s.ring(e)), s.index(e) < s.rnext(r, s.ring(e))))),
            'a reset passes what was harvested': s.all(lambda r, e: Implies(
                And(s.rfirst(r, s.ring(e)), s.index(e) < s.rnext(r, s.ring(e))), self.is_harvested(s, e))),
            'a reset passes what was pushed': s.all(lambda r, v: And(
                Implies(s.rfirst(r, v), s.rnext(r, v) <= s.pushed(v)),
                Implies(s.rharvested(r, v), And(s.rfirst(r, v), s.rend(r, v) <= s.harvested(v))))),
            'a reset that flushes has passed what was harvested': s.all(lambda r, v: Implies(
                s.rpc(r) >= FLUSHES, And(s.rharvested(r, v), s.rnext(r, v) >= s.rend(r, v)))),
            'a reset that has not begun has read nothing': s.all(lambda r, v: Implies(
                s.rfirst(r, v), s.rpc(r) >= WALKS)),
            'a reset reads `harvested` after it began': s.all(lambda r, e: Implies(
                s.due(r, e), And(s.rpc(r) >= WALKS, s.index(e) < s.harvested(s.ring(e)),
                                 Implies(s.rharvested(r, s.ring(e)), s.index(e) < s.rend(r, s.ring(e)))))),
            'what a reset must do is not beyond its walk': s.all(lambda r, e: Implies(
                s.due(r, e), And(s.index(e) < s.first(s.ring(e)) + s.size(), Implies(
                    And(s.rfirst(r, s.ring(e)), Not(s.rharvested(r, s.ring(e)))),
                    s.index(e) < s.rnext(r, s.ring(e)) + s.size())))),
            'a reset that flushes has passed what it must': s.all(lambda r, e: Implies(
                And(s.rpc(r) >= FLUSHES, s.due(r, e)), s.index(e) < s.rnext(r, s.ring(e)))),
            'what a reset has passed is done on each CPU that it has flushed': s.all(lambda r, e, c: Implies(
                And(s.rflushed(r, c), s.index(e) < s.rnext(r, s.ring(e))), self.is_done(s, e, c))),
            'what a reset that empties has passed is done': s.all(lambda r, e, c: Implies(
                And(s.rpc(r) >= EMPTIES, s.index(e) < s.rnext(r, s.ring(e))), self.is_done(s, e, c))),
            'what a reset did is protected': s.all(lambda r, e: Implies(s.did(r, e), s.protected(e))),
            'only what was pushed is protected': s.all(lambda e: Implies(
                s.protected(e), s.index(e) < s.pushed(s.ring(e)))),
            'what is flushed is protected': s.all(lambda e, c: Implies(s.flushed(e, c), s.protected(e))),
            'a reset flushes what it did': s.all(lambda r, e, c: Implies(
                And(s.rflushed(r, c), s.did(r, e)), s.flushed(e, c))),
            'a reset flushes after its walk': s.all(lambda r, c: Implies(
                s.rflushed(r, c), s.rpc(r) >= FLUSHES)),
            'a reset makes entries empty when its flush is over': s.all(lambda r, c: Implies(
                s.rpc(r) >= EMPTIES, s.rflushed(r, c))),
            'what is copied is protected and flushed': s.all(lambda e, c: Implies(
                s.copied(e), self.is_done(s, e, c))),
        }

    def heart(self, s):
        covered = lambda p, is_late: Or(self.will_push(s, p),
                                        And(self.is_pushed(s, p), Not(is_late(s.last(p)))))
        return {
            'what can be written is in a ring, not protected yet, or about to be pushed': s.all(
                lambda p: Implies(s.writable(p), covered(p, s.protected))),
            'what is cached as writable is in a ring, not flushed yet, or about to be pushed': s.all(
                lambda c, p: Implies(s.tlb(c, p), covered(p, lambda e: s.flushed(e, c)))),
        }

    sizes = {'Vcpu': 1, 'Page': 1, 'Entry': 2, 'Cell': 2, 'Harvest': 2, 'Mark': 1, 'Reset': 2}
    one = {**sizes, 'Harvest': 1, 'Reset': 1, 'Cell': 1}
    two_pages = {**one, 'Page': 2}
    start = {'index': lambda e: int(e[-1]), 'size': lambda: 1}
    traces = {
        'push-after-write-access': {'sizes': one, 'start': start},
        'room': {'sizes': two_pages, 'start': start},
        'cell-before-index': {'sizes': two_pages, 'start': start},
        'page-before-first': {'sizes': two_pages, 'start': start},
        'mark-names-the-index': {'sizes': {**one, 'Cell': 2}, 'start': start},
        'protect-each': {'sizes': one, 'start': start},
        'flush-before-empty': {'sizes': one, 'start': start},
    }


if __name__ == '__main__':
    prover.main(DirtyRings)
