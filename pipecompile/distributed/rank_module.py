"""The model of a pipeline on ranks, as one rank has it: the parameters, buffers and state of its stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Self, cast

import torch
from torch import nn

from pipecompile.batching.microbatch_list import Microbatch, is_list_asked
from pipecompile.distributed.agreement.call_batch import CallBatch
from pipecompile.distributed.agreement.collective_call import CollectiveCall
from pipecompile.distributed.agreement.compile_settings import settings_text
from pipecompile.distributed.agreement.constant_buffers import ConstantBuffers
from pipecompile.distributed.agreement.extra_state import device_of_module, extra_state_keys
from pipecompile.distributed.agreement.lockstep import Lockstep
from pipecompile.distributed.agreement.new_parameters import home_new_parameters
from pipecompile.distributed.agreement.weight_updates import WeightUpdates
from pipecompile.distributed.agreement.whole_model_calls import parts_of_model
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.pipeline_copies import PipelineCopies
from pipecompile.distributed.data_parallel.replicas import Replicas
from pipecompile.distributed.rank_backend import RankBackend, owner_of
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.rank_state import RankState
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.model_methods import overrides
from pipecompile.errors import InputError
from pipecompile.options import Options
from pipecompile.pipeline import Pipeline
from pipecompile.torch_private.dtensors import fitted
from pipecompile.torch_private.modules import buffers_of, parameters_of

__all__ = ["RankModule"]


class RankModule(Pipeline):
    """A Pipeline that *is* the part of the model that lives on this rank. All ranks make its calls together."""

    replicas: Replicas

    def __init__(self, model: nn.Module, options: Options, ranks: RankMesh, copied: CompileCache | None = None) -> None:
        """`copied` has the cut of the pipeline whose model was copied, and the homes of its tensors."""
        self._communicator = Communicator(ranks)
        self._communicator.settings = lambda: settings_text(self._options)
        self._backend, self._rescheduled, self._loads = RankBackend(self._communicator), "", 0
        super().__init__(model, options, self._backend)
        self._backend.model = model
        self._shards = self._backend.shards
        self.__dict__["replicas"] = self._backend.replicas  # the model may have an attribute of this name
        self.replicas.weights.named = lambda: chain(model.named_parameters(), model.named_buffers())
        self.replicas.weights.buffers = ConstantBuffers(model, lambda: self._cache.entries, self._is_here)
        self.replicas.state.follow(model, lambda: self._cache.entries)
        self._lockstep: Lockstep = self._backend.lockstep
        is_alone, named = len(ranks.members) == 1, lambda: self.named_parameters() if self._cache else ()
        self._updates = WeightUpdates(named, ranks.size, self.replicas.held.refuse, is_alone=is_alone)
        self._lockstep.updates = self._updates.since_last_call
        self.replicas.weights.updates = self._updates.since_last_step
        self._state = RankState(model, self._owner, self._communicator, self._runner)
        self._backend.is_here = self._is_here
        self._backend.has_home = lambda tensor: self._cache.context.homes.find(tensor) is not None
        if copied is not None:
            self._backend.continue_from(copied.context)
            self._cache.decision = copied.decision
            tensors = (chain(one.parameters(), one.buffers()) for one in (copied.model, model))
            self._cache.context.homes.take(copied.context.homes, zip(*tensors, strict=True))

    @property
    def _ranks(self) -> RankMesh:
        return self._communicator.ranks

    @property
    def copies(self) -> PipelineCopies:
        """The copies of the pipeline: numbers of those `left` and `lost`, the `number` of this one, `ranks` and process `group` of those left."""
        return PipelineCopies.of(self._ranks)

    def _of_model(self, name: str, value: Any) -> Any:
        """Raise AttributeError for what may hold or read weights, if there are other ranks: theirs are not trained here."""
        if self._ranks.size > 1 and (callable(value) or isinstance(value, torch.Tensor)):
            raise AttributeError(
                f"{name!r} of the model is not reached through a pipeline on {self._ranks.size} ranks, since each rank has"
                f" the weights of its own stages alone; load pipe.full_state_dict() into a model on one process"
            )
        return value

    @property
    def _is_alone(self) -> bool:
        """Whether a copy of the pipeline can run without the others, once a call is compiled."""
        context, updates = self._cache.context, self.model.training and self._options.batch_norm == "deferred"
        return context.backend.has_copies and context.meta_init.is_done and not self._shards and not updates

    @contextmanager
    def _together(
        self,
        function: str,
        batch: CallBatch | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        is_looked_up: bool = False,
        in_copy: bool = False,
    ) -> Iterator[None]:
        """Run a call that all ranks make together, or `in_copy`, those of one copy of the pipeline. Other threads wait.

        A failure is posted; ranks that are asked for other things raise PlanError.
        """
        with self._cache.context.calls.held(), self._begun(in_copy=in_copy):
            self._home_new_parameters()
            self._communicator.connect()
            is_compared = batch is not None and (self._ranks.size > 1 or self._ranks.tensor_group is not None)
            call = CollectiveCall.of(function, self.model, batch, scaler) if is_compared else CollectiveCall(function)
            loaded = f"after {self._loads} load_state_dict" if self._loads else ""
            self.replicas.modes = ", ".join(filter(None, [call.modes, loaded, self.replicas.held.mode]))
            call = replace(call, modes=", ".join(filter(None, [self.replicas.modes, self._rescheduled])))
            with self._updates.of_program(self._lockstep), self._lockstep.of(call, is_looked_up=is_looked_up):
                yield

    @contextmanager
    def _begun(self, *, in_copy: bool) -> Iterator[None]:
        self._communicator.begin(in_copy=in_copy)
        with self._communicator.guarded():
            yield
            self._communicator.groups.settle()

    def _batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, entries: Any = None
    ) -> CallBatch:
        """Return the batch of a call as the ranks compare it. `entries` is a list of micro-batches."""
        if entries is None:
            return CallBatch.of(args, kwargs, target)
        return CallBatch.of_list(entries, with_target=self._options.is_target_required)

    def _listed_once(self, entries: Any) -> Any:
        """Return what gives micro-batches as a list, which the ranks can compare. A failure of a generator or a loader is posted."""
        if not isinstance(entries, Iterable) or isinstance(entries, (Sequence, Mapping, Microbatch, torch.Tensor)):
            return entries
        with self._communicator.guarded():
            return [*entries]

    def _with_list(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments of a call, with the list that their micro-batches are."""
        if not is_list_asked(self.model.forward, kwargs):
            return kwargs
        return kwargs | {"microbatches": self._listed_once(kwargs["microbatches"])}

    def _require_shards(self) -> None:
        """Raise InputError if parameters are to be sharded and have not been, which a first compile does, or if shards have hooks."""
        if not self._shards.is_known:
            raise InputError(
                "the mesh has dp_shard, and the pipeline is not compiled yet",
                why="parameters are sharded when the pipeline is compiled, and an optimizer needs the shards",
                hint="compile(..., example_args=(x,)), with values in all parameters",
            )
        self._shards.refuse_hooks()

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives on this rank. Before the first compile, all tensors live on all ranks."""
        return self._state.is_here(tensor)

    def _owner(self, tensor: torch.Tensor) -> int | None:
        homes = self._cache.context.homes
        if isinstance(tensor, nn.Parameter) and homes.find(tensor) is None:
            self._home_new_parameters()
        return owner_of(tensor, homes) if self._cache or homes else None

    def _home_new_parameters(self) -> None:
        if self._cache and self._ranks.size > 1:
            homes, first = self._cache.context.homes, self._cache.entries[0]
            self._backend.new_parameters += home_new_parameters(self.model, homes, first)

    def _runner(self, module: str) -> int:
        return device_of_module(self.model, module, self._cache.entries) if self._cache else 0

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self._require_shards()
        named = self.model.named_parameters(prefix, recurse, remove_duplicate)
        yield from ((name, self._shards.shard_of(parameter)) for name, parameter in named if self._is_here(parameter))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank, of those that the model's own `parameters` returns."""
        if not overrides(self.model, "parameters"):
            return parts_of_model(super().parameters(recurse), self._ranks.size)
        self._require_shards()
        own = [self._shards.shard_of(one) for one in self.model.parameters(recurse) if self._is_here(one)]
        return parts_of_model(iter(own), self._ranks.size)

    def _elsewhere(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if not self._is_here(parameter)]

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Return the buffers of this rank, of those that the model's own `buffers` returns."""
        if not overrides(self.model, "buffers"):
            return super().buffers(recurse)
        return (buffer for buffer in self.model.buffers(recurse) if self._is_here(buffer))

    def _whole_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank that are not sharded, with those of the loss."""
        whole = (one for one in self.model.parameters() if self._is_here(one) and self._shards.shard_of(one) is one)
        return chain(whole, self._backend.parameters_of_loss(self._options.loss_fn))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (one for one in self.model.named_buffers(prefix, recurse, remove_duplicate) if self._is_here(one[1]))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules of the model; to a module around this one, with the tensors of this rank alone."""
        named = self.model.named_modules(memo, prefix, remove_duplicate)
        yield from named if memo is None else ((name, self._part_of(module)) for name, module in named)

    def _part_of(self, module: nn.Module) -> nn.Module:
        """Return the module, or if it has tensors that live on other ranks, or shards, a stand-in with those of this rank."""
        parameters, buffers = parameters_of(module), buffers_of(module)
        tensors = [tensor for tensor in (*parameters.values(), *buffers.values()) if tensor is not None]
        if all(self._is_here(tensor) and self._shards.shard_of(tensor) is tensor for tensor in tensors):
            return module
        part = nn.Module()
        for name, parameter in parameters.items():
            if parameter is not None and self._is_here(parameter):
                part.register_parameter(name, self._shards.shard_of(cast(nn.Parameter, parameter)))
        for name, buffer in buffers.items():
            if buffer is not None and self._is_here(buffer):
                part.register_buffer(name, buffer)
        return part

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state that lives on this rank, under the model's own names."""
        state = self._state.own(keep_vars=keep_vars)
        state = self._shards.replace(state, self.model.state_dict(keep_vars=True)) if self._shards else state
        if destination is None and not prefix:
            return state
        destination = {} if destination is None else destination
        destination.update({f"{prefix}{key}": value for key, value in state.items()})
        return destination

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model on every rank, tensors on the CPU. All ranks of a copy must call this together.

        With sharded parameters, all copies must.
        """
        in_copy = self._communicator.is_connected and self._is_alone
        with self._together("pipe.full_state_dict", in_copy=in_copy), self._shards.whole():
            return self._state.full()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the whole state or the part of this rank. All ranks must call this. Raises RuntimeError for missing and unknown keys."""
        if assign:
            self._refuse_for_shards()
        if self._shards or self._ranks.tensor_group is not None:
            state_dict = fitted(state_dict, self.model.state_dict(keep_vars=True))
        with self._shards.whole():
            result = self._state.load(state_dict, strict=strict, assign=assign)
        self._loads += 1  # compared before the next call: a rank that failed, and goes on, has not loaded
        self._backend.is_extra_loaded |= not extra_state_keys(self.model).keys().isdisjoint(state_dict.keys())
        self._backend.stale_values.note_loaded(state_dict.keys(), self.model.state_dict(keep_vars=True).keys())
        if assign:
            self._forget()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        if self._cache and self._ranks.size > 1:
            raise InputError(
                "a pipeline on several ranks cannot be pickled",
                why="this rank has trained the parameters of its own stages alone",
                hint="torch.save(pipe.full_state_dict(), path), called on all ranks; copy.deepcopy(pipe) for a copy on them",
            )
        self._refuse_for_shards()
        return super().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a pipeline on the same ranks, with a model of its own and the same cut. All ranks must call this together.

        The copy has the parameters of this rank as the pipeline has them, so `AveragedModel(pipe)` averages stage by stage.
        """
        self._refuse_for_shards()
        model = copy.deepcopy(self.model, memo)
        return type(self)(model, self._options, self._ranks, self._cache)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._refuse_for_shards()
        return super()._apply(fn, recurse)

    def _check_replaceable(self) -> None:
        self._refuse_for_shards()

    def _refuse_for_shards(self) -> None:
        if self._shards:
            raise InputError(
                "sharded parameters cannot be copied, replaced, or change their dtype",
                why="each rank has a shard of each, cut when the pipeline was compiled",
                hint="change the model before compile(); load with assign=False",
            )
