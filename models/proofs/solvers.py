"""The solvers of the proofs: Z3, and cvc5 as a second opinion."""
import z3

# What a query may take, by the solvers' own counts. So an answer depends neither on the machine nor on its load. It
# is 20 times as much as any query of the proofs takes.
Z3_RESOURCES = 50_000_000
CVC5_RESOURCES = 2_000_000


def term(x):
    return z3.BoolVal(x) if isinstance(x, bool) else z3.IntVal(x) if isinstance(x, int) else x


class Z3:
    """Asks Z3 whether assumptions allow a goal to fail."""

    def __init__(self, s, assumed):
        self.solver = z3.Solver()
        self.solver.set('rlimit', Z3_RESOURCES)
        self.solver.add(*map(term, assumed))

    def fails(self, goal):
        """'sat', 'unsat' or 'unknown'."""
        self.solver.push()
        self.solver.add(z3.Not(term(goal)))
        self.answer = str(self.solver.check())
        self.model = self.solver.model() if self.answer == 'sat' else None
        self.solver.pop()
        return self.answer


class Cvc5:
    """Asks cvc5 the same, in SMT-LIB. If it does not know, it tries all terms (`saturates`)."""

    def __init__(self, s, assumed, saturates=False):
        import cvc5
        self.cvc5 = cvc5
        self.solver = cvc5.Solver(cvc5.TermManager())
        self.again = None if saturates else lambda: Cvc5(s, assumed, True)
        self.solver.setOption('incremental', 'true')
        if saturates:
            self.solver.setOption('full-saturate-quant', 'true')
        self.solver.setOption('rlimit-per', str(CVC5_RESOURCES))
        self.parser = cvc5.InputParser(self.solver)
        self.known = set()
        self.tell(['(set-logic ALL)', *(f'(declare-sort {k} 0)' for k in s.sorts.values())])
        texts = [self.text(term(e)) for e in assumed]
        self.tell([f'(assert {text})' for text in texts])

    def tell(self, lines):
        self.parser.setStringInput(self.cvc5.InputLanguage.SMT_LIB_2_6, '\n'.join(lines), 'query')
        names, answer = self.parser.getSymbolManager(), ''
        while not (command := self.parser.nextCommand()).isNull():
            answer = command.invoke(self.solver, names).strip() or answer
        return answer

    def text(self, e):
        """The formula in SMT-LIB. What it names is declared."""
        text, symbols = in_smt_lib(e)
        new = {n: d for n, d in symbols.items() if n not in self.known}
        if new:
            self.known |= set(new)
            self.tell([d.sexpr() for d in new.values()])
        return text

    def fails(self, goal):
        text = self.text(term(goal))
        answer = self.tell(['(push 1)', f'(assert (not {text}))', '(check-sat)', '(pop 1)'])
        return self.again().fails(goal) if answer.startswith('unknown') and self.again else answer


TEXTS = {}              # of formulas that were asked about, by their number; a formula keeps its number


def in_smt_lib(e):
    """(the formula in SMT-LIB, its uninterpreted functions)."""
    if e.get_id() not in TEXTS:
        symbols = {}
        collect(e, symbols, set())
        TEXTS[e.get_id()] = e, e.sexpr(), symbols
    return TEXTS[e.get_id()][1:]


def collect(e, symbols, seen):
    """Adds the uninterpreted functions of a formula to `symbols`."""
    if e.get_id() in seen:
        return
    seen.add(e.get_id())
    if z3.is_quantifier(e):
        collect(e.body(), symbols, seen)
    elif z3.is_app(e):
        if e.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            symbols[e.decl().name()] = e.decl()
        for c in e.children():
            collect(c, symbols, seen)
