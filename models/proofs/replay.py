"""Replays what the engine did, step by step, in the proof of the invalidation protocol.

    python replay.py FILE...        files that `crates/slat/tests/shuttle_replay.rs` has written

Under shuttle the engine records each step of its protocols, directly behind the atomic operation that makes it
(`crates/slat/src/sync/events.rs`). Here each must be a step that `invalidation.py` allows at that moment. Each
conjunct must hold after it, and the model must show the PTEs that the engine shows. So neither the engine nor the
proof can change alone. What the model has no step for is an error, too.

An element of a sort comes up when the engine first shows it: a page-table page when it is linked, an answer of the host
when it is given. Each round of a fault is a fault of its own; the pages of its leaf are what it installs later in the
round. An element goes when nothing depends on it any more.
"""
import collections
import itertools
import multiprocessing
import os
import sys
import time
import prover
from invalidation import ACTS, CLEAR, COUNTS, GONE, LOOKED, PUBLISHED, RESOLVED, TOOK, UNLINKS, WALKS, ZAPS, Invalidation
from page_tables import BROKEN, EMPTY, LEAF, STORED, TABLE

# Of the format in `tests/support/stepped_world.rs`.
NR_PTES, NR_ROOT_PTES, LEVEL_BITS, PTE_BYTES = 4, 2, 9, 8
PAGES = [block << LEVEL_BITS | page for block in range(2) for page in range(NR_PTES)]
NR_CPUS = 2
FROZEN = 4                                  # as the engine shows it; the other kinds are those of the model
DEFAULTS = {'bool': False, 'int': 0}


class Mismatch(Exception):
    """The engine did what the model does not allow, a conjunct was lost, or a PTE is another one."""


class LazyState(prover.State):
    """A state whose outermost quantifiers are not evaluated while `is_lazy`."""
    is_lazy = False

    def all(self, f):
        return (lambda: self._quantify(f, True)) if self.is_lazy else self._quantify(f, True)


class Run:
    """The model with elements that come up one by one."""

    def __init__(self, model):
        self.model = model
        prover.use(model)
        self.steps = {n: f for n, f, _ in prover.steps_of(model)}
        self.variables = {**model.fixed, **model.state}
        self.reads = variables_of_conjuncts(model)
        self.count = collections.Counter()

    def start(self):
        self.elements = {sort: [] for sort in self.model.sorts}
        self.values = {name: {} for name in self.variables}
        self.state = LazyState(None, self.elements, {n: self.reader(n) for n in self.variables})

    def default(self, name):
        return DEFAULTS.get(self.variables[name][1])

    def reader(self, name):
        values, default = self.values[name], self.default(name)
        return lambda *at: values.get(at, default)

    def add(self, sort, element):
        if element not in self.elements[sort]:
            self.elements[sort].append(element)
        return element

    def remove(self, sort, element):
        self.elements[sort].remove(element)
        for name, (sorts, _) in self.variables.items():
            if sort in sorts:
                values, at_sort = self.values[name], [n for n, k in enumerate(sorts) if k == sort]
                for at in [at for at in values if any(at[n] == element for n in at_sort)]:
                    del values[at]

    def fix(self, name, at, value):
        self.values[name][at] = value

    def step(self, name, *xs):
        guard, updates = self.steps[name](self.state, *xs)
        if not guard:
            raise Mismatch(f'not allowed: {name} {xs}')
        new = {variable: {at: f(*at) for at in self.cells(variable)} for variable, f in updates.items()}
        changed = set()
        for variable, values in new.items():
            old, default = self.values[variable], self.default(variable)
            if any(old.get(at, default) != value for at, value in values.items()):
                changed.add(variable)
                old.update(values)
        self.count[name] += 1
        self.check(changed, f'{name} {xs}')

    def cells(self, variable):
        return itertools.product(*(self.elements[sort] for sort in self.model.state[variable][0]))

    def check(self, changed, step):
        s = self.state
        s.is_lazy = True
        formulas = prover.conjuncts(self.model, s)
        s.is_lazy = False
        for name, holds in formulas.items():
            if self.reads[name] & changed and not (holds() if callable(holds) else holds):
                raise Mismatch(f'{step} loses: {name}')


