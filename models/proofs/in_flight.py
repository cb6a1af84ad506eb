"""The table of the ranges in flight: a fault misses no range that was published before the fault
began to read.

Protocol: docs/protocols/invalidation.md. Module: table/in_flight.rs. Any number of faults, calls,
places and chunks.

A range lies in a place; places lie in chunks. One chunk is the first. Behind it are lists of
chunks, which are linked one behind the other, and each range has a list: that of its block, or that
of large ranges. The word of a chunk has a claimed and an active bit for each place, and the word of
the first chunk also counts the ranges in lists. A fault loads a word, and then start and end of
each place that was active in it, one by one. A place may be withdrawn and used again meanwhile, so
the fault may read the start of one range and the end of another. The fault reads the lists that may
have a range in its block, as far as it has seen that they are counted.

What is proved is what the proofs of invalidation assume (`step_ranges` there): a fault that finds
its block free passes each range at a moment at which it does not have to be noticed. A call must be
noticed from when it takes its number until its host is done.

A range that reaches into two blocks is published as two, each by a call of its own here. The first
chunk is a list of its own here. That a range which shares a frame with a block is in a list that
faults in that block read is an axiom: what the hash of blocks is does not matter. The code counts
the ranges of all lists of blocks together, so its faults read no fewer lists than those here.

The count is modelled as the set of the calls that have added to it and not yet subtracted. Each
load, store and exchange is one step, in one order for all threads; the memory orders are checked by
loom (`in_flight_loom.rs`). The order of the PTE and the ranges, and what the number does, are in
the proofs of invalidation. The short path of a fault that finds one range alone (`is_apart`) reads
the same words in the same order. Chunks are never freed while a fault reads.
"""
import prover
from prover import And, If, Implies, Not, Or, Protocol, put, put_where
from starts import at

# A fault: it has read its PTE (LOOKED), reads places of a chunk (AT_CHUNK), stands between start and end
# of a place (AT_PLACE), stands between two lists (BETWEEN), has found a block that no range shares (CLEAR).
IDLE, LOOKED, AT_CHUNK, AT_PLACE, BETWEEN, CLEAR = range(6)
# A call: it claims a place in the first chunk (OUT) or behind it (BEHIND), has seen that a chunk is the
# last (AT_END), fills the place, activates it, takes its number (NUMBERED), its host is done (DONE), it
# is withdrawn.
OUT, BEHIND, AT_END, CLAIMED, STARTED, FILLED, ACTIVE, NUMBERED, DONE, WITHDRAWN, OVER = range(11)


