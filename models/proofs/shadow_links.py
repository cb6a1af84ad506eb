"""Shadow paging: a vCPU that flushes has compared each page that it reaches, also by links that
appear meanwhile.

Protocol: docs/protocols/shadow-paging.md, the rule on links. Modules: shadow/install.rs (link),
shadow/sync.rs. Any number of vCPUs, flushes, threads that link, links, roots, middle pages and
lowest pages.

A root links to middle pages, and these to lowest pages. A thread that links holds the lock of the
page above. It registers the link with the page below, compares what is unsync below, and then
writes the PTE that CPUs walk. It may give up in between; then another thread goes on with the
registered link, and compares all anew. A load of CR3 climbs from each unsync page along the links that are
registered, and compares the page if it finds the root. INVLPG walks down from the root along the
links of its address, and compares the PTE that it comes to. Then the vCPU's own CPU is flushed.

A page is *fresh* for a flush if it was compared since that flush began, or is synced:
`shadow_sync.py` proves that it then has nothing older than the flush must see, and stays so. Proved
here: what a CPU reaches, or has cached links to, is fresh for each flush of its vCPU that is over.

Not here: deeper trees (the code does the same at each level), other roots of a vCPU and what is
deferred for them, lives of records. INVLPG waits here for the locks of the pages that it goes
through, as the code does; the proof does not need that, since the target is stored when the link is
registered. A comparison is one step. Each step is atomic, in one order for all threads.
"""
import prover
import starts
from prover import And, If, Implies, Not, Or, Protocol, put, put_where
from starts import at

OUT, HOLDS, REGISTERED, OVER = range(4)                                 # of a thread that links
WALKS, LOCAL, FLUSHED = range(1, 4)                                     # of a flush


