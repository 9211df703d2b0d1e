"""Tensors that were on `meta` and have memory now: the same objects, and nobody has said yet what is in them.

    weight, on meta         weight, on cpu: blank         weight, on cpu
    no memory        ──►    ff ff ff ff ff ff ...  ──►    0.013 -0.207 ...
                  add                             init, load_state_dict, ...

Where every byte is ff, no floating type has a number: what is forgotten is seen, and never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipecompile.errors import InputError

__all__ = ["Blanks", "names_of", "with_memory"]

_BLANK = 0xFF
_LOOK = 1 << 20
"""Bytes that are looked at in one go."""


class Blanks:
    """The blank tensors of one model."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, device: torch.device, *, is_copy: bool = False) -> None:
        """Give a tensor on `meta` memory. One that is told its values before every run waits for none."""
        _give_memory(tensor, device)
        if is_copy:
            self._copies[id(tensor)] = tensor
        else:
            self._tensors[id(tensor)] = tensor, tensor._version

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Was it blank, when this was last looked at?"""
        return id(tensor) in self._tensors

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Had it any that are its own, when this was last looked at?"""
        return not tensor.is_meta and id(tensor) not in self._tensors and id(tensor) not in self._copies

    def left(self) -> list[torch.Tensor]:
        """Those that are still blank; the others are no longer known here."""
        self._tensors = {key: held for key, held in self._tensors.items() if _is_blank(*held)}
        return [tensor for tensor, _ in self._tensors.values()]


def names_of(model: nn.Module, tensors: Iterable[torch.Tensor]) -> list[str]:
    """What the model calls these tensors, and what they are where `state_dict` does not have them; those come first."""
    wanted, found = {id(tensor) for tensor in tensors}, dict[int, str]()
    for path, module in model.named_modules():
        for table, kind in ((module._parameters, ""), (module._buffers, ""), (vars(module), " (an attribute)")):
            for name, value in table.items():
                if isinstance(value, torch.Tensor) and id(value) in wanted:
                    said = " (a buffer outside state_dict)" if name in module._non_persistent_buffers_set else kind
                    found.setdefault(id(value), f"{path}.{name}".strip(".") + said)
    return sorted(found.values(), key=lambda name: not name.endswith(")")) + ["a tensor"] * len(wanted - found.keys())


@contextmanager
def with_memory(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Those of these tensors that are on `meta` have memory for the length of the context."""
    lent = [tensor for tensor in tensors if tensor.is_meta]
    for tensor in lent:
        _give_memory(tensor, torch.device("cpu"))
    try:
        yield
    finally:
        for tensor in lent:
            _exchange(tensor, torch.empty_like(tensor, device="meta"))


def _give_memory(tensor: torch.Tensor, device: torch.device) -> None:
    """It stays the same object, for the modules that share it and the optimizers that know it."""
    if is_traceable_wrapper_subclass(tensor):
        raise InputError(
            f"a {type(tensor).__name__} is on meta",
            why="only plain tensors are given memory here",
            hint="shard the stages after they have memory, or give them memory with to_empty before",
        )
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_like(tensor, device=device)
        made.untyped_storage().fill_(_BLANK)  # type: ignore[attr-defined]
        _exchange(tensor, made)


def _exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """What `torch.utils.swap_tensors` does. That refuses tensors with weak references, such as recurrent layers and fake
    modes hold: theirs are to the object, which stays.
    """
    other.requires_grad_(tensor.requires_grad)
    tensor.grad = None
    torch._C._swap_tensor_impl(tensor, other)


def _is_blank(tensor: torch.Tensor, version: int) -> bool:
    """Has nobody written to it? An integer that is ff all over may have been written, too."""
    if tensor.is_meta or tensor.numel() == 0:
        return False
    if tensor._version != version and not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    with torch.no_grad():
        held = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return all(bool((part == _BLANK).all()) for part in torch.split(held, _LOOK))
