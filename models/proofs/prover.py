"""Checks inductive invariants of transition systems with any number of threads, pages and page-table pages.

A model is a class with
  sorts       names of the kinds of things; there are any number of each
  letters     {first letters of a variable: its sort}, for formulas
  fixed       {name: (sorts of the arguments,
                      result)} of what never changes. A result is a sort, 'bool' or 'int'
  state       the same, of what steps change
  rules       {name: what the code does without the rule}; `Model(name)` is the model without that rule
  axioms(s), init(s), safe(s), inv(s) -> {sentence: formula}
  step_xxx(s, a: 'Sort', ...) -> (guard, {variable: its new value, a function of its arguments})
A step is atomic. What it does not name stays as it is. The first line of its docstring names the function of
the engine that makes it. Optional:
  sizes       {sort: number} for runs by values; without it two of each. Elements are 'page0', 'page1'...
  start       {variable: function} of values for the random runs: constants that are not to be drawn
  core(s)     some conjuncts that are kept by themselves: they are asked for without the others first
  few         {sort: number} for counterexamples without a rule; without it two of each
  story       a run, 'step element ...; ...': for steps to which random runs do not come
  traces      {rule: {'sizes': {sort: number},
                      'start': {variable: function}}} for the search of a shortest run

    python MODEL.py                 proves the invariant by Z3; each step must happen in a random run
    python MODEL.py --cvc5          proves it by cvc5
    python MODEL.py RULE            leaves a rule out: a state and a step that lose a conjunct; exit 1
    python MODEL.py --rules         each rule left out must lose a conjunct
    python MODEL.py --trace RULE    prints a shortest run to the loss of a promise (`safe`) without the rule
    python MODEL.py --traces        does so for each rule in `traces`

A proof asks for each step and each conjunct C: axioms, invariant, guard and not C after the step. That must
be unsatisfiable. The sorts are uninterpreted, so the proof holds for any number of elements. In runs the same
text is evaluated by values: `And`, `Or`, `Not`, `Implies` and `If` take both.
"""
import inspect
import itertools
import random
import sys
import time
import z3
from solvers import Cvc5, Z3, term

SEED = 1
MIN_RUNS, RUNS, RUN_LENGTH, TRIES = 40, 400, 20, 30
NAMES = {}              # letters of the model at hand


def forced(x):
    """The value of a quantifier that was put off (`replay.py`)."""
    return x() if callable(x) else x


def And(*xs):
    xs = [forced(x) for x in xs]
    if any(x is False for x in xs):
        return False
    xs = [x for x in xs if x is not True]
    return True if not xs else xs[0] if len(xs) == 1 else z3.And(*xs)


def Or(*xs):
    xs = [forced(x) for x in xs]
    if any(x is True for x in xs):
        return True
    xs = [x for x in xs if x is not False]
    return False if not xs else xs[0] if len(xs) == 1 else z3.Or(*xs)


def Not(x):
    x = forced(x)
    return (not x) if isinstance(x, bool) else z3.Not(x)


def Implies(a, b):
    return Or(Not(a), b)


def If(c, a, b):
    return (a if c else b) if isinstance(c, bool) else z3.If(c, a, b)


def put(f, at, value):
    """The function `f`, but `value` at the arguments `at`."""
    at = at if isinstance(at, tuple) else (at,)
    return lambda *xs: If(And(*(x == a for x, a in zip(xs, at))), value, f(*xs))


def put_where(f, where, value):
    """The function `f`, but `value` (or `value` of the arguments) wherever `where` holds."""
    return lambda *xs: If(where(*xs), value(*xs) if callable(value) else value, f(*xs))


