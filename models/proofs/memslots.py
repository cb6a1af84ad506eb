"""Memslots: no fault maps a page of a memslot that was deleted or moved.

Protocol: docs/protocols/memslots.md. Modules: slot/set.rs, slot/view.rs, vm/region.rs,
second_stage/invalidate.rs, table/retire.rs (hazard pointers). Any number of faults, calls,
memslots, places of memslots, pages and CPUs.

A call creates, deletes or moves a memslot, changes its flags, or is an invalidation of the host.
The published set is immutable: a change reads it, builds another and exchanges the pointer. Here a
set is the places that stand in it. A place is a memslot at a range; a move gives the memslot
another place. A leaf has an answer of the host, for one place. A memslot that is resized is not
modelled: the end that it loses goes as a deleted memslot does, and what it gets comes as a new one.

Proved: leaves and cached translations are of places that stand in the set, and the host still
allows them. Memslots of a set share no page and no number. What a change has published stays until
the next change of that memslot. A backing is not freed while a participant resolves in it.

PTEs have one level here; unlinked page-table pages, huge leaves and recovery are in the proofs of
invalidation, and so is what a range in flight is (`in_flight.py`). That no set or memslot is freed
behind an open guard is assumed in the form "freed only if each guard that was open when it was
taken out is over"; the epochs have a proof of their own. That equal pointers are equal sets follows
from that guard, and a set is identified by a version here. What flags do is in the proofs of
userfault and of the dirty log. Each step is atomic, in one order for all threads.
"""
import prover
import starts
from memslot_steps import (CHANGE, CHANGED, CLAIMED, CLEAR, CREATE, FOUND, HAS_PLACE, HOST, IDLE, IN_FLIGHT,
                           KEPT, LOCKED, LOOKED, MemslotSteps, NUMBERED, OUT, OVER, RESOLVED, WALKED,
                           WITHDRAWN, ZAPPED)
from prover import And, Implies, Not, Or
from starts import at


