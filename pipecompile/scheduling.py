"""The schedule of a pipeline: the one asked for, or with "auto" one that is searched for under the costs in its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipecompile.costs import spec_for
from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.options import Options
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.plan import StageSummary
from pipecompile.schedules import auto_schedule
from pipecompile.simulation.costs import CostOptions

__all__ = ["costs_of", "link_costs", "schedule_of", "searched", "transfer_seconds"]


def link_costs(devices: Sequence[torch.device]) -> tuple[float, float]:
    """Seconds per byte and latency between devices; nothing when all stages share one."""
    if len(set(devices)) == 1:
        return 0.0, 0.0
    spec = spec_for(devices[0])
    return 1.0 / spec.link_bandwidth, spec.link_latency


def transfer_seconds(routes: Sequence[Route], devices: Sequence[torch.device]) -> dict[str, float]:
    """What each route costs the link, one way."""
    per_byte, latency = link_costs(devices)
    return {route.value: latency + route.nbytes * per_byte if per_byte else 0.0 for route in routes}


def costs_of(stages: Sequence[StageSummary], routes: Sequence[Route], devices: Sequence[torch.device]) -> CostOptions:
    """What a simulation takes: the times of stages, what each route costs the link, one way, and the bytes saved."""
    return CostOptions(
        forward=[stage.forward for stage in stages],
        input_grad=[stage.backward / 2 for stage in stages],
        weight_grad=[stage.backward / 2 for stage in stages],
        transfer=transfer_seconds(routes, devices),
        saved_bytes=[stage.saved_bytes for stage in stages],
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
    costs = costs_of(stages, routes, options.devices)
    return advance_recompute(schedule, options.restored, routes=routes, **costs)


def searched(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    n_microbatches: int,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """The fastest that a search finds, and where it puts the stages, if nobody says."""
    but_last = options.checkpoint == "except_last"
    found = auto_schedule(
        options.n_stages,
        n_microbatches,
        n_devices=None if placement else len(options.devices),
        placement=placement,
        routes=routes,
        checkpoint="always" if but_last else options.checkpoint,
        **costs_of(stages, routes, options.devices),
    )
    return _kept(found, n_microbatches - 1) if but_last else found


def _kept(schedule: Schedule, microbatch: int) -> Schedule:
    """Without the recomputations of this micro-batch."""

    def stays(action: Action) -> bool:
        return action.kind is not Kind.RECOMPUTE or action.microbatch != microbatch

    return replace(schedule, rows=tuple(tuple(filter(stays, row)) for row in schedule.rows))
