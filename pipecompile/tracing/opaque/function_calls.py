"""Interception of single calls of torch functions, while the real model runs.

rows = x[mask]          in the forward of the whole model there is no smaller module: this call is the opaque piece
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from pipecompile.tracing.model_pieces import Piece, PieceHandler
from pipecompile.tracing.user_source import caller

__all__ = ["function_calls_intercepted"]


@contextmanager
def function_calls_intercepted(model: nn.Module, pieces: Iterable[Piece], handler: PieceHandler) -> Iterator[None]:
    """Route the calls of the pieces with a `line` to `handler` inside the block, but not calls from inside a call."""
    functions = frozenset(piece for piece in pieces if piece.line)
    if not functions:
        yield
        return
    mode, original = _FunctionMode(model, functions, handler), nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode.inside(module):
            return original(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class _FunctionMode(TorchFunctionMode):
    """Recognise a call of a piece by the running module, the name of the function and the user's line."""

    def __init__(self, model: nn.Module, functions: frozenset[Piece], handler: PieceHandler) -> None:
        super().__init__()
        self.functions, self.names, self.handler = functions, {piece.method for piece in functions}, handler
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.path, self.thread, self.is_handling = [""], get_ident(), False

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Note that `module` runs inside the block; a module that is not the model's counts as the module around it."""
        self.path.append(self.paths.get(id(module)) or self.path[-1])
        try:
            yield
        finally:
            self.path.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_handling or func.__name__ not in self.names or get_ident() != self.thread:
            return func(*args, **kwargs)
        piece = Piece(self.path[-1], func.__name__, caller())
        if piece not in self.functions:
            return func(*args, **kwargs)
        self.is_handling = True
        try:
            return self.handler(piece, func, args, kwargs)
        finally:
            self.is_handling = False