class State:
    """The variables as functions. `elements` is {sort: its elements} for values, None for formulas."""
    depth = 0

    def __init__(self, sorts, elements, functions):
        self.__dict__.update(functions)
        self.sorts, self.elements, self.functions = sorts, elements, functions

    def _quantify(self, f, is_all):
        kinds = kinds_of(f)
        if self.elements is not None:
            values = (f(*xs) for xs in itertools.product(*(self.elements[k] for _, k in kinds)))
            if self.sorts is None:
                return all(values) if is_all else any(values)
            return And(*values) if is_all else Or(*values)
        # The name of a bound variable says how deep it is, so that the same formula is the same term.
        State.depth += 1
        xs = [z3.Const(f'{n}_{State.depth}', self.sorts[k]) for n, k in kinds]
        body = f(*xs)
        State.depth -= 1
        return body if isinstance(body, bool) else (z3.ForAll if is_all else z3.Exists)(xs, body)

    def all(self, f):
        return self._quantify(f, True)

    def some(self, f):
        return self._quantify(f, False)

    def after(self, updates):
        unknown = set(updates) - set(self.functions)
        assert not unknown, f'no such variable: {unknown}'
        return State(self.sorts, self.elements, {**self.functions, **updates})


KINDS, UNIQUE = {}, itertools.count()


def kinds_of(f):
    """[(name, sort)] of the parameters of a formula; the sort is that of the letters in front of a digit."""
    code = f.__code__
    if code not in KINDS:
        params = inspect.signature(f).parameters.values()
        KINDS[code] = [(p.name,
                        NAMES[p.name.rstrip('0123456789')] if p.annotation is p.empty else p.annotation)
                       for p in params]
    return KINDS[code]


def use(model):
    NAMES.clear()
    KINDS.clear()
    NAMES.update(model.letters)


def steps_of(model):
    """[(name, function, [(parameter, sort)])]."""
    found = [(n[5:], getattr(model, n)) for n in dir(model) if n.startswith('step_')]
    return [(n,
             f, [(p.name, p.annotation) for p in inspect.signature(f).parameters.values() if p.name != 's'])
            for n, f in found]


def conjuncts(model, s):
    inv, safe = model.inv(s), model.safe(s)
    assert not set(inv) & set(safe)
    return {**inv, **safe}


# Proofs.

def symbolic(model, sizes=None):
    """A state of formulas; if there are `sizes`, of so many elements."""
    sorts = {n: z3.DeclareSort(n + 's') for n in model.sorts}     # cvc5 has a `Table` of its own
    elements = None
    if sizes is not None:
        enums = {n: z3.EnumSort(f'{n}{next(UNIQUE)}',
                                [f'{n.lower()}{k}_{next(UNIQUE)}' for k in range(sizes.get(n, 2))])
                 for n in model.sorts}
        sorts, elements = {n: k for n, (k, _) in enums.items()}, {n: list(es) for n, (_, es) in enums.items()}
    result = {**sorts, 'bool': z3.BoolSort(), 'int': z3.IntSort()}
    functions = {}
    for name, (args, res) in {**model.fixed, **model.state}.items():
        f = z3.Function(name, *[sorts[a] for a in args], result[res])
        functions[name] = f if args else (lambda c: lambda: c)(f())
    return State(sorts, elements, functions)


