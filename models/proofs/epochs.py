"""Epochs: nothing is freed that an open guard can reach. Any number of participants, guards, things,
reclaimers.

Protocol: docs/protocols/deferred-freeing.md. Engine: table/{retire,participant}.rs.

Here memory is weaker than sequentially consistent, where the protocol depends on it:
- What a participant stores to its announcement (`mem`) becomes visible late, in order: the end of the last
  guard (`idle_late`), then the next announcement (`late`). A read-modify-write makes all visible.
- A guard reads links as old as it likes. It fails to reach an unlinked thing only once it has *observed* the
  unlinking: it read an epoch that began after it (acquire), or it made a full fence after the full fence of
  a reclaimer that has the thing, or that reclaimer's barrier came on its CPU.
- A reclaimer without a fence reads old announcements.

The announcements of counted guards and of a fault's guard are two `Participant`s here, with observations of
their own. `remote`: guards begin without a fence, and reclaimers make a barrier on all CPUs; `by_rmw` guards
always have the fence of a lock. A participant that is made meanwhile is one that was idle.

The two guards of a fault follow each other. The second may announce what the first has announced, and take
over what that found (`kept`), unless it is *aware* of its retirement: then it reads another epoch. As with an
unlinking, it may read an epoch as old as it likes, until it has observed the retirement.

A hazard pointer protects one thing beyond the guard in which it was reached. It becomes visible before the
end of that guard does. All things are checked for it here; the engine does so for memslots.

Left out: the flush before a retirement (`invalidation.py` flushes before the host acts);
the links of the list, which lie in the things themselves.
"""
import prover
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

OUT, READ, STORED, IN = range(4)                            # of a participant
LINKED, UNLINKED, TAGGED, LISTED, TAKEN, FREED = range(6)   # of a thing
START, TOOK, FENCED = range(3)                              # of a reclaimer
SORTS = ['Participant', 'Guard', 'Thing', 'Batch', 'Reclaimer']
IDLE = 0                                                    # an announcement; epochs begin at 1


def run(remote=False, by_rmw=False, **sizes):
    """A search with one of all, but for `sizes`."""
    return {'sizes': {**dict.fromkeys(SORTS, 1), **sizes},
            'start': {'epoch': lambda: 1, 'remote': lambda: remote, 'by_rmw': lambda k: by_rmw}}


