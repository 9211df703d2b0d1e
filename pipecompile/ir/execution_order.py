"""The order in which one thread runs the instructions of all devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipecompile.ir import HOST, Instruction, Kind, Op, Operand, Program, Value

__all__ = ["frees_after", "in_turn", "may_join_backward", "merged"]

Place = tuple[int, int]
"""(device, index of an instruction in the device's row)."""


def merged(program: Program) -> tuple[Place, ...]:
    """Return the instructions of all devices in one order in which each RECV follows its SEND.

    Greedy: the last device that can proceed proceeds, so a value is used soon after it is computed, while it is in the cache.
    Where the schedule leaves the choice, stages run forward in their order: then random numbers are drawn as in the model.
    """
    return _Merge(program, [0] * program.n_devices).walk()


def in_turn(program: Program) -> tuple[Place, ...]:
    """Return the order of `merged`, but for RECVs: one that waits runs when its value is there, and the rest of its row goes on.

    Rows receive early, so that ranks do not wait for each other. Where a value skips stages, a device would wait for that of a later
    micro-batch before it runs an earlier one, and random numbers would be drawn in another order than in the model. For one thread
    that passes values on, and copies nothing.
    """
    return _Merge(program, [0] * program.n_devices, overtakes=True).walk()


def frees_after(program: Program, walk: Sequence[Place]) -> dict[Place, list[Operand]]:
    """Return the instructions of `walk` other than FREE, in order, each with what is freed right after it on its device."""
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


def may_join_backward(program: Program, parameters: Sequence[frozenset[int]]) -> bool:
    """Return whether I may run the whole backward, and W nothing, with the same sums of gradients. Joined, they take less time.

    True if each stage has one copy, and its W in the order of its I, and no parameter belongs to two stages. `parameters` are the ids
    of each stage's parameters.
    """
    if program.directions:
        return False
    order: dict[tuple[int, Kind], list[int]] = {}
    for action in (instruction.action for row in program.rows for instruction in row):
        if action is not None:
            order.setdefault((action.stage, action.kind), []).append(action.microbatch)
    is_shared = len(frozenset[int]().union(*parameters)) < sum(map(len, parameters))
    stages = range(len(parameters))
    return not is_shared and all(order.get((s, Kind.INPUT_GRAD)) == order.get((s, Kind.WEIGHT_GRAD)) for s in stages)


@dataclass(slots=True)
class _Merge:
    """A merge in progress.

    position    per device, the index of its next instruction
    overtakes   whether instructions may run before a RECV that waits and has nothing to do with them
    early       the instructions that did
    sent        (value, receiver, sender) of the SENDs so far
    forwards    (stage, micro-batch) of the forwards so far
    ready       per device, the index of its instruction that can run, None if there is none; only of devices without a change since
    """

    program: Program
    position: list[int]
    overtakes: bool = False
    early: set[Place] = field(default_factory=set)
    sent: set[tuple[Value, int | None, int]] = field(default_factory=set)
    forwards: set[tuple[int, int]] = field(default_factory=set)
    ready: dict[int, int | None] = field(default_factory=dict)

    def walk(self) -> tuple[Place, ...]:
        """Return all instructions in their order."""
        return tuple(self.step() for _ in range(sum(map(len, self.program.rows))))

    def step(self) -> Place:
        device, index = self.next_place()
        instruction = self.program.rows[device][index]
        self.ready.pop(device, None)
        if instruction.op is Op.SEND:
            self.sent.add((instruction.reads[0].value, instruction.peer, device))
            self.ready.pop(instruction.peer or 0, None)
        elif (action := instruction.action) is not None and action.kind is Kind.FORWARD:
            self.forwards.add((action.stage, action.microbatch))
        self.early.add((device, index))
        while (device, self.position[device]) in self.early:
            self.early.discard((device, self.position[device]))
            self.position[device] += 1
        return device, index

    def next_place(self) -> Place:
        devices = range(self.program.n_devices)
        self.ready.update((d, self.ready_index(d)) for d in devices if d not in self.ready)
        ready = [(d, index) for d in reversed(devices) if (index := self.ready[d]) is not None]
        assert ready, "a verified program cannot deadlock"
        return next((place for place in ready if self.is_in_turn(self.instruction(*place))), ready[0])

    def instruction(self, device: int, index: int) -> Instruction:
        return self.program.rows[device][index]

    def ready_index(self, device: int) -> int | None:
        """Return the index of the instruction of the device that can run; None if there is none."""
        row, waiting = self.program.rows[device], set[Value]()
        for index in range(self.position[device], len(row)):
            if (device, index) in self.early:
                continue
            if self.is_there(device, row[index]):
                touched = {operand.value for operand in (*row[index].reads, *row[index].writes)}
                return index if touched.isdisjoint(waiting) else None
            if not self.overtakes:
                return None
            waiting.add(row[index].writes[0].value)
        return None

    def is_there(self, device: int, instruction: Instruction) -> bool:
        """Return whether an instruction has not to wait: a RECV needs its SEND."""
        if instruction.op is not Op.RECV or instruction.peer == HOST:
            return True
        return (instruction.writes[0].value, device, instruction.peer or 0) in self.sent

    def is_in_turn(self, instruction: Instruction) -> bool:
        """Return False for a forward whose predecessor stage has not run this micro-batch."""
        action = instruction.action
        if action is None or action.kind is not Kind.FORWARD or not action.stage:
            return True
        return (action.stage - 1, action.microbatch) in self.forwards
