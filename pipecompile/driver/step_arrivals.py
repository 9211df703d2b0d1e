"""The values that arrive in a step from the host: inputs and targets in micro-batches, and gradients of the losses.

    labels that count   3, 1 of 4      weights 3/4, 1/4      gradients of the losses 3/4, 1/4, times the scale of a GradScaler

The first step in several micro-batches finds what the loss divides by (loss_shares.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.microbatches import MiniBatch, Weights, loss_gradients, scaled_gradients, scatter_tree
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.loss_analysis import LossAnalysis
from pipecompile.driver.loss_shares import find_loss, weigh_copy
from pipecompile.driver.output_merge import fixed_output_rules
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.target_values import target_kind
from pipecompile.driver.unwatched import unwatched
from pipecompile.errors import InputError
from pipecompile.ir import LOSS, TARGET
from pipecompile.options import Options

__all__ = ["Arrivals", "add_loss_gradients", "check_target", "counted_arrivals", "step_arrivals"]

Arrivals = dict[tuple[str, bool], Any]
"""Values in micro-batches, by name and whether they are gradients."""


def step_arrivals(
    cache: CompileCache,
    specialization: Specialization,
    batch: MiniBatch,
    target: Any,
    scaler: torch.amp.GradScaler | None,
) -> tuple[Arrivals, Sequence[float]]:
    """Return what arrives in a step, and the weights of the micro-batches' losses. Raise InputError while tensors have no values."""
    arrivals = counted_arrivals(cache, specialization, batch, target)
    own = specialization.loss_weights(batch, target, arrivals)
    return arrivals, add_loss_gradients(cache, specialization, arrivals, own, scaler)


def check_target(target: Any, options: Options) -> None:
    """Raise InputError if a target requires a gradient in a step that trains: stages send gradients to inputs alone."""
    leaves = flatten_containers(target)[0] if options.is_training_now else ()
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise InputError(
            "the target requires a gradient",
            why="a step gives gradients to parameters and to inputs, not to targets",
            hint="target=target.detach(); or the target as an input of the model, whose output has it for the loss",
        )


def counted_arrivals(cache: CompileCache, specialization: Specialization, batch: MiniBatch, target: Any) -> Arrivals:
    """Return the inputs and the target. Note what the loss uses, and what it counts on this copy of the pipeline."""
    context, options = cache.context, cache.options
    check_target(target, options)
    cache.check_values()
    context.warnings.drop_delayed()
    arrivals = specialization.arrivals(batch)
    if target is not None:
        parts = scatter_tree(target, len(batch.sizes), batch.whole.samples, options.batch_dims)
        arrivals[TARGET, False] = parts
    key, has_copies = target_kind(target), context.backend.has_copies
    is_known = specialization.is_current(specialization.losses.get(key))
    if (has_copies or len(batch.sizes) > 1) and not is_known:
        specialization.losses[key] = _analysed(cache, specialization, batch, target, arrivals)
    known = specialization.losses.get(key)
    context.backend.loss_uses(frozenset() if known is None else known.weights)
    if has_copies and options.loss_reduction == "mean":
        weigh_copy(specialization, batch, target, arrivals, context)
    return arrivals


def add_loss_gradients(
    cache: CompileCache,
    specialization: Specialization,
    arrivals: Arrivals,
    own: Weights,
    scaler: torch.amp.GradScaler | None,
) -> Sequence[float]:
    """Add the gradients of the losses to what arrives, and return the weights of the losses. `own` are those that this process finds;
    on ranks, those of the rank with the last stage count.
    """
    placement, device = specialization.plan.placement, specialization.stage_devices[-1]
    is_mean = cache.options.loss_reduction == "mean"
    weights, gradient = cache.context.backend.weights_of_target(own, placement[-1]) if is_mean else own
    gradient = gradient if scaler is None else scaled_gradients(gradient, scaler, device)
    arrivals[LOSS, True] = loss_gradients(gradient, weights, device)
    return weights


@unwatched()
def _analysed(
    cache: CompileCache,
    specialization: Specialization,
    batch: MiniBatch,
    target: Any,
    arrivals: Mapping[tuple[str, bool], Any],
) -> LossAnalysis:
    context = cache.context
    rules = partial(fixed_output_rules, specialization, batch, cache.options, context)
    return find_loss(specialization, batch, target, arrivals, context.warnings, rules, context.backend)
