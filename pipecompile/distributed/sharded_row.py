"""The actions of a row on sharded parameters, as functions: what they gather, free and reduce, and who waits for it.

    row        0UNSHARD  2UNSHARD  0F0      0F1  0RESHARD  2F0 ...  2B1  2REDUCE_GRAD
    gathers   [ 0 ─────][ 2 ──────────]                                  [ the gradients of 2 ──
                                   waits                   waits

A weight that several stages of the row use is gathered for the first, freed behind the last, and reduced with the last. What is tied
to another rank, and what no action gathers, is whole for the length of the step. A value that leaves a stage may be a view of a weight:
the weight then stays until the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pipecompile.distributed.data_parallel import Replicas
from pipecompile.distributed.sharded_parameters import Gathering
from pipecompile.errors import RunError
from pipecompile.ir import Action, Instruction, Kind
from pipecompile.runtime.cells.forward_backward import SavedGraph
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private import pytree
from pipecompile.torch_private.storages import storage_key

__all__ = ["ShardedRow"]


class ShardedRow:
    """The parameters of the stages of a row, in one step after the other.

    `weights` has the ids of the weights of every stage, and `tied` those that other ranks use as well. `gathered` are the stages with an
    UNSHARD, `reduced` those with a REDUCE_GRAD. `managed` are the ids of the weights that actions gather and free.
    """

    def __init__(
        self,
        replicas: Replicas,
        row: Sequence[Instruction],
        weights: Sequence[frozenset[int]],
        tied: frozenset[int] = frozenset(),
    ) -> None:
        self.replicas, self.shards, self.weights, self.tied = replicas, replicas.shards, weights, tied
        actions = [one.action for one in row if one.action is not None]
        self.gathered, self.reduced = (
            frozenset(action.stage for action in actions if action.kind is kind)
            for kind in (Kind.UNSHARD, Kind.REDUCE_GRAD)
        )
        self.managed = frozenset[int]().union(*(weights[stage] for stage in self.gathered)) - tied
        self.users: dict[int, set[int]] = {}
        for stage in sorted({action.stage for action in actions}):
            for weight in weights[stage]:
                self.users.setdefault(weight, set()).add(stage)
        self._is_loss_checked = False
        self._reset()

    def _reset(self) -> None:
        self._whole, self._done, self._pinned = set[int](), set[int](), set[int]()
        self._pending: dict[int, list[Gathering]] = {}
        self._storages: dict[int, int] = {}

    def begin(self) -> None:
        """Gather what no action gathers; all, if the row gathers nothing or the copies run different programs. Raises RankLost."""
        self._reset()
        if self.shards.is_by_stage and (not self.gathered or self.replicas.is_unlike):
            self.shards.gather_rest()
        elif self.shards.is_by_stage:
            self.shards.finish(self.shards.start(self.shards.apart_from(self.managed)))

    def run(self, action: Action) -> Run:
        """Return the function of an action on the parameters of a stage."""
        stage = action.stage
        act = {Kind.UNSHARD: self.unshard, Kind.RESHARD: self.reshard, Kind.REDUCE_GRAD: self.reduce}[action.kind]
        return lambda _frame: act(stage)

    def around(self, action: Action, run: Run, outputs: Sequence[int], saved: int | None = None) -> Run:
        """Return the function of a computation that waits for its parameters.

        `outputs` are the registers of the values that leave it, and `saved` is that of what a backward of the last stage reads.
        """
        stage = action.stage
        if stage not in self.gathered:
            return run

        def run_when_whole(frame: Frame) -> None:
            self.wait(stage)
            if saved is not None:
                self.check_loss(frame.registers[saved])
            run(frame)
            if outputs and self._storages:
                self.pin(frame.registers[index] for index in outputs)

        return run_when_whole

    def unshard(self, stage: int) -> None:
        """Start to gather the parameters of a stage that are not whole."""
        if not self.shards.is_by_stage:
            return
        for other in [one for one in self._pending if self.weights[one] & self.weights[stage]]:
            self.wait(other)
        self._whole.add(stage)
        due = self.shards.of(self.weights[stage] & self.managed)
        self._pending[stage] = self.shards.start([parameter for parameter in due if not parameter.is_whole])

    def wait(self, stage: int) -> None:
        """Make the parameters of a stage whole. Raises RankLost."""
        if (gatherings := self._pending.pop(stage, None)) is None:
            return
        self.shards.finish(gatherings)
        for parameter in (parameter for one in gatherings for parameter in one.parameters):
            if parameter.memory is not None:
                self._storages[storage_key(parameter.memory)] = id(parameter.whole)

    def reshard(self, stage: int) -> None:
        """Free the parameters of a stage that no other stage has whole."""
        if not self.shards.is_by_stage:
            return
        self.wait(stage)
        self._whole.discard(stage)
        used = self._pinned.union(*(self.weights[one] for one in self._whole))
        self.shards.release(self.shards.of((self.weights[stage] & self.managed) - used))

    def reduce(self, stage: int) -> None:
        """Start to reduce the gradients of a stage, but those that other stages of the row add to later."""
        self._done.add(stage)
        if self.replicas.group is not None:
            complete = {weight for weight in self.weights[stage] if self.users[weight] <= self._done} - self.tied
            self.replicas.reduce(complete)

    def pin(self, values: Iterable[Any]) -> None:
        """Keep the weights that values share their memory with until the end of the step."""
        for value in values:
            leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    self._pinned |= {self._storages.get(storage_key(leaf), 0)} - {0}

    def check_loss(self, graph: Any) -> None:
        """Raise RunError if the loss uses a parameter that an action may have freed: one that the last stage does not use.

        `graph` is what the last stage saved for a backward. The first step that gathers by stage is checked.
        """
        if self._is_loss_checked or not self.shards.is_by_stage:
            return
        self._is_loss_checked = True
        foreign = self.managed - self.weights[-1]
        nodes = [edge.node for edge in graph.edges if edge is not None] if isinstance(graph, SavedGraph) else []
        if any(id(leaf) in foreign for leaf in _leaves(nodes)):
            last = len(self.weights) - 1
            raise RunError(
                "the loss uses a weight of another stage than the last",
                stage=last,
                microbatch=0,
                why="the schedule frees the parameters of that stage while the last one runs",
                hint="a schedule without UNSHARD, under which all parameters are whole for the length of a step",
            )


def _leaves(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves of an autograd graph."""
    todo, seen = [*nodes], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        todo += [following for following, _ in node.next_functions]
