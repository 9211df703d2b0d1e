"""Measured costs: run the whole graph on real tensors, node by node, until the times are stable.

    first walk: saved bytes, written tensors ─► warm-up sweep ─► sweeps: forward of all nodes, backward of all ─► medians

The model and the thread stay unchanged: parameters, `.grad`, buffers, RNG states, modes. Sweeps cover the whole graph:
a node repeated alone would find its weights in the cache and its memory allocated, which never happens in a step. The
time to enter autograd, which a stage pays once and not per node, is measured on a node that does nothing and subtracted
from every backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pipecompile.costs.flop_formulas import FlopCount
from pipecompile.costs.graph_walk import walk
from pipecompile.costs.node_cost import NodeCost
from pipecompile.costs.node_run import NodeRun, SavedLedger, tensors_in
from pipecompile.costs.sweep import Clock, Seconds, Sums, sweep
from pipecompile.text.progress import Task
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.device_functions import keep_busy
from pipecompile.tracing.opaque.drawn_generators import drawn_generators
from pipecompile.tracing.state.preserved_run import preserved, state_tensors, untouched
from pipecompile.tracing.state.random_states import (
    RandomSource,
    generators_among,
    random_sources,
    random_states_restored,
)
from pipecompile.tracing.state.tensor_contents import CopyBeforeWrite

__all__ = ["REPEATS", "Repeats", "profiled_costs"]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The number of sweeps: at least `least`, then until `spread`, `most` or `budget` is reached.

    `spread` is the interquartile range of the nodes' times over their median, weighted by time; `budget` is seconds.
    """

    least: int = 3
    most: int = 25
    spread: float = 0.1
    budget: float = 20.0


REPEATS = Repeats()


def profiled_costs(
    graph: GraphModule, inputs: Sequence[object], *, repeats: Repeats = REPEATS, work: Task | None = None
) -> dict[str, NodeCost]:
    """Measure every node of `graph` on `inputs`, on the device of its parameters. In grad mode measure the backward,
    too.

    The backward takes the memory of one micro-batch's activations, and of the parameters once more. Raise CostError
    with the node and its source line if a node fails; the model is restored also then. `work` counts runs of nodes.
    """
    tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
    sources = random_sources(drawn_generators(graph, graph.graph.nodes) + generators_among(inputs))
    measured = _clock(tensors)
    runs = _RunCount(work or Task(""), repeats.least, measured.begin if isinstance(measured, StreamClock) else None)
    clock = runs.counted(measured)
    with _restored(graph, sources) as guard:
        with guard:
            visits = walk(graph, inputs, _first)
        with preserved(tensor for visit in visits.values() for tensor in visit.reading.written):
            sums, entry = Sums(graph.parameters() if torch.is_grad_enabled() else ()), _entry(clock, tensors)
            runs.of_sweep(lambda: sweep(graph, inputs, clock, sums))
            times = measure_until_stable(lambda: runs.of_sweep(lambda: sweep(graph, inputs, clock, sums)), repeats)
            halves = [sweep(graph, inputs, clock, sums, divided=True) for _ in range(repeats.least)]
    costs = {}
    for name, visit in visits.items():
        forward, backward, _, adding = (median(column) for column in zip(*times[name], strict=True))
        backward, spread = max(backward - entry, 0.0) + adding, _spread(times[name])
        weight, dividing = _weight_grad_seconds(backward, entry, [one[name] for one in halves])
        sizes = visit.saved_bytes, visit.output_bytes
        costs[name] = NodeCost(
            forward, backward, *sizes, spread, weight, dividing, visit.saves, visit.reading.flops, adding
        )
    return costs


@contextmanager
def _restored(graph: GraphModule, sources: list[RandomSource]) -> Iterator[CopyBeforeWrite]:
    """Restore the model and the thread after the block. Yield the mode for the walk in which nodes write for the first time: it sees writes
    to parameters through other tensors, such as `weight.data`.
    """
    contents = [tensor for tensor in state_tensors(graph) if not isinstance(tensor, nn.Parameter)]
    guard = CopyBeforeWrite([*graph.parameters()])
    with untouched(graph), preserved(contents), guard.restored(), random_states_restored(sources):
        yield guard


class _RunCount:
    """The count of runs of nodes, for progress. After the first sweep the total is known, if `least` sweeps are enough.

    `begin` is called before each sweep with its number; 0 is the warm-up.
    """

    def __init__(self, work: Task, least: int, begin: Callable[[int], None] | None = None) -> None:
        self.work, self.least, self.sweeps, self.begin = work, least, 0, begin

    def counted(self, clock: Clock) -> Clock:
        """Return the clock; it counts its calls."""

        def count(function: Callable[[], None]) -> float:
            self.work.advance()
            return clock(function)

        return count

    def of_sweep(self, once: Callable[[], dict[str, Seconds]]) -> dict[str, Seconds]:
        """Return the times of one sweep, after which the total is that of the sweeps to come."""
        before = self.work.done
        if self.begin is not None:
            self.begin(self.sweeps)
        times = once()
        self.sweeps += 1
        left = (
            max(self.least + 1 - self.sweeps, 0) + self.least
        )  # the warm-up is one more; then as many with I and W apart
        self.work.total = self.work.done + left * (self.work.done - before)
        return times


