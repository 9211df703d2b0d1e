"""Tensors of the model that calls of layers were seen to write while the model was recorded, by themselves or by their hooks.

spectral_norm                    torch.mv(weight, v, out=u)         a kernel writes
hook of a layer                  layer.weight.data.mul_(0.9)        a kernel writes, and leaves no new version
hook of a layer                  layer.weight.data = values         no kernel writes: the tensor has other memory

A hook that names what writes weights of its layer may write them in later calls: they count as written, and are not among the names.
The buffers of a layer in training count as written in any case (`NodeFacts.mutates`): this is what was written indeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modules import forward_hooks_of
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages
from pipecompile.tracing.interception.dispatcher import DispatchRecorder
from pipecompile.tracing.state.function_state import functions_near
from pipecompile.tracing.state.writing_code import writable_tensors

__all__ = ["LayerWrites"]


class LayerWrites:
    """The `names` of the tensors that calls of layers have written."""

    def __init__(self, values: ValueNodes, dispatcher: DispatchRecorder) -> None:
        self._values, self._dispatcher = values, dispatcher
        self.names = set[str]()

    def watched(self, run: Callable[..., Any], module: nn.Module, written: list[torch.Tensor]) -> Callable[..., Any]:
        """Return `run` of a layer such that its call adds to `written` the tensors of the model that it writes: its hooks may write any."""

        def call(*args: Any, **kwargs: Any) -> Any:
            hooks = [hook for one in module.modules() for table in forward_hooks_of(one) for hook in table.values()]
            aliases = self._aliases() if hooks else []
            with self._dispatcher.writes_noted() as found:
                result = run(*args, **kwargs)
            found += [alias for twin, alias in aliases if storage_key(twin) != storage_key(alias)]
            if found:
                self._note(found, {id(twin): alias for twin, alias in aliases}, written)
            functions = (function for hook in hooks for function in functions_near(hook))
            written.extend(writable_tensors(functions, (*module.named_parameters(), *module.named_buffers())))
            return result

        call.__name__ = getattr(run, "__name__", "call")
        return call

    def _aliases(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of a fake tensor of the model and an alias of it, which keeps its present memory."""
        strided = (twin for _, _, twin in self._values.owned() if twin.layout is torch.strided)
        return [(twin, twin.detach()) for twin in strided]

    def _note(self, found: list[torch.Tensor], aliases: dict[int, torch.Tensor], written: list[torch.Tensor]) -> None:
        """Note the names of the tensors whose memory is that of `found`. `aliases` are by the id of the tensor."""
        keys = storages(found)
        for name, _, twin in self._values.owned():
            held = aliases.get(id(twin), twin)
            if not keys.isdisjoint(storages([held])):
                self.names.add(name)
                written.append(held)
