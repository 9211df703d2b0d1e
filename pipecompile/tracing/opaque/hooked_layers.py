"""Layers with backward hooks that run Python of the user's: each is kept whole from the first recording on, with its hooks around it.

    Linear with a hook                    one call of torch, which runs its hooks
    the user's Block(Linear) with a hook  a piece kept whole: what its Python changes, and draws, is known of it

A full backward hook belongs to the autograd graph between the inputs and the outputs of its layer, so the layer cannot be cut.
"""

from __future__ import annotations

from torch import nn

from pipecompile.errors import TraceError
from pipecompile.torch_private.modules import backward_hooks_of
from pipecompile.tracing.leaf_modules import has_own_python
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attempts import OpaqueReason

__all__ = ["HOOKED", "hooked_layers"]

HOOKED = "its backward hooks belong to the autograd graph between its inputs and its outputs"


def hooked_layers(model: nn.Module) -> tuple[OpaqueReason, ...]:
    """Return the submodules with backward hooks that run Python of the user's, each outermost one, as pieces to keep whole."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not is_inside and any(backward_hooks_of(module)) and has_own_python(module):
            found.append(path)
    return tuple(OpaqueReason(Piece(path), TraceError(HOOKED, code="PC106")) for path in found)
