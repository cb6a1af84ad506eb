"""The steps of faults, calls and user space. `userfault.py` says what is proved of them."""
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

# What a fault reads, in this order. Its program counter says how many of these it has done.
PTE, RANGES, MEMSLOT, BIT, ATTRIBUTES = range(5)
ALL = 5
# A fault that replaces a read-only leaf: it has taken a number of its own, has exchanged the leaf for it.
TOOK, GONE = 6, 7
# A call: it has begun, published its range, took its number, has zapped all it must, has flushed all
# CPUs, has published the set, is over.
OUT, BEGUN, IN_FLIGHT, NUMBERED, WALKED, ZAPPED, CHANGED, OVER = range(8)
# Kinds of calls: an invalidation (which may change attributes), a change of the flag or of the bitmap, a
# rescan.
RANGE, FLAG, RESCAN = range(3)
FREE, HELD, STORED = range(3)                               # a fresh number: not taken, taken, stored


class UserfaultSteps(Protocol):
    sorts = ['Fault', 'Call', 'Page', 'Block', 'Slot', 'Map', 'Kind', 'Cpu', 'Fresh']
    letters = {'f': 'Fault', 'i': 'Call', 'j': 'Call', 'p': 'Page', 'q': 'Page', 'b': 'Block', 'm': 'Map',
        'k': 'Kind',
               'c': 'Cpu', 'n': 'Fresh'}
    fixed = {
        'page': (['Fault'], 'Page'), 'block': (['Page'], 'Block'), 'slot': (['Page'], 'Slot'),
        'is_big': (['Map'], 'bool'),                                    # a bit stands for a block
        'kind': (['Call'], 'int'), 'turns_on': (['Call'], 'bool'), 'slot_of': (['Call'], 'Slot'),
        'new_map': (['Call'], 'Map'), 'range': (['Call', 'Page'], 'bool'),
    }
    state = {
        'on': (['Slot'], 'bool'), 'map': (['Slot'], 'Map'),             # the published set
        'bit': (['Map', 'Page'], 'bool'), 'attribute': (['Page'], 'Kind'),
        'whole': (['Block'], 'bool'),                                   # one PTE stands for the block
        'leaf': (['Page'], 'bool'), 'leaf_kind': (['Page'], 'Kind'), 'number': (['Page'],
            'int'), 'counter': ([], 'int'),
        'state_of': (['Fresh'], 'int'), 'fresh': (['Fresh'], 'int'),
        'cached': (['Cpu', 'Page', 'Kind'], 'bool'),
        'fpc': (['Fault'], 'int'), 'seen': (['Fault'], 'int'), 'saw_whole': (['Fault'], 'bool'),
        'huge': (['Fault'], 'bool'),                                    # may map its whole block
        'passed': (['Fault', 'Call'], 'bool'), 'beside': (['Fault', 'Call'], 'bool'),
        'on_leaf': (['Fault'], 'bool'),                                 # `seen` is the counter then
        'counts': (['Fault'], 'bool'), 'old': (['Fault'], 'Kind'), 'fown': (['Fault'], 'int'),
        'saw_on': (['Fault'], 'bool'), 'saw_map': (['Fault'], 'Map'), 'saw_kind': (['Fault'], 'Kind'),
        'alike': (['Fault', 'Page'], 'bool'),
        'ipc': (['Call'], 'int'), 'own': (['Call'], 'int'), 'visited': (['Call', 'Page'], 'bool'),
        'found': (['Call'], 'bool'), 'found_map': (['Call'], 'Map'),    # a rescan has found this bitmap
        'cut': (['Call', 'Page'], 'bool'),                              # it may stand in what was unlinked since
        'scanned': (['Call', 'Page'], 'bool'), 'wanted': (['Call', 'Page'],
            'bool'), 'flushed': (['Call', 'Cpu'], 'bool'),
        'zapped': (['Call', 'Page'], 'bool'),                           # a leaf was there
        'gave': (['Call', 'Page'], 'bool'),                           # ghost: has stored its own number there
        'due': (['Call', 'Map', 'Page'], 'bool'),              # ghost: set before the call, not cleared since
        'pending': (['Map', 'Page'], 'bool'),                           # ghost: was due when a call returned
    }

    def __init__(self, left_out=None):
        super().__init__(left_out)
        self.order = {
            'bit-after-pte': (MEMSLOT, BIT, PTE, RANGES, ATTRIBUTES),
            'attributes-after-pte': (MEMSLOT, ATTRIBUTES, PTE, RANGES, BIT),
            'ranges-before-slot': (PTE, MEMSLOT, RANGES, BIT, ATTRIBUTES),
        }.get(left_out, (PTE, RANGES, MEMSLOT, BIT, ATTRIBUTES))

    def is_next(self, s, f, what):
        return s.fpc(f) == self.order.index(what)

    def has(self, s, f, what):
        """The fault has done it."""
        return s.fpc(f) > self.order.index(what)

    def on(self, s, f):
        return {'fpc': put(s.fpc, f, s.fpc(f) + 1)}

    def axioms(self, s):
        return {
            'calls have a kind': s.all(lambda i: And(RANGE <= s.kind(i), s.kind(i) <= RESCAN)),
            'a block is in one memslot': s.all(lambda p,
                q: Implies(s.block(p) == s.block(q), s.slot(p) == s.slot(q))),
        }

    def init(self, s):
        return {
            'userfault is off': s.all(lambda p: Not(s.on(s.slot(p)))),
            'no bit is set': s.all(lambda m, p: And(Not(s.bit(m, p)), Not(s.pending(m, p)))),
            'nothing is mapped': And(s.counter() == 0,
                s.all(lambda p: And(Not(s.leaf(p)), s.number(p) == 0))),
            'nothing is cached': s.all(lambda c, p, k: Not(s.cached(c, p, k))),
            'no fault runs': s.all(lambda f: And(s.fpc(f) == 0, Not(s.on_leaf(f)), Not(s.counts(f)))),
            'no fault reads': s.all(lambda f, i: And(Not(s.passed(f, i)), Not(s.beside(f, i)))),
            'no number is taken': s.all(lambda n: s.state_of(n) == FREE),
            'no call runs': s.all(lambda i: And(s.ipc(i) == OUT, s.own(i) == 0, Not(s.found(i)))),
            'no call stands in what was unlinked': s.all(lambda i, p: Not(s.cut(i, p))),
            'no page is visited': s.all(lambda i, p: And(
                Not(s.visited(i, p)), Not(s.scanned(i, p)), Not(s.wanted(i, p)), Not(s.gave(i, p)))),
            'nothing is due': s.all(lambda i, m, p: Not(s.due(i, m, p))),
            'no CPU is flushed': s.all(lambda i, c: Not(s.flushed(i, c))),
        }

    def mates(self, s, p):
        """The pages of the PTE of a page."""
        return lambda q: Or(q == p, And(s.whole(s.block(p)), s.block(q) == s.block(p)))

    # ---- User space.

    def same_bit(self, s, m, p, q):
        return Or(q == p, And(s.is_big(m), s.block(q) == s.block(p)))

    def step_set_bit(self, s, m: 'Map', p: 'Page'):
        """User space sets a bit, to take the page back or to poison it."""
        return True, {'bit': put_where(s.bit, lambda n, q: And(n == m, self.same_bit(s, m, p, q)), True)}

    def step_clear_bit(self, s, m: 'Map', p: 'Page'):
        """User space clears a bit, when the page has arrived."""
        cleared = lambda n, q: And(n == m, self.same_bit(s, m, p, q))
        return True, {'bit': put_where(s.bit, cleared, False),
            'pending': put_where(s.pending, cleared, False),
                      'due': put_where(s.due, lambda i, n, q: cleared(n, q), False)}

    # ---- A fault.

    def step_look(self, s, f: 'Fault'):
        """vcpu.rs: Fault::look, the PTE."""
        p = s.page(f)
        return And(self.is_next(s, f, PTE), Not(s.leaf(p))), {
            **self.on(s, f), 'seen': put(s.seen, f, s.number(p)), 'counts': put(s.counts, f, False),
            'saw_whole': put(s.saw_whole, f, s.whole(s.block(p)))}

    def step_look_at_leaf(self, s, f: 'Fault'):
        """vcpu.rs: Fault::look, a leaf that the host did not let be written."""
        p = s.page(f)
        return And(self.is_next(s, f, PTE), s.leaf(p), Not(s.whole(s.block(p)))), {
            'counts': put(s.counts, f, True), 'old': put(s.old, f, s.leaf_kind(p))}

    def step_read_counter(self, s, f: 'Fault'):
        """vcpu.rs: Fault::look, InvalidationSeqCounter::current."""
        again = And(self.without('counter-before-ranges'), s.on_leaf(f), s.fpc(f) == ALL)
        return Or(And(self.is_next(s, f, PTE), s.counts(f)), again), {
            'fpc': put(s.fpc, f, s.fpc(f) + If(again, 0, 1)), 'counts': put(s.counts, f, False),
            'on_leaf': put(s.on_leaf, f, True), 'seen': put(s.seen, f, s.counter()),
            'saw_whole': put(s.saw_whole, f, False)}

    def in_flight(self, s, i):
        last = CHANGED
        if self.without('change-before-withdrawal'):
            last = WALKED
        return And(self.keeps_out(s, i), IN_FLIGHT <= s.ipc(i), s.ipc(i) <= last)

    def step_pass_ranges(self, s, f: 'Fault'):
        """table/in_flight.rs: RangesInFlight::free_level, at several moments: for page and block."""
        p = s.page(f)
        in_block = lambda i: s.some(lambda q: And(s.block(q) == s.block(p), self.covers(s, i, q)))
        page = lambda g, i: And(g == f, Not(And(self.in_flight(s, i), self.covers(s, i, p))))
        block = lambda g, i: And(g == f, Not(And(self.in_flight(s, i), in_block(i))))
        return self.is_next(s, f, RANGES), {
            'passed': put_where(s.passed, page, True), 'beside': put_where(s.beside, block, True)}

    def step_clear(self, s, f: 'Fault'):
        """table/in_flight.rs: RangesInFlight::free_level has compared all ranges."""
        beside = s.all(lambda i: Or(s.beside(f, i), self.without('block-is-beside-ranges')))
        return And(self.is_next(s, f, RANGES), s.all(lambda i: s.passed(f, i))), {
            **self.on(s, f), 'huge': put(s.huge, f, beside)}

    def step_find(self, s, f: 'Fault'):
        """slot/set.rs: Slots::find."""
        k = s.slot(s.page(f))
        return self.is_next(s, f, MEMSLOT), {
            **self.on(s, f), 'saw_on': put(s.saw_on, f, s.on(k)), 'saw_map': put(s.saw_map, f, s.map(k))}

    def step_read_bit(self, s, f: 'Fault'):
        """slot/view.rs: SlotView::check_userfault."""
        set_ = And(s.saw_on(f), s.bit(s.saw_map(f), s.page(f)))
        return And(self.is_next(s, f, BIT), Not(set_)), self.on(s, f)

    def step_read_attributes(self, s, f: 'Fault'):
        """slot/view.rs: SlotView::attributes_of. The host is asked for a page of that kind after it."""
        return self.is_next(s, f, ATTRIBUTES), {
            **self.on(s, f), 'saw_kind': put(s.saw_kind, f, s.attribute(s.page(f))),
            'alike': put_where(s.alike, lambda g, q: g == f, lambda g, q: q == s.page(f))}

    def step_compare_attributes(self, s, f: 'Fault', q: 'Page'):
        """vcpu.rs: Fault::limit_to_alike, one page of the block."""
        return And(s.fpc(f) == ALL, s.attribute(q) == s.saw_kind(f)), {'alike': put(s.alike, (f, q), True)}

    def forget(self, s, f):
        return {'fpc': put(s.fpc, f, 0), 'on_leaf': put(s.on_leaf, f, False),
            'counts': put(s.counts, f, False),
                'passed': put_where(s.passed, lambda g, i: g == f, False),
                'beside': put_where(s.beside, lambda g, i: g == f, False)}

    def same_number(self, s, f):
        return Or(s.number(s.page(f)) == s.seen(f), self.without('number-is-compared'))

    def step_install(self, s, f: 'Fault'):
        """vcpu/act.rs: install_on_empty, a leaf of one page.

        Its page-table page is linked by the same exchange.
        """
        p = s.page(f)
        return And(s.fpc(f) == ALL, Not(s.on_leaf(f)), Not(s.leaf(p)), self.same_number(s, f)), {
            **self.forget(s, f), 'whole': put(s.whole, s.block(p), False),
            'leaf': put(s.leaf, p, True), 'leaf_kind': put(s.leaf_kind, p, s.saw_kind(f))}

    def step_install_huge(self, s, f: 'Fault'):
        """vcpu/act.rs: install_on_empty, a leaf of a block."""
        p, out = s.page(f), self.left_out
        in_block = lambda q: s.block(q) == s.block(p)
        small = And(s.saw_on(f), Not(s.is_big(s.saw_map(f))), out != 'leaves-fit-bits')
        alike = s.all(lambda q: Implies(in_block(q), Or(s.alike(f, q), out == 'pages-are-alike')))
        whole = And(Not(s.on_leaf(f)), s.saw_whole(f), s.whole(s.block(p)), Not(s.leaf(p)))
        return And(s.fpc(f) == ALL, whole, self.same_number(s, f), Not(small), alike, s.huge(f)), {
            **self.forget(s, f), 'leaf': put_where(s.leaf, in_block, True),
            'leaf_kind': put_where(s.leaf_kind, in_block, s.saw_kind(f))}

    def step_take_own(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead, the number."""
        return And(s.fpc(f) == ALL, s.on_leaf(f)), {
            'fpc': put(s.fpc, f, TOOK), 'fown': put(s.fown, f,
                s.counter() + 1), 'counter': lambda: s.counter() + 1}

    def step_exchange(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead, the leaf goes."""
        p = s.page(f)
        same = And(s.leaf(p), s.leaf_kind(p) == s.old(f), s.old(f) == s.saw_kind(f), Not(s.whole(s.block(p))))
        return And(s.fpc(f) == TOOK, same), {
            'fpc': put(s.fpc, f, GONE), 'leaf': put(s.leaf, p, False), 'number': put(s.number, p, s.fown(f))}

    def step_recount(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead, the counter once more. No other number was taken since the look."""
        alone = Or(s.counter() == s.seen(f) + 1,
            self.without('counter-is-compared'))
        return And(s.fpc(f) == GONE, alone), {
            'fpc': put(s.fpc, f, ALL), 'on_leaf': put(s.on_leaf, f, False), 'seen': put(s.seen, f, s.fown(f))}

    def step_give_up(self, s, f: 'Fault'):
        """vcpu.rs: the fault exits, comes back later or starts over."""
        return True, self.forget(s, f)

    def step_link_table(self, s, b: 'Block'):
        """second_stage/split.rs; vcpu/act.rs: refine, with break before make.

        A page-table page whose PTEs say what the PTE of the block did.
        """
        return s.whole(b), {'whole': put(s.whole, b, False)}

    def step_refine_anew(self, s, b: 'Block', n: 'Fresh'):
        """vcpu/act.rs: refine. The PTEs of the new page-table page have an own number of the fault."""
        inside = lambda q: s.block(q) == b
        is_empty = s.all(lambda q: Implies(inside(q), Not(s.leaf(q))))
        return And(s.whole(b), is_empty, s.state_of(n) == HELD), {
            'whole': put(s.whole, b, False), 'state_of': put(s.state_of, n, STORED),
            'number': put_where(s.number, inside, s.fresh(n))}

    def step_fill(self, s, c: 'Cpu', p: 'Page'):
        """A CPU walks and caches the leaf."""
        return s.leaf(p), {'cached': put(s.cached, (c, p, s.leaf_kind(p)), True)}

    # ---- A call.

    def keeps_out(self, s, i):
        """The call has a range in flight."""
        return Or(s.kind(i) == RANGE, And(s.kind(i) == FLAG, s.turns_on(i),
            not self.without('flag-invalidates')))

    def covers(self, s, i, p):
        others = If(s.kind(i) == FLAG, s.slot(p) == s.slot_of(i), s.range(i, p))
        return If(s.kind(i) == RESCAN, self.reaches(s, i, s.found_map(i), p), others)

    def reaches(self, s, i, m, p):
        """The rescan is of a page that has the bit of this one in the bitmap."""
        in_block = And(s.is_big(m), s.some(lambda q: And(s.block(q) == s.block(p), s.range(i, q))))
        return And(s.slot(p) == s.slot_of(i), Or(s.range(i, p), in_block))

    def step_begin(self, s, i: 'Call'):
        """vm/page_state.rs: rescan_userfault, set_memory_attributes; vm/region.rs: change_slot."""
        return s.ipc(i) == OUT, {
            'ipc': put(s.ipc, i, BEGUN), 'due': put_where(s.due, lambda j, m, p: j == i, lambda j, m,
                p: s.bit(m, p))}

    def step_publish_range(self, s, i: 'Call'):
        """second_stage/invalidate.rs: Invalidation::new, step 1."""
        return And(s.ipc(i) == BEGUN, self.keeps_out(s, i)), {'ipc': put(s.ipc, i, IN_FLIGHT)}

    def step_take_number(self, s, i: 'Call'):
        """second_stage/invalidate.rs: Invalidation::new, step 2; second_stage/rescan.rs: zap_run, for each run."""
        begins = Or(s.ipc(i) == IN_FLIGHT, self.rescans(s, i))
        number = s.counter() + 1
        if self.without('rescan-takes-number'):
            number = s.counter() + If(s.kind(i) == RESCAN, 0, 1)
        return begins, {
            'ipc': put(s.ipc, i, NUMBERED), 'own': put(s.own, i, number), 'counter': lambda: number,
            'gave': put_where(s.gave, lambda j, p: j == i, False)}

    def step_take_fresh(self, s, n: 'Fresh'):
        """table/invalidation_seq.rs: next. For one exchange, which alone stores it."""
        return s.state_of(n) == FREE, {
            'state_of': put(s.state_of, n, HELD), 'fresh': put(s.fresh, n, s.counter() + 1),
            'counter': lambda: s.counter() + 1}

    def rescans(self, s, i):
        return And(s.kind(i) == RESCAN, Or(s.ipc(i) == BEGUN, s.ipc(i) == NUMBERED))

    def step_find_bitmap(self, s, i: 'Call'):
        """second_stage/rescan.rs: rescan, Slots::by_id."""
        k = s.slot_of(i)
        return And(self.rescans(s, i), s.on(k)), {
            'found': put(s.found, i, True), 'found_map': put(s.found_map, i, s.map(k))}

    def step_scan(self, s, i: 'Call', p: 'Page'):
        """second_stage/rescan.rs: find_runs, the bit of one page."""
        return And(self.rescans(s, i), s.found(i), self.covers(s, i, p), Not(s.scanned(i, p))), {
            'scanned': put(s.scanned, (i, p), True),
            'wanted': put(s.wanted, (i, p), s.bit(s.found_map(i), p))}

    def step_start_over(self, s, i: 'Call'):
        """second_stage/rescan.rs: rescan, the memslot has changed meanwhile."""
        mine = lambda j, p: j == i
        return self.rescans(s, i), {
            'ipc': put(s.ipc, i, BEGUN), 'found': put(s.found, i, False),
            **{n: put_where(getattr(s, n), mine, False) for n in ('visited', 'scanned', 'wanted', 'cut')}}

    def wants(self, s, i, p):
        return If(s.kind(i) == RESCAN, s.wanted(i, p), self.covers(s, i, p))

    def step_zap(self, s, i: 'Call', p: 'Page'):
        """second_stage/zap.rs: Zap::visit, a PTE of the lowest level: it gets the number of the call."""
        stores = Or(s.leaf(p), And(s.number(p) < s.own(i), not self.without('numbers-are-stored')))
        return And(s.ipc(i) == NUMBERED, self.wants(s, i, p), Not(s.gave(i, p)), Not(s.whole(s.block(p)))), {
            'visited': put(s.visited, (i, p), True), 'leaf': put(s.leaf, p, False),
            'zapped': put(s.zapped, (i, p), s.leaf(p)),
            'gave': put(s.gave, (i, p), stores),
            'number': put(s.number, p, If(stores, s.own(i), s.number(p)))}

    def at_block(self, s, i, p):
        return And(s.ipc(i) == NUMBERED, self.wants(s, i, p), s.whole(s.block(p)))

    def visits_block(self, s, i, p):
        return put_where(s.visited, lambda j, q: And(j == i, s.block(q) == s.block(p), self.wants(s, i, q)), True)

    def is_fresh(self, s, i, n):
        """A number that was taken for this exchange, after that of the call."""
        return And(s.state_of(n) == HELD, s.fresh(n) > s.own(i))

    def step_zap_block(self, s, i: 'Call', p: 'Page', n: 'Fresh'):
        """second_stage/zap.rs: Zap::visit, a PTE above the lowest level: it gets a fresh number."""
        in_block = lambda q: s.block(q) == s.block(p)
        stores = Or(s.leaf(p), s.number(p) < s.own(i))
        return And(self.at_block(s, i, p), stores, self.is_fresh(s, i, n)), {
            'visited': self.visits_block(s, i, p), 'leaf': put_where(s.leaf, in_block, False),
            'state_of': put(s.state_of, n, STORED),
            'zapped': put_where(s.zapped, lambda j, q: And(j == i, in_block(q)), s.leaf(p)),
            'number': put_where(s.number, in_block, s.fresh(n))}

    def step_pass_block(self, s, i: 'Call', p: 'Page'):
        """second_stage/zap.rs: Zap::visit, a PTE above the lowest level: its number is greater."""
        return And(self.at_block(s, i, p), Not(s.leaf(p)), s.number(p) >= s.own(i)), {
            'visited': self.visits_block(s, i, p)}

    def step_pass_unlinked(self, s, i: 'Call', p: 'Page'):
        """second_stage/zap.rs: Zap::visit, in a page-table page that another call has unlinked meanwhile."""
        return And(s.ipc(i) == NUMBERED, self.wants(s, i, p), s.cut(i, p)), {
            'visited': put(s.visited, (i, p), True)}

    def step_unlink(self, s, i: 'Call', b: 'Block', n: 'Fresh'):
        """second_stage/zap.rs: Zap::visit, a page-table page that lies wholly inside the range."""
        kept_out = Or(s.kind(i) != RESCAN, self.without('rescan-unlinks-nothing'))
        inside = lambda q: s.block(q) == b
        done = s.all(lambda q: Implies(inside(q), s.visited(i, q)))
        stands = lambda j, q: And(inside(q), s.ipc(j) == NUMBERED, self.wants(s, j, q))
        return And(s.ipc(i) == NUMBERED, kept_out, done, Not(s.whole(b)), self.is_fresh(s, i, n)), {
            'whole': put(s.whole, b, True), 'state_of': put(s.state_of, n, STORED),
            'cut': put_where(s.cut, stands, True), 'number': put_where(s.number, inside, s.fresh(n))}

    def step_walked(self, s, i: 'Call'):
        """second_stage/zap.rs: zap_range, the end."""
        scanned = s.all(lambda p: Implies(And(s.kind(i) == RESCAN, self.covers(s, i, p)), s.scanned(i, p)))
        done = s.all(lambda p: Implies(self.wants(s, i, p), s.visited(i, p)))
        return And(Or(s.ipc(i) == NUMBERED, self.rescans(s, i)), scanned, done), {'ipc': put(s.ipc, i, WALKED)}

    def step_flush(self, s, i: 'Call', c: 'Cpu'):
        """table/tlb.rs: TlbBatch::flush, on one CPU."""
        zapped = lambda p: Or(not self.without('flush-in-any-case'), s.zapped(i, p))
        return s.ipc(i) == WALKED, {
            'flushed': put(s.flushed, (i, c), True),
            'cached': put_where(s.cached, lambda d, p, k: And(d == c, self.wants(s, i, p), zapped(p)), False)}

    def step_flushed(self, s, i: 'Call'):
        """second_stage/invalidate.rs: Invalidation::new, the end; second_stage/rescan.rs: rescan, the end."""
        return And(s.ipc(i) == WALKED, s.all(lambda c: s.flushed(i, c))), {'ipc': put(s.ipc, i, ZAPPED)}

    def step_store_attribute(self, s, i: 'Call', p: 'Page', k: 'Kind'):
        """slot/attributes.rs: PrivatePages::set."""
        ready = s.ipc(i) == ZAPPED
        if self.without('attributes-after-zap'):
            ready = s.ipc(i) == IN_FLIGHT
        return And(s.kind(i) == RANGE, ready, self.covers(s, i, p)), {'attribute': put(s.attribute, p, k)}

    def step_publish_set(self, s, i: 'Call'):
        """slot/set.rs: Slots::publish, with the flag and its bitmap, or without."""
        k, ready = s.slot_of(i), s.ipc(i) == If(self.keeps_out(s, i), ZAPPED, BEGUN)
        return And(s.kind(i) == FLAG, ready), {
            'ipc': put(s.ipc, i, CHANGED), 'on': put(s.on, k, s.turns_on(i)),
            'map': put(s.map, k, If(s.turns_on(i), s.new_map(i), s.map(k)))}

    def step_return(self, s, i: 'Call'):
        """The range is withdrawn, and the call returns. What was due is pending."""
        done = s.ipc(i) == If(s.kind(i) == FLAG, CHANGED, ZAPPED)
        turned_on = lambda m, p: And(s.kind(i) == FLAG, s.turns_on(i), m == s.new_map(i), self.covers(s, i, p))
        promised = lambda m, p: And(s.due(i, m, p), Or(
            And(s.kind(i) == RESCAN, self.reaches(s, i, m, p)), turned_on(m, p)))
        return done, {'ipc': put(s.ipc, i, OVER), 'pending': put_where(s.pending, promised, True)}
