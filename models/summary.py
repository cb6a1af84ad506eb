"""Explicit-state check of the summary above the dirty bitmap: one bit for each word, so that
harvests skip words of zero.

One word of two bits, and its summary bit.
Mark (mark0, mark1, mark01: those bits): word -> if all are set already: over; else set -> summary
bit: set it unless it is.
Take (a harvest, of all or of a range: words are never split): summary bit -> cleared -> word taken.
Mask (mask0, mask1, mask01: those bits): word -> if nothing would be left: summary bit is cleared ->
word -> the named bits are cleared, if any is set -> if something is left after all: summary bit is
set again, if this call had cleared it.
Wrong, when all are over: a bit is set and the summary bit is not, so that no later harvest finds
it, and no marker sets it either; or a bit that was set is gone and was not taken.
So a harvest that begins then is exact. Before that, a marker that finds its bit set returns, though
the marker that set it may not have set the summary bit yet; the harvest after that marker's return
reports the page.
Run: python3 summary.py [RULE]. Each of these breaks it: summary-first (a mark), word-first (a
take), store-zero (instead of a swap), mask-clears (the summary bit is cleared, whatever is left),
never-again (it is not set again), look-away (no check of the rest where another call has taken the
named bits already).
"""
from collections import namedtuple
from explore import BUG, main

Shared = namedtuple('Shared', 'word summary untaken')
CONFIGURATIONS = '''
mark0+mark1+take+take mark01+mark0+take+mask0 mark0+mark1+mask0+take mark0+mark1+mask01+take mark0+mark1+mask0+mask1
mark0+mark1+mask0+mask0 from0+mark1+mask0+mask0 from0+mark1+mask0+mask01 from0+mark0+mark1+mask0+mask0+take
from01+mark0+mark1+mask0+mask1+take mark0+mark1+mark01+take+mask01 from01+mark0+mark1+mask01+mask01+take
from0+mark1+mask0+mask0+mask1 mark0+mark0+mark1+take+take+mask1'''


def bits(kind):
    return sum(1 << int(c) for c in kind if c in '01')


def make(kinds):
    word = sum(bits(k) for k in kinds if k.startswith('from'))
    return Shared(word, int(word != 0), word), tuple(
        (k, k.rstrip('01'), ()) for k in kinds if not k.startswith('from'))


def wrong(state):
    s, threads = state
    if s.untaken & ~s.word: return 'a bit is gone that was not taken'
    if s.word and not s.summary and all(t[1] == 'end' for t in threads): return 'a bit is set that no harvest will find'


def step(state, i):
    s, threads = state
    kind, pc, loc = threads[i]

    def go(pc, *loc, **changes):
        return s._replace(**changes), threads[:i] + ((kind, pc, loc),) + threads[i + 1:]

    word, mask = s.word, bits(kind)
    if pc == 'mark':
        if word & mask == mask: yield go('end')
        else: yield go('summarize', 'word') if BUG == 'summary-first' else go('set')
    elif pc == 'set': yield go('end' if BUG == 'summary-first' else 'summarize', word=word | mask, untaken=s.untaken | mask)
    elif pc == 'summarize': yield go('set' if loc else 'end') if s.summary else go('summary', *loc)
    elif pc == 'summary': yield go('set' if loc else 'end', summary=1)

    elif pc == 'take':
        if BUG == 'word-first': yield go('take-word') if s.summary else go('end')
        else: yield go('clear') if s.summary else go('end')
    elif pc == 'clear': yield go('end' if BUG == 'word-first' else 'take-word', summary=0)
    elif pc == 'take-word':
        if BUG == 'store-zero': yield go('store', word)
        else: yield go('clear' if BUG == 'word-first' else 'end', word=0, untaken=0)
    elif pc == 'store': yield go('end', word=0, untaken=s.untaken & ~loc[0])

    elif pc == 'mask':
        empties = word & mask and not word & ~mask
        if empties or word & mask and BUG == 'mask-clears': yield go('empty')
        else: yield go('look', False)
    elif pc == 'empty': yield go('look', True, summary=0)
    elif pc == 'look':
        if word & mask: yield go('take-masked', *loc)
        else: yield go('summarize') if loc[0] and word and BUG != 'look-away' else go('end')
    elif pc == 'take-masked':
        again = loc[0] and word & ~mask and BUG not in ('never-again', 'mask-clears')
        yield go('summarize' if again else 'end', word=word & ~mask, untaken=s.untaken & ~mask)


if __name__ == "__main__":
    main([tuple(c.split('+')) for c in CONFIGURATIONS.split()], make, step, wrong)
