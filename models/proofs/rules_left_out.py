"""What is lost without the rules of a model. `lost.txt` has it for each file and rule:

    a step, and a conjunct that it loses
    the steps of a shortest run to the loss of a promise, if the model has a `trace` for the rule

`python MODEL.py --rules` asks for these alone. So it takes seconds, and it notices that a rule is needed for
something else by now. `--search` finds them.
"""
import inspect
import pathlib
import re
import textwrap
import time
from prover import Proof, broken, first_of_run, shortest_run


class Losses:
    """The part of a file in `lost.txt`: {rule: ((step, conjunct), None or the steps of a shortest run)}."""
    path = pathlib.Path(__file__).with_name('lost.txt')

    def __init__(self, cls):
        self.name, self.found = pathlib.Path(inspect.getfile(cls)).name, {}
        for line in self.parts().get(self.name, []):
            if not line.startswith('     '):
                rule, step, conjunct = re.fullmatch(r'    (\S+): (\S+) loses "(.*)"', line).groups()
                self.found[rule] = (step, conjunct), ''
            else:
                lost, path = self.found[rule]
                self.found[rule] = lost, f'{path} {line.strip()}'

    def parts(self):
        """{file: its lines}."""
        parts, lines = {}, self.path.read_text().split('\n') if self.path.exists() else []
        for line in filter(None, lines):
            if line.startswith(' '):
                parts[name].append(line)
            else:
                name = line
                parts[name] = []
        return parts

    def run(self, rule):
        return [step.strip() for step in self.found[rule][1].split(';')]

    def write(self, found):
        """`found`: {rule: (step, conjunct, None or steps)}."""
        lines = []
        for rule, (step, conjunct, path) in found.items():
            lines.append(f'    {rule}: {step} loses "{conjunct}"')
            lines += textwrap.wrap('; '.join(path or []), 100, initial_indent=8 * ' ', subsequent_indent=8 * ' ')
        parts = {**self.parts(), self.name: lines}
        self.path.write_text('\n'.join('\n'.join([name, *parts[name]]) for name in sorted(parts)) + '\n')


def notices(cls, rule, losses):
    """Whether the step loses the conjunct without the rule, and the run a promise."""
    if rule not in losses.found:
        print(f'{cls.__name__} without {rule}: FAILED: not in {losses.path.name}', flush=True)
        return False
    step, conjunct = losses.found[rule][0]
    result = f'{cls.__name__} without {rule}: {step} loses "{conjunct}"'
    # A counterexample of few elements is found soon, if there is one.
    proofs = (Proof(cls(rule), sizes) for sizes in (getattr(cls, 'few', {}), None))
    good = any(proof.loses(found, conjunct) for proof in proofs for found in proof.steps if found[0] == step)
    if rule in getattr(cls, 'traces', {}):
        lost = end_of_run(cls(rule), losses.run(rule), **cls.traces[rule])
        good &= bool(lost)
        result += f', and {len(losses.run(rule))} steps lose "{lost[0] if lost else None}"'
    print(result if good else f'{result}: FAILED', flush=True)
    return good


def end_of_run(model, path, sizes, start={}):
    """The promises that are lost when the last step of a run was made; None if it is no such run."""
    v, values = first_of_run(model, sizes, start)
    for step in path:
        if values is None or broken(model.safe(v.state(values))):
            return None
        values = v.after(values, step)
    return values and broken(model.safe(v.state(values)))


def search(cls, rule):
    """(step, conjunct that it loses, lines of a state before it) without the rule, or None."""
    for sizes in getattr(cls, 'few', {}), None:
        proof = Proof(cls(rule), sizes)
        for step in proof.in_order():
            if name := proof.loses(step):
                return step[0], name, proof.shown
    return None


def trace(cls, rule):
    """The steps of a shortest run to the loss of a promise, or None."""
    began = time.time()
    found, nr_states = shortest_run(cls(rule), **cls.traces[rule])
    effort = f'{nr_states} states, {time.time() - began:.1f} s'
    if not found:
        print(f'{cls.__name__} without {rule}: FAILED: no run found ({effort})', flush=True)
        return None
    print(f'{cls.__name__} without {rule}: {len(found[1])} steps lose "{found[0][0]}" ({effort}):', flush=True)
    print('    ' + '; '.join(found[1]), flush=True)
    return found[1]


def rules_are_noticed(cls):
    losses = Losses(cls)
    if unknown := set(losses.found) - set(cls.rules):
        print(f'{cls.__name__}: FAILED: no rules: {", ".join(unknown)}', flush=True)
    return all([notices(cls, rule, losses) for rule in cls.rules]) and not unknown


def explain(cls, rule):
    """Prints what is lost without the rule."""
    found = search(cls, rule)
    if not found:
        print(f'{cls.__name__} without {rule}: FAILED: nothing is lost')
        return True
    print(f'{cls.__name__} without {rule}: {found[0]} loses "{found[1]}"')
    print('\n'.join(found[2]))
    return False


def write_losses(cls):
    found, traces = {}, getattr(cls, 'traces', {})
    for rule in cls.rules:
        lost, path = search(cls, rule), trace(cls, rule) if rule in traces else None
        if not lost or (rule in traces and not path):
            print(f'{cls.__name__} without {rule}: FAILED: nothing is lost')
            return False
        found[rule] = *lost[:2], path
    Losses(cls).write(found)
    return True
