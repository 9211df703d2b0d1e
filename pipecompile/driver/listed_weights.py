"""The weights of a list of micro-batches in the loss of a step: by what the loss counts, over all of them.

(3, 17) tokens, 40 labels      (2, 40) tokens, 60 labels      weights 40/100, 60/100, each loss a mean over its labels
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipecompile.batching.merging import MergeKind
from pipecompile.batching.microbatch_list import ListedBatch, MicrobatchList
from pipecompile.batching.microbatches import LossDivisor, Weights, loss_weights
from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.loss_analysis import LossAnalysis
from pipecompile.driver.loss_shares import COUNTED, find_count
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.target_values import target_kind
from pipecompile.ir import TARGET
from pipecompile.options import Options

__all__ = ["listed_weights"]


def listed_weights(
    recordings: Sequence[Specialization], listed: MicrobatchList, options: Options, context: CompileContext
) -> Weights:
    """Return the weights of micro-batches, each with its recording. Warn if what the loss counts is not known."""
    sizes, is_mean = listed.sizes, options.loss_reduction == "mean"
    if not is_mean or (len(sizes) == 1 and not context.backend.has_copies):
        return loss_weights(sizes, mean=is_mean)
    found = [_count(one, listed, number) for number, one in enumerate(recordings)]
    counts = [count for one in found if (count := one.count()) is not None]
    rules = [one.rule.kind for one in found]
    if MergeKind.ADDED not in rules and len(counts) == len(found):
        return _shares(counts, recordings, listed, context)
    if MergeKind.ADDED in rules:
        context.warnings.summed()
    elif len({one.number for one in recordings}) > 1 or rules[0] is not MergeKind.AVERAGED:
        context.warnings.uncounted_loss()
    context.backend.weigh(float(sum(sizes)), "samples")
    return loss_weights(sizes, mean=True)


def _count(one: Specialization, listed: MicrobatchList, number: int) -> LossAnalysis:
    """Return the analysis of the loss of a recording, on the first of its micro-batches, for its count."""
    key = target_kind(listed.targets[number])
    if not one.is_current(one.counts.get(key)):
        one.counts[key] = find_count(one, ListedBatch((listed.calls[number],)), listed.targets[number])
    return one.counts[key]


def _shares(
    counts: Sequence[LossDivisor],
    recordings: Sequence[Specialization],
    listed: MicrobatchList,
    context: CompileContext,
) -> Weights:
    """Return the count of each micro-batch over the sum of all."""
    values = []
    for place, (count, one, call) in enumerate(zip(counts, recordings, listed.calls, strict=True)):
        arrivals = {(name, False): [leaf] for name, leaf in zip(one.inputs, call.leaves, strict=True)}
        if listed.has_targets:
            arrivals[TARGET, False] = [listed.targets[place]]
        batch = ListedBatch((call,))
        values.append(count.of(one.step_values(batch, listed.targets[place], arrivals)[0], listed.sizes[place]))
    with torch.inference_mode(False):
        floors = torch.tensor([count.floor for count in counts], dtype=torch.float64, device="cpu")
        counted = torch.stack(values).sum()
        weights = torch.stack(values).maximum(floors) / counted.clamp(min=floors.max())
        context.backend.weigh(float(counted), COUNTED, float(floors.max()))
        return weights.tolist(), weights
