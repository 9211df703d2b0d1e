"""The integer program's skeleton: ordered stages as monotone step variables, and the solver that runs it.

    below[v, s] = 1  iff  stage(v) <= s          stage(v) = 2 of 5:   s      0  1  2  3  4
                                                                      below  0  0  1  1  1
    below[v, s] <= below[v, s + 1]        inside(v, s) = below[v, s] - below[v, s - 1]
    below[a, s] >= below[b, s]            for every arc (a, b): stage(a) <= stage(b)

A window fixes the steps outside it. Precedence then needs one row per arc and step, and branching on one step moves a
cluster and all that hangs on it to one side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx
import pulp

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.loads import TOLERANCE
from pipecompile.partitioners.windows import Window

__all__ = ["Outcome", "Steps", "run", "steps"]

Term: TypeAlias = "pulp.LpAffineExpression | float"
"""A linear expression, or the number it has become because windows fixed all of it."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A model in the making: its step variables, and what stage a solution of it gives to every cluster."""

    model: pulp.LpProblem
    below: Mapping[tuple[int, int], Term]
    windows: Sequence[Window]

    def inside(self, cluster: int, stage: int) -> Term:
        """1 when the cluster is in the stage."""
        return self.below[cluster, stage] - self.below[cluster, stage - 1]

    def require(self, left: Term, right: Term) -> None:
        """Add the row left >= right, unless it holds always. A row that never holds stays, for the solver to find."""
        difference = pulp.LpAffineExpression(left - right)
        if len(difference) or difference.constant < -TOLERANCE:
            self.model.addConstraint(difference >= 0)

    def positive(self, name: str, terms: Sequence[Term], most: float = 1.0) -> Term:
        """A variable that is at least 0 and at least every term; just a number when `most` is 1 and all terms are numbers."""
        if most <= 1 and all(isinstance(term, int | float) for term in terms):
            return max(0.0, *terms)
        variable = pulp.LpVariable(name, 0, most)
        for term in terms:
            self.require(variable, term)
        return variable

    def stages(self) -> list[int]:
        """The stage of every cluster in the solution that was found. A step that no row holds has no value: it is free."""
        return [next(s for s in range(first, last + 1) if s == last or (pulp.value(self.below[v, s]) or 0.0) > 0.5)
                for v, (first, last) in enumerate(self.windows)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the solver says: `found` a solution, `done` when nothing better exists, and a proven bound on the objective."""

    found: bool
    done: bool
    bound: float


def steps(clusters: Clusters, windows: Sequence[Window], n_stages: int) -> Steps:
    """Variables, monotone steps and precedence (transitively reduced). No window may be empty."""
    model = pulp.LpProblem("partition", pulp.LpMinimize)
    below: dict[tuple[int, int], Term] = {}
    for v, (first, last) in enumerate(windows):
        for s in range(-1, n_stages):
            below[v, s] = 0 if s < first else 1 if s >= last else pulp.LpVariable(f"below_{v}_{s}", cat=pulp.LpBinary)
    made = Steps(model, below, windows)
    for v, (first, last) in enumerate(windows):
        for s in range(first, last - 1):
            made.require(below[v, s + 1], below[v, s])
    for a, b in nx.transitive_reduction(nx.DiGraph(clusters.arcs)).edges:
        for s in range(windows[b][0], windows[a][1]):
            made.require(below[a, s], below[b, s])
    return made


def run(model: pulp.LpProblem, seconds: float) -> Outcome:
    """Solve with HiGHS in this process, or with the CBC that PuLP brings when highspy is missing."""
    highs = pulp.HiGHS(msg=False, timeLimit=max(seconds, 0.01), gapRel=0.0, gapAbs=1e-8, mip_heuristic_effort=0.01)
    if not highs.available():
        model.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=max(seconds, 0.01), gapRel=0.0))
    else:
        model.solve(highs)
    found = model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if model.sol_status == pulp.LpSolutionInfeasible:
        return Outcome(found=False, done=True, bound=float("inf"))
    if (
        model.sol_status == pulp.LpSolutionOptimal
    ):  # only this means it: model.status says "Optimal" on a time limit too
        return Outcome(found=True, done=True, bound=pulp.value(model.objective))
    bound = model.solverModel.getInfo().mip_dual_bound if highs.available() else float("-inf")
    return Outcome(found, done=False, bound=bound)
