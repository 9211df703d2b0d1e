"""Does every action read and write what the routes say?

    route v: 0 -> 1 2, gradient    0F writes v     1F and 2F read v     1B writes v'1, 2B writes v'2     0B reads both

Stated here route by route, where the pass that makes it so goes stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir import Action, Instruction, Kind, Op, Program, Route, Value, saved

__all__ = ["operand_faults"]

Sides = tuple[set[Value], set[Value]]
"""What an action reads, and what it writes."""


def operand_faults(program: Program) -> list[str]:
    """All compute instructions whose operands are not those of their action."""
    computes = [i for row in program.rows for i in row if i.op is Op.COMPUTE and i.action is not None]
    backwards = {
        (a.stage, a.microbatch): a for i in computes if (a := i.action) and a.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
    }
    expected: dict[Action, Sides] = {i.action: (set(), set()) for i in computes if i.action is not None}
    for route in program.routes:
        for microbatch in range(program.n_microbatches):
            _add_route(expected, backwards, route, microbatch)
    for action, (reads, writes) in expected.items():
        if (action.stage, action.microbatch) in backwards:
            (writes if action.kind is Kind.FORWARD else reads).add(saved(action.stage, action.microbatch))
    return [fault for i in computes if i.action for fault in _compare(i, i.action, expected[i.action])]


def _add_route(
    expected: dict[Action, Sides], backwards: dict[tuple[int, int], Action], route: Route, microbatch: int
) -> None:
    value = Value(route.value, microbatch)
    back = backwards.get((route.source, microbatch))
    nobody: Sides = (set(), set())
    expected.get(Action(route.source, Kind.FORWARD, microbatch), nobody)[1].add(value)
    for consumer in route.consumers:
        gradient = Value(route.value, microbatch, consumer)
        if route.gradient and back is not None:
            expected[back][0].add(gradient)
        expected.get(Action(consumer, Kind.FORWARD, microbatch), nobody)[0].add(value)
        if route.gradient and (maker := backwards.get((consumer, microbatch))) is not None:
            expected[maker][1].add(gradient)


def _compare(instruction: Instruction, action: Action, expected: Sides) -> Iterator[str]:
    for verb, operands, right in zip(("read", "write"), (instruction.reads, instruction.writes), expected, strict=True):
        found = [operand.value for operand in operands]
        for value in found:
            if value not in right:
                yield f"{action} must not {verb} {value}"
        for value in sorted(right - set(found), key=str):
            yield f"{action} must {verb} {value}"
        for value in sorted({value for value in found if found.count(value) > 1}, key=str):
            yield f"{action} {verb}s {value} more than once"
