"""The output of a mini-batch whose micro-batches have recordings of their own: put together by the rules that all recordings have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.merging import MergeKind, MergeRule, gather
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import InputError
from pipecompile.graph.output_merging import join_rules, shape_rules
from pipecompile.torch_private import pytree

__all__ = ["joined_output", "joined_rules"]


def joined_rules(recordings: Sequence[Specialization]) -> tuple[MergeRule, ...]:
    """Return the merge rule of each leaf of the output. Raise InputError if a leaf cannot be put together.

    A leaf with a row for each token is joined by rows: `split` by sequences says that they do not meet.
    """
    if len(recordings) == 1:
        return ()
    rules = _rules(recordings[0])
    refused = next((rule for rule in rules if rule.kind not in _MERGED), None)
    if refused is not None or any(_rules(one) != rules for one in recordings[1:]):
        reason = refused.reason if refused is not None else "the recordings of the micro-batches have other outputs"
        raise InputError(
            "the model's output cannot be put together from micro-batches",
            why=reason or "a leaf has neither rows of tokens nor a sum or a mean of them",
            hint="n_microbatches=1, or pipe(microbatches=[...]), which returns an output for each; step is not concerned",
        )
    return rules


def _rules(recording: Specialization) -> tuple[MergeRule, ...]:
    """Return the rules of the leaves: by rows where there are rows, else as the flow of the batch says."""
    by_shape = shape_rules(recording.graph)
    if all(rule.kind is MergeKind.JOINED for rule in by_shape) or recording.facts.batch_size is not None:
        return by_shape
    pairs = zip(by_shape, join_rules(recording.flow), strict=True)
    return tuple(rule if rule.kind is MergeKind.JOINED else other for rule, other in pairs)


_MERGED = (MergeKind.JOINED, MergeKind.AVERAGED, MergeKind.ADDED, MergeKind.MAXIMUM, MergeKind.MINIMUM, MergeKind.SAME)


def joined_output(outputs: Sequence[Any], rules: Sequence[MergeRule], sizes: Sequence[int]) -> Any:
    """Return the output of the mini-batch, from those of its micro-batches, of `sizes` samples."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten_containers(output) for output in outputs]
    leaves = [
        _joined(column, rule, sizes) for rule, *column in zip(rules, *(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(column: Sequence[Any], rule: MergeRule, sizes: Sequence[int]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        same = all(value == column[0] for value in column)
        return column[0] if same else sum(column)
    return gather(column, rule, sizes)
