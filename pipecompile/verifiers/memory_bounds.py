"""Does a device hold more than it may? In micro-batches in flight, or in bytes, by the order of its row alone: what a
transfer holds on to for longer, only a simulation knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipecompile.ir import Action, Op, Program, Value, part_of
from pipecompile.ir.in_flight import in_flight

__all__ = ["byte_faults", "in_flight_faults"]


def in_flight_faults(
    rows: Sequence[Iterable[Action]], placement: Sequence[int], limit: Sequence[float]
) -> Iterator[str]:
    """Devices that have more micro-batches in flight than `limit` says per device."""
    for device, (peak, most) in enumerate(zip(in_flight(rows, placement), limit, strict=True)):
        if peak > most:
            yield f"device {device} has {peak:g} micro-batches in flight, {most:g} are allowed"


def byte_faults(program: Program, sizes: Mapping[str, float], limit: Sequence[float]) -> Iterator[str]:
    """Devices whose live values are larger than `limit`, at their worst place. `sizes` by the name of a value.

    What I leaves for W is part of what was saved, and counts when that is freed.
    """
    for device, row in enumerate(program.rows):
        held = peak = 0.0
        worst = 0
        left: dict[Value, float] = {}
        for index, instruction in enumerate(row):
            for operand in instruction.writes:
                whole, size = part_of(operand.value), sizes[operand.value.name]
                if whole is None:
                    held += size
                else:
                    left[whole] = size
            if held > peak:
                peak, worst = held, index
            if instruction.op is Op.FREE:
                value = instruction.reads[0].value
                held += left.pop(value, 0.0) - sizes[value.name]
        if peak > limit[device]:
            yield f"device {device}, step {worst}, {row[worst]}: {peak:.6g} bytes are held, {limit[device]:.6g} are allowed"
