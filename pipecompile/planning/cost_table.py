"""Node costs by micro-batch size. Every size that planning compares is measured once, before anything is cut.

The sizes are those of the first, largest micro-batch of each candidate: a node of a smaller micro-batch costs less, but not
in proportion to its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import fx

from pipecompile.batching.containers import on_device
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.costs import CostError, NodeCost, Repeats, node_costs, select_cost_model
from pipecompile.costs.profile import REPEATS
from pipecompile.costs.user_costs import costs_from_provider, with_user_costs
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.device_placement import follow_device
from pipecompile.options import Options
from pipecompile.planning.thread_slowdown import slowed, thread_slowdown
from pipecompile.runtime.partitions import stream_of
from pipecompile.text.progress import task
from pipecompile.text.units import counted
from pipecompile.torch_private.accelerators import OnStreams
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = [
    "CostTable",
    "MeasuredCosts",
    "by_distance_to_default",
    "hint_at_small_microbatches",
    "measure_costs",
    "samples_of",
]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs of every node for one micro-batch size; `model` is the name of the cost model, such as "profile"."""

    model: str
    by_node: dict[str, NodeCost]


CostTable = dict[int | None, MeasuredCosts | CostError]
"""By samples in a micro-batch (None without a batch): the costs, or why the model cannot be measured at that size."""


def measure_costs(graph: TracedGraph, candidates: Sequence[MiniBatch], options: Options) -> CostTable:
    """Measure or estimate every node at every micro-batch size of `candidates`.

    The profile's time budget is divided among the candidates. Raises CostError if there is one candidate and it fails.
    """
    repeats = replace(REPEATS, budget=REPEATS.budget / len(candidates))
    table: CostTable = {}
    for batch in by_distance_to_default(candidates, options):
        if (samples := samples_of(batch)) in table:
            continue
        try:
            table[samples] = _measure(graph, batch, options, repeats)
        except CostError as error:
            if len(candidates) == 1:
                raise
            table[samples] = error
    return table


def samples_of(batch: MiniBatch) -> int | None:
    """Return the samples in the largest micro-batch, or None if the inputs have no batch dimension."""
    return None if batch.whole.samples is None else batch.sizes[0]


def by_distance_to_default(candidates: Sequence[MiniBatch], options: Options) -> list[MiniBatch]:
    """Sort candidates by how near their number of micro-batches is to the default, in case time runs out."""
    usual = options.default_microbatches
    return sorted(candidates, key=lambda batch: abs(log(len(batch.sizes) / usual)))


def _measure(graph: TracedGraph, batch: MiniBatch, options: Options, repeats: Repeats) -> MeasuredCosts:
    device, leaves = options.devices[0], batch.first.leaves
    on_device, values = _moved(graph, leaves, device) if options.cost != "analytic" else (graph, leaves)
    if callable(options.costs):
        return MeasuredCosts("user", costs_from_provider(on_device, values, options.costs))
    model = select_cost_model(on_device, values, cost=options.cost, device=device)
    verb = "measuring" if model == "profile" else "estimating"
    streams = OnStreams(stream_of(options.partitions[0])) if options.partitions else nullcontext()
    with task(f"{verb} {counted(len(compute_nodes(on_device)), 'operation')}") as work, streams:
        costs = node_costs(on_device, values, cost=model, device=options.cost_device, repeats=repeats, work=work)
        if model == "profile":
            factor = thread_slowdown(graph, batch, leaves, costs, options, budget=repeats.budget / 5)
            costs = _averaged(slowed(costs, factor), len(batch.sizes))
    if options.costs:
        return MeasuredCosts(f"{model} and user", with_user_costs(graph, costs, options.costs))
    return MeasuredCosts(model, costs)


def _averaged(costs: Mapping[str, NodeCost], n_microbatches: int) -> dict[str, NodeCost]:
    """Return the costs of an average micro-batch: the gradients of the first become `.grad`, and need no addition."""
    return {name: cost.with_less_adding(cost.adding / n_microbatches) for name, cost in costs.items()}


def _moved(graph: TracedGraph, leaves: Sequence[Any], device: torch.device) -> tuple[fx.GraphModule, list[Any]]:
    """Return the graph and its inputs on `device`, where costs are measured. Return them as they are if that is the CPU."""
    if device.type == "cpu":
        return graph, list(leaves)
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    placed = follow_device(copy, graph.facts.device, device)
    return fx.GraphModule(graph, placed), [on_device(value, device) for value in leaves]


@contextmanager
def hint_at_small_microbatches(count: int, samples: int | None) -> Iterator[None]:
    """Add to a CostError that micro-batches of `samples` samples may be too small, if `count` micro-batches are several."""
    try:
        yield
    except CostError as error:
        if count == 1:
            raise
        hint = f"n_microbatches=, fewer than {count}, if a micro-batch of {samples} is too small for the model"
        raise CostError(error.what, where=error.where, why=error.why, hint=hint) from error.__cause__
