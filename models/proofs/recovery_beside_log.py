"""A huge page is recovered, or split, beside the dirty log by write protection.

Any number of vCPUs, CPUs, recoveries, harvests, pages and blocks (a directory entry, or a huge leaf). Engine:
`second_stage/recover.rs`, `second_stage/broken.rs`, `second_stage/split.rs`, `second_stage/protect.rs`,
`dirty/log.rs`, `vm/region.rs`.

A recovery exchanges the directory entry for a broken PTE, and freezes the leaves below. It exchanges the
broken PTE for a huge leaf, which has W if the memslot did not log then. If it gave W it reads the flag
again, and marks all pages if the memslot logs. A split by way of a broken PTE does the same with the parts,
whose W it decides before it breaks the leaf.
A thread that needs a broken PTE cancels: it freezes what is left, and makes the PTE empty.

A harvest and an enabling pass a broken PTE and an empty one by. They walk from the root after the bits were
taken, or the flag was published, and perhaps once more. What they have found may be unlinked before they
clear W in it.

When a page-table page is unlinked all its leaves are frozen. So one set of leaves for each block is enough.

Left out: D and the host (`harvest_beside_zap.py`); invalidations and memslots that change (the counter of
sequence numbers is theirs); lazy protection; rings; blocks of 1 GiB.
"""
import prover
from log_steps import (
    ARMED, FLAGGED, FLUSHES, OFF, ON, RETURNED, TAKES, UNBEGUN, WriteProtection, inv_of_enabling,
    inv_of_protecting)
from prover import And, If, Implies, Not, Or, put, put_where

TABLE, BROKEN, HUGE, EMPTY = range(4)                   # what is at a block
OUT, GAVE, MARKS = range(3)                             # of a fault
IDLE, BROKE, MADE, MARKS_ALL, DONE = range(5)           # of a recovery, or of a split