class Memslots(MemslotSteps):
    rules = {
        'pte-before-ranges': 'reads the ranges in flight, then the PTE',
        'ranges-before-slot': 'finds the memslot, then reads the ranges in flight',
        'number-is-compared': 'installs a leaf on any empty PTE',
        'range-before-number': 'takes its number, then publishes its range',
        'numbers-are-stored': 'leaves the number of an empty PTE as it is',
        'zap-before-set': 'publishes the new set before the pages are zapped',
        'flush-before-set': 'publishes the new set before the CPUs are flushed',
        'set-before-withdrawal': 'withdraws the range before the new set is published',
        'claim-excludes': 'changes a memslot that another call has claimed',
        'deleted-stays-claimed': 'releases the claim of a memslot that it has deleted',
        'place-is-read-after-claim': 'uses the place that it found before the claim',
        'exchange-compares': 'stores the new set over one that has changed meanwhile',
        'vacancy': 'does not compare the new range with the other memslots of the set',
        'number-of-slot-is-free': 'creates a memslot whose number is there already',
        'hazard-before-unpin': 'leaves the guard before it has set its hazard pointer',
        'guards-before-hazards': 'looks at the hazard pointers before it looks at the guards',
        'hazards-are-respected': 'frees a memslot without a look at the hazard pointers',
    }

    sizes = {'Fault': 1, 'Call': 4, 'Page': 2, 'Place': 2, 'Slot': 1, 'Id': 1, 'Answer': 2, 'Cpu': 1}
    start = at(kind=[CREATE, CHANGE, CHANGE, HOST], is_deletion=[False, True, False, False], target='place0',
        has=True, place_of=['place0', 'place0'])
    story = '''
        make_slot call0; build call0; publish_set call0; return call0; find_slot call1 place0; claim call1;
        read_again call1 place0; publish_range call1; take_number call1; zap call1 page0; zap call1 page1; walked call1;
        flush call1 cpu0; zapped call1; build call1; publish_set call1; withdraw call1; first_look slot0;
        free slot0'''

    # ---- What holds.

    def safe(self, s):
        good = lambda p, a: And(s.stands(s.place_of(a)), s.has(s.place_of(a), p), s.allows(p, a))
        return {
            'a leaf is of a place that stands in the set': s.all(
                lambda p: Implies(s.leaf(p), good(p, s.answer(p)))),
            'a cached translation is of a place that stands in the set': s.all(lambda c, p, a: Implies(
                s.cached(c, p, a), good(p, a))),
            'memslots of the set share no page': s.all(lambda d, e, p: Implies(
                And(s.stands(d), s.stands(e), s.has(d, p), s.has(e, p)), d == e)),
            'a memslot number is in the set once': s.all(lambda d, e: Implies(
                And(s.stands(d), s.stands(e), s.id(s.slot(d)) == s.id(s.slot(e))), d == e)),
            'a memslot is changed by one call at a time': s.all(lambda i, j: Implies(
                And(self.owns(s, i), self.owns(s, j), s.found(i) == s.found(j)), i == j)),
            'a deleted memslot does not come back': s.all(
                lambda d: Implies(s.gone(s.slot(d)), Not(s.stands(d)))),
            'a memslot that is there stands where its last change has put it': s.all(lambda d: Implies(
                s.stands(d), s.where(s.slot(d)) == d)),
            'a backing is not freed while a fault resolves in it': s.all(lambda f: Implies(
                And(HAS_PLACE <= s.fpc(f), s.fpc(f) < RESOLVED), Not(s.freed(s.slot(s.place(f)))))),
        }

    def owns(self, s, i):
        return And(self.changes(s, i), LOCKED <= s.ipc(i), s.ipc(i) <= WITHDRAWN)

    def inv(self, s):
        return {**self.inv_of_sets(s), **self.inv_of_calls(s), **self.inv_of_faults(s),
            **self.inv_of_reclaims(s)}

    def inv_of_sets(self, s):
        owns = self.owns
        before_set = lambda i: And(self.changes(s, i), CLAIMED <= s.ipc(i), s.ipc(i) < CHANGED)
        return {
            'a memslot in use was made': s.all(lambda k: Implies(Or(s.claimed(k), s.gone(k)), s.used(k))),
            'a call has found a memslot that was made': s.all(lambda i: Implies(
                And(self.changes(s, i), FOUND <= s.ipc(i), s.ipc(i) <= WITHDRAWN), s.used(s.found(i)))),
            'only a change of a memslot finds it': s.all(lambda i: Implies(
                Or(s.ipc(i) == FOUND, s.ipc(i) == LOCKED), s.kind(i) == CHANGE)),
            'a memslot of the set was made': s.all(lambda d: Implies(s.stands(d), s.used(s.slot(d)))),
            'a call that changes a memslot has claimed it': s.all(lambda i: Implies(owns(s, i), And(
                s.claimed(s.found(i)), s.holder(s.found(i)) == i))),
            'a deleted memslot is claimed for good': s.all(lambda k: Implies(s.gone(k), And(
                s.claimed(k), self.deletes(s, s.holder(k)), s.ipc(s.holder(k)) >= CHANGED))),
            'a call changes a memslot of its number': s.all(lambda i: Implies(
                And(self.changes(s, i), FOUND <= s.ipc(i)), s.id(s.found(i)) == s.id_of(i))),
            'a memslot that a call has found is there or deleted': s.all(lambda i: Implies(
                And(self.changes(s, i), s.kind(i) != CREATE, FOUND <= s.ipc(i), s.ipc(i) <= CLAIMED),
                Or(s.gone(s.found(i)), And(s.stands(s.where(s.found(i))),
                    s.slot(s.where(s.found(i))) == s.found(i))))),
            'what a claim has read stays until the exchange': s.all(lambda i: Implies(
                And(before_set(i), s.kind(i) != CREATE), And(s.stands(s.before(i)),
                    s.slot(s.before(i)) == s.found(i)))),
            'a new memslot stands nowhere before it is published': s.all(lambda i, d: Implies(
                And(before_set(i), s.kind(i) == CREATE), And(
                    Not(s.gone(s.found(i))), Implies(s.stands(d), s.slot(d) != s.found(i))))),
            'a move stays in its memslot': s.all(lambda i: Implies(
                And(before_set(i), self.adds(s, i)), s.slot(s.target(i)) == s.found(i))),
            'a set is built from a set that was there': s.all(
                lambda i: Implies(s.builds(i), s.old_version(i) <= s.version())),
            'a set of the same version is the same': s.all(lambda i, d: Implies(
                And(s.builds(i), s.old_version(i) == s.version()), s.old(i, d) == s.stands(d))),
            'a change that builds adds what fits': s.all(lambda i, e, p: Implies(
                And(s.builds(i), s.old_version(i) == s.version(), self.adds(s, i), s.stands(e),
                    s.id(s.slot(e)) != s.id_of(i), s.has(e, p)), Not(s.has(s.target(i), p)))),
            'a creation that builds has a free number': s.all(lambda i, e: Implies(
                And(s.builds(i), s.old_version(i) == s.version(), s.kind(i) == CREATE, s.stands(e)),
                s.id(s.slot(e)) != s.id_of(i))),
            'only a change builds': s.all(lambda i: Implies(s.builds(i), self.may_publish(s, i))),
        }

    def inv_of_calls(self, s):
        taken = lambda i: And(self.zaps(s, i), NUMBERED <= s.ipc(i), s.ipc(i) <= CHANGED)
        return {
            'a call is at one of its steps': s.all(lambda i: And(OUT <= s.ipc(i), s.ipc(i) <= OVER)),
            'a call of the host claims nothing': s.all(lambda i: Implies(
                s.kind(i) == HOST, Or(s.ipc(i) == OUT, s.ipc(i) >= IN_FLIGHT))),
            'only calls that zap are in flight': s.all(lambda i: Implies(
                And(IN_FLIGHT <= s.ipc(i), s.ipc(i) <= ZAPPED), self.zaps(s, i))),
            'pages are visited after the number is taken': s.all(lambda i, p: Implies(
                s.visited(i, p), And(self.zaps(s, i), s.ipc(i) >= NUMBERED))),
            'a walk has visited each page': s.all(lambda i, p: Implies(
                And(self.zaps(s, i), WALKED <= s.ipc(i), s.ipc(i) <= CHANGED,
                    self.covers(s, i, p)), s.visited(i, p))),
            'CPUs are flushed after the walk': s.all(lambda i, c: Implies(
                s.flushed(i, c), And(self.zaps(s, i), s.ipc(i) >= WALKED))),
            'each CPU is flushed before the set changes': s.all(lambda i, c: Implies(
                And(self.zaps(s, i), ZAPPED <= s.ipc(i), s.ipc(i) <= CHANGED), s.flushed(i, c))),
            'a flushed CPU caches nothing of the range': s.all(lambda i, c, p, a: Implies(
                And(taken(i), s.flushed(i, c), self.covers(s, i, p)), Not(s.cached(c, p, a)))),
            'a visited page is empty, with this number or a greater one': s.all(lambda i, p: Implies(
                And(taken(i), s.visited(i, p), self.covers(s, i, p)), And(Not(s.leaf(p)),
                    s.number(p) >= s.own(i)))),
            'a leaf in a range has a smaller number': s.all(lambda i, p: Implies(
                And(taken(i), self.covers(s, i, p), s.leaf(p)), s.number(p) < s.own(i))),
            'numbers of pages come from the counter': s.all(lambda p: s.number(p) <= s.counter()),
            'numbers of calls come from the counter': s.all(
                lambda i: Implies(taken(i), s.own(i) <= s.counter())),
        }

    def inv_of_faults(self, s):
        taken = lambda i: And(self.zaps(s, i), NUMBERED <= s.ipc(i), s.ipc(i) <= CHANGED)
        older = lambda f: s.seen(f) < s.number(s.page(f))
        knows = lambda f: s.fpc(f) >= HAS_PLACE
        return {
            'a fault is at one of its steps': s.all(lambda f: And(IDLE <= s.fpc(f), s.fpc(f) <= RESOLVED)),
            'a fault that does not run has read nothing': s.all(lambda f,
                i: Implies(s.fpc(f) == IDLE, Not(s.passed(f, i)))),
            'a fault goes on when it has passed all ranges': s.all(lambda f,
                i: Implies(s.fpc(f) >= CLEAR, s.passed(f, i))),
            'a PTE has no smaller number than a fault has read': s.all(lambda f: Implies(
                s.fpc(f) != IDLE, s.seen(f) <= s.number(s.page(f)))),
            'a fault that reads the number of a call notices its range': s.all(lambda f, i: Implies(
                And(s.fpc(f) != IDLE, taken(i), self.covers(s, i, s.page(f)),
                    s.seen(f) >= s.own(i)), Not(s.passed(f, i)))),
            'the place of a fault has its page': s.all(
                lambda f: Implies(knows(f), s.has(s.place(f), s.page(f)))),
            'a place that is gone has cost the fault its number': s.all(lambda f: Implies(
                And(knows(f), Not(s.stands(s.place(f)))), older(f))),
            'an answer is of the place of the fault': s.all(lambda f: Implies(
                s.fpc(f) == RESOLVED, s.place_of(s.got(f)) == s.place(f))),
            'an answer that the host has withdrawn has cost the fault its number': s.all(lambda f: Implies(
                And(s.fpc(f) == RESOLVED, Not(s.allows(s.page(f), s.got(f)))), older(f))),
        }

    def inv_of_reclaims(self, s):
        guarded = lambda f: And(LOOKED <= s.fpc(f), s.fpc(f) <= KEPT)
        return {
            'a guard from before a deletion may find the memslot': s.all(lambda f, k: Implies(
                And(guarded(f), Not(s.gone(k))), s.may_find(f, k))),
            'a fault is in a guard that may find its memslot': s.all(lambda f: Implies(
                And(HAS_PLACE <= s.fpc(f), s.fpc(f) <= KEPT), s.may_find(f, s.slot(s.place(f))))),
            'only an open guard finds a memslot': s.all(lambda f, k: Implies(s.may_find(f, k), guarded(f))),
            'a reclaim looks at deleted memslots': s.all(lambda k: Implies(s.looked_at(k), And(
                s.gone(k), s.all(lambda f: Not(s.may_find(f, k)))))),
            'a memslot is freed after both looks': s.all(lambda k: Implies(s.freed(k), s.looked_at(k))),
        }


