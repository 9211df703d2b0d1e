"""Laws of merging: which rule gives the value of a batch from those of its parts, tested on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from pipecompile.batching.merging import MergeKind, MergeRule, gather
from pipecompile.graph.batch_rows import batch_dim_of
from pipecompile.tracing.fakes.batch_symbol import batch_dims_of

__all__ = ["RemainingLaws", "candidates_for", "has_unknown_size", "is_close", "reductions_for", "rule_holds"]

_OF_NUMBERS = (MergeKind.SAME, MergeKind.ADDED, MergeKind.AVERAGED, MergeKind.MAXIMUM, MergeKind.MINIMUM, MergeKind.MULTIPLIED,
               MergeKind.LOGSUMEXP, MergeKind.FIRST, MergeKind.LAST)  # fmt: skip
_OF_INTEGERS = tuple(kind for kind in _OF_NUMBERS if kind not in (MergeKind.AVERAGED, MergeKind.LOGSUMEXP))
_OF_BOOLS = (MergeKind.SAME, MergeKind.MAXIMUM, MergeKind.MINIMUM, MergeKind.FIRST, MergeKind.LAST)


def candidates_for(value: Any, symbol: sympy.Symbol) -> list[MergeRule]:
    """Return the rules that a value may have, by its shape and dtype."""
    if not isinstance(value, torch.Tensor):
        return []
    unknown = [d for d, length in enumerate(value.shape) if _is_unknown(length, symbol)]
    if unknown:
        return (
            [MergeRule(MergeKind.JOINED, unknown[0])] if len(unknown) == 1 and not batch_dims_of(value, symbol) else []
        )
    if batch_dims_of(value, symbol):
        dim = batch_dim_of(value, symbol)
        return [] if dim is None else [MergeRule(MergeKind.JOINED, dim)]
    return reductions_for(value)


def reductions_for(value: torch.Tensor) -> list[MergeRule]:
    """Return the rules that a value without a batch dimension may have, by its dtype."""
    if value.dtype is torch.bool:
        return [MergeRule(kind) for kind in _OF_BOOLS]
    is_number = value.is_floating_point() or value.is_complex()
    return [MergeRule(kind) for kind in (_OF_NUMBERS if is_number else _OF_INTEGERS)]


def rule_holds(rule: MergeRule, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether a rule gives the value of the whole batch from those of its two parts."""
    if not all(isinstance(value, torch.Tensor) for value in (whole, *parts)):
        return False
    try:
        if rule.kind is MergeKind.SAME:
            return all(is_close(whole, part) for part in parts)
        return is_close(whole, gather(parts, rule, sizes))
    except (RuntimeError, NotImplementedError):
        return False


class RemainingLaws:
    """The rules of one value that no trial has contradicted."""

    def __init__(self, value: Any, symbol: sympy.Symbol) -> None:
        self.rules = candidates_for(value, symbol)
        self._before: Any = None
        self._varies = False

    def test(self, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        """Keep the rules that give the value of the whole batch from those of its parts in one more trial."""
        self.rules = [rule for rule in self.rules if rule_holds(rule, whole, parts, sizes)]
        self._varies = self._varies or (self._before is not None and not is_close(whole, self._before))
        self._before = whole

    def proven(self, *, all_ran: bool) -> MergeRule | None:
        """Return the first rule that is left, None if there is none.

        A value that was the same in all trials is not a proof of SAME unless all trials ran: those that did may have been alike, as a
        CTC loss that runs on empty targets alone is 0.
        """
        rule = self.rules[0] if self.rules else None
        is_unproven = rule is not None and rule.kind is MergeKind.SAME and not (self._varies or all_ran)
        return None if is_unproven else rule


def is_close(one: Any, other: Any) -> bool:
    """Return whether two results are the same but for rounding."""
    if not isinstance(one, torch.Tensor) or one.shape != other.shape:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    loose = one.dtype in (torch.float16, torch.bfloat16)
    return torch.allclose(one, other, rtol=3e-2 if loose else 1e-4, atol=3e-2 if loose else 1e-5, equal_nan=True)


def has_unknown_size(value: torch.Tensor, symbol: sympy.Symbol) -> bool:
    """Return whether the data decide a size of the value."""
    return any(_is_unknown(length, symbol) for length in value.shape)


def _is_unknown(length: Any, symbol: sympy.Symbol) -> bool:
    return isinstance(length, torch.SymInt) and bool(length.node.expr.free_symbols - {symbol})
