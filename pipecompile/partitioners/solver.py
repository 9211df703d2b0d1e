"""The way from a problem to a partition: bound, dynamic program, integer program, in this order until bound meets cut."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Literal

from pipecompile.errors import InputError
from pipecompile.partitioners.bounds import lower_bound
from pipecompile.partitioners.clusters import Clusters, Stages, coarsen
from pipecompile.partitioners.dp import bottleneck, search
from pipecompile.partitioners.ilp import GAP, improve
from pipecompile.partitioners.loads import verify_assignment
from pipecompile.partitioners.memory import fit
from pipecompile.partitioners.problem import Problem

__all__ = ["METHODS", "Partition", "partition"]

METHODS = ("auto", "dp", "ilp")


@dataclass(frozen=True, slots=True)
class Partition:
    """The stage of every node. No partition has a bottleneck below `lower_bound`; `status` is "optimal" when the two agree
    to one part in a million. `method` is what found the cut or closed the gap."""

    stage_of: dict[str, int]
    bottleneck: float
    lower_bound: float
    status: Literal["optimal", "feasible"]
    method: str
    seconds: float

    def verify(self, problem: Problem, n_stages: int) -> None:
        """Raise VerifyError with every fault: coverage, range, precedence, groups, memory."""
        verify_assignment(problem, self.stage_of, n_stages)


def partition(problem: Problem, n_stages: int, *, method: str = "auto", time_limit: float = 30.0) -> Partition:
    """Cut a problem into ordered stages with the least bottleneck that `time_limit` seconds find.

    "dp" is the dynamic program alone, optimal for chains; "ilp" lets the integer program close the gap; "auto" does so only
    when the bounds leave one. Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators", 2020.
    Raises VerifyError for an illegal problem, InfeasibleError when it is proven that no cut fits in memory.
    """
    begin = monotonic()
    _check(n_stages, method, time_limit)
    problem.verify()
    clusters, stages = coarsen(problem), Stages.of(problem, n_stages)
    if not len(clusters):
        return Partition({}, 0.0, 0.0, "optimal", "dp", monotonic() - begin)
    deadline = begin + time_limit
    bound = lower_bound(clusters, stages)
    stage = search(clusters, stages, bound, begin + time_limit / 4)
    if stage is None:
        start = fit(clusters, stages, deadline)
        stage = search(clusters, stages, bound, begin + time_limit / 2, start) or start
    used, value = "dp", bottleneck(clusters, stages, stage)
    if method != "dp" and (method == "ilp" or value - bound > GAP * value):
        stage, proven = improve(clusters, stages, stage, deadline)
        used, bound, value = "ilp", max(bound, proven), bottleneck(clusters, stages, stage)
    bound = min(bound, value)
    status: Literal["optimal", "feasible"] = "optimal" if value - bound <= GAP * value else "feasible"
    return Partition(clusters.stage_of(stage), value, bound, status, used, monotonic() - begin)


def _check(n_stages: int, method: str, time_limit: float) -> None:
    if not isinstance(n_stages, int) or isinstance(n_stages, bool) or n_stages < 1:
        raise InputError(f"n_stages is {n_stages!r}, expected a whole number of at least 1")
    if method not in METHODS:
        raise InputError(f"method is {method!r}, which is not known", hint=f"one of {', '.join(map(repr, METHODS))}")
    if not time_limit > 0:
        raise InputError(f"time_limit is {time_limit!r}, expected seconds above 0")
