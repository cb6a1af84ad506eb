"""Explicit-state exploration: every interleaving of a few threads, breadth first, so that a trace
is a shortest one.

A state is (shared, threads), hashable, threads a tuple of (kind, pc, locals); pc 'end' is the end.
`step(state, i)` yields the possible next states of thread i. Three things are checked in every
state: `wrong(state)` is None; each thread that has not ended can take a step (none waits); and no
thread can take steps for ever while the others stand still (none spins).
Memory is sequentially consistent: the order of the engine's atomics is argued at each operation,
and tested by loom.
"""
import gc
import sys
from collections import deque

# States are tuples, and none is in a cycle: to look for cycles among millions of them took a quarter of the time.
gc.disable()

BUG = sys.argv[1] if len(sys.argv) > 1 else None


def put(t, i, v):
    """The tuple `t` with `v` at place `i`."""
    return t[:i] + (v,) + t[i + 1:]


def explore(init, step, wrong):
    """Returns the number of states and, if something is wrong, (what, trace)."""
    ids, states, came, todo = {init: 0}, [init], [None], deque([0])
    alone = [{} for _ in init[1]]               # per thread: state -> states after a step of it

    def trace(n):
        path = []
        while came[n]:
            n, i = came[n]
            path.append(n * 64 + i)
        return [(states[x // 64], x % 64) for x in path[::-1]]

    while todo:
        n = todo.popleft()
        state = states[n]
        for i, thread in enumerate(state[1]):
            if thread[1] == 'end':
                continue
            nexts = []
            for new in step(state, i):
                m = ids.get(new)
                if m is None:
                    m = ids[new] = len(states)
                    states.append(new); came.append((n, i))
                    what = wrong(new)
                    if what:
                        return len(states), (what, trace(m) + [(new, None)])
                    todo.append(m)
                nexts.append(m)
            if not nexts:
                return len(states), (f"{thread[0]} waits", trace(n) + [(state, None)])
            alone[i][n] = nexts
    for i, graph in enumerate(alone):
        n = spins(graph)
        if n is not None:
            return len(states), (f"{states[n][1][i][0]} spins", trace(n) + [(states[n], None)])
    return len(states), None


def spins(graph):
    """A state from which one thread's steps alone lead round in a circle."""
    done, on_path = set(), set()
    for root in graph:
        stack = [(root, None)] if root not in done else []
        while stack:
            n, rest = stack.pop()
            if rest is None:
                if n in done or n not in graph:
                    continue
                on_path.add(n)
                rest = list(graph[n])
            if not rest:
                on_path.discard(n); done.add(n)
                continue
            m = rest.pop()
            stack.append((n, rest))
            if m in on_path:
                return m
            if m in graph and m not in done:
                stack.append((m, None))
    return None


def main(configurations, make, step, wrong):
    """Explores each configuration, a tuple of kinds; ends with exit code 1 at the first that goes wrong."""
    for kinds in configurations:
        n, bad = explore(make(kinds), step, wrong)
        print(f"{'+'.join(kinds):48} {n:8} states  {'VIOLATION: ' + bad[0] if bad else 'ok'}", flush=True)
        if bad:
            for state, i in bad[1]:
                print(f"    {'' if i is None else f'{state[1][i][0]}[{i}] at {state[1][i][1]!r}':24} {state[0]}")
            sys.exit(1)
