"""The tastes that are tried in list schedules, the most promising first, and such as differ from each other.

in flight   a stage needs as many micro-batches as the time from its F to its I has periods; a little more evens out
            what comes unevenly, much more costs memory alone
order       forwards or backwards first; of the backwards those of later or of earlier stages
patience    how long somebody may wait for a W
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, inf

from pipecompile.schedules.search.list_scheduling import Taste
from pipecompile.schedules.search.workload import Work

__all__ = ["periods", "tastes"]

_STRETCH = (inf, 3.0, 1.25, 2.0, 1.5, 1.1, 1.0, 0.75)
_PATIENCE = (1.0, 0.5, 0.0)
_FIRST = 1e6


def tastes(work: Work, n_microbatches: int) -> Iterator[Taste]:
    """All of them, a few dozen."""
    counts = periods(work)
    stages = range(work.n_stages)
    forward = tuple(float(-s) for s in stages)
    chunks = 2 if work.n_stages > work.n_devices else 1
    choices = product(*map(range, (len(_STRETCH), len(_PATIENCE), 2, chunks)))
    for nth, patience, forward_first, shallow in sorted(choices, key=sum):
        stretch, deep = _STRETCH[nth], not shallow
        backward = tuple((-s if deep else s) + (_FIRST if forward_first else -_FIRST) for s in stages)
        quotas = tuple(max(1.0, min(n_microbatches, _ceil(stretch, count))) for count in counts)
        yield Taste(quotas, forward, backward, _PATIENCE[patience])


def _ceil(stretch: float, count: float) -> float:
    """Endless is endless, also of the count of a stage that takes no time, 0."""
    return stretch if stretch == inf else ceil(stretch * count - 1e-9)


def periods(work: Work) -> list[float]:
    """Per stage, from the start of its F to the end of its I, in periods of the busiest device: as many are in flight."""
    stages = range(work.n_stages)
    loads = [0.0] * work.n_devices
    for s in stages:
        again = work.recompute[s] if work.again[s] else 0.0
        loads[work.placement[s]] += work.forward[s] + work.input_grad[s] + work.weight_grad[s] + again
    down = [0.0 for _ in stages]
    for s in reversed(stages):
        rest = max((2 * p.seconds + down[c] for p in work.ahead[s] for c in p.stages), default=0.0)
        down[s] = work.forward[s] + work.input_grad[s] + rest
    busiest = max(*loads, 1e-300)
    return [time / busiest for time in down]
