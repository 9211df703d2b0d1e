"""Verifier of operands: every action reads and writes the values that the routes prescribe.

    route v: 0 -> 1 2, gradient    0F writes v     1F and 2F read v     1B writes v'1, 2B writes v'2     0B reads both
    the same with sums 2+1                                              1B reads v'2 as well             0B reads v'1

The values that a stage saves depend on the actions of its cell:

    F B       F writes @s                           B reads @s
    F I W     F writes @s       I reads @s and writes @s.w              W reads @s.w
    F R B     F writes @s.r     R reads @s.r and the inputs of F, and writes @s     B reads @s
    F O L B   F writes @s.o     OFFLOAD reads @s.o and writes @s.h     RELOAD reads @s.h and writes @s     B reads @s
    slices    F writes @s.k, and reads @s.k of earlier slices, as R does     B or I reads these, and @s.k of its own

UNSHARD, RESHARD and REDUCE_GRAD read and write no values. The verifier works route by route, the pass `lower_actions` stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir import (
    BACKWARDS,
    SHARDING,
    Action,
    Instruction,
    Kind,
    Op,
    Program,
    Route,
    Value,
    held,
    keys_values,
    offloaded,
    recipe,
    saved,
    weight_saved,
)

__all__ = ["operand_faults"]

Sides = tuple[set[Value], set[Value]]
"""The values that an action reads, and the values that it writes."""


def operand_faults(program: Program) -> list[str]:
    """Return a fault for every operand that an action lacks, has in excess, or has twice."""
    computes = [i for row in program.rows for i in row if i.op is Op.COMPUTE and i.action is not None]
    cells: dict[tuple[int, int], dict[Kind, Sides]] = {}
    for instruction in computes:
        if (action := instruction.action) and action.kind not in SHARDING:
            cells.setdefault((action.stage, action.microbatch), {})[action.kind] = (set(), set())
    for route in program.routes:
        for microbatch in range(program.n_microbatches):
            _add_route(cells, route, microbatch)
    for (stage, microbatch), cell in cells.items():
        _add_saved(cell, stage, microbatch)
        if program.n_slices > 1:
            _add_keys_values(cell, stage, microbatch, program.n_slices)
    return [fault for i in computes if i.action for fault in _compare(i, i.action, cells)]


def _add_route(cells: dict[tuple[int, int], dict[Kind, Sides]], route: Route, microbatch: int) -> None:
    value, absent = Value(route.value, microbatch), (set[Value](), set[Value]())
    source = cells.get((route.source, microbatch), {})
    source.get(Kind.FORWARD, absent)[1].add(value)
    for consumer in route.consumers:
        gradient = Value(route.value, microbatch, consumer)
        cell = cells.get((consumer, microbatch), {})
        for kind in (Kind.FORWARD, Kind.RECOMPUTE):
            cell.get(kind, absent)[0].add(value)
        following = [group[index + 1] for group in route.sums for index, c in enumerate(group[:-1]) if c == consumer]
        reader = cells.get((following[0], microbatch), {}) if following else source
        for kind in (Kind.BACKWARD, Kind.INPUT_GRAD) if route.gradient else ():
            reader.get(kind, absent)[0].add(gradient)
            cell.get(kind, absent)[1].add(gradient)


def _add_saved(cell: dict[Kind, Sides], stage: int, microbatch: int) -> None:
    saved_value, weight_value, recipe_value = (make(stage, microbatch) for make in (saved, weight_saved, recipe))
    absent = (set[Value](), set[Value]())
    if not cell.keys() & {Kind.BACKWARD, Kind.INPUT_GRAD}:
        return
    first = recipe_value if Kind.RECOMPUTE in cell else saved_value
    if Kind.OFFLOAD in cell:
        first, on_host = offloaded(stage, microbatch), held(stage, microbatch)
        cell[Kind.OFFLOAD][0].add(first)
        cell[Kind.OFFLOAD][1].add(on_host)
        cell.get(Kind.RELOAD, absent)[0].add(on_host)
    cell.get(Kind.RELOAD, absent)[1].add(saved_value)
    cell.get(Kind.FORWARD, absent)[1].add(first)
    cell.get(Kind.RECOMPUTE, absent)[0].add(recipe_value)
    cell.get(Kind.RECOMPUTE, absent)[1].add(saved_value)
    cell.get(Kind.BACKWARD, absent)[0].add(saved_value)
    cell.get(Kind.INPUT_GRAD, absent)[0].add(saved_value)
    cell.get(Kind.INPUT_GRAD, absent)[1].add(weight_value)
    cell.get(Kind.WEIGHT_GRAD, absent)[0].add(weight_value)


def _add_keys_values(cell: dict[Kind, Sides], stage: int, unit: int, n_slices: int) -> None:
    earlier = {keys_values(stage, other) for other in range(unit - unit % n_slices, unit)}
    for kind in (Kind.FORWARD, Kind.RECOMPUTE, *BACKWARDS):
        if kind in cell:
            cell[kind][0].update(earlier)
            cell[kind][kind is Kind.FORWARD].update([keys_values(stage, unit)] if kind is not Kind.RECOMPUTE else [])


def _compare(
    instruction: Instruction, action: Action, cells: dict[tuple[int, int], dict[Kind, Sides]]
) -> Iterator[str]:
    is_of_cell = action.kind not in SHARDING
    expected: Sides = cells[action.stage, action.microbatch][action.kind] if is_of_cell else (set(), set())
    for verb, operands, prescribed in zip(
        ("read", "write"), (instruction.reads, instruction.writes), expected, strict=True
    ):
        actual = [operand.value for operand in operands]
        if len(actual) == len(prescribed) == len(prescribed.intersection(actual)):
            continue
        for value in actual:
            if value not in prescribed:
                yield f"{action} must not {verb} {value}"
        for value in sorted(prescribed - set(actual), key=str):
            yield f"{action} must {verb} {value}"
        for value in sorted({value for value in actual if actual.count(value) > 1}, key=str):
            yield f"{action} {verb}s {value} more than once"
