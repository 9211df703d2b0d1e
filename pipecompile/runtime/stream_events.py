"""Plan of streams and events: on which stream each instruction runs and what it waits for, where copies run beside compute.

    device 0, compute     0F0 ■──────────────┐ 0F1              ┌─ FREE v#0: memory returned to compute, after the copy
    copies from 0 to 1        └─► SEND v#0 ■─┼──────────────────┘
    device 1, compute                        └─► RECV v#0  1F0 ...  1B0 ■──┐
    copies from 0 to 1                                                     └─► FREE v#0: memory returned to the copies

A stream runs its launches in order, so a wait for a launch includes the launches before it. ■ is an event, recorded after a
launch that others wait for. Launches wait only for events of launches before them, so the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipecompile.ir import HOST, Op, Program, Value

__all__ = ["Lane", "Launch", "Place", "launches"]

Lane = tuple[int, int]
"""A stream: (d, d) computes on device d, (d, e) copies from device d to device e."""

Place = tuple[int, int]
"""A launch: (device, index of the instruction in the device's row)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of one instruction on `lane`, after the launches `waits`. `is_awaited`: another launch waits for it."""

    lane: Lane
    waits: tuple[Place, ...] = ()
    is_awaited: bool = False


def launches(program: Program, apart: Callable[[int, int], bool]) -> tuple[tuple[Launch, ...], ...]:
    """Return a launch per instruction. `apart(d, e)`: copies from d to e have a stream of their own. Linear in the instructions."""
    planned = _LaunchPlan(program, apart).run()
    awaited = {place for row in planned for launch in row for place in launch.waits}
    return tuple(
        tuple(Launch(launch.lane, launch.waits, (d, i) in awaited) for i, launch in enumerate(row))
        for d, row in enumerate(planned)
    )


class _LaunchPlan:
    """Plans launches device by device. `sends` maps (value, sender, receiver) to the launch of its SEND."""

    def __init__(self, program: Program, apart: Callable[[int, int], bool]) -> None:
        self.program, self.apart = program, apart
        self.sends = {
            (i.reads[0].value, d, i.peer): (d, index)
            for d, row in enumerate(program.rows)
            for index, i in enumerate(row)
            if i.op is Op.SEND and i.peer not in (None, HOST) and apart(d, i.peer or 0)
        }

    def run(self) -> list[list[Launch]]:
        return [self.row(device) for device in range(self.program.n_devices)]

    def row(self, d: int) -> list[Launch]:
        """Plan one device's row.

        computed     value ──► launch that computed it
        lent_by      received value ──► lane whose memory holds it, and to which its FREE returns the memory
        copies       sent value ──► launches that copy it, after which it may be freed
        """
        computed: dict[Value, Place] = {}
        lent_by: dict[Value, Lane] = {}
        copies: dict[Value, list[Place]] = {}
        last, planned = (d, -1), list[Launch]()
        known: dict[tuple[Lane, int, Lane], int] = {}
        for index, instruction in enumerate(self.program.rows[d]):
            lane, waits = (d, d), list[Place]()
            peer = instruction.peer if instruction.peer not in (None, HOST) else None
            if instruction.op is Op.COMPUTE:
                computed |= dict.fromkeys((operand.value for operand in instruction.writes), (d, index))
                last = d, index
            elif instruction.op is Op.SEND and peer is not None and self.apart(d, peer):
                value = instruction.reads[0].value
                lane, waits = (d, peer), [computed[value]]
                copies.setdefault(value, []).append((d, index))
            elif instruction.op is Op.RECV and peer is not None and self.apart(peer, d):
                value = instruction.writes[0].value
                waits, lent_by[value] = [self.sends[value, peer, d]], (peer, d)
            elif instruction.op is Op.FREE:
                value = instruction.reads[0].value
                lane = lent_by.pop(value, lane)
                waits = [last] if lane != (d, d) else copies.pop(value, [])
            planned.append(Launch(lane, tuple(self.new_waits(lane, waits, planned, known, d))))
        return planned

    def new_waits(
        self, lane: Lane, waits: list[Place], planned: list[Launch], known: dict[tuple[Lane, int, Lane], int], d: int
    ) -> Iterator[Place]:
        """Yield the waits that do not follow from earlier waits of the same stream.

        `known` maps (waiting lane, device, awaited lane) to the largest index that the lane has waited for.
        """
        for device, index in waits:
            awaited = planned[index].lane if device == d else (device, d)
            if index > known.get((lane, device, awaited), -1):
                known[lane, device, awaited] = index
                yield device, index
