"""Userfault and attributes: no vCPU reaches a page that user space has taken back, or memory of
another kind.

Protocol: docs/protocols/userfault.md. Modules: slot/userfault.rs, slot/attributes.rs,
second_stage/rescan.rs, second_stage/zap.rs (`Faults::MayComeBack`), vm/page_state.rs, vm/region.rs,
vcpu.rs. Any number of faults, calls, pages, blocks, memslots, bitmaps, kinds and CPUs.

A call is an invalidation of any pages, which may change attributes meanwhile; a change of a
memslot's flag or bitmap; or a rescan. User space sets and clears bits at any time. A bit stands for
a page, or for a block. A block is one PTE (empty, or a huge leaf) or a page-table page; it is
split, linked and unlinked. A call may stand in a page-table page while another call unlinks it
(`cut`). A bit is *due* for a call if it was set before the call and was not
cleared since, and *pending* when that call has returned.

Proved: while the flag is on, a page whose bit is pending is neither mapped nor cached. Each leaf
and each cached translation is of the kind that its page has. While bits stand for pages, no leaf is
larger than a page.

A rescan finds the bitmap, reads the bits, and then takes a number for each run of pages. It may
be of parts of blocks. Here faults install in the midst of it: the proof does not need the range in
flight of a run, which is for reports (`harvest_beside_zap.py`). So the number of a page may fall,
and the invariant says that the PTE has *another* number than a fault that is too late has seen.

A fault may also replace the leaf of one page that the host did not let be written. A leaf has no
number, so the fault reads the counter before the ranges, and again after it has exchanged the leaf.

Not covered: memslots that move (the rescan starts over, and `memslots.py` has the rest); break
before make with unflushed numbers; recovery beside bits and attributes; that a page is filled
before its bit is clear, which is up to user space; a fault that reads a PTE of a page-table page
that was unlinked (`invalidation.py`). Each step is atomic, in one order for all threads.
"""
import prover
import starts
from prover import And, If, Implies, Not, Or
from starts import at
from userfault_steps import (ALL, ATTRIBUTES, BEGUN, BIT, CHANGED, FLAG, FREE, GONE, HELD, IN_FLIGHT, MEMSLOT,
                             NUMBERED, OUT, OVER, PTE, RANGE, RANGES, RESCAN, STORED, TOOK, UserfaultSteps, WALKED,
                             ZAPPED)


