"""Shadow paging: no CPU can write an upper guest table once a shadow page of it is ready.

Protocol: docs/protocols/shadow-paging.md, "A page is tracked only after a flush" and "A guest table
loses W in leaves of every size". Modules: shadow/install.rs (page_for, new_page, finish_tracking),
shadow/zap.rs (add, flush), table/tlb.rs. Any number of threads, guest tables, blocks, shadow pages
and CPUs.

A guest table is mapped by shadow leaves of its frame, and of the block around it. A thread that
makes a page of it counts the page in the block and drops the block's leaves, puts the page into the
list of the frame and takes W from the frame's leaves, and flushes if it has changed anything. CPUs
may still have W cached because another thread has removed a leaf and not flushed yet. Such a thread
is counted from before its first change until its flush is over. So the thread reads that count, and
flushes itself if it is not zero. Then the page is ready. A thread that finds a page that is not
ready goes on from there.

The counts are modelled as the sets of threads and of pages that are counted. What is done under a
lock of a frame or a block is one step. Blocks have one size here; the code does the same for each
size. Each life of a shadow page is a page of its own. Lowest tables, and what is made of a ready
page, are in `shadow_sync.py`. Each step is atomic, in one order for all threads.
"""
import prover
import starts
from prover import And, If, Implies, Not, Or, Protocol, put, put_where
from starts import at

# A thread: it removes rights, or makes a page: it has counted the page, has dropped the block's leaves,
# has put it into the list, flushes what it changed; has read the count, flushes because of it; is over.
OUT, REMOVES, NUMBERED, DROPPED, FLUSHES, COVERED, FLUSHES_TOO, OVER = range(8)


