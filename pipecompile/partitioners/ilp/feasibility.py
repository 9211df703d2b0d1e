"""Whether a problem fits at all: the least amount by which every device's limit must grow for some cut to fit.

    minimise excess    subject to    memory(d) <= limit(d) + excess    for every device d, precedence and steering

An excess above 0, proven by the solver, is the proof that nothing fits, and the answer to "how much would".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from time import monotonic

from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.partitioners.bounds.reachability import skeleton
from pipecompile.partitioners.bounds.stage_windows import windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import span_of
from pipecompile.partitioners.dp.linear_order import cut
from pipecompile.partitioners.dp.topological_orders import orders
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.memory_rows import Holdings
from pipecompile.partitioners.ilp.solver_backend import Mip
from pipecompile.partitioners.ilp.step_variables import Steps
from pipecompile.partitioners.ilp.traffic_rows import Traffic
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import TOLERANCE, Ledger, fits

__all__ = ["fit"]

HALVINGS = 40
"""How often the excess of a linear order is halved."""


def fit(clusters: Clusters, stages: Stages, deadline: float) -> list[int]:
    """A cut that fits in memory. Raises InfeasibleError when it is proven that there is none, with the least limit that
    works; PartitionError when the deadline comes first.
    """
    bare = replace(clusters, flows=tuple(replace(flow, time=0.0) for flow in clusters.flows if flow.bytes))
    span = span_of(clusters, len(stages))
    cuts = [_along(bare, stages, order) for order in orders(clusters, span)]
    best = min((stage for stage in cuts if stage), key=lambda stage: _excess(bare, stages, stage), default=None)
    most = inf if best is None else _excess(bare, stages, best)
    proven = _least_by_counting(bare, stages)
    if best is None or (not _fits(bare, stages, best) and most > proven):
        best, proven = _solve(bare, stages, best, proven, deadline)
    if best is not None and _fits(bare, stages, best):
        return best
    if best is None or proven <= TOLERANCE * min(stages.limit):
        raise PartitionError(f"no cut into {len(stages)} stages that fits in memory was found in time",
                             why="nor is it proven that there is none", hint="a larger time_limit, or more memory")  # fmt: skip
    raise _infeasible(bare, stages, best, proven)


def _along(bare: Clusters, stages: Stages, order: Sequence[int]) -> list[int] | None:
    """The cut of an order with the least excess, to so many halvings of the excess of having all in one stage."""
    span = span_of(bare, len(stages))
    free = replace(stages, limit=(inf,) * len(stages.limit))
    best = cut(bare, free, order, span)
    if best is None:
        return None
    low, high = 0.0, max(_excess(bare, stages, best), 0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        stage = cut(bare, stages.raised(middle), order, span)
        if stage is not None and _excess(bare, stages, stage) < high:
            best, high = stage, max(_excess(bare, stages, stage), 0.0)
        else:
            low = middle
        if high - low <= 1e-7 * high:
            break
    return best


def _excess(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> float:
    rows = Ledger(clusters, stages, stage).rows()
    return max(row.memory - limit for row, limit in zip(rows, stages.limit, strict=True))


def _fits(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> bool:
    rows = Ledger(clusters, stages, stage).rows()
    return all(fits(row.memory, limit) for row, limit in zip(rows, stages.limit, strict=True))


def _alone(clusters: Clusters, stages: Stages, cluster: int, stage: int) -> float:
    """What a stage with nothing but this cluster holds, tensors it receives apart."""
    flying = stages.in_flight[stage]
    once = stages.recompute[stage] is True or (stages.recompute[stage] is None and flying > 1)
    return clusters.bytes[cluster] + clusters.activation[cluster] * (1.0 if once else flying)


def _least_by_counting(clusters: Clusters, stages: Stages) -> float:
    """The excess that the heaviest cluster needs, and that all clusters need together."""
    ends, limit = range(len(stages)), [stages.limit[d] for d in stages.device]
    alone = max(min(_alone(clusters, stages, v, s) - limit[s] for s in ends) for v in range(len(clusters)))
    total = sum(min(_alone(clusters, stages, v, s) for s in ends) for v in range(len(clusters)))
    used = set(stages.device)
    return max(alone, (total - sum(stages.limit[d] for d in used)) / len(used), 0.0)


def _solve(
    bare: Clusters, stages: Stages, best: list[int] | None, proven: float, deadline: float
) -> tuple[list[int] | None, float]:
    """The integer program. Bytes are divided by the largest limit and the incumbent's excess."""
    most = _excess(bare, stages, best) if best is not None else _everything(bare, stages)
    finite = [limit for limit in stages.limit if isfinite(limit)]
    unit = (max(finite) + most) or 1.0
    left = windows(bare, stages.raised(most), inf)
    if left.empty:
        return best, proven
    mip = Mip()
    steps = Steps(mip, left.first.tolist(), left.last.tolist())
    boundaries = range(-1, len(stages))
    steps.rise(range(len(bare)), boundaries)
    steps.order(skeleton(bare), left.apart, boundaries)
    excess = mip.variable(proven / unit, most / unit)
    holdings = Holdings(
        steps, bare, stages, Traffic(steps, bare, stages, Readers(bare, left), 1.0), inf, unit, max(finite) + most
    )
    for d, limit in enumerate(stages.limit):
        if isfinite(limit):
            mip.require(excess + limit / unit, holdings.memory(d))
    outcome = mip.minimise(excess, deadline - monotonic())
    if outcome.values is not None:
        found = steps.stages(outcome.values)
        best = found if best is None else min(best, found, key=lambda stage: _excess(bare, stages, stage))
    if best is None:
        return None, proven
    return best, max(proven, min(outcome.bound * unit, _excess(bare, stages, best)))


