"""Layers with backward hooks that run user code: each is kept whole from the first recording on, with its hooks around it.

    Linear with a hook                    one call of torch, which runs its hooks
    the user's Block(Linear) with a hook  a piece kept whole: what its Python changes, and draws, is known of it

A full backward hook belongs to the autograd graph between the inputs and the outputs of its layer, so the layer cannot be cut. Backward
hooks of all modules are also hooks of the whole model, and are refused.
"""

from __future__ import annotations

from torch import nn

from pipecompile.errors import TraceError
from pipecompile.torch_private.modules import GLOBAL_BACKWARD_HOOKS, backward_hooks_of, users_hooks
from pipecompile.tracing.leaf_modules import has_own_python
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attempts import OpaqueReason

__all__ = ["HOOKED", "hooked_layers"]

HOOKED = "its backward hooks belong to the autograd graph between its inputs and its outputs"


def _refuse_global_hooks() -> None:
    hooks = [hook for table in GLOBAL_BACKWARD_HOOKS for hook in users_hooks(table)]
    if hooks:
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
        raise TraceError(
            "cannot trace: there are backward hooks of all modules, and so one on the whole model",
            code="PC106",
            why=f"{names}: registered by torch.nn.modules.module.register_module_full_backward_hook or the like",
            hint="register the hook on the submodules: for module in model.children(): module.register_full_backward_hook(hook)",
        )


def hooked_layers(model: nn.Module) -> tuple[OpaqueReason, ...]:
    """Return the submodules with backward hooks that run user code, each outermost one, as pieces to keep whole.

    Raise TraceError if there are backward hooks of all modules.
    """
    _refuse_global_hooks()
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not is_inside and any(backward_hooks_of(module)) and has_own_python(module):
            found.append(path)
    return tuple(OpaqueReason(Piece(path), TraceError(HOOKED, code="PC106")) for path in found)
