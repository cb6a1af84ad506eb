"""Shadow pages and the guest's tables: after a flush a vCPU uses no older value of a PTE than it
has flushed.

Protocol: docs/protocols/shadow-paging.md. Modules: shadow/install.rs, shadow/sync.rs,
shadow/write.rs, shadow/page.rs, shadow/roots.rs. Any number of vCPUs and their flushes, faults,
tables, shadow pages and PTEs.

A shadow PTE is made of a value of the guest's PTE, which is numbered here by its changes. A CPU
caches what it finds, and of several values keeps the oldest. A lowest table may be written by the
guest while its pages are unsync; an upper table is written by emulation alone. A flush is a moment:
INVLPG and page faults concern the PTE of one address, a load of CR3 all PTEs. A table may have
several shadow pages. A vCPU may do other things while it flushes, and may have several flushes.

Proved: a vCPU has nothing cached that is older than what the last flush of that PTE must see. A
synced page is what the guest's table says, and no CPU can write that table. Upper tables are never
stale.

Not here: which pages are below a root, links that appear meanwhile, roots that are not current (the
list of addresses), and lives of records; how an upper table becomes tracked (`nr_unflushed`);
rights, A and D. The lock of a page is taken anew for each shadow PTE that is compared, and pages
are protected and flushed in turns of any size. The first comparison of a synchronization (before
the flush) only removes more. Each step is atomic, in one order for all threads.
"""
import prover
import starts
from prover import And, Implies, Not, Or
from shadow_sync_steps import (BEGUN, COMPARES, COUNTED, CR3, FAULT, FLUSHED, HAS_BITS, HAS_STATES, IDLE,
                               INVLPG, LOCAL, LOCKED, OPENS, OUT, OVER, SAW_FREE, SYNCED, SYNCING,
                               ShadowSyncSteps, UNSYNC)
from starts import at


