"""Offloading: the host holds what a forward saved, from OFFLOAD directly after it to RELOAD shortly before its backward.

    before   0F0            0F1 0F2 0B0 0B1 0B2
    after    0F0 0OFFLOAD0  0F1 0OFFLOAD1  0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2      stage 0, of which 2B follows 2F too soon

A RELOAD stands one action before the backward, so that its copy runs beside that action. Wan et al., "PipeOffload: Improving
Scalability of Pipeline Parallelism with Memory Optimization", 2025 (arXiv 2503.01328), offload all cells, or those that wait
longest. `offload_to_fit` takes of all cells in memory at a peak the one whose backward comes last, as Belady's rule evicts pages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Unpack

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.ir.input_checks import amounts
from pipecompile.ir.units import BYTES, written
from pipecompile.simulation.costs import CostOptions
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify
from pipecompile.verifiers.routes import checked_routes

__all__ = ["insert_offload", "offload_to_fit"]

Cell = tuple[int, int]
"""(stage, micro-batch)."""

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


def insert_offload(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Return the schedule with OFFLOAD and RELOAD for every cell of these stages, by default of all.

    Cells that are recomputed or offloaded already stay as they are, and so do cells with fewer than two actions between forward and
    backward: no copy would be over in time. Raise ScheduleError for a stage that is not there, and VerifyError if the schedule is
    not legal.
    """
    verify(schedule)
    if unknown := sorted(set(stages or ()) - set(range(schedule.n_stages))):
        raise ScheduleError(f"there is no stage {unknown[0]}", why=f"stages are 0 to {schedule.n_stages - 1}")
    wanted = set(range(schedule.n_stages) if stages is None else stages)
    cells = {cell for row in schedule.rows for cell in _movable(row) if cell[0] in wanted}
    return _inserted(schedule, cells, [1] * schedule.n_devices)


def offload_to_fit(
    schedule: Schedule,
    memory_limit: float | Sequence[float],
    *,
    routes: Sequence[Route] | None = None,
    **costs: Unpack[CostOptions],
) -> Schedule:
    """Return the schedule with OFFLOAD and RELOAD for as few cells as the greedy choice needs to fit into `memory_limit`.

    `memory_limit` is in bytes, one number or one per device; it counts what `simulate` counts with these costs: what stages save,
    and parameters. Raise InfeasibleError if no more cell can move, InputError for a cost or a limit that is no number, and
    VerifyError if the schedule is not legal.
    """
    limit = amounts("memory_limit", memory_limit, schedule.n_devices, "device")
    verify(schedule, routes=checked_routes(routes, schedule.n_stages))
    if not costs.get("saved_bytes"):
        raise InputError(
            "saved_bytes is missing", why="without it nothing takes memory", hint="saved_bytes=[...] per stage"
        )
    cells, ahead = set[Cell](), [1] * schedule.n_devices
    while True:
        candidate = _inserted(schedule, cells, ahead)
        curves = simulate(candidate, routes=routes, **costs).memory
        times = [_first_over(curve, most) for curve, most in zip(curves, limit, strict=True)]
        over = [(device, when) for device, when in enumerate(times) if when is not None]
        if not over:
            return candidate
        for device, when in over:
            if (cell := _latest_resident(candidate, device, when, routes, costs)) is not None:
                cells.add(cell)
            elif ahead[device]:
                ahead[device] = 0
            else:
                raise _does_not_fit(device, max(size for _, size in curves[device]), limit[device])


def _first_over(curve: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Return the first time in seconds at which a device holds more than `limit` bytes."""
    return next((time for time, size in curve if size > limit * (1 + 1e-9)), None)


def _latest_resident(
    schedule: Schedule, device: int, when: float, routes: Sequence[Route] | None, costs: CostOptions
) -> Cell | None:
    """Return the cell whose forward ended by `when` and whose backward is the last; None if no cell can move."""
    movable = set(_movable(schedule.rows[device]))
    spans = simulate(schedule, routes=routes, **costs).spans
    times = {span.name: span for span in spans if span.track == "compute" and span.device == device}
    later = [
        (times[str(action)].start, (action.stage, action.microbatch))
        for action in schedule.rows[device]
        if action.kind in _BACKWARDS and (action.stage, action.microbatch) in movable
        and times[str(replace(action, kind=Kind.FORWARD))].end <= when < times[str(action)].start
    ]  # fmt: skip
    return max(later)[1] if later else None


def _movable(row: Sequence[Action]) -> list[Cell]:
    """Return the cells of a row that keep what they save on the device, with two actions or more between forward and backward."""
    fixed = {(a.stage, a.microbatch) for a in row if a.kind in (Kind.RECOMPUTE, Kind.OFFLOAD)}
    begun = {(a.stage, a.microbatch): place for place, a in enumerate(row) if a.kind is Kind.FORWARD}
    ends = {(a.stage, a.microbatch): place for place, a in enumerate(row) if a.kind in _BACKWARDS}
    return [cell for cell, place in ends.items() if cell not in fixed and place - begun[cell] > 2]


def _inserted(schedule: Schedule, cells: Collection[Cell], ahead: Sequence[int]) -> Schedule:
    """Return the schedule with both actions of the cells; a RELOAD stands `ahead` actions of its device before the backward."""
    rows = []
    for device, row in enumerate(schedule.rows):
        before: dict[int, list[Action]] = {}
        for place, action in enumerate(row):
            if action.kind in _BACKWARDS and (action.stage, action.microbatch) in cells:
                before.setdefault(place - ahead[device], []).append(replace(action, kind=Kind.RELOAD))
        rows.append(
            tuple(
                each for place, action in enumerate(row) for each in _with_copies(action, before.get(place, []), cells)
            )
        )
    return schedule if not cells else replace(schedule, rows=tuple(rows), certificate=None)


def _with_copies(action: Action, reloads: Sequence[Action], cells: Collection[Cell]) -> tuple[Action, ...]:
    is_moved = action.kind is Kind.FORWARD and (action.stage, action.microbatch) in cells
    return (*reloads, action, *([replace(action, kind=Kind.OFFLOAD)] if is_moved else []))


def _does_not_fit(device: int, peak: float, limit: float) -> InfeasibleError:
    return InfeasibleError(
        f"device {device} holds {written(BYTES, peak)} at its peak, {written(BYTES, limit)} are allowed",
        why="all cells that could move to the host are there already",
        hint="more stages, smaller micro-batches, or checkpoint='always'",
    )
