"""Replays recoveries and splits beside a log, in `recovery_beside_log.py`. See `replay.py`.

Each block has the leaves of the page-table page that was linked last. Each CPU is taken to have cached a directory
entry before it is broken.
"""
import replay_dirty_log
from page_tables import LEAF
from page_tables import BROKEN as IS_BROKEN, EMPTY as IS_EMPTY, TABLE as IS_TABLE
from recovery_beside_log import (ARMED, BROKE, BROKEN, DONE, EMPTY, FLAGGED, FLUSHES, GAVE, HUGE, MADE, MARKS,
                                 MARKS_ALL, OUT, TABLE, TAKES, RecoveryBesideLog)
from replay import LEVEL_BITS, NR_CPUS, NR_ROOT_PTES, PTE_BYTES, Mismatch
from replay_dirty_log import GUEST_MAY_WRITE, WORDS, Log

NR_PAGES = NR_ROOT_PTES << LEVEL_BITS
IS_FROZEN = 4                               # besides the kinds of the model
KINDS = {IS_TABLE: TABLE, IS_BROKEN: BROKEN, LEAF: HUGE, IS_EMPTY: EMPTY}


class Thread(replay_dirty_log.Thread):
    def __init__(self):
        super().__init__()
        self.gfn = self.recovery = self.mask = None


