"""Offsets of packed sequences: rows of integers that say where each sequence begins in a tensor of all tokens.

tokens  (9, C)      a a a a b b c c c        offsets  0 4 6 9        lengths  4 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown

__all__ = ["document_groups", "is_offsets_beside", "offset_names", "offsets_of"]


def is_offsets_beside(row: torch.Tensor, leaves: Sequence[Any]) -> bool:
    """Return whether a row of integers begins with 0, never falls, and ends at the length of a dimension of another leaf."""
    if not _is_integers(row) or len(row) < 2:
        return False
    values = row.tolist()
    others = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf is not row)
    lengths = set(chain.from_iterable(leaf.shape for leaf in others))
    return values[0] == 0 and values[-1] in lengths and values == sorted(values) and values[-1] > 0


def offset_names(
    names: Sequence[str], leaves: Sequence[Any], dims: Sequence[Any], samples: int | None
) -> list[tuple[str, bool]]:
    """Return the leaves that look like offsets of packed sequences (`cu_seqlens`) and are not treated so, with whether each is cut.

    Offsets 0 4 6 9 are three sequences in tokens of shape (9, C). A slice of the offsets does not belong to a slice of the tokens;
    nor do all offsets, if they end at the number of samples.
    """
    found = []
    for name, leaf, dim in zip(names, leaves, dims, strict=True):
        if isinstance(leaf, torch.Tensor) and is_offsets_beside(leaf, leaves) and (dim == 0 or leaf[-1] == samples):
            found.append((name, dim == 0))
    return found


def _is_integers(row: torch.Tensor) -> bool:
    is_whole = not (row.is_floating_point() or row.is_complex() or row.dtype is torch.bool)
    return row.dim() == 1 and is_whole and not row.is_meta


def offsets_of(name: str, value: Any, rule: str) -> list[int]:
    """Return the offsets that an argument has by a rule: "offsets", or "lengths". Raise InputError for another value."""
    wanted = "0, then the end of each sequence" if rule == "offsets" else "the length of each sequence"
    if not isinstance(value, torch.Tensor) or not _is_integers(value) or not len(value):
        shape = f"a tensor of {value.dtype}, {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
        raise InputError(f"split={{{shown(name)}: {shown(rule)}}}, but {name} is {shape}", why=f"a row of integers is {wanted}",
                         hint=f"split={{{shown(name)}: a function of (value, samples of each micro-batch)}}")  # fmt: skip
    values = value.tolist()
    offsets = values if rule == "offsets" else [0, *accumulate(values)]
    if len(offsets) < 2 or offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] == 0:
        raise InputError(f"{name} has no {rule} of packed sequences", where=f"{name} = {values[:8]}", why=f"they are {wanted}")  # fmt: skip
    return offsets


def document_groups(offsets: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return (first, end) of the sequences of each of at most `count` micro-batches, with about equally many tokens.

    Each has a token at least. Linear in the number of sequences times `count`.
    """
    ends = [place for place in range(1, len(offsets)) if offsets[place] > offsets[place - 1]]
    count = min(count, len(ends))
    cuts = [0]
    for m in range(1, count):
        latest = ends[len(ends) - (count - m) - 1]
        allowed = [place for place in ends if cuts[-1] < place <= latest]
        cuts.append(min(allowed, key=lambda place, m=m: abs(offsets[place] - m * offsets[-1] / count)))  # type: ignore[misc]
    return [*zip(cuts, [*cuts[1:], len(offsets) - 1], strict=True)]
