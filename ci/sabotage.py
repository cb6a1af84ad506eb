#!/usr/bin/env python3
"""Breaks the engine in one place after the other, in a copy. The replay in the proofs must notice each.

    ci/sabotage.py [WORD...]        those whose names have one of the words; all without

By hand only: it builds the engine once for each place. `ci/proofs.sh` and `ci/replay.sh` must have run before.
"""
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / 'target/sabotage'
# What is broken: the file below `crates/slat/src`, and what stands there before and after, twice if need be.
SABOTAGES = {
    'a zap leaves the numbers of empty PTEs': (
        'second_stage/zap.rs', 'State::Empty(found) if found >= self.seq => Ok(()),',
        'State::Empty(found) if level == Level::L4K || found >= self.seq => Ok(()),'),
    'a PTE above the lowest level gets no fresh number': (
        'second_stage/zap.rs', 'if level == Level::L4K { self.seq } else { self.op.tree.next_seq() }', 'self.seq'),
    'an unlinking stores no fresh number': (
        'second_stage/zap.rs', 'op.tree.next_seq())', 'self.seq)'),
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
        'vcpu.rs', 'let (cursor, value, state) = Cursor::at_lowest(tree, &guard, self.gfn);\n        let writes',
        'let free = tree.in_flight.free_level(self.gfn, F::ROOT_LEVEL);\n'
        '        let (cursor, value, state) = Cursor::at_lowest(tree, &guard, self.gfn);\n        let writes',
        'let Some(max_level) = tree.in_flight.free_level(self.gfn, cursor.level()) else {',
        'let Some(max_level) = free.map(|level| level.min(cursor.level())) else {'),
    'a leaf is installed whatever the number': (
        'vcpu/act.rs', 'if seq != seen || cursor.level() > highest', 'if cursor.level() > highest'),
    'a new page-table page begins with number 0': (
        'second_stage/install.rs', 'pte::empty(seq.flushed())', 'pte::empty(InvalidationSeq::FIRST)'),
    'a read-only leaf is replaced whatever happened since the look': (
        'vcpu/act.rs', 'if tree.current_seq().follows(seen) {', 'if tree.current_seq().follows(seen) || true {'),
    'an aborted recovery stores no fresh number': (
        'second_stage/broken.rs', 'let seq = op.tree.next_seq();', 'let seq = op.tree.current_seq();'),
    'a recovery freezes nothing': (
        'table/pte.rs', 'match self.cell.compare_exchange(value.0, frozen.0, Ordering::AcqRel, Ordering::Acquire) {',
        'match Ok::<u64, u64>(value.0) {'),
    'a harvest does not protect': (
        'harvest/log.rs', 'if !taken.is_empty() {', 'if false && !taken.is_empty() {'),
    'a harvest does not flush': ('harvest/log.rs', 'batch.flush_cpus();', 'core::mem::forget(batch);'),
    'a harvest takes the word before the summary': (
        'slot/bitmap.rs', 'let seen = summary.fetch_and(!seen, Ordering::SeqCst) & seen;',
        'for index in SetBits(seen) {\n'
        '    let marks = words[index].swap(self.clean, Ordering::SeqCst) ^ self.clean;\n'
        '    record!(MarksTaken { word: (group * GROUP_WORDS + index) as u64, marks });\n'
        '    taken.push(group * GROUP_WORDS + index - range.start, marks);\n'
        '}\n'
        'let seen = summary.fetch_and(!seen, Ordering::SeqCst) & 0;'),
    'a fault does not mark': ('slot/bitmap.rs', 'if self.has(index, mask) {', 'if true || self.has(index, mask) {'),
    'a mark sets no summary': (
        'slot/bitmap.rs', 'self.summarize(index / GROUP_WORDS, 1 << (index % GROUP_WORDS));', ''),
    'enabling does not protect': (
        'vm/region.rs', 'protect::protect_slot(self.operation(participant), range);', ''),
    'enabling does not flush': (
        'vm/region.rs', 'self.tree.flush(participant, &[range]);', ''),
}


def copy():
    names = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split('\n')
    shutil.rmtree(COPY, ignore_errors=True)
    for name in filter(None, names):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, COPY / name)


def broken(text, name, edits):
    for before, after in zip(edits[::2], edits[1::2]):
        if text.count(before) != 1:
            sys.exit(f'sabotage: {name}: {text.count(before)} times in the engine: {before}')
        text = text.replace(before, after)
    return text


def is_noticed(name, file, *edits):
    path = COPY / 'crates/slat/src' / file
    whole = path.read_text()
    path.write_text(broken(whole, name, edits))
    # Broken code may warn.
    env = {**os.environ, 'REPLAY_RUSTFLAGS': '--cfg shuttle', 'REPLAY_TARGET_DIR': str(ROOT / 'target/shuttle'),
           'REPLAY_PYTHON': str(ROOT / 'target/proofs/bin/python')}
    env['REPLAY_PYTHON'] = os.environ.get('REPLAY_PYTHON', env['REPLAY_PYTHON'])
    run = subprocess.run(['ci/replay.sh'], cwd=COPY, env=env, capture_output=True, text=True)
    path.write_text(whole)
    if 'error: could not compile' in run.stderr:
        sys.exit(f'{run.stderr}\nsabotage: does not build: {name}')
    found = [line for line in run.stdout.split('\n') if line.startswith('  ') and ': thread ' in line]
    print(f'{name}: {found[-1].strip() if found else "NOT NOTICED: " + (run.stdout + run.stderr)[-300:]}', flush=True)
    return bool(found)


def main(words):
    copy()
    chosen = {name: edits for name, edits in SABOTAGES.items() if not words or any(word in name for word in words)}
    missed = [name for name, edits in chosen.items() if not is_noticed(name, *edits)]
    print(f'sabotage: {len(chosen) - len(missed)} of {len(chosen)} noticed')
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
