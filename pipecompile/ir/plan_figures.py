"""The figures of a plan that say the same twice: where they differ, the file was changed by hand.

`stage_of` may be changed by hand: then the plan is legal or not, and its figures are of before.

bottleneck, lower bound, status     the bound is not above the bottleneck, and "optimal" means that the two agree
sent bytes, skips of a stage        those of the routes
device of a stage                   that of the placement
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipecompile.ir.routes import HOST
from pipecompile.text.shown_value import shown

__all__ = ["figure_faults", "moved_stages"]

_TOLERANCE = 1e-5
"""Relative difference of figures that are the same: more than "optimal" allows, and far less than a table shows."""

_AMOUNTS = (
    "forward",
    "backward",
    "parameters",
    "parameter_bytes",
    "saved_bytes",
    "sent_bytes",
    "memory",
    "state_bytes",
    "flops",
)


def figure_faults(plan: Any) -> Iterator[str]:
    """Yield what contradicts itself in a plan whose lists have an entry per stage. Linear in stages times routes."""
    yield from _proof_faults(plan)
    route_faults = list(_route_faults(plan))
    yield from route_faults
    for stage in plan.stages:
        yield from _stage_faults(plan, stage)
        if not route_faults:
            yield from _sent_faults(plan, stage)


def moved_stages(plan: Any) -> list[int]:
    """Return the stages that have another number of nodes than their figures say: nodes were moved by hand."""
    nodes = Counter(plan.stage_of.values())
    return [stage.stage for stage in plan.stages if stage.nodes != nodes[stage.stage]]


def _proof_faults(plan: Any) -> Iterator[str]:
    """Yield what is wrong with the bottleneck, its bound and its status."""
    for name in ("bottleneck", "lower_bound", "unforced"):
        value = getattr(plan, name)
        if value is not None and not 0 <= value < math.inf:
            yield f"{name} is {value}"
    if plan.samples is not None and plan.samples < 1:
        yield f"samples is {plan.samples}"
    if plan.lower_bound > plan.bottleneck * (1 + _TOLERANCE):
        yield f"lower_bound {plan.lower_bound:.6g} is above bottleneck {plan.bottleneck:.6g}"
    if plan.status not in ("optimal", "feasible"):
        yield f"status is {shown(plan.status)}, neither 'optimal' nor 'feasible'"
    elif plan.status == "optimal" and plan.bottleneck > plan.lower_bound * (1 + _TOLERANCE):
        yield f"status is 'optimal', and bottleneck {plan.bottleneck:.6g} is above lower_bound {plan.lower_bound:.6g}"


def _route_faults(plan: Any) -> Iterator[str]:
    """Yield the routes that no cut has: to a stage that is not behind the source, or of a size below 0."""
    for route in plan.routes:
        ends = [end for end in route.consumers if end != HOST]
        stages = (route.source, *ends)
        if any(not HOST <= stage < plan.n_stages for stage in stages) or any(end <= route.source for end in ends):
            yield f"route {shown(route.value)} goes from {route.source} to {list(route.consumers)}"
        if not 0 <= route.nbytes < math.inf:
            yield f"route {shown(route.value)} has {route.nbytes} bytes"


def _stage_faults(plan: Any, stage: Any) -> Iterator[str]:
    device = plan.devices[plan.placement[stage.stage]]
    if stage.device != device:
        yield f"stage {stage.stage} is on {shown(stage.device)}, and its place is {shown(device)}"
    for name in _AMOUNTS:
        value = getattr(stage, name)
        if not 0 <= value < math.inf:
            yield f"stage {stage.stage} has {name} {value}"


def _sent_faults(plan: Any, stage: Any) -> Iterator[str]:
    """Yield what a stage sends and receives by skips, where its routes say something else."""
    own = [route for route in plan.routes if route.source == stage.stage]
    sent = sum(route.nbytes * sum(end != HOST for end in route.consumers) for route in own)
    if not math.isclose(sent, stage.sent_bytes, rel_tol=_TOLERANCE):
        yield f"stage {stage.stage} has sent_bytes {stage.sent_bytes:.6g}, and its routes {sent:.6g}"
    into = sum(end == stage.stage for route in plan.routes for end in route.skips)
    out_of = sum(len(route.skips) for route in own)
    if (into, out_of) != (stage.skips_in, stage.skips_out):
        skips = f"{stage.skips_in}/{stage.skips_out}"
        yield f"stage {stage.stage} has skips {skips} in/out, and its routes {into}/{out_of}"
