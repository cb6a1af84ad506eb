"""The steps of vCPUs on guest tables and on the shadow pages made from them. `shadow_sync.py` says
what is proved.
"""
from prover import And, If, Implies, Not, Or, Protocol, put, put_where

# A fault: it has read the guest's PTE, has the lock of the page and has read the PTE again.
IDLE, LOOKED, LOCKED = range(3)
# A write fault on a guest table: it has the lock of the frame, has set the bits, has made the pages
# unsync.
OPENS, HAS_BITS, HAS_STATES = range(1, 4)
# A flush of the guest: it has begun, finds the lock free (a page fault), must compare, is done with the
# shadow PTEs.
OUT, BEGUN, SAW_FREE, COMPARES, LOCAL, OVER = range(6)
INVLPG, FAULT, CR3 = range(3)                                           # kinds of flushes
# An emulated write: it is counted, has flushed the CPUs.
COUNTED, FLUSHED = range(1, 3)
UNSYNC, SYNCING, SYNCED = range(3)                                      # states of a page


class ShadowSyncSteps(Protocol):
    sorts = ['Fault', 'Opener', 'Flush', 'Writer', 'Guest', 'Entry', 'Page', 'Table', 'Cpu']
    letters = {'f': 'Fault', 'g': 'Fault', 'u': 'Opener', 'i': 'Flush', 'm': 'Writer', 'n': 'Guest',
        'e': 'Entry',
               'p': 'Page', 't': 'Table', 'c': 'Cpu'}
    fixed = {
        # a shadow PTE: of a guest PTE, in a shadow page
        'made_of': (['Entry'], 'Guest'), 'page': (['Entry'], 'Page'),
        # a guest PTE, a shadow page: of a guest table
        'table': (['Guest'], 'Table'), 'frame': (['Page'], 'Table'),
        'is_upper': (['Table'], 'bool'),                                # no CPU may write it
        'kind': (['Flush'], 'int'), 'cpu': (['Flush'], 'Cpu'), 'address': (['Flush'], 'Entry'),
        'writes': (['Writer'], 'Guest'), 'target': (['Opener'], 'Table'),
    }
    state = {
        'now': (['Guest'], 'int'),                                     # how often the guest's PTE has changed
        'present': (['Entry'], 'bool'), 'made': (['Entry'], 'int'),     # a shadow PTE, of which value
        'locked': (['Page'], 'bool'), 'frame_locked': (['Table'], 'bool'),
        'state': (['Page'], 'int'), 'sequence': (['Page'], 'int'), 'bit': (['Page'], 'bool'),
        'w': (['Table'], 'bool'), 'cached_w': (['Cpu', 'Table'], 'bool'),
        'cached': (['Cpu', 'Entry'], 'bool'), 'oldest': (['Cpu', 'Entry'], 'int'),
        'floor': (['Cpu', 'Entry'], 'int'),                             # ghost: what the vCPU has flushed
        'fpc': (['Fault'], 'int'), 'at': (['Fault'], 'Entry'), 'seen': (['Fault'], 'int'),
        'upc': (['Opener'], 'int'),
        'ipc': (['Flush'], 'int'), 'must': (['Flush', 'Entry'], 'int'),
        'reads': (['Flush'], 'bool'), 'compares': (['Flush'], 'Entry'), 'value': (['Flush'], 'int'),
        'compared': (['Flush', 'Entry'], 'bool'), 'passed': (['Flush', 'Page'], 'bool'),
        'protected': (['Flush', 'Page'], 'bool'), 'saw_sequence': (['Flush', 'Page'], 'int'),
        'flushed': (['Flush', 'Page', 'Cpu'], 'bool'), 'ended': (['Flush', 'Page'], 'bool'),
        'mpc': (['Writer'], 'int'), 'dropped': (['Writer', 'Entry'], 'bool'), 'mflushed': (['Writer', 'Cpu'],
            'bool'),
    }

    def axioms(self, s):
        return {
            'flushes have a kind': s.all(lambda i: And(INVLPG <= s.kind(i), s.kind(i) <= CR3)),
            'a page has the PTEs of one table': s.all(lambda e: s.frame(s.page(e)) == s.table(s.made_of(e))),
        }

    def init(self, s):
        return {
            'no shadow PTE is made': s.all(lambda e: Not(s.present(e))),
            'nothing is cached': And(s.all(lambda c, e: Not(s.cached(c, e))),
                s.all(lambda c, t: Not(s.cached_w(c, t)))),
            'nothing is flushed': s.all(lambda c, e: s.floor(c, e) <= s.now(s.made_of(e))),
            'no lock is held': And(s.all(lambda p: Not(s.locked(p))),
                s.all(lambda t: Not(s.frame_locked(t)))),
            'only pages of lowest tables are unsync': s.all(lambda p: Or(
                And(s.state(p) == SYNCED, Not(s.bit(p))),
                And(s.state(p) == UNSYNC, s.bit(p), Not(s.is_upper(s.frame(p)))))),
            'no guest table may be written': s.all(lambda t: Not(s.w(t))),
            'no thread runs': And(s.all(lambda f: s.fpc(f) == IDLE), s.all(lambda u: s.upc(u) == IDLE),
                                  s.all(lambda i: And(s.ipc(i) == OUT, Not(s.reads(i)))), s.all(
                                      lambda m: s.mpc(m) == IDLE)),
            'nothing is compared': s.all(lambda i, e: Not(s.compared(i, e))),
            'no page is synchronized': s.all(lambda i, p: And(
                Not(s.passed(i, p)), Not(s.protected(i, p)), Not(s.ended(i, p)))),
            'no CPU is flushed': s.all(lambda i, p, c: Not(s.flushed(i, p, c))),
            'nothing is dropped': And(s.all(lambda m, e: Not(s.dropped(m, e))),
                s.all(lambda m, c: Not(s.mflushed(m, c)))),
        }

    def being_written(self, s, t):
        return s.some(lambda m: And(COUNTED <= s.mpc(m), s.mpc(m) <= FLUSHED, s.table(s.writes(m)) == t))

    # ---- The guest.

    def step_fill(self, s, c: 'Cpu', e: 'Entry'):
        """A CPU walks the shadow page tables, and caches the PTE."""
        old = If(And(s.cached(c, e), s.oldest(c, e) < s.made(e)), s.oldest(c, e), s.made(e))
        return s.present(e), {'cached': put(s.cached, (c, e), True), 'oldest': put(s.oldest, (c, e), old)}

    def step_fill_w(self, s, c: 'Cpu', t: 'Table'):
        """A CPU caches that it may write a guest table."""
        return s.w(t), {'cached_w': put(s.cached_w, (c, t), True)}

    def step_store(self, s, c: 'Cpu', n: 'Guest'):
        """The guest changes a PTE of its own."""
        return s.cached_w(c, s.table(n)), {'now': put(s.now, n, s.now(n) + 1)}

    def step_protect(self, s, t: 'Table'):
        """shadow/zap.rs: write_protect. A change of the second stage takes W from the table."""
        return Not(s.frame_locked(t)), {'w': put(s.w, t, False)}

    # ---- A fault makes a shadow PTE.

    def step_look(self, s, f: 'Fault', e: 'Entry'):
        """shadow/walk.rs: serve_on_known_way, walk: the guest's PTE."""
        return s.fpc(f) == IDLE, {'fpc': put(s.fpc, f, LOOKED), 'at': put(s.at, f, e),
            'seen': put(s.seen, f, s.now(s.made_of(e)))}

    def step_lock(self, s, f: 'Fault'):
        """shadow/install.rs: is_as_seen, under the lock of the page."""
        n = s.made_of(s.at(f))
        same = And(Or(s.now(n) == s.seen(f), self.without('entry-is-read-again')),
                   Or(Not(self.being_written(s, s.table(n))), self.without('writers-keep-out')))
        return And(s.fpc(f) == LOOKED, Not(s.locked(s.page(s.at(f)))), same), {
            'fpc': put(s.fpc, f, LOCKED), 'locked': put(s.locked, s.page(s.at(f)), True)}

    def step_install(self, s, f: 'Fault'):
        """shadow/install.rs: install_leaf and link, the store."""
        e = s.at(f)
        return s.fpc(f) == LOCKED, {
            'fpc': put(s.fpc, f, IDLE), 'locked': put(s.locked, s.page(e), False), 'present': put(s.present,
                e, True),
            'made': put(s.made, e, s.seen(f))}

    def step_give_up(self, s, f: 'Fault'):
        """shadow/install.rs: NotMade."""
        return s.fpc(f) == LOOKED, {'fpc': put(s.fpc, f, IDLE)}

    def step_zap(self, s, e: 'Entry'):
        """shadow/zap.rs: drop_leaf. A change of the second stage needs the lock of the frame alone."""
        return True, {'present': put(s.present, e, False)}

    # ---- A write fault lets the guest write a lowest table.

    def step_open(self, s, u: 'Opener'):
        """shadow/install.rs: install_leaf, the lock of the frame."""
        t = s.target(u)
        return And(s.upc(u) == IDLE, Not(s.frame_locked(t)), Not(s.is_upper(t))), {
            'upc': put(s.upc, u, OPENS), 'frame_locked': put(s.frame_locked, t, True)}

    def step_unsync(self, s, u: 'Opener'):
        """shadow/install.rs: give_up_tracking, the states of the pages made from the table."""
        changes = lambda p: And(s.frame(p) == s.target(u), s.state(p) != UNSYNC)
        if self.without('written-is-unsync'):
            changes = lambda p: And(s.frame(p) == s.target(u), s.state(p) == SYNCED)
        return s.upc(u) == OPENS, {
            'upc': put(s.upc, u, HAS_STATES), 'state': put_where(s.state, changes, UNSYNC),
            'sequence': put_where(s.sequence, changes, lambda p: s.sequence(p) + 1)}

    def step_note_unsync(self, s, u: 'Opener'):
        """shadow/page.rs: Pages::note_unsync."""
        late = self.without('bit-before-w')
        return s.upc(u) == (HAS_BITS if late else HAS_STATES), {
            'upc': put(s.upc, u, IDLE if late else HAS_BITS), 'bit': put_where(s.bit,
                lambda p: s.frame(p) == s.target(u), True),
            'frame_locked': put(s.frame_locked, s.target(u), Not(late))}

    def step_set_w(self, s, u: 'Opener'):
        """shadow/install.rs: install_leaf, the store of a leaf with W."""
        late = self.without('bit-before-w')
        return s.upc(u) == (HAS_STATES if late else HAS_BITS), {
            'upc': put(s.upc, u, HAS_BITS if late else IDLE), 'w': put(s.w, s.target(u), True),
            'frame_locked': put(s.frame_locked, s.target(u), late)}

    # ---- A flush of the guest.

    def step_begin(self, s, i: 'Flush'):
        """shadow/roots.rs: invalidate_address, page_faulted, load_cr3.

        What the guest stored before counts.
        """
        to = If(s.kind(i) == FAULT, LOCAL if self.without('fault-compares') else BEGUN, COMPARES)
        return s.ipc(i) == OUT, {
            'ipc': put(s.ipc, i, to), 'must': put_where(s.must, lambda j, e: j == i, lambda j,
                e: s.now(s.made_of(e)))}

    def step_see_free(self, s, i: 'Flush'):
        """shadow/sync.rs: may_be_stale, the lock."""
        free = Or(Not(s.locked(s.page(s.address(i)))), self.without('lock-is-looked-at'))
        return And(s.ipc(i) == BEGUN, free), {'ipc': put(s.ipc, i, SAW_FREE)}

    def step_see_held(self, s, i: 'Flush'):
        """shadow/sync.rs: may_be_stale. It answers that the PTE may be stale."""
        return Or(s.ipc(i) == BEGUN, s.ipc(i) == SAW_FREE), {'ipc': put(s.ipc, i, COMPARES)}

    def step_see_none(self, s, i: 'Flush'):
        """shadow/sync.rs: may_be_stale, the target."""
        return And(s.ipc(i) == SAW_FREE, Not(s.present(s.address(i)))), {'ipc': put(s.ipc, i, LOCAL)}

    def step_see_synced(self, s, i: 'Flush'):
        """shadow/sync.rs: may_be_stale, the bit."""
        p = s.page(s.address(i))
        synced = s.state(p) != UNSYNC if self.without('syncing-is-compared') else Not(s.bit(p))
        return And(s.ipc(i) == SAW_FREE, synced), {'ipc': put(s.ipc, i, LOCAL)}

    def wants(self, s, i, e):
        """The flush compares the shadow PTE now."""
        p = s.page(e)
        flushed = Or(s.all(lambda c: s.flushed(i, p, c)), self.without('flush-before-compare'))
        return And(s.ipc(i) == COMPARES, Or(
            And(s.kind(i) != CR3, e == s.address(i)), And(s.kind(i) == CR3, s.protected(i, p), flushed)))

    def step_read(self, s, i: 'Flush', e: 'Entry'):
        """shadow/sync.rs: sync_address and compare_page, the guest's PTE, under the lock of the page."""
        p, out = s.page(e), self.without('compare-under-lock')
        return And(self.wants(s, i, e), Not(s.reads(i)), Not(s.compared(i, e)), Or(Not(s.locked(p)), out)), {
            'reads': put(s.reads, i, True), 'compares': put(s.compares, i, e), 'value': put(s.value, i,
                s.now(s.made_of(e))),
            'locked': s.locked if out else put(s.locked, p, True)}

    def step_compare(self, s, i: 'Flush'):
        """shadow/sync.rs: compare_entry."""
        e = s.compares(i)
        differs = And(s.present(e), s.made(e) != s.value(i))
        return s.reads(i), {
            'reads': put(s.reads, i, False), 'compared': put(s.compared, (i, e), True),
            'present': put(s.present, e, And(s.present(e), Not(differs))),
            'locked': s.locked if self.without('compare-under-lock') else put(s.locked, s.page(e), False)}

    def step_compared(self, s, i: 'Flush'):
        """shadow/roots.rs: invalidate_address, the end."""
        return And(s.ipc(i) == COMPARES, s.kind(i) != CR3, Not(s.reads(i)),
            s.compared(i, s.address(i))), {'ipc': put(s.ipc, i, LOCAL)}

    def step_pass(self, s, i: 'Flush', p: 'Page'):
        """shadow/page.rs: Pages::next_unsync, a page whose bit is clear."""
        return And(s.ipc(i) == COMPARES, s.kind(i) == CR3, Not(s.bit(p)), Not(s.protected(i, p))), {
            'passed': put(s.passed, (i, p), True)}

    def step_begin_sync(self, s, i: 'Flush', p: 'Page'):
        """shadow/sync.rs: begin_sync, under the lock of the frame."""
        skip = s.state(p) == SYNCED
        if self.without('syncing-is-synchronized'):
            skip = s.state(p) != UNSYNC
        t = s.frame(p)
        return And(s.ipc(i) == COMPARES, s.kind(i) == CR3, Not(s.frame_locked(t)), Not(s.protected(i, p)),
            Not(s.passed(i, p))), {
            'passed': put(s.passed, (i, p), skip), 'protected': put(s.protected, (i, p), Not(skip)),
            'saw_sequence': put(s.saw_sequence, (i, p), s.sequence(p)), 'state': put(s.state, p,
                If(skip, s.state(p), SYNCING)),
            'w': put(s.w, t, And(skip, s.w(t))),
            'flushed': put_where(s.flushed, lambda j, q, c: And(j == i, q == p),
                And(self.without('flush-in-any-case'), Not(s.w(t))))}

    def step_flush(self, s, i: 'Flush', c: 'Cpu'):
        """shadow/sync.rs: sync_root, the flush of all CPUs, one of them."""
        return And(s.ipc(i) == COMPARES, s.kind(i) == CR3), {
            'cached_w': put_where(s.cached_w, lambda d, t: d == c, False),
            'cached': put_where(s.cached, lambda d, e: d == c, False),
            'flushed': put_where(s.flushed, lambda j, p, d: And(j == i, d == c, s.protected(i, p)), True)}

    def step_end_sync(self, s, i: 'Flush', p: 'Page'):
        """shadow/sync.rs: end_sync, under the lock of the frame."""
        done = s.all(lambda e: Implies(s.page(e) == p, s.compared(i, e)))
        flushed = Or(s.all(lambda c: s.flushed(i, p, c)), self.without('flush-before-compare'))
        same = Or(s.sequence(p) == s.saw_sequence(i, p), self.without('sequence-is-compared'))
        now = And(s.state(p) == SYNCING, same)
        return And(s.ipc(i) == COMPARES, s.protected(i, p), flushed, done, Not(s.ended(i, p)),
            Not(s.frame_locked(s.frame(p)))), {
            'ended': put(s.ended, (i, p), True), 'state': put(s.state, p, If(now, SYNCED, s.state(p))),
            'bit': put(s.bit, p, And(s.bit(p), Not(now)))}

    def step_synced(self, s, i: 'Flush'):
        """shadow/sync.rs: sync_root, the end."""
        done = s.all(lambda p: Or(s.passed(i, p), s.ended(i, p)))
        return And(s.ipc(i) == COMPARES, s.kind(i) == CR3, Not(s.reads(i)),
            done), {'ipc': put(s.ipc, i, LOCAL)}

    def step_flush_local(self, s, i: 'Flush'):
        """The vCPU's own CPU is flushed, and the guest runs again."""
        c, e = s.cpu(i), s.address(i)
        mine = lambda d, x: And(d == c, Or(s.kind(i) == CR3, x == e))
        held = lambda d, x: And(mine(d, x), s.floor(d, x) < s.must(i, x))
        return s.ipc(i) == LOCAL, {
            'ipc': put(s.ipc, i, OVER), 'floor': put_where(s.floor, held, lambda d, x: s.must(i, x)),
            'cached': s.cached if self.without('local-flush') else put_where(s.cached, mine, False)}

    # ---- An emulated write to a table that no CPU may write.

    def step_count(self, s, m: 'Writer'):
        """shadow/write.rs: Writer::begin, under the lock of the frame."""
        return And(s.mpc(m) == IDLE, s.is_upper(s.table(s.writes(m))),
            Not(s.frame_locked(s.table(s.writes(m))))), {
            'mpc': put(s.mpc, m, COUNTED)}

    def step_drop(self, s, m: 'Writer', e: 'Entry'):
        """shadow/write.rs: drop_made_of, under the lock of the page."""
        return And(s.mpc(m) == COUNTED, s.made_of(e) == s.writes(m), Not(s.locked(s.page(e)))), {
            'present': put(s.present, e, False), 'dropped': put(s.dropped, (m, e), True)}

    def step_flush_written(self, s, m: 'Writer', c: 'Cpu'):
        """shadow/write.rs: emulate_write, the flush of all CPUs, one of them."""
        done = s.all(lambda e: Implies(s.made_of(e) == s.writes(m), s.dropped(m, e)))
        return And(s.mpc(m) == COUNTED, done), {
            'mflushed': put(s.mflushed, (m, c), True), 'cached': put_where(s.cached, lambda d, e: d == c,
                False)}

    def step_write(self, s, m: 'Writer'):
        """shadow/memory.rs: write_guest, under the lock of the frame."""
        flushed = Or(s.all(lambda c: s.mflushed(m, c)), self.without('flush-before-write'))
        dropped = s.all(lambda e: Implies(s.made_of(e) == s.writes(m), s.dropped(m, e)))
        if self.without('drop-before-write'):
            flushed = dropped = True
        n = s.writes(m)
        return And(s.mpc(m) == COUNTED, flushed, dropped, Not(s.frame_locked(s.table(n)))), {
            'mpc': put(s.mpc, m, FLUSHED + 1), 'now': put(s.now, n, s.now(n) + 1)}
