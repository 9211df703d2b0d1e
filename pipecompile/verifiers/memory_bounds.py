"""Memory bounds per device, derived only from the order of its row: micro-batches in flight, or bytes.

A transfer may keep a value alive longer; only a simulation knows for how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipecompile.ir import Action, Kind, Op, Program, Value, part_of
from pipecompile.ir.in_flight import in_flight
from pipecompile.ir.slices import first_slice
from pipecompile.text.units import counted

__all__ = ["byte_faults", "in_flight_faults"]


def in_flight_faults(
    rows: Sequence[Iterable[Action]], placement: Sequence[int], limit: Sequence[float]
) -> Iterator[str]:
    """Yield each device with more micro-batches, or slices, in flight than its `limit`."""
    noun = "micro-batch" if first_slice(rows) is None else "slice"
    for device, (peak, most) in enumerate(zip(in_flight(rows, placement), limit, strict=True)):
        if peak > most:
            yield f"device {device} has {counted(peak, noun)} in flight, {most:g} are allowed"


def byte_faults(program: Program, sizes: Mapping[str, float], limit: Sequence[float]) -> Iterator[str]:
    """Yield each device whose live values exceed its `limit` in bytes, with the step of its peak.

    `sizes` maps the name of a value to bytes, and "@s.p" to those of the parameters of stage s that UNSHARD gathers. What I keeps
    for W is part of the saved value and counts once that is freed.
    """
    for device, row in enumerate(program.rows):
        live_bytes = peak = 0.0
        worst = 0
        kept_for_w: dict[Value, float] = {}
        for index, instruction in enumerate(row):
            for operand in instruction.writes:
                whole, size = part_of(operand.value), sizes[operand.value.name]
                if whole is None:
                    live_bytes += size
                else:
                    kept_for_w[whole] = size
            live_bytes += _gathered(instruction.action, Kind.UNSHARD, sizes)
            if live_bytes > peak:
                peak, worst = live_bytes, index
            if instruction.op is Op.FREE:
                value = instruction.reads[0].value
                live_bytes += kept_for_w.pop(value, 0.0) - sizes[value.name]
            live_bytes -= _gathered(instruction.action, Kind.RESHARD, sizes)
        if peak > limit[device]:
            yield f"device {device}, step {worst}, {row[worst]}: {peak:.6g} bytes are held, {limit[device]:.6g} are allowed"


def _gathered(action: Action | None, kind: Kind, sizes: Mapping[str, float]) -> float:
    """Return the bytes of the parameters that an action of this kind gathers, or frees."""
    return sizes.get(f"@{action.stage}.p", 0.0) if action is not None and action.kind is kind else 0.0
