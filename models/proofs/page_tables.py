"""Page tables of any depth, for the proofs about invalidation.

A page-table page (`Table`) has a fixed level (0: the lowest), spans fixed pages, and has an entry for each.
It is linked once and never used again (`epochs.py`). A PTE is empty (and holds a number), a leaf (and holds
the answer of the host), points to a page-table page, or is broken (a recovery is under way below it). A
frozen PTE keeps what it was.

`linked(t)`: a way leads from the root to `t`, by PTEs that point to page-table pages or are broken.
`below(t, e)`: such a way leads from the PTE `e` to `t`, whether `e` is linked or not. Both are ghosts;
together they say which PTE is *the lowest of a page* without a bound on the depth: the linked one that is
empty or a leaf.

A link of several page-table pages by one exchange (`second_stage/install.rs: link`) is a run of `refine` and
a last install: all that the exchange makes visible at once, these steps make visible one by one.
"""
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

EMPTY, LEAF, TABLE, BROKEN = range(4)                       # kinds of a PTE
FREE, HELD, STORED = range(3)                               # a fresh number: not taken, taken, stored


class PageTables(Protocol):
    sorts = ['Page', 'Pte', 'Table', 'Answer', 'Fresh']
    letters = {'p': 'Page', 'q': 'Page', 'e': 'Pte', 'x': 'Pte', 't': 'Table', 'u': 'Table', 'a': 'Answer',
               'n': 'Fresh'}
    fixed = {
        'root': ([], 'Table'), 'level': (['Table'], 'int'), 'spans': (['Table', 'Page'], 'bool'),
        'entry': (['Table', 'Page'], 'Pte'), 'table': (['Pte'], 'Table'),
    }
    state = {
        'kind': (['Pte'], 'int'), 'frozen': (['Pte'], 'bool'), 'num': (['Pte'], 'int'),
        'ans': (['Pte'], 'Answer'),
        'down': (['Pte'], 'Table'),
        'used': (['Table'], 'bool'), 'linked': (['Table'], 'bool'), 'below': (['Table', 'Pte'], 'bool'),
        'counter': ([], 'int'), 'state_of': (['Fresh'], 'int'), 'fresh': (['Fresh'], 'int'),
    }
    rules = {}
    few = {'Page': 2, 'Pte': 4, 'Table': 3, 'Fault': 1, 'Inv': 1, 'Cpu': 1, 'Fresh': 1, 'Answer': 1}
    # For runs by values: a root of level 2 with a PTE for two pages; two page-table pages of level 1 with
    # such a PTE, and two of level 0 with a PTE for each page.
    sizes = {'Page': 2, 'Pte': 7, 'Table': 5, 'Answer': 2, 'Fresh': 4, 'Cpu': 1}
    start = {
        'root': lambda: 'table0', 'level': lambda t: (2, 1, 0, 0, 1)[int(t[5:])], 'spans': lambda t, p: True,
        'entry': lambda t, p: f'pte{(0, 1, 2, 4, 6)[int(t[5:])] + (t[5:] in "23" and p == "page1")}',
        'table': lambda e: ('table0', 'table1', 'table2', 'table2', 'table3', 'table3', 'table4')[int(e[3:])],
        'used': lambda t: t == 'table0', 'linked': lambda t: t == 'table0',
    }

    # Words.

    def maps(self, s, e, p):
        return And(s.spans(s.table(e), p), s.entry(s.table(e), p) == e)

    def level(self, s, e):
        return s.level(s.table(e))

    def leads_down(self, s, e):
        return Or(s.kind(e) == TABLE, s.kind(e) == BROKEN)

    def axioms(self, s):
        return {
            'entries': s.all(lambda t, p: s.table(s.entry(t, p)) == t),
            'levels': s.all(lambda t: s.level(t) >= 0),
            'lowest': s.all(lambda e, p, q: Implies(
                And(self.level(s, e) == 0, self.maps(s, e, p), self.maps(s, e, q)), p == q)),
            'root': s.all(lambda p: s.spans(s.root(), p)),
        }

    def init(self, s):
        return {
            'root': s.all(lambda t: And(s.used(t) == (t == s.root()), s.linked(t) == (t == s.root()))),
            'empty': s.all(lambda e: And(s.kind(e) == EMPTY, s.num(e) == 0, Not(s.frozen(e)))),
            'below': s.all(lambda t, e: Not(s.below(t, e))),
            'numbers': And(s.counter() == 0, s.all(lambda n: s.state_of(n) == FREE)),
        }

    # Steps of any thread at any time.

    def hang(self, s, e, t):
        """Links the page-table page `t` below `e`."""
        return {'kind': put(s.kind, e, TABLE), 'down': put(s.down, e, t), 'used': put(s.used, t, True),
                'linked': put(s.linked, t, s.linked(s.table(e))),
                'below': put_where(s.below, lambda u, x: u == t, lambda u,
                                   x: Or(x == e, s.below(s.table(e), x)))}

    def may_hang(self, s, e, t):
        return And(Not(s.frozen(e)), Not(s.used(t)), s.used(s.table(e)), s.level(t) < self.level(s, e),
                   s.all(lambda p: s.spans(t, p) == self.maps(s, e, p)))

    def cut(self, s, e):
        """No way leads through `e` any more."""
        by_way_of_e = lambda t, x: And(s.below(t, e), Not(s.below(s.table(x), e)))
        return {'linked': put_where(s.linked, lambda t: s.below(t, e), False),
                'below': put_where(s.below, by_way_of_e, False)}

    def step_take_fresh(self, s, n: 'Fresh'):
        """table/invalidation_seq.rs: next. For one exchange, which alone stores it."""
        return s.state_of(n) == FREE, {
            'state_of': put(s.state_of, n, HELD), 'fresh': put(s.fresh, n, s.counter() + 1),
            'counter': lambda: s.counter() + 1}

    def store(self, s, e, n):
        """`e` becomes empty with the fresh number `n`."""
        return {'kind': put(s.kind, e, EMPTY), 'num': put(s.num, e, s.fresh(n)),
                'state_of': put(s.state_of, n, STORED)}

    def step_refine(self, s, e: 'Pte', t: 'Table'):
        """second_stage/install.rs: install, link. The entries inherit the number."""
        inherited = 0 if self.without('inherit') else s.num(e)
        inside = lambda x: s.table(x) == t
        return And(s.kind(e) == EMPTY, self.may_hang(s, e, t)), {
            **self.hang(s, e, t), 'num': put_where(s.num, inside, inherited),
            'kind': lambda x: If(inside(x), EMPTY, If(x == e, TABLE, s.kind(x))),
            'frozen': put_where(s.frozen, inside, False)}

    def step_refine_anew(self, s, e: 'Pte', t: 'Table', n: 'Fresh'):
        """vcpu/act.rs: refine; second_stage/install.rs: prepare_to_refine. With an own number of the fault."""
        inside = lambda x: s.table(x) == t
        is_fresh = s.state_of(n) == (STORED if self.without('refine-fresh') else HELD)
        return And(s.kind(e) == EMPTY, self.may_hang(s, e, t), is_fresh), {
            **self.hang(s, e, t), 'num': put_where(s.num, inside, s.fresh(n)),
            'state_of': put(s.state_of, n, STORED),
            'kind': lambda x: If(inside(x), EMPTY, If(x == e, TABLE, s.kind(x))),
            'frozen': put_where(s.frozen, inside, False)}

    def step_split(self, s, e: 'Pte', t: 'Table'):
        """second_stage/install.rs: split_into. The parts say what the leaf does."""
        inside = lambda x: s.table(x) == t
        return And(s.kind(e) == LEAF, self.may_hang(s, e, t)), {
            **self.hang(s, e, t), 'num': put_where(s.num, inside, s.num(e)),
            'kind': lambda x: If(inside(x), LEAF, If(x == e, TABLE, s.kind(x))),
            'ans': put_where(s.ans, inside, s.ans(e)), 'frozen': put_where(s.frozen, inside, False)}

    def step_break(self, s, e: 'Pte'):
        """second_stage/recover.rs: try_recover."""
        return And(s.kind(e) == TABLE, Not(s.frozen(e)), s.used(s.table(e))), {'kind': put(s.kind, e, BROKEN)}

    def step_freeze(self, s, e: 'Pte', x: 'Pte'):
        """second_stage/recover.rs: gather; second_stage/broken.rs: report_and_freeze. From below."""
        below_is_frozen = s.all(lambda x2: Implies(And(s.below(s.table(x2), x), s.linked(s.table(x2))),
                                                   s.frozen(x2)))
        return And(s.kind(e) == BROKEN, s.below(s.table(x), e),
                   Implies(s.kind(x) == BROKEN, below_is_frozen)), {
            'frozen': put(s.frozen, x, True)}

    def step_freeze_unlinked(self, s, x: 'Pte'):
        """second_stage/zap.rs: take_over; table/chain.rs: push. Of an unlinked page-table page."""
        return And(s.used(s.table(x)), Not(s.linked(s.table(x)))), {'frozen': put(s.frozen, x, True)}

    def step_make_huge(self, s, e: 'Pte', a: 'Answer'):
        """second_stage/recover.rs: make. Of leaves that are all there and say the same."""
        def is_part(x):
            return And(s.kind(x) == LEAF, s.ans(x) == a, Or(s.frozen(x), self.without('freeze')))
        return And(s.kind(e) == BROKEN, Not(s.frozen(e)), s.used(s.table(e)),
                   s.all(lambda p: Implies(self.maps(s, e, p), is_part(s.entry(s.down(e), p))))), {
            'kind': put(s.kind, e, LEAF), 'ans': put(s.ans, e, a), **self.cut(s, e)}

    def step_cancel(self, s, e: 'Pte', n: 'Fresh'):
        """second_stage/broken.rs: cancel. All behind the broken PTE is frozen by then."""
        is_frozen = s.all(lambda x: Implies(And(s.below(s.table(x), e), s.linked(s.table(x))), s.frozen(x)))
        is_fresh = s.state_of(n) == (STORED if self.without('cancel-fresh') else HELD)
        return And(s.kind(e) == BROKEN, Not(s.frozen(e)), s.used(s.table(e)), is_fresh,
                   Or(is_frozen, self.without('cancel-freeze'))), {**self.store(s, e, n), **self.cut(s, e)}

    # What always holds of them.

    def inv_tables(self, s):
        return {**self.inv_links(s), **self.inv_fresh(s)}

    def inv_links(self, s):
        in_use = lambda e: s.used(s.table(e))
        shares = lambda t, u, p: And(s.linked(t), s.linked(u), s.spans(t, p), s.spans(u, p))
        return {
            'kinds': s.all(lambda e: And(s.kind(e) >= EMPTY, s.kind(e) <= BROKEN)),
            'the root is linked': s.linked(s.root()),
            'what is linked is in use': s.all(lambda t: Implies(s.linked(t), s.used(t))),
            'what is below is in use': s.all(lambda t, e: Implies(s.below(t, e), And(s.used(t), in_use(e)))),
            'what is below has a lower level': s.all(
                lambda t, e: Implies(s.below(t, e), s.level(t) < self.level(s, e))),
            'what is below maps a part': s.all(
                lambda t, e, p: Implies(And(s.below(t, e), s.spans(t, p)), self.maps(s, e, p))),
            'below is transitive': s.all(
                lambda t, e, x: Implies(And(s.below(t, e), s.below(s.table(e), x)), s.below(t, x))),
            'the root is below nothing': s.all(lambda e: Not(s.below(s.root(), e))),
            'nothing is between a PTE and what it points to': s.all(lambda e, x: Implies(
                And(in_use(e), self.leads_down(s, e), s.below(s.down(e), x)),
                Or(x == e, s.below(s.table(e), x)))),
            'a PTE points down': s.all(lambda e: Implies(And(in_use(e), self.leads_down(s, e)),
                                                         s.below(s.down(e), e))),
            'a PTE points to its pages': s.all(lambda e, p: Implies(
                And(in_use(e), self.leads_down(s, e), self.maps(s, e, p)), s.spans(s.down(e), p))),
            'what is below is linked if that is': s.all(lambda t, e: Implies(
                s.below(t, e), And(self.leads_down(s, e), s.linked(t) == s.linked(s.table(e))))),
            'one path to a page': s.all(lambda t, u, p: Implies(
                And(shares(t, u, p), s.level(t) < s.level(u)), s.below(t, s.entry(u, p)))),
            'one page-table page of a level': s.all(lambda t, u, p: Implies(
                And(shares(t, u, p), s.level(t) == s.level(u)), t == u)),
        }

    def inv_fresh(self, s):
        in_use = lambda e: s.used(s.table(e))
        return {
            'the counter counts': s.counter() >= 0,
            'states of fresh numbers': s.all(lambda n: And(s.state_of(n) >= FREE, s.state_of(n) <= STORED)),
            'numbers of PTEs are counted': s.all(lambda e: Implies(in_use(e), s.num(e) <= s.counter())),
            'fresh numbers are counted': s.all(
                lambda n: Implies(s.state_of(n) != FREE, s.fresh(n) <= s.counter())),
            'fresh numbers differ': s.all(lambda n, n2: Implies(
                And(s.state_of(n) != FREE, s.state_of(n2) != FREE, s.fresh(n) == s.fresh(n2)), n == n2)),
            'a fresh number is at no PTE': s.all(lambda n, e: Implies(
                And(s.state_of(n) == HELD, in_use(e)), s.num(e) != s.fresh(n))),
        }
