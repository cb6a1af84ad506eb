"""The list of the tests with their verdicts, kept in `verdicts.md`, to be read without herd7."""

import textwrap
from pathlib import Path

import tests
from machines import MACHINES
from shape import BarrierOnAllCpus, changes_of

PATH = Path(__file__).resolve().with_name("verdicts.md")
HEAD = """\
# Litmus tests: verdicts

Written by `models/litmus/run --write-table`; [README.md](README.md) says how to read it. *Never*
means that the result cannot happen. A table counts the variants with a weaker order on which the
result happens then: "Never (1 of 2)". Below it are the operations of the code, thread by thread,
and the variants.
"""


def lines(text, indent=""):
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent="  " + indent, break_long_words=False,
                         break_on_hyphens=False)


def machines_of(letters):
    return ", ".join(MACHINES[letter].title for letter in letters) or "none of these machines"


def name_of(op):
    if isinstance(op, BarrierOnAllCpus):
        return "barrier on all CPUs"
    if op.kind == "fence":
        return op.order if "_" in op.order else f"fence ({op.order})"
    return f"`{op.loc}`: {op.kind}, {op.order}" + (", address from above" if op.addr else "")


def places_of(op):
    by_function = {}
    for place in getattr(op, "at", ()):
        file, function, _ = place.split()
        by_function.setdefault(file, []).append(function.split("::")[-1])
    return "; ".join(f"`{file}` {', '.join(dict.fromkeys(found))}" for file, found in by_function.items())


def of_test(test):
    yield f"## {test.name}"
    yield from lines(test.about)
    for thread, ops in enumerate(test.threads):
        for number, op in enumerate(ops):
            places = places_of(op)
            yield from lines(f"- {thread}.{number} {name_of(op)}" + (f" ({places})" if places else ""))
    for weaker in test.weaker:
        changes = " and ".join(
            f"without {thread}.{number}" if order == "none" else f"with {thread}.{number} {order}"
            for thread, number, order in changes_of(weaker)
        )
        yield from lines(f"- {changes[0].upper()}{changes[1:]}: {machines_of(weaker.happens)}.")
    yield ""


def table_of(file):
    yield "| test | " + " | ".join(machine.title for machine in MACHINES.values()) + " |"
    yield "|---" * (len(MACHINES) + 1) + "|"
    for test in file.TESTS:
        cells = []
        for letter in MACHINES:
            nr_happen = sum(letter in weaker.happens for weaker in test.weaker)
            verdict = "Sometimes" if letter in test.happens else "Never"
            cells.append(f"{verdict} ({nr_happen} of {len(test.weaker)})")
        yield f"| {test.name} | {' | '.join(cells)} |"
    yield ""


def of_walker(test):
    yield f"## {test.name}"
    yield from lines(test.about)
    yield ""
    yield f"**{test.verdict}.** Hypervisor: `{'; '.join(test.hypervisor)}`."
    yield f"Guest: `{'; '.join(test.guest)}`."
    for number, verdict in test.without:
        yield f"- Without `{test.hypervisor[number]}` ({number + 1}.): {verdict}."
    yield ""


def text():
    out = [HEAD]
    for file in tests.FILES:
        out += [f"# `{Path(file.__file__).name}`", "", *table_of(file)]
        for test in file.TESTS:
            out += of_test(test)
    out += ["# `walkers.py`", ""]
    for test in tests.WALKERS:
        out += of_walker(test)
    return "\n".join(out)
