"""On which stream each instruction runs, and what it waits for, where copies run beside compute.

    device 0, compute     0F0 ■──────────────┐ 0F1              ┌─ FREE v#0: given back by compute, after the copy
    copies from 0 to 1        └─► SEND v#0 ■─┼──────────────────┘
    device 1, compute                        └─► RECV v#0  1F0 ...  1B0 ■──┐
    copies from 0 to 1                                                     └─► FREE v#0: given back by the copies

A stream runs its launches in their order, so who waits for a launch has waited for those before it. ■ is an event, recorded
after a launch that others wait for. Who is launched waits for events only, so the host waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipecompile.ir import HOST, Op, Program, Value

__all__ = ["Lane", "Launch", "Place", "launches"]

Lane = tuple[int, int]
"""A stream: (d, d) computes on device d, (d, e) copies from d to e."""

Place = tuple[int, int]
"""A launch: the device, and the place in its row."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`waits` are the launches that must be over; `is_awaited`, whether somebody waits for this one."""

    lane: Lane
    waits: tuple[Place, ...] = ()
    is_awaited: bool = False


def launches(program: Program, apart: Callable[[int, int], bool]) -> tuple[tuple[Launch, ...], ...]:
    """A launch per instruction. `apart` says between which devices copies have a stream of their own. Linear."""
    found = _Walk(program, apart).run()
    awaited = {place for row in found for launch in row for place in launch.waits}
    return tuple(
        tuple(Launch(launch.lane, launch.waits, (d, i) in awaited) for i, launch in enumerate(row))
        for d, row in enumerate(found)
    )


class _Walk:
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
        made: dict[Value, Place] = {}
        origin: dict[Value, Lane] = {}
        copies: dict[Value, list[Place]] = {}
        last, found = (d, -1), list[Launch]()
        known: dict[tuple[Lane, int, Lane], int] = {}
        for index, instruction in enumerate(self.program.rows[d]):
            lane, waits = (d, d), list[Place]()
            peer = instruction.peer if instruction.peer not in (None, HOST) else None
            if instruction.op is Op.COMPUTE:
                made |= dict.fromkeys((operand.value for operand in instruction.writes), (d, index))
                last = d, index
            elif instruction.op is Op.SEND and peer is not None and self.apart(d, peer):
                value = instruction.reads[0].value
                lane, waits = (d, peer), [made[value]]
                copies.setdefault(value, []).append((d, index))
            elif instruction.op is Op.RECV and peer is not None and self.apart(peer, d):
                value = instruction.writes[0].value
                waits, origin[value] = [self.sends[value, peer, d]], (peer, d)
            elif instruction.op is Op.FREE:
                value = instruction.reads[0].value
                lane = origin.pop(value, lane)
                waits = [last] if lane != (d, d) else copies.pop(value, [])
            found.append(Launch(lane, tuple(self.news(lane, waits, found, known, d))))
        return found

    def news(
        self, lane: Lane, waits: list[Place], found: list[Launch], known: dict[tuple[Lane, int, Lane], int], d: int
    ) -> Iterator[Place]:
        """The waits that do not follow from earlier ones of this stream; `known` is how far those went."""
        for device, index in waits:
            there = found[index].lane if device == d else (device, d)
            if index > known.get((lane, device, there), -1):
                known[lane, device, there] = index
                yield device, index
