"""Replays CPUs that set D, faults, and harvests that find D, in `dirty_bits.py`. See `replay.py`.

All pages are in one word and in one page-table page. A leaf without W is none for the model. A fault comes up when it
makes its leaf dirty, and goes when it has marked the page.
"""
from dirty_bits import FLAGGED, GAVE, MARKS, TAKES, UNBEGUN, VISITS, DirtyBits
from page_tables import EMPTY, LEAF, TABLE
from replay import NR_PTES, PTE_BYTES, Mismatch
from replay_dirty_log import GUEST_MAY_WRITE, Log

DIRTY, WAS_DIRTY = 4, 8                     # of the last number of a leaf
WORD = 0


class Schedule(Log):
    model = DirtyBits
    used = range(NR_PTES)
    takes = TAKES
    visit_summarizes = 'visit_summarizes'
    ignored = {*Log.ignored, 'fault-looks'}
    not_shown = set()

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        run.add('Word', WORD)
        for page in self.used:
            run.fix('word', (page,), WORD)

    # Leaves.

    def show_leaf(self, page, kind, b):
        s = self.s
        has = kind == LEAF and b & GUEST_MAY_WRITE
        shown = (bool(has), bool(has and b & DIRTY), bool(has and b & WAS_DIRTY))
        model = (s.present(page), s.present(page) and s.dirty(page), s.present(page) and s.was_dirty(page))
        if shown != model:
            raise Mismatch(f'page {page} (there, D, D for the host): {shown}; in the model {model}')

    def on_pte_read(self, cell, level, kind, a, b):
        if cell in self.blocks:
            for page in self.blocks[cell] if kind != TABLE else []:
                self.show_leaf(page, EMPTY, 0)
                self.looks(page)
        elif cell in self.page_of:
            self.show_leaf(self.page_of[cell], kind, b)
            self.looks(self.page_of[cell])
        else:
            raise Mismatch(f'a PTE that was never linked: {cell}')

    def looks(self, page):
        """A harvest visits the page; or the thread finds nothing to clean."""
        run, s, harvest = self.run, self.s, self.at.harvest
        if harvest is not None and s.hpc(harvest) == VISITS:
            run.step('visit', harvest, page)
        elif not s.present(page) or not s.dirty(page):
            self.cleans(page)

    def cleans(self, page):
        run, s, harvest = self.run, self.s, self.at.harvest
        if harvest is not None and s.hpc(harvest) == TAKES and s.holds(harvest, page):
            run.step('clean', harvest, page)
        elif self.thread == self.enabler and s.epc() == FLAGGED and not s.initially_set():
            run.step('enabling_cleans', page)

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if cell in self.blocks:
            if (old, new) != (EMPTY, TABLE):
                raise Mismatch(f'no step replaces {old} by {new}')
            for n, page in enumerate(self.blocks[cell]):
                self.page_of[a + PTE_BYTES * n] = page
                kind, _, bits = self.made[a + PTE_BYTES * n]
                self.leaf_replaced(page, EMPTY, 0, kind, bits)
        elif cell in self.page_of:
            self.leaf_replaced(self.page_of[cell], old, old_b, new, b)
        else:
            raise Mismatch(f'a PTE is changed that is not linked: {cell}')

    def leaf_replaced(self, page, old, old_b, new, b):
        self.show_leaf(page, old, old_b)
        had = bool(old == LEAF and old_b & GUEST_MAY_WRITE)
        has = bool(new == LEAF and b & GUEST_MAY_WRITE)
        was_dirty = had and old_b & DIRTY
        if has and b & DIRTY and (not was_dirty or next(self.later(), ('',))[0] == 'slots-read'):
            # A fault that finds D set by a CPU since its look marks the page, too.
            self.make_dirty(page)
        elif has and not had:
            self.run.step('prefault', page)
        elif has and was_dirty and not b & DIRTY:
            self.cleans(page)
        self.show_leaf(page, new, b)

    # A fault.

    def make_dirty(self, page):
        self.end_fault()
        self.at.fault = self.new('Fault')
        self.run.fix('page', (self.at.fault,), page)
        self.run.step('make_dirty', self.at.fault)

    def on_slots_read(self):
        if self.is_at(GAVE):
            self.run.step('read_flag', self.at.fault)

    # Marks.

    def on_marks_found(self, word, mask, log):
        self.marks('find_marked', 'visit_finds_marked', word, mask)

    def on_marks_set(self, word, mask, log):
        self.marks('set_bit', 'visit_marks', word, mask)

    def marks(self, by_fault, by_harvest, word, mask):
        for page in self.pages(word, mask):
            if self.at.harvest is not None:
                self.run.step(by_harvest, self.at.harvest, page)
            elif self.thread == self.enabler:
                self.run.step('enabling_sets', page)
            elif self.is_at(MARKS) and self.s.page(self.at.fault) == page:
                self.run.step(by_fault, self.at.fault)
            else:
                raise Mismatch('a mark that no step makes')

    def on_summarized(self, group, words):
        harvest = self.at.harvest
        if harvest is not None and self.s.owes(harvest, WORD):
            self.run.step(self.visit_summarizes, harvest, WORD)
        else:
            self.run.step('summarize', WORD)

    # Harvests.

    def on_harvest_begins(self, *masks):
        harvest = self.at.harvest = self.new('Harvest')
        if masks:
            self.run.fix('clears', (harvest,), True)
            for page in self.pages(WORD, masks[0]):
                self.run.fix('named', (harvest, page), True)
        self.run.step('begin', harvest)

    def end_visits(self):
        harvest = self.at.harvest
        if harvest is not None and self.s.hpc(harvest) == VISITS:
            self.run.step('all_visited', harvest)

    def has_passed(self, harvest):
        return all(self.s.passed(harvest, page) for page in self.used)

    def on_summary_skipped(self, group, words):
        harvest = self.at.harvest
        if harvest is not None:
            self.end_visits()
            if group == 0 and words & 1 and not self.has_passed(harvest):
                self.run.step('skip', harvest, WORD)

    def on_summary_cleared(self, group, words):
        self.end_visits()
        if self.at.harvest is None:
            self.run.step('wipe_summary', WORD)
        elif words:
            self.run.step('clear_summary', self.at.harvest, WORD)

    def on_marks_taken(self, word, marks, log):
        run, s, harvest = self.run, self.s, self.at.harvest
        for page in self.used:
            is_taken = page in self.pages(word, marks)
            if harvest is not None:
                run.step('take' if is_taken else 'pass', harvest, page)
            elif is_taken:
                run.step('wipe', page)
            elif s.bit(page):
                raise Mismatch(f'the mark of page {page} stays')

    def on_harvest_ends(self):
        run, s, harvest = self.run, self.s, self.at.harvest
        if s.hpc(harvest) == TAKES and any(s.passed(harvest, page) for page in self.used):
            run.step('turns_are_over', harvest)
        if s.hpc(harvest) not in (UNBEGUN, VISITS, TAKES):
            run.step('return', harvest)
        run.remove('Harvest', harvest)
        self.at.harvest = None

    def set_all(self):
        super().set_all()
        self.run.step('summarize', WORD)

    # CPUs.

    def on_cpu_sets_dirty(self, cpu, gfn):
        self.run.step('set_dirty', cpu, gfn)
