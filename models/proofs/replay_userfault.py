"""Replays faults, rescans, changes of a memslot's flag and of attributes, and invalidations, in `userfault.py`. See
`replay.py`.

A block is a PTE of the root or its page-table page. A fault that has looked in a page-table page that was unlinked
meanwhile is no fault of the model: it must not install.
"""
import replay
from page_tables import EMPTY, LEAF, TABLE
from replay import LEVEL_BITS, NR_CPUS, NR_PTES, NR_ROOT_PTES, PAGES, PTE_BYTES, Mismatch
from userfault import Userfault
from userfault_steps import (ALL, ATTRIBUTES, BEGUN, BIT, CHANGED, GONE, IN_FLIGHT, MEMSLOT, NUMBERED, PTE,
                             RANGES, RESCAN, STORED, TOOK, ZAPPED)

FROZEN = 4                                  # as the engine shows it
WORD_BITS, WORD_BYTES = 64, 8
FIRST_PRIVATE_FRAME = 1 << 32
SLOT, SHARED, PRIVATE = 0, 0, 1


class Thread:
    def __init__(self):
        self.fault = self.call = None
        self.is_aside = False               # its fault has looked in what was unlinked
        self.takes_own = False              # the next number of its rescan is that of a run
        self.nr_slots_read = 0              # of its rescan
        self.first_page = self.next_page = self.end_page = None     # of its rescan: it has scanned up to `next_page`
        self.flushes = False


