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
import glob
import importlib
import itertools
import multiprocessing
import os
import sys
import time
import prover
import solvers

# Of the format in `tests/support/stepped_world.rs`.
NR_PTES, NR_ROOT_PTES, LEVEL_BITS, PTE_BYTES = 4, 2, 9, 8
PAGES = [block << LEVEL_BITS | page for block in range(2) for page in range(NR_PTES)]
NR_CPUS = 2
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
        solvers.collect(solvers.term(formula), symbols, set())
        found[name] = set(symbols) & set(model.state)
    return found


class Schedule:
    """Translates what the engine showed in one schedule to steps of the model: `on_EVENT` for each event."""

    def __init__(self, run, events):
        self.run, self.events = run, events
        run.start()
        self.s = run.state

    def replay(self):
        for self.nr, (self.thread, name, numbers) in enumerate(self.events):
            on = getattr(self, 'on_' + name.replace('-', '_'), None)
            if on is None and name not in self.ignored:
                raise Mismatch(f'no step for {name}')
            if on is not None:
                on(*numbers)

    def later(self):
        """What the thread does next."""
        for thread, name, numbers in itertools.islice(self.events, self.nr + 1, None):
            if thread == self.thread:
                yield name, numbers


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


def replay(part):
    """Returns (protocol, number of events, number of each step, None or what went wrong)."""
    protocol, schedules = part
    kind = importlib.import_module(f'replay_{protocol}').Schedule
    run, nr_events = Run(kind.model()), 0
    for root, nr_levels, events in schedules:
        schedule = kind(run, root, nr_levels, events)
        try:
            schedule.replay()
        except Mismatch as wrong:
            shown = [f'    {t} {n} {" ".join(map(str, k))}' for t, n, k in events[:schedule.nr + 1]]
            wrong = '\n'.join([*shown, f'  {protocol}: thread {schedule.thread}: {wrong}'])
            return protocol, nr_events, run.count, wrong
        nr_events += len(events)
    return protocol, nr_events, run.count, None


def main(base):
    began, nr_parts = time.time(), 4 * os.cpu_count()
    paths = {path.rsplit('.', 1)[1]: path for path in sorted(glob.glob(glob.escape(base) + '.*'))}
    schedules = {protocol: schedules_of(path) for protocol, path in paths.items()}
    parts = [(protocol, found[n::nr_parts]) for protocol, found in schedules.items() for n in range(nr_parts)]
    steps, nr_events = {p: collections.Counter() for p in paths}, collections.Counter()
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for protocol, nr, count, wrong in pool.imap_unordered(replay, parts):
            nr_events[protocol] += nr
            steps[protocol] += count
            if wrong:
                print(wrong)
                print('replay: FAILED')
                return 1
    failed = not paths
    for protocol in paths:
        print(f'{protocol}: {nr_events[protocol]} events of {len(schedules[protocol])} schedules are '
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
