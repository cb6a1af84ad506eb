"""Replays invalidations, faults, splits and recoveries in `invalidation.py`. See `replay.py`.

Each round of a fault is a fault of its own. The pages of its leaf are what it installs later in the round.
"""
import replay
from invalidation import ACTS, COUNTS, GONE, LOOKED, PUBLISHED, RESOLVED, TOOK, UNLINKS, WALKS, ZAPS, Invalidation
from page_tables import BROKEN, EMPTY, LEAF, STORED, TABLE
from replay import LEVEL_BITS, NR_CPUS, NR_PTES, NR_ROOT_PTES, PAGES, PTE_BYTES, Mismatch

FROZEN = 4                                  # as the engine shows it; the other kinds are those of the model
TABLE_BYTES = 4096                          # to which the page-table pages are aligned
HOST_ALLOWS_WRITES = 1                      # of the last number of a leaf


class Thread:
    def __init__(self):
        self.fault = None               # its fault, until that has walked aside
        self.invs = []                  # its invalidations, from the publication to the withdrawal
        self.fresh = None               # the fresh number that it took last
        self.is_last_flush = False


class Schedule(replay.Schedule):
    model, of_thread = Invalidation, Thread
    ignored = {'slots-read', 'slots-published', 'cpu-reads'}
    not_shown = set()

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, events)
        self.places, self.made = {}, {}
        self.nr_faults = 0
        self.have_read_ranges = set()
        for page in PAGES:
            run.add('Page', page)
        for cpu in range(NR_CPUS):
            run.add('Cpu', cpu)
        run.fix('root', (), root)
        self.add_table(root, nr_levels, PAGES, NR_ROOT_PTES)
        for variable in 'used', 'linked':
            run.fix(variable, (root,), True)
        for cpu in range(NR_CPUS):
            for page in PAGES:
                run.fix('reach', (cpu, root, page), True)

    # Elements.

    def add_table(self, table, level, pages, nr_ptes):
        """A page-table page whose PTEs have `level`, for `pages`."""
        run, shift = self.run, LEVEL_BITS * (level - 1)
        run.add('Table', table)
        run.fix('level', (table,), level - 1)
        for page in pages:
            cell = table + PTE_BYTES * ((page >> shift) % nr_ptes)
            run.fix('spans', (table, page), True)
            run.fix('entry', (table, page), cell)
            if cell not in run.elements['Pte']:
                run.add('Pte', cell)
                run.fix('table', (cell,), table)

    def pages_of(self, cell):
        return [p for p in PAGES if self.run.model.maps(self.s, cell, p)]

    def answer(self, page, pfn, is_writable):
        """What the host says of a page, in a form that is the same for all pages of a huge leaf."""
        return self.run.add('Answer', (pfn - page, is_writable & HOST_ALLOWS_WRITES))

    def is_known(self, cell):
        return cell in self.run.elements['Pte']

    def is_unused(self, cell):
        """A PTE of no page, to which a range beyond the pages comes."""
        return not self.is_known(cell) and cell & ~(TABLE_BYTES - 1) in self.run.elements['Table']

    def show(self, cell, kind, a, b):
        """The model must show this PTE."""
        s = self.s
        if kind == FROZEN:
            is_same = s.frozen(cell)
        elif kind == EMPTY:
            is_same = s.kind(cell) == EMPTY and s.num(cell) == a
        elif kind == LEAF:
            first = self.pages_of(cell)[0]
            is_same = s.kind(cell) == LEAF and s.ans(cell) == (a - first, b & HOST_ALLOWS_WRITES)
        else:
            is_same = s.kind(cell) == kind and s.down(cell) == a
        if not is_same or (kind != FROZEN and s.frozen(cell)):
            raise Mismatch(f'the engine has {kind, a, b} at {cell}; the model: kind {s.kind(cell)}, number '
                           f'{s.num(cell)}, answer {s.ans(cell)}, down {s.down(cell)}, frozen {s.frozen(cell)}')

    # A fault.

    def on_fault_looks(self, gfn):
        self.end_fault()
        self.nr_faults += 1
        fault = self.at.fault = self.run.add('Fault', f'{self.thread}.{self.nr_faults}')
        self.run.fix('page', (fault,), gfn)
        shift = LEVEL_BITS * (self.level_of_leaf(gfn) - 1)
        for page in PAGES:
            if page >> shift == gfn >> shift:
                self.run.fix('wants', (fault, page), True)
        self.run.step('fault', fault)

    def end_fault(self):
        """The fault starts over, or is done."""
        fault, self.at.fault = self.at.fault, None
        if fault is not None:
            if self.s.fpc(fault) != 0:
                self.run.step('give_up', fault)
            self.run.remove('Fault', fault)
            self.have_read_ranges.discard(fault)
            self.forget_fresh()

    def level_of_leaf(self, gfn):
        """The level of the leaf that the thread's fault installs later in this round; the lowest if none."""
        made = dict(self.made)
        for name, numbers in self.later():
            if name in ('fault-looks', 'undo-begins'):
                break
            if name == 'pte-made':
                made[numbers[0]] = numbers[1:]
            if name == 'pte-replaced':
                cell, level, (old, _, _), (new, a, _) = numbers[0], numbers[1], numbers[2:5], numbers[5:8]
                if old == EMPTY and new == LEAF or old == LEAF and new == EMPTY:
                    return level
                if old == EMPTY and new == TABLE and (leaf := self.leaf_in(made, a, level - 1, gfn)):
                    return leaf
        return 1

    def leaf_in(self, made, table, level, gfn):
        """The level of the leaf for `gfn` in the page-table page at `table`, which was just made; or None."""
        cell = table + PTE_BYTES * ((gfn >> LEVEL_BITS * (level - 1)) % NR_PTES)
        kind, a = made[cell][3 * (level > 1):][:2]
        return level if kind == LEAF else self.leaf_in(made, a, level - 1, gfn) if kind == TABLE else None

    def on_pte_read(self, cell, level, kind, a, b):
        if self.is_unused(cell):
            return
        if not self.is_known(cell):
            raise Mismatch(f'a PTE that was never linked: {cell}')
        self.show(cell, kind, a, b)
        if self.at.fault is not None:
            self.fault_reads(cell, kind)
        elif self.at.invs:
            self.invalidation_reads(cell, kind, a)

    def fault_reads(self, cell, kind):
        run, s, fault = self.run, self.s, self.at.fault
        start = s.entry(s.root(), s.page(fault))
        if s.fpc(fault) == RESOLVED and cell == start:
            run.step('act', fault)
        elif s.fpc(fault) == WALKS and cell == start != s.fat(fault):
            run.step('give_up', fault)
            self.have_read_ranges.discard(fault)
            run.step('fault', fault)
        if s.fpc(fault) not in (WALKS, ACTS) or cell != s.fat(fault):
            return
        if kind == TABLE:
            run.step('down', fault)
        elif s.fpc(fault) == WALKS and kind == EMPTY:
            run.step('look', fault)
        elif s.fpc(fault) == WALKS and kind == LEAF and next(self.later(), ('',))[0] == 'number-read':
            run.step('look_at_leaf', fault)

    def on_ranges_read(self, gfn):
        if self.at.fault is not None and self.s.fpc(self.at.fault) == LOOKED:
            self.run.step('read_ranges', self.at.fault)
            self.have_read_ranges.add(self.at.fault)

    def on_ranges_found(self, gfn, level):
        run, s, fault = self.run, self.s, self.at.fault
        if fault is None or s.fpc(fault) != LOOKED or level == 0:
            return
        if any(s.wants(fault, p) and p >> LEVEL_BITS * (level - 1) != gfn >> LEVEL_BITS * (level - 1) for p in PAGES):
            raise Mismatch(f'a leaf that is larger than the free block of level {level}')
        if not all(s.passed(fault, i) for i in run.elements['Inv']):
            # A place was withdrawn while the fault read it.
            run.step('read_ranges', fault)
        run.step('clear', fault)

    def on_host_answers(self, gfn, pfn, is_writable):
        run, s, fault = self.run, self.s, self.at.fault
        if fault is None:
            return                      # a recovery asks for the size alone
        answer = self.answer(gfn, pfn, is_writable)
        for page in PAGES:
            if s.wants(fault, page) and not s.ok(page, answer):
                run.step('allow', page, answer)
        run.step('resolve', fault, answer)

    # Numbers.

    def on_number_taken(self, number):
        run, s, at = self.run, self.s, self.at
        if at.fault is not None and s.fpc(at.fault) == ACTS and s.on_leaf(at.fault):
            run.step('take_own', at.fault, run.add('Fresh', number))
        elif at.invs and s.ipc(at.invs[-1]) == PUBLISHED:
            run.step('take_number', at.invs[-1])
        else:
            at.fresh = run.add('Fresh', number)
            run.step('take_fresh', number)
        self.show_counter(number)

    def on_number_read(self, number):
        run, s, fault = self.run, self.s, self.at.fault
        self.show_counter(number)
        if fault is not None and s.fpc(fault) == COUNTS:
            run.step('read_counter', fault)
        elif fault is not None and s.fpc(fault) == GONE and number == s.seen(fault) + 1:
            run.step('recount', fault)

    def show_counter(self, number):
        if self.s.counter() != number:
            raise Mismatch(f'the counter is {number}; in the model {self.s.counter()}')

    def forget_fresh(self):
        s = self.s
        owned = {s.own(f) for f in self.run.elements['Fault']}
        for number in list(self.run.elements['Fresh']):
            if s.state_of(number) == STORED and number not in owned:
                self.run.remove('Fresh', number)

    # An invalidation.

    def on_published(self, place, start, end):
        inv = self.places[place] = self.run.add('Inv', f'{start}..{end} {self.nr}')
        for page in PAGES:
            if start <= page < end:
                self.run.fix('covers', (inv, page), True)
        for fault in self.have_read_ranges:
            # It was not in flight then.
            self.run.fix('passed', (fault, inv), True)
        self.at.invs.append(inv)
        self.run.step('publish', inv)

    def walks(self, inv):
        return self.s.ipc(inv) in (ZAPS, UNLINKS)

    def page_of(self, inv, cell):
        """A page of the range at the PTE."""
        pages = [p for p in self.pages_of(cell) if self.s.covers(inv, p)]
        if not pages:
            raise Mismatch(f'the invalidation {inv} is at {cell}, beside its range')
        return pages[0]

    def invalidation_reads(self, cell, kind, a):
        run, s, inv = self.run, self.s, self.at.invs[-1]
        if not self.walks(inv):
            return
        if s.table(cell) == s.root():
            run.step('start', inv)
        if kind == TABLE:
            run.step('enter', inv, cell)
        elif kind == EMPTY and a >= s.inum(inv):
            run.step('pass', inv, cell, self.page_of(inv, cell))

    def on_flush_begins(self, start, end):
        step = self.step_of_flush([p for p in PAGES if start <= p < end])
        if step is not None:
            self.begin_flush(step)

    def step_of_flush(self, pages):
        """What each CPU does in the flush that begins, but for the CPU; None if it is no step."""
        if not self.at.invs or not self.walks(self.at.invs[-1]):
            return None
        inv = self.at.invs[-1]
        if not all(p in pages for p in PAGES if self.s.covers(inv, p)):
            return None
        self.at.is_last_flush = True
        if self.s.ipc(inv) == ZAPS:
            self.run.step('zapped', inv)
        self.run.step('unlinked', inv)
        return 'flush', inv

    def on_flush_ends(self):
        self.end_flush()
        if self.at.is_last_flush:
            self.at.is_last_flush = False
            self.run.step('flushed', self.at.invs[-1])

    def on_host_changes(self, gfn, pfn):
        self.run.step('host', self.at.invs[-1], gfn, self.answer(gfn, pfn, 1))

    def on_withdrawn(self, place):
        inv = self.places.pop(place)
        self.run.step('withdraw', inv)
        self.at.invs.remove(inv)
        self.forget_inv(inv)

    def forget_inv(self, inv):
        # It may have unlinked a page-table page whose PTEs are not frozen.
        if not any(self.s.cutter(t) == inv for t in self.run.elements['Table']):
            self.run.remove('Inv', inv)

    def on_cpu_translates(self, cpu, gfn, cell):
        self.run.step('fill', cpu, cell, gfn)

    # Changes of PTEs.

    def on_pte_made(self, cell, *kinds):
        self.made[cell] = kinds

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        if self.is_unused(cell):
            return
        self.show(cell, old, old_a, old_b)
        self.change(cell, level, (old, new), a, b)
        self.forget_fresh()
        self.show(cell, new, a, b)

    def change(self, cell, level, change, a, b):
        old, new = change
        if new == FROZEN:
            self.freeze(cell)
        elif new == TABLE and old in (EMPTY, LEAF):
            self.link(cell, level, old, a)
        elif change == (EMPTY, LEAF):
            if self.s.fpc(self.at.fault) == RESOLVED:
                self.run.step('act_there', self.at.fault)
            self.run.step('install', self.at.fault)
            self.end_fault()
        elif new == EMPTY and old in (EMPTY, LEAF):
            self.zap(cell, level, a)
        elif change == (TABLE, EMPTY):
            self.unlink(cell, a)
        elif change == (TABLE, BROKEN):
            self.run.step('break', cell)
        elif change == (BROKEN, EMPTY):
            self.run.step('cancel', cell, a)
        elif change == (BROKEN, LEAF):
            self.run.step('make_huge', cell, self.answer(self.pages_of(cell)[0], a, b))
        elif change in ((LEAF, LEAF), (TABLE, TABLE)):
            pass                        # rights, A and D: `show` compares the rest
        else:
            raise Mismatch(f'no step replaces {old} by {new}')

    def link(self, cell, level, old, table):
        """A page-table page, perhaps with others below it, and perhaps with the leaf of the fault."""
        run, s, fault = self.run, self.s, self.at.fault
        self.add_table(table, level - 1, self.pages_of(cell), NR_PTES)
        made = {c: self.made[c][3 * (level > 2):][:3] for c in run.elements['Pte'] if s.table(c) == table}
        self.hang(cell, old, table, next((a for kind, a, b in made.values() if kind == EMPTY), None))
        for below, (kind, a, b) in made.items():
            if kind == TABLE:
                if fault is not None and s.fpc(fault) == ACTS and s.fat(fault) == cell:
                    run.step('down', fault)
                self.link(below, level - 1, EMPTY, a)
            elif kind == LEAF and old == EMPTY:
                run.step('down', fault)
                run.step('install', fault)
                self.end_fault()
        for below, (kind, a, b) in made.items():
            self.show(below, kind, a, b)

    def unlink(self, cell, number):
        """Emptied before, or with what is in it: then it is not visited yet."""
        run, s, inv = self.run, self.s, self.at.invs[-1]
        if s.ipc(inv) == ZAPS and not all(s.visited(inv, p) for p in self.pages_of(cell)):
            return run.step('unlink_leaves', inv, cell, number)
        if s.ipc(inv) == ZAPS:
            run.step('zapped', inv)
        run.step('unlink', inv, cell, number)

    def hang(self, cell, old, table, number):
        """`number` is that of the empty PTEs in `table`, if there are any."""
        if old != EMPTY:
            self.run.step('split', cell, table)
        elif number is None or number == self.s.num(cell):
            self.refine(cell, table)
        else:
            self.refine(cell, table, number)

    def refine(self, *parts):
        self.run.step('refine_anew' if len(parts) == 3 else 'refine', *parts)

    def zap(self, cell, level, number):
        run, s, at = self.run, self.s, self.at
        if at.fault is not None and s.fpc(at.fault) == TOOK:
            return run.step('empty_leaf', at.fault)
        inv = at.invs[-1]
        if level == 1:
            run.step('zap_lowest', inv, cell, self.page_of(inv, cell))
        else:
            run.step(self.zap_higher(cell), inv, cell, self.page_of(inv, cell), number)

    def zap_higher(self, cell):
        return 'zap_higher'

    def on_pte_frozen(self, cell):
        if not self.is_known(cell):
            return                      # it was never linked
        if not self.s.frozen(cell):
            self.freeze(cell)

    def freeze(self, cell):
        s, table = self.s, self.s.table(cell)
        if not s.linked(table):
            return self.run.step('freeze_unlinked', cell)
        broken = [e for e in self.run.elements['Pte'] if s.kind(e) == BROKEN and s.below(table, e)]
        if not broken:
            raise Mismatch(f'{cell} is frozen in a page-table page that is linked')
        self.run.step('freeze', broken[0], cell)