class Epochs(Protocol):
    sorts = SORTS
    letters = {'k': 'Participant', 'g': 'Guard', 't': 'Thing', 'b': 'Batch', 'r': 'Reclaimer'}
    # `batch`: the retirement of a thing. One retires any number.
    fixed = {'of': (['Guard'], 'Participant'), 'batch': (['Thing'], 'Batch'), 'remote': ([], 'bool'),
             'by_rmw': (['Participant'], 'bool')}
    state = {
        'epoch': ([], 'int'),
        'pc': (['Participant'], 'int'), 'val': (['Participant'], 'int'), 'mem': (['Participant'], 'int'),
        'late': (['Participant'], 'bool'), 'idle_late': (['Participant'], 'bool'),
        'observed': (['Participant', 'Thing'], 'bool'),
        # What a guard that is over has found, for the next. Whose retirement is observed.
        'kept': (['Participant', 'Thing'], 'bool'), 'aware': (['Participant', 'Thing'], 'bool'),
        'open': (['Guard'], 'bool'), 'holds': (['Guard', 'Thing'], 'bool'),
        'tpc': (['Thing'], 'int'), 'tag': (['Thing'], 'int'), 'taker': (['Thing'], 'Reclaimer'),
        'rpc': (['Reclaimer'], 'int'), 'hit': (['Reclaimer', 'Participant'], 'bool'),
        # The hazard pointer: what it protects, and whether others see that.
        'protects': (['Participant'], 'bool'), 'hazard': (['Participant'], 'Thing'),
        'hazard_late': (['Participant'], 'bool'), 'hazard_mem': (['Participant', 'Thing'], 'bool'),
        'checked': (['Reclaimer', 'Participant', 'Thing'], 'bool'),
        'scanned': (['Reclaimer', 'Participant'], 'bool'), 'found': (['Reclaimer', 'Participant'], 'int'),
    }
    rules = {
        'guard-fence': 'a guard begins without a fence, and no reclaimer makes a barrier',
        'rmw': 'the guard of a lock has no fence, and no reclaimer makes a barrier',
        'reclaim-fence': 'a reclaimer reads the announcements without a fence before',
        'barrier': 'guards begin without a fence, and no reclaimer makes the barrier on all CPUs',
        'barrier-first': 'a reclaimer reads announcements before the barrier has come on all CPUs',
        'compiler-fence': 'the compiler moves reads of a guard before its announcement',
        'nest-end': 'the end of any guard ends the announcement',
        'nest-begin': 'each guard of a participant announces the epoch anew',
        'tag-below': 'a thing is freed whose tag equals the oldest announcement',
        'unlink-first': 'a thing is tagged before it is unlinked',
        'take-first': 'the announcements are read before the list is taken',
        'scan-all': 'a reclaimer passes a participant over',
        'hazard-check': 'a reclaimer does not look at hazard pointers',
        'hazard-last': 'a reclaimer looks at hazard pointers before it reads the announcements',
        'hazard-release': 'the end of a guard becomes visible before the hazard pointer that it has set',
        'acquire': 'a guard reads the epoch without acquire, and has no fence',
        'same-epoch': 'a guard takes over what the one before has found, whatever the epoch is by then',
    }
    sizes = {'Participant': 1, 'Guard': 2, 'Thing': 1, 'Batch': 1, 'Reclaimer': 2}
    start = {'epoch': lambda: 1}

    traces = {
        'guard-fence': run(), 'rmw': run(by_rmw=True), 'reclaim-fence': run(), 'barrier': run(remote=True),
        'barrier-first': run(remote=True), 'compiler-fence': run(remote=True), 'nest-end': run(Guard=2),
        'nest-begin': run(Guard=2), 'tag-below': run(), 'unlink-first': run(), 'take-first': run(),
        'scan-all': run(), 'hazard-check': run(), 'hazard-last': run(), 'hazard-release': run(),
        'acquire': run(remote=True), 'same-epoch': run(),
    }

    def init(self, s):
        return {
            'epoch': s.epoch() == 1,
            'participants': s.all(lambda k: And(s.pc(k) == OUT, s.mem(k) == IDLE, Not(s.late(k)),
                                                Not(s.idle_late(k)), s.val(k) == IDLE)),
            'observed': s.all(lambda k, t: And(Not(s.observed(k, t)), Not(s.aware(k, t)))),
            'nothing is kept': s.all(lambda k, t: Not(s.kept(k, t))),
            'guards': s.all(lambda g, t: And(Not(s.open(g)), Not(s.holds(g, t)))),
            'closed': s.all(lambda g: Not(s.open(g))),
            'things': s.all(lambda t: s.tpc(t) == LINKED),
            'reclaimers': s.all(lambda r: s.rpc(r) == START),
            'hazards': s.all(lambda k: And(Not(s.protects(k)), Not(s.hazard_late(k)))),
            'hazards are not seen': s.all(lambda k, t: Not(s.hazard_mem(k, t))),
            'checks': s.all(lambda r, k, t: Not(s.checked(r, k, t))),
            'scans': s.all(lambda r, k: And(Not(s.hit(r, k)), Not(s.scanned(r, k)))),
        }

    # A participant.

    def step_read_epoch(self, s, k: 'Participant'):
        """table/retire.rs: announce. Acquire: it observes what was unlinked before the epoch began."""
        again = And(self.without('nest-begin'), s.pc(k) == IN)
        before = lambda j, t: And(j == k, s.tpc(t) >= TAGGED, s.tag(t) < s.epoch(),
                                  not self.without('acquire'))
        return Or(s.pc(k) == OUT, again), {
            'pc': put(s.pc, k, READ), 'val': put(s.val, k, s.epoch()),
            'kept': put_where(s.kept, lambda j, t: j == k, False),
            'observed': put_where(s.observed, before, True), 'aware': put_where(s.aware, before, True)}

    def step_read_none(self, s, k: 'Participant'):
        """table/retire.rs: reopen. The next guard announces what the one before has announced."""
        return And(s.pc(k) == OUT, s.val(k) != IDLE), {'pc': put(s.pc, k, READ)}

    def step_store(self, s, k: 'Participant'):
        """table/retire.rs: announce, pin_by_rmw. A plain store; with `Fences::Remote` nothing more."""
        plain = And(s.remote(), Not(s.by_rmw(k)))
        return And(s.pc(k) == READ, Or(s.remote(), s.by_rmw(k))), {
            'pc': put(s.pc, k, If(plain, IN, STORED)), 'late': put(s.late, k, True)}

    def hazard_seen(self, s, k):
        seen = lambda j, t: And(s.protects(k), t == s.hazard(k))
        return {'hazard_late': put(s.hazard_late, k, False),
                'hazard_mem': put_where(s.hazard_mem, lambda j, t: j == k, seen)}

    def fence(self, s, k):
        """All that `k` stored is visible, and it observes what reclaimers had before their fences."""
        had = lambda t: Or(And(s.tpc(t) >= TAKEN, s.rpc(s.taker(t)) == FENCED),
                           And(s.tpc(t) >= TAGGED, s.tag(t) < s.val(k)))
        return {**self.hazard_seen(s, k), 'mem': put(s.mem, k, s.val(k)), 'late': put(s.late, k, False),
                'idle_late': put(s.idle_late, k, False),
                'observed': put_where(s.observed, lambda j, t: And(j == k, had(t)), True),
                'aware': put_where(s.aware, lambda j, t: And(j == k, had(t)), True)}

    def step_swap(self, s, k: 'Participant'):
        """table/retire.rs: announce. A read-modify-write and a fence."""
        changes = {'late': put(s.late, k, True)} if self.without('guard-fence') else self.fence(s, k)
        return And(s.pc(k) == READ, Not(s.remote()), Not(s.by_rmw(k))), {'pc': put(s.pc, k, IN), **changes}

    def step_rmw(self, s, k: 'Participant'):
        """table/retire.rs: pin_by_rmw; table/vm_lock.rs."""
        changes = {} if self.without('rmw') else self.fence(s, k)
        return s.pc(k) == STORED, {'pc': put(s.pc, k, IN), **changes}

    def step_idle_visible(self, s, k: 'Participant'):
        """The store buffer of a CPU."""
        first = Or(Not(s.hazard_late(k)), self.without('hazard-release'))
        return And(s.idle_late(k), first), {
            'mem': put(s.mem, k, IDLE), 'idle_late': put(s.idle_late, k, False)}

    def step_visible(self, s, k: 'Participant'):
        """The store buffer of a CPU."""
        return And(s.late(k), Not(s.idle_late(k))), {
            'mem': put(s.mem, k, s.val(k)), 'late': put(s.late, k, False)}

    def step_open(self, s, g: 'Guard'):
        """table/participant.rs: new. A guard within others has no announcement of its own."""
        return And(s.pc(s.of(g)) == IN, Not(s.open(g))), {'open': put(s.open, g, True)}

    def step_reach(self, s, g: 'Guard', t: 'Thing'):
        """Reads of a guard: table/cursor.rs, slot/."""
        k = s.of(g)
        at = And(s.open(g), s.pc(k) == IN)
        early = And(self.without('compiler-fence'), s.pc(k) == READ)
        return And(Or(at, early), Not(s.observed(k, t))), {'holds': put(s.holds, (g, t), True)}

    def step_keep_for_next(self, s, g: 'Guard', t: 'Thing'):
        """table/retire.rs: keep."""
        return And(s.open(g), s.holds(g, t)), {'kept': put(s.kept, (s.of(g), t), True)}

    def step_take_over(self, s, g: 'Guard', t: 'Thing'):
        """table/retire.rs: reopen. The epoch is still what was announced: no retirement is observed."""
        k = s.of(g)
        same = True if self.without('same-epoch') else Not(s.aware(k, t))
        return And(s.open(g), s.pc(k) == IN, s.kept(k, t), same), {'holds': put(s.holds, (g, t), True)}

    def step_protect(self, s, g: 'Guard', t: 'Thing'):
        """table/participant.rs: protect."""
        k = s.of(g)
        return And(s.open(g), s.pc(k) == IN, s.holds(g, t), Not(s.protects(k))), {
            'protects': put(s.protects, k, True), 'hazard': put(s.hazard, k, t),
            'hazard_late': put(s.hazard_late, k, True)}

    def step_hazard_visible(self, s, k: 'Participant'):
        """The store buffer of a CPU."""
        return s.hazard_late(k), self.hazard_seen(s, k)

    def step_unprotect(self, s, k: 'Participant'):
        """table/participant.rs: drop. To see it late only keeps the thing longer."""
        return s.protects(k), {'protects': put(s.protects, k, False),
                               'hazard_late': put(s.hazard_late, k, False),
                               'hazard_mem': put_where(s.hazard_mem, lambda j, t: j == k, False)}

    def step_observe(self, s, k: 'Participant', t: 'Thing'):
        """The unlinking becomes visible."""
        return s.tpc(t) >= UNLINKED, {'observed': put(s.observed, (k, t), True)}

    def step_be_aware(self, s, k: 'Participant', t: 'Thing'):
        """The retirement becomes visible."""
        return s.tpc(t) >= TAGGED, {'aware': put(s.aware, (k, t), True)}

    def step_close(self, s, g: 'Guard'):
        """table/participant.rs: drop. Release: the reads of the guard are over."""
        k = s.of(g)
        alone = s.all(lambda g2: Implies(s.of(g2) == k, Or(g2 == g, Not(s.open(g2)))))
        last = True if self.without('nest-end') else alone
        return And(s.open(g), s.pc(k) == IN), {
            'open': put(s.open, g, False), 'holds': put_where(s.holds, lambda g2, t: g2 == g, False),
            'pc': put(s.pc, k, If(last, OUT, s.pc(k))), 'late': put(s.late, k, And(s.late(k), Not(last))),
            'idle_late': put(s.idle_late, k, Or(s.idle_late(k), last))}

    # A thing.

    def step_unlink(self, s, t: 'Thing'):
        """second_stage/zap.rs: visit; a published memslot set."""
        if self.without('unlink-first'):
            return And(s.tpc(t) == LINKED, s.tag(t) > 0), {'tpc': put(s.tpc, t, TAGGED)}
        return s.tpc(t) == LINKED, {'tpc': put(s.tpc, t, UNLINKED)}

    def step_advance(self, s, b: 'Batch'):
        """table/retire.rs: advance_epoch."""
        at, to = (LINKED, LINKED) if self.without('unlink-first') else (UNLINKED, TAGGED)
        mine = lambda t: And(s.batch(t) == b, s.tpc(t) == at)
        return s.some(mine), {
            'tpc': put_where(s.tpc, mine, to), 'tag': put_where(s.tag, mine, s.epoch()),
            'epoch': lambda: s.epoch() + 1}

    def step_list(self, s, t: 'Thing'):
        """table/retire.rs: retire_tables."""
        return s.tpc(t) == TAGGED, {'tpc': put(s.tpc, t, LISTED)}

    # A reclaimer.

    def step_take(self, s, r: 'Reclaimer'):
        """table/retire.rs: reclaim_tables. Acquire."""
        listed = lambda t: s.tpc(t) == LISTED
        late = And(self.without('take-first'), s.rpc(r) == FENCED)
        return Or(s.rpc(r) == START, late), {
            'rpc': put(s.rpc, r, If(late, FENCED, TOOK)), 'tpc': put_where(s.tpc, listed, TAKEN),
            'taker': put_where(s.taker, listed, r)}

    def step_fence(self, s, r: 'Reclaimer'):
        """table/retire.rs: oldest_open."""
        return s.rpc(r) == TOOK, {'rpc': put(s.rpc, r, FENCED)}

    def step_barrier(self, s, r: 'Reclaimer', k: 'Participant'):
        """table/retire.rs: oldest_open. `Host::barrier_on_all_cpus` on the CPU of `k`."""
        mine = lambda t: And(s.tpc(t) >= TAKEN, s.taker(t) == r)
        return And(s.rpc(r) == FENCED, s.remote(), not self.without('barrier')), {
            **self.hazard_seen(s, k), 'hit': put(s.hit, (r, k), True),
            'mem': put(s.mem, k, If(s.late(k), s.val(k), If(s.idle_late(k), IDLE, s.mem(k)))),
            'late': put(s.late, k, False), 'idle_late': put(s.idle_late, k, False),
            'observed': put_where(s.observed, lambda j, t: And(j == k, mine(t)), True),
            'aware': put_where(s.aware, lambda j, t: And(j == k, mine(t)), True)}

    def step_scan(self, s, r: 'Reclaimer', k: 'Participant'):
        """table/retire.rs: oldest_open. Acquire."""
        ready = True if self.without('barrier', 'barrier-first') else s.all(lambda k2: s.hit(r, k2))
        fenced = s.rpc(r) >= TOOK if self.without('reclaim-fence') else s.rpc(r) == FENCED
        found = If(s.rpc(r) == FENCED, s.mem(k), IDLE)
        return And(fenced, Implies(s.remote(), ready), Not(s.scanned(r, k))), {
            'scanned': put(s.scanned, (r, k), True), 'found': put(s.found, (r, k), found)}

    def allows(self, s, r, t):
        """No announcement that `r` has read keeps `t`."""
        above = lambda k: s.found(r, k) >= s.tag(t) if self.without('tag-below') else s.found(r, k) > s.tag(t)
        none = lambda k: Or(s.found(r, k) == IDLE, above(k))
        if self.without('scan-all'):
            return s.all(lambda k: Or(Not(s.scanned(r, k)), none(k)))
        return s.all(lambda k: And(s.scanned(r, k), none(k)))

    def step_check_hazard(self, s, r: 'Reclaimer', k: 'Participant', t: 'Thing'):
        """table/retire.rs: is_resolving."""
        allowed = True if self.without('hazard-last') else self.allows(s, r, t)
        unseen = Or(Not(s.hazard_mem(k, t)), self.without('hazard-check'))
        return And(s.tpc(t) == TAKEN, s.taker(t) == r, s.rpc(r) == FENCED, allowed, unseen), {
            'checked': put(s.checked, (r, k, t), True)}

    def step_free(self, s, r: 'Reclaimer', t: 'Thing'):
        """table/retire.rs: reclaim_tables; a replaced memslot set."""
        checked = s.all(lambda k: s.checked(r, k, t))
        return And(s.tpc(t) == TAKEN, s.taker(t) == r, self.allows(s, r, t), checked), {
            'tpc': put(s.tpc, t, FREED)}

    def step_keep(self, s, r: 'Reclaimer', t: 'Thing'):
        """table/retire.rs: reclaim_tables. Back on the list."""
        return And(s.tpc(t) == TAKEN, s.taker(t) == r), {'tpc': put(s.tpc, t, LISTED)}

    def safe(self, s):
        return {
            'no guard holds what is freed': s.all(lambda g, t: Implies(s.holds(g, t), s.tpc(t) != FREED)),
            'no hazard pointer protects what is freed': s.all(lambda k: Implies(
                s.protects(k), s.tpc(s.hazard(k)) != FREED)),
        }

    def inv(self, s):
        tagged = lambda t: s.tpc(t) >= TAGGED
        began = lambda k: s.pc(k) != OUT
        has = lambda r, t: And(s.tpc(t) >= TAKEN, s.taker(t) == r)
        allows = lambda r, k, t: Or(s.found(r, k) == IDLE, s.found(r, k) > s.tag(t))
        return {
            'phases of participants': s.all(lambda k: And(s.pc(k) >= OUT, s.pc(k) <= IN)),
            'phases of things': s.all(lambda t: And(s.tpc(t) >= LINKED, s.tpc(t) <= FREED)),
            'phases of reclaimers': s.all(lambda r: And(s.rpc(r) >= START, s.rpc(r) <= FENCED)),
            'epochs begin at 1': s.epoch() >= 1,
            'a tag is an epoch that is over': s.all(lambda t: Implies(tagged(t), s.tag(t) < s.epoch())),
            'an announcement is an epoch': s.all(
                lambda k: And(Implies(began(k), 1 <= s.val(k)), IDLE <= s.val(k), s.val(k) <= s.epoch())),
            'an open guard is announced': s.all(lambda g: Implies(s.open(g), s.pc(s.of(g)) == IN)),
            'a guard that holds something is open': s.all(lambda g, t: Implies(s.holds(g, t), s.open(g))),
            'only what is unlinked is observed so': s.all(lambda k,
                                                          t: Implies(s.observed(k, t), s.tpc(t) >= UNLINKED)),
            'a reclaimer took what it has': s.all(
                lambda t: Implies(s.tpc(t) >= TAKEN, s.rpc(s.taker(t)) >= TOOK)),
            'announcements are read after the fence': s.all(lambda r,
                                                            k: Implies(s.scanned(r, k), s.rpc(r) == FENCED)),
            'the barrier is after the fence': s.all(lambda r, k: Implies(s.hit(r, k), s.rpc(r) == FENCED)),
            'announcements are read after the barrier': s.all(lambda r, k: Implies(
                And(s.scanned(r, k), s.remote()), s.hit(r, k))),
            'late is what is stored': s.all(
                lambda k: Implies(s.late(k), Or(s.pc(k) == STORED, s.pc(k) == IN))),
            'an announcement with a fence is visible': s.all(lambda k: Implies(
                And(s.pc(k) == IN, Or(Not(s.remote()), s.by_rmw(k))),
                And(s.mem(k) == s.val(k), Not(s.late(k)), Not(s.idle_late(k))))),
            'an announcement is visible or late': s.all(lambda k: Implies(
                s.pc(k) == IN, Or(s.late(k), And(s.mem(k) == s.val(k), Not(s.idle_late(k)))))),
            'a guard has observed what was unlinked before its epoch': s.all(lambda k, t: Implies(
                And(tagged(t), s.tag(t) < s.val(k)), s.observed(k, t))),
            'a guard is aware of what was retired before its epoch': s.all(lambda k, t: Implies(
                And(tagged(t), s.tag(t) < s.val(k)), s.aware(k, t))),
            'only of what is retired a guard is aware': s.all(lambda k, t: Implies(s.aware(k, t), tagged(t))),
            'nothing is kept from before the epoch': s.all(lambda k, t: Implies(
                And(s.kept(k, t), tagged(t)), s.val(k) <= s.tag(t))),
            'the barrier makes a CPU aware': s.all(lambda r, k, t: Implies(
                And(s.hit(r, k), has(r, t)), s.aware(k, t))),
            'a guard that was not found is aware of what is freed': s.all(lambda r, k, t: Implies(
                And(s.scanned(r, k), has(r, t), Or(s.found(r, k) == IDLE, s.found(r, k) > s.tag(t)),
                    s.pc(k) == IN),
                s.aware(k, t))),
            'a guard holds nothing from before its epoch': s.all(lambda g, t: Implies(
                And(s.holds(g, t), tagged(t)), s.val(s.of(g)) <= s.tag(t))),
            'the barrier lets a CPU observe': s.all(lambda r, k, t: Implies(
                And(s.hit(r, k), has(r, t)), s.observed(k, t))),
            'the barrier makes announcements visible': s.all(lambda r, k, g, t: Implies(
                And(s.hit(r, k), has(r, t), s.of(g) == k, s.holds(g, t)),
                And(s.mem(k) == s.val(k), Not(s.late(k)), Not(s.idle_late(k))))),
            'a guard that was not found has observed what is freed': s.all(lambda r, k, t: Implies(
                And(s.scanned(r, k), has(r, t), Or(s.found(r, k) == IDLE, s.found(r, k) > s.tag(t)),
                    s.pc(k) == IN),
                s.observed(k, t))),
            'a guard that was not found holds nothing that is freed': s.all(lambda r, g, t: Implies(
                And(s.scanned(r, s.of(g)), has(r, t), Or(s.found(r, s.of(g)) == IDLE,
                                                         s.found(r, s.of(g)) > s.tag(t))),
                Not(s.holds(g, t)))),
            'what is protected is seen or late': s.all(lambda k: Implies(
                And(s.protects(k), Not(s.hazard_late(k))), s.hazard_mem(k, s.hazard(k)))),
            'a late hazard pointer protects': s.all(lambda k: Implies(s.hazard_late(k), s.protects(k))),
            'the end of a guard is behind its late hazard pointer': s.all(lambda k: Implies(
                And(s.hazard_late(k), s.pc(k) != IN), s.idle_late(k))),
            'hazard pointers are read after the fence': s.all(lambda r, k, t: Implies(
                s.checked(r, k, t), s.rpc(r) == FENCED)),
            'no future epoch is seen': s.all(lambda k: s.mem(k) <= s.epoch()),
            'a late hazard pointer is behind a guard with a fence': s.all(lambda k: Implies(
                And(s.hazard_late(k), Or(Not(s.remote()), s.by_rmw(k))),
                And(s.mem(k) != IDLE, Implies(tagged(s.hazard(k)), s.mem(k) <= s.tag(s.hazard(k)))))),
            'a late hazard pointer is behind a guard that the barrier showed': s.all(lambda r, k: Implies(
                And(s.hazard_late(k), s.hit(r, k), has(r, s.hazard(k))),
                And(s.mem(k) != IDLE, s.mem(k) <= s.tag(s.hazard(k)),
                    Not(And(s.late(k), Not(s.idle_late(k))))))),
            'what is protected was not allowed, or is seen': s.all(lambda r, k: Implies(
                And(s.protects(k), s.scanned(r, k), has(r, s.hazard(k)), allows(r, k, s.hazard(k))),
                And(s.hazard_mem(k, s.hazard(k)), Not(s.hazard_late(k))))),
            'what was checked was allowed': s.all(lambda r, k, t: Implies(
                And(s.checked(r, k, t), has(r, t)), And(s.scanned(r, k), allows(r, k, t)))),
            'what was checked is not protected': s.all(lambda r, k: Implies(
                And(s.protects(k), has(r, s.hazard(k))), Not(s.checked(r, k, s.hazard(k))))),
            'what is freed was checked': s.all(lambda k, t: Implies(
                s.tpc(t) == FREED, s.checked(s.taker(t), k, t))),
            'what is freed was not found': s.all(lambda k, t: Implies(
                s.tpc(t) == FREED, And(s.scanned(s.taker(t), k), allows(s.taker(t), k, t)))),
        }


if __name__ == '__main__':
    prover.main(Epochs)
