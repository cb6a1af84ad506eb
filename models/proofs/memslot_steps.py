"""The steps of faults, of changes of memslots and of reclaims. `memslots.py` says what is proved of them."""
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

# A fault: it has read the PTE, found no range in flight, found the place, set its hazard pointer, left
# the guard, has the host's answer.
IDLE, LOOKED, CLEAR, HAS_PLACE, KEPT, OUTSIDE, RESOLVED = range(7)
# A call: it found the memslot, took the claim, read its place again, published its range, took its
# number, has visited all pages, has flushed all CPUs, has changed the set (or the host is done), has
# withdrawn its range, is over.
OUT, FOUND, LOCKED, CLAIMED, IN_FLIGHT, NUMBERED, WALKED, ZAPPED, CHANGED, WITHDRAWN, OVER = range(11)
HOST, CREATE, CHANGE = range(3)                                         # kinds of calls


class MemslotSteps(Protocol):
    sorts = ['Fault', 'Call', 'Page', 'Place', 'Slot', 'Id', 'Answer', 'Cpu']
    letters = {'f': 'Fault', 'i': 'Call', 'j': 'Call', 'p': 'Page', 'd': 'Place', 'e': 'Place', 'k': 'Slot',
               'a': 'Answer', 'c': 'Cpu'}
    fixed = {
        'page': (['Fault'], 'Page'), 'id': (['Slot'], 'Id'), 'slot': (['Place'], 'Slot'),
        'has': (['Place', 'Page'], 'bool'), 'place_of': (['Answer'], 'Place'),
        'kind': (['Call'], 'int'), 'is_deletion': (['Call'], 'bool'), 'is_move': (['Call'], 'bool'),
        'id_of': (['Call'], 'Id'), 'target': (['Call'], 'Place'),
        'host_range': (['Call', 'Page'], 'bool'),
    }
    state = {
        'stands': (['Place'], 'bool'), 'version': ([], 'int'),          # the published set
        'claimed': (['Slot'], 'bool'), 'used': (['Slot'], 'bool'), 'freed': (['Slot'], 'bool'),
        'gone': (['Slot'], 'bool'), 'where': (['Slot'], 'Place'), 'holder': (['Slot'], 'Call'),       # ghosts
        'allows': (['Page', 'Answer'], 'bool'),                         # the host
        'leaf': (['Page'], 'bool'), 'answer': (['Page'], 'Answer'),
        'number': (['Page'], 'int'), 'counter': ([], 'int'),
        'cached': (['Cpu', 'Page', 'Answer'], 'bool'),
        'ipc': (['Call'], 'int'), 'found': (['Call'], 'Slot'), 'before': (['Call'], 'Place'),
        'builds': (['Call'], 'bool'), 'old': (['Call', 'Place'], 'bool'), 'old_version': (['Call'], 'int'),
        'own': (['Call'], 'int'), 'visited': (['Call', 'Page'], 'bool'), 'flushed': (['Call', 'Cpu'], 'bool'),
        'fpc': (['Fault'], 'int'), 'seen': (['Fault'], 'int'), 'passed': (['Fault', 'Call'], 'bool'),
        'place': (['Fault'], 'Place'), 'got': (['Fault'], 'Answer'),
        'may_find': (['Fault', 'Slot'], 'bool'),                # ghost: its guard is from before the deletion
        'looked_at': (['Slot'], 'bool'),                                # by a reclaim: no such guard is open
    }

    def axioms(self, s):
        return {'calls have a kind': s.all(lambda i: And(HOST <= s.kind(i), s.kind(i) <= CHANGE))}

    def init(self, s):
        return {
            'the set is empty': And(s.version() == 0, s.all(lambda d: Not(s.stands(d)))),
            'no memslot was made': s.all(lambda k: And(
                Not(s.claimed(k)), Not(s.used(k)), Not(s.freed(k)), Not(s.gone(k)), Not(s.looked_at(k)))),
            'nothing is mapped': And(s.counter() == 0,
                s.all(lambda p: And(Not(s.leaf(p)), s.number(p) == 0))),
            'nothing is cached': s.all(lambda c, p, a: Not(s.cached(c, p, a))),
            'no call runs': s.all(lambda i: And(s.ipc(i) == OUT, Not(s.builds(i)))),
            'no page is visited': s.all(lambda i, p: Not(s.visited(i, p))),
            'no CPU is flushed': s.all(lambda i, c: Not(s.flushed(i, c))),
            'no fault runs': s.all(lambda f: s.fpc(f) == IDLE),
            'no fault reads': s.all(lambda f, i: Not(s.passed(f, i))),
            'no guard is open': s.all(lambda f, k: Not(s.may_find(f, k))),
        }

    # ---- A fault.

    def in_flight(self, s, i):
        first, last = IN_FLIGHT, CHANGED
        if self.without('range-before-number'): first = NUMBERED
        if self.without('set-before-withdrawal'): last = WALKED
        return And(self.zaps(s, i), first <= s.ipc(i), s.ipc(i) <= last)

    def step_look(self, s, f: 'Fault'):
        """vcpu.rs: the fault opens a guard and reads its PTE."""
        begins = s.fpc(f) == IDLE
        if self.without('pte-before-ranges'): begins = And(begins, s.all(lambda i: s.passed(f, i)))
        return And(begins, Not(s.leaf(s.page(f)))), {
            'fpc': put(s.fpc, f, LOOKED), 'seen': put(s.seen, f, s.number(s.page(f))),
            'may_find': put_where(s.may_find, lambda g, k: g == f, lambda g, k: Not(s.gone(k)))}

    def step_pass_ranges(self, s, f: 'Fault'):
        """table/in_flight.rs: RangesInFlight::free_level, at several moments."""
        reads = IDLE if self.without('pte-before-ranges') else LOOKED
        if self.without('ranges-before-slot'): reads = HAS_PLACE
        beside = lambda i: Not(And(self.in_flight(s, i), self.covers(s, i, s.page(f))))
        return s.fpc(f) == reads, {'passed': put_where(s.passed, lambda g, i: And(g == f, beside(i)), True)}

    def step_clear(self, s, f: 'Fault'):
        """table/in_flight.rs: RangesInFlight::free_level has compared all ranges."""
        all_passed = True if self.without('ranges-before-slot') else s.all(lambda i: s.passed(f, i))
        return And(s.fpc(f) == LOOKED, all_passed), {'fpc': put(s.fpc, f, CLEAR)}

    def step_find(self, s, f: 'Fault', d: 'Place'):
        """slot/set.rs: Slots::find."""
        finds = And(s.fpc(f) == CLEAR, s.stands(d), s.has(d, s.page(f)))
        return finds, {'fpc': put(s.fpc, f, HAS_PLACE), 'place': put(s.place, f, d)}

    def step_protect(self, s, f: 'Fault'):
        """slot/view.rs: SlotView::keep_for_resolve."""
        early = self.without('hazard-before-unpin')
        late = s.all(lambda i: s.passed(f, i)) if self.without('ranges-before-slot') else True
        return And(s.fpc(f) == (OUTSIDE if early else HAS_PLACE), late), {'fpc': put(s.fpc, f, KEPT)}

    def step_unpin(self, s, f: 'Fault'):
        """vcpu.rs: the fault drops its guard and asks the host."""
        early = self.without('hazard-before-unpin')
        return s.fpc(f) == (HAS_PLACE if early else KEPT), {
            'fpc': put(s.fpc, f, OUTSIDE), 'may_find': put_where(s.may_find, lambda g, k: g == f, False)}

    def step_resolve(self, s, f: 'Fault', a: 'Answer'):
        """slot/view.rs: BackingRef::resolve."""
        begins = KEPT if self.without('hazard-before-unpin') else OUTSIDE
        return And(s.fpc(f) == begins, s.place_of(a) == s.place(f), s.allows(s.page(f), a)), {
            'fpc': put(s.fpc, f, RESOLVED), 'got': put(s.got, f, a)}

    def forget(self, s, f):
        return {'fpc': put(s.fpc, f, IDLE), 'passed': put_where(s.passed, lambda g, i: g == f, False),
                'may_find': put_where(s.may_find, lambda g, k: g == f, False)}

    def step_install(self, s, f: 'Fault'):
        """vcpu/act.rs: install_on_empty."""
        p = s.page(f)
        same = Or(s.number(p) == s.seen(f), self.without('number-is-compared'))
        return And(s.fpc(f) == RESOLVED, Not(s.leaf(p)), same), {
            **self.forget(s, f), 'leaf': put(s.leaf, p, True), 'answer': put(s.answer, p, s.got(f))}

    def step_give_up(self, s, f: 'Fault'):
        """vcpu.rs: the fault exits, comes back later or starts over."""
        return True, self.forget(s, f)

    def step_fill(self, s, c: 'Cpu', p: 'Page'):
        """A CPU walks and caches the leaf."""
        return s.leaf(p), {'cached': put(s.cached, (c, p, s.answer(p)), True)}

    # ---- A call.

    def changes(self, s, i):
        return s.kind(i) != HOST

    def deletes(self, s, i):
        return And(s.kind(i) == CHANGE, s.is_deletion(i))

    def moves(self, s, i):
        return And(s.kind(i) == CHANGE, Not(s.is_deletion(i)), s.is_move(i))

    def adds(self, s, i):
        return Or(s.kind(i) == CREATE, self.moves(s, i))

    def zaps(self, s, i):
        return Or(s.kind(i) == HOST, self.deletes(s, i), self.moves(s, i))

    def covers(self, s, i, p):
        return If(s.kind(i) == HOST, s.host_range(i, p), s.has(s.before(i), p))

    def step_find_slot(self, s, i: 'Call', d: 'Place'):
        """slot/set.rs: Slots::claim, the look-up."""
        mine = And(s.stands(d), s.id(s.slot(d)) == s.id_of(i))
        return And(s.ipc(i) == OUT, s.kind(i) == CHANGE, mine), {
            'ipc': put(s.ipc, i, FOUND), 'found': put(s.found, i, s.slot(d)), 'before': put(s.before, i, d)}

    def step_claim(self, s, i: 'Call'):
        """slot/set.rs: Slots::claim, the exchange."""
        k = s.found(i)
        free = Or(Not(s.claimed(k)), self.without('claim-excludes'))
        return And(s.ipc(i) == FOUND, free), {
            'ipc': put(s.ipc, i, LOCKED), 'claimed': put(s.claimed, k, True), 'holder': put(s.holder, k, i)}

    def step_read_again(self, s, i: 'Call', d: 'Place'):
        """slot/set.rs: Slots::claim, the second look-up."""
        d = s.before(i) if self.without('place-is-read-after-claim') else d
        now = Or(self.without('place-is-read-after-claim'),
            And(s.stands(d), s.id(s.slot(d)) == s.id_of(i)))
        moves = Implies(self.moves(s, i), s.slot(s.target(i)) == s.found(i))
        return And(s.ipc(i) == LOCKED, now, moves), {'ipc': put(s.ipc, i, CLAIMED),
            'before': put(s.before, i, d)}

    def step_make_slot(self, s, i: 'Call'):
        """slot/new.rs: NewSlot::new. The memslot is claimed until it is published."""
        k = s.slot(s.target(i))
        return And(s.ipc(i) == OUT, s.kind(i) == CREATE, Not(s.used(k)), s.id(k) == s.id_of(i)), {
            'ipc': put(s.ipc, i, CLAIMED), 'found': put(s.found, i, k), 'used': put(s.used, k, True),
            'claimed': put(s.claimed, k, True), 'holder': put(s.holder, k, i)}

    def step_publish_range(self, s, i: 'Call'):
        """second_stage/invalidate.rs: Invalidation::new, step 1."""
        if self.without('range-before-number'):
            return s.ipc(i) == IN_FLIGHT, {'ipc': put(s.ipc, i, NUMBERED)}
        return self.may_begin(s, i), {'ipc': put(s.ipc, i, IN_FLIGHT)}

    def may_begin(self, s, i):
        return And(self.zaps(s, i), s.ipc(i) == If(s.kind(i) == HOST, OUT, CLAIMED))

    def step_take_number(self, s, i: 'Call'):
        """second_stage/invalidate.rs: Invalidation::new, step 2."""
        number = {'own': put(s.own, i, s.counter() + 1), 'counter': lambda: s.counter() + 1}
        if self.without('range-before-number'):
            return self.may_begin(s, i), {'ipc': put(s.ipc, i, IN_FLIGHT), **number}
        return s.ipc(i) == IN_FLIGHT, {'ipc': put(s.ipc, i, NUMBERED), **number}

    def step_zap(self, s, i: 'Call', p: 'Page'):
        """second_stage/zap.rs: zap_range, one PTE."""
        stores = Or(s.leaf(p), And(s.number(p) < s.own(i), not self.without('numbers-are-stored')))
        return And(s.ipc(i) == NUMBERED, self.covers(s, i, p), Not(s.visited(i, p))), {
            'visited': put(s.visited, (i, p), True), 'leaf': put(s.leaf, p, False),
            'number': put(s.number, p, If(stores, s.own(i), s.number(p)))}

    def step_walked(self, s, i: 'Call'):
        """second_stage/zap.rs: zap_range, the end."""
        return And(s.ipc(i) == NUMBERED, s.all(lambda p: Implies(self.covers(s, i, p), s.visited(i, p)))), {
            'ipc': put(s.ipc, i, WALKED)}

    def step_flush(self, s, i: 'Call', c: 'Cpu'):
        """table/tlb.rs: TlbBatch::flush, on one CPU."""
        return s.ipc(i) == WALKED, {
            'flushed': put(s.flushed, (i, c), True),
            'cached': put_where(s.cached, lambda x, p, a: And(x == c, self.covers(s, i, p)), False)}

    def step_zapped(self, s, i: 'Call'):
        """second_stage/invalidate.rs: Invalidation::new, the end."""
        done = Or(s.all(lambda c: s.flushed(i, c)), self.without('flush-before-set'))
        return And(s.ipc(i) == WALKED, done), {'ipc': put(s.ipc, i, ZAPPED)}

    def step_host_changes(self, s, i: 'Call', p: 'Page', a: 'Answer'):
        """The host withdraws an answer for a page in the range."""
        return And(s.kind(i) == HOST, s.ipc(i) == ZAPPED, s.host_range(i, p)), {
            'allows': put(s.allows, (p, a), False)}

    def step_host_allows(self, s, p: 'Page', a: 'Answer'):
        """The host allows more, at any time."""
        return True, {'allows': put(s.allows, (p, a), True)}

    def step_host_done(self, s, i: 'Call'):
        """The caller of `Vm::invalidate_range` drops the `Invalidation`."""
        return And(s.kind(i) == HOST, s.ipc(i) == ZAPPED), {'ipc': put(s.ipc, i, CHANGED)}

    def may_publish(self, s, i):
        ready = IN_FLIGHT if self.without('zap-before-set') else ZAPPED
        return And(self.changes(s, i), s.ipc(i) == If(self.zaps(s, i), ready, CLAIMED))

    def step_build(self, s, i: 'Call'):
        """slot/set.rs: Slots::publish, the load of the pointer; slot/chunks.rs: Room::build with its checks."""
        d, out = s.target(i), self.left_out
        others = lambda e: And(s.stands(e), s.id(s.slot(e)) != s.id_of(i))
        vacant = s.all(lambda e, p: Not(And(others(e), s.has(e, p), s.has(d, p))))
        adds = Implies(self.adds(s, i), Or(vacant, out == 'vacancy'))
        free = Or(s.all(lambda e: Not(And(s.stands(e), s.id(s.slot(e)) == s.id_of(i)))),
            out == 'number-of-slot-is-free')
        return And(self.may_publish(s, i), adds, Implies(s.kind(i) == CREATE, free)), {
            'builds': put(s.builds, i, True), 'old_version': put(s.old_version, i, s.version()),
            'old': put_where(s.old, lambda j, e: j == i, lambda j, e: s.stands(e))}

    def step_publish_set(self, s, i: 'Call'):
        """slot/set.rs: Slots::publish, the exchange."""
        k, out = s.found(i), self.left_out
        same = Or(s.version() == s.old_version(i), out == 'exchange-compares')
        now = If(self.adds(s, i), s.target(i), s.before(i))
        kept = lambda e: And(s.old(i, e), Or(s.id(s.slot(e)) != s.id_of(i), s.kind(i) == CREATE))
        goes = self.deletes(s, i)
        return And(self.may_publish(s, i), s.builds(i), same), {
            'ipc': put(s.ipc, i, CHANGED), 'builds': put(s.builds, i, False),
            'version': lambda: s.version() + 1, 'stands': lambda e: Or(kept(e), And(Not(goes), e == now)),
            'where': put(s.where, k, If(goes, s.where(k), now)), 'gone': put(s.gone, k, Or(goes, s.gone(k)))}

    def step_fail(self, s, i: 'Call'):
        """vm/region.rs: out of memory, a refused range, or a busy number; the claim is dropped."""
        return And(self.changes(s, i), Or(s.ipc(i) == CLAIMED, self.may_publish(s, i))), {
            'ipc': put(s.ipc, i, OVER), 'builds': put(s.builds, i, False), 'claimed': put(s.claimed,
                s.found(i), False)}

    def step_withdraw(self, s, i: 'Call'):
        """second_stage/invalidate.rs: the range is withdrawn."""
        return And(self.zaps(s, i), s.ipc(i) == CHANGED), {'ipc': put(s.ipc, i, WITHDRAWN)}

    def step_return(self, s, i: 'Call'):
        """slot/set.rs: the claim is dropped, unless the memslot is deleted."""
        stays = And(self.deletes(s, i), not self.without('deleted-stays-claimed'))
        k = s.found(i)
        return s.ipc(i) == If(self.zaps(s, i), WITHDRAWN, CHANGED), {
            'ipc': put(s.ipc, i, OVER), 'claimed': put(s.claimed, k,
                If(self.changes(s, i), stays, s.claimed(k)))}

    # ---- A reclaim.

    def resolves(self, s, f, k):
        """The hazard pointer of the fault protects the memslot."""
        first = HAS_PLACE if not self.without('hazard-before-unpin') else OUTSIDE
        return And(first < s.fpc(f), s.fpc(f) < RESOLVED, s.slot(s.place(f)) == k)

    def step_first_look(self, s, k: 'Slot'):
        """table/retire.rs: Epochs::oldest_open."""
        closed = s.all(lambda f: Not(s.may_find(f, k)))
        idle = s.all(lambda f: Not(self.resolves(s, f, k)))
        return And(s.gone(k), idle if self.without('guards-before-hazards') else closed), {
            'looked_at': put(s.looked_at, k, True)}

    def step_free(self, s, k: 'Slot'):
        """slot/set.rs: Slots::reclaim, after Epochs::is_resolving."""
        closed = s.all(lambda f: Not(s.may_find(f, k)))
        free = s.all(lambda f: Not(self.resolves(s, f, k)))
        if self.without('hazards-are-respected'): free = True
        return And(s.looked_at(k), closed if self.without('guards-before-hazards') else free), {
            'freed': put(s.freed, k, True)}
