"""A huge page is recovered beside lazy protection: a push-down meets a broken PTE, or a block made anew.

What `recovery_beside_log.py` has, with directory entries that may be protected, and push-downs. Engine:
`second_stage/push_down.rs`, `second_stage/protect.rs` (close), `second_stage/recover.rs`.

A push-down has walked into a page-table page. If its directory entry is broken, or the block is made anew,
its exchange of the entry fails. Its exchange of the leaf fails if the leaf is frozen. It marks its page if it
has set W, even if the exchange of the entry failed. A page-table page that is linked begins unprotected.

Generations are integers, as in `lazy_protection.py`; a block that is made anew has another.
"""
import prover
from prover import And, If, Implies, Not, Or, put, put_where
from recovery_beside_log import BROKEN, GAVE, OUT, RETURNED, TABLE, TAKES, RecoveryBesideLog

READ, CLEARS, SET = range(3, 6)                         # more states of a fault


class RecoveryBesidePushDown(RecoveryBesideLog):
    state = {
        **RecoveryBesideLog.state,
        'open': (['Block'], 'bool'), 'generation': (['Block'], 'int'),
        'fread': (['Fault'], 'int'), 'flogs': (['Fault'], 'bool'), 'fcleared': (['Fault', 'Page'], 'bool'),
        'fstale': (['Fault'], 'bool'),                  # its page-table page was unlinked
    }
    rules = {
        'always-move-on': 'Protecting a directory entry that is protected keeps its generation.',
        'exchange-what-was-read': 'A push-down restores W of the directory entry whatever it is by then.',
        'clear-the-others': 'A push-down does not clear W of the other leaves.',
        'mark-if-overtaken': 'A push-down whose exchange of the entry failed does not mark its page.',
        'never-copy-write': 'A recovery gives the huge leaf W if all leaves had it, and marks nothing.',
    }

    def pushes(self, s, f):
        return s.fpc(f) >= READ

    def unlinked(self, s, b):
        stale = lambda f: And(s.block(s.page(f)) == b, self.pushes(s, f))
        return {**super().unlinked(s, b), 'fstale': put_where(s.fstale, stale, True),
                'generation': put(s.generation, b, s.generation(b) + 1)}

    def linked(self, s, b, step):
        guard, updates = step
        return guard, {**updates, 'open': put(s.open, b, True)}

    def step_link_table(self, s, f: 'Fault'):
        """second_stage/install.rs: install (with a page-table page)"""
        return self.linked(s, s.block(s.page(f)), super().step_link_table(s, f))

    def step_split(self, s, b: 'Block'):
        """second_stage/install.rs: split_into"""
        return self.linked(s, b, super().step_split(s, b))

    def step_link_parts(self, s, r: 'Recovery'):
        """second_stage/split.rs: link_parts"""
        return self.linked(s, s.of(r), super().step_link_parts(s, r))

    # A push-down.

    def step_read_entry(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down"""
        b = s.block(s.page(f))
        return And(s.fpc(f) == OUT, s.kind(b) == TABLE, Not(s.open(b))), {
            'fpc': put(s.fpc, f, READ), 'fread': put(s.fread, f, s.generation(b)),
            'fstale': put(s.fstale, f, False),
            'fcleared': put_where(s.fcleared, lambda g, q: g == f, False)}

    def step_read_others(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: push_down_in (others)"""
        return s.fpc(f) == READ, {'fpc': put(s.fpc, f, CLEARS), 'flogs': put(s.flogs, f, s.flag())}

    def is_other(self, s, f, q):
        return And(s.block(q) == s.block(s.page(f)), q != s.page(f))

    def step_clear_other(self, s, f: 'Fault', q: 'Page'):
        """second_stage/push_down.rs: protect_all (without effect in leaves that are frozen)"""
        keeps = Or(self.without('clear-the-others'), s.fstale(f), s.frozen(q))
        return And(s.fpc(f) == CLEARS, s.flogs(f), self.is_other(s, f, q)), {
            'writable': put(s.writable, q, And(keeps, s.writable(q))),
            'fcleared': put(s.fcleared, (f, q), True)}

    def step_set_own(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (restore_access)"""
        p = s.page(f)
        cleared = s.all(lambda q: Implies(self.is_other(s, f, q), s.fcleared(f, q)))
        return And(s.fpc(f) == CLEARS, Or(Not(s.flogs(f)), cleared), Not(s.fstale(f)), s.present(p),
                   Not(s.frozen(p))), {
            'writable': put(s.writable, p, True), 'giver': put(s.giver, p, f), 'fpc': put(s.fpc, f, SET)}

    def step_push_down_fails(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (Changed)"""
        return Or(s.fpc(f) == READ, s.fpc(f) == CLEARS), {'fpc': put(s.fpc, f, OUT)}

    def is_same(self, s, f):
        b = s.block(s.page(f))
        return And(s.kind(b) == TABLE, Not(s.open(b)), s.generation(b) == s.fread(f), Not(s.fstale(f)))

    def step_unprotect(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (compare_exchange)"""
        b = s.block(s.page(f))
        blind = And(self.without('exchange-what-was-read'), s.kind(b) == TABLE)
        return And(s.fpc(f) == SET, Or(self.is_same(s, f), blind)), {
            'open': put(s.open, b, True), 'fpc': put(s.fpc, f, GAVE), 'fhuge': put(s.fhuge, f, False)}

    def step_unprotect_fails(self, s, f: 'Fault'):
        """second_stage/push_down.rs: push_down_in (Pushed::LeafOnly)"""
        then = OUT if self.without('mark-if-overtaken') else GAVE
        return And(s.fpc(f) == SET, Not(self.is_same(s, f))), {
            'fpc': put(s.fpc, f, then), 'fhuge': put(s.fhuge, f, False)}

    # Directory entries are protected.

    def protects(self, s, b):
        moves = Or(not self.without('always-move-on'), s.open(b))
        return {'open': put(s.open, b, False),
                'generation': put(s.generation, b, If(moves, s.generation(b) + 1, s.generation(b)))}

    def step_protect_entry(self, s, h: 'Harvest', b: 'Block'):
        """second_stage/protect.rs: close"""
        mine = lambda g, p: And(g == h, s.block(p) == b, s.holds(h, p))
        return And(s.hpc(h) == TAKES, s.kind(b) == TABLE), {
            **self.protects(s, b), 'rearmed': put_where(s.rearmed, mine, True)}

    def step_enabling_protects_entry(self, s, b: 'Block'):
        """second_stage/protect.rs: protect_slot, close"""
        return And(self.may_protect(s), s.kind(b) == TABLE), {
            **self.protects(s, b), 'armed': put_where(s.armed, lambda p: s.block(p) == b, True)}

    def step_cache_table(self, s, c: 'Cpu', b: 'Block'):
        """A CPU caches an unprotected directory entry"""
        return And(s.kind(b) == TABLE, s.open(b)), {'psc': put(s.psc, (c, b), True)}

    def is_writable(self, s, p):
        b = s.block(p)
        return And(super().is_writable(s, p), Or(s.kind(b) != TABLE, s.open(b)))

    # What is promised.

    def will_mark(self, s, p):
        f = s.giver(p)
        return Or(super().will_mark(s, p), And(s.fpc(f) == SET, s.page(f) == p))

    def inv(self, s):
        covered = lambda p: Or(s.bit(p), self.will_mark(s, p), And(
            self.held(s, p), Not(s.rearmed(s.taker(p), p)), Not(s.hstale(s.taker(p), p))))
        is_done = lambda f, q: Or(Not(s.flogs(f)), s.fcleared(f, q), And(s.fpc(f) == SET, q == s.page(f)))
        linked = lambda f: And(self.pushes(s, f), Not(s.fstale(f)))
        return {
            **super().inv(s),
            'counters are in their ranges': And(
                s.all(lambda b: And(s.kind(b) >= TABLE, s.kind(b) <= 3)),
                s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= SET)),
                s.all(lambda r: And(s.rpc(r) >= 0, s.rpc(r) <= 4)),
                s.all(lambda h: And(s.hpc(h) >= 0, s.hpc(h) <= 3))),
            'generations rise': s.all(lambda f: Implies(
                self.pushes(s, f), s.fread(f) <= s.generation(s.block(s.page(f))))),
            'a push-down that is not stale is at linked leaves': s.all(lambda f: Implies(
                linked(f), s.kind(s.block(s.page(f))) <= BROKEN)),
            'a push-down that has set W has cleared the others': s.all(lambda f, q: Implies(
                And(s.fpc(f) == SET, s.flogs(f), self.is_other(s, f, q)), s.fcleared(f, q))),
            'a push-down clears after it has read the flag': s.all(lambda f, q: Implies(
                And(self.pushes(s, f), s.fcleared(f, q)), And(s.fpc(f) >= CLEARS, s.flogs(f)))),
            'what a push-down will make writable is marked or about to be': s.all(lambda f, q: Implies(
                And(linked(f), s.fpc(f) >= CLEARS, s.kind(s.block(q)) == TABLE, Or(s.armed(q), s.estale(q)),
                    s.block(q) == s.block(s.page(f)), is_done(f, q), s.present(q), s.writable(q),
                    s.fread(f) == s.generation(s.block(q))), covered(q))),
        }

    sizes = {'Fault': 2, 'Recovery': 2, 'Harvest': 1, 'Page': 2, 'Block': 1, 'Cpu': 1}
    one = {**sizes, 'Fault': 1, 'Recovery': 1}
    # A push-down that logs is about to clear W of page 1, which is not marked.
    others = {**RecoveryBesideLog.logging, 'bit': lambda p: False, 'writable': lambda p: p == 'page1',
              'fpc': lambda f: CLEARS, 'flogs': lambda f: True, 'hpc': lambda h: RETURNED}
    traces = {'clear-the-others': {'sizes': one, 'start': others}}


if __name__ == '__main__':
    prover.main(RecoveryBesidePushDown)
