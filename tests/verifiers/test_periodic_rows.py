from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.passes.periodic_lowering import lower_periodic
from pipecompile.schedules.periods import build_periodic
from pipecompile.verifiers.periodic_rows import are_ordered, distance, period_arrays


@pytest.fixture
def program() -> PeriodicProgram:
    """Its first device has `0F2  SEND v0#2  FREE v0#2  RECV v0'1#0  0B0  FREE v0'1#0  FREE @0#0`, its second device meets it in turn."""
    return lower_periodic(build_periodic("1f1b", 3, 24))


def moved(program: PeriodicProgram, device: int, source: str, target: str) -> PeriodicProgram:
    """Return the program in which the first instruction whose text begins with `source` stands before the first that begins with `target`."""
    row = list(program.period[device])
    at = next(index for index, one in enumerate(row) if str(one).startswith(source))
    one = row.pop(at)
    row.insert(next(index for index, other in enumerate(row) if str(other).startswith(target)), one)
    return replace(program, period=tuple(tuple(row) if d == device else r for d, r in enumerate(program.period)))


def test_a_value_is_written_before_it_is_read_and_freed_after(program: PeriodicProgram) -> None:
    """0B0 reads what 0F0 has saved two repetitions before."""
    assert are_ordered(period_arrays(program), program.step)
    for source, target in (("FREE v0'1", "0B"), ("0B", "RECV v0'1"), ("FREE v0#", "SEND v0#")):
        assert not are_ordered(period_arrays(moved(program, 0, source, target)), program.step)


def test_messages_are_as_far_apart_as_their_micro_batches(program: PeriodicProgram) -> None:
    period = period_arrays(program)
    assert distance(period, program.step) == 0
    numbers, microbatches = period.rows[0]
    later = replace(period, rows=[(numbers, microbatches + 3), *period.rows[1:]])
    assert distance(later, program.step) == 3


def test_messages_that_do_not_match_have_no_distance(program: PeriodicProgram) -> None:
    period = period_arrays(program)
    (numbers, microbatches), *others = period.rows
    assert distance(replace(period, rows=[(numbers[1:], microbatches[1:]), *others]), program.step) == 0
    assert distance(replace(period, rows=[(numbers[:0], microbatches[:0]), *others]), program.step) is None
    two = period_arrays(lower_periodic(build_periodic("interleaved", 4, 24, n_devices=2)))
    numbers, microbatches = two.rows[0]
    assert distance(two, 2) is not None
    assert distance(replace(two, rows=[(numbers[::-1], microbatches[::-1]), two.rows[1]]), 2) is None