class Userfault(UserfaultSteps):
    rules = {
        'bit-after-pte': 'reads the bit of the page, then the PTE',
        'attributes-after-pte': 'reads the attributes of the page, then the PTE',
        'ranges-before-slot': 'finds the memslot, then reads the ranges in flight',
        'number-is-compared': 'installs a leaf on any empty PTE',
        'leaves-fit-bits': 'installs a huge leaf while bits stand for pages',
        'pages-are-alike': 'installs a huge leaf by the attributes of one page',
        'block-is-beside-ranges': 'installs a huge leaf that reaches into a range in flight',
        'flag-invalidates': 'publishes the flag or another bitmap, and zaps nothing',
        'change-before-withdrawal': 'withdraws the range before the set or the attributes have changed',
        'attributes-after-zap': 'stores the attributes before it has taken its number',
        'rescan-takes-number': 'rescans with a number that another thread has taken',
        'numbers-are-stored': 'leaves the number of an empty PTE as it is',
        'rescan-unlinks-nothing': 'unlinks page-table pages in a rescan',
        'flush-in-any-case': 'flushes only what it has zapped',
        'counter-before-ranges': 'reads the counter for a read-only leaf after all else',
        'counter-is-compared': 'replaces a read-only leaf without a second look at the counter',
    }
    sizes = {'Fault': 1, 'Call': 3, 'Page': 2, 'Block': 1, 'Slot': 1, 'Map': 1, 'Kind': 2, 'Cpu': 1}
    start = at(whole=True, kind=[FLAG, RESCAN, RANGE], turns_on=True, range=True)
    story = '''
        look fault0; pass_ranges fault0; clear fault0; find fault0; read_bit fault0; read_attributes fault0;
        compare_attributes fault0 page0; compare_attributes fault0 page1; install_huge fault0;
        begin call0; publish_range call0; take_number call0; take_fresh fresh0; zap_block call0 page0 fresh0; walked call0;
        flush call0 cpu0; flushed call0; publish_set call0;
        begin call1; find_bitmap call1; scan call1 page0; scan call1 page1'''

    def safe(self, s):
        taken_back = lambda p: And(s.on(s.slot(p)), s.pending(s.map(s.slot(p)), p))
        return {
            'no page is mapped whose bit is pending': s.all(lambda p: Implies(taken_back(p), Not(s.leaf(p)))),
            'no page is cached whose bit is pending': s.all(lambda c, p, k: Implies(
                taken_back(p), Not(s.cached(c, p, k)))),
            'a leaf is of the kind of its page': s.all(
                lambda p: Implies(s.leaf(p), s.leaf_kind(p) == s.attribute(p))),
            'a cached translation is of the kind of its page': s.all(lambda c, p, k: Implies(
                s.cached(c, p, k), k == s.attribute(p))),
            'no leaf is larger than what a bit stands for': s.all(lambda p: Implies(
                And(s.on(s.slot(p)), Not(s.is_big(s.map(s.slot(p)))), s.whole(s.block(p))), Not(s.leaf(p)))),
        }

    def inv(self, s):
        return {**self.inv_of_numbers(s), **self.inv_of_calls(s), **self.inv_of_faults(s),
            **self.inv_of_bits(s)}

    def inv_of_replacements(self, s):
        took, has = lambda f: s.fpc(f) >= TOOK, lambda i: self.has_number(s, i)
        saw = lambda f: And(self.has(s, f, PTE), Not(s.on_leaf(f)))
        return {
            'the number of a fault comes after what it has seen': s.all(lambda f: Implies(
                took(f), And(s.seen(f) < s.fown(f), s.fown(f) <= s.counter()))),
            'numbers of faults and of calls are different': s.all(lambda f, i: Implies(
                And(took(f), has(i)), s.fown(f) != s.own(i))),
            'numbers of faults are different': s.all(lambda f, f2: Implies(
                And(took(f), took(f2), s.fown(f) == s.fown(f2)), f == f2)),
            'the number of a fault is at no page before its exchange': s.all(lambda f, p: Implies(
                s.fpc(f) == TOOK, s.number(p) != s.fown(f))),
            'the number of a fault is seen by no fault before its exchange': s.all(lambda f, f2: Implies(
                And(s.fpc(f) == TOOK, saw(f2)), s.seen(f2) != s.fown(f))),
            'a number that was taken since is counted': s.all(lambda f, i: Implies(
                And(s.on_leaf(f), has(i), s.own(i) > s.seen(f)),
                s.counter() > s.seen(f) + If(took(f), 1, 0))),
        }

    def taken(self, s, i):
        return And(self.keeps_out(s, i), NUMBERED <= s.ipc(i), s.ipc(i) <= CHANGED)

    def has_number(self, s, i):
        return s.own(i) > 0

    def inv_of_numbers(self, s):
        has = lambda i: self.has_number(s, i)
        return {
            'a block is one PTE or has a page-table page': s.all(lambda p, q: Implies(
                And(s.whole(s.block(p)), s.block(p) == s.block(q)),
                And(s.number(p) == s.number(q), s.leaf(p) == s.leaf(q)))),
            'the counter counts': s.counter() >= 0,
            'a call that zaps has a number': s.all(lambda i: And(s.own(i) >= 0, Implies(
                Or(s.ipc(i) == NUMBERED, And(s.ipc(i) >= NUMBERED, self.keeps_out(s, i))), s.own(i) > 0))),
            'a number is of a call that zaps': s.all(lambda i: Implies(s.own(i) > 0, Or(
                And(self.keeps_out(s, i), s.ipc(i) >= NUMBERED), And(s.kind(i) == RESCAN, s.ipc(i) >= BEGUN)))),
            **self.inv_of_fresh(s),
            'numbers of pages come from the counter': s.all(lambda p: s.number(p) <= s.counter()),
            'numbers of calls come from the counter': s.all(
                lambda i: Implies(has(i), s.own(i) <= s.counter())),
            'numbers of calls are different': s.all(lambda i, j: Implies(
                And(has(i), has(j), s.own(i) == s.own(j)), i == j)),
            'numbers that faults have seen come from the counter': s.all(lambda f: Implies(
                self.has(s, f, PTE), s.seen(f) <= s.counter())),
            'a page has the number of a call only from that call': s.all(lambda i, p: Implies(
                And(has(i), s.number(p) == s.own(i)), s.gave(i, p))),
            'a fault has seen the number of a call only after that call': s.all(lambda f, i: Implies(
                And(has(i), self.has(s, f, PTE), Not(s.on_leaf(f)), s.seen(f) == s.own(i)),
                s.gave(i, s.page(f)))),
            **self.inv_of_replacements(s),
        }

    def inv_of_fresh(self, s):
        held, took = lambda n: s.state_of(n) == HELD, lambda f: s.fpc(f) >= TOOK
        saw = lambda f: And(self.has(s, f, PTE), Not(s.on_leaf(f)))
        return {
            'states of fresh numbers': s.all(lambda n: And(s.state_of(n) >= FREE, s.state_of(n) <= STORED)),
            'fresh numbers are counted': s.all(lambda n: Implies(s.state_of(n) != FREE, And(
                s.fresh(n) > 0, s.fresh(n) <= s.counter()))),
            'fresh numbers differ': s.all(lambda n, n2: Implies(
                And(s.state_of(n) != FREE, s.state_of(n2) != FREE, s.fresh(n) == s.fresh(n2)), n == n2)),
            'a fresh number is at no page': s.all(lambda n, p: Implies(held(n), s.number(p) != s.fresh(n))),
            'a fresh number was not seen': s.all(lambda n, f: Implies(
                And(held(n), saw(f)), s.seen(f) != s.fresh(n))),
            'own and fresh numbers differ': s.all(lambda i, n: Implies(
                And(self.has_number(s, i), s.state_of(n) != FREE), s.own(i) != s.fresh(n))),
            'numbers of faults and fresh numbers differ': s.all(lambda f, n: Implies(
                And(took(f), s.state_of(n) != FREE), s.fown(f) != s.fresh(n))),
        }

    def had(self, s, i, p):
        """The call has visited the page, or may stand in a page-table page of it that was unlinked."""
        return Or(s.visited(i, p), s.cut(i, p))

    def inv_of_calls(self, s):
        taken = lambda i: self.taken(s, i)
        return {
            'a call is at one of its steps': s.all(lambda i: And(OUT <= s.ipc(i), s.ipc(i) <= OVER)),
            'only calls that zap take a number': s.all(lambda i: Implies(
                And(IN_FLIGHT <= s.ipc(i), s.ipc(i) <= ZAPPED), Or(self.keeps_out(s, i),
                    s.kind(i) == RESCAN))),
            'pages are visited after the number is taken': s.all(lambda i, p: Implies(
                Or(s.visited(i, p), s.scanned(i, p), s.gave(i, p), s.cut(i, p)),
                Or(s.ipc(i) >= NUMBERED, And(s.kind(i) == RESCAN, s.ipc(i) == BEGUN)))),
            'what a rescan has scanned it has found': s.all(lambda i, p: Implies(s.scanned(i, p), s.found(i))),
            'a rescan finds bitmaps': s.all(lambda i: Implies(
                s.found(i), And(s.kind(i) == RESCAN, BEGUN <= s.ipc(i)))),
            'what a rescan wants was scanned': s.all(lambda i, p: Implies(s.wanted(i, p), s.scanned(i, p))),
            'what is visited is wanted': s.all(lambda i, p: Implies(
                self.had(s, i, p), self.wants(s, i, p))),
            'a walk has visited each page': s.all(lambda i, p: Implies(
                And(Or(self.keeps_out(s, i), s.kind(i) == RESCAN), WALKED <= s.ipc(i), self.wants(s, i, p)),
                s.visited(i, p))),
            'a rescan has read each bit': s.all(lambda i, p: Implies(
                And(s.kind(i) == RESCAN, WALKED <= s.ipc(i), self.covers(s, i, p)), s.scanned(i, p))),
            'CPUs are flushed after the walk': s.all(lambda i,
                c: Implies(s.flushed(i, c), s.ipc(i) >= WALKED)),
            'each CPU is flushed': s.all(lambda i, c: Implies(
                And(Or(self.keeps_out(s, i), s.kind(i) == RESCAN), ZAPPED <= s.ipc(i)), s.flushed(i, c))),
            'a visited page is empty while the range is in flight': s.all(lambda i, p: Implies(
                And(taken(i), self.had(s, i, p)), Not(s.leaf(p)))),
            'a flushed CPU caches nothing of the range': s.all(lambda i, c, p, k: Implies(
                And(taken(i), s.flushed(i, c), self.covers(s, i, p)), Not(s.cached(c, p, k)))),
        }

    def late(self, s, f, q):
        """The page has another number than the fault has seen. If it saw a leaf: a number was taken since."""
        return If(s.on_leaf(f), s.counter() > s.seen(f) + If(s.fpc(f) >= TOOK, 1, 0),
            s.number(q) != s.seen(f))

    def in_block(self, s, f, q):
        """The fault saw one PTE for the block of the page, and it is one again, or still."""
        return And(s.saw_whole(f), s.whole(s.block(q)), s.block(q) == s.block(s.page(f)))

    def may_be_huge(self, s, f):
        return Not(And(s.saw_on(f), Not(s.is_big(s.saw_map(f)))))

    def inv_of_faults(self, s):
        p, k = lambda f: s.page(f), lambda f: s.slot(s.page(f))
        looked = lambda f: self.has(s, f, PTE)
        taken, late = lambda i: self.taken(s, i), lambda f, q: self.late(s, f, q)
        in_block = lambda f, q: self.in_block(s, f, q)
        newer = lambda f, i: And(looked(f), taken(i), s.seen(f) >= s.own(i))
        return {
            'a fault is at one of its steps': s.all(lambda f: And(
                0 <= s.fpc(f), s.fpc(f) <= GONE, Implies(s.fpc(f) >= TOOK, s.on_leaf(f)),
                Implies(s.on_leaf(f), And(self.has(s, f, PTE), Not(s.saw_whole(f)))))),
            'a fault that does not run has read nothing': s.all(lambda f, i: Implies(
                Not(self.has(s, f, PTE)), And(Not(s.passed(f, i)), Not(s.beside(f, i))))),
            'a fault goes on when it has passed all ranges': s.all(lambda f, i: Implies(
                self.has(s, f, RANGES), s.passed(f, i))),
            'a fault that reads a newer number notices the range': s.all(lambda f, i: Implies(
                And(newer(f, i), self.covers(s, i, p(f))), Not(s.passed(f, i)))),
            'a fault that reads a newer number notices a range in its block': s.all(lambda f, i, q: Implies(
                And(newer(f, i), self.covers(s, i, q), s.block(q) == s.block(p(f))), Not(s.beside(f, i)))),
            'a fault that has passed a range is late once its page is visited': s.all(lambda f, i: Implies(
                And(looked(f), s.passed(f, i), taken(i), self.had(s, i, p(f))), late(f, p(f)))),
            'a fault that has passed a range is late once its block is visited': s.all(lambda f, i,
                q: Implies(
                And(looked(f), s.beside(f, i), taken(i), self.had(s, i, q), in_block(f, q)), late(f, q))),
            'a fault that found another flag or bitmap is late': s.all(lambda f: Implies(
                And(self.has(s, f, MEMSLOT), s.on(k(f)),
                    Not(And(s.saw_on(f), s.saw_map(f) == s.map(k(f))))), late(f, p(f)))),
            'a fault that has read another attribute is late': s.all(lambda f: Implies(
                And(self.has(s, f, ATTRIBUTES), s.saw_kind(f) != s.attribute(p(f))), late(f, p(f)))),
            'a fault that may map its block has passed all ranges beside it': s.all(lambda f, i: Implies(
                And(self.has(s, f, RANGES), s.huge(f)), s.beside(f, i))),
            'a fault that has compared another attribute is late': s.all(lambda f, q: Implies(
                And(self.has(s, f, ATTRIBUTES), s.huge(f), s.alike(f, q), in_block(f, q),
                    s.saw_kind(f) != s.attribute(q)),
                late(f, q))),
        }

    def maps(self, s, f, p):
        """The fault has found the bit clear, and would map the page."""
        huge = And(self.may_be_huge(s, f), self.in_block(s, f, p))
        return And(self.has(s, f, BIT), Or(s.page(f) == p, huge))

    def clean(self, s, which, when):
        """A page for which `when` holds, for a call, is not mapped, and no fault maps it."""
        return {
            f'a page {which} is not mapped': s.all(lambda i, p: Implies(when(i, p), Not(s.leaf(p)))),
            f'a fault that would map a page {which} is late': s.all(lambda i, p, f: Implies(
                And(when(i, p), self.maps(s, f, p)), self.late(s, f, p))),
        }

    def inv_of_bits(self, s):
        covers = lambda i, p: If(
            s.kind(i) == RESCAN, self.reaches(s, i, s.map(s.slot(p)), p), self.covers(s, i, p))
        due = lambda i, p: And(s.on(s.slot(p)), s.due(i, s.map(s.slot(p)), p), covers(i, p))
        rescans = lambda i: And(s.kind(i) == RESCAN, BEGUN <= s.ipc(i), s.ipc(i) <= ZAPPED)
        replaced = lambda i, p: And(rescans(i), due(i, p), s.found(i), s.found_map(i) != s.map(s.slot(p)))
        pending = lambda p: And(s.on(s.slot(p)), s.pending(s.map(s.slot(p)), p))
        published = lambda i, p: And(s.kind(i) == FLAG, s.turns_on(i), s.ipc(i) == CHANGED, due(i, p),
                                     s.map(s.slot(p)) == s.new_map(i))
        unwanted = lambda i, p: And(rescans(i), due(i, p), s.scanned(i, p), Not(s.wanted(i, p)))
        visited = lambda i, p: And(rescans(i), due(i, p), self.had(s, i, p))
        return {
            'what is due is set': s.all(lambda i, m, p: Implies(s.due(i, m, p), s.bit(m, p))),
            'what is pending is set': s.all(lambda m, p: Implies(s.pending(m, p), s.bit(m, p))),
            'a bit stands for its block': s.all(lambda m, p, q: Implies(
                And(s.is_big(m), s.block(p) == s.block(q)), And(
                    s.bit(m, p) == s.bit(m, q), s.pending(m, p) == s.pending(m, q)))),
            'a bit is due for its block': s.all(lambda i, m, p, q: Implies(
                And(s.is_big(m), s.block(p) == s.block(q)), s.due(i, m, p) == s.due(i, m, q))),
            'a fault on a page that is pending is late': s.all(lambda f: Implies(
                And(pending(s.page(f)), self.has(s, f, BIT)), self.late(s, f, s.page(f)))),
            'a fault that would map a page that is pending is late': s.all(lambda f, p: Implies(
                And(pending(p), self.maps(s, f, p)), self.late(s, f, p))),
            **self.clean(s, 'whose bit is due when the flag is published', published),
            **self.clean(s, 'that a rescan does not want', unwanted),
            **self.clean(s, 'whose bit is due in another bitmap than a rescan has found', replaced),
            **self.clean(s, 'that a rescan has visited', visited),
            'a page whose bit is due in another bitmap than a rescan has found is not cached': s.all(
                lambda i, p, c, k: Implies(replaced(i, p), Not(s.cached(c, p, k)))),
            'a page whose bit is due when the flag is published is not cached': s.all(lambda i, p, c,
                k: Implies(
                published(i, p), Not(s.cached(c, p, k)))),
            'a page that a rescan does not want is not cached': s.all(lambda i, p, c, k: Implies(
                unwanted(i, p), Not(s.cached(c, p, k)))),
            'a page that a rescan has flushed is not cached': s.all(lambda i, p, c, k: Implies(
                And(visited(i, p), s.flushed(i, c)), Not(s.cached(c, p, k)))),
            'a fault that reads a newer number and the bit finds it set, or is late': s.all(lambda i,
                f: Implies(
                And(rescans(i), s.own(i) > 0, due(i, s.page(f)), self.has(s, f, BIT), s.seen(f) >= s.own(i)),
                self.late(s, f, s.page(f)))),
        }


