"""A draft: a cut of the graph with the costs of its stages and the routes between them, before the draft becomes a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from pipecompile.costs import NodeCost
from pipecompile.costs.node_cost import nodes_needing_grad, weight_grad_cost
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.cut_transfer import fingerprint, node_lines
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.stages import routes
from pipecompile.ir import HOST, Kind, Route, Schedule
from pipecompile.ir.candidates import Considered
from pipecompile.ir.plan import Plan, StageSummary, StepSummary
from pipecompile.ir.routes import stages_after
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, stage_loads
from pipecompile.planning.schedule_choice import make_schedule
from pipecompile.schedules.building_blocks import chain_after
from pipecompile.tracing.emit.call_description import model_path, printable
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Draft", "by_depth", "make_draft", "peak_in_flight", "plan_of"]


@dataclass(frozen=True, slots=True)
class NodeWeights:
    """Weights of a graph that every draft of it needs: the parameters of each node, and the nodes whose value needs a gradient."""

    parameters: Mapping[fx.Node, tuple[torch.nn.Parameter, ...]]
    needing_grad: set[fx.Node]

    @classmethod
    def of(cls, graph: TracedGraph) -> NodeWeights:
        """Look all nodes up once."""
        held = {node: held_tensors(graph, node) for node in compute_nodes(graph)}
        parameters = {
            node: tuple(t for t in tensors if isinstance(t, torch.nn.Parameter)) for node, tensors in held.items()
        }
        return cls(parameters, nodes_needing_grad(graph))


@dataclass(frozen=True, slots=True)
class Draft:
    """A solved partition problem, with the costs and values sent of every stage; `placement[s]` is the device of stage s."""

    partition: Partition
    problem: Problem
    placement: tuple[int, ...]
    stages: tuple[StageSummary, ...]
    routes: tuple[Route, ...]
    weights: NodeWeights
    step: StepSummary | None = None


def make_draft(
    graph: TracedGraph,
    partition: Partition,
    problem: Problem,
    costs: Mapping[str, NodeCost],
    options: Options,
    placement: tuple[int, ...],
    samples: int | None = None,
    weights: NodeWeights | None = None,
) -> Draft:
    """Return the draft of a partition for micro-batches of `samples` samples; None means as many as were recorded. `weights` are those
    of an earlier draft of the graph.
    """
    weights = NodeWeights.of(graph) if weights is None else weights
    alone = replace(
        problem, placement=None, speed=None, links=None, memory_limit=None
    )  # a stage as a device of its own
    loads = stage_loads(alone, partition.stage_of, options.n_stages, partition.recompute or None)
    idle = replace(alone, in_flight=(0.0,) * options.n_stages)
    states = stage_loads(idle, partition.stage_of, options.n_stages, (False,) * options.n_stages)
    forced = options.steering.marks(graph, partition.stage_of, options.n_stages)
    cut_routes = routes(graph, partition.stage_of, samples)
    stages = _summaries(graph, weights, partition.stage_of, costs, cut_routes, options, placement)
    rows = zip(stages, loads, states, forced, strict=True)
    full = (replace(stage, memory=load.memory, state_bytes=state.memory, forced=f) for stage, load, state, f in rows)
    return Draft(partition, problem, placement, tuple(full), cut_routes, weights)


def plan_of(
    graph: TracedGraph,
    draft: Draft,
    cost_model: str,
    options: Options,
    *,
    unforced: float | None = None,
    considered: Considered | None = None,
    samples: int | None = None,
) -> Plan:
    """Return the draft as a Plan. `unforced` is the bottleneck in seconds without the user's constraints on the cut."""
    partition, lines = draft.partition, node_lines(graph)
    names = [str(options.devices[device]) for device in draft.placement]
    stages = tuple(replace(stage, device=name) for stage, name in zip(draft.stages, names, strict=True))
    return Plan(
        fingerprint=fingerprint(lines),
        n_stages=options.n_stages,
        devices=tuple(map(str, options.devices)),
        placement=draft.placement,
        stage_of=dict(partition.stage_of),
        routes=draft.routes,
        stages=stages,
        bottleneck=partition.bottleneck,
        lower_bound=partition.lower_bound,
        status=partition.status,
        method=partition.method,
        cost=cost_model,
        graph=lines,
        unforced=unforced,
        recompute=partition.recompute if options.checkpoint == "auto" else (),
        considered=considered,
        step=draft.step,
        samples=samples,
    )


def _summaries(
    graph: TracedGraph,
    weights: NodeWeights,
    stage_of: Mapping[str, int],
    costs: Mapping[str, NodeCost],
    cut_routes: Sequence[Route],
    options: Options,
    placement: Sequence[int],
) -> list[StageSummary]:
    """Return the row of every stage, with times at the speed of its device."""
    speeds = options.speeds or (1.0,) * len(options.devices)
    members: list[list[fx.Node]] = [[] for _ in range(options.n_stages)]
    for node in compute_nodes(graph):
        members[stage_of[node.name]].append(node)
    described = (_described(weights, s, nodes, cut_routes) for s, nodes in enumerate(members))
    return [
        _timed(stage, nodes, costs, cut_routes, speeds[placement[stage.stage]], weights.needing_grad)
        for stage, nodes in zip(described, members, strict=True)
    ]


