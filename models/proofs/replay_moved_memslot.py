"""Replays a memslot that logs, moves and is deleted beside faults and harvests, in `moved_memslot.py`. See `replay.py`.

The memslot has two pages, and comes to places of which none overlaps another. A deletion moves it to where no page
is. The model takes nothing out of the cache of a CPU but by a flush.
"""
import replay_dirty_log
from moved_memslot import ARMED, FLAGGED, FLUSHES, GAVE, MARKS, OUT, PROTECTS, TAKES, UNBEGUN, MovedMemslot
from page_tables import EMPTY, LEAF, TABLE
from replay import NR_CPUS, PTE_BYTES, Mismatch
from replay_dirty_log import GUEST_MAY_WRITE, Log

NR_PAGES = 2                                # of the memslot
NOWHERE = 'nowhere'
DELETES = 2


def place_and_page(gfn):
    return gfn - gfn % NR_PAGES, gfn % NR_PAGES


class Thread(replay_dirty_log.Thread):
    def __init__(self):
        super().__init__()
        self.change = self.number = None    # its call that changes the memslot, and the first number of that
        self.mask = None                    # of its harvest


class Schedule(Log):
    model, of_thread = MovedMemslot, Thread
    takes = PROTECTS
    ignored = {*Log.ignored, 'withdrawn', 'summarized', 'summary-skipped', 'summary-cleared'}
    not_shown = set()

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        for gfn in self.used:
            run.add('Place', place_and_page(gfn)[0])
        run.add('Place', NOWHERE)
        self.bitmaps, self.uses = {}, {}    # {address: bitmap}, {CPU: the frame that it writes}
        bitmap = self.new('Bitmap')
        run.fix('place', (), 0)
        run.fix('bitmap', (), bitmap)
        run.fix('used', (bitmap,), True)

    def pages_of_model(self):
        return range(NR_PAGES)

    def is_writable(self, gfn):
        return bool(self.s.writable(*place_and_page(gfn)))

    def show_leaf(self, gfn, kind, b):
        if self.is_writable(gfn) != bool(kind == LEAF and b & GUEST_MAY_WRITE):
            raise Mismatch(f'page {gfn} is writable in the model: {self.is_writable(gfn)}')

    def must_be_in(self, log, bitmap):
        if self.bitmaps.get(log) != bitmap:
            raise Mismatch(f'the engine uses {self.bitmaps.get(log)}; the model {bitmap}')

    # Leaves.

    def on_fault_looks(self, gfn):
        self.end_fault()

    def on_pte_read(self, cell, level, kind, a, b):
        below = self.blocks.get(cell, []) if kind != TABLE else []
        for gfn in [self.page_of[cell]] if cell in self.page_of else below:
            self.show_leaf(gfn, kind, b)
            self.has_no_write(gfn, kind, a)

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if cell in self.blocks and new == TABLE:
            for n, gfn in enumerate(self.blocks[cell]):
                self.page_of[a + PTE_BYTES * n] = gfn
                self.leaf_replaced(gfn, *self.made[a + PTE_BYTES * n])
        elif cell in self.blocks or cell in self.page_of:
            for gfn in [self.page_of[cell]] if cell in self.page_of else self.blocks[cell]:
                self.show_leaf(gfn, old, old_b)
                self.leaf_replaced(gfn, new, a, b)
        else:
            raise Mismatch(f'no step replaces {old} by {new}')

    def leaf_replaced(self, gfn, kind, a, b):
        if kind == LEAF and b & GUEST_MAY_WRITE and not self.is_writable(gfn):
            fault = self.at.fault = self.new('Fault')
            place, page = place_and_page(gfn)
            self.run.fix('place_of', (fault,), place)
            self.run.fix('page', (fault,), page)
            self.run.step('restore_write', fault)
        self.has_no_write(gfn, kind, a, is_new=True, b=b)
        self.show_leaf(gfn, kind, b)

    def has_no_write(self, gfn, kind, a, is_new=False, b=0):
        """The thread has taken W from the leaf, or has found none."""
        s, at, (place, page) = self.s, self.at, place_and_page(gfn)
        if (kind == LEAF and b & GUEST_MAY_WRITE) or (self.is_writable(gfn) and not is_new):
            return
        if self.moves():
            if place == s.place() and kind == EMPTY and at.number is not None and a >= at.number:
                self.run.step('zap', page)
        elif at.harvest is not None:
            if s.hpc(at.harvest) == PROTECTS and s.hplace(at.harvest) == place and s.holds(at.harvest, page):
                self.run.step('protect', at.harvest, page)
        elif self.arms() and place == s.place():
            self.run.step('enabling_protects', page)

    # Faults mark.

    def on_slots_read(self):
        run, s, at = self.run, self.s, self.at
        if self.is_at(GAVE):
            if next(self.later(), ('',))[0] != 'slots-read':    # the look that decides
                run.step('find_bitmap', at.fault)
                if self.is_at(OUT):
                    self.end_fault()
        elif at.harvest is not None and s.hpc(at.harvest) == UNBEGUN:
            if self.takes_next():
                run.step('find', at.harvest)
        elif at.harvest is not None and s.hpc(at.harvest) == TAKES:
            run.step('look_up', at.harvest)

    def on_marks_found(self, word, mask, log):
        self.marks('find_marked', mask, log)

    def on_marks_set(self, word, mask, log):
        self.marks('set_bit', mask, log)

    def marks(self, step, mask, log):
        s, at = self.s, self.at
        for page in self.marked(mask):
            if self.is_at(MARKS):
                self.must_be_in(log, s.fbitmap(at.fault))
                if page != s.page(at.fault):
                    raise Mismatch(f'a fault marks page {page}')
                self.run.step(step, at.fault)
            elif at.change is not None and s.epc() == FLAGGED and s.initially_set():
                self.must_be_in(log, s.bitmap())
                self.run.step('enabling_sets', page)
            else:
                raise Mismatch('a mark that no step makes')
        self.end_fault()

    def marked(self, mask):
        return [page for page in range(NR_PAGES) if mask >> page & 1]

    # Harvests.

    def on_harvest_begins(self, *masks):
        self.at.harvest, self.at.mask = self.new('Harvest'), masks[0] if masks else None

    def takes_next(self):
        """Whether the thread looks for marks before it looks at the memslots again."""
        kinds = {'slots-read', 'summary-skipped', 'marks-taken', 'harvest-ends'}
        return next(name for name, _ in self.later() if name in kinds) in ('summary-skipped', 'marks-taken')

    def on_marks_taken(self, word, marks, log):
        run, s, harvest = self.run, self.s, self.at.harvest
        if harvest is None:
            self.must_be_in(log, s.bitmap())
            for page in self.marked(marks):
                run.step('wipe', page)
            return
        bitmap = s.hbitmap(harvest)
        self.must_be_in(log, bitmap)
        wanted = self.marked(-1 if self.at.mask is None else self.at.mask)
        expected = [page for page in wanted if s.bit(bitmap, page)]
        if self.marked(marks) != expected:
            raise Mismatch(f'the engine takes {self.marked(marks)}; the model {expected}')
        for page in expected:
            run.step('take', harvest, page)

    def end_turns(self):
        s, harvest = self.s, self.at.harvest
        for page in [p for p in range(NR_PAGES) if s.holds(harvest, p) and not s.rearmed(harvest, p)]:
            # The walk has passed it without a leaf that it could change.
            if s.writable(s.hplace(harvest), page):
                raise Mismatch(f'page {page} stays writable')
            self.run.step('protect', harvest, page)
        self.run.step('turn_is_over', harvest)

    def on_harvest_ends(self):
        run, s, harvest = self.run, self.s, self.at.harvest
        if s.hpc(harvest) == TAKES:
            run.step('look_up', harvest)
        if s.hpc(harvest) == PROTECTS:
            # Nothing was taken, so nothing is flushed.
            if any(s.holds(harvest, p) for p in range(NR_PAGES)):
                raise Mismatch('a harvest returns without its flush')
            self.end_turns()
            for cpu in range(NR_CPUS):
                run.step('flush', harvest, cpu)
        if s.hpc(harvest) == FLUSHES:
            run.step('return', harvest)
        run.remove('Harvest', harvest)
        self.at.harvest = None

    # Changes of the memslot.

    def moves(self):
        return self.at.change is not None and self.s.moving()

    def arms(self):
        s = self.s
        return self.at.change is not None and s.epc() == FLAGGED and not s.initially_set()

    def on_memslot_begins(self, kind, number, start, end, backing):
        self.at.change = kind

    def on_published(self, place, start, end):
        if (start, end) != (self.s.place(), self.s.place() + NR_PAGES):
            raise Mismatch(f'the range {start}..{end} is in flight')
        self.at.number = None
        self.run.step('begin_move')

    def on_number_taken(self, number):
        if self.moves() and self.at.number is None:
            self.at.number = number

    def on_slots_published(self):
        if self.at.change == DELETES:
            self.run.step('publish_place', NOWHERE, self.new('Bitmap'))

    def on_entry_published(self, start, logs, log):
        run, s = self.run, self.s
        if self.at.change is None:
            return                          # it is made
        before, has_log = s.bitmap(), s.bitmap() in self.bitmaps.values()
        begins = logs and not s.flag()
        if s.moving() and begins:
            run.step('publish_place_and_flag', start)
        elif s.moving() and s.flag() and not logs:
            run.step('publish_place_and_disable', start)
        elif s.moving():
            bitmap = self.new('Bitmap')
            run.step('publish_place', start, bitmap)
            if s.flag():
                if self.bitmaps.get(log) == before:
                    raise Mismatch('the memslot keeps its bitmap')
                self.bitmaps[log] = bitmap
            else:
                run.remove('Bitmap', bitmap)
        elif begins:
            run.step('publish_flag')
        elif s.flag() and not logs:
            run.step('disable')
        if begins and not has_log:
            self.bitmaps[log] = before
            for page in range(NR_PAGES) if s.initially_set() else ():
                run.step('enabling_sets', page)
        if has_log or s.flag():
            self.must_be_in(log, s.bitmap())
        if (start, bool(logs)) != (s.place(), s.flag()):
            raise Mismatch(f'the memslot is at {start}, and logs: {logs}')

    def on_call_ends(self, is_ok):
        s = self.s
        if s.epc() == FLAGGED and s.initially_set():
            self.run.step('all_armed')
        if s.epc() in (FLAGGED, ARMED):
            self.run.step('enabled')
        if s.moving():
            raise Mismatch('a move returns in the midst of its steps')
        self.at.change = None

    # Flushes.

    def on_flush_begins(self, start, end):
        if self.arms():
            for page in [p for p in range(NR_PAGES) if not self.s.armed(p)]:
                if self.s.writable(self.s.place(), page):
                    raise Mismatch(f'page {page} stays writable')
                self.run.step('enabling_protects', page)
            self.run.step('all_armed')
        elif self.at.harvest is not None and self.s.hpc(self.at.harvest) == PROTECTS:
            self.end_turns()
        self.begin_flush(start, end)

    def flush_step(self):
        if self.moves():
            return ('move_flushes',)
        if self.at.harvest is not None:
            return 'flush', self.at.harvest
        return ('enabling_flushes',) if self.at.change is not None and self.s.epc() == ARMED else None

    def must_flush(self, gfn):
        s, harvest, (place, page) = self.s, self.at.harvest, place_and_page(gfn)
        if harvest is not None:
            return s.hplace(harvest) == place and s.holds(harvest, page)
        return place == s.place()

    # CPUs.

    def has_cached(self, cpu):
        return cpu in self.uses

    def on_cpu_translates(self, cpu, gfn, cell):
        self.uses[cpu] = gfn
        self.run.step('fill_tlb', cpu, *place_and_page(gfn))

    def on_cpu_writes(self, cpu, gfn):
        self.run.step('guest_write', cpu, *place_and_page(gfn))

    def on_cpu_forgets(self, cpu, gfn):
        del self.uses[cpu]
        for _, step in self.flushes.pop(cpu, []):
            self.run.step(*step, cpu)
