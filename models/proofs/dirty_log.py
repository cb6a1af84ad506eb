"""The dirty log by write protection: any number of vCPUs, harvests, pages, leaves and words of the bitmap.

Engine: `dirty/log.rs` (the protocol), `harvest/log.rs` (harvests), `harvest/mark.rs` (the VMM's marks),
`slot/bitmap.rs` (bitmap and summary), `vm/region.rs` (enabling), `second_stage/protect.rs`.

Covered: leaves of any size, of which a fault marks all pages; `get_dirty_log`; `clear_dirty_log` by
masks; the summary above the words; marks by the VMM. Logging ends and begins again with the same
bitmap, whose bits are all clear at first or all set (`initially_set`). A copy of the log changes
nothing: with manual protect the pages are reported by the clear that follows it.

Left out:
- Memslots that move: they get another bitmap, in which all is marked.
- A new bitmap whose bits are all set: it is published with the flag, so there is less to prove.
- Lazy protection (`lazy_protection.py`) and dirty bits (`dirty_bits.py`).
- Memory order: memory is sequentially consistent here.
"""
import prover
from log_steps import (
    ARMED, FLAGGED, FLUSHES, OFF, ON, RETURNED, TAKES, UNBEGUN, inv_of_enabling, inv_of_protecting)
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

OUT, GAVE, MARKS, UNLOGGED = range(4)                   # of a fault; UNLOGGED is for a rule left out
IDLE, WROTE, LOGS, SUMMARIZES = range(4)                # of a call by which the VMM marks a page
UNVISITED, EMPTIED, OWES, DONE = range(4)               # of a harvest at a word; EMPTIED: of its summary


