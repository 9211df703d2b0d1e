"""The pipeline of a layout: one recording, costs per micro-batch size, and cuts per number of stages serve all layouts.

    recording ─▶ costs of b samples ─▶ cut of n stages ─▶ draft ─▶ schedule of M micro-batches ─▶ simulated step

Layouts are compared with one cut per number of stages, that of the first micro-batch size. It is uneven at other sizes, where kernels
take more time than their launches: the row of a layout has the cut of its own size, with the shortest step, as `compile` finds it.

Many micro-batches are not simulated one by one: an order of the catalogue repeats itself every round of `pp` micro-batches, so two
simulations of some rounds give the seconds of a round, and the others are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.costs import NodeCost, node_costs
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.stages import routes
from pipecompile.ir import Kind
from pipecompile.ir.directions import check_one_direction
from pipecompile.ir.training_routes import training_routes
from pipecompile.layouts.hardware import Cluster
from pipecompile.layouts.memory_kinds import StageWeights, stage_weights
from pipecompile.options import Options
from pipecompile.partitioners import Partition, stage_loads
from pipecompile.partitioners.step_objective import step_lower_bound
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.planning.draft import Draft, make_draft
from pipecompile.planning.planner import make_problem
from pipecompile.planning.solve_cut import solve_cut
from pipecompile.planning.step_search import shorten_step
from pipecompile.schedules import build_schedule
from pipecompile.simulation.costs import Costs, make_costs
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.gradient_reductions import last_ends
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["PipelineModel", "PipelinePoint", "Simulated"]

_ROUNDS = 4
"""Rounds of `pp` micro-batches after which an order repeats itself: then steps differ from whole simulations by less than 0.6 %, and
only where transfers take as long as kernels (tests/layouts/test_pipeline_step.py).
"""

Bandwidths = float | dict[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class PipelinePoint:
    """A pipeline of `pp` devices with `chunks` stages each, for `count` micro-batches of `samples` samples under a schedule.

    `has_own_cut`: the cut is that of `samples` samples with the shortest step, not the one that is shared by all sizes.
    """

    pp: int
    schedule: str
    samples: int
    count: int
    chunks: int = 1
    has_own_cut: bool = False

    @property
    def n_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def cut_key(self) -> tuple[int, int]:
        """The number of stages, and the samples that the cut is of; 0 for the shared cut."""
        return self.n_stages, self.samples if self.has_own_cut else 0

    @property
    def draft_key(self) -> tuple[object, ...]:
        """All that the stages depend on."""
        return self.cut_key, self.pp, self.schedule, self.samples, self.simulated

    @property
    def simulated(self) -> tuple[int, int]:
        """Two numbers of micro-batches to simulate, a round apart; the same number twice if it is `count` itself."""
        rounds = self.count // self.pp - _ROUNDS
        if rounds < 2:
            return self.count, self.count
        first = self.count - rounds * self.pp
        return first, first + self.pp


@dataclass(frozen=True, slots=True)
class Simulated:
    """Seconds of the forwards and backwards of a step, and, per stage, at which its gradients are complete."""

    seconds: float
    complete: Mapping[int, float]


@dataclass
class PipelineModel:
    """Pipelines of one recording on one cluster. `options` are those of `compile` for any number of stages."""

    graph: TracedGraph
    inputs: FlatInputs
    cluster: Cluster
    options: Options
    _nominal: dict[int, dict[str, NodeCost]] = field(default_factory=dict)
    _costs: dict[int, dict[str, NodeCost]] = field(default_factory=dict)
    _cuts: dict[tuple[int, int], Partition] = field(default_factory=dict)
    _drafts: dict[tuple[object, ...], Draft] = field(default_factory=dict)
    _memory: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    _simulated: dict[tuple[object, ...], Simulated] = field(default_factory=dict)
    _weights: dict[tuple[object, ...], list[StageWeights]] = field(default_factory=dict)
    _bounds: dict[tuple[object, ...], float] = field(default_factory=dict)

    def at_efficiency(self, efficiency: float) -> Self:
        """Return the same pipelines, with the same cuts, where kernels reach this share of the data sheet's rates."""
        cluster = replace(self.cluster, efficiency=efficiency)
        return type(self)(self.graph, self.inputs, cluster, self.options, self._nominal, _cuts=self._cuts)

    def costs(self, samples: int) -> dict[str, NodeCost]:
        """Return the cost of every node for a micro-batch of `samples` samples, at the rates that kernels reach."""
        if samples not in self._costs:
            factor = 1 / self.cluster.reached
            self._costs[samples] = {name: _slower(cost, factor) for name, cost in self._of_data_sheet(samples).items()}
        return self._costs[samples]

    def _of_data_sheet(self, samples: int) -> dict[str, NodeCost]:
        if samples not in self._nominal:
            leaves = self.inputs.resized(samples).leaves
            with torch.enable_grad():
                costs = node_costs(self.graph, leaves, cost="analytic", device=self.cluster.spec)
            self._nominal[samples] = costs
        return self._nominal[samples]

    def cut(self, point: PipelinePoint) -> Partition:
        """Return the cut into stages. The shared cut is that of the first micro-batch size that comes with this number of stages."""
        if point.cut_key not in self._cuts:
            options = self._options_of(point)
            problem = make_problem(self.graph, self.costs(point.samples), options, options.schedule_for(point.pp))
            self._cuts[point.cut_key] = solve_cut(self.graph, problem, options)[0]
            self._cuts.setdefault(replace(point, has_own_cut=True).cut_key, self._cuts[point.cut_key])
        return self._cuts[point.cut_key]

    def weights(self, point: PipelinePoint) -> list[StageWeights]:
        """Return the weights of each stage."""
        key = point.draft_key if point.has_own_cut else point.cut_key
        if key not in self._weights:
            cut = self.draft(point).partition if point.has_own_cut else self.cut(point)
            self._weights[key] = stage_weights(self.graph, cut.stage_of, point.n_stages)
        return self._weights[key]

    def draft(self, point: PipelinePoint) -> Draft:
        """Return the stages with their costs and routes."""
        if point.draft_key not in self._drafts:
            self._drafts[point.draft_key] = self._draft(point)
        return self._drafts[point.draft_key]

    def _draft(self, point: PipelinePoint) -> Draft:
        options, costs, count = self._options_of(point), self.costs(point.samples), point.simulated[1]
        schedule = options.schedule_for(count)
        problem = make_problem(self.graph, costs, options, schedule)
        cut, placement = self.cut(point), schedule.placement
        draft = make_draft(self.graph, cut, problem, costs, options, placement, point.samples)
        if not point.has_own_cut:
            return draft
        return shorten_step(self.graph, draft, costs, options, count, point.samples)

    def activations(self, point: PipelinePoint, recompute: Sequence[bool]) -> tuple[float, ...]:
        """Return the peak bytes of activations per device, where the stages with a flag in `recompute` recompute."""
        key = *point.draft_key, tuple(recompute)
        if key not in self._memory:
            draft, n_stages = self.draft(point), point.n_stages
            problem = replace(draft.problem, placement=draft.placement, memory_limit=None)
            loads = stage_loads(problem, draft.partition.stage_of, n_stages, recompute)
            idle = replace(problem, in_flight=(0.0,) * n_stages)
            states = stage_loads(idle, draft.partition.stage_of, n_stages, (False,) * n_stages)
            self._memory[key] = tuple(a.memory - b.memory for a, b in zip(loads, states, strict=True))
        return self._memory[key]

    def simulate(self, point: PipelinePoint, recompute: Sequence[bool], bandwidths: Bandwidths) -> Simulated:
        """Return the simulated forwards and backwards. `bandwidths` are bytes per second between devices."""
        links = repr(bandwidths) if isinstance(bandwidths, float) else tuple(bandwidths.items())
        key = point, tuple(recompute), links
        if key not in self._simulated:
            self._simulated[key] = self._simulate(point, recompute, bandwidths)
        return self._simulated[key]

    def lower_bound(self, point: PipelinePoint) -> float:
        """Return the seconds that every cut and every schedule of this kind needs at least for the forwards and backwards."""
        key = point.pp, point.chunks, point.samples, point.count, Kind.INPUT_GRAD in self._options_of(point).kinds
        if key not in self._bounds:
            draft = self.draft(point)
            self._bounds[key] = step_lower_bound(
                draft.problem, point.n_stages, draft.placement, point.count,
                is_split=bool(key[-1]), without_gradient=self._constants,
            )  # fmt: skip
        return self._bounds[key]

    def _simulate(self, point: PipelinePoint, recompute: Sequence[bool], bandwidths: Bandwidths) -> Simulated:
        draft = self.draft(point)
        moved = training_routes(draft.routes, point.n_stages, with_target=False)
        costs = self._simulation_costs(point, draft, moved, bandwidths)
        runs = []
        for count in point.simulated:
            base = build_schedule(point.schedule, point.n_stages, count, n_devices=point.pp)
            check_one_direction(base, "plan_for counts one on each device")
            tasks = tasks_of_schedule(insert_recompute(base, recompute), moved, costs)
            times = walk(tasks, costs.engines)
            runs.append((times.makespan, last_ends(tasks, times)))
        (before, _), (makespan, ends) = runs
        rounds = (point.count - point.simulated[1]) // point.pp
        added = rounds * (makespan - before)
        return Simulated(makespan + added, {stage: end + added for stage, end in ends.items()})

    def _simulation_costs(
        self, point: PipelinePoint, draft: Draft, moved: Sequence[object], bandwidths: Bandwidths
    ) -> Costs:
        return make_costs(
            point.n_stages,
            point.pp,
            moved,  # type: ignore[arg-type]
            forward=[stage.forward for stage in draft.stages],
            input_grad=[stage.input_grad for stage in draft.stages],
            weight_grad=[stage.weight_grad for stage in draft.stages],
            backward=[stage.backward for stage in draft.stages],
            latency=self.cluster.spec.link_latency,
            bandwidth=bandwidths,
        )

    def _options_of(self, point: PipelinePoint) -> Options:
        devices = (torch.device("cpu"),) * point.pp
        return replace(
            self.options,
            n_stages=point.n_stages,
            devices=devices,
            schedule=point.schedule,
            bandwidth=self.cluster.inside,
        )

    @cached_property
    def _constants(self) -> set[str]:
        """Values without a gradient."""
        alone = {node.name: number for number, node in enumerate(compute_nodes(self.graph))}
        return {route.value for route in routes(self.graph, alone) if not route.gradient}


def _slower(cost: NodeCost, factor: float) -> NodeCost:
    """Return the cost with all seconds multiplied by `factor`."""
    weight = None if cost.weight is None else cost.weight * factor
    forward, backward = cost.forward * factor, cost.backward * factor
    return replace(cost, forward=forward, backward=backward, weight=weight, dividing=cost.dividing * factor)