class Schedule(Log):
    model, of_thread = RecoveryBesideLog, Thread
    ignored = {*Log.ignored, 'summarized', 'summary-skipped', 'summary-cleared'}
    not_shown = {'zap_leaf'}                # nothing is invalidated

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        self.uses = set()
        for page in self.used:
            run.fix('block', (page,), run.add('Block', page >> LEVEL_BITS))
            run.fix('frozen', (page,), True)
        for block in range(NR_ROOT_PTES):
            run.fix('kind', (block,), EMPTY)
        self.block_of = {root + PTE_BYTES * n: n for n in range(NR_ROOT_PTES)}
        self.table = {}                     # of each block: the address of its page-table page

    def pages_of(self, block):
        return [p for p in self.used if p >> LEVEL_BITS == block]

    def page_at(self, cell):
        """The page of a PTE of a page-table page that was linked last at its block, or None."""
        page = self.page_of.get(cell)
        is_last = page is not None and self.table[page >> LEVEL_BITS] <= cell < self.table[page >> LEVEL_BITS] + 32
        return page if is_last else None

    def show(self, cell, kind, b):
        s, has = self.s, kind == LEAF and bool(b & GUEST_MAY_WRITE)
        if cell in self.block_of:
            block = self.block_of[cell]
            if (s.kind(block), s.kind(block) == HUGE and bool(s.huge_writable(block))) != (KINDS[kind], has):
                raise Mismatch(f'block {block} has {kind}, {b}; in the model {s.kind(block)}')
        elif (page := self.page_at(cell)) is not None:
            if bool(s.frozen(page)) != (kind == IS_FROZEN):
                raise Mismatch(f'page {page} is frozen in the model: {s.frozen(page)}')
            found = bool(s.present(page)), bool(s.present(page) and s.writable(page))
            if kind != IS_FROZEN and found != (kind == LEAF, has):
                raise Mismatch(f'page {page} has {kind}, {b}; in the model {found}')

    # Who acts.

    def on_fault_looks(self, gfn):
        self.must_be_over()
        self.at.gfn = gfn

    def must_be_over(self):
        self.end_fault()
        if self.at.recovery is not None and self.s.rpc(self.at.recovery) == BROKE:
            self.run.step('cancelled', self.at.recovery)
        self.end_recovery()
        if self.at.recovery is not None:
            raise Mismatch(f'a recovery ends at {self.s.rpc(self.at.recovery)}')

    def replay(self):
        super().replay()
        for self.thread in list(self.threads):
            self.must_be_over()

    def new_fault(self):
        fault = self.at.fault = self.new('Fault')
        self.run.fix('page', (fault,), self.at.gfn)
        return fault

    def end_fault(self):
        s, fault = self.s, self.at.fault
        if fault is None:
            return
        if s.fpc(fault) == MARKS and all(s.fdone(fault, p) for p in self.used if self.run.model.covers(s, fault, p)):
            self.run.step('marked', fault)
        super().end_fault()

    def end_recovery(self):
        s, recovery = self.s, self.at.recovery
        if recovery is None:
            return
        if s.rpc(recovery) == MARKS_ALL and all(s.rdone(recovery, p) for p in self.pages_of(s.of(recovery))):
            self.run.step('all_marked', recovery)
        if s.rpc(recovery) == DONE:
            self.run.remove('Recovery', recovery)
            self.at.recovery = None

    def new_recovery(self, block, splits):
        self.must_be_over()
        recovery = self.at.recovery = self.new('Recovery')
        self.run.fix('of', (recovery,), block)
        self.run.fix('splits', (recovery,), splits)
        return recovery

    # PTEs.

    def on_pte_frozen(self, cell):
        page = self.page_at(cell)
        if page is not None and not self.s.frozen(page):
            self.run.step('freeze', page)

    def on_pte_kept(self, cell, level, kind, a, b):
        self.show(cell, kind, b)

    def on_pte_read(self, cell, level, kind, a, b):
        self.show(cell, kind, b)
        self.passes(cell, kind, b)

    def passes(self, cell, kind, b):
        """A harvest or an enabling finds a PTE, or has protected it."""
        run, s, at = self.run, self.s, self.at
        has = kind == LEAF and b & GUEST_MAY_WRITE
        harvest = at.harvest if at.harvest is not None and s.hpc(at.harvest) == TAKES else None
        enables = self.thread == self.enabler and s.epc() == FLAGGED and not s.initially_set()
        if harvest is None and not enables or has:
            return
        if cell in self.block_of:
            block = self.block_of[cell]
            if kind == IS_TABLE:
                for page in self.pages_of(block):
                    if harvest is None:
                        run.step('enabling_walks', page)
                    elif s.holds(harvest, page):
                        run.step('walk', harvest, page)
            elif kind == LEAF:
                run.step(*(('protect_huge', harvest, block) if harvest else ('enabling_protects_huge', block)))
            else:
                run.step(*(('pass', harvest, block) if harvest else ('enabling_passes', block)))
        elif (page := self.page_of.get(cell)) is not None:
            if harvest is None:
                if s.esaw(page):
                    run.step('enabling_protects_leaf', page)
            elif s.holds(harvest, page) and s.hsaw(harvest, page):
                run.step('protect_leaf', harvest, page)

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        self.show(cell, old, old_b)
        if cell in self.block_of:
            self.block_replaced(self.block_of[cell], old, old_b, new, a, b)
        elif (page := self.page_at(cell)) is not None and new == IS_FROZEN != old:
            self.run.step('freeze', page)
        elif page is not None and new == LEAF and b & GUEST_MAY_WRITE:
            self.run.step('restore_write', self.new_fault())
        self.passes(cell, new, b)
        self.show(cell, new, b)

    def block_replaced(self, block, old, old_b, new, a, b):
        run, s, at = self.run, self.s, self.at
        has = new == LEAF and b & GUEST_MAY_WRITE
        if new == IS_TABLE:
            self.table[block] = a
            for n, page in enumerate(self.pages_of(block)):
                self.page_of[a + PTE_BYTES * n] = page
        if (old, new) in ((IS_EMPTY, LEAF), (LEAF, LEAF)):
            if has:
                run.step('restore_huge', self.new_fault())
        elif (old, new) == (IS_EMPTY, IS_TABLE):
            run.step('link_table', self.new_fault())
        elif (old, new) == (LEAF, IS_TABLE):
            run.step('split', block)
        elif (old, new) == (IS_TABLE, IS_BROKEN):
            for cpu in range(NR_CPUS):
                run.step('cache_table', cpu, block)
            run.step('break_table', self.new_recovery(block, False))
        elif (old, new) == (LEAF, IS_BROKEN):
            run.step('break_huge', at.recovery)
        elif (old, new) == (IS_BROKEN, LEAF):
            run.step('make_huge', at.recovery)
        elif (old, new) == (IS_BROKEN, IS_TABLE):
            run.step('link_parts', at.recovery)
        elif (old, new) == (IS_BROKEN, IS_EMPTY):
            run.step('cancel', block)
        else:
            raise Mismatch(f'no step replaces {old} by {new}')
        if new == IS_TABLE:
            for n in range(len(self.pages_of(block))):
                cell = a + PTE_BYTES * n
                kind, _, bits = self.made[cell]
                self.show(cell, kind, bits)

    # Marks.

    def on_slots_read(self):
        run, s, at = self.run, self.s, self.at
        if self.is_at(GAVE):
            if next(self.later(), ('',))[0] != 'slots-read':    # the look that decides
                run.step('read_flag', at.fault)
                if self.is_at(OUT):
                    self.end_fault()
        elif (block := self.breaks_next()) is not None:
            run.step('read_flag_before', self.new_recovery(block, True))
        elif at.recovery is not None and s.rpc(at.recovery) == MADE:
            run.step('read_flag_again', at.recovery)
            self.end_recovery()
        elif at.recovery is not None and s.rpc(at.recovery) == BROKE and not s.splits(at.recovery):
            run.step('read_may_write', at.recovery)

    def breaks_next(self):
        """The block whose leaf the thread breaks before it looks at the memslots again, if it does."""
        for name, numbers in self.later():
            if name == 'slots-read':
                return None
            if name == 'pte-replaced' and (numbers[2], numbers[5]) == (LEAF, IS_BROKEN):
                return self.block_of[numbers[0]]

    def on_marks_found(self, word, mask, log):
        if not all(self.s.bit(page) for page in self.pages(word, mask)):
            raise Mismatch('a mark is found that is not in the model')
        self.marks(word, mask)

    def on_marks_set(self, word, mask, log):
        self.marks(word, mask)

    def marks(self, word, mask):
        s, at = self.s, self.at
        for page in self.pages(word, mask):
            if self.is_at(MARKS):
                self.run.step('mark', at.fault, page)
            elif at.recovery is not None and s.rpc(at.recovery) == MARKS_ALL:
                self.run.step('mark_all', at.recovery, page)
            elif self.thread == self.enabler and s.epc() == FLAGGED and s.initially_set():
                self.run.step('enabling_sets', page)
            else:
                raise Mismatch('a mark that no step makes')

    # Harvests.

    def on_harvest_begins(self, *masks):
        self.at.harvest = self.new('Harvest')
        self.at.mask = dict(zip(WORDS, masks)) if masks else None

    def on_marks_taken(self, word, marks, log):
        run, s, at = self.run, self.s, self.at
        named = self.pages(word, -1 if at.mask is None or at.harvest is None else at.mask.get(word, 0))
        taken = self.pages(word, marks)
        if taken != [page for page in named if s.bit(page)]:
            raise Mismatch(f'the engine takes {taken}')
        for page in taken:
            run.step(*(('wipe', page) if at.harvest is None else ('take', at.harvest, page)))

    def on_harvest_ends(self):
        run, s, harvest = self.run, self.s, self.at.harvest
        if s.hpc(harvest) == TAKES:
            raise Mismatch('a harvest returns without its flush')
        if s.hpc(harvest) == FLUSHES:
            run.step('return', harvest)
        run.remove('Harvest', harvest)
        self.at.harvest = None

    # Flushes.

    def on_flush_begins(self, start, end):
        s, harvest = self.s, self.at.harvest
        if harvest is not None and s.hpc(harvest) == TAKES:
            self.run.step('turns_are_over', harvest)
        elif self.thread == self.enabler and s.epc() == FLAGGED and (start, end) == (0, NR_PAGES):
            self.run.step('all_armed')
        self.begin_flush(start, end)

    def flush_step(self):
        s, harvest = self.s, self.at.harvest
        if harvest is not None:
            return ('flush', harvest) if s.hpc(harvest) == FLUSHES else None
        return ('enabling_flushes',) if self.thread == self.enabler and s.epc() == ARMED else None

    # CPUs.

    def has_cached(self, cpu):
        return cpu in self.uses

    def on_cpu_translates(self, cpu, gfn, cell):
        self.must_be_over()
        self.uses.add(cpu)
        self.run.step('fill_tlb', cpu, gfn)

    def on_cpu_forgets(self, cpu, gfn):
        self.uses.discard(cpu)
        for _, step in self.flushes.pop(cpu, []):
            self.run.step(*step, cpu)
