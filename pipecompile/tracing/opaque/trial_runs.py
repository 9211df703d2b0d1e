"""Trial runs: the real model on real inputs, to see what the pieces give that cannot be recorded.

Nothing of it stays: inputs are copies, and buffers, attributes, parameters that are written, gradients and random states
are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from pipecompile.batching.containers import taken_apart
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import TorchDispatchMode
from pipecompile.torch_private.operators import packet_of, schema_of
from pipecompile.torch_private.storages import storage_key, version_of
from pipecompile.torch_private.tensor_bytes import footprint
from pipecompile.tracing.model_pieces import Piece, caught
from pipecompile.tracing.opaque.torch_functions import functions_caught
from pipecompile.tracing.reachable_code import enclosed
from pipecompile.tracing.state.snapshot import untouched
from pipecompile.tracing.state.tensor_contents import preserved

__all__ = ["Call", "Seen", "Work", "trial"]

Work = tuple[float, float, torch.dtype]
"""One kernel: FLOPs, bytes moved, dtype."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that a call gave. `source`: the argument leaf or the model's tensor whose memory it lives in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    source: int | torch.Tensor | None = None
    same: bool = False


@dataclass(slots=True)
class Call:
    """One call of a piece. `leaves` are Seen or plain; `used` are tensors of the model that are not the piece's own;
    `stray` are those made by an earlier call of something else and not handed over.
    """

    form: pytree.TreeSpec
    leaves: list[Any]
    written: tuple[int, ...] = ()
    used: tuple[torch.Tensor, ...] = ()
    stray: bool = False
    work: list[Work] = field(default_factory=list)
    saved_bytes: int = 0
    random: bool = False


def trial(
    model: nn.Module, args: Any, kwargs: Any, pieces: Iterable[Piece], *, reseed: bool = False
) -> dict[Piece, list[Call]]:
    """Run the model once and return what each call of each piece gave. Raises what the model raises."""
    calls: dict[Piece, list[Call]] = {piece: [] for piece in pieces}
    watch = _Watch(model)

    def catch(piece: Piece, run: Callable[..., Any], given: Any, named: Any) -> Any:
        with watch.over(piece, (given, named)) as record:
            made = record.made = run(*given, **named)
        calls[piece].append(record.call())
        return made

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        contexts = (
            untouched(model),
            preserved(model),
            caught(model, calls, catch),
            functions_caught(model, calls, catch),
            watch,
        )
        for context in contexts:
            stack.enter_context(context)
        if reseed:
            torch.manual_seed(torch.initial_seed() + 1)
        model(*args, **kwargs)
    return calls


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every kernel: which memory it reads, and inside the call of a piece what it costs."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.makers: dict[int, Piece | None] = {}
        self.memory: list[StorageWeakRef] = []
        self.record: _Record | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _tensors((args, kwargs))
        made = func(*args, **(kwargs or {}))
        known = {_key(tensor) for tensor in read}
        if self.record is not None:
            self.record.note(func, args, kwargs or {}, read, made)
        for tensor in _tensors(made):
            if _key(tensor) not in known and tensor.layout is torch.strided:
                self.makers[_key(tensor)] = self.record.piece if self.record else None
                self.memory.append(_reference(tensor))  # so that its key is given to no other memory
        return made

    @contextmanager
    def over(self, piece: Piece, given: Any) -> Iterator[_Record]:
        self.record = record = _Record(self, piece, given)
        try:
            with saved_tensors_hooks(record.save, lambda packed: packed):
                yield record
        finally:
            self.record = None


class _Record:
    """What happens in one call."""

    def __init__(self, watch: _Watch, piece: Piece, given: Any) -> None:
        self.watch, self.piece, self.made = watch, piece, None
        owner = watch.model.get_submodule(piece.path)
        self.own = [*owner.parameters(), *owner.buffers()] if piece.is_module else []
        self.state = {_key(t): t for t in (*watch.model.parameters(), *watch.model.buffers())}
        self.given = taken_apart(given)[0]
        self.versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in self.given]
        self.known = {_key(tensor) for tensor in (*self.own, *_tensors(self.given))}
        self.earlier = dict(watch.makers)
        self.outside: dict[int, torch.Tensor] = {}
        self.saved: dict[int, int] = {}
        self.work: list[Work] = []
        self.random = False

    def note(self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor], made: Any) -> None:
        keys = {_key(tensor) for tensor in read}
        self.random = self.random or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        for tensor in read:
            if _key(tensor) not in self.known:
                self.outside[_key(tensor)] = tensor
        fresh = [tensor for tensor in _tensors(made) if _key(tensor) not in keys]
        self.known |= {_key(tensor) for tensor in fresh}
        if fresh or schema_of(func).is_mutable:
            count = flop_registry.get(packet_of(func))
            moved = sum(map(footprint, (*read, *fresh)))
            dtype = next((tensor.dtype for tensor in (*read, *fresh)), torch.float32)
            self.work.append((float(count(*args, **kwargs, out_val=made)) if count else 0.0, float(moved), dtype))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self.state:
            self.saved[_key(tensor)] = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        return tensor.detach()

    def call(self) -> Call:
        """The record, once the call is over."""
        leaves, form = taken_apart(self.made)
        written = [
            place
            for place, (leaf, version) in enumerate(zip(self.given, self.versions, strict=True))
            if isinstance(leaf, torch.Tensor) and version_of(leaf) != version
        ]
        used = [self.state[key] for key in self.outside if key in self.state]
        stray = any(self.earlier.get(key, self.piece) != self.piece for key in self.outside if key not in self.state)
        stray = stray or any(_key(tensor) not in self.state for leaf in self.given for tensor in enclosed(leaf))
        seen = [self._seen(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return Call(form, seen, tuple(written), tuple(used), stray, self.work, sum(self.saved.values()), self.random)

    def _seen(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        same = next((place for place, leaf in enumerate(self.given) if leaf is tensor), None)
        source = same if same is not None else self._source(_key(tensor))
        return Seen(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.requires_grad,
            source, same is not None or any(tensor is owned for owned in self.state.values()),
        )  # fmt: skip

    def _source(self, key: int) -> int | torch.Tensor | None:
        for place, leaf in enumerate(self.given):
            if isinstance(leaf, torch.Tensor) and _key(leaf) == key:
                return place
        return self.state.get(key)
