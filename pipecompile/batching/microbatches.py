"""A mini-batch divided into micro-batches.

Sizes differ by at most one sample (`torch.tensor_split`). A batch smaller than the number of micro-batches is divided into
single samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from itertools import accumulate, pairwise
from typing import Any

import torch

from pipecompile.batching.batch_dims import BatchDims, Dims, scatter, sizes
from pipecompile.batching.call_inputs import FlatInputs, check_target, count_leaves, flatten_target
from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown, type_text
from pipecompile.text.units import counted
from pipecompile.torch_private import pytree
from pipecompile.torch_private.storages import foreach_mul

__all__ = [
    "LossDivisor",
    "MiniBatch",
    "Weights",
    "fewer_microbatches",
    "loss_weights",
    "scaled_gradients",
    "scatter_tree",
    "sizes",
    "split_sizes",
    "weighted_loss",
    "loss_gradients",
]


def split_sizes(inputs: FlatInputs, count: int) -> tuple[int, ...]:
    """Return the samples of each of `count` micro-batches, or of as many as there are samples.

    Lists with an entry per sample go into equally long micro-batches, and so into fewer ones if need be.
    """
    samples = inputs.samples
    if samples is None:
        return (1,)
    count = min(count, samples)
    if inputs.indivisible and count > 1:
        raise InputError(
            "the BlockMask cannot be cut into micro-batches",
            where=inputs.indivisible,
            why="in a micro-batch the batch index counts from 0: it may select from tensors that mask_mod closes over, and nothing else",
            hint="table[b] with a table of one entry per sample that mask_mod closes over; or n_microbatches=1",
        )
    if inputs.lists:
        count = next(n for n in range(count, 0, -1) if samples % n == 0)
    return sizes(samples, count)


def fewer_microbatches(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes, in samples, of ever fewer micro-batches of the same samples; the last is the whole mini-batch."""
    return (sizes(sum(parts), count) for count in range(len(parts) - 1, 0, -1))


class MiniBatch:
    """The inputs of one call, divided into micro-batches of these sizes, in samples.

    `first` is the call of the first micro-batch. `values[i]` are the values of leaf i, one per micro-batch, and `dims[i]` its
    batch dimension. `origins[m][i]` is the leaf of the whole call that leaf i of micro-batch m comes from.
    """

    is_listed = False

    def __init__(self, whole: FlatInputs, sizes: tuple[int, ...]) -> None:
        self.whole, self.sizes = whole, sizes
        self.calls = tuple(whole.microbatch_calls(len(sizes))) if whole.lists else ()

    @property
    def first(self) -> FlatInputs:
        return self.calls[0] if self.calls else self.whole.part([part[0] for part in self.values], self.sizes[0])

    @cached_property
    def values(self) -> list[Sequence[Any]]:
        if self.calls:
            return list(zip(*(call.leaves for call in self.calls), strict=True))
        pairs = zip(self.whole.leaves, self.whole.dims, strict=True)
        return [scatter(leaf, dim, len(self.sizes)) for leaf, dim in pairs]

    @property
    def dims(self) -> Dims:
        return self.calls[0].dims if self.calls else self.whole.dims

    @property
    def origins(self) -> Sequence[Sequence[int]]:
        if not self.calls:
            return [range(len(self.whole.leaves))] * len(self.sizes)
        origins: list[list[int]] = [[] for _ in self.sizes]
        start = 0
        for name, *values in zip(self.whole.arguments, *(call.values for call in self.calls), strict=True):
            for m, count in enumerate(map(count_leaves, values)):
                origins[m] += range(start, start + count)
                start += count if name in self.whole.lists else 0
            start += 0 if name in self.whole.lists else count_leaves(values[0])
        return origins


