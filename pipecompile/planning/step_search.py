"""The cut with the shortest step: cuts that trade some of the slowest stage for a shorter fill and drain, simulated, and a bound.

    towers t0 t1 t2 and a head, 4 devices        slowest   step
    t0 | t1 | t2 | head                           1.00     of 2 stages in a row: short
    t0 | (t0) t1 | (t1) t2 | (t2) head            0.93     of 4 stages in a row: long, though every stage is faster

The incumbent is the cut with the least bottleneck. Where the stages that follow each other could be fewer, or transfers that count
as work there keep devices idle, the partitioner proposes other cuts (`partitioners/step_cuts.py`), each is simulated under the
schedule that it will run, and the shortest step wins. The step is never longer than that of the incumbent.
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
from pipecompile.partitioners.schedule_walk import MAX_ACTIONS, ScheduleWalk
from pipecompile.partitioners.solver import with_cut
from pipecompile.partitioners.step_objective import StepObjective, step_lower_bound
from pipecompile.planning.draft import Draft, by_depth, make_draft
from pipecompile.planning.schedule_choice import make_schedule, simulation_costs
from pipecompile.planning.solve_cut import memory_excess
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.settings.direction_choice import copies_of_stages
from pipecompile.simulation.costs import make_costs
from pipecompile.tracing.traced_graph import TracedGraph

_MOST = 24
"""Cuts of the partitioner that are simulated."""

_WORTH = 0.01
"""Share of the step that a shorter path of stages must be able to save before other cuts are searched."""

_SMALL = 32
"""Clusters up to which a graph is small: other cuts into three stages or more are always searched."""

_CLIMB = 96
"""Cuts at most that are simulated one move from the best."""

_ACTIONS = 40_000
"""Actions that the simulations of these may have together: a second or two."""

_NEAR = 1.15, 1.03
"""Estimated step of a cut that is simulated, as a multiple of the least estimate: without a walk of the schedule, and with one."""

__all__ = ["shorten_step", "step_seconds", "with_searched_step"]


def shorten_step(
    graph: TracedGraph, draft: Draft, costs: Mapping[str, NodeCost], options: Options, count: int, samples: int | None
) -> Draft:
    """Return the draft of the cut with the shortest simulated step of `count` micro-batches, with a summary of that step.

    `draft` has the cut with the least bottleneck; it is returned if no other cut is shorter. The schedule is that of `options`, which
    is not searched.
    """
    search = _StepSearch(graph, draft, costs, options, count, samples)
    first, is_split = search.seconds(draft), Kind.INPUT_GRAD in options.kinds
    bound = _lower_bound(graph, draft, options, count, is_split=is_split)
    if first > bound * (1 + options.gap) and search.may_pay:
        search.run()
    best, seconds, tried = search.best, search.best_seconds, search.tried
    return replace(best, step=StepSummary(seconds, min(bound, seconds), tried, first, draft.partition.bottleneck))


def with_searched_step(graph: TracedGraph, draft: Draft, options: Options, count: int, seconds: float) -> Draft:
    """Return the draft with the summary of its step of `seconds` seconds under a schedule that was searched, of any kind."""
    bound = min(_lower_bound(graph, draft, options, count, is_split=True), seconds)
    known = draft.step or StepSummary(seconds, bound, 1, seconds, draft.partition.bottleneck)
    return replace(draft, step=replace(known, seconds=seconds, lower_bound=bound))


class _StepSearch:
    """Simulates cuts of one graph, and keeps that with the shortest step in `best`, at first the given draft."""

    def __init__(
        self,
        graph: TracedGraph,
        draft: Draft,
        costs: Mapping[str, NodeCost],
        options: Options,
        count: int,
        samples: int | None,
    ) -> None:
        self.graph, self.costs, self.options, self.count, self.samples = graph, costs, options, count, samples
        self.clusters = coarsen(_of_actions(draft.problem, options))
        machine = Machine.of(draft.problem, options.n_stages)
        self.ranges = stage_ranges(self.clusters, options.n_stages)
        is_split, walk = Kind.INPUT_GRAD in options.kinds, _walk(options, draft.placement, count)
        self.objective = StepObjective(self.clusters, machine, draft.placement, count, is_split, walk)
        self.start = [draft.partition.stage_of[names[0]] for names in self.clusters.members]
        self.draft = self.best = draft
        self.best_cut, self.best_seconds, self.tried = self.start, self.seconds(draft), 1
        self.seen = {tuple(self.start)}

    @property
    def may_pay(self) -> bool:
        """Whether other cuts are worth a search: the graph is small, or the path of stages or the slowest device could be shorter.

        Two stages are a chain: their path is what it is.
        """
        from pipecompile.partitioners.sliding_cuts import least_work

        if self.is_small:
            return True
        least = least_work(self.objective, self.ranges)
        is_uneven = least < max(self.objective.work(self.start)) * (1 - _WORTH)
        return (is_uneven or self.options.n_stages > 2) and self.objective.can_save(self.start, _WORTH, least)

    @property
    def is_small(self) -> bool:
        """Whether the graph has so few clusters, and so many stages, that other cuts are always searched."""
        return len(self.clusters) <= _SMALL and self.options.n_stages > 2

    def run(self) -> None:
        """Simulate the cuts that the partitioner proposes, then cuts one move from the best as long as one is shorter."""
        from pipecompile.partitioners.step_cuts import near_cuts, step_cuts  # a chain of stages needs none of it

        cuts = step_cuts(self.objective, self.start, self.ranges, _MOST)
        factor = _NEAR[self.objective.walk is not None]
        limit = self.objective.score(cuts[0])[0] * factor
        for cut in cuts:
            if self.objective.score(cut)[0] <= limit:
                self._try(cut)
        most = self.tried + max(_MOST, min(_CLIMB, _ACTIONS // (2 * self.count * self.options.n_stages)))
        improved = True
        while improved and self.tried < most:
            near = near_cuts(self.objective, self.best_cut, self.ranges, most - self.tried, factor)
            improved = sum(self._try(cut) for cut in near) > 0

    def seconds(self, draft: Draft) -> float:
        """Return the simulated seconds of a step under the schedule that the draft will run."""
        final = self.options.with_recompute(draft.partition.recompute)
        schedule = make_schedule(final, draft.stages, draft.routes, draft.placement, self.count)
        return step_seconds(draft, schedule, self.options)

    def _try(self, cut: list[int]) -> bool:
        """Simulate a cut. Return whether it is the best so far: it leaves no more stages empty, fits the memory, and is shortest."""
        if tuple(cut) in self.seen or len(set(cut)) < len(set(self.start)):
            return False
        self.seen.add(tuple(cut))
        self.tried += 1
        other = self._draft(self.clusters.stage_by_node(cut))
        if other is None or (seconds := self.seconds(other)) >= self.best_seconds * (1 - GAP):
            return False
        self.best, self.best_cut, self.best_seconds = other, cut, seconds
        return True

    def _draft(self, stage_of: Mapping[str, int]) -> Draft | None:
        """Return the draft of another cut; None if it does not fit the memory."""
        n_stages, options, problem = self.options.n_stages, self.options, self.draft.problem
        partition = with_cut(self.draft.partition, problem, stage_of, n_stages)
        known = self.draft.placement, self.samples, self.draft.weights
        other = make_draft(self.graph, partition, problem, self.costs, options, *known)
        other = by_depth(self.graph, other, self.costs, options, self.count, self.samples)
        return None if memory_excess(other.problem, partition, n_stages) else other


def _walk(options: Options, placement: tuple[int, ...], count: int) -> ScheduleWalk | None:
    """Return the walk of the schedule of a chain, whose order suits every cut; None if it is too long, or has another placement."""
    if options.n_stages * count > MAX_ACTIONS:
        return None
    chain = options.schedule_for(count)
    return ScheduleWalk.of(chain) if chain.placement == placement else None


def step_seconds(draft: Draft, schedule: Schedule, options: Options) -> float:
    """Simulate a step of the draft. Outputs go to the stage with the loss."""
    step_routes = training_routes(draft.routes, options.n_stages, options.loss_fn is not None)
    per_stage = simulation_costs(draft.stages, step_routes, options.links, draft.placement)
    costs = make_costs(options.n_stages, len(options.devices), step_routes, (), schedule.n_slices, **per_stage)
    return Evaluator(draft.placement, step_routes, costs, None).seconds(schedule)


def _lower_bound(graph: TracedGraph, draft: Draft, options: Options, count: int, *, is_split: bool) -> float:
    """Return the seconds that every cut needs at least for a step, under every schedule with such backwards: divided or not."""
    alone = {node.name: number for number, node in enumerate(compute_nodes(graph))}
    constants = {route.value for route in routes(graph, alone) if not route.gradient}
    problem, n_stages = _of_actions(draft.problem, options), options.n_stages
    units = count * options.n_slices  # a slice takes its share of the seconds
    seconds = step_lower_bound(
        problem, n_stages, draft.placement, units,
        is_split=is_split, without_gradient=constants, copies=copies_of_stages(options),
    )  # fmt: skip
    return seconds / options.n_slices


def _of_actions(problem: Problem, options: Options) -> Problem:
    """Return the problem with the times of a step: without backwards if the schedule has none."""
    if options.has_backward:
        return problem
    nodes = tuple(replace(node, time=node.forward) for node in problem.nodes)
    return replace(problem, nodes=nodes)