class ShadowTrack(Protocol):
    sorts = ['Thread', 'Page', 'Table', 'Block', 'Cpu']
    letters = {'i': 'Thread', 'j': 'Thread', 'p': 'Page', 'q': 'Page', 't': 'Table', 'b': 'Block', 'c': 'Cpu'}
    fixed = {
        'table': (['Page'], 'Table'), 'block': (['Table'], 'Block'), 'makes': (['Thread'], 'Page'),
        'is_maker': (['Thread'], 'bool'),
    }
    state = {
        'w': (['Table'], 'bool'), 'w_block': (['Block'], 'bool'),       # a leaf with W
        'cached_w': (['Cpu', 'Table'], 'bool'),
        'numbered': (['Page'], 'bool'), 'listed': (['Page'], 'bool'), 'dead': (['Page'], 'bool'),
        'ready': (['Page'], 'bool'),
        # ghosts: no leaf of the block since; who made it
        'dropped': (['Page'], 'bool'), 'maker': (['Page'], 'Thread'),
        'counted': (['Thread'], 'bool'), 'pc': (['Thread'], 'int'), 'finds': (['Thread'], 'bool'),
        'saw_none': (['Thread'], 'bool'),                               # only if the count is read too early
        'flushed': (['Thread', 'Cpu'], 'bool'), 'flushed_too': (['Thread', 'Cpu'], 'bool'),
        'last': (['Table'], 'Thread'),                                  # ghost: it has removed W last
    }
    rules = {
        'count-before-change': 'removes a right, and then counts itself',
        'count-until-flush': 'ends to be counted before its flush',
        'protection-is-counted': 'takes W for the page that it makes, and does not count itself',
        'count-is-read': 'calls a page ready without a look at the count',
        'count-after-list': 'reads the count before the page is in the list',
        'found-is-finished': 'takes a page that it finds in the list for a ready one',
        'block-leaves-go': 'leaves the leaves of the block as they are',
        'frame-leaves-lose-w': 'leaves the leaves of the frame as they are',
        'number-before-drop': 'drops the leaves of the block before it counts the page there',
        'list-before-protection': 'takes W from the leaves before the page is in the list',
        'unlist-before-number': 'ends to count a page in the block before it leaves the list',
        'flush-before-ready': 'calls the page ready before its flush is over',
    }
    sizes = {'Thread': 3, 'Page': 2, 'Table': 2, 'Block': 1, 'Cpu': 1}

    def init(self, s):
        return {
            'no CPU writes a table': s.all(lambda c, t: Not(s.cached_w(c, t))),
            'no page is made': s.all(lambda p: And(Not(s.numbered(p)), Not(s.listed(p)), Not(s.dead(p)),
                Not(s.ready(p)), Not(s.dropped(p)))),
            'no thread runs': s.all(lambda i: And(s.pc(i) == OUT, Not(s.counted(i)), Not(s.finds(i)))),
            'no CPU is flushed': s.all(lambda i, c: And(Not(s.flushed(i, c)), Not(s.flushed_too(i, c)))),
        }

    def in_block(self, s, b):
        return lambda t: s.block(t) == b

    # ---- Leaves that map a table.

    def step_give_w(self, s, t: 'Table'):
        """shadow/install.rs: install_leaf, unless is_tracked, under the lock of the frame."""
        return Not(s.some(lambda p: And(s.listed(p), s.table(p) == t))), {'w': put(s.w, t, True)}

    def step_give_w_block(self, s, b: 'Block'):
        """shadow/install.rs: install_leaf, of a block, if nr_tables is 0, under the lock of the block."""
        return Not(s.some(lambda p: And(s.numbered(p), s.block(s.table(p)) == b))), {
            'w_block': put(s.w_block, b, True)}

    def step_fill(self, s, c: 'Cpu', t: 'Table'):
        """A CPU caches that it may write the table."""
        return Or(s.w(t), s.w_block(s.block(t))), {'cached_w': put(s.cached_w, (c, t), True)}

    # ---- A thread that removes rights: an invalidation, a harvest, a flush of the guest, an eviction.

    def step_count(self, s, i: 'Thread'):
        """shadow/zap.rs: add."""
        first = And(s.pc(i) == OUT, Not(s.is_maker(i)))
        late = self.without('count-before-change')
        return And(s.pc(i) == REMOVES, Not(s.counted(i))) if late else first, {
            'pc': put(s.pc, i, REMOVES), 'counted': put(s.counted, i, True)}

    def removes(self, s, i):
        return And(Not(s.is_maker(i)), s.pc(i) == (
            OUT if self.without('count-before-change') else REMOVES))

    def step_remove(self, s, i: 'Thread', t: 'Table'):
        """shadow/zap.rs: drop_leaf; shadow/install.rs: protect_leaves, under the lock of the frame."""
        return And(self.removes(s, i), s.w(t)), {
            'w': put(s.w, t, False), 'last': put(s.last, t, i), 'pc': put(s.pc, i, REMOVES)}

    def step_remove_block(self, s, i: 'Thread', b: 'Block'):
        """shadow/zap.rs: drop_leaf, of a block, under the lock of the block."""
        return And(self.removes(s, i), s.w_block(b)), {
            'w_block': put(s.w_block, b, False), 'last': put_where(s.last, self.in_block(s, b), i),
            'pc': put(s.pc, i, REMOVES)}

    def step_removed(self, s, i: 'Thread'):
        """table/tlb.rs: TlbBatch::flush_cpus begins."""
        return And(s.pc(i) == REMOVES, s.counted(i)), {
            'pc': put(s.pc, i, FLUSHES), 'counted': put(s.counted, i, not self.without('count-until-flush'))}

    def step_flush(self, s, i: 'Thread', c: 'Cpu'):
        """table/tlb.rs: TlbBatch::flush_cpus, one CPU."""
        return And(s.pc(i) == FLUSHES, Not(s.finds(i))), {
            'flushed': put(s.flushed, (i, c), True), 'cached_w': put_where(s.cached_w, lambda d, t: d == c,
                False)}

    def step_settle(self, s, i: 'Thread'):
        """table/tlb.rs: TlbBatch::flush_cpus, the end. What changed nothing has nothing to flush."""
        out = self.left_out
        idle = And(s.is_maker(i), Not(s.counted(i)), out != 'protection-is-counted')
        done = Or(s.all(lambda c: s.flushed(i, c)), idle, And(s.is_maker(i), out == 'flush-before-ready'))
        return And(s.pc(i) == FLUSHES, done), {
            'pc': put(s.pc, i, If(s.is_maker(i), COVERED, OVER)),
            'counted': put(s.counted, i, False)}

    # ---- A thread that makes a page.

    def step_find(self, s, i: 'Thread'):
        """shadow/install.rs: page_for, find_page. It goes on with finish_tracking."""
        ready = self.without('found-is-finished')
        p = s.makes(i)
        return And(s.pc(i) == OUT, s.is_maker(i), s.listed(p)), {
            'pc': put(s.pc, i, COVERED), 'finds': put(s.finds, i, True), 'ready': put(s.ready, p,
                Or(ready, s.ready(p)))}

    def step_number(self, s, i: 'Thread'):
        """shadow/install.rs: new_page, nr_tables, under the lock of the block."""
        p = s.makes(i)
        from_, to = (NUMBERED, DROPPED) if self.without('number-before-drop') else (OUT, NUMBERED)
        mine = Or(from_ != OUT, And(Not(s.numbered(p)), Not(s.dead(p))))
        return And(s.pc(i) == from_, s.is_maker(i), mine), {
            'pc': put(s.pc, i, to), 'numbered': put(s.numbered, p, True), 'maker': put(s.maker, p, i),
            'saw_none': put(s.saw_none, i, Not(s.some(lambda j: s.counted(j))))}

    def step_count_maker(self, s, i: 'Thread'):
        """shadow/zap.rs: add, before the first change of a thread that makes a page."""
        return And(s.is_maker(i), Or(s.pc(i) == NUMBERED, s.pc(i) == DROPPED),
            not self.without('protection-is-counted')), {
            'counted': put(s.counted, i, True)}

    def may_change(self, s, i, changes):
        return Or(Not(changes), s.counted(i), self.without('protection-is-counted'))

    def step_drop_leaves(self, s, i: 'Thread'):
        """shadow/zap.rs: drop_leaves, of the block, under its lock."""
        p, b = s.makes(i), s.block(s.table(s.makes(i)))
        from_, to = (OUT, NUMBERED) if self.without('number-before-drop') else (NUMBERED, DROPPED)
        keeps = self.without('block-leaves-go')
        early = And(self.without('list-before-protection'), s.w(s.table(p)))
        return And(s.pc(i) == from_, s.is_maker(i), Or(from_ != OUT, And(Not(s.numbered(p)), Not(s.dead(p)))),
                   self.may_change(s, i, Or(s.w_block(b), early))), {
            'pc': put(s.pc, i, to), 'w_block': put(s.w_block, b, And(keeps, s.w_block(b))),
            'last': put_where(s.last, lambda t: And(s.block(t) == b, Or(s.w_block(b), early)), i),
            'dropped': put(s.dropped, p, True), 'w': put(s.w, s.table(p), And(s.w(s.table(p)), Not(early)))}

    def step_insert(self, s, i: 'Thread'):
        """shadow/install.rs: new_page, the list, protect_leaves, come_alive, under the lock of the frame."""
        p, t = s.makes(i), s.table(s.makes(i))
        keeps = self.left_out in ('frame-leaves-lose-w', 'list-before-protection')
        return And(s.pc(i) == DROPPED, Not(s.listed(p)), Not(s.dead(p)), self.may_change(s, i, s.w(t))), {
            'pc': put(s.pc, i, FLUSHES), 'listed': put(s.listed, p, True),
            'w': put(s.w, t, And(keeps, s.w(t))), 'last': put(s.last, t, If(s.w(t), i, s.last(t)))}

    def step_lose_race(self, s, i: 'Thread'):
        """shadow/install.rs: new_page, another thread has put a page of the same role into the list."""
        return s.pc(i) == DROPPED, {'pc': put(s.pc, i, FLUSHES), 'dead': put(s.dead, s.makes(i), True)}

    def step_see_none(self, s, i: 'Thread'):
        """shadow/install.rs: finish_tracking. The count is zero."""
        none = Not(s.some(lambda j: s.counted(j)))
        if self.without('count-is-read'): none = True
        if self.without('count-after-list'): none = s.saw_none(i)
        return And(s.pc(i) == COVERED, none), {'pc': put(s.pc, i, OVER),
            'ready': put(s.ready, s.makes(i), True)}

    def step_see_some(self, s, i: 'Thread'):
        """shadow/install.rs: finish_tracking. The count is not zero, so this thread flushes."""
        return And(s.pc(i) == COVERED, s.some(lambda j: s.counted(j))), {'pc': put(s.pc, i, FLUSHES_TOO)}

    def step_flush_too(self, s, i: 'Thread', c: 'Cpu'):
        """shadow/zap.rs: flush_cpus, one CPU."""
        return s.pc(i) == FLUSHES_TOO, {
            'flushed_too': put(s.flushed_too, (i, c), True), 'cached_w': put_where(s.cached_w, lambda d,
                t: d == c, False)}

    def step_ready(self, s, i: 'Thread'):
        """shadow/install.rs: finish_tracking, the end."""
        return And(s.pc(i) == FLUSHES_TOO, s.all(lambda c: s.flushed_too(i, c))), {
            'pc': put(s.pc, i, OVER), 'ready': put(s.ready, s.makes(i), True)}

    # ---- A page dies.

    def step_unlist(self, s, p: 'Page'):
        """shadow/zap.rs: zap_page, under the lock of the frame."""
        return s.listed(p), {'listed': put(s.listed, p, False), 'dead': put(s.dead, p, True)}

    def step_untrack(self, s, p: 'Page'):
        """shadow/zap.rs: untrack, after it."""
        first = self.without('unlist-before-number')
        return And(s.numbered(p), s.listed(p) if first else s.dead(p)), {
            'numbered': put(s.numbered, p, False)}

    # ---- What holds.

    def safe(self, s):
        usable = lambda p: And(s.ready(p), s.listed(p))
        return {
            'no CPU writes a table unseen of which a page is ready': s.all(lambda p, c: Implies(
                usable(p), Not(s.cached_w(c, s.table(p))))),
            'no leaf lets a table be written of which a page is ready': s.all(lambda p: Implies(
                usable(p), Not(Or(s.w(s.table(p)), s.w_block(s.block(s.table(p))))))),
        }

    def inv(self, s):
        t = lambda p: s.table(p)
        makes = lambda i: And(s.is_maker(i), Not(s.finds(i)), NUMBERED <= s.pc(i), s.pc(i) <= FLUSHES)
        return {
            'a thread is at one of its steps': s.all(lambda i: And(OUT <= s.pc(i), s.pc(i) <= OVER)),
            'a thread that removes rights makes no page': s.all(lambda i: Implies(
                Not(s.is_maker(i)), And(Not(s.finds(i)),
                    Or(s.pc(i) <= REMOVES, s.pc(i) == FLUSHES, s.pc(i) == OVER)))),
            'a thread that makes a page removes no others': s.all(
                lambda i: Implies(s.is_maker(i), s.pc(i) != REMOVES)),
            'a thread that finds a page makes none': s.all(lambda i: Implies(s.finds(i), And(
                s.pc(i) >= COVERED, Not(s.counted(i))))),
            'a thread that removes rights is counted': s.all(lambda i: Implies(
                And(Not(s.is_maker(i)), Or(s.pc(i) == REMOVES, s.pc(i) == FLUSHES)), s.counted(i))),
            'a counted thread has yet to flush': s.all(lambda i: Implies(s.counted(i), Or(
                s.pc(i) == REMOVES, s.pc(i) == NUMBERED, s.pc(i) == DROPPED, s.pc(i) == FLUSHES))),
            'CPUs are flushed at the end': s.all(lambda i, c: Implies(s.flushed(i, c), s.pc(i) >= FLUSHES)),
            'CPUs are flushed because of others after it': s.all(lambda i,
                c: Implies(s.flushed_too(i, c), s.pc(i) >= FLUSHES_TOO)),
            'a page is made by one thread': s.all(lambda i: Implies(makes(i), s.maker(s.makes(i)) == i)),
            'a page that is being made is counted in the block': s.all(lambda i: Implies(
                And(makes(i), s.pc(i) <= DROPPED), And(s.numbered(s.makes(i)), Not(s.dead(s.makes(i))),
                    Not(s.listed(s.makes(i)))))),
            'a page in the list is counted in the block': s.all(lambda p: Implies(s.listed(p), And(
                s.numbered(p), s.dropped(p), Not(s.dead(p))))),
            'leaves of the block are dropped first': s.all(lambda i: Implies(
                And(makes(i), s.pc(i) >= DROPPED), s.dropped(s.makes(i)))),
            'a dropped page was counted': s.all(
                lambda p: Implies(s.dropped(p), Or(s.numbered(p), s.dead(p)))),
            'no leaf of the block has W': s.all(lambda p: Implies(
                And(s.numbered(p), s.dropped(p)), Not(s.w_block(s.block(t(p)))))),
            'no leaf of the frame has W': s.all(lambda p: Implies(s.listed(p), Not(s.w(t(p))))),
            'a CPU that writes a table finds W, or a counted thread will flush it': s.all(lambda c,
                t: Implies(
                s.cached_w(c, t), Or(s.w(t), s.w_block(s.block(t)),
                    And(s.counted(s.last(t)), Not(s.flushed(s.last(t), c)))))),
            'a CPU that was flushed because of others does not write the table': s.all(lambda i, c: Implies(
                And(s.pc(i) == FLUSHES_TOO, s.flushed_too(i, c),
                    s.listed(s.makes(i))), Not(s.cached_w(c, t(s.makes(i)))))),
            'a page that was in the list may be ready': s.all(
                lambda p: Implies(s.ready(p), Or(s.listed(p), s.dead(p)))),
            'a page that is made stays in the list, or is dead': s.all(lambda i: Implies(
                And(s.is_maker(i), FLUSHES <= s.pc(i)), Or(s.listed(s.makes(i)), s.dead(s.makes(i))))),
        }


def run(start=None, **sizes):
    """One thread makes a page of a table, the other removes rights. A leaf of the frame has W."""
    return starts.run(ShadowTrack, {'Thread': 2, **sizes},
        {**at(is_maker=[True, False], w=True), **(start or {})})


CACHED = at(cached_w=True)
BLOCK = at(w=False, w_block=True)
ShadowTrack.traces = {
    'count-before-change': run(CACHED),
    'count-until-flush': run(CACHED),
    'protection-is-counted': run({**CACHED, **at(is_maker=True)}),
    'count-is-read': run(CACHED),
    'count-after-list': run(CACHED),
    'found-is-finished': run({**CACHED, **at(is_maker=True)}),
    'block-leaves-go': run(BLOCK),
    'frame-leaves-lose-w': run(),
    'number-before-drop': run(BLOCK),
    'list-before-protection': run(),
    'unlist-before-number': run(),
    'flush-before-ready': run(CACHED),
}

if __name__ == '__main__':
    prover.main(ShadowTrack)
