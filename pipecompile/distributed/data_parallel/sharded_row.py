"""The actions of a row on sharded parameters, as functions: they gather, free and reduce, and later actions wait for them.

    row        0UNSHARD  2UNSHARD  0F0      0F1  0RESHARD  2F0 ...  2B1  2REDUCE_GRAD
    gathers   [ 0 ─────][ 2 ──────────]                                  [ the gradients of 2 ──
                                   waits                   waits

A weight that several stages of the row use is gathered for the first, freed behind the last, and reduced with the last. The last
stage uses what the loss uses, by its analysis (driver/loss_shares.py). What is tied to another rank, and what no action gathers, is
whole for the length of the step. A value that leaves a stage may be a view of a weight: the weight then stays until the end of the
step. While a weight is not whole, it is hidden: a hook, or a loss that could not be analysed, that reads it raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pipecompile.distributed.data_parallel.replicas import Replicas
from pipecompile.distributed.data_parallel.sharded_parameter import ShardedParameter
from pipecompile.distributed.data_parallel.sharded_parameters import Gathering
from pipecompile.errors import InputError
from pipecompile.ir import Action, Instruction, Kind
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private import pytree
from pipecompile.torch_private.hidden_values import hide
from pipecompile.torch_private.storages import storage_key

__all__ = ["ShardedRow"]


class ShardedRow:
    """The parameters of the stages of a row, in one step after the other.

    `weights` has the ids of the weights of every stage, and `tied` those that other ranks use as well. `gathered` are the stages with an
    UNSHARD, `reduced` those with a REDUCE_GRAD. `managed` are the ids of the weights that actions gather and free. `names` returns the
    names of weights by id.
    """

    def __init__(
        self,
        replicas: Replicas,
        row: Sequence[Instruction],
        weights: Sequence[frozenset[int]],
        tied: frozenset[int] = frozenset(),
        names: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.replicas, self.shards, self.tied, self.names = replicas, replicas.shards, tied, names
        actions = [one.action for one in row if one.action is not None]
        self.gathered, self.reduced = (
            frozenset(action.stage for action in actions if action.kind is kind)
            for kind in (Kind.UNSHARD, Kind.REDUCE_GRAD)
        )
        self.stages = sorted({action.stage for action in actions})
        self._own, self._loss = tuple(weights), frozenset[int]()
        self._follow_loss()
        self._reset()

    def _follow_loss(self) -> None:
        """Count what the loss uses among the weights of the last stage, if this row has it."""
        last, own = len(self._own) - 1, self._own
        managed = frozenset[int]().union(*(own[stage] for stage in self.gathered)) - self.tied
        used = self._loss if last in self.stages else frozenset[int]()
        self.managed = managed if last in self.gathered else managed - used
        self.weights = (*own[:-1], own[-1] | (used & self.managed))
        self.users: dict[int, set[int]] = {}
        for stage in self.stages:
            for weight in self.weights[stage]:
                self.users.setdefault(weight, set()).add(stage)

    def _reset(self) -> None:
        self._whole, self._done, self._pinned = set[int](), set[int](), set[int]()
        self._pending: dict[int, list[Gathering]] = {}
        self._storages: dict[int, int] = {}

    def begin(self) -> None:
        """Gather what no action gathers; all, if the row gathers nothing or the copies run different programs. Raises RankLost."""
        self._reset()
        if self._loss != self.replicas.loss_weights:
            self._loss = self.replicas.loss_weights
            self._follow_loss()
        if self.shards.is_by_stage and (not self.gathered or self.replicas.is_unlike):
            self.shards.gather_rest()
        elif self.shards.is_by_stage:
            self.shards.finish(self.shards.start(self.shards.apart_from(self.managed)))
            self.hide(self.shards.of(self.managed))

    def run(self, action: Action) -> Run:
        """Return the function of an action on the parameters of a stage."""
        stage = action.stage
        act = {Kind.UNSHARD: self.unshard, Kind.RESHARD: self.reshard, Kind.REDUCE_GRAD: self.reduce}[action.kind]
        return lambda _frame: act(stage)

    def around(self, action: Action, run: Run, outputs: Sequence[int]) -> Run:
        """Return the function of a computation that waits for its parameters. `outputs` are the registers of the values that leave it."""
        stage = action.stage
        if stage not in self.gathered:
            return run

        def run_when_whole(frame: Frame) -> None:
            self.wait(stage)
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
        freed = self.shards.of((self.weights[stage] & self.managed) - used)
        self.shards.release(freed)
        self.hide(freed)

    def hide(self, parameters: Iterable[ShardedParameter]) -> None:
        """Make every read of the values of parameters raise an error until they are whole again."""
        for parameter in parameters:
            hide(parameter.whole, self.refusal)

    def refusal(self, weight: torch.Tensor) -> InputError:
        """Return the error for a weight that is read while it is sharded."""
        stages = [stage for stage in self.stages if id(weight) in self._own[stage]]
        others = [stage for stage in sorted(self.gathered) if stage not in stages]
        return InputError(
            f"the values of {self.names().get(id(weight), 'a parameter')} are read while it is sharded",
            why=f"the schedule has them gathered while stage {', '.join(map(str, stages))} runs; a hook, or the loss, reads them at another time",
            hint=f"pc.insert_sharding(schedule, {others}): other stages are then gathered for the length of a step",
        )

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
