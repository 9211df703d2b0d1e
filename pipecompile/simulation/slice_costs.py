"""Costs of slices: the share of a micro-batch's seconds and bytes that each of its slices along the sequence has.

slice          0      1      2      3         4 slices of as many positions, of a causal model:
bytes        0.25   0.25   0.25   0.25        each saves and sends as much,
seconds      0.19   0.23   0.27   0.31        and a later slice attends to more keys
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pipecompile.errors import InputError
from pipecompile.ir import NO_SLICE
from pipecompile.text.input_checks import amount
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["SliceCosts", "SliceOptions", "make_slice_costs"]

_TOLERANCE = 1e-6
"""Difference from 1 of the sum of shares that are written with few digits."""


class SliceOptions(TypedDict, total=False):
    """Keyword costs of slices; documented at `simulate`."""

    slice_seconds: Sequence[float] | None
    slice_bytes: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class SliceCosts:
    """Checked shares of each slice: of the seconds of F, R, B, I and W, and of what is saved, copied and sent."""

    seconds: tuple[float, ...]
    bytes: tuple[float, ...]

    def of_seconds(self, place: int) -> float:
        """Return the share of a slice in the seconds of its micro-batch; 1 for NO_SLICE."""
        return 1.0 if place == NO_SLICE else self.seconds[place]

    def of_bytes(self, place: int) -> float:
        """Return the share of a slice in the bytes of its micro-batch; 1 for NO_SLICE."""
        return 1.0 if place == NO_SLICE else self.bytes[place]


def make_slice_costs(n_slices: int, options: Mapping[str, Any]) -> SliceCosts | None:
    """Return the checked shares, by default equal ones; None if micro-batches are whole. Raise InputError for what are not shares."""
    shares = [_shares(name, options.get(name), n_slices) for name in SliceOptions.__annotations__]
    if n_slices > 1 and options.get("overlap") is not None:
        raise InputError(
            "overlap is given for a schedule of slices", why="it has the seconds of pairs of whole micro-batches",
            hint="forward_communication= and backward_communication=",
        )  # fmt: skip
    return SliceCosts(*shares) if n_slices > 1 else None


def _shares(name: str, value: object, n_slices: int) -> tuple[float, ...]:
    if value is None:
        return (1 / n_slices,) * n_slices
    if n_slices == 1:
        why = "the schedule has whole micro-batches"
        raise InputError(f"{name} is given without slices", why=why, hint='a schedule of slices, such as "seq1f1b"')
    equal = f"{name}={[round(1 / n_slices, 3)] * n_slices}"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{name}={shown(value)} is not a list with a share per slice", hint=equal)
    if len(value) != n_slices:
        raise InputError(f"{name} has {counted(len(value), 'number')} for {counted(n_slices, 'slice')}", hint=equal)
    shares = tuple(amount(f"{name}[{index}]", share, zero=False) for index, share in enumerate(value))
    if not math.isclose(sum(shares), 1.0, abs_tol=_TOLERANCE):
        raise InputError(
            f"{name} sums to {sum(shares):g}", why=f"its {counted(n_slices, 'number')} are shares of a micro-batch",
            hint=f"{name}={[round(share / sum(shares), 4) for share in shares]}",
        )  # fmt: skip
    return shares