class Schedule(replay.Schedule):
    model, of_thread = Userfault, Thread
    ignored = {'host-answers', 'cpu-reads', 'pte-frozen'}
    not_shown = {'start_over'}              # rare: the memslot changes in the midst of a rescan

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, events)
        assert nr_levels == 2
        self.root = root
        self.blocks = {root + PTE_BYTES * n: n for n in range(NR_ROOT_PTES)}
        self.tables, self.pages = {}, {}    # {block: its page-table page}, {PTE of the lowest level: its page}
        self.made, self.bases = {}, []
        self.have_read_ranges = set()
        for page in PAGES:
            run.add('Page', page)
            run.fix('block', (page,), page >> LEVEL_BITS)
            run.fix('slot', (page,), SLOT)
            run.fix('attribute', (page,), SHARED)
        for block in self.blocks.values():
            run.add('Block', block)
            run.fix('whole', (block,), True)
        for cpu in range(NR_CPUS):
            run.add('Cpu', cpu)
        for kind in SHARED, PRIVATE:
            run.add('Kind', kind)
        run.add('Slot', SLOT)

    def pages_of(self, cell):
        return [p for p in PAGES if p >> LEVEL_BITS == self.blocks[cell]] if cell in self.blocks else [self.pages[cell]]

    def is_linked(self, cell):
        """Of a PTE of the lowest level."""
        return cell - cell % (NR_PTES * PTE_BYTES) == self.tables.get(self.pages[cell] >> LEVEL_BITS)

    def show(self, cell, kind, a):
        """The model must show this PTE."""
        s = self.s
        is_root = cell in self.blocks
        for page in self.pages_of(cell):
            is_same = bool(s.whole(s.block(page))) == (is_root and kind != TABLE)
            if kind == EMPTY:
                is_same = is_same and not s.leaf(page) and s.number(page) == a
            elif kind == LEAF:
                is_same = is_same and s.leaf(page) and s.leaf_kind(page) == int(a >= FIRST_PRIVATE_FRAME)
            elif kind != TABLE:
                is_same = False
            if not is_same:
                raise Mismatch(f'the engine has {kind, a} for page {page}; the model: leaf {s.leaf(page)}, number '
                               f'{s.number(page)}, kind {s.leaf_kind(page)}, one PTE {s.whole(s.block(page))}')

    def show_counter(self, number):
        if self.s.counter() != number:
            raise Mismatch(f'the counter is {number}; in the model {self.s.counter()}')

    # User space.

    def on_bitmap_made(self, bitmap, is_big):
        self.run.add('Map', bitmap)
        self.run.fix('is_big', (bitmap,), bool(is_big))
        self.bases.append(bitmap)

    def map_of(self, word):
        return max(base for base in self.bases if base <= word)

    def bits(self, word, value):
        """[(page, its bit)] of the used pages in a word of a bitmap."""
        found, first = self.map_of(word), (word - self.map_of(word)) // WORD_BYTES * WORD_BITS
        shift = LEVEL_BITS if self.s.is_big(found) else 0
        return [(p, bool(value >> ((p >> shift) - first) & 1)) for p in PAGES if 0 <= (p >> shift) - first < WORD_BITS]

    def on_bits_changed(self, word, value):
        found = self.map_of(word)
        for page, is_set in self.bits(word, value):
            if bool(self.s.bit(found, page)) != is_set:
                self.run.step('set_bit' if is_set else 'clear_bit', found, page)

    # A fault.

    def on_fault_looks(self, gfn):
        self.end_fault()
        self.at.fault, self.at.is_aside = self.new('Fault'), False
        self.run.fix('page', (self.at.fault,), gfn)

    def end_fault(self):
        fault, self.at.fault = self.at.fault, None
        if fault is not None:
            if self.s.fpc(fault) != 0 or self.s.counts(fault):
                self.run.step('give_up', fault)
            self.run.remove('Fault', fault)
            self.have_read_ranges.discard(fault)

    def is_fault_at(self, phase):
        """The thread has a fault that has read all that comes before."""
        return self.at.fault is not None and not self.at.is_aside and self.s.fpc(self.at.fault) == phase

    def fault_reads(self, cell, kind):
        run, s, fault = self.run, self.s, self.at.fault
        if not self.is_fault_at(PTE) or s.counts(fault) or kind == FROZEN:
            return                          # a walk that reads a frozen PTE begins anew
        if s.page(fault) not in self.pages_of(cell):
            raise Mismatch(f'the fault on {s.page(fault)} reads the PTE of {self.pages_of(cell)}')
        if cell not in self.blocks and not self.is_linked(cell):
            self.at.is_aside = True
        elif kind == EMPTY:
            run.step('look', fault)
        elif kind == LEAF and next(self.later(), ('',))[0] == 'number-read':
            run.step('look_at_leaf', fault)

    def on_ranges_read(self, gfn):
        if self.is_fault_at(RANGES):
            self.run.step('pass_ranges', self.at.fault)
            self.have_read_ranges.add(self.at.fault)

    def on_ranges_found(self, gfn, level):
        s, fault = self.s, self.at.fault
        if not self.is_fault_at(RANGES) or level == 0:
            return
        calls = self.run.elements['Call']
        if not all(s.passed(fault, i) and (level == 1 or s.beside(fault, i)) for i in calls):
            # A place was withdrawn while the fault read it.
            self.run.step('pass_ranges', fault)
        self.run.step('clear', fault)
        if level > 1 and not s.huge(fault):
            raise Mismatch(f'the block of {gfn} is free; in the model it reaches into a range')

    def on_slots_read(self):
        if self.at.call is not None and self.s.kind(self.at.call) == RESCAN:
            self.rescan_finds()
        # A fault finds the memslot twice. It goes by the second.
        elif self.is_fault_at(MEMSLOT) and next(self.later(), ('',))[0] != 'slots-read':
            self.run.step('find', self.at.fault)

    def on_bits_read(self, word, value):
        s, at, found = self.s, self.at, self.map_of(word)
        for page, is_set in self.bits(word, value):
            if bool(s.bit(found, page)) != is_set:
                raise Mismatch(f'the bit of {page} is {is_set}; in the model {s.bit(found, page)}')
        if at.call is not None:
            if s.kind(at.call) == RESCAN:
                self.rescan_reads(word, value)
        elif self.is_fault_at(BIT):
            if not s.saw_on(at.fault) or s.saw_map(at.fault) != found:
                raise Mismatch('the fault reads a bitmap that it has not found')
            if s.bit(found, s.page(at.fault)):
                self.end_fault()
            else:
                self.run.step('read_bit', at.fault)

    def on_attributes_read(self, word, value):
        run, s, fault = self.run, self.s, self.at.fault
        kinds = {p: value >> (p - word * WORD_BITS) & 1 for p in PAGES if p // WORD_BITS == word}
        for page, kind in kinds.items():
            if s.attribute(page) != kind:
                raise Mismatch(f'page {page} is of kind {kind}; in the model {s.attribute(page)}')
        if self.is_fault_at(BIT):
            if s.saw_on(fault):
                raise Mismatch('the fault has not read the bit')
            run.step('read_bit', fault)
        if self.is_fault_at(ATTRIBUTES):
            run.step('read_attributes', fault)
        elif self.is_fault_at(ALL):
            for page, kind in kinds.items():
                if s.block(page) == s.block(s.page(fault)) and kind == s.saw_kind(fault):
                    run.step('compare_attributes', fault, page)

    # Numbers.

    def on_number_taken(self, number):
        run, s, at = self.run, self.s, self.at
        if self.is_fault_at(ALL) and s.on_leaf(at.fault):
            run.step('take_own', at.fault)
        elif at.call is not None and (s.ipc(at.call) == IN_FLIGHT or at.takes_own):
            at.takes_own = False
            run.step('take_number', at.call)
        else:
            run.step('take_fresh', run.add('Fresh', number))
        self.show_counter(number)

    def on_number_read(self, number):
        s, fault = self.s, self.at.fault
        self.show_counter(number)
        if self.is_fault_at(PTE) and s.counts(fault):
            self.run.step('read_counter', fault)
        elif self.is_fault_at(GONE) and number == s.seen(fault) + 1:
            self.run.step('recount', fault)

    def forget_fresh(self):
        for number in list(self.run.elements['Fresh']):
            if self.s.state_of(number) == STORED:
                self.run.remove('Fresh', number)

    # A call.

    def on_call_begins(self, kind, start, end, bitmap):
        run, at = self.run, self.at
        call = at.call = self.new('Call')
        at.nr_slots_read, at.takes_own = 0, False
        run.fix('kind', (call,), kind)
        run.fix('slot_of', (call,), SLOT)
        run.fix('turns_on', (call,), bitmap != 0)
        run.fix('new_map', (call,), bitmap)
        for page in PAGES:
            run.fix('range', (call, page), start <= page < end)
        for fault in self.have_read_ranges:
            # It was not in flight then.
            run.fix('passed', (fault, call), True)
            run.fix('beside', (fault, call), True)
        at.first_page, at.next_page, at.end_page = start, start, end
        run.step('begin', call)

    def on_published(self, place, start, end):
        if self.s.kind(self.at.call) == RESCAN:
            self.at.takes_own = True        # what a run is in flight for is in `harvest_beside_zap.py`
        else:
            self.run.step('publish_range', self.at.call)

    def rescan_finds(self):
        """It finds the memslot before it begins, and before each turn. There is one turn."""
        run, s, at = self.run, self.s, self.at
        at.nr_slots_read += 1
        if at.nr_slots_read % 2 == 0:
            if s.on(SLOT):
                run.step('find_bitmap', at.call)
        elif at.nr_slots_read > 1:
            run.step('start_over', at.call)
            at.next_page = at.first_page

    def rescan_reads(self, word, value):
        """Scans up to the end of a run in the word, or of the word."""
        s, at, found = self.s, self.at, self.map_of(word)
        if s.found_map(at.call) != found:
            raise Mismatch('the rescan reads a bitmap that it has not found')
        size = 1 << LEVEL_BITS if s.is_big(found) else 1
        first = (word - found) // WORD_BYTES * WORD_BITS
        bit = at.next_page // size - first
        is_run = False
        while bit < WORD_BITS and (first + bit) * size < at.end_page:
            is_set = bool(value >> bit & 1)
            if is_run and not is_set:
                break
            is_run = is_set
            for page in PAGES:
                if page // size == first + bit and self.run.model.covers(s, at.call, page):
                    self.run.step('scan', at.call, page)
            bit += 1
        at.next_page = (first + bit) * size

    def call_reads(self, cell, kind, a):
        s, call = self.s, self.at.call
        if s.ipc(call) != NUMBERED or kind != EMPTY or a < s.own(call):
            return
        if cell in self.blocks:
            wanted = [p for p in self.pages_of(cell) if self.run.model.wants(s, call, p)]
            if wanted:
                self.run.step('pass_block', call, wanted[0])
        elif not self.is_linked(cell):
            self.passes_unlinked(cell)
        elif not s.gave(call, self.pages[cell]) and self.run.model.wants(s, call, self.pages[cell]):
            self.run.step('zap', call, self.pages[cell])

    def passes_unlinked(self, cell):
        if self.run.model.wants(self.s, self.at.call, self.pages[cell]):
            self.run.step('pass_unlinked', self.at.call, self.pages[cell])

    def on_slots_published(self):
        if self.at.call is not None:
            self.run.step('publish_set', self.at.call)

    def on_attributes_stored(self, word, mask, is_private):
        for page in PAGES:
            if page // WORD_BITS == word and mask >> (page % WORD_BITS) & 1:
                self.run.step('store_attribute', self.at.call, page, is_private)

    def on_withdrawn(self, place):
        if self.s.kind(self.at.call) != RESCAN:
            self.returns()

    def on_call_ends(self, is_ok):
        s, call = self.s, self.at.call
        if call is None:
            return
        if not is_ok:
            self.forget_call()
        elif s.kind(call) == RESCAN:
            if s.ipc(call) != ZAPPED:
                # No bit was set, so nothing is flushed.
                self.run.step('walked', call)
                if any(s.wanted(call, p) for p in PAGES):
                    raise Mismatch('a rescan returns without its flush')
                for cpu in range(NR_CPUS):
                    self.run.step('flush', call, cpu)
                self.run.step('flushed', call)
            self.returns()
        elif s.ipc(call) == CHANGED:
            self.returns()
        elif s.ipc(call) != BEGUN:
            raise Mismatch('a call returns in the midst of its steps')
        else:
            self.forget_call()              # the flag and the bitmap are as they were

    def returns(self):
        self.run.step('return', self.at.call)
        self.forget_call()

    def forget_call(self):
        self.run.remove('Call', self.at.call)
        self.at.call = None

    # Flushes.

    def on_flush_begins(self, start, end):
        s, at = self.s, self.at
        if at.call is None or s.ipc(at.call) != NUMBERED:
            if at.flushes:
                return                      # the second range of one flush
            raise Mismatch('a flush that no step makes')
        coming = []
        for name, numbers in self.later():
            coming.append((name, numbers))
            if name in ('slots-read', 'call-ends', 'withdrawn'):
                break
        if s.kind(at.call) == RESCAN and coming[-1][0] == 'slots-read':
            return                          # it starts over
        ranges = [(start, end), *(numbers for name, numbers in coming if name == 'flush-begins')]
        for page in PAGES:
            if self.run.model.wants(s, at.call, page) and not any(a <= page < b for a, b in ranges):
                raise Mismatch(f'page {page} is not flushed')
        self.run.step('walked', at.call)
        at.flushes = True
        self.begin_flush(('flush', at.call))

    def on_flush_ends(self):
        if self.at.flushes:
            self.at.flushes = False
            self.end_flush()
            self.run.step('flushed', self.at.call)

    def on_cpu_translates(self, cpu, gfn, cell):
        if cell not in self.blocks and not self.is_linked(cell):
            raise Mismatch('a CPU finds a leaf in a page-table page that was unlinked')
        self.run.step('fill', cpu, gfn)

    # PTEs.

    def is_shown(self, cell, kind):
        return kind != FROZEN and (cell in self.blocks or self.is_linked(cell))

    def on_pte_read(self, cell, level, kind, a, b):
        if cell not in self.blocks and cell not in self.pages:
            raise Mismatch(f'a PTE that was never linked: {cell}')
        if self.is_shown(cell, kind):
            self.show(cell, kind, a)
        if self.at.fault is not None:
            self.fault_reads(cell, kind)
        elif self.at.call is not None:
            self.call_reads(cell, kind, a)

    def on_pte_made(self, cell, *kinds):
        self.made[cell] = kinds[:2]

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if new == FROZEN:
            return
        if self.is_shown(cell, old):
            self.show(cell, old, old_a)
        if cell in self.blocks:
            self.change_block(cell, old, new, a)
        elif self.is_linked(cell):
            self.change_page(cell, old, new, a)
        elif (old, new) == (EMPTY, EMPTY) and self.at.call is not None:
            self.passes_unlinked(cell)
        else:
            raise Mismatch(f'{old} becomes {new} in a page-table page that was unlinked')
        self.forget_fresh()
        if self.is_shown(cell, new):
            self.show(cell, new, a)

    def change_block(self, cell, old, new, a):
        run, at, block, page = self.run, self.at, self.blocks[cell], self.pages_of(cell)[0]
        if new == TABLE:
            self.tables[block] = a
            below = {a + PTE_BYTES * n: p for n, p in enumerate(self.pages_of(cell))}
            self.pages.update(below)
            if old == EMPTY and any(self.made[e][0] == LEAF for e in below):
                self.install()
            else:
                number = self.made[min(below)][1]
                if old == EMPTY and number != self.s.number(page):
                    run.step('refine_anew', block, number)
                else:
                    run.step('link_table', block)
            for e in below:
                self.show(e, *self.made[e])
        elif (old, new) == (EMPTY, LEAF):
            run.step('install_huge', at.fault)
            self.end_fault()
        elif old == TABLE:
            run.step('unlink', at.call, block, a)
            del self.tables[block]
        elif new == EMPTY:
            wanted = [p for p in self.pages_of(cell) if self.run.model.wants(self.s, at.call, p)]
            run.step('zap_block', at.call, (wanted or [page])[0], a)
        elif (old, new) != (LEAF, LEAF):
            raise Mismatch(f'no step replaces {old} by {new}')

    def change_page(self, cell, old, new, a):
        at, page = self.at, self.pages[cell]
        if (old, new) == (EMPTY, LEAF):
            self.install()
        elif (old, new) == (LEAF, EMPTY) and self.is_fault_at(TOOK):
            self.run.step('exchange', at.fault)
        elif new == EMPTY:
            self.run.step('zap', at.call, page)
        elif (old, new) != (LEAF, LEAF):
            raise Mismatch(f'no step replaces {old} by {new}')

    def install(self):
        if self.at.is_aside:
            raise Mismatch('a fault installs that has looked in what was unlinked')
        self.run.step('install', self.at.fault)
        self.end_fault()
