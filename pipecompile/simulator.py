"""Walk a program under a cost model: a timeline, a memory curve per device, the peak number of micro-batches in flight.

    device 0 │ 0F0  0F1            0B0        compute: in the order of the row, as soon as all reads are there
      to 1   │      v0#0 v0#1                 one copy track per (source, target) device, first come first served;
    device 1 │           1F0  1B0             copies overlap compute
      to 0   │                     v0'1#0

A value written by a compute counts from its start on, a received copy on the receiver from the start of its transfer.
FREE takes it off at once, or when its last transfer ends. The host's transfers cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from pipecompile.checks import verify
from pipecompile.errors import InputError
from pipecompile.ir import HOST, Instruction, Kind, Op, Program, Schedule, Value, chain
from pipecompile.passes.compute import lower_actions
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.transfers import insert_transfers
from pipecompile.timeline import COMPUTE, Span, Timeline

__all__ = ["simulate"]

PerStage = float | Sequence[float]
"""One number for all stages, or one per stage."""


def simulate(
    subject: Schedule | Program,
    *,
    forward: PerStage = 1.0,
    input_grad: PerStage = 1.0,
    weight_grad: PerStage = 1.0,
    transfer: float | Mapping[str, float] = 0.0,
    saved_bytes: PerStage = 0.0,
) -> Timeline:
    """Predict a run. A full backward takes `input_grad + weight_grad`; a schedule is lowered over a chain first.

    `transfer` is the time that one value, or one gradient of it, takes between two devices: one number, or a number per
    name of a route. `saved_bytes` is what a stage keeps per micro-batch for its backward; other sizes are the routes'.
    A program is taken to be legal. Linear in the number of instructions. Raises VerifyError when a schedule is not
    legal or a program does not run to its end, InputError when a cost is not a number per stage or route.
    """
    program = _unverified(subject) if isinstance(subject, Schedule) else subject
    costs = _costs(program, forward, input_grad, weight_grad, transfer, saved_bytes)
    walk = _Walk(program, costs)
    if not walk.run():
        verify(program)
        raise AssertionError("a legal program did not run to its end")
    return Timeline(program.n_devices, tuple(walk.spans), tuple(map(_curve, walk.memory)), _peaks(program))


def _unverified(schedule: Schedule) -> Program:
    """Lowered as far as time and memory are concerned; a legal schedule needs no check between passes."""
    verify(schedule)
    return insert_frees(insert_transfers(lower_actions(schedule, chain(schedule.n_stages))))


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds of every kind of action per stage, seconds and bytes by the name of a value."""

    seconds: dict[Kind, tuple[float, ...]]
    transfer: dict[str, float]
    nbytes: dict[str, float]


def _costs(program: Program, forward: PerStage, input_grad: PerStage, weight_grad: PerStage,
           transfer: float | Mapping[str, float], saved_bytes: PerStage) -> _Costs:  # fmt: skip
    f, i, w, kept = (
        _per_stage(name, given, program.n_stages)
        for name, given in (
            ("forward", forward),
            ("input_grad", input_grad),
            ("weight_grad", weight_grad),
            ("saved_bytes", saved_bytes),
        )
    )
    backward = tuple(a + b for a, b in zip(i, w, strict=True))
    seconds = {Kind.FORWARD: f, Kind.BACKWARD: backward, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: w}
    nbytes = {route.value: route.nbytes for route in program.routes}
    nbytes.update((f"@{stage}", size) for stage, size in enumerate(kept))
    return _Costs(seconds, _per_route(transfer, program), nbytes)


def _per_stage(name: str, given: PerStage, n_stages: int) -> tuple[float, ...]:
    numbers = (given,) * n_stages if isinstance(given, int | float) else tuple(given)
    if len(numbers) != n_stages:
        raise InputError(
            f"{name} has {len(numbers)} numbers for {n_stages} stages", hint="one number, or one per stage"
        )
    return tuple(_checked(name, number) for number in numbers)


def _per_route(transfer: float | Mapping[str, float], program: Program) -> dict[str, float]:
    names = [route.value for route in program.routes]
    if isinstance(transfer, int | float):
        return dict.fromkeys(names, _checked("transfer", transfer))
    if missing := [name for name in names if name not in transfer]:
        raise InputError(
            f"transfer has no entry for route {missing[0]!r}", hint="one number, or one per route by its value's name"
        )
    return {name: _checked(f"transfer[{name!r}]", transfer[name]) for name in names}


def _checked(name: str, number: float) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"{name} must be finite and not negative, not {number!r}")
    return float(number)


