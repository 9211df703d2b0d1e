"""Merge of what the micro-batches of a call leave on the model: afterwards it has what the mini-batch would leave.

F0  self.attention = a0     F1  self.attention = a1     end of the call  self.attention = cat(a0, a1)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.merging import MergeKind, MergeRule, gather
from pipecompile.graph.left_rules import LeftRule
from pipecompile.torch_private import pytree
from pipecompile.tracing.state.effect_nodes import EffectNote, effects_noted

__all__ = ["left_merged"]


@contextmanager
def left_merged(rules: Sequence[LeftRule], sizes: Sequence[int]) -> Iterator[None]:
    """Merge, at the end of the block, what a forward of micro-batches of these sizes (samples) in this thread leaves at the places of the
    rules. What no rule merges stays that of the last micro-batch.
    """
    if len(sizes) == 1 or not rules:
        yield
        return
    before = {id(one.place): list(one.place.container) for one in rules if one.is_queue}
    with effects_noted() as notes:
        yield
    for rule in rules:
        left = notes.get(id(rule.place), [])
        if len(left) == len(sizes):
            _merge(rule, left, sizes, before.get(id(rule.place), []))


def _merge(rule: LeftRule, left: Sequence[EffectNote], sizes: Sequence[int], before: Sequence[Any]) -> None:
    """Put what a rule merges where micro-batches have left it. `before` are the items that a queue had: with a limit, it has dropped them."""
    place = rule.place
    if rule.line:
        return
    if place.is_count:
        place.put(left[0].after)
        return
    flat = [flatten_containers(note.value) for note in left]
    if any(len(leaves) != len(rule.leaves) for leaves, _ in flat):
        return
    columns = zip(rule.leaves, *(leaves for leaves, _ in flat), strict=True)
    merged = pytree.tree_unflatten([_merged(column, one, sizes) for one, *column in columns], flat[0][1])
    if place.key is not None or left[0].is_whole:
        place.put(merged)
    elif rule.is_queue:
        _put_in_queue(place.container, before, [item for note in left for item in note.value], merged)
    elif isinstance(place.container, list):
        _put_last(place.container, [item for note in left for item in note.value], merged)


def _merged(column: Sequence[Any], rule: MergeRule, sizes: Sequence[int]) -> Any:
    """Return one leaf, which requires a gradient if those of micro-batches do, and has no history."""
    if not isinstance(column[-1], torch.Tensor) or rule.kind is MergeKind.SAME:
        return column[-1]
    merged = gather([one.detach() for one in column], rule, sizes)
    return merged.requires_grad_() if any(one.requires_grad for one in column) else merged


def _put_last(container: list[Any], items: Sequence[Any], merged: Sequence[Any]) -> None:
    """Replace the items that micro-batches have appended to a list, if they are its last ones."""
    first = len(container) - len(items)
    if first >= 0 and all(one is other for one, other in zip(container[first:], items, strict=True)):
        container[first:] = merged


def _put_in_queue(container: deque[Any], before: Sequence[Any], items: Sequence[Any], merged: Sequence[Any]) -> None:
    """Give a queue the items of before and the merged ones, if it has nothing but the items of before and those of micro-batches."""
    expected = deque((*before, *items), container.maxlen)
    if len(container) == len(expected) and all(map(is_, container, expected)):
        container.clear()
        container.extend((*before, *merged))
