"""Replays faults, harvests, marks by the VMM, and logging that begins and ends, in `dirty_log.py`. See `replay.py`.

All leaves are of 4 KiB, so a leaf is its page. A fault comes up when it makes its leaf writable, and goes when it has
marked the page.
"""
import collections
import replay
from dirty_log import FLAGGED, GAVE, IDLE, LOGS, MARKS, OFF, OUT, SUMMARIZES, TAKES, UNVISITED, WROTE, DirtyLog
from page_tables import LEAF, TABLE
from replay import LEVEL_BITS, NR_CPUS, NR_ROOT_PTES, PAGES, PTE_BYTES, Mismatch

PAGES_PER_WORD = 64
WORDS = sorted({page // PAGES_PER_WORD for page in PAGES})
GUEST_MAY_WRITE = 2                         # of the last number of a leaf


class Thread:
    def __init__(self):
        self.fault = self.harvest = self.mark = None
        self.masks = {}                 # of its harvest, for each word
        self.flushed = []               # the ranges of its flush


class Log(replay.Schedule):
    """What the dirty logs share: logging begins and ends, CPUs cache leaves, and flushes wait for them."""
    of_thread = Thread
    used = PAGES
    takes = TAKES                           # where a harvest begins to flush
    cpu = 'Cpu'
    ignored = {'host-answers', 'ranges-read', 'ranges-found', 'number-read', 'number-taken'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, events)
        self.root, self.nr = root, 0
        self.page_of, self.made = {}, {}
        self.enabler = None                 # the thread that turns logging on
        self.has_log = False
        self.flushes = collections.defaultdict(list)    # of each CPU: those that wait for its access
        for page in self.pages_of_model():
            run.add('Page', page)
        for cpu in range(NR_CPUS):
            run.add(self.cpu, cpu)
        assert nr_levels == 2
        self.blocks = {root + PTE_BYTES * n: [p for p in self.used if p >> LEVEL_BITS == n]
                       for n in range(NR_ROOT_PTES)}

    def pages_of_model(self):
        return self.used

    def pages(self, word, mask):
        """The used pages of a mask."""
        return [p for p in self.used if p // PAGES_PER_WORD == word and mask >> (p % PAGES_PER_WORD) & 1]

    def on_pte_made(self, cell, *kinds):
        self.made[cell] = kinds[:3]

    def show_leaf(self, page, kind, b):
        if bool(self.s.writable(page)) != bool(kind == LEAF and b & GUEST_MAY_WRITE):
            raise Mismatch(f'page {page} is writable in the model: {self.s.writable(page)}')

    # Faults.

    def replay(self):
        super().replay()
        for self.thread in list(self.threads):
            self.end_fault()

    def end_fault(self):
        fault, self.at.fault = self.at.fault, None
        if fault is not None:
            if self.s.fpc(fault) != OUT:
                raise Mismatch(f'a fault ends at {self.s.fpc(fault)}')
            self.run.remove('Fault', fault)

    def is_at(self, *counters):
        return self.at.fault is not None and self.s.fpc(self.at.fault) in counters

    # The flag.

    def on_slots_published(self):
        if self.s.epc() == OFF and self.events[self.nr + 1:] and self.begins_to_log():
            self.enabler = self.thread
            self.run.step('publish_flag')
            if self.s.initially_set() and not self.has_log:
                self.has_log = True
                self.set_all()
        elif self.thread == self.enabler:
            self.run.step('disable')
            self.enabler = None

    def begins_to_log(self):
        return any(name == 'logs-now' for name, _ in self.later())

    def on_initially_set(self):
        self.run.fix('initially_set', (), True)

    def set_all(self):
        """A new log has all marks."""
        for page in self.used:
            self.run.step('enabling_sets', page)

    def on_logs_now(self):
        if self.s.initially_set():
            self.run.step('all_armed')
        self.run.step('enabled')

    # Flushes.

    def has_cached(self, cpu):
        return any(self.s.tlb(cpu, page) for page in self.used)

    def on_flush_begins(self, start, end):
        harvest = self.at.harvest
        if harvest is not None and self.s.hpc(harvest) == self.takes:
            self.end_turns()
        elif self.thread == self.enabler and self.s.epc() == FLAGGED:
            self.all_armed()
        self.begin_flush(start, end)

    def end_turns(self):
        self.run.step('turns_are_over', self.at.harvest)

    def all_armed(self):
        self.run.step('all_armed')

    def flush_step(self):
        if self.at.harvest is not None:
            return 'flush', self.at.harvest
        return ('enabling_flushes',) if self.thread == self.enabler else None

    def must_flush(self, page):
        return self.at.harvest is None or self.s.holds(self.at.harvest, page)

    def begin_flush(self, start, end):
        """A CPU flushes at once, or when the access that is under way is over."""
        step = self.flush_step()
        if step is None:
            return
        self.at.flushed.append((start, end))
        for cpu in range(NR_CPUS):
            if self.has_cached(cpu):
                self.flushes[cpu].append((self.thread, step))
            else:
                self.run.step(*step, cpu)

    def on_flush_ends(self):
        if any(thread == self.thread for found in self.flushes.values() for thread, _ in found):
            raise Mismatch('a flush ends while a CPU uses what it had cached before')
        ranges, self.at.flushed = self.at.flushed, []
        left = [p for p in self.used if self.must_flush(p) and not any(start <= p < end for start, end in ranges)]
        if ranges and left:
            raise Mismatch(f'a flush leaves {left}')

    # CPUs.

    def on_cpu_translates(self, cpu, gfn, cell):
        self.run.step('fill_tlb', cpu, gfn)

    def on_cpu_writes(self, cpu, gfn):
        self.run.step('guest_write', cpu, gfn)

    def on_cpu_forgets(self, cpu, gfn):
        for page in self.used:
            if self.s.tlb(cpu, page):
                self.run.step('evict_tlb', cpu, page)
        for _, step in self.flushes.pop(cpu, []):
            self.run.step(*step, cpu)


class Schedule(Log):
    model = DirtyLog
    ignored = {*Log.ignored, 'published', 'withdrawn'}
    # W is lost to operations beside harvests; all bits are set at first (`initially_set`); a rare race.
    not_shown = {'drop_write', 'enabling_sets', 'enabling_summarizes', 'summarize_again'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        for page in PAGES:
            run.add('Leaf', page)
            run.fix('leaf', (page,), page)
            run.fix('word', (page,), page // PAGES_PER_WORD)
        for word in WORDS:
            run.add('Word', word)

    def replay(self):
        super().replay()
        for self.thread in list(self.threads):
            self.must_have_marked()

    def must_have_marked(self):
        """The fault of the thread, or its call that marks, has returned."""
        if self.at.fault is not None:
            raise Mismatch('a fault has restored W and returns before it has marked its page')
        if self.at.mark is not None and self.s.mpc(self.at.mark) != IDLE:
            raise Mismatch('a call of the VMM returns before it has marked the page')

    def on_fault_looks(self, gfn):
        self.must_have_marked()

    def on_cpu_translates(self, cpu, gfn, cell):
        self.must_have_marked()
        super().on_cpu_translates(cpu, gfn, cell)

    def words(self, group, words):
        """The used words of a word of the summary."""
        return [w for w in WORDS if group == 0 and words >> w & 1]

    # Leaves.

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if new == TABLE and cell in self.blocks:
            for n, page in enumerate(self.blocks[cell]):
                below = a + PTE_BYTES * n
                self.page_of[below] = page
                kind, _, rights = self.made[below]
                self.changes(page, False, kind == LEAF and rights & GUEST_MAY_WRITE)
        elif cell in self.page_of:
            had = old == LEAF and old_b & GUEST_MAY_WRITE
            self.changes(self.page_of[cell], had, new == LEAF and b & GUEST_MAY_WRITE)

    def changes(self, page, had, has):
        run, s, at = self.run, self.s, self.at
        if bool(s.writable(page)) != bool(had):
            raise Mismatch(f'page {page} is writable in the model: {s.writable(page)}')
        if has and not had:
            at.fault = self.new('Fault')
            run.fix('leaf_of', (at.fault,), page)
            run.step('restore_write', at.fault)
        elif not has:
            # Also where another thread was faster.
            self.protects(page)

    def protects(self, page):
        """The thread has cleared W of the leaf, or found it clear or no leaf there."""
        if self.at.harvest is not None:
            self.run.step('protect', self.at.harvest, page)
        elif self.thread == self.enabler and self.s.epc() == FLAGGED:
            self.run.step('enabling_protects', page)

    def on_pte_read(self, cell, level, kind, a, b):
        if cell in self.blocks and kind != TABLE:
            for page in self.blocks[cell]:
                self.protects(page)
        page = self.page_of.get(cell)
        if page is None:
            return
        self.show_leaf(page, kind, b)
        if not self.s.writable(page):
            self.protects(page)

    def protects_rest(self, pages):
        """The walk of the thread has passed these pages without a leaf that it could change."""
        for page in pages:
            if self.s.writable(page):
                raise Mismatch(f'page {page} stays writable')
            self.protects(page)

    # The flag.

    def on_slots_read(self):
        run, s, at = self.run, self.s, self.at
        if at.fault is not None and s.fpc(at.fault) == GAVE:
            run.step('read_flag', at.fault)
            self.end_fault()
        elif at.mark is not None and s.mpc(at.mark) == WROTE and self.finds_slot_next():
            run.step('vmm_read_flag', at.mark)

    def finds_slot_next(self):
        """Whether this is the last look at the memslots before the VMM's mark: the one that decides."""
        return next(self.later(), ('',))[0] != 'slots-read'

    # Marks.

    def on_marks_found(self, word, mask, log):
        self.marks('find_marked', word, mask)

    def on_marks_set(self, word, mask, log):
        self.marks('set_bit', word, mask)

    def marks(self, step, word, mask):
        run, s, at = self.run, self.s, self.at
        for page in self.pages(word, mask):
            if at.fault is not None and s.fpc(at.fault) == MARKS:
                run.step(step, at.fault, page)
            elif at.mark is not None and s.mpc(at.mark) == LOGS:
                run.step(f'vmm_{step}', at.mark)
            else:
                raise Mismatch('a mark that no step makes')
        self.end_fault()

    def on_summarized(self, group, words):
        run, s, at = self.run, self.s, self.at
        for word in self.words(group, words):
            if at.harvest is not None:
                run.step('summarize_again', at.harvest, word)
            elif at.fault is not None:
                run.step('summarize', at.fault, word)
            elif at.mark is not None and s.mpc(at.mark) == SUMMARIZES:
                run.step('vmm_summarize', at.mark)
            else:
                raise Mismatch('a summary that no step sets')
        self.end_fault()

    def end_fault(self):
        s, fault = self.s, self.at.fault
        if fault is None:
            return
        page = s.leaf_of(fault)
        if s.fpc(fault) == MARKS and s.fdone(fault, page) and not any(s.fowes(fault, w) for w in WORDS):
            self.run.step('marked', fault)
        if s.fpc(fault) == OUT:
            self.run.remove('Fault', fault)
            self.at.fault = None

    def on_vmm_writes(self, gfn):
        self.must_have_marked()
        self.at.mark = self.new('Mark')
        self.run.fix('page_of', (self.at.mark,), gfn)
        self.run.step('vmm_write', self.at.mark)

    # Harvests.

    def on_harvest_begins(self, *masks):
        self.must_have_marked()
        harvest = self.at.harvest = self.new('Harvest')
        if masks:
            self.run.fix('masks', (harvest,), True)
            for word, mask in zip(WORDS, masks):
                for page in self.pages(word, mask):
                    self.run.fix('named', (harvest, page), True)
        self.run.step('begin', harvest)

    def on_summary_skipped(self, group, words):
        run, s, harvest = self.run, self.s, self.at.harvest
        for word in self.words(group, words):
            if harvest is not None and s.hword(harvest, word) == UNVISITED:
                run.step('skip_word', harvest, word)

    def on_summary_cleared(self, group, words):
        for word in self.words(group, words):
            if self.at.harvest is not None:
                self.run.step('clear_summary', self.at.harvest, word)
            else:
                self.run.step('wipe_summary', word)

    def on_marks_taken(self, word, marks, log):
        run, s, harvest = self.run, self.s, self.at.harvest
        if word not in WORDS:
            return
        if harvest is None:
            return run.step('wipe_word', word)
        before = {p for p in PAGES if s.holds(harvest, p)}
        run.step('take_word', harvest, word)
        taken = {p for p in PAGES if s.holds(harvest, p)} - before
        if taken != set(self.pages(word, marks)):
            raise Mismatch(f'the engine takes {marks:#x} of word {word}; the model {taken}')

    def end_turns(self):
        s, harvest = self.s, self.at.harvest
        self.protects_rest([p for p in PAGES if s.holds(harvest, p) and not s.rearmed(harvest, p)])
        super().end_turns()

    def on_harvest_ends(self):
        run, s, harvest = self.run, self.s, self.at.harvest
        is_refused = all(s.hword(harvest, w) == UNVISITED for w in WORDS)
        if not is_refused and s.hpc(harvest) == TAKES:
            # Nothing was taken, so nothing is flushed.
            self.end_turns()
            if any(s.holds(harvest, p) for p in PAGES):
                raise Mismatch('a harvest returns without its flush')
            for cpu in range(NR_CPUS):
                run.step('flush', harvest, cpu)
        if not is_refused:
            run.step('return', harvest)
        run.remove('Harvest', harvest)
        self.at.harvest = None

    def all_armed(self):
        self.protects_rest([p for p in PAGES if not self.s.armed(p)])
        super().all_armed()
