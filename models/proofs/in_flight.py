"""The table of the ranges in flight: a fault misses no range that was published before the fault
began to read.

Protocol: docs/protocols/invalidation.md. Module: table/in_flight.rs. Any number of faults, calls,
places and chunks.

A range lies in a place; places lie in chunks, which are linked one behind the other. The word of a
chunk has a claimed and an active bit for each place, and the word of the first chunk also counts
the ranges in all others. A fault loads a word, and then start and end of each place that was active
in it, one by one. A place may be withdrawn and used again meanwhile, so the fault may read the
start of one range and the end of another.

What is proved is what the proofs of invalidation assume (`step_ranges` there): a fault that finds
its block free passes each range at a moment at which it does not have to be noticed. A call must be
noticed from when it takes its number until its host is done.

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
# of a place (AT_PLACE), has found a block that no range shares (CLEAR).
IDLE, LOOKED, AT_CHUNK, AT_PLACE, CLEAR = range(5)
# A call: it claims a place in the first chunk (OUT) or behind it (BEHIND), has seen that a chunk is the
# last (AT_END), fills the place, activates it, takes its number (NUMBERED), its host is done (DONE), it
# is withdrawn.
OUT, BEHIND, AT_END, CLAIMED, STARTED, FILLED, ACTIVE, NUMBERED, DONE, WITHDRAWN, OVER = range(11)


class InFlight(Protocol):
    sorts = ['Fault', 'Call', 'Place', 'Chunk', 'Block']
    letters = {'f': 'Fault', 'i': 'Call', 'j': 'Call', 'q': 'Place', 'c': 'Chunk', 'd': 'Chunk', 'b': 'Block'}
    fixed = {
        'chunk': (['Place'], 'Chunk'),
        'page': (['Fault'], 'int'), 'low': (['Call'], 'int'), 'high': (['Call'], 'int'),
        'block_low': (['Block'], 'int'), 'block_high': (['Block'], 'int'),
    }
    state = {
        'claimed': (['Place'], 'bool'), 'active': (['Place'], 'bool'),
        'start': (['Place'], 'int'), 'end': (['Place'], 'int'),
        'position': (['Chunk'], 'int'), 'nr_chunks': ([], 'int'),       # a position below 0: not linked
        'counted': (['Call'], 'bool'),                                  # the count of the first chunk
        'ipc': (['Call'], 'int'), 'place': (['Call'], 'Place'), 'at': (['Call'], 'int'),
        'saw_free': (['Call', 'Place'], 'bool'),                    # only if claims do not exclude each other
        'owner': (['Place'], 'Call'),                                   # ghost: the call that claimed last
        'fpc': (['Fault'], 'int'), 'fat': (['Fault'], 'int'), 'behind': (['Fault'], 'bool'),
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
        'chunks-behind-are-read': 'reads the first chunk alone',
        'link-excludes': 'links a chunk over one that another thread has linked meanwhile',
        'block-shrinks': 'compares the page alone and not its whole block',
    }

    sizes = {'Fault': 1, 'Call': 2, 'Place': 2, 'Chunk': 2, 'Block': 2}
    start = {'position': lambda c: 0 if c == 'chunk0' else -1, 'nr_chunks': lambda: 1}

    def axioms(self, s):
        return {'a range has a page': s.all(lambda i: s.low(i) < s.high(i))}

    def has_page(self, s, b, f):
        return And(s.block_low(b) <= s.page(f), s.page(f) < s.block_high(b))

    def init(self, s):
        return {
            'no place is used': s.all(lambda q: And(Not(s.claimed(q)), Not(s.active(q)))),
            'only the first chunk is linked': And(s.nr_chunks() == 1, s.all(lambda c: s.position(c) <= 0)),
            'one chunk is the first': s.all(lambda c, d: Implies(
                And(s.position(c) == 0, s.position(d) == 0), c == d)),
            'no call runs': s.all(lambda i: And(s.ipc(i) == OUT, Not(s.counted(i)))),
            'no claim runs': s.all(lambda i, q: Not(s.saw_free(i, q))),
            'no fault runs': s.all(lambda f: s.fpc(f) == IDLE),
        }

    # ---- A call.

    def level(self, s, q):
        return s.position(s.chunk(q))

    def must_be_noticed(self, s, i):
        if self.without('number-after-active'): return And(CLAIMED <= s.ipc(i), s.ipc(i) <= NUMBERED)
        return s.ipc(i) == NUMBERED

    def passes(self, s, i):
        """From this moment on no fault that reads has to notice the call."""
        return put_where(s.passed, lambda f, j: j == i, True)

    def step_all_are_claimed(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish, the count."""
        counts = not self.without('ranges-behind-are-counted')
        return And(s.ipc(i) == OUT, s.all(lambda q: Implies(self.level(s, q) == 0, s.claimed(q)))), {
            'ipc': put(s.ipc, i, BEHIND), 'counted': put(s.counted, i, counts), 'at': put(s.at, i, 0)}

    def step_next_chunk(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish_behind."""
        return And(s.ipc(i) == BEHIND, s.at(i) + 1 < s.nr_chunks()), {'at': put(s.at, i, s.at(i) + 1)}

    def step_find_end(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish_behind: no chunk is behind this one."""
        return And(s.ipc(i) == BEHIND, s.at(i) + 1 == s.nr_chunks()), {'ipc': put(s.ipc, i, AT_END)}

    def step_link_chunk(self, s, i: 'Call', c: 'Chunk'):
        """table/in_flight.rs: RangesInFlight::link_another, the exchange.

        If it fails, the call goes on in the chunk found.
        """
        new, free = s.at(i) + 1, s.position(c) < 0
        if self.without('link-excludes'):
            return And(s.ipc(i) == AT_END, free), {
                'ipc': put(s.ipc, i, BEHIND), 'nr_chunks': lambda: new + 1,
                'position': lambda d: If(d == c, new, If(s.position(d) == new, -1, s.position(d)))}
        return And(s.ipc(i) == AT_END, free, new == s.nr_chunks()), {
            'ipc': put(s.ipc, i, BEHIND), 'nr_chunks': lambda: new + 1, 'position': put(s.position, c, new)}

    def step_another_linked(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::link_another, another thread was first."""
        return And(s.ipc(i) == AT_END, s.at(i) + 1 < s.nr_chunks()), {'ipc': put(s.ipc, i, BEHIND)}

    def step_out_of_memory(self, s, i: 'Call'):
        """table/in_flight.rs: RangesInFlight::publish, after an error of publish_behind."""
        return s.ipc(i) == AT_END, {'ipc': put(s.ipc, i, OVER), 'counted': put(s.counted, i, False)}

    def here(self, s, i, q):
        """The call is where it can claim the place."""
        return Or(And(s.ipc(i) == OUT, self.level(s, q) == 0),
                  And(s.ipc(i) == BEHIND, s.at(i) > 0, self.level(s, q) == s.at(i)))

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
        """table/in_flight.rs: InFlight::drop, the AND."""
        early = And(self.without('withdraw-after-host'), s.ipc(i) == NUMBERED)
        q, out = s.place(i), self.left_out
        return Or(s.ipc(i) == DONE, early), {
            'ipc': put(s.ipc, i, If(s.ipc(i) == DONE, WITHDRAWN, s.ipc(i))),
            'claimed': put(s.claimed, q, out == 'withdraw-frees-place'),
            'active': put(s.active, q, And(s.active(q), out in ('withdraw-ends-range', 'both-bits-at-once')))}

    def step_end(self, s, i: 'Call'):
        """table/in_flight.rs: InFlight::drop, the count, if the place is behind the first chunk."""
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
            'fpc': put(s.fpc, f, AT_CHUNK), 'fat': put(s.fat, f, s.position(c)),
            'saw': put_where(s.saw, lambda g, q: And(g == f, s.chunk(q) == c), lambda g, q: s.active(q)),
            'compared': put_where(s.compared, lambda g, q: And(g == f, s.chunk(q) == c), False)}

    def step_load_first(self, s, f: 'Fault', c: 'Chunk', b: 'Block'):
        """table/in_flight.rs: RangesInFlight::free_level, for any block that has the page."""
        return And(s.fpc(f) == LOOKED, s.position(c) == 0, self.has_page(s, b, f)), {
            **self.load_word(s, f, c), 'behind': put(s.behind, f, s.some(lambda i: s.counted(i))),
            'block': put(s.block, f, b)}

    def step_load_start(self, s, f: 'Fault', q: 'Place'):
        """table/in_flight.rs: Chunk::free_level."""
        return And(s.fpc(f) == AT_CHUNK, self.level(s, q) == s.fat(f), s.saw(f, q), Not(s.compared(f, q))), {
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
            And(self.level(s, q) == s.fat(f), s.saw(f, q)), s.compared(f, q))))

    def step_load_next(self, s, f: 'Fault', c: 'Chunk'):
        """table/in_flight.rs: RangesInFlight::free_level_beside."""
        return And(self.has_compared(s, f), Or(s.fat(f) > 0, s.behind(f)), s.position(c) == s.fat(f) + 1,
                   s.position(c) < s.nr_chunks()), self.load_word(s, f, c)

    def step_clear(self, s, f: 'Fault'):
        """table/in_flight.rs: RangesInFlight::free_level and free_level_beside, the end."""
        last = And(s.fat(f) == 0, Not(s.behind(f)))
        alone = self.without('chunks-behind-are-read')
        return And(self.has_compared(s, f), Or(last, s.fat(f) + 1 == s.nr_chunks(), alone)), {
            'fpc': put(s.fpc, f, CLEAR)}

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
        holds, level = self.holds, self.level
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
                Or(s.ipc(i) == BEHIND, s.ipc(i) == AT_END, And(holds(s, i), level(s, s.place(i)) != 0)),
                s.counted(i))),
            'a held place is in a linked chunk': s.all(
                lambda i: Implies(holds(s, i), level(s, s.place(i)) >= 0)),
            'a chunk is linked': s.nr_chunks() >= 1,
            'linked chunks have positions below their number': s.all(lambda c: s.position(c) < s.nr_chunks()),
            'chunks have different positions': s.all(lambda c, d: Implies(
                And(s.position(c) >= 0, s.position(c) == s.position(d)), c == d)),
            'a call behind stands at a linked chunk': s.all(lambda i: Implies(
                Or(s.ipc(i) == BEHIND, s.ipc(i) == AT_END), And(0 <= s.at(i), s.at(i) < s.nr_chunks()))),
        }

    def inv_of_faults(self, s):
        level = self.level
        reads = lambda f: Or(s.fpc(f) == AT_CHUNK, s.fpc(f) == AT_PLACE)
        missing = lambda f, i: And(s.fpc(f) != IDLE, Not(s.passed(f, i)))      # it must still notice the call
        here = lambda f, i: And(reads(f), missing(f, i), level(s, s.place(i)) == s.fat(f))
        return {
            'a fault is at one of its steps': s.all(lambda f: And(IDLE <= s.fpc(f), s.fpc(f) <= CLEAR)),
            'a fault reads a linked chunk': s.all(lambda f: Implies(
                reads(f), And(0 <= s.fat(f), s.fat(f) < s.nr_chunks()))),
            'a fault reads a place of its chunk': s.all(lambda f: Implies(
                s.fpc(f) == AT_PLACE, level(s, s.reads(f)) == s.fat(f))),
            'what a fault must notice is in flight': s.all(lambda f, i: Implies(
                missing(f, i), self.must_be_noticed(s, i))),
            'a fault knows that there are ranges behind': s.all(lambda f, i: Implies(
                And(reads(f), missing(f, i), level(s, s.place(i)) > 0), s.behind(f))),
            'a fault saw the active bit of a range in its chunk': s.all(lambda f, i: Implies(
                here(f, i), s.saw(f, s.place(i)))),
            'a range that a fault has compared is apart': s.all(lambda f, i: Implies(
                And(here(f, i), s.compared(f, s.place(i))), self.apart(s, f, i))),
            'a start that a fault has read is that of a range it must notice': s.all(lambda f, i: Implies(
                And(s.fpc(f) == AT_PLACE, missing(f, i), s.place(i) == s.reads(f)), s.fstart(f) == s.low(i))),
            'a range in a chunk before is apart': s.all(lambda f, i: Implies(
                And(reads(f), missing(f, i), level(s, s.place(i)) < s.fat(f)), self.apart(s, f, i))),
        }


ONE = at(page=1, low=1, high=2, block_low=1, block_high=2, position=0, nr_chunks=1)
# The first chunk has one place, which is claimed, and another chunk is linked.
TWO = {**ONE, **at(chunk=['chunk0', 'chunk1'], position=[0, 1], nr_chunks=2, claimed=[True, False],
                   ipc=[CLAIMED, OUT])}
# A range is in flight behind the first chunk; another call came to the end of that before.
THREE = {**ONE, **at(chunk=['chunk0', 'chunk1'], position=[0, 1, -1], nr_chunks=2, claimed=True, active=True,
                     start=1, end=2, ipc=[DONE, NUMBERED, AT_END], counted=[False, True, True],
                     place=['place0', 'place1', 'place0'], owner=['call0', 'call1'])}


def sizes(calls, places=1, chunks=1):
    return {'Fault': 1, 'Call': calls, 'Place': places, 'Chunk': chunks, 'Block': 1}


InFlight.traces = {
    'number-after-active': {'sizes': sizes(1), 'start': ONE},
    'claim-excludes': {'sizes': sizes(2), 'start': {**ONE, **at(low=[1, 2], high=[2, 3])}},
    'both-bits-at-once': {'sizes': sizes(2), 'start': ONE},
    'withdraw-frees-place': {'sizes': sizes(1), 'start': ONE},
    'withdraw-ends-range': {'sizes': sizes(1), 'start': ONE},
    'withdraw-after-host': {'sizes': sizes(1), 'start': ONE},
    'ranges-behind-are-counted': {'sizes': sizes(2, 2, 2), 'start': TWO},
    'count-until-host': {'sizes': sizes(2, 2, 2), 'start': TWO},
    'chunks-behind-are-read': {'sizes': sizes(2, 2, 2), 'start': TWO},
    'link-excludes': {'sizes': sizes(3, 2, 3), 'start': THREE},
    'block-shrinks': {'sizes': sizes(1), 'start': {**ONE, **at(low=0, high=1, block_low=0)}},
}

if __name__ == '__main__':
    prover.main(InFlight)
