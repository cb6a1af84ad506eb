"""Replays what the engine did, step by step, in the proofs.

    python replay.py FILE           files FILE.PROTOCOL that `crates/slat/tests/shuttle_replay.rs` has written

Under shuttle the engine records each step of its protocols, directly behind the atomic operation that makes it
(`crates/slat/src/sync/events.rs`). Here each must be a step that the model of the protocol allows at that moment. Each
conjunct must hold after it, and the model must show what the engine shows. So neither the engine nor the proof can
change alone. What the model has no step for is an error, too.

`replay_PROTOCOL.py` translates the steps. An element of a sort comes up when the engine first shows it: a page-table
page when it is linked, an answer of the host when it is given. It goes when nothing depends on it any more.
"""
import collections
import functools
import glob
import importlib
import itertools
import multiprocessing
import os
import sys
import time
import compiled
import prover
import solvers

# Of the format in `tests/support/stepped_world.rs`.
NR_PTES, NR_ROOT_PTES, LEVEL_BITS, PTE_BYTES = 4, 2, 9, 8
PAGES = [block << LEVEL_BITS | page for block in range(2) for page in range(NR_PTES)]
NR_CPUS = 2
# Of one protocol alone: the other proofs leave out what they change.
OF_ONE_PROTOCOL = {'slot-made', 'slot-claimed', 'slot-released', 'set-built', 'slot-freed', 'hazard-set',
                   'hazard-cleared', 'fault-unpinned', 'announcements-read', 'pte-kept', 'epoch-read', 'announced',
                   'guard-opened', 'guard-closed', 'thing-kept', 'epoch-read-again', 'epoch-advanced', 'table-retired',
                   'tables-listed', 'tables-taken', 'barrier-made', 'announcement-read', 'table-kept', 'table-freed',
                   'without-rings-begins', 'without-rings-ends', 'rings-read', 'rings-enabled', 'entry-published'}
DEFAULTS = {'bool': False, 'int': 0}


class Mismatch(Exception):
    """The engine did what the model does not allow, a conjunct was lost, or a PTE is another one."""


class Run:
    """The model with elements that come up one by one."""

    def __init__(self, model):
        self.model = model
        prover.use(model)
        self.steps = {n: f for n, f, _ in prover.steps_of(model)}
        self.variables = {**model.fixed, **model.state}
        self.conjuncts = self.compile()

    def start(self):
        self.elements = {sort: [] for sort in self.model.sorts}
        self.values = {name: {} for name in self.variables}
        self.state = prover.State(None, self.elements, {n: self.reader(n) for n in self.variables})

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

    def compile(self):
        """[(conjunct, the variables in it, whether it holds)]. A step that changes none of the variables keeps it."""
        defaults = {n: self.default(n) for n in self.variables}
        formulas = prover.conjuncts(self.model, prover.symbolic(self.model))
        reads = prover.variables_of(self.model, formulas)
        found = [(name, reads[name], compiled.function(formula, defaults)) for name, formula in formulas.items()]
        return found

    def check(self, changed, step):
        for name, reads, holds in self.conjuncts:
            if reads & changed and not holds(self.values, self.elements):
                raise Mismatch(f'{step} loses: {name}')


