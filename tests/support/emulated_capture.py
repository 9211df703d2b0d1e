"""CUDA graphs without a GPU: what is launched are calls of ATen.

    capture    the calls are noted; then all that they made is NaN, and all that they wrote is as it was, random state too
    replay     the same calls on the same memory, without Python, autograd or version counters

As on a device, nothing that was captured has a value before it is replayed, and a capture that fails has launched nothing. What real
captures forbid raises: waits of the host, and reads of the generator's state. A graph holds no memory but that which it made: a replay
raises if other memory was freed. Graphs of one pool share memory: a replay overwrites what graphs captured later have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.runtime.cells import recompute

__all__ = ["EmulatedCaptures"]

T = TypeVar("T")

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique2", "equal")
"""What a host would wait for."""


@dataclass
class EmulatedCaptures:
    """Makes captures, and counts what they do."""

    captured: int = 0
    replayed: int = 0

    def __call__(self) -> EmulatedCapture:
        return EmulatedCapture(self)


@dataclass
class EmulatedCapture:
    captures: EmulatedCaptures
    pool: list[Notes] = field(default_factory=list)

    def rehearse(self, run: Callable[[], T]) -> tuple[T, str | None]:
        with Listener() as heard:
            made = run()
        return made, f"the host waits for {heard.waits[0]}" if heard.waits else None

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        state, notes = torch.get_rng_state(), Notes()
        try:
            with notes, generators_unread():
                made = run()
        finally:
            notes.undo()
            torch.set_rng_state(state)
        notes.let_go()
        self.captures.captured += 1
        self.pool.append(notes)

        def replay() -> None:
            self.captures.replayed += 1
            for later in self.pool[self.pool.index(notes) + 1 :]:
                later.overwrite()
            notes.replay()

        return made, replay

    def drain(self) -> None:
        """Nothing is late here."""


@contextmanager
def generators_unread() -> Iterator[None]:
    """Let reads of the generator's state fail, as within a capture on a device."""

    def refuse(*_: object) -> None:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    with patch.object(recompute, "random_state", refuse), patch.object(recompute, "set_random_state", refuse):
        yield


class Listener(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in WAITS:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@dataclass
class Place:
    """Where a tensor lies in memory that the graph does not hold."""

    storage: StorageWeakRef
    layout: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return cls(StorageWeakRef(tensor.untyped_storage()), layout, tensor.dtype)

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "a replay reads or writes memory that was freed after the capture"
        return _there(storage, self.layout, self.dtype)


def _there(storage: torch.UntypedStorage, layout: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype).set_(storage, *layout)


@dataclass(eq=False)
class Notes(TorchDispatchMode):  # type: ignore[misc]
    calls: list[list[Any]] = field(default_factory=list)
    born: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    found: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        for tensor in _tensors((args, kwargs)):
            if (place := _memory(tensor)) not in self.born and place not in self.found:
                self.found[place] = tensor, tensor.untyped_storage().clone()
        made = func(*args, **kwargs)
        fresh = []
        for index, tensor in enumerate(pytree.tree_leaves(made)):
            if (
                isinstance(tensor, torch.Tensor)
                and (place := _memory(tensor)) not in self.born.keys() | self.found.keys()
            ):
                self.born[place] = tensor.untyped_storage()
                fresh.append((index, self.born[place]))
        self.calls.append([func, args, kwargs, fresh, torch.is_grad_enabled()])  # some kernels do more with a gradient
        return made

    def undo(self) -> None:
        for tensor, before in self.found.values():
            tensor.untyped_storage().copy_(before)
        self.overwrite()

    def overwrite(self) -> None:
        """Write NaN, and no index of anything, into all that the calls made."""
        for storage in self.born.values():
            storage.fill_(0xFF)

    def let_go(self) -> None:
        """Hold the memory that was there before the capture no longer, nor autograd's nodes."""
        self.found.clear()
        for call in self.calls:
            call[1:3] = pytree.tree_map_only(torch.Tensor, self._own_or_place, call[1:3])

    def _own_or_place(self, tensor: torch.Tensor) -> torch.Tensor | Place:
        storage, place = tensor.untyped_storage(), Place.of(tensor)
        is_found = storage.nbytes() > 0 and _memory(tensor) not in self.born
        return place if is_found else _there(storage, place.layout, tensor.dtype)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch.autocast("cpu", enabled=False):
            for func, *given, fresh, is_graded in self.calls:
                args, kwargs = pytree.tree_map_only(Place, Place.tensor, given)
                with torch.set_grad_enabled(is_graded):
                    leaves = pytree.tree_leaves(func(*args, **kwargs))
                for index, storage in fresh:
                    storage.copy_(leaves[index].untyped_storage())


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
