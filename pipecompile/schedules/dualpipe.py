"""DualPipe: two pipelines over the same devices, one down and one up; forwards of one alternate with backwards of the other.

    device 0 │ F0 F2 F4 F1 I1 W1 F3 F6 B3 B3 F5 B0 B0 B5 B5 F7    B2 B2 B7 B7 I4 W4 I6 W6
    device 1 │    F0 F1 F2 F3 F4 B1 B1 F5 B0 B0 F6 B3 B3 F7 B2 B2 B5 B5 B4 B4 I7 I6 W7 W6
    device 2 │    F1 F0 F3 F2 F5 B0 B0 F4 B1 B1 F7 B2 B2 F6 B3 B3 B4 B4 B5 B5 I6 I7 W6 W7
    device 3 │ F1 F3 F5 F0 I0 W0 F2 F7 B2 B2 F4 B1 B1 B4 B4 F6    B3 B3 B6 B6 I5 W5 I7 W7
             └──────────────────────────────────────────────────────────────────────────▶ time    P = 4, M = 8

Even micro-batches go down: their stage 0 is on device 0. Odd ones go up. Devices d and P - 1 - d do the same at the same time, each for the
other direction: what one of them does is the row of `dualpipev` on half as many devices.

Bubble: makespan M T + (P / 2 - 1) tF at equal times, for M >= 2 P, P and M even: T is the time of one stage, where `dualpipev` has two.
Memory: at most P + 1 micro-batches in flight on every device, each of one stage; parameters, gradients and optimizer state of two stages.
When: as `dualpipev`, with the parameters of one stage in two places. For P odd, and so without pairs of devices, it is `chimera`.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipecompile.ir import Action, Schedule
from pipecompile.ir.directions import Direction
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.chimera import build_chimera
from pipecompile.schedules.dualpipev import build_dualpipev

__all__ = ["build_dualpipe"]


def build_dualpipe(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return DualPipe with a stage of each direction per device; for an odd number of devices, `chimera`."""
    if n_devices % 2 or n_microbatches == 1:
        return replace(build_chimera(n_stages, n_microbatches, n_devices), name="dualpipe")
    half = build_dualpipev(n_stages, (n_microbatches + 1) // 2, n_devices // 2)
    rows = [
        tuple(one for one in _row(row, device, turned=turned) if one.microbatch < n_microbatches)
        for turned in (False, True)
        for device, row in enumerate(half.rows)
    ]
    middle, down = n_devices // 2, loop(n_stages, n_devices)
    ordered = (*rows[:middle], *reversed(rows[middle:]))
    directions = (Direction(tuple(reversed(down)), tuple(range(1, n_microbatches, 2))),)
    return Schedule(n_stages, n_microbatches, down, ordered, "dualpipe", directions=directions)


def _row(row: tuple[Action, ...], device: int, *, turned: bool) -> Iterator[Action]:
    """Yield the row of a device of the V: its first stage for one direction, its second stage for the other; `turned`, the other way
    round.
    """
    for action in row:
        is_second = action.stage != device
        yield replace(action, microbatch=2 * action.microbatch + (is_second != turned))
