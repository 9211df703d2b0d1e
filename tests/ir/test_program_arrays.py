from __future__ import annotations

import numpy as np

import pipecompile as pc
from pipecompile.ir.program_arrays import KINDS, Templates, as_lists, listed, unrolled_actions
from pipecompile.ir.program_text import parse_instruction

SCHEDULE = pc.build_periodic("zbv", 4, 40, n_devices=2)


def test_actions_are_those_of_the_unrolled_schedule() -> None:
    kinds = list(KINDS)
    for row, actions in zip(unrolled_actions(SCHEDULE, 5), SCHEDULE.unrolled(5).rows, strict=True):
        assert [(s, kinds[k], m) for s, k, m in row.T.tolist()] == [(a.stage, a.kind, a.microbatch) for a in actions]


def test_a_program_as_arrays_is_the_unrolled_program() -> None:
    program = pc.lower_periodic(SCHEDULE)
    arrays = program.arrays(5)
    unrolled = program.unrolled(5)
    assert tuple(map(arrays.row, range(2))) == unrolled.rows
    assert arrays.n_microbatches == unrolled.n_microbatches
    assert len(arrays.numbers) == len(arrays.microbatches) == len(arrays.devices) == sum(map(len, unrolled.rows))


def test_lists_are_read_in_order() -> None:
    index, items = listed(as_lists([[5, 6], [], [7]]), np.array([2, 1, 0, 2]))
    assert (index.tolist(), items.tolist()) == ([0, 2, 2, 3], [7, 5, 6, 7])


def test_a_class_is_a_value_of_any_micro_batch() -> None:
    templates = Templates([parse_instruction(line) for line in ("0F0 x#0 -> v0#0", "SEND v0#0 to 1", "FREE v0#0")])
    assert [*templates.classes] == [("x", None), ("v0", None)]
    assert templates.message_class.tolist() == [-1, 1, -1]
    assert templates.peer.tolist() == [-2, 1, -2]
