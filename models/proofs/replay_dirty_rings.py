"""Replays pushes, harvests, marks and resets of dirty rings, in `dirty_rings.py`. See `replay.py`.

A vCPU is the number of its CPU. An entry comes up when its page is written into its cell, and stays. When a reset
returns, its caller copies the pages of the entries that it has taken.
"""
import collections
from dirty_rings import CHOSE, FLUSHES, READ, SAW, WALKS, DirtyRings
from page_tables import LEAF, TABLE
from replay import NR_CPUS, PTE_BYTES, Mismatch
from replay_dirty_log import GUEST_MAY_WRITE, Log


class LeavesOfLog(Log):
    """What happens to the leaves of a log whose pages are pushed, for `leaf_replaced` and `protects`."""

    def on_pte_read(self, cell, level, kind, a, b):
        if cell in self.page_of:
            self.show_leaf(self.page_of[cell], kind, b)
        pages = self.blocks.get(cell, []) if kind != TABLE else []
        for page in [self.page_of[cell]] if cell in self.page_of else pages:
            if not self.s.writable(page):
                self.protects(page)

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if cell in self.blocks and new == TABLE:
            for n, page in enumerate(self.blocks[cell]):
                self.page_of[a + PTE_BYTES * n] = page
                kind, _, bits = self.made[a + PTE_BYTES * n]
                self.leaf_replaced(page, kind, bits)
        elif cell in self.page_of:
            self.show_leaf(self.page_of[cell], old, old_b)
            self.leaf_replaced(self.page_of[cell], new, b)
        else:
            raise Mismatch(f'no step replaces {old} by {new}')


