"""Steps of the dirty log that several proofs share: logging begins and ends, and a harvest takes and returns.

A proof overrides a step that it has in more detail. A rule that a proof does not name is never left out of it.
"""
from prover import And, Implies, Not, Or, Protocol, put, put_where

OFF, FLAGGED, ARMED, ON = range(4)                      # of the enabling
UNBEGUN, TAKES, FLUSHES, RETURNED = range(4)            # of a harvest of `WriteProtection`


def inv_of_enabling(s):
    return {
        'the flag is set from FLAGGED on': And(s.epc() >= OFF, s.epc() <= ON, s.flag() == (s.epc() >= FLAGGED)),
        'pages are armed after the flag': s.all(lambda p: Implies(s.armed(p), s.flag())),
        'all pages are armed from ARMED on': s.all(lambda p: Implies(s.epc() >= ARMED, s.armed(p))),
        'enabling flushes after all is armed': s.all(lambda c: Implies(s.eflushed(c), s.epc() >= ARMED)),
        'enabling has flushed all CPUs when it returns': s.all(lambda c: Implies(
            s.epc() == ON, Or(s.initially_set(), s.eflushed(c)))),
        'writes are counted after enabling': s.all(lambda p: Implies(s.unreported(p), s.epc() == ON)),
    }


def inv_of_protecting(s):
    """Of harvests that protect what they take."""
    return {
        'a harvest is UNBEGUN to RETURNED': s.all(lambda h: And(s.hpc(h) >= UNBEGUN, s.hpc(h) <= RETURNED)),
        'a harvest holds pages between begin and return': s.all(lambda h, p: Implies(
            s.holds(h, p), Or(s.hpc(h) == TAKES, s.hpc(h) == FLUSHES))),
        'a harvest flushes after its turns': s.all(lambda h, c: Implies(
            s.flushed(h, c), s.hpc(h) >= FLUSHES)),
        'a harvest that flushes has protected all it holds': s.all(lambda h, p: Implies(
            And(s.hpc(h) == FLUSHES, s.holds(h, p)), s.rearmed(h, p))),
        'a harvest protects what it has taken': s.all(lambda h, p: Implies(
            And(s.rearmed(h, p), s.hpc(h) != RETURNED), s.holds(h, p))),
    }


class Logging(Protocol):
    """Enabling publishes the flag, visits all pages (they are *armed* then), and flushes."""

    def held(self, s, p):
        """The harvest that took the bit last still holds the page."""
        return s.holds(s.taker(p), p)

    def step_publish_flag(self, s):
        """vm/region.rs: change_slot"""
        return s.epc() == OFF, {'flag': lambda: True, 'epc': lambda: FLAGGED}

    def may_protect(self, s):
        at = OFF if self.without('flag-before-protect') else FLAGGED
        return And(s.epc() == at, Not(s.initially_set()))

    def step_enabling_sets(self, s, p: 'Page'):
        """slot/bitmap.rs: mark"""
        at = OFF if self.without('set-after-flag') else FLAGGED
        return And(s.epc() == at, s.initially_set()), {
            'bit': put(s.bit, p, True), 'armed': put(s.armed, p, True)}

    def step_wipe(self, s, p: 'Page'):
        """slot/bitmap.rs: clear_all"""
        return And(s.epc() == OFF, s.bit(p)), {'bit': put(s.bit, p, False)}

    def step_all_armed(self, s):
        """vm/region.rs: begin_to_log"""
        return And(s.epc() == FLAGGED, s.all(lambda p: s.armed(p))), {'epc': lambda: ARMED}

    def step_enabled(self, s):
        """vm/region.rs: change_slot returns"""
        return And(s.epc() == ARMED, Or(s.initially_set(), s.all(lambda c: s.eflushed(c)))), {
            'epc': lambda: ON}

    def step_guest_write(self, s, c: 'Cpu', p: 'Page'):
        """A CPU writes through a cached leaf"""
        return s.tlb(c, p), {'unreported': put(s.unreported, p, Or(s.unreported(p), s.epc() == ON))}

    def returns(self, s, h, returned):
        """The harvest has handed out what it held."""
        return {'hpc': put(s.hpc, h, returned), 'holds': put_where(s.holds, lambda g, p: g == h, False),
                'unreported': put_where(s.unreported, lambda p: s.holds(h, p), False)}


class WriteProtection(Logging):
    """A harvest takes bits, protects what it has taken, and flushes."""

    def step_take(self, s, h: 'Harvest', p: 'Page'):
        """slot/bitmap.rs: take, take_masked"""
        return And(s.hpc(h) <= TAKES, Not(s.holds(h, p)), s.bit(p)), {
            'hpc': put(s.hpc, h, TAKES), 'bit': put(s.bit, p, False), 'holds': put(s.holds, (h, p), True),
            'taker': put(s.taker, p, h)}

    def step_turns_are_over(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest"""
        return And(s.hpc(h) == TAKES, s.all(lambda p: Implies(s.holds(h, p), s.rearmed(h, p)))), {
            'hpc': put(s.hpc, h, FLUSHES)}

    def step_return(self, s, h: 'Harvest'):
        """harvest/log.rs: harvest returns, and the caller copies the pages"""
        return And(s.hpc(h) == FLUSHES, s.all(lambda c: s.flushed(h, c))), self.returns(s, h, RETURNED)

    def safe(self, s):
        return {
            'a write is marked, held by a harvest, or about to be marked': s.all(lambda p: Implies(
                s.unreported(p), Or(s.bit(p), self.held(s, p), self.will_mark(s, p)))),
        }
