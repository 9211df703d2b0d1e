"""The split of a cell's backward into I, gradients of the inputs, on which the stage before waits, and W, gradients of the weights.

    out ─► relu ─► linear ─► relu ─► linear ─► input         I goes along this line
                     └► weight, bias   └► weight, bias       W goes down from the forks

A node of the autograd graph is *inward* when it leads to an input of the stage. An inward node that leads to weights as well is a
*fork*. A matrix product or convolution computes either gradient alone: I computes the inward gradient, W later the other
gradient, and no work is done twice. Any other fork (a norm, a recurrent layer, a custom function, a compiled or checkpointed
region) computes all its gradients at once, so I computes the gradients of its weights as well: these are *early*. Also early are

- weights that several forks share, such as a weight that is used twice: its gradient is summed, and its hooks run, once;
- the weights of a fork whose W would take less time than the return to the fork.

Nodes that no inward node leads to belong to W; in a first stage these are all nodes. They are early, too, if hooks packed what
they saved and there is an I: a region of `torch.utils.checkpoint` that both halves reach would be recomputed in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.autograd.graph import GradientEdge

from pipecompile.torch_private.autograd_engine import input_metadata, node_name, raw_saved_names

__all__ = ["INPUT", "MIN_WEIGHT_FLOPS", "BackwardDivision", "divide_backward", "explore_backward"]

DIVISIBLE = frozenset(
    f"{name}Backward0"
    for name in "Addmm Mm Bmm Baddbmm Addbmm Mv Addmv Convolution ConvolutionOverrideable Linear Trilinear".split()
)
"""Autograd nodes whose derivatives are separate kernels: autograd runs one of them without the others."""

INPUT, ACCUMULATE = "input", "torch::autograd::AccumulateGrad"

MIN_WEIGHT_FLOPS = {"cpu": 2e6, "cuda": 2e9}
"""Least FLOPs of a weight's gradient for which a W pays, per device type: about 50 us on a CPU core, 5 us on a GPU at full speed."""

_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""Autograd nodes that forbid a split. A reentrant checkpoint refuses to compute some gradients only; a compiled region may write
into its saved tensors, so that its backward can run once.
"""

Structure = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], int]
"""Names of the nodes, per node the numbers of its next nodes (-1: none), and the number of roots, which come first."""


@dataclass(frozen=True, slots=True)
class BackwardDivision:
    """Numbers of nodes by what computes their gradients.

    forks  forks whose weight gradients W computes, each with the gradient accumulators of its weights
    outer  roots that belong to W
    early  gradient accumulators that I fills
    spent  nodes that W does not need, so that I may free their saved tensors
    """

    forks: tuple[tuple[int, tuple[int, ...]], ...]
    outer: tuple[int, ...]
    early: tuple[int, ...]
    spent: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether I computes all gradients, so that W is empty."""
        return not self.forks and not self.outer


def explore_backward(roots: Iterable[GradientEdge], inputs: frozenset[int]) -> tuple[list[Any], Structure]:
    """Return the autograd nodes behind `roots` and their structure. `inputs` are the ids of the stage's input leaves. Linear."""
    nodes: list[Any] = list(dict.fromkeys([root.node for root in roots]))
    count = len(nodes)
    number = {node: index for index, node in enumerate(nodes)}
    names, rows = [], []
    for node in nodes:  # grows meanwhile
        row = []
        for follower, _ in node.next_functions:
            if follower is None:
                row.append(-1)
                continue
            index = number.get(follower)
            if index is None:
                index = number[follower] = len(nodes)
                nodes.append(follower)
            row.append(index)
        rows.append(tuple(row))
        name = node_name(node)
        names.append(INPUT if name == ACCUMULATE and id(node.variable) in inputs else name)
    return nodes, (tuple(names), tuple(rows), count)


