"""Lazy protection: one directory entry without W protects all leaves below it, until a write pushes down.

Any number of vCPUs, harvests, pages, directory entries ("blocks"). Engine: `second_stage/protect.rs`,
`second_stage/push_down.rs`, `harvest/log.rs`, `vm/region.rs`, `vcpu/on_leaf.rs`.

A harvest (and enabling) protects a page by its leaf, or protects the directory entry above: its generation
moves on in any case. A fault below a protected entry pushes down: it reads the entry, then the flag; if the
memslot logs it clears W of the other leaves; it sets W of its own leaf; it restores W of the entry by an
exchange from the value that it read; it reads the flag again, and marks its page even if the exchange failed.
A CPU may have the unprotected entry cached (`psc`) and fill its TLB by way of it.

Covered: leaves that are installed below a protected entry; page-table pages that are unlinked and replaced;
logging that ends and begins again, with all bits clear at first or all set.

Left out: generations that come back: here they are integers; `generation_windows.py` proves that the value
that a push-down read does not come back in its guard. A walk that begins before the bits are taken. The
summary of the bitmap, huge leaves and the VMM's marks (`dirty_log.py`).
"""
import prover
from log_steps import (
    ARMED, FLAGGED, FLUSHES, OFF, ON, RETURNED, TAKES, UNBEGUN, WriteProtection, inv_of_enabling,
    inv_of_protecting)
from prover import And, If, Implies, Not, Or, put, put_where

OUT, READ, CLEARS, SET, GAVE, MARKS = range(6)          # of a fault; from SET on it has set W of its leaf