def variables_of_conjuncts(model):
    """{conjunct: the variables in it}. A step that changes none of them keeps it."""
    found = {}
    for name, formula in prover.conjuncts(model, prover.symbolic(model)).items():
        symbols = {}
        prover.collect(prover.term(formula), symbols, set())
        found[name] = set(symbols) & set(model.state)
    return found


class Thread:
    def __init__(self):
        self.fault = None               # its fault, until that has walked aside
        self.invs = []                  # its invalidations, from the publication to the withdrawal
        self.fresh = None               # the fresh number that it took last
        self.is_last_flush = False


class Schedule:
    """Translates what the engine showed in one schedule to steps of the model."""

    def __init__(self, run, root, nr_levels, events):
        self.run, self.events = run, events
        self.threads = collections.defaultdict(Thread)
        self.places, self.made, self.level = {}, {}, {}
        self.nr_faults = 0
        self.have_read_ranges = set()
        self.begin(root, nr_levels)

    def begin(self, root, nr_levels):
        self.run.start()
        self.s = self.run.state
        for page in PAGES:
            self.run.add('Page', page)
        for cpu in range(NR_CPUS):
            self.run.add('Cpu', cpu)
        self.run.fix('root', (), root)
        self.add_table(root, nr_levels, PAGES, NR_ROOT_PTES)
        for variable in 'used', 'linked':
            self.run.fix(variable, (root,), True)

    def replay(self):
        for self.nr, (thread, name, numbers) in enumerate(self.events):
            self.at = self.threads[thread]
            self.thread = thread
            getattr(self, 'on_' + name.replace('-', '_'))(*numbers)
        return len(self.events)

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

    def level_of(self, cell):
        return self.s.level(self.s.table(cell)) + 1

    def answer(self, page, pfn, is_writable):
        """What the host says of a page, in a form that is the same for all pages of a huge leaf."""
        return self.run.add('Answer', (pfn - page, is_writable))

    def is_known(self, cell):
        return cell in self.run.elements['Pte']

    def show(self, cell, kind, a, b):
        """The model must show this PTE."""
        s = self.s
        if kind == FROZEN:
            is_same = s.frozen(cell)
        elif kind == EMPTY:
            is_same = s.kind(cell) == EMPTY and s.num(cell) == a
        elif kind == LEAF:
            first = self.pages_of(cell)[0]
            is_same = s.kind(cell) == LEAF and s.ans(cell) == (a - first, b)
        else:
            is_same = s.kind(cell) == kind and s.down(cell) == a
        if not is_same or (kind != FROZEN and s.frozen(cell)):
            raise Mismatch(f'the engine has {kind, a, b} at {cell}; the model: kind {s.kind(cell)}, number {s.num(cell)}'
                           f', answer {s.ans(cell)}, down {s.down(cell)}, frozen {s.frozen(cell)}')

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
        """The level of the leaf that the thread's fault installs later in this round; the lowest if it installs none."""
        made = {}
        for name, numbers in self.later():
            if name == 'fault-looks':
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

    def later(self):
        for thread, name, numbers in itertools.islice(self.events, self.nr + 1, None):
            if thread == self.thread:
                yield name, numbers

    def leaf_in(self, made, table, level, gfn):
        """The level of the leaf for `gfn` in the page-table page at `table`, which was just made; None if there is none."""
        cell = table + PTE_BYTES * ((gfn >> LEVEL_BITS * (level - 1)) % NR_PTES)
        kind, a = made[cell][3 * (level > 1):][:2]
        return level if kind == LEAF else self.leaf_in(made, a, level - 1, gfn) if kind == TABLE else None

    def on_pte_read(self, cell, level, kind, a, b):
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
        if not self.at.invs or not self.walks(self.at.invs[-1]):
            return
        inv = self.at.invs[-1]
        if all(start <= p < end for p in PAGES if self.s.covers(inv, p)):
            self.at.is_last_flush = True
            if self.s.ipc(inv) == ZAPS:
                self.run.step('zapped', inv)
            self.run.step('unlinked', inv)

    def on_flush_ends(self):
        if self.at.is_last_flush:
            self.at.is_last_flush = False
            for cpu in range(NR_CPUS):
                self.run.step('flush', self.at.invs[-1], cpu)
            self.run.step('flushed', self.at.invs[-1])

    def on_host_changes(self, gfn, pfn):
        self.run.step('host', self.at.invs[-1], gfn, self.answer(gfn, pfn, 1))

    def on_withdrawn(self, place):
        inv = self.places.pop(place)
        self.run.step('withdraw', inv)
        self.at.invs.remove(inv)
        self.run.remove('Inv', inv)

    def on_cpu_translates(self, cpu, gfn, cell):
        self.run.step('fill', cpu, cell, gfn)

    # Changes of PTEs.

    def on_pte_made(self, cell, *kinds):
        self.made[cell] = kinds

    def on_pte_replaced(self, cell, level, old, old_a, old_b, new, a, b):
        self.show(cell, old, old_a, old_b)
        change = (old, new)
        if new == FROZEN:
            self.freeze(cell)
        elif new == TABLE and old in (EMPTY, LEAF):
            self.link(cell, level, old, a)
        elif change == (EMPTY, LEAF):
            self.run.step('install', self.at.fault)
            self.end_fault()
        elif new == EMPTY and old in (EMPTY, LEAF):
            self.zap(cell, level, a)
        elif change == (TABLE, EMPTY):
            inv = self.at.invs[-1]
            if self.s.ipc(inv) == ZAPS:
                self.run.step('zapped', inv)
            self.run.step('unlink', inv, cell, a)
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
        self.forget_fresh()
        self.show(cell, new, a, b)

    def link(self, cell, level, old, table):
        """A page-table page, perhaps with others below it, and perhaps with the leaf of the fault."""
        run, s, fault = self.run, self.s, self.at.fault
        self.add_table(table, level - 1, self.pages_of(cell), NR_PTES)
        run.step('refine' if old == EMPTY else 'split', cell, table)
        made = {c: self.made[c][3 * (level > 2):][:3] for c in run.elements['Pte'] if s.table(c) == table}
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

    def zap(self, cell, level, number):
        run, s, at = self.run, self.s, self.at
        if at.fault is not None and s.fpc(at.fault) == TOOK:
            return run.step('empty_leaf', at.fault)
        inv = at.invs[-1]
        if level == 1:
            run.step('zap_lowest', inv, cell, self.page_of(inv, cell))
        else:
            run.step('zap_higher', inv, cell, self.page_of(inv, cell), number)

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