def _described(weights: NodeWeights, stage: int, nodes: Sequence[fx.Node], cut_routes: Sequence[Route]) -> StageSummary:
    """Return the summary of a stage's nodes and exchanged values, with times of 0."""
    parameters = {id(parameter): parameter for node in nodes for parameter in weights.parameters[node]}
    sent = sum(r.nbytes * sum(end != HOST for end in r.consumers) for r in cut_routes if r.source == stage)
    skips = [(route.source, end) for route in cut_routes for end in route.skips]
    return StageSummary(
        stage=stage,
        device="",
        first=_label(nodes[0]) if nodes else "",
        last=_label(nodes[-1]) if nodes else "",
        nodes=len(nodes),
        parameters=sum(t.numel() for t in parameters.values()),
        parameter_bytes=float(sum(t.nbytes for t in parameters.values())),
        forward=0.0,
        backward=0.0,
        saved_bytes=0.0,
        sent_bytes=sent,
        skips_in=sum(end == stage for _, end in skips),
        skips_out=sum(source == stage for source, _ in skips),
    )


def _timed(
    stage: StageSummary,
    nodes: Sequence[fx.Node],
    costs: Mapping[str, NodeCost],
    cut_routes: Sequence[Route],
    speed: float,
    with_weight_grad: set[fx.Node],
) -> StageSummary:
    """Return the stage with its seconds per micro-batch and the bytes that its forward saves for its backward."""
    own = [costs[node.name] for node in nodes]
    weight, saves = (
        weight_grad_cost(nodes, costs, with_weight_grad),
        frozenset[str]().union(*(cost.saves for cost in own)),
    )
    received = [r for r in cut_routes if stage.stage in r.consumers and r.gradient and r.source != HOST]
    return replace(
        stage,
        forward=sum(cost.forward for cost in own) / speed,
        backward=sum(cost.backward for cost in own) / speed,
        saved_bytes=sum(cost.saved_bytes for cost in own),
        flops=sum(cost.flops for cost in own),
        weight=weight.seconds / speed,
        dividing=weight.dividing / speed,
        received_bytes=sum(route.nbytes for route in received if route.value not in saves),
        weight_saved_bytes=weight.saved_bytes + sum(route.nbytes for route in received),
    )


def _label(node: fx.Node) -> str:
    """Return a node's module as the user writes it, with the call if the node is not the module itself."""
    if node.op == "call_module":
        return printable(model_path(str(node.target)))
    word = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return printable(f"{facts(node).module}.{word}".strip("."))


# -- micro-batches in flight ----------------------------------------------------------------------------------------


def by_depth(
    graph: TracedGraph,
    draft: Draft,
    costs: Mapping[str, NodeCost],
    options: Options,
    count: int,
    samples: int | None,
) -> Draft:
    """Return the draft with the micro-batches in flight of its DAG of stages, or of a schedule that offloads no more than it must; of
    another chain, the same draft. The cut was solved for as many as a chain holds, which are no fewer.
    """
    if not options.offload and stages_after(options.n_stages, draft.routes) == chain_after(options.n_stages):
        return draft
    if options.schedule == "auto" or (isinstance(options.schedule, Schedule) and not options.offload):
        return draft
    schedule = make_schedule(options, draft.stages, draft.routes, draft.placement, count)
    problem = replace(draft.problem, in_flight=peak_in_flight(schedule, options))
    return make_draft(graph, draft.partition, problem, costs, options, draft.placement, samples, draft.weights)


_CHANGE_IN_FLIGHT = {
    Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.RELOAD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1, Kind.OFFLOAD: -1,
}  # fmt: skip


def peak_in_flight(schedule: Schedule, options: Options) -> tuple[float, ...]:
    """Return, per stage, the peak number of micro-batches whose forward has run and whose backward has not.

    A backward is B, or W if split. A slice counts as its share. For cells that the schedule itself recomputes, R counts instead of
    F. Recomputation requested by `checkpoint` is part of the Problem.
    """
    actions = (a for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE and options.checkpoint == "never")
    recomputed = {action.cell for action in actions}
    now, peak = [0] * options.n_stages, [1] * options.n_stages
    for row in schedule.rows:
        for action in row:
            is_recomputed = action.cell in recomputed
            if action.kind is (Kind.FORWARD if is_recomputed else Kind.RECOMPUTE):
                continue
            now[action.stage] += _CHANGE_IN_FLIGHT.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return tuple(count / schedule.n_slices for count in peak)
