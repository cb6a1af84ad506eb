"""Formulas as functions in Python, which evaluate them by values much faster than `prover.State` does.

A quantifier becomes a search for an element that makes its body true (or false). What the body says of the outer
variables alone is asked for outside of the inner loops, so that most elements are passed by at once.
"""
import re
import z3
from solvers import term

OPERATORS = {z3.Z3_OP_EQ: '==', z3.Z3_OP_DISTINCT: '!=', z3.Z3_OP_LE: '<=', z3.Z3_OP_LT: '<', z3.Z3_OP_GE: '>=',
             z3.Z3_OP_GT: '>', z3.Z3_OP_ADD: '+', z3.Z3_OP_SUB: '-'}


def function(formula, defaults):
    """A function of {variable: {arguments: value}} and {sort: its elements}. `defaults`: {variable: value}."""
    writer = Writer(defaults)
    text = writer.formula(term(formula), True, [])
    lines = ['def holds(values, elements):',
             *(f'    {name}_of = values[{name!r}].get' for name in sorted(writer.variables)),
             *(f'    all_{sort} = elements[{sort!r}]' for sort in sorted(writer.sorts)),
             f'    return {text}']
    scope = {}
    exec('\n'.join(lines), scope)
    return scope['holds']


class Writer:
    def __init__(self, defaults):
        self.defaults, self.variables, self.sorts, self.nr = defaults, set(), set(), 0

    def formula(self, e, is_wanted, bound):
        """A condition: that the formula has this truth. `bound`: names of the bound variables."""
        if z3.is_not(e):
            return self.formula(e.arg(0), not is_wanted, bound)
        if z3.is_and(e) or z3.is_or(e):
            joint = ' and ' if z3.is_and(e) == is_wanted else ' or '
            parts = [self.formula(c, is_wanted, bound) for c in e.children()]
            return f'({joint.join(sorted(parts, key=has_loop))})'
        if z3.is_quantifier(e):
            is_some = not e.is_forall()
            found = self.search(e, is_some, bound)
            return found if is_some == is_wanted else f'(not {found})'
        value = self.value(e, bound)
        return value if is_wanted else f'(not {value})'

    def search(self, e, is_some, bound):
        """Whether there are elements for which the body is true, or false."""
        new = []
        for n in range(e.num_vars()):
            self.nr += 1
            self.sorts.add(sort := e.var_sort(n).name()[:-1])
            new.append((f'x{self.nr}', sort))
        bound = [*bound, *(name for name, _ in new)]
        conditions = [self.formula(c, is_true, bound) for c, is_true in conjuncts(e.body(), is_some)]
        conditions.sort(key=has_loop)
        unbound = [name for name, _ in new]
        text = []

        def now():
            """The conditions that name none of the unbound, which are taken."""
            names = set(unbound)
            found = [c for c in conditions if not names & set(re.findall(r'\w+', c))]
            for c in found:
                conditions.remove(c)
            return found
        outside = now()
        while unbound:
            def nr_left(name):
                others = set(unbound) - {name}
                return sum(bool(others & set(re.findall(r'\w+', c))) for c in conditions)
            name = min(unbound, key=nr_left)
            unbound.remove(name)
            text.append(f'for {name} in all_{dict(new)[name]}')
            text += [f'if {c}' for c in now()]
        return '(' + ' and '.join([*outside, f'any(True {" ".join(text)})']) + ')'

    def value(self, e, bound):
        if z3.is_var(e):
            return bound[-1 - z3.get_var_index(e)]
        if z3.is_quantifier(e) or z3.is_and(e) or z3.is_or(e) or z3.is_not(e):
            return self.formula(e, True, bound)
        if z3.is_int_value(e):
            return str(e.as_long())
        if z3.is_true(e) or z3.is_false(e):
            return str(z3.is_true(e))
        values, kind = [self.value(c, bound) for c in e.children()], e.decl().kind()
        if kind == z3.Z3_OP_UNINTERPRETED:
            name = e.decl().name()
            self.variables.add(name)
            return f'{name}_of(({"".join(v + ", " for v in values)}), {self.defaults[name]!r})'
        if kind == z3.Z3_OP_ITE:
            return f'({values[1]} if {values[0]} else {values[2]})'
        return f'({f" {OPERATORS[kind]} ".join(values)})'


def has_loop(text):
    return 'any(' in text


def conjuncts(e, is_true):
    """[(formula, truth)] that together say that `e` is true, or false."""
    if z3.is_not(e):
        return conjuncts(e.arg(0), not is_true)
    if z3.is_and(e) and is_true or z3.is_or(e) and not is_true:
        return [c for part in e.children() for c in conjuncts(part, is_true)]
    return [(e, is_true)]
