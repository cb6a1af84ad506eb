"""Shadow paging and the second stage: shadow leaves and CPUs allow no more than the second stage
does.

Protocol: docs/protocols/shadow-paging.md, first rule. Modules: shadow/install.rs, shadow/zap.rs,
shadow/lock.rs, shadow/memory.rs, table/tlb.rs. Any number of faults, changes, pages, blocks,
records, shadow PTEs and CPUs.

A shadow leaf maps the pages of a record: a guest frame, or a block of them. A fault makes it under
the lock of its shadow page and of the record, and reads the second stage once more under them. A
change of the second stage takes pages away (with its range in flight), or the right to write them,
or protects the directory entry above a block. Then it visits the records of its pages, of each
size: it skips a record whose lock is free and whose list is empty. Then it flushes the CPUs.

Proved: a CPU uses no page that the host has taken back, and the engine reads and writes no guest
table there. When a change that takes W has flushed a CPU, neither that CPU nor the engine (which
sets A and D in guest tables) writes the page before the second stage allows it again. So what the
proofs of invalidation, of the dirty log and of lazy protection say of cached leaves holds with
shadow paging, too.

Assumed, with proofs of their own: no fault maps a page of the second stage whose range is in
flight; W is not given below a protected directory entry. Not here: what the guest's own tables say,
links and roots. A shadow PTE stands for all of its page's lock; a list is the shadow PTEs that lead
to a record. Each step is atomic, in one order for all threads.
"""
import prover
import starts
from prover import And, Implies, Not, Or, Protocol, put, put_where
from starts import at

# A fault, or another thread of the engine that reads a guest table: it has the lock of its shadow page,
# has that of the record, has read the directory entry, has read the leaf.
IDLE, HAS_PAGE, HAS_RECORD, HAS_TABLE, HAS_LEAF = range(5)
# A change: it changes the second stage, visits records, flushes, has flushed, is over.
OUT, CHANGES, VISITS, FLUSHES, FLUSHED, OVER = range(6)
ZAP, PROTECT, LAZY = range(3)                                           # kinds of changes


