"""Steps under a schedule of slices: micro-batches are divided along their sequence, for causal models.

find the stages of whole micro-batches ─► record a slice, cut it alike ─► compare both once ─► run the program of slices
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatches import MiniBatch, scatter_tree, weighted_loss
from pipecompile.batching.slices_of_batch import SlicedBatch, sliced_target
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.loss_trial import loss_undone
from pipecompile.driver.programs import step_executable
from pipecompile.driver.slice_probe import compare_losses, compare_outputs
from pipecompile.driver.sliced_losses import analyse_loss, slice_weights
from pipecompile.driver.sliced_stages import SlicedStages, slice_stages
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.step_arrivals import Arrivals, add_loss_gradients, check_target, counted_arrivals
from pipecompile.driver.target_values import target_kind
from pipecompile.driver.unwatched import unwatched
from pipecompile.errors import PlanError
from pipecompile.ir import LOSS, TARGET
from pipecompile.runtime.dispatch import Dispatcher
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.registers import Spans
from pipecompile.runtime.results import without_backward

__all__ = ["SlicedSteps"]


class SlicedSteps:
    """The steps of one pipeline on slices of sequences."""

    def __init__(self, cache: CompileCache, dispatcher: Dispatcher) -> None:
        self.cache, self.dispatcher = cache, dispatcher

    def prepare(self, inputs: FlatInputs) -> None:
        """Compile for these inputs."""
        self._found(inputs)

    def step(
        self, inputs: FlatInputs, target: Any, scaler: torch.amp.GradScaler | None
    ) -> tuple[torch.Tensor, tuple[Executable, Spans]]:
        """Run forward and backward of all slices. Return the loss of the mini-batch, and what ran with its times."""
        whole, batch, stages, sliced = self._found(inputs)
        whole.require_loss(target is not None)
        self._count(whole, batch, target)
        self.cache.check(whole, batch)
        form, targets, key = stages.specialization, sliced_target(target, sliced), target_kind(target)
        arrivals: Arrivals = form.arrivals(sliced)
        if target is not None:
            arrivals[TARGET, False] = targets
        if not form.is_current(form.losses.get(key)):
            form.losses[key] = self._analysed(whole, batch, stages, sliced, target, arrivals)
        parts, is_mean = form.step_values(sliced, target, arrivals)[1], form.options.loss_reduction == "mean"
        own = slice_weights(form.losses[key], sliced.sizes, parts, mean=is_mean)
        weights = add_loss_gradients(self.cache, form, arrivals, own, scaler)
        executable = step_executable(form, len(batch.sizes), target is not None)
        losses, spans = self._run(executable, sliced, arrivals)
        return without_backward(weighted_loss(losses, weights)), (executable, spans)

    def _count(self, whole: Specialization, batch: MiniBatch, target: Any) -> None:
        """Say what this copy of the pipeline counts, if there are others: what the loss of its whole sequences does."""
        if self.cache.context.backend.has_copies:
            counted_arrivals(self.cache, whole, batch, target)
        else:
            check_target(target, self.cache.options)
            self.cache.check_values()
            self.cache.context.warnings.drop_delayed()

    def _found(self, inputs: FlatInputs) -> tuple[Specialization, MiniBatch, SlicedStages, SlicedBatch]:
        """Return the specialization of whole micro-batches and the stages of slices, recorded now if they are new, with their batches."""
        whole, batch = self.cache.find(inputs)
        sliced = SlicedBatch(batch, whole.options.n_slices)
        stages = whole.slicing.get(sliced.n_slices)
        if stages is None:
            with unwatched():
                stages = whole.slicing[sliced.n_slices] = slice_stages(whole, sliced, self.cache.context)
        stages.flow.check_layers()
        _check_sizes(stages.specialization, sliced.sizes)
        return whole, batch, stages, sliced

    @unwatched()
    def _analysed(
        self,
        whole: Specialization,
        batch: MiniBatch,
        stages: SlicedStages,
        sliced: SlicedBatch,
        target: Any,
        arrivals: Arrivals,
    ) -> Any:
        """Return the analysis of the loss, once outputs and losses of slices are those of the whole. Raise PlanError."""
        form, n, samples, context = stages.specialization, sliced.n_slices, sliced.sizes[0], self.cache.context
        options, first = form.options, scatter_tree(target, len(batch.sizes), batch.whole.samples, {})[0]
        targets: Sequence[Any] = arrivals.get((TARGET, False), [None] * len(sliced.sizes))[:n]
        analysis = analyse_loss(whole, stages, sliced, (target, first, targets[0]), arrivals, context)
        if len(set(form.stage_devices)) > 1 or not context.backend.holds_model:
            return analysis  # no process has all stages on one device
        slices: Sequence[Mapping[str, Any]] = form.step_values(sliced, target, arrivals)[1][:n]
        weights, _ = slice_weights(analysis, sliced.sizes[:n], slices, mean=options.loss_reduction == "mean")
        with loss_undone(options.loss_fn, form.stage_devices[-1]):
            outputs = compare_outputs(whole, stages, batch.first, slices, samples)
            assert options.loss_fn is not None
            compare_losses(options.loss_fn, outputs, (first, targets), weights)
        return analysis

    def _run(self, executable: Executable, batch: SlicedBatch, arrivals: Arrivals) -> tuple[list[torch.Tensor], Spans]:
        threaded = self.dispatcher.is_threaded(is_ordered=executable.is_ordered_now())
        frame = executable.frame(batch.sizes, arrivals, threaded=threaded)
        executable.run(executable.code(threaded=threaded), frame, self.dispatcher.workers(threaded=threaded))
        losses: list[torch.Tensor] = frame.departures[LOSS, False]
        executable.finished(frame, threaded=threaded)
        self.cache.context.check_losses(losses, (), trains=True)
        return losses, frame.spans


def _check_sizes(form: Specialization, sizes: tuple[int, ...]) -> None:
    """Raise PlanError if the recording of a slice is for other numbers of samples. Its length may be one of these."""
    guard, only = form.broken_guard(sizes), form.facts.batch_size
    if guard is not None or (only is not None and set(sizes) != {only}):
        raise PlanError(
            f"the recording of a slice is not right for micro-batches of {' and '.join(map(str, sorted(set(sizes))))} samples",
            where=guard.place if guard is not None else "",
            why=f"the model branches on the batch size: {guard}" if guard is not None else f"it is right for {only}",
            hint="micro-batches of one size, other than the length of a slice",
        )