def run(sizes, start):
    return starts.run(Memslots, sizes, start)


# One memslot stands at its only place, and a call deletes it.
ONE = at(kind=CHANGE, is_deletion=True, has=True, allows=True, stands=True, used=True)
# The call has flushed, and a fault has found the memslot before.
LATE = {**ONE, **at(claimed=True, counter=1, number=1, own=1, visited=True, flushed=True, ipc=ZAPPED,
    passed=True,
                    fpc=HAS_PLACE, may_find=True)}
# One memslot has two places, for a page each.
MOVED = {**ONE, 'has': lambda d, p: d[-1] == p[-1], **at(
    is_deletion=False, slot=['slot0', 'slot0'], place_of=['place1'], stands=[False,
        True], where='place1', ipc=FOUND,
    before='place0', leaf=[False, True])}
# Each of two memslots has a place, for a page each. One call changes flags, another deletes.
BOTH = {**ONE, 'has': lambda d, p: d[-1] == p[-1], **at(
    is_deletion=[False, True], slot=['slot0', 'slot1'], id=['id0', 'id1'], id_of=['id0',
        'id1'], where=['place0', 'place1'],
    found=['slot0', 'slot1'], before=['place0', 'place1'], holder=['call0', 'call1'], claimed=True,
    ipc=[CLAIMED, ZAPPED], counter=1, number=[0, 1], own=1), 'visited': lambda i, p: (i, p) == (
        'call1', 'page1'),
    'flushed': lambda i, c: i == 'call1'}
