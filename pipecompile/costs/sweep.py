"""One training pass over a graph, node by node, with the time that each node takes in the company of all others.

    a ──► b ──► c        forward, in order; each node's part of the autograd graph is kept, its arguments are not
    a ◄── b ◄── c        backward, from the last: seeded with the gradients that came, added to those that are there

So the caches are as cold, and memory is as new, as in a step. A parameter's gradient is added to the sum of all
micro-batches; the gradients of a value that several nodes use are added up at the node that gives one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule
from torch.utils.weak import WeakTensorKeyDictionary

from pipecompile.costs.graph_walk import naming, walk
from pipecompile.costs.node_run import NodeRun

__all__ = ["Clock", "Seconds", "Sums", "sweep"]

Clock = Callable[[Callable[[], None]], float]
"""Runs a function and says how many seconds that took."""


Seconds = tuple[float, float, float]
"""Of a node's forward, of its backward, and of what was left of that to W."""


class Sums:
    """What the gradients of parameters are added to, in the place of `.grad`: as much memory as the parameters take."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._of = {id(p): _Sum(torch.zeros_like(p).detach(), in_place=True) for p in parameters if p.requires_grad}

    def of(self, tensor: Tensor) -> _Sum | None:
        return self._of.get(id(tensor))


@dataclass(slots=True)
class _Sum:
    """Gradients of one tensor so far."""

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
    """Where a node's backward starts: its place in the autograd graph, what has come for it, a tensor of that form."""

    edge: GradientEdge
    sum: _Sum
    form: Tensor
    device: torch.device

    def seed(self) -> Tensor:
        came = self.sum.take()
        return torch.ones_like(self.form, device=self.device) if came is None else came


Sources = list[tuple[GradientEdge, _Sum]]
"""What gradients are asked of, and what they are added to."""


@dataclass(slots=True)
class _Step:
    """One node: seconds of its forward, and what its backward needs. `late` are weights that W can take care of."""

    forward: float
    ends: list[_End]
    early: Sources = field(default_factory=list)
    late: Sources = field(default_factory=list)
    seeds: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        self.seeds = [end.seed() for end in self.ends]

    def backward(self, sources: Sources, keep: bool) -> None:
        edges, places = [end.edge for end in self.ends], [place for place, _ in sources]
        found = torch.autograd.grad(edges, places, self.seeds, retain_graph=keep, allow_unused=True)
        for (_, into), gradient in zip(sources, found, strict=True):
            if gradient is not None:
                into.add(gradient)


class _Forward:
    """The meter of the walk."""

    def __init__(self, clock: Clock, sums: Sums) -> None:
        self.clock, self.sums = clock, sums
        self.known: MutableMapping[Tensor, _Sum] = WeakTensorKeyDictionary()

    def __call__(self, cell: NodeRun) -> _Step:
        cell.prepare()
        seconds = self.clock(cell.forward)
        cell.settle()
        cell.find_ends()
        if not cell.computes or not cell.ends:
            return _Step(seconds if cell.computes else 0.0, [])
        step = _Step(seconds, [self._end(cell, end) for end in cell.ends])
        late = cell.late(recorded=False)
        for tensor, place in cell.sources:
            (step.late if place.node in late else step.early).append((place, self._sum(tensor)))
        return step

    def _end(self, cell: NodeRun, end: Tensor) -> _End:
        return _End(get_gradient_edge(end), self._sum(cell.seen(end)), torch.empty_like(end, device="meta"), end.device)

    def _sum(self, tensor: Tensor) -> _Sum:
        """Of a parameter the sum of all sweeps, of a value that of this one."""
        found = self.sums.of(tensor)
        if found is None and (found := self.known.get(tensor)) is None:
            found = self.known[tensor] = _Sum()
        return found


def sweep(
    graph: GraphModule, inputs: Sequence[object], clock: Clock, sums: Sums, *, divided: bool = False
) -> dict[str, Seconds]:
    """The times of every compute node in one pass; `divided`, what W can do comes when all else is over.

    Raises CostError naming the node that fails.
    """
    steps = {name: visit.reading for name, visit in walk(graph, inputs, _Forward(clock, sums)).items()}
    nodes = {node.name: node for node in graph.graph.nodes}
    times = {name: (step.forward, 0.0, 0.0) for name, step in steps.items()}
    left: dict[str, _Step] = {}
    while steps:
        name, step = steps.popitem()  # the last; what autograd saved for it goes with it
        keep = divided and bool(step.late)
        sources = step.early if keep else step.early + step.late
        if sources:
            step.begin()
            with naming(nodes[name]):
                times[name] = step.forward, clock(partial(step.backward, sources, keep)), 0.0
        if keep:
            left[name] = step
    for name, step in left.items():
        with naming(nodes[name]):
            times[name] = *times[name][:2], clock(partial(step.backward, step.late, False))
    return times
