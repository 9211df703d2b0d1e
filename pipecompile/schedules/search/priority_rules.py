"""Candidate priority rules for list scheduling: the most promising first, with variety among the first few.

in flight     a stage needs as many micro-batches in flight as its time from F to I has periods of the bottleneck device. Some
              more even out irregular arrivals; many more only take memory
order         forwards or backwards first; of the backwards, later or earlier stages first
max delay     how long a W may delay a more urgent action
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, inf

from pipecompile.schedules.search.list_scheduling import PriorityRule
from pipecompile.schedules.search.workload import Workload

__all__ = ["candidate_rules", "needed_in_flight"]

_STRETCH = (inf, 3.0, 1.25, 2.0, 1.5, 1.1, 1.0, 0.75)
"""Factors on the number of micro-batches in flight that a stage needs; the order of trial."""

_MAX_DELAY = (1.0, 0.5, 0.0)
"""Shares of its own duration by which a W may delay a more urgent action; the order of trial."""

_FIRST = 1e6
"""Rank offset that puts all forwards before all backwards, or after."""


def candidate_rules(workload: Workload, n_microbatches: int) -> Iterator[PriorityRule]:
    """Yield all 48 rules (96 if a device has several stages), sorted by the sum of their indices in the tables above."""
    counts = needed_in_flight(workload)
    stages = range(workload.n_stages)
    forward = tuple(float(-s) for s in stages)
    chunks = 2 if workload.n_stages > workload.n_devices else 1
    choices = product(*map(range, (len(_STRETCH), len(_MAX_DELAY), 2, chunks)))
    for nth, delay, forward_first, shallow in sorted(choices, key=sum):
        stretch, deep = _STRETCH[nth], not shallow
        backward = tuple((-s if deep else s) + (_FIRST if forward_first else -_FIRST) for s in stages)
        quotas = tuple(max(1.0, min(n_microbatches, _stretched(stretch, count))) for count in counts)
        yield PriorityRule(quotas, forward, backward, _MAX_DELAY[delay])


def _stretched(stretch: float, count: float) -> float:
    """Return ceil(stretch * count); infinity for an infinite `stretch`, also if `count` is 0."""
    return stretch if stretch == inf else ceil(stretch * count - 1e-9)


def needed_in_flight(workload: Workload) -> list[float]:
    """Return, per stage, the time from the start of F to the end of I in periods of the bottleneck device.

    As many micro-batches have to be in flight to keep the bottleneck device busy.
    """
    stages = range(workload.n_stages)
    loads = [0.0] * workload.n_devices
    for s in stages:
        recompute = workload.recompute[s] if workload.is_recomputed[s] else 0.0
        loads[workload.placement[s]] += (
            workload.forward[s] + workload.input_grad[s] + workload.weight_grad[s] + recompute
        )
    latency = [0.0 for _ in stages]
    for s in reversed(stages):
        rest = max((2 * t.seconds + latency[c] for t in workload.forward_transfers[s] for c in t.stages), default=0.0)
        latency[s] = workload.forward[s] + workload.input_grad[s] + rest
    bottleneck = max(*loads, 1e-300)
    return [time / bottleneck for time in latency]
