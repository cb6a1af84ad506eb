"""Replays faults, and memslots that are made, moved, changed, deleted and freed, in `memslots.py`. See `replay.py`.

The model has PTEs of one level. So each block has a page-table page from the beginning, and keeps it: the page of
the last PTE stays mapped, and is no page of the model.
"""
import collections
import replay
from memslot_steps import (CHANGE, CHANGED, CLEAR, CREATE, FOUND, HAS_PLACE, HOST, IDLE, IN_FLIGHT, KEPT, LOCKED,
                           LOOKED, NUMBERED, OUT, OUTSIDE, OVER, RESOLVED, WITHDRAWN)
from memslots import Memslots
from page_tables import EMPTY, LEAF, TABLE
from replay import LEVEL_BITS, NR_CPUS, NR_PTES, PTE_BYTES, Mismatch

PAGES = [p for p in replay.PAGES if p % NR_PTES != NR_PTES - 1]
FRAME_BITS = 24                             # of a frame of the host, below the number of its backing
MOVE_BITS = 13                              # of the first frame of a page after a number of moves, less one
INVALIDATES, MAKES, DELETES, CHANGES = range(4)


class Thread:
    def __init__(self):
        self.fault = self.call = None
        self.order = None                   # (kind, number of the memslot, pages, number of the backing) of its call
        self.flushes = False


