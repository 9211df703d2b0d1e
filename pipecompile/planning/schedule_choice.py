"""The schedule of a pipeline: the one asked for, or with "auto" one that is searched for under the costs in its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from pipecompile.costs.links import Links
from pipecompile.ir import HOST, Action, Kind, Route, Schedule
from pipecompile.ir.plan import StageSummary
from pipecompile.options import Options
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.schedules import auto_schedule
from pipecompile.simulation.costs import CostOptions

__all__ = ["costs_of", "schedule_of", "searched"]


def costs_of(
    stages: Sequence[StageSummary], routes: Sequence[Route], links: Links, placement: Sequence[int] | None
) -> CostOptions:
    """What a simulation takes: the times of stages, what each route costs its link, one way, and the bytes saved."""
    return CostOptions(
        forward=[stage.forward for stage in stages],
        input_grad=[stage.input_grad for stage in stages],
        weight_grad=[stage.weight_grad for stage in stages],
        backward=[stage.backward for stage in stages],
        transfer=links.seconds(routes, placement),
        saved_bytes=[stage.held_bytes for stage in stages],
        weight_saved_bytes=[
            stage.held_bytes if stage.weight_saved_bytes is None else stage.weight_saved_bytes for stage in stages
        ],
    )


def schedule_of(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int],
    n_microbatches: int,
) -> Schedule:
    """What a step runs, recomputations as early as the devices have time for them."""
    if options.schedule == "auto":
        return searched(options, stages, routes, n_microbatches, placement)
    schedule = options.schedule_for(n_microbatches)
    if options.checkpoint == "never" or options.restored == 1:
        return schedule
    costs = costs_of(stages, routes, options.links, placement)
    return advance_recompute(schedule, options.restored, routes=routes, **costs)


def searched(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    n_microbatches: int,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """The fastest that a search finds within the memory limit, and where it puts the stages, if nobody says."""
    but_last = options.checkpoint == "except_last"
    found = auto_schedule(
        options.n_stages,
        n_microbatches,
        n_devices=None if placement else len(options.devices),
        placement=placement,
        routes=routes,
        checkpoint="always" if but_last else options.checkpoint,
        in_flight=_room(options, stages, routes, placement, n_microbatches),
        **costs_of(stages, routes, options.links, placement),
    )
    return _kept(found, n_microbatches - 1) if but_last else found


def _room(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int] | None,
    n_microbatches: int,
) -> list[float] | None:
    """How many micro-batches each device may have in flight, as the cut counts what they hold; None without a limit."""
    limit = options.memory_limit
    if limit is None or placement is None:
        return None
    flags = options.recompute if isinstance(options.recompute, tuple) else (False,) * len(stages)
    limits = limit if isinstance(limit, tuple) else (limit,) * len(options.devices)
    room, each, restored = list(map(float, limits)), [0.0] * len(limits), options.restored_at_once(n_microbatches)
    for device, stage, again in zip(placement, stages, flags, strict=True):
        received = sum(way.nbytes for way in routes if way.source != HOST and stage.stage in way.consumers)
        room[device] -= stage.state_bytes + again * restored * stage.saved_bytes
        each[device] += received + (not again) * stage.saved_bytes
    return [free / held if held else inf for free, held in zip(room, each, strict=True)]


def _kept(schedule: Schedule, microbatch: int) -> Schedule:
    """Without the recomputations of this micro-batch."""

    def stays(action: Action) -> bool:
        return action.kind is not Kind.RECOMPUTE or action.microbatch != microbatch

    return replace(schedule, rows=tuple(tuple(filter(stays, row)) for row in schedule.rows))
