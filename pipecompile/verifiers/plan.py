"""Verifier of plans: consistent counts, existing stages and devices, and a cut that the graph allows.

a plan by itself    stage numbers, placement and routes within range, one summary per stage
on its graph        every edge goes to the same or a later stage; tied nodes share a stage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipecompile.errors import PlanError, VerifyError
from pipecompile.ir import HOST
from pipecompile.ir.plan import Plan

__all__ = ["verify_cut", "verify_plan"]


def verify_plan(plan: Plan) -> None:
    """Raise PlanError with all faults of the plan as data."""
    stages, devices = range(plan.n_stages), range(len(plan.devices))
    faults = [f"node {name} is in stage {stage}" for name, stage in plan.stage_of.items() if stage not in stages]
    if len(plan.placement) != plan.n_stages:
        faults.append(f"placement lists {_count(len(plan.placement), 'stage')}")
    faults += [f"placement puts stage {s} on device {d}" for s, d in enumerate(plan.placement) if d not in devices]
    if len(plan.stages) != plan.n_stages:
        faults.append(f"{_count(len(plan.stages), 'stage')} {'is' if len(plan.stages) == 1 else 'are'} summarised")
    for route in plan.routes:
        ends = (route.source, *route.consumers)
        if any(end != HOST and end not in stages for end in ends):
            faults.append(f"route {route.value} goes from {route.source} to {list(route.consumers)}")
    if faults:
        why = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise PlanError(
            f"the plan is damaged: it has {_count(plan.n_stages, 'stage')} on {_count(len(plan.devices), 'device')}",
            why=why,
            hint="compile without plan= to compute a new plan",
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def verify_cut(
    stage_of: Mapping[str, int], edges: Iterable[tuple[str, str]], groups: Iterable[Sequence[str]], n_stages: int
) -> None:
    """Raise VerifyError with every edge to an earlier stage, every tie that is cut, and every stage that does not
    exist.
    """
    faults = [f"{name} is in stage {s} of {n_stages}" for name, s in stage_of.items() if not 0 <= s < n_stages]
    for a, b in edges:
        if stage_of[a] > stage_of[b]:
            faults.append(f"{b} in stage {stage_of[b]} needs {a}, which the later stage {stage_of[a]} computes")
    for group in groups:
        stages = sorted({stage_of[name] for name in group})
        if len(stages) > 1:
            faults.append(f"{', '.join(group)} share memory and are in stages {stages}")
    if faults:
        raise VerifyError("cut", faults)
