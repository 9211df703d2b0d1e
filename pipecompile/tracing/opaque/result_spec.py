"""Result specs: the form of the results of an opaque call in any run, inferred from trial runs of different batch sizes.

run of 4 samples     run of 3 samples     result spec
(4, 8)               (3, 8)               (batch_size, 8)
(20,)                (15,)                (5 * batch_size,)
(37, 4)              (31, 4)              (?, 4)              the data decide; dimension 0 is never taken as constant
7                    7                    7
0.31                 0.28                 none: the piece cannot be opaque
(x, [h, h])          (x, [h])             (x, ?)              a list that nothing behind the piece may read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.tracing.model_pieces import Piece, UnpredictableResult
from pipecompile.tracing.opaque.trial_calls import TrialCall, TrialTensor
from pipecompile.tracing.opaque.unread_parts import UnreadPart, common_structure, leaves_in

__all__ = ["UNKNOWN", "LeafSpec", "ResultSpec", "Size", "are_comparable", "infer_result_specs"]

UNKNOWN = None
"""A size that the data decide."""

Size = int | Fraction | None
"""A constant size, a size as a multiple of the batch size, or UNKNOWN."""

_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types of the values beside tensors that a result may contain."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The spec of one leaf: a tensor, as `example` in the first trial run, or (`example` None) the plain `value`."""

    shape: tuple[Size, ...]
    example: TrialTensor | None
    value: Any = None

    def with_gradient(self) -> LeafSpec:
        """Return the spec with a gradient, if it is that of a tensor of real or complex numbers."""
        can_have_one = self.example is not None and (
            self.example.dtype.is_floating_point or self.example.dtype.is_complex
        )
        if self.example is None or not can_have_one or self.example.requires_grad:
            return self
        return replace(self, example=replace(self.example, requires_grad=True, source=None, is_source=False))


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """The spec of what one call returns: its structure and its leaves. `call` is the call in the first trial run."""

    structure: pytree.TreeSpec
    leaves: tuple[LeafSpec, ...]
    call: TrialCall

    def with_gradients(self) -> ResultSpec:
        """Return the spec with a gradient to every result that can have one."""
        return replace(self, leaves=tuple(leaf.with_gradient() for leaf in self.leaves))


def are_comparable(
    first: Mapping[Piece, list[TrialCall]], second: Mapping[Piece, list[TrialCall]], *, alike: bool = False
) -> bool:
    """Return whether two trial runs made the same calls, with results of the same types, and the same structure: but for inner lists,
    if they need not be `alike`.
    """
    pairs = [(first[piece], second[piece]) for piece in first]
    return all(
        len(a) == len(b)
        and all(
            _common((x, y)) is not None and not (alike and x.structure != y.structure)
            for x, y in zip(a, b, strict=True)
        )
        for a, b in pairs
    )


def _common(calls: Sequence[TrialCall], name: str = "") -> tuple[pytree.TreeSpec, list[list[Any]]] | None:
    """Return the structure that the results have in common, and the leaves of each; None if the types of leaves differ.

    What a block leaves has one structure: later statements read it. `name` is that of the piece.
    """
    structure = common_structure([call.structure for call in calls])
    if structure is None or (calls[0].block is not None and any(call.structure != structure for call in calls)):
        return None
    leaves = [leaves_in(call.structure, call.leaves, structure, name) or [] for call in calls]
    kinds = {tuple(map(type, each)) for each in leaves}
    has_tensor = any(isinstance(leaf, TrialTensor) for leaf in leaves[0])
    return (structure, leaves) if len(kinds) == 1 and (has_tensor or structure == calls[0].structure) else None


def infer_result_specs(piece: Piece, runs: Sequence[list[TrialCall]], sizes: Sequence[int | None]) -> list[ResultSpec]:
    """Return the spec of each call of `piece`, from its calls in several runs of `sizes` samples.

    Raise UnpredictableResult if the runs contradict each other in more than sizes.
    """
    if len({len(calls) for calls in runs}) > 1:
        hint = "call the submodule as often in every call of the model"
        raise UnpredictableResult(piece, "the number of its calls depends on the data", hint)
    return [_result_spec(piece, calls, sizes) for calls in zip(*runs, strict=True)]


def _result_spec(piece: Piece, calls: Sequence[TrialCall], sizes: Sequence[int | None]) -> ResultSpec:
    first = calls[0]
    if any(call.reads_foreign_tensors for call in calls):
        hint = "pass such tensors to the submodule as arguments, or register them as buffers"
        why = "it computes on tensors that are neither arguments nor tensors of the model"
        raise UnpredictableResult(piece, why, hint)
    if (common := _common(calls, piece.text)) is None:
        raise UnpredictableResult(piece, "the structure of its result depends on the data")
    if any(call.changes_containers for call in calls):
        hint = "return from the submodule what it puts into its arguments"
        raise UnpredictableResult(piece, "it changes a list, a dict or an object among its arguments", hint)
    if first.block is not None and not all(first.block.is_alike(call.block) for call in calls[1:] if call.block):
        raise UnpredictableResult(piece, "it reads an object that each call of the model makes anew")
    merged = _merged(calls, sizes)
    structure, leaves = common[0], zip(*common[1], strict=True)
    specs = tuple(_separate(_leaf_spec(piece, leaf, sizes), merged.written) for leaf in leaves)
    return ResultSpec(structure, specs, merged)


