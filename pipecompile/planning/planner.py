"""From a traced graph to a plan: costs, the partition problem, its solution, and the table that people read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from pipecompile.costs import NodeCost, Repeats, node_costs, select_cost_model
from pipecompile.costs.problem_builder import build_problem
from pipecompile.costs.profile import REPEATS
from pipecompile.costs.user_costs import costs_from_provider, with_user_costs
from pipecompile.costs.weight_grad import nodes_needing_grad, weight_grad_cost
from pipecompile.errors import InfeasibleError, PartitionError, PartitionWarning
from pipecompile.graph.colocation import compute_nodes, ties_of
from pipecompile.graph.device_placement import follow_device
from pipecompile.graph.fingerprint import fingerprint, node_lines
from pipecompile.graph.held_tensors import held_tensors
from pipecompile.graph.stages import routes
from pipecompile.ir import HOST, Kind, Route, Schedule
from pipecompile.ir.candidates import Considered
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, stage_loads
from pipecompile.planning.infeasible_hint import with_enough_stages
from pipecompile.planning.progress import working
from pipecompile.planning.schedule_choice import searched
from pipecompile.planning.solve_cut import cut, free_bottleneck
from pipecompile.torch_private.devices import to_device
from pipecompile.tracing.emit.node_target import said
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = [
    "Chosen",
    "Draft",
    "check_bearable",
    "drafted",
    "flying",
    "make_plan",
    "make_problem",
    "measured",
    "plan_of",
    "unforced_bottleneck",
    "warn_of_gap",
]

Chosen = tuple[Plan, Problem | None, int | None]
"""A plan, the problem it solves where that was made, and the samples of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A cut, the problem it solves, and what follows from both: what each stage costs and what travels between them."""

    found: Partition
    problem: Problem
    placement: tuple[int, ...]
    stages: tuple[StageSummary, ...]
    routes: tuple[Route, ...]


def make_plan(
    graph: TracedGraph, inputs: Sequence[Any], options: Options, n_microbatches: int, samples: int | None = None
) -> tuple[Plan, Problem]:
    """A plan, and the problem it solves. `inputs` are those of one micro-batch, flat, of so many `samples`, or as were recorded.

    Raises PartitionError when there are more stages than the graph can bear, InfeasibleError when no cut fits.
    """
    check_bearable(graph, options.n_stages)
    cost, costs = measured(graph, inputs, options)
    schedule = options.schedule_for(n_microbatches, custom=False)
    problem = make_problem(graph, costs, options, schedule)
    try:
        found, solved = cut(graph, options.steering.on(graph, problem), options)
    except InfeasibleError as error:
        raise with_enough_stages(error, partial(asked_problem, graph, costs, n_microbatches), options) from None
    warn_of_gap(found, options)
    draft = drafted(graph, found, solved, costs, options, schedule.placement, samples)
    if options.schedule == "auto" and not options.has_unequal_devices:
        there = searched(options.with_recompute(found.recompute), draft.stages, draft.routes, n_microbatches).placement
        draft = replace(draft, placement=there)
    return plan_of(graph, draft, cost, options, unforced=unforced_bottleneck(graph, problem, found, options)), solved


def asked_problem(graph: TracedGraph, costs: Mapping[str, NodeCost], n_microbatches: int, options: Options) -> Problem:
    """The problem under the schedule that options ask for."""
    return make_problem(graph, costs, options, options.schedule_for(n_microbatches, custom=False))


def make_problem(graph: TracedGraph, costs: Mapping[str, NodeCost], options: Options, schedule: Schedule) -> Problem:
    """What is to be cut, with the machine that it is cut for, before anything is forced.

    Where devices are alike and have no limit, every stage counts as a device: even stages make even devices.
    """
    links, placement = options.links, schedule.placement
    problem = build_problem(
        graph, costs,
        seconds_per_byte=links.seconds_per_byte,
        latency=links.latency,
        memory_limit=options.memory_limit,
        in_flight=flying(schedule, options),
        optimizer_state=options.optimizer_state,
        restored=options.restored_at_once(schedule.n_microbatches),
    )  # fmt: skip
    shared = options.has_unequal_devices and placement != tuple(range(options.n_stages))
    return replace(
        problem,
        speed=options.speeds,
        links=links.factors,
        placement=placement if shared else None,
        recompute=options.recompute,
    )


def warn_of_gap(found: Partition, options: Options) -> None:
    if found.status == "feasible" and options.partitioner != "dp":
        warnings.warn(
            f"the cut is not proven to be the best after {options.time_limit:g} s: its slowest stage is at most "
            f"{found.gap:.2%} above the least there can be. A larger time_limit may close this",
            PartitionWarning,
            stacklevel=2,
        )


def measured(
    graph: TracedGraph, inputs: Sequence[Any], options: Options, repeats: Repeats = REPEATS
) -> tuple[str, dict[str, NodeCost]]:
    """The name of the cost model that was used, and what each node costs under it for one micro-batch `inputs`."""
    device = options.devices[0]
    there, values = _moved(graph, inputs, device) if options.cost != "analytic" else (graph, inputs)
    if callable(options.costs):
        return "own", costs_from_provider(there, values, options.costs)
    cost = select_cost_model(there, values, cost=options.cost, device=device)
    with working(f"{'measuring' if cost == 'profile' else 'estimating'} {len(compute_nodes(there))} operations"):
        costs = node_costs(there, values, cost=cost, device=device, repeats=repeats)
    return (f"{cost} and own", with_user_costs(graph, costs, options.costs)) if options.costs else (cost, costs)


def _moved(graph: TracedGraph, inputs: Sequence[Any], device: torch.device) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of the graph, and the inputs, as they are on `device`, where costs are measured; a CPU has nothing to move."""
    if device.type == "cpu":
        return graph, list(inputs)
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, follow_device(copied, graph.facts.device, device)), [
        to_device(value, device) for value in inputs
    ]