class Proof:
    """The queries of a model. `lost`: (step, conjunct, answer of the solver) of what is not kept."""

    def __init__(self, model, solver=Z3, stop=False, sizes=None):
        use(model)
        self.model, self.solver, self.stop, self.sizes = model, solver, stop, sizes
        self.s = symbolic(model, sizes)
        self.nr_queries, self.lost, self.began = 0, [], time.time()
        self.axioms = list(model.axioms(self.s).values())
        self.inv = conjuncts(model, self.s)
        self.core = model.core(self.s) if hasattr(model, 'core') else {}
        self.steps = steps_of(model)

    def run(self):
        self.ask('init', [*self.axioms, *self.model.init(self.s).values()], self.inv, [])
        for name, f, params in self.in_order():
            if self.stop and any(answer == 'sat' for _, _, answer in self.lost):
                break
            xs = [z3.Const(n, self.s.sorts[k]) for n, k in params]
            guard, updates = f(self.s, *xs)
            new = conjuncts(self.model, self.s.after(updates))
            # A conjunct that names nothing of what the step changes is kept.
            new = {n: c for n, c in new.items() if not term(c).eq(term(self.inv[n]))}
            self.ask(name, [*self.axioms, *self.inv.values(), guard], new, xs)
        self.seconds = time.time() - self.began
        return self

    def ask(self, step, assumed, goals, xs):
        solver = self.solver(self.s, assumed)
        # Fewer assumptions make a proof easier.
        few = self.solver(self.s, [*self.axioms, *self.core.values(), assumed[-1]]) if self.core else None
        for name, goal in goals.items():
            self.nr_queries += 1
            if step != 'init' and name in self.core and few.fails(goal) == 'unsat':
                continue
            answer = solver.fails(goal)
            if answer != 'unsat':
                self.lost.append((step, name, answer))
                if self.stop and answer == 'sat':
                    return self.remember(solver.model, xs)

    def in_order(self):
        """If a rule is left out: the steps first that differ."""
        if self.model.left_out is None:
            return self.steps
        whole = {n: f for n, f, _ in steps_of(self.model.__class__())}

        def is_same(step):
            name, f, params = step
            xs = [z3.Const(n, self.s.sorts[k]) for n, k in params]
            return name in whole and self.text(f, xs) == self.text(whole[name], xs)
        return sorted(self.steps, key=is_same)

    def text(self, f, xs):
        guard, updates = f(self.s, *xs)
        at = {n: [z3.Const(f'x{i}',
                           self.s.sorts[a]) for i, a in enumerate(self.model.state[n][0])] for n in updates}
        return str(term(guard)), {n: str(u(*at[n])) for n, u in updates.items()}

    def remember(self, m, xs):
        """The counterexample, as lines."""
        def show(v):
            return str(m.eval(v, model_completion=True)).replace('!val!', '') if z3.is_expr(v) else str(v)
        universe = self.s.elements or {
            n: m.get_universe(k) or [m.eval(z3.Const('any', k), True)] for n, k in self.s.sorts.items()}
        self.shown = []
        for name, (args, _) in {**self.model.fixed, **self.model.state}.items():
            cells = []
            for at in itertools.product(*(universe[a] for a in args)):
                v = show(getattr(self.s, name)(*at))
                if v != 'False':
                    cells.append(f'{",".join(map(show, at))}{"" if v == "True" else "=" + v}')
            self.shown.append(f'  {name:12} {"  ".join(cells)}')
        self.shown.append(f'  the step with {", ".join(f"{x}={show(x)}" for x in xs)}')


# Values.

class Values:
    """A model with a few elements of each sort. A state is a tuple of tables."""

    def __init__(self, model, sizes, fixed, start):
        use(model)
        self.model, self.names = model, list(model.state)
        self.elements = {n: [f'{n.lower()}{i}' for i in range(sizes.get(n, 2))] for n in model.sorts}
        self.cells = {n: list(itertools.product(*(self.elements[k] for k in args)))
                      for n, (args, _) in {**model.fixed, **model.state}.items()}
        self.constant = {n: self.lookup(n, self.table(n, fixed.get(n), res)) for n,
                         (_, res) in model.fixed.items()}
        self.first = tuple(self.table(n, start.get(n), res) for n, (_, res) in model.state.items())
        self.steps = {n: (f, list(itertools.product(*(self.elements[k] for _, k in params))))
                      for n, f, params in steps_of(model)}

    def table(self, name, f, res):
        default = False if res == 'bool' else 0 if res == 'int' else self.elements[res][0]
        return tuple(f(*at) if f else default for at in self.cells[name])

    def lookup(self, name, values):
        table = dict(zip(self.cells[name], values))
        return lambda *at: table[at]

    def state(self, values):
        functions = {n: self.lookup(n, v) for n, v in zip(self.names, values)}
        return State(None, self.elements, {**self.constant, **functions})

    def after(self, values, step):
        """The state after the step, or None."""
        name, *xs = step.split()
        guard, updates = self.steps[name][0](self.state(values), *xs)
        return self.changed(values, updates) if guard else None

    def changed(self, values, updates):
        return tuple(tuple(updates[n](*at) for at in self.cells[n]) if n in updates else v
                     for n, v in zip(self.names, values))

    def next(self, values, in_order=list, chance=None):
        """Yields (step, state after it) of each step that can happen; of each name once if by `chance`."""
        s = self.state(values)
        for name in in_order(self.steps):
            f, arguments = self.steps[name]
            for xs in chance.sample(arguments, min(TRIES, len(arguments))) if chance else arguments:
                guard, updates = f(s, *xs)
                if guard:
                    yield name if chance else ' '.join((name, *xs)), self.changed(values, updates)
                    if chance:
                        break


