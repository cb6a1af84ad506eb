"""The solvers of the proofs: Z3, and cvc5 as a second opinion."""
import z3

TIMEOUT = 30            # seconds a query


def term(x):
    return z3.BoolVal(x) if isinstance(x, bool) else x


class Z3:
    """Asks Z3 whether assumptions allow a goal to fail."""

    def __init__(self, s, assumed):
        self.solver = z3.Solver()
        self.solver.set('timeout', TIMEOUT * 1000)
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
        self.solver.setOption('tlimit-per', str(TIMEOUT * 1000))
        self.parser = cvc5.InputParser(self.solver)
        symbols = {}
        for e in map(term, assumed):
            collect(e, symbols, set())
        self.known = set(symbols)
        lines = ['(set-logic ALL)', *(f'(declare-sort {k} 0)' for k in s.sorts.values())]
        self.tell(lines + declared(symbols) + [f'(assert {term(e).sexpr()})' for e in assumed])

    def tell(self, lines):
        self.parser.setStringInput(self.cvc5.InputLanguage.SMT_LIB_2_6, '\n'.join(lines), 'query')
        names, answer = self.parser.getSymbolManager(), ''
        while not (command := self.parser.nextCommand()).isNull():
            answer = command.invoke(self.solver, names).strip() or answer
        return answer

    def fails(self, goal):
        symbols = {}
        collect(term(goal), symbols, set())
        new = {n: d for n, d in symbols.items() if n not in self.known}
        self.known |= set(new)
        self.tell(declared(new))
        answer = self.tell(['(push 1)', f'(assert (not {term(goal).sexpr()}))', '(check-sat)', '(pop 1)'])
        return self.again().fails(goal) if answer.startswith('unknown') and self.again else answer


def declared(symbols):
    return [d.sexpr() for d in symbols.values()]


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
