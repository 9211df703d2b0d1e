"""A call that all ranks of a pipeline make together, as the ranks compare it: the function, the modes, and the layout and samples
of its batch.

text       pipe.step(input 0 (8, 4) float32, target (8,) int64), training   equal on all ranks
contents   a number per place of the batch (call_batch.py)                  of one batch: those of the leaves that ranks read, or all
digest     a number for all leaves, 0 if one may be a placeholder           equal where every rank has the whole batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from pipecompile.distributed.agreement.call_batch import CallBatch
from pipecompile.tracing.ambient_modes import autocast_kinds

__all__ = ["COMPARED_PLACES", "CollectiveCall", "hash_of", "may_be_placeholder", "sample_of"]

COMPARED_PLACES = 16
"""Number of places of a batch with a number each. Those of further inputs share the last one."""

_SAMPLED = 16
"""Number of elements of a leaf that are compared: two batches of two labels are taken for one in 1 of 65,536 cases."""

_READ = 64
"""Number of leaves of a batch whose elements are read. Layouts are compared of all."""

_SHOWN = 4
"""Number of elements of a leaf that an error shows."""

_LAYOUTS_ALONE = ("pipe.prepare",)
"""Functions that compute nothing: their batches are examples, and may have any elements."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call of `function` on a batch. `modes` says how it is run, in words. `function` may have arguments that are compared, in
    parentheses.
    """

    function: str
    modes: str = ""
    batch: CallBatch = field(default_factory=CallBatch)

    @classmethod
    def of(
        cls, function: str, model: nn.Module, batch: CallBatch | None = None, scaler: GradScaler | None = None
    ) -> CollectiveCall:
        """Return a call on a batch in the modes of the model and of this thread."""
        return cls(function, ", ".join([*_modes(model), *_scaling(scaler, model)]), batch or CallBatch())

    @property
    def has_samples(self) -> bool:
        """Whether the elements of the batch are compared."""
        return bool(self.batch.leaves) and self.function not in _LAYOUTS_ALONE

    @property
    def gives_outputs(self) -> bool:
        """Whether each rank takes what it is returned for the outputs of its own samples."""
        return self.function == "pipe"

    @property
    def key(self) -> int:
        """A number that is equal for calls that are alike but for the elements of their tensors."""
        layouts = [*map(_layout, self.batch.leaves)]
        return hash_of(f"{self.function} {self.modes} {self.batch.n_inputs} {self.batch.places} {layouts}")

    def contents(self, *, is_due: bool) -> list[int]:
        """Return the digest, then a number per place, 0 for a place that says nothing. Tensors on a GPU are read only if that `is_due`.

        A number is odd if none of its tensors may be a placeholder.
        """
        found: dict[int, list[tuple[bytes | None, bool]]] = {}
        is_whole = len(self.batch.leaves) <= _READ
        for place, leaf in zip(self.batch.places, self.batch.leaves[:_READ], strict=False):
            sample = sample_of(leaf, is_due=is_due)
            is_unsure = may_be_placeholder(sample, leaf)
            is_whole = is_whole and not is_unsure
            found.setdefault(min(place, COMPARED_PLACES - 1), []).append((sample, is_unsure))
        numbers = [0] * COMPARED_PLACES
        for place, samples in found.items():
            numbers[place] = _number(samples)
        return [hash_of(repr(numbers)) | 1 if is_whole else 0, *numbers]

    def read_bits(self, reads: int | None) -> int | None:
        """Return the places of `contents` of which a rank reads all inputs, as bits, for the leaves of a batch that it `reads`."""
        if reads is None:
            return None
        last = COMPARED_PLACES - 1
        rest = [place for place in self.batch.places if place >= last]
        reads_rest = all(reads >> min(place, 61) & 1 for place in rest)
        return reads & ((1 << last) - 1) & self.batch.bits | (int(bool(rest) and reads_rest) << last)

    def __str__(self) -> str:
        named = [f"{self.batch.name(index)} {_layout(leaf)}" for index, leaf in enumerate(self.batch.leaves)]
        call = self.function if self.function.endswith(")") else f"{self.function}({', '.join(named)})"
        return ", ".join([call, *filter(None, [self.modes])])

    def samples(self) -> str:
        """Return the first elements of each leaf, as text."""
        tensors = [(index, leaf) for index, leaf in enumerate(self.batch.leaves) if isinstance(leaf, torch.Tensor)]
        return ", ".join(f"{self.batch.name(index)} begins {_begin(leaf)}" for index, leaf in tensors)


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
        return _tensor_layout(leaf.shape, leaf.dtype)
    return repr(leaf) if isinstance(leaf, (bool, int, float, str)) or leaf is None else type(leaf).__name__


@lru_cache(maxsize=256)
def _tensor_layout(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def sample_of(leaf: Any, *, is_due: bool) -> bytes | None:
    """Return a few elements of a tensor, none of a plain value, whose layout says all. Return None for a tensor that cannot be read."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return b""
    if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.device.type == "meta":
        return None
    if leaf.device.type != "cpu" and not is_due:
        return None
    try:
        return _elements(leaf) if leaf.numel() else b""
    except (RuntimeError, NotImplementedError):  # a layout or a dtype without `take`
        return None


def may_be_placeholder(sample: bytes | None, leaf: Any) -> bool:
    """Return whether a leaf may stand for another one: it cannot be read, or its elements are equal."""
    if not sample:
        return sample is None
    size = int(leaf.element_size())
    return sample == sample[:size] * (len(sample) // size)


def _number(found: Sequence[tuple[bytes | None, bool]]) -> int:
    """Return the number of a place for the samples of its leaves, each with whether it may be a placeholder."""
    samples = [sample for sample, _ in found]
    if None in samples or not any(samples):
        return 0
    number = _hash_of_bytes(b"|".join(filter(None, samples)))
    return number & ~1 or 2 if any(is_unsure for _, is_unsure in found) else number | 1


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
