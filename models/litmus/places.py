"""Operations that tests of several protocols have, with their places in the source."""

from shape import cas, load

LOAD_PTE = "table/pte_ref.rs PteRef::load cell.load"
EXCHANGE = "table/pte_ref.rs PteRef::exchange_unchecked cell.compare_exchange"
READ_PTE = load("pte", "Acquire", "pte", at=LOAD_PTE)
PUBLISH_SET = cas("set", 0, 1, "SeqCst", at="slot/set.rs Slots::publish current.compare_exchange")
READ_SET = load("set", "SeqCst", "set", at=(
    "slot/set.rs Slots::current_unchecked current.load", "slot/set.rs Slots::is_current current.load",
))


def exchange(value, expected=0, loc="pte"):
    """The engine's exchange of a PTE."""
    return cas(loc, expected, value, "SeqCst", "Acquire", at=EXCHANGE)
