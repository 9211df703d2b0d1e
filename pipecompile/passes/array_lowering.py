"""The lowering of many devices by arrays: the passes `compute`, `transfers` and `liveness`, a few operations per row.

    numbers        5 5 5 6 6 6        templates 1F0 and 1B0, at micro-batches 0 1 2 0 1 2
    + transfers    3 5 3 5 3 5 ...    3 is RECV v0#0 from 0, before the first reader of v0 of each micro-batch

Each makes the instructions that the pass of the same name makes, from templates of it: `lower_actions` lowers one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import SHARDING, Instruction, Kind, Op, Operand, Route, Schedule, Value
from pipecompile.ir.action import Action
from pipecompile.ir.instruction_rows import InstructionTable, later_instruction
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.program_arrays import KINDS, Lists, ProgramArrays, Templates, as_lists, listed, unrolled_actions
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import paths

__all__ = ["BY_ARRAYS", "action_arrays", "free_rows", "transfer_rows"]

Ints = NDArray[np.int64]
Row = tuple[Ints, Ints]
"""The templates and the micro-batches of a row."""

BY_ARRAYS = frozenset(Kind) - {*SHARDING}
"""The kinds of actions that are lowered by arrays."""

_VARIANTS = {Kind.RECOMPUTE: 1, Kind.OFFLOAD: 2, Kind.RELOAD: 2}
"""The variant of a cell that has this kind: its forward saves something else. Other cells are variant 0."""


def action_arrays(schedule: PeriodicSchedule, routes: Sequence[Route], count: int) -> ProgramArrays:
    """Return the compute instructions of a schedule with `count` repetitions."""
    rows = unrolled_actions(schedule, count)
    m = schedule.n_microbatches + schedule.step * (count - schedule.repetitions)
    variants = np.zeros((schedule.n_stages, m), dtype=np.int64)
    for stages, kinds, microbatches in rows:
        for kind, variant in _VARIANTS.items():
            own = kinds == KINDS[kind]
            variants[stages[own], microbatches[own]] = variant
    table = InstructionTable()
    number_of = _computes(schedule, routes, rows, table)
    return ProgramArrays(
        schedule.n_stages, m, schedule.placement, tuple(routes), table,
        [(number_of[s, k, variants[s, own]], own) for s, k, own in rows],
    )  # fmt: skip


def _computes(
    schedule: PeriodicSchedule, routes: Sequence[Route], rows: Sequence[Ints], table: InstructionTable
) -> Ints:
    """Return the template of each (stage, kind, variant). Those of variant v are lowered on micro-batch v."""
    kinds = np.zeros((schedule.n_stages, len(KINDS)), dtype=bool)
    for stages, of_row, _ in rows:
        kinds[stages, of_row] = True
    small: list[list[Action]] = [[] for _ in rows]
    for stage, number in np.argwhere(kinds).tolist():
        kind = list(Kind)[number]
        others = {variant for other, variant in _VARIANTS.items() if kinds[stage, KINDS[other]]}
        cells = {_VARIANTS[kind]} if kind in _VARIANTS else {0, *others}
        small[schedule.placement[stage]] += [Action(stage, kind, m) for m in sorted(cells)]
    n_variants = max(_VARIANTS.values()) + 1
    one = Schedule(schedule.n_stages, n_variants, schedule.placement, tuple(map(tuple, small)))
    number_of = np.zeros((schedule.n_stages, len(KINDS), n_variants), dtype=np.int64)
    for instruction in (i for row in lower_actions(one, routes).rows for i in row):
        action = instruction.action
        assert action is not None
        template = later_instruction(instruction, -action.microbatch)
        number_of[action.stage, KINDS[action.kind], action.microbatch] = table.number(template)
    return number_of


def transfer_rows(arrays: ProgramArrays) -> ProgramArrays:
    """Return the program in which each device receives, once, every value that it reads and does not compute."""
    templates = Templates(arrays.table.templates)
    path = paths(arrays.routes, arrays.placement)
    names = list(templates.classes)
    operands = _operands(names)
    ways = [path.get(name, (_NOWHERE, ())) for name in names]
    table = arrays.table
    source = np.array([way[0] for way in ways], dtype=np.int64)
    receives = [
        table.number(Instruction(Op.RECV, writes=(operand,), peer=way[0]))
        for operand, way in zip(operands, ways, strict=True)
    ]
    sends = [
        [table.number(Instruction(Op.SEND, reads=(operand,), peer=end)) for end in way[1]]
        for operand, way in zip(operands, ways, strict=True)
    ]
    way_of = source, np.array(receives, dtype=np.int64), as_lists(sends)
    return replace(arrays, rows=[_transferred(*each, templates, way_of) for each in enumerate(arrays.rows)])


_NOWHERE = -2
"""The source of what has no route: what a stage saves."""


def _operands(names: Sequence[tuple[str, int | None]]) -> list[Operand]:
    return [Operand(Value(name, 0, consumer)) for name, consumer in names]


def _transferred(device: int, row: Row, templates: Templates, way_of: tuple[Ints, Ints, Lists]) -> Row:
    """Return a row with its messages: RECVs before the first reader, SENDs after the computation. `way_of` has the device that computes
    each class, and the templates of its RECV and of its SENDs.
    """
    (numbers, microbatches), (source, receives, sends) = row, way_of
    index, classes = listed(templates.reads, numbers)
    is_foreign = (source[classes] != device) & (source[classes] != _NOWHERE)
    index, classes = index[is_foreign], classes[is_foreign]
    _, first = np.unique(_keys(classes, microbatches[index]), return_index=True)
    first.sort()
    readers, received = index[first], receives[classes[first]]
    writers, classes = listed(templates.writes, numbers)
    of, sent = listed(sends, classes)
    return _merged(
        (readers * 3, received, microbatches[readers]),
        (np.arange(len(numbers)) * 3 + 1, numbers, microbatches),
        (writers[of] * 3 + 2, sent, microbatches[writers[of]]),
    )


def _keys(classes: Ints, microbatches: Ints) -> Ints:
    """Return one number per value: no micro-batch has a larger one than the last."""
    keys: Ints = classes * (microbatches.max(initial=0) + 1) + microbatches
    return keys


def _merged(*pieces: tuple[Ints, Ints, Ints]) -> Row:
    """Return the items (place, template, micro-batch) of all pieces in the order of their places."""
    place, numbers, microbatches = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(place, kind="stable")
    return numbers[order], microbatches[order]


def free_rows(arrays: ProgramArrays) -> ProgramArrays:
    """Return the program with one FREE per value and device, after the last use."""
    templates = Templates(arrays.table.templates)
    frees = [arrays.table.number(Instruction(Op.FREE, reads=(each,))) for each in _operands(list(templates.classes))]
    free_of = np.array(frees, dtype=np.int64)
    return replace(arrays, rows=[_freed(row, templates, free_of) for row in arrays.rows])


def _freed(row: Row, templates: Templates, free_of: Ints) -> Row:
    numbers, microbatches = row
    (reads, read), (writes, written) = (listed(side, numbers) for side in (templates.reads, templates.writes))
    order = np.argsort(np.concatenate([reads * 2, writes * 2 + 1]), kind="stable")
    index, classes = np.concatenate([reads, writes])[order], np.concatenate([read, written])[order]
    _, last = np.unique(_keys(classes, microbatches[index])[::-1], return_index=True)
    last = np.sort(len(index) - 1 - last)
    index, classes = index[last], classes[last]
    return _merged(
        (np.arange(len(numbers)) * 2, numbers, microbatches), (index * 2 + 1, free_of[classes], microbatches[index])
    )