class LazyProtection(WriteProtection):
    sorts = ['Fault', 'Harvest', 'Page', 'Block', 'Cpu']
    letters = {'f': 'Fault', 'h': 'Harvest', 'p': 'Page', 'q': 'Page', 'b': 'Block', 'c': 'Cpu'}
    fixed = {'page': (['Fault'], 'Page'), 'block': (['Page'], 'Block'), 'initially_set': ([], 'bool')}
    state = {
        'writable': (['Page'], 'bool'), 'open': (['Block'], 'bool'), 'generation': (['Block'], 'int'),
        'bit': (['Page'], 'bool'), 'flag': ([], 'bool'),
        'tlb': (['Cpu', 'Page'], 'bool'), 'psc': (['Cpu', 'Block'], 'bool'),
        'fpc': (['Fault'], 'int'), 'fread': (['Fault'], 'int'), 'flogs': (['Fault'], 'bool'),
        'fcleared': (['Fault', 'Page'], 'bool'),
        'hpc': (['Harvest'], 'int'), 'holds': (['Harvest', 'Page'], 'bool'),
        'rearmed': (['Harvest', 'Page'], 'bool'), 'flushed': (['Harvest', 'Cpu'], 'bool'),
        'epc': ([], 'int'), 'armed': (['Page'], 'bool'), 'eflushed': (['Cpu'], 'bool'),
        # Ghosts: written and not reported; the last fault that set W, the last harvest that took the bit.
        'unreported': (['Page'], 'bool'), 'giver': (['Page'], 'Fault'), 'taker': (['Page'], 'Harvest'),
    }
    rules = {
        'always-move-on': 'Protecting a directory entry that is protected keeps its generation.',
        'exchange-what-was-read': 'A push-down restores W of the directory entry whatever its generation is.',
        'clear-the-others': 'A push-down does not clear W of the other leaves.',
        'flag-after-entry': 'A push-down reads the flag, and then the directory entry.',
        'flag-again': 'A push-down does not read the flag again after it has set W.',
        'mark-if-overtaken': 'A push-down whose exchange failed does not mark its page.',
        'mark-prefaults': 'A prefault below a protected entry installs a leaf with W and does not mark it.',
        'protect-below': 'A harvest that protects leaf by leaf changes nothing below a protected entry.',
        'flush-directory-entries': 'The flush of a harvest leaves directory entries that CPUs have cached.',
        'flag-before-protect': 'Enabling protects before it publishes the flag.',
        'set-after-flag': 'Enabling sets all bits before it publishes the flag.',
    }

    def init(self, s):
        return {
            'nothing is marked': s.all(lambda p: And(Not(s.bit(p)), Not(s.unreported(p)), Not(s.armed(p)))),
            'no memslot logs': And(Not(s.flag()), s.epc() == OFF),
            'no fault': s.all(lambda f: s.fpc(f) == OUT),
            'no harvest': s.all(lambda h: s.hpc(h) == UNBEGUN),
            'nothing taken': s.all(lambda h, p: And(Not(s.holds(h, p)), Not(s.rearmed(h, p)))),
            'nothing flushed': And(s.all(lambda h, c: Not(s.flushed(h, c))),
                                   s.all(lambda c: Not(s.eflushed(c)))),
        }

    # A fault.

    def gives(self, s, f):
        return {'writable': put(s.writable, s.page(f), True), 'giver': put(s.giver, s.page(f), f)}

    def step_restore_write(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to; vcpu/act.rs: install_at (a prefault below a protected entry, too)"""
        then = GAVE
        if self.without('mark-prefaults'):
            then = If(s.open(s.block(s.page(f))), GAVE, OUT)
        return And(s.fpc(f) == OUT, Not(s.writable(s.page(f)))), {
            **self.gives(s, f), 'fpc': put(s.fpc, f, then)}

    def step_read_entry(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down"""
        b = s.block(s.page(f))
        at, then = (READ, CLEARS) if self.without('flag-after-entry') else (OUT, READ)
        return And(s.fpc(f) == at, Not(s.open(b))), {
            'fpc': put(s.fpc, f, then), 'fread': put(s.fread, f, s.generation(b)),
            'fcleared': put_where(s.fcleared, lambda g, q: g == f, False)}

    def step_read_others(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: push_down_in (others)"""
        at, then = (OUT, READ) if self.without('flag-after-entry') else (READ, CLEARS)
        return s.fpc(f) == at, {'fpc': put(s.fpc, f, then), 'flogs': put(s.flogs, f, s.flag())}

    def is_other(self, s, f, q):
        return And(s.block(q) == s.block(s.page(f)), q != s.page(f))

    def step_clear_other(self, s, f: 'Fault', q: 'Page'):
        """second_stage/push_down.rs: protect_all"""
        keeps = self.without('clear-the-others')
        return And(s.fpc(f) == CLEARS, s.flogs(f), self.is_other(s, f, q)), {
            'writable': put(s.writable, q, And(keeps, s.writable(q))),
            'fcleared': put(s.fcleared, (f, q), True)}

    def step_set_own(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (restore_access)"""
        cleared = s.all(lambda q: Implies(self.is_other(s, f, q), s.fcleared(f, q)))
        return And(s.fpc(f) == CLEARS, Or(Not(s.flogs(f)), cleared)), {
            **self.gives(s, f), 'fpc': put(s.fpc, f, SET)}

    def step_unprotect(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (compare_exchange)"""
        b = s.block(s.page(f))
        is_same = Or(self.without('exchange-what-was-read'), s.generation(b) == s.fread(f))
        then = If(s.flogs(f), MARKS, OUT) if self.without('flag-again') else GAVE
        return And(s.fpc(f) == SET, Not(s.open(b)), is_same), {
            'open': put(s.open, b, True), 'fpc': put(s.fpc, f, then)}

    def step_unprotect_fails(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (Pushed::LeafOnly)"""
        then = OUT if self.without('mark-if-overtaken') else GAVE
        return And(s.fpc(f) == SET, Or(s.open(s.block(s.page(f))),
                                       s.generation(s.block(s.page(f))) != s.fread(f))), {
            'fpc': put(s.fpc, f, then)}

    def step_change_own(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (Changed: the leaf was zapped, or the entry is gone)"""
        return Or(s.fpc(f) == READ, s.fpc(f) == CLEARS), {'fpc': put(s.fpc, f, OUT)}

    def step_read_flag(self, s, f: 'Fault'):
        """dirty/log.rs: mark_if_logging"""
        return s.fpc(f) == GAVE, {'fpc': put(s.fpc, f, If(s.flag(), MARKS, OUT))}

    def step_find_marked(self, s, f: 'Fault'):
        """slot/bitmap.rs: mark_page"""
        return And(s.fpc(f) == MARKS, s.bit(s.page(f))), {'fpc': put(s.fpc, f, OUT)}

    def step_set_bit(self, s, f: 'Fault'):
        """slot/bitmap.rs: mark_page"""
        return s.fpc(f) == MARKS, {'fpc': put(s.fpc, f, OUT), 'bit': put(s.bit, s.page(f), True)}

    # A harvest.

    def step_protect_leaf(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: protect_leaf"""
        skips = And(self.without('protect-below'), Not(s.open(s.block(p))))
        return And(s.hpc(h) == TAKES, s.holds(h, p)), {
            'rearmed': put(s.rearmed, (h, p), True),
            'writable': put(s.writable, p, And(skips, s.writable(p)))}

    def protects(self, s, b):
        """The directory entry of the block protected."""
        moves = Or(not self.without('always-move-on'), s.open(b))
        return {'open': put(s.open, b, False),
                'generation': put(s.generation, b, If(moves, s.generation(b) + 1, s.generation(b)))}

    def step_protect_entry(self, s, h: 'Harvest', b: 'Block'):
        """second_stage/protect.rs: close"""
        mine = lambda g, p: And(g == h, s.block(p) == b, s.holds(h, p))
        return s.hpc(h) == TAKES, {**self.protects(s, b), 'rearmed': put_where(s.rearmed, mine, True)}

    def step_flush(self, s, h: 'Harvest', c: 'Cpu'):
        """harvest/log.rs: harvest (flush_cpus)"""
        entries = not self.without('flush-directory-entries')
        above = lambda b: And(entries, s.some(lambda p: And(s.block(p) == b, s.holds(h, p))))
        return s.hpc(h) == FLUSHES, {
            'flushed': put(s.flushed, (h, c), True),
            'tlb': put_where(s.tlb, lambda d, p: And(d == c, s.holds(h, p)), False),
            'psc': put_where(s.psc, lambda d, b: And(d == c, above(b)), False)}

    # Logging begins and ends.

    def step_enabling_protects_leaf(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot, protect_leaf"""
        return self.may_protect(s), {'writable': put(s.writable, p, False), 'armed': put(s.armed, p, True)}

    def step_enabling_protects_entry(self, s, b: 'Block'):
        """second_stage/protect.rs: protect_slot, close"""
        return self.may_protect(s), {
            **self.protects(s, b), 'armed': put_where(s.armed, lambda p: s.block(p) == b, True)}

    def step_enabling_flushes(self, s, c: 'Cpu'):
        """vm/region.rs: begin_to_log"""
        return And(s.epc() == ARMED, Not(s.initially_set())), {
            'eflushed': put(s.eflushed, c, True), 'tlb': put_where(s.tlb, lambda d, p: d == c, False),
            'psc': put_where(s.psc, lambda d, b: d == c, False)}

    def step_disable(self, s):
        """vm/region.rs: change_slot"""
        return s.epc() == ON, {'flag': lambda: False, 'epc': lambda: OFF, 'armed': lambda p: False,
                               'eflushed': lambda c: False, 'unreported': lambda p: False}

    # The guest, and what else takes W away.

    def step_cache_entry(self, s, c: 'Cpu', b: 'Block'):
        """A CPU caches an unprotected directory entry"""
        return s.open(b), {'psc': put(s.psc, (c, b), True)}

    def step_fill_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU caches a leaf, by the directory entry or by one that it has cached"""
        return And(s.writable(p), Or(s.open(s.block(p)), s.psc(c, s.block(p)))), {
            'tlb': put(s.tlb, (c, p), True)}

    def step_evict_entry(self, s, c: 'Cpu', b: 'Block'):
        """A CPU drops a directory entry, or another operation flushes it"""
        return s.psc(c, b), {'psc': put(s.psc, (c, b), False)}

    def step_evict_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU drops a leaf, or another operation flushes it"""
        return s.tlb(c, p), {'tlb': put(s.tlb, (c, p), False)}

    def step_drop_write(self, s, p: 'Page'):
        """second_stage/zap.rs: visit; second_stage/age.rs: age_leaf (tracked)"""
        return s.writable(p), {'writable': put(s.writable, p, False)}

    def step_replace_table(self, s, b: 'Block'):
        """second_stage/zap.rs: visit (unlinks), then vcpu/act.rs: install_at (links another)"""
        return True, {'open': put(s.open, b, True), 'generation': put(s.generation, b, s.generation(b) + 1),
                      'writable': put_where(s.writable, lambda p: s.block(p) == b, False)}

    # What is promised.

    def will_mark(self, s, p):
        """The fault that set W last is about to mark the page."""
        return And(s.fpc(s.giver(p)) >= SET, s.page(s.giver(p)) == p)

    def inv(self, s):
        return {**inv_of_enabling(s), **inv_of_protecting(s), **self.inv_of_push_downs(s), **self.heart(s)}

    def inv_of_push_downs(self, s):
        pushes = lambda f: And(READ <= s.fpc(f), s.fpc(f) <= SET)
        return {
            'a fault is OUT to MARKS': s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= MARKS)),
            'generations rise': s.all(lambda f: Implies(
                pushes(f), s.fread(f) <= s.generation(s.block(s.page(f))))),
            'a push-down that has set W has cleared the others': s.all(lambda f, q: Implies(
                And(s.fpc(f) == SET, s.flogs(f), self.is_other(s, f, q)), s.fcleared(f, q))),
            'a push-down clears after it has read the flag': s.all(lambda f, q: Implies(
                And(pushes(f), s.fcleared(f, q)), And(s.fpc(f) >= CLEARS, s.flogs(f)))),
        }

    def heart(self, s):
        """Some thread marks or reports what can be written, or is cached so, or will be by a push-down."""
        covered = lambda p: Or(s.bit(p), And(self.held(s, p), Not(s.rearmed(s.taker(p), p))),
                            self.will_mark(s, p))
        covered_on = lambda c, p: Or(s.bit(p), And(self.held(s, p), Not(s.flushed(s.taker(p), c))),
                                  self.will_mark(s, p))
        counts = lambda c, p: Or(s.eflushed(c), And(s.initially_set(), s.armed(p)))
        pushes = lambda f: And(CLEARS <= s.fpc(f), s.fpc(f) <= SET)
        is_done = lambda f, q: Or(Not(s.flogs(f)), s.fcleared(f, q), And(s.fpc(f) == SET, q == s.page(f)))
        return {
            'what a push-down will make writable is marked or about to be': s.all(lambda f, q: Implies(
                And(pushes(f), s.armed(q), s.block(q) == s.block(s.page(f)), is_done(f, q), s.writable(q),
                    s.fread(f) == s.generation(s.block(q))), covered(q))),
            'what can be written is marked or about to be': s.all(lambda p: Implies(
                And(s.armed(p), s.writable(p), s.open(s.block(p))), covered(p))),
            'what a cached directory entry makes writable is marked or about to be': s.all(
                lambda c, p: Implies(
                And(counts(c, p), s.psc(c, s.block(p)), s.writable(p)), covered_on(c, p))),
            'what is cached as writable is marked or about to be': s.all(lambda c, p: Implies(
                And(counts(c, p), s.tlb(c, p)), covered_on(c, p))),
        }

    sizes = {'Fault': 2, 'Harvest': 1, 'Page': 2, 'Block': 1, 'Cpu': 1}
    one = {**sizes, 'Fault': 1, 'Page': 1}
    own = {'page': lambda f: 'page' + f[-1]}
    logging = {**own, 'epc': lambda: ON, 'flag': lambda: True, 'armed': lambda p: True,
               'eflushed': lambda c: True, 'writable': lambda p: True, 'bit': lambda p: True}
    taken = {**logging, 'bit': lambda p: p == 'page1'}     # page 0 is protected by the entry, and not marked
    off = {**own, 'writable': lambda p: True}
    cleared = {**taken, 'fpc': lambda f: CLEARS, 'flogs': lambda f: True,
               'fcleared': lambda f, q: q == 'page1'}
    traces = {
        'always-move-on': {'sizes': {**sizes, 'Fault': 1}, 'start': off},
        'exchange-what-was-read': {'sizes': {**sizes, 'Fault': 1}, 'start': off},
        'clear-the-others': {'sizes': {**sizes, 'Fault': 1}, 'start': {**taken, 'bit': lambda p: False}},
        'flag-after-entry': {'sizes': {**sizes, 'Fault': 1}, 'start': off},
        'flag-again': {'sizes': one, 'start': {}},
        'mark-if-overtaken': {'sizes': sizes, 'start': {**taken, 'bit': lambda p: False}},
        'mark-prefaults': {'sizes': {**sizes, 'Fault': 2}, 'start': {**taken, 'writable': lambda p: False}},
        'protect-below': {'sizes': {**sizes, 'Fault': 1}, 'start': cleared},
        'flush-directory-entries': {'sizes': one, 'start': {**logging, 'open': lambda b: True}},
        'flag-before-protect': {'sizes': one, 'start': {}},
        'set-after-flag': {'sizes': one, 'start': {'initially_set': lambda: True, 'open': lambda b: True}},
    }


if __name__ == '__main__':
    prover.main(LazyProtection)
