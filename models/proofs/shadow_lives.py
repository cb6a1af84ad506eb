"""Shadow paging: the record of a shadow page is used again, and no thread and no CPU confuses two
of its lives.

Protocol: docs/protocols/shadow-paging.md, "A record is identified with its generation, and a pin
holds its page". Modules: shadow/page.rs (life, pin, unpin, die), shadow/zap.rs (zap_page,
free_page), shadow/install.rs (link), shadow/walk.rs. Any number of records, links, page-table
pages, faults, threads that zap, vCPUs and CPUs.

A record is free, alive or dead. Links keep the record and the generation that they lead to. A
thread that zaps a page takes it out of all links and lets it die, in one critical section of its
frame, and gets a pin; it drops the PTEs under the lock of the page, and unpins. vCPUs pin their
root. The last thread that unpins a dead page moves its generation on, and owns it: the record is
free at once, and the page-table page is freed after a flush. Faults reach records by links without
a lock.

Proved: a fault that goes on in a page after its check, or makes a PTE there, is in the life that it
was led to. A free record has no PTEs. No CPU walks a page-table page that was freed, by a link or
as its root.

Assumed: a grace period after the flush keeps the page-table page for readers in a guard
(`epochs.py`). Generations do not wrap. The flush that frees is modelled for the page-table page
alone. Each step is atomic, in one order for all threads.
"""
import prover
import starts
from prover import And, If, Implies, Not, Or, Protocol, put, put_where
from starts import at

IDLE, LED, LOOKED, CHECKED, HOLDS = range(5)                            # of a fault
# Of a thread that zaps, or a vCPU: it has found the page; has let it die, or has pinned it; runs on it;
# has left it, or has dropped its PTEs; owns the page-table page, and flushes.
OUT, REFERS, DIED, PINNED, RUNS, LEFT, FREES, OVER = range(8)


