"""Dirty rings are enabled beside memslots that begin to log, and beside calls that push nothing.

Any number of memslots, pages, CPUs, faults of vCPUs that have rings, and openers: a vCPU without a ring, a
recovery of huge pages, a split by way of a broken PTE. Engine: `dirty/rings.rs`, `vm.rs` (enable_dirty_ring),
`vm/region.rs` (begin_to_log, begin_to_log_by_rings).

One word says that rings are enabled, or counts the openers. So rings are enabled while there is none. Then
the call visits the memslots, and protects and flushes each that logs. A memslot that begins to log publishes its flag,
reads whether rings are enabled, and protects. If all bits are set from the beginning and there are no
rings, it protects nothing. One of the two calls observes the other.

Left out: what is in the rings (`dirty_rings.py`): a page that was pushed stays pushed here. Memslots that
move or cease to log.
"""
import prover
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

OUT, GAVE, PUSHES = range(3)                            # of a fault
OFF, FLAGGED, PROTECTS, FLUSHES, ON = range(5)          # of a memslot that begins to log
NONE, VISITS, DONE = range(3)                           # of the call that enables rings
UNSEEN, IDLE, LOGGED = range(3)                         # what that call has found of a memslot


class RingEnabling(Protocol):
    sorts = ['Slot', 'Page', 'Fault', 'Opener', 'Cpu']
    letters = {'s': 'Slot', 'p': 'Page', 'f': 'Fault', 'o': 'Opener', 'c': 'Cpu', 'm': 'Slot'}
    fixed = {'slot': (['Page'], 'Slot'), 'page': (['Fault'], 'Page'), 'initially_set': ([], 'bool')}
    state = {
        'rings': ([], 'bool'), 'inside': (['Opener'], 'bool'), 'logs': (['Slot'], 'bool'),
        'writable': (['Page'], 'bool'), 'tlb': (['Cpu', 'Page'], 'bool'), 'pushed': (['Page'], 'bool'),
        'fpc': (['Fault'], 'int'),
        'spc': (['Slot'], 'int'), 'sdone': (['Page'], 'bool'), 'sflushed': (['Slot', 'Cpu'], 'bool'),
        'epc': ([], 'int'), 'found': (['Slot'], 'int'), 'edone': (['Page'], 'bool'),
        'eflushed': (['Slot', 'Cpu'], 'bool'),
        # Ghosts: protected by the memslot's call while there were rings; the fault that gave W last.
        'armed': (['Page'], 'bool'), 'giver': (['Page'], 'Fault'),
    }
    rules = {
        'no-opener': 'Rings are enabled while there are calls that push nothing.',
        'no-rings': 'A call that pushes nothing begins while there are rings.',
        'rings-before-flags': 'The call that enables rings looks which memslots log, and then enables them.',
        'flag-before-rings': 'A memslot reads whether rings are enabled, and then publishes its flag.',
        'protect-logging': 'The call that enables rings protects nothing.',
        'enabling-flushes': 'The call that enables rings does not flush.',
        'memslot-flushes': 'A memslot that begins to log does not flush.',
    }

    def init(self, s):
        return {
            'no rings': And(Not(s.rings()), s.epc() == NONE, s.all(lambda o: Not(s.inside(o)))),
            'no memslot logs': s.all(lambda m: And(Not(s.logs(m)), s.spc(m) == OFF, s.found(m) == UNSEEN)),
            'no fault': s.all(lambda f: s.fpc(f) == OUT),
            'nothing done': s.all(lambda p: And(Not(s.sdone(p)), Not(s.edone(p)), Not(s.armed(p)))),
            'nothing flushed': s.all(lambda m, c: And(Not(s.sflushed(m, c)), Not(s.eflushed(m, c)))),
        }

    # Calls that push nothing.

    def step_enter(self, s, o: 'Opener'):
        """dirty/rings.rs: enter"""
        return And(Not(s.inside(o)), Or(Not(s.rings()), self.without('no-rings'))), {
            'inside': put(s.inside, o, True)}

    def step_leave(self, s, o: 'Opener'):
        """dirty/rings.rs: leave"""
        return s.inside(o), {'inside': put(s.inside, o, False)}

    def step_open(self, s, o: 'Opener', p: 'Page'):
        """vcpu/on_leaf.rs: restore_to (no ring); second_stage/recover.rs: make; split.rs: link_parts"""
        return And(s.inside(o), Not(s.writable(p))), {'writable': put(s.writable, p, True)}

    # A fault of a vCPU that has a ring.

    def step_restore_write(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to"""
        p = s.page(f)
        return And(s.fpc(f) == OUT, s.rings(), Not(s.writable(p))), {
            'writable': put(s.writable, p, True), 'giver': put(s.giver, p, f), 'fpc': put(s.fpc, f, GAVE)}

    def step_read_flag(self, s, f: 'Fault'):
        """dirty/log.rs: mark_if_logging"""
        return s.fpc(f) == GAVE, {'fpc': put(s.fpc, f, If(s.logs(s.slot(s.page(f))), PUSHES, OUT))}

    def step_push(self, s, f: 'Fault'):
        """dirty/ring.rs: push"""
        return s.fpc(f) == PUSHES, {'fpc': put(s.fpc, f, OUT), 'pushed': put(s.pushed, s.page(f), True)}

    # Rings are enabled.

    def step_enable_rings(self, s):
        """dirty/rings.rs: enable"""
        alone = Or(self.without('no-opener'), s.all(lambda o: Not(s.inside(o))))
        ready = s.epc() == NONE
        if self.without('rings-before-flags'):
            ready = And(s.epc() == VISITS, s.all(lambda m: s.found(m) != UNSEEN))
        return And(ready, Not(s.rings()), alone), {'rings': lambda: True, 'epc': lambda: VISITS}

    def step_look_at_memslot(self, s, m: 'Slot'):
        """vm/region.rs: begin_to_log_by_rings (logs)"""
        early = self.without('rings-before-flags')
        may = And(s.epc() <= VISITS, Not(s.rings())) if early else s.epc() == VISITS
        return And(may, s.found(m) == UNSEEN), {
            'found': put(s.found, m, If(s.logs(m), LOGGED, IDLE)), 'epc': lambda: VISITS}

    def step_enabling_protects(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot"""
        keeps = And(self.without('protect-logging'), s.writable(p))
        return And(s.epc() == VISITS, s.rings(), s.found(s.slot(p)) == LOGGED), {
            'writable': put(s.writable, p, keeps), 'edone': put(s.edone, p, True)}

    def step_enabling_flushes(self, s, m: 'Slot', c: 'Cpu'):
        """vm/region.rs: begin_to_log (flush)"""
        meant = lambda p: And(not self.without('enabling-flushes'), s.slot(p) == m)
        is_protected = s.all(lambda p: Implies(s.slot(p) == m, s.edone(p)))
        return And(s.epc() == VISITS, s.rings(), s.found(m) == LOGGED, is_protected), {
            'eflushed': put(s.eflushed, (m, c), True),
            'tlb': put_where(s.tlb, lambda d, p: And(d == c, meant(p)), False)}

    def step_rings_enabled(self, s):
        """vm.rs: enable_dirty_ring returns"""
        return And(s.epc() == VISITS, s.rings(), s.all(lambda m: s.found(m) != UNSEEN), s.all(
            lambda m, c: Implies(s.found(m) == LOGGED, s.eflushed(m, c)))), {'epc': lambda: DONE}

    # A memslot begins to log.

    def after_flag(self, s):
        return If(And(s.initially_set(), Not(s.rings())), ON, PROTECTS)

    def step_publish_flag(self, s, m: 'Slot'):
        """vm/region.rs: change_slot"""
        if self.without('flag-before-rings'):
            return Or(s.spc(m) == PROTECTS, s.spc(m) == ON), {'logs': put(s.logs, m, True)}
        return s.spc(m) == OFF, {'logs': put(s.logs, m, True), 'spc': put(s.spc, m, FLAGGED)}

    def step_read_rings(self, s, m: 'Slot'):
        """vm/region.rs: begin_to_log (are_enabled)"""
        at = OFF if self.without('flag-before-rings') else FLAGGED
        return s.spc(m) == at, {'spc': put(s.spc, m, self.after_flag(s))}

    def step_memslot_protects(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot"""
        return And(s.spc(s.slot(p)) == PROTECTS, s.logs(s.slot(p))), {
            'writable': put(s.writable, p, False), 'sdone': put(s.sdone, p, True),
            'armed': put(s.armed, p, Or(s.armed(p), s.rings()))}

    def step_memslot_protected(self, s, m: 'Slot'):
        """vm/region.rs: begin_to_log"""
        return And(s.spc(m) == PROTECTS, s.all(lambda p: Implies(s.slot(p) == m, s.sdone(p)))), {
            'spc': put(s.spc, m, FLUSHES)}

    def step_memslot_flushes(self, s, m: 'Slot', c: 'Cpu'):
        """vm/region.rs: begin_to_log (flush)"""
        meant = lambda p: And(not self.without('memslot-flushes'), s.slot(p) == m)
        return s.spc(m) == FLUSHES, {'sflushed': put(s.sflushed, (m, c), True),
                                     'tlb': put_where(s.tlb, lambda d, p: And(d == c, meant(p)), False)}

    def step_memslot_logs(self, s, m: 'Slot'):
        """vm/region.rs: change_slot returns"""
        return And(s.spc(m) == FLUSHES, s.all(lambda c: s.sflushed(m, c))), {'spc': put(s.spc, m, ON)}

    # The guest.

    def step_fill_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU caches a leaf"""
        return s.writable(p), {'tlb': put(s.tlb, (c, p), True)}

    def step_evict_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU forgets a leaf"""
        return s.tlb(c, p), {'tlb': put(s.tlb, (c, p), False)}

    def step_drop_write(self, s, p: 'Page'):
        """second_stage/zap.rs: visit; harvest/rings.rs: protect"""
        return s.writable(p), {'writable': put(s.writable, p, False)}

    # What is promised.

    def covered(self, s, p):
        """The page is in a ring, or a fault is about to push it."""
        return Or(s.pushed(p), And(s.fpc(s.giver(p)) >= GAVE, s.page(s.giver(p)) == p))

    def safe(self, s):
        return {
            'when both calls have returned, what a CPU may write is in a ring or about to be pushed': s.all(
                lambda c, p: Implies(
                    And(s.epc() == DONE, s.spc(s.slot(p)) == ON, s.tlb(c, p)), self.covered(s, p))),
        }

    def inv(self, s):
        # The memslot's call protects all beside rings: rings were there before its flag.
        by_memslot = lambda m: s.found(m) == IDLE
        armed = lambda p: Or(s.edone(p), s.armed(p))
        return {
            'counters are in their ranges': And(
                s.epc() >= NONE, s.epc() <= DONE,
                s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= PUSHES)),
                s.all(lambda m: And(s.spc(m) >= OFF, s.spc(m) <= ON, s.found(m) >= UNSEEN,
                                    s.found(m) <= LOGGED))),
            'the flag is set from FLAGGED on': s.all(lambda m: s.logs(m) == (s.spc(m) >= FLAGGED)),
            'rings are there from VISITS on': s.rings() == (s.epc() >= VISITS),
            'no call that pushes nothing is beside rings': s.all(lambda o: Implies(
                s.inside(o), Not(s.rings()))),
            'a fault of a vCPU with a ring is beside rings': s.all(lambda f: Implies(
                s.fpc(f) != OUT, s.rings())),
            'memslots are looked at beside rings': s.all(lambda m: Implies(s.found(m) != UNSEEN, s.rings())),
            'a memslot that was seen to log does log': s.all(lambda m: Implies(
                s.found(m) == LOGGED, s.logs(m))),
            'all memslots have been looked at when the enabling returns': s.all(lambda m: Implies(
                s.epc() == DONE, s.found(m) != UNSEEN)),
            'what is flushed was protected': s.all(lambda m, c, p: Implies(
                And(s.eflushed(m, c), s.slot(p) == m), s.edone(p))),
            'the enabling protects what it has seen to log': s.all(lambda p: Implies(
                s.edone(p), And(s.rings(), s.found(s.slot(p)) == LOGGED))),
            'the enabling flushes what it has seen to log': s.all(lambda m, c: Implies(
                s.eflushed(m, c), And(s.rings(), s.found(m) == LOGGED))),
            'the enabling has flushed what logs on all CPUs when it returns': s.all(lambda m, c: Implies(
                And(s.epc() == DONE, s.found(m) == LOGGED), s.eflushed(m, c))),
            'a memslot protects after its flag': s.all(lambda p: Implies(
                Or(s.sdone(p), s.armed(p)), s.spc(s.slot(p)) >= PROTECTS)),
            'a memslot whose flag came after the rings protects beside rings': s.all(lambda p: Implies(
                And(by_memslot(s.slot(p)), s.sdone(p)), s.armed(p))),
            'a memslot whose flag came after the rings has protected and flushed when it returns': s.all(
                lambda c, p: Implies(And(by_memslot(s.slot(p)), s.spc(s.slot(p)) == ON),
                                     And(s.sdone(p), s.sflushed(s.slot(p), c)))),
            'a memslot has protected all when it flushes': s.all(lambda p: Implies(
                s.spc(s.slot(p)) == FLUSHES, s.sdone(p))),
            'a memslot flushes after it has protected': s.all(lambda m, c: Implies(
                s.sflushed(m, c), s.spc(m) >= FLUSHES)),
            'what was protected beside rings had rings': s.all(lambda p: Implies(s.armed(p), s.rings())),
            'what is protected and can be written is in a ring or about to be pushed': s.all(
                lambda p: Implies(And(armed(p), s.writable(p)), self.covered(s, p))),
            'what is flushed and cached is in a ring or about to be pushed': s.all(lambda c, p: Implies(
                And(Or(And(s.edone(p), s.eflushed(s.slot(p), c)), And(s.armed(p), s.sflushed(s.slot(p), c))),
                    s.tlb(c, p)),
                self.covered(s, p))),
        }

    sizes = {'Slot': 1, 'Page': 1, 'Fault': 1, 'Opener': 1, 'Cpu': 1}
    plain = {'sizes': sizes, 'start': {}}
    set_at_first = {'sizes': sizes, 'start': {'initially_set': lambda: True}}
    traces = {
        'no-opener': plain, 'no-rings': plain, 'rings-before-flags': set_at_first,
        'flag-before-rings': set_at_first, 'protect-logging': set_at_first, 'enabling-flushes': set_at_first,
        'memslot-flushes': plain,
    }


if __name__ == '__main__':
    prover.main(RingEnabling)