def schedules_of(path):
    """[(root, levels, [(thread, step, numbers)])]."""
    found = []
    with open(path) as lines:
        for line in lines:
            first, second, *rest = line.split()
            if first == 'schedule':
                found.append((int(second), int(rest[0]), []))
            else:
                found[-1][2].append((int(first), second, [int(n) for n in rest]))
    return found


def replay(part):
    """Returns (number of events, number of each step, None or what went wrong)."""
    run, nr_events = Run(Invalidation()), 0
    for root, nr_levels, events in part:
        schedule = Schedule(run, root, nr_levels, events)
        try:
            nr_events += schedule.replay()
        except Mismatch as wrong:
            thread, name, numbers = events[schedule.nr]
            shown = [f'    {t} {n} {" ".join(map(str, k))}' for t, n, k in events[:schedule.nr + 1]]
            return nr_events, run.count, '\n'.join([*shown, f'  thread {thread}, {name}: {wrong}'])
    return nr_events, run.count, None


def main(paths):
    began = time.time()
    schedules = [schedule for path in paths for schedule in schedules_of(path)]
    nr_parts = 8 * os.cpu_count()
    count, nr_events = collections.Counter(), 0
    with multiprocessing.Pool(os.cpu_count()) as pool:
        parts = [schedules[n::nr_parts] for n in range(nr_parts)]
        for nr, steps, wrong in pool.imap_unordered(replay, parts):
            nr_events += nr
            count += steps
            if wrong:
                print(wrong)
                print('replay: FAILED')
                return 1
    steps = [n for n, _, _ in prover.steps_of(Invalidation())]
    print(f'replay: {nr_events} events of {len(schedules)} schedules are {sum(count.values())} steps of the model, '
          f'in {time.time() - began:.0f} s')
    for name in steps:
        print(f'  {name:16} {count[name]}')
    if missing := [n for n in steps if not count[n]]:
        print(f'replay: FAILED: no schedule made these steps: {", ".join(missing)}')
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
