"""Turn a schedule into a program of compute instructions, each with the values that it reads and writes.

    before   0F0                  routes  x: host -> 0;  v0: 0 -> 1, gradient
    after    0F0 x#0 -> v0#0 @0#0
    before   0B0
    after    0B0 @0#0 v0'1#0 ->

Linear in the number of actions times the routes of their stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir import Action, Instruction, Kind, Op, Operand, Program, Route, Schedule, Value, saved

__all__ = ["lower_actions"]


def lower_actions(schedule: Schedule, routes: Sequence[Route]) -> Program:
    """One compute instruction per action, in the same order. Operands follow the order of `routes`.

    Forward reads the routes into its stage and writes those out of it, and what its backward will need; B or I reads
    that and a gradient per consumer, and writes a gradient per route into the stage; W only reads what was saved.
    """
    trained = {action.stage for row in schedule.rows for action in row if action.kind is not Kind.FORWARD}
    ports = [_ports(stage, routes, stage in trained) for stage in range(schedule.n_stages)]
    rows = tuple(tuple(_instruction(action, ports[action.stage]) for action in row) for row in schedule.rows)
    return Program(schedule.n_stages, schedule.n_microbatches, schedule.placement, tuple(routes), rows)


Port = tuple[str, int | None]
"""A value without its micro-batch: (name, None), or (name, consumer) for a gradient."""


@dataclass(frozen=True, slots=True)
class _Ports:
    """What enters and leaves one stage on the way forward and on the way back."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    gradients_in: tuple[Port, ...]
    gradients_out: tuple[Port, ...]
    saves: bool


def _ports(stage: int, routes: Sequence[Route], saves: bool) -> _Ports:
    into = [route for route in routes if stage in route.consumers]
    out = [route for route in routes if stage == route.source]
    return _Ports(
        inputs=tuple((route.value, None) for route in into),
        outputs=tuple((route.value, None) for route in out),
        gradients_in=tuple((route.value, consumer) for route in out if route.gradient for consumer in route.consumers),
        gradients_out=tuple((route.value, stage) for route in into if route.gradient),
        saves=saves,
    )


def _instruction(action: Action, ports: _Ports) -> Instruction:
    kept = (Operand(saved(action.stage, action.microbatch)),) if ports.saves else ()
    match action.kind:
        case Kind.FORWARD:
            reads = _operands(ports.inputs, action.microbatch)
            writes = (*_operands(ports.outputs, action.microbatch), *kept)
        case Kind.BACKWARD | Kind.INPUT_GRAD:
            reads = (*kept, *_operands(ports.gradients_in, action.microbatch))
            writes = _operands(ports.gradients_out, action.microbatch)
        case Kind.WEIGHT_GRAD:
            reads, writes = kept, ()
    return Instruction(Op.COMPUTE, reads, writes, action)


def _operands(ports: tuple[Port, ...], microbatch: int) -> tuple[Operand, ...]:
    return tuple(Operand(Value(name, microbatch, consumer)) for name, consumer in ports)
