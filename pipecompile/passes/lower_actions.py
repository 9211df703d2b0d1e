"""Turn a schedule into a program of compute instructions, each with the values that it reads and writes.

    before   0F0                  routes  x: host -> 0;  v0: 0 -> 1, gradient
    after    0F0 x#0 -> v0#0 @0#0
    before   0B0                            or   0I0 0W0
    after    0B0 @0#0 v0'1#0 ->                  0I0 @0#0 v0'1#0 -> @0.w#0    0W0 @0.w#0 ->
    before   0F0 0R0 0B0
    after    0F0 x#0 -> v0#0 @0.r#0    0R0 @0.r#0 x#0 -> @0#0    0B0 @0#0 v0'1#0 ->

Linear in the number of actions times the routes of their stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipecompile.ir import (
    Action,
    Instruction,
    Kind,
    Op,
    Operand,
    Program,
    Route,
    Schedule,
    Tie,
    Value,
    recipe,
    saved,
    weight_saved,
)

__all__ = ["lower_actions"]


def lower_actions(schedule: Schedule, routes: Sequence[Route], ties: Sequence[Tie] = ()) -> Program:
    """One compute instruction per action, in the same order. Operands follow the order of `routes`.

    Forward reads the routes into its stage and writes those out of it, and what its backward will need, or what a
    recomputation will; that one reads the routes once more. B or I reads what was saved and a gradient per consumer, and
    writes a gradient per route into the stage; I leaves for W what that needs.
    """
    trained = {action.stage for row in schedule.rows for action in row if action.kind is not Kind.FORWARD}
    again = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
    makers = [_Stage(s, s in trained, routes, schedule.n_microbatches) for s in range(schedule.n_stages)]
    rows = tuple(
        tuple(makers[action.stage].instruction(action, (action.stage, action.microbatch) in again) for action in row)
        for row in schedule.rows
    )
    return Program(schedule.n_stages, schedule.n_microbatches, schedule.placement, tuple(routes), rows, tuple(ties))


Column = list[Operand]
"""One operand, for every micro-batch."""

Side = list[tuple[Operand, ...]]
"""All operands of a side of an instruction, for every micro-batch."""


class _Stage:
    """The instructions of one stage. Operands are made once per micro-batch and shared."""

    def __init__(self, stage: int, trained: bool, routes: Sequence[Route], n_microbatches: int) -> None:
        self.stage, self.trained, self.n_microbatches = stage, trained, n_microbatches
        self.into = [route for route in routes if stage in route.consumers]
        self.out = [route for route in routes if stage == route.source]
        self.sides: dict[tuple[Kind, bool], tuple[Side, Side]] = {}

    def instruction(self, action: Action, again: bool) -> Instruction:
        key = action.kind, again
        if key not in self.sides:
            read, written = self._columns(*key)
            self.sides[key] = self._side(read), self._side(written)
        reads, writes = self.sides[key]
        return Instruction(Op.COMPUTE, reads[action.microbatch], writes[action.microbatch], action)

    def _columns(self, kind: Kind, again: bool) -> tuple[list[Column], list[Column]]:
        inputs = [self._values(route.value) for route in self.into]
        outputs = [self._values(route.value) for route in self.out]
        kept, left, way = (self._saved(make) for make in (saved, weight_saved, recipe))
        arriving = [self._values(r.value, consumer) for r in self.out if r.gradient for consumer in r.consumers]
        leaving = [self._values(route.value, self.stage) for route in self.into if route.gradient]
        match kind:
            case Kind.FORWARD:
                return inputs, [*outputs, *([way if again else kept] if self.trained else [])]
            case Kind.RECOMPUTE:
                return [way, *inputs], [kept]
            case Kind.BACKWARD:
                return [kept, *arriving], leaving
            case Kind.INPUT_GRAD:
                return [kept, *arriving], [*leaving, left]
            case Kind.WEIGHT_GRAD:
                return [left], []

    def _values(self, name: str, consumer: int | None = None) -> Column:
        return [Operand(Value(name, m, consumer)) for m in range(self.n_microbatches)]

    def _saved(self, make: Callable[[int, int], Value]) -> Column:
        return [Operand(make(self.stage, m)) for m in range(self.n_microbatches)]

    def _side(self, columns: list[Column]) -> Side:
        return list(zip(*columns, strict=True)) if columns else [()] * self.n_microbatches