@dataclass(slots=True)
class _Walk:
    """The state of one walk. A device goes on until it waits for a transfer that nobody has started yet."""

    program: Program
    costs: _Costs
    spans: list[Span] = field(default_factory=list)
    memory: list[list[tuple[float, float]]] = field(init=False)
    clock: list[float] = field(init=False)
    at: list[int] = field(init=False)
    there: list[dict[Value, float]] = field(init=False)
    busy: list[dict[Value, float]] = field(init=False)
    tracks: dict[tuple[int, int], float] = field(default_factory=dict)
    arrivals: dict[tuple[Value, int, int], float] = field(default_factory=dict)
    waiting: dict[tuple[Value, int, int], int] = field(default_factory=dict)
    ready: list[int] = field(init=False)

    def __post_init__(self) -> None:
        devices = range(self.program.n_devices)
        self.memory = [[] for _ in devices]
        self.clock, self.at = [0.0 for _ in devices], [0 for _ in devices]
        self.there, self.busy = [{} for _ in devices], [{} for _ in devices]
        self.ready = list(devices)

    def run(self) -> bool:
        """Whether every device came to its end."""
        while self.ready:
            device = self.ready.pop()
            row = self.program.rows[device]
            while self.at[device] < len(row) and self._step(device, row[self.at[device]]):
                self.at[device] += 1
        return all(at == len(row) for at, row in zip(self.at, self.program.rows, strict=True))

    def _step(self, device: int, instruction: Instruction) -> bool:
        """Carry out one instruction, or say that it has to wait."""
        match instruction.op:
            case Op.COMPUTE:
                self._compute(device, instruction)
            case Op.SEND:
                self._send(device, instruction)
            case Op.RECV:
                return self._receive(device, instruction)
            case Op.FREE:
                value = instruction.reads[0].value
                time = max(self.clock[device], self.busy[device].pop(value, 0.0))
                self.memory[device].append((time, -self.costs.nbytes[value.name]))
        return True

    def _compute(self, device: int, instruction: Instruction) -> None:
        action, there = instruction.action, self.there[device]
        assert action is not None
        start = self.clock[device]
        for operand in instruction.reads:
            start = max(start, there.get(operand.value, 0.0))
        end = start + self.costs.seconds[action.kind][action.stage]
        self.clock[device] = end
        self.spans.append(Span(device, COMPUTE, str(action), start, end))
        for operand in instruction.writes:
            self.memory[device].append((start, self.costs.nbytes[operand.value.name]))

    def _send(self, device: int, instruction: Instruction) -> None:
        value, peer = instruction.reads[0].value, instruction.peer
        assert peer is not None
        if peer == HOST:
            return
        start = max(self.clock[device], self.there[device].get(value, 0.0), self.tracks.get((device, peer), 0.0))
        seconds = self.costs.transfer[value.name]
        end = start + seconds
        if seconds:
            self.tracks[device, peer] = end
            self.busy[device][value] = max(end, self.busy[device].get(value, 0.0))
            self.spans.append(Span(device, f"to {peer}", str(value), start, end))
        self.memory[peer].append((start, self.costs.nbytes[value.name]))
        key = value, device, peer
        self.arrivals[key] = end
        if key in self.waiting:
            self.ready.append(self.waiting.pop(key))

    def _receive(self, device: int, instruction: Instruction) -> bool:
        value, peer = instruction.writes[0].value, instruction.peer
        assert peer is not None
        if peer == HOST:
            self.memory[device].append((self.clock[device], self.costs.nbytes[value.name]))
            return True
        key = value, peer, device
        if key not in self.arrivals:
            self.waiting[key] = device
            return False
        self.there[device][value] = self.arrivals.pop(key)
        return True


def _curve(changes: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Running total by time; what comes and goes at the same moment cancels."""
    total, curve = 0.0, []
    for time, group in groupby(sorted(changes, key=itemgetter(0)), key=itemgetter(0)):
        change = sum(size for _, size in group)
        if change:
            total += change
            curve.append((time, total))
    return tuple(curve)


def _peaks(program: Program) -> tuple[float, ...]:
    """Per device: the most micro-batches whose forward ran and whose B or W had not, by the order of its row."""
    trained = {i.action.stage for row in program.rows for i in row if i.action and i.action.kind is not Kind.FORWARD}
    step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRAD: 0, Kind.WEIGHT_GRAD: -1}
    peaks = []
    for device, row in enumerate(program.rows):
        held = peak = 0
        for instruction in row:
            if instruction.action is not None and instruction.action.stage in trained:
                held += step[instruction.action.kind]
                peak = max(peak, held)
        peaks.append(peak / max(1, program.placement.count(device)))
    return tuple(peaks)
