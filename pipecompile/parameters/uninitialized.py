"""Tensors moved from `meta` to memory whose values are not written yet. They stay the same Python objects.

    weight, on meta         weight, on cpu: uninitialized      weight, on cpu
    no memory        ──►    ff ff ff ff ff ff ...         ──►   0.013 -0.207 ...
                  add                                   init, load_state_dict, ...

Every byte is filled with 0xff, which is NaN in every floating type: a tensor left uninitialized is detected before a run, and
would give NaN rather than train on random memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.text.shown_value import type_text
from pipecompile.torch_private.modules import buffers_of, non_persistent_of, parameters_of
from pipecompile.torch_private.storages import exchange, is_traceable_wrapper_subclass, version_of

__all__ = ["UninitializedTensors", "temporary_memory", "tensor_names"]

_FILL_BYTE = 0xFF
_CHUNK = 1 << 20
"""Bytes compared with `_FILL_BYTE` at a time: bounds the memory of the comparison to 1 MiB."""


@dataclass(eq=False)
class UninitializedTensors:
    """The tensors of one model that have memory and no values yet."""

    _tensors: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _copies: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor, device: torch.device, *, is_copy: bool = False) -> None:
        """Give memory on `device` to a tensor on meta. An `is_copy` tensor receives its values from its home before every run
        and never counts as uninitialized.
        """
        _give_memory(tensor, device)
        if is_copy:
            self._copies[id(tensor)] = tensor
        else:
            self._tensors[id(tensor)] = tensor, version_of(tensor)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` was uninitialized at the last call of `remaining`."""
        return id(tensor) in self._tensors

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` had values of its own at the last call of `remaining`."""
        return not tensor.is_meta and id(tensor) not in self._tensors and id(tensor) not in self._copies

    def remaining(self) -> list[torch.Tensor]:
        """Return the tensors that are still uninitialized, and stop tracking the others."""
        self._tensors = {key: entry for key, entry in self._tensors.items() if _is_unwritten(*entry)}
        return [tensor for tensor, _ in self._tensors.values()]


def tensor_names(model: nn.Module, tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the model's names of `tensors`. Tensors outside `state_dict` come first, with "(a buffer outside state_dict)" or
    "(an attribute)" after the name.
    """
    keys, names = {id(tensor) for tensor in tensors}, dict[int, str]()
    for path, module in model.named_modules():
        for table, kind in ((parameters_of(module), ""), (buffers_of(module), ""), (vars(module), " (an attribute)")):
            for name, value in table.items():
                if isinstance(value, torch.Tensor) and id(value) in keys:
                    suffix = " (a buffer outside state_dict)" if name in non_persistent_of(module) else kind
                    names.setdefault(id(value), f"{path}.{name}".strip(".") + suffix)
    return sorted(names.values(), key=lambda name: not name.endswith(")")) + ["a tensor"] * len(keys - names.keys())


@contextmanager
def temporary_memory(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give CPU memory to the tensors on meta for the length of the context; then put them back on meta."""
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    for tensor in on_meta:
        _give_memory(tensor, torch.device("cpu"))
    try:
        yield
    finally:
        for tensor in on_meta:
            _swap(tensor, torch.empty_like(tensor, device="meta"))


def _give_memory(tensor: torch.Tensor, device: torch.device) -> None:
    """Replace the meta storage by memory on `device`, filled with 0xff. The object stays, for modules and optimizers."""
    if is_traceable_wrapper_subclass(tensor):
        raise InputError(
            f"{type_text(tensor)} is on meta",
            why="only plain tensors are given memory here",
            hint="shard the stages after they have memory, or give them memory with to_empty before",
        )
    with torch.inference_mode(False), torch.no_grad():
        allocated = torch.empty_like(tensor, device=device)
        allocated.untyped_storage().fill_(_FILL_BYTE)  # type: ignore[attr-defined]
        _swap(tensor, allocated)


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensor objects as `torch.utils.swap_tensors` does, but allow weak references.

    `swap_tensors` refuses tensors with weak references, which recurrent layers and fake modes hold. Their references are to the
    Python object, which stays.
    """
    other.requires_grad_(tensor.requires_grad)
    tensor.grad = None
    exchange(tensor, other)


def _is_unwritten(tensor: torch.Tensor, version: int) -> bool:
    """Return whether all bytes are still 0xff. An integer tensor with a newer autograd version counts as written: -1 is 0xff."""
    if tensor.is_meta or tensor.numel() == 0:
        return False
    if version_of(tensor) != version and not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    with torch.no_grad():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return all(bool((chunk == _FILL_BYTE).all()) for chunk in torch.split(data, _CHUNK))