def _weight_grad_seconds(backward: float, entry: float, halves: Sequence[Seconds]) -> tuple[float, float]:
    """Return the seconds of W, which enters autograd for every node, and the seconds that I and W take beyond the
    backward.
    """
    _, input_grad, weight_grad, adding = (median(column) for column in zip(*halves, strict=True))
    if not weight_grad:
        return 0.0, 0.0
    weight_grad += adding
    dividing = max(input_grad - entry + weight_grad - backward, 0.0)
    return min(weight_grad, backward + dividing), dividing


def measure_until_stable(once: Callable[[], dict[str, Seconds]], repeats: Repeats) -> dict[str, list[Seconds]]:
    """Return the times of every node in as many sweeps as `repeats` requires."""
    started, sweeps = perf_counter(), [once()]
    while True:
        times = {name: [one[name] for one in sweeps] for name in sweeps[0]}
        if len(sweeps) >= repeats.least and (
            len(sweeps) >= repeats.most
            or perf_counter() - started > repeats.budget
            or overall_spread(times) <= repeats.spread
        ):
            return times
        sweeps.append(once())


def overall_spread(times: dict[str, list[Seconds]]) -> float:
    """Return the mean spread of all nodes, weighted by their median times."""
    medians = {name: median(map(sum, rows)) for name, rows in times.items()}
    total = sum(medians.values())
    return sum(_spread(rows) * medians[name] for name, rows in times.items()) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class _FirstRun:
    """The parameters that a node writes, and the FLOPs of its forward."""

    written: list[Tensor]
    flops: float


def _first(run: NodeRun) -> _FirstRun:
    """Run the node with effects."""
    parameters = (t for t in (*run.parameters, *run.arguments) if isinstance(t, nn.Parameter))
    with preserved(parameters) as written, FlopCount() as count:
        run.first()
    return _FirstRun(written, count.flops)


def _spread(rows: list[Seconds]) -> float:
    """Return the interquartile range over the median of the whole times; 0 for a single measurement."""
    totals = [sum(row) for row in rows]
    if len(totals) < 2:
        return 0.0
    low, middle, high = quantiles(totals, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _entry(clock: Clock, tensors: Sequence[Tensor]) -> float:
    """Return the seconds of a backward that computes nothing: the time to enter the engine."""
    device = tensors[0].device if tensors else torch.device("cpu")
    run = NodeRun(lambda x: x.view_as(x), (torch.zeros(1, device=device, requires_grad=True),), {}, (), SavedLedger(()))
    times = []
    with torch.enable_grad():
        for _ in range(21):
            run.prepare()
            run.forward()
            run.seed()
            times.append(clock(run.backward))
    return median(times)


def _clock(tensors: Sequence[Tensor]) -> Clock:
    """Return a clock by events on the first accelerator in use, else by the processor's clock."""
    card = next((tensor.device for tensor in tensors if is_accelerator(tensor.device)), None)
    return _processor_time if card is None else StreamClock(card)


def _processor_time(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


class StreamClock:
    """A clock of a GPU, by events around the kernels of a function. `launching` is the largest time of a launch in this sweep and the
    one before, in seconds.

    The stream is kept busy until all kernels are launched. On an empty stream, the time in which the host launches would count. Each
    node waits for that long, so launches of the warm-up, which load kernels, do not count, and a pause of the host is forgotten.
    """

    def __init__(self, card: torch.device) -> None:
        self.card, self.launching, self._longest, self._most = card, LAUNCH_SECONDS, LAUNCH_SECONDS, LONGEST_LAUNCH

    def begin(self, sweep: int) -> None:
        """Begin a sweep by its number; 0 is the warm-up."""
        self.launching = self._longest if sweep > 1 else LAUNCH_SECONDS
        self._longest, self._most = LAUNCH_SECONDS, LONGEST_LAUNCH if sweep else LAUNCH_SECONDS

    def __call__(self, work: Callable[[], None]) -> float:
        with torch.accelerator.device_index(self.card.index):
            start, end = (torch.Event(self.card, enable_timing=True) for _ in range(2))
            torch.accelerator.synchronize(self.card)
            keep_busy(2 * self.launching)
            start.record()
            begun = perf_counter()
            work()
            self._longest = max(self._longest, min(perf_counter() - begun, self._most))
            self.launching = max(self.launching, self._longest)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000


LAUNCH_SECONDS = 100e-6
"""Seconds that launching a node takes at first; profilers show 15 to 40 µs for a node of a few kernels."""

LONGEST_LAUNCH = 10e-3
"""Seconds of a launch beyond which the host waits for something else, such as the compilation of a kernel."""
