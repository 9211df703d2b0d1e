"""The first node of a recording that computes a value which the model does not compute.

Both run on the same inputs from the same states of the generators. Values are compared by their contents, whichever call made
them: a node differs if none of the model's calls returned its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from pipecompile.batching.containers import flatten_containers
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.state.random_states import RandomStates
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.eager_run import CheckedCall

__all__ = ["first_difference"]

_TOLERANCE = 1e-5
"""Values closer than this, relative to the largest, count as the same: threads and GPUs add in other orders."""

_Values = dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]]


def first_difference(graph: TracedGraph, call: CheckedCall, start: RandomStates) -> str:
    """Return the place of the first node that differs: its module, the user's line, and its operation. "" if there is none.

    Call this where the model is restored afterwards.
    """
    args, kwargs, leaves = call.arguments()
    start.restore()
    collector = _Collector([*leaves, *call.model.parameters(), *call.model.buffers()])
    with collector:
        call.model(*args, **kwargs)
    args, kwargs, leaves = call.arguments()
    start.restore()
    search = _Search(graph, collector.values)
    try:
        search.run(*leaves)
    except _Found as found:
        return found.place
    return ""


class _Found(Exception):
    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class _Collector(TorchFunctionMode):
    """Copies of the results of all calls of torch, on the CPU."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.values: _Values = {}
        for tensor in _tensors(known):
            self._add(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor)
        if func.__name__ in ("__setitem__", "__set__", "copy_"):
            self._add(args[0])
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        self.values.setdefault((tensor.shape, tensor.dtype), []).append(_copy(tensor))


class _Search(fx.Interpreter):
    """Runs the recording node by node, and raises _Found at the first floating value that is not among the model's."""

    def __init__(self, graph: TracedGraph, values: _Values) -> None:
        super().__init__(graph)
        self.values = values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module") and not facts(n).is_size:
            for tensor in _tensors(result):
                if not self._is_known(tensor):
                    raise _Found(_place(n))
        return result

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return True
        candidates = self.values.get((tensor.shape, tensor.dtype), [])
        copy = _copy(tensor)
        if any(torch.equal(copy, other) for other in candidates):
            return True
        atol = _TOLERANCE * float(copy.abs().nan_to_num(0, 0, 0).max()) if copy.numel() else 0.0
        return any(torch.allclose(copy, other, rtol=_TOLERANCE, atol=atol, equal_nan=True) for other in candidates)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    for leaf in flatten_containers(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _place(node: fx.Node) -> str:
    noted = facts(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "call")
    module = f"{noted.module}: " if noted.module else ""
    return f"{name} ({module}{noted.source})" if noted.source else f"{module}{name}"
