"""Steps in which the samples of all micro-batches meet behind the last stage: `across_batch="exact"`.

    stages       y0, y1, ... ─► joined y ─► loss of the whole mini-batch ─► its gradient, in parts ─► stages
                 all forwards          once                                       all backwards

What the model computes behind the first operation by which samples meet runs on the joined values, too (graph/whole_batch.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.containers import on_device
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.joined_calls import Ran, joined_call
from pipecompile.driver.loss_reads import warn_of_left
from pipecompile.errors import InputError
from pipecompile.runtime.cells.stage_call import loss_function
from pipecompile.runtime.results import UnmergedError, require_gradient, without_backward

__all__ = ["whole_batch_step"]


def whole_batch_step(
    cache: CompileCache, inputs: FlatInputs, target: Any, scaler: torch.amp.GradScaler | None, last: Ran | None
) -> tuple[torch.Tensor, list[Any], Ran | None]:
    """Run forward, loss and, where gradients are on, backward.

    Return the loss, what `loss_fn` returned beside it, and the last training step: this one, or `last`. Raise InputError for a
    step without a loss or a target, and if values of the model cannot be joined.
    """
    options, trains = cache.options, cache.options.is_training_now
    with torch.set_grad_enabled(trains):
        with _own_refusal():
            output, ran = joined_call(cache, inputs, lambda form: form.require_loss(target is not None))
        warn_of_left(cache.latest)
        device = cache.latest.stage_devices[-1]
        placed = on_device(target, device)
        function = loss_function(options.loss_fn, has_aux=options.has_aux)
        loss, *aux = function(output) if target is None else function(output, placed)
    if trains:
        require_gradient([loss])
        (loss if scaler is None else scaler.scale(loss)).backward()
    return without_backward(loss.detach()), aux, ran if trains else last


@contextmanager
def _own_refusal() -> Iterator[None]:
    """Say of a step, too, why the output of the model cannot be put together in the block: the loss reads the whole of it."""
    try:
        yield
    except UnmergedError as error:
        raise InputError(
            'a step with across_batch="exact" needs the whole output of the model, which cannot be put together from micro-batches',
            where=error.where,
            why=error.why,
            hint='across_batch="each", with which the samples of a micro-batch meet; or n_microbatches=1',
        ) from error