class Schedule(LeavesOfLog):
    model = DirtyRings
    cpu = 'Vcpu'
    ignored = {*LeavesOfLog.ignored, 'fault-looks', 'slots-read'}
    # W is lost to operations beside resets.
    not_shown = {'drop_write'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        self.vcpus = {}                                 # by the address of their ring
        self.resets, self.marks = {}, {}                # of each thread
        self.taken = collections.defaultdict(list)      # by each thread, and not copied

    @property
    def reset(self):
        return self.resets.get(self.thread)

    def on_slots_published(self):
        pass                            # the memslot logs from the beginning

    def on_vcpu_has_ring(self, cpu, ring, nr_entries):
        self.vcpus[ring] = cpu
        self.run.fix('size', (), nr_entries)

    def entry(self, ring, index):
        return f'entry {index} of {self.vcpus[ring]}'

    def cell(self, ring, index):
        return f'cell {index % self.s.size()} of {self.vcpus[ring]}'

    # Leaves.

    def leaf_replaced(self, page, kind, b):
        had, has = self.s.writable(page), kind == LEAF and b & GUEST_MAY_WRITE
        if has and not had:
            self.run.step('restore_write', self.vcpu_of_push(), page)
        elif not has:
            self.protects(page)
        self.show_leaf(page, kind, b)

    def vcpu_of_push(self):
        """The vCPU of the thread, by what it pushes next."""
        for name, numbers in self.later():
            if name == 'ring-entry-written':
                return self.vcpus[numbers[0]]
        raise Mismatch('a page is writable that is pushed nowhere')

    def protects(self, page):
        """The thread has cleared W of the leaf, or found it clear or no leaf there."""
        s, reset = self.s, self.reset
        if reset is not None and any(
                s.takes(reset, e) and s.rpage(reset, e) == page for e in self.run.elements['Entry']):
            self.run.step('protect', reset, page)

    # Pushes.

    def on_ring_entry_written(self, ring, index, page):
        run, vcpu = self.run, self.vcpus[ring]
        entry, cell = run.add('Entry', self.entry(ring, index)), run.add('Cell', self.cell(ring, index))
        for name, value in ('ring', vcpu), ('index', index), ('cell', cell):
            run.fix(name, (entry,), value)
        run.step('write_cell', vcpu, entry, page)

    def on_ring_pushed(self, ring, index):
        self.run.step('push', self.vcpus[ring], self.entry(ring, index))

    # Harvests.

    def on_ring_harvest_begins(self, ring, next):
        self.end_harvest()
        harvest = self.at.harvest = self.new('Harvest')
        self.run.fix('hring', (harvest,), self.vcpus[ring])
        self.run.step('begin_harvest', harvest)
        self.show('harvested', self.s.hnext(harvest), next)

    def end_harvest(self):
        if self.at.harvest is not None:
            self.run.remove('Harvest', self.at.harvest)
            self.at.harvest = None

    def show(self, what, model, engine):
        if model != engine:
            raise Mismatch(f'{what}: {engine}; in the model {model}')

    def harvest_is_at(self, counter):
        return self.at.harvest is not None and self.s.hpc(self.at.harvest) == counter

    def on_ring_entry_chosen(self, ring, index):
        self.run.step('choose', self.at.harvest, self.entry(ring, index))

    def on_ring_entry_read(self, ring, index, page):
        run, s, entry = self.run, self.s, self.entry(ring, index)
        self.show(f'the page of {entry}', s.page(s.cell(entry)), page)
        if self.harvest_is_at(CHOSE):
            run.step('read_cell', self.at.harvest)
        elif self.reset is not None:
            run.step('read_entry', self.reset, entry)
        else:
            self.end_mark()
            mark = self.marks[self.thread] = self.new('Mark')
            run.fix('of', (mark,), entry)
            if not run.model.is_harvested(s, entry):
                run.step('entry_read', mark)

    def on_ring_mark_read(self, ring, index, mark):
        cell = self.cell(ring, index)
        self.show(f'the mark in {cell}', self.s.mark(cell), mark)
        if self.harvest_is_at(READ):
            self.run.step('look_at_mark', self.at.harvest)

    def on_ring_harvested(self, ring, index):
        if not self.s.hmarked(self.at.harvest):
            self.taken[self.thread].append(self.entry(ring, index))
        self.run.step('take', self.at.harvest)

    def on_ring_harvest_failed(self, ring, next):
        self.run.step('take_fails', self.at.harvest)
        self.show('harvested', self.s.hnext(self.at.harvest), next)

    # A caller marks single entries.

    def end_mark(self):
        if self.thread in self.marks:
            self.run.remove('Mark', self.marks.pop(self.thread))

    def on_ring_marked(self, ring, index):
        entry, mark = self.entry(ring, index), self.marks.get(self.thread)
        if mark is None or self.s.of(mark) != entry:
            raise Mismatch(f'{entry} is marked unread')
        if self.s.mark(self.s.cell(entry)) <= index:
            self.taken[self.thread].append(entry)
        self.run.step('mark', mark)

    # Resets.

    def on_reset_begins(self):
        self.end_harvest()
        self.end_mark()
        reset = self.resets[self.thread] = self.new('Reset')
        self.run.step('begin_reset', reset)

    def on_ring_first_read(self, ring, first):
        s, vcpu, mark = self.s, self.vcpus[ring], self.marks.get(self.thread)
        self.show('first', s.first(vcpu), first)
        if self.reset is not None and s.rpc(self.reset) == WALKS:
            self.run.step('read_first', self.reset, vcpu)
        elif mark is not None and s.mpc(mark) == SAW:
            self.run.step('entry_look', mark)

    def on_ring_reset_begins(self, ring, harvested):
        s, reset, vcpu = self.s, self.reset, self.vcpus[ring]
        end = s.rnext(reset, vcpu) + s.size()
        self.run.step('read_harvested', reset, vcpu)
        self.show('harvested', s.rend(reset, vcpu), min(harvested, end))

    def on_flush_begins(self, start, end):
        if self.reset is not None and self.s.rpc(self.reset) == WALKS:
            self.run.step('walked', self.reset)
        self.begin_flush(start, end)

    def flush_step(self):
        return ('flush', self.reset) if self.reset is not None else None

    def must_flush(self, page):
        s, reset = self.s, self.reset
        return any(s.did(reset, e) and s.pushes(e) == page for e in self.run.elements['Entry'])

    def on_ring_reset(self, ring, reached):
        run, s, reset, vcpu = self.run, self.s, self.reset, self.vcpus[ring]
        if s.rpc(reset) == WALKS:
            run.step('walked', reset)
            if any(self.must_flush(page) for page in self.used):
                raise Mismatch('a reset makes entries empty without its flush')
            for cpu in range(NR_CPUS):
                run.step('flush', reset, cpu)
        if s.rpc(reset) == FLUSHES:
            run.step('flushed', reset)
        self.show('the end of the reset', s.rnext(reset, vcpu), reached)
        run.step('empty', reset, vcpu)

    def on_reset_ends(self):
        run, s, reset = self.run, self.s, self.reset
        run.step('return', reset)
        taken = self.taken.pop(self.thread, [])
        for entry in taken:
            if s.due(reset, entry) or s.index(entry) < s.first(s.ring(entry)):
                run.step('copy', reset, entry)
            else:
                # It was marked, and one before it was not harvested.
                self.taken[self.thread].append(entry)
        run.remove('Reset', self.resets.pop(self.thread))
