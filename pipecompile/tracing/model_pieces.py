"""Pieces of a model that may become opaque, and the interception of their calls.

A piece is a submodule; or a method of a module, if no submodule is as small; or, if nothing else is, the calls of one torch
function on one line of the user's, or of one plain function of the user's. The recorder and the trial runs intercept the same calls, in the same order.

Leaf modules are pieces of another kind: modules of torch.nn that compute are one node each, and modules that only contain others
are recorded through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modules import CALL_MACHINERY, NormBase, backward_hooks_of, children_of, forward_hooks_of
from pipecompile.tracing.plain_functions import function_name, function_of, functions_replaced
from pipecompile.tracing.user_source import frames

__all__ = [
    "Piece",
    "PieceHandler",
    "add_candidate",
    "candidates",
    "cheap_forward",
    "is_leaf",
    "piece_calls_intercepted",
    "same_class_pieces",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece: the module at `path`, its method `method`, a torch function, or a plain function.

    For a torch function, `method` is its name, `path` the module that calls it, and `line` the user's line of the call. For a
    plain function, `method` is its name, `path` is "", and `function` names it as `plain_functions` does.
    """

    path: str
    method: str = ""
    line: str = ""
    function: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.method.strip('_') if self.is_function else self.method}".strip(".")

    @property
    def is_module(self) -> bool:
        return not self.method

    @property
    def is_function(self) -> bool:
        """Whether it is a function, of torch or of the user's, and no part of a module."""
        return bool(self.line or self.function)


PieceHandler = Callable[[Piece, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes a piece, the function that its call would run, and the arguments; returns the result of the call."""


def candidates(error: BaseException, model: nn.Module) -> Iterator[Piece]:
    """Yield the pieces that an exception passed through, the smallest first; never the whole model."""
    paths = {id(module): path for path, module in model.named_modules()}
    pieces: dict[Piece, None] = {}
    functions: dict[Piece, None] = {}
    is_inside = False
    for frame, _ in frames(error):
        if is_inside and (function := function_name(frame)):
            functions[Piece("", frame.f_code.co_name, function=function)] = None
        names = frame.f_code.co_varnames
        owner = frame.f_locals.get(names[0]) if frame.f_code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in paths:
            is_inside = True
            piece = _piece(paths[id(owner)], owner, frame.f_code.co_name)
            if piece is not None:
                pieces.pop(piece, None)
                pieces[piece] = None
    yield from reversed(pieces)
    yield from vars(error).get(_FUNCTION_PIECE, ())
    yield from reversed(functions)


_FUNCTION_PIECE = "_pipecompile_piece"
"""Name of the attribute in which an exception carries the torch call that raised it."""


def add_candidate(error: BaseException, piece: Piece) -> None:
    """Make the torch call that raised `error` the last candidate. The first call noted stays."""
    vars(error).setdefault(_FUNCTION_PIECE, (piece,))


def _piece(path: str, owner: nn.Module, name: str) -> Piece | None:
    """Return the piece of a frame that runs function `name` of a module."""
    if name == "forward":
        return Piece(path) if path else None
    if name in CALL_MACHINERY or not inspect.isfunction(inspect.getattr_static(type(owner), name, None)):
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
    functions = [(function_of(piece.function), piece) for piece in pieces if piece.function]
    replaced = [(function, interceptor.replace(function, piece)) for function, piece in functions]
    by_owner = {(id(model.get_submodule(piece.path)), piece.method): piece for piece in pieces if not piece.is_function}
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

    @contextmanager
    def _handling(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False


_WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Leaves although they have children, or parameters of their own."""


def is_leaf(module: nn.Module) -> bool:
    """Return True for torch.nn modules without children (Conv2d, BatchNorm2d, ReLU ...), attention and recurrent layers.

    Containers (Sequential, Transformer ...) and modules of the user's are recorded through, so that they can be cut. A module
    with backward hooks is a leaf, because its hooks belong to the autograd graph between its inputs and its outputs.
    """
    if any(backward_hooks_of(module)):
        return True
    if not type(module).__module__.startswith("torch.nn."):
        return False
    return isinstance(module, _WHOLE) or not children_of(module)


def cheap_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` of a leaf, or a cheaper function with results of the same shapes and strides.

    On fake tensors torch unrolls a recurrent layer over time; the cheaper function runs a single time step.
    """
    is_unhooked_rnn = isinstance(module, nn.RNNBase) and not any(forward_hooks_of(module))

    def one_step(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return call(x, *args, **kwargs)
        time = 1 if module.batch_first and x.dim() == 3 else 0
        output, state = call(x.narrow(time, 0, 1), *args, **kwargs)
        steps = output.transpose(0, time)
        states = pytree.tree_map(
            lambda tensor: tensor.squeeze(0) if tensor.dim() > x.dim() else tensor, state
        )  # torch 2.11 returns one dimension too many
        return steps.repeat(x.shape[time], *[1] * (output.dim() - 1)).transpose(0, time), states

    return one_step if is_unhooked_rnn else _known_momentum(module, call)


def _known_momentum(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` of a BatchNorm without a momentum as if it had one, with the same shapes.

    Such a layer divides by its own count, which is not known while recording.
    """
    if getattr(module, "momentum", 0.0) is not None or not isinstance(module, NormBase):
        return call

    def known(*args: Any, **kwargs: Any) -> Any:
        module.momentum = 0.1
        try:
            return call(*args, **kwargs)
        finally:
            module.momentum = None

    return known
