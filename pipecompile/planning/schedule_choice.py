"""The schedule of a pipeline: the one that the options name, or with "auto" the result of a search under the costs in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from pipecompile.costs.device_specs import PCIE4, Links
from pipecompile.errors import InfeasibleError
from pipecompile.ir import HOST, Action, Kind, Route, Schedule
from pipecompile.ir.plan import StageSummary
from pipecompile.ir.routes import stages_after
from pipecompile.ir.training_routes import training_routes
from pipecompile.options import Options
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.passes.offloading import insert_offload, offload_to_fit
from pipecompile.passes.sharding import shard_to_fit
from pipecompile.schedules import auto_schedule
from pipecompile.schedules.building_blocks import chain_after
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.simulation.costs import CostOptions, make_costs

SLOWER = 1.001
"""Ratio of step times above which the order of a chain is preferred."""

__all__ = ["make_schedule", "offload_seconds", "search_schedule", "sharding_bytes", "simulation_costs"]


def simulation_costs(
    stages: Sequence[StageSummary], routes: Sequence[Route], links: Links, placement: Sequence[int] | None
) -> CostOptions:
    """Return the costs that a simulation takes: seconds per stage and per route, one way, saved bytes per stage, and the
    bandwidth of the host.
    """
    return CostOptions(
        forward=[stage.forward for stage in stages],
        input_grad=[stage.input_grad for stage in stages],
        weight_grad=[stage.weight_grad for stage in stages],
        backward=[stage.backward for stage in stages],
        transfer=links.seconds(routes, placement),
        host_bandwidth=_host_bandwidth(links),
        saved_bytes=[stage.held_bytes for stage in stages],
        weight_saved_bytes=[
            stage.held_bytes if stage.weight_saved_bytes is None else stage.weight_saved_bytes for stage in stages
        ],
    )


def offload_seconds(stages: Sequence[StageSummary], links: Links) -> list[float]:
    """Return, per stage, the seconds of a copy of what its forward saved to the host or back over PCIe 4.0; 0 where all devices share
    one memory.
    """
    return [stage.held_bytes / _host_bandwidth(links) for stage in stages]


def _host_bandwidth(links: Links) -> float:
    """Return the bytes/s of copies from and to the host: those of PCIe 4.0; infinite where all devices share one memory."""
    return PCIE4 if links.seconds_per_byte else inf


def make_schedule(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int],
    n_microbatches: int,
    *,
    exact: bool = False,
) -> Schedule:
    """Return the schedule of a step, with recomputations as early as the devices have time for them. Stages that do not depend on
    each other along `routes` run beside each other. `exact`: the exact back end improves a searched schedule, which a candidate
    needs not.
    """
    if options.schedule == "auto":
        return search_schedule(options, stages, routes, n_microbatches, placement, exact=exact)
    if options.reshard_after_forward and options.memory_limit is not None:
        return _resharded(options, stages, routes, placement, n_microbatches)
    if options.offload:
        return _offloaded(options, stages, routes, placement, n_microbatches)
    schedule = _schedule_of_dag(options, stages, routes, placement, n_microbatches)
    if options.checkpoint == "never" or options.restored == 1:
        return schedule
    costs = simulation_costs(stages, routes, options.links, placement)
    return advance_recompute(schedule, options.restored, routes=routes, **costs)


def sharding_bytes(stages: Sequence[StageSummary]) -> CostOptions:
    """Return the bytes of each stage from UNSHARD to RESHARD, and of its gradients until REDUCE_GRAD."""
    sizes = [stage.parameter_bytes for stage in stages]
    return CostOptions(unsharded_bytes=sizes, gradient_bytes=sizes)


def _resharded(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int],
    n_microbatches: int,
) -> Schedule:
    """Return the schedule that gathers parameters as rarely as the memory limit allows. Raise InfeasibleError."""
    whole = make_schedule(replace(options, reshard_after_forward=False), stages, routes, placement, n_microbatches)
    costs = simulation_costs(stages, routes, options.links, placement) | sharding_bytes(stages)
    costs |= {"parameter_bytes": [stage.state_bytes for stage in stages]}
    return shard_to_fit(whole, options.memory_limit, routes=routes, **costs)  # type: ignore[arg-type]


def _offloaded(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int],
    n_microbatches: int,
) -> Schedule:
    """Return the schedule with as few copies to the host as the memory limit demands; with all where that is not enough, for which
    the cut was solved, or where there is no limit.
    """
    if options.memory_limit is None:
        return _schedule_of_dag(options, stages, routes, placement, n_microbatches)
    resident = _schedule_of_dag(replace(options, offload=False), stages, routes, placement, n_microbatches)
    costs = simulation_costs(stages, routes, options.links, placement)
    costs |= {"parameter_bytes": [stage.state_bytes for stage in stages]}
    costs |= {"offload": offload_seconds(stages, options.links)}
    try:
        return offload_to_fit(resident, options.memory_limit, routes=routes, **costs)
    except InfeasibleError:
        return insert_offload(resident)


def _schedule_of_dag(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int],
    n_microbatches: int,
) -> Schedule:
    """Return the schedule that warms up by the depth of stages, unless that of a chain is faster and memory is not limited: where
    stages take unequal times, more micro-batches in flight even them out.
    """
    by_depth = options.schedule_for(n_microbatches, routes=routes)
    if options.memory_limit is not None or stages_after(options.n_stages, routes) == chain_after(options.n_stages):
        return by_depth
    chain = options.schedule_for(n_microbatches)
    if chain == by_depth or chain.placement != tuple(placement):
        return by_depth
    moved = training_routes(routes, options.n_stages, with_target=False)
    costs = make_costs(
        options.n_stages,
        len(options.devices),
        moved,
        (),
        by_depth.n_slices,
        **simulation_costs(stages, moved, options.links, placement),
    )
    evaluator = Evaluator(chain.placement, moved, costs, None)
    is_slower = evaluator.seconds(by_depth) > evaluator.seconds(chain) * SLOWER
    return chain if is_slower else by_depth


def search_schedule(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    n_microbatches: int,
    placement: Sequence[int] | None = None,
    *,
    exact: bool = False,
) -> Schedule:
    """Return the fastest schedule that a search finds within the memory limit. Without a placement, the search chooses one."""
    but_last = options.checkpoint == "except_last"
    schedule = auto_schedule(
        options.n_stages,
        n_microbatches,
        n_devices=None if placement else len(options.devices),
        placement=placement,
        routes=routes,
        exact=exact,
        checkpoint="always" if but_last else options.checkpoint,
        in_flight=_room(options, stages, routes, placement, n_microbatches),
        **simulation_costs(stages, routes, options.links, placement),
    )
    return _without_recompute(schedule, n_microbatches - 1) if but_last else schedule


def _room(
    options: Options,
    stages: Sequence[StageSummary],
    routes: Sequence[Route],
    placement: Sequence[int] | None,
    n_microbatches: int,
) -> list[float] | None:
    """Return how many micro-batches each device may have in flight, by the bytes that the cut counts; None without a limit."""
    limit = options.memory_limit
    if limit is None or placement is None:
        return None
    flags = options.recompute if isinstance(options.recompute, tuple) else (False,) * len(stages)
    limits = limit if isinstance(limit, tuple) else (limit,) * len(options.devices)
    room, each, restored = list(map(float, limits)), [0.0] * len(limits), options.restored_at_once(n_microbatches)
    for device, stage, again in zip(placement, stages, flags, strict=True):
        received = sum(r.nbytes for r in routes if r.source != HOST and stage.stage in r.consumers)
        room[device] -= stage.state_bytes + again * restored * stage.saved_bytes
        each[device] += received + (not again) * stage.saved_bytes
    return [max(0.0, free / held) if held else inf for free, held in zip(room, each, strict=True)]


def _without_recompute(schedule: Schedule, microbatch: int) -> Schedule:
    """Return the schedule without the recomputations of one micro-batch."""

    def stays(action: Action) -> bool:
        return action.kind is not Kind.RECOMPUTE or action.microbatch != microbatch

    return replace(schedule, rows=tuple(tuple(filter(stays, row)) for row in schedule.rows), certificate=None)