def scatter_tree(target: Any, count: int, samples: int | None, batch_dims: BatchDims) -> Sequence[Any]:
    """Return the micro-batches of a target, a nested structure. Raise InputError if a tensor has another number of samples."""
    if isinstance(target, torch.Tensor) and target.dim() and target.shape[0] == samples and not batch_dims:
        return scatter(target, 0, count)
    if samples is None:
        check_target(target)
        return [target]
    if batch_dims.get("target", 0) is list:
        return _list_slices(target, count, samples)
    leaves, spec, dims = flatten_target(target, batch_dims, samples)
    parts = [scatter(leaf, dim, count) for leaf, dim in zip(leaves, dims, strict=True)]
    return [pytree.tree_unflatten([part[m] for part in parts], spec) for m in range(count)]


def _list_slices(target: Any, count: int, samples: int) -> list[Any]:
    """Return the micro-batches of a target that is a list with one entry per sample."""
    if not isinstance(target, (list, tuple)) or len(target) != samples:
        actual = (
            f"has {counted(len(target), 'entry')}" if isinstance(target, (list, tuple)) else f"is {type_text(target)}"
        )
        raise InputError(
            f"batch_dims declares the target as a list with one entry per sample, but it {actual} for {counted(samples, 'sample')}",
            hint=f"pass a list of {counted(samples, 'entry')}, or remove target from batch_dims",
        )
    bounds = [*accumulate(sizes(samples, count), initial=0)]
    return [target[start:end] for start, end in pairwise(bounds)]


Weights = tuple[Sequence[float], torch.Tensor]
"""The weight of each micro-batch in the loss of the mini-batch, as numbers and as one tensor."""


@lru_cache(maxsize=256)
def loss_weights(parts: tuple[int, ...], *, mean: bool) -> Weights:
    """Return the weight of each micro-batch in the loss. With `mean`, a weight is a share of the samples, else 1.

    `parts` are the sizes of the micro-batches, in samples. Autograd rounds a gradient to the dtype of the loss, which takes
    time: weights that float32 has exactly are in float32, the others in float64.
    """
    weights = [size / sum(parts) if mean else 1.0 for size in parts]
    with torch.inference_mode(False):
        exact = torch.tensor(weights, dtype=torch.float64, device="cpu")
        single = exact.float()
        return weights, single if torch.equal(single.double(), exact) else exact


