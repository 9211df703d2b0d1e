"""Inputs of trial runs: those of the example, with other sizes and other data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch

from pipecompile.tracing.model_pieces import Piece

__all__ = ["DataChange", "further_runs", "vary_input"]

_WILD_SAMPLES = 8
"""Batch size in samples of the trial run on wild data: large enough that the number of rows that a mask selects is
unlikely to equal the batch size by chance."""


class DataChange(Enum):
    """A kind of difference between the inputs of a trial run and those of the example.

    LIKELY: the samples in reverse order; floats scaled by factors of 0.9 to 1.0; integers, which may be indices, rotated
    within a sample. WILD: floats scaled by factors of -8 to 8, random bools, integers as in LIKELY. Many models refuse
    wild data; where one does not, sizes that equalled the batch size by chance differ from it. DRAWN: as LIKELY, and integers and
    bools drawn from those of the input: where all samples select equally many rows, these do not. THINNED: as LIKELY, and masks select
    fewer elements than their values say. LATER: the data of the example, in the state that a call has left.
    """

    NONE = 0
    LIKELY = 1
    WILD = 2
    DRAWN = 3
    THINNED = 4
    LATER = 5


_UNCHANGED = (DataChange.NONE, DataChange.LATER)


def vary_input(leaf: Any, dim: Any, size: int | None, *, change: DataChange) -> Any:
    """Return a copy of an input with `size` samples along `dim`; the last sample is repeated if there are too few."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    if isinstance(dim, int) and size is not None:
        order = torch.arange(size, device=leaf.device).clamp(max=leaf.shape[dim] - 1)
        copy = leaf.detach().index_select(dim, order.flip(0) if change not in _UNCHANGED else order)
    if change not in _UNCHANGED:
        generator = torch.Generator().manual_seed(size or 0)
        is_drawn = change is DataChange.DRAWN and not leaf.is_floating_point() and leaf.numel() > 1
        is_wild = change is DataChange.WILD
        copy = _drawn(leaf, copy, generator) if is_drawn else _changed_values(copy, dim, generator, is_wild=is_wild)
    return copy.requires_grad_(leaf.requires_grad)


def _changed_values(copy: torch.Tensor, dim: Any, generator: torch.Generator, *, is_wild: bool) -> torch.Tensor:
    if copy.is_floating_point():
        factor = torch.rand(copy.shape, generator=generator, device="cpu")
        return copy * (16 * factor - 8 if is_wild else 0.9 + 0.1 * factor).to(copy)
    if is_wild and copy.dtype == torch.bool:
        return (torch.rand(copy.shape, generator=generator, device="cpu") < 0.5).to(copy.device)
    return copy.roll(1, -1) if copy.dim() > 1 and dim != copy.dim() - 1 else copy


def _drawn(leaf: torch.Tensor, copy: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor like `copy` of the elements of `leaf`; where all are one number, of it and the next smaller one, or 1 beside 0."""
    values: torch.Tensor = torch.unique(leaf.detach())
    if len(values) == 1 and not values.is_complex():
        values = torch.stack([values[0], (values[0] - 1).abs() if values.dtype != torch.bool else ~values[0]])
    chosen = torch.randint(len(values), copy.shape, generator=generator, device="cpu")
    return torch.take(values, chosen.to(values.device))


def further_runs(
    pieces: Iterable[Piece], sizes: list[int | None], *, has_numbers: bool
) -> Iterator[tuple[int | None, DataChange]]:
    """Yield batch size and change of data for the runs after the first, or the first two of different `sizes`. `has_numbers`: a piece
    returns numbers, which may be another in every call.
    """
    pieces, has_two = tuple(pieces), len(set(sizes)) > 1
    if has_two:
        sizes.append(_third_size(*sizes))
        yield sizes[-1], DataChange.LIKELY
    has_functions = any(piece.is_function for piece in pieces)
    if pieces:
        yield _WILD_SAMPLES if has_two and has_functions else sizes[0], DataChange.WILD
    for other in dict.fromkeys(sizes) if has_functions else ():
        yield other, DataChange.DRAWN
    if has_numbers:
        yield sizes[0], DataChange.LATER


def _third_size(size: int | None, other: int | None) -> int:
    """Return a batch size in samples that is neither of the two."""
    return next(third for third in (2, 3, 4) if third not in (size, other))