class RecoveryBesideLog(WriteProtection):
    sorts = ['Fault', 'Recovery', 'Harvest', 'Page', 'Block', 'Cpu']
    letters = {'f': 'Fault', 'r': 'Recovery', 'h': 'Harvest', 'p': 'Page', 'q': 'Page', 'b': 'Block',
               'c': 'Cpu'}
    fixed = {'page': (['Fault'], 'Page'), 'of': (['Recovery'], 'Block'), 'block': (['Page'], 'Block'),
             'splits': (['Recovery'], 'bool'), 'initially_set': ([], 'bool')}
    state = {
        'kind': (['Block'], 'int'), 'owner': (['Block'], 'Recovery'), 'huge_writable': (['Block'], 'bool'),
        'present': (['Page'], 'bool'), 'frozen': (['Page'], 'bool'), 'writable': (['Page'], 'bool'),
        'had_write': (['Page'], 'bool'),
        # W of the leaf when it was frozen; for a rule left out
        'bit': (['Page'], 'bool'), 'flag': ([], 'bool'),
        'tlb': (['Cpu', 'Page'], 'bool'), 'psc': (['Cpu', 'Block'], 'bool'),
        'fpc': (['Fault'], 'int'), 'fhuge': (['Fault'], 'bool'), 'fdone': (['Fault', 'Page'], 'bool'),
        'rpc': (['Recovery'], 'int'), 'rmay': (['Recovery'], 'bool'), 'rdone': (['Recovery', 'Page'], 'bool'),
        'hpc': (['Harvest'], 'int'), 'holds': (['Harvest', 'Page'], 'bool'),
        'hsaw': (['Harvest', 'Page'], 'bool'),
        'hstale': (['Harvest', 'Page'], 'bool'), 'rearmed': (['Harvest', 'Page'], 'bool'),
        'passed': (['Harvest', 'Page'], 'bool'), 'flushed': (['Harvest', 'Cpu'], 'bool'),
        'epc': ([], 'int'), 'armed': (['Page'], 'bool'), 'esaw': (['Page'], 'bool'),
        'estale': (['Page'], 'bool'),
        'eflushed': (['Cpu'], 'bool'),
        # Ghosts: written and not reported; the fault and the recovery that gave W last, the last harvest that
        # took the bit.
        'unreported': (['Page'], 'bool'), 'giver': (['Page'], 'Fault'), 'maker': (['Block'], 'Recovery'),
        'taker': (['Page'], 'Harvest'),
    }
    rules = {
        'never-copy-write': 'A recovery gives the huge leaf W if all leaves had it, and marks nothing.',
        'flag-after-make': 'A recovery that gave W does not read the flag again.',
        'recovery-marks-all': 'A recovery that gave W marks one page.',
        'fault-marks-all': 'A fault that gave W to a huge leaf marks its own page.',
        'walk-after-take': 'A harvest walks from the root before it has taken the bits.',
        'protect-huge': 'A harvest passes a huge leaf by.',
        'flush-what-was-passed': 'A harvest does not flush pages behind a broken PTE that it passed by.',
        'flag-before-protect': 'Enabling protects before it publishes the flag.',
        'enabling-flushes': 'Enabling does not flush.',
    }

    def init(self, s):
        return {
            'nothing is mapped': And(s.all(lambda b: s.kind(b) == EMPTY), s.all(lambda p: s.frozen(p)),
                                     s.all(lambda c, b: Not(s.psc(c, b)))),
            'nothing is marked': s.all(lambda p: And(
                Not(s.bit(p)), Not(s.unreported(p)), Not(s.armed(p)), Not(s.esaw(p)), Not(s.estale(p)))),
            'no memslot logs': And(Not(s.flag()), s.epc() == OFF),
            'no fault': s.all(lambda f, p: And(s.fpc(f) == OUT, Not(s.fdone(f, p)))),
            'no recovery': s.all(lambda r, p: And(s.rpc(r) == IDLE, Not(s.rdone(r, p)))),
            'no harvest': s.all(lambda h: s.hpc(h) == UNBEGUN),
            'nothing taken': s.all(lambda h, p: And(
                Not(s.holds(h, p)), Not(s.rearmed(h, p)), Not(s.hsaw(h, p)), Not(s.hstale(h, p)))),
            'nothing flushed': And(s.all(lambda h, c: Not(s.flushed(h, c))),
                                   s.all(lambda c: Not(s.eflushed(c)))),
        }

    def gave(self, s, f, is_huge):
        """The fault has given W to its leaf, or to a huge leaf."""
        b = s.block(s.page(f))
        mine = lambda p: s.block(p) == b if is_huge else p == s.page(f)
        return {'fpc': put(s.fpc, f, GAVE), 'fhuge': put(s.fhuge, f, is_huge),
                'giver': put_where(s.giver, mine, f)}

    def unlinked(self, s, b):
        """The page-table page of the block is unlinked: walks that have found it are stale."""
        below = lambda p: s.block(p) == b
        return {'hstale': put_where(s.hstale, lambda h, p: And(below(p), s.hsaw(h, p)), True),
                'estale': put_where(s.estale, lambda p: And(below(p), s.esaw(p)), True)}

    # A fault.

    def step_restore_write(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to; vcpu/act.rs: install_at (it may have walked there before the break)"""
        p = s.page(f)
        return And(s.fpc(f) == OUT, s.kind(s.block(p)) <= BROKEN, Not(s.frozen(p)),
                   Not(And(s.present(p), s.writable(p)))), {
            'present': put(s.present, p, True), 'writable': put(s.writable, p, True),
            **self.gave(s, f, False)}

    def step_restore_huge(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_huge; vcpu/act.rs: install_higher"""
        b = s.block(s.page(f))
        return And(s.fpc(f) == OUT, Or(s.kind(b) == EMPTY,
                                       And(s.kind(b) == HUGE, Not(s.huge_writable(b))))), {
            'kind': put(s.kind, b, HUGE), 'huge_writable': put(s.huge_writable, b, True),
            **self.gave(s, f, True)}

    def step_link_table(self, s, f: 'Fault'):
        """second_stage/install.rs: install (with a page-table page)"""
        p, b = s.page(f), s.block(s.page(f))
        below = lambda q: s.block(q) == b
        return And(s.fpc(f) == OUT, s.kind(b) == EMPTY), {
            'kind': put(s.kind, b, TABLE), 'frozen': put_where(s.frozen, below, False),
            'present': put_where(s.present, below, lambda q: q == p),
            'writable': put_where(s.writable, below, lambda q: q == p), **self.gave(s, f, False)}

    def step_split(self, s, b: 'Block'):
        """second_stage/install.rs: split_into"""
        below = lambda q: s.block(q) == b
        return s.kind(b) == HUGE, {
            'kind': put(s.kind, b, TABLE), 'frozen': put_where(s.frozen, below, False),
            'present': put_where(s.present, below, True),
            'writable': put_where(s.writable, below, s.huge_writable(b))}

    def covers(self, s, f, p):
        return Or(p == s.page(f), And(s.fhuge(f), s.block(p) == s.block(s.page(f))))

    def step_read_flag(self, s, f: 'Fault'):
        """dirty/log.rs: mark_if_logging"""
        return s.fpc(f) == GAVE, {'fpc': put(s.fpc, f, If(s.flag(), MARKS, OUT))}

    def step_mark(self, s, f: 'Fault', p: 'Page'):
        """slot/bitmap.rs: mark (a bit that is set stays so)"""
        return And(s.fpc(f) == MARKS, self.covers(s, f, p)), {
            'bit': put(s.bit, p, True), 'fdone': put(s.fdone, (f, p), True)}

    def step_marked(self, s, f: 'Fault'):
        """vcpu/on_leaf.rs: restore_to returns"""
        every = s.all(lambda p: Implies(self.covers(s, f, p), s.fdone(f, p)))
        if self.without('fault-marks-all'):
            every = s.fdone(f, s.page(f))
        return And(s.fpc(f) == MARKS, every), {
            'fpc': put(s.fpc, f, OUT), 'fdone': put_where(s.fdone, lambda g, p: g == f, False)}

    # A recovery, and a split by way of a broken PTE.

    def step_break_table(self, s, r: 'Recovery'):
        """second_stage/recover.rs: try_recover"""
        b = s.of(r)
        return And(s.rpc(r) == IDLE, Not(s.splits(r)), s.kind(b) == TABLE), {
            'kind': put(s.kind, b, BROKEN), 'owner': put(s.owner, b, r), 'rpc': put(s.rpc, r, BROKE),
            'rmay': put(s.rmay, r, False)}

    def step_read_flag_before(self, s, r: 'Recovery'):
        """second_stage/split.rs: break_leaf (keeps_write)"""
        return And(s.rpc(r) == IDLE, s.splits(r)), {'rmay': put(s.rmay, r, Not(s.flag()))}

    def step_break_huge(self, s, r: 'Recovery'):
        """second_stage/split.rs: break_leaf"""
        b = s.of(r)
        return And(s.rpc(r) == IDLE, s.splits(r), s.kind(b) == HUGE), {
            'kind': put(s.kind, b, BROKEN), 'owner': put(s.owner, b, r), 'rpc': put(s.rpc, r, BROKE),
            'rmay': put(s.rmay, r, And(s.huge_writable(b), s.rmay(r)))}

    def step_read_may_write(self, s, r: 'Recovery'):
        """second_stage/recover.rs: try_recover (may_write)"""
        return And(s.rpc(r) == BROKE, Not(s.splits(r))), {'rmay': put(s.rmay, r, Not(s.flag()))}

    def step_freeze(self, s, p: 'Page'):
        """second_stage/recover.rs: gather; second_stage/broken.rs: report_and_freeze"""
        return And(s.kind(s.block(p)) == BROKEN, Not(s.frozen(p))), {
            'frozen': put(s.frozen, p, True),
            'had_write': put(s.had_write, p, And(s.present(p), s.writable(p)))}

    def is_frozen(self, s, b):
        return And(s.kind(b) == BROKEN, s.all(lambda p: Implies(s.block(p) == b, s.frozen(p))))

    def makes(self, s, r, may_write, copies=False):
        b = s.of(r)
        marks = And(may_write, Not(copies), not self.without('flag-after-make'))
        return {'rpc': put(s.rpc, r, If(marks, MADE, DONE)),
                'maker': put(s.maker, b, If(may_write, r, s.maker(b)))}

    def step_make_huge(self, s, r: 'Recovery'):
        """second_stage/recover.rs: make"""
        b = s.of(r)
        below = lambda p: s.block(p) == b
        may_write = s.rmay(r)
        if self.without('never-copy-write'):
            may_write = s.all(lambda p: Implies(below(p), s.had_write(p)))
        return And(s.rpc(r) == BROKE, Not(s.splits(r)), s.owner(b) == r, self.is_frozen(s, b),
                   s.all(lambda p: Implies(below(p), s.present(p)))), {
            'kind': put(s.kind, b, HUGE), 'huge_writable': put(s.huge_writable, b, may_write),
            **self.makes(s, r, may_write, self.without('never-copy-write')), **self.unlinked(s, b)}

    def step_link_parts(self, s, r: 'Recovery'):
        """second_stage/split.rs: link_parts"""
        b = s.of(r)
        below = lambda p: s.block(p) == b
        return And(s.rpc(r) == BROKE, s.splits(r), s.owner(b) == r, self.is_frozen(s, b)), {
            'kind': put(s.kind, b, TABLE), 'frozen': put_where(s.frozen, below, False),
            'present': put_where(s.present, below, True), 'writable': put_where(s.writable, below, s.rmay(r)),
            **self.makes(s, r, s.rmay(r)), **self.unlinked(s, b)}

    def step_cancel(self, s, b: 'Block'):
        """second_stage/broken.rs: cancel"""
        return self.is_frozen(s, b), {'kind': put(s.kind, b, EMPTY), **self.unlinked(s, b)}

    def step_cancelled(self, s, r: 'Recovery'):
        """second_stage/recover.rs: make (the exchange fails)"""
        b = s.of(r)
        return And(s.rpc(r) == BROKE, Not(And(s.kind(b) == BROKEN, s.owner(b) == r))), {
            'rpc': put(s.rpc, r, DONE)}

    def step_read_flag_again(self, s, r: 'Recovery'):
        """second_stage/recover.rs: made; second_stage/split.rs: link_parts; dirty/log.rs: mark_if_logging"""
        return s.rpc(r) == MADE, {'rpc': put(s.rpc, r, If(s.flag(), MARKS_ALL, DONE))}

    def step_mark_all(self, s, r: 'Recovery', p: 'Page'):
        """slot/bitmap.rs: mark"""
        return And(s.rpc(r) == MARKS_ALL, s.block(p) == s.of(r)), {
            'bit': put(s.bit, p, True), 'rdone': put(s.rdone, (r, p), True)}

    def step_all_marked(self, s, r: 'Recovery'):
        """second_stage/recover.rs: made returns"""
        every = s.all(lambda p: Implies(s.block(p) == s.of(r), s.rdone(r, p)))
        if self.without('recovery-marks-all'):
            every = s.some(lambda p: s.rdone(r, p))
        return And(s.rpc(r) == MARKS_ALL, every), {'rpc': put(s.rpc, r, DONE)}

    # A harvest.

    def step_walk(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: table_of (finds a page-table page)"""
        may = Or(s.holds(h, p), self.without('walk-after-take'))
        return And(s.hpc(h) <= TAKES, may, s.kind(s.block(p)) == TABLE), {
            'hsaw': put(s.hsaw, (h, p), True), 'hstale': put(s.hstale, (h, p), False)}

    def step_protect_leaf(self, s, h: 'Harvest', p: 'Page'):
        """second_stage/protect.rs: protect_leaf (perhaps in a page-table page that was unlinked)"""
        return And(s.hpc(h) == TAKES, s.holds(h, p), s.hsaw(h, p)), {
            'rearmed': put(s.rearmed, (h, p), True),
            'writable': put(s.writable, p, And(s.hstale(h, p), s.writable(p)))}

    def step_protect_huge(self, s, h: 'Harvest', b: 'Block'):
        """second_stage/protect.rs: protect_huge"""
        mine = lambda g, p: And(g == h, s.block(p) == b, s.holds(h, p))
        keeps = And(self.without('protect-huge'), s.huge_writable(b))
        return And(s.hpc(h) == TAKES, s.kind(b) == HUGE), {
            'rearmed': put_where(s.rearmed, mine, True), 'huge_writable': put(s.huge_writable, b, keeps)}

    def step_pass(self, s, h: 'Harvest', b: 'Block'):
        """second_stage/protect.rs: protect_table (State::Broken, State::Empty)"""
        mine = lambda g, p: And(g == h, s.block(p) == b, s.holds(h, p))
        return And(s.hpc(h) == TAKES, Or(s.kind(b) == BROKEN, s.kind(b) == EMPTY)), {
            'rearmed': put_where(s.rearmed, mine, True), 'passed': put_where(s.passed, mine, True)}

    def step_flush(self, s, h: 'Harvest', c: 'Cpu'):
        """harvest/log.rs: harvest (flush_cpus)"""
        skips = lambda p: And(self.without('flush-what-was-passed'), s.passed(h, p))
        meant = lambda p: And(s.holds(h, p), Not(skips(p)))
        above = lambda b: s.some(lambda p: And(s.block(p) == b, meant(p)))
        return s.hpc(h) == FLUSHES, {
            'flushed': put(s.flushed, (h, c), True),
            'tlb': put_where(s.tlb, lambda d, p: And(d == c, meant(p)), False),
            'psc': put_where(s.psc, lambda d, b: And(d == c, above(b)), False)}

    # Logging begins and ends.

    def step_enabling_walks(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_slot (finds a page-table page)"""
        return And(self.may_protect(s), s.kind(s.block(p)) == TABLE), {
            'esaw': put(s.esaw, p, True), 'estale': put(s.estale, p, False)}

    def step_enabling_protects_leaf(self, s, p: 'Page'):
        """second_stage/protect.rs: protect_leaf (perhaps in a page-table page that was unlinked)"""
        return And(self.may_protect(s), s.esaw(p)), {
            'armed': put(s.armed, p, True), 'writable': put(s.writable, p, And(s.estale(p), s.writable(p)))}

    def step_enabling_protects_huge(self, s, b: 'Block'):
        """second_stage/protect.rs: protect_huge"""
        return And(self.may_protect(s), s.kind(b) == HUGE), {
            'armed': put_where(s.armed, lambda p: s.block(p) == b, True),
            'huge_writable': put(s.huge_writable, b, False)}

    def step_enabling_passes(self, s, b: 'Block'):
        """second_stage/protect.rs: protect_table (State::Broken, State::Empty)"""
        return And(self.may_protect(s), Or(s.kind(b) == BROKEN, s.kind(b) == EMPTY)), {
            'armed': put_where(s.armed, lambda p: s.block(p) == b, True)}

    def step_enabling_flushes(self, s, c: 'Cpu'):
        """vm/region.rs: begin_to_log"""
        stays = self.without('enabling-flushes')
        return And(s.epc() == ARMED, Not(s.initially_set())), {
            'eflushed': put(s.eflushed, c, True),
            'tlb': put_where(s.tlb, lambda d, p: And(d == c, Not(stays)), False),
            'psc': put_where(s.psc, lambda d, b: And(d == c, Not(stays)), False)}

    def step_disable(self, s):
        """vm/region.rs: change_slot"""
        no_page = lambda p: False
        return s.epc() == ON, {'flag': lambda: False, 'epc': lambda: OFF, 'armed': no_page, 'esaw': no_page,
                               'estale': no_page, 'eflushed': lambda c: False, 'unreported': no_page}

    # The guest, and what else takes W away.

    def is_writable(self, s, p):
        """A walk from the root may write to the page."""
        b = s.block(p)
        return Or(And(s.kind(b) == TABLE, s.present(p), s.writable(p)),
                  And(s.kind(b) == HUGE, s.huge_writable(b)))

    def is_writable_below(self, s, c, p):
        """A CPU may write to the page through a page-table page that it has cached."""
        return And(s.psc(c, s.block(p)), s.kind(s.block(p)) <= BROKEN, s.present(p), s.writable(p),
                   Not(s.frozen(p)))

    def step_cache_table(self, s, c: 'Cpu', b: 'Block'):
        """A CPU caches a directory entry"""
        return s.kind(b) == TABLE, {'psc': put(s.psc, (c, b), True)}

    def step_fill_tlb(self, s, c: 'Cpu', p: 'Page'):
        """A CPU caches a leaf"""
        return Or(self.is_writable(s, p), self.is_writable_below(s, c, p)), {'tlb': put(s.tlb, (c, p), True)}

    def step_zap_leaf(self, s, p: 'Page'):
        """second_stage/zap.rs: visit"""
        return And(s.kind(s.block(p)) <= BROKEN, s.present(p), Not(s.frozen(p))), {
            'present': put(s.present, p, False), 'writable': put(s.writable, p, False)}

    # What is promised.

    def will_mark(self, s, p):
        """The fault or the recovery that gave W last is about to mark the page."""
        f, r = s.giver(p), s.maker(s.block(p))
        by_fault = And(self.covers(s, f, p), Or(s.fpc(f) == GAVE, And(s.fpc(f) == MARKS, Not(s.fdone(f, p)))))
        by_recovery = And(s.of(r) == s.block(p),
            Or(s.rpc(r) == MADE, And(s.rpc(r) == MARKS_ALL, Not(s.rdone(r, p)))))
        return Or(by_fault, by_recovery)

    def inv(self, s):
        return {**inv_of_enabling(s), **inv_of_protecting(s), **self.inv_of_counters(s), **self.inv_of_walks(s),
                **self.heart(s)}

    def inv_of_counters(self, s):
        return {
            'counters are in their ranges': And(
                s.all(lambda b: And(s.kind(b) >= TABLE, s.kind(b) <= EMPTY)),
                s.all(lambda f: And(s.fpc(f) >= OUT, s.fpc(f) <= MARKS)),
                s.all(lambda r: And(s.rpc(r) >= IDLE, s.rpc(r) <= DONE))),
            'no leaf of a linked page-table page is frozen': s.all(lambda p: Implies(
                s.frozen(p), s.kind(s.block(p)) != TABLE)),
            'what is unlinked is frozen': s.all(lambda p: Implies(s.kind(s.block(p)) >= HUGE, s.frozen(p))),
            'a fault has done pages only while it marks': s.all(lambda f, p: Implies(
                s.fdone(f, p), s.fpc(f) == MARKS)),
            'a recovery has done pages once it marks': s.all(lambda r, p: Implies(
                s.rdone(r, p), s.rpc(r) >= MARKS_ALL)),
            'enabling walks after the flag': s.all(lambda p: Implies(s.esaw(p), s.flag())),
            'a walk is stale after it began': s.all(lambda p: Implies(s.estale(p), s.esaw(p))),
        }

    def inv_of_walks(self, s):
        return {
            'a harvest walks after it has taken': s.all(lambda h, p: Implies(
                s.hsaw(h, p), Or(s.holds(h, p), s.hpc(h) == RETURNED))),
            'a walk of a harvest that is not stale leads to linked leaves': s.all(lambda h, p: Implies(
                And(s.hsaw(h, p), Not(s.hstale(h, p))), s.kind(s.block(p)) <= BROKEN)),
            'a walk of enabling that is not stale leads to linked leaves': s.all(lambda p: Implies(
                And(s.esaw(p), Not(s.estale(p))), s.kind(s.block(p)) <= BROKEN)),
            'a walk of a harvest is stale after it began': s.all(lambda h, p: Implies(
                s.hstale(h, p), s.hsaw(h, p))),
        }

    def heart(self, s):
        """Some thread marks or reports what can be written, or is cached so."""
        h = s.taker
        will_protect = lambda p: And(self.held(s, p), Not(s.rearmed(h(p), p)), Not(s.hstale(h(p), p)))
        will_flush = lambda c, p: And(self.held(s, p), Not(s.flushed(h(p), c)))
        covered = lambda p: Or(s.bit(p), will_protect(p), self.will_mark(s, p))
        covered_on = lambda c, p: Or(s.bit(p), will_flush(c, p), self.will_mark(s, p))
        counts = lambda c, p: Or(s.eflushed(c), And(s.initially_set(), s.armed(p)))
        return {
            'what can be written is marked or about to be': s.all(lambda p: Implies(
                And(Or(s.armed(p), s.estale(p)), self.is_writable(s, p)), covered(p))),
            'what a cached page-table page makes writable is marked or about to be': s.all(
                lambda c, p: Implies(
                And(counts(c, p), self.is_writable_below(s, c, p)), covered_on(c, p))),
            'what is cached as writable is marked or about to be': s.all(lambda c, p: Implies(
                And(counts(c, p), s.tlb(c, p)), covered_on(c, p))),
        }

    sizes = {'Fault': 1, 'Recovery': 2, 'Harvest': 1, 'Page': 2, 'Block': 1, 'Cpu': 1}
    start = {'kind': lambda b: EMPTY, 'frozen': lambda p: True, 'splits': lambda r: r == 'recovery1'}
    story = '''restore_huge fault0; read_flag fault0; split block0; break_table recovery0; freeze page0;
        freeze page1; read_may_write recovery0; make_huge recovery0; publish_flag; read_flag_again recovery0;
        mark_all recovery0 page0; mark_all recovery0 page1; all_marked recovery0'''
    few = {**sizes, 'Recovery': 1}
    one = {**few, 'Page': 1}
    logging = {'epc': lambda: ON, 'flag': lambda: True, 'armed': lambda p: True, 'eflushed': lambda c: True,
               'present': lambda p: True, 'bit': lambda p: True}
    huge = {**logging, 'kind': lambda b: HUGE, 'frozen': lambda p: True, 'huge_writable': lambda b: True}
    off = {'present': lambda p: True}
    traces = {
        'never-copy-write': {'sizes': one, 'start': {**logging, 'writable': lambda p: True}},
        'flag-after-make': {'sizes': one, 'start': off},
        'recovery-marks-all': {'sizes': few,
            'start': {**huge, 'rpc': lambda r: MARKS_ALL, 'bit': lambda p: False}},
        'fault-marks-all': {'sizes': few, 'start': {**logging, **start, 'bit': lambda p: False}},
        'protect-huge': {'sizes': one, 'start': huge},
        'flush-what-was-passed': {'sizes': one, 'start': {**logging, 'writable': lambda p: True}},
        'flag-before-protect': {'sizes': one, 'start': off},
        'enabling-flushes': {'sizes': one, 'start': off},
    }


if __name__ == '__main__':
    prover.main(RecoveryBesideLog)
