"""All litmus tests."""

import dirty_log
import epochs
import hand_over
import invalidation
import machine
import shadow
import walkers

#: The files of tests, in the order of the table.
FILES = (epochs, invalidation, dirty_log, shadow, hand_over, machine)
ALL = [test for file in FILES for test in file.TESTS]
WALKERS = walkers.TESTS
