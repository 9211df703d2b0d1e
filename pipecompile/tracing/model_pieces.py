"""Pieces of a model that may become opaque, and the interception of their calls.

A piece is a submodule; or a method of a module, if no submodule is as small; or, if nothing else is, the calls of one torch function
on one user line, of one plain function, or a block of statements. The recorder and the trial runs intercept the same calls,
in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import dropwhile
from threading import get_ident
from types import FrameType
from typing import Any, cast

from torch import nn

from pipecompile.torch_private.modules import CALL_MACHINERY
from pipecompile.tracing.outlining.code_blocks import CodeBlock, blocks_around, in_loop
from pipecompile.tracing.outlining.outlined_calls import BlockCall, code_outlined, owner_in, owner_of
from pipecompile.tracing.outlining.outlined_code import original_code
from pipecompile.tracing.plain_functions import function_name, function_of, functions_replaced
from pipecompile.tracing.trace_errors import is_unsupported_by_fakes
from pipecompile.tracing.user_source import frames, is_users

__all__ = [
    "Piece",
    "PieceHandler",
    "UnpredictableResult",
    "add_candidate",
    "candidates",
    "piece_calls_intercepted",
    "same_class_pieces",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece: the module at `path`, its method `method`, a torch function, a plain function, or a block of statements.

    For a torch function, `method` is its name, `path` the module that calls it, and `line` the user's line of the call. For a
    plain function, `method` is its name, `path` is "", and `function` names it as `plain_functions` does. For a block of statements,
    `method` is the name of the function around it, and `path` the module that runs it.
    """

    path: str
    method: str = ""
    line: str = ""
    function: str = ""
    block: CodeBlock | None = None

    @property
    def name(self) -> str:
        return f"{self.path}.{self.method.strip('_') if self.is_function else self.method}".strip(".")

    @property
    def text(self) -> str:
        """The name, and the lines of a block."""
        return f"{self.name}, {self.block.lines}" if self.block else self.name

    @property
    def is_module(self) -> bool:
        return not self.method

    @property
    def is_function(self) -> bool:
        """Whether it is a function, of torch or of the user's, and no part of a module."""
        return bool(self.line or self.function)

    @property
    def is_part(self) -> bool:
        """Whether it is a module or a method of one."""
        return not self.is_function and self.block is None


