"""A Pipeline whose stages are on several ranks: every rank has one, and all ranks step together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipecompile.batching.empty_batch import has_no_samples, require_no_target
from pipecompile.batching.microbatch_list import is_list_asked
from pipecompile.batching.microbatches import MiniBatch, split_sizes
from pipecompile.distributed.agreement.compile_settings import check_runs_on_ranks, reschedule_text
from pipecompile.distributed.agreement.copy_calls import equal_rows_of_copies
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.data_parallel.batchnorm_sync import synchronised_line
from pipecompile.distributed.data_parallel.gradient_norm import scale_to_norm, spread_infinities, total_norm
from pipecompile.distributed.data_parallel.replicas import check_unwrapped
from pipecompile.distributed.data_parallel.sums_over_copies import sum_of_totals, summed
from pipecompile.distributed.messages.clock_sync import gathered_spans
from pipecompile.distributed.messages.row_messages import LeavesRead
from pipecompile.distributed.protocol import TIMELINES
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.rank_module import RankModule
from pipecompile.distributed.stage_copies import check_placed
from pipecompile.distributed.torch_pipelining import torch_stages
from pipecompile.driver.call_lock import exclusive
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.evaluation import Evaluation, RunningTotal, ValidationLoop
from pipecompile.driver.model_proxy import check_norms
from pipecompile.driver.signature import signature_of
from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import Kind
from pipecompile.ir.timeline import Timeline
from pipecompile.options import Options
from pipecompile.pipeline import Pipeline
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from pipecompile.settings.direction_choice import other_placements

__all__ = ["RankPipeline"]


class RankPipeline(RankModule):
    """One pipeline on several ranks. All ranks make the same calls with the batch; each uses the inputs of its own stages.

    `parameters()`, `buffers()` and `state_dict()` have the tensors that live on this rank, under the model's own names.
    """

    def __init__(self, model: nn.Module, options: Options, ranks: RankMesh, copied: CompileCache | None = None) -> None:
        check_unwrapped(model)
        check_runs_on_ranks(options)
        super().__init__(model, options, ranks, copied)
        self._reads = self._lockstep.reads = LeavesRead(lambda: self._cache.entries, ranks.index)
        self.replicas.needs_one_program = partial(synchronised_line, model)
        groups = (ranks.group, ranks.replica_group, ranks.tensor_group)
        self._groups = tuple(CollectiveGroup(group, self._communicator) for group in groups if group is not None)
        self.clock_error, self._is_evaluating = 0.0, False

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these inputs, on all ranks together."""
        kwargs = self._with_list(kwargs)
        with self._called("pipe.prepare", args, kwargs):
            super().prepare(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on every rank, without gradients. Raises InputError in grad mode: train with `step`.

        Copies of the pipeline do not wait for each other, but for sharded parameters and for deferred statistics in training mode.
        """
        if torch.is_grad_enabled():
            raise InputError(
                "pipe(x) has no backward when its stages are on several ranks",
                why="the loss is on one rank, and the others would not know when to run their backward",
                hint="pipe.step(x, target=...), or torch.no_grad() around it",
            )
        self._require_shards()
        kwargs = self._with_list(kwargs)
        with self._called("pipe", args, kwargs):
            return super().forward(*args, **kwargs)

    @exclusive
    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        microbatches: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step as `Pipeline.step` does, on all ranks together, and return the same loss on all.

        With copies of the pipeline, each copy gets its own part of the batch; loss and gradients are those of the whole batch. Parts may
        differ in samples. A part of no samples, such as x[:0], or `microbatches=[]`, adds nothing; what `loss_fn` returns beside the
        loss is of the part.
        """
        self._require_shards()
        if self._is_evaluating:
            return self._loss_alone(args, kwargs, target=target, scaler=scaler, microbatches=microbatches)
        self.replicas.held.check()  # before the call begins: the pipeline can go on
        microbatches = self._listed_once(microbatches)
        is_empty = self.replicas.group is not None and self._is_empty(args, kwargs, microbatches)
        is_looked_up = bool(self._cache) and not is_empty
        batch = self._batch(args, kwargs, target, microbatches)
        together = self._together("pipe.step", batch, scaler, is_looked_up=is_looked_up)
        with together, self._with_parameters(args, kwargs, is_mini_batch=is_looked_up and microbatches is None):
            samples = None if self._options.loss_reduction == "sum" else 1  # a list says later what its loss counts
            if samples and microbatches is None and not is_empty:
                samples = self._listed.samples_of(args, kwargs)
            trains = self._options.is_training_now
            with self.replicas.reduced(self._whole_parameters, samples, trains=trains) as loss_of_batch:
                given = {"target": target, "scaler": scaler, "microbatches": microbatches}
                result = self._without_samples(target) if is_empty else super().step(*args, **given, **kwargs)
                result = (loss_of_batch(result[0]), result[1]) if self._options.has_aux else loss_of_batch(result)
            if trains and scaler is not None and scaler.is_enabled() and not self.replicas.held.is_on:
                spread_infinities(self.parameters(), self._groups, scaler)
            return result

    @contextmanager
    def _with_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_mini_batch: bool) -> Iterator[None]:
        """Run a step whose program gathers parameters, if the schedule has an UNSHARD and all ranks have a recording for it, or one
        with whole parameters.
        """
        is_by_stage = bool(self._shards) and Kind.UNSHARD in self._options.kinds and self.replicas.group is not None
        if is_by_stage:
            self._shards.align()
            is_known = is_mini_batch and not self._options.split and self._has_recording(args, kwargs)
            is_by_stage = self._all_ranks(is_true=is_known)
        with self._shards.by_stage() if is_by_stage else self._shards.whole():
            yield

    def _has_recording(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this rank has a recording for a call."""
        inputs = self._flatten(args, kwargs)
        batch = MiniBatch(inputs, split_sizes(inputs, self._options.default_microbatches))
        signature = signature_of(self.model, batch)
        return any(entry.accepts(signature, batch.sizes) for entry in self._cache.entries)

    def _all_ranks(self, *, is_true: bool) -> bool:
        """Return whether something is true on all ranks of all copies."""
        with torch.inference_mode(False):
            is_false = torch.tensor([float(not is_true)], device="cpu")
            for group in (self._backend.pipeline if self._ranks.size > 1 else None, self.replicas.group):
                is_false = is_false if group is None else group.max(is_false)
        return not is_false.item()

    def _loss_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], **given: Any) -> Any:
        """Return the loss of this copy of the pipeline alone, in an evaluation."""
        batch = self._batch(args, kwargs, given["target"], given["microbatches"])
        in_copy = bool(self._cache) and self._is_alone
        with self._together("pipe.step", batch, is_looked_up=bool(self._cache), in_copy=in_copy):
            return super().step(*args, **kwargs, **given)

    def _is_empty(self, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: Any) -> bool:
        if microbatches is not None:
            return isinstance(microbatches, Sized) and not len(microbatches)
        return has_no_samples(self.model.forward, args, kwargs, self._options.batch_dims)

    def _without_samples(self, target: Any) -> Any:
        """Take part in a step of the other copies of the pipeline. Return what stands for the loss of this one."""
        if not self._cache:
            raise InputError(
                "the first batch has no samples on a copy of the pipeline",
                why="the model is recorded with the first batch, on all copies together",
                hint="compile(..., example_args=(x,))",
            )
        require_no_target(target, self._options.batch_dims)
        self._cache.check_values()
        self.replicas.agree(None)
        norms = self._backend.deferred_norms(DeferredNorms())
        norms.settle()
        norms.share(())
        return (None, []) if self._options.has_aux else None

    @exclusive
    def evaluate(self, batches: Iterable[Any], metric: Callable[..., Any] | None = None) -> Evaluation:
        """Evaluate as `Pipeline.evaluate` does, on all ranks together: the result is of the batches of all copies of the pipeline.

        Each copy has batches of its own, of any number and sizes; copies wait for each other at the end. `metric` counts on the
        rank with the last stage, which needs the targets.
        """
        self._require_shards()
        is_empty = partial(self._is_empty, microbatches=None)
        loop = ValidationLoop(self, self._options, self._listed.samples_of, is_empty, self._own_values)
        with ExitStack() as stack:
            self._begin_evaluation(stack)
            self._is_evaluating = True
            stack.callback(setattr, self, "_is_evaluating", False)
            return self._sum_of_copies(loop.total(batches, metric)).evaluation()

    def _begin_evaluation(self, stack: ExitStack) -> None:
        with self._together("pipe.evaluate"):
            stack.enter_context(self._shards.whole())

    def _sum_of_copies(self, total: RunningTotal) -> RunningTotal:
        with self._together("the sums of pipe.evaluate"):
            return sum_of_totals(total, self.replicas.group, self._communicator, self._last_device)

    @contextmanager
    def _own_values(self) -> Iterator[None]:
        """Run a loss outside of a program in this context. Where its result counts, it cannot read values that other ranks change."""
        old = self._backend.stale_values
        with self._communicator.guarded(), old.hidden(old.elsewhere() if self.needs_targets else {}):
            yield

    @contextmanager
    def _called(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        is_known = bool(self._cache)
        in_copy = is_known and self._is_alone
        entries = kwargs["microbatches"] if is_list_asked(self.model.forward, kwargs) else None
        batch = self._batch(args, kwargs, entries=entries)
        with self._together(function, batch, is_looked_up=is_known, in_copy=in_copy), self._shards.whole():
            yield

    @property
    def _last_device(self) -> int:
        return self._cache.latest.plan.placement[-1] if self._cache else self._ranks.size - 1

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank uses the inputs of a batch, by the last recording. If not, it may pass zeros of the same shapes."""
        latest = self._cache.latest
        bits = self._reads(latest.number, len(latest.inputs)) or 0
        is_read = bool(bits & (1 << min(len(latest.inputs), 62)) - 1)
        return is_read or (self.needs_targets and latest.loss_reads_inputs)

    @property
    def needs_targets(self) -> bool:
        """Whether this rank uses the targets of a batch: it runs the last stage, or a copy of it. If not, it may pass zeros of the same shapes."""
        return any(placement[-1] == self._ranks.index for placement in self._cache.latest.mirrors.placements)

    def sum_over_copies(self, values: Any) -> Any:
        """Return numbers, or nested containers of numbers and tensors, summed over the copies. All ranks must call this together."""
        if self.replicas.group is None:
            return values
        with self._together("pipe.sum_over_copies"):
            return summed(values, self.replicas.group)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.replicas.held.holding()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all ranks by the norm of the whole model's gradients, and return that norm, on all ranks together."""
        check_norms(max_norm, norm_type, error_if_nonfinite)
        self.replicas.held.refuse("pipe.clip_grad_norm_")
        settings = float(max_norm), float(norm_type), float(error_if_nonfinite)
        function = f"pipe.clip_grad_norm_(max_norm={settings[0]:g}, norm_type={settings[1]:g}, {error_if_nonfinite=})"
        with self._together(function), torch.no_grad():
            if self.replicas.group is not None:
                equal_rows_of_copies(self.replicas.group, "pipe.clip_grad_norm_", settings)
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            total = total_norm(gradients, settings[1], self._groups[0])
        if error_if_nonfinite and not total.isfinite():  # on all ranks alike: the pipeline is not lost
            raise RuntimeError(f"the norm of the gradients is {total.item()}")
        scale_to_norm(gradients, total, settings[0])  # when no rank can fail any more
        return total.to(reduce(torch.promote_types, (parameter.dtype for parameter in self.model.parameters())))

    def reschedule(self, schedule: Any = None, n_microbatches: int | None = None) -> Pipeline:
        """Go on with another schedule, as `Pipeline.reschedule` does. All ranks must call this with the same arguments."""
        before = self._cache.options
        super().reschedule(schedule, n_microbatches)
        try:
            check_runs_on_ranks(self._cache.options)
            others = other_placements(self._cache.options)
            for recording in self._cache.entries:
                check_placed((recording.plan.placement, *others), recording.mirrors.placements)
        except (InputError, ScheduleError):
            self._cache.reschedule(before)
            raise
        self._rescheduled = "after " + reschedule_text(self._cache.options)
        return self

    def gathered(self) -> Timeline | None:
        """Return the timeline of the last step on all ranks; None before the first step. All ranks must call this together.

        Until the next step, `measured`, `dump` and `report` show this timeline on every rank. Times are of the first rank's clock;
        those of other ranks may be wrong by `clock_error` seconds.
        """
        with self._together("pipe.gathered"):
            self._communicator.agree(TIMELINES, "none" if self._last is None else "those of the last step")
            if self._last is not None:
                spans, self.clock_error = gathered_spans(self._communicator, self._last[1])
                self._last = self._last[0], spans
        return self.measured

    def torch_stages(self) -> list[PipelineStage]:
        """Return the stages of this rank, for the schedules of `torch.distributed.pipelining`.

        Raises PlanError with the properties that those schedules do not support: values that skip a stage, tied weights, sizes.
        """
        return torch_stages(self._cache.latest, self._communicator)
