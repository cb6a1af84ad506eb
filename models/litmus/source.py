"""The atomic operations of the Rust sources: where they are, and with which orders.

A *site* is a call with an `Ordering`, or of a fence of `sync/mod.rs`. It is named `FILE FUNCTION CALL`:
- FILE below `crates/slat/src`, or below `crates` if it begins with the name of another crate;
- FUNCTION with the type of its `impl`, as in `Epochs::announce_epoch`;
- CALL with the last name of what it is called on, as in `announced.swap`; `#2` behind it is the second such call of
  the function.

Tests, comments and what `cfg(test)` has are no part of it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

CRATES = Path(__file__).resolve().parents[2] / "crates"
ORDERS = ("Relaxed", "Acquire", "Release", "AcqRel", "SeqCst")
FENCE_CALLS = ("full_fence", "fence_after_rmw", "fence_against_remote_barrier")
#: The host's barrier, where it is made and not passed on.
BARRIER = "barrier_on_all_cpus"
CLOSING = {")": "(", "]": "[", "}": "{", ">": "<"}


@dataclass(frozen=True)
class Site:
    file: str
    function: str
    call: str
    orders: tuple
    #: Where it is in the file, to compare the order of two.
    offset: int

    def __str__(self):
        return f"{self.file} {self.function} {self.call}"


def without_comments(text):
    """The text with comments, strings and characters blanked, at the same offsets."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|b?"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', re.DOTALL)
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def end_of_block(text, start):
    """The offset behind the block that opens at `start`."""
    depth = 0
    for offset in range(start, len(text)):
        if text[offset] == "{":
            depth += 1
        elif text[offset] == "}":
            depth -= 1
            if depth == 0:
                return offset + 1
    return len(text)


def without_tests(text):
    """The text with items blanked that only tests have, and the documentation's macros."""
    for found in reversed(list(re.finditer(r"#\[cfg\((?:all\()?(?:test|shuttle)\b[^\]]*\]\s*", text))):
        begin = found.end()
        stop = re.compile(r"[;{]").search(text, begin)
        end = stop.end() if stop and stop.group() == ";" else end_of_block(text, stop.start()) if stop else len(text)
        text = text[: found.start()] + re.sub(r"[^\n]", " ", text[found.start() : end]) + text[end:]
    return text


def blocks(text, pattern):
    """(begin, end, name) of the blocks whose headers match."""
    for found in re.finditer(pattern, text):
        depth = 0
        for offset in range(found.end(), len(text)):
            depth += (text[offset] in "([") - (text[offset] in ")]")
            if depth == 0 and text[offset] in ";{":
                break
        if text[offset] == "{":
            yield found.start(), end_of_block(text, offset), found.group("name")


def back_over(text, offset):
    """The offset of the bracket that `text[offset]` closes."""
    close, depth = text[offset], 0
    while offset >= 0:
        depth += (text[offset] == close) - (text[offset] == CLOSING[close])
        if depth == 0:
            return offset
        offset -= 1
    return 0


def last_name(text, end):
    """The last name of the expression that ends before `end`."""
    while end > 0 and text[end - 1].isspace():
        end -= 1
    if end == 0:
        return ""
    if text[end - 1] in ")]>?":
        begin = end - 1 if text[end - 1] == "?" else back_over(text, end - 1)
        name = last_name(text, begin)
        if name or text[end - 1] != ")":
            return name
        return last_name(text, end - 1)
    if text[end - 1] == "}":
        return last_name(text, end - 1)
    if text[end - 1] == ":":
        return last_name(text, end - 2)
    found = re.search(r"\w+$", text[:end])
    return found.group() if found else ""


def call_at(text, parenthesis):
    """The name of the call whose arguments begin at `parenthesis`."""
    method = re.search(r"(\w+)\s*$", text[:parenthesis])
    if not method:
        return ""
    before = text[: method.start()].rstrip()
    if before.endswith("."):
        return f"{last_name(before, len(before) - 1)}.{method.group(1)}"
    return method.group(1)


def enclosing_parenthesis(text, offset):
    depth = 0
    for at in range(offset - 1, -1, -1):
        if text[at] == ")":
            depth += 1
        elif text[at] == "(":
            if depth == 0:
                return at
            depth -= 1
        elif text[at] in ";" and depth == 0:
            return None
    return None


def sites_of(path):
    """The sites of a file."""
    relative = path.relative_to(CRATES).as_posix()
    file = relative.removeprefix("slat/src/") if relative.startswith("slat/src/") else relative.replace("/src/", "/", 1)
    text = without_tests(without_comments(path.read_text()))
    functions = list(blocks(text, r"\bfn\s+(?P<name>\w+)"))
    of_trait = r"(?:(?:[^{;]|<[^<>]*>)*?\bfor\s+)?"
    header = rf"(?m)^(?:unsafe )?impl\b(?:<(?:[^<>]|<[^<>]*>)*>)?\s*{of_trait}(?:\w+::)*(?P<name>\w+)"
    types = list(blocks(text, header)) + list(blocks(text, r"\btrait\s+(?P<name>\w+)"))

    def function_at(offset):
        inner = max((block for block in functions if block[0] <= offset < block[1]), default=None)
        if not inner:
            return "-"
        of = max((block for block in types if block[0] <= offset < block[1]), default=None)
        return f"{of[2]}::{inner[2]}" if of else inner[2]

    calls = {}
    short = re.search(r"\buse super::Ordering::\{", text)
    word = r"\bOrdering::(\w+)" if not short else r"(?<![\w:])(Relaxed|Acquire|Release|AcqRel|SeqCst)\b"
    body = short.end() + 60 if short else 0
    for found in re.compile(word).finditer(text, body):
        if found.group(1) in ORDERS and (at := enclosing_parenthesis(text, found.start())) is not None:
            calls.setdefault(at, []).append(found.group(1))
    for name in (*FENCE_CALLS, BARRIER):
        for found in re.finditer(rf"(?<!fn )(?<!\.)\b{name}\(\)", text):
            calls[found.end() - 2] = [name]
    seen, sites = {}, []
    for at, orders in sorted(calls.items()):
        function, call = function_at(at), call_at(text, at)
        number = seen[function, call] = seen.get((function, call), 0) + 1
        sites.append(Site(file, function, call if number == 1 else f"{call}#{number}", tuple(orders), at))
    return sites


#: Folders and files that are no part of the protocols: schedulers and counters of the model checkers, statistics.
LEFT_OUT = re.compile(r"(_loom|_tests|/tests\w*)\.rs$|/tests/|sync/(stepped|costed|events)\.rs$")


def sites(folder="slat/src"):
    """All sites of a crate, of a folder of one, or of a file."""
    found = []
    whole = CRATES / folder
    for path in [whole] if whole.is_file() else sorted(whole.rglob("*.rs")):
        if not LEFT_OUT.search(path.as_posix()):
            found += sites_of(path)
    return found