def run(start, **sizes):
    return starts.run(Userfault, sizes, start)


# The flag is on; a rescan; two pages are one block; a call changes attributes; a call turns the flag on.
ON = at(on=True, kind=RESCAN, range=True)
BLOCK = {**ON, **at(whole=True)}
PRIVATE = at(kind=RANGE, range=True)
FLAGGED = at(kind=FLAG, turns_on=True)
READ = at(leaf=True, fpc=ALL, on_leaf=True, saw_on=True, passed=True)       # a fault has read all, of a leaf
CLEAN = at(fpc=ALL, saw_on=True, passed=True)                              # a fault has read all, with the bit clear
Userfault.traces = {
    'bit-after-pte': run(ON),
    'attributes-after-pte': run(PRIVATE, Kind=2),
    'ranges-before-slot': run(FLAGGED),
    'number-is-compared': run(ON),
    'leaves-fit-bits': run(BLOCK, Page=2),
    'pages-are-alike': run({**BLOCK, **at(on=False, attribute=['kind0', 'kind1'])}, Page=2, Kind=2),
    'block-is-beside-ranges': run({**PRIVATE, **at(
        whole=True, range=[False, True], ipc=NUMBERED, own=1, counter=2, visited=[False, True], number=2)},
        Page=2, Kind=2),
    'flag-invalidates': run({**FLAGGED, **at(leaf=True)}),
    'change-before-withdrawal': run(PRIVATE, Kind=2),
    'attributes-after-zap': run(PRIVATE, Kind=2),
    'rescan-takes-number': run({**ON, **CLEAN}),
    'numbers-are-stored': run({**ON, **CLEAN, **at(
        ipc=NUMBERED, own=1, counter=1, bit=True, due=True, found=True, scanned=True, wanted=True)}),
    'rescan-unlinks-nothing': run({**ON, **at(
        ipc=NUMBERED, own=1, counter=1, number=1, gave=True, found=True, scanned=True, wanted=True, visited=True)}),
    'flush-in-any-case': run({**ON, **at(cached=True)}),
    'counter-before-ranges': run({**PRIVATE, **READ, **at(ipc=IN_FLIGHT)}, Kind=2),
    'counter-is-compared': run({**ON, **READ, **at(
        fpc=TOOK, fown=2, ipc=NUMBERED, own=1, counter=2, bit=True, due=True, found=True, scanned=True,
        wanted=True)}),
}

if __name__ == '__main__':
    prover.main(Userfault)
