"""Parameters that the replicas of a pipeline shard among themselves: whole for the length of a step, or of its blocks, else DTensors.

    between steps    replica 0: weight[0:2]     replica 1: weight[2:4]    what optimizers and `state_dict` have
    a step begins    all-gather ──► weight[0:4] on both                   in the model's own modules, once; or at UNSHARD
    a stage is over  its gradients ─► reduce-scatter ──► grad[0:2], on the other replica grad[2:4]
    a step ends      the whole parameter is freed                         or at RESHARD

From RESHARD to the next UNSHARD of a step the memory of a parameter is gone and its storage stays: views of it that autograd has
saved see the values again that are gathered into it.

Parameters are cut as `fully_shard` cuts them, along their first dimension, so checkpoints of both load into both. (ZeRO stage 3
between steps: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.distributed.collectives import CollectiveGroup, GradientBucket, PendingCollective
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients, Part
from pipecompile.distributed.data_parallel.shard_buckets import ShardBuckets, by_dtype, has_own_message
from pipecompile.distributed.data_parallel.sharded_parameter import ShardedParameter, padded
from pipecompile.distributed.data_parallel.weighed_gradients import weighed
from pipecompile.errors import InputError
from pipecompile.torch_private.autograd_engine import gradient_hook_tables
from pipecompile.torch_private.hidden_values import hidden
from pipecompile.torch_private.storages import foreach_copy

__all__ = ["Gathering", "ShardedParameters"]

T = TypeVar("T", bound=torch.Tensor)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Gathering:
    """An all-gather that is under way: its result is a row per rank with the shards of these parameters, or the memory of the only one."""

    pending: PendingCollective
    parameters: Sequence[ShardedParameter]
    is_direct: bool = False


def _normal_tensors(method: Callable[..., R]) -> Callable[..., R]:
    """Return a method that runs outside of inference mode, whose tensors could not become parameters, and without grad."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class ShardedParameters:
    """The sharded parameters of a rank.

    `mesh` has the replicas. With two dimensions (HSDP), parameters are sharded along the second and replicated along the
    first; None shards nothing. `layout` is the mesh of the shards: that of the replicas, and of the parts of layers behind it (tp). `is_known` says whether `shard` has run, or has nothing to do, and `is_by_stage` whether the program of
    the present step gathers them.
    """

    def __init__(self, mesh: DeviceMesh | None, communicator: Communicator, layout: DeviceMesh | None = None) -> None:
        self.communicator, self.layout = communicator, layout or mesh
        self.mesh, self.is_known, self.is_by_stage = mesh, mesh is None, False
        groups = mesh.get_all_groups() if mesh is not None else ()
        self.groups = [CollectiveGroup(group, communicator) for group in groups]
        self._parameters: dict[int, ShardedParameter] = {}
        self._is_whole = False

    def __bool__(self) -> bool:
        """Return whether the ranks of the pipeline have cut their parameters. A rank without parameters makes the same calls."""
        return self.mesh is not None and self.is_known

    @property
    def wholes(self) -> list[nn.Parameter]:
        """The model's own parameters, which are trained as their shards are."""
        self.align()
        return [each.whole for each in self._parameters.values()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, which are trained as the model's own parameters are."""
        self.align()
        return [each.shard for each in self._parameters.values()]

    def shard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep only the rows of this rank from now on. Scalars are replicated; integer parameters stay as they are."""
        self.is_known = True
        if self.layout is None:
            return
        for whole in parameters:
            if whole.is_floating_point() and id(whole) not in self._parameters:
                group = self.groups[-1]
                self._parameters[id(whole)] = ShardedParameter.cut(whole, self.layout, group.index, group.size)

    def shard_of(self, tensor: T) -> T:
        """Return the shard of a sharded parameter, and any other tensor itself."""
        parameter = self._parameters.get(id(tensor))
        if parameter is None:
            return tensor
        parameter.align()
        return parameter.shard  # type: ignore[return-value]

    def replace(self, state: Any, tensors: Mapping[str, Any]) -> Any:
        """Replace sharded parameters in a state dict by their shards; `tensors` has the model's own tensors by key."""
        for key in state:
            if (parameter := self._parameters.get(id(tensors[key]))) is not None:
                state[key] = parameter.shard if state[key].requires_grad else parameter.shard.detach()
        return state

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make all parameters whole in this context, with one all-gather per dtype. An inner context has no effect."""
        if self._is_whole or not self._parameters:
            yield
            return
        self.communicator.require_process()
        self._gather()
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self._free()

    @contextmanager
    def by_stage(self) -> Iterator[None]:
        """Leave it to the program of a step in this context to gather parameters. Afterwards all are freed."""
        self.align()
        self.is_by_stage = True
        try:
            yield
        finally:
            self.is_by_stage = self._is_whole = False
            self._free()

    @contextmanager
    def gathered(self, weights: Container[int]) -> Iterator[None]:
        """Gather the parameters with these ids in this context, and hide the others, in a step whose program gathers parameters."""
        if not self.is_by_stage:
            yield
            return
        own = self.of(weights)
        with hidden((p.whole for p in self.apart_from(weights)), _refusal):
            self.finish(self.start(own))
            try:
                yield
            finally:
                for parameter in own:
                    parameter.free(self.groups[-1].index, self.groups[-1].size)

    def align(self) -> None:
        """Let parameters of the model and their shards require gradients alike: a script may freeze either."""
        for parameter in self._parameters.values():
            parameter.align()

    def refuse_hooks(self) -> None:
        """Raise InputError for a shard with hooks on its gradient: autograd computes that of the whole parameter."""
        if any(gradient_hook_tables(parameter.shard) for parameter in self._parameters.values()):
            raise InputError(
                "a shard of a parameter has a hook on its gradient",
                why="with dp_shard, autograd computes gradients of the model's own parameters, so the hook would never run",
                hint="register it on the parameters of the model, or read .grad of pipe.parameters() after the step",
            )

    def gather_rest(self) -> None:
        """Gather all parameters for the rest of the step: its program does not."""
        if self.is_by_stage:
            self.is_by_stage, self._is_whole = False, True
            self._gather()

    def of(self, weights: Container[int]) -> list[ShardedParameter]:
        """Return the sharded parameters among the weights with these ids."""
        return [parameter for key, parameter in self._parameters.items() if key in weights]

    def apart_from(self, weights: Container[int]) -> list[ShardedParameter]:
        """Return the sharded parameters whose ids are not among these."""
        return [parameter for key, parameter in self._parameters.items() if key not in weights]

    @_normal_tensors
    def start(self, parameters: Sequence[ShardedParameter]) -> list[Gathering]:
        """Start to gather parameters: large ones each into its own memory, the others with one all-gather per dtype."""
        direct, rest = list[ShardedParameter](), list[ShardedParameter]()
        for one in parameters:
            (direct if has_own_message(one, self.groups[-1].size) else rest).append(one)
        return [
            *(Gathering(self._into(one), [one], is_direct=True) for one in direct),
            *(Gathering(self._row(own), own) for own in by_dtype(rest)),
        ]

    @_normal_tensors
    def finish(self, gatherings: Iterable[Gathering]) -> None:
        """Make the parameters of gatherings whole. Raises RankLost."""
        for gathering in gatherings:
            rows = gathering.pending.wait()
            if gathering.is_direct:
                gathering.parameters[0].take()
                continue
            columns = rows.split_with_sizes([p.width for p in gathering.parameters], 1)
            own = zip(gathering.parameters, columns, strict=True)
            if pairs := [pair for parameter, column in own for pair in parameter.copies(column)]:
                foreach_copy(*zip(*pairs, strict=True))
            for parameter in gathering.parameters:
                parameter.take()

    @_normal_tensors
    def release(self, parameters: Iterable[ShardedParameter]) -> None:
        """Free the memory of parameters until they are gathered again in this step."""
        for parameter in parameters:
            parameter.free(self.groups[-1].index, self.groups[-1].size, is_kept=True)

    def reduced(
        self, is_due: Callable[[torch.Tensor], bool], share: float, held: HeldGradients
    ) -> list[GradientBucket]:
        """Start to reduce the gradients of the parameters that are due, weighted by `share`, with what is held for them; return the
        buckets.
        """
        every = self._parameters.values()
        due = [p for p in every if (p.shard.requires_grad or held.has(p.shard)) and is_due(p.whole)]
        return ShardBuckets(self.groups, share, held).start(due) if due else []

    def own_parts(self, share: float) -> list[Part]:
        """Take the gradients of whole parameters, weighted by `share`."""
        trained = [one for one in self._parameters.values() if one.shard.requires_grad]
        parts: list[Part] = [(one.shard, weighed(one.gradient, share)) for one in trained]
        for one in trained:
            one.whole.grad = None
        return parts

    def _gather(self) -> None:
        self.finish(self.start([parameter for parameter in self._parameters.values() if not parameter.is_whole]))

    def _into(self, parameter: ShardedParameter) -> PendingCollective:
        return self.groups[-1].start_all_gather(parameter.local.reshape(-1), parameter.allocated())

    def _row(self, parameters: Sequence[ShardedParameter]) -> PendingCollective:
        row = torch.cat([padded(parameter.local, parameter.width) for parameter in parameters])
        return self.groups[-1].start_all_gather(row)

    @_normal_tensors
    def _free(self) -> None:
        for parameter in self._parameters.values():
            parameter.free(self.groups[-1].index, self.groups[-1].size)


def _refusal(_weight: torch.Tensor) -> InputError:
    return InputError(
        "the loss reads a parameter while it is sharded", why="the analysis of the loss has not seen that"
    )
