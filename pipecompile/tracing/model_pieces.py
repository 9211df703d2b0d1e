"""Pieces of a model that cannot be recorded, and the interception of their calls.

A piece is a submodule, or a method of a module when no submodule is as small, or calls of one torch function on one line of
the user's when nothing else is. The recorder and the trial runs both meet its calls, in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

from torch import nn

from pipecompile.torch_private.modules import CALL_MACHINERY
from pipecompile.tracing.user_source import frames

__all__ = ["PieceHandler", "Piece", "same_class_pieces", "add_candidate", "candidates", "piece_calls_intercepted"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A module by its path, and the method when it is not the call of the module itself; with a `line`, the torch function
    that is called on it while that module runs.
    """

    path: str
    method: str = ""
    line: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.method.strip('_') if self.line else self.method}".strip(".")

    @property
    def is_module(self) -> bool:
        return not self.method


PieceHandler = Callable[[Piece, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Is given the piece, what it would run, and the arguments; what it returns is the result of the call."""


def candidates(error: BaseException, model: nn.Module) -> Iterator[Piece]:
    """The pieces that an exception passed through, the smallest first; never the whole model."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[Piece, None] = {}
    for frame, _ in frames(error):
        names = frame.f_code.co_varnames
        owner = frame.f_locals.get(names[0]) if frame.f_code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in paths:
            piece = _piece(paths[id(owner)], owner, frame.f_code.co_name)
            if piece is not None:
                found.pop(piece, None)
                found[piece] = None
    yield from reversed(found)
    yield from vars(error).get(_BLAMED, ())


_BLAMED = "_pipecompile_piece"


def add_candidate(error: BaseException, piece: Piece) -> None:
    """The call of a torch function raised this, on tensors without memory: it is a candidate itself, the last one."""
    vars(error).setdefault(_BLAMED, (piece,))


def _piece(path: str, owner: nn.Module, name: str) -> Piece | None:
    if name == "forward":
        return Piece(path) if path else None
    if name in CALL_MACHINERY or not inspect.isfunction(inspect.getattr_static(type(owner), name, None)):
        return None
    return Piece(path, name)


def same_class_pieces(piece: Piece, model: nn.Module) -> tuple[Piece, ...]:
    """The same piece in every module of the same class."""
    kind = type(model.get_submodule(piece.path))
    return tuple(replace(piece, path=path) for path, module in model.named_modules() if path and type(module) is kind)


@contextmanager
def piece_calls_intercepted(model: nn.Module, pieces: Iterable[Piece], handler: PieceHandler) -> Iterator[None]:
    """Calls of modules and methods on this thread go to `handler` for as long as the block lasts, but not those made inside."""
    watch = _PieceInterceptor(handler)
    wanted = {(id(model.get_submodule(piece.path)), piece.method): piece for piece in pieces if not piece.line}
    spots: list[tuple[Any, str]] = [(nn.Module, "__call__")] if any(not name for _, name in wanted) else []
    spots += dict.fromkeys(
        (type(model.get_submodule(piece.path)), piece.method) for piece in wanted.values() if piece.method
    )
    before = [(owner, name, owner.__dict__.get(name)) for owner, name in spots]
    try:
        for owner, name in spots:
            setattr(owner, name, watch.over(getattr(owner, name), "" if owner is nn.Module else name, wanted))
        yield
    finally:
        for owner, name, original in before:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class _PieceInterceptor:
    def __init__(self, handler: PieceHandler) -> None:
        self.handler, self.thread, self.inside = handler, get_ident(), False

    def over(self, original: Any, method: str, wanted: Mapping[tuple[int, str], Piece]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            piece = wanted.get((id(module), method))
            if piece is None or self.inside or get_ident() != self.thread:
                return original(module, *args, **kwargs)
            self.inside = True
            try:
                return self.handler(piece, lambda *a, **k: original(module, *a, **k), args, kwargs)
            finally:
                self.inside = False

        return call
