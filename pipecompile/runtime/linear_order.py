"""One legal order of all devices' instructions, for a single thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipecompile.ir import HOST, Instruction, Kind, Op, Operand, Program, Value

__all__ = ["joins_halves", "merged", "with_frees"]

Place = tuple[int, int]
"""A device, and a place in its row."""


def merged(program: Program) -> tuple[Place, ...]:
    """Instructions of all devices, every RECV after its SEND.

    The last device that can go on always does, so a value is used as soon as it is made, while it is in the cache. Stages
    run forward in their order, where the schedule leaves the choice: then random numbers are drawn as in the model.
    """
    walk = _Walk(program, [0] * program.n_devices)
    return tuple(walk.step() for _ in range(sum(map(len, program.rows))))


def with_frees(program: Program, walk: Sequence[Place]) -> dict[Place, list[Operand]]:
    """The instructions of a walk without FREEs, in order, and what is freed right after each of them on its device."""
    freed: dict[Place, list[Operand]] = {}
    latest: dict[int, Place] = {}
    for d, i in walk:
        instruction = program.rows[d][i]
        if instruction.op is Op.FREE:
            freed[latest[d]].append(instruction.reads[0])
        else:
            latest[d] = d, i
            freed[d, i] = []
    return freed


def joins_halves(program: Program, weights: Sequence[frozenset[int]]) -> bool:
    """Whether I may as well do the work of W, which takes less where nothing runs beside it: gradients are added up in the same order, as
    every stage's W come in the order of its I, and no weight, known by its number, is of several stages.
    """
    order: dict[tuple[int, Kind], list[int]] = {}
    for action in (instruction.action for row in program.rows for instruction in row):
        if action is not None:
            order.setdefault((action.stage, action.kind), []).append(action.microbatch)
    is_shared = len(frozenset[int]().union(*weights)) < sum(map(len, weights))
    stages = range(len(weights))
    return not is_shared and all(order.get((s, Kind.INPUT_GRAD)) == order.get((s, Kind.WEIGHT_GRAD)) for s in stages)


@dataclass(slots=True)
class _Walk:
    """`at` is where each device is, `sent` what was sent (value, to, from), `run` the forwards that ran."""

    program: Program
    at: list[int]
    sent: set[tuple[Value, int | None, int]] = field(default_factory=set)
    run: set[tuple[int, int]] = field(default_factory=set)

    def step(self) -> tuple[int, int]:
        device = self.next()
        index = self.at[device]
        instruction = self.program.rows[device][index]
        if instruction.op is Op.SEND:
            self.sent.add((instruction.reads[0].value, instruction.peer, device))
        elif (action := instruction.action) is not None and action.kind is Kind.FORWARD:
            self.run.add((action.stage, action.microbatch))
        self.at[device] += 1
        return device, index

    def next(self) -> int:
        ready = [d for d in reversed(range(self.program.n_devices)) if self.is_ready(d)]
        assert ready, "a verified program cannot deadlock"
        return next((d for d in ready if self.is_in_turn(self.instruction(d))), ready[0])

    def instruction(self, device: int) -> Instruction:
        return self.program.rows[device][self.at[device]]

    def is_ready(self, device: int) -> bool:
        if self.at[device] == len(self.program.rows[device]):
            return False
        instruction = self.instruction(device)
        if instruction.op is not Op.RECV or instruction.peer == HOST:
            return True
        return (instruction.writes[0].value, device, instruction.peer or 0) in self.sent

    def is_in_turn(self, instruction: Instruction) -> bool:
        action = instruction.action
        if action is None or action.kind is not Kind.FORWARD or not action.stage:
            return True
        return (action.stage - 1, action.microbatch) in self.run
