"""The builds of a pipeline on ranks: the first member of the mesh makes the plan, all others take it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.distributed.batchnorm_sync import (
    ReplicatedNorms,
    check_sync_groups,
    sync_batchnorm_layers,
    without_sync,
)
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel import Replicas, broadcast_from_first
from pipecompile.distributed.rank_executable import RankExecutable
from pipecompile.distributed.sharded_parameters import ShardedParameters
from pipecompile.distributed.tied_copies import place_on_ranks
from pipecompile.driver.compile_cache import Builds
from pipecompile.driver.specialization import Build
from pipecompile.graph.fingerprint import fingerprint, node_lines
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.placement import tensor_uses
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.partitioners import Problem
from pipecompile.planning.planner import Chosen
from pipecompile.runtime.cells.deferred_batchnorm import check_alone
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["RankBuilds"]


class RankBuilds(Builds):
    def __init__(self, model: nn.Module, options: Options, communicator: Communicator) -> None:
        super().__init__(model, options)
        self.communicator, self.meta_init.gather = communicator, communicator.all_gather_text
        self.shards = ShardedParameters(communicator.ranks.shard_mesh, communicator)
        self.copies = (
            None
            if communicator.ranks.replica_group is None
            else CollectiveGroup(communicator.ranks.replica_group, communicator)
        )
        self.replicas = Replicas(self.copies, self.shards)

    def find(self, inputs: FlatInputs) -> tuple[Build, MiniBatch]:
        with self._left_alone():
            return super().find(inputs)

    def join(self, build: Build, batch: MiniBatch) -> None:
        with self._left_alone():
            super().join(build, batch)

    def _left_alone(self) -> AbstractContextManager[None]:
        """Recording and measuring, ranks do not wait for each other. Raises InputError for layers that always would."""
        if layers := sync_batchnorm_layers(self.model):
            check_alone(self.model, self.options.batch_norm, self.options.dispatch)
            check_sync_groups(layers, self.communicator.ranks.replica_group)
        return without_sync([*layers.values()])

    def _new_plan(self, graph: TracedGraph, first: FlatInputs, count: int) -> tuple[Plan, Problem | None]:
        self._agree(graph, f"{count} micro-batches")
        plan, problem, _ = self._shared(lambda: (*super(RankBuilds, self)._new_plan(graph, first, count), None))
        return plan, problem

    def _chosen(self, graph: TracedGraph, inputs: FlatInputs, counts: tuple[int, ...]) -> Chosen:
        self._agree(graph, f"{' or '.join(map(str, counts))} micro-batches")
        return self._shared(lambda: super(RankBuilds, self)._chosen(graph, inputs, counts))

    def _agree(self, graph: TracedGraph, counts: str) -> None:
        lines = node_lines(graph)
        asked = f"{len(lines)} nodes (fingerprint {fingerprint(lines)}) in {self.options.n_stages} stages"
        self.communicator.agree("graph of the model", f"{asked}, {counts}")

    def _shared(self, make: Callable[[], Chosen]) -> Chosen:
        """What the first member makes, on all: the plan, there alone its problem, and the samples of its micro-batches."""
        if self.communicator.ranks.member_index == 0:
            plan, problem, samples = make()
            self.communicator.all_gather_text("plan", f"{samples or ''}\n{plan.to_json()}")
            return plan, problem, samples
        number, _, text = self.communicator.all_gather_text("plan", "")[0].partition("\n")
        return Plan.from_json(text), None, int(number) if number else None

    def _mirrors(self, build: Build) -> Mirrors:
        copies = place_on_ranks(build, self._homes, self.communicator)
        build.executable = partial(
            RankExecutable,
            communicator=self.communicator,
            placement=build.plan.placement,
            replicas=self.replicas,
            tied=copies.tied,
        )
        if self.communicator.ranks.index == 0:
            self._homes.move_unused(self.model, self.options.devices[0])
        return copies

    def _place(self, build: Build, seconds: float) -> None:
        super()._place(build, seconds)
        if self.copies is not None:
            build.norms = ReplicatedNorms(build.norms, self.copies)
        if not self and self.meta_init.is_done:
            self._align(build)

    def check_values(self) -> None:
        if self.meta_init.check():
            self._align(self.latest)

    def _align(self, build: Build) -> None:
        held = {
            id(tensor): tensor
            for _, tensor in tensor_uses(build.graph, build.stages)
            if self.owner(tensor) == self.communicator.ranks.index
        }
        broadcast_from_first(held.values(), self.communicator.ranks.replica_group)
        self.shards.shard(tensor for tensor in held.values() if isinstance(tensor, nn.Parameter))

    def owner(self, tensor: torch.Tensor) -> int:
        """The pipeline device that a tensor lives on; what no stage uses lives on the first."""
        home = self._homes.find(tensor)
        return home if isinstance(home, int) else 0
