"""Costs by measurement: the whole graph is run on real tensors, node by node, until the times are stable.

    first walk: saved bytes, what is written ─► warm-up sweep ─► sweeps: forward of all nodes, backward of all ─► medians

Nothing of the model or of the thread is changed: parameters, `.grad`, buffers, RNG states, modes. Whole sweeps, and not
each node again and again, because a node that was just run finds its weights in the cache and its memory at hand, which
it never does in a step. What it costs to enter autograd, which a stage pays once and not per node, is measured on a node
that does nothing and taken off every backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pipecompile.costs.graph_walk import walk
from pipecompile.costs.node_cost import NodeCost
from pipecompile.costs.node_run import NodeRun, tensors_in
from pipecompile.costs.saved_bytes import SavedLedger
from pipecompile.costs.sweep import Clock, Seconds, Sums, sweep
from pipecompile.tracing.state.preserved_run import preserved, state_tensors, untouched

__all__ = ["REPEATS", "Repeats", "profiled_costs"]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many sweeps are made: at least `least`, then until the spread of the nodes' times (interquartile range over
    median, long nodes weighing more) is within `spread`, `most` sweeps are made, or `budget` seconds are used up.
    """

    least: int = 3
    most: int = 25
    spread: float = 0.1
    budget: float = 20.0


REPEATS = Repeats()


def profiled_costs(graph: GraphModule, inputs: Sequence[object], *, repeats: Repeats = REPEATS) -> dict[str, NodeCost]:
    """Measure every node of `graph` on `inputs`, where its parameters live. In grad mode the backward is measured too,
    which takes the memory of one micro-batch's activations, and of the parameters once more.

    Raises CostError, naming the node and its source line, when one fails; the model is put back then as well.
    """
    tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
    contents = [tensor for tensor in state_tensors(graph) if not isinstance(tensor, nn.Parameter)]
    clock = _clock(tensors)
    with untouched(graph), preserved(contents):
        visits = walk(graph, inputs, _first)
        with preserved(tensor for visit in visits.values() for tensor in visit.reading):
            sums, entry = Sums(graph.parameters() if torch.is_grad_enabled() else ()), _entry(clock, tensors)
            sweep(graph, inputs, clock, sums)
            times = repeated(lambda: sweep(graph, inputs, clock, sums), repeats)
            halves = [sweep(graph, inputs, clock, sums, divided=True) for _ in range(repeats.least)]
    costs = {}
    for name, visit in visits.items():
        forward, backward, _ = (median(column) for column in zip(*times[name], strict=True))
        backward, spread = max(backward - entry, 0.0), _spread(times[name])
        weight, dividing = _late(backward, entry, [one[name] for one in halves])
        sizes = visit.saved_bytes, visit.output_bytes
        costs[name] = NodeCost(forward, backward, *sizes, spread, weight, dividing, visit.saves)
    return costs


def _late(backward: float, entry: float, halves: Sequence[Seconds]) -> tuple[float, float]:
    """Seconds of W, which enters autograd for every node, and what I and W take beyond the backward."""
    _, inward, late = (median(column) for column in zip(*halves, strict=True))
    if not late:
        return 0.0, 0.0
    dividing = max(inward - entry + late - backward, 0.0)
    return min(late, backward + dividing), dividing


def repeated(once: Callable[[], dict[str, Seconds]], repeats: Repeats) -> dict[str, list[Seconds]]:
    """The times of every node in as many sweeps as it takes."""
    started, made = perf_counter(), [once()]
    while True:
        times = {name: [one[name] for one in made] for name in made[0]}
        if len(made) >= repeats.least and (
            len(made) >= repeats.most or perf_counter() - started > repeats.budget or unrest(times) <= repeats.spread
        ):
            return times
        made.append(once())


def unrest(times: dict[str, list[Seconds]]) -> float:
    """The spread of all nodes, each weighing as much as it takes."""
    takes = {name: median(map(sum, rows)) for name, rows in times.items()}
    total = sum(takes.values())
    return sum(_spread(rows) * takes[name] for name, rows in times.items()) / total if total else 0.0


def _first(cell: NodeRun) -> list[Tensor]:
    """The parameters that a node writes."""
    with preserved(t for t in (*cell.parameters, *cell.given) if isinstance(t, nn.Parameter)) as written:
        cell.first()
    return written


def _spread(rows: list[Seconds]) -> float:
    """Interquartile range over median of the whole times; 0 for a single measurement."""
    totals = [sum(row) for row in rows]
    if len(totals) < 2:
        return 0.0
    low, middle, high = quantiles(totals, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _entry(clock: Clock, tensors: Sequence[Tensor]) -> float:
    """Seconds of a backward that computes nothing: entering the engine."""
    device = tensors[0].device if tensors else torch.device("cpu")
    cell = NodeRun(
        lambda x: x.view_as(x), (torch.zeros(1, device=device, requires_grad=True),), {}, (), SavedLedger(())
    )
    times = []
    with torch.enable_grad():
        for _ in range(21):
            cell.prepare()
            cell.forward()
            cell.seed()
            times.append(clock(cell.backward))
    return median(times)


def _clock(tensors: Sequence[Tensor]) -> Clock:
    """Events on the first CUDA device in use, else the processor's clock."""
    card = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return _processor_time if card is None else lambda work: _stream_time(card, work)


def _processor_time(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _stream_time(card: torch.device, work: Callable[[], None]) -> float:
    """Seconds between two events around `work` on the current stream, which is empty at the start."""
    with torch.cuda.device(card):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(card)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
