"""Draws a schedule as the docstrings of the builders do: a row per device, three characters per unit of time, or five with slices.

device 0 │ F0 F1       B0 B0           F, I, W and R take one unit, B two; small letters on the device's second stage
device 0 │ F1+b0 b0                    + overlaps with what follows
"""

from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.ir.overlap import firsts
from pipecompile.simulation.simulator import simulate


def drawn(schedule: Schedule) -> list[str]:
    """One line per device, without what follows its last cell."""
    width, unit = (3, 1.0) if schedule.n_slices == 1 else (5, schedule.n_slices)
    timeline = simulate(schedule, forward=unit, input_grad=unit, weight_grad=unit)
    lines = []
    for device in range(schedule.n_devices):
        line = ""
        for span in timeline.compute(device):
            cell = _cell(schedule, Action.parse(span.name)).ljust(width)
            line = line.ljust(width * round(span.start)) + cell * round(span.end - span.start)
        lines.append(f"device {device} │ {line}".rstrip())
    return lines


def _cell(schedule: Schedule, action: Action) -> str:
    """`F0`, or `f0` for the second stage that lives on the device."""
    chunk = sum(home == schedule.placement[action.stage] for home in schedule.placement[: action.stage])
    letter = action.kind.value.lower() if chunk else action.kind.value
    return f"{letter}{action.part}{'+' * (action in firsts(schedule.overlaps))}"
