"""The module that an opaque node calls: it runs the piece as the user wrote it, and checks the result.

The recording went on with the result that the trial runs predict, and Python around the piece may have branched on that.
So every run compares the result with the expected one: structure, dtypes, sizes and plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch
from torch import nn

from pipecompile.batching.containers import argument_leaves, flatten_containers
from pipecompile.errors import TraceError
from pipecompile.text.shown_value import shown, type_text
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import detect_fake_mode
from pipecompile.torch_private.modules import buffers_of, forward_hooks_of, parameters_of
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.left_attributes import NOTHING_LEFT, LeftAttributes
from pipecompile.tracing.opaque.unread_parts import UnreadPart, leaves_in
from pipecompile.tracing.opaque.watched_state import WatchedState
from pipecompile.tracing.state.change_log import writes_noted

__all__ = ["ExpectedLeaf", "ExpectedResult", "OpaqueModule", "runs_python"]

SymbolicSize: TypeAlias = Any
"""A number, or a sympy expression in the batch size and in sizes that the data decide."""


@dataclass(frozen=True, slots=True)
class ExpectedLeaf:
    """One leaf of a result: a tensor of this shape, dtype and gradient, or (`dtype` None) the plain `value`."""

    shape: tuple[SymbolicSize, ...] = ()
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    value: Any = None


@dataclass(slots=True)
class ExpectedResult:
    """The result that one call of a piece has to return.

    structure, leaves   the result
    samples             batch size of the first trial run, to which `work` and `saved_bytes` belong
    work                (FLOPs, bytes moved, dtype) of each kernel
    saved_bytes         bytes that autograd saves for the backward
    data_sizes          symbols of the sizes that the data decide; `hints` has their sizes in the first trial run
    conditions          what the recording assumed about these sizes
    left                attributes that the call leaves, which the result has too
    """

    structure: pytree.TreeSpec
    leaves: tuple[ExpectedLeaf, ...]
    samples: int
    work: tuple[tuple[float, float, torch.dtype], ...] = ()
    saved_bytes: int = 0
    data_sizes: set[sympy.Symbol] = field(default_factory=set)
    conditions: tuple[sympy.Basic, ...] = ()
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    left: LeftAttributes = NOTHING_LEFT


class OpaqueModule(nn.Module):
    """The target of an opaque node: `forward(call, size, ...)` with the number of the call and the batch size in samples.

    If the piece is a submodule, it is a child, so that its tensors are counted and placed. A method, a function or a block has no
    tensors of its own; tensors of the model that its trial runs read are registered here (`hold`). `function` is a function of torch,
    or one call of a block. `written` are the parameters that trial runs wrote; buffers may always be written, and `changed` has those
    that were, too.
    """

    def __init__(
        self, piece: Piece, owner: nn.Module, symbol: sympy.Symbol, function: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.piece, self.symbol, self.function = piece, symbol, function
        self.expected_results: list[ExpectedResult] = []
        self.owner = (owner,)  # in a tuple, so that it is not a child
        self.watched = WatchedState()
        self.written: tuple[torch.Tensor, ...] = ()
        self.changed: tuple[torch.Tensor, ...] = ()
        if piece.is_module:
            self.module = owner
        self.training = owner.training

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register these tensors of the model as parameters and buffers."""
        for tensor in tensors:
            if not any(tensor is held for held in (*self.parameters(), *self.buffers())):
                name = f"used_{len(parameters_of(self)) + len(buffers_of(self))}"
                if isinstance(tensor, nn.Parameter):
                    self.register_parameter(name, tensor)
                else:
                    self.register_buffer(name, tensor)

    def note_writes(self, trained: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Note the parameters and buffers that trial runs of a call wrote."""
        self.written = (*self.written, *trained)
        self.changed = (*self.changed, *trained, *buffers)

    def forward(self, call: int, size: int, *args: Any, **kwargs: Any) -> Any:
        expected = self.expected_results[call]
        if detect_fake_mode() is not None:
            return self._fake_result(expected, size, args, kwargs)
        versions = self.watched.versions()
        result = expected.left.of_run(self.owner[0], partial(self.run, *args, **kwargs))
        self._check(expected, size, result)
        if written := self.watched.written_since(versions):
            what = (
                f"{self.piece.text or 'the model'}, kept whole, has written {written}, which it did not while recording"
            )
            raise TraceError(what, code="PC112")
        return result

    @property
    def is_users(self) -> bool:
        """Whether this runs user code, and not a function of torch."""
        return not self.piece.line

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the piece, without a check of its result."""
        owner: Any = self.owner[0]
        function = self.function or (getattr(owner, self.piece.method) if self.piece.method else owner)
        if not self.is_users:
            return function(*args, **kwargs)
        with writes_noted(owner):
            return function(*args, **kwargs)

    def kernels(self, call: int, size: int) -> tuple[tuple[float, float, torch.dtype], ...]:
        """Return (FLOPs, bytes moved, dtype) of each kernel of a call with `size` samples."""
        expected = self.expected_results[call]
        scale = size / max(expected.samples, 1)
        return tuple((flops * scale, moved * scale, dtype) for flops, moved, dtype in expected.work)

    # -- verification -----------------------------------------------------------------------------------------------

    def _check(self, expected: ExpectedResult, size: int, result: Any) -> None:
        """Raise TraceError unless the result of a call with `size` samples is as expected."""
        leaves, structure = flatten_containers(result)
        found = leaves_in(structure, leaves, expected.structure)
        if found is None:
            raise self._mismatch("its structure", _summary(leaves))
        known: dict[sympy.Symbol, int] = {self.symbol: size}
        for position, (leaf, expected_leaf) in enumerate(zip(found, expected.leaves, strict=True)):
            _bind_sizes(leaf, expected_leaf, expected.data_sizes, known)
            if fault := _fault(leaf, expected_leaf, known):
                raise self._mismatch(f"output {position}", fault)
        for condition in expected.conditions:
            if not condition.xreplace(known):
                sizes = ", ".join(f"{name} = {real}" for name, real in known.items() if name in condition.free_symbols)
                raise self._mismatch("its sizes", f"{condition} does not hold with {sizes}")

    def _mismatch(self, part: str, fault: str) -> TraceError:
        name = self.piece.text or "the model"
        what = f"{name}, kept whole, returned something else than while recording: {part}: {fault}"
        why = (
            ""
            if self.is_users
            else "the data decide the sizes of its result, and every run while recording had the same"
        )
        hint = "pad_packed_sequence(..., total_length=x.shape[1])" if name == "pad_packed_sequence" else ""
        return TraceError(what, code="PC112", why=why, hint=hint)

    # -- fake results -----------------------------------------------------------------------------------------------

    def _fake_result(self, expected: ExpectedResult, size: int, args: Any, kwargs: Any) -> Any:
        """Return the expected result as fake tensors, for the cost models. Its autograd graph saves `saved_bytes`."""
        arguments = [leaf for leaf in argument_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sources = [t for t in (*arguments, *self.parameters()) if t.requires_grad]
        known = {self.symbol: size, **expected.hints}
        saved = expected.saved_bytes * size // max(expected.samples, 1)
        device = next((tensor.device for tensor in (*arguments, *self.parameters())), torch.device("cpu"))
        leaves = [
            leaf.value
            if leaf.dtype is None
            else _fake_output(
                sources if leaf.requires_grad else [], [_size(s, known) for s in leaf.shape], leaf.dtype, device, saved
            )
            for leaf in expected.leaves
        ]
        return pytree.tree_unflatten(leaves, expected.structure)


def _bind_sizes(
    leaf: Any, expected: ExpectedLeaf, data_sizes: set[sympy.Symbol], known: dict[sympy.Symbol, int]
) -> None:
    """Add to `known` the sizes that the data decide, where `leaf` is the first tensor to have them."""
    if isinstance(leaf, torch.Tensor):
        for size, real in zip(expected.shape, leaf.shape, strict=False):
            if size in data_sizes:
                known.setdefault(size, int(real))


def _fault(leaf: Any, expected: ExpectedLeaf, known: dict[sympy.Symbol, int]) -> str:
    """Return how a leaf differs from the expected one; "" if it does not."""
    if isinstance(expected.value, UnreadPart):
        return "" if isinstance(leaf, UnreadPart) else f"{shown(leaf)} instead of a container"
    if expected.dtype is None:
        same = leaf is expected.value or leaf == expected.value or repr(leaf) == repr(expected.value) == "nan"
        return "" if same else f"{shown(leaf)} instead of {shown(expected.value)}"
    if not isinstance(leaf, torch.Tensor):
        return f"{type_text(leaf)} instead of a tensor"
    shape = tuple(_size(size, known) for size in expected.shape)
    if (shape, expected.dtype) != (tuple(leaf.shape), leaf.dtype):
        return f"{leaf.dtype} {tuple(leaf.shape)} instead of {expected.dtype} {shape}"
    return ""


def _size(size: SymbolicSize, known: dict[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(known))


def _summary(leaves: Sequence[Any]) -> str:
    """Return a text such as "2 leaves: (3, 4), None"."""
    texts = [str(tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else shown(leaf) for leaf in leaves[:8]]
    return f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}: {', '.join(texts)}"


def _fake_output(
    sources: list[torch.Tensor], shape: list[int], dtype: torch.dtype, device: torch.device, saved: int
) -> Any:
    if not sources:
        return torch.empty(shape, dtype=dtype, device=device)
    return _FakeOutput.apply(shape, dtype, device, saved, *sources)


class _FakeOutput(torch.autograd.Function):
    """A tensor with a gradient to `sources`, which has saved `saved` bytes for a backward that computes nothing."""

    @staticmethod
    def forward(ctx: Any, shape: list[int], dtype: torch.dtype, device: torch.device, saved: int, *sources: Any) -> Any:
        ctx.save_for_backward(torch.empty(saved, dtype=torch.uint8, device=device))
        ctx.count = len(sources)
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return (None,) * (4 + ctx.count)


def runs_python(called: nn.Module) -> bool:
    """Return whether a layer or piece that a graph calls runs Python of the user: a piece kept whole, or hooks of the forward."""
    return (isinstance(called, OpaqueModule) and called.is_users) or any(forward_hooks_of(called))
