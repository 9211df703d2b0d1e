"""The line of the forward whose backward failed in a kernel: an error from C++ has no user frame.

    autograd graph of the cell      what the nodes saved     as recorded      line
    ExpBackward0                    held                     exp              h = x.exp()
    SinBackward0                    held, here it failed     sin              g = h.sin()
    AddmmBackward0                  freed                    head             return self.head(g)

The engine runs a node after all later nodes, and then frees its saved tensors. So the latest node that still holds saved tensors has
failed. Fake tensors of the recording have autograd graphs too, with the nodes of the cell in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor, fx

from pipecompile.errors import text_of
from pipecompile.runtime.cells.divided_backward import run_division
from pipecompile.torch_private.autograd_engine import (
    accumulate,
    node_name,
    raw_saved_names,
    sequence_number,
    unpacked_name,
)
from pipecompile.tracing.node_facts import facts, leaves_of
from pipecompile.tracing.user_source import frames

__all__ = ["forward_line"]

_NAN = re.compile(r"Function '(\w+)' returned nan values")
"""The error of `torch.autograd.detect_anomaly`, raised after the node has freed what it saved."""

_ROOTS = {accumulate.__code__: "roots", run_division.__code__: "inner"}
"""Per function that runs a backward, its variable with the roots."""


_MOVES = frozenset(
    f"{name}Backward0"
    for name in "Add Alias Clone Div Expand Mean Mul Neg Permute Select Slice Squeeze Sub Sum T Transpose Unsqueeze View ViewAsReal".split()
)
"""Autograd nodes that save nothing and fail on nothing but memory."""


class _Failed(NamedTuple):
    """An autograd node that raised; `is_sure` is False if a later node, which saves nothing, may have raised instead."""

    node: Any
    is_sure: bool

    def __str__(self) -> str:
        return f"in {node_name(self.node)}" + ("" if self.is_sure else ", or in a later operation that saves nothing")


def forward_line(error: BaseException, stage: fx.Graph) -> str:
    """Return the user's line of the operation of a stage whose backward raised `error`, and its autograd node; "" if unknown.

    The nodes of a loss function follow those of the last stage. No line is known of these.
    """
    roots, is_kept = _roots_of(error)
    nodes = _in_order(_reachable(roots))
    failed = _spoilt(nodes) if is_kept else _failed(nodes, text_of(error))
    if failed is None:
        return ""
    recorded = _recorded(stage)
    for first in range(len(nodes) - len(recorded) + 1):
        if all(map(_is_alike, nodes[first:], (node for node, _ in recorded))):
            index = nodes.index(failed.node) - first
            if index >= len(recorded):
                return f"the loss function, {failed}"
            return f"{recorded[index][1]} ({failed})" if index >= 0 and recorded[index][1] else ""
    return ""


def _roots_of(error: BaseException) -> tuple[list[Any], bool]:
    """Return the autograd nodes from which the failed backward began, and whether it keeps its graph."""
    for frame, _ in frames(error):
        if frame.f_code in _ROOTS:
            name = _ROOTS[frame.f_code]
            edges = frame.f_locals.get(name, ())
            return [(edge if name == "roots" else edge[0]).node for edge in edges], name == "inner"
    return [], False


def _reachable(roots: Iterable[Any], known: Collection[Any] = ()) -> set[Any]:
    """Return the nodes below `roots` that are not `known`, without those that accumulate gradients. Linear."""
    found, pending = set[Any](), list(roots)
    while pending:
        node = pending.pop()
        if node is not None and node not in found and node not in known and not hasattr(node, "variable"):
            found.add(node)
            pending += [below for below, _ in node.next_functions]
    return found


def _in_order(nodes: Iterable[Any]) -> list[Any]:
    """Return nodes in the order of the forward, without casts: autocast makes those of weights once, at any place."""
    return sorted((node for node in nodes if node_name(node) != "ToCopyBackward0"), key=sequence_number)


def _failed(nodes: Sequence[Any], text: str) -> _Failed | None:
    """Return which of `nodes`, in the order of the forward, raised an error of this text; None if unknown."""
    last = max((index for index, node in enumerate(nodes) if _holds(node)), default=-1)
    later = nodes[last + 1 :]
    if nan := _NAN.search(text):
        return next((_Failed(node, True) for node in later if node_name(node) == nan[1]), None)
    if spoilt := _spoilt(nodes[last:]) if last >= 0 else None:
        return spoilt
    unsaved = [
        node for node in takewhile(lambda node: not raw_saved_names(node), later) if node_name(node) not in _MOVES
    ]
    if named := [node for node in unsaved if _letters(node_name(node)) in _letters(text)]:
        return _Failed(named[-1], is_sure=len(named) == 1)
    return _Failed(nodes[last], is_sure=not unsaved) if last >= 0 else None


def _spoilt(nodes: Sequence[Any]) -> _Failed | None:
    """Return the last node whose saved tensors were written in place."""
    for node in reversed(nodes):
        for name in raw_saved_names(node):
            if all(saved.unpack_hook is None and saved.data is not None for saved in _listed(getattr(node, name))):
                try:
                    getattr(node, unpacked_name(name))
                except RuntimeError:
                    return _Failed(node, is_sure=True)
    return None


def _holds(node: Any) -> bool:
    """Return whether a node holds a saved tensor. Nothing is unpacked: that would run hooks."""
    saved = [value for name in raw_saved_names(node) for value in _listed(getattr(node, name))]
    return any(value.data is not None for value in saved)


def _listed(saved: Any) -> Sequence[Any]:
    return saved if isinstance(saved, tuple | list) else (saved,)


def _letters(text: str) -> str:
    """Return letters and digits, small: `UpsampleLinear1DBackward0` is `upsample_linear1d_backward` in messages of kernels."""
    return re.sub(r"[^a-z0-9]", "", text.lower().removesuffix("0"))


def _recorded(stage: fx.Graph) -> list[tuple[Any, str]]:
    """Return, in the order of the forward, the autograd nodes that a stage had in the recording, each with the user's line."""
    known = _reachable(_functions(stage.find_nodes(op="placeholder")))
    outputs = _reachable(_functions(stage.output_node().all_input_nodes), known)
    lines: dict[Any, str] = {}
    for node in stage.nodes:
        for function in _functions([node]) if node.op.startswith("call") else ():
            for below in _reachable([function], known | lines.keys()):
                lines[below] = facts(node).source
            if facts(node).mutates and _has_grad(node):
                lines[function] = facts(node).source
    return [(node, lines.get(node, "")) for node in _in_order(outputs)]


def _functions(nodes: Iterable[fx.Node]) -> list[Any]:
    values = [value for node in nodes for value in leaves_of(node)]
    return [value.grad_fn for value in values if isinstance(value, Tensor) and value.grad_fn is not None]


def _has_grad(node: fx.Node) -> bool:
    ambient = facts(node).ambient
    return ambient is None or ambient.grad


_KERNELS = re.compile(r"\w*BatchNorm\w*|ScaledDotProduct\w*")
"""Autograd nodes whose names depend on the kernel that runs."""


def _is_alike(node: Any, recorded: Any) -> bool:
    """Return whether an autograd node is of the operation of a recorded one."""
    names = node_name(node), node_name(recorded)
    if all(map(_KERNELS.fullmatch, names)):
        return names[0][:9] == names[1][:9] or all("BatchNorm" in name for name in names)
    return names[0] == names[1] and len(node.next_functions) == len(recorded.next_functions)
