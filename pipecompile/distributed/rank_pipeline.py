"""A Pipeline whose stages are on several ranks: every rank has one, and all ranks step together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.distributed.clock_sync import gathered_spans
from pipecompile.distributed.collective_call import CollectiveCall
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel import check_unwrapped
from pipecompile.distributed.gradient_norm import scale_to_norm, spread_infinities, total_norm
from pipecompile.distributed.protocol import TIMELINES
from pipecompile.distributed.rank_backend import RankBackend, owner_of
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.rank_state import RankState
from pipecompile.distributed.row_messages import leaves_read
from pipecompile.distributed.torch_pipelining import torch_stages
from pipecompile.driver.evaluation import Evaluation
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import InputError
from pipecompile.ir.timeline import Timeline
from pipecompile.options import Options
from pipecompile.pipeline import Pipeline
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.registers import Frame
from pipecompile.torch_private.dtensors import fitted

__all__ = ["RankPipeline"]


class RankPipeline(Pipeline):
    """One pipeline on several ranks. All ranks make the same calls with the batch; each uses the inputs of its own stages.

    `parameters()`, `buffers()` and `state_dict()` have the tensors that live on this rank, under the model's own names.
    """

    def __init__(self, model: nn.Module, options: Options, ranks: RankMesh) -> None:
        check_unwrapped(model)
        if options.across_batch == "exact":
            raise InputError(
                'across_batch="exact" is given for stages on several ranks',
                why="the samples meet behind the last stage, in a part of the model that other ranks have no gradients of",
                hint="devices=[...], the stages in one process",
            )
        self._ranks, self._communicator = ranks, Communicator(ranks)
        backend = RankBackend(self._communicator)
        super().__init__(model, options, backend)
        self._shards, self.replicas, self._lockstep = backend.shards, backend.replicas, backend.lockstep
        self._lockstep.reads = self._reads
        groups = (ranks.group, ranks.replica_group, ranks.tensor_group)
        self._groups = tuple(CollectiveGroup(group, self._communicator) for group in groups if group is not None)
        self.clock_error = 0.0
        self._state = RankState(model, self._owner, self._communicator)

    # -- running ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these inputs, on all ranks together."""
        with self._together("pipe.prepare", (args, kwargs), is_looked_up=bool(self._cache)), self._shards.whole():
            super().prepare(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on every rank, without gradients. Raises InputError in grad mode: train with `step`."""
        if torch.is_grad_enabled():
            raise InputError(
                "pipe(x) has no backward when its stages are on several ranks",
                why="the loss is on one rank, and the others would not know when to run their backward",
                hint="pipe.step(x, target=...), or torch.no_grad() around it",
            )
        self._require_shards()
        with self._together("pipe", (args, kwargs), is_looked_up=bool(self._cache)), self._shards.whole():
            return super().forward(*args, **kwargs)

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        microbatches: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step as `Pipeline.step` does, on all ranks together, and return the same loss on all.

        With copies of the pipeline, each copy gets its own part of the batch; loss and gradients are those of the whole batch.
        """
        self._require_shards()
        batch = (args, kwargs) if microbatches is None else microbatches
        with self._together("pipe.step", batch, target, is_looked_up=bool(self._cache)), self._shards.whole():
            samples: int | None = 1  # a list of micro-batches says later what its loss counts
            if self._options.loss_reduction == "sum":
                samples = None
            elif microbatches is None:
                samples = self._listed.samples_of(args, kwargs)
            trains = self._options.is_training_now
            with self.replicas.reduced(self._whole_parameters, samples, trains=trains) as loss_of_batch:
                given = {"target": target, "scaler": scaler, "microbatches": microbatches}
                result = super().step(*args, **given, **kwargs)
                result = (loss_of_batch(result[0]), result[1]) if self._options.has_aux else loss_of_batch(result)
            if trains and scaler is not None and scaler.is_enabled():
                spread_infinities(self.parameters(), self._groups)
            return result

    def evaluate(self, batches: Iterable[Any], metric: Callable[..., Any] | None = None) -> Evaluation:
        """Evaluate as `Pipeline.evaluate` does, on all ranks together. Raises InputError if there are copies of the pipeline."""
        if self.replicas.group is not None:
            raise InputError(
                "evaluate cannot weight the parts of copies of the pipeline",
                why="each copy has its own loader, and their last batches may differ in samples",
                hint="pipe.eval(), and pipe.step(x, target=y) under torch.no_grad(): the loss of all copies",
            )
        return super().evaluate(batches, metric)

    @contextmanager
    def _together(
        self, function: str, inputs: Any = None, target: Any = None, *, is_looked_up: bool = False
    ) -> Iterator[None]:
        """Run a call that all ranks make together. A failure is posted; ranks that are asked for other things raise PlanError."""
        self._communicator.begin()
        with self._communicator.guarded():
            self._communicator.connect()
            is_compared = inputs is not None and self._ranks.size > 1
            seen = (self.model, inputs, target)
            call = CollectiveCall.of(function, *seen) if is_compared else CollectiveCall(function)
            with self._lockstep.of(call, is_looked_up=is_looked_up):
                yield

    def _reads(self, recording: int) -> int | None:
        """Return the leaves of a batch that this rank's stages read, as bits: those of the inputs, then all of the target."""
        entry = next((entry for entry in self._cache.entries if entry.number == recording), None)
        return (
            None if entry is None else leaves_read(entry.routes, entry.plan.placement, entry.inputs, self._ranks.index)
        )

    def _run(
        self, executable: Executable, specialization: Specialization, batch: MiniBatch, arrivals: dict[Any, Any]
    ) -> Frame:
        self._lockstep.compare_samples(specialization.number)
        return super()._run(executable, specialization, batch, arrivals)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all ranks by the norm of the whole model's gradients, and return that norm, on all ranks together."""
        with self._together("pipe.clip_grad_norm_"), torch.no_grad():
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            total = total_norm(gradients, float(norm_type), self._groups[0])
            if error_if_nonfinite and not total.isfinite():
                raise RuntimeError(f"the norm of the gradients is {total.item()}")
            scale_to_norm(gradients, total, max_norm)
            return total.to(reduce(torch.promote_types, (parameter.dtype for parameter in self.model.parameters())))

    def _require_shards(self) -> None:
        """Raise InputError if parameters are to be sharded and have not been: a first compile places them."""
        if not self._shards.is_known:
            raise InputError(
                "the mesh has dp_shard, and the pipeline is not compiled yet",
                why="parameters are sharded when the pipeline is compiled, and an optimizer needs the shards",
                hint="compile(..., example_args=(x,)), with values in all parameters",
            )

    # -- inspection -------------------------------------------------------------------------------------------------

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

    # -- the rank's part of the model -------------------------------------------------------------------------------

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives on this rank. Before the first compile, all tensors live on all ranks."""
        return self._state.is_here(tensor)

    def _owner(self, tensor: torch.Tensor) -> int | None:
        return owner_of(tensor, self._cache.context.homes) if self._cache else None

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self._require_shards()
        named = self.model.named_parameters(prefix, recurse, remove_duplicate)
        yield from ((name, self._shards.shard_of(parameter)) for name, parameter in named if self._is_here(parameter))

    def _whole_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank that are not sharded."""
        here = (parameter for parameter in self.model.parameters() if self._is_here(parameter))
        return (parameter for parameter in here if self._shards.shard_of(parameter) is parameter)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        named = self.model.named_buffers(prefix, recurse, remove_duplicate)
        yield from ((name, buffer) for name, buffer in named if self._is_here(buffer))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state that lives on this rank, under the model's own names."""
        state = self._state.keep_own(self.model.state_dict(*args, **kwargs))
        return self._shards.replace(state, self.model.state_dict(keep_vars=True)) if self._shards else state

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model on every rank, tensors on the CPU. All ranks must call this together."""
        with self._together("pipe.full_state_dict"), self._shards.whole():
            return self._state.full()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the whole state or the part of this rank. Raises RuntimeError, as a module does, for missing and unknown keys."""
        if assign:
            self._refuse_for_shards()
        if self._shards or self._ranks.tensor_group is not None:
            state_dict = fitted(state_dict, self.model.state_dict(keep_vars=True))
        with self._shards.whole():
            result = self._state.load(state_dict, strict=strict, assign=assign)
        if assign:
            self._forget()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse_for_shards()
        return super().__reduce__()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._refuse_for_shards()
        return super()._apply(fn, recurse)

    def _refuse_for_shards(self) -> None:
        if self._shards:
            raise InputError(
                "sharded parameters cannot be copied, replaced, or change their dtype",
                why="each rank has a shard of each, cut when the pipeline was compiled",
                hint="change the model before compile(); load with assign=False",
            )
