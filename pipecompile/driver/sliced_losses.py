"""The weights of the losses of slices: a slice has its share of what the loss of the mini-batch counts.

labels that count   3, 1, 0, 4 of 4 each      cross_entropy divides by 8     shares 3/8, 1/8, 0, 4/8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipecompile.batching.merging import MergeKind
from pipecompile.batching.microbatches import LossDivisor, Weights, loss_weights
from pipecompile.batching.slices_of_batch import SlicedBatch
from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.loss_analysis import LossAnalysis
from pipecompile.driver.loss_recording import record_loss
from pipecompile.driver.loss_shares import find_loss
from pipecompile.driver.output_merge import fixed_output_rules
from pipecompile.driver.sliced_stages import SlicedStages
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import PlanError
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.output_merging import join_rules
from pipecompile.graph.token_losses import TokenLoss

__all__ = ["analyse_loss", "slice_weights"]

Arrivals = Mapping[tuple[str, bool], Any]


def analyse_loss(
    whole: Specialization,
    stages: SlicedStages,
    batch: SlicedBatch,
    targets: tuple[Any, Any, Any],
    arrivals: Arrivals,
    context: CompileContext,
) -> LossAnalysis:
    """Return the analysis of a loss of slices. `targets` are those of the mini-batch, of its first micro-batch and of its first slice.

    Raise PlanError for a loss that does not add up over the positions of a sequence.
    """
    options, target = whole.options, targets[0]
    pairs = ((whole, targets[1]), (stages.specialization, targets[2]))
    graphs = [
        record_loss(options, LossOutputs.of(one.graph, join_rules(one.flow)), part, batch.sizes[0])
        for one, part in pairs
    ]
    if graphs[0] is None or graphs[1] is None:
        raise _refusal("the loss function cannot be recorded")
    loss = TokenLoss(graphs[1], graphs[0], batch.n_slices, batch.length, "the loss")
    if loss.attentions or loss.positions or loss.tables:
        raise _refusal("the loss depends on where a slice begins")
    if loss.reduction != options.loss_reduction:
        hint = f'loss_reduction="{loss.reduction}"' if loss.reduction else ""
        raise _refusal(f"the loss is not a {options.loss_reduction} over positions", hint)
    rules = partial(fixed_output_rules, stages.specialization, batch, options, context)
    analysis = find_loss(stages.specialization, batch, target, arrivals, context.warnings, rules, context.backend)
    is_known = analysis.rule.kind in (MergeKind.AVERAGED, MergeKind.ADDED) or isinstance(analysis.divisor, LossDivisor)
    if not is_known:
        raise _refusal("it is not known what the loss divides by")
    return analysis


def _refusal(what: str, hint: str = "") -> PlanError:
    why = "each slice of a sequence has a loss of its own, and these add up"
    hint = hint or 'loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()); or schedule="1f1b"'
    return PlanError(f"{what}, so it cannot run on slices of a sequence", why=why, hint=hint)


def slice_weights(
    analysis: LossAnalysis, sizes: tuple[int, ...], parts: Sequence[Mapping[str, Any]], *, mean: bool
) -> Weights:
    """Return the weight of each slice in the loss. `sizes` are samples per slice, `parts` have the inputs and the target of each."""
    divisor = analysis.divisor
    if not mean or not isinstance(divisor, LossDivisor):
        return loss_weights(sizes, mean=mean)
    with torch.inference_mode(False):
        counts = torch.stack([divisor.of(part, size) for part, size in zip(parts, sizes, strict=True)])
        if bool((counts == counts[0]).all()) and float(counts[0]):
            return loss_weights((1,) * len(sizes), mean=True)
        weights = counts / counts.sum()
        return weights.tolist(), weights
