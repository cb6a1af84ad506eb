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
the engine that makes it. A model that inherits a step and does not have it sets it to None. Optional:
  sizes       {sort: number} for runs by values; without it two of each. Elements are 'page0', 'page1'...
  start       {variable: function} of values for the random runs: constants that are not to be drawn
  few         {sort: number} for counterexamples without a rule; without it two of each
  story       a run, 'step element ...; ...': for steps to which random runs do not come
  traces      {rule: {'sizes': {sort: number},
                      'start': {variable: function}}} for the shortest runs

    python MODEL.py                 proves the invariant by Z3; each step must happen in a random run
    python MODEL.py --cvc5          proves it by cvc5
    python MODEL.py --rules         each rule left out must lose what `lost.txt` says
    python MODEL.py --all           all of that
    python MODEL.py RULE            leaves a rule out: a state and a step that lose a conjunct; exit 1
    python MODEL.py --trace RULE    prints a shortest run to the loss of a promise (`safe`) without the rule
    python MODEL.py --search        searches both for each rule, and writes them to `lost.txt`

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
import solvers
from solvers import Cvc5, Z3, term

SEED = 1
MIN_RUNS, RUNS, RUN_LENGTH, TRIES = 40, 400, 20, 30
NAMES = {}              # letters of the model at hand


def forced(x):
    """The value of a quantifier that was put off (`State.is_lazy`)."""
    return x() if callable(x) else x


def joined(xs, decides, of_solver):
    """And, or Or: one operand that has the value `decides` decides."""
    rest = []
    for x in xs:
        x = forced(x)
        if x is decides:
            return decides
        if not isinstance(x, bool):
            rest.append(x)
    return not decides if not rest else rest[0] if len(rest) == 1 else of_solver(*rest)


def And(*xs):
    return joined(xs, False, z3.And)


def Or(*xs):
    return joined(xs, True, z3.Or)


def Not(x):
    x = forced(x)
    return (not x) if isinstance(x, bool) else z3.Not(x)


def Implies(a, b):
    return Or(Not(a), b)


def If(c, a, b):
    c, a, b = forced(c), forced(a), forced(b)
    return (a if c else b) if isinstance(c, bool) else z3.If(c, a, b)


def put(f, at, value):
    """The function `f`, but `value` at the arguments `at`."""
    at = at if isinstance(at, tuple) else (at,)
    return lambda *xs: If(And(*(x == a for x, a in zip(xs, at))), value, f(*xs))


def put_where(f, where, value):
    """The function `f`, but `value` (or `value` of the arguments) wherever `where` holds."""
    return lambda *xs: If(where(*xs), value(*xs) if callable(value) else value, f(*xs))


class Protocol:
    """The base of a model."""

    def __init__(self, left_out=None):
        assert left_out is None or left_out in self.rules, left_out
        self.left_out = left_out

    def without(self, *rules):
        """Whether one of these rules is left out."""
        return self.left_out in rules

    def axioms(self, s):
        return {}


class State:
    """The variables as functions. `elements` is {sort: its elements} for values, None for formulas.

    While `is_lazy`, outermost quantifiers are put off.
    """
    depth, is_lazy = 0, False

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
        return (lambda: self._quantify(f, True)) if self.is_lazy else self._quantify(f, True)

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
    found = [(n[5:], getattr(model, n)) for n in dir(model) if n.startswith('step_') and getattr(model, n)]
    return [(n,
             f, [(p.name, p.annotation) for p in inspect.signature(f).parameters.values() if p.name != 's'])
            for n, f in found]


def conjuncts(model, s):
    inv, safe = model.inv(s), model.safe(s)
    assert not set(inv) & set(safe)
    return {**inv, **safe}


def some_conjuncts(model, s, is_wanted):
    """Those with a name that is wanted; of others not even the formula is made."""
    s.is_lazy = True
    formulas = conjuncts(model, s)
    s.is_lazy = False
    return {n: forced(c) for n, c in formulas.items() if is_wanted(n)}


