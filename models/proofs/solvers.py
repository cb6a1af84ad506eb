"""The solvers of the proofs: Z3, and cvc5 as a second opinion."""
import z3

# What a query may take, by the solvers' own counts. So an answer depends neither on the machine nor on its load. It
# is eight times as much as any query of the proofs takes.
Z3_RESOURCES = 50_000_000
CVC5_RESOURCES = 2_000_000


def term(x):
    return z3.BoolVal(x) if isinstance(x, bool) else z3.IntVal(x) if isinstance(x, int) else x


class Z3:
    """Asks Z3 whether assumptions allow a goal to fail."""

    def __init__(self, s):
        self.used = None                # the assumptions by which the last goal holds

    def assume(self, formulas):
        self.solver = z3.Solver()
        self.solver.set('rlimit', Z3_RESOURCES)
        self.named = {f'assumed{n}': formula for n, formula in enumerate(formulas)}
        for name, formula in self.named.items():
            self.solver.add(z3.Implies(z3.Bool(name), term(formula)))

    def fails(self, goal, likely=None):
        """'sat', 'unsat' or 'unknown'."""
        self.solver.push()
        self.solver.add(z3.Not(term(goal)))
        answer = str(self.solver.check(*map(z3.Bool, self.named)))
        self.model = self.solver.model() if answer == 'sat' else None
        self.used = [self.named[str(name)] for name in self.solver.unsat_core()] if answer == 'unsat' else None
        self.solver.pop()
        return answer


class Cvc5:
    """Asks cvc5 the same. If it does not know, it tries all terms (`saturates`)."""
    used = None

    def __init__(self, s):
        import cvc5
        self.cvc5, self.terms = cvc5, cvc5.TermManager()
        self.solvers = [self.solver(saturates) for saturates in (False, True)]
        self.parser = cvc5.InputParser(self.solvers[0])
        self.of_formula, self.known = {}, set()
        self.tell(['(set-logic ALL)', *(f'(declare-sort {k} 0)' for k in s.sorts.values())])

    def solver(self, saturates):
        solver = self.cvc5.Solver(self.terms)
        solver.setOption('incremental', 'true')
        solver.setOption('rlimit-per', str(CVC5_RESOURCES))
        if saturates:
            solver.setOption('full-saturate-quant', 'true')
        return solver

    def read(self, text):
        self.parser.setStringInput(self.cvc5.InputLanguage.SMT_LIB_2_6, text, 'formula')

    def tell(self, lines):
        self.read('\n'.join(lines))
        while not (command := self.parser.nextCommand()).isNull():
            command.invoke(self.solvers[0], self.parser.getSymbolManager())

    def term(self, formula):
        """The formula as a term of cvc5. What it names is declared."""
        formula = term(formula)
        number = formula.get_id()
        if number not in self.of_formula:
            symbols = {}
            collect(formula, symbols, set())
            new = {n: d for n, d in symbols.items() if n not in self.known}
            if new:
                self.known |= set(new)
                self.tell([d.sexpr() for d in new.values()])
            self.read(formula.sexpr())
            # With the formula, so that it keeps its number.
            self.of_formula[number] = formula, self.parser.nextTerm()
        return self.of_formula[number][1]

    def assume(self, formulas):
        self.assumed = formulas

    def fails(self, goal, likely=None):
        """As of Z3. `likely`: the assumptions by which the goal holds, as another solver says."""
        fails = self.terms.mkTerm(self.cvc5.Kind.NOT, self.term(goal))
        for formulas in [self.assumed] if likely is None else [likely, self.assumed]:
            for solver in self.solvers:
                solver.push()
                for formula in formulas:
                    solver.assertFormula(self.term(formula))
                solver.assertFormula(fails)
                answer = solver.checkSat()
                solver.pop()
                if answer.isUnsat():
                    return 'unsat'
                if answer.isSat():
                    break
        return str(answer)


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
