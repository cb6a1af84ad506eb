"""Replays guards, and page-table pages that are unlinked, retired and freed, in `epochs.py`. See `replay.py`.

Things are page-table pages, but for the root. Shuttle is sequentially consistent: what is stored is visible at once,
so `visible` and `idle_visible` follow at once. A guard reaches a page-table page when it reads a PTE that names it, or
links it. It may access the PTEs only of what it holds.
"""
import collections
import replay
from epochs import FENCED, OUT, TAGGED, TAKEN, TOOK, Epochs
from page_tables import BROKEN, TABLE
from replay import Mismatch

TABLE_BYTES = 4096                          # to which the page-table pages are aligned


class Thread:
    def __init__(self):
        self.guards = []                # that are open, with what they announce; the last was opened last
        self.batch = []                 # what it has retired, or keeps, and has not listed
        self.unlinked = set()           # by it, and not retired yet
        self.reclaimer = None
        self.scans = False              # its reclaimer reads announcements


class Schedule(replay.Schedule):
    model, of_thread = Epochs, Thread
    ignored = {'fault-looks', 'host-answers', 'host-changes', 'cpu-translates', 'cpu-walks', 'cpu-reads',
               'number-taken', 'number-read', 'published', 'withdrawn', 'ranges-read', 'ranges-found', 'slots-read',
               'slots-published', 'flush-begins', 'flush-ends', 'pte-frozen'}
    # The guard of a lock; hazard pointers, which protect memslots; what is visible at once.
    not_shown = {'rmw', 'protect', 'unprotect', 'hazard_visible', 'observe', 'be_aware'}

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, events)
        self.root = root
        self.made = collections.defaultdict(list)       # {page-table page: what was stored in it before it was linked}
        self.fenced = {}                # {participant: the reclaimers that had made their fences when it came up}
        run.fix('epoch', (), 1)

    def replay(self):
        super().replay()
        for at in self.threads.values():
            if at.batch or at.unlinked:
                raise Mismatch(f'in no list: {at.batch} {at.unlinked}')

    # A participant.

    def participant(self, announcement):
        run = self.run
        if announcement not in self.fenced:
            run.add('Participant', announcement)
            self.fenced[announcement] = {r for r in run.elements['Reclaimer'] if self.s.rpc(r) == FENCED}
        return announcement

    def on_epoch_read(self, announcement, epoch):
        if self.s.epoch() != epoch:
            raise Mismatch(f'the epoch is {epoch}; in the model {self.s.epoch()}')
        self.run.step('read_epoch', self.participant(announcement))

    def on_announced(self, k, epoch):
        run, s = self.run, self.s
        if s.pc(k) == OUT:
            run.step('read_none', k)
        if s.val(k) != epoch:
            raise Mismatch(f'the epoch {epoch} is announced; in the model {s.val(k)}')
        run.step('store' if s.remote() else 'swap', k)
        if s.remote():
            run.step('visible', k)

    def on_guard_opened(self, k):
        guard = self.new('Guard')
        self.run.fix('of', (guard,), k)
        self.run.step('open', guard)
        self.at.guards.append((k, guard))

    def on_guard_closed(self, k, is_last):
        run, s, guards = self.run, self.s, self.at.guards
        # Guards of a participant end in any order, and hold the same here.
        guard = next(g for of, g in reversed(guards) if of == k)
        guards.remove((k, guard))
        run.step('close', guard)
        if (s.pc(k) == OUT) != bool(is_last):
            raise Mismatch('an announcement ends, and not its last guard' if is_last else 'an announcement stays')
        if is_last:
            run.step('idle_visible', k)
        run.remove('Guard', guard)

    def on_thing_kept(self, k, epoch):
        run, s = self.run, self.s
        guard = next(g for of, g in reversed(self.at.guards) if of == k)
        for thing in run.elements['Thing']:
            if s.holds(guard, thing):
                run.step('keep_for_next', guard, thing)

    def on_epoch_read_again(self, k, epoch):
        run, s = self.run, self.s
        guard = next(g for of, g in reversed(self.at.guards) if of == k)
        # If it is another the guard uses nothing of it.
        if epoch == s.val(k):
            for thing in [t for t in run.elements['Thing'] if s.kept(k, t)]:
                run.step('take_over', guard, thing)

    def reach(self, table):
        """The thread has read or linked a page-table page; a CPU's walk or its owner's look needs no guard."""
        guards = self.at.guards
        if not guards:
            raise Mismatch(f'the page-table page {table:#x} is reached without a guard')
        if table not in self.run.elements['Thing']:
            raise Mismatch(f'the page-table page {table:#x} is reached, and was not linked, or was freed')
        for _, guard in guards:
            if not self.s.holds(guard, table):
                self.run.step('reach', guard, table)

    # PTEs.

    def accesses(self, cell):
        """The thread reads a PTE or tries to exchange it: of a page that it holds, or that is its own."""
        table, s, at = cell // TABLE_BYTES * TABLE_BYTES, self.s, self.at
        if table == self.root or table in at.unlinked:
            return
        is_taken = at.reclaimer is not None and s.tpc(table) == TAKEN and s.taker(table) == at.reclaimer
        if not is_taken and not any(s.holds(guard, table) for _, guard in at.guards):
            raise Mismatch(f'a PTE of the page-table page {table:#x} is accessed, which no guard holds')

    def on_pte_read(self, cell, level, kind, a, b):
        self.accesses(cell)
        if kind in (TABLE, BROKEN) and self.is_linked(a):
            self.reach(a)

    on_pte_kept = on_pte_read

    def is_linked(self, table):
        """A broken PTE may name a page-table page that a split is about to link."""
        return table in self.run.elements['Thing']

    def on_pte_replaced(self, cell, level, old, old_a, old_b, kind, a, b):
        run, s = self.run, self.s
        self.accesses(cell)
        before = old_a if old in (TABLE, BROKEN) else None
        after = a if kind in (TABLE, BROKEN) else None
        if after is not None and not self.is_linked(after):
            self.link(after, level - 1)
        if after is not None:
            self.reach(after)
        if before is not None and before != after:
            run.step('unlink', before)
            self.at.unlinked.add(before)

    def on_pte_made(self, cell, *kinds):
        self.made[cell // TABLE_BYTES * TABLE_BYTES].append(kinds)

    def link(self, table, level):
        """A page-table page with PTEs of this level, with what it names."""
        self.run.add('Thing', table)
        for kinds in self.made[table] if level > 1 else ():
            if kinds[3] == TABLE:
                self.link(kinds[4], level - 1)

    # A retirement.

    def on_epoch_advanced(self, epoch):
        run, s = self.run, self.s
        if s.epoch() != epoch:
            raise Mismatch(f'the epoch {epoch} is over; in the model {s.epoch()}')
        batch, tables, slots = self.new('Batch'), [], None
        for name, numbers in self.later():
            if name == 'table-retired':
                tables.append(numbers[0])
            elif name != 'pte-frozen':
                break
        if not tables:
            # Of a memslot set, of which no more is replayed.
            slots = self.new('Thing')
            tables = [slots]
            run.step('unlink', slots)
        for table in tables:
            run.fix('batch', (table,), batch)
        run.step('advance', batch)
        run.remove('Batch', batch)
        if slots:
            run.remove('Thing', slots)

    def on_table_retired(self, table, tag):
        s, at = self.s, self.at
        # Where a fault gives a recovery up, the fault unlinks, and the recovery retires.
        unlinker = next((of for of in self.threads.values() if table in of.unlinked), None)
        if s.tpc(table) != TAGGED or s.tag(table) != tag or unlinker is None:
            raise Mismatch(f'{table:#x} is retired with {tag}; in the model it is at {s.tpc(table)}')
        unlinker.unlinked.remove(table)
        at.batch.append((table, 'list'))

    def on_tables_listed(self):
        for table, step in self.at.batch:
            self.run.step(step, *([self.at.reclaimer] if step == 'keep' else []), table)
        self.at.batch = []

    # A reclaim.

    def on_barrier_made(self):
        run, s, at = self.run, self.s, self.at
        if not run.elements['Participant']:
            run.fix('remote', (), True)
        elif at.scans:
            self.fence()
            for k in run.elements['Participant']:
                run.step('barrier', at.reclaimer, k)

    def on_tables_taken(self):
        run, at = self.run, self.at
        if at.reclaimer is not None:
            self.end_reclaim()
        at.reclaimer, at.scans = self.new('Reclaimer'), True
        run.step('take', at.reclaimer)

    def end_reclaim(self):
        at, s = self.at, self.s
        left = [t for t in self.run.elements['Thing'] if s.tpc(t) == TAKEN and s.taker(t) == at.reclaimer]
        if left:
            raise Mismatch(f'taken, and neither freed nor kept: {left}')
        self.run.remove('Reclaimer', at.reclaimer)

    def fence(self):
        """A fence is no point where another thread may come between: it is made with what follows."""
        if self.s.rpc(self.at.reclaimer) == TOOK:
            self.run.step('fence', self.at.reclaimer)

    def on_announcement_read(self, announcement, epoch):
        run, s, at = self.run, self.s, self.at
        k = self.participant(announcement)
        if not at.scans:
            return                          # of memslots, or of generations
        self.fence()
        self.scan(k)
        if s.found(at.reclaimer, k) != epoch:
            raise Mismatch(f'{epoch} was announced; in the model {s.found(at.reclaimer, k)}')

    def scan(self, k):
        run, s, r = self.run, self.s, self.at.reclaimer
        for other in run.elements['Participant'] if s.remote() else ():
            if not s.hit(r, other):
                if r not in self.fenced[other]:
                    raise Mismatch('announcements are read before the barrier')
                # It came up later, and its guards announce later epochs.
                run.step('barrier', r, other)
        run.step('scan', r, k)

    def on_announcements_read(self):
        run, s, at = self.run, self.s, self.at
        if not at.scans:
            return
        at.scans = False
        self.fence()
        for k in run.elements['Participant']:
            if not s.scanned(at.reclaimer, k):
                if at.reclaimer not in self.fenced[k]:
                    raise Mismatch('an announcement is passed over')
                self.scan(k)

    def on_table_kept(self, table):
        self.at.batch.append((table, 'keep'))

    def on_table_freed(self, table):
        run, r = self.run, self.at.reclaimer
        for k in run.elements['Participant']:
            run.step('check_hazard', r, k, table)
        run.step('free', r, table)
        run.remove('Thing', table)
