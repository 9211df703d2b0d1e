"""Buffers that a forward replaces by another tensor: a graph writes them in place, and a call shows a new tensor, as eager leaves one.

model.state = start     the user's tensor
step                    begins: the graph's tensor takes the values of `start`, and is the buffer
                        F0 F1 ...: each writes the graph's tensor
                        ends: a copy of the graph's tensor is the buffer; `start` is as it was
model.state = start     the same recording serves, and reads the same values again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modules import buffers_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["ReboundBuffers"]


_KINDS = 16
"""The most tensors of one buffer, of different shapes: as many as recordings are kept by default."""


class ReboundBuffers:
    """The graph's tensors of the buffers of `model` that recordings replace, by module, name, and shape, dtype and device.

    `is_active` is False where others hold the buffers too, as the ranks of one model do: graphs write the model's own tensors then.
    With `recomputes`, forwards may run again in a backward, after the call.
    """

    def __init__(self, model: nn.Module, *, is_active: bool = True, recomputes: bool = False) -> None:
        self.model, self.is_active, self.recomputes = model, is_active, recomputes
        self._slots: dict[tuple[int, str], tuple[nn.Module, dict[Any, torch.Tensor]]] = {}
        self._depth, self._is_held = 0, False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the graph's tensors be the buffers in this context, and copies of them after it. Calls within a call change nothing."""
        self._depth += 1
        try:
            if self._depth == 1 and self._slots:
                self._enter()
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._slots and not self._is_held:
                self._leave()
            self._is_held &= bool(self._depth)

    def hold(self, graph: TracedGraph) -> None:
        """Leave the graph's tensors in their places after this call, if its backward may run pieces again that are kept whole: these
        read the model's buffers.
        """
        self._is_held |= self.recomputes and bool(graph.facts.kept)

    def recorded(self, record: Callable[[], TracedGraph]) -> TracedGraph:
        """Return what `record` records, on tensors of the graph's own for the buffers that the recording replaces."""
        graph = record()
        return record() if self.is_active and self._take(graph) else graph

    def _take(self, graph: TracedGraph) -> bool:
        """Put tensors of the graph's own in the place of the buffers that it replaces. Return whether one is new."""
        is_new = False
        for name in graph.facts.rebound:
            path, _, key = name.rpartition(".")
            module = self.model.get_submodule(path)
            buffer = buffers_of(module)[key]
            _, own = self._slots.setdefault((id(module), key), (module, {}))
            if buffer is not None and _is_plain(buffer) and own.get(_kind(buffer)) is not buffer:
                buffers_of(module)[key] = own[_kind(buffer)] = buffer.clone()
                is_new = True
            if len(own) > _KINDS:
                del own[next(iter(own))]  # the model is recorded anew if its buffer is of this shape again
        return is_new

    def _enter(self) -> None:
        for (_, key), (module, own) in self._slots.items():
            buffer = buffers_of(module).get(key)
            if buffer is not None and _is_plain(buffer) and (tensor := own.get(_kind(buffer))) is not None:
                with torch.no_grad():
                    tensor.copy_(buffer)
                buffers_of(module)[key] = tensor

    def _leave(self) -> None:
        for (_, key), (module, own) in self._slots.items():
            buffer = buffers_of(module).get(key)
            if buffer is not None and own.get(_kind(buffer)) is buffer:
                buffers_of(module)[key] = buffer.clone()


def _is_plain(buffer: torch.Tensor) -> bool:
    """Return whether another tensor can take the place of this one: it is none of a subclass, has values and no gradient."""
    is_strided = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    return is_strided and not buffer.is_meta and not buffer.requires_grad


def _kind(buffer: torch.Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.stride(), buffer.dtype, buffer.device