class ShadowLinks(Protocol):
    sorts = ['Linker', 'Flush', 'Link', 'Upper', 'Page', 'Cpu', 'Index']
    letters = {'k': 'Linker', 'n': 'Linker', 'i': 'Flush', 'j': 'Flush', 'l': 'Link', 'm': 'Link',
               'u': 'Upper', 'p': 'Page', 'c': 'Cpu'}
    fixed = {
        'is_root': (['Upper'], 'bool'), 'above': (['Link'], 'Upper'), 'index': (['Link'], 'Index'),
        'link': (['Linker'], 'Link'), 'to_middle': (['Linker'], 'Upper'), 'to_page': (['Linker'], 'Page'),
        # is_all: a load of CR3
        'root': (['Cpu'], 'Upper'), 'cpu': (['Flush'], 'Cpu'), 'is_all': (['Flush'], 'bool'),
        'first': (['Flush'], 'Link'), 'second': (['Flush'], 'Index'),   # the links of an INVLPG's address
    }
    state = {
        'registered': (['Link'], 'bool'), 'written': (['Link'], 'bool'),
        'middle': (['Link'], 'Upper'), 'page': (['Link'], 'Page'), 'linker': (['Link'], 'Linker'),
        'locked': (['Upper'], 'bool'), 'bit': (['Page'], 'bool'),
        'kpc': (['Linker'], 'int'), 'done': (['Linker', 'Page'], 'bool'),
        'fresh': (['Flush', 'Page'], 'bool'),                           # ghost
        'ipc': (['Flush'], 'int'),
        'settled': (['Flush', 'Page'], 'bool'), 'climbed': (['Flush', 'Page'], 'bool'),
        'found': (['Flush', 'Link'], 'bool'),       # a parent of the page when it was climbed, and ever since
        'beside': (['Flush', 'Link'], 'bool'),                          # that parent was not below the root
        'visited': (['Flush'], 'bool'), 'at': (['Flush'], 'Upper'), 'visited_2': (['Flush'], 'bool'),
        # what INVLPG went through is still registered
        'same': (['Flush'], 'bool'), 'same_2': (['Flush'], 'bool'),
        'reaches': (['Cpu', 'Link', 'Link', 'Page'], 'bool'),
    }
    rules = {
        'register-before-compare': 'compares what is below, and then registers the link',
        'compare-before-write': 'writes the link before it has compared what is below',
        'link-compares': 'compares nothing when it links',
        'clear-before-unregister': 'ends to register a link that CPUs still walk',
        'all-parents-are-climbed': 'climbs from a page and finds none of its parents',
        'local-flush': "does not flush the vCPU's own CPU",
    }
    sizes = {'Linker': 3, 'Flush': 2, 'Link': 2, 'Upper': 2, 'Page': 1, 'Cpu': 1, 'Index': 1}
    # A root and a middle page, with a link each.
    start = at(is_root=[True, False], above=['upper0', 'upper1'], link=['link0', 'link1', 'link0'], to_middle='upper1',
               root='upper0', first='link0', is_all=[True, False])

    def axioms(self, s):
        return {
            'an index of a page is one link': s.all(lambda l, m: Implies(
                And(s.above(l) == s.above(m), s.index(l) == s.index(m)), l == m)),
            'a vCPU has a root': s.all(lambda c: s.is_root(s.root(c))),
            "the first link of an address is the root's": s.all(
                lambda i: s.above(s.first(i)) == s.root(s.cpu(i))),
            'a root links to no root': s.all(lambda k: Not(s.is_root(s.to_middle(k)))),
        }

    def init(self, s):
        return {
            'nothing is linked': s.all(lambda l: And(Not(s.registered(l)), Not(s.written(l)))),
            'no thread links': And(s.all(lambda u: Not(s.locked(u))), s.all(lambda k: s.kpc(k) == OUT)),
            'nothing is compared': s.all(lambda k, p: Not(s.done(k, p))),
            'no flush runs': s.all(lambda i: And(s.ipc(i) == OUT, Not(s.visited(i)), Not(s.visited_2(i)),
                Not(s.same(i)), Not(s.same_2(i)))),
            'nothing is settled': s.all(lambda i, p: And(Not(s.settled(i, p)), Not(s.climbed(i, p)))),
            'nothing is found': s.all(lambda i, l: And(Not(s.found(i, l)), Not(s.beside(i, l)))),
            'no CPU reaches a page': s.all(lambda c, l, m, p: Not(s.reaches(c, l, m, p))),
        }

    def compare(self, s, where):
        """The pages are fresh from now on, for each flush that has begun."""
        return put_where(s.fresh, lambda i, p: And(where(p), s.ipc(i) != OUT), True)

    # ---- Pages, and a CPU.

    def step_unsync(self, s, p: 'Page'):
        """shadow/install.rs: give_up_tracking."""
        return True, {'bit': put(s.bit, p, True)}

    def step_synced(self, s, p: 'Page'):
        """shadow/sync.rs: end_sync, of any vCPU."""
        return True, {'bit': put(s.bit, p, False), 'fresh': self.compare(s, lambda q: q == p)}

    def step_fill(self, s, c: 'Cpu', l: 'Link', m: 'Link'):
        """A CPU walks from its root to a lowest page, and caches what it went through."""
        return And(s.written(l), s.above(l) == s.root(c), s.written(m), s.above(m) == s.middle(l)), {
            'reaches': put(s.reaches, (c, l, m, s.page(m)), True)}

    # ---- A link.

    def step_lock(self, s, k: 'Linker'):
        """shadow/install.rs: link, the lock of the page above."""
        u = s.above(s.link(k))
        return And(s.kpc(k) == OUT, Not(s.locked(u))), {'kpc': put(s.kpc, k, HOLDS),
            'locked': put(s.locked, u, True)}

    def step_register(self, s, k: 'Linker'):
        """shadow/install.rs: link, set_target and the list of parents, under the lock of the frame below."""
        l, late = s.link(k), self.without('register-before-compare')
        done = s.all(lambda p: s.done(k, p)) if late else True
        return And(s.kpc(k) == HOLDS, Not(s.registered(l)), done), {
            'kpc': put(s.kpc, k, REGISTERED), 'registered': put(s.registered, l,
                True), 'linker': put(s.linker, l, k),
            'middle': put(s.middle, l, s.to_middle(k)), 'page': put(s.page, l, s.to_page(k))}

    def step_sync_below(self, s, k: 'Linker', p: 'Page'):
        """shadow/sync.rs: sync_below, one page. It is compared if it is unsync, and below."""
        below = s.some(lambda m: And(s.registered(m), s.above(m) == s.to_middle(k), s.page(m) == p))
        mine = If(s.is_root(s.above(s.link(k))), below, p == s.to_page(k))
        compares = And(s.bit(p), mine, not self.without('link-compares'))
        late = self.without('register-before-compare')
        return And(s.kpc(k) == (HOLDS if late else REGISTERED), Not(s.done(k, p))), {
            'done': put(s.done, (k, p), True), 'fresh': self.compare(s, lambda q: And(q == p, compares))}

    def step_write(self, s, k: 'Linker'):
        """shadow/install.rs: link, the store of the PTE, if the link is still registered."""
        l, early = s.link(k), self.without('compare-before-write')
        done = True if early else s.all(lambda p: s.done(k, p))
        return And(s.kpc(k) == REGISTERED, s.registered(l), done), {
            'kpc': put(s.kpc, k, REGISTERED if early else OVER), 'written': put(s.written, l, True),
            'locked': put(s.locked, s.above(l), early)}

    def step_fail(self, s, k: 'Linker'):
        """shadow/install.rs: link. The page below was removed meanwhile."""
        return And(s.kpc(k) == REGISTERED, Not(s.registered(s.link(k)))), {
            'kpc': put(s.kpc, k, OVER), 'locked': put(s.locked, s.above(s.link(k)), False)}

    def step_give_up(self, s, k: 'Linker'):
        """shadow/install.rs: link. Another thread holds a lock: the link stays registered, and the guest
        tries again."""
        return s.kpc(k) == REGISTERED, {
            'kpc': put(s.kpc, k, OVER), 'locked': put(s.locked, s.above(s.link(k)), False)}

    def step_take_over(self, s, k: 'Linker'):
        """shadow/install.rs: link, where the same link is registered and not written. All is compared
        anew."""
        l = s.link(k)
        same = And(s.middle(l) == s.to_middle(k), s.page(l) == s.to_page(k))
        return And(s.kpc(k) == HOLDS, s.registered(l), Not(s.written(l)), same), {
            'kpc': put(s.kpc, k, REGISTERED), 'linker': put(s.linker, l, k)}

    def step_clear(self, s, l: 'Link'):
        """shadow/zap.rs: drop_entry and zap_page, the PTE."""
        return s.written(l), {'written': put(s.written, l, False)}

    def step_unregister(self, s, l: 'Link'):
        """shadow/zap.rs: drop_entry and zap_page, the target and the list of parents."""
        cleared = True if self.without('clear-before-unregister') else Not(s.written(l))
        return And(s.registered(l), cleared), {
            'registered': put(s.registered, l, False),
            'found': put_where(s.found, lambda i, m: m == l, False),
            'same': put_where(s.same, lambda i: s.first(i) == l, False),
            'same_2': put_where(s.same_2, lambda i: And(s.above(l) == s.at(i), s.index(l) == s.second(i)),
                False)}

    # ---- A flush.

    def step_begin(self, s, i: 'Flush'):
        """shadow/roots.rs: load_cr3, invalidate_address. A page whose bit is clear is fresh."""
        return s.ipc(i) == OUT, {
            'ipc': put(s.ipc, i, WALKS), 'fresh': put_where(s.fresh, lambda j, p: j == i, lambda j,
                p: Not(s.bit(p)))}

    def climbs(self, s, i):
        return And(s.ipc(i) == WALKS, s.is_all(i))

    def step_pass(self, s, i: 'Flush', p: 'Page'):
        """shadow/page.rs: next_unsync, a page whose bit is clear."""
        return And(self.climbs(s, i), Not(s.bit(p))), {'settled': put(s.settled, (i, p), True)}

    def step_climb(self, s, i: 'Flush', p: 'Page'):
        """shadow/sync.rs: is_below, the parents of a lowest page, under the lock of its frame."""
        blind = self.without('all-parents-are-climbed')
        parents = lambda j, m: And(j == i, s.registered(m), s.page(m) == p, Not(s.is_root(s.above(m))))
        return And(self.climbs(s, i), Not(s.climbed(i, p))), {
            'climbed': put(s.climbed, (i, p), True),
            'found': put_where(s.found, parents, not blind), 'beside': put_where(s.beside, parents, False)}

    def step_climb_further(self, s, i: 'Flush', m: 'Link'):
        """shadow/sync.rs: is_below, the parents of a middle page. The root is none of them."""
        below = s.some(lambda l: And(s.registered(l), s.above(l) == s.root(s.cpu(i)),
            s.middle(l) == s.above(m)))
        return And(self.climbs(s, i), s.found(i, m), Not(below)), {'beside': put(s.beside, (i, m), True)}

    def step_sync(self, s, i: 'Flush', p: 'Page'):
        """shadow/sync.rs: sync_root, a page that may be below the root is synchronized."""
        return self.climbs(s, i), {'settled': put(s.settled, (i, p), True),
            'fresh': self.compare(s, lambda q: q == p)}

    def step_climbed(self, s, i: 'Flush'):
        """shadow/sync.rs: sync_root, the end."""
        pages = s.all(lambda p: Or(s.settled(i, p), s.climbed(i, p)))
        links = s.all(lambda m: Implies(s.found(i, m), Or(s.settled(i, s.page(m)), s.beside(i, m))))
        return And(self.climbs(s, i), pages, links), {'ipc': put(s.ipc, i, LOCAL)}

    def step_visit_root(self, s, i: 'Flush'):
        """shadow/sync.rs: sync_address, at the root."""
        l = s.first(i)
        return And(s.ipc(i) == WALKS, Not(s.is_all(i)), Not(s.visited(i)), Not(s.locked(s.above(l)))), {
            'visited': put(s.visited, i, True), 'at': put(s.at, i, s.middle(l)), 'same': put(s.same, i,
                s.registered(l)),
            'ipc': put(s.ipc, i, If(s.registered(l), WALKS, LOCAL))}

    def step_visit_middle(self, s, i: 'Flush', m: 'Link'):
        """shadow/sync.rs: sync_address, at a middle page; and the PTE of the lowest page is compared."""
        mine = And(s.above(m) == s.at(i), s.index(m) == s.second(i))
        return And(s.ipc(i) == WALKS, Not(s.is_all(i)), s.visited(i), mine, Not(s.locked(s.above(m)))), {
            'visited_2': put(s.visited_2, i, True), 'same_2': put(s.same_2, i,
                s.registered(m)), 'ipc': put(s.ipc, i, LOCAL),
            'fresh': self.compare(s, lambda p: And(s.registered(m), p == s.page(m)))}

    def concerns(self, s, i, l, m):
        """The flush concerns what is reached by these links."""
        return Or(s.is_all(i), And(l == s.first(i), s.index(m) == s.second(i)))

    def step_flush_local(self, s, i: 'Flush'):
        """The vCPU's own CPU is flushed, and the guest runs again."""
        mine = lambda c, l, m, p: And(c == s.cpu(i), self.concerns(s, i, l, m),
            not self.without('local-flush'))
        return s.ipc(i) == LOCAL, {'ipc': put(s.ipc, i, FLUSHED),
            'reaches': put_where(s.reaches, mine, False)}

    # ---- What holds.

    def safe(self, s):
        return {
            'what a CPU reaches is fresh for each flush that is over': s.all(lambda c, l, m, p, i: Implies(
                And(s.reaches(c, l, m, p), s.ipc(i) == FLUSHED, s.cpu(i) == c,
                    self.concerns(s, i, l, m)), s.fresh(i, p))),
        }

    def inv(self, s):
        begun, over = lambda i: s.ipc(i) != OUT, lambda i: s.ipc(i) >= LOCAL
        works = lambda k: Or(s.kpc(k) == HOLDS, s.kpc(k) == REGISTERED)
        done = lambda l, p: s.done(s.linker(l), p)
        low = lambda m: And(s.registered(m), Not(s.is_root(s.above(m))))
        mine = lambda i, m: And(s.above(m) == s.at(i), s.index(m) == s.second(i))
        return {
            'a thread that links is at one of its steps': s.all(
                lambda k: And(OUT <= s.kpc(k), s.kpc(k) <= OVER)),
            'a flush is at one of its steps': s.all(lambda i: And(OUT <= s.ipc(i), s.ipc(i) <= FLUSHED)),
            'a thread that links has the lock of the page above': s.all(
                lambda k: Implies(works(k), s.locked(s.above(s.link(k))))),
            'two threads link in different pages': s.all(lambda k, n: Implies(
                And(works(k), works(n), s.above(s.link(k)) == s.above(s.link(n))), k == n)),
            'a link is of the thread that has registered it': s.all(lambda l: Implies(s.registered(l), And(
                s.link(s.linker(l)) == l, s.kpc(s.linker(l)) >= REGISTERED, s.middle(l) == s.to_middle(
                    s.linker(l)),
                s.page(l) == s.to_page(s.linker(l))))),
            'what is below is compared after the link is registered': s.all(lambda k, p: Implies(
                s.done(k, p), s.kpc(k) >= REGISTERED)),
            'a thread that has registered its link is its linker, while it is registered': s.all(
                lambda k: Implies(
                And(s.kpc(k) == REGISTERED, s.registered(s.link(k))), s.linker(s.link(k)) == k)),
            'a link that CPUs walk is registered': s.all(lambda l: Implies(s.written(l), s.registered(l))),
            'all below a link that CPUs walk was compared': s.all(lambda l,
                p: Implies(s.written(l), done(l, p))),
            'a synced page is fresh': s.all(lambda i,
                p: Implies(And(begun(i), Not(s.bit(p))), s.fresh(i, p))),
            # A load of CR3.
            'a settled page is fresh': s.all(lambda i,
                p: Implies(s.settled(i, p), And(begun(i), s.fresh(i, p)))),
            'a found link is registered': s.all(lambda i, m: Implies(s.found(i, m), And(
                begun(i), low(m), s.climbed(i, s.page(m))))),
            'a page is climbed by a flush that has begun': s.all(lambda i,
                p: Implies(s.climbed(i, p), begun(i))),
            'a link to a page that was climbed before is compared': s.all(lambda i, m: Implies(
                And(s.climbed(i, s.page(m)), low(m), Not(s.found(i, m)), done(m, s.page(m))), s.fresh(i,
                    s.page(m)))),
            'a link above a page that was climbed before is compared': s.all(lambda i, l, m: Implies(
                And(s.found(i, m), s.beside(i, m), s.registered(l), s.above(l) == s.root(s.cpu(i)),
                    s.middle(l) == s.above(m),
                    done(l, s.page(m))), s.fresh(i, s.page(m)))),
            'a load of CR3 that is over has climbed from all pages': s.all(lambda i, p: Implies(
                And(over(i), s.is_all(i)), Or(s.settled(i, p), s.climbed(i, p)))),
            'a load of CR3 that is over has climbed all links': s.all(lambda i, m: Implies(
                And(over(i), s.is_all(i), s.found(i, m)), Or(s.settled(i, s.page(m)), s.beside(i, m)))),
            # INVLPG.
            'INVLPG stands where its first link leads': s.all(lambda i: Implies(s.same(i), And(
                s.visited(i), s.registered(s.first(i)), s.middle(s.first(i)) == s.at(i)))),
            'INVLPG begins, and visits the root first': s.all(lambda i: And(
                Implies(s.visited(i), begun(i)), Implies(s.visited_2(i), s.visited(i)))),
            'the second link of INVLPG stays registered': s.all(lambda i, m: Implies(
                And(s.same_2(i), s.visited_2(i), mine(i, m)), s.registered(m))),
            'a first link that comes after INVLPG is compared': s.all(lambda i, m: Implies(
                And(s.visited(i), Not(s.same(i)), s.registered(s.first(i)),
                    s.above(m) == s.middle(s.first(i)), low(m),
                    done(s.first(i), s.page(m)), done(m, s.page(m))), s.fresh(i, s.page(m)))),
            'a second link that comes after INVLPG is compared': s.all(lambda i, m: Implies(
                And(s.visited_2(i), Not(s.same_2(i)), low(m), mine(i, m), done(m, s.page(m))), s.fresh(i,
                    s.page(m)))),
            'INVLPG has compared what its second link leads to': s.all(lambda i, m: Implies(
                And(s.visited_2(i), s.same_2(i), low(m), mine(i, m)), s.fresh(i, s.page(m)))),
            'an INVLPG that is over has visited its links': s.all(lambda i: Implies(
                And(over(i), Not(s.is_all(i))), And(s.visited(i), Implies(s.same(i), s.visited_2(i))))),
        }


def run(start=None, **sizes):
    """A root, a middle page and a page, with a link each; a load of CR3."""
    one = {**ShadowLinks.start, **at(bit=True)}
    return starts.run(ShadowLinks, {'Linker': 1, 'Link': 2, 'Upper': 2, **sizes}, {**one, **(start or {})})


# The middle page is linked to the page, and the first thread links the root to it. Or both are linked.
BELOW = {**at(registered=[False, True], written=[False, True], middle='upper1', kpc=[OUT, OVER],
    linker='linker1'),
         'done': lambda k, p: k == 'linker1'}
BOTH = at(registered=True, written=True, middle='upper1', kpc=OVER, linker=['linker0', 'linker1'], done=True)
ShadowLinks.traces = {
    'register-before-compare': run(BELOW, Linker=2),
    'compare-before-write': run(BELOW, Linker=2),
    'link-compares': run(BELOW, Linker=2),
    'clear-before-unregister': run(BOTH, Linker=2),
    'all-parents-are-climbed': run(BOTH, Linker=2),
    'local-flush': run({**BOTH, 'reaches': lambda c, l, m, p: (l, m) == ('link0', 'link1')}, Linker=2),
}

if __name__ == '__main__':
    prover.main(ShadowLinks)