def _everything(clusters: Clusters, stages: Stages) -> float:
    """What one device would hold of all clusters, all flows and all that is shared."""
    flying = max(1.0, *stages.in_flight)
    held = sum(clusters.bytes) + sum(size for _, size in clusters.shared)
    flows = sum(flow.bytes * len(flow.consumers) for flow in clusters.flows)
    return held + flying * (sum(clusters.activation) + flows)


# -- the message ----------------------------------------------------------------------------------------------------


def _infeasible(clusters: Clusters, stages: Stages, best: Sequence[int], proven: float) -> InfeasibleError:
    rows = Ledger(clusters, stages, best).rows()
    excess = _excess(clusters, stages, best)
    binding = max(range(len(rows)), key=lambda d: rows[d].memory - stages.limit[d])
    held, limit = rows[binding].memory, stages.limit[binding]
    closed = excess - proven <= 1e-6 * max(row.memory for row in rows)
    least = f"{excess:.6g} bytes" if closed else f"at least {proven:.6g} bytes, {excess:.6g} are enough"
    unit = "stage" if stages.direct else "device"
    too_large = _too_large(clusters, stages)
    return InfeasibleError(
        f"no cut into {len(stages)} stages fits in memory",
        where=too_large or f"{unit} {binding} would hold {held:.6g} bytes, its limit is {limit:.6g}",
        why=f"proven: every limit must grow by {least}",
        hint=", or ".join(_ways_out(clusters, stages, held, excess)),
    )


def _ways_out(clusters: Clusters, stages: Stages, held: float, excess: float) -> list[str]:
    """What would make it fit: larger limits, more stages, recomputation."""
    if len(set(stages.limit)) == 1:
        ways = [f"memory_limit={_number(held)}"]
    else:
        ways = [f"memory_limit=({', '.join(_number(limit + excess) for limit in stages.limit)})"]
    if stages.alike and (enough := _enough_stages(clusters, stages)):
        ways.append(f"n_stages={enough}")
    free = replace(stages, recompute=tuple(redone or None for redone in stages.recompute))
    if free != stages and (found := _cut_in_any_order(clusters, free)) is not None:
        redone = [s for s, again in enumerate(Ledger(clusters, free, found).recompute()) if again]
        ways.append(f'recompute="auto": with stages {", ".join(map(str, redone))} recomputing it fits')
    return ways


def _too_large(clusters: Clusters, stages: Stages) -> str:
    """The first cluster that no stage can hold even alone."""
    limit = [stages.limit[d] for d in stages.device]
    for v, names in enumerate(clusters.members):
        if not any(fits(_alone(clusters, stages, v, s), limit[s]) for s in range(len(stages))):
            need = min(_alone(clusters, stages, v, s) for s in range(len(stages)))
            who = (
                f"node {names[0]!r}" if len(names) == 1 else f"nodes {', '.join(map(repr, names))}, which share a stage"
            )
            return f"{who}: {need:.6g} bytes alone, the largest limit is {max(limit):.6g}"
    return ""


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _cut_in_any_order(clusters: Clusters, stages: Stages) -> list[int] | None:
    """A cut that fits, if one of the linear orders has one."""
    span = span_of(clusters, len(stages))
    for order in orders(clusters, span):
        stage = cut(clusters, stages, order, span)
        if stage is not None and _fits(clusters, stages, stage):
            return stage
    return None


def _enough_stages(clusters: Clusters, stages: Stages) -> int | None:
    """The least number of like stages that some linear order can be cut into."""
    low, high = len(stages), len(clusters) + len(stages)
    if _cut_in_any_order(clusters, stages.times(high)) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _cut_in_any_order(clusters, stages.times(middle)) else (middle, high)
    return high
