"""From a traced graph to a plan: costs, the partition problem, its solution, and the table that people read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pipecompile.costs import NodeCost, chosen_cost, node_costs
from pipecompile.costs.cost_graph import cost_graph, held_by
from pipecompile.costs.given import overridden, provided
from pipecompile.cutting import cut, free_bottleneck
from pipecompile.errors import PartitionError, PartitionWarning
from pipecompile.fingerprints import fingerprint, node_lines
from pipecompile.halving import wanting, weight_seconds
from pipecompile.ir import HOST, Kind, Route
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, stage_loads
from pipecompile.passes.aliasing import compute_nodes
from pipecompile.passes.follow_device import follow_device
from pipecompile.plan import Plan, StageSummary
from pipecompile.runtime.transport import to_device
from pipecompile.scheduling import searched
from pipecompile.show.progress import working
from pipecompile.stages import routes
from pipecompile.tracing.writing.spelling import said

__all__ = ["make_plan"]


def make_plan(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, n_microbatches: int
) -> tuple[Plan, Problem]:
    """Cut the graph. `inputs` are the flat inputs of one micro-batch. Returns the plan, and the problem it solves.

    Raises PartitionError when there are more stages than the graph can bear, InfeasibleError when no cut fits.
    """
    _check_bearable(graph, options.n_stages)
    cost, costs = _costs(graph, inputs, options)
    problem = _problem(graph, costs, options, n_microbatches)
    found, solved = cut(graph, options.steering.on(graph, problem), options)
    _warn_of_gap(found, options)
    unforced = free_bottleneck(graph, problem, found, options) if options.steering else None
    return _plan(graph, found, solved, (cost, costs), options, n_microbatches, unforced), solved


def _problem(graph: fx.GraphModule, costs: Mapping[str, NodeCost], options: Options, n_microbatches: int) -> Problem:
    """What is to be cut, with the machine that it is cut for, before anything is forced.

    Where devices are alike and have no limit, every stage counts as a device: even stages make even devices.
    """
    links, placement = options.links, options.schedule_for(n_microbatches, custom=False).placement
    problem = cost_graph(
        graph,
        costs,
        seconds_per_byte=links.seconds_per_byte,
        latency=links.latency,
        memory_limit=options.memory_limit,
        in_flight=_in_flight(options, n_microbatches),
        optimizer_state=options.optimizer_state,
    )
    shared = options.devices_differ and placement != tuple(range(options.n_stages))
    return replace(
        problem,
        speed=options.speeds,
        links=links.factors,
        placement=placement if shared else None,
        recompute=options.recompute,
    )


def _warn_of_gap(found: Partition, options: Options) -> None:
    if found.status == "feasible" and options.partitioner != "dp":
        warnings.warn(
            f"the cut is not proven to be the best after {options.time_limit:g} s: its slowest stage is at most "
            f"{found.gap:.2%} above the least there can be. A larger time_limit may close this",
            PartitionWarning,
            stacklevel=2,
        )


def _costs(graph: fx.GraphModule, inputs: Sequence[Any], options: Options) -> tuple[str, dict[str, NodeCost]]:
    """The name of the cost model that was used, and what each node costs under it."""
    device = options.devices[0]
    there, values = _moved(graph, inputs, device) if options.cost != "analytic" else (graph, inputs)
    if callable(options.costs):
        return "own", provided(there, values, options.costs)
    cost = chosen_cost(there, values, cost=options.cost, device=device)
    with working(f"{'measuring' if cost == 'profile' else 'estimating'} {len(compute_nodes(there))} operations"):
        costs = node_costs(there, values, cost=cost, device=device)
    return (f"{cost} and own", overridden(graph, costs, options.costs)) if options.costs else (cost, costs)


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
    """Micro-batches in flight on each stage under the schedule: the most F without their B (or W) that a row reaches; of a
    schedule that comes with R, what those restore. What `checkpoint` recomputes is the problem's own affair.
    """
    schedule = options.schedule_for(n_microbatches, custom=False)
    cells = (a for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE and options.checkpoint == "never")
    again = {(action.stage, action.microbatch) for action in cells}
    now, peak = [0] * options.n_stages, [1] * options.n_stages
    for row in schedule.rows:
        for action in row:
            if action.kind is (Kind.FORWARD if (action.stage, action.microbatch) in again else Kind.RECOMPUTE):
                continue
            now[action.stage] += _KEPT.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return [float(count) for count in peak]


# -- the plan as data -----------------------------------------------------------------------------------------------


def _plan(
    graph: fx.GraphModule,
    found: Partition,
    problem: Problem,
    measured: tuple[str, Mapping[str, NodeCost]],
    options: Options,
    n_microbatches: int,
    unforced: float | None,
) -> Plan:
    cost, costs = measured
    placement = options.schedule_for(n_microbatches, custom=False).placement
    lines = node_lines(graph)
    rows = stage_loads(_each_alone(problem), found.stage_of, options.n_stages, found.recompute or None)
    forced = options.steering.marks(graph, found.stage_of, options.n_stages)
    speeds = options.speeds or (1.0,) * len(options.devices)
    ways = routes(graph, found.stage_of, n_microbatches)
    members: list[list[fx.Node]] = [[] for _ in range(options.n_stages)]
    for node in compute_nodes(graph):
        members[found.stage_of[node.name]].append(node)
    wants = wanting(graph)
    stages = tuple(
        replace(
            _summary(graph, s, nodes, costs, ways, speeds[placement[s]]),
            memory=rows[s].memory,
            forced=forced[s],
            weight=weight_seconds(nodes, costs, wants) / speeds[placement[s]],
        )
        for s, nodes in enumerate(members)
    )
    if options.schedule == "auto" and not options.devices_differ:
        placement = searched(options.settled(found.recompute), stages, ways, n_microbatches).placement
    names = [str(options.devices[device]) for device in placement]
    stages = tuple(replace(stage, device=name) for stage, name in zip(stages, names, strict=True))
    return Plan(
        fingerprint=fingerprint(lines),
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
        graph=lines,
        unforced=unforced,
        recompute=found.recompute if options.checkpoint == "auto" else (),
    )


def _each_alone(problem: Problem) -> Problem:
    """Every stage as a device of its own, to see what it holds."""
    return replace(problem, placement=None, speed=None, links=None, memory_limit=None)


def _summary(
    graph: fx.GraphModule,
    stage: int,
    nodes: Sequence[fx.Node],
    costs: Mapping[str, NodeCost],
    ways: Sequence[Route],
    speed: float,
) -> StageSummary:
    parameters = {id(t): t for node in nodes for t in held_by(graph, node) if isinstance(t, torch.nn.Parameter)}
    sent = sum(way.nbytes * sum(end != HOST for end in way.consumers) for way in ways if way.source == stage)
    skips = [(way.source, end) for way in ways for end in way.skips]
    mine = [costs[node.name] for node in nodes]
    return StageSummary(
        stage=stage,
        device="",
        first=_label(nodes[0]) if nodes else "",
        last=_label(nodes[-1]) if nodes else "",
        nodes=len(nodes),
        parameters=sum(t.numel() for t in parameters.values()),
        parameter_bytes=float(sum(t.nbytes for t in parameters.values())),
        forward=sum(c.forward for c in mine) / speed,
        backward=sum(c.backward for c in mine) / speed,
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
