"""Costs of the simulator from a measured step: the mean seconds of each kind of action on each stage."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import cast

from pipecompile.errors import InputError
from pipecompile.ir import NO_SLICE, Kind
from pipecompile.ir.timeline import COMPUTE, Timeline
from pipecompile.simulation.costs import CostOptions
from pipecompile.text.input_checks import amount, check_kind

__all__ = ["calibrate"]

_COSTS = {
    Kind.FORWARD: "forward",
    Kind.INPUT_GRAD: "input_grad",
    Kind.WEIGHT_GRAD: "weight_grad",
    Kind.BACKWARD: "backward",
    Kind.RECOMPUTE: "recompute",
}


def calibrate(measured: Timeline) -> CostOptions:
    """Return the costs of `simulate` as a step measured them: `simulate(pipe.program, **calibrate(pipe.measured))`.

    Per stage, the mean seconds of its F, R, B, I and W over the micro-batches: the stage is busy as long as in the step. A kind that no
    stage ran is left out; a stage that did not run a kind has 0 seconds for it. Transfers, launches and bytes are not in a measured step. Raise InputError if it is not
    a timeline of actions, or if stages have no forward in it, as in that of one rank.
    """
    check_kind(measured, Timeline, "pipe.measured, after a step")
    seconds = defaultdict[Kind, dict[int, list[float]]](lambda: defaultdict(list))
    for span in measured.spans:
        if span.track == COMPUTE and (action := span.action) is not None:
            if action.slice != NO_SLICE:
                raise InputError(
                    f"the timeline has {action}, an action on a slice", why="costs are of whole micro-batches"
                )
            seconds[action.kind][action.stage].append(amount(f"the seconds of {action}", span.end - span.start))
    n_stages = 1 + max((stage for stages in seconds.values() for stage in stages), default=-1)
    if not n_stages:
        raise InputError("the timeline has no actions", hint="pipe.measured, after a step")
    if (missing := next((s for s in range(n_stages) if s not in seconds[Kind.FORWARD]), None)) is not None:
        hint = "pipe.gathered() on all ranks, then pc.calibrate(pipe.measured)"
        raise InputError(
            f"the timeline has no forward of stage {missing}", why="a rank measures its own stages", hint=hint
        )
    costs = {
        name: [fmean(seconds[kind][stage]) if seconds[kind][stage] else 0.0 for stage in range(n_stages)]
        for kind, name in _COSTS.items()
        if kind in seconds
    }
    return cast("CostOptions", costs)
