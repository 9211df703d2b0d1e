"""Substitutes for the modules of a graph in experiments: copies of layers, torch functions, and pieces kept whole.

A piece kept whole is the user's own code on the user's own tensors, and so are the hooks of a layer, which a copy shares. Both run as
they are, and their state is restored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipecompile.torch_private.modules import GLOBAL_FORWARD_HOOKS, BatchNorm, forward_hooks_of
from pipecompile.tracing.leaf_modules import has_own_python, is_leaf
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.state.function_state import globals_restored
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.snapshot import model_restored
from pipecompile.tracing.state.tensor_contents import tensors_restored

__all__ = ["KeptPiece", "probe_layer", "randomise"]


def probe_layer(layer: nn.Module, most: int) -> nn.Module | None:
    """Return what stands for a module: a copy on the CPU; None if it has more than `most` numbers or refuses to be copied."""
    if isinstance(layer, OpaqueModule):
        if layer.function and layer.piece.line:
            return _KeptFunction(layer.function)
        twin = probe_layer(layer.owner[0], most) if layer.piece.is_module and _is_torchs(layer.owner[0]) else None
        return KeptPiece(layer) if twin is None else _KeptFunction(twin)
    is_large = sum(tensor.numel() for tensor in (*layer.parameters(), *layer.buffers())) > most
    return None if is_large else _copied(layer)


def _is_torchs(layer: nn.Module) -> bool:
    """Return whether a layer runs kernels of torch alone, and does not normalise over samples."""
    return is_leaf(layer) and not has_own_python(layer) and not isinstance(layer, BatchNorm)


class _KeptFunction(nn.Module):
    """A function or a layer of torch that is an opaque piece, such as an LSTM on packed sequences, without the check of its result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, _call: int, _size: int, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class KeptPiece(nn.Module):
    """A piece kept whole, without the check of its result. It has no parameters of its own, so that none are drawn.

    Its BatchNorm layers normalise by their running statistics, as each micro-batch has its own: samples do not meet there.
    """

    def __init__(self, piece: OpaqueModule) -> None:
        super().__init__()
        self._piece = (piece,)

    def forward(self, _call: int, _size: int, *args: Any, **kwargs: Any) -> Any:
        (piece,) = self._piece
        with _left_alone(piece.owner[0]):
            for layer in piece.owner[0].modules():
                if isinstance(layer, BatchNorm) and layer.running_mean is not None:
                    layer.training = False
            return piece.run(*args, **kwargs)


class _Hooked(nn.Module):
    """A copy of a layer with user hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _left_alone(self.layer):
            return self.layer(*args, **kwargs)


@contextmanager
def _left_alone(module: nn.Module) -> Iterator[None]:
    """Restore what the block changes in a module, and what its code and its hooks change elsewhere."""
    with model_restored(module), tensors_restored(module), globals_restored(module), output_muted():
        yield


def _has_hooks(layer: nn.Module) -> bool:
    return any(GLOBAL_FORWARD_HOOKS) or any(any(forward_hooks_of(one)) for one in layer.modules())


def _copied(layer: nn.Module) -> nn.Module | None:
    try:
        twin = copy.deepcopy(layer)
    except Exception:  # the user's own layers may refuse
        return None
    is_meta = any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    twin = twin.to_empty(device="cpu") if is_meta else twin.cpu()
    return _Hooked(twin) if _has_hooks(twin) else twin


def randomise(layer: nn.Module) -> None:
    """Draw all parameters of a layer."""
    for tensor in layer.parameters():
        if tensor.is_floating_point():
            tensor.data.normal_()
