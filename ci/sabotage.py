#!/usr/bin/env python3
"""Breaks the engine in one place after the other, in a copy. The replay in the proofs must notice each.

    ci/sabotage.py [WORD...]        those whose names have one of the words; all without
    ci/sabotage.py --check          only whether the engine has each place, once

By hand, but for the check: it builds the engine once for each place. `ci/proofs.sh` must have run before, for its
Python.
"""
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / 'target/sabotage'
ENVIRONMENT = {
    'REPLAY_RUSTFLAGS': '--cfg shuttle',            # broken code may warn
    'REPLAY_TARGET_DIR': str(ROOT / 'target/sabotage-build'),
    'REPLAY_PYTHON': str(ROOT / 'target/proofs/bin/python'),
    # To build takes longer than to run.
    'CARGO_PROFILE_RELEASE_OPT_LEVEL': '0', 'CARGO_PROFILE_RELEASE_LTO': 'off', 'CARGO_PROFILE_RELEASE_DEBUG': 'none',
    'CARGO_PROFILE_RELEASE_CODEGEN_UNITS': '16', 'CARGO_PROFILE_RELEASE_INCREMENTAL': 'true',
}
# What is broken: a file below `crates/slat/src`, what stands there once, and what instead. A rule may have more places.
SABOTAGES = {
    'a zap leaves the numbers of empty PTEs': (
        'second_stage/zap/small.rs', 'State::Empty(found) if found < self.seq => {',
        'State::Empty(found) if found < self.seq && false => {'),
    'a PTE above the lowest level gets no fresh number': (
        'second_stage/zap.rs', 'if level == Level::L4K { self.seq } else { self.op.tree.next_seq() }', 'self.seq'),
    'an unlinking stores no fresh number': (
        'second_stage/zap.rs', 'op.tree.next_seq())', 'self.seq)'),
    'an unlinking with leaves stores no fresh number': (
        'second_stage/zap/take_over.rs', 'Pte::empty(self.op.tree.next_seq())', 'Pte::empty(self.seq)'),
    'a page-table page is unlinked of which the range has a part': (
        'second_stage/zap.rs', 'level == self.pass && range.covers(block) &&', 'level == self.pass &&'),
    'the number is taken before the range is in flight': (
        'second_stage/invalidate.rs',
        'let in_flight = ranges.publish(range)?;\n        let seq = op.tree.next_seq();',
        'let seq = op.tree.next_seq();\n        let in_flight = ranges.publish(range)?;'),
    'a range in flight is not active': (
        'table/in_flight.rs', 'self.word.fetch_or(active_bit(place), Ordering::Release);',
        'self.word.fetch_or(0, Ordering::Release);'),
    'an invalidation does not flush': (
        'second_stage/invalidate.rs', 'batch.flush();', 'core::mem::forget(batch);'),
    'a fault reads the ranges before the PTE': (
        'vcpu.rs', 'let guard = pin.open();',
        'let guard = pin.open();\n        let free = tree.in_flight.free_level(self.gfn, F::ROOT_LEVEL);',
        'vcpu.rs', '&cursor, value, cursor.level())', '&cursor, value, cursor.level(), free)',
        'vcpu.rs', 'level: Level,\n    ) -> Plan', 'level: Level,\n        free: Option<Level>,\n    ) -> Plan',
        'vcpu.rs', 'let Some(max_level) = tree.in_flight.free_level(self.gfn, level) else {',
        'let Some(max_level) = free.map(|free| free.min(level)) else {'),
    'a small fault reads the ranges before the PTE': (
        'vcpu/small.rs', 'let guard = pin.reborrow().open();',
        'let guard = pin.reborrow().open();\n'
        '        let is_busy = tree.in_flight.free_level(self.gfn, Level::L4K).is_none();',
        'vcpu/small.rs', 'if tree.in_flight.free_level(self.gfn, Level::L4K).is_none() {', 'if is_busy {'),
    'a fault of a block reads the ranges before the PTE': (
        'vcpu/block.rs', 'let guard = pin.reborrow().open();',
        'let guard = pin.reborrow().open();\n'
        '        let is_busy = tree.in_flight.free_level(gfn, LEVEL) != Some(LEVEL);',
        'vcpu/block.rs', 'if tree.in_flight.free_level(gfn, LEVEL) != Some(LEVEL) {', 'if is_busy {'),
    'a fault of a block looks at the ranges of its page alone': (
        'vcpu/block.rs', 'free_level(gfn, LEVEL) != Some(LEVEL)', 'free_level(gfn, LEVEL).is_none()'),
    'a leaf is installed whatever the number': (
        'vcpu/act.rs', 'if seq != seen || cursor.level() > plan.level', 'if cursor.level() > plan.level'),
    'a small leaf is installed whatever the number': (
        'vcpu/small.rs', 'unsafe { pte.install(&participant.stats, Pte::empty(seen), leaf)? }',
        'let State::Empty(now) = pte.load().state(Level::L4K) else { return Err(Changed) };\n'
        '        unsafe { pte.install(&participant.stats, Pte::empty(now), leaf)? }'),
    'a mapping of a page reads the ranges before the PTE': (
        'second_stage/map.rs', 'record!(FaultLooks { gfn: gfn.0 });\n    let (mut cursor, seen)',
        'record!(FaultLooks { gfn: gfn.0 });\n'
        '    let is_busy = tree.in_flight.free_level(gfn, Level::L4K).is_none();\n    let (mut cursor, seen)',
        'second_stage/map.rs', 'tree.in_flight.free_level(gfn, Level::L4K).is_none() ||', 'is_busy ||'),
    'a mapping of a page keeps the PTE whatever was retired': (
        'second_stage/map.rs', 'if tree.epochs.has_retired_since(guard) {', 'if false {'),
    'a new page-table page begins with number 0': (
        'second_stage/install.rs', 'let beside = Pte::empty(seq.flushed());',
        'let beside = Pte::empty(InvalidationSeq::FIRST);'),
    'a read-only leaf is replaced whatever happened since the look': (
        'vcpu/act.rs', 'if tree.current_seq().follows(seen) {', 'if tree.current_seq().follows(seen) || true {'),
    'an aborted recovery stores no fresh number': (
        'second_stage/broken.rs', 'let seq = op.tree.next_seq();', 'let seq = op.tree.current_seq();'),
    'a recovery freezes nothing': (
        'table/pte_ref.rs',
        'self.cell.compare_exchange(value.bits(), frozen.bits(), Ordering::AcqRel, Ordering::Acquire);',
        'Ok::<u64, u64>(value.bits());'),
    'a harvest does not protect': (
        'harvest/log.rs', 'if !taken.is_empty() {', 'if false && !taken.is_empty() {'),
    'a harvest does not flush': (
        'harvest/log.rs', '        batch.flush_cpus();\n        // Also', '        core::mem::forget(batch);\n        // Also',
        'harvest/log.rs', 'if reader.is_full() {\n                batch.flush_cpus();',
        'if reader.is_full() {\n                core::mem::forget(core::mem::replace(&mut batch, self.op.batch()));'),
    'a harvest takes the word before the summary': (
        'slot/bitmap.rs', 'let found = summary.fetch_and(!seen, Ordering::SeqCst) & seen;',
        'for index in SetBits(seen) {\n'
        '    let index = group * GROUP_WORDS + index;\n'
        '    taken.push(index - range.start, self.take_word(index));\n'
        '}\n'
        'let found = summary.fetch_and(!seen, Ordering::SeqCst) & 0;'),
    'a fault does not mark': ('slot/bitmap.rs', 'if self.has(index, mask) {', 'if true || self.has(index, mask) {'),
    'a small fault that installs a leaf does not mark': (
        'vcpu/small.rs', 'if rights == Rights::Writable && marks {', 'if false && marks {'),
    'a small fault that restores W does not mark': (
        'vcpu/small.rs', 'log::mark_page_of(slots, guard, self.ring, slot, self.gfn);', ''),
    'a fault that restores W goes by the memslot of before': (
        'dirty/log.rs', 'if !slots.is_current(slot) {', 'if false {'),
    'a mark sets no summary': (
        'slot/bitmap.rs',
        'self.set(index, mask);\n        self.summarize(index / GROUP_WORDS, 1 << (index % GROUP_WORDS));',
        'self.set(index, mask);',
        'slot/bitmap.rs', 'if changed != 0 {', 'if changed != 0 && false {'),
    'a visit of leaves sets no summary': (
        'slot/bitmap.rs',
        'self.set(index, marks);\n            self.summarize(index / GROUP_WORDS, 1 << (index % GROUP_WORDS));',
        'self.set(index, marks);'),
    'enabling does not protect': (
        'vm/region.rs', 'protect::protect_slot(self.operation(participant), range);', ''),
    'enabling does not flush': (
        'vm/region.rs', 'self.tree.flush(participant, &[range]);', ''),
    'a recovery makes a huge leaf without a flush': (
        'second_stage/recover.rs', 'op.flush(&[block]);', ''),
    'a split links its page-table page without a flush': (
        'second_stage/split.rs', 'op.flush(&[gfn.block(level)]);\n    link_parts', 'link_parts'),
    'an abort leaves a plain number': (
        'second_stage/broken.rs', 'if F::BREAK_BEFORE_MAKE { seq.unflushed() } else { seq }', 'seq'),
    'a fault does not flush before it installs': (
        'vcpu/resolve.rs', 'self.op.flush(&[self.gfn.block(plan.level)]);', ''),
    'an invalidation of a part clears the flag without a flush': (
        'second_stage/zap.rs', 'self.op.flush(&[gfn.block(level)]);', ''),
    'a fault links page-table pages at an unflushed PTE': (
        'vcpu/act.rs', '!seq.is_unflushed() && tree.in_flight', 'tree.in_flight'),
    'a fault links page-table pages inside a range in flight': (
        'vcpu/act.rs', 'Level::L4K).is_some();', 'Level::L4K) != Some(Level(0));'),
    'a rescan takes no number': (
        'second_stage/rescan.rs', 'let seq = op.tree.next_seq();', 'let seq = op.tree.current_seq();'),
    'a rescan flushes only what it has zapped': (
        'second_stage/rescan.rs', 'batch.add(run);', ''),
    'a rescan unlinks page-table pages': (
        'second_stage/zap.rs', 'if zap.leaves_tables || faults == Faults::MayComeBack ||', 'if zap.leaves_tables ||'),
    'a fault does not read the userfault bit': (
        'vcpu.rs', 'if !slot.may_use(self.gfn) {', 'if false && !slot.may_use(self.gfn) {'),
    'a small fault does not read the userfault bit': (
        'vcpu/small.rs', ' && slot.may_use(self.gfn);', ';'),
    'a block is mapped while bits stand for pages': (
        'vcpu.rs', 'max_level.min(userfault.level()));', '(max_level, userfault.level()).0);'),
    'a block is mapped by the attributes of one page': (
        'vcpu/resolve.rs', 'if plan.flags.contains(MemoryRegionFlags::GUEST_MEMFD) {', 'if false {'),
    'the userfault flag is turned on, and nothing is zapped': (
        'vm/region.rs', 'let lost = if moves || begins_userfault {', 'let lost = if moves {'),
    'attributes are stored before their pages are zapped': (
        'vm/page_state.rs',
        'let invalidation = Invalidation::new(&self.tree.in_flight, &self.operation(&participant), range)?;', '',
        'vm/page_state.rs', 'drop(invalidation);',
        'drop(Invalidation::new(&self.tree.in_flight, &self.operation(&participant), range)?);'),
    'a claim goes by what was found before it': (
        'slot/set.rs', 'Ok(self.by_id(&guard, id).map(|now| Claim { entry: now.entry.duplicate(), slots: self }))',
        'Ok(Some(Claim { entry: view.entry.duplicate(), slots: self }))'),
    'a memslot is deleted, and its pages stay': (
        'vm/region.rs', 'match Invalidation::new(&self.tree.in_flight, &self.operation(participant), range) {',
        'match Ok::<_, SlotError>(range) {'),
    'a range is withdrawn before the memslot has moved': (
        'vm/region.rs', 'Ok(ref _invalidation) => {\n', 'Ok(invalidation) => {\n drop(invalidation);\n'),
    'a reclaim does not look at hazard pointers': (
        'slot/set.rs', ' && !node.slot.is_some_and(|slot| epochs.is_resolving(slot)) {', ' {'),
    'epochs: a reclaim passes the announcements of faults over': (
        'table/retire.rs', 'for announced in [&participant.announced, &participant.announced_by_fault] {\n'
        '                // Acquire', 'for announced in [&participant.announced] {\n                // Acquire'),
    'epochs: what has the tag of the oldest announcement is freed': (
        'table/retire.rs', 'let is_reachable = label.tag >= oldest;', 'let is_reachable = label.tag > oldest;'),
    'epochs: announcements are read before the list is taken': (
        'table/retire.rs',
        'let mut next = Hpa(self.retired_tables.first.swap(NO_TABLE.0, Ordering::Acquire));\n'
        '        record!(TablesTaken);\n'
        '        let oldest = self.oldest_open(|| host.barrier_on_all_cpus());',
        'let oldest = self.oldest_open(|| host.barrier_on_all_cpus());\n'
        '        let mut next = Hpa(self.retired_tables.first.swap(NO_TABLE.0, Ordering::Acquire));\n'
        '        record!(TablesTaken);'),
    'epochs: a second guard keeps what was found, whatever was retired': (
        'table/retire.rs', 'is_same.then_some(KeptGuard', '(is_same || true).then_some(KeptGuard'),
    'epochs: a reclaim makes no barrier': (
        'table/retire.rs', 'if self.fences == Fences::Remote {', 'if false {'),
    'epochs: a guard is not announced': (
        'table/retire.rs', 'if participant.is_outside() {\n            self.announce',
        'if false {\n            self.announce'),
    'epochs: a retirement ends no epoch': (
        'table/retire.rs', 'let tag = self.advance_epoch();', 'let tag = self.epoch.load(Ordering::Acquire);'),
    'a protected directory entry is not protected again': (
        'second_stage/protect.rs', 'State::Table if self.may_close(pages) => self.close(value),',
        'State::Table if self.may_close(pages) => if value.is_protected() { Ok(()) } else { self.close(value) },'),
    'a push-down leaves W of the other pages': (
        'second_stage/push_down.rs', 'if others() == Others::Protect {', 'if others() == Others::Protect && false {'),
    'a push-down reads the flag before the directory entry': (
        'vcpu/on_leaf.rs', 'let pushed = push_down::push_down(self.op.tree, guard, self.gfn, others)?;',
        'let found = others();\n        let pushed = push_down::push_down(self.op.tree, guard, self.gfn, || found)?;'),
    'a push-down that fails does not mark': (
        'vcpu/on_leaf.rs', 'self.mark_leaf(guard, Level::L4K);\n        match pushed {',
        'if pushed == Pushed::Open {\n            self.mark_leaf(guard, Level::L4K);\n        }\n'
        '        match pushed {'),
    'a harvest visits no leaves': (
        'harvest/log.rs', 'DirtyTracking::DirtyBit => self.mark_dirty_leaves(pages, bitmap_len),',
        'DirtyTracking::DirtyBit => Ok(()),'),
    'a visit does not mark what has D': (
        'harvest/log.rs', '                    log.mark_word(word as usize, marks);\n', '',
        'harvest/log.rs', '        log.mark_word(word as usize, marks);\n    }\n    behind', '    }\n    behind'),
    'a harvest hides D from the host': (
        'table/pte.rs', 'self.without(F::DIRTY).with(was_dirty)', 'self.without(F::DIRTY).with(was_dirty & 0)'),
    'a fault that sets D does not mark': (
        'vcpu/on_leaf.rs', 'if writes && !tree.config.first_write_faults(cursor.level()) {', 'if writes && false {'),
    'a harvest does not drain': (
        'harvest/log.rs',
        'self.op.host().drain_modification_logs(&mut |written| {\n'
        '                    mark_written(self.op, written);\n                });', ''),
    'a drain does not mark': (
        'harvest/mark.rs', 'mark_page_if_logging(op.slots, &guard, None, gpa.gfn());', ''),
    'a zap marks only after its exchange': (
        'second_stage/zap.rs',
        'mark_dirty(*op, guard, value, level, block);\n                node::report_zapped', 'node::report_zapped',
        'second_stage/zap/small.rs', 'if marks && !is_pinned {', 'if false && marks && !is_pinned {'),
    'a zap marks only before its exchange': (
        'second_stage/zap.rs',
        'mark_dirty(*op, guard, value, level, block);\n                    self.batch.add(block);',
        'self.batch.add(block);',
        'second_stage/zap/small.rs', '} else if marks {', '} else if false && marks {'),
    'a zap does not notify the host': (
        'second_stage/zap.rs', 'node::report_zapped(op.tree, value, level, block);', '',
        'second_stage/zap/small.rs', 'node::report_zapped(tree, value, Level::L4K, range);', ''),
    'a push moves the index on before it writes the entry': (
        'dirty/ring.rs',
        'self.page_word(index).store(page.word(), Ordering::Release);\n'
        '        record!(RingEntryWritten { ring: self.address(), index, page: page.word() });', '',
        'dirty/ring.rs', 'record!(RingPushed { ring: self.address(), index });',
        'record!(RingPushed { ring: self.address(), index });\n'
        '        self.page_word(index).store(page.word(), Ordering::Release);\n'
        '        record!(RingEntryWritten { ring: self.address(), index, page: page.word() });'),
    'a ring is harvested whatever another harvest took': (
        'dirty/ring.rs',
        'match self.harvested.compare_exchange(next, index + 1, Ordering::Release, Ordering::Relaxed) {',
        'match Ok::<u64, u64>(self.harvested.swap(index + 1, Ordering::Release)) {'),
    'a reset of rings makes entries full again': (
        'dirty/ring.rs', 'self.first.fetch_max(reached, Ordering::AcqRel)',
        'self.first.swap(reached, Ordering::AcqRel)'),
    'a reset of rings protects nothing': (
        'harvest/rings.rs', 'protector.protect(Gfn(range.start.0 + first * PAGES_PER_WORD), pages, batch);', ''),
    'a reset of rings flushes when the entries are empty': ('harvest/rings.rs', 'batch.flush();', ''),
    'rings are enabled beside vCPUs that have none': (
        'dirty/rings.rs',
        'match self.state.compare_exchange(0, ENABLED | u64::from(nr_entries), Ordering::Acquire, Ordering::Relaxed) {',
        'match Ok::<u64, u64>(self.state.fetch_or(ENABLED | u64::from(nr_entries), Ordering::Acquire)) {'),
    'a vCPU without a ring is made beside rings': (
        'dirty/rings.rs', '(state & ENABLED == 0).then_some(state + 1);', 'Some(state + 1);'),
    'rings are enabled after the memslots were looked at': (
        'vm.rs', 'self.rings.enable(nr_entries)?;\n        self.begin_to_log_by_rings(&participant);',
        'self.begin_to_log_by_rings(&participant);\n        self.rings.enable(nr_entries)?;'),
    'the call that enables rings protects nothing': ('vm/region.rs', 'if logs {', 'if logs && false {'),
    'a mapping that fails is not undone': (
        'second_stage/map.rs', 'if result.is_err() && map.done > range.start {', 'if false {'),
    'an undo does not flush': ('second_stage/map.rs', '    op.flush(&[range]);\n', ''),
    'an undo flushes only what it has emptied': (
        'second_stage/map.rs', '    op.flush(&[range]);\n', '',
        'second_stage/map.rs', 'if cursor.pte().zap_leaf(op.stats(), value, seq).is_err() {\n'
        '                    return Next::Again(1);\n                }',
        'if cursor.pte().zap_leaf(op.stats(), value, seq).is_err() {\n'
        '                    return Next::Again(1);\n                }\n                op.flush(&[block]);'),
    'an undo takes no number': (
        'second_stage/map.rs', 'let seq = op.tree.next_seq();', 'let seq = op.tree.current_seq();'),
    'an undo empties the leaves of other calls': (
        'second_stage/map.rs', '\n                && op.tree.encoding.frame(value, level) == mapping.frame(block.start);',
        ';'),
    'a harvest protects pages where the memslot was before': (
        'harvest/log.rs', 'now.map_or(slot.range(), |now| now.range());', '(slot.range(), now).0;'),
    'a memslot that moves while it logs keeps its bitmap': (
        'vm/region.rs', '_ if logs && !changes => None,', '_ if logs && (!changes || !resizes) => None,'),
    'a memslot that moves while it logs has no marks': (
        'vm/region.rs', '_ if logs => Some(Bitmap::new_marked(nr_pages)?),',
        '_ if logs => Some(Bitmap::new(nr_pages)?),'),
    'a memslot that moves is flushed after its new place is published': (
        'second_stage/invalidate.rs', 'batch.flush();', 'core::mem::forget(batch);',
        'vm/region.rs', 'claim.replace(&self.tree.epochs, participant, range, flags, attachments)?;\n'
        '                }',
        'claim.replace(&self.tree.epochs, participant, range, flags, attachments)?;\n'
        '                    self.tree.flush(participant, &[lost]);\n                }'),
    'old marks are cleared when the memslot logs already': (
        'vm/region.rs', 'uses_again && !is_marked_at_first) {\n            log.clear_all();\n        }',
        'uses_again && !is_marked_at_first) {\n            let _ = log;\n        }',
        'vm/region.rs', 'filter(|_| uses_again && is_marked_at_first) {',
        'filter(|_| uses_again && !is_marked_at_first) {\n            log.clear_all();\n        }\n'
        '        if let Some(log) = claim.log().filter(|_| uses_again && is_marked_at_first) {'),
    'a recovery gives W beside a log': (
        'second_stage/recover.rs', 'slot.as_ref().is_some_and(|slot| !slot.logs()) &&', 'slot.is_some() &&'),
    'a recovery that gave W does not mark': (
        'second_stage/recover.rs', 'if leaf.is_writable() {', 'if false && leaf.is_writable() {'),
    'a split by way of a broken PTE gives W beside a log': (
        'second_stage/split.rs', 'op.slots.find(&locked.guard, gfn).is_some_and(|slot| !slot.logs()));',
        'op.slots.find(&locked.guard, gfn).is_some());'),
    'a split by way of a broken PTE that gave W does not mark': (
        'second_stage/split.rs', 'if split.whole.is_writable() {', 'if false && split.whole.is_writable() {'),
    'a walk that protects passes huge leaves by': (
        'second_stage/protect.rs', 'State::Leaf => self.protect_huge(value),', 'State::Leaf => Ok(()),'),
}