def _separate(spec: LeafSpec, written: Sequence[int]) -> LeafSpec:
    """Return the spec of a result that is an argument in all trial runs, and may be another tensor of its memory in other runs.

    A result that the call wrote in place is the argument in every run.
    """
    if spec.example is None or not spec.example.is_source or spec.example.source in written:
        return spec
    return replace(spec, example=replace(spec.example, is_source=False))


def _merged(calls: Sequence[TrialCall], sizes: Sequence[int | None]) -> TrialCall:
    """Return the first call with all that the others read, and the work of the heaviest: a call may skip what it is for."""
    used = {id(tensor): tensor for call in calls for tensor in call.used}
    read = [{id(tensor) for tensor in call.only_read} for call in calls]
    flops = [sum(kernel[0] for kernel in call.work) for call in calls]
    place = flops.index(max(flops))
    scale = (sizes[0] or 1) / (sizes[place] or 1)
    heaviest = calls[place]
    return replace(
        calls[0],
        used=tuple(used.values()),
        only_read=tuple(tensor for tensor in calls[0].only_read if all(id(tensor) in each for each in read)),
        trained=tuple({id(tensor): tensor for call in calls for tensor in call.trained}.values()),
        buffers=tuple({id(tensor): tensor for call in calls for tensor in call.buffers}.values()),
        written=tuple(sorted({position for call in calls for position in call.written})),
        work=[(count * scale, moved * scale, dtype) for count, moved, dtype in heaviest.work],
        saved_bytes=int(heaviest.saved_bytes * scale),
        draws_random=any(call.draws_random for call in calls),
        block=None,
    )


_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_ONE_MODULE = "keep all from quantize to dequantize in one submodule"


def _leaf_spec(piece: Piece, values: Sequence[Any], sizes: Sequence[int | None]) -> LeafSpec:
    """Return the spec of one leaf from its values in all runs."""
    first = values[0]
    if isinstance(first, TrialTensor):
        if first.dtype in _QUANTIZED:
            why = f"it returns {first.dtype}, of which there are no tensors without memory"
            raise UnpredictableResult(piece, why, hint=_ONE_MODULE)
        if any((len(value.shape), value.dtype) != (len(first.shape), first.dtype) for value in values):
            raise UnpredictableResult(piece, "the number of dimensions or the dtype of a result depends on the data")
        lengths = zip(*(value.shape for value in values), strict=True)
        return LeafSpec(tuple(_size(dim, length, sizes) for dim, length in enumerate(lengths)), _example(values))
    if isinstance(first, UnreadPart):
        return LeafSpec((), None, first)
    kind = type(first).__name__
    if isinstance(first, bool):
        raise UnpredictableResult(piece, "it returns a bool, on which Python may branch by the data")
    if not isinstance(first, _PLAIN):
        raise UnpredictableResult(piece, f"it returns a value of type {kind}")
    if any(first != value and not repr(first) == repr(value) == "nan" for value in values):
        raise UnpredictableResult(
            piece, f"it returns a value of type {kind} that depends on the data, or on earlier calls"
        )
    return LeafSpec((), None, first)


def _example(values: Sequence[TrialTensor]) -> TrialTensor:
    """Return the first tensor; one of its own memory, and contiguous, if some calls return an argument and others do not."""
    first = values[0]
    grad = any(value.requires_grad for value in values)
    if len({(_identity(value.source), value.is_source) for value in values}) == 1:
        return first if grad == first.requires_grad else replace(first, requires_grad=grad)
    fresh = next((value for value in values if value.source is None), first)
    stride = fresh.stride if fresh.source is None else torch.empty(first.shape, device="meta").stride()
    alone = replace(first, source=None, is_source=False, offset=0, requires_grad=grad)
    return replace(alone, stride=stride) if fresh.shape == first.shape else alone


def _identity(source: int | torch.Tensor | None) -> Any:
    return id(source) if isinstance(source, torch.Tensor) else source


def _size(dim: int, lengths: Sequence[int], sizes: Sequence[int | None]) -> Size:
    """Return the size of dimension `dim`, which was `lengths` in runs of `sizes` samples."""
    ratios = {Fraction(length, size) for length, size in zip(lengths, sizes, strict=True) if size}
    if len(set(sizes)) > 1 and len(ratios) == 1 and lengths[0]:
        return ratios.pop()
    return lengths[0] if dim and len(set(lengths)) == 1 else UNKNOWN