class ShadowSecond(Protocol):
    sorts = ['Fault', 'Change', 'Page', 'Block', 'Record', 'Entry', 'Leaf', 'Cpu']
    letters = {'f': 'Fault', 'g': 'Fault', 'i': 'Change', 'j': 'Change', 'p': 'Page', 'q': 'Page',
        'b': 'Block',
               'r': 'Record', 'e': 'Entry', 'l': 'Leaf', 'c': 'Cpu'}
    fixed = {
        'block': (['Page'], 'Block'), 'first': (['Record'], 'Page'), 'is_big': (['Record'], 'bool'),
        'kind': (['Change'], 'int'), 'covers': (['Change', 'Page'], 'bool'),
    }
    state = {
        # The second stage. A block is one PTE (whole) or a page-table page; `open`: the PTE above is not
        # protected.
        'has': (['Page'], 'bool'), 'leaf': (['Page'], 'Leaf'), 'w': (['Page'], 'bool'),
        'whole': (['Block'], 'bool'), 'open': (['Block'], 'bool'),
        'allowed': (['Page', 'Leaf'], 'bool'),                          # the host
        # Shadow PTEs.
        'leads': (['Entry'], 'bool'), 'target': (['Entry'], 'Record'), 'maps': (['Entry'],
            'Leaf'), 'sw': (['Entry'], 'bool'),
        'busy': (['Entry'], 'bool'), 'locked': (['Record'], 'bool'),
        'cached': (['Cpu', 'Page', 'Leaf'], 'bool'), 'cached_w': (['Cpu', 'Page'], 'bool'),
        'fpc': (['Fault'], 'int'), 'entry': (['Fault'], 'Entry'), 'record': (['Fault'], 'Record'),
        'saw_open': (['Fault'], 'bool'), 'saw_leaf': (['Fault'], 'bool'), 'got': (['Fault'],
            'Leaf'), 'got_w': (['Fault'], 'bool'),
        'ipc': (['Change'], 'int'), 'changed': (['Change', 'Page'],
            'bool'), 'saw_free': (['Change', 'Record'], 'bool'),
        'visited': (['Change', 'Record'], 'bool'), 'flushed': (['Change', 'Cpu'], 'bool'),
        'given': (['Change', 'Page'], 'bool'),                # ghost: could be written again since the change
    }
    rules = {
        'second-stage-under-lock': 'reads the second stage before it has the lock of the record',
        'table-before-leaf': 'reads the leaf of the second stage, then the directory entry above',
        'visit-follows-change': 'visits a record before the second stage has changed',
        'visit-in-any-case': 'visits no record of a page that another thread has zapped',
        'visit-all-sizes': 'visits no record of a block',
        'flush-follows-visit': 'flushes before it has visited the records',
        'lock-is-looked-at': 'skips a record whose list is empty, whether its lock is free or not',
        'lock-before-list': 'skips a record that it found empty before it found its lock free',
        'host-waits': 'lets the host act before it has visited the records',
        'store-where-it-may-be-written': 'sets A or D in a guest table that the second stage has write-protected',
    }
    sizes = {'Fault': 1, 'Change': 2, 'Page': 2, 'Block': 1, 'Record': 2, 'Entry': 2, 'Leaf': 2, 'Cpu': 1}

    def axioms(self, s):
        return {'changes have a kind': s.all(lambda i: And(ZAP <= s.kind(i), s.kind(i) <= LAZY))}

    def init(self, s):
        return {
            'nothing is mapped': s.all(lambda p: And(Not(s.has(p)), Not(s.w(p)))),
            'no block is one PTE': s.all(lambda b: Not(s.whole(b))),
            'no shadow PTE leads anywhere': s.all(lambda e: And(Not(s.leads(e)), Not(s.busy(e)))),
            'no record is locked': s.all(lambda r: Not(s.locked(r))),
            'nothing is cached': And(s.all(lambda c, p: Not(s.cached_w(c, p))),
                s.all(lambda c, p, l: Not(s.cached(c, p, l)))),
            'no fault runs': s.all(lambda f: s.fpc(f) == IDLE),
            'no change runs': s.all(lambda i: s.ipc(i) == OUT),
            'nothing is changed': s.all(lambda i, p: And(Not(s.changed(i, p)), Not(s.given(i, p)))),
            'nothing is visited': s.all(lambda i, r: And(Not(s.visited(i, r)), Not(s.saw_free(i, r)))),
            'no CPU is flushed': s.all(lambda i, c: Not(s.flushed(i, c))),
        }

    def of(self, s, r, p):
        """The record is of the page."""
        return Or(p == s.first(r), And(s.is_big(r), s.block(p) == s.block(s.first(r))))

    def mates(self, s, p):
        """The pages of the second stage's PTE."""
        return lambda q: Or(q == p, And(s.whole(s.block(p)), s.block(q) == s.block(p)))

    def may_write(self, s, p):
        return And(s.has(p), s.w(p), s.open(s.block(p)))

    def giving(self, s, pages):
        """From now on these pages may be written, as far as changes so far are concerned."""
        return put_where(s.given, lambda i, p: pages(p), True)

    # ---- The second stage.

    def in_flight(self, s, i, p):
        return And(s.kind(i) == ZAP, OUT < s.ipc(i), s.ipc(i) <= FLUSHED, s.covers(i, p))

    def step_map(self, s, p: 'Page', l: 'Leaf'):
        """second_stage/install.rs: install, a leaf of a page that may not be written yet."""
        free = s.all(lambda i: Not(self.in_flight(s, i, p)))
        return And(Not(s.has(p)), Not(s.whole(s.block(p))), s.allowed(p, l), free), {
            'has': put(s.has, p, True), 'leaf': put(s.leaf, p, l), 'w': put(s.w, p, False)}

    def step_map_block(self, s, b: 'Block', l: 'Leaf'):
        """second_stage/install.rs: install, a huge leaf."""
        fine = s.all(lambda p: Implies(s.block(p) == b, And(Not(s.has(p)), s.allowed(p, l))))
        free = s.all(lambda i, p: Not(And(s.block(p) == b, self.in_flight(s, i, p))))
        mine = lambda p: s.block(p) == b
        return And(fine, free), {
            'whole': put(s.whole, b, True), 'has': put_where(s.has, mine, True), 'leaf': put_where(s.leaf,
                mine, l),
            'w': put_where(s.w, mine, False)}

    def step_split(self, s, b: 'Block'):
        """second_stage/split.rs, or an unlinked page-table page: the block has PTEs of its own again."""
        return s.whole(b), {'whole': put(s.whole, b, False)}

    def step_give_w(self, s, p: 'Page'):
        """second_stage/install.rs: restore_access. Not below a protected directory entry."""
        return And(s.has(p), s.open(s.block(p))), {
            'w': put_where(s.w, self.mates(s, p), True), 'given': self.giving(s, self.mates(s, p))}

    def step_take_w(self, s, p: 'Page'):
        """second_stage/push_down.rs: W of other leaves goes before the directory entry is opened."""
        return True, {'w': put_where(s.w, self.mates(s, p), False)}

    def step_open(self, s, b: 'Block'):
        """second_stage/push_down.rs: push_down. Pages that still have W may be written again."""
        return True, {'open': put(s.open, b, True),
            'given': self.giving(s, lambda p: And(s.block(p) == b, s.w(p)))}

    def step_host_allows(self, s, p: 'Page', l: 'Leaf'):
        """The host allows more, at any time."""
        return True, {'allowed': put(s.allowed, (p, l), True)}

    # ---- A fault.

    def step_lock_page(self, s, f: 'Fault', e: 'Entry', r: 'Record'):
        """shadow/install.rs: install_leaf, the lock of the shadow page."""
        return And(s.fpc(f) == IDLE, Not(s.busy(e))), {
            'fpc': put(s.fpc, f, HAS_PAGE), 'entry': put(s.entry, f, e), 'record': put(s.record, f, r),
            'busy': put(s.busy, e, True)}

    def step_drop_entry(self, s, f: 'Fault'):
        """shadow/zap.rs: drop_entry, under the lock of the record that it leads to."""
        e = s.entry(f)
        return And(s.fpc(f) == HAS_PAGE, s.leads(e),
            Not(s.locked(s.target(e)))), {'leads': put(s.leads, e, False)}

    def step_lock_record(self, s, f: 'Fault'):
        """shadow/mod.rs: lock_frame."""
        e, r = s.entry(f), s.record(f)
        reads = HAS_LEAF if self.without('second-stage-under-lock') else HAS_PAGE
        return And(s.fpc(f) == reads, Not(s.locked(r)), Or(Not(s.leads(e)), s.target(e) == r)), {
            'fpc': put(s.fpc, f, HAS_RECORD), 'locked': put(s.locked, r, True)}

    def reads(self, s, f):
        """(where the read of the directory entry begins, where that of the leaf begins, where they end)"""
        first = HAS_PAGE if self.without('second-stage-under-lock') else HAS_RECORD
        if self.without('table-before-leaf'): return HAS_TABLE, first, HAS_LEAF
        return first, HAS_TABLE, HAS_LEAF

    def step_read_table(self, s, f: 'Fault'):
        """shadow/mod.rs: second_stage_in, the directory entry."""
        begins, other, _ = self.reads(s, f)
        to = HAS_LEAF if begins == HAS_TABLE else HAS_TABLE
        return s.fpc(f) == begins, {
            'fpc': put(s.fpc, f, to), 'saw_open': put(s.saw_open, f, s.open(s.block(s.first(s.record(f)))))}

    def present(self, s, r):
        """The second stage has a leaf that is large enough for the record."""
        p = s.first(r)
        return And(s.has(p), Implies(s.is_big(r), s.whole(s.block(p))))

    def step_read_leaf(self, s, f: 'Fault'):
        """shadow/mod.rs: second_stage_in, the leaf. From here on the engine uses the frame's memory."""
        _, begins, _ = self.reads(s, f)
        to = HAS_TABLE if begins != HAS_TABLE else HAS_LEAF
        r, p = s.record(f), s.first(s.record(f))
        return s.fpc(f) == begins, {
            'fpc': put(s.fpc, f, to), 'saw_leaf': put(s.saw_leaf, f, self.present(s, r)), 'got': put(s.got,
                f, s.leaf(p)),
            'got_w': put(s.got_w, f, s.w(p))}

    def unlocked(self, s, f):
        return {'fpc': put(s.fpc, f, IDLE), 'locked': put(s.locked, s.record(f), False),
            'busy': put(s.busy, s.entry(f), False)}

    def step_install(self, s, f: 'Fault'):
        """shadow/install.rs: install_leaf, the store. It may give fewer rights than the second stage has."""
        e, last = s.entry(f), HAS_RECORD if self.without('second-stage-under-lock') else HAS_LEAF
        return And(s.fpc(f) == last, s.saw_leaf(f)), {
            **self.unlocked(s, f), 'leads': put(s.leads, e, True), 'target': put(s.target, e, s.record(f)),
            'maps': put(s.maps, e, s.got(f)), 'sw': put(s.sw, e, And(s.saw_open(f), s.got_w(f)))}

    def step_leave(self, s, f: 'Fault'):
        """shadow/lock.rs: WordGuard::drop, with nothing made."""
        return s.fpc(f) == HAS_LEAF, self.unlocked(s, f)

    def step_fill(self, s, c: 'Cpu', e: 'Entry', p: 'Page'):
        """A CPU walks the shadow page tables, and caches the leaf."""
        return And(s.leads(e), self.of(s, s.target(e), p)), {
            'cached': put(s.cached, (c, p, s.maps(e)), True), 'cached_w': put(s.cached_w, (c, p),
                Or(s.cached_w(c, p), s.sw(e)))}

    # ---- A change.

    def step_begin(self, s, i: 'Change'):
        """second_stage/invalidate.rs, harvest/: a range in flight, or pages whose bits are taken."""
        return s.ipc(i) == OUT, {'ipc': put(s.ipc, i, CHANGES)}

    def step_change(self, s, i: 'Change', p: 'Page'):
        """second_stage/zap.rs: zap_range; second_stage/protect.rs, one PTE."""
        now = self.mates(s, p)
        changes = And(s.ipc(i) == CHANGES, s.covers(i, p), Not(s.changed(i, p)))
        mine = lambda q: And(now(q), Not(And(s.kind(i) == LAZY, Not(s.block(q) == s.block(p)))))
        return changes, {
            'changed': put(s.changed, (i, p), True), 'given': put(s.given, (i, p), False),
            'has': put_where(s.has, lambda q: And(s.kind(i) == ZAP, mine(q)), False),
            'w': put_where(s.w, lambda q: And(s.kind(i) != LAZY, mine(q)), False),
            'open': put_where(s.open, lambda b: And(s.kind(i) == LAZY, b == s.block(p)), False)}

    def step_changed(self, s, i: 'Change'):
        """table/tlb.rs: TlbBatch::flush begins."""
        return And(s.ipc(i) == CHANGES, s.all(lambda p: Implies(s.covers(i, p), s.changed(i, p)))), {
            'ipc': put(s.ipc, i, VISITS)}

    def touches(self, s, i, r):
        """The record is one that the change visits."""
        small = s.is_big(r) if self.without('visit-all-sizes') else False
        return And(Not(small), s.some(lambda p: And(s.covers(i, p), self.of(s, r, p))))

    def visits(self, s, i, r):
        early = And(self.without('visit-follows-change'), s.ipc(i) == CHANGES)
        return And(Or(early, s.ipc(i) == VISITS), Not(s.visited(i, r)))

    def step_see_free(self, s, i: 'Change', r: 'Record'):
        """shadow/rmap.rs: Frame::is_idle, the lock."""
        free = Or(Not(s.locked(r)), self.without('lock-is-looked-at'))
        if self.without('lock-before-list'): free = s.all(lambda e: Not(And(s.leads(e), s.target(e) == r)))
        return And(self.visits(s, i, r), free), {'saw_free': put(s.saw_free, (i, r), True)}

    def step_skip(self, s, i: 'Change', r: 'Record'):
        """shadow/rmap.rs: Frame::is_idle, the list."""
        empty = s.all(lambda e: Not(And(s.leads(e), s.target(e) == r)))
        if self.without('lock-before-list'): empty = Not(s.locked(r))
        return And(self.visits(s, i, r), s.saw_free(i, r), empty), {'visited': put(s.visited, (i, r), True)}

    def step_visit(self, s, i: 'Change', r: 'Record'):
        """shadow/zap.rs: write_protect_leaves and protect_frames, under the lock of the record."""
        mine = lambda e: And(s.leads(e), s.target(e) == r)
        p = s.first(r)
        same = lambda e: And(self.present(s, r), s.maps(e) == s.leaf(p))
        keeps = lambda e: Or(s.kind(i) != ZAP, same(e))
        writes = lambda e: And(s.sw(e), s.kind(i) == ZAP, s.w(p), s.open(s.block(p)))
        return And(self.visits(s, i, r), Not(s.locked(r))), {
            'visited': put(s.visited, (i, r), True), 'leads': put_where(s.leads,
                lambda e: And(mine(e), Not(keeps(e))), False),
            'sw': put_where(s.sw, mine, writes)}

    def step_visited(self, s, i: 'Change'):
        """table/tlb.rs: TlbBatch::flush, the derived tables are done."""
        skips = And(self.without('visit-in-any-case'), s.kind(i) == ZAP)
        return And(s.ipc(i) == VISITS, Or(skips,
            s.all(lambda r: Implies(self.touches(s, i, r), s.visited(i, r))))), {
            'ipc': put(s.ipc, i, FLUSHES)}

    def step_flush(self, s, i: 'Change', c: 'Cpu'):
        """table/tlb.rs: TlbBatch::flush_cpus."""
        early = And(self.without('flush-follows-visit'), s.ipc(i) == VISITS)
        return Or(early, s.ipc(i) == FLUSHES), {
            'flushed': put(s.flushed, (i, c), True),
            'cached': put_where(s.cached, lambda d, p, l: And(d == c, s.covers(i, p)), False),
            'cached_w': put_where(s.cached_w, lambda d, p: And(d == c, s.covers(i, p)), False)}

    def step_flushed(self, s, i: 'Change'):
        """table/tlb.rs: TlbBatch::flush_cpus, the end."""
        return And(s.ipc(i) == FLUSHES, s.all(lambda c: s.flushed(i, c))), {'ipc': put(s.ipc, i, FLUSHED)}

    def step_host_takes(self, s, i: 'Change', p: 'Page', l: 'Leaf'):
        """The host takes a page back."""
        ready = Or(s.ipc(i) == FLUSHED, And(self.without('host-waits'), s.ipc(i) == VISITS))
        return And(s.kind(i) == ZAP, ready, s.covers(i, p)), {'allowed': put(s.allowed, (p, l), False)}

    def step_end(self, s, i: 'Change'):
        """The range is withdrawn, or the call returns."""
        return s.ipc(i) == FLUSHED, {'ipc': put(s.ipc, i, OVER)}

    # ---- What holds.

    def safe(self, s):
        used = lambda f, p: And(s.fpc(f) == HAS_LEAF, s.saw_leaf(f), self.of(s, s.record(f), p))
        stores = lambda f, p: And(used(f, p), Or(And(s.saw_open(f), s.got_w(f)),
            self.without('store-where-it-may-be-written')))
        return {
            'a CPU uses no page that the host has taken back': s.all(lambda c, p,
                l: Implies(s.cached(c, p, l), s.allowed(p, l))),
            'a shadow leaf maps no page that the host has taken back': s.all(lambda e, p: Implies(
                And(s.leads(e), self.of(s, s.target(e), p)), s.allowed(p, s.maps(e)))),
            'the engine uses no page that the host has taken back': s.all(lambda f, p: Implies(
                used(f, p), s.allowed(p, s.got(f)))),
            'the engine does not write the page either': s.all(lambda f, i, c, p: Implies(
                And(stores(f, p), s.changed(i, p), s.flushed(i, c)), s.given(i, p))),
            'a flushed CPU does not write the page before it may be written again': s.all(lambda i, c,
                p: Implies(
                And(s.changed(i, p), s.flushed(i, c), Not(s.given(i, p))), Not(s.cached_w(c, p)))),
        }

    def inv(self, s):
        holds = lambda f: s.fpc(f) >= HAS_RECORD
        taken = lambda i: And(s.kind(i) == ZAP, CHANGES <= s.ipc(i), s.ipc(i) <= FLUSHED)
        seen = lambda i, r: Or(s.visited(i, r), s.saw_free(i, r))
        return {
            'a fault is at one of its steps': s.all(lambda f: And(IDLE <= s.fpc(f), s.fpc(f) <= HAS_LEAF)),
            'a change is at one of its steps': s.all(lambda i: And(OUT <= s.ipc(i), s.ipc(i) <= OVER)),
            'a fault has the lock of its shadow page': s.all(
                lambda f: Implies(s.fpc(f) != IDLE, s.busy(s.entry(f)))),
            'two faults have different shadow pages': s.all(lambda f, g: Implies(
                And(s.fpc(f) != IDLE, s.fpc(g) != IDLE, s.entry(f) == s.entry(g)), f == g)),
            'a fault has the lock of its record': s.all(lambda f: Implies(holds(f), s.locked(s.record(f)))),
            'two faults have different records': s.all(lambda f, g: Implies(
                And(holds(f), holds(g), s.record(f) == s.record(g)), f == g)),
            'a fault stores where no other record is': s.all(lambda f: Implies(
                And(holds(f), s.leads(s.entry(f))), s.target(s.entry(f)) == s.record(f))),
            'a block is one PTE': s.all(lambda p,
                q: Implies(And(s.whole(s.block(p)), s.block(p) == s.block(q)), And(
                s.has(p) == s.has(q), s.w(p) == s.w(q), s.leaf(p) == s.leaf(q)))),
            'the second stage maps what the host allows': s.all(
                lambda p: Implies(s.has(p), s.allowed(p, s.leaf(p)))),
            'only mapped pages have W': s.all(lambda p: Implies(s.w(p), s.has(p))),
            # Phases of a change.
            'pages are changed first': s.all(lambda i,
                p: Implies(s.changed(i, p), And(s.ipc(i) >= CHANGES, s.covers(i, p)))),
            'all pages are changed': s.all(lambda i,
                p: Implies(And(s.ipc(i) >= VISITS, s.covers(i, p)), s.changed(i, p))),
            'records are visited next': s.all(lambda i, r: Implies(seen(i, r), s.ipc(i) >= VISITS)),
            'all records are visited': s.all(lambda i, r, p: Implies(
                And(s.ipc(i) >= FLUSHES, s.covers(i, p), self.of(s, r, p)), s.visited(i, r))),
            'CPUs are flushed last': s.all(lambda i, c: Implies(s.flushed(i, c), s.ipc(i) >= FLUSHES)),
            'all CPUs are flushed': s.all(lambda i, c: Implies(s.ipc(i) >= FLUSHED, s.flushed(i, c))),
            # Pages that are taken.
            'a page in flight stays unmapped': s.all(lambda i,
                p: Implies(And(taken(i), s.changed(i, p)), Not(s.has(p)))),
            'a fault that locks after a visit finds no page in flight': s.all(lambda i, f, p: Implies(
                And(taken(i), s.changed(i, p), s.fpc(f) == HAS_LEAF, self.of(s, s.record(f), p),
                    seen(i, s.record(f))),
                Not(s.saw_leaf(f)))),
            'no shadow leaf maps a visited page in flight': s.all(lambda i, e, p: Implies(
                And(taken(i), s.changed(i, p), s.leads(e),
                    self.of(s, s.target(e), p)), Not(s.visited(i, s.target(e))))),
            'no flushed CPU uses a page in flight': s.all(lambda i, c, p, l: Implies(
                And(taken(i), s.changed(i, p), s.flushed(i, c)), Not(s.cached(c, p, l)))),
            # Pages that lose W.
            'a page may not be written before W is given': s.all(lambda i, p: Implies(
                And(s.changed(i, p), Not(s.given(i, p))), Not(self.may_write(s, p)))),
            'a fault that locks after a visit finds the directory entry protected, or no W': s.all(lambda i,
                f, p: Implies(
                And(s.changed(i, p), Not(s.given(i, p)), s.fpc(f) == HAS_TABLE, self.of(s, s.record(f), p),
                    seen(i, s.record(f)), s.saw_open(f)), Not(And(s.w(p), self.present(s, s.record(f)))))),
            'a fault that locks after a visit may not write': s.all(lambda i, f, p: Implies(
                And(s.changed(i, p), Not(s.given(i, p)), s.fpc(f) == HAS_LEAF, self.of(s, s.record(f), p),
                    seen(i, s.record(f)), s.saw_open(f), s.saw_leaf(f)), Not(s.got_w(f)))),
            'no shadow leaf writes a visited page': s.all(lambda i, e, p: Implies(
                And(s.changed(i, p), Not(s.given(i, p)), s.leads(e), self.of(s, s.target(e), p),
                    s.visited(i, s.target(e))),
                Not(s.sw(e)))),
        }


def run(kind, start=None, **sizes):
    """A page is mapped and may be written; a change of that kind."""
    mapped = at(allowed=True, has=True, w=True, open=True, covers=True, kind=kind)
    return starts.run(ShadowSecond, sizes, {**mapped, **(start or {})})


LEAF = at(leads=True, sw=True)                                          # a shadow leaf is there
ShadowSecond.traces = {
    'second-stage-under-lock': run(ZAP),
    'table-before-leaf': run(LAZY),
    'visit-follows-change': run(ZAP, LEAF),
    'visit-in-any-case': run(ZAP, LEAF),
    'visit-all-sizes': run(ZAP, {**LEAF, **at(is_big=True, whole=True)}),
    'flush-follows-visit': run(ZAP, LEAF),
    'lock-is-looked-at': run(ZAP),
    'lock-before-list': run(ZAP),
    'host-waits': run(ZAP, LEAF),
}

if __name__ == '__main__':
    prover.main(ShadowSecond)
