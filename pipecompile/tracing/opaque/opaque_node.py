"""A piece that was not recorded, as the one node that it is in the graph: it runs as the user wrote it.

While recording it was run on two batches, and what it gave is the promise that the recording relies on. In every run the
promise is checked, because Python around the piece may have decided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import nn

from pipecompile.batching.containers import taken_apart
from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import detect_fake_mode
from pipecompile.torch_private.modules import buffers_of, parameters_of
from pipecompile.tracing.model_pieces import Piece

__all__ = ["Kept", "Promise", "Promised"]

Size: TypeAlias = Any
"""A number, or an expression in the batch size and in sizes that the data decide."""


@dataclass(frozen=True, slots=True)
class Promised:
    """One leaf of what a call gives: a tensor of these sizes, which may be in the batch size or unknown; or a plain value."""

    shape: tuple[Size, ...] = ()
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    value: Any = None


@dataclass(slots=True)
class Promise:
    """What one call of a piece gives. `unknown` are the sizes that the data decide, `conditions` what Python took for
    granted about them. `work` are (FLOPs, bytes, dtype) of its kernels for `samples` samples.
    """

    form: pytree.TreeSpec
    leaves: tuple[Promised, ...]
    samples: int
    work: tuple[tuple[float, float, torch.dtype], ...] = ()
    saved_bytes: int = 0
    unknown: set[sympy.Symbol] = field(default_factory=set)
    conditions: tuple[sympy.Basic, ...] = ()
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)


class Kept(nn.Module):
    """Runs the piece. `forward(call, size, ...)`: which call of the piece this is, and the batch size.

    A method has no parameters of its own: those that it was seen to use are held, so that they are counted and placed.
    """

    def __init__(
        self, piece: Piece, owner: nn.Module, symbol: sympy.Symbol, function: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.piece, self.symbol, self.function = piece, symbol, function
        self.promises: list[Promise] = []
        self.owner = (owner,)
        if piece.is_module:
            self.module = owner
        self.training = owner.training

    def hold(self, used: Iterable[torch.Tensor]) -> None:
        """Count these tensors of the model as the piece's."""
        for tensor in used:
            if not any(tensor is mine for mine in (*self.parameters(), *self.buffers())):
                name = f"used_{len(parameters_of(self)) + len(buffers_of(self))}"
                if isinstance(tensor, nn.Parameter):
                    self.register_parameter(name, tensor)
                else:
                    self.register_buffer(name, tensor)

    def forward(self, call: int, size: int, *args: Any, **kwargs: Any) -> Any:
        promise = self.promises[call]
        if detect_fake_mode() is not None:
            return self._imagined(promise, size, args, kwargs)
        made = self._runs(*args, **kwargs)
        self._check(promise, size, made)
        return made

    @property
    def _runs(self) -> Callable[..., Any]:
        owner: Any = self.owner[0]
        return self.function or (getattr(owner, self.piece.method) if self.piece.method else owner)

    # -- the promise ----------------------------------------------------------------------------------------------

    def _check(self, promise: Promise, size: int, made: Any) -> None:
        leaves, form = taken_apart(made)
        if form != promise.form:
            raise self._broken("another structure", f"{_shown(leaves)}")
        known: dict[sympy.Symbol, int] = {self.symbol: size}
        for place, (leaf, promised) in enumerate(zip(leaves, promise.leaves, strict=True)):
            _learn(leaf, promised, promise.unknown, known)
            if fault := _fault(leaf, promised, known):
                raise self._broken(f"output {place}", fault)
        for condition in promise.conditions:
            if not condition.subs(known):
                told = condition.subs({name: real for name, real in known.items() if name != self.symbol})
                raise self._broken("sizes", f"{told} does not hold")

    def _broken(self, what: str, found: str) -> TraceError:
        return TraceError(
            f"{self.piece.name or 'the model'}, kept whole, gave something else than while recording: {what}: {found}",
            code="PC112",
        )

    # -- without memory -------------------------------------------------------------------------------------------

    def _imagined(self, promise: Promise, size: int, args: Any, kwargs: Any) -> Any:
        """What it would give, on fake tensors: for whoever asks what things cost."""
        given = [leaf for leaf in taken_apart((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        sources = [t for t in (*given, *self.parameters()) if t.requires_grad]
        known = {self.symbol: size, **promise.hints}
        saved = promise.saved_bytes * size // max(promise.samples, 1)
        device = next((tensor.device for tensor in (*given, *self.parameters())), torch.device("cpu"))
        leaves = [
            leaf.value
            if leaf.dtype is None
            else _from(
                sources if leaf.requires_grad else [], [_size(s, known) for s in leaf.shape], leaf.dtype, device, saved
            )
            for leaf in promise.leaves
        ]
        return pytree.tree_unflatten(leaves, promise.form)

    def kernels(self, call: int, size: int) -> tuple[tuple[float, float, torch.dtype], ...]:
        """(FLOPs, bytes, dtype) of each kernel of a call with `size` samples."""
        promise = self.promises[call]
        scale = size / max(promise.samples, 1)
        return tuple((flops * scale, moved * scale, dtype) for flops, moved, dtype in promise.work)


def _learn(leaf: Any, promised: Promised, unknown: set[sympy.Symbol], known: dict[sympy.Symbol, int]) -> None:
    if isinstance(leaf, torch.Tensor):
        for size, real in zip(promised.shape, leaf.shape, strict=False):
            if size in unknown:
                known.setdefault(size, int(real))


def _fault(leaf: Any, promised: Promised, known: dict[sympy.Symbol, int]) -> str:
    """What is wrong with a leaf; nothing when it is as promised."""
    if promised.dtype is None:
        same = leaf is promised.value or leaf == promised.value or repr(leaf) == repr(promised.value) == "nan"
        return "" if same else f"{leaf!r} instead of {promised.value!r}"
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__} instead of a tensor"
    wanted = tuple(_size(size, known) for size in promised.shape)
    if (wanted, promised.dtype) != (tuple(leaf.shape), leaf.dtype):
        return f"{leaf.dtype} {tuple(leaf.shape)} instead of {promised.dtype} {wanted}"
    return ""


def _size(size: Size, known: dict[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(known))


def _shown(leaves: Sequence[Any]) -> str:
    kinds = [str(tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves[:8]]
    return f"{len(leaves)} leaves: {', '.join(kinds)}"


def _from(sources: list[torch.Tensor], shape: list[int], dtype: torch.dtype, device: torch.device, saved: int) -> Any:
    if not sources:
        return torch.empty(shape, dtype=dtype, device=device)
    return _Imagined.apply(shape, dtype, device, saved, *sources)


class _Imagined(torch.autograd.Function):
    """A tensor that comes from `sources`, and has saved so many bytes for a backward that is not there."""

    @staticmethod
    def forward(ctx: Any, shape: list[int], dtype: torch.dtype, device: torch.device, saved: int, *sources: Any) -> Any:
        ctx.save_for_backward(torch.empty(saved, dtype=torch.uint8, device=device))
        ctx.count = len(sources)
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return (None,) * (4 + ctx.count)