def broken(formulas):
    return [n for n, c in formulas.items() if not c]


def random_runs(model):
    """Random runs of the model. Returns the steps that never happened, and what the runs found wrong.

    A run goes on from a state to which an earlier run came, rather by a step that seldom happens.
    """
    chance, sizes = random.Random(SEED), getattr(model, 'sizes', {})
    came = {n: [] for n, _, _ in steps_of(model)}
    count = dict.fromkeys(came, 0)

    def in_order(names):
        """At random, rather those first that seldom came."""
        return sorted(names, key=lambda n: chance.expovariate(1) * (1 + count[n]))

    v, values = first_state(model, sizes, chance)
    for step in [x.strip() for x in getattr(model, 'story', '').split(';') if x.strip()]:
        values = v.after(values, step)
        if values is None:
            return [], f'"{step}" of the story cannot happen there'
        if lost := broken(conjuncts(model, v.state(values))):
            return [], f'"{step}" of the story loses {lost}'
        name = step.split()[0]
        count[name] += 1
        came[name] = [(v, values)]
    for nr in range(RUNS):
        v, values = first_state(model, sizes, chance)
        reached = [n for n in came if came[n]]
        if reached and nr % 3:
            v, values = chance.choice(came[in_order(reached)[0]])
        # Half of the steps: the others would disturb what takes many steps.
        some = [n for n in came if nr % 2 or chance.random() < 0.5]
        for _ in range(RUN_LENGTH):
            name, values = next(v.next(values, lambda steps: in_order(some), chance), (None, values))
            if name is None:
                break
            count[name] += 1
            came[name] = [*came[name][-7:], (v, values)]
        if lost := broken(conjuncts(model, v.state(values))):
            return [], f'a random run loses {lost}'
        if nr >= MIN_RUNS and all(count.values()):
            break
    return [n for n, k in count.items() if not k], None


def first_state(model, sizes, chance):
    """Random constants that satisfy the axioms; the initial state with default values."""
    for _ in range(1000):
        drawn = {}

        def draw(name, res):
            def value(*at):
                key = (name, at)
                if key not in drawn:
                    some = {'bool': [False, True], 'int': [0, 1, 2]}.get(res)
                    names = [f'{res.lower()}{i}' for i in range(sizes.get(res, 2))]
                    drawn[key] = chance.choice(some or names)
                return drawn[key]
            return value
        start = getattr(model, 'start', {})
        fixed = {n: start.get(n) or draw(n, res) for n, (_, res) in model.fixed.items()}
        v = Values(model, sizes, fixed, start)
        s = v.state(v.first)
        if not broken(model.axioms(s)):
            wrong = broken(model.init(s))
            assert not wrong, f'the values of the first state are not initial: {wrong}'
            return v, v.first
    assert False, 'no constants found that satisfy the axioms'