class Schedule(replay.Schedule):
    model, of_thread = Memslots, Thread
    ignored = {'cpu-reads', 'pte-made', 'marks-found', 'marks-set', 'summarized', 'summary-skipped', 'summary-cleared',
               'marks-taken'}
    not_shown = set()

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, events)
        assert nr_levels == 2
        self.pages, self.nr_moves = {}, collections.Counter()
        self.slots, self.backings = {}, {}      # {address: memslot}, {memslot: number of its backing}
        self.have_read_ranges = set()
        for page in PAGES:
            run.add('Page', page)
        for cpu in range(NR_CPUS):
            run.add('Cpu', cpu)

    def place(self, slot, pages):
        """The memslot at these pages."""
        place = (slot, *pages)
        if place not in self.run.elements['Place']:
            self.run.add('Place', place)
            self.run.fix('slot', (place,), slot)
            for page in pages:
                self.run.fix('has', (place, page), True)
        return place

    def place_at(self, page):
        s = self.s
        return next((d for d in self.run.elements['Place'] if s.stands(d) and s.has(d, page)), None)

    def place_of_id(self, number):
        s = self.s
        return next((d for d in self.run.elements['Place'] if s.stands(d) and s.id(s.slot(d)) == number), None)

    def answer(self, page, pfn):
        """(number of the backing, how often the host had moved the page)."""
        return pfn >> FRAME_BITS, ((pfn & (1 << FRAME_BITS) - 1) - page >> MOVE_BITS) - 1

    def show(self, cell, kind, a):
        s, page = self.s, self.pages[cell]
        if kind == EMPTY:
            is_same = not s.leaf(page) and s.number(page) == a
        elif kind == LEAF:
            is_same = s.leaf(page) and s.answer(page)[1:] == self.answer(page, a)
        else:
            is_same = False
        if not is_same:
            raise Mismatch(f'the engine has {kind, a} for page {page}; the model: leaf {s.leaf(page)}, '
                           f'number {s.number(page)}, answer {s.answer(page)}')

    # A fault.

    def on_fault_looks(self, gfn):
        self.end_fault()
        self.at.fault = self.new('Fault')
        self.run.fix('page', (self.at.fault,), gfn)

    def end_fault(self):
        fault, self.at.fault = self.at.fault, None
        if fault is not None:
            if self.s.fpc(fault) != IDLE:
                self.run.step('give_up', fault)
            self.run.remove('Fault', fault)
            self.have_read_ranges.discard(fault)

    def is_fault_at(self, phase):
        return self.at.fault is not None and self.s.fpc(self.at.fault) == phase

    def on_ranges_read(self, gfn):
        if self.is_fault_at(LOOKED):
            self.run.step('pass_ranges', self.at.fault)
            self.have_read_ranges.add(self.at.fault)

    def on_ranges_found(self, gfn, level):
        if self.is_fault_at(LOOKED) and level != 0:
            if not all(self.s.passed(self.at.fault, i) for i in self.run.elements['Call']):
                # A place was withdrawn while the fault read it.
                self.run.step('pass_ranges', self.at.fault)
            self.run.step('clear', self.at.fault)

    def on_hazard_set(self, thing):
        if self.at.fault is None:
            return
        s, fault = self.s, self.at.fault
        if self.slots.get(thing) != s.slot(s.place(fault)):
            raise Mismatch('a hazard pointer protects another memslot')
        self.run.step('protect', fault)

    def on_hazard_cleared(self):
        if self.at.fault is not None and HAS_PLACE < self.s.fpc(self.at.fault) < RESOLVED:
            raise Mismatch('the hazard pointer is cleared before the host has answered')

    def on_fault_unpinned(self):
        if self.is_fault_at(KEPT):
            self.run.step('unpin', self.at.fault)
        elif self.at.fault is not None and self.s.fpc(self.at.fault) < OUTSIDE:
            self.end_fault()

    def on_host_answers(self, gfn, pfn, is_writable):
        run, s, fault = self.run, self.s, self.at.fault
        if fault is None:
            return                          # a recovery asks for the size alone
        nr, nr_moves = self.answer(gfn, pfn)
        place = s.place(fault)
        if self.backings[s.slot(place)] != nr:
            raise Mismatch(f'the fault resolves in the backing {nr}')
        answer = (place, nr, nr_moves)
        run.add('Answer', answer)
        run.fix('place_of', (answer,), place)
        if nr_moves == self.nr_moves[gfn] and not s.allows(gfn, answer):
            run.step('host_allows', gfn, answer)
        run.step('resolve', fault, answer)

    # A call.

    def on_memslot_begins(self, kind, number, start, end, backing):
        run, at = self.run, self.at
        call = at.call = self.new('Call')
        at.order = (kind, number, tuple(p for p in PAGES if start <= p < end), backing)
        run.fix('kind', (call,), HOST if kind == INVALIDATES else CHANGE)
        run.fix('is_deletion', (call,), kind == DELETES)
        run.fix('id_of', (call,), run.add('Id', number))
        for page in at.order[2] if kind == INVALIDATES else ():
            run.fix('host_range', (call, page), True)
        for fault in self.have_read_ranges:
            # It was not in flight then.
            run.fix('passed', (fault, call), True)

    def on_slots_read(self):
        run, s, at = self.run, self.s, self.at
        if self.is_fault_at(CLEAR):
            place = self.place_at(s.page(at.fault))
            if place is None:
                self.end_fault()
            else:
                run.step('find', at.fault, place)
        if at.call is None or s.kind(at.call) != CHANGE:
            return
        kind, number, pages, _ = at.order
        place = self.place_of_id(number)
        if s.ipc(at.call) == OUT:
            if place is not None:
                run.step('find_slot', at.call, place)
            elif kind == MAKES:
                run.fix('kind', (at.call,), CREATE)
        elif s.ipc(at.call) == LOCKED:
            if kind == CHANGES:
                target = self.place(s.found(at.call), pages)
                run.fix('target', (at.call,), target)
                run.fix('is_move', (at.call,), target != place)
            run.step('read_again', at.call, place)

    def on_slot_claimed(self, slot):
        if self.slots.get(slot) != self.s.found(self.at.call):
            raise Mismatch('another memslot is claimed')
        self.run.step('claim', self.at.call)

    def on_slot_made(self, address):
        run, call = self.run, self.at.call
        _, number, pages, backing = self.at.order
        slot = self.slots[address] = self.new('Slot')
        self.backings[slot] = backing
        run.fix('id', (slot,), number)
        for fault in run.elements['Fault']:
            # The guard is from before its deletion.
            run.fix('may_find', (fault, slot), LOOKED <= self.s.fpc(fault) <= KEPT)
        run.fix('target', (call,), self.place(slot, pages))
        run.step('make_slot', call)

    def on_set_built(self):
        run, s, call = self.run, self.s, self.at.call
        _, number, pages, _ = self.at.order
        others = [d for d in run.elements['Place'] if s.stands(d) and s.id(s.slot(d)) != number]
        is_vacant = not any(s.has(d, p) for d in others for p in pages)
        is_free = s.kind(call) != CREATE or self.place_of_id(number) is None
        if (is_vacant or not run.model.adds(s, call)) and is_free:
            run.step('build', call)
        # Else the change is refused.

    def on_slots_published(self):
        self.run.step('publish_set', self.at.call)

    def on_slot_released(self, address):
        self.over()

    def over(self):
        """The claim is dropped, after the change or without it."""
        s, call = self.s, self.at.call
        if s.ipc(call) in (CHANGED, WITHDRAWN):
            self.run.step('return', call)
        elif s.ipc(call) != OVER:
            self.run.step('fail', call)

    def on_call_ends(self, is_ok):
        s, at = self.s, self.at
        if s.ipc(at.call) not in (OUT, FOUND, OVER):
            self.over()
        if is_ok and s.ipc(at.call) != OVER:
            raise Mismatch('a call returns in the midst of its steps')
        at.call = None

    def on_published(self, place, start, end):
        s, call = self.s, self.at.call
        self.run.step('publish_range', call)
        if [p for p in PAGES if start <= p < end] != [p for p in PAGES if self.run.model.covers(s, call, p)]:
            raise Mismatch(f'the range {start}..{end} is in flight')

    def on_number_taken(self, number):
        if self.at.call is None or self.s.ipc(self.at.call) != IN_FLIGHT:
            raise Mismatch('no step takes a number')
        self.run.step('take_number', self.at.call)
        self.on_number_read(number)

    def on_number_read(self, number):
        if self.s.counter() != number:
            raise Mismatch(f'the counter is {number}; in the model {self.s.counter()}')

    def on_withdrawn(self, place):
        run, s, call = self.run, self.s, self.at.call
        if s.kind(call) == HOST:
            run.step('host_done', call)
        if s.ipc(call) != CHANGED:
            return run.step('fail', call)   # the new set was refused
        run.step('withdraw', call)
        if s.kind(call) == HOST or run.model.deletes(s, call):
            run.step('return', call)

    def on_host_changes(self, gfn, pfn):
        self.nr_moves[gfn] += 1
        for answer in self.run.elements['Answer']:
            if self.s.allows(gfn, answer):
                self.run.step('host_changes', self.at.call, gfn, answer)

    def on_flush_begins(self, start, end):
        s, at = self.s, self.at
        if at.call is None or s.ipc(at.call) != NUMBERED:
            return                          # of a memslot that begins to log
        if not all(start <= p < end for p in PAGES if self.run.model.covers(s, at.call, p)):
            return
        at.flushes = True
        self.run.step('walked', at.call)
        self.begin_flush(('flush', at.call))

    def on_flush_ends(self):
        if self.at.flushes:
            self.at.flushes = False
            self.end_flush()
            self.run.step('zapped', self.at.call)

    # A reclaim.

    def on_announcements_read(self):
        for name, numbers in self.later():
            if name == 'announcements-read':
                break
            if name == 'slot-freed':
                self.run.step('first_look', self.slots[numbers[0]])

    def on_slot_freed(self, address):
        self.run.step('free', self.slots.pop(address))

    # PTEs.

    def on_cpu_translates(self, cpu, gfn, cell):
        if gfn in PAGES:
            return self.run.step('fill', cpu, gfn)
        # Another page of a block shows where the page-table page is.
        table = cell - PTE_BYTES * (gfn % NR_PTES)
        self.pages.update({table + PTE_BYTES * (p % NR_PTES): p for p in PAGES if p >> LEVEL_BITS == gfn >> LEVEL_BITS})

    def on_pte_read(self, cell, level, kind, a, b):
        if cell not in self.pages:
            return
        self.show(cell, kind, a)
        s, at, page = self.s, self.at, self.pages[cell]
        if self.is_fault_at(IDLE) and kind == EMPTY:
            if s.page(at.fault) != page:
                raise Mismatch(f'the fault on {s.page(at.fault)} reads the PTE of {page}')
            self.run.step('look', at.fault)
        elif at.call is not None and s.ipc(at.call) == NUMBERED and kind == EMPTY and a >= s.own(at.call):
            if not s.visited(at.call, page):
                self.run.step('zap', at.call, page)

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if cell not in self.pages:
            if (old, new) != (TABLE, TABLE):
                raise Mismatch(f'no step replaces {old} by {new}')
            return                          # it is protected for the log, or not any more
        self.show(cell, old, old_a)
        if (old, new) == (EMPTY, LEAF):
            self.run.step('install', self.at.fault)
            self.end_fault()
        elif (old, old_a) == (new, a):
            pass                            # rights; or W was cleared where no leaf was any more
        elif new == EMPTY:
            self.run.step('zap', self.at.call, self.pages[cell])
        else:
            raise Mismatch(f'no step replaces {old} by {new}')
        self.show(cell, new, a)
