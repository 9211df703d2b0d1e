"""The way from a problem to a partition: bound, dynamic program, integer program, in this order until bound meets cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from pipecompile.errors import InputError
from pipecompile.partitioners.bounds import lower_bound
from pipecompile.partitioners.clusters import Clusters, Stages, coarsen
from pipecompile.partitioners.dp import GAP, exhaust, polish, search
from pipecompile.partitioners.ilp import improve
from pipecompile.partitioners.loads import bottleneck, verify_assignment
from pipecompile.partitioners.memory import fit
from pipecompile.partitioners.problem import Problem

__all__ = ["METHODS", "Partition", "partition"]

METHODS = ("auto", "dp", "ilp")


@dataclass(frozen=True, slots=True)
class Partition:
    """The stage of every node. No partition has a bottleneck below `lower_bound`; `status` is "optimal" when the two agree
    to one part in a million. `method` is what found the cut or closed the gap.
    """

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

    "dp" is dynamic programming alone, proven optimal for chains and graphs with few down-sets; "ilp" is the integer
    program, with a cut of a linear order to start from; "auto" is "dp", then "ilp" if a gap is left. Tarnawski et al.,
    "Efficient algorithms for device placement of DNN graph operators", 2020.
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
    stage = search(clusters, stages, bound, begin + time_limit / 4) or fit(clusters, stages, deadline)
    used = "dp"
    if method != "ilp" and _open(clusters, stages, stage, bound):
        stage, proven = exhaust(clusters, stages, stage)
        bound = max(bound, proven)
    if _open(clusters, stages, stage, bound):
        stage = polish(clusters, stages, stage, begin + time_limit / 4)
    if method == "ilp" or (method == "auto" and _open(clusters, stages, stage, bound)):
        stage, proven = improve(clusters, stages, stage, deadline)
        used, bound = "ilp", max(bound, proven)
    value = bottleneck(clusters, stages, stage)
    status: Literal["optimal", "feasible"] = "feasible" if _open(clusters, stages, stage, bound) else "optimal"
    least = value if status == "optimal" else bound
    return Partition(clusters.stage_of(stage), value, least, status, used, monotonic() - begin)


def _open(clusters: Clusters, stages: Stages, stage: Sequence[int], bound: float) -> bool:
    """Whether bound and cut are still apart."""
    value = bottleneck(clusters, stages, stage)
    return value - bound > GAP * value


def _check(n_stages: int, method: str, time_limit: float) -> None:
    if not isinstance(n_stages, int) or isinstance(n_stages, bool) or n_stages < 1:
        raise InputError(f"n_stages is {n_stages!r}, expected a whole number of at least 1")
    if method not in METHODS:
        raise InputError(f"method is {method!r}, which is not known", hint=f"one of {', '.join(map(repr, METHODS))}")
    if not time_limit > 0:
        raise InputError(f"time_limit is {time_limit!r}, expected seconds above 0")