def variables_of(model, formulas):
    """{name: the variables in the formula}."""
    found = {}
    for name, formula in formulas.items():
        symbols = {}
        solvers.collect(solvers.term(formula), symbols, set())
        found[name] = set(symbols) & set(model.state)
    return found


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
    """The queries of a model."""

    def __init__(self, model, sizes=None):
        use(model)
        self.model = model
        self.s = symbolic(model, sizes)
        self.axioms = list(model.axioms(self.s).values())
        self.inv = conjuncts(model, self.s)
        self.steps = steps_of(model)

    def assumed(self, name, f, params):
        """(what holds before the step, its arguments, what it changes)."""
        xs = [z3.Const(n, self.s.sorts[k]) for n, k in params]
        guard, updates = f(self.s, *xs)
        return [*self.axioms, *self.inv.values(), guard], xs, updates

    def prove(self, kinds):
        """Asks all solvers for all steps. `lost`: (solver, step, conjunct, answer) of what is not kept."""
        self.solvers, self.nr_queries, self.lost = [kind(self.s) for kind in kinds], 0, []
        self.ask('init', [*self.axioms, *self.model.init(self.s).values()], self.inv)
        reads = variables_of(self.model, self.inv)
        for step in self.steps:
            assumed, _, updates = self.assumed(*step)
            new = some_conjuncts(self.model, self.s.after(updates), lambda n: reads[n] & set(updates))
            # A conjunct that names nothing of what the step changes is kept.
            self.ask(step[0], assumed, {n: c for n, c in new.items() if not term(c).eq(term(self.inv[n]))})

    def ask(self, step, assumed, goals):
        """A solver is told which assumptions the one before has used: few assumptions make a proof easier."""
        self.nr_queries += len(goals)
        for solver in self.solvers:
            solver.assume(assumed)
        for name, goal in goals.items():
            used = None
            for solver in self.solvers:
                answer = solver.fails(goal, used)
                if answer != 'unsat':
                    self.lost.append((type(solver).__name__, step, name, answer))
                used = solver.used

    def loses(self, step, conjunct=None):
        """The conjunct that the step loses, of one or of all, or None."""
        assumed, xs, updates = self.assumed(*step)
        solver = Z3(self.s)
        solver.assume(assumed)
        is_asked = lambda n: conjunct in (None, n)
        for name, goal in some_conjuncts(self.model, self.s.after(updates), is_asked).items():
            if not term(goal).eq(term(self.inv[name])) and solver.fails(goal) == 'sat':
                self.remember(solver.model, xs)
                return name

    def in_order(self):
        """If a rule is left out: the steps first that differ."""
        if self.model.left_out is None:
            return self.steps
        whole = {n: f for n, f, _ in steps_of(self.model.__class__())}

        def is_same(step):
            name, f, params = step
            xs = [z3.Const(n, self.s.sorts[k]) for n, k in params]
            if name not in whole:
                return False
            a, b = self.effect(f, xs), self.effect(whole[name], xs)
            return a.keys() == b.keys() and all(a[n].eq(b[n]) for n in a)
        return sorted(self.steps, key=is_same)

    def effect(self, f, xs):
        guard, updates = f(self.s, *xs)
        at = {n: [z3.Const(f'x{i}', self.s.sorts[a]) for i, a in enumerate(self.model.state[n][0])] for n in updates}
        return {None: term(guard), **{n: term(u(*at[n])) for n, u in updates.items()}}

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


def first_of_run(model, sizes, start):
    v = Values(model, sizes, start, start)
    s = v.state(v.first)
    wrong = broken({**model.axioms(s), **model.init(s)})
    assert not wrong or not broken({**model.axioms(s), **conjuncts(model, s)}), \
        f'the first state is not initial ({wrong}), and breaks {broken(conjuncts(model, s))}'
    return v, v.first


def shortest_run(model, sizes, start={}, max_states=400000):
    """Breadth first. Returns (lost promises, steps) or None, and the number of states."""
    v, first = first_of_run(model, sizes, start)
    came, todo, done = {first: None}, [first], 0
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

def prove(cls, kinds):
    model, began = cls(), time.process_time()
    proof = Proof(model)
    proof.prove(kinds)
    for solver, step, name, answer in proof.lost:
        print(f'  {step} does not keep "{name}" ({solver}: {answer})')
    failed = bool(proof.lost)
    if Z3 in kinds and not failed:
        unseen, wrong = random_runs(model)
        if unseen or wrong:
            print(f'  {wrong}' if wrong else f'  in no random run: {", ".join(unseen)}')
            failed = True
    result = 'FAILED' if failed else 'proved'
    print(f'{cls.__name__}: {result} by {" and ".join(kind.__name__ for kind in kinds)}: '
          f'{len(model.inv(proof.s))} conjuncts, {len(model.safe(proof.s))} promises, {len(proof.steps)} steps, '
          f'{proof.nr_queries} queries, {time.process_time() - began:.1f} s', flush=True)
    return not failed


def main(cls):
    import rules_left_out               # which imports this module
    arguments = sys.argv[1:]
    if not arguments:
        good = prove(cls, [Z3])
    elif arguments == ['--cvc5']:
        good = prove(cls, [Cvc5])
    elif arguments == ['--rules']:
        good = rules_left_out.rules_are_noticed(cls)
    elif arguments == ['--all']:
        good = all([prove(cls, [Z3, Cvc5]), rules_left_out.rules_are_noticed(cls)])
    elif arguments == ['--search']:
        good = rules_left_out.write_losses(cls)
    elif arguments[0] == '--trace' and arguments[1:] and arguments[1] in cls.traces:
        good = bool(rules_left_out.trace(cls, arguments[1]))
    elif arguments[0] in cls.rules:
        good = rules_left_out.explain(cls, arguments[0])
    else:
        print(f'usage: [RULE | --cvc5 | --rules | --all | --trace RULE | --search]; rules: {", ".join(cls.rules)}')
        good = False
    sys.exit(0 if good else 1)
