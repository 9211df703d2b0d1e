"""Calls of torch functions that are pieces of their own, met while the real model runs.

rows = x[mask]          in the forward of the whole model there is no smaller module to keep whole: the call itself is kept
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from pipecompile.tracing.model_pieces import Catch, Piece
from pipecompile.tracing.user_source import caller

__all__ = ["functions_caught"]


@contextmanager
def functions_caught(model: nn.Module, pieces: Iterable[Piece], catch: Catch) -> Iterator[None]:
    """Calls of the functions among the pieces go to `catch` for as long as the block lasts, but not those made inside one."""
    wanted = frozenset(piece for piece in pieces if piece.line)
    if not wanted:
        yield
        return
    mode, original = _Functions(model, wanted, catch), nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode.inside(module):
            return original(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class _Functions(TorchFunctionMode):
    def __init__(self, model: nn.Module, wanted: frozenset[Piece], catch: Catch) -> None:
        super().__init__()
        self.wanted, self.names, self.catch = wanted, {piece.method for piece in wanted}, catch
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.path, self.thread, self.busy = [""], get_ident(), False

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """A module runs."""
        self.path.append(self.paths.get(id(module)) or self.path[-1])
        try:
            yield
        finally:
            self.path.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy or func.__name__ not in self.names or get_ident() != self.thread:
            return func(*args, **kwargs)
        piece = Piece(self.path[-1], func.__name__, caller())
        if piece not in self.wanted:
            return func(*args, **kwargs)
        self.busy = True
        try:
            return self.catch(piece, func, args, kwargs)
        finally:
            self.busy = False
