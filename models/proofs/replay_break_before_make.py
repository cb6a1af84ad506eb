"""Replays the same with break before make, in `break_before_make.py`: also what CPUs cache on their walks. See
`replay_invalidation.py`.

A CPU caches each PTE that it reads on a walk, and keeps it until it flushes.
"""
import replay_invalidation
from break_before_make import SPLITS, BreakBeforeMake
from invalidation import CLEAR, RESOLVED
from page_tables import BROKEN, EMPTY, LEAF, TABLE
from replay import PAGES, Mismatch


class Thread(replay_invalidation.Thread):
    def __init__(self):
        super().__init__()
        self.broke = None, None         # the PTE that it broke last, and the event
        self.flushes_broken = False     # its next flush is for that
        self.unflushed = None           # the PTE that its invalidation read last, if that is to be flushed
        self.has_flushed = None         # such a PTE that was flushed last: the invalidation, it, its number


class Schedule(replay_invalidation.Schedule):
    model, of_thread = BreakBeforeMake, Thread
    ignored = {'slots-read', 'slots-published'}
    not_shown = {'undo_leaf'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        for page in PAGES:
            run.fix('low', (page,), self.s.entry(root, page))
        self.parts = {}                 # {broken PTE: the page-table page that a split is to link there}
        self.never_linked = set()       # such page-table pages, also after an abort
        self.breaks = {}                # {PTE that was broken: the event, or None if it is not broken any more}

    def show(self, cell, kind, a, b):
        s = self.s
        if kind == BROKEN and s.kind(cell) == SPLITS:
            if self.parts.get(cell) != a or s.frozen(cell):
                raise Mismatch(f'the split of {cell} is to link {a}; in the model {self.parts.get(cell)}')
            return
        super().show(cell, kind, a, b)
        if kind == EMPTY and bool(s.unflushed(cell)) != bool(b):
            raise Mismatch(f'{cell} is unflushed: {bool(b)}; in the model {s.unflushed(cell)}')

    # CPUs.

    def on_cpu_reads(self, cpu, gfn, cell):
        self.run.step('cache_way' if self.s.kind(cell) == TABLE else 'cache_leaf', cpu, gfn, cell)

    # Flushes.

    def step_of_flush(self, pages):
        s, at = self.s, self.at
        if at.flushes_broken:
            at.flushes_broken = False
            cell, _ = at.broke
            return self.flush_of('flush_broken', cell, cell, pages)
        if at.fault is not None and CLEAR <= s.fpc(at.fault) <= RESOLVED and not s.on_leaf(at.fault):
            return self.flush_of('flush_before_make', at.fault, s.looked_at(at.fault), pages)
        if at.unflushed is not None:
            inv, cell, at.unflushed = at.invs[-1], at.unflushed, None
            at.has_flushed = inv, cell, s.znum(inv)
            return self.flush_of('flush_unflushed', inv, cell, pages)
        return super().step_of_flush(pages)

    def flush_of(self, step, element, cell, pages):
        """The flush is of all pages of a PTE."""
        if not set(self.pages_of(cell)) <= set(pages):
            raise Mismatch(f'{step} flushes {pages}, not all of {self.pages_of(cell)}')
        return step, element

    def is_broken_by(self, thread):
        """The PTE that the thread broke last is broken since then."""
        cell, event = self.threads[thread].broke
        return cell is not None and self.breaks[cell] == event

    def flush(self, thread, step, cpu):
        # If an abort was faster, nothing may rely on the flush: what CPUs have cached stays in the model.
        if step[0] != 'flush_broken' or self.is_broken_by(thread):
            super().flush(thread, step, cpu)

    # An invalidation.

    def invalidation_reads(self, cell, kind, a):
        super().invalidation_reads(cell, kind, a)
        s, inv = self.s, self.at.invs[-1]
        self.at.unflushed = None
        if not self.walks(inv) or kind != EMPTY or a >= s.inum(inv) or not s.unflushed(cell):
            return
        if self.at.has_flushed == (inv, cell, a) or self.run.model.covers_whole(s, inv, cell):
            return
        self.at.unflushed = cell
        # It may be read again before the flush.
        if not s.reads_unflushed(inv) or (s.zat(inv), s.znum(inv)) != (cell, a):
            self.at.has_flushed = None
            self.run.step('read_unflushed', inv, cell, self.page_of(inv, cell))

    # Changes of PTEs.

    def on_pte_read(self, cell, level, kind, a, b):
        # An abort reads what a split was to link.
        if self.is_known(cell) or cell & ~4095 not in self.never_linked:
            super().on_pte_read(cell, level, kind, a, b)

    def change(self, cell, level, change, a, b):
        old, new = change
        if new == BROKEN:
            self.breaks[cell], self.at.broke = self.nr, (cell, self.nr)
            self.at.flushes_broken = True
        elif old == BROKEN:
            self.breaks[cell] = None
        if change == (LEAF, BROKEN):
            self.parts[cell] = a
            self.never_linked.add(a)
            self.run.step('break_leaf', cell)
        elif change == (BROKEN, EMPTY) and self.s.kind(cell) == SPLITS:
            self.run.step('cancel_split', cell, a)
        elif change == (BROKEN, TABLE):
            self.never_linked.discard(a)
            self.link(cell, level, LEAF, a)
        else:
            super().change(cell, level, change, a, b)

    def refine(self, *parts):
        self.run.step('refine_anew' if len(parts) == 3 else 'refine', self.at.fault, *parts)

    def zap_higher(self, cell):
        return 'zap_empty' if self.s.kind(cell) == EMPTY else 'zap_higher'
