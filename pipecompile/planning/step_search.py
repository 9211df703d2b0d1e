"""The cut with the shortest step: cuts that trade some of the slowest stage for a shorter fill and drain, simulated, and a bound.

    towers t0 t1 t2 and a head, 4 devices        slowest   step
    t0 | t1 | t2 | head                           1.00     of 2 stages in a row: short
    t0 | (t0) t1 | (t1) t2 | (t2) head            0.93     of 4 stages in a row: long, though every stage is faster

The incumbent is the cut with the least bottleneck. Where the stages that follow each other could be fewer, the partitioner
proposes other cuts (`partitioners/step_cuts.py`), each is simulated under the schedule that it will run, and the shortest step
wins. The step is never longer than that of the incumbent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipecompile.costs import NodeCost
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.stages import routes
from pipecompile.ir import Kind, Schedule
from pipecompile.ir.plan import StepSummary
from pipecompile.ir.training_routes import training_routes
from pipecompile.options import Options
from pipecompile.partitioners import Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.incumbent import GAP
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.solver import with_cut
from pipecompile.partitioners.step_objective import StepObjective, step_lower_bound
from pipecompile.planning.draft import Draft, by_depth, make_draft
from pipecompile.planning.schedule_choice import make_schedule, simulation_costs
from pipecompile.planning.solve_cut import memory_excess
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.simulation.costs import make_costs
from pipecompile.tracing.traced_graph import TracedGraph

_MOST = 8
"""Cuts that are simulated."""

_WORTH = 0.01
"""Share of the step that a shorter path of stages must be able to save before other cuts are searched."""

_NEAR = 1.15
"""Estimated step of a cut that is simulated, as a multiple of the least estimate."""

__all__ = ["shorten_step", "step_seconds", "with_searched_step"]


def shorten_step(
    graph: TracedGraph, draft: Draft, costs: Mapping[str, NodeCost], options: Options, count: int, samples: int | None
) -> Draft:
    """Return the draft of the cut with the shortest simulated step of `count` micro-batches, with a summary of that step.

    `draft` has the cut with the least bottleneck; it is returned if no other cut is shorter. The schedule is that of `options`, which
    is not searched.
    """
    search = _StepSearch(graph, costs, options, count, samples)
    first, is_split = search.seconds(draft), Kind.INPUT_GRAD in options.kinds
    bound = _lower_bound(graph, draft, options, count, is_split=is_split)
    best, seconds, tried = draft, first, 1
    for other in search.others(draft) if first > bound * (1 + options.gap) else ():
        tried += 1
        if (value := search.seconds(other)) < seconds * (1 - GAP):
            best, seconds = other, value
    return replace(best, step=StepSummary(seconds, min(bound, seconds), tried, first, draft.partition.bottleneck))


def with_searched_step(graph: TracedGraph, draft: Draft, options: Options, count: int, seconds: float) -> Draft:
    """Return the draft with the summary of its step of `seconds` seconds under a schedule that was searched, of any kind."""
    bound = min(_lower_bound(graph, draft, options, count, is_split=True), seconds)
    known = draft.step or StepSummary(seconds, bound, 1, seconds, draft.partition.bottleneck)
    return replace(draft, step=replace(known, seconds=seconds, lower_bound=bound))


class _StepSearch:
    """Proposes cuts for one graph, and simulates the step of each."""

    def __init__(
        self, graph: TracedGraph, costs: Mapping[str, NodeCost], options: Options, count: int, samples: int | None
    ) -> None:
        self.graph, self.costs, self.options, self.count, self.samples = graph, costs, options, count, samples

    def schedule(self, draft: Draft) -> Schedule:
        """Return the schedule that the draft will run."""
        final = self.options.with_recompute(draft.partition.recompute)
        return make_schedule(final, draft.stages, draft.routes, draft.placement, self.count)

    def seconds(self, draft: Draft) -> float:
        """Return the simulated seconds of a step."""
        return step_seconds(draft, self.schedule(draft), self.options)

    def others(self, draft: Draft) -> list[Draft]:
        """Return drafts of other cuts that may have a shorter step and fit the memory, most promising first."""
        problem, n_stages = draft.problem, self.options.n_stages
        clusters, machine = coarsen(_of_actions(problem, self.options)), Machine.of(problem, n_stages)
        objective = StepObjective(clusters, machine, draft.placement, self.count)
        start = [draft.partition.stage_of[names[0]] for names in clusters.members]
        if not objective.can_save(start, _WORTH):
            return []
        from pipecompile.partitioners.step_cuts import step_cuts  # a chain of stages needs none of it

        cuts = step_cuts(objective, start, stage_ranges(clusters, n_stages), _MOST)
        limit = objective.score(cuts[0])[0] * _NEAR
        drafts = (self._draft(draft, clusters.stage_by_node(cut)) for cut in cuts
                  if cut != start and objective.score(cut)[0] <= limit)  # fmt: skip
        return [each for each in drafts if each is not None]

    def _draft(self, draft: Draft, stage_of: Mapping[str, int]) -> Draft | None:
        """Return the draft of another cut; None if it does not fit the memory."""
        n_stages, options = self.options.n_stages, self.options
        partition = with_cut(draft.partition, draft.problem, stage_of, n_stages)
        other = make_draft(self.graph, partition, draft.problem, self.costs, options, draft.placement, self.samples)
        other = by_depth(self.graph, other, self.costs, options, self.count, self.samples)
        return None if memory_excess(other.problem, partition, n_stages) else other


def step_seconds(draft: Draft, schedule: Schedule, options: Options) -> float:
    """Simulate a step of the draft. Outputs go to the stage with the loss."""
    step_routes = training_routes(draft.routes, options.n_stages, options.loss_fn is not None)
    per_stage = simulation_costs(draft.stages, step_routes, options.links, draft.placement)
    costs = make_costs(options.n_stages, len(options.devices), step_routes, **per_stage)
    return Evaluator(draft.placement, step_routes, costs, None).seconds(schedule)


def _lower_bound(graph: TracedGraph, draft: Draft, options: Options, count: int, *, is_split: bool) -> float:
    """Return the seconds that every cut needs at least for a step, under every schedule with such backwards: divided or not."""
    alone = {node.name: number for number, node in enumerate(compute_nodes(graph))}
    constants = {route.value for route in routes(graph, alone) if not route.gradient}
    problem, n_stages = _of_actions(draft.problem, options), options.n_stages
    return step_lower_bound(problem, n_stages, draft.placement, count, is_split=is_split, without_gradient=constants)


def _of_actions(problem: Problem, options: Options) -> Problem:
    """Return the problem with the times of a step: without backwards if the schedule has none."""
    if options.has_backward:
        return problem
    nodes = tuple(replace(node, time=node.forward) for node in problem.nodes)
    return replace(problem, nodes=nodes)
