"""Turn a schedule into a program of compute instructions, each with the values that it reads and writes.

    before   0F0                  routes  x: host -> 0;  v0: 0 -> 1, gradient
    after    0F0 x#0 -> v0#0 @0#0
    before   0B0                            or   0I0 0W0
    after    0B0 @0#0 v0'1#0 ->                  0I0 @0#0 v0'1#0 -> @0.w#0    0W0 @0.w#0 ->
    before   0F0 0R0 0B0
    after    0F0 x#0 -> v0#0 @0.r#0    0R0 @0.r#0 x#0 -> @0#0    0B0 @0#0 v0'1#0 ->
    before   (0F1;0B0)OVERLAP_F_B
    after    OVERLAP 0F1 x#1 -> v0#1 @0#1    0B0 @0#0 v0'1#0 ->
    before   0F0 0OFFLOAD0 0RELOAD0 0B0
    after    0F0 x#0 -> v0#0 @0.o#0    0OFFLOAD0 @0.o#0 -> @0.h#0    0RELOAD0 @0.h#0 -> @0#0    0B0 @0#0 v0'1#0 ->
    before   0UNSHARD 0F0 0RESHARD
    after    0UNSHARD ->    0F0 x#0 -> v0#0 @0#0    0RESHARD ->
    before   0F0.0 0F0.1 0B0.1 0B0.0
    after    0F0 x#0 -> v0#0 @0#0 @0.k#0    0F1 x#1 @0.k#0 -> v0#1 @0#1 @0.k#1    0B1 @0#1 v0'1#1 @0.k#0 @0.k#1 ->    0B0 @0#0 v0'1#0 @0.k#0 ->

Linear in the number of actions times the routes of their stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipecompile.ir import (
    BACKWARDS,
    NO_MICROBATCH,
    SHARDING,
    UNTRAINED,
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
    held,
    keys_values,
    offloaded,
    recipe,
    saved,
    weight_saved,
)
from pipecompile.ir.overlap import firsts

__all__ = ["lower_actions"]


def lower_actions(schedule: Schedule, routes: Sequence[Route], ties: Sequence[Tie] = ()) -> Program:
    """Return one compute instruction per action, in the same order. Operands are in the order of `routes`.

    F reads the routes into its stage and writes the routes out of it, and `@s`, or `@s.r` if the cell is recomputed, or `@s.o` if
    it is offloaded. R reads `@s.r` and the inputs of F. B or I reads `@s` and one gradient per consumer that sends one, and writes
    one gradient per route into the stage. If the route sums gradients, B or I also reads the one that it adds to its own. I writes
    `@s.w`, and W reads it.

    Slices are numbered over all micro-batches. Of a slice, F writes `@s.k`, F and R read those of earlier slices of the
    micro-batch, and B or I reads these and its own: it adds to the gradients of the former, and takes those of the latter.
    """
    schedule = _in_units(schedule)
    trained = {action.stage for row in schedule.rows for action in row if action.kind not in UNTRAINED}
    saving = {(a.stage, a.microbatch): _SAVED_FOR[a.kind] for row in schedule.rows for a in row if a.kind in _SAVED_FOR}
    stages = [_StageInstructions(s, s in trained, routes, schedule.n_units) for s in range(schedule.n_stages)]
    rows = tuple(
        tuple(
            stages[action.stage].instruction(action, saving.get((action.stage, action.microbatch), saved))
            for action in row
        )
        for row in schedule.rows
    )
    if schedule.overlaps:
        begins = firsts(schedule.overlaps)
        rows = tuple(tuple(replace(i, overlaps=True) if i.action in begins else i for i in row) for row in rows)
    counts = schedule.n_stages, schedule.n_units, schedule.placement
    program = Program(*counts, tuple(routes), rows, tuple(ties), schedule.n_slices, schedule.directions)
    return program if schedule.n_slices == 1 else _with_keys_values(program)


def _in_units(schedule: Schedule) -> Schedule:
    """Return the schedule with the slices of all micro-batches numbered from 0 in the place of micro-batches; `n_slices` stays."""
    if schedule.n_slices == 1:
        return schedule

    def numbered(action: Action) -> Action:
        return action if action.kind in SHARDING else Action(action.stage, action.kind, action.unit(schedule.n_slices))

    pairs = frozenset((numbered(one), numbered(two)) for one, two in schedule.overlaps)
    return replace(schedule, rows=tuple(tuple(map(numbered, row)) for row in schedule.rows), overlaps=pairs)


def _with_keys_values(program: Program) -> Program:
    """Return the program of slices with the keys and values that its actions read and write."""
    columns = [[Operand(keys_values(s, u)) for u in range(program.n_microbatches)] for s in range(program.n_stages)]

    def completed(one: Instruction) -> Instruction:
        action = one.action
        if action is None or action.kind in SHARDING or action.kind is Kind.WEIGHT_GRAD:
            return one
        own, column = action.microbatch, columns[action.stage]
        first = own - own % program.n_slices
        if action.kind in BACKWARDS:
            return replace(one, reads=(*one.reads, *column[first : own + 1]))
        writes = (*one.writes, *(column[own : own + 1] if action.kind is Kind.FORWARD else ()))
        return replace(one, reads=(*one.reads, *column[first:own]), writes=writes)

    return replace(program, rows=tuple(tuple(map(completed, row)) for row in program.rows))


_MakeSaved = Callable[[int, int], Value]
_SAVED_FOR: dict[Kind, _MakeSaved] = {Kind.RECOMPUTE: recipe, Kind.OFFLOAD: offloaded}
"""Value that a forward saves for an action of this kind that comes after it; by default `saved`."""

Column = list[Operand]
"""One operand per micro-batch."""

Side = list[tuple[Operand, ...]]
"""All operands that an instruction reads, or writes, per micro-batch."""


class _StageInstructions:
    """The instructions of one stage. Operands are created once per micro-batch and shared."""

    def __init__(self, stage: int, trained: bool, routes: Sequence[Route], n_microbatches: int) -> None:
        self.stage, self.trained, self.n_microbatches = stage, trained, n_microbatches
        self.into = [route for route in routes if stage in route.consumers]
        self.out = [route for route in routes if stage == route.source]
        self.sides: dict[tuple[Kind, _MakeSaved], tuple[Side, Side]] = {}

    def instruction(self, action: Action, saves: _MakeSaved) -> Instruction:
        if action.microbatch == NO_MICROBATCH:
            return Instruction(Op.COMPUTE, action=action)
        key = action.kind, saves
        if key not in self.sides:
            read, written = self._columns(*key)
            self.sides[key] = self._side(read), self._side(written)
        reads, writes = self.sides[key]
        return Instruction(Op.COMPUTE, reads[action.microbatch], writes[action.microbatch], action)

    def _columns(self, kind: Kind, saves: _MakeSaved) -> tuple[list[Column], list[Column]]:
        inputs = [self._values(route.value) for route in self.into]
        outputs = [self._values(route.value) for route in self.out]
        saved_values, weight_values, recipes = (self._saved(make) for make in (saved, weight_saved, recipe))
        output_grads = [self._values(r.value, consumer) for r in self.out for consumer in r.senders]
        added = [(r.value, consumer) for r in self.into if (consumer := r.added_by(self.stage)) is not None]
        output_grads += [self._values(*gradient) for gradient in added]
        input_grads = [self._values(route.value, self.stage) for route in self.into if route.gradient]
        match kind:
            case Kind.FORWARD:
                return inputs, [*outputs, *([self._saved(saves)] if self.trained else [])]
            case Kind.RECOMPUTE:
                return [recipes, *inputs], [saved_values]
            case Kind.BACKWARD:
                return [saved_values, *output_grads], input_grads
            case Kind.INPUT_GRAD:
                return [saved_values, *output_grads], [*input_grads, weight_values]
            case Kind.WEIGHT_GRAD:
                return [weight_values], []
            case Kind.OFFLOAD:
                return [self._saved(offloaded)], [self._saved(held)]
            case Kind.RELOAD:
                return [self._saved(held)], [saved_values]
            case Kind.UNSHARD | Kind.RESHARD | Kind.REDUCE_GRAD:
                return [], []

    def _values(self, name: str, consumer: int | None = None) -> Column:
        return [Operand(Value(name, m, consumer)) for m in range(self.n_microbatches)]

    def _saved(self, make: _MakeSaved) -> Column:
        return [Operand(make(self.stage, m)) for m in range(self.n_microbatches)]

    def _side(self, columns: list[Column]) -> Side:
        return list(zip(*columns, strict=True)) if columns else [()] * self.n_microbatches
