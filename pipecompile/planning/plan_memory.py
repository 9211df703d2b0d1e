"""Check the memory of the user's plan against `memory_limit`, by the figures of the plan, since nothing is solved with a plan.

device    of each of its stages, parameters and buffers, and per micro-batch in flight what forwards save and what is received
samples   bytes of a micro-batch grow with its samples, where the plan says how many its figures are for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pipecompile.errors import InfeasibleError
from pipecompile.ir import HOST, Route
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.options import Options
from pipecompile.partitioners.objective import fits
from pipecompile.partitioners.verify import memory_text
from pipecompile.planning.draft import peak_in_flight
from pipecompile.planning.schedule_choice import make_schedule

__all__ = ["check_plan_memory"]


def check_plan_memory(plan: Plan, options: Options, n_microbatches: int, samples: int | None) -> None:
    """Raise InfeasibleError if a device of the plan holds more than its limit. Parameters that are gathered for a while are not part of the
    plan's figures: their schedule is fitted to the limit by itself.
    """
    limit = options.memory_limit
    if limit is None or options.reshard_after_forward:
        return
    held = _held_bytes(plan, options.with_recompute(plan.recompute), n_microbatches, samples)
    limits = limit if isinstance(limit, tuple) else (limit,) * len(held)
    over = [
        f"device {device} would hold {memory_text(size)}, its limit is {memory_text(limits[device])}"
        for device, size in enumerate(held)
        if not fits(size, limits[device])
    ]
    if over:
        enough = [max(ceil(size), int(given)) for size, given in zip(held, limits, strict=True)]
        needed = str(enough) if isinstance(limit, tuple) else str(max(enough))
        raise InfeasibleError(
            "the stages of the plan do not fit in memory",
            where="; ".join(over),
            why="these are the figures of the plan, and nothing is solved with one",
            hint=f"no plan, which looks for a cut that fits, or memory_limit={needed}",
        )


def _held_bytes(plan: Plan, options: Options, n_microbatches: int, samples: int | None) -> list[float]:
    """Return the bytes that each device holds at its peak. A schedule that is searched later has one micro-batch in flight at least."""
    scale = samples / plan.samples if samples and plan.samples else 1.0
    in_flight: Sequence[float] = (1.0,) * plan.n_stages
    if options.schedule != "auto":
        stages = [_scaled(stage, scale) for stage in plan.stages]
        schedule = make_schedule(options, stages, plan.routes, plan.placement, n_microbatches)
        in_flight = peak_in_flight(schedule, options)
    flags = options.recompute if isinstance(options.recompute, tuple) else (False,) * plan.n_stages
    restored, held = options.restored_at_once(n_microbatches), [0.0] * len(plan.devices)
    for device, stage, again, count in zip(plan.placement, plan.stages, flags, in_flight, strict=True):
        saved = (min(restored, count) if again else count) * stage.saved_bytes
        received = count * _received_bytes(plan.routes, stage.stage)
        held[device] += stage.state_bytes + scale * (saved + received)
    return held


def _received_bytes(routes: Sequence[Route], stage: int) -> float:
    return sum(route.nbytes for route in routes if route.source != HOST and stage in route.consumers)


def _scaled(stage: StageSummary, scale: float) -> StageSummary:
    """Return a stage with the bytes of larger or smaller micro-batches, as far as a schedule depends on them."""
    return replace(
        stage,
        saved_bytes=stage.saved_bytes * scale,
        received_bytes=stage.received_bytes * scale,
        weight_saved_bytes=None if stage.weight_saved_bytes is None else stage.weight_saved_bytes * scale,
    )
