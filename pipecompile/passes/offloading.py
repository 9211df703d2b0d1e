"""Offloading: the host holds what a forward saved, from OFFLOAD directly after it to RELOAD shortly before its backward.

    before   0F0            0F1 0F2 0B0 0B1 0B2
    after    0F0 0OFFLOAD0  0F1 0OFFLOAD1  0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2      stage 0, of which 2B follows 2F too soon

A RELOAD stands one action before the backward, so that its copy runs beside that action. Wan et al., "PipeOffload: Improving
Scalability of Pipeline Parallelism with Memory Optimization", 2025 (arXiv 2503.01328), offload all cells, or those that wait
longest. `offload_to_fit` takes of all cells in memory at a peak the one whose backward comes last, as Belady's rule evicts pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import BACKWARDS, Action, Kind, Route, Schedule
from pipecompile.ir.overlap import grouped
from pipecompile.ir.slices import check_whole
from pipecompile.ir.timeline import Span
from pipecompile.passes.memory_fit import check_schedule, checked_stages, does_not_fit, first_over
from pipecompile.simulation.costs import CostOptions
from pipecompile.simulation.simulator import simulate
from pipecompile.text.input_checks import amounts

__all__ = ["insert_offload", "offload_to_fit"]

_MORE = "more stages, smaller micro-batches, or checkpoint='always'"

_OF_SLICES = "offloading moves whole micro-batches"
_WHY_WHOLE = "later slices read the keys and values of a slice, which would move to the host with it"

Cell = tuple[int, int]
"""(stage, micro-batch)."""


def insert_offload(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Return the schedule with OFFLOAD and RELOAD for every cell of these stages, by default of all.

    Cells that are recomputed or offloaded already stay as they are, and so do cells with fewer than two actions between forward and
    backward: no copy would be over in time. Raise InputError if an argument has another type, ScheduleError if a stage
    does not exist or the schedule has slices, and VerifyError if the schedule is not legal.
    """
    check_schedule(schedule, None)
    check_whole(schedule, _OF_SLICES, why=_WHY_WHOLE)
    wanted = frozenset(range(schedule.n_stages)) if stages is None else checked_stages(stages, schedule.n_stages)
    return _inserted(schedule, {cell for cell in _movable(schedule) if cell[0] in wanted}, [1] * schedule.n_devices)


def offload_to_fit(
    schedule: Schedule,
    memory_limit: float | Sequence[float],
    *,
    routes: Sequence[Route] | None = None,
    **costs: Unpack[CostOptions],
) -> Schedule:
    """Return the schedule with OFFLOAD and RELOAD for as few cells as the greedy choice needs to fit into `memory_limit`.

    `memory_limit` is in bytes, one number or one per device; it counts what `simulate` counts with these costs: what stages save,
    and parameters. Raise InfeasibleError if no more cell can move, InputError if `schedule` is not a Schedule or a cost or limit
    is not a number, ScheduleError if the schedule has slices, and VerifyError if the schedule is not legal.
    """
    check_schedule(schedule, routes)
    check_whole(schedule, _OF_SLICES, why=_WHY_WHOLE)
    limit = amounts("memory_limit", memory_limit, schedule.n_devices, "device")
    if costs.get("saved_bytes") is None:
        raise InputError(
            "saved_bytes is missing", why="without it nothing takes memory", hint="saved_bytes=[...] per stage"
        )
    movable, cells, ahead = _movable(schedule), set[Cell](), [1] * schedule.n_devices
    while True:
        candidate = _inserted(schedule, cells, ahead)
        timeline = simulate(candidate, routes=routes, **costs)
        times = [first_over(curve, most) for curve, most in zip(timeline.memory, limit, strict=True)]
        over = [(device, when) for device, when in enumerate(times) if when is not None]
        if not over:
            return candidate
        for device, when in over:
            spans = [span for span in timeline.spans if span.track == "compute" and span.device == device]
            if (cell := _latest_resident(schedule.rows[device], spans, when, movable - cells)) is not None:
                cells.add(cell)
            elif ahead[device]:
                ahead[device] = 0
            else:
                why, hint = "all cells that could move to the host are there already", _MORE
                raise does_not_fit(device, timeline.peak_memory[device], limit[device], why, hint)


def _latest_resident(
    row: Sequence[Action], spans: Iterable[Span], when: float, movable: Collection[Cell]
) -> Cell | None:
    """Return the movable cell of a device whose forward ended by `when` and whose backward is the last; None if there is none.

    `row` has the actions of the device without the copies, and `spans` those of its timeline.
    """
    times = {span.name: span for span in spans}
    later = [
        (times[str(action)].start, (action.stage, action.microbatch))
        for action in row
        if action.kind in BACKWARDS and (action.stage, action.microbatch) in movable
        and times[str(replace(action, kind=Kind.FORWARD))].end <= when < times[str(action)].start
    ]  # fmt: skip
    return max(later)[1] if later else None


def _movable(schedule: Schedule) -> set[Cell]:
    """Return the cells that keep what they save on the device, with two actions or more between forward and backward."""
    cells = set[Cell]()
    for row in schedule.rows:
        fixed = {(a.stage, a.microbatch) for a in row if a.kind in (Kind.RECOMPUTE, Kind.OFFLOAD)}
        begun = {(a.stage, a.microbatch): place for place, a in enumerate(row) if a.kind is Kind.FORWARD}
        ends = {(a.stage, a.microbatch): place for place, a in enumerate(row) if a.kind in BACKWARDS}
        cells |= {cell for cell, place in ends.items() if cell not in fixed and place - begun[cell] > 2}
    return cells


def _inserted(schedule: Schedule, cells: Collection[Cell], ahead: Sequence[int]) -> Schedule:
    """Return the schedule with both actions of the cells; a RELOAD stands `ahead` actions of its device before the backward. Neither
    comes between two actions that overlap.
    """
    rows = []
    for device, row in enumerate(schedule.rows):
        before: dict[int, list[Action]] = {}
        for place, action in enumerate(row):
            if action.kind in BACKWARDS and (action.stage, action.microbatch) in cells:
                before.setdefault(place - ahead[device], []).append(replace(action, kind=Kind.RELOAD))
        rows.append(tuple(_with_copies(grouped(row, schedule.overlaps), before, cells)))
    return schedule if not cells else replace(schedule, rows=tuple(rows), certificate=None)


def _with_copies(
    groups: Iterable[Sequence[Action]], reloads: Mapping[int, Sequence[Action]], cells: Collection[Cell]
) -> Iterator[Action]:
    """Yield the actions of a row with the RELOADs before and the OFFLOADs after them. `reloads` maps places of the row."""
    place = 0
    for group in groups:
        for each in range(place, place + len(group)):
            yield from reloads.get(each, ())
        yield from group
        for action in group:
            if action.kind is Kind.FORWARD and (action.stage, action.microbatch) in cells:
                yield replace(action, kind=Kind.OFFLOAD)
        place += len(group)
