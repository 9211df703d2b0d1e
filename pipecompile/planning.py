"""From a traced graph to a plan: costs, the partition problem, its solution, and the table that people read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pipecompile.costs import NodeCost, chosen_cost, node_costs
from pipecompile.costs.cost_graph import cost_graph, held_by
from pipecompile.cutting import cut
from pipecompile.errors import PartitionError
from pipecompile.ir import HOST, Kind, Route
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem
from pipecompile.passes.aliasing import compute_nodes
from pipecompile.passes.follow_device import follow_device
from pipecompile.plan import Plan, StageSummary
from pipecompile.runtime.transport import to_device
from pipecompile.scheduling import link_costs, searched
from pipecompile.stages import routes
from pipecompile.tracing.writing.spelling import said

__all__ = ["fingerprint", "make_plan"]


def make_plan(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, n_microbatches: int
) -> tuple[Plan, Problem]:
    """Cut the graph. `inputs` are the flat inputs of one micro-batch. Returns the plan, and the problem it solves.

    Raises PartitionError when there are more stages than the graph can bear, InfeasibleError when no cut fits.
    """
    _check_bearable(graph, options.n_stages)
    cost, costs = _costs(graph, inputs, options)
    link = link_costs(options.devices)
    problem = cost_graph(
        graph,
        costs,
        seconds_per_byte=link[0],
        latency=link[1],
        memory_limit=options.memory_limit,
        in_flight=_in_flight(options, n_microbatches),
    )
    found, problem = cut(graph, problem, options)
    return _plan(graph, found, (cost, costs), options, n_microbatches), problem


def _costs(graph: fx.GraphModule, inputs: Sequence[Any], options: Options) -> tuple[str, dict[str, NodeCost]]:
    """The name of the cost model that was used, and what each node costs under it."""
    device = options.devices[0]
    there, values = _moved(graph, inputs, device) if options.cost != "analytic" else (graph, inputs)
    cost = chosen_cost(there, values, cost=options.cost, device=device)
    return cost, node_costs(there, values, cost=cost, device=device)


def _moved(graph: fx.GraphModule, inputs: Sequence[Any], device: torch.device) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of the graph, and the inputs, as they are on `device`, where costs are measured; a CPU has nothing to move."""
    if device.type == "cpu":
        return graph, list(inputs)
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, follow_device(copied, graph.meta["device"], device)), [
        to_device(value, device) for value in inputs
    ]


def _check_bearable(graph: fx.GraphModule, n_stages: int) -> None:
    tied = sum(len(group) - 1 for group in graph.meta["ties"].groups)
    units = len(compute_nodes(graph)) - tied
    if n_stages > units:
        raise PartitionError(
            f"the model cannot be cut into {n_stages} stages",
            where=f"{type(graph).__name__}: {units} pieces can be separated",
            why="operations that share memory stay together",
            hint=f"n_stages={units} or fewer",
        )


_KEPT = {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}


def _in_flight(options: Options, n_microbatches: int) -> list[float]:
    """Micro-batches in flight on each stage under the schedule: the most F (or R) without their B (or W) that a row reaches."""
    schedule = options.schedule_for(n_microbatches, custom=False)
    again = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
    now, peak = [0] * options.n_stages, [1] * options.n_stages
    for row in schedule.rows:
        for action in row:
            if action.kind is Kind.FORWARD and (action.stage, action.microbatch) in again:
                continue
            now[action.stage] += _KEPT.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return [float(count) for count in peak]


# -- the plan as data -----------------------------------------------------------------------------------------------


def _plan(
    graph: fx.GraphModule,
    found: Partition,
    measured: tuple[str, Mapping[str, NodeCost]],
    options: Options,
    n_microbatches: int,
) -> Plan:
    cost, costs = measured
    placement = options.schedule_for(n_microbatches, custom=False).placement
    ways = routes(graph, found.stage_of, n_microbatches)
    members: list[list[fx.Node]] = [[] for _ in range(options.n_stages)]
    for node in compute_nodes(graph):
        members[found.stage_of[node.name]].append(node)
    stages = tuple(_summary(graph, s, nodes, "", costs, ways) for s, nodes in enumerate(members))
    if options.schedule == "auto":
        placement = searched(options, stages, ways, n_microbatches).placement
    devices = [str(options.devices[device]) for device in placement]
    stages = tuple(replace(stage, device=device) for stage, device in zip(stages, devices, strict=True))
    return Plan(
        fingerprint=fingerprint(graph),
        n_stages=options.n_stages,
        devices=tuple(map(str, options.devices)),
        placement=placement,
        stage_of=dict(found.stage_of),
        routes=ways,
        stages=stages,
        bottleneck=found.bottleneck,
        lower_bound=found.lower_bound,
        status=found.status,
        method=found.method,
        cost=cost,
    )


def _summary(
    graph: fx.GraphModule,
    stage: int,
    nodes: Sequence[fx.Node],
    device: str,
    costs: Mapping[str, NodeCost],
    ways: Sequence[Route],
) -> StageSummary:
    parameters = {id(t): t for node in nodes for t in held_by(graph, node) if isinstance(t, torch.nn.Parameter)}
    sent = sum(way.nbytes * sum(end != HOST for end in way.consumers) for way in ways if way.source == stage)
    skips = [(way.source, end) for way in ways for end in way.skips]
    mine = [costs[node.name] for node in nodes]
    return StageSummary(
        stage=stage,
        device=device,
        first=_label(nodes[0]) if nodes else "",
        last=_label(nodes[-1]) if nodes else "",
        nodes=len(nodes),
        parameters=sum(t.numel() for t in parameters.values()),
        parameter_bytes=float(sum(t.nbytes for t in parameters.values())),
        forward=sum(c.forward for c in mine),
        backward=sum(c.backward for c in mine),
        saved_bytes=sum(c.saved_bytes for c in mine),
        sent_bytes=sent,
        skips_in=sum(end == stage for _, end in skips),
        skips_out=sum(source == stage for source, _ in skips),
    )


def _label(node: fx.Node) -> str:
    """The module of a node as the user writes it, with the call when the node is not the module itself."""
    if node.op == "call_module":
        return said(str(node.target))
    word = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{node.meta.get('module', '')}.{word}".strip(".")


def fingerprint(graph: fx.GraphModule) -> str:
    """A hash of what the plan depends on: names, operations and edges of the graph."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        digest.update(f"{node.name} {node.op} {target} {[n.name for n in node.all_input_nodes]}\n".encode())
    return digest.hexdigest()[:16]
