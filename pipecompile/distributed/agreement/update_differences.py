"""Warnings of ranks of a pipeline that update their weights differently: a rank alone has skipped a step of its optimizer, or has clipped
its gradients by the norm of its own stages, or has not cleared them.

The model is then trained as no eager run would train it. A script may mean it (another optimizer for a part), so it is not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pipecompile.distributed.agreement.weight_updates import Updates
from pipecompile.distributed.failures.failure_report import ranks_of_texts
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.user_source import warn

__all__ = ["UpdateDifferences"]

_UNLIKE = 0.03
"""Relative difference of factors from which on they are told."""


class UpdateDifferences:
    """The differences of one pipeline, each kind of which is told once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self, ranks: Sequence[int], updates: Sequence[Updates | None]) -> None:
        """Warn of what these ranks did differently between two calls. None is a rank that trains nothing."""
        found = [(rank, one) for rank, one in zip(ranks, updates, strict=True) if one is not None]
        ranks, those = [rank for rank, _ in found], [one for _, one in found]
        if _step_differently(those):
            self._once(_text_of_steps(ranks, those))
        if _scale_differently(those):
            self._once(_text_of_scaling(ranks, those))
        if len({one.is_kept for one in those if one.steps} - {None}) > 1:
            self._once(_text_of_keeping(ranks, those))

    def _once(self, text: str) -> None:
        kind, _, _ = text.partition(":")
        if kind not in self._told:
            self._told.add(kind)
            warn(text, RecordingWarning)


def _text_of_steps(ranks: Sequence[int], updates: Sequence[Updates]) -> str:
    is_of_one = len({one.settings for one in updates if one.steps}) == 1
    texts = ranks_of_texts(ranks, [_steps(one, is_short=is_of_one) for one in updates])
    return (
        f"the ranks update their weights differently since the last call: {texts}. A rank has the parameters of its own stages, so "
        "all ranks step, or the model is trained in part. Try optimizer.step() on every rank, not under `if rank == 0`, with one "
        "learning rate, and requires_grad_(False) for what is not to be trained"
    )


def _text_of_scaling(ranks: Sequence[int], updates: Sequence[Updates]) -> str:
    return (
        f"the ranks scale their gradients differently: {ranks_of_texts(ranks, [*map(_scaling, updates)])}. A norm over the parameters of a "
        "rank is that of its own stages alone. Try pipe.clip_grad_norm_(max_norm), by the norm of the whole model, on all ranks"
    )


def _text_of_keeping(ranks: Sequence[int], updates: Sequence[Updates]) -> str:
    return (
        f"the ranks clear their gradients differently: {ranks_of_texts(ranks, [*map(_keeping, updates)])}. Gradients of the next step are "
        "added to those that are left. Try optimizer.zero_grad() on every rank, not under `if rank == 0`"
    )


def _step_differently(updates: Sequence[Updates]) -> bool:
    """Return whether ranks made another number of steps, or steps of which the settings have nothing in common.

    Weights that changed without an optimizer may have been updated by hand.
    """
    stepped = [one for one in updates if one.steps]
    idle = [one for one in updates if not one.steps and not one.is_changed]
    settings = combinations([{*one.settings} for one in stepped], 2)
    return bool(stepped and idle) or len({one.steps for one in stepped}) > 1 or any(not a & b for a, b in settings)


def _scale_differently(updates: Sequence[Updates]) -> bool:
    factors = [one.factor for one in updates if one.factor is not None]
    return bool(factors) and max(factors) - min(factors) > _UNLIKE * max(map(abs, factors))


def _steps(updates: Updates, *, is_short: bool) -> str:
    """Return what a rank did, with the names of its optimizers, or with all that they were made with."""
    of = f"{updates.parameter} and what else it trains"
    if not updates.steps:
        return f"{of}, without an optimizer" if updates.is_changed else f"no step of an optimizer for {of}"
    count = "1 step" if updates.steps == 1 else f"{updates.steps} steps"
    optimizers = dict.fromkeys(text.partition("(")[0] if is_short else text for text in updates.settings)
    return f"{count} of {' and '.join(optimizers)} for {of}"


def _scaling(updates: Updates) -> str:
    return "by unlike factors" if updates.factor is None else f"by {updates.factor:.3g} ({updates.parameter} ...)"


def _keeping(updates: Updates) -> str:
    kept = {True: "kept", False: "cleared", None: "unknown"}[updates.is_kept]
    return f"{kept} ({updates.parameter} ...)"
