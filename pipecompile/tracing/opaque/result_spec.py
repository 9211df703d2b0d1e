"""Result specs: what a call of an opaque piece returns in any run, inferred from trial runs of different batch size.

run of 4 samples     run of 3 samples     result spec
(4, 8)               (3, 8)               (batch_size, 8)
(20,)                (15,)                (5 * batch_size,)
(37, 4)              (31, 4)              (?, 4)              the data decide; dimension 0 is never taken as constant
7                    7                    7
0.31                 0.28                 none: the piece cannot be opaque
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.trial_runs import TrialCall, TrialTensor

__all__ = ["UNKNOWN", "LeafSpec", "ResultSpec", "Size", "UnpredictableResult", "are_comparable", "infer_result_specs"]

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


class UnpredictableResult(Exception):
    """The result of a piece has no spec. `why` completes the sentence "the piece cannot be opaque: "."""

    def __init__(self, piece: Piece, why: str) -> None:
        super().__init__(why)
        self.piece, self.why = piece, why


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The spec of one leaf: a tensor, as `example` in the first trial run, or (`example` None) the plain `value`."""

    shape: tuple[Size, ...]
    example: TrialTensor | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """The spec of what one call returns: its structure and its leaves. `call` is the call in the first trial run."""

    structure: pytree.TreeSpec
    leaves: tuple[LeafSpec, ...]
    call: TrialCall


def are_comparable(first: Mapping[Piece, list[TrialCall]], second: Mapping[Piece, list[TrialCall]]) -> bool:
    """Return whether two trial runs made the same calls, with results of the same structure and types."""
    pairs = [(first[piece], second[piece]) for piece in first]
    return all([_structure(call) for call in a] == [_structure(call) for call in b] for a, b in pairs)


def _structure(call: TrialCall) -> tuple[pytree.TreeSpec, list[type]]:
    return call.structure, [type(leaf) for leaf in call.leaves]


def infer_result_specs(piece: Piece, runs: Sequence[list[TrialCall]], sizes: Sequence[int | None]) -> list[ResultSpec]:
    """Return the spec of each call of `piece`, from its calls in several runs of `sizes` samples.

    Raise UnpredictableResult if the runs contradict each other in more than sizes.
    """
    if len({len(calls) for calls in runs}) > 1:
        raise UnpredictableResult(piece, "the number of its calls depends on the data")
    return [_result_spec(piece, calls, sizes) for calls in zip(*runs, strict=True)]


def _result_spec(piece: Piece, calls: Sequence[TrialCall], sizes: Sequence[int | None]) -> ResultSpec:
    first = calls[0]
    if any(call.reads_foreign_tensors for call in calls):
        raise UnpredictableResult(piece, "it computes on tensors that are neither arguments nor tensors of the model")
    if any(_structure(call) != _structure(first) for call in calls):
        raise UnpredictableResult(piece, "the structure of its result depends on the data")
    leaves = zip(*(call.leaves for call in calls), strict=True)
    return ResultSpec(first.structure, tuple(_leaf_spec(piece, leaf, sizes) for leaf in leaves), first)


def _leaf_spec(piece: Piece, values: Sequence[Any], sizes: Sequence[int | None]) -> LeafSpec:
    """Return the spec of one leaf from its values in all runs."""
    first = values[0]
    if isinstance(first, TrialTensor):
        if any((len(value.shape), value.dtype) != (len(first.shape), first.dtype) for value in values):
            raise UnpredictableResult(piece, "the number of dimensions or the dtype of a result depends on the data")
        lengths = zip(*(value.shape for value in values), strict=True)
        return LeafSpec(tuple(_size(dim, length, sizes) for dim, length in enumerate(lengths)), first)
    kind = type(first).__name__
    if isinstance(first, bool):
        raise UnpredictableResult(piece, "it returns a bool, on which Python may branch by the data")
    if not isinstance(first, _PLAIN):
        raise UnpredictableResult(piece, f"it returns a value of type {kind}")
    if any(first != value and not repr(first) == repr(value) == "nan" for value in values):
        raise UnpredictableResult(piece, f"it returns a value of type {kind} that depends on the data")
    return LeafSpec((), None, first)


def _size(dim: int, lengths: Sequence[int], sizes: Sequence[int | None]) -> Size:
    """Return the size of dimension `dim`, which was `lengths` in runs of `sizes` samples."""
    ratios = {Fraction(length, size) for length, size in zip(lengths, sizes, strict=True) if size}
    if len(set(sizes)) > 1 and len(ratios) == 1 and lengths[0]:
        return ratios.pop()
    return lengths[0] if dim and len(set(lengths)) == 1 else UNKNOWN
