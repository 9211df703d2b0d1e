"""Costs of actions that overlap: the seconds of a pair, or the part of each action that is communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipecompile.errors import InputError
from pipecompile.ir import Kind
from pipecompile.text.input_checks import amount, amounts
from pipecompile.text.shown_value import shown

__all__ = ["PerPair", "checked_overlap", "communication_seconds"]

PerPair = float | Mapping[tuple[int, int], float]
"""One number for all pairs of actions that overlap, or one per pair (stage of the forward, stage of the backward)."""

Amounts = float | Sequence[float]


def checked_overlap(overlap: PerPair | None, n_stages: int) -> PerPair | None:
    """Return the seconds of pairs of actions that overlap; None if none are given. Raise InputError if a key is not a pair
    of stages or a value is not a number.
    """
    if overlap is None:
        return None
    if not isinstance(overlap, Mapping):
        return amount("overlap", overlap)
    stages = range(n_stages)
    for pair in overlap:
        if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] in stages and pair[1] in stages):
            raise InputError(
                f"overlap has an entry for {shown(pair)}",
                why=f"its keys are (stage of the forward, stage of the backward), both from 0 to {n_stages - 1}",
            )
    return {pair: amount(f"overlap[{pair}]", value) for pair, value in overlap.items()}


def communication_seconds(
    seconds: Mapping[Kind, tuple[float, ...]], of_forward: Amounts, of_backward: Amounts
) -> tuple[tuple[float, float], ...]:
    """Return the seconds of communication within F, and within B or I, per stage; () for none. They are part of these actions."""
    n_stages = len(seconds[Kind.FORWARD])
    forward = amounts("forward_communication", of_forward, n_stages, "stage")
    backward = amounts("backward_communication", of_backward, n_stages, "stage")
    for kind, parts in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward), (Kind.INPUT_GRAD, backward)):
        for stage, (part, whole_time) in enumerate(zip(parts, seconds[kind], strict=True)):
            if part > whole_time:
                raise InputError(
                    f"stage {stage} communicates for {part:g} s within {kind.value}, which takes {whole_time:g} s",
                    hint="forward and input_grad count what forward_communication and backward_communication take",
                )
    return tuple(zip(forward, backward, strict=True)) if any(forward) or any(backward) else ()