class ShadowSync(ShadowSyncSteps):
    rules = {
        'entry-is-read-again': "makes a shadow PTE of the guest's PTE as the walk has read it",
        'compare-under-lock': 'compares a shadow PTE without the lock of its page',
        'local-flush': "does not flush the vCPU's own CPU",
        'fault-compares': "flushes the CPU at a page fault of the guest, and no shadow PTE",
        'lock-is-looked-at': 'looks at the shadow PTE without a look at the lock of its page',
        'syncing-is-compared': 'takes a page that another thread synchronizes for one that is synced',
        'syncing-is-synchronized': 'passes by a page that another thread synchronizes',
        'bit-before-w': 'lets the guest write a table before the bit of its page is set',
        'written-is-unsync': 'lets the guest write a page that is being synchronized, and leaves it so',
        'flush-before-compare': 'compares before the CPUs are flushed',
        'flush-in-any-case': 'flushes only if it has taken W itself',
        'sequence-is-compared': 'calls a page synced that was written since it was protected',
        'writers-keep-out': 'makes shadow PTEs while an emulated write is under way',
        'drop-before-write': 'writes the new value before the shadow PTEs are removed',
        'flush-before-write': 'writes the new value before the CPUs are flushed',
    }
    sizes = {'Fault': 1, 'Opener': 1, 'Flush': 1, 'Writer': 1, 'Guest': 1, 'Entry': 1, 'Page': 1, 'Table': 1,
        'Cpu': 1}
    start = at(state=SYNCED)

    def safe(self, s):
        return {
            'no CPU uses an older value than its vCPU has flushed': s.all(lambda c, e: Implies(
                s.cached(c, e), s.oldest(c, e) >= s.floor(c, e))),
            'a synced page is what the table says': s.all(lambda e: Implies(
                And(s.state(s.page(e)) == SYNCED, s.present(e)), s.made(e) == s.now(s.made_of(e)))),
            'no CPU writes the table of a synced page': s.all(lambda p, c: Implies(
                s.state(p) == SYNCED, And(Not(s.w(s.frame(p))), Not(s.cached_w(c, s.frame(p)))))),
            'no CPU uses an old value of an upper table': s.all(lambda c, e: Implies(
                And(s.is_upper(s.table(s.made_of(e))), s.cached(c, e)), s.oldest(c,
                    e) == s.now(s.made_of(e)))),
        }

    def inv(self, s):
        return {**self.inv_of_locks(s), **self.inv_of_pages(s), **self.inv_of_flushes(s),
            **self.inv_of_writes(s)}

    def has(self, s, f, e):
        """The fault is about to make the shadow PTE."""
        return And(s.fpc(f) == LOCKED, s.at(f) == e)

    def inv_of_locks(self, s):
        opens = lambda u: And(OPENS <= s.upc(u), s.upc(u) <= HAS_STATES)
        return {
            'a fault is at one of its steps': s.all(lambda f: And(IDLE <= s.fpc(f), s.fpc(f) <= LOCKED)),
            'a flush is at one of its steps': s.all(lambda i: And(OUT <= s.ipc(i), s.ipc(i) <= OVER)),
            'a write fault is at one of its steps': s.all(
                lambda u: And(IDLE <= s.upc(u), s.upc(u) <= HAS_STATES)),
            'a fault has the lock of its page': s.all(
                lambda f: Implies(s.fpc(f) == LOCKED, s.locked(s.page(s.at(f))))),
            'a comparison has the lock of its page': s.all(
                lambda i: Implies(s.reads(i), s.locked(s.page(s.compares(i))))),
            'two faults have different pages': s.all(lambda f, g: Implies(
                And(s.fpc(f) == LOCKED, s.fpc(g) == LOCKED, s.page(s.at(f)) == s.page(s.at(g))), f == g)),
            'a fault and a comparison have different pages': s.all(lambda f, i: Implies(
                And(s.fpc(f) == LOCKED, s.reads(i)), s.page(s.at(f)) != s.page(s.compares(i)))),
            'two comparisons have different pages': s.all(lambda i, i2: Implies(
                And(s.reads(i), s.reads(i2), s.page(s.compares(i)) == s.page(s.compares(i2))), i == i2)),
            'a write fault has the lock of its table': s.all(lambda u: Implies(opens(u), And(
                s.frame_locked(s.target(u)), Not(s.is_upper(s.target(u)))))),
            'two write faults have different tables': s.all(lambda u, u2: Implies(
                And(opens(u), opens(u2), s.target(u) == s.target(u2)), u == u2)),
        }

    def inv_of_pages(self, s):
        n, p = lambda e: s.made_of(e), lambda e: s.page(e)
        return {
            'a page has one of the states': s.all(lambda p: And(UNSYNC <= s.state(p), s.state(p) <= SYNCED)),
            'no shadow PTE is of a value to come': s.all(
                lambda e: Implies(s.present(e), s.made(e) <= s.now(n(e)))),
            'no CPU has a value to come': s.all(lambda c,
                e: Implies(s.cached(c, e), s.oldest(c, e) <= s.now(n(e)))),
            'no fault has a value to come': s.all(
                lambda f: Implies(s.fpc(f) != IDLE, s.seen(f) <= s.now(n(s.at(f))))),
            'no flush is of a value to come': s.all(lambda c, e: s.floor(c, e) <= s.now(n(e))),
            'no shadow PTE is older than what a vCPU has flushed': s.all(lambda c, e: Implies(
                s.present(e), s.made(e) >= s.floor(c, e))),
            'no fault makes what is older than a vCPU has flushed': s.all(lambda c, f: Implies(
                s.fpc(f) == LOCKED, s.seen(f) >= s.floor(c, s.at(f)))),
            'a table with W has unsync pages': s.all(
                lambda p: Implies(s.w(s.frame(p)), s.state(p) == UNSYNC)),
            'a page without a bit is synced, or is about to get it': s.all(lambda p, u: Implies(
                And(Not(s.bit(p)), s.state(p) != SYNCED), s.frame_locked(s.frame(p)))),
            'only a write fault leaves a page without a bit': s.all(lambda p, c: Implies(
                Not(s.bit(p)), And(Not(s.w(s.frame(p))), Not(s.cached_w(c, s.frame(p)))))),
            'a synced page has no bit': s.all(lambda p: Implies(s.state(p) == SYNCED, Not(s.bit(p)))),
            'a page without a bit is what the table says': s.all(lambda e: Implies(
                And(Not(s.bit(p(e))), s.present(e)), s.made(e) == s.now(n(e)))),
            'what a fault makes in a page without a bit is what the table says': s.all(lambda f: Implies(
                And(s.fpc(f) == LOCKED, Not(s.bit(p(s.at(f))))), s.seen(f) == s.now(n(s.at(f))))),
            'a write fault that has set W has set the bits': s.all(lambda u, p: Implies(
                And(s.upc(u) == HAS_BITS, s.frame(p) == s.target(u)), And(s.bit(p), s.state(p) == UNSYNC))),
            'a write fault makes all pages unsync': s.all(lambda u, p: Implies(
                And(s.upc(u) == HAS_STATES, s.frame(p) == s.target(u)), s.state(p) == UNSYNC)),
        }

    def inv_of_flushes(self, s):
        runs = lambda i: And(BEGUN <= s.ipc(i), s.ipc(i) <= LOCAL)
        mine = lambda i: s.address(i)
        is_one = lambda i: s.kind(i) != CR3
        done = lambda i, e: Or(s.compared(i, e), And(s.ipc(i) == LOCAL, Or(s.kind(i) == CR3, e == mine(i))),
                               s.passed(i, s.page(e)))
        same = lambda i, p: And(runs(i), s.protected(i, p), s.state(p) == SYNCING,
            s.sequence(p) == s.saw_sequence(i, p))
        fresh = lambda i, e: s.made(e) >= s.must(i, e)
        return {
            'a flush must see what was there': s.all(lambda i, e: Implies(
                runs(i), s.must(i, e) <= s.now(s.made_of(e)))),
            'only a load of CR3 synchronizes': s.all(lambda i, p: Implies(
                Or(s.passed(i, p), s.protected(i, p)), And(s.kind(i) == CR3, s.ipc(i) >= COMPARES))),
            'only a flush that runs compares': s.all(lambda i: Implies(s.reads(i), s.ipc(i) == COMPARES)),
            'what is compared was begun': s.all(lambda i, e: Implies(s.compared(i, e), s.ipc(i) >= COMPARES)),
            'only a page fault looks first': s.all(lambda i: Implies(
                Or(s.ipc(i) == BEGUN, s.ipc(i) == SAW_FREE), s.kind(i) == FAULT)),
            'a comparison has read a value that counts': s.all(lambda i: Implies(
                s.reads(i), s.value(i) >= s.must(i, s.compares(i)))),
            'a shadow PTE that a flush is done with is fresh': s.all(lambda i, e: Implies(
                And(runs(i), done(i, e), s.present(e)), fresh(i, e))),
            'a fault that locks after a flush is done makes what is fresh': s.all(lambda i, f: Implies(
                And(runs(i), s.fpc(f) == LOCKED,
                    Or(done(i, s.at(f)), And(s.ipc(i) == SAW_FREE, s.at(f) == mine(i)))),
                s.seen(f) >= s.must(i, s.at(f)))),
            'an ended page was compared': s.all(lambda i, e: Implies(
                And(runs(i), s.ended(i, s.page(e))), s.compared(i, e))),
            'only a protected page is ended': s.all(lambda i, p: Implies(s.ended(i, p), s.protected(i, p))),
            # From protection to the end, if the guest has not written meanwhile.
            'a page has no greater sequence before': s.all(lambda i, p: Implies(
                s.protected(i, p), s.saw_sequence(i, p) <= s.sequence(p))),
            'an unsync page has a greater sequence': s.all(lambda i, p: Implies(
                And(s.protected(i, p), s.state(p) == UNSYNC), s.saw_sequence(i, p) < s.sequence(p))),
            'a page that was not written since has no W': s.all(lambda i,
                p: Implies(same(i, p), Not(s.w(s.frame(p))))),
            'no flushed CPU writes a table that was not written since': s.all(lambda i, p, c: Implies(
                And(same(i, p), s.flushed(i, p, c)), Not(s.cached_w(c, s.frame(p))))),
            'flushed pages are protected': s.all(lambda i, p,
                c: Implies(s.flushed(i, p, c), s.protected(i, p))),
            'compared pages are flushed': s.all(lambda i, e, c: Implies(
                And(s.kind(i) == CR3, s.compared(i, e)), s.flushed(i, s.page(e), c))),
            'comparing pages are flushed': s.all(lambda i, c: Implies(
                And(s.kind(i) == CR3, s.reads(i)), s.flushed(i, s.page(s.compares(i)), c))),
            'a comparison of a page that was not written since reads what is there': s.all(lambda i: Implies(
                And(s.reads(i), same(i, s.page(s.compares(i)))), s.value(i) == s.now(
                    s.made_of(s.compares(i))))),
            'a compared PTE of a page that was not written since is what the table says': s.all(lambda i,
                e: Implies(
                And(same(i, s.page(e)), s.compared(i, e), s.present(e)), s.made(e) == s.now(s.made_of(e)))),
            'a fault in a page that was not written since makes what the table says': s.all(lambda i,
                f: Implies(
                And(s.fpc(f) == LOCKED, same(i, s.page(s.at(f))), s.compared(i, s.at(f))),
                s.seen(f) == s.now(s.made_of(s.at(f))))),
        }

    def inv_of_writes(self, s):
        upper = lambda e: s.is_upper(s.table(s.made_of(e)))
        mine = lambda m, e: And(s.mpc(m) == COUNTED, s.dropped(m, e))
        return {
            'an emulated write is at one of its steps': s.all(
                lambda m: And(IDLE <= s.mpc(m), s.mpc(m) <= FLUSHED + 1)),
            'an emulated write is to an upper table': s.all(
                lambda m: Implies(s.mpc(m) != IDLE, s.is_upper(s.table(s.writes(m))))),
            'an upper table has synced pages': s.all(lambda p: Implies(
                s.is_upper(s.frame(p)), And(s.state(p) == SYNCED, Not(s.bit(p))))),
            'an upper table is not written by a CPU': s.all(lambda t, c: Implies(
                s.is_upper(t), And(Not(s.w(t)), Not(s.cached_w(c, t))))),
            'what is dropped is of the PTE': s.all(lambda m,
                e: Implies(s.dropped(m, e), s.made_of(e) == s.writes(m))),
            'a dropped PTE stays away': s.all(lambda m, e: Implies(mine(m, e), Not(s.present(e)))),
            'no fault makes a dropped PTE': s.all(lambda m,
                f: Implies(And(mine(m, s.at(f))), s.fpc(f) != LOCKED)),
            'CPUs are flushed after all is dropped': s.all(lambda m, c, e: Implies(
                And(s.mpc(m) == COUNTED, s.mflushed(m, c), s.made_of(e) == s.writes(m)), s.dropped(m, e))),
            'a flushed CPU has no dropped PTE': s.all(lambda m, c, e: Implies(
                And(s.mpc(m) == COUNTED, s.mflushed(m, c),
                    s.made_of(e) == s.writes(m)), Not(s.cached(c, e)))),
            'the emulation begins with nothing': s.all(lambda m, e, c: Implies(
                s.mpc(m) == IDLE, And(Not(s.dropped(m, e)), Not(s.mflushed(m, c))))),
        }


