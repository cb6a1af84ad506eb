"""Replays CPUs that log what they write, and harvests that drain the logs, in `modification_logs.py`. See `replay.py`.

An entry is its CPU and its number. The drain is that of the host of the test.
"""
import collections
import replay_dirty_bits
from modification_logs import LOGGED, LOGS, VISITS, ModificationLogs
from replay import NR_CPUS, Mismatch


class Schedule(replay_dirty_bits.Schedule):
    model = ModificationLogs
    visit_summarizes = 'summarize_entry'

    def __init__(self, run, root, nr_levels, events):
        super().__init__(run, root, nr_levels, events)
        self.nr_logged = collections.Counter()      # of each CPU
        self.begun = {}                             # by each CPU in its access: the entry
        self.drains = collections.defaultdict(collections.deque)    # of each thread: the entries that it passes on

    def entry(self, cpu, number):
        return f'entry {number} of {cpu}'

    # CPUs.

    def on_cpu_logs(self, cpu, gfn):
        entry = self.begun[cpu] = self.run.add('Entry', self.entry(cpu, self.nr_logged[cpu]))
        self.nr_logged[cpu] += 1
        self.run.fix('cpu', (entry,), cpu)
        self.run.fix('of_page', (entry,), gfn)
        self.run.step('log', entry)

    def on_cpu_sets_dirty(self, cpu, gfn):
        self.run.step('set_dirty', self.begun.pop(cpu))

    def has_cached(self, cpu):
        return cpu in self.begun or super().has_cached(cpu)

    def on_cpu_forgets(self, cpu, gfn):
        self.begun.pop(cpu, None)
        super().on_cpu_forgets(cpu, gfn)

    # Drains.

    def looks(self, page):
        if self.at.harvest is None or self.s.hpc(self.at.harvest) != VISITS:
            super().looks(page)

    def on_drain_notes(self, cpu, end):
        s, harvest = self.s, self.at.harvest
        self.run.step('note', harvest, cpu)
        noted = [e for e in self.run.elements['Entry'] if s.noted(harvest, e) and s.cpu(e) == cpu]
        if self.nr_logged[cpu] != end or any(s.log(e) != LOGGED for e in noted):
            raise Mismatch(f'a drain notes {end} entries of {cpu}; the model {noted}')

    def on_drain_kicked(self):
        for cpu in range(NR_CPUS):
            self.run.step('kick', self.at.harvest, cpu)

    def on_drain_reads(self, cpu, first, nr_entries):
        self.drains[self.thread].extend(self.entry(cpu, first + n) for n in range(nr_entries))

    def on_slots_read(self):
        if self.drains[self.thread]:
            self.run.step('drain_entry', self.at.harvest, self.drains[self.thread].popleft())
        else:
            super().on_slots_read()

    def on_drain_removes(self, cpu, end):
        for number in range(end):
            entry = self.entry(cpu, number)
            if self.s.log(entry) == LOGGED:
                self.run.step('remove_entry', self.at.harvest, entry)

    def marks(self, by_fault, by_harvest, word, mask):
        s, harvest = self.s, self.at.harvest
        if harvest is None:
            return super().marks(by_fault, by_harvest, word, mask)
        found = [e for e in self.run.elements['Entry']
                 if s.drain(harvest, e) == LOGS and self.pages(word, mask) == [s.of_page(e)]]
        if not found or (by_fault == 'find_marked' and not s.bit(s.of_page(found[0]))):
            raise Mismatch('a mark that no step makes')
        self.run.step('mark_entry', harvest, found[0])

    def end_visits(self):
        if self.at.harvest is not None and self.s.hpc(self.at.harvest) == VISITS:
            self.run.step('drained', self.at.harvest)
