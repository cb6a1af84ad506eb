"""Invalidation against faults: any number of threads, pages and CPUs; page tables of any depth.

Protocol: docs/protocols/invalidation.md, pte.md, huge-pages.md. Engine:
table/{pte,invalidation_seq,in_flight}.rs, second_stage/{invalidate,zap,install,split,recover,broken}.rs,
vcpu/{act,on_leaf}.rs.

Walks are not atomic: a fault stands at a PTE that it came to, an invalidation in any page-table page that it
came to, linked or not. What a leaf says is the host's answer: the frame, and whether it may be written.
`ok(page, answer)`: the host holds it true. The host may allow more at any time. What it has answered it
takes back by an invalidation. A huge leaf is an answer that is true of each of its pages.

Covered: leaves of any size, installed, split and recovered; page-table pages linked with a leaf or without,
unlinked with all that is below, frozen after that or not; an invalidation without memory, which zaps a leaf
as a whole; a read-only leaf that a fault replaces; the abort of a recovery at any level, also of recoveries
below a recovery; page-table pages that are unlinked with their leaves, where faults may still install.

`told(p)`: the host needs the leaves of the page one by one. `reach(c, t, p)`: CPU `c` comes to the page-table
page `t` for `p`, by the PTEs that it reads or by directory entries that it has cached. A flush leaves the way
that is linked. So what a CPU has cached of ways is as much as it may have: it follows each PTE at once.

Left out: formats with break before make (`break_before_make.py`); the size that the host allows for a
recovery (the counter in `recover.rs`); memslots and userfault bits, logs, A and D (other proofs); weak
memory (loom, litmus tests); reuse of page-table pages (`epochs.py`); that each is given up (`given_up.py`);
progress.
"""
import prover
from invalidation_runs import (ACTS, CLEAR, COUNTS, FLUSHES, GONE, HOST, IDLE, LOOKED, OUT, OVER, PUBLISHED,
                               RESOLVED, SORTS, TOOK, UNLINKS, WALKS, ZAPS, flat, huge, resolved)
from page_tables import EMPTY, FREE, HELD, LEAF, STORED, TABLE, PageTables
from prover import And, If, Implies, Not, Or, put, put_where


