"""Does every action read and write what the routes say?

    route v: 0 -> 1 2, gradient    0F writes v     1F and 2F read v     1B writes v'1, 2B writes v'2     0B reads both

What a stage saves goes by the actions of its cell:

    F B       F writes @s                           B reads it
    F I W     F writes @s       I reads it, and writes @s.w             W reads that
    F R B     F writes @s.r     R reads it, and what F read, and writes @s     B reads that

Stated here route by route, where the pass that makes it so goes stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir import Action, Instruction, Kind, Op, Program, Route, Value, recipe, saved, weight_saved

__all__ = ["operand_faults"]

Sides = tuple[set[Value], set[Value]]
"""What an action reads, and what it writes."""


def operand_faults(program: Program) -> list[str]:
    """All compute instructions whose operands are not those of their action."""
    computes = [i for row in program.rows for i in row if i.op is Op.COMPUTE and i.action is not None]
    cells: dict[tuple[int, int], dict[Kind, Sides]] = {}
    for instruction in computes:
        if action := instruction.action:
            cells.setdefault((action.stage, action.microbatch), {})[action.kind] = (set(), set())
    for route in program.routes:
        for microbatch in range(program.n_microbatches):
            _add_route(cells, route, microbatch)
    for (stage, microbatch), cell in cells.items():
        _add_saved(cell, stage, microbatch)
    return [fault for i in computes if i.action for fault in _compare(i, i.action, cells)]


def _add_route(cells: dict[tuple[int, int], dict[Kind, Sides]], route: Route, microbatch: int) -> None:
    value, nobody = Value(route.value, microbatch), (set[Value](), set[Value]())
    source = cells.get((route.source, microbatch), {})
    source.get(Kind.FORWARD, nobody)[1].add(value)
    for consumer in route.consumers:
        gradient = Value(route.value, microbatch, consumer)
        cell = cells.get((consumer, microbatch), {})
        for kind in (Kind.FORWARD, Kind.RECOMPUTE):
            cell.get(kind, nobody)[0].add(value)
        for kind in (Kind.BACKWARD, Kind.INPUT_GRAD) if route.gradient else ():
            source.get(kind, nobody)[0].add(gradient)
            cell.get(kind, nobody)[1].add(gradient)


def _add_saved(cell: dict[Kind, Sides], stage: int, microbatch: int) -> None:
    kept, left, way = (make(stage, microbatch) for make in (saved, weight_saved, recipe))
    nobody = (set[Value](), set[Value]())
    if not cell.keys() & {Kind.BACKWARD, Kind.INPUT_GRAD}:
        return
    cell.get(Kind.FORWARD, nobody)[1].add(way if Kind.RECOMPUTE in cell else kept)
    cell.get(Kind.RECOMPUTE, nobody)[0].add(way)
    cell.get(Kind.RECOMPUTE, nobody)[1].add(kept)
    cell.get(Kind.BACKWARD, nobody)[0].add(kept)
    cell.get(Kind.INPUT_GRAD, nobody)[0].add(kept)
    cell.get(Kind.INPUT_GRAD, nobody)[1].add(left)
    cell.get(Kind.WEIGHT_GRAD, nobody)[0].add(left)


def _compare(
    instruction: Instruction, action: Action, cells: dict[tuple[int, int], dict[Kind, Sides]]
) -> Iterator[str]:
    expected = cells[action.stage, action.microbatch][action.kind]
    for verb, operands, right in zip(("read", "write"), (instruction.reads, instruction.writes), expected, strict=True):
        found = [operand.value for operand in operands]
        if len(found) == len(right) == len(right.intersection(found)):
            continue
        for value in found:
            if value not in right:
                yield f"{action} must not {verb} {value}"
        for value in sorted(right - set(found), key=str):
            yield f"{action} must {verb} {value}"
        for value in sorted({value for value in found if found.count(value) > 1}, key=str):
            yield f"{action} {verb}s {value} more than once"