def copy():
    names = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split('\n')
    shutil.rmtree(COPY, ignore_errors=True)
    for name in filter(None, names):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, COPY / name, follow_symlinks=False)


def edits_of(name):
    """[(file, before, after)]."""
    return list(zip(*[iter(SABOTAGES[name])] * 3, strict=True))


def broken(root, name):
    """({file: its text, broken}, the files that have a place not once: the engine has changed)."""
    texts, misfits = {}, []
    for file, before, after in edits_of(name):
        path = root / 'crates/slat/src' / file
        text = texts.get(path) or (path.read_text() if path.exists() else '')
        if text.count(before) != 1:
            misfits.append(file)
        texts[path] = text.replace(before, after)
    return texts, misfits


def is_noticed(name):
    texts, _ = broken(COPY, name)
    whole = {path: path.read_text() for path in texts}
    for path, text in texts.items():
        path.write_text(text)
    run = subprocess.run(['ci/replay.sh'], cwd=COPY, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    for path, text in whole.items():
        path.write_text(text)
    if 'error: could not compile' in run.stderr:
        sys.exit(f'{run.stderr}\nsabotage: does not build: {name}')
    found = [line for line in run.stdout.split('\n') if line.startswith('  ') and ': thread ' in line]
    print(f'{name}: {found[-1].strip() if found else "NOT NOTICED: " + (run.stdout + run.stderr)[-300:]}', flush=True)
    return bool(found)


def main(words):
    misfits = [f'{name}: {file}' for name in SABOTAGES for file in broken(ROOT, name)[1]]
    if misfits:
        sys.exit('\n'.join([*misfits, f'sabotage: FAILED: the engine does not have these {len(misfits)} places once']))
    if words == ['--check']:
        return print(f'sabotage: the engine has each place of {len(SABOTAGES)}')
    chosen = [name for name in SABOTAGES if not words or any(word in name for word in words)]
    if not chosen:
        print(f'sabotage: no name has one of: {" ".join(words)}', file=sys.stderr)
        return 2
    copy()
    missed = [name for name in chosen if not is_noticed(name)]
    print(f'sabotage: {len(chosen) - len(missed)} of {len(chosen)} noticed')
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