def weighted_loss(losses: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the loss of the mini-batch: the weighted sum of the micro-batches' losses, added in order.

    A loss without weight counts only if it is infinite, and makes the sum NaN: there is a sum that its divisor does not count.
    """
    if 0.0 in weights and any(weights):  # the loss of nothing that counts is not a number
        pairs = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight or loss.isinf()]
        losses, weights = [loss for loss, _ in pairs], [weight for _, weight in pairs]
    with torch.no_grad():
        if _is_exact(losses, weights):
            first, second, *others = losses
            return reduce(torch.Tensor.add_, others, first + second).mul_(weights[0])
        first, *others = foreach_mul(losses, weights)
        return reduce(torch.Tensor.add_, others, first)


def _is_exact(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> bool:
    """Return whether the sum may be multiplied in the place of the losses, bit for bit: by one weight, a power of two."""
    is_power_of_two = len(losses) > 1 and math.frexp(weights[0])[0] == 0.5 and len(set(weights)) == 1
    return is_power_of_two and losses[0].dtype in (torch.float32, torch.float64)


_FEW = 256
"""Labels that are compared in Python: tensor operations take longer to start."""


@dataclass(frozen=True, slots=True)
class LossDivisor:
    """The divisor of a loss, computed by `compute` from `inputs` and the number of samples; without `compute`, it is made of the
    only input.

    With `is_target`, the result are class indices: those other than `ignored` count, each with its class's `weight`. The loss
    divides by no less than `floor`, which `of` does not apply: counts of micro-batches add up without it.
    """

    inputs: tuple[str, ...]
    compute: Callable[..., Any] | None = None
    is_target: bool = False
    ignored: int = -100
    weight: torch.Tensor | None = None
    floor: float = 0.0

    def renamed(self, names: Sequence[str]) -> LossDivisor:
        """Return the divisor with other names for its inputs, in their order."""
        return replace(self, inputs=tuple(names))

    def value(self, values: Mapping[str, Any], size: int) -> Any:
        """Return the value computed from the inputs of `size` samples, by name."""
        arguments = [values[name] for name in self.inputs]
        with torch.no_grad():
            return arguments[0] if self.compute is None else self.compute(*arguments, size)

    def of(self, values: Mapping[str, Any], size: int) -> torch.Tensor:
        """Return the divisor for the inputs of `size` samples, by name: a number as a float64 tensor on the CPU."""
        return self._counted(values, size).cpu()

    def _counted(self, values: Mapping[str, Any], size: int) -> torch.Tensor:
        """Return the divisor on the device of what it is computed from."""
        result = self.value(values, size)
        with torch.no_grad():
            if not self.is_target:
                return (result if isinstance(result, torch.Tensor) else torch.as_tensor(result, device="cpu")).double()
            counted: torch.Tensor = result != self.ignored
            if self.weight is not None:
                counted = self.weight.to(result.device)[result.masked_fill(~counted, 0)].double() * counted
            return counted.sum().double()

    def fed_by(self, sources: Sequence[LossDivisor]) -> LossDivisor:
        """Return the divisor with its inputs computed by these sources."""
        names = tuple(dict.fromkeys(name for source in sources for name in source.inputs))
        if all(source.compute is None for source in sources):
            return self.renamed([source.inputs[0] for source in sources])
        return replace(self, inputs=names, compute=partial(_chained, self.compute, sources, names))

    def is_complete(self, values: Mapping[str, Any]) -> bool:
        """Return whether every class index of the mini-batch is known to count alike: shares are then those of the samples. Not known of
        those on a GPU, for which `shares` waits anyway.
        """
        if not self.is_target or self.weight is not None or self.compute is not None:
            return False
        labels = values[self.inputs[0]]
        if not labels.is_cpu:
            return False
        if labels.dim() == 1 and len(labels) <= _FEW:
            return self.ignored not in labels.tolist()  # a fifth of the time
        return not bool((labels == self.ignored).any())

    def shares(self, whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], sizes: tuple[int, ...]) -> Weights:
        """Return the weight of each micro-batch in the loss; sizes in samples. A GPU is waited for once."""
        pairs = (whole, sum(sizes)), *zip(parts, sizes, strict=True)
        with torch.inference_mode(False):
            counts = torch.stack([self._counted(values, size) for values, size in pairs]).cpu()
            weights = counts[1:] / counts[0]
            return weights.tolist(), weights


def _chained(
    compute: Callable[..., Any] | None, sources: Sequence[LossDivisor], names: Sequence[str], *arguments: Any
) -> Any:
    """Return what `compute` makes of the values of the sources; of the only one, if it is None."""
    *given, size = arguments
    values = dict(zip(names, given, strict=True))
    computed = [source.value(values, size) for source in sources]
    return computed[0] if compute is None else compute(*computed, size)


def loss_gradients(
    gradients: torch.Tensor, weights: Sequence[float], device: torch.device
) -> Sequence[torch.Tensor | None]:
    """Return the gradient of each micro-batch's loss for one step, in memory of this step: autograd may make the memory a
    parameter's `.grad`.

    A micro-batch without weight has none: its loss is 0/0, whose derivative is NaN. To another device than the CPU they go in one copy.
    """
    own = gradients.clone() if device.type == "cpu" else gradients.to(device, non_blocking=True)
    parts = own.unbind()
    return [part if weight else None for part, weight in zip(parts, weights, strict=True)] if 0.0 in weights else parts


def scaled_gradients(gradients: torch.Tensor, scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
    """Return the gradients of the micro-batches' losses multiplied by the scale of a scaler, which is on `device`."""
    if isinstance(scaler, type) or not callable(getattr(scaler, "scale", None)):
        raise InputError(f"scaler={shown(scaler)} is not a GradScaler", hint='scaler=torch.amp.GradScaler("cuda")')
    with torch.inference_mode(False), torch.no_grad():
        return scaler.scale(gradients.double().to(device, non_blocking=True))
