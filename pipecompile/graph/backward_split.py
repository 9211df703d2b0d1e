"""Where the backward of a cell parts in two: the gradients of its inputs, which somebody waits for, and those of its weights.

    out ─► relu ─► linear ─► relu ─► linear ─► input         I goes along this line
                     └► weight, bias   └► weight, bias       W goes down from the forks

A node of the autograd graph is *inward* when it leads to an input of the stage. An inward node that leads to weights too is a
*fork*. Matrix products and convolutions compute either gradient alone: I asks them for the inward one, W later for the other,
and no work is done twice. Every other fork (a norm, a recurrent layer, a custom function, a compiled or checkpointed region)
computes its gradients in one go, so I takes what its weights get as well: they are *early*. Early is also

- what several forks share, such as a weight that is used twice: its gradient is summed, and its hooks run, once;
- a fork whose weights take less time than going back to it would.

What no inward node leads to is left to W altogether; in a first stage that is everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.autograd.graph import GradientEdge

from pipecompile.torch_private.autograd_engine import input_shape, raw_saved_names

__all__ = ["INPUT", "MIN_WEIGHT_FLOPS", "BackwardDivision", "divide_backward", "explore_backward"]

DIVISIBLE = frozenset(
    f"{name}Backward0"
    for name in "Addmm Mm Bmm Baddbmm Addbmm Mv Addmv Convolution ConvolutionOverrideable Linear Trilinear".split()
)
"""Nodes whose derivatives are separate kernels, asked for one by one."""

INPUT, ACCUMULATE = "input", "torch::autograd::AccumulateGrad"

MIN_WEIGHT_FLOPS = {"cpu": 2e6, "cuda": 2e9}
"""FLOPs of a weight's gradient, from which on W pays: some 50 us of a CPU's core, some 5 us of a GPU's full speed."""

_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""A reentrant checkpoint refuses to be asked for some gradients only; a compiled region may write into what it saved, so that
its backward must be the last one.
"""
Structure = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], int]
"""Names of the nodes, the numbers of those that follow each (-1: nothing), and how many of them are roots."""


@dataclass(frozen=True, slots=True)
class BackwardDivision:
    """Who does what, by numbers of nodes. `forks` are W's, each with the accumulators of its weights; `outer` the roots that
    are W's; `early` accumulators whose gradients I brings along; `spent` nodes that nobody needs after I.
    """

    forks: tuple[tuple[int, tuple[int, ...]], ...]
    outer: tuple[int, ...]
    early: tuple[int, ...]
    spent: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Is nothing left for W?"""
        return not self.forks and not self.outer


def explore_backward(roots: Iterable[GradientEdge], inputs: frozenset[int]) -> tuple[list[Any], Structure]:
    """The nodes behind `roots`, and their structure. `inputs` are the ids of the stage's own leaves. Linear."""
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
        name = node.name()
        names.append(INPUT if name == ACCUMULATE and id(node.variable) in inputs else name)
    return nodes, (tuple(names), tuple(rows), count)


def divide_backward(
    nodes: Sequence[Any], structure: Structure, least: float, *, ours: bool = False
) -> BackwardDivision:
    """Divide a structure; of `nodes` only sizes are asked. `least` is the FLOPs from which on a weight's gradient waits.
    What a node saved may have been packed by somebody else, which keeps it from waiting, unless they were `ours`.

    Forks that share anything with another become early, until no two share anything. Linear in practice.
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
    early = _settled(late, early)
    remains = -1 in late
    return BackwardDivision(
        tuple((fork, _weights(names, reached)) for fork, reached in late.items() if fork >= 0),
        tuple(outer) if remains else (),
        _weights(names, early),
        tuple(sorted(node for node in (inward - late.keys()) | early if names[node] not in (INPUT, ACCUMULATE))),
    )


def _inward(names: Sequence[str], rows: Sequence[Sequence[int]]) -> set[int]:
    before: dict[int, list[int]] = {}
    for node, row in enumerate(rows):
        for follower in row:
            before.setdefault(follower, []).append(node)
    waiting = [node for node, name in enumerate(names) if name == INPUT]
    found = set(waiting)
    while waiting:
        for node in before.get(waiting.pop(), ()):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _below(rows: Sequence[Sequence[int]], start: Iterable[int]) -> frozenset[int]:
    """What can be reached from nodes that are not inward."""
    waiting = list(start)
    found = set(waiting)
    while waiting:
        for follower in rows[waiting.pop()]:
            if follower >= 0 and follower not in found:
                found.add(follower)
                waiting.append(follower)
    return frozenset(found)


def _settled(late: dict[int, frozenset[int]], early: set[int]) -> set[int]:
    """Take out of `late` what shares nodes with others; returns all that is early then."""
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
    """Is the gradient of these weights worth going back for? Of a product: twice the output times each weight's share."""
    try:
        shape = tuple(map(int, input_shape(nodes[fork])))
    except (AttributeError, IndexError, RuntimeError, TypeError):  # sizes are not told everywhere
        return True
    channels = shape[1] if names[fork].startswith("Convolution") else shape[-1]
    weights = [nodes[node].variable.shape for node in _weights(names, reached)]
    largest = max((prod(shape) for shape in weights), default=0)
    return 2 * prod(shape) * largest / max(channels, 1) >= least


def _is_packed(node: Any) -> bool:
    """Did somebody else pack what the node saved? Then unpacking may compute, as `torch.utils.checkpoint` does."""
    raw = [getattr(node, name) for name in raw_saved_names(node)]
    return any(getattr(saved, "unpack_hook", None) is not None for saved in raw)
