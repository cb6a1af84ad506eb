"""Replays protected directory entries and push-downs, in `lazy_protection.py`. See `replay.py`.

A block is its directory entry. A round of a fault is a fault of its own: each protected entry that it reads may be
that of its push-down; when it reads another, the model gives up the one before.
"""
from page_tables import EMPTY, LEAF, TABLE
from lazy_protection import CLEARS, FLAGGED, GAVE, MARKS, READ, SET, TAKES, UNBEGUN, LazyProtection
from replay import PTE_BYTES, Mismatch
from replay_dirty_log import GUEST_MAY_WRITE, WORDS, Log

FROZEN = 4                                  # as the engine shows it
IS_PROTECTED, GENERATION_SHIFT, NR_GENERATIONS = 1, 1, 8    # of the last number of a directory entry


class Schedule(Log):
    model = LazyProtection
    ignored = {*Log.ignored, 'published', 'withdrawn', 'summarized', 'summary-skipped', 'summary-cleared', 'pte-frozen'}
    not_shown = set()

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        self.stale = set()                  # PTEs of page-table pages that were unlinked
        # Of each block: the model's generation when its page-table page was linked.
        self.first_generation = dict.fromkeys(self.blocks, 0)
        for block, pages in self.blocks.items():
            run.add('Block', block)
            run.fix('open', (block,), True)
            for page in pages:
                run.fix('block', (page,), block)

    # A fault.

    def on_fault_looks(self, gfn):
        self.end_fault()
        self.at.fault = self.new('Fault')
        self.run.fix('page', (self.at.fault,), gfn)

    def end_fault(self):
        if self.at.fault is not None:
            self.give_up(self.at.fault)
        super().end_fault()

    def give_up(self, fault):
        """It does not push down by the entry that it has read."""
        if self.s.fpc(fault) in (READ, CLEARS):
            self.run.step('change_own', fault)

    def on_slots_read(self):
        fault = self.at.fault
        if self.is_at(READ):
            return self.run.step('read_others', fault)
        if self.is_at(SET):
            self.run.step('unprotect_fails', fault)
        if self.is_at(GAVE):
            self.run.step('read_flag', fault)

    # Directory entries.

    def show_entry(self, block, kind, a, b):
        s = self.s
        if kind != TABLE:
            is_same = s.open(block) and not any(s.writable(p) for p in self.blocks[block])
        else:
            generation = (s.generation(block) - self.first_generation[block]) % NR_GENERATIONS
            is_same = s.open(block) != b & IS_PROTECTED and generation == b >> GENERATION_SHIFT
        if not is_same:
            raise Mismatch(f'the engine has {kind, a, b} at {block}; the model: unprotected {s.open(block)}, '
                           f'generation {s.generation(block)}')

    def entry_read(self, block, kind, a, b):
        self.show_entry(block, kind, a, b)
        fault = self.at.fault
        if fault is not None and self.s.block(self.s.page(fault)) == block:
            self.give_up(fault)
            if kind == TABLE and b & IS_PROTECTED:
                self.run.step('read_entry', fault)
        if kind != TABLE:
            for page in self.blocks[block]:
                self.protects(page)

    def entry_replaced(self, block, old, new, a, b):
        if (old, new) == (EMPTY, TABLE):
            self.link(block, a)
        elif (old, new) == (TABLE, EMPTY):
            self.unlink(block)
        elif (old, new) == (TABLE, TABLE) and not b & IS_PROTECTED:
            self.run.step('unprotect', self.at.fault)
        elif (old, new) == (TABLE, TABLE) and self.at.harvest is not None:
            self.run.step('protect_entry', self.at.harvest, block)
        elif (old, new) == (TABLE, TABLE) and self.thread == self.enabler:
            self.run.step('enabling_protects_entry', block)
        elif (old, new) != (EMPTY, EMPTY):
            raise Mismatch(f'no step replaces {old} by {new}')

    def link(self, block, table):
        for n, page in enumerate(self.blocks[block]):
            self.page_of[table + PTE_BYTES * n] = page
            kind, _, rights = self.made[table + PTE_BYTES * n]
            if kind == LEAF and rights & GUEST_MAY_WRITE:
                self.installs(page)

    def unlink(self, block):
        """Also the end of what other threads do below the entry that they have read."""
        cells = {cell: page for cell, page in self.page_of.items() if self.s.block(page) == block}
        for fault in list(self.run.elements['Fault']):
            if self.s.block(self.s.page(fault)) == block:
                self.give_up(fault)
        unlinking = self.thread
        for self.thread in list(self.threads):
            for page in self.finds_none(block, cells):
                self.protects(page)
        self.thread = unlinking
        self.run.step('replace_table', block)
        self.first_generation[block] = self.s.generation(block)
        for cell in cells:
            del self.page_of[cell]
        self.stale |= set(cells)

    def finds_none(self, block, cells):
        """The pages that the thread will look for in the page-table page that is unlinked now."""
        for name, numbers in self.later():
            if name == 'pte-read' and numbers[0] == block:
                return
            if name == 'pte-read' and numbers[0] in cells:
                yield cells[numbers[0]]

    # Leaves.

    def on_pte_read(self, cell, level, kind, a, b):
        if cell in self.blocks:
            self.entry_read(cell, kind, a, b)
        elif cell in self.page_of:
            self.show_leaf(self.page_of[cell], kind, b)
            if not self.s.writable(self.page_of[cell]):
                self.protects(self.page_of[cell])
        elif cell not in self.stale:
            raise Mismatch(f'a PTE that was never linked: {cell}')

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if cell in self.blocks:
            self.show_entry(cell, old, old_a, old_b)
            self.entry_replaced(cell, old, new, a, b)
            self.show_entry(cell, new, a, b)
        elif cell in self.page_of:
            self.show_leaf(self.page_of[cell], old, old_b)
            self.leaf_replaced(self.page_of[cell], old, new, new == LEAF and b & GUEST_MAY_WRITE)
            self.show_leaf(self.page_of[cell], new, b)
        elif cell not in self.stale or new != FROZEN:
            raise Mismatch(f'a PTE is changed that is not linked: {cell}')

    def leaf_replaced(self, page, old, new, is_writable):
        had = self.s.writable(page)
        if is_writable and old == LEAF and self.is_at(CLEARS) and self.s.page(self.at.fault) == page:
            self.run.step('set_own', self.at.fault)
        elif is_writable and not had:
            if old == EMPTY:
                self.installs(page)
            else:
                self.run.step('restore_write', self.at.fault)
        elif had and new == EMPTY:
            self.run.step('drop_write', page)
        elif old == new and not is_writable:
            # Also where another thread has zapped the leaf since this one read it.
            self.protects(page)

    def installs(self, page):
        """Whatever the entry above is: a fault that installs does not push down."""
        if self.at.fault is None or self.s.page(self.at.fault) != page:
            raise Mismatch(f'a leaf of page {page} that no fault installs')
        self.give_up(self.at.fault)
        self.run.step('restore_write', self.at.fault)

    def protects(self, page):
        """The thread has cleared W of the leaf, or found it clear or no leaf there."""
        run, s, at = self.run, self.s, self.at
        if at.harvest is not None and s.hpc(at.harvest) == TAKES and s.holds(at.harvest, page):
            run.step('protect_leaf', at.harvest, page)
        elif self.thread == self.enabler and s.epc() == FLAGGED and not s.initially_set():
            run.step('enabling_protects_leaf', page)
        elif self.is_at(CLEARS) and s.flogs(at.fault) and run.model.is_other(s, at.fault, page):
            run.step('clear_other', at.fault, page)

    # Marks.

    def on_marks_found(self, word, mask, log):
        self.marks('find_marked', word, mask)

    def on_marks_set(self, word, mask, log):
        self.marks('set_bit', word, mask)

    def marks(self, step, word, mask):
        for page in self.pages(word, mask):
            if self.is_at(MARKS) and self.s.page(self.at.fault) == page:
                self.run.step(step, self.at.fault)
            elif self.thread == self.enabler:
                self.run.step('enabling_sets', page)
            else:
                raise Mismatch('a mark that no step makes')

    # Harvests.

    def on_harvest_begins(self, *masks):
        self.at.harvest = self.new('Harvest')
        self.at.masks = dict(zip(WORDS, masks or [-1] * len(WORDS)))

    def on_marks_taken(self, word, marks, log):
        harvest = self.at.harvest
        for page in self.pages(word, marks):
            self.run.step(*(('wipe',) if harvest is None else ('take', harvest)), page)
        mask = -1 if harvest is None else self.at.masks.get(word, 0)
        if left := [page for page in self.pages(word, mask) if self.s.bit(page)]:
            raise Mismatch(f'the engine takes {marks:#x} of word {word}, and leaves {left}')

    def on_harvest_ends(self):
        harvest, self.at.harvest = self.at.harvest, None
        if self.s.hpc(harvest) != UNBEGUN:
            self.run.step('return', harvest)
        self.run.remove('Harvest', harvest)

    # CPUs.

    def has_cached(self, cpu):
        return super().has_cached(cpu) or any(self.s.psc(cpu, block) for block in self.blocks)

    def on_cpu_caches(self, cpu, gfn):
        self.run.step('cache_entry', cpu, self.s.block(gfn))

    def on_cpu_forgets(self, cpu, gfn):
        for block in self.blocks:
            if self.s.psc(cpu, block):
                self.run.step('evict_entry', cpu, block)
        super().on_cpu_forgets(cpu, gfn)
