"""One training pass over a graph, node by node, with the time of each node among all others.

    a ──► b ──► c        forward, in order; each node's part of the autograd graph is kept, its arguments are not
    a ◄── b ◄── c        backward, from the last: seeded with the gradients received, added to those that exist

Caches are as cold and memory is as new as in a step. A parameter's gradient is added to the sum over all micro-batches.
The gradients of a value with several users are added up at the node that provides the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule
from torch.utils.weak import WeakTensorKeyDictionary

from pipecompile.costs.graph_walk import naming, walk
from pipecompile.costs.node_run import NodeRun

__all__ = ["Clock", "Seconds", "Sums", "sweep"]

Clock = Callable[[Callable[[], None]], float]
"""Runs a function and returns its seconds."""


class Seconds(NamedTuple):
    """Seconds of a node's forward, of its backward, of the part of its backward left to W, and of adding its parameters' gradients."""

    forward: float
    backward: float = 0.0
    weight: float = 0.0
    adding: float = 0.0


class Sums:
    """The sums of parameters' gradients, in place of `.grad`: they take as much memory as the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._of = {id(p): _Sum(torch.zeros_like(p).detach(), in_place=True) for p in parameters if p.requires_grad}

    def of(self, tensor: Tensor) -> _Sum | None:
        return self._of.get(id(tensor))


@dataclass(slots=True)
class _Sum:
    """The sum of the gradients of one tensor so far."""

    value: Tensor | None = None
    in_place: bool = False

    def add(self, gradient: Tensor) -> None:
        if self.value is None:
            self.value = gradient
        elif self.in_place:
            self.value.add_(gradient)
        else:
            self.value = self.value + gradient

    def take(self) -> Tensor | None:
        taken, self.value = self.value, None
        return taken


@dataclass(slots=True)
class _End:
    """A start of a node's backward: its gradient edge, the gradient received so far, a tensor of its shape, its
    device.
    """

    edge: GradientEdge
    sum: _Sum
    form: Tensor
    device: torch.device

    def seed(self) -> Tensor:
        came = self.sum.take()
        return torch.ones_like(self.form, device=self.device) if came is None else came


Sources = list[tuple[GradientEdge, _Sum]]
"""Gradient edges, and the sums to which their gradients are added."""


@dataclass(slots=True)
class _Step:
    """One node: seconds of its forward, and the data for its backward. `weight_sources` are the weights that W can take care
    of; `exploring` are the seconds to find these weights. I spends them again in every micro-batch; on a GPU they are 0, since the host
    searches beside the kernels. `found` are gradients of parameters, not added yet.
    """

    forward: float
    ends: list[_End]
    input_sources: Sources = field(default_factory=list)
    weight_sources: Sources = field(default_factory=list)
    exploring: float = 0.0
    seeds: list[Tensor] = field(default_factory=list)
    found: list[tuple[_Sum, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        self.seeds = [end.seed() for end in self.ends]

    def backward(self, sources: Sources, keep: bool) -> None:
        """Compute the gradients, and add those of values. Those of parameters are added by `add`."""
        edges, places = [end.edge for end in self.ends], [place for place, _ in sources]
        gradients = torch.autograd.grad(edges, places, self.seeds, retain_graph=keep, allow_unused=True)
        for (_, into), gradient in zip(sources, gradients, strict=True):
            if gradient is not None and into.in_place:
                self.found.append((into, gradient))
            elif gradient is not None:
                into.add(gradient)

    def add(self) -> None:
        """Add the gradients of parameters that `backward` has found."""
        for into, gradient in self.found:
            into.add(gradient)
        self.found.clear()


class _Forward:
    """The meter of the walk: time each forward and keep the data for its backward."""

    def __init__(self, clock: Clock, sums: Sums) -> None:
        self.clock, self.sums = clock, sums
        self.known: MutableMapping[Tensor, _Sum] = WeakTensorKeyDictionary()

    def __call__(self, run: NodeRun) -> _Step:
        run.prepare()
        seconds = self.clock(run.forward)
        run.settle()
        run.find_ends()
        if not run.computes or not run.ends:
            return _Step(seconds if run.computes else 0.0, [])
        step = _Step(seconds, [self._end(run, end) for end in run.ends])
        start = perf_counter()
        weight_grad_nodes = run.weight_grad_nodes(recorded=False)
        step.exploring = perf_counter() - start if step.ends[0].device.type == "cpu" else 0.0
        for tensor, place in run.sources:
            (step.weight_sources if place.node in weight_grad_nodes else step.input_sources).append(
                (place, self._sum(tensor))
            )
        return step

    def _end(self, run: NodeRun, end: Tensor) -> _End:
        return _End(
            get_gradient_edge(end), self._sum(run.value_of(end)), torch.empty_like(end, device="meta"), end.device
        )

    def _sum(self, tensor: Tensor) -> _Sum:
        """Return the sum of a parameter over all sweeps, or the sum of a value in this sweep."""
        sum_of_tensor = self.sums.of(tensor)
        if sum_of_tensor is None and (sum_of_tensor := self.known.get(tensor)) is None:
            sum_of_tensor = self.known[tensor] = _Sum()
        return sum_of_tensor


def sweep(
    graph: GraphModule, inputs: Sequence[object], clock: Clock, sums: Sums, *, divided: bool = False
) -> dict[str, Seconds]:
    """Return the times of every compute node in one pass. With `divided`, W runs after all other backwards.

    Raise CostError naming the node that fails.
    """
    steps = {name: visit.reading for name, visit in walk(graph, inputs, _Forward(clock, sums)).items()}
    nodes = {node.name: node for node in graph.graph.nodes}
    times = {name: Seconds(step.forward) for name, step in steps.items()}
    postponed: dict[str, _Step] = {}
    while steps:
        name, step = steps.popitem()  # the last; what autograd saved for it goes with it
        keep = divided and bool(step.weight_sources)
        sources = step.input_sources if keep else step.input_sources + step.weight_sources
        if sources:
            step.begin()
            with naming(nodes[name]):
                backward, adding = _timed(step, sources, keep, clock)
            times[name] = times[name]._replace(backward=backward + step.exploring * keep, adding=adding)
        if keep:
            postponed[name] = step
    for name, step in postponed.items():
        with naming(nodes[name]):
            weight, adding = _timed(step, step.weight_sources, False, clock)
        times[name] = times[name]._replace(weight=weight, adding=times[name].adding + adding)
    return times


def _timed(step: _Step, sources: Sources, keep: bool, clock: Clock) -> tuple[float, float]:
    """Run a backward. Return its seconds, and those of adding gradients of parameters."""
    return clock(partial(step.backward, sources, keep)), clock(step.add) if step.found else 0.0