class ShadowLives(Protocol):
    sorts = ['Fault', 'User', 'Record', 'Link', 'Table', 'Key', 'Cpu']
    letters = {'f': 'Fault', 'g': 'Fault', 'u': 'User', 'v': 'User', 'x': 'Record', 'y': 'Record',
               'l': 'Link', 't': 'Table', 'k': 'Key', 'c': 'Cpu'}
    fixed = {'is_vcpu': (['User'], 'bool')}
    state = {
        'generation': (['Record'], 'int'), 'alive': (['Record'], 'bool'), 'dead': (['Record'], 'bool'),
        'key': (['Record'], 'Key'), 'table': (['Record'], 'Table'),
        'locked': (['Record'], 'bool'), 'has_ptes': (['Record'], 'bool'),
        'dropped': (['Record'], 'bool'), 'killer': (['Record'], 'User'),        # ghosts, of a dead page
        'used': (['Table'], 'bool'), 'freed': (['Table'], 'bool'),
        'owner': (['Table'], 'User'),                                   # ghost: it frees the page-table page
        # A link: its target; where CPUs walk to; where they will, once a thread has written it.
        'set': (['Link'], 'bool'), 'to': (['Link'], 'Record'), 'life': (['Link'], 'int'),
        'leads': (['Link'], 'Key'),                                     # ghost: what the target was made from
        'written': (['Link'], 'bool'), 'walks': (['Link'], 'Table'),
        'writes': (['Link'], 'bool'), 'will_walk': (['Link'], 'Table'),
        'fpc': (['Fault'], 'int'), 'at': (['Fault'], 'Record'), 'seen': (['Fault'], 'int'),
        'wants': (['Fault'], 'Key'), 'saw': (['Fault'], 'Key'),
        'upc': (['User'], 'int'), 'of': (['User'], 'Record'), 'found': (['User'], 'int'),
        'root': (['User'], 'Key'), 'own': (['User'], 'Table'), 'flushed': (['User', 'Cpu'], 'bool'),
        'cached': (['Cpu', 'Table'], 'bool'),
    }
    rules = {
        'step-is-checked': 'goes on from what it has read of a record without a look at its life',
        'generation-is-compared': 'locks a page that is alive, in whatever generation',
        'generation-moves-on': 'uses a record again in the same generation',
        'link-is-checked-again': 'writes a link without a look whether it is still there',
        'own-pin': 'zaps a page without a pin of its own',
        'death-before-drop': 'drops the PTEs of a page that is still alive',
        'links-go-with-death': 'lets a page die whose links are still there for CPUs',
        'drop-under-lock': 'drops the PTEs of a page without its lock',
        'pin-compares-generation': 'pins a page that is alive, in whatever generation',
        'flush-before-free': 'frees the page-table page before the CPUs are flushed',
    }
    sizes = {'Fault': 1, 'User': 2, 'Record': 1, 'Link': 1, 'Table': 3, 'Key': 2, 'Cpu': 1}

    def init(self, s):
        return {
            'no page is there': s.all(lambda x: And(Not(s.alive(x)), Not(s.dead(x)), Not(s.locked(x)),
                Not(s.has_ptes(x)))),
            'no page-table page is there': s.all(lambda t: And(Not(s.used(t)), Not(s.freed(t)))),
            'no link is there': s.all(lambda l: And(Not(s.set(l)), Not(s.written(l)), Not(s.writes(l)))),
            'no thread runs': And(s.all(lambda f: s.fpc(f) == IDLE), s.all(lambda u: s.upc(u) == OUT)),
            'no CPU is flushed': s.all(lambda u, c: Not(s.flushed(u, c))),
            'nothing is cached': s.all(lambda c, t: Not(s.cached(c, t))),
        }

    # ---- Pages and links.

    def step_make(self, s, x: 'Record', k: 'Key', t: 'Table'):
        """shadow/install.rs: new_page. A free record gets a key and a page-table page, and comes alive."""
        return And(Not(s.alive(x)), Not(s.dead(x)), Not(s.used(t))), {
            'dropped': put(s.dropped, x, False), 'alive': put(s.alive, x, True), 'key': put(s.key, x,
                k), 'table': put(s.table, x, t), 'used': put(s.used, t, True)}

    def step_register(self, s, l: 'Link', x: 'Record'):
        """shadow/install.rs: link, set_target, under the lock of the frame below."""
        return And(s.alive(x), Not(s.set(l)), Not(s.writes(l))), {
            'set': put(s.set, l, True), 'to': put(s.to, l, x), 'life': put(s.life, l,
                s.generation(x)), 'leads': put(s.leads, l, s.key(x)),
            'writes': put(s.writes, l, True), 'will_walk': put(s.will_walk, l, s.table(x))}

    def step_write(self, s, l: 'Link'):
        """shadow/install.rs: link, the PTE, under the lock of the frame below, if the target is there."""
        still = Or(s.set(l), self.without('link-is-checked-again'))
        return And(s.writes(l), still), {
            'writes': put(s.writes, l, False), 'written': put(s.written, l, True), 'walks': put(s.walks, l,
                s.will_walk(l))}

    def step_fail(self, s, l: 'Link'):
        """shadow/install.rs: link, the page below was removed."""
        return And(s.writes(l), Not(s.set(l))), {'writes': put(s.writes, l, False)}

    def step_drop_link(self, s, l: 'Link'):
        """shadow/zap.rs: drop_entry, under the lock of the frame below."""
        return And(s.set(l), Not(s.writes(l))), {'set': put(s.set, l, False),
            'written': put(s.written, l, False)}

    def step_fill(self, s, c: 'Cpu', l: 'Link'):
        """A CPU walks a link, and caches where it leads."""
        return s.written(l), {'cached': put(s.cached, (c, s.walks(l)), True)}

    # ---- A fault.

    def step_follow(self, s, f: 'Fault', l: 'Link'):
        """shadow/walk.rs: serve_on_known_way, the target of a link."""
        return And(s.fpc(f) == IDLE, s.set(l)), {
            'fpc': put(s.fpc, f, LED), 'at': put(s.at, f, s.to(l)), 'seen': put(s.seen, f,
                s.life(l)), 'wants': put(s.wants, f, s.leads(l))}

    def step_look(self, s, f: 'Fault'):
        """shadow/walk.rs: serve_on_known_way, what the page was made from."""
        return s.fpc(f) == LED, {'fpc': put(s.fpc, f, LOOKED), 'saw': put(s.saw, f, s.key(s.at(f)))}

    def is_alive(self, s, f):
        x = s.at(f)
        return And(s.alive(x), s.generation(x) == s.seen(f))

    def step_check(self, s, f: 'Fault'):
        """shadow/walk.rs: serve_on_known_way, is_alive after the reads."""
        return And(s.fpc(f) == LOOKED, Or(self.is_alive(s, f), self.without('step-is-checked'))), {
            'fpc': put(s.fpc, f, CHECKED)}

    def step_lock(self, s, f: 'Fault'):
        """shadow/install.rs: install_leaf, the lock of the page, and is_alive under it."""
        x = s.at(f)
        alive = s.alive(x) if self.without('generation-is-compared') else self.is_alive(s, f)
        return And(s.fpc(f) == CHECKED, Not(s.locked(x)), alive), {'fpc': put(s.fpc, f, HOLDS),
            'locked': put(s.locked, x, True)}

    def step_install(self, s, f: 'Fault'):
        """shadow/install.rs: install_leaf, the PTE."""
        return s.fpc(f) == HOLDS, {
            'fpc': put(s.fpc, f, IDLE), 'locked': put(s.locked, s.at(f), False), 'has_ptes': put(s.has_ptes,
                s.at(f), True)}

    def step_give_up(self, s, f: 'Fault'):
        """shadow/walk.rs: the fault starts over."""
        return And(s.fpc(f) != HOLDS), {'fpc': put(s.fpc, f, IDLE)}

    # ---- A thread that zaps.

    def step_die(self, s, u: 'User', x: 'Record'):
        """shadow/zap.rs: zap_page, under the lock of the frame: links, list, die."""
        out = self.left_out
        mine = lambda l: And(s.set(l), s.to(l) == x)
        dies = out != 'death-before-drop'
        return And(s.upc(u) == OUT, Not(s.is_vcpu(u)), s.alive(x)), {
            'upc': put(s.upc, u, DIED), 'of': put(s.of, u, x), 'alive': put(s.alive, x,
                Not(dies)), 'dead': put(s.dead, x, dies),
            'killer': put(s.killer, x, u), 'dropped': put(s.dropped, x, False),
            'set': put_where(s.set, mine, False),
            'written': put_where(s.written, lambda l: And(mine(l), out != 'links-go-with-death'), False)}

    def step_drop(self, s, u: 'User'):
        """shadow/zap.rs: zap_page, the PTEs, under the lock of the page."""
        x, out = s.of(u), self.left_out
        return And(s.upc(u) == DIED, Or(Not(s.locked(x)), out == 'drop-under-lock')), {
            'upc': put(s.upc, u, LEFT), 'has_ptes': put(s.has_ptes, x, False),
            'dropped': put(s.dropped, x, True)}

    # ---- A vCPU.

    def step_refer(self, s, u: 'User', x: 'Record'):
        """shadow/install.rs: page_for. The vCPU gets a reference to the page of its root."""
        return And(s.upc(u) == OUT, s.is_vcpu(u), s.alive(x)), {
            'upc': put(s.upc, u, REFERS), 'of': put(s.of, u, x), 'found': put(s.found, u, s.generation(x)),
            'root': put(s.root, u, s.key(x))}

    def step_pin(self, s, u: 'User'):
        """shadow/page.rs: pin."""
        x = s.of(u)
        same = Or(s.generation(x) == s.found(u), self.without('pin-compares-generation'))
        return And(s.upc(u) == REFERS, s.alive(x), same), {'upc': put(s.upc, u, PINNED)}

    def step_run(self, s, u: 'User'):
        """shadow/roots.rs: entry. The CPU loads the root."""
        return s.upc(u) == PINNED, {'upc': put(s.upc, u, RUNS), 'own': put(s.own, u, s.table(s.of(u)))}

    def step_leave(self, s, u: 'User'):
        """shadow/roots.rs: the CPU has another root, and what it has cached of this one is not used."""
        return s.upc(u) == RUNS, {'upc': put(s.upc, u, LEFT)}

    def pins(self, s, u, x):
        first = If(s.is_vcpu(u), PINNED, DIED)
        counts = Or(s.is_vcpu(u), not self.without('own-pin'))
        return And(counts, s.of(u) == x, first <= s.upc(u), s.upc(u) <= LEFT)

    def step_unpin(self, s, u: 'User'):
        """shadow/page.rs: unpin. The last pin of a dead page gets the page."""
        x = s.of(u)
        dead = Or(s.dead(x), And(self.without('death-before-drop'), Not(s.is_vcpu(u))))
        last = And(dead, s.all(lambda v: Or(v == u, Not(self.pins(s, v, x)))))
        moves = If(last, 1, 0) if not self.without('generation-moves-on') else 0
        t = s.table(x)
        return s.upc(u) == LEFT, {
            'upc': put(s.upc, u, If(last, FREES, OVER)), 'dead': put(s.dead, x, And(dead, Not(last))),
            'alive': put(s.alive, x, And(s.alive(x), Not(dead))),
            'generation': put(s.generation, x, s.generation(x) + moves), 'own': put(s.own, u, t),
            'owner': put(s.owner, t, If(last, u, s.owner(t)))}

    def step_flush(self, s, u: 'User', c: 'Cpu'):
        """table/tlb.rs: TlbBatch::flush_cpus, one CPU."""
        return s.upc(u) == FREES, {
            'flushed': put(s.flushed, (u, c), True), 'cached': put_where(s.cached, lambda d, t: d == c,
                False)}

    def step_free(self, s, u: 'User'):
        """table/tlb.rs: TlbBatch::flush_cpus, the page-table page is retired."""
        flushed = Or(s.all(lambda c: s.flushed(u, c)), self.without('flush-before-free'))
        return And(s.upc(u) == FREES, flushed), {'upc': put(s.upc, u, OVER),
            'freed': put(s.freed, s.own(u), True)}

    # ---- What holds.

    def safe(self, s):
        return {
            'no CPU walks a page-table page that was freed': s.all(lambda c,
                t: Implies(s.cached(c, t), Not(s.freed(t)))),
            'no CPU runs on a page-table page that was freed': s.all(lambda u: Implies(
                And(s.is_vcpu(u), s.upc(u) == RUNS), Not(s.freed(s.own(u))))),
            'a vCPU runs on the root that it has found': s.all(lambda u: Implies(
                And(s.is_vcpu(u), PINNED <= s.upc(u), s.upc(u) <= RUNS), s.key(s.of(u)) == s.root(u))),
            'a fault goes on from the page that it was led to': s.all(lambda f: Implies(
                s.fpc(f) >= CHECKED, s.saw(f) == s.wants(f))),
            'a fault makes a PTE in the page that it was led to': s.all(lambda f: Implies(
                s.fpc(f) == HOLDS, And(s.key(s.at(f)) == s.wants(f), Not(s.freed(s.table(s.at(f))))))),
            'a free record has no PTEs': s.all(
                lambda x: Implies(And(Not(s.alive(x)), Not(s.dead(x))), Not(s.has_ptes(x)))),
        }

    def inv(self, s):
        lives = lambda x: Or(s.alive(x), s.dead(x))
        pins, zaps = lambda u, x: self.pins(s, u, x), lambda u: And(Not(s.is_vcpu(u)), DIED <= s.upc(u),
            s.upc(u) <= LEFT)
        old = lambda g, k, x: Or(g < s.generation(x), And(g == s.generation(x), lives(x), k == s.key(x)))
        return {
            'a fault is at one of its steps': s.all(lambda f: And(IDLE <= s.fpc(f), s.fpc(f) <= HOLDS)),
            'a user is at one of its steps': s.all(lambda u: And(OUT <= s.upc(u), s.upc(u) <= OVER)),
            'a vCPU has found this life, or an earlier one': s.all(lambda u: Implies(
                s.upc(u) == REFERS, old(s.found(u), s.root(u), s.of(u)))),
            'a vCPU lets no page die': s.all(lambda u: Implies(s.upc(u) == DIED, Not(s.is_vcpu(u)))),
            'only vCPUs run': s.all(lambda u: Implies(
                Or(s.upc(u) == REFERS, s.upc(u) == PINNED, s.upc(u) == RUNS), s.is_vcpu(u))),
            'a record is alive or dead': s.all(lambda x: Not(And(s.alive(x), s.dead(x)))),
            'a page that lives has a page-table page that is not freed': s.all(lambda x: Implies(
                lives(x), And(s.used(s.table(x)), Not(s.freed(s.table(x)))))),
            'two pages have different page-table pages': s.all(lambda x, y: Implies(
                And(lives(x), lives(y), s.table(x) == s.table(y)), x == y)),
            'a freed page-table page was used': s.all(lambda t: Implies(s.freed(t), s.used(t))),
            # Pins.
            'a pinned page lives': s.all(lambda u, x: Implies(pins(u, x), lives(x))),
            'a page that is zapped is dead': s.all(lambda u: Implies(zaps(u), s.dead(s.of(u)))),
            'a page is zapped once': s.all(lambda u,
                v: Implies(And(zaps(u), zaps(v), s.of(u) == s.of(v)), u == v)),
            'a vCPU runs on the page that it has pinned': s.all(lambda u: Implies(
                And(s.is_vcpu(u), s.upc(u) == RUNS), s.own(u) == s.table(s.of(u)))),
            # Links.
            'a link leads to a page that is alive': s.all(lambda l: Implies(s.set(l), And(
                s.alive(s.to(l)), s.life(l) == s.generation(s.to(l)), s.leads(l) == s.key(s.to(l))))),
            'a link that CPUs walk is set': s.all(
                lambda l: Implies(s.written(l), And(s.set(l), s.walks(l) == s.table(s.to(l))))),
            'a link that is about to be written leads to its page': s.all(lambda l: Implies(
                And(s.writes(l), s.set(l)), s.will_walk(l) == s.table(s.to(l)))),
            # Page-table pages that wait for a flush.
            'an owner has a page-table page of no page': s.all(lambda u, x: Implies(
                s.upc(u) == FREES, And(s.used(s.own(u)), Not(s.freed(s.own(u))), s.owner(s.own(u)) == u,
                                       Implies(lives(x), s.table(x) != s.own(u))))),
            'an owner has flushed only since': s.all(lambda u,
                c: Implies(s.flushed(u, c), s.upc(u) >= FREES)),
            'a flushed CPU does not walk the page-table page': s.all(lambda u, c: Implies(
                And(s.upc(u) == FREES, s.flushed(u, c)), Not(s.cached(c, s.own(u))))),
            'what a CPU walks was used': s.all(lambda c, t: Implies(s.cached(c, t), s.used(t))),
            # Faults.
            'a fault was led to this life, or to an earlier one': s.all(lambda f: Implies(
                s.fpc(f) >= LED, old(s.seen(f), s.wants(f), s.at(f)))),
            'a fault that has looked saw this life, or is late': s.all(lambda f: Implies(
                And(s.fpc(f) == LOOKED, self.is_alive(s, f)), s.saw(f) == s.wants(f))),
            'a fault has the lock of its page': s.all(lambda f: Implies(s.fpc(f) == HOLDS, And(
                s.locked(s.at(f)), s.generation(s.at(f)) == s.seen(f), lives(s.at(f))))),
            'two faults have different pages': s.all(lambda f, g: Implies(
                And(s.fpc(f) == HOLDS, s.fpc(g) == HOLDS, s.at(f) == s.at(g)), f == g)),
            'a dead page has no PTEs, or a thread that will drop them': s.all(lambda x: Implies(
                And(s.dead(x), Not(s.dropped(x))), And(
                    s.of(s.killer(x)) == x, s.upc(s.killer(x)) == DIED))),
            'a thread that zaps has dropped the PTEs before it unpins': s.all(lambda u: Implies(
                And(zaps(u), s.upc(u) == LEFT), s.dropped(s.of(u)))),
            'a page whose PTEs are dropped has none': s.all(lambda x: Implies(
                And(s.dead(x), s.dropped(x)), Not(s.has_ptes(x)))),
            'a page whose PTEs are dropped gets none': s.all(lambda f: Implies(
                s.fpc(f) == HOLDS, Not(And(s.dead(s.at(f)), s.dropped(s.at(f)))))),
        }


def run(start=None, **sizes):
    """A page is alive, and a link leads to it.

    One thread zaps, and records and page-table pages are there for another life.
    """
    one = {**at(alive=True, set=True, written=True, is_vcpu=[False, True]), 'used': lambda t: t == 'table0'}
    return starts.run(ShadowLives, {'Table': 2, 'Key': 2, **sizes}, {**one, **(start or {})})


UNWRITTEN = at(written=False, writes=True)
ShadowLives.traces = {
    'step-is-checked': run(Cpu=0),
    'generation-is-compared': run(Cpu=0),
    'generation-moves-on': run(Cpu=0),
    'link-is-checked-again': run(UNWRITTEN, Fault=0),
    'own-pin': run(User=2),
    'death-before-drop': run(Cpu=0),
    'links-go-with-death': run(Fault=0),
    'drop-under-lock': run(Cpu=0),
    'pin-compares-generation': run(User=2, Fault=0, Cpu=0),
    'flush-before-free': run(Fault=0),
}

if __name__ == '__main__':
    prover.main(ShadowLives)
