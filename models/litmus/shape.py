"""What a litmus test consists of: threads of operations, and the result that must not happen.

An operation names the atomic operation of the source that it stands for (`at`, see `source.py`), with the order
that the source gives it. An operation without a place stands for something outside of the engine: the guest, the
host, a page-table walker, user space.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Op:
    """An operation of a thread."""

    #: "load", "store", "rmw" (swap, fetch_add, ...), "cas" or "fence".
    kind: str
    #: The location, or "" of a fence.
    loc: str = ""
    #: The order as Rust names it. Of a fence: one of FENCES.
    order: str = "Relaxed"
    #: What it stores.
    value: int = 0
    #: What a compare-and-exchange expects. It must succeed: other runs are not looked at.
    expected: int = 0
    #: The name of what it reads, for the condition and for addresses; "" if neither needs it.
    reg: str = ""
    #: The address depends on this value, as that of a page-table walker on the entry above.
    addr: str = ""
    #: Places in the source: `FILE FUNCTION CALL`.
    at: tuple = ()
    #: The order of a failure, where the source names one.
    failure: str = ""


#: Fences, as the engine names them, and those of core.
FENCES = ("full_fence", "fence_after_rmw", "fence_against_remote_barrier", "SeqCst", "Acquire", "Release")


def _places(at):
    return (at,) if isinstance(at, str) else tuple(at)


def load(loc, order, reg, at=(), addr=""):
    return Op("load", loc, order, reg=reg, at=_places(at), addr=addr)


def store(loc, value, order, at=(), addr=""):
    return Op("store", loc, order, value, at=_places(at), addr=addr)


def rmw(loc, value, order, reg="", at=()):
    """A read-modify-write that always stores: `swap`, `fetch_add`, `fetch_or` and so on."""
    return Op("rmw", loc, order, value, reg=reg, at=_places(at))


def cas(loc, expected, value, order, failure="Relaxed", reg="", at=()):
    """A compare-and-exchange that succeeds."""
    return Op("cas", loc, order, value, expected, reg, at=_places(at), failure=failure)


def fence(kind, at=()):
    assert kind in FENCES, kind
    return Op("fence", order=kind, at=_places(at))


@dataclass(frozen=True)
class BarrierOnAllCpus:
    """`Host::barrier_on_all_cpus` of a thread: thread `on` makes a full fence between any two of its operations."""

    on: int
    at: tuple = ()
    kind: str = "barrier"
    order: str = "barrier_on_all_cpus"


@dataclass(frozen=True)
class Weaker:
    """A variant with weaker orders, to show that the test can fail."""

    #: What is changed: `THREAD.OPERATION=ORDER`, both from 0, separated by blanks; "none" leaves the operation out.
    changes: str
    #: On which machines the result happens then: letters of `machines.py`.
    happens: str


@dataclass(frozen=True)
class Test:
    name: str
    #: What must not happen, in a sentence.
    about: str
    threads: tuple
    #: The result that must not happen: `THREAD:REGISTER=VALUE` or `[LOCATION]=VALUE`, separated by blanks.
    never: str
    weaker: tuple = ()
    #: First values of locations that do not begin as zero.
    first: dict = field(default_factory=dict)
    #: The letters of the machines on which it may happen all the same, because nothing relies on it there.
    happens: str = ""


def changes_of(weaker):
    """Its changes: thread, operation, order."""
    for change in weaker.changes.split():
        op, order = change.split("=")
        thread, number = op.split(".")
        yield int(thread), int(number), order


def weakened(test, weaker):
    """The test with these orders."""
    threads = [list(ops) for ops in test.threads]
    for thread, number, order in changes_of(weaker):
        threads[thread][number] = None if order == "none" else replace(threads[thread][number], order=order)
    threads = tuple(tuple(op for op in ops if op) for ops in threads)
    name = "-".join([test.name, *weaker.changes.replace(".", "-").replace("=", "-").split()])
    return replace(test, name=name, threads=threads, weaker=())


def without_barriers(test):
    """The tests that stand for `test`: one for each moment at which a barrier on all CPUs can reach its thread.

    The barrier is what Linux makes of `membarrier`, and a hypervisor of an interrupt: a full fence, an interrupt to
    the other CPU, a full fence there between two of its instructions, its answer, and a full fence.
    """
    ops = [(thread, number, op) for thread, ops in enumerate(test.threads) for number, op in enumerate(ops)]
    places = [(thread, number) for thread, number, op in ops if isinstance(op, BarrierOnAllCpus)]
    if not places:
        return [test]
    [(thread, number)] = places
    on = test.threads[thread][number].on
    call = [
        fence("SeqCst"), store("interrupt", 1, "Relaxed"), load("answer", "Relaxed", "answered"), fence("SeqCst"),
    ]
    handler = [load("interrupt", "Relaxed", "interrupted"), fence("SeqCst"), store("answer", 1, "Relaxed")]
    tests = []
    for moment in range(len(test.threads[on]) + 1):
        threads = [list(ops) for ops in test.threads]
        threads[thread][number : number + 1] = call
        threads[on][moment:moment] = handler
        tests.append(
            replace(
                test,
                name=f"{test.name}-at-{moment}",
                threads=tuple(map(tuple, threads)),
                never=f"{test.never} {thread}:answered=1 {on}:interrupted=1",
            )
        )
    return tests
