"""Replays zaps beside what `replay_dirty_bits.py` has, in `harvest_beside_zap.py`. See `replay.py`.

Each invalidation has one page, so it is one zap.
"""
import replay_dirty_bits
from harvest_beside_zap import EXCHANGED, FLUSHES, MARKED, MARKS_AGAIN, OUT, READ, REPORTED, WILL_MARK, HarvestBesideZap
from page_tables import EMPTY, LEAF, TABLE
from replay import Mismatch
from replay_dirty_log import GUEST_MAY_WRITE


class Schedule(replay_dirty_bits.Schedule):
    model = HarvestBesideZap

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        self.zaps, self.places = {}, {}     # of each thread, and of each place of a range in flight

    @property
    def zap(self):
        return self.zaps.get(self.thread)

    def zap_is_at(self, *counters):
        return self.zap is not None and self.s.zpc(self.zap) in counters

    def on_published(self, place, start, end):
        zap = self.zaps[self.thread] = self.places[place] = self.new('Zap')
        self.run.fix('zaps', (zap,), start)

    def on_withdrawn(self, place):
        zap = self.places.pop(place)
        self.run.step('zap_end', zap)
        self.run.remove('Zap', zap)
        del self.zaps[self.thread]

    # Its page.

    def on_pte_read(self, cell, level, kind, a, b):
        super().on_pte_read(cell, level, kind, a, b)
        if self.zap is None or (kind == TABLE if cell in self.blocks else self.page_of[cell] != self.s.zaps(self.zap)):
            return
        if not self.zap_is_at(OUT):
            return
        if kind == LEAF and b & GUEST_MAY_WRITE:
            self.run.step('zap_read', self.zap)
            if not self.s.zdirty(self.zap):
                self.run.step('zap_read_flag', self.zap)
        elif kind == EMPTY and self.leaves(cell):
            self.run.step('zap_finds_nothing', self.zap)

    def on_pte_kept(self, cell, level, kind, a, b):
        if self.zap_is_at(REPORTED) and self.page_of.get(cell) == self.s.zaps(self.zap):
            self.show_leaf(self.page_of[cell], kind, b)
            self.run.step('zap_fails', self.zap)

    def leaves(self, cell):
        """Whether the thread goes on to another PTE next, and does not exchange this one or try to."""
        for name, numbers in self.later():
            if name in ('pte-read', 'pte-replaced', 'pte-kept', 'flush-begins'):
                return numbers[0] != cell

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        is_zapped = self.zap is not None and (old, new) in ((EMPTY, EMPTY), (LEAF, EMPTY))
        if is_zapped and cell in self.page_of:
            self.show_leaf(self.page_of[cell], old, old_b)
        if not is_zapped:
            super().on_pte_replaced(cell, level, old, old_a, old_b, new, a, b)
        elif old == LEAF and old_b & GUEST_MAY_WRITE:
            self.run.step('zap_exchange', self.zap)
            self.show_leaf(self.page_of[cell], new, b)
        elif self.zap_is_at(OUT):
            self.run.step('zap_finds_nothing', self.zap)

    # Marks.

    def on_slots_read(self):
        if self.zap_is_at(READ):
            self.run.step('zap_read_flag', self.zap)
        elif self.zap_is_at(EXCHANGED):
            self.run.step('zap_read_flag_again', self.zap)
        else:
            super().on_slots_read()

    def marks(self, by_fault, by_harvest, word, mask):
        if self.zap is None:
            return super().marks(by_fault, by_harvest, word, mask)
        page = self.s.zaps(self.zap)
        if self.pages(word, mask) != [page] or (by_fault == 'find_marked' and not self.s.bit(page)):
            raise Mismatch('a mark that no step makes')
        self.run.step('zap_mark' if self.zap_is_at(WILL_MARK) else 'zap_mark_again', self.zap)

    def on_leaf_zapped(self, gfn, is_dirty):
        s, zap = self.s, self.zap
        if self.zap_is_at(MARKED):
            self.run.step('zap_report', zap)
            if bool(is_dirty) != (s.zdirty(zap) or s.zwas_dirty(zap)):
                raise Mismatch(f'the host hears that page {gfn} is dirty: {is_dirty}')
        elif is_dirty or not (self.zap is None or self.zap_is_at(OUT)):
            # Else it is a leaf without W, which a zap or a fault replaces.
            raise Mismatch(f'the host hears of page {gfn} too early')

    # Flushes.

    def flush_step(self):
        return ('zap_flush', self.zap) if self.zap_is_at(FLUSHES) else super().flush_step()

    def must_flush(self, page):
        return page == self.s.zaps(self.zap) if self.zap is not None else super().must_flush(page)
