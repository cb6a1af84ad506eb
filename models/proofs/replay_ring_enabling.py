"""Replays rings that are enabled beside memslots that begin to log, in `ring_enabling.py`. See `replay.py`.

A memslot is a block. The call that enables rings looks at the memslots in turn.
"""
import replay_dirty_log
from page_tables import LEAF
from replay import LEVEL_BITS, NR_ROOT_PTES, Mismatch
from replay_dirty_log import GUEST_MAY_WRITE
from replay_dirty_rings import LeavesOfLog
from ring_enabling import FLAGGED, FLUSHES, GAVE, LOGGED, ON, OUT, PROTECTS, RingEnabling


class Thread(replay_dirty_log.Thread):
    def __init__(self):
        super().__init__()
        self.openers = []               # its vCPU without a ring, its recovery
        self.slot = None                # that its call changes
        self.enables, self.nr_looked = False, 0


class Schedule(LeavesOfLog):
    model, of_thread = RingEnabling, Thread
    ignored = {*LeavesOfLog.ignored, 'published', 'withdrawn', 'marks-found', 'marks-set', 'summarized', 'ring-first-read',
               'ring-entry-written'}
    # W is lost to other operations.
    not_shown = {'drop_write'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        for slot in range(NR_ROOT_PTES):
            run.add('Slot', slot)
        for page in self.used:
            run.fix('slot', (page,), page >> LEVEL_BITS)

    # Calls that push nothing.

    def on_without_rings_begins(self):
        self.at.openers.append(self.new('Opener'))
        self.run.step('enter', self.at.openers[-1])

    def on_without_rings_ends(self):
        opener = self.at.openers.pop()
        self.run.step('leave', opener)
        self.run.remove('Opener', opener)

    # Rings are enabled.

    def on_rings_enabled(self):
        self.run.step('enable_rings')
        self.at.enables = True

    def on_rings_read(self, are_enabled):
        if bool(are_enabled) != self.s.rings():
            raise Mismatch(f'there are rings: {bool(are_enabled)}; in the model {self.s.rings()}')
        if self.at.slot is not None and self.s.spc(self.at.slot) == FLAGGED:
            self.run.step('read_rings', self.at.slot)

    def on_slots_read(self):
        if self.at.enables and self.at.nr_looked < NR_ROOT_PTES:
            self.run.step('look_at_memslot', self.at.nr_looked)
            self.at.nr_looked += 1
        elif self.is_at(GAVE):
            self.run.step('read_flag', self.at.fault)
            if self.is_at(OUT):
                self.end_fault()

    # A memslot begins to log.

    def on_memslot_begins(self, kind, slot, start, end, backing):
        self.at.slot = slot

    def on_slots_published(self):
        if self.at.slot is not None:
            self.run.step('publish_flag', self.at.slot)

    def on_call_ends(self, is_ok):
        s, at = self.s, self.at
        if at.enables:
            self.run.step('rings_enabled')
            at.enables = False
        elif at.slot is not None:
            if s.spc(at.slot) == FLUSHES:
                self.run.step('memslot_logs', at.slot)
            if s.spc(at.slot) != ON:
                raise Mismatch(f'the change of a memslot returns at {s.spc(at.slot)}')
            at.slot = None

    # Leaves.

    def on_fault_looks(self, gfn):
        self.end_fault()

    def leaf_replaced(self, page, kind, b):
        run, at = self.run, self.at
        had, has = self.s.writable(page), kind == LEAF and b & GUEST_MAY_WRITE
        if has and not had and at.openers:
            run.step('open', at.openers[-1], page)
        elif has and not had:
            at.fault = self.new('Fault')
            run.fix('page', (at.fault,), page)
            run.step('restore_write', at.fault)
        elif not has:
            self.protects(page)
        self.show_leaf(page, kind, b)

    def begins_to_protect(self):
        """Without all marks from the beginning, nothing depends on whether there are rings."""
        s, slot = self.s, self.at.slot
        if slot is not None and s.spc(slot) == FLAGGED and not s.initially_set():
            self.run.step('read_rings', slot)

    def protects(self, page):
        """The thread has cleared W of the leaf, or found it clear or no leaf there."""
        s, at, slot = self.s, self.at, self.s.slot(page)
        if at.slot == slot:
            self.begins_to_protect()
            if s.spc(slot) == PROTECTS:
                self.run.step('memslot_protects', page)
        elif at.enables and s.found(slot) == LOGGED:
            self.run.step('enabling_protects', page)

    # Flushes.

    def flushed_slot(self):
        """The memslot that the thread protects."""
        return self.at.nr_looked - 1 if self.at.enables else self.at.slot

    def on_flush_begins(self, start, end):
        s, slot = self.s, self.flushed_slot()
        if slot is None:
            return
        self.begins_to_protect()
        for page in [p for p in self.used if s.slot(p) == slot]:
            if s.writable(page) and not (s.edone(page) if self.at.enables else s.sdone(page)):
                raise Mismatch(f'page {page} stays writable')
            if not s.writable(page):
                self.protects(page)
        if not self.at.enables:
            self.run.step('memslot_protected', slot)
        self.begin_flush(start, end)

    def flush_step(self):
        return 'enabling_flushes' if self.at.enables else 'memslot_flushes', self.flushed_slot()

    def must_flush(self, page):
        return self.s.slot(page) == self.flushed_slot()

    # Pushes, and CPUs.

    def on_ring_pushed(self, ring, index):
        self.run.step('push', self.at.fault)
        self.end_fault()

    def on_cpu_writes(self, cpu, gfn):
        pass                            # what may be written counts, not what is