def shortest_run(model, sizes, start={}, max_states=400000):
    """Breadth first. Returns (lost promises, steps) or None, and the number of states."""
    v = Values(model, sizes, start, start)
    s = v.state(v.first)
    wrong = broken({**model.axioms(s), **model.init(s)})
    assert not wrong or not broken({**model.axioms(s), **conjuncts(model, s)}), \
        f'the first state is not initial ({wrong}), and breaks {broken(conjuncts(model, s))}'
    came, todo, done = {v.first: None}, [v.first], 0
    while done < len(todo) and len(todo) < max_states:
        values = todo[done]
        done += 1
        for step, new in v.next(values):
            if new in came:
                continue
            came[new] = (values, step)
            if lost := broken(model.safe(v.state(new))):
                path = []
                while came[new]:
                    new, step = came[new]
                    path.append(step)
                return (lost, path[::-1]), len(came)
            todo.append(new)
    return None, len(came)


# The command.

def prove(cls, solver):
    model = cls()
    proof = Proof(model, solver).run()
    for step, name, answer in proof.lost:
        print(f'  {step}: {name}' if answer == 'unsat' else f'  {step} does not keep "{name}" ({answer})')
    failed = bool(proof.lost)
    unseen = []
    if solver is Z3 and not failed:
        unseen, wrong = random_runs(model)
        if unseen or wrong:
            print(f'  {wrong}' if wrong else f'  in no random run: {", ".join(unseen)}')
            failed = True
    result = 'FAILED' if failed else 'proved'
    print(f'{cls.__name__}: {result} by {solver.__name__}: {len(model.inv(proof.s))} conjuncts, '
          f'{len(model.safe(proof.s))} promises, {len(proof.steps)} steps, {proof.nr_queries} queries, '
          f'{proof.seconds:.1f} s', flush=True)
    return not failed


def notices(cls, rule, verbose=False):
    """Whether a conjunct is lost without the rule."""
    # A counterexample of few elements is found soon, if there is one.
    for sizes in getattr(cls, 'few', {}), None:
        proof = Proof(cls(rule), stop=True, sizes=sizes).run()
        lost = [(step, name) for step, name, answer in proof.lost if answer == 'sat']
        if lost:
            break
    if lost:
        print(f'{cls.__name__} without {rule}: {lost[0][0]} loses "{lost[0][1]}"', flush=True)
        if verbose:
            print('\n'.join(proof.shown))
    else:
        print(f'{cls.__name__} without {rule}: FAILED: nothing is lost {proof.lost or ""}', flush=True)
    return bool(lost)


def trace(cls, rule):
    began = time.time()
    found, nr_states = shortest_run(cls(rule), **cls.traces[rule])
    effort = f'{nr_states} states, {time.time() - began:.1f} s'
    if found:
        print(f'{cls.__name__} without {rule}: {len(found[1])} steps lose "{found[0][0]}" ({effort}):',
              flush=True)
        print('    ' + '; '.join(found[1]), flush=True)
    else:
        print(f'{cls.__name__} without {rule}: FAILED: no run found ({effort})', flush=True)
    return bool(found)


def main(cls):
    arguments = sys.argv[1:]
    if not arguments:
        good = prove(cls, Z3)
    elif arguments == ['--cvc5']:
        good = prove(cls, Cvc5)
    elif arguments == ['--rules']:
        good = all([notices(cls, rule) for rule in cls.rules])
    elif arguments == ['--traces']:
        good = all([trace(cls, rule) for rule in getattr(cls, 'traces', {})])
    elif arguments[0] == '--trace' and arguments[1:] and arguments[1] in cls.traces:
        good = trace(cls, arguments[1])
    elif arguments[0] in cls.rules:
        good = not notices(cls, arguments[0], verbose=True)
    else:
        print(f'usage: [RULE | --cvc5 | --rules | --trace RULE | --traces]; rules: {", ".join(cls.rules)}')
        good = False
    sys.exit(0 if good else 1)
