"""The backend of a pipeline on ranks: the first rank plans for all, and every rank holds the parameters of its own stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipecompile.batching.microbatches import Weights
from pipecompile.distributed.agreement.first_values import warn_of_other_values
from pipecompile.distributed.agreement.graph_identity import graph_identity, graph_parts
from pipecompile.distributed.agreement.lockstep import Lockstep
from pipecompile.distributed.agreement.model_changes import agree_on_error, agree_on_recording
from pipecompile.distributed.agreement.stale_values import StaleValues
from pipecompile.distributed.agreement.step_agreement import shared_from
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.batchnorm_sync import (
    ReplicatedNorms,
    check_sync_groups,
    sync_batchnorm_layers,
    without_sync,
)
from pipecompile.distributed.data_parallel.replicas import Replicas, broadcast_from_first
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.distributed.loss_parameters import loss_parameters, warn_of_untrained
from pipecompile.distributed.messages.direct_values import DirectValues
from pipecompile.distributed.messages.value_transport import GlooValues, ValueTransport
from pipecompile.distributed.rank_executable import RankExecutable
from pipecompile.distributed.stage_copies import check_loss, check_stateless
from pipecompile.distributed.tied_copies import TiedCopies, place_on_ranks
from pipecompile.driver.backend import Backend
from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.loss_shares import COUNTED
from pipecompile.errors import PipecompileError
from pipecompile.graph.cross_sample import check_sync_batchnorm
from pipecompile.graph.stages import Stage
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.placement import Homes, tensor_uses
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.planning.planner import Planned
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from pipecompile.runtime.executable import Executable
from pipecompile.settings.direction_choice import other_placements
from pipecompile.text.units import counted
from pipecompile.tracing.guards.state_guards import ReadChange
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["RankBackend", "owner_of", "values_of"]

DIRECT_TYPES = {"cuda"}
"""Types of devices between which values go directly, not through the CPU."""


class RankBackend(Backend):
    """The decisions of one rank. `shards` and `replicas` are the rank's part in the data-parallel meshes."""

    def __init__(self, communicator: Communicator) -> None:
        ranks = communicator.ranks
        self.communicator, self.lockstep = communicator, Lockstep(communicator)
        self.values = values_of(communicator)
        self.overlaps = self.values.streams is not None
        self.holds_model = False
        self._is_planned = False
        self.begins = True  # with the values that the model has: a copy of a pipeline has those of its ranks
        self.has_values = False  # of a pipeline that was copied
        self.is_extra_loaded = False  # since the last recording: what a forward reads may be other than on other ranks
        self.shards = ShardedParameters(ranks.shard_mesh, communicator, ranks.shard_layout)
        group = ranks.replica_group
        self.copies = None if group is None else CollectiveGroup(group, communicator)
        self.replicas = Replicas(self.copies, self.shards)
        self.has_copies = group is not None
        self.model: nn.Module | None = None  # set by the pipeline
        self.is_here: Callable[[torch.Tensor], bool] = lambda _: True  # set by the pipeline
        self.has_home: Callable[[torch.Tensor], bool] = lambda _: True  # set by the pipeline
        self.new_parameters: list[nn.Parameter] = []  # that have a home since the last recording
        self.stale_values = StaleValues(self._elsewhere)
        self._of_loss: list[Any] | None = None  # its parameters on this rank, once stages are placed

    def continue_from(self, copied: CompileContext) -> None:
        """Begin with the values that a pipeline has whose model was copied, if it is compiled: each replica has buffers of its own."""
        self.begins = not copied.homes
        self.has_values = not self.begins and copied.meta_init.is_done

    @property
    def is_planner(self) -> bool:
        """Whether this rank plans: the first of all, and of each copy of the pipeline what a copy records later, by itself."""
        ranks = self.communicator.ranks
        return ranks.rank == (ranks.copy[0] if self._is_planned else ranks.members[0])

    @cached_property
    def pipeline(self) -> CollectiveGroup:
        """The ranks that run the stages of one copy of the pipeline."""
        return CollectiveGroup(self.communicator.ranks.group, self.communicator)

    def without_collectives(self, model: nn.Module, options: Options) -> AbstractContextManager[None]:
        """Return a context in which SyncBatchNorm layers compute alone, as recording and measuring need.

        Raises InputError for SyncBatchNorm layers whose process groups would wait forever in a step.
        """
        if layers := sync_batchnorm_layers(model):
            check_sync_batchnorm(model, options.batch_norm, options.dispatch)
            check_sync_groups(layers, self.communicator.ranks.replica_group)
            self.communicator.groups.note_layers(layer.process_group or dist.group.WORLD for layer in layers.values())
        return without_sync([*layers.values()])

    def gather_text(self, topic: str, text: str) -> list[str]:
        return self.communicator.all_gather_text(topic, text)

    def united(self, names: Collection[str]) -> set[str]:
        if self.communicator.ranks.size == 1:
            return set(names)
        return {name for text in self.pipeline.all_gather_text(" ".join(names)) for name in text.split()}

    def in_common(self, found: int, accepted: Callable[[], set[int]]) -> int:
        """Return the number of a recording that all ranks of the pipeline can use, the highest one; 0 if there is none.

        A change of the model may concern a parameter of one rank alone.
        """
        if self.communicator.ranks.size == 1:
            return found
        compared = self.lockstep.recordings(found) if self.lockstep.is_pending else self.lockstep.taken()
        if compared is None:
            highest, negative = self.pipeline.max(torch.tensor([found, -found], device="cpu")).tolist()
            compared = highest, -negative
        highest, lowest = compared
        if highest == lowest or not lowest:
            return found if highest == lowest else 0
        mine = accepted()
        numbers = range(1, highest + 1)
        missing = torch.tensor([number not in mine for number in numbers], dtype=torch.uint8, device="cpu")
        common = (self.pipeline.max(missing) == 0).nonzero()
        return int(common.max()) + 1 if common.numel() else 0

    def agree_on_graph(
        self, graph: TracedGraph, n_stages: int, counts: Sequence[int], changes: Sequence[ReadChange] = ()
    ) -> None:
        is_alone = not self.has_copies or self._is_planned  # copies may have parts of the batch of other sizes
        text = f"in {counted(n_stages, 'stage')}"
        if not self.has_copies:
            text += f", {' or '.join(map(str, counts))} micro-batches"
        identity, structure = (
            f"{graph_identity(graph, constants=some, with_numbers=is_alone)} {text}" for some in (True, False)
        )
        inputs = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
        agree_on_recording(self.communicator, identity, structure, changes, inputs=inputs,
                           is_loaded=self.is_extra_loaded, in_copy=self._is_planned,
                           parts=partial(graph_parts, graph, with_numbers=is_alone),
                           written=sorted(self.replicas.state.written()))  # fmt: skip
        self.is_extra_loaded = False
        if self.model is not None:
            models = (self.model, graph) if self.begins else (self.model,)
            named = chain(*((*each.named_parameters(), *each.named_buffers()) for each in models))
            compared = [(name, tensor) for name, tensor in named if self.begins or self._is_new(tensor)]
            warn_of_other_values(self.communicator, compared, is_first=self.begins)
            self.begins = False
            self.new_parameters.clear()

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return not self.has_home(tensor) or any(tensor is one for one in self.new_parameters)

    def agree_on_error(self, error: PipecompileError) -> None:
        agree_on_error(self.communicator, error, in_copy=self._is_planned)

    def used(self, recording: int) -> None:
        self.lockstep.compare_samples(recording)

    def share_plan(self, planned: Planned | None) -> Planned:
        """Send the plan and the samples of its micro-batches from the planner to the others. The problem stays with the planner."""
        text = "" if planned is None else f"{planned.samples or ''}\n{planned.plan.to_json()}"
        first = self.communicator.all_gather_text("plan", text, in_copy=self._is_planned)[0]
        self._is_planned = True
        if planned is not None:
            return planned
        samples, _, plan = first.partition("\n")
        return Planned(Plan.from_json(plan), None, int(samples) if samples else None)

    def place(
        self,
        model: nn.Module,
        graph: TracedGraph,
        stages: Sequence[Stage],
        plan: Plan,
        options: Options,
        homes: Homes,
    ) -> Mirrors:
        self._is_planned = True
        here, placements = self.communicator.ranks.index, (plan.placement, *other_placements(options))
        if len(placements) > 1:
            check_stateless(stages, len(placements))
            check_loss(options.loss_fn, model, len(placements))
        copies = place_on_ranks(graph, stages, options.devices[here], placements, homes, self.values, here)
        last = plan.placement[-1]
        if here == last:
            homes.move_unused(model, options.devices[last])
        self._note_loss(options.loss_fn, model, last)
        homes.assign_unused(model, last)  # the loss may use it
        return copies

    def _note_loss(self, loss: Callable[..., Any] | None, model: nn.Module, last: int) -> None:
        """Note the parameters of the loss on its rank; warn of them on others, once."""
        is_first, ranks = self._of_loss is None, self.communicator.ranks
        self._of_loss = loss_parameters(loss, model) if ranks.index == last else []
        if is_first and ranks.index != last:
            warn_of_untrained(loss, model, ranks.rank_of(last))

    def parameters_of_loss(self, loss: Callable[..., Any] | None) -> list[Any]:
        """Return the parameters of the loss that this rank trains; all of them before stages are placed."""
        if self._of_loss is None:
            return [] if self.model is None else loss_parameters(loss, self.model)
        return self._of_loss

    def deferred_norms(self, norms: DeferredNorms) -> DeferredNorms:
        if self.copies is None:
            return norms
        return ReplicatedNorms(norms, self.copies, lambda: self.model if self.replicas.is_unlike else None)

    def executable(self, mirrors: Mirrors) -> Callable[..., Executable]:
        assert isinstance(mirrors, TiedCopies)  # of the program's binding
        return partial(
            RankExecutable,
            communicator=self.communicator,
            values=self.values,
            placements=mirrors.placements,
            replicas=self.replicas,
            stale_values=self.stale_values,
        )

    def _elsewhere(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers, by name, that live on other ranks of the pipeline."""
        if self.model is None or self.communicator.ranks.size == 1:
            return {}
        named = chain(self.model.named_parameters(), self.model.named_buffers())
        return {name: tensor for name, tensor in named if not self.is_here(tensor)}

    def weigh(self, count: float, unit: str, floor: float = 0.0) -> None:
        self.replicas.weigh(count, unit, floor)

    def loss_uses(self, weights: frozenset[int]) -> None:
        self.replicas.loss_weights = weights

    def loss_values(self, weights: frozenset[int]) -> AbstractContextManager[None]:
        return self.shards.gathered(weights)

    def weights_of_target(self, weights: Weights, last: int) -> Weights:
        """Return the weights of the rank with the last stage, and weight this copy as that rank does. Others may have a placeholder."""
        if self.communicator.ranks.size == 1 or self.lockstep.is_whole:
            return weights
        with torch.inference_mode(False):
            numbers = torch.tensor([*self.replicas.weighed, *weights[0]], dtype=torch.float64, device="cpu")
            samples, floor, is_counted, *shared = shared_from(self.communicator, last, "weights", numbers).tolist()
            if self.communicator.ranks.index == last:
                return weights
            self.replicas.weigh(samples, COUNTED if is_counted else "samples", floor)
            return shared, torch.tensor(shared, dtype=torch.float64, device="cpu")

    def values_ready(self, graph: TracedGraph, stages: Sequence[Stage], homes: Homes) -> None:
        """Broadcast this rank's parameters from the first copy of the pipeline, then shard them."""
        used = self._own((tensor for _, tensor in tensor_uses(graph, stages)), homes)
        model = () if self.model is None else (*self.model.parameters(), *self.model.buffers())
        if not self.has_values:
            broadcast_from_first([*(used | self._own(model, homes)).values(), *(self._of_loss or ())], self.copies)
        self.shards.shard(tensor for tensor in used.values() if isinstance(tensor, nn.Parameter))

    def _own(self, tensors: Iterable[torch.Tensor], homes: Homes) -> dict[int, torch.Tensor]:
        """Return the tensors that live on this rank, each once."""
        return {id(tensor): tensor for tensor in tensors if owner_of(tensor, homes) == self.communicator.ranks.index}


def owner_of(tensor: torch.Tensor, homes: Homes) -> int:
    """Return the pipeline device where a tensor lives. A tensor that no stage uses lives with the last stage, and so with the loss."""
    home = homes.find(tensor)
    home = homes.rest if home is None else home
    return home if isinstance(home, int) else 0


def values_of(communicator: Communicator) -> ValueTransport:
    """Return the transport of values between ranks on the devices of their mesh."""
    ranks = communicator.ranks
    is_direct = ranks.size > 1 and ranks.device_type in DIRECT_TYPES
    return DirectValues(communicator) if is_direct else GlooValues(communicator)
