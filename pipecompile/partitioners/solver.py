"""The way from a problem to a partition: bound, dynamic program, integer program, in this order until bound meets cut."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Literal

from pipecompile.errors import InputError
from pipecompile.partitioners.bounds.lower_bound import lower_bound
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import Price, check_steering, unsteered
from pipecompile.partitioners.dp.strategy import along_orders, exhaust, polish
from pipecompile.partitioners.ilp.close_gap import close
from pipecompile.partitioners.ilp.feasibility import fit
from pipecompile.partitioners.incumbent import Listener, Search
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import Ledger, verify_assignment
from pipecompile.partitioners.problem import Problem
from pipecompile.partitioners.rebalance import spread

__all__ = ["METHODS", "Partition", "partition", "price_of_steering"]

METHODS = ("auto", "dp", "ilp")


@dataclass(frozen=True, slots=True)
class Partition:
    """The stage of every node, and which stages recompute. No partition has a bottleneck below `lower_bound`; `status` is
    "optimal" when the two agree to one part in a million. `method` is what found the cut or closed the gap.
    """

    stage_of: dict[str, int]
    bottleneck: float
    lower_bound: float
    status: Literal["optimal", "feasible"]
    method: str
    seconds: float
    recompute: tuple[bool, ...] = ()

    @property
    def gap(self) -> float:
        """How far the bottleneck may be above the least possible one, as a fraction of it."""
        return (self.bottleneck - self.lower_bound) / self.bottleneck if self.bottleneck else 0.0

    def verify(self, problem: Problem, n_stages: int) -> None:
        """Raise VerifyError with every fault: coverage, range, precedence, groups, steering, memory."""
        verify_assignment(problem, self.stage_of, n_stages, self.recompute or None)


def partition(
    problem: Problem, n_stages: int, *, method: str = "auto", time_limit: float = 30.0, progress: Listener | None = None
) -> Partition:
    """Cut a problem into ordered stages with the least bottleneck that `time_limit` seconds find.

    "dp" is dynamic programming alone, proven optimal for chains and graphs with few down-sets; "ilp" is the integer
    program, with a cut of a linear order to start from; "auto" is "dp", then "ilp" if a gap is left. Tarnawski et al.,
    "Efficient algorithms for device placement of DNN graph operators", 2020. `progress` is called now and then with a
    `Progress`. Ctrl-C ends the search, once there is a cut, as the time limit does: with the best cut and its bound.
    Raises VerifyError for an illegal problem, InfeasibleError when it is proven that no cut fits in memory or does what
    is asked for.
    """
    begin = monotonic()
    _check(n_stages, method, time_limit)
    problem.verify()
    clusters, stages = coarsen(problem), Stages.of(problem, n_stages)
    check_steering(problem, clusters, n_stages)
    if not len(clusters):
        return Partition({}, 0.0, 0.0, "optimal", "dp", monotonic() - begin, (False,) * n_stages)
    search = Search(clusters, stages, begin, time_limit, progress)
    try:
        _solve(search, method, time_limit)
    except KeyboardInterrupt:
        if search.stage is None:
            raise
    return _result(search)


def price_of_steering(problem: Problem, found: Partition, n_stages: int, *, time_limit: float = 30.0) -> Price:
    """What the pins and pairs apart of a problem cost `found`, its partition: the problem is solved again without them."""
    free = partition(unsteered(problem), n_stages, time_limit=time_limit)
    return Price(found.bottleneck, min(free.bottleneck, found.bottleneck), free.lower_bound)


def _solve(search: Search, method: str, time_limit: float) -> None:
    early = search.begin + time_limit / 4
    search.enter("orders")
    search.prove(lower_bound(search.clusters, search.stages))
    along_orders(search, early)
    if search.stage is None:
        search.offer(fit(search.clusters, search.stages, search.deadline))
    if method != "ilp" and search.open:
        exhaust(search)
    if search.open:
        polish(search, early)
    if method != "dp" and search.open:
        close(search)


def _result(search: Search) -> Partition:
    stage = spread(search.clusters, search.stages, search.stage or [])
    status: Literal["optimal", "feasible"] = "feasible" if search.open else "optimal"
    bound = search.bound if search.open else search.value
    ledger = Ledger(search.clusters, search.stages, stage)
    return Partition(
        stage_of=search.clusters.stage_of(stage),
        bottleneck=search.value,
        lower_bound=bound,
        status=status,
        method=search.method,
        seconds=monotonic() - search.begin,
        recompute=ledger.recompute(),
    )


def _check(n_stages: int, method: str, time_limit: float) -> None:
    if not isinstance(n_stages, int) or isinstance(n_stages, bool) or n_stages < 1:
        raise InputError(f"n_stages is {n_stages!r}, expected a whole number of at least 1")
    if method not in METHODS:
        raise InputError(f"method is {method!r}, which is not known", hint=f"one of {', '.join(map(repr, METHODS))}")
    if not time_limit > 0:
        raise InputError(f"time_limit is {time_limit!r}, expected seconds above 0")
