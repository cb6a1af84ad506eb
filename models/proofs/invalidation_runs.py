"""The phases of faults and invalidations, and the states from which shortest runs are searched."""
from page_tables import EMPTY, LEAF, TABLE, PageTables

IDLE, WALKS, COUNTS, LOOKED, CLEAR, RESOLVED, ACTS, TOOK, GONE = range(9)       # of a fault
OUT, PUBLISHED, ZAPS, UNLINKS, FLUSHES, HOST, OVER = range(7)                   # of an invalidation
SORTS = [*PageTables.sorts, 'Fault', 'Inv', 'Cpu']


def flat(is_leaf=False):
    """One page and one PTE, that of a leaf which the host holds true, or empty."""
    start = {
        'root': lambda: 'table0', 'level': lambda t: 0, 'spans': lambda t, p: True,
        'entry': lambda t, p: 'pte0', 'table': lambda e: 'table0',
        'used': lambda t: True, 'linked': lambda t: True, 'reach': lambda c, t, p: True,
        'page': lambda f: 'page0', 'wants': lambda f, p: True, 'covers': lambda i, p: True,
        'ok': lambda p, a: a == 'answer0', 'kind': lambda e: LEAF if is_leaf else EMPTY,
    }
    return {'sizes': {**dict.fromkeys(SORTS, 1), 'Answer': 2}, 'start': start}


def huge():
    """Two pages and one PTE for both. A fault wants both, the range has one."""
    start = {**flat()['start'], 'level': lambda t: 1, 'covers': lambda i, p: p == 'page1'}
    return {'sizes': {**dict.fromkeys(SORTS, 1), 'Answer': 2, 'Page': 2}, 'start': start}


def resolved(is_linked, nr_pages):
    """Two levels, linked or not; a fault on the first page is resolved, the last page is in the range."""
    last = f'page{nr_pages - 1}'
    start = {
        **flat()['start'], 'level': lambda t: int(t == 'table0'),
        'entry': lambda t, p: 'pte0' if t == 'table0' else f'pte{1 + int(p[4:])}',
        'table': lambda e: 'table0' if e == 'pte0' else 'table1', 'wants': lambda f, p: p == 'page0',
        'covers': lambda i, p: p == last, 'used': lambda t: is_linked or t == 'table0',
        'linked': lambda t: is_linked or t == 'table0', 'down': lambda e: 'table1',
        'reach': lambda c, t, p: is_linked or t == 'table0', 'told': lambda p: True,
        'below': lambda t, e: is_linked and (t, e) == ('table1', 'pte0'),
        'kind': lambda e: TABLE if is_linked and e == 'pte0' else EMPTY,
        'fpc': lambda f: RESOLVED, 'passed': lambda f, i: True,
    }
    sizes = {**dict.fromkeys(SORTS, 1), 'Answer': 2, 'Page': nr_pages, 'Pte': 1 + nr_pages, 'Table': 2}
    return {'sizes': sizes, 'start': start}
