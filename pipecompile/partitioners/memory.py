"""Whether a problem fits at all: the least amount by which every stage's limit must grow for some cut to fit.

    minimise excess    subject to    memory(s) <= limit(s) + excess    for every stage s, and precedence

An excess above 0, proven by the solver, is the proof that nothing fits, and the answer to "how much would".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from time import monotonic

import pulp

from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.partitioners.chain import cut
from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.loads import TOLERANCE, fits, loads
from pipecompile.partitioners.orders import orders
from pipecompile.partitioners.steps import run, steps
from pipecompile.partitioners.windows import windows

__all__ = ["fit"]


def fit(clusters: Clusters, stages: Stages, deadline: float) -> list[int]:
    """A cut that fits in memory. Raises InfeasibleError when it is proven that there is none, with the least limit that
    works; PartitionError when the deadline comes first.
    """
    bare = replace(clusters, flows=())
    cuts = (_along(bare, stages, order) for order in orders(clusters))
    best = min(cuts, key=lambda stage: _excess(clusters, stages, stage))
    proven = _least_by_counting(clusters, stages)
    if not _fits(clusters, stages, best) and _excess(clusters, stages, best) > proven:
        best, proven = _solve(bare, stages, best, proven, deadline)
    if _fits(clusters, stages, best):
        return best
    if proven <= TOLERANCE * min(stages.limit):
        raise PartitionError(f"no cut into {len(stages)} stages that fits in memory was found in time",
                             why="nor is it proven that there is none", hint="a larger time_limit, or more memory")  # fmt: skip
    raise _infeasible(clusters, stages, best, proven)


def _along(bare: Clusters, stages: Stages, order: Sequence[int]) -> list[int]:
    """The cut of an order with the least excess, to 50 bisections of the excess of having all in one stage."""
    best = [0] * len(order)
    low, high = 0.0, _excess(bare, stages, best)
    for _ in range(50):
        middle = (low + high) / 2
        stage = cut(bare, _raised(stages, middle), order)
        low, high, best = (low, middle, stage) if stage is not None else (middle, high, best)
    return best


def _raised(stages: Stages, excess: float) -> Stages:
    return replace(stages, limit=tuple(limit + excess for limit in stages.limit))


def _excess(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> float:
    return max(row.memory - limit for row, limit in zip(loads(clusters, stages, stage), stages.limit, strict=True))


def _fits(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> bool:
    return all(fits(row.memory, limit) for row, limit in zip(loads(clusters, stages, stage), stages.limit, strict=True))


def _held(clusters: Clusters, stages: Stages, cluster: int, stage: int) -> float:
    return clusters.bytes[cluster] + clusters.activation[cluster] * stages.in_flight[stage]


def _least_by_counting(clusters: Clusters, stages: Stages) -> float:
    """The excess that the heaviest cluster needs, and that all clusters need together."""
    ends = range(len(stages))
    alone = max(min(_held(clusters, stages, v, s) - stages.limit[s] for s in ends) for v in range(len(clusters)))
    total = sum(min(_held(clusters, stages, v, s) for s in ends) for v in range(len(clusters)))
    return max(alone, (total - sum(stages.limit)) / len(stages), 0.0)


def _solve(bare: Clusters, stages: Stages, best: list[int], proven: float, deadline: float) -> tuple[list[int], float]:
    """The integer program. Bytes are divided by the incumbent's largest limit."""
    most = _excess(bare, stages, best)
    unit = max(limit for limit in stages.limit if isfinite(limit)) + most
    made = steps(bare, windows(bare, _raised(stages, most), inf), len(stages))
    excess = pulp.LpVariable("excess", proven / unit, most / unit)
    made.model.setObjective(excess + 0)
    for s, limit in enumerate(stages.limit):
        if isfinite(limit):
            held = pulp.lpSum(_held(bare, stages, v, s) / unit * made.inside(v, s) for v in range(len(bare)))
            made.require(excess + limit / unit, held)
    outcome = run(made.model, deadline - monotonic())
    found = [best, made.stages()] if outcome.found else [best]
    best = min(found, key=lambda stage: _excess(bare, stages, stage))
    return best, max(proven, min(outcome.bound * unit, _excess(bare, stages, best)))


def _infeasible(clusters: Clusters, stages: Stages, best: Sequence[int], proven: float) -> InfeasibleError:
    rows = loads(clusters, stages, best)
    excess = _excess(clusters, stages, best)
    binding = max(range(len(stages)), key=lambda s: rows[s].memory - stages.limit[s])
    held, limit = rows[binding].memory, stages.limit[binding]
    closed = excess - proven <= 1e-6 * max(row.memory for row in rows)
    least = f"{excess:.6g} bytes" if closed else f"at least {proven:.6g} bytes, {excess:.6g} are enough"
    if len(set(stages.limit)) == len(set(stages.in_flight)) == 1:
        enough = _enough_stages(clusters, stages)
        hint = f"memory_limit={_number(held)}" + (f", or n_stages={enough}" if enough else "")
    else:
        hint = f"memory_limit=({', '.join(_number(limit + excess) for limit in stages.limit)})"
    return InfeasibleError(
        f"no cut into {len(stages)} stages fits in memory",
        where=_too_large(clusters, stages) or f"stage {binding} would hold {held:.6g} bytes, its limit is {limit:.6g}",
        why=f"proven: every limit must grow by {least}",
        hint=hint,
    )


def _too_large(clusters: Clusters, stages: Stages) -> str:
    """The first cluster that no stage can hold even alone."""
    for v, names in enumerate(clusters.members):
        if not any(fits(_held(clusters, stages, v, s), stages.limit[s]) for s in range(len(stages))):
            need = min(_held(clusters, stages, v, s) for s in range(len(stages)))
            who = (
                f"node {names[0]!r}" if len(names) == 1 else f"nodes {', '.join(map(repr, names))}, which share a stage"
            )
            return f"{who}: {need:.6g} bytes alone, the largest limit is {max(stages.limit):.6g}"
    return ""


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _enough_stages(clusters: Clusters, stages: Stages) -> int | None:
    """The least number of like stages that some order can be cut into by filling one stage after the other."""
    if not all(fits(_held(clusters, stages, v, 0), stages.limit[0]) for v in range(len(clusters))):
        return None
    counts = []
    for order in orders(clusters):
        n_stages, room = 0, 0.0
        for v in order:
            held = _held(clusters, stages, v, 0)
            if held > room:
                n_stages, room = n_stages + 1, stages.limit[0]
            room -= held
        counts.append(n_stages)
    return min(counts)