class Schedule:
    """Translates what the engine showed in one schedule to steps of the model: `on_EVENT` for each event."""

    of_thread = None                # the type of what an adapter knows of each thread

    def __init__(self, run, events):
        self.run, self.events = run, events
        run.start()
        self.s = run.state
        self.threads, self.nr_elements = collections.defaultdict(self.of_thread), 0
        self.flushes = collections.defaultdict(list)    # of each CPU: (thread, step) of those under way

    def replay(self):
        for self.nr, (self.thread, name, numbers) in enumerate(self.events):
            on = getattr(self, 'on_' + name.replace('-', '_'), None)
            if on is None and name not in self.ignored | OF_ONE_PROTOCOL:
                raise Mismatch(f'no step for {name}')
            if on is not None:
                on(*numbers)

    @property
    def at(self):
        return self.threads[self.thread]

    def new(self, sort):
        self.nr_elements += 1
        return self.run.add(sort, f'{sort} {self.nr_elements}')

    # A flush. Each CPU makes its step of it as late as it may: before its next walk, or when the flush ends.

    def begin_flush(self, step):
        for cpu in range(NR_CPUS):
            self.flushes[cpu].append((self.thread, step))

    def on_cpu_walks(self, cpu):
        for thread, step in self.flushes.pop(cpu, []):
            self.flush(thread, step, cpu)

    def end_flush(self):
        for cpu in range(NR_CPUS):
            found, self.flushes[cpu] = self.flushes[cpu], []
            for thread, step in found:
                if thread == self.thread:
                    self.flush(thread, step, cpu)
                else:
                    self.flushes[cpu].append((thread, step))

    def flush(self, thread, step, cpu):
        self.run.step(*step, cpu)

    def later(self):
        """What the thread does next."""
        for thread, name, numbers in itertools.islice(self.events, self.nr + 1, None):
            if thread == self.thread:
                yield name, numbers


@functools.cache
def schedules_of(path):
    """[(root, levels, [(thread, event, numbers)])]."""
    found = []
    with open(path) as lines:
        for line in lines:
            first, second, *rest = line.split()
            if first == 'schedule':
                found.append((int(second), int(rest[0]), []))
            else:
                found[-1][2].append((int(first), second, [int(n) for n in rest]))
    return found


@functools.cache
def run_of(protocol):
    kind = importlib.import_module(f'replay_{protocol}').Schedule
    return kind, Run(kind.model())


def replay(part):
    """Returns (protocol, numbers of schedules and events, number of each step, None or what went wrong).

    A part is (protocol, file, its number, number of parts). The schedules would fill the pipe to the process.
    """
    protocol, path, nr, nr_parts = part
    schedules = schedules_of(path)[nr::nr_parts]
    kind, run = run_of(protocol)
    prover.use(run.model)
    run.count, nr_events = collections.Counter(), 0
    for root, nr_levels, events in schedules:
        schedule = kind(run, root, nr_levels, events)
        try:
            schedule.replay()
        except Mismatch as wrong:
            shown = [f'    {t} {n} {" ".join(map(str, k))}' for t, n, k in events[:schedule.nr + 1]]
            wrong = '\n'.join([*shown, f'  {protocol}: thread {schedule.thread}: {wrong}'])
            return protocol, len(schedules), nr_events, run.count, wrong
        nr_events += len(events)
    return protocol, len(schedules), nr_events, run.count, None


def main(base):
    began, nr_parts = time.time(), 4 * os.cpu_count()
    paths = {path.rsplit('.', 1)[1]: path for path in sorted(glob.glob(glob.escape(base) + '.*'))}
    # In turn: what is wrong in one of them is found soon.
    parts = [(protocol, path, n, nr_parts) for n in range(nr_parts) for protocol, path in paths.items()]
    steps = {p: collections.Counter() for p in paths}
    nr_schedules, nr_events = collections.Counter(), collections.Counter()
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for protocol, nr, nr_of_it, count, wrong in pool.imap_unordered(replay, parts):
            nr_schedules[protocol] += nr
            nr_events[protocol] += nr_of_it
            steps[protocol] += count
            if wrong:
                print(wrong)
                print('replay: FAILED')
                return 1
    failed = not paths
    for protocol in paths:
        print(f'{protocol}: {nr_events[protocol]} events of {nr_schedules[protocol]} schedules are '
              f'{sum(steps[protocol].values())} steps')
        kind = importlib.import_module(f'replay_{protocol}').Schedule
        names = [n for n, _, _ in prover.steps_of(kind.model())]
        print('   ', ', '.join(f'{n} {steps[protocol][n]}' for n in names))
        if missing := [n for n in names if not steps[protocol][n] and n not in kind.not_shown]:
            print(f'replay: FAILED: no schedule of {protocol} made these steps: {", ".join(missing)}')
            failed = True
    print(f'replay: {sum(nr_events.values())} events in {time.time() - began:.0f} s')
    return failed


if __name__ == '__main__':
    import replay                       # the module that the others import
    sys.exit(replay.main(sys.argv[1]))
