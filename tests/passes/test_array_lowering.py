"""The passes by arrays make what the passes of the same names make."""

from __future__ import annotations

import pytest

from pipecompile.ir import HOST, Program, Route, chain
from pipecompile.ir.program_arrays import ProgramArrays
from pipecompile.passes.array_lowering import action_arrays, free_rows, transfer_rows
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules.periods import build_periodic


def program_of(arrays: ProgramArrays) -> Program:
    rows = tuple(tuple(arrays.row(device)) for device in range(len(arrays.rows)))
    return Program(arrays.n_stages, arrays.n_microbatches, arrays.placement, arrays.routes, rows)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zbv", "mario", "forward"])
def test_each_pass_makes_the_same_program(name: str) -> None:
    """With inputs, outputs, and a value that two stages of a device read, whose gradients are added up."""
    stages = 3 if name in ("1f1b", "zb-h2", "mario", "forward") else 6
    schedule = build_periodic(name, stages, 24, n_devices=3)
    ends = Route("x", HOST, (0, 1)), Route("y", stages - 1, (HOST,))
    routes = (*chain(stages), *ends, Route("skip", 0, tuple(range(1, stages))))
    arrays, program = action_arrays(schedule, routes, 4), lower_actions(schedule.unrolled(4), routes)
    assert program_of(arrays) == program
    arrays, program = transfer_rows(arrays), insert_transfers(program)
    assert program_of(arrays) == program
    assert program_of(free_rows(arrays)) == insert_frees(program)
