"""Trial runs in which masks select fewer elements: they show which sizes depend on the data, even if no trial input has padding.

    x[mask]                       mask: (4, 12), all True in the example         (48, 16)
    x[mask], thinned              the last third of what it selects left out     (32, 16)

One mask is thinned in one way wherever it is used, so that `x[mask]` and `y[mask]` fit each other. A mask that does not depend on the
inputs, as a triangle that is a buffer, selects as many elements in every run: it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pipecompile.tracing.opaque.saved_bytes import memory_key

__all__ = ["MaskThinning"]

_BY_MASK = frozenset(
    {"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_", "masked_select",
     "masked_scatter", "masked_scatter_"}
)  # fmt: skip
"""Operators with bool masks among their arguments after the first."""
_OF_VALUES = frozenset({"nonzero", "_unique", "_unique2", "unique_consecutive"})
"""Operators whose first argument decides the size of the result."""
_MASKS = (torch.bool, torch.uint8)
_WITHOUT_VALUES = ("_like", "new_", "sym_", "size", "stride", "numel")
"""Parts of the names of operators whose result does not depend on the values of a tensor."""


class MaskThinning:
    """Follows what depends on the inputs through a run, and if `is_active`, thins the masks among that."""

    def __init__(self, leaves: Iterable[Any], *, is_active: bool) -> None:
        self.is_active = is_active
        self._of_inputs = {memory_key(leaf) for leaf in leaves if _is_strided(leaf)}

    def note(self, func: Any, read: Iterable[torch.Tensor], result: Iterable[torch.Tensor]) -> None:
        """Note the results, and what is written, of a kernel that reads what depends on the inputs."""
        keys = {memory_key(tensor) for tensor in read if _is_strided(tensor)}
        if keys & self._of_inputs and not any(part in _name(func) for part in _WITHOUT_VALUES):
            self._of_inputs |= {memory_key(tensor) for tensor in result if _is_strided(tensor)}

    def decides(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the values of the inputs decide how many elements the kernel selects."""
        return any(map(self._is_of_inputs, _deciding(func, args)))

    def arguments(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a kernel with thinned masks."""
        if not self.is_active or not self.decides(func, args):
            return args
        name = _name(func)
        if name in _OF_VALUES:
            first = args[0]
            return (_thinned(first) if name == "nonzero" else first.flatten()[:1].expand(first.shape), *args[1:])
        return (args[0], *(self._masks_thinned(arg) for arg in args[1:]))

    def _masks_thinned(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [self._masks_thinned(one) for one in arg]
        return _thinned(arg) if _is_mask(arg) and self._is_of_inputs(arg) else arg

    def _is_of_inputs(self, tensor: torch.Tensor) -> bool:
        return _is_strided(tensor) and memory_key(tensor) in self._of_inputs


def _deciding(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the arguments of a kernel that decide how many elements it selects."""
    name = _name(func)
    if name in _OF_VALUES:
        return [args[0]]
    if name not in _BY_MASK or len(args) < 2:
        return []
    return [one for one in (args[1] if isinstance(args[1], (list, tuple)) else args[1:2]) if _is_mask(one)]


def _thinned(mask: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `mask` without the last third of its elements that are not 0, and without at least one of them."""
    flat = mask.detach().reshape(-1)
    places = flat.nonzero().flatten()
    kept = len(places) - max(1, len(places) // 3)
    return flat.index_fill(0, places[max(0, kept) :], 0).reshape(mask.shape)


def _name(func: Any) -> str:
    packet: Callable[..., Any] = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", ""))


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _MASKS


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