def divide_backward(
    nodes: Sequence[Any], structure: Structure, least: float, *, ours: bool = False
) -> BackwardDivision:
    """Return the division of a structure; `nodes` are read for sizes only.

    `least` is the least FLOPs of a weight gradient that is left to W. A fork whose saved tensors were packed by hooks is
    early, since unpacking may compute; with `ours`, the hooks are pipecompile's own and do not count.

    Forks that share a node with another fork become early until no two share a node. Linear in practice.
    """
    names, rows, n_roots = structure
    inward = _inward(names, rows)
    if inward and not _WHOLE.isdisjoint(names):
        return BackwardDivision((), (), (), ())
    late, early = {}, set[int]()
    for fork in sorted(inward):
        outward = [follower for follower in rows[fork] if follower >= 0 and follower not in inward]
        if outward and names[fork] != INPUT:
            reached = _below(rows, outward)
            free = ours or not _is_packed(nodes[fork])
            if names[fork] in DIVISIBLE and _pays(nodes, names, fork, reached, least) and free:
                late[fork] = reached
            else:
                early |= reached
    outer = [root for root in range(n_roots) if root not in inward]
    late |= {-1: _below(rows, outer)} if outer else {}
    early |= _taken_if_packed(late, nodes) if inward and not ours else set()
    early = _settled(late, early)
    remains = -1 in late
    return BackwardDivision(
        tuple((fork, _weights(names, reached)) for fork, reached in late.items() if fork >= 0),
        tuple(outer) if remains else (),
        _weights(names, early),
        tuple(sorted(node for node in (inward - late.keys()) | early if names[node] not in (INPUT, ACCUMULATE))),
    )


def _inward(names: Sequence[str], rows: Sequence[Sequence[int]]) -> set[int]:
    """Return the nodes that lead to an input of the stage."""
    before: dict[int, list[int]] = {}
    for node, row in enumerate(rows):
        for follower in row:
            before.setdefault(follower, []).append(node)
    waiting = [node for node, name in enumerate(names) if name == INPUT]
    inward = set(waiting)
    while waiting:
        for node in before.get(waiting.pop(), ()):
            if node not in inward:
                inward.add(node)
                waiting.append(node)
    return inward


def _below(rows: Sequence[Sequence[int]], start: Iterable[int]) -> frozenset[int]:
    """Return the nodes that can be reached from `start`, which are not inward."""
    waiting = list(start)
    reached = set(waiting)
    while waiting:
        for follower in rows[waiting.pop()]:
            if follower >= 0 and follower not in reached:
                reached.add(follower)
                waiting.append(follower)
    return frozenset(reached)


def _taken_if_packed(late: dict[int, frozenset[int]], nodes: Sequence[Any]) -> frozenset[int]:
    """Remove the nodes behind roots of W from `late` and return them, if hooks packed what one of them saved."""
    is_packed = any(_is_packed(nodes[node]) for node in late.get(-1, ()))
    return late.pop(-1) if is_packed else frozenset()


def _settled(late: dict[int, frozenset[int]], early: set[int]) -> set[int]:
    """Remove the forks that share nodes from `late`, and return all early nodes."""
    while True:
        users: dict[int, int] = {}
        for reached in late.values():
            for node in reached:
                users[node] = users.get(node, 0) + 1
        shared = {node for node, count in users.items() if count > 1} | early
        if not (out := [fork for fork, reached in late.items() if not shared.isdisjoint(reached)]):
            return early
        for fork in out:
            early = early | late.pop(fork)


def _weights(names: Sequence[str], reached: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(node for node in reached if names[node] == ACCUMULATE))


def _pays(nodes: Sequence[Any], names: Sequence[str], fork: int, reached: Iterable[int], least: float) -> bool:
    """Return whether the largest weight gradient has at least `least` FLOPs: 2 * output elements * weight elements / channels."""
    try:
        shape = tuple(map(int, input_metadata(nodes[fork])[0].shape))
    except (AttributeError, IndexError, RuntimeError, TypeError):  # not every node has sizes
        return True
    channels = shape[1] if names[fork].startswith("Convolution") else shape[-1]
    weights = [nodes[node].variable.shape for node in _weights(names, reached)]
    largest = max((prod(shape) for shape in weights), default=0)
    return 2 * prod(shape) * largest / max(channels, 1) >= least


def _is_packed(node: Any) -> bool:
    """Return whether hooks packed the saved tensors; unpacking may compute, as in `torch.utils.checkpoint`."""
    raw = [getattr(node, name) for name in raw_saved_names(node)]
    return any(getattr(saved, "unpack_hook", None) is not None for saved in raw)