# A memslot stands, and a call creates another.
NEW = {**ONE, **at(kind=CREATE, slot=['slot0', 'slot1'], target='place1', stands=[True, False],
    used=[True, False])}
TWO = {'Place': 2, 'Slot': 2}
Memslots.traces = {
    'pte-before-ranges': run({}, ONE),
    'ranges-before-slot': run({}, ONE),
    'number-is-compared': run({}, ONE),
    'range-before-number': run({'Call': 2}, {**ONE, **at(kind=[CHANGE, HOST], host_range=True)}),
    'numbers-are-stored': run({}, ONE),
    'zap-before-set': run({}, {**ONE, **at(leaf=True)}),
    'flush-before-set': run({}, {**ONE, **at(leaf=True)}),
    'set-before-withdrawal': run({}, ONE),
    'claim-excludes': run({'Call': 2}, ONE),
    'place-is-read-after-claim': run({'Page': 2, 'Place': 2}, MOVED),
    'exchange-compares': run({'Call': 2, 'Page': 2, 'Id': 2, **TWO}, BOTH),
    'vacancy': run({'Id': 2, **TWO}, {**NEW, **at(id=['id0', 'id1'], id_of='id1')}),
    'number-of-slot-is-free': run(TWO, {**NEW, 'has': lambda d, p: d == 'place0'}),
    'hazard-before-unpin': run({}, LATE),
    'guards-before-hazards': run({}, LATE),
    'hazards-are-respected': run({}, LATE),
}

if __name__ == '__main__':
    prover.main(Memslots)
