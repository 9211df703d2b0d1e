"""A call that all ranks of a pipeline make together, as the ranks compare it: the function, the modes, and the layout and samples
of its batch.

text       pipe.step(x (8, 4) float32, target (8,) int64), training         equal on all ranks
contents   a number per leaf, from 16 elements of it                        of one batch: those of the leaves that are no placeholders
digest     a number for all leaves, 0 if one may be a placeholder           equal where every rank has the whole batch
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from pipecompile.torch_private import pytree
from pipecompile.tracing.ambient_modes import autocast_kinds

__all__ = ["COMPARED_LEAVES", "CollectiveCall", "hash_of", "sample_of"]

COMPARED_LEAVES = 16
"""Number of leaves of a batch whose elements are compared. Layouts are compared of all."""

_SAMPLED = 16
"""Number of elements of a leaf that are compared: two batches of two labels are taken for one in 1 of 65,536 cases."""

_SHOWN = 4
"""Number of elements of a leaf that an error shows."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call of `function` on a batch. `leaves` are those of the inputs, then those of the target; `n_inputs` counts the former.

    `modes` says how the call is run, in words. `function` may have arguments that are compared, in parentheses.
    """

    function: str
    modes: str = ""
    leaves: tuple[Any, ...] = ()
    n_inputs: int = 0

    @classmethod
    def of(
        cls, function: str, model: nn.Module, inputs: Any = (), target: Any = None, scaler: GradScaler | None = None
    ) -> CollectiveCall:
        """Return a call with nested structures of inputs and of the target."""
        leaves = pytree.tree_leaves(inputs)
        targets = () if target is None else pytree.tree_leaves(target)
        return cls(function, ", ".join([*_modes(model), *_scaling(scaler, model)]), (*leaves, *targets), len(leaves))

    @property
    def key(self) -> int:
        """A number that is equal for calls that are alike but for the elements of their tensors."""
        return hash_of(f"{self.function} {self.modes} {self.n_inputs} {[*map(_layout, self.leaves)]}")

    def contents(self, *, is_due: bool) -> list[int]:
        """Return the digest, then a number per leaf, 0 for a leaf that says nothing. Tensors on a GPU are read only if that `is_due`."""
        samples = [sample_of(leaf, is_due=is_due) for leaf in self.leaves[:COMPARED_LEAVES]]
        is_whole = len(self.leaves) <= COMPARED_LEAVES and None not in samples
        numbers = [_hash_of_bytes(sample) | 1 if sample else 0 for sample in samples]
        digest = hash_of(repr(numbers)) | 1 if is_whole else 0
        return [digest, *numbers, *[0] * (COMPARED_LEAVES - len(numbers))]

    def __str__(self) -> str:
        layouts = [_layout(leaf) for leaf in self.leaves]
        named = [f"{self._kind(place)} {layout}" for place, layout in enumerate(layouts)]
        call = self.function if self.function.endswith(")") else f"{self.function}({', '.join(named)})"
        return ", ".join([call, *filter(None, [self.modes])])

    def samples(self) -> str:
        """Return the first elements of each leaf, as text."""
        tensors = [(place, leaf) for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        return ", ".join(f"{self._kind(place)} begins {_begin(leaf)}" for place, leaf in tensors)

    def _kind(self, place: int) -> str:
        return f"input {place}" if place < self.n_inputs else "target"


def hash_of(text: str) -> int:
    """Return 63 bits of a hash that is the same in all processes."""
    return _hash_of_bytes(text.encode())


def _hash_of_bytes(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1


def _modes(model: nn.Module) -> list[str]:
    autocast = [f"autocast {dtype} on {kind}" for kind, dtype, _ in autocast_kinds() if dtype]
    plain = [] if torch.is_grad_enabled() else ["without gradients"]
    return ["training" if model.training else "in eval mode", *plain, *autocast]


def _scaling(scaler: GradScaler | None, model: nn.Module) -> list[str]:
    """Return a phrase for an enabled GradScaler, with its scale if no GPU must be asked for it."""
    if scaler is None or not scaler.is_enabled():
        return []
    is_known = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return [f"with a GradScaler of scale {scaler.get_scale():g}" if is_known else "with a GradScaler"]


def _layout(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str)) or leaf is None else type(leaf).__name__


def sample_of(leaf: Any, *, is_due: bool) -> bytes | None:
    """Return a few elements of a tensor, none of a plain value, whose layout says all. Return None for what may be a placeholder: a
    tensor that cannot be read, or whose elements are equal.
    """
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return b""
    if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.device.type == "meta":
        return None
    if leaf.device.type != "cpu" and not is_due:
        return None
    try:
        found = _elements(leaf) if leaf.numel() else b""
    except (RuntimeError, NotImplementedError):  # a layout or a dtype without `take`
        return None
    size = leaf.element_size()
    return None if found and found == found[:size] * (len(found) // size) else found


def _elements(leaf: torch.Tensor) -> bytes:
    taken = torch.take(leaf.detach(), _places(leaf.numel(), leaf.device))
    return taken.cpu().view(torch.uint8).numpy().tobytes()


@lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> torch.Tensor:
    """Return the places of the elements that are compared, of `count`: spread over all."""
    with torch.inference_mode(False):
        return torch.linspace(0, count - 1, min(_SAMPLED, count), dtype=torch.float64, device="cpu").long().to(device)


def _begin(leaf: torch.Tensor) -> str:
    if leaf.device.type == "meta":
        return "on meta"
    return ", ".join(f"{number:.4g}" for number in leaf.detach().flatten()[:_SHOWN].tolist())
