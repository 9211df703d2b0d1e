"""CUDA graphs without a GPU: what is launched are calls of ATen.

    capture    the calls are noted; then all that they made is NaN, and all that they wrote is as it was, random state too
    replay     the same calls on the same memory, without Python, autograd or version counters

As on a device, nothing that was captured has a value before it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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

    def rehearse(self, run: Callable[[], T]) -> tuple[T, str | None]:
        with Listener() as heard:
            made = run()
        return made, f"the host waits for {heard.waits[0]}" if heard.waits else None

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        state = torch.get_rng_state()
        with Notes() as notes:
            made = run()
        notes.undo()
        torch.set_rng_state(state)
        self.captures.captured += 1

        def replay() -> None:
            self.captures.replayed += 1
            notes.replay()

        return made, replay

    def drain(self) -> None:
        """Nothing is late here."""


class Listener(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in WAITS:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@dataclass
class Notes(TorchDispatchMode):  # type: ignore[misc]
    calls: list[tuple[Callable[[], Any], list[tuple[int, torch.Tensor]]]] = field(default_factory=list)
    born: dict[int, torch.Tensor] = field(default_factory=dict)
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
                self.born[place] = tensor
                fresh.append((index, tensor))
        is_graded = torch.is_grad_enabled()  # some kernels do more then

        def call() -> Any:
            with torch.set_grad_enabled(is_graded):
                return func(*args, **kwargs)

        self.calls.append((call, fresh))
        return made

    def undo(self) -> None:
        for tensor, before in self.found.values():
            tensor.untyped_storage().copy_(before)
        self.found.clear()
        for tensor in self.born.values():
            tensor.untyped_storage().fill_(0xFF)  # NaN, and no index of anything

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch.autocast("cpu", enabled=False):
            for call, fresh in self.calls:
                leaves = pytree.tree_leaves(call())
                for index, tensor in fresh:
                    tensor.untyped_storage().copy_(leaves[index].untyped_storage())


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
