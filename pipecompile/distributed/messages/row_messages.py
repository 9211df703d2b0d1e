"""The messages of the ranks under one program: what each rank receives, what reaches all ranks, and which action sends a value.

row 0      0F0  SEND h#0 to 1                      action of h#0: 0F0
row 1      RECV h#0 from 0  1F0  SEND loss#0 to HOST     rank 1 receives h#0; the losses go to all ranks after the row
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from pipecompile.ir import HOST, LOSS, Action, Instruction, Op, Program, Route
from pipecompile.parameters.tied_mirrors import Mirrors

__all__ = ["Departure", "LeavesRead", "departures", "directed_pairs", "incoming", "sending_action", "summary"]


@dataclass(frozen=True, slots=True)
class Departure:
    """A value that goes from `device` to the host, hence to all ranks: of one micro-batch, or the losses of several as one message."""

    device: int
    name: str
    microbatches: tuple[int, ...]

    @property
    def is_stacked(self) -> bool:
        """Whether it has the losses of these micro-batches."""
        return self.name == LOSS

    def __str__(self) -> str:
        return f"{self.name}{'' if self.is_stacked else f'#{self.microbatches[0]}'} for all"


def departures(program: Program) -> tuple[Departure, ...]:
    """Return the values that go to the host, without gradients of inputs. All losses of a device are one message."""
    values = [
        (device, instruction.reads[0].value)
        for device, row in enumerate(program.rows)
        for instruction in row
        if instruction.op is Op.SEND and instruction.peer == HOST
    ]
    departing = defaultdict[tuple[int, str, int | None], list[int]](list)
    for device, value in values:
        if value.consumer is None:
            alone = None if value.name == LOSS else value.microbatch
            departing[device, value.name, alone].append(value.microbatch)
    return tuple(Departure(device, name, tuple(sorted(own))) for (device, name, _), own in departing.items())


def incoming(program: Program, device: int) -> dict[int, tuple[str, ...]]:
    """Return, by peer, the names of the values that `device` receives in a run, in order."""
    names = defaultdict[int, list[str]](list)
    for instruction in program.rows[device]:
        if instruction.op is Op.RECV and instruction.peer is not None and instruction.peer != HOST:
            names[instruction.peer].append(str(instruction.writes[0].value))
    for departure in departures(program):
        if departure.device != device:
            names[departure.device].append(str(departure))
    return {peer: tuple(values) for peer, values in names.items()}


def directed_pairs(program: Program) -> set[tuple[int, int]]:
    """Return the (sender, receiver) pairs of devices between which values go in a run. What departs goes to all devices."""
    pairs = {
        (device, instruction.peer)
        for device, row in enumerate(program.rows)
        for instruction in row
        if instruction.op is Op.SEND and instruction.peer is not None and instruction.peer != HOST
    }
    ends = range(program.n_devices)
    return pairs | {(one.device, other) for one in departures(program) for other in ends if other != one.device}


def sending_action(row: Sequence[Instruction], awaited: Container[str], *, is_begun: bool) -> Action | None:
    """Return the first action of a row whose result is sent as one of the `awaited` values.

    If the row sends none of them, return its last action, or its first if the run has not begun; None for a row without actions.
    """
    first = latest = None
    for instruction in row:
        latest = instruction.action or latest
        first = first or latest
        if instruction.op is Op.SEND and str(instruction.reads[0].value) in awaited and latest is not None:
            return latest
    return latest if is_begun else first


def summary(program: Program) -> str:
    """Return what all ranks must have in common. Sizes are not part of it: replicas may have unequal parts of a batch."""
    lines = [f"{device} {instruction}" for device, row in enumerate(program.rows) for instruction in row]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:12]
    return f"{program.n_stages} stages, {program.n_microbatches} micro-batches, {len(lines)} instructions ({digest})"


class RoutedRecording(Protocol):
    """A recording: its number, its routes, the names of its inputs, and its mirrors with the placements of its stages and their copies."""

    @property
    def number(self) -> int: ...
    @property
    def routes(self) -> Sequence[Route]: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def mirrors(self) -> Mirrors: ...


class LeavesRead:
    """The leaves of a batch that the stages on `device` read, by the number of a recording and of its inputs."""

    def __init__(self, recordings: Callable[[], Iterable[RoutedRecording]], device: int) -> None:
        self._recordings, self._device = recordings, device
        self._known: dict[tuple[int, int], int] = {}

    def __call__(self, recording: int, n_inputs: int) -> int | None:
        """Return them as bits: those of the inputs, then all of the target. Return None for a recording of another number of inputs."""
        if (recording, n_inputs) not in self._known:
            found = next((one for one in self._recordings() if one.number == recording), None)
            if found is None or len(found.inputs) != n_inputs:
                return None
            self._known[recording, n_inputs] = _leaves_read(found, self._device)
        return self._known[recording, n_inputs]


def _leaves_read(recording: RoutedRecording, device: int) -> int:
    """Return the bits of the inputs that the stages on `device` read, and of all behind them if it has the last stage, which reads the
    target.
    """
    inputs, placements = recording.inputs, recording.mirrors.placements
    last = len(placements[0]) - 1
    own = {stage for placement in placements for stage, where in enumerate(placement) if where == device}
    sent = (route for route in recording.routes if route.source == HOST)
    here = {route.value for route in sent if not own.isdisjoint(route.consumers)}
    bits = sum(1 << place for place, name in enumerate(inputs) if name in here)
    return bits | (1 << 62) - (1 << min(len(inputs), 62)) if last in own else bits
