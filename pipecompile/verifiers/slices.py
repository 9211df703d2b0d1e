"""Needs between the slices of a micro-batch, which all actions of a stage have: the rules are those of `ir/slices.py`.

    F0.0 ◀─ F0.1 ◀─ F0.2          a forward reads the keys and values of the slices before it
    B0.0 ─▶ B0.1 ─▶ B0.2          a backward needs the gradients of its keys and values from the slices after it

A stage is on one device, so all these needs are within a row.
"""

from __future__ import annotations

from pipecompile.ir import BACKWARDS, NO_SLICE, SHARDING, Action, Kind

__all__ = ["slice_fault", "slice_needs", "slice_reason"]


def slice_needs(kind: Kind, place: int, n_slices: int) -> list[tuple[int, Kind]]:
    """Return the (slice, kind) of what an action on slice `place` may need of the other slices of its micro-batch and stage."""
    last = n_slices - 1
    if kind is Kind.FORWARD:
        return [(place - 1, kind)] if place > 0 else []
    if kind is Kind.OFFLOAD:
        return [(last, Kind.FORWARD)] if place < last else []
    if kind in BACKWARDS and place < last:
        return [(place + 1, backward) for backward in BACKWARDS]
    return [(other, Kind.RELOAD) for other in range(last)] if kind in BACKWARDS else []


def slice_reason(action: Action, need: Action) -> str:
    """Return why an action needs one of another slice, as the end of a sentence about the two; "" if the slices are the same."""
    if action.slice == need.slice:
        return ""
    if action.kind is Kind.FORWARD:
        return "whose keys and values it reads"
    if action.kind is Kind.OFFLOAD:
        return "which reads the keys and values that it moves"
    if need.kind is Kind.RELOAD:
        return "which brings back keys and values that it reads"
    return "which adds to the gradients of its keys and values"


def slice_fault(action: Action, n_slices: int) -> str:
    """Return what is wrong with the slice of an action; "" if nothing is."""
    if action.kind in SHARDING:
        return "" if action.slice == NO_SLICE else f"{action.kind.value} has no slice"
    if n_slices == 1:
        return "" if action.slice == NO_SLICE else "it has a slice, and micro-batches are whole"
    if action.slice == NO_SLICE:
        return f"it has no slice, and micro-batches have {n_slices}"
    return "" if 0 <= action.slice < n_slices else f"slices are 0 to {n_slices - 1}"
