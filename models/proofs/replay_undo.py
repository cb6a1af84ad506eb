"""Replays mappings that fail half way, in `undo.py`. See `replay_invalidation.py`.

A step of a mapping reads several PTEs and installs several leaves: it is a fault for each of them.
"""
import replay_invalidation
from invalidation import ACTS, CLEAR, RESOLVED
from page_tables import EMPTY, LEAF, TABLE
from replay import LEVEL_BITS, NR_PTES, PAGES, Mismatch
from undo import FLUSHES, MAPS, RETURNED, WALKS, Undo


class Thread(replay_invalidation.Thread):
    def __init__(self):
        super().__init__()
        self.mapping = None             # under way
        self.end = 0                    # the page behind its last
        self.steps = []                 # the faults of its step


class Schedule(replay_invalidation.Schedule):
    model, of_thread = Undo, Thread
    # Recoveries, faults that replace leaves: `replay_invalidation.py`.
    not_shown = {'break', 'cancel', 'empty_leaf', 'freeze', 'look_at_leaf', 'make_huge', 'read_counter', 'recount',
                 'refine_anew', 'take_own', 'unlink_leaves'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        for page in PAGES:
            run.fix('told', (page,), True)

    def undoes(self):
        return self.at.mapping is not None and self.s.mpc(self.at.mapping) != MAPS

    # A mapping.

    def on_mapping_begins(self, start, end, pfn):
        self.at.mapping, self.at.end = self.new('Mapping'), end
        self.run.fix('owns', (self.at.mapping, self.run.add('Answer', (pfn - start, 0))), True)

    def on_call_ends(self, is_ok):
        run, s, at, mapping = self.run, self.s, self.at, self.at.mapping
        self.end_steps()
        if not is_ok:
            if any(s.came(mapping, page) for page in PAGES) and s.mpc(mapping) != RETURNED:
                raise Mismatch('a mapping fails without an undo')
            for answer in [a for a in run.elements['Answer'] if s.owns(mapping, a) and s.mpc(mapping) == RETURNED]:
                for page in PAGES:
                    run.step('reuse', mapping, page, answer)
        run.remove('Mapping', mapping)
        at.mapping = None

    def on_fault_looks(self, gfn):
        at = self.at
        if at.mapping is None:
            return super().on_fault_looks(gfn)
        self.end_steps()
        level = self.level_of_leaf(gfn)
        pages = [p for p in PAGES if gfn <= p < at.end and p >> LEVEL_BITS == gfn >> LEVEL_BITS]
        for page in pages if level == 1 else [gfn]:
            super().on_fault_looks(page)
            self.run.fix('step_of', (at.fault, at.mapping), True)
            at.steps.append(at.fault)
            at.fault = None

    def end_steps(self):
        for _ in self.each_step():
            self.end_fault()
        self.at.steps = []

    def each_step(self):
        """Each fault of the step in turn as that of the thread."""
        at = self.at
        for at.fault in list(at.steps):
            yield at.fault
        at.fault = None

    def on_ranges_read(self, gfn):
        super().on_ranges_read(gfn)
        for _ in self.each_step():
            super().on_ranges_read(gfn)

    def on_ranges_found(self, gfn, level):
        super().on_ranges_found(gfn, level)
        for fault in self.each_step():
            if level and self.s.page(fault) >> LEVEL_BITS * (level - 1) == gfn >> LEVEL_BITS * (level - 1):
                super().on_ranges_found(gfn, level)

    def on_host_answers(self, gfn, pfn, is_writable):
        super().on_host_answers(gfn, pfn, is_writable)
        for fault in self.each_step():
            if self.s.fpc(fault) == CLEAR:
                super().on_host_answers(gfn, pfn, is_writable)

    def on_pte_read(self, cell, level, kind, a, b):
        super().on_pte_read(cell, level, kind, a, b)
        if self.is_unused(cell):
            return
        if self.undoes():
            return self.undo_reads(cell, kind)
        for _ in self.each_step():
            self.fault_reads(cell, kind)

    # Changes of PTEs by a mapping.

    def change(self, cell, level, change, a, b):
        if self.at.mapping is None or change != (EMPTY, LEAF):
            return super().change(cell, level, change, a, b)
        self.install(cell, RESOLVED, ACTS)

    def install(self, cell, *phases):
        s, at = self.s, self.at
        found = [f for f in at.steps if s.fat(f) == cell and s.fpc(f) in phases]
        if not found:
            raise Mismatch(f'no step of the mapping is at {cell}')
        if s.fpc(found[0]) == RESOLVED:
            self.run.step('act_there', found[0])
        self.run.step('install', found[0])
        at.steps.remove(found[0])
        at.fault = found[0]
        self.end_fault()

    def link(self, cell, level, old, table):
        run, s = self.run, self.s
        if self.at.mapping is None or old != EMPTY:
            return super().link(cell, level, old, table)
        self.add_table(table, level - 1, self.pages_of(cell), NR_PTES)
        made = {c: self.made[c][3 * (level > 2):][:3] for c in run.elements['Pte'] if s.table(c) == table}
        self.hang(cell, old, table, next((a for kind, a, b in made.values() if kind == EMPTY), None))
        for fault in [f for f in self.at.steps if s.fat(f) == cell and s.fpc(f) == ACTS]:
            run.step('down', fault)
        for below, (kind, a, b) in made.items():
            if kind == TABLE:
                self.link(below, level - 1, EMPTY, a)
            elif kind == LEAF:
                self.install(below, ACTS)
        for below, (kind, a, b) in made.items():
            self.show(below, kind, a, b)

    # Its undo.

    def on_undo_begins(self, start, end):
        self.end_steps()
        self.run.step('undo', self.at.mapping)

    def pages_that_came(self, cell):
        return [p for p in self.pages_of(cell) if self.s.came(self.at.mapping, p)]

    def undo_reads(self, cell, kind):
        run, s, mapping = self.run, self.s, self.at.mapping
        if s.mpc(mapping) != WALKS:
            return
        if s.table(cell) == s.root():
            run.step('undo_start', mapping)
        if kind == TABLE:
            run.step('undo_enter', mapping, cell)
        elif kind == EMPTY or kind == LEAF and not s.owns(mapping, s.ans(cell)):
            for page in self.pages_that_came(cell):
                run.step('undo_pass', mapping, cell, page)

    def zap(self, cell, level, number):
        if not self.undoes():
            return super().zap(cell, level, number)
        pages = self.pages_that_came(cell)
        if not pages:
            raise Mismatch(f'an undo empties {cell}, to which its mapping has not come')
        self.run.step('undo_leaf', self.at.mapping, cell, pages[0], number)

    def step_of_flush(self, pages):
        s, mapping = self.s, self.at.mapping
        if not self.undoes() or s.mpc(mapping) != WALKS:
            return super().step_of_flush(pages)
        if not all(p in pages for p in PAGES if s.came(mapping, p)):
            raise Mismatch(f'an undo flushes {pages}, not all that its mapping had mapped')
        self.run.step('undo_walked', mapping)
        return 'undo_flush', mapping

    def on_flush_ends(self):
        super().on_flush_ends()
        if self.undoes() and self.s.mpc(self.at.mapping) == FLUSHES:
            self.run.step('undo_returns', self.at.mapping)