PieceHandler = Callable[[Piece, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes a piece, the function that its call would run, and the arguments; returns the result of the call."""


class UnpredictableResult(Exception):
    """The result of a piece has no spec. `why` completes the sentence "the piece cannot be opaque: ". `hint` says what to try where
    the usual advice, to return tensors, does not help.
    """

    def __init__(self, piece: Piece, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.piece, self.why, self.hint = piece, why, hint


def candidates(error: BaseException, model: nn.Module, code: str = "") -> Iterator[Piece]:
    """Yield the pieces that an exception passed through, the smallest first; never the whole model.

    `code` is that of the failure. A module with nearly all of the model is treated as the model, and comes after what is inside it. In one
    that is a large part of it, blocks of a loop come before the module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    pieces: dict[Piece, None] = {}
    blocks: dict[Piece, None] = {}
    inner = dropwhile(lambda step: owner_in(step[0], paths) is None, frames(error))
    for frame, line in inner:
        owner, path = owner_in(frame, paths), owner_of(frame, paths)
        own = _piece(path, owner, frame.f_code.co_name) if owner is not None else None
        is_most = bool(path) and _share(model.get_submodule(path), model) >= _MOST
        if own is not None:
            kept = blocks if is_most and own.is_module else pieces
            kept.pop(own, None)
            kept[own] = None
        if not is_users(frame):
            continue
        if not path or is_most:
            inside, functions = _blocks(frame, line, path), _function(frame)
            is_looped = bool(functions and inside) and in_loop(original_code(frame.f_code), line)
            blocks |= {**functions, **inside} if is_looped else {**inside, **functions}
        elif code in _DECISIONS and _share(model.get_submodule(path), model) >= _LARGE:
            pieces |= _blocks(frame, line, path) if in_loop(original_code(frame.f_code), line) else {}
    yield from (*reversed(pieces), *vars(error).get(_FUNCTION_PIECE, ()))
    is_known = code != _OTHER or is_unsupported_by_fakes(error)
    yield from (piece for piece in reversed(blocks) if is_known or not piece.block)


def _function(frame: FrameType) -> dict[Piece, None]:
    """Return the plain function that a frame runs, as a piece."""
    name = function_name(frame)
    return {Piece("", frame.f_code.co_name, function=name): None} if name else {}


_OTHER = "PC199"
"""Failures of unknown cause, mostly errors of the model on these inputs."""

_DECISIONS = ("PC101", "PC102", "PC116")
"""Failures of Python that decides on a value or on a draw, as layer drop does."""

_LARGE = 1 / 3
"""The part of the parameters from which a module counts as large: a cut around it could not be balanced."""

_MOST = 0.9
"""The part of the parameters from which a module counts as most of the model, as the model in a wrapper that computes the loss. A layer
of experts in a small model has less."""


def _share(module: nn.Module, model: nn.Module) -> float:
    """Return the part of the model's parameters that a module has; 0 if it has no children, and so no smaller parts."""
    own, whole = (sum(p.numel() for p in one.parameters()) for one in (module, model))
    return own / whole if whole and len([*module.children()]) > 0 else 0.0


def _blocks(frame: FrameType, line: int, path: str) -> dict[Piece, None]:
    """Return the blocks around a user line that the module at `path` runs, the largest first."""
    code = original_code(frame.f_code)
    return {Piece(path, code.co_name, block=block): None for block in reversed([*blocks_around(code, line)])}


_FUNCTION_PIECE = "_pipecompile_piece"
"""Name of the attribute in which an exception carries the torch call that raised it."""


def add_candidate(error: BaseException, piece: Piece) -> None:
    """Make the torch call that raised `error` the last candidate. The first call noted stays."""
    vars(error).setdefault(_FUNCTION_PIECE, (piece,))


def _piece(path: str, owner: nn.Module, name: str) -> Piece | None:
    """Return the piece of a frame that runs function `name` of a module. The machinery of a call runs hooks, and a forward of any name."""
    if name == "forward" or name in CALL_MACHINERY:
        return Piece(path) if path else None
    if not inspect.isfunction(inspect.getattr_static(type(owner), name, None)):
        return None
    return Piece(path, name)


def same_class_pieces(piece: Piece, model: nn.Module) -> tuple[Piece, ...]:
    """Return the same piece of every module of the same class."""
    cls = type(model.get_submodule(piece.path))
    return tuple(replace(piece, path=path) for path, module in model.named_modules() if path and type(module) is cls)


@contextmanager
def piece_calls_intercepted(model: nn.Module, pieces: Iterable[Piece], handler: PieceHandler) -> Iterator[None]:
    """Route calls of modules and methods on this thread to `handler` inside the block.

    Calls from inside a routed call are not routed.
    """
    interceptor, pieces = _PieceInterceptor(handler), tuple(pieces)
    blocks = {(piece.path, piece.block): piece for piece in pieces if piece.block is not None}
    outlined = code_outlined(model, {place for _, place in blocks}, partial(interceptor.block_call, blocks))
    # Patches first would hide the functions that have blocks.
    with outlined, _calls_patched(model, pieces, interceptor):
        yield


@contextmanager
def _calls_patched(model: nn.Module, pieces: Sequence[Piece], interceptor: _PieceInterceptor) -> Iterator[None]:
    """Patch the calls of modules, methods and plain functions that are pieces inside the block."""
    functions = [(function_of(piece.function), piece) for piece in pieces if piece.function]
    replaced = [(function, interceptor.replace(function, piece)) for function, piece in functions]
    by_owner = {(id(model.get_submodule(piece.path)), piece.method): piece for piece in pieces if piece.is_part}
    patched: list[tuple[Any, str]] = [(nn.Module, "__call__")] if any(not name for _, name in by_owner) else []
    patched += dict.fromkeys(
        (type(model.get_submodule(piece.path)), piece.method) for piece in by_owner.values() if piece.method
    )
    originals = [(owner, name, owner.__dict__.get(name)) for owner, name in patched]
    try:
        for owner, name in patched:
            setattr(owner, name, interceptor.patch(getattr(owner, name), "" if owner is nn.Module else name, by_owner))
        with functions_replaced(replaced):
            yield
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class _PieceInterceptor:
    """Patches `Module.__call__` and methods. `is_inside`: a routed call is running."""

    def __init__(self, handler: PieceHandler) -> None:
        self.handler, self.thread, self.is_inside = handler, get_ident(), False

    def patch(self, original: Any, method: str, by_owner: Mapping[tuple[int, str], Piece]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            piece = by_owner.get((id(module), method))
            if piece is None or self.is_inside or get_ident() != self.thread:
                return original(module, *args, **kwargs)
            with self._handling():
                return self.handler(piece, lambda *a, **k: original(module, *a, **k), args, kwargs)

        return call

    def replace(self, function: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
        """Return what stands for a plain function."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside or get_ident() != self.thread:
                return function(*args, **kwargs)
            with self._handling():
                return self.handler(piece, function, args, kwargs)

        return call

    def block_call(self, pieces: Mapping[tuple[str, CodeBlock], Piece], call: BlockCall) -> dict[str, Any]:
        """Send the call of a block to the handler if it is a piece."""
        piece = pieces.get((call.path, call.place))
        if piece is None or self.is_inside or get_ident() != self.thread:
            return call(call.values)
        with self._handling():
            return cast(dict[str, Any], self.handler(piece, call, (call.values,), {}))

    @contextmanager
    def _handling(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False