def check_bearable(graph: TracedGraph, n_stages: int) -> None:
    tied = sum(len(group) - 1 for group in ties_of(graph).groups)
    units = len(compute_nodes(graph)) - tied
    if n_stages > units:
        raise PartitionError(
            f"the model cannot be cut into {n_stages} stages",
            where=f"{type(graph).__name__}: {units} pieces can be separated",
            why="operations that share memory stay together",
            hint=f"n_stages={units} or fewer",
        )


_KEPT = {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}


def flying(schedule: Schedule, options: Options) -> tuple[float, ...]:
    """Micro-batches in flight on each stage under the schedule: the most F without their B (or W) that a row reaches; of a
    schedule that comes with R, what those restore. What `checkpoint` recomputes is the problem's own affair.
    """
    cells = (a for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE and options.checkpoint == "never")
    again = {(action.stage, action.microbatch) for action in cells}
    now, peak = [0] * options.n_stages, [1] * options.n_stages
    for row in schedule.rows:
        for action in row:
            if action.kind is (Kind.FORWARD if (action.stage, action.microbatch) in again else Kind.RECOMPUTE):
                continue
            now[action.stage] += _KEPT.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return tuple(map(float, peak))


def unforced_bottleneck(graph: TracedGraph, problem: Problem, found: Partition, options: Options) -> float | None:
    return free_bottleneck(graph, problem, found, options) if options.steering else None


# -- the plan as data -----------------------------------------------------------------------------------------------


def drafted(
    graph: TracedGraph,
    found: Partition,
    problem: Problem,
    costs: Mapping[str, NodeCost],
    options: Options,
    placement: tuple[int, ...],
    samples: int | None = None,
) -> Draft:
    """What follows from a cut, for micro-batches of so many samples, by default as many as were recorded."""
    alone = _each_alone(problem)
    rows = stage_loads(alone, found.stage_of, options.n_stages, found.recompute or None)
    idle = replace(alone, in_flight=(0.0,) * options.n_stages)
    always = stage_loads(idle, found.stage_of, options.n_stages, (False,) * options.n_stages)
    forced = options.steering.marks(graph, found.stage_of, options.n_stages)
    speeds = options.speeds or (1.0,) * len(options.devices)
    ways = routes(graph, found.stage_of, samples)
    members: list[list[fx.Node]] = [[] for _ in range(options.n_stages)]
    for node in compute_nodes(graph):
        members[found.stage_of[node.name]].append(node)
    wants = nodes_needing_grad(graph)
    stages = [_summary(graph, s, nodes, costs, ways, speeds[placement[s]], wants) for s, nodes in enumerate(members)]
    told = zip(stages, rows, always, forced, strict=True)
    full = tuple(replace(s, memory=r.memory, state_bytes=a.memory, forced=f) for s, r, a, f in told)
    return Draft(found, problem, placement, full, ways)


def plan_of(
    graph: TracedGraph,
    draft: Draft,
    cost: str,
    options: Options,
    *,
    unforced: float | None = None,
    considered: Considered | None = None,
) -> Plan:
    """A draft as a plan, with the names of things."""
    found, lines = draft.found, node_lines(graph)
    names = [str(options.devices[device]) for device in draft.placement]
    return Plan(
        fingerprint=fingerprint(lines),
        n_stages=options.n_stages,
        devices=tuple(map(str, options.devices)),
        placement=draft.placement,
        stage_of=dict(found.stage_of),
        routes=draft.routes,
        stages=tuple(replace(stage, device=name) for stage, name in zip(draft.stages, names, strict=True)),
        bottleneck=found.bottleneck,
        lower_bound=found.lower_bound,
        status=found.status,
        method=found.method,
        cost=cost,
        graph=lines,
        unforced=unforced,
        recompute=found.recompute if options.checkpoint == "auto" else (),
        considered=considered,
    )


def _each_alone(problem: Problem) -> Problem:
    """Every stage as a device of its own, to see what it holds."""
    return replace(problem, placement=None, speed=None, links=None, memory_limit=None)


def _summary(
    graph: TracedGraph,
    stage: int,
    nodes: Sequence[fx.Node],
    costs: Mapping[str, NodeCost],
    ways: Sequence[Route],
    speed: float,
    wants: set[fx.Node],
) -> StageSummary:
    parameters = {id(t): t for node in nodes for t in held_tensors(graph, node) if isinstance(t, torch.nn.Parameter)}
    sent = sum(way.nbytes * sum(end != HOST for end in way.consumers) for way in ways if way.source == stage)
    skips = [(way.source, end) for way in ways for end in way.skips]
    mine = [costs[node.name] for node in nodes]
    waits, saves = weight_grad_cost(nodes, costs, wants), frozenset[str]().union(*(cost.saves for cost in mine))
    came = [way for way in ways if stage in way.consumers and way.gradient and way.source != HOST]
    received = sum(way.nbytes for way in came)
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
        weight=waits.seconds / speed,
        dividing=waits.dividing / speed,
        received_bytes=sum(way.nbytes for way in came if way.value not in saves),
        weight_saved_bytes=waits.saved_bytes + received,
    )


def _label(node: fx.Node) -> str:
    """The module of a node as the user writes it, with the call when the node is not the module itself."""
    if node.op == "call_module":
        return said(str(node.target))
    word = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{facts(node).module}.{word}".strip(".")
