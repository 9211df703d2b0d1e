"""Costs by measurement: every node is run on real tensors, forward and backward, until its time is stable.

    first run (warm-up; its value goes on)  ─►  repeat: fresh roots │ forward │ seeds │ backward   ─►  medians
                                                         untimed      timed    untimed   timed

Nothing of the model or of the thread is changed: parameters, `.grad`, buffers, RNG states, modes. The nodes' times do
not contain what lies between nodes in eager Python, and inputs are warm in the cache, so their sum is a little
optimistic. What it costs to enter autograd, which a stage pays once and not per node, is measured on a node that does
nothing and taken off every backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pipecompile.costs.cell import Cell, tensors_in
from pipecompile.costs.cost import NodeCost
from pipecompile.costs.guard import preserved, state_tensors, untouched
from pipecompile.costs.saved import SavedLedger
from pipecompile.costs.walk import COMPUTE_OPS, walk

__all__ = ["REPEATS", "Repeats", "profiled_costs"]

Clock = Callable[[Callable[[], None]], float]
"""Runs a function and says how many seconds that took."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a node is measured: at least `least` times, then until the spread of its time (interquartile range over
    median) is within `spread`, `most` measurements are made, or its even share of `budget` seconds is used up.
    """

    least: int = 3
    most: int = 25
    spread: float = 0.1
    budget: float = 20.0


REPEATS = Repeats()


@dataclass(frozen=True, slots=True)
class Reading:
    """Median seconds of one node, and their relative spread."""

    forward: float
    backward: float
    spread: float


def profiled_costs(graph: GraphModule, inputs: Sequence[object], *, repeats: Repeats = REPEATS) -> dict[str, NodeCost]:
    """Measure every node of `graph` on `inputs`, where its parameters live. In grad mode the backward is measured too.

    Raises CostError, naming the node and its source line, when one fails; the model is put back then as well.
    """
    tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
    contents = [tensor for tensor in state_tensors(graph) if not isinstance(tensor, nn.Parameter)]
    nodes = sum(node.op in COMPUTE_OPS for node in graph.graph.nodes)
    clock = _clock(tensors)
    with untouched(graph), preserved(contents):
        stopwatch = _Stopwatch(clock, repeats, repeats.budget / max(nodes, 1), _entry(clock, tensors))
        visits = walk(graph, inputs, stopwatch)
    return {
        name: NodeCost(v.reading.forward, v.reading.backward, v.saved_bytes, v.output_bytes, v.reading.spread)
        for name, v in visits.items()
    }


@dataclass(frozen=True, slots=True)
class _Stopwatch:
    """The meter of the walk."""

    clock: Clock
    repeats: Repeats
    share: float
    entry: float

    def __call__(self, cell: Cell) -> Reading:
        cell.first()
        if not cell.computes:
            return Reading(0.0, 0.0, 0.0)
        cell.seed()
        cell.backward()
        rows: list[tuple[float, float]] = []
        started = perf_counter()
        while not self._enough(rows, perf_counter() - started):
            rows.append(self._measure(cell))
        forward, backward = zip(*rows, strict=True)
        return Reading(median(forward), median(backward), _spread(rows))

    def _measure(self, cell: Cell) -> tuple[float, float]:
        cell.prepare()
        forward = self.clock(cell.forward)
        cell.seed()
        return forward, max(self.clock(cell.backward) - self.entry, 0.0) if cell.differentiable else 0.0

    def _enough(self, rows: list[tuple[float, float]], spent: float) -> bool:
        if len(rows) < self.repeats.least:
            return False
        return len(rows) >= self.repeats.most or spent > self.share or _spread(rows) <= self.repeats.spread


def _spread(rows: list[tuple[float, float]]) -> float:
    """Interquartile range over median of the whole times; 0 for a single measurement."""
    totals = [sum(row) for row in rows]
    if len(totals) < 2:
        return 0.0
    low, middle, high = quantiles(totals, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _entry(clock: Clock, tensors: Sequence[Tensor]) -> float:
    """Seconds of a backward that computes nothing: entering the engine."""
    device = tensors[0].device if tensors else torch.device("cpu")
    cell = Cell(lambda x: x.view_as(x), (torch.zeros(1, device=device, requires_grad=True),), {}, (), SavedLedger(()))
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