def run(kind, start=None, **sizes):
    """A table that a CPU writes, an unsync page and a shadow PTE, and a flush of that kind."""
    unsync = at(kind=kind, state=UNSYNC, bit=True, w=True, cached_w=True, present=True)
    return starts.run(ShadowSync, {'Writer': 0, 'Opener': 0, **sizes}, {**unsync, **(start or {})})


NO_W = at(state=SYNCED, bit=False, w=False, cached_w=False)
UPPER = {**NO_W, **at(is_upper=True)}
FIRST = lambda i, *_: i == 'flush0'
LATE = {**at(ipc=[COMPARES, OUT], state=SYNCING, w=False, cached_w=False), 'protected': FIRST,
    'flushed': FIRST,
        'compared': FIRST}                                      # the first flush has compared the page
ShadowSync.traces = {
    'entry-is-read-again': run(INVLPG),
    'compare-under-lock': run(INVLPG),
    'local-flush': run(INVLPG),
    'fault-compares': run(FAULT),
    'lock-is-looked-at': run(FAULT),
    'syncing-is-compared': run([FAULT, CR3], Flush=2),
    'syncing-is-synchronized': run(CR3, Flush=2),
    'bit-before-w': run(CR3, NO_W, Opener=1),
    'written-is-unsync': run(CR3, Opener=1),
    'flush-before-compare': run(CR3),
    'flush-in-any-case': run(CR3, Flush=2),
    'sequence-is-compared': run(CR3, LATE, Flush=2, Opener=1),
    'writers-keep-out': run(INVLPG, UPPER, Writer=1),
    'drop-before-write': run(INVLPG, UPPER, Writer=1),
    'flush-before-write': run(INVLPG, UPPER, Writer=1),
}

if __name__ == '__main__':
    prover.main(ShadowSync)