class InFlight(Protocol):
    sorts = ['Fault', 'Call', 'Place', 'Chunk', 'List', 'Block']
    letters = {'f': 'Fault', 'i': 'Call', 'j': 'Call', 'q': 'Place', 'c': 'Chunk', 'd': 'Chunk', 'l': 'List',
               'm': 'List', 'b': 'Block'}
    fixed = {
        'chunk': (['Place'], 'Chunk'), 'list': (['Chunk'], 'List'), 'is_first': (['List'], 'bool'),
        'list_of': (['Call'], 'List'), 'may_have': (['List', 'Block'], 'bool'),
        'page': (['Fault'], 'int'), 'low': (['Call'], 'int'), 'high': (['Call'], 'int'),
        'block_low': (['Block'], 'int'), 'block_high': (['Block'], 'int'),
    }
    state = {
        'claimed': (['Place'], 'bool'), 'active': (['Place'], 'bool'),
        'start': (['Place'], 'int'), 'end': (['Place'], 'int'),
        'position': (['Chunk'], 'int'), 'nr_chunks': (['List'], 'int'),     # a position below 0: not linked
        'counted': (['Call'], 'bool'),                                  # the count of the first chunk
        'ipc': (['Call'], 'int'), 'place': (['Call'], 'Place'), 'at': (['Call'], 'int'),
        'saw_free': (['Call', 'Place'], 'bool'),                    # only if claims do not exclude each other
        'owner': (['Place'], 'Call'),                                   # ghost: the call that claimed last
        'fpc': (['Fault'], 'int'), 'fat': (['Fault'], 'int'), 'flist': (['Fault'], 'List'),
        'behind': (['Fault', 'List'], 'bool'), 'done': (['Fault', 'List'], 'bool'),
        'saw': (['Fault', 'Place'], 'bool'), 'compared': (['Fault', 'Place'], 'bool'),
        'reads': (['Fault'], 'Place'), 'fstart': (['Fault'], 'int'),
        'block': (['Fault'], 'Block'),
        'passed': (['Fault', 'Call'], 'bool'),                   # ghost: was not to be noticed at some moment
    }
    rules = {
        'number-after-active': 'takes its number before the range is active',
        'claim-excludes': 'claims a place that was free at an earlier load',
        'both-bits-at-once': 'clears the claimed bit, and the active bit later',
        'withdraw-frees-place': 'leaves the claimed bit when it withdraws',
        'withdraw-ends-range': 'leaves the active bit when it withdraws',
        'withdraw-after-host': 'withdraws the range before its host is done',
        'ranges-behind-are-counted': 'claims a place behind the first chunk and does not count it',
        'count-until-host': 'subtracts from the count before its host is done',
        'lists-are-read': 'reads the first chunk alone',
        'chunks-behind-are-read': 'reads the first chunk of each list alone',
        'list-of-each-block': 'publishes a range of two blocks in the list of one of them alone',
        'link-excludes': 'links a chunk over one that another thread has linked meanwhile',
        'block-shrinks': 'compares the page alone and not its whole block',
    }

    sizes = {'Fault': 1, 'Call': 3, 'Place': 2, 'Chunk': 4, 'List': 2, 'Block': 2}
    start = at(position=[0, 0, -1, -1], nr_chunks=1, list=['list0', 'list1', 'list1', 'list1'], chunk=['chunk0', 'chunk1'],
        is_first=[True, False], list_of='list1', may_have=True, page=1, block_low=[0, 1], block_high=2)
    story = '''
        claim call0 place0; all_are_claimed call1; all_are_claimed call2; find_end call1; find_end call2;
        link_chunk call1 chunk2; another_linked call2; next_chunk call2; look fault0; load_first fault0 chunk0 block0;
        end_list fault0; load_list fault0 chunk1; load_next fault0 chunk2'''

    def axioms(self, s):
        shares = lambda b, i: And(s.block_low(b) < s.high(i), s.low(i) < s.block_high(b))
        of_block = {} if self.without('list-of-each-block') else {
            'a range that shares a frame with a block is in a list of that block': s.all(lambda b, i: Implies(
                shares(b, i), s.may_have(s.list_of(i), b)))}
        return {
            'a range has a page': s.all(lambda i: s.low(i) < s.high(i)),
            'one list is the first chunk': s.all(lambda l, m: Implies(And(s.is_first(l), s.is_first(m)), l == m)),
            'no list of ranges is the first chunk': s.all(lambda i: Not(s.is_first(s.list_of(i)))),
            **of_block,
        }

    def has_page(self, s, b, f):
        return And(s.block_low(b) <= s.page(f), s.page(f) < s.block_high(b))

    def init(self, s):
        return {
            'no place is used': s.all(lambda q: And(Not(s.claimed(q)), Not(s.active(q)))),
            'only the first chunk of a list is linked': And(s.all(lambda l: s.nr_chunks(l) == 1),
                s.all(lambda c: s.position(c) <= 0)),
            'one chunk of a list is the first': s.all(lambda c, d: Implies(
                And(s.list(c) == s.list(d), s.position(c) == 0, s.position(d) == 0), c == d)),
            'no call runs': s.all(lambda i: And(s.ipc(i) == OUT, Not(s.counted(i)))),
            'no claim runs': s.all(lambda i, q: Not(s.saw_free(i, q))),
            'no fault runs': s.all(lambda f: s.fpc(f) == IDLE),
        }

    # ---- A call.

    def list_at(self, s, q):
        return s.list(s.chunk(q))

    def level(self, s, q):
        return s.position(s.chunk(q))

    def is_in_first(self, s, q):
        return s.is_first(self.list_at(s, q))

    def must_be_noticed(self, s, i):
        if self.without('number-after-active'): return And(CLAIMED <= s.ipc(i), s.ipc(i) <= NUMBERED)
        return s.ipc(i) == NUMBERED

    def passes(self, s, i):
        """From this moment on no fault that reads has to notice the call."""
        return put_where(s.passed, lambda f, j: j == i, True)

    def step_all_are_claimed(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish_in, the count."""
        counts = not self.without('ranges-behind-are-counted')
        return And(s.ipc(i) == OUT, s.all(lambda q: Implies(self.is_in_first(s, q), s.claimed(q)))), {
            'ipc': put(s.ipc, i, BEHIND), 'counted': put(s.counted, i, counts), 'at': put(s.at, i, 0)}

    def step_next_chunk(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish_at_first_place."""
        return And(s.ipc(i) == BEHIND, s.at(i) + 1 < s.nr_chunks(s.list_of(i))), {'at': put(s.at, i, s.at(i) + 1)}

    def step_find_end(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish_at_first_place: no chunk is behind this one."""
        return And(s.ipc(i) == BEHIND, s.at(i) + 1 == s.nr_chunks(s.list_of(i))), {'ipc': put(s.ipc, i, AT_END)}

    def step_link_chunk(self, s, i: 'Call', c: 'Chunk'):
        """table/in_flight.rs: RangesInFlight::link_another, the exchange.

        If it fails, the call goes on in the chunk found.
        """
        mine = s.list_of(i)
        new, free = s.at(i) + 1, And(s.position(c) < 0, s.list(c) == mine)
        longer = {'ipc': put(s.ipc, i, BEHIND), 'nr_chunks': put(s.nr_chunks, mine, new + 1)}
        if self.without('link-excludes'):
            lost = lambda d: And(s.list(d) == mine, s.position(d) == new)
            return And(s.ipc(i) == AT_END, free), {
                **longer, 'position': lambda d: If(d == c, new, If(lost(d), -1, s.position(d)))}
        return And(s.ipc(i) == AT_END, free, new == s.nr_chunks(mine)), {
            **longer, 'position': put(s.position, c, new)}

    def step_another_linked(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::link_another, another thread was first."""
        return And(s.ipc(i) == AT_END, s.at(i) + 1 < s.nr_chunks(s.list_of(i))), {'ipc': put(s.ipc, i, BEHIND)}

    def step_out_of_memory(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish_in, after an error of publish_at_first_place."""
        return s.ipc(i) == AT_END, {'ipc': put(s.ipc, i, OVER), 'counted': put(s.counted, i, False)}

    def here(self, s, i, q):
        """The call is where it can claim the place."""
        return Or(And(s.ipc(i) == OUT, self.is_in_first(s, q), self.level(s, q) == 0),
                  And(s.ipc(i) == BEHIND, self.list_at(s, q) == s.list_of(i), self.level(s, q) == s.at(i)))

    def step_load_free(self, s, i: 'Call', q: 'Place'):
        """table/in_flight.rs: Chunk::publish, the load.

        What it finds counts only if claims do not exclude each other.
        """
        return And(self.here(s, i, q), Not(s.claimed(q)), Not(s.saw_free(i, q))), {
            'saw_free': put(s.saw_free, (i, q), True)}

    def step_claim(self, s, i: 'Call', q: 'Place'):
        """table/in_flight.rs: Chunk::publish, the exchange."""
        free = s.saw_free(i, q) if self.without('claim-excludes') else Not(s.claimed(q))
        return And(self.here(s, i, q), free), {
            'ipc': put(s.ipc, i, CLAIMED), 'place': put(s.place, i, q), 'owner': put(s.owner, q, i),
            'claimed': put(s.claimed, q, True)}

    def step_store_start(self, s, i: 'Call'):
        """table/in_flight.rs: Chunk::publish."""
        return s.ipc(i) == CLAIMED, {'ipc': put(s.ipc, i, STARTED),
            'start': put(s.start, s.place(i), s.low(i))}

    def step_store_end(self, s, i: 'Call'):
        """table/in_flight.rs: Chunk::publish."""
        return s.ipc(i) == STARTED, {'ipc': put(s.ipc, i, FILLED), 'end': put(s.end, s.place(i), s.high(i))}

    def step_activate(self, s, i: 'Call'):
        """table/in_flight.rs: Chunk::publish, the OR."""
        return s.ipc(i) == FILLED, {'ipc': put(s.ipc, i, ACTIVE), 'active': put(s.active, s.place(i), True)}

    def step_take_number(self, s, i: 'Call'):
        """table/invalidation_seq.rs: InvalidationSeqCounter::next.

        From here on faults must notice the range.
        """
        return s.ipc(i) == ACTIVE, {'ipc': put(s.ipc, i, NUMBERED)}

    def step_host_is_done(self, s, i: 'Call'):
        """The caller is done with the range, before it drops the `Invalidation`."""
        return s.ipc(i) == NUMBERED, {'ipc': put(s.ipc, i, DONE), 'passed': self.passes(s, i)}

    def step_withdraw(self, s, i: 'Call'):
        """table/in_flight.rs: InFlight::withdraw, the AND."""
        early = And(self.without('withdraw-after-host'), s.ipc(i) == NUMBERED)
        q, out = s.place(i), self.left_out
        return Or(s.ipc(i) == DONE, early), {
            'ipc': put(s.ipc, i, If(s.ipc(i) == DONE, WITHDRAWN, s.ipc(i))),
            'claimed': put(s.claimed, q, out == 'withdraw-frees-place'),
            'active': put(s.active, q, And(s.active(q), out in ('withdraw-ends-range', 'both-bits-at-once')))}

    def step_end(self, s, i: 'Call'):
        """table/in_flight.rs: InFlight::withdraw, the count, if the place is behind the first chunk."""
        late = put(s.active, s.place(i), False) if self.without('both-bits-at-once') else s.active
        early = And(self.without('count-until-host'), s.ipc(i) == NUMBERED)
        return Or(s.ipc(i) == WITHDRAWN, early), {
            'ipc': put(s.ipc, i, If(early, s.ipc(i), OVER)), 'counted': put(s.counted, i,
                False), 'active': late}

    # ---- A fault.

    def step_look(self, s, f: 'Fault'):
        """vcpu.rs: the fault reads its PTE. From here on it must notice the calls that have their number."""
        return s.fpc(f) == IDLE, {
            'fpc': put(s.fpc, f, LOOKED),
            'passed': put_where(s.passed, lambda g, i: g == f, lambda g, i: Not(self.must_be_noticed(s, i)))}

    def load_word(self, s, f, c):
        """The load of a word: all active bits of the chunk at one moment."""
        return {
            'fpc': put(s.fpc, f, AT_CHUNK), 'fat': put(s.fat, f, s.position(c)), 'flist': put(s.flist, f, s.list(c)),
            'saw': put_where(s.saw, lambda g, q: And(g == f, s.chunk(q) == c), lambda g, q: s.active(q)),
            'compared': put_where(s.compared, lambda g, q: And(g == f, s.chunk(q) == c), False)}

    def step_load_first(self, s, f: 'Fault', c: 'Chunk', b: 'Block'):
        """table/in_flight.rs: RangesInFlight::free_level, for any block that has the page."""
        first = And(s.is_first(s.list(c)), s.position(c) == 0)
        counted = lambda g, l: s.some(lambda i: And(s.counted(i), s.list_of(i) == l))
        return And(s.fpc(f) == LOOKED, first, self.has_page(s, b, f)), {
            **self.load_word(s, f, c), 'behind': put_where(s.behind, lambda g, l: g == f, counted),
            'done': put_where(s.done, lambda g, l: g == f, False), 'block': put(s.block, f, b)}

    def is_here(self, s, f, q):
        """The place is in the chunk that the fault reads."""
        return And(self.list_at(s, q) == s.flist(f), self.level(s, q) == s.fat(f))

    def step_load_start(self, s, f: 'Fault', q: 'Place'):
        """table/in_flight.rs: Chunk::free_level."""
        return And(s.fpc(f) == AT_CHUNK, self.is_here(s, f, q), s.saw(f, q), Not(s.compared(f, q))), {
            'fpc': put(s.fpc, f, AT_PLACE), 'reads': put(s.reads, f, q), 'fstart': put(s.fstart, f,
                s.start(q))}

    def step_load_end(self, s, f: 'Fault', b: 'Block'):
        """table/in_flight.rs: Chunk::free_level.

        The block shrinks until it is apart from the range that was read.
        """
        low, high = s.fstart(f), s.end(s.reads(f))
        lo, hi, now = s.block_low(b), s.block_high(b), s.block(f)
        shrunk = And(self.has_page(s, b, f), s.block_low(now) <= lo, hi <= s.block_high(now))
        whole = not self.without('block-shrinks')
        apart = Or(hi <= low, high <= lo) if whole else Or(s.page(f) < low, high <= s.page(f))
        return And(s.fpc(f) == AT_PLACE, shrunk, apart), {
            'fpc': put(s.fpc, f, AT_CHUNK), 'compared': put(s.compared, (f, s.reads(f)), True),
            'block': put(s.block, f, b)}

    def step_inside(self, s, f: 'Fault'):
        """table/in_flight.rs: Chunk::free_level.

        The page itself is in the range that was read: the fault comes back later.
        """
        low, high = s.fstart(f), s.end(s.reads(f))
        return And(s.fpc(f) == AT_PLACE, low <= s.page(f), s.page(f) < high), {'fpc': put(s.fpc, f, IDLE)}

    def has_compared(self, s, f):
        return And(s.fpc(f) == AT_CHUNK, s.all(lambda q: Implies(
            And(self.is_here(s, f, q), s.saw(f, q)), s.compared(f, q))))

    def step_load_next(self, s, f: 'Fault', c: 'Chunk'):
        """table/in_flight.rs: free_level_in."""
        return And(self.has_compared(s, f), s.list(c) == s.flist(f), s.position(c) == s.fat(f) + 1,
                   s.position(c) < s.nr_chunks(s.list(c))), self.load_word(s, f, c)

    def step_end_list(self, s, f: 'Fault'):
        """table/in_flight.rs: free_level_in, the end; or the first chunk is compared."""
        ends = Or(s.fat(f) + 1 == s.nr_chunks(s.flist(f)), self.without('chunks-behind-are-read'))
        return And(self.has_compared(s, f), ends), {
            'fpc': put(s.fpc, f, BETWEEN), 'done': put(s.done, (f, s.flist(f)), True)}

    def step_load_list(self, s, f: 'Fault', c: 'Chunk'):
        """table/in_flight.rs: RangesInFlight::free_level_beside, the next list."""
        return And(s.fpc(f) == BETWEEN, s.position(c) == 0, Not(s.done(f, s.list(c)))), self.load_word(s, f, c)

    def step_clear(self, s, f: 'Fault'):
        """table/in_flight.rs: RangesInFlight::free_level and free_level_beside, the end."""
        due = lambda l: And(s.behind(f, l), s.may_have(l, s.block(f)))
        read = Or(s.all(lambda l: Implies(due(l), s.done(f, l))), self.without('lists-are-read'))
        return And(s.fpc(f) == BETWEEN, read), {'fpc': put(s.fpc, f, CLEAR)}

    def step_forget(self, s, f: 'Fault'):
        """vcpu.rs: the fault has used the answer, or starts over."""
        return True, {'fpc': put(s.fpc, f, IDLE)}

    # ---- What holds.

    def apart(self, s, f, i):
        return Or(s.block_high(s.block(f)) <= s.low(i), s.high(i) <= s.block_low(s.block(f)))

    def holds(self, s, i):
        return And(CLAIMED <= s.ipc(i), s.ipc(i) <= DONE)

    def safe(self, s):
        held = lambda q: And(self.holds(s, s.owner(q)), s.place(s.owner(q)) == q)
        return {
            'a fault that finds its block free has missed no range in flight': s.all(lambda f, i: Implies(
                And(s.fpc(f) == CLEAR, Not(s.passed(f, i))), self.apart(s, f, i))),
            'a claimed place is held by a call': s.all(lambda q: Implies(s.claimed(q), held(q))),
            'an active place is held by a call': s.all(lambda q: Implies(s.active(q), held(q))),
        }

    def inv(self, s):
        return {**self.inv_of_calls(s), **self.inv_of_faults(s)}

    def inv_of_calls(self, s):
        holds, level, first = self.holds, self.level, self.is_in_first
        filled = lambda i, pc: And(pc <= s.ipc(i), s.ipc(i) <= DONE)
        return {
            'a call is at one of its steps': s.all(lambda i: And(OUT <= s.ipc(i), s.ipc(i) <= OVER)),
            'a call that holds a place has claimed it': s.all(lambda i: Implies(holds(s, i), And(
                s.claimed(s.place(i)), s.owner(s.place(i)) == i))),
            'two calls hold different places': s.all(lambda i, j: Implies(
                And(holds(s, i), holds(s, j), s.place(i) == s.place(j)), i == j)),
            'the start that a call has stored stays': s.all(lambda i: Implies(
                filled(i, STARTED), s.start(s.place(i)) == s.low(i))),
            'the end that a call has stored stays': s.all(lambda i: Implies(
                filled(i, FILLED), s.end(s.place(i)) == s.high(i))),
            'a range stays active until it is withdrawn': s.all(lambda i: Implies(
                filled(i, ACTIVE), s.active(s.place(i)))),
            'a range behind the first chunk is counted': s.all(lambda i: Implies(
                Or(s.ipc(i) == BEHIND, s.ipc(i) == AT_END, And(holds(s, i), Not(first(s, s.place(i))))),
                s.counted(i))),
            'a place behind the first chunk is in the list of its range': s.all(lambda i: Implies(
                And(holds(s, i), Not(first(s, s.place(i)))), self.list_at(s, s.place(i)) == s.list_of(i))),
            'a held place is in a linked chunk': s.all(
                lambda i: Implies(holds(s, i), level(s, s.place(i)) >= 0)),
            'a chunk of each list is linked': s.all(lambda l: s.nr_chunks(l) >= 1),
            'the first chunk is one': s.all(lambda l: Implies(s.is_first(l), s.nr_chunks(l) == 1)),
            'linked chunks have positions below their number': s.all(
                lambda c: s.position(c) < s.nr_chunks(s.list(c))),
            'chunks of a list have different positions': s.all(lambda c, d: Implies(
                And(s.list(c) == s.list(d), s.position(c) >= 0, s.position(c) == s.position(d)), c == d)),
            'a call behind stands at a linked chunk': s.all(lambda i: Implies(
                Or(s.ipc(i) == BEHIND, s.ipc(i) == AT_END), And(0 <= s.at(i), s.at(i) < s.nr_chunks(s.list_of(i))))),
        }

    def inv_of_faults(self, s):
        level, first = self.level, self.is_in_first
        reads = lambda f: Or(s.fpc(f) == AT_CHUNK, s.fpc(f) == AT_PLACE)
        goes = lambda f: Or(reads(f), s.fpc(f) == BETWEEN)
        missing = lambda f, i: And(s.fpc(f) != IDLE, Not(s.passed(f, i)))      # it must still notice the call
        here = lambda f, i: And(reads(f), missing(f, i), self.is_here(s, f, s.place(i)))
        return {
            'a fault is at one of its steps': s.all(lambda f: And(IDLE <= s.fpc(f), s.fpc(f) <= CLEAR)),
            'a fault reads a linked chunk': s.all(lambda f: Implies(
                reads(f), And(0 <= s.fat(f), s.fat(f) < s.nr_chunks(s.flist(f))))),
            'a fault reads a place of its chunk': s.all(lambda f: Implies(
                s.fpc(f) == AT_PLACE, self.is_here(s, f, s.reads(f)))),
            'what a fault must notice is in flight': s.all(lambda f, i: Implies(
                missing(f, i), self.must_be_noticed(s, i))),
            'a fault that is behind the first chunk has read that': s.all(lambda f, l: Implies(
                And(s.is_first(l), Or(s.fpc(f) == BETWEEN, And(reads(f), s.flist(f) != l))), s.done(f, l))),
            'a fault knows that there are ranges behind': s.all(lambda f, i: Implies(
                And(goes(f), missing(f, i), Not(first(s, s.place(i)))), s.behind(f, s.list_of(i)))),
            'a fault saw the active bit of a range in its chunk': s.all(lambda f, i: Implies(
                here(f, i), s.saw(f, s.place(i)))),
            'a range that a fault has compared is apart': s.all(lambda f, i: Implies(
                And(here(f, i), s.compared(f, s.place(i))), self.apart(s, f, i))),
            'a start that a fault has read is that of a range it must notice': s.all(lambda f, i: Implies(
                And(s.fpc(f) == AT_PLACE, missing(f, i), s.place(i) == s.reads(f)), s.fstart(f) == s.low(i))),
            'a range in a chunk before is apart': s.all(lambda f, i: Implies(
                And(reads(f), missing(f, i), self.list_at(s, s.place(i)) == s.flist(f),
                    level(s, s.place(i)) < s.fat(f)), self.apart(s, f, i))),
            'a range in a list that a fault has read is apart': s.all(lambda f, i: Implies(
                And(goes(f), missing(f, i), s.done(f, self.list_at(s, s.place(i)))), self.apart(s, f, i))),
        }


# The first chunk, and a list with one chunk.
ONE = at(page=1, low=1, high=2, block_low=1, block_high=2, position=0, nr_chunks=1, chunk=['chunk0', 'chunk1'],
         list=['list0', 'list1', 'list1'], is_first=[True, False], list_of='list1', may_have=True)
# The first chunk has one place, which is claimed.
TWO = {**ONE, **at(claimed=[True, False], ipc=[CLAIMED, OUT])}
# The first chunk is full, and so is the first of the list. A call stands at the end of the list, and
# another has claimed the place of the chunk that is linked behind.
THREE = {**ONE, **at(chunk=['chunk1', 'chunk2'], position=[0, 0, 1, -1], list=['list0', 'list1', 'list1', 'list1'],
                     nr_chunks=[1, 2], claimed=True, active=True, start=1, end=2, ipc=[DONE, NUMBERED, AT_END],
                     counted=True, place=['place0', 'place1', 'place0'], owner=['call0', 'call1'])}
# A place of the first chunk, one of the list, and one of the chunk that is linked behind that.
FOUR = {**ONE, **at(chunk=['chunk0', 'chunk1', 'chunk2'], position=[0, 0, 1], list=['list0', 'list1', 'list1'], nr_chunks=[1, 2],
                    claimed=[True, True, False], ipc=[CLAIMED, CLAIMED, OUT], place=['place0', 'place1', 'place0'],
                    owner=['call0', 'call1', 'call0'], counted=[False, True, False])}


def sizes(calls, places=1, chunks=2):
    return {'Fault': 1, 'Call': calls, 'Place': places, 'Chunk': chunks, 'List': 2, 'Block': 1}


InFlight.traces = {
    'number-after-active': {'sizes': sizes(1), 'start': ONE},
    'claim-excludes': {'sizes': sizes(2), 'start': {**ONE, **at(low=[1, 2], high=[2, 3])}},
    'both-bits-at-once': {'sizes': sizes(2), 'start': ONE},
    'withdraw-frees-place': {'sizes': sizes(1), 'start': ONE},
    'withdraw-ends-range': {'sizes': sizes(1), 'start': ONE},
    'withdraw-after-host': {'sizes': sizes(1), 'start': ONE},
    'ranges-behind-are-counted': {'sizes': sizes(2, 2), 'start': TWO},
    'count-until-host': {'sizes': sizes(2, 2), 'start': TWO},
    'lists-are-read': {'sizes': sizes(2, 2), 'start': TWO},
    'chunks-behind-are-read': {'sizes': sizes(3, 3, 3), 'start': FOUR},
    'list-of-each-block': {'sizes': sizes(2, 2), 'start': {**TWO, 'may_have': lambda l, b: False}},
    'link-excludes': {'sizes': sizes(3, 2, 4), 'start': THREE},
    'block-shrinks': {'sizes': sizes(1), 'start': {**ONE, **at(low=0, high=1, block_low=0)}},
}

if __name__ == '__main__':
    prover.main(InFlight)