class Invalidation(PageTables):
    sorts = SORTS
    letters = {**PageTables.letters, 'f': 'Fault', 'g': 'Fault', 'i': 'Inv', 'j': 'Inv', 'c': 'Cpu'}
    fixed = {
        **PageTables.fixed,
        'page': (['Fault'], 'Page'), 'wants': (['Fault', 'Page'], 'bool'),      # the pages of its leaf
        'covers': (['Inv', 'Page'], 'bool'), 'told': (['Page'], 'bool'),
    }
    state = {
        **PageTables.state,
        'ok': (['Page', 'Answer'], 'bool'), 'tlb': (['Cpu', 'Page', 'Answer'], 'bool'),
        'reach': (['Cpu', 'Table', 'Page'], 'bool'),
        'fpc': (['Fault'], 'int'), 'fat': (['Fault'], 'Pte'), 'seen': (['Fault'], 'int'),
        'got': (['Fault'], 'Answer'),
        # Of a fault that replaces a leaf: what the leaf said, its own number. It has seen the counter.
        'on_leaf': (['Fault'], 'bool'), 'old': (['Fault'], 'Answer'), 'own': (['Fault'], 'Fresh'),
        # it did not find the range in flight
        'passed': (['Fault', 'Inv'], 'bool'),
        'ipc': (['Inv'], 'int'), 'inum': (['Inv'], 'int'), 'stands': (['Inv', 'Table'], 'bool'),
        'visited': (['Inv', 'Page'], 'bool'), 'flushed': (['Inv', 'Cpu'], 'bool'),
        # ghosts: its own number was stored; the last that unlinked the page-table page
        'gave': (['Inv', 'Page'], 'bool'), 'cutter': (['Table'], 'Inv'),
    }
    rules = {
        'read-first': 'a fault reads the ranges in flight before the PTE',
        'very-number': 'a leaf is installed on a number that is at most the one read',
        'store-number': 'an invalidation leaves the numbers of empty PTEs as they are',
        'fresh-above': 'a PTE above the lowest level gets the own number of an invalidation',
        'fresh-unlink': 'an unlinking stores the own number of the invalidation',
        'inherit': 'the PTEs of a new page-table page start at number 0',
        'refine-fresh': 'a fault that refines a PTE gives its parts a number that was stored before',
        'publish-first': 'an invalidation takes its number before its range is in flight',
        'walk-after-publish': 'an invalidation enters page-table pages before its range is in flight',
        'withdraw-late': 'a range is withdrawn before the host has acted',
        'unlink-covered': 'a page-table page is unlinked of which the range has a part',
        'unlink-empty': 'a page-table page is unlinked in the pass that empties PTEs',
        'unlink-told': 'a page-table page is unlinked with leaves that the host needs one by one',
        'flush-ways': 'a flush leaves what CPUs have cached of directory entries',
        'flush': 'an invalidation does not flush',
        'flush-all': 'an invalidation does not wait for all CPUs',
        'huge-in-flight': 'a fault looks for its own page in the ranges in flight, not for its whole leaf',
        'recount': 'a read-only leaf is replaced whatever numbers were taken since the look',
        'recount-late': 'the counter is read before the read-only leaf is emptied',
        'counter-first': 'a fault on a read-only leaf reads the counter after the ranges in flight',
        'freeze': 'a recovery makes a huge leaf of PTEs that are not frozen',
        'cancel-freeze': 'the abort of a recovery freezes nothing',
        'cancel-fresh': 'the abort of a recovery stores a number that was stored before',
        'act-there': 'a fault acts on the PTE that it has looked at, also if that was retired since',
    }

    sizes = {**PageTables.sizes, 'Fault': 2, 'Inv': 2, 'Cpu': 1, 'Fresh': 6}
    start = {**PageTables.start, 'page': lambda f: 'page' + f[-1], 'covers': lambda i,
             p: i[-1] in ('0', p[-1]),
             'wants': lambda f, p: f[-1] == p[-1], 'told': lambda p: False,
             'reach': lambda c, t, p: t == 'table0'}
    story = '''
        allow page0 answer0; allow page1 answer0; refine pte0 table1; refine pte1 table2; fault fault0; down
        fault0; down fault0; look fault0; read_ranges fault0; clear fault0; resolve fault0 answer0; act
        fault0; down fault0; down fault0; install fault0; fill cpu0 pte2 page0; fault fault0; down fault0;
        down fault0; look_at_leaf fault0; read_counter fault0; read_ranges fault0; clear fault0; resolve
        fault0 answer0; act fault0; down fault0; down fault0; take_own fault0 fresh0; empty_leaf fault0;
        recount fault0; install fault0; fault fault1; down fault1; down fault1; look fault1; read_ranges
        fault1; clear fault1; resolve fault1 answer0; act fault1; down fault1; down fault1; install fault1;
        break pte1; freeze pte1 pte2; freeze pte1 pte3; make_huge pte1 answer0; split pte1 table3; publish
        inv1; take_number inv1; start inv1; enter inv1 pte0; enter inv1 pte1; zap_lowest inv1 pte5 page1;
        zapped inv1; unlinked inv1; flush inv1 cpu0; flushed inv1; host inv1 page1 answer1; withdraw inv1;
        fault fault1; give_up fault1; break pte1; freeze pte1 pte4; freeze pte1 pte5; take_fresh fresh1;
        cancel pte1 fresh1; publish inv0; take_number inv0; start inv0; enter inv0 pte0; take_fresh fresh2;
        zap_higher inv0 pte1 page0 fresh2; pass inv0 pte1 page0; zapped inv0; take_fresh fresh3; unlink inv0
        pte0 fresh3; freeze_unlinked pte1; unlinked inv0'''

    traces = {
        'read-first': flat(), 'store-number': flat(), 'withdraw-late': flat(), 'flush': flat(),
        'flush-all': flat(), 'publish-first': flat(is_leaf=True), 'recount': flat(is_leaf=True),
        'counter-first': flat(is_leaf=True),
        'inherit': resolved(False, 1), 'unlink-empty': resolved(True, 1), 'unlink-covered': resolved(True, 2),
        'freeze': resolved(True, 1), 'cancel-freeze': resolved(True, 1), 'huge-in-flight': huge(),
    }

    def axioms(self, s):
        return {**super().axioms(s), 'a fault wants its page': s.all(lambda f: s.wants(f, s.page(f)))}

    def init(self, s):
        return {
            **super().init(s),
            'faults': s.all(lambda f: And(s.fpc(f) == IDLE, Not(s.on_leaf(f)))),
            'passed': s.all(lambda f, i: Not(s.passed(f, i))),
            'invalidations': s.all(lambda i: s.ipc(i) == OUT),
            'stands': s.all(lambda i, t: Not(s.stands(i, t))),
            'visited': s.all(lambda i, p: And(Not(s.visited(i, p)), Not(s.gave(i, p)))),
            'flushed': s.all(lambda i, c: Not(s.flushed(i, c))),
            'tlb': s.all(lambda c, p, a: Not(s.tlb(c, p, a))),
            'reach': s.all(lambda c, t, p: s.reach(c, t, p) == (t == s.root())),
        }

    def hang(self, s, e, t):
        comes = lambda c, u, p: And(s.spans(t, p), s.reach(c, s.table(e), p))
        return {**super().hang(s, e, t), 'reach': put_where(s.reach, lambda c, u, p: u == t, comes),
                'cutter': put(s.cutter, t, s.cutter(s.table(e)))}

    # A fault.

    def forget(self, s, f):
        return {'fpc': put(s.fpc, f, IDLE), 'on_leaf': put(s.on_leaf, f, False),
                'passed': put_where(s.passed, lambda g, i: g == f, False)}

    def step_fault(self, s, f: 'Fault'):
        """vcpu.rs: look. The walk begins at the root."""
        return s.fpc(f) == IDLE, {'fpc': put(s.fpc, f, WALKS),
                                  'fat': put(s.fat, f, s.entry(s.root(), s.page(f)))}

    def step_down(self, s, f: 'Fault'):
        """table/cursor.rs: step_down."""
        e = s.fat(f)
        return And(Or(s.fpc(f) == WALKS, s.fpc(f) == ACTS), s.kind(e) == TABLE, Not(s.frozen(e))), {
            'fat': put(s.fat, f, s.entry(s.down(e), s.page(f)))}

    def covers_leaf(self, s, f):
        """The PTE is not lower than the leaf that the fault wants."""
        return s.all(lambda p: Implies(s.wants(f, p), self.maps(s, s.fat(f), p)))

    def step_look(self, s, f: 'Fault'):
        """vcpu.rs: look; table/cursor.rs: at_lowest."""
        e = s.fat(f)
        return And(s.fpc(f) == WALKS, s.kind(e) == EMPTY, Not(s.frozen(e)), self.covers_leaf(s, f)), {
            'fpc': put(s.fpc, f, LOOKED), 'seen': put(s.seen, f, s.num(e))}

    def step_look_at_leaf(self, s, f: 'Fault'):
        """vcpu.rs: look. The leaf does not allow what the guest wants."""
        e = s.fat(f)
        return And(s.fpc(f) == WALKS, s.kind(e) == LEAF, Not(s.frozen(e)), self.covers_leaf(s, f)), {
            'fpc': put(s.fpc, f, COUNTS), 'old': put(s.old, f, s.ans(e))}

    def step_read_counter(self, s, f: 'Fault'):
        """vcpu.rs: look; table/invalidation_seq.rs: current."""
        at = And(s.fpc(f) == COUNTS, s.all(lambda i: s.passed(f, i))) if self.without('counter-first') \
            else s.fpc(f) == COUNTS
        return at, {'fpc': put(s.fpc, f, LOOKED), 'on_leaf': put(s.on_leaf, f, True),
                    'seen': put(s.seen, f, s.counter())}

    def finds(self, s, f, i):
        """Fault `f` finds the range of `i` in flight."""
        published = And(PUBLISHED <= s.ipc(i), s.ipc(i) <= HOST)
        if self.without('publish-first'):
            published = And(ZAPS <= s.ipc(i), s.ipc(i) <= HOST)
        if self.without('withdraw-late'):
            published = And(PUBLISHED <= s.ipc(i), s.ipc(i) <= FLUSHES)
        if self.without('huge-in-flight'):
            return And(published, s.covers(i, s.page(f)))
        return And(published, s.some(lambda p: And(s.wants(f, p), s.covers(i, p))))

    def step_read_ranges(self, s, f: 'Fault'):
        """table/in_flight.rs: free_level. Place by place, so any number of times."""
        early = Or(And(self.without('read-first'), s.fpc(f) == WALKS),
                   And(self.without('counter-first'), s.fpc(f) == COUNTS))
        return Or(s.fpc(f) == LOOKED, early), {
            'passed': put_where(s.passed, lambda g, i: And(g == f, Not(self.finds(s, f, i))), True)}

    def step_clear(self, s, f: 'Fault'):
        """vcpu.rs: look. It has read all places, and found no range."""
        return And(s.fpc(f) == LOOKED, s.all(lambda i: s.passed(f, i))), {'fpc': put(s.fpc, f, CLEAR)}

    def step_resolve(self, s, f: 'Fault', a: 'Answer'):
        """vcpu/plan.rs: resolve, leaf."""
        return And(s.fpc(f) == CLEAR, s.all(lambda p: Implies(s.wants(f, p), s.ok(p, a)))), {
            'fpc': put(s.fpc, f, RESOLVED), 'got': put(s.got, f, a)}

    def step_act(self, s, f: 'Fault'):
        """vcpu/act.rs: install_on_empty, install_instead. Another walk."""
        return s.fpc(f) == RESOLVED, {'fpc': put(s.fpc, f, ACTS),
                                      'fat': put(s.fat, f, s.entry(s.root(), s.page(f)))}

    def step_act_there(self, s, f: 'Fault'):
        """vcpu/small.rs: serve; vcpu/block.rs: look_at_block; second_stage/map.rs: map_page; table/retire.rs:
        reopen. No walk: it acts on the PTE that it has looked at. What unlinked the page-table page has not
        retired it yet, so its range is still in flight."""
        e = s.fat(f)
        retired = And(self.is_astray(s, e), Not(self.took(s, s.cutter(s.table(e)))))
        same = True if self.without('act-there') else Not(retired)
        return And(s.fpc(f) == RESOLVED, Not(s.on_leaf(f)), same), {'fpc': put(s.fpc, f, ACTS)}

    def is_its_leaf(self, s, f):
        """The PTE at which the fault stands maps what the fault wants, and nothing else."""
        return s.all(lambda p: s.wants(f, p) == self.maps(s, s.fat(f), p))

    def step_install(self, s, f: 'Fault'):
        """vcpu/act.rs: install_at; second_stage/install.rs: link."""
        e = s.fat(f)
        same = s.num(e) <= s.seen(f) if self.without('very-number') else s.num(e) == s.seen(f)
        return And(s.fpc(f) == ACTS, Not(s.on_leaf(f)), Not(s.frozen(e)), s.kind(e) == EMPTY, same,
                   self.is_its_leaf(s, f)), {
            **self.forget(s, f), 'kind': put(s.kind, e, LEAF), 'ans': put(s.ans, e, s.got(f))}

    def step_take_own(self, s, f: 'Fault', n: 'Fresh'):
        """vcpu/act.rs: install_instead."""
        return And(s.fpc(f) == ACTS, s.on_leaf(f), s.state_of(n) == FREE), {
            'fpc': put(s.fpc, f, TOOK), 'own': put(s.own, f, n), 'state_of': put(s.state_of, n, HELD),
            'fresh': put(s.fresh, n, s.counter() + 1), 'counter': lambda: s.counter() + 1}

    def step_empty_leaf(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead; second_stage/install.rs: zap_pte."""
        e, n = s.fat(f), s.own(f)
        early = s.counter() == s.seen(f) + 1 if self.without('recount-late') else True
        return And(s.fpc(f) == TOOK, s.state_of(n) == HELD, Not(s.frozen(e)), s.kind(e) == LEAF,
                   s.ans(e) == s.old(f),
                   self.is_its_leaf(s, f), early), {**self.store(s, e, n), 'fpc': put(s.fpc, f, GONE)}

    def step_recount(self, s, f: 'Fault'):
        """vcpu/act.rs: install_instead. If no other number was taken: as if this had been seen."""
        alone = True if self.without('recount', 'recount-late') else s.counter() == s.seen(f) + 1
        return And(s.fpc(f) == GONE, alone), {
            'fpc': put(s.fpc, f, ACTS), 'on_leaf': put(
                s.on_leaf, f, False), 'seen': put(s.seen, f, s.fresh(s.own(f)))}

    def step_give_up(self, s, f: 'Fault'):
        """vcpu.rs: the fault starts over, or the guest comes back."""
        return s.fpc(f) != IDLE, self.forget(s, f)

    # An invalidation.

    def step_publish(self, s, i: 'Inv'):
        """table/in_flight.rs: publish."""
        if self.without('publish-first'):
            return s.ipc(i) == PUBLISHED, {'ipc': put(s.ipc, i, ZAPS)}
        return s.ipc(i) == OUT, {'ipc': put(s.ipc, i, PUBLISHED)}

    def step_take_number(self, s, i: 'Inv'):
        """second_stage/invalidate.rs: new; table/invalidation_seq.rs: next."""
        taken = {'counter': lambda: s.counter() + 1, 'inum': put(s.inum, i, s.counter() + 1)}
        if self.without('publish-first'):
            return s.ipc(i) == OUT, {'ipc': put(s.ipc, i, PUBLISHED), **taken}
        return s.ipc(i) == PUBLISHED, {'ipc': put(s.ipc, i, ZAPS), **taken}

    def walks(self, s, i):
        return Or(s.ipc(i) == ZAPS, s.ipc(i) == UNLINKS)

    def step_start(self, s, i: 'Inv'):
        """second_stage/walk.rs: run. Each turn begins at the root."""
        early = s.ipc(i) == OUT if self.without('walk-after-publish') else False
        return Or(early, self.walks(s, i)), {'stands': put(s.stands, (i, s.root()), True)}

    def step_enter(self, s, i: 'Inv', e: 'Pte'):
        """second_stage/zap.rs: visit; table/cursor.rs: step_down."""
        early = s.ipc(i) == OUT if self.without('walk-after-publish') else False
        return And(Or(early, self.walks(s, i)), s.stands(i, s.table(e)), s.kind(e) == TABLE,
                   Not(s.frozen(e))), {
            'stands': put(s.stands, (i, s.down(e)), True)}

    def visits(self, s, i, e, p):
        """It stands at `e`, which maps a page of its range."""
        return And(s.stands(i, s.table(e)), self.maps(s, e, p), s.covers(i, p), Not(s.frozen(e)))

    def passes(self, s, i, e):
        return {'visited': put_where(
            s.visited, lambda j, p: And(j == i, self.maps(s, e, p), s.covers(i, p)), True)}

    def step_pass(self, s, i: 'Inv', e: 'Pte', p: 'Page'):
        """second_stage/zap.rs: visit. Empty with its own number or a greater one."""
        old = Or(s.num(e) >= s.inum(i), self.without('store-number'))
        return And(self.walks(s, i), self.visits(s, i, e, p), s.kind(e) == EMPTY, old), self.passes(s, i, e)

    def step_zap_lowest(self, s, i: 'Inv', e: 'Pte', p: 'Page'):
        """second_stage/zap.rs: visit. At the lowest level: its own number, once for each page."""
        at = Or(s.kind(e) == LEAF, And(s.kind(e) == EMPTY, s.num(e) < s.inum(i)))
        return And(s.ipc(i) == ZAPS, self.visits(s, i, e, p), at, self.level(s, e) == 0,
                   Not(s.visited(i, p))), {
            **self.passes(s, i, e), 'kind': put(s.kind, e, EMPTY), 'num': put(s.num, e, s.inum(i)),
            'gave': put(s.gave, (i, p), True)}

    def step_zap_higher(self, s, i: 'Inv', e: 'Pte', p: 'Page', n: 'Fresh'):
        """second_stage/zap.rs: visit. Above: a fresh number. A part of a leaf: without memory."""
        at = Or(s.kind(e) == LEAF, And(s.kind(e) == EMPTY, s.num(e) < s.inum(i)))
        guard = And(self.walks(s, i), self.visits(s, i, e, p), at, self.level(s, e) > 0)
        if self.without('fresh-above'):
            return guard, {**self.passes(s, i, e), 'kind': put(s.kind, e, EMPTY),
                           'num': put(s.num, e, s.inum(i)),
                           'gave': put_where(s.gave, lambda j, q: And(j == i, self.maps(s, e, q)), True)}
        return And(guard, s.state_of(n) == HELD, s.fresh(n) > s.inum(i)), {
            **self.passes(s, i, e), **self.store(s, e, n)}

    def step_zapped(self, s, i: 'Inv'):
        """second_stage/zap.rs: zap_range. The first pass is over."""
        return And(s.ipc(i) == ZAPS, s.all(lambda p: Implies(s.covers(i, p), s.visited(i, p)))), {
            'ipc': put(s.ipc, i, UNLINKS)}

    def step_unlink(self, s, i: 'Inv', e: 'Pte', n: 'Fresh'):
        """second_stage/zap.rs: visit, take_over. With all that is linked below."""
        whole = True if self.without(
            'unlink-covered') else s.all(lambda p: Implies(self.maps(s, e, p), s.covers(i, p)))
        at = self.walks(s, i) if self.without('unlink-empty') else s.ipc(i) == UNLINKS
        guard = And(at, s.stands(i, s.table(e)), s.kind(e) == TABLE, Not(s.frozen(e)), whole)
        cuts = {**self.cut(s, e),
                'cutter': put_where(s.cutter, lambda t: And(s.below(t, e), s.linked(t)), i)}
        if self.without('fresh-unlink'):
            return guard, {'kind': put(s.kind, e, EMPTY), 'num': put(s.num, e, s.inum(i)), **cuts}
        return And(guard, s.state_of(n) == HELD, s.fresh(n) > s.inum(i)), {**self.store(s, e, n), **cuts}

    def step_unlink_leaves(self, s, i: 'Inv', e: 'Pte', n: 'Fresh'):
        """second_stage/zap.rs: visit, take_over_with_leaves. In the first pass, whatever is below."""
        of_it = lambda what: s.all(lambda p: Implies(self.maps(s, e, p), what(p)))
        whole = of_it(lambda p: s.covers(i, p))
        untold = Or(of_it(lambda p: Not(s.told(p))), self.without('unlink-told'))
        return And(s.ipc(i) == ZAPS, s.stands(i, s.table(e)), s.kind(e) == TABLE, Not(s.frozen(e)), whole, untold,
                   s.state_of(n) == HELD, s.fresh(n) > s.inum(i)), {
            **self.passes(s, i, e), **self.store(s, e, n), **self.cut(s, e),
            'cutter': put_where(s.cutter, lambda t: And(s.below(t, e), s.linked(t)), i)}

    def step_unlinked(self, s, i: 'Inv'):
        """second_stage/zap.rs: zap_range. The further passes are over."""
        return s.ipc(i) == UNLINKS, {'ipc': put(s.ipc, i, FLUSHES)}

    def step_flush(self, s, i: 'Inv', c: 'Cpu'):
        """table/tlb.rs: flush. One CPU of `Host::flush`."""
        gone = lambda d, p, a: And(d == c, s.covers(i, p), not self.without('flush'))
        ways = lambda d, t, p: And(d == c, s.covers(i, p), not self.without('flush', 'flush-ways'))
        return s.ipc(i) == FLUSHES, {'flushed': put(s.flushed, (i, c), True),
                                     'tlb': put_where(s.tlb, gone, False),
                                     'reach': put_where(s.reach, ways,
                                                        lambda d, t, p: And(s.linked(t), s.spans(t, p)))}

    def step_flushed(self, s, i: 'Inv'):
        """second_stage/invalidate.rs: new. It returns to the host."""
        all_done = True if self.without('flush-all') else s.all(lambda c: s.flushed(i, c))
        return And(s.ipc(i) == FLUSHES, all_done), {'ipc': put(s.ipc, i, HOST)}

    def step_host(self, s, i: 'Inv', p: 'Page', a: 'Answer'):
        """The host moves a page, protects it or takes it: at most one answer stays true."""
        return And(s.ipc(i) == HOST, s.covers(i, p)), {
            'ok': put_where(s.ok, lambda q, b: And(q == p, b != a), False)}

    def step_allow(self, s, p: 'Page', a: 'Answer'):
        """The host allows more."""
        return True, {'ok': put(s.ok, (p, a), True)}

    def step_withdraw(self, s, i: 'Inv'):
        """second_stage/invalidate.rs: drop."""
        return s.ipc(i) == HOST, {'ipc': put(s.ipc, i, OVER)}

    # A CPU.

    def step_fill(self, s, c: 'Cpu', e: 'Pte', p: 'Page'):
        """A CPU caches a leaf."""
        return And(s.reach(c, s.table(e), p), self.maps(s, e, p), s.kind(e) == LEAF, Not(s.frozen(e))), {
            'tlb': put(s.tlb, (c, p, s.ans(e)), True)}

    # Promises.

    def safe(self, s):
        at = lambda e, p: And(s.used(s.table(e)), self.maps(s, e, p), s.kind(e) == LEAF)
        return {
            'no CPU has an old answer cached': s.all(lambda c, p, a: Implies(s.tlb(c, p, a), s.ok(p, a))),
            'no CPU comes to an old answer': s.all(lambda c, e, p: Implies(
                And(at(e, p), s.reach(c, s.table(e), p)), s.ok(p, s.ans(e)))),
            'no leaf that the host needs is in an unlinked page-table page': s.all(lambda e, p: Implies(
                And(at(e, p), s.told(p), Not(s.frozen(e))), s.linked(s.table(e)))),
        }

    # Words of the invariant.

    def took(self, s, i):
        """`i` has its number, and its range is in flight."""
        return And(ZAPS <= s.ipc(i), s.ipc(i) <= HOST)

    def has_number(self, s, i):
        return s.ipc(i) >= ZAPS

    def looked(self, s, f):
        return s.fpc(f) >= LOOKED

    def saw(self, s, f):
        """It has read the number of an empty PTE."""
        return And(self.looked(s, f), Not(s.on_leaf(f)))

    def is_lowest(self, s, e, p):
        """`e` is the lowest PTE of the page, if it does not lead down."""
        return And(s.linked(s.table(e)), self.maps(s, e, p))

    def comes(self, s, c, e, p):
        """`c` comes to `e` for `p`."""
        return And(self.maps(s, e, p), s.reach(c, s.table(e), p))

    def is_lowest_for(self, s, i, c, e, p):
        """`e` is linked, or `c` comes to it since `i` flushed."""
        return And(self.maps(s, e, p), Or(s.linked(s.table(e)), And(s.flushed(i, c), s.reach(c, s.table(e), p))))

    def had(self, s, i, p):
        """`i` visited the page, or stands in a page-table page of it that was unlinked."""
        astray = lambda t: And(s.stands(i, t), s.used(t), s.spans(t, p), Not(s.linked(t)),
                               Not(s.frozen(s.entry(t, p))))
        return And(self.took(s, i), s.covers(i, p), Or(s.visited(i, p), s.some(astray)))

    def is_astray(self, s, e):
        return And(s.used(s.table(e)), Not(s.linked(s.table(e))), Not(s.frozen(e)))

    def inv(self, s):
        return {**self.inv_tables(s), **self.inv_phases(s), **self.inv_numbers(s), **self.inv_heart(s),
                **self.inv_replace(s)}

    def inv_phases(self, s):
        return {
            'phases of faults': s.all(lambda f: And(s.fpc(f) >= IDLE, s.fpc(f) <= GONE)),
            'phases of invalidations': s.all(lambda i: And(s.ipc(i) >= OUT, s.ipc(i) <= OVER)),
            'a fault stands in a page-table page in use': s.all(lambda f: Implies(
                s.fpc(f) != IDLE, And(s.used(s.table(s.fat(f))), self.maps(s, s.fat(f), s.page(f))))),
            'an invalidation stands in page-table pages in use': s.all(lambda i, t: Implies(
                s.stands(i, t), And(self.has_number(s, i), s.used(t)))),
            'what is visited is covered': s.all(lambda i, p: Implies(
                s.visited(i, p), And(self.has_number(s, i), s.covers(i, p)))),
            'after the first pass all is visited': s.all(lambda i, p: Implies(
                And(s.ipc(i) >= UNLINKS, s.covers(i, p)), s.visited(i, p))),
            'CPUs are flushed after the passes': s.all(lambda i,
                                                       c: Implies(s.flushed(i, c), s.ipc(i) >= FLUSHES)),
            'all CPUs are flushed before the host acts': s.all(
                lambda i, c: Implies(s.ipc(i) >= HOST, s.flushed(i, c))),
            'a CPU comes to what is in use': s.all(lambda c, t, p: Implies(
                s.reach(c, t, p), And(s.used(t), s.spans(t, p)))),
            'a CPU comes to what is linked': s.all(lambda c, t, p: Implies(
                And(s.linked(t), s.spans(t, p)), s.reach(c, t, p))),
            'a CPU goes down': s.all(lambda c, e, p: Implies(
                And(self.comes(s, c, e, p), self.leads_down(s, e)), s.reach(c, s.down(e), p))),
            'a flushed CPU stays flushed': s.all(lambda i, c, p, a: Implies(
                And(self.took(s, i), s.flushed(i, c), s.covers(i, p)), Not(s.tlb(c, p, a)))),
            'a fault without a look has passed no range': s.all(lambda f, i: Implies(
                s.fpc(f) < LOOKED, Not(s.passed(f, i)))),
            'a clear fault has passed all ranges': s.all(lambda f,
                                                         i: Implies(s.fpc(f) >= CLEAR, s.passed(f, i))),
        }

    def inv_numbers(self, s):
        return {
            'numbers seen are counted': s.all(lambda f: Implies(self.looked(s, f), s.seen(f) <= s.counter())),
            'own numbers are counted': s.all(lambda i: Implies(
                self.has_number(s, i), And(s.inum(i) <= s.counter(), s.inum(i) > 0))),
            'own numbers differ': s.all(lambda i, j: Implies(
                And(self.has_number(s, i), self.has_number(s, j), s.inum(i) == s.inum(j)), i == j)),
            'own and fresh numbers differ': s.all(lambda i, n: Implies(
                And(self.has_number(s, i), s.state_of(n) != FREE), s.inum(i) != s.fresh(n))),
            'a fresh number was not seen': s.all(lambda n, f: Implies(
                And(s.state_of(n) == HELD, self.saw(s, f)), s.seen(f) != s.fresh(n))),
            'an own number is at pages that got it': s.all(lambda i, e, p: Implies(
                And(self.has_number(s, i), s.used(s.table(e)), self.maps(s, e, p), s.num(e) == s.inum(i)),
                s.gave(i, p))),
            'an own number is seen at pages that got it': s.all(lambda i, f, p: Implies(
                And(self.has_number(s, i), self.saw(s, f), s.wants(f, p), s.seen(f) == s.inum(i)),
                s.gave(i, p))),
            'a page gets an own number once': s.all(lambda i, p: Implies(s.gave(i, p), s.visited(i, p))),
            'a fault that sees the number finds the range': s.all(lambda f, i, p: Implies(
                And(self.looked(s, f), self.took(s, i), s.wants(f, p), s.covers(i, p),
                    s.seen(f) >= s.inum(i)),
                Not(s.passed(f, i)))),
        }

    def inv_heart(self, s):
        differs = lambda e, f: s.num(e) != s.seen(f)
        return {
            'a visited page has no leaf': s.all(lambda i, c, e, p: Implies(
                And(self.had(s, i, p), self.is_lowest_for(s, i, c, e, p)), s.kind(e) != LEAF)),
            'a visited page has another number than a fault saw': s.all(lambda f, i, c, e, p: Implies(
                And(self.saw(s, f), s.passed(f, i), s.wants(f, p), self.had(s, i, p),
                    self.is_lowest_for(s, i, c, e, p), s.kind(e) == EMPTY), differs(e, f))),
            # Of what is linked once more without a CPU, which cvc5 finds by itself seldom.
            'a visited page that is linked has no leaf': s.all(lambda i, e, p: Implies(
                And(self.had(s, i, p), self.is_lowest(s, e, p)), s.kind(e) != LEAF)),
            'a visited page that is linked has another number than a fault saw': s.all(lambda f, i, e, p: Implies(
                And(self.saw(s, f), s.passed(f, i), s.wants(f, p), self.had(s, i, p), self.is_lowest(s, e, p),
                    s.kind(e) == EMPTY), differs(e, f))),
            'an old answer meets another number': s.all(lambda f, c, e, p: Implies(
                And(self.saw(s, f), s.fpc(f) >= RESOLVED, s.wants(f, p), Not(s.ok(p, s.got(f))),
                    self.comes(s, c, e, p), s.kind(e) == EMPTY), differs(e, f))),
            'nothing unlinked leads to a leaf that the host needs': s.all(lambda e, x, p: Implies(
                And(self.is_astray(s, e), s.below(s.table(x), e), self.maps(s, x, p), s.told(p)),
                s.kind(x) != LEAF)),
            'a fault in an unlinked page-table page meets another number': s.all(lambda f, e, p: Implies(
                And(self.saw(s, f), s.fpc(f) == ACTS, self.is_astray(s, s.fat(f)), self.is_astray(s, e),
                    Or(e == s.fat(f), s.below(s.table(e), s.fat(f))), s.wants(f, p), self.maps(s, e, p),
                    s.told(p), s.kind(e) == EMPTY), differs(e, f))),
            'an invalidation of its pages unlinked a PTE': s.all(lambda e, p: Implies(
                And(self.is_astray(s, e), self.maps(s, e, p)),
                And(self.has_number(s, s.cutter(s.table(e))), s.covers(s.cutter(s.table(e)), p)))),
            'what is below an unlinked PTE was unlinked with it': s.all(lambda e, t, p: Implies(
                And(self.is_astray(
                    s, e), s.below(t, e), s.spans(t, p)), s.cutter(t) == s.cutter(s.table(e)))),
            'a fault that passed the unlinking range meets another number': s.all(lambda f, e, p: Implies(
                And(self.saw(s, f), self.is_astray(s, e), s.wants(f, p), self.maps(s, e, p), s.told(p),
                    s.kind(e) == EMPTY, self.took(s, s.cutter(s.table(e))),
                    s.passed(f, s.cutter(s.table(e)))),
                differs(e, f))),
        }

    def inv_replace(self, s):
        took = lambda f: s.fpc(f) >= TOOK
        has_own = lambda f: And(took(f), s.on_leaf(f))
        nr_own = lambda f: If(took(f), 1, 0)
        return {
            'a fault with a number of its own replaces a leaf': s.all(
                lambda f: Implies(took(f), s.on_leaf(f))),
            'a fault that replaces a leaf has looked': s.all(
                lambda f: Implies(s.on_leaf(f), self.looked(s, f))),
            'a number of its own is counted': s.all(lambda f: Implies(
                has_own(f), And(s.state_of(s.own(f)) != FREE, s.fresh(s.own(f)) > s.seen(f)))),
            'a number of its own is stored once': s.all(lambda f: Implies(
                s.fpc(f) == GONE, s.state_of(s.own(f)) == STORED)),
            'the PTE of a replaced leaf is what the fault wants': s.all(lambda f, p: Implies(
                s.fpc(f) == GONE, s.wants(f, p) == self.maps(s, s.fat(f), p))),
            'an old answer is counted': s.all(lambda f, p: Implies(
                And(s.on_leaf(f), s.fpc(f) >= RESOLVED, s.wants(f, p), Not(s.ok(p, s.got(f)))),
                s.counter() > s.seen(f) + nr_own(f))),
            'an unlinking is counted': s.all(lambda f: Implies(
                And(s.on_leaf(f), s.fpc(f) >= ACTS, self.is_astray(s, s.fat(f))),
                s.counter() > s.seen(f) + nr_own(f))),
            'a number since the look is counted': s.all(lambda f, i: Implies(
                And(took(f), self.has_number(s, i), s.inum(i) > s.seen(f)), s.counter() > s.seen(f) + 1)),
        }


if __name__ == '__main__':
    prover.main(Invalidation)