class DirtyLog(Protocol):
    sorts = ['Fault', 'Harvest', 'Mark', 'Leaf', 'Page', 'Word', 'Cpu']
    letters = {'f': 'Fault', 'h': 'Harvest', 'g': 'Harvest', 'm': 'Mark', 'l': 'Leaf', 'p': 'Page',
               'w': 'Word',
               'c': 'Cpu'}
    fixed = {
        'leaf_of': (['Fault'], 'Leaf'), 'page_of': (['Mark'], 'Page'), 'leaf': (['Page'], 'Leaf'),
        'word': (['Page'], 'Word'), 'masks': (['Harvest'], 'bool'), 'named': (['Harvest', 'Page'], 'bool'),
        'initially_set': ([], 'bool'),
    }
    state = {
        'writable': (['Leaf'], 'bool'), 'bit': (['Page'], 'bool'), 'summary': (['Word'], 'bool'),
        'flag': ([], 'bool'),
        'tlb': (['Cpu', 'Leaf'], 'bool'),               # cached as writable
        'fpc': (['Fault'], 'int'), 'fdone': (['Fault', 'Page'], 'bool'),
        'fowes': (['Fault', 'Word'], 'bool'),
        'mpc': (['Mark'], 'int'),
        'hpc': (['Harvest'], 'int'), 'hword': (['Harvest', 'Word'], 'int'),
        'holds': (['Harvest', 'Page'], 'bool'),
        'rearmed': (['Harvest', 'Page'], 'bool'), 'changed': (['Harvest', 'Page'], 'bool'),
        'flushed': (['Harvest', 'Cpu'], 'bool'),
        'epc': ([], 'int'), 'armed': (['Page'], 'bool'), 'eflushed': (['Cpu'], 'bool'),
        'wiping': (['Word'], 'bool'), 'eowes': (['Word'], 'bool'),
        # Ghosts: what was written and not reported; what a harvest must report; who acted last.
        'unreported': (['Page'], 'bool'), 'due': (['Harvest', 'Page'], 'bool'),
        'giver': (['Leaf'], 'Fault'), 'taker': (['Page'], 'Harvest'), 'emptier': (['Word'], 'Harvest'),
        'fmarker': (['Page'], 'Fault'), 'mmarker': (['Page'], 'Mark'), 'writer': (['Page'], 'Mark'),
    }
    rules = {
        'bit-after-write-access': 'A fault reads whether the page is marked before it restores W.',
        'flag-after-write-access': 'A fault reads whether the memslot logs before it restores W.',
        'mark-all-pages': 'A fault marks one page of a huge leaf, and not all.',
        'word-before-summary': 'A call that marks sets the summary before the word.',
        'take-before-protect': 'A harvest protects leaves, and then takes the bits.',
        'summary-before-word': 'A harvest takes the word, and then clears the summary.',
        'summarize-again': 'A clear by masks does not set the summary again for what it has left.',
        'look-at-the-rest': 'A clear by masks does not look at what is left where it found nothing to take.',
        'flush-what-was-taken': 'A harvest flushes only leaves whose W it has cleared.',
        'flush-before-return': 'A harvest returns before its flush is over.',
        'flag-before-protect': 'Enabling protects leaves before it publishes the flag.',
        'enabling-flushes': 'Enabling does not flush.',
        'wipe-before-flag': 'Enabling clears old marks after it has published the flag.',
        'set-after-flag': 'Enabling sets all bits before it publishes the flag.',
        'write-before-mark': 'The VMM marks a page before it writes to it.',
    }

    def init(self, s):
        return {
            'nothing is marked': s.all(lambda p: And(Not(s.bit(p)), Not(s.unreported(p)), Not(s.armed(p)))),
            'no memslot logs': And(Not(s.flag()), s.epc() == OFF),
            'no word is being wiped': s.all(lambda w: And(Not(s.wiping(w)), Not(s.eowes(w)))),
            'no fault': s.all(lambda f: s.fpc(f) == OUT),
            'no mark by a fault': s.all(lambda f, p: Not(s.fdone(f, p))),
            'no summary by a fault': s.all(lambda f, w: Not(s.fowes(f, w))),
            'no mark by the VMM': s.all(lambda m: s.mpc(m) == IDLE),
            'no harvest': s.all(lambda h: s.hpc(h) == UNBEGUN),
            'nothing taken': s.all(
                lambda h, p: And(Not(s.holds(h, p)), Not(s.rearmed(h, p)), Not(s.due(h, p)))),
            'no word visited': s.all(lambda h, w: s.hword(h, w) == UNVISITED),
            'nothing flushed': And(s.all(lambda h, c: Not(s.flushed(h, c))),
                                   s.all(lambda c: Not(s.eflushed(c)))),
        }

    # A fault.

    def step_restore_write(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to; vcpu/act.rs: install_at"""
        late_flag = self.without('flag-after-write-access')
        guard = And(s.fpc(f) == (UNLOGGED if late_flag else OUT), Not(s.writable(s.leaf_of(f))))
        return guard, {
            'writable': put(s.writable, s.leaf_of(f), True), 'giver': put(s.giver, s.leaf_of(f), f),
            'fpc': put(s.fpc, f, OUT if late_flag else GAVE)}

    def step_read_flag(self, s, f: 'Fault'):
        """dirty/log.rs: mark_if_logging"""
        if self.without('flag-after-write-access'):
            return And(s.fpc(f) == OUT, Not(s.flag())), {'fpc': put(s.fpc, f, UNLOGGED)}
        return s.fpc(f) == GAVE, {'fpc': put(s.fpc, f, If(s.flag(), MARKS, OUT))}

    def step_find_marked(self, s, f: 'Fault', p: 'Page'):
        """slot/bitmap.rs: mark, mark_page"""
        early = And(self.without('bit-after-write-access'), s.fpc(f) == OUT, s.flag())
        return And(Or(s.fpc(f) == MARKS, early), s.leaf(p) == s.leaf_of(f), s.bit(p)), {
            'fdone': put(s.fdone, (f, p), True)}

    def step_set_bit(self, s, f: 'Fault', p: 'Page'):
        """slot/bitmap.rs: set"""
        return And(s.fpc(f) == MARKS, s.leaf(p) == s.leaf_of(f)), {
            'bit': put(s.bit, p, True), 'fdone': put(s.fdone, (f, p), True), 'fmarker': put(s.fmarker, p, f),
            'fowes': put(s.fowes, (f, s.word(p)), not self.without('word-before-summary'))}

    def step_summarize(self, s, f: 'Fault', w: 'Word'):
        """slot/bitmap.rs: summarize"""
        return s.fowes(f, w), {'summary': put(s.summary, w, True),
                                  'fowes': put(s.fowes, (f, w), False)}

    def step_marked(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to returns"""
        of_leaf = lambda p: s.leaf(p) == s.leaf_of(f)
        every = s.all(lambda p: Implies(of_leaf(p), s.fdone(f, p)))
        if self.without('mark-all-pages'):
            every = s.some(lambda p: And(of_leaf(p), s.fdone(f, p)))
        return And(s.fpc(f) == MARKS, every, s.all(lambda w: Not(s.fowes(f, w)))), {
            'fpc': put(s.fpc, f, OUT), 'fdone': put_where(s.fdone, lambda g, p: g == f, False)}

    # The VMM writes a page itself and marks it.

    def step_vmm_write(self, s, m: 'Mark'):
        """The caller of Vm::mark_dirty"""
        p = s.page_of(m)
        late = self.without('write-before-mark')
        return s.mpc(m) == IDLE, {
            'unreported': put(s.unreported, p, Or(s.unreported(p), s.epc() == ON)),
            'mpc': put(s.mpc, m, IDLE if late else WROTE), 'writer': put(s.writer, p, m)}

    def step_vmm_read_flag(self, s, m: 'Mark'):
        """harvest/mark.rs: mark_pages"""
        return s.mpc(m) == WROTE, {'mpc': put(s.mpc, m, If(s.flag(), LOGS, IDLE))}

    def step_vmm_find_marked(self, s, m: 'Mark'):
        """slot/bitmap.rs: mark"""
        return And(s.mpc(m) == LOGS, s.bit(s.page_of(m))), {'mpc': put(s.mpc, m, IDLE)}

    def step_vmm_set_bit(self, s, m: 'Mark'):
        """slot/bitmap.rs: set"""
        return s.mpc(m) == LOGS, {
            'bit': put(s.bit, s.page_of(m), True), 'mmarker': put(s.mmarker, s.page_of(m), m),
                                  'mpc': put(s.mpc, m, SUMMARIZES)}

    def step_vmm_summarize(self, s, m: 'Mark'):
        """slot/bitmap.rs: summarize"""
        return s.mpc(m) == SUMMARIZES, {'summary': put(s.summary, s.word(s.page_of(m)), True),
                                        'mpc': put(s.mpc, m, IDLE)}

    # A harvest: of all pages, or of the pages that its masks name.

    def takes(self, s, h, p):
        return Or(Not(s.masks(h)), s.named(h, p))

    def step_begin(self, s, h: 'Harvest'):
        """harvest/log.rs: get, clear"""
        found = lambda p: And(s.unreported(p), s.bit(p), s.summary(s.word(p)), self.takes(s, h, p))
        return s.hpc(h) == UNBEGUN, {'hpc': put(s.hpc, h, TAKES),
                                     'due': put_where(s.due, lambda g, p: And(g == h, found(p)), True)}

    def step_skip_word(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: skip_clean"""
        return And(s.hpc(h) == TAKES, s.hword(h, w) == UNVISITED, Not(s.masks(h)), Not(s.summary(w))), {
            'hword': put(s.hword, (h, w), DONE)}

    def step_clear_summary(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: take, take_masked (which may be wrong about what is left)"""
        late = And(self.without('summary-before-word'), Not(s.masks(h)))
        at = If(late, EMPTIED, UNVISITED)
        others = lambda g, p: And(g != h, s.word(p) == w)
        return And(s.hpc(h) == TAKES, s.hword(h, w) == at, Or(s.masks(h), s.summary(w))), {
            'summary': put(s.summary, w, False), 'hword': put(s.hword, (h, w), If(late, DONE, EMPTIED)),
            'emptier': put(s.emptier, w, h), 'due': put_where(s.due, others, False)}

    def step_take_word(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: take, take_masked"""
        found = lambda p: And(s.word(p) == w, s.bit(p), self.takes(s, h, p))
        at = s.hword(h, w)
        may = Or(at == EMPTIED, And(s.masks(h), at == UNVISITED))
        then = If(And(at == EMPTIED, self.is_left(s, h, w)), OWES, DONE)
        if self.without('summary-before-word'):
            may = Or(And(s.masks(h), at < OWES), And(at == UNVISITED, s.summary(w)))
            then = If(s.masks(h), then, EMPTIED)
        return And(s.hpc(h) == TAKES, may), {
            'hword': put(s.hword, (h, w), then), 'bit': put_where(s.bit, found, False),
            'holds': put_where(s.holds, lambda g, p: And(g == h, found(p)), True),
            'taker': put_where(s.taker, found, h), 'due': put_where(s.due, lambda g, p: found(p), False)}

    def is_left(self, s, h, w):
        """Whether a clear by masks has to set the summary again."""
        left = s.some(lambda p: And(s.word(p) == w, s.bit(p), Not(self.takes(s, h, p))))
        if self.without('summarize-again'):
            return False
        if self.without('look-at-the-rest'):
            return And(left, s.some(lambda p: And(s.word(p) == w, s.bit(p), self.takes(s, h, p))))
        return left

    def step_summarize_again(self, s, h: 'Harvest', w: 'Word'):
        """slot/bitmap.rs: take_masked"""
        return And(s.hpc(h) == TAKES, s.hword(h, w) == OWES), {
            'summary': put(s.summary, w, True), 'hword': put(s.hword, (h, w), DONE)}

    def step_protect(self, s, h: 'Harvest', l: 'Leaf'):
        """second_stage/protect.rs: protect_leaf, protect_huge"""
        early = self.without('take-before-protect')
        mine = lambda g, p: And(g == h, s.leaf(p) == l, Or(early, s.holds(h, p)))
        return s.hpc(h) == TAKES, {
            'rearmed': put_where(s.rearmed, mine, True), 'writable': put(s.writable, l, False),
            'changed': put_where(s.changed, lambda g, p: And(mine(g, p), s.writable(l)), True)}

    def step_turns_are_over(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest"""
        return And(s.hpc(h) == TAKES, s.all(lambda w: s.hword(h, w) == DONE),
                   s.all(lambda p: Implies(s.holds(h, p), s.rearmed(h, p)))), {'hpc': put(s.hpc, h, FLUSHES)}

    def step_flush(self, s, h: 'Harvest', c: 'Cpu'):
        """harvest/log.rs: harvest (flush_cpus)"""
        if self.without('flush-what-was-taken'):
            meant = lambda l: s.some(lambda p: And(s.changed(h, p), s.leaf(p) == l))
        else:
            meant = lambda l: s.some(lambda p: And(s.holds(h, p), s.leaf(p) == l))
        return s.hpc(h) == FLUSHES, {'flushed': put(s.flushed, (h, c), True),
                                     'tlb': put_where(s.tlb, lambda d, l: And(d == c, meant(l)), False)}

    def step_return(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest returns, and the caller copies the pages"""
        over = True if self.without('flush-before-return') else s.all(lambda c: s.flushed(h, c))
        return And(s.hpc(h) == FLUSHES, over), {
            'hpc': put(s.hpc, h, RETURNED), 'holds': put_where(s.holds, lambda g, p: g == h, False),
            'unreported': put_where(s.unreported, lambda p: s.holds(h, p), False)}

    # Logging begins and ends.

    def may_wipe(self, s):
        return And(s.epc() >= FLAGGED,
                   s.epc() < ON) if self.without('wipe-before-flag') else s.epc() == OFF

    def step_wipe_summary(self, s, w: 'Word'):
        """slot/bitmap.rs: clear_all"""
        return And(self.may_wipe(s), s.summary(w)), {
            'summary': put(s.summary, w, False), 'wiping': put(s.wiping, w, True)}

    def step_wipe_word(self, s, w: 'Word'):
        """slot/bitmap.rs: clear_all"""
        return And(self.may_wipe(s), s.wiping(w)), {
            'bit': put_where(s.bit, lambda p: s.word(p) == w, False), 'wiping': put(s.wiping, w, False)}

    def step_publish_flag(self, s):
        """vm/region.rs: change_slot"""
        return And(s.epc() == OFF, s.all(lambda w: Not(s.wiping(w)))), {
            'flag': lambda: True, 'epc': lambda: FLAGGED}

    def step_enabling_protects(self, s, l: 'Leaf'):
        """vm/region.rs: begin_to_log; second_stage/protect.rs: protect_slot"""
        at = OFF if self.without('flag-before-protect') else FLAGGED
        return And(s.epc() == at, Not(s.initially_set())), {
            'writable': put(s.writable, l, False),
            'armed': put_where(s.armed, lambda p: s.leaf(p) == l, True)}

    def step_enabling_sets(self, s, p: 'Page'):
        """slot/bitmap.rs: mark"""
        at = OFF if self.without('set-after-flag') else FLAGGED
        return And(s.epc() == at, s.initially_set()), {
            'bit': put(s.bit, p, True), 'armed': put(s.armed, p, True),
            'eowes': put(s.eowes, s.word(p), Or(s.eowes(s.word(p)), Not(s.bit(p))))}

    def step_enabling_summarizes(self, s, w: 'Word'):
        """slot/bitmap.rs: summarize"""
        return s.eowes(w), {'summary': put(s.summary, w, True), 'eowes': put(s.eowes, w, False)}

    def step_all_armed(self, s):
        """vm/region.rs: begin_to_log"""
        return And(s.epc() == FLAGGED, s.all(lambda p: s.armed(p)), s.all(lambda w: Not(s.eowes(w)))), {
            'epc': lambda: ARMED}

    def step_enabling_flushes(self, s, c: 'Cpu'):
        """vm/region.rs: begin_to_log"""
        flushes = not self.without('enabling-flushes')
        return And(s.epc() == ARMED, Not(s.initially_set())), {
            'eflushed': put(s.eflushed, c, True),
            'tlb': put_where(s.tlb, lambda d, l: And(d == c, flushes), False)}

    def step_enabled(self, s):
        """vm/region.rs: change_slot returns"""
        return And(s.epc() == ARMED, Or(s.initially_set(), s.all(lambda c: s.eflushed(c))),
                   s.all(lambda w: Not(s.wiping(w)))), {'epc': lambda: ON}

    def step_disable(self, s):
        """vm/region.rs: change_slot"""
        return s.epc() == ON, {
            'flag': lambda: False, 'epc': lambda: OFF, 'armed': lambda p: False, 'eflushed': lambda c: False,
            'unreported': lambda p: False, 'due': lambda h, p: False}

    # The guest, and what else takes W away.

    def step_fill_tlb(self, s, c: 'Cpu', l: 'Leaf'):
        """A CPU caches a leaf"""
        return s.writable(l), {'tlb': put(s.tlb, (c, l), True)}

    def step_evict_tlb(self, s, c: 'Cpu', l: 'Leaf'):
        """A CPU drops a leaf, or another operation flushes it"""
        return s.tlb(c, l), {'tlb': put(s.tlb, (c, l), False)}

    def step_guest_write(self, s, c: 'Cpu', p: 'Page'):
        """A CPU writes through a cached leaf"""
        return s.tlb(c, s.leaf(p)), {'unreported': put(s.unreported, p, Or(s.unreported(p), s.epc() == ON))}

    def step_drop_write(self, s, l: 'Leaf'):
        """second_stage/zap.rs: visit; second_stage/age.rs: age_leaf (tracked); push_down.rs: protect_all"""
        return s.writable(l), {'writable': put(s.writable, l, False)}

    # What is promised.

    def will_mark(self, s, p):
        """The fault that restored W last is about to mark the page."""
        f = s.giver(s.leaf(p))
        return And(s.leaf_of(f) == s.leaf(p),
                   Or(s.fpc(f) == GAVE, And(s.fpc(f) == MARKS, Not(s.fdone(f, p)))))

    def vmm_will_mark(self, s, p):
        m = s.writer(p)
        return And(s.page_of(m) == p, Or(s.mpc(m) == WROTE, s.mpc(m) == LOGS))

    def will_be_found(self, s, p):
        """A harvest that looks at the summary finds the word of the page, or a call will set the summary."""
        w, f, m, h = s.word(p), s.fmarker(p), s.mmarker(p), s.emptier(s.word(p))
        return Or(s.summary(w), s.fowes(f, w), And(s.mpc(m) == SUMMARIZES, s.word(s.page_of(m)) == w),
                  s.eowes(w),
                  s.wiping(w), s.hword(h, w) == EMPTIED, s.hword(h, w) == OWES)

    def quiet(self, s):
        """No call that marks or harvests is under way."""
        return And(s.all(lambda f: s.fpc(f) == OUT), s.all(lambda m: s.mpc(m) == IDLE),
                   s.all(lambda h: Or(s.hpc(h) == UNBEGUN, s.hpc(h) == RETURNED)), s.epc() == ON)

    def safe(self, s):
        return {
            'a write is marked, held by a harvest, or about to be marked': s.all(lambda p: Implies(
                s.unreported(p),
                Or(s.bit(p), s.holds(s.taker(p), p), self.will_mark(s, p), self.vmm_will_mark(s, p)))),
            'a mark will be found': s.all(lambda p: Implies(s.bit(p), self.will_be_found(s, p))),
            'when no call is under way, the next harvest finds each write': Implies(self.quiet(s), s.all(
                lambda p: Implies(s.unreported(p), And(s.bit(p), s.summary(s.word(p)))))),
            'a harvest reports what it could find when it began, unless another took it or hid it': s.all(
                lambda h, p: Implies(s.hpc(h) == RETURNED, Not(s.due(h, p)))),
        }

    def inv(self, s):
        return {**inv_of_enabling(s), **inv_of_protecting(s), **self.inv_of_counters(s), **self.inv_of_harvests(s), **self.heart(s)}

    def inv_of_counters(self, s):
        return {
            'a fault is OUT to UNLOGGED': s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= UNLOGGED)),
            'a mark by the VMM is IDLE to SUMMARIZES': s.all(
                lambda m: And(s.mpc(m) >= IDLE, s.mpc(m) <= SUMMARIZES)),
            'a fault has done pages only while it marks': s.all(lambda f, p: Implies(
                s.fdone(f, p), s.fpc(f) == MARKS)),
            'a fault has summaries to set only while it marks': s.all(lambda f, w: Implies(
                s.fowes(f, w), s.fpc(f) == MARKS)),
            'words are wiped before the flag': s.all(lambda w: Implies(s.wiping(w), s.epc() == OFF)),
            'enabling has summaries to set only while it arms': s.all(lambda w: Implies(
                s.eowes(w), s.epc() == FLAGGED)),
        }

    def inv_of_harvests(self, s):
        return {
            'a word is visited while bits are taken': s.all(lambda h, w: And(
                Implies(s.hpc(h) == UNBEGUN, s.hword(h, w) == UNVISITED),
                Implies(s.hpc(h) >= FLUSHES, s.hword(h, w) == DONE))),
            'a harvest holds pages of words that it has taken': s.all(lambda h, p: Implies(
                s.holds(h, p), Or(s.hword(h, s.word(p)) == OWES, s.hword(h, s.word(p)) == DONE))),
            'a harvest must report what was written while the memslot logs': s.all(lambda h, p: Implies(
                s.due(h, p), s.epc() == ON)),
            'what a harvest must report is marked, and it has not passed it': s.all(lambda h, p: Implies(
                s.due(h, p), And(s.bit(p), s.hpc(h) == TAKES, self.takes(s, h, p),
                                 Or(s.hword(h, s.word(p)) == EMPTIED,
                                    And(s.hword(h, s.word(p)) == UNVISITED,
                                        Or(s.masks(h), s.summary(s.word(p)))))))),
        }

    def heart(self, s):
        """Some thread marks or reports what can be written, or is cached as writable."""
        holds = lambda p: s.holds(s.taker(p), p)
        return {
            'what can be written is marked, about to be protected, or about to be marked': s.all(
                lambda p: Implies(
                    And(s.armed(p), s.writable(s.leaf(p))),
                    Or(s.bit(p), And(holds(p), Not(s.rearmed(s.taker(p), p))), self.will_mark(s, p)))),
            'what is cached as writable is marked, about to be flushed, or about to be marked': s.all(
                lambda c, p: Implies(
                    And(Or(s.eflushed(c), And(s.initially_set(), s.armed(p))), s.tlb(c, s.leaf(p))),
                    Or(s.bit(p), And(holds(p), Not(s.flushed(s.taker(p), c))), self.will_mark(s, p)))),
        }

    sizes = {'Fault': 1, 'Harvest': 2, 'Mark': 1, 'Leaf': 1, 'Page': 2, 'Word': 1, 'Cpu': 1}
    logging = {'epc': lambda: ON, 'flag': lambda: True, 'armed': lambda p: True, 'eflushed': lambda c: True,
               'bit': lambda p: True, 'summary': lambda w: True}
    small = {'Fault': 1, 'Harvest': 1, 'Mark': 1, 'Leaf': 1, 'Page': 1, 'Word': 1, 'Cpu': 1}
    two_pages = {**small, 'Page': 2}
    clears = {'masks': lambda h: True, 'named': lambda h, p: p == 'page0'}
    set_at_first = {'initially_set': lambda: True}
    traces = {
        'bit-after-write-access': {'sizes': small, 'start': logging},
        'flag-after-write-access': {'sizes': small, 'start': {}},
        'mark-all-pages': {'sizes': two_pages, 'start': {**logging, 'bit': lambda p: False}},
        'word-before-summary': {'sizes': small,
            'start': {**logging, 'bit': lambda p: False, 'summary': lambda w: False}},
        'take-before-protect': {'sizes': small, 'start': logging},
        'summary-before-word': {'sizes': small, 'start': logging},
        'summarize-again': {'sizes': two_pages, 'start': {**logging, **clears}},
        'look-at-the-rest': {'sizes': two_pages,
            'start': {**logging, **clears, 'bit': lambda p: p == 'page1'}},
        'flush-what-was-taken': {'sizes': small, 'start': logging},
        'flush-before-return': {'sizes': small, 'start': logging},
        'flag-before-protect': {'sizes': small, 'start': {}},
        'enabling-flushes': {'sizes': small, 'start': {}},
        'wipe-before-flag': {'sizes': small, 'start': {}},
        'set-after-flag': {'sizes': small, 'start': set_at_first},
        'write-before-mark': {'sizes': small, 'start': {**logging, 'bit': lambda p: False}},
    }


if __name__ == '__main__':
    prover.main(DirtyLog)
